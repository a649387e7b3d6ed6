"""Metadata in a SQLite file; other processes' changes are noticed by asking SQLite, twenty times a second."""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from holdfast.metadata.entries import Entry
from holdfast.metadata.feed import Changes, Pause
from holdfast.store.in_sql.metadata import DELETIONS_KEPT, SqlMetadata, changes_after, snapshot
from holdfast.store.sqlite.database import SqliteDatabase
from holdfast.store.sqlite.transaction import SqliteDialect, SqliteTransaction

POLL_SECONDS = 0.05


class SqliteMetadata(SqlMetadata):
    def __init__(self, database: SqliteDatabase, on_close: Callable[[], None], *, deletions_kept: int = DELETIONS_KEPT):
        super().__init__(database, on_close, deletions_kept)
        self._file = database

    @contextmanager
    def _line(self) -> Iterator[_SqliteLine]:
        with self._file.read() as connection:
            yield _SqliteLine(self, connection)


class _SqliteLine:
    def __init__(self, metadata: SqliteMetadata, connection: sqlite3.Connection):
        self._metadata = metadata
        self._db = SqliteTransaction(connection)
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
