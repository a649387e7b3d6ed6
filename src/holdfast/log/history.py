"""Reading back from the lake what the store no longer holds: the same messages, in the same order.

Files are sorted by topic and time, which suits questions; replay wants offsets. So a file is loaded whole,
put in order of its streams' offsets once, and kept for a while: a replay comes back for the rest of it.
"""

from __future__ import annotations

import threading
import zlib
from collections import OrderedDict
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from pyarrow import fs

from holdfast.errors import RequestError, StoreError, UnknownStream
from holdfast.log import blocks
from holdfast.log.contract import Chunk, Head, Reading
from holdfast.log.log import BYTES_MAX, ROWS_MAX, Log
from holdfast.model import RETAIN, Micros, Stream
from holdfast.topics import TopicFilter, Wanted

CACHE_BYTES = 256 << 20

FILE_SCHEMA = pa.schema(
    [
        pa.field("shard", pa.int32(), nullable=False),
        pa.field("offset", pa.int64(), nullable=False),
        pa.field("time", pa.timestamp("us", "UTC"), nullable=False),
        pa.field("topic", pa.string(), nullable=False),
        pa.field("payload", pa.binary(), nullable=False),
        pa.field("publisher", pa.string(), nullable=False),
        pa.field("qos", pa.int32(), nullable=False),
        pa.field("retain", pa.bool_(), nullable=False),
        pa.field("properties", pa.binary()),
    ]
)
"""A lake file's columns. Log, date and generation are in its path."""


class LoadedFile:
    """One file's rows, in order of shard and offset."""

    def __init__(self, table: pa.Table):
        shards, offsets = table.column("shard").to_numpy(), table.column("offset").to_numpy()
        order = np.lexsort((offsets, shards))
        self.shards, self.offsets = shards[order], offsets[order]
        self.batch = _as_block(table.take(pa.array(order)).combine_chunks())
        self.bytes = int(self.batch.nbytes)

    def rows(self, shard: int, first: int, past: int) -> tuple[int, int]:
        """Where the stream's offsets [first, past) begin and end."""
        a, b = np.searchsorted(self.shards, [shard, shard + 1])
        low, high = np.searchsorted(self.offsets[a:b], [first, past])
        return int(a + low), int(a + high)


def _as_block(table: pa.Table) -> pa.RecordBatch:
    """A block's columns, its two booleans and numbers folded into flags again."""
    retain = table.column("retain").to_numpy()
    flags = table.column("qos").to_numpy().astype(np.uint8) | np.where(retain, RETAIN, 0).astype(np.uint8)
    columns = {name: table.column(name).combine_chunks() for name in ("time", "payload", "properties")}
    for name in ("topic", "publisher"):
        columns[name] = table.column(name).combine_chunks().dictionary_encode()
    columns["flags"] = pa.array(flags)
    return pa.RecordBatch.from_arrays([columns[name] for name in blocks.SCHEMA.names], schema=blocks.SCHEMA)


class _Cache:
    """The files loaded last, within a bound of bytes; one is always kept, however large."""

    def __init__(self, bytes_max: int = CACHE_BYTES):
        self._bytes_max, self._bytes = bytes_max, 0
        self._files: OrderedDict[str, LoadedFile] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, path: str) -> LoadedFile:
        with self._lock:
            if path in self._files:
                self._files.move_to_end(path)
                return self._files[path]
        loaded = LoadedFile(_read_file(path))
        with self._lock:
            if path not in self._files:
                self._files[path] = loaded
                self._bytes += loaded.bytes
            while self._bytes > self._bytes_max and len(self._files) > 1:
                self._bytes -= self._files.popitem(last=False)[1].bytes
        return loaded

    def clear(self) -> None:
        with self._lock:
            self._files.clear()
            self._bytes = 0


cache = _Cache()


def filesystem(path: str) -> tuple[fs.FileSystem, str]:
    """A folder or file by its path or URI (file:, s3:, gs:, hdfs:)."""
    try:
        found: tuple[fs.FileSystem, str] = (
            fs.FileSystem.from_uri(path) if "://" in path or path.startswith("file:") else (fs.LocalFileSystem(), path)
        )
    except (pa.ArrowException, ValueError) as error:
        raise RequestError(f"{path!r} is not a place for a lake: {error}") from error
    return found


def _read_file(path: str) -> pa.Table:
    where, inside = filesystem(path)
    try:
        # ParquetFile, so that the folders' names are not taken for columns.
        with where.open_input_file(inside) as source:
            return pq.ParquetFile(source, page_checksum_verification=True).read(columns=FILE_SCHEMA.names)
    except (OSError, pa.ArrowException) as error:
        raise StoreError(f"cannot read {path} of the lake: {error}") from error


