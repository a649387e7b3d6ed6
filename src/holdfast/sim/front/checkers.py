"""The promises of a message's path, checked as the run goes, and what must be true when the weather has cleared.

acknowledged is stored        a PUBACK or PUBREC means that the message is in the log; QoS 2 means once
in order                      each consumer sees the offsets of a stream in order, a publisher's generations too
cursors pass nothing          what is saved or reported as done was acknowledged
acknowledged never again      but for what was not flushed before a crash
only what was asked for       nothing from before a SUBSCRIBE, no retained message that was replaced before it
bounded memory                what waits for one client, and what it has sent us, whatever the traffic
MQTT                          packet ids, receive maximum, QoS, expiry
everything is delivered       once clients read and acknowledge again, and nothing is left waiting
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from math import inf
from typing import TYPE_CHECKING

from holdfast.cursors.cursor import Cursor, Range
from holdfast.delivery.outlet import Outlet
from holdfast.groups.progress import slice_of
from holdfast.groups.protocol.nouns import Piece
from holdfast.model import RETAIN, Stream
from holdfast.mqtt import codec
from holdfast.mqtt import packets as p
from holdfast.mqtt.properties import expiry_of
from holdfast.sessions.changes import Content
from holdfast.sessions.packed import unpack_cursors, unpack_subscriptions
from holdfast.sessions.rows import Rows
from holdfast.sessions.session import Session
from holdfast.sessions.shared import LoanFeed
from holdfast.sessions.subscriptions import Subscription
from holdfast.sessions.table import StoredWill
from holdfast.sim.checkers import Violation
from holdfast.sim.front.disk import Block, Disk, Row
from holdfast.sim.front.lives import Lives
from holdfast.sim.front.world import World

if TYPE_CHECKING:
    from holdfast.sim.front.lending import Group
    from holdfast.sim.front.node import SimFront

Place = tuple[Stream, int]

SHARED_FROM = 1000
"""Subscription identifiers from here on are of shared subscriptions."""

HEADER_BYTES = 80
"""A packet is never longer than its payload and this."""


@dataclass(slots=True)
class Promise:
    """A SUBACK: it holds for every stored copy of the subscription."""

    done_at: int | None = None
    """What is published from here on is the subscription's own."""


@dataclass(slots=True)
class Asked:
    """A subscription, and between which numbers it began."""

    subscription: Subscription
    asked_at: int
    """What was published before is not its own."""
    starts: dict[Stream, int] | None
    """Where it was told to start, by stream."""
    promise: Promise = field(default_factory=Promise)
    again: set[Place] = field(default_factory=set)
    """Acknowledged before it was told to start there, and so to come once more."""
    checked: dict[Stream, int] = field(default_factory=dict)
    """Up to where its cursors have been checked."""

    def copy(self) -> Asked:
        return replace(self, again=set(self.again), checked=dict(self.checked))


@dataclass(slots=True)
class Flight:
    """A packet id that the client has not answered for good."""

    kind: str
    """own, shared, retained or nobody."""
    place: Place | None
    qos: int
    feed: LoanFeed | None = None
    released: bool = False


@dataclass(frozen=True, slots=True)
class Saved:
    """What a row's content stands for."""

    asked: dict[str, Asked]
    done: frozenset[Place]
    ids: dict[int, Flight]


