"""Stores: where logs and metadata are kept. `open_store` is the one place that looks at what kind a URL names."""

from __future__ import annotations

from holdfast.errors import RequestError
from holdfast.log.log import Log
from holdfast.metadata.contract import Metadata
from holdfast.store.contract import Bus, Store, StoreOptions, StoreUrl
from holdfast.store.memory.url import MemoryUrl
from holdfast.store.postgres.url import PostgresUrl
from holdfast.store.sqlite.url import SqliteUrl

__all__ = ["Bus", "Store", "StoreOptions", "StoreUrl", "open_log", "open_metadata", "open_store", "parse_url"]

SCHEMES = {
    "memory": MemoryUrl.parse,
    "sqlite": SqliteUrl.parse,
    "postgresql": PostgresUrl.parse,
    "postgres": PostgresUrl.parse,
}
TAKES = "memory:, sqlite:///path/to/file.db or postgresql://user@host/database"


def parse_url(url: str) -> StoreUrl:
    """Where that is, without going there."""
    parse = SCHEMES.get(url.partition(":")[0])
    if parse is None:
        raise RequestError(f"store {url!r} is of no known kind; it takes {TAKES}")
    found: StoreUrl | None = parse(url)
    if found is None:
        raise RequestError(f"store {url!r} names no file; it takes {TAKES}")
    return found


def open_store(url: str, options: StoreOptions = StoreOptions()) -> Store:  # noqa: B008
    """Open the store at `url`, making it if it is not there yet."""
    return parse_url(url).open(options)


def open_log(url: str, *, notifications: bool = True, retry_seconds: float = 30.0) -> Log:
    """The log of the store at `url`, which is made if it is not there yet. Closing the log closes the store.

    `notifications=False` leaves hearing of other processes' appends to polling alone. `retry_seconds` is how
    long a call keeps trying while a PostgreSQL server is away, before it raises.
    """
    return open_store(url, StoreOptions(notifications=notifications, retry_seconds=retry_seconds)).log()


def open_metadata(url: str) -> Metadata:
    """The metadata of the store at `url`, or in etcd. Closing it closes the store."""
    if url.startswith("etcd:"):
        from holdfast.metadata.etcd import EtcdMetadata

        return EtcdMetadata.open(url)
    try:
        found = parse_url(url)
    except RequestError as error:
        raise RequestError(f"metadata {url!r}: it takes {TAKES}, or etcd://host:port") from error
    return found.open(StoreOptions()).metadata()
