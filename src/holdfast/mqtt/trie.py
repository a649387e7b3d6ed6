"""Which subscriptions a topic meets, and which topics a filter meets, without trying them one by one.

Results are remembered by topic until a subscription that could change them changes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, Generic, TypeVar

from holdfast.topics import FEW, FilterTree, TopicFilter, is_wild

T = TypeVar("T")

CACHE_BYTES_MAX = 64 << 20
"""Roughly what remembered results may take in one trie. Beyond it, all are forgotten and found again."""

_ENTRY_BYTES = 500
"""What a remembered result takes besides its topic and its values: two slots of dicts and some objects."""

_LEVEL_BYTES = 250
"""And for each level of its topic."""

LONG_TOPIC = 1_024
"""Longer topics are not remembered: they are rare, and a thousand of the longest would fill the memory."""

FORGET_STEPS_MAX = 256
"""If it takes more steps to find what a changed filter means, all is forgotten: that is quicker."""

_Remembered = dict[str, Any]
"""Topics by level: at each level the names of the next, and under END the topic that ends there."""

_END = "/"
"""No level is called that."""


class Trie(Generic[T]):
    """Values by filter. A value may stand under several filters; for one topic it counts once."""

    __slots__ = ("_cache", "_cache_bytes", "_filters", "_remembered")

    def __init__(self) -> None:
        self._filters: FilterTree[T] = FilterTree()
        self._cache: dict[str, tuple[T, ...]] = {}
        self._cache_bytes = 0
        self._remembered: _Remembered = {}
        """The topics of the cache, so that a filter that changes finds those that it means."""

    def __len__(self) -> int:
        """How many (filter, value) pairs there are."""
        return len(self._filters)

    def add(self, filter_text: str, value: T) -> bool:
        """Put a value under a valid filter. False where it was there already."""
        if not self._filters.add(filter_text, value):
            return False
        self._forget(filter_text)
        return True

    def remove(self, filter_text: str, value: T) -> bool:
        """Take a value from under a filter. False where it was not there."""
        if not self._filters.remove(filter_text, value):
            return False
        self._forget(filter_text)
        return True

    def match(self, topic: str) -> tuple[T, ...]:
        """The values of the filters that match this topic, each once."""
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
        by_filter = self._filters.find(topic)
        if len(by_filter) < 2:
            found = tuple(by_filter[0]) if by_filter else ()
        else:
            values = dict(by_filter[0])
            for more in by_filter[1:]:
                values |= more  # a value may stand under several
            found = tuple(values)
        if len(topic) > LONG_TOPIC:
            return found
        size = _size(topic, found)
        if self._cache_bytes + size > CACHE_BYTES_MAX:
            # All at once: dropping the oldest would miss every time in a round through more topics than fit.
            self._forget_all()
        self._cache_bytes += size
        self._cache[topic] = found
        node = self._remembered
        for level in topic.split("/"):
            below = node.get(level)
            if below is None:
                below = node[level] = {}
            node = below
        node[_END] = topic
        return found

    def _forget(self, filter_text: str) -> None:
        """What is known about the topics that this filter matches may no longer be so."""
        if not self._cache:
            return
        if not is_wild(filter_text):
            gone: list[str] | None = [filter_text] if filter_text in self._cache else []
        else:
            gone = _meant(self._remembered, filter_text.split("/"))
        if gone is None or 2 * len(gone) > len(self._cache):
            self._forget_all()
            return
        for topic in gone:
            self._cache_bytes -= _size(topic, self._cache.pop(topic))
            _take_out(self._remembered, topic)

    def _forget_all(self) -> None:
        self._cache.clear()
        self._remembered = {}
        self._cache_bytes = 0


def _meant(remembered: _Remembered, levels: list[str]) -> list[str] | None:
    """The topics that the filter of these levels matches; None if it is not worth while to look for them.

    A wildcard in the first place is taken to match `$` as well: what is forgotten for nothing is found again.
    """
    nodes = [remembered]
    steps = 0
    for level in levels:
        steps += sum(map(len, nodes)) if level in ("+", "#") else len(nodes)
        if steps > FORGET_STEPS_MAX:
            return None
        if level == "#":
            found = []
            while nodes:
                node = nodes.pop()
                steps += len(node)
                if steps > FORGET_STEPS_MAX:
                    return None
                for name, below in node.items():
                    if name == _END:
                        found.append(below)
                    else:
                        nodes.append(below)
            return found
        if level == "+":
            nodes = [below for node in nodes for name, below in node.items() if name != _END]
        else:
            nodes = [node[level] for node in nodes if level in node]
    return [node[_END] for node in nodes if _END in node]


def _take_out(remembered: _Remembered, topic: str) -> None:
    path = [remembered]
    levels = topic.split("/")
    for level in levels:
        path.append(path[-1][level])
    del path.pop()[_END]
    for node, level in zip(reversed(path), reversed(levels), strict=True):
        if node[level]:
            break
        del node[level]


def _size(topic: str, found: tuple[T, ...]) -> int:
    return _ENTRY_BYTES + 2 * len(topic) + topic.count("/") * _LEVEL_BYTES + 8 * len(found)


VALUES_REMEMBERED = 8_192
TOPIC_SIZE_REMEMBERED = 256
"""What one client's table remembers: so many topics and values, if the topics are not longer than this."""


