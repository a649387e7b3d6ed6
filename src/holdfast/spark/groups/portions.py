"""What a micro-batch of a group reads: ranges of what is lent to the query, and of those what nobody has done yet.

A batch is written out in full, piece by piece, into the offset that Spark keeps for it, so that it can be read again
from its checkpoint alone: the same rows, whatever has become of the loans since.

    {"group": "billing:trip/#", "batch": 7,
     "read": [[generation, shard, part, of, course, first, past, acked, skip, key]]}
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from holdfast.batch import HeldPiece
from holdfast.cursors import Range
from holdfast.errors import RequestError
from holdfast.groups.progress import slice_of
from holdfast.groups.protocol.nouns import Key as GroupKey
from holdfast.groups.protocol.nouns import Layer, Mark, Piece, check_key
from holdfast.log import blocks
from holdfast.model import Stream
from holdfast.spark.reading import schema
from holdfast.spark.reading.offsets import Key, shares

Mask = np.typing.NDArray[np.bool_]


class Portion(NamedTuple):
    """Offsets [first, past) of a piece, without what is done already."""

    stream: Stream
    first: int
    past: int
    part: int = 0
    of: int = 1
    course: str = ""
    acked: tuple[Range, ...] = ()
    skip: tuple[Layer, ...] = ()
    key: GroupKey = "publisher"

    @property
    def rows(self) -> int:
        return self.past - self.first

    @property
    def piece(self) -> Piece:
        return Piece(self.stream, self.part, self.of)

    def to_json(self) -> list[Any]:
        place = [self.stream.generation, self.stream.shard, self.part, self.of, self.course, self.first, self.past]
        return [*place, self.acked, self.skip, self.key]

    @classmethod
    def from_json(cls, log: str, value: Sequence[Any]) -> Portion:
        try:
            generation, shard, part, of, course, first, past, acked, skip, key = value
            layers = tuple(
                Layer(n, tuple((at, Mark(up_to, _ranges(some))) for at, (up_to, some) in m)) for n, m in skip
            )
            stream = Stream(log, shard, generation)
            return cls(stream, first, past, part, of, course, _ranges(acked), layers, check_key(key))
        except (TypeError, ValueError) as error:
            raise RequestError(f"{json.dumps(value)} is no part of a group's batch: {error}") from error


def _mark(offset: int, acked: Iterable[Sequence[int]]) -> Mark:
    return Mark(offset, _ranges(acked))


def _ranges(value: Iterable[Sequence[int]]) -> tuple[Range, ...]:
    return tuple((first, last) for first, last in value)


def planned(pieces: Mapping[Piece, HeldPiece], ends: Mapping[Stream, int], most: int | None) -> list[Portion]:
    """The next batch: as far as the streams go, or `most` messages; the oldest generation first, its pieces alike."""
    generations: dict[int, dict[Key, Piece]] = {}
    for number, piece in enumerate(sorted(pieces)):
        generations.setdefault(piece.stream.generation, {})[piece.stream.generation, number] = piece
    found: list[Portion] = []
    left = most
    for _, some in sorted(generations.items()):
        waiting = {key: ends.get(piece.stream, 0) - pieces[piece].mark.offset - 1 for key, piece in some.items()}
        total = sum(count for count in waiting.values() if count > 0)
        take = total if left is None else min(left, total)
        if take:
            found += [_portion(pieces[some[key]], count) for key, count in shares(waiting, take, total).items()]
        if left is not None:
            left -= take
    return found


def _portion(held: HeldPiece, count: int) -> Portion:
    """The next `count` offsets, with as much of what is done as concerns them."""
    piece, first = held.loan.piece, held.mark.offset + 1
    past = first + count
    layers = []
    for layer in held.skip:
        marks = [(at, Mark(mark.offset, _within(mark.acked, first, past))) for at, mark in layer.marks]
        kept = tuple((at, mark) for at, mark in marks if mark.offset >= first or mark.acked)
        if kept:
            layers.append(Layer(layer.of, kept))
    acked = _within(held.mark.acked, first, past)
    course = held.loan.course
    return Portion(piece.stream, first, past, piece.part, piece.of, course, acked, tuple(layers), held.key)


def _within(ranges: Iterable[Range], first: int, past: int) -> tuple[Range, ...]:
    return tuple(each for each in ranges if each[1] >= first and each[0] < past)


# ------------------------------------------------------------------------------------------- reading


def undone(portion: Portion, piece: schema.RowPiece) -> schema.RowPiece:
    """The rows of a block that are the portion's to read: as `groups.progress.Done` says it, block by block."""
    mask = _mask(portion, piece)
    if mask is None or mask.all():
        return piece
    return schema.RowPiece(piece.offsets[mask], piece.batch.take(pc.indices_nonzero(pa.array(mask))))


def _mask(portion: Portion, piece: schema.RowPiece) -> Mask | None:
    if portion.of == 1 and not portion.acked and not portion.skip:
        return None
    offsets = piece.offsets
    mask = ~_done(offsets, Mark(portion.first - 1, portion.acked))
    if portion.of > 1:
        mask &= _parts(portion.key, piece, portion.of) == portion.part
    for layer in portion.skip:
        parts = _parts(portion.key, piece, layer.of)
        for part, mark in layer.marks:
            mask &= ~((parts == part) & _done(offsets, mark))
    return mask


def _parts(key: GroupKey, piece: schema.RowPiece, of: int) -> np.typing.NDArray[np.int64]:
    """Which of `of` slices each row is in."""
    if key == "message":
        return np.asarray(piece.offsets % of, np.int64)
    column = piece.batch.column(blocks.PUBLISHER if key == "publisher" else blocks.TOPIC)
    words = np.fromiter((slice_of(word, of) for word in column.dictionary.to_pylist()), np.int64)
    found: np.typing.NDArray[np.int64] = words[column.indices.to_numpy()]
    return found


def _done(offsets: schema.Numbers, mark: Mark) -> Mask:
    done: Mask = offsets <= mark.offset
    if mark.acked:
        firsts, lasts = np.array(mark.acked, np.int64).T
        at = np.searchsorted(lasts, offsets)
        inside = at < len(lasts)
        done |= inside & (firsts[np.where(inside, at, 0)] <= offsets)
    return done
