"""Topic names and topic filters: what is valid, and what matches what.

One surprising rule, from MQTT: a filter that begins with a wildcard does not match topics that begin
with `$`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from holdfast.errors import RequestError

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


class TopicFilter:
    """A validated filter, ready to be matched against many topics."""

    __slots__ = ("_pattern", "exact", "prefix", "text")

    def __init__(self, text: str):
        self.text = check_filter(text)
        self.exact = "+" not in text and "#" not in text
        wild = min((i for i in (text.find("+"), text.find("#")) if i >= 0), default=len(text))
        self.prefix = text[:wild]
        """What every matching topic begins with (without a trailing slash before '#', since `a/#` matches `a`)."""
        if text.endswith("/#"):
            self.prefix = self.prefix[:-1] if wild == len(text) - 1 else self.prefix
        self._pattern = None if self.exact else re.compile(_regex(text), re.DOTALL)

    @property
    def everything(self) -> bool:
        return self.text == "#"

    @property
    def parts(self) -> tuple[TopicFilter, ...]:
        return (self,)

    def matches(self, topic: str) -> bool:
        if self._pattern is None:
            return topic == self.text
        return self._pattern.fullmatch(topic) is not None

    def matching(self, topics: Iterable[str]) -> list[int]:
        """Which of these match, by their place in the sequence."""
        if self._pattern is None:
            return [i for i, topic in enumerate(topics) if topic == self.text]
        full = self._pattern.fullmatch
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

    __slots__ = ("parts", "text")

    exact = False
    prefix = ""

    def __init__(self, parts: Iterable[TopicFilter]):
        self.parts = tuple(parts)
        self.text = "\0".join(sorted(part.text for part in self.parts))
        """Names the set; no filter contains NUL."""

    @property
    def everything(self) -> bool:
        return any(part.everything for part in self.parts)

    def matches(self, topic: str) -> bool:
        return any(part.matches(topic) for part in self.parts)

    def matching(self, topics: Iterable[str]) -> list[int]:
        return [at for at, topic in enumerate(topics) if self.matches(topic)]


Wanted = TopicFilter | AnyOf


def any_of(filters: Iterable[str]) -> Wanted:
    """One filter, or several as one."""
    parts = [TopicFilter(text) for text in filters]
    return parts[0] if len(parts) == 1 else AnyOf(parts)
