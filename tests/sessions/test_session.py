"""A session by hand: what it sends, under which id and options, and how far it says it has come."""

from __future__ import annotations

import pytest
from deliveries import NEXT_S, NO_LIMIT, S, away, begun, offer, packets, payloads, rows, sent, subscribed

from holdfast.cursors import Cursor
from holdfast.cursors.cursor_map import DONE, CursorMap
from holdfast.model import RETAIN, Batch, Stream
from holdfast.mqtt import properties
from holdfast.mqtt.packets import V5, V311
from holdfast.sessions.heads import Heads
from holdfast.sessions.positions import Gap
from holdfast.sessions.rows import Rows
from holdfast.sessions.session import Session
from holdfast.sessions.subscriptions import Subscription
from holdfast.sessions.window import NOBODY, RELEASED, Delivery, Pubrec

OTHER = Stream("messages", 1, 1)


def cursor_of(session: Session, heads: dict[Stream, int], filter_text: str = "#", stream: Stream = S) -> Cursor:
    return session.cursors([stream], heads)[filter_text, stream]


def ids(publishes: list) -> list[int]:
    return [one.packet_id for one in publishes]


# -- the window and packet ids ---------------------------------------------------------------------------


def test_packet_ids_count_up_from_one():
    session = subscribed("#")
    offer(session, rows(0, ["t"] * 3))
    assert ids(sent(session)) == [1, 2, 3]


def test_the_receive_maximum_bounds_what_is_under_way_and_an_ack_makes_room():
    session = subscribed("#")
    offer(session, rows(0, ["t"] * 5))
    assert payloads(sent(session, room=2)) == [0, 1]
    assert sent(session, room=2) == []
    assert session.window.puback([1]) is None
    assert payloads(sent(session, room=2)) == [2]
    session.window.puback([2, 3])
    assert payloads(sent(session, room=2)) == [3, 4]


def test_packet_ids_wrap_around_and_pass_over_those_in_use():
    session = subscribed("#")
    offer(session, rows(0, ["t"] * 65_535))
    first = sent(session)
    assert ids(first) == list(range(1, 65_536))
    session.window.puback([n for n in range(1, 65_536) if n not in (1, 3)])
    offer(session, rows(65_535, ["t"] * 3))
    assert ids(sent(session)) == [2, 4, 5]


def test_with_every_packet_id_in_use_nothing_is_sent_and_nothing_hangs():
    session = subscribed("#")
    offer(session, rows(0, ["t"] * 65_536))
    assert len(sent(session, room=65_535)) == 65_535
    assert sent(session, room=65_535) == []
    session.window.puback([40_000])
    assert ids(sent(session, room=65_535)) == [40_000]


def test_qos_0_needs_no_room_and_no_id():
    session = subscribed(Subscription("#", 0))
    offer(session, rows(0, ["t"] * 3))
    found = sent(session, room=0)
    assert payloads(found) == [0, 1, 2] and ids(found) == [0, 0, 0] and not len(session.window)


def test_a_full_window_holds_up_later_messages_of_the_stream_whatever_their_qos():
    session = subscribed("#")
    offer(session, rows(0, ["t"] * 3, flags=[1, 1, 0]))
    assert payloads(sent(session, room=1)) == [0]
    session.window.puback([1])
    assert payloads(sent(session, room=1)) == [1, 2]


def test_bytes_are_bounded_but_something_always_moves():
    session = subscribed("#")
    offer(session, rows(0, ["t"] * 4, payloads=[b"x" * 1000] * 4))
    assert len(sent(session, bytes_max=1)) == 1
    assert len(sent(session, bytes_max=1500)) == 2
    assert len(sent(session, bytes_max=1500)) == 1
    assert session.outgoing.rows == 0 and session.outgoing.bytes == 0


@pytest.mark.parametrize("asked", [0, 1, 2])
@pytest.mark.parametrize("published", [0, 1, 2])
@pytest.mark.parametrize("version", [V311, V5])
def test_the_lesser_of_both_qualities_is_delivered(asked, published, version):
    session = subscribed(Subscription("#", asked))
    offer(session, rows(0, ["t"], flags=published))
    (found,) = sent(session, version=version)
    assert found.qos == min(asked, published)
    assert not found.dup and not found.retain


