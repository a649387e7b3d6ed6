"""Sessions of a whole node whose store fails, whose clients vanish, or whose end comes at a bad moment."""

from __future__ import annotations

import resource
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from e2e.raw import Raw
from holdfast.keys import SESSIONS
from holdfast.store import open_metadata
from node import Node
from processes import wait_for

EXPIRY = b"\x11" + struct.pack("!I", 300)
NO_EXPIRY = b"\x11" + struct.pack("!I", 0)


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    with Node(tmp_path, settings={"cursors.subscription_progress_flush_secs": 0.2}) as node:
        yield node


@contextmanager
def full_disk(node: Node) -> Iterator[None]:
    """No file of the node may grow."""
    resource.prlimit(node.pid, resource.RLIMIT_FSIZE, (20_000, resource.RLIM_INFINITY))
    try:
        yield
    finally:
        resource.prlimit(node.pid, resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))


@contextmanager
def client(node: Node, name: str, *, clean: bool = False, properties: bytes = EXPIRY) -> Iterator[Raw]:
    with Raw(node.mqtt_port, 5) as raw:
        assert raw.connect(name, clean=clean, properties=properties)[1] == 0
        yield raw


def is_present(node: Node, name: str) -> bool:
    with Raw(node.mqtt_port, 5) as raw:
        return bool(raw.connect(name, clean=False, properties=EXPIRY)[0])


def end(raw: Raw) -> None:
    """DISCONNECT, and the session with it."""
    raw.send(0xE0, bytes((0, len(NO_EXPIRY))) + NO_EXPIRY)
    assert raw.ended() == b""


def stored(node: Node) -> set[str]:
    """Whose sessions are in the store."""
    with open_metadata(f"sqlite:///{node.folder}/data/holdfast.db") as metadata:
        return {key.removeprefix(SESSIONS) for key in metadata.list(SESSIONS)}


def faults(node: Node) -> list[str]:
    return [line for line in node.logs().splitlines() if "Traceback" in line]


def test_a_session_that_its_client_ended_does_not_come_back(node: Node) -> None:
    with client(node, "first", clean=True) as raw:
        raw.subscribe("t/#")
        end(raw)
    with client(node, "second", clean=True) as raw:
        raw.subscribe("t/#")
        raw.send(0xE0)
        raw.ended()
    with client(node, "second") as raw:
        end(raw)
    with client(node, "last", clean=True):  # stored after everything before it
        node.kill()
    node.start()
    assert is_present(node, "last")
    assert not is_present(node, "first") and not is_present(node, "second")


def test_a_session_that_ends_while_the_store_is_full_is_deleted_later(node: Node) -> None:
    names = [f"c{i}" for i in range(3)]
    for name in names:
        with client(node, name, clean=True) as raw:
            raw.subscribe("t/#")
            with full_disk(node):
                end(raw)
                wait_for(lambda name=name: f"session of {name}" in node.logs() or faults(node), what="a failure")
    wait_for(lambda: not stored(node), what="their end")
    node.kill()
    node.start()
    assert not any(is_present(node, name) for name in names)
    assert not faults(node)
