"""A fleet of MQTT clients in one process: they come, hold their connections, acknowledge, and go when told.

One epoll and a few bytes of state for each client, so that the fleet costs a fraction of what it makes the broker do.
MQTT 3.1.1, durable sessions (clean session 0). A refused client tries again after a second, as clients do; an answer
that is not the one expected ends the run with `Wrong`.
"""

from __future__ import annotations

import errno
import heapq
import random
import select
import socket
import struct
import time
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

from bench.mqtt_load import PUBACK, Load, Wrong, connect_packet, raise_open_files, remaining

PUBLISHERS = 4
PORTS_EACH = 20_000
"""So many connections from one loopback address: the system has ports for some more."""
RETRY_SECONDS = (0.5, 1.5)
REFUSED = (errno.ECONNREFUSED, errno.ECONNRESET, errno.ECONNABORTED, errno.EPIPE)


@dataclass(frozen=True, kw_only=True)
class Fleet:
    host: str
    port: int
    name: str
    count: int
    everyone: bool = False
    """Each is also subscribed to a topic that all are subscribed to."""
    seconds_max: float = 120.0

    def client(self, n: int) -> str:
        return f"{self.name}-{n:06d}"

    @property
    def topic_for_all(self) -> bytes:
        return f"{self.name}/all".encode()

    @property
    def load(self) -> Load:
        """Publishes that concern one client each, every client in turn."""
        topics = -(-self.count // PUBLISHERS)
        return Load(
            host=self.host,
            port=self.port,
            run=self.name,
            publishers=PUBLISHERS,
            topics=topics,
            seconds_max=self.seconds_max,
        )

    def subscribe_packet(self, n: int) -> bytes:
        load = self.load
        own = load.topic(n // load.topics, n % load.topics).rpartition(b"/")[0] + b"/#"
        filters = [own, self.topic_for_all] if self.everyone else [own]
        body = b"\0\1" + b"".join(struct.pack("!H", len(text)) + text + b"\1" for text in filters)
        return b"\x82" + remaining(len(body)) + body

    @property
    def suback(self) -> bytes:
        return b"\x90\4\0\1\1\1" if self.everyone else b"\x90\3\0\1\1"


# -- what a fleet is told, and answers -----------------------------------------------------------------------------


@dataclass(frozen=True)
class Arrive:
    """Everybody connects, at most `at_once` at a time; answered by `Arrived`."""

    at_once: int
    subscribe: bool
    present: bool
    """What CONNACK must say of the session."""


@dataclass(frozen=True)
class Arrived:
    begin: float
    end: float
    each_seconds: Sequence[float]
    """From connect() to the last answer."""
    refused: int
    """How often somebody was refused and came again."""
    cpu_seconds: float


@dataclass(frozen=True)
class Receive:
    """Acknowledge until there were so many deliveries since the last `Arrive`; answered by `Got`."""

    deliveries: int


@dataclass(frozen=True)
class Got:
    end: float
    cpu_seconds: float


@dataclass(frozen=True)
class Leave:
    """DISCONNECT, all at once, and wait for the broker to close; answered by how many were connected."""


class Client:
    __slots__ = ("begin", "data", "number", "sock", "step", "tried")

    def __init__(self, number: int):
        self.number = number
        self.sock: socket.socket | None = None
        self.step = 0
        """0: nothing, 1: TCP, 2: CONNECT sent, 3: SUBSCRIBE sent, 4: there."""
        self.begin = 0.0
        self.data = b""
        self.tried = False
        """It was refused or cut before: then its session may have begun all the same."""


class _Party:
    def __init__(self, pipe: Connection, fleet: Fleet):
        self.pipe, self.fleet = pipe, fleet
        self.poll = select.epoll()
        self.poll.register(pipe.fileno(), select.EPOLLIN)
        self.clients = [Client(n) for n in range(fleet.count)]
        self.connects = [connect_packet(fleet.client(n), clean=False) for n in range(fleet.count)]
        self.subscribes = [fleet.subscribe_packet(n) for n in range(fleet.count)]
        self.by_socket: dict[int, Client] = {}
        self.order: Arrive | None = None
        self.again: list[tuple[float, int]] = []
        self.each: list[float] = []
        self.waiting = self.next = self.refused = self.deliveries = 0

    # -- commands --------------------------------------------------------------------------------------------

    def run(self) -> None:
        self.pipe.send("ready")
        while True:
            self.turn(10.0)
            if not self.pipe.poll():
                continue
            begin, cpu = time.monotonic(), time.process_time()
            order = self.pipe.recv()
            match order:
                case Arrive():
                    self.pipe.send(self.arrive(order, begin, cpu))
                case Receive(deliveries):
                    self.until(lambda: self.deliveries >= deliveries, f"deliveries, {deliveries:,} expected")
                    self.pipe.send(Got(time.monotonic(), time.process_time() - cpu))
                case Leave():
                    self.pipe.send(self.leave())
                case _:
                    return

    def arrive(self, order: Arrive, begin: float, cpu: float) -> Arrived:
        for client in list(self.by_socket.values()):
            self.forget(client)
        for client in self.clients:
            client.tried = False
        self.order, self.each, self.again = order, [], []
        self.waiting = self.next = self.refused = self.deliveries = 0
        self.until(self.all_there, "arrivals")
        return Arrived(begin, time.monotonic(), self.each, self.refused, time.process_time() - cpu)

    def all_there(self) -> bool:
        order = self.order
        assert order is not None
        now = time.monotonic()
        while self.again and self.again[0][0] <= now and self.waiting < order.at_once:
            self.connect(self.clients[heapq.heappop(self.again)[1]])
        for _ in range(50):  # some, then what has come is looked at again
            if self.next == len(self.clients) or self.waiting >= order.at_once:
                break
            self.next += 1
            self.connect(self.clients[self.next - 1])
        return len(self.each) == len(self.clients)

    def leave(self) -> int:
        clients = list(self.by_socket.values())
        for client in clients:
            assert client.sock is not None
            client.sock.send(b"\xe0\0")
        self.until(lambda: not self.by_socket, "sockets closed by the broker")
        return len(clients)

    def until(self, done: Any, what: str) -> None:
        give_up = time.monotonic() + self.fleet.seconds_max
        while not done():
            if time.monotonic() > give_up:
                raise Wrong(
                    f"{what}: only {len(self.each):,} arrivals, {self.deliveries:,} deliveries and"
                    f" {len(self.by_socket):,} open sockets after {self.fleet.seconds_max} s"
                )
            self.turn(0.0 if self.order is not None and self._may_connect(self.order) else 0.05)

    def _may_connect(self, order: Arrive) -> bool:
        return self.next < len(self.clients) and self.waiting < order.at_once

    # -- sockets ---------------------------------------------------------------------------------------------

    def turn(self, seconds: float) -> None:
        for number, event in self.poll.poll(seconds, 512):
            client = self.by_socket.get(number)
            if client is None:
                continue
            if client.step == 1 and event & (select.EPOLLOUT | select.EPOLLERR):
                self.say_connect(client)
            elif event & ~select.EPOLLOUT:
                self.hear(client)

    def connect(self, client: Client) -> None:
        client.begin = client.begin or time.monotonic()
        client.sock = sock = socket.socket(socket.AF_INET, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        if self.fleet.count > PORTS_EACH:
            sock.setsockopt(socket.SOL_IP, 24, 1)  # IP_BIND_ADDRESS_NO_PORT: a port is chosen with its peer
            sock.bind((f"127.0.0.{2 + client.number // PORTS_EACH}", 0))
        self.waiting += 1
        client.step, client.data = 1, b""
        self.by_socket[sock.fileno()] = client
        if sock.connect_ex((self.fleet.host, self.fleet.port)) in (0, errno.EINPROGRESS):
            self.say_connect(client, first=True)
        else:
            self.try_again(client)

    def say_connect(self, client: Client, first: bool = False) -> None:
        assert client.sock is not None
        try:
            client.sock.send(self.connects[client.number])
        except BlockingIOError:
            self.poll.register(client.sock.fileno(), select.EPOLLIN | select.EPOLLOUT)
            return
        except OSError as error:
            if error.errno not in REFUSED:
                raise
            self.try_again(client)
            return
        client.step = 2
        if first:
            self.poll.register(client.sock.fileno(), select.EPOLLIN)
        else:
            self.poll.modify(client.sock.fileno(), select.EPOLLIN)

    def forget(self, client: Client) -> None:
        assert client.sock is not None
        del self.by_socket[client.sock.fileno()]
        client.sock.close()
        client.sock, client.step, client.begin = None, 0, 0.0

    def try_again(self, client: Client) -> None:
        begin = client.begin
        self.forget(client)
        client.begin, client.tried = begin, True
        self.waiting -= 1
        self.refused += 1
        heapq.heappush(self.again, (time.monotonic() + random.uniform(*RETRY_SECONDS), client.number))

    def hear(self, client: Client) -> None:
        sock, order = client.sock, self.order
        assert sock is not None
        assert order is not None
        try:
            data = sock.recv(1 << 16)
        except ConnectionError:
            data = b""
        if not data:
            self.forget(client) if client.step == 4 else self.try_again(client)
            return
        if client.data:
            data = client.data + data
        if client.step == 2:
            if len(data) < 4:
                client.data = data
                return
            if data[3]:
                self.try_again(client)
                return
            if data[:2] != b"\x20\2" or (data[2] != order.present and not (client.tried and data[2])):
                raise Wrong(f"{self.fleet.client(client.number)}: CONNACK is {data[:4].hex(' ')}")
            data = data[4:]
            if order.subscribe:
                sock.send(self.subscribes[client.number])
                client.step = 3
            else:
                self.there(client)
        if client.step == 3 and data:
            suback = self.fleet.suback
            if len(data) >= len(suback):
                if not data.startswith(suback):
                    raise Wrong(f"{self.fleet.client(client.number)}: SUBACK is {data.hex(' ')}")
                data = data[len(suback) :]
                self.there(client)
        client.data = self.acknowledge(sock, data) if client.step == 4 and data else data

    def there(self, client: Client) -> None:
        client.step = 4
        self.waiting -= 1
        self.each.append(time.monotonic() - client.begin)

    def acknowledge(self, sock: socket.socket, data: bytes) -> bytes:
        """PUBACK for every whole PUBLISH; what is left over."""
        acks, at, size = b"", 0, len(data)
        while size - at >= 2:
            length, shift, head = 0, 0, at + 1
            while head < size:
                digit = data[head]
                length |= (digit & 127) << shift
                shift, head = shift + 7, head + 1
                if digit < 128:
                    break
            else:
                break
            if head + length > size:
                break
            if data[at] >> 4 == 3:
                topic = head + 2 + (data[head] << 8 | data[head + 1])
                acks += PUBACK + data[topic : topic + 2]
                self.deliveries += 1
            at = head + length
        if acks:
            sock.send(acks)
        return data[at:]


def take_part(pipe: Connection, fleet: Fleet) -> None:
    """A fleet, until it is told something else than what it knows."""
    raise_open_files(fleet.count + 100)
    _Party(pipe, fleet).run()
