"""Filters match as MQTT says, checked against a matcher that is plain to see through."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast import RequestError
from holdfast.topics import AnyOf, TopicFilter, any_of, check_filter, check_topic, match, prefixes

levels = st.sampled_from(["", "a", "b", "$s", "a.b"])
topics = st.lists(levels, min_size=1, max_size=4).map("/".join).filter(bool)
filters = st.builds(
    lambda parts, tail: "/".join([*parts, *tail]),
    st.lists(st.one_of(levels, st.just("+")), max_size=4),
    st.sampled_from([[], ["#"]]),
).filter(bool)


def plainly(wanted: list[str], topic: list[str]) -> bool:
    if wanted == ["#"]:
        return True
    if not wanted or not topic:
        return wanted == topic
    if wanted[0] in ("+", topic[0]):
        return plainly(wanted[1:], topic[1:]) or (len(topic) == 1 and wanted[1:] == ["#"])
    return False


@given(filters, topics)
def test_matching(wanted: str, topic: str) -> None:
    expected = plainly(wanted.split("/"), topic.split("/")) and not (topic[0] == "$" and wanted[0] in "+#")
    assert match(wanted, topic) == expected
    assert TopicFilter(wanted).matching([topic, topic]) == ([0, 1] if expected else [])
    if expected:
        assert topic.startswith(TopicFilter(wanted).prefix)


@given(st.lists(filters, min_size=2, max_size=12), st.lists(topics, max_size=5))
def test_any_of_several_filters(wanted: list[str], asked: list[str]) -> None:
    several = any_of(wanted)
    assert isinstance(several, AnyOf)
    expected = [at for at, topic in enumerate(asked) if any(match(text, topic) for text in wanted)]
    assert several.matching(asked) == expected
    assert [at for at, topic in enumerate(asked) if several.matches(topic)] == expected
    assert several.text == any_of(reversed(wanted)).text


def test_where_to_look_for_topics_that_match_any_of_several() -> None:
    parts = [TopicFilter(text) for text in ("a/b/+", "a/b/#", "a/c", "+/x")]
    assert prefixes({part.prefix for part in parts}) == ["", "a/b", "a/b/", "a/c"]
    assert prefixes({f"dev/{n}/" for n in range(200)}) == ["dev/"]
    assert prefixes(set()) == []


def test_thousands_of_filters_cost_about_as_much_to_ask_as_a_few() -> None:
    """Counted in comparisons rather than in seconds: a filter that is tried compares, or compiles."""
    tried = 0

    class Counted(TopicFilter):
        def matches(self, topic: str) -> bool:
            nonlocal tried
            tried += 1
            return super().matches(topic)

    many = AnyOf([Counted(f"dev/{n}/+/state") for n in range(5_000)])
    assert many.matching([f"dev/{n}/a/state" for n in range(4_990, 5_010)]) == list(range(10))
    assert many.matches("dev/0/b/state") and not many.matches("dev/0/b/other")
    assert tried == 0 and all(part._full is None for part in many.parts)


@pytest.mark.parametrize(
    "wanted", ["a/#/b", "a#", "#a", "a+", "+a/b", "a/+b", "", "a\0", "x" * 65_536, "a\ud800", "a/" * 128 + "b"]
)
def test_bad_filters_are_named(wanted: str) -> None:
    with pytest.raises(RequestError, match="filter"):
        check_filter(wanted)


@pytest.mark.parametrize("topic", ["", "a/+", "#", "a\0b", "x" * 65_536, "é" * 32_768, "\udfff"])
def test_bad_topics_are_named(topic: str) -> None:
    with pytest.raises(RequestError, match="topic"):
        check_topic(topic)
