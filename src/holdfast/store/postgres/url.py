"""`postgresql://…`, handed to the driver as it is."""

from __future__ import annotations

from dataclasses import dataclass

from holdfast.store.contract import Store, StoreOptions


@dataclass(frozen=True, slots=True)
class PostgresUrl:
    dsn: str

    one_process = False

    @classmethod
    def parse(cls, url: str) -> PostgresUrl:
        return cls(url)

    def absolute(self) -> str:
        return self.dsn

    def missing(self) -> str | None:
        return None

    def open(self, options: StoreOptions) -> Store:
        from holdfast.store.postgres.store import PostgresStore

        return PostgresStore(self.dsn, notifications=options.notifications, retry_seconds=options.retry_seconds)
