"""Drives one machine: events in, effects performed in order, its deadline kept.

The clock comes first: a machine whose deadline has passed hears so before anything else, so that a process which
stood still does not act on what it believed before.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Awaitable, Callable
from math import inf
from typing import Any

from holdfast.errors import BrokenInvariant
from holdfast.machine import TICK, Machine

logger = logging.getLogger("holdfast.groups")

FAR_SECONDS, GRID_SECONDS = 0.2, 0.02


class Driver:
    """One machine on the loop. `perform` returns None, or something to wait for: the rest follows after it."""

    def __init__(
        self,
        machine: Machine,
        perform: Callable[[Any], Awaitable[Any] | None],
        broken: Callable[[], None] = lambda: None,
    ):
        self.machine = machine
        self.alive = True
        self._perform = perform
        self._broken = broken
        self._inbox: deque[Any] = deque()
        self._busy = False
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        self._armed = inf

    def on(self, event: Any) -> None:
        """Take an event; it is handled now, or when what is under way is done."""
        if not self.alive:
            return
        self._inbox.append(event)
        if not self._busy:
            self._run()

    def clock(self) -> None:
        """Let the machine know the time if it wants to."""
        if self.alive and not self._busy and self.machine.deadline <= time.monotonic():
            self._run()

    def _run(self) -> None:
        self._busy = True
        try:
            while self.alive:
                now = time.monotonic()
                if self.machine.deadline <= now:
                    effects = self.machine.handle(TICK, now)
                elif self._inbox:
                    effects = self.machine.handle(self._inbox.popleft(), now)
                else:
                    break
                waiting = self._effects(effects, 0)
                if waiting is not None:
                    return  # still busy: goes on when that is done
        except BrokenInvariant:
            logger.exception("a machine broke its own rules and is taken down")
            self.stop()
            self._broken()
            return
        self._busy = False
        self._arm()

    def _effects(self, effects: list[Any], at: int) -> asyncio.Task[None] | None:
        for index in range(at, len(effects)):
            if not self.alive:
                return None
            waiting = self._perform(effects[index])
            if waiting is not None:
                return self._loop.create_task(self._after(waiting, effects, index + 1))
        return None

    async def _after(self, waiting: Awaitable[Any], effects: list[Any], at: int) -> None:
        """A save is durable before the next effect; if it failed, the rest is dropped and the machine is told."""
        answer = await waiting
        if not self.alive:
            return
        if answer is not None:
            # Before anything else, even the clock: the machine must not go on believing it was saved.
            effects, at = self.machine.handle(answer, time.monotonic()), 0
        if self._effects(effects, at) is None:
            self._run()

    def _arm(self) -> None:
        deadline = self.machine.deadline
        if deadline == self._armed and self._timer is not None:
            return
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._armed = deadline
        if deadline != inf and self.alive:
            delay = max(0.0, deadline - time.monotonic())
            if delay > FAR_SECONDS:
                # Far off, a little later is as good: thousands of machines then wake together, not one by one.
                delay += GRID_SECONDS - deadline % GRID_SECONDS
            self._timer = self._loop.call_later(delay, self._tick)

    def _tick(self) -> None:
        self._timer, self._armed = None, inf
        if self.alive and not self._busy:
            self._run()

    def stop(self) -> None:
        self.alive = False
        if self._timer is not None:
            self._timer.cancel()
