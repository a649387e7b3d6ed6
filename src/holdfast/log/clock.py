"""Wall clocks that neither jump nor go back with a clock that is set wrong for a while.

Such a clock is the wall clock's time at first; from then on it follows it, but runs at most 1% faster or slower than
the monotonic clock. What may delete something goes by one that never believes a jump: a wall clock that is set right by
hours is believed as it is by the next process. Messages carry, and expire by, one that believes it after a minute
(`message_time`): a clock that is an hour ahead for some seconds expires nothing, and one that is set right is followed.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from math import inf
from typing import NamedTuple

from holdfast.model import Micros, now_micros

FASTEST = 1.01
SLOWEST = 0.99
BELIEVED_AFTER_SECONDS = 60.0
ALIKE_MICROS = 1_000_000
"""Jumps that differ by less are the same one; what is no further off is caught up with, at 1%."""


class _Seen(NamedTuple):
    """What was believed, and when: one value, since several threads may ask."""

    believed: Micros
    at: float
    ahead: Micros = 0
    """How far the wall clock was ahead of it, in the jump that is not believed yet."""
    since: float = inf
    """When that was first seen."""


class SteadyClock:
    def __init__(
        self,
        wall: Callable[[], Micros],
        monotonic: Callable[[], float] = time.monotonic,
        believed_after: float = inf,
    ):
        """A jump that lasts for `believed_after` seconds is real."""
        self._wall, self._monotonic, self._believed_after = wall, monotonic, believed_after
        self._seen = _Seen(wall(), monotonic())

    def __call__(self) -> Micros:
        seen, now, wall = self._seen, self._monotonic(), self._wall()
        passed = max(0.0, now - seen.at) * 1e6
        found = int(max(seen.believed + SLOWEST * passed, min(wall, seen.believed + FASTEST * passed)))
        ahead, since = wall - found, inf
        if abs(ahead) > ALIKE_MICROS:
            known = seen.since < inf and abs(ahead - seen.ahead) < ALIKE_MICROS
            ahead, since = (seen.ahead, seen.since) if known else (ahead, now)
        if now - since >= self._believed_after:
            found, since = wall, inf
        self._seen = _Seen(found, now, ahead, since)
        return found


def _running() -> float:
    """Goes on while the machine sleeps, where the system has such a clock."""
    return time.clock_gettime(time.CLOCK_BOOTTIME) if hasattr(time, "CLOCK_BOOTTIME") else time.monotonic()


message_time = SteadyClock(now_micros, _running, BELIEVED_AFTER_SECONDS)
"""What messages carry and expire by: one for the whole process, so that all of it agrees."""
