"""Recent blocks within a bound of bytes: a reader that is up to date never asks the store."""

from __future__ import annotations

import threading
from collections import OrderedDict

import pyarrow as pa

from holdfast.log import blocks
from holdfast.log.contract import Data

CACHE_BYTES = 32 << 20


class BlockCache:
    """By body id, which is never used twice, so nothing here can be out of date."""

    def __init__(self, bytes_max: int = CACHE_BYTES):
        self._bytes_max = bytes_max
        self._bytes = 0
        self._blocks: OrderedDict[int, tuple[pa.RecordBatch | Data, int]] = OrderedDict()
        self._lock = threading.Lock()

    def put(self, body: int, block: pa.RecordBatch | Data, size: int) -> None:
        """The block, decoded or not yet. `size` is its encoded one: asking Arrow costs more than all the rest here."""
        with self._lock:
            known = self._blocks.pop(body, None)
            self._blocks[body] = (block, size)
            self._bytes += size - (known[1] if known else 0)
            while self._bytes > self._bytes_max and self._blocks:
                self._bytes -= self._blocks.popitem(last=False)[1][1]

    def get(self, body: int) -> pa.RecordBatch | None:
        found = self._blocks.get(body)
        if found is None or isinstance(found[0], pa.RecordBatch):
            return found and found[0]
        batch = blocks.decode(found[0])
        with self._lock:
            if body in self._blocks:
                self._blocks[body] = (batch, found[1])
        return batch

    def clear(self) -> None:
        with self._lock:
            self._blocks.clear()
            self._bytes = 0
