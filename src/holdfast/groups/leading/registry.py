"""A node's registry: finds the one leader of a group, or starts it here.

    wanted --> led here?            hand it over
           --> lately seen there?   pass it on
           --> otherwise            claim the group; hold what is wanted until that is decided

The one surprising rule: what was passed on by another node is never passed on again, or two nodes with old
memories could send it back and forth for ever.
"""

from __future__ import annotations

from math import inf

from holdfast.groups.leading.election import Election
from holdfast.groups.protocol.effects import RegistryEffect, Resign, StartLeader
from holdfast.groups.protocol.events import (
    Claimed,
    ClaimFailed,
    LeaderRetired,
    LeaseFailed,
    LeaseLost,
    LeaseOpened,
    LeaseRenewed,
    Taken,
)
from holdfast.groups.protocol.messages import (
    Ask,
    FindLeader,
    Invalidate,
    LeaderWanted,
    LeaveGroup,
    Ping,
    RevokeFinished,
    ToLeader,
    UpdateProgress,
    UpdateStreamStates,
    Wanted,
)
from holdfast.groups.protocol.nouns import GroupId
from holdfast.groups.settings import ElectionSettings
from holdfast.machine import Address, Send, Tick

RegistryEvent = (
    Tick
    | ToLeader
    | LeaseOpened
    | LeaseRenewed
    | LeaseLost
    | LeaseFailed
    | Claimed
    | Taken
    | ClaimFailed
    | LeaderRetired
)

WAITING_MAX = 100_000


class Registry:
    """One per node. Give it also what is addressed to a leader that this node does not have."""

    def __init__(self, node: str, settings: ElectionSettings):
        self.node, self.settings = node, settings
        self.election = Election(node, settings)
        self.deadline = inf
        self._elsewhere: dict[GroupId, tuple[str, float]] = {}
        self.waiting: dict[GroupId, dict[object, Wanted]] = {}

    def handle(self, event: RegistryEvent, now: float) -> list[RegistryEffect]:
        effects = self._dispatch(event, now)
        # A claim that was given up, or lost with the lease, leaves its questions behind: claim anew for them.
        for group in [group for group in self.waiting if group not in self.election.claims]:
            effects += self.election.claim(group, now)
        self.deadline = self.election.deadline
        return effects

    def _dispatch(self, event: RegistryEvent, now: float) -> list[RegistryEffect]:
        election = self.election
        match event:
            case LeaderWanted() | FindLeader() | LeaveGroup() | Ask():
                return self._on_wanted(event, now)
            case Ping(member, reply_to) | UpdateStreamStates(member, reply_to):
                return [Send(reply_to, Invalidate(member))]
            case UpdateProgress() | RevokeFinished():
                return []
            case Tick():
                return election.on_tick(now)
            case LeaseOpened(lease, asked_at):
                return election.on_opened(lease, asked_at, now)
            case LeaseRenewed(lease, asked_at):
                return election.on_renewed(lease, asked_at)
            case LeaseLost(lease):
                return election.on_lost(lease)
            case LeaseFailed():
                return election.on_lease_failed(now)
            case Claimed():
                return self._on_claimed(event)
            case Taken():
                return self._on_taken(event, now)
            case ClaimFailed(group):
                election.on_not_claimed(group)
                self.waiting.pop(group, None)
                return []
            case LeaderRetired(group, epoch, clean):
                return election.resign(group, epoch, now, clean=clean)

    def _on_wanted(self, wanted: Wanted, now: float) -> list[RegistryEffect]:
        group = wanted.group
        if self.election.holds(group):
            return [Send(self._leader(self.node, group), wanted)]
        if wanted.reply_to.node == self.node:
            node, until = self._elsewhere.get(group, ("", -inf))
            if now < until:
                return [Send(self._leader(node, group), wanted)]
            self._elsewhere.pop(group, None)
        if isinstance(wanted, LeaveGroup) and not wanted.carried:
            # It has nothing to tell: not worth an election.
            return []
        waiting = self.waiting.setdefault(group, {})
        if len(waiting) < WAITING_MAX:
            waiting[wanted.request if isinstance(wanted, Ask) else wanted.member] = wanted
        return self.election.claim(group, now)

    def _on_claimed(self, claimed: Claimed) -> list[RegistryEffect]:
        found = self.election.on_claimed(claimed.group, claimed.lease, claimed.epoch)
        if isinstance(found, Resign):
            return [found]
        start = StartLeader(claimed.group, claimed.epoch, self.election.trusted_until)
        return [start, *self._pass_on(claimed.group, self.node)]

    def _on_taken(self, taken: Taken, now: float) -> list[RegistryEffect]:
        self.election.on_not_claimed(taken.group)
        if taken.node == self.node:
            # Made by an earlier run of this node: it will end with that run's lease.
            self.waiting.pop(taken.group, None)
            return []
        self._elsewhere[taken.group] = (taken.node, now + self.settings.remember_seconds)
        return self._pass_on(taken.group, taken.node)

    def _pass_on(self, group: GroupId, node: str) -> list[RegistryEffect]:
        waiting = self.waiting.pop(group, {})
        here = node == self.node
        return [
            Send(self._leader(node, group), wanted)
            for wanted in waiting.values()
            if here or wanted.reply_to.node == self.node
        ]

    @staticmethod
    def _leader(node: str, group: GroupId) -> Address:
        return Address(node, "leader", str(group))
