"""A wall clock that can be set for one process alone: Python imports this at its start, where it is first on the path.

The file that HOLDFAST_TEST_CLOCK names holds how many seconds the clock is ahead; it is looked at a few times a second.
Only the wall clock: the monotonic clock is as before, as it is when a machine's clock is set.
"""

import os
import time

_time_ns, _monotonic = time.time_ns, time.monotonic
_path = os.environ.get("HOLDFAST_TEST_CLOCK", "")
LOOK_SECONDS = 0.1

_ahead_ns = 0
_look_at = 0.0


def _ahead() -> int:
    global _ahead_ns, _look_at
    now = _monotonic()
    if now >= _look_at:
        _look_at = now + LOOK_SECONDS
        try:
            with open(_path) as file:
                _ahead_ns = int(float(file.read() or 0) * 1e9)
        except FileNotFoundError:
            _ahead_ns = 0
    return _ahead_ns


def time_ns() -> int:
    return _time_ns() + _ahead()


def time_() -> float:
    return time_ns() / 1e9


if _path:
    time.time_ns = time_ns
    time.time = time_
