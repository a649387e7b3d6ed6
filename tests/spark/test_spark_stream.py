"""Streams: nothing skipped and nothing twice, across restarts, generations, limits and a store that goes away."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from holdfast.cursors.cursor import Cursor
from holdfast.keys import named_cursor_key
from holdfast.model import Stream
from holdfast.store import open_metadata

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.streaming.query import StreamingQuery

    from conftest import Fleet
    from servers import PostgresServer

Soon = Callable[..., None]


@pytest.fixture
def stream(spark: SparkSession) -> Callable[..., DataFrame]:
    def load(store: str, **options: Any) -> DataFrame:
        return spark.readStream.format("holdfast").options(store=store, **options).load()

    return load


def copy(frame: DataFrame, store: str, checkpoint: Path, *, once: bool = False) -> StreamingQuery:
    """Into log `copy`."""
    writer = frame.writeStream.format("holdfast").options(store=store, log="copy", shards="3")
    writer = writer.option("checkpointLocation", str(checkpoint))
    return (writer.trigger(availableNow=True) if once else writer).start()


def finish(query: StreamingQuery) -> None:
    assert query.awaitTermination(90), "the query did not end"
    assert query.exception() is None


def test_a_stream_follows_the_log_through_generations(
    fleet: Fleet, stream: Callable[..., DataFrame], tmp_path: Path, soon: Soon
) -> None:
    fleet.publish(500)
    query = copy(stream(fleet.url, start="beginning"), fleet.url, tmp_path / "checkpoint")
    soon(lambda: "copy" in fleet.log.logs() and fleet.total("copy") == 500)
    fleet.publish(300)
    fleet.log.seal("messages", shards=2)
    fleet.publish(300)
    fleet.log.seal("messages")
    fleet.publish(10)
    soon(lambda: fleet.total("copy") == fleet.count)
    fleet.publish(10)
    soon(lambda: fleet.total("copy") == fleet.count)
    # Finished generations leave no state.
    soon(lambda: json.loads(query.lastProgress["sources"][0]["endOffset"])["done"] == 2)
    query.stop()
    fleet.check("copy")


def test_latest_means_from_now_on_even_if_the_first_batch_is_repeated(
    fleet: Fleet, stream: Callable[..., DataFrame], tmp_path: Path
) -> None:
    fleet.publish(100)
    checkpoint = tmp_path / "checkpoint"
    finish(copy(stream(fleet.url), fleet.url, checkpoint, once=True))  # takes note of where `latest` was
    assert fleet.total("copy") == 0
    fleet.publish(50)
    finish(copy(stream(fleet.url), fleet.url, checkpoint, once=True))
    assert sorted(fleet.numbers("copy")) == list(range(100, 150))
    # As after a crash between the batch and the note that it is done: the last batch is repeated, and lands once.
    commits = sorted((checkpoint / "commits").glob("[0-9]*"), key=lambda path: int(path.name))
    for commit in commits:
        commit.unlink()
        (commit.parent / f".{commit.name}.crc").unlink(missing_ok=True)
    fleet.publish(50)
    finish(copy(stream(fleet.url), fleet.url, checkpoint, once=True))
    assert sorted(fleet.numbers("copy")) == list(range(100, 200))


def test_a_repeated_first_batch_begins_where_it_began(
    small_fleet: Fleet, stream: Callable[..., DataFrame], tmp_path: Path
) -> None:
    """Spark asks for the first offset again when it repeats batch 0, and by then `latest` is elsewhere."""
    small_fleet.publish(100)
    from holdfast.spark.options import ReadOptions
    from holdfast.spark.schema import SCHEMA
    from holdfast.spark.slices import Slices
    from holdfast.spark.stream import LogStreamReader

    reader = LogStreamReader(ReadOptions.of({"store": small_fleet.url}, streaming=True), SCHEMA, 2)
    first = reader.initialOffset()
    small_fleet.publish(40)
    end = reader.latestOffset(first, reader.getDefaultReadLimit())
    small_fleet.publish(40)
    again = LogStreamReader(ReadOptions.of({"store": small_fleet.url}, streaming=True), SCHEMA, 2)
    parts = again.partitions(again.initialOffset(), json.loads(json.dumps(end)))
    rows = sum(piece.rows for part in parts if isinstance(part, Slices) for piece in part.slices)
    assert rows == 40


def test_rate_limits(fleet: Fleet, stream: Callable[..., DataFrame], tmp_path: Path) -> None:
    fleet.publish(1000)
    query = copy(
        stream(fleet.url, start="beginning", maxMessagesPerTrigger="300"), fleet.url, tmp_path / "checkpoint", once=True
    )
    finish(query)
    sizes = [progress["numInputRows"] for progress in query.recentProgress if progress["numInputRows"]]
    assert sum(sizes) == 1000
    assert max(sizes) == 300
    fleet.check("copy")


def test_topics_and_columns(
    spark: SparkSession, small_fleet: Fleet, stream: Callable[..., DataFrame], tmp_path: Path
) -> None:
    small_fleet.publish(300)
    frame = stream(small_fleet.url, start="beginning", topics="vehicle/v3/+").select("topic", "payload")
    finish(copy(frame, small_fleet.url, tmp_path / "checkpoint", once=True))
    assert sorted(small_fleet.numbers("copy")) == [n for n in range(300) if n % 20 == 3]


def test_a_named_cursor(fleet: Fleet, stream: Callable[..., DataFrame], tmp_path: Path) -> None:
    fleet.publish(200)
    options = {"start": "beginning", "subscription": "bill/ing"}
    finish(copy(stream(fleet.url, **options), fleet.url, tmp_path / "one", once=True))
    with open_metadata(fleet.url) as metadata:
        for head in fleet.log.heads("messages"):
            entry = metadata.get(named_cursor_key(head.stream, "bill/ing"))
            assert entry is not None
            assert Cursor.from_json(entry.value).floor == head.next_offset
    fleet.publish(100)
    fleet.log.seal("messages")
    fleet.publish(100)
    # Another checkpoint, the same subscription: it goes on where the subscription is.
    finish(copy(stream(fleet.url, **options), fleet.url, tmp_path / "other", once=True))
    fleet.check("copy")
    finish(copy(stream(fleet.url, **options), fleet.url, tmp_path / "other", once=True))
    with open_metadata(fleet.url) as metadata:
        left = set(metadata.list("/holdfast/subscriptions/"))
    assert named_cursor_key(Stream("messages", 0, 1), "bill/ing") not in left, "finished streams leave nothing"
    assert named_cursor_key(Stream("messages", 0, 2), "bill/ing") in left


def test_what_is_gone_is_an_error_or_skipped_as_told(
    small_fleet: Fleet, stream: Callable[..., DataFrame], tmp_path: Path
) -> None:
    small_fleet.publish(100)
    checkpoint = tmp_path / "checkpoint"
    limited = {"start": "beginning", "maxMessagesPerTrigger": "10"}
    query = copy(stream(small_fleet.url, **limited), small_fleet.url, checkpoint)
    while not (query.lastProgress and query.lastProgress["numInputRows"]):
        query.processAllAvailable()
        break
    query.stop()
    small_fleet.publish(50)
    for _ in range(2):
        small_fleet.log.seal("messages")
        small_fleet.publish(50)
    small_fleet.log.drop("messages", 1)
    small_fleet.log.drop("messages", 2)
    from holdfast.spark import plain

    query = copy(stream(small_fleet.url), small_fleet.url, checkpoint, once=True)
    with pytest.raises(Exception) as caught:  # the kind is Spark's
        query.awaitTermination(60)
    assert "generations 1 to 2 of log 'messages'" in plain(caught.value)
    finish(copy(stream(small_fleet.url, trimmed="earliest"), small_fleet.url, checkpoint, once=True))
    assert sorted(small_fleet.numbers("copy")) == [*range(100), *range(200, 250)]


def test_a_store_that_is_away_for_a_while(
    postgres_server: PostgresServer, postgres_url: str, stream: Callable[..., DataFrame], tmp_path: Path, soon: Soon
) -> None:
    from conftest import Fleet

    fleet = Fleet(postgres_url)
    fleet.publish(100)
    query = copy(stream(fleet.url, start="beginning"), fleet.url, tmp_path / "checkpoint")
    soon(lambda: "copy" in fleet.log.logs() and fleet.total("copy") == 100)
    postgres_server.stop("kill")
    postgres_server.start()
    fleet.publish(100)
    soon(lambda: fleet.total("copy") == 200 or not query.isActive)
    assert query.exception() is None
    query.stop()
    fleet.check("copy")
    fleet.close()


def test_an_aborted_query_leaves_no_trace(
    spark: SparkSession, small_fleet: Fleet, stream: Callable[..., DataFrame], tmp_path: Path
) -> None:
    small_fleet.publish(100)
    frame = stream(small_fleet.url, start="beginning").selectExpr(
        "topic", "payload", "publisher", "assert_true(int(string(payload)) < 90) is null as retain"
    )
    query = copy(frame, small_fleet.url, tmp_path / "checkpoint", once=True)
    with pytest.raises(Exception, match=r"ASSERT_TRUE|is not true"):
        query.awaitTermination(60)
    assert small_fleet.total("copy") == 0
    finish(copy(stream(small_fleet.url, start="beginning"), small_fleet.url, tmp_path / "checkpoint", once=True))
    small_fleet.check("copy")
