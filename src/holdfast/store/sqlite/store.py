"""The store over one SQLite file. One node serves it; other processes read it and stage for it."""

from __future__ import annotations

from pathlib import Path
from typing import TextIO

from holdfast.fanout.table import FanoutTable
from holdfast.log.log import Log
from holdfast.log.manifest import Manifest
from holdfast.log.staging import Staging
from holdfast.metadata.contract import Metadata
from holdfast.sessions.table import SessionTable
from holdfast.store.in_sql.manifest import SqlManifest
from holdfast.store.sqlite.database import SqliteDatabase
from holdfast.store.sqlite.fanout import SqliteFanoutTable
from holdfast.store.sqlite.hold import hold
from holdfast.store.sqlite.log import SqliteLog
from holdfast.store.sqlite.metadata import SqliteMetadata
from holdfast.store.sqlite.sessions import SqliteSessionTable
from holdfast.store.sqlite.staging import SqliteStaging
from holdfast.store.sqlite.watcher import SqliteWatcher


class SqliteStore:
    shared = False

    def __init__(self, path: Path, *, mapped: bool = False):
        self.database = SqliteDatabase(path, mapped)
        self._watcher = SqliteWatcher(self.database)
        self._log = Log(SqliteLog(self.database), self._watcher, manifest=self.manifest(), on_close=self.close)
        self._metadata = SqliteMetadata(self.database, self.close)
        self._sessions = SqliteSessionTable(self.database, self._log)
        self._fanout = SqliteFanoutTable(self.database, self._log)
        self._closed = False
        self._held: TextIO | None = None

    def log(self) -> Log:
        return self._log

    def metadata(self) -> Metadata:
        return self._metadata

    def sessions(self) -> SessionTable:
        return self._sessions

    def fanout(self) -> FanoutTable:
        return self._fanout

    def staging(self) -> Staging:
        return SqliteStaging(self.database)

    def manifest(self) -> Manifest:
        return SqlManifest(self.database)

    def hold(self, node: str) -> None:
        self._held = hold(self.database.path, node)

    def bus(self, node: str) -> None:
        return None

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._watcher.close()
            self._metadata.feed.close()
            self.database.close()
            if self._held is not None:
                self._held.close()
