"""Aggregated streams: a new log from another, by a filter and a key, every message once and in order per key.

The target's ledger keeps, in the transaction that lands a batch, how far the source had been read: so a batch
has either landed and moved the place, or neither, and whoever comes next goes on from there.
"""

from __future__ import annotations

import importlib
import json
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import UTC
from typing import Any

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as f
from pyspark.sql import types as t

from holdfast.errors import RequestError
from holdfast.log import Log
from holdfast.log.history import History
from holdfast.model import Message, check_log_name, parse_start
from holdfast.spark.jobs.job import Progress, Tell, Wake, quiet, spark_of
from holdfast.spark.offsets import Place, advanced, after_missing, beginning, key_of, tidied
from holdfast.spark.options import store_url, topic_filters
from holdfast.spark.rows import ORDER
from holdfast.spark.source import every_head, place
from holdfast.spark.worker import log_at, store_at

KEYS = "publisher, topic:LEVEL (from 0), json:FIELD (a.b.c), or python:MODULE:FUNCTION"


@dataclass(frozen=True, kw_only=True, slots=True)
class AggregateOptions:
    """What an aggregated stream is made of."""

    store: str
    target: str
    """The log that is made."""
    key: str
    """Messages of one key stay in one partition, in order: publisher, topic:1, json:vehicle.type, python:module:f."""
    partitions: int = 16
    """Fixed; another number takes a rebuild."""
    log: str = "messages"
    """The log it is made from."""
    topics: str | None = None
    """Only messages that match this filter (or JSON list of filters)."""
    where: str | None = None
    """Only messages of which this SQL condition is true."""
    start: str = "beginning"
    """Where to begin, when there is nothing yet: beginning, latest, a time, offset:N."""
    master: str | None = None
    messages_max: int = 500_000
    """The most that goes into one batch."""
    every_seconds: float = 1.0
    """How long to gather messages for a batch."""
    trimmed: str = "error"
    """What to do when messages to be read are gone: error, or earliest."""
    once: bool = False
    """Take what is there now, and end."""

    @property
    def writer(self) -> str:
        return f"aggregate:{self.log}"


def aggregate(
    options: AggregateOptions,
    *,
    spark: SparkSession | None = None,
    tell: Tell = quiet,
    stop: threading.Event | None = None,
) -> Progress:
    """Build and keep up the aggregated stream until stopped, or (with `once`) until it has everything."""
    store, log = _checked(options)
    spark = spark_of(spark, options.master)
    progress = Progress(f"aggregate {options.target}", "working")
    wake = Wake(log, {options.log}, stop)
    try:
        while True:
            begun = time.monotonic()
            taken, left = step(spark, store, options)
            progress = replace(
                progress,
                messages=progress.messages + taken,
                batches=progress.batches + (taken > 0),
                lag=left,
                seconds=time.monotonic() - begun,
            )
            if taken:
                tell(progress)
            if wake.stopped or (options.once and not left):
                return replace(progress, state="stopped")
            if not left:
                wake.wait(options.every_seconds, options.every_seconds * 60)
    finally:
        wake.close()


def rebuild(
    options: AggregateOptions,
    *,
    spark: SparkSession | None = None,
    tell: Tell = quiet,
    stop: threading.Event | None = None,
    drop_old: bool = True,
) -> Progress:
    """Make it anew, from `start`, in a generation of its own; the old ones go when the new one is complete."""
    store = store_url({"store": options.store})
    log = log_at(store)
    old = []
    if options.target in log.logs():
        old = [generation.number for generation in log.generations(options.target)]
        staging = store_at(store).staging()
        before = staging.landed(options.target, options.writer)
        log.seal(options.target, options.partitions)
        number = before[0] + 1 if before else 0
        staging.put_position(options.target, options.writer, number, None, log.clock())
    done = aggregate(replace(options, once=True), spark=spark, tell=tell, stop=stop)
    kept = {generation.number for generation in log.generations(options.target)}
    if drop_old and not (stop is not None and stop.is_set()):
        for generation in old:
            if generation in kept:
                log.drop(options.target, generation)
    return done


def _checked(options: AggregateOptions) -> tuple[str, Log]:
    store = store_url({"store": options.store})
    check_log_name(options.target)
    topic_filters(options.topics)
    parse_start(options.start)
    key_column(options.key)
    if options.target == options.log:
        raise RequestError(f"log {options.log!r} cannot be aggregated into itself; name another target")
    log = log_at(store)
    log.generations(options.log)
    log.create(options.target, options.partitions)
    shards = log.generations(options.target)[-1].shards
    if shards != options.partitions:
        raise RequestError(
            f"log {options.target!r} has {shards} partitions, not {options.partitions}; rebuild to change that"
        )
    return store, log