class FilterTable(Generic[T]):
    """One client's filters, with one value each. Cheap for the many who have one, and for those who have thousands."""

    __slots__ = ("_cache", "_few", "_room", "_tree", "_values")

    def __init__(self) -> None:
        self._values: dict[str, T] = {}
        self._few: list[TopicFilter] = []
        """The filters, as long as they are few."""
        self._tree: FilterTree[str] | None = None
        """The filters, once there are more."""
        self._cache: dict[str, tuple[T, ...]] = {}
        self._room = VALUES_REMEMBERED

    def __len__(self) -> int:
        return len(self._values)

    def __contains__(self, filter_text: object) -> bool:
        return filter_text in self._values

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def get(self, filter_text: str) -> T | None:
        return self._values.get(filter_text)

    def values(self) -> Iterable[T]:
        return self._values.values()

    def set(self, filter_text: str, value: T) -> T | None:
        """Put a value under a valid filter, in place of the one that was there, which is returned."""
        old = self._values.get(filter_text)
        known = filter_text in self._values
        self._values[filter_text] = value
        if not known:
            if self._tree is not None:
                self._tree.add(filter_text, filter_text)
            elif len(self._values) <= FEW:
                self._few.append(TopicFilter(filter_text))
            else:
                self._few = []
                self._tree = FilterTree()
                for text in self._values:
                    self._tree.add(text, text)
        self._forget(filter_text)
        return old

    def remove(self, filter_text: str) -> T | None:
        """Take a filter out; its value."""
        if filter_text not in self._values:
            return None
        if self._tree is not None:
            self._tree.remove(filter_text, filter_text)
            if len(self._values) == 1:
                self._tree = None
        else:
            self._few = [one for one in self._few if one.text != filter_text]
        self._forget(filter_text)
        return self._values.pop(filter_text)

    def match(self, topic: str) -> tuple[T, ...]:
        """The values of the filters that match this topic."""
        if self._tree is None:
            return tuple(self._values[one.text] for one in self._few if one.matches(topic))
        found = self._cache.get(topic)
        if found is None:
            found = tuple(self._values[text] for texts in self._tree.find(topic) for text in texts)
            if len(topic) <= TOPIC_SIZE_REMEMBERED:
                if self._room < 4 + len(found):
                    self._cache.clear()
                    self._room = VALUES_REMEMBERED
                self._room -= 4 + len(found)
                self._cache[topic] = found
        return found

    def _forget(self, filter_text: str) -> None:
        if is_wild(filter_text):
            self._cache.clear()
            self._room = VALUES_REMEMBERED
        elif (found := self._cache.pop(filter_text, None)) is not None:
            self._room += 4 + len(found)


