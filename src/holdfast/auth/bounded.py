"""A dict that remembers only the most recently used, so that no peer can make it grow without end."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable
from threading import Lock
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


class Recent(Generic[K, V]):
    """At most `entries_max` values; the one unused for longest goes first. Safe to share between threads."""

    __slots__ = ("_entries", "_entries_max", "_lock")

    def __init__(self, entries_max: int):
        self._entries: OrderedDict[K, V] = OrderedDict()
        self._entries_max = entries_max
        self._lock = Lock()

    def __len__(self) -> int:
        return len(self._entries)

    def get(self, key: K) -> V | None:
        with self._lock:
            value = self._entries.get(key)
            if value is not None:
                self._entries.move_to_end(key)
            return value

    def put(self, key: K, value: V) -> None:
        with self._lock:
            self._entries[key] = value
            self._entries.move_to_end(key)
            if len(self._entries) > self._entries_max:
                self._entries.popitem(last=False)
