"""No room left: a StoreFull that says so, reading goes on, and so does writing once there is room."""

from __future__ import annotations

import resource
from pathlib import Path

import pytest

import holdfast
from holdfast import Batch, Stream
from processes import Report, child
from servers import CannotRun, PostgresServer

ONE = Stream("one", 0, 1)


def fill_up(report: Report, url: str) -> None:
    with holdfast.open(url) as log:
        log.create("one", shards=1)
        _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (3 << 20, hard))
        written = 0
        refusals = []
        while len(refusals) < 3:
            try:
                log.append("one", Batch(["t"] * 10, [b"x" * 10_000] * 10))
                written += 10
            except holdfast.StoreFull as error:
                refusals.append(str(error))
        report.send((written, refusals))
        log.cache.clear()
        report.send(sum(c.batch.num_rows for c in log.scan("one")))
        resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
        report.send(log.append("one", Batch(["t"], [b"more"])).placed[0].base)


def test_a_full_disk_is_said_plainly_and_survived(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/log.db"
    with child(fill_up, url) as process:
        written, refusals = process.next_report()
        assert written > 0
        assert all("no room left" in r and "log.db" in r for r in refusals), refusals
        assert process.next_report() == written
        assert process.next_report() == written
    with holdfast.open(url) as log:
        assert sum(c.batch.num_rows for c in log.scan("one")) == written + 1


def test_a_postgresql_whose_disk_is_full_goes_on_when_there_is_room() -> None:
    """Only its WAL, whose segments are there already, has room for as long as the disk is full."""
    try:
        server = PostgresServer(wal_segment_mb=1)
    except CannotRun as error:
        pytest.skip(str(error))
    try:
        with holdfast.open(server.database()) as log:
            log.create("one", shards=1)
            log.append("one", Batch(["t"], [bytes(2 << 20)]))
            server.limit_files(1 << 20)
            for _ in range(3):
                with pytest.raises(holdfast.StoreError, match="could not extend file"):
                    log.append("one", Batch(["t"], [bytes(100_000)]))
            assert sum(c.batch.num_rows for c in log.scan("one")) == 1
            server.limit_files(None)
            assert log.append("one", Batch(["t"], [bytes(100_000)])).placed[0].base == 1
    finally:
        server.close()


def test_a_path_that_is_no_database_is_named(tmp_path: Path) -> None:
    path = tmp_path / "notes.txt"
    path.write_text("these are my notes, and a database they are not\n" * 100)
    with pytest.raises(holdfast.StoreError, match=r"notes\.txt: it is not a SQLite database"):
        holdfast.open(f"sqlite:///{path}")


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(holdfast.StoreError, match=r"cannot make the folder for .*file/x/log\.db"):
        holdfast.open(f"sqlite:///{tmp_path}/file/x/log.db")


@pytest.mark.parametrize("url", ["oracle://x", "sqlite:", "log.db", ""])
def test_a_store_of_no_known_kind_is_named(url: str) -> None:
    with pytest.raises(holdfast.RequestError, match="it takes memory:, sqlite:///path") as refused:
        holdfast.open(url)
    assert repr(url) in str(refused.value)
