"""A handful of idle connections, last in first out; whoever finds none opens one."""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Generic, Protocol, TypeVar


class Closable(Protocol):
    def close(self) -> None: ...


C = TypeVar("C", bound=Closable)


class Pool(Generic[C]):
    def __init__(self, connect: Callable[[], C], idle_max: int = 8):
        self._connect = connect
        self._idle: deque[C] = deque()
        self._idle_max = idle_max
        self._lock = threading.Lock()
        self._closed = False
        self._pid = os.getpid()

    @contextmanager
    def connection(self) -> Iterator[C]:
        """A connection of one's own. One that raised is not trusted again: it is closed."""
        if self._pid != os.getpid():  # forked: the parent's connections are not ours to use or to close
            self._idle, self._lock, self._pid = deque(), threading.Lock(), os.getpid()
        with self._lock:
            connection = self._idle.pop() if self._idle else None
        if connection is None:
            connection = self._connect()
        try:
            yield connection
        except BaseException:
            connection.close()
            raise
        with self._lock:
            if not self._closed and len(self._idle) < self._idle_max:
                self._idle.append(connection)
                return
        connection.close()

    def drop_idle(self) -> None:
        """Close what lies idle: after the server went away, all of it is dead."""
        with self._lock:
            idle, self._idle = self._idle, deque()
        for connection in idle:
            connection.close()

    def close(self) -> None:
        self._closed = True
        self.drop_idle()
