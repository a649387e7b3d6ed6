"""Wills that outlive the node: published once after it was killed, unless their client is back in time."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from e2e.clients import V5, Client, Dial, Will
from e2e.conftest import Clients, durable
from node import Node
from processes import wait_for


@pytest.fixture
def lonely(tmp_path: Path) -> Iterator[Node]:
    with Node(tmp_path / "node", settings={"sessions.grace_secs": 1}) as node:
        yield node


@pytest.fixture
def dial(lonely: Node, clients: Clients) -> Any:
    def connect(client_id: str, **how: Any) -> Client:
        return clients.make("paho", Dial(port=lonely.mqtt_port, client_id=client_id, version=V5, **how)).connect()

    return connect


def late(topic: str, seconds: int) -> Will:
    return Will(topic, b"late", properties={"WillDelayInterval": seconds})


def restart(node: Node) -> None:
    node.kill()
    node.start()


def until_end(watcher: Client, topic: str) -> list[str]:
    """Everything before the watcher's own last word: one publisher's messages come in order, wills of others before."""
    watcher.publish(topic, b"end")
    return [message.text for message in watcher.until(b"end")]


def test_a_will_is_published_once_however_often_the_node_is_killed(lonely: Node, dial: Any) -> None:
    dial("watch", **durable(V5)).subscribe("t", 1)
    dial("vehicle", will=Will("t", b"lost", retain=True))
    restart(lonely)
    watcher = dial("watch", **durable(V5))
    assert watcher.next().text == "lost"
    wait_for(lambda: lonely.get("/api/v1/messages", filter="t")["messages"], what="the will in the log")
    restart(lonely)
    dial("other").subscribe("t", 1)  # anything: the node is there again
    restart(lonely)
    texts = [message["payload"] for message in lonely.get("/api/v1/messages", filter="t")["messages"]]
    assert len(texts) == 1, texts


def test_a_will_that_waits_goes_on_waiting_after_a_kill(lonely: Node, dial: Any) -> None:
    dial("watch", **durable(V5)).subscribe("t", 1)
    began = time.monotonic()
    dial("vehicle", will=late("t", 3), **durable(V5)).drop()
    gone = dial("vehicle-2", will=late("u", 600), **durable(V5))
    wait_for(lambda: not lonely.get("/api/v1/sessions/vehicle")["connected"], what="the node to notice")
    restart(lonely)
    watcher = dial("watch", **durable(V5))
    assert watcher.next().text == "late"
    assert time.monotonic() - began > 2.8
    assert lonely.get("/api/v1/messages", filter="u")["messages"] == []
    gone.close()


def test_a_client_that_is_back_after_a_kill_has_no_will_published(lonely: Node, dial: Any) -> None:
    dial("watch", **durable(V5)).subscribe("t", 1)
    dial("vehicle", will=late("t", 2), **durable(V5))
    restart(lonely)
    back = time.monotonic()
    dial("vehicle", **durable(V5))
    watcher = dial("watch", **durable(V5))
    wait_for(lambda: time.monotonic() - back > 2.6, what="the delay's end")
    assert until_end(watcher, "t") == []
