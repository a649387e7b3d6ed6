"""Cursors of one reader in every stream of a log: a default per generation, and the exceptions.

    generation   1   2   3   4   5   6   7 ...
    default     ├── done to its end ──┤── nothing done ──▶
    exceptions           ▲ shard 2: up to 17             ▲ in the open generation: one number per shard

A generation has as many streams as it has shards, and a log may keep hundreds of generations. Whoever has read them
all must not pay for each: what is the same for all streams of neighbouring generations is said once. The surprising
rule: *done* is said of streams whose end nobody here knows, so it is a number larger than any offset.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator

from holdfast.cursors.cursor import Cursor
from holdfast.model import Stream

DONE = 1 << 62
"""Past the end of any stream."""

Progress = int | Cursor
"""The first offset that is not done; a Cursor where ranges above that are done, too."""


def past_of(progress: Progress) -> int:
    """The first offset that is not done."""
    return progress if isinstance(progress, int) else progress.floor


def is_done(progress: Progress, offset: int) -> bool:
    return offset < progress if isinstance(progress, int) else progress.is_acked(offset)


def union(one: Progress, other: Progress) -> Progress:
    """What is done in either."""
    if isinstance(one, int) and isinstance(other, int):
        return max(one, other)
    merged = to_cursor(one)
    merged.merge(to_cursor(other))
    return simplest(merged)


def to_cursor(progress: Progress) -> Cursor:
    """A cursor of one's own."""
    return Cursor(progress - 1) if isinstance(progress, int) else progress.copy()


def simplest(progress: Progress) -> Progress:
    """As a number, where there are no ranges."""
    if isinstance(progress, int) or progress.top != progress.offset:
        return progress
    return progress.floor


