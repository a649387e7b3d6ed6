"""Fan-out in PostgreSQL: rows are locked in the order of their keys, then written in one statement per kind."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from holdfast.fanout.table import Found
from holdfast.jitter import chance
from holdfast.log.log import Log
from holdfast.store.fanout_changes import FlightRow, WaitingRow, in_flight_of
from holdfast.store.in_sql.database import Database, Db, Row, Rows
from holdfast.store.in_sql.fanout import (
    FLIGHT,
    FLIGHT_COLUMNS,
    MAY_BE_SENT,
    NEWER,
    OF_BATCH,
    WAITING_COLUMNS,
    WAITS,
    Raced,
    SqlFanoutTable,
    waiting_from,
)
from holdfast.store.postgres.arrays import array, columns, hashes

SLOTS = 16

_TEXTS = ("vin", "upload", "key", "request_id", "node", "resend", "reason", "sent")
_REALS = ("expires", "not_before", "sent_at", "acked_at", "until", "added_at", "ended_at")
_OTHERS = {"sha1": "bytea", "merged": "boolean", '"end"': "smallint"}
KINDS = {**dict.fromkeys(_TEXTS, "text"), **dict.fromkeys(_REALS, "float8"), **_OTHERS}
"""Of columns; all others are numbers."""

ENDED = ("campaign", "vin", "place", '"end"', "reason", "ended_at")
_WAITING = ", ".join(f"w.{column}" for column in WAITING_COLUMNS)
# Joins are lateral throughout: by the index, always. Left to itself, the planner would sooner read a table of a few
# hundred thousand rows from end to end.
_FLIGHTS = f"""
    select f.* from unnest(?::text[]) as v (vin)
    cross join lateral (select {FLIGHT} from fanout_in_flight t where t.vin = v.vin offset 0) f
"""
_FIRST = f"""
    select w.* from unnest(?::text[]) as v (vin) cross join lateral (
        select {WAITS} from fanout_waiting w join fanout_campaigns c on c.id = w.campaign {OF_BATCH}
        where w.vin = v.vin and {MAY_BE_SENT} order by w.place limit ?
    ) w
"""

# targets: in one statement, so that a delivery that moves meanwhile is seen where it was or where it is
_TARGETS = """
    select v.vin, x.campaign from unnest(?::text[]) as v (vin) cross join lateral (
        select t.campaign from fanout_waiting t where t.vin = v.vin
        union all select t.campaign from fanout_in_flight t where t.vin = v.vin
        union all select t.campaign from fanout_awaiting t where t.vin = v.vin
        union all select t.campaign from fanout_ended t where t.campaign = any(?::bigint[]) and t.vin = v.vin
        offset 0
    ) x
"""
_EARLIER = f"""
    select w.* from unnest(?::text[]) as v (vin) cross join lateral (
        select {_WAITING} from fanout_waiting w where w.vin = v.vin and w.campaign = any(?::bigint[])
        order by w.place for update
    ) w
"""
_EPOCHS = """
    select client_id, epoch from sessions where md5(client_id)::uuid = any(?::uuid[]) and not dead
    order by client_id for share
