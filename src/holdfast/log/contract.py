"""What a log keeps and promises, and the narrow seam a store implements to keep it.

Everything above the seam (`log.py`) is the same for every store, so a promise is written and tested once.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import TYPE_CHECKING, NamedTuple, Protocol

from holdfast.errors import PreconditionFailed, RequestError
from holdfast.model import Micros, Stream

if TYPE_CHECKING:
    import pyarrow as pa

Data = bytes | memoryview

ABSENT = 0
"""As an expected next offset: the stream must hold nothing yet (create if absent)."""


TOPICS_SWEPT = 1000
RUNS_SWEPT = 256
RUN_BYTES_SWEPT = 4 << 20
"""What one step deletes at most of a dropped generation: whoever appends meanwhile waits for it."""


class Head(NamedTuple):
    """A stream as it stands: how far it goes and what it weighs."""

    id: int
    stream: Stream
    next_offset: int
    bytes: int
    oldest: Micros | None
    newest: Micros | None
    sealed: bool


class Generation(NamedTuple):
    """An epoch of a log: fixed shard count, open until sealed."""

    number: int
    shards: int
    opened_at: Micros
    sealed_at: Micros | None


class BlockEntry(NamedTuple):
    """A block's line in the directory."""

    base: int
    messages: int
    bytes: int
    newest: Micros
    """The newest time in this block or any before it, so that it never decreases along the stream."""
    checksum: int
    body: int

    @property
    def past(self) -> int:
        return self.base + self.messages


class NewBlock(NamedTuple):
    """A block that has no place yet."""

    shard: int
    messages: int
    oldest: Micros
    newest: Micros
    checksum: int
    hashes: bytes
    data: Data


class AppendKey(NamedTuple):
    """Who appends, and the sequence number of its append: a repeat is recognised and changes nothing.

    A writer makes one append at a time, with a sequence that grows.
    """

    writer: str
    sequence: int


class GenerationSealed(RequestError):
    """The generation takes no more blocks; the next one does."""

    def __init__(self, log: str, generation: int):
        super().__init__(f"generation {generation} of log {log!r} is sealed")


class NotTaken(RequestError):
    """Nothing was stored, because of some of the QoS 2 publishes: those are to be left out."""

    def __init__(self, fenced: Collection[ReceivedId], repeated: Mapping[ReceivedId, int]):
        super().__init__(
            f"{len(fenced)} publishes are of sessions served elsewhere, {len(repeated)} are stored already"
        )
        self.fenced = frozenset(fenced)
        """Their sessions are not served under that epoch any more: whoever serves them is sent them again."""
        self.repeated = dict(repeated)
        """They are in the log, and were not released; each with the mark that it is stored under."""


class Landed(NamedTuple):
    """Where one block of an append went."""

    shard: int
    base: int
    messages: int
    body: int


class Retained(NamedTuple):
    """A topic's last word, for whoever subscribes later; an empty payload clears it."""

    topic: str
    payload: bytes
    publisher: str
    flags: int
    properties: bytes | None
    time: Micros


class ReceivedId(NamedTuple):
    """A QoS 2 publish that is stored and not released yet."""

    client_id: str
    born: str
    """The life of the session it was sent in."""
    packet_id: int
    mark: int = 0
    """Its own number: releasing it, however late, does not release a later one under the same packet id."""
    epoch: int | None = None
    """Store it only if its session still has this epoch: what lands late must not come after its repeat. None: in any
    case."""


class Run(NamedTuple):
    """One bucket of one index run: which topic hashes occur in which blocks of offsets [first, past)."""

    bucket: int
    level: int
    first: int
    past: int
    data: bytes


@dataclass(frozen=True, slots=True)
class Placed:
    """One block of an append: its stream, its first offset, and which rows of the batch it took."""

    stream: Stream
    base: int
    count: int
    rows: Sequence[int] | None
    """None: all rows of the batch, in order."""


@dataclass(frozen=True, slots=True)
class Appended:
    """What an append did. Everything in it is durable."""

    placed: list[Placed]
    repeated: bool = False
    """The key had been seen: nothing was changed, `placed` is from the first time (empty if a later append
    by the same writer has replaced it)."""

    def offsets(self) -> list[tuple[Stream, int]]:
        """Stream and offset of each message, in the order of the batch."""
        found: dict[int, tuple[Stream, int]] = {}
        for block in self.placed:
            rows = range(block.count) if block.rows is None else block.rows
            found.update((row, (block.stream, block.base + at)) for at, row in enumerate(rows))
        return [found[row] for row in sorted(found)]


@dataclass(frozen=True, slots=True)
class Chunk:
    """Consecutive rows of one block that matched."""

    stream: Stream
    base: int
    """Offset of the first row of the block the rows come from."""
    rows: pa.Int64Array | None
    """Which rows of the block these are; None: consecutive ones, starting at `first`."""
    first: int
    batch: pa.RecordBatch

    def offsets(self) -> list[int]:
        if self.rows is None:
            return list(range(self.base + self.first, self.base + self.first + self.batch.num_rows))
        return [self.base + row for row in self.rows.to_pylist()]


class Skipped(NamedTuple):
    """Offsets that could not be read, and why: never a silent jump."""

    stream: Stream
    first: int
    past: int
    reason: str


