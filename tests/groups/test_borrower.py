"""A borrower, move by move."""

from __future__ import annotations

import pytest
from group_machines import BORN, COURSE, GROUP, LEADER, A, agent, borrower, connected, grant, kinds, piece, sent, tick

from holdfast.errors import BrokenInvariant
from holdfast.groups.member.agent import NoAgent
from holdfast.groups.member.borrower import LEGAL, Borrower, BorrowerStatus
from holdfast.groups.protocol.effects import Abandon, Ended, Joined, StartReading, StopReading
from holdfast.groups.protocol.events import Acked, Closed, Drained, JoinGroup, QuitGroup
from holdfast.groups.protocol.messages import (
    Carried,
    Invalidate,
    LeaderConnectResponse,
    LeaderWanted,
    LeaveGroup,
    LeftGroup,
    Ping,
    PingResponse,
    Report,
    Revoke,
    Revoked,
    UpdateProgress,
)
from holdfast.groups.protocol.nouns import Loan, Mark
from holdfast.machine import TICK, Address

LOAN = Loan(A, piece(0), 1, COURSE)


def lent(offset: int = -1) -> Borrower:
    machine = connected()
    machine.handle(grant(offset=offset), 0.0)
    return machine


def test_it_looks_for_a_leader_until_one_answers() -> None:
    machine = borrower()
    assert len(sent(tick(machine, 2.0), LeaderWanted)) >= 5
    effects = machine.handle(LeaderConnectResponse(A, 7, LEADER, 2.0, 3.0), 2.1)
    assert effects == [Joined(A, GROUP, BORN)]
    assert sent(tick(machine, 3.9), LeaderWanted) == []


def test_an_answer_that_took_too_long_is_worth_nothing() -> None:
    machine = borrower()
    tick(machine, 0.0)
    assert machine.handle(LeaderConnectResponse(A, 7, LEADER, 0.0, 3.0), 3.0) == []
    assert machine.status is BorrowerStatus.CONNECTING


def test_trust_is_counted_from_when_the_ping_was_sent() -> None:
    machine = lent()
    tick(machine, 2.0)
    machine.handle(PingResponse(A, 7, echo=2.0, good_for_seconds=3.0), 2.9)
    assert not [e for e in tick(machine, 4.99) if isinstance(e, StopReading)]
    effects = tick(machine, 5.0)
    assert StopReading(LOAN) in effects
    assert machine.status is BorrowerStatus.GONE
    assert machine.recreate


def test_an_unanswered_ping_is_repeated_before_all_is_lost() -> None:
    machine = connected()
    assert len(sent(tick(machine, 2.99), Ping)) >= 3


def test_an_idle_borrower_only_pings() -> None:
    machine = lent()
    now, effects = 0.0, []
    while now < 20.0:
        now = machine.deadline
        effects += machine.handle(TICK, now)
        for ping in sent(effects[-1:], Ping):
            machine.handle(PingResponse(A, 7, ping.sent_at, 3.0), now)
    assert len(effects) <= 11
    assert sent(effects[1:], Ping)[-1].reports == ()


def test_a_revoke_returns_the_last_acknowledged_offset() -> None:
    machine = lent(offset=6)
    machine.handle(Acked(LOAN, ((7, 7),)), 0.1)
    assert machine.handle(Revoke(A, 7, piece(0), 1, 10.0), 0.2) == [StopReading(LOAN)]
    [update] = sent(machine.handle(Drained(LOAN), 0.3), UpdateProgress)
    assert update.reports == (Report(piece(0), 1, Mark(7), final=True),)
    assert kinds(machine.handle(Revoked(A, 7, piece(0), 1), 0.4)) == ["RevokeFinished"]
    assert machine.loans == {}


def test_acknowledgements_that_come_during_a_revoke_count() -> None:
    machine = lent()
    machine.handle(Acked(LOAN, ((0, 3),)), 0.1)
    machine.handle(Revoke(A, 7, piece(0), 1, 10.0), 0.2)
    machine.handle(Acked(LOAN, ((5, 5),)), 0.3)
    [update] = sent(machine.handle(Drained(LOAN), 0.4), UpdateProgress)
    assert update.reports[0].mark == Mark(3, ((5, 5),))


def test_what_is_not_acknowledged_in_time_goes_back() -> None:
    machine = lent()
    machine.handle(Revoke(A, 7, piece(0), 1, 1.5), 0.5)
    assert Abandon(LOAN) not in tick(machine, 1.9)
    effects = tick(machine, 2.0)
    assert Abandon(LOAN) in effects
    assert sent(effects, UpdateProgress)[0].reports[0].final


