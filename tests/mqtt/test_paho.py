"""A foreign client's bytes through our decoder, and ours through its."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import paho.mqtt.client as paho
import pytest
from paho.mqtt.enums import CallbackAPIVersion
from paho.mqtt.packettypes import PacketTypes
from paho.mqtt.properties import Properties
from paho.mqtt.subscribeoptions import SubscribeOptions

from holdfast.mqtt import codec, properties
from holdfast.mqtt.packets import (
    V5,
    V311,
    Connack,
    Connect,
    Disconnect,
    FilterRequest,
    Packet,
    Puback,
    Pubcomp,
    Publish,
    Pubrec,
    Pubrel,
    Suback,
    Subscribe,
    Unsuback,
    Unsubscribe,
    Will,
)


class Peer:
    """A paho client, and the other end of its connection."""

    def __init__(self, version: int):
        self.version = version
        protocol = paho.MQTTv5 if version == V5 else paho.MQTTv311
        self.client = paho.Client(CallbackAPIVersion.VERSION2, "c1", protocol=protocol)
        self.heard: list[tuple] = []
        self.client.on_connect = lambda c, u, flags, reason, p: self.heard.append(("connack", reason.value))
        self.client.on_subscribe = lambda c, u, mid, reasons, p: self.heard.append(
            ("suback", mid, [reason.value for reason in reasons])
        )
        self.client.on_unsubscribe = lambda c, u, mid, reasons, p: self.heard.append(("unsuback", mid))
        self.client.on_message = lambda c, u, message: self.heard.append(("message", message))
        self.client.on_publish = lambda c, u, mid, reason, p: self.heard.append(("published", mid))
        self.client.on_disconnect = lambda c, u, flags, reason, p: self.heard.append(("gone", reason.value))
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.buffer = b""

    def connect(self, **options) -> Packet:
        self.client.connect(*self.listener.getsockname(), keepalive=30, **options)
        self.socket, _ = self.listener.accept()
        self.socket.settimeout(5)
        return self.read()

    def read(self) -> Packet:
        while (found := codec.frame(self.buffer)) is None:
            more = self.socket.recv(4096)
            assert more, "paho hung up"
            self.buffer += more
        first, start, stop = found
        body, self.buffer = self.buffer[start:stop], self.buffer[stop:]
        return codec.decode(first, body, self.version)

    def say(self, packet: Packet) -> list[tuple]:
        """Send a packet; what paho made of it."""
        self.heard.clear()
        self.socket.sendall(codec.encode(packet, self.version))
        self.client.loop_read()
        return self.heard

    def close(self) -> None:
        for one in (self.client.socket(), self.socket, self.listener):
            if one is not None:
                one.close()


@pytest.fixture(params=[V311, V5], ids=["3.1.1", "5"])
def peer(request) -> Iterator[Peer]:
    peer = Peer(request.param)
    yield peer
    peer.close()


@pytest.fixture
def connected(peer: Peer) -> Peer:
    peer.connect()
    assert peer.say(Connack()) == [("connack", 0)]
    return peer


def test_connect_with_everything(peer: Peer):
    peer.client.username_pw_set("me", "secret")
    v5 = peer.version == V5
    options = {}
    will_properties = None
    if v5:
        will_properties = Properties(PacketTypes.WILLMESSAGE)
        will_properties.WillDelayInterval = 7
        will_properties.ContentType = "text/plain"
        sent = Properties(PacketTypes.CONNECT)
        sent.SessionExpiryInterval = 100
        sent.UserProperty = ("a", "b")
        options = {"properties": sent, "clean_start": False}
    peer.client.will_set("last/words", b"bye", 1, True, will_properties)
    assert peer.connect(**options) == Connect(
        "c1",
        peer.version,
        clean_start=not v5,
        keep_alive=30,
        username="me",
        password=b"secret",
        will=Will(
            "last/words",
            b"bye",
            1,
            True,
            7 if v5 else 0,
            properties.encode({"content_type": "text/plain"}) if v5 else b"",
        ),
        properties={"session_expiry": 100, "user_properties": [("a", "b")]} if v5 else {},
    )


def test_a_refused_connect(peer: Peer):
    peer.connect()
    assert ("connack", 0x87) in peer.say(Connack(0x87))


def test_subscribe_and_unsubscribe(connected: Peer):
    if connected.version == V5:
        options = SubscribeOptions(qos=2, noLocal=True, retainAsPublished=True, retainHandling=1)
        _, mid = connected.client.subscribe([("a/+", options), ("b/#", SubscribeOptions(qos=1))])
        wanted = (FilterRequest("a/+", 2, True, True, 1), FilterRequest("b/#", 1))
    else:
        _, mid = connected.client.subscribe([("a/+", 2), ("b/#", 1)])
        wanted = (FilterRequest("a/+", 2), FilterRequest("b/#", 1))
    assert connected.read() == Subscribe(mid, wanted)
    assert connected.say(Suback(mid, (2, 0x80))) == [("suback", mid, [2, 0x80])]
    _, mid = connected.client.unsubscribe(["a/+", "b/#"])
    assert connected.read() == Unsubscribe(mid, ("a/+", "b/#"))
    assert connected.say(Unsuback(mid, (0, 0x11))) == [("unsuback", mid)]


@pytest.mark.parametrize("qos", [0, 1, 2])
def test_publish(connected: Peer, qos: int):
    raw, options = b"", {}
    if connected.version == V5:
        sent = Properties(PacketTypes.PUBLISH)
        sent.MessageExpiryInterval = 30
        sent.CorrelationData = b"\0\1"
        options, raw = {"properties": sent}, sent.pack()[1:]
    info = connected.client.publish("tö/pic", b"payload", qos, retain=True, **options)
    assert connected.read() == Publish(
        "tö/pic", b"payload", qos, True, packet_id=info.mid if qos else 0, properties=raw
    )
    if qos == 1:
        assert connected.say(Puback(info.mid, 0x10)) == [("published", info.mid)]
    if qos == 2:
        assert connected.say(Pubrec(info.mid)) == []
        assert connected.read() == Pubrel(info.mid)
        assert connected.say(Pubcomp(info.mid)) == [("published", info.mid)]


@pytest.mark.parametrize("qos", [0, 1, 2])
def test_deliver(connected: Peer, qos: int):
    v5 = connected.version == V5
    packet_id = 9 if qos else 0
    heard = connected.say(
        Publish(
            "t/ä",
            b"\0payload",
            qos,
            retain=True,
            packet_id=packet_id,
            properties=properties.encode({"content_type": "x", "user_properties": [("k", "v")]}) if v5 else b"",
            subscription_identifiers=(3, 200) if v5 else (),
        )
    )
    if qos == 1:
        assert connected.read() == Puback(packet_id)
    if qos == 2:
        assert connected.read() == Pubrec(packet_id)
        heard = connected.say(Pubrel(packet_id))
        assert connected.read() == Pubcomp(packet_id)
    ((_, message),) = heard
    assert (message.topic, message.payload, message.qos, message.retain) == ("t/ä", b"\0payload", qos, True)
    if v5:
        assert message.properties.ContentType == "x"
        assert message.properties.UserProperty == [("k", "v")]
        assert message.properties.SubscriptionIdentifier == [3, 200]


def test_going(connected: Peer):
    connected.client.disconnect()
    assert connected.read() == Disconnect()


def test_being_told_to_go():
    peer = Peer(V5)
    try:
        peer.connect()
        peer.say(Connack())
        assert ("gone", 0x8E) in peer.say(Disconnect(0x8E, {"reason_string": "taken over"}))
    finally:
        peer.close()
