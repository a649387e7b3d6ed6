"""What may go wrong, how often, and when: drawn from the seed, before the run begins.

A run is *exact* if nothing happens in it that may cost an acknowledgement, but for the crash of the node where it was
made: no message is lost or very late, nobody is cut off. Leaders may die as they like, for their members still know
everything. Then not one acknowledged message may be seen again.
"""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

SLOW_SAVE_SECONDS = 4.4
"""Within the lease: the leader that waits for it stays the leader."""


@dataclass(frozen=True, kw_only=True)
class Faults:
    """Chances per message or per second of virtual time."""

    drop: float = 0.0
    duplicate: float = 0.0
    delay_seconds: float = 0.01
    """Messages take up to this long; as each takes its own time, they overtake each other."""
    straggle: float = 0.0
    """Chance that one takes up to ten seconds."""
    clock_skew: float = 0.0
    """How much faster or slower than true a node's clock may run."""
    save_seconds: float = 0.01
    save_slow: float = 0.0
    """Chance that a save takes up to `SLOW_SAVE_SECONDS`: longer than members go unanswered without giving up."""
    save_fails: float = 0.0
    save_lies: float = 0.0
    """Chance that a save which landed is reported as failed."""
    node_crash: float = 0.0
    """Per second: a node stops dead, and comes back after a while."""
    leader_crash: float = 0.0
    """Per second: a leader breaks down, its node goes on."""
    pause: float = 0.0
    """Per second: a node stands still for a while, and does not know it."""
    partition: float = 0.0
    """Per second: two nodes, or a node and the store, do not hear each other for a while."""
    outage: float = 0.0
    """Per second: nobody reaches the store, often for longer than a lease lasts. Nobody forgets anything by it."""

    @property
    def exact(self) -> bool:
        return not (
            self.drop or self.straggle or self.pause or self.partition or self.save_lies or self.delay_seconds > 0.05
        )


QUIET = Faults()
"""Nothing goes wrong; messages take their time."""


def draw(rng: Random) -> Faults:
    """A kind of bad weather for one run."""
    kind = rng.random()
    skew = rng.choice([0.0, 0.01, 0.02])
    if kind < 0.25:
        return Faults(
            duplicate=rng.choice([0.0, 0.1]),
            delay_seconds=rng.choice([0.001, 0.02, 0.05]),
            leader_crash=rng.choice([0.0, 0.1, 0.3]),
            save_fails=rng.choice([0.0, 0.2, 0.5]),
            clock_skew=skew,
        )
    if kind < 0.35:
        return Faults(
            duplicate=rng.choice([0.0, 0.1]),
            delay_seconds=rng.choice([0.001, 0.02]),
            node_crash=0.08,
            leader_crash=rng.choice([0.0, 0.1]),
            save_fails=rng.choice([0.0, 0.2]),
            clock_skew=skew,
        )
    if kind < 0.45:
        return Faults(
            delay_seconds=rng.choice([0.001, 0.02, 0.05]),
            outage=rng.choice([0.06, 0.12]),
            leader_crash=rng.choice([0.0, 0.1]),
            save_fails=rng.choice([0.0, 0.2]),
            clock_skew=skew,
        )
    if kind < 0.6:
        return Faults(
            drop=rng.choice([0.02, 0.1, 0.2]),
            duplicate=rng.choice([0.05, 0.2]),
            delay_seconds=rng.choice([0.05, 0.5, 1.0]),
            straggle=rng.choice([0.0, 0.02]),
            leader_crash=rng.choice([0.0, 0.1]),
            save_fails=rng.choice([0.0, 0.2]),
            clock_skew=skew,
        )
    return Faults(
        drop=rng.choice([0.0, 0.02, 0.1]),
        duplicate=rng.choice([0.0, 0.05]),
        delay_seconds=rng.choice([0.01, 0.1, 0.5]),
        straggle=rng.choice([0.0, 0.01]),
        clock_skew=skew,
        save_seconds=rng.choice([0.005, 0.05]),
        save_fails=rng.choice([0.0, 0.2]),
        save_lies=rng.choice([0.0, 0.1]),
        node_crash=rng.choice([0.0, 0.06]),
        leader_crash=rng.choice([0.0, 0.1]),
        pause=rng.choice([0.0, 0.06]),
        partition=rng.choice([0.0, 0.1]),
        outage=rng.choice([0.0, 0.0, 0.06]),
    )
