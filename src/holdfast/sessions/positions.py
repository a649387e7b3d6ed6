"""Where one session stands in each stream, and how far it can say it has come.

A stream is either *live* for the session (whatever is committed next is offered to it at once) or *behind* (it is read
from the log, from an offset known here). The surprising rule: a live stream has no position of its own. Its position
is wherever the node has come, so that ten thousand up-to-date subscribers cost nothing while others publish.

Cursors are computed, not kept: what is in flight and where the session stands say what is acknowledged.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from holdfast.cursors.cursor import Cursor
from holdfast.model import Stream
from holdfast.sessions.rows import Rows
from holdfast.sessions.subscriptions import SubscriptionTable
from holdfast.sessions.window import Delivery, Window


@dataclass(frozen=True, slots=True)
class Gap:
    """A record of what a session did not get, and why."""

    stream: str
    first: int
    past: int | None
    reason: str
    at: float


class StreamOrigin:
    """Deliveries of the session's own subscriptions, from one stream."""

    __slots__ = ("_positions", "stream")

    stays = True

    def __init__(self, positions: Positions, stream: Stream):
        self._positions, self.stream = positions, stream

    def settle(self, delivery: Delivery, reason: int) -> None:
        positions = self._positions
        positions.dirty.add(self.stream)
        if positions.behind or positions.skipped:
            positions.handled(self.stream, delivery.offset)

    def passed(self, offset: int) -> None:
        self._positions.dirty.add(self.stream)


