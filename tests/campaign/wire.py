"""MQTT 5 as bytes, as much of it as the campaign's clients say and hear; one connection that reads by itself."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
from collections.abc import Callable
from dataclasses import dataclass

CONNECT, CONNACK, PUBLISH, PUBACK, PUBREC, PUBREL, PUBCOMP = 1, 2, 3, 4, 5, 6, 7
SUBSCRIBE, SUBACK, PINGREQ, PINGRESP, DISCONNECT = 8, 9, 12, 13, 14

KEEP_ALIVE_SECONDS = 6
NEVER = 0xFFFFFFFF


def varint(value: int) -> bytes:
    out = bytearray()
    while True:
        value, digit = divmod(value, 128)
        out.append(digit | (128 if value else 0))
        if not value:
            return bytes(out)


def text(value: str) -> bytes:
    data = value.encode()
    return struct.pack("!H", len(data)) + data


def packet(first: int, body: bytes = b"") -> bytes:
    return bytes([first]) + varint(len(body)) + body


@dataclass(frozen=True)
class Will:
    topic: str
    payload: str
    delay: int = 0


def connect(client_id: str, *, clean: bool, expiry: int, will: Will | None = None, receive_maximum: int = 100) -> bytes:
    flags = (2 if clean else 0) | (0x0C if will else 0)
    properties = b"\x11" + struct.pack("!I", expiry) + b"\x21" + struct.pack("!H", receive_maximum)
    body = text("MQTT") + bytes([5, flags]) + struct.pack("!H", KEEP_ALIVE_SECONDS)
    body += varint(len(properties)) + properties + text(client_id)
    if will is not None:
        more = b"\x18" + struct.pack("!I", will.delay) if will.delay else b""
        body += varint(len(more)) + more + text(will.topic) + text(will.payload)
    return packet(CONNECT << 4, body)


def subscribe(pid: int, topic_filter: str, qos: int) -> bytes:
    return packet(SUBSCRIBE << 4 | 2, struct.pack("!H", pid) + b"\0" + text(topic_filter) + bytes([qos]))


def publish(topic: str, payload: str, qos: int, pid: int, dup: bool, expiry: int = 0) -> bytes:
    """`expiry` in seconds; 0: never."""
    number = struct.pack("!H", pid) if qos else b""
    properties = b"\x02" + struct.pack("!I", expiry) if expiry else b""
    body = text(topic) + number + varint(len(properties)) + properties + payload.encode()
    return packet(PUBLISH << 4 | dup << 3 | qos << 1, body)


def acknowledge(kind: int, pid: int) -> bytes:
    return packet(kind << 4 | (2 if kind == PUBREL else 0), struct.pack("!H", pid))


def disconnect(reason: int = 0, expiry: int | None = None) -> bytes:
    properties = b"" if expiry is None else b"\x11" + struct.pack("!I", expiry)
    return packet(DISCONNECT << 4, bytes([reason]) + varint(len(properties)) + properties)


def read_varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[at]
        value |= (byte & 127) << shift
        at, shift = at + 1, shift + 7
        if byte < 128:
            return value, at


@dataclass(frozen=True, slots=True)
class Delivery:
    topic: str
    payload: str
    qos: int
    pid: int
    dup: bool


def delivery(first: int, body: bytes) -> Delivery:
    at = 2 + int.from_bytes(body[:2], "big")
    topic, qos, pid = body[2:at].decode(), first >> 1 & 3, 0
    if qos:
        pid = int.from_bytes(body[at : at + 2], "big")
        at += 2
    length, at = read_varint(body, at)
    return Delivery(topic, body[at + length :].decode(), qos, pid, bool(first & 8))


class Link:
    """One connection: what it hears goes to `heard(link, first byte, body)`, its end to `ended(link)`, once."""

    def __init__(
        self,
        number: int,
        heard: Callable[[Link, int, bytes], None],
        ended: Callable[[Link], None],
    ):
        self.number = number
        self.open = False
        self.reason = -1
        """What the server gave as the reason in DISCONNECT."""
        self.dropped = False
        """We ended it, without a word."""
        self.heard_at = 0.0
        self._heard, self._ended = heard, ended
        self._writer: asyncio.StreamWriter | None = None
        self._reading: asyncio.Task[None] | None = None
        self.over = asyncio.Event()

    async def dial(self, port: int, first: bytes) -> None:
        """OSError, TimeoutError: nobody is there."""
        async with asyncio.timeout(5):
            reader, self._writer = await asyncio.open_connection("127.0.0.1", port)
        self.open = True
        self.heard_at = asyncio.get_running_loop().time()
        self._writer.write(first)
        self._reading = asyncio.create_task(self._read(reader))

    def send(self, data: bytes) -> None:
        if self.open and self._writer is not None:
            self._writer.write(data)

    async def _read(self, reader: asyncio.StreamReader) -> None:
        try:
            with contextlib.suppress(OSError, asyncio.IncompleteReadError):
                while True:
                    first = (await reader.readexactly(1))[0]
                    length = shift = 0
                    while True:
                        byte = (await reader.readexactly(1))[0]
                        length |= (byte & 127) << shift
                        shift += 7
                        if byte < 128:
                            break
                    body = await reader.readexactly(length) if length else b""
                    self.heard_at = asyncio.get_running_loop().time()
                    if first >> 4 == DISCONNECT:
                        self.reason = body[0] if body else 0
                    self._heard(self, first, body)
        finally:
            self._close()

    def drop(self) -> None:
        """End it without a word."""
        self.dropped = True
        if self._writer is not None:
            sock = self._writer.get_extra_info("socket")
            if sock is not None:
                with contextlib.suppress(OSError):
                    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            self._writer.transport.abort()
        if self._reading is not None:
            self._reading.cancel()
        self._close()

    def _close(self) -> None:
        if self.open:
            self.open = False
            if self._writer is not None:
                self._writer.close()
            self._ended(self)
        self.over.set()
