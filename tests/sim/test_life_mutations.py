"""Faults planted in the life of sessions, one at a time: the simulator must find each.

A fault that survives is a hole in the workload or in the checkers.
"""

from __future__ import annotations

from collections.abc import Callable
from math import inf
from typing import Any

import msgspec
import pytest

from holdfast.machine import Send
from holdfast.sessions import changes, clock, life, sweep
from holdfast.sessions.changes import Change
from holdfast.sessions.clock import StoreClock
from holdfast.sessions.life import Released, Saved, SessionLife, SessionNode
from holdfast.sessions.sweep import EndedLeases, UnheldRows
from holdfast.sessions.table import SessionRow
from holdfast.sim.life import node as sim_node
from holdfast.sim.life.faults import LifeFaults
from holdfast.sim.life.runner import run_life_seed

SEEDS_MAX = 6000

NOTICED_BY: dict[str, int] = {
    "a_deletion_leaves_no_tombstone": 8,
    "released_is_said_while_a_take_is_in_doubt": 55,
    "released_is_said_while_a_resume_is_in_doubt": 3950,
    "a_take_in_doubt_that_is_refused_is_tried_again": 3817,
    "a_store_time_handled_after_a_pause_is_believed": 53,
    "an_adopted_row_keeps_how_the_one_before_was_left": 13,
    "a_disconnect_during_a_resume_loses_its_expiry": 3890,
    "a_failed_take_from_memory_forgets_the_memory": 48,
    "a_lease_is_trusted_for_ever": 23,
    "a_lease_is_trusted_longer_than_it_lasts": 48,
    "the_clock_is_not_looked_at": 52,
    "a_release_for_another_lease_is_answered": 98,
    "released_is_said_before_it_is_durable": 51,
    "an_owner_is_asked_and_looked_at_once": 53,
    "an_owner_may_be_in_doubt_and_go_on": 59,
    "the_own_earlier_take_is_not_recognised": 19,
    "whoever_has_the_token_is_taken_for_us": 52,
    "a_resume_takes_what_is_in_memory_of_a_connection_that_was_never_welcome": 164,
    "subscriptions_asked_for_during_a_write_count_as_in_it": 25,
    "a_clean_stop_saves_nothing": 19,
    "the_last_expiry_is_not_heard": 6,
    "a_good_bye_keeps_the_will": 8,
    "a_node_that_stops_counts_as_a_loss": 19,
    "a_will_that_is_overdue_is_withdrawn": 58,
    "the_sweep_never_looks_for_orphans": 19,
    "a_nodes_sweep_overtakes_its_own_machines": 398,
    "nobody_looks_for_rows_that_nobody_holds": 704,
    "the_stores_clock_is_believed_whatever_it_says": 15,
}
"""Where it was last found, to be tried first; wrong once the workload changes, which only costs time."""

LEASES_END = LifeFaults(outage=0.15, pause=0.05, store_unanswered=0.3, store_slow=0.3)
"""While clients are connected, and the store is often in doubt when they resume."""
NOBODY_ANSWERS = LifeFaults(outage=0.1, pause=0.2, store_unanswered=0.5, store_slow=0.3)
"""A node is often without a lease for longer than the grace, and still has something to save."""

