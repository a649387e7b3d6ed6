"""Bans as a node keeps them: in whatever metadata store there is, seen by every node, kept while the store is away."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, cast

import pytest

from e2e.raw import packet, text
from holdfast.auth.bans import Ban
from holdfast.errors import RequestError, StoreUnavailable, UnknownBan
from holdfast.keys import BANS, BANS_CHANGED, ban_key
from holdfast.metadata import Metadata, Put
from holdfast.runtime import bans
from holdfast.runtime.bans import BanHost
from holdfast.runtime.serve import running
from holdfast.settings import load
from holdfast.store import open_metadata
from node import free_ports

NAMES = ["car-1", "a/b~%", "x" * 65_535, "é" * 300, "10.0.0.0/8"]


class Clock:
    def __init__(self) -> None:
        self.time = 1_000_000.0

    def __call__(self) -> float:
        return self.time


class Away:
    """A metadata store that can be away."""

    def __init__(self, metadata: Metadata):
        self._metadata, self.away, self.calls = metadata, False, [""]

    def __getattr__(self, name: str) -> Any:
        if self.away:
            raise StoreUnavailable("away")
        self.calls.append(name)
        return getattr(self._metadata, name)


class Nodes:
    """Two nodes on one store. `heard` is what the second was told of."""

    def __init__(self, metadata: Metadata):
        self.clock, self.heard = Clock(), list[Ban]()
        self.metadata, self.store = metadata, Away(metadata)
        self.one = BanHost(metadata, self.clock, lambda new: None)
        self.two = BanHost(cast("Metadata", self.store), self.clock, self._hear)
        self.told = asyncio.Event()

    def _hear(self, new: list[Ban]) -> None:
        self.heard += new
        self.told.set()

    async def look(self) -> None:
        """What the second does every second."""
        await self.two._call(self.two._look_after)
        await asyncio.sleep(0)

    def bans_client(self, name: str) -> bool:
        return self.two.table.find(name, None, None, self.clock()) is not None

    def close(self) -> None:
        self.one.close()
        self.two.close()


@pytest.fixture(params=["memory", "sqlite", "postgres", "etcd"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    match request.param:
        case "memory":
            return f"memory:{tmp_path}"
        case "sqlite":
            return f"sqlite:///{tmp_path}/holdfast.db"
        case kind:
            found: str = request.getfixturevalue(f"{kind}_url")
            return found


def with_nodes(url: str, work: Callable[[Nodes], Awaitable[None]]) -> None:
    async def run(metadata: Metadata) -> None:
        nodes = Nodes(metadata)
        try:
            await work(nodes)
        finally:
            nodes.close()

    with open_metadata(url) as metadata:
        asyncio.run(run(metadata))


def test_a_ban_is_stored_seen_and_lifted(url: str) -> None:
    async def work(nodes: Nodes) -> None:
        await nodes.two.begin()
        for name in NAMES:
            made = await nodes.one.add("client", name, "why", None)
            assert nodes.one.table.find(name, None, None, 0) == made, "on this node at once"
            assert await nodes.two.all() == [made], "the store's, whatever this node has seen"
            assert not nodes.bans_client(name)
            await nodes.look()
            assert nodes.bans_client(name) and nodes.heard == [made]
            nodes.heard.clear()
            await nodes.two.lift("client", name)
            assert not nodes.bans_client(name)
            assert not nodes.metadata.list(BANS)
            with pytest.raises(UnknownBan, match="there is no ban of client"):
                await nodes.one.lift("client", name)

    with_nodes(url, work)


def test_bans_are_there_before_anybody_is_let_in(url: str) -> None:
    async def work(nodes: Nodes) -> None:
        await nodes.one.add("address", "10.0.0.0/255.0.0.0", "", None)
        await nodes.one.add("user", "mallory", "", 60)
        await nodes.two.begin()
        assert nodes.two.table.find(None, None, "10.1.2.3", 0)
        assert nodes.two.table.find(None, "mallory", None, nodes.clock())
        assert [(ban.kind, ban.name) for ban in await nodes.two.all()] == [
            ("address", "10.0.0.0/8"),
            ("user", "mallory"),
        ]

    with_nodes(url, work)


def test_making_it_again_replaces_it(url: str) -> None:
    async def work(nodes: Nodes) -> None:
        await nodes.one.add("client", "c", "first", None)
        await nodes.one.add("client", "c", "second", 10)
        (found,) = await nodes.one.all()
        assert (found.reason, found.until) == ("second", nodes.clock() + 10)
        await nodes.look()
        assert nodes.two.table.find("c", None, None, nodes.clock()) == found
        await nodes.one.lift("client", "c")
        assert await nodes.one.all() == []

    with_nodes(url, work)


def test_one_that_has_ended_bans_nobody_and_is_removed(url: str) -> None:
    async def work(nodes: Nodes) -> None:
        await nodes.one.add("client", "short", "", 5)
        await nodes.one.add("client", "long", "", 50)
        await nodes.look()
        nodes.clock.time += 5
        assert not nodes.bans_client("short") and nodes.bans_client("long")
        assert [ban.name for ban in await nodes.one.all()] == ["long"]
        assert len(nodes.metadata.list(BANS)) == 2
        await nodes.look()
        assert list(nodes.metadata.list(BANS)) == [ban_key("client", "long")]
        await nodes.look()
        assert len(nodes.two.table) == 1

    with_nodes(url, work)


def test_one_that_has_ended_cannot_be_lifted(url: str) -> None:
    async def work(nodes: Nodes) -> None:
        await nodes.one.add("client", "c", "", 5)
        nodes.clock.time += 5
        with pytest.raises(UnknownBan):
            await nodes.one.lift("client", "c")
        assert not nodes.metadata.list(BANS)

    with_nodes(url, work)


def test_one_that_is_made_anew_when_it_ends_is_not_removed(url: str) -> None:
    async def work(nodes: Nodes) -> None:
        await nodes.one.add("client", "c", "", 5)
        await nodes.look()
        nodes.clock.time += 5
        await nodes.one.add("client", "c", "again", None)
        await nodes.two._call(nodes.two._forget)  # from a copy that is older than that
        await nodes.look()
        assert nodes.bans_client("c")
        assert [ban.reason for ban in await nodes.one.all()] == ["again"]
        assert [ban.reason for ban in nodes.heard] == ["", "again"], "it is a new one: who came in between goes"

    with_nodes(url, work)


@pytest.fixture
def memory(tmp_path: Path) -> str:
    return f"memory:{tmp_path}"


def test_while_the_store_is_away_the_last_copy_stays_in_force(memory: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bans, "LOOK_SECONDS", 0.001)

    async def work(nodes: Nodes) -> None:
        await nodes.one.add("client", "c", "", None)
        await nodes.two.begin()
        await asyncio.sleep(0)
        nodes.told.clear()
        task = asyncio.create_task(nodes.two.run())
        nodes.store.away = True
        await nodes.one.add("client", "d", "", None)
        for _ in range(20):
            await asyncio.sleep(0.002)
            assert nodes.bans_client("c") and not task.done()
        assert not nodes.bans_client("d")
        with pytest.raises(StoreUnavailable):
            await nodes.two.add("client", "e", "", None)
        nodes.store.away = False
        await asyncio.wait_for(nodes.told.wait(), 10)
        assert nodes.bans_client("c") and nodes.bans_client("d")
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task

    with_nodes(memory, work)


def test_a_read_that_fails_half_way_is_made_again(memory: str) -> None:
    async def work(nodes: Nodes) -> None:
        await nodes.two.begin()
        await nodes.one.add("client", "c", "", None)
        get = nodes.metadata.get

        class HalfAway(Away):
            def get(self, key: str) -> Any:
                found = get(key)
                self.away = True
                return found

        half = HalfAway(nodes.metadata)
        nodes.two._metadata = cast("Metadata", half)
        with pytest.raises(StoreUnavailable):
            await nodes.look()
        nodes.two._metadata = nodes.metadata
        await nodes.look()
        assert nodes.bans_client("c")

    with_nodes(memory, work)


def test_a_node_does_not_start_without_having_read_them(memory: str) -> None:
    async def work(nodes: Nodes) -> None:
        nodes.store.away = True
        with pytest.raises(StoreUnavailable):
            await nodes.two.begin()

    with_nodes(memory, work)


def test_bans_are_read_only_when_one_has_changed(memory: str) -> None:
    async def work(nodes: Nodes) -> None:
        await nodes.one.add("client", "c", "", None)
        await nodes.look()
        nodes.store.calls.clear()
        for _ in range(5):
            await nodes.look()
        assert nodes.store.calls == ["get"] * 5

    with_nodes(memory, work)


def test_a_value_that_is_no_ban_spoils_no_other(memory: str) -> None:
    async def work(nodes: Nodes) -> None:
        await nodes.one.add("client", "c", "", None)
        wrong = [
            b"{",
            b'{"kind":"client","name":""}',
            b'{"kind":"address","name":"nowhere"}',
            b'{"kind":"x","name":"y"}',
        ]
        changes = [Put(ban_key("client", f"wrong-{n}"), value) for n, value in enumerate(wrong)]
        nodes.metadata.transact([*changes, Put(BANS_CHANGED, b"")])
        await nodes.look()
        assert nodes.bans_client("c") and len(nodes.two.table) == 1
        await nodes.one.lift("client", "wrong-0")

    with_nodes(memory, work)


def test_a_wrong_name_changes_nothing(memory: str) -> None:
    async def work(nodes: Nodes) -> None:
        for kind, name in (("clients", "x"), ("client", ""), ("address", "10.0.0.1/8")):
            with pytest.raises(RequestError):
                await nodes.one.add(kind, name, "", None)
            with pytest.raises(RequestError):
                await nodes.one.lift(kind, name)
        assert nodes.metadata.get(BANS_CHANGED) is None

    with_nodes(memory, work)


# -- bans that are made while somebody connects, in a node inside the process ------------------------------------------


def while_connecting(ban_when: Callable[[Any, Callable[[], Awaitable[None]]], None]) -> tuple[int, bytes]:
    """The code of the CONNACK that client `c` gets if it is banned at the moment `ban_when` arranges, and the rest."""

    async def work() -> tuple[int, bytes]:
        mqtt, http = free_ports(2)
        flags = ["store=memory:", f"mqtt.listen=127.0.0.1:{mqtt}", f"http.listen=127.0.0.1:{http}"]
        async with running(load(flags=flags)) as node:

            async def ban() -> None:
                await node.bans.add("client", "c", "", None)

            ban_when(node, ban)
            reader, writer = await asyncio.open_connection("127.0.0.1", mqtt)
            writer.write(packet(0x10, text("MQTT") + b"\x05\x00\x00\x3c\x00" + text("c")))
            connack = await reader.readexactly(2)
            assert connack[0] == 0x20
            body = await reader.readexactly(connack[1])
            rest = await reader.read()
            writer.close()
            assert not node.sessions.connections
            return body[1], rest

    return asyncio.run(asyncio.wait_for(work(), 60))


def test_a_ban_made_while_the_password_is_checked_counts() -> None:
    def ban_when(node: Any, ban: Callable[[], Awaitable[None]]) -> None:
        authenticate = node.front._authenticate

        async def slow(*given: Any) -> Any:
            found = await authenticate(*given)
            await ban()
            return found

        node.front._authenticate = slow

    assert while_connecting(ban_when) == (0x8A, b"")


def test_a_ban_made_while_the_session_is_fetched_counts() -> None:
    """It is welcome by then, and goes as others do who are connected."""

    def ban_when(node: Any, ban: Callable[[], Awaitable[None]]) -> None:
        join = node.sessions.join

        async def slow(*given: Any) -> Any:
            await ban()
            return await join(*given)

        node.sessions.join = slow

    code, rest = while_connecting(ban_when)
    assert (code, rest[:1], rest[2:3]) == (0, b"\xe0", b"\x98")
