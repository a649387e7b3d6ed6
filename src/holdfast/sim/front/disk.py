"""What outlives a node: the log as lists, retained messages, the table of sessions; and how they fail."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple
from zlib import crc32

from holdfast.delivery.readers import Fetched
from holdfast.errors import HoldfastError
from holdfast.log.contract import Retained
from holdfast.model import LOG, RETAIN, Batch, Stream
from holdfast.sessions.positions import Gap
from holdfast.sessions.rows import Rows
from holdfast.sim.front.table import SimTable
from holdfast.sim.front.world import World
from holdfast.topics import Wanted


class StoreDown(HoldfastError):
    """The simulated store does not answer."""


class InDoubt(StoreDown):
    """Nobody knows whether it was done, or will be."""


class Row(NamedTuple):
    """One message, and when the simulation saw it published."""

    number: int
    """Orders everything that was published or subscribed to."""
    topic: str
    payload: bytes
    publisher: str
    flags: int
    properties: bytes | None
    micros: int = 0


class Block(NamedTuple):
    """Where one append put its rows."""

    stream: Stream
    base: int
    rows: list[Row]


class SimLog:
    """Streams as lists."""

    def __init__(self, shards: int):
        self.streams: dict[Stream, list[Row]] = {}
        self.blocks: dict[Stream, list[int]] = {}
        """Where each block of a stream begins."""
        self.sealed: set[Stream] = set()
        self.retained: dict[str, Retained] = {}
        self.generation, self.shards = 0, shards
        self.on_append: Callable[[Block], None] = lambda block: None
        self.on_change: Callable[[bool], None] = lambda ours: None
        self.open_generation(shards)

    def open_generation(self, shards: int) -> None:
        self.sealed.update(self.streams)
        self.generation, self.shards = self.generation + 1, shards
        for shard in range(shards):
            self.streams[Stream(LOG, shard, self.generation)] = []
            self.blocks[Stream(LOG, shard, self.generation)] = []

    def drop_oldest(self) -> list[Stream]:
        oldest = min(stream.generation for stream in self.streams)
        gone = [s for s in self.streams if s.generation == oldest and s in self.sealed]
        for stream in gone:
            del self.streams[stream], self.blocks[stream]
            self.sealed.discard(stream)
        return gone

    def shard_of(self, publisher: str) -> int:
        return crc32(publisher.encode()) % self.shards

    def append(self, rows: Sequence[Row], now: float, *, ours: bool) -> list[Block]:
        """All of it, in order, each row to its publisher's shard."""
        micros = round(now * 1e6)
        placed: dict[int, list[Row]] = {}
        for row in rows:
            stored = row._replace(micros=micros)
            placed.setdefault(self.shard_of(row.publisher), []).append(stored)
            if row.flags & RETAIN:
                self.retained.pop(row.topic, None)
                if row.payload:
                    self.retained[row.topic] = Retained(
                        row.topic, row.payload, row.publisher, row.flags, row.properties, micros
                    )
        found = []
        for shard, mine in placed.items():
            stream = Stream(LOG, shard, self.generation)
            block = Block(stream, len(self.streams[stream]), mine)
            self.blocks[stream].append(block.base)
            self.streams[stream] += mine
            self.on_append(block)
            found.append(block)
        self.on_change(ours)
        return found

    def read(self, stream: Stream, at: int, until: int | None, wanted: Wanted | None, bytes_max: int) -> Fetched:
        """As a log reads: matching rows block by block, at least one, up to a limit."""
        rows = self.streams.get(stream)
        if rows is None:
            return Fetched(-1, (), (Gap(str(stream), at, None, "dropped by retention", 0.0),))
        end = len(rows) if until is None else min(until, len(rows))
        bases = {base for base in self.blocks[stream] if base > at}
        chunks: list[list[int]] = [[]]
        size = 0
        while at < end and size < bytes_max:
            if at in bases and chunks[-1]:
                chunks.append([])
            if wanted is None or wanted.matches(rows[at].topic):
                chunks[-1].append(at)
                size += len(rows[at].payload) + 64
            at += 1
        return Fetched(at, [rows_at(stream, offsets, rows) for offsets in chunks if offsets])


def rows_at(stream: Stream, offsets: Sequence[int], rows: Sequence[Row]) -> Rows:
    found = [rows[offset] for offset in offsets]
    if len(offsets) == offsets[-1] + 1 - offsets[0]:
        offsets = range(offsets[0], offsets[-1] + 1)
    return Rows(stream, offsets, columns(found), [row.micros for row in found])


def columns(rows: Sequence[Row]) -> Batch:
    properties = [row.properties for row in rows]
    publishers = {row.publisher for row in rows}
    return Batch(
        topics=[row.topic for row in rows],
        payloads=[row.payload for row in rows],
        publishers=publishers.pop() if len(publishers) == 1 else [row.publisher for row in rows],
        flags=[row.flags for row in rows],
        properties=properties if any(properties) else None,
    )


class Disk:
    """Everything durable, how long it takes, and how it fails."""

    def __init__(self, world: World, shards: int, *, shared: bool):
        self.world = world
        self.log = SimLog(shards)
        self.table = SimTable(world, self.log)
        self.shared = shared
        """Other processes append to the same log."""
        self.slow_seconds = 0.01
        """What an operation takes, at most, in bad weather."""
        self.slow_commit_seconds = 0.01
        self.commit_fails = 0.0
        self.commit_lies = 0.0
        """Chance that a commit lands and is reported as failed."""
        self.lies_next = False
        """The next commit does so."""
        self.commits_slow_until = 0.0
        self.fetch_fails = 0.0
        self.row_fails = self.row_lost = self.row_late = self.row_unanswered = 0.0
        """Chances that a call of the table fails, is lost, lands later, is done and not answered."""
        self.down_until = 0.0

    @property
    def seconds(self) -> float:
        return min(self.slow_seconds, 0.005) if self.world.healing else self.slow_seconds

    @property
    def commit_seconds(self) -> float:
        if self.world.healing:
            return min(self.slow_commit_seconds, 0.005)
        return 1.0 if self.world.now < self.commits_slow_until else self.slow_commit_seconds

    @property
    def down(self) -> bool:
        return self.world.now < self.down_until and not self.world.healing

    def lies(self) -> bool:
        """The commit that was just made is reported as failed."""
        lies, self.lies_next = self.lies_next or self.world.chance(self.commit_lies), False
        return lies and not self.world.healing

    def fails(self, chance: float) -> bool:
        return not self.world.healing and (self.down or self.world.chance(chance))

    def fate(self) -> str | None:
        """How a call of the table ends; None: well."""
        rng = self.world.rng
        if self.world.healing:
            return None
        if self.down:
            return "lost" if rng.random() < 0.3 else "fails"
        roll = rng.random()
        for fate, chance in (
            ("fails", self.row_fails),
            ("lost", self.row_lost),
            ("late", self.row_late),
            ("unanswered", self.row_unanswered),
        ):
            if roll < chance:
                return fate
            roll -= chance
        return None
