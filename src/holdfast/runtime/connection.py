"""One client's connection: bytes in, what they mean for the session, bytes out.

    new ──CONNECT──▶ joining ──CONNACK──▶ open ──▶ closing ──▶ closed

While joining (the session is being fetched) nothing further is parsed. A connection that ends on our word writes
it, closes its sending side, and reads on until the client has gone: a reset would take the reason away from it.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from holdfast.errors import HoldfastError, PeerError
from holdfast.model import RETAIN
from holdfast.mqtt import codec
from holdfast.mqtt import packets as p
from holdfast.mqtt.fastpath import PACKET_IDS, Inbox, scan
from holdfast.mqtt.reasons import Reason
from holdfast.mqtt.wire import topic_name
from holdfast.sessions.session import NEVER, RELEASED, Rows, Session

if TYPE_CHECKING:
    from holdfast.auth.identity import Identity
    from holdfast.runtime.memberships import Membership
    from holdfast.runtime.node import Node
    from holdfast.sessions.shared import LoanFeed

logger = logging.getLogger("holdfast.connection")

LINGER_SECONDS = 2.0
WRITE_BYTES = 256 << 10
"""How much is handed to the socket at once; more waits until it has gone out."""

LONG_WAY_BYTES = 256 << 10
"""Publishes that the fast path left wait for a commit after this much of one connection."""

PACKETS_PER_TURN = 256
"""Packets, other than plain publishes and acks, that one connection may have before the others get their turn."""

NAME_BYTES_MAX = 512
"""Longer topics are not remembered: a few thousand of the longest would fill the memory."""

NO_LIMIT = 1 << 30


class Connection(asyncio.Protocol):
    def __init__(self, node: Node, secure: bool = False):
        self.node = node
        self.secure = secure
        self.transport: Any = None
        self.state: str = "new"
        self.version = 0
        self.session: Session | None = None
        self.identity: Identity | None = None
        self.will: p.Will | None = None
        self.connected_at = 0.0
        self.last_seen = 0.0
        self.keep_alive_seconds = 0.0
        self.unacked = 0
        """QoS 1 and 2 publishes of the client that we have not answered yet."""
        self.reading = False
        """A reader is fetching rows for this session."""
        self.membership: Membership | None = None
        self.slow_loans: dict[LoanFeed, None] = {}
        """Loans that are behind and wait for room."""
        self._buffer = b""
        self._held = 0
        """Reasons not to parse on just now."""
        self._waits_for_room = False
        self._answers: list[bytes] | None = None
        """While a chunk is parsed: what is to be answered to it."""
        self._blocked = False
        """The socket's buffer is full."""
        self._unread = False
        """The client does not read our answers: it is not read from either."""
        self._eof = False
        """The client has closed its sending side while what it sent before was still waiting here."""
        self._long_way_bytes = 0
        self._window = 65_535
        self._packet_max = NO_LIMIT
        self._explain = True
        self._aliases: dict[int, str] = {}
        self._names: dict[bytes, str] = node.names
        self._may_publish: Callable[[str], bool] | None = None
        self._shard = 0
        self._shard_generation = -1
        self._deadline: asyncio.TimerHandle | None = None

    @property
    def closed(self) -> bool:
        return self.state in ("closing", "closed")

    # -- transport ---------------------------------------------------------------------------------------

    def connection_made(self, transport: Any) -> None:
        self.transport = transport
        self.last_seen = self.node.now()
        transport.set_write_buffer_limits(high=WRITE_BYTES)
        if not self.node.admit(self):
            return
        wait = self.node.settings.limits.connect_secs
        self._deadline = asyncio.get_running_loop().call_later(wait, self._too_slow)

    def _too_slow(self) -> None:
        if self.state in ("new", "joining"):
            logger.info("%s: no CONNECT in time", self.peer)
            self.transport.abort()

    @property
    def peer(self) -> str:
        name = self.transport.get_extra_info("peername")
        return f"{name[0]}:{name[1]}" if isinstance(name, tuple) else "local"

    def data_received(self, data: bytes) -> None:
        if self.closed:
            return
        self.last_seen = self.node.now()
        if self._buffer:
            data = self._buffer + data
            self._buffer = b""
        if self._held:
            self._buffer = data
            self._slow_down()
            return
        try:
            self._parse(data)
        except PeerError as error:
            self._refuse(error, data)
        except Exception:
            logger.exception("%s: our own fault; the connection is ended", self.peer)
            self.close(Reason.UNSPECIFIED_ERROR)

    def eof_received(self) -> bool:
        """The client will send no more. What it has sent still counts: above all a DISCONNECT."""
        self._eof = bool(self._held and self._buffer) and not self.closed and not self.secure
        if not self._eof:
            self._make_it_go()
        return self._eof

    def pause_writing(self) -> None:
        self._blocked = True

    def resume_writing(self) -> None:
        self._blocked = False
        if self._unread:
            self._unread = False
            self.go_on()
        self.pump()

    def connection_lost(self, error: Exception | None) -> None:
        self.state = "closed"
        if self._deadline is not None:
            self._deadline.cancel()
        self.node.gone(self)

    def send(self, data: bytes) -> None:
        if self.closed:
            return
        if self._answers is not None:
            self._answers.append(data)
            return
        self.transport.write(data)
        self.mind_unread()

    def _send_answers(self) -> None:
        """What one turn of parsing answered, as one piece: a queue of many small ones costs the loop dearly."""
        answers, self._answers = self._answers, None
        if answers and self.state != "closed":
            self.transport.write(b"".join(answers))
            self.mind_unread()

    @property
    def client_id(self) -> str:
        return self.session.client_id if self.session is not None else ""

    def send_control(self, topic: str, payload: bytes) -> None:
        """Past the session, at QoS 0: a client that cannot take it now goes without."""
        data = codec.encode_publish(p.Publish(topic, payload), self.version)
        if len(data) <= self._packet_max and not self._blocked:
            self.send(data)

    def mind_unread(self) -> None:
        """Something was answered: if the client leaves too many answers unread, it is asked nothing more."""
        if self._unread or not self._blocked or self.closed:
            return
        if self.transport.get_write_buffer_size() > self.node.settings.limits.pending_bytes_max:
            self._unread = True
            self.hold()
            self.transport.pause_reading()

    # -- reading -----------------------------------------------------------------------------------------

    def _parse(self, data: bytes) -> None:
        self._answers = []
        try:
            self._parse_on(data)
        finally:
            self._send_answers()

    def _parse_on(self, data: bytes) -> None:
        at, end, packets = 0, len(data), 0
        size_max = self.node.settings.limits.packet_bytes_max
        while at < end:
            if self.state == "open":
                inbox = Inbox()
                at = scan(data, at, self.version, inbox, self._topic_of, self._names, size_max)
                if inbox.acked:
                    self._acked(inbox)
                if inbox.topics:
                    self._published(inbox)
            if at >= end or self.closed:
                break
            if packets >= PACKETS_PER_TURN:
                self.hold()
                asyncio.get_running_loop().call_soon(self.go_on)
            if self._waits():
                self._buffer = data[at:]
                self._slow_down()
                break
            if self.state == "new" and data[at] >> 4 != p.CONNECT:
                raise PeerError("the first packet is not a CONNECT", Reason.PROTOCOL_ERROR)
            found = codec.frame(data, at, size_max)
            if found is None:
                self._buffer = data[at:]
                break
            first, start, stop = found
            self._faulty = (first, data[start:stop])
            self._packet(first, data[start:stop])
            at = stop
            packets += 1

    _faulty: tuple[int, bytes] | None = None

    def _refuse(self, error: PeerError, data: bytes) -> None:
        """The client broke MQTT: tell it what was wrong, and end it."""
        first, body = (data[0], data[2:]) if self._faulty is None else self._faulty
        logger.info("%s %s: %s", self.peer, self.session.client_id if self.session else "", error)
        self.node.metrics.refused.inc()
        version = self.version if self.state == "open" else None
        self._end(codec.farewell(error, first, body, version, explain=False))

    def _waits(self) -> bool:
        return self._held > 0

    def hold(self) -> None:
        """Parse nothing further until `go_on`."""
        self._held += 1

    def go_on(self) -> None:
        self._held = max(0, self._held - 1)
        if self._held or self.closed:
            return
        if not self._eof:
            self.transport.resume_reading()
        if self._buffer:
            data, self._buffer = self._buffer, b""
            self.data_received(data)
        if self._eof and not self._held and not self.closed:
            self.transport.close()
            self._make_it_go()

    def _slow_down(self) -> None:
        """Held, and more than a little has come: let the client wait in its own buffers."""
        if len(self._buffer) > 64 << 10:
            self.transport.pause_reading()

    def _topic_of(self, raw: bytes, alias: int) -> str | None:
        """A topic the shared table does not know yet; None: the codec's way, which knows what to say."""
        if alias:
            if alias > self.node.settings.mqtt.topic_alias_maximum:
                raise PeerError(f"topic alias {alias} is above our maximum", Reason.TOPIC_ALIAS_INVALID)
            if not raw:
                known = self._aliases.get(alias)
                if known is None:
                    raise PeerError(f"topic alias {alias} was never set", Reason.PROTOCOL_ERROR)
                return known
        elif not raw:
            return None
        topic = self._names.get(raw)
        if topic is None:
            topic = topic_name(raw)
            if not self._allowed(topic):
                return None
            if len(raw) <= NAME_BYTES_MAX:
                if len(self._names) > 200_000:
                    self._names.clear()
                self._names[raw] = topic
        if alias:
            self._aliases[alias] = topic
        return topic

    def forget_rights(self) -> None:
        """The rules have changed: ask again for every topic."""
        assert self.identity is not None
        self._may_publish = self.node.publish_checker(self.identity)
        if self._may_publish is not None:
            self._names = {}

    def _allowed(self, topic: str) -> bool:
        if topic[0] == "$":
            return False
        return self._may_publish is None or self._may_publish(topic)

    # -- publishes and acks: the data path ---------------------------------------------------------------

    def _published(self, inbox: Inbox) -> None:
        session = self.session
        assert session is not None
        self._count_unacked(len(inbox.packet_ids))
        ingest = self.node.ingest
        if self._shard_generation != ingest.generation.number:
            self._shard_generation, self._shard = ingest.generation.number, ingest.shard_of(session.client_id)
        if not ingest.publish(self, session.client_id, self._shard, inbox):
            self.hold()
            self.transport.pause_reading()

    def _count_unacked(self, more: int) -> None:
        self.unacked += more
        if self.version == p.V5 and self.unacked > self.node.settings.mqtt.receive_maximum:
            raise PeerError(f"{self.unacked} publishes under way", Reason.RECEIVE_MAXIMUM_EXCEEDED)

    def _acked(self, inbox: Inbox) -> None:
        session = self.session
        assert session is not None
        wrong = session.acknowledge(inbox.acked)
        if wrong is not None:
            raise PeerError(f"PUBACK for packet {wrong}, which is not QoS 1", Reason.PROTOCOL_ERROR)
        self.pump()

    def pump(self) -> None:
        """Send what is ready and fits; ask for more where nothing is ready and the session is behind."""
        session = self.session
        if session is None or self._blocked or self.state != "open":
            return
        if self.membership is not None:
            # A process that stood still must know the time before it sends what was lent to it.
            self.membership.driver.clock()
        if session.ready_rows:
            out: list[bytes] = []
            session.take(out, self._window, WRITE_BYTES, self.version, self._packet_max, time.time())
            if out:
                self.transport.write(b"".join(out))
                if session.ready_rows and not self._blocked and len(session.in_flight) < self._window:
                    asyncio.get_running_loop().call_soon(self.pump)
        if self._waits_for_room and session.ready_bytes <= self.node.settings.limits.pending_bytes_max:
            self._waits_for_room = False
            asyncio.get_running_loop().call_soon(self.go_on)
        if session.touched:
            self.node.groups.report(self)
        if session.ready_bytes < self.node.settings.limits.pending_bytes_max:
            if session.behind and not self.reading:
                self.node.dispatcher.feed(self)
            if self.slow_loans and session.ready_rows < 1024:
                slow, self.slow_loans = self.slow_loans, {}
                for feed in slow:
                    self.node.dispatcher.feed_loan(feed, self)

    def store_failed(self) -> None:
        """Publishes of this connection could not be stored: it must send them again."""
        self.close(Reason.SERVER_UNAVAILABLE)

    # -- everything else ---------------------------------------------------------------------------------

    def _packet(self, first: int, body: bytes) -> None:
        if self.state == "new":
            if first >> 4 != p.CONNECT:
                raise PeerError(f"the first packet is {p.NAMES[first >> 4]}, not CONNECT", Reason.PROTOCOL_ERROR)
            packet = codec.decode(first, body, p.V311)
            assert isinstance(packet, p.Connect)
            self.state = "joining"
            self.hold()
            self.node.spawn(self._join(packet))
            return
        packet = codec.decode(first, body, self.version)
        match packet:
            case p.Publish():
                self._publish(packet)
            case p.Puback():
                self._on_puback(packet)
            case p.Pubrec():
                self._on_pubrec(packet)
            case p.Pubrel():
                self._on_pubrel(packet)
            case p.Pubcomp():
                self._on_pubcomp(packet)
            case p.Subscribe():
                self.hold()
                self.node.spawn(self._subscribe(packet))
            case p.Unsubscribe():
                self.hold()
                self.node.spawn(self._unsubscribe(packet))
            case p.Pingreq():
                self.send(b"\xd0\x00")
            case p.Disconnect():
                self._on_disconnect(packet)
            case p.Connect():
                raise PeerError("a second CONNECT", Reason.PROTOCOL_ERROR)
            case _:
                raise PeerError(f"{type(packet).__name__} was not expected", Reason.PROTOCOL_ERROR)

    async def _join(self, packet: p.Connect) -> None:
        try:
            await self.node.join(self, packet)
        except PeerError as error:
            self.refuse_connect(error.reason_code, packet.version)
        except HoldfastError as error:
            logger.error("%s: cannot connect %s: %s", self.peer, packet.client_id, error)
            self.refuse_connect(Reason.SERVER_UNAVAILABLE, packet.version)
        except Exception:
            logger.exception("%s: our own fault; the connection is ended", self.peer)
            self.refuse_connect(Reason.UNSPECIFIED_ERROR, packet.version)
        else:
            self.go_on()

    def refuse_connect(self, reason: int, version: int) -> None:
        self.node.metrics.refused.inc()
        self._end(codec.encode_connack(p.Connack(reason), version))

    def welcome(self, packet: p.Connect, session: Session, present: bool, identity: Identity, assigned: bool) -> None:
        """The session is ours: say so, and begin to feed it."""
        settings = self.node.settings
        self.version, self.session, self.identity = packet.version, session, identity
        self.will = packet.will
        self.connected_at = time.time()
        properties = packet.properties
        self._window = min(properties.get("receive_maximum", 65_535), settings.mqtt.inflight_max)
        self._packet_max = properties.get("maximum_packet_size", NO_LIMIT)
        self._explain = properties.get("request_problem_information", True)
        self.forget_rights()
        keep_alive = min(packet.keep_alive or settings.mqtt.keep_alive_secs_max, settings.mqtt.keep_alive_secs_max)
        cut = keep_alive != packet.keep_alive and settings.mqtt.keep_alive_secs_max < 65_535
        self.keep_alive_seconds = float(keep_alive if cut else packet.keep_alive)
        answer: p.Properties = {}
        if packet.version == p.V5:
            answer["receive_maximum"] = settings.mqtt.receive_maximum
            answer["topic_alias_maximum"] = settings.mqtt.topic_alias_maximum
            answer["maximum_packet_size"] = settings.limits.packet_bytes_max
            if not settings.groups.enabled:
                answer["shared_subscription_available"] = False
            if session.expiry_seconds != properties.get("session_expiry", 0):
                answer["session_expiry"] = session.expiry_seconds
            if assigned:
                answer["assigned_client_id"] = session.client_id
            if cut:
                answer["server_keep_alive"] = keep_alive
            if properties.get("request_response_information"):
                answer["response_information"] = settings.mqtt.response_prefix + session.client_id
        connack = codec.encode_connack(p.Connack(0, present and packet.version > p.V31, answer), packet.version)
        if len(connack) > self._packet_max:
            self._end(b"")
            return
        self.state = "open"
        if self._deadline is not None:
            self._deadline.cancel()
        self.send(connack)

    def resend(self, rows_by_id: list[tuple[int, Rows | None, int, int]]) -> None:
        """What was under way when the client went: (packet id, rows, row, QoS), in the order it was sent."""
        out = []
        for packet_id, rows, row, qos in rows_by_id:
            if qos == RELEASED:
                out.append(b"\x62\x02" + PACKET_IDS[packet_id])
            elif rows is not None and self.session is not None:
                again = self.session.encode_again(packet_id, rows, row, qos, self.version, time.time())
                if len(again) <= self._packet_max:
                    out.append(again)
        if out:
            self.send(b"".join(out))

    def _publish(self, packet: p.Publish) -> None:
        """A PUBLISH that the fast path left: QoS 2, one that is refused, or one that is unusual."""
        session = self.session
        assert session is not None
        topic = packet.topic
        if packet.topic_alias or not topic:
            found = self._topic_of(topic.encode(), packet.topic_alias)
            topic = found if found is not None else topic
        if not topic:
            raise PeerError("a PUBLISH without topic or alias", Reason.PROTOCOL_ERROR)
        qos, packet_id = packet.qos, packet.packet_id
        self._hold_back(len(topic) + len(packet.payload) + len(packet.properties))
        handler = self.node.control_topics.handler(topic)
        if handler is not None:
            self._answer(qos, packet_id, *handler.publish(self, topic, packet.payload))
            return
        if not self._allowed(topic):
            self._answer(qos, packet_id, Reason.NOT_AUTHORIZED)
            return
        flags = qos | (RETAIN if packet.retain else 0)
        ingest = self.node.ingest
        if qos:
            self._count_unacked(0 if qos == 2 and packet_id in session.received else 1)
        if qos == 2:
            repeated = packet_id in session.received
            session.received.add(packet_id)
            done = self._after_qos2(session, packet_id)
            if repeated:
                ingest.in_turn(done)
                return
        elif qos == 1:
            done = self._after_qos1(packet_id)
        else:
            done = None
        extra = packet.properties or None
        ingest.publish_one(session.client_id, topic, packet.payload, flags, extra, done)

    def _hold_back(self, size: int) -> None:
        """A client that sends faster than the log takes waits for what it sent; the fast path has its own way."""
        self._long_way_bytes += size + 64
        if self._long_way_bytes > LONG_WAY_BYTES:
            self._long_way_bytes = 0
            self.hold()
            self.transport.pause_reading()
            self.node.ingest.in_turn(lambda _: self.go_on())

    def _answer(self, qos: int, packet_id: int, reason: int, why: str = "") -> None:
        """To what goes nowhere: MQTT 5 has words for a refusal; in MQTT 3 it is acknowledged all the same."""
        explain = why and self._explain and self._packet_max > 1024
        properties: p.Properties = {"reason_string": why[:300]} if explain else {}
        if qos == 1:
            packet: p.Puback | p.Pubrec = p.Puback(packet_id, reason, properties)
        elif qos == 2:
            packet = p.Pubrec(packet_id, reason, properties)
        else:
            return
        answer = codec.encode(packet, self.version)
        self.node.ingest.in_turn(lambda ok: self.send(answer))

    def _after_qos1(self, packet_id: int) -> Callable[[bool], None]:
        def done(ok: bool) -> None:
            self.unacked -= 1
            if ok:
                self.send(b"\x40\x02" + PACKET_IDS[packet_id])
            else:
                self.store_failed()

        return done

    def _after_qos2(self, session: Session, packet_id: int) -> Callable[[bool], None]:
        def done(ok: bool) -> None:
            if ok:
                self.send(b"\x50\x02" + PACKET_IDS[packet_id])
            else:
                session.received.discard(packet_id)
                self.store_failed()

        return done

    def _on_puback(self, packet: p.Puback) -> None:
        """One with a reason; plain ones went the fast way. A refusal ends the delivery as well."""
        assert self.session is not None
        if self.session.acknowledge([packet.packet_id]) is not None:
            raise PeerError(f"PUBACK for packet {packet.packet_id}, which is not QoS 1", Reason.PROTOCOL_ERROR)
        self.pump()

    def _on_pubrec(self, packet: p.Pubrec) -> None:
        assert self.session is not None
        if packet.reason >= 0x80:
            self.session.refused_by_client(packet.packet_id)
            self.pump()
            return
        match self.session.received_by_client(packet.packet_id):
            case "wrong":
                raise PeerError(f"PUBREC for packet {packet.packet_id}, which is not QoS 2", Reason.PROTOCOL_ERROR)
            case _:
                self.send(b"\x62\x02" + PACKET_IDS[packet.packet_id])

    def _on_pubrel(self, packet: p.Pubrel) -> None:
        assert self.session is not None
        if packet.packet_id in self.session.received:
            self.session.received.discard(packet.packet_id)
            self.unacked -= 1
        self.send(b"\x70\x02" + PACKET_IDS[packet.packet_id])

    def _on_pubcomp(self, packet: p.Pubcomp) -> None:
        assert self.session is not None
        if not self.session.complete(packet.packet_id):
            raise PeerError(f"PUBCOMP for packet {packet.packet_id} out of turn", Reason.PROTOCOL_ERROR)
        self.pump()

    async def _subscribe(self, packet: p.Subscribe) -> None:
        await self._controlled(self.node.subscriptions.subscribe(self, packet))

    async def _unsubscribe(self, packet: p.Unsubscribe) -> None:
        await self._controlled(self.node.subscriptions.unsubscribe(self, packet))

    async def _controlled(self, work: Any) -> None:
        """Something that takes a while, after which parsing goes on."""
        try:
            answer = await work
        except PeerError as error:
            self._end(codec.farewell(error, 0x82, b"", self.version))
        except HoldfastError as error:
            logger.error("%s: %s", self.peer, error)
            self.close(Reason.SERVER_UNAVAILABLE)
        except Exception:
            logger.exception("%s: our own fault; the connection is ended", self.peer)
            self.close(Reason.UNSPECIFIED_ERROR)
        else:
            self.send(answer)
            self.pump()
            if self.session is not None and self.session.ready_bytes > self.node.settings.limits.pending_bytes_max:
                self._waits_for_room = True  # retained messages without end: the next SUBSCRIBE waits for these
            else:
                self.go_on()

    def _on_disconnect(self, packet: p.Disconnect) -> None:
        assert self.session is not None
        expiry = packet.properties.get("session_expiry")
        if expiry is not None:
            if expiry and not self.session.expiry_seconds:
                raise PeerError("DISCONNECT revives a session that ends with it", Reason.PROTOCOL_ERROR)
            self.session.expiry_seconds = self.node.bounded_expiry(expiry)
        if packet.reason == 0:
            self.will = None
        self._end(b"")

    # -- ending ------------------------------------------------------------------------------------------

    def close(self, reason: int) -> None:
        """End it with a word (MQTT 5) or without."""
        if self.closed:
            return
        last = codec.encode_disconnect(p.Disconnect(reason), self.version) if self.version == p.V5 else b""
        self._end(last)

    def _end(self, last: bytes) -> None:
        if self.closed:
            return
        self._send_answers()
        if last:
            self.transport.write(last)
        self.state = "closing"
        self._buffer = b""
        self.node.leave(self)
        if not self._eof:
            self.transport.resume_reading()
        if self.transport.can_write_eof() and not self._eof:
            self.transport.write_eof()
        else:
            self.transport.close()
        self._make_it_go()

    def _make_it_go(self) -> None:
        """The client reads our last word and goes; if it does not, it is made to."""
        asyncio.get_running_loop().call_later(LINGER_SECONDS, self.transport.abort)


def effective_expiry(packet: p.Connect) -> int:
    """How long the session outlives the connection, as the client asked."""
    if packet.version == p.V5:
        return packet.properties.get("session_expiry", 0)
    return 0 if packet.clean_start else NEVER
