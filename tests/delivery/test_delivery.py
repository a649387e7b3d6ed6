"""Delivery as a machine: who is live, who is behind, who has room; no log, no socket, no thread."""

from __future__ import annotations

from typing import Any

import pytest

from holdfast.delivery import delivery as dv
from holdfast.delivery.delivery import Delivery, DeliverySettings
from holdfast.delivery.outlet import Outlet
from holdfast.delivery.readers import Fetched, ReaderStatus
from holdfast.groups.protocol.effects import StartReading
from holdfast.groups.protocol.nouns import Loan, Mark, MemberId, Piece
from holdfast.log.contract import Retained
from holdfast.machine import TICK
from holdfast.model import Batch, Stream
from holdfast.mqtt import codec
from holdfast.sessions.outgoing import Outgoing
from holdfast.sessions.retained import RetainedMessages
from holdfast.sessions.rows import Rows
from holdfast.sessions.session import Session
from holdfast.sessions.shared import LoanFeed
from holdfast.sessions.subscriptions import Subscription
from holdfast.topics import TopicFilter

S = Stream("messages", 0, 1)
PENDING = 10_000


class World:
    """A log that is a list, and what the machine asked for."""

    def __init__(self, retained: list[Retained] | None = None, fetches_max: int = 2):
        self.log: list[tuple[str, bytes]] = []
        self.machine = Delivery(
            RetainedMessages(retained or []), DeliverySettings(pending_bytes_max=PENDING, fetches_max=fetches_max)
        )
        self.machine.heads[S] = 0
        self.got: dict[Outlet, list[bytes]] = {}
        self.fetches: list[dv.Fetch] = []
        self.turns: list[Outlet] = []
        self.broken: list[dv.Broken] = []
        self.news: list[Outlet] = []
        self.now = 0.0

    def give(self, event: Any) -> None:
        for effect in self.machine.handle(event, self.now):
            match effect:
                case dv.Write(outlet, data):
                    at = 0
                    while at < len(data):
                        first, start, at = codec.frame(data, at)
                        packet = codec.decode_for_client(first, data[start:at], 5)
                        self.got.setdefault(outlet, []).append(packet.payload)
                case dv.Fetch():
                    self.fetches.append(effect)
                case dv.NextTurn(outlet):
                    self.turns.append(outlet)
                case dv.LoanNews(outlet):
                    self.news.append(outlet)
                    outlet.loan_news.clear()
                case dv.Broken():
                    self.broken.append(effect)

    def commit(self, topic: str, *payloads: bytes) -> None:
        base = len(self.log)
        self.log += [(topic, payload) for payload in payloads]
        self.give(dv.Committed(self.rows(range(base, len(self.log)))))

    def rows(self, offsets: Any) -> Rows:
        found = [self.log[offset] for offset in offsets]
        return Rows(S, list(offsets), Batch([t for t, _ in found], [x for _, x in found], "p", 1), 0)

    def answer(self, rows_max: int = 1000) -> bool:
        """The oldest read comes back."""
        if not self.fetches:
            return False
        fetch = self.fetches.pop(0)
        asked, size, found = fetch.request, 0, []
        past = asked.until if asked.until is not None else len(self.log)
        for offset in range(asked.at, past):
            if asked.wanted.matches(self.log[offset][0]):
                found.append(offset)
                size += len(self.log[offset][1]) + 64
                if size >= fetch.bytes_max or len(found) == rows_max:
                    past = offset + 1
                    break
        self.give(dv.FetchDone(fetch.reader, Fetched(past, [self.rows(found)] if found else [])))
        return True

    def settle(self) -> None:
        while self.answer() or self.turns:
            while self.turns:
                self.give(dv.Room(self.turns.pop(0)))

    def client(self, *filters: str, qos: int = 0, window: int = 65_535) -> Outlet:
        session = Session(f"c{len(self.got)}", 100)
        for text in filters:
            session.subscribe(Subscription(text, qos), self.machine.heads.end(), self.machine.heads)
        outlet = Outlet(session, 5, window)
        self.got[outlet] = []
        self.give(dv.Attached(outlet))
        return outlet

    def loan(self, outlet: Outlet, filter_text: str, at: int = 0, **more: Any) -> LoanFeed:
        loan = Loan(MemberId("m"), Piece(S), 1, "c")
        feed = LoanFeed(
            StartReading(loan, Mark(at - 1), **more), TopicFilter(filter_text), Subscription(filter_text, 1)
        )
        self.give(dv.LoanStarted(outlet, feed))
        return feed


def test_a_commit_goes_to_whoever_is_live_at_once():
    world = World()
    one, other = world.client("a"), world.client("b")
    world.commit("a", b"1", b"2")
    assert world.got[one] == [b"1", b"2"] and world.got[other] == [] and not world.fetches


