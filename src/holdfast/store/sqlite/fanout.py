"""Fan-out in a SQLite file: a writing transaction has the whole file, so what was read in it stays true.

Python's driver hands over the interpreter for every row that a statement reads or writes, and waits to get it back:
beside a busy event loop 500 rows took 300 to 450 ms in place of 5. So many rows go in as one JSON array and come out as
one: what SQLite does with them, it does by itself.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Sequence
from math import inf
from typing import Any

import msgspec

from holdfast.fanout.table import Found
from holdfast.store.fanout_changes import FlightRow, WaitingRow, in_flight_of
from holdfast.store.in_sql.database import Db, Row, Rows
from holdfast.store.in_sql.fanout import (
    FLIGHT_COLUMNS,
    MAY_BE_SENT,
    NEWER,
    OF_BATCH,
    WAITING_COLUMNS,
    WAITS,
    SqlFanoutTable,
    waiting_from,
)

FEW = 4
"""Fewer rows than this are not worth a JSON array."""
DEEP = 32
"""A vehicle for whom more than this wait is looked at by itself."""

# Cross joins are made in the order in which they are written.
_EACH = "from json_each(?) j cross join"
_FIRST = f"""
    select {WAITS} from fanout_waiting w cross join fanout_campaigns c on c.id = w.campaign {OF_BATCH}
    where w.vin = ? and {MAY_BE_SENT} order by w.place limit ?
"""
_SOMETHING = f"""
    select json_group_array(json_array(j.value, exists (
        select 1 from fanout_waiting d where d.vin = j.value limit 1 offset {DEEP}
    ))) from json_each(?) j where exists (select 1 from fanout_waiting w where w.vin = j.value)
