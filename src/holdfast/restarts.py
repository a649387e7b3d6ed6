"""When something that runs for ever is started again after it failed, and threads that are kept running so.

    thread = KeptThread("log-watcher", self._listen)      `_listen` returns once `thread.stopping` is set
    thread.start()
    thread.failure                                        it has failed and not run well since; None: it is well
    thread.stop()

What failed is started again after a pause that doubles, up to `PAUSE_SECONDS_MAX`; once it has run for `STEADY_SECONDS`
it counts as well again. After `FAILURES_MAX` failures without such a time it is given up. Tasks of a node are kept
by `runtime.supervisor` in the same way; these threads belong to stores, which programs without a node use as well.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

logger = logging.getLogger("holdfast.threads")

PAUSE_SECONDS, PAUSE_SECONDS_MAX = 0.1, 5.0
STEADY_SECONDS = 30.0
FAILURES_MAX = 8


@dataclass(frozen=True, slots=True)
class Failure:
    """A task or thread that has failed and has not run well since."""

    name: str
    error: str
    count: int
    """How often in a row."""
    given_up: bool = False

    @property
    def serious(self) -> bool:
        """One failure alone is no reason to send anybody away."""
        return self.given_up or self.count > 1

    def __str__(self) -> str:
        return f"{self.name} failed {self.count} time{'s' if self.count > 1 else ''}: {self.error}"


class Restarts:
    """When one task is started again, by how often it has failed; pure."""

    def __init__(self) -> None:
        self.count = 0
        self._started_at = 0.0

    def started(self, now: float) -> None:
        self._started_at = now

    def steady(self, now: float) -> bool:
        """It has run long enough to count as well again."""
        return now - self._started_at >= STEADY_SECONDS

    def failed(self, now: float) -> float | None:
        """How long to wait before the next start; None: it has failed too often."""
        self.count = 1 if self.steady(now) else self.count + 1
        if self.count >= FAILURES_MAX:
            return None
        return min(PAUSE_SECONDS * 2.0 ** (self.count - 1), PAUSE_SECONDS_MAX)


class KeptThread:
    """One function that blocks, on a thread of its own, started again whenever it fails."""

    def __init__(self, name: str, work: Callable[[], None]):
        self._name, self._work = name, work
        self.stopping = threading.Event()
        self._restarts = Restarts()
        self._failure: Failure | None = None
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Once; again, it does nothing."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._keep, name=f"holdfast-{self._name}", daemon=True)
            self._thread.start()

    def stop(self, timeout: float | None = None) -> None:
        """Whoever calls this has told the function to return."""
        self.stopping.set()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(timeout)

    @property
    def failure(self) -> Failure | None:
        found = self._failure
        if found is not None and not found.given_up and self._restarts.steady(time.monotonic()):
            return None
        return found

    def _keep(self) -> None:
        while not self.stopping.is_set():
            self._restarts.started(time.monotonic())
            try:
                self._work()
                return
            except Exception as error:  # any: nobody else would ever hear of it
                pause = self._note(error)
            if pause is None:
                return
            self.stopping.wait(pause)

    def _note(self, error: Exception) -> float | None:
        pause = self._restarts.failed(time.monotonic())
        self._failure = failure = Failure(
            self._name, f"{type(error).__name__}: {error}", self._restarts.count, given_up=pause is None
        )
        if pause is None:
            logger.critical("%s; it is given up", failure, exc_info=error)
        else:
            logger.error("%s; it is started again in %.1f s", failure, pause, exc_info=error)
        return pause
