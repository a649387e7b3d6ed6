"""Sessions in a database: what SQLite and PostgreSQL do alike.

A write is one transaction, and takes its locks in this order, each kind by name, so that nodes wait for each other
but never in a circle:

    1. the rows, by client id; compare them with what each write expects
    2. insert and update the rows that are as expected, takes under a new epoch each
    3. the filters that were subscribed to or unsubscribed from
    4. the log's streams, for wills
    5. packet ids of sessions that have ended
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from typing import Any, NamedTuple

import msgspec

from holdfast.log.contract import GenerationSealed, Landed, ReceivedId
from holdfast.log.log import Log, Prepared
from holdfast.model import LOG
from holdfast.sessions.table import (
    FilterCounts,
    RowWrite,
    SessionRow,
    StoredWill,
    Verdict,
    check_client_ids,
    check_writes,
)
from holdfast.store.in_sql.database import Database, Db, Row, Transaction
from holdfast.store.wills import wills_batch

COLUMNS = (
    *("client_id", "epoch", "seq", "owner", "lease", "connect", "born", "expiry_secs", "left_at", "will", "will_due"),
    *("due", "subscriptions", "cursors", "packets", "dead"),
)
"""Of the table, in the order of `SessionRow`."""
ALL = ", ".join(f"s.{column}" for column in COLUMNS)


class Seen(NamedTuple):
    """Of a row that is locked: what decides about a write, and how it is done."""

    epoch: int
    seq: int
    born: str
    due: float | None
    lease: int | None


SEEN = "client_id, epoch, seq, born, due, lease"


class SqlSessionTable(ABC):
    """The promises of `sessions/table.py`; subclasses know how their database writes many rows at once."""

    def __init__(self, database: Database, log: Log):
        self._database, self._log = database, log

    def now(self) -> float:
        sql = f"select {self._database.dialect.now}"
        return float(self._database.ask(lambda db: db.run(sql))[0][0])

    def read(self, client_ids: Collection[str]) -> dict[str, SessionRow]:
        check_client_ids(client_ids)
        return self._database.ask(lambda db: self._read(db, client_ids))

    def _read(self, db: Db, client_ids: Collection[str]) -> dict[str, SessionRow]:
        if not client_ids:
            return {}
        where, given = self._find("s.client_id", client_ids)
        rows = db.run(f"select {ALL} from sessions s where {where}", given)
        wanted = set(client_ids)
        return {row[0]: row_of(row) for row in rows if row[0] in wanted}

    def write(self, writes: Sequence[RowWrite]) -> list[Verdict]:
        check_writes(writes)
        if not writes:
            return []
        while True:
            try:
                verdicts, wills, landed = self._database.change(lambda db: self._write(db, writes))
            except GenerationSealed:
                self._log.sealed(LOG)
                continue
            if wills is not None:
                self._log.landed(wills, landed)
            return verdicts

    def _write(
        self, db: Transaction, writes: Sequence[RowWrite]
    ) -> tuple[list[Verdict], Prepared | None, list[Landed]]:
        writes_of = {write.row.client_id: write for write in writes}
        seen = self._lock(db, sorted(writes_of))
        fit = [write for client_id, write in sorted(writes_of.items()) if _as_expected(write, seen.get(client_id))]
        epochs = self._store(db, fit, seen) if fit else {}
        accepted = [write for write in fit if write.row.client_id in epochs]
        if deltas := _deltas(accepted):
            self._count_filters(db, deltas)
        wills, landed = self._publish(db, accepted)
        if ended := [(write.row.client_id, _life(write.row)) for write in accepted if _ends(write, seen)]:
            self._void_received(db, ended)
        now = self._read(db, writes_of.keys() - epochs.keys())
        verdicts = [
            Verdict(True, _written(write, epochs[client_id]))
            if client_id in epochs
            else Verdict(False, now.get(client_id))
            for client_id, write in writes_of.items()
        ]
        return verdicts, wills, landed

    def _publish(self, db: Transaction, accepted: Sequence[RowWrite]) -> tuple[Prepared | None, list[Landed]]:
        if not any(write.publish for write in accepted):
            return None, []
        batch, retained = wills_batch(accepted, self._log.clock())
        made = self._log.prepare(LOG, batch)
        landed, _ = db.append(LOG, made.generation, made.blocks, sorted(made.topics), {}, None, made.now, retained)
        return made, landed

    def due(self, now: float, limit: int) -> list[SessionRow]:
        sql = f"select {ALL} from sessions s where s.due <= ? order by s.due limit ?"
        return self._rows(sql, now, limit)

    @abstractmethod
    def of_lease(self, lease: int, after: str, limit: int) -> list[SessionRow]: ...

    def page(self, after: str, limit: int) -> list[SessionRow]:
        sql = f"select {ALL} from sessions s where not s.dead and s.client_id > ? order by s.client_id limit ?"
        return self._rows(sql, after, limit)

    def leases(self) -> set[int]:
        # From one lease to the next in the index, however many rows name each.
        sql = """
            with recursive named (lease) as (
                select (select lease from sessions where lease is not null order by lease limit 1)
                union all
                select (select s.lease from sessions s where s.lease > named.lease order by s.lease limit 1)
                from named where named.lease is not null
            ) select lease from named where lease is not null
        """
        return {lease for (lease,) in self._database.ask(lambda db: db.run(sql))}

    def bury(self, before: float, limit: int) -> int:
        # Asked twice because the answer was lost, it removes what is left.
        return self._database.change(lambda db: self._bury(db, before, limit), repeatable=True)

    @abstractmethod
    def _bury(self, db: Db, before: float, limit: int) -> int: ...

    @abstractmethod
    def filters_since(self, version: int) -> FilterCounts: ...

    def unused(self, filters: Collection[str]) -> set[str]:
        where, given = self._find("filter", filters)
        sql = f"select filter from session_filters where {where} and sessions > 0"
        return set(filters).difference(row[0] for row in self._database.ask(lambda db: db.run(sql, given)))

    def count(self) -> int:
        sql = "select (select count(*) from sessions) - (select count(*) from sessions where dead)"
        return int(self._database.ask(lambda db: db.run(sql))[0][0])

    def received(self, client_ids: Collection[str]) -> dict[str, dict[int, int]]:
        check_client_ids(client_ids)
        if not client_ids:
            return {}
        of_rows, given = self._find("s.client_id", client_ids)
        of_ids, _ = self._find("r.client_id", client_ids)
        sql = f"""
            select r.client_id, r.packet_id, r.mark from session_received r
            join sessions s on s.client_id = r.client_id and s.born = r.born
            where {of_rows} and {of_ids} and not s.dead
        """
        found: dict[str, dict[int, int]] = {}
        for client_id, packet_id, mark in self._database.ask(lambda db: db.run(sql, given, given)):
            found.setdefault(client_id, {})[packet_id] = mark
        return found

    def release(self, received: Sequence[ReceivedId]) -> None:
        if received:
            self._database.change(lambda db: self._release(db, sorted(received)), repeatable=True)

    def _rows(self, sql: str, *args: object) -> list[SessionRow]:
        return [row_of(row) for row in self._database.ask(lambda db: db.run(sql, *args))]

    # -- what the databases do differently ---------------------------------------------------------------

    @abstractmethod
    def _find(self, column: str, texts: Iterable[str]) -> tuple[str, object]:
        """A condition that finds these client ids or filters by their index, and its parameter. It may find others."""

    @abstractmethod
    def _lock(self, db: Db, client_ids: Sequence[str]) -> dict[str, Seen]:
        """The rows there are, which nobody else changes until the commit."""

    @abstractmethod
    def _store(self, db: Db, fit: Sequence[RowWrite], seen: dict[str, Seen]) -> dict[str, int]:
        """Insert and update, by client id; the epochs of the rows, without those that somebody else has inserted."""

    @abstractmethod
    def _count_filters(self, db: Db, deltas: Sequence[tuple[str, int]]) -> None:
        """Add to the counts of these filters, which are in order; never below 0."""

    @abstractmethod
    def _void_received(self, db: Db, ended: Sequence[tuple[str, str | None]]) -> None:
        """Forget packet ids of these clients, except those of the life that is named."""

    @abstractmethod
    def _release(self, db: Db, received: Sequence[ReceivedId]) -> None: ...


def _as_expected(write: RowWrite, seen: Seen | None) -> bool:
    return write.expected == (None if seen is None else (seen.epoch, seen.seq))


def _written(write: RowWrite, epoch: int) -> SessionRow:
    return msgspec.structs.replace(write.row, epoch=epoch, seq=0) if write.take else write.row


def _deltas(accepted: Iterable[RowWrite]) -> list[tuple[str, int]]:
    """What each filter's count changes by, in the order of filters."""
    counts: Counter[str] = Counter()
    for write in accepted:
        counts.update(write.subscribed)
        counts.subtract(write.unsubscribed)
    return sorted((text, delta) for text, delta in counts.items() if delta)


