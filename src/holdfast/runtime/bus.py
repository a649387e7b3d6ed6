"""Control messages between the machines of nodes: at once within a node, through the store to another.

PostgreSQL carries them in a table, and NOTIFY says that something is there; a poll looks in any case. Messages may
be lost, late or doubled: the machines expect no better.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable
from typing import Any

import msgspec
import psycopg

from holdfast.errors import RequestError, StoreError
from holdfast.groups.protocol import wire
from holdfast.jitter import chance
from holdfast.machine import Address
from holdfast.store.postgres import PostgresStore

logger = logging.getLogger("holdfast.bus")

CHANNEL = "holdfast_bus"
POLL_SECONDS = 0.5
STALE_SECONDS = 30

Deliver = Callable[[Address, Any], None]


def encode(to: Address, message: Any) -> bytes:
    return msgspec.json.encode((to, msgspec.Raw(wire.encode(message))))


def decode(data: bytes) -> tuple[Address, Any]:
    to, message = msgspec.json.decode(data, type=tuple[Address, msgspec.Raw])
    return to, wire.decode(bytes(message))


class LocalBus:
    """A node by itself: there is nobody else to talk to."""

    def __init__(self, deliver: Deliver):
        self.deliver = deliver

    def start(self) -> None: ...

    def send(self, to: Address, message: Any) -> None:
        logger.debug("no such node: %s", to)

    def close(self) -> None: ...


class PostgresBus:
    """Nodes that share a PostgreSQL."""

    def __init__(self, store: PostgresStore, node: str, deliver: Deliver):
        self._store, self._node, self.deliver = store, node, deliver
        self._out: list[tuple[str, bytes]] = []
        self._sending = False
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._listen, name="holdfast-bus", daemon=True)

    def start(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._thread.start()

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
        sending = self._loop.run_in_executor(None, self._insert, out)
        sending.add_done_callback(self._sent)

    def _sent(self, done: asyncio.Future[None]) -> None:
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
        """On a thread of its own."""
        while not self._stop.is_set():
            try:
                with self._store.connect() as db:
                    db.execute(f"listen {CHANNEL}")
                    while not self._stop.is_set():
                        self._fetch(db)
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

    def _arrived(self, bodies: list[bytes]) -> None:
        for body in bodies:
            try:
                to, message = decode(body)
            except (msgspec.MsgspecError, RequestError) as error:
                logger.error("a control message cannot be read: %s", error)
                continue
            self.deliver(to, message)

    def close(self) -> None:
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join(3)
