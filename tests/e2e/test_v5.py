"""What MQTT 5 adds, seen by a foreign client: each option does what it says, each property arrives."""

from __future__ import annotations

import time

import pytest

from e2e.clients import V5, Client, Message, Will
from e2e.conftest import Connect, durable
from e2e.raw import Raw, text
from node import Node
from processes import wait_for

PROPERTIES = {
    "PayloadFormatIndicator": 1,
    "ContentType": "application/json",
    "ResponseTopic": "answers/here",
    "CorrelationData": b"\x00\xff7",
    "UserProperty": [("a", "1"), ("b", "2"), ("a", "3")],
}

FOR_EVER = b"\x11\xff\xff\xff\xff"
"""The session expiry of a CONNECT."""


@pytest.fixture(params=["paho", "mqttjs"])
def library(request: pytest.FixtureRequest) -> str:
    """Those that show everything; aiomqtt is paho underneath."""
    return request.param


def given(message: Message) -> dict[str, object]:
    return {key: message.properties.get(key) for key in PROPERTIES}


def by_key(pairs: list[tuple[str, str]]) -> list[tuple[str, str]]:
    """MQTT.js groups user properties by key."""
    return sorted(pairs, key=lambda pair: pair[0])


@pytest.mark.parametrize("qos", [0, 1, 2])
def test_message_properties_arrive_as_sent(connect: Connect, name: str, library: str, qos: int) -> None:
    client = connect(name, V5, library)
    client.subscribe(name, qos)
    client.publish(name, b"{}", qos, properties=PROPERTIES)
    got = client.next()
    assert by_key(got.properties["UserProperty"]) == by_key(PROPERTIES["UserProperty"])  # type: ignore[arg-type]
    assert given(got) | {"UserProperty": 0} == PROPERTIES | {"UserProperty": 0}


def test_user_properties_keep_their_order(connect: Connect, name: str) -> None:
    client = connect(name)
    client.subscribe(name)
    client.publish(name, b"{}", properties=PROPERTIES)
    assert client.next().properties["UserProperty"] == PROPERTIES["UserProperty"]


def test_properties_survive_being_retained_and_being_waited_for(connect: Connect, name: str) -> None:
    away = connect(f"{name}-away", V5, **durable(V5))
    away.subscribe(name)
    away.disconnect()
    publisher = connect(f"{name}-pub")
    publisher.publish(name, b"{}", retain=True, properties=PROPERTIES)
    late = connect(f"{name}-late")
    late.subscribe(name)
    assert given(late.next()) == PROPERTIES
    back = connect(f"{name}-away", V5, **durable(V5))
    assert given(back.next()) == PROPERTIES
    publisher.publish(name, b"", retain=True)


def test_version_3_clients_get_the_message_without_properties(connect: Connect, name: str) -> None:
    old, new = connect(f"{name}-old", 4), connect(f"{name}-new", 5)
    old.subscribe(name)
    new.publish(name, b"body", properties=PROPERTIES)
    assert old.next().payload == b"body"


def test_retain_handling_decides_who_gets_retained(connect: Connect, name: str, library: str) -> None:
    publisher = connect(f"{name}-pub", V5, library)
    publisher.publish(name, b"kept", retain=True)
    client = connect(f"{name}-sub", V5, library)

    def resubscribe(handling: int) -> list[bytes]:
        client.subscribe(name, 1, retain_handling=handling)
        publisher.publish(name, b"end")
        return [message.payload for message in client.until(b"end")]

    assert resubscribe(2) == []
    client.unsubscribe(name)
    assert resubscribe(1) == [b"kept"]
    assert resubscribe(1) == []
    assert resubscribe(0) == [b"kept"]
    publisher.publish(name, b"", retain=True)


def test_retain_as_published_keeps_the_flag(connect: Connect, name: str, library: str) -> None:
    publisher = connect(f"{name}-pub", V5, library)
    keeping, plain = connect(f"{name}-keep", V5, library), connect(f"{name}-plain", V5, library)
    keeping.subscribe(name, 1, retain_as_published=True)
    plain.subscribe(name, 1)
    publisher.publish(name, b"1", retain=True)
    publisher.publish(name, b"2", retain=False)
    assert [message.retain for message in keeping.take(2)] == [True, False]
    assert [message.retain for message in plain.take(2)] == [False, False]
    publisher.publish(name, b"", retain=True)


