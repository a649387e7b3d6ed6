"""What a process of Spark keeps between tasks: its open stores, and a garbage collector that passes over the rest."""

from __future__ import annotations

import gc
import os
import threading

from holdfast.log import Log
from holdfast.store import Store, StoreOptions, open_store

_open: dict[tuple[int, str], Store] = {}
_lock = threading.Lock()
_frozen = False


def store_at(url: str) -> Store:
    """The store at this URL, opened once. Never closed: the process ends first."""
    with _lock:
        key = (os.getpid(), url)
        if key not in _open:
            _open[key] = open_store(url, StoreOptions(notifications=False, mapped=True))
        return _open[key]


def log_at(url: str) -> Log:
    return store_at(url).log()


def settle() -> None:
    """Take everything loaded so far out of the garbage collector's sight.

    Spark collects garbage after each task; walking all of pyspark and pyarrow would cost more than a task.
    """
    global _frozen
    if not _frozen:
        gc.collect()
        gc.freeze()
        _frozen = True
