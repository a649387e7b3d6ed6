"""Blocks that wait for their job: staged by tasks, published by the driver in one transaction, or forgotten.

A staged block's body lies among the others, but no stream refers to it, so nobody sees it. Publishing gives
each its offsets, under the same locks as an append, in the transaction that enters the batch in the ledger:
a batch that is in the ledger has landed, whole; one that is not has left no trace.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import psycopg

from holdfast.errors import RequestError, StoreError
from holdfast.log.contract import Data, NewBlock
from holdfast.log.log import Log
from holdfast.log.postgres import CHANNEL, PostgresLog
from holdfast.log.sqlite import SqliteLog
from holdfast.model import Micros
from holdfast.store.postgres import Connection


@dataclass(frozen=True, slots=True)
class StagedBatch:
    """One batch of one writer, on its way into one log."""

    log: str
    writer: str
    number: int
    """Grows from batch to batch; one that is not above the ledger's has landed before."""


class Task(NamedTuple):
    """What one attempt at one partition has staged."""

    name: str
    partition: int
    blocks: int
    messages: int


class StagedBlock(NamedTuple):
    """A block that waits, without its body."""

    place: int
    shards: int
    shard: int
    messages: int
    bytes: int
    oldest: Micros
    newest: Micros
    checksum: int
    body: int


class Landing(NamedTuple):
    """What publishing did."""

    messages: int
    repeated: bool = False
    """The ledger had it already; what was staged has been thrown away."""
    shards: int | None = None
    """Not published: the log has this many shards now, and the blocks were made for another number."""


class Staging(Protocol):
    """What a store must do for it. Every method is one transaction."""

    def stage(
        self, batch: StagedBatch, task: str, place: int, shards: int, made: Sequence[tuple[NewBlock, str]], now: Micros
    ) -> None:
        """Keep the blocks, each with a JSON list of its topics; durable on return, visible to nobody."""

    def publish(self, batch: StagedBatch, tasks: Sequence[Task], position: str | None, now: Micros) -> Landing:
        """Land exactly what these tasks staged, in the order of their partitions, once.

        RequestError if something they staged is not there; nothing has been changed then.
        """

    def landed(self, log: str, writer: str) -> tuple[int, str | None] | None:
        """The writer's last batch in the ledger, and the position kept with it."""

    def blocks(self, batch: StagedBatch, task: str) -> list[StagedBlock]:
        """What a task has staged, in order."""

    def forget(self, batch: StagedBatch, tasks: Iterable[str] | None = None) -> int:
        """Throw away what these tasks (or all) have staged for a batch; what has been published is not touched."""

    def sweep(self, before: Micros) -> int:
        """Throw away what was staged before then and never published, and the ledger's unnamed writes."""

    def put_position(self, log: str, writer: str, batch: int, position: str | None, now: Micros) -> None:
        """Set a writer's place in the ledger by hand: to begin anew, or somewhere else."""


UNNAMED = "write-"
"""Writers that begin with this are single batch jobs: nobody will ever ask for them again."""


def staging_of(log: Log) -> Staging:
    match log.backend:
        case SqliteLog():
            return SqliteStaging(log.backend)
        case PostgresLog():
            return PostgresStaging(log.backend)
        case other:
            raise RequestError(
                f"{type(other).__name__} cannot be written to by other processes; use sqlite or postgresql"
            )


class _Placed(NamedTuple):
    block: StagedBlock
    stream: int
    base: int
    newest: Micros


class _Stream(NamedTuple):
    id: int
    next_offset: int
    newest: Micros


def _in_order(tasks: Sequence[Task], found: Mapping[str, Sequence[StagedBlock]]) -> list[StagedBlock]:
    """The blocks in the order of partition and place; RequestError if some of them are gone."""
    blocks: list[StagedBlock] = []
    for task in sorted(tasks, key=lambda t: t.partition):
        here = found.get(task.name, ())
        there = sum(b.messages for b in here)
        if len(here) != task.blocks or there != task.messages:
            raise RequestError(
                f"partition {task.partition} staged {task.messages} messages, of which {there} are there: "
                "they were swept as too old, or the store was restored; run the job again"
            )
        blocks += here
    return blocks


def _place(blocks: Sequence[StagedBlock], streams: Mapping[int, _Stream]) -> tuple[list[_Placed], dict[int, _Stream]]:
    """Offsets for the blocks, and the streams as they are afterwards."""
    ends = dict(streams)
    placed = []
    for block in blocks:
        stream = ends[block.shard]
        newest = max(stream.newest, block.newest)
        placed.append(_Placed(block, stream.id, stream.next_offset, newest))
        ends[block.shard] = _Stream(stream.id, stream.next_offset + block.messages, newest)
    return placed, ends


_COLUMNS = "place, shards, shard, messages, bytes, oldest, newest, checksum, body"
_EIGHT = ", ".join(["%s::bigint"] * 8)


