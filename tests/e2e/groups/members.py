"""Members of shared groups over bare sockets, so that a test decides about every acknowledgement.

A member notes each delivery and each acknowledgement in a ledger that all members of a group share. What the server
has surely read of a member that crashed is told by pings: everything it sent before a PINGREQ that was answered.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import struct
import subprocess
import threading
import time
import urllib.parse
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx

from e2e.clients import V5
from e2e.raw import packet, text
from node import Node, holdfast_command
from processes import wait_for

SECONDS = 20.0
"""How long anything may take on a busy machine before it counts as not happening."""


@dataclass(frozen=True)
class Delivery:
    payload: str
    pid: int
    qos: int
    dup: bool
    at: float


@dataclass
class Ledger:
    """Who was given what, and who acknowledged it; shared by all members of a group."""

    given: dict[str, list[str]] = field(default_factory=dict)
    """Payload -> the members it was delivered to."""
    acked: dict[str, str] = field(default_factory=dict)
    acked_at: dict[str, float] = field(default_factory=dict)
    unsure: set[str] = field(default_factory=set)
    """Acknowledged by a member that crashed before it could know whether that was read."""
    again: list[tuple[str, str, float, str]] = field(default_factory=list)
    """(payload, who had acknowledged it, when, who was given it once more)."""
    lock: threading.Lock = field(default_factory=threading.Lock)

    def note_given(self, member: str, deliveries: Iterable[Delivery]) -> None:
        with self.lock:
            for each in deliveries:
                self.given.setdefault(each.payload, []).append(member)
                if each.payload in self.acked:
                    by, at = self.acked[each.payload], self.acked_at[each.payload]
                    self.again.append((each.payload, by, at, member))

    def note_acked(self, member: str, payloads: Iterable[str]) -> None:
        with self.lock:
            now = time.monotonic()
            for payload in payloads:
                self.acked[payload] = member
                self.acked_at[payload] = now

    def take_back(self, member: str, payloads: Iterable[str]) -> None:
        """These acknowledgements of that member may never have been read."""
        with self.lock:
            lost = set(payloads)
            for payload in lost:
                self.acked.pop(payload, None)
            self.unsure |= lost
            self.again = [each for each in self.again if each[0] not in lost or each[1] != member]

    def await_acked(self, wanted: Iterable[str], seconds: float = SECONDS) -> None:
        missing = set(wanted)

        def done() -> bool:
            with self.lock:
                missing.difference_update(self.acked, self.unsure)
            return not missing

        try:
            wait_for(done, seconds, "everything acknowledged")
        except AssertionError:
            raise AssertionError(f"{len(missing)} not acknowledged in {seconds} s: {sorted(missing)[:10]}") from None

    def check(self, crashed: Iterable[str] = (), before: float = 0.0) -> None:
        """Nothing acknowledged came again; of the members `crashed` with their node, nothing acknowledged `before`."""
        lost = set(crashed)
        bad = [each for each in self.again if each[1] not in lost or each[2] < before]
        assert not bad, f"{len(bad)} came again though acknowledged: {bad[:10]}"


class Member:
    """One client in one group. With `hold`, it acknowledges only what `ack` is told."""

    def __init__(
        self,
        port: int,
        client_id: str,
        share: str | None,
        ledger: Ledger | None = None,
        *,
        version: int = V5,
        durable: bool = False,
        clean: bool | None = None,
        qos: int = 1,
        hold: bool = False,
        receive_maximum: int | None = None,
        packet_maximum: int | None = None,
        start: str | None = None,
        key: str | None = None,
        keep_alive: int = 60,
    ):
        self.client_id, self.share, self.version, self.qos = client_id, share, version, qos
        self.ledger = ledger if ledger is not None else Ledger()
        self.hold = hold
        self.got: list[Delivery] = []
        self.closed_by_server = threading.Event()
        self.reason: int | None = None
        """Of the server's DISCONNECT, if it sent one."""
        self._answers: dict[int, bytes] = {}
        self._answered = threading.Condition()
        self._pid = 0
        self._open: dict[int, Delivery] = {}
        """Deliveries that are not acknowledged, by packet id."""
        self._unsure: list[str] = []
        self._pinged: list[str] | None = None
        self._gone = False
        self._write = threading.Lock()
        self.sock = socket.create_connection(("127.0.0.1", port), SECONDS)
        self.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        clean = not durable if clean is None else clean
        body = text("MQTT") + bytes([version, 2 if clean else 0]) + struct.pack("!H", keep_alive)
        if version == V5:
            properties = b"\x11\x00\x00\x0e\x10" if durable else b""
            if receive_maximum is not None:
                properties += b"\x21" + struct.pack("!H", receive_maximum)
            if packet_maximum is not None:
                properties += b"\x27" + struct.pack("!I", packet_maximum)
            body += bytes([len(properties)]) + properties
        self._thread = threading.Thread(target=self._run, name=client_id, daemon=True)
        self._thread.start()
        self._send(0x10, body + text(client_id))
        connack = self._await(0x20)
        assert connack[1] == 0, f"{client_id}: CONNACK {connack.hex(' ')}"
        self.session_present = bool(connack[0])
        if share is not None:
            self.subscribe(share, start=start, key=key)

    # -- what a test does with it ------------------------------------------------------------------------

    def subscribe(self, share: str, *, start: str | None = None, key: str | None = None) -> None:
        self.share = share
        suback = self.ask_to_subscribe(share, start, key)
        assert suback[-1] == self.qos, f"{self.client_id}: SUBACK {suback.hex(' ')}"

    def ask_to_subscribe(self, share: str, start: str | None = None, key: str | None = None) -> bytes:
        """The SUBACK, whatever it says."""
        self._pid += 1
        properties = b"\0" if self.version == V5 else b""
        wanted = {"holdfast-start": start, "holdfast-key": key}
        pairs = b"".join(b"\x26" + text(n) + text(value) for n, value in wanted.items() if value is not None)
        if pairs:
            properties = bytes([len(pairs)]) + pairs
        self._send(0x82, struct.pack("!H", self._pid) + properties + text(share) + bytes([self.qos]))
        return self._await(0x90)

    def unsubscribe(self) -> None:
        assert self.share is not None
        self._pid += 1
        properties = b"\0" if self.version == V5 else b""
        self._send(0xA2, struct.pack("!H", self._pid) + properties + text(self.share))
        self._await(0xB0)

    def payloads(self) -> list[str]:
        return [each.payload for each in self.got]

    def await_got(self, count: int, seconds: float = SECONDS) -> list[str]:
        wait_for(lambda: len(self.got) >= count, seconds, f"{self.client_id}: delivery {count} (has {len(self.got)})")
        return self.payloads()

    def await_payload(self, payload: str, seconds: float = SECONDS) -> float:
        """When it came."""
        found = wait_for(
            lambda: [each.at for each in self.got if each.payload == payload], seconds, f"{self.client_id}: {payload}"
        )
        return found[0]

    def unacked(self) -> list[str]:
        return [each.payload for each in list(self._open.values())]

    def ack(self, payloads: Sequence[str] | None = None) -> None:
        """Acknowledge what is held back: all of it, or these."""
        held = list(self._open.values())
        self._acknowledge([each for each in held if payloads is None or each.payload in payloads])

    def sync(self) -> None:
        """Everything sent so far has been read by the server."""
        with self._answered:
            self._answers.pop(0xD0, None)
        self._send(0xC0, b"")
        self._await(0xD0)

    def disconnect(self) -> None:
        with self._write, contextlib.suppress(OSError):
            self._gone = True
            self.sock.sendall(b"\xe0\0")
            self.sock.shutdown(socket.SHUT_WR)
        self._thread.join(SECONDS)
        self.sock.close()

    def crash(self) -> None:
        """The socket is closed hard: no word, and a reset if anything is unread."""
        with self._write:
            self._gone = True
            self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            with contextlib.suppress(OSError):
                self.sock.shutdown(socket.SHUT_RD)
            self.sock.close()
        self._thread.join(SECONDS)
        self.ledger.take_back(self.client_id, [*self._unsure, *(self._pinged or [])])

    def close(self) -> None:
        self._gone = True
        with contextlib.suppress(OSError):
            self.sock.shutdown(socket.SHUT_RDWR)
        self.sock.close()
        self._thread.join(SECONDS)

    def __enter__(self) -> Member:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # -- its side of the protocol ------------------------------------------------------------------------

    def _send(self, first: int, body: bytes) -> None:
        with self._write:
            self.sock.sendall(packet(first, body))

    def _await(self, first: int) -> bytes:
        with self._answered:
            if not self._answered.wait_for(lambda: first in self._answers, SECONDS):
                raise AssertionError(f"{self.client_id}: no packet {first:#x} in {SECONDS} s")
            return self._answers.pop(first)

    def _run(self) -> None:
        data = b""
        try:
            while chunk := self.sock.recv(1 << 18):
                data = self._take(data + chunk)
        except (OSError, ValueError):
            pass
        if not self._gone:
            self.closed_by_server.set()

    def _take(self, data: bytes) -> bytes:
        """Handle the whole packets; the rest."""
        at, found, replies = 0, [], bytearray()
        while True:
            start, length, shift = at + 1, 0, 0
            while start < len(data):
                length |= (data[start] & 127) << shift
                shift += 7
                start += 1
                if data[start - 1] < 128:
                    break
            else:
                break
            if start == at + 1 or data[start - 1] >= 128 or start + length > len(data):
                break
            first, body = data[at], data[start : start + length]
            at = start + length
            if first >> 4 == 3:
                found.append(self._delivery(first, body))
            elif first == 0x62:
                replies += b"\x70\x02" + body[:2]
            elif first == 0xD0 and self._pinged is not None:
                self._pinged = None
            elif first == 0xE0:
                self.reason = body[0] if body else 0
            else:
                with self._answered:
                    self._answers[first] = body
                    self._answered.notify_all()
        if found:
            self.ledger.note_given(self.client_id, found)
            self.got += found
            if not self.hold:
                self._acknowledge([each for each in found if each.qos])
            self.ledger.note_acked(self.client_id, [each.payload for each in found if not each.qos])
        if replies:
            with self._write, contextlib.suppress(OSError):
                self.sock.sendall(replies)
        return data[at:]

    def _delivery(self, first: int, body: bytes) -> Delivery:
        at = 2 + int.from_bytes(body[:2], "big")
        qos, pid = first >> 1 & 3, 0
        if qos:
            pid = int.from_bytes(body[at : at + 2], "big")
            at += 2
        if self.version == V5:
            at += 1 + body[at]  # properties of less than 128 bytes
        found = Delivery(body[at:].decode(), pid, qos, bool(first & 8), time.monotonic())
        if qos:
            self._open[pid] = found
        return found

    def _acknowledge(self, deliveries: list[Delivery]) -> None:
        payloads = [each.payload for each in deliveries]
        with self._write, contextlib.suppress(OSError):
            if self._gone:
                return  # it has said goodbye: nobody would read this
            out = bytearray()
            for each in deliveries:
                self._open.pop(each.pid, None)
                out += (b"\x40\x02" if each.qos == 1 else b"\x50\x02") + struct.pack("!H", each.pid)
            # Noted first: from the moment the server reads it, nobody may be given it any more.
            self.ledger.note_acked(self.client_id, payloads)
            self._unsure += payloads
            if self._pinged is None:
                self._pinged, self._unsure = self._unsure, []
                out += b"\xc0\0"
            self.sock.sendall(out)