class CursorMap:
    """What is done in each stream. All streams are of one log."""

    __slots__ = ("_begins", "_pasts", "streams")

    def __init__(self, spans: Iterable[tuple[int, int]] = ((0, 0),)):
        """`spans`: from this generation on, this is the first offset that is not done. The first is of generation 0."""
        self._begins: list[int] = []
        self._pasts: list[int] = []
        self._set_spans(spans)
        self.streams: dict[int, dict[int, Progress]] = {}
        """The exceptions: by generation, by shard. Changed through `set` only."""

    @classmethod
    def done_before(cls, generation: int) -> CursorMap:
        """All older generations are done; of this and later ones, nothing is."""
        return cls(((0, DONE), (generation, 0))) if generation > 0 else cls()

    @property
    def spans(self) -> list[tuple[int, int]]:
        """The defaults: from which generation on, and the first offset that is not done."""
        return list(zip(self._begins, self._pasts, strict=True))

    @property
    def nothing(self) -> bool:
        """Nothing is done anywhere."""
        return not self.streams and self._pasts == [0]

    def __iter__(self) -> Iterator[tuple[int, int, Progress]]:
        """The exceptions in order: generation, shard, progress."""
        for generation in sorted(self.streams):
            shards = self.streams[generation]
            for shard in sorted(shards):
                yield generation, shard, shards[shard]

    # -- asking --------------------------------------------------------------------------------------------

    def default(self, generation: int) -> int:
        return self._pasts[bisect_right(self._begins, generation) - 1]

    def get(self, stream: Stream) -> Progress:
        """What is done in this stream. Not to be changed."""
        shards = self.streams.get(stream.generation)
        if shards is not None and (found := shards.get(stream.shard)) is not None:
            return found
        return self._pasts[bisect_right(self._begins, stream.generation) - 1]

    def past(self, stream: Stream) -> int:
        """The first offset that is not done."""
        return past_of(self.get(stream))

    def is_done(self, stream: Stream, offset: int) -> bool:
        return is_done(self.get(stream), offset)

    def nothing_from(self, generation: int) -> bool:
        """Nothing is done in this and later generations."""
        return self._begins[-1] <= generation and not self._pasts[-1] and all(g < generation for g in self.streams)

    def first_unfinished(self) -> int:
        """The oldest generation with a stream that is not done to its end."""
        found = next((begin for begin, past in self.spans if past != DONE), None)
        named = [g for g, shards in self.streams.items() if any(p != DONE for p in shards.values())]
        return min([*named, *([] if found is None else [found])], default=self._begins[-1])

    # -- changing ------------------------------------------------------------------------------------------

    def set(self, stream: Stream, progress: Progress) -> None:
        """This is what is done in this stream, whatever was."""
        _, shard, generation = stream
        progress = simplest(progress)
        if progress == self.default(generation):
            shards = self.streams.get(generation)
            if shards is not None:
                shards.pop(shard, None)
                if not shards:
                    del self.streams[generation]
        else:
            self.streams.setdefault(generation, {})[shard] = progress

    def add(self, stream: Stream, progress: Progress) -> None:
        """This is done as well."""
        self.set(stream, union(self.get(stream), progress))

    def fill(self, first: int, past: int | None, offset: int) -> None:
        """In every stream of the generations `first <= generation < past` the first offset not done is this one."""
        if past is not None and past <= first:
            return
        for generation in [g for g in self.streams if first <= g and (past is None or g < past)]:
            del self.streams[generation]
        spans = [span for span in self.spans if span[0] < first]
        spans.append((first, offset))
        if past is not None:
            spans.append((past, self.default(past)))
            spans += [span for span in self.spans if span[0] > past]
        self._set_spans(spans)

    def finish(self, generation: int) -> None:
        """Every stream of this generation is done to its end."""
        self.fill(generation, generation + 1, DONE)

    def merge(self, other: CursorMap) -> None:
        """What is done there is done here."""
        if other.nothing:
            return
        streams: dict[int, dict[int, Progress]] = {}
        for generation in self.streams.keys() | other.streams.keys():
            mine, its = self.streams.get(generation, {}), other.streams.get(generation, {})
            default, its_default = self.default(generation), other.default(generation)
            floor = max(default, its_default)
            merged = {
                shard: both
                for shard in mine.keys() | its.keys()
                if (both := union(mine.get(shard, default), its.get(shard, its_default))) != floor
            }
            if merged:
                streams[generation] = merged
        begins = sorted({*self._begins, *other._begins})
        self._set_spans([(begin, max(self.default(begin), other.default(begin))) for begin in begins])
        self.streams = streams

    def lower(self, other: CursorMap) -> None:
        """No stream is further than there; ranges are forgotten."""
        streams: dict[int, dict[int, Progress]] = {}
        for generation in self.streams.keys() | other.streams.keys():
            mine, its = self.streams.get(generation, {}), other.streams.get(generation, {})
            default, its_default = self.default(generation), other.default(generation)
            lowest = min(default, its_default)
            lowered: dict[int, Progress] = {
                shard: both
                for shard in mine.keys() | its.keys()
                if (both := min(past_of(mine.get(shard, default)), past_of(its.get(shard, its_default)))) != lowest
            }
            if lowered:
                streams[generation] = lowered
        begins = sorted({*self._begins, *other._begins})
        self._set_spans([(begin, min(self.default(begin), other.default(begin))) for begin in begins])
        self.streams = streams

    def covers(self, other: CursorMap) -> bool:
        """Is everything done here that is done there?"""
        if other.nothing or self == other:
            return True
        both = self.copy()
        both.merge(other)
        return both == self

    def copy(self) -> CursorMap:
        twin = CursorMap.__new__(CursorMap)
        twin._begins, twin._pasts = self._begins[:], self._pasts[:]
        twin.streams = {
            generation: {s: p if isinstance(p, int) else p.copy() for s, p in shards.items()}
            for generation, shards in self.streams.items()
        }
        return twin

    def _set_spans(self, spans: Iterable[tuple[int, int]]) -> None:
        begins: list[int] = []
        pasts: list[int] = []
        for begin, past in spans:
            if not pasts or pasts[-1] != past:
                begins.append(begin)
                pasts.append(past)
        self._begins, self._pasts = begins, pasts

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, CursorMap):
            return NotImplemented
        return self._pasts == other._pasts and self._begins == other._begins and self.streams == other.streams

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        spans = ", ".join(f"{begin}..: {'done' if past == DONE else past}" for begin, past in self.spans)
        return f"<{spans}; " + ", ".join(f"{g}.{s}: {p}" for g, s, p in self) + ">"


NOTHING_DONE = CursorMap()
"""Shared by whoever has had nothing. Not to be changed."""
