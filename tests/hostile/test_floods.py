"""Too much of something: bytes, packets, filters, topics, retained messages, or nothing ever read."""

from __future__ import annotations

import contextlib
import select
import socket
import struct
import threading
import time

import pytest

from e2e.raw import Raw, packet, text
from hostile.attack import (
    MB,
    Target,
    connect_packet,
    everything,
    publish_packet,
    reason,
    subscribe_packet,
    varint,
)
from hostile.conftest import SUBSCRIPTIONS_MAX
from processes import wait_for


def pour(sock: socket.socket, data: bytes, times: int, seconds: float) -> tuple[int, bool]:
    """Send `data` that often, without reading, until the node takes no more or the time is up.

    How many bytes went, and whether the node stopped taking them.
    """
    sock.setblocking(False)
    sent, whole, give_up = 0, len(data) * times, time.monotonic() + seconds
    view, held_back = memoryview(data), False
    while sent < whole and time.monotonic() < give_up:
        if not select.select([], [sock], [], 1.0)[1]:
            held_back = True
            break
        with contextlib.suppress(BlockingIOError):
            sent += sock.send(view[sent % len(data) :])
    sock.setblocking(True)
    sock.settimeout(10)
    return sent, held_back


def test_a_publish_that_claims_256_megabytes_is_refused_at_once(target: Target, name: str, version: int) -> None:
    with target.unharmed(grows_mb=8), target.connected(name, version) as raw:
        began = time.monotonic()
        raw.sock.sendall(b"\x30\xff\xff\xff\x7f" + text(name) + b"x" * 1000)
        said = everything(raw.sock)
        assert time.monotonic() - began < 1.5
        assert reason(said) == (0x95 if version == 5 else None)


def test_a_connect_that_claims_256_megabytes_is_refused_at_once(target: Target, name: str, version: int) -> None:
    with target.unharmed(grows_mb=8), target.raw(version) as raw:
        began = time.monotonic()
        whole = connect_packet(name, version)
        raw.sock.sendall(b"\x10\xff\xff\xff\x7f" + whole[2:] + b"x" * 1000)
        said = everything(raw.sock)
        assert time.monotonic() - began < 0.8
        assert said == b"" or reason(said) == 0x95


