"""The lake: every message in it once, verified before the store forgets it, and read back as if it never had."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow.parquet as pq
import pytest

from holdfast.errors import RequestError, StoreError
from holdfast.log import history, retention
from holdfast.log.history import History
from holdfast.log.retention import RetentionSettings
from holdfast.spark import LakeOptions, Progress, lake, relocate
from holdfast.spark.jobs import lake as job
from holdfast.store.in_sql.manifest import SqlManifest

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from conftest import Fleet, Reader

DAY = 86_400_000_000
NOON = 20_000 * DAY + DAY // 2


def rows_of(fleet: Fleet) -> list[tuple[object, ...]]:
    """Everything in the store, in the order of its streams."""
    found = []
    for chunk in fleet.log.scan("messages"):
        columns = [column.to_pylist() for column in chunk.batch.columns]
        found += [
            (chunk.stream, offset, *row)
            for offset, row in zip(chunk.offsets(), zip(*columns, strict=True), strict=True)
        ]
    return found


def history_of(fleet: Fleet, **options: int) -> list[tuple[object, ...]]:
    """Everything in the lake, in the order of its streams."""
    past = History(fleet.log)
    found = []
    for head in past.heads("messages"):
        offset = 0
        while offset < head.next_offset:
            reading = past.read(head.stream, offset, **options)
            for chunk in reading.chunks:
                columns = [column.to_pylist() for column in chunk.batch.columns]
                rows = zip(*columns, strict=True)
                found += [(chunk.stream, at, *row) for at, row in zip(chunk.offsets(), rows, strict=True)]
            offset = reading.next_offset
    return found


@pytest.fixture
def export(spark: SparkSession, tmp_path: Path) -> Callable[..., Progress]:
    def run(fleet: Fleet, **options: object) -> Progress:
        given = LakeOptions(store=fleet.url, root=str(tmp_path / "lake"), once=True, **options)  # type: ignore[arg-type]
        return lake(given, spark=spark)

    return run


def test_replay_from_the_past(
    fleet: Fleet, export: Callable[..., Progress], read: Reader, numbers: Callable[[DataFrame], list[int]]
) -> None:
    for day in range(3):
        fleet.publish(400, time=NOON + day * DAY)
        fleet.publish(100, time=NOON)  # late ones: two days' files take turns in a stream
        if day == 1:
            export(fleet)
    before = rows_of(fleet)
    fleet.log.seal("messages", shards=3)
    fleet.publish(200)
    progress = export(fleet, drop=True)
    assert progress.state == "stopped"
    assert [g.number for g in fleet.log.generations("messages")] == [2], "verified, so dropped"
    assert [row for row in history_of(fleet) if row[0].generation == 1] == before  # type: ignore[attr-defined]
    history.cache.clear()
    assert [r for r in history_of(fleet, rows_max=77) if r[0].generation == 1] == before  # type: ignore[attr-defined]
    assert numbers(read(fleet.url)) == list(range(fleet.count))
    rows = read(fleet.url).where("generation = 1").orderBy("shard", "offset").collect()
    assert [(r.shard, r.offset, bytes(r.payload)) for r in rows] == [(b[0].shard, b[1], b[4]) for b in before]  # type: ignore[attr-defined]
    assert numbers(read(fleet.url, topics="vehicle/v3/#")) == [n for n in range(fleet.count) if n % 20 == 3]
    since = read(fleet.url, start="2024-10-05T00:00:00Z").where("generation = 1")
    assert min(numbers(since)) == 500
    assert read(fleet.url, start="offset:10", end="offset:20", pushdown="true").where("generation = 1").count() == 40


def test_files_by_log_date_and_generation_sorted_by_topic_and_time(
    spark: SparkSession, small_fleet: Fleet, export: Callable[..., Progress], tmp_path: Path
) -> None:
    small_fleet.publish(500, time=NOON)
    small_fleet.publish(500, time=NOON + DAY)
    export(small_fleet)
    files = sorted((tmp_path / "lake").rglob("*.parquet"))
    folders = {str(file.relative_to(tmp_path / "lake").parent) for file in files}
    assert folders == {f"log=messages/date=2024-10-0{d}/generation=1" for d in (4, 5)}
    for file in files:
        table = pq.ParquetFile(file).read()
        keys = list(zip(table["topic"].to_pylist(), table["time"].to_pylist(), strict=True))
        assert keys == sorted(keys)
    frame = spark.read.parquet(str(tmp_path / "lake"))
    assert frame.where("log = 'messages' and date = '2024-10-05'").count() == 500


def test_a_stream_query_reads_on_from_the_lake(
    spark: SparkSession, small_fleet: Fleet, export: Callable[..., Progress], tmp_path: Path
) -> None:
    small_fleet.publish(300)
    small_fleet.log.seal("messages")
    small_fleet.publish(300)
    export(small_fleet, drop=True)
    stream = spark.readStream.format("holdfast").options(store=small_fleet.url, start="beginning").load()
    query = (
        stream.writeStream.format("holdfast")
        .options(store=small_fleet.url, log="copy", shards="2", checkpointLocation=str(tmp_path / "checkpoint"))
        .trigger(availableNow=True)
        .start()
    )
    assert query.awaitTermination(60)
    assert sorted(small_fleet.numbers("copy")) == list(range(600))


def test_retention_waits_for_the_lake(small_fleet: Fleet, export: Callable[..., Progress]) -> None:
    small_fleet.publish(100)
    export(small_fleet)
    small_fleet.log.seal("messages")
    small_fleet.publish(100)
    settings = RetentionSettings(keep_bytes=0)
    retention.maintain(small_fleet.log, settings)
    assert [g.number for g in small_fleet.log.generations("messages")] == [1, 2], "not verified: kept"
    export(small_fleet)
    assert small_fleet.log.manifest.verified("messages") == {1}
    retention.maintain(small_fleet.log, settings)
    assert [g.number for g in small_fleet.log.generations("messages")] == [2]


def test_a_difference_is_found(spark: SparkSession, small_fleet: Fleet, export: Callable[..., Progress]) -> None:
    small_fleet.publish(100)
    export(small_fleet)
    small_fleet.log.seal("messages")
    (path,) = small_fleet.log.manifest.paths("messages")
    root = small_fleet.log.manifest.root("messages")
    table = pq.ParquetFile(f"{root}/{path}").read()
    topics = table["topic"].to_pylist()
    topics[7] = "vehicle/v0/other"
    changed = table.set_column(3, "topic", [topics])
    pq.write_table(changed, f"{root}/{path}")
    with pytest.raises(Exception, match="differs from the store at offsets"):
        export(small_fleet, drop=True)
    assert len(small_fleet.log.generations("messages")) == 2, "what was not verified is not dropped"


def test_strays_are_ignored_and_swept(small_fleet: Fleet, export: Callable[..., Progress], tmp_path: Path) -> None:
    small_fleet.publish(100)
    export(small_fleet)
    (real,) = (tmp_path / "lake").rglob("*.parquet")
    stray = real.with_name("stray.parquet")
    stray.write_bytes(real.read_bytes())
    assert len(history_of(small_fleet)) == 100
    assert job.sweep(small_fleet.log.manifest, "messages") == 0, "it may be somebody's work"
    assert job.sweep(small_fleet.log.manifest, "messages", older_than_seconds=-10) == 1
    assert real.exists()
    assert not stray.exists()


def test_two_exports_at_once_do_not_double(
    spark: SparkSession, fleet: Fleet, export: Callable[..., Progress], monkeypatch: pytest.MonkeyPatch
) -> None:
    fleet.publish(200)
    export(fleet)
    fleet.publish(200)
    commit = SqlManifest.commit

    def late(self: SqlManifest, *arguments: object) -> None:
        monkeypatch.setattr(SqlManifest, "commit", commit)
        export(fleet)  # another has done it all, just before us
        commit(self, *arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(SqlManifest, "commit", late)
    export(fleet)
    assert sorted(int(row[4]) for row in history_of(fleet)) == list(range(400))  # type: ignore[call-overload]


def test_a_damaged_file_is_named(small_fleet: Fleet, export: Callable[..., Progress]) -> None:
    small_fleet.publish(100)
    export(small_fleet)
    (path,) = small_fleet.log.manifest.paths("messages")
    file = Path(str(small_fleet.log.manifest.root("messages"))) / path
    data = bytearray(file.read_bytes())
    data[len(data) // 3] ^= 0xFF
    file.write_bytes(data)
    history.cache.clear()
    with pytest.raises(StoreError, match=path):
        history_of(small_fleet)


def test_a_lake_can_be_moved(small_fleet: Fleet, export: Callable[..., Progress], tmp_path: Path) -> None:
    small_fleet.publish(100)
    export(small_fleet)
    elsewhere = tmp_path / "elsewhere"
    (tmp_path / "lake").rename(elsewhere)
    history.cache.clear()
    with pytest.raises(RequestError, match="the lake of log 'messages' is at"):
        lake(LakeOptions(store=small_fleet.url, root=str(elsewhere), once=True))
    assert len(
        History(small_fleet.log, root=str(elsewhere)).read(small_fleet.log.heads("messages")[0].stream, 0).chunks
    )
    relocate(small_fleet.url, "messages", str(elsewhere))
    assert len(history_of(small_fleet)) == 100


def test_it_goes_on_until_it_is_stopped(
    spark: SparkSession, small_fleet: Fleet, tmp_path: Path, soon: Callable[..., None]
) -> None:
    stop = threading.Event()
    options = LakeOptions(store=small_fleet.url, root=str(tmp_path / "lake"), every_seconds=0.05)
    ends: list[Progress] = []
    thread = threading.Thread(target=lambda: ends.append(lake(options, spark=spark, stop=stop)))
    thread.start()
    manifest = small_fleet.log.manifest
    for _ in range(3):
        small_fleet.publish(100)
        soon(lambda: manifest.totals("messages")[1] == small_fleet.count)
    stop.set()
    thread.join(30)
    assert [end.messages for end in ends] == [300]
