"""Wills by themselves: what is stored of them, whose they are, and what happens when the store fails."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from holdfast.runtime.keeper import Keeper
from holdfast.runtime.wills import Wills

from holdfast.errors import StoreUnavailable
from holdfast.metadata import Metadata
from holdfast.mqtt.packets import Will
from holdfast.runtime import wills as module
from holdfast.store import open_metadata

PREFIX = "/holdfast/wills/"


class World:
    """Wills over a store in memory; what they publish is noted, and fails while told to."""

    def __init__(self, metadata: Metadata, node_id: str | None = ""):
        self.metadata, self.keeper = metadata, Keeper(metadata, "latest")
        self.published: list[bytes] = []
        self.works = True
        self.wills = Wills(self.keeper, node_id, self._publish)
        self.wills.load(metadata)

    def _publish(self, client_id: str, will: Will, done: Callable[[bool], None]) -> None:
        if self.works:
            self.published.append(will.payload)
        done(self.works)

    def stored(self) -> list[str]:
        return [key.removeprefix(PREFIX) for key in self.metadata.list(PREFIX)]

    @property
    def due(self) -> list[float]:
        return [entry[0] for entry in self.wills._pending]


def run(story: Callable[[Metadata], Awaitable[None]]) -> None:
    with open_metadata("memory:") as metadata:
        asyncio.run(asyncio.wait_for(story(metadata), 20))


async def until(condition: Callable[[], object]) -> None:
    while not condition():  # noqa: ASYNC110 - the store knows no events
        await asyncio.sleep(0.002)


ONE, OTHER = object(), object()
"""Two connections of one client."""


async def keep(world: World, connection: Any, payload: bytes, delay: int = 0) -> None:
    saving = world.wills.keep(connection, "v", Will("t", payload, delay=delay), delay)
    if saving is not None:
        await saving


def test_a_lost_connection_s_will_is_due_when_it_was_though_the_node_was_killed_meanwhile() -> None:
    async def story(metadata: Metadata) -> None:
        world = World(metadata)
        await keep(world, ONE, b"late", delay=1000)
        world.wills.left(ONE, "v", Will("t", b"late", delay=1000), 1000)  # type: ignore[arg-type]
        await world.wills.settled()
        (due,) = world.due
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(time, "time", lambda: due - 400)  # 600 seconds later
            assert World(metadata).due == [due]
            patch.setattr(time, "time", lambda: due - 5000)  # the clock was set back
            assert World(metadata).due == [due - 4000]

    run(story)


def test_a_will_that_could_not_be_published_at_first_leaves_the_next_one_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "AGAIN_SECONDS", 0.0)

    async def story(metadata: Metadata) -> None:
        world = World(metadata)
        await keep(world, ONE, b"first")
        await keep(world, OTHER, b"second")  # the client is back before the node has seen the first connection end
        world.works = False
        world.wills.left(ONE, "v", Will("t", b"first"), 0)  # type: ignore[arg-type]
        world.works = True
        world.wills.send_due()
        await world.wills.settled()
        assert world.published == [b"first"] and world.stored() == ["/v"]
        assert World(metadata).due, "the second one is no longer there for a node that is killed now"

    run(story)


def test_a_good_bye_that_could_not_be_stored_is_stored_later(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "AGAIN_SECONDS", 0.0)

    async def story(metadata: Metadata) -> None:
        world = World(metadata)
        await keep(world, ONE, b"never")
        transact, failures = metadata.transact, []

        def fails_once(*arguments: Any, **named: Any) -> Any:
            if not failures:
                failures.append(1)
                raise StoreUnavailable("away")
            return transact(*arguments, **named)

        monkeypatch.setattr(metadata, "transact", fails_once)
        world.wills.left(ONE, "v", None, 0)  # type: ignore[arg-type]
        await until(lambda: failures and not world.stored())
        assert world.published == []

    run(story)


def test_a_will_that_waits_is_void_once_its_client_is_welcome_and_not_before() -> None:
    async def story(metadata: Metadata) -> None:
        world = World(metadata)
        await keep(world, ONE, b"late", delay=1000)
        world.wills.left(ONE, "v", Will("t", b"late", delay=1000), 1000)  # type: ignore[arg-type]
        (due,) = world.due
        await keep(world, OTHER, b"of one that vanished")
        world.wills.not_welcome(OTHER, "v")  # type: ignore[arg-type]
        await world.wills.settled()
        assert world.due == [due] and World(metadata).due == [due]
        await keep(world, OTHER, b"next")
        world.wills.withdraw("v")
        assert world.due == []

    run(story)


def test_nodes_that_share_a_store_have_each_its_own() -> None:
    async def story(metadata: Metadata) -> None:
        await keep(World(metadata, "a"), ONE, b"of a")
        await keep(World(metadata, "b"), OTHER, b"of b")
        await keep(World(metadata, None), OTHER, b"of nobody")
        assert world_due(metadata, "a") == world_due(metadata, "b") == 1
        assert world_due(metadata, "c") == world_due(metadata, None) == 0

    def world_due(metadata: Metadata, node_id: str | None) -> int:
        return len(World(metadata, node_id).due)

    run(story)
