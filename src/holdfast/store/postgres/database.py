"""Connections to one PostgreSQL database: pooled, migrated under a lock, tried again with backoff."""

from __future__ import annotations

import copy
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import psycopg
from psycopg import errors as pg

from holdfast.errors import HoldfastError, OutcomeUnknown, StoreError, StoreFull, StoreUnavailable
from holdfast.jitter import chance
from holdfast.store.in_sql.database import Db, Dialect, Transaction
from holdfast.store.migrations import pending
from holdfast.store.pool import Pool
from holdfast.store.postgres.transaction import Connection, PostgresDialect, PostgresTransaction

T = TypeVar("T")

RETRIED = (
    pg.DeadlockDetected,
    pg.SerializationFailure,
    pg.IdleInTransactionSessionTimeout,
    pg.TransactionTimeout,
)
"""The server has undone the transaction, and another try may succeed."""

MIGRATION_LOCK = 0x486F6C64  # any fixed number: two processes that start at once take turns


class PostgresDatabase:
    """One database, its tables in the schema `holdfast`."""

    dialect: Dialect = PostgresDialect()

    def __init__(self, dsn: str, retry_seconds: float = 30.0):
        self.dsn = dsn
        self.instance = uuid.uuid4().hex
        """What our own notifications are known by."""
        self.retry_seconds = retry_seconds
        """How long a call keeps trying while the server is away, before it says so."""
        self._settings = ["set search_path to holdfast, public", "set synchronous_commit to on"]
        self._pool: Pool[Connection] = Pool(self.connect)
        self._migrate()

    def limited(self, seconds: int) -> PostgresDatabase:
        """The same database over connections of their own, on which the server gives up what takes longer than this.

        So whatever was begun before is known to be over some time later: a statement, a transaction that its process
        does not go on with, and, where the server can (17), a transaction as a whole, for which it is given twice as
        long.
        """
        other = copy.copy(self)
        other._pool = Pool(other.connect)
        other._settings = [
            *self._settings,
            f"set statement_timeout to '{seconds}s'",
            f"set idle_in_transaction_session_timeout to '{seconds}s'",
            f"select set_config(name, '{2 * seconds}s', false) from pg_settings where name = 'transaction_timeout'",
        ]
        return other

    def connect(self, **options: Any) -> Connection:
        """A new connection, set up the way every Holdfast connection is."""
        with self.errors("connect to"):
            connection: Connection = psycopg.connect(
                self.dsn, autocommit=True, connect_timeout=10, application_name="holdfast", **options
            )
            try:
                connection.execute("; ".join(self._settings).encode())
            except BaseException:
                connection.close()
                raise
            return connection

    def _migrate(self) -> None:
        with self._pool.connection() as db, self.errors("migrate"), db.transaction():
            db.execute("select pg_advisory_xact_lock(%s)", (MIGRATION_LOCK,))
            db.execute("create schema if not exists holdfast")
            db.execute("create table if not exists holdfast.holdfast_schema (version integer not null)")
            row = db.execute("select coalesce(max(version), 0) from holdfast.holdfast_schema").fetchone()
            assert row is not None
            for step in pending("postgres", row[0]):
                db.execute(step.sql.encode())
                db.execute("insert into holdfast.holdfast_schema values (%s)", (step.version,))

    @contextmanager
    def write(self) -> Iterator[Connection]:
        """One transaction: durable when the block ends, rolled back if it raises.

        A connection lost *before* the commit is StoreUnavailable (nothing was written); lost *during* it,
        OutcomeUnknown (only whoever has an idempotency key may simply try again).
        """
        with self.errors("write to"), self._pool.connection() as db:
            db.execute("begin")
            try:
                yield db
            except psycopg.Error:
                raise
            except BaseException:
                db.execute("rollback")
                raise
            try:
                db.execute("commit")
            except (psycopg.OperationalError, psycopg.InterfaceError) as error:
                raise OutcomeUnknown(f"lost {self.name} during a commit ({_first_line(error)})") from error

    @contextmanager
    def read(self) -> Iterator[Connection]:
        with self.errors("read from"), self._pool.connection() as db:
            yield db

    def ask(self, work: Callable[[Db], T]) -> T:
        def attempt() -> T:
            with self.read() as connection:
                return work(PostgresTransaction(connection, self.instance))

        return self.retrying(attempt)

    def change(
        self,
        work: Callable[[Transaction], T],
        *,
        repeatable: bool = False,
        before_retry: Callable[[StoreError], None] | None = None,
    ) -> T:
        def attempt() -> T:
            try:
                with self.write() as connection:
                    return work(PostgresTransaction(connection, self.instance))
            except (StoreUnavailable, OutcomeUnknown) as error:
                if before_retry is not None:
                    before_retry(error)
                raise

        return self.retrying(attempt, repeatable=repeatable)

    def retrying(self, attempt: Callable[[], T], *, repeatable: bool = True) -> T:
        """Call until it works, with backoff and jitter, while the server is away.

        `repeatable` says that doing it twice is harmless; otherwise an unknown outcome is raised at once.
        """
        give_up = time.monotonic() + self.retry_seconds
        pause = 0.05
        while True:
            try:
                return attempt()
            except (StoreUnavailable, OutcomeUnknown) as error:
                if isinstance(error, OutcomeUnknown) and not repeatable:
                    raise
                self._pool.drop_idle()
                if time.monotonic() + pause > give_up:
                    raise
                time.sleep(pause * (0.5 + chance.random()))
                pause = min(pause * 2, 2.0)

    @property
    def name(self) -> str:
        """The server and database, without a password."""
        info = psycopg.conninfo.conninfo_to_dict(self.dsn)
        return f"PostgreSQL database {info.get('dbname', '')!r} at {info.get('host', 'the default socket')}"

    @contextmanager
    def errors(self, doing: str) -> Iterator[None]:
        try:
            yield
        except HoldfastError:
            raise
        except pg.DiskFull as error:
            raise StoreFull(f"no room left in {self.name}; free some space, then go on") from error
        except RETRIED as error:
            raise StoreUnavailable(f"{self.name} asked to try again ({_first_line(error)})") from error
        except (psycopg.OperationalError, psycopg.InterfaceError) as error:
            raise StoreUnavailable(f"cannot {doing} {self.name}: {_first_line(error)}") from error
        except psycopg.Error as error:
            raise StoreError(f"cannot {doing} {self.name}: {_first_line(error)}") from error

    def close(self) -> None:
        self._pool.close()


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
