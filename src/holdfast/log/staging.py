"""Blocks that wait for their job: staged by tasks, published by the driver in one transaction, or forgotten.

A staged block's body lies among the others, but no stream refers to it, so nobody sees it. Publishing gives
each its offsets, under the same locks as an append, in the transaction that enters the batch in the ledger:
a batch that is in the ledger has landed, whole; one that is not has left no trace.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from holdfast.errors import StoreError
from holdfast.log.contract import Data, NewBlock
from holdfast.log.log import Log
from holdfast.model import Micros


@dataclass(frozen=True, slots=True)
class StagedBatch:
    """One batch of one writer, on its way into one log."""

    log: str
    writer: str
    number: int
    """Grows from batch to batch; one that is not above the ledger's has landed before."""


class Task(NamedTuple):
    """What one attempt at one partition has staged."""

    name: str
    partition: int
    blocks: int
    messages: int


class StagedBlock(NamedTuple):
    """A block that waits, without its body."""

    place: int
    shards: int
    shard: int
    messages: int
    bytes: int
    oldest: Micros
    newest: Micros
    checksum: int
    body: int


class Landing(NamedTuple):
    """What publishing did."""

    messages: int
    repeated: bool = False
    """The ledger had it already; what was staged has been thrown away."""
    shards: int | None = None
    """Not published: the log has this many shards now, and the blocks were made for another number."""


class Staging(Protocol):
    """What a store must do for it. Every method is one transaction."""

    def stage(
        self, batch: StagedBatch, task: str, place: int, shards: int, made: Sequence[tuple[NewBlock, str]], now: Micros
    ) -> None:
        """Keep the blocks, each with a JSON list of its topics; durable on return, visible to nobody."""

    def publish(self, batch: StagedBatch, tasks: Sequence[Task], position: str | None, now: Micros) -> Landing:
        """Land exactly what these tasks staged, in the order of their partitions, once.

        RequestError if something they staged is not there; nothing has been changed then.
        """

    def landed(self, log: str, writer: str) -> tuple[int, str | None] | None:
        """The writer's last batch in the ledger, and the position kept with it."""

    def blocks(self, batch: StagedBatch, task: str) -> list[StagedBlock]:
        """What a task has staged, in order."""

    def forget(self, batch: StagedBatch, tasks: Iterable[str] | None = None) -> int:
        """Throw away what these tasks (or all) have staged for a batch; what has been published is not touched."""

    def sweep(self, before: Micros) -> int:
        """Throw away what was staged before then and never published, and the ledger's unnamed writes."""

    def put_position(self, log: str, writer: str, batch: int, position: str | None, now: Micros) -> None:
        """Set a writer's place in the ledger by hand: to begin anew, or somewhere else."""


UNNAMED = "write-"
"""Writers that begin with this are single batch jobs: nobody will ever ask for them again."""


def topics_json(topics: Sequence[str]) -> str:
    return json.dumps(sorted(topics))


def bodies_of(log: Log, blocks: Sequence[StagedBlock]) -> list[Data]:
    """The bodies of staged blocks, in their order."""
    stored = log.backend.bodies([block.body for block in blocks])
    if len(stored) != len(blocks):
        raise StoreError("staged blocks have lost their bodies; run the job again")
    return [stored[block.body] for block in blocks]
