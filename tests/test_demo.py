"""`make demo` does what it says."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path


def test_the_demo_runs_and_finds_nothing_missing() -> None:
    holdfast = Path(sys.executable).parent / "holdfast"
    done = subprocess.run([holdfast, "demo", "--kills", "1"], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "Nothing acknowledged is missing." in done.stdout
    assert "acknowledged but never given:   0" in done.stdout
    assert "  10 waiting, 10 acked\n  $ holdfast why vin LSVA0011\n  LSVA0011: offline" in done.stdout
    assert "\n  20 acked\n" in done.stdout
