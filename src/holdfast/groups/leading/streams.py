"""What a group has to lend: its streams, how far each has come, and which may be lent now.

    seen (in the log) --> open (its turn has come) --> finished (sealed and consumed) --> dropped (by retention)

A stream is *open* if its generation's turn has come: with order "strict", once the generation before it is
consumed, in the same shard if both have the same shards, in all of them if not (a publisher may have moved). With the
key `message` there is no order to keep, so whoever is slow with the last of one generation does not hold up the next;
but the oldest still come first, and there are only so many loans.

A stream that the store has dropped and the lake still holds stays among those that are seen, and may be lent.

The one surprising rule: the progress of a finished stream is kept until retention drops the stream, or the next
leader would take it for a new one and deliver it again. Streams in the lake are kept for ever: their progress goes
once their whole generation is finished, and from then on `from_generation` says that it is.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping

from holdfast.groups.leading.unsaved import Unsaved
from holdfast.groups.progress import StreamProgress
from holdfast.groups.protocol.effects import Skipped
from holdfast.groups.protocol.events import StreamInfo
from holdfast.groups.protocol.nouns import Key, Mark, Piece
from holdfast.groups.record import GroupRecord
from holdfast.model import Stream

GENERATIONS_MAX = 2
"""With the key `message`: so many generations of a shard are lent at once."""


class GroupStreams:
    """Streams of one group and their progress; what changes is handed to `unsaved`."""

    def __init__(self, unsaved: Unsaved) -> None:
        self._unsaved = unsaved
        self.seen: dict[Stream, int | None] | None = None
        """Streams of the log, each with its end if it is sealed; None: nobody has looked yet."""
        self.heads: dict[Stream, int] = {}
        """How far each went when somebody last looked."""
        self.progress: dict[Stream, StreamProgress] = {}
        self.news = False
        """Something happened that may change what is open."""
        self.from_generation = 0
        self._infos: tuple[StreamInfo, ...] = ()
        self._course = ""
        self._key: Key = "publisher"
        self._starts: Mapping[Stream, int] = {}

    def load(self, record: GroupRecord, stored: Iterable[StreamProgress]) -> None:
        self._course, self._starts, self._key = record.course, record.starts, record.key
        self.from_generation = record.from_generation
        for progress in stored:
            if progress.course == record.course:
                self.progress[progress.stream] = progress
            else:
                self._unsaved.forget(progress)

    def see(self, infos: Iterable[StreamInfo]) -> tuple[Skipped, ...]:
        """These are the streams now; what is lost of those that were dropped."""
        before = self.seen or {}
        self._infos = tuple(infos)
        gone = before.keys() - {info.stream for info in self._infos}
        lost = [Skipped(s, self.progress[s].floor, before[s]) for s in sorted(gone) if not self.finished(s)]
        self._take_infos()
        return tuple(lost)

    def _take_infos(self) -> None:
        mine = [info for info in self._infos if info.stream.generation >= self.from_generation]
        self.seen = {info.stream: info.end for info in mine}
        self.heads = {info.stream: info.next_offset for info in mine}
        for stream in self.seen:
            if stream not in self.progress:
                self._start(stream)
        self.news = True

    def _start(self, stream: Stream) -> StreamProgress:
        begun = StreamProgress.starting(stream, self._course, self._starts.get(stream, 0), self._key)
        begun.parts = self._unsaved.keep(stream)
        self.progress[stream] = begun
        return begun

    def start_over(self, record: GroupRecord) -> None:
        """After a seek: the record says where."""
        self._course, self._starts, self.from_generation = record.course, record.starts, record.from_generation
        self._unsaved.start_over()
        for progress in self.progress.values():
            self._unsaved.forget(progress)
        self.progress.clear()
        self._take_infos()

    def merge(self, piece: Piece, course: str, mark: Mark) -> bool:
        """Take over what somebody did, if it is about this course and a stream that exists; whether it was news."""
        if course != self._course or (self.seen is not None and piece.stream not in self.seen):
            return False
        # Members may bring news of a stream before we have looked which there are.
        progress = self.progress.get(piece.stream) or self._start(piece.stream)
        if not progress.merge(piece, mark):
            return False
        self._unsaved.note(piece.stream)
        end = self.seen.get(piece.stream) if self.seen else None
        if end is not None and any(progress.reached(mine) >= end for mine in progress.common(piece)):
            self.news = True
        return True

    def cut(self, stream: Stream, of: int, lent: Container[Piece]) -> None:
        """Cut anew whatever of it is not lent."""
        if self.progress[stream].cut(of, lent):
            self._unsaved.note(stream)
            if self.finished(stream):
                self.news = True  # what an earlier slicing had done turns out to be all of it

    def note_attempts(self, piece: Piece, attempts: Iterable[tuple[int, int]]) -> None:
        if self.progress[piece.stream].note_attempts(piece, attempts):
            self._unsaved.note(piece.stream)

    def finished(self, stream: Stream) -> bool:
        end = self.seen.get(stream) if self.seen else None
        return end is not None and self.progress[stream].floor >= end

    def piece_finished(self, piece: Piece) -> bool:
        end = self.seen.get(piece.stream) if self.seen else None
        return end is not None and self.progress[piece.stream].reached(piece) >= end

    def open_streams(self, order: str, key: Key) -> list[Stream]:
        """Streams that are not consumed and whose turn has come."""
        unfinished = [stream for stream in sorted(self.seen or {}) if not self.finished(stream)]
        if order == "parallel":
            return unfinished
        if key == "message":
            return self._oldest(unfinished)
        shards: dict[tuple[str, int], set[int]] = {}
        for stream in self.seen or {}:
            shards.setdefault((stream.log, stream.generation), set()).add(stream.shard)
        found: list[Stream] = []
        waited: set[tuple[str, int]] = set()
        before: list[tuple[str, int]] = []
        for stream in sorted(unfinished, key=lambda s: (s.log, s.generation, s.shard)):
            mine = (stream.log, stream.generation)
            # An earlier generation holds up its own shard; all of them, if it was sharded differently.
            if (stream.log, stream.shard) not in waited and not any(
                log == stream.log and generation < stream.generation and shards[log, generation] != shards[mine]
                for log, generation in before
            ):
                found.append(stream)
            waited.add((stream.log, stream.shard))
            if not before or before[-1] != mine:
                before.append(mine)
        return sorted(found)

    @staticmethod
    def _oldest(unfinished: Iterable[Stream]) -> list[Stream]:
        found: dict[tuple[str, int], list[Stream]] = {}
        for stream in sorted(unfinished, key=lambda s: s.generation):
            found.setdefault((stream.log, stream.shard), []).append(stream)
        return sorted(stream for some in found.values() for stream in some[:GENERATIONS_MAX])

    def sweep(self, lent: set[Stream]) -> list[Stream]:
        """Let go of streams that the log no longer has (these are returned), and of the details of finished ones."""
        if self.seen is None:
            return []
        self._leave_behind(lent)
        gone = [stream for stream in self.progress if stream not in self.seen and stream not in lent]
        for stream in gone:
            self._unsaved.forget(self.progress.pop(stream))
        for stream, progress in self.progress.items():
            if (len(progress.cursors) > 1 or progress.layers) and stream not in lent and self.finished(stream):
                progress.whole()
                self._unsaved.note(stream)
        return gone

    def _leave_behind(self, lent: set[Stream]) -> None:
        """Generations that only the lake holds, and that are finished, need no progress any more."""
        kept = [i.stream.generation for i in self._infos if not i.in_lake]
        kept += [stream.generation for stream in lent]
        kept += [stream.generation for stream in self.seen or {} if not self.finished(stream)]
        if kept and min(kept) > self.from_generation and any(s.generation < min(kept) for s in self.seen or {}):
            self.from_generation = min(kept)
            self.seen = {s: end for s, end in (self.seen or {}).items() if s.generation >= self.from_generation}
