"""The log on PostgreSQL: many processes append; a stream's row lock gives each its turn.

An append is two round trips: lock the streams' rows, then everything else and the commit in one go.
Whatever an interrupted commit did is found out by the idempotency key that every append carries, the
caller's or one of our own; so trying again never appends twice.
"""

from __future__ import annotations

import itertools
import json
import threading
import uuid
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import psycopg

from holdfast.errors import StoreError, UnknownStream
from holdfast.jitter import chance
from holdfast.log.contract import (
    BlockEntry,
    Data,
    Generation,
    Head,
    Key,
    Landed,
    NewBlock,
    Retained,
    Run,
    check_expected,
    placed_from,
)
from holdfast.log.watch import LogChanges, Watcher
from holdfast.model import Micros, Stream
from holdfast.store.postgres import Connection, PostgresStore

CHANNEL = "holdfast_log"
POLL_SECONDS = 1.0
"""How often to look without having been told, while notifications work."""

POLL_ALONE_SECONDS = 0.1
"""The same where notifications are turned off."""

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


class PostgresLog:
    """The seam of `contract.py` over one PostgreSQL database."""

    def __init__(self, store: PostgresStore):
        self.store = store
        self.instance = uuid.uuid4().hex
        self._keys = threading.local()

    def create_log(self, log: str, shards: int, shard_by: str, now: Micros) -> None:
        def attempt() -> None:
            with self.store.write() as db:
                made = db.execute("insert into logs values (%s, %s) on conflict do nothing", (log, shard_by))
                if made.rowcount:
                    _open_generation(db, log, 1, shards, now)

        self.store.retrying(attempt)

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
        key: Key | None,
        now: Micros,
        retained: Sequence[Retained] = (),
    ) -> tuple[list[Landed], bool] | None:
        ours = key or self._own_key()

        def attempt() -> tuple[list[Landed], bool] | None:
            with self.store.write() as db:
                return self._append(db, log, generation, blocks, topics, expect, ours, now, retained)

        outcome = self.store.retrying(attempt)
        # Our own key repeated means only that an earlier try of this very call had made it.
        return (outcome[0], outcome[1] and key is not None) if outcome else None

    def _own_key(self) -> Key:
        """One writer per thread: its appends follow one another, as a key's sequence must."""
        if not hasattr(self._keys, "writer"):
            self._keys.writer, self._keys.sequence = f"log-{uuid.uuid4().hex}", itertools.count(1)
        return Key(self._keys.writer, next(self._keys.sequence))

    def _append(
        self,
        db: Connection,
        log: str,
        generation: int,
        blocks: Sequence[NewBlock],
        topics: Sequence[str],
        expect: Mapping[int, int],
        key: Key,
        now: Micros,
        retained: Sequence[Retained],
    ) -> tuple[list[Landed], bool] | None:
        with db.pipeline():
            claimed = db.execute(_CLAIM, (key.writer, key.sequence, now))
            locked = db.execute(_LOCK, (log, generation, [block.shard for block in blocks]))
            news = claimed.fetchone()
            rows = {row[1]: row for row in locked.fetchall()}
        if news is None:
            row = db.execute("select sequence, placed from writers where writer = %s", (key.writer,)).fetchone()
            return (placed_from(row[1]) if row and row[0] == key.sequence else []), True
        if len(rows) < len(blocks) or any(row[4] for row in rows.values()):
            _start_over(db)
            return None
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
                places.append((block, base, _insert_block(db, stream, base, newest, block)))
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
            landed = [Landed(b.shard, base, b.messages, _only(cursor)) for b, base, cursor in places]
            db.execute("update writers set placed = %s where writer = %s", (json.dumps(landed), key.writer))
            db.execute("select pg_notify(%s, %s)", (CHANNEL, f"{self.instance} {log}"))
        return landed, False

    def retained(self, log: str) -> list[Retained]:
        query = "select topic, payload, publisher, flags, properties, time from retained where log = %s"
        return [Retained(*row) for row in self._all(query, (log,), binary=True)]

    def forget_retained(self, log: str, gone: Sequence[tuple[str, Micros]]) -> None:
        query = "delete from retained where log = %s and md5(topic) = md5(%s) and time = %s"

        def attempt() -> None:
            with self.store.write() as db, db.pipeline():
                for topic, time in sorted(gone):  # in the order of appends, with which it could deadlock otherwise
                    db.execute(query, (log, topic, time))

        self.store.retrying(attempt)

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
        with self.store.write() as db:
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
            db.execute("select pg_notify(%s, %s)", (CHANNEL, f"{self.instance} {log}"))
        return opened

    def drop(self, log: str, generation: int) -> None:
        with self.store.write() as db:
            db.execute("update generations set dropped = 1 where log = %s and generation = %s", (log, generation))

    def sweep(self, blocks_max: int) -> int:
        with self.store.write() as db:
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
            if not doomed:
                of_it = "(select id from streams where log = %s and generation = %s)"
                db.execute(f"delete from topic_runs where stream in {of_it}", row)
                for table in ("topics", "streams", "generations"):
                    db.execute(f"delete from {table} where log = %s and generation = %s", row)
            return max(1, len(doomed))

    def replace(self, stream: int, old: Sequence[BlockEntry], block: NewBlock) -> bool:
        with self.store.write() as db:
            gone = db.execute(
                "delete from blocks b using unnest(%s::bigint[], %s::bigint[]) as old (base, body)"
                " where b.stream = %s and b.base = old.base and b.body = old.body",
                ([entry.base for entry in old], [entry.body for entry in old], stream),
            ).rowcount
            if gone != len(old):
                _start_over(db)
                return False
            db.execute("delete from bodies where id = any(%s)", ([entry.body for entry in old],))
            _insert_block(db, stream, old[0].base, old[-1].newest, block)
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
        with self.store.write() as db, db.pipeline():
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
        with self.store.write() as db:
            return db.execute("delete from writers where updated_at < %s", (before,)).rowcount

    def totals(self) -> dict[str, tuple[int, int]]:
        query = "select log, sum(next_offset)::bigint, max(generation) * 1000000 + count(*) from streams group by log"
        return {log: (messages, shape) for log, messages, shape in self._all(query)}

    def _all(
        self, query: str, parameters: Sequence[object] | Mapping[str, object] = (), binary: bool = False
    ) -> list[tuple[Any, ...]]:
        def attempt() -> list[tuple[Any, ...]]:
            with self.store.read() as db:
                return db.execute(query.encode(), parameters, binary=binary).fetchall()

        return self.store.retrying(attempt)

    def close(self) -> None:
        self.store.close()


