"""Which node leads which groups: one lease per node, one claim per group under it.

    lease:   NONE -> OPENING -> HELD -> NONE            renewed well inside its time
    claim:   [absent] -> CLAIMING -> HELD -> COOLING -> [absent]

A claim is a key created by compare-and-set under the node's lease, and its *epoch* is the version the store gave
it: no two claims ever have the same, and a later one has a greater. The store refuses a save whose claim is not
at that version any more.

The one surprising rule: the lease is counted from when it was *asked for*, by this node's own clock, and less a
margin; so a node that was stopped in its tracks knows that it has lost before anyone else can have won.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto
from math import inf

from holdfast.errors import BrokenInvariant
from holdfast.groups.protocol.effects import (
    Claim,
    OpenLease,
    RegistryEffect,
    RenewLease,
    Resign,
    StopLeader,
    TrustUntil,
)
from holdfast.groups.protocol.nouns import GroupId
from holdfast.groups.settings import ElectionSettings


class LeaseState(Enum):
    NONE = auto()
    OPENING = auto()
    HELD = auto()


LEGAL_LEASE: dict[LeaseState, set[LeaseState]] = {
    LeaseState.NONE: {LeaseState.OPENING},
    LeaseState.OPENING: {LeaseState.HELD, LeaseState.NONE},
    LeaseState.HELD: {LeaseState.NONE},
}


class ClaimState(Enum):
    ABSENT = auto()
    CLAIMING = auto()
    HELD = auto()
    COOLING = auto()


LEGAL: dict[ClaimState, set[ClaimState]] = {
    ClaimState.ABSENT: {ClaimState.CLAIMING},
    ClaimState.CLAIMING: {ClaimState.HELD, ClaimState.ABSENT},
    ClaimState.HELD: {ClaimState.COOLING, ClaimState.ABSENT},
    ClaimState.COOLING: {ClaimState.ABSENT},
}


@dataclass(slots=True)
class Candidacy:
    """This node's claim to one group."""

    group: GroupId
    state: ClaimState = ClaimState.ABSENT
    epoch: int = 0
    asked: bool = False
    """A `Claim` is under way."""
    resign_at: float = inf


