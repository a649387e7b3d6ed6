"""Sessions that outlive connections, restarts and kill -9: what was not acknowledged comes again, the rest does not."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from e2e.clients import V5, V311, Dial, Message, PahoClient
from e2e.conftest import FLUSH_SECONDS, Clients, durable
from e2e.raw import Raw
from node import Node
from processes import wait_for

ENDINGS = ["reconnect", "clean restart", "kill -9"]


@pytest.fixture(scope="module")
def lasting(store: str | None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Node]:
    settings = {"cursors.subscription_progress_flush_secs": FLUSH_SECONDS}
    with Node(tmp_path_factory.mktemp("mortal"), store=store, node_id="mortal", settings=settings) as running:
        yield running


@pytest.fixture
def mortal(lasting: Node) -> Node:
    """A node that tests may stop and kill; the next test finds it running."""
    if not lasting.running:
        lasting.start()
    return lasting


@pytest.fixture
def connect(clients: Clients, mortal: Node) -> Callable[..., Any]:
    def connect(client_id: str, version: int, library: str = "paho", **dial: Any) -> Any:
        return clients.make(
            library, Dial(port=mortal.mqtt_port, client_id=client_id, version=version, **dial)
        ).connect()

    return connect


def end(node: Node, client: PahoClient | None, ending: str) -> None:
    """End the connection in one of three ways; afterwards a node is running."""
    match ending:
        case "reconnect":
            if client is not None:
                client.drop()
        case "clean restart":
            assert node.stop() == 0
            node.start()
        case "kill -9":
            settled()
            node.kill()
            node.start()


def settled() -> None:
    """Let a flush interval pass, and time for the flush itself: from now on what was acknowledged is stored."""
    begin = time.monotonic()
    wait_for(lambda: time.monotonic() - begin > FLUSH_SECONDS + 0.3, what="a flush")


@pytest.mark.parametrize("ending", ENDINGS)
def test_produce_n_ack_k_and_resume_at_k_plus_1(
    mortal: Node, connect: Callable[..., Any], name: str, version: int, ending: str
) -> None:
    count, acked = 20, 8
    subscriber = connect(name, version, manual_ack=True, **durable(version))
    subscriber.subscribe(f"{name}/#", 1)
    publisher = connect(f"{name}-pub", version)
    for n in range(count):
        publisher.publish(f"{name}/{n % 3}", str(n))
    before = subscriber.take(count)
    assert [message.text for message in before] == [str(n) for n in range(count)]
    for message in before[:acked]:
        subscriber.ack(message)
    subscriber.subscribe(f"{name}/barrier", 1)  # answered after the acknowledgements before it were read
    end(mortal, subscriber, ending)

    again = connect(name, version, **durable(version))
    assert again.session_present is True
    publisher = connect(f"{name}-pub", version)
    publisher.publish(f"{name}/0", b"end")
    after = again.until(b"end")
    got = [(message.text, message.mid, message.dup) for message in after]
    assert [message.text for message in after] == [str(n) for n in range(acked, count)], f"ends with {got[-3:]}"
    assert all(message.dup for message in after), "redelivered without DUP"
    if ending != "kill -9":
        assert [message.mid for message in after] == [message.mid for message in before[acked:]]


@pytest.mark.parametrize("ending", ENDINGS)
def test_acknowledged_out_of_order_is_remembered_exactly(
    mortal: Node, connect: Callable[..., Any], name: str, ending: str
) -> None:
    subscriber = connect(name, V5, manual_ack=True, **durable(V5))
    subscriber.subscribe(name, 1)
    publisher = connect(f"{name}-pub", V5)
    for n in range(12):
        publisher.publish(name, str(n))
    odd = [message for message in subscriber.take(12) if int(message.text) % 2]
    for message in reversed(odd):
        subscriber.ack(message)
    subscriber.subscribe(f"{name}/barrier", 1)
    end(mortal, subscriber, ending)
    again = connect(name, V5, **durable(V5))
    connect(f"{name}-pub", V5).publish(name, b"end")
    assert [message.text for message in again.until(b"end")] == [str(n) for n in range(0, 12, 2)]


@pytest.mark.parametrize("ending", ENDINGS)
def test_what_was_published_while_away_is_there(
    mortal: Node, connect: Callable[..., Any], name: str, version: int, ending: str
) -> None:
    subscriber = connect(name, version, **durable(version))
    subscriber.subscribe(name, 2)
    subscriber.disconnect()
    publisher = connect(f"{name}-pub", version)
    for n in range(30):
        publisher.publish(name, str(n), 1 + n % 2)
    end(mortal, publisher, ending)
    back = connect(name, version, **durable(version))
    got = back.take(30)  # a client may hand out a QoS 2 message only when its handshake is through
    found = [(int(message.text), message.qos, message.dup) for message in got]
    assert sorted(found) == [(n, 1 + n % 2, False) for n in range(30)]
    for qos in (1, 2):
        of_this = [number for number, each, _ in found if each == qos]
        assert of_this == sorted(of_this)


@pytest.mark.parametrize("ending", ENDINGS[1:])
def test_subscription_options_outlive_the_node(
    mortal: Node, connect: Callable[..., Any], name: str, ending: str
) -> None:
    subscriber = connect(name, V5, **durable(V5))
    options: dict[str, Any] = {"no_local": True, "retain_as_published": True}
    subscriber.subscribe(f"{name}/a", 1, properties={"SubscriptionIdentifier": 9}, **options)
    subscriber.subscribe(f"{name}/b", 0)
    subscriber.disconnect()
    end(mortal, None, ending)
    again = connect(name, V5, **durable(V5))
    assert again.session_present is True
    again.publish(f"{name}/a", b"mine")
    other = connect(f"{name}-other", V5)
    other.publish(f"{name}/a", b"theirs", retain=True)
    other.publish(f"{name}/b", b"end")
    (theirs,) = again.until(b"end")
    assert (theirs.payload, theirs.retain, list(theirs.properties["SubscriptionIdentifier"])) == (b"theirs", True, [9])
    other.publish(f"{name}/a", b"", retain=True)


@pytest.mark.parametrize("ending", ENDINGS[1:])
def test_retained_messages_outlive_the_node(
    mortal: Node, connect: Callable[..., Any], name: str, version: int, ending: str
) -> None:
    publisher = connect(f"{name}-pub", version)
    publisher.publish(f"{name}/kept", b"1", retain=True)
    publisher.publish(f"{name}/kept", b"2", retain=True)
    publisher.publish(f"{name}/cleared", b"3", retain=True)
    publisher.publish(f"{name}/cleared", b"", retain=True)
    end(mortal, None, ending)
    client = connect(name, version)
    client.subscribe(f"{name}/#", 1)
    client.publish(f"{name}/end", b"end")
    found = [(message.topic, message.payload, message.retain) for message in client.until(b"end")]
    assert found == [(f"{name}/kept", b"2", True)]


@pytest.mark.parametrize("ending", ENDINGS[1:])
def test_a_session_expires_though_the_node_was_down(
    mortal: Node, connect: Callable[..., Any], name: str, ending: str
) -> None:
    short = connect(f"{name}-short", V5, **durable(V5, 1))
    long = connect(f"{name}-long", V5, **durable(V5, 3600))
    for client in (short, long):
        client.subscribe(name)
        client.disconnect()
    begin = time.monotonic()
    settled()
    mortal.kill() if ending == "kill -9" else mortal.stop()
    wait_for(lambda: time.monotonic() - begin > 2.2, what="the session's end")
    mortal.start()
    assert connect(f"{name}-short", V5, **durable(V5)).session_present is False
    assert connect(f"{name}-long", V5, **durable(V5)).session_present is True


def test_a_stopping_node_says_so(mortal: Node, connect: Callable[..., Any], name: str) -> None:
    client = connect(name, V5)
    assert mortal.stop() == 0
    assert client.ended() == 0x8B  # server shutting down


def test_a_client_that_never_reads_does_not_hold_up_the_stop(mortal: Node, name: str) -> None:
    with Raw(mortal.mqtt_port, V311) as raw:
        raw.connect(name)
        raw.subscribe(f"{name}/#")
        for _ in range(50):
            raw.publish(f"{name}/x", b"x" * 60_000, qos=0)
        assert mortal.stop() == 0


@pytest.mark.parametrize("moment", ["before PUBREC", "after PUBREC"])
def test_a_qos_2_publish_is_taken_once_across_reconnects(
    mortal: Node, connect: Callable[..., Any], name: str, version: int, moment: str
) -> None:
    watcher = connect(f"{name}-watch", version)
    watcher.subscribe(name, 2)
    expiry = b"\x11\x00\x00\x0e\x10" if version == V5 else b""
    with Raw(mortal.mqtt_port, version) as raw:
        raw.connect(name, clean=False, properties=expiry)
        raw.publish(name, b"once", qos=2, pid=5)
        if moment == "after PUBREC":
            assert raw.read()[0] == 0x50
    with Raw(mortal.mqtt_port, version) as raw:
        assert raw.connect(name, clean=False, properties=expiry)[0] == 1
        raw.publish(name, b"once", qos=2, pid=5, dup=True)
        assert raw.read()[0] == 0x50
        raw.send(0x62, b"\x00\x05")
        first, body = raw.read()
        assert (first, body[:2]) == (0x70, b"\x00\x05")
        raw.publish(name, b"end", qos=2, pid=5)
        assert raw.read()[0] == 0x50
        raw.send(0x62, b"\x00\x05")
        assert raw.read()[0] == 0x70
    assert [message.payload for message in watcher.until(b"end")] == [b"once"]


def test_a_qos_2_delivery_is_made_once_across_reconnects(
    mortal: Node, connect: Callable[..., Any], name: str, version: int
) -> None:
    expiry = b"\x11\x00\x00\x0e\x10" if version == V5 else b""
    publisher = connect(f"{name}-pub", version)
    with Raw(mortal.mqtt_port, version) as raw:
        raw.connect(name, clean=False, properties=expiry)
        raw.subscribe(name, 2)
        publisher.publish(name, b"once", 2)
        first, pid, payload = raw.read_publish()
        assert (first, payload) == (0x34, b"once")
    with Raw(mortal.mqtt_port, version) as raw:  # gone before PUBREC: the message again, as a duplicate
        assert raw.connect(name, clean=False, properties=expiry)[0] == 1
        assert raw.read_publish() == (0x3C, pid, b"once")
        raw.send(0x50, pid.to_bytes(2, "big"))
        assert raw.read()[0] == 0x62
    with Raw(mortal.mqtt_port, version) as raw:  # gone before PUBCOMP: only the PUBREL again
        assert raw.connect(name, clean=False, properties=expiry)[0] == 1
        first, body = raw.read()
        assert (first, body[:2]) == (0x62, pid.to_bytes(2, "big"))
        raw.send(0x70, pid.to_bytes(2, "big"))
        publisher.publish(name, b"end", 2)
        assert raw.read_publish()[2] == b"end"


def test_switching_between_catching_up_and_live_loses_and_repeats_nothing(
    mortal: Node, connect: Callable[..., Any], name: str, version: int
) -> None:
    """A subscriber comes and goes while a publisher goes on: it meets the live end at some point each time."""
    publisher = connect(f"{name}-pub", version)
    subscriber = connect(name, version, **durable(version))
    subscriber.subscribe(f"{name}/#", 1)
    got: list[Message] = []
    sent = 0
    for round_ in range(6):
        mids = []
        for _ in range(100):
            mids.append(publisher.send(f"{name}/{sent % 5}", str(sent)))
            sent += 1
        if round_ % 2:
            subscriber = connect(name, version, **durable(version))
            assert subscriber.session_present is True
        for mid in mids:
            publisher.acked(mid)
        if round_ % 2 == 0:
            got += subscriber.take(sent - len(got))
            subscriber.disconnect()
        elif round_ < 5:
            got += subscriber.take(sent - len(got))
    got += subscriber.take(sent - len(got)) if len(got) < sent else []
    assert [int(message.text) for message in got] == list(range(sent))
