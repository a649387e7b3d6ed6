"""Load on any MQTT broker from raw sockets, cheap enough not to be what is measured.

Packets of one run all have the same length, so a socket's bytes are a table: publishes are slices of a ring built
once (with the sequence numbers written anew each lap), acknowledgements are compared with the bytes they must be,
and deliveries are checked column by column. Every message carries who sent it, its number and when it was sent:

    payload = time sent (ns) | publisher | number | random bytes

A delivery that is missing, repeated or out of its publisher's order ends the run with `Wrong`; so does an
acknowledgement that is not the next one, and whatever takes longer than it may. MQTT 3.1.1 throughout.
"""

from __future__ import annotations

import multiprocessing
import random
import resource
import select
import socket
import struct
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

RING = 10_000
STAMP = struct.Struct("!QHI")
KEEP_ALIVE_SECONDS = 600
PUBACK = b"\x40\x02"


class Wrong(Exception):
    """The broker did not do what it must; the figure counts for nothing."""


@dataclass(frozen=True, kw_only=True)
class Load:
    """What is published in one run, and where."""

    host: str
    port: int
    run: str
    """Keeps runs against one broker apart: the first topic level, always of one length."""
    publishers: int = 4
    topics: int = 10
    """Distinct topics of each publisher."""
    payload_bytes: int = 200
    seconds_max: float = 120.0
    """After this, whatever is still missing is `Wrong`."""

    def topic(self, publisher: int, number: int) -> bytes:
        return f"{self.run}/{publisher:02d}/{number % self.topics:04d}/telemetry".encode()

    @property
    def filter(self) -> bytes:
        return f"{self.run}/#".encode()


@dataclass(frozen=True)
class Layout:
    """Where things are in a PUBLISH of one run at one QoS."""

    head: bytes
    pid: int
    stamp: int
    size: int

    @classmethod
    def of(cls, load: Load, qos: int) -> Layout:
        topic = len(load.topic(0, 0))
        length = 2 + topic + (2 if qos else 0) + load.payload_bytes
        head = bytes([0x30 | qos << 1]) + remaining(length)
        pid = len(head) + 2 + topic
        return cls(head, pid, pid + (2 if qos else 0), len(head) + length)


# -- packets ----------------------------------------------------------------------------------------------------


def remaining(length: int) -> bytes:
    out = bytearray()
    while True:
        length, digit = divmod(length, 128)
        out.append(digit | (128 if length else 0))
        if not length:
            return bytes(out)


def connect_packet(client: str, clean: bool) -> bytes:
    name = client.encode()
    body = b"\0\4MQTT\4" + bytes([2 if clean else 0]) + struct.pack("!HH", KEEP_ALIVE_SECONDS, len(name)) + name
    return b"\x10" + remaining(len(body)) + body


def subscribe_packet(topic_filter: bytes, qos: int) -> bytes:
    body = b"\0\1" + struct.pack("!H", len(topic_filter)) + topic_filter + bytes([qos])
    return b"\x82" + remaining(len(body)) + body


def connected(load: Load, client: str, *, clean: bool = True, present: bool | None = None) -> socket.socket:
    """A connection whose CONNECT was accepted, with a session as expected."""
    sock = socket.create_connection((load.host, load.port), load.seconds_max)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.sendall(connect_packet(client, clean))
    answer = exactly(sock, 4)
    if answer[:2] != b"\x20\2" or answer[3] != 0:
        raise Wrong(f"{client}: CONNACK is {answer.hex(' ')}")
    if present is not None and bool(answer[2]) != present:
        raise Wrong(f"{client}: session present is {bool(answer[2])}")
    return sock


def subscribe(sock: socket.socket, topic_filter: bytes, qos: int) -> None:
    sock.sendall(subscribe_packet(topic_filter, qos))
    expect(sock, b"\x90\3\0\1" + bytes([qos]), "SUBACK")


def disconnect(sock: socket.socket) -> None:
    sock.sendall(b"\xe0\0")
    sock.close()


def exactly(sock: socket.socket, count: int) -> bytes:
    found = bytearray()
    while len(found) < count:
        chunk = sock.recv(count - len(found))
        if not chunk:
            raise Wrong(f"the broker closed the connection after {found.hex(' ')!r}")
        found += chunk
    return bytes(found)


def expect(sock: socket.socket, answer: bytes, what: str) -> None:
    got = exactly(sock, len(answer))
    if got != answer:
        raise Wrong(f"{what} is {got.hex(' ')}, not {answer.hex(' ')}")


