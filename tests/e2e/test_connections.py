"""How connections end, and what the client is told: silence, breaches, a stopping server."""

from __future__ import annotations

import socket
import time

import pytest

from e2e.clients import V5, Dial, PahoClient
from e2e.conftest import Connect
from e2e.raw import Raw, text
from node import Node


def test_a_silent_client_is_given_up_after_one_and_a_half_keep_alives(
    node: Node, connect: Connect, name: str, version: int
) -> None:
    watcher = connect(f"{name}-watch", version)
    watcher.subscribe(name, 1)
    with Raw(node.mqtt_port, version) as raw:
        raw.connect(f"{name}-silent", keep_alive=1, will=(name, b"silent"))
        begin = time.monotonic()
        said = raw.ended()
        assert 1.0 < time.monotonic() - begin < 6.0
        assert said in ((b"\xe0\x01\x8d", b"\xe0\x02\x8d\x00", b"") if version == V5 else (b"",))
    assert watcher.next().payload == b"silent"


def test_a_client_that_pings_stays(node: Node, name: str) -> None:
    with Raw(node.mqtt_port, V5) as raw:
        raw.connect(name, keep_alive=1)
        end = time.monotonic() + 2.0
        while time.monotonic() < end:
            raw.send(0xC0)
            assert raw.read() == (0xD0, b"")
            raw.sock.settimeout(0.4)
            with pytest.raises(TimeoutError):
                raw.sock.recv(1)
            raw.sock.settimeout(10)


def test_a_breach_ends_that_connection_and_no_other(node: Node, connect: Connect, name: str, version: int) -> None:
    bystander = connect(name, version)
    bystander.subscribe(name)
    for breach in (b"\x00\x00", b"\x10\xff\xff\xff\xff\x01", b"\x36\x05\x00\x01a\x00\x01", b"\x82\x00", b"\xf0\x00"):
        with Raw(node.mqtt_port, version) as raw:
            raw.connect(f"{name}-bad")
            raw.sock.sendall(breach)
            said = raw.ended()
            assert said == b"" or (version == V5 and said[0] == 0xE0 and said[2] >= 0x80), said.hex(" ")
    bystander.publish(name, b"still here")
    assert bystander.next().payload == b"still here"


def test_a_packet_over_the_servers_maximum_is_refused_before_it_has_arrived(
    node: Node, name: str, version: int
) -> None:
    with Raw(node.mqtt_port, version) as raw:
        raw.connect(name)
        raw.sock.sendall(b"\x30\xff\xff\xff\x7f")  # a PUBLISH of 256 MB, of which nothing follows
        said = raw.ended()
        assert said[:1] + said[2:3] == (b"\xe0\x95" if version == V5 else b"")  # packet too large


def test_nothing_but_connect_comes_first(node: Node, version: int) -> None:
    with Raw(node.mqtt_port, version) as raw:
        raw.send(0xC0)
        assert raw.ended() in (b"", b"\xe0\x01\x82", b"\xe0\x02\x82\x00")


def test_an_unknown_protocol_version_is_refused_in_words(node: Node, name: str) -> None:
    with Raw(node.mqtt_port, 4) as raw:
        raw.send(0x10, text("MQTT") + b"\x09\x02\x00\x3c" + text(name))
        said = raw.ended()
        assert said[:1] == b"\x20" and said[3] in (0x01, 0x84)


def test_enhanced_authentication_is_refused_in_words(node: Node, name: str) -> None:
    with Raw(node.mqtt_port, V5) as raw:
        answer = raw.connect(name, properties=b"\x15" + text("SCRAM-SHA-1"))
        assert answer[1] == 0x8C  # bad authentication method
        assert raw.ended() == b""


@pytest.mark.parametrize("topic_filter", ["a/#/b", "a+", "#a", "", "a/b#"])
def test_a_filter_that_is_none_is_refused(node: Node, name: str, version: int, topic_filter: str) -> None:
    with Raw(node.mqtt_port, version) as raw:
        raw.connect(name)
        try:
            codes = raw.subscribe(topic_filter)[-1:]
        except (EOFError, AssertionError):
            return  # the connection ended, which is as right
        assert codes in (b"\x80", b"\x8f")


def test_the_servers_own_topics_cannot_be_written(connect: Connect, name: str, version: int) -> None:
    watcher = connect(name, version)
    watcher.subscribe("$SYS/#")
    watcher.subscribe(f"{name}/end")
    with Raw(watcher.dial.port, version) as raw:
        raw.connect(f"{name}-bad")
        raw.publish("$SYS/broker/forged", b"forged")
        raw.sock.settimeout(5)
        answer = raw.read() if version == V5 else None
        assert answer is None or answer[0] in (0x40, 0xE0)
    watcher.publish(f"{name}/end", b"end")
    assert [message for message in watcher.until(b"end") if message.payload == b"forged"] == []


def test_wildcards_at_the_front_leave_dollar_topics_out(connect: Connect, name: str, version: int) -> None:
    client = connect(name, version)
    client.subscribe("#")
    client.publish(f"{name}/end", name)
    assert not [message.topic for message in client.until(name.encode()) if message.topic.startswith("$")]


def test_an_ended_connection_lets_the_client_read_why(node: Node, name: str) -> None:
    """A server that closes with input unread resets the connection, and what it said last is lost."""
    with Raw(node.mqtt_port, V5) as raw:
        raw.connect(name)
        raw.sock.sendall(b"\x00\x00" + b"\x30\x05\x00\x01a\x00x" * 20_000)
        said = bytearray()
        try:
            while chunk := raw.sock.recv(65536):
                said += chunk
        except ConnectionResetError:
            pytest.fail(f"reset after {bytes(said).hex(' ')!r}")
        assert said[0] == 0xE0 and said[2] >= 0x80


def test_half_a_packet_waits_and_the_rest_completes_it(node: Node, connect: Connect, name: str, version: int) -> None:
    watcher = connect(f"{name}-watch", version)
    watcher.subscribe(name)
    with Raw(node.mqtt_port, version) as raw:
        raw.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        raw.connect(f"{name}-slow")
        properties = b"\0" if version == V5 else b""
        body = text(name) + b"\x00\x01" + properties + b"piece by piece"
        for byte in bytes([0x32, len(body)]) + body:
            raw.sock.sendall(bytes([byte]))
        assert raw.read()[0] == 0x40
    assert watcher.next().payload == b"piece by piece"


def test_a_wrong_port_speaks_no_mqtt(node: Node, name: str) -> None:
    """An HTTP request to the MQTT port ends that connection and nothing else."""
    with Raw(node.mqtt_port, 4) as raw:
        raw.sock.sendall(b"GET / HTTP/1.1\r\nHost: x\r\nUser-Agent: " + b"m" * 100 + b"\r\n\r\n")
        assert raw.ended() == b""
    client = PahoClient(Dial(port=node.mqtt_port, client_id=name, version=4)).connect()
    client.disconnect()
