"""WebSocket from its worst side: handshakes that are none, frames that are wrong, many, giant or tiny."""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import time
from collections.abc import Iterator

import pytest

from e2e.raw import packet, text
from hostile.attack import Deaf, Target, connect_packet, everything, packets, publish_packet, subscribe_packet
from hostile.test_floods import pour

TEXT, BINARY, CONT, CLOSE, PING, PONG = 1, 2, 0, 8, 9, 10

REQUEST = (
    b"GET /mqtt HTTP/1.1\r\nHost: 127.0.0.1\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
    b"Sec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\nSec-WebSocket-Version: 13\r\nSec-WebSocket-Protocol: mqtt\r\n\r\n"
)


def frame(opcode: int, data: bytes, fin: bool = True, masked: bool = True, length: int | None = None) -> bytes:
    size = len(data) if length is None else length
    head = bytes([opcode | (0x80 if fin else 0)])
    mask_bit = 0x80 if masked else 0
    if size < 126:
        head += bytes([size | mask_bit])
    elif size < 1 << 16:
        head += bytes([126 | mask_bit]) + struct.pack("!H", size)
    else:
        head += bytes([127 | mask_bit]) + struct.pack("!Q", size)
    return head + (b"\0\0\0\0" if masked else b"") + data


class Socket:
    """A WebSocket of which every byte is the test's."""

    def __init__(self, port: int, deaf: bool = False):
        self.sock = Deaf(port, 5).sock if deaf else socket.create_connection(("127.0.0.1", port), 10)
        self._data = b""

    def __enter__(self) -> Socket:
        return self

    def __exit__(self, *_: object) -> None:
        self.sock.close()

    def open(self) -> Socket:
        self.sock.sendall(REQUEST)
        while b"\r\n\r\n" not in self._data:
            self._more()
        head, _, self._data = self._data.partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 101"), head
        return self

    def _more(self) -> None:
        chunk = self.sock.recv(65_536)
        if not chunk:
            raise EOFError
        self._data += chunk

    def read(self) -> tuple[int, bytes]:
        """The next frame: its opcode and its data."""
        while True:
            if found := self._frame():
                return found
            self._more()

    def _frame(self) -> tuple[int, bytes] | None:
        data = self._data
        if len(data) < 2:
            return None
        size, at = data[1], 2
        if size == 126:
            size, at = int.from_bytes(data[2:4], "big"), 4
        elif size == 127:
            size, at = int.from_bytes(data[2:10], "big"), 10
        if len(data) < at + size:
            return None
        self._data = data[at + size :]
        return data[0] & 15, data[at : at + size]

    def send(self, data: bytes, opcode: int = BINARY) -> None:
        self.sock.sendall(frame(opcode, data))

    def until_closed(self) -> tuple[bytes, int]:
        """All MQTT that comes, and the code the WebSocket is closed with."""
        said = b""
        while True:
            opcode, data = self.read()
            if opcode == CLOSE:
                return said, int.from_bytes(data[:2], "big")
            said += data


@pytest.fixture
def port(target: Target) -> int:
    return target.node.ports["mqtt.websocket"]


@pytest.fixture
def ws(port: int) -> Iterator[Socket]:
    with Socket(port) as made:
        yield made.open()


@pytest.mark.parametrize(
    "request_",
    [
        b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
        b"POST /mqtt HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\n\r\nhello",
        REQUEST.replace(b"13", b"12"),
        REQUEST.replace(b"AAAAAAAAAAAAAAAAAAAAAA==", b"short"),
        b"\x10\x0c\x00\x04MQTT\x05\x02\x00\x00\x00\x00\x00",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(500),
        b"GET /" + b"x" * 100_000 + b" HTTP/1.1\r\n\r\n",
        b"GET / HTTP/1.1\r\n" + b"".join(b"X-%d: y\r\n" % n for n in range(5000)) + b"\r\n",
        b"\0" * 10_000,
        b"\r\n" * 5000,
    ],
    ids=["plain", "post", "version", "key", "mqtt", "tls", "long", "headers", "zeros", "lines"],
)
def test_a_handshake_that_is_none_is_refused(target: Target, port: int, request_: bytes) -> None:
    with target.unharmed(grows_mb=16), Socket(port) as ws:
        ws.sock.sendall(request_)
        said = everything(ws.sock, 5)
        assert said == b"" or said.startswith(b"HTTP/1.1 4"), said


def test_a_handshake_that_never_ends_is_cut(target: Target, port: int) -> None:
    with target.unharmed(grows_mb=16), Socket(port) as ws:
        began = time.monotonic()
        ws.sock.sendall(REQUEST[:-2])
        ws.sock.settimeout(5)
        assert ws.sock.recv(100) == b""
        assert 0.5 < time.monotonic() - began < 3


def test_an_open_websocket_that_says_nothing_is_cut(target: Target, ws: Socket) -> None:
    with target.unharmed(grows_mb=16):
        began = time.monotonic()
        with pytest.raises(EOFError):
            ws.read()
        assert 0.5 < time.monotonic() - began < 3


