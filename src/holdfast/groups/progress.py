"""How far a group has come in one stream, whole or in slices of its key, exactly.

    of = 1      one cursor for everybody
    of = n      slice i of n, n a power of two, holds the messages whose publisher or topic hashes to i, or, with the
                key `message`, every n-th offset from i on. Its cursor says of every *other* message nothing: offsets
                of neighbours count as passed over

Each slice is cut for itself, once it is not lent: a stream may be in halves and quarters for a while, so that a member
that is slow to give back its own holds up nobody else. Cut finer, a new slice lies within the old one, and goes on with
a copy of its cursor. Cut coarser, what the old slices had done becomes a `Layer`: a message is done if its slice in any
layer says so. A layer is dropped once every cursor has gone beyond it.

With the key `message` neighbours' offsets are never worth a range of their own. A range reaches back over the
neighbours before its first offset, so a slice that is read without a gap is one range, as the whole stream would be.

The one surprising rule: a slice's cursor may only be asked about messages of that slice. Nobody but a reader
knows a message's publisher and topic, so the leader never merges slices; it hands the layers on with the next loan.
"""

from __future__ import annotations

import json
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from fractions import Fraction
from functools import cache
from math import gcd
from zlib import crc32

from holdfast.cursors import Cursor, Range
from holdfast.errors import RequestError
from holdfast.groups.protocol.nouns import Key, Layer, Mark, Piece, check_key
from holdfast.model import Stream

WORDS_MAX = 65_536
"""So many publishers or topics are remembered with their slice."""


def slice_of(word: str, of: int) -> int:
    """Which of `of` slices this publisher's, or topic's, messages are in; the same on every node, for ever."""
    # The low bits chose the shard already: within one stream they are the same for everybody.
    return (crc32(word.encode()) >> 12) % of if of > 1 else 0


class _Slices(dict[str, int]):
    """The slice of every word met so far: looked up once for each message, computed once for each word."""

    def __init__(self, of: int):
        super().__init__()
        self._of = of

    def __missing__(self, word: str) -> int:
        if len(self) >= WORDS_MAX:
            self.clear()
        found = self[word] = slice_of(word, self._of)
        return found


@cache
def _slices(of: int) -> _Slices:
    return _Slices(of)


def part_of(key: Key, of: int, offset: int, publisher: str, topic: str) -> int:
    """Which of `of` slices this message is in."""
    if of == 1:
        return 0
    if key == "message":
        return offset % of
    return _slices(of)[publisher if key == "publisher" else topic]


def first_of(piece: Piece, offset: int) -> int:
    """With the key `message`: the first offset of this slice that is not below `offset`."""
    return offset + (piece.part - offset) % piece.of


def back_to(piece: Piece, offset: int) -> int:
    """With the key `message`: where the neighbours between this offset of the slice and the one before it begin."""
    return max(0, offset - piece.of + 1)


def overlap(one: Piece, other: Piece) -> bool:
    """Can a publisher, or a topic, be in both of these slices, should their streams both have messages of it?"""
    common = gcd(one.of, other.of)
    return one.part % common == other.part % common


def merged(cursor: Cursor, mark: Mark) -> bool:
    """Acknowledge in `cursor` whatever `mark` does; whether that was news."""
    if mark.offset <= cursor.offset and all(not cursor.unacked(first, last + 1) for first, last in mark.acked):
        return False
    if mark.offset >= 0:
        cursor.ack_range(0, mark.offset)
    for first, last in mark.acked:
        cursor.ack_range(first, last)
    return True


def own_ranges(piece: Piece, ranges: Iterable[Range]) -> list[Range]:
    """With the key `message`: what these ranges say about this slice, each reaching back over the neighbours."""
    found = []
    for first, last in ranges:
        mine = first_of(piece, first)
        if mine <= last:
            found.append((back_to(piece, mine), last))
    return found