class SqliteStaging:
    """Staging in a SQLite file."""

    def __init__(self, backend: SqliteLog):
        self._store = backend.store

    def stage(
        self, batch: StagedBatch, task: str, place: int, shards: int, made: Sequence[tuple[NewBlock, str]], now: Micros
    ) -> None:
        mine = (batch.writer, batch.number, task)
        with self._store.write() as db:
            for at, (block, topics) in enumerate(made):
                body = db.execute(
                    "insert into bodies (hashes, data) values (?, ?)", (block.hashes, block.data)
                ).lastrowid
                db.execute(
                    f"insert into staged (log, writer, batch, task, {_COLUMNS}, topics, staged_at)"
                    " values (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
                    (batch.log, *mine, place + at, shards, *_described(block), body, topics, now),
                )

    def publish(self, batch: StagedBatch, tasks: Sequence[Task], position: str | None, now: Micros) -> Landing:
        with self._store.write() as db:
            if self._seen(db, batch):
                self._forget(db, batch, None)
                return Landing(0, repeated=True)
            found = {task.name: self._blocks(db, batch, task.name) for task in tasks}
            blocks = _in_order(tasks, found)
            generation, shards = _open_generation(
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
            placed, ends = _place(blocks, {shard: _Stream(*rest) for shard, *rest in rows})
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
        placed: Sequence[_Placed],
        ends: Mapping[int, _Stream],
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
        with self._store.read() as db:
            row = db.execute(
                "select batch, position from ledger where log = ? and writer = ?", (log, writer)
            ).fetchone()
        return None if row is None else (int(row[0]), row[1])

    def blocks(self, batch: StagedBatch, task: str) -> list[StagedBlock]:
        with self._store.read() as db:
            return self._blocks(db, batch, task)

    def _blocks(self, db: sqlite3.Connection, batch: StagedBatch, task: str) -> list[StagedBlock]:
        rows = db.execute(
            f"select {_COLUMNS} from staged where log = ? and writer = ? and batch = ? and task = ? order by place",
            (batch.log, batch.writer, batch.number, task),
        )
        return [StagedBlock(*row) for row in rows]

    def forget(self, batch: StagedBatch, tasks: Iterable[str] | None = None) -> int:
        with self._store.write() as db:
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
        with self._store.write() as db:
            db.execute("delete from ledger where writer like ? and updated_at < ?", (f"{UNNAMED}%", before))
            return _throw_away(db, "staged_at < ?", [before])

    def put_position(self, log: str, writer: str, batch: int, position: str | None, now: Micros) -> None:
        with self._store.write() as db:
            db.execute("insert or replace into ledger values (?, ?, ?, ?, ?)", (log, writer, batch, position, now))


def _throw_away(db: sqlite3.Connection, which: str, parameters: Sequence[object]) -> int:
    db.execute(f"delete from bodies where id in (select body from staged where {which})", parameters)
    return db.execute(f"delete from staged where {which}", parameters).rowcount


def _open_generation(row: Sequence[Any] | None, log: str) -> tuple[int, int]:
    if row is None:
        raise RequestError(f"there is no log {log!r}; create it first, or say how many shards it is to have")
    return int(row[0]), int(row[1])


class PostgresStaging:
    """Staging in a PostgreSQL database."""

    def __init__(self, backend: PostgresLog):
        self._store = backend.store
        self._instance = backend.instance

    def stage(
        self, batch: StagedBatch, task: str, place: int, shards: int, made: Sequence[tuple[NewBlock, str]], now: Micros
    ) -> None:
        def attempt() -> None:
            with self._store.write() as db:
                # Tried again after a lost connection: what an earlier try may have left is in the way.
                _discard(db, "writer = %s and batch = %s and task = %s and place >= %s", (*mine, place))
                with db.pipeline():
                    for at, (block, topics) in enumerate(made):
                        db.execute(
                            "with b as (insert into bodies (hashes, data) values (%b, %b) returning id)"
                            f" insert into staged (log, writer, batch, task, {_COLUMNS}, topics, staged_at)"
                            f" select %s, %s, %s::bigint, %s, {_EIGHT}, id, %s, %s::bigint from b",
                            (
                                block.hashes,
                                block.data,
                                batch.log,
                                *mine,
                                place + at,
                                shards,
                                *_described(block),
                                topics,
                                now,
                            ),
                        )

        mine = (batch.writer, batch.number, task)
        self._store.retrying(attempt)

    def publish(self, batch: StagedBatch, tasks: Sequence[Task], position: str | None, now: Micros) -> Landing:
        tries = 0

        def attempt() -> Landing:
            nonlocal tries
            tries += 1
            while True:
                with self._store.write() as db:
                    landing = self._publish(db, batch, tasks, position, now)
                    if landing is not None:
                        return landing
                    db.execute("rollback")  # sealed under our hands: look again
                    db.execute("begin")

        landing = self._store.retrying(attempt)
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
            f"select task, {_COLUMNS} from staged where log = %s and writer = %s and batch = %s and task = any(%s)"
            " order by task, place",
            (batch.log, batch.writer, batch.number, names),
        ):
            found.setdefault(task, []).append(StagedBlock(*rest))
        blocks = _in_order(tasks, found)
        generation, shards = _open_generation(
            db.execute(
                "select generation, shards from generations where log = %s and sealed_at is null", (batch.log,)
            ).fetchone(),
            batch.log,
        )
        if any(block.shards != shards for block in blocks):
            db.execute("rollback")
            db.execute("begin")
            return Landing(0, shards=shards)
        locked = db.execute(
            "select shard, id, next_offset, coalesce(newest, 0), sealed from streams where log = %s and generation = %s"
            " and shard = any(%s) order by shard for update",
            (batch.log, generation, sorted({block.shard for block in blocks})),
        ).fetchall()
        if any(row[4] for row in locked):
            return None
        placed, ends = _place(blocks, {row[0]: _Stream(*row[1:4]) for row in locked})
        self._insert(db, batch, generation, names, placed, ends)
        return Landing(sum(block.messages for block in blocks))

    def _insert(
        self,
        db: Connection,
        batch: StagedBatch,
        generation: int,
        names: list[str],
        placed: Sequence[_Placed],
        ends: Mapping[int, _Stream],
    ) -> None:
        staged = (batch.log, batch.writer, batch.number)
        with db.pipeline():
            db.execute(
                "insert into topics select distinct %s, %s::bigint, t.topic from staged s,"
                " jsonb_array_elements_text(s.topics::jsonb) as t (topic)"
                " where s.log = %s and s.writer = %s and s.batch = %s and s.task = any(%s) on conflict do nothing",
                (batch.log, generation, *staged, names),
            )
            columns = list(zip(*[(p.stream, p.base, *_directory(p)) for p in placed], strict=True)) or [()] * 7
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
            db.execute("select pg_notify(%s, %s)", (CHANNEL, f"{self._instance} {batch.log}"))

    def landed(self, log: str, writer: str) -> tuple[int, str | None] | None:
        rows = self._all("select batch, position from ledger where log = %s and writer = %s", (log, writer))
        return (int(rows[0][0]), rows[0][1]) if rows else None

    def blocks(self, batch: StagedBatch, task: str) -> list[StagedBlock]:
        rows = self._all(
            f"select {_COLUMNS} from staged where log = %s and writer = %s and batch = %s and task = %s order by place",
            (batch.log, batch.writer, batch.number, task),
        )
        return [StagedBlock(*row) for row in rows]

    def forget(self, batch: StagedBatch, tasks: Iterable[str] | None = None) -> int:
        which, parameters = "log = %s and writer = %s and batch = %s", [batch.log, batch.writer, batch.number]
        if tasks is not None:
            which, parameters = f"{which} and task = any(%s)", [*parameters, list(tasks)]

        def attempt() -> int:
            with self._store.write() as db:
                return _discard(db, which, parameters).rowcount

        return self._store.retrying(attempt)

    def sweep(self, before: Micros) -> int:
        with self._store.write() as db:
            db.execute("delete from ledger where writer like %s and updated_at < %s", (f"{UNNAMED}%", before))
            return _discard(db, "staged_at < %s", [before]).rowcount

    def put_position(self, log: str, writer: str, batch: int, position: str | None, now: Micros) -> None:
        def attempt() -> None:
            with self._store.write() as db:
                db.execute(
                    "insert into ledger values (%s, %s, %s, %s, %s) on conflict (log, writer) do update set"
                    " batch = excluded.batch, position = excluded.position, updated_at = excluded.updated_at",
                    (log, writer, batch, position, now),
                )

        self._store.retrying(attempt)

    def _all(self, query: str, parameters: Sequence[object]) -> list[tuple[Any, ...]]:
        def attempt() -> list[tuple[Any, ...]]:
            with self._store.read() as db:
                return db.execute(query.encode(), parameters).fetchall()

        return self._store.retrying(attempt)


def _described(block: NewBlock) -> tuple[int, ...]:
    return block.shard, block.messages, len(block.data), block.oldest, block.newest, block.checksum


def _directory(placed: _Placed) -> tuple[int, ...]:
    block = placed.block
    return block.messages, block.bytes, placed.newest, block.checksum, block.body


def _discard(db: Connection, which: str, parameters: Sequence[object]) -> psycopg.Cursor[tuple[Any, ...]]:
    query = (
        f"with gone as (delete from staged where {which} returning body) delete from bodies using gone where id = body"
    )
    return db.execute(query.encode(), parameters)


def topics_json(topics: Sequence[str]) -> str:
    return json.dumps(sorted(topics))


def bodies_of(log: Log, blocks: Sequence[StagedBlock]) -> list[Data]:
    """The bodies of staged blocks, in their order."""
    stored = log.backend.bodies([block.body for block in blocks])
    if len(stored) != len(blocks):
        raise StoreError("staged blocks have lost their bodies; run the job again")
    return [stored[block.body] for block in blocks]
