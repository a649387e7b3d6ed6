"""A batch member and the leader's side of it: seed 000, state by state."""

from __future__ import annotations

import pytest
from group_machines import BORN, COURSE, GROUP, LEADER, A, find, join, kinds, leader, owners, piece, sent, tick

from holdfast.errors import BrokenInvariant
from holdfast.groups.leading.batch_seat import LEGAL as SEAT_LEGAL
from holdfast.groups.leading.batch_seat import BatchStatus
from holdfast.groups.member.batch_member import LEGAL, BatchMember, BatchMemberStatus
from holdfast.groups.protocol.effects import Abandon, Ended, Joined, StartReading, StopReading
from holdfast.groups.protocol.events import Acked, Drained, Leave
from holdfast.groups.protocol.messages import (
    Carried,
    FindLeader,
    Grant,
    Invalidate,
    Leased,
    LeaseStreams,
    LeaveGroup,
    LeftGroup,
    RenewStreamLease,
    Report,
    UpdateStreams,
    UpdateStreamStates,
)
from holdfast.groups.protocol.nouns import Loan, Mark, MemberId
from holdfast.groups.settings import MemberSettings
from holdfast.machine import Address

M = MemberId("spark")
HOME = Address("n2", "batch", "spark/1")


def leased(*shards: int, offset: int = -1) -> tuple[Leased, ...]:
    return tuple(Leased(piece(shard), COURSE, Mark(offset)) for shard in shards)


def loan(shard: int, version: int, life: int = 1) -> Loan:
    return Loan(M._replace(life=life), piece(shard), version, COURSE)


def connecting() -> BatchMember:
    return BatchMember(M, GROUP, BORN, HOME, MemberSettings(), 0.0)


def replaying(*shards: int) -> BatchMember:
    machine = connecting()
    tick(machine, 0.0)
    machine.handle(LeaseStreams(M, 7, LEADER, 1, leased(*shards), 0.0, 3.0), 0.1)
    return machine


def updating() -> BatchMember:
    machine = replaying(0, 1)
    machine.handle(UpdateStreams(M, 7, 1, 2, leased(1, 2), 5.0), 0.5)
    return machine


# -------------------------------------------------------------------------------------- connecting


def test_find_leader_is_repeated_on_timeout() -> None:
    machine = connecting()
    assert len(sent(tick(machine, 1.0), FindLeader)) >= 3


def test_lease_streams_begins_replaying() -> None:
    machine = connecting()
    tick(machine, 0.0)
    effects = machine.handle(LeaseStreams(M, 7, LEADER, 1, leased(0, 1, offset=4), 0.0, 3.0), 0.1)
    assert machine.status is BatchMemberStatus.REPLAYING
    assert Joined(M, GROUP, BORN) in effects
    assert StartReading(loan(0, 1), Mark(4)) in effects
    [states] = sent(effects, UpdateStreamStates)
    assert (states.version, states.old_version, len(states.states)) == (1, None, 2)


def test_a_lease_that_comes_too_late_is_not_taken() -> None:
    machine = connecting()
    tick(machine, 0.0)
    assert machine.handle(LeaseStreams(M, 7, LEADER, 1, leased(0), 0.0, 3.0), 3.0) == []


# --------------------------------------------------------------------------------------- replaying


def test_without_a_renewal_in_time_it_starts_over() -> None:
    machine = replaying(0)
    machine.handle(Acked(loan(0, 1), ((0, 2),)), 0.2)
    effects = tick(machine, 3.0)
    assert StopReading(loan(0, 1)) in effects
    assert machine.status is BatchMemberStatus.CONNECTING
    asked = sent(effects, FindLeader)[-1]
    assert asked.member == M._replace(life=2)
    assert asked.carried == (Carried(piece(0), COURSE, Mark(2)),)


def test_each_renewal_counts_from_the_states_it_answers() -> None:
    machine = replaying(0)
    [states] = sent(tick(machine, 2.0), UpdateStreamStates)[-1:]
    machine.handle(RenewStreamLease(M, 7, 1, None, states.sent_at, 3.0), 2.9)
    tick(machine, states.sent_at + 2.9)
    assert machine.status is BatchMemberStatus.REPLAYING
    tick(machine, states.sent_at + 3.0)
    assert machine.status is BatchMemberStatus.CONNECTING


