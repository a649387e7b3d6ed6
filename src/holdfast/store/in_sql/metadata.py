"""Metadata in the database that holds the log: SQL that SQLite and PostgreSQL share.

A change runs in one transaction:

    1. lock the counter: changes take turns, so versions become visible in their order
    2. end the leases that have expired, so that the rest need not think of them
    3. compare the preconditions; if one differs, keep step 2 and stop
    4. write the rows, each under the next version, and the counter

A deleted key stays as a row without a value, under the version of its deletion, so "everything after version
n" is one query, and the newest state of each key is all it returns. After some thousand further versions the
row goes for good.
"""

from __future__ import annotations

import json
import time
from abc import abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, TypeVar

from holdfast.errors import StoreError
from holdfast.metadata.contract import (
    Lease,
    LeaseEnded,
    Metadata,
    Preconditions,
    VersionMismatch,
    Versions,
    check_key,
    check_prefix,
    check_ttl,
    prefix_end,
)
from holdfast.metadata.entries import Change, Deleted, Entry, Event, Put
from holdfast.metadata.feed import Changes, Feed, FeedLine
from holdfast.metadata.watch import Watch
from holdfast.restarts import Failure
from holdfast.store.in_sql.database import Database, Db, Dialect, Rows

T = TypeVar("T")

DELETIONS_KEPT = 10_000
"""A watcher that is this many versions behind has to compare instead of being told."""


class SqlMetadata(Metadata):
    """Subclasses say how the feed reaches the database; see `SqliteMetadata` and `PostgresMetadata`.

    `on_close` closes the store: who closes its metadata is done with all of it.
    """

    def __init__(self, database: Database, on_close: Callable[[], None], deletions_kept: int = DELETIONS_KEPT):
        self._database, self._sql = database, database.dialect
        self._on_close = on_close
        self._deletions_kept = deletions_kept
        self.feed = Feed(self._line)

    @abstractmethod
    def _line(self) -> AbstractContextManager[FeedLine]:
        """A connection for the feed."""

    def get(self, key: str) -> Entry | None:
        check_key(key)
        sql = f"select m.value, m.version {self._present} and m.key = ?"
        rows = self._database.ask(lambda db: db.run(sql, key))
        return Entry(bytes(rows[0][0]), rows[0][1]) if rows else None

    def list(self, prefix: str) -> dict[str, Entry]:
        check_prefix(prefix)
        sql = f"select m.key, m.value, m.version {self._present} and m.key >= ? and m.key < ? order by m.key"
        rows = self._database.ask(lambda db: db.run(sql, prefix, prefix_end(prefix)))
        return {key: Entry(bytes(value), version) for key, value, version in rows}

    @property
    def _present(self) -> str:
        return f"""
            from metadata m left join metadata_leases l on l.id = m.lease
            where m.value is not null and (m.lease is null or l.expires_at > {self._sql.now})"""

    def _commit(self, changes: Sequence[Change], preconditions: Preconditions) -> Versions | VersionMismatch:
        def work(db: Db) -> Versions | VersionMismatch:
            turn = _Turn(db, self._sql, self._deletions_kept)
            outcome = turn.mismatch(preconditions) or turn.apply(changes)
            turn.finish()
            return outcome

        return self._told(self._database.change(work))

    def _told(self, outcome: T) -> T:
        self.feed.nudge()
        return outcome

    def watch(self, prefix: str, wake: Callable[[], None] | None = None) -> Watch:
        check_prefix(prefix)
        return self.feed.add(prefix, lambda: self._database.ask(lambda db: snapshot(db, prefix)), wake)

    def sweep(self) -> None:
        """End the leases that have expired. Every change does so too."""
        self._database.change(lambda db: _Turn(db, self._sql, self._deletions_kept).finish(), repeatable=True)

    @property
    def watch_failure(self) -> Failure | None:
        return self.feed.failure

    def lease(self, ttl_seconds: float) -> Lease:
        check_ttl(ttl_seconds)
        sql = f"insert into metadata_leases (expires_at) values ({self._sql.now} + ?) returning id"
        asked_at = time.monotonic()
        # Repeated after an unknown outcome it may leave a lease that nobody knows: it expires.
        rows = self._database.change(lambda db: db.run(sql, ttl_seconds), repeatable=True)
        return Lease(self, rows[0][0], ttl_seconds, asked_at)

    def _renew(self, lease: Lease) -> None:
        now = self._sql.now
        sql = f"update metadata_leases set expires_at = {now} + ? where id = ? and expires_at > {now} returning id"

        def work(db: Db) -> Rows:
            return db.run(sql, lease.ttl_seconds, lease.id)

        def still_held(error: StoreError) -> None:
            if lease.remaining_seconds <= 0:
                raise LeaseEnded(f"{lease} has ended while the store was away: {error}") from error

        if not self._database.change(work, repeatable=True, before_retry=still_held):
            raise LeaseEnded(f"{lease} has ended")

    def _revoke(self, lease: Lease) -> None:
        def work(db: Db) -> None:
            turn = _Turn(db, self._sql, self._deletions_kept)
            turn.end_leases(db.run("delete from metadata_leases where id = ? returning id", lease.id))
            turn.finish()

        self._told(self._database.change(work, repeatable=True))

    def close(self) -> None:
        self.feed.close()
        self._on_close()


