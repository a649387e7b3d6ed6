"""A node's registry: finds the one leader of a group, or starts it here.

    wanted --> led here?            hand it over
           --> lately seen there?   pass it on
           --> otherwise            claim the group; hold what is wanted until that is decided

A node that is about to go yields: it claims nothing any more, and asks all the other nodes. The one that leads the
group answers, or one of them claims it.

The one surprising rule: what was passed on by another node is never passed on again, or two nodes with old
memories could send it back and forth for ever.
"""

from __future__ import annotations

from dataclasses import replace
from math import inf

from holdfast.groups.leading.election import Election
from holdfast.groups.leading.seats import waiting_key
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
    Yield,
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
from holdfast.groups.protocol.nouns import GroupId, MemberId
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
    | Yield
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
        self._others: tuple[str, ...] = ()
        """The nodes it yields to; none: it leads what nobody else does."""

    def handle(self, event: RegistryEvent, now: float) -> list[RegistryEffect]:
        effects = self._dispatch(event, now)
        # A claim that was given up, or lost with the lease, leaves its questions behind: claim anew for them.
        for group in [group for group in self.waiting if group not in self.election.claims]:
            effects += self._leave_to_others(group, now) if self._others else self.election.claim(group, now)
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
                return election.on_lost(lease, now)
            case LeaseFailed():
                return election.on_lease_failed(now)
            case Claimed():
                return self._on_claimed(event, now)
            case Taken():
                return self._on_taken(event, now)
            case ClaimFailed(group):
                election.on_claim_failed(group, now)
                self.waiting.pop(group, None)
                return []
            case LeaderRetired(group, epoch, clean):
                return election.resign(group, epoch, now, clean=clean)
            case Yield(others):
                self._others = tuple(node for node in others if node != self.node)
                return []

    def _on_wanted(self, wanted: Wanted, now: float) -> list[RegistryEffect]:
        group = wanted.group
        if self.election.holds(group):
            return self._hand_over(self.node, group, wanted, now)
        if wanted.reply_to.node == self.node:
            node, until = self._elsewhere.get(group, ("", -inf))
            if now < until:
                return self._hand_over(node, group, wanted, now)
            self._elsewhere.pop(group, None)
        if isinstance(wanted, LeaveGroup) and not wanted.carried:
            # It has nothing to tell: not worth an election, nor is what it asked for before.
            waiting = self.waiting.get(group, {})
            for key in [key for key, other in waiting.items() if _member(other) == wanted.member]:
                del waiting[key]
            return []
        if self._others:
            return self._ask_others(wanted, now)
        waiting = self.waiting.setdefault(group, {})
        if len(waiting) < WAITING_MAX:
            waiting[waiting_key(wanted)] = wanted
        return self.election.claim(group, now)

    def _on_claimed(self, claimed: Claimed, now: float) -> list[RegistryEffect]:
        found = self.election.on_claimed(claimed.group, claimed.lease, claimed.epoch)
        if isinstance(found, Resign):
            return [found]
        if self._others:
            # What waits for it is left to the others as soon as this node has no claim to it.
            return self.election.resign(claimed.group, claimed.epoch, now, clean=True)
        in_doubt = self.election.in_doubt(now)
        start = StartLeader(claimed.group, claimed.epoch, self.election.trusted_until, in_doubt)
        return [start, *self._pass_on(claimed.group, self.node, now)]

    def _on_taken(self, taken: Taken, now: float) -> list[RegistryEffect]:
        if taken.node == self.node:
            self.waiting.pop(taken.group, None)
            return self.election.on_taken_here(taken.group, taken.epoch, now)
        self.election.on_not_claimed(taken.group)
        self._elsewhere[taken.group] = (taken.node, now + self.settings.remember_seconds)
        return self._pass_on(taken.group, taken.node, now)

    def _leave_to_others(self, group: GroupId, now: float) -> list[RegistryEffect]:
        return [effect for wanted in self.waiting.pop(group).values() for effect in self._ask_others(wanted, now)]

    def _ask_others(self, wanted: Wanted, now: float) -> list[RegistryEffect]:
        """What came from another node is not passed on: it asks us only because it does not know yet."""
        effects: list[RegistryEffect] = []
        if wanted.reply_to.node == self.node:
            for node in self._others:
                effects += self._hand_over(node, wanted.group, wanted, now)
        return effects

    def _pass_on(self, group: GroupId, node: str, now: float) -> list[RegistryEffect]:
        waiting = self.waiting.pop(group, {})
        here = node == self.node
        effects: list[RegistryEffect] = []
        for wanted in waiting.values():
            if here or wanted.reply_to.node == self.node:
                effects += self._hand_over(node, group, wanted, now)
        return effects

    def _hand_over(self, node: str, group: GroupId, wanted: Wanted, now: float) -> list[RegistryEffect]:
        if isinstance(wanted, Ask) and wanted.reply_to.node == self.node:
            left = wanted.until(self.node, now) - now
            if left <= 0:
                return []  # whoever asked has given up
            if node != self.node:
                wanted = replace(wanted, good_for_seconds=left)
        return [Send(self._leader(node, group), wanted)]

    @staticmethod
    def _leader(node: str, group: GroupId) -> Address:
        return Address(node, "leader", str(group))


def _member(wanted: Wanted) -> MemberId | None:
    return None if isinstance(wanted, Ask) else wanted.member
