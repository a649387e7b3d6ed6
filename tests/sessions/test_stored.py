"""A session that begins anew for one filter, packed to its row and back: what each filter is still owed."""

from __future__ import annotations

from deliveries import S, offer, payloads, rows, sent

from holdfast.cursors.cursor import Cursor
from holdfast.cursors.cursor_map import CursorMap
from holdfast.sessions.heads import Heads
from holdfast.sessions.session import Session
from holdfast.sessions.stored import content_of, restore
from holdfast.sessions.subscriptions import Subscription
from holdfast.sessions.table import SessionRow

LOG = S.log


def begun(*filters: str) -> tuple[Session, Heads]:
    session, heads = Session("me", 100), Heads({S: 0})
    for text in filters:
        session.subscribe(Subscription(text, 1), heads.end(), heads)
    return session, heads


def commit(session: Session, heads: Heads, topics: list[str]) -> None:
    first = heads[S]
    heads[S] += len(topics)
    offer(session, rows(first, topics))


def killed(session: Session, heads: Heads) -> Session:
    """As it comes back from the row that the SUBSCRIBE wrote, without what was in flight."""
    packed = content_of(session, heads, "")._replace(packets=b"")
    back = restore(SessionRow(client_id="me", expiry_secs=100, epoch=2, **packed._asdict()), "", {})
    back.attach(heads, 0.0)
    return back


def read(session: Session, heads: Heads, topics: list[str]) -> list[int]:
    """Everything that is read from the log and sent."""
    while (stream := session.positions.next_to_read(heads, session.window)) is not None:
        at = session.positions.behind[stream]
        session.take_read(stream, len(topics), [rows(at, topics[at:])], heads[stream])
    return payloads(sent(session))


def test_what_another_filter_has_not_acknowledged_comes_again_after_a_replay_and_a_kill() -> None:
    session, heads = begun("a", "b")
    topics = ["a"] * 5
    commit(session, heads, topics)
    sent(session)
    session.window.puback([1, 2, 4])
    session.subscribe(Subscription("b", 1), heads.beginning(), heads)
    back = killed(session, heads)
    assert back.cursors([S], heads)["a", S] == Cursor(1, [(3, 3)], epoch=2)
    assert read(back, heads, topics) == [2, 4]


def test_a_replay_that_was_acknowledged_comes_whole_after_a_kill() -> None:
    session, heads = begun("a")
    topics = ["a"] * 50
    commit(session, heads, topics)
    session.window.puback([one.packet_id for one in sent(session)])
    content_of(session, heads, "")
    session.subscribe(Subscription("a", 1), heads.beginning(), heads)
    back = killed(session, heads)
    assert read(back, heads, topics) == list(range(50))


def test_a_replay_of_one_filter_leaves_the_other_where_it_was() -> None:
    session, heads = begun("a", "b")
    topics = ["a", "b", "a", "b"]
    commit(session, heads, topics)
    session.window.puback([one.packet_id for one in sent(session)])
    session.subscribe(Subscription("b", 1), heads.beginning(), heads)
    assert read(killed(session, heads), heads, topics) == [1, 3]


def test_a_filter_that_begins_among_what_waits_gets_all_of_its_own() -> None:
    session, heads = begun("a")
    topics = ["a", "b", "a", "b", "b"]
    commit(session, heads, topics)  # nothing is sent yet
    session.subscribe(Subscription("b", 1), heads.starting_at({S: 1}), heads)
    assert read(session, heads, topics) == [0, 1, 2, 3, 4]


def test_what_was_acknowledged_ahead_is_wanted_again_by_the_filter_that_begins_anew() -> None:
    session, heads = begun("a", "b")
    topics = ["a", "b", "a", "b"]
    commit(session, heads, topics)
    sent(session)
    session.window.puback([1, 3])
    session.subscribe(Subscription("b", 1), heads.beginning(), heads)
    session.window.puback([2, 4])  # in flight when it began: it has had them with that
    assert session.positions.ahead
    session.subscribe(Subscription("b", 1), heads.beginning(), heads)
    assert read(session, heads, topics) == [1, 3]


def test_a_filter_that_begins_anew_has_a_new_number() -> None:
    session, heads = begun("a", "b")
    assert [s.number for s in session.subscriptions] == [1, 2]
    session.subscribe(Subscription("a", 2))
    assert session.subscriptions["a"].number == 1, "other options, and it goes on"
    session.subscribe(Subscription("a", 2), heads.end(), heads)
    assert session.subscriptions["a"].number == 3
    session.unsubscribe("a")
    back = killed(session, heads)
    back.subscribe(Subscription("c", 1), CursorMap(), heads)
    assert back.subscriptions["c"].number == 4, "a number is never given again"
