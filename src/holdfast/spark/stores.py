"""One open log per process and store: Spark's Python workers live through many tasks."""

from __future__ import annotations

import gc
import os
import threading

from holdfast.log import Log, open_log

_open: dict[tuple[int, str], Log] = {}
_lock = threading.Lock()
_frozen = False


def log_at(url: str) -> Log:
    """The log at this URL, opened once. Never closed: the process ends first."""
    with _lock:
        key = (os.getpid(), url)
        if key not in _open:
            _open[key] = open_log(url, notifications=False)
        return _open[key]


def settle() -> None:
    """Take everything loaded so far out of the garbage collector's sight.

    Spark collects garbage after each task; walking all of pyspark and pyarrow would cost more than a task.
    """
    global _frozen
    if not _frozen:
        gc.collect()
        gc.freeze()
        _frozen = True