@dataclass(frozen=True, slots=True)
class Reading:
    """What one read found, and where to go on."""

    chunks: list[Chunk]
    next_offset: int
    """Everything before this that matched has been returned."""
    finalised: bool
    """The end of a sealed stream: nothing more will ever come."""
    skipped: list[Skipped] = field(default_factory=list)
    blocks_read: int = 0
    """How many block bodies were looked into."""

    @property
    def num_rows(self) -> int:
        return sum(chunk.batch.num_rows for chunk in self.chunks)


def within_bytes(runs: Sequence[tuple[int, int, int, int]], bytes_max: int) -> Sequence[tuple[int, int, int, int]]:
    """The first of these runs (stream, bucket, first, bytes) that weigh no more than this together, at least one."""
    weights = accumulate(size for *_, size in runs)
    return runs[: max(1, sum(weight <= bytes_max for weight in weights))]


def placed_from(text: str) -> list[Landed]:
    return [Landed(*row) for row in json.loads(text)]


def check_epochs(received: Iterable[ReceivedId], epochs: Mapping[str, int | None]) -> None:
    """NotTaken if a session is not served under the epoch that a publish of it was taken under."""
    fenced = [one for one in received if one.epoch is not None and epochs.get(one.client_id) != one.epoch]
    if fenced:
        raise NotTaken(fenced, {})


def check_expected(expect: Mapping[int, int], shard: int, actual: int, log: str) -> None:
    expected = expect.get(shard, actual)
    if expected != actual:
        raise PreconditionFailed(
            f"expected the next offset of shard {shard} of log {log!r} to be {expected}, it is {actual}"
        )


class Backend(Protocol):
    """What a store must do. Every method is one transaction, safe to call from several threads."""

    def create_log(self, log: str, shards: int, shard_by: str, now: Micros) -> None:
        """Create the log with its first generation, unless it exists."""

    def logs(self) -> dict[str, str]:
        """Every log and what it shards by."""

    def generations(self, log: str) -> list[Generation]:
        """The generations that are kept, oldest first."""

    def heads(self, log: str) -> list[Head]:
        """The streams of the generations that are kept, by generation and shard."""

    def head(self, stream: Stream) -> Head | None:
        """One stream, or None if it is unknown or dropped."""

    def append(
        self,
        log: str,
        generation: int,
        blocks: Sequence[NewBlock],
        topics: Sequence[str],
        expect: Mapping[int, int],
        key: AppendKey | None,
        now: Micros,
        retained: Sequence[Retained] = (),
        received: Sequence[ReceivedId] = (),
    ) -> tuple[list[Landed], bool] | None:
        """Add the blocks, each at the end of its stream, all or none; durable on return.

        Offsets are assigned under the stream's lock in the same transaction: no gap, and offset n+1 is never
        visible before n. None if the generation has been sealed. The bool says that the key was a repeat.
        Raises PreconditionFailed if an expected next offset is not the actual one. Retained messages are kept
        (or, with an empty payload, cleared) in the same transaction, the last one for a topic winning. So are
        the packet ids of what was received with QoS 2; `SessionTable.received` tells of them. Raises NotTaken, and
        stores nothing, if any of these is there already, or its session has another epoch by now.
        """

    def retained(self, log: str) -> list[Retained]:
        """Every retained message of a log."""

    def forget_retained(self, log: str, gone: Sequence[tuple[str, Micros]]) -> None:
        """Forget the retained messages of these topics, each only if it still is the one of that time."""

    def entries(self, stream: int, offset: int, limit: int) -> list[BlockEntry]:
        """The directory from the block that holds `offset` on (or the first after it)."""

    def entries_at(self, stream: int, offsets: Sequence[int]) -> list[BlockEntry]:
        """For each of these offsets the block that holds it, each block once, in order."""

    def bodies(self, ids: Sequence[int]) -> dict[int, Data]:
        """Bodies by id. One that has been merged away meanwhile is missing."""

    def hashes(self, ids: Sequence[int]) -> dict[int, bytes]:
        """Topic hashes of bodies by id, as in `NewBlock.hashes`."""

    def topics(self, log: str, generation: int, prefix: str) -> list[str]:
        """Every topic that occurred in the generation and begins with `prefix`."""

    def seal(self, log: str, shards: int | None, now: Micros) -> Generation:
        """Finalise the open generation's streams and open the next, with as many shards unless told."""

    def drop(self, log: str, generation: int) -> None:
        """Make a sealed generation invisible. `sweep` frees its room."""

    def sweep(self, blocks_max: int) -> int:
        """Delete up to this many blocks of dropped generations, or bodies merged into others; 0: nothing is left.

        Of a generation that has no blocks any more, up to TOPICS_SWEPT topics or RUNS_SWEPT runs of the index.
        """

    def replace(self, stream: int, old: Sequence[BlockEntry], block: NewBlock) -> bool:
        """Put one block in the place of adjacent ones; False if they are no longer what they were."""

    def indexed_to(self, stream: int) -> int:
        """Blocks below this offset are covered by index runs."""

    def runs(self, stream: int, buckets: Sequence[int], offset: int) -> list[Run]:
        """The runs of these buckets that cover anything from `offset` on."""

    def put_runs(self, stream: int, old: Iterable[tuple[int, int]], new: Sequence[Run]) -> None:
        """Replace the runs with these (first, level) by new ones, all or none."""

    def forget_writers(self, before: Micros) -> int:
        """Forget the idempotency keys of writers that have been silent since `before`."""

    def totals(self) -> dict[str, tuple[int, int]]:
        """Per log, messages ever appended to the kept streams, and a number that changes with seals and drops."""
