"""One commit to a SQLite file: rows of any table and blocks of the log, together."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterable, Mapping, Sequence

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

_RECEIVED = "insert or ignore into session_received values (?, ?, ?, ?)"
_MARK = "select mark from session_received where client_id = ? and born = ? and packet_id = ?"


class SqliteDialect:
    # SQLite's own clock, in milliseconds; the same throughout one statement.
    now = "(julianday('now') - 2440587.5) * 86400.0"
    now_in_turn = now
    locked = ""  # a writing transaction has the whole file
    each_of = "select value from json_each(?)"
    and_notify = ""


class SqliteTransaction:
    """A connection on which a transaction has begun; or, to read from, one without."""

    def __init__(self, connection: sqlite3.Connection):
        self._connection = connection

    def run(self, sql: str, *args: object) -> Rows:
        return self._connection.execute(sql, args).fetchall()

    def run_many(self, sql: str, rows: Iterable[Row]) -> None:
        self._connection.executemany(sql, rows)

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
        landed = []
        if key is not None:
            row = db.execute("select sequence, placed from writers where writer = ?", (key.writer,)).fetchone()
            if row is not None and row[0] >= key.sequence:
                return (placed_from(row[1]) if row[0] == key.sequence else []), True
        names = {one.client_id for one in received if one.epoch is not None}
        epochs = [
            db.execute("select client_id, epoch from sessions where client_id = ?", (n,)).fetchone() for n in names
        ]
        check_epochs(received, dict(row for row in epochs if row is not None))
        streams = [
            db.execute(
                "select id, next_offset, coalesce(newest, 0), sealed from streams"
                " where log = ? and generation = ? and shard = ?",
                (log, generation, block.shard),
            ).fetchone()
            for block in blocks
        ]
        if any(row is None or row[3] for row in streams):
            raise GenerationSealed(log, generation)
        for block, (stream, base, newest, _) in zip(blocks, streams, strict=True):
            check_expected(expect, block.shard, base, log)
            newest = max(newest, block.newest)
            body = insert_block(db, stream, base, newest, block)
            db.execute(
                "update streams set next_offset = next_offset + ?, bytes = bytes + ?,"
                " oldest = min(coalesce(oldest, ?), ?), newest = ? where id = ?",
                (block.messages, len(block.data), block.oldest, block.oldest, newest, stream),
            )
            landed.append(Landed(block.shard, base, block.messages, body))
        if topics:
            db.executemany(
                "insert or ignore into topics values (?, ?, ?)", [(log, generation, topic) for topic in topics]
            )
        for last in {last.topic: last for last in retained}.values():
            db.execute("delete from retained where log = ? and topic = ?", (log, last.topic))
            if last.payload:
                db.execute("insert into retained values (?, ?, ?, ?, ?, ?, ?)", (log, *last))
        repeated = [one for one in received if not db.execute(_RECEIVED, one[:4]).rowcount]
        if repeated:
            raise NotTaken((), {one: db.execute(_MARK, one[:3]).fetchone()[0] for one in repeated})
        if key is not None:
            db.execute(
                "insert into writers values (?, ?, ?, ?) on conflict (writer) do update set"
                " sequence = excluded.sequence, placed = excluded.placed, updated_at = excluded.updated_at",
                (key.writer, key.sequence, json.dumps(landed), now),
            )
        return landed, False


def insert_block(db: sqlite3.Connection, stream: int, base: int, newest: Micros, block: NewBlock) -> int:
    body = db.execute("insert into bodies (hashes, data) values (?, ?)", (block.hashes, block.data)).lastrowid
    if body is None:
        raise StoreError("SQLite gave the block's body no id")
    db.execute(
        "insert into blocks (stream, base, messages, bytes, newest, checksum, body) values (?, ?, ?, ?, ?, ?, ?)",
        (stream, base, block.messages, len(block.data), newest, block.checksum, body),
    )
    return body