def test_a_revoke_that_overtakes_its_grant_ends_it_before_it_begins() -> None:
    machine = connected()
    [update] = sent(machine.handle(Revoke(A, 7, piece(0), 4, 10.0), 0.1), UpdateProgress)
    assert update.reports == (Report(piece(0), 4, Mark(), final=True),)
    assert machine.handle(grant(loan=4), 0.2) == []
    assert isinstance(machine.handle(grant(loan=5), 0.3)[0], StartReading)


def test_loans_that_are_over_are_forgotten_once_the_leader_says_so() -> None:
    machine = connected()
    machine.handle(Revoke(A, 7, piece(0), 4, 10.0), 0.1)
    machine.handle(PingResponse(A, 7, 0.0, 3.0, oldest_loan=5), 0.2)
    assert machine._ended == {}
    assert machine.handle(grant(loan=4), 0.3) == [], "and yet do not begin again"


def test_progress_is_gathered() -> None:
    machine = lent()
    for offset in range(100):
        machine.handle(Acked(LOAN, ((offset, offset),)), 0.1 + offset / 1000)
        tick(machine, 0.1 + offset / 1000)
    updates = sent(tick(machine, 0.5), UpdateProgress)
    assert len(updates) == 1
    assert updates[0].reports[0].mark == Mark(99)


def test_progress_that_no_answer_confirmed_goes_with_the_next_ping() -> None:
    machine = lent()
    machine.handle(Acked(LOAN, ((0, 9),)), 0.1)
    tick(machine, 1.0)
    [ping] = sent(tick(machine, 2.0), Ping)
    assert ping.reports[0].mark == Mark(9)
    machine.handle(PingResponse(A, 7, ping.sent_at, 3.0), 2.0)
    assert all(later.reports == () for later in sent(tick(machine, 4.3), Ping))


def test_the_next_life_brings_what_is_acknowledged_even_late() -> None:
    machine = agent()
    machine.handle(JoinGroup(GROUP, BORN), 0.0)
    machine.handle(LeaderConnectResponse(A, 7, LEADER, 0.0, 3.0), 0.0)
    machine.handle(grant(), 0.1)
    machine.handle(Acked(LOAN, ((0, 4),)), 0.2)
    effects = machine.handle(Invalidate(A), 0.3)
    assert kinds(effects) == ["StopReading", "LeaderWanted"]
    [first] = sent(effects, LeaderWanted)
    assert first.member == A._replace(life=2)
    assert first.carried == (Carried(piece(0), COURSE, Mark(4)),)
    # What was in flight may still be acknowledged while there is no leader.
    machine.handle(Acked(LOAN, ((5, 5),)), 0.4)
    assert sent(tick(machine, 1.0), LeaderWanted)[-1].carried[0].mark == Mark(5)
    later = A._replace(life=2)
    effects = machine.handle(LeaderConnectResponse(later, 8, LEADER, 1.0, 3.0), 1.1)
    assert Abandon(LOAN) in effects
    assert sent(effects, Ping)[0].carried[0].mark == Mark(5)
    # Until the leader has it on disk it is carried on.
    machine.handle(PingResponse(later, 8, 1.1, 3.0, kept=False), 1.2)
    assert all(ping.carried for ping in sent(tick(machine, 3.4), Ping))


def test_a_grant_of_the_next_leader_starts_where_this_one_knows_to_be() -> None:
    machine = agent()
    machine.handle(JoinGroup(GROUP, BORN), 0.0)
    machine.handle(LeaderConnectResponse(A, 7, LEADER, 0.0, 3.0), 0.0)
    machine.handle(grant(), 0.1)
    machine.handle(Acked(LOAN, ((0, 4),)), 0.2)
    machine.handle(Invalidate(A), 0.3)
    later = A._replace(life=2)
    machine.handle(LeaderConnectResponse(later, 7, LEADER, 0.3, 3.0), 0.4)
    effects = machine.handle(grant(loan=9, member=later), 0.5)
    assert [e.mark for e in effects if isinstance(e, StartReading)] == [Mark(4)]


def test_unsubscribing_waits_for_what_is_in_flight() -> None:
    machine = lent()
    effects = machine.handle(QuitGroup(GROUP), 0.1)
    assert effects == [StopReading(LOAN)]
    assert sent(tick(machine, 0.1), Ping)[0].leaving
    assert machine.handle(grant(1, 2), 0.2) == []
    assert machine.handle(Revoke(A, 7, piece(0), 1, 1.0), 0.2) == []
    machine.handle(Acked(LOAN, ((0, 0),)), 0.3)
    [words] = sent(machine.handle(Drained(LOAN), 0.4), LeaveGroup)
    assert words.carried == (Carried(piece(0), COURSE, Mark(0)),)
    assert machine.handle(LeftGroup(A), 0.5) == [Ended(A, GROUP)]


