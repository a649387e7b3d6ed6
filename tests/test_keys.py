"""The names of keys: every name has one, no two share one, and all of them fit."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from holdfast import keys
from holdfast.groups.protocol.nouns import GroupId
from holdfast.metadata.contract import KEY_BYTES_MAX, check_key
from holdfast.model import Stream

S = Stream("messages", 3, 1)
LONG_LOG = Stream("l" * 128, 4095, 10**9)

KINDS: list[Callable[[str, str], str]] = [
    lambda a, b: keys.session_cursor_key(S, a, b),
    lambda a, b: keys.progress_key((a, b), S),
    lambda a, b: keys.record_key((a, b)),
    lambda a, b: keys.claim_key((a, b)),
    lambda a, b: keys.skipped_key((a, b)),
    lambda a, b: keys.dead_letters_key((a, b), S),
    lambda a, b: keys.ban_key(a, b),
]
"""Keys of two names. Those of one name are tried as well, beside them."""

tricky = st.text(st.sampled_from("a%/~: \0#2Feé😀\ud800"), max_size=8)
names = st.one_of(tricky, st.text(max_size=300), st.builds(lambda t, n: t * n, tricky, st.sampled_from([50, 9000])))


def every_key(a: str, b: str) -> list[str]:
    found = [kind(a, b) for kind in KINDS]
    return [*found, keys.named_cursor_key(S, a)]


@settings(deadline=None)
@given(names, names)
def test_any_name_has_a_key_that_the_metadata_store_takes(a: str, b: str) -> None:
    for key in [*every_key(a, b), keys.session_cursor_key(LONG_LOG, a, b), keys.progress_key((a, b), LONG_LOG)]:
        assert check_key(key) == key


@settings(deadline=None)
@given(names, names, names, names)
@example("group:a:c", "d", "a", "c d")
@example("a b", "c", "a", "b c")
@example("a:b", "c", "a", "b:c")
@example("a%2Fb", "c", "a/b", "c")
@example("a~", "b", "a%7E", "b")
@example("", "/", "/", "")
def test_two_names_never_share_a_key(a: str, b: str, c: str, d: str) -> None:
    wanted: dict[str, tuple[object, ...]] = {}
    for one, other in ((a, b), (c, d), (b, a), (a, a)):
        for kind, key in enumerate(every_key(one, other)):
            # Of one name only: the second one says nothing.
            means = (kind, one) if kind >= len(KINDS) else (kind, one, other)
            assert wanted.setdefault(key, means) == means, f"{means} and {wanted[key]} share {key!r}"


@settings(deadline=None)
@given(tricky)
def test_nobody_can_take_another_ones_hash_for_a_name(name: str) -> None:
    """A short name that looks like a long one's key: once, that was another one's cursor."""
    long = name + "x" * 300
    for part in {part for key in every_key(long, long) for part in key.split("/")}:
        assert keys.named_cursor_key(S, part) != keys.named_cursor_key(S, long)
        assert keys.session_cursor_key(S, *part.partition(" ")[::2]) != keys.session_cursor_key(S, long, long)


def test_what_they_look_like() -> None:
    assert keys.named_cursor_key(S, "g") == "/holdfast/subscriptions/messages/messages.1.3/g/cursor"
    assert (
        keys.session_cursor_key(S, "car-1", "vehicle/#")
        == "/holdfast/subscriptions/messages/messages.1.3/car-1 vehicle%2F#/cursor"
    )
    group = GroupId("billing", "trip/#")
    assert keys.progress_key(group, S) == "/holdfast/subscriptions/messages/messages.1.3/group:billing:trip%2F#/cursor"
    assert keys.record_key(group) == "/holdfast/groups/billing:trip%2F#/record"
    assert keys.claim_key(group) == "/holdfast/groups/billing:trip%2F#/claim"
    assert keys.node_key("a/b", 17) == "/holdfast/nodes/a%2Fb/11"
    assert keys.ban_key("address", "10.0.0.0/8") == "/holdfast/bans/address/10.0.0.0%2F8"
    assert not keys.BANS_CHANGED.startswith(keys.BANS)
    assert keys.is_record(keys.record_key(group)) and not keys.is_record(keys.claim_key(("x/record", "record")))


@pytest.mark.parametrize("name", ["x" * 65_535, "é" * 32_767, "/" * 65_535, "%" * 65_535])
def test_the_longest_names_mqtt_allows_fit(name: str) -> None:
    for key in (*every_key(name, name), keys.session_cursor_key(LONG_LOG, name, name)):
        assert len(key.encode()) <= KEY_BYTES_MAX
    assert keys.named_cursor_key(S, name) != keys.named_cursor_key(S, name[:-1])


@settings(deadline=None)
@given(names, names)
def test_a_prefix_finds_what_is_below_it_and_nothing_else(a: str, b: str) -> None:
    sibling = Stream("messages", 30, 1)
    for key in (keys.session_cursor_key(S, a, b), keys.progress_key((a, b), S), keys.named_cursor_key(S, a)):
        assert key.startswith(keys.cursors_of_stream(S)) and key.startswith(keys.cursors_of_log("messages"))
        assert not key.startswith(keys.cursors_of_stream(sibling))
        assert keys.stream_of_cursor(key) == S