def step(spark: SparkSession, store: str, options: AggregateOptions) -> tuple[int, int]:
    """One batch: how many messages of the source it took, and how many are left."""
    log = log_at(store)
    landed = store_at(store).staging().landed(options.target, options.writer)
    heads = every_head(log, options.log, None)
    if landed is None or landed[1] is None:
        history = History(log)
        start = parse_start(options.start)
        here = beginning(heads, {key_of(head): place(log, history, head, start) for head in heads})
    else:
        here = Place.from_json(json.loads(landed[1]))
    here = tidied(after_missing(here, heads, options.log, options.trimmed), heads)
    there = advanced(here, heads, options.messages_max)
    slices = [[g, s, here.of((g, s)), past] for (g, s), past in sorted(there.at.items()) if past > here.of((g, s))]
    taken = sum(past - first for _, _, first, past in slices)
    waiting = sum(max(0, h.next_offset - here.of(key_of(h))) for h in heads if h.stream.generation > here.done)
    if not taken and landed is not None and landed[1] is not None:
        return 0, 0
    rows = with_key(_read(spark, store, options, slices), options.key)
    number = 0 if landed is None else landed[0] + 1
    (
        _by_partition(rows, options.partitions, spark.sparkContext.defaultParallelism)
        .write.format("holdfast")
        .mode("append")
        .options(store=store, log=options.target, writeId=options.writer, writeBatch=str(number))
        .option("position", json.dumps(there.to_json()))
        .save()
    )
    return taken, waiting - taken


def _read(spark: SparkSession, store: str, options: AggregateOptions, slices: list[list[int]]) -> DataFrame:
    reader = spark.read.format("holdfast").options(store=store, log=options.log, slices=json.dumps(slices))
    if options.topics is not None:
        reader = reader.option("topics", options.topics)
    rows = reader.load()
    return rows if options.where is None else rows.where(options.where)


def _by_partition(rows: DataFrame, partitions: int, parallelism: int) -> DataFrame:
    """Every target partition in one task, so that one task decides its order."""
    places = [f.col(name).alias(f"_{name}") for name in ("generation", "shard", "offset")]
    assert [f"_{name}" for name in ("generation", "shard", "offset")] == list(ORDER)
    columns = ["time", "topic", "payload", "publisher", "qos", "retain", "properties", "key"]
    shard = f.crc32(f.coalesce("key", f.lit("")).cast("binary")) % partitions
    return rows.select(*places, *columns).repartition(min(partitions, parallelism), shard)


# -- keys -----------------------------------------------------------------------------------------------


def key_column(key: str) -> tuple[str, str]:
    """What kind of key it is, and its argument; RequestError if it is none."""
    kind, _, argument = key.partition(":")
    match kind:
        case "publisher" if not argument:
            return kind, ""
        case "topic" if argument.isdecimal():
            return kind, argument
        case "json" if argument:
            return kind, argument
        case "python":
            function_at(argument)
            return kind, argument
    raise RequestError(f"{key!r} is not a key; it takes {KEYS}")


def with_key(rows: DataFrame, key: str) -> DataFrame:
    """The rows with a column `key`; a message that has none gets the empty one, and so a partition with its like."""
    kind, argument = key_column(key)
    if kind == "publisher":
        return rows.withColumn("key", f.col("publisher"))
    if kind == "topic":
        return rows.withColumn("key", f.coalesce(f.get(f.split("topic", "/"), int(argument)), f.lit("")))
    if kind == "json":
        found = f.get_json_object(f.try_validate_utf8(f.col("payload").cast("string")), f"$.{argument}")
        return rows.withColumn("key", f.coalesce(found, f.lit("")))
    # A plain function, row by row: the kinds that take Arrow want pandas to be installed.
    columns = ["topic", "payload", "publisher", "qos", "retain", "properties", "time"]
    return rows.withColumn("key", f.udf(lambda *row: _key(argument, row), t.StringType(), useArrow=False)(*columns))


def function_at(path: str) -> Callable[[Message], str]:
    """The function at MODULE:NAME."""
    module, _, name = path.partition(":")
    try:
        found = getattr(importlib.import_module(module), name) if module and name else None
    except (ImportError, AttributeError) as error:
        raise RequestError(f"key function {path!r} cannot be imported: {error}") from error
    if not callable(found):
        raise RequestError(f"key function {path!r} is not a function; write MODULE:FUNCTION")
    return found  # type: ignore[no-any-return]


def _key(path: str, row: tuple[Any, ...]) -> str:
    topic, payload, publisher, qos, retain, properties, at = row
    micros = round(at.replace(tzinfo=at.tzinfo or UTC).timestamp() * 1_000_000)
    return str(function_at(path)(Message(topic, bytes(payload), publisher, qos, retain, properties, micros)) or "")
