"""HTTP and MQTT are two doors to one log."""

from __future__ import annotations

import base64
from pathlib import Path

import httpx
import pytest

import holdfast
from e2e.clients import V5, Dial, PahoClient
from e2e.conftest import Connect, durable
from node import Node
from processes import wait_for


@pytest.mark.parametrize("qos", [0, 1, 2])
def test_what_is_published_over_http_reaches_mqtt(
    node: Node, connect: Connect, name: str, library: str, version: int, qos: int
) -> None:
    subscriber = connect(name, version, library)
    subscriber.subscribe(name, 2)
    binary = bytes(range(256))
    node.post("/api/v1/publish", {"topic": name, "payload": "text ü", "qos": qos})
    node.post("/api/v1/publish", {"topic": name, "payload_base64": base64.b64encode(binary).decode(), "qos": qos})
    first, second = subscriber.take(2)
    assert (first.text, first.qos) == ("text ü", qos)
    assert (second.payload, second.qos) == (binary, qos)


def test_what_is_retained_over_http_is_retained(node: Node, connect: Connect, name: str, version: int) -> None:
    node.post("/api/v1/publish", {"topic": name, "payload": "kept", "qos": 1, "retain": True})
    subscriber = connect(name, version)
    subscriber.subscribe(name)
    got = subscriber.next()
    assert (got.text, got.retain) == ("kept", True)
    node.post("/api/v1/publish", {"topic": name, "payload": "", "qos": 1, "retain": True})


def test_a_durable_subscriber_gets_what_http_published_while_it_was_away(
    node: Node, connect: Connect, name: str, version: int
) -> None:
    subscriber = connect(name, version, **durable(version))
    subscriber.subscribe(f"{name}/+", 1)
    subscriber.disconnect()
    for n in range(5):
        node.post("/api/v1/publish", {"topic": f"{name}/x", "payload": str(n), "qos": 1})
    back = connect(name, version, **durable(version))
    assert [message.text for message in back.take(5)] == ["0", "1", "2", "3", "4"]


def test_what_is_published_over_mqtt_is_read_over_http(node: Node, connect: Connect, name: str) -> None:
    client = connect(name)
    for n in range(3):
        client.publish(f"{name}/a", f"m{n}")
    client.publish(f"{name}/b", b"other")
    answer = node.get("/api/v1/messages", filter=f"{name}/a", start="beginning", limit=10)
    found = answer if isinstance(answer, list) else answer["messages"]
    assert [message["payload"] for message in found] == ["m0", "m1", "m2"]
    assert {message["topic"] for message in found} == {f"{name}/a"}
    one = node.get("/api/v1/messages", filter=f"{name}/#", start="beginning", limit=1)
    assert len(one if isinstance(one, list) else one["messages"]) == 1


@pytest.mark.parametrize(
    "body",
    [
        {"payload": "no topic"},
        {"topic": "a/#", "payload": "x"},
        {"topic": "", "payload": "x"},
        {"topic": "a", "payload": "x", "qos": 3},
        {"topic": "a", "payload_base64": "not base64!"},
        {"topic": "$SYS/forged", "payload": "x"},
    ],
)
def test_a_wrong_request_is_refused_with_words(node: Node, body: dict[str, object]) -> None:
    answer = httpx.post(f"{node.http}/api/v1/publish", json=body, timeout=10)
    assert 400 <= answer.status_code < 500
    assert answer.json()


def test_sessions_are_shown_with_subscriptions_and_lag(node: Node, connect: Connect, name: str) -> None:
    subscriber = connect(name, V5, **durable(V5))
    subscriber.subscribe(f"{name}/+", 1)
    subscriber.disconnect()
    connect(f"{name}-pub").publish(f"{name}/x", b"1")
    answer = node.get("/api/v1/sessions")
    sessions = answer if isinstance(answer, list) else answer["sessions"]
    assert name in {session["client_id"] for session in sessions}
    one = node.get(f"/api/v1/sessions/{name}")
    assert one["client_id"] == name
    assert f"{name}/+" in str(one["subscriptions"])
    connect(name).disconnect()
    assert httpx.get(f"{node.http}/api/v1/sessions/{name}", timeout=10).status_code == 404


def test_no_cursor_is_shown_beyond_the_end_of_its_stream(tmp_path: Path, name: str) -> None:
    with Node(tmp_path, settings={"log.shards": 2}) as node:
        with holdfast.open(f"sqlite:///{node.folder}/data/holdfast.db") as log:
            log.seal("messages")
        dial = Dial(port=node.mqtt_port, client_id=name, version=V5, **durable(V5))
        client = PahoClient(dial).connect()
        client.subscribe(f"{name}/+", 1)
        client.disconnect()
        with holdfast.open(f"sqlite:///{node.folder}/data/holdfast.db") as log:
            ends = {str(head.stream): head.next_offset for head in log.heads("messages")}

        def shown() -> dict[str, int]:
            (subscription,) = node.get(f"/api/v1/sessions/{name}")["subscriptions"]
            return {stream: cursor["offset"] for stream, cursor in subscription["cursors"].items()}

        wait_for(lambda: shown().keys() == ends.keys(), what="the node to see the new generation")
        assert shown() == {stream: end - 1 for stream, end in ends.items()}


def test_health_and_metrics_answer(node: Node) -> None:
    for path in ("/healthz", "/readyz", "/metrics"):
        assert httpx.get(node.http + path, timeout=10).status_code == 200, path
