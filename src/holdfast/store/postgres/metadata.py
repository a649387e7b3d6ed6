"""Metadata in PostgreSQL; NOTIFY says when to look, and looking now and then anyway makes up for it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from holdfast.jitter import chance
from holdfast.metadata.entries import Entry
from holdfast.metadata.feed import Changes, Pause
from holdfast.store.in_sql.metadata import DELETIONS_KEPT, SqlMetadata, changes_after, snapshot
from holdfast.store.postgres.database import PostgresDatabase
from holdfast.store.postgres.transaction import METADATA_CHANNEL, Connection, PostgresDialect, PostgresTransaction

POLL_SECONDS = 0.5
"""How often to look where no notification came; varied by half, so that nodes do not march in step."""


class PostgresMetadata(SqlMetadata):
    """`notifications=False` leaves it to looking now and then, as behind a pooler that swallows them."""

    def __init__(
        self,
        database: PostgresDatabase,
        on_close: Callable[[], None],
        *,
        notifications: bool = True,
        poll_seconds: float = POLL_SECONDS,
        deletions_kept: int = DELETIONS_KEPT,
    ):
        super().__init__(database, on_close, deletions_kept)
        self._server = database
        self._notifications, self._poll_seconds = notifications, poll_seconds

    @contextmanager
    def _line(self) -> Iterator[_PostgresLine]:
        connection = self._server.connect()
        try:
            with self._server.errors("listen to"):
                if self._notifications:
                    connection.execute(f"listen {METADATA_CHANNEL}".encode())
                yield _PostgresLine(self, connection, self._poll_seconds)
        finally:
            connection.close()


class _PostgresLine:
    def __init__(self, metadata: PostgresMetadata, connection: Connection, poll_seconds: float):
        self._metadata, self._connection, self._poll_seconds = metadata, connection, poll_seconds
        self._db = PostgresTransaction(connection, instance="")

    def changes(self, after: int, prefixes: list[str]) -> Changes:
        return changes_after(self._db, PostgresDialect(), after, prefixes)

    def snapshot(self, prefix: str) -> tuple[int, dict[str, Entry]]:
        return snapshot(self._db, prefix)

    def sweep(self) -> None:
        self._metadata.sweep()

    def wait(self, pause: Pause, timeout: float | None) -> None:
        seconds = self._poll_seconds * (0.5 + chance.random())
        if timeout is not None:
            seconds = min(seconds, timeout)
        if not self._notified() and pause.sleep(seconds, self._connection.fileno()):
            self._notified()

    def _notified(self) -> bool:
        """Whether there were notifications; they are taken, for the next look covers them all."""
        return bool(list(self._connection.notifies(timeout=0)))
