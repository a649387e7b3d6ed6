"""Batches: every message once, as it is in the log, narrowed by what is asked for and by nothing else."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import pytest

from holdfast import Batch, Stream
from holdfast.log import retention
from holdfast.spark.schema import SCHEMA
from holdfast.store.sqlite.database import SqliteDatabase

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from conftest import Fleet, Reader

Numbers = Callable[["DataFrame"], list[int]]
Says = Callable[[Callable[[], object]], str]


def test_a_round_trip_keeps_every_column(fleet: Fleet, read: Reader) -> None:
    fleet.publish(1000)
    frame = read(fleet.url)
    assert frame.schema == SCHEMA
    rows = {int(bytes(row.payload)): row for row in frame.collect()}
    assert sorted(rows) == list(range(1000))
    for n, row in rows.items():
        assert row.topic == f"vehicle/v{n % 20}/{'trip' if n % 3 else 'alarm'}"
        assert (row.publisher, row.qos, row.retain) == (f"v{n % 20}", n % 3, n % 10 == 0)
        assert row.properties == (bytearray(b"\x01\x01") if n % 2 else None)
        assert (row.log, row.generation) == ("messages", 1)
    places = [(row.shard, row.offset) for row in rows.values()]
    assert sorted(places) == [(h.stream.shard, o) for h in fleet.log.heads("messages") for o in range(h.next_offset)]


def test_a_narrower_schema_in_any_order(fleet: Fleet, read: Reader) -> None:
    fleet.publish(100)
    frame = read(fleet.url, "offset BIGINT, topic STRING")
    assert frame.columns == ["offset", "topic"]
    assert frame.count() == 100
    assert {row.topic for row in frame.collect()} == {row.topic for row in read(fleet.url).collect()}


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ("colour STRING", "there is no column 'colour'"),
        ("offset STRING", "column 'offset' is of type bigint, not string"),
    ],
)
def test_a_schema_that_is_not_ours(small_fleet: Fleet, read: Reader, says: Says, columns: str, message: str) -> None:
    assert message in says(lambda: read(small_fleet.url, columns).collect())


def test_topics(fleet: Fleet, read: Reader, numbers: Numbers) -> None:
    fleet.publish(300)
    wanted = [n for n in range(300) if n % 20 == 3]
    assert numbers(read(fleet.url, topics="vehicle/v3/+")) == wanted
    assert numbers(read(fleet.url, topics="vehicle/v3/trip")) == [n for n in wanted if n % 3]
    assert numbers(read(fleet.url, topics='["vehicle/v3/#", "vehicle/v4/alarm"]')) == sorted(
        wanted + [n for n in range(300) if n % 20 == 4 and n % 3 == 0]
    )
    assert numbers(read(fleet.url, topics="nothing/#")) == []
    assert numbers(read(fleet.url, topics="#")) == list(range(300))


def test_an_indexed_topic(fleet: Fleet, read: Reader, numbers: Numbers) -> None:
    for _ in range(70):
        fleet.publish(1000)
    fleet.log.seal("messages")
    retention.maintain(fleet.log)
    wanted = [n for n in range(70_000) if n % 20 == 7 and n % 3 == 0]
    assert numbers(read(fleet.url, topics="vehicle/v7/alarm")) == wanted


def test_start_and_end(fleet: Fleet, read: Reader, numbers: Numbers) -> None:
    fleet.publish(100, time=1_000_000_000_000_000)
    fleet.publish(100, time=2_000_000_000_000_000)
    fleet.publish(100, time=3_000_000_000_000_000)
    second = datetime.fromtimestamp(2_000_000_000, UTC).isoformat()
    third = datetime.fromtimestamp(3_000_000_000, UTC).isoformat()
    assert numbers(read(fleet.url, start=second)) == list(range(100, 300))
    assert numbers(read(fleet.url, start=second, end=third)) == list(range(100, 200))
    assert numbers(read(fleet.url, start="latest")) == []
    heads = fleet.log.heads("messages")
    assert read(fleet.url, start="offset:5").count() == 300 - 5 * len(heads)
    assert read(fleet.url, end="offset:5").count() == 5 * len(heads)
    assert read(fleet.url, start='{"messages.1.0": 7}').count() == 300 - 7
    assert read(fleet.url, end='{"messages.1.0": 7}').count() == 300 - heads[0].next_offset + 7


def test_partitions(fleet: Fleet, read: Reader, numbers: Numbers) -> None:
    for _ in range(10):
        fleet.publish(5000)
    assert read(fleet.url).rdd.getNumPartitions() == 2
    cut = read(fleet.url, partitions="7")
    assert cut.rdd.getNumPartitions() == 7
    assert numbers(cut) == list(range(50_000))
    sizes = [len(part) for part in cut.rdd.glom().collect()]
    assert max(sizes) < 2 * min(sizes)


def test_several_generations(fleet: Fleet, read: Reader, numbers: Numbers) -> None:
    fleet.publish(100)
    fleet.log.seal("messages", shards=7)
    fleet.publish(100)
    frame = read(fleet.url)
    assert numbers(frame) == list(range(200))
    assert {row.generation: row["count"] for row in frame.groupBy("generation").count().collect()} == {1: 100, 2: 100}


FILTERS = [
    ("topic = 'vehicle/v3/trip'", lambda r: r.topic == "vehicle/v3/trip"),
    ("topic in ('vehicle/v3/trip', 'vehicle/v4/alarm')", lambda r: r.topic in ("vehicle/v3/trip", "vehicle/v4/alarm")),
    ("topic like 'vehicle/v1%'", lambda r: r.topic.startswith("vehicle/v1")),
    ("shard = 1", lambda r: r.shard == 1),
    ("shard in (0, 3) and offset between 3 and 20", lambda r: r.shard in (0, 3) and 3 <= r.offset <= 20),
    ("offset > 5 and offset < 9", lambda r: 5 < r.offset < 9),
    ("generation >= 2", lambda r: r.generation >= 2),
    ("time >= timestamp'2033-05-18 03:33:20'", lambda r: r.time >= datetime(2033, 5, 18, 3, 33, 20)),
    ("time < timestamp'2033-05-18 03:33:20'", lambda r: r.time < datetime(2033, 5, 18, 3, 33, 20)),
    ("log = 'messages'", lambda r: True),
    ("log = 'other'", lambda r: False),
    ("topic = 'vehicle/v3/trip' or shard = 0", lambda r: r.topic == "vehicle/v3/trip" or r.shard == 0),
    ("not (shard = 1)", lambda r: r.shard != 1),
    ("qos = 1 and shard = 2 and payload is not null", lambda r: r.qos == 1 and r.shard == 2),
    ("topic is null", lambda r: False),
    ("topic = 'a/#'", lambda r: False),
]


@pytest.fixture
def several(fleet: Fleet) -> Fleet:
    fleet.publish(100, time=1_000_000_000_000_000)
    fleet.publish(100, time=2_000_000_000_000_000)
    fleet.log.seal("messages")
    fleet.publish(100, time=3_000_000_000_000_000)
    return fleet


def test_filters_pushed_or_not_mean_the_same(several: Fleet, read: Reader) -> None:
    everything = read(several.url).collect()
    for text, means in FILTERS:
        wanted = sorted((r.generation, r.shard, r.offset) for r in everything if means(r))
        for pushdown in ("true", "false"):
            got = read(several.url, pushdown=pushdown).where(text).collect()
            assert sorted((r.generation, r.shard, r.offset) for r in got) == wanted, (text, pushdown)


def test_a_frame_may_be_asked_again_and_again(small_fleet: Fleet, read: Reader) -> None:
    """Spark would give the last query's partitions to the next one, had we taken its filters unasked."""
    small_fleet.publish(300)
    frame = read(small_fleet.url)
    one, other = frame.where("topic = 'vehicle/v3/trip'"), frame.where("topic = 'vehicle/v4/trip'")
    few = one.count()
    assert 0 < few < 300
    assert frame.count() == 300
    assert {r.topic for r in one.union(other).collect()} == {"vehicle/v3/trip", "vehicle/v4/trip"}