@dataclass(slots=True)
class Consumer:
    """One client's session, as it must be."""

    name: str
    shared_only: bool
    rap: bool
    packet_max: int
    asked: dict[str, Asked] = field(default_factory=dict)
    done: set[Place] = field(default_factory=set)
    """Acknowledged, as far as the node must know."""
    ever_done: set[Place] = field(default_factory=set)
    ids: dict[int, Flight] = field(default_factory=dict)
    last: dict[Stream, int] = field(default_factory=dict)
    newest: dict[str, int] = field(default_factory=dict)
    """By publisher, the generation of what was sent last."""
    replays: bool = False
    """A filter went back in this connection: its past comes between what the others get."""
    owed: dict[tuple[str, str], int] = field(default_factory=dict)
    """By filter and topic: retained messages that are to be sent."""
    owed_at: dict[str, int] = field(default_factory=dict)

    def take(self, place: Place) -> None:
        self.done.add(place)
        self.ever_done.add(place)
        for asked in self.asked.values():
            asked.again.discard(place)

    def forget(self) -> None:
        for part in (self.asked, self.done, self.ever_done, self.ids):
            part.clear()
        self.new_connection()

    def saved(self) -> Saved:
        asked = {text: one.copy() for text, one in self.asked.items()}
        return Saved(asked, frozenset(self.done), {i: replace(flight) for i, flight in self.ids.items()})

    def restore(self, saved: Saved) -> None:
        """Of what is in flight, a row has the session's own, retained messages and, of QoS 2, also what was lent to it.

        Of what is nobody's any more, the client is to answer that it is done with it.
        """
        self.asked = {text: one.copy() for text, one in saved.asked.items()}
        self.done = set(saved.done)
        self.ids = {
            i: replace(flight, released=flight.released or flight.kind == "nobody")
            for i, flight in saved.ids.items()
            if flight.released or flight.kind in ("own", "retained") or flight.qos == 2
        }

    def new_connection(self) -> None:
        for part in (self.last, self.newest, self.owed, self.owed_at):
            part.clear()
        self.replays = False