def test_no_local_spares_the_publisher_its_own(connect: Connect, name: str, library: str) -> None:
    one, other = connect(f"{name}-1", V5, library), connect(f"{name}-2", V5, library)
    one.subscribe(name, 1, no_local=True)
    other.subscribe(name, 1)
    one.publish(name, b"mine")
    other.publish(name, b"end")
    assert one.until(b"end") == []
    assert [message.payload for message in other.until(b"end")] == [b"mine"]


def test_subscription_identifiers_say_which_matched(connect: Connect, name: str, library: str) -> None:
    client = connect(name, V5, library)
    client.subscribe(f"{name}/+", 1, properties={"SubscriptionIdentifier": 7})
    client.publish(f"{name}/a", b"one")
    assert list(client.next().properties["SubscriptionIdentifier"]) == [7]
    client.subscribe(f"{name}/b/#", 1, properties={"SubscriptionIdentifier": 268_435_455})
    client.publish(f"{name}/b/c", b"other")
    assert list(client.next().properties["SubscriptionIdentifier"]) == [268_435_455]
    client.publish(f"{name}/b", b"both")
    found = _identifiers_until(client, {7, 268_435_455})
    assert sorted(found) == [7, 268_435_455]


def _identifiers_until(client: Client, wanted: set[int]) -> list[int]:
    """Overlapping subscriptions: one delivery that names both, or one each."""
    found: list[int] = []
    while set(found) != wanted:
        found += client.next().properties["SubscriptionIdentifier"]
    return found


def test_the_remaining_time_of_a_message_is_passed_on(connect: Connect, name: str) -> None:
    away = connect(f"{name}-away", V5, **durable(V5))
    away.subscribe(name)
    away.disconnect()
    publisher = connect(f"{name}-pub")
    publisher.publish(name, b"short", properties={"MessageExpiryInterval": 1})
    publisher.publish(name, b"long", properties={"MessageExpiryInterval": 100})
    publisher.publish(name, b"for ever")
    begin = time.monotonic()
    late = connect(f"{name}-late")
    late.subscribe(f"{name}/now")
    publisher.publish(f"{name}/now", b"fresh", properties={"MessageExpiryInterval": 100})
    assert late.next().properties["MessageExpiryInterval"] in range(90, 101)
    wait_for(lambda: time.monotonic() - begin > 1.6, what="the short one's end")
    back = connect(f"{name}-away", V5, **durable(V5))
    long, endless = back.take(2)
    assert (long.payload, endless.payload) == (b"long", b"for ever")
    assert 80 <= long.properties["MessageExpiryInterval"] <= 99
    assert "MessageExpiryInterval" not in endless.properties


def test_expired_retained_messages_are_gone(connect: Connect, name: str) -> None:
    publisher = connect(f"{name}-pub")
    publisher.publish(f"{name}/a", b"short", retain=True, properties={"MessageExpiryInterval": 1})
    begin = time.monotonic()
    wait_for(lambda: time.monotonic() - begin > 1.6, what="its end")
    late = connect(f"{name}-late")
    late.subscribe(f"{name}/#")
    publisher.publish(f"{name}/b", b"end")
    assert late.until(b"end") == []


def test_receive_maximum_bounds_what_is_unacknowledged(connect: Connect, name: str) -> None:
    subscriber = connect(f"{name}-sub", V5, manual_ack=True, properties={"ReceiveMaximum": 3})
    subscriber.subscribe(name, 1)
    publisher = connect(f"{name}-pub")
    for n in range(10):
        publisher.publish(name, str(n))
    window = subscriber.take(3)
    for n in range(3, 10):
        subscriber.subscribe(f"{name}/barrier", 1)  # its answer comes after whatever else was on its way
        assert subscriber.messages.empty(), "more than the receive maximum"
        subscriber.ack(window.pop(0))
        window.append(subscriber.next())
        assert window[-1].text == str(n)


def in_flight(node: Node, name: str, publisher: Client, payloads: list[bytes], qos: int) -> None:
    """The session of a client that is gone, and has not answered these."""
    with Raw(node.mqtt_port, V5) as raw:
        raw.connect(name, properties=FOR_EVER)
        raw.subscribe(name, qos)
        for payload in payloads:
            publisher.publish(name, payload, qos)
        for _ in payloads:
            raw.read_publish()


