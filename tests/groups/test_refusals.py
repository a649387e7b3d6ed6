"""A message that is too large for one member of a group is another's; only what is too large for all is set aside."""

from __future__ import annotations

from typing import Any

import pytest
from group_machines import (
    GROUP,
    A,
    B,
    C,
    accept,
    connected,
    find,
    grant,
    join,
    kinds,
    leader,
    owners,
    piece,
    ping,
    sent,
    stream,
    tick,
    wanted,
)

from holdfast.cursors import Cursor
from holdfast.groups.leading.leader import Leader
from holdfast.groups.leading.refusals import Refusals
from holdfast.groups.progress import StreamProgress
from holdfast.groups.protocol.effects import ChangeLargestPacket, Park, StartReading, StopReading
from holdfast.groups.protocol.events import Drained, Refused, Unsendable
from holdfast.groups.protocol.messages import (
    Grant,
    LargestPacket,
    PingResponse,
    Report,
    Revoke,
    Revoked,
    RevokeFinished,
    UpdateProgress,
)
from holdfast.groups.protocol.nouns import NO_LIMIT, Key, Loan, Mark, MemberId, Piece
from holdfast.groups.record import GroupRecord

LOAN = Loan(A, piece(0), 1, "b.0")


def seated(machine: Leader, member: MemberId, now: float, packet_max: int) -> None:
    said = [*machine.handle(wanted(member, now, packet_max=packet_max), now), *tick(machine, now + 0.05)]
    settle(machine, said, now + 0.05)


def settle(machine: Leader, said: list[Any], now: float) -> list[Grant]:
    """Answer grants and revokes as borrowers with nothing in flight do, until nothing is asked any more."""
    granted: list[Grant] = []
    while said:
        granted += accept(machine, said, now)
        more: list[Any] = []
        for revoke in sent(said, Revoke):
            final = Report(revoke.piece, revoke.loan, Mark(), final=True)
            more += machine.handle(UpdateProgress(revoke.member, 7, (final,)), now)
        for revoked in sent(said, Revoked):
            more += machine.handle(RevokeFinished(revoked.member, 7, revoked.piece, revoked.loan), now)
        said = [*more, *tick(machine, now + 0.03)]
    return granted


def refuse(machine: Leader, lent: Piece, now: float, size: int, offset: int = 5) -> list[Grant]:
    entry = machine.book.entries[lent]
    report = Report(lent, entry.number, Mark(offset - 1), refused=((offset, size),))
    said = machine.handle(UpdateProgress(entry.owner, 7, (report,)), now)
    return settle(machine, [*said, *tick(machine, now + 0.05)], now + 0.05)


@pytest.mark.parametrize("key", ["publisher", "topic", "message"])
def test_a_piece_goes_to_somebody_who_takes_what_its_holder_refused(key: Key) -> None:
    machine = leader(2, ping_timeout_seconds=1e6, record=GroupRecord(group=GROUP, born="b", key=key))
    seated(machine, A, 1.0, 1000)
    seated(machine, B, 2.0, NO_LIMIT)
    before = owners(machine)
    mine = min(lent for lent, owner in before.items() if owner == A)
    granted = refuse(machine, mine, 3.0, 1500, offset=mine.part)
    assert {each.member for each in granted} == {B} and mine in [each.piece for each in granted]
    assert all(each.set_aside == () for each in granted)
    theirs = {lent for lent, owner in before.items() if owner == B}
    assert all(owners(machine)[lent] == B for lent in theirs), "nothing is taken from whoever helps out"
    # It is not given back before the message is done, nor until a rest is over.
    settle(machine, tick(machine, 30.0), 30.0)
    assert owners(machine)[mine] == B
    entry = machine.book.entries[mine]
    machine.handle(UpdateProgress(B, 7, (Report(mine, entry.number, Mark(mine.part)),)), 30.1)
    machine.handle(ping(A, 30.1), 30.1)
    settle(machine, tick(machine, 41.0), 41.0)
    loads = [list(owners(machine).values()).count(member) for member in (A, B)]
    assert abs(loads[0] - loads[1]) <= 1, "everybody has a share again"