# -- acknowledgements ------------------------------------------------------------------------------------


def test_a_late_or_repeated_ack_is_harmless():
    session = subscribed("#")
    offer(session, rows(0, ["t"] * 2))
    sent(session)
    assert session.window.puback([1, 1, 77]) is None
    assert [i for i, _ in session.window] == [2]


def test_a_puback_for_a_qos_2_delivery_names_the_id():
    session = subscribed(Subscription("#", 2))
    offer(session, rows(0, ["t"], flags=2))
    sent(session)
    assert session.window.puback([1]) == 1
    assert 1 in session.window


def test_qos_2_goes_through_its_states():
    session = subscribed(Subscription("#", 2))
    offer(session, rows(0, ["t"] * 2, flags=[2, 1]))
    sent(session)
    assert not session.window.pubcomp(1), "a PUBCOMP before its PUBREC is out of turn"
    assert session.window.pubrec(1) is Pubrec.RELEASE
    assert session.window.pubrec(1) is Pubrec.AGAIN
    assert session.window.pubrec(2) is Pubrec.WRONG
    assert session.window.pubrec(9) is Pubrec.UNKNOWN
    assert cursor_of(session, {S: 2}) == Cursor(0, epoch=1), "PUBREC is what moves the cursor"
    assert 1 in session.window, "its id is not free before PUBCOMP"
    assert session.window.pubcomp(1) and 1 not in session.window
    assert session.window.pubcomp(1), "a PUBCOMP that comes again is harmless"


def test_a_refused_qos_2_delivery_is_over_and_counts_as_handled():
    session = subscribed(Subscription("#", 2))
    offer(session, rows(0, ["t"], flags=2))
    sent(session)
    session.window.pubrec(1, 0x80)
    assert not len(session.window) and S in session.positions.dirty
    assert cursor_of(session, {S: 1}).offset == 0


def test_the_id_of_a_released_delivery_is_not_given_away():
    session = subscribed(Subscription("#", 2))
    offer(session, rows(0, ["t"], flags=2))
    sent(session)
    session.window.pubrec(1)
    session.window.last_id = 65_535
    offer(session, rows(1, ["t"], flags=2))
    assert ids(sent(session)) == [2]


# -- options ---------------------------------------------------------------------------------------------


def test_no_local_keeps_a_clients_own_messages_from_it_and_lets_the_cursor_pass():
    session = subscribed(Subscription("#", 1, no_local=True))
    offer(session, rows(0, ["t"] * 3, publishers=["me", "you", "me"]))
    assert payloads(sent(session)) == [1]
    session.window.puback([1])
    assert S in session.positions.dirty
    assert cursor_of(session, {S: 3}).offset == 2


def test_no_local_of_one_subscription_does_not_silence_another():
    session = subscribed(Subscription("a/#", 1, no_local=True), Subscription("#", 1))
    offer(session, rows(0, ["a/b"], publishers="me"))
    assert payloads(sent(session)) == [0]


@pytest.mark.parametrize("as_published", [False, True])
def test_retain_as_published(as_published):
    session = subscribed(Subscription("#", 1, retain_as_published=as_published))
    offer(session, rows(0, ["t"] * 2, flags=[1 | RETAIN, 1]))
    assert [one.retain for one in sent(session)] == [as_published, False]


def test_retained_messages_keep_the_bit_and_move_no_cursor():
    session = subscribed("#")
    kept = rows(0, ["t"], stream=None, flags=1 | RETAIN)
    session.outgoing.put(kept, [0])
    (found,) = sent(session)
    assert found.retain and found.qos == 1 and not found.dup
    session.window.puback([found.packet_id])
    assert not session.positions.dirty and not len(session.window)


