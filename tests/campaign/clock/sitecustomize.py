"""A wall clock that can be set for one process alone: Python imports this at its start, where it is first on the path.

The file that HOLDFAST_TEST_CLOCK names holds how many seconds the clock is ahead (`settable_clock` writes it).
Only the wall clock: the monotonic clock is as before, as it is when a machine's clock is set.
"""

import os
import time

_real = time.time_ns
_file = os.open(os.environ["HOLDFAST_TEST_CLOCK"], os.O_RDONLY) if "HOLDFAST_TEST_CLOCK" in os.environ else -1


def time_ns() -> int:
    return _real() + int(float(os.pread(_file, 32, 0)) * 1e9)


def time_() -> float:
    return time_ns() / 1e9


if _file >= 0:
    time.time_ns = time_ns
    time.time = time_
