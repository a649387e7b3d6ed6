"""Coverage-guided fuzzing of whole connections: `python tests/fuzz/fuzz_connection.py -runs=100000`.

A node on a store in memory, in this process; a connection whose socket is a list. Whatever the bytes and however
they are cut: the connection goes on or ends with whole packets, the node finds no fault of its own, forgets
the connection when it is gone, and answers the next one.

The first byte of an input says how: the version, whether a CONNECT comes first, and how the rest is cut.
"""

from __future__ import annotations

import asyncio
import logging
import sys
from typing import Any

import atheris

with atheris.instrument_imports(include=["holdfast.mqtt", "holdfast.runtime.connection", "holdfast.sessions"]):
    from holdfast.mqtt import codec
    from holdfast.mqtt import packets as p
    from holdfast.mqtt.connection import State
    from holdfast.runtime.connection import Connection
    from holdfast.runtime.node import Node
    from holdfast.settings import LimitSettings, LogSettings, Settings

WAIT_SECONDS = 5.0
PING, PONG = b"\xc0\x00", b"\xd0\x00"


class Faults(logging.Handler):
    """Whatever the node itself calls an error."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.found: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.found.append(self.format(record))


class Wire:
    """A socket's transport, as far as a connection uses it."""

    def __init__(self) -> None:
        self.out = bytearray()
        self.closed = self.ended = False

    def write(self, data: bytes) -> None:
        if self.ended:
            raise AssertionError(f"written after the end: {data!r}")
        self.out += data

    def can_write_eof(self) -> bool:
        return True

    def write_eof(self) -> None:
        self.ended = True

    def close(self) -> None:
        self.ended = self.closed = True

    abort = close

    def is_closing(self) -> bool:
        return self.closed

    def get_write_buffer_size(self) -> int:
        return 0

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return ("127.0.0.1", 1) if name == "peername" else default

    def pause_reading(self) -> None:
        pass

    def resume_reading(self) -> None:
        pass

    def set_write_buffer_limits(self, **_: int) -> None:
        pass


class World:
    """One loop and one node for all inputs."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        asyncio.set_event_loop(self.loop)
        self.faults = Faults()
        logging.getLogger().addHandler(self.faults)
        logging.getLogger("holdfast").setLevel("ERROR")
        self.node: Node = self.loop.run_until_complete(self._start())

    async def _start(self) -> Node:
        limits = LimitSettings(packet_bytes_max=4096, subscriptions_max=20)
        node = Node(Settings(store="memory:", limits=limits, log=LogSettings(shards=2)))
        await node.start()
        return node

    def open(self) -> tuple[Connection, Wire]:
        connection, wire = Connection(self.node.front), Wire()
        connection.connection_made(wire)
        return connection, wire

    async def settled(self, connection: Connection) -> None:
        """Until it has parsed all it was given, and every answer that waits for a commit is out."""
        give_up = self.loop.time() + WAIT_SECONDS
        while not connection.closed and connection.machine.holds:
            if self.loop.time() > give_up:
                raise AssertionError("it holds still for ever")
            await asyncio.sleep(0)
        await asyncio.wait_for(self.node.ingest.drained(), WAIT_SECONDS)

    async def life(self, pieces: list[bytes]) -> bytes:
        connection, wire = self.open()
        for piece in pieces:
            if connection.closed:
                break
            connection.data_received(piece)
            if len(piece) % 2:  # sometimes the next piece comes before the last one was dealt with
                await self.settled(connection)
        await self.settled(connection)
        if not (
            connection.closed or wire.closed or connection.machine.waiting or connection.machine.state is State.NEW
        ):
            wire.out.clear()
            connection.data_received(PING)
            await self.settled(connection)
            if not connection.closed and not bytes(wire.out).endswith(PONG):
                raise AssertionError(f"a ping was answered with {bytes(wire.out)!r}")
        connection.connection_lost(None)
        if connection in self.node.front.sockets or connection in self.node.sessions.connections.values():
            raise AssertionError("the node still knows a connection that is gone")
        return bytes(wire.out)


def whole_packets(out: bytes) -> None:
    at = 0
    while at < len(out):
        found = codec.frame(out, at)
        if found is None:
            raise AssertionError(f"half a packet was sent: {out[at:]!r}")
        at = found[2]


def cut(data: bytes, how: int) -> list[bytes]:
    if not how:
        return [data]
    step = (0, 1, 3, 17)[how]
    return [data[at : at + step] for at in range(0, len(data), step)]


WORLD: World


def one_input(data: bytes) -> None:
    if not data:
        return
    how, stream = data[0], data[1:]
    version = p.V5 if how & 1 else p.V311
    if how & 2:
        stream = codec.encode_connect(p.Connect("fuzz", version, bool(how & 4), 60)) + stream
    whole_packets(WORLD.loop.run_until_complete(WORLD.life(cut(stream, how >> 4 & 3))))
    if WORLD.faults.found:
        raise AssertionError("\n".join(WORLD.faults.found))


if __name__ == "__main__":
    WORLD = World()
    atheris.Setup(sys.argv, one_input)
    atheris.Fuzz()
