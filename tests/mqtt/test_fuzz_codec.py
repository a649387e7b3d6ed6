"""A short run of the codec's fuzzer, so that it keeps working and finds what is easy to find."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

FUZZER = Path(__file__).parents[1] / "fuzz" / "fuzz_codec.py"


def test_the_fuzzer_finds_nothing(tmp_path):
    pytest.importorskip("atheris", reason="atheris is not installed; it has no wheel for every platform")
    ran = subprocess.run(
        [sys.executable, str(FUZZER), "-runs=30000", "-seed=1", "-max_len=200", f"-artifact_prefix={tmp_path}/"],
        capture_output=True,
        text=True,
        timeout=120,
        cwd=tmp_path,
    )
    assert ran.returncode == 0, ran.stderr[-4000:]
    assert "Done 30000 runs" in ran.stderr