def test_overlapping_subscriptions_deliver_once_with_every_identifier_and_the_best_quality():
    session = subscribed(
        Subscription("a/#", 0, identifier=5), Subscription("a/b", 1, identifier=300), Subscription("+/b", 0)
    )
    offer(session, rows(0, ["a/b", "a/c", "x/b"]))
    one, two, three = sent(session)
    assert (one.qos, one.subscription_identifiers) == (1, (5, 300))
    assert (two.qos, two.subscription_identifiers) == (0, (5,))
    assert (three.qos, three.subscription_identifiers) == (0, ())


def test_identifiers_and_properties_are_for_mqtt_5_only():
    session = subscribed(Subscription("#", 1, identifier=5))
    offer(session, rows(0, ["t"], properties=[b"\x01\x01"]))
    (found,) = sent(session, version=V311)
    assert found.properties == b"" and found.subscription_identifiers == () and found.payload == b"0"


def test_properties_are_passed_on_and_none_are_made_up():
    wire = properties.encode({"content_type": "text/plain", "user_properties": [("a", "b"), ("a", "b")]})
    session = subscribed("#")
    offer(session, rows(0, ["t"] * 2, properties=[wire, None]))
    assert [one.properties for one in sent(session)] == [wire, b""]


def test_long_properties_have_a_length_of_two_bytes():
    wire = properties.encode({"user_properties": [("k" * 100, "v" * 100)]})
    session = subscribed("#")
    offer(session, rows(0, ["t"], properties=[wire]))
    assert [one.properties for one in sent(session)] == [wire]


def test_the_remaining_life_is_passed_on_and_the_dead_are_not_sent():
    wire = properties.encode({"message_expiry": 10, "content_type": "x"})
    session = subscribed("#")
    offer(session, rows(0, ["t"] * 3, properties=[wire] * 3, times=[0, 4_000_000, -2_000_000]))
    found = sent(session, now=8.5)
    assert [properties.expiry_of(one.properties) for one in found] == [2, 6]
    assert payloads(found) == [0, 1]
    session.window.puback(ids(found))
    assert cursor_of(session, {S: 3}).offset == 2, "an expired message holds no cursor up"


def test_a_clock_that_went_back_gives_no_message_more_life_than_it_had():
    wire = properties.encode({"message_expiry": 10})
    session = subscribed("#")
    offer(session, rows(0, ["t"], properties=[wire], times=50_000_000))
    assert properties.expiry_of(sent(session, now=0.0)[0].properties) == 10


@pytest.mark.parametrize("size", [100, 127, 128, 129, 130, 16_383, 16_384, 16_390])
@pytest.mark.parametrize("version", [V311, V5])
def test_what_fits_the_maximum_packet_size_exactly_is_sent_and_a_byte_more_is_not(size, version):
    session = subscribed("#")
    offer(session, rows(0, ["t"], payloads=[b"x" * size]))
    out: list[bytes] = []
    session.outgoing.take(out, 10, NO_LIMIT, version, NO_LIMIT, 0.0)
    exact = len(b"".join(out))
    for limit, expected in [(exact, 1), (exact - 1, 0)]:
        session = subscribed("#")
        offer(session, rows(0, ["t"] * 2, payloads=[b"x" * size, b""]))
        found = sent(session, version=version, packet_max=limit)
        assert [len(one.payload) for one in found] == [size] * expected + [0]


def test_a_message_too_large_for_the_client_holds_nothing_up():
    session = subscribed("#")
    offer(session, rows(0, ["t"] * 3, payloads=[b"0", b"x" * 500, b"2"]))
    found = sent(session, packet_max=100)
    assert payloads(found) == [0, 2]
    session.window.puback(ids(found))
    assert cursor_of(session, {S: 3}).offset == 2


# -- live and behind -------------------------------------------------------------------------------------


def test_a_session_with_enough_waiting_is_behind_from_there_on():
    session = subscribed("#")
    assert offer(session, rows(0, ["t"] * 10), bytes_max=100), "one block is always taken"
    assert not offer(session, rows(10, ["t"] * 10), bytes_max=100)
    assert session.positions.behind == {S: 10}
    assert not offer(session, rows(20, ["t"]), bytes_max=NO_LIMIT), "behind is behind, whatever room there is"
    assert session.positions.behind == {S: 10} and payloads(sent(session)) == list(range(10))


