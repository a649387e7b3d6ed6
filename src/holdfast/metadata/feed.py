"""One thread that tells all watches of a metadata store what changed, and ends leases when they are due.

It runs from the first `watch` on, over a connection of its own (a `FeedLine`), and asks for everything after the
last version it has seen. A lost connection is opened again and the same question asked, so nothing is missed;
if the store has meanwhile forgotten deletions, the watches are brought up to date from what there is.
"""

from __future__ import annotations

import selectors
import socket
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from typing import Protocol

from holdfast.errors import RequestError, StoreError
from holdfast.jitter import chance
from holdfast.metadata.entries import Entry, Event
from holdfast.metadata.watch import Watch
from holdfast.restarts import Failure, KeptThread

SWEEP_JITTER_SECONDS = 0.05
"""Nodes that watch the same lease do not all end it at the same instant."""


@dataclass(frozen=True, slots=True)
class Changes:
    """What a line finds after the version it was asked about."""

    revision: int
    """The last version given, as of the same moment as the events."""
    trimmed: int
    due_seconds: float | None
    """Until the next lease expires."""
    events: list[Event]


class FeedLine(Protocol):
    def changes(self, after: int, prefixes: list[str]) -> Changes: ...

    def snapshot(self, prefix: str) -> tuple[int, dict[str, Entry]]: ...

    def sweep(self) -> None:
        """End the leases that have expired."""

    def wait(self, pause: Pause, timeout: float | None) -> None:
        """Until something may have changed, the feed was nudged, or the time is up."""


class Pause:
    """A sleep that other threads and other file descriptors can end."""

    def __init__(self) -> None:
        self._selector = selectors.DefaultSelector()
        self._reader, self._writer = socket.socketpair()
        self._reader.setblocking(False)
        self._writer.setblocking(False)
        self._selector.register(self._reader, selectors.EVENT_READ)

    def nudge(self) -> None:
        with suppress(OSError):  # full of nudges, so it will wake; or just closed
            self._writer.send(b"!")

    def sleep(self, seconds: float | None, also: int | None = None) -> bool:
        """Whether it was ended early. `also` is a file descriptor to wait for."""
        if also is not None:
            self._selector.register(also, selectors.EVENT_READ)
        try:
            woken = self._selector.select(seconds)
        finally:
            if also is not None:
                self._selector.unregister(also)
        if any(key.fileobj is self._reader for key, _ in woken):  # else a nudge that comes now would be lost
            self._reader.recv(4096)
        return bool(woken)

    def close(self) -> None:
        self._selector.close()
        self._reader.close()
        self._writer.close()


class Feed:
    def __init__(self, connect: Callable[[], AbstractContextManager[FeedLine]]):
        self._connect = connect
        self._lock = threading.Lock()  # a watch begins between two deliveries, never during one
        self._watches: list[Watch] = []
        self._seen = 0
        self._thread: KeptThread | None = None
        self._pause: Pause | None = None
        self._closed = False

    def add(
        self, prefix: str, snapshot: Callable[[], tuple[int, dict[str, Entry]]], wake: Callable[[], None] | None
    ) -> Watch:
        with self._lock:
            if self._closed:
                raise RequestError("this metadata store is closed")
            revision, entries = snapshot()
            if not self._watches:
                self._seen = revision
            watch = Watch(prefix, revision, entries, wake, self.nudge)
            self._watches.append(watch)
            if self._pause is None:
                pause = self._pause = Pause()
                self._thread = KeptThread("metadata", lambda: self._run(pause))
                self._thread.start()
        self.nudge()
        return watch

    @property
    def failure(self) -> Failure | None:
        return self._thread.failure if self._thread is not None else None

    def nudge(self) -> None:
        """Look now: this process has just changed something."""
        if self._pause is not None:
            self._pause.nudge()

    def _run(self, pause: Pause) -> None:
        failures = 0
        while not self._closed:
            try:
                with self._connect() as line:
                    while not self._closed:
                        timeout = self._deliver(line)
                        failures = 0
                        line.wait(pause, timeout)
            except StoreError:  # away, or in trouble: the watches wait as long as it takes
                failures += 1
                until = time.monotonic() + min(0.05 * 2**failures, 2.0) * (0.5 + chance.random())
                while not self._closed and (left := until - time.monotonic()) > 0:
                    pause.sleep(left)

    def _deliver(self, line: FeedLine) -> float | None:
        """Tell the watches what is new; how long there is nothing to do, but for changes."""
        with self._lock:
            self._watches = [watch for watch in self._watches if not watch.closed]
            if not self._watches:
                return None
            found = line.changes(self._seen, [watch.prefix for watch in self._watches])
            if self._seen < found.trimmed:
                for watch in self._watches:
                    revision, entries = line.snapshot(watch.prefix)
                    watch.resync(entries, revision)
            else:
                for watch in self._watches:
                    watch.offer(found.events)
            self._seen = found.revision
        if found.due_seconds is None:
            return None
        if found.due_seconds <= 0:
            line.sweep()
            return 0.0
        return found.due_seconds + chance.random() * SWEEP_JITTER_SECONDS

    def close(self) -> None:
        with self._lock:
            self._closed = True
            watches, self._watches = self._watches, []
            pause, self._pause = self._pause, None
        if pause is not None and self._thread is not None:
            pause.nudge()
            self._thread.stop()
            pause.close()
        for watch in watches:
            watch.close()
