"""Recent blocks, within their bound."""

from __future__ import annotations

import pyarrow as pa

from holdfast import Batch
from holdfast.log import small
from holdfast.log.cache import BlockCache

BATCH = pa.record_batch([pa.array([1])], names=["x"])


def test_the_oldest_make_room() -> None:
    cache = BlockCache(bytes_max=30)
    for body in range(5):
        cache.put(body, BATCH, 10)
    assert [cache.get(body) is not None for body in range(5)] == [False, False, True, True, True]


def test_a_block_put_again_and_again_counts_once() -> None:
    cache = BlockCache(bytes_max=30)
    cache.put(1, BATCH, 10)
    for _ in range(100):
        cache.put(2, BATCH, 10)
    cache.put(3, BATCH, 10)
    assert all(cache.get(body) is not None for body in (1, 2, 3))


def test_a_block_is_decoded_once_and_still_makes_room() -> None:
    cache = BlockCache(bytes_max=30)
    cache.put(1, small.encode(Batch(["a"], [b"p"]), 0)[0], 10)
    found = cache.get(1)
    assert found is not None and found.column("payload").to_pylist() == [b"p"]
    assert cache.get(1) is found
    for body in (2, 3, 4):
        cache.put(body, BATCH, 10)
    assert [cache.get(body) is not None for body in (1, 2, 3, 4)] == [False, True, True, True]
