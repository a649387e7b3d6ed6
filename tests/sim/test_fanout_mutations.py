"""Faults planted in fan-out, one at a time: the simulator must find each.

A fault that survives is a hole in the workload or in the checkers.
"""

from __future__ import annotations

from collections.abc import Callable
from math import inf
from typing import Any

import msgspec
import pytest

from holdfast.fanout import choice, control, dispatcher, vehicles
from holdfast.fanout.control import CampaignControl
from holdfast.fanout.dispatcher import Dispatcher, Publish, Step
from holdfast.fanout.nouns import End, State
from holdfast.fanout.table import Await, Finish, Return, Verdict
from holdfast.sim.fanout import node as sim_node
from holdfast.sim.fanout.faults import FanoutFaults
from holdfast.sim.fanout.node import SimNode
from holdfast.sim.fanout.runner import run_fanout_seed
from holdfast.sim.fanout.store import SimTable
from holdfast.store import fanout_changes, fanout_intake
from holdfast.store.fanout_changes import _Decision
from holdfast.store.memory import fanout as memory

SEEDS_MAX = 600

NOTICED_BY: dict[str, int] = {
    "any_ack_settles_what_is_in_flight": 10,
    "a_refused_attempt_is_sent_again_at_once": 6,
    "an_unsubscribed_vehicle_loses_what_is_in_flight": 95,
    "a_refused_begin_is_sent_all_the_same": 26,
    "what_was_in_doubt_is_no_repeat": 375,
    "an_earlier_session_of_the_vehicle_is_forgotten": 428,
    "an_ack_is_the_end_without_its_result": 6,
    "a_look_up_that_failed_is_forgotten": 76,
    "doubled_answers_count_twice": 77,
    "a_trigger_during_a_look_up_is_lost": 137,
    "who_waits_for_a_limit_is_forgotten": 34,
    "a_cancelled_one_is_sent_again_on_resume": 84,
    "the_newest_goes_first": 24,
    "back_off_blocks_nobody": 55,
    "a_vehicle_gets_what_it_is_not_subscribed_to": 6,
    "what_has_expired_is_sent": 76,
    "a_paused_campaign_cannot_be_told_from_one_that_was_never_paused": 68,
    "a_wave_does_not_wait_for_the_one_before": 5,
    "a_wave_begins_whatever_was_acked": 5,
    "two_may_be_in_flight": 1815,
    "an_old_session_may_adopt": 167,
    "a_campaign_that_is_held_may_begin": 26,
    "nobody_looks_at_the_cut": 43,
    "in_flight_is_counted_once": 239,
    "a_late_return_takes_back_what_was_begun_since": 32,
    "a_result_is_awaited_for_ever": 7,
    "a_merge_tells_nobody": 485,
    "a_campaign_is_closed_although_a_batch_has_come": 162,
    "another_keeper_may_change_a_campaign": 15,
    "payloads_are_collected_early": 10,
}
"""Where it was last found, to be tried first; wrong once the workload changes, which only costs time."""

