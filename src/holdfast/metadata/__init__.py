"""Small keys with compare-and-set, leases and watches: cursors, leaders, membership and ownership live here."""

from __future__ import annotations

from holdfast.errors import RequestError
from holdfast.metadata.contract import Lease, LeaseEnded, Metadata, Preconditions, VersionMismatch, Versions
from holdfast.metadata.entries import Change, Delete, Deleted, Entry, Event, Put
from holdfast.metadata.memory import MemoryMetadata, MemoryState
from holdfast.metadata.watch import Watch
from holdfast.store import TAKES, MemoryUrl, PostgresUrl, SqliteUrl, parse_url
from holdfast.store.postgres import PostgresStore
from holdfast.store.sqlite import SqliteStore

__all__ = [
    "Change",
    "Delete",
    "Deleted",
    "Entry",
    "Event",
    "Lease",
    "LeaseEnded",
    "Metadata",
    "Preconditions",
    "Put",
    "VersionMismatch",
    "Versions",
    "Watch",
    "open_metadata",
]

_shared_memory: dict[str, MemoryState] = {}


def open_metadata(store: str | SqliteStore | PostgresStore) -> Metadata:
    """The metadata store at a URL, or in a store that is already open (and stays the caller's to close)."""
    from holdfast.metadata.postgres import PostgresMetadata
    from holdfast.metadata.sqlite import SqliteMetadata

    if isinstance(store, SqliteStore):
        return SqliteMetadata(store)
    if isinstance(store, PostgresStore):
        return PostgresMetadata(store)
    if store.startswith("etcd:"):
        from holdfast.metadata.etcd import EtcdMetadata

        return EtcdMetadata.open(store)
    try:
        url = parse_url(store)
    except RequestError as error:
        raise RequestError(f"metadata {store!r}: it takes {TAKES}, or etcd://host:port") from error
    match url:
        case MemoryUrl(name):
            return MemoryMetadata(_shared_memory.setdefault(name, MemoryState()) if name else None)
        case SqliteUrl(path):
            return SqliteMetadata(SqliteStore(path), owned=True)
        case PostgresUrl(dsn):
            return PostgresMetadata(PostgresStore(dsn), owned=True)
