"""A session as its row has it, and a session made from its row again.

What is in flight is stored with every write, but between two writes more is sent. So the row says of which connection
it is the last word (`StoredPackets.left`): only then are the packet ids those the client has seen. Otherwise the ids
begin elsewhere, and whatever may have been sent goes out marked as a duplicate.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from holdfast.cursors.cursor_map import NOTHING_DONE
from holdfast.groups.shares import is_shared
from holdfast.model import LOG, Stream
from holdfast.sessions.changes import Content
from holdfast.sessions.heads import Heads
from holdfast.sessions.outgoing import RetainedOrigin
from holdfast.sessions.packed import (
    Flight,
    StoredPackets,
    StoredSubscription,
    StoredSubscriptions,
    pack_cursors,
    pack_packets,
    pack_subscriptions,
    unpack_cursors,
    unpack_packets,
    unpack_subscriptions,
)
from holdfast.sessions.positions import StreamOrigin
from holdfast.sessions.session import Session
from holdfast.sessions.shared import LoanFeed
from holdfast.sessions.subscriptions import Subscription, SubscriptionTable
from holdfast.sessions.table import SessionRow
from holdfast.sessions.window import NOBODY, RELEASED, Delivery, Window


class LentBefore:
    """The origin of a QoS 2 delivery of a group, until it is known whether the group still waits for this client."""

    __slots__ = ("share", "stream")

    def __init__(self, stream: Stream, share: int):
        self.stream = stream
        self.share = share
        """The number of the subscription under which it was lent."""

    def settle(self, deliveries: Sequence[Delivery], reason: int) -> None: ...

    def passed(self, offset: int) -> None: ...


class RetainedBefore:
    """The origin of a retained message that was in flight: it is sent again if it still is the last word.

    Whoever replaces it publishes to the session, too: then nothing is owed.
    """

    __slots__ = ("time", "topic")

    def __init__(self, topic: str, time: int):
        self.topic, self.time = topic, time

    def settle(self, deliveries: Sequence[Delivery], reason: int) -> None: ...

    def passed(self, offset: int) -> None: ...


def content_of(session: Session, heads: Heads, leaving: str) -> Content:
    """What is to be stored of it; `leaving`: the connection after which this is the last word, or nothing."""
    dirty = session.positions.take_dirty()
    # A flush looks at what has moved only: there are many of them.
    whole = leaving or session.subscriptions.packed is None
    session.bring_up(heads, None if whole else dirty)
    return Content(
        _subscriptions(session.subscriptions),
        pack_cursors(session.stored_cursors()),
        pack_packets(_packets(session.window, leaving)),
    )


def filters_of(subscriptions: bytes) -> list[str]:
    """The filters in a row."""
    return [entry.filter for entry in unpack_subscriptions(subscriptions, "").entries]


def _subscriptions(table: SubscriptionTable) -> bytes:
    if table.packed is None:
        entries = [
            StoredSubscription(
                s.filter,
                s.qos,
                s.no_local,
                s.retain_as_published,
                s.retain_handling,
                s.identifier,
                s.number,
                s.born,
            )
            for s in (*table, *table.shared.values())
        ]
        table.packed = pack_subscriptions(StoredSubscriptions(entries, table.next_number)) if entries else b""
    return table.packed


def _packets(window: Window, leaving: str) -> StoredPackets:
    flights = []
    for packet_id, (origin, offset, qos) in window:
        if qos == RELEASED or (origin is NOBODY and qos == 2):
            # A client that has half of what is nobody's any more would take another message for it.
            flights.append(Flight(packet_id, RELEASED))
        elif isinstance(origin, StreamOrigin):
            flights.append(Flight(packet_id, qos, origin.stream, offset))
        elif isinstance(origin, RetainedOrigin):
            rows = origin.rows
            time = rows.times if isinstance(rows.times, int) else rows.times[offset]
            flights.append(Flight(packet_id, qos, None, time, 0, rows.topics[offset]))
        elif isinstance(origin, RetainedBefore):
            flights.append(Flight(packet_id, qos, None, origin.time, 0, origin.topic))
        elif isinstance(origin, LoanFeed) and qos == 2:
            flights.append(Flight(packet_id, qos, origin.stream, offset, origin.subscription.number))
        elif isinstance(origin, LentBefore):
            flights.append(Flight(packet_id, qos, origin.stream, offset, origin.share))
    return StoredPackets(flights, window.last_id, leaving)


def restore(row: SessionRow, previous: str, may_have_been_sent: Mapping[Stream, int]) -> Session:
    """A session that is not attached yet. RequestError if the row cannot be read."""
    session = Session(row.client_id, row.expiry_secs, row.epoch)
    session.attached = False
    cursors = unpack_cursors(row.cursors, row.client_id)
    session.positions.done, session.positions.gaps = cursors.session, cursors.gaps
    stored = unpack_subscriptions(row.subscriptions, row.client_id)
    session.subscriptions.next_number = stored.next_number
    for entry in stored.entries:
        subscription = Subscription(
            entry.filter,
            entry.qos,
            entry.no_local,
            entry.retain_as_published,
            entry.retain_handling,
            entry.identifier,
            entry.born,
            cursors.own.get(entry.number, NOTHING_DONE),
            entry.number,
        )
        if is_shared(entry.filter):
            session.subscriptions.share(subscription)
        else:
            session.subscriptions.add(subscription, anew=True)
    packets = unpack_packets(row.packets, row.client_id, LOG)
    for packet_id, qos, stream, offset, share, topic in packets.flights:
        if stream is None:
            delivery = Delivery(RetainedBefore(topic, offset) if topic else NOBODY, 0, qos)
        else:
            delivery = Delivery(LentBefore(stream, share) if share else session.positions.origin(stream), offset, qos)
        session.window.restore(packet_id, delivery)
    if previous and packets.left == previous:
        session.window.last_id = packets.last_id
    elif previous:
        session.window.begin_elsewhere(row.epoch)
        session.positions.dup_below = may_have_been_sent
    return session
