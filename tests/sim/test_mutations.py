"""Faults planted in the machines, one at a time: the simulator must find each.

A fault that survives is a hole in the workload or in the checkers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from math import inf
from typing import Any

import pytest

from holdfast.groups.leading.election import Election
from holdfast.groups.leading.leader import Leader
from holdfast.groups.leading.lender import Lender
from holdfast.groups.leading.loans import LoanBook, LoanStatus
from holdfast.groups.leading.placement import _whole, place
from holdfast.groups.leading.refusals import Refusals
from holdfast.groups.leading.registry import Registry
from holdfast.groups.leading.streams import GroupStreams
from holdfast.groups.leading.unsaved import Unsaved
from holdfast.groups.member.agent import Agent
from holdfast.groups.member.batch_member import BatchMember
from holdfast.groups.member.borrower import Borrower
from holdfast.groups.member.memories import Memories
from holdfast.groups.progress import StreamProgress
from holdfast.groups.protocol.effects import Park, Save
from holdfast.groups.protocol.events import Yield
from holdfast.groups.record import GroupRecord
from holdfast.groups.settings import MemberSettings
from holdfast.sim import run_seed
from holdfast.sim.faults import Faults

SEEDS_MAX = 2000

NOTICED_BY: dict[str, int] = {
    "a_borrower_trusts_its_leader_for_ever": 38,
    "an_exchange_of_leases_does_not_wait_for_what_is_in_flight": 71,
    "a_leader_does_not_wait_longer_after_an_outage": 278,
    "a_claim_that_could_not_be_given_back_stands_for_ever": 150,
    "an_ended_loan_starts_again": 54,
    "an_older_incarnation_is_taken_for_dead": 54,
    "a_leader_does_not_wait_for_progress": 60,
    "what_a_drained_node_had_claimed_before_is_led_there": 45,
}
"""Where it was last found, to be tried first; wrong once the workload changes, which only costs time."""

WEATHER = {
    "a_batch_member_trusts_its_leader_for_ever": Faults(partition=0.4, delay_seconds=0.05),
    "what_a_drained_node_had_claimed_before_is_led_there": Faults(leader_crash=0.3, save_seconds=1.5),
}
"""Weather in which it shows soonest, where what is drawn seldom has it."""

Patch = pytest.MonkeyPatch
MUTATIONS: dict[str, Callable[[Patch], None]] = {}


def mutation(plant: Callable[[Patch], None]) -> Callable[[Patch], None]:
    MUTATIONS[plant.__name__] = plant
    return plant


def wrap(patch: Patch, cls: type, name: str, change: Callable[..., Any]) -> None:
    """Replace a method by one that is given the original first."""
    original = getattr(cls, name)
    patch.setattr(cls, name, lambda self, *args, **kwargs: change(original, self, *args, **kwargs))


@mutation
def a_borrower_trusts_its_leader_for_ever(patch: Patch) -> None:
    def change(original: Any, self: Any, *args: Any) -> None:
        original(self, *args)
        self._trusted_until = inf

    wrap(patch, Borrower, "_trust", change)


@mutation
def a_batch_member_trusts_its_leader_for_ever(patch: Patch) -> None:
    def change(original: Any, self: Any, *args: Any) -> None:
        original(self, *args)
        self._trusted_until = inf

    wrap(patch, BatchMember, "_trust", change)


@mutation
def a_leader_goes_on_after_its_lease(patch: Patch) -> None:
    def change(original: Any, self: Any, asked_at: float) -> None:
        original(self, asked_at)
        self.trusted_until += 60

    wrap(patch, Election, "_extend", change)


@mutation
def a_leader_gives_up_members_too_early(patch: Patch) -> None:
    def change(original: Any, self: Any, seat: Any, now: float) -> float:
        good_for = original(self, seat, now)
        seat.until = self._expire_at = now + good_for * 0.6
        return float(good_for)

    wrap(patch, Leader, "_count_on", change)


@mutation
def a_broken_leader_is_followed_at_once(patch: Patch) -> None:
    wrap(patch, Election, "resign", lambda original, self, *args, clean: original(self, *args, clean=True))


@mutation
def a_revoke_does_not_wait_for_what_is_in_flight(patch: Patch) -> None:
    def change(original: Any, self: Any, revoke: Any, now: float) -> Any:
        effects = original(self, revoke, now)
        held = self.loans.get(revoke.piece)
        if held and held.status.name == "REVOKING" and not held.drained:
            effects += self._drained(held)
        return effects

    wrap(patch, Borrower, "_on_revoke", change)


@mutation
def an_exchange_of_leases_does_not_wait_for_what_is_in_flight(patch: Patch) -> None:
    def change(original: Any, self: Any, update: Any, now: float) -> Any:
        effects = original(self, update, now)
        for lent in self.taken.values():
            lent.drained = True
        return [*effects, self._states(now)] if self.taken else effects

    wrap(patch, BatchMember, "_on_update", change)


@mutation
def carried_progress_is_ignored(patch: Patch) -> None:
    patch.setattr(Leader, "_merge_carried", lambda self, carried: set())


@mutation
def nothing_is_carried(patch: Patch) -> None:
    patch.setattr(Memories, "carried", lambda self: ())


@mutation
def stored_progress_is_ignored(patch: Patch) -> None:
    wrap(patch, GroupStreams, "load", lambda original, self, record, stored: original(self, record, ()))


@mutation
def nothing_is_saved(patch: Patch) -> None:
    def change(original: Any, self: Any, *args: Any) -> Any:
        return [replace(e, progress=()) if isinstance(e, Save) else e for e in original(self, *args)]

    wrap(patch, Unsaved, "save", change)


@mutation
def a_failed_save_counts_as_made(patch: Patch) -> None:
    patch.setattr(Unsaved, "failed", Unsaved.saved)


@mutation
def what_failed_to_be_saved_is_forgotten(patch: Patch) -> None:
    def change(original: Any, self: Any, now: float) -> None:
        saving = self._saving.tickets if self._saving else {}
        original(self, now)
        for key in [key for key in saving if key is not None]:
            self._changed.pop(key, None)

    wrap(patch, Unsaved, "failed", change)


@mutation
def what_waits_for_a_save_is_said_before_it(patch: Patch) -> None:
    patch.setattr(Unsaved, "reached", lambda self, key, ticket: True)


@mutation
def a_leader_goes_on_where_it_was_after_an_outage(patch: Patch) -> None:
    def change(original: Any, self: Any, trusted: Any, now: float) -> None:
        phase, settle_at = self.phase, self._settle_at
        original(self, trusted, now)
        self.phase, self._settle_at = phase, settle_at

    wrap(patch, Leader, "_on_trusted", change)


@mutation
def a_leader_does_not_wait_longer_after_an_outage(patch: Patch) -> None:
    patch.setattr(Election, "in_doubt", lambda self, now: False)


@mutation
def a_claim_that_could_not_be_given_back_stands_for_ever(patch: Patch) -> None:
    def change(self: Any, group: Any, epoch: int, now: float) -> list[Any]:
        self.on_not_claimed(group)
        return []

    patch.setattr(Election, "on_taken_here", change)


@mutation
def only_the_first_value_of_a_progress_is_read(patch: Patch) -> None:
    patch.setattr(StreamProgress, "add", lambda self, part: None)


@mutation
def what_is_stored_beside_the_first_value_is_never_deleted(patch: Patch) -> None:
    def change(original: Any, self: Any, *args: Any) -> Any:
        return [replace(e, parts=()) if isinstance(e, Save) else e for e in original(self, *args)]

    wrap(patch, Unsaved, "save", change)


@mutation
def a_broken_leader_is_followed_before_the_members_of_its_node_have_stopped(patch: Patch) -> None:
    def change(original: Any, self: Any, group: Any, epoch: int, now: float, *, clean: bool) -> Any:
        return original(self, group, epoch, now - 3.0, clean=clean)

    wrap(patch, Election, "resign", change)


@mutation
def last_words_are_given_up_early(patch: Patch) -> None:
    patch.setattr(MemberSettings, "last_words_seconds", lambda self, carrying: 4.0)


@mutation
def an_ended_loan_starts_again(patch: Patch) -> None:
    def change(original: Any, self: Any, grant: Any, now: float) -> Any:
        self._ended.clear()
        self._oldest_loan = 0
        return original(self, grant, now)

    wrap(patch, Borrower, "_on_grant", change)


@mutation
def nothing_is_said_twice(patch: Patch) -> None:
    def change(self: Any, now: float) -> list[Any]:
        self.resend_at = inf
        return []

    patch.setattr(Lender, "resend", change)


@mutation
def the_first_member_gets_everything(patch: Patch) -> None:
    def place(pieces: Any, held: Any, members: Any, late: Any) -> Any:
        return {piece: min(members) for piece in pieces} if members else {}

    patch.setattr("holdfast.groups.leading.lender.place", place)


@mutation
def generations_are_lent_all_at_once(patch: Patch) -> None:
    wrap(patch, GroupStreams, "open_streams", lambda original, self, order, key: original(self, "parallel", key))


@mutation
def dropped_streams_are_remembered(patch: Patch) -> None:
    patch.setattr(GroupStreams, "sweep", lambda self, lent: [])


@mutation
def cutting_anew_forgets_the_layers(patch: Patch) -> None:
    def change(original: Any, self: Any, *args: Any) -> Any:
        changed = original(self, *args)
        self.layers = ()
        return changed

    wrap(patch, StreamProgress, "cut", change)


@mutation
def slices_are_taken_for_the_whole(patch: Patch) -> None:
    def change(original: Any, self: Any, piece: Any, within: Any) -> None:
        done = [self.cursors[old] for old in within]
        original(self, piece, within)
        for cursor in done:
            self.cursors[piece].merge(cursor)

    wrap(patch, StreamProgress, "_join", change)


@mutation
def a_piece_is_cut_while_it_is_lent(patch: Patch) -> None:
    wrap(patch, StreamProgress, "cut", lambda original, self, of, lent=(): original(self, of))


@mutation
def a_range_by_message_reaches_back_too_far(patch: Patch) -> None:
    patch.setattr("holdfast.groups.progress.back_to", lambda piece, offset: max(0, offset - piece.of))


@mutation
def what_a_neighbour_has_done_counts_too(patch: Patch) -> None:
    def change(original: Any, self: Any, piece: Any, mark: Any) -> bool:
        return bool(original(self, piece._replace(part=0, of=1), mark))

    wrap(patch, StreamProgress, "merge", change)


@mutation
def a_stream_is_done_when_its_first_slice_is(patch: Patch) -> None:
    patch.setattr(StreamProgress, "floor", property(lambda self: self.reached(self.pieces()[0])))


@mutation
def a_topic_goes_to_whoever_has_room(patch: Patch) -> None:
    patch.setattr("holdfast.groups.leading.lender.place_together", place)


@mutation
def a_topic_moves_on_while_some_of_it_is_in_flight(patch: Patch) -> None:
    patch.setattr("holdfast.groups.leading.lender._elsewhere", lambda owners, piece, member: False)


@mutation
def slices_of_a_stream_stay_together(patch: Patch) -> None:
    patch.setattr("holdfast.groups.leading.placement._spread", _whole)


@mutation
def members_beyond_the_first_slices_get_nothing(patch: Patch) -> None:
    patch.setattr("holdfast.groups.leading.lender.slices_wanted", lambda key, streams, members, most: min(2, most))


@mutation
def a_member_does_not_hear_the_key(patch: Patch) -> None:
    def change(original: Any, self: Any, entry: Any) -> Any:
        return replace(original(self, entry), key="publisher")

    wrap(patch, Lender, "_grant", change)


@mutation
def a_seek_does_not_change_the_course(patch: Patch) -> None:
    patch.setattr(GroupRecord, "course", property(lambda self: f"{self.born}.0"))


@mutation
def anybody_may_join_whatever_group_they_once_knew(patch: Patch) -> None:
    def change(original: Any, self: Any, wanted: Any, now: float) -> Any:
        object.__setattr__(wanted, "born", self.record.born)
        return original(self, wanted, now)

    wrap(patch, Leader, "_on_join", change)


@mutation
def an_older_incarnation_is_taken_for_dead(patch: Patch) -> None:
    def change(original: Any, self: Any, wanted: Any, now: float) -> Any:
        for member in [m for m in self.seats if m.session == wanted.member.session]:
            self._unseat(member, now)
        return original(self, wanted, now)

    wrap(patch, Leader, "_admit", change)


@mutation
def a_leader_does_not_wait_for_progress(patch: Patch) -> None:
    def change(original: Any, self: Any, loaded: Any, now: float) -> Any:
        effects = original(self, loaded, now)
        if self._settle_at < inf:
            self._settle_at = now
        return effects

    wrap(patch, Leader, "_on_loaded", change)


@mutation
def lost_reports_are_not_repeated(patch: Patch) -> None:
    def change(original: Any, self: Any, now: float) -> Any:
        for held in self.loans.values():
            held.confirmed = held.changes
        return original(self, now)

    wrap(patch, Borrower, "_ping", change)


@mutation
def a_stream_is_lent_while_it_is_called_back(patch: Patch) -> None:
    def change(original: Any, self: Any, entry: Any, to: LoanStatus, now: float) -> None:
        original(self, entry, to, now)
        if to is LoanStatus.REVOKING:
            original(self, entry, LoanStatus.ABSENT, now)

    wrap(patch, LoanBook, "move", change)


@mutation
def a_new_life_brings_nothing_along(patch: Patch) -> None:
    def change(original: Any, self: Any, now: float) -> Any:
        successor = original(self, now)
        successor.memories = Memories()
        return successor

    wrap(patch, Borrower, "successor", change)


@mutation
def a_confused_borrower_is_not_replaced(patch: Patch) -> None:
    def change(original: Any, self: Any, number: int, event: Any, now: float) -> Any:
        borrower = self.borrowers.get(number)
        effects = original(self, number, event, now)
        if borrower is not None and self.borrowers.get(number) is not borrower:
            self.borrowers.pop(number, None)
        return effects

    wrap(patch, Agent, "_drive", change)


@mutation
def what_one_member_refuses_is_set_aside_at_once(patch: Patch) -> None:
    def change(self: Any, refused: Any) -> list[Any]:
        held = self.loans.get(refused.loan.piece)
        return [Park(refused.loan, tuple(dict(refused.messages)), too_large=True)] if held else []

    patch.setattr(Borrower, "_on_refused", change)


@mutation
def a_member_reads_on_after_what_it_refused(patch: Patch) -> None:
    def change(self: Any, refused: Any) -> list[Any]:
        held = self.loans.get(refused.loan.piece)
        if held is None or held.loan != refused.loan or self._leader is None:
            return []
        held.refused.update(refused.messages)
        return [self._tell(held)]

    patch.setattr(Borrower, "_on_refused", change)


@mutation
def a_refused_piece_goes_back_to_whoever_refused_it(patch: Patch) -> None:
    patch.setattr(Refusals, "takers", lambda self, piece, key, seats: seats)


@mutation
def what_everybody_refuses_is_never_set_aside(patch: Patch) -> None:
    patch.setattr(Refusals, "set_aside", lambda self, piece, key, seats: ())


@mutation
def members_do_not_hear_of_one_that_takes_larger_packets(patch: Patch) -> None:
    patch.setattr(Borrower, "_take_largest", lambda self, largest_packet: [])


@mutation
def a_drained_node_claims_groups_all_the_same(patch: Patch) -> None:
    def change(original: Any, self: Any, event: Any, now: float) -> Any:
        return [] if isinstance(event, Yield) else original(self, event, now)

    wrap(patch, Registry, "_dispatch", change)


@mutation
def what_a_drained_node_had_claimed_before_is_led_there(patch: Patch) -> None:
    def change(original: Any, self: Any, claimed: Any, now: float) -> Any:
        others, self._others = self._others, ()
        try:
            return original(self, claimed, now)
        finally:
            self._others = others

    wrap(patch, Registry, "_on_claimed", change)


@mutation
def members_of_a_drained_node_are_heard_by_nobody(patch: Patch) -> None:
    patch.setattr(Registry, "_ask_others", lambda self, wanted, now: [])


@pytest.mark.parametrize("name", MUTATIONS)
def test_the_simulator_finds(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    MUTATIONS[name](monkeypatch)
    for seed in [NOTICED_BY.get(name, 0), *range(SEEDS_MAX)]:
        if run_seed(seed, faults=WEATHER.get(name)).failure:
            return
    pytest.fail(f"{SEEDS_MAX} seeds did not notice that {name.replace('_', ' ')}")


def test_there_are_enough() -> None:
    assert len(MUTATIONS) >= 10
