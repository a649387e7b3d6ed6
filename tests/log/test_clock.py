"""What the wall clock says for a while must not delete anything."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

import holdfast
from holdfast import AppendKey, Batch, Log
from holdfast.log.clock import SteadyClock
from holdfast.log.retention import RetentionSettings, maintain

SECOND = 1_000_000
HOUR = 3600 * SECOND


class Clocks:
    def __init__(self) -> None:
        self.wall, self.monotonic = 1_000 * HOUR, 50.0
        self.steady = SteadyClock(lambda: self.wall, lambda: self.monotonic)

    def pass_(self, seconds: float) -> None:
        self.wall += int(seconds * SECOND)
        self.monotonic += seconds


def test_it_is_the_wall_clock_while_that_runs_evenly() -> None:
    clocks = Clocks()
    for _ in range(100):
        clocks.pass_(36.0)
        assert clocks.steady() == clocks.wall


@pytest.mark.parametrize("jump", [2 * HOUR, -2 * HOUR])
def test_a_jump_moves_it_by_one_percent_of_the_time_that_passes(jump: int) -> None:
    clocks = Clocks()
    right = clocks.wall
    clocks.wall += jump
    for second in range(1, 11):
        clocks.pass_(1.0)
        assert abs(clocks.steady() - (right + second * SECOND)) <= second * SECOND / 100
    clocks.wall -= jump
    clocks.pass_(20.0)
    assert clocks.steady() == clocks.wall, "as much as it was wrong is made up for as slowly"


def test_it_never_goes_back() -> None:
    clocks, seen = Clocks(), []
    for jump in (0, HOUR, -HOUR, -HOUR, HOUR, HOUR):
        clocks.wall += jump
        for _ in range(3):
            clocks.pass_(0.5)
            seen.append(clocks.steady())
    assert seen == sorted(set(seen))


@pytest.mark.parametrize("jump", [HOUR, -HOUR])
def test_a_jump_that_lasts_is_believed_where_that_is_wanted(jump: int) -> None:
    clocks = Clocks()
    clock = SteadyClock(lambda: clocks.wall, lambda: clocks.monotonic, believed_after=60.0)
    right, clocks.wall = clocks.wall, clocks.wall + jump
    for second in range(1, 60):
        assert abs(clock() - (right + (second - 1) * SECOND)) < SECOND
        clocks.pass_(1.0)
    assert abs(clock() - clocks.wall) > HOUR // 2
    clocks.pass_(1.0)
    assert clock() == clocks.wall
    clocks.pass_(1.0)
    assert clock() == clocks.wall


def test_jumps_that_do_not_last_are_never_believed_however_many_there_are() -> None:
    clocks = Clocks()
    clock, right = SteadyClock(lambda: clocks.wall, lambda: clocks.monotonic, believed_after=60.0), clocks.wall
    for jump in (HOUR, -2 * HOUR, 3 * HOUR, -4 * HOUR, 2 * HOUR) * 3:
        clocks.wall += jump
        for _ in range(30):
            assert abs(clock() - right) < 4 * SECOND
            clocks.pass_(1.0)
            right += SECOND


@pytest.fixture
def log() -> Iterator[Log]:
    with holdfast.open("memory:") as log:
        log.create("one", shards=1)
        yield log


def ahead(log: Log, micros: int) -> Callable[[], int]:
    right = log.clock
    return lambda: right() + micros


def test_a_wall_clock_that_jumps_ahead_drops_and_seals_nothing(log: Log) -> None:
    settings = RetentionSettings(keep_seconds=3600, generation_seconds_max=3600)
    log.append("one", Batch(["t"], [b"sealed"]))
    log.seal("one")
    log.append("one", Batch(["t"], [b"open"]))
    log.clock = ahead(log, 2 * HOUR)
    done = maintain(log, settings)
    assert (done.sealed, done.dropped) == (0, 0)
    assert [g.number for g in log.generations("one")] == [1, 2]


def test_a_wall_clock_that_jumps_ahead_forgets_no_writer(log: Log) -> None:
    key = AppendKey("writer", 1)
    log.append("one", Batch(["t"], [b"1"]), key=key)
    log.clock = ahead(log, 24 * 30 * HOUR)
    maintain(log)
    assert log.append("one", Batch(["t"], [b"1"]), key=key).repeated


def test_what_is_old_is_dropped_by_a_process_that_never_saw_another_time(log: Log) -> None:
    log.append("one", Batch(["t"], [b"1"]))
    log.seal("one")
    log.steady = SteadyClock(ahead(log, 2 * HOUR))
    assert maintain(log, RetentionSettings(keep_seconds=3600)).dropped == 1
