"""The formats by which Spark knows Holdfast."""

from __future__ import annotations

import os
from collections.abc import MutableMapping

from pyspark.sql.datasource import (
    DataSource,
    DataSourceArrowWriter,
    DataSourceReader,
    DataSourceStreamArrowWriter,
    DataSourceStreamReader,
)
from pyspark.sql.types import StructType

from holdfast.spark.options import ReadOptions, WriteOptions, one_line
from holdfast.spark.reading.schema import SCHEMA


class HoldfastSource(DataSource):
    """`holdfast`: a log of a store, to read from and to write to."""

    parallelism: int = 0
    """How many partitions suit the session; 0: it was not us who made it, so go by this machine."""

    def __init__(self, options: MutableMapping[str, str]):
        self.options: dict[str, str] = dict(options)

    @classmethod
    def name(cls) -> str:
        return "holdfast"

    def schema(self) -> StructType:
        return SCHEMA

    def _parallelism(self) -> int:
        return self.parallelism or len(os.sched_getaffinity(0))

    def reader(self, schema: StructType) -> DataSourceReader:
        from holdfast.spark.reading.batch import LogReader, PushdownReader

        with one_line():
            options = ReadOptions.of(self.options, streaming=False)
            kind = PushdownReader if options.pushdown else LogReader
            return kind(options, schema, self._parallelism())

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:
        from holdfast.spark.groups.reader import GroupStreamReader
        from holdfast.spark.reading.stream import LogStreamReader

        with one_line():
            options = ReadOptions.of(self.options, streaming=True)
            if options.group is not None:
                return GroupStreamReader(options, options.group, schema, self._parallelism())
            return LogStreamReader(options, schema, self._parallelism())

    def writer(self, schema: StructType, overwrite: bool) -> DataSourceArrowWriter:
        from holdfast.spark.writing.sink import LogWriter

        with one_line():
            return LogWriter(WriteOptions.of(self.options, streaming=False), schema, overwrite)

    def streamWriter(self, schema: StructType, overwrite: bool) -> DataSourceStreamArrowWriter:
        from holdfast.spark.writing.sink import LogStreamWriter

        with one_line():
            return LogStreamWriter(WriteOptions.of(self.options, streaming=True), schema)


def formats(parallelism: int) -> list[type[DataSource]]:
    """The formats for a session with that many cores."""
    # Made anew, so that Spark carries the number along with the class to wherever it plans.
    tuned = type("HoldfastSource", (HoldfastSource,), {"parallelism": parallelism, "__module__": "__main__"})
    return [tuned]
