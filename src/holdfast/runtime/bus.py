"""Control messages between the machines of nodes: at once within a node, through the store to another.

PostgreSQL carries them in a table, and NOTIFY says that something is there; a poll looks in any case. Messages may
be lost, late or doubled: the machines expect no better.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol

import msgspec
import psycopg

from holdfast.errors import RequestError, StoreError
from holdfast.groups.protocol import wire
from holdfast.jitter import chance
from holdfast.log import Log
from holdfast.machine import Address
from holdfast.runtime.supervisor import Supervisor
from holdfast.store.postgres import PostgresStore

logger = logging.getLogger("holdfast.bus")

CHANNEL = "holdfast_bus"
POLL_SECONDS = 0.5
STALE_SECONDS = 30
SWEEP_SECONDS = 30

Deliver = Callable[[Address, Any], None]


def encode(to: Address, message: Any) -> bytes:
    return msgspec.json.encode((to, msgspec.Raw(wire.encode(message))))


def decode(data: bytes) -> tuple[Address, Any]:
    to, message = msgspec.json.decode(data, type=tuple[Address, msgspec.Raw])
    return to, wire.decode(bytes(message))


class Bus(Protocol):
    """Carries messages to machines on other nodes."""

    def start(self, supervisor: Supervisor) -> None: ...

    def send(self, to: Address, message: Any) -> None: ...

    def close(self) -> None: ...


def open_bus(log: Log, node: str, deliver: Deliver) -> Bus:
    """The bus of a node, as its store makes it possible."""
    store = getattr(log.backend, "store", None)
    return PostgresBus(store, node, deliver) if isinstance(store, PostgresStore) else LocalBus()


class LocalBus:
    """A node by itself: there is nobody else to talk to."""

    def start(self, supervisor: Supervisor) -> None: ...

    def send(self, to: Address, message: Any) -> None:
        logger.debug("no such node: %s", to)

    def close(self) -> None: ...


class PostgresBus:
    """Nodes that share a PostgreSQL."""

    def __init__(self, store: PostgresStore, node: str, deliver: Deliver):
        self._store, self._node, self._deliver = store, node, deliver
        self._out: list[tuple[str, bytes]] = []
        self._sending = False
        self._stop = threading.Event()
        self._swept_at = 0.0
        # Of its own: whatever else waits for a thread must not hold up what nodes say to each other.
        self._sender = ThreadPoolExecutor(1, "holdfast-bus-send")

    def start(self, supervisor: Supervisor) -> None:
        self._loop = asyncio.get_running_loop()
        supervisor.run_thread("bus", self._listen)

    def send(self, to: Address, message: Any) -> None:
        """Queued; what is said in one turn of the loop goes in one transaction."""
        self._out.append((to.node, encode(to, message)))
        if not self._sending:
            self._sending = True
            self._loop.call_soon(self._flush)

    def _flush(self) -> None:
        if self._stop.is_set() or not self._out:
            self._sending = False
            return
        out, self._out = self._out, []
        sending = self._loop.run_in_executor(self._sender, self._insert, out)
        sending.add_done_callback(self._sent)

    def _sent(self, done: asyncio.Future[None]) -> None:
        if done.cancelled():
            return
        if done.exception() is not None:
            logger.warning("control messages were lost: %s", done.exception())
        self._flush()

    def _insert(self, out: list[tuple[str, bytes]]) -> None:
        nodes, bodies = [node for node, _ in out], [body for _, body in out]
        with self._store.write() as db:
            db.execute("set local synchronous_commit to off")
            db.execute("insert into bus (node, body) select * from unnest(%s::text[], %s::bytea[])", (nodes, bodies))
            for node in set(nodes):
                db.execute("select pg_notify(%s, %s)", (CHANNEL, node))

    def _listen(self) -> None:
        """On a thread of its own, until `close`."""
        while not self._stop.is_set():
            try:
                with self._store.connect() as db:
                    db.execute(f"listen {CHANNEL}")
                    while not self._stop.is_set():
                        self._fetch(db)
                        self._sweep(db)
                        for note in db.notifies(timeout=POLL_SECONDS * (0.5 + chance.random() / 2), stop_after=1):
                            if note.payload == self._node:
                                break
            except (StoreError, psycopg.Error) as error:
                logger.warning("the bus is away: %s", str(error).splitlines()[0])
                self._stop.wait(0.2 + chance.random() * 0.3)

    def _fetch(self, db: Any) -> None:
        rows = db.execute(
            "with mine as (delete from bus where node = %s returning id, body, sent_at)"
            " select body from mine where sent_at > now() - make_interval(secs => %s) order by id",
            (self._node, STALE_SECONDS),
            binary=True,
        ).fetchall()
        if rows:
            self._loop.call_soon_threadsafe(self._arrived, [body for (body,) in rows])

    def _sweep(self, db: Any) -> None:
        """Now and then: what was said to nodes that never came for it."""
        now = time.monotonic()
        if now < self._swept_at + SWEEP_SECONDS:
            return
        self._swept_at = now
        db.execute("delete from bus where sent_at < now() - make_interval(secs => %s)", (2 * STALE_SECONDS,))

    def _arrived(self, bodies: list[bytes]) -> None:
        for body in bodies:
            try:
                to, message = decode(body)
            except (msgspec.MsgspecError, RequestError) as error:
                logger.error("a control message cannot be read: %s", error)
                continue
            try:
                self._deliver(to, message)
            except Exception:  # our own fault; the other messages are none the worse for it
                logger.exception("%s could not be given %s", to, type(message).__name__)

    def close(self) -> None:
        self._stop.set()
        self._sender.shutdown(cancel_futures=True)