def test_a_stream_that_is_behind_starts_at_the_first_message_the_session_wants():
    session = subscribed("b")
    offer(session, rows(0, ["b"]), bytes_max=1)
    offer(session, rows(1, ["a", "a", "b"]), bytes_max=1)
    assert session.positions.behind == {S: 3}


def test_what_was_read_comes_after_what_was_offered_and_then_the_stream_is_live():
    session = subscribed("#")
    heads = {S: 4}
    offer(session, rows(0, ["t"] * 2), bytes_max=1)
    offer(session, rows(2, ["t"] * 2), bytes_max=1)
    session.take_read(S, 4, [rows(2, ["t"] * 2)], heads[S])
    assert not session.positions.behind
    assert offer(session, rows(4, ["t"]))
    assert payloads(sent(session)) == [0, 1, 2, 3, 4]


def test_not_yet_caught_up_stays_behind():
    session = subscribed("#")
    session.positions.behind[S] = 3
    assert session.positions.caught_up(S, 4) is None
    assert session.positions.behind == {S: 3}


def test_a_read_that_saw_more_than_was_dispatched_does_not_deliver_it_twice():
    session = subscribed("#")
    session.positions.behind[S] = 0
    # The log held six messages when it was read, of which the node had delivered two.
    session.take_read(S, 6, [rows(first, ["t"] * 3) for first in (0, 3)], 2)
    assert not session.positions.behind
    offer(session, rows(2, ["t"] * 4))
    assert payloads(sent(session)) == [0, 1, 2, 3, 4, 5]
    assert session.outgoing.rows == 0 and session.outgoing.bytes == 0


def test_an_older_generation_is_read_to_its_end_before_the_next_is_offered():
    session = subscribed("#")
    session.positions.behind[S] = 0
    assert not offer(session, rows(0, ["t"], stream=NEXT_S))
    assert session.positions.behind == {S: 0, NEXT_S: 0}
    heads = Heads({S: 5, NEXT_S: 1})
    assert session.positions.next_to_read(heads, session.window) == S
    session.positions.behind[S] = 5
    assert session.positions.caught_up(S, 5) is not None
    assert session.positions.next_to_read(heads, session.window) == NEXT_S


def test_with_nothing_behind_there_is_nothing_to_read():
    session = subscribed("#")
    assert session.positions.next_to_read(Heads({S: 5}), session.window) is None


def test_a_read_leaves_out_what_is_under_way():
    session = subscribed("#")
    session.window.restore(7, Delivery(session.positions.origin(S), 1, 1))
    session.window.restore(8, Delivery(session.positions.origin(OTHER), 0, 1))
    session.window.restore(9, Delivery(NOBODY, 0, RELEASED))
    assert list(session.positions.pick(rows(0, ["t"] * 3), session.window)) == [0, 2]


def test_a_read_leaves_out_what_only_an_ended_or_later_subscription_means():
    session = subscribed(Subscription("a", 1, done=begun({S: 2})), Subscription("b", 1))
    assert list(session.positions.pick(rows(0, ["a", "b", "a", "b"]), session.window)) == [1, 2, 3]
    session.unsubscribe("b")
    assert list(session.positions.pick(rows(0, ["a", "a", "a"]), session.window)) == [2], "it began at 2, alone or not"


# -- subscriptions that change ---------------------------------------------------------------------------


def test_subscribing_again_replaces_the_options_and_keeps_the_start():
    session = Session("me", 100)
    assert session.subscribe(Subscription("a", 1, done=begun({S: 4})))
    assert not session.subscribe(Subscription("a", 2, identifier=3))
    assert session.subscriptions["a"].qos == 2 and session.subscriptions["a"].done == begun({S: 4})


def test_what_waits_for_a_subscription_that_is_gone_is_not_sent():
    session = subscribed("a", "b")
    offer(session, rows(0, ["a", "b", "a"]))
    assert session.unsubscribe("a") is not None
    found = sent(session)
    assert [one.topic for one in found] == ["b"]
    assert session.outgoing.rows == 0 and session.outgoing.bytes == 0


