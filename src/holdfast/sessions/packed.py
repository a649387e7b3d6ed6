"""The three packed values of a session's row: what it is subscribed to, how far it has come, what is in flight.

    one byte: version │ four bytes: checksum │ MessagePack, mostly lists of small differences

**How far it has come** is said twice, and a message is owed to a subscription if neither says that it is done:

    session     done for every subscription: one map for all of them, since a session reads each stream once
    own         by the number of a subscription: done for this one besides, because it began later than the others, or
                because the session went back for another one

A subscription that is told to start somewhere gets a new number, so nothing that was ever said of the old one applies
to it; and going back lowers `session` only after what each of the others has had is written to its `own`.

QoS 2 publishes *of* the client are not here: their packet ids are stored with the append that they belong to.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, TypeVar

import msgspec

from holdfast.cursors.cursor import Cursor
from holdfast.cursors.cursor_map import DONE, CursorMap, Progress, past_of, to_cursor, union
from holdfast.errors import RequestError
from holdfast.model import Stream
from holdfast.sessions.positions import GAPS_MAX, Gap
from holdfast.sessions.window import PACKET_ID_MAX, RELEASED

VERSION = 1
NUMBER_MAX = 1 << 40
"""Generations, shards and subscription numbers are below: larger ones are damage."""

T = TypeVar("T")
Ints = list[int | None]
"""None stands for DONE."""


# ---------------------------------------------------------------------------------------- subscriptions


class StoredSubscription(msgspec.Struct, array_like=True, frozen=True):
    """One filter and its options, shared ones included."""

    filter: str
    qos: int
    no_local: bool = False
    retain_as_published: bool = False
    retain_handling: int = 0
    identifier: int = 0
    number: int = 0
    """Never given twice in one session: what `StoredCursors.own` goes by."""
    born: str = ""
    """Of a shared one: which group it is in."""


class StoredSubscriptions(msgspec.Struct, array_like=True):
    """All of a session's."""

    entries: list[StoredSubscription] = []
    next_number: int = 1


def pack_subscriptions(subscriptions: StoredSubscriptions) -> bytes:
    return _framed(b"s", subscriptions)


def unpack_subscriptions(data: bytes, client_id: str) -> StoredSubscriptions:
    """RequestError, with the client's name, if it cannot be read. Nothing stored: no subscriptions."""
    if not data:
        return StoredSubscriptions()
    found = _opened(b"s", data, StoredSubscriptions, "subscriptions", client_id)
    for entry in found.entries:
        if not (0 <= entry.qos <= 2 and 0 <= entry.number < found.next_number):
            raise _damaged("subscriptions", client_id, f"{entry.filter!r} has QoS {entry.qos}, number {entry.number}")
    return found


# ---------------------------------------------------------------------------------------------- cursors


@dataclass(slots=True)
class StoredCursors:
    """How far a session has come, and what it did not get."""

    session: CursorMap = field(default_factory=CursorMap)
    """Done for every subscription."""
    own: dict[int, CursorMap] = field(default_factory=dict)
    """By subscription number: done for this one besides. Several may share one map."""
    gaps: list[Gap] = field(default_factory=list)
    """Records of what was skipped, the oldest first."""

    def get(self, number: int, stream: Stream) -> Progress:
        """What is done for one subscription in one stream."""
        shared, own = self.session.get(stream), self.own.get(number)
        return shared if own is None else union(shared, own.get(stream))

    def cursor(self, number: int, stream: Stream) -> Cursor:
        """The same as a cursor, for stores that keep one for each subscription and stream."""
        return to_cursor(self.get(number, stream))

    def copy(self) -> StoredCursors:
        copies = {id(own): own.copy() for own in self.own.values()}
        own = {number: copies[id(own)] for number, own in self.own.items()}
        return StoredCursors(self.session.copy(), own, list(self.gaps))

    def note(self, gaps: Iterable[Gap]) -> list[Gap]:
        """Keep a record of these; those that are new."""
        known = {(gap.stream, gap.first) for gap in self.gaps}
        new = [gap for gap in gaps if (gap.stream, gap.first) not in known]
        self.gaps = [*self.gaps, *new][-GAPS_MAX:]
        return new


