"""A session decides what its client gets next and how far it has come; it holds no message for long.

A stream is either *live* for the session (whatever is committed next is offered to it at once) or *behind* (the
session reads it from the log, from an offset it knows). Both feed one queue of rows that are ready to be sent:

    commit ──offer──▶ ready ──take──▶ in flight ──ack──▶ cursor
                        ▲                  │
    log ────read────────┘                  └─ unacknowledged: sent again when the client comes back

The surprising rule: a live stream has no position of its own. Its position is wherever the node has dispatched to,
so that ten thousand up-to-date subscribers cost nothing while others publish.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from holdfast.cursors.cursor import Cursor
from holdfast.model import RETAIN, Batch, Stream
from holdfast.mqtt.fastpath import PACKET_IDS, remaining_length, topic_bytes
from holdfast.mqtt.properties import expiry_of, with_expiry
from holdfast.mqtt.wire import to_varint
from holdfast.topics import AnyOf, TopicFilter, Wanted

NEVER = 0xFFFF_FFFF
"""A session expiry that does not come."""

RELEASED = 3
"""In place of a QoS: the PUBREL of a QoS 2 delivery is out, only its PUBCOMP is missing."""

V5 = 5


class Rows:
    """Messages of one block, as columns, on their way to one or more sessions."""

    __slots__ = ("flags", "offsets", "payloads", "properties", "publishers", "stream", "times", "topics", "weight")

    def __init__(
        self,
        stream: Stream | None,
        offsets: Sequence[int],
        batch: Batch,
        times: Sequence[int] | int,
    ):
        self.stream, self.offsets = stream, offsets
        self.topics, self.payloads = batch.topics, batch.payloads
        self.publishers, self.flags, self.properties = batch.publishers, batch.flags, batch.properties
        self.times = times
        self.weight = sum(map(len, batch.payloads)) // max(1, len(batch.payloads)) + 64
        """Roughly the bytes of one row."""


@dataclass(slots=True)
class Subscription:
    """One filter of a session and its options."""

    filter: str
    qos: int
    no_local: bool = False
    retain_as_published: bool = False
    retain_handling: int = 0
    identifier: int = 0
    born: str = ""
    """Of a shared one: which group it is in, should one of the same name be made anew."""
    since: dict[Stream, int] = field(default_factory=dict)
    """Where it began, by stream: earlier messages are not its own."""
    carried: dict[Stream, set[int]] = field(default_factory=dict)
    """Below `since`, what was under way when `since` was raised: still its own until it is acknowledged."""
    matcher: TopicFilter = field(init=False)
    identifier_bytes: bytes = field(init=False)

    def __post_init__(self) -> None:
        self.matcher = TopicFilter(self.filter)
        self.identifier_bytes = b"\x0b" + to_varint(self.identifier) if self.identifier else b""


@dataclass(frozen=True, slots=True)
class Gap:
    """A record of what a session did not get, and why."""

    stream: str
    first: int
    past: int | None
    reason: str
    at: float


InFlight = tuple[Any, int, int]
"""Where the message is (its stream or loan and offset, or the rows of a retained one), and its QoS or RELEASED."""


class Feed(Protocol):
    """A loan of a shared group: rows that are not the session's own, and whose progress somebody else keeps."""

    subscription: Subscription
    in_flight: set[int]
    sent: list[int]
    counts: bool

    def settle(self, offset: int) -> None: ...


