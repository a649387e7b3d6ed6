"""A yardstick from outside: the raw packet sequences of another project's broker tests, replayed against a node."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from node import Node

SEQUENCES = Path(__file__).parents[3] / "shared" / "conformance" / "run_sequences.py"

# MQTT 5 has a reason for a PUBREL whose packet id is not known (0x92); the project the sequences come from says 0.
UNKNOWN_PUBREL = "FAIL Err got 70 03 00 01 92 want 70 02 00 01 "


@pytest.mark.parametrize(("options", "count"), [(["--ver", "4"], 292), (["--ver", "5", "--lenient"], 1185)])
def test_every_sequence_is_answered_as_expected(node: Node, tmp_path: Path, options: list[str], count: int) -> None:
    if not SEQUENCES.exists():
        pytest.skip(f"the sequences are kept beside the repository, in {SEQUENCES.parent}, and are not there")
    found = tmp_path / "found.json"
    command = [sys.executable, str(SEQUENCES), "--port", str(node.mqtt_port), "--json", str(found), *options]
    subprocess.run(command, check=True, capture_output=True, timeout=240)
    results: dict[str, str] = json.loads(found.read_text())
    wrong = {key: value for key, value in results.items() if value not in ("PASS", UNKNOWN_PUBREL)}
    assert not wrong, f"{len(wrong)} of {len(results)}:\n" + "\n".join(f"{k}: {v}" for k, v in list(wrong.items())[:20])
    assert len(results) >= count
    assert sum(value == UNKNOWN_PUBREL for value in results.values()) == (8 if "5" in options else 0)
