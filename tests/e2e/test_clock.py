"""A node whose wall clock is wrong for a while: messages neither expire early nor carry a wrong time."""

from __future__ import annotations

import struct
import time
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path

import pytest

from e2e.raw import Raw, text
from node import Node
from settable_clock import SettableClock

HOUR = 3600.0
SESSION = b"\x11" + struct.pack("!I", 7200)
EXPIRY = b"\x02" + struct.pack("!I", 600)


@pytest.fixture
def clock(tmp_path: Path) -> SettableClock:
    return SettableClock(tmp_path / "clock")


@pytest.fixture
def node(tmp_path: Path, clock: SettableClock) -> Iterator[Node]:
    with Node(tmp_path, environment=clock.environment) as node:
        yield node


def publish(node: Node, payload: bytes) -> None:
    with Raw(node.mqtt_port, 5) as one:
        one.connect("publisher")
        one.send(0x32, text("t") + b"\0\1" + bytes([len(EXPIRY)]) + EXPIRY + payload)
        assert one.read()[0] == 0x40


def got(node: Node) -> bytes:
    """What the subscriber is given first; it is acknowledged."""
    with Raw(node.mqtt_port, 5) as one:
        assert one.connect("subscriber", clean=False, properties=SESSION)[0], "its session is there"
        _, packet_id, payload = one.read_publish()
        one.send(0x40, struct.pack("!H", packet_id))
        one.send(0xE0)
        one.ended()
        return payload


@pytest.mark.parametrize("ahead", [HOUR, -HOUR])
def test_nothing_expires_because_of_it_and_nobodys_session_ends(node: Node, clock: SettableClock, ahead: float) -> None:
    with Raw(node.mqtt_port, 5) as one:
        one.connect("subscriber", properties=SESSION)
        one.subscribe("t")
        one.send(0xE0)
        one.ended()
    publish(node, b"before")
    clock.set(ahead)
    assert got(node) == b"before", "while it is wrong"
    publish(node, b"meanwhile")
    clock.set(0.0)
    assert got(node) == b"meanwhile", "and when it is right again"
    for message in node.get("/api/v1/messages", filter="#")["messages"]:
        assert abs(datetime.fromisoformat(message["time"]).timestamp() - time.time()) < 60
