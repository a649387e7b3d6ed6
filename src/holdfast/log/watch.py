"""Who is told of appends: at once within the process, by the store's own means across processes.

A hint says only that something happened in a log. Nothing rests on it: whoever is told looks for himself,
and a poll comes by in any case.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from holdfast.restarts import Failure, KeptThread

logger = logging.getLogger("holdfast.log")


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
        self._ready = threading.Event()
        self._thread = KeptThread("log-watcher", lambda: self._listen(self._ready))
        self._stop = self._thread.stopping
        self._own: dict[str, int] = {}
        """Messages this process appended: what a poll finds beyond them came from others."""

    def add(self, callback: Callable[[str], None]) -> LogWatch:
        watch = LogWatch(self, callback)
        with self._lock:
            self._watches = (*self._watches, watch)
            if type(self)._listen is not Watcher._listen:
                self._thread.start()
                self._ready.wait(10)
        return watch

    @property
    def failure(self) -> Failure | None:
        """Why others' appends may be heard of late, or not at all; None: all is well."""
        return self._thread.failure

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
            try:
                watch.callback(log)
            except Exception:  # the listener's trouble: the others, and whoever appended, are none the worse for it
                logger.exception("a listener to log %s failed", log)

    def _listen(self, ready: threading.Event) -> None:
        """Tell of what other processes append, until `_stop` is set. Sets `ready` once nothing can be missed.

        If it fails it is called again, and tells of what was appended meanwhile.
        """

    def close(self) -> None:
        self._thread.stop(5)


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
