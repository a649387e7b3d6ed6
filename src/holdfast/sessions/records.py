"""What is stored of a session, and a session made from it again: its record, and its cursors one by one.

After a crash the record says that the client is connected; only a node that saw it go has stored what was in flight.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import msgspec

from holdfast.cursors.cursor import Cursor
from holdfast.errors import RequestError
from holdfast.groups.shares import is_shared
from holdfast.model import Stream
from holdfast.mqtt.inbound import Inbound
from holdfast.sessions.positions import StreamOrigin
from holdfast.sessions.session import Session
from holdfast.sessions.subscriptions import Subscription
from holdfast.sessions.window import NOBODY, RELEASED, Delivery

LoadCursor = Callable[[Stream, str], Cursor | None]
"""The stored cursor of one filter in one stream; a RequestError if it cannot be read."""

Unreadable = Callable[[Session, Stream, RequestError, int, int], Cursor | None]
"""What to go on with in place of a cursor that cannot be read: session, stream, error, since, head."""


class SubscriptionRecord(msgspec.Struct):
    filter: str
    qos: int
    no_local: bool = False
    retain_as_published: bool = False
    retain_handling: int = 0
    identifier: int = 0
    since: dict[str, int] = {}
    """Where it began, or the first it may not have had: the cursors know the rest."""
    born: str = ""


class SessionRecord(msgspec.Struct):
    """What is stored of a session, besides its cursors."""

    client_id: str
    expiry_seconds: int
    epoch: int
    connected: bool
    disconnected_at: float = 0.0
    clean_stop: bool = False
    subscriptions: list[SubscriptionRecord] = []
    in_flight: dict[str, tuple[str, int, int]] = {}
    """Packet id -> stream, offset, QoS; only of a node that was stopped cleanly."""
    received: list[int] = []


def record_of(session: Session, connected: bool, now: float, clean_stop: bool = False) -> SessionRecord:
    in_flight: dict[str, tuple[str, int, int]] = {}
    if not connected:
        for packet_id, (origin, offset, qos) in session.in_flight():
            if isinstance(origin, StreamOrigin):
                in_flight[str(packet_id)] = (str(origin.stream), offset, qos)
            elif qos == RELEASED:
                in_flight[str(packet_id)] = ("", 0, qos)
    return SessionRecord(
        client_id=session.client_id,
        expiry_seconds=session.expiry_seconds,
        epoch=session.epoch,
        connected=connected,
        disconnected_at=0.0 if connected else now,
        clean_stop=clean_stop,
        subscriptions=[
            SubscriptionRecord(
                filter=s.filter,
                qos=s.qos,
                no_local=s.no_local,
                retain_as_published=s.retain_as_published,
                retain_handling=s.retain_handling,
                identifier=s.identifier,
                since={str(stream): min([at, *s.carried.get(stream, ())]) for stream, at in s.since.items()},
                born=s.born,
            )
            for s in (*session.subscriptions, *session.subscriptions.shared.values())
        ],
        in_flight=in_flight,
        received=[] if connected else session.inbound.ids(),
    )


def _oldest(subscription: Subscription) -> int:
    """The oldest generation there was when it was made."""
    return min((stream.generation for stream in subscription.since), default=0)


def restore(record: SessionRecord, heads: Mapping[Stream, int], load: LoadCursor, unreadable: Unreadable) -> Session:
    """A session from its record and its cursors."""
    session = Session(record.client_id, record.expiry_seconds, record.epoch)
    session.attached = False
    for stored in record.subscriptions:
        subscription = Subscription(
            stored.filter,
            stored.qos,
            stored.no_local,
            stored.retain_as_published,
            stored.retain_handling,
            stored.identifier,
            stored.born,
            {Stream.parse(name): at for name, at in stored.since.items()},
        )
        if is_shared(stored.filter):
            session.subscriptions.shared[stored.filter] = subscription
        else:
            session.subscribe(subscription)
    session.inbound = Inbound(record.received)
    for packet_id, (place, offset, qos) in record.in_flight.items():
        origin = session.positions.origin(Stream.parse(place)) if place else NOBODY
        session.window.restore(int(packet_id), Delivery(origin, offset, qos))
    session.positions.generation = max((s.generation for s in heads), default=0)
    crashed = record.connected and not record.clean_stop
    session.window.begin_elsewhere(record.epoch)
    if not len(session.subscriptions):
        return session
    _note_trimmed(session, heads, load)
    for stream, head in heads.items():
        _restore_stream(session, stream, head, crashed, load, unreadable)
    return session


def _note_trimmed(session: Session, heads: Mapping[Stream, int], load: LoadCursor) -> None:
    """Streams that were dropped while nobody was there to see it, with something of them unread for all we know."""
    for subscription in session.subscriptions:
        for stream in [s for s in subscription.since if s not in heads]:
            cursor = load(stream, subscription.filter)
            if cursor is not None:
                session.positions.behind[stream] = max(cursor.floor, session.positions.behind.get(stream, 0))


def _restore_stream(
    session: Session, stream: Stream, head: int, crashed: bool, load: LoadCursor, unreadable: Unreadable
) -> None:
    """The session reads on where its least advanced subscription is; the others are past that already."""
    starts: dict[str, int] = {}
    cursors: dict[str, Cursor] = {}
    for subscription in session.subscriptions:
        since = subscription.since.get(stream, 0)  # a stream it does not know is younger than itself
        if stream not in subscription.since and stream.generation < _oldest(subscription):
            since = head  # or much older: only the lake has it, and nobody asked for it
        try:
            cursor = load(stream, subscription.filter)
        except RequestError as error:
            cursor = unreadable(session, stream, error, since, head)
        starts[subscription.filter] = since if cursor is None else max(since, min(cursor.floor, head))
        if cursor is not None:
            cursors[subscription.filter] = cursor
    at = min(starts.values())
    for name, start in starts.items():
        if start > at:
            session.subscriptions[name].since[stream] = start
    # Even if it has read everything: by the time the client is welcome, more may have been dispatched.
    session.positions.behind[stream] = at
    if at < head:
        if cursors:
            session.positions.acked[stream] = cursors
        if crashed:
            session.positions.dup_below[stream] = head
