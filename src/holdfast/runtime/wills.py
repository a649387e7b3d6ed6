"""Wills: kept in the metadata store from CONNECT on, so that not even the node's own death silences them.

A will is published when its connection is lost, or some time after; it is withdrawn when the client says good-bye, or
is back in time. What is stored is the will and, once the connection is lost, when it is due. A node that was killed
finds the wills of its clients when it is started again: their connections were lost with it. On a store that nodes
share it knows its own by the name it was given (`node_id`); without one it would never find them, and stores none.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
import logging
import time
from collections.abc import Callable
from math import inf
from typing import TYPE_CHECKING, Protocol

import msgspec

from holdfast.keys import will_key, wills_of
from holdfast.metadata import Metadata
from holdfast.mqtt import packets as p
from holdfast.runtime.keeper import Keeper

if TYPE_CHECKING:
    from holdfast.runtime.connection import Connection

logger = logging.getLogger("holdfast.wills")

AGAIN_SECONDS = 1.0
"""A will that could not be stored as a message is tried again after this long."""


Saving = asyncio.Future[None] | None


class WillRecord(msgspec.Struct):
    client_id: str
    topic: str
    payload: bytes
    qos: int
    retain: bool
    properties: bytes
    delay: int
    due: float = 0.0
    """By the wall clock; 0 while its client is connected."""


class PublishWill(Protocol):
    def __call__(self, client_id: str, will: p.Will, done: Callable[[bool], None]) -> None: ...


class Wills:
    def __init__(self, keeper: Keeper, node_id: str | None, publish: PublishWill):
        self._keeper, self._publish = keeper, publish
        self._node_id = node_id
        """The node's name; empty: the store is its alone; None: it has none, and stores nothing."""
        self._kept: dict[str, Connection | None] = {}
        """Whose will is stored, by client id; None: of an earlier run."""
        self._pending: list[tuple[float, int, str, p.Will, Connection | None]] = []
        """Lost connections' wills by when they are due, by the wall clock."""
        self._order = itertools.count()
        self._saves: set[asyncio.Future[None]] = set()

    def load(self, metadata: Metadata) -> None:
        """Take up what an earlier run of this node left (before anything else happens; on any thread)."""
        if self._node_id is None:
            return
        now = time.time()
        for key, entry in metadata.list(wills_of(self._node_id)).items():
            try:
                found = msgspec.msgpack.decode(entry.value, type=WillRecord)
            except msgspec.MsgspecError as error:
                logger.error("the will at %s cannot be read and is left alone: %s", key, error)
                continue
            will = p.Will(found.topic, found.payload, found.qos, found.retain, found.delay, found.properties)
            self._kept[found.client_id] = None
            # No longer than its delay, wherever the clock has been set meanwhile.
            self._wait(found.client_id, will, min(found.due or inf, now + found.delay), None)

    def keep(self, connection: Connection, client_id: str, will: p.Will | None, delay: int) -> Saving:
        """A client is about to be welcome, with this will or none. Resolved when that is durable."""
        if will is None or will.topic.startswith("$"):
            return self._forget(client_id)
        self._kept[client_id] = connection
        return self._save(client_id, will, delay, due=0.0)

    def withdraw(self, client_id: str) -> None:
        """The client is welcome: a will that it left behind is void."""
        self._withdraw(client_id)

    def not_welcome(self, connection: Connection, client_id: str) -> None:
        """What was kept for this connection is not its client's will: that is the one left behind, if there is one."""
        if self._kept.get(client_id, connection) is not connection:
            return  # it did not come so far
        for due, _, of, will, owner in self._pending:
            if of == client_id:
                self._kept[client_id] = owner
                self._save(client_id, will, will.delay, due)
                return
        self._forget(client_id)

    def left(self, connection: Connection, client_id: str, will: p.Will | None, delay: int) -> None:
        """The connection is over; without a will, or with one whose time has come or will come."""
        ours = self._kept.get(client_id) is connection
        if will is None or will.topic.startswith("$"):
            if ours:
                self._forget(client_id)
        elif not delay:
            self._send(client_id, will, connection)
        elif ours:  # otherwise the client is back already
            due = time.time() + delay
            self._wait(client_id, will, due, connection)
            self._save(client_id, will, delay, due)

    def session_ended(self, client_id: str) -> None:
        """Its will waits no longer."""
        for will, owner in self._withdraw(client_id):
            self._send(client_id, will, owner)

    def send_due(self) -> None:
        now = time.time()
        while self._pending and self._pending[0][0] <= now:
            _, _, client_id, will, owner = heapq.heappop(self._pending)
            self._send(client_id, will, owner)

    async def settled(self) -> None:
        """What was to be stored is."""
        if self._saves:
            await asyncio.wait(self._saves)

    def _wait(self, client_id: str, will: p.Will, due: float, owner: Connection | None) -> None:
        heapq.heappush(self._pending, (due, next(self._order), client_id, will, owner))

    def _withdraw(self, client_id: str) -> list[tuple[p.Will, Connection | None]]:
        found = [(will, owner) for _, _, of, will, owner in self._pending if of == client_id]
        if found:
            self._pending = [entry for entry in self._pending if entry[2] != client_id]
            heapq.heapify(self._pending)
        return found

    def _send(self, client_id: str, will: p.Will, owner: Connection | None) -> None:
        """Stored as a message first, forgotten after: a node killed in between publishes it twice, never not at all."""

        def done(stored: bool) -> None:
            if not stored:
                self._wait(client_id, will, time.time() + AGAIN_SECONDS, owner)
            elif client_id in self._kept and self._kept[client_id] is owner:
                self._forget(client_id)

        self._publish(client_id, will, done)

    def _save(self, client_id: str, will: p.Will, delay: int, due: float) -> Saving:
        if self._node_id is None:
            return None
        record = WillRecord(client_id, will.topic, will.payload, will.qos, will.retain, will.properties, delay, due)
        return self._put(client_id, msgspec.msgpack.encode(record))

    def _forget(self, client_id: str) -> Saving:
        if client_id not in self._kept:
            return None
        del self._kept[client_id]
        if self._node_id is None:
            return None
        return self._put(client_id, None)

    def _put(self, client_id: str, value: bytes | None) -> asyncio.Future[None]:
        save = self._keeper.put(will_key(self._node_id or "", client_id), value)
        self._saves.add(save)
        save.add_done_callback(lambda done: self._saved(done, client_id, value))
        return save

    def _saved(self, save: asyncio.Future[None], client_id: str, value: bytes | None) -> None:
        """A will that could not be deleted would be published one day, long after the good-bye."""
        self._saves.discard(save)
        if not save.cancelled() and save.exception() is not None and value is None:
            logger.warning("the will of %s is not deleted yet: %s", client_id, save.exception())
            asyncio.get_running_loop().call_later(AGAIN_SECONDS, self._delete_again, client_id)

    def _delete_again(self, client_id: str) -> None:
        if client_id not in self._kept:
            self._put(client_id, None)
