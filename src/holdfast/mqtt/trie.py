"""Which subscriptions a topic meets, and which topics a filter meets, without trying them one by one.

Most filters are exact topics: those cost a dict lookup, however many there are. Only filters with wildcards
are in a tree by level. Results are remembered by topic until a subscription that could change them changes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Generic, TypeVar

T = TypeVar("T")

CACHE_BYTES_MAX = 64 << 20
"""Roughly what remembered results may take in one trie. Beyond it, all are forgotten and found again."""

_ENTRY_BYTES = 200
"""What a remembered result takes besides its topic and its values: the dict's slot and two objects."""


class _Node(Generic[T]):
    __slots__ = ("below", "here", "named", "plus")

    def __init__(self) -> None:
        self.named: dict[str, _Node[T]] = {}
        self.plus: _Node[T] | None = None
        self.here: dict[T, None] = {}
        """Values of the filter that ends here."""
        self.below: dict[T, None] = {}
        """Values of the filter that goes on with `#`: it matches here and everything below."""

    @property
    def empty(self) -> bool:
        return not (self.named or self.plus or self.here or self.below)


class Trie(Generic[T]):
    """Values by filter. A value may stand under several filters; it then counts once for each."""

    __slots__ = ("_cache", "_cache_bytes", "_exact", "_root", "_size")

    def __init__(self) -> None:
        self._exact: dict[str, dict[T, None]] = {}
        self._root: _Node[T] = _Node()
        self._cache: dict[str, tuple[T, ...]] = {}
        self._cache_bytes = 0
        self._size = 0

    def __len__(self) -> int:
        """How many (filter, value) pairs there are."""
        return self._size

    def add(self, filter_text: str, value: T) -> bool:
        """Put a value under a valid filter. False where it was there already."""
        wild = "+" in filter_text or "#" in filter_text
        values = self._values(filter_text) if wild else self._exact.setdefault(filter_text, {})
        if value in values:
            return False
        values[value] = None
        self._size += 1
        self._forget(None if wild else filter_text)
        return True

    def remove(self, filter_text: str, value: T) -> bool:
        """Take a value from under a filter. False where it was not there."""
        wild = "+" in filter_text or "#" in filter_text
        if not (self._remove_wild if wild else self._remove_exact)(filter_text, value):
            return False
        self._size -= 1
        self._forget(None if wild else filter_text)
        return True

    def match(self, topic: str) -> tuple[T, ...]:
        """The values of every filter that matches this topic."""
        found = self._cache.get(topic)
        return self._find(topic) if found is None else found

    def match_many(self, topics: Iterable[str]) -> dict[int, tuple[T, ...]]:
        """The same for the distinct topics of a block: by their place, only those that anything matches."""
        known, find = self._cache.get, self._find
        out = {}
        for at, topic in enumerate(topics):
            found = known(topic)
            if found is None:
                found = find(topic)
            if found:
                out[at] = found
        return out

    def _find(self, topic: str) -> tuple[T, ...]:
        found = tuple(self._exact.get(topic, ()))
        if wild := self._wild(topic):
            found += tuple(wild)
        size = _ENTRY_BYTES + len(topic) + 8 * len(found)
        if self._cache_bytes + size > CACHE_BYTES_MAX:
            # All at once: dropping the oldest would miss every time in a round through more topics than fit.
            self._forget(None)
        self._cache_bytes += size
        self._cache[topic] = found
        return found

    def _wild(self, topic: str) -> list[T]:
        out: list[T] = []
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
                    out += node.below
                if (child := node.named.get(level)) is not None:
                    deeper.append(child)
                if node.plus is not None:
                    deeper.append(node.plus)
            if not deeper:
                return out
            nodes = deeper
        for node in nodes:
            if node.here:
                out += node.here
            if node.below:
                out += node.below
        return out

    def _values(self, filter_text: str) -> dict[T, None]:
        node = self._root
        levels = filter_text.split("/")
        last = levels.pop() if levels[-1] == "#" else None
        for level in levels:
            if level == "+":
                node.plus = node.plus or _Node()
                node = node.plus
            else:
                node = node.named.setdefault(level, _Node())
        return node.here if last is None else node.below

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
        if value not in values:
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

    def _forget(self, topic: str | None) -> None:
        """What is known about this topic, or about every topic, may no longer be so."""
        if topic is None:
            self._cache.clear()
            self._cache_bytes = 0
        elif (found := self._cache.pop(topic, None)) is not None:
            self._cache_bytes -= _ENTRY_BYTES + len(topic) + 8 * len(found)


class _Level:
    __slots__ = ("named", "topic")

    def __init__(self) -> None:
        self.named: dict[str, _Level] = {}
        self.topic: str | None = None
        """The topic that ends here, if it is in the set."""


class TopicTree:
    """A set of topics that can be asked which of them a filter matches: for retained messages."""

    __slots__ = ("_root", "_topics")

    def __init__(self, topics: Iterable[str] = ()) -> None:
        self._root = _Level()
        self._topics: set[str] = set()
        for topic in topics:
            self.add(topic)

    def __len__(self) -> int:
        return len(self._topics)

    def __contains__(self, topic: object) -> bool:
        return topic in self._topics

    def __iter__(self) -> Iterator[str]:
        return iter(self._topics)

    def add(self, topic: str) -> None:
        if topic in self._topics:
            return
        self._topics.add(topic)
        node = self._root
        for level in topic.split("/"):
            deeper = node.named.get(level)
            if deeper is None:
                deeper = node.named[level] = _Level()
            node = deeper
        node.topic = topic

    def discard(self, topic: str) -> None:
        if topic not in self._topics:
            return
        self._topics.remove(topic)
        path = []
        node = self._root
        for level in topic.split("/"):
            path.append((node, level))
            node = node.named[level]
        node.topic = None
        for parent, level in reversed(path):
            if node.named or node.topic is not None:
                break
            del parent.named[level]
            node = parent

    def matching_topics(self, filter_text: str) -> list[str]:
        """Every topic in the set that this valid filter matches, each once."""
        if "+" not in filter_text and "#" not in filter_text:
            return [filter_text] if filter_text in self._topics else []
        nodes = [self._root]
        levels = filter_text.split("/")
        everything_below = levels[-1] == "#"
        if everything_below:
            levels.pop()
        for at, level in enumerate(levels):
            if level != "+":
                nodes = [node.named[level] for node in nodes if level in node.named]
            elif at:
                nodes = [child for node in nodes for child in node.named.values()]
            else:
                nodes = self._undollared()
        if not everything_below:
            return [node.topic for node in nodes if node.topic is not None]
        if not levels:
            nodes = self._undollared()
        return list(_all_below(nodes))

    def _undollared(self) -> list[_Level]:
        """The first levels that a wildcard in the first place matches."""
        return [node for level, node in self._root.named.items() if level[:1] != "$"]


def _all_below(nodes: list[_Level]) -> Iterator[str]:
    nodes = nodes[::-1]
    while nodes:
        node = nodes.pop()
        if node.topic is not None:
            yield node.topic
        nodes.extend(node.named.values())