class Election:
    """The lease and the claims of one node; a registry drives it."""

    def __init__(self, node: str, settings: ElectionSettings):
        self.node, self.settings = node, settings
        self.lease_state = LeaseState.NONE
        self.lease = 0
        self.trusted_until = -inf
        self.claims: dict[GroupId, Candidacy] = {}
        self.moves: list[str] = []
        self._renew_at = inf
        self._renewing = False
        self._retry_at = inf
        self._resign_at = inf
        self._failed_at = self._opened_at = -inf
        # Claims in this node's name that nobody here holds, each with its epoch and when to give it back.
        self._unexplained: dict[GroupId, tuple[int, float]] = {}

    @property
    def deadline(self) -> float:
        return min(self._renew_at, self._retry_at, self._resign_at)

    def in_doubt(self, now: float) -> bool:
        """May the store have been away a moment ago, so that other nodes have not found it again yet?

        A node knows that it was not if it has renewed its lease for a while and never failed.
        """
        seconds = self.settings.lease_seconds
        return now < max(self._failed_at + 2 * seconds, self._opened_at + seconds)

    def holds(self, group: GroupId) -> bool:
        candidacy = self.claims.get(group)
        return candidacy is not None and candidacy.state is ClaimState.HELD

    # ------------------------------------------------------------------------------------- asking

    def claim(self, group: GroupId, now: float) -> list[RegistryEffect]:
        """Try to become the leader's node, unless that is under way."""
        candidacy = self.claims.get(group)
        if candidacy is None:
            candidacy = self.claims[group] = Candidacy(group)
            self._move(candidacy, ClaimState.CLAIMING)
        if candidacy.state is not ClaimState.CLAIMING or candidacy.asked:
            return []
        if self.lease_state is LeaseState.HELD:
            candidacy.asked = True
            return [Claim(group, self.lease)]
        return self._open(now)

    def _open(self, now: float) -> list[RegistryEffect]:
        if self.lease_state is not LeaseState.NONE:
            return []
        self._move_lease(LeaseState.OPENING)
        return [OpenLease(now, self.settings.lease_seconds)]

    def resign(self, group: GroupId, epoch: int, now: float, *, clean: bool) -> list[RegistryEffect]:
        """The leader is no more; unless it went cleanly, wait until everything it lent has surely ended."""
        candidacy = self.claims.get(group)
        if candidacy is None or candidacy.epoch != epoch or candidacy.state is not ClaimState.HELD:
            return []
        if clean:
            self._drop(candidacy)
            return [Resign(group, epoch)]
        self._move(candidacy, ClaimState.COOLING)
        # Members elsewhere stop within the ping timeout, those of this node with its lease.
        candidacy.resign_at = now + max(self.settings.cool_seconds, self.settings.lease_seconds)
        self._resign_at = min(self._resign_at, candidacy.resign_at)
        return []

    # ------------------------------------------------------------------------------------ answers

    def on_opened(self, lease: int, asked_at: float, now: float) -> list[RegistryEffect]:
        if self.lease_state is not LeaseState.OPENING:
            return []
        self._move_lease(LeaseState.HELD)
        self.lease, self._opened_at = lease, asked_at
        self._extend(asked_at)
        effects: list[RegistryEffect] = []
        for group in [c.group for c in self.claims.values() if c.state is ClaimState.CLAIMING]:
            effects += self.claim(group, now)
        return effects

    def on_renewed(self, lease: int, asked_at: float) -> list[RegistryEffect]:
        if self.lease_state is not LeaseState.HELD or lease != self.lease:
            return []
        self._renewing = False
        self._extend(asked_at)
        return [TrustUntil(self.trusted_until)]

    def _extend(self, asked_at: float) -> None:
        until = asked_at + self.settings.lease_seconds - self.settings.margin_seconds
        self.trusted_until = max(self.trusted_until, until)
        self._renew_at = asked_at + self.settings.renew_seconds

    def on_lost(self, lease: int, now: float) -> list[RegistryEffect]:
        """Every claim under the lease is gone; whoever still wants a leader will ask again."""
        if self.lease_state is not LeaseState.HELD or lease != self.lease:
            return []
        self._failed_at = now
        self._move_lease(LeaseState.NONE)
        self.lease, self._renew_at, self._renewing, self.trusted_until = 0, inf, False, -inf
        effects: list[RegistryEffect] = []
        for candidacy in list(self.claims.values()):
            if candidacy.state is ClaimState.HELD:
                effects.append(StopLeader(candidacy.group, candidacy.epoch))
            self._drop(candidacy)
        return effects

    def on_lease_failed(self, now: float) -> list[RegistryEffect]:
        self._failed_at = now
        if self.lease_state is LeaseState.OPENING:
            self._move_lease(LeaseState.NONE)
            self._retry_at = now + self.settings.retry_seconds
        elif self._renewing:
            self._renewing = False
            self._renew_at = now + self.settings.retry_seconds
        return []

    def on_claimed(self, group: GroupId, lease: int, epoch: int) -> Candidacy | Resign:
        """Ours; or, if it was made under a lease that we no longer hold or is not wanted, to be given back."""
        candidacy = self.claims.get(group)
        if candidacy is None or not candidacy.asked or lease != self.lease:
            return Resign(group, epoch)
        candidacy.asked, candidacy.epoch = False, epoch
        self._unexplained.pop(group, None)
        self._move(candidacy, ClaimState.HELD)
        return candidacy

    def on_claim_failed(self, group: GroupId, now: float) -> None:
        """The store did not answer."""
        self._failed_at = now
        self.on_not_claimed(group)

    def on_taken_here(self, group: GroupId, epoch: int, now: float) -> list[RegistryEffect]:
        """The claim is this node's, and nobody here holds it.

        An earlier run made it, and it will end with that run's lease. If it does not, it is under our own lease: it
        was reported as failed, or could not be given back. Then give it back, once whatever an earlier run may have
        lent under it has surely ended.
        """
        self.on_not_claimed(group)
        known, resign_at = self._unexplained.get(group, (0, inf))
        if known != epoch:
            longest = max(self.settings.lease_seconds, self.settings.cool_seconds)
            self._unexplained[group] = (epoch, now + longest)
        elif now >= resign_at:
            del self._unexplained[group]
            return [Resign(group, epoch)]
        return []

    def on_not_claimed(self, group: GroupId) -> None:
        """Taken, or the store did not answer: whoever still wants a leader will ask again."""
        candidacy = self.claims.get(group)
        if candidacy is not None and candidacy.state is ClaimState.CLAIMING:
            self._drop(candidacy)

    # --------------------------------------------------------------------------------------- time

    def on_tick(self, now: float) -> list[RegistryEffect]:
        effects: list[RegistryEffect] = []
        if now >= self._renew_at:
            self._renew_at, self._renewing = now + self.settings.lease_seconds, True
            effects.append(RenewLease(self.lease, now))
        if now >= self._retry_at:
            self._retry_at = inf
            if any(c.state is ClaimState.CLAIMING for c in self.claims.values()):
                effects += self._open(now)
        if now >= self._resign_at:
            effects += self._resign_cooled(now)
        return effects

    def _resign_cooled(self, now: float) -> list[RegistryEffect]:
        cooling = [c for c in self.claims.values() if c.state is ClaimState.COOLING]
        for candidacy in cooling:
            if now >= candidacy.resign_at:
                self._drop(candidacy)
        self._resign_at = min([c.resign_at for c in cooling if c.state is ClaimState.COOLING], default=inf)
        return [Resign(c.group, c.epoch) for c in cooling if c.state is ClaimState.ABSENT]

    def _drop(self, candidacy: Candidacy) -> None:
        self._move(candidacy, ClaimState.ABSENT)
        del self.claims[candidacy.group]

    def _move(self, candidacy: Candidacy, to: ClaimState) -> None:
        self._tell(f"claim to {candidacy.group}: {candidacy.state.name} -> {to.name}")
        if to not in LEGAL[candidacy.state]:
            raise BrokenInvariant(f"{self.node}: a claim may not go on like this", self.moves)
        candidacy.state = to

    def _move_lease(self, to: LeaseState) -> None:
        self._tell(f"lease {self.lease}: {self.lease_state.name} -> {to.name}")
        if to not in LEGAL_LEASE[self.lease_state]:
            raise BrokenInvariant(f"{self.node}: the lease may not go on like this", self.moves)
        self.lease_state = to

    def _tell(self, line: str) -> None:
        self.moves.append(line)
        del self.moves[:-20]
