"""What the lake holds, as the store knows it: a file counts when it is in here, and not before.

The lake's progress and its files change in one transaction, and only from the exact place where the last
change left it: so every message is in the lake once, whoever was killed, or ran twice, in between.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

from holdfast.errors import PreconditionFailed, RequestError
from holdfast.log.contract import Generation, Head
from holdfast.log.log import Log
from holdfast.log.postgres import PostgresLog
from holdfast.log.sqlite import SqliteLog
from holdfast.model import Micros, Stream

T = TypeVar("T")
Execute = Callable[..., Any]


class Part(NamedTuple):
    """Which offsets of one stream a file holds: `messages` of them, from `first` to before `past`."""

    shard: int
    first: int
    past: int
    messages: int


class LakeFile(NamedTuple):
    """One file of one generation and one day."""

    generation: int
    date: str
    path: str
    """Below the lake's root."""
    messages: int
    bytes: int
    oldest: Micros
    newest: Micros
    parts: tuple[Part, ...]


class Reached(NamedTuple):
    """How far one commit takes the lake in one stream."""

    stream: Stream
    first: int
    past: int


class Manifest:
    """The lake's tables in one store."""

    def __init__(self, log: Log):
        backend = log.backend
        if not isinstance(backend, SqliteLog | PostgresLog):
            raise RequestError("a lake needs a store that several processes share; use sqlite or postgresql")
        self._store = backend.store
        self._postgres = isinstance(backend, PostgresLog)

    def root(self, log: str) -> str | None:
        """Where the log's lake is; None if it has none."""
        rows = self._all("select root from lakes where log = ?", log)
        return rows[0][0] if rows else None

    def set_root(self, log: str, root: str) -> None:
        """Declare the lake. From now on retention drops only what has been verified there."""
        self._change(
            lambda run: run(
                "insert into lakes values (?, ?) on conflict (log) do update set root = excluded.root", log, root
            )
        )

    def reached(self, log: str) -> dict[Stream, int]:
        """The offset before which everything is in the lake, by stream."""
        rows = self._all("select generation, shard, past from lake_streams where log = ?", log)
        return {Stream(log, shard, generation): past for generation, shard, past in rows}

    def commit(self, log: str, files: Sequence[LakeFile], reached: Sequence[Reached]) -> None:
        """Add the files and move on, all or none. PreconditionFailed: somebody else has moved meanwhile."""
        self._change(lambda run: self._commit(run, log, files, reached))

    def _commit(self, run: Execute, log: str, files: Sequence[LakeFile], reached: Sequence[Reached]) -> None:
        lock = " for update" if self._postgres else ""
        for stream, first, past in sorted(reached):
            key = (log, stream.generation, stream.shard)
            run("insert into lake_streams values (?, ?, ?, 0, 0, null, null, null) on conflict do nothing", *key)
            row = run(
                f"select past from lake_streams where log = ? and generation = ? and shard = ?{lock}", *key
            ).fetchone()
            if row[0] != first:
                raise PreconditionFailed(f"the lake has come to offset {row[0]} in {stream}, not to {first}")
            run("update lake_streams set past = ? where log = ? and generation = ? and shard = ?", past, *key)
        for file in files:
            number = run(
                "insert into lake_files (log, generation, date, path, messages, bytes, oldest, newest)"
                " values (?, ?, ?, ?, ?, ?, ?, ?) returning id",
                *(log, *file[:7]),
            ).fetchone()[0]
            for part in file.parts:
                run(
                    "insert into lake_parts (log, generation, shard, first, file, past, messages)"
                    " values (?, ?, ?, ?, ?, ?, ?)",
                    *(log, file.generation, part.shard, part.first, number, part.past, part.messages),
                )
                run(
                    "update lake_streams set bytes = bytes + ?,"
                    " oldest = case when oldest < ? then oldest else ? end,"
                    " newest = case when newest > ? then newest else ? end"
                    " where log = ? and generation = ? and shard = ?",
                    *(file.bytes * part.messages // file.messages, file.oldest, file.oldest, file.newest, file.newest),
                    *(log, file.generation, part.shard),
                )

    def parts(self, stream: Stream, first: int, past: int) -> list[tuple[str, Part, Micros]]:
        """The files that hold any of these offsets: path, part, and the newest time in the file."""
        rows = self._all(
            "select f.path, p.shard, p.first, p.past, p.messages, f.newest"
            " from lake_parts p join lake_files f on f.id = p.file"
            " where p.log = ? and p.generation = ? and p.shard = ? and p.past > ? and p.first < ?"
            " order by p.first, f.id",
            *(stream.log, stream.generation, stream.shard, first, past),
        )
        return [(path, Part(*rest), newest) for path, *rest, newest in rows]

    def heads(self, log: str) -> list[Head]:
        """The lake's streams, in the shape of the store's: number 0, since they are none of its own."""
        rows = self._all(
            "select generation, shard, past, bytes, oldest, newest from lake_streams where log = ?"
            " order by generation, shard",
            log,
        )
        return [
            Head(0, Stream(log, s, g), past, size, oldest, newest, True) for g, s, past, size, oldest, newest in rows
        ]

    def paths(self, log: str) -> set[str]:
        return {path for (path,) in self._all("select path from lake_files where log = ?", log)}

    def totals(self, log: str) -> tuple[int, int, int]:
        """Files, messages and bytes."""
        row = self._all(
            "select count(*), coalesce(sum(messages), 0), coalesce(sum(bytes), 0) from lake_files where log = ?", log
        )[0]
        return int(row[0]), int(row[1]), int(row[2])

    def verified(self, log: str) -> set[int]:
        """The generations that were compared with the store and found the same."""
        return {g for (g,) in self._all("select generation from lake_generations where log = ?", log)}

    def set_verified(
        self, log: str, generation: Generation, checksums: dict[int, int], messages: int, now: Micros
    ) -> None:
        def change(run: Execute) -> None:
            for shard, checksum in checksums.items():
                run(
                    "update lake_streams set checksum = ? where log = ? and generation = ? and shard = ?",
                    *(checksum, log, generation.number, shard),
                )
            run(
                "insert into lake_generations values (?, ?, ?, ?, ?, ?, ?) on conflict do nothing",
                *(log, generation.number, generation.shards, generation.opened_at, generation.sealed_at, messages, now),
            )

        self._change(change)

    def may_drop(self, log: str, generation: int) -> bool:
        """May the store forget this generation? Yes if the log has no lake, or the lake verifiably has it."""
        return self.root(log) is None or generation in self.verified(log)

    # -- one SQL for both stores ------------------------------------------------------------------------

    def _all(self, query: str, *parameters: object) -> list[tuple[Any, ...]]:
        def attempt() -> list[tuple[Any, ...]]:
            with self._store.read() as db:
                found: list[tuple[Any, ...]] = self._execute(db)(query, *parameters).fetchall()
                return found

        return self._trying(attempt)

    def _change(self, change: Callable[[Execute], None]) -> None:
        def attempt() -> None:
            with self._store.write() as db:
                change(self._execute(db))

        self._trying(attempt)

    def _execute(self, db: Any) -> Execute:
        if self._postgres:
            return lambda query, *parameters: db.execute(query.replace("?", "%s"), parameters)
        return lambda query, *parameters: db.execute(query, parameters)

    def _trying(self, attempt: Callable[[], T]) -> T:
        from holdfast.store.postgres import PostgresStore

        # A commit whose answer was lost is repeated; if it had been made, the precondition fails, and says where it is.
        return self._store.retrying(attempt) if isinstance(self._store, PostgresStore) else attempt()
