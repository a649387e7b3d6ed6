"""One simulated socket at the node, as in `runtime.connection`: the machine decides, this performs."""

from __future__ import annotations

from collections.abc import Callable
from math import inf
from typing import TYPE_CHECKING

from holdfast.delivery.delivery import Blocked, Room
from holdfast.delivery.outlet import Outlet
from holdfast.errors import PeerError
from holdfast.log.contract import ReceivedId
from holdfast.machine import TICK
from holdfast.mqtt import connection as mc
from holdfast.mqtt import packets as p
from holdfast.mqtt.fastpath import PACKET_IDS, Inbox
from holdfast.mqtt.reasons import Reason
from holdfast.sessions.receiving import Receiving
from holdfast.sessions.session import Session
from holdfast.sessions.window import Pubrec
from holdfast.sim.front.disk import Row
from holdfast.sim.front.sockets import Socket
from holdfast.sim.front.world import Work

if TYPE_CHECKING:
    from holdfast.sim.front.node import SimFront

Answer = tuple[bytes, Callable[[], None]]


class SimConnection:
    def __init__(self, front: SimFront, socket: Socket):
        self.front, self.socket, self.world = front, socket, front.world
        socket.server = self
        self.machine = mc.Connection(front.connection_settings, front.names, self.world.now)
        self.session: Session | None = None
        self.outlet: Outlet | None = None
        self.claim = ""
        """The token of its CONNECT."""
        self._full = self._frozen = False
        self._armed = inf
        self._arm()

    @property
    def version(self) -> int:
        return self.machine.version

    @property
    def closed(self) -> bool:
        return self.machine.closed

    @property
    def client_id(self) -> str:
        return self.session.client_id if self.session is not None else ""

    # -- what the socket calls -----------------------------------------------------------------------------

    def data_received(self, data: bytes) -> None:
        self.handle(mc.Received(data))

    def eof_received(self) -> bool:
        self.handle(mc.Ended())
        return self.machine.keeps_open

    def socket_full(self, full: bool) -> None:
        self._full = full
        self.handle(mc.SocketFull(full))
        self._block()

    def freeze(self, frozen: bool) -> None:
        self._frozen = frozen
        self.handle(mc.HoldOn(mc.Hold.FROZEN) if frozen else mc.Release(mc.Hold.FROZEN))
        self._block()

    def _block(self) -> None:
        if self.outlet is not None:
            self.front.delivery.handle(Blocked(self.outlet, self._full or self._frozen))

    def connection_lost(self) -> None:
        self.handle(mc.Lost())
        self.front.sockets.pop(self, None)

    # -- the machine ---------------------------------------------------------------------------------------

    def handle(self, event: mc.ConnectionEvent) -> None:
        for effect in self.machine.handle(event, self.world.now):
            self._perform(effect)
        if self.machine.deadline < self._armed:
            self._arm()

    def _arm(self) -> None:
        self._armed = deadline = self.machine.deadline
        if deadline != inf:
            self.world.after(max(0.0, deadline - self.world.now), lambda: self._tick(deadline), self.front.life)

    def _tick(self, armed: float) -> None:
        if armed != self._armed or self.machine.state is mc.State.CLOSED:
            return
        self._armed = inf
        self.handle(TICK)
        if self._armed == inf:
            self._arm()

    def close(self, reason: int) -> None:
        self.handle(mc.Close(reason))

    def _perform(self, effect: mc.ConnectionEffect) -> None:
        match effect:
            case mc.Write(data):
                self.write(data)
            case mc.EndSending():
                self.socket.write_eof()
            case mc.CloseSocket():
                self.socket.close()
            case mc.Abort(why):
                self.world.tell(self.client_id, f"is aborted: {why}")
                self.socket.abort()
            case mc.PauseReading():
                self.socket.pause_reading()
            case mc.ResumeReading():
                self.socket.resume_reading()
            case mc.Join(packet):
                self.front.spawn(self._joining(packet))
            case mc.InNextTurn(event):
                self.world.after(0.0, lambda: self.handle(event), self.front.life)
            case mc.Control(packet):
                self.front.spawn(self._controlled(packet))
            case mc.Leave(goodbye, expiry, why):
                self.world.tell(self.client_id, f"leaves{' with a good-bye' if goodbye else ''}: {why}")
                self.front.sessions.leave(self, goodbye, expiry)
            case _ if self.session is not None:
                self._perform_for(self.session, effect)

    def _perform_for(self, session: Session, effect: mc.ConnectionEffect) -> None:
        front, truth, client = self.front, self.front.truth, session.client_id
        match effect:
            case mc.Publishes(inbox):
                extra = inbox.properties or [None] * len(inbox.topics)
                rows = [
                    truth.taken(client, topic, payload, flags, properties)
                    for topic, payload, flags, properties in zip(
                        inbox.topics, inbox.payloads, inbox.flags, extra, strict=True
                    )
                ]
                if not front.ingest.publish(self, inbox, rows):
                    self.handle(mc.HoldOn(mc.Hold.COMMIT))
            case mc.PublishOne(topic, payload, flags, properties, qos, packet_id):
                row = truth.taken(client, topic, payload, flags, properties)
                received = None
                if qos == 2 and session.inbound.born:
                    session.inbound.marks[packet_id] = row.number
                    received = Receiving(client, session.inbound, packet_id, row.number)
                self._publish_one(row, qos, packet_id, received)
            case mc.PublishControl(_, _, qos, packet_id):
                self.handle(mc.Answered(qos, packet_id, Reason.NOT_AUTHORIZED))
            case mc.FreeId(packet_id):
                freed = lambda: self.handle(mc.IdFreed(packet_id))  # noqa: E731
                inbound = session.inbound
                front.rows.release(ReceivedId(client, inbound.born, packet_id, inbound.marks[packet_id]), freed)
            case mc.AfterCommit(event):
                front.ingest.in_turn(lambda _: self.handle(event))
            case mc.Acked(packet_ids):
                for packet_id in packet_ids:
                    truth.puback(client, packet_id)
                wrong = session.window.puback(packet_ids)
                self._settled(None if wrong is None else f"PUBACK for packet {wrong}, which is not QoS 1")
            case mc.AckedOne(packet):
                self._settled(self._acked_one(session, packet))

    def _publish_one(self, row: Row, qos: int, packet_id: int, received: Receiving | None) -> None:
        done = (lambda ok: self.handle(mc.StoredOne(qos, packet_id, ok))) if qos else None
        self.front.ingest.publish_one(row, done, received)

    def _acked_one(self, session: Session, packet: p.Puback | p.Pubrec | p.Pubcomp) -> str | None:
        window, truth, client = session.window, self.front.truth, session.client_id
        match packet:
            case p.Puback(packet_id, reason):
                truth.puback(client, packet_id)
                if window.puback((packet_id,), reason) is not None:
                    return f"PUBACK for packet {packet_id}, which is not QoS 1"
            case p.Pubrec(packet_id, reason):
                truth.pubrec(client, packet_id, reason)
                match window.pubrec(packet_id, reason):
                    case Pubrec.WRONG:
                        return f"PUBREC for packet {packet_id}, which is not QoS 2"
                    case _ if reason < 0x80:
                        self.handle(mc.Say(b"\x62\x02" + PACKET_IDS[packet_id]))
            case p.Pubcomp(packet_id):
                truth.pubcomp(client, packet_id)
                if not window.pubcomp(packet_id):
                    return f"PUBCOMP for packet {packet_id} out of turn"
        return None

    def _settled(self, wrong: str | None) -> None:
        if wrong is not None:
            self.handle(mc.BrokeMqtt(PeerError(wrong, Reason.PROTOCOL_ERROR)))
        elif self.outlet is not None:
            self.front.delivery.handle(Room(self.outlet))

    # -- what takes a while --------------------------------------------------------------------------------

    def _joining(self, packet: p.Connect) -> Work:
        try:
            yield from self.front.sessions.join(self, packet)
        except PeerError as error:
            self.handle(mc.Refuse(error.reason_code, packet.version))
        else:
            self.handle(mc.Release(mc.Hold.JOIN))

    def _controlled(self, packet: p.Subscribe | p.Unsubscribe) -> Work:
        subscribing = self.front.subscribing
        try:
            if isinstance(packet, p.Subscribe):
                answer, then = yield from subscribing.subscribe(self, packet)
            else:
                answer, then = yield from subscribing.unsubscribe(self, packet)
        except PeerError as error:
            self.handle(mc.BrokeMqtt(error))
            return
        self.handle(mc.Say(answer))
        then()
        self.handle(mc.Release(mc.Hold.CONTROL))

    # -- what the rest of the node calls -------------------------------------------------------------------

    def write(self, data: bytes) -> None:
        if not self.socket.closing:
            self.socket.write(data)

    def stored(self, inbox: Inbox, heard: set[str] | None) -> None:
        self.handle(mc.Stored(inbox, heard))

    def store_failed(self) -> None:
        self.handle(mc.StoreFailed())

    def read_on(self) -> None:
        self.handle(mc.Release(mc.Hold.COMMIT))

    def welcome(self, welcome: mc.Welcome, session: Session, outlet: Outlet) -> None:
        self.session, self.outlet = session, outlet
        self.handle(welcome)
