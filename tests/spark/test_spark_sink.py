"""Writing: a job lands whole and once, or not at all, whatever its tasks went through."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from pyspark.sql import functions as f

import holdfast
from holdfast import Log

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from conftest import Fleet, Reader

Says = Callable[[Callable[[], object]], str]


def messages(spark: SparkSession, count: int, partitions: int = 2) -> DataFrame:
    """Message n as `Fleet` would have it."""
    n = f.col("id")
    who = f.concat(f.lit("v"), (n % 20).cast("string"))
    topic = f.concat(f.lit("vehicle/"), who, f.lit("/trip"))
    return spark.range(0, count, 1, partitions).select(
        topic.alias("topic"), n.cast("string").alias("payload"), who.alias("publisher")
    )


def write(frame: DataFrame, store: str, log: str = "copy", **options: str) -> None:
    frame.write.format("holdfast").options(store=store, log=log, **options).mode("append").save()


def left_behind(log: Log) -> tuple[int, int]:
    """Staged rows, and bodies that no block refers to."""
    store = log.backend.database  # type: ignore[attr-defined]
    with store.read() as db:
        staged = db.execute("select count(*) from staged").fetchone()[0]
        unused = "id not in (select body from blocks) and length(data) > 0"  # an empty one only holds its number
        bodies = db.execute(f"select count(*) from bodies where {unused}").fetchone()[0]
    return staged, bodies


def test_a_batch_lands_in_order_and_leaves_nothing(spark: SparkSession, fleet: Fleet, read: Reader) -> None:
    write(messages(spark, 10_000), fleet.url, shards="5")
    fleet.check("copy", 10_000)
    assert len(fleet.log.heads("copy")) == 5
    assert left_behind(fleet.log) == (0, 0)
    row = read(fleet.url, log="copy", topics="vehicle/v7/trip").collect()[0]
    assert (row.publisher, row.qos, row.retain, row.properties) == ("v7", 1, False, None)
    assert abs(row.time.timestamp() - time.time()) < 600
    assert len(fleet.log.backend.topics("copy", 1, "vehicle/")) == 20


def test_what_was_read_can_be_written(fleet: Fleet, read: Reader) -> None:
    fleet.publish(500, time=1_600_000_000_000_000)
    write(read(fleet.url), fleet.url, shards="3")
    columns = ["topic", "payload", "publisher", "qos", "retain", "properties", "time"]
    copies = sorted(read(fleet.url, log="copy").select(columns).collect(), key=lambda r: int(bytes(r.payload)))
    assert copies == sorted(read(fleet.url).select(columns).collect(), key=lambda r: int(bytes(r.payload)))
    fleet.check("copy")


def test_shards_are_those_an_append_would_take(spark: SparkSession, small_fleet: Fleet) -> None:
    write(messages(spark, 200), small_fleet.url, log="messages")
    small_fleet.count = 200
    by_publisher: dict[str, set[int]] = {}
    for chunk in small_fleet.log.scan("messages"):
        for who in chunk.batch.column("publisher").to_pylist():
            by_publisher.setdefault(who, set()).add(chunk.stream.shard)
            assert small_fleet.log.shard_of("messages", who, "x")[1] == chunk.stream.shard
    assert all(len(shards) == 1 for shards in by_publisher.values())


def test_live_readers_hear_of_it(spark: SparkSession, fleet: Fleet, soon: Callable[..., None]) -> None:
    heard: list[str] = []
    watch = fleet.log.watch(heard.append)
    write(messages(spark, 10), fleet.url, log="messages")
    soon(lambda: "messages" in heard, 10)
    watch.close()


def test_a_named_write_lands_once(spark: SparkSession, fleet: Fleet) -> None:
    for _ in range(3):
        write(messages(spark, 100), fleet.url, shards="2", writeId="load 7")
    fleet.check("copy", 100)
    write(messages(spark, 100), fleet.url, writeId="load 7", writeBatch="1", position="there")
    assert fleet.total("copy") == 200
    assert fleet.store.staging().landed("copy", "load 7") == (1, "there")
    write(messages(spark, 100), fleet.url, writeId="load 8")
    write(messages(spark, 100), fleet.url)
    assert fleet.total("copy") == 400
    assert left_behind(fleet.log) == (0, 0)


@pytest.mark.parametrize(
    ("sql", "message"),
    [
        ("select 'a' as topic", "column 'payload' is missing"),
        ("select 'a' as topic, 'b' as payload, 1 as colour", "column 'colour' is no part of a message"),
        ("select 1 as topic, 'b' as payload", "column 'topic' is of type int; it takes string"),
        ("select 'a' as topic, 'b' as payload, 7 as qos", "qos 7..7 cannot be"),
        ("select 'a/#' as topic, 'b' as payload", "contains a wildcard"),
        ("select string(null) as topic, 'b' as payload", "a row has no topic"),
    ],
)
def test_rows_that_are_no_messages(spark: SparkSession, small_fleet: Fleet, says: Says, sql: str, message: str) -> None:
    assert message in says(lambda: write(spark.sql(sql), small_fleet.url, log="messages"))
    assert small_fleet.total("messages") == 0


def test_bad_targets(spark: SparkSession, small_fleet: Fleet, says: Says) -> None:
    frame = messages(spark, 1)
    assert "there is no log 'copy'; create it" in says(lambda: write(frame, small_fleet.url))
    assert "there is no store at" in says(lambda: write(frame, "sqlite:////nowhere/x.db"))
    overwrite = frame.write.format("holdfast").options(store=small_fleet.url).mode("overwrite")
    assert "only ever appended to" in says(overwrite.save)


def failing_once(flag: str, wide: int) -> Callable[[Iterator[object]], Iterator[object]]:
    """Rows, wide ones; the last partition fails while its siblings are under way, as long as the flag is there."""

    def rows(partition: int, numbers: Iterator[int]) -> Iterator[tuple[str, bytes, str]]:
        for at, n in enumerate(numbers):
            if partition == 1 and at == 20 and os.path.exists(flag):
                raise ValueError("planted")
            yield f"vehicle/v{n % 20}/trip", str(n).encode().rjust(wide), f"v{n % 20}"

    return rows  # type: ignore[return-value]


def test_a_job_with_one_failing_task_is_not_seen(spark: SparkSession, fleet: Fleet, tmp_path: Path, says: Says) -> None:
    """The trap: siblings of the failed task see their rows end, and return as if they had had them all."""
    flag = tmp_path / "fail"
    flag.touch()
    rows = spark.sparkContext.parallelize(range(300), 3).mapPartitionsWithIndex(failing_once(str(flag), 60_000))
    frame = spark.createDataFrame(rows, "topic STRING, payload BINARY, publisher STRING")
    fleet.log.create("copy", 3)
    with pytest.raises(Exception, match="planted"):
        write(frame, fleet.url, writeId="job")
    assert fleet.total("copy") == 0
    assert fleet.log.backend.topics("copy", 1, "") == []
    flag.unlink()
    for _ in range(2):  # once more than needed
        write(frame, fleet.url, writeId="job")
    fleet.check("copy", 300)
    # A truncated sibling may have staged after the abort; age is what sweeps that.
    fleet.store.staging().sweep(fleet.log.clock() + 1)
    assert left_behind(fleet.log) == (0, 0)
    fleet.check("copy", 300)


def test_a_log_sealed_between_staging_and_commit(spark: SparkSession, fleet: Fleet) -> None:
    from holdfast.log.staging import StagedBatch, Task
    from holdfast.spark.options import WriteOptions
    from holdfast.spark.sink import LogWriter

    fleet.log.create("copy", 3)
    options = WriteOptions.of({"store": fleet.url, "log": "copy"}, streaming=False)
    for shards in (3, 5):  # the same number of shards, and another
        writer = LogWriter(options, messages(spark, 1).schema, overwrite=False)
        arrow = messages(spark, 1000).toArrow().combine_chunks().to_batches()
        staged = writer.stage(iter(arrow), writer.batch)
        assert isinstance(staged.batch, StagedBatch)
        assert isinstance(staged.task, Task)
        before = fleet.total("copy")
        fleet.log.seal("copy", shards)
        writer.publish([staged])
        assert fleet.total("copy") == before + 1000
        last = fleet.log.heads("copy")[-1].stream.generation
        assert sum(h.next_offset for h in fleet.log.heads("copy") if h.stream.generation == last) == 1000
        for head in fleet.log.heads("copy"):
            if head.stream.generation == last and head.next_offset:
                for who in fleet.log.read(head.stream, 0).chunks[0].batch.column("publisher").to_pylist():
                    assert fleet.log.shard_of("copy", who, "")[1] == head.stream.shard
    assert left_behind(fleet.log) == (0, 0)


def test_what_was_swept_is_not_half_published(spark: SparkSession, fleet: Fleet) -> None:
    from holdfast.spark.options import WriteOptions
    from holdfast.spark.sink import LogWriter

    options = WriteOptions.of({"store": fleet.url, "log": "messages"}, streaming=False)
    writer = LogWriter(options, messages(spark, 1).schema, overwrite=False)
    arrow = messages(spark, 100).toArrow().combine_chunks().to_batches()
    staged = [writer.stage(iter(arrow), writer.batch) for _ in range(2)]
    fleet.store.staging().forget(writer.batch, [staged[0].task.name])
    with pytest.raises(holdfast.RequestError, match="run the job again"):
        writer.publish([*staged])
    assert fleet.total("messages") == 0
    writer.forget([*staged, None])
    assert left_behind(fleet.log) == (0, 0)


def test_abort_after_commit_takes_nothing_back(spark: SparkSession, fleet: Fleet) -> None:
    from holdfast.spark.options import WriteOptions
    from holdfast.spark.sink import LogWriter

    options = WriteOptions.of({"store": fleet.url, "log": "messages"}, streaming=False)
    writer = LogWriter(options, messages(spark, 1).schema, overwrite=False)
    staged = writer.stage(iter(messages(spark, 100).toArrow().to_batches()), writer.batch)
    writer.publish([staged])
    writer.abort([staged, None])
    writer.publish([staged])  # a driver that did not hear of its success tries again
    fleet.check("messages", 100)
