"""The log on SQLite: one writer at a time, so a transaction is all the locking there is."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from holdfast.log.contract import (
    RUN_BYTES_SWEPT,
    RUNS_SWEPT,
    TOPICS_SWEPT,
    AppendKey,
    BlockEntry,
    Data,
    Generation,
    GenerationSealed,
    Head,
    Landed,
    NewBlock,
    ReceivedId,
    Retained,
    Run,
    within_bytes,
)
from holdfast.model import Micros, Stream
from holdfast.store.sqlite.database import SqliteDatabase
from holdfast.store.sqlite.transaction import insert_block

_MANY = 500  # SQLite bounds the parameters of one statement
_LARGE_BYTES = 32 << 10
"""A large body is read from its pages straight to where it is wanted; as a statement's result it is copied twice."""


class SqliteLog:
    """The seam of `contract.py` over one SQLite file."""

    def __init__(self, database: SqliteDatabase):
        self.database = database

    def create_log(self, log: str, shards: int, shard_by: str, now: Micros) -> None:
        with self.database.write() as db:
            if db.execute("insert or ignore into logs values (?, ?)", (log, shard_by)).rowcount:
                _open_generation(db, log, 1, shards, now)

    def logs(self) -> dict[str, str]:
        with self.database.read() as db:
            return dict(db.execute("select log, shard_by from logs order by log"))

    def generations(self, log: str) -> list[Generation]:
        with self.database.read() as db:
            return [
                Generation(*row)
                for row in db.execute(
                    "select generation, shards, opened_at, sealed_at from generations"
                    " where log = ? and not dropped order by generation",
                    (log,),
                )
            ]

    def heads(self, log: str) -> list[Head]:
        return self._heads("s.log = ?", (log,))

    def head(self, stream: Stream) -> Head | None:
        where = "s.log = ? and s.generation = ? and s.shard = ?"
        found = self._heads(where, (stream.log, stream.generation, stream.shard))
        return found[0] if found else None

    def _heads(self, where: str, parameters: Sequence[object]) -> list[Head]:
        with self.database.read() as db:
            rows = db.execute(
                "select s.id, s.log, s.shard, s.generation, s.next_offset, s.bytes, s.oldest, s.newest, s.sealed"
                " from streams s join generations g on g.log = s.log and g.generation = s.generation"
                f" where {where} and not g.dropped order by s.generation, s.shard",
                parameters,
            ).fetchall()
        return [Head(r[0], Stream(r[1], r[2], r[3]), r[4], r[5], r[6], r[7], bool(r[8])) for r in rows]

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
    ) -> tuple[list[Landed], bool] | None:
        try:
            return self.database.change(
                lambda change: change.append(log, generation, blocks, topics, expect, key, now, retained, received)
            )
        except GenerationSealed:
            return None

    def retained(self, log: str) -> list[Retained]:
        with self.database.read() as db:
            rows = db.execute(
                "select topic, payload, publisher, flags, properties, time from retained where log = ?", (log,)
            )
            return [Retained(*row) for row in rows]

    def forget_retained(self, log: str, gone: Sequence[tuple[str, Micros]]) -> None:
        with self.database.write() as db:
            db.executemany(
                "delete from retained where log = ? and topic = ? and time = ?", [(log, *one) for one in gone]
            )

    def entries(self, stream: int, offset: int, limit: int) -> list[BlockEntry]:
        with self.database.read() as db:
            return [
                BlockEntry(*row)
                for row in db.execute(
                    "select base, messages, bytes, newest, checksum, body from blocks"
                    " where stream = ?1 and base >= coalesce((select max(base) from blocks where stream = ?1"
                    " and base <= ?2), 0) and base + messages > ?2 order by base limit ?3",
                    (stream, offset, limit),
                )
            ]

    def entries_at(self, stream: int, offsets: Sequence[int]) -> list[BlockEntry]:
        found: dict[int, BlockEntry] = {}
        with self.database.read() as db:
            for offset in offsets:
                row = db.execute(
                    "select base, messages, bytes, newest, checksum, body from blocks"
                    " where stream = ? and base <= ? order by base desc limit 1",
                    (stream, offset),
                ).fetchone()
                if row is not None:
                    found[row[0]] = BlockEntry(*row)
        return [found[base] for base in sorted(found)]

    def bodies(self, ids: Sequence[int]) -> dict[int, Data]:
        found: dict[int, Data] = {}
        large = []
        for id_, data in self._by_id(f"case when length(data) < {_LARGE_BYTES} then data end", ids).items():
            if data is None:
                large.append(id_)
            else:
                found[id_] = data
        if large:
            with self.database.read() as db:
                for id_ in large:
                    if data := _read_blob(db, id_):
                        found[id_] = data
        return found

    def hashes(self, ids: Sequence[int]) -> dict[int, bytes]:
        return self._by_id("hashes", ids)

    def _by_id(self, column: str, ids: Sequence[int]) -> dict[int, Any]:
        found: dict[int, Any] = {}
        with self.database.read() as db:
            for at in range(0, len(ids), _MANY):
                some = ids[at : at + _MANY]
                marks = ",".join("?" * len(some))
                rows = db.execute(f"select id, {column} from bodies where id in ({marks}) and length(data)", some)
                found.update(rows)
        return found

    def topics(self, log: str, generation: int, prefix: str) -> list[str]:
        with self.database.read() as db:
            rows = db.execute(
                "select topic from topics where log = ? and generation = ? and topic >= ? and topic < ?",
                (log, generation, prefix, prefix + "\U0010ffff"),
            )
            return [topic for (topic,) in rows]

    def seal(self, log: str, shards: int | None, now: Micros) -> Generation:
        with self.database.write() as db:
            number, old_shards = db.execute(
                "select generation, shards from generations where log = ? and sealed_at is null", (log,)
            ).fetchone()
            db.execute("update generations set sealed_at = ? where log = ? and generation = ?", (now, log, number))
            db.execute("update streams set sealed = 1 where log = ? and generation = ?", (log, number))
            opened = Generation(number + 1, shards or old_shards, now, None)
            _open_generation(db, log, opened.number, opened.shards, now)
        return opened

    def drop(self, log: str, generation: int) -> None:
        with self.database.write() as db:
            db.execute("update generations set dropped = 1 where log = ? and generation = ?", (log, generation))

    def sweep(self, blocks_max: int) -> int:
        with self.database.write() as db:
            row = db.execute("select log, generation from generations where dropped limit 1").fetchone()
            if row is None:
                return _sweep_dead(db, blocks_max)
            doomed = db.execute(
                "select b.stream, b.base, b.body from streams s join blocks b on b.stream = s.id"
                " where s.log = ? and s.generation = ? limit ?",
                (*row, blocks_max),
            ).fetchall()
            db.executemany("delete from bodies where id = ?", [(body,) for _, _, body in doomed])
            db.executemany("delete from blocks where stream = ? and base = ?", [(s, b) for s, b, _ in doomed])
            return len(doomed) or _sweep_runs(db, row) or _sweep_topics(db, row) or _forget_generation(db, row)

    def replace(self, stream: int, old: Sequence[BlockEntry], block: NewBlock) -> bool:
        with self.database.write() as db:
            those = "from blocks where stream = ? and base >= ? and base < ?"
            place = (stream, old[0].base, old[-1].past)
            found = db.execute(f"select base, body {those} order by base", place).fetchall()
            if found != [(entry.base, entry.body) for entry in old]:
                return False
            db.execute(f"insert into dead_bodies select body {those}", place)
            db.execute(f"delete {those}", place)
            insert_block(db, stream, old[0].base, old[-1].newest, block)
            db.execute(
                "update streams set bytes = bytes + ? where id = ?",
                (len(block.data) - sum(entry.bytes for entry in old), stream),
            )
        return True

    def indexed_to(self, stream: int) -> int:
        with self.database.read() as db:
            row = db.execute(
                "select coalesce(max(past), 0) from topic_runs where stream = ? and bucket = 0", (stream,)
            ).fetchone()
            return int(row[0])

    def runs(self, stream: int, buckets: Sequence[int], offset: int) -> list[Run]:
        with self.database.read() as db:
            marks = ",".join("?" * len(buckets))
            return [
                Run(*row)
                for row in db.execute(
                    "select bucket, level, first, past, data from topic_runs"
                    f" where stream = ? and bucket in ({marks}) and past > ? order by first",
                    (stream, *buckets, offset),
                )
            ]

    def put_runs(self, stream: int, old: Iterable[tuple[int, int]], new: Sequence[Run]) -> None:
        with self.database.write() as db:
            db.executemany(
                "delete from topic_runs where stream = ? and first = ? and level = ?",
                [(stream, first, level) for first, level in old],
            )
            db.executemany(
                "insert into topic_runs (stream, bucket, level, first, past, data) values (?, ?, ?, ?, ?, ?)",
                [(stream, *run) for run in new],
            )

    def forget_writers(self, before: Micros) -> int:
        with self.database.write() as db:
            return db.execute("delete from writers where updated_at < ?", (before,)).rowcount

    def totals(self) -> dict[str, tuple[int, int]]:
        with self.database.read() as db:
            return totals_of(db)


