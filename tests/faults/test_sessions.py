"""Sessions of a whole node whose store fails, whose clients vanish, or whose end comes at a bad moment."""

from __future__ import annotations

import resource
import socket
import sqlite3
import struct
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest

from e2e.raw import Raw, packet, text
from holdfast.sessions.table import SessionRow
from holdfast.store import open_store
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


def stored(node: Node) -> dict[str, SessionRow]:
    """The sessions in the store, by client."""
    with closing(open_store(f"sqlite:///{node.folder}/data/holdfast.db")) as store:
        return {row.client_id: row for row in store.sessions().page("", 100)}


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
                wait_for(lambda: "could not be written" in node.logs() or faults(node), what="a failure")
    wait_for(lambda: not stored(node), what="their end")
    node.kill()
    node.start()
    assert not any(is_present(node, name) for name in names)
    assert not faults(node)


@contextmanager
def locked(node: Node) -> Iterator[None]:
    """Somebody else writes to the store, and takes long."""
    other = sqlite3.connect(node.folder / "data" / "holdfast.db", isolation_level=None)
    other.execute("begin immediate")
    try:
        yield
    finally:
        other.execute("rollback")
        other.close()


def connect_and_vanish(node: Node, name: str, will: str, properties: bytes = EXPIRY) -> None:
    """A CONNECT, and a reset before the answer; returns when the node has seen both."""
    seen = node.logs().count("the connection was lost")
    with socket.create_connection(node.mqtt) as sock:
        body = text("MQTT") + b"\x05\x04\x00\x00" + bytes([len(properties)]) + properties + text(name)
        sock.sendall(packet(0x10, body + b"\x00" + text(will) + text("boo")))
        wait_for(lambda: unread(node, sock.getsockname()[1]) == 0, what="the CONNECT")
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    wait_for(lambda: node.logs().count("the connection was lost") > seen, what="the loss")


def unread(node: Node, port: int) -> int | None:
    """How many bytes from this port the node has not read yet; None: it has not taken the connection."""
    for line in Path(f"/proc/{node.pid}/net/tcp").read_text().splitlines()[1:]:
        _, ours, theirs, _, queues, *_ = line.split()
        if int(ours.split(":")[1], 16) == node.mqtt_port and int(theirs.split(":")[1], 16) == port:
            return int(queues.split(":")[1], 16)
    return None


def test_a_client_that_vanishes_before_it_is_welcome_was_lost(node: Node) -> None:
    """What its CONNECT stored has withdrawn its earlier will, so the new one counts: or nobody would ever be told."""
    with client(node, "watch", clean=True) as watcher:
        watcher.subscribe("will/#", 0)
        with locked(node):
            connect_and_vanish(node, "durable", "will/durable")
            connect_and_vanish(node, "fleeting", "will/fleeting", NO_EXPIRY)
        wills = watcher.read()[1] + watcher.read()[1]
        assert b"will/durable" in wills and b"will/fleeting" in wills
        assert [is_present(node, name) for name in ("durable", "fleeting")] == [True, False]


def test_a_session_outlives_a_client_that_vanishes_before_it_is_welcome(node: Node) -> None:
    with client(node, "old", clean=True) as raw:
        raw.subscribe("t/#")
        raw.send(0xE0)
        raw.ended()
    with locked(node):
        connect_and_vanish(node, "old", "will/old")
    wait_for(lambda: not stored(node)["old"].owner, what="its end, if its CONNECT was stored at all")
    with client(node, "other", clean=True) as raw:
        raw.publish("t/x", b"meanwhile")
        assert raw.read()[0] == 0x40
    node.kill()
    node.start()
    with Raw(node.mqtt_port, 5) as raw:
        assert raw.connect("old", clean=False, properties=EXPIRY)[0] == 1
        assert raw.read_publish()[2] == b"meanwhile"


def test_a_refused_connect_leaves_no_session(node: Node) -> None:
    with full_disk(node), Raw(node.mqtt_port, 5) as raw:
        raw.sock.settimeout(30)  # it is refused when it has waited for the store for 10 s
        assert raw.connect("new", clean=False, properties=EXPIRY)[:2] == b"\x00\x88"
    assert not is_present(node, "new")


def test_a_subscribe_whose_connection_was_taken_over_changes_nothing(node: Node) -> None:
    """Otherwise the session has a filter that the connection which serves it knows nothing of."""
    with client(node, "c", clean=True) as old, client(node, "p", clean=True) as publisher:
        old.subscribe("first/#")
        with Raw(node.mqtt_port, 5) as new:
            with locked(node):
                publisher.publish("elsewhere", b"x")  # which the SUBSCRIBE waits for
                old.send(0x82, b"\x00\x02\x00" + text("second/#") + b"\x01")
                wait_for(lambda: unread(node, old.sock.getsockname()[1]) == 0, what="the SUBSCRIBE")
                new.send(0x10, text("MQTT") + b"\x05\x00\x00\x00" + bytes([len(EXPIRY)]) + EXPIRY + text("c"))
                assert old.read() == (0xE0, b"\x8e")
            assert new.read()[0] == 0x20
            new.subscribe("third/#")
            filters = [row["filter"] for row in node.get("/api/v1/sessions/c")["subscriptions"]]
            assert filters == ["first/#", "third/#"]


def test_a_node_whose_store_takes_nothing_is_not_ready_until_it_does(node: Node) -> None:
    with client(node, "p", clean=True) as raw:
        with locked(node):
            raw.publish("t", b"x")
            wait_for(lambda: not node.ready(), 30, "a node that says so")
        raw.sock.settimeout(30)
        assert raw.read()[0] == 0x40
        wait_for(node.ready, 30, "a node that is well again")
