"""log → lake: what is in the log goes to Parquet files, once, and is verified there before the store may forget it.

    read, sort, write files   →   manifest: files and progress   →   sealed? compare with the store   →   may be dropped
         (tasks)                        (one transaction)                       (tasks)

Nothing is remembered outside the store: whoever starts the job, wherever, goes on from the manifest. Files that
did not make it into the manifest are nobody's, and are swept when they are old enough not to be anybody's work.
"""

from __future__ import annotations

import os
import threading
import time
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from pyarrow import fs
from pyspark.sql import SparkSession

from holdfast.errors import PreconditionFailed, RequestError, StoreError
from holdfast.log import blocks
from holdfast.log.history import FILE_SCHEMA, History, digest, filesystem
from holdfast.log.manifest import LakeFile, Manifest, Part, Reached
from holdfast.model import Stream
from holdfast.spark.jobs.job import Progress, Tell, Wake, quiet, spark_of
from holdfast.spark.offsets import Place, advanced
from holdfast.spark.options import store_url
from holdfast.spark.schema import RowPiece
from holdfast.spark.slices import Slice, cut, pieces
from holdfast.spark.wanted import Wanted
from holdfast.spark.worker import log_at, settle, store_at

ROWS_PER_FILE = 500_000
STRAY_SECONDS = 6 * 3600.0
"""A file in nobody's manifest and older than this is swept."""

_DAY = 86_400 * 1_000_000
_WINDOW = 65_536


@dataclass(frozen=True, kw_only=True, slots=True)
class LakeOptions:
    """What the lake job is told."""

    store: str
    root: str
    """A folder, or a URI that pyarrow knows (file:, s3:, gs:, hdfs:)."""
    logs: tuple[str, ...] = ("messages",)
    master: str | None = None
    every_seconds: float = 30.0
    """How long to gather messages before they become files."""
    messages_max: int = 4_000_000
    """The most that goes into one commit."""
    drop: bool = False
    """Drop generations from the store as soon as they are verified; otherwise that is retention's to decide."""
    once: bool = False
    """Take what is there now, and end."""
    compression: str = "zstd"


def lake(
    options: LakeOptions,
    *,
    spark: SparkSession | None = None,
    tell: Tell = quiet,
    stop: threading.Event | None = None,
) -> Progress:
    """Run the job until it is stopped, or (with `once`) until the lake holds everything that is in the log."""
    store = store_url({"store": options.store})
    root = _absolute(options.root)
    log, manifest = log_at(store), store_at(store).manifest()
    for name in options.logs:
        log.generations(name)  # a log that is not there is best told now
        before = manifest.root(name)
        if before not in (None, root) and manifest.totals(name)[0]:
            raise RequestError(
                f"the lake of log {name!r} is at {before}; move its files to {root} with relocate() first"
            )
        manifest.set_root(name, root)
    spark = spark_of(spark, options.master)
    progress = Progress("lake", "working")
    wake = Wake(log, set(options.logs), stop)
    try:
        swept = float("-inf")
        while True:
            busy = False
            if time.monotonic() - swept > STRAY_SECONDS:
                swept = time.monotonic()
                for name in options.logs:
                    sweep(manifest, name)
            for name in options.logs:
                begun = time.monotonic()
                taken, left = export(spark, store, name, options)
                checked = verify(spark, store, name, drop=options.drop)
                busy = busy or left > 0
                if taken or checked:
                    progress = replace(
                        progress,
                        messages=progress.messages + taken,
                        batches=progress.batches + (taken > 0),
                        seconds=time.monotonic() - begun,
                        lag=left,
                        details=dict(zip(("files", "messages", "bytes"), manifest.totals(name), strict=True)),
                    )
                    tell(progress)
            if wake.stopped or (options.once and not busy):
                return replace(progress, state="stopped")
            if not busy:
                wake.wait(options.every_seconds, options.every_seconds * 10)
    finally:
        wake.close()


def relocate(store: str, name: str, root: str) -> None:
    """The lake's files have been moved: from now on they are found there."""
    store_at(store_url({"store": store})).manifest().set_root(name, _absolute(root))