class Done:
    """What of a stream need not be delivered under a loan: neighbours' messages, a mark, layers of earlier slicings."""

    __slots__ = ("_layers", "cursor", "index", "key", "of", "sliced_from", "step")

    def __init__(self, piece: Piece, mark: Mark, skip: Iterable[Layer] = (), key: Key = "publisher"):
        self.index, self.of, self.key = piece.part, piece.of, key
        self.cursor = mark.cursor()
        self._layers = [(layer.of, {index: old.cursor() for index, old in layer.marks}) for layer in skip]
        tops = [cursor.top for _, cursors in self._layers for cursor in cursors.values()]
        self.sliced_from = max(self.cursor.top, *tops, -1) + 1
        """From this offset on nothing is done yet: only the slice matters."""
        self.step = piece.of if key == "message" else 1
        """The distance between two offsets that may be this slice's."""

    def owns(self, offset: int, publisher: str, topic: str) -> bool:
        """Is this message in the slice?"""
        return part_of(self.key, self.of, offset, publisher, topic) == self.index

    def wants(self, offset: int, publisher: str, topic: str) -> bool:
        """Is this message to be delivered under this loan?"""
        if not self.owns(offset, publisher, topic):
            return False
        if offset >= self.sliced_from:
            return True
        if self.cursor.is_acked(offset):
            return False
        for of, cursors in self._layers:
            cursor = cursors.get(part_of(self.key, of, offset, publisher, topic))
            if cursor is not None and cursor.is_acked(offset):
                return False
        return True

    def chosen(
        self, picks: Sequence[int], offsets: Sequence[int], publishers: Sequence[str] | str, topics: Sequence[str]
    ) -> Sequence[int]:
        """Of these rows of a block, those that are to be delivered under this loan."""
        mine = self._mine(picks, offsets, publishers, topics)
        if not mine or offsets[mine[0]] >= self.sliced_from:
            return mine
        one = publishers if isinstance(publishers, str) else None
        return [at for at in mine if self.wants(offsets[at], publishers[at] if one is None else one, topics[at])]

    def _mine(
        self, picks: Sequence[int], offsets: Sequence[int], publishers: Sequence[str] | str, topics: Sequence[str]
    ) -> Sequence[int]:
        of, index = self.of, self.index
        if of == 1 or not picks:
            return picks
        if self.key == "message":
            if isinstance(picks, range) and isinstance(offsets, range):
                return picks[(index - offsets[picks[0]]) % of :: of]
            return [at for at in picks if offsets[at] % of == index]
        slices = _slices(of)
        if self.key == "topic":
            return [at for at in picks if slices[topics[at]] == index]
        if isinstance(publishers, str):
            return picks if slices[publishers] == index else ()
        return [at for at in picks if slices[publishers[at]] == index]