def test_unsubscribing_after_everything_was_called_back_does_not_wait() -> None:
    """It waited for acknowledgements of which none was missing, and held up the whole group for `revoke_secs`."""
    machine = lent()
    machine.handle(Revoke(A, 7, piece(0), 1, 1.0), 0.1)
    machine.handle(Drained(LOAN), 0.1)
    assert sent(machine.handle(QuitGroup(GROUP), 0.2), LeaveGroup)


def test_unsubscribing_while_something_is_called_back_waits_no_longer_than_that() -> None:
    machine = lent()
    machine.handle(Revoke(A, 7, piece(0), 1, 1.0), 0.1)
    assert not sent(machine.handle(QuitGroup(GROUP), 0.2), LeaveGroup)
    effects = tick(machine, 1.2)
    assert Abandon(LOAN) in effects
    assert sent(effects, LeaveGroup)


def test_unsubscribing_gives_back_piece_by_piece_until_the_last_words() -> None:
    machine = lent()
    machine.handle(grant(1, 2), 0.0)
    machine.handle(QuitGroup(GROUP), 0.1)
    machine.handle(Drained(LOAN), 0.1)
    [update] = sent(machine.handle(Revoke(A, 7, piece(0), 1, 5.0), 0.2), UpdateProgress)
    assert update.reports[0].final
    assert machine.handle(Revoke(A, 7, piece(1), 2, 5.0), 0.2) == []
    assert kinds(machine.handle(Revoked(A, 7, piece(0), 1), 0.3)) == ["RevokeFinished"]
    [words] = sent(machine.handle(Drained(Loan(A, piece(1), 2, COURSE)), 0.4), LeaveGroup)
    assert [carried.piece for carried in words.carried] == [piece(1)]
    # From now on the last words are all that counts: `final` without progress would have it delivered again.
    assert machine.handle(Revoke(A, 7, piece(1), 2, 5.0), 0.5) == []


def test_unsubscribing_does_not_wait_for_ever() -> None:
    machine = lent()
    machine.handle(QuitGroup(GROUP), 0.0)
    effects = []
    while machine.deadline <= 10.0:
        now = machine.deadline
        effects += machine.handle(TICK, now)
        machine.handle(PingResponse(A, 7, now, 3.0), now)
    assert Abandon(LOAN) in effects
    assert sent(effects, LeaveGroup)


def test_last_words_are_repeated_until_somebody_has_them() -> None:
    machine = lent()
    machine.handle(Closed(), 0.1)
    assert len(sent(tick(machine, 5.0), LeaveGroup)) >= 5
    assert machine.handle(LeftGroup(A), 5.1) == [Ended(A, GROUP)]


def test_it_pings_a_leader_of_its_own_node_less_often() -> None:
    near, far = borrower(), borrower()
    for machine, node in ((near, "n2"), (far, "n1")):
        machine.handle(TICK, 0.0)
        machine.handle(LeaderConnectResponse(A, 7, Address(node, "leader", "g"), 0.0, 4.5), 0.0)
    assert near.deadline == pytest.approx(3.15)
    assert far.deadline == 2.0


def test_last_words_end_some_day() -> None:
    machine = lent()
    machine.handle(Closed(), 0.1)
    assert tick(machine, 61.0)[-1] == Ended(A, GROUP)


def test_there_are_no_cycles() -> None:
    order = list(BorrowerStatus)
    for status, following in LEGAL.items():
        assert all(order.index(after) > order.index(status) for after in following)


def test_an_illegal_move_tells_its_story() -> None:
    machine = connected()
    machine._move(BorrowerStatus.GONE)
    with pytest.raises(BrokenInvariant) as failure:
        machine._move(BorrowerStatus.CONNECTED)
    assert "CONNECTING -> CONNECTED" in str(failure.value)


def test_two_borrowers_of_one_session_on_one_group() -> None:
    machine = agent()
    machine.handle(JoinGroup(GROUP, BORN), 0.0)
    machine.handle(LeaderConnectResponse(A, 7, LEADER, 0.0, 3.0), 0.0)
    machine.handle(grant(), 0.1)
    machine.handle(QuitGroup(GROUP), 0.2)
    machine.handle(JoinGroup(GROUP, BORN), 0.2)
    assert {b.status for b in machine.borrowers.values()} == {BorrowerStatus.UNSUBSCRIBING, BorrowerStatus.CONNECTING}
    machine.handle(JoinGroup(GROUP, BORN), 0.2)
    assert len(machine.borrowers) == 2, "subscribing again changes nothing"
    assert sent(machine.handle(Drained(LOAN), 0.3), LeaveGroup)[0].member == A


def test_without_groups_nothing_happens() -> None:
    machine = NoAgent()
    assert machine.handle(JoinGroup(GROUP, BORN), 0.0) == []
    assert machine.empty
