"""A wall clock that neither jumps nor goes back while the process runs: what may delete something goes by it.

It is the wall clock's time at first; from then on it follows it, but runs at most 1% faster or slower than the
monotonic clock. A wall clock that is set right by hours is believed as it is by the next process.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from holdfast.model import Micros

FASTEST = 1.01
SLOWEST = 0.99


class SteadyClock:
    def __init__(self, wall: Callable[[], Micros], monotonic: Callable[[], float] = time.monotonic):
        self._wall, self._monotonic = wall, monotonic
        self._seen = wall(), monotonic()
        """What was believed, and when: one value, since several threads may ask."""

    def __call__(self) -> Micros:
        (believed, at), now = self._seen, self._monotonic()
        passed = max(0.0, now - at) * 1e6
        time = int(max(believed + SLOWEST * passed, min(self._wall(), believed + FASTEST * passed)))
        self._seen = time, now
        return time
