"""A clean stop: nothing is left running that needs what has been stopped before it."""

from __future__ import annotations

import asyncio

import pytest

from holdfast.errors import StoreUnavailable
from holdfast.runtime.groups import GroupThreads
from holdfast.runtime.serve import running
from holdfast.settings import load
from node import free_ports


def test_upkeep_has_ended_before_the_groups_it_looks_after(monkeypatch: pytest.MonkeyPatch) -> None:
    async def work() -> None:
        mqtt, http = free_ports(2)
        flags = ["store=memory:", f"mqtt.listen=127.0.0.1:{mqtt}", f"http.listen=127.0.0.1:{http}"]
        async with running(load(flags=[*flags, "log.upkeep_secs=0.01"])) as node:
            failures: dict[str, object] = {}

            async def stopped(_: float) -> bool:
                """Saving the sessions takes a while: as long as upkeep needs to come round."""
                while node.supervisor.runs("upkeep") and not node.supervisor.failures:  # noqa: ASYNC110
                    await asyncio.sleep(0.01)
                failures.update(node.supervisor.failures)
                return True

            monkeypatch.setattr(node.sessions, "stopped", stopped)
        assert not failures

    asyncio.run(asyncio.wait_for(work(), 30))


def test_whoever_still_asks_for_a_group_hears_that_the_node_stops() -> None:
    async def work() -> None:
        threads = GroupThreads()
        assert await threads.store(lambda: 1) == 1
        threads.close()
        for kind in (threads.lease, threads.store, threads.streams, threads.bulk):
            with pytest.raises(StoreUnavailable, match="stopping"):
                await kind(lambda: 1)

    asyncio.run(work())
