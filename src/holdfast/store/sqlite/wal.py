"""A WAL that has grown large is emptied on a thread of its own.

SQLite cannot write its WAL over while somebody reads what is in it, and it grows. When the reader has gone, the next
commit would copy all of it home, for which everybody would wait (seconds for 300 MB), and the file would keep its size.
So commits copy nothing home while the WAL is large:

    copy home beside the commits  ─▶  until little is left  ─▶  the rest, and cut the file, between two commits
"""

from __future__ import annotations

import os
import sqlite3
import threading
import time
from collections.abc import Callable
from contextlib import closing, suppress
from pathlib import Path

from holdfast.store.sqlite.turns import Turns

CHECKPOINT_PAGES = 1000
"""8 MB of WAL before its pages are copied home, a wait of a few milliseconds. With more, the wait grows, and more
appends write to a WAL that still grows, which the disk takes twice as long to make durable as one that is written over.
"""
LARGE_BYTES = 64 << 20
LOOK_EVERY_SECONDS = 0.02
"""A look at the size is a system call, which a commit of one message would notice."""
_EVERY_SECONDS = 0.25
_BUSY_MILLISECONDS = 5
"""So long a commit may wait for readers that have not seen yet that everything is at home."""


class Wal:
    """The WAL of one database, as one process sees it."""

    def __init__(self, database: Path, connect: Callable[[], sqlite3.Connection], lock: Turns):
        self._database = os.path.realpath(database)
        self._path = f"{database}-wal"
        self._connect = connect
        self._lock = lock
        """Whoever holds it may commit, and is the only one who does."""
        self._looked_at = 0.0
        self._thread: threading.Thread | None = None
        self._stop = threading.Event()

    def look(self, writer: sqlite3.Connection) -> None:
        """After a commit, by whoever holds the lock."""
        if (now := time.monotonic()) < self._looked_at + LOOK_EVERY_SECONDS:
            return
        self._looked_at = now
        if self._thread is None and self._size() > LARGE_BYTES and not self._stop.is_set():
            writer.execute("pragma wal_autocheckpoint = 0")
            self._thread = threading.Thread(target=self._empty, args=(writer,), name="holdfast-wal", daemon=True)
            self._thread.start()

    def _size(self) -> int:
        try:
            return os.stat(self._path).st_size
        except OSError:
            return 0

    def _empty(self, writer: sqlite3.Connection) -> None:
        while not self._stop.wait(_EVERY_SECONDS):
            with suppress(sqlite3.Error), closing(self._connect()) as own:  # no room, say: so it tries again
                own.execute(f"pragma busy_timeout = {_BUSY_MILLISECONDS}")
                self._empty_through(own, writer)
                return

    def _empty_through(self, own: sqlite3.Connection, writer: sqlite3.Connection) -> None:
        at_home, copied, wait, refused = 0, 0, 0.0, 0
        while not self._stop.wait(wait):
            home_before, copied_before = at_home, copied
            at_home, left = _copy_home(own)
            copied, wait = at_home - home_before, _EVERY_SECONDS
            if copied:
                self._make_durable()
            if left > CHECKPOINT_PAGES:
                continue  # somebody reads
            if copied > CHECKPOINT_PAGES and not 0 < copied_before <= copied:
                wait = 0.0  # commits have added some meanwhile
                continue
            # Little is left; or commits add as much as is copied meanwhile, and have to wait for once.
            self._forget_contents()
            _copy_home(own)
            self._make_durable()
            if self._cut(own, writer):
                return
            refused += 1
            wait *= min(2**refused, 16)

    def _cut(self, own: sqlite3.Connection, writer: sqlite3.Connection) -> bool:
        with self._lock:
            if self._stop.is_set():
                return True
            busy, _, _ = own.execute("pragma wal_checkpoint(truncate)").fetchone()
            if busy:
                return False
            writer.execute(f"pragma wal_autocheckpoint = {CHECKPOINT_PAGES}")
            self._thread = None
            return True

    def _make_durable(self) -> None:
        """What was copied home. SQLite would do it at the very end, all at once, and commits would wait.

        Through SQLite's own file descriptor: closing another one of that file would take away SQLite's locks on it.
        """
        with suppress(OSError):  # not Linux, or it was closed just now
            for number in os.listdir("/proc/self/fd"):
                if os.readlink(f"/proc/self/fd/{number}") == self._database:
                    os.fdatasync(int(number))
                    return

    def _forget_contents(self) -> None:
        """The system's copy of the WAL: to cut the file it would have to let go of it, and commits would wait."""
        with suppress(OSError, AttributeError):
            file = os.open(self._path, os.O_RDONLY)  # SQLite has no locks on this one
            try:
                os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
            finally:
                os.close(file)

    def close(self) -> None:
        self._stop.set()
        if (thread := self._thread) is not None:
            thread.join()


def _copy_home(db: sqlite3.Connection) -> tuple[int, int]:
    """As much as can be, beside whoever reads and commits: how many pages are at home now, and how many were left.

    Those that were committed meanwhile are not counted.
    """
    _, pages, at_home = db.execute("pragma wal_checkpoint(passive)").fetchone()
    return at_home, pages - at_home
