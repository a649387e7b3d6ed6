"""Aggregated streams: chosen messages, by key, in order, once; and the jobs kept going."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from holdfast import Batch
from holdfast.errors import RequestError
from holdfast.model import Message
from holdfast.spark import AggregateOptions, LakeOptions, Runner, RunOptions, aggregate, rebuild
from holdfast.spark.jobs import aggregate as job
from holdfast.spark.jobs import run as running

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from conftest import Fleet

Soon = Callable[..., None]


def parity(message: Message) -> str:
    """A key function, found by its path."""
    return "even" if int(message.payload) % 2 == 0 else "odd"


def build(spark: SparkSession, fleet: Fleet, key: str, **options: Any) -> int:
    given = AggregateOptions(store=fleet.url, target="made", key=key, partitions=3, once=True, **options)
    return aggregate(given, spark=spark).messages


def by_partition(fleet: Fleet) -> dict[int, list[int]]:
    found: dict[int, list[int]] = {}
    for chunk in fleet.log.scan("made"):
        found.setdefault(chunk.stream.shard, []).extend(int(p) for p in chunk.batch.column("payload").to_pylist())
    return found


def one_place_each(fleet: Fleet, key_of: Callable[[int], object]) -> None:
    """Every key in one partition."""
    where: dict[object, set[int]] = {}
    for partition, found in by_partition(fleet).items():
        for n in found:
            where.setdefault(key_of(n), set()).add(partition)
    assert all(len(partitions) == 1 for partitions in where.values())


def test_by_publisher_in_several_batches_and_again(spark: SparkSession, fleet: Fleet) -> None:
    fleet.publish(700)
    assert build(spark, fleet, "publisher", messages_max=300) == 700
    fleet.publish(100)
    fleet.log.seal("messages", shards=2)
    fleet.publish(100)
    assert build(spark, fleet, "publisher", messages_max=300) == 200
    assert build(spark, fleet, "publisher") == 0
    fleet.check("made")
    one_place_each(fleet, lambda n: n % 20)


def test_by_topic_level_with_a_filter(spark: SparkSession, small_fleet: Fleet) -> None:
    small_fleet.publish(300)
    build(spark, small_fleet, "topic:1", topics="vehicle/+/alarm", where="qos = 0")
    wanted = [n for n in range(300) if n % 3 == 0]
    assert sorted(n for found in by_partition(small_fleet).values() for n in found) == wanted
    one_place_each(small_fleet, lambda n: n % 20)


def test_by_json_field(spark: SparkSession, small_fleet: Fleet) -> None:
    payloads = [b'{"car": {"kind": "k%d"}}' % (n % 5) for n in range(50)] + [b"\xff\xfe", b"[]", b""]
    small_fleet.log.append("messages", Batch([f"t/{n}" for n in range(53)], payloads, [f"p{n % 7}" for n in range(53)]))
    build(spark, small_fleet, "json:car.kind")
    where: dict[bytes, set[int]] = {}
    for chunk in small_fleet.log.scan("made"):
        for payload in chunk.batch.column("payload").to_pylist():
            where.setdefault(payload, set()).add(chunk.stream.shard)
    assert len(where) == 8
    assert all(len(partitions) == 1 for partitions in where.values())
    assert len({*where[b"\xff\xfe"], *where[b"[]"], *where[b""]}) == 1, "those without a key are together"


def test_by_function(spark: SparkSession, small_fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    spark.sparkContext.addPyFile(__file__)
    small_fleet.publish(100)
    build(spark, small_fleet, f"python:{Path(__file__).stem}:parity")
    one_place_each(small_fleet, lambda n: n % 2)
    small_fleet.check("made")


def test_late_start_and_rebuild(spark: SparkSession, fleet: Fleet) -> None:
    fleet.publish(100)
    build(spark, fleet, "publisher", start="latest")
    assert fleet.total("made") == 0
    fleet.publish(100)
    build(spark, fleet, "publisher", start="latest")
    assert sorted(fleet.numbers("made")) == list(range(100, 200))
    options = AggregateOptions(store=fleet.url, target="made", key="topic:1", partitions=5)
    with pytest.raises(RequestError, match="has 3 partitions, not 5; rebuild"):
        aggregate(options, spark=spark)
    rebuild(options, spark=spark)
    fleet.check("made")
    assert [(g.number, g.shards) for g in fleet.log.generations("made")] == [(2, 5)]


def test_a_batch_that_was_not_heard_of_is_not_repeated(
    spark: SparkSession, small_fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two runs at once: both write the next batch, one lands, the other looks again."""
    small_fleet.publish(200)
    build(spark, small_fleet, "publisher")
    small_fleet.publish(200)
    inner, calls = job._by_partition, []

    def meanwhile(*arguments: Any) -> Any:
        if not calls:
            calls.append(1)
            assert build(spark, small_fleet, "publisher") == 200
        return inner(*arguments)

    monkeypatch.setattr(job, "_by_partition", meanwhile)
    build(spark, small_fleet, "publisher")
    small_fleet.check("made")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"key": "colour"}, "'colour' is not a key; it takes publisher, topic:LEVEL"),
        ({"key": "python:nowhere:f"}, "cannot be imported"),
        ({"key": "python:math:pi"}, "is not a function"),
        ({"key": "publisher", "target": "messages"}, "cannot be aggregated into itself"),
        ({"key": "publisher", "log": "other"}, "there is no log 'other'"),
        ({"key": "publisher", "topics": "a/#/b"}, "'#' stands alone"),
        ({"key": "publisher", "start": "soon"}, "is not a start position"),
    ],
)
def test_bad_aggregates(spark: SparkSession, small_fleet: Fleet, options: dict[str, Any], message: str) -> None:
    given = {"store": small_fleet.url, "target": "made", "once": True, **options}
    with pytest.raises(RequestError) as caught:
        aggregate(AggregateOptions(**given), spark=spark)
    assert message in str(caught.value)