def test_after_the_last_subscription_nothing_is_wanted():
    session = subscribed("a")
    offer(session, rows(0, ["a"]))
    session.unsubscribe("a")
    assert session.subscriptions.wanted is None and sent(session) == []
    assert session.unsubscribe("a") is None


def test_a_new_subscription_finds_its_topics_although_another_route_was_remembered():
    session = subscribed(Subscription("a/#", 1, identifier=1))
    offer(session, rows(0, ["a/b"]))
    sent(session)
    session.subscribe(Subscription("+/b", 1, identifier=2))
    offer(session, rows(1, ["a/b"]))
    assert sent(session)[0].subscription_identifiers == (1, 2)


# -- away and back ---------------------------------------------------------------------------------------


def test_parking_leaves_what_was_not_sent_to_the_log():
    session = subscribed("#")
    offer(session, rows(0, ["t"] * 5))
    sent(session, room=2)
    heads = {S: 5, OTHER: 7}
    session = away(session, heads)
    session.attach(heads, now=0.0)
    assert session.positions.behind == {S: 2}
    assert session.outgoing.rows == 0 and session.outgoing.bytes == 0 and sent(session) == []
    assert len(session.window) == 2, "what is under way stays under way"


def test_coming_back_with_nothing_new_is_being_live():
    session = subscribed("#")
    session = away(session, {S: 5, OTHER: 7})
    session.attach({S: 5, OTHER: 9}, now=0.0)
    assert session.positions.behind == {OTHER: 7}


def test_a_finalised_stream_that_was_read_to_its_end_leaves_nothing_behind():
    session = subscribed("#")
    offer(session, rows(0, ["t"] * 3, stream=OTHER))
    heads = Heads({S: 5, OTHER: 3, NEXT_S: 0}, sealed={S, OTHER})
    session = away(session, heads)
    assert list(session.positions.done) == [(1, 1, 0)] and session.positions.done.spans == [(0, DONE), (2, 0)]
    session.attach(heads, now=0.0)
    assert session.positions.behind == {OTHER: 0}


def test_a_generation_that_began_while_the_client_was_away_is_read_from_its_beginning():
    session = subscribed("#")
    session = away(session, {S: 5})
    heads = Heads({S: 6, NEXT_S: 3, Stream("messages", 1, 2): 0})
    session.attach(heads, now=0.0)
    assert session.positions.behind == {S: 5}
    assert not session.offer(rows(3, ["t"], stream=NEXT_S), [0], NO_LIMIT), "it is not looked at yet"
    feed(session, 5, 6, heads)
    assert session.positions.next_to_read(heads, session.window) == NEXT_S
    assert session.positions.behind == {NEXT_S: 0}


def test_parking_twice_forgets_no_generation_that_came_in_between():
    session = subscribed("#")
    session = away(session, {S: 5})
    session = away(session, Heads({S: 6, NEXT_S: 3}, sealed={S}))  # a connection that was gone before it was attached
    heads = Heads({S: 6, NEXT_S: 3})
    session.attach(heads, now=0.0)
    assert session.positions.behind == {S: 5}
    feed(session, 5, 6, heads)
    session.positions.open(heads, session.window)
    assert session.positions.behind == {NEXT_S: 0}


def test_a_stream_of_the_newest_generation_that_was_not_known_yet_is_read_from_its_beginning():
    session = subscribed("#")
    session = away(session, Heads({S: 5, NEXT_S: 2}, sealed={S}))
    late = Stream("messages", 1, 2)
    session.attach({S: 5, NEXT_S: 2, late: 3}, now=0.0)
    assert session.positions.behind == {late: 0}


def test_dropped_by_retention_while_away_is_recorded():
    session = subscribed("#")
    session = away(session, {S: 5})
    session.attach({NEXT_S: 2}, now=9.0)
    assert session.positions.behind == {NEXT_S: 0}
    assert session.positions.gaps[0] == Gap(str(S), 5, None, "dropped by retention", 9.0)


