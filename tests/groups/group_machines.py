"""Machines in the states that tests want them in, and short names for what they say."""

from __future__ import annotations

from typing import Any, TypeVar

from holdfast.groups.leading.leader import Leader, LeaderEvent
from holdfast.groups.member.agent import Agent
from holdfast.groups.member.borrower import Borrower
from holdfast.groups.protocol.effects import Effect, LeaderEffect, Save
from holdfast.groups.protocol.events import Loaded, Saved, StreamInfo, StreamsSeen
from holdfast.groups.protocol.messages import (
    Ask,
    FindLeader,
    Grant,
    LeaderConnectResponse,
    LeaderWanted,
    Ping,
    Report,
    Request,
    UpdateProgress,
)
from holdfast.groups.protocol.nouns import GroupId, Mark, MemberId, Piece
from holdfast.groups.record import GroupRecord
from holdfast.groups.settings import LeaderSettings, MemberSettings
from holdfast.machine import TICK, Address, Send
from holdfast.model import Stream

T = TypeVar("T")

GROUP = GroupId("g", "t/#")
BORN = "b"
COURSE = "b.0"
LEADER = Address("n1", "leader", str(GROUP))
A, B, C = MemberId("a"), MemberId("b"), MemberId("c")


def stream(shard: int, generation: int = 1) -> Stream:
    return Stream("messages", shard, generation)


def piece(shard: int, generation: int = 1) -> Piece:
    return Piece(stream(shard, generation))


def sent(effects: list[Any], kind: type[T]) -> list[T]:
    """The messages of this kind among the effects."""
    return [e.message for e in effects if isinstance(e, Send) and isinstance(e.message, kind)]


def kinds(effects: list[Any]) -> list[str]:
    """What the effects are, and what the sends among them say."""
    return [type(e.message if isinstance(e, Send) else e).__name__ for e in effects]


def tick(machine: Any, until: float) -> list[Any]:
    """Every deadline up to then, as a host would keep it."""
    effects: list[Any] = []
    for _ in range(10_000):
        if machine.deadline > until:
            return effects
        effects += machine.handle(TICK, machine.deadline)
    raise AssertionError("the deadline does not move")


def home(member: MemberId) -> Address:
    return member.agent("n2")


class StoredLeader(Leader):
    """A leader whose store answers at once; while it is `away`, a test answers for it."""

    away = False

    def handle(self, event: LeaderEvent, now: float) -> list[LeaderEffect]:
        effects = super().handle(event, now)
        if effects and isinstance(effects[-1], Save) and not self.away:
            effects += self.handle(Saved(), now)
        return effects


def leader(
    shards: int = 2, *, record: GroupRecord | None = None, infos: list[StreamInfo] | None = None, **settings: Any
) -> StoredLeader:
    """A leader that has looked around, at 0 s."""
    machine = StoredLeader(GROUP, 7, "n1", LeaderSettings(**settings), 1e9, 0.0)
    machine.handle(TICK, 0.0)
    machine.handle(Loaded(record or GroupRecord(group=GROUP, born=BORN)), 0.0)
    seen = infos or [StreamInfo(stream(shard), None, 1000) for shard in range(shards)]
    machine.handle(StreamsSeen(tuple(seen)), 0.0)
    tick(machine, 0.1)
    return machine


def wanted(member: MemberId, now: float, **more: Any) -> LeaderWanted:
    return LeaderWanted(member, home(member), GROUP, more.pop("born", BORN), now, **more)


def find(member: MemberId, now: float, **more: Any) -> FindLeader:
    return FindLeader(member, Address("n2", "batch", "x"), GROUP, BORN, now, **more)


def ask(what: Request, request: str = "r1", *, asked_at: float = 0.0, good_for: float = 1e9) -> Ask:
    return Ask(request, Address("n3", "asker", request), GROUP, what, asked_at, good_for)


def join(machine: Leader, member: MemberId, now: float) -> list[Effect]:
    """Let a member in, and place; what the leader said."""
    return [*machine.handle(wanted(member, now), now), *tick(machine, now + 0.05)]


def ping(member: MemberId, now: float, *, epoch: int = 7, **more: Any) -> Ping:
    return Ping(member, home(member), epoch, now, **more)


def progress(member: MemberId, grant: Grant, offset: int, *, final: bool = False) -> UpdateProgress:
    return UpdateProgress(member, 7, (Report(grant.piece, grant.loan, Mark(offset), final),))


def accept(machine: Leader, effects: list[Any], now: float) -> list[Grant]:
    """Answer every grant among the effects as a borrower does."""
    grants = sent(effects, Grant)
    for grant in grants:
        machine.handle(progress(grant.member, grant, grant.mark.offset), now)
    return grants


def owners(machine: Leader) -> dict[Piece, MemberId]:
    return {entry.piece: entry.owner for entry in machine.book}


def saves(effects: list[Any]) -> list[Save]:
    return [effect for effect in effects if isinstance(effect, Save)]


def borrower(now: float = 0.0, **settings: Any) -> Borrower:
    return Borrower(A, GROUP, BORN, "n2", MemberSettings(**settings), now)


def connected(now: float = 0.0, good_for: float = 3.0) -> Borrower:
    """A borrower that its leader has let in."""
    machine = borrower(now)
    machine.handle(TICK, now)
    machine.handle(LeaderConnectResponse(A, 7, LEADER, now, good_for, 1), now)
    return machine


def agent(session: str = "a", incarnation: int = 1) -> Agent:
    return Agent(session, incarnation, "n2", MemberSettings())


def grant(shard: int = 0, loan: int = 1, offset: int = -1, **more: Any) -> Grant:
    return Grant(more.pop("member", A), 7, piece(shard), loan, COURSE, Mark(offset), **more)