WEATHER: dict[str, LifeFaults] = {
    "released_is_said_while_a_resume_is_in_doubt": LEASES_END,
    "a_take_in_doubt_that_is_refused_is_tried_again": LEASES_END,
    "a_disconnect_during_a_resume_loses_its_expiry": LEASES_END,
    "a_nodes_sweep_overtakes_its_own_machines": NOBODY_ANSWERS,
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


def replace(row: SessionRow, **fields: Any) -> SessionRow:
    return msgspec.structs.replace(row, **fields)


# -- found on the way, one to five -------------------------------------------------------------------------


@mutation
def a_deletion_leaves_no_tombstone(patch: Patch) -> None:
    """1: an insert of unknown outcome lands after its session was deleted, and brings it back."""
    patch.setattr(sim_node, "buried_before", lambda now, settings: now + 60)


@mutation
def released_is_said_while_a_take_is_in_doubt(patch: Patch) -> None:
    """2: and then the take is found to have landed."""

    def change(original: Any, self: Any, release: Any, now: float) -> None:
        pending = self._pending
        doubtful = pending is not None and pending.write.take and not pending.resumes
        if doubtful and release.lease == self.node.lease:
            self._out.append(Send(release.reply_to, Released(self.client_id, release.epoch)))
        else:
            original(self, release, now)

    wrap(patch, SessionLife, "_on_release", change)


@mutation
def released_is_said_while_a_resume_is_in_doubt(patch: Patch) -> None:
    """2, in resuming from frozen."""

    def change(original: Any, self: Any, release: Any, now: float) -> None:
        pending = self._pending
        if pending is not None and pending.resumes and release.lease == self.node.lease:
            self._out.append(Send(release.reply_to, Released(self.client_id, release.epoch)))
        else:
            original(self, release, now)

    wrap(patch, SessionLife, "_on_release", change)


@mutation
def a_take_in_doubt_that_is_refused_is_tried_again(patch: Patch) -> None:
    """3: it had landed, was taken over, and its will was published."""

    def change(original: Any, self: Any, pending: Any, row: Any, now: float) -> None:
        pending.in_doubt = False
        original(self, pending, row, now)

    wrap(patch, SessionLife, "_on_refused", change)


@mutation
def a_connect_that_was_never_welcome_has_no_will(patch: Patch) -> None:
    """4: the same write had withdrawn the will before."""

    def change(original: Any, self: Any, departure: Any, reason: Any, now: float) -> None:
        if self._connection is not None and not self._connection.welcome:
            departure = departure._replace(goodbye=True)
        original(self, departure, reason, now)

    wrap(patch, SessionLife, "_end_connection", change)


@mutation
def a_store_time_handled_after_a_pause_is_believed(patch: Patch) -> None:
    """5: it sets the node's clock back."""

    def heard(self: Any, store_time: float, asked_at: float, now: float) -> bool:
        self._at, self._time, self._offset = now, store_time, store_time - now
        return True

    patch.setattr(StoreClock, "heard", heard)


# -- traps -------------------------------------------------------------------------------------------------


@mutation
def no_lease_just_now_is_as_good_as_one(patch: Patch) -> None:
    """Then the lease of a row that is away is the node's own."""
    patch.setattr(SessionLife, "_trusts", lambda self, now: self.node.lease is None or now < self.node.trusted_until)


@mutation
def an_adopted_row_keeps_how_the_one_before_was_left(patch: Patch) -> None:
    def change(original: Any, self: Any, pending: Any, now: float) -> None:
        before = self._departure
        original(self, pending, now)
        if pending.departure is not None and before is not None:
            self._departure = before

    wrap(patch, SessionLife, "_on_taken", change)


@mutation
def a_disconnect_during_a_resume_loses_its_expiry(patch: Patch) -> None:
    def change(original: Any, self: Any, departure: Any, reason: Any, now: float) -> None:
        if self._pending is not None and self._pending.resumes:
            departure = departure._replace(expiry_secs=None)
        original(self, departure, reason, now)

    wrap(patch, SessionLife, "_end_connection", change)


@mutation
def a_failed_take_from_memory_forgets_the_memory(patch: Patch) -> None:
    def change(original: Any, self: Any, in_doubt: bool, now: float) -> None:
        if self._pending.write.take and not self._pending.resumes:
            self._departure = self._memory = None
        original(self, in_doubt, now)

    wrap(patch, SessionLife, "_on_failed", change)


# -- leases ------------------------------------------------------------------------------------------------


@mutation
def a_lease_is_trusted_for_ever(patch: Patch) -> None:
    patch.setattr(SessionNode, "renewed", lambda self, asked_at: setattr(self, "trusted_until", inf))


@mutation
def a_lease_is_trusted_longer_than_it_lasts(patch: Patch) -> None:
    def change(original: Any, self: Any, asked_at: float) -> None:
        original(self, asked_at + 3)

    wrap(patch, SessionNode, "renewed", change)


@mutation
def a_new_lease_is_as_good_as_the_old(patch: Patch) -> None:
    patch.setattr(SessionLife, "_is_trusted", lambda self, now: self._trusts(now))


@mutation
def the_clock_is_not_looked_at(patch: Patch) -> None:
    patch.setattr(SessionLife, "_look_at_clock", lambda self, now: None)


@mutation
def a_release_for_another_lease_is_answered(patch: Patch) -> None:
    def answer(release: Any, node: Any) -> Any:
        return [Send(release.reply_to, Released(release.client_id, release.epoch))]

    patch.setattr(sim_node, "answer_unheld", answer)


@mutation
def released_is_said_before_it_is_durable(patch: Patch) -> None:
    def change(original: Any, self: Any, release: Any, now: float) -> None:
        held = self._connection is not None
        original(self, release, now)
        if held and self._connection is None:
            self._out.append(Send(release.reply_to, Released(self.client_id, release.epoch)))

    wrap(patch, SessionLife, "_on_release", change)


@mutation
def released_does_not_close_the_connection(patch: Patch) -> None:
    def change(original: Any, self: Any, release: Any, now: float) -> None:
        if self._connection is not None and self._pending is None and release.lease == self.node.lease:
            self._out.append(Send(release.reply_to, Released(self.client_id, release.epoch)))
        else:
            original(self, release, now)

    wrap(patch, SessionLife, "_on_release", change)


@mutation
def a_live_owner_is_not_asked(patch: Patch) -> None:
    def change(original: Any, self: Any, found: Any, now: float) -> None:
        self._released = found.row.epoch if found.row is not None else None
        original(self, found, now)

    wrap(patch, SessionLife, "_decide", change)


@mutation
def an_owner_is_asked_and_looked_at_once(patch: Patch) -> None:
    def change(original: Any, self: Any, row: Any, now: float) -> None:
        original(self, row, now)
        self._ask_at = inf

    wrap(patch, SessionLife, "_ask", change)


# -- writes ------------------------------------------------------------------------------------------------


@mutation
def an_owner_may_be_in_doubt_and_go_on(patch: Patch) -> None:
    """A take in doubt is given up as if it had surely failed."""

    def change(original: Any, self: Any, in_doubt: bool, now: float) -> None:
        original(self, False, now)

    wrap(patch, SessionLife, "_on_failed", change)


@mutation
def the_own_earlier_take_is_not_recognised(patch: Patch) -> None:
    patch.setattr(SessionLife, "_is_ours", lambda self, wanted, row: False)


@mutation
def whoever_has_the_token_is_taken_for_us(patch: Patch) -> None:
    """The sweep keeps the token of a row that it writes away."""
    patch.setattr(life, "_same_take", lambda wanted, row: row.connect == wanted.connect)


@mutation
def a_takeover_forgets_what_was_acknowledged_last(patch: Patch) -> None:
    patch.setattr(SessionLife, "_remembered", lambda self, row: row)


@mutation
def a_resume_takes_what_is_in_memory_of_a_connection_that_was_never_welcome(patch: Patch) -> None:
    def change(original: Any, self: Any, now: float) -> None:
        welcome, self._connection.welcome = self._connection.welcome, True
        original(self, now)
        self._connection.welcome = welcome

    wrap(patch, SessionLife, "_resume", change)


@mutation
def a_subscription_is_answered_before_it_is_stored(patch: Patch) -> None:
    def change(original: Any, self: Any, now: float) -> None:
        numbers = list(self._numbers)
        original(self, now)
        if self._pending is not None and numbers:
            self._out += [Saved(number) for number in numbers]
            self._pending.numbers = []

    wrap(patch, SessionLife, "_flush", change)


@mutation
def subscriptions_asked_for_during_a_write_count_as_in_it(patch: Patch) -> None:
    def change(original: Any, self: Any, verdict: Any, now: float) -> None:
        if self._pending is not None and verdict.accepted and not self._pending.write.take:
            self._pending.numbers += self._take_numbers()
        original(self, verdict, now)

    wrap(patch, SessionLife, "_on_written", change)


@mutation
def a_clean_stop_saves_nothing(patch: Patch) -> None:
    patch.setattr(SessionLife, "_is_unsaved", property(lambda self: False))


@mutation
def a_connect_never_gives_up(patch: Patch) -> None:
    def change(original: Any, self: Any, connect: Any, now: float) -> None:
        original(self, connect, now)
        if self._waiting is not None:
            self._waiting.give_up_at = inf
        if self._connection is not None:
            self._connection.give_up_at = inf

    wrap(patch, SessionLife, "_on_connect", change)
    wrap(
        patch,
        SessionLife,
        "_on_gone",
        lambda original, self, gone, now: original(self, gone, now) if gone.goodbye or self.token else None,
    )


# -- rows --------------------------------------------------------------------------------------------------


@mutation
def a_clean_start_keeps_the_session(patch: Patch) -> None:
    original = changes.taken
    patch.setattr(life, "taken", lambda row, c, t, clean, *rest: original(row, c, t, False, *rest))


@mutation
def a_session_goes_on_after_its_end(patch: Patch) -> None:
    original = changes.taken
    patch.setattr(life, "taken", lambda row, c, t, clean, e, w, o, n, at: original(row, c, t, clean, e, w, o, n, 0.0))


@mutation
def the_last_expiry_is_not_heard(patch: Patch) -> None:
    original = changes.left
    patch.setattr(life, "left", lambda row, how, now: original(row, how._replace(expiry_secs=None), now))


@mutation
def a_good_bye_keeps_the_will(patch: Patch) -> None:
    original = changes.left
    patch.setattr(life, "left", lambda row, how, now: original(row, how._replace(goodbye=False), now))


@mutation
def a_node_that_stops_counts_as_a_loss(patch: Patch) -> None:
    original = changes.left
    patch.setattr(life, "left", lambda row, how, now: original(row, how._replace(grace_secs=0.0), now))


@mutation
def a_will_that_is_published_stays(patch: Patch) -> None:
    original = changes.settled

    def settled(row: SessionRow, now: float) -> Change:
        change = original(row, now)
        if change.publish is not None and not change.row.dead:
            change = Change(replace(change.row, will=row.will, will_due=row.will_due, due=row.will_due), change.publish)
        return change

    patch.setattr(changes, "settled", settled)
    patch.setattr(sweep, "settled", settled)


@mutation
def a_will_that_is_overdue_is_withdrawn(patch: Patch) -> None:
    original = changes.taken

    def taken(row: Any, *rest: Any) -> Change:
        if row is not None and row.lease is None and row.will_due is not None:
            row = replace(row, will_due=inf)
        return original(row, *rest)

    patch.setattr(life, "taken", taken)


@mutation
def a_clean_start_drops_the_will_that_waits(patch: Patch) -> None:
    original = changes.taken
    patch.setattr(life, "taken", lambda *given: original(*given)._replace(publish=None))


@mutation
def every_take_publishes_the_will(patch: Patch) -> None:
    original = changes.taken

    def taken(row: Any, *rest: Any) -> Change:
        change = original(row, *rest)
        return change._replace(publish=row.will) if row is not None and row.will is not None else change

    patch.setattr(life, "taken", taken)


@mutation
def a_deleted_row_keeps_its_content(patch: Patch) -> None:
    original = changes.dead
    patch.setattr(changes, "dead", lambda row, now: replace(original(row, now), subscriptions=row.subscriptions))


# -- the sweep and the clock -------------------------------------------------------------------------------


@mutation
def the_sweep_has_no_patience(patch: Patch) -> None:
    patch.setattr(EndedLeases, "over", lambda self, named, alive, now: sorted(named))


@mutation
def the_sweep_never_looks_for_orphans(patch: Patch) -> None:
    patch.setattr(EndedLeases, "over", lambda self, named, alive, now: [])


@mutation
def the_sweep_ends_sessions_early(patch: Patch) -> None:
    original = sweep.due_writes
    patch.setattr(sim_node, "due_writes", lambda rows, held, now, *rest: original(rows, held, now + 5, *rest))
    patch.setattr(sim_node.SimTable, "due", lambda self, now: [r for r in self.rows.values() if r.due is not None])


@mutation
def the_sweep_writes_away_rows_that_are_held(patch: Patch) -> None:
    wrap(patch, UnheldRows, "page", lambda original, self, rows, held, *rest: original(self, rows, (), *rest))


@mutation
def a_nodes_sweep_overtakes_its_own_machines(patch: Patch) -> None:
    """They know of a good-bye, or of acknowledgements, that are not stored yet."""
    original = sweep.orphan_writes
    patch.setattr(sim_node, "orphan_writes", lambda rows, held, *rest: original(rows, (), *rest))


@mutation
def nobody_looks_for_rows_that_nobody_holds(patch: Patch) -> None:
    patch.setattr(UnheldRows, "page", lambda self, *given: [])


@mutation
def the_stores_clock_is_believed_whatever_it_says(patch: Patch) -> None:
    patch.setattr(clock, "FASTEST", inf)


@pytest.mark.parametrize("name", MUTATIONS)
def test_the_simulator_finds(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    MUTATIONS[name](monkeypatch)
    for seed in [NOTICED_BY.get(name, 0), *range(SEEDS_MAX)]:
        if run_life_seed(seed, faults=WEATHER.get(name)).failure:
            return
    pytest.fail(f"{SEEDS_MAX} seeds did not notice that {name.replace('_', ' ')}")


def test_there_are_enough() -> None:
    assert len(MUTATIONS) >= 25
