"""Metadata in a SQLite file; other processes' changes are noticed by asking SQLite, twenty times a second."""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from holdfast.metadata.contract import Lease
from holdfast.metadata.entries import Entry
from holdfast.metadata.feed import Changes, Pause
from holdfast.metadata.in_store import DELETIONS_KEPT, Db, InStore, Row, Rows, changes_after, snapshot
from holdfast.store.sqlite import SqliteStore

T = TypeVar("T")

POLL_SECONDS = 0.05


class SqliteDialect:
    # SQLite's own clock, in milliseconds; the same throughout one statement.
    now = "(julianday('now') - 2440587.5) * 86400.0"
    now_in_turn = now
    locked = ""  # a writing transaction has the whole file
    each_of = "select value from json_each(?)"
    and_notify = ""


class _SqliteDb:
    def __init__(self, connection: sqlite3.Connection):
        self._connection = connection

    def run(self, sql: str, *args: object) -> Rows:
        return self._connection.execute(sql, args).fetchall()

    def run_many(self, sql: str, rows: Iterable[Row]) -> None:
        self._connection.executemany(sql, rows)


class SqliteMetadata(InStore):
    def __init__(self, store: SqliteStore, *, owned: bool = False, deletions_kept: int = DELETIONS_KEPT):
        super().__init__(SqliteDialect(), deletions_kept)
        self._store, self._owned = store, owned

    def _read(self, work: Callable[[Db], T]) -> T:
        with self._store.read() as connection:
            return work(_SqliteDb(connection))

    def _write(self, work: Callable[[Db], T], *, repeatable: bool = False, while_held: Lease | None = None) -> T:
        with self._store.write() as connection:
            return work(_SqliteDb(connection))

    @contextmanager
    def _line(self) -> Iterator[_SqliteLine]:
        with self._store.read() as connection:
            yield _SqliteLine(self, connection)

    def close(self) -> None:
        super().close()
        if self._owned:
            self._store.close()


class _SqliteLine:
    def __init__(self, metadata: SqliteMetadata, connection: sqlite3.Connection):
        self._metadata = metadata
        self._db = _SqliteDb(connection)
        self._version = -1

    def _data_version(self) -> int:
        """Differs from before if any other connection has committed since, in this process or another."""
        version: int = self._db.run("pragma data_version")[0][0]
        return version

    def changes(self, after: int, prefixes: list[str]) -> Changes:
        self._version = self._data_version()  # before reading: what comes in between is read twice, not never
        return changes_after(self._db, SqliteDialect(), after, prefixes)

    def snapshot(self, prefix: str) -> tuple[int, dict[str, Entry]]:
        return snapshot(self._db, prefix)

    def sweep(self) -> None:
        self._metadata.sweep()

    def wait(self, pause: Pause, timeout: float | None) -> None:
        until = None if timeout is None else time.monotonic() + timeout
        while self._data_version() == self._version:
            left = POLL_SECONDS if until is None else until - time.monotonic()
            if left <= 0 or pause.sleep(min(left, POLL_SECONDS)):
                return