class Positions:
    """Streams that are behind, what was acknowledged ahead of them, and what is to be saved."""

    def __init__(self, subscriptions: SubscriptionTable):
        self._subscriptions = subscriptions
        self.behind: dict[Stream, int] = {}
        """Streams that are not live, and where to read on."""
        self.acked: dict[Stream, dict[str, Cursor]] = {}
        """What was acknowledged above `behind`, by filter, after a resume from the store: not to be sent again."""
        self.skipped: dict[Stream, set[int]] = {}
        """What was under way when it was read, and so not queued once more, though what lies before it may wait."""
        self.dup_below: dict[Stream, int] = {}
        """Messages below may have been sent before a crash: they go out marked as duplicates."""
        self.dirty: set[Stream] = set()
        self.gaps: list[Gap] = []
        self.generation = 0
        """The newest generation this session knew when its client went."""
        self._origins: dict[Stream, StreamOrigin] = {}

    def take_dirty(self) -> set[Stream]:
        """Streams whose cursors are to be saved; whatever cannot be is put back."""
        dirty, self.dirty = self.dirty, set()
        return dirty

    def origin(self, stream: Stream) -> StreamOrigin:
        found = self._origins.get(stream)
        if found is None:
            found = self._origins[stream] = StreamOrigin(self, stream)
        return found

    # -- reading -------------------------------------------------------------------------------------------

    def next_to_read(self) -> Stream | None:
        """The stream to read from the log next: of the oldest generation that is behind, the first."""
        return min(self.behind, key=lambda s: (s.generation, s.shard), default=None)

    def waits_for_older(self, stream: Stream) -> bool:
        """A publisher's messages keep their order across generations: the older is read to its end first."""
        return bool(self.behind) and any(s.generation < stream.generation for s in self.behind)

    def fall_behind(self, stream: Stream, at: int) -> None:
        self.behind.setdefault(stream, at)

    def read_to(self, stream: Stream, past: int) -> None:
        self.behind[stream] = past
        self.dirty.add(stream)

    def forget_acked(self, stream: Stream, wanted: str) -> None:
        """What this filter had acknowledged is wanted once more."""
        if (cursors := self.acked.get(stream)) is not None:
            cursors.pop(wanted, None)
            if not cursors:
                del self.acked[stream]

    def lost(self, stream: Stream) -> None:
        """It is gone, and nothing more can be read of it."""
        self.behind.pop(stream, None)

    def caught_up(self, stream: Stream, head: int) -> int | None:
        """If the log was read as far as the node has come, the stream is live again: how far beyond that it went."""
        at = self.behind.get(stream)
        if at is None or at < head:
            return None
        del self.behind[stream]
        return at - head

    def pick(self, rows: Rows, window: Window) -> Sequence[int]:
        """Which of the rows read from the log are still to be sent."""
        stream, offsets, only = rows.stream, rows.offsets, self._subscriptions.only
        assert stream is not None
        if not offsets:
            return ()
        cursors = self.acked.get(stream)
        if cursors and offsets[0] > max(cursor.top for cursor in cursors.values()):
            cursors = None
        flying = set(window.offsets_of(self.origin(stream))) if len(window) else set()
        if not cursors and not flying and only is not None and offsets[0] >= only.since.get(stream, 0):
            return range(len(rows.topics))
        picks = []
        for at, offset in enumerate(offsets):
            if offset in flying:
                self.skipped.setdefault(stream, set()).add(offset)
                continue
            meant = self._subscriptions.meaning_at(rows.topics[at], stream, offset)
            if cursors:
                meant = tuple(s for s in meant if s.filter not in cursors or not cursors[s.filter].is_acked(offset))
            if meant:
                picks.append(at)
        return picks

    def handled(self, stream: Stream, offset: int) -> None:
        """Acknowledged; should it come once more when the log is read, as after a resume, it is not sent again."""
        if offset >= self.behind.get(stream, offset + 1) or offset in self.skipped.get(stream, ()):
            cursors = self.acked.setdefault(stream, {})
            for subscription in self._subscriptions:
                cursors.setdefault(subscription.filter, Cursor()).ack(offset)

    # -- the client goes and comes back --------------------------------------------------------------------

    def detach(self, positions: Mapping[Stream, int], heads: Mapping[Stream, int], sealed: Collection[Stream]) -> None:
        """Every stream has a position again.

        A finalised stream that was read to its end is done with, and leaves nothing behind.
        """
        self.skipped.clear()
        self.generation = newest = max((s.generation for s in heads), default=0)
        self.behind = {
            stream: at
            for stream, at in positions.items()
            if stream.generation == newest or not (stream in sealed and at >= heads.get(stream, 0))
        }

    def attach(self, heads: Mapping[Stream, int], now: float, *, was_away: bool) -> list[Gap]:
        """Streams with nothing new are live again, those that came meanwhile are behind; what was dropped is a gap."""
        known = set(self.behind)
        oldest = min((s.generation for s in heads), default=0)
        gaps = []
        for stream, at in list(self.behind.items()):
            if stream not in heads:
                del self.behind[stream]
                self.acked.pop(stream, None)
                if stream.generation < oldest:
                    gaps.append(Gap(str(stream), at, None, "dropped by retention", now))
            elif at >= heads[stream]:
                del self.behind[stream]
        self.gaps += gaps
        if was_away:
            for stream, head in heads.items():
                # Of the generation that was the newest, too: its streams become known one by one.
                if stream.generation >= self.generation and stream not in known and head:
                    self.behind[stream] = 0
        return gaps

    # -- cursors -------------------------------------------------------------------------------------------

    def cursors(
        self, streams: Iterable[Stream], position_of: Callable[[Stream], int], window: Window
    ) -> dict[tuple[str, Stream], Cursor]:
        """How far each subscription has come in these streams."""
        unacked: dict[Stream, list[int]] = {}
        for _, delivery in window:
            if isinstance(delivery.origin, StreamOrigin):
                unacked.setdefault(delivery.origin.stream, []).append(delivery.offset)
        found = {}
        for stream in streams:
            position = position_of(stream)
            known = self.acked.get(stream, {})
            if known and position > max(cursor.top for cursor in known.values()):
                known = self.acked.pop(stream)  # said for the last time: from here on the position says it
            open_ = sorted(unacked.get(stream, ()))
            for subscription in self._subscriptions:
                if subscription.moving:
                    continue
                past = max(position, subscription.since.get(stream, 0))
                cursor = known[subscription.filter].copy() if subscription.filter in known else Cursor()
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