# -- publishing -------------------------------------------------------------------------------------------------


class Ring:
    """A publisher's packets, ready to send, and the acknowledgements that must come back."""

    def __init__(self, load: Load, publisher: int):
        self.layout = layout = Layout.of(load, 1)
        chance = random.Random(publisher)
        packets = []
        for number in range(RING):
            topic = load.topic(publisher, number)
            filling = chance.randbytes(load.payload_bytes - STAMP.size)
            stamp = STAMP.pack(0, publisher, number)
            packets.append(
                layout.head + struct.pack("!H", len(topic)) + topic + struct.pack("!H", number + 1) + stamp + filling
            )
        self.bytes = bytearray(b"".join(packets))
        self.size = len(self.bytes)
        self.view = memoryview(self.bytes)
        self.acks = b"".join(PUBACK + struct.pack("!H", number + 1) for number in range(RING))
        table = np.frombuffer(self.bytes, np.uint8).reshape(RING, layout.size)
        at = layout.stamp + STAMP.size - 4
        self._numbers = table[:, at : at + 4]

    def lap(self, lap: int) -> None:
        """Number the packets for another time round; the last time's are all in the kernel's hands."""
        numbers = np.arange(lap * RING, (lap + 1) * RING, dtype=">u4")
        self._numbers[:] = numbers.view(np.uint8).reshape(RING, 4)


