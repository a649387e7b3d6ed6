"""Ending a session without a word.

When a session ends Spark closes the sockets of idle Python workers, and only then has their daemons tell them to
go. One that notices the former first has something to report, finds nobody to report it to, and prints a traceback.
So they are told to go before.
"""

from __future__ import annotations

import atexit
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from pyspark.sql import SparkSession

_WARM_SECONDS_MAX = 10.0


def stop_quietly(spark: SparkSession, warming: threading.Thread) -> None:
    """Have `spark.stop()`, or the end of the process, wait for the warm-up and dismiss the workers first."""
    stop = spark.stop
    jvm = getattr(spark.sparkContext._gateway, "proc", None)  # none if Spark has started this process

    def dismiss() -> None:
        warming.join(_WARM_SECONDS_MAX)
        for daemon in _children(jvm.pid) if jvm is not None else ():
            # It leads the group its workers are in, and pays no heed itself.
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(daemon, signal.SIGHUP)

    def stop_after() -> None:
        dismiss()
        atexit.unregister(dismiss)
        stop()

    spark.stop = stop_after  # type: ignore[method-assign]
    atexit.register(dismiss)


def _children(pid: int) -> Iterator[int]:
    """None where the system does not tell."""
    for process in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):  # it has just ended
            if int(process.read_text().rpartition(")")[2].split()[1]) == pid:
                yield int(process.parent.name)
