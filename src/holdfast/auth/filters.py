"""How filters relate to each other: whether one covers another, and whether two have a topic in common.

A topic is a filter without wildcards, so `covers(filter, topic)` is also the question whether it matches.
The rule that a leading wildcard does not match `$` holds throughout.
"""

from __future__ import annotations

from typing import TypeAlias

Levels: TypeAlias = tuple[str, ...]


def levels(filter_text: str) -> Levels:
    """A valid filter (or topic), taken apart for the functions below."""
    # No topic is empty, so `#` matches what `+/#` matches, and `/#` what `/+/#` does. With one way to say it,
    # looking level by level is enough.
    return _SAME_AS.get(filter_text) or tuple(filter_text.split("/"))


_SAME_AS: dict[str, Levels] = {"#": ("+", "#"), "/#": ("", "+", "#")}


def covers(outer: Levels, inner: Levels) -> bool:
    """Does every topic that `inner` matches also match `outer`?"""
    if _apart_by_dollar(outer[0], inner[0]):
        return False
    for at, level in enumerate(outer):
        if level == "#":
            return True
        if at == len(inner) or inner[at] == "#":
            return False
        if level not in ("+", inner[at]):
            return False
    return len(outer) == len(inner)


def overlaps(one: Levels, other: Levels) -> bool:
    """Is there a topic that both match?"""
    if _apart_by_dollar(one[0], other[0]) or _apart_by_dollar(other[0], one[0]):
        return False
    for left, right in zip(one, other, strict=False):
        if left == "#" or right == "#":
            return True
        if left != right and left != "+" and right != "+":
            return False
    longer = one if len(one) > len(other) else other
    # What is left over must be able to match nothing at all: `a/#` matches `a`.
    return len(one) == len(other) or longer[min(len(one), len(other))] == "#"


def _apart_by_dollar(wild: str, named: str) -> bool:
    return wild == "+" and named.startswith("$")
