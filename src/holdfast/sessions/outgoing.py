"""Rows that wait to be sent to one client, and how they become packets.

    commit ──put──▶ waiting ──take──▶ bytes, and a delivery in the window for each of QoS 1 or 2
    log, retained, loans ──put──▶ ┘

What waits is counted in rows and bytes, so that whoever feeds it can see how much room is left. A few rows of a large
block are copied out of it: nobody's waiting keeps in memory more than is counted.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import repeat
from typing import Protocol

from holdfast.model import RETAIN, Stream
from holdfast.mqtt.fastpath import PACKET_IDS, VARINTS, remaining_length, topic_bytes
from holdfast.mqtt.properties import expiry_of, with_expiry
from holdfast.sessions.positions import Positions
from holdfast.sessions.rows import Rows
from holdfast.sessions.subscriptions import Route, Subscription, SubscriptionTable
from holdfast.sessions.window import NOBODY, PACKET_ID_MAX, RELEASED, Delivery, Origin, Window

V5 = 5
WHOLE_BLOCK = 4
"""A wait for less than one in this many rows of a block keeps those rows, not the block; every fourth row is enough."""


class Feed(Origin, Protocol):
    """An origin whose messages are not the session's own subscriptions': a loan of a shared group, for example."""

    subscription: Subscription
    """Under which they are delivered."""
    halted: bool
    """Nothing more of it may be sent: what waits is not the client's to have."""

    def sending(self, offset: int) -> None:
        """This one is going out, and will be acknowledged."""
        ...

    def unsendable(self, offset: int, packet_bytes: int) -> None:
        """This one is larger than the client takes."""
        ...

    def given_up(self, offset: int, packet_bytes: int) -> None:
        """This one was sent and does not go out again: it is larger than the client takes by now, or (0) unreadable."""
        ...


class RetainedOrigin:
    """Retained messages on their way: they stand in no stream, so they are kept until they are acknowledged."""

    __slots__ = ("rows",)

    def __init__(self, rows: Rows):
        self.rows = rows

    def settle(self, deliveries: Sequence[Delivery], reason: int) -> None: ...

    def passed(self, offset: int) -> None: ...


class _Waiting:
    """Rows of one block, from `at` on."""

    __slots__ = ("at", "feed", "picks", "rows")

    def __init__(self, rows: Rows, picks: Sequence[int], feed: Feed | None):
        self.rows, self.picks, self.at, self.feed = rows, picks, 0, feed


