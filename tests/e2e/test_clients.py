"""Every client library, in both versions, on both stores: the things everyone does with MQTT."""

from __future__ import annotations

from pathlib import Path

import pytest

from e2e.clients import V5, V311, Will
from e2e.conftest import Connect, durable
from e2e.raw import Raw
from node import Node


@pytest.mark.parametrize("qos", [0, 1, 2])
def test_every_qos_both_ways(connect: Connect, name: str, library: str, version: int, qos: int) -> None:
    subscriber = connect(f"{name}-sub", version, library)
    publisher = connect(f"{name}-pub", version, library)
    assert subscriber.subscribe(f"{name}/#", qos) == qos
    sent = [f"{n}" for n in range(20)]
    for text in sent:
        publisher.publish(f"{name}/a", text, qos)
    got = subscriber.take(len(sent))
    assert [message.text for message in got] == sent
    assert {(message.topic, message.qos, message.retain) for message in got} == {(f"{name}/a", qos, False)}


@pytest.mark.parametrize(("published", "granted"), [(2, 1), (1, 2), (1, 0), (0, 2)])
def test_a_delivery_has_the_smaller_of_both_qos(
    connect: Connect, name: str, version: int, published: int, granted: int
):
    subscriber, publisher = connect(f"{name}-sub", version), connect(f"{name}-pub", version)
    subscriber.subscribe(name, granted)
    publisher.publish(name, b"x", published)
    assert subscriber.next().qos == min(published, granted)


def test_any_bytes_and_sizes_arrive_as_sent(connect: Connect, name: str, library: str, version: int) -> None:
    client = connect(name, version, library)
    client.subscribe(f"{name}/ü/+", 1)
    payloads = [b"", bytes(range(256)), b"x" * 127, b"y" * 128, b"z" * 16384, b"w" * 300_000]
    for payload in payloads:
        client.publish(f"{name}/ü/车", payload)
    got = client.take(len(payloads))
    assert [message.payload for message in got] == payloads
    assert {message.topic for message in got} == {f"{name}/ü/车"}


def test_wildcards_match_what_they_should(connect: Connect, name: str, library: str, version: int) -> None:
    publisher = connect(f"{name}-pub", version, library)
    wanted = {
        f"{name}/+/speed": ["1/speed", "2/speed"],
        f"{name}/1/#": ["1/speed", "1/fuel/left", "1"],
        f"{name}/+": ["1"],
        f"{name}/2/speed": ["2/speed"],
    }
    subscribers = {each: connect(f"{name}-{n}", version, library) for n, each in enumerate(wanted)}
    for topic_filter, subscriber in subscribers.items():
        subscriber.subscribe(topic_filter)
    for topic in ("1/speed", "2/speed", "1/fuel/left", "1"):
        publisher.publish(f"{name}/{topic}", topic)
    for topic_filter, topics in wanted.items():
        assert sorted(message.text for message in subscribers[topic_filter].take(len(topics))) == sorted(topics)


def test_after_unsubscribe_nothing_more_comes(connect: Connect, name: str, library: str, version: int) -> None:
    client = connect(name, version, library)
    client.subscribe(f"{name}/a")
    client.subscribe(f"{name}/b")
    client.publish(f"{name}/a", b"1")
    assert client.next().payload == b"1"
    client.unsubscribe(f"{name}/a")
    client.publish(f"{name}/a", b"2")
    client.publish(f"{name}/b", b"end")
    assert client.until(b"end") == []


def test_retained_is_given_to_new_subscribers_and_can_be_cleared(
    connect: Connect, name: str, library: str, version: int
) -> None:
    publisher = connect(f"{name}-pub", version, library)
    publisher.publish(f"{name}/a", b"old", retain=True)
    publisher.publish(f"{name}/a", b"kept", retain=True)
    publisher.publish(f"{name}/b", b"also", qos=2, retain=True)
    first = connect(f"{name}-1", version, library)
    first.subscribe(f"{name}/+", 1)
    got = {message.topic: message for message in first.take(2)}
    assert {topic: (message.payload, message.qos, message.retain) for topic, message in got.items()} == {
        f"{name}/a": (b"kept", 1, True),
        f"{name}/b": (b"also", 1, True),
    }
    publisher.publish(f"{name}/a", b"live", retain=True)
    assert (first.next().retain, publisher.publish(f"{name}/a", b"", retain=True)) == (False, 0)
    second = connect(f"{name}-2", version, library)
    second.subscribe(f"{name}/+", 1)
    assert [message.topic for message in second.take(1)] == [f"{name}/b"]
    publisher.publish(f"{name}/b", b"end")
    assert second.until(b"end") == []


