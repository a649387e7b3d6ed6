"""Session records and cursors to the metadata store: many waiting changes, one transaction."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import msgspec

from holdfast.cursors.cursor import Cursor
from holdfast.cursors.flush import CursorStore
from holdfast.errors import HoldfastError, RequestError
from holdfast.keys import SESSIONS, session_cursor_key, session_key
from holdfast.metadata import Delete, Metadata, Put
from holdfast.model import Stream
from holdfast.sessions.positions import Gap
from holdfast.sessions.records import SessionRecord, restore
from holdfast.sessions.session import Session

logger = logging.getLogger("holdfast.keeper")

T = TypeVar("T")
TRANSACTION_BYTES = 1 << 20
"""etcd takes no larger ones."""

AGAIN_SECONDS = 1.0
"""A session that could not be deleted is tried again after this long."""


def _cursor_keys(client_id: str, filters: list[str], heads: dict[Stream, int]) -> list[str]:
    return [session_cursor_key(stream, client_id, text) for stream in heads for text in filters]


class Keeper:
    """One thread that talks to the metadata store."""

    def __init__(self, metadata: Metadata, on_trimmed: str):
        self.metadata = metadata
        self.cursors = CursorStore(metadata)
        self._on_trimmed = on_trimmed
        self._thread = ThreadPoolExecutor(1, "holdfast-keeper")
        self._pending: dict[str, bytes | None] = {}
        self._waiters: list[asyncio.Future[None]] = []
        self._writing = False
        self._recorded: set[str] = set()
        """Clients of whose sessions there is a record, for all we know."""
        self._over: set[str] = set()
        """Those of them whose sessions have ended: the record is to go."""

    async def call(self, work: Callable[..., T], *arguments: Any) -> T:
        """Run on the keeper's thread, after what was asked for before."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, work, *arguments)

    # -- session records ---------------------------------------------------------------------------------

    def save(self, record: SessionRecord) -> asyncio.Future[None]:
        """Resolved when it is durable; saves that come meanwhile go together."""
        self._recorded.add(record.client_id)
        self._over.discard(record.client_id)
        return self.put(session_key(record.client_id), msgspec.json.encode(record))

    async def forget(self, client_id: str, filters: list[str], heads: dict[Stream, int]) -> None:
        """The session is over: its record goes, and its cursors with it, if it has any.

        What the store refuses is asked for again until it is done, or a session of that client begins.
        """
        if client_id not in self._recorded:
            return
        self._over.add(client_id)
        keys = _cursor_keys(client_id, filters, heads)
        try:
            await self._forget(client_id, keys)
        except HoldfastError:
            asyncio.get_running_loop().call_later(AGAIN_SECONDS, self._forget_again, client_id, keys)
            raise

    def _forget(self, client_id: str, keys: list[str]) -> asyncio.Future[Any]:
        # Both are asked for before anything waits: whatever a new session of that client stores comes after them.
        removed = self.put(session_key(client_id), None)
        deleted = asyncio.ensure_future(self.call(self.cursors.delete, keys)) if keys else removed
        forgotten = asyncio.gather(removed, deleted)
        forgotten.add_done_callback(lambda done: self._forgotten(client_id, done))
        return forgotten

    def _forgotten(self, client_id: str, done: asyncio.Future[Any]) -> None:
        if not done.cancelled() and done.exception() is None and client_id in self._over:
            self._over.remove(client_id)
            self._recorded.discard(client_id)

    def _forget_again(self, client_id: str, keys: list[str]) -> None:
        if client_id not in self._over:
            return

        def again(done: asyncio.Future[Any]) -> None:
            if not done.cancelled() and (error := done.exception()) is not None:
                logger.warning("the session of %s is not deleted yet: %s", client_id, error)
                asyncio.get_running_loop().call_later(AGAIN_SECONDS, self._forget_again, client_id, keys)

        self._forget(client_id, keys).add_done_callback(again)

    def put(self, key: str, value: bytes | None) -> asyncio.Future[None]:
        """Store it, or delete it."""
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._pending[key] = value
        self._waiters.append(future)
        if not self._writing:
            self._writing = True
            asyncio.get_running_loop().call_soon(self._write)
        return future

    def _write(self) -> None:
        pending, self._pending = self._pending, {}
        waiters, self._waiters = self._waiters, []
        if not waiters:
            self._writing = False
            return
        loop = asyncio.get_running_loop()
        writing = loop.run_in_executor(self._thread, self._transact, pending)
        writing.add_done_callback(lambda done: self._written(done, waiters))

    def _transact(self, pending: dict[str, bytes | None]) -> None:
        most = self.metadata.batch_max or len(pending)
        changes: list[Put | Delete] = []
        size = 0
        for key, value in pending.items():
            size += len(value or b"")
            if changes and (len(changes) == most or size > TRANSACTION_BYTES):
                self.metadata.transact(changes)
                changes, size = [], len(value or b"")
            changes.append(Delete(key) if value is None else Put(key, value))
        self.metadata.transact(changes)

    def _written(self, done: asyncio.Future[None], waiters: list[asyncio.Future[None]]) -> None:
        error = done.exception()
        for waiter in waiters:
            if not waiter.done():
                if error is None:
                    waiter.set_result(None)
                else:
                    waiter.set_exception(error)
                    waiter.exception()  # whoever does not wait for it need not be told
        self._write()

    def load_all(self) -> list[SessionRecord]:
        """Every stored session (on the keeper's thread or before it matters)."""
        found = []
        for key, entry in self.metadata.list(SESSIONS).items():
            try:
                found.append(msgspec.json.decode(entry.value, type=SessionRecord))
            except msgspec.MsgspecError as error:
                logger.error("the session at %s cannot be read and is left alone: %s", key, error)
        self._recorded.update(record.client_id for record in found)
        return found

    # -- bringing a session back -------------------------------------------------------------------------

    def restore(self, record: SessionRecord, heads: dict[Stream, int]) -> Session:
        """A session from its record and its cursors (on the keeper's thread)."""

        def load(stream: Stream, filter_text: str) -> Cursor | None:
            return self.cursors.load(session_cursor_key(stream, record.client_id, filter_text))

        return restore(record, heads, load, self._unreadable)

    def _unreadable(
        self, session: Session, stream: Stream, error: RequestError, since: int, head: int
    ) -> Cursor | None:
        if self._on_trimmed == "error":
            raise error
        logger.error("%s; going on from the %s message", error, self._on_trimmed)
        if self._on_trimmed == "earliest":
            return None
        session.positions.gaps.append(Gap(str(stream), since, head, str(error), time.time()))
        return Cursor(head - 1)

    # -- cursors -----------------------------------------------------------------------------------------

    async def flush(self, sessions: list[Session], heads: dict[Stream, int]) -> int:
        """Save the dirty cursors of these sessions in one transaction; what could not be saved stays dirty."""
        wanted: dict[str, Cursor] = {}
        owners: dict[str, tuple[Session, Stream]] = {}
        for session in sessions:
            dirty = session.positions.take_dirty()
            if not session.durable:
                continue
            for (filter_text, stream), cursor in session.cursors(dirty, heads).items():
                key = session_cursor_key(stream, session.client_id, filter_text)
                wanted[key] = cursor
                owners[key] = (session, stream)
        if not wanted:
            return 0
        settled: set[str] = set()
        try:
            settled = await self.call(self.cursors.save, wanted, time.time())
        except HoldfastError as error:
            logger.warning("%d cursors could not be saved and will be tried again: %s", len(wanted), error)
        for key in wanted.keys() - settled:
            session, stream = owners[key]
            session.positions.dirty.add(stream)
        return len(settled)

    async def delete_cursors(self, client_id: str, filters: list[str], heads: dict[Stream, int]) -> None:
        keys = _cursor_keys(client_id, filters, heads)
        if keys:
            await self.call(self.cursors.delete, keys)

    def close(self) -> None:
        self._thread.shutdown()
