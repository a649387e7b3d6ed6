"""Metadata in PostgreSQL; NOTIFY says when to look, and looking now and then anyway makes up for it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import TypeVar

from holdfast.errors import OutcomeUnknown, StoreUnavailable
from holdfast.jitter import chance
from holdfast.metadata.contract import Lease, LeaseEnded
from holdfast.metadata.entries import Entry
from holdfast.metadata.feed import Changes, Pause
from holdfast.metadata.in_store import DELETIONS_KEPT, Db, InStore, Row, Rows, changes_after, snapshot
from holdfast.store.postgres import Connection, PostgresStore

T = TypeVar("T")

CHANNEL = "holdfast_metadata"

POLL_SECONDS = 0.5
"""How often to look where no notification came; varied by half, so that nodes do not march in step."""


class PostgresDialect:
    now = "extract(epoch from statement_timestamp())::float8"
    now_in_turn = "extract(epoch from clock_timestamp())::float8"
    locked = " for update"
    each_of = "select json_array_elements_text(?::json)"
    and_notify = f"returning pg_notify('{CHANNEL}', '')"


@lru_cache(maxsize=256)
def _postgres_sql(sql: str) -> bytes:
    return sql.replace("?", "%s").encode()


class _PostgresDb:
    def __init__(self, connection: Connection):
        self._connection = connection

    def run(self, sql: str, *args: object) -> Rows:
        return self._connection.execute(_postgres_sql(sql), args).fetchall()

    def run_many(self, sql: str, rows: Iterable[Row]) -> None:
        with self._connection.cursor() as cursor:
            cursor.executemany(_postgres_sql(sql), rows)


class PostgresMetadata(InStore):
    """`notifications=False` leaves it to looking now and then, as behind a pooler that swallows them."""

    def __init__(
        self,
        store: PostgresStore,
        *,
        owned: bool = False,
        notifications: bool = True,
        poll_seconds: float = POLL_SECONDS,
        deletions_kept: int = DELETIONS_KEPT,
    ):
        super().__init__(PostgresDialect(), deletions_kept)
        self._store, self._owned = store, owned
        self._notifications, self._poll_seconds = notifications, poll_seconds

    def _read(self, work: Callable[[Db], T]) -> T:
        def attempt() -> T:
            with self._store.read() as connection:
                return work(_PostgresDb(connection))

        return self._store.retrying(attempt)

    def _write(self, work: Callable[[Db], T], *, repeatable: bool = False, while_held: Lease | None = None) -> T:
        def attempt() -> T:
            try:
                with self._store.write() as connection:
                    return work(_PostgresDb(connection))
            except (StoreUnavailable, OutcomeUnknown) as error:
                if while_held is not None and while_held.remaining_seconds <= 0:
                    raise LeaseEnded(f"{while_held} has ended while the store was away: {error}") from error
                raise

        return self._store.retrying(attempt, repeatable=repeatable)

    @contextmanager
    def _line(self) -> Iterator[_PostgresLine]:
        connection = self._store.connect()
        try:
            with self._store.errors("listen to"):
                if self._notifications:
                    connection.execute(f"listen {CHANNEL}".encode())
                yield _PostgresLine(self, connection, self._poll_seconds)
        finally:
            connection.close()

    def close(self) -> None:
        super().close()
        if self._owned:
            self._store.close()


class _PostgresLine:
    def __init__(self, metadata: PostgresMetadata, connection: Connection, poll_seconds: float):
        self._metadata, self._connection, self._poll_seconds = metadata, connection, poll_seconds
        self._db = _PostgresDb(connection)

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
