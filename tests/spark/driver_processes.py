"""A driver, or any other process of Spark's, in a process group of its own."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

DRIVER = Path(__file__).with_name("driver.py")


@contextmanager
def process(*command: str | Path, **environment: str) -> Iterator[subprocess.Popen[str]]:
    """A process and all it starts in its group, gone at the end."""
    started = subprocess.Popen(
        [str(part) for part in command],
        env={**os.environ, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        yield started
    finally:
        kill(started)


def kill(started: subprocess.Popen[str]) -> None:
    with suppress(ProcessLookupError):
        os.killpg(started.pid, signal.SIGKILL)
    started.wait(30)
    if started.stdout is not None:
        started.stdout.close()
