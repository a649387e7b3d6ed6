"""Drivers in processes of their own, for tests to kill: `python driver.py stream|cluster|hello …`."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil  # type: ignore[import-untyped]

import holdfast
from holdfast.spark import AggregateOptions, LakeOptions, aggregate, lake, session


def stream(store: str, checkpoint: str, end: str) -> None:
    """Copy log `messages` to `copy`, a few at a time; with `end` until everything is there, else for ever."""
    spark = session("local[2]")
    reader = spark.readStream.format("holdfast").options(store=store, start="beginning", maxMessagesPerTrigger="300")
    writer = (
        reader.load().writeStream.format("holdfast").options(store=store, log="copy", checkpointLocation=checkpoint)
    )
    query = (writer.trigger(availableNow=True) if end == "end" else writer).start()
    query.awaitTermination()


def hello(store: str) -> None:
    """Read a log, and say how much there is, and on which Java."""
    begun = time.monotonic()
    spark = session("local[2]")
    ready = time.monotonic() - begun
    count = spark.read.format("holdfast").load(store).count()
    java = spark.sparkContext._jvm.System.getProperty("java.home")  # type: ignore[union-attr]
    print(json.dumps({"count": count, "java": java, "ready": ready}))
    spark.stop()


def cluster(store: str, master: str, folder: str) -> None:
    """Source, sink (with a straggler that is run twice, and an executor that dies), lake and aggregate."""
    spark = session(
        master,
        spark_executor_memory="512m",
        spark_executor_cores=1,
        spark_cores_max=2,
        **{
            "spark.speculation": True,
            "spark.speculation.interval": "50ms",
            "spark.speculation.quantile": 0.3,
            "spark.speculation.multiplier": 1.1,
            "spark.speculation.minTaskRuntime": "100ms",
        },
    )
    read = spark.read.format("holdfast").option("store", store)
    found = {"read": read.load().count()}
    rows = spark.sparkContext.parallelize(range(400), 4).mapPartitionsWithIndex(_slow_at_first(folder))
    frame = spark.createDataFrame(rows, "topic STRING, payload STRING, publisher STRING")
    frame.write.format("holdfast").options(store=store, log="slow", shards="3").mode("append").save()
    rows = spark.sparkContext.parallelize(range(400), 4).mapPartitionsWithIndex(_kill_the_executor_once(folder))
    frame = spark.createDataFrame(rows, "topic STRING, payload STRING, publisher STRING")
    frame.write.format("holdfast").options(store=store, log="killed", shards="3").mode("append").save()
    options = AggregateOptions(store=store, target="by-topic", key="topic:1", partitions=3, once=True)
    found["aggregate"] = aggregate(options, spark=spark).messages
    holdfast.open(store).seal("messages")
    found["lake"] = lake(LakeOptions(store=store, root=f"{folder}/lake", once=True, drop=True), spark=spark).messages
    found["again"] = read.load().count()
    print(json.dumps(found))
    spark.stop()


def _row(n: int) -> tuple[str, str, str]:
    return f"vehicle/v{n % 20}/trip", str(n), f"v{n % 20}"


def _slow_at_first(folder: str):  # type: ignore[no-untyped-def]
    def rows(partition: int, numbers: Iterator[int]) -> Iterator[tuple[str, str, str]]:
        attempts = Path(folder, f"attempts-{partition}")
        attempts.mkdir(exist_ok=True)
        mine = attempts / str(os.getpid())
        first = not any(attempts.iterdir())
        mine.touch()
        for n in numbers:
            if partition == 3 and first:
                time.sleep(0.1)
            yield _row(n)

    return rows


def _kill_the_executor_once(folder: str):  # type: ignore[no-untyped-def]
    def rows(partition: int, numbers: Iterator[int]) -> Iterator[tuple[str, str, str]]:
        for at, n in enumerate(numbers):
            if partition == 1 and at == 50 and not Path(folder, "killed").exists():
                Path(folder, "killed").touch()
                executor = next(p for p in psutil.Process().parents() if "java" in p.name())
                executor.kill()
            yield _row(n)

    return rows


if __name__ == "__main__":
    {"stream": stream, "hello": hello, "cluster": cluster}[sys.argv[1]](*sys.argv[2:])
