"""Reading the log as a stream: micro-batch after micro-batch, across generations, with a cursor if one is named."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Sequence
from typing import Any

import pyarrow as pa
from pyspark.sql.datasource import DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import (
    ReadAllAvailable,
    ReadLimit,
    ReadMaxRows,
    ReadMinRows,
    SupportsTriggerAvailableNow,
)
from pyspark.sql.types import StructType

from holdfast.errors import OutcomeUnknown, StoreUnavailable
from holdfast.log.contract import Head
from holdfast.log.history import History
from holdfast.model import Stream
from holdfast.spark.cursor import SavedCursor
from holdfast.spark.offsets import Key, Place, advanced, after_missing, beginning, capped, key_of, tidied
from holdfast.spark.options import ReadOptions, one_line
from holdfast.spark.schema import RowMaker, check_read_schema
from holdfast.spark.slices import Slice, Slices, cut, read
from holdfast.spark.source import every_head, place
from holdfast.spark.wanted import Wanted
from holdfast.spark.worker import log_at, settle

_logger = logging.getLogger(__name__)

AWAY_SECONDS = 600.0
"""A query goes on by itself if the store is away for less than this."""


class LogStreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """Lives in a process beside the driver for as long as the query runs; `read` runs in the workers."""

    def __init__(self, options: ReadOptions, schema: StructType, parallelism: int):
        check_read_schema(schema)
        self.options = options
        self.schema = schema
        self.parallelism = parallelism
        self._target: dict[Key, int] | None = None
        self._away_since: float | None = None
        self._cursor: SavedCursor | None = None

    # -- where the query is ---------------------------------------------------------------------------

    def initialOffset(self) -> dict[str, Any]:
        with one_line():
            heads = self._heads()
            cursor = self._saved()
            known = cursor.load() if cursor else None
            if known is not None:
                return {**known.to_json(), "initial": True}
            log = log_at(self.options.store)
            history = History(log, root=self.options.lake)
            at = {key_of(head): place(log, history, head, self.options.start) for head in heads}
            return {**beginning(heads, at).to_json(), "initial": True}

    def getDefaultReadLimit(self) -> ReadLimit:
        most = self.options.messages_max
        return ReadAllAvailable() if most is None else ReadMaxRows(most)

    def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:
        """Spark asks for the next end when the batch up to `start` has been written: so that far is done."""
        with one_line():
            try:
                end = self._next(Place.from_json(start), limit, written=not start.get("initial"))
                self._away_since = None
            except (StoreUnavailable, OutcomeUnknown):
                # An error here would end the query, so for a while we say that there is nothing new.
                now = time.monotonic()
                self._away_since = self._away_since or now
                if now - self._away_since > AWAY_SECONDS:
                    raise
                if start.get("initial"):
                    raise
                return start
            found = end.to_json()
            if start.get("initial"):
                found["began"] = {key: start[key] for key in ("done", "at")}
            elif found == {key: start[key] for key in ("done", "at")}:
                return start
            return found

    def _next(self, start: Place, limit: ReadLimit, *, written: bool) -> Place:
        heads = self._heads()
        there = after_missing(start, heads, self.options.log, self.options.trimmed)
        if there != start:
            _logger.warning(
                "generations %d to %d of log %r are gone: skipped", start.done + 1, there.done, self.options.log
            )
        now = tidied(there, heads)
        heads = capped(heads, self._target)
        most = limit.max_rows if isinstance(limit, ReadMaxRows) else None
        end = advanced(now, heads, most)
        new = sum(end.at.values()) - sum(now.at.values())
        if isinstance(limit, ReadMinRows) and self._target is None and new < limit.min_rows:
            end = now
        cursor = self._saved()
        if cursor and written:
            cursor.save(now, at_once=end == now)
        return end

    def reportLatestOffset(self) -> dict[str, Any] | None:
        try:
            heads = self._heads()
        except (StoreUnavailable, OutcomeUnknown):
            return None
        return beginning(heads, {key_of(head): head.next_offset for head in heads}).to_json()

    def prepareForTriggerAvailableNow(self) -> None:
        with one_line():
            self._target = {key_of(head): head.next_offset for head in self._heads()}

    def commit(self, end: dict[str, Any]) -> None:
        """Spark forgets what was before `end`. The cursor knows already, from `latestOffset`, and sooner."""

    def _heads(self) -> list[Head]:
        return every_head(log_at(self.options.store), self.options.log, self.options.lake)

    def _saved(self) -> SavedCursor | None:
        if self.options.subscription is None:
            return None
        if self._cursor is None:
            url = self.options.metadata or self.options.store
            self._cursor = SavedCursor(url, self.options.log, self.options.subscription)
        return self._cursor

    def stop(self) -> None:
        if self._cursor is not None:
            self._cursor.close()

    # -- batches ----------------------------------------------------------------------------------------

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> Sequence[InputPartition]:
        with one_line():
            first, past = Place.from_json(end.get("began", start)), Place.from_json(end)
            slices = [
                Slice(Stream(self.options.log, shard, generation), first.of((generation, shard)), offset)
                for (generation, shard), offset in sorted(past.at.items())
                if offset > first.of((generation, shard)) and generation > first.done
            ]
            asked = self.options.partitions
            log = log_at(self.options.store)
            return list(cut(log, slices, asked or self.parallelism, exactly=asked is not None)) or [Slices([])]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        with one_line():
            settle()
            if isinstance(partition, Slices) and partition.slices:
                log, wanted = log_at(self.options.store), Wanted(self.options.filters)
                yield from read(log, partition.slices, wanted, RowMaker(self.schema), self.options.lake)
