"""What every benchmark shares: where it ran, how values are spread, and how a target was met."""

from __future__ import annotations

import os
import platform
import sqlite3
import statistics
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pyarrow as pa


def heading(title: str) -> None:
    print(f"\n== {title}")
    print(f"   {machine()}; commit {commit()}")


def machine() -> str:
    model = "unknown processor"
    for line in Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []:
        if line.startswith("model name"):
            model = line.split(":", 1)[1].strip()
            break
    load = os.getloadavg()[0]
    return (
        f"{model}, {os.cpu_count()} cores (load {load:.1f}), {platform.system()} {platform.release()}, "
        f"Python {platform.python_version()}, pyarrow {pa.__version__}, SQLite {sqlite3.sqlite_version}"
    )


def commit() -> str:
    try:
        here = Path(__file__).parent
        run = ["git", "-C", str(here), "describe", "--always", "--dirty"]
        return subprocess.run(run, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def spread(values: Sequence[float], unit: str, scale: float = 1.0) -> str:
    """p50, p90, p99 and the largest."""
    ordered = sorted(v * scale for v in values)

    def at(share: float) -> float:
        return ordered[min(len(ordered) - 1, int(share * len(ordered)))]

    return f"p50 {at(0.5):,.0f} p90 {at(0.9):,.0f} p99 {at(0.99):,.0f} max {ordered[-1]:,.0f} {unit} (n={len(ordered)})"


def result(what: str, value: float, unit: str, *, at_least: float | None = None, at_most: float | None = None) -> bool:
    """One figure against its target; whether it was met."""
    met, target = True, ""
    if at_least is not None:
        met, target = value >= at_least, f"target ≥ {at_least:,.4g}"
    if at_most is not None:
        met, target = value <= at_most, f"target ≤ {at_most:,.4g}"
    verdict = "" if not target else f"  [{target}: {'met' if met else 'NOT MET'}]"
    print(
        f"   {what:<58} {value:>14,.2f} {unit}{verdict}"
        if value < 100
        else f"   {what:<58} {value:>14,.0f} {unit}{verdict}"
    )
    sys.stdout.flush()
    return met


def middle(values: Sequence[float]) -> float:
    return statistics.median(values)
