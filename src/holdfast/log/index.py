"""Which topics occur in which blocks, cheap enough to keep on every append.

An append stores the sorted 32-bit hashes of its block's topics beside the body. Maintenance gathers them
into runs of many blocks, split by the top bits of the hash into buckets, so that a look-up for one topic
reads a small slice per run:

    block, block, block, …  ->  run (64 blocks)  ->  run (512 blocks)  ->  run (4,096 blocks) …

A hash may stand for two topics; then a block is looked into for nothing, never missed. A posting is the
block's first offset, so it stays right when the block is merged into another: whichever block holds that
offset is the one to read.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Sequence
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from holdfast.log.contract import Run

BUCKETS = 64
SHIFT = 32 - 6
"""Shifted by this, a hash is the number of its bucket."""

Hashes = npt.NDArray[np.uint32]
Offsets = npt.NDArray[np.int64]
N = TypeVar("N", bound=np.integer[Any])


def topic_hash(topic: str) -> int:
    return zlib.crc32(topic.encode())


def pack(hashes: Iterable[int]) -> bytes:
    """A block's topic hashes as they are stored: sorted little-endian 32-bit numbers."""
    found = np.fromiter(hashes, dtype="<u4")
    found.sort()
    return found.tobytes()


def unpack(data: bytes) -> Hashes:
    return np.frombuffer(data, dtype="<u4")


def build(blocks: Sequence[tuple[int, bytes]], first: int, past: int, level: int) -> list[Run]:
    """A run over blocks given as (base offset, packed hashes)."""
    hashes = np.concatenate([unpack(data) for _, data in blocks]) if blocks else np.empty(0, "<u4")
    bases = np.repeat([base for base, _ in blocks], [len(data) // 4 for _, data in blocks]).astype("<i8")
    return _split(hashes, bases, first, past, level)


def merge(runs: Sequence[Run], level: int) -> list[Run]:
    """One run in the place of several adjacent ones."""
    parts = [postings(run.data) for run in runs]
    hashes = np.concatenate([h for h, _ in parts])
    bases = np.concatenate([b for _, b in parts])
    return _split(hashes, bases, min(r.first for r in runs), max(r.past for r in runs), level)


def _split(hashes: Hashes, bases: Offsets, first: int, past: int, level: int) -> list[Run]:
    order = np.lexsort((bases, hashes))
    hashes, bases = hashes[order], bases[order]
    edges = np.searchsorted(hashes, np.arange(BUCKETS + 1, dtype=np.uint64) << np.uint64(SHIFT))
    runs = []
    for bucket in range(BUCKETS):
        a, b = edges[bucket], edges[bucket + 1]
        if a < b or bucket == 0:  # bucket 0 is always there: it tells how far the index has come
            runs.append(Run(bucket, level, first, past, _pack_postings(hashes[a:b], bases[a:b])))
    return runs


def _pack_postings(hashes: Hashes, bases: Offsets) -> bytes:
    """Count, hashes, then bases: each base as its place in the list of those that occur, then that list."""
    used, places = np.unique(bases, return_inverse=True)
    size = np.array([len(hashes)], "<u4").tobytes()
    return size + hashes.astype("<u4").tobytes() + places.astype("<u2").tobytes() + used.astype("<i8").tobytes()


def postings(data: bytes) -> tuple[Hashes, Offsets]:
    count = int(np.frombuffer(data, "<u4", 1)[0])
    hashes = np.frombuffer(data, "<u4", count, 4)
    places = np.frombuffer(data, "<u2", count, 4 + 4 * count)
    used = np.frombuffer(data, "<i8", -1, 4 + 6 * count)
    return hashes, used[places] if count else np.empty(0, "<i8")


def bases_with_any(data: bytes, wanted: Hashes) -> Offsets:
    """The first offsets of the blocks of a run in which any of these (sorted) hashes occurs."""
    return with_any(*postings(data), wanted)


def with_any(hashes: Hashes, values: npt.NDArray[N], wanted: Hashes) -> npt.NDArray[N]:
    """The values, each once, that stand beside any of the wanted hashes; both lists of hashes are sorted."""
    left = np.searchsorted(hashes, wanted, "left")
    right = np.searchsorted(hashes, wanted, "right")
    hit = left < right
    if not hit.any():
        return values[:0]
    return np.unique(np.concatenate([values[a:b] for a, b in zip(left[hit], right[hit], strict=True)]))
