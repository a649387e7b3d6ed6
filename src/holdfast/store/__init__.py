"""The database underneath: one place that knows how to connect, migrate, and name its errors."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from urllib.parse import unquote, urlsplit

from holdfast.errors import RequestError

TAKES = "memory:, sqlite:///path/to/file.db or postgresql://user@host/database"


@dataclass(frozen=True, slots=True)
class MemoryUrl:
    """`memory:`, or `memory:NAME` to share one store by name within a process."""

    name: str


@dataclass(frozen=True, slots=True)
class SqliteUrl:
    """`sqlite:///relative/path` or `sqlite:////absolute/path`."""

    path: Path


@dataclass(frozen=True, slots=True)
class PostgresUrl:
    """`postgresql://…`, handed to the driver as it is."""

    dsn: str


StoreUrl = MemoryUrl | SqliteUrl | PostgresUrl


def parse_url(url: str) -> StoreUrl:
    scheme, _, rest = url.partition(":")
    match scheme:
        case "memory":
            return MemoryUrl(rest.lstrip("/"))
        case "sqlite":
            path = unquote(urlsplit(url).path).removeprefix("/")
            if path:
                return SqliteUrl(Path(path))
            raise RequestError(f"store {url!r} names no file; it takes {TAKES}")
        case "postgresql" | "postgres":
            return PostgresUrl(url)
        case _:
            raise RequestError(f"store {url!r} is of no known kind; it takes {TAKES}")
