"""Staged blocks in a SQLite file."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable, Mapping, Sequence

from holdfast.log.contract import NewBlock
from holdfast.log.staging import UNNAMED, Landing, StagedBatch, StagedBlock, Task
from holdfast.model import Micros
from holdfast.store.in_sql.staging import COLUMNS, Placed, StreamEnd, described, in_order, offsets_for, open_generation
from holdfast.store.sqlite.database import SqliteDatabase


class SqliteStaging:
    """Staging in a SQLite file."""

    def __init__(self, database: SqliteDatabase):
        self._database = database

    def stage(
        self, batch: StagedBatch, task: str, place: int, shards: int, made: Sequence[tuple[NewBlock, str]], now: Micros
    ) -> None:
        mine = (batch.writer, batch.number, task)
        with self._database.write() as db:
            for at, (block, topics) in enumerate(made):
                body = db.execute(
                    "insert into bodies (hashes, data) values (?, ?)", (block.hashes, block.data)
                ).lastrowid
                db.execute(
                    f"insert into staged (log, writer, batch, task, {COLUMNS}, topics, staged_at)"
                    " values (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
                    (batch.log, *mine, place + at, shards, *described(block), body, topics, now),
                )

    def publish(self, batch: StagedBatch, tasks: Sequence[Task], position: str | None, now: Micros) -> Landing:
        with self._database.write() as db:
            if self._seen(db, batch):
                self._forget(db, batch, None)
                return Landing(0, repeated=True)
            found = {task.name: self._blocks(db, batch, task.name) for task in tasks}
            blocks = in_order(tasks, found)
            generation, shards = open_generation(
                db.execute(
                    "select generation, shards from generations where log = ? and sealed_at is null", (batch.log,)
                ).fetchone(),
                batch.log,
            )
            if any(block.shards != shards for block in blocks):
                return Landing(0, shards=shards)
            rows = db.execute(
                "select shard, id, next_offset, coalesce(newest, 0) from streams where log = ? and generation = ?",
                (batch.log, generation),
            )
            placed, ends = offsets_for(blocks, {shard: StreamEnd(*rest) for shard, *rest in rows})
            self._insert(db, batch, generation, tasks, placed, ends)
            self._forget(db, batch, [task.name for task in tasks])
            db.execute(
                "insert into ledger values (?, ?, ?, ?, ?) on conflict (log, writer) do update set"
                " batch = excluded.batch, position = excluded.position, updated_at = excluded.updated_at",
                (batch.log, batch.writer, batch.number, position, now),
            )
        return Landing(sum(block.messages for block in blocks))

    def _seen(self, db: sqlite3.Connection, batch: StagedBatch) -> bool:
        row = db.execute("select batch from ledger where log = ? and writer = ?", (batch.log, batch.writer)).fetchone()
        return row is not None and int(row[0]) >= batch.number

    def _insert(
        self,
        db: sqlite3.Connection,
        batch: StagedBatch,
        generation: int,
        tasks: Sequence[Task],
        placed: Sequence[Placed],
        ends: Mapping[int, StreamEnd],
    ) -> None:
        db.executemany(
            "insert into blocks (stream, base, messages, bytes, newest, checksum, body) values (?, ?, ?, ?, ?, ?, ?)",
            [
                (p.stream, p.base, p.block.messages, p.block.bytes, p.newest, p.block.checksum, p.block.body)
                for p in placed
            ],
        )
        for shard in {p.block.shard for p in placed}:
            here = [p.block for p in placed if p.block.shard == shard]
            oldest, stream = min(b.oldest for b in here), ends[shard]
            db.execute(
                "update streams set next_offset = ?, bytes = bytes + ?, oldest = min(coalesce(oldest, ?), ?),"
                " newest = ? where id = ?",
                (stream.next_offset, sum(b.bytes for b in here), oldest, oldest, stream.newest, stream.id),
            )
        for task in tasks:
            db.execute(
                "insert or ignore into topics select ?, ?, t.value from staged s, json_each(s.topics) t"
                " where s.writer = ? and s.batch = ? and s.task = ?",
                (batch.log, generation, batch.writer, batch.number, task.name),
            )

    def landed(self, log: str, writer: str) -> tuple[int, str | None] | None:
        with self._database.read() as db:
            row = db.execute(
                "select batch, position from ledger where log = ? and writer = ?", (log, writer)
            ).fetchone()
        return None if row is None else (int(row[0]), row[1])

    def blocks(self, batch: StagedBatch, task: str) -> list[StagedBlock]:
        with self._database.read() as db:
            return self._blocks(db, batch, task)

    def _blocks(self, db: sqlite3.Connection, batch: StagedBatch, task: str) -> list[StagedBlock]:
        rows = db.execute(
            f"select {COLUMNS} from staged where log = ? and writer = ? and batch = ? and task = ? order by place",
            (batch.log, batch.writer, batch.number, task),
        )
        return [StagedBlock(*row) for row in rows]

    def forget(self, batch: StagedBatch, tasks: Iterable[str] | None = None) -> int:
        with self._database.write() as db:
            gone = 0
            for task in [None] if tasks is None else tasks:
                which, parameters = "writer = ? and batch = ?", [batch.writer, batch.number]
                if task is not None:
                    which, parameters = f"{which} and task = ?", [*parameters, task]
                gone += _throw_away(db, f"log = ? and {which}", [batch.log, *parameters])
            return gone

    def _forget(self, db: sqlite3.Connection, batch: StagedBatch, landed: Sequence[str] | None) -> None:
        """Everything staged for the batch goes; bodies of tasks that have landed stay."""
        for task in landed or ():
            db.execute(
                "delete from staged where log = ? and writer = ? and batch = ? and task = ?",
                (batch.log, batch.writer, batch.number, task),
            )
        _throw_away(db, "log = ? and writer = ? and batch = ?", [batch.log, batch.writer, batch.number])

    def sweep(self, before: Micros) -> int:
        with self._database.write() as db:
            db.execute("delete from ledger where writer like ? and updated_at < ?", (f"{UNNAMED}%", before))
            return _throw_away(db, "staged_at < ?", [before])

    def put_position(self, log: str, writer: str, batch: int, position: str | None, now: Micros) -> None:
        with self._database.write() as db:
            db.execute("insert or replace into ledger values (?, ?, ?, ?, ?)", (log, writer, batch, position, now))


def _throw_away(db: sqlite3.Connection, which: str, parameters: Sequence[object]) -> int:
    db.execute(f"delete from bodies where id in (select body from staged where {which})", parameters)
    return db.execute(f"delete from staged where {which}", parameters).rowcount
