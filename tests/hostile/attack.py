"""Everything that must still be true while a client misbehaves, and after it."""

from __future__ import annotations

import contextlib
import json
import resource
import socket
import struct
import threading
import time
from collections.abc import Iterator

import psutil

from e2e.raw import Raw, packet, text
from hostile.bystander import Bystander
from node import Node

MB = 1 << 20

DISCONNECT = 0xE0


class Target:
    """A node under attack, with a well-behaved client on it."""

    def __init__(self, node: Node, warm: bool = True):
        self.node = node
        self.bystander = Bystander(node.mqtt_port)
        self._process = psutil.Process(node.pid)
        if warm:
            self._warm_up()

    def _warm_up(self) -> None:
        """Fill the node's caches, so that what it grows by afterwards is the attack's doing."""
        with self.connected("warm-up") as raw:
            for _ in range(60):
                for pid in range(1, 21):
                    raw.publish("warm-up", b"x" * 100_000, pid=pid)
                for _ in range(20):
                    raw.read()

    def close(self) -> None:
        self.bystander.close()

    @property
    def rss(self) -> int:
        return self._process.memory_info().rss

    def raw(self, version: int = 5, deaf: bool = False) -> Raw:
        return (Deaf if deaf else Raw)(self.node.mqtt_port, version)

    def connected(self, client_id: str, version: int = 5, deaf: bool = False, **how: object) -> Raw:
        raw = self.raw(version, deaf)
        answer = raw.connect(client_id, **how)  # type: ignore[arg-type]
        if answer[1]:
            raw.sock.close()
            raise AssertionError(f"refused: {answer.hex(' ')}")
        return raw

    def settle(self, seconds: float = 8.0) -> None:
        """Wait until the node has dealt with what it was sent: it is next to idle, or the time is up."""
        give_up = time.monotonic() + seconds
        self._process.cpu_percent()
        while time.monotonic() < give_up:
            time.sleep(0.25)
            if self._process.cpu_percent() < 40:
                return

    @contextlib.contextmanager
    def unharmed(self, grows_mb: float = 48, slowest_seconds: float = 2.0) -> Iterator[None]:
        """Around an attack: the node lives, is not much larger, has no fault of its own in its log, and
        the well-behaved client was served all along."""
        log_before, pid, before = len(self.node.logs()), self.node.pid, self.rss
        peak, over = [before], threading.Event()

        def watch() -> None:
            while not over.wait(0.02):
                with contextlib.suppress(psutil.NoSuchProcess):
                    peak[0] = max(peak[0], self.rss)

        watching = threading.Thread(target=watch, daemon=True)
        watching.start()
        began = time.monotonic()
        try:
            yield
        finally:
            over.set()
            watching.join()
        assert self.node.running and self.node.pid == pid, f"the node is gone:\n{self.node.log_tail()}"
        self.bystander.trip_since(time.monotonic())
        assert (worst := self.bystander.worst_since(began)) < slowest_seconds, f"others waited {worst:.2f} s"
        grown = (peak[0] - before) / MB
        assert grown < grows_mb, f"the node grew by {grown:.0f} MB"
        faults = own_faults(self.node.logs()[log_before:])
        assert not faults, "\n".join(faults)


class Deaf(Raw):
    """A client with little room for what it has not read or sent."""

    def __init__(self, port: int, version: int):
        self.version = version
        self.sock = socket.socket()
        self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 16 << 10)
        self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 16 << 10)
        self.sock.settimeout(10)
        self.sock.connect(("127.0.0.1", port))


def own_faults(log: str) -> list[str]:
    """Lines in which the node says that it, not a client, did something wrong."""
    found = []
    for line in log.splitlines():
        try:
            entry = json.loads(line)
        except ValueError:
            entry = {"level": "error"}  # whatever is not a log line: a traceback, a warning of Python's
        if entry["level"] in ("error", "critical") or "error" in entry:
            found.append(line)
    return found


def everything(sock: socket.socket, seconds: float = 10.0) -> bytes:
    """All there is until the node closes; a reset is a failure, since it could have taken the reason with it."""
    sock.settimeout(seconds)
    found = bytearray()
    try:
        while chunk := sock.recv(1 << 16):
            found += chunk
    except ConnectionResetError:
        raise AssertionError(f"reset after {bytes(found[-20:]).hex(' ')!r}") from None
    return bytes(found)


def packets(data: bytes) -> list[tuple[int, bytes]]:
    """What the node sent, packet by packet; it must not end in the middle of one."""
    found, at = [], 0
    while at < len(data):
        length = shift = 0
        start = at + 1
        while True:
            assert start < len(data), f"cut short: {data[at:].hex(' ')}"
            byte = data[start]
            length |= (byte & 127) << shift
            start, shift = start + 1, shift + 7
            if byte < 128:
                break
        assert start + length <= len(data), f"cut short: {data[at:].hex(' ')}"
        found.append((data[at], data[start : start + length]))
        at = start + length
    return found


def reason(said: bytes) -> int | None:
    """Why the node ended a connection, by its last packet; None: it did not say."""
    last = packets(said)[-1:] or [(0, b"")]
    first, body = last[0]
    if first == DISCONNECT:
        return body[0] if body else 0
    if first == 0x20 and body[1]:
        return body[1]
    return None


def connect_packet(
    client_id: str, version: int = 5, keep_alive: int = 60, clean: bool = True, props: bytes = b""
) -> bytes:
    body = text("MQTT") + bytes([version, 2 if clean else 0]) + struct.pack("!H", keep_alive)
    if version == 5:
        body += bytes([len(props)]) + props
    return packet(0x10, body + text(client_id))


def publish_packet(
    topic: str | bytes,
    payload: bytes,
    version: int = 5,
    *,
    qos: int = 0,
    pid: int = 1,
    props: bytes = b"",
    retain: bool = False,
) -> bytes:
    raw = topic.encode() if isinstance(topic, str) else topic
    body = struct.pack("!H", len(raw)) + raw + (struct.pack("!H", pid) if qos else b"")
    if version == 5:
        body += varint(len(props)) + props
    return packet(0x30 | qos << 1 | retain, body + payload)


def subscribe_packet(filters: list[str], version: int = 5, *, qos: int = 1, pid: int = 1) -> bytes:
    body = struct.pack("!H", pid) + (b"\0" if version == 5 else b"")
    return packet(0x82, body + b"".join(text(one) + bytes([qos]) for one in filters))


def varint(value: int) -> bytes:
    out = bytearray()
    while True:
        value, digit = divmod(value, 128)
        out.append(digit | (128 if value else 0))
        if not value:
            return bytes(out)


def many_files(count: int) -> bool:
    """Raise the limit on open files to this many, for this process and those it starts; False: not allowed to."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft >= count:
        return True
    if hard != resource.RLIM_INFINITY and hard < count:
        return False
    resource.setrlimit(resource.RLIMIT_NOFILE, (count, hard))
    return True