class History:
    """The lake of a store's logs. Cheap to make; loaded files are shared by all of a process."""

    def __init__(self, log: Log, root: str | None = None):
        self._manifest = log.manifest
        self._root = root

    def heads(self, log: str) -> list[Head]:
        """The streams in the lake, oldest generation first, whether or not the store has them too."""
        return [] if self._manifest is None else self._manifest.heads(log)

    def head(self, stream: Stream) -> Head:
        for head in self.heads(stream.log):
            if head.stream == stream:
                return head
        raise UnknownStream(f"there is no stream {stream}, neither in the store nor in the lake")

    def read(
        self,
        stream: Stream,
        offset: int,
        *,
        topics: Wanted | str | None = None,
        rows_max: int = ROWS_MAX,
        bytes_max: int = BYTES_MAX,
    ) -> Reading:
        """As `Log.read`: matching rows from `offset` on, as a block would have them."""
        wanted = TopicFilter(topics) if isinstance(topics, str) else topics
        head = self.head(stream)
        if not 0 <= offset <= head.next_offset:
            raise RequestError(f"offset {offset} of {stream} is not within 0..{head.next_offset}")
        past = min(offset + rows_max, head.next_offset)
        batch, files = self._window(stream, offset, past)
        batch = _fit(batch, bytes_max)
        past = offset + batch.num_rows
        rows = None if wanted is None else blocks.matching_rows(batch, wanted)
        taken = batch if rows is None else batch.take(rows)
        chunks = [Chunk(stream, offset, rows, 0, taken)] if taken.num_rows else []
        return Reading(chunks, past, past >= head.next_offset, blocks_read=files)

    def _window(self, stream: Stream, first: int, past: int) -> tuple[pa.RecordBatch, int]:
        """Exactly these offsets, in order."""
        if self._manifest is None or first >= past:
            return blocks.empty(), 0
        parts = self._manifest.parts(stream, first, past)
        pieces, offsets = [], []
        for path, _, _ in parts:
            loaded = cache.get(self._path(stream.log, path))
            a, b = loaded.rows(stream.shard, first, past)
            if b > a:
                pieces.append(loaded.batch.slice(a, b - a))
                offsets.append(loaded.offsets[a:b])
        found = np.concatenate(offsets) if offsets else np.empty(0, np.int64)
        if len(found) != past - first:
            raise StoreError(f"the lake holds {len(found)} of the {past - first} messages of {stream} from {first} on")
        if len(pieces) == 1:
            return pieces[0], len(parts)
        # Files of several days may take turns in a stream; together they leave no gap.
        return blocks.merge(pieces).take(pa.array(np.argsort(found, kind="stable"))), len(parts)

    def _path(self, log: str, path: str) -> str:
        assert self._manifest is not None
        root = self._root or self._manifest.root(log)
        return f"{str(root).rstrip('/')}/{path}"

    def offset_at(self, head: Head, time: Micros) -> int:
        """The first offset whose message has this time or a later one; the end if there is none."""
        best = head.next_offset
        if self._manifest is None:
            return best
        for path, part, newest in self._manifest.parts(head.stream, 0, head.next_offset):
            if part.first >= best:
                break
            if newest < time:
                continue
            loaded = cache.get(self._path(head.stream.log, path))
            a, b = loaded.rows(part.shard, part.first, part.past)
            times = loaded.batch.column(blocks.TIME).slice(a, b - a).cast(pa.int64()).to_numpy()
            hits = np.flatnonzero(times >= time)
            if len(hits):
                best = min(best, int(loaded.offsets[a + hits[0]]))
        return best


def _fit(batch: pa.RecordBatch, bytes_max: int) -> pa.RecordBatch:
    """Cut to so many bytes of payload, but not to nothing."""
    if batch.nbytes <= bytes_max or batch.num_rows <= 1:
        return batch
    weight = np.cumsum(pc.binary_length(batch.column(blocks.PAYLOAD)).to_numpy().astype(np.int64))
    return batch.slice(0, max(1, int(np.searchsorted(weight, bytes_max, "right"))))


def digest(batch: pa.RecordBatch, before: int = 0) -> int:
    """A checksum over what the messages say, however their columns are laid out; of two batches, chained."""
    crc = zlib.crc32(batch.column(blocks.TIME).cast(pa.int64()).to_numpy().tobytes(), before)
    crc = zlib.crc32(batch.column(blocks.FLAGS).to_numpy().tobytes(), crc)
    for at in (blocks.TOPIC, blocks.PUBLISHER, blocks.PAYLOAD, blocks.PROPERTIES):
        column: Any = batch.column(at)
        if pa.types.is_dictionary(column.type):
            column = column.dictionary.take(column.indices)
        lengths = pc.fill_null(pc.binary_length(column), -1).to_numpy().astype(np.int32)
        # One array, however many the column came from, begins where its first value does.
        whole = pc.fill_null(column.cast(pa.binary()), b"")
        bounds = np.frombuffer(whole.buffers()[1], np.int32, len(whole) + 1, whole.offset * 4)
        crc = zlib.crc32(lengths.tobytes(), crc)
        data = whole.buffers()[2]
        if data is not None:
            crc = zlib.crc32(memoryview(data)[bounds[0] : bounds[-1]], crc)
    return crc
