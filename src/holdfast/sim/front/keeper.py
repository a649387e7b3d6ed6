"""Session records and cursors to the simulated metadata store: one thing after the other, each in its own time."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import msgspec

from holdfast.cursors.cursor import Cursor
from holdfast.cursors.flush import CursorStore
from holdfast.errors import RequestError
from holdfast.keys import SESSIONS, cursors_of_stream, session_cursor_key, session_key
from holdfast.metadata.entries import Delete, Put
from holdfast.model import Stream
from holdfast.sessions.records import SessionRecord, restore
from holdfast.sessions.session import Session
from holdfast.sim.front.disk import StoreDown
from holdfast.sim.front.world import Pending, Work

if TYPE_CHECKING:
    from holdfast.sim.front.node import SimFront


class SimKeeper:
    def __init__(self, front: SimFront):
        self.front, self.world, self.disk = front, front.world, front.disk
        self.cursors = CursorStore(self.disk.metadata)
        self._jobs: list[tuple[Callable[[], Any], Pending]] = []
        self._wake: Pending = self.world.pending()

    def call(self, work: Callable[[], Any]) -> Pending:
        """After what was asked for before."""
        found = self.world.pending()
        self._jobs.append((work, found))
        self._wake.settle()
        return found

    def run(self) -> Work:
        while True:
            yield self._wake
            self._wake = self.world.pending()
            while self._jobs:
                work, found = self._jobs.pop(0)
                yield self.world.rng.random() * self.disk.seconds
                if self.disk.fails(0.0):
                    yield 0.05
                    found.fail(StoreDown("nothing was saved"))
                    continue
                value = work()
                yield self.world.rng.random() * self.disk.seconds
                found.settle(value)

    # -- records -------------------------------------------------------------------------------------------

    def save(self, record: SessionRecord) -> Pending:
        value = msgspec.json.encode(record)
        return self.call(lambda: self.disk.metadata.transact([Put(session_key(record.client_id), value)]))

    def remove(self, client_id: str) -> Pending:
        return self.call(lambda: self.disk.metadata.transact([Delete(session_key(client_id))]))

    def load_all(self) -> list[SessionRecord]:
        found = self.disk.metadata.list(SESSIONS).values()
        return [msgspec.json.decode(entry.value, type=SessionRecord) for entry in found]

    def restore(self, record: SessionRecord, heads: dict[Stream, int]) -> Session:
        def load(stream: Stream, filter_text: str) -> Cursor | None:
            return self.cursors.load(session_cursor_key(stream, record.client_id, filter_text))

        return restore(record, heads, load, _unreadable)

    # -- cursors -------------------------------------------------------------------------------------------

    def flush(self, sessions: list[Session], heads: dict[Stream, int]) -> Work:
        truth = self.front.truth
        wanted: dict[str, Cursor] = {}
        owners: dict[str, tuple[Session, Stream]] = {}
        for session in sessions:
            dirty = session.positions.take_dirty()
            if not session.durable:
                continue
            for (filter_text, stream), cursor in session.cursors(dirty, heads).items():
                truth.check_cursor(session.client_id, filter_text, stream, cursor)
                key = session_cursor_key(stream, session.client_id, filter_text)
                wanted[key] = cursor
                owners[key] = (session, stream)
        if not wanted:
            return
        whole = {
            session.client_id for session, _ in owners.values() if not any(s.moving for s in session.subscriptions)
        }
        flushing = truth.flushing(whole)
        settled: set[str] = set()
        try:
            settled = yield self.call(lambda: self.cursors.save(wanted, self.world.now))
        except StoreDown:
            pass
        else:
            truth.flushed(flushing)
        for key in wanted.keys() - settled:
            session, stream = owners[key]
            session.positions.dirty.add(stream)

    def delete_cursors(self, client_id: str, filters: list[str], heads: dict[Stream, int]) -> Work:
        keys = [session_cursor_key(stream, client_id, text) for stream in heads for text in filters]
        if keys:
            yield self.call(lambda: self.cursors.delete(keys))

    def forget_stream(self, stream: Stream) -> Pending:
        metadata = self.disk.metadata
        return self.call(lambda: self.cursors.delete(metadata.list(cursors_of_stream(stream))))


def _unreadable(session: Session, stream: Stream, error: RequestError, since: int, head: int) -> Cursor | None:
    raise error
