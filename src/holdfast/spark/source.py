"""Reading the log in batches: Arrow blocks straight through, a range of offsets per core."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pyarrow as pa
from pyspark.sql.datasource import DataSourceReader, Filter, InputPartition
from pyspark.sql.types import StructType

from holdfast.errors import UnknownStream
from holdfast.log import Log
from holdfast.log.contract import Head
from holdfast.log.history import History
from holdfast.model import At, Since, Start, Stream
from holdfast.spark.options import ReadOptions, one_line
from holdfast.spark.schema import RowMaker, check_read_schema
from holdfast.spark.slices import Slice, Slices, cut, read
from holdfast.spark.wanted import Wanted
from holdfast.spark.worker import log_at, settle


class LogReader(DataSourceReader):
    """Plans in the driver, reads in the workers."""

    def __init__(self, options: ReadOptions, schema: StructType, parallelism: int):
        check_read_schema(schema)
        self.options = options
        self.schema = schema
        self.parallelism = parallelism
        self.wanted = Wanted(options.filters)

    def partitions(self) -> Sequence[InputPartition]:
        with one_line():
            log = log_at(self.options.store)
            slices = self._given() if self.options.slices is not None else self._found(log)
            asked = self.options.partitions
            made = cut(log, slices, asked or self.parallelism, exactly=asked is not None)
            # Spark takes an empty list for "one partition, find out yourself".
            return list(made) or [Slices([])]

    def _given(self) -> list[Slice]:
        given = self.options.slices or ()
        return [Slice(Stream(self.options.log, shard, g), first, past) for g, shard, first, past in given]

    def _found(self, log: Log) -> list[Slice]:
        heads = every_head(log, self.options.log, self.options.lake)
        return [self._slice(log, head) for head in heads if self.wanted.in_stream(head)]

    def _slice(self, log: Log, head: Head) -> Slice:
        options, history = self.options, History(log, root=self.options.lake)
        first, past = place(log, history, head, options.start), place(log, history, head, options.end)
        if isinstance(options.end, At) and options.end.every is None and head.stream not in options.end.offsets:
            past = head.next_offset
        time = self.wanted.numbers["time"]
        if time.first is not None:
            first = max(first, place_in_time(log, history, head, time.first))
        offsets = self.wanted.numbers["offset"]
        if offsets.first is not None:
            first = max(first, offsets.first)
        if offsets.last is not None:
            past = min(past, offsets.last + 1)
        return Slice(head.stream, first, max(first, past))

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        with one_line():
            settle()
            if isinstance(partition, Slices) and partition.slices:
                log = log_at(self.options.store)
                yield from read(log, partition.slices, self.wanted, RowMaker(self.schema), self.options.lake)


class SiftingReader(LogReader):
    """The same, and takes Spark's filters into the reading: for a DataFrame that serves one query only.

    Spark (4.1 to 4.3) keeps the partitions planned for the last filters with the DataFrame, and gives them to
    every later query on it, and to its siblings in the same query: wrong results, without a word. So a reader
    takes filters only where it was told to.
    """

    def pushFilters(self, filters: list[Filter]) -> list[Filter]:
        self.wanted, left = self.wanted.push(filters)
        return left


def every_head(log: Log, name: str, lake: str | None) -> list[Head]:
    """The streams of the log, oldest generation first, with those only the lake still holds."""
    kept = log.backend.heads(name)
    here = {head.stream.generation for head in kept}
    past = [head for head in History(log, root=lake).heads(name) if head.stream.generation not in here]
    if not kept and not past:
        raise UnknownStream(f"there is no log {name!r}; there are: {', '.join(log.logs()) or 'none yet'}")
    return past + kept


def place(log: Log, history: History, head: Head, start: Start) -> int:
    """Where that is in this stream."""
    if isinstance(start, Since):
        return place_in_time(log, history, head, start.micros)
    return log.position(head, start)


def place_in_time(log: Log, history: History, head: Head, time: int) -> int:
    return log.offset_at(head, time) if head.id > 0 else history.offset_at(head, time)
