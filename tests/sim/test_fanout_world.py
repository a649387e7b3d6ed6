"""Fan-out under the simulator: seeds pass, and the same seed is the same run, in every process."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from holdfast.fanout.dispatcher import LEGAL, Dispatcher, Slot, Step
from holdfast.sim.__main__ import main
from holdfast.sim.fanout.faults import FanoutFaults
from holdfast.sim.fanout.runner import run_fanout_seed, run_fanout_seeds

SEEDS = 200


def test_seeds() -> None:
    seen: list[int] = []
    failures = run_fanout_seeds(0, SEEDS, lambda done, failed: seen.append(done))
    assert not failures, failures[0]
    assert seen[-1] == SEEDS


@pytest.mark.soak
def test_many_seeds() -> None:
    failures = run_fanout_seeds(0, 20_000)
    assert not failures, failures[0]


@pytest.mark.parametrize("seed", [3, 11, 29])
def test_the_same_seed_is_the_same_run(seed: int) -> None:
    first, second = run_fanout_seed(seed, trace=True), run_fanout_seed(seed, trace=True)
    assert len(first.trace) > 50
    assert first.digest == second.digest


def test_the_same_seed_is_the_same_run_in_another_process() -> None:
    code = (
        "from holdfast.sim.fanout import runner as r; print(*[r.run_fanout_seed(n,trace=True).digest for n in (1,7)])"
    )
    said = [
        subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "PYTHONHASHSEED": hash_seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for hash_seed in ("1", "2")
    ]
    assert said[0] == said[1]
    assert len(said[0]) > 80


def test_watching_does_not_change_the_run() -> None:
    assert run_fanout_seed(5).events == run_fanout_seed(5, trace=True).events


def test_deliveries_are_made_in_clear_weather() -> None:
    total = 0
    for seed in range(20):
        outcome = run_fanout_seed(seed, faults=FanoutFaults())
        assert outcome.failure is None, outcome.failure
        total += outcome.deliveries
    assert total > 200


def test_every_legal_move_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """A move that never happens should not be in the table."""
    made: set[tuple[Step | None, Step | None]] = set()
    plain = Dispatcher._move

    def move(self: Dispatcher, slot: Slot, to: Step | None) -> None:
        made.add((slot.step, to))
        plain(self, slot, to)

    monkeypatch.setattr(Dispatcher, "_move", move)
    wanted = {(one, to) for one, moves in LEGAL.items() for to in moves}
    for seed in range(400):
        run_fanout_seed(seed)
        if made >= wanted:
            return
    raise AssertionError(f"never made: {wanted - made}")


def test_a_failure_tells_its_story(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(Dispatcher, "_acked", lambda self, *given: None)
    failures = run_fanout_seeds(0, 20, failures_max=1)
    assert len(failures) == 1
    assert len(failures[0].story) > 20
    assert main(["--world", "fanout", "--seed", str(failures[0].seed), "-v"]) == 1
    assert failures[0].reason in capsys.readouterr().out


def test_the_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--seeds", "0:3", "--world", "fanout"]) == 0
    assert "fanout: seeds 0:3: 0 failed" in capsys.readouterr().out
