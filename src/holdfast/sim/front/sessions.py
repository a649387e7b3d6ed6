"""The simulated node's sessions, as in `runtime.sessions`: who is connected, who is away, what is stored of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from holdfast.delivery.outlet import NO_LIMIT, Outlet
from holdfast.mqtt import codec
from holdfast.mqtt import packets as p
from holdfast.mqtt.connection import Say, Welcome
from holdfast.mqtt.reasons import Reason
from holdfast.sessions.outgoing import RetainedOrigin
from holdfast.sessions.positions import StreamOrigin
from holdfast.sessions.records import SessionRecord, record_of
from holdfast.sessions.rows import Rows
from holdfast.sessions.session import NEVER, Session
from holdfast.sessions.window import RELEASED, Delivery
from holdfast.sim.front.disk import StoreDown, rows_at
from holdfast.sim.front.world import Pending, Work

if TYPE_CHECKING:
    from holdfast.sim.front.connection import SimConnection
    from holdfast.sim.front.node import SimFront


class SimSessions:
    def __init__(self, front: SimFront):
        self.front, self.world = front, front.world
        self.known: dict[str, Session] = {}
        self.connections: dict[str, SimConnection] = {}
        self.stored: dict[str, SessionRecord] = {}
        self.closing = False
        self._locks: dict[str, list[Pending]] = {}

    def load(self) -> None:
        for record in self.front.keeper.load_all():
            self.stored[record.client_id] = record
            for subscription in record.subscriptions:
                self.front.delivery.machine.away.add(subscription.filter, record.client_id)

    # -- a client comes ------------------------------------------------------------------------------------

    def join(self, connection: SimConnection, packet: p.Connect) -> Work:
        """One CONNECT of a client after the other."""
        waiting = self._locks.get(packet.client_id)
        if waiting is None:
            self._locks[packet.client_id] = []
        else:
            turn = self.world.pending()
            waiting.append(turn)
            yield turn
        try:
            if not connection.closed and not connection.socket.closing:
                yield from self._join(connection, packet)
        finally:
            waiting = self._locks[packet.client_id]
            if waiting:
                waiting.pop(0).settle()
            else:
                del self._locks[packet.client_id]

    def _join(self, connection: SimConnection, packet: p.Connect) -> Work:
        delivery, client_id, truth = self.front.delivery, packet.client_id, self.front.truth
        session, present = yield from self._session_for(packet)
        was_durable = session.durable
        session.epoch += 1
        session.expiry_seconds = effective_expiry(packet)
        if session.durable:
            yield self.front.keeper.save(record_of(session, connected=True, now=self.world.now))
        elif was_durable and present:
            yield from self._forget_stored(session)
        again = yield from self._under_way(session)
        if connection.closed or connection.socket.closing:
            session.detach(delivery.machine.heads)
            return
        session.attach(delivery.machine.heads, self.world.now)
        self.connections[client_id] = connection
        truth.attached(client_id, present)
        self._welcome(connection, packet, session, present)
        outlet = connection.outlet
        if not connection.machine.open or outlet is None:
            return
        data = again(connection.version, outlet.packet_max)
        truth.wrote(outlet, data, again=True)
        connection.handle(Say(data))
        delivery.attach(outlet, connection)
        for filter_text, subscription in session.subscriptions.shared.items():
            self.front.lending.join(connection, session, filter_text, subscription)

    def _welcome(self, connection: SimConnection, packet: p.Connect, session: Session, present: bool) -> None:
        properties = packet.properties
        answer: p.Properties = {}
        if packet.version == p.V5:
            answer["receive_maximum"] = self.front.connection_settings.receive_maximum
        packet_max = properties.get("maximum_packet_size", NO_LIMIT)
        window = min(properties.get("receive_maximum", 65_535), self.front.inflight_max)
        connection.welcome(
            Welcome(
                version=packet.version,
                connack=codec.encode_connack(p.Connack(0, present, answer), packet.version),
                inbound=session.inbound,
                keep_alive_seconds=float(packet.keep_alive),
                packet_max=packet_max,
                session_expiry=session.expiry_seconds,
            ),
            session,
            Outlet(session, packet.version, window, packet_max),
        )

    def _session_for(self, packet: p.Connect) -> Work:
        client_id = packet.client_id
        old = self.connections.get(client_id)
        if old is not None:
            ended = old.session
            old.close(Reason.SESSION_TAKEN_OVER)
            if ended is not None and not ended.durable:
                yield from self._discard(client_id, only=ended)
        if packet.clean_start:
            yield from self._discard(client_id)
        session = self.known.get(client_id)
        if session is None and client_id in self.stored:
            record = self.stored[client_id]
            heads = dict(self.front.delivery.machine.heads.every())
            session = yield self.front.keeper.call(lambda: self.front.keeper.restore(record, heads))
            self.stored.pop(client_id, None)
            self.known[client_id] = session
            self.front.truth.restored(session)
        if session is not None:
            return session, True
        session = self.known[client_id] = Session(client_id, 0, epoch=0)
        return session, False

    def _under_way(self, session: Session) -> Work:
        """What was sent and not acknowledged, as packets, in the order it was sent."""
        found: list[tuple[int, Delivery, Rows | None, int]] = []
        log = self.front.disk.log
        for packet_id, delivery in session.in_flight():
            rows, at = None, 0
            if isinstance(delivery.origin, RetainedOrigin):
                rows, at = delivery.origin.rows, delivery.offset
            elif isinstance(delivery.origin, StreamOrigin):
                yield self.world.rng.random() * 0.002
                stream = delivery.origin.stream
                if stream in log.streams:
                    rows = rows_at(stream, [delivery.offset], log.streams[stream])
                else:
                    session.window.drop(packet_id)
                    self.front.truth.dropped(session.client_id, packet_id)
                    continue
            if rows is not None or delivery.qos == RELEASED:
                found.append((packet_id, delivery, rows, at))

        def packets(version: int, packet_max: int) -> bytes:
            now = self.world.now
            out = [session.outgoing.again(i, delivery, rows, at, version, now) for i, delivery, rows, at in found]
            return b"".join(packet for packet in out if len(packet) <= packet_max)

        result: Callable[[int, int], bytes] = packets
        return result

    # -- a client goes -------------------------------------------------------------------------------------

    def leave(self, connection: SimConnection, expiry: int | None) -> None:
        session, outlet = connection.session, connection.outlet
        if session is None:
            return
        if expiry is not None:
            session.expiry_seconds = expiry
        self.front.lending.leave(connection)
        connection.session = connection.outlet = None
        client_id = session.client_id
        if self.connections.get(client_id) is connection:
            del self.connections[client_id]
        delivery = self.front.delivery
        if outlet is not None:
            delivery.detach(outlet, away=session.durable)
        session.detach(delivery.machine.heads)
        self.front.truth.detached(client_id)
        if self.closing:
            return
        if not session.durable:
            self.front.spawn(self._discard(client_id, only=session))
            return
        self.front.spawn(self._save_away(session, session.epoch))

    def _save_away(self, session: Session, epoch: int) -> Work:
        if self.known.get(session.client_id) is not session:
            return
        heads = self.front.delivery.heads
        yield from self.front.keeper.flush([session], heads)
        if session.epoch == epoch and self.known.get(session.client_id) is session:
            try:
                yield self.front.keeper.save(record_of(session, connected=False, now=self.world.now))
            except StoreDown:
                self.world.tell(session.client_id, "could not be saved")

    def _discard(self, client_id: str, only: Session | None = None) -> Work:
        session = self.known.get(client_id)
        if only is not None and session is not only:
            return
        record = self.stored.pop(client_id, None)
        if session is not None:
            del self.known[client_id]
        filters = [s.filter for s in record.subscriptions] if record else []
        filters += session.subscriptions.filters if session else []
        for filter_text in filters:
            self.front.delivery.machine.away.remove(filter_text, client_id)
        self.front.truth.discarded(client_id)
        if record is not None or (session is not None and (session.durable or session.epoch > 1)):
            try:
                yield from self.front.keeper.delete_cursors(client_id, filters, self.front.delivery.heads)
                yield self.front.keeper.remove(client_id)
            except StoreDown:
                if only is None:
                    raise
                return
        self.front.truth.discarded_for_good(client_id)

    def _forget_stored(self, session: Session) -> Work:
        keeper = self.front.keeper
        yield from keeper.delete_cursors(session.client_id, session.subscriptions.filters, self.front.delivery.heads)
        yield keeper.remove(session.client_id)

    # -- saving --------------------------------------------------------------------------------------------

    def flush_for_ever(self, seconds: float) -> Work:
        while True:
            yield seconds
            dirty = [s for s in self.known.values() if s.positions.dirty]
            if dirty:
                yield from self.front.keeper.flush(dirty, self.front.delivery.heads)

    def save_all(self) -> Work:
        """At a clean stop: cursors, and what is in flight."""
        heads = self.front.delivery.heads
        sessions = [s for s in self.known.values() if s.durable]
        for session in sessions:
            session.save_all(self.front.delivery.machine.heads)
        yield from self.front.keeper.flush(sessions, heads)
        for session in sessions:
            yield self.front.keeper.save(record_of(session, connected=False, now=self.world.now, clean_stop=True))


def effective_expiry(packet: p.Connect) -> int:
    if packet.version == p.V5:
        return packet.properties.get("session_expiry", 0)
    return 0 if packet.clean_start else NEVER
