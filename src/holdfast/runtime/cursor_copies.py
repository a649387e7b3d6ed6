"""Copies of sessions' cursors in a metadata store of its own, one key per subscription and stream, for others to read.

A session's row in the store is the truth, and the only thing a session goes on from: so a copy that is late, or that
could not be written, costs nobody a message. A copy is fenced by the session's epoch.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor

from holdfast.cursors.cursor import Cursor
from holdfast.cursors.flush import CursorStore
from holdfast.errors import HoldfastError
from holdfast.groups.shares import is_shared
from holdfast.keys import session_cursor_key
from holdfast.metadata import Metadata
from holdfast.model import LOG, Stream
from holdfast.sessions.packed import unpack_cursors, unpack_subscriptions
from holdfast.sessions.table import RowWrite, SessionRow

logger = logging.getLogger("holdfast.sessions")


class CursorCopies:
    """One per node; told of rows on the loop's thread, writes on one of its own."""

    def __init__(self, metadata: Metadata, streams: Callable[[], Iterable[Stream]]):
        self._store, self._streams = CursorStore(metadata), streams
        self._thread = ThreadPoolExecutor(1, "holdfast-cursor-copies")
        self._waiting: dict[str, tuple[SessionRow, set[str]]] = {}
        """By client: the newest row, and filters that are gone."""
        self._copied: dict[str, dict[str, tuple[int, Cursor]]] = {}
        """Of sessions that are served here, by client and key: number of the subscription, and what was copied last."""
        self._busy = False

    def written(self, write: RowWrite, row: SessionRow) -> None:
        """This row is stored."""
        _, gone = self._waiting.get(row.client_id, (row, set()))
        self._waiting[row.client_id] = (row, (gone | set(write.unsubscribed)) - set(write.subscribed))
        if not self._busy:
            self._busy = True
            asyncio.get_running_loop().call_soon(self._copy)

    def _copy(self) -> None:
        waiting, self._waiting = self._waiting, {}
        if not waiting:
            self._busy = False
            return
        copying = asyncio.get_running_loop().run_in_executor(
            self._thread, self._copy_all, waiting, tuple(self._streams())
        )
        copying.add_done_callback(self._was_copied)

    def _was_copied(self, done: asyncio.Future[None]) -> None:
        if done.cancelled():
            return
        if (error := done.exception()) is not None:
            logger.warning(
                "copies of cursors are late: %s", error, exc_info=not isinstance(error, HoldfastError) and error
            )
        self._copy()

    def _copy_all(self, waiting: dict[str, tuple[SessionRow, set[str]]], streams: tuple[Stream, ...]) -> None:
        """On the thread."""
        fresh: dict[str, Cursor] = {}
        moved: dict[str, Cursor] = {}
        gone: list[str] = []
        for client_id, (row, unsubscribed) in waiting.items():
            before = self._copied.pop(client_id, {})
            now = {} if row.dead else _cursors(row)
            gone += [session_cursor_key(stream, client_id, text) for text in unsubscribed for stream in streams]
            gone += [key for key in before if key not in now]
            for key, (number, cursor) in now.items():
                if key not in before or before[key][0] != number:
                    fresh[key] = cursor
                elif before[key][1] != cursor:
                    moved[key] = cursor
            if row.owner is not None:
                self._copied[client_id] = now
        self._store.delete(gone)
        self._store.create(fresh, time.time())
        self._store.save(moved, time.time())

    def close(self) -> None:
        self._thread.shutdown()


def _cursors(row: SessionRow) -> dict[str, tuple[int, Cursor]]:
    """By key: in each stream that is not done to its end."""
    stored = unpack_cursors(row.cursors, row.client_id)
    found = {}
    for entry in unpack_subscriptions(row.subscriptions, row.client_id).entries:
        if is_shared(entry.filter):
            continue
        for generation, shard, _ in stored.session:
            stream = Stream(LOG, shard, generation)
            cursor = stored.cursor(entry.number, stream)
            cursor.epoch = row.epoch
            found[session_cursor_key(stream, row.client_id, entry.filter)] = (entry.number, cursor)
    return found
