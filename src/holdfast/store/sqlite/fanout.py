"""Fan-out in a SQLite file: a writing transaction has the whole file, so what was read in it stays true."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Sequence

from holdfast.fanout.table import Found
from holdfast.store.fanout_changes import FlightRow, WaitingRow, in_flight_of
from holdfast.store.in_sql.database import Db, Row, Rows
from holdfast.store.in_sql.fanout import (
    FLIGHT,
    FLIGHT_COLUMNS,
    MAY_BE_SENT,
    OF_BATCH,
    WAITING_COLUMNS,
    WAITS,
    SqlFanoutTable,
    waiting_from,
)

# Cross joins are made in the order in which they are written.
FEW = 8
_AMONG = "from (select value as given from json_each(?)) j cross join"
_SOMETHING = "select j.value from json_each(?) j where exists (select 1 from fanout_waiting w where w.vin = j.value)"
_FIRST = f"""
    select {WAITS} from fanout_waiting w cross join fanout_campaigns c on c.id = w.campaign {OF_BATCH}
    where w.vin = ? and {MAY_BE_SENT} order by w.place limit ?
"""
_WAITING = ", ".join(f"w.{column}" for column in WAITING_COLUMNS)


class SqliteFanoutTable(SqlFanoutTable):
    def look_up(self, vins: Collection[str], limit: int) -> dict[str, Found]:
        return self._database.ask(lambda db: self._look_up(db, vins, limit))

    def _look_up(self, db: Db, vins: Collection[str], limit: int) -> dict[str, Found]:
        given = json.dumps(list(vins))
        flights = db.run(f"select {FLIGHT} {_AMONG} fanout_in_flight f on f.vin = j.given", given)
        found = {row[0]: Found(in_flight_of(FlightRow(*row)), [], False) for row in flights}
        for (vin,) in db.run(_SOMETHING, given):
            rows = db.run(_FIRST, vin, limit + 1)
            if rows:
                flight = found[vin].in_flight if vin in found else None
                found[vin] = Found(flight, [waiting_from(row) for row in rows[:limit]], len(rows) > limit)
        return found

    def _there(
        self, db: Db, vins: Sequence[str], campaigns: Sequence[int], earlier: Sequence[int]
    ) -> tuple[set[tuple[str, int]], dict[str, list[WaitingRow]]]:
        given, of, old = json.dumps(vins), set(campaigns), set(earlier)
        targets: set[tuple[str, int]] = set()
        waiting: dict[str, list[WaitingRow]] = {}
        for row in db.run(f"select {_WAITING} {_AMONG} fanout_waiting w on w.vin = j.given", given):
            if row[2] in of:
                targets.add((row[0], row[2]))
            if row[2] in old:
                waiting.setdefault(row[0], []).append(WaitingRow(*row))
        if of:
            for table in ("fanout_in_flight", "fanout_awaiting"):
                there = db.run(f"select t.vin, t.campaign {_AMONG} {table} t on t.vin = j.given", given)
                targets.update(row for row in there if row[1] in of)
            ended = f"select e.vin, e.campaign {_AMONG} fanout_ended e on e.campaign = ? and e.vin = j.given"
            for campaign in campaigns:
                targets.update(db.run(ended, given, campaign))
        return targets, waiting

    def _ints(self, column: str, values: Iterable[int]) -> tuple[str, object]:
        return f"{column} in (select value from json_each(?))", json.dumps(list(values))

    def _get(
        self,
        db: Db,
        columns: str,
        table: str,
        by: Sequence[str],
        keys: Sequence[Row],
        *,
        also: str = "true",
        locked: bool = False,
    ) -> Rows:
        where = " and ".join([*(f"t.{column} = ?" for column in by[1:]), also])
        if len(keys) < FEW or not isinstance(keys[0][0], str):
            sql = f"select {columns} from {table} t where t.{by[0]} = ? and {where}"
            return [row for key in keys for row in db.run(sql, *key)]
        # In one statement for all that differ in the first column only, as those of one batch do.
        alike = _alike(keys)
        sql = f"select {columns} {_AMONG} {table} t on t.{by[0]} = j.given where {where}"
        return [row for others, firsts in alike.items() for row in db.run(sql, json.dumps(firsts), *others)]

    def _insert(self, db: Db, table: str, columns: Sequence[str], rows: Sequence[Row]) -> None:
        db.run_many(f"insert into {table} ({', '.join(columns)}) values ({', '.join('?' * len(columns))})", rows)

    def _delete(self, db: Db, table: str, by: Sequence[str], keys: Sequence[Row]) -> None:
        if len(keys) < FEW or not isinstance(keys[0][0], str):
            db.run_many(f"delete from {table} where {' and '.join(f'{column} = ?' for column in by)}", keys)
            return
        among = f"{by[0]} in (select value from json_each(?))"
        sql = f"delete from {table} where {' and '.join([among, *(f'{column} = ?' for column in by[1:])])}"
        db.run_many(sql, [(json.dumps(firsts), *others) for others, firsts in _alike(keys).items()])

    def _insert_waiting(self, db: Db, rows: Sequence[WaitingRow]) -> None:
        few: list[Row] = []
        for others, vins in _alike(rows).items():
            if len(vins) < FEW:
                few += [(vin, *others) for vin in vins]
            else:
                sql = "insert into fanout_waiting select value, ?, ?, ?, ?, ?, ? from json_each(?)"
                db.run(sql, *others, json.dumps(vins))
        if few:
            self._insert(db, "fanout_waiting", WAITING_COLUMNS, few)

    def _insert_flights(self, db: Db, rows: Sequence[FlightRow]) -> None:
        self._insert(db, "fanout_in_flight", FLIGHT_COLUMNS, rows)

    def _insert_ended(self, db: Db, rows: Sequence[Row]) -> None:
        db.run_many("insert or replace into fanout_ended values (?, ?, ?, ?, ?, ?)", rows)

    def _epochs(self, db: Db, client_ids: Sequence[str]) -> dict[str, int]:
        return dict(
            self._get(db, "client_id, epoch", "sessions", ("client_id",), [(c,) for c in client_ids], also="not dead")
        )


def _alike(rows: Iterable[Row]) -> dict[Row, list[str]]:
    """First columns, by all others."""
    found: dict[Row, list[str]] = {}
    for row in rows:
        found.setdefault(row[1:], []).append(row[0])
    return found
