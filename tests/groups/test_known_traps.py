"""The traps that the protocol's ancestors fell into, each with a test named after it."""

from __future__ import annotations

from group_machines import (
    BORN,
    GROUP,
    LEADER,
    A,
    B,
    accept,
    agent,
    ask,
    borrower,
    connected,
    find,
    grant,
    home,
    join,
    kinds,
    leader,
    owners,
    piece,
    ping,
    progress,
    sent,
    stream,
    tick,
    wanted,
)

from holdfast.groups.leading.leader import Leader, Phase
from holdfast.groups.member.borrower import BorrowerStatus
from holdfast.groups.protocol.effects import Ended, Retire, Save, StartReading, StopReading
from holdfast.groups.protocol.events import Closed, Drained, JoinGroup, Loaded, StreamInfo, StreamsSeen
from holdfast.groups.protocol.messages import (
    Answer,
    DeleteGroup,
    Grant,
    Invalidate,
    LeaderConnectResponse,
    LeaderWanted,
    LeaveGroup,
    Report,
    Revoke,
    Revoked,
    RevokeFinished,
    UpdateProgress,
)
from holdfast.groups.protocol.nouns import Mark, MemberId
from holdfast.groups.settings import LeaderSettings
from holdfast.machine import TICK, Send


def test_a_finished_stream_does_not_bring_the_leader_down() -> None:
    machine = leader(1, infos=[StreamInfo(stream(0), end=2), StreamInfo(stream(0, 2))])
    [first] = accept(machine, join(machine, A, 1.0), 1.1)
    assert first.piece == piece(0)

    machine.handle(progress(A, first, 1), 1.2)
    effects = tick(machine, 1.3)
    # The next generation is lent, and what is finished is called back like anything else.
    assert [g.piece for g in sent(effects, Grant)] == [piece(0, 2)]
    assert [r.piece for r in sent(effects, Revoke)] == [piece(0)]
    # Late and doubled words about it change nothing.
    machine.handle(progress(A, first, 1, final=True), 1.4)
    tick(machine, 1.5)
    machine.handle(RevokeFinished(A, 7, first.piece, first.loan), 1.6)
    machine.handle(RevokeFinished(A, 7, first.piece, first.loan), 1.6)
    machine.handle(progress(A, first, 1, final=True), 1.7)
    machine.handle(ping(A, 1.8), 1.8)
    assert set(owners(machine)) == {piece(0, 2)}
    assert machine.phase is Phase.LEADING


def test_a_stream_dropped_by_retention_leaves_no_state_and_no_quota() -> None:
    machine = leader(1, infos=[StreamInfo(stream(0), end=9), StreamInfo(stream(0, 2))])
    [first] = accept(machine, join(machine, A, 1.0), 1.1)
    machine.handle(progress(A, first, 3), 1.15)
    machine.handle(StreamsSeen((StreamInfo(stream(0, 2)),)), 1.2)
    effects = tick(machine, 1.3)
    [revoke] = sent(effects, Revoke)
    assert (revoke.piece, revoke.within_seconds) == (piece(0), 0.0)
    assert [g.piece for g in sent(effects, Grant)] == [piece(0, 2)], "its turn has come"

    machine.handle(progress(A, first, 3, final=True), 1.4)
    tick(machine, 1.5)
    machine.handle(RevokeFinished(A, 7, first.piece, first.loan), 1.6)
    effects = tick(machine, 3.0)
    assert any(save.forget == (stream(0),) for save in effects if isinstance(save, Save))
    assert set(machine.group_streams.progress) == {stream(0, 2)}
    assert set(owners(machine)) == {piece(0, 2)}


def test_timers_do_not_multiply_with_disconnects() -> None:
    machine = agent()
    for _ in range(50):
        machine.handle(JoinGroup(GROUP, BORN), 0.0)
        machine.handle(Closed(), 0.0)
    machine.handle(JoinGroup(GROUP, BORN), 1.0)
    asked = [effects for now in (1.1, 1.2, 1.3, 1.4) if (effects := machine.handle(TICK, now))]
    assert len(machine.borrowers) == 1
    assert sum(len(sent(effects, LeaderWanted)) for effects in asked) <= 2


