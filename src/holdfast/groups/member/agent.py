"""An agent: all shared subscriptions of one session. It keeps the borrowers apart and gives them new lives.

    session handler --JoinGroup, QuitGroup, Acked, Drained, Closed--> Agent --> Borrower, Borrower, ...

Borrowers are told apart by number, never by group: after a quick unsubscribe and subscribe the same session
has two on one group, one finishing and one beginning.

The one surprising rule: a message for a borrower that is no more is answered with `LeaveGroup`, so that a
leader does not go on lending to a ghost.
"""

from __future__ import annotations

from math import inf
from typing import Protocol

from holdfast.groups.member.borrower import Borrower, BorrowerStatus
from holdfast.groups.protocol.effects import GroupSend, MemberEffect
from holdfast.groups.protocol.events import (
    Acked,
    Closed,
    Delivered,
    Drained,
    JoinGroup,
    QuitGroup,
    Refused,
    Unsendable,
)
from holdfast.groups.protocol.messages import (
    Grant,
    LeaderConnectResponse,
    LeaveGroup,
    PingResponse,
    Revoke,
    Revoked,
    ToBorrower,
)
from holdfast.groups.protocol.nouns import NO_LIMIT, GroupId, MemberId
from holdfast.groups.settings import MemberSettings
from holdfast.machine import TICK, Address, Send, Tick

AgentEvent = Tick | JoinGroup | QuitGroup | Closed | Acked | Drained | Delivered | Refused | Unsendable | ToBorrower


class AnyAgent(Protocol):
    """What a session relies on, whether groups are enabled or not."""

    deadline: float

    def handle(self, event: AgentEvent, now: float) -> list[MemberEffect]: ...

    @property
    def empty(self) -> bool: ...


class Agent:
    """`incarnation` must be higher than that of any earlier agent of the same session."""

    def __init__(self, session: str, incarnation: int, node: str, settings: MemberSettings, packet_max: int = NO_LIMIT):
        self.session, self.incarnation, self.node, self.settings = session, incarnation, node, settings
        self.packet_max = packet_max
        self.address = MemberId(session, incarnation).agent(node)
        self.borrowers: dict[int, Borrower] = {}
        self.deadline = inf
        self._numbers = 0
        # Group of the borrowers that are no more, for a while: whoever addresses them needs telling.
        self._past: dict[int, GroupId] = {}

    @property
    def empty(self) -> bool:
        """Nothing is left to do or to tell; after `Closed` the agent may be dropped now."""
        return not self.borrowers

    def handle(self, event: AgentEvent, now: float) -> list[MemberEffect]:
        effects: list[MemberEffect] = []
        match event:
            case PingResponse():
                effects = self._on_message(event, now)
            case Tick():
                for number in [n for n, borrower in self.borrowers.items() if borrower.deadline <= now]:
                    effects += self._drive(number, event, now)
            case Acked() | Drained() | Delivered() | Refused() | Unsendable():
                effects = self._drive(event.loan.member.number, event, now)
            case JoinGroup():
                effects = self._on_subscribe(event, now)
            case QuitGroup():
                for number in [n for n, borrower in self.borrowers.items() if borrower.group == event.group]:
                    effects += self._drive(number, event, now)
            case Closed():
                for number in list(self.borrowers):
                    effects += self._drive(number, event, now)
            case _:
                effects = self._on_message(event, now)
        self.deadline = inf
        for borrower in self.borrowers.values():
            if borrower.deadline < self.deadline:
                self.deadline = borrower.deadline
        return effects

    def _on_subscribe(self, subscribe: JoinGroup, now: float) -> list[MemberEffect]:
        for borrower in self.borrowers.values():
            if borrower.group == subscribe.group and borrower.status is not BorrowerStatus.UNSUBSCRIBING:
                return []
        self._numbers += 1
        member = MemberId(self.session, self.incarnation, self._numbers)
        self.borrowers[self._numbers] = Borrower(
            member, subscribe.group, subscribe.born, self.node, self.settings, now, packet_max=self.packet_max
        )
        return self._drive(self._numbers, TICK, now)

    def _on_message(self, message: ToBorrower, now: float) -> list[MemberEffect]:
        member = message.member
        borrower = self.borrowers.get(member.number)
        if borrower is not None and borrower.member == member:
            return self._drive(member.number, message, now)
        group = borrower.group if borrower else self._past.get(member.number)
        # While a later life is at work, the leader hears from it that the earlier ones are over.
        if borrower is not None or group is None:
            return []
        return list(farewell(message, group, self.node))

    def _drive(self, number: int, event: AgentEvent, now: float) -> list[MemberEffect]:
        borrower = self.borrowers.get(number)
        if borrower is None or isinstance(event, JoinGroup):
            return []
        effects = borrower.handle(event, now)
        if borrower.status is BorrowerStatus.GONE:
            if borrower.recreate:
                self.borrowers[number] = borrower.successor(now)
                effects += self._drive(number, TICK, now)
            else:
                del self.borrowers[number]
                self._past[number] = borrower.group
                if len(self._past) > 32:
                    del self._past[next(iter(self._past))]
        return effects


class NoAgent:
    """Groups are switched off: subscriptions to them are accepted and have no effect."""

    deadline = inf
    empty = True

    def handle(self, event: AgentEvent, now: float) -> list[MemberEffect]:
        return []


def farewell(message: ToBorrower, group: GroupId | None, node: str) -> list[GroupSend]:
    """What to answer on behalf of a member that is not here any more; also for hosts whose session is gone.

    Without a group only a leader that says where it is can be answered. The others have heard a good-bye.
    """
    match message:
        case LeaderConnectResponse(member, _, leader):
            group = group or GroupId.parse(leader.name)
            return [Send(leader, LeaveGroup(member, member.agent(node), group, ""))]
        case PingResponse(member) | Grant(member) | Revoke(member) | Revoked(member) if group is not None:
            return [Send(Address(node, "registry"), LeaveGroup(member, member.agent(node), group, ""))]
        case _:
            return []
