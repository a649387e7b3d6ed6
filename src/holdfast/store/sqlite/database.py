"""Connections to one SQLite file: WAL, `synchronous=FULL`, one writer at a time, any number of readers."""

from __future__ import annotations

import errno
import os
import resource
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

from holdfast.errors import HoldfastError, StoreError, StoreFull, StoreUnavailable
from holdfast.store.in_sql.database import Db, Dialect, Transaction
from holdfast.store.migrations import pending
from holdfast.store.pool import Pool
from holdfast.store.sqlite.transaction import SqliteDialect, SqliteTransaction
from holdfast.store.sqlite.turns import Turns
from holdfast.store.sqlite.wal import CHECKPOINT_PAGES, Wal

T = TypeVar("T")

PAGE_BYTES = 8192
BUSY_SECONDS = 30.0
MAPPED_BYTES = 1 << 34


class SqliteDatabase:
    """One database file. Writes are serialised; reads run beside them on connections of their own."""

    dialect: Dialect = SqliteDialect()

    def __init__(self, path: Path, mapped: bool = False):
        self.path = path
        self._mapped = mapped
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise StoreError(f"cannot make the folder for {path}: {error.strerror}") from error
        self._readers = Pool(self._connect)
        self._begin()
        with self.errors("open"):
            self._writer = self._connect()
            self._migrate()

    def _begin(self) -> None:
        """What a process has of its own."""
        self._write_lock = Turns()
        self._wal = Wal(self.path, self._connect, self._write_lock)
        self._pid = os.getpid()

    def _connect(self) -> sqlite3.Connection:
        connection = sqlite3.connect(
            self.path,
            timeout=BUSY_SECONDS,
            isolation_level=None,
            check_same_thread=False,
            cached_statements=256,
        )
        connection.execute(f"pragma page_size = {PAGE_BYTES}")
        connection.execute("pragma journal_mode = wal")
        connection.execute("pragma synchronous = full")
        connection.execute(f"pragma wal_autocheckpoint = {CHECKPOINT_PAGES}")
        # Some builds (Debian's) fill every page they free with zeros, and write it: a tenth of a second to drop 20 MB.
        connection.execute("pragma secure_delete = fast")
        if self._mapped:
            connection.execute(f"pragma mmap_size = {MAPPED_BYTES}")
        return connection

    def _migrate(self) -> None:
        with self.write() as db:
            db.execute("create table if not exists holdfast_schema (version integer not null)")
            version = db.execute("select coalesce(max(version), 0) from holdfast_schema").fetchone()[0]
            for step in pending("sqlite", version):
                for statement in _statements(step.sql):
                    db.execute(statement)
                db.execute("insert into holdfast_schema values (?)", (step.version,))

    @contextmanager
    def write(self) -> Iterator[sqlite3.Connection]:
        """One transaction: committed and on disk when the block ends, rolled back if it raises."""
        if self._pid != os.getpid():  # forked: SQLite forbids carrying a connection across
            self._begin()
            self._writer = self._connect()
        with self._write_lock, self.errors("write"):
            self._writer.execute("begin immediate")
            try:
                yield self._writer
                self._writer.execute("commit")
                self._wal.look(self._writer)
            except BaseException:
                if self._writer.in_transaction:
                    self._writer.execute("rollback")
                raise

    @contextmanager
    def read(self) -> Iterator[sqlite3.Connection]:
        """A connection for reading; several statements on it see one snapshot only inside `begin`."""
        with self.errors("read"), self._readers.connection() as connection:
            yield connection

    def ask(self, work: Callable[[Db], T]) -> T:
        with self.read() as connection:
            return work(SqliteTransaction(connection))

    def change(
        self,
        work: Callable[[Transaction], T],
        *,
        repeatable: bool = False,
        before_retry: Callable[[StoreError], None] | None = None,
    ) -> T:
        """One try: a file does not go away, and whoever waits for its writer waits inside it."""
        with self.write() as connection:
            return work(SqliteTransaction(connection))

    @contextmanager
    def errors(self, doing: str) -> Iterator[None]:
        """Turn the driver's errors into ours, saying what was being done to which file."""
        try:
            yield
        except HoldfastError:
            raise
        except sqlite3.Error as error:
            raise self._translate(doing, error) from error

    def _translate(self, doing: str, error: sqlite3.Error) -> StoreError:
        code = getattr(error, "sqlite_errorcode", 0) or 0
        if code == sqlite3.SQLITE_FULL or (code & 0xFF == sqlite3.SQLITE_IOERR and self._no_room()):
            return StoreFull(f"no room left to write to {self.path}; free some space, then go on ({error})")
        if code & 0xFF == sqlite3.SQLITE_BUSY:
            return StoreUnavailable(f"{self.path} was held by another writer for {BUSY_SECONDS:.0f} s ({error})")
        if code & 0xFF == sqlite3.SQLITE_NOTADB:
            return StoreError(f"cannot {doing} {self.path}: it is not a SQLite database")
        return StoreError(f"cannot {doing} {self.path}: {error}")

    def _no_room(self) -> bool:
        """SQLite reports a file that may not grow as a plain I/O error: ask the system why."""
        room = os.statvfs(self.path.parent)
        if room.f_bavail * room.f_frsize < 1 << 20:
            return True
        limit = resource.getrlimit(resource.RLIMIT_FSIZE)[0]
        if limit == resource.RLIM_INFINITY:
            return False
        names = (self.path, self.path.with_name(self.path.name + "-wal"))
        # A write is refused as a whole, so the file may end one write short of the limit.
        return any(p.exists() and p.stat().st_size + (1 << 20) > limit for p in names)

    def close(self) -> None:
        self._readers.close()
        self._wal.close()
        with self._write_lock:
            self._writer.close()


def _statements(script: str) -> Iterator[str]:
    """One statement at a time: `executescript` would commit the migration's transaction."""
    statement = ""
    for line in script.splitlines(keepends=True):
        statement += line
        if sqlite3.complete_statement(statement):
            yield statement
            statement = ""
    if statement.strip() and not all(li.startswith("--") or not li.strip() for li in statement.splitlines()):
        raise StoreError(f"migration ends in the middle of a statement: {statement.strip()[:80]}", errno.EINVAL)
