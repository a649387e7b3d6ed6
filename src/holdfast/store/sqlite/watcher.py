"""Hearing of what other processes append to a SQLite file: by asking SQLite, twenty times a second."""

from __future__ import annotations

import sqlite3
import threading
from contextlib import suppress

from holdfast.log.watch import LogChanges, Watcher
from holdfast.store.sqlite.database import SqliteDatabase
from holdfast.store.sqlite.log import totals_of

POLL_SECONDS = 0.05


class SqliteWatcher(Watcher):
    """Looks at the file's data version, which changes when another connection commits; then at the totals."""

    def __init__(self, database: SqliteDatabase, poll_seconds: float = POLL_SECONDS):
        super().__init__()
        self._database = database
        self._poll_seconds = poll_seconds
        self._totals: dict[str, tuple[int, int]] = {}
        self._changes: LogChanges | None = None

    def _listen(self, ready: threading.Event) -> None:
        with self._database.read() as db:
            version = None
            if self._changes is None:
                version = db.execute("pragma data_version").fetchone()
                self._totals = totals_of(db)
                self._changes = LogChanges(lambda: self._totals, lambda log: self._own.get(log, 0))
            ready.set()
            while not self._stop.wait(self._poll_seconds):
                with suppress(sqlite3.OperationalError):  # busy or out of room: the next look will tell
                    now = db.execute("pragma data_version").fetchone()
                    if now != version:
                        self._totals = totals_of(db)
                        hints = self._changes.since_last()
                        version = now
                        for log in hints:
                            self._hint(log)
