"""Staged blocks in a PostgreSQL database."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import psycopg

from holdfast.log.contract import NewBlock
from holdfast.log.staging import UNNAMED, Landing, StagedBatch, StagedBlock, Task
from holdfast.model import Micros
from holdfast.store.in_sql.staging import (
    COLUMNS,
    Placed,
    StreamEnd,
    described,
    directory_line,
    in_order,
    offsets_for,
    open_generation,
)
from holdfast.store.postgres.database import PostgresDatabase
from holdfast.store.postgres.transaction import LOG_CHANNEL, Connection, start_over

_EIGHT = ", ".join(["%s::bigint"] * 8)


class PostgresStaging:
    """Staging in a PostgreSQL database."""

    def __init__(self, database: PostgresDatabase):
        self._database = database

    def stage(
        self, batch: StagedBatch, task: str, place: int, shards: int, made: Sequence[tuple[NewBlock, str]], now: Micros
    ) -> None:
        def attempt() -> None:
            with self._database.write() as db:
                # Tried again after a lost connection: what an earlier try may have left is in the way.
                _discard(db, "writer = %s and batch = %s and task = %s and place >= %s", (*mine, place))
                with db.pipeline():
                    for at, (block, topics) in enumerate(made):
                        db.execute(
                            "with b as (insert into bodies (hashes, data) values (%b, %b) returning id)"
                            f" insert into staged (log, writer, batch, task, {COLUMNS}, topics, staged_at)"
                            f" select %s, %s, %s::bigint, %s, {_EIGHT}, id, %s, %s::bigint from b",
                            (
                                block.hashes,
                                block.data,
                                batch.log,
                                *mine,
                                place + at,
                                shards,
                                *described(block),
                                topics,
                                now,
                            ),
                        )

        mine = (batch.writer, batch.number, task)
        self._database.retrying(attempt)

    def publish(self, batch: StagedBatch, tasks: Sequence[Task], position: str | None, now: Micros) -> Landing:
        tries = 0

        def attempt() -> Landing:
            nonlocal tries
            tries += 1
            while True:
                with self._database.write() as db:
                    landing = self._publish(db, batch, tasks, position, now)
                    if landing is not None:
                        return landing
                    start_over(db)  # sealed under our hands: look again

        landing = self._database.retrying(attempt)
        if landing.repeated and tries > 1:  # our own earlier try, whose answer was lost, may have landed it
            return Landing(sum(task.messages for task in tasks))
        return landing

    def _publish(
        self, db: Connection, batch: StagedBatch, tasks: Sequence[Task], position: str | None, now: Micros
    ) -> Landing | None:
        news = db.execute(
            "insert into ledger values (%s, %s, %s, %s, %s) on conflict (log, writer) do update set"
            " batch = excluded.batch, position = excluded.position, updated_at = excluded.updated_at"
            " where ledger.batch < excluded.batch returning 1",
            (batch.log, batch.writer, batch.number, position, now),
        ).fetchone()
        if news is None:
            _discard(db, "log = %s and writer = %s and batch = %s", (batch.log, batch.writer, batch.number))
            return Landing(0, repeated=True)
        names = [task.name for task in tasks]
        found: dict[str, list[StagedBlock]] = {}
        for task, *rest in db.execute(
            f"select task, {COLUMNS} from staged where log = %s and writer = %s and batch = %s and task = any(%s)"
            " order by task, place",
            (batch.log, batch.writer, batch.number, names),
        ):
            found.setdefault(task, []).append(StagedBlock(*rest))
        blocks = in_order(tasks, found)
        generation, shards = open_generation(
            db.execute(
                "select generation, shards from generations where log = %s and sealed_at is null", (batch.log,)
            ).fetchone(),
            batch.log,
        )
        if any(block.shards != shards for block in blocks):
            start_over(db)
            return Landing(0, shards=shards)
        locked = db.execute(
            "select shard, id, next_offset, coalesce(newest, 0), sealed from streams where log = %s and generation = %s"
            " and shard = any(%s) order by shard for update",
            (batch.log, generation, sorted({block.shard for block in blocks})),
        ).fetchall()
        if any(row[4] for row in locked):
            return None
        placed, ends = offsets_for(blocks, {row[0]: StreamEnd(*row[1:4]) for row in locked})
        self._insert(db, batch, generation, names, placed, ends)
        return Landing(sum(block.messages for block in blocks))

    def _insert(
        self,
        db: Connection,
        batch: StagedBatch,
        generation: int,
        names: list[str],
        placed: Sequence[Placed],
        ends: Mapping[int, StreamEnd],
    ) -> None:
        staged = (batch.log, batch.writer, batch.number)
        with db.pipeline():
            db.execute(
                "insert into topics select distinct %s, %s::bigint, t.topic from staged s,"
                " jsonb_array_elements_text(s.topics::jsonb) as t (topic)"
                " where s.log = %s and s.writer = %s and s.batch = %s and s.task = any(%s) on conflict do nothing",
                (batch.log, generation, *staged, names),
            )
            columns = list(zip(*[(p.stream, p.base, *directory_line(p)) for p in placed], strict=True)) or [()] * 7
            db.execute(
                "insert into blocks (stream, base, messages, bytes, newest, checksum, body) select * from unnest("
                + ", ".join(["%s::bigint[]"] * 7)
                + ")",
                [list(column) for column in columns],
            )
            for shard in {p.block.shard for p in placed}:
                here = [p.block for p in placed if p.block.shard == shard]
                stream = ends[shard]
                db.execute(
                    "update streams set next_offset = %s, bytes = bytes + %s, oldest = least(oldest, %s), newest = %s"
                    " where id = %s",
                    (
                        stream.next_offset,
                        sum(b.bytes for b in here),
                        min(b.oldest for b in here),
                        stream.newest,
                        stream.id,
                    ),
                )
            db.execute(
                "delete from staged where log = %s and writer = %s and batch = %s and task = any(%s)", (*staged, names)
            )
            _discard(db, "log = %s and writer = %s and batch = %s", staged)
            db.execute("select pg_notify(%s, %s)", (LOG_CHANNEL, f"{self._database.instance} {batch.log}"))

    def landed(self, log: str, writer: str) -> tuple[int, str | None] | None:
        rows = self._all("select batch, position from ledger where log = %s and writer = %s", (log, writer))
        return (int(rows[0][0]), rows[0][1]) if rows else None

    def blocks(self, batch: StagedBatch, task: str) -> list[StagedBlock]:
        rows = self._all(
            f"select {COLUMNS} from staged where log = %s and writer = %s and batch = %s and task = %s order by place",
            (batch.log, batch.writer, batch.number, task),
        )
        return [StagedBlock(*row) for row in rows]

    def forget(self, batch: StagedBatch, tasks: Iterable[str] | None = None) -> int:
        which, parameters = "log = %s and writer = %s and batch = %s", [batch.log, batch.writer, batch.number]
        if tasks is not None:
            which, parameters = f"{which} and task = any(%s)", [*parameters, list(tasks)]

        def attempt() -> int:
            with self._database.write() as db:
                return _discard(db, which, parameters).rowcount

        return self._database.retrying(attempt)

    def sweep(self, before: Micros) -> int:
        with self._database.write() as db:
            db.execute("delete from ledger where writer like %s and updated_at < %s", (f"{UNNAMED}%", before))
            return _discard(db, "staged_at < %s", [before]).rowcount

    def put_position(self, log: str, writer: str, batch: int, position: str | None, now: Micros) -> None:
        def attempt() -> None:
            with self._database.write() as db:
                db.execute(
                    "insert into ledger values (%s, %s, %s, %s, %s) on conflict (log, writer) do update set"
                    " batch = excluded.batch, position = excluded.position, updated_at = excluded.updated_at",
                    (log, writer, batch, position, now),
                )

        self._database.retrying(attempt)

    def _all(self, query: str, parameters: Sequence[object]) -> list[tuple[Any, ...]]:
        def attempt() -> list[tuple[Any, ...]]:
            with self._database.read() as db:
                return db.execute(query.encode(), parameters).fetchall()

        return self._database.retrying(attempt)


def _discard(db: Connection, which: str, parameters: Sequence[object]) -> psycopg.Cursor[tuple[Any, ...]]:
    query = (
        f"with gone as (delete from staged where {which} returning body) delete from bodies using gone where id = body"
    )
    return db.execute(query.encode(), parameters)