def test_a_text_frame_ends_it(target: Target, port: int, name: str) -> None:
    """Nothing that comes after it is taken, in whatever pieces it comes."""
    hidden = publish_packet(f"{name}/hidden", b"x", qos=1)
    for bad in (
        frame(TEXT, b"hello"),
        frame(TEXT, b"", fin=False) + frame(CONT, hidden),
        frame(TEXT, b"") + frame(BINARY, hidden),
    ):
        with target.unharmed(), Socket(port) as ws, target.connected(f"{name}-watch") as watch:
            watch.subscribe(f"{name}/+", 0)
            ws.open().send(connect_packet(name, keep_alive=0))
            assert ws.read()[1][0] == 0x20
            ws.sock.sendall(bad)
            assert ws.until_closed() == (b"", 1003)
            assert everything(ws.sock, 5) == b""
            watch.publish(f"{name}/after", b"after", qos=0)
            assert watch.read()[1].endswith(b"after")


def test_a_websocket_that_is_over_does_not_stay(target: Target, port: int, name: str) -> None:
    """Closed or failed, with a client that keeps its end open: its session ends, and its will is heard."""

    def connect(client_id: str) -> bytes:
        body = text("MQTT") + b"\5\6\0\0\0" + text(client_id) + b"\0" + text(f"{name}/will") + text("gone")
        return packet(0x10, body)

    with contextlib.ExitStack() as stack:
        watch = stack.enter_context(target.connected(f"{name}-watch"))
        watch.subscribe(f"{name}/will", 0)
        opened = []
        for n in range(3):
            ws = stack.enter_context(Socket(port)).open()
            ws.send(connect(f"{name}-{n}"))
            assert ws.read()[1][0] == 0x20
            opened.append(ws)
        with target.unharmed():
            for ws, last in zip(
                opened, (frame(CLOSE, b"\x03\xe8"), frame(TEXT, b"hello"), frame(3, b"?")), strict=True
            ):
                ws.sock.sendall(last)
            watch.sock.settimeout(8)
            for _ in opened:
                assert watch.read()[1].endswith(b"gone")


@pytest.mark.parametrize(
    ("bad", "code"),
    [
        (frame(BINARY, b"x", masked=False), 1002),
        (frame(3, b"x"), 1002),
        (frame(CONT, b"x"), 1002),
        (frame(BINARY, b"x", fin=False) + frame(BINARY, b"y"), 1002),
        (frame(PING, b"x" * 126), 1002),
        (frame(PING, b"x", fin=False), 1002),
        (frame(BINARY | 0x40, b"x"), 1002),
        (frame(BINARY, b"", length=1 << 62), 1009),
        (frame(BINARY, b"", length=256 << 20), 1009),
        (frame(CLOSE, b"\x01"), 1002),
    ],
)
def test_a_wrong_frame_ends_it_with_its_code(target: Target, ws: Socket, bad: bytes, code: int) -> None:
    with target.unharmed(grows_mb=16):
        ws.sock.sendall(bad)
        assert ws.until_closed()[1] == code
        assert everything(ws.sock, 5) == b""


def test_fragments_make_one_packet_and_packets_need_no_frame_of_their_own(
    target: Target, ws: Socket, name: str
) -> None:
    stream = connect_packet(name) + subscribe_packet([name]) + publish_packet(name, b"whole", qos=0)
    with target.unharmed():
        for at in range(0, len(stream), 3):
            ws.sock.sendall(frame(CONT if at else BINARY, stream[at : at + 3], fin=at + 3 >= len(stream)))
            ws.sock.sendall(frame(PING, b"between"))
        got, pongs = b"", 0
        while b"whole" not in got:
            opcode, data = ws.read()
            got += data if opcode == BINARY else b""
            pongs += opcode == PONG
        assert [first for first, _ in packets(got)] == [0x20, 0x90, 0x30] and pongs


def test_too_many_fragments_are_refused_before_they_fill_the_memory(target: Target, ws: Socket) -> None:
    piece = os.urandom(60_000)
    with target.unharmed(grows_mb=32):
        ws.sock.sendall(frame(BINARY, piece, fin=False))
        for _ in range(200):
            ws.sock.sendall(frame(CONT, piece, fin=False))
        assert ws.until_closed()[1] == 1009


def test_pings_whose_pongs_are_never_read(target: Target, port: int, name: str) -> None:
    with target.unharmed(slowest_seconds=1.5), Socket(port, deaf=True) as ws:
        ws.open().send(connect_packet(name, keep_alive=0))
        assert ws.read()[1][0] == 0x20
        _, held_back = pour(ws.sock, frame(PING, b"x" * 125) * 1000, 300, 10)
        assert held_back


def test_a_flood_of_empty_frames(target: Target, port: int, name: str) -> None:
    with target.unharmed(slowest_seconds=1.5), Socket(port) as ws:
        ws.open().send(connect_packet(name, keep_alive=0))
        assert ws.read()[1][0] == 0x20
        pour(ws.sock, frame(BINARY, b"") * 10_000, 20, 4)


def test_a_breach_in_a_websocket_is_told_in_mqtt_before_it_closes(target: Target, ws: Socket, name: str) -> None:
    with target.unharmed():
        ws.send(connect_packet(name))
        assert ws.read()[1][0] == 0x20
        ws.sock.sendall(frame(BINARY, b"\x30\xff\xff\xff\x7f") + frame(BINARY, b"x" * 50_000) * 40)
        said, code = ws.until_closed()
        assert said == b"\xe0\x01\x95" and code == 1000
        ws.sock.sendall(frame(CLOSE, b"\x03\xe8"))
        assert everything(ws.sock, 5) == b""
