"""Where one session stands in each stream, and how far it can say it has come.

A stream is *live* for the session (whatever is committed next is offered to it at once), *behind* (it is read from the
log, from an offset known here), or *unread*: of a generation that is not looked at before the older ones are read. The
surprising rule: a live stream has no position of its own. Its position is wherever the node has come, so that ten
thousand up-to-date subscribers cost nothing while others publish, and a new generation costs them nothing either.

`done` is what is done for every subscription, as it was when it was last asked for: a default per generation, and the
exceptions. It is computed from where the session stands and what is in flight; for unread streams it is the truth.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from holdfast.cursors.cursor import Cursor
from holdfast.cursors.cursor_map import DONE, NOTHING_DONE, CursorMap, Progress, past_of, to_cursor
from holdfast.model import Stream
from holdfast.sessions.heads import Heads
from holdfast.sessions.rows import Rows
from holdfast.sessions.subscriptions import SubscriptionTable
from holdfast.sessions.window import RELEASED, Delivery, Window

GAPS_MAX = 100
"""How many records of what was skipped are kept: the newest."""


@dataclass(frozen=True, slots=True)
class Gap:
    """A record of what a session did not get, and why."""

    stream: str
    first: int
    past: int | None
    reason: str
    at: float


NO_STREAMS: set[Stream] = set()
"""Shared by all sessions that have nothing to be saved; never added to."""


class StreamOrigin:
    """Deliveries of the session's own subscriptions, from one stream."""

    __slots__ = ("_positions", "stream")

    def __init__(self, positions: Positions, stream: Stream):
        self._positions, self.stream = positions, stream

    def settle(self, deliveries: Sequence[Delivery], reason: int) -> None:
        positions = self._positions
        positions.move(self.stream)
        if positions.behind or positions.skipped or positions.unread_from is not None:
            positions.handled(self.stream, [delivery[1] for delivery in deliveries])

    def passed(self, offset: int) -> None:
        self._positions.move(self.stream)


