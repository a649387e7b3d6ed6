"""The log on PostgreSQL: many processes append; a stream's row lock gives each its turn.

Whatever an interrupted commit did is found out by the idempotency key that every append carries, the
caller's or one of our own; so trying again never appends twice.
"""

from __future__ import annotations

import itertools
import threading
import uuid
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from holdfast.errors import UnknownStream
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
from holdfast.store.postgres.database import PostgresDatabase
from holdfast.store.postgres.transaction import LOG_CHANNEL, Connection, insert_block, start_over


class PostgresLog:
    """The seam of `contract.py` over one PostgreSQL database."""

    def __init__(self, database: PostgresDatabase):
        self.database = database
        self._keys = threading.local()

    def create_log(self, log: str, shards: int, shard_by: str, now: Micros) -> None:
        def attempt() -> None:
            with self.database.write() as db:
                made = db.execute("insert into logs values (%s, %s) on conflict do nothing", (log, shard_by))
                if made.rowcount:
                    _open_generation(db, log, 1, shards, now)

        self.database.retrying(attempt)

    def logs(self) -> dict[str, str]:
        return dict(self._all("select log, shard_by from logs order by log"))

    def generations(self, log: str) -> list[Generation]:
        query = """
            select generation, shards, opened_at, sealed_at from generations
            where log = %s and dropped = 0 order by generation
        """
        return [Generation(*row) for row in self._all(query, (log,))]

    def heads(self, log: str) -> list[Head]:
        return self._heads("s.log = %s", (log,))

    def head(self, stream: Stream) -> Head | None:
        where = "s.log = %s and s.generation = %s and s.shard = %s"
        found = self._heads(where, (stream.log, stream.generation, stream.shard))
        return found[0] if found else None

    def _heads(self, where: str, parameters: Sequence[object]) -> list[Head]:
        query = f"""
            select s.id, s.log, s.shard, s.generation, s.next_offset, s.bytes, s.oldest, s.newest, s.sealed
            from streams s join generations g on g.log = s.log and g.generation = s.generation
            where {where} and g.dropped = 0 order by s.generation, s.shard
        """
        rows = self._all(query, parameters)
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
        ours = key or self._own_key()
        try:
            landed, repeated = self.database.change(
                lambda change: change.append(log, generation, blocks, topics, expect, ours, now, retained, received),
                repeatable=True,
            )
        except GenerationSealed:
            return None
        # Our own key repeated means only that an earlier try of this very call had made it.
        return landed, repeated and key is not None

    def _own_key(self) -> AppendKey:
        """One writer per thread: its appends follow one another, as a key's sequence must."""
        if not hasattr(self._keys, "writer"):
            self._keys.writer, self._keys.sequence = f"log-{uuid.uuid4().hex}", itertools.count(1)
        return AppendKey(self._keys.writer, next(self._keys.sequence))

    def retained(self, log: str) -> list[Retained]:
        query = "select topic, payload, publisher, flags, properties, time from retained where log = %s"
        return [Retained(*row) for row in self._all(query, (log,), binary=True)]

    def forget_retained(self, log: str, gone: Sequence[tuple[str, Micros]]) -> None:
        query = "delete from retained where log = %s and md5(topic) = md5(%s) and time = %s"

        def attempt() -> None:
            with self.database.write() as db, db.pipeline():
                for topic, time in sorted(gone):  # in the order of appends, with which it could deadlock otherwise
                    db.execute(query, (log, topic, time))

        self.database.retrying(attempt)

    def entries(self, stream: int, offset: int, limit: int) -> list[BlockEntry]:
        query = """
            select base, messages, bytes, newest, checksum, body from blocks
            where stream = %(stream)s and base + messages > %(offset)s and base >= coalesce(
                (select max(base) from blocks where stream = %(stream)s and base <= %(offset)s), 0)
            order by base limit %(limit)s
        """
        rows = self._all(query, {"stream": stream, "offset": offset, "limit": limit})
        return [BlockEntry(*row) for row in rows]

    def entries_at(self, stream: int, offsets: Sequence[int]) -> list[BlockEntry]:
        query = """
            select distinct b.base, b.messages, b.bytes, b.newest, b.checksum, b.body
            from unnest(%s::bigint[]) as wanted (at), lateral (
                select * from blocks where stream = %s and base <= wanted.at order by base desc limit 1
            ) b order by b.base
        """
        return [BlockEntry(*row) for row in self._all(query, (list(offsets), stream))]

    def bodies(self, ids: Sequence[int]) -> dict[int, Data]:
        return dict(self._all("select id, data from bodies where id = any(%s)", (list(ids),), binary=True))

    def hashes(self, ids: Sequence[int]) -> dict[int, bytes]:
        return dict(self._all("select id, hashes from bodies where id = any(%s)", (list(ids),), binary=True))

    def topics(self, log: str, generation: int, prefix: str) -> list[str]:
        query = """
            select topic from topics where log = %s and generation = %s and starts_with(topic, %s)
            and left(topic, 250) collate "C" >= left(%s, 250)
            and left(topic, 250) collate "C" <= left(%s, 250) || chr(1114111)
        """
        return [topic for (topic,) in self._all(query, (log, generation, prefix, prefix, prefix))]

    def seal(self, log: str, shards: int | None, now: Micros) -> Generation:
        with self.database.write() as db:
            row = db.execute(
                "select generation, shards from generations where log = %s and sealed_at is null for update",
                (log,),
            ).fetchone()
            if row is None:
                raise UnknownStream(f"log {log!r} has no open generation")
            number, old_shards = row
            # Appends hold their streams' locks until they commit, so this waits for them and they for us.
            db.execute(
                "select 1 from streams where log = %s and generation = %s order by shard for update",
                (log, number),
            )
            db.execute("update streams set sealed = 1 where log = %s and generation = %s", (log, number))
            db.execute("update generations set sealed_at = %s where log = %s and generation = %s", (now, log, number))
            opened = Generation(number + 1, shards or old_shards, now, None)
            _open_generation(db, log, opened.number, opened.shards, now)
            db.execute("select pg_notify(%s, %s)", (LOG_CHANNEL, f"{self.database.instance} {log}"))
        return opened

    def drop(self, log: str, generation: int) -> None:
        with self.database.write() as db:
            db.execute("update generations set dropped = 1 where log = %s and generation = %s", (log, generation))

    def sweep(self, blocks_max: int) -> int:
        with self.database.write() as db:
            row = db.execute(
                "select log, generation from generations where dropped = 1 limit 1 for update skip locked"
            ).fetchone()
            if row is None:
                return 0
            doomed = db.execute(
                "select b.stream, b.base, b.body from streams s join blocks b on b.stream = s.id"
                " where s.log = %s and s.generation = %s limit %s",
                (*row, blocks_max),
            ).fetchall()
            db.execute("delete from bodies where id = any(%s)", ([body for _, _, body in doomed],))
            db.execute(
                "delete from blocks b using unnest(%s::bigint[], %s::bigint[]) as gone (stream, base)"
                " where b.stream = gone.stream and b.base = gone.base",
                ([s for s, _, _ in doomed], [base for _, base, _ in doomed]),
            )
            return len(doomed) or _sweep_runs(db, row) or _sweep_topics(db, row) or _forget_generation(db, row)

    def replace(self, stream: int, old: Sequence[BlockEntry], block: NewBlock) -> bool:
        with self.database.write() as db:
            gone = db.execute(
                "delete from blocks b using unnest(%s::bigint[], %s::bigint[]) as old (base, body)"
                " where b.stream = %s and b.base = old.base and b.body = old.body",
                ([entry.base for entry in old], [entry.body for entry in old], stream),
            ).rowcount
            if gone != len(old):
                start_over(db)
                return False
            db.execute("delete from bodies where id = any(%s)", ([entry.body for entry in old],))
            insert_block(db, stream, old[0].base, old[-1].newest, block)
            db.execute(
                "update streams set bytes = bytes + %s where id = %s",
                (len(block.data) - sum(entry.bytes for entry in old), stream),
            )
        return True

    def indexed_to(self, stream: int) -> int:
        query = "select coalesce(max(past), 0) from topic_runs where stream = %s and bucket = 0"
        return int(self._all(query, (stream,))[0][0])

    def runs(self, stream: int, buckets: Sequence[int], offset: int) -> list[Run]:
        query = """
            select bucket, level, first, past, data from topic_runs
            where stream = %s and bucket = any(%s) and past > %s order by first
        """
        return [Run(*row) for row in self._all(query, (stream, list(buckets), offset), binary=True)]

    def put_runs(self, stream: int, old: Iterable[tuple[int, int]], new: Sequence[Run]) -> None:
        with self.database.write() as db, db.pipeline():
            for first, level in old:
                db.execute(
                    "delete from topic_runs where stream = %s and first = %s and level = %s",
                    (stream, first, level),
                )
            for run in new:
                db.execute(
                    "insert into topic_runs (stream, bucket, level, first, past, data) values (%s, %s, %s, %s, %s, %b)",
                    (stream, *run),
                )

    def forget_writers(self, before: Micros) -> int:
        with self.database.write() as db:
            return db.execute("delete from writers where updated_at < %s", (before,)).rowcount

    def totals(self) -> dict[str, tuple[int, int]]:
        query = "select log, sum(next_offset)::bigint, max(generation) * 1000000 + count(*) from streams group by log"
        return {log: (messages, shape) for log, messages, shape in self._all(query)}

    def _all(
        self, query: str, parameters: Sequence[object] | Mapping[str, object] = (), binary: bool = False
    ) -> list[tuple[Any, ...]]:
        def attempt() -> list[tuple[Any, ...]]:
            with self.database.read() as db:
                return db.execute(query.encode(), parameters, binary=binary).fetchall()

        return self.database.retrying(attempt)


