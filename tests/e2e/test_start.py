"""Where a new subscription starts: at what comes next, unless it asks for more."""

from __future__ import annotations

import datetime
import time

import pytest

from e2e.clients import V5
from e2e.conftest import Connect, durable
from e2e.raw import Raw, text
from node import Node
from processes import wait_for


def start(position: str) -> dict[str, object]:
    return {"UserProperty": [("holdfast-start", position)]}


@pytest.fixture(params=["durable", "for this connection"])
def session(request: pytest.FixtureRequest) -> dict[str, object]:
    return durable(V5) if request.param == "durable" else {}


def test_latest_by_default(connect: Connect, name: str, session: dict[str, object]) -> None:
    client = connect(name, V5, **session)
    client.publish(name, b"before")
    client.subscribe(name, 1)
    client.publish(name, b"after")
    assert client.next().payload == b"after"


@pytest.mark.parametrize("library", ["paho", "aiomqtt", "mqttjs"])
def test_beginning_on_request(connect: Connect, name: str, library: str, session: dict[str, object]) -> None:
    client = connect(name, V5, library, **session)
    for n in range(30):
        client.publish(f"{name}/{n % 3}", str(n))
    client.subscribe(f"{name}/#", 1, properties=start("beginning"))
    client.publish(f"{name}/0", b"30")
    assert [message.text for message in client.take(31)] == [str(n) for n in range(31)]


def test_an_offset_on_request(connect: Connect, name: str, session: dict[str, object]) -> None:
    client = connect(name, V5, **session)
    for n in range(5):
        client.publish(name, str(n))
    client.subscribe(name, 1, properties=start("offset:0"))
    assert [message.text for message in client.take(5)] == [str(n) for n in range(5)]


def test_latest_on_request(connect: Connect, name: str) -> None:
    client = connect(name)
    client.publish(name, b"before")
    client.subscribe(name, 1, properties=start("latest"))
    client.publish(name, b"after")
    assert client.next().payload == b"after"


def test_a_time_on_request(connect: Connect, name: str, session: dict[str, object]) -> None:
    client = connect(name, V5, **session)
    client.publish(name, b"before")
    published = time.time()
    wait_for(lambda: time.time() > published + 0.02, what="a moment")
    moment = datetime.datetime.now(datetime.UTC).isoformat().replace("+00:00", "Z")
    client.publish(name, b"at or after")
    client.subscribe(name, 1, properties=start(moment))
    assert client.next().payload == b"at or after"


def test_beginning_is_where_it_starts_not_where_it_resumes(connect: Connect, name: str) -> None:
    """Asking again for the beginning when the session already has a place in the log does not repeat anything."""
    client = connect(name, V5, **durable(V5))
    for n in range(3):
        client.publish(name, str(n))
    client.subscribe(name, 1, properties=start("beginning"))
    assert [message.text for message in client.take(3)] == ["0", "1", "2"]
    client.disconnect()
    back = connect(name, V5, **durable(V5))
    back.publish(name, b"3")
    assert back.next().text == "3"


def test_a_position_that_is_none_is_refused(node: Node, name: str) -> None:
    """With a code in the SUBACK, or with one for the whole connection; never by starting somewhere else."""
    with Raw(node.mqtt_port, V5) as raw:
        raw.connect(name)
        wish = b"\x26" + text("holdfast-start") + text("yesterday")
        raw.send(0x82, b"\x00\x01" + bytes([len(wish)]) + wish + text(name) + b"\x01")
        first, body = raw.read()
        assert (first == 0x90 and body[-1] >= 0x80) or (first == 0xE0 and body[0] >= 0x80)
