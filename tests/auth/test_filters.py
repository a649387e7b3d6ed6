"""Covering and overlapping mean what matching says they mean, topic by topic."""

from __future__ import annotations

from functools import cache
from itertools import product

from filter_strategies import TOPICS, filters
from hypothesis import given
from hypothesis import strategies as st

from holdfast.auth.filters import covers, levels, overlaps
from holdfast.topics import match


@cache
def matched(filter_text: str) -> frozenset[str]:
    return frozenset(topic for topic in TOPICS if match(filter_text, topic))


@given(filters, filters)
def test_covering_is_matching_everything_the_other_matches(outer: str, inner: str) -> None:
    assert covers(levels(outer), levels(inner)) == (matched(inner) <= matched(outer))


@given(filters, filters)
def test_overlapping_is_having_a_topic_in_common(one: str, other: str) -> None:
    assert overlaps(levels(one), levels(other)) == bool(matched(one) & matched(other))


@given(filters, st.sampled_from(TOPICS))
def test_covering_a_topic_is_matching_it(filter_text: str, topic: str) -> None:
    assert covers(levels(filter_text), levels(topic)) == match(filter_text, topic)


def test_every_pair_of_short_filters() -> None:
    short = [
        text
        for depth in range(4)
        for parts in product(["", "a", "$s", "+"], repeat=depth)
        for tail in ([], ["#"])
        if (text := "/".join([*parts, *tail]))
    ]
    for one, other in product(short, repeat=2):
        if covers(levels(one), levels(other)) != (matched(other) <= matched(one)):
            raise AssertionError(f"{one} covers {other}")
        if overlaps(levels(one), levels(other)) == matched(one).isdisjoint(matched(other)):
            raise AssertionError(f"{one} overlaps {other}")


def test_examples() -> None:
    assert covers(levels("#"), levels("+/#"))
    assert covers(levels("+/#"), levels("#"))
    assert covers(levels("a/#"), levels("a"))
    assert not covers(levels("a/+"), levels("a/#"))
    assert not covers(levels("#"), levels("$SYS/#"))
    assert overlaps(levels("a/+/c"), levels("+/b/#"))
    assert not overlaps(levels("+/b"), levels("$SYS/b"))
