"""Cutting what is to be read into partitions, and reading one."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import pyarrow as pa
from pyspark.sql.datasource import InputPartition

from holdfast.errors import UnknownStream
from holdfast.log import Log
from holdfast.log.contract import Chunk
from holdfast.model import Stream
from holdfast.spark.reading.filters import BlockFilter, MessageFilter, filtered
from holdfast.spark.reading.schema import RowMaker, RowPiece

ROWS_LEAST = 20_000
"""A partition with fewer rows than this is not worth a task of its own."""

_ROWS_READ = 65_536
_ROWS_GATHERED = 2048
"""Small blocks are gathered up to this many rows: a batch costs the JVM something, however small."""


class OffsetRange(NamedTuple):
    """Offsets [first, past) of one stream."""

    stream: Stream
    first: int
    past: int

    @property
    def rows(self) -> int:
        return self.past - self.first


@dataclass
class RangePartition(InputPartition):
    """One partition: some ranges, read one after the other."""

    ranges: tuple[OffsetRange, ...]

    def __init__(self, ranges: Sequence[OffsetRange]):
        self.ranges = tuple(ranges)


def cut(log: Log, ranges: Sequence[OffsetRange], parts: int, *, exactly: bool = False) -> list[RangePartition]:
    """At most so many partitions of about the same size, streams cut between blocks where it helps."""
    ranges = [each for each in ranges if each.rows > 0]
    total = sum(each.rows for each in ranges)
    if not total:
        return []
    if not exactly:
        parts = max(1, min(parts, total // ROWS_LEAST))
    target = -(-total // parts)
    made: list[list[OffsetRange]] = [[]]
    room = target
    for each in ranges:
        left = each
        while left.rows > room and len(made) < parts:
            at = _block_edge(log, left, left.first + room)
            if at > left.first:
                made[-1].append(left._replace(past=at))
                left = left._replace(first=at)
            made.append([])
            room = target
        if left.rows:
            made[-1].append(left)
            room -= left.rows
    return [RangePartition(part) for part in made if part]


def _block_edge(log: Log, piece: OffsetRange, near: int) -> int:
    """The first offset of the block that holds `near`, if that is inside the range: no block is read twice."""
    head = log.backend.head(piece.stream)
    if head is None:  # in the lake only, where there are no blocks to be kept whole
        return near
    entries = log.backend.entries(head.id, near, 1)
    if not entries:
        return near
    base, past = entries[0].base, entries[0].past
    if base > piece.first:
        return base
    return past if past < piece.past else near


def read(
    log: Log, ranges: Sequence[OffsetRange], wanted: MessageFilter, maker: RowMaker, lake: str | None
) -> Iterator[pa.RecordBatch]:
    """The wanted rows of these ranges, in order."""
    for each in ranges:
        yield from gathered(each.stream, pieces(log, each, wanted, lake), maker)


def gathered(stream: Stream, found: Iterable[RowPiece], maker: RowMaker) -> Iterator[pa.RecordBatch]:
    """Rows of one stream, small blocks put together."""
    some: list[RowPiece] = []
    waiting = 0
    for piece in found:
        some.append(piece)
        waiting += len(piece.offsets)
        if waiting >= _ROWS_GATHERED:
            yield maker.rows(stream, some)
            some, waiting = [], 0
    if some:
        yield maker.rows(stream, some)


def pieces(log: Log, each: OffsetRange, wanted: MessageFilter, lake: str | None) -> Iterator[RowPiece]:
    """The wanted rows of one range, block by block."""
    block_filter = BlockFilter(wanted)
    for chunk in chunks(log, each, wanted, lake):
        offsets = _offsets(chunk)
        if offsets[-1] >= each.past:
            offsets = offsets[: int(np.searchsorted(offsets, each.past))]
        piece = RowPiece(*filtered(block_filter, offsets, chunk.batch.slice(0, len(offsets))))
        if len(piece.offsets):
            yield piece


def _offsets(chunk: Chunk) -> np.typing.NDArray[np.int64]:
    if chunk.rows is None:
        first = chunk.base + chunk.first
        return np.arange(first, first + chunk.batch.num_rows, dtype=np.int64)
    found: np.typing.NDArray[np.int64] = chunk.rows.to_numpy() + chunk.base
    return found


def chunks(log: Log, piece: OffsetRange, wanted: MessageFilter, lake: str | None) -> Iterator[Chunk]:
    """The range's blocks, from the store, or from the lake if the store has dropped them."""
    topics = wanted.index_filter
    at, past = piece.first, piece.past
    asked = wanted.numbers["offset"]
    if asked.first is not None:
        at = max(at, asked.first)
    if asked.last is not None:
        past = min(past, asked.last + 1)
    while at < past:
        rows_max = min(_ROWS_READ, past - at) if topics is None else _ROWS_READ
        try:
            reading = log.read(piece.stream, at, topics=topics, rows_max=rows_max)
        except UnknownStream:
            from holdfast.log.history import History

            reading = History(log, root=lake).read(piece.stream, at, topics=topics, rows_max=rows_max)
        for chunk in reading.chunks:
            if chunk.batch.num_rows and _first(chunk) < past:
                yield chunk
        at = reading.next_offset


def _first(chunk: Chunk) -> int:
    return chunk.base + (chunk.first if chunk.rows is None else int(chunk.rows[0].as_py()))