def test_a_session_that_may_not_go_on_stays_away():
    session = subscribed("#")
    session = away(session, {S: 5})
    assert session.attach({NEXT_S: 2}, 9.0, "error").refuse and not session.attached
    assert session.attach({NEXT_S: 2}, 9.0, "error").refuse
    assert not session.attach({NEXT_S: 2}, 9.0, "earliest").refuse and session.attached


def test_under_way_comes_again_as_it_was_with_dup_and_its_id():
    session = subscribed(Subscription("#", 2, identifier=4, retain_as_published=True))
    wire = properties.encode({"message_expiry": 10, "content_type": "x"})
    block = rows(0, ["t"], flags=2 | RETAIN, properties=[wire])
    offer(session, block)
    (before,) = sent(session, now=1.0)
    delivery = session.window.get(1)
    (again,) = packets(session.outgoing.again(1, delivery, block, 0, V5, 3.0))
    assert again.dup and not before.dup
    assert (again.topic, again.payload, again.qos, again.retain, again.packet_id) == ("t", b"0", 2, True, 1)
    assert again.subscription_identifiers == (4,) and properties.expiry_of(again.properties) == 7
    (old,) = packets(session.outgoing.again(1, delivery, block, 0, V311, 3.0), V311)
    assert (old.topic, old.payload, old.dup, old.packet_id) == ("t", b"0", True, 1)


def test_what_a_returning_client_takes_no_more_counts_as_sent_and_frees_its_id():
    session = subscribed(Subscription("#", 2))
    block = rows(0, ["t", "t"], flags=[1, 2], payloads=[b"x" * 1000] * 2)
    offer(session, block)
    sent(session)
    one, two = [delivery for _, delivery in session.window]
    assert session.outgoing.repeat(1, one, (block, 0), V5, 500, 0.0) == b""
    assert session.outgoing.repeat(2, two, (block, 1), V5, 500, 0.0) == b"\x62\x02\x00\x02"
    assert list(session.window) == [(2, Delivery(NOBODY, 0, RELEASED))]


def test_a_returning_client_that_takes_fewer_at_a_time_is_given_the_rest_as_it_answers():
    session = subscribed("#")
    block = rows(0, ["t"] * 3)
    offer(session, block)
    sent(session)
    for at, (packet_id, delivery) in enumerate(list(session.window)[1:], 1):
        packet = session.outgoing.repeat(packet_id, delivery, (block, at), V5, NO_LIMIT, 0.0)
        session.outgoing.repeats.append((packet_id, delivery.qos, packet))
    offer(session, rows(3, ["t"]))
    assert sent(session, room=1) == []
    for packet_id, dup in ((2, True), (3, True), (4, False)):
        session.window.puback([packet_id - 1])
        (one,) = sent(session, room=1)
        assert (one.packet_id, one.dup) == (packet_id, dup)


def test_what_is_answered_before_it_was_sent_again_is_not_sent_again():
    session = subscribed("#")
    block = rows(0, ["t"] * 2)
    offer(session, block)
    sent(session)
    delivery = session.window.get(2)
    packet = session.outgoing.repeat(2, delivery, (block, 1), V5, NO_LIMIT, 0.0)
    session.outgoing.repeats.append((2, 1, packet))
    session.window.puback([1, 2])
    assert sent(session, room=1) == [] and not session.outgoing.repeats


def test_what_has_expired_or_is_no_longer_wanted_still_comes_again_under_its_id():
    session = subscribed("#")
    block = rows(0, ["t"], properties=[properties.encode({"message_expiry": 1})])
    offer(session, block)
    sent(session)
    session.unsubscribe("#")
    (again,) = packets(session.outgoing.again(1, session.window.get(1), block, 0, V5, 100.0))
    assert (again.packet_id, again.dup, again.qos, again.payload) == (1, True, 1, b"0")


def test_after_a_crash_what_may_have_been_sent_is_marked_and_what_is_new_is_not():
    session = subscribed("#")
    session.positions.dup_below = {S: 2}
    offer(session, rows(0, ["t"] * 4, flags=[1, 0, 1, 1]))
    assert [(one.qos, one.dup) for one in sent(session)] == [(1, True), (0, False), (1, False), (1, False)]


