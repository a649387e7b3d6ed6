"""What may go wrong with sessions, how often, and when: drawn from the seed, before the run begins."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

LATE_SECONDS = 12.0
"""A write that nobody knows the fate of lands within this long, or never: less than a deletion is kept."""


@dataclass(frozen=True, kw_only=True)
class LifeFaults:
    """Chances per message, per call of the store, or per second of virtual time."""

    drop: float = 0.0
    duplicate: float = 0.0
    delay_seconds: float = 0.02
    """Messages on the bus take up to this long; as each takes its own time, they overtake each other."""
    straggle: float = 0.0
    """Chance that one takes up to five seconds."""
    store_seconds: float = 0.02
    store_slow: float = 0.0
    """Chance that a call takes up to three seconds."""
    store_fails: float = 0.0
    """Nothing was written, and that is certain."""
    store_lost: float = 0.0
    """Nothing was written, and nobody knows."""
    store_late: float = 0.0
    """Nobody knows, and it lands later."""
    store_unanswered: float = 0.0
    """It was written at once, and nobody knows."""
    crash: float = 0.0
    """Per second: a node stops dead, and another run of it begins after a while."""
    pause: float = 0.0
    """Per second: a node stands still, often for longer than a lease."""
    partition: float = 0.0
    """Per second: two nodes, or a node and the store, do not hear each other for a while."""
    outage: float = 0.0
    """Per second: nobody reaches the store, often for longer than a lease."""
    stop: float = 0.0
    """Per second: a node stops cleanly, or is drained first."""
    breakdown: float = 0.0
    """Per second: a machine that serves a client is dropped, as a driver does with one that raises."""
    twin: float = 0.0
    """Per second: another process is started under a node's name, and the first one lives on."""
    clock_skew: float = 0.0
    """How much faster or slower than true a node's clock may run."""
    clock_jump: float = 0.0
    """Per second: the store's clock is two hours ahead, or behind, for three seconds."""

    @property
    def clear(self) -> bool:
        """Nothing happens that may cost a CONNECT its answer."""
        return self == LifeFaults(delay_seconds=self.delay_seconds, clock_skew=self.clock_skew)


def draw(rng: Random) -> LifeFaults:
    """A kind of weather for one run."""
    kind = rng.random()
    skew = rng.choice([0.0, 0.002, 0.005])
    if kind < 0.08:
        return LifeFaults(clock_skew=skew)
    if kind < 0.3:  # a store that is often in doubt, and nothing else
        return LifeFaults(
            store_seconds=rng.choice([0.02, 0.3]),
            store_slow=rng.choice([0.0, 0.1]),
            store_fails=rng.choice([0.0, 0.1, 0.3]),
            store_lost=rng.choice([0.0, 0.1, 0.2]),
            store_late=rng.choice([0.1, 0.3]),
            store_unanswered=rng.choice([0.0, 0.1, 0.3]),
            crash=rng.choice([0.0, 0.04]),
            clock_skew=skew,
        )
    if kind < 0.45:  # nodes that come and go
        return LifeFaults(
            delay_seconds=rng.choice([0.02, 0.2]),
            crash=rng.choice([0.04, 0.1]),
            stop=rng.choice([0.04, 0.1]),
            store_late=rng.choice([0.0, 0.05]),
            clock_skew=skew,
        )
    if kind < 0.6:  # leases that end while clients are connected
        return LifeFaults(
            outage=rng.choice([0.0, 0.06, 0.1]),
            pause=rng.choice([0.06, 0.1]),
            partition=rng.choice([0.05, 0.15]),
            store_slow=rng.choice([0.0, 0.2]),
            store_late=rng.choice([0.0, 0.1]),
            store_unanswered=rng.choice([0.0, 0.1]),
            twin=rng.choice([0.0, 0.05]),
            clock_skew=skew,
        )
    return LifeFaults(
        drop=rng.choice([0.0, 0.1, 0.3]),
        duplicate=rng.choice([0.0, 0.1, 0.3]),
        delay_seconds=rng.choice([0.02, 0.2, 1.0]),
        straggle=rng.choice([0.0, 0.05]),
        store_seconds=rng.choice([0.02, 0.2]),
        store_slow=rng.choice([0.0, 0.05]),
        store_fails=rng.choice([0.0, 0.1]),
        store_lost=rng.choice([0.0, 0.05]),
        store_late=rng.choice([0.0, 0.1]),
        store_unanswered=rng.choice([0.0, 0.1]),
        crash=rng.choice([0.0, 0.04]),
        pause=rng.choice([0.0, 0.05]),
        partition=rng.choice([0.0, 0.08]),
        outage=rng.choice([0.0, 0.04]),
        stop=rng.choice([0.0, 0.04]),
        breakdown=rng.choice([0.0, 0.0, 0.05]),
        twin=rng.choice([0.0, 0.0, 0.03]),
        clock_skew=skew,
        clock_jump=rng.choice([0.0, 0.05]),
    )
