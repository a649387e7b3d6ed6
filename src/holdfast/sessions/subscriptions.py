"""What one session is subscribed to: its filters with their options, and which of them mean a message."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from holdfast.cursors.cursor_map import NOTHING_DONE, CursorMap
from holdfast.groups.shares import is_shared, parse_share
from holdfast.model import Stream
from holdfast.mqtt.trie import FilterTable
from holdfast.mqtt.wire import to_varint
from holdfast.topics import AnyOf, TopicFilter, Wanted

ROUTES_MAX = 256
"""Topics of which one session remembers how they go out."""


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
    done: CursorMap = field(default_factory=lambda: NOTHING_DONE)
    """What it has had, or never wanted, besides what is done for all of the session. Replaced, never changed."""
    number: int = 0
    """Which of all the session ever had, from 1 on: given when it is taken, and anew when it begins anew."""
    matcher: TopicFilter = field(init=False)
    """Of a shared one: of the topics alone, without group and prefix."""
    identifier_bytes: bytes = field(init=False)

    @property
    def special(self) -> bool:
        """Each message is to be looked at for itself."""
        return self.no_local or self.retain_as_published

    def __post_init__(self) -> None:
        self.matcher = TopicFilter(parse_share(self.filter).filter if is_shared(self.filter) else self.filter)
        self.identifier_bytes = b"\x0b" + to_varint(self.identifier) if self.identifier else b""


class Route(NamedTuple):
    """The highest QoS that is granted, and the identifiers of the subscriptions, as properties."""

    qos: int
    identifiers: bytes


class SubscriptionTable:
    """The session's own filters; shared ones are in `shared`, and their progress is their groups' to keep."""

    __slots__ = (
        "_own",
        "_routes",
        "_wanted",
        "length",
        "next_number",
        "only",
        "packed",
        "shared",
    )

    def __init__(self) -> None:
        self._own: FilterTable[Subscription] = FilterTable()
        self.shared: dict[str, Subscription] = {}
        """By their filter with its prefix."""
        self.only: Subscription | None = None
        """The one there is, if there is just one: most sessions have no more."""
        self._wanted: Wanted | None = None
        self._routes: dict[str, Route] = {}
        self.next_number = 1
        self.length = 0
        """Characters in all filters, shared ones too."""
        self.packed: bytes | None = None
        """As it was last stored; None: it has changed since."""

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

    def add(self, subscription: Subscription, *, anew: bool = False) -> bool:
        """Add or replace; whether it is new. One that is replaced goes on where it was, unless it begins `anew`."""
        old = self._own.get(subscription.filter)
        if old is not None and not anew:
            subscription.done, subscription.number = old.done, old.number
        else:
            self.give_number(subscription)
        if old is None:
            self.length += len(subscription.filter)
        self._own.set(subscription.filter, subscription)
        self._changed()
        return old is None

    def give_number(self, subscription: Subscription) -> None:
        if not subscription.number:
            subscription.number = self.next_number
        self.next_number = max(self.next_number, subscription.number + 1)

    def remove(self, filter_text: str) -> Subscription | None:
        gone = self._own.remove(filter_text)
        if gone is not None:
            self.length -= len(filter_text)
        self._changed()
        return gone

    def share(self, subscription: Subscription) -> None:
        """Into a group, or with other options."""
        old = self.shared.get(subscription.filter)
        if old is not None and not subscription.number:
            subscription.number = old.number
        if old is None:
            self.length += len(subscription.filter)
        self.give_number(subscription)
        self.shared[subscription.filter] = subscription
        self.packed = None

    def unshare(self, filter_text: str) -> Subscription | None:
        self.packed = None
        gone = self.shared.pop(filter_text, None)
        if gone is not None:
            self.length -= len(filter_text)
        return gone

    def note_born(self, subscription: Subscription, born: str) -> None:
        if subscription.born != born:
            subscription.born, self.packed = born, None

    def _changed(self) -> None:
        self._wanted = self.packed = None
        self._routes = {}
        self.only = next(iter(self._own.values())) if len(self._own) == 1 else None

    @property
    def wanted(self) -> Wanted | None:
        """All its filters as one, put together when it is asked for."""
        if self._wanted is None and len(self._own):
            self._wanted = self.only.matcher if self.only else AnyOf(s.matcher for s in self._own.values())
        return self._wanted

    def route(self, topic: str) -> Route | None:
        """How a message of this topic goes out that is new to all its subscriptions; None: look at each.

        Remembered until a subscription changes; what one has had already is only ever said together with a change.
        """
        found = self._routes.get(topic)
        if found is None:
            meant = self._own.match(topic)
            if not meant or any(s.special or s.done is not NOTHING_DONE for s in meant):
                return None
            found = Route(max(s.qos for s in meant), b"".join(s.identifier_bytes for s in meant))
            if len(self._routes) >= ROUTES_MAX:
                self._routes.clear()
            self._routes[topic] = found
        return found

    def meaning_at(self, topic: str, stream: Stream | None, offset: int) -> tuple[Subscription, ...]:
        """Those that match this topic and have not had this message (a retained one has no stream)."""
        found = self._own.match(topic)
        if stream is None:
            return found
        for subscription in found:
            if subscription.done is not NOTHING_DONE and subscription.done.is_done(stream, offset):
                return tuple(s for s in found if not s.done.is_done(stream, offset))
        return found
