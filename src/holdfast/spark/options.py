"""What a reader or writer may be told, checked once, with errors of one line."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

from holdfast.errors import HoldfastError, RequestError
from holdfast.model import At, Beginning, Next, Start, Stream, check_log_name, parse_start
from holdfast.store import parse_url
from holdfast.topics import check_filter

READING = {
    "store": "the store's URL",
    "log": "the log to read; messages unless told",
    "topics": "a topic filter, or a JSON list of some",
    "start": "beginning (default of a batch), latest (of a stream), a time, offset:N or JSON {stream: offset}",
    "end": "latest (default), a time, offset:N or JSON {stream: offset}; batches only",
    "partitions": "into how many partitions to cut; one per core unless told",
    "maxmessagespertrigger": "how many messages a micro-batch takes at most",
    "subscription": "keep a cursor of this name; streams only",
    "metadata": "where cursors are kept; the store unless told",
    "trimmed": "error (default) or earliest: what to do when messages to be read are gone",
    "ranges": "exactly these, as JSON [[generation, shard, first, past], …]; in place of start and end",
    "pushdown": "true: read only what the query's filters let through; for a DataFrame that serves one query only",
    "lake": "where the lake is now, if not where it was written",
    "group": "share the messages of this group, NAME:FILTER, with its other members; streams only",
    "node": "with group: a node's MQTT address, host:port, or mqtts://host:port; 127.0.0.1:1883 unless told",
    "username": "with group: as whom to connect to the node",
    "password": "with group: and how to prove it",
}
WRITING = {
    "store": "the store's URL",
    "log": "the log to write to; messages unless told",
    "shards": "create the log with so many shards if it is not there",
    "shardby": "publisher (default) or topic, for a log that is created",
    "writeid": "name a batch write: the same name lands once, however often it is run",
    "writebatch": "with writeId: the sequence number of this batch; it must grow",
    "position": "with writeId: text to be kept with the batch, for whoever goes on from it",
}


@contextmanager
def one_line() -> Iterator[None]:
    """Have our own errors reach the user as one line.

    Spark prints a worker's traceback unless this variable says otherwise; the worker ends with the error, so
    nobody else's traceback is hidden.
    """
    try:
        yield
    except HoldfastError:
        os.environ["SPARK_HIDE_TRACEBACK"] = "1"
        raise


def known(options: Mapping[str, str], takes: Mapping[str, str]) -> dict[str, str]:
    """The options under their lower-case names; RequestError names one that is not known."""
    given = {name.lower(): value for name, value in options.items()}
    if "path" in given:  # .load("sqlite:///…") and .save(…)
        given.setdefault("store", given.pop("path"))
    for name in given:
        if name not in takes:
            raise RequestError(f"option {name!r} is not known; there are: {', '.join(sorted(takes))}")
    return given


def store_url(given: Mapping[str, str], *, make: bool = False) -> str:
    """The store's URL, absolute: Spark's workers stand in other folders."""
    url = given.get("store", "")
    if not url:
        raise RequestError("option 'store' is missing; it takes sqlite:///path/to/file.db or postgresql://…")
    found = parse_url(url)
    if found.one_process:
        raise RequestError(f"store {url!r} lives in one process, and Spark's workers are others; use sqlite:///…")
    if not make and (place := found.missing()) is not None:
        raise RequestError(f"there is no store at {place}")
    return found.absolute()


def whole(given: Mapping[str, str], name: str, least: int = 1) -> int | None:
    text = given.get(name)
    if text is None:
        return None
    if not text.strip().isdecimal() or int(text) < least:
        raise RequestError(f"option {name!r} is {text!r}; it takes a whole number from {least}")
    return int(text)


def one_of(given: Mapping[str, str], name: str, *choices: str) -> str:
    """The first choice unless told."""
    value = given.get(name, choices[0])
    if value not in choices:
        raise RequestError(f"option {name!r} is {value!r}; it takes {' or '.join(choices)}")
    return value


def topic_filters(text: str | None) -> tuple[str, ...]:
    """None, one filter, or a JSON list of filters; `#` means everything, as no filter does."""
    if text is None:
        return ()
    if text.lstrip().startswith("["):
        try:
            found = json.loads(text)
        except ValueError as error:
            raise RequestError(f"option 'topics' is {text!r}: not a JSON list ({error})") from error
        if not all(isinstance(each, str) for each in found):
            raise RequestError(f"option 'topics' is {text!r}; it takes a filter or a JSON list of filters")
        return tuple(check_filter(each) for each in found)
    return (check_filter(text),)


def position(text: str, log: str) -> Start:
    """As `parse_start`, and JSON {"messages.1.0": 17, …} for offsets of single streams."""
    if not text.lstrip().startswith("{"):
        return parse_start(text)
    try:
        offsets = {Stream.parse(name): offset for name, offset in json.loads(text).items()}
    except ValueError as error:
        raise RequestError(f"{text!r} is not JSON: {error}") from error
    for stream, offset in offsets.items():
        if stream.log != log:
            raise RequestError(f"{stream} is not a stream of log {log!r}")
        if not isinstance(offset, int) or offset < 0:
            raise RequestError(f"offset {offset!r} of {stream} is not a whole number from 0")
    return At(offsets)


def _ranges(text: str | None) -> tuple[tuple[int, int, int, int], ...] | None:
    if text is None:
        return None
    try:
        found = [(int(g), int(s), int(first), int(past)) for g, s, first, past in json.loads(text)]
    except (ValueError, TypeError) as error:
        raise RequestError(
            f"option 'ranges' is {text[:80]!r}; it takes [[generation, shard, first, past], …]"
        ) from error
    return tuple(found)


@dataclass(frozen=True, slots=True)
class GroupOptions:
    """How a streaming query takes part in a group."""

    name: str
    filter: str
    node: str
    username: str | None
    password: str | None
    start: str | None
    """Where the group begins, if it does not exist yet."""

    @classmethod
    def of(cls, given: Mapping[str, str]) -> GroupOptions | None:
        if "group" not in given:
            for name in ("node", "username", "password"):
                if name in given:
                    raise RequestError(f"option {name!r} goes with group, which is missing")
            return None
        # Only here: workers of queries without a group need nothing of it.
        from holdfast.batch.client import parse_group
        from holdfast.batch.line import parse_node

        for name, why in _NOT_IN_A_GROUP.items():
            if name in given:
                raise RequestError(f"option {name!r} does not go with group: {why}")
        group, node = parse_group(given["group"]), given.get("node", "127.0.0.1:1883")
        parse_node(node)
        if "start" in given:
            parse_start(given["start"])
        user = (given.get("username"), given.get("password"))
        return cls(str(group), group.filter, node, *user, given.get("start"))


_NOT_IN_A_GROUP = {
    "topics": "a group has its filter, and what this query passed over would be lost to the others",
    "subscription": "a group keeps its own cursors",
    "metadata": "a group's cursors are kept by its node",
    "log": "groups share the log 'messages'",
}


@dataclass(frozen=True, slots=True)
class ReadOptions:
    """What a reader was told."""

    store: str
    log: str
    filters: tuple[str, ...]
    start: Start
    end: Start
    partitions: int | None
    messages_max: int | None
    subscription: str | None
    metadata: str | None
    trimmed: str
    lake: str | None
    pushdown: bool
    ranges: tuple[tuple[int, int, int, int], ...] | None
    group: GroupOptions | None = None

    @classmethod
    def of(cls, options: Mapping[str, str], *, streaming: bool) -> ReadOptions:
        given = known(options, READING)
        log = check_log_name(given.get("log", "messages"))
        only_here = (
            ("end", "pushdown", "ranges")
            if streaming
            else ("subscription", "metadata", "maxmessagespertrigger", "trimmed", "group")
        )
        for name in only_here:
            if name in given:
                raise RequestError(f"option {name!r} is for {'batches' if streaming else 'streams'} only")
        group = GroupOptions.of(given)
        start = position(given["start"], log) if "start" in given else Next() if streaming else Beginning()
        end = position(given["end"], log) if "end" in given else Next()
        return cls(
            store=store_url(given),
            log=log,
            filters=topic_filters(given.get("topics")),
            start=start,
            end=end,
            partitions=whole(given, "partitions"),
            messages_max=whole(given, "maxmessagespertrigger"),
            subscription=given.get("subscription"),
            metadata=given.get("metadata"),
            trimmed=one_of(given, "trimmed", "error", "earliest"),
            lake=given.get("lake"),
            ranges=_ranges(given.get("ranges")),
            pushdown=one_of(given, "pushdown", "false", "true") == "true",
            group=group,
        )


@dataclass(frozen=True, slots=True)
class WriteOptions:
    """What a writer was told."""

    store: str
    log: str
    shards: int | None
    shard_by: str
    write_id: str | None
    write_batch: int
    position: str | None

    @classmethod
    def of(cls, options: Mapping[str, str], *, streaming: bool) -> WriteOptions:
        given = known(options, WRITING | ({"checkpointlocation": "where Spark keeps its place"} if streaming else {}))
        if "writeid" not in given:
            for name in ("writebatch", "position"):
                if name in given:
                    raise RequestError(f"option {name!r} goes with writeId, which is missing")
        elif streaming:
            raise RequestError("option 'writeid' is for batches; a stream is known by its checkpoint")
        shards = whole(given, "shards")
        return cls(
            store=store_url(given, make=shards is not None),
            log=check_log_name(given.get("log", "messages")),
            shards=shards,
            shard_by=one_of(given, "shardby", "publisher", "topic"),
            write_id=given.get("writeid"),
            write_batch=whole(given, "writebatch", least=0) or 0,
            position=given.get("position"),
        )