def test_progress_is_reported_and_gathered() -> None:
    machine = replaying(0)
    for offset in range(50):
        machine.handle(Acked(loan(0, 1), ((offset, offset),)), 0.2 + offset / 1000)
    [states] = sent(tick(machine, 0.4), UpdateStreamStates)
    assert states.states == (Report(piece(0), 1, Mark(49)),)


def test_an_unknown_version_makes_it_start_over() -> None:
    machine = replaying(0)
    machine.handle(RenewStreamLease(M, 7, 9, None, 0.0, 3.0), 0.5)
    assert machine.status is BatchMemberStatus.CONNECTING
    machine = replaying(0)
    machine.handle(UpdateStreams(M, 7, 8, 9, (), 5.0), 0.5)
    assert machine.status is BatchMemberStatus.CONNECTING


def test_an_old_version_is_late_and_harmless() -> None:
    machine = updating()
    machine.handle(Drained(loan(0, 1)), 0.6)
    machine.handle(RenewStreamLease(M, 7, 2, None, 0.5, 3.0), 0.7)
    for late in (
        RenewStreamLease(M, 7, 1, None, 0.1, 3.0),
        RenewStreamLease(M, 7, 1, 2, 0.1, 3.0),
        LeaseStreams(M, 7, LEADER, 1, leased(0, 1), 0.0, 3.0),
        RenewStreamLease(M, 6, 40, None, 0.1, 3.0),
    ):
        assert machine.handle(late, 0.8) == []
    assert (machine.status, machine.version) == (BatchMemberStatus.REPLAYING, 2)


def test_invalidate_makes_it_start_over_with_a_new_life() -> None:
    machine = replaying(0)
    machine.handle(Invalidate(M), 0.5)
    assert (machine.status, machine.member.life) == (BatchMemberStatus.CONNECTING, 2)
    assert machine.handle(Invalidate(M), 0.6) == [], "said to the earlier life"


def test_a_deleted_group_is_the_end() -> None:
    machine = replaying(0)
    assert machine.handle(Invalidate(M, deleted=True), 0.5)[-1] == Ended(M, GROUP, deleted=True)


# ---------------------------------------------------------------------------------------- updating


def test_update_streams_takes_over_what_is_not_in_the_new_set() -> None:
    machine = replaying(0, 1)
    effects = machine.handle(UpdateStreams(M, 7, 1, 2, leased(1, 2), 5.0), 0.5)
    assert machine.status is BatchMemberStatus.UPDATING
    assert StopReading(loan(0, 1)) in effects
    assert StartReading(loan(2, 2), Mark()) in effects
    assert not [e for e in effects if isinstance(e, StartReading) and e.loan.piece == piece(1)], "read on, no pause"
    [states] = sent(effects, UpdateStreamStates)
    assert (states.version, states.old_version) == (2, 1)
    assert [report.final for report in states.old_states] == [False]


def test_the_update_is_answered_as_often_as_it_is_said() -> None:
    machine = updating()
    effects = machine.handle(UpdateStreams(M, 7, 1, 2, leased(1, 2), 5.0), 0.6)
    assert kinds(effects) == ["UpdateStreamStates"]


def test_what_is_finished_is_reported_final_and_the_renewal_ends_the_exchange() -> None:
    machine = updating()
    machine.handle(Acked(loan(0, 1), ((0, 3),)), 0.6)
    [states] = sent(machine.handle(Drained(loan(0, 1)), 0.7), UpdateStreamStates)
    assert states.old_states == (Report(piece(0), 1, Mark(3), final=True),)
    assert machine.handle(RenewStreamLease(M, 7, 1, 2, 0.7, 3.0), 0.8) == []
    [states] = sent(machine.handle(RenewStreamLease(M, 7, 2, None, 0.7, 3.0), 0.9), UpdateStreamStates)
    assert machine.status is BatchMemberStatus.REPLAYING
    assert (states.version, states.old_version, states.old_states) == (2, None, ())


def test_what_is_not_finished_in_time_goes_back() -> None:
    machine = replaying(0, 1)
    machine.handle(UpdateStreams(M, 7, 1, 2, leased(1), 1.0), 0.5)
    effects = tick(machine, 1.5)
    assert Abandon(loan(0, 1)) in effects
    assert sent(effects, UpdateStreamStates)[-1].old_states[0].final


def test_an_exchange_that_ends_too_early_makes_it_start_over() -> None:
    machine = updating()
    machine.handle(RenewStreamLease(M, 7, 2, None, 0.5, 3.0), 0.6)
    assert machine.status is BatchMemberStatus.CONNECTING