"""
_NO_BYTES = frozenset(("fanout_waiting", "fanout_in_flight", "fanout_awaiting", "fanout_ended", "sessions"))
"""Tables of which no column that is asked for holds bytes, which JSON cannot."""


def _as_json(columns: Sequence[str]) -> str:
    """JSON has no word for infinity."""
    return f"json_array({', '.join(f'nullif({c}, 9e999)' if c.endswith('expires') else c for c in columns)})"


def _from_json(column: str, at: int) -> str:
    value = f"json_extract(j.value, '$[{at}]')"
    return f"coalesce({value}, 9e999)" if column == "expires" else value


def _packed(values: Iterable[object]) -> str:
    return msgspec.json.encode(values if isinstance(values, list) else list(values)).decode()


def _rows(db: Db, columns: Sequence[str], rest: str, *args: object) -> list[list[Any]]:
    (text,) = db.run(f"select json_group_array({_as_json(columns)}) {rest}", *args)[0]
    found: list[list[Any]] = msgspec.json.decode(text)
    infinite = [at for at, column in enumerate(columns) if column.endswith("expires")]
    for at in infinite:
        for row in found:
            if row[at] is None:
                row[at] = inf
    return found


class SqliteFanoutTable(SqlFanoutTable):
    def look_up(self, vins: Collection[str], limit: int) -> dict[str, Found]:
        return self._database.ask(lambda db: self._look_up(db, vins, limit))

    def _look_up(self, db: Db, vins: Collection[str], limit: int) -> dict[str, Found]:
        given = _packed(list(vins))
        flights = _rows(db, FLIGHT_COLUMNS, f"{_EACH} fanout_in_flight f on f.vin = j.value", given)
        found = {row[0]: Found(in_flight_of(FlightRow(*row)), [], False) for row in flights}
        some = json.loads(db.run(_SOMETHING, given)[0][0])
        if not some:
            return found
        queues: dict[str, list[Row]] = {}
        rest = f"""
            {_EACH} fanout_waiting w on w.vin = j.value cross join fanout_campaigns c on c.id = w.campaign {OF_BATCH}
            where {MAY_BE_SENT}
        """
        # In the order of the index, which is that of places.
        for row in _rows(db, WAITS.split(", "), rest, _packed([vin for vin, deep in some if not deep])):
            queues.setdefault(row[0], []).append(tuple(row))
        for vin, deep in some:
            if deep:
                queues[vin] = db.run(_FIRST, vin, limit + 1)
        for vin, rows in queues.items():
            if rows:
                flight = found[vin].in_flight if vin in found else None
                rows.sort(key=_place)
                found[vin] = Found(flight, [waiting_from(row) for row in rows[:limit]], len(rows) > limit)
        return found

    def _there(
        self, db: Db, vins: Sequence[str], campaigns: Sequence[int], earlier: Sequence[int]
    ) -> tuple[set[tuple[str, int]], dict[str, list[WaitingRow]]]:
        given, of, old = _packed(list(vins)), set(campaigns), set(earlier)
        targets: set[tuple[str, int]] = set()
        waiting: dict[str, list[WaitingRow]] = {}
        columns = [f"w.{column}" for column in WAITING_COLUMNS]
        for row in _rows(db, columns, f"{_EACH} fanout_waiting w on w.vin = j.value", given):
            if row[2] in of:
                targets.add((row[0], row[2]))
            if row[2] in old:
                waiting.setdefault(row[0], []).append(WaitingRow(*row))
        if of:
            for table in ("fanout_in_flight", "fanout_awaiting"):
                there = _rows(db, ("t.vin", "t.campaign"), f"{_EACH} {table} t on t.vin = j.value", given)
                targets.update((vin, campaign) for vin, campaign in there if campaign in of)
            ended = f"{_EACH} fanout_ended e on e.campaign = ? and e.vin = j.value"
            for campaign in campaigns:
                targets.update((vin, campaign) for (vin,) in _rows(db, ("e.vin",), ended, given, campaign))
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
        if len(keys) < FEW or table not in _NO_BYTES:
            where = " and ".join(f"t.{column} = ?" for column in by)
            sql = f"select {columns} from {table} t where {where} and {also}"
            return [row for key in keys for row in db.run(sql, *key)]
        same = " and ".join(f"t.{column} = json_extract(j.value, '$[{at}]')" for at, column in enumerate(by))
        named = [f"t.{column}" for column in columns.split(", ")]
        found = _rows(db, named, f"{_EACH} {table} t on {same} where {also}", _packed(keys))
        return [tuple(row) for row in found]

    def _insert(self, db: Db, table: str, columns: Sequence[str], rows: Sequence[Row], how: str = "insert") -> None:
        names = ", ".join(columns)
        if len(rows) < FEW or table not in _NO_BYTES:
            db.run_many(f"{how} into {table} ({names}) values ({', '.join('?' * len(columns))})", rows)
            return
        values = ", ".join(_from_json(column, at) for at, column in enumerate(columns))
        db.run(f"{how} into {table} ({names}) select {values} from json_each(?) j", _packed(rows))

    def _delete(self, db: Db, table: str, by: Sequence[str], keys: Sequence[Row]) -> None:
        if len(keys) < FEW:
            db.run_many(f"delete from {table} where {' and '.join(f'{column} = ?' for column in by)}", keys)
            return
        values = ", ".join(f"json_extract(j.value, '$[{at}]')" for at in range(len(by)))
        db.run(f"delete from {table} where ({', '.join(by)}) in (select {values} from json_each(?) j)", _packed(keys))

    def _insert_waiting(self, db: Db, rows: Sequence[WaitingRow]) -> None:
        few: list[Row] = []
        for others, vins in _alike(rows).items():
            if len(vins) < FEW:
                few += [(vin, *others) for vin in vins]
            else:
                sql = "insert into fanout_waiting select value, ?, ?, ?, ?, ?, ? from json_each(?)"
                db.run(sql, *others, _packed(vins))
        if few:
            self._insert(db, "fanout_waiting", WAITING_COLUMNS, few)

    def _insert_flights(self, db: Db, rows: Sequence[FlightRow]) -> None:
        self._insert(db, "fanout_in_flight", FLIGHT_COLUMNS, rows)

    def _insert_ended(self, db: Db, rows: Sequence[Row]) -> None:
        self._insert(db, "fanout_ended", _ENDED, rows, "insert or replace")

    def _superseded(self, db: Db, vins: Sequence[str]) -> set[str]:
        newer = NEWER.format(join="cross join").replace("where", "where f.vin = j.value and", 1)
        return {
            vin
            for (vin,) in _rows(
                db,
                ("distinct_vin",),
                f"from (select distinct f.vin as distinct_vin {_EACH} {newer})",
                _packed(list(vins)),
            )
        }

    def _epochs(self, db: Db, client_ids: Sequence[str]) -> dict[str, int]:
        keys = [(client_id,) for client_id in client_ids]
        return dict(self._get(db, "client_id, epoch", "sessions", ("client_id",), keys, also="not t.dead"))


_ENDED = ("campaign", "vin", "place", '"end"', "reason", "ended_at")


def _place(row: Row) -> int:
    place: int = row[1]
    return place


def _alike(rows: Iterable[Row]) -> dict[Row, list[str]]:
    """First columns, by all others."""
    found: dict[Row, list[str]] = {}
    for row in rows:
        found.setdefault(row[1:], []).append(row[0])
    return found