def test_will_is_published_when_a_client_vanishes(connect: Connect, name: str, library: str, version: int) -> None:
    watcher = connect(f"{name}-watch", version, library)
    watcher.subscribe(f"{name}/will", 2)
    will = Will(f"{name}/will", b"lost", qos=2)
    connect(f"{name}-1", version, library, will=will).drop()
    got = watcher.next()
    assert (got.payload, got.qos) == (b"lost", 2)


def test_no_will_after_a_goodbye(connect: Connect, name: str, library: str, version: int) -> None:
    watcher = connect(f"{name}-watch", version, library)
    watcher.subscribe(f"{name}/will", 1)
    connect(f"{name}-1", version, library, will=Will(f"{name}/will", b"lost")).disconnect()
    watcher.publish(f"{name}/will", b"end")
    assert watcher.until(b"end") == []


def test_a_durable_session_gets_what_it_missed(connect: Connect, name: str, library: str, version: int) -> None:
    first = connect(name, version, library, **durable(version))
    assert first.session_present in (False, None)
    first.subscribe(f"{name}/#", 1)
    first.disconnect()
    publisher = connect(f"{name}-pub", version, library)
    sent = [f"{n}" for n in range(50)]
    for text in sent:
        publisher.publish(f"{name}/x", text)
    again = connect(name, version, library, **durable(version))
    assert again.session_present in (True, None)
    assert [message.text for message in again.take(len(sent))] == sent
    publisher.publish(f"{name}/x", b"end")
    assert again.until(b"end") == []


def test_a_clean_start_forgets(connect: Connect, name: str, library: str, version: int) -> None:
    first = connect(name, version, library, **durable(version))
    first.subscribe(name, 1)
    first.disconnect()
    publisher = connect(f"{name}-pub", version, library)
    publisher.publish(name, b"missed")
    clean = connect(name, version, library)
    assert clean.session_present in (False, None)
    clean.disconnect()
    again = connect(name, version, library, **durable(version))
    assert again.session_present in (False, None)
    again.subscribe(f"{name}/other", 1)
    publisher.publish(name, b"not subscribed")
    publisher.publish(f"{name}/other", b"end")
    assert again.until(b"end") == []


def test_a_session_without_expiry_ends_with_its_connection(
    connect: Connect, name: str, library: str, version: int
) -> None:
    first = connect(name, version, library)
    first.subscribe(name, 1)
    first.drop()
    again = connect(name, version, library, **durable(version))
    assert again.session_present in (False, None)


def test_the_later_of_two_connections_of_one_client_wins(
    connect: Connect, name: str, library: str, version: int
) -> None:
    first = connect(name, version, library, **durable(version))
    first.subscribe(name, 1)
    second = connect(name, version, library, **durable(version))
    reason = first.ended()
    assert reason is None or reason == 0x8E  # session taken over
    assert second.session_present in (True, None)
    second.publish(name, b"here")
    assert second.next().payload == b"here"


def test_messages_keep_a_publishers_order_across_topics(
    connect: Connect, name: str, library: str, version: int
) -> None:
    subscriber, publisher = connect(f"{name}-sub", version, library), connect(f"{name}-pub", version, library)
    subscriber.subscribe(f"{name}/#", 1)
    for n in range(100):
        publisher.publish(f"{name}/{n % 7}", str(n))
    assert [int(message.text) for message in subscriber.take(100)] == list(range(100))


@pytest.mark.parametrize("transport", ["websocket", "tls"])
def test_other_transports_carry_the_same(
    connect: Connect, node: Node, authority: Path, name: str, library: str, version: int, transport: str
) -> None:
    way = (
        {"port": node.ports["mqtt.websocket"], "websocket": True}
        if transport == "websocket"
        else {"port": node.ports["mqtt.tls"], "authority": authority / "cert.pem"}
    )
    client = connect(name, version, library, **way)
    plain = connect(f"{name}-plain", version, library)
    client.subscribe(f"{name}/in", 2)
    plain.subscribe(f"{name}/out", 1)
    payloads = [b"small", b"L" * 200_000, b"end"]
    for payload in payloads:
        plain.publish(f"{name}/in", payload, 2)
        client.publish(f"{name}/out", payload, 1)
    assert [message.payload for message in client.take(3)] == payloads
    assert [message.payload for message in plain.take(3)] == payloads
    client.disconnect()


def test_an_empty_client_id_is_given_one(connect: Connect, name: str, library: str, version: int) -> None:
    one, other = connect("", version, library), connect("", version, library)
    one.subscribe(name)
    other.publish(name, b"hello")
    assert one.next().payload == b"hello"
    if version == V5 and library != "aiomqtt":
        ids = {client.connack["AssignedClientIdentifier"] for client in (one, other)}
        assert len(ids) == 2 and all(ids)


def test_an_empty_client_id_with_a_session_to_keep_is_refused(node: Node) -> None:
    with Raw(node.mqtt_port, V311) as raw:
        assert raw.connect("", clean=False) == b"\x00\x02"  # identifier rejected
        assert raw.ended() == b""