def test_a_receive_maximum_that_is_smaller_on_return_bounds_what_comes_again(
    node: Node, connect: Connect, name: str
) -> None:
    publisher = connect(f"{name}-pub")
    in_flight(node, name, publisher, [b"0", b"1", b"2", b"3", b"4"], 1)
    publisher.publish(name, b"5", 1)
    with Raw(node.mqtt_port, V5) as raw:
        raw.connect(name, clean=False, properties=FOR_EVER + b"\x21\0\x02")
        (first, pid, payload), second = raw.read_publish(), raw.read_publish()
        found = [(first, payload), second[::2]]
        waiting = [pid, second[1]]
        for _ in range(4):
            raw.subscribe(f"{name}/barrier")  # its answer comes after whatever else was on its way
            raw.send(0x40, waiting.pop(0).to_bytes(2, "big"))
            first, pid, payload = raw.read_publish()
            found.append((first, payload))
            waiting.append(pid)
    assert found == [(0x3A, b"%d" % n) for n in range(5)] + [(0x32, b"5")]


@pytest.mark.parametrize("qos", [1, 2])
def test_what_is_too_large_for_a_client_on_its_return_does_not_hold_up_the_rest(
    node: Node, connect: Connect, name: str, qos: int
) -> None:
    publisher = connect(f"{name}-pub")
    in_flight(node, name, publisher, [b"x" * 1000], qos)
    publisher.publish(name, b"next", qos)
    with Raw(node.mqtt_port, V5) as raw:
        raw.connect(name, clean=False, properties=FOR_EVER + b"\x21\0\x01" + b"\x27\0\0\x01\xf4")
        if qos == 2:
            first, pid = raw.read()
            assert first == 0x62, "the client may have half of it"
            raw.send(0x70, pid)
        assert raw.read_publish()[2] == b"next"


def test_the_servers_receive_maximum_lets_a_client_through_that_keeps_it(connect: Connect, name: str) -> None:
    client = connect(name)
    client.subscribe(f"{name}/#", 2)
    mids = [client.send(f"{name}/a", str(n), 2) for n in range(200)]  # paho heeds what CONNACK said
    assert {client.acked(mid) for mid in mids} == {0}
    assert [message.text for message in client.take(200)] == [str(n) for n in range(200)]


def test_packets_over_a_clients_maximum_are_not_sent_to_it(connect: Connect, name: str) -> None:
    small = connect(f"{name}-small", V5, properties={"MaximumPacketSize": 200})
    large = connect(f"{name}-large", V5)
    for each in (small, large):
        each.subscribe(name, 1)
    large.publish(name, b"x" * 1000)
    large.publish(name, b"end")
    assert small.until(b"end") == []
    assert [len(message.payload) for message in large.until(b"end")] == [1000]


def test_topic_aliases_of_a_client_are_understood(connect: Connect, name: str) -> None:
    subscriber = connect(f"{name}-sub")
    subscriber.subscribe(f"{name}/#", 1)
    publisher = connect(f"{name}-pub")
    assert publisher.connack.get("TopicAliasMaximum", 0) > 0
    publisher.publish(f"{name}/long/topic", b"1", properties={"TopicAlias": 1})
    publisher.publish("", b"2", properties={"TopicAlias": 1})
    publisher.publish(f"{name}/other", b"3", properties={"TopicAlias": 1})
    publisher.publish("", b"4", properties={"TopicAlias": 1})
    got = [(message.text, message.topic.removeprefix(name)) for message in subscriber.take(4)]
    assert got == [("1", "/long/topic"), ("2", "/long/topic"), ("3", "/other"), ("4", "/other")]


def test_topic_aliases_of_the_server_keep_to_the_clients_maximum(node: Node, connect: Connect, name: str) -> None:
    publisher = connect(f"{name}-pub")
    with Raw(node.mqtt_port, V5) as raw:
        raw.connect(f"{name}-sub", properties=b"\x22\x00\x02")  # topic alias maximum: 2
        raw.subscribe(f"{name}/#", 0)
        topics = [f"{name}/{n % 3}" for n in range(30)]
        for topic in topics:
            publisher.publish(topic, topic)
        aliases: dict[int, str] = {}
        for expected in topics:
            first, body = raw.read()
            assert first == 0x30
            at = 2 + int.from_bytes(body[:2], "big")
            topic, properties = body[2:at].decode(), body[at + 1 : at + 1 + body[at]]
            if properties:
                assert properties[0] == 0x23, f"not a topic alias: {properties.hex(' ')}"
                alias = int.from_bytes(properties[1:3], "big")
                assert 1 <= alias <= 2
                topic = aliases[alias] = topic or aliases[alias]
            assert topic == expected == body[at + 1 + body[at] :].decode()


