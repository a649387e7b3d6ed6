"""Blocks: columns of messages to an Arrow IPC stream and back, with a checksum over the bytes."""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from holdfast.log.contract import Data
from holdfast.model import Batch, Micros
from holdfast.topics import FEW, Wanted

try:
    from isal.isal_zlib import crc32  # the same sum, twenty times as fast
except ImportError:  # no wheel for this machine
    from zlib import crc32

_TIME = pa.timestamp("us", "UTC")
_WORDS = pa.dictionary(pa.int32(), pa.string())

SCHEMA = pa.schema(
    [
        pa.field("time", _TIME, nullable=False),
        pa.field("topic", _WORDS, nullable=False),
        pa.field("payload", pa.binary(), nullable=False),
        pa.field("publisher", _WORDS, nullable=False),
        pa.field("flags", pa.uint8(), nullable=False),
        pa.field("properties", pa.binary()),
    ],
    metadata={"holdfast.block": "1"},
)
TIME, TOPIC, PAYLOAD, PUBLISHER, FLAGS, PROPERTIES = range(len(SCHEMA))


def record_batch(rows: Batch, now: Micros) -> tuple[pa.RecordBatch, Micros, Micros]:
    """The rows as Arrow, and their oldest and newest time."""
    count = len(rows)
    if isinstance(rows.times, int) or rows.times is None:
        oldest = newest = now if rows.times is None else rows.times
        times = np.full(count, oldest, np.int64)
    else:
        times = np.array(rows.times, np.int64)
        oldest, newest = int(times.min()), int(times.max())
    flags = np.full(count, rows.flags, np.uint8) if isinstance(rows.flags, int) else np.array(rows.flags, np.uint8)
    if isinstance(rows.publishers, str):
        places = _numbers(np.zeros(count, np.int32), pa.int32())
        publishers = pa.DictionaryArray.from_arrays(places, pa.array([rows.publishers], pa.string()), safe=False)
    else:
        publishers = _words(rows.publishers)
    batch = pa.RecordBatch.from_arrays(
        [
            _numbers(times, _TIME),
            _words(rows.topics),
            pa.array(rows.payloads, pa.binary()),
            publishers,
            _numbers(flags, pa.uint8()),
            pa.nulls(count, pa.binary()) if rows.properties is None else pa.array(rows.properties, pa.binary()),
        ],
        schema=SCHEMA,
    )
    return batch, oldest, newest


def _words(values: Sequence[str]) -> pa.DictionaryArray:
    """Each word once, and which of them each row has."""
    return pa.array(values, pa.string()).dictionary_encode()


def _numbers(values: Any, type_: pa.DataType) -> pa.Array:
    """A numpy array as an Arrow one, as it lies."""
    return pa.Array.from_buffers(type_, len(values), [None, pa.py_buffer(values)])


def encode(batch: pa.RecordBatch) -> Data:
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, SCHEMA) as writer:
        writer.write_batch(batch)
    return memoryview(sink.getvalue())


def decode(data: Data) -> pa.RecordBatch:
    """The block's record batch, over the bytes as they are (nothing is copied)."""
    return pa.ipc.open_stream(pa.py_buffer(data)).read_next_batch()


def checksum(data: Data) -> int:
    return crc32(data)


def merge(batches: list[pa.RecordBatch]) -> pa.RecordBatch:
    """The rows of several blocks as one, each dictionary unified."""
    table = pa.Table.from_batches(batches).unify_dictionaries().combine_chunks()
    return table.to_batches()[0]


def topics_of(batch: pa.RecordBatch) -> list[str]:
    """The distinct topics of a block."""
    words: list[str] = batch.column(TOPIC).dictionary.to_pylist()
    return words


def matching_rows(batch: pa.RecordBatch, wanted: Wanted) -> pa.Int64Array | None:
    """Which rows match, or None for all of them."""
    words = batch.column(TOPIC)
    if wanted.everything and not pc.any(pc.starts_with(words.dictionary, "$")).as_py():
        return None
    places = _matching(words.dictionary, wanted)
    if len(places) == len(words.dictionary):
        return None
    if not places:
        return pa.array([], pa.int64())
    if len(places) == 1:
        mask = pc.equal(words.indices, pa.scalar(places[0], pa.int32()))
    else:
        mask = pc.is_in(words.indices, value_set=pa.array(places, pa.int32()))
    return pc.indices_nonzero(mask).cast(pa.int64())


def _matching(words: pa.StringArray, wanted: Wanted) -> list[int]:
    """Which of these topics match. Arrow knows at once which of them begin in the right way, mostly none."""
    begins = {part.prefix for part in wanted.parts}
    if len(begins) > FEW or "" in begins:
        return wanted.matching(words.to_pylist())
    masks = [pc.starts_with(words, begin) for begin in begins]
    places = pc.indices_nonzero(reduce(pc.or_, masks))
    if not len(places):
        return []
    numbers: list[int] = places.to_pylist()
    return [numbers[at] for at in wanted.matching(words.take(places).to_pylist())]


def empty() -> pa.RecordBatch:
    """No rows, of the blocks' schema."""
    return record_batch(Batch([], [], times=0), 0)[0]
