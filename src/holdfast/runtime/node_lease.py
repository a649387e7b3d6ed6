"""The node's lease: as long as it is renewed, other nodes leave its sessions alone; a key under it says who it is.

It is renewed by a thread of its own, so that nothing slow lets it run out, and only after the store has taken a write:
a node that can renew but not write (its leases may be elsewhere) would hold sessions it can never hand over.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import time
from collections.abc import Callable
from typing import Any, Protocol

import msgspec

from holdfast.errors import HoldfastError
from holdfast.keys import NODES, node_key
from holdfast.metadata import Lease, Metadata
from holdfast.metadata.contract import LeaseEnded

logger = logging.getLogger("holdfast.node")

RENEW_SECONDS = 1.5
AGAIN_SECONDS = 0.3
"""How soon a renewal that failed is tried again."""


class NodeRecord(msgspec.Struct):
    """A node as the others see it."""

    name: str
    lease: int
    started_at: float
    mqtt: list[str] = []
    """Where clients reach it, as far as it knows."""
    http: str = ""
    draining: bool = False
    """It takes no clients, and sends away those it has."""


class Leased(Protocol):
    """Who is told; on the loop's thread."""

    def granted(self, lease: int, asked_at: float) -> None: ...

    def renewed(self, asked_at: float) -> None: ...

    def lost(self) -> None: ...


class NodeLease:
    """One per node. `asked_at` is by `time.monotonic()`, before the store was asked."""

    def __init__(
        self, metadata: Metadata, record: NodeRecord, seconds: float, probe: Callable[[], None], leased: Leased
    ):
        self._metadata, self._record, self._seconds, self._probe = metadata, record, seconds, probe
        self._leased, self._loop = leased, asyncio.get_running_loop()
        self._lease: Lease | None = None
        self._stop = threading.Event()
        self._wake = threading.Event()
        self._renewing = threading.Lock()
        self._said = b""

    async def begin(self) -> None:
        """The first one, before anything is served. HoldfastError if there is none to be had."""
        asked_at = time.monotonic()
        lease = await self._loop.run_in_executor(None, self._open)
        self._leased.granted(lease.id, asked_at)

    def describe(self, **changes: Any) -> None:
        """Say something else of this node with the next renewal, which is now."""
        self._record = msgspec.structs.replace(self._record, **changes)
        self._wake.set()

    def keep(self) -> None:
        """On a thread of its own, until `end`."""
        pause = RENEW_SECONDS
        while True:
            self._wake.wait(pause)
            self._wake.clear()
            with self._renewing:
                if self._stop.is_set():
                    return
                pause = RENEW_SECONDS if self._renew() else AGAIN_SECONDS

    def _renew(self) -> bool:
        try:
            self._probe()
            asked_at = time.monotonic()
            if self._lease is None:
                lease = self._open()
                self._tell(self._leased.granted, lease.id, asked_at)
            else:
                self._lease.renew()
                self._say()
                self._tell(self._leased.renewed, asked_at)
        except LeaseEnded as error:
            logger.warning("this node's lease has ended: %s", error)
            self._lease = None
            self._tell(self._leased.lost)
            return False
        except HoldfastError as error:
            logger.warning("this node's lease cannot be renewed: %s", error)
            return False
        return True

    def _open(self) -> Lease:
        lease = self._metadata.lease(self._seconds)
        self._said = b""
        self._lease = lease
        try:
            self._say()
        except HoldfastError:
            self._lease = None  # nobody was told of it: it runs out, and the next one is a new one
            raise
        return lease

    def _say(self) -> None:
        """A lease is known as alive before any row names it."""
        if (lease := self._lease) is None:
            return
        # `describe` changes the record on another thread: which lease it is, only this thread says.
        data = msgspec.json.encode(msgspec.structs.replace(self._record, lease=lease.id))
        if data != self._said:
            self._metadata.put(node_key(self._record.name, lease.id), data, lease)
            self._said = data

    def _tell(self, call: Callable[..., None], *given: Any) -> None:
        with contextlib.suppress(RuntimeError):  # the loop has been closed: nobody is left to tell
            self._loop.call_soon_threadsafe(call, *given)

    def end(self) -> None:
        """Give it back: what names it may be taken at once. Blocks."""
        self._stop.set()
        self._wake.set()
        with self._renewing:  # or a new one is taken after this one was given back
            lease, self._lease = self._lease, None
        if lease is not None:
            try:
                lease.revoke()
            except HoldfastError as error:
                logger.warning("this node's lease cannot be given back, and runs out: %s", error)


def nodes(metadata: Metadata) -> list[NodeRecord]:
    """The nodes that are there; blocks."""
    found = []
    for key, entry in metadata.list(NODES).items():
        try:
            found.append(msgspec.json.decode(entry.value, type=NodeRecord))
        except msgspec.MsgspecError as error:
            logger.error("the node at %s cannot be read: %s", key, error)
    return found
