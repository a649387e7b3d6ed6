"""Keeping a log in shape: merge small blocks, index full ones, roll and drop generations.

Every step is one short transaction and may be interrupted anywhere; the next round goes on from what it
finds. Only blocks that will not be merged again are indexed. How old something is, the log's steady clock says: the
wall clock may be wrong for a while, and what was dropped does not come back when it is right again.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from holdfast.log import blocks, index
from holdfast.log.contract import Backend, BlockEntry, Head, NewBlock
from holdfast.log.log import Log

FULL_ROWS = 1000
FULL_BYTES = 256 << 10
"""A block with this many rows or bytes is full: merging leaves it alone."""

RUN_BLOCKS = 64
RUN_FAN_IN = 8
RUN_LEVEL_MAX = 4
"""64 × 8³ = 32,768 blocks in the largest run."""

_STEP_BLOCKS = 64
"""What one transaction merges or deletes at most: whoever appends meanwhile waits for it."""
_PAGE_BLOCKS = 256
RESTLESS_SECONDS = 30.0
"""A round that has lasted this long rests no more."""

_WRITERS_KEPT_MICROS = 7 * 86_400 * 1_000_000


@dataclass(frozen=True, kw_only=True, slots=True)
class RetentionSettings:
    """When a generation ends, and how long what it holds is kept. None: no such limit."""

    generation_seconds_max: float | None = None
    """Seal the open generation when it has been open this long."""
    generation_bytes_max: int | None = None
    """Seal the open generation when it holds this much."""
    keep_seconds: float | None = None
    """Drop a sealed generation when its newest message is older than this."""
    keep_bytes: int | None = None
    """Drop the oldest sealed generations while a log holds more than this."""


NOTHING_SPECIAL: Mapping[str, RetentionSettings] = {}


@dataclass(slots=True)
class Upkeep:
    """What one round did."""

    merged: int = 0
    indexed: int = 0
    sealed: int = 0
    dropped: int = 0
    swept: int = 0

    @property
    def idle(self) -> bool:
        return not (self.merged or self.indexed or self.sealed or self.dropped or self.swept)


class Pace:
    """Rest after every step, up to `rests` times as long as it took: appends and deliveries come first.

    A round that goes on and on is falling behind, so its rests become shorter: in the end everything is merged.
    """

    def __init__(self, rests: float = 0.0):
        self._rests = rests
        self._begun = self._since = time.monotonic()

    def step(self) -> None:
        now = time.monotonic()
        if (rests := self._rests * (1 - (now - self._begun) / RESTLESS_SECONDS)) > 0:
            time.sleep((now - self._since) * rests)
        self._since = time.monotonic()


def maintain(
    log: Log,
    settings: RetentionSettings = RetentionSettings(),  # noqa: B008
    rests: float = 0.0,
    special: Mapping[str, RetentionSettings] = NOTHING_SPECIAL,
) -> Upkeep:
    """One round over every log of the store; `special`: logs with settings of their own."""
    done, pace = Upkeep(), Pace(rests)
    _sweep(log, done, pace)  # first, too: it makes room, and what follows may fail for want of it
    for name in log.logs():
        chosen = special.get(name, settings)
        done.sealed += _roll(log, name, chosen)
        done.dropped += expire(log, name, chosen)
        for head in log.backend.heads(name):
            done.merged += merge_small(log.backend, head, pace)
            done.indexed += index_full(log.backend, head, pace)
            compact_runs(log.backend, head, pace)
    _sweep(log, done, pace)
    log.backend.forget_writers(log.steady() - _WRITERS_KEPT_MICROS)
    return done


def _sweep(log: Log, done: Upkeep, pace: Pace) -> None:
    while swept := log.backend.sweep(_STEP_BLOCKS):
        done.swept += swept
        pace.step()


def _roll(log: Log, name: str, settings: RetentionSettings) -> int:
    """Seal the open generation if it is due and holds anything."""
    open_ = log.generations(name)[-1]
    heads = [h for h in log.backend.heads(name) if h.stream.generation == open_.number]
    size = sum(h.bytes for h in heads)
    if not size:
        return 0
    age = (log.steady() - open_.opened_at) / 1e6
    too_old = settings.generation_seconds_max is not None and age >= settings.generation_seconds_max
    too_big = settings.generation_bytes_max is not None and size >= settings.generation_bytes_max
    if too_old or too_big:
        log.seal(name)
        return 1
    return 0


def expire(log: Log, name: str, settings: RetentionSettings) -> int:
    """Drop what is too old or too much: whole sealed generations, the oldest first."""
    size: dict[int, int] = {}
    newest: dict[int, int] = {}
    for head in log.backend.heads(name):
        number = head.stream.generation
        size[number] = size.get(number, 0) + head.bytes
        newest[number] = max(newest.get(number, 0), head.newest or 0)
    total, dropped = sum(size.values()), 0
    for generation in log.generations(name):
        if generation.sealed_at is None:
            break
        last = newest[generation.number] or generation.sealed_at
        too_old = settings.keep_seconds is not None and log.steady() - last > settings.keep_seconds * 1e6
        too_much = settings.keep_bytes is not None and total > settings.keep_bytes
        if not (too_old or too_much) or not _may_drop(log, name, generation.number):
            break
        log.drop(name, generation.number)
        total -= size[generation.number]
        dropped += 1
    return dropped


def _may_drop(log: Log, name: str, generation: int) -> bool:
    """A log that has a lake lets go of a generation only when the lake verifiably holds it."""
    return log.manifest is None or log.manifest.may_drop(name, generation)


def merge_small(backend: Backend, head: Head, pace: Pace) -> int:
    """Merge runs of small blocks beyond the index into full ones; how many blocks went into others."""
    merged = 0
    while some := _merge_once(backend, head, pace):
        merged += some
    return merged


def _merge_once(backend: Backend, head: Head, pace: Pace) -> int:
    """Very small blocks become small ones, small ones full ones."""
    merged = 0
    offset = backend.indexed_to(head.id)
    # What is appended meanwhile waits for the next round.
    while offset < head.next_offset and (entries := backend.entries(head.id, offset, _PAGE_BLOCKS)):
        at_end = entries[-1].past >= head.next_offset
        groups, rest = _grouped(entries)
        for group in [*groups, rest] if head.sealed and at_end else groups:
            if len(group) > 1:
                merged += len(group) if _merge(backend, head, group) else 0
                pace.step()
        offset = entries[-1].past
    return merged


def _full(entry: BlockEntry) -> bool:
    return entry.messages >= FULL_ROWS or entry.bytes >= FULL_BYTES


def _grouped(entries: Sequence[BlockEntry]) -> tuple[list[list[BlockEntry]], list[BlockEntry]]:
    """Adjacent small blocks that together make a full one, are many, or have a full one behind them; and the rest."""
    groups: list[list[BlockEntry]] = []
    open_: list[BlockEntry] = []
    for entry in entries:
        if _full(entry):
            groups.append(open_)
            open_ = []
            continue
        open_.append(entry)
        enough = sum(e.messages for e in open_) >= FULL_ROWS or sum(e.bytes for e in open_) >= FULL_BYTES
        if enough or len(open_) == _STEP_BLOCKS:
            groups.append(open_)
            open_ = []
    return groups, open_


def _merge(backend: Backend, head: Head, group: Sequence[BlockEntry]) -> bool:
    stored = backend.bodies([entry.body for entry in group])
    if len(stored) != len(group) or any(blocks.checksum(stored[e.body]) != e.checksum for e in group):
        return False  # changed meanwhile, or corrupt: a corrupt block stays by itself, to cost no other
    batch = blocks.merge([blocks.decode(stored[entry.body]) for entry in group])
    data = blocks.encode(batch)
    hashes = index.pack({index.topic_hash(topic) for topic in blocks.topics_of(batch)})
    newest = group[-1].newest
    block = NewBlock(head.stream.shard, batch.num_rows, newest, newest, blocks.checksum(data), hashes, data)
    return backend.replace(head.id, group, block)


def index_full(backend: Backend, head: Head, pace: Pace) -> int:
    """Index what merging has left as it is, a run at a time; of a sealed stream every block."""
    indexed = 0
    while True:
        first = backend.indexed_to(head.id)
        entries = backend.entries(head.id, first, 2 * RUN_BLOCKS)
        seen = [entry for entry in entries if entry.past <= head.next_offset]  # merging had no chance with the others
        ended = head.sealed and bool(seen) and seen[-1].past >= head.next_offset
        run = (seen if ended else _settled(seen))[:RUN_BLOCKS]
        if not run or (len(run) < RUN_BLOCKS and not ended):
            return indexed
        stored = backend.hashes([entry.body for entry in run])
        if len(stored) != len(run):
            continue
        part = [(entry.base, stored[entry.body]) for entry in run]
        backend.put_runs(head.id, [], index.build(part, first, run[-1].past, level=1))
        indexed += len(run)
        pace.step()


def _settled(entries: Sequence[BlockEntry]) -> Sequence[BlockEntry]:
    """All but the last small blocks, which wait for more.

    What else is small stays so (alone among full ones, or beside a corrupt one) and must not hold up the index.
    A rest has fewer blocks than a run, so of two runs' worth of blocks one can always be indexed.
    """
    return entries[: len(entries) - len(_grouped(entries)[1])]


def compact_runs(backend: Backend, head: Head, pace: Pace) -> None:
    """Merge eight neighbouring runs of one level into one of the next."""
    for level in range(1, RUN_LEVEL_MAX):
        while True:
            runs = [run for run in backend.runs(head.id, [0], 0) if run.level == level]
            if len(runs) < RUN_FAN_IN:
                break
            chosen = {(run.first, run.level) for run in runs[:RUN_FAN_IN]}
            whole = [
                run
                for run in backend.runs(head.id, range(index.BUCKETS), runs[0].first)
                if (run.first, run.level) in chosen
            ]
            backend.put_runs(head.id, sorted(chosen), index.merge(whole, level + 1))
            pace.step()