# -- cursors ---------------------------------------------------------------------------------------------


def test_a_cursor_passes_no_unacknowledged_message_and_keeps_what_was_acked_above():
    session = subscribed("#")
    offer(session, rows(0, ["t"] * 6))
    sent(session)
    heads = {S: 6}
    assert cursor_of(session, heads) == Cursor(-1, epoch=1)
    session.window.puback([2, 3, 5])
    assert cursor_of(session, heads) == Cursor(-1, [(1, 2), (4, 4)], epoch=1)
    session.window.puback([1])
    assert cursor_of(session, heads) == Cursor(2, [(4, 4)], epoch=1)
    session.window.puback([4, 6])
    assert cursor_of(session, heads) == Cursor(5, epoch=1)


def test_a_cursor_stops_at_what_is_ready_or_behind():
    session = subscribed("#")
    offer(session, rows(0, ["t"] * 4), bytes_max=1)
    offer(session, rows(4, ["t"] * 4), bytes_max=1)
    heads = {S: 8}
    session.window.puback(ids(sent(session, room=3)))
    assert cursor_of(session, heads) == Cursor(2, epoch=1)
    session.window.puback(ids(sent(session)))
    assert cursor_of(session, heads) == Cursor(3, epoch=1)


def test_what_does_not_match_is_passed_over():
    session = subscribed("a")
    offer(session, rows(0, ["b", "a", "b"]))
    sent(session)
    assert cursor_of(session, {S: 3}, "a") == Cursor(0, [(2, 2)], epoch=1)


def test_a_subscription_has_nothing_to_say_about_what_was_before_it():
    session = subscribed(Subscription("a", 1), Subscription("b", 1, done=begun({S: 3})))
    session.positions.behind[S] = 1
    assert cursor_of(session, {S: 5}, "a") == Cursor(0, epoch=1)
    assert cursor_of(session, {S: 5}, "b") == Cursor(2, epoch=1)


def test_each_ack_makes_its_stream_dirty_and_no_other():
    session = subscribed("#")
    offer(session, rows(0, ["t"]))
    offer(session, rows(0, ["t"], stream=OTHER))
    sent(session)
    assert not session.positions.dirty
    session.window.puback([2])
    assert session.positions.dirty == {OTHER}


def resumed(cursor: Cursor, head: int) -> Session:
    """As it comes out of the store: 4 acknowledged, 7..9 as well."""
    session = subscribed("#")
    session.positions.behind[S] = cursor.floor
    session.positions.ahead[S] = cursor.copy()
    return session


def feed(session: Session, first: int, past: int, heads: dict[Stream, int]) -> None:
    session.take_read(S, past, [rows(first, ["t"] * (past - first))], heads[S])


def test_acked_ranges_are_not_sent_again_and_not_lost_while_others_wait():
    session = resumed(Cursor(4, [(7, 9)], epoch=1), head=12)
    heads = {S: 12}
    feed(session, 5, 12, heads)
    assert cursor_of(session, heads) == Cursor(4, [(7, 9)], epoch=1), "reading on takes nothing back"
    assert payloads(sent(session, room=1)) == [5]
    session.window.puback([1])
    assert cursor_of(session, heads) == Cursor(5, [(7, 9)], epoch=1)
    session = away(session, heads)
    session.attach(heads, now=0.0)
    assert session.positions.behind == {S: 6}
    feed(session, 6, 12, heads)
    found = sent(session)
    assert payloads(found) == [6, 10, 11], "acknowledged before the restart, and still"
    session.window.puback(ids(found))
    assert cursor_of(session, heads) == Cursor(11, epoch=1)


def test_under_way_and_acked_before_the_log_was_read_again_is_not_sent_again():
    session = resumed(Cursor(4, [(7, 9)], epoch=1), head=12)
    session.window.restore(1, Delivery(session.positions.origin(S), 5, 1))
    session.window.restore(2, Delivery(session.positions.origin(S), 6, 2))
    session.window.puback([1])
    session.window.pubrec(2)
    heads = {S: 12}
    assert cursor_of(session, heads) == Cursor(9, epoch=1)
    feed(session, 5, 12, heads)
    assert payloads(sent(session)) == [10, 11]