def _absolute(root: str) -> str:
    where, path = filesystem(root)
    if isinstance(where, fs.LocalFileSystem):
        path = os.path.abspath(path)
        try:
            os.makedirs(path, exist_ok=True)
        except OSError as error:
            raise RequestError(f"cannot make the lake's folder {path}: {error.strerror}") from error
        return path
    return root.rstrip("/")


# -- export ---------------------------------------------------------------------------------------------


def export(spark: SparkSession, store: str, name: str, options: LakeOptions) -> tuple[int, int]:
    """One commit's worth; how many messages were taken, and how many are left."""
    log, manifest = log_at(store), store_at(store).manifest()
    heads = log.heads(name)
    at = {(s.generation, s.shard): past for s, past in manifest.reached(name).items()}
    here = Place(min(h.stream.generation for h in heads) - 1, at)
    there = advanced(here, heads, options.messages_max)
    reached = [
        Reached(Stream(name, shard, generation), here.of((generation, shard)), past)
        for (generation, shard), past in sorted(there.at.items())
        if past > here.of((generation, shard))
    ]
    total = sum(each.past - each.first for each in reached)
    waiting = sum(max(0, h.next_offset - here.of((h.stream.generation, h.stream.shard))) for h in heads)
    if not total:
        return 0, 0
    parallelism = spark.sparkContext.defaultParallelism
    parts = cut(log, [Slice(*each) for each in reached], max(parallelism, -(-total // ROWS_PER_FILE)))
    root = manifest.root(name)
    work = [(store, str(root), options.compression, part.slices) for part in parts]
    files = [file for made in spark.sparkContext.parallelize(work, len(work)).map(_write).collect() for file in made]
    if sum(file.messages for file in files) != total:
        raise StoreError(f"{total} messages of log {name!r} were to be written, {sum(f.messages for f in files)} were")
    try:
        manifest.commit(name, files, reached)
    except PreconditionFailed:
        return 0, waiting  # another run has been here: look again
    return total, waiting - total


def _write(work: tuple[str, str, str, Sequence[Slice]]) -> list[LakeFile]:
    """A task: these slices as files, one per generation and day."""
    store, root, compression, slices = work
    settle()
    log = log_at(store)
    made: list[LakeFile] = []
    for generation in sorted({each.stream.generation for each in slices}):
        here = [each for each in slices if each.stream.generation == generation]
        table = _sorted([(each.stream.shard, piece) for each in here for piece in pieces(log, each, Wanted(), None)])
        days = table.column("time").cast(pa.int64()).to_numpy() // _DAY
        for day in np.unique(days):
            rows = table if (days == day).all() else table.filter(pa.array(days == day))
            made.append(_write_file(root, here[0].stream.log, generation, int(day), rows, compression))
    return made


def _sorted(parts: Sequence[tuple[int, RowPiece]]) -> pa.Table:
    """The rows by topic and time; equals stay in the order of shard and offset, in which they come."""
    whole = blocks.merge([piece.batch for _, piece in parts])
    shards = np.concatenate([np.full(len(piece.offsets), shard, np.int32) for shard, piece in parts])
    offsets = np.concatenate([piece.offsets for _, piece in parts])
    topics = whole.column(blocks.TOPIC)
    rank = np.empty(len(topics.dictionary), np.int64)
    rank[pc.array_sort_indices(topics.dictionary).to_numpy()] = np.arange(len(rank))
    times = whole.column(blocks.TIME).cast(pa.int64()).to_numpy()
    order = np.lexsort((times, rank[topics.indices.to_numpy()]))
    rows = whole.take(pa.array(order))
    flags = rows.column(blocks.FLAGS).to_numpy()
    return pa.Table.from_arrays(
        [
            pa.array(shards[order]),
            pa.array(offsets[order]),
            rows.column(blocks.TIME),
            rows.column(blocks.TOPIC),
            rows.column(blocks.PAYLOAD),
            rows.column(blocks.PUBLISHER),
            pa.array((flags & 0b11).astype(np.int32)),
            pa.array((flags & 0b100) != 0),
            rows.column(blocks.PROPERTIES),
        ],
        names=FILE_SCHEMA.names,
    )


def _write_file(root: str, log: str, generation: int, day: int, rows: pa.Table, compression: str) -> LakeFile:
    date = (datetime(1970, 1, 1, tzinfo=UTC) + timedelta(days=day)).date().isoformat()
    path = f"log={log}/date={date}/generation={generation}/{uuid.uuid4().hex}.parquet"
    where, inside = filesystem(f"{root}/{path}")
    where.create_dir(os.path.dirname(inside), recursive=True)
    with where.open_output_stream(inside) as sink:
        pq.write_table(
            rows,
            sink,
            compression=compression,
            compression_level=1 if compression == "zstd" else None,
            row_group_size=131_072,
            use_dictionary=["topic", "publisher", "shard", "qos"],
            column_encoding={"offset": "DELTA_BINARY_PACKED"},
            write_page_checksum=True,
            sorting_columns=[pq.SortingColumn(3), pq.SortingColumn(2)],
            store_schema=False,
        )
    size = where.get_file_info(inside).size
    if isinstance(where, fs.LocalFileSystem):
        _sync(inside)
    times = pc.min_max(rows.column("time").cast(pa.int64())).as_py()
    return LakeFile(generation, date, path, rows.num_rows, int(size), times["min"], times["max"], tuple(_parts(rows)))


def _parts(rows: pa.Table) -> Iterator[Part]:
    shards, offsets = rows.column("shard").to_numpy(), rows.column("offset").to_numpy()
    for shard in np.unique(shards):
        here = offsets[shards == shard]
        yield Part(int(shard), int(here.min()), int(here.max()) + 1, len(here))


def _sync(path: str) -> None:
    """On disk before the manifest says so."""
    for each in (path, os.path.dirname(path)):
        descriptor = os.open(each, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


# -- verify ---------------------------------------------------------------------------------------------


def verify(spark: SparkSession, store: str, name: str, *, drop: bool = False) -> int:
    """Compare generations that are sealed and complete in the lake with the store; how many were found the same."""
    log, manifest = log_at(store), store_at(store).manifest()
    done, reached = manifest.verified(name), manifest.reached(name)
    checked = 0
    for generation in log.generations(name):
        if generation.sealed_at is None or generation.number in done:
            continue
        heads = [head for head in log.heads(name) if head.stream.generation == generation.number]
        if any(reached.get(head.stream, 0) != head.next_offset for head in heads):
            continue
        work = [(store, head.stream, head.next_offset) for head in heads if head.next_offset]
        found = spark.sparkContext.parallelize(work, max(1, min(len(work), 64))).map(_compare).collect() if work else []
        checksums = dict(found)
        manifest.set_verified(name, generation, checksums, sum(h.next_offset for h in heads), log.clock())
        checked += 1
        if drop:
            log.drop(name, generation.number)
    return checked


def _compare(work: tuple[str, Stream, int]) -> tuple[int, int]:
    """A task: one stream, in the store and in the lake; its shard and checksum, or StoreError."""
    store, stream, past = work
    settle()
    log = log_at(store)
    history = History(log)
    ours = theirs = 0
    for first in range(0, past, _WINDOW):
        end = min(past, first + _WINDOW)
        mine = [piece.batch for piece in pieces(log, Slice(stream, first, end), Wanted(), None)]
        kept = history.read(stream, first, rows_max=end - first, bytes_max=1 << 60).chunks
        ours = digest(blocks.merge(mine), ours)
        theirs = digest(kept[0].batch, theirs)
        if sum(batch.num_rows for batch in mine) != kept[0].batch.num_rows or ours != theirs:
            raise StoreError(f"the lake's copy of {stream} differs from the store at offsets {first} to {end - 1}")
    return stream.shard, ours


def sweep(manifest: Manifest, name: str, older_than_seconds: float = STRAY_SECONDS) -> int:
    """Delete files below the lake's root that are not in the manifest and not fresh; how many."""
    root = manifest.root(name)
    if root is None:
        return 0
    where, inside = filesystem(f"{root}/log={name}")
    strays = 0
    kept = manifest.paths(name)
    limit = datetime.now(UTC) - timedelta(seconds=older_than_seconds)
    for info in where.get_file_info(fs.FileSelector(inside, recursive=True, allow_not_found=True)):
        path = f"log={name}/{os.path.relpath(info.path, inside)}"
        if info.type == fs.FileType.File and path not in kept and info.mtime < limit:
            where.delete_file(info.path)
            strays += 1
    return strays
