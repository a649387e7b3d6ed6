"""Virtual time, one seed, one queue of calls; and work that waits, as generators.

A generator yields how many seconds to sleep, or something `Pending`; it ends with the life it was begun for.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Generator
from random import Random
from typing import Any

Work = Generator["float | Pending", Any, Any]


class Life:
    """Of a process: whatever was begun for it ends with it."""

    def __init__(self) -> None:
        self.alive = True


class Pending:
    """Something that will be known later, or will have failed."""

    __slots__ = ("_waiting", "done", "error", "value", "world")

    def __init__(self, world: World):
        self.world = world
        self.done = False
        self.value: Any = None
        self.error: Exception | None = None
        self._waiting: list[Callable[[], None]] = []

    def settle(self, value: Any = None) -> None:
        self._end(value, None)

    def fail(self, error: Exception) -> None:
        self._end(None, error)

    def _end(self, value: Any, error: Exception | None) -> None:
        if not self.done:
            self.done, self.value, self.error = True, value, error
            for call in self._waiting:
                self.world.after(0.0, call)

    def then(self, call: Callable[[], None]) -> None:
        """In a later turn, as a loop does it."""
        if self.done:
            self.world.after(0.0, call)
        else:
            self._waiting.append(call)


class World:
    """The only clock, the only random source, the only queue."""

    def __init__(self, seed: int, *, trace: bool = False):
        self.seed, self.rng = seed, Random(seed)
        self.now = 0.0
        self.order = 0
        self.healing = False
        self.trace: list[str] | None = [] if trace else None
        self._queue: list[tuple[float, int, Life, Callable[[], None]]] = []
        self._forever = Life()

    def after(self, seconds: float, call: Callable[[], None], life: Life | None = None) -> None:
        self.order += 1
        heapq.heappush(self._queue, (self.now + seconds, self.order, life or self._forever, call))

    def run(self, until: float) -> None:
        queue = self._queue
        while queue and queue[0][0] <= until:
            self.now, _, life, call = heapq.heappop(queue)
            if life.alive:
                call()
        self.now = max(self.now, until)

    def spawn(self, work: Work, life: Life) -> None:
        self._step(work, life, None, None)

    def _step(self, work: Work, life: Life, value: Any, error: Exception | None) -> None:
        if not life.alive:
            work.close()
            return
        try:
            wanted = work.send(value) if error is None else work.throw(error)
        except StopIteration:
            return
        if isinstance(wanted, Pending):
            found = wanted
            found.then(lambda: self._step(work, life, found.value, found.error))
        else:
            self.after(wanted, lambda: self._step(work, life, None, None))

    def pending(self) -> Pending:
        return Pending(self)

    def between(self, low: float, high: float) -> float:
        return low + (high - low) * self.rng.random()

    def chance(self, chance: float) -> bool:
        return chance > 0 and self.rng.random() < chance

    def tell(self, who: object, what: object) -> None:
        if self.trace is not None:
            self.trace.append(f"{self.now:8.4f} {who}: {what}")