def test_leaving_tells_everything() -> None:
    machine = updating()
    machine.handle(Acked(loan(1, 1), ((0, 5),)), 0.6)
    effects = machine.handle(Leave(), 0.7)
    [words] = sent(effects, LeaveGroup)
    assert {(c.piece, c.mark) for c in words.carried} == {
        (piece(0), Mark()),
        (piece(1), Mark(5)),
        (piece(2), Mark()),
    }
    assert sent(tick(machine, 2.0), LeaveGroup)
    assert machine.handle(LeftGroup(M), 2.1) == [Ended(M, GROUP)]


def test_an_illegal_move_tells_its_story() -> None:
    machine = connecting()
    with pytest.raises(BrokenInvariant):
        machine._move(BatchMemberStatus.UPDATING)
    assert BatchMemberStatus.UPDATING not in LEGAL[BatchMemberStatus.CONNECTING]


# --------------------------------------------------------------------------------- the leader's side


def states(version: int, *reports: Report, old: int | None = None, olds: tuple[Report, ...] = (), at: float = 0.0):
    return UpdateStreamStates(M, HOME, 7, version, reports, at, old, olds)


def led():
    """A leader with a batch member that holds both streams, replaying version 1."""
    machine = leader(2)
    machine.handle(find(M, 1.0), 1.0)
    [lease] = sent(tick(machine, 1.1), LeaseStreams)
    machine.handle(states(lease.version, at=1.2), 1.2)
    tick(machine, 1.6)
    return machine


def test_lease_streams_is_repeated_until_states_arrive() -> None:
    machine = leader(2)
    machine.handle(find(M, 1.0), 1.0)
    assert len(sent(tick(machine, 2.2), LeaseStreams)) >= 3
    assert sent(machine.handle(states(1, at=2.3), 2.3), RenewStreamLease)[0].version == 1
    assert not sent(tick(machine, 3.0), LeaseStreams)


def test_an_exchange_from_the_leaders_side() -> None:
    machine = led()
    effects = join(machine, A, 2.0)
    [update] = sent(effects, UpdateStreams)
    assert (update.old_version, update.version, len(update.streams)) == (1, 2, 1)
    taken = next(p for p in (piece(0), piece(1)) if p != update.streams[0].piece)
    old = (Report(taken, 1, Mark(4)),)
    [renew] = sent(machine.handle(states(2, old=1, olds=old, at=2.1), 2.1), RenewStreamLease)
    assert (renew.version, renew.new_version) == (1, 2)
    assert not sent(tick(machine, 2.2), Grant), "nothing is lent on before it is finished"

    old = (Report(taken, 1, Mark(6), final=True),)
    machine.handle(states(2, old=1, olds=old, at=2.3), 2.3)
    effects = tick(machine, 2.4)
    assert kinds(effects)[:2] == ["Save", "RenewStreamLease"]
    assert not sent(effects, Grant), "nor before the member says that it has gone over"
    machine.handle(states(2, at=2.5), 2.5)
    [lent] = sent(tick(machine, 2.6), Grant)
    assert (lent.piece, lent.mark, lent.member) == (taken, Mark(6), A)


def test_states_of_the_old_version_are_taken_while_the_update_is_on_its_way() -> None:
    machine = led()
    join(machine, A, 2.0)
    [renew] = sent(machine.handle(states(1, Report(piece(0), 1, Mark(3)), at=2.1), 2.1), RenewStreamLease)
    assert (renew.version, renew.new_version) == (1, None)
    assert machine.group_streams.progress[piece(0).stream].floor == 4


def test_a_version_that_was_never_given_is_refused() -> None:
    machine = led()
    assert sent(machine.handle(states(5, at=2.0), 2.0), Invalidate) == [Invalidate(M)]


def test_states_of_a_stranger_are_refused() -> None:
    machine = leader(1)
    assert sent(machine.handle(states(1, at=1.0), 1.0), Invalidate) == [Invalidate(M)]


def test_a_silent_lease_member_loses_its_set() -> None:
    machine = led()
    tick(machine, 5.0)
    assert owners(machine) == {}


def test_seats_move_as_drawn() -> None:
    assert {status: after for status, after in SEAT_LEGAL.items() if len(after) != 1} == {}
    assert SEAT_LEGAL[BatchStatus.CONFIRMING] == {BatchStatus.REPLAYING}
