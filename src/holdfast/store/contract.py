"""What a store is: one place that holds a log, and everything that has to be durable beside it.

A store is one folder here. It implements `Store` and `StoreUrl`, and `open_store` learns its scheme; nobody else
asks which store it is. `tests/contract` asks every store for the same promises.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from holdfast.fanout.table import FanoutTable
from holdfast.log.log import Log
from holdfast.log.manifest import Manifest
from holdfast.log.staging import Staging
from holdfast.metadata.contract import Metadata
from holdfast.sessions.table import SessionTable


@dataclass(frozen=True, kw_only=True, slots=True)
class StoreOptions:
    """How a store is used; each store heeds what concerns it."""

    notifications: bool = True
    """False: hear of other processes' changes by polling alone."""
    retry_seconds: float = 30.0
    """How long a call keeps trying while a server is away, before it raises."""
    mapped: bool = False
    """Map files into memory: for a process that reads all of one once, which saves a copy of every page."""


class Bus(Protocol):
    """Small messages between the nodes that share a store. They may be lost, late or doubled."""

    def send(self, messages: Sequence[tuple[str, bytes]]) -> None:
        """To nodes by their names, in this order. Blocks until they are on their way; StoreError if they are not."""

    def listen(self, arrived: Callable[[list[bytes]], None]) -> None:
        """Call `arrived` with what comes for this node, in order; blocks until the bus is closed."""

    def close(self) -> None:
        """Nothing arrives after this."""


class Store(Protocol):
    """A store that is open. Safe to use from several threads; every call blocks."""

    shared: bool
    """May several nodes serve it at the same time?"""

    def log(self) -> Log:
        """Its logs. One object, however often it is asked for; closing it closes the store."""

    def metadata(self) -> Metadata:
        """Its small keys. One object, however often it is asked for; closing it closes the store."""

    def sessions(self) -> SessionTable:
        """Its sessions, whose wills go to its log. One object, however often it is asked for."""

    def fanout(self) -> FanoutTable:
        """What waits for vehicles; its ends go to the log `deliveries`. One object, however often it is asked for."""

    def staging(self) -> Staging:
        """Blocks that wait for their job. RequestError if the store lives in one process only."""

    def manifest(self) -> Manifest:
        """What the lake holds. RequestError if the store lives in one process only."""

    def hold(self, node: str) -> None:
        """The node of this name serves it from now on. RequestError, with who does already, unless it is `shared`."""

    def bus(self, node: str) -> Bus | None:
        """Messages to and from the node of this name; None if the store is not `shared`: there is nobody else."""

    def close(self) -> None:
        """Let go of connections and end threads. What was got from the store is closed with it. Once is enough."""


class StoreUrl(Protocol):
    """Where a store is."""

    one_process: bool
    """Does it live in one process, where no other can reach it?"""

    def absolute(self) -> str:
        """The URL for a process that stands in another folder."""

    def missing(self) -> str | None:
        """Where it should be, if it can be seen that nothing is there; None: it is there, or opening will tell."""

    def open(self, options: StoreOptions) -> Store:
        """Open it, making it if it is not there yet."""
