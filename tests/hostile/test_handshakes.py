"""Connections that never become one: silent, slow, by the thousand; and how they end."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import ssl
import struct
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from e2e.raw import Raw, text
from hostile.attack import (
    Target,
    connect_packet,
    everything,
    many_files,
    packets,
    publish_packet,
    reason,
    subscribe_packet,
)
from hostile.conftest import CONNECT_SECONDS
from node import Node
from processes import Report, child, wait_for


def ended_after(sock: socket.socket, seconds: float = 8.0) -> float:
    """How long until the node closes it, in whatever way."""
    began = time.monotonic()
    sock.settimeout(seconds)
    with contextlib.suppress(ConnectionResetError):
        while sock.recv(65_536):
            pass
    return time.monotonic() - began


@pytest.fixture(params=["mqtt", "mqtt.tls", "mqtt.websocket"])
def port(request: pytest.FixtureRequest, target: Target) -> int:
    return target.node.mqtt_port if request.param == "mqtt" else target.node.ports[request.param]


def test_a_silent_connection_is_cut(target: Target, port: int) -> None:
    with target.unharmed(grows_mb=8), socket.create_connection(("127.0.0.1", port)) as sock:
        assert CONNECT_SECONDS * 0.5 < ended_after(sock) < CONNECT_SECONDS + 3


def test_one_byte_at_a_time_is_not_enough(target: Target, port: int) -> None:
    """Sending something now and then does not buy time."""
    with target.unharmed(grows_mb=8), socket.create_connection(("127.0.0.1", port)) as sock:
        slowly = (
            b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc" if port == target.node.ports["mqtt.tls"] else b"\x10\x7f\x00\x04"
        )
        began = time.monotonic()
        with contextlib.suppress(ConnectionError):
            for at in range(100):
                sock.sendall(slowly[at : at + 1] or b"\0")
                if select.select([sock], [], [], 0.1)[0] and not sock.recv(100):
                    break
        assert CONNECT_SECONDS * 0.5 < time.monotonic() - began < CONNECT_SECONDS + 3


def test_hundreds_of_tls_handshakes_that_never_end(target: Target) -> None:
    port = target.node.ports["mqtt.tls"]
    with contextlib.ExitStack() as stack, target.unharmed():
        socks = [stack.enter_context(socket.create_connection(("127.0.0.1", port))) for _ in range(300)]
        for at, sock in enumerate(socks):
            sock.sendall(b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc"[: at % 10])
        began = time.monotonic()
        for sock in socks:
            ended_after(sock)
        assert time.monotonic() - began < CONNECT_SECONDS + 4


@contextlib.contextmanager
def tls(target: Target, authority: Path) -> Iterator[ssl.SSLSocket]:
    context = ssl.create_default_context(cafile=str(authority / "cert.pem"))
    with (
        socket.create_connection(("127.0.0.1", target.node.ports["mqtt.tls"]), 10) as plain,
        context.wrap_socket(plain, server_hostname="localhost") as sock,
    ):
        yield sock


def test_a_breach_over_tls_is_told_whatever_else_was_sent(target: Target, authority: Path, name: str) -> None:
    with target.unharmed(), tls(target, authority) as sock:
        sock.sendall(connect_packet(name))
        assert sock.recv(100)[0] == 0x20
        sock.sendall(b"\x30\xff\xff\xff\x7f" + b"x" * 200_000)
        assert reason(everything(sock)) == 0x95


def test_garbage_inside_of_tls(target: Target, authority: Path, name: str) -> None:
    """Records that are none, in the middle of a connection: it ends, and its will is heard."""
    with target.unharmed(), target.connected(f"{name}-watch") as watch, tls(target, authority) as sock:
        watch.subscribe(f"{name}/will", 0)
        body = text("MQTT") + b"\x05\x06\0\0\0" + text(name) + b"\0" + text(f"{name}/will") + text("gone")
        sock.sendall(bytes([0x10, len(body)]) + body)
        assert sock.recv(100)[0] == 0x20
        os.write(sock.fileno(), b"\x17\x03\x03\x00\x20" + bytes(32))
        assert watch.read()[1].endswith(b"gone")


def test_a_tls_client_that_never_says_goodbye(target: Target, authority: Path, name: str) -> None:
    """After our last word it neither answers nor closes: it is made to go."""
    with target.unharmed(), tls(target, authority) as sock:
        sock.sendall(connect_packet(name))
        assert sock.recv(100)[0] == 0x20
        sock.sendall(b"\x30\xff\xff\xff\x7f")
        plain = socket.socket(fileno=os.dup(sock.fileno()))
        with plain:
            assert ended_after(plain) < 6


def test_ten_thousand_connects_at_once(name: str, tmp_path: Path) -> None:
    """All are served, in bounded time and memory, and gone when they are gone."""
    many = many_files(19_000)
    count = 9500 if many else 400
    with contextlib.ExitStack() as stack:
        node = stack.enter_context(Node(tmp_path, settings={"limits.connect_secs": 60, "log_level": "warning"}))
        target = Target(node, warm=False)
        stack.callback(target.close)
        stack.enter_context(target.unharmed(grows_mb=320, slowest_seconds=8.0))
        began = time.monotonic()
        poller, socks = select.epoll(), {}
        for n in range(count):
            sock = socket.socket()
            sock.setblocking(False)
            sock.connect_ex(("127.0.0.1", target.node.mqtt_port))
            socks[sock.fileno()] = (sock, n)
            poller.register(sock, select.EPOLLOUT)
        answered = refused = 0
        while answered + refused < count and time.monotonic() - began < 40:
            for number, event in poller.poll(1):
                sock, n = socks[number]
                if event & select.EPOLLIN:
                    answered += sock.recv(100)[:1] == b"\x20"
                    poller.unregister(sock)
                elif event & (select.EPOLLERR | select.EPOLLHUP):
                    refused += 1
                    poller.unregister(sock)
                else:
                    sock.send(connect_packet(f"{name}-{n}"))
                    poller.modify(sock, select.EPOLLIN)
        assert (answered, refused) == (count, 0)
        poller.close()
        for sock, _ in socks.values():
            sock.close()
        wait_for(lambda: len(node.get("/api/v1/sessions")["sessions"]) == 1, 20, "all sessions but one were gone")


@pytest.mark.parametrize("rest", [b"", b"\x10", b"\x10\xff", b"\x10\x20\x00\x04MQ"], ids=["none", "1", "2", "name"])
def test_a_client_that_closes_before_it_has_said_anything(target: Target, rest: bytes) -> None:
    with target.unharmed(grows_mb=16):
        for _ in range(100):
            with socket.create_connection(("127.0.0.1", target.node.mqtt_port)) as sock:
                sock.sendall(rest)
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # close by reset


def test_a_half_closed_client_is_heard_out(target: Target, name: str, version: int) -> None:
    """Everything in one go and then no more: what was sent counts, the DISCONNECT above all (no will)."""
    with target.connected(f"{name}-watch") as watch, target.unharmed(), target.raw(version) as raw:
        watch.subscribe(f"{name}/#", 0)
        body = text("MQTT") + bytes([version, 0x06]) + b"\0\x3c" + (b"\0" if version == 5 else b"") + text(name)
        body += (b"\0" if version == 5 else b"") + text(f"{name}/will") + text("gone")
        raw.send(0x10, body)
        raw.sock.sendall(subscribe_packet([f"{name}/own"], version))
        raw.sock.sendall(publish_packet(f"{name}/said", b"said", version))
        raw.send(0xE0)
        raw.sock.shutdown(socket.SHUT_WR)
        assert [first for first, _ in packets(everything(raw.sock))] == [0x20, 0x90]
        assert watch.read()[1].endswith(b"said")
        watch.publish(f"{name}/end", b"end", qos=0)
        assert watch.read()[1].endswith(b"end")


def _hold_a_connection(report: Report, port: int, client_id: str, topic: str) -> None:
    with Raw(port, 5) as raw:
        body = text("MQTT") + b"\x05\x06\0\0\0" + text(client_id) + b"\0" + text(f"{topic}/will") + text("gone")
        raw.send(0x10, body)
        raw.read()
        raw.subscribe(topic, 1)
        raw.sock.sendall(publish_packet(topic, b"x" * 1000, qos=1)[:500])
        report.send("ready")
        signal.pause()


def test_a_client_that_is_killed_in_the_middle_of_a_packet(target: Target, name: str) -> None:
    with target.connected(f"{name}-watch") as watch, target.unharmed():
        watch.subscribe(f"{name}/#", 0)
        with child(_hold_a_connection, target.node.mqtt_port, name, name) as other:
            other.next_report()
            other.kill()
        assert watch.read()[1].endswith(b"gone")  # its will, and nothing of the half packet


def test_a_client_that_is_stopped_while_others_publish_to_it(target: Target, name: str) -> None:
    with child(_hold_a_connection, target.node.mqtt_port, name, name) as other:
        other.next_report()
        os.kill(other.pid, signal.SIGSTOP)
        with target.unharmed(grows_mb=80), target.connected(f"{name}-pub") as raw:
            for n in range(300):
                raw.publish(name, b"x" * 50_000, pid=n + 1)
            for _ in range(300):
                assert raw.read()[0] == 0x40