def test_jobs_are_kept_going(
    spark: SparkSession, fleet: Fleet, tmp_path: Path, soon: Soon, monkeypatch: pytest.MonkeyPatch
) -> None:
    inner, failures = running.aggregate, [RuntimeError("planted"), RuntimeError("planted again")]

    def fails_twice(*arguments: Any, **named: Any) -> Any:
        if failures:
            raise failures.pop(0)
        return inner(*arguments, **named)

    monkeypatch.setattr(running, "aggregate", fails_twice)
    jobs = [
        LakeOptions(store=fleet.url, root=str(tmp_path / "lake"), every_seconds=0.1),
        AggregateOptions(store=fleet.url, target="made", key="publisher", partitions=3, every_seconds=0.1),
    ]
    told = []
    runner = Runner(RunOptions(jobs=jobs, backoff_seconds=0.05), spark=spark, tell=told.append).start()
    for _ in range(2):
        fleet.publish(100)
        soon(lambda: "made" in fleet.log.logs() and fleet.total("made") == fleet.count)
        soon(lambda: fleet.log.manifest.totals("messages")[1] == fleet.count)
    soon(lambda: runner.progress()["aggregate made"].messages == 200)
    registry = CollectorRegistry()
    registry.register(runner)
    text = generate_latest(registry).decode()
    assert 'holdfast_pipeline_restarts_total{job="aggregate made"} 2.0' in text
    assert 'holdfast_pipeline_messages_total{job="aggregate made"} 200.0' in text
    runner.stop()
    assert {p.state for p in runner.progress().values()} == {"stopped"}
    assert "planted again" in [p.error for p in told]
    fleet.check("made")


def test_a_run_needs_jobs(spark: SparkSession, small_fleet: Fleet) -> None:
    with pytest.raises(RequestError, match="no job to run"):
        Runner(RunOptions(jobs=[]), spark=spark)
    options = AggregateOptions(store=small_fleet.url, target="made", key="publisher")
    with pytest.raises(RequestError, match="there twice"):
        Runner(RunOptions(jobs=[options, options]), spark=spark)