def totals_of(db: sqlite3.Connection) -> dict[str, tuple[int, int]]:
    rows = db.execute("select log, sum(next_offset), max(generation) * 1000000 + count(*) from streams group by log")
    return {log: (messages, shape) for log, messages, shape in rows}


def _open_generation(db: sqlite3.Connection, log: str, number: int, shards: int, now: Micros) -> None:
    db.execute(
        "insert into generations (log, generation, shards, opened_at) values (?, ?, ?, ?)", (log, number, shards, now)
    )
    db.executemany(
        "insert into streams (log, generation, shard) values (?, ?, ?)", [(log, number, s) for s in range(shards)]
    )


def _read_blob(db: sqlite3.Connection, body: int) -> bytes:
    """Empty if it has gone meanwhile, or only its number is left."""
    try:
        with db.blobopen("bodies", "data", body, readonly=True) as blob:
            return blob.read()
    except sqlite3.OperationalError as error:
        if error.sqlite_errorcode == sqlite3.SQLITE_ERROR:  # no such row
            return b""
        raise


def _sweep_dead(db: sqlite3.Connection, bodies_max: int) -> int:
    some = "in (select id from dead_bodies order by id limit ?)"
    db.execute(f"delete from bodies where id {some}", (bodies_max,))
    return db.execute(f"delete from dead_bodies where id {some}", (bodies_max,)).rowcount


def _sweep_runs(db: sqlite3.Connection, generation: tuple[str, int]) -> int:
    some = db.execute(
        "select r.stream, r.bucket, r.first, length(r.data) from streams s join topic_runs r on r.stream = s.id"
        " where s.log = ? and s.generation = ? limit ?",
        (*generation, RUNS_SWEPT),
    ).fetchall()
    gone = within_bytes(some, RUN_BYTES_SWEPT)
    db.executemany("delete from topic_runs where stream = ? and bucket = ? and first = ?", [run[:3] for run in gone])
    return len(gone)


def _sweep_topics(db: sqlite3.Connection, generation: tuple[str, int]) -> int:
    of_it = "from topics where log = ? and generation = ?"
    last = f"select max(topic) from (select topic {of_it} order by topic limit ?)"
    return db.execute(f"delete {of_it} and topic <= ({last})", (*generation, *generation, TOPICS_SWEPT)).rowcount


def _forget_generation(db: sqlite3.Connection, generation: tuple[str, int]) -> int:
    for table in ("streams", "generations"):
        db.execute(f"delete from {table} where log = ? and generation = ?", generation)
    return 1
