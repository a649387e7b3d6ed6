"""What may go wrong with fan-out, how often, and when: drawn from the seed, before the run begins."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

SLOW_SECONDS = 3.0
LATE_SECONDS = 4.0
"""A write that nobody knows the fate of lands within this long."""


@dataclass(frozen=True, kw_only=True)
class FanoutFaults:
    """Chances per call of the store, per hint, or per second of virtual time."""

    store_seconds: float = 0.02
    store_slow: float = 0.0
    """Chance that a call takes up to three seconds."""
    store_fails: float = 0.0
    """Nothing was done."""
    store_unanswered: float = 0.0
    """It was done, and nobody knows."""
    store_late: float = 0.0
    """Nobody knows, and a write lands later."""
    doubled: float = 0.0
    """Chance that a dispatcher is given an answer once more, later."""
    hint_lost: float = 0.0
    crash: float = 0.0
    """Per second: a node stops dead; its lease ends later, and another run of it begins after a while."""
    pause: float = 0.0
    """Per second: a node stands still, often for longer than its lease."""
    breakdown: float = 0.0
    """Per second: a dispatcher is dropped and another takes its place."""
    outage: float = 0.0
    """Per second: nobody reaches the store for a while."""
    damage: float = 0.0
    """Per second: a payload is removed or damaged underneath."""

    @property
    def clear(self) -> bool:
        """Nothing holds a node up."""
        return not (self.store_slow or self.pause or self.outage or self.store_unanswered or self.store_late)


def draw(rng: Random) -> FanoutFaults:
    """A kind of weather for one run."""
    kind = rng.random()
    if kind < 0.2:
        return FanoutFaults(hint_lost=rng.choice([0.0, 0.5, 1.0]))
    if kind < 0.4:  # a store that is often in doubt, and nothing else
        return FanoutFaults(
            store_seconds=rng.choice([0.02, 0.3]),
            store_slow=rng.choice([0.0, 0.1]),
            store_fails=rng.choice([0.0, 0.1, 0.3]),
            store_unanswered=rng.choice([0.05, 0.3]),
            store_late=rng.choice([0.0, 0.1]),
            doubled=rng.choice([0.0, 0.2]),
            breakdown=rng.choice([0.0, 0.1]),
        )
    if kind < 0.6:  # nodes that come and go, and stand still
        return FanoutFaults(
            crash=rng.choice([0.0, 0.05, 0.1]),
            pause=rng.choice([0.05, 0.1]),
            store_unanswered=rng.choice([0.0, 0.1]),
            outage=rng.choice([0.0, 0.05]),
            hint_lost=rng.choice([0.0, 0.5]),
        )
    return FanoutFaults(
        store_seconds=rng.choice([0.02, 0.2]),
        store_slow=rng.choice([0.0, 0.05]),
        store_fails=rng.choice([0.0, 0.1]),
        store_unanswered=rng.choice([0.0, 0.1]),
        store_late=rng.choice([0.0, 0.05]),
        doubled=rng.choice([0.0, 0.1]),
        hint_lost=rng.choice([0.0, 0.3, 1.0]),
        crash=rng.choice([0.0, 0.05]),
        pause=rng.choice([0.0, 0.05]),
        breakdown=rng.choice([0.0, 0.05]),
        outage=rng.choice([0.0, 0.03]),
        damage=rng.choice([0.0, 0.0, 0.1]),
    )
