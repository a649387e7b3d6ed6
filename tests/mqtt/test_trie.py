"""The trees against matching one by one."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from holdfast.mqtt import trie as trie_module
from holdfast.mqtt.trie import FilterTable, TopicTree, Trie
from holdfast.topics import match

words = st.sampled_from(["", "a", "b", "c", "$x", "$"])
topics = st.lists(words, min_size=1, max_size=4).map("/".join).filter(bool)
filters = st.builds(
    lambda front, tail: "/".join(front + tail),
    st.lists(words | st.just("+"), max_size=3),
    st.sampled_from([["#"], ["+"], ["a"], ["b"]]),
)


@settings(max_examples=300, deadline=None)
@given(held=st.lists(filters, max_size=12), asked=st.lists(topics, min_size=1, max_size=6))
def test_a_topic_meets_the_filters_that_match_it(held, asked):
    trie: Trie[str] = Trie()
    for text in held:
        trie.add(text, text)
    expected = {topic: sorted({text for text in held if match(text, topic)}) for topic in asked}
    for topic in asked:
        assert sorted(trie.match(topic)) == expected[topic]
    many = trie.match_many(asked)
    assert {at: sorted(found) for at, found in many.items()} == {
        at: expected[topic] for at, topic in enumerate(asked) if expected[topic]
    }


@settings(max_examples=300, deadline=None)
@given(stored=st.sets(topics, max_size=15), gone=st.sets(topics, max_size=5), text=filters | topics)
def test_a_filter_meets_the_topics_it_matches(stored, gone, text):
    tree = TopicTree(stored)
    for topic in gone:
        tree.discard(topic)
    left = stored - gone
    assert sorted(tree.matching_topics(text)) == sorted(topic for topic in left if match(text, topic))
    assert set(tree) == left
    assert len(tree) == len(left)
    assert all(topic in tree for topic in left)


class TrieAgainstAList(RuleBasedStateMachine):
    """Adds, removals and questions in any order: what is remembered must never be out of date."""

    def __init__(self) -> None:
        super().__init__()
        self.trie: Trie[int] = Trie()
        self.held: set[tuple[str, int]] = set()

    @rule(text=filters | topics, value=st.integers(0, 2))
    def add(self, text, value):
        assert self.trie.add(text, value) == ((text, value) not in self.held)
        self.held.add((text, value))

    @rule(text=filters | topics, value=st.integers(0, 2))
    def remove(self, text, value):
        assert self.trie.remove(text, value) == ((text, value) in self.held)
        self.held.discard((text, value))

    @rule(data=st.data())
    def remove_one_that_is_there(self, data):
        if self.held:
            text, value = data.draw(st.sampled_from(sorted(self.held)))
            assert self.trie.remove(text, value)
            self.held.discard((text, value))

    @rule(topic=topics)
    def ask(self, topic):
        expected = sorted({value for text, value in self.held if match(text, topic)})
        assert sorted(self.trie.match(topic)) == expected

    @invariant()
    def it_counts(self):
        assert len(self.trie) == len(self.held)

    @invariant()
    def it_can_find_what_it_remembers(self):
        found = trie_module._meant(self.trie._remembered, ["#"])
        assert sorted(found) == sorted(self.trie._cache)


TestTrieAgainstAList = TrieAgainstAList.TestCase
TestTrieAgainstAList.settings = settings(max_examples=100, stateful_step_count=30, deadline=None)


class WalksThroughAChangingTree(RuleBasedStateMachine):
    """Topics come and go while walks rest: each walk gives what was there throughout, and never anything twice."""

    def __init__(self) -> None:
        super().__init__()
        self.tree = TopicTree()
        self.held: set[str] = set()
        self.walks: list[Walk] = []

    @rule(topic=topics)
    def add(self, topic):
        self.tree.add(topic)
        self.held.add(topic)

    @rule(topic=topics)
    def discard(self, topic):
        self.tree.discard(topic)
        self.held.discard(topic)
        for walk in self.walks:
            walk.may_give.discard(topic)

    @rule(text=filters | topics)
    def begin(self, text):
        self.walks.append(Walk(self.tree.walk(text), {topic for topic in self.held if match(text, topic)}))

    @rule(data=st.data(), steps=st.integers(1, 5))
    def step(self, data, steps):
        if self.walks:
            walk = data.draw(st.sampled_from(self.walks))
            for _ in range(steps):
                self.advance(walk)

    def advance(self, walk: Walk) -> bool:
        topic = next(walk.steps, "(at its end)")
        if topic == "(at its end)":
            assert not walk.may_give, "not given"
            return False
        if topic is not None:
            assert topic in walk.may_give
            walk.may_give.discard(topic)
        return True

    def teardown(self):
        for walk in self.walks:
            while self.advance(walk):
                pass
        for topic in self.held:
            self.tree.discard(topic)
        root = self.tree._root
        assert not root.named and root.first is None and root.last is None


@dataclass(eq=False)
class Walk:
    steps: Iterator[str | None]
    may_give: set[str]


TestWalksThroughAChangingTree = WalksThroughAChangingTree.TestCase
TestWalksThroughAChangingTree.settings = settings(max_examples=300, stateful_step_count=40, deadline=None)


class TableAgainstADict(RuleBasedStateMachine):
    """One client's filters, from none to more than a few and back."""

    def __init__(self) -> None:
        super().__init__()
        self.table: FilterTable[int] = FilterTable()
        self.held: dict[str, int] = {}

    @rule(text=filters | topics, value=st.integers(0, 2))
    def put(self, text, value):
        assert self.table.set(text, value) == self.held.get(text)
        self.held[text] = value

    @rule(data=st.data(), most=st.integers(1, 4))
    def remove(self, data, most):
        for _ in range(min(most, len(self.held))):
            text = data.draw(st.sampled_from(sorted(self.held)))
            assert self.table.remove(text) == self.held.pop(text)

    @rule(text=filters | topics)
    def remove_any(self, text):
        assert self.table.remove(text) == self.held.pop(text, None)

    @rule(topic=topics)
    def ask(self, topic):
        assert sorted(self.table.match(topic)) == sorted(v for text, v in self.held.items() if match(text, topic))

    @invariant()
    def it_holds_them(self):
        assert len(self.table) == len(self.held)
        assert list(self.table) == list(self.held)
        assert list(self.table.values()) == list(self.held.values())


