"""A session: everything about one client that outlives its connection, as parts that each own their fields.

subscriptions   what it wants                positions   where it stands in each stream
outgoing        what waits to be sent        window      what is in flight, and who hears how it ends
inbound         its QoS 2 publishes that are not released yet

commit ──offer──▶ outgoing ──take──▶ window ──ack──▶ cursor
                     ▲                  │
log ────read─────────┘                  └─ unacknowledged: sent again when the client comes back
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

from holdfast.cursors.cursor import Cursor
from holdfast.model import Stream
from holdfast.mqtt.inbound import Inbound
from holdfast.sessions.outgoing import Feed, Outgoing
from holdfast.sessions.positions import Gap, Positions
from holdfast.sessions.rows import Rows
from holdfast.sessions.subscriptions import Subscription, SubscriptionTable
from holdfast.sessions.window import Delivery, Window

NEVER = 0xFFFF_FFFF
"""A session expiry that does not come."""


class Session:
    """The parts of one session, and what takes more than one of them."""

    def __init__(self, client_id: str, expiry_seconds: int, epoch: int = 1):
        self.client_id = client_id
        self.expiry_seconds = expiry_seconds
        self.epoch = epoch
        self.attached = True
        """A connection serves it; otherwise its client is away."""
        self.subscriptions = SubscriptionTable()
        self.window = Window()
        self.inbound = Inbound()
        self.positions = Positions(self.subscriptions)
        self.outgoing = Outgoing(client_id, self.subscriptions, self.positions, self.window)

    @property
    def durable(self) -> bool:
        return self.expiry_seconds > 0

    # -- subscriptions -----------------------------------------------------------------------------------

    def subscribe(self, subscription: Subscription) -> bool:
        """Add or replace; whether it is new. One that begins elsewhere does not want what waits of the one before."""
        moved = bool(subscription.since)
        new = self.subscriptions.add(subscription)
        if moved and not new:
            self._keep_wanted()
        return new

    def unsubscribe(self, filter_text: str) -> Subscription | None:
        gone = self.subscriptions.remove(filter_text)
        if gone is not None:
            self._keep_wanted()
        return gone

    def _keep_wanted(self) -> None:
        """Of what waits, only what a subscription still means."""
        meaning = self.subscriptions.meaning_at
        self.outgoing.keep(lambda rows, i: bool(meaning(rows.topics[i], rows.stream, rows.offsets[i])))

    def go_back(self, stream: Stream, at: int, heads: Mapping[Stream, int], wanted: str) -> None:
        """Read this stream again from here, for the one filter; the others have had what comes before.

        What waits was chosen for the others: it is read again too, from the first of it on.
        """
        self.positions.forget_acked(stream, wanted)
        if at >= self.positions.behind.get(stream, heads.get(stream, 0)):
            return  # nothing of it has been read
        before = self.position(stream, heads)
        under_way = self.window.offsets_of(self.positions.origin(stream))
        for subscription in self.subscriptions:
            if subscription.filter != wanted:
                since = subscription.since.get(stream, 0)
                subscription.since[stream] = max(since, before)
                subscription.carried.setdefault(stream, set()).update(o for o in under_way if o >= since)
        self.positions.behind[stream] = min(at, before)
        self.outgoing.keep(lambda rows, _: rows.stream != stream)

    # -- feeding -----------------------------------------------------------------------------------------

    def offer(self, rows: Rows, picks: Sequence[int], bytes_max: int, *, hold: bool = False) -> bool:
        """Rows just committed to a live stream. False: no room (or `hold`), the stream is behind from here on."""
        stream, positions, outgoing = rows.stream, self.positions, self.outgoing
        assert stream is not None
        if stream in positions.behind:
            return False
        # One block is always taken, however large: it is in memory anyway, and something must move.
        if hold or (outgoing.rows and outgoing.bytes > bytes_max) or positions.waits_for_older(stream):
            positions.fall_behind(stream, rows.offsets[picks[0]])
            return False
        outgoing.put(rows, picks)
        return True

    def take_read(self, stream: Stream, past: int, found: Iterable[Rows], head: int | None) -> None:
        """Rows that were read from the log, up to `past`; `head`: how far the node has come (None: it is dropped).

        What was read beyond the head is put back: it will be offered like anything new.
        """
        positions = self.positions
        for rows in found:
            self.outgoing.put(rows, positions.pick(rows, self.window))
        positions.read_to(stream, past)
        if head is not None and positions.caught_up(stream, head):
            self.outgoing.keep(lambda rows, i: rows.stream != stream or rows.offsets[i] < head)

    def forget_loan(self, feed: Feed) -> None:
        """What is in flight of it went back to the group; the packet ids stay taken until the client answers."""
        self.outgoing.drop(feed)
        self.window.disown(feed)

    # -- the client goes and comes back ------------------------------------------------------------------

    def position(self, stream: Stream, heads: Mapping[Stream, int]) -> int:
        """The first offset that has not been sent."""
        found = self.positions.behind.get(stream)
        if found is None:
            # A stream that came while the client is away is not known yet, and nothing of it has been sent.
            came_since = not self.attached and stream.generation >= self.positions.generation
            found = 0 if came_since else heads.get(stream, 0)
        waiting = self.outgoing.first_of(stream)
        return found if waiting is None else min(found, waiting)

    def waits_for(self, stream: Stream) -> bool:
        """Is something of this stream to be read or sent?"""
        return stream in self.positions.behind or self.outgoing.first_of(stream) is not None

    def detach(self, heads: Mapping[Stream, int], sealed: Collection[Stream]) -> None:
        """The client went: whatever waits stays in the log, and every stream has a position again.

        A session that is away already stays as it is: what came since is not known to it.
        """
        if not self.attached:
            return
        streams = dict.fromkeys((*heads, *self.positions.behind))
        self.positions.detach({stream: self.position(stream, heads) for stream in streams}, heads, sealed)
        self.attached = False
        self.outgoing.clear()
        # What was lent goes back to its group, but for what MQTT wants to stay with this session.
        self.window.keep(lambda delivery: delivery.origin.stays)

    def attach(self, heads: Mapping[Stream, int], now: float) -> list[Gap]:
        """The client is back; what it can no longer be given."""
        was_away, self.attached = not self.attached, True
        return self.positions.attach(heads, now, was_away=was_away)

    def in_flight(self) -> list[tuple[int, Delivery]]:
        """What was sent and not answered, in the order it was sent."""
        return list(self.window)

    def cursors(self, streams: Iterable[Stream], heads: Mapping[Stream, int]) -> dict[tuple[str, Stream], Cursor]:
        """How far each subscription has come in these streams."""
        position_of: Callable[[Stream], int] = lambda stream: self.position(stream, heads)  # noqa: E731
        found = self.positions.cursors(streams, position_of, self.window)
        for cursor in found.values():
            cursor.epoch = self.epoch
        return found
