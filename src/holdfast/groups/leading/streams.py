"""What a group has to lend: its streams, how far each has come, and which may be lent now.

    seen (in the log) --> open (its turn has come) --> finished (sealed and consumed) --> dropped (by retention)

A stream is *open* if its generation's turn has come: with order "strict", once the generation before it is
consumed, in the same shard if both have the same shards, in all of them if not (a publisher may have moved).

The one surprising rule: the progress of a finished stream is kept until retention drops the stream, or the next
leader would take it for a new one and deliver it again.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from holdfast.cursors import Cursor
from holdfast.groups.leading.unsaved import Unsaved
from holdfast.groups.progress import StreamProgress
from holdfast.groups.protocol.events import StreamInfo
from holdfast.groups.protocol.nouns import Mark, Piece
from holdfast.groups.record import GroupRecord
from holdfast.model import Stream


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
        self._course = ""
        self._starts: Mapping[Stream, int] = {}

    def load(self, record: GroupRecord, stored: Iterable[StreamProgress]) -> None:
        self._course, self._starts = record.course, record.starts
        for progress in stored:
            if progress.course == record.course:
                self.progress[progress.stream] = progress
            else:
                self._unsaved.forget(progress)

    def see(self, infos: Iterable[StreamInfo]) -> None:
        self.seen, self.heads = {}, {}
        for stream, end, next_offset in infos:
            self.seen[stream], self.heads[stream] = end, next_offset
        for stream in self.seen:
            if stream not in self.progress:
                self._start(stream)
        self.news = True

    def _start(self, stream: Stream) -> StreamProgress:
        begun = StreamProgress.starting(stream, self._course, self._starts.get(stream, 0))
        begun.parts = self._unsaved.keep(stream)
        self.progress[stream] = begun
        return begun

    def start_over(self, record: GroupRecord) -> None:
        """After a seek: the record says where."""
        self._course, self._starts = record.course, record.starts
        self._unsaved.start_over()
        for progress in self.progress.values():
            self._unsaved.forget(progress)
        self.progress.clear()
        for stream in self.seen or {}:
            self._start(stream)
        self.news = True

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
        if end is not None and progress.cursors[piece.part % progress.of].offset + 1 >= end:
            self.news = True
        return True

    def cut(self, stream: Stream, of: int) -> None:
        """Cut it anew; only while nothing of it is lent."""
        self.progress[stream].cut(of)
        self._unsaved.note(stream)
        if self.finished(stream):
            self.news = True  # what an earlier slicing had done turns out to be all of it

    def note_attempts(self, stream: Stream, attempts: Iterable[tuple[int, int]]) -> None:
        self.progress[stream].note_attempts(attempts)
        self._unsaved.note(stream)

    def finished(self, stream: Stream) -> bool:
        end = self.seen.get(stream) if self.seen else None
        return end is not None and self.progress[stream].floor >= end

    def piece_finished(self, piece: Piece) -> bool:
        end = self.seen.get(piece.stream) if self.seen else None
        return end is not None and self.progress[piece.stream].cursors[piece.part].offset + 1 >= end

    def open_streams(self, order: str) -> list[Stream]:
        """Streams that are not consumed and whose turn has come."""
        unfinished = [stream for stream in sorted(self.seen or {}) if not self.finished(stream)]
        if order == "parallel":
            return unfinished
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

    def sweep(self, lent: set[Stream]) -> list[Stream]:
        """Let go of streams that the log no longer has (these are returned), and of the details of finished ones."""
        if self.seen is None:
            return []
        gone = [stream for stream in self.progress if stream not in self.seen and stream not in lent]
        for stream in gone:
            self._unsaved.forget(self.progress.pop(stream))
        for stream, progress in self.progress.items():
            if (progress.of > 1 or progress.layers) and stream not in lent and self.finished(stream):
                progress.cursors, progress.layers = [Cursor(progress.floor - 1)], ()
                progress.attempts.clear()
                self._unsaved.note(stream)
        return gone
