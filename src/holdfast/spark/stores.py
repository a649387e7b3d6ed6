"""One open log per process and store: Spark's Python workers live through many tasks."""

from __future__ import annotations

import gc
import os
import sqlite3
import threading

from holdfast.log import Log, open_log
from holdfast.log.sqlite import SqliteLog, SqliteWatcher
from holdfast.store import SqliteUrl, parse_url
from holdfast.store.sqlite import SqliteStore

MAPPED_BYTES = 1 << 34

_open: dict[tuple[int, str], Log] = {}
_lock = threading.Lock()
_frozen = False


class _MappedStore(SqliteStore):
    """A store whose file is mapped: a worker reads all of it, once, and saves a copy of every page that way."""

    def _connect(self) -> sqlite3.Connection:
        connection = super()._connect()
        connection.execute(f"pragma mmap_size = {MAPPED_BYTES}")
        return connection


def log_at(url: str) -> Log:
    """The log at this URL, opened once. Never closed: the process ends first."""
    with _lock:
        key = (os.getpid(), url)
        if key not in _open:
            match parse_url(url):
                case SqliteUrl(path):
                    store = _MappedStore(path)
                    _open[key] = Log(SqliteLog(store), SqliteWatcher(store))
                case _:
                    _open[key] = open_log(url, notifications=False)
        return _open[key]


def settle() -> None:
    """Take everything loaded so far out of the garbage collector's sight.

    Spark collects garbage after each task; walking all of pyspark and pyarrow would cost more than a task.
    """
    global _frozen
    if not _frozen:
        gc.collect()
        gc.freeze()
        _frozen = True