def test_whoever_may_take_it_is_asked_before_it_is_set_aside() -> None:
    machine = leader(3, ping_timeout_seconds=1e6)
    for at, member in enumerate((A, B, C)):
        seated(machine, member, 1.0 + at, 1000)
    mine = next(lent for lent, owner in owners(machine).items() if owner == A)
    # By its least size others could take it: it goes round.
    [second] = refuse(machine, mine, 5.0, 990)
    assert (second.member, second.set_aside) == (B, ())
    [third] = refuse(machine, mine, 6.0, 990)
    assert (third.member, third.set_aside) == (C, ())
    [last] = refuse(machine, mine, 7.0, 990)
    assert last.set_aside == (5,)


def test_nobody_is_asked_who_cannot_take_it_by_its_size() -> None:
    machine = leader(2, ping_timeout_seconds=1e6)
    seated(machine, A, 1.0, 1000)
    seated(machine, B, 2.0, 1200)
    mine = next(lent for lent, owner in owners(machine).items() if owner == A)
    [granted] = refuse(machine, mine, 5.0, 1500)
    assert granted.set_aside == (5,)
    assert granted.largest_packet == 1200


def test_a_refusal_is_over_once_the_message_is_done_though_its_stream_was_cut_since() -> None:
    """By message a neighbour's cursor says nothing about it: an idle one kept the refusal, and the piece, for good."""
    refusals = Refusals(rest_seconds=10.0)
    refusals.note(A, Piece(stream(0), 1, 2), ((1, 5000),), 0.0)
    quarters = {Piece(stream(0), part, 4): Cursor(1 if part == 1 else -1) for part in range(4)}
    refusals.sweep({stream(0): StreamProgress(stream(0), "b.0", quarters, key="message")}, 10.0)
    assert not refusals


def test_a_batch_member_takes_any() -> None:
    machine = leader(2, ping_timeout_seconds=1e6)
    seated(machine, A, 1.0, 1000)
    said = machine.handle(find(B, 2.0), 2.0)
    assert sent(said, LargestPacket) == [LargestPacket(A, 7, NO_LIMIT)]


def test_members_hear_at_once_of_one_that_takes_more_and_with_a_ping_of_one_that_went() -> None:
    machine = leader(4, ping_timeout_seconds=1e6)
    seated(machine, A, 1.0, 1000)
    said = machine.handle(wanted(B, 2.0, packet_max=2000), 2.0)
    assert sent(said, LargestPacket) == [LargestPacket(A, 7, 2000)]
    settle(machine, tick(machine, 2.1), 2.1)
    said = join(machine, C, 3.0)
    assert {each.member for each in sent(said, LargestPacket)} == {A, B}
    [response] = sent(machine.handle(ping(A, 3.5), 3.5), PingResponse)
    assert response.largest_packet == NO_LIMIT


def test_a_borrower_stops_at_what_it_refused_and_says_so() -> None:
    machine = connected()
    machine.handle(grant(largest_packet=2000), 0.1)
    effects = machine.handle(Refused(LOAN, ((5, 1500),)), 0.2)
    assert kinds(effects) == ["StopReading", "UpdateProgress"]
    assert sent(effects, UpdateProgress)[0].reports == (Report(piece(0), 1, Mark(), refused=((5, 1500),)),)
    machine.handle(Drained(LOAN), 0.3)
    [answer] = sent(machine.handle(Revoke(A, 7, piece(0), 1, 10.0), 0.4), UpdateProgress)
    assert answer.reports == (Report(piece(0), 1, Mark(), True, refused=((5, 1500),)),)
    assert kinds(machine.handle(Revoked(A, 7, piece(0), 1), 0.5)) == ["RevokeFinished"]


def test_a_borrower_sets_aside_what_nobody_takes_and_reads_on() -> None:
    machine = connected()
    started = machine.handle(grant(largest_packet=2000, set_aside=(3,)), 0.1)
    assert started[0] == Park(LOAN, (3,), too_large=True)
    assert [e.largest_packet for e in started if isinstance(e, StartReading)] == [2000]
    effects = machine.handle(Unsendable(LOAN, (5, 6)), 0.2)
    assert effects == [Park(LOAN, (5, 6), too_large=True)]
    assert not any(isinstance(effect, StopReading) for effect in effects)


def test_a_borrower_passes_on_what_the_largest_packet_is() -> None:
    machine = connected()
    machine.handle(grant(largest_packet=2000), 0.1)
    assert machine.handle(LargestPacket(A, 7, 3000), 0.2) == [ChangeLargestPacket(A, 3000)]
    assert machine.handle(LargestPacket(A, 7, 3000), 0.3) == []
    assert machine.handle(LargestPacket(A, 6, 9000), 0.4) == [], "of another leader"