def test_what_one_subscription_acked_counts_for_that_subscription_only():
    had = CursorMap()
    had.set(S, Cursor(1, [(3, 3)]))
    session = subscribed(Subscription("a", 1, done=had), Subscription("+", 1))
    session.positions.behind[S] = 0
    block = rows(0, ["a", "b", "a", "a", "b"])
    assert list(session.positions.pick(block, session.window)) == [0, 1, 2, 3, 4]
    session.unsubscribe("+")
    assert list(session.positions.pick(block, session.window)) == [2], "3 is acknowledged for a"


def test_rows_know_roughly_what_they_weigh():
    assert Rows(S, range(2), Batch(["t", "t"], [b"x" * 100, b"x" * 300]), 0).weight >= 200
    assert Rows(S, range(0), Batch([], []), 0).weight > 0


# -- a filter that begins elsewhere ------------------------------------------------------------------------


def begin_at(session: Session, filter_text: str, at: int, topics: list[str]) -> None:
    """A subscription that is told to begin there; what is not queued any more is read from the log."""
    head = len(topics)
    heads = Heads({S: head})
    session.subscribe(Subscription(filter_text, 1), heads.starting_at({S: at}), heads)
    if session.positions.next_to_read(heads, session.window) == S:
        first = session.positions.behind[S]
        session.take_read(S, head, [rows(first, topics[first:])], head)


def test_what_waits_of_a_subscription_is_not_sent_when_it_is_told_to_begin_later():
    session = subscribed("#")
    offer(session, rows(0, ["t"] * 5))
    begin_at(session, "#", 3, ["t"] * 5)
    assert payloads(sent(session)) == [3, 4]


def test_what_waits_is_sent_if_another_filter_still_means_it():
    session = subscribed("#", "t")
    offer(session, rows(0, ["t", "u", "t", "u"]))
    begin_at(session, "#", 3, ["t", "u", "t", "u"])
    assert payloads(sent(session)) == [0, 2, 3]


# -- on a node that has not heard of everything yet -------------------------------------------------------


@pytest.mark.parametrize(("head", "beyond"), [(3, True), (4, True), (5, False), (9, False)])
def test_a_node_that_knows_less_than_was_sent_must_catch_up_first(head: int, beyond: bool):
    """Whatever it would hear next of that stream was sent before, by another node: it would go out twice."""
    session = Session("c", 100)
    session.positions.done.set(S, 5)
    assert session.positions.is_beyond(Heads({S: head}), session.window) is beyond
    session.positions.done.set(S, Cursor(1, [(3, 4)]))
    assert session.positions.is_beyond(Heads({S: head}), session.window) is beyond


def test_what_is_in_flight_was_sent_as_well():
    session = Session("c", 100)
    session.window.restore(7, Delivery(session.positions.origin(S), 4, 1))
    assert session.positions.is_beyond(Heads({S: 4}), session.window)
    assert not session.positions.is_beyond(Heads({S: 5}), session.window)


def test_a_generation_that_a_node_has_not_heard_of_is_beyond_it():
    session = Session("c", 100)
    session.positions.done.set(NEXT_S, 1)
    assert session.positions.is_beyond(Heads({S: 5}), session.window)
    assert not session.positions.is_beyond(Heads({S: 5, NEXT_S: 1}), session.window)


def test_how_long_all_filters_are_together_is_known_without_counting_them():
    table = Session("c", 0).subscriptions
    for filter_text in ("a", "bc", "bc"):
        table.add(Subscription(filter_text, 1))
    for filter_text in ("$share/g/a", "$share/g/a", "$share/g/b"):
        table.share(Subscription(filter_text, 1))
    assert table.length == 3 + 20
    table.remove("a")
    table.remove("never there")
    table.unshare("$share/g/a")
    table.unshare("$share/g/a")
    assert table.length == 2 + 10
