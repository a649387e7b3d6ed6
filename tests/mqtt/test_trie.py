"""The trees against matching one by one."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from holdfast.mqtt import trie as trie_module
from holdfast.mqtt.trie import TopicTree, Trie
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
        expected = sorted(value for text, value in self.held if match(text, topic))
        assert sorted(self.trie.match(topic)) == expected

    @invariant()
    def it_counts(self):
        assert len(self.trie) == len(self.held)


TestTrieAgainstAList = TrieAgainstAList.TestCase
TestTrieAgainstAList.settings = settings(max_examples=100, stateful_step_count=30, deadline=None)


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
    assert trie._root.empty
    assert not trie._exact


def test_a_topic_of_many_levels_needs_no_deep_recursion():
    deep = "/".join("a" * 30_000)
    trie: Trie[int] = Trie()
    trie.add(deep[:-1] + "+", 1)
    trie.add("a/#", 2)
    assert trie.match(deep) == (2, 1)
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


def test_an_exact_subscription_leaves_what_is_known_of_other_topics():
    trie: Trie[int] = Trie()
    trie.add("a/+", 1)
    assert trie.match_many(["a/b", "a/c"]) == {0: (1,), 1: (1,)}
    trie.add("a/b", 2)
    assert set(trie._cache) == {"a/c"}
    assert trie.match("a/b") == (2, 1)
    assert trie._cache_bytes == sum(200 + 3 + 8 * len(found) for found in trie._cache.values())
