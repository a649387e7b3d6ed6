"""What was read from the log for one slice of a stream, kept a moment for its neighbours.

The slices of a stream are read by several members, each of whom wants a few rows of every block. A read for one of them
is given to the others as it is, decoded, as long as it is among the last ones: whoever stands anywhere in it takes it
whole, so all of them go on from its end, and meet again there.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

from holdfast.delivery.readers import Fetched, Request
from holdfast.model import Stream

KEPT_BYTES = 16 << 20
KEPT_READS = 64


class _Read(NamedTuple):
    stream: Stream
    wanted: str
    at: int
    found: Fetched
    bytes: int


class SharedReads:
    """Of one node; used by the readers' threads and by the loop's."""

    def __init__(self, bytes_max: int = KEPT_BYTES):
        self._bytes_max, self._bytes = bytes_max, 0
        self._reads: deque[_Read] = deque()
        self._lock = threading.Lock()
        self._turns = [threading.Lock() for _ in range(16)]

    def find(self, request: Request) -> Fetched | None:
        """A read in which the request begins."""
        stream, at, text = request.stream, request.at, request.wanted.text
        with self._lock:
            for read in reversed(self._reads):
                if read.at <= at < read.found.past and read.stream == stream and read.wanted == text:
                    return read.found
        return None

    def read(self, request: Request, read: Callable[[Request], Fetched]) -> Fetched:
        """The same, or a new one. Of several that ask for the same at one time, one reads and the others wait."""
        with self._turns[hash((request.stream, request.wanted.text)) % len(self._turns)]:
            found = self.find(request)
            if found is None:
                found = read(request)
                self._keep(request, found)
        return found

    def _keep(self, request: Request, found: Fetched) -> None:
        size = sum(len(rows.topics) * rows.weight for rows in found.rows)
        with self._lock:
            self._reads.append(_Read(request.stream, request.wanted.text, request.at, found, size))
            self._bytes += size
            while self._reads and (self._bytes > self._bytes_max or len(self._reads) > KEPT_READS):
                self._bytes -= self._reads.popleft().bytes
