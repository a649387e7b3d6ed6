"""The four ways to write a shared subscription."""

from __future__ import annotations

import pytest

from holdfast.errors import RequestError
from holdfast.groups.protocol.nouns import GroupId
from holdfast.groups.shares import PREFIXES, is_shared, parse_share
from holdfast.sessions.subscriptions import Subscription
from holdfast.topics import LEVELS_MAX


@pytest.mark.parametrize("prefix", ["$share", "$shared", "$shares", "$queue"])
def test_every_prefix_names_group_and_filter(prefix: str) -> None:
    assert is_shared(f"{prefix}/workers/a/+/#")
    assert parse_share(f"{prefix}/workers/a/+/#") == GroupId("workers", "a/+/#")
    assert parse_share(f"{prefix}/workers//a") == GroupId("workers", "/a")


@pytest.mark.parametrize("text", ["a/b", "$SYS/x/y", "$sharex/g/f", "share/g/f", ""])
def test_other_filters_are_not_shared(text: str) -> None:
    assert not is_shared(text)
    with pytest.raises(RequestError):
        parse_share(text)


@pytest.mark.parametrize(
    "text", ["$share", "$share/", "$share/g", "$share/g/", "$share//f", "$share/g+/f", "$share/#/f", "$share/g/a#"]
)
def test_incomplete_ones_say_what_they_lack(text: str) -> None:
    with pytest.raises(RequestError):
        parse_share(text)


@pytest.mark.parametrize("group", [GroupId("g", "a/b"), GroupId("a:b", "c:d"), GroupId("50%3A", "#")])
def test_a_group_is_addressed_by_name_and_filter(group: GroupId) -> None:
    assert GroupId.parse(str(group)) == group


@pytest.mark.parametrize("prefix", PREFIXES)
def test_a_shared_filter_may_be_as_deep_as_any_other(prefix: str) -> None:
    """Group and prefix counted as levels: the group was made, and nobody could join it."""
    deep = "/".join("a" * LEVELS_MAX)
    shared = Subscription(f"{prefix}/g/{deep}", 1)
    assert shared.matcher.matches(deep) and not shared.matcher.matches(shared.filter)
