"""Readers: whoever brings one client rows that are not just being committed.

    LIVE ◀──▶ WAITING ──▶ READING          LIVE      fed from commits, nothing to read
      ▲                      │             WAITING   something is to be read, as soon as there is room for it
      └──────────────────────┘             READING   it is being read
                                           OVER      from every status: unsubscribed, given back, detached

A session has one reader for its own streams and one per loan of a shared group. What a reader found is taken only if
it is still READING what was asked for.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum, auto
from typing import TYPE_CHECKING, NamedTuple, Protocol

from holdfast.errors import BrokenInvariant
from holdfast.model import Stream
from holdfast.sessions.heads import Heads
from holdfast.sessions.positions import Gap
from holdfast.sessions.rows import Rows
from holdfast.sessions.shared import LoanFeed
from holdfast.topics import Wanted

if TYPE_CHECKING:
    from holdfast.delivery.outlet import Outlet


class ReaderStatus(Enum):
    LIVE = auto()
    WAITING = auto()
    READING = auto()
    OVER = auto()


LEGAL: dict[ReaderStatus, set[ReaderStatus]] = {
    ReaderStatus.LIVE: {ReaderStatus.WAITING, ReaderStatus.OVER},
    ReaderStatus.WAITING: {ReaderStatus.LIVE, ReaderStatus.READING, ReaderStatus.OVER},
    ReaderStatus.READING: {ReaderStatus.LIVE, ReaderStatus.WAITING, ReaderStatus.OVER},
    ReaderStatus.OVER: set(),
}


class Fetched(NamedTuple):
    """What was found in the log."""

    past: int
    """Read up to here; -1: the stream is gone."""
    rows: Sequence[Rows]
    gaps: Sequence[Gap] = ()


class Request(NamedTuple):
    """What to read from the log."""

    stream: Stream
    at: int
    until: int | None
    """No further than the node has come: what is committed beyond that will be offered."""
    wanted: Wanted
    shared: bool = False
    """Others read the same for their own slices of it: what is found may begin before `at`."""


class Reader(Protocol):
    """One of the kinds below."""

    outlet: Outlet
    status: ReaderStatus
    request: Request | None

    def behind(self) -> bool:
        """Is there something to read?"""
        ...

    def ask(self) -> Request | None:
        """What to read next."""
        ...

    def take(self, found: Fetched) -> None:
        """What came of the request under way."""
        ...


def move(reader: Reader, to: ReaderStatus) -> None:
    """The one place where a reader's status changes."""
    if to is reader.status:
        return
    if to not in LEGAL[reader.status]:
        raise BrokenInvariant(f"{reader} may not go from {reader.status.name} to {to.name}", ())
    reader.status = to


class OwnReader:
    """The session's own streams, of which one at a time is read: the oldest generation first."""

    __slots__ = ("_node", "outlet", "request", "status")

    def __init__(self, outlet: Outlet, node: Node):
        self.outlet, self._node = outlet, node
        self.status = ReaderStatus.LIVE
        self.request: Request | None = None

    def behind(self) -> bool:
        session = self.outlet.session
        return session.positions.to_read(self._node.newest) and len(session.subscriptions) > 0

    def ask(self) -> Request | None:
        session = self.outlet.session
        wanted = session.subscriptions.wanted
        stream = session.positions.next_to_read(self._node.heads, session.window) if wanted is not None else None
        if stream is None or wanted is None:
            return None
        return Request(stream, session.positions.behind[stream], self._node.known(stream), wanted)

    def take(self, found: Fetched) -> None:
        asked, session = self.request, self.outlet.session
        assert asked is not None
        if session.positions.behind.get(asked.stream) != asked.at or session.subscriptions.wanted is not asked.wanted:
            return  # the session went back, or has other filters now: what was read says nothing about those
        session.positions.note(found.gaps)
        if found.past < 0:
            session.positions.lost(asked.stream)
        else:
            session.take_read(asked.stream, found.past, found.rows, self._node.known(asked.stream))

    def __repr__(self) -> str:
        return f"<reader of {self.outlet.session.client_id}>"


class LoanReader:
    """One loan of a shared group."""

    __slots__ = ("_node", "feed", "outlet", "request", "status")

    def __init__(self, outlet: Outlet, feed: LoanFeed, node: Node):
        self.outlet, self.feed, self._node = outlet, feed, node
        self.status = ReaderStatus.LIVE
        self.request: Request | None = None

    def behind(self) -> bool:
        return self.feed.next_offset < (self._node.known(self.feed.stream) or 0)

    def ask(self) -> Request | None:
        feed = self.feed
        known = self._node.known(feed.stream)
        return Request(feed.stream, feed.next_offset, known, feed.wanted, shared=feed.done.of > 1)

    def take(self, found: Fetched) -> None:
        feed, asked = self.feed, self.request
        assert asked is not None
        if asked.at != feed.next_offset:
            return
        if found.past < 0:
            feed.lost()
            return
        for rows in found.rows:
            picks = feed.choose(rows, range(len(rows.topics)), rows.offsets[-1] + 1)
            self.outlet.session.outgoing.put(rows, picks, feed)
        feed.catch_up(found.past)

    def __repr__(self) -> str:
        return f"<reader of {self.feed.loan}>"


class Node(Protocol):
    """How far every stream has come on this node."""

    heads: Heads

    @property
    def newest(self) -> int: ...

    def known(self, stream: Stream) -> int | None: ...
