"""The index keeps up with a stream, whatever sizes its blocks have."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence

import pytest

import holdfast
from holdfast import Batch, Log, Stream
from holdfast.log import blocks
from holdfast.log.retention import FULL_ROWS, RUN_BLOCKS, maintain

ONE = Stream("one", 0, 1)


@pytest.fixture
def log() -> Iterator[Log]:
    with holdfast.open("memory:") as log:
        log.create("one", shards=1)
        yield log


def append(log: Log, sizes: Sequence[int]) -> None:
    """A block of each size, in which every block has a topic of its own."""
    for size in sizes:
        at = log.head(ONE).next_offset
        log.append("one", Batch([f"only/{at}"] + ["t"] * (size - 1), [b"%d" % (at + n) for n in range(size)]))


def not_indexed(log: Log) -> int:
    head = log.head(ONE)
    return len(log.backend.entries(head.id, log.backend.indexed_to(head.id), 10_000))


@pytest.mark.parametrize("place", [0, 1, RUN_BLOCKS - 2, RUN_BLOCKS - 1, RUN_BLOCKS])
def test_a_small_block_among_full_ones_does_not_hold_it_up(log: Log, place: int) -> None:
    append(log, [FULL_ROWS] * place + [10] + [FULL_ROWS] * (4 * RUN_BLOCKS - place - 1))
    maintain(log)
    assert not_indexed(log) < RUN_BLOCKS
    first = place * FULL_ROWS
    assert log.read(ONE, 0, topics=f"only/{first}").num_rows == 1


@pytest.mark.parametrize("seed", range(20))
def test_it_comes_within_two_runs_of_the_end_in_rounds_over_blocks_of_any_size(log: Log, seed: int) -> None:
    chance = random.Random(seed)
    kinds = chance.choice([[FULL_ROWS, 10], [FULL_ROWS, FULL_ROWS, FULL_ROWS, 400], [1, 1, 1, FULL_ROWS]])
    firsts = []
    for _ in range(4):
        for size in chance.choices(kinds, k=100):
            firsts.append(log.head(ONE).next_offset)
            append(log, [size])
        maintain(log)
        assert not_indexed(log) < 2 * RUN_BLOCKS
    for first in chance.sample(firsts, 20):
        (chunk,) = log.read(ONE, 0, topics=f"only/{first}").chunks
        assert chunk.offsets() == [first]


def test_a_corrupt_block_that_cannot_be_merged_does_not_hold_it_up(log: Log, monkeypatch: pytest.MonkeyPatch) -> None:
    append(log, [1] * RUN_BLOCKS + [FULL_ROWS] * RUN_BLOCKS)
    bad = log.backend.entries(log.head(ONE).id, 0, 1)[0]
    body = log.backend.bodies([bad.body])[bad.body]
    real = blocks.checksum
    monkeypatch.setattr(blocks, "checksum", lambda data: 0 if data is body else real(data))
    maintain(log)
    assert not_indexed(log) < RUN_BLOCKS
