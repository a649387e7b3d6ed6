"""What is stored of a session, and a session made from it again: its record, and its cursors one by one.

After a crash the record says that the client is connected; only a node that saw it go has stored what was in flight.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import msgspec

from holdfast.cursors.cursor import Cursor
from holdfast.cursors.cursor_map import NOTHING_DONE, past_of, union
from holdfast.errors import RequestError
from holdfast.groups.shares import is_shared
from holdfast.model import Stream
from holdfast.mqtt.inbound import Inbound
from holdfast.sessions.packed import pack_cursors, unpack_cursors
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
    number: int = 0
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
    cursors: bytes = b""
    """As they were when the record was written: the stored cursors know the rest."""
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
                number=s.number,
                born=s.born,
            )
            for s in (*session.subscriptions, *session.subscriptions.shared.values())
        ],
        cursors=pack_cursors(session.stored_cursors()),
        in_flight=in_flight,
        received=[] if connected else session.inbound.ids(),
    )


def restore(record: SessionRecord, heads: Mapping[Stream, int], load: LoadCursor, unreadable: Unreadable) -> Session:
    """A session from its record and its cursors."""
    session = Session(record.client_id, record.expiry_seconds, record.epoch)
    session.attached = False
    cursors = unpack_cursors(record.cursors, record.client_id)
    session.positions.done, session.positions.gaps = cursors.session, cursors.gaps
    for stored in record.subscriptions:
        subscription = Subscription(
            stored.filter,
            stored.qos,
            stored.no_local,
            stored.retain_as_published,
            stored.retain_handling,
            stored.identifier,
            stored.born,
            cursors.own.get(stored.number, NOTHING_DONE),
            stored.number,
        )
        if is_shared(stored.filter):
            session.subscriptions.shared[stored.filter] = subscription
        else:
            session.subscribe(subscription)
    session.inbound = Inbound(record.received)
    for packet_id, (place, offset, qos) in record.in_flight.items():
        origin = session.positions.origin(Stream.parse(place)) if place else NOBODY
        session.window.restore(int(packet_id), Delivery(origin, offset, qos))
    session.window.begin_elsewhere(record.epoch)
    for stream, head in heads.items() if len(session.subscriptions) else ():
        _restore_stream(session, stream, head, load, unreadable)
    if record.connected and not record.clean_stop:
        session.positions.dup_below = heads
    return session


def _restore_stream(session: Session, stream: Stream, head: int, load: LoadCursor, unreadable: Unreadable) -> None:
    """The session reads on where its least advanced subscription is; the others are past that already."""
    cursors = session.stored_cursors()
    starts: list[int] = []
    for subscription in session.subscriptions:
        had = cursors.get(subscription.number, stream)
        try:
            cursor = load(stream, subscription.filter)
        except RequestError as error:
            cursor = unreadable(session, stream, error, past_of(had), head)
        if cursor is not None:
            had = union(had, cursor)
            subscription.done = subscription.done.copy()
            subscription.done.set(stream, had)
        starts.append(past_of(had))
    session.positions.done.add(stream, min(starts))