TestTableAgainstADict = TableAgainstADict.TestCase
TestTableAgainstADict.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)


@pytest.mark.parametrize(
    ("text", "topic", "matches"),
    [
        ("#", "$SYS/up", False),
        ("+/up", "$SYS/up", False),
        ("$SYS/#", "$SYS/up", True),
        ("$SYS/+", "$SYS/up", True),
        ("a/#", "a", True),
        ("a/+", "a/", True),
        ("a/+", "a", False),
        ("+", "/", False),
        ("+/+", "/", True),
        ("a/$b/#", "a/$b/c", True),
    ],
)
def test_the_rules_people_trip_over(text, topic, matches):
    trie: Trie[str] = Trie()
    trie.add(text, "v")
    assert trie.match(topic) == (("v",) if matches else ())
    assert TopicTree([topic]).matching_topics(text) == ([topic] if matches else [])


def test_an_emptied_trie_holds_no_nodes():
    trie: Trie[int] = Trie()
    for text in ("a/+/c", "a/#", "#", "+/+", "x/y"):
        trie.add(text, 1)
    for text in ("a/+/c", "a/#", "#", "+/+", "x/y"):
        assert trie.remove(text, 1)
    assert trie._filters._root.empty
    assert not trie._filters._exact


def test_a_topic_of_many_levels_needs_no_deep_recursion():
    deep = "/".join("a" * 30_000)
    trie: Trie[int] = Trie()
    trie.add(deep[:-1] + "+", 1)
    trie.add("a/#", 2)
    assert sorted(trie.match(deep)) == [1, 2]
    tree = TopicTree([deep])
    assert tree.matching_topics("a/#") == [deep]
    tree.discard(deep)
    assert not tree._root.named


def test_what_is_remembered_is_bounded(monkeypatch):
    monkeypatch.setattr(trie_module, "CACHE_BYTES_MAX", 10_000)
    trie: Trie[int] = Trie()
    trie.add("#", 1)
    for number in range(1000):
        assert trie.match(f"topic/{number}") == (1,)
        assert trie._cache_bytes <= 10_000
        assert len(trie._cache) <= 50
        assert len(trie._remembered["topic"]) == len(trie._cache)


def test_an_exact_subscription_leaves_what_is_known_of_other_topics():
    trie: Trie[int] = Trie()
    trie.add("a/+", 1)
    assert trie.match_many(["a/b", "a/c"]) == {0: (1,), 1: (1,)}
    trie.add("a/b", 2)
    assert set(trie._cache) == {"a/c"}
    assert trie.match("a/b") == (2, 1)
    assert trie._cache_bytes == sum(trie_module._size(topic, found) for topic, found in trie._cache.items())


def test_what_one_client_s_table_remembers_is_bounded():
    table: FilterTable[int] = FilterTable()
    for n in range(2_000):
        table.set("#" if n == 0 else f"+/+/{n}", n)
    for n in range(10_000):
        assert table.match(f"a/b/{n}") == ((0, n) if 0 < n < 2_000 else (0,))
        assert sum(4 + len(found) for found in table._cache.values()) == trie_module.VALUES_REMEMBERED - table._room
    assert len(table._cache) < 2_000


def test_a_wildcard_subscription_leaves_what_is_known_of_topics_it_does_not_mean():
    trie: Trie[int] = Trie()
    trie.add("dev/+/up", 1)
    for n in range(100):
        trie.match(f"dev/{n}/up")
    trie.add("dev/7/#", 2)
    assert len(trie._cache) == 99
    assert trie.match("dev/7/up") == (2, 1)
    trie.remove("dev/7/#", 2)
    assert len(trie._cache) == 99
    assert trie.match("dev/7/up") == (1,)


def test_a_subscription_that_means_very_many_topics_forgets_all_at_once(monkeypatch):
    monkeypatch.setattr(trie_module, "FORGET_STEPS_MAX", 50)
    trie: Trie[int] = Trie()
    for n in range(100):
        trie.match(f"dev/{n}")
    trie.match("other")
    trie.add("dev/+", 1)
    assert not trie._cache and not trie._cache_bytes and not trie._remembered
    assert trie.match("dev/5") == (1,)
