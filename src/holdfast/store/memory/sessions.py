"""Sessions in this process's memory, under the lock of the log that takes their wills."""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence

import msgspec

from holdfast.log.contract import Landed, ReceivedId
from holdfast.log.log import Log, Prepared
from holdfast.model import LOG
from holdfast.sessions.table import (
    FilterCounts,
    RowWrite,
    SessionRow,
    Verdict,
    check_client_ids,
    check_writes,
)
from holdfast.store.memory.log import MemoryLog
from holdfast.store.wills import wills_batch


class _Filter(msgspec.Struct):
    sessions: int = 0
    version: int = 0
    changed_at: float = 0.0


class SessionState:
    """The rows themselves; several `MemorySessionTable` share one, as processes share a database."""

    def __init__(self) -> None:
        self.rows: dict[str, SessionRow] = {}
        self.epoch = 0
        self.filters: dict[str, _Filter] = {}
        self.filters_version = 0
        self.filters_trimmed = 0


class MemorySessionTable:
    def __init__(self, state: SessionState, backend: MemoryLog, log: Log):
        self._state, self._backend, self._log = state, backend, log
        backend.epoch_of = lambda client_id: row.epoch if (row := state.rows.get(client_id)) is not None else None

    def now(self) -> float:
        return time.time()

    def read(self, client_ids: Collection[str]) -> dict[str, SessionRow]:
        check_client_ids(client_ids)
        rows = self._state.rows
        with self._backend.lock:
            return {client_id: rows[client_id] for client_id in client_ids if client_id in rows}

    def write(self, writes: Sequence[RowWrite]) -> list[Verdict]:
        check_writes(writes)
        with self._backend.lock:
            accepted = [write for write in writes if self._as_expected(write)]
            wills, landed = self._publish(accepted)
            written = {write.row.client_id: self._store(write) for write in accepted}
            self._count_filters(accepted)
            verdicts = [
                Verdict(client_id in written, self._state.rows.get(client_id))
                for client_id in (write.row.client_id for write in writes)
            ]
        if wills is not None:
            self._log.landed(wills, landed)
        return verdicts

    def _as_expected(self, write: RowWrite) -> bool:
        row = self._state.rows.get(write.row.client_id)
        return write.expected == (None if row is None else (row.epoch, row.seq))

    def _publish(self, accepted: Sequence[RowWrite]) -> tuple[Prepared | None, list[Landed]]:
        if not any(write.publish for write in accepted):
            return None, []
        batch, retained = wills_batch(accepted, self._log.clock())
        while True:
            made = self._log.prepare(LOG, batch)
            topics = sorted(made.topics)
            outcome = self._backend.append(LOG, made.generation, made.blocks, topics, {}, None, made.now, retained)
            if outcome is not None:
                return made, outcome[0]
            self._log.sealed(LOG)

    def _store(self, write: RowWrite) -> SessionRow:
        state, row = self._state, write.row
        if write.take:
            state.epoch += 1
            row = msgspec.structs.replace(row, epoch=state.epoch, seq=0)
        state.rows[row.client_id] = row
        if row.dead or write.take:
            self._void_received(row)
        return row

    def _void_received(self, row: SessionRow) -> None:
        had = self._backend.received.pop(row.client_id, {})
        kept = {one: mark for one, mark in had.items() if one[0] == row.born and not row.dead}
        if kept:
            self._backend.received[row.client_id] = kept

    def _count_filters(self, accepted: Sequence[RowWrite]) -> None:
        state, now = self._state, self.now()
        if any(write.subscribed or write.unsubscribed for write in accepted):
            state.filters_version += 1
        for write in accepted:
            for text, delta in [(t, 1) for t in write.subscribed] + [(t, -1) for t in write.unsubscribed]:
                if delta > 0 or text in state.filters:
                    before = state.filters.get(text, _Filter())
                    state.filters[text] = _Filter(max(before.sessions + delta, 0), state.filters_version, now)

    def due(self, now: float, limit: int) -> list[SessionRow]:
        with self._backend.lock:
            found = [(row.due, row.client_id) for row in self._state.rows.values() if row.due is not None]
            return [self._state.rows[client_id] for due, client_id in sorted(found)[:limit] if due <= now]

    def of_lease(self, lease: int, after: str, limit: int) -> list[SessionRow]:
        with self._backend.lock:
            rows = self._state.rows
            found = sorted(name for name, row in rows.items() if row.lease == lease and name > after)
            return [rows[client_id] for client_id in found[:limit]]

    def page(self, after: str, limit: int) -> list[SessionRow]:
        with self._backend.lock:
            rows = self._state.rows
            found = sorted(name for name, row in rows.items() if not row.dead and name > after)
            return [rows[client_id] for client_id in found[:limit]]

    def leases(self) -> set[int]:
        with self._backend.lock:
            return {row.lease for row in self._state.rows.values() if row.lease is not None}

    def bury(self, before: float, limit: int) -> int:
        state = self._state
        with self._backend.lock:
            gone = [
                row for row in state.rows.values() if row.dead and row.left_at is not None and row.left_at < before
            ][:limit]
            for row in gone:
                del state.rows[row.client_id]
                self._void_received(row)
            unused = [t for t, found in state.filters.items() if not found.sessions and found.changed_at < before]
            for text in unused[:limit]:
                state.filters_trimmed = max(state.filters_trimmed, state.filters.pop(text).version)
            return len(gone)

    def unused(self, filters: Collection[str]) -> set[str]:
        with self._backend.lock:
            known = self._state.filters
            return {text for text in filters if text not in known or not known[text].sessions}

    def filters_since(self, version: int) -> FilterCounts:
        state = self._state
        with self._backend.lock:
            if not state.filters_trimmed <= version <= state.filters_version:
                version = 0
            counts = {text: found.sessions for text, found in state.filters.items() if found.version > version}
            return FilterCounts(counts, state.filters_version, whole=not version)

    def count(self) -> int:
        with self._backend.lock:
            return sum(not row.dead for row in self._state.rows.values())

    def received(self, client_ids: Collection[str]) -> dict[str, dict[int, int]]:
        check_client_ids(client_ids)
        found: dict[str, dict[int, int]] = {}
        with self._backend.lock:
            for client_id in client_ids:
                row = self._state.rows.get(client_id)
                if row is not None and not row.dead:
                    had = self._backend.received.get(client_id, {})
                    packet_ids = {number: mark for (born, number), mark in had.items() if born == row.born}
                    if packet_ids:
                        found[client_id] = packet_ids
        return found

    def release(self, received: Sequence[ReceivedId]) -> None:
        with self._backend.lock:
            for one in received:
                had = self._backend.received.get(one.client_id, {})
                if had.get((one.born, one.packet_id)) == one.mark:
                    del had[one.born, one.packet_id]
