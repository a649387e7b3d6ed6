"""A reader of another process makes the WAL grow; when it has gone, the WAL becomes small, and nobody has to wait."""

from __future__ import annotations

import sqlite3
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from holdfast.store.sqlite import wal
from holdfast.store.sqlite.database import SqliteDatabase


@pytest.fixture
def database(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[SqliteDatabase]:
    monkeypatch.setattr(wal, "LARGE_BYTES", 2 << 20)
    monkeypatch.setattr(wal, "CHECKPOINT_PAGES", 50)
    database = SqliteDatabase(tmp_path / "store.db")
    with database.write() as db:
        db.execute("create table things (number integer primary key, data blob)")
    yield database
    database.close()


def write(database: SqliteDatabase, count: int = 1) -> None:
    for _ in range(count):
        with database.write() as db:
            db.execute("insert into things (data) values (zeroblob(50000))")


def wal_bytes(database: SqliteDatabase) -> int:
    return database.path.with_name(database.path.name + "-wal").stat().st_size


def copies_after(database: SqliteDatabase) -> int:
    """So many pages of WAL make a commit copy them home; 0: none does."""
    with database.write() as db:
        pages: int = db.execute("pragma wal_autocheckpoint").fetchone()[0]
        return pages


def until(what: Callable[[], bool]) -> None:
    give_up = time.monotonic() + 30
    while not what():
        assert time.monotonic() < give_up
        time.sleep(0.01)


@pytest.fixture
def foreign(database: SqliteDatabase) -> Iterator[sqlite3.Connection]:
    """It has a read transaction open."""
    connection = sqlite3.connect(database.path, isolation_level=None, check_same_thread=False)
    connection.execute("begin")
    connection.execute("select count(*) from things").fetchone()
    yield connection
    connection.close()


def test_it_is_cut_when_the_reader_has_gone(database: SqliteDatabase, foreign: sqlite3.Connection) -> None:
    write(database, 60)
    assert wal_bytes(database) > 3_000_000
    foreign.close()
    until(lambda: wal_bytes(database) == 0)
    until(lambda: copies_after(database) == 50)
    with database.read() as db:
        assert db.execute("select count(*) from things").fetchone() == (60,)


def test_no_commit_copies_it_home_once_it_is_large(database: SqliteDatabase, foreign: sqlite3.Connection) -> None:
    write(database, 5)
    assert copies_after(database) == 1000
    write(database, 55)
    assert copies_after(database) == 0
    with database.read() as db:
        assert db.execute("select count(*) from things").fetchone() == (60,)
    assert foreign.execute("select count(*) from things").fetchone() == (0,), "what it saw when it began"


def test_it_is_cut_while_others_write_and_read_on(database: SqliteDatabase, foreign: sqlite3.Connection) -> None:
    stop = threading.Event()
    written = [0]

    def write_on() -> None:
        while not stop.is_set():
            write(database)
            written[0] += 1

    def read_on() -> None:
        while not stop.is_set():
            with database.read() as db:
                db.execute("select max(length(data)) from things").fetchone()

    threads = [threading.Thread(target=write_on), threading.Thread(target=read_on)]
    for thread in threads:
        thread.start()
    until(lambda: wal_bytes(database) > 3_000_000)
    foreign.close()
    until(lambda: wal_bytes(database) < 1_000_000)
    stop.set()
    for thread in threads:
        thread.join()
    with database.read() as db:
        assert db.execute("select count(*) from things").fetchone() == (written[0],)


def test_a_database_can_be_closed_while_somebody_reads(database: SqliteDatabase, foreign: sqlite3.Connection) -> None:
    write(database, 60)
    database.close()
    assert wal_bytes(database) > 3_000_000, "it is not ours alone"
    foreign.close()
    again = SqliteDatabase(database.path)
    write(again)
    again.close()