class Publisher:
    """Several clients, hence several streams, publishing in turn; every publish is acknowledged."""

    def __init__(self, port: int, name: str, clients: int = 32):
        self.name = name
        self.socks = [socket.create_connection(("127.0.0.1", port), SECONDS) for _ in range(clients)]
        self.sent: list[str] = []
        for n, sock in enumerate(self.socks):
            body = text("MQTT") + b"\x04\x02" + struct.pack("!H", 600) + text(f"{name}-p{n}")
            sock.sendall(packet(0x10, body))
        for sock in self.socks:
            assert self._exactly(sock, 4) == b"\x20\2\0\0"
        self._lock = threading.Lock()

    def publish(self, topic: str, count: int, *, client: int | None = None, qos: int = 1) -> list[str]:
        """`count` messages, durable when this returns; their payloads."""
        with self._lock:
            first = len(self.sent)
            shares: dict[int, list[int]] = {}
            for n in range(first, first + count):
                shares.setdefault(n % len(self.socks) if client is None else client, []).append(n)
                self.sent.append(f"{self.name}/{n % len(self.socks) if client is None else client}/{n}")
            for who, numbers in shares.items():
                bodies = [text(topic) + self._id(n) + self.sent[n].encode() for n in numbers]
                self.socks[who].sendall(b"".join(packet(0x30 | qos << 1, body) for body in bodies))
            self._expect(shares, b"\x40\x02" if qos == 1 else b"\x50\x02")
            if qos == 2:
                for who, numbers in shares.items():
                    self.socks[who].sendall(b"".join(b"\x62\x02" + self._id(n) for n in numbers))
                self._expect(shares, b"\x70\x02")
            return self.sent[first:]

    def send(self, client: int, topic: str, number: int) -> None:
        """Message `number` of `sent`, by this client, to this topic; durable when this returns."""
        with self._lock:
            self.socks[client].sendall(packet(0x32, text(topic) + self._id(number) + self.sent[number].encode()))
            self._expect({client: [number]}, b"\x40\x02")

    @staticmethod
    def _id(number: int) -> bytes:
        return struct.pack("!H", 1 + number % 60_000)

    def _expect(self, shares: dict[int, list[int]], answer: bytes) -> None:
        for who, numbers in shares.items():
            for n in numbers:
                got = self._exactly(self.socks[who], 4)
                assert got == answer + self._id(n), got.hex(" ")

    @staticmethod
    def _exactly(sock: socket.socket, count: int) -> bytes:
        found = b""
        while len(found) < count:
            chunk = sock.recv(count - len(found))
            assert chunk, "the node closed a publisher's connection"
            found += chunk
        return found

    def close(self) -> None:
        for sock in self.socks:
            sock.close()

    def __enter__(self) -> Publisher:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


