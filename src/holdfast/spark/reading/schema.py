"""The rows Spark sees, and how a block becomes them: columns are handed over, not rewritten, wherever they fit."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

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


Numbers = np.typing.NDArray[np.int64]


class RowPiece(NamedTuple):
    """Rows of one block, with their offsets."""

    offsets: Numbers
    batch: pa.RecordBatch


Column = Callable[[Stream, Numbers, Sequence[pa.RecordBatch]], pa.Array]


def numbers(values: np.typing.NDArray[Any], kind: pa.DataType) -> pa.Array:
    """A numpy array as it lies: `pa.array` looks for pandas each time, which takes longer than a small column."""
    return pa.Array.from_buffers(kind, len(values), [None, pa.py_buffer(values)])


def _joined(columns: list[pa.Array]) -> pa.Array:
    return columns[0] if len(columns) == 1 else pa.concat_arrays(columns)


def _as_is(at: int) -> Column:
    return lambda _, __, batches: _joined([batch.column(at) for batch in batches])


def _words(at: int) -> Column:
    """A dictionary column as plain strings."""
    return lambda _, __, batches: _joined(
        [batch.column(at).dictionary.take(batch.column(at).indices) for batch in batches]
    )


def _flags(batches: Sequence[pa.RecordBatch]) -> np.typing.NDArray[np.uint8]:
    columns = [batch.column(blocks.FLAGS) for batch in batches]
    return np.concatenate([np.frombuffer(c.buffers()[1], np.uint8, len(c), c.offset) for c in columns])


def _retain(_: Stream, offsets: Numbers, batches: Sequence[pa.RecordBatch]) -> pa.Array:
    bits = np.packbits((_flags(batches) & RETAIN) != 0, bitorder="little")
    return pa.Array.from_buffers(pa.bool_(), len(offsets), [None, pa.py_buffer(bits)])


_COLUMNS: dict[str, Column] = {
    "log": lambda stream, offsets, _: pa.repeat(stream.log, len(offsets)),
    "shard": lambda stream, offsets, _: numbers(np.full(len(offsets), stream.shard, np.int32), pa.int32()),
    "generation": lambda stream, offsets, _: numbers(np.full(len(offsets), stream.generation, np.int64), pa.int64()),
    "offset": lambda _, offsets, __: numbers(offsets, pa.int64()),
    "time": _as_is(blocks.TIME),
    "topic": _words(blocks.TOPIC),
    "payload": _as_is(blocks.PAYLOAD),
    "publisher": _words(blocks.PUBLISHER),
    "qos": lambda _, __, batches: numbers((_flags(batches) & 0b11).astype(np.int32), pa.int32()),
    "retain": _retain,
    "properties": _as_is(blocks.PROPERTIES),
}


class RowMaker:
    """Turns pieces of blocks into record batches of exactly the schema that was asked for."""

    def __init__(self, schema: t.StructType):
        self.arrow: pa.Schema = to_arrow_schema(schema, timezone="UTC")
        self._columns = [_COLUMNS[field.name] for field in schema]

    def rows(self, stream: Stream, pieces: Sequence[RowPiece]) -> pa.RecordBatch:
        offsets = pieces[0].offsets if len(pieces) == 1 else np.concatenate([piece.offsets for piece in pieces])
        batches = [piece.batch for piece in pieces]
        return pa.RecordBatch.from_arrays([make(stream, offsets, batches) for make in self._columns], schema=self.arrow)
