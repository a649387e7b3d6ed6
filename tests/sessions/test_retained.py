"""Retained messages: what a subscriber is sent of them bit by bit, and how they expire."""

from __future__ import annotations

from dataclasses import dataclass, field

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from holdfast.log.contract import Retained
from holdfast.model import RETAIN
from holdfast.sessions.retained import STEPS_MAX, Expiries, RetainedMessages, Selection
from holdfast.topics import match

ROOM = 1 << 30


def message(topic: str, payload: bytes = b"x", time: float = 0, life: int | None = None) -> Retained:
    properties = None if life is None else b"\x02" + life.to_bytes(4, "big")
    return Retained(topic, payload, "p", 1 | RETAIN, properties, int(time * 1e6))


def everything(selection: Selection, now: float = 0, rows_max: int = 100) -> list[tuple[str, bytes]]:
    found = []
    while (rows := selection.take(rows_max, ROOM, now)) is not None:
        found += list(zip(rows.topics, rows.payloads, strict=True))
    return found


def test_a_selection_is_what_matches() -> None:
    kept = RetainedMessages([message("a/b", b"1"), message("a/c", b"2"), message("b", b"3"), message("$s", b"4")])
    assert sorted(everything(kept.select("#"))) == [("a/b", b"1"), ("a/c", b"2"), ("b", b"3")]
    assert everything(kept.select("a/+"), rows_max=1) == [("a/b", b"1"), ("a/c", b"2")]
    assert everything(kept.select("b")) == [("b", b"3")]
    assert everything(kept.select("c/#")) == []


def test_rows_are_whole() -> None:
    rows = RetainedMessages([message("a", b"1", 7, life=9)]).select("a").take(10, ROOM, 8)
    assert rows is not None and rows.stream is None
    assert (rows.topics, rows.payloads, rows.publishers, rows.flags) == (["a"], [b"1"], ["p"], 1 | RETAIN)
    assert (list(rows.offsets), rows.times, rows.properties) == ([0], [7_000_000], [b"\x02\0\0\0\x09"])


def test_what_changes_while_it_waits() -> None:
    kept = RetainedMessages(message(f"t/{n}", b"old") for n in range(6))
    selection = kept.select("t/+")
    assert everything(selection) and everything(kept.select("#"))
    selection = kept.select("t/+")
    first = selection.take(1, ROOM, 0)
    assert first is not None and first.topics == ["t/0"]
    kept.keep(message("t/0", b"new"))  # was sent: not again
    kept.keep(message("t/1", b"new"))  # replaced: as it is now
    kept.keep(message("t/2", b""))  # cleared
    kept.keep(message("t/3", b""))
    kept.keep(message("t/3", b"anew"))  # cleared and set: a publish that the subscriber has got
    kept.keep(message("t/9", b"later"))  # the same
    assert everything(selection) == [("t/1", b"new"), ("t/4", b"old"), ("t/5", b"old")]


def test_a_take_keeps_to_its_bounds() -> None:
    kept = RetainedMessages(message(f"t/{n}", b"x" * 100) for n in range(1_000))
    selection = kept.select("#")
    assert [len(rows.topics) for rows in (selection.take(7, ROOM, 0),) if rows] == [7]
    assert [len(rows.topics) for rows in (selection.take(900, 250, 0),) if rows] == [3]
    assert [len(rows.topics) for rows in (selection.take(900, 0, 0),) if rows] == [1]
    assert len(everything(selection)) == 989


def test_a_take_that_finds_nothing_does_not_look_at_everything() -> None:
    """The rare filter: what matches is behind thousands of topics that do not."""
    kept = RetainedMessages(message(f"{n}/a") for n in range(20_000))
    kept.keep(message("last/b"))
    selection = kept.select("+/b")
    steps = 0

    def counted(inner):
        nonlocal steps
        for step in inner:
            steps += 1
            yield step

    selection._steps = counted(selection._steps)
    takes = 0
    while True:
        steps = 0
        rows = selection.take(10, ROOM, 0)
        assert steps <= STEPS_MAX + 40
        takes += 1
        if rows is not None and rows.topics:
            break
        assert rows is not None, "finished without it"
    assert rows.topics == ["last/b"] and takes > 5
    assert everything(selection) == []


