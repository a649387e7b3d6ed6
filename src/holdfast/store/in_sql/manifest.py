"""The lake's manifest, in SQL that SQLite and PostgreSQL share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from holdfast.errors import PreconditionFailed
from holdfast.log.contract import Generation, Head
from holdfast.log.manifest import LakeFile, Part, Reached
from holdfast.model import Micros, Stream
from holdfast.store.in_sql.database import Database, Transaction


class SqlManifest:
    """The promises of `log/manifest.py` in a database's tables."""

    def __init__(self, database: Database):
        self._database = database

    def root(self, log: str) -> str | None:
        rows = self._all("select root from lakes where log = ?", log)
        return rows[0][0] if rows else None

    def set_root(self, log: str, root: str) -> None:
        self._database.change(
            lambda db: db.run(
                "insert into lakes values (?, ?) on conflict (log) do update set root = excluded.root", log, root
            ),
            repeatable=True,
        )

    def reached(self, log: str) -> dict[Stream, int]:
        rows = self._all("select generation, shard, past from lake_streams where log = ?", log)
        return {Stream(log, shard, generation): past for generation, shard, past in rows}

    def commit(self, log: str, files: Sequence[LakeFile], reached: Sequence[Reached]) -> None:
        # Repeated if its answer was lost: had it been made, the precondition fails, and says where the lake is.
        self._database.change(lambda db: self._commit(db, log, files, reached), repeatable=True)

    def _commit(self, db: Transaction, log: str, files: Sequence[LakeFile], reached: Sequence[Reached]) -> None:
        lock = self._database.dialect.locked
        for stream, first, past in sorted(reached):
            key = (log, stream.generation, stream.shard)
            db.run("insert into lake_streams values (?, ?, ?, 0, 0, null, null, null) on conflict do nothing", *key)
            row = db.run(f"select past from lake_streams where log = ? and generation = ? and shard = ?{lock}", *key)[0]
            if row[0] != first:
                raise PreconditionFailed(f"the lake has come to offset {row[0]} in {stream}, not to {first}")
            db.run("update lake_streams set past = ? where log = ? and generation = ? and shard = ?", past, *key)
        for file in files:
            number = db.run(
                "insert into lake_files (log, generation, date, path, messages, bytes, oldest, newest)"
                " values (?, ?, ?, ?, ?, ?, ?, ?) returning id",
                *(log, *file[:7]),
            )[0][0]
            for part in file.parts:
                db.run(
                    "insert into lake_parts (log, generation, shard, first, file, past, messages)"
                    " values (?, ?, ?, ?, ?, ?, ?)",
                    *(log, file.generation, part.shard, part.first, number, part.past, part.messages),
                )
                db.run(
                    "update lake_streams set bytes = bytes + ?,"
                    " oldest = case when oldest < ? then oldest else ? end,"
                    " newest = case when newest > ? then newest else ? end"
                    " where log = ? and generation = ? and shard = ?",
                    *(file.bytes * part.messages // file.messages, file.oldest, file.oldest, file.newest, file.newest),
                    *(log, file.generation, part.shard),
                )

    def parts(self, stream: Stream, first: int, past: int) -> list[tuple[str, Part, Micros]]:
        rows = self._all(
            "select f.path, p.shard, p.first, p.past, p.messages, f.newest"
            " from lake_parts p join lake_files f on f.id = p.file"
            " where p.log = ? and p.generation = ? and p.shard = ? and p.past > ? and p.first < ?"
            " order by p.first, f.id",
            *(stream.log, stream.generation, stream.shard, first, past),
        )
        return [(path, Part(*rest), newest) for path, *rest, newest in rows]

    def heads(self, log: str) -> list[Head]:
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
        row = self._all(
            "select count(*), coalesce(sum(messages), 0), coalesce(sum(bytes), 0) from lake_files where log = ?", log
        )[0]
        return int(row[0]), int(row[1]), int(row[2])

    def verified(self, log: str) -> set[int]:
        return {g for (g,) in self._all("select generation from lake_generations where log = ?", log)}

    def set_verified(
        self, log: str, generation: Generation, checksums: dict[int, int], messages: int, now: Micros
    ) -> None:
        def change(db: Transaction) -> None:
            for shard, checksum in checksums.items():
                db.run(
                    "update lake_streams set checksum = ? where log = ? and generation = ? and shard = ?",
                    *(checksum, log, generation.number, shard),
                )
            db.run(
                "insert into lake_generations values (?, ?, ?, ?, ?, ?, ?) on conflict do nothing",
                *(log, generation.number, generation.shards, generation.opened_at, generation.sealed_at, messages, now),
            )

        self._database.change(change, repeatable=True)

    def may_drop(self, log: str, generation: int) -> bool:
        return self.root(log) is None or generation in self.verified(log)

    def _all(self, query: str, *parameters: object) -> list[tuple[Any, ...]]:
        return self._database.ask(lambda db: db.run(query, *parameters))
