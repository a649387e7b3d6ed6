"""Hearing of what other processes append to a PostgreSQL database: LISTEN, and a look now and then."""

from __future__ import annotations

import threading

import psycopg

from holdfast.errors import StoreError
from holdfast.jitter import chance
from holdfast.log.watch import LogChanges, Watcher
from holdfast.store.postgres.log import PostgresLog
from holdfast.store.postgres.transaction import LOG_CHANNEL, Connection

POLL_SECONDS = 1.0
"""How often to look without having been told, while notifications work."""

POLL_ALONE_SECONDS = 0.1
"""The same where notifications are turned off."""


class PostgresWatcher(Watcher):
    """LISTEN carries the hints; a jittered look at the totals backs it up, and stands in where it is off."""

    def __init__(self, log: PostgresLog, notifications: bool = True):
        super().__init__()
        self._log = log
        self._notifications = notifications
        self._changes: LogChanges | None = None

    def _listen(self, ready: threading.Event) -> None:
        while not self._stop.is_set():
            try:
                with self._log.database.connect() as db:
                    if self._notifications:
                        db.execute(f"listen {LOG_CHANNEL}")
                    if self._changes is None:
                        self._changes = LogChanges(self._log.totals, lambda log: self._own.get(log, 0))
                    ready.set()
                    while not self._stop.is_set():
                        for log in self._changes.since_last():
                            self._hint(log)
                        self._wait(db)
            except (StoreError, psycopg.Error):
                self._stop.wait(0.2 + chance.random() * 0.3)  # the server is away: come back and look

    def _wait(self, db: Connection) -> None:
        """Pass hints on until it is time to look for oneself."""
        if not self._notifications:
            self._stop.wait(POLL_ALONE_SECONDS * (0.5 + chance.random() * 0.5))
            return
        until_look = POLL_SECONDS * (0.75 + chance.random() * 0.5)
        while until_look > 0 and not self._stop.is_set():
            # A short wait, so that closing never takes longer than this.
            for note in db.notifies(timeout=min(0.1, until_look)):
                instance, _, log = note.payload.partition(" ")
                if instance != self._log.database.instance:
                    self._hint(log)
            until_look -= 0.1