"""


class PostgresFanoutTable(SqlFanoutTable):
    shared = " for share of c"
    kept = " for share"
    unless_locked = " for update skip locked"

    def __init__(self, database: Database, log: Log):
        super().__init__(database, log)
        self.slot = chance.randrange(SLOTS)

    def look_up(self, vins: Collection[str], limit: int) -> dict[str, Found]:
        given = array(vins)
        flights, waits = self._database.ask(lambda db: (db.run(_FLIGHTS, given), db.run(_FIRST, given, limit + 1)))
        found = {row[0]: Found(in_flight_of(FlightRow(*row)), [], False) for row in flights}
        for row in waits:
            one = found.setdefault(row[0], Found(None, [], False))
            if len(one.waiting) < limit:
                one.waiting.append(waiting_from(row))
            else:
                found[row[0]] = one._replace(more=True)
        return found

    def _there(
        self, db: Db, vins: Sequence[str], campaigns: Sequence[int], earlier: Sequence[int]
    ) -> tuple[set[tuple[str, int]], dict[str, list[WaitingRow]]]:
        given = array(vins)
        targets: set[tuple[str, int]] = set()
        if campaigns:
            of = set(campaigns)
            targets.update(
                (vin, campaign) for vin, campaign in db.run(_TARGETS, given, array(campaigns)) if campaign in of
            )
        waiting: dict[str, list[WaitingRow]] = {}
        for row in db.run(_EARLIER, given, array(earlier)) if earlier else ():
            waiting.setdefault(row[0], []).append(WaitingRow(*row))
        return targets, waiting

    def _ints(self, column: str, values: Iterable[int]) -> tuple[str, object]:
        return f"{column} = any(?::bigint[])", array(values)

    def _get(
        self,
        db: Db,
        columns_: str,
        table: str,
        by: Sequence[str],
        keys: Sequence[Row],
        *,
        also: str = "true",
        locked: bool = False,
    ) -> Rows:
        if not keys:
            return []
        given, on = _given(by)
        found = f"select {columns_} from {table} t where {on} and {also} {'for update' if locked else 'offset 0'}"
        return db.run(f"select r.* from {given} cross join lateral ({found}) r", *columns(keys))

    def _insert(self, db: Db, table: str, into: Sequence[str], rows: Sequence[Row]) -> None:
        self._insert_all(db, table, into, rows, "")

    def _insert_all(self, db: Db, table: str, into: Sequence[str], rows: Sequence[Row], otherwise: str) -> Rows:
        if not rows:
            return []
        given, _ = _given(into)
        return db.run(f"insert into {table} ({', '.join(into)}) select * from {given} {otherwise}", *columns(rows))

    def _delete(self, db: Db, table: str, by: Sequence[str], keys: Sequence[Row]) -> None:
        if keys:
            given, on = _given(by)
            found = f"select t.ctid from {table} t where {on} offset 0"
            rows = f"select r.ctid from {given} cross join lateral ({found}) r"
            db.run(f"delete from {table} where ctid = any(array({rows}))", *columns(keys))

    def _insert_waiting(self, db: Db, rows: Sequence[WaitingRow]) -> None:
        self._insert(db, "fanout_waiting", WAITING_COLUMNS, rows)

    def _insert_flights(self, db: Db, rows: Sequence[FlightRow]) -> None:
        new = self._insert_all(db, "fanout_in_flight", FLIGHT_COLUMNS, rows, "on conflict do nothing returning 1")
        if len(new) < len(rows):
            raise Raced

    def _insert_ended(self, db: Db, rows: Sequence[Row]) -> None:
        changes = ", ".join(f"{column} = excluded.{column}" for column in ENDED[2:])
        self._insert_all(db, "fanout_ended", ENDED, rows, f"on conflict (campaign, vin) do update set {changes}")

    def _superseded(self, db: Db, vins: Sequence[str]) -> set[str]:
        sql = f"select distinct f.vin from {NEWER.format(join='join')} and f.vin = any(?::text[])"
        return {vin for (vin,) in db.run(sql, array(vins))}

    def _epochs(self, db: Db, client_ids: Sequence[str]) -> dict[str, int]:
        return dict(db.run(_EPOCHS, hashes(client_ids)))


def _given(names: Sequence[str]) -> tuple[str, str]:
    """Rows that are given as columns of these names, and how they meet a table `t`."""
    kinds = ", ".join(f"?::{KINDS.get(name, 'bigint')}[]" for name in names)
    as_ = ", ".join(f"k{at}" for at in range(len(names)))
    return f"unnest({kinds}) as k ({as_})", " and ".join(f"t.{name} = k.k{at}" for at, name in enumerate(names))