def _ends(write: RowWrite, seen: dict[str, Seen]) -> bool:
    """Is an earlier life of this session over?"""
    before = seen.get(write.row.client_id)
    return write.row.dead or (write.take and (before is None or before.born != write.row.born))


def _life(row: SessionRow) -> str | None:
    return None if row.dead else row.born


def row_of(values: Row) -> SessionRow:
    """A row of the table, all columns."""
    client_id, epoch, seq, owner, lease, connect, born, expiry, left_at, will, will_due, due, *packed, dead = values
    subscriptions, cursors, packets = map(bytes, packed)
    return SessionRow(
        client_id=client_id,
        epoch=epoch,
        seq=seq,
        owner=owner,
        lease=lease,
        connect=connect,
        born=born,
        expiry_secs=expiry,
        left_at=left_at,
        will=None if will is None else StoredWill(*msgspec.msgpack.decode(will)),
        will_due=will_due,
        due=due,
        subscriptions=subscriptions,
        cursors=cursors,
        packets=packets,
        dead=bool(dead),
    )


def values_of(row: SessionRow, epoch: int, seq: int) -> tuple[Any, ...]:
    """The columns of a row, under this epoch and seq."""
    will = None if row.will is None else msgspec.msgpack.encode(msgspec.structs.astuple(row.will))
    return (
        *(row.client_id, epoch, seq, row.owner, row.lease, row.connect, row.born, row.expiry_secs),
        *(_seconds(row.left_at), will, _seconds(row.will_due), _seconds(row.due)),
        *(row.subscriptions, row.cursors, row.packets, row.dead),
    )


def _seconds(time: float | None) -> float | None:
    return None if time is None else float(time)
