"""The durable truth: ordered, replayable streams of messages in a store."""

from __future__ import annotations

from holdfast.log.contract import ABSENT, Appended, Chunk, Generation, Head, Key, Placed, Reading, Skipped
from holdfast.log.log import Log
from holdfast.store import MemoryUrl, PostgresUrl, SqliteUrl, parse_url

__all__ = [
    "ABSENT",
    "Appended",
    "Chunk",
    "Generation",
    "Head",
    "Key",
    "Log",
    "Placed",
    "Reading",
    "Skipped",
    "open_log",
]

_shared_memory: dict[str, Log] = {}


def open_log(url: str, *, notifications: bool = True, retry_seconds: float = 30.0) -> Log:
    """Open the store at `url`, making it if it is not there yet.

    `notifications=False` leaves hearing of other processes' appends to polling alone. `retry_seconds` is how
    long a call keeps trying while a PostgreSQL server is away, before it raises.
    """
    match parse_url(url):
        case MemoryUrl(name):
            return _memory(name)
        case SqliteUrl(path):
            from holdfast.log.sqlite import SqliteLog, SqliteWatcher
            from holdfast.store.sqlite import SqliteStore

            sqlite = SqliteStore(path)
            return Log(SqliteLog(sqlite), SqliteWatcher(sqlite))
        case PostgresUrl(dsn):
            from holdfast.log.postgres import PostgresLog, PostgresWatcher
            from holdfast.store.postgres import PostgresStore

            postgres = PostgresLog(PostgresStore(dsn, retry_seconds))
            return Log(postgres, PostgresWatcher(postgres, notifications))


def _memory(name: str) -> Log:
    from holdfast.log.memory import MemoryLog
    from holdfast.log.watch import Watcher

    if not name:
        return Log(MemoryLog(), Watcher())
    if name not in _shared_memory:
        _shared_memory[name] = Log(MemoryLog(), Watcher())
    return _shared_memory[name]