def _start_over(db: Connection) -> None:
    """Undo what this transaction did; the commit that follows then commits nothing."""
    db.execute("rollback")
    db.execute("begin")


def _open_generation(db: Connection, log: str, number: int, shards: int, now: Micros) -> None:
    db.execute(
        "insert into generations (log, generation, shards, opened_at) values (%s, %s, %s, %s)",
        (log, number, shards, now),
    )
    db.execute(
        "insert into streams (log, generation, shard) select %s, %s, generate_series(0, %s - 1)",
        (log, number, shards),
    )


def _insert_block(
    db: Connection, stream: int, base: int, newest: Micros, block: NewBlock
) -> psycopg.Cursor[tuple[Any, ...]]:
    return db.execute(
        _INSERT_BLOCK,
        (block.hashes, block.data, stream, base, block.messages, len(block.data), newest, block.checksum),
        prepare=True,
    )


def _only(cursor: psycopg.Cursor[tuple[Any, ...]]) -> int:
    row = cursor.fetchone()
    if row is None:
        raise StoreError("PostgreSQL gave the block's body no id")
    return int(row[0])


class PostgresWatcher(Watcher):
    """LISTEN carries the hints; a jittered look at the totals backs it up, and stands in where it is off."""

    def __init__(self, log: PostgresLog, notifications: bool = True):
        super().__init__()
        self._log = log
        self._notifications = notifications

    def _listen(self, ready: threading.Event) -> None:
        changes: LogChanges | None = None
        while not self._stop.is_set():
            try:
                with self._log.store.connect() as db:
                    if self._notifications:
                        db.execute(f"listen {CHANNEL}")
                    if changes is None:
                        changes = LogChanges(self._log.totals, lambda log: self._own.get(log, 0))
                    ready.set()
                    while not self._stop.is_set():
                        for log in changes.since_last():
                            self._hint(log)
                        self._wait(db)
            except (StoreError, psycopg.Error):
                self._stop.wait(0.2 + chance.random() * 0.3)  # the server is away: come back and look

    def _wait(self, db: Connection) -> None:
        """Pass hints on until it is time to look for oneself."""
        if not self._notifications:
            self._stop.wait(POLL_ALONE_SECONDS * (0.5 + chance.random() * 0.5))
            return
        until_look = POLL_SECONDS * (0.75 + chance.random() * 0.5)
        while until_look > 0 and not self._stop.is_set():
            # A short wait, so that closing never takes longer than this.
            for note in db.notifies(timeout=min(0.1, until_look)):
                instance, _, log = note.payload.partition(" ")
                if instance != self._log.instance:
                    self._hint(log)
            until_look -= 0.1