def test_a_revoke_does_not_reset_the_donor() -> None:
    machine = leader(4)
    accept(machine, join(machine, A, 1.0), 1.1)
    kept_before = {p: e.number for p, e in machine.book.entries.items()}
    effects = join(machine, B, 2.0)
    revoked = {revoke.piece for revoke in sent(effects, Revoke)}
    assert len(revoked) == 2
    assert not sent(effects, Invalidate)
    for held in set(kept_before) - revoked:
        entry = machine.book.entries[held]
        assert (entry.owner, entry.number, entry.status.name) == (A, kept_before[held], "GRANTED")

    donor = connected()
    donor.handle(grant(0, 1), 0.1)
    donor.handle(grant(1, 2), 0.1)
    assert [type(e) for e in donor.handle(Revoke(A, 7, piece(0), 1, 10.0), 0.2)] == [StopReading]
    assert donor.status is BorrowerStatus.CONNECTED
    assert donor.loans[piece(1)].status.name == "GRANTED"


def test_a_late_find_leader_timer_is_harmless() -> None:
    machine = connected(now=0.0)
    assert sent(machine.handle(TICK, 0.2), LeaderWanted) == []
    assert machine.status is BorrowerStatus.CONNECTED


def test_a_duplicate_connect_response_is_harmless() -> None:
    machine = connected()
    machine.handle(grant(), 0.1)
    for epoch in (7, 7, 8):
        assert machine.handle(LeaderConnectResponse(A, epoch, LEADER, 0.0, 3.0), 0.2) == []
    assert (machine.status, machine.epoch, len(machine.loans)) == (BorrowerStatus.CONNECTED, 7, 1)


def test_a_duplicate_grant_is_harmless() -> None:
    machine = connected()
    assert kinds(machine.handle(grant(), 0.1)) == ["StartReading", "UpdateProgress"]
    assert kinds(machine.handle(grant(), 0.2)) == ["UpdateProgress"], "it says again that it has it"
    machine.handle(Revoke(A, 7, piece(0), 1, 10.0), 0.3)
    machine.handle(Drained(machine.loans[piece(0)].loan), 0.4)
    machine.handle(Revoked(A, 7, piece(0), 1), 0.5)
    assert machine.handle(grant(), 0.6) == [], "a copy that comes after the end does not begin it again"
    assert machine.loans == {}


def test_a_revoked_for_an_unknown_stream_is_harmless() -> None:
    machine = connected()
    assert kinds(machine.handle(Revoked(A, 7, piece(5), 3), 0.1)) == ["RevokeFinished"]
    assert machine.status is BorrowerStatus.CONNECTED


def test_progress_from_a_stranger_is_harmless() -> None:
    machine = leader(1)
    [lent] = accept(machine, join(machine, A, 1.0), 1.1)
    report = Report(piece(0), lent.loan, Mark(1000), final=True)
    assert machine.handle(UpdateProgress(B, 7, (report,)), 1.2) == []
    assert machine.handle(UpdateProgress(A, 6, (report,)), 1.2) == []
    assert machine.group_streams.progress[stream(0)].floor == 0
    assert owners(machine) == {piece(0): A}
    assert sent(machine.handle(ping(B, 1.3), 1.3), Invalidate) == [Invalidate(B)]


def test_a_deleted_group_is_not_recreated_by_its_old_members() -> None:
    machine = leader(1)
    accept(machine, join(machine, A, 1.0), 1.1)
    effects = machine.handle(ask(DeleteGroup()), 2.0)
    assert kinds(effects) == ["Save", "Invalidate", "Answer", "Retire"]
    assert effects[0].delete
    assert sent(effects, Invalidate) == [Invalidate(A, deleted=True)]

    # The member that hears it ends; one that does not hear it asks, and is told.
    told = connected()
    assert told.handle(Invalidate(A, deleted=True), 0.1) == [Ended(A, GROUP, deleted=True)]
    assert not told.recreate
    after = Leader(GROUP, 8, "n1", LeaderSettings(), 1e9, 3.0)
    after.handle(TICK, 3.0)
    after.handle(wanted(B, 3.0), 3.0)
    effects = after.handle(Loaded(None), 3.1)
    assert sent(effects, Invalidate) == [Invalidate(B, deleted=True)]
    assert not [e for e in effects if isinstance(e, Save)]
    assert isinstance(tick(after, 30.0)[-1], Retire)