class Positions:
    """Streams that are not live, what was acknowledged ahead of them, and what is to be saved."""

    __slots__ = (
        "_done_below",
        "_origins",
        "_subscriptions",
        "ahead",
        "behind",
        "dirty",
        "done",
        "dup_below",
        "gaps",
        "on_moved",
        "skipped",
        "unread_from",
    )

    def __init__(self, subscriptions: SubscriptionTable):
        self._subscriptions = subscriptions
        self.behind: dict[Stream, int] = {}
        """Streams that are read from the log, and where to read on."""
        self.unread_from: int | None = None
        """Streams of this and later generations are unread: `done` says where to begin. None: there are none."""
        self.ahead: dict[Stream, Cursor] = {}
        """What was acknowledged above `behind`, for every subscription: not to be sent again."""
        self.skipped: dict[Stream, set[int]] = {}
        """What was under way when it was read, and so not queued once more, though what lies before it may wait."""
        self.on_moved: Callable[[], None] = _nothing
        """Called when there is something to be saved, and was not before; whoever saves it does so in a later turn."""
        self.dup_below: Mapping[Stream, int] = {}
        """Messages below may have been sent before a crash: they go out marked as duplicates. May be shared."""
        self.done = CursorMap()
        self.dirty: set[Stream] = NO_STREAMS
        """Streams that moved since `done` was last stored."""
        self.gaps: list[Gap] = []
        self._done_below = 0
        """Up to which generation `done` was last said to be done as a whole."""
        self._origins: dict[Stream, StreamOrigin] = {}

    def take_dirty(self) -> set[Stream]:
        """Streams whose cursors are to be saved; whatever cannot be is put back."""
        dirty, self.dirty = self.dirty, NO_STREAMS
        return dirty

    def move(self, stream: Stream) -> None:
        """Something of it is to be saved."""
        if self.dirty:
            self.dirty.add(stream)
        else:
            self.dirty = {stream}
            self.on_moved()

    def let_go(self) -> None:
        """The session is not served here any more."""
        self.on_moved = _nothing
        self._origins.clear()

    def origin(self, stream: Stream) -> StreamOrigin:
        found = self._origins.get(stream)
        if found is None:
            found = self._origins[stream] = StreamOrigin(self, stream)
        return found

    def note(self, gaps: Iterable[Gap]) -> None:
        """Keep a record of these."""
        self.gaps = [*self.gaps, *gaps][-GAPS_MAX:]

    # -- reading -------------------------------------------------------------------------------------------

    def is_unread(self, stream: Stream) -> bool:
        return self.unread_from is not None and stream.generation >= self.unread_from

    def to_read(self, newest: int) -> bool:
        """Is there something to read, up to this generation?"""
        return bool(self.behind) or (self.unread_from is not None and self.unread_from <= newest)

    def next_to_read(self, heads: Heads, window: Window) -> Stream | None:
        """The stream to read from the log next: of the oldest generation that is behind, the first."""
        self.open(heads, window)
        return min(self.behind, key=lambda s: (s.generation, s.shard), default=None)

    def open(self, heads: Heads, window: Window) -> None:
        """Look at unread generations, one after the other, until there is something to read."""
        while not self.behind and self.unread_from is not None:
            generation = self.unread_from
            if generation > heads.newest:
                if self.done.nothing_from(generation):
                    self.unread_from = None  # whatever comes is offered
                return
            self.unread_from = generation + 1
            if generation in self.done.streams or self.done.default(generation) != DONE:
                flying = _open_offsets(window)
                had = self.done.streams.get(generation, {})
                if not flying and not self.done.default(generation) and had == heads.ends(generation):
                    continue  # nearly always: it is up to date
                for stream in heads.of_generation(generation):
                    self._open_stream(stream, heads.known(stream) or 0, flying.get(stream, ()))

    def _open_stream(self, stream: Stream, head: int, flying: Sequence[int]) -> None:
        progress: Progress = self.done.get(stream)
        at = past_of(progress)
        if flying:
            sent = to_cursor(progress)
            for offset in flying:
                sent.ack(offset)
            at = sent.floor
        if at < head:
            self.behind[stream] = at
            if isinstance(progress, Cursor) and progress.top >= at:
                self.ahead[stream] = progress.copy()

    def waits_for_older(self, stream: Stream) -> bool:
        """A publisher's messages keep their order across generations: the older is read to its end first."""
        return bool(self.behind) and any(s.generation < stream.generation for s in self.behind)

    def fall_behind(self, stream: Stream, at: int) -> None:
        self.behind.setdefault(stream, at)

    def read_to(self, stream: Stream, past: int) -> None:
        self.behind[stream] = past
        self.move(stream)

    def lost(self, stream: Stream) -> None:
        """It is gone, and nothing more can be read of it."""
        self.behind.pop(stream, None)
        self.ahead.pop(stream, None)
        self.done.set(stream, DONE)

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
        ahead = self.ahead.get(stream)
        if ahead is not None and offsets[0] > ahead.top:
            ahead = None
        flying = set(window.offsets_of(self.origin(stream))) if len(window) else set()
        if ahead is None and not flying and only is not None:
            had = only.done.get(stream)
            if isinstance(had, int) and offsets[0] >= had:
                return range(len(rows.topics))
        if flying and (under_way := flying.intersection(offsets)):
            self.skipped.setdefault(stream, set()).update(under_way)
        meaning = self._subscriptions.meaning_at
        return [
            at
            for at, offset in enumerate(offsets)
            if offset not in flying
            and not (ahead is not None and ahead.is_acked(offset))
            and meaning(rows.topics[at], stream, offset)
        ]

    def handled(self, stream: Stream, offsets: Sequence[int]) -> None:
        """Acknowledged; should one come once more when the log is read, as after a resume, it is not sent again."""
        if self.is_unread(stream):
            for offset in offsets:
                self.done.add(stream, Cursor(-1, [(offset, offset)]))
            return
        behind, skipped = self.behind.get(stream, DONE), self.skipped.get(stream, ())
        if max(offsets) < behind and not skipped:
            return
        for offset in offsets:
            if offset >= behind or offset in skipped:
                self.ahead.setdefault(stream, Cursor()).ack(offset)

    # -- how far it has come ---------------------------------------------------------------------------------

    def stand(self, stream: Stream, heads: Heads) -> int:
        """The first offset that has not been taken from the log."""
        found = self.behind.get(stream)
        if found is not None:
            return found
        return self.done.past(stream) if self.is_unread(stream) else heads.known(stream) or 0

    def bring_up_live(self, heads: Heads, window: Window, waiting: Callable[[], dict[Stream, int]]) -> bool:
        """The same as `bring_up` of all streams, for whoever is up to date and waits for nothing; else nothing."""
        if self.behind or self.ahead or self.unread_from is not None or _open_offsets(window) or waiting():
            return False
        if heads.oldest_open > self._done_below:
            self._done_below = heads.oldest_open
            self._origins = {s: origin for s, origin in self._origins.items() if s.generation >= self._done_below}
        self.done = heads.end()
        return True

    def bring_up(
        self,
        streams: Iterable[Stream],
        heads: Heads,
        window: Window,
        waiting: Callable[[], dict[Stream, int]],
    ) -> bool:
        """Let `done` be true of these streams; of all others it says no more than is true.

        `waiting`: the first offset that waits to be sent, by stream. Whether generations were done with.
        """
        limit = heads.oldest_open if self.unread_from is None else min(heads.oldest_open, self.unread_from)
        flying, first_waiting = _open_offsets(window), waiting()
        wanted = dict.fromkeys(streams)
        further = limit > self._done_below
        if further:
            # Whoever is not behind in a finalised stream, and has nothing of it on the way, has had all of it.
            self.done.fill(self._done_below, limit, DONE)
            self._done_below = limit
            wanted.update(dict.fromkeys(s for s in (*self.behind, *flying, *first_waiting) if s.generation < limit))
            kept = {stream for stream in self._origins if stream.generation >= limit or stream in flying}
            self._origins = {stream: origin for stream, origin in self._origins.items() if stream in kept}
        for stream in wanted:
            if self.is_unread(stream):
                continue
            if (head := heads.known(stream)) is not None:
                self._bring_up(stream, head, flying.get(stream, ()), first_waiting.get(stream))
            elif stream in self.behind:
                self.done.set(stream, self.behind[stream])  # dropped: whoever comes to read it will see
            elif stream not in flying and stream not in first_waiting:
                self.done.set(stream, DONE)  # dropped, and all of it was sent
        return further

    def _bring_up(self, stream: Stream, head: int, flying: Sequence[int], waiting: int | None) -> None:
        past = self.behind.get(stream, head)
        if waiting is not None and waiting < past:
            past = waiting
        ahead = self.ahead.get(stream)
        if ahead is not None and past > ahead.top:
            del self.ahead[stream]  # from here on the position says it
            ahead = None
        if stream.generation < self._done_below and past >= head and not flying:
            self.done.set(stream, DONE)
        elif not flying and ahead is None:
            self.done.set(stream, past)
        else:
            cursor, first = Cursor() if ahead is None else ahead.copy(), 0
            for offset in sorted(flying):
                if first < offset < past:
                    cursor.ack_range(first, offset - 1)
                if offset < past:
                    first = offset + 1
            if first < past:
                cursor.ack_range(first, past - 1)
            self.done.set(stream, cursor)

    def is_beyond(self, heads: Heads, window: Window) -> bool:
        """Was more of a stream sent already, by another node, than this one knows of? What it hears next is not new."""
        for generation in range(heads.oldest_open, heads.newest + 1):
            had = self.done.streams.get(generation, {})
            if not self.done.default(generation) and (not had or had == heads.ends(generation)):
                continue  # nearly always: it is new, or up to date
            for stream in heads.of_generation(generation):
                progress = self.done.get(stream)
                past = progress if isinstance(progress, int) else progress.top + 1
                if past > heads[stream] and stream not in heads.sealed:
                    return True
        if any(generation > heads.newest for generation in self.done.streams):
            return True
        flying = _open_offsets(window)
        return any(max(offsets) >= heads.get(stream, DONE) for stream, offsets in flying.items())

    def drop_covered(self) -> None:
        """What is done for every subscription need not be said of each."""
        if (only := self._subscriptions.only) is not None and only.done is NOTHING_DONE:
            return
        seen: dict[int, CursorMap] = {id(NOTHING_DONE): NOTHING_DONE}
        for subscription in self._subscriptions:
            had = subscription.done
            if id(had) not in seen:
                seen[id(had)] = NOTHING_DONE if self.done.covers(had) else had
            subscription.done = seen[id(had)]

    # -- beginning, and beginning anew -------------------------------------------------------------------------

    def restart(self, done: CursorMap, heads: Heads, window: Window) -> None:
        """Read on from there, whatever was."""
        self.done = done
        self._done_below = 0
        self.behind.clear()
        self.ahead.clear()
        self.skipped.clear()
        self.unread_from = done.first_unfinished()
        self.open(heads, window)


def _nothing() -> None: ...


def _open_offsets(window: Window) -> dict[Stream, list[int]]:
    """What is in flight of the session's own streams."""
    found: dict[Stream, list[int]] = {}
    if len(window):
        for _, (origin, offset, qos) in window:
            if isinstance(origin, StreamOrigin) and qos != RELEASED:
                found.setdefault(origin.stream, []).append(offset)
    return found
