"""Upkeep rests, but not so long that it never ends."""

from __future__ import annotations

from pathlib import Path

import pytest

import holdfast
from holdfast.log import retention
from holdfast.log.retention import RESTLESS_SECONDS, Pace


def test_sqlite_does_not_overwrite_what_it_frees(tmp_path: Path) -> None:
    """Some builds do unless told otherwise, and then deleting holds up everybody who appends."""
    fast = 2
    with holdfast.open(f"sqlite:///{tmp_path}/store.db") as log:
        store = log.backend.database  # type: ignore[attr-defined]
        with store.write() as writer, store.read() as reader:
            assert [db.execute("pragma secure_delete").fetchone() for db in (writer, reader)] == [(fast,), (fast,)]


class Clock:
    def __init__(self) -> None:
        self.now, self.slept = 100.0, 0.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        assert seconds >= 0
        self.now += seconds
        self.slept = seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(retention, "time", made)
    return made


def rest_after(clock: Clock, pace: Pace, seconds: float) -> float:
    clock.now += seconds
    clock.slept = 0.0
    pace.step()
    return clock.slept


def test_a_short_round_rests_as_often_as_it_is_told(clock: Clock) -> None:
    pace = Pace(4.0)
    for _ in range(10):
        assert rest_after(clock, pace, 0.01) == pytest.approx(0.04, rel=0.05)
    assert rest_after(clock, Pace(0.0), 1.0) == 0


def test_a_round_that_falls_behind_rests_less_and_then_no_more(clock: Clock) -> None:
    pace, begun, worked = Pace(4.0), clock.now, 0.0
    rests = []
    while clock.now < begun + 3 * RESTLESS_SECONDS:
        rests.append(rest_after(clock, pace, 0.1))
        worked += 0.1
    assert rests == sorted(rests, reverse=True)
    assert rests[0] > 0.39 and rests[-1] == 0
    assert worked > 2 * RESTLESS_SECONDS, "all the time there is, once it is behind"
