"""How far a group has come in one stream, whole or in key slices, exactly.

    of = 1      one cursor for everybody
    of = n      n cursors; slice i holds the messages whose publisher hashes to i, and its cursor says of every
                *other* message nothing: offsets of neighbours count as passed over

When a stream is cut anew, what the old slices had done becomes a `Layer`: a message is done if its publisher's
slice in any layer says so. A layer is dropped once every cursor has gone beyond it.

The one surprising rule: a slice's cursor may only be asked about messages of that slice. Nobody but a reader
knows a message's publisher, so the leader never merges slices; it hands the layers on with the next loan.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from zlib import crc32

from holdfast.cursors import Cursor
from holdfast.errors import RequestError
from holdfast.groups.protocol.nouns import Layer, Mark, Piece
from holdfast.model import Stream


def slice_of(publisher: str, of: int) -> int:
    """Which of `of` slices this publisher's messages are in; the same on every node, for ever."""
    # The low bits chose the shard already: within one stream they are the same for everybody.
    return (crc32(publisher.encode()) >> 12) % of if of > 1 else 0


def merged(cursor: Cursor, mark: Mark) -> bool:
    """Acknowledge in `cursor` whatever `mark` does; whether that was news."""
    if mark.offset <= cursor.offset and all(not cursor.unacked(first, last + 1) for first, last in mark.acked):
        return False
    if mark.offset >= 0:
        cursor.ack_range(0, mark.offset)
    for first, last in mark.acked:
        cursor.ack_range(first, last)
    return True


class Done:
    """What of a stream need not be delivered: a mark, and layers of earlier slicings."""

    __slots__ = ("_layers", "cursor", "index", "of")

    def __init__(self, piece: Piece, mark: Mark, skip: Iterable[Layer] = ()):
        self.index, self.of = piece.part, piece.of
        self.cursor = mark.cursor()
        self._layers = [(layer.of, {index: old.cursor() for index, old in layer.marks}) for layer in skip]

    def plain_from(self, offset: int) -> bool:
        """From here on every message is wanted: no slice, no layer, nothing acknowledged above."""
        return self.of == 1 and not self._layers and self.cursor.top < offset

    def wants(self, offset: int, publisher: str) -> bool:
        """Is this message to be delivered under this loan?"""
        if slice_of(publisher, self.of) != self.index or self.cursor.is_acked(offset):
            return False
        for of, cursors in self._layers:
            cursor = cursors.get(slice_of(publisher, of))
            if cursor is not None and cursor.is_acked(offset):
                return False
        return True


