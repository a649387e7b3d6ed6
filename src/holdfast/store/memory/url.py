"""`memory:`, or `memory:NAME` to share one store by name within a process."""

from __future__ import annotations

from dataclasses import dataclass

from holdfast.store.contract import Store, StoreOptions


@dataclass(frozen=True, slots=True)
class MemoryUrl:
    name: str

    one_process = True

    @classmethod
    def parse(cls, url: str) -> MemoryUrl:
        return cls(url.partition(":")[2].lstrip("/"))

    def absolute(self) -> str:
        return f"memory:{self.name}"

    def missing(self) -> str | None:
        return None

    def open(self, options: StoreOptions) -> Store:
        from holdfast.store.memory.store import MemoryStore

        return MemoryStore(self.name)