def test_pushed_filters_save_reading(small_fleet: Fleet, read: Reader) -> None:
    for _ in range(10):
        small_fleet.publish(5000)
    frame = read(small_fleet.url, pushdown="true", partitions="8").where("shard = 0 and offset < 10")
    assert "Filter (" not in str(frame._jdf.queryExecution().executedPlan().toString())
    assert frame.rdd.getNumPartitions() <= 8
    assert frame.count() == 10


def test_an_empty_log_and_an_unknown_one(fleet: Fleet, read: Reader, says: Says) -> None:
    assert read(fleet.url).count() == 0
    assert "there is no log 'other'; there are: messages" in says(lambda: read(fleet.url, log="other").collect())


def test_bad_options_are_one_line(small_fleet: Fleet, read: Reader, says: Says) -> None:
    url = small_fleet.url
    assert "option 'bogus' is not known" in says(lambda: read(url, bogus="1").collect())
    assert "there is no store at /nowhere/x.db" in says(lambda: read("sqlite:////nowhere/x.db").collect())
    assert "lives in one process" in says(lambda: read("memory:").collect())


def test_a_server_that_is_not_there_is_one_line(read: Reader, says: Says) -> None:
    line = says(lambda: read("postgresql://nobody@127.0.0.1:1/none").collect())
    assert "PostgreSQL database 'none' at 127.0.0.1" in line


def test_a_corrupt_block_is_named(small_fleet: Fleet, read: Reader, says: Callable[..., Any]) -> None:
    small_fleet.publish(100)
    store = small_fleet.log.backend.database  # type: ignore[attr-defined]
    assert isinstance(store, SqliteDatabase)
    with store.write() as db:
        db.execute("update bodies set data = cast(substr(data, 1, length(data) - 1) || x'ff' as blob) where id = 1")
    assert "does not match its checksum" in says(lambda: read(small_fleet.url).collect())


def test_small_blocks_are_gathered(small_fleet: Fleet, read: Reader, numbers: Numbers) -> None:
    for _ in range(60):
        small_fleet.publish(37)
    assert numbers(read(small_fleet.url)) == list(range(60 * 37))


def test_a_plain_spark_knows_the_format(spark: SparkSession, small_fleet: Fleet) -> None:
    """What `pyspark_holdfast` registers, in a session that was not told of it."""
    small_fleet.publish(10)
    from pyspark_holdfast import DefaultSource

    assert DefaultSource.name() == "holdfast"
    other = spark.newSession()
    assert other.read.format("holdfast").load(small_fleet.url).count() == 10


def test_what_came_later_is_for_the_next_frame(small_fleet: Fleet, read: Reader) -> None:
    small_fleet.publish(10)
    frame = read(small_fleet.url)
    assert frame.count() == 10
    small_fleet.log.append("messages", Batch(["a"], [b"1"]))
    assert read(small_fleet.url).count() == 11
    assert small_fleet.log.head(Stream("messages", 0, 1)) is not None
