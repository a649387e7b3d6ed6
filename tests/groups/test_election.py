"""Who leads: one lease per node, one claim per group, and a registry that finds or starts the leader."""

from __future__ import annotations

import pytest
from group_machines import COURSE, GROUP, A, B, home, piece, ping, sent, tick, wanted

from holdfast.errors import BrokenInvariant
from holdfast.groups.leading.election import ClaimState, Election
from holdfast.groups.leading.registry import Registry
from holdfast.groups.protocol.effects import Claim, OpenLease, RenewLease, Resign, StartLeader, StopLeader, TrustUntil
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
from holdfast.groups.protocol.messages import Carried, Invalidate, LeaderWanted, LeaveGroup, UpdateProgress
from holdfast.groups.protocol.nouns import GroupId, Mark
from holdfast.groups.settings import ElectionSettings
from holdfast.machine import TICK, Address, Send

HERE = Address("n2", "leader", str(GROUP))
THERE = Address("n9", "leader", str(GROUP))


def registry() -> Registry:
    return Registry("n2", ElectionSettings())


def leading(now: float = 0.0) -> Registry:
    """A registry whose node leads the group, at epoch 5, under lease 3."""
    machine = registry()
    machine.handle(wanted(A, now), now)
    machine.handle(LeaseOpened(3, now), now)
    machine.handle(Claimed(GROUP, 3, 5), now)
    return machine


def test_the_first_question_makes_it_claim_the_group() -> None:
    machine = registry()
    assert machine.handle(wanted(A, 0.0), 0.0) == [OpenLease(0.0, 5.0)]
    assert machine.handle(wanted(B, 0.0), 0.0) == []
    assert machine.handle(LeaseOpened(3, 0.0), 0.1) == [Claim(GROUP, 3)]
    effects = machine.handle(Claimed(GROUP, 3, 5), 0.2)
    assert effects[0] == StartLeader(GROUP, 5, 4.5, in_doubt=True), "counted from when the lease was asked for"
    assert {m.member for m in sent(effects, LeaderWanted)} == {A, B}
    assert machine.handle(wanted(A, 1.0), 1.0) == [Send(HERE, wanted(A, 1.0))]


def test_of_many_nodes_one_leads_and_the_others_pass_on() -> None:
    machine = registry()
    machine.handle(wanted(A, 0.0), 0.0)
    machine.handle(LeaseOpened(3, 0.0), 0.0)
    assert machine.handle(Taken(GROUP, "n9", 5), 0.1) == [Send(THERE, wanted(A, 0.0))]
    assert machine.handle(wanted(B, 0.15), 0.15) == [Send(THERE, wanted(B, 0.15))], "it remembers, for a moment"
    assert machine.handle(wanted(B, 9.0), 9.0) == [Claim(GROUP, 3)], "and then looks again"


def test_what_another_node_passed_on_is_not_passed_on_again() -> None:
    machine = registry()
    machine.handle(wanted(A, 0.0), 0.0)
    machine.handle(LeaseOpened(3, 0.0), 0.0)
    machine.handle(Taken(GROUP, "n9", 5), 0.1)
    foreign = LeaderWanted(A, Address("n9", "agent", "a/1"), GROUP, "b", 0.0)
    assert machine.handle(foreign, 0.12) == [Claim(GROUP, 3)]
    assert machine.handle(Taken(GROUP, "n9", 5), 0.13) == []


def test_the_lease_is_renewed_well_inside_it() -> None:
    machine = leading()
    assert tick(machine, 1.5) == [RenewLease(3, 1.5)]
    assert machine.handle(LeaseRenewed(3, 1.5), 1.6) == [TrustUntil(6.0)]
    assert tick(machine, 3.0) == [RenewLease(3, 3.0)]


def test_a_renewal_that_fails_is_tried_again_and_trust_is_not_extended() -> None:
    machine = leading()
    tick(machine, 1.5)
    assert machine.handle(LeaseFailed(), 1.8) == []
    assert tick(machine, 2.1) == [RenewLease(3, pytest.approx(2.1))]
    assert machine.election.trusted_until == 4.5


def test_a_lost_lease_stops_every_leader() -> None:
    machine = leading()
    other = GroupId("h", "#")
    machine.handle(LeaderWanted(A, home(A), other, "b", 0.0), 0.0)
    machine.handle(Claimed(other, 3, 6), 0.0)
    assert machine.handle(LeaseLost(3), 7.0) == [StopLeader(GROUP, 5), StopLeader(other, 6)]
    assert machine.handle(wanted(A, 7.1), 7.1) == [OpenLease(7.1, 5.0)]


def test_a_claim_made_under_a_lease_that_is_lost_is_given_back() -> None:
    machine = registry()
    machine.handle(wanted(A, 0.0), 0.0)
    machine.handle(LeaseOpened(3, 0.0), 0.0)
    machine.handle(LeaseLost(3), 6.0)
    assert machine.handle(Claimed(GROUP, 3, 5), 6.1) == [Resign(GROUP, 5)]


def test_a_leader_that_went_cleanly_is_followed_at_once() -> None:
    machine = leading()
    assert machine.handle(LeaderRetired(GROUP, 5, clean=True), 1.0) == [Resign(GROUP, 5)]
    assert machine.handle(wanted(A, 1.1), 1.1) == [Claim(GROUP, 3)]


