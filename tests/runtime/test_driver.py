"""A driver survives whatever its machine, its host or an answer does: the machine is dropped, and its owner told."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine
from math import inf
from typing import Any

import pytest

from holdfast.errors import BrokenInvariant, StoreError
from holdfast.machine import TICK
from holdfast.runtime.driver import Driver


class Script:
    """A machine that does what each event says: an exception is raised, a list is returned as effects."""

    def __init__(self) -> None:
        self.deadline = inf
        self.heard: list[Any] = []
        self.moves = ["born -> ready"]

    def handle(self, event: Any, now: float) -> list[Any]:
        self.heard.append(event)
        if event is TICK:
            self.deadline = inf
            raise ValueError("no time")
        if isinstance(event, Exception):
            raise event
        return event if isinstance(event, list) else []


class Bench:
    def __init__(self) -> None:
        self.machine = Script()
        self.performed: list[Any] = []
        self.broken = 0
        self.driver = Driver("the machine", self.machine, self.perform, self.note_broken)

    def perform(self, effect: Any) -> Any:
        if isinstance(effect, Exception):
            raise effect
        self.performed.append(effect)
        return effect if isinstance(effect, asyncio.Future) or asyncio.iscoroutine(effect) else None

    def note_broken(self) -> None:
        self.broken += 1


def run(work: Callable[[Bench], Coroutine[Any, Any, None]]) -> None:
    async def whole() -> None:
        await asyncio.wait_for(work(Bench()), 10)

    asyncio.run(whole())


def deaf(bench: Bench) -> bool:
    """Dropped, told once, and it hears nothing more."""
    before = len(bench.machine.heard)
    bench.driver.give("more")
    return not bench.driver.alive and bench.broken == 1 and len(bench.machine.heard) == before


async def turns() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


ERRORS = [BrokenInvariant("illegal", ["a -> b"]), KeyError("lost"), StoreError("away"), RuntimeError("whatever")]


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
def test_a_machine_that_raises_is_dropped_with_its_story(error, caplog):
    async def work(bench: Bench) -> None:
        bench.driver.give("first")
        bench.driver.give(error)
        assert deaf(bench)

    with caplog.at_level(logging.ERROR):
        run(work)
    assert "the machine is taken down" in caplog.text
    assert "last events: str, " + type(error).__name__ in caplog.text and "born -> ready" in caplog.text


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
def test_a_host_that_cannot_perform_an_effect_drops_the_machine(error):
    async def work(bench: Bench) -> None:
        bench.driver.give(["one", error, "two"])
        assert bench.performed == ["one"] and deaf(bench)

    run(work)


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
def test_a_save_that_raises_drops_the_machine(error):
    async def work(bench: Bench) -> None:
        save = asyncio.get_running_loop().create_future()
        bench.driver.give([save, "after"])
        save.set_exception(error)
        await turns()
        assert bench.performed == [save] and deaf(bench)

    run(work)


def test_a_machine_that_cannot_take_the_answer_to_a_save_is_dropped():
    async def work(bench: Bench) -> None:
        save = asyncio.get_running_loop().create_future()
        bench.driver.give([save, "after"])
        save.set_result(KeyError("the answer"))
        await turns()
        assert bench.performed == [save] and deaf(bench)

    run(work)


def test_an_effect_after_a_save_that_cannot_be_performed_drops_the_machine():
    async def work(bench: Bench) -> None:
        save = asyncio.get_running_loop().create_future()
        bench.driver.give([save, OSError("no")])
        save.set_result(None)
        await turns()
        assert deaf(bench)

    run(work)


def test_a_question_whose_answer_is_an_exception_drops_the_machine():
    async def work(bench: Bench) -> None:
        asked = asyncio.get_running_loop().create_future()
        bench.driver.give_result(asked)
        asked.set_exception(RuntimeError("in the thread"))
        await turns()
        assert deaf(bench)

    run(work)


def test_answers_reach_the_machine_none_and_cancelled_say_nothing():
    async def work(bench: Bench) -> None:
        loop = asyncio.get_running_loop()
        answered, empty, cancelled = loop.create_future(), loop.create_future(), loop.create_future()
        for future in (answered, empty, cancelled):
            bench.driver.give_result(future)
        answered.set_result("opened")
        empty.set_result(None)
        cancelled.cancel()
        await turns()
        assert bench.machine.heard == ["opened"] and bench.driver.alive

    run(work)


def test_a_tick_that_raises_drops_the_machine():
    async def work(bench: Bench) -> None:
        bench.machine.deadline = time.monotonic() - 1
        bench.driver.clock()
        assert bench.machine.heard == [TICK] and deaf(bench)

    run(work)


def test_a_tick_by_the_timer_that_raises_drops_the_machine():
    async def work(bench: Bench) -> None:
        bench.machine.deadline = time.monotonic() + 0.01
        bench.driver.give("arm")
        while bench.driver.alive:  # noqa: ASYNC110
            await asyncio.sleep(0.001)
        assert deaf(bench)

    run(work)


def test_an_owner_that_cannot_deal_with_it_does_not_hurt_the_caller(caplog):
    async def work(bench: Bench) -> None:
        def fails() -> None:
            raise RuntimeError("the owner")

        driver = Driver("m", Script(), bench.perform, fails)
        driver.give(KeyError("x"))
        assert not driver.alive

    with caplog.at_level(logging.ERROR):
        run(work)
    assert "could not deal with it" in caplog.text


def test_effects_wait_for_the_save_and_so_do_events():
    async def work(bench: Bench) -> None:
        save = asyncio.get_running_loop().create_future()
        bench.driver.give([save, "after"])
        bench.driver.give("next")
        assert bench.performed == [save] and bench.machine.heard == [[save, "after"]]
        save.set_result(None)
        await turns()
        assert bench.performed == [save, "after"] and bench.machine.heard[-1] == "next"

    run(work)


def test_a_save_that_failed_drops_the_rest_and_the_machine_is_told_first():
    async def work(bench: Bench) -> None:
        save = asyncio.get_running_loop().create_future()
        bench.driver.give([save, "after"])
        bench.driver.give("next")
        save.set_result("save failed")
        await turns()
        assert bench.performed == [save] and bench.machine.heard[1:] == ["save failed", "next"]

    run(work)


def test_a_stopped_driver_performs_nothing_more():
    async def work(bench: Bench) -> None:
        save = asyncio.get_running_loop().create_future()
        bench.driver.give([save, "after"])
        bench.driver.stop()
        save.set_result(None)
        await turns()
        assert bench.performed == [save] and bench.broken == 0

    run(work)