# -- groups as an operator sees them -----------------------------------------------------------------------------


def path(group: str, verb: str = "") -> str:
    return f"/api/v1/groups/{urllib.parse.quote(group, safe='')}{verb}"


def described(node: Node, group: str) -> dict[str, Any]:
    answer = httpx.get(node.http + path(group), timeout=SECONDS)
    answer.raise_for_status()
    found: dict[str, Any] = answer.json()
    return found


def exists(node: Node, group: str) -> bool:
    return any(row["group"] == group for row in node.get("/api/v1/groups")["groups"])


def owners(whole: dict[str, Any]) -> Counter[str]:
    """How many pieces each member holds and reads."""
    return Counter(row["owner"] for row in whole["streams"] if row["owner"] is not None and row["status"] == "granted")


def settled(node: Node, group: str, members: Iterable[str], seconds: float = SECONDS) -> dict[str, Any]:
    """Waits until exactly these are in the group, every stream is granted, and the loads differ by one at most.

    By topic, slices of one number are one load, whatever their stream.
    """
    wanted, last = sorted(members), {}

    def even() -> dict[str, Any] | None:
        nonlocal last
        last = whole = described(node, group)
        if sorted(m["session"] for m in whole["members"] if m["status"] == "connected") != wanted:
            return None
        held = owners(whole)
        if sum(held.values()) != len(whole["streams"]) or not whole["streams"]:
            return None
        loads = [held[member] for member in wanted]
        if whole["key"] == "topic":
            loads = [len({name.partition("[")[2] for name in streams_of(whole, member)}) for member in wanted]
        return whole if max(loads) - min(loads) <= 1 else None

    give_up = time.monotonic() + seconds
    while (found := even()) is None:
        assert time.monotonic() < give_up, f"{group} is not settled on {wanted}: {json.dumps(last)[:2000]}"
        time.sleep(0.02)
    return found


def streams_of(whole: dict[str, Any], member: str) -> set[str]:
    return {row["stream"] for row in whole["streams"] if row["owner"] == member}


def located(node: Node, filter_text: str) -> dict[str, tuple[str, int]]:
    """Payload -> its stream and offset."""
    found = node.get("/api/v1/messages", filter=filter_text, start="beginning", limit=10_000)["messages"]
    return {row["payload"]: (row["stream"], row["offset"]) for row in found}


def holdfast(node: Node, *words: str) -> str:
    """What `holdfast ...` prints about this node."""
    done = subprocess.run(
        [holdfast_command(), *words],
        env={
            "HOLDFAST_HTTP": node.http.removeprefix("http://"),
            "PATH": "/usr/bin:/bin",
            "COLUMNS": "200",
            "PYTHONPATH": os.environ.get("PYTHONPATH", ""),
        },
        cwd=node.folder,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, f"{' '.join(words)}: {done.stdout}{done.stderr}"
    return done.stdout


Connect = Callable[..., Member]
