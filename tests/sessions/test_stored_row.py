"""A session and its row: what comes back is what was stored, and the last word is told from any other."""

from __future__ import annotations

import msgspec
import pytest
from deliveries import S, away, offer, packets, row_of, rows, sent, subscribed

from holdfast.errors import RequestError
from holdfast.groups.protocol.effects import StartReading
from holdfast.groups.protocol.nouns import NO_POLICY, Loan, Mark, MemberId, Piece
from holdfast.model import Batch
from holdfast.mqtt.packets import V5
from holdfast.sessions.positions import StreamOrigin
from holdfast.sessions.rows import Rows
from holdfast.sessions.session import Session
from holdfast.sessions.shared import LoanFeed
from holdfast.sessions.stored import LentBefore, RetainedBefore, filters_of, restore
from holdfast.sessions.subscriptions import Subscription
from holdfast.sessions.table import SessionRow
from holdfast.sessions.window import RELEASED
from holdfast.topics import TopicFilter

HEADS = {S: 10}


def test_a_retained_message_in_flight_is_known_by_its_topic_again() -> None:
    session = subscribed("#")
    session.outgoing.put(Rows(None, range(2), Batch(["t/1", "t/2"], [b"x", b"y"], flags=[1, 1]), 7), range(2))
    sent(session)
    session.window.puback([1])
    back = restore(row_of(session, HEADS, "before"), "before", {})
    [(packet_id, delivery)] = back.in_flight()
    assert (
        packet_id == 2
        and isinstance(delivery.origin, RetainedBefore)
        and (delivery.origin.topic, delivery.origin.time) == ("t/2", 7)
    )


def in_flight(session: Session) -> list[tuple[int, int, int]]:
    return [(packet_id, delivery.offset, delivery.qos) for packet_id, delivery in session.in_flight()]


def busy() -> Session:
    """Ten messages, of which three are acknowledged, one is half done, and the others are in flight."""
    session = subscribed(Subscription("#", 2, no_local=True, identifier=7), "a/b")
    offer(session, rows(0, ["a/b"] * 10, flags=[1, 1, 1, 2, 2, 1, 1, 1, 1, 1], publishers="you"))
    sent(session, room=8)
    session.window.puback([1, 2, 6])
    session.window.pubrec(4)
    return session


def test_after_the_last_word_everything_is_as_it_was():
    before = busy()
    back = away(before, HEADS)
    assert in_flight(back) == [(3, 2, 1), (4, 0, RELEASED), (5, 4, 2), (7, 6, 1), (8, 7, 1)]
    assert all(isinstance(d.origin, StreamOrigin) for _, d in back.in_flight() if d.qos != RELEASED)
    assert back.window.last_id == 8 and not back.positions.dup_below
    assert [(s.filter, s.qos, s.no_local, s.identifier) for s in back.subscriptions] == [
        ("#", 2, True, 7),
        ("a/b", 1, False, 0),
    ]
    back.attach(HEADS, now=0.0)
    assert back.positions.behind == {S: 8}, "what was not sent is read from the log"
    assert back.cursors([S], HEADS)["#", S].is_acked(5) and not back.cursors([S], HEADS)["#", S].is_acked(4)


def test_after_any_other_word_ids_begin_elsewhere_and_what_may_have_been_sent_is_marked():
    row = row_of(busy(), HEADS, leaving="")
    back = restore(row, "last", {S: 9})
    assert in_flight(back) == [(3, 2, 1), (4, 0, RELEASED), (5, 4, 2), (7, 6, 1), (8, 7, 1)]
    assert back.window.last_id not in range(20) and back.positions.dup_below == {S: 9}


def test_the_last_word_of_an_earlier_connection_is_not_that_of_the_last_one():
    back = restore(row_of(busy(), HEADS, leaving="before last"), "last", {S: 9})
    assert back.positions.dup_below == {S: 9}


def test_a_session_that_begins_has_nothing_in_flight_and_marks_nothing():
    back = restore(SessionRow(client_id="me", epoch=3, born="t", connect="t"), "", {})
    assert not in_flight(back) and back.window.last_id == 0 and not back.positions.dup_below and not back.attached


def test_the_filters_of_a_row_are_those_of_the_session():
    session = busy()
    session.subscriptions.share(Subscription("$share/g/x", 1))
    assert filters_of(row_of(session, HEADS).subscriptions) == ["#", "a/b", "$share/g/x"]
    assert filters_of(b"") == []


def lent(session: Session) -> LoanFeed:
    session.subscriptions.share(Subscription("$share/g/#", 2))
    loan = Loan(MemberId("me"), Piece(S, 0, 1), 1, "course")
    feed = LoanFeed(
        StartReading(loan, Mark(-1), (), NO_POLICY), TopicFilter("#"), session.subscriptions.shared["$share/g/#"]
    )
    block = rows(0, ["t"] * 2, flags=[1, 2])
    session.outgoing.put(block, feed.choose(block, range(2), 2), feed)
    sent(session)
    return feed


def test_of_what_was_lent_only_qos_2_stays_with_the_session():
    session = Session("me", 100)
    lent(session)
    back = away(session, HEADS)
    assert in_flight(back) == [(2, 1, 2)]
    assert isinstance(back.window.get(2).origin, LentBefore)


def test_what_was_lent_stays_also_if_the_client_goes_again_before_anybody_knows_whose_it_is():
    session = Session("me", 100)
    lent(session)
    back = away(away(session, HEADS), HEADS)
    assert in_flight(back) == [(2, 1, 2)]
    assert isinstance(back.window.get(2).origin, LentBefore)


def test_a_loan_hears_that_its_returning_client_takes_its_message_no_more():
    session = Session("me", 100)
    feed = lent(session)
    feed.stopped = True
    feed.wait_for_client([1])
    delivery, block = session.window.get(2), rows(0, ["t"] * 2, flags=[1, 2], payloads=[b"x" * 1000] * 2)
    assert session.outgoing.repeat(2, delivery, (block, 1), V5, 500, 0.0, feed) == b"\x62\x02\x00\x02"
    assert not feed.in_flight, "the loan is given back"
    ((offset, least),) = feed.refused
    assert offset == 1 and 1000 < least < 1020
    assert not feed.take_news(), "nobody has had it"
    assert feed in feed.news_to


def test_a_loan_hears_that_what_its_client_waits_for_cannot_be_read_any_more():
    session = Session("me", 100)
    feed = lent(session)
    feed.wait_for_client([1])
    assert session.outgoing.repeat(2, session.window.get(2), None, V5, 500, 0.0, feed) == b"\x62\x02\x00\x02"
    assert not feed.in_flight and not feed.refused and not feed.take_news() and feed in feed.news_to


def test_what_was_lent_goes_out_again_under_the_options_of_its_own_subscription():
    session = Session("me", 100)
    feed = lent(session)
    feed.subscription = Subscription("$share/g/#", 2, identifier=7)
    block = rows(0, ["t"] * 2, flags=[1, 2])
    (again,) = packets(session.outgoing.repeat(2, session.window.get(2), (block, 1), V5, 500, 0.0, feed))
    assert again.dup and again.subscription_identifiers == (7,)


@pytest.mark.parametrize("part", ["subscriptions", "cursors", "packets"])
def test_a_row_that_cannot_be_read_is_an_error_that_names_the_client(part):
    row = msgspec.structs.replace(row_of(busy(), HEADS), **{part: b"damaged"})
    with pytest.raises(RequestError, match="me"):
        restore(row, "last", {})
