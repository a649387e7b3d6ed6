"""One commit to PostgreSQL: rows of any table and blocks of the log, together.

An append is two round trips: lock the streams' rows, then everything else; the commit goes with whatever comes last.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Any

import psycopg

from holdfast.errors import StoreError
from holdfast.log.contract import (
    AppendKey,
    GenerationSealed,
    Landed,
    NewBlock,
    NotTaken,
    ReceivedId,
    Retained,
    check_epochs,
    check_expected,
    placed_from,
)
from holdfast.model import Micros
from holdfast.store.in_sql.database import Row, Rows

Connection = psycopg.Connection[tuple[Any, ...]]

LOG_CHANNEL = "holdfast_log"
METADATA_CHANNEL = "holdfast_metadata"

_LOCK = """
    select id, shard, next_offset, coalesce(newest, 0), sealed from streams
    where log = %s and generation = %s and shard = any(%s) order by shard for update
"""

# claim_key: returns a row if this is news; none if this writer has come this far before
_CLAIM = """
    insert into writers values (%s, %s, '[]', %s)
    on conflict (writer) do update set sequence = excluded.sequence, updated_at = excluded.updated_at
    where writers.sequence < excluded.sequence returning 1
"""

_INSERT_BLOCK = """
    with body as (insert into bodies (hashes, data) values (%b, %b) returning id)
    insert into blocks (stream, base, messages, bytes, newest, checksum, body)
    select %s::bigint, %s::bigint, %s::bigint, %s::bigint, %s::bigint, %s::bigint, id from body returning body
"""

# Whoever takes one of these waits until we are done; and we see who was first.
_EPOCHS = """
    select client_id, epoch from sessions where md5(client_id)::uuid = any(%s::uuid[]) order by client_id for share
"""

_RECEIVED = """
    insert into session_received select * from unnest(%s::text[], %s::text[], %s::integer[], %s::bigint[])
    on conflict do nothing returning client_id, born, packet_id
"""
_MARKS = "select client_id, born, packet_id, mark from session_received where client_id = any(%s)"


class PostgresDialect:
    now = "extract(epoch from statement_timestamp())::float8"
    now_in_turn = "extract(epoch from clock_timestamp())::float8"
    locked = " for update"
    each_of = "select json_array_elements_text(?::json)"
    and_notify = f"returning pg_notify('{METADATA_CHANNEL}', '')"


@lru_cache(maxsize=256)
def _postgres_sql(sql: str) -> bytes:
    return sql.replace("?", "%s").encode()


class PostgresTransaction:
    """A connection on which a transaction has begun; or, to read from, one without."""

    def __init__(self, connection: Connection, instance: str):
        self._connection = connection
        self._instance = instance
        """Who appends, so that its own watcher passes over the notification."""

    def run(self, sql: str, *args: object) -> Rows:
        cursor = self._connection.execute(_postgres_sql(sql), args)
        return cursor.fetchall() if cursor.description else []

    def run_many(self, sql: str, rows: Iterable[Row]) -> None:
        with self._connection.cursor() as cursor:
            cursor.executemany(_postgres_sql(sql), rows)

    def append(
        self,
        log: str,
        generation: int,
        blocks: Sequence[NewBlock],
        topics: Sequence[str],
        expect: Mapping[int, int],
        key: AppendKey | None,
        now: Micros,
        retained: Sequence[Retained] = (),
        received: Sequence[ReceivedId] = (),
    ) -> tuple[list[Landed], bool]:
        db = self._connection
        with db.pipeline():
            claimed = db.execute(_CLAIM, (key.writer, key.sequence, now)) if key else None
            # Before the streams: in that order a change of sessions that publishes wills locks them, too.
            fences = db.execute(_EPOCHS, (_hashes(received),)) if any(r.epoch is not None for r in received) else None
            locked = db.execute(_LOCK, (log, generation, [block.shard for block in blocks]))
            news = claimed.fetchone() if claimed else ()
            rows = {row[1]: row for row in locked.fetchall()}
        if key is not None and news is None:
            row = db.execute("select sequence, placed from writers where writer = %s", (key.writer,)).fetchone()
            return (placed_from(row[1]) if row and row[0] == key.sequence else []), True
        if fences is not None:
            check_epochs(received, dict(fences.fetchall()))
        if len(rows) < len(blocks) or any(row[4] for row in rows.values()):
            raise GenerationSealed(log, generation)
        places = []
        for block in blocks:
            check_expected(expect, block.shard, rows[block.shard][2], log)
        with db.pipeline():
            if topics:
                db.execute(
                    "insert into topics select %s, %s, unnest(%s::text[]) on conflict do nothing",
                    (log, generation, list(topics)),
                )
            for block in blocks:
                stream, _, base, newest, _ = rows[block.shard]
                newest = max(newest, block.newest)
                places.append((block, base, insert_block(db, stream, base, newest, block)))
                db.execute(
                    "update streams set next_offset = next_offset + %s, bytes = bytes + %s,"
                    " oldest = least(oldest, %s), newest = %s where id = %s",
                    (block.messages, len(block.data), block.oldest, newest, stream),
                )
            # In order of topics, so that two appends that retain the same ones cannot deadlock.
            for last in sorted({last.topic: last for last in retained}.values()):
                db.execute("delete from retained where log = %s and md5(topic) = md5(%s)", (log, last.topic))
                if last.payload:
                    db.execute(
                        "insert into retained values (%s, %s, %b, %s, %s, %b, %s)"
                        " on conflict (log, md5(topic)) do update set payload = excluded.payload, publisher ="
                        " excluded.publisher, flags = excluded.flags, properties = excluded.properties,"
                        " time = excluded.time",
                        (log, *last),
                    )
            ids = sorted(one[:4] for one in received)
            stored = db.execute(_RECEIVED, [list(column) for column in zip(*ids, strict=True)]) if ids else None
            landed = [Landed(b.shard, base, b.messages, _only(cursor)) for b, base, cursor in places]
            if key is not None:
                db.execute("update writers set placed = %s where writer = %s", (json.dumps(landed), key.writer))
            db.execute("select pg_notify(%s, %s)", (LOG_CHANNEL, f"{self._instance} {log}"))
        if stored is not None and stored.rowcount < len(received):
            new = set(stored.fetchall())
            repeated = [one for one in received if one[:3] not in new]
            marks = {row[:3]: row[3] for row in db.execute(_MARKS, ([one.client_id for one in repeated],))}
            # One that is gone by now was released meanwhile: under whichever mark, there is nothing to release.
            raise NotTaken((), {one: marks.get(one[:3], one.mark) for one in repeated})
        return landed, False


def insert_block(
    db: Connection, stream: int, base: int, newest: Micros, block: NewBlock
) -> psycopg.Cursor[tuple[Any, ...]]:
    return db.execute(
        _INSERT_BLOCK,
        (block.hashes, block.data, stream, base, block.messages, len(block.data), newest, block.checksum),
        prepare=True,
    )


def _hashes(received: Iterable[ReceivedId]) -> list[str]:
    names = {one.client_id for one in received if one.epoch is not None}
    return [hashlib.md5(name.encode(), usedforsecurity=False).hexdigest() for name in names]


def _only(cursor: psycopg.Cursor[tuple[Any, ...]]) -> int:
    row = cursor.fetchone()
    if row is None:
        raise StoreError("PostgreSQL gave the block's body no id")
    return int(row[0])


def start_over(db: Connection) -> None:
    """Undo what this transaction did; the commit that follows then commits nothing."""
    db.execute("rollback")
    db.execute("begin")
