"""A session: everything about one client that outlives its connection, as parts that each own their fields.

subscriptions   what it wants                positions   where it stands in each stream
outgoing        what waits to be sent        window      what is in flight, and who hears how it ends
inbound         its QoS 2 publishes that are not released yet

commit ──offer──▶ outgoing ──take──▶ window ──ack──▶ cursor
                     ▲                  │
log ────read─────────┘                  └─ unacknowledged: sent again when the client comes back
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from holdfast.cursors.cursor import Cursor
from holdfast.cursors.cursor_map import NOTHING_DONE, CursorMap
from holdfast.model import Stream
from holdfast.mqtt.inbound import Inbound
from holdfast.sessions.heads import Heads
from holdfast.sessions.outgoing import Feed, Outgoing
from holdfast.sessions.packed import StoredCursors
from holdfast.sessions.positions import Positions
from holdfast.sessions.rows import Rows
from holdfast.sessions.subscriptions import Subscription, SubscriptionTable
from holdfast.sessions.trimmed import Policy, Trimmed, trimmed
from holdfast.sessions.window import Delivery, Window

NEVER = 0xFFFF_FFFF
"""A session expiry that does not come."""


class Session:
    """The parts of one session, and what takes more than one of them."""

    __slots__ = (
        "attached",
        "client_id",
        "epoch",
        "expiry_seconds",
        "inbound",
        "outgoing",
        "positions",
        "subscriptions",
        "window",
    )

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

    def subscribe(
        self, subscription: Subscription, begin: CursorMap | None = None, heads: Mapping[Stream, int] | None = None
    ) -> bool:
        """Add or replace; whether it is new. `begin`: what it does not want, if it begins, or begins anew.

        Going back for it takes nothing from the others: what each of them has had is written down first, all but what
        is in flight. What waits to be sent was chosen for them, and is read again.
        """
        new = self.subscriptions.add(subscription, anew=begin is not None)
        if begin is None:
            return new
        seen, positions = Heads.of(heads or {}), self.positions
        subscription.done = begin
        others = [s for s in self.subscriptions if s is not subscription]
        if others:
            self.bring_up(seen)
            if begin.covers(positions.done) and all(
                begin.past(stream) >= positions.stand(stream, seen) for stream in self._unfinished(seen)
            ):
                if not new:
                    self._keep_wanted()
                return new
            had = positions.done.copy()
            made: dict[int, CursorMap] = {}
            for other in others:
                made.setdefault(id(other.done), had if other.done is NOTHING_DONE else _both(had, other.done))
            for other in others:
                other.done = made[id(other.done)]
            positions.done.lower(begin)
            begin = positions.done
        self.outgoing.keep(lambda rows, _: rows.stream is None)
        positions.restart(begin.copy(), seen, self.window)
        if not len(self.window):
            positions.drop_covered()
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

    # -- feeding -----------------------------------------------------------------------------------------

    def offer(self, rows: Rows, picks: Sequence[int], bytes_max: int, *, hold: bool = False) -> bool:
        """Rows just committed to a live stream. False: no room (or `hold`), the stream is behind from here on."""
        stream, positions, outgoing = rows.stream, self.positions, self.outgoing
        assert stream is not None
        if stream in positions.behind or positions.is_unread(stream):
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

    def bring_up(self, heads: Heads, streams: Iterable[Stream] | None = None) -> None:
        """Let `positions.done` be true of these streams, or of all that are not done to their ends."""
        if not self.attached:
            return
        positions, everything = self.positions, streams is None
        if positions.bring_up_live(heads, self.window, self.outgoing.firsts):
            positions.drop_covered()
            return
        if streams is None:
            streams = self._unfinished(heads)
        if positions.bring_up(streams, heads, self.window, self.outgoing.firsts) or everything:
            positions.drop_covered()

    def _unfinished(self, heads: Heads) -> list[Stream]:
        """Streams that are not done to their ends, for all that is known, but for those that are unread as a whole."""
        positions = self.positions
        last = heads.newest if positions.unread_from is None else positions.unread_from - 1
        recent = range(heads.oldest_open, last + 1)
        found = dict.fromkeys(stream for generation in recent for stream in heads.of_generation(generation))
        found.update(dict.fromkeys(Stream(heads.log, shard, generation) for generation, shard, _ in positions.done))
        found.update(dict.fromkeys(positions.behind))
        return list(found)

    def loss(self, heads: Mapping[Stream, int], now: float, policy: Policy) -> Trimmed:
        """What it can no longer be given, and whether it may come; nothing is changed."""
        seen = Heads.of(heads)
        return trimmed(self.stored_cursors(), self._numbers(), seen.kept, policy, seen.log, now)

    def attach(self, heads: Mapping[Stream, int], now: float, policy: Policy = "earliest") -> Trimmed:
        """The client is back; what it can no longer be given, and whether it may come."""
        seen, positions = Heads.of(heads), self.positions
        if self.attached:
            return Trimmed(self.stored_cursors(), [], False)
        decision = trimmed(self.stored_cursors(), self._numbers(), seen.kept, policy, seen.log, now)
        positions.gaps = decision.cursors.gaps
        if not decision.refuse:
            self.attached = True
            for subscription in self.subscriptions:
                subscription.done = decision.cursors.own.get(subscription.number, NOTHING_DONE)
            if len(self.subscriptions):
                positions.restart(decision.cursors.session, seen, self.window)
        return decision

    def _numbers(self) -> list[int]:
        return [subscription.number for subscription in self.subscriptions]

    def stored_cursors(self) -> StoredCursors:
        """How far it had come when it was last brought up, as it is stored."""
        own = {s.number: s.done for s in self.subscriptions if s.done is not NOTHING_DONE}
        return StoredCursors(self.positions.done, own, self.positions.gaps)

    def in_flight(self) -> list[tuple[int, Delivery]]:
        """What was sent and not answered, in the order it was sent."""
        return list(self.window)

    def cursors(self, streams: Iterable[Stream], heads: Mapping[Stream, int]) -> dict[tuple[str, Stream], Cursor]:
        """How far each subscription has come in these streams."""
        wanted = list(streams)
        self.bring_up(Heads.of(heads), wanted)
        stored, found = self.stored_cursors(), {}
        for stream in wanted:
            for subscription in self.subscriptions:
                cursor = found[subscription.filter, stream] = stored.cursor(subscription.number, stream)
                cursor.epoch = self.epoch
        return found


def _both(one: CursorMap, other: CursorMap) -> CursorMap:
    merged = one.copy()
    merged.merge(other)
    return merged