WEATHER: dict[str, FanoutFaults] = {
    "a_merge_tells_nobody": FanoutFaults(),
    "a_campaign_is_closed_although_a_batch_has_come": FanoutFaults(store_slow=0.3),
    "an_unsubscribed_vehicle_loses_what_is_in_flight": FanoutFaults(),
    "a_cancelled_one_is_sent_again_on_resume": FanoutFaults(),
    "an_earlier_session_of_the_vehicle_is_forgotten": FanoutFaults(),
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


def decide(patch: Patch, name: str, change: Callable[..., Any]) -> None:
    wrap(patch, _Decision, name, change)


# -- the dispatcher ----------------------------------------------------------------------------------------


@mutation
def acks_are_not_heard(patch: Patch) -> None:
    patch.setattr(Dispatcher, "_acked", lambda self, *given: None)


@mutation
def an_error_counts_as_an_ack(patch: Patch) -> None:
    wrap(
        patch,
        Dispatcher,
        "_acked",
        lambda original, self, vin, place, reason, *rest: original(self, vin, place, 0, *rest),
    )


@mutation
def any_ack_settles_what_is_in_flight(patch: Patch) -> None:
    def change(original: Any, self: Any, vin: str, place: int, *rest: Any) -> None:
        slot = self._slots.get(vin)
        original(self, vin, place if slot is None or slot.flight is None else slot.flight.place, *rest)

    wrap(patch, Dispatcher, "_acked", change)


@mutation
def a_refused_attempt_is_sent_again_at_once(patch: Patch) -> None:
    def change(original: Any, self: Any, slot: Any, attempts: int, not_before: float = 0.0, **given: Any) -> None:
        original(self, slot, attempts, 0.0, **given)

    wrap(patch, Dispatcher, "_return", change)


@mutation
def a_lost_connection_is_an_attempt(patch: Patch) -> None:
    def change(original: Any, self: Any, slot: Any, attempts: int, not_before: float = 0.0, **given: Any) -> None:
        if not given.get("refused") and attempts + 1 >= self._settings.attempts_max:
            self._move(slot, Step.SETTLING)
            self._queue(slot, Finish(slot.flight, End.FAILED, "no answer"))
            return
        original(self, slot, attempts if given.get("refused") else attempts + 1, not_before, **given)

    wrap(patch, Dispatcher, "_return", change)


@mutation
def a_lost_connection_takes_nothing_back(patch: Patch) -> None:
    patch.setattr(Dispatcher, "_let_go", lambda self, vin, epoch, connected: None)


@mutation
def an_unsubscribed_vehicle_loses_what_is_in_flight(patch: Patch) -> None:
    wrap(
        patch,
        Dispatcher,
        "_let_go",
        lambda original, self, vin, epoch, connected: original(self, vin, epoch, connected=False),
    )


@mutation
def a_session_that_has_gone_since_is_sent_to(patch: Patch) -> None:
    """The connection was lost while it was being recorded."""

    def change(original: Any, self: Any, slot: Any, change: Any, verdict: Any, now: float) -> None:
        slot.lost = False
        original(self, slot, change, verdict, now)

    wrap(patch, Dispatcher, "_begun", change)
    patch.setattr(vehicles.Vehicle, "epoch", property(lambda self: _Any(self[3])))


class _Any(int):
    def __ne__(self, other: object) -> bool:
        return False

    __hash__ = int.__hash__


@mutation
def a_refused_begin_is_sent_all_the_same(patch: Patch) -> None:
    def change(original: Any, self: Any, slot: Any, verdict: Any, store_now: float, now: float) -> None:
        original(self, slot, Verdict.DONE if verdict is Verdict.HELD else verdict, store_now, now)

    wrap(patch, Dispatcher, "_begun", change)


@mutation
def it_is_sent_before_it_is_recorded(patch: Patch) -> None:
    def change(original: Any, self: Any, shard: Any, effect: Any) -> None:
        original(self, shard, effect)
        if type(effect).__name__ == "Commit":
            for one in effect.changes:
                if type(one).__name__ == "Begin" and (taken := shard.taken.get(one.seen.vin)) is not None:
                    vehicle = shard.machine.vehicles.get(one.seen.vin)
                    campaign = self.table.campaigns([one.seen.campaign])[one.seen.campaign]
                    if vehicle is not None:
                        self._send(Publish(vehicle, one.flight, campaign, False), taken)

    wrap(patch, SimNode, "_perform", change)


@mutation
def a_resumed_session_gets_a_new_packet(patch: Patch) -> None:
    patch.setattr(dispatcher, "is_kept", lambda delivery, vehicle: False)
    patch.setattr(vehicles.Vehicle, "has", lambda self, sent: False)


@mutation
def a_resumed_session_gets_it_without_dup(patch: Patch) -> None:
    wrap(
        patch,
        SimNode,
        "_send",
        lambda original, self, effect, taken: original(
            self, Publish(effect.vehicle, effect.flight, effect.campaign, False), taken
        ),
    )


@mutation
def a_new_session_gets_the_packet_of_the_one_before(patch: Patch) -> None:
    patch.setattr(vehicles.Vehicle, "has", lambda self, sent: sent.client_id == self.client_id)


@mutation
def what_was_in_doubt_is_no_repeat(patch: Patch) -> None:
    """A resume was recorded, nobody knew, and it is found as this session's own."""

    def change(original: Any, self: Any, slot: Any, *rest: Any) -> None:
        if slot.tried is not None:
            slot.tried = (*slot.tried[:2], False)
        original(self, slot, *rest)

    wrap(patch, Dispatcher, "_found_in_flight", change)


@mutation
def an_earlier_session_of_the_vehicle_is_forgotten(patch: Patch) -> None:
    def change(original: Any, self: Any, vehicle: Any, now: float) -> None:
        original(self, vehicle, now)
        self._earlier.clear()

    wrap(patch, Dispatcher, "_online", change)


@mutation
def an_ack_is_the_end_without_its_result(patch: Patch) -> None:
    wrap(
        patch,
        Dispatcher,
        "_answer",
        lambda original, self, seen, reason, awaits, store_now: original(self, seen, reason, False, store_now),
    )


@mutation
def a_commit_without_an_answer_is_forgotten(patch: Patch) -> None:
    def change(original: Any, self: Any, number: int, now: float) -> None:
        if self._committing is not None and self._committing[0] == number:
            self._committing = None

    wrap(patch, Dispatcher, "_commit_failed", change)


@mutation
def a_look_up_that_failed_is_forgotten(patch: Patch) -> None:
    def change(original: Any, self: Any, number: int, now: float) -> None:
        if self._looking is not None and self._looking[0] == number:
            self._looking = None

    wrap(patch, Dispatcher, "_look_up_failed", change)


@mutation
def doubled_answers_count_twice(patch: Patch) -> None:
    def change(original: Any, self: Any, event: Any, now: float) -> None:
        if self._committing is not None and len(self._committing[1]) == len(event.verdicts):
            event = type(event)(self._committing[0], event.verdicts, event.store_now)
        original(self, event, now)

    wrap(patch, Dispatcher, "_committed", change)


@mutation
def a_trigger_during_a_look_up_is_lost(patch: Patch) -> None:
    def change(original: Any, self: Any, vin: str) -> None:
        slot = self._slots.get(vin)
        if slot is None or slot.step is Step.RESTING:
            original(self, vin)

    wrap(patch, Dispatcher, "_wake", change)


@mutation
def who_waits_for_a_limit_is_forgotten(patch: Patch) -> None:
    def change(original: Any, self: Any, now: float) -> None:
        for limited in self._limited.values():
            limited.vins.clear()
        original(self, now)

    wrap(patch, Dispatcher, "_tick", change)


@mutation
def a_cancelled_one_is_sent_again_on_resume(patch: Patch) -> None:
    def change(original: Any, self: Any, slot: Any, seen: Any, vehicle: Any, event: Any, now: float) -> None:
        running = {
            id_: msgspec.structs.replace(c, state=State.RUNNING, sending=True) for id_, c in event.campaigns.items()
        }
        original(self, slot, seen, vehicle, msgspec_free(event, running), now)

    wrap(patch, Dispatcher, "_found_in_flight", change)


def msgspec_free(event: Any, campaigns: Any) -> Any:
    return type(event)(event.number, event.found, campaigns, event.sizes, event.store_now)


# -- the choice --------------------------------------------------------------------------------------------


def choosing(patch: Patch, change: Callable[..., Any]) -> None:
    original = choice.choose
    patch.setattr(dispatcher, "choose", lambda *given: change(original, *given))


@mutation
def the_newest_goes_first(patch: Patch) -> None:
    choosing(patch, lambda original, waiting, *rest: original(list(reversed(waiting)), *rest))


@mutation
def back_off_blocks_nobody(patch: Patch) -> None:
    choosing(
        patch,
        lambda original, waiting, campaigns, sizes, vehicle, limited, now: original(
            [one for one in waiting if one.not_before <= now], campaigns, sizes, vehicle, limited, now
        ),
    )


@mutation
def a_vehicle_gets_what_it_is_not_subscribed_to(patch: Patch) -> None:
    """Nobody answers that."""
    patch.setattr(vehicles.Vehicle, "takes", lambda self, request_id: True)
    patch.setattr(sim_node.SimNode, "_send", _unless_wanted(sim_node.SimNode._send))


def _unless_wanted(original: Any) -> Any:
    def send(self: Any, effect: Any, taken: Any) -> None:
        link = self.links.get(effect.vehicle.client_id)
        requests = effect.vehicle.requests
        if link is not None and requests is not None and effect.campaign.request_id not in requests:
            self.truth.fail(f"{effect.vehicle.vin} is sent what it is not subscribed to")
        original(self, effect, taken)

    return send


@mutation
def what_is_too_large_is_not_looked_at(patch: Patch) -> None:
    choosing(
        patch,
        lambda original, waiting, campaigns, sizes, *rest: original(waiting, campaigns, dict.fromkeys(sizes, 1), *rest),
    )
    patch.setattr(Dispatcher, "_unsendable", lambda self, *given: None)


@mutation
def what_has_expired_is_sent(patch: Patch) -> None:
    choosing(
        patch,
        lambda original, waiting, *rest: original([one._replace(expires=inf) for one in waiting], *rest),
    )
    patch.setattr(SimNode, "_end_expired", lambda self: iter(()))
    wrap(patch, SimTable, "look_up", _never_expires)


def _never_expires(original: Any, self: Any, vins: Any, limit: int) -> Any:
    found = original(self, vins, limit)
    now = self.now()
    if any(row.expires < now - 30 for one in found.values() for row in one.waiting):
        self.truth.fail("something waits long after it has expired")
    return found


@mutation
def whatever_comes_later_supersedes(patch: Patch) -> None:
    patch.setattr(choice, "_is_superseded", lambda delivery, campaign, waiting, campaigns: len(waiting) > 1)


@mutation
def one_that_is_tried_again_supersedes_newer_data(patch: Patch) -> None:
    def superseded(delivery: Any, campaign: Any, waiting: Any, campaigns: Any) -> bool:
        return delivery.sent is not None and any(
            one.place > delivery.place
            and one.campaign != delivery.campaign
            and campaigns[one.campaign].request_id == campaign.request_id
            for one in waiting
            if one.campaign in campaigns
        )

    patch.setattr(choice, "_is_superseded", superseded)


# -- control -----------------------------------------------------------------------------------------------


@mutation
def a_paused_campaign_sends(patch: Patch) -> None:
    def change(original: Any, self: Any, now: float) -> None:
        original(self, now)
        if self.campaign.state is State.PAUSED:
            self.campaign = msgspec.structs.replace(self.campaign, sending=True)

    wrap(patch, CampaignControl, "_follow", change)


@mutation
def a_paused_campaign_cannot_be_told_from_one_that_was_never_paused(patch: Patch) -> None:
    """Nobody hears that it goes on, if nobody has looked in between."""

    def change(original: Any, self: Any, **changes: Any) -> None:
        changes.pop("opened", None)
        if changes:
            original(self, **changes)

    wrap(patch, CampaignControl, "_remember", change)


@mutation
def a_wave_does_not_wait_for_the_one_before(patch: Patch) -> None:
    patch.setattr(control, "_cut_of", lambda memory: control.EVERYBODY if memory.cuts else None)
    wrap(patch, SimTable, "change_campaign", _looks_at_cut)


def _looks_at_cut(original: Any, self: Any, changed: Any, epoch: Any = None) -> Any:
    memory = control.memory_of(changed)
    if changed.cut is not None and memory.wave < len(memory.cuts) and changed.cut > memory.cuts[memory.wave]:
        self.truth.fail("a wave goes beyond its cut")
    return original(self, changed, epoch)


@mutation
def a_wave_begins_whatever_was_acked(patch: Patch) -> None:
    def change(original: Any, self: Any, counts: Any, ended: int, now: float, effects: Any) -> None:
        counts = msgspec.structs.replace(counts, acked=ended)
        original(self, counts, ended, now, effects)

    wrap(patch, CampaignControl, "_look_at_waves", change)


@mutation
def a_campaign_is_closed_while_something_waits(patch: Patch) -> None:
    wrap(
        patch,
        CampaignControl,
        "_look",
        lambda original, self, counts, *rest: original(self, type(counts)(acked=counts.targets), *rest),
    )


@mutation
def a_campaign_is_never_closed(patch: Patch) -> None:
    patch.setattr(CampaignControl, "_is_over", lambda self, *given: False)


@mutation
def what_was_cancelled_is_never_ended(patch: Patch) -> None:
    patch.setattr(SimNode, "_end_waiting", lambda self, campaign: iter(()))


# -- the store's decisions ---------------------------------------------------------------------------------


@mutation
def two_may_be_in_flight(patch: Patch) -> None:
    def change(original: Any, self: Any, change: Any) -> Any:
        flights, self._of.flights = self._of.flights, {}
        try:
            return original(self, change)
        finally:
            self._of.flights = {**flights, **self._of.flights}

    decide(patch, "_begin", change)


@mutation
def an_old_session_may_begin(patch: Patch) -> None:
    def change(original: Any, self: Any, change: Any) -> Any:
        self._of.epochs[change.flight.sent.client_id] = change.flight.epoch
        return original(self, change)

    decide(patch, "_begin", change)


@mutation
def an_old_session_may_adopt(patch: Patch) -> None:
    def change(original: Any, self: Any, change: Any) -> Any:
        self._of.epochs[change.flight.sent.client_id] = change.flight.epoch
        return original(self, change)

    decide(patch, "_adopt", change)


@mutation
def a_campaign_that_is_held_may_begin(patch: Patch) -> None:
    def change(original: Any, self: Any, change: Any) -> Any:
        id_ = change.seen.campaign
        self._of.campaigns[id_] = self._of.campaigns[id_]._replace(sending=True)
        return original(self, change)

    decide(patch, "_begin", change)


@mutation
def nobody_looks_at_the_cut(patch: Patch) -> None:
    patch.setattr(fanout_changes, "_within", lambda ticket, cut: True)
    patch.setattr(
        memory.MemoryFanoutTable, "_may_be_sent", lambda self, row: self._state.campaigns[row.campaign].sending
    )


@mutation
def there_are_no_limits(patch: Patch) -> None:
    patch.setattr(_Decision, "_within_limits", lambda self, *given: True)


@mutation
def a_bucket_is_always_full(patch: Patch) -> None:
    def change(original: Any, self: Any, *given: Any) -> Any:
        self._of.buckets.clear()
        return original(self, *given)

    decide(patch, "_within_limits", change)


@mutation
def in_flight_is_counted_once(patch: Patch) -> None:
    """Two of one transaction count as one."""

    def change(original: Any, self: Any, id_: int, *given: Any) -> Any:
        before = self._of.in_flight.get(id_, 0)
        done = original(self, id_, *given)
        self._of.in_flight[id_] = before
        return done

    decide(patch, "_within_limits", change)


@mutation
def a_late_return_takes_back_what_was_begun_since(patch: Patch) -> None:
    patch.setattr(_Decision, "_in_flight", lambda self, seen: self._of.flights.get(seen.vin))


@mutation
def a_return_forgets_the_packet(patch: Patch) -> None:
    decide(patch, "_return", lambda original, self, change: original(self, change._replace(refused=True)))


@mutation
def a_return_is_not_counted(patch: Patch) -> None:
    def change(original: Any, self: Any, change: Return) -> Any:
        done = original(self, change)
        if done is Verdict.DONE:
            self.moves.count(change.seen.campaign, 0, 1)
        return done

    decide(patch, "_return", change)


@mutation
def an_end_is_told_twice(patch: Patch) -> None:
    def change(original: Any, self: Any, change: Finish) -> Any:
        done = original(self, change)
        if done is Verdict.DONE and isinstance(change.seen, fanout_changes.InFlight):
            self.moves.ended.append(self.moves.ended[-1])
        return done

    decide(patch, "_finish", change)


@mutation
def a_result_is_awaited_for_ever(patch: Patch) -> None:
    decide(patch, "_await", lambda original, self, change: original(self, Await(change.seen, inf)))


# -- intake, merging, collection ---------------------------------------------------------------------------


def merging(patch: Patch, change: Callable[..., Any]) -> None:
    original = fanout_changes.merge
    patch.setattr(memory, "merge", lambda *given: change(original, *given))


@mutation
def a_repeat_is_another_target(patch: Patch) -> None:
    def change(original: Any, rows: Any, parts: Any, there: Any, moves: Any) -> Any:
        return original(rows, parts, there._replace(targets=set()), moves)

    merging(patch, change)


@mutation
def what_is_replaced_stays(patch: Patch) -> None:
    def change(original: Any, rows: Any, parts: Any, there: Any, moves: Any) -> Any:
        gone = original(rows, parts, there, moves)
        moves.ended = [one for one in moves.ended if one.end is not End.SUPERSEDED]
        return gone

    merging(patch, change)


@mutation
def a_merge_tells_nobody(patch: Patch) -> None:
    patch.setattr(memory.MemoryFanoutTable, "parts_since", lambda self, merged, limit: [])


@mutation
def a_refused_upload_is_left_over(patch: Patch) -> None:
    original = fanout_intake._campaign_of

    def change(batch: Any, made: Any) -> Any:
        if batch.upload is not None:
            made.uploads.append(batch.upload)
        found = original(batch, made)
        if batch.upload is not None:
            made.uploads.remove(batch.upload)
        return found

    patch.setattr(fanout_intake, "_campaign_of", change)


@mutation
def a_campaign_is_closed_although_a_batch_has_come(patch: Patch) -> None:
    def change(original: Any, self: Any, changed: Any, epoch: Any = None) -> Any:
        seen = self._state.campaigns.get(changed.id)
        if seen is not None:
            changed = msgspec.structs.replace(changed, batch_at=seen.batch_at)
        return original(self, changed, epoch)

    wrap(patch, memory.MemoryFanoutTable, "change_campaign", change)


@mutation
def another_keeper_may_change_a_campaign(patch: Patch) -> None:
    """As if there were no version."""

    def change(original: Any, self: Any, changed: Any, epoch: Any = None) -> Any:
        seen = self._state.campaigns.get(changed.id)
        if seen is not None:
            changed = msgspec.structs.replace(changed, version=seen.version + 1)
        return original(self, changed)

    wrap(patch, memory.MemoryFanoutTable, "change_campaign", change)


@mutation
def payloads_are_collected_early(patch: Patch) -> None:
    wrap(
        patch,
        memory.MemoryFanoutTable,
        "_collect_rest",
        lambda original, self, payloads, keys, limit: original(self, inf, keys, limit),
    )


@mutation
def payloads_are_never_collected(patch: Patch) -> None:
    patch.setattr(memory.MemoryFanoutTable, "_collect_rest", lambda self, *given: 0)


@pytest.mark.parametrize("name", MUTATIONS)
def test_the_simulator_finds(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    MUTATIONS[name](monkeypatch)
    for seed in [NOTICED_BY.get(name, 0), *range(SEEDS_MAX)]:
        if run_fanout_seed(seed, faults=WEATHER.get(name)).failure:
            return
    pytest.fail(f"{SEEDS_MAX} seeds did not notice that {name.replace('_', ' ')}")


def test_there_are_enough() -> None:
    assert len(MUTATIONS) >= 50
