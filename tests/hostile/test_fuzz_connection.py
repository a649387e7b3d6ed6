"""A short run of the connections' fuzzer, so that it keeps working and finds what is easy to find."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

FUZZER = Path(__file__).parents[1] / "fuzz" / "fuzz_connection.py"
RUNS = 1500


def test_the_fuzzer_finds_nothing(tmp_path: Path) -> None:
    pytest.importorskip("atheris", reason="atheris is not installed; it has no wheel for every platform")
    seeds = tmp_path / "seeds"
    seeds.mkdir()
    for name, seed in {
        "publish": b"\x03\x32\x08\x00\x01a\x00\x01\x00hi",
        "exactly-once": b"\x03\x34\x07\x00\x01a\x00\x01\x00x\x62\x02\x00\x01",
        "subscribe": b"\x03\x82\x07\x00\x01\x00\x00\x01#\x02\x32\x06\x00\x01a\x00\x01\x00",
        "alias": b"\x03\x30\x08\x00\x01a\x03\x23\x00\x01x\x30\x07\x00\x00\x03\x23\x00\x01x",
        "old": b"\x02\x32\x05\x00\x01a\x00\x01\xe0\x00",
        "connect": b"\x01\x10\x0d\x00\x04MQTT\x05\x02\x00\x3c\x00\x00\x00",
    }.items():
        (seeds / name).write_bytes(seed)
    ran = subprocess.run(
        [
            sys.executable,
            str(FUZZER),
            f"-runs={RUNS}",
            "-seed=1",
            "-max_len=300",
            f"-artifact_prefix={tmp_path}/",
            seeds,
        ],
        capture_output=True,
        text=True,
        timeout=120,
        cwd=tmp_path,
    )
    assert ran.returncode == 0, ran.stderr[-4000:]
    assert f"Done {RUNS} runs" in ran.stderr
