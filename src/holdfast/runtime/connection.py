"""One socket: what comes is given to the connection's machine, and what the machine asks for is done.

The machine (`mqtt.connection`) decides; here are the transport, the timer, and the ways to the rest of the node.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine
from math import inf
from typing import TYPE_CHECKING, Any

from holdfast.delivery.delivery import Blocked, Room
from holdfast.errors import HoldfastError, PeerError
from holdfast.machine import TICK
from holdfast.mqtt import connection as mc
from holdfast.mqtt import packets as p
from holdfast.mqtt.fastpath import PACKET_IDS, Inbox
from holdfast.mqtt.reasons import Reason
from holdfast.runtime.notices import Acked
from holdfast.sessions.window import RELEASED, Pubrec

if TYPE_CHECKING:
    from holdfast.auth.identity import Identity
    from holdfast.delivery.outlet import Outlet
    from holdfast.runtime.front import Front
    from holdfast.sessions.session import Session

logger = logging.getLogger("holdfast.connection")

WRITE_BYTES = 256 << 10
"""How much the socket's buffer holds before it counts as full."""


class Connection(asyncio.Protocol):
    __slots__ = (
        "_armed",
        "_front",
        "_frozen",
        "_full",
        "_loop",
        "_may_send",
        "_shard",
        "_shard_generation",
        "_timer",
        "claim",
        "connected_at",
        "identity",
        "machine",
        "outlet",
        "secure",
        "session",
        "transport",
    )

    def __init__(self, front: Front, secure: bool = False):
        self._front = front
        self._loop = asyncio.get_running_loop()
        self.machine = mc.Connection(front.connection_settings, front.names, self._loop.time())
        self.secure = secure
        self.transport: Any = None
        self.session: Session | None = None
        self.outlet: Outlet | None = None
        self.identity: Identity | None = None
        self.claim = ""
        """The token of its CONNECT."""
        self.connected_at = 0.0
        self._full = self._frozen = False
        self._shard = 0
        self._shard_generation = -1
        self._may_send = True
        self._timer: asyncio.TimerHandle | None = None
        self._armed = inf

    @property
    def closed(self) -> bool:
        return self.machine.closed

    @property
    def version(self) -> int:
        return self.machine.version

    @property
    def peer(self) -> str:
        name = self.transport.get_extra_info("peername")
        return f"{name[0]}:{name[1]}" if isinstance(name, tuple) else "unknown"

    @property
    def peer_host(self) -> str | None:
        """None: it was gone before anybody looked."""
        name = self.transport.get_extra_info("peername")
        return str(name[0]) if isinstance(name, tuple) and name else None

    # -- what the transport calls ------------------------------------------------------------------------

    def connection_made(self, transport: Any) -> None:
        self.transport = transport
        transport.set_write_buffer_limits(high=WRITE_BYTES)
        if self._front.admit(self):
            self._arm()

    def data_received(self, data: bytes) -> None:
        self.handle(mc.Received(data))

    def eof_received(self) -> bool:
        self.handle(mc.Ended())
        return self.machine.keeps_open and not self.secure

    def pause_writing(self) -> None:
        self._socket_full(True)

    def resume_writing(self) -> None:
        self._socket_full(False)

    def _socket_full(self, full: bool) -> None:
        self._full = full
        self.handle(mc.SocketFull(full))
        self._block()

    @property
    def frozen(self) -> bool:
        """Nobody knows whether its session is still this node's."""
        return self._frozen

    def freeze(self, frozen: bool) -> None:
        """Nothing is heard from its client and nothing sent to it, for as long as this node may not serve it."""
        self._frozen = frozen
        self.handle(mc.HoldOn(mc.Hold.FROZEN) if frozen else mc.Release(mc.Hold.FROZEN))
        self._block()

    def _block(self) -> None:
        if self.outlet is not None:
            self._front.delivery.handle(Blocked(self.outlet, self._full or self._frozen))

    def connection_lost(self, error: Exception | None) -> None:
        self.handle(mc.Lost())
        if self._timer is not None:
            self._timer.cancel()
        self._front.gone(self)

    # -- the machine -------------------------------------------------------------------------------------

    def handle(self, event: mc.ConnectionEvent) -> None:
        try:
            for effect in self.machine.handle(event, self._loop.time()):
                _PERFORM[effect.__class__](self, effect)
        except Exception:
            self._fail()
        if self.machine.deadline < self._armed:
            self._arm()

    def _fail(self) -> None:
        logger.exception("%s: our own fault; the connection is ended", self.peer)
        try:
            for effect in self.machine.handle(mc.Close(Reason.UNSPECIFIED_ERROR), self._loop.time()):
                _PERFORM[effect.__class__](self, effect)
        except Exception:
            logger.exception("%s: nor can it be ended in good order", self.peer)
            self.transport.abort()

    def close(self, reason: int) -> None:
        self.handle(mc.Close(reason, self._elsewhere(reason)))

    def _elsewhere(self, reason: int) -> str:
        return self._front.another_server or "" if reason == Reason.USE_ANOTHER_SERVER else ""

    def _arm(self) -> None:
        """One timer, which goes off no later than the deadline; one that went off too early is set again."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._armed = self.machine.deadline
        if self._armed != inf:
            self._timer = self._loop.call_at(self._armed, self._tick)

    def _tick(self) -> None:
        self._timer, self._armed = None, inf
        if self._loop.time() >= self.machine.deadline:
            self.handle(TICK)
        if self._timer is None:
            self._arm()

    # -- what the machine asks for: the socket -----------------------------------------------------------

    def write(self, data: bytes) -> None:
        # What the session makes of one packet may end the connection while later ones of the same chunk are performed.
        if self._may_send and not self.transport.is_closing():
            self.transport.write(data)

    def _write(self, effect: mc.Write) -> None:
        self.write(effect.data)

    def _end_sending(self, _: mc.EndSending) -> None:
        self._may_send = False
        if self.transport.can_write_eof():
            self.transport.write_eof()
        else:
            self.transport.close()

    def _abort(self, effect: mc.Abort) -> None:
        logger.info("%s: %s", self.peer, effect.why)
        self.transport.abort()

    def _in_next_turn(self, effect: mc.InNextTurn) -> None:
        self._loop.call_soon(self.handle, effect.event)

    # -- what the machine asks for: the node -------------------------------------------------------------

    def _join(self, effect: mc.Join) -> None:
        self._front.spawn(self._joining(effect.packet))

    async def _joining(self, packet: p.Connect) -> None:
        try:
            await self._front.join(self, packet)
        except PeerError as error:
            self._refuse(error.reason_code, packet.version)
        except HoldfastError as error:
            logger.error("%s: cannot connect %s: %s", self.peer, packet.client_id, error)
            self._refuse(Reason.SERVER_UNAVAILABLE, packet.version)
        except Exception:
            logger.exception("%s: our own fault; the connection is ended", self.peer)
            self._refuse(Reason.UNSPECIFIED_ERROR, packet.version)
        else:
            self.handle(mc.Release(mc.Hold.JOIN))

    def _refuse(self, reason: int, version: int) -> None:
        self._front.metrics.refused.inc()
        self.handle(mc.Refuse(reason, version, self._elsewhere(reason)))

    def _publishes(self, effect: mc.Publishes) -> None:
        session, ingest = self.session, self._front.ingest
        if session is None:
            return  # what came before in the same chunk has ended the connection
        if self._shard_generation != ingest.generation.number:
            self._shard_generation, self._shard = ingest.generation.number, ingest.shard_of(session.client_id)
        if not ingest.publish(self, session.client_id, self._shard, effect.inbox):
            self.handle(mc.HoldOn(mc.Hold.COMMIT))

    def stored(self, inbox: Inbox, heard: frozenset[str] | set[str] | None) -> None:
        """Publishes of the fast path are durable."""
        self.handle(mc.Stored(inbox, heard))

    def store_failed(self) -> None:
        """Publishes of this connection could not be stored: it must send them again."""
        self.handle(mc.StoreFailed())

    def read_on(self) -> None:
        """The batch that was too full is on its way."""
        self.handle(mc.Release(mc.Hold.COMMIT))

    def _publish_one(self, effect: mc.PublishOne) -> None:
        session = self.session
        if session is None:
            return
        done: Callable[[bool], None] | None = None
        received = None
        if effect.qos == 2 and session.inbound.born:
            received = self._front.ingest.receiving(session.client_id, session.inbound, effect.packet_id)
        if effect.qos:
            done = lambda ok: self.handle(mc.StoredOne(effect.qos, effect.packet_id, ok))  # noqa: E731
        self._front.ingest.publish_one(
            session.client_id, effect.topic, effect.payload, effect.flags, effect.properties, done, received
        )

    def _free_id(self, effect: mc.FreeId) -> None:
        if self.session is not None:
            freed = lambda: self.handle(mc.IdFreed(effect.packet_id))  # noqa: E731
            self._front.free_id(self.session, effect.packet_id, freed)

    def _publish_control(self, effect: mc.PublishControl) -> None:
        if self.session is None:
            return

        def answer(reason: int, why: str, *, end: bool = False) -> None:
            self.handle(mc.Answered(effect.qos, effect.packet_id, reason, why, end))

        self._front.publish_control(self, effect.topic, effect.payload, effect.retain, answer)

    def _after_commit(self, effect: mc.AfterCommit) -> None:
        self._front.ingest.in_turn(lambda _: self.handle(effect.event))

    def _acked(self, effect: mc.Acked) -> None:
        if self.session is None:
            return
        self._notice(effect.packet_ids, 0)
        wrong = self.session.window.puback(effect.packet_ids)
        self._settled(None if wrong is None else f"PUBACK for packet {wrong}, which is not QoS 1")

    def _acked_one(self, effect: mc.AckedOne) -> None:
        if self.session is None:
            return
        window, packet, wrong = self.session.window, effect.packet, None
        if not isinstance(packet, p.Pubcomp):
            self._notice([packet.packet_id], packet.reason)
        match packet:
            case p.Puback(packet_id, reason):
                if window.puback((packet_id,), reason) is not None:
                    wrong = f"PUBACK for packet {packet_id}, which is not QoS 1"
            case p.Pubrec(packet_id, reason):
                match window.pubrec(packet_id, reason):
                    case Pubrec.WRONG:
                        wrong = f"PUBREC for packet {packet_id}, which is not QoS 2"
                    case _ if reason < 0x80:
                        self.handle(mc.Say(b"\x62\x02" + PACKET_IDS[packet_id]))
            case p.Pubcomp(packet_id):
                if not window.pubcomp(packet_id):
                    wrong = f"PUBCOMP for packet {packet_id} out of turn"
        self._settled(wrong)

    def _notice(self, packet_ids: list[int], reason: int) -> None:
        notices, session = self._front.notices, self.session
        if session is None or not notices.wanted(Acked):
            return
        for packet_id in packet_ids:
            delivery = session.window.get(packet_id)
            if delivery is not None and delivery.qos != RELEASED:
                notices.emit(Acked(session.client_id, delivery.origin, delivery.offset, reason))

    def _settled(self, wrong: str | None) -> None:
        if wrong is not None:
            self.handle(mc.BrokeMqtt(PeerError(wrong, Reason.PROTOCOL_ERROR)))
        elif self.outlet is not None:
            self._front.delivery.handle(Room(self.outlet))

    def _control(self, effect: mc.Control) -> None:
        packet, subscribing = effect.packet, self._front.subscribing
        if isinstance(packet, p.Subscribe):
            self._front.spawn(self._controlled(subscribing.subscribe(self, packet)))
        else:
            self._front.spawn(self._controlled(subscribing.unsubscribe(self, packet)))

    async def _controlled(self, work: Coroutine[Any, Any, tuple[bytes, Callable[[], None]]]) -> None:
        """Something that takes a while, after which parsing goes on: the answer, then what follows from it."""
        try:
            answer, then = await work
        except PeerError as error:
            self.handle(mc.BrokeMqtt(error))
        except HoldfastError as error:
            logger.error("%s: %s", self.peer, error)
            self.close(Reason.SERVER_BUSY)
        except Exception:
            self._fail()
        else:
            self.handle(mc.Say(answer))
            then()
            self.handle(mc.Release(mc.Hold.CONTROL))

    def _leave(self, effect: mc.Leave) -> None:
        client = self.session.client_id if self.session is not None else ""
        logger.log(logging.DEBUG if effect.goodbye else logging.INFO, "%s %s: %s", self.peer, client, effect.why)
        self._front.leave(self, effect.goodbye, effect.expiry)

    @property
    def client_id(self) -> str:
        return self.session.client_id if self.session is not None else ""

    def send_control(self, topic: str, payload: bytes) -> None:
        """Past the session, at QoS 0: a client that cannot take it now goes without."""
        self.handle(mc.Tell(topic, payload))

    def welcome(self, welcome: mc.Welcome, session: Session, outlet: Outlet, identity: Identity) -> None:
        """The session is ours."""
        self.session, self.outlet, self.identity = session, outlet, identity
        self.connected_at = time.time()
        self.handle(welcome)


_PERFORM: dict[type, Callable[[Connection, Any], None]] = {
    mc.Write: Connection._write,
    mc.EndSending: Connection._end_sending,
    mc.CloseSocket: lambda self, _: self.transport.close(),
    mc.Abort: Connection._abort,
    mc.PauseReading: lambda self, _: self.transport.pause_reading(),
    mc.ResumeReading: lambda self, _: self.transport.resume_reading(),
    mc.Join: Connection._join,
    mc.Publishes: Connection._publishes,
    mc.PublishOne: Connection._publish_one,
    mc.PublishControl: Connection._publish_control,
    mc.FreeId: Connection._free_id,
    mc.AfterCommit: Connection._after_commit,
    mc.InNextTurn: Connection._in_next_turn,
    mc.Acked: Connection._acked,
    mc.AckedOne: Connection._acked_one,
    mc.Control: Connection._control,
    mc.Leave: Connection._leave,
}
