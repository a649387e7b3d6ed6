"""Keeps the node's long-lived tasks running: one that fails is started again, and one that keeps failing ends the node.

    supervisor = Supervisor(give_up)              give_up(reason) is called once: the node should stop
    supervisor.run("upkeep", self._upkeep)        a function that makes the coroutine, anew for each start
    supervisor.run_thread("bus", self._listen)    the same for a function that blocks, on a thread of its own
    supervisor.look_after(lambda: log.failure)    something that is kept running elsewhere, and may be given up there
    supervisor.failures                           what is not running well just now, by name
    supervisor.problem                            the same in one line for /readyz, or None
    await supervisor.end("upkeep")                ends this one, as what it needs is about to be stopped
    await supervisor.stop()                       ends the tasks; threads end by themselves, their owner tells them to

A task that ends without an exception is done and is not started again. When a task that fails is started again, and
when it has failed too often, says `holdfast.restarts`. Then the supervisor gives up: `/readyz` says 503 with the
reason, and the node ends, so that whoever started it sees that it is ill and can start it anew. The same holds for the
threads that a store keeps for itself.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Coroutine
from typing import Any

from holdfast.restarts import Failure, Restarts

logger = logging.getLogger("holdfast.node")

Factory = Callable[[], Coroutine[Any, Any, Any]]


class Supervisor:
    """The long-lived tasks of one node."""

    def __init__(self, give_up: Callable[[str], None], clock: Callable[[], float] = time.monotonic):
        self._give_up, self._clock = give_up, clock
        self._failures: dict[str, tuple[Failure, Restarts]] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._elsewhere: list[Callable[[], Failure | None]] = []
        self._stopping = self._ended = False

    @property
    def failures(self) -> dict[str, Failure]:
        """The tasks that have failed and have not run well since."""
        now = self._clock()
        for name in [n for n, (failure, restarts) in self._failures.items() if not failure.given_up]:
            if name in self._tasks and self._failures[name][1].steady(now):
                del self._failures[name]
        elsewhere = [failure for look in self._elsewhere if (failure := look()) is not None]
        return {failure.name: failure for failure in [*(each for each, _ in self._failures.values()), *elsewhere]}

    @property
    def problem(self) -> str | None:
        """Why this node should get no clients just now; None: it is well. One failure alone is no reason."""
        found = [failure for failure in self.failures.values() if failure.serious]
        return "; ".join(map(str, found)) or None

    def run(self, name: str, factory: Factory) -> None:
        """Keep this task running until `stop`."""
        if name in self._tasks:
            raise ValueError(f"a task {name!r} is running already")
        self._tasks[name] = asyncio.get_running_loop().create_task(self._keep(name, factory), name=name)

    def run_thread(self, name: str, work: Callable[[], None]) -> None:
        """Keep this function running on a thread of its own; it returns when its owner wants it to."""
        self.run(name, lambda: _on_thread(name, work))

    def look_after(self, look: Callable[[], Failure | None]) -> None:
        """Its failures are this node's; `check` ends the node if it is given up."""
        self._elsewhere.append(look)

    def check(self) -> None:
        """To be called now and then."""
        for look in list(self._elsewhere):
            failure = look()
            if failure is not None and failure.given_up:
                self._ended_by(failure)

    def _ended_by(self, failure: Failure) -> None:
        if not self._ended:
            self._ended = True
            self._give_up(str(failure))

    def runs(self, name: str) -> bool:
        return name in self._tasks

    async def end(self, *names: str) -> None:
        """End these tasks, before what they need is stopped."""
        tasks = [self._tasks[name] for name in names if name in self._tasks]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def stop(self) -> None:
        """End every task. A thread that has not been told to return is left alone: it is a daemon."""
        self._stopping = True
        await self.end(*self._tasks)

    async def _keep(self, name: str, factory: Factory) -> None:
        restarts = Restarts()
        try:
            while not self._stopping:
                restarts.started(self._clock())
                try:
                    await factory()
                    self._failures.pop(name, None)
                    return
                except Exception as error:  # any: that is what a supervisor is for
                    pause = self._note(name, restarts, error)
                if pause is None:
                    return
                await asyncio.sleep(pause)
        finally:
            self._tasks.pop(name, None)

    def _note(self, name: str, restarts: Restarts, error: Exception) -> float | None:
        pause = restarts.failed(self._clock())
        failure = Failure(name, f"{type(error).__name__}: {error}", restarts.count, given_up=pause is None)
        self._failures[name] = (failure, restarts)
        if pause is None:
            logger.critical("%s; the node ends", failure, exc_info=error)
            self._ended_by(failure)
        else:
            logger.error("%s; it is started again in %.1f s", failure, pause, exc_info=error)
        return pause


async def _on_thread(name: str, work: Callable[[], None]) -> None:
    loop = asyncio.get_running_loop()
    done: asyncio.Future[None] = loop.create_future()

    def settle(error: BaseException | None) -> None:
        if done.done():
            return
        if error is None:
            done.set_result(None)
        else:
            done.set_exception(error)

    def run() -> None:
        error: BaseException | None = None
        try:
            work()
        except Exception as raised:
            error = raised
        try:
            loop.call_soon_threadsafe(settle, error)
        except RuntimeError:
            logger.debug("%s ended after its loop", name)

    threading.Thread(target=run, name=f"holdfast-{name}", daemon=True).start()
    await done
