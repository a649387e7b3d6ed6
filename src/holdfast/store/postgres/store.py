"""The store over one PostgreSQL database, which several nodes may serve."""

from __future__ import annotations

from holdfast.fanout.table import FanoutTable
from holdfast.log.log import Log
from holdfast.log.manifest import Manifest
from holdfast.log.staging import Staging
from holdfast.metadata.contract import Metadata
from holdfast.sessions.table import SessionTable
from holdfast.store.contract import Bus
from holdfast.store.in_sql.manifest import SqlManifest
from holdfast.store.postgres.bus import PostgresBus
from holdfast.store.postgres.database import PostgresDatabase
from holdfast.store.postgres.fanout import PostgresFanoutTable
from holdfast.store.postgres.log import PostgresLog
from holdfast.store.postgres.metadata import PostgresMetadata
from holdfast.store.postgres.sessions import PostgresSessionTable
from holdfast.store.postgres.staging import PostgresStaging
from holdfast.store.postgres.watcher import PostgresWatcher

STATEMENT_SECONDS_MAX = 30
"""Of a write of sessions: a deleted one is remembered for longer than any write that was under way then can take."""


class PostgresStore:
    shared = True

    def __init__(self, dsn: str, *, notifications: bool = True, retry_seconds: float = 30.0):
        self.database = PostgresDatabase(dsn, retry_seconds)
        log = PostgresLog(self.database)
        self._watcher = PostgresWatcher(log, notifications)
        self._log = Log(log, self._watcher, manifest=self.manifest(), on_close=self.close)
        self._metadata = PostgresMetadata(self.database, self.close, notifications=notifications)
        self._limited = self.database.limited(STATEMENT_SECONDS_MAX)
        self._sessions = PostgresSessionTable(self._limited, self._log)
        self._fanout = PostgresFanoutTable(self._limited, self._log)
        self._closed = False

    def log(self) -> Log:
        return self._log

    def metadata(self) -> Metadata:
        return self._metadata

    def sessions(self) -> SessionTable:
        return self._sessions

    def fanout(self) -> FanoutTable:
        return self._fanout

    def staging(self) -> Staging:
        return PostgresStaging(self.database)

    def manifest(self) -> Manifest:
        return SqlManifest(self.database)

    def hold(self, node: str) -> None:
        """Any number of nodes."""

    def bus(self, node: str) -> Bus:
        return PostgresBus(self.database, node)

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._watcher.close()
            self._metadata.feed.close()
            self._limited.close()
            self.database.close()
