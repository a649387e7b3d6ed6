"""Drives one machine: events in, effects performed in order, its deadline kept.

The clock comes first: a machine whose deadline has passed hears so before anything else, so that a process which
stood still does not act on what it believed before.

A machine that raises, an effect that cannot be performed and an answer that is an exception all end the same way: the
machine is dropped, its story is logged, and `broken` is called once. Nobody can say in which state it was left, so it
is never given another event; whoever owns it sets up a new one.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Awaitable, Callable
from functools import partial
from math import inf
from typing import Any

from holdfast.machine import TICK, Machine

logger = logging.getLogger("holdfast.groups")

FAR_SECONDS, GRID_SECONDS = 0.2, 0.02

STORY_EVENTS = 16
"""How many of the last events are named when a machine is dropped."""


class Driver:
    """One machine on the loop. `perform` returns None, or something to wait for: the rest follows after it."""

    def __init__(
        self,
        name: str,
        machine: Machine,
        perform: Callable[[Any], Awaitable[Any] | None],
        broken: Callable[[], None] = lambda: None,
    ):
        self.name, self.machine = name, machine
        self.alive = True
        self._perform = perform
        self._broken = broken
        self._inbox: deque[Any] = deque()
        self._last: deque[str] = deque(maxlen=STORY_EVENTS)
        """Kinds of the last events: the machine may keep no story of its own."""
        self._busy = False
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        self._armed = inf

    def give(self, event: Any) -> None:
        """Take an event; it is handled now, or when what is under way is done."""
        if not self.alive:
            return
        self._inbox.append(event)
        if not self._busy:
            self._run()

    def give_result(self, future: asyncio.Future[Any]) -> None:
        """Give the machine what comes of the future; None says nothing, and an exception drops the machine."""
        future.add_done_callback(self._give_result)

    def _give_result(self, future: asyncio.Future[Any]) -> None:
        if future.cancelled():
            return
        error = future.exception()
        if error is not None:
            self.drop("what it asked for failed", error)
        elif future.result() is not None:
            self.give(future.result())

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
                    effects = self._handle(TICK, now)
                elif self._inbox:
                    effects = self._handle(self._inbox.popleft(), now)
                else:
                    break
                if self._effects(effects, 0):
                    return  # still busy: goes on when that is done
        except Exception as error:  # whatever it was, the machine cannot be trusted any more
            self.drop("it failed", error)
            return
        self._busy = False
        self._arm()

    def _handle(self, event: Any, now: float) -> list[Any]:
        self._last.append(type(event).__name__)
        return self.machine.handle(event, now)

    def _effects(self, effects: list[Any], at: int) -> bool:
        """Perform them from here on; True: one of them takes a while, and the rest follows after it."""
        for index in range(at, len(effects)):
            if not self.alive:
                return False
            waiting = self._perform(effects[index])
            if waiting is not None:
                follow = partial(self._after, effects, index + 1)
                asyncio.ensure_future(waiting).add_done_callback(follow)
                return True
        return False

    def _after(self, effects: list[Any], at: int, done: asyncio.Future[Any]) -> None:
        """A save is durable before the next effect; if it failed, the rest is dropped and the machine is told."""
        if not self.alive or done.cancelled():
            return
        try:
            answer = done.result()
            if answer is not None:
                # Before anything else, even the clock: the machine must not go on believing it was saved.
                effects, at = self._handle(answer, time.monotonic()), 0
            if self._effects(effects, at):
                return
        except Exception as error:
            self.drop("what followed a save failed", error)
            return
        self._run()

    def _arm(self) -> None:
        if not self.alive:
            return
        deadline = self.machine.deadline
        if deadline == self._armed and self._timer is not None:
            return
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._armed = deadline
        if deadline != inf:
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
        """Give it nothing more, perform nothing more."""
        self.alive = False
        self._inbox.clear()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def drop(self, why: str, error: BaseException) -> None:
        """Take the machine down with its story, and tell whoever owns it."""
        if not self.alive:
            return
        self.stop()
        story = "\n  ".join([f"last events: {', '.join(self._last) or 'none'}", *_moves(self.machine)])
        logger.error("%s is taken down: %s\n  %s", self.name, why, story, exc_info=error)
        try:
            self._broken()
        except Exception:
            logger.exception("%s was taken down, and its owner could not deal with it", self.name)


def _moves(machine: Machine) -> list[str]:
    """The moves a machine has noted, its own or those of the machines inside it."""
    inner = getattr(machine, "borrowers", {}).values()
    found: list[str] = []
    for each in (machine, getattr(machine, "election", None), *inner):
        for name in ("moves", "story"):
            moves = getattr(each, name, None)
            if isinstance(moves, list):
                found += moves[-20:]
    return found
