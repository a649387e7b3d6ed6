"""Run seeds, and tell the story of those that fail."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from dataclasses import dataclass
from hashlib import sha1

from holdfast.errors import HoldfastError
from holdfast.sim.checkers import Violation
from holdfast.sim.faults import Faults
from holdfast.sim.healing import check, heal
from holdfast.sim.workload import WEATHER_SECONDS, Workload


@dataclass(frozen=True, slots=True)
class Failure:
    """A seed that broke a promise, which one, and what happened before."""

    seed: int
    reason: str
    story: tuple[str, ...] = ()

    def __str__(self) -> str:
        return "\n".join([f"seed {self.seed}: {self.reason}", *self.story])


@dataclass(frozen=True, slots=True)
class Outcome:
    """One run: how it ended, and what it amounted to."""

    failure: Failure | None
    deliveries: int
    repeats: int
    """Messages delivered after they had been acknowledged (which only a crash or a cut may cause)."""
    events: int
    trace: tuple[str, ...] = ()

    @property
    def digest(self) -> str:
        """The same for every run of a seed."""
        return sha1("\n".join(self.trace).encode()).hexdigest()


def run_seed(seed: int, *, trace: bool = False, faults: Faults | None = None) -> Outcome:
    """One run; nothing is raised, whatever happens."""
    run = Workload(seed, faults=faults, trace=trace)
    failure = None
    try:
        run.begin()
        run.world.run(WEATHER_SECONDS)
        run.world.tell("world", "HEALS")
        heal(run)
        check(run)
    except Violation as error:
        failure = Failure(seed, str(error))
    except (HoldfastError, AssertionError, LookupError, TypeError, ValueError, AttributeError) as error:
        where = traceback.format_exception(error)[-3:]
        failure = Failure(seed, f"{type(error).__name__}: {error}\n{''.join(where)}")
    return Outcome(failure, run.truth.deliveries, run.truth.repeats, run.world.order, tuple(run.world.trace or ()))


def story(seed: int, lines_max: int = 60) -> tuple[str, ...]:
    """The last lines of what happened in a run."""
    return run_seed(seed, trace=True).trace[-lines_max:]


def run_seeds(
    first: int, last: int, on_progress: Callable[[int, int], None] | None = None, failures_max: int = 5
) -> list[Failure]:
    """Run seeds first..last-1. `on_progress(seeds done, failures so far)` is called after each."""
    failures: list[Failure] = []
    for seed in range(first, last):
        outcome = run_seed(seed)
        if outcome.failure:
            failures.append(Failure(seed, outcome.failure.reason, story(seed)))
        if on_progress:
            on_progress(seed - first + 1, len(failures))
        if len(failures) >= failures_max:
            break
    return failures
