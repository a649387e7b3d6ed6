"""Run seeds of fan-out, and tell the story of those that fail."""

from __future__ import annotations

import traceback
from collections.abc import Callable

from holdfast.errors import HoldfastError
from holdfast.sim.checkers import Violation
from holdfast.sim.fanout.faults import FanoutFaults
from holdfast.sim.fanout.workload import WEATHER_SECONDS, FanoutWorkload
from holdfast.sim.runner import Failure, Outcome

FAULTS = (HoldfastError, AssertionError, LookupError, TypeError, ValueError, AttributeError)
"""What a machine may not raise, whatever happens."""


def run_fanout_seed(seed: int, *, trace: bool = False, faults: FanoutFaults | None = None) -> Outcome:
    """One run; nothing is raised, whatever happens."""
    run = FanoutWorkload(seed, faults=faults, trace=trace)
    failure = None
    try:
        run.begin()
        run.world.run(WEATHER_SECONDS)
        run.heal()
    except Violation as error:
        failure = Failure(seed, str(error))
    except FAULTS as error:
        where = traceback.format_exception(error)[-3:]
        failure = Failure(seed, f"{type(error).__name__}: {error}\n{''.join(where)}")
    return Outcome(failure, run.truth.deliveries, 0, run.world.order, tuple(run.world.trace or ()))


def run_fanout_seeds(
    first: int, last: int, on_progress: Callable[[int, int], None] | None = None, failures_max: int = 5
) -> list[Failure]:
    """Run seeds first..last-1. `on_progress(seeds done, failures so far)` is called after each."""
    failures: list[Failure] = []
    for seed in range(first, last):
        outcome = run_fanout_seed(seed)
        if outcome.failure:
            told = run_fanout_seed(seed, trace=True).trace[-60:]
            failures.append(Failure(seed, outcome.failure.reason, told))
        if on_progress:
            on_progress(seed - first + 1, len(failures))
        if len(failures) >= failures_max:
            break
    return failures
