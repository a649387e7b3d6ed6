"""What one session is subscribed to: its filters with their options, and which of them mean a message."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from holdfast.model import Stream
from holdfast.mqtt.trie import FilterTable
from holdfast.mqtt.wire import to_varint
from holdfast.topics import AnyOf, TopicFilter, Wanted


@dataclass(slots=True)
class Subscription:
    """One filter of a session and its options."""

    filter: str
    qos: int
    no_local: bool = False
    retain_as_published: bool = False
    retain_handling: int = 0
    identifier: int = 0
    born: str = ""
    """Of a shared one: which group it is in, should one of the same name be made anew."""
    since: dict[Stream, int] = field(default_factory=dict)
    """Where it began, by stream: earlier messages are not its own."""
    carried: dict[Stream, set[int]] = field(default_factory=dict)
    """Below `since`, what was under way when `since` was raised: still its own until it is acknowledged."""
    moving: bool = False
    """It begins elsewhere now, and its stored cursors are about to be deleted: until then none are saved."""
    matcher: TopicFilter = field(init=False)
    identifier_bytes: bytes = field(init=False)

    def __post_init__(self) -> None:
        self.matcher = TopicFilter(self.filter)
        self.identifier_bytes = b"\x0b" + to_varint(self.identifier) if self.identifier else b""


class SubscriptionTable:
    """The session's own filters; shared ones are in `shared`, and their progress is their groups' to keep."""

    def __init__(self) -> None:
        self._own: FilterTable[Subscription] = FilterTable()
        self.shared: dict[str, Subscription] = {}
        """By their filter with its prefix."""
        self.only: Subscription | None = None
        """The one there is, if there is just one: most sessions have no more."""
        self._wanted: Wanted | None = None

    def __len__(self) -> int:
        return len(self._own)

    def __iter__(self) -> Iterator[Subscription]:
        return iter(self._own.values())

    def __contains__(self, filter_text: str) -> bool:
        return filter_text in self._own

    def __getitem__(self, filter_text: str) -> Subscription:
        found = self._own.get(filter_text)
        if found is None:
            raise KeyError(filter_text)
        return found

    @property
    def filters(self) -> list[str]:
        return list(self._own)

    def add(self, subscription: Subscription) -> bool:
        """Add or replace; whether it is new."""
        old = self._own.get(subscription.filter)
        if old is not None and not subscription.since:
            subscription.since, subscription.carried = old.since, old.carried
        self._own.set(subscription.filter, subscription)
        self._changed()
        return old is None

    def remove(self, filter_text: str) -> Subscription | None:
        gone = self._own.remove(filter_text)
        self._changed()
        return gone

    def moved(self, filters: Iterable[str]) -> None:
        """The stored cursors of these are gone, or stay what they were: from here on they are saved again."""
        for text in filters:
            if (found := self._own.get(text)) is not None:
                found.moving = False

    def _changed(self) -> None:
        self._wanted = None
        self.only = next(iter(self._own.values())) if len(self._own) == 1 else None

    @property
    def wanted(self) -> Wanted | None:
        """All its filters as one, put together when it is asked for."""
        if self._wanted is None and len(self._own):
            self._wanted = self.only.matcher if self.only else AnyOf(s.matcher for s in self._own.values())
        return self._wanted

    def meaning_at(self, topic: str, stream: Stream | None, offset: int) -> tuple[Subscription, ...]:
        """Those that match this topic and had begun when this message came (a retained one has no stream)."""
        found = self._own.match(topic)
        if stream is not None and any(s.since.get(stream, 0) > offset for s in found):
            return tuple(s for s in found if s.since.get(stream, 0) <= offset)
        return found
