"""Faults planted in the path of a message, one at a time: the simulator must find each.

A fault that survives is a hole in the workload or in the checkers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from holdfast.cursors.cursor_map import NOTHING_DONE, CursorMap
from holdfast.delivery import readers
from holdfast.delivery.delivery import Delivery, NextTurn
from holdfast.delivery.readers import LoanReader, OwnReader, ReaderStatus
from holdfast.mqtt.connection import Connection, Hold, PauseReading, ResumeReading
from holdfast.mqtt.inbound import Inbound
from holdfast.sessions.life import SessionLife
from holdfast.sessions.outgoing import Outgoing
from holdfast.sessions.positions import Positions, StreamOrigin
from holdfast.sessions.retained import RetainedMessages
from holdfast.sessions.session import Session
from holdfast.sessions.shared import LoanFeed
from holdfast.sessions.window import Window
from holdfast.sim.front import scenes
from holdfast.sim.front.delivery import SimDelivery
from holdfast.sim.front.runner import run_front_seed
from holdfast.sim.front.subscribing import SimSubscribing
from holdfast.sim.front.table import SimTable

SEEDS_MAX = 400

NOTICED_BY: dict[str, int] = {
    "a_subscribe_does_not_wait_for_blocks_that_wait_for_others": 1,
    "a_failed_read_is_not_tried_again": 1,
    "cursors_pass_what_is_in_flight": 1,
    "nobody_is_served_when_the_socket_takes_more": 1,
    "live_loans_do_not_ask_how_much_waits": 14,
    "a_failed_commit_is_not_looked_for": 7,
    "what_a_client_acknowledged_last_is_not_saved": 7,
    "what_waits_stays_when_a_filter_goes_back": 8,
    "packet_ids_begin_at_1_again": 18,
    "whether_to_read_is_said_last": 3,
    "packet_ids_of_publishes_are_not_stored_with_them": 51,
    "caught_up_is_off_by_one": 5,
    "what_old_filters_found_is_taken": 2,
    "a_read_is_not_given_back": 2,
    "what_is_in_flight_is_sent_again_when_it_is_read": 8,
    "unsubscribed_messages_are_still_sent": 17,
    "a_stopped_loan_is_sent_on": 17,
    "a_loan_starts_over_what_is_done": 2,
    "a_live_loan_is_told_nothing_of_what_is_not_its_own": 11,
    "cleared_retained_messages_are_kept": 2,
    "retained_messages_are_sent_in_one_turn_only": 37,
    "our_own_early_blocks_are_forgotten": 2,
}
"""Where it was last found, to be tried first; wrong once the workload changes, which only costs time."""

SCENE: dict[str, scenes.Scene] = {
    "a_failed_commit_is_not_looked_for": scenes.A_LIE_BEFORE_A_SUBSCRIBE,
    "what_a_client_acknowledged_last_is_not_saved": scenes.BACK_BEFORE_A_CRASH,
    "new_streams_count_as_read_by_those_who_are_away": scenes.NEW_STREAMS_WHILE_AWAY,
    "what_waits_stays_when_a_filter_goes_back": scenes.EARLIER_THAN_WHAT_WAITS,
    "what_is_asked_for_again_stays_acknowledged": scenes.CRASH_AND_OVER,
    "what_others_have_had_comes_again_with_a_filter_that_goes_back": scenes.OVER_AND_CRASH,
    "packet_ids_begin_at_1_again": scenes.HALF_DONE_AT_A_CRASH,
    "what_old_filters_found_is_taken": scenes.BACK_AND_OTHER_FILTERS,
    "unsubscribed_messages_are_still_sent": scenes.GONE_WHILE_IT_WAITS,
    "packet_ids_of_publishes_are_not_stored_with_them": scenes.HALF_DONE_AT_A_CRASH,
    "whether_to_read_is_said_last": scenes.MORE_THAN_IS_TAKEN,
    "nobody_is_served_when_the_socket_takes_more": scenes.GONE_WHILE_IT_WAITS,
    "reading_is_never_paused": scenes.MORE_THAN_IS_TAKEN,
}
"""The scene in which it shows soonest, where all that is drawn seldom has it."""

Patch = pytest.MonkeyPatch
MUTATIONS: dict[str, Callable[[Patch], None]] = {}


def mutation(plant: Callable[[Patch], None]) -> Callable[[Patch], None]:
    MUTATIONS[plant.__name__] = plant
    return plant


def wrap(patch: Patch, cls: type, name: str, change: Callable[..., Any]) -> None:
    """Replace a method by one that is given the original first."""
    original = getattr(cls, name)
    patch.setattr(cls, name, lambda self, *args, **kwargs: change(original, self, *args, **kwargs))


# -- the faults, as they were ----------------------------------------------------------------------


@mutation
def a_loan_is_not_put_among_those_that_wait(patch: Patch) -> None:
    """Fault 1: it is behind after a read, and nobody reads on for it."""

    def change(original: Any, self: Any, reader: Any) -> None:
        original(self, reader)
        if isinstance(reader, LoanReader) and reader.status is ReaderStatus.WAITING:
            reader.outlet.waiting.pop(reader, None)

    wrap(patch, Delivery, "_stop_reading", change)


@mutation
def live_offers_do_not_ask_how_much_waits(patch: Patch) -> None:
    """Fault 2: one client that does not read costs as much as is published."""

    def change(original: Any, self: Any, rows: Any, picks: Any, bytes_max: int, *, hold: bool = False) -> Any:
        return original(self, rows, picks, 1 << 40, hold=hold)

    wrap(patch, Session, "offer", change)


@mutation
def live_loans_do_not_ask_how_much_waits(patch: Patch) -> None:
    def change(original: Any, self: Any, reader: Any, rows: Any, picks: Any, past: int, now: float, out: Any) -> None:
        reader.outlet.session.outgoing.put(rows, reader.feed.choose(rows, picks, past), reader.feed)
        self._serve(reader.outlet, now, out)

    wrap(patch, Delivery, "_offer_loan", change)


@mutation
def a_subscribe_does_not_wait_for_what_was_published(patch: Patch) -> None:
    """Fault 3."""
    patch.setattr(SimSubscribing, "_published_before", lambda self: iter(()))


@mutation
def a_subscribe_does_not_wait_for_blocks_that_wait_for_others(patch: Patch) -> None:
    patch.setattr(Delivery, "waits_for_others", property(lambda self: False))
    patch.setattr(SimDelivery, "in_doubt", property(lambda self: False))


# -- those that the simulator found ------------------------------------------------------------------------


@mutation
def a_failed_commit_is_not_looked_for(patch: Patch) -> None:
    patch.setattr(SimDelivery, "doubt", lambda self: None)


@mutation
def what_a_client_acknowledged_last_is_not_saved(patch: Patch) -> None:
    wrap(patch, SessionLife, "_remembered", lambda original, self, row: row)


@mutation
def one_event_may_write_any_number_of_turns(patch: Patch) -> None:
    def change(original: Any, self: Any, outlet: Any, *args: Any) -> Any:
        outlet.turn = -1
        return original(self, outlet, *args)

    wrap(patch, Delivery, "_send", change)


@mutation
def new_streams_count_as_read_by_those_who_are_away(patch: Patch) -> None:
    def change(original: Any, self: Any, *args: Any) -> None:
        original(self, *args)
        self.unread_from = None

    wrap(patch, Positions, "restart", change)


@mutation
def what_waits_stays_when_a_filter_goes_back(patch: Patch) -> None:
    def change(original: Any, self: Any, *args: Any) -> Any:
        self.outgoing.keep = lambda wanted: None
        try:
            return original(self, *args)
        finally:
            del self.outgoing.keep

    wrap(patch, Session, "subscribe", change)


@mutation
def what_is_asked_for_again_stays_acknowledged(patch: Patch) -> None:
    patch.setattr(CursorMap, "lower", lambda self, other: None)


@mutation
def what_others_have_had_comes_again_with_a_filter_that_goes_back(patch: Patch) -> None:
    def change(original: Any, self: Any, subscription: Any, *args: Any) -> Any:
        new = original(self, subscription, *args)
        for other in self.subscriptions:
            if other is not subscription:
                other.done = NOTHING_DONE
        return new

    wrap(patch, Session, "subscribe", change)


@mutation
def packet_ids_begin_at_1_again(patch: Patch) -> None:
    patch.setattr(Window, "begin_elsewhere", lambda self, number: None)


@mutation
def whether_to_read_is_said_last(patch: Patch) -> None:
    def change(original: Any, self: Any, event: Any, now: float) -> Any:
        return sorted(original(self, event, now), key=lambda one: isinstance(one, PauseReading | ResumeReading))

    wrap(patch, Connection, "handle", change)


@mutation
def packet_ids_of_publishes_are_not_stored_with_them(patch: Patch) -> None:
    patch.setattr(SimTable, "receive", lambda self, received: None)


# -- others ------------------------------------------------------------------------------------------------


@mutation
def qos_2_ids_are_forgotten(patch: Patch) -> None:
    patch.setattr(Inbound, "__contains__", lambda self, packet_id: False)


@mutation
def the_window_frees_ids_at_pubrec(patch: Patch) -> None:
    def change(original: Any, self: Any, packet_id: int, reason: int = 0) -> Any:
        found = original(self, packet_id, reason)
        self._in_flight.pop(packet_id, None)
        self.last_id = packet_id - 1
        return found

    wrap(patch, Window, "pubrec", change)


@mutation
def the_window_is_one_too_large(patch: Patch) -> None:
    def change(original: Any, self: Any, out: Any, room: int, *args: Any) -> Any:
        return original(self, out, room + 1, *args)

    wrap(patch, Outgoing, "take", change)


@mutation
def caught_up_is_off_by_one(patch: Patch) -> None:
    wrap(patch, Positions, "caught_up", lambda original, self, stream, head: original(self, stream, head - 1))


@mutation
def what_old_filters_found_is_taken(patch: Patch) -> None:
    def change(original: Any, self: Any, found: Any) -> None:
        if self.request is not None:
            self.request = self.request._replace(wanted=self.outlet.session.subscriptions.wanted)
        original(self, found)

    wrap(patch, OwnReader, "take", change)


@mutation
def the_next_turn_is_forgotten(patch: Patch) -> None:
    def change(original: Any, self: Any, event: Any, now: float) -> Any:
        return [effect for effect in original(self, event, now) if not isinstance(effect, NextTurn)]

    wrap(patch, Delivery, "handle", change)


@mutation
def a_failed_read_is_not_tried_again(patch: Patch) -> None:
    def change(self: Any, reader: Any, now: float) -> None:
        self._fetching -= 1

    patch.setattr(Delivery, "_on_fetch_failed", change)


@mutation
def a_read_is_not_given_back(patch: Patch) -> None:
    def change(original: Any, self: Any, reader: Any) -> None:
        original(self, reader)
        if reader.status is ReaderStatus.OVER:
            reader.outlet.reads += 1
            self._fetching += 1

    wrap(patch, Delivery, "_stop_reading", change)


@mutation
def acknowledgements_are_not_saved(patch: Patch) -> None:
    patch.setattr(StreamOrigin, "settle", lambda self, delivery, reason: None)
    patch.setattr(Positions, "read_to", lambda self, stream, past: self.behind.__setitem__(stream, past))


@mutation
def cursors_pass_what_is_in_flight(patch: Patch) -> None:
    wrap(
        patch,
        Positions,
        "bring_up",
        lambda original, self, streams, heads, window, waiting: original(self, streams, heads, Window(), waiting),
    )


@mutation
def what_waits_counts_as_sent(patch: Patch) -> None:
    patch.setattr(Outgoing, "firsts", lambda self: {})


@mutation
def what_is_in_flight_is_sent_again_when_it_is_read(patch: Patch) -> None:
    wrap(patch, Positions, "pick", lambda original, self, rows, window: original(self, rows, Window()))


@mutation
def older_generations_are_overtaken(patch: Patch) -> None:
    patch.setattr(Positions, "waits_for_older", lambda self, stream: False)


@mutation
def unsubscribed_messages_are_still_sent(patch: Patch) -> None:
    patch.setattr(Session, "unsubscribe", lambda self, text: self.subscriptions.remove(text))


@mutation
def a_stopped_loan_is_sent_on(patch: Patch) -> None:
    patch.setattr(Outgoing, "drop", lambda self, feed: None)


@mutation
def a_loan_passes_over_what_waits(patch: Patch) -> None:
    def change(original: Any, self: Any, chosen: Any, past: int) -> None:
        original(self, (), past)

    wrap(patch, LoanFeed, "_pass_over", change)


@mutation
def a_loan_starts_over_what_is_done(patch: Patch) -> None:
    def change(original: Any, self: Any, rows: Any, picks: Any, past: int) -> Any:
        original(self, rows, picks, past)
        return picks

    wrap(patch, LoanFeed, "choose", change)


@mutation
def a_live_loan_is_told_nothing_of_what_is_not_its_own(patch: Patch) -> None:
    patch.setattr(Delivery, "pass_over", lambda self, outlet: None)


@mutation
def the_socket_is_never_full(patch: Patch) -> None:
    def change(original: Any, self: Any, outlet: Any, *args: Any) -> None:
        outlet.blocked = False
        original(self, outlet, *args)

    wrap(patch, Delivery, "_serve", change)


@mutation
def nobody_is_served_when_the_socket_takes_more(patch: Patch) -> None:
    def change(original: Any, self: Any, event: Any, now: float) -> Any:
        if type(event).__name__ == "Blocked":
            event.outlet.blocked = event.blocked
            return []
        return original(self, event, now)

    wrap(patch, Delivery, "handle", change)


@mutation
def a_held_connection_is_not_parsed_again(patch: Patch) -> None:
    def change(original: Any, self: Any, hold: Hold, now: float) -> None:
        if hold is Hold.COMMIT:
            self.holds.discard(hold)
        else:
            original(self, hold, now)

    wrap(patch, Connection, "_release", change)


@mutation
def reading_is_never_paused(patch: Patch) -> None:
    patch.setattr(Connection, "_mind_reading", lambda self: None)


@mutation
def publishes_are_acknowledged_before_they_are_stored(patch: Patch) -> None:
    def change(original: Any, self: Any, packet: Any) -> None:
        original(self, packet)
        if packet.qos == 2:
            self._write(b"\x50\x02" + packet.packet_id.to_bytes(2))

    wrap(patch, Connection, "_on_publish", change)


@mutation
def cleared_retained_messages_are_kept(patch: Patch) -> None:
    wrap(patch, RetainedMessages, "keep", lambda original, self, one: original(self, one) if one.payload else None)


@mutation
def retained_messages_are_sent_in_one_turn_only(patch: Patch) -> None:
    def change(original: Any, self: Any, outlet: Any, now: float) -> None:
        original(self, outlet, now)
        outlet.retained.clear()

    wrap(patch, Delivery, "_take_retained", change)


@mutation
def a_reader_may_be_live_and_behind(patch: Patch) -> None:
    def change(original: Any, self: Any, reader: Any) -> None:
        if isinstance(reader, OwnReader) and reader.status is ReaderStatus.READING:
            readers.move(reader, ReaderStatus.LIVE)
            return
        original(self, reader)

    wrap(patch, Delivery, "_consider", change)


@mutation
def our_own_early_blocks_are_forgotten(patch: Patch) -> None:
    patch.setattr(Delivery, "_deliver_early", lambda self, stream, now, effects: None)


@pytest.mark.parametrize("name", MUTATIONS)
def test_the_simulator_finds(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    MUTATIONS[name](monkeypatch)
    for seed in [NOTICED_BY.get(name, 0), *range(SEEDS_MAX)]:
        if run_front_seed(seed, scene=SCENE.get(name, ())).failure:
            return
    pytest.fail(f"{SEEDS_MAX} seeds did not notice that {name.replace('_', ' ')}")


def test_there_are_enough() -> None:
    assert len(MUTATIONS) >= 12