def test_a_large_packet_in_tiny_pieces_costs_no_one_else(target: Target, name: str) -> None:
    """Each piece must not be worth a copy of all that came before it."""
    whole = publish_packet(name, b"x" * (MB - 100), qos=1)
    with contextlib.ExitStack() as stack:
        stack.enter_context(target.unharmed(grows_mb=48, slowest_seconds=1.0))
        raws = [stack.enter_context(target.connected(f"{name}-{n}")) for n in range(16)]
        for raw in raws:
            raw.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            raw.sock.sendall(whole[: MB // 2])
        for at in range(MB // 2, MB // 2 + 1500):
            for raw in raws:
                raw.sock.sendall(whole[at : at + 1])
        raws[0].sock.sendall(whole[MB // 2 + 1500 :])
        assert raws[0].read()[0] == 0x40


def test_a_subscribe_with_ten_thousand_filters(target: Target, name: str, version: int) -> None:
    """As many as the limit allows are taken; the others are refused one by one."""
    filters = [f"{name}/{n}/+/x/#" for n in range(10_000)]
    with target.unharmed(), target.connected(name, version) as raw:
        raw.sock.sendall(subscribe_packet(filters, version))
        first, body = raw.read()
        codes = body[-10_000:]
        assert first == 0x90 and codes[:SUBSCRIPTIONS_MAX] == b"\x01" * SUBSCRIPTIONS_MAX
        assert set(codes[SUBSCRIPTIONS_MAX:]) == {0x97 if version == 5 else 0x80}
        raw.publish(f"{name}/3/a/x/b", b"mine")
        assert {raw.read()[0] & 0xF0 for _ in range(2)} == {0x30, 0x40}


def test_subscribing_again_and_again_without_reading(target: Target, name: str) -> None:
    """Each SUBSCRIBE asks for all retained messages; they do not pile up."""
    with target.connected(f"{name}-pub") as raw:
        for n in range(500):
            raw.sock.sendall(publish_packet(f"{name}/{n}", b"x" * 200, qos=1, pid=n + 1, retain=True))
        for _ in range(500):
            assert raw.read()[0] == 0x40
    with target.unharmed(), target.connected(name, deaf=True) as raw:
        pour(raw.sock, subscribe_packet([f"{name}/+"], qos=0), 5000, 8)
        target.settle()


def read_all(sock: socket.socket, one: bytes, count: int, step: int) -> None:
    """Read `count` answers of which each is as long as `one` and begins with its first byte."""
    sock.settimeout(20)
    left, found = count * step, bytearray()
    while len(found) < left:
        chunk = sock.recv(1 << 18)
        assert chunk, f"closed; {left - len(found)} bytes of answers missing"
        found += chunk
    assert found[::step] == one * count


def test_pings_whose_answers_are_never_read(target: Target, name: str, version: int) -> None:
    """Answers do not pile up: the client is no longer read from. When it reads, everything goes on."""
    with target.unharmed(), target.connected(name, version, deaf=True) as raw:
        # More than the system holds for both sides: it may let a receiver's buffer grow to 32 MB.
        sent, held_back = pour(raw.sock, b"\xc0\x00" * 50_000, 600, 30)
        assert held_back, f"{sent} bytes were taken"
        if version == 5:
            return  # reading it all takes a while; once is enough
        if sent % 2:
            threading.Thread(target=raw.sock.sendall, args=(b"\x00",), daemon=True).start()
        read_all(raw.sock, b"\xd0", (sent + 1) // 2, 2)


def test_publishes_whose_acks_are_never_read(target: Target, name: str) -> None:
    one = publish_packet(name, b"", 4, qos=1, pid=7)
    with target.unharmed(grows_mb=96), target.connected(name, 4, deaf=True) as raw:
        sent, held_back = pour(raw.sock, one * 1000, 2000, 15)
        assert held_back, f"{sent} bytes were taken"
        if rest := sent % len(one):
            threading.Thread(target=raw.sock.sendall, args=(one[rest:],), daemon=True).start()
        read_all(raw.sock, b"\x40", -(-sent // len(one)), 4)


def test_more_unacknowledged_publishes_than_were_allowed(target: Target, name: str) -> None:
    """MQTT 5 has a word for it, and the client can still read it, whatever else it has sent meanwhile."""
    with target.unharmed(grows_mb=96), target.connected(name, deaf=True) as raw:
        with contextlib.suppress(ConnectionError):
            pour(raw.sock, publish_packet(name, b"", qos=1, pid=7) * 1000, 50, 1)
        assert reason(everything(raw.sock)) == 0x93


def test_a_flood_of_publishes_that_take_the_long_way(target: Target, name: str) -> None:
    """QoS 0 with large properties: not acknowledged, so nothing but being read from holds it back."""
    props = b"\x26" + text("k") + text("v" * 300)
    one = publish_packet(name, b"x" * 100_000, props=props)
    with target.unharmed(grows_mb=96), target.connected(name) as raw:
        sent, _ = pour(raw.sock, one, 1000, 8)
        assert sent > 10 * MB
        raw.sock.sendall(one[sent % len(one) :] if sent % len(one) else b"")
        raw.send(0xC0)
        assert raw.read() == (0xD0, b"")


def test_a_flood_of_qos_2_publishes_that_are_never_released(target: Target, name: str) -> None:
    """MQTT 3.1.1 knows no receive maximum: 65,535 ids may be under way."""
    many = b"".join(publish_packet(name, b"x" * 5000, 4, qos=2, pid=n) for n in range(1, 10_001))
    with target.unharmed(grows_mb=64), target.connected(name, 4) as raw:
        sent, _ = pour(raw.sock, many, 1, 10)
        assert sent > 10 * MB


def test_more_publishes_under_way_than_allowed(target: Target, name: str) -> None:
    with target.unharmed(), target.connected(name) as raw:
        raw.sock.sendall(b"".join(publish_packet(name, b"x", qos=2, pid=n) for n in range(1, 2001)))
        assert reason(everything(raw.sock)) == 0x93


def test_thousands_of_topics_as_long_as_can_be(target: Target, name: str) -> None:
    """50 MB of topic names. A trie remembers some of them, within its bound; nobody else does."""
    tail = b"x" * (65_535 - 30)
    with target.unharmed(grows_mb=125), target.connected(name) as raw:
        for n in range(800):
            topic = f"{name}/{n}/".encode() + tail
            raw.sock.sendall(publish_packet(topic[:65_535], b"", qos=1, pid=n % 500 + 1))
            if n % 50 == 49:
                for _ in range(50):
                    assert raw.read()[0] == 0x40


def test_deep_topics_are_refused_with_their_reason(target: Target, name: str, version: int) -> None:
    with target.unharmed(), target.connected(name, version) as raw:
        raw.sock.sendall(publish_packet("/" * 65_535, b"x", version, qos=1))
        assert reason(everything(raw.sock)) == (0x90 if version == 5 else None)
    with target.unharmed(), target.connected(name, version) as raw:
        raw.sock.sendall(subscribe_packet(["+/" * 30_000 + "#", f"{name}/+"], version))
        first, body = raw.read()
        assert first == 0x90 and list(body[-2:]) == [0x8F if version == 5 else 0x80, 1]


def test_a_flood_of_retained_messages(target: Target, name: str) -> None:
    """Each on a topic of its own. They are taken, found again, and cleared."""
    count = 5000
    with target.unharmed(), target.connected(name) as raw:
        for payload in (b"x" * 200, b""):
            for n in range(0, count, 500):
                raw.sock.sendall(
                    b"".join(
                        publish_packet(f"{name}/{m}", payload, qos=1, pid=m - n + 1, retain=True)
                        for m in range(n, n + 500)
                    )
                )
                for _ in range(500):
                    assert raw.read()[0] == 0x40
            with target.connected(f"{name}-sub") as sub:
                sub.subscribe(f"{name}/#", 0)
                sub.publish(f"{name}/end", b"end")
                found = 0
                while True:
                    first, _ = sub.read()
                    if first & 0xF1 == 0x31:
                        found += 1
                    elif first >> 4 == 3:
                        break
                assert found == (count if payload else 0)


class Reader(threading.Thread):
    """Reads deliveries of QoS 1 and acknowledges them, until told how many there are."""

    def __init__(self, raw: Raw, count: int):
        super().__init__(daemon=True)
        self.raw, self.count = raw, count
        self.found: list[bytes] = []
        self.start()

    def run(self) -> None:
        while len(self.found) < self.count:
            _, pid, payload = self.raw.read_publish()
            self.found.append(payload[:8])
            self.raw.send(0x40, struct.pack("!H", pid))


def test_a_subscriber_that_does_not_read_stays_on_the_log_and_misses_nothing(target: Target, name: str) -> None:
    count, size = 1000, 100_000
    with target.connected(name, deaf=True) as deaf, target.connected(f"{name}-pub") as raw:
        deaf.subscribe(name, 1)
        with target.unharmed(grows_mb=80):
            for n in range(count):
                raw.publish(name, b"%08d" % n + b"x" * (size - 8), pid=n + 1)
                if n % 20 == 19:
                    for _ in range(20):
                        assert raw.read()[0] == 0x40
        with target.unharmed(grows_mb=80):
            reader = Reader(deaf, count)
            wait_for(lambda: len(reader.found) == count, 40, "everything was delivered")
        assert reader.found == [b"%08d" % n for n in range(count)]


@pytest.mark.parametrize("alias", [0, 11, 65_535])
def test_an_alias_outside_of_what_was_offered(target: Target, name: str, alias: int) -> None:
    with target.unharmed(), target.connected(name) as raw:
        raw.sock.sendall(publish_packet(name, b"x", props=b"\x23" + struct.pack("!H", alias)))
        assert reason(everything(raw.sock)) == 0x94


def test_an_alias_that_was_never_set(target: Target, name: str) -> None:
    with target.unharmed(), target.connected(name) as raw:
        raw.sock.sendall(publish_packet("", b"x", props=b"\x23\x00\x05"))
        assert reason(everything(raw.sock)) == 0x82


def test_aliases_belong_to_their_connection(target: Target, name: str) -> None:
    with target.unharmed(), target.connected(name) as one, target.connected(f"{name}-2") as two:
        one.sock.sendall(publish_packet(name, b"x", qos=1, props=b"\x23\x00\x05"))
        assert one.read()[0] == 0x40
        two.sock.sendall(publish_packet("", b"x", props=b"\x23\x00\x05"))
        assert reason(everything(two.sock)) == 0x82
        one.sock.sendall(publish_packet("", b"x", qos=1, pid=2, props=b"\x23\x00\x05"))
        assert one.read()[0] == 0x40


def test_properties_that_lie_about_their_length(target: Target, name: str) -> None:
    for props in (b"\x26\xff\xff", b"\x01", b"\x02\x00", b"\x0b" + b"\xff" * 4, b"\xff\x00"):
        with target.unharmed(), target.connected(name) as raw:
            body = text(name) + varint(len(props) + 5) + props + b"\0" * 5
            raw.sock.sendall(packet(0x30, body))
            assert reason(everything(raw.sock)) in (0x81, 0x82)
