"""The rows Spark sees, and how a block becomes them: columns are handed over, not rewritten, wherever they fit."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pyarrow as pa
from pyspark.sql import types as t
from pyspark.sql.pandas.types import to_arrow_schema

from holdfast.errors import RequestError
from holdfast.log import blocks
from holdfast.model import RETAIN, Stream

SCHEMA = t.StructType(
    [
        t.StructField("log", t.StringType(), False),
        t.StructField("shard", t.IntegerType(), False),
        t.StructField("generation", t.LongType(), False),
        t.StructField("offset", t.LongType(), False),
        t.StructField("time", t.TimestampType(), False),
        t.StructField("topic", t.StringType(), False),
        t.StructField("payload", t.BinaryType(), False),
        t.StructField("publisher", t.StringType(), False),
        t.StructField("qos", t.IntegerType(), False),
        t.StructField("retain", t.BooleanType(), False),
        t.StructField("properties", t.BinaryType(), True),
    ]
)


def check_read_schema(schema: t.StructType) -> None:
    """A narrower schema is welcome; a foreign column or type is named."""
    ours = {field.name: field.dataType for field in SCHEMA}
    for field in schema:
        if field.name not in ours:
            raise RequestError(f"there is no column {field.name!r}; there are: {', '.join(ours)}")
        if field.dataType != ours[field.name]:
            wanted, given = ours[field.name].simpleString(), field.dataType.simpleString()
            raise RequestError(f"column {field.name!r} is of type {wanted}, not {given}")


Column = Callable[[Stream, "np.typing.NDArray[np.int64]", pa.RecordBatch], pa.Array]


def _plain(column: pa.Array) -> pa.Array:
    """A dictionary column as plain strings."""
    return column.dictionary.take(column.indices)


def _retain(batch: pa.RecordBatch) -> pa.Array:
    flags = batch.column(blocks.FLAGS).to_numpy(zero_copy_only=False)
    return pa.array((flags & RETAIN) != 0)


def _qos(batch: pa.RecordBatch) -> pa.Array:
    flags = batch.column(blocks.FLAGS).to_numpy(zero_copy_only=False)
    return pa.array((flags & 0b11).astype(np.int32))


_COLUMNS: dict[str, Column] = {
    "log": lambda stream, offsets, _: pa.repeat(stream.log, len(offsets)),
    "shard": lambda stream, offsets, _: pa.array(np.full(len(offsets), stream.shard, np.int32)),
    "generation": lambda stream, offsets, _: pa.array(np.full(len(offsets), stream.generation, np.int64)),
    "offset": lambda _, offsets, __: pa.array(offsets),
    "time": lambda _, __, batch: batch.column(blocks.TIME),
    "topic": lambda _, __, batch: _plain(batch.column(blocks.TOPIC)),
    "payload": lambda _, __, batch: batch.column(blocks.PAYLOAD),
    "publisher": lambda _, __, batch: _plain(batch.column(blocks.PUBLISHER)),
    "qos": lambda _, __, batch: _qos(batch),
    "retain": lambda _, __, batch: _retain(batch),
    "properties": lambda _, __, batch: batch.column(blocks.PROPERTIES),
}


class RowMaker:
    """Turns pieces of blocks into record batches of exactly the schema that was asked for."""

    def __init__(self, schema: t.StructType):
        self.arrow: pa.Schema = to_arrow_schema(schema, timezone="UTC")
        self._columns = [_COLUMNS[field.name] for field in schema]

    def rows(self, stream: Stream, offsets: np.typing.NDArray[np.int64], batch: pa.RecordBatch) -> pa.RecordBatch:
        columns = [make(stream, offsets, batch) for make in self._columns]
        return pa.RecordBatch.from_arrays(columns, schema=self.arrow)
