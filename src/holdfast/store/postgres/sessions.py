"""Sessions in PostgreSQL: rows are locked in the order of their names, then written in one statement per kind.

A filter's version is the number of the transaction that changed it. Transactions become visible in another order than
that of their numbers; so who follows the filters goes on from the oldest one that was still under way when it asked.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from holdfast.log.contract import ReceivedId
from holdfast.sessions.table import FilterCounts, RowWrite, SessionRow
from holdfast.store.in_sql.database import Db, Row
from holdfast.store.in_sql.sessions import ALL, COLUMNS, SEEN, Seen, SqlSessionTable, values_of
from holdfast.store.postgres.arrays import columns, hashes

TYPES = (
    *("text", "bigint", "bigint", "text", "bigint", "text", "text", "bigint", "float8", "bytea", "float8"),
    *("float8", "bytea", "bytea", "bytea", "boolean"),
)
"""Of the table's columns."""


def _known_by(column: str) -> str:
    return f"md5({column})::uuid"


def _same(one: str, other: str) -> str:
    return f"{_known_by(one)} = {_known_by(other)} and {one} = {other}"


def _among(column: str) -> str:
    """By the index, always. Left to a join, the planner would sooner compute the hash of every row."""
    return f"{_known_by(column)} = any(?::uuid[])"


_GIVEN = f"unnest({', '.join(f'?::{kind}[]' for kind in TYPES)}) as v ({', '.join(COLUMNS)})"
_OTHERS = COLUMNS[3:]

# insert_sessions: a row that does not come back was inserted by somebody else meanwhile
_INSERT = f"""
    insert into sessions ({", ".join(COLUMNS)})
    select v.client_id, nextval('session_epochs'), 0, {", ".join(f"v.{column}" for column in _OTHERS)}
    from {_GIVEN} on conflict do nothing returning client_id, epoch
"""

# update_sessions: rows that are locked; a seq of 0 says that it is a take
_UPDATE = f"""
    update sessions s set epoch = case when v.seq = 0 then nextval('session_epochs') else v.epoch end, seq = v.seq,
        {", ".join(f"{column} = v.{column}" for column in _OTHERS)}
    from {_GIVEN} where {_among("s.client_id")} and {_same("s.client_id", "v.client_id")} returning s.client_id, s.epoch
"""

# count_filters: in order, so that nodes that count the same ones cannot deadlock
_COUNT = f"""
    insert into session_filters
    select v.filter, v.delta, pg_current_xact_id()::text::bigint, {{now}}
    from unnest(?::text[], ?::bigint[]) as v (filter, delta)
    where v.delta > 0 or exists (select 1 from session_filters f where {_same("f.filter", "v.filter")})
    order by v.filter
    on conflict (({_known_by("filter")})) do update
    set sessions = greatest(session_filters.sessions + excluded.sessions, 0),
        version = excluded.version, changed_at = excluded.changed_at
"""

_SINCE = """
    select h.oldest, h.next, h.trimmed, f.filter, f.sessions
    from (
        select pg_snapshot_xmin(pg_current_snapshot())::text::bigint as oldest,
               pg_snapshot_xmax(pg_current_snapshot())::text::bigint as next, version as trimmed
        from session_filters_trimmed
    ) h left join session_filters f on f.version >= ?
"""


class PostgresSessionTable(SqlSessionTable):
    def of_lease(self, lease: int, after: str, limit: int) -> list[SessionRow]:
        sql = f"""
            select {ALL} from sessions s
            where s.lease = ? and left(s.client_id, 200) >= left(?, 200) and s.client_id > ?
            order by left(s.client_id, 200), s.client_id limit ?
        """
        return self._rows(sql, lease, after, after, limit)

    def _find(self, column: str, texts: Iterable[str]) -> tuple[str, object]:
        return _among(column), hashes(texts)

    def _lock(self, db: Db, client_ids: Sequence[str]) -> dict[str, Seen]:
        where, given = self._find("client_id", client_ids)
        sql = f"select {SEEN} from sessions where {where} order by client_id for update"
        return {row[0]: Seen(*row[1:]) for row in db.run(sql, given)}

    def _store(self, db: Db, fit: Sequence[RowWrite], seen: dict[str, Seen]) -> dict[str, int]:
        inserts = [write for write in fit if write.row.client_id not in seen]
        updates = [write for write in fit if write.row.client_id in seen]
        epochs: dict[str, int] = {}
        if inserts:
            epochs.update(db.run(_INSERT, *columns(map(_values, inserts))))
        if updates:
            known_by = hashes(write.row.client_id for write in updates)
            epochs.update(db.run(_UPDATE, *columns(map(_values, updates)), known_by))
        return epochs

    def _count_filters(self, db: Db, deltas: Sequence[tuple[str, int]]) -> None:
        sql = _COUNT.format(now=self._database.dialect.now)
        db.run(sql, *columns(deltas))

    def filters_since(self, version: int) -> FilterCounts:
        rows = self._database.ask(lambda db: db.run(f"{_SINCE} and f.version < h.next" if version else _SINCE, version))
        oldest, next_, trimmed = rows[0][:3]
        # Numbers from `next` on are of another server, from which this database was restored.
        if version and (version <= trimmed < next_ or version > next_):
            return self.filters_since(0)
        counts = {text: sessions for *_, text, sessions in rows if text is not None}
        return FilterCounts(counts, oldest, whole=not version)

    def _bury(self, db: Db, before: float, limit: int) -> int:
        # What somebody is about to change is passed over: it waits for nobody, and so deadlocks with nobody.
        dead = "select ctid from sessions where dead and left_at < ? order by left_at limit ? for update skip locked"
        gone = db.run(f"delete from sessions where ctid = any(array({dead})) returning client_id", before, limit)
        if gone:
            self._void_received(db, [(client_id, None) for (client_id,) in sorted(gone)])
        unused = "select ctid from session_filters where sessions = 0 and changed_at < ? limit ? for update skip locked"
        versions = db.run(
            f"delete from session_filters where ctid = any(array({unused})) returning version", before, limit
        )
        if versions:
            db.run(
                """update session_filters_trimmed set version = greatest(?, case
                       when version < pg_snapshot_xmax(pg_current_snapshot())::text::bigint then version else 0 end)""",
                max(version for (version,) in versions),
            )
        return len(gone)

    def _void_received(self, db: Db, ended: Sequence[tuple[str, str | None]]) -> None:
        db.run(
            f"""delete from session_received r using unnest(?::text[], ?::text[]) as e (client_id, born)
                where {_among("r.client_id")} and {_same("r.client_id", "e.client_id")}
                and r.born is distinct from e.born""",
            *columns(ended),
            hashes(client_id for client_id, _ in ended),
        )

    def _release(self, db: Db, received: Sequence[ReceivedId]) -> None:
        db.run(
            f"""delete from session_received r
                using unnest(?::text[], ?::text[], ?::integer[], ?::bigint[]) as e (client_id, born, packet_id, mark)
                where {_among("r.client_id")} and {_same("r.client_id", "e.client_id")}
                and r.born = e.born and r.packet_id = e.packet_id and r.mark = e.mark""",
            *columns(one[:4] for one in received),
            hashes({one.client_id for one in received}),
        )


def _values(write: RowWrite) -> Row:
    return values_of(write.row, write.row.epoch, 0 if write.take else write.row.seq)