class Session:
    """Everything about one client that outlives its connection."""

    def __init__(self, client_id: str, expiry_seconds: int, epoch: int = 1):
        self.client_id = client_id
        self.expiry_seconds = expiry_seconds
        self.epoch = epoch
        self.subscriptions: dict[str, Subscription] = {}
        self.shared: dict[str, Subscription] = {}
        """Shared ones, by their filter with its prefix: their progress is their groups' to keep."""
        self.in_flight: dict[int, InFlight] = {}
        self.received: set[int] = set()
        """Packet ids of QoS 2 publishes that are stored and not yet released."""
        self.behind: dict[Stream, int] = {}
        """Streams that are not live, and where to read on."""
        self.acked: dict[Stream, dict[str, Cursor]] = {}
        """What was acknowledged above `behind`, by filter, after a resume from the store: not to be sent again."""
        self.dup_below: dict[Stream, int] = {}
        """Messages below may have been sent before a crash: they go out marked as duplicates."""
        self.dirty: set[Stream] = set()
        self.touched: dict[Any, None] = {}
        """Loans of which something was acknowledged since their agent was last told."""
        self.skipped: list[Gap] = []
        self.generation = 0
        """The newest generation this session knew when it was parked."""
        self.parked = False
        self._ready: deque[list[Any]] = deque()
        self.ready_rows = 0
        self.ready_bytes = 0
        self._last_id = 0
        self._wanted: Wanted | None = None
        self._only: Subscription | None = None
        self._routes: dict[str, tuple[Subscription, ...]] = {}

    # -- subscriptions -----------------------------------------------------------------------------------

    def subscribe(self, subscription: Subscription) -> bool:
        """Add or replace; whether it is new."""
        old = self.subscriptions.get(subscription.filter)
        if old is not None and not subscription.since:
            subscription.since = old.since
        self.subscriptions[subscription.filter] = subscription
        self._changed()
        return old is None

    def unsubscribe(self, filter_text: str) -> Subscription | None:
        gone = self.subscriptions.pop(filter_text, None)
        self._changed()
        if gone is not None:
            self._keep_ready(lambda rows, i: bool(self._route(rows.topics[i], rows.stream, rows.offsets[i])))
        return gone

    def _changed(self) -> None:
        self._routes.clear()
        self._wanted = None
        self._only = next(iter(self.subscriptions.values())) if len(self.subscriptions) == 1 else None

    @property
    def wanted(self) -> Wanted | None:
        """All its filters as one, put together when it is asked for."""
        if self._wanted is None and self.subscriptions:
            self._wanted = self._only.matcher if self._only else AnyOf(s.matcher for s in self.subscriptions.values())
        return self._wanted

    @property
    def durable(self) -> bool:
        return self.expiry_seconds > 0

    # -- feeding -----------------------------------------------------------------------------------------

    def offer(self, rows: Rows, picks: Sequence[int], bytes_max: int) -> bool:
        """Rows just committed to a live stream. False: no room, the stream is behind from here on."""
        stream = rows.stream
        assert stream is not None
        if stream in self.behind:
            return False
        # One block is always taken, however large: it is in memory anyway, and something must move.
        if (self.ready_rows and self.ready_bytes > bytes_max) or self._waits_for_older(stream):
            self.behind[stream] = rows.offsets[picks[0]]
            return False
        self.put_ready(rows, picks)
        return True

    def _waits_for_older(self, stream: Stream) -> bool:
        """A publisher's messages keep their order across generations: the older is read to its end first."""
        return bool(self.behind) and any(s.generation < stream.generation for s in self.behind)

    def put_ready(self, rows: Rows, picks: Sequence[int], feed: Feed | None = None) -> None:
        """Rows read from the log, retained ones, or rows of a loan."""
        if picks:
            self._ready.append([rows, picks, 0, feed])
            self.ready_rows += len(picks)
            self.ready_bytes += len(picks) * rows.weight

    def _keep_ready(self, wanted: Callable[[Rows, int], bool]) -> None:
        """Let go of the waiting rows that are not wanted."""
        waiting, self._ready = self._ready, deque()
        self.ready_rows = self.ready_bytes = 0
        for rows, picks, at, feed in waiting:
            self.put_ready(rows, picks[at:] if feed is not None else [i for i in picks[at:] if wanted(rows, i)], feed)

    def go_back(self, stream: Stream, at: int, heads: Mapping[Stream, int], wanted: str) -> None:
        """Read this stream again from here, for the one filter; the others have had what comes before."""
        before = self.position(stream, heads)
        under_way = {offset for place, offset, _ in self.in_flight.values() if place == stream}
        for subscription in self.subscriptions.values():
            if subscription.filter != wanted:
                since = subscription.since.get(stream, 0)
                subscription.since[stream] = max(since, before)
                subscription.carried.setdefault(stream, set()).update(o for o in under_way if o >= since)
        self.behind[stream] = at
        self.acked.pop(stream, None)
        self._keep_ready(lambda rows, _: rows.stream != stream)

    def drop_ready(self, feed: Feed) -> None:
        """The loan is over: what waits of it goes back to the group."""
        waiting, self._ready = self._ready, deque()
        self.ready_rows = self.ready_bytes = 0
        for rows, picks, at, owner in waiting:
            if owner is not feed:
                self.put_ready(rows, picks[at:], owner)

    def pick(self, rows: Rows) -> Sequence[int]:
        """Which of the rows read from the log are still to be sent."""
        stream, offsets, only = rows.stream, rows.offsets, self._only
        assert stream is not None
        if not offsets:
            return ()
        cursors = self.acked.get(stream)
        if cursors and offsets[0] > max(cursor.top for cursor in cursors.values()):
            cursors = None
        flying = {offset for place, offset, _ in self.in_flight.values() if place == stream}
        if not cursors and not flying and only is not None and offsets[0] >= only.since.get(stream, 0):
            return range(len(rows.topics))
        picks = []
        for at, offset in enumerate(offsets):
            if offset in flying:
                continue
            meant = self._route(rows.topics[at], stream, offset)
            if cursors:
                meant = tuple(s for s in meant if s.filter not in cursors or not cursors[s.filter].is_acked(offset))
            if meant:
                picks.append(at)
        return picks

    def _route(self, topic: str, stream: Stream | None, offset: int) -> tuple[Subscription, ...]:
        """The subscriptions that mean this message."""
        found = self._routes.get(topic)
        if found is None:
            if len(self._routes) > 10_000:
                self._routes.clear()
            found = tuple(s for s in self.subscriptions.values() if s.matcher.matches(topic))
            self._routes[topic] = found
        if stream is not None and any(s.since.get(stream, 0) > offset for s in found):
            return tuple(s for s in found if s.since.get(stream, 0) <= offset)
        return found

    # -- sending -----------------------------------------------------------------------------------------

    def take(self, out: list[bytes], room: int, bytes_max: int, version: int, packet_max: int, now: float) -> int:
        """Turn ready rows into packets, as many as the window and the bytes allow; how many bytes."""
        taken = 0
        while self._ready and taken < bytes_max:
            item = self._ready[0]
            rows, picks, at, feed = item
            past, size = self._encode(rows, picks, at, feed, out, room, bytes_max - taken, version, packet_max, now)
            self.ready_rows -= past - at
            self.ready_bytes -= (past - at) * rows.weight
            taken += size
            if past < len(picks):
                item[2] = past
                break
            self._ready.popleft()
        return taken

    def _encode(
        self,
        rows: Rows,
        picks: Sequence[int],
        at: int,
        feed: Feed | None,
        out: list[bytes],
        room: int,
        bytes_max: int,
        version: int,
        packet_max: int,
        now: float,
    ) -> tuple[int, int]:
        topics, payloads, flags, properties = rows.topics, rows.payloads, rows.flags, rows.properties
        stream, offsets, in_flight = rows.stream, rows.offsets, self.in_flight
        flag = flags if isinstance(flags, int) else 0
        only, v5 = self._only if feed is None else feed.subscription, version == V5
        dup_below = self.dup_below.get(stream, 0) if stream is not None and feed is None else 0
        place: Any = feed if feed is not None else rows if stream is None else stream
        size, last_id, count = 0, self._last_id, len(picks)
        past = at
        while past < count:
            i = picks[past]
            topic, payload = topics[i], payloads[i]
            if not isinstance(flags, int):
                flag = flags[i]
            offset = offsets[i]
            subscription = only
            extra = b""
            if subscription is None or subscription.no_local or properties is not None or subscription.identifier:
                chosen = self._special(rows, i, stream, offset, v5, now, feed)
                if chosen is None:
                    past += 1
                    self._let_go(place, offset)
                    continue
                subscription, extra = chosen
            qos = flag & 3
            if qos > subscription.qos:
                qos = subscription.qos
            if qos and len(in_flight) >= room:
                break
            name = topic_bytes(topic)
            first = 0x30 | qos << 1
            if stream is None or (subscription.retain_as_published and flag & RETAIN):
                first |= 1
            if offset < dup_below and qos:
                first |= 8
            length = len(name) + len(payload) + (2 if qos else 0)
            if v5:
                tail = remaining_length(len(extra)) + extra if extra else b"\0"
                length += len(tail)
            if length + 5 > packet_max and length + 1 + len(remaining_length(length)) > packet_max:
                past += 1  # more than this client takes: it is told of nothing, as MQTT says
                self._let_go(place, offset)
                continue
            if qos:
                last_id = last_id % 65_535 + 1
                while last_id in in_flight:
                    last_id = last_id % 65_535 + 1
                in_flight[last_id] = (place, i if stream is None else offset, qos)
                if feed is not None:
                    feed.in_flight.add(offset)
                    if feed.counts:
                        feed.sent.append(offset)
                if v5:
                    out += (bytes((first,)), remaining_length(length), name, PACKET_IDS[last_id], tail, payload)
                else:
                    out += (bytes((first,)), remaining_length(length), name, PACKET_IDS[last_id], payload)
            else:
                self._let_go(place, offset)
                if v5:
                    out += (bytes((first,)), remaining_length(length), name, tail, payload)
                else:
                    out += (bytes((first,)), remaining_length(length), name, payload)
            past += 1
            size += length + 3
            if size >= bytes_max:
                break
        self._last_id = last_id
        return past, size

    def encode_again(self, packet_id: int, rows: Rows, i: int, qos: int, version: int, now: float) -> bytes:
        """A delivery that was not acknowledged, once more, marked as a duplicate."""
        stream, v5 = rows.stream, version == V5
        chosen = self._special(rows, i, stream, rows.offsets[i], v5, now)
        if chosen is None:
            # Expired, or no longer subscribed to: the client may still be waiting for it under this id.
            chosen = (Subscription("#", qos), b"")
        subscription, extra = chosen
        flags = rows.flags if isinstance(rows.flags, int) else rows.flags[i]
        retain = stream is None or (subscription.retain_as_published and flags & RETAIN)
        name, payload = topic_bytes(rows.topics[i]), rows.payloads[i]
        tail = (remaining_length(len(extra)) + extra) if v5 else b""
        length = len(name) + 2 + len(tail) + len(payload)
        first = bytes((0x38 | qos << 1 | (1 if retain else 0),))
        return b"".join((first, remaining_length(length), name, PACKET_IDS[packet_id], tail, payload))

    def _let_go(self, place: Any, offset: int) -> None:
        """A message that is done with as far as this session goes: acknowledged, or sent for good, or not to be."""
        if place.__class__ is Stream:
            self.dirty.add(place)
        elif place is not None and place.__class__ is not Rows:
            place.settle(offset)
            self.touched[place] = None

    def _special(
        self,
        rows: Rows,
        i: int,
        stream: Stream | None,
        offset: int,
        v5: bool,
        now: float,
        feed: Feed | None = None,
    ) -> tuple[Subscription, bytes] | None:
        """The subscription to deliver under and the properties to send; None: not to this client."""
        meant = self._route(rows.topics[i], stream, offset) if feed is None else (feed.subscription,)
        publisher = rows.publishers if isinstance(rows.publishers, str) else rows.publishers[i]
        meant = tuple(s for s in meant if not (s.no_local and publisher == self.client_id))
        if not meant:
            return None
        extra = rows.properties[i] if rows.properties is not None else None
        if extra:
            life = expiry_of(extra)
            if life is not None:
                sent = rows.times if isinstance(rows.times, int) else rows.times[i]
                remaining = life - int(now - sent / 1e6)
                if remaining <= 0:
                    return None
                extra = with_expiry(extra, min(remaining, life))
        strongest = max(meant, key=lambda s: s.qos)
        if not v5:
            return strongest, b""
        return strongest, b"".join(s.identifier_bytes for s in meant) + (extra or b"")

    # -- acknowledgements --------------------------------------------------------------------------------

    def acknowledge(self, packet_ids: Iterable[int]) -> int | None:
        """PUBACKs. The first id that was not under way as QoS 1, if its sender is confused; None: all is well."""
        in_flight, dirty, behind = self.in_flight, self.dirty, self.behind
        for packet_id in packet_ids:
            entry = in_flight.get(packet_id)
            if entry is None:
                continue  # late, or sent twice: harmless
            if entry[2] != 1:
                return packet_id
            del in_flight[packet_id]
            place = entry[0]
            if place.__class__ is Stream:
                dirty.add(place)
                if behind:
                    self._handled(place, entry[1])
            else:
                self._let_go(place, entry[1])
        return None

    def _handled(self, stream: Stream, offset: int) -> None:
        """Acknowledged; should it come once more when the log is read, as after a resume, it is not sent again."""
        if offset >= self.behind.get(stream, offset + 1):
            cursors = self.acked.setdefault(stream, {})
            for filter_text in self.subscriptions:
                cursors.setdefault(filter_text, Cursor()).ack(offset)

    def received_by_client(self, packet_id: int) -> str:
        """PUBREC. `release`, `again` (released before), `unknown` or `wrong`."""
        entry = self.in_flight.get(packet_id)
        if entry is None:
            return "unknown"
        if entry[2] == RELEASED:
            return "again"
        if entry[2] != 2:
            return "wrong"
        if isinstance(entry[0], Stream):
            self.dirty.add(entry[0])
            self._handled(entry[0], entry[1])
        else:
            self._let_go(entry[0], entry[1])
        self.in_flight[packet_id] = (None, 0, RELEASED)
        return "release"

    def refused_by_client(self, packet_id: int) -> None:
        """PUBREC with an error: the delivery is over."""
        entry = self.in_flight.pop(packet_id, None)
        if entry is None:
            return
        self._let_go(entry[0], entry[1])
        if isinstance(entry[0], Stream):
            self._handled(entry[0], entry[1])

    def complete(self, packet_id: int) -> bool:
        """PUBCOMP. False: it came out of turn."""
        entry = self.in_flight.get(packet_id)
        if entry is None:
            return True
        if entry[2] != RELEASED:
            return False
        del self.in_flight[packet_id]
        return True

    def forget_loan(self, feed: Feed) -> None:
        """What is in flight of it went back to the group; the packet ids stay taken until the client answers."""
        self.drop_ready(feed)
        self.touched.pop(feed, None)
        for packet_id, (place, _, qos) in self.in_flight.items():
            if place is feed:
                self.in_flight[packet_id] = (None, 0, qos)

    # -- positions and cursors ---------------------------------------------------------------------------

    def position(self, stream: Stream, heads: Mapping[Stream, int]) -> int:
        """The first offset that has not been sent."""
        found = self.behind.get(stream)
        if found is None:
            found = heads.get(stream, 0)
        for rows, picks, at, feed in self._ready:
            if feed is None and rows.stream == stream and at < len(picks):
                return min(found, int(rows.offsets[picks[at]]))
        return found

    def park(self, heads: Mapping[Stream, int], sealed: Collection[Stream]) -> None:
        """The client went: whatever is ready stays in the log, and every stream has a position again.

        A finalised stream that was read to its end is done with, and leaves nothing behind. A session that is
        away already stays as it is: what came since is not known to it.
        """
        if self.parked:
            return
        self.parked = True
        positions = {stream: self.position(stream, heads) for stream in {*heads, *self.behind}}
        self.generation = newest = max((s.generation for s in heads), default=0)
        self.behind = {
            stream: at
            for stream, at in positions.items()
            if stream.generation == newest or not (stream in sealed and at >= heads.get(stream, 0))
        }
        self._ready.clear()
        self.ready_rows = self.ready_bytes = 0
        # What was lent went back to its group: only the group delivers it again.
        self.in_flight = {
            packet_id: entry
            for packet_id, entry in self.in_flight.items()
            if entry[2] == RELEASED or entry[0].__class__ in (Stream, Rows)
        }
        self.touched.clear()

    def unpark(self, heads: Mapping[Stream, int], now: float) -> None:
        """The client is back: streams with nothing new are live again, those that came meanwhile are behind."""
        was_parked, self.parked = self.parked, False
        known = set(self.behind)
        for stream, at in list(self.behind.items()):
            if stream not in heads:
                del self.behind[stream]
                self.acked.pop(stream, None)
                if stream.generation < min((s.generation for s in heads), default=0):
                    self.skipped.append(Gap(str(stream), at, None, "dropped by retention", now))
            elif at >= heads[stream]:
                del self.behind[stream]
        if not was_parked:
            return
        for stream, head in heads.items():
            # Of the generation that was the newest, too: its streams become known one by one.
            if stream.generation >= self.generation and stream not in known and head:
                self.behind[stream] = 0

    def next_to_read(self) -> Stream | None:
        """The stream to read from the log next: of the oldest generation that is behind, the first."""
        return min(self.behind, key=lambda s: (s.generation, s.shard), default=None)

    def caught_up(self, stream: Stream, heads: Mapping[Stream, int]) -> bool:
        """If the log has been read as far as the node has dispatched, the stream is live again.

        What was read beyond that is put back: it will be offered like anything new.
        """
        at, head = self.behind.get(stream), heads.get(stream, 0)
        if at is None:
            return True
        if at < head:
            return False
        del self.behind[stream]
        if at > head:
            self._keep_ready(lambda rows, i: rows.stream != stream or rows.offsets[i] < head)
        return True

    def cursors(self, streams: Iterable[Stream], heads: Mapping[Stream, int]) -> dict[tuple[str, Stream], Cursor]:
        """How far each subscription has come in these streams."""
        unacked: dict[Stream, list[int]] = {}
        for place, offset, _ in self.in_flight.values():
            if place.__class__ is Stream:
                unacked.setdefault(place, []).append(offset)
        found = {}
        for stream in streams:
            position = self.position(stream, heads)
            known = self.acked.get(stream, {})
            if known and position > max(cursor.top for cursor in known.values()):
                known = self.acked.pop(stream)  # said for the last time: from here on the position says it
            open_ = sorted(unacked.get(stream, ()))
            for subscription in self.subscriptions.values():
                past = max(position, subscription.since.get(stream, 0))
                cursor = known[subscription.filter].copy() if subscription.filter in known else Cursor()
                cursor.epoch = self.epoch
                first = 0
                since, carried = subscription.since.get(stream, 0), subscription.carried.get(stream, ())
                for offset in open_:
                    if offset < since and offset not in carried:
                        continue  # another subscription's: this one began later
                    if first < offset < past:
                        cursor.ack_range(first, offset - 1)
                    if offset < past:
                        first = offset + 1
                if first < past:
                    cursor.ack_range(first, past - 1)
                found[subscription.filter, stream] = cursor
        return found
