"""A lock that is given to whoever has waited longest.

A plain lock goes to whoever is running when it is free, which is most often the thread that has just given it back: a
thread that commits one transaction after the other would keep the others waiting for as long as it has more to commit.
"""

from __future__ import annotations

import threading
from collections import deque


class Turns:
    """To be held with `with`; not again by whoever holds it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._held = False
        self._waiting: deque[threading.Lock] = deque()

    def __enter__(self) -> None:
        with self._lock:
            if not self._held:
                self._held = True
                return
            turn = threading.Lock()
            turn.acquire()
            self._waiting.append(turn)
        turn.acquire()

    def __exit__(self, *_: object) -> None:
        with self._lock:
            if self._waiting:
                self._waiting.popleft().release()
            else:
                self._held = False

    def locked(self) -> bool:
        return self._held

    @property
    def waiting(self) -> int:
        return len(self._waiting)
