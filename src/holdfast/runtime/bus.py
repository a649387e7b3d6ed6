"""Control messages to the machines of other nodes: encoded, and sent and received off the loop.

The store carries them (`Store.bus`), if nodes share it. Messages may be lost, late or doubled: the machines expect
no better.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import msgspec

from holdfast.errors import RequestError
from holdfast.fanout.nouns import Hint
from holdfast.groups.protocol import wire
from holdfast.machine import Address
from holdfast.runtime.supervisor import Supervisor
from holdfast.sessions.life import Release, Released
from holdfast.store import Bus

logger = logging.getLogger("holdfast.bus")

Deliver = Callable[[Address, Any], None]


_PLAIN = {kind.__name__: kind for kind in (Release, Released, Hint)}
"""Messages that are not the groups'."""


def encode(to: Address, message: Any) -> bytes:
    if type(message).__name__ in _PLAIN:
        return msgspec.json.encode((to, (type(message).__name__, message)))
    return msgspec.json.encode((to, msgspec.Raw(wire.encode(message))))


def decode(data: bytes) -> tuple[Address, Any]:
    to, message = msgspec.json.decode(data, type=tuple[Address, msgspec.Raw])
    if to.kind not in ("session", "fanout"):
        return to, wire.decode(bytes(message))
    name, body = msgspec.json.decode(message, type=tuple[str, msgspec.Raw])
    if name not in _PLAIN:
        raise RequestError(f"expected {', '.join(_PLAIN)}, got {name!r}")
    return to, msgspec.json.decode(body, type=_PLAIN[name])


class NodeBus:
    """One node's end of the store's bus; without one the node is by itself, and there is nobody to talk to."""

    def __init__(self, bus: Bus | None, deliver: Deliver):
        self._bus, self._deliver = bus, deliver
        self._out: list[tuple[str, bytes]] = []
        self._sending = False
        self._closed = False
        # Of its own: whatever else waits for a thread must not hold up what nodes say to each other.
        self._sender = ThreadPoolExecutor(1, "holdfast-bus-send")

    def start(self, supervisor: Supervisor) -> None:
        self._loop = asyncio.get_running_loop()
        if (bus := self._bus) is not None:
            supervisor.run_thread("bus", lambda: bus.listen(self._from_thread))

    def send(self, to: Address, message: Any) -> None:
        """Queued; what is said in one turn of the loop goes in one transaction."""
        if self._bus is None:
            logger.debug("no such node: %s", to)
            return
        self._out.append((to.node, encode(to, message)))
        if not self._sending:
            self._sending = True
            self._loop.call_soon(self._flush)

    def _flush(self) -> None:
        if self._closed or not self._out or self._bus is None:
            self._sending = False
            return
        out, self._out = self._out, []
        sending = self._loop.run_in_executor(self._sender, self._bus.send, out)
        sending.add_done_callback(self._sent)

    def _sent(self, done: asyncio.Future[None]) -> None:
        if done.cancelled():
            return
        if done.exception() is not None:
            logger.warning("control messages were lost: %s", done.exception())
        self._flush()

    def _from_thread(self, bodies: list[bytes]) -> None:
        with contextlib.suppress(RuntimeError):  # the loop has been closed: nobody is left to tell
            self._loop.call_soon_threadsafe(self._arrived, bodies)

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
        self._closed = True
        if self._bus is not None:
            self._bus.close()
        self._sender.shutdown(cancel_futures=True)
