"""A node that stood still for longer than its lease, as it wakes: nothing is sent before the clock is seen."""

from __future__ import annotations

import asyncio
import time

import pytest

from e2e.raw import packet, text
from holdfast.runtime.node import Node
from holdfast.runtime.serve import running
from holdfast.settings import load
from node import free_ports


async def connected(port: int) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    expiry = b"\x05\x11\x00\x00\x0e\x10"
    writer.write(packet(0x10, text("MQTT") + b"\x05\x00\x00\x3c" + expiry + text("c")))
    writer.write(packet(0x82, b"\x00\x01\x00" + text("t") + b"\x01"))
    await reader.readuntil(b"\x90\x04\x00\x01\x00\x01")
    return reader, writer


def stand_still(node: Node) -> None:
    """As after SIGSTOP: the lease is over by the node's clock, and no timer has gone off yet."""
    node.lease._renew = lambda: True  # type: ignore[method-assign]
    node.sessions.node.trusted_until = time.monotonic() - 1.0


def test_what_is_committed_then_is_not_delivered_until_the_lease_is_renewed() -> None:
    async def work() -> None:
        mqtt, http = free_ports(2)
        flags = ["store=memory:", f"mqtt.listen=127.0.0.1:{mqtt}", f"http.listen=127.0.0.1:{http}"]
        async with running(load(flags=flags)) as node:
            reader, writer = await connected(mqtt)
            stand_still(node)
            assert await node.publish("p", "t", b"later", 1, False)
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(reader.read(1), 0.5)
            assert node.problem is not None
            node.sessions.renewed(time.monotonic())
            assert b"later" in await asyncio.wait_for(reader.readuntil(b"later"), 10)
            writer.close()

    asyncio.run(asyncio.wait_for(work(), 60))