class Publisher:
    """One connection that keeps up to `window` publishes unacknowledged until `count` are acknowledged."""

    def __init__(self, load: Load, number: int, count: int, window: int):
        if not 0 < window <= RING:
            raise ValueError(f"a window is 1 to {RING}, not {window}")
        self.ring = Ring(load, number)
        self.window, self.count = window, count
        self.sent_bytes = self.acked_bytes = 0
        self.ack_bytes_goal = 4 * count
        self.blocked = False
        self.sock = connected(load, f"{load.run}-p{number}")
        self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 20)
        self.sock.setblocking(False)

    @property
    def done(self) -> bool:
        return self.acked_bytes == self.ack_bytes_goal

    def send(self) -> None:
        ring = self.ring
        allowed = min(self.count, self.acked_bytes // 4 + self.window) * ring.layout.size
        self.blocked = False
        while self.sent_bytes < allowed:
            lap, at = divmod(self.sent_bytes, ring.size)
            if at == 0:
                ring.lap(lap)
            try:
                self.sent_bytes += self.sock.send(ring.view[at : at + allowed - self.sent_bytes])
            except BlockingIOError:
                self.blocked = True
                return

    def receive(self) -> None:
        chunk = self.sock.recv(1 << 16)
        if not chunk:
            raise Wrong("the broker closed a publisher's connection")
        acks, at = self.ring.acks, self.acked_bytes % len(self.ring.acks)
        wanted = acks[at : at + len(chunk)]
        if len(wanted) < len(chunk):
            wanted += acks[: len(chunk) - len(wanted)]
        if chunk != wanted or self.acked_bytes + len(chunk) > self.ack_bytes_goal:
            raise Wrong(f"acknowledgements are not the next ones: {first_difference(chunk, wanted)}")
        self.acked_bytes += len(chunk)


def first_difference(got: bytes, wanted: bytes) -> str:
    at = next((n for n, (a, b) in enumerate(zip(got, wanted, strict=False)) if a != b), 0) // 4 * 4
    return f"{got[at : at + 8].hex(' ')} instead of {wanted[at : at + 8].hex(' ')}"


@dataclass(frozen=True)
class Published:
    count: int
    begin: float
    end: float
    cpu_seconds: float

    @property
    def rate(self) -> float:
        return self.count / (self.end - self.begin)


def publish(pipe: Connection, load: Load, count: int, window: int) -> Published:
    """All publishers flat out: `count` acknowledged publishes in all, verified one by one."""
    shares = [count // load.publishers + (n < count % load.publishers) for n in range(load.publishers)]
    publishers = [Publisher(load, n, share, window) for n, share in enumerate(shares)]
    by_socket = {each.sock.fileno(): each for each in publishers}
    poll = select.epoll()
    for number in by_socket:
        poll.register(number, select.EPOLLIN)
    rendezvous(pipe)
    begin, cpu = time.monotonic(), time.process_time()
    give_up = begin + load.seconds_max
    open_ones = sum(not each.done for each in publishers)
    for number, each in by_socket.items():
        _push(poll, number, each)
    while open_ones:
        events = poll.poll(1.0)
        if time.monotonic() > give_up:
            acked = sum(each.acked_bytes for each in publishers) // 4
            raise Wrong(f"{acked:,} of {count:,} publishes acknowledged in {load.seconds_max} s")
        for number, event in events:
            each = by_socket[number]
            if event & ~select.EPOLLOUT:
                each.receive()
                open_ones -= each.done
            _push(poll, number, each)
    found = Published(count, begin, time.monotonic(), time.process_time() - cpu)
    for each in publishers:
        each.sock.setblocking(True)
        disconnect(each.sock)
    return found


def _push(poll: select.epoll, number: int, each: Publisher) -> None:
    was = each.blocked
    each.send()
    if each.blocked != was:
        poll.modify(number, select.EPOLLIN | (select.EPOLLOUT if each.blocked else 0))


@dataclass(frozen=True)
class Paced:
    count: int
    seconds: float
    ack_seconds: Sequence[float]
    """From the moment a publish was handed to the kernel to its acknowledgement, in order."""
    late_seconds: Sequence[float]
    """How long after its time each publish left: what the generator itself adds."""
    cpu_seconds: float


def publish_paced(pipe: Connection, load: Load, count: int, per_second: float) -> Paced:
    """`per_second` in all, evenly spaced, the publishers taking turns, whether or not acknowledgements come."""
    rings = [Ring(load, n) for n in range(load.publishers)]
    socks = [connected(load, f"{load.run}-p{n}") for n in range(load.publishers)]
    waiting: list[deque[float]] = [deque() for _ in socks]
    acked = [0] * len(socks)
    index = {sock: n for n, sock in enumerate(socks)}
    layout = rings[0].layout
    for sock in socks:
        sock.setblocking(False)
    ack_seconds: list[float] = []
    late: list[float] = []
    rendezvous(pipe)
    begin, cpu = time.monotonic(), time.process_time()
    give_up = begin + load.seconds_max
    sent = 0
    while len(ack_seconds) < count:
        now = time.monotonic()
        while sent < count and begin + sent / per_second <= now:
            number, who = divmod(sent, load.publishers)
            at = number % RING * layout.size
            moment = time.monotonic()
            STAMP.pack_into(rings[who].bytes, at + layout.stamp, int(moment * 1e9), who, number)
            if socks[who].send(rings[who].view[at : at + layout.size]) != layout.size:
                raise Wrong(f"the broker does not keep up with {per_second:,.0f} publishes/s")
            waiting[who].append(moment)
            late.append(moment - begin - sent / per_second)
            sent += 1
        pause = begin + sent / per_second - time.monotonic() if sent < count else 0.5
        for sock in select.select(socks, [], [], max(0.0, pause))[0]:
            who = index[sock]
            chunk = sock.recv(1 << 16)
            moment = time.monotonic()
            for at in range(0, len(chunk), 4):
                place = acked[who] % RING * 4
                if chunk[at : at + 4] != rings[who].acks[place : place + 4] or not waiting[who]:
                    raise Wrong(f"acknowledgement {chunk[at : at + 4].hex(' ')} is not the next one")
                ack_seconds.append(moment - waiting[who].popleft())
                acked[who] += 1
        if time.monotonic() > give_up:
            raise Wrong(f"{len(ack_seconds):,} of {count:,} publishes acknowledged in {load.seconds_max} s")
    seconds, cpu = time.monotonic() - begin, time.process_time() - cpu
    for sock in socks:
        sock.setblocking(True)
        disconnect(sock)
    return Paced(count, seconds, ack_seconds, late, cpu)


# -- receiving --------------------------------------------------------------------------------------------------


@dataclass
class Reader:
    """Checks one subscriber's bytes and says what to acknowledge; remembers each publisher's next number."""

    load: Load
    qos: int
    stamps: list[Any] | None = None
    """Where (time received, times sent) go, if wanted."""
    gaps: bool = False
    """Others are given some of the messages: those that come here need only be in order."""
    count: int = 0
    layout: Layout = field(init=False)
    next_number: list[int] = field(init=False)

    def __post_init__(self) -> None:
        self.layout = Layout.of(self.load, self.qos)
        self.next_number = [0] * self.load.publishers

    def take(self, data: bytearray | bytes, count: int) -> bytes:
        """Checks `count` whole packets at the start of `data`; the acknowledgements they ask for."""
        self.count += count
        return self._few(data, count) if count < 12 else self._many(data, count)

    def _few(self, data: bytearray | bytes, count: int) -> bytes:
        layout, acks, sent = self.layout, bytearray(), []
        head, pid = layout.head, layout.pid
        for at in range(0, count * layout.size, layout.size):
            if data[at : at + len(head)] != head:
                raise Wrong(f"not the PUBLISH expected: {bytes(data[at : at + 40]).hex(' ')}")
            when, who, number = STAMP.unpack_from(data, at + layout.stamp)
            expected = self.next_number[who] if who < len(self.next_number) else -1
            if number != expected and (not self.gaps or number < expected or expected < 0):
                self._wrong_number(who, number)
            self.next_number[who] = number + 1
            if self.qos:
                acks += PUBACK + data[at + pid : at + pid + 2]
            sent.append(when)
        if self.stamps is not None:
            self.stamps.append((time.monotonic_ns(), sent))
        return bytes(acks)

    def _many(self, data: bytearray | bytes, count: int) -> bytes:
        layout = self.layout
        table = np.frombuffer(data, np.uint8, count * layout.size).reshape(count, layout.size)
        head = np.frombuffer(layout.head, np.uint8)
        if (table[:, : len(head)] != head).any():
            bad = int((table[:, : len(head)] != head).any(axis=1).argmax())
            raise Wrong(f"not the PUBLISH expected: {table[bad, :40].tobytes().hex(' ')}")
        stamps = table[:, layout.stamp : layout.stamp + STAMP.size].tobytes()
        columns = np.frombuffer(stamps, np.dtype([("when", ">u8"), ("who", ">u2"), ("number", ">u4")]))
        who, numbers = columns["who"].astype(np.intp), columns["number"].astype(np.int64)
        checked = 0
        for publisher, expected in enumerate(self.next_number):
            mine = numbers[who == publisher]
            if len(mine):
                if self.gaps:
                    off = np.diff(mine, prepend=expected - 1) < 1
                else:
                    off = mine != np.arange(expected, expected + len(mine))
                if off.any():
                    self._wrong_number(publisher, int(mine[off.argmax()]))
                self.next_number[publisher] = int(mine[-1]) + 1
                checked += len(mine)
        if checked != count:
            raise Wrong(f"deliveries from publishers that are not ours: {sorted(set(who.tolist()))}")
        if self.stamps is not None:
            self.stamps.append((time.monotonic_ns(), columns["when"].astype(np.int64)))
        if not self.qos:
            return b""
        acks = np.empty((count, 4), np.uint8)
        acks[:, 0], acks[:, 1] = PUBACK
        acks[:, 2:] = table[:, layout.pid : layout.pid + 2]
        return acks.tobytes()

    def _wrong_number(self, who: int, number: int) -> None:
        expected = self.next_number[who] if who < len(self.next_number) else None
        word = "out of order or missing" if expected is None or number > expected else "delivered again"
        raise Wrong(f"publisher {who}: message {number} came where {expected} is next ({word})")


@dataclass(frozen=True)
class Received:
    count: int
    begin: float
    """When the subscriber was ready; for a reconnecting one, just before its CONNECT."""
    end: float
    latency_seconds: Sequence[float]
    """From the moment a publish was handed to the kernel to its delivery; empty unless asked for."""
    cpu_seconds: float


def receive(
    pipe: Connection, load: Load, count: int, client: str, *, resume: bool = False, timed: bool = False
) -> Received:
    """One QoS 1 subscriber to everything of the run, acknowledging all: ends with the `count`th delivery.

    With `resume` it reconnects to the session left behind by `leave_session` when told to go.
    """
    stamps: list[Any] = []
    reader = Reader(load, 1, stamps if timed else None)
    if not resume:
        sock = connected(load, client)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 20)
        subscribe(sock, load.filter, 1)
    rendezvous(pipe)
    begin, cpu = time.monotonic(), time.process_time()
    if resume:
        sock = connected(load, client, clean=False, present=True)
    give_up = begin + load.seconds_max
    sock.settimeout(5.0)
    buffer = bytearray(1 << 20)
    view = memoryview(buffer)
    size, filled = reader.layout.size, 0
    while reader.count < count:
        if time.monotonic() > give_up:
            raise Wrong(f"{reader.count:,} of {count:,} deliveries in {load.seconds_max} s")
        try:
            got = sock.recv_into(view[filled:])
        except TimeoutError:
            continue
        if not got:
            raise Wrong(f"the broker closed the subscriber's connection after {reader.count:,} deliveries")
        filled += got
        packets = filled // size
        if packets:
            sock.sendall(reader.take(buffer, packets))
            rest = filled - packets * size
            view[:rest] = view[packets * size : filled]
            filled = rest
    end = time.monotonic()
    cpu = time.process_time() - cpu
    if reader.count != count or filled:
        raise Wrong(f"{reader.count:,} deliveries of {count:,}, and {filled} more bytes")
    expect_silence(sock)
    disconnect(sock)
    return Received(count, begin, end, latencies(stamps), cpu)


def expect_silence(sock: socket.socket) -> None:
    """Nothing comes after the last: a PINGREQ is answered with a PINGRESP and that is all."""
    sock.sendall(b"\xc0\0")
    expect(sock, b"\xd0\0", "what follows the last delivery")


def latencies(stamps: list[Any]) -> list[float]:
    return [(received - int(sent)) / 1e9 for received, many in stamps for sent in many]


def leave_session(load: Load, client: str) -> None:
    """A durable session that subscribes to everything of the run and goes away."""
    disconnect(connected(load, client, clean=True))
    sock = connected(load, client, clean=False, present=False)
    subscribe(sock, load.filter, 1)
    disconnect(sock)


def end_session(load: Load, client: str) -> None:
    disconnect(connected(load, client, clean=True))


# -- many connections -------------------------------------------------------------------------------------------


def raise_open_files(wanted: int) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < wanted:
        limit = max(wanted, hard) if hard != resource.RLIM_INFINITY else hard
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, limit))
        except (ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
            if hard < wanted:
                raise Wrong(f"needs {wanted} open files; this system allows {hard}") from None


@dataclass(frozen=True)
class Fanned:
    deliveries: int
    begin: float
    end: float
    one_seconds: Sequence[float]
    """One message at a time: from its publish to the last subscriber's delivery."""
    cpu_seconds: float


def fan_out(pipe: Connection, load: Load, subscribers: int, qos: int, flat_out: int, one_by_one: int) -> Fanned:
    """`subscribers` connections that all want the one publisher's messages.

    First `one_by_one` messages alone, then `flat_out` as another process publishes them: the run's numbers go on
    from one to the other only within a `load`, so the single ones have a run of their own, `load.run` reversed.
    """
    raise_open_files(subscribers + 100)
    single = Load(**{**vars(load), "run": load.run[::-1]})
    socks = [connected(load, f"{load.run}-s{n}") for n in range(subscribers)]
    for sock in socks:
        subscribe(sock, single.filter, qos)
        subscribe(sock, load.filter, qos)
    hub = _Hub(socks, load.seconds_max)
    cpu = time.process_time()
    one_seconds = _one_by_one(single, hub, qos, one_by_one)
    rendezvous(pipe)
    begin = time.monotonic()
    hub.run([Reader(load, qos) for _ in socks], flat_out)
    end = time.monotonic()
    cpu = time.process_time() - cpu
    for sock in socks:
        sock.setblocking(True)
        expect_silence(sock)
        disconnect(sock)
    return Fanned(flat_out * subscribers, begin, end, one_seconds, cpu)


def _one_by_one(load: Load, hub: _Hub, qos: int, count: int) -> list[float]:
    publisher = connected(load, f"{load.run}-one")
    ring = Ring(load, 0)
    readers = [Reader(load, qos) for _ in hub.socks]
    found = []
    for number in range(count):
        at = number % RING * ring.layout.size
        begin = time.monotonic()
        publisher.sendall(ring.view[at : at + ring.layout.size])
        hub.run(readers, number + 1, acks_later=True)
        found.append(time.monotonic() - begin)
        hub.flush()
        expect(publisher, ring.acks[number % RING * 4 :][:4], "PUBACK")
    disconnect(publisher)
    return found


class _Hub:
    """Many subscribers' sockets in one loop."""

    def __init__(self, socks: list[socket.socket], seconds_max: float):
        self.socks, self.seconds_max = socks, seconds_max
        self.poll = select.epoll()
        self.index = {sock.fileno(): n for n, sock in enumerate(socks)}
        self.left = [b""] * len(socks)
        self.later: list[tuple[socket.socket, bytes]] = []
        for sock in socks:
            sock.setblocking(False)
            self.poll.register(sock.fileno(), select.EPOLLIN)

    def run(self, readers: list[Reader], count: int, acks_later: bool = False) -> None:
        """Until every reader has seen `count`."""
        give_up = time.monotonic() + self.seconds_max
        size = readers[0].layout.size
        missing = sum(count - reader.count for reader in readers)
        while missing:
            for number, _ in self.poll.poll(1.0, 256):
                n = self.index[number]
                sock, reader = self.socks[n], readers[n]
                chunk = sock.recv(1 << 18)
                if not chunk:
                    raise Wrong(f"the broker closed subscriber {n}'s connection after {reader.count} deliveries")
                data = self.left[n] + chunk if self.left[n] else chunk
                packets = len(data) // size
                acks = reader.take(data, packets) if packets else b""
                self.left[n] = data[packets * size :]
                missing -= packets
                if reader.count > count:
                    raise Wrong(f"subscriber {n} has {reader.count} deliveries of {count}")
                if acks and acks_later:
                    self.later.append((sock, acks))
                elif acks and sock.send(acks) != len(acks):
                    raise Wrong("the broker does not read acknowledgements")
            if time.monotonic() > give_up:
                raise Wrong(f"{missing:,} of {count * len(readers):,} deliveries missing after {self.seconds_max} s")

    def flush(self) -> None:
        for sock, acks in self.later:
            sock.send(acks)
        self.later.clear()


def hold_idle(pipe: Connection, load: Load, count: int) -> int:
    """Connects `count` clients and lets them be: a rendezvous when all are there, one when each has subscribed to
    a topic of its own, and at the end all of them are asked for a sign of life. How many gave it."""
    raise_open_files(count + 100)
    socks = []
    for begin in range(0, count, 100):  # a fleet coming up: a hundred at a time
        some = [
            socket.create_connection((load.host, load.port), load.seconds_max) for _ in range(min(100, count - begin))
        ]
        for n, sock in enumerate(some):
            sock.sendall(connect_packet(f"{load.run}-i{begin + n}", clean=True))
        for sock in some:
            expect(sock, b"\x20\2\0\0", "CONNACK")
        socks += some
    rendezvous(pipe)
    for n, sock in enumerate(socks):
        sock.sendall(subscribe_packet(f"{load.run}/{n}".encode(), 1))
    for sock in socks:
        expect(sock, b"\x90\3\0\1\1", "SUBACK")
    rendezvous(pipe)
    for sock in socks:
        sock.sendall(b"\xc0\0")
    for sock in socks:
        expect(sock, b"\xd0\0", "PINGRESP")
    for sock in socks:
        disconnect(sock)
    return len(socks)


# -- processes --------------------------------------------------------------------------------------------------


def rendezvous(pipe: Connection) -> None:
    """Say that everything is in place; go on when told."""
    pipe.send("ready")
    pipe.recv()


class Role:
    """One of the functions above, in a process of its own."""

    def __init__(self, work: Callable[..., Any], *arguments: Any, **options: Any):
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_run, args=(theirs, work, arguments, options), daemon=True)
        self._process.start()
        theirs.close()

    def await_ready(self, seconds: float = 180.0) -> None:
        self._answer(seconds)

    def go(self) -> None:
        self._pipe.send("go")

    def ask(self, order: Any, seconds: float = 300.0) -> Any:
        """Of a role that takes orders: what it answers."""
        self._pipe.send(order)
        return self._answer(seconds)

    def result(self, seconds: float = 300.0) -> Any:
        try:
            return self._answer(seconds)
        finally:
            self.close()

    def _answer(self, seconds: float) -> Any:
        if not self._pipe.poll(seconds):
            self.close()
            raise Wrong(f"no answer from a load generator within {seconds} s")
        try:
            answer = self._pipe.recv()
        except EOFError:
            raise Wrong("a load generator ended without an answer") from None
        if isinstance(answer, Wrong):
            self.close()
            raise answer
        return answer

    def close(self) -> None:
        self._process.kill()
        self._process.join()


def _run(pipe: Connection, work: Callable[..., Any], arguments: tuple[Any, ...], options: dict[str, Any]) -> None:
    try:
        pipe.send(work(pipe, *arguments, **options))
    except Wrong as error:
        pipe.send(error)
    except (OSError, TimeoutError) as error:
        pipe.send(Wrong(f"{type(error).__name__}: {error}"))