def test_a_leader_that_broke_down_is_followed_when_its_loans_have_ended() -> None:
    machine = leading()
    assert machine.handle(LeaderRetired(GROUP, 5, clean=False), 1.0) == []
    assert machine.handle(wanted(A, 1.1), 1.1) == [], "nobody leads meanwhile"
    machine.handle(TICK, 1.5)
    machine.handle(LeaseRenewed(3, 1.5), 1.5)
    machine.handle(TICK, 3.0)
    machine.handle(LeaseRenewed(3, 3.0), 3.0)
    assert machine.handle(TICK, 4.5) == [RenewLease(3, 4.5)]
    machine.handle(LeaseRenewed(3, 4.5), 4.5)
    assert machine.handle(TICK, 6.0) == [RenewLease(3, 6.0), Resign(GROUP, 5), Claim(GROUP, 3)]


def test_questions_outlive_a_store_that_is_away() -> None:
    machine = registry()
    machine.handle(wanted(A, 0.0), 0.0)
    assert machine.handle(LeaseFailed(), 0.3) == []
    assert tick(machine, 0.7) == [OpenLease(pytest.approx(0.6), 5.0)]
    machine.handle(LeaseOpened(3, 0.6), 0.7)
    machine.handle(ClaimFailed(GROUP), 1.0)
    assert machine.handle(wanted(A, 1.1), 1.1) == [Claim(GROUP, 3)]


def test_words_to_a_leader_that_is_not_here() -> None:
    machine = registry()
    assert machine.handle(ping(A, 0.0), 0.0) == [Send(home(A), Invalidate(A))]
    assert machine.handle(UpdateProgress(A, 7, ()), 0.0) == []
    assert machine.handle(LeaveGroup(A, home(A), GROUP, "b"), 0.0) == [], "nothing to tell: no election for that"
    carried = (Carried(piece(0), COURSE, Mark(3)),)
    assert machine.handle(LeaveGroup(A, home(A), GROUP, "b", carried), 0.0) == [OpenLease(0.0, 5.0)]


def test_the_claim_of_this_nodes_earlier_run_is_waited_for() -> None:
    machine = registry()
    machine.handle(wanted(A, 0.0), 0.0)
    machine.handle(LeaseOpened(3, 0.0), 0.0)
    assert machine.handle(Taken(GROUP, "n2", 2), 0.1) == []
    assert machine.waiting == {}


def test_a_claim_of_this_node_that_nobody_holds_is_given_back() -> None:
    # Its making was reported as failed, or giving it back failed: it is under our own lease, and would stand for ever.
    machine = registry()
    machine.handle(wanted(A, 0.0), 0.0)
    machine.handle(LeaseOpened(3, 0.0), 0.0)
    for now in (0.1, 2.0, 4.0):
        assert machine.handle(Taken(GROUP, "n2", 2), now) == []
        machine.handle(wanted(A, now), now)
    assert machine.handle(Taken(GROUP, "n2", 2), 5.2) == [Resign(GROUP, 2)]


def test_an_illegal_move_tells_its_story() -> None:
    election = Election("n2", ElectionSettings())
    election.claim(GROUP, 0.0)
    with pytest.raises(BrokenInvariant) as failure:
        election._move(election.claims[GROUP], ClaimState.COOLING)
    assert "CLAIMING -> COOLING" in str(failure.value)


# -- a node that is about to go ----------------------------------------------------------------------------------------

OTHERS = [Address(node, "leader", str(GROUP)) for node in ("n1", "n9")]


def test_a_node_that_yields_claims_nothing_and_asks_the_others() -> None:
    machine = registry()
    assert machine.handle(Yield(("n1", "n2", "n9")), 0.0) == []
    assert machine.handle(wanted(A, 0.0), 0.0) == [Send(to, wanted(A, 0.0)) for to in OTHERS]
    foreign = LeaderWanted(A, Address("n9", "agent", "a/1"), GROUP, "b", 0.0)
    assert machine.handle(foreign, 0.1) == [], "it asks again, and elsewhere"
    assert machine.waiting == {}


def test_a_node_that_has_nobody_to_yield_to_leads_on() -> None:
    machine = registry()
    machine.handle(Yield(()), 0.0)
    assert machine.handle(wanted(A, 0.0), 0.0) == [OpenLease(0.0, 5.0)]


def test_a_claim_that_was_under_way_is_given_back() -> None:
    machine = registry()
    machine.handle(wanted(A, 0.0), 0.0)
    machine.handle(LeaseOpened(3, 0.0), 0.0)
    machine.handle(Yield(("n1", "n9")), 0.1)
    effects = machine.handle(Claimed(GROUP, 3, 5), 0.2)
    assert effects == [Resign(GROUP, 5), *(Send(to, wanted(A, 0.0)) for to in OTHERS)]
    assert not machine.election.holds(GROUP)


def test_a_leader_that_is_still_here_is_asked_until_it_has_retired() -> None:
    machine = leading()
    machine.handle(Yield(("n1", "n9")), 0.1)
    assert machine.handle(wanted(B, 0.2), 0.2) == [Send(HERE, wanted(B, 0.2))]
    assert machine.handle(LeaderRetired(GROUP, 5, True), 0.3) == [Resign(GROUP, 5)]
    assert machine.handle(wanted(B, 0.4), 0.4) == [Send(to, wanted(B, 0.4)) for to in OTHERS]
