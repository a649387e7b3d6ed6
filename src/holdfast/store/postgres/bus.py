"""Messages between nodes in a PostgreSQL table: NOTIFY says that something is there, and a poll looks in any case.

The table is unlogged: whoever sends a message sends it again until it is answered.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence

import psycopg

from holdfast.errors import StoreError
from holdfast.jitter import chance
from holdfast.store.postgres.database import PostgresDatabase
from holdfast.store.postgres.transaction import Connection

logger = logging.getLogger("holdfast.bus")

CHANNEL = "holdfast_bus"
POLL_SECONDS = 0.5
STALE_SECONDS = 30

Arrived = Callable[[list[bytes]], None]


class PostgresBus:
    def __init__(self, database: PostgresDatabase, node: str):
        self._database, self._node = database, node
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def send(self, messages: Sequence[tuple[str, bytes]]) -> None:
        nodes, bodies = [node for node, _ in messages], [body for _, body in messages]
        with self._database.write() as db:
            db.execute("set local synchronous_commit to off")
            db.execute("insert into bus (node, body) select * from unnest(%s::text[], %s::bytea[])", (nodes, bodies))
            for node in set(nodes):
                db.execute("select pg_notify(%s, %s)", (CHANNEL, node))

    def listen(self, arrived: Arrived) -> None:
        self._thread = threading.Thread(target=self._listen, args=(arrived,), name="holdfast-bus", daemon=True)
        self._thread.start()

    def _listen(self, arrived: Arrived) -> None:
        while not self._stop.is_set():
            try:
                with self._database.connect() as db:
                    db.execute(f"listen {CHANNEL}")
                    while not self._stop.is_set():
                        if bodies := self._fetch(db):
                            arrived(bodies)
                        for note in db.notifies(timeout=POLL_SECONDS * (0.5 + chance.random() / 2), stop_after=1):
                            if note.payload == self._node:
                                break
            except (StoreError, psycopg.Error) as error:
                logger.warning("the bus is away: %s", str(error).splitlines()[0])
                self._stop.wait(0.2 + chance.random() * 0.3)

    def _fetch(self, db: Connection) -> list[bytes]:
        rows = db.execute(
            "with mine as (delete from bus where node = %s returning id, body, sent_at)"
            " select body from mine where sent_at > now() - make_interval(secs => %s) order by id",
            (self._node, STALE_SECONDS),
            binary=True,
        ).fetchall()
        return [body for (body,) in rows]

    def close(self) -> None:
        self._stop.set()
        if self._thread is not None:
            self._thread.join(3)