class _CursorsBody(msgspec.Struct, array_like=True):
    session: Ints
    own: list[tuple[Ints, list[int]]]
    """Maps, and the numbers they are said of: each as the difference from the one before."""
    gaps: list[tuple[str, int, int | None, str, float]]


def pack_cursors(cursors: StoredCursors) -> bytes:
    return _framed(
        b"c",
        (
            _map_to_ints(cursors.session),
            _own_to_ints(cursors.own) if cursors.own else (),
            [(g.stream, g.first, g.past, g.reason, g.at) for g in cursors.gaps[-GAPS_MAX:]],
        ),
    )


def unpack_cursors(data: bytes, client_id: str) -> StoredCursors:
    """RequestError, with the client's name, if it cannot be read. Nothing stored: nothing is done."""
    if not data:
        return StoredCursors()
    body = _opened(b"c", data, _CursorsBody, "cursors", client_id)
    try:
        return StoredCursors(
            _map_from_ints(body.session),
            _own_from_ints(body.own),
            [Gap(*gap) for gap in body.gaps],
        )
    except ValueError as error:
        raise _damaged("cursors", client_id, str(error)) from None


def _own_to_ints(own: dict[int, CursorMap]) -> list[tuple[Ints, list[int]]]:
    """Filters that were subscribed to together have the same to say, however many they are."""
    found: dict[int, tuple[Ints, list[int]]] = {}
    last: dict[int, int] = {}
    for number in sorted(own):
        each = own[number]
        if not each.nothing:
            key = id(each)
            if key not in found:
                found[key] = (_map_to_ints(each), [])
            found[key][1].append(number - last.get(key, 0))
            last[key] = number
    return list(found.values())


def _own_from_ints(stored: list[tuple[Ints, list[int]]]) -> dict[int, CursorMap]:
    found: dict[int, CursorMap] = {}
    for ints, steps in stored:
        own, number = _map_from_ints(ints), 0
        for step in steps:
            number += step
            if not 0 < step < NUMBER_MAX or number in found:
                raise ValueError(f"{step} does not lead to a subscription's number")
            found[number] = own
    return found


def _map_to_ints(cursors: CursorMap) -> Ints:
    """Number of spans; spans; then runs of neighbouring shards, each with a number per stream and its ranges."""
    spans = cursors.spans
    out: Ints = [len(spans)]
    before = 0
    for begin, past in spans:
        out += (begin - before, None if past == DONE else past)
        before = begin
    before = 0
    for generation in sorted(cursors.streams):
        shards = cursors.streams[generation]
        for first, count in _runs(sorted(shards)):
            out += (generation - before, first, count)
            before, level, ranges = generation, 0, 0
            for shard in range(first, first + count):
                progress = shards[shard]
                if progress == DONE:
                    out.append(None)
                    continue
                if not isinstance(progress, int):
                    ranges += 1
                    progress = progress.floor
                out.append(progress - level)
                level = progress
            out.append(ranges)
            if ranges:
                _ranges_to_ints([(s - first, shards[s]) for s in range(first, first + count)], out)
    return out


def _runs(sorted_numbers: Sequence[int]) -> list[tuple[int, int]]:
    """Neighbours together: the first, and how many."""
    count = len(sorted_numbers)
    if sorted_numbers[-1] - sorted_numbers[0] == count - 1:
        return [(sorted_numbers[0], count)]
    runs: list[tuple[int, int]] = []
    for number in sorted_numbers:
        if runs and number == runs[-1][0] + runs[-1][1]:
            runs[-1] = (runs[-1][0], runs[-1][1] + 1)
        else:
            runs.append((number, 1))
    return runs


def _ranges_to_ints(progress: list[tuple[int, Progress]], out: Ints) -> None:
    for index, cursor in progress:
        if isinstance(cursor, Cursor):
            acked, end = cursor.acked, cursor.floor
            out += (index, len(acked))
            for first, last in acked:
                out += (first - end, last - first)
                end = last + 1