def test_a_client_that_allows_no_aliases_gets_none(node: Node, connect: Connect, name: str) -> None:
    publisher = connect(f"{name}-pub")
    with Raw(node.mqtt_port, V5) as raw:
        raw.connect(f"{name}-sub")
        raw.subscribe(name, 1)
        for n in range(20):
            publisher.publish(name, str(n))
            first, _, payload = raw.read_publish()  # which knows packets with an empty list of properties only
            assert (first, payload) == (0x32, str(n).encode())


@pytest.mark.parametrize("ending", ["drop", "disconnect with will"])
def test_a_will_waits_for_its_delay(connect: Connect, name: str, library: str, ending: str) -> None:
    watcher = connect(f"{name}-watch", V5, library)
    watcher.subscribe(name, 1)
    will = Will(name, b"late", properties={"WillDelayInterval": 1, "ContentType": "text/plain"})
    client = connect(f"{name}-1", V5, library, will=will, **durable(V5))
    begin = time.monotonic()
    if ending == "drop":
        client.drop()
    else:
        client.disconnect(4)
    got = watcher.next()
    assert got.payload == b"late" and got.properties["ContentType"] == "text/plain"
    assert "WillDelayInterval" not in got.properties
    assert 0.9 < time.monotonic() - begin < 4


def test_a_client_that_is_back_in_time_has_no_will_published(connect: Connect, name: str) -> None:
    watcher = connect(f"{name}-watch")
    watcher.subscribe(name, 1)
    will = Will(name, b"late", properties={"WillDelayInterval": 1})
    connect(f"{name}-1", V5, will=will, **durable(V5)).drop()
    begin = time.monotonic()
    connect(f"{name}-1", V5, **durable(V5))
    wait_for(lambda: time.monotonic() - begin > 1.5, what="the delay's end")
    watcher.publish(name, b"end")
    assert watcher.until(b"end") == []


def test_a_session_that_ended_with_its_connection_is_not_taken_over(connect: Connect, name: str) -> None:
    """The second connection begins a session of its own, which its predecessor's end must not take with it."""
    connect(name, V5).subscribe(f"{name}/old", 1)
    second = connect(name, V5, **durable(V5))
    assert second.session_present is False
    second.subscribe(f"{name}/new", 1)
    second.drop()
    publisher = connect(f"{name}-pub", V5)
    publisher.publish(f"{name}/old", b"no")
    publisher.publish(f"{name}/new", b"kept")
    third = connect(name, V5, **durable(V5))
    assert third.session_present is True
    assert third.next().text == "kept"


def test_a_session_ends_when_its_expiry_says(connect: Connect, node: Node, name: str) -> None:
    connect(name, V5, **durable(V5, 1)).disconnect()
    begin = time.monotonic()
    wait_for(lambda: time.monotonic() - begin > 1.6, what="the session's end")
    assert connect(name, V5, **durable(V5)).session_present is False


def test_a_disconnect_may_change_the_expiry(connect: Connect, name: str) -> None:
    client = connect(name, V5, **durable(V5))
    client.subscribe(name)
    client.disconnect(properties={"SessionExpiryInterval": 0})
    assert connect(name, V5, **durable(V5)).session_present is False


def test_acknowledgements_say_what_became_of_it(connect: Connect, name: str) -> None:
    client = connect(name)
    no_matching_subscribers = 0x10
    assert client.publish(f"{name}/nobody", b"x") in (0, no_matching_subscribers)
    assert client.subscribe(f"{name}/#", 2) == 2
    assert client.publish(f"{name}/me", b"x", 2) == 0


def test_unsubscribing_says_whether_there_was_anything(node: Node, name: str) -> None:
    with Raw(node.mqtt_port, V5) as raw:
        raw.connect(name)
        raw.subscribe(f"{name}/a")
        raw.send(0xA2, b"\x00\x02\x00" + text(f"{name}/a") + text(f"{name}/never"))
        no_subscription_existed = 0x11
        assert raw.read() == (0xB0, b"\x00\x02\x00" + bytes([0, no_subscription_existed]))


def test_the_connack_names_the_limits(connect: Connect, name: str) -> None:
    told = connect(name).connack
    assert told.get("MaximumQoS", 2) == 2 and told.get("RetainAvailable", 1) == 1
    assert told.get("WildcardSubscriptionAvailable", 1) == 1 and told.get("SubscriptionIdentifierAvailable", 1) == 1
    assert told.get("ReceiveMaximum", 65535) >= 10
