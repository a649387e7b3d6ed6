"""Metadata in SQLite: what is particular to a file shared by processes."""

from __future__ import annotations

import resource
import sqlite3
import time
from pathlib import Path

import pytest

from holdfast.errors import RequestError
from holdfast.metadata import Deleted, Put
from holdfast.store import open_metadata
from holdfast.store.sqlite.database import SqliteDatabase
from holdfast.store.sqlite.metadata import SqliteMetadata


def test_what_was_put_is_there_after_opening_again(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/a.db"
    with open_metadata(url) as metadata:
        version = metadata.put("/a", b"1")
        metadata.delete("/a")
    with open_metadata(url) as metadata:
        assert metadata.put("/a", b"2") > version + 1


def test_a_watcher_that_was_away_while_deletions_were_forgotten_catches_up(tmp_path: Path) -> None:
    database = SqliteDatabase(tmp_path / "a.db")
    with (
        SqliteMetadata(database, database.close, deletions_kept=10) as writer,
        open_metadata(f"sqlite:///{database.path}") as reader,
    ):
        for n in range(5):
            writer.put(f"/old/{n}", b"")
        with reader.watch("/old/") as watch:
            with reader.feed._lock:  # type: ignore[attr-defined]  # held up, while the writer goes on
                writer.delete("/old/1")
                for n in range(30):
                    writer.put("/other", b"%d" % n)
                version = writer.put("/old/0", b"new")
            first, second = watch.get(20), watch.get(20)
            assert first == Put("/old/0", b"new", version=version)
            assert isinstance(second, Deleted) and second.key == "/old/1"
            assert watch.get(0.05) is None
        with sqlite3.connect(database.path) as db:
            assert db.execute("select count(*) from metadata where value is null").fetchone() == (0,)
        db.close()


def test_an_idle_watch_costs_next_to_nothing(tmp_path: Path) -> None:
    with open_metadata(f"sqlite:///{tmp_path}/a.db") as metadata, metadata.watch("/") as watch:
        before = resource.getrusage(resource.RUSAGE_SELF)
        assert watch.get(1.0) is None
        after = resource.getrusage(resource.RUSAGE_SELF)
        assert (after.ru_utime + after.ru_stime) - (before.ru_utime + before.ru_stime) < 0.1


def test_a_lease_expires_on_time_even_if_only_a_watcher_is_there(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/a.db"
    with open_metadata(url) as holder, open_metadata(url) as reader, reader.watch("/") as watch:
        lease = holder.lease(0.4)
        holder.put("/a", b"", lease)
        assert isinstance(watch.get(5), Put)
        lease.renew()
        assert isinstance(watch.get(5), Deleted)
        assert lease.remaining_seconds < 0.01
        assert time.monotonic() - lease.expires_at < 1.0


@pytest.mark.parametrize("url", ["redis://x", "sqlite:", "etcd://", "etcd://h:notaport", "etcd://h:1,:2"])
def test_an_unknown_url_is_named(url: str) -> None:
    with pytest.raises(RequestError) as caught:
        open_metadata(url)
    assert url in str(caught.value) and "etcd://host:port" in str(caught.value)
