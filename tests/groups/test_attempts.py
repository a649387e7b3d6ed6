"""Ack timeout, attempts and dead letters."""

from __future__ import annotations

from group_machines import COURSE, GROUP, A, accept, connected, grant, home, join, leader, piece, sent, stream, tick

from holdfast.groups.protocol.effects import Park, Redeliver, StartReading
from holdfast.groups.protocol.events import Acked, Delivered
from holdfast.groups.protocol.messages import Grant, LeaveGroup, PingResponse, Report, UpdateProgress
from holdfast.groups.protocol.nouns import Loan, Mark, Policy
from holdfast.groups.record import GroupRecord

LOAN = Loan(A, piece(0), 1, COURSE)


def lent(policy: Policy, attempts: tuple[tuple[int, int], ...] = ()):
    machine = connected(good_for=100.0)
    effects = machine.handle(grant(policy=policy, attempts=attempts), 0.0)
    return machine, effects


def test_off_by_default() -> None:
    machine, _ = lent(Policy())
    machine.handle(Delivered(LOAN, (0, 1)), 0.1)
    effects = tick(machine, 50.0)
    assert not [e for e in effects if isinstance(e, Redeliver | Park)]


def test_redelivered_after_the_timeout_and_parked_after_so_many_attempts() -> None:
    machine, _ = lent(Policy(2.0, 2))
    machine.handle(Delivered(LOAN, (0, 1)), 0.0)
    machine.handle(Acked(LOAN, ((1, 1),)), 1.0)
    assert [e for e in tick(machine, 2.0) if isinstance(e, Redeliver | Park)] == [Redeliver(LOAN, (0,))]
    machine.handle(Delivered(LOAN, (0,)), 2.0)
    assert [e for e in tick(machine, 4.0) if isinstance(e, Redeliver | Park)] == [Park(LOAN, (0,))]
    machine.handle(Acked(LOAN, ((0, 0),)), 4.1)
    assert not [e for e in tick(machine, 20.0) if isinstance(e, Redeliver | Park)]


def test_without_a_maximum_it_is_redelivered_for_ever() -> None:
    machine, _ = lent(Policy(1.0, None))
    for second in range(5):
        machine.handle(Delivered(LOAN, (0,)), float(second))
        effects = tick(machine, second + 1.0)
        assert [e for e in effects if isinstance(e, Redeliver | Park)] == [Redeliver(LOAN, (0,))]


def test_attempts_travel_with_progress() -> None:
    machine, _ = lent(Policy(None, 3))
    machine.handle(Delivered(LOAN, (4,)), 0.1)
    [update] = sent(tick(machine, 0.5), UpdateProgress)
    assert update.reports[0].attempts == ((4, 1),)


def test_what_was_delivered_in_vain_often_enough_is_parked_before_it_is_read() -> None:
    _, effects = lent(Policy(None, 3), attempts=((4, 3), (5, 1)))
    assert effects[0] == Park(LOAN, (4,))
    assert isinstance(effects[1], StartReading)


def test_the_leader_counts_for_the_group_not_for_the_member() -> None:
    record = GroupRecord(group=GROUP, born="b", policy=Policy(None, 3))
    machine = leader(1, record=record)
    [first] = accept(machine, join(machine, A, 1.0), 1.1)
    machine.handle(UpdateProgress(A, 7, (Report(piece(0), first.loan, Mark(1), False, ((2, 2),)),)), 1.2)
    machine.handle(LeaveGroup(A, home(A), GROUP, "b"), 1.3)
    again = A._replace(number=2)
    [second] = sent(join(machine, again, 1.4), Grant)
    assert second.attempts == ((2, 2),)
    machine.handle(UpdateProgress(again, 7, (Report(piece(0), second.loan, Mark(2)),)), 1.5)
    assert machine.group_streams.progress[stream(0)].attempts == {}


def test_pings_keep_the_loan_while_attempts_are_timed() -> None:
    machine, _ = lent(Policy(30.0, 2))
    machine.handle(Delivered(LOAN, (0,)), 0.1)
    machine.handle(PingResponse(A, 7, 0.0, 100.0), 0.2)
    assert machine.deadline <= 2.0
