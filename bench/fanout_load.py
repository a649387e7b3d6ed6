"""Vehicles and their platform for the fan-out benchmark: raw sockets in processes of their own."""

from __future__ import annotations

import json
import select
import socket
import struct
import time
from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection

from bench.mqtt_load import (
    Load,
    Wrong,
    connect_packet,
    connected,
    exactly,
    expect,
    raise_open_files,
    remaining,
    rendezvous,
    subscribe_packet,
)

VIN = "WVWZZZ1K{:09d}"


def vin(n: int) -> str:
    return VIN.format(n)


@dataclass(frozen=True)
class Took:
    """What the vehicles got."""

    deliveries: int
    seconds: float
    """From the first to the last of them."""
    cpu_seconds: float
    moments: list[float]
    """When each came, by the monotonic clock."""


def vehicles(pipe: Connection, load: Load, count: int, deliveries: int) -> Took:
    """`count` vehicles connect and subscribe, then acknowledge what comes until there were so many deliveries."""
    raise_open_files(count + 100)
    socks = []
    for begin in range(0, count, 200):
        numbers = range(begin, min(begin + 200, count))
        some = [socket.create_connection((load.host, load.port), load.seconds_max) for _ in numbers]
        for n, sock in zip(numbers, some, strict=True):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            topic = f"agent/{vin(n)}/proxy/request/+".encode()
            sock.sendall(connect_packet(vin(n), clean=True) + subscribe_packet(topic, 1))
        for sock in some:
            expect(sock, b"\x20\2\0\0\x90\3\0\1\1", "CONNACK and SUBACK")
        socks += some
    poll, of = select.epoll(), {}
    for sock in socks:
        sock.setblocking(False)
        of[sock.fileno()] = (sock, bytearray())
        poll.register(sock.fileno(), select.EPOLLIN)
    rendezvous(pipe)
    moments: list[float] = []
    give_up, cpu = time.monotonic() + load.seconds_max, time.process_time()
    while len(moments) < deliveries:
        for number, _ in poll.poll(1.0, 512):
            sock, left = of[number]
            chunk = sock.recv(1 << 16)
            if not chunk:
                raise Wrong(f"a vehicle was disconnected after {len(moments)} deliveries")
            left += chunk
            for packet_id in _publishes(left):
                sock.send(b"\x40\2" + packet_id)
                moments.append(time.monotonic())
        if time.monotonic() > give_up:
            raise Wrong(f"{deliveries - len(moments):,} of {deliveries:,} deliveries are missing")
    return Took(len(moments), moments[-1] - moments[0], time.process_time() - cpu, moments)


def _publishes(data: bytearray) -> Iterator[bytes]:
    """Packet ids of whole PUBLISHes, which are taken out."""
    at = 0
    while len(data) - at >= 5:
        length, shift, head = 0, 0, at + 1
        while True:
            byte = data[head]
            length |= (byte & 127) << shift
            shift, head = shift + 7, head + 1
            if byte < 128:
                break
        if len(data) < head + length:
            break
        if data[at] & 0xF0 == 0x30:
            topic = int.from_bytes(data[head : head + 2], "big")
            yield bytes(data[head + 2 + topic : head + 4 + topic])
        at = head + length
    del data[:at]


@dataclass(frozen=True)
class Requested:
    seconds: float
    ids: int
    ack_seconds: list[float]


def requests(pipe: Connection, load: Load, batches: int, ids_each: int, first: int, window: int) -> Requested:
    """Batches of one campaign over MQTT, so many unacknowledged at a time."""
    sock = connected(load, f"{load.run}-platform")
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4 << 20)
    rendezvous(pipe)
    sent_at: dict[int, float] = {}
    acked: list[float] = []
    begin, at = time.monotonic(), first
    while len(acked) < batches:
        while len(sent_at) < window and len(acked) + len(sent_at) < batches:
            number = (len(acked) + len(sent_at)) % 60_000 + 1
            body = {"request_id": "task_bench_1", "ids": [vin(at + n) for n in range(ids_each)], "data": "x" * 1024}
            at += ids_each
            packet = struct.pack("!H", 15) + b"$fanout/request" + struct.pack("!H", number) + json.dumps(body).encode()
            sock.sendall(b"\x32" + remaining(len(packet)) + packet)
            sent_at[number] = time.monotonic()
        answer = exactly(sock, 4)
        if answer[:2] != b"\x40\2":
            raise Wrong(f"PUBACK is {answer.hex(' ')}")
        acked.append(time.monotonic() - sent_at.pop(int.from_bytes(answer[2:], "big")))
    return Requested(time.monotonic() - begin, batches * ids_each, acked)


def heartbeats(pipe: Connection, load: Load, vehicles: int, count: int, template: str) -> float:
    """Publishes on a topic of each vehicle in turn, 1,000 at a time; how many seconds they took."""
    sock = connected(load, f"{load.run}-{template.partition('/')[0]}")
    packets = []
    for n in range(1_000):
        topic = template.format(vin(n * (vehicles // 1_000))).encode()
        body = struct.pack("!H", len(topic)) + topic + struct.pack("!H", n + 1) + b"{}"
        packets.append(b"\x32" + remaining(len(body)) + body)
    data, acks = b"".join(packets), b"".join(b"\x40\2" + struct.pack("!H", n + 1) for n in range(1_000))
    rendezvous(pipe)
    begin = time.monotonic()
    for _ in range(count // 1_000):
        sock.sendall(data)
        expect(sock, acks, "PUBACKs")
    return time.monotonic() - begin
