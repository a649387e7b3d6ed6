"""How far each stream has come on this node, by generation: so that nobody has to look through all of them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from holdfast.cursors.cursor_map import DONE, CursorMap
from holdfast.model import Stream


class KeptGenerations(NamedTuple):
    """Which generations can be read, in the store or in the lake."""

    first: int
    newest: int
    missing: frozenset[int]
    """Between the first and the newest: gone all the same."""

    @classmethod
    def of(cls, streams: Iterable[Stream]) -> KeptGenerations:
        kept = {stream.generation for stream in streams}
        first, newest = min(kept, default=0), max(kept, default=-1)
        return cls(first, newest, frozenset(range(first, newest)) - kept)

    def has_lost(self, generation: int) -> bool:
        """One that has not come yet, for all that is known here, is not lost."""
        return generation < self.first or generation in self.missing


class Heads(dict[Stream, int]):
    """The store's streams as a dict; those that only the lake still holds beside it."""

    def __init__(self, heads: Mapping[Stream, int] | None = None, sealed: Iterable[Stream] = ()):
        super().__init__()
        self.sealed: set[Stream] = set()
        """Finalised, and delivered here to their ends. Changed through `seal` and by deletion only."""
        self.lake: Mapping[Stream, int] = {}
        """Streams that only the lake still holds, and where they end. Changed through `set_lake` only."""
        self._streams: dict[int, list[Stream]] = {}
        self._lake_streams: dict[int, list[Stream]] = {}
        self._oldest_open: int | None = None
        self._kept: KeptGenerations | None = None
        self._ends: dict[int, dict[int, int]] = {}
        self._end: CursorMap | None = None
        for stream, head in (heads or {}).items():
            self[stream] = head
        self.seal(sealed)

    @classmethod
    def of(cls, heads: Mapping[Stream, int], sealed: Iterable[Stream] = ()) -> Heads:
        """The same, or made from a mapping."""
        return heads if isinstance(heads, Heads) else cls(heads, sealed)

    # -- changing ------------------------------------------------------------------------------------------

    def __setitem__(self, stream: Stream, head: int) -> None:
        if stream not in self:
            self._streams.setdefault(stream.generation, []).append(stream)
            self._oldest_open = self._kept = None
        self._end = None
        self._ends.pop(stream.generation, None)
        super().__setitem__(stream, head)

    def __delitem__(self, stream: Stream) -> None:
        super().__delitem__(stream)
        self.sealed.discard(stream)
        left = self._streams[stream.generation]
        left.remove(stream)
        if not left:
            del self._streams[stream.generation]
        self._ends.pop(stream.generation, None)
        self._oldest_open = self._kept = self._end = None

    def setdefault(self, stream: Stream, head: int = 0, /) -> int:
        if stream not in self:
            self[stream] = head
        return self[stream]

    def seal(self, streams: Iterable[Stream]) -> None:
        self.sealed.update(streams)
        self._oldest_open = self._end = None

    def set_lake(self, lake: Mapping[Stream, int]) -> None:
        self.lake, self._lake_streams, self._kept, self._ends, self._end = lake, {}, None, {}, None
        for stream in lake:
            self._lake_streams.setdefault(stream.generation, []).append(stream)

    # -- asking --------------------------------------------------------------------------------------------

    def known(self, stream: Stream) -> int | None:
        """How far this stream can be read, in the store or in the lake."""
        found = self.get(stream)
        return self.lake.get(stream) if found is None and self.lake else found

    def of_generation(self, generation: int) -> Sequence[Stream]:
        """Streams of this generation, wherever they can be read."""
        found = self._streams.get(generation, [])
        return [*self._lake_streams[generation], *found] if generation in self._lake_streams else found

    def ends(self, generation: int) -> Mapping[int, int]:
        """How far the streams of this generation can be read, by shard; without those that are empty."""
        found = self._ends.get(generation)
        if found is None:
            known = ((stream.shard, self.known(stream)) for stream in self.of_generation(generation))
            found = self._ends[generation] = {shard: end for shard, end in known if end}
        return found

    def every(self) -> dict[Stream, int]:
        """All streams that can be read, the lake's included."""
        return {**self.lake, **self} if self.lake else self

    @property
    def newest(self) -> int:
        """The newest generation; -1: there is none."""
        return self.kept.newest

    @property
    def oldest_open(self) -> int:
        """All generations before this one are finalised, and delivered here to their ends."""
        if self._oldest_open is None:
            self._oldest_open = min((s.generation for s in self if s not in self.sealed), default=self.newest + 1)
        return self._oldest_open

    @property
    def kept(self) -> KeptGenerations:
        if self._kept is None:
            self._kept = KeptGenerations.of((*self, *self.lake))
        return self._kept

    @property
    def log(self) -> str:
        return next(iter(self)).log if self else ""

    # -- where a subscription may begin ----------------------------------------------------------------------

    def end(self) -> CursorMap:
        """Behind everything that is there."""
        if self._end is None:
            self._end = CursorMap.done_before(self.oldest_open)
            for generation in range(self.oldest_open, self.newest + 1):
                self._end.set_generation(generation, self.ends(generation))
        return self._end.copy()

    def beginning(self) -> CursorMap:
        """In front of everything that can still be read."""
        return self.starting_at({})

    def starting_at(self, positions: Mapping[Stream, int]) -> CursorMap:
        """In each stream from there on; from its beginning in streams that are not named."""
        found = CursorMap.done_before(self.kept.first)
        for gone in self.kept.missing:
            found.finish(gone)
        for generation in range(self.kept.first, self.newest + 1) if positions else ():
            streams = self.of_generation(generation)
            starts = [positions.get(stream, 0) for stream in streams]
            if generation < self.oldest_open and all(
                at >= (self.known(stream) or 0) for stream, at in zip(streams, starts, strict=True)
            ):
                found.finish(generation)
            elif len(set(starts)) == 1 and generation < self.oldest_open:
                found.fill(generation, generation + 1, starts[0])
            else:
                for stream, at in zip(streams, starts, strict=True):
                    found.set(stream, DONE if at >= (self.known(stream) or 0) and stream in self.sealed else at)
        return found
