"""`holdfast pipeline run`: several jobs from a file, until it is told to stop."""

from __future__ import annotations

import signal
import subprocess
from pathlib import Path

import holdfast
from holdfast import Batch
from node import holdfast_command
from processes import wait_for


def test_jobs_from_a_file_run_until_stopped(tmp_path: Path) -> None:
    store = f"sqlite:///{tmp_path}/store.db"
    jobs = tmp_path / "jobs.toml"
    jobs.write_text(
        f'[[lake]]\nstore = "{store}"\nroot = "{tmp_path}/lake"\nevery_seconds = 0.5\n'
        f'[[aggregate]]\nstore = "{store}"\ntarget = "trips"\nkey = "publisher"\npartitions = 2\n'
    )
    with holdfast.open(store) as log:
        log.create("messages", shards=2)
        log.append("messages", Batch(["v/1/t"] * 50, [b"1"] * 50, "v1"))
        process = subprocess.Popen([holdfast_command(), "pipeline", "run", str(jobs), "--master", "local[2]"])
        try:
            wait_for(lambda: log.manifest.totals("messages")[1] == 50, 120, "the lake was filled")
            wait_for(
                lambda: "trips" in log.logs() and sum(h.next_offset for h in log.heads("trips")) == 50, 120, "trips"
            )
            process.send_signal(signal.SIGTERM)
            assert process.wait(60) == 0
        finally:
            process.kill()
            process.wait()


def test_a_file_without_jobs_is_named(tmp_path: Path) -> None:
    jobs = tmp_path / "jobs.toml"
    jobs.write_text("[pond]\n")
    done = subprocess.run(
        [holdfast_command(), "pipeline", "run", str(jobs)], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 1
    assert "jobs.toml holds ['pond']; it takes [[lake]] and [[aggregate]] tables" in done.stderr
    assert "Traceback" not in done.stderr
