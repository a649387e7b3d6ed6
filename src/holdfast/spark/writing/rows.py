"""Spark's rows to blocks: which columns are taken, and how a batch is divided among shards."""

from __future__ import annotations

import zlib
from collections.abc import Sequence

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql import types as t

from holdfast.errors import RequestError
from holdfast.log import blocks, index
from holdfast.log.contract import NewBlock
from holdfast.log.staging import topics_json
from holdfast.model import RETAIN, Micros
from holdfast.topics import check_topic

Numbers = np.typing.NDArray[np.int64]

TAKES: dict[str, tuple[type[t.DataType], ...]] = {
    "topic": (t.StringType,),
    "payload": (t.BinaryType, t.StringType),
    "publisher": (t.StringType,),
    "qos": (t.ByteType, t.ShortType, t.IntegerType, t.LongType),
    "retain": (t.BooleanType,),
    "properties": (t.BinaryType,),
    "time": (t.TimestampType,),
    "key": (t.StringType,),
}
PLACES = ("log", "shard", "generation", "offset")
"""Where a message that was read had been: it gets a new place, so these are passed over."""
ORDER = ("_generation", "_shard", "_offset")
"""Where it had been, for a writer that must keep the order of what it read."""


def check_write_schema(schema: t.StructType) -> None:
    names = [field.name for field in schema]
    for needed in ("topic", "payload"):
        if needed not in names:
            raise RequestError(f"column {needed!r} is missing; a message needs topic and payload")
    for field in schema:
        if field.name in PLACES or field.name in ORDER:
            continue
        if field.name not in TAKES:
            raise RequestError(f"column {field.name!r} is no part of a message; those are: {', '.join(TAKES)}")
        if not isinstance(field.dataType, TAKES[field.name]):
            wanted = " or ".join(kind().simpleString() for kind in TAKES[field.name])
            raise RequestError(f"column {field.name!r} is of type {field.dataType.simpleString()}; it takes {wanted}")


def as_block(rows: pa.RecordBatch, now: Micros) -> pa.RecordBatch:
    """The rows with a block's columns, but with plain strings where a block has dictionaries."""
    count = rows.num_rows
    topics = rows.column("topic")
    if topics.null_count:
        raise RequestError("a row has no topic; every message needs one")
    return pa.RecordBatch.from_arrays(
        [
            _times(rows, now),
            topics,
            _filled(rows, "payload", pa.binary(), b""),
            _filled(rows, "publisher", pa.string(), ""),
            pa.array(_flags(rows)),
            rows.column("properties") if "properties" in rows.schema.names else pa.nulls(count, pa.binary()),
        ],
        names=blocks.SCHEMA.names,
    )


def _filled(rows: pa.RecordBatch, name: str, kind: pa.DataType, default: object) -> pa.Array:
    if name not in rows.schema.names:
        return pa.repeat(pa.scalar(default, kind), rows.num_rows)
    column = rows.column(name)
    if column.type != kind:
        column = column.cast(kind)
    return pc.fill_null(column, pa.scalar(default, kind)) if column.null_count else column


def _times(rows: pa.RecordBatch, now: Micros) -> pa.Array:
    kind = blocks.SCHEMA.field(blocks.TIME).type
    if "time" not in rows.schema.names:
        return pa.array(np.full(rows.num_rows, now, np.int64)).cast(kind)
    column = rows.column("time").cast(kind)
    return pc.fill_null(column, pa.scalar(now, pa.int64()).cast(kind)) if column.null_count else column


def _flags(rows: pa.RecordBatch) -> np.typing.NDArray[np.uint8]:
    flags = np.ones(rows.num_rows, np.uint8)
    if "qos" in rows.schema.names:
        qos = pc.fill_null(rows.column("qos"), 1).to_numpy(zero_copy_only=False)
        if len(qos) and (qos.min() < 0 or qos.max() > 2):
            raise RequestError(f"qos {int(qos.min())}..{int(qos.max())} cannot be; it takes 0, 1 or 2")
        flags = qos.astype(np.uint8)
    if "retain" in rows.schema.names:
        retain = pc.fill_null(rows.column("retain"), False).to_numpy(zero_copy_only=False)
        flags = flags | np.where(retain, RETAIN, 0).astype(np.uint8)
    return flags


def shards_of(names: pa.Array, shards: int) -> Numbers:
    """The shard of each row, by the name it is sharded by: as `Log.append` does it, a name at a time, not a row."""
    coded = names.dictionary_encode()
    by_word = np.fromiter((zlib.crc32(w.encode()) % shards for w in coded.dictionary.to_pylist()), np.int64)
    found: Numbers = by_word[coded.indices.to_numpy()]
    return found


def in_order(table: pa.RecordBatch) -> Numbers:
    """Row numbers so that each stream's rows come in its order, and streams are merged by time.

    A stream's times may step back; the newest so far does not, so the merge never turns a stream's order round.
    """
    generation, shard, offset = (table.column(name).to_numpy() for name in ORDER)
    order = np.lexsort((offset, shard, generation))
    times = table.column("time").cast(pa.int64()).to_numpy()[order]
    edge = np.flatnonzero((np.diff(shard[order]) != 0) | (np.diff(generation[order]) != 0)) + 1
    for piece in np.split(times, edge):
        np.maximum.accumulate(piece, out=piece)
    again = np.lexsort((offset[order], shard[order], times, generation[order]))
    found: Numbers = order[again]
    return found


def divide(rows: pa.RecordBatch, shard: Numbers) -> list[tuple[NewBlock, str]]:
    """One block per shard that occurs, rows in their order, each with its topics as JSON."""
    order = np.argsort(shard, kind="stable")
    found, starts = np.unique(shard[order], return_index=True)
    sorted_rows = rows if len(found) == 1 else rows.take(pa.array(order))
    ends = [*starts[1:].tolist(), len(order)]
    return [
        _block(int(number), sorted_rows.slice(first, past - first))
        for number, first, past in zip(found, starts.tolist(), ends, strict=True)
    ]


def _block(shard: int, rows: pa.RecordBatch) -> tuple[NewBlock, str]:
    columns = rows.columns
    for at in (blocks.TOPIC, blocks.PUBLISHER):
        columns[at] = columns[at].dictionary_encode()
    batch = pa.RecordBatch.from_arrays(columns, schema=blocks.SCHEMA)
    topics = [check_topic(topic) for topic in blocks.topics_of(batch)]
    hashes = index.pack({index.topic_hash(topic) for topic in topics})
    data = blocks.encode(batch)
    times = batch.column(blocks.TIME).cast(pa.int64())
    span = pc.min_max(times).as_py()
    block = NewBlock(shard, batch.num_rows, span["min"], span["max"], blocks.checksum(data), hashes, data)
    return block, topics_json(topics)


def combined(batches: Sequence[pa.RecordBatch]) -> pa.RecordBatch:
    return batches[0] if len(batches) == 1 else pa.concat_batches(batches)
