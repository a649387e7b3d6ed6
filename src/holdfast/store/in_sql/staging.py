"""Where staged blocks go when they are published: decided here, written by each database in its own way."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from holdfast.errors import RequestError
from holdfast.log.contract import NewBlock
from holdfast.log.staging import StagedBlock, Task
from holdfast.model import Micros

COLUMNS = "place, shards, shard, messages, bytes, oldest, newest, checksum, body"


class Placed(NamedTuple):
    block: StagedBlock
    stream: int
    base: int
    newest: Micros


class StreamEnd(NamedTuple):
    id: int
    next_offset: int
    newest: Micros


def in_order(tasks: Sequence[Task], found: Mapping[str, Sequence[StagedBlock]]) -> list[StagedBlock]:
    """The blocks in the order of partition and place; RequestError if some of them are gone."""
    blocks: list[StagedBlock] = []
    for task in sorted(tasks, key=lambda t: t.partition):
        here = found.get(task.name, ())
        there = sum(b.messages for b in here)
        if len(here) != task.blocks or there != task.messages:
            raise RequestError(
                f"partition {task.partition} staged {task.messages} messages, of which {there} are there: "
                "they were swept as too old, or the store was restored; run the job again"
            )
        blocks += here
    return blocks


def offsets_for(
    blocks: Sequence[StagedBlock], streams: Mapping[int, StreamEnd]
) -> tuple[list[Placed], dict[int, StreamEnd]]:
    """Offsets for the blocks, and the streams as they are afterwards."""
    ends = dict(streams)
    placed = []
    for block in blocks:
        stream = ends[block.shard]
        newest = max(stream.newest, block.newest)
        placed.append(Placed(block, stream.id, stream.next_offset, newest))
        ends[block.shard] = StreamEnd(stream.id, stream.next_offset + block.messages, newest)
    return placed, ends


def open_generation(row: Sequence[Any] | None, log: str) -> tuple[int, int]:
    if row is None:
        raise RequestError(f"there is no log {log!r}; create it first, or say how many shards it is to have")
    return int(row[0]), int(row[1])


def described(block: NewBlock) -> tuple[int, ...]:
    return block.shard, block.messages, len(block.data), block.oldest, block.newest, block.checksum


def directory_line(placed: Placed) -> tuple[int, ...]:
    block = placed.block
    return block.messages, block.bytes, placed.newest, block.checksum, block.body