class _Turn:
    """One transaction that changes keys, from the moment the counter is ours."""

    def __init__(self, db: Db, sql: Dialect, deletions_kept: int):
        self._db, self._sql, self._deletions_kept = db, sql, deletions_kept
        query = f"select revision, trimmed, {sql.now_in_turn} from metadata_revision{sql.locked}"
        self._began_at, self._trimmed, now = db.run(query)[0]
        self._revision: int = self._began_at
        self.end_leases(db.run("delete from metadata_leases where expires_at <= ? returning id", now))

    def _next(self) -> int:
        self._revision += 1
        return self._revision

    def end_leases(self, ended: Rows) -> None:
        """Delete the keys of leases whose rows are already gone."""
        for (number,) in ended:
            for (key,) in self._db.run("select key from metadata where lease = ? order by key", number):
                self._delete(key)

    def mismatch(self, preconditions: Preconditions) -> VersionMismatch | None:
        if not preconditions:
            return None
        sql = f"select key, version from metadata where value is not null and key in ({self._sql.each_of})"
        found: dict[str, int] = dict(self._db.run(sql, json.dumps(list(preconditions))))
        for key, expected in preconditions.items():
            if found.get(key) != expected:
                return VersionMismatch(key, expected, found.get(key))
        return None

    def apply(self, changes: Sequence[Change]) -> Versions:
        versions: Versions = []
        rows: Rows = []
        for change in changes:
            if isinstance(change, Put):
                rows.append((change.key, change.value, self._next(), change.lease and change.lease.id))
                versions.append(self._revision)
            else:
                versions.append(self._delete(change.key))
        self._check_leases(changes)
        if rows:
            self._db.run_many(
                """insert into metadata (key, value, version, lease) values (?, ?, ?, ?)
                   on conflict (key) do update
                   set value = excluded.value, version = excluded.version, lease = excluded.lease""",
                rows,
            )
        return versions

    def _check_leases(self, changes: Sequence[Change]) -> None:
        leases = {c.lease.id: (c.lease, c.key) for c in changes if isinstance(c, Put) and c.lease}
        for number, (lease, key) in leases.items():
            if not self._db.run("select id from metadata_leases where id = ?", number):
                raise LeaseEnded(f"{lease} has ended; key {key!r} was not stored")

    def _delete(self, key: str) -> int | None:
        sql = "update metadata set value = null, lease = null, version = ? where key = ? and value is not null"
        if not self._db.run(f"{sql} returning key", self._revision + 1, key):
            return None
        return self._next()

    def finish(self) -> None:
        if self._revision == self._began_at:
            return
        # Rarely, and far behind: most watchers never notice that deletions are forgotten.
        step = max(self._deletions_kept // 10, 1)
        if self._revision // step != self._began_at // step:
            self._trimmed = max(self._trimmed, self._revision - self._deletions_kept)
            self._db.run("delete from metadata where value is null and version <= ? returning key", self._trimmed)
        self._db.run(
            f"update metadata_revision set revision = ?, trimmed = ? {self._sql.and_notify}",
            self._revision,
            self._trimmed,
        )


def snapshot(db: Db, prefix: str) -> tuple[int, dict[str, Entry]]:
    """The counter and every key under a prefix, as of one moment."""
    rows = db.run(
        """select r.revision, m.key, m.value, m.version
           from metadata_revision r
           left join metadata m on m.value is not null and m.key >= ? and m.key < ?""",
        prefix,
        prefix_end(prefix),
    )
    entries = {key: Entry(bytes(value), version) for _, key, value, version in rows if key is not None}
    return rows[0][0], entries


def changes_after(db: Db, sql: Dialect, after: int, prefixes: Sequence[str]) -> Changes:
    """What a feed asks for, in one statement and therefore as of one moment."""
    under = " or ".join("(m.key >= ? and m.key < ?)" for _ in prefixes)
    rows = db.run(
        f"""select r.revision, r.trimmed, (select min(expires_at) from metadata_leases) - {sql.now},
                   m.key, m.value, m.version
            from metadata_revision r left join metadata m on m.version > ? and ({under})
            order by m.version""",
        after,
        *(bound for prefix in prefixes for bound in (prefix, prefix_end(prefix))),
    )
    revision, trimmed, due_seconds = rows[0][:3]
    return Changes(revision, trimmed, due_seconds, [_event(*row[3:]) for row in rows if row[3] is not None])


def _event(key: str, value: Any, version: int) -> Event:
    return Deleted(key, version) if value is None else Put(key, bytes(value), version=version)
