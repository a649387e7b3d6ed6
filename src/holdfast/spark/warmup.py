"""Starting Spark's Python workers before anybody waits for them: the first query would pay seconds for that."""

from __future__ import annotations

import threading
from collections.abc import Iterator, MutableMapping
from contextlib import suppress
from importlib import import_module

import pyarrow as pa
from pyspark.sql import SparkSession
from pyspark.sql.datasource import (
    DataSource,
    DataSourceArrowWriter,
    DataSourceReader,
    InputPartition,
    WriterCommitMessage,
)
from pyspark.sql.types import StructType


class WarmupSource(DataSource):
    """`holdfast_warmup`: nothing to read and nowhere to write to, but every worker on the way has been started."""

    def __init__(self, options: MutableMapping[str, str]):
        self.options: dict[str, str] = dict(options)

    @classmethod
    def name(cls) -> str:
        return "holdfast_warmup"

    def schema(self) -> str:
        return "topic STRING"

    def reader(self, schema: StructType) -> DataSourceReader:
        import_module("holdfast.spark.source")  # the planner's worker stays, and has it from now on
        return _Reader(int(self.options.get("partitions", "1")))

    def writer(self, schema: StructType, overwrite: bool) -> DataSourceArrowWriter:
        return _WarmWriter()


class _Reader(DataSourceReader):
    def __init__(self, partitions: int):
        self._partitions = partitions

    def partitions(self) -> list[InputPartition]:
        return [InputPartition(number) for number in range(self._partitions)]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        import_module("holdfast.spark.source")
        yield pa.record_batch([pa.array(["warm"])], names=["topic"])


class _WarmWriter(DataSourceArrowWriter):
    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        from holdfast.spark.worker import settle

        import_module("holdfast.spark.sink")
        for _ in iterator:
            pass
        settle()
        return WriterCommitMessage()

    def commit(self, messages: list[WriterCommitMessage | None]) -> None:
        import_module("holdfast.spark.sink")


def warm_up(spark: SparkSession) -> threading.Thread:
    """Begin, on a thread: the session may be used meanwhile."""
    thread = threading.Thread(target=_run, args=(spark,), name="holdfast-warm-up", daemon=True)
    thread.start()
    return thread


def _run(spark: SparkSession) -> None:
    with suppress(Exception):  # the session may be stopped before it is warm: nobody waits for this
        jvm = spark._jvm
        if jvm is not None:
            SparkSession._get_j_spark_session_class(jvm).setActiveSession(spark._jsparkSession)
        reader = spark.read.format("holdfast_warmup").option("partitions", str(spark.sparkContext.defaultParallelism))
        reader.load().write.format("holdfast_warmup").mode("append").save()
