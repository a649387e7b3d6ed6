"""A client of bare bytes, for what a decent client library will not do: fall silent, break rules, count packets."""

from __future__ import annotations

import socket
import struct


def text(value: str) -> bytes:
    return struct.pack("!H", len(value.encode())) + value.encode()


def packet(first: int, body: bytes) -> bytes:
    length, head = len(body), bytearray([first])
    while True:
        length, digit = divmod(length, 128)
        head.append(digit | (128 if length else 0))
        if not length:
            return bytes(head) + body


class Raw:
    """One connection, of which every byte is the test's."""

    def __init__(self, port: int, version: int, source: str = "127.0.0.1"):
        self.version = version
        self.sock = socket.create_connection(("127.0.0.1", port), 10, (source, 0))

    def __enter__(self) -> Raw:
        return self

    def __exit__(self, *_: object) -> None:
        self.sock.close()

    def send(self, first: int, body: bytes = b"") -> None:
        self.sock.sendall(packet(first, body))

    def connect(
        self,
        client_id: str,
        *,
        clean: bool = True,
        keep_alive: int = 60,
        properties: bytes = b"",
        will: tuple[str, bytes] | None = None,
    ) -> bytes:
        """The CONNACK's body."""
        v5 = self.version == 5
        flags = (2 if clean else 0) | (0x0C if will else 0)
        body = text("MQTT") + bytes([self.version, flags]) + struct.pack("!H", keep_alive)
        if v5:
            body += bytes([len(properties)]) + properties
        body += text(client_id)
        if will:
            body += (b"\0" if v5 else b"") + text(will[0]) + struct.pack("!H", len(will[1])) + will[1]
        self.send(0x10, body)
        first, answer = self.read()
        assert first == 0x20, f"not a CONNACK: {first:#x}"
        return answer

    def subscribe(self, topic_filter: str, qos: int = 1, pid: int = 1) -> bytes:
        props = b"\0" if self.version == 5 else b""
        self.send(0x82, struct.pack("!H", pid) + props + text(topic_filter) + bytes([qos]))
        first, answer = self.read()
        assert first == 0x90, f"not a SUBACK: {first:#x}"
        return answer

    def publish(self, topic: str, payload: bytes, *, qos: int = 1, pid: int = 1, dup: bool = False) -> None:
        props = b"\0" if self.version == 5 else b""
        number = struct.pack("!H", pid) if qos else b""
        self.send(0x30 | qos << 1 | dup << 3, text(topic) + number + props + payload)

    def read(self) -> tuple[int, bytes]:
        """The next packet: its first byte, and its body."""
        first = self._exactly(1)[0]
        length = shift = 0
        while True:
            byte = self._exactly(1)[0]
            length |= (byte & 127) << shift
            shift += 7
            if byte < 128:
                return first, self._exactly(length)

    def read_publish(self) -> tuple[int, int, bytes]:
        """The next PUBLISH of QoS 1 or 2, without properties: first byte, packet id, payload."""
        first, body = self.read()
        assert first >> 4 == 3, f"not a PUBLISH: {first:#x} {body.hex(' ')}"
        at = 2 + int.from_bytes(body[:2], "big")
        pid = int.from_bytes(body[at : at + 2], "big")
        at += 2
        if self.version == 5:
            at += 1 + body[at]
        return first, pid, body[at:]

    def ended(self) -> bytes:
        """Everything until the server closes the connection."""
        found = bytearray()
        while chunk := self.sock.recv(65536):
            found += chunk
        return bytes(found)

    def _exactly(self, count: int) -> bytes:
        found = bytearray()
        while len(found) < count:
            chunk = self.sock.recv(count - len(found))
            if not chunk:
                raise EOFError(f"closed after {found.hex(' ')!r}")
            found += chunk
        return bytes(found)