def test_kick_takeover_and_clean_start_tell_the_leader_at_once() -> None:
    machine = agent()
    machine.handle(JoinGroup(GROUP, BORN), 0.0)
    machine.handle(LeaderConnectResponse(A, 7, LEADER, 0.0, 3.0), 0.0)
    machine.handle(grant(offset=4), 0.1)
    effects = machine.handle(Closed(), 0.2)
    assert kinds(effects) == ["StopReading", "Abandon", "LeaveGroup"]
    assert effects[-1].to == LEADER

    lending = leader(1)
    accept(lending, join(lending, A, 1.0), 1.1)
    join(lending, B, 1.2)
    lending.handle(LeaveGroup(A, home(A), GROUP, BORN), 1.3)
    assert A not in lending.seats
    assert [g.member for g in sent(tick(lending, 1.4), Grant)] == [B]


def test_a_member_that_reconnects_inside_the_ping_timeout_is_not_counted_twice() -> None:
    machine = leader(4)
    accept(machine, join(machine, A, 1.0), 1.1)
    effects = join(machine, B, 1.2)
    for revoke in sent(effects, Revoke):
        machine.handle(UpdateProgress(A, 7, (Report(revoke.piece, revoke.loan, Mark(), True),)), 1.3)
    for revoked in sent(tick(machine, 1.35), Revoked):
        machine.handle(RevokeFinished(A, 7, revoked.piece, revoked.loan), 1.4)
    accept(machine, tick(machine, 1.5), 1.5)
    # B's node dies; the client comes back at once, in a new incarnation, on another node.
    again = MemberId("b", 2)
    effects = join(machine, again, 2.0)
    assert [seat.member for seat in machine.seats.values() if seat.active] == [A, again]
    # The old seat's streams are not lent while it may still read them, and A gives up nothing for a third member.
    assert not sent(effects, Grant)
    assert {revoke.member for revoke in sent(effects, Revoke)} == {B}
    effects = [*machine.handle(ping(A, 3.0), 3.0), *machine.handle(ping(again, 3.0), 3.0), *tick(machine, 5.0)]
    assert {g.member for g in sent(effects, Grant)} == {again}
    assert len({g.piece for g in sent(effects, Grant)}) == 2


def test_a_new_life_takes_the_place_of_the_old_one_at_once() -> None:
    machine = leader(1)
    accept(machine, join(machine, A, 1.0), 1.1)
    later = A._replace(life=2)
    effects = join(machine, later, 1.5)
    assert [g.member for g in sent(effects, Grant)] == [later]
    assert list(machine.seats) == [later]
    assert machine.handle(wanted(A, 1.0), 1.6) == [], "its earlier words are late"


def test_a_grant_from_a_seat_that_was_lost_unnoticed_is_refused() -> None:
    # The leader let it in, lent to it, heard nothing and gave the seat up; the borrower knew nothing of all that.
    machine = borrower()
    machine.handle(TICK, 0.0)
    machine.handle(LeaderConnectResponse(A, 7, LEADER, 9.0, 3.0, oldest_loan=5), 9.1)
    assert machine.handle(grant(loan=3), 9.2) == []
    assert [type(e) for e in machine.handle(grant(loan=5), 9.3)] == [StartReading, Send]


def test_words_to_a_ghost_are_answered_so_that_it_is_let_go() -> None:
    machine = agent()
    machine.handle(JoinGroup(GROUP, BORN), 0.0)
    machine.handle(Closed(), 0.1)
    assert machine.empty
    [answer] = machine.handle(grant(), 0.2)
    assert isinstance(answer.message, LeaveGroup)
    assert answer.message.member == A


def test_an_operator_who_asks_twice_is_served_once() -> None:
    machine = leader(1)
    join(machine, A, 1.0)
    [refused] = sent(machine.handle(ask(DeleteGroup(if_idle=True)), 1.1), Answer)
    assert "has members" in refused.error


def test_a_lease_member_too_is_let_in_once() -> None:
    machine = leader(2)
    for now in (1.0, 1.1, 1.2):
        machine.handle(find(A, now), now)
        tick(machine, now + 0.05)
    assert len(machine.seats) == 1
    assert set(owners(machine).values()) == {A}