class Truth:
    """What has happened, independently of what the machines believe."""

    def __init__(self, world: World, disk: Disk):
        self.world, self.disk = world, disk
        self.front: SimFront
        self.consumers: dict[str, Consumer] = {}
        self._numbers = 0
        self.rows: dict[int, Row] = {}
        self.by_payload: dict[bytes, int] = {}
        self.where: dict[int, Place] = {}
        self.copies: dict[bytes, int] = {}
        """How often a publish is in the log, by its name."""
        self.may_repeat: set[bytes] = set()
        self.seen: dict[int, int] = {}
        """In which order the node came to know the rows."""
        self.retain_rows: dict[str, list[int]] = {}
        self._retained_sent: list[tuple[str, int, int]] = []
        self.group_done: dict[object, set[Place]] = {}
        self.loan_last: dict[LoanFeed, int] = {}
        self.loans: dict[LoanFeed, Group] = {}
        self.deliveries = 0
        self.largest_block = 0
        self.lives = Lives(world)
        self._last_words: dict[str, Saved] = {}
        """By client: what was true when its last connection ended, unless that may be lost."""
        self._wills: set[int] = set()
        self._noticed: dict[int, int] = {}
        """Wills: a number from when the node came to know each; nobody can tell that it was there before."""
        self.largest_payload = 0
        """Of what clients have sent."""
        disk.log.on_append = self.appended
        disk.table.truth = self

    def number(self) -> int:
        self._numbers += 1
        return self._numbers

    def fail(self, promise: str, what: str) -> None:
        raise Violation(f"{promise}: {what}")

    # -- publishing ----------------------------------------------------------------------------------------

    def taken(self, publisher: str, topic: str, payload: bytes, flags: int, properties: bytes | None) -> Row:
        row = Row(self.number(), topic, payload, publisher, flags, properties)
        self.rows[row.number] = row
        if payload:
            self.by_payload[payload_name(payload)] = row.number
        return row

    def appended(self, block: Block) -> None:
        size = 0
        for at, row in enumerate(block.rows):
            self.where[row.number] = (block.stream, block.base + at)
            self.rows[row.number] = row
            size += len(row.payload) + 64
            if row.flags & RETAIN:
                self.retain_rows.setdefault(row.topic, []).append(row.number)
            if row.payload:
                name = payload_name(row.payload).rpartition(b".")[0]
                self.copies[name] = count = self.copies.get(name, 0) + 1
                if count > 1 and row.flags & 3 == 2 and name not in self.may_repeat:
                    self.fail("QoS 2 is stored once", f"{name!r} is in the log {count} times")
        self.largest_block = max(self.largest_block, size)

    def acknowledged(self, name: bytes) -> None:
        """A publisher was told that this is stored."""
        if not self.copies.get(name):
            self.fail("acknowledged is stored", f"{name!r} is not in the log")

    def will(self, client: str, will: StoredWill) -> Row:
        """It is published: by nobody's packet, but by a change of its client's row."""
        flags = will.qos | (RETAIN if will.retain else 0)
        row = self.taken(client, will.topic, will.payload, flags, will.properties or None)
        self._wills.add(row.number)
        return row

    def _order(self, row: Row) -> float:
        """Where it stands among what is published and subscribed to."""
        return self._noticed.get(row.number, inf) if row.number in self._wills else row.number

    # -- subscribing ---------------------------------------------------------------------------------------

    def subscribing(
        self, client: str, subscription: Subscription, asked_at: int, starts: dict[Stream, int] | None
    ) -> None:
        consumer = self.consumers[client]
        old = consumer.asked.get(subscription.filter)
        asked = Asked(subscription, asked_at, starts)
        if old is not None and starts is not None:
            asked.asked_at = old.asked_at
        consumer.asked[subscription.filter] = asked
        for stream, at in (starts or {}).items():
            self._goes_back(consumer, stream, at, asked)

    def changes(self, client: str, subscription: Subscription) -> None:
        """Subscribed to again, from where it is."""
        self.consumers[client].asked[subscription.filter].subscription = subscription

    def _goes_back(self, consumer: Consumer, stream: Stream, at: int, asked: Asked) -> None:
        """What this filter matches from here on is delivered again."""
        matcher = asked.subscription.matcher
        rows = self.disk.log.streams.get(stream, ())
        past = {place for place in consumer.ever_done if place[0] == stream and at <= place[1] < len(rows)}
        again = {place for place in past if matcher.matches(rows[place[1]].topic)}
        asked.again |= again
        consumer.done -= again
        consumer.last.pop(stream, None)
        consumer.replays = True

    def subscribed(self, client: str, filter_text: str) -> None:
        asked = self.consumers[client].asked.get(filter_text)
        if asked is not None and asked.promise.done_at is None:
            asked.promise.done_at = self.number()

    def unsubscribed(self, client: str, filter_text: str) -> None:
        consumer = self.consumers[client]
        consumer.asked.pop(filter_text, None)
        # What waits of its retained messages is still sent if another filter matches it.
        consumer.owed = {key: number for key, number in consumer.owed.items() if key[0] != filter_text}

    def owes_retained(self, outlet: Outlet, filter_text: str, asked_at: int) -> None:
        consumer = self.consumers[outlet.session.client_id]
        waits = filter_text in outlet.retained or any(w.rows.stream is None for w in outlet.session.outgoing._queue)
        if not waits or filter_text not in consumer.owed_at:  # else something of an earlier SUBSCRIBE may still come
            consumer.owed_at[filter_text] = asked_at
        retained = self.front.delivery.machine.retained
        for topic in retained._topics.matching_topics(filter_text):
            message = retained._last[topic]
            number = self.by_payload[payload_name(message.payload)]
            if not self._excused(consumer, self.rows[number]):
                consumer.owed[filter_text, topic] = number

    # -- sessions ------------------------------------------------------------------------------------------

    def welcomed(self, session: Session, present: bool, saved: Saved | None) -> None:
        """A client has its session; `saved`: what its row stands for."""
        consumer = self.consumers[session.client_id]
        consumer.new_connection()
        last = self._last_words.pop(session.client_id, None)
        if last is not None and present:
            kept = saved.done if saved is not None else frozenset()
            if lost := last.done - kept:
                self.fail("acknowledged never again", f"{sorted(lost)[0]} of {consumer.name} is not stored")
        if saved is None or not present:
            consumer.forget()
        else:
            consumer.restore(saved)
        wanted = {text for text in consumer.asked if not text.startswith("$")}
        if set(session.subscriptions.filters) != wanted:
            what = f"{consumer.name} has {session.subscriptions.filters}, stored was {wanted}"
            self.fail("a session is what was stored of it", what)
        if (flying := {packet_id for packet_id, _ in session.window}) != consumer.ids.keys():
            what = f"{consumer.name} has {flying} in flight, stored was {[*consumer.ids]}"
            self.fail("a session is what was stored of it", what)

    def detached(self, client: str) -> None:
        self.consumers[client].new_connection()

    def dropped(self, client: str, packet_id: int) -> None:
        self.consumers[client].ids.pop(packet_id, None)

    def released(self, client: str, packet_id: int) -> None:
        """It is not this client's any more, or gone; its answer is still waited for."""
        flight = self.consumers[client].ids[packet_id]
        flight.kind, flight.feed, flight.released = "nobody", None, True

    def process_ended(self) -> None:
        """Whatever was in memory is gone."""
        for consumer in self.consumers.values():
            consumer.new_connection()
        self.loans.clear()

    def started(self) -> None:
        """A node has read what there is."""
        for number in self.where:
            self._see(number)

    def _see(self, number: int) -> None:
        self.seen.setdefault(number, len(self.seen))
        if number in self._wills and number not in self._noticed:
            self._noticed[number] = self.number()

    def saving(self, client: str, leaving: bool) -> Saved:
        """What is true of it when its row's content is made."""
        saved = self.consumers[client].saved()
        if leaving:
            self._last_words[client] = saved
        return saved

    def words_lost(self, client: str | None = None) -> None:
        """A process died before everything was saved, or a row was taken from it."""
        if client is None:
            self._last_words.clear()
        else:
            self._last_words.pop(client, None)

    def check_content(self, session: Session, content: Content) -> None:
        """What is about to be stored passes nothing that was not acknowledged."""
        cursors = unpack_cursors(content.cursors, session.client_id)
        for entry in unpack_subscriptions(content.subscriptions, session.client_id).entries:
            for stream in self.disk.log.streams:
                self.check_cursor(session.client_id, entry.filter, stream, cursors.cursor(entry.number, stream))

    def check_cursor(self, client: str, filter_text: str, stream: Stream, cursor: Cursor) -> None:
        consumer = self.consumers[client]
        asked, rows = consumer.asked.get(filter_text), self.disk.log.streams.get(stream)
        if asked is None or rows is None:
            return
        first = asked.checked.get(stream, 0)
        for offset in range(first, min(cursor.top + 1, len(rows))):
            place = (stream, offset)
            if (
                cursor.is_acked(offset)
                and self._is_due(asked, rows[offset], place)
                and place not in consumer.ever_done
                and not self._excused(consumer, rows[offset], asked.subscription)
            ):
                self.fail("cursors pass nothing", f"{client} {filter_text} {cursor} passes {stream} {offset}")
        asked.checked[stream] = max(first, cursor.floor)

    def _is_due(self, asked: Asked, row: Row, place: Place) -> bool:
        """Is this message certainly the subscription's?"""
        if asked.promise.done_at is None or not asked.subscription.matcher.matches(row.topic):
            return False
        if asked.starts is not None and place[1] >= asked.starts.get(place[0], 0):
            return True
        return self._order(row) > asked.promise.done_at

    def _may_be(self, asked: Asked, row: Row, place: Place) -> bool:
        """Could it be?"""
        if not asked.subscription.matcher.matches(row.topic):
            return False
        if asked.starts is not None and place[1] >= asked.starts.get(place[0], 0):
            return True
        return self._order(row) > asked.asked_at

    def _excused(self, consumer: Consumer, row: Row, subscription: Subscription | None = None) -> bool:
        """It need not be delivered."""
        if not row.payload or (row.properties and expiry_of(row.properties) is not None):
            return True
        if len(row.payload) + HEADER_BYTES > consumer.packet_max:
            return True
        meant = [subscription] if subscription is not None else [a.subscription for a in consumer.asked.values()]
        return row.publisher == consumer.name and any(each.no_local for each in meant)

    # -- what is sent --------------------------------------------------------------------------------------

    def delivered(self, block: Rows) -> None:
        """The node has come so far in a stream."""
        assert block.stream is not None
        rows = self.disk.log.streams.get(block.stream)
        if rows is not None:
            for offset in block.offsets:
                self._see(rows[offset].number)

    def wrote(self, outlet: Outlet, data: bytes, *, again: bool = False) -> None:
        """Bytes of deliveries to this client, as they leave."""
        consumer, at = self.consumers[outlet.session.client_id], 0
        while at < len(data):
            framed = codec.frame(data, at)
            if framed is None:
                self.fail("MQTT", f"{consumer.name} is sent half a packet")
                return
            first, start, at = framed
            packet = codec.decode_for_client(first, data[start:at], outlet.version)
            if isinstance(packet, p.Publish):
                self._sent(consumer, outlet, packet, again)

    def _sent(self, consumer: Consumer, outlet: Outlet, packet: p.Publish, again: bool) -> None:
        name, world = consumer.name, self.world
        if not packet.payload:
            # It clears a retained message, and has no name: who gets it is not checked.
            if packet.qos:
                consumer.ids[packet.packet_id] = Flight(self._kind(consumer, packet), None, packet.qos)
            return
        number = self.by_payload.get(payload_name(packet.payload))
        row = self.rows.get(number) if number is not None else None
        if number is None or row is None or row.topic != packet.topic or row.payload != packet.payload:
            self.fail("only what was published", f"{name} is sent {packet.topic} {packet.payload[:40]!r}")
            return
        place = self.where.get(number)
        if place is None:
            self.fail("only what is stored", f"{name} is sent {packet.payload[:40]!r}")
            return
        kind = self._kind(consumer, packet)
        self.deliveries += 1
        world.tell(name, f"<- {kind}{' again' if again else ''} {place[0]} {place[1]} {packet.topic} QoS {packet.qos}")
        flight = consumer.ids.get(packet.packet_id) if packet.qos else None
        if again:
            if flight is None or flight.place != place or not packet.dup:
                self.fail("MQTT", f"{name} is sent packet {packet.packet_id} again, which is not under way")
            if kind == "own" and place in consumer.done:
                self.fail("acknowledged never again", f"{name} is sent {place} again under its packet id")
            return
        if flight is not None:
            self.fail("MQTT", f"packet id {packet.packet_id} is given to {name} while it is under way")
        if packet.qos > row.flags & 3:
            self.fail("MQTT", f"{name} is sent {place} with QoS {packet.qos}, published with {row.flags & 3}")
        if (
            row.properties
            and (life := expiry_of(row.properties)) is not None
            and world.now > row.micros / 1e6 + life + 1
        ):
            self.fail("MQTT", f"{name} is sent {place}, which has expired")
        feed = None
        if kind == "retained":
            self._sent_retained(consumer, row)
        elif kind == "shared":
            feed = self._sent_shared(consumer, outlet, row, place, packet.qos)
        else:
            self._sent_own(consumer, row, place, packet.qos)
        if packet.qos:
            consumer.ids[packet.packet_id] = Flight(kind, place, packet.qos, feed)
            if len(consumer.ids) > outlet.window_max:
                self.fail("MQTT", f"{name} takes {outlet.window_max} at a time, and is sent {len(consumer.ids)}")

    def _kind(self, consumer: Consumer, packet: p.Publish) -> str:
        if packet.retain and not consumer.rap:
            return "retained"
        shared = consumer.shared_only or any(i >= SHARED_FROM for i in packet.subscription_identifiers)
        return "shared" if shared else "own"

    def _sent_own(self, consumer: Consumer, row: Row, place: Place, qos: int) -> None:
        name, (stream, offset) = consumer.name, place
        if offset <= consumer.last.get(stream, -1):
            self.fail("in order", f"{name} is sent {stream} {offset} after {consumer.last[stream]}")
        consumer.last[stream] = offset
        if not consumer.replays and stream.generation < consumer.newest.get(row.publisher, 0):
            self.fail("in order", f"{name} is sent {place} of {row.publisher} after a later generation")
        consumer.newest[row.publisher] = stream.generation
        if place in consumer.done:
            self.fail("acknowledged never again", f"{name} is sent {place} again")
        meant = [asked for asked in consumer.asked.values() if self._may_be(asked, row, place)]
        if not meant:
            self.fail(
                "only what was asked for", f"{name} is sent {place} {row.topic}, subscribed to {[*consumer.asked]}"
            )
        if qos > max((asked.subscription.qos for asked in meant), default=2):
            self.fail("MQTT", f"{name} is sent {place} with QoS {qos}")
        if not qos:
            consumer.take(place)

    def _sent_retained(self, consumer: Consumer, row: Row) -> None:
        filters = [text for text in consumer.owed_at if Subscription(text, 0).matcher.matches(row.topic)]
        if not filters:
            self.fail("only what was asked for", f"{consumer.name} is sent a retained message of {row.topic}")
        self._retained_sent.append((consumer.name, row.number, min(consumer.owed_at[text] for text in filters)))
        for text in filters:
            consumer.owed.pop((text, row.topic), None)

    def _sent_shared(self, consumer: Consumer, outlet: Outlet, row: Row, place: Place, qos: int) -> LoanFeed | None:
        feeds = [
            feed
            for feed in outlet.loans
            if feed.stream == place[0]
            and slice_of(row.publisher, feed.loan.piece.of) == feed.loan.piece.part
            and feed.wanted.matches(row.topic)
        ]
        if len(feeds) != 1:
            self.fail("one reader per loan", f"{consumer.name} is sent {place} under {len(feeds)} loans")
        feed = feeds[0]
        group = self.loans[feed]
        if feed.stopped:
            self.fail("one reader per loan", f"{consumer.name} is sent {place} of a loan that is over")
        if place[1] <= self.loan_last.get(feed, -1):
            self.fail("in order", f"{consumer.name} is sent {place} after {self.loan_last[feed]} of {feed.loan}")
        self.loan_last[feed] = place[1]
        if group.cursor(feed.loan.piece).is_acked(place[1]):
            self.fail("acknowledged never again", f"{consumer.name} is sent {place}, which {group.id} is done with")
        if not qos:
            self.group_done.setdefault(group.id, set()).add(place)
        return feed

    # -- what is acknowledged ------------------------------------------------------------------------------

    def puback(self, client: str, packet_id: int) -> None:
        consumer = self.consumers[client]
        flight = consumer.ids.get(packet_id)
        if flight is not None and flight.qos == 1:
            del consumer.ids[packet_id]
            self._done(consumer, flight)

    def pubrec(self, client: str, packet_id: int, reason: int) -> None:
        consumer = self.consumers[client]
        flight = consumer.ids.get(packet_id)
        if flight is None or flight.qos != 2 or flight.released:
            return
        self._done(consumer, flight)
        flight.released = True
        if reason >= 0x80:
            del consumer.ids[packet_id]

    def pubcomp(self, client: str, packet_id: int) -> None:
        consumer = self.consumers[client]
        flight = consumer.ids.get(packet_id)
        if flight is not None and flight.released:
            del consumer.ids[packet_id]

    def _done(self, consumer: Consumer, flight: Flight) -> None:
        if flight.place is None:
            return
        if flight.kind == "own":
            consumer.take(flight.place)
        elif flight.kind == "shared" and flight.feed in self.loans:
            self.group_done.setdefault(self.loans[flight.feed].id, set()).add(flight.place)

    # -- loans ---------------------------------------------------------------------------------------------

    def lent(self, outlet: Outlet, feed: LoanFeed, group: Group) -> None:
        self.loans[feed] = group

    def disowned(self, client: str, feed: LoanFeed) -> None:
        for flight in self.consumers[client].ids.values():
            if flight.feed is feed and not flight.released:
                flight.kind = "nobody"

    def parked(self, group: Group, feed: LoanFeed, offsets: list[int]) -> None:
        self.group_done.setdefault(group.id, set()).update((feed.stream, offset) for offset in offsets)

    def group_progress(self, group: Group, piece: Piece, news: tuple[Range, ...]) -> None:
        rows = self.disk.log.streams.get(piece.stream)
        if rows is None:
            return
        done, cursor = self.group_done.get(group.id, set()), group.cursor(piece)
        for first, last in news:
            if last >= len(rows):
                self.fail("cursors pass nothing", f"{group.id} passes the end of {piece}: {last}")
            for offset in range(max(first, cursor.floor), last + 1):
                if (piece.stream, offset) not in done and self.is_groups(group, piece, rows[offset]):
                    self.fail("cursors pass nothing", f"{group.id} passes {piece} {offset}")

    def is_groups(self, group: Group, piece: Piece, row: Row) -> bool:
        expires = row.properties is not None and expiry_of(row.properties) is not None
        return (
            bool(row.payload)
            and not expires
            and group.wanted.matches(row.topic)
            and slice_of(row.publisher, piece.of) == piece.part
        )

    # -- memory --------------------------------------------------------------------------------------------

    def check_turn(self, outlet: Outlet, written: int, bytes_max: int) -> None:
        """The socket says that it is full when a turn is over: until then no more is written than fits into one."""
        if written >= bytes_max:
            self.fail("bounded memory", f"{outlet} is written more than {written} bytes in one turn")

    def check_memory(self) -> None:
        """What one client costs, whatever the traffic: a few times what may wait for it, and a block or two."""
        front = self.front
        bound = 4 * front.settings.pending_bytes_max + 2 * self.largest_block + 2 * front.settings.socket_bytes_max
        inward = front.connection_settings.held_bytes + self.largest_payload + HEADER_BYTES
        for connection in front.sockets:
            name = connection.client_id
            if connection.machine.waiting > inward + connection.socket.piece:
                self.fail("bounded memory", f"{connection.machine.waiting} bytes of {name} are not parsed")
            if connection.machine.reading != connection.socket.node_reads and not connection.socket.closing:
                self.fail("bounded memory", f"{name} is read from: {connection.socket.node_reads}, against its machine")
            outlet = connection.outlet
            waiting = 0 if outlet is None else held_bytes(outlet) + front.delivery.fetching.get(outlet, 0)
            if waiting + len(connection.socket.buffer) > bound:
                what = f"{waiting} bytes and {len(connection.socket.buffer)} in the socket, at most {bound}"
                self.fail("bounded memory", f"for {name} wait {what}")

    # -- in the end ----------------------------------------------------------------------------------------

    def check_retained(self) -> None:
        for client, number, asked_at in self._retained_sent:
            row = self.rows[number]
            for other in self.retain_rows.get(row.topic, ()):
                later = self.seen.get(other, -1) > self.seen.get(number, -1)
                # Streams have no order among each other: the store's may differ from that in which a node reads them.
                if self._order(self.rows[other]) < asked_at and later and self.rows[other].micros > row.micros:
                    self.fail("only what was asked for", f"{client} is sent an old retained message of {row.topic}")

    def missing(self) -> list[str]:
        """What has still to be delivered."""
        found = []
        for consumer in self.consumers.values():
            connection = self.front.sessions.connections.get(consumer.name)
            if connection is None:
                continue
            for asked in consumer.asked.values():
                for stream, rows in self.disk.log.streams.items():
                    for offset, row in enumerate(rows):
                        place = (stream, offset)
                        if (
                            (place not in consumer.ever_done or place in asked.again)
                            and self._is_due(asked, row, place)
                            and not self._excused(consumer, row, asked.subscription)
                        ):
                            found.append(f"{consumer.name} lacks {stream} {offset} for {asked.subscription.filter}")
                            break
            for (text, topic), number in consumer.owed.items():
                newer = [o for o in self.retain_rows.get(topic, ()) if self.seen.get(o, -1) > self.seen.get(number, -1)]
                if not newer:
                    found.append(f"{consumer.name} lacks the retained message of {topic} for {text}")
        return found


def held_bytes(outlet: Outlet) -> int:
    """What the queue of this client keeps in memory, block by block."""
    blocks = {id(waiting.rows): waiting.rows for waiting in outlet.session.outgoing._queue}
    return sum(len(payload) + 64 for rows in blocks.values() for payload in rows.payloads)


def payload_name(payload: bytes) -> bytes:
    """Payloads begin with a name of their own: `CLIENT-NUMBER.ATTEMPT|`."""
    return payload.partition(b"|")[0]