def test_a_loan_with_a_rare_filter_on_a_busy_stream_never_stands_still():
    """Read after read finds little or nothing; each one that ends begins the next, whoever else does anything."""
    world = World()
    for n in range(500):
        world.commit("busy", b"x")
        if n % 100 == 50:
            world.commit("rare", b"%d" % n)
    outlet = world.client()
    feed = world.loan(outlet, "rare")
    while world.fetches:
        world.answer(rows_max=1)  # one message a read, and nobody calls anything in between
    assert world.got[outlet] == [b"50", b"150", b"250", b"350", b"450"]
    assert outlet.loans[feed].status is ReaderStatus.LIVE and outlet.reads == 0
    world.commit("rare", b"live")
    assert world.got[outlet][-1] == b"live"


def test_forty_loans_of_one_client_are_all_read_and_two_at_a_time():
    world = World()
    for n in range(200):
        world.commit(f"t/{n % 40}", b"%d" % n)
    outlet = world.client()
    for n in range(40):
        world.loan(outlet, f"t/{n}")
        assert outlet.reads <= 2
    world.settle()
    assert sorted(map(int, world.got[outlet])) == list(range(200))
    assert outlet.reads == 0 and not outlet.waiting


@pytest.mark.parametrize("fetches_max", [2, 1, 0], ids=["both are read", "one waits for a thread", "both wait"])
@pytest.mark.parametrize("fails", [False, True])
def test_loans_that_end_while_they_are_read_leave_their_places_to_the_next(fetches_max: int, fails: bool):
    """Those that began meanwhile waited for a place, and nobody told them: neither reads nor commits went on."""
    world = World(fetches_max=2)
    for n in range(4):
        world.commit("t", b"%d" % n)
    outlet, other = world.client(), world.client()
    for _ in range(2 - fetches_max):
        world.loan(other, "t")
    over = [world.loan(outlet, "t") for _ in range(2)]
    assert len(world.fetches) == 2 and outlet.reads == 2
    for feed in over:
        world.give(dv.LoanStopped(outlet, feed))
    feed = world.loan(outlet, "t")
    for fetch in world.fetches if fails else ():
        world.give(dv.FetchFailed(fetch.reader))
    if fails:
        world.fetches.clear()
        world.now = world.machine.deadline
        world.give(TICK)
    while world.answer():
        pass
    assert world.got[outlet] == [b"0", b"1", b"2", b"3"]
    assert outlet.loans[feed].status is ReaderStatus.LIVE and outlet.reads == 0


def test_one_that_does_not_read_costs_a_bound_whatever_is_published():
    world = World()
    outlet = world.client("t")
    world.give(dv.Blocked(outlet, True))
    for _ in range(1000):
        world.commit("t", b"y" * 1000)
        assert world.answer() is False, "nothing is read for somebody who has no room"
        assert outlet.session.outgoing.bytes <= PENDING + 2000
    assert outlet.session.positions.behind, "the rest waits in the log"
    world.give(dv.Blocked(outlet, False))
    world.settle()
    assert len(world.got[outlet]) == 1000


def test_a_few_rows_of_a_large_block_do_not_keep_the_block():
    world = World()
    outlet = world.client("mine")
    world.give(dv.Blocked(outlet, True))
    topics = ["mine"] + ["other"] * 99
    rows = Rows(S, range(100), Batch(topics, [b"z" * 1000] * 100, "p", 1), 0)
    world.log = [(topic, b"z" * 1000) for topic in topics]
    world.give(dv.Committed(rows))
    (waiting,) = outlet.session.outgoing._queue
    assert len(waiting.rows.payloads) == 1


def test_room_that_comes_back_is_an_event_and_enough():
    world = World()
    outlet = world.client("t", qos=1, window=1)
    world.commit("t", b"1", b"2", b"3")
    assert world.got[outlet] == [b"1"]
    for packet_id in (1, 2):
        outlet.session.window.puback([packet_id])
        world.give(dv.Room(outlet))
    assert world.got[outlet] == [b"1", b"2", b"3"]


def test_a_read_that_fails_is_tried_again_and_not_in_a_circle():
    world = World()
    world.commit("t", b"1")
    outlet = world.client()
    feed = world.loan(outlet, "t")
    (fetch,) = world.fetches
    world.fetches.clear()
    world.give(dv.FetchFailed(fetch.reader))
    assert not world.fetches and world.machine.deadline == 0.5
    world.give(dv.Room(outlet))
    assert not world.fetches, "not before its time"
    world.now = 0.5
    world.give(TICK)
    assert world.answer() and world.got[outlet] == [b"1"]
    assert outlet.loans[feed].status is ReaderStatus.LIVE


def test_what_was_read_for_other_filters_says_nothing_about_the_new_ones():
    world = World()
    outlet = world.client("a")
    world.commit("a", b"1")
    world.commit("b", b"2")
    world.got[outlet].clear()
    session = outlet.session
    session.subscribe(Subscription("a", 0), world.machine.heads.beginning(), world.machine.heads)
    world.give(dv.Subscribed(outlet, "a"))
    assert len(world.fetches) == 1
    session.subscribe(Subscription("b", 0), world.machine.heads.beginning(), world.machine.heads)
    world.give(dv.Subscribed(outlet, "b"))
    world.settle()
    assert world.got[outlet] == [b"1", b"2"]


