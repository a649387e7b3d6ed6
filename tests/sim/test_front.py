"""The path of a message under the simulator: seeds pass, and the same seed is the same run, in every process."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from holdfast.sessions.session import Session
from holdfast.sim.__main__ import main
from holdfast.sim.front.runner import run_front_seed, run_front_seeds

SEEDS = 60


def test_seeds() -> None:
    seen: list[int] = []
    failures = run_front_seeds(0, SEEDS, lambda done, failed: seen.append(done))
    assert not failures, failures[0]
    assert seen[-1] == SEEDS


@pytest.mark.parametrize("seed", [3, 11, 29])
def test_the_same_seed_is_the_same_run(seed: int) -> None:
    first, second = run_front_seed(seed, trace=True), run_front_seed(seed, trace=True)
    assert len(first.trace) > 100
    assert first.digest == second.digest


def test_the_same_seed_is_the_same_run_in_another_process() -> None:
    code = "from holdfast.sim.front import runner as r; print(*[r.run_front_seed(n,trace=True).digest for n in (1, 7)])"
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
    assert run_front_seed(5).events == run_front_seed(5, trace=True).events


def test_a_failure_tells_its_story(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    plain = Session.offer
    monkeypatch.setattr(Session, "offer", lambda self, rows, picks, most, hold=False: plain(self, rows, picks, 1 << 40))
    failures = run_front_seeds(0, 60, failures_max=1)
    assert len(failures) == 1
    assert len(failures[0].story) > 20
    assert main(["--world", "front", "--seed", str(failures[0].seed), "-v"]) == 1
    assert failures[0].reason in capsys.readouterr().out


def test_the_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--seeds", "0:3"]) == 0
    out = capsys.readouterr().out
    assert "groups: seeds 0:3: 0 failed" in out
    assert "front: seeds 0:3: 0 failed" in out
    assert main(["--seeds", "0:2", "--world", "front"]) == 0
    assert "groups" not in capsys.readouterr().out
