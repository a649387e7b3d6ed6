"""The bus between nodes on PostgreSQL: messages arrive, and those that nobody comes for do not stay for ever."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

from holdfast.groups.protocol import messages as m
from holdfast.groups.protocol.nouns import MemberId
from holdfast.machine import Address
from holdfast.runtime.bus import NodeBus
from holdfast.runtime.supervisor import Supervisor
from holdfast.store import open_store
from holdfast.store.postgres import bus as module

SECONDS = 20.0
MESSAGE = m.LeftGroup(MemberId("s"))


async def until(condition: Callable[[], Any]) -> None:
    while not condition():  # noqa: ASYNC110 (anything may be waited for)
        await asyncio.sleep(0.01)


def with_buses(url: str, work: Callable[..., Coroutine[Any, Any, None]], *names: str) -> None:
    async def whole() -> None:
        heard: dict[str, list[Any]] = {name: [] for name in names}
        supervisors = [Supervisor(lambda reason: None) for _ in names]  # one is one node's
        store = open_store(url)
        buses = [NodeBus(store.bus(name), lambda to, msg, n=name: heard[n].append((to, msg))) for name in names]
        for bus, supervisor in zip(buses, supervisors, strict=True):
            bus.start(supervisor)
        try:
            await asyncio.wait_for(work(store, buses, heard), SECONDS)
        finally:
            for bus in buses:
                bus.close()
            await until(lambda: not any("bus" in supervisor._tasks for supervisor in supervisors))
            for supervisor in supervisors:
                await supervisor.stop()
            store.close()

    asyncio.run(whole())


def count(store: Any) -> int:
    with store.database.read() as db:
        return int(db.execute("select count(*) from bus").fetchone()[0])


def test_a_message_reaches_the_other_node(postgres_url):
    async def work(store: Any, buses: list[NodeBus], heard: dict[str, list[Any]]) -> None:
        to = Address("right", "agent", "s/1")
        buses[0].send(to, MESSAGE)
        await until(lambda: heard["right"])
        assert heard == {"left": [], "right": [(to, MESSAGE)]}

    with_buses(postgres_url, work, "left", "right")


def test_what_was_said_to_a_node_that_never_returns_is_swept(postgres_url, monkeypatch):
    monkeypatch.setattr(module, "STALE_SECONDS", 0.2)
    monkeypatch.setattr(module, "SWEEP_SECONDS", 0.1)

    async def work(store: Any, buses: list[NodeBus], heard: dict[str, list[Any]]) -> None:
        for _ in range(20):
            buses[0].send(Address("gone for good", "registry"), MESSAGE)
        await until(lambda: count(store) == 20)
        await until(lambda: count(store) == 0)

    with_buses(postgres_url, work, "left")


def test_a_listener_that_raises_does_not_end_the_bus(postgres_url):
    async def work(store: Any, buses: list[NodeBus], heard: dict[str, list[Any]]) -> None:
        given: list[Any] = []

        def deliver(to: Address, message: Any) -> None:
            given.append(to)
            if len(given) == 1:
                raise KeyError("planted")

        buses[1]._deliver = deliver
        for n in range(3):
            buses[0].send(Address("right", "agent", str(n)), MESSAGE)
        await until(lambda: len(given) == 3)

    with_buses(postgres_url, work, "left", "right")


def test_a_node_by_itself_has_nobody_to_talk_to():
    store = open_store("memory:")
    bus = NodeBus(store.bus("n"), lambda to, message: None)
    bus.send(Address("other", "registry"), MESSAGE)
    bus.close()
    store.close()
