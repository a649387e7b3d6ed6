"""Topic names and topic filters: what is valid, and what matches what.

One surprising rule, from MQTT: a filter that begins with a wildcard does not match topics that begin
with `$`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Set
from functools import cached_property
from typing import Generic, TypeVar

from holdfast.errors import RequestError

T = TypeVar("T")

TOPIC_BYTES_MAX = 65_535
LEVELS_MAX = 128
"""Levels in a topic or filter. Trees hold a node for each: without a bound, 64 KiB could cost megabytes."""


def _size(text: str, what: str) -> int:
    try:
        return len(text.encode())
    except UnicodeEncodeError as error:
        raise RequestError(f"{what} {_show(text)} is not valid Unicode: {error.reason}") from error


def _show(text: str) -> str:
    return repr(text) if len(text) <= 80 else f"{text[:60]!r}… ({len(text)} characters)"


def check_topic(topic: str) -> str:
    """The topic itself, or a RequestError that names it."""
    if not topic:
        raise RequestError("topic '' is empty; a topic has at least one character")
    if (len(topic) > 16_383 or not topic.isascii()) and _size(topic, "topic") > TOPIC_BYTES_MAX:
        raise RequestError(f"topic {_show(topic)} is longer than {TOPIC_BYTES_MAX} bytes")
    if "\0" in topic:
        raise RequestError(f"topic {_show(topic)} contains NUL")
    if "+" in topic or "#" in topic:
        raise RequestError(f"topic {_show(topic)} contains a wildcard; '+' and '#' belong in filters only")
    return topic


def too_deep(text: str) -> bool:
    """Whether a topic or filter has more levels than are taken."""
    return text.count("/") >= LEVELS_MAX


def check_filter(text: str) -> str:
    """The filter itself, or a RequestError that names it."""
    if not text:
        raise RequestError("filter '' is empty; to match every topic, write '#'")
    if _size(text, "filter") > TOPIC_BYTES_MAX:
        raise RequestError(f"filter {_show(text)} is longer than {TOPIC_BYTES_MAX} bytes")
    if "\0" in text:
        raise RequestError(f"filter {_show(text)} contains NUL")
    if too_deep(text):
        raise RequestError(f"filter {_show(text)} has more than {LEVELS_MAX} levels")
    levels = text.split("/")
    for at, level in enumerate(levels):
        if "#" in level and (level != "#" or at != len(levels) - 1):
            raise RequestError(f"filter {_show(text)}: '#' stands alone, and only as the last level")
        if "+" in level and level != "+":
            raise RequestError(f"filter {_show(text)}: '+' takes a whole level")
    return text


COMPILED_AFTER = 100
"""A filter that is asked about more topics than this, one by one, becomes a regular expression."""


class TopicFilter:
    """A validated filter, ready to be matched against many topics."""

    __slots__ = ("_asked", "_full", "exact", "prefix", "text")

    def __init__(self, text: str):
        self.text = check_filter(text)
        self.exact = "+" not in text and "#" not in text
        wild = min((i for i in (text.find("+"), text.find("#")) if i >= 0), default=len(text))
        self.prefix = text[:wild]
        """What every matching topic begins with (without a trailing slash before '#', since `a/#` matches `a`)."""
        if text.endswith("/#"):
            self.prefix = self.prefix[:-1] if wild == len(text) - 1 else self.prefix
        self._full: Callable[[str], object] | None = self.text.__eq__ if self.exact else None
        self._asked = 0

    @property
    def everything(self) -> bool:
        return self.text == "#"

    @property
    def below(self) -> bool:
        """Does it mean one topic, its prefix, and all below that?"""
        return self.text == self.prefix + "/#"

    @property
    def parts(self) -> tuple[TopicFilter, ...]:
        return (self,)

    def _compiled(self) -> Callable[[str], object]:
        """This takes far longer than everything else about a filter, and more memory than the rest of a session."""
        self._full = re.compile(_regex(self.text), re.DOTALL).fullmatch
        return self._full

    def matches(self, topic: str) -> bool:
        if self._full is not None:
            return bool(self._full(topic))
        self._asked += 1
        return bool(self._compiled()(topic)) if self._asked > COMPILED_AFTER else self._matches_by_level(topic)

    def _matches_by_level(self, topic: str) -> bool:
        if not topic.startswith(self.prefix):
            return False
        wanted, given = self.text.split("/"), topic.split("/")
        if topic[:1] == "$" and wanted[0] in ("+", "#"):
            return False
        for at, level in enumerate(wanted):
            if level == "#":
                return True
            if at >= len(given) or (level != "+" and level != given[at]):
                return False
        return len(given) == len(wanted)

    def matching(self, topics: Iterable[str]) -> list[int]:
        """Which of these match, by their place in the sequence."""
        full, prefix = self._full or self._compiled(), self.prefix
        if prefix:  # far cheaper to ask, and mostly the answer
            return [i for i, topic in enumerate(topics) if topic.startswith(prefix) and full(topic)]
        return [i for i, topic in enumerate(topics) if full(topic)]

    def __repr__(self) -> str:
        return f"TopicFilter({self.text!r})"


def _regex(text: str) -> str:
    levels = text.split("/")
    tail = ""
    if levels[-1] == "#":
        levels.pop()
        if not levels:
            return r"[^$].*|"
        tail = "(?:/.*)?"
    body = "/".join("[^/]*" if level == "+" else re.escape(level) for level in levels)
    return (r"(?!\$)" if text[0] == "+" else "") + body + tail


def match(filter_text: str, topic: str) -> bool:
    """Does this one filter match this one topic?"""
    return TopicFilter(filter_text).matches(topic)


class AnyOf:
    """Several filters as one: what matches any of them."""

    exact = False
    prefix = ""

    def __init__(self, parts: Iterable[TopicFilter]):
        self.parts = tuple(parts)

    @cached_property
    def text(self) -> str:
        """Names the set; no filter contains NUL."""
        return "\0".join(sorted(part.text for part in self.parts))

    @property
    def everything(self) -> bool:
        return any(part.everything for part in self.parts)

    @cached_property
    def _tree(self) -> FilterTree[None]:
        tree: FilterTree[None] = FilterTree()
        for part in self.parts:
            tree.add(part.text, None)
        return tree

    def matches(self, topic: str) -> bool:
        if len(self.parts) > FEW:
            return bool(self._tree.find(topic))
        return any(part.matches(topic) for part in self.parts)

    def matching(self, topics: Iterable[str]) -> list[int]:
        if len(self.parts) > FEW:
            find = self._tree.find
            return [at for at, topic in enumerate(topics) if find(topic)]
        return [at for at, topic in enumerate(topics) if self.matches(topic)]


Wanted = TopicFilter | AnyOf


def any_of(filters: Iterable[str]) -> Wanted:
    """One filter, or several as one."""
    parts = [TopicFilter(text) for text in filters]
    return parts[0] if len(parts) == 1 else AnyOf(parts)


def prefixes(begins: Set[str]) -> list[str]:
    """What topics begin with that begin with any of these: one prefix for all of them if there would be too many."""
    found = sorted(begins)
    if len(found) <= PREFIXES_MAX:
        return found
    first, last = found[0], found[-1]
    same = next((at for at, (a, b) in enumerate(zip(first, last, strict=False)) if a != b), len(first))
    return [first[:same]]


PREFIXES_MAX = 64

FEW = 4
"""Up to so many filters are tried one by one, which is quicker than to walk a tree."""


class _Node(Generic[T]):
    __slots__ = ("below", "here", "named", "plus")

    def __init__(self) -> None:
        self.named: dict[str, _Node[T]] = {}
        self.plus: _Node[T] | None = None
        self.here: dict[T, None] | None = None
        """Values of the filter that ends here."""
        self.below: dict[T, None] | None = None
        """Values of the filter that goes on with `#`: it matches here and everything below."""

    @property
    def empty(self) -> bool:
        return not (self.named or self.plus or self.here or self.below)


class FilterTree(Generic[T]):
    """Values by filter, asked by topic. What it costs to ask hardly depends on how many filters there are.

    Most filters are exact topics: those are in a dict. Only filters with wildcards are in a tree by level.
    """

    __slots__ = ("_exact", "_root", "_size")

    def __init__(self) -> None:
        self._exact: dict[str, dict[T, None]] = {}
        self._root: _Node[T] = _Node()
        self._size = 0

    def __len__(self) -> int:
        """How many (filter, value) pairs there are."""
        return self._size

    def add(self, filter_text: str, value: T) -> bool:
        """Put a value under a valid filter. False where it was there already."""
        values = self._values(filter_text) if is_wild(filter_text) else self._exact.setdefault(filter_text, {})
        if value in values:
            return False
        values[value] = None
        self._size += 1
        return True

    def remove(self, filter_text: str, value: T) -> bool:
        """Take a value from under a filter. False where it was not there."""
        if not (self._remove_wild if is_wild(filter_text) else self._remove_exact)(filter_text, value):
            return False
        self._size -= 1
        return True

    def find(self, topic: str) -> list[dict[T, None]]:
        """For each filter that matches this topic, its values."""
        exact = self._exact.get(topic)
        out = [] if exact is None else [exact]
        levels = topic.split("/")
        nodes = [self._root]
        if topic[:1] == "$":
            # A wildcard in the first place does not match such topics.
            first = self._root.named.get(levels.pop(0))
            nodes = [first] if first else []
        for level in levels:
            deeper = []
            for node in nodes:
                if node.below:
                    out.append(node.below)
                if (child := node.named.get(level)) is not None:
                    deeper.append(child)
                if node.plus is not None:
                    deeper.append(node.plus)
            if not deeper:
                return out
            nodes = deeper
        for node in nodes:
            if node.here:
                out.append(node.here)
            if node.below:
                out.append(node.below)
        return out

    def _values(self, filter_text: str) -> dict[T, None]:
        node = self._root
        levels = filter_text.split("/")
        last = levels.pop() if levels[-1] == "#" else None
        for level in levels:
            below = node.plus if level == "+" else node.named.get(level)
            if below is None:
                below = _Node()
                if level == "+":
                    node.plus = below
                else:
                    node.named[level] = below
            node = below
        if last is None:
            node.here = found = node.here or {}
        else:
            node.below = found = node.below or {}
        return found

    def _remove_exact(self, topic: str, value: T) -> bool:
        values = self._exact.get(topic)
        if values is None or value not in values:
            return False
        del values[value]
        if not values:
            del self._exact[topic]
        return True

    def _remove_wild(self, filter_text: str, value: T) -> bool:
        path: list[tuple[_Node[T], str]] = []
        node = self._root
        levels = filter_text.split("/")
        last = levels.pop() if levels[-1] == "#" else None
        for level in levels:
            child = node.plus if level == "+" else node.named.get(level)
            if child is None:
                return False
            path.append((node, level))
            node = child
        values = node.here if last is None else node.below
        if values is None or value not in values:
            return False
        del values[value]
        for parent, level in reversed(path):
            if not node.empty:
                break
            if level == "+":
                parent.plus = None
            else:
                del parent.named[level]
            node = parent
        return True


def is_wild(filter_text: str) -> bool:
    """Has it a wildcard? A filter without one is a topic."""
    return "+" in filter_text or "#" in filter_text
