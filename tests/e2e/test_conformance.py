"""A yardstick from outside: the raw packet sequences of another project's broker tests, replayed against a node."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from node import Node

SEQUENCES = Path(__file__).parents[3] / "shared" / "conformance" / "run_sequences.py"

UNKNOWN_PUBREL = "got 70 03 00 01 92 want 70 02 00 01"
"""The sequences call a PUBREL for an id that was never used a success; MQTT 5 has a reason code for it."""


@pytest.mark.parametrize(("options", "count"), [(["--ver", "4"], 292), (["--ver", "5", "--lenient"], 1185)])
def test_every_sequence_is_answered_as_expected(node: Node, tmp_path: Path, options: list[str], count: int) -> None:
    if not SEQUENCES.exists():
        pytest.skip(f"the sequences are kept beside the repository, in {SEQUENCES.parent}, and are not there")
    found = tmp_path / "found.json"
    command = [sys.executable, str(SEQUENCES), "--port", str(node.mqtt_port), "--json", str(found), *options]
    subprocess.run(command, check=True, capture_output=True, timeout=240)
    results: dict[str, str] = json.loads(found.read_text())
    wrong = {key: value for key, value in results.items() if value != "PASS" and UNKNOWN_PUBREL not in value}
    assert not wrong, f"{len(wrong)} of {len(results)}:\n" + "\n".join(f"{k}: {v}" for k, v in list(wrong.items())[:20])
    assert len(results) >= count
