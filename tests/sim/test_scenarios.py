"""Every text scenario does what its file says it does."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from holdfast.sim.scenario import Scenario

SCENARIOS = sorted((Path(__file__).parent.parent / "scenarios").glob("*.txt"))


@pytest.mark.parametrize("path", SCENARIOS, ids=lambda path: path.stem)
def test_scenario(path: Path) -> None:
    text = path.read_text()
    happened = Scenario().run(text)
    if os.environ.get("HOLDFAST_REWRITE"):
        path.write_text(happened)
    assert happened == text


def test_there_are_scenarios() -> None:
    assert len(SCENARIOS) >= 15
