"""Spark's worker daemon (`python -m holdfast.spark.daemon`), whose workers begin with everything imported.

Spark's own forks first and lets each worker import Arrow, its own worker's module and the format anew: it fears threads
that do not survive a fork. The only ones these imports start are allocators' and OpenBLAS's, which look after
themselves; so here a worker costs a fork.
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


def main() -> None:
    import_module(sys.argv[1] if len(sys.argv) > 1 else "pyspark.worker")
    for name in ("source", "sink", "stream"):
        import_module(f"holdfast.spark.{name}")
    gc.freeze()  # what is here now stays: no worker need look at it, and so copy it, again
    pyspark.daemon.worker = worker
    pyspark.daemon.manager()


if __name__ == "__main__":
    main()
