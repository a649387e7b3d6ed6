"""Limits an operator sets: connections a second, connections, sessions."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from pathlib import Path

from e2e.raw import Raw
from hostile.attack import connect_packet, everything, own_faults
from node import Node


@contextlib.contextmanager
def limited(folder: Path, **limits: object) -> Iterator[Node]:
    settings = {f"limits.{key}": value for key, value in limits.items()}
    with Node(folder, store="memory:", settings={"log_level": "warning", **settings}) as node:
        yield node
        assert not own_faults(node.logs())


def connect(node: Node, client_id: str, version: int = 5, **how: object) -> tuple[Raw, int]:
    """A connection, and what its CONNACK says."""
    raw = Raw(node.mqtt_port, version)
    return raw, raw.connect(client_id, **how)[1]  # type: ignore[arg-type]


def test_connections_beyond_the_rate_wait_for_their_turn(tmp_path: Path) -> None:
    with limited(tmp_path, connections_per_sec=40) as node, contextlib.ExitStack() as stack:
        began = time.monotonic()
        raws = [stack.enter_context(Raw(node.mqtt_port, 5)) for _ in range(40)]
        for n, raw in enumerate(raws):
            raw.sock.sendall(connect_packet(f"c{n}"))
        assert [raw.read()[1][1] for raw in raws] == [0] * 40
        assert 0.8 < time.monotonic() - began < 4


def test_more_sessions_than_allowed_are_refused(tmp_path: Path, version: int) -> None:
    with limited(tmp_path, sessions_max=3) as node, contextlib.ExitStack() as stack:
        keep = {"clean": False, "properties": b"\x11\x00\x00\x01\x00" if version == 5 else b""}
        for n in range(3):
            raw, code = connect(node, f"c{n}", version, **keep)
            assert code == 0
            raw.sock.close()
        raw, code = connect(node, "one-more", version)
        stack.enter_context(raw)
        assert code == (0x97 if version == 5 else 3)
        assert everything(raw.sock) == b""
        raw, code = connect(node, "c1", version, **keep)  # those that are known are welcome
        stack.enter_context(raw)
        assert code == 0
