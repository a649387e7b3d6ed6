"""Who serves a SQLite file: one node at a time, by a lock that the system takes back when the process ends, however."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path
from typing import TextIO

from holdfast.errors import RequestError


def hold(path: Path, node: str) -> TextIO:
    """Held until the file that is returned is closed. RequestError names who holds it."""
    file = path.with_name(path.name + ".node").open("a+", encoding="utf-8")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.seek(0)
        holder = file.read().strip() or "another process"
        file.close()
        raise RequestError(
            f"{path} is served by {holder} already; stop that one first, or let nodes share a PostgreSQL store"
        ) from None
    file.truncate(0)
    file.write(f"node {node} (process {os.getpid()})")
    file.flush()
    return file