class StreamProgress:
    """Cursors of one stream, one per slice, which together are the whole of it; changed by its leader only."""

    __slots__ = ("attempts", "course", "cursors", "key", "layers", "parts", "stream")

    def __init__(
        self,
        stream: Stream,
        course: str,
        cursors: Mapping[Piece, Cursor],
        layers: tuple[Layer, ...] = (),
        key: Key = "publisher",
    ):
        self.stream, self.course, self.layers, self.key = stream, course, layers, key
        self.cursors = dict(cursors)
        self.attempts: dict[Piece, dict[int, int]] = {}
        """Of each slice, deliveries without acknowledgement so far, where the group counts them."""
        self.parts = 1
        """Over how many values it is stored, at most: see `split`."""

    @classmethod
    def starting(cls, stream: Stream, course: str, offset: int, key: Key = "publisher") -> StreamProgress:
        """Nothing done yet, `offset` being the first message wanted."""
        return cls(stream, course, {Piece(stream): Cursor(offset - 1)}, key=key)

    @property
    def floor(self) -> int:
        """Everything below this is done, in every slice."""
        return min(map(self.reached, self.cursors))

    def reached(self, piece: Piece) -> int:
        """Everything of this slice that lies below is done."""
        at = self.cursors[piece].offset + 1
        return first_of(piece, at) if self.key == "message" else at

    def pieces(self) -> list[Piece]:
        return sorted(self.cursors)

    def common(self, piece: Piece) -> list[Piece]:
        """Slices of now that have messages in common with this one, be it of now or of an earlier slicing."""
        return [piece] if piece in self.cursors else [mine for mine in self.cursors if overlap(mine, piece)]

    def mark(self, piece: Piece) -> Mark:
        return Mark.of_cursor(self.cursors[piece])

    def merge(self, piece: Piece, mark: Mark) -> bool:
        """Take over what a member did in this piece, be it of this slicing or an earlier one; whether it was news."""
        common = self.common(piece)
        if common[0].of >= piece.of:
            # Done in a slice is done in every one that lies within it: no layer is needed.
            news = True in [self._take(mine, mark) for mine in common]
        else:
            news = _top(mark) >= self.reached(common[0]) and self._merge_into_layer(piece, mark)
        if news and self.layers:
            self._trim()
        return news

    def _take(self, piece: Piece, mark: Mark) -> bool:
        if self.key == "message" and piece.of > 1 and mark.acked:
            mark = Mark(mark.offset, tuple(own_ranges(piece, mark.acked)))
        return merged(self.cursors[piece], mark)

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

    def cut(self, of: int, lent: Container[Piece] = ()) -> bool:
        """Cut into `of` slices whatever is not lent, and coarser only where all of a new slice is free; was any cut?"""
        before = len(self.cursors)
        for piece in [piece for piece in self.cursors if piece.of < of and piece not in lent]:
            self._split(piece, of)
        changed = len(self.cursors) != before
        for part in range(of):
            within = [piece for piece in self.cursors if piece.of > of and piece.part % of == part]
            if within and not any(piece in lent for piece in within):
                self._join(Piece(self.stream, part, of), within)
                changed = True
        if changed and self.layers:
            self._trim()
        return changed

    def _split(self, piece: Piece, of: int) -> None:
        """Each of the new slices lies within the old one, and goes on with what that had done."""
        mark, counts = Mark.of_cursor(self.cursors.pop(piece)), self.attempts.pop(piece, {})
        for part in range(piece.part, of, piece.of):
            new = Piece(self.stream, part, of)
            self.cursors[new] = Cursor()
            self._take(new, mark)
            # Of which new slice a count is, only offsets tell; else each has it, and the reader knows.
            mine = {o: n for o, n in counts.items() if self.key != "message" or o % of == part}
            if mine:
                self.attempts[new] = mine

    def _join(self, piece: Piece, within: Iterable[Piece]) -> None:
        """What each of the old slices had done beyond all of them goes into a layer."""
        # All below is done; but no mark lies beyond the end of the stream, as what a slice has `reached` may.
        known = max(self.cursors[old].offset for old in within)
        self.cursors[piece] = Cursor(min(known, *[self.reached(old) - 1 for old in within]))
        counts: dict[int, int] = {}
        for old in within:
            mark = Mark.of_cursor(self.cursors.pop(old))
            counts |= self.attempts.pop(old, {})
            if _top(mark) >= self.reached(piece):
                self._merge_into_layer(old, mark)
        if counts:
            self.attempts[piece] = counts

    def _trim(self) -> None:
        """Let go of what layers say of slices that are beyond it, or that lie within those of the layer."""
        layers = []
        for layer in self.layers:
            kept = []
            for part, mark in layer.marks:
                old = Piece(self.stream, part, layer.of)
                common = self.common(old)
                if common[0].of >= old.of:
                    for piece in common:
                        self._take(piece, mark)
                elif _top(mark) >= self.reached(common[0]):
                    kept.append((part, mark))
            if kept:
                layers.append(Layer(layer.of, tuple(kept)))
        self.layers = tuple(layers)

    def note_attempts(self, piece: Piece, attempts: Iterable[tuple[int, int]]) -> bool:
        """Remember how often these were delivered in vain, forget those that are done; whether anything changed."""
        before, cursor = self.attempts.get(piece, {}), self.cursors[piece]
        known = dict(before)
        for offset, times in attempts:
            known[offset] = max(times, known.get(offset, 0))
        known = {offset: times for offset, times in known.items() if not cursor.is_acked(offset)}
        if known == before:
            return False
        self.attempts[piece] = known
        if not known:
            del self.attempts[piece]
        return True

    def whole(self) -> None:
        """Nothing of the stream is left to do: one cursor says it all."""
        self.cursors, self.layers, self.attempts = {Piece(self.stream): Cursor(self.floor - 1)}, (), {}

    def copy(self) -> StreamProgress:
        cursors = {piece: cursor.copy() for piece, cursor in self.cursors.items()}
        twin = StreamProgress(self.stream, self.course, cursors, self.layers, self.key)
        twin.attempts = {piece: dict(counts) for piece, counts in self.attempts.items()}
        twin.parts = self.parts
        return twin

    @property
    def ranges(self) -> int:
        """How large it is: acknowledged ranges and counted attempts."""
        layers = sum(1 + len(mark.acked) for layer in self.layers for _, mark in layer.marks)
        return sum(len(cursor.acked) for cursor in self.cursors.values()) + layers + self._attempted

    @property
    def _attempted(self) -> int:
        return sum(map(len, self.attempts.values()))

    def parts_wanted(self, ranges_max: int) -> int:
        """Over how many values it is to be stored."""
        ranges = self.ranges
        if ranges <= ranges_max:
            return 1
        attempts = self._attempted
        return -(-(ranges - attempts) // ranges_max) + -(-attempts // ranges_max)

    def split(self, ranges_max: int) -> list[StreamProgress]:
        """The same as a union of some that have at most so many ranges each; the first has the cursors' offsets.

        Each is a fact by itself, so it does not matter whether all of them are stored at one moment.
        """
        if self.parts_wanted(ranges_max) == 1:
            return [self]
        ranges = list(self._ranges())
        attempts = [(piece, offset) for piece, counts in sorted(self.attempts.items()) for offset in sorted(counts)]
        parts = [self._part(ranges[at : at + ranges_max]) for at in range(0, len(ranges), ranges_max)]
        for at in range(0, len(attempts), ranges_max):
            part = self._part([])
            for piece, offset in attempts[at : at + ranges_max]:
                part.attempts.setdefault(piece, {})[offset] = self.attempts[piece][offset]
            parts.append(part)
        for piece, own in self.cursors.items():
            merged(parts[0].cursors[piece], Mark(own.offset))
        return parts

    def _ranges(self) -> Iterator[tuple[Piece, Mark]]:
        """Everything above the cursors' offsets, range by range."""
        for piece, cursor in self.cursors.items():
            yield from ((piece, Mark(-1, (acked,))) for acked in cursor.acked)
        for layer in self.layers:
            for index, mark in layer.marks:
                piece = Piece(self.stream, index, layer.of)
                yield piece, Mark(mark.offset)
                yield from ((piece, Mark(-1, (acked,))) for acked in mark.acked)

    def _part(self, ranges: Iterable[tuple[Piece, Mark]]) -> StreamProgress:
        cursors: dict[Piece, Cursor] = {piece: Cursor() for piece in self.cursors}
        for piece, mark in ranges:
            merged(cursors.setdefault(piece, Cursor()), mark)
        layers: dict[int, list[tuple[int, Mark]]] = {}
        for piece, cursor in cursors.items():
            if piece not in self.cursors:
                layers.setdefault(piece.of, []).append((piece.part, Mark.of_cursor(cursor)))
        found = tuple(Layer(of, tuple(sorted(marks))) for of, marks in layers.items())
        own = {piece: cursors[piece] for piece in self.cursors}
        return StreamProgress(self.stream, self.course, own, found, self.key)

    def add(self, part: StreamProgress) -> None:
        """One of those that `split` made; of another course it is a leftover."""
        if part.course != self.course:
            return
        for piece in part.pieces():
            self.merge(piece, part.mark(piece))
        for layer in part.layers:
            for index, mark in layer.marks:
                self.merge(Piece(self.stream, index, layer.of), mark)
        for piece, counts in part.attempts.items():
            if piece in self.cursors:
                self.note_attempts(piece, counts.items())

    def to_json(self, now_seconds: float, epoch: int) -> bytes:
        """The stored form: a cursor as everyone reads it (its offset is what *all* slices have done), and more."""
        pieces = self.pieces()
        value: dict[str, object] = {
            "offset": self.floor - 1,
            "updated_at": int(now_seconds),
            "acked": self.cursors[pieces[0]].acked if len(pieces) == 1 else [],
            "epoch": epoch,
            "course": self.course,
            "key": self.key,
        }
        if len(pieces) > 1:
            cursors = [(piece, self.cursors[piece]) for piece in pieces]
            value["slices"] = [[piece.part, piece.of, cursor.offset, cursor.acked] for piece, cursor in cursors]
        if self.layers:
            value["layers"] = [
                [layer.of, [[index, mark.offset, mark.acked] for index, mark in layer.marks]] for layer in self.layers
            ]
        if self.parts > 1:
            value["parts"] = self.parts
        if self.attempts:
            counts = sorted(self.attempts.items())
            value["attempts"] = [[piece.part, piece.of, sorted(some.items())] for piece, some in counts]
        return json.dumps(value).encode()

    @classmethod
    def from_json(cls, stream: Stream, data: bytes) -> StreamProgress:
        """The inverse of `to_json`; a cursor that was never a group's has the course ''."""
        whole = Cursor.from_json(data)
        value = json.loads(data)
        try:
            slices = value.get("slices", [[0, 1, whole.offset, whole.acked]])
            cursors = {Piece(stream, part, of): Cursor(offset, acked) for part, of, offset, acked in slices}
            layers = tuple(
                Layer(of, tuple((index, _mark(offset, acked)) for index, offset, acked in marks))
                for of, marks in value.get("layers", [])
            )
            key = check_key(value.get("key", "publisher"))
            found = cls(stream, str(value.get("course", "")), cursors, layers, key)
            found.attempts = {Piece(stream, part, of): dict(counts) for part, of, counts in value.get("attempts", [])}
            found.parts = int(value.get("parts", 1))
            if sum(Fraction(1, piece.of) for piece in cursors) != 1:
                raise ValueError(f"slices {sorted(cursors)} are not the whole stream")
        except (TypeError, ValueError, ArithmeticError) as error:
            raise RequestError(f"progress of {stream} is damaged: {error}") from error
        return found

    def __repr__(self) -> str:
        cursors = " ".join(f"{piece.part}/{piece.of}{self.cursors[piece]!r}" for piece in self.pieces())
        return f"<{self.stream} {cursors} layers={len(self.layers)}>"


def _top(mark: Mark) -> int:
    return mark.acked[-1][1] if mark.acked else mark.offset


def _mark(offset: int, acked: Iterable[Iterable[int]]) -> Mark:
    return Mark(offset, tuple((first, last) for first, last in acked))
