"""Sessions in a SQLite file: a writing transaction has the whole file, so what was read in it stays true."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence

from holdfast.log.contract import ReceivedId
from holdfast.sessions.table import FilterCounts, RowWrite, SessionRow
from holdfast.store.in_sql.database import Db
from holdfast.store.in_sql.sessions import ALL, COLUMNS, SEEN, Seen, SqlSessionTable, values_of

_INSERT = f"insert into sessions values ({', '.join('?' * len(COLUMNS))})"


def _update(columns: Sequence[str]) -> str:
    """Values are taken by their place among all columns, so that every statement takes the same row."""
    changes = ", ".join(f"{column} = ?{COLUMNS.index(column) + 1}" for column in columns)
    return f"update sessions set {changes} where client_id = ?1"


_MOVE = _update(COLUMNS[1:])
# SQLite writes to an index whose columns a statement names, even if they stay as they are.
_FLUSH = _update([column for column in COLUMNS[1:] if column not in ("due", "lease")])


class SqliteSessionTable(SqlSessionTable):
    def of_lease(self, lease: int, after: str, limit: int) -> list[SessionRow]:
        sql = f"select {ALL} from sessions s where s.lease = ? and s.client_id > ? order by s.client_id limit ?"
        return self._rows(sql, lease, after, limit)

    def _find(self, column: str, texts: Iterable[str]) -> tuple[str, object]:
        return f"{column} in (select value from json_each(?))", json.dumps(list(texts))

    def _lock(self, db: Db, client_ids: Sequence[str]) -> dict[str, Seen]:
        where, given = self._find("client_id", client_ids)
        return {row[0]: Seen(*row[1:]) for row in db.run(f"select {SEEN} from sessions where {where}", given)}

    def _store(self, db: Db, fit: Sequence[RowWrite], seen: dict[str, Seen]) -> dict[str, int]:
        epochs = self._epochs(db, fit)
        of = {_INSERT: [], _MOVE: [], _FLUSH: []}  # type: dict[str, list[tuple[object, ...]]]
        for write in fit:
            row, before = write.row, seen.get(write.row.client_id)
            same = before is not None and (before.due, before.lease) == (row.due, row.lease)
            statement = _INSERT if before is None else _FLUSH if same else _MOVE
            of[statement].append(values_of(row, epochs[row.client_id], 0 if write.take else row.seq))
        for statement, rows in of.items():
            if rows:
                db.run_many(statement, rows)
        return epochs

    def _epochs(self, db: Db, fit: Sequence[RowWrite]) -> dict[str, int]:
        epochs = {write.row.client_id: write.row.epoch for write in fit if not write.take}
        taken = [write.row.client_id for write in fit if write.take]
        if taken:
            sql = "update session_counters set epoch = epoch + ? returning epoch"
            last = db.run(sql, len(taken))[0][0]
            epochs.update(zip(taken, range(last - len(taken) + 1, last + 1), strict=True))
        return epochs

    def _count_filters(self, db: Db, deltas: Sequence[tuple[str, int]]) -> None:
        now = self._database.dialect.now
        version, at = db.run(f"update session_counters set filters = filters + 1 returning filters, {now}")[0]
        db.run_many(
            """insert into session_filters select ?1, ?2, ?3, ?4
               where ?2 > 0 or exists (select 1 from session_filters where filter = ?1)
               on conflict (filter) do update set sessions = max(sessions + excluded.sessions, 0),
                   version = excluded.version, changed_at = excluded.changed_at""",
            [(text, delta, version, at) for text, delta in deltas],
        )

    def filters_since(self, version: int) -> FilterCounts:
        sql = """
            select c.filters, c.filters_trimmed, f.filter, f.sessions
            from session_counters c left join session_filters f on f.version > ?
        """
        rows = self._database.ask(lambda db: db.run(sql, version))
        now, trimmed = rows[0][:2]
        if version and not trimmed <= version <= now:
            return self.filters_since(0)
        counts = {text: sessions for _, _, text, sessions in rows if text is not None}
        return FilterCounts(counts, now, whole=not version)

    def _bury(self, db: Db, before: float, limit: int) -> int:
        gone = db.run(
            """delete from sessions where client_id in (
                   select client_id from sessions where dead and left_at < ? order by left_at limit ?
               ) returning client_id""",
            before,
            limit,
        )
        db.run_many("delete from session_received where client_id = ?", gone)
        unused = db.run(
            """delete from session_filters where filter in (
                   select filter from session_filters where sessions = 0 and changed_at < ? limit ?
               ) returning version""",
            before,
            limit,
        )
        if unused:
            sql = "update session_counters set filters_trimmed = max(filters_trimmed, ?)"
            db.run(sql, max(version for (version,) in unused))
        return len(gone)

    def _void_received(self, db: Db, ended: Sequence[tuple[str, str | None]]) -> None:
        db.run_many("delete from session_received where client_id = ? and born is not ?", ended)

    def _release(self, db: Db, received: Sequence[ReceivedId]) -> None:
        sql = "delete from session_received where client_id = ? and born = ? and packet_id = ? and mark = ?"
        db.run_many(sql, [one[:4] for one in received])
