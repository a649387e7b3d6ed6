"""When a node says that it is well again after the store did not take what was published."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from holdfast.errors import StoreUnavailable
from holdfast.runtime.node import PROBE_AFTER_SECONDS, Node
from holdfast.runtime.serve import running
from holdfast.settings import load
from node import free_ports


class Outage:
    """While it lasts, no append works."""

    def __init__(self, node: Node, monkeypatch: pytest.MonkeyPatch):
        self.lasts = True
        append = node.log.append_sharded

        def perhaps(*given: Any) -> Any:
            if self.lasts:
                raise StoreUnavailable("the disk is full")
            return append(*given)

        monkeypatch.setattr(node.log, "append_sharded", perhaps)


@asynccontextmanager
async def failing(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[tuple[Node, Outage]]:
    mqtt, http = free_ports(2)
    flags = ["store=memory:", f"mqtt.listen=127.0.0.1:{mqtt}", f"http.listen=127.0.0.1:{http}"]
    async with running(load(flags=[*flags, "log.upkeep_secs=3600"])) as node:
        outage = Outage(node, monkeypatch)
        assert not await node.publish("p", "t", b"", 1, False)
        assert node.problem is not None and "the disk is full" in node.problem
        yield node, outage


def test_it_is_well_with_the_next_commit(monkeypatch: pytest.MonkeyPatch) -> None:
    async def work() -> None:
        async with failing(monkeypatch) as (node, outage):
            outage.lasts = False
            assert await node.publish("p", "t", b"", 1, False)
            assert node.problem is None

    asyncio.run(asyncio.wait_for(work(), 30))


def test_it_is_well_soon_if_nobody_publishes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody is sent to a node that is not well: it must find out by itself."""

    async def work() -> None:
        async with failing(monkeypatch) as (node, _):
            begun = time.monotonic()
            while node.problem is not None:  # noqa: ASYNC110
                await asyncio.sleep(0.02)
            assert PROBE_AFTER_SECONDS <= time.monotonic() - begun < PROBE_AFTER_SECONDS + 5.0

    asyncio.run(asyncio.wait_for(work(), 30))


def test_it_is_not_well_while_publishes_keep_failing_whatever_else_the_store_takes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def work() -> None:
        async with failing(monkeypatch) as (node, _):
            until = time.monotonic() + 2 * PROBE_AFTER_SECONDS
            while time.monotonic() < until:
                assert not await node.publish("p", "t", b"", 1, False)
                assert node.problem is not None
                await asyncio.sleep(0.05)

    asyncio.run(asyncio.wait_for(work(), 30))