class Outgoing:
    """The queue of one session."""

    __slots__ = ("_client_id", "_positions", "_queue", "_subscriptions", "_window", "bytes", "repeats", "rows")

    def __init__(self, client_id: str, subscriptions: SubscriptionTable, positions: Positions, window: Window):
        self._client_id = client_id
        self._subscriptions, self._positions, self._window = subscriptions, positions, window
        self._queue: list[_Waiting] = []
        """Few: whoever has much waiting is read for from the log. Empty it takes a tenth of what a deque does."""
        self.repeats: list[tuple[int, int, bytes]] = []
        """What was in flight when the client came back, and is more than it takes at a time now: id, QoS, packet."""
        self.rows = 0
        self.bytes = 0

    def put(self, rows: Rows, picks: Sequence[int], feed: Feed | None = None) -> None:
        if not picks:
            return
        if (len(picks) + 1) * WHOLE_BLOCK < len(rows.topics):
            rows, picks = rows.take(picks), range(len(picks))
        self._queue.append(_Waiting(rows, picks, feed))
        self.rows += len(picks)
        self.bytes += len(picks) * rows.weight

    def firsts(self) -> dict[Stream, int]:
        """By stream: the first offset of the session's own messages that waits."""
        found: dict[Stream, int] = {}
        for waiting in self._queue:
            stream = waiting.rows.stream
            if waiting.feed is None and stream is not None and stream not in found and waiting.at < len(waiting.picks):
                found[stream] = int(waiting.rows.offsets[waiting.picks[waiting.at]])
        return found

    def keep(self, wanted: Callable[[Rows, int], bool]) -> None:
        """Let go of the session's own rows that are not wanted."""
        self._refill(lambda w: w.picks[w.at :] if w.feed else [i for i in w.picks[w.at :] if wanted(w.rows, i)])

    def drop(self, feed: Feed) -> None:
        """The loan is over: what waits of it goes back to the group."""
        self._refill(lambda w: () if w.feed is feed else w.picks[w.at :])

    def _refill(self, kept: Callable[[_Waiting], Sequence[int]]) -> None:
        queue, self._queue = self._queue, []
        self.rows = self.bytes = 0
        for waiting in queue:
            self.put(waiting.rows, kept(waiting), waiting.feed)

    # -- sending -------------------------------------------------------------------------------------------

    def take(self, out: list[bytes], room: int, bytes_max: int, version: int, packet_max: int, now: float) -> int:
        """Turn waiting rows into packets, as many as the window and the bytes allow; how many bytes."""
        room = min(room, PACKET_ID_MAX)
        taken = self._take_repeats(out, room, bytes_max)
        if self.repeats:
            return taken
        while self._queue and taken < bytes_max:
            waiting = self._queue[0]
            before = waiting.at
            taken += self._encode(waiting, out, room, bytes_max - taken, version, packet_max, now)
            self.rows -= waiting.at - before
            self.bytes -= (waiting.at - before) * waiting.rows.weight
            if waiting.at < len(waiting.picks):
                break
            self._queue.pop(0)
        return taken

    def _take_repeats(self, out: list[bytes], room: int, bytes_max: int) -> int:
        repeats, window, taken, count = self.repeats, self._window, 0, 0
        while count < len(repeats) and taken < bytes_max and len(window) - len(repeats) + count < room:
            packet_id, qos, packet = repeats[count]
            count += 1
            delivery = window.get(packet_id)
            if delivery is not None and delivery.qos == qos:  # or the client has answered it unasked
                out.append(packet)
                taken += len(packet)
        del repeats[:count]
        return taken

    def _encode(
        self,
        waiting: _Waiting,
        out: list[bytes],
        room: int,
        bytes_max: int,
        version: int,
        packet_max: int,
        now: float,
    ) -> int:
        rows, picks, feed = waiting.rows, waiting.picks, waiting.feed
        if feed is not None and feed.halted:
            waiting.at = len(picks)
            return 0
        topics, payloads, flags, properties = rows.topics, rows.payloads, rows.flags, rows.properties
        stream, offsets, window = rows.stream, rows.offsets, self._window
        flag = flags if isinstance(flags, int) else 0
        only, v5 = self._subscriptions.only if feed is None else feed.subscription, version == V5
        dup_below = self._positions.dup_below.get(stream, 0) if stream is not None and feed is None else 0
        origin: Origin = (
            feed if feed is not None else RetainedOrigin(rows) if stream is None else self._positions.origin(stream)
        )
        size, past, count = 0, waiting.at, len(picks)
        if (
            properties is None
            and stream is not None
            and isinstance(flags, int)
            and (only is None or not only.special)
            and past < count
            and offsets[picks[past]] >= dup_below
        ):
            size = self._encode_plain(waiting, out, room, bytes_max, v5, packet_max, only, origin)
            past = waiting.at
            if size >= bytes_max:
                return size
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
                    origin.passed(offset)
                    continue
                subscription, extra = chosen
            qos = flag & 3
            if qos > subscription.qos:
                qos = subscription.qos
            if qos and len(window) >= room:
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
                if feed is None:
                    origin.passed(offset)
                else:
                    feed.unsendable(offset, length + 1 + len(remaining_length(length)))
                    if feed.halted:
                        past = count
                continue
            if qos:
                packet_id = window.add(Delivery(origin, i if stream is None else offset, qos))
                if feed is not None:
                    feed.sending(offset)
                if v5:
                    out += (bytes((first,)), remaining_length(length), name, PACKET_IDS[packet_id], tail, payload)
                else:
                    out += (bytes((first,)), remaining_length(length), name, PACKET_IDS[packet_id], payload)
            else:
                origin.passed(offset)
                if v5:
                    out += (bytes((first,)), remaining_length(length), name, tail, payload)
                else:
                    out += (bytes((first,)), remaining_length(length), name, payload)
            past += 1
            size += length + 3
            if size >= bytes_max:
                break
        waiting.at = past
        return size

    def _encode_plain(
        self,
        waiting: _Waiting,
        out: list[bytes],
        room: int,
        bytes_max: int,
        v5: bool,
        packet_max: int,
        only: Subscription | None,
        origin: Origin,
    ) -> int:
        """Nearly always: messages of one block that go out alike, up to one that needs something special."""
        rows, picks, at, window = waiting.rows, waiting.picks, waiting.at, self._window
        topics, payloads, find = rows.topics, rows.payloads, self._subscriptions.route
        route = find(topics[picks[at]]) if only is None else Route(only.qos, only.identifier_bytes)
        if route is None:
            return 0
        assert isinstance(rows.flags, int)
        qos = min(rows.flags & 3, route.qos)
        count = len(picks) - at
        if qos:
            count = max(0, min(count, room - len(window)))
        ids = window.free_ids(count) if qos else ()
        first, size, past = bytes((0x30 | qos << 1,)), 0, at
        tail = remaining_length(len(route.identifiers)) + route.identifiers if v5 else b""
        more, topic = len(tail) + (2 if qos else 0), topics[picks[at]]
        name = topic_bytes(topic)
        for packet_id in map(PACKET_IDS.__getitem__, ids) if qos else repeat(b"", count):
            i = picks[past]
            payload = payloads[i]
            if topics[i] is not topic:
                topic = topics[i]
                if only is None and find(topic) != route:
                    break
                name = topic_bytes(topic)
            length = len(name) + len(payload) + more
            if length + 5 > packet_max:
                break
            varint = VARINTS[length] if length < 16_384 else remaining_length(length)
            out += (first, varint, name, packet_id, tail, payload)
            past += 1
            size += length + 3
            if size >= bytes_max:
                break
        offsets = [rows.offsets[i] for i in picks[at:past]]
        if not qos:
            for offset in offsets:
                origin.passed(offset)
        elif offsets:
            window.add_run(ids[: past - at], origin, offsets, qos)
            if waiting.feed is not None:
                for offset in offsets:
                    waiting.feed.sending(offset)
        waiting.at = past
        return size

    def repeat(
        self,
        packet_id: int,
        delivery: Delivery,
        found: tuple[Rows, int] | None,
        version: int,
        packet_max: int,
        now: float,
        feed: Feed | None = None,
    ) -> bytes:
        """A delivery as it goes out to a client that is back; empty: it does not, and its id is free.

        What is larger than the client takes by now counts as sent, as MQTT says: it is passed over when it is read from
        the log; or it is somebody else's, if it was lent (`feed`). A client that has half of a QoS 2 delivery would
        take another message under its id for the same one, so it is told to release it.
        """
        packet = b""
        if found is not None or delivery.qos == RELEASED:
            rows, at = found or (None, 0)
            packet = self.again(packet_id, delivery, rows, at, version, now, feed)
            if len(packet) <= packet_max:
                return packet
        if feed is not None:
            feed.given_up(delivery.offset, len(packet))
        if delivery.qos == 1:
            self._window.drop(packet_id)
            return b""
        released = Delivery(NOBODY, 0, RELEASED)
        self._window.restore(packet_id, released)
        return self.again(packet_id, released, None, 0, version, now)

    def again(
        self,
        packet_id: int,
        delivery: Delivery,
        rows: Rows | None,
        at: int,
        version: int,
        now: float,
        feed: Feed | None = None,
    ) -> bytes:
        """A delivery that was not acknowledged, once more, marked as a duplicate; `rows` unless it was released."""
        if delivery.qos == RELEASED:
            return b"\x62\x02" + PACKET_IDS[packet_id]
        assert rows is not None
        stream, v5 = rows.stream, version == V5
        chosen = self._special(rows, at, stream, rows.offsets[at], v5, now, feed)
        if chosen is None:
            # Expired, or no longer subscribed to: the client may still be waiting for it under this id.
            chosen = (Subscription("#", delivery.qos), b"")
        subscription, extra = chosen
        flags = rows.flags if isinstance(rows.flags, int) else rows.flags[at]
        retain = stream is None or (subscription.retain_as_published and flags & RETAIN)
        name, payload = topic_bytes(rows.topics[at]), rows.payloads[at]
        tail = (remaining_length(len(extra)) + extra) if v5 else b""
        length = len(name) + 2 + len(tail) + len(payload)
        first = bytes((0x38 | delivery.qos << 1 | (1 if retain else 0),))
        return b"".join((first, remaining_length(length), name, PACKET_IDS[packet_id], tail, payload))

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
        table = self._subscriptions
        meant = table.meaning_at(rows.topics[i], stream, offset) if feed is None else (feed.subscription,)
        publisher = rows.publishers if isinstance(rows.publishers, str) else rows.publishers[i]
        meant = tuple(s for s in meant if not (s.no_local and publisher == self._client_id))
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
