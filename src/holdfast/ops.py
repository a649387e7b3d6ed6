"""Operator verbs: what the command line, the HTTP API and the console can do, returning plain data."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from heapq import merge as merge_sorted
from typing import Any

from holdfast.groups.protocol.nouns import Key
from holdfast.groups.protocol.view import GroupView, Lag, StreamHead, lag
from holdfast.groups.record import GroupRecord
from holdfast.log import Log
from holdfast.log.contract import Chunk, Head
from holdfast.model import RETAIN, Micros, Start, Stream
from holdfast.topics import TopicFilter


@dataclass(frozen=True, slots=True)
class StreamRow:
    """One stream and its statistics."""

    stream: str
    messages: int
    bytes: int
    oldest: str | None
    newest: str | None
    state: str


@dataclass(frozen=True, slots=True)
class MessageRow:
    """One message and its place."""

    stream: str
    offset: int
    time: str
    topic: str
    payload: bytes
    publisher: str
    qos: int
    retain: bool
    properties: bytes | None


def group_row(record: GroupRecord) -> dict[str, Any]:
    """A declared group, in a line."""
    return {
        "group": str(record.group),
        "name": record.group.name,
        "filter": record.group.filter,
        "order": record.order,
        "key": record.key,
        "paused": record.paused,
        "ack_timeout_seconds": record.policy.ack_timeout_seconds,
        "attempts_max": record.policy.attempts_max,
        "idle_seconds_max": record.idle_seconds_max,
    }


def group_whole(view: GroupView, heads: Mapping[Stream, StreamHead], now: Micros) -> dict[str, Any]:
    """A group with its members, and for each piece its owner, status and lag."""
    rows = lag(view, heads, now)
    return {
        "group": str(view.group),
        "epoch": view.epoch,
        "order": view.order,
        "key": view.key,
        "paused": view.paused,
        "lag": _lag(rows, view.key),
        "lag_seconds": max((row.seconds for row in rows if row.seconds is not None), default=0.0),
        "members": [
            {"session": m.member.session, "node": m.node, "kind": m.kind, "status": m.status, "streams": m.pieces}
            for m in view.members
        ],
        "streams": [
            {
                "stream": str(row.piece),
                "owner": row.owner.session if row.owner is not None else None,
                "status": row.status,
                "lag": row.messages,
                "lag_seconds": row.seconds,
                "oldest_unacknowledged": iso(heads[row.piece.stream].oldest_unacked),
            }
            for row in rows
        ],
        "finished_streams": view.finished,
    }


def _lag(rows: Sequence[Lag], key: Key) -> int:
    """Slices by publisher or topic overlap in what they have not passed: of these the worst of each stream counts."""
    if key == "message":
        return sum(row.messages for row in rows)
    worst: dict[Stream, int] = {}
    for row in rows:
        worst[row.piece.stream] = max(worst.get(row.piece.stream, 0), row.messages)
    return sum(worst.values())


def streams(log: Log, name: str) -> list[StreamRow]:
    """Every kept stream of a log."""
    return [_stream_row(head) for head in log.heads(name)]


def _stream_row(head: Head) -> StreamRow:
    return StreamRow(
        stream=str(head.stream),
        messages=head.next_offset,
        bytes=head.bytes,
        oldest=iso(head.oldest),
        newest=iso(head.newest),
        state="finalised" if head.sealed else "open",
    )


def messages(log: Log, name: str, topics: str, start: Start, limit: int) -> list[MessageRow]:
    """The first `limit` matching messages, by time, from a start; of one stream always in its order."""
    wanted = TopicFilter(topics)
    found: list[MessageRow] = []
    sources = [_rows(log, stream, at, wanted, limit) for stream, at in log.positions(name, start, wanted).items()]
    for row in merge_sorted(*sources, key=lambda row: row.time):
        found.append(row)
        if len(found) == limit:
            break
    return found


def _rows(log: Log, stream: Stream, offset: int, wanted: TopicFilter, limit: int) -> Iterator[MessageRow]:
    end = log.head(stream).next_offset
    while offset < end:
        reading = log.read(stream, offset, topics=wanted, rows_max=limit)
        for chunk in reading.chunks:
            yield from rows_of(chunk)
        offset = reading.next_offset


def rows_of(chunk: Chunk) -> Iterator[MessageRow]:
    """A chunk's rows one by one, for people: never on the data path."""
    for offset, row in zip(chunk.offsets(), chunk.batch.to_pylist(), strict=True):
        yield MessageRow(
            stream=str(chunk.stream),
            offset=offset,
            time=row["time"].isoformat(timespec="microseconds"),
            topic=row["topic"],
            payload=row["payload"],
            publisher=row["publisher"],
            qos=row["flags"] & 3,
            retain=bool(row["flags"] & RETAIN),
            properties=row["properties"],
        )


def iso(time: Micros | None) -> str | None:
    return None if time is None else datetime.fromtimestamp(time / 1e6, UTC).isoformat(timespec="milliseconds")
