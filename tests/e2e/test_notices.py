"""What happens to sessions is said within the node, once each, with the client's reason code."""

from __future__ import annotations

import asyncio
import socket
from typing import Any

from e2e.raw import packet, text
from holdfast.runtime import notices as n
from holdfast.runtime.serve import running
from holdfast.settings import load


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def test_subscribed_resumed_acked_with_its_reason_and_gone() -> None:
    async def work() -> list[Any]:
        port, heard = free_port(), []
        flags = ["store=memory:", f"mqtt.listen=127.0.0.1:{port}", "http.listen="]
        async with asyncio.timeout(20), running(load(flags=flags)) as node:
            for kind in (n.Subscribed, n.Resumed, n.Acked, n.Gone):
                node.notices.subscribe(kind, heard.append)
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(packet(0x10, text("MQTT") + b"\x05\x02\0\x3c\0" + text("truck")))
            writer.write(packet(0x82, b"\0\1\0" + text("a/#") + b"\1"))
            writer.write(packet(0x32, text("a/b") + b"\0\7\0" + b"x"))
            seen = b""
            while b"a/b" not in seen:
                seen += await reader.read(1000)
            writer.write(packet(0x40, b"\0\1\x83\0"))
            writer.write(packet(0xE0, b""))
            while await reader.read(1000):
                pass
            writer.close()
            while not any(isinstance(each, n.Gone) for each in heard):  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        return heard

    resumed, subscribed, acked, gone = asyncio.run(work())
    assert resumed == n.Resumed("truck", False)
    assert subscribed == n.Subscribed("truck", "a/#", 1)
    assert (acked.client_id, acked.offset, acked.reason) == ("truck", 0, 0x83)
    assert gone == n.Gone("truck", True)
