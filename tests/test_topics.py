"""Filters match as MQTT says, checked against a matcher that is plain to see through."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast import RequestError
from holdfast.topics import TopicFilter, check_filter, check_topic, match

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


@pytest.mark.parametrize("wanted", ["a/#/b", "a#", "#a", "a+", "+a/b", "a/+b", "", "a\0", "x" * 65_536, "a\ud800"])
def test_bad_filters_are_named(wanted: str) -> None:
    with pytest.raises(RequestError, match="filter"):
        check_filter(wanted)


@pytest.mark.parametrize("topic", ["", "a/+", "#", "a\0b", "x" * 65_536, "é" * 32_768, "\udfff"])
def test_bad_topics_are_named(topic: str) -> None:
    with pytest.raises(RequestError, match="topic"):
        check_topic(topic)
