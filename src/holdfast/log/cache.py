"""Recent blocks, decoded, within a bound of bytes: a reader that is up to date never asks the store."""

from __future__ import annotations

import threading
from collections import OrderedDict

import pyarrow as pa

CACHE_BYTES = 32 << 20


class BlockCache:
    """By body id, which is never used twice, so nothing here can be out of date."""

    def __init__(self, bytes_max: int = CACHE_BYTES):
        self._bytes_max = bytes_max
        self._bytes = 0
        self._blocks: OrderedDict[int, tuple[pa.RecordBatch, int]] = OrderedDict()
        self._lock = threading.Lock()

    def put(self, body: int, batch: pa.RecordBatch, size: int) -> None:
        """`size` is its encoded one: asking Arrow for its own costs more than all the rest here."""
        with self._lock:
            known = self._blocks.pop(body, None)
            self._blocks[body] = (batch, size)
            self._bytes += size - (known[1] if known else 0)
            while self._bytes > self._bytes_max and self._blocks:
                self._bytes -= self._blocks.popitem(last=False)[1][1]

    def get(self, body: int) -> pa.RecordBatch | None:
        found = self._blocks.get(body)
        return None if found is None else found[0]

    def clear(self) -> None:
        with self._lock:
            self._blocks.clear()
            self._bytes = 0