def _open_generation(db: Connection, log: str, number: int, shards: int, now: Micros) -> None:
    db.execute(
        "insert into generations (log, generation, shards, opened_at) values (%s, %s, %s, %s)",
        (log, number, shards, now),
    )
    db.execute(
        "insert into streams (log, generation, shard) select %s, %s, generate_series(0, %s - 1)",
        (log, number, shards),
    )


def _sweep_runs(db: Connection, generation: tuple[str, int]) -> int:
    some = db.execute(
        "select r.stream, r.bucket, r.first, length(r.data) from streams s join topic_runs r on r.stream = s.id"
        " where s.log = %s and s.generation = %s limit %s",
        (*generation, RUNS_SWEPT),
    ).fetchall()
    gone = within_bytes(some, RUN_BYTES_SWEPT)
    db.execute(
        "delete from topic_runs r using unnest(%s::bigint[], %s::bigint[], %s::bigint[])"
        " as gone (stream, bucket, first)"
        " where r.stream = gone.stream and r.bucket = gone.bucket and r.first = gone.first",
        tuple([run[column] for run in gone] for column in range(3)),
    )
    return len(gone)


def _sweep_topics(db: Connection, generation: tuple[str, int]) -> int:
    some = "select ctid from topics where log = %s and generation = %s limit %s"
    return db.execute(f"delete from topics where ctid = any(array({some}))", (*generation, TOPICS_SWEPT)).rowcount


def _forget_generation(db: Connection, generation: tuple[str, int]) -> int:
    for table in ("streams", "generations"):
        db.execute(f"delete from {table} where log = %s and generation = %s", generation)
    return 1
