"""Who is told of appends: at once within the process, by the store's own means across processes.

A hint says only that something happened in a log. Nothing rests on it: whoever is told looks for himself,
and a poll comes by in any case.
"""

from __future__ import annotations

import threading
from collections.abc import Callable


class LogWatch:
    """One listener, until closed."""

    def __init__(self, watcher: Watcher, callback: Callable[[str], None]):
        self._watcher, self.callback = watcher, callback

    def close(self) -> None:
        self._watcher.remove(self)


class Watcher:
    """Tells listeners in this process. Stores that several processes share extend it with `_listen`."""

    def __init__(self) -> None:
        self._watches: tuple[LogWatch, ...] = ()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._stop = threading.Event()
        self._own: dict[str, int] = {}
        """Messages this process appended: what a poll finds beyond them came from others."""

    def add(self, callback: Callable[[str], None]) -> LogWatch:
        watch = LogWatch(self, callback)
        with self._lock:
            self._watches = (*self._watches, watch)
            if self._thread is None and type(self)._listen is not Watcher._listen:
                ready = threading.Event()
                self._thread = threading.Thread(
                    target=self._listen, args=(ready,), name="holdfast-log-watcher", daemon=True
                )
                self._thread.start()
                ready.wait(10)
        return watch

    def remove(self, watch: LogWatch) -> None:
        with self._lock:
            self._watches = tuple(w for w in self._watches if w is not watch)

    def tell(self, log: str, appended: int) -> None:
        """This process appended that many messages to the log (0: sealed or dropped)."""
        with self._lock:
            self._own[log] = self._own.get(log, 0) + appended
        self._hint(log)

    def _hint(self, log: str) -> None:
        for watch in self._watches:
            watch.callback(log)

    def _listen(self, ready: threading.Event) -> None:
        """Tell of what other processes append, until `_stop` is set. Sets `ready` once nothing can be missed."""

    def close(self) -> None:
        self._stop.set()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(5)


class LogChanges:
    """Compares totals between polls: which logs did others change?"""

    def __init__(self, totals: Callable[[], dict[str, tuple[int, int]]], own: Callable[[str], int]):
        self._totals, self._own = totals, own
        self._seen = self._look()

    def _look(self) -> dict[str, tuple[int, int]]:
        return {log: (messages - self._own(log), shape) for log, (messages, shape) in self._totals().items()}

    def since_last(self) -> list[str]:
        seen, self._seen = self._seen, self._look()
        return [log for log in self._seen.keys() | seen.keys() if self._seen.get(log) != seen.get(log)]