def _map_from_ints(ints: Ints) -> CursorMap:
    """ValueError if it is none."""
    left = _Reader(ints)
    spans: list[tuple[int, int]] = []
    begin = 0
    for at in range(left.count(1)):
        step = left.number()
        if (at == 0) != (step == 0):
            raise ValueError(f"span {at} begins {step} generations after the one before")
        begin += step
        spans.append((begin, left.offset()))
    found = CursorMap(spans)
    generation, shard = 0, 0
    while left:
        if step := left.number():
            generation, shard = generation + step, 0
        first = left.number()
        if first < shard:
            raise ValueError(f"shard {first} of generation {generation} is not in order")
        count = left.count(1)
        shard = first + count
        progress: list[Progress] = []
        level = 0
        for _ in range(count):
            step_or_done = left.any()
            if step_or_done is None:
                progress.append(DONE)
                continue
            level += step_or_done
            if not 0 <= level < DONE:
                raise ValueError(f"{level} is no offset")
            progress.append(level)
        for _ in range(left.count()):
            index = left.number()
            if index >= count:
                raise ValueError(f"ranges of stream {index} among {count}")
            progress[index] = _cursor_from_ints(past_of(progress[index]), left)
        for at, each in enumerate(progress):
            found.set(Stream("", first + at, generation), each)
    return found


def _cursor_from_ints(floor: int, left: _Reader) -> Cursor:
    cursor, end = Cursor(floor - 1), floor
    for _ in range(left.count(1)):
        first = end + left.number(1)
        last = first + left.number()
        if last >= DONE:
            raise ValueError(f"{last} is no offset")
        cursor.ack_range(first, last)
        end = last + 1
    return cursor


class _Reader:
    """Numbers one by one, each of which must be there and in bounds."""

    __slots__ = ("_at", "_ints")

    def __init__(self, ints: Ints):
        self._ints, self._at = ints, 0

    def __bool__(self) -> bool:
        return self._at < len(self._ints)

    def any(self) -> int | None:
        at = self._at
        if at >= len(self._ints):
            raise ValueError("it ends too early")
        self._at = at + 1
        return self._ints[at]

    def offset(self) -> int:
        found = self.any()
        if found is None:
            return DONE
        if not 0 <= found < DONE:
            raise ValueError(f"{found} is no offset")
        return found

    def number(self, least: int = 0) -> int:
        found = self.any()
        if found is None or not least <= found < NUMBER_MAX:
            raise ValueError(f"expected a number from {least}, got {found}")
        return found

    def count(self, least: int = 0) -> int:
        """A number of things that follow, so that damage cannot ask for more than there is."""
        found = self.number(least)
        if found > len(self._ints) - self._at:
            raise ValueError(f"{found} entries in {len(self._ints)} numbers")
        return found


# ---------------------------------------------------------------------------------------------- packets


class Flight(NamedTuple):
    """One delivery that the client has not answered for good."""

    packet_id: int
    qos: int
    """1, 2 or RELEASED."""
    stream: Stream | None = None
    """None: nobody's any more; only its packet id is taken."""
    offset: int = 0
    share: int = 0
    """Number of the shared subscription that it was delivered under; 0: the session's own."""
    topic: str = ""
    """Of a retained message, which is in no stream; `offset` is its time."""


@dataclass(slots=True)
class StoredPackets:
    """Deliveries in flight, in the order they were sent."""

    flights: list[Flight] = field(default_factory=list)
    last_id: int = 0
    """The packet id that was given last."""
    left: str = ""
    """The connection after which this was the last word. Empty: more may have been sent since."""


class _PacketsBody(msgspec.Struct, array_like=True):
    last_id: int
    runs: list[int]
    left: str
    retained: list[tuple[str, int]]
    """Topics and times of the retained messages among them, in order."""


