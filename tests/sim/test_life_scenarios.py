"""Every text scenario of sessions does what its file says it does, and breaks no promise."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from holdfast.sim.life.scenario import LifeScenario

SCENARIOS = sorted((Path(__file__).parent.parent / "scenarios" / "sessions").glob("*.txt"))


@pytest.mark.parametrize("path", SCENARIOS, ids=lambda path: path.stem)
def test_scenario(path: Path) -> None:
    text = path.read_text()
    happened = LifeScenario().run(text)
    if os.environ.get("HOLDFAST_REWRITE"):
        path.write_text(happened)
    assert "BROKEN" not in happened
    assert happened == text


def test_there_are_scenarios() -> None:
    assert len(SCENARIOS) >= 5, "a store time handled after a pause is shown by the clock's own tests"
