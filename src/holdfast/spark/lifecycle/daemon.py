"""Spark's worker daemon (`python -m holdfast.spark.lifecycle.daemon`), whose workers begin with everything imported.

Spark's own forks first and lets each worker import Arrow, its own worker's module and the format anew: it fears threads
that do not survive a fork. The only ones these imports start are allocators' and OpenBLAS's, which look after
themselves; so here a worker costs a fork. What must not be the same in all of them is made anew after it.
"""

from __future__ import annotations

import gc
import os
import socket
import sys
from importlib import import_module

import pyspark.daemon

_worker = pyspark.daemon.worker


def worker(sock: socket.socket, authenticated: bool) -> int:
    """As Spark's; but a JVM that no longer listens has had enough (`limit`, `stop`), which is no traceback's worth."""
    try:
        return _worker(sock, authenticated)
    except BrokenPipeError:
        os._exit(1)


def prepare(worker_module: str) -> None:
    """Import what the workers need, once for all of them."""
    import_module(worker_module)
    for name in ("reading.batch", "reading.stream", "writing.sink"):
        import_module(f"holdfast.spark.{name}")
    os.register_at_fork(after_in_child=_draw_anew)
    gc.freeze()  # what is here now stays: no worker need look at it, and so copy it, again


def _draw_anew() -> None:
    """numpy's random numbers would be the same in every worker; Python sees to its own."""
    if random := sys.modules.get("numpy.random"):
        random.seed()


def main() -> None:
    prepare(sys.argv[1] if sys.argv[1:] and sys.argv[1].startswith("pyspark") else "pyspark.worker")
    pyspark.daemon.worker = worker
    pyspark.daemon.manager()


if __name__ == "__main__":
    main()