def pack_packets(packets: StoredPackets) -> bytes:
    """Nothing in flight and no id given yet: nothing."""
    if not packets.flights and not packets.last_id and not packets.left:
        return b""
    retained = [(f.topic, f.offset) for f in packets.flights if f.stream is None and f.qos != RELEASED]
    return _framed(b"p", (packets.last_id, _flights_to_ints(packets.flights), packets.left, retained))


def unpack_packets(data: bytes, client_id: str, log: str) -> StoredPackets:
    """RequestError, with the client's name, if it cannot be read. Nothing stored: nothing is in flight."""
    if not data:
        return StoredPackets()
    body = _opened(b"p", data, _PacketsBody, "packets in flight", client_id)
    try:
        flights = list(_flights_from_ints(body.runs, body.retained, log))
    except ValueError as error:
        raise _damaged("packets in flight", client_id, str(error)) from None
    if not 0 <= body.last_id <= PACKET_ID_MAX or len({f.packet_id for f in flights}) < len(flights):
        raise _damaged("packets in flight", client_id, "a packet id is given twice, or is none")
    return StoredPackets(flights, body.last_id, body.left)


def _flights_to_ints(flights: Sequence[Flight]) -> list[int]:
    """Runs of one kind from one stream: QoS, how many, where from; then by how much id and offset go up each time."""
    out: list[int] = []
    source: tuple[object, ...] = ()
    count_at, last_id, last_offset = 0, 0, 0
    for packet_id, qos, stream, offset, share, _ in flights:
        if source != (qos, stream, share):
            source = (qos, stream, share)
            # One more than the shard and the number: 0 says that there is none.
            out += (qos, 0, 0) if stream is None else (qos, 0, stream.shard + 1, stream.generation, share)
            count_at = len(out) - (2 if stream is None else 4)
            last_offset = 0
        out[count_at] += 1
        out.append(packet_id - last_id)
        last_id = packet_id
        if stream is not None:
            out.append(offset - last_offset)
            last_offset = offset
    return out


def _flights_from_ints(ints: list[int], retained: list[tuple[str, int]], log: str) -> Iterator[Flight]:
    left, kept = _Reader(list(ints)), iter(retained)
    packet_id = 0
    while left:
        qos, count, shard = left.number(1), left.count(1), left.number()
        if qos > RELEASED:
            raise ValueError(f"{qos} is no QoS")
        stream, share, offset = None, 0, 0
        if shard:
            stream, share = Stream(log, shard - 1, left.number()), left.number()
        for _ in range(count):
            packet_id += left.any() or 0
            offset += (left.any() or 0) if stream is not None else 0
            if not (1 <= packet_id <= PACKET_ID_MAX and 0 <= offset < DONE):
                raise ValueError(f"packet id {packet_id} with offset {offset}")
            if stream is None and qos != RELEASED:
                topic, time = next(kept, ("", 0))
                yield Flight(packet_id, qos, None, time, 0, topic)
            else:
                yield Flight(packet_id, qos, stream, offset, share)


# ------------------------------------------------------------------------------------------------ bytes

_encoder = msgspec.msgpack.Encoder()
_VERSION_BYTE = bytes((VERSION,))


def _framed(kind: bytes, value: object) -> bytes:
    body = _encoder.encode(value)
    return _VERSION_BYTE + zlib.crc32(body, kind[0]).to_bytes(4) + body


def _opened(kind: bytes, data: bytes, form: type[T], what: str, client_id: str) -> T:
    if data[0] != VERSION:
        raise _damaged(what, client_id, f"expected version {VERSION}, got {data[0]}")
    body = data[5:]
    if data[1:5] != zlib.crc32(body, kind[0]).to_bytes(4):
        raise _damaged(what, client_id, "the checksum does not match")
    try:
        return msgspec.msgpack.decode(body, type=form)
    except msgspec.MsgspecError as error:
        raise _damaged(what, client_id, str(error)) from None


def _damaged(what: str, client_id: str, why: str) -> RequestError:
    return RequestError(f"the {what} of session {client_id!r} cannot be read: {why}")
