"""`sqlite:///relative/path` or `sqlite:////absolute/path`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote, unquote, urlsplit

from holdfast.store.contract import Store, StoreOptions


@dataclass(frozen=True, slots=True)
class SqliteUrl:
    path: Path

    one_process = False

    @classmethod
    def parse(cls, url: str) -> SqliteUrl | None:
        """None if it names no file."""
        path = unquote(urlsplit(url).path).removeprefix("/")
        return cls(Path(path)) if path else None

    def absolute(self) -> str:
        return f"sqlite:///{quote(str(self.path.absolute()))}"

    def missing(self) -> str | None:
        return None if self.path.exists() else str(self.path.absolute())

    def open(self, options: StoreOptions) -> Store:
        from holdfast.store.sqlite.store import SqliteStore

        return SqliteStore(self.path, mapped=options.mapped)
