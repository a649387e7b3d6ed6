"""Writing to the log, exactly once: tasks stage, the driver publishes what exactly these tasks staged.

The surprising rule: a task whose sibling failed sees its rows *end*, as if there were no more, and returns as
if all were well. So nothing a task does may be visible; only the driver, which knows, makes it so.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from dataclasses import dataclass

import pyarrow as pa
from pyspark import TaskContext
from pyspark.sql.datasource import DataSourceArrowWriter, DataSourceStreamArrowWriter, WriterCommitMessage
from pyspark.sql.types import StructType

from holdfast.errors import RequestError
from holdfast.log import Log, blocks
from holdfast.log.staging import UNNAMED, StagedBatch, Staging, Task, bodies_of
from holdfast.spark.options import WriteOptions, one_line
from holdfast.spark.worker import log_at, settle, store_at
from holdfast.spark.writing.rows import ORDER, as_block, check_write_schema, combined, divide, in_order, shards_of

ROWS_STAGED = 65_536
BYTES_STAGED = 16 << 20
"""A task stages this much at a time: large enough for blocks that read well, small enough for its memory."""

STALE_SECONDS = 86_400.0
"""What was staged so long ago and never published is swept."""


@dataclass(frozen=True)
class Staged(WriterCommitMessage):
    """What a task tells the driver."""

    batch: StagedBatch
    task: Task
    by_key: bool


class _Writer:
    """What the batch writer and the streaming writer have in common."""

    def __init__(self, options: WriteOptions, schema: StructType):
        check_write_schema(schema)
        self.options = options
        self.by_key = "key" in schema.fieldNames()
        self.ordered = set(ORDER) <= set(schema.fieldNames())

    def log(self) -> Log:
        log = log_at(self.options.store)
        if self.options.log not in log.logs():
            if self.options.shards is None:
                raise RequestError(
                    f"there is no log {self.options.log!r}; create it, or say with option shards how many it is to have"
                )
            log.create(self.options.log, self.options.shards, self.options.shard_by)
        return log

    def staging(self) -> Staging:
        return store_at(self.options.store).staging()

    def stage(self, rows: Iterator[pa.RecordBatch], batch: StagedBatch) -> Staged:
        """Stage everything that comes, some at a time."""
        log = self.log()
        staging, shard_by = self.staging(), log.logs()[batch.log]
        shards = log.generations(batch.log)[-1].shards
        context = TaskContext.get()
        name, place, messages = uuid.uuid4().hex, 0, 0
        for some in _gathered(rows, whole=self.ordered):
            if self.ordered:
                some = some.take(pa.array(in_order(some)))
            now = log.clock()
            columns = as_block(some, now)
            by = some.column("key") if self.by_key else columns.column(shard_by)
            if by.null_count:
                by = by.fill_null("")
            made = divide(columns, shards_of(by, shards))
            staging.stage(batch, name, place, shards, made, now)
            place += len(made)
            messages += some.num_rows
        return Staged(batch, Task(name, context.partitionId() if context else 0, place, messages), self.by_key)

    def publish(self, messages: list[WriterCommitMessage | None]) -> None:
        staged = [m for m in messages if isinstance(m, Staged)]
        if len(staged) != len(messages):
            raise RequestError("a task has not said what it wrote; nothing was published")
        batches = {m.batch for m in staged}
        if len(batches) > 1:
            raise RequestError(f"the tasks wrote for different batches ({batches}); nothing was published")
        log = self.log()
        staging = self.staging()
        for batch in batches:
            tasks = [m.task for m in staged]
            landing = staging.publish(batch, tasks, self.options.position, log.clock())
            while landing.shards is not None:
                if any(m.by_key for m in staged):
                    raise RequestError(
                        f"log {batch.log!r} has {landing.shards} shards since it was sealed; run it again"
                    )
                tasks = self._divide_again(log, batch, tasks, landing.shards)
                landing = staging.publish(batch, tasks, self.options.position, log.clock())
        staging.sweep(log.steady() - int(STALE_SECONDS * 1e6))

    def _divide_again(self, log: Log, batch: StagedBatch, tasks: list[Task], shards: int) -> list[Task]:
        """The log was sealed with another number of shards between staging and now: stage for that number."""
        staging, shard_by = self.staging(), log.logs()[batch.log]
        again = []
        for task in tasks:
            name, place, messages = uuid.uuid4().hex, 0, 0
            old = staging.blocks(batch, task.name)
            for at in range(0, len(old), 16):
                some = [blocks.decode(data) for data in bodies_of(log, old[at : at + 16])]
                plain = pa.Table.from_batches(some).unify_dictionaries().combine_chunks().to_batches()[0]
                columns = plain.columns
                for column in (blocks.TOPIC, blocks.PUBLISHER):
                    columns[column] = columns[column].dictionary.take(columns[column].indices)
                rows = pa.RecordBatch.from_arrays(columns, names=blocks.SCHEMA.names)
                made = divide(rows, shards_of(rows.column(shard_by), shards))
                staging.stage(batch, name, place, shards, made, log.clock())
                place, messages = place + len(made), messages + rows.num_rows
            again.append(Task(name, task.partition, place, messages))
        return again

    def forget(self, messages: list[WriterCommitMessage | None]) -> None:
        """Throw away what was staged; harmless after a commit, whatever became of it."""
        staging = self.staging()
        for message in messages:
            if isinstance(message, Staged):
                staging.forget(message.batch, [message.task.name])


class LogWriter(_Writer, DataSourceArrowWriter):
    """One batch job."""

    def __init__(self, options: WriteOptions, schema: StructType, overwrite: bool):
        super().__init__(options, schema)
        if overwrite:
            raise RequestError("a log is only ever appended to; use mode('append')")
        self.log()  # a store that is not there, or a log, is best told before a thousand tasks find out
        writer = options.write_id or f"{UNNAMED}{uuid.uuid4().hex}"
        self.batch = StagedBatch(options.log, writer, options.write_batch)

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        with one_line():
            settle()
            return self.stage(iterator, self.batch)

    def commit(self, messages: list[WriterCommitMessage | None]) -> None:
        with one_line():
            self.publish(messages)

    def abort(self, messages: list[WriterCommitMessage | None]) -> None:
        with one_line():
            self.forget(messages)


class LogStreamWriter(_Writer, DataSourceStreamArrowWriter):
    """One micro-batch after the other, known by the query's checkpoint and their number."""

    def __init__(self, options: WriteOptions, schema: StructType):
        super().__init__(options, schema)
        self.log()

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        with one_line():
            settle()
            context = TaskContext.get()
            query = context.getLocalProperty("sql.streaming.queryId") if context else None
            number = context.getLocalProperty("streaming.sql.batchId") if context else None
            if query is None or number is None:
                raise RequestError("this is no task of a streaming query; use df.write for batches")
            return self.stage(iterator, StagedBatch(self.options.log, query, int(number)))

    def commit(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:
        with one_line():
            self.publish(messages)

    def abort(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:
        with one_line():
            self.forget(messages)


def _gathered(rows: Iterator[pa.RecordBatch], *, whole: bool) -> Iterator[pa.RecordBatch]:
    """Spark's batches in larger pieces; `whole`: all of them as one, since they are to be put in order."""
    waiting: list[pa.RecordBatch] = []
    count = size = 0
    for each in rows:
        if each.num_rows:
            waiting.append(each)
            count, size = count + each.num_rows, size + each.nbytes
        if not whole and (count >= ROWS_STAGED or size >= BYTES_STAGED):
            yield combined(waiting)
            waiting, count, size = [], 0, 0
    if waiting:
        yield combined(waiting)