def test_an_expired_message_is_not_sent_and_is_let_go_of() -> None:
    kept = RetainedMessages([message("short", time=0, life=10), message("long", time=0, life=100), message("ever")])
    assert sorted(everything(kept.select("#"), now=9.9)) == [("ever", b"x"), ("long", b"x"), ("short", b"x")]
    assert sorted(everything(kept.select("#"), now=10)) == [("ever", b"x"), ("long", b"x")]
    assert kept.purge(9.9, 10) == []
    assert kept.purge(10 + Expiries.STEP_SECONDS, 10) == [("short", 0)]
    assert len(kept) == 2
    kept.keep(message("long", time=50, life=100))
    assert kept.purge(110, 10) == []
    assert kept.purge(160, 10) == [("long", 50_000_000)]
    assert everything(kept.select("#"), now=1e9) == [("ever", b"x")]


def test_a_purge_keeps_to_its_bound_and_goes_on_where_it_stopped() -> None:
    kept = RetainedMessages(message(f"t/{n}", life=n % 50) for n in range(1_000))
    gone = []
    for left in range(900, -1, -100):
        gone += kept.purge(1_000, 100)
        assert len(kept) == left
    assert kept.purge(1_000, 100) == []
    assert sorted(gone) == sorted((f"t/{n}", 0) for n in range(1_000))


def test_a_topic_that_is_replaced_for_ever_takes_no_more_memory() -> None:
    kept = RetainedMessages([])
    for second in range(0, 100_000, 10):
        kept.keep(message("t", time=second, life=1_000_000))
    assert len(kept._expiries._steps) < 100 and len(kept._expiries._topics) == len(kept._expiries._step_of) == 1


@dataclass(eq=False)
class Waiting:
    text: str
    selection: Selection
    may_send: set[str] = field(default_factory=set)
    must_send: set[str] = field(default_factory=set)
    """What has never been expired since: one that is may be passed over, or replaced before its turn comes."""


topics = st.lists(st.sampled_from(["a", "b", "", "$c"]), min_size=1, max_size=3).map("/".join).filter(bool)
filters = st.sampled_from(["#", "+", "a/#", "+/b", "a/+", "a", "+/+/a", "$c/#", "+/#"])


class RetainedAgainstADict(RuleBasedStateMachine):
    """Publishes, expiries, purges and subscribers that take a little at a time, in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.kept = RetainedMessages([])
        self.last: dict[str, tuple[bytes, float]] = {}
        self.waiting: list[Waiting] = []
        self.now = 0.0

    @rule(topic=topics, payload=st.sampled_from([b"", b"1", b"2"]), life=st.none() | st.integers(0, 30))
    def publish(self, topic, payload, life):
        self.kept.keep(message(topic, payload, self.now, life))
        if payload:
            self.last[topic] = payload, self.now + (1e9 if life is None else life)
            self.expire()
        else:
            self.forget(topic)

    def expire(self):
        for waiting in self.waiting:
            waiting.must_send = {topic for topic in waiting.must_send if self.last[topic][1] > self.now}

    def forget(self, topic):
        self.last.pop(topic, None)
        for waiting in self.waiting:
            waiting.may_send.discard(topic)
            waiting.must_send.discard(topic)

    @rule(text=filters)
    def subscribe(self, text):
        meant = {topic for topic in self.last if match(text, topic)}
        must = {topic for topic in meant if self.last[topic][1] > self.now}
        self.waiting.append(Waiting(text, self.kept.select(text), meant, must))

    @rule(data=st.data(), rows_max=st.integers(1, 3))
    def take(self, data, rows_max):
        if self.waiting:
            waiting = data.draw(st.sampled_from(self.waiting))
            rows = waiting.selection.take(rows_max, ROOM, self.now)
            if rows is None:
                assert not waiting.must_send, "not sent"
                self.waiting.remove(waiting)
            else:
                for topic, payload in zip(rows.topics, rows.payloads, strict=True):
                    waiting.may_send.remove(topic)
                    waiting.must_send.discard(topic)
                    assert self.last[topic][0] == payload and self.last[topic][1] > self.now

    @rule(seconds=st.integers(1, 20), most=st.integers(1, 3))
    def pass_time(self, seconds, most):
        self.now += seconds
        self.expire()
        for topic, _ in self.kept.purge(self.now, most):
            assert self.last[topic][1] <= self.now
            self.forget(topic)

    @invariant()
    def it_holds_what_was_published(self):
        assert len(self.kept) == len(self.last)


TestRetainedAgainstADict = RetainedAgainstADict.TestCase
TestRetainedAgainstADict.settings = settings(max_examples=200, stateful_step_count=40, deadline=None)
