"""The store in memory: gone with its last user, or, if it has a name, with the process."""

from __future__ import annotations

import threading

from holdfast.errors import RequestError
from holdfast.fanout.table import FanoutTable
from holdfast.log.log import Log
from holdfast.log.manifest import Manifest
from holdfast.log.staging import Staging
from holdfast.log.watch import Watcher
from holdfast.metadata.contract import Metadata
from holdfast.sessions.table import SessionTable
from holdfast.store.memory.fanout import FanoutState, MemoryFanoutTable
from holdfast.store.memory.log import MemoryLog
from holdfast.store.memory.metadata import MemoryMetadata, MemoryState
from holdfast.store.memory.sessions import MemorySessionTable, SessionState


class _Contents:
    """What stores of one name share, as processes share a database."""

    def __init__(self) -> None:
        self.log, self.watcher, self.keys = MemoryLog(), Watcher(), MemoryState()
        self.sessions = SessionState()
        self.fanout = FanoutState()


_named: dict[str, _Contents] = {}
_lock = threading.Lock()


class MemoryStore:
    shared = False

    def __init__(self, name: str = ""):
        with _lock:
            contents = _named.setdefault(name, _Contents()) if name else _Contents()
        self._log = Log(contents.log, contents.watcher, on_close=self.close)
        self._metadata = MemoryMetadata(contents.keys, self.close)
        self._sessions = MemorySessionTable(contents.sessions, contents.log, self._log)
        self._fanout = MemoryFanoutTable(contents.fanout, contents.sessions, contents.log, self._log)
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
        raise RequestError("a store in memory cannot be written to by other processes; use sqlite or postgresql")

    def manifest(self) -> Manifest:
        raise RequestError("a lake needs a store that several processes share; use sqlite or postgresql")

    def hold(self, node: str) -> None:
        """It lives in one process anyway."""

    def bus(self, node: str) -> None:
        return None

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._metadata.close()
