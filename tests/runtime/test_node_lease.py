"""The node's lease: what its sessions are told of it, whatever the store does in between."""

from __future__ import annotations

import asyncio
from typing import Any, cast

from holdfast.errors import StoreUnavailable
from holdfast.metadata import Metadata
from holdfast.runtime.node_lease import NodeLease, NodeRecord
from holdfast.store.memory.metadata import MemoryMetadata, MemoryState


class Told:
    """What the sessions hear."""

    def __init__(self) -> None:
        self.heard: list[str] = []

    def granted(self, lease: int, asked_at: float) -> None:
        self.heard.append(f"granted {lease}")

    def renewed(self, asked_at: float) -> None:
        self.heard.append("renewed")

    def lost(self) -> None:
        self.heard.append("lost")


class Failing:
    """A store that is away for as many puts as it is told."""

    def __init__(self, metadata: Metadata):
        self._metadata, self.puts_fail = metadata, 0

    def put(self, *given: Any) -> Any:
        if self.puts_fail:
            self.puts_fail -= 1
            raise StoreUnavailable("away")
        return self._metadata.put(*given)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._metadata, name)


def test_sessions_are_told_of_a_new_lease_though_the_store_failed_right_after_it() -> None:
    async def run() -> list[str]:
        metadata, told = Failing(MemoryMetadata(MemoryState(), lambda: None)), Told()
        lease = NodeLease(cast("Metadata", metadata), NodeRecord("a", 0, 0.0), 5.0, lambda: None, told)
        await lease.begin()
        assert lease._lease is not None
        lease._lease.revoke()
        assert not lease._renew()
        metadata.puts_fail = 1
        assert not lease._renew(), "there is a lease, and nobody could be told whose it is"
        assert lease._renew()
        await asyncio.sleep(0)
        return told.heard

    heard = asyncio.run(run())
    assert heard[1] == "lost" and heard[2].startswith("granted"), heard
