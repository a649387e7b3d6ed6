"""Reading as a member of a shared group: the driver is a batch member, each micro-batch reads what it holds then.

    latestOffset(start)   Spark has committed the batch that ends at `start`: it is acknowledged, what was taken over
                          goes back, and the next batch is made of what we hold now
    partitions(.., end)   by what is written in `end` alone, so a batch that is repeated is the same batch
    stop                  everything goes back; a batch that Spark has not told us of is not acknowledged

The one surprising rule: Spark says that a batch is committed only by asking for the next one, so between two batches
the last one is written and not yet acknowledged. Whoever then takes its streams over reads it again.
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import signal
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any, cast

import pyarrow as pa
from pyspark.sql.datasource import DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadLimit, ReadMaxRows, SupportsTriggerAvailableNow
from pyspark.sql.types import StructType

from holdfast.batch import BatchClient
from holdfast.errors import NodeUnavailable, OutcomeUnknown, RequestError, StoreUnavailable, UnknownStream
from holdfast.model import Stream
from holdfast.spark.lent import Portion, planned, undone
from holdfast.spark.options import GroupOptions, ReadOptions, one_line
from holdfast.spark.schema import RowMaker, check_read_schema
from holdfast.spark.slices import Slice, Slices, cut, gathered, pieces
from holdfast.spark.source import every_head
from holdfast.spark.wanted import Wanted
from holdfast.spark.worker import log_at, settle

_logger = logging.getLogger(__name__)

JOIN_SECONDS = 10.0
"""How long a query that starts waits to be let into its group."""

SHARE_SECONDS = 5.0
"""How long a query that reads what is there and ends waits for the others to give it its share."""

AWAY_SECONDS = 600.0
"""A query goes on by itself if the store or the node is away for less than this."""


class GroupStreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """Lives in a process beside the driver for as long as the query runs; `read` runs in the workers."""

    def __init__(self, options: ReadOptions, group: GroupOptions, schema: StructType, parallelism: int):
        check_read_schema(schema)
        self.options, self.group = options, group
        self.schema, self.parallelism = schema, parallelism
        self._client: BatchClient | None = None
        self._joined = self._stopping = self._ending = False
        self._acknowledged = 0
        self._target: dict[Stream, int] | None = None
        self._away_since: float | None = None

    # -- where the query is ---------------------------------------------------------------------------

    def initialOffset(self) -> dict[str, Any]:
        with one_line():
            self._member().open()
            return self._offset(0, [])

    def _offset(self, batch: int, portions: Sequence[Portion]) -> dict[str, Any]:
        return {"group": self.group.name, "batch": batch, "read": [portion.to_json() for portion in portions]}

    def _portions(self, offset: dict[str, Any]) -> list[Portion]:
        if offset.get("group") != self.group.name:
            raise RequestError(
                f"this checkpoint is not of group {self.group.name!r} but of {offset.get('group', 'no group')!r}; "
                "a query for another group needs a checkpoint of its own"
            )
        return [Portion.from_json(self.options.log, each) for each in offset["read"]]

    def getDefaultReadLimit(self) -> ReadLimit:
        most = self.options.messages_max
        return ReadAllAvailable() if most is None else ReadMaxRows(most)

    def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:
        with one_line():
            client = self._member()
            self._acknowledge(client, start)
            self._join(client)
            try:
                found = self._next(client, limit)
                self._stay(client)
            except (StoreUnavailable, OutcomeUnknown) as error:
                # An error here would end the query, so for a while we say that there is nothing new.
                self._away(error)
                found = []
            client.drained(still=[portion.piece for portion in found])
            return self._offset(start["batch"] + 1, found) if found else start

    def _acknowledge(self, client: BatchClient, start: dict[str, Any]) -> None:
        """The batch that ends here is committed; after a restart, by whoever held its pieces then."""
        if start["batch"] != self._acknowledged:
            for portion in self._portions(start):
                client.ack(portion.piece, [(portion.first, portion.past - 1)], portion.course)
            self._acknowledged = start["batch"]
        client.drained()

    def _join(self, client: BatchClient) -> None:
        if self._joined:
            return
        once = self._target is not None
        self._joined = client.join(JOIN_SECONDS)
        if once and not self._joined:
            raise NodeUnavailable(f"group {self.group.name!r} leased nothing within {JOIN_SECONDS:.0f} s; ask again")
        # A newcomer begins with nothing, and gets its share when the others have let go of it.
        give_up = time.monotonic() + (SHARE_SECONDS if once else 0.0)
        while not client.assignment().pieces and time.monotonic() < give_up:
            time.sleep(0.02)

    def _next(self, client: BatchClient, limit: ReadLimit) -> list[Portion]:
        held = client.assignment().pieces
        if not held:
            return []
        heads = every_head(log_at(self.options.store), self.options.log, self.options.lake)
        ends = {head.stream: head.next_offset for head in heads}
        if self._target is not None:
            ends = {stream: min(end, self._target.get(stream, 0)) for stream, end in ends.items()}
        return planned(held, ends, limit.max_rows if isinstance(limit, ReadMaxRows) else None)

    def _stay(self, client: BatchClient) -> None:
        if client.trouble is None:
            self._away_since = None
        else:
            self._away(NodeUnavailable(client.trouble))

    def _away(self, error: Exception) -> None:
        now = time.monotonic()
        self._away_since = self._away_since or now
        if now - self._away_since > AWAY_SECONDS:
            raise error

    def prepareForTriggerAvailableNow(self) -> None:
        with one_line():
            heads = every_head(log_at(self.options.store), self.options.log, self.options.lake)
            self._target = {head.stream: head.next_offset for head in heads}

    def commit(self, end: dict[str, Any]) -> None:
        """Comes a batch late, and never for the last one: `latestOffset` knows sooner."""

    # -- the member -------------------------------------------------------------------------------------

    def _member(self) -> BatchClient:
        if self._client is None:
            of = self.group
            name = f"spark-{secrets.token_hex(8)}"
            self._client = BatchClient(of.node, of.name, name, of.username, of.password, of.start)
            # Spark ends this process by SIGTERM, of which Python would tell nobody.
            if threading.current_thread() is threading.main_thread():
                signal.signal(signal.SIGTERM, self._terminated)
        return self._client

    def _terminated(self, *_: object) -> None:
        self._ending = True
        if not self._stopping:  # else it must not be torn out of its last words
            sys.exit(0)  # whatever is under way ends, and then comes `stop`

    def stop(self) -> None:
        self._stopping = True
        if self._client is not None:
            with contextlib.suppress(NodeUnavailable):
                self._client.close()
        if self._ending:
            os._exit(0)  # Spark has hung up: telling it more would only leave a traceback

    # -- batches ----------------------------------------------------------------------------------------

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> Sequence[InputPartition]:
        with one_line():
            portions = self._portions(end)
            asked = self.options.partitions
            # Portions are slices, and more: cutting them asks for no more than they have in common.
            slices = cast("list[Slice]", portions)
            log = log_at(self.options.store)
            return list(cut(log, slices, asked or self.parallelism, exactly=asked is not None)) or [Slices([])]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        with one_line():
            settle()
            if not isinstance(partition, Slices):
                return
            log, wanted, maker = log_at(self.options.store), Wanted((self.group.filter,)), RowMaker(self.schema)
            for portion in cast("tuple[Portion, ...]", partition.slices):
                span = Slice(portion.stream, portion.first, portion.past)
                found = (undone(portion, piece) for piece in pieces(log, span, wanted, self.options.lake))
                try:
                    yield from gathered(portion.stream, (piece for piece in found if len(piece.offsets)), maker)
                except UnknownStream:
                    if self.options.trimmed == "error":
                        raise
                    _logger.warning("%s is gone: skipped from offset %d on", portion.stream, portion.first)
