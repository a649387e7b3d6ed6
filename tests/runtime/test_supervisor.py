"""Long-lived tasks: started again when they fail, and the node ends when that does not help."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from holdfast import restarts as module
from holdfast.restarts import FAILURES_MAX, STEADY_SECONDS, Restarts
from holdfast.runtime.supervisor import Supervisor

SECONDS = 10.0


class Bench:
    def __init__(self) -> None:
        self.now = 0.0
        self.ended: list[str] = []
        self.supervisor = Supervisor(self.ended.append, lambda: self.now)
        self.starts = 0


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PAUSE_SECONDS", 0.0005)


def run(work: Callable[[Bench], Coroutine[Any, Any, None]]) -> None:
    async def whole() -> None:
        bench = Bench()
        try:
            await asyncio.wait_for(work(bench), SECONDS)
        finally:
            await bench.supervisor.stop()

    asyncio.run(whole())


async def until(condition: Callable[[], Any]) -> None:
    while not condition():  # noqa: ASYNC110 (anything may be waited for)
        await asyncio.sleep(0.001)


def test_pauses_double_up_to_a_limit_and_then_it_is_enough(monkeypatch):
    monkeypatch.setattr(module, "PAUSE_SECONDS", 0.1)
    restarts = Restarts()
    pauses = [restarts.failed(0.0) for _ in range(FAILURES_MAX)]
    assert pauses == [0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 5.0, None]


def test_a_task_that_ran_for_long_begins_to_count_anew():
    restarts = Restarts()
    restarts.started(0.0)
    assert [restarts.failed(1.0), restarts.count] == [module.PAUSE_SECONDS, 1]
    restarts.failed(2.0)
    restarts.started(3.0)
    restarts.failed(3.0 + STEADY_SECONDS)
    assert restarts.count == 1


def test_a_task_that_fails_is_started_again():
    async def work(bench: Bench) -> None:
        async def task() -> None:
            bench.starts += 1
            if bench.starts < 3:
                raise KeyError("lost")
            await asyncio.Event().wait()

        bench.supervisor.run("upkeep", task)
        await until(lambda: bench.starts == 3)
        assert bench.supervisor.failures["upkeep"].count == 2
        assert bench.supervisor.problem == "upkeep failed 2 times: KeyError: 'lost'"
        bench.now += STEADY_SECONDS
        assert bench.supervisor.problem is None and bench.ended == []

    run(work)


def test_one_failure_is_listed_but_does_not_make_the_node_unready():
    async def work(bench: Bench) -> None:
        async def task() -> None:
            bench.starts += 1
            if bench.starts == 1:
                raise OSError("once")
            await asyncio.Event().wait()

        bench.supervisor.run("tick", task)
        await until(lambda: bench.starts == 2)
        assert "tick" in bench.supervisor.failures and bench.supervisor.problem is None

    run(work)


def test_a_task_that_fails_again_and_again_ends_the_node_and_says_why():
    async def work(bench: Bench) -> None:
        async def task() -> None:
            bench.starts += 1
            raise ValueError("broken for good")

        bench.supervisor.run("follow", task)
        await until(lambda: bench.ended)
        assert bench.starts == FAILURES_MAX
        assert bench.ended == [f"follow failed {FAILURES_MAX} times: ValueError: broken for good"]
        bench.now += 10 * STEADY_SECONDS
        assert bench.supervisor.problem == bench.ended[0], "it stays so"

    run(work)


def test_a_task_that_is_done_is_not_started_again():
    async def work(bench: Bench) -> None:
        async def task() -> None:
            bench.starts += 1

        bench.supervisor.run("once", task)
        await asyncio.sleep(0.01)
        assert bench.starts == 1 and bench.supervisor.problem is None
        bench.supervisor.run("once", task)  # the name is free again

    run(work)


def test_two_tasks_of_one_name_are_refused():
    async def work(bench: Bench) -> None:
        bench.supervisor.run("one", lambda: asyncio.sleep(SECONDS))
        with pytest.raises(ValueError, match="'one' is running already"):
            bench.supervisor.run("one", lambda: asyncio.sleep(SECONDS))

    run(work)


def test_a_thread_that_fails_is_started_again_and_ends_when_its_owner_says_so():
    async def work(bench: Bench) -> None:
        stop = threading.Event()

        def listen() -> None:
            bench.starts += 1
            if bench.starts < 3:
                raise OSError("away")
            stop.wait(SECONDS)

        bench.supervisor.run_thread("bus", listen)
        await until(lambda: bench.starts == 3)
        assert bench.supervisor.failures["bus"].count == 2
        stop.set()
        await until(lambda: not bench.supervisor.failures)

    run(work)


def test_stop_ends_tasks_that_run_and_tasks_that_wait_for_their_next_start(monkeypatch):
    monkeypatch.setattr(module, "PAUSE_SECONDS", SECONDS)

    async def work(bench: Bench) -> None:
        async def fails() -> None:
            raise OSError("once")

        bench.supervisor.run("runs", lambda: asyncio.sleep(SECONDS))
        bench.supervisor.run("waits", fails)
        await until(lambda: bench.supervisor.failures)
        await bench.supervisor.stop()
        assert bench.ended == []

    run(work)