class StreamProgress:
    """Cursors of one stream, one per slice; changed by its leader only."""

    __slots__ = ("attempts", "course", "cursors", "layers", "parts", "stream")

    def __init__(self, stream: Stream, course: str, cursors: list[Cursor], layers: tuple[Layer, ...] = ()):
        self.stream, self.course, self.cursors, self.layers = stream, course, cursors, layers
        self.attempts: dict[int, int] = {}
        """Deliveries without acknowledgement so far, where the group counts them."""
        self.parts = 1
        """Over how many values it is stored, at most: see `split`."""

    @classmethod
    def starting(cls, stream: Stream, course: str, offset: int) -> StreamProgress:
        """Nothing done yet, `offset` being the first message wanted."""
        return cls(stream, course, [Cursor(offset - 1)])

    @property
    def of(self) -> int:
        return len(self.cursors)

    @property
    def floor(self) -> int:
        """Everything below this is done, in every slice."""
        return min(cursor.offset for cursor in self.cursors) + 1

    def pieces(self) -> list[Piece]:
        of = self.of
        return [Piece(self.stream, index, of) for index in range(of)]

    def mark(self, piece: Piece) -> Mark:
        return Mark.of_cursor(self.cursors[piece.part])

    def merge(self, piece: Piece, mark: Mark) -> bool:
        """Take over what a member did in this piece, be it of this slicing or an earlier one; whether it was news."""
        if piece.of == self.of:
            news = merged(self.cursors[piece.part], mark)
            if news and self.layers:
                self._trim()
            return news
        if max(mark.offset, mark.acked[-1][1] if mark.acked else -1) < self.floor:
            return False
        if piece.of == 1:
            # An offset that the whole stream has done is done in every slice: no layer is needed.
            return True in [merged(cursor, mark) for cursor in self.cursors]
        return self._merge_into_layer(piece, mark)

    def _merge_into_layer(self, piece: Piece, mark: Mark) -> bool:
        for at, layer in enumerate(self.layers):
            if layer.of == piece.of:
                marks = dict(layer.marks)
                cursor = marks.get(piece.part, Mark()).cursor()
                news = merged(cursor, mark)
                marks[piece.part] = Mark.of_cursor(cursor)
                changed = Layer(layer.of, tuple(sorted(marks.items())))
                self.layers = (*self.layers[:at], changed, *self.layers[at + 1 :])
                return news
        self.layers = (*self.layers, Layer(piece.of, ((piece.part, mark),)))
        return True

    def cut(self, of: int) -> None:
        """Cut the stream anew into `of` slices. Only while nothing of it is lent."""
        if of == self.of:
            return
        if self.of == 1:
            self.cursors = [self.cursors[0].copy() for _ in range(of)]
        else:
            floor = self.floor
            old = [(index, Mark.of_cursor(cursor)) for index, cursor in enumerate(self.cursors)]
            self.cursors = [Cursor(floor - 1) for _ in range(of)]
            for index, mark in old:
                self.merge(Piece(self.stream, index, len(old)), mark)
        # What was cut like this before goes on where it was.
        for layer in [layer for layer in self.layers if layer.of == of]:
            for part, mark in layer.marks:
                merged(self.cursors[part], mark)
        self.layers = tuple(layer for layer in self.layers if layer.of != of)
        self._trim()

    def _trim(self) -> None:
        floor = self.floor
        self.layers = tuple(
            layer
            for layer in self.layers
            if any((mark.acked[-1][1] if mark.acked else mark.offset) >= floor for _, mark in layer.marks)
        )

    def note_attempts(self, attempts: Iterable[tuple[int, int]]) -> None:
        """Remember how often these were delivered in vain, forget those that are done."""
        for offset, times in attempts:
            self.attempts[offset] = max(times, self.attempts.get(offset, 0))
        floor = self.floor
        for offset in [offset for offset in self.attempts if offset < floor]:
            del self.attempts[offset]

    def copy(self) -> StreamProgress:
        twin = StreamProgress(self.stream, self.course, [cursor.copy() for cursor in self.cursors], self.layers)
        twin.attempts = dict(self.attempts)
        twin.parts = self.parts
        return twin

    @property
    def ranges(self) -> int:
        """How large it is: acknowledged ranges and counted attempts."""
        layers = sum(1 + len(mark.acked) for layer in self.layers for _, mark in layer.marks)
        return sum(len(cursor.acked) for cursor in self.cursors) + layers + len(self.attempts)

    def parts_wanted(self, ranges_max: int) -> int:
        """Over how many values it is to be stored."""
        ranges = self.ranges
        if ranges <= ranges_max:
            return 1
        attempts = len(self.attempts)
        return -(-(ranges - attempts) // ranges_max) + -(-attempts // ranges_max)

    def split(self, ranges_max: int) -> list[StreamProgress]:
        """The same as a union of some that have at most so many ranges each; the first has the cursors' offsets.

        Each is a fact by itself, so it does not matter whether all of them are stored at one moment.
        """
        if self.parts_wanted(ranges_max) == 1:
            return [self]
        ranges = list(self._ranges())
        attempts = sorted(self.attempts.items())
        parts = [self._part(ranges[at : at + ranges_max]) for at in range(0, len(ranges), ranges_max)]
        for at in range(0, len(attempts), ranges_max):
            part = self._part([])
            part.attempts = dict(attempts[at : at + ranges_max])
            parts.append(part)
        for own, cursor in zip(self.cursors, parts[0].cursors, strict=True):
            merged(cursor, Mark(own.offset))
        return parts

    def _ranges(self) -> Iterator[tuple[Piece, Mark]]:
        """Everything above the cursors' offsets, range by range."""
        for piece in self.pieces():
            yield from ((piece, Mark(-1, (acked,))) for acked in self.cursors[piece.part].acked)
        for layer in self.layers:
            for index, mark in layer.marks:
                piece = Piece(self.stream, index, layer.of)
                yield piece, Mark(mark.offset)
                yield from ((piece, Mark(-1, (acked,))) for acked in mark.acked)

    def _part(self, ranges: Iterable[tuple[Piece, Mark]]) -> StreamProgress:
        cursors: dict[Piece, Cursor] = {piece: Cursor() for piece in self.pieces()}
        for piece, mark in ranges:
            merged(cursors.setdefault(piece, Cursor()), mark)
        layers: dict[int, list[tuple[int, Mark]]] = {}
        for piece, cursor in cursors.items():
            if piece.of != self.of:
                layers.setdefault(piece.of, []).append((piece.part, Mark.of_cursor(cursor)))
        found = tuple(Layer(of, tuple(sorted(marks))) for of, marks in layers.items())
        return StreamProgress(self.stream, self.course, [cursors[piece] for piece in self.pieces()], found)

    def add(self, part: StreamProgress) -> None:
        """One of those that `split` made; of another course it is a leftover."""
        if part.course != self.course:
            return
        for piece in part.pieces():
            self.merge(piece, part.mark(piece))
        for layer in part.layers:
            for index, mark in layer.marks:
                self.merge(Piece(self.stream, index, layer.of), mark)
        self.note_attempts(part.attempts.items())

    def to_json(self, now_seconds: float, epoch: int) -> bytes:
        """The stored form: a cursor as everyone reads it (its offset is what *all* slices have done), and more."""
        value: dict[str, object] = {
            "offset": self.floor - 1,
            "updated_at": int(now_seconds),
            "acked": self.cursors[0].acked if self.of == 1 else [],
            "epoch": epoch,
            "course": self.course,
        }
        if self.of > 1:
            value["slices"] = [[cursor.offset, cursor.acked] for cursor in self.cursors]
        if self.layers:
            value["layers"] = [
                [layer.of, [[index, mark.offset, mark.acked] for index, mark in layer.marks]] for layer in self.layers
            ]
        if self.parts > 1:
            value["parts"] = self.parts
        if self.attempts:
            value["attempts"] = sorted(self.attempts.items())
        return json.dumps(value).encode()

    @classmethod
    def from_json(cls, stream: Stream, data: bytes) -> StreamProgress:
        """The inverse of `to_json`; a cursor that was never a group's has the course ''."""
        whole = Cursor.from_json(data)
        value = json.loads(data)
        try:
            slices = value.get("slices")
            cursors = [whole] if slices is None else [Cursor(offset, acked) for offset, acked in slices]
            layers = tuple(
                Layer(of, tuple((index, _mark(offset, acked)) for index, offset, acked in marks))
                for of, marks in value.get("layers", [])
            )
            found = cls(stream, str(value.get("course", "")), cursors, layers)
            found.attempts = dict(value.get("attempts", []))
            found.parts = int(value.get("parts", 1))
        except (TypeError, ValueError) as error:
            raise RequestError(f"progress of {stream} is damaged: {error}") from error
        for cursor in found.cursors:
            cursor.epoch = 0
        return found

    def __repr__(self) -> str:
        return f"<{self.stream} {' '.join(map(repr, self.cursors))} layers={len(self.layers)}>"


def _mark(offset: int, acked: Iterable[Iterable[int]]) -> Mark:
    return Mark(offset, tuple((first, last) for first, last in acked))
