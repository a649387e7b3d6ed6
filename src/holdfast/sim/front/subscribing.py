"""SUBSCRIBE and UNSUBSCRIBE at the simulated node, as in `runtime.subscribing`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from holdfast.delivery.delivery import RetainedOwed, Subscribed, Unsubscribed
from holdfast.groups.shares import is_shared
from holdfast.model import At, Beginning, Next, Start, parse_start
from holdfast.mqtt import codec
from holdfast.mqtt import packets as p
from holdfast.sessions.session import Session
from holdfast.sessions.subscriptions import Subscription
from holdfast.sim.front.world import Work

if TYPE_CHECKING:
    from holdfast.sim.front.connection import SimConnection
    from holdfast.sim.front.node import SimFront

START_PROPERTY = "holdfast-start"


class SimSubscribing:
    def __init__(self, front: SimFront):
        self.front, self.world = front, front.world

    def subscribe(self, connection: SimConnection, packet: p.Subscribe) -> Work:
        session, truth = connection.session, self.front.truth
        if session is None:
            return b"", _nothing
        asked_at = truth.number()
        start = _start_of(packet)
        yield from self._published_before()
        changed, retained = False, []
        for request in packet.filters:
            if connection.session is not session:
                return b"", _nothing
            changed = True
            if is_shared(request.filter):
                yield from self._add_share(connection, session, packet, request)
            elif (yield from self._add_subscription(connection, session, packet, request, start, asked_at)):
                retained.append(request.filter)
        if connection.session is not session:
            return b"", _nothing
        if changed and session.durable:
            yield self.front.sessions.save(session)
            if connection.session is not session:
                return b"", _nothing
        for request in packet.filters:
            truth.subscribed(session.client_id, request.filter)
        reasons = tuple(request.qos for request in packet.filters)
        answer = codec.encode_suback(p.Suback(packet.packet_id, reasons), connection.version)
        return answer, lambda: self._send_retained(connection, retained, asked_at)

    def _published_before(self) -> Work:
        yield self.front.ingest.drained()
        delivery = self.front.delivery
        if self.front.disk.shared or delivery.in_doubt or delivery.machine.waits_for_others:
            yield from delivery.caught_up()

    def _send_retained(self, connection: SimConnection, filters: list[str], asked_at: int) -> None:
        for text in filters:
            if connection.outlet is not None:
                selection = self.front.delivery.machine.retained.select(text)
                self.front.truth.owes_retained(connection.outlet, text, asked_at)
                self.front.delivery.handle(RetainedOwed(connection.outlet, text, selection))

    def _add_share(
        self, connection: SimConnection, session: Session, packet: p.Subscribe, request: p.FilterRequest
    ) -> Work:
        yield self.world.rng.random() * self.front.disk.seconds
        subscription = Subscription(request.filter, request.qos, identifier=packet.subscription_identifier, born="born")
        if connection.session is session:
            session.subscriptions.share(subscription)
            self.front.lending.join(connection, session, request.filter, subscription)

    def _add_subscription(
        self,
        connection: SimConnection,
        session: Session,
        packet: p.Subscribe,
        request: p.FilterRequest,
        start: Start | None,
        asked_at: int,
    ) -> Work:
        subscription = Subscription(
            request.filter,
            request.qos,
            request.no_local,
            request.retain_as_published,
            request.retain_handling,
            packet.subscription_identifier,
        )
        truth, client_id = self.front.truth, session.client_id
        known, heads = request.filter in session.subscriptions, self.front.delivery.machine.heads
        begin = None
        if not known or start is not None:
            asked = start or Next()
            if isinstance(asked, Next):
                begin = heads.end()
                truth.subscribing(client_id, subscription, asked_at, None)
            else:
                yield self.world.rng.random() * self.front.disk.seconds
                if connection.session is not session:
                    return False
                starts = {stream: _start_in(head, asked) for stream, head in heads.items()}
                begin = heads.starting_at(starts)
                truth.subscribing(client_id, subscription, asked_at, starts)
        else:
            truth.changes(client_id, subscription)
        new = session.subscribe(subscription, begin, heads)
        if connection.session is session and connection.outlet is not None:
            self.front.delivery.handle(Subscribed(connection.outlet, request.filter))
        return request.retain_handling == 0 or (request.retain_handling == 1 and new)

    def unsubscribe(self, connection: SimConnection, packet: p.Unsubscribe) -> Work:
        session = connection.session
        if session is None:
            return b"", _nothing
        reasons, gone = [], []
        for filter_text in packet.filters:
            found: Subscription | None
            if is_shared(filter_text):
                found = session.subscriptions.unshare(filter_text)
                if found is not None:
                    self.front.lending.unsubscribe(connection, filter_text)
            else:
                found = session.unsubscribe(filter_text)
                self.front.truth.unsubscribed(session.client_id, filter_text)
                if found is not None and connection.outlet is not None:
                    self.front.delivery.handle(Unsubscribed(connection.outlet, filter_text))
            if found is not None:
                gone.append(filter_text)
            reasons.append(0x00 if found is not None else 0x11)
        if gone and session.durable:
            yield self.front.sessions.save(session)
        return codec.encode_unsuback(p.Unsuback(packet.packet_id, tuple(reasons)), connection.version), _nothing


def _start_in(head: int, start: Start) -> int:
    if isinstance(start, At) and start.every is not None:
        return min(start.every, head)
    return 0 if isinstance(start, Beginning) else head


def _start_of(packet: p.Subscribe) -> Start | None:
    for name, value in packet.properties.get("user_properties", []):
        if name == START_PROPERTY:
            return parse_start(value)
    return None


def _nothing() -> None: ...