def test_retained_messages_go_first_bit_by_bit_and_what_is_committed_meanwhile_follows():
    kept = [Retained(f"r/{n}", b"r", "p", 4, None, 0) for n in range(1200)]
    world = World(retained=kept)
    outlet, other = world.client("r/#"), world.client("r/#")
    world.give(dv.RetainedOwed(outlet, "r/#", world.machine.retained.select("r/#")))
    assert 0 < len(world.got[outlet]) <= 600 and world.turns == [outlet]
    world.commit("r/1", b"live")
    assert world.got[other] == [b"live"]
    world.settle()
    assert world.got[outlet] == [b"r"] * 1200 + [b"live"]


def test_a_block_that_many_want_is_sent_to_a_few_at_a_time():
    world = World()
    serves_max = dv.DeliverySettings().serves_max
    outlets = [world.client("t") for _ in range(serves_max + 50)]
    world.commit("t", b"1")
    assert sum(bool(world.got[outlet]) for outlet in outlets) == serves_max
    assert world.turns == outlets[serves_max:]
    world.commit("t", b"2")
    assert len(world.turns) == 50, "whoever waits for its turn asks for it once"
    world.settle()
    assert all(world.got[outlet] == [b"1", b"2"] for outlet in outlets)


def test_a_fault_in_one_outlet_is_its_own(monkeypatch: Any):
    world = World()
    one, two, three = world.client("t"), world.client("t"), world.client("t")

    take = Outgoing.take

    def broken(self: Outgoing, *given: Any) -> int:
        if self is two.session.outgoing:
            raise ZeroDivisionError("planted")
        return take(self, *given)

    monkeypatch.setattr(Outgoing, "take", broken)
    world.commit("t", b"1")
    assert world.got[one] == world.got[three] == [b"1"]
    assert [each.outlet for each in world.broken] == [two]


def test_a_detached_outlet_leaves_nothing_behind():
    world = World()
    world.commit("t", b"1")
    outlet = world.client("t")
    world.loan(outlet, "t")
    assert world.fetches
    world.give(dv.Detached(outlet))
    world.settle()
    assert world.got[outlet] == [] and outlet.reads == 0 and not outlet.loans
    assert world.machine.anyone_for(["t"]) == set()
    assert not world.machine._loans and not len(world.machine.shared) and not len(world.machine.live)


def test_nothing_lent_goes_out_before_the_agent_has_seen_the_clock():
    world = World()
    outlet = world.client("t")

    class Agent:
        deadline = 5.0

        def handle(self, event: Any, now: float) -> list[Any]:
            return []

    outlet.agent = Agent()
    world.now = 4.0
    world.commit("t", b"1")
    assert world.got[outlet] == [b"1"]
    world.now = 6.0
    (ask,) = world.machine.handle(dv.Committed(Rows(S, [1], Batch(["t"], [b"2"], "p", 1), 0)), world.now)
    assert ask == dv.AskClock(outlet)
    outlet.agent.deadline = 10.0
    world.give(dv.Room(outlet))
    assert world.got[outlet] == [b"1", b"2"]


def test_where_order_matters_nothing_is_sent_after_what_a_client_is_too_small_for():
    world = World()
    outlet = world.client()
    outlet.packet_max = 100
    feed = world.loan(outlet, "a")
    world.commit("a", b"1", b"x" * 200, b"3")
    world.commit("a", b"4")
    assert world.got[outlet] == [b"1"] and outlet.session.outgoing.rows == 0
    assert [offset for offset, _ in feed.refused] == [1] and not feed.too_large
    assert 200 < feed.refused[0][1] < 210
    outlet.session.window.puback([1])
    feed.catch_up(4)
    assert feed.take_news() == ((0, 0),), "what was not sent is not done"


def test_by_message_the_rest_is_sent_until_the_loan_is_called_back():
    world = World()
    outlet = world.client()
    outlet.packet_max = 100
    feed = world.loan(outlet, "a", key="message")
    world.commit("a", b"1", b"x" * 200, b"3")
    assert world.got[outlet] == [b"1", b"3"]
    assert [offset for offset, _ in feed.refused] == [1]


def test_what_nobody_in_the_group_takes_holds_nothing_up():
    world = World()
    outlet = world.client()
    outlet.packet_max = 100
    feed = world.loan(outlet, "a", largest_packet=150)
    world.commit("a", b"1", b"x" * 200, b"3")
    assert world.got[outlet] == [b"1", b"3"]
    assert feed.too_large == [1] and not feed.refused


def test_a_loan_takes_of_what_was_read_for_a_neighbour_only_what_it_has_not_had():
    world = World()
    world.commit("a", *(b"%d" % n for n in range(12)))
    outlet = world.client()
    feed = world.loan(outlet, "a", at=5, key="message")
    [fetch] = world.fetches
    assert not fetch.request.shared, "a whole stream has one reader"
    blocks = [
        Rows(S, range(first, past), Batch(["a"] * (past - first), [b"%d" % n for n in range(first, past)]), 0)
        for first, past in ((0, 2), (2, 12))
    ]
    world.give(dv.FetchDone(fetch.reader, Fetched(12, blocks)))
    assert world.got[outlet] == [b"%d" % n for n in range(5, 12)]
    assert feed.next_offset == 12 and feed.take_news() == ()