class _Level:
    """One level of one or more topics. Its siblings are a list, so that a walk can rest at any of them."""

    __slots__ = ("after", "before", "first", "gone", "last", "name", "named", "number", "parent", "topic")

    def __init__(self, name: str, parent: _Level | None):
        self.name = name
        self.parent = parent
        self.named: dict[str, _Level] = {}
        """What is below, by name."""
        self.first: _Level | None = None
        self.last: _Level | None = None
        """The first and the last of what is below, in the order in which it came."""
        self.before: _Level | None = None
        self.after: _Level | None = None
        self.gone = False
        """Taken out. `after` stays as it was, so that a walk that rested here finds its way back."""
        self.topic: str | None = None
        """The topic that ends here, if it is in the set."""
        self.number = 0
        """How many topics had been added before it."""

    def put(self, name: str) -> _Level:
        new = self.named[name] = _Level(name, self)
        new.before = self.last
        if self.last is None:
            self.first = new
        else:
            self.last.after = new
        self.last = new
        return new

    def take_out(self) -> None:
        parent, before, after = self.parent, self.before, self.after
        assert parent is not None
        del parent.named[self.name]
        if before is None:
            parent.first = after
        else:
            before.after = after
        if after is None:
            parent.last = before
        else:
            after.before = before
        self.gone = True
        self.before = None


class TopicTree:
    """A set of topics that can be asked which of them a filter matches."""

    __slots__ = ("_root", "_topics", "added")

    def __init__(self, topics: Iterable[str] = ()) -> None:
        self._root = _Level("", None)
        self._topics: dict[str, _Level] = {}
        self.added = 0
        """How many topics were ever added: the next one's number."""
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
        node = self._root
        for level in topic.split("/"):
            node = node.named.get(level) or node.put(level)
        node.topic = topic
        node.number = self.added
        self.added += 1
        self._topics[topic] = node

    def discard(self, topic: str) -> None:
        node = self._topics.pop(topic, None)
        if node is None:
            return
        node.topic = None
        while not node.named and node.topic is None and node.parent is not None:
            node.take_out()
            node = node.parent

    def matching_topics(self, filter_text: str) -> list[str]:
        """Every topic in the set that this valid filter matches, each once."""
        return [topic for topic in self.walk(filter_text) if topic is not None]

    def walk(self, filter_text: str) -> Iterator[str | None]:
        """The same a step at a time: each step gives a topic, or None where it has found none.

        The tree may change between steps. A topic that is in it all the while is given once; one that is taken out
        before it was reached is not given, and neither is one that comes, or comes again, after this call.
        """
        return self._walk(filter_text.split("/"), self.added)

    def _walk(self, levels: list[str], before: int) -> Iterator[str | None]:
        end = len(levels) - 1 if levels[-1] == "#" else len(levels)
        all_below = end < len(levels)
        # What is still to be visited: a node and those that come after it, and how many levels lead to them.
        waiting: list[tuple[_Level | None, int]] = []
        node: _Level | None = self._root
        depth = 0
        while node is not None:
            # `node` matches the first `depth` levels, and is to match those up to the next wildcard.
            while node is not None and depth < end and levels[depth] != "+":
                node = node.named.get(levels[depth])
                depth += 1
            yield None if node is None or depth < end or node.number >= before else node.topic
            if node is not None and (depth < end or all_below):
                waiting.append((node.first, depth + 1))
            # The next one: of the deepest list that has any left.
            node = None
            while waiting and node is None:
                node, depth = waiting.pop()
                while node is not None and (node.gone or (depth == 1 and node.name[:1] == "$")):
                    node = node.after
                if node is not None:
                    waiting.append((node.after, depth))
