"""One client's connection as a machine: bytes and the time in; bytes, what they mean, and one deadline out.

    NEW ──CONNECT──▶ JOINING ──CONNACK──▶ OPEN ──▶ CLOSING ──▶ CLOSED

While JOINING (the session is being fetched) nothing further is parsed. A connection that ends on our word writes
it, closes its sending side, and reads on until the client has gone: a reset would take the reason away from it.

The data path stays what it is: a socket chunk becomes columns (`fastpath.scan`), never an object per packet. Why
nothing is parsed just now has a name (`Hold`); there may be several, and parsing goes on when the last one is gone.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum, auto
from math import inf

from holdfast.errors import BrokenInvariant, PeerError
from holdfast.machine import Tick
from holdfast.model import RETAIN
from holdfast.mqtt import codec
from holdfast.mqtt import packets as p
from holdfast.mqtt.fastpath import PACKET_IDS, Inbox, pubacks, pubacks_where, scan
from holdfast.mqtt.inbound import Inbound
from holdfast.mqtt.reasons import Reason
from holdfast.mqtt.wire import topic_name

NAME_BYTES_MAX = 512
"""Longer topics are not remembered: a few thousand of the longest would fill the memory."""

NAMES_MAX = 200_000
NO_LIMIT = 1 << 30


class State(Enum):
    NEW = auto()
    JOINING = auto()
    OPEN = auto()
    CLOSING = auto()
    CLOSED = auto()

    __hash__ = object.__hash__  # by its name, as enums have it, is a call for each look into a table


_CLOSED = (State.CLOSING, State.CLOSED)

LEGAL: dict[State, set[State]] = {
    State.NEW: {State.JOINING, State.CLOSING, State.CLOSED},
    State.JOINING: {State.OPEN, State.CLOSING, State.CLOSED},
    State.OPEN: {State.CLOSING, State.CLOSED},
    State.CLOSING: {State.CLOSED},
    State.CLOSED: set(),
}


class Hold(Enum):
    """A reason not to parse on."""

    RATE = auto()
    """Its turn to connect has not come."""
    JOIN = auto()
    """Its CONNECT is being answered."""
    CONTROL = auto()
    """A SUBSCRIBE or UNSUBSCRIBE is being answered."""
    COMMIT = auto()
    """Enough of its publishes wait for a commit."""
    UNREAD = auto()
    """It does not read what it is answered, so it is asked nothing more."""
    TURN = auto()
    """It has had its share of this turn."""
    FROZEN = auto()
    """The node may not serve its session just now."""
    ANSWER = auto()
    """Enough of what it has asked for is not answered yet."""

    __hash__ = object.__hash__


_AT_ONCE = frozenset((Hold.COMMIT, Hold.UNREAD, Hold.FROZEN))
"""Holds under which nothing more is read from the socket, however little waits."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ConnectionSettings:
    """What a connection is bound by."""

    connect_seconds: float = 10.0
    """How long a connection may take to say CONNECT."""
    goodbye_seconds: float = 1.0
    """How long a client that has said good-bye waits, at most, for that to be durable."""
    join_seconds: float = 15.0
    """How long a CONNECT may be without an answer: longer than a session is waited for."""
    packet_bytes_max: int = 1 << 20
    unread_bytes_max: int = 1 << 20
    receive_maximum: int = 1000
    topic_alias_maximum: int = 10
    linger_seconds: float = 2.0
    packets_per_turn: int = 256
    """Packets, other than plain publishes and acks, that one connection may have before the others get their turn."""
    long_way_bytes: int = 256 << 10
    """Publishes that the fast path left wait for a commit after this much of one connection."""
    asked_max: int = 64
    """Publishes to control topics that one connection may have unanswered; it is not read from until they are fewer."""
    held_bytes: int = 64 << 10
    """While parsing is held, more than this waits in the client's own buffers, not in ours."""


# ---------------------------------------------------------------------------------------------- events


@dataclass(frozen=True, slots=True)
class Received:
    """Bytes came."""

    data: bytes


@dataclass(frozen=True, slots=True)
class Ended:
    """The client has closed its sending side. What it has sent still counts: above all a DISCONNECT."""


@dataclass(frozen=True, slots=True)
class Lost:
    """The socket is gone."""


@dataclass(frozen=True, slots=True)
class SocketFull:
    """The socket's buffer is full, or has room again."""

    full: bool


@dataclass(frozen=True, slots=True)
class Welcome:
    """The session is ours: say so."""

    version: int
    connack: bytes
    inbound: Inbound
    may_publish: Callable[[str], bool] | None = None
    """None: everywhere."""
    keep_alive_seconds: float = 0.0
    expires_at: float = inf
    """When the client's credentials end, by the machine's clock."""
    packet_max: int = NO_LIMIT
    explain: bool = True
    session_expiry: int = 0


@dataclass(frozen=True, slots=True)
class Refuse:
    """The CONNECT is not accepted."""

    reason: int
    version: int
    server: str = ""
    """Where to go instead (MQTT 5)."""


@dataclass(frozen=True, slots=True)
class RightsChanged:
    """Ask again for every topic."""

    may_publish: Callable[[str], bool] | None
    expires_at: float


@dataclass(frozen=True, slots=True)
class Stored:
    """Publishes of the fast path are durable; `heard`: the topics somebody is subscribed to, None: not asked."""

    inbox: Inbox
    heard: frozenset[str] | set[str] | None


@dataclass(frozen=True, slots=True)
class StoredOne:
    """A publish of the long way is durable, or could not be stored."""

    qos: int
    packet_id: int
    ok: bool


@dataclass(frozen=True, slots=True)
class StoredBefore:
    """A QoS 2 publish that was sent again: what became of the first one is known by now."""

    packet_id: int


@dataclass(frozen=True, slots=True)
class IdFreed:
    """The store knows this packet id no more: the client may use it again."""

    packet_id: int


@dataclass(frozen=True, slots=True)
class StoreFailed:
    """Publishes of this connection could not be stored: it must send them again."""


@dataclass(frozen=True, slots=True)
class Answered:
    """What a publish to a control topic, or a refused one, is told."""

    qos: int
    packet_id: int
    reason: int
    why: str = ""
    end: bool = False
    """MQTT 3 has no words for a refusal: there the connection is ended instead."""


@dataclass(frozen=True, slots=True)
class Say:
    """Send these packets; `hold` ends with it."""

    data: bytes
    hold: Hold | None = None


@dataclass(frozen=True, slots=True)
class Tell:
    """A message past the session, at QoS 0: a client that cannot take it now goes without."""

    topic: str
    payload: bytes


@dataclass(frozen=True, slots=True)
class HoldOn:
    """Parse nothing further until this is released."""

    hold: Hold


@dataclass(frozen=True, slots=True)
class Release:
    hold: Hold


@dataclass(frozen=True, slots=True)
class Close:
    """End it with a word (MQTT 5) or without."""

    reason: int
    server: str = ""
    """Where to go instead."""


@dataclass(frozen=True, slots=True)
class GoodbyeStored:
    """What a DISCONNECT changed is durable, or need not be: the client may see the end."""


@dataclass(frozen=True, slots=True)
class BrokeMqtt:
    """What the session made of a packet: the client broke MQTT."""

    error: PeerError


ConnectionEvent = (
    Received
    | Ended
    | Lost
    | SocketFull
    | Welcome
    | Refuse
    | RightsChanged
    | Stored
    | StoredOne
    | StoredBefore
    | IdFreed
    | StoreFailed
    | Answered
    | Say
    | Tell
    | HoldOn
    | Release
    | Close
    | GoodbyeStored
    | BrokeMqtt
    | Tick
)

# --------------------------------------------------------------------------------------------- effects


@dataclass(frozen=True, slots=True)
class Write:
    data: bytes


@dataclass(frozen=True, slots=True)
class EndSending:
    """Close the sending side; where the socket cannot, all of it."""


@dataclass(frozen=True, slots=True)
class CloseSocket:
    """Send what is left, then close."""


@dataclass(frozen=True, slots=True)
class Abort:
    """Close at once."""

    why: str


@dataclass(frozen=True, slots=True)
class PauseReading: ...


@dataclass(frozen=True, slots=True)
class ResumeReading: ...


@dataclass(frozen=True, slots=True)
class Join:
    """A CONNECT: answer Welcome or Refuse."""

    packet: p.Connect


@dataclass(frozen=True, slots=True)
class Publishes:
    """Store these; answer Stored or StoreFailed."""

    inbox: Inbox


@dataclass(frozen=True, slots=True)
class PublishOne:
    """Store this one; answer StoredOne if it has a QoS."""

    topic: str
    payload: bytes
    flags: int
    properties: bytes | None
    qos: int
    packet_id: int


@dataclass(frozen=True, slots=True)
class PublishControl:
    """A PUBLISH to a topic that begins with `$`: answer Answered, at once or later."""

    topic: str
    payload: bytes
    qos: int
    packet_id: int
    retain: bool = False


@dataclass(frozen=True, slots=True)
class FreeId:
    """The client has released a QoS 2 publish whose packet id is stored: remove it, then answer IdFreed.

    Were the client told sooner, it could use the id for something new, and whoever serves it next, after a crash, would
    take that for the old one.
    """

    packet_id: int


@dataclass(frozen=True, slots=True)
class AfterCommit:
    """Give this event back when everything that was published before is durable, or refused."""

    event: Say | StoredBefore | Release


@dataclass(frozen=True, slots=True)
class InNextTurn:
    """Give this event back in the next turn of the loop."""

    event: Release


@dataclass(frozen=True, slots=True)
class Acked:
    """Plain PUBACKs."""

    packet_ids: list[int]


@dataclass(frozen=True, slots=True)
class AckedOne:
    """A PUBACK, PUBREC or PUBCOMP with its reason."""

    packet: p.Puback | p.Pubrec | p.Pubcomp


@dataclass(frozen=True, slots=True)
class Control:
    """A SUBSCRIBE or UNSUBSCRIBE: answer Say with its hold, or Close."""

    packet: p.Subscribe | p.Unsubscribe


@dataclass(frozen=True, slots=True)
class Leave:
    """The connection no longer serves its session. With `goodbye` the will is void; `expiry` is a new one, if given."""

    goodbye: bool
    expiry: int | None
    why: str


ConnectionEffect = (
    Write
    | EndSending
    | CloseSocket
    | Abort
    | PauseReading
    | ResumeReading
    | Join
    | Publishes
    | PublishOne
    | PublishControl
    | FreeId
    | AfterCommit
    | InNextTurn
    | Acked
    | AckedOne
    | Control
    | Leave
)


NO_HOLDS: frozenset[Hold] = frozenset()
_MOVES = {(a, b): f"{a.name} -> {b.name}" for a in State for b in State}


class Connection:
    """The protocol's side of one socket."""

    __slots__ = (
        "_aliases",
        "_asked",
        "_at",
        "_chunks",
        "_close_at",
        "_data",
        "_effects",
        "_ended",
        "_expires_at",
        "_explain",
        "_goodbye_until",
        "_inbound",
        "_keep_alive_seconds",
        "_last_seen",
        "_long_way",
        "_may_publish",
        "_names",
        "_needed",
        "_out",
        "_packet",
        "_packet_max",
        "_session_expiry",
        "_settings",
        "_shared_names",
        "_socket_full",
        "_unread",
        "holds",
        "moves",
        "reading",
        "state",
        "under_way",
        "version",
        "waiting",
    )

    def __init__(self, settings: ConnectionSettings, names: dict[bytes, str], now: float):
        self._settings = settings
        self._shared_names = self._names = names
        """Topics by their bytes, shared by all connections that may publish anywhere."""
        self.state = State.NEW
        self.version = 0
        self.under_way = 0
        """QoS 1 and 2 publishes of the client that we have not answered yet."""
        self.holds = NO_HOLDS
        self._asked = 0
        """Publishes to control topics that are not answered yet."""
        self._may_publish: Callable[[str], bool] | None = None
        self._inbound = Inbound()
        self._aliases: dict[int, str] = {}
        self._packet_max = NO_LIMIT
        self._explain = True
        self._keep_alive_seconds = 0.0
        self._session_expiry = 0
        self._expires_at = inf
        self._last_seen = now
        self._close_at = now + settings.connect_seconds
        """NEW and JOINING: when it must be OPEN; CLOSING: when it must be gone."""
        self._goodbye_until = inf
        """CLOSING: how long the end is kept from a client that has said good-bye."""
        self._data, self._at = b"", 0
        """What is being parsed, and how far it is."""
        self._chunks: list[bytes] = []
        """What came since."""
        self.waiting = 0
        """How many bytes of both are not parsed yet."""
        self._needed = 1
        """How many must have come before parsing can get on."""
        self.reading = True
        """What comes is read from the socket."""
        self._ended = False
        self._socket_full = False
        self._unread = 0
        """Bytes that were answered since the socket's buffer was full."""
        self._long_way = 0
        self._packet: tuple[int, bytes | memoryview] | None = None
        """The packet being looked at, should it be wrong."""
        self._out: list[bytes] = []
        self._effects: list[ConnectionEffect] = []
        self.moves: list[str] = []

    # ---------------------------------------------------------------------------------------- the door

    def handle(self, event: ConnectionEvent, now: float) -> list[ConnectionEffect]:
        self._effects = []
        try:
            self._on(event, now)
        except PeerError as error:
            self._broke_mqtt(error, now)
        self._flush()
        self._mind_reading()
        effects, self._effects = self._effects, []
        return effects

    def _on(self, event: ConnectionEvent, now: float) -> None:
        match event:
            case Received(data):
                self._on_received(data, now)
            case Stored(inbox, heard):
                self._on_stored(inbox, heard)
            case StoredOne(qos, packet_id, ok):
                self._on_stored_one(qos, packet_id, ok, now)
            case IdFreed(packet_id):
                self._on_id_freed(packet_id)
            case StoredBefore(packet_id):
                self._on_stored_before(packet_id, now)
            case Tick():
                self._on_tick(now)
            case SocketFull(full):
                self._on_socket_full(full, now)
            case HoldOn(hold):
                self._hold(hold)
            case Release(hold):
                self._release(hold, now)
            case GoodbyeStored():
                if self._goodbye_until < inf:
                    self._end_socket(now)
            case Ended():
                self._on_ended(now)
            case Lost():
                self._leave("the connection was lost")
                self._move(State.CLOSED)
            case _:
                self._on_word(event, now)

    def _on_word(
        self,
        event: Welcome | Refuse | RightsChanged | StoreFailed | Answered | Say | Tell | Close | BrokeMqtt,
        now: float,
    ) -> None:
        if self.closed:
            return
        match event:
            case Say(data, hold):
                self._write(data)
                if hold is not None:
                    self._release(hold, now)
            case Answered():
                self._asked -= 1
                if event.end and event.reason >= 0x80 and self.version < p.V5:
                    self._close(event.reason, event.why, now)
                    return
                self._answer(event)
                self._release(Hold.ANSWER, now)
            case Welcome():
                self._on_welcome(event, now)
            case Refuse(reason, version, server):
                refusal = p.Connack(reason, properties=_elsewhere(server))
                self._end(codec.encode_connack(refusal, version), "refused", now)
            case RightsChanged(may_publish, expires_at):
                self._set_rights(may_publish)
                self._expires_at = expires_at
            case StoreFailed():
                self._close(Reason.SERVER_BUSY, "publishes could not be stored", now)
            case Tell(topic, payload):
                data = codec.encode_publish(p.Publish(topic, payload), self.version)
                if len(data) <= self._packet_max and not self._socket_full:
                    self._write(data)
            case Close(reason, server):
                self._close(reason, "ended by us", now, server)
            case BrokeMqtt(error):
                raise error

    @property
    def closed(self) -> bool:
        return self.state in _CLOSED

    @property
    def open(self) -> bool:
        return self.state is State.OPEN

    @property
    def keeps_open(self) -> bool:
        """The client has closed its sending side, and what it sent before is still being dealt with."""
        return self._ended and bool(self.holds) and self.waiting > 0 and not self.closed

    @property
    def idle(self) -> bool:
        """Everything that came has been parsed, or waits for the rest of its packet."""
        return not self.holds

    @property
    def deadline(self) -> float:
        if self.state is State.OPEN:
            heard = self._keep_alive_seconds and Hold.FROZEN not in self.holds  # it may have spoken: nobody reads
            silent = self._last_seen + 1.5 * self._keep_alive_seconds if heard else inf
            return min(silent, self._expires_at, self._close_at)
        return inf if self.state is State.CLOSED else min(self._close_at, self._goodbye_until)

    def _on_tick(self, now: float) -> None:
        if now < self.deadline:
            return
        if now >= self._goodbye_until:
            self._end_socket(now)
            return
        if now >= self._close_at:
            why = "its last word was not read" if self.closed else "no CONNECT in time"
            self._effects.append(Abort(why))
            self._close_at = inf
        elif now >= self._expires_at:
            self._close(Reason.NOT_AUTHORIZED, "its credentials have ended", now)
        else:
            self._close(Reason.KEEP_ALIVE_TIMEOUT, "silent for too long", now)

    # ------------------------------------------------------------------------------------------ writing

    def _write(self, data: bytes) -> None:
        if not self.closed:
            self._out.append(data)

    def _flush(self) -> None:
        """What one event was answered with, as one piece: a queue of many small ones costs the loop dearly."""
        if not self._out:
            return
        data = self._out[0] if len(self._out) == 1 else b"".join(self._out)
        self._out = []
        self._effects.append(Write(data))
        if self._socket_full and not self.closed:
            self._unread += len(data)
            if self._unread > self._settings.unread_bytes_max:
                self._hold(Hold.UNREAD)

    def _on_socket_full(self, full: bool, now: float) -> None:
        self._socket_full = full
        if not full:
            self._unread = 0
            self._release(Hold.UNREAD, now)

    # ----------------------------------------------------------------------------------------- holding

    def _hold(self, hold: Hold) -> None:
        self.holds |= {hold}

    def _release(self, hold: Hold, now: float) -> None:
        if hold not in self.holds:
            return
        self.holds = self.holds - {hold} or NO_HOLDS
        if hold is Hold.FROZEN:
            self._last_seen = now
        if self.holds or self.closed:
            return
        self._needed = 1
        self._parse(now)
        if self._ended and not self.holds and not self.closed:
            self._effects.append(CloseSocket())
            self._close_at = now + self._settings.linger_seconds

    def _mind_reading(self) -> None:
        """Once per event, and before its other effects: what these lead to at once may be an event that decides anew.

        Were it performed after them, the socket would be left as it was to be before.
        """
        if self._ended or self.state is State.CLOSED:
            return  # nothing more comes
        holds = self.holds
        held = bool(holds) and (self.waiting > self._settings.held_bytes or not holds.isdisjoint(_AT_ONCE))
        reading = self.closed or not held
        if reading != self.reading:
            self.reading = reading
            self._effects.insert(0, ResumeReading() if reading else PauseReading())

    # ----------------------------------------------------------------------------------------- reading

    def _on_received(self, data: bytes, now: float) -> None:
        if self.closed:
            return
        self._last_seen = now
        self._chunks.append(data)
        self.waiting += len(data)
        if not self.holds and self.waiting >= self._needed:
            self._parse(now)

    def _on_ended(self, now: float) -> None:
        if self.closed:
            if self._goodbye_until < inf:
                self._ended = True
                self._end_socket(now)
            return
        self._ended = True
        if not self.keeps_open:
            self._close_at = now + self._settings.linger_seconds

    def _parse(self, now: float) -> None:
        if not self._chunks and self._at >= len(self._data):
            return
        if self._chunks:
            rest = self._data[self._at :]
            self._data = b"".join((rest, *self._chunks)) if rest or len(self._chunks) > 1 else self._chunks[0]
            self._at = 0
            self._chunks.clear()
        data, end, packets = self._data, len(self._data), 0
        view = memoryview(data)  # a large payload is copied once, by the codec
        size_max = self._settings.packet_bytes_max
        while self._at < end and not self.holds:
            if self.state is State.OPEN:
                inbox = Inbox()
                self._at = scan(data, self._at, self.version, inbox, self._topic_of, self._names, size_max)
                if inbox.acked:
                    self._effects.append(Acked(inbox.acked))
                if inbox.topics:
                    self._count(len(inbox.packet_ids))
                    self._effects.append(Publishes(inbox))
            if self._at >= end or self.closed:
                break
            if packets >= self._settings.packets_per_turn:
                self._hold(Hold.TURN)
                self._effects.append(InNextTurn(Release(Hold.TURN)))
                break
            if self.state is State.NEW and data[self._at] >> 4 != p.CONNECT:
                self._packet = (data[self._at], b"")
                raise PeerError("the first packet is not a CONNECT", Reason.PROTOCOL_ERROR)
            self._packet = (data[self._at], view[self._at + 2 : self._at + 64])
            found = codec.frame(data, self._at, size_max)
            if found is None:
                self._needed = _needed(data, self._at)
                break
            first, start, stop = found
            self._packet = (first, view[start:stop])
            self._at = stop
            packets += 1
            self._on_packet(first, view[start:stop], now)
        self._packet = None
        self.waiting = max(0, end - self._at)
        if not self.waiting or self.closed:
            self._data, self._at = b"", 0
            self._needed = 1
            self.waiting = 0

    def _topic_of(self, raw: bytes, alias: int) -> str | None:
        """A topic the shared table does not know yet; None: the codec's way, which knows what to say."""
        topic = self._names.get(raw) if raw else None
        if topic is None and raw:
            topic = topic_name(raw)  # what is malformed is so whatever its alias
            if not self._allowed(topic):
                return None
            if len(raw) <= NAME_BYTES_MAX:
                if len(self._names) > NAMES_MAX:
                    self._names.clear()
                self._names[raw] = topic
        if alias:
            if alias > self._settings.topic_alias_maximum:
                raise PeerError(f"topic alias {alias} is above our maximum", Reason.TOPIC_ALIAS_INVALID)
            if not raw:
                known = self._aliases.get(alias)
                if known is None:
                    raise PeerError(f"topic alias {alias} was never set", Reason.PROTOCOL_ERROR)
                return known
            assert topic is not None
            self._aliases[alias] = topic
        return topic

    def _allowed(self, topic: str) -> bool:
        if topic[0] == "$":
            return False
        return self._may_publish is None or self._may_publish(topic)

    def _set_rights(self, may_publish: Callable[[str], bool] | None) -> None:
        self._may_publish = may_publish
        # Whoever may not publish everywhere has a table of its own, in which only what it may is found.
        self._names = self._shared_names if may_publish is None else {}
        if may_publish is not None:
            self._aliases = {alias: topic for alias, topic in self._aliases.items() if self._allowed(topic)}

    # ------------------------------------------------------------------------------------------ packets

    def _on_packet(self, first: int, body: memoryview, now: float) -> None:
        if self.state is State.NEW:
            packet = codec.decode(first, body, p.V311)
            assert isinstance(packet, p.Connect)
            self._move(State.JOINING)
            self._close_at = now + self._settings.join_seconds
            self._hold(Hold.JOIN)
            self._effects.append(Join(packet))
            return
        packet = codec.decode(first, body, self.version)
        match packet:
            case p.Publish():
                self._on_publish(packet)
            case p.Puback() | p.Pubrec() | p.Pubcomp():
                self._effects.append(AckedOne(packet))
            case p.Pubrel():
                self._on_pubrel(packet)
            case p.Subscribe() | p.Unsubscribe():
                self._hold(Hold.CONTROL)
                self._effects.append(Control(packet))
            case p.Pingreq():
                self._write(b"\xd0\x00")
            case p.Disconnect():
                self._on_disconnect(packet, now)
            case p.Connect():
                raise PeerError("a second CONNECT", Reason.PROTOCOL_ERROR)
            case _:
                raise PeerError(f"{type(packet).__name__} was not expected", Reason.PROTOCOL_ERROR)

    def _on_welcome(self, welcome: Welcome, now: float) -> None:
        self.version, self._inbound = welcome.version, welcome.inbound
        self._packet_max, self._explain = welcome.packet_max, welcome.explain
        self._session_expiry = welcome.session_expiry
        self._keep_alive_seconds, self._expires_at = welcome.keep_alive_seconds, welcome.expires_at
        self._set_rights(welcome.may_publish)
        if len(welcome.connack) > self._packet_max:
            self._end(b"", "its CONNACK is larger than it takes", now)
            return
        self._move(State.OPEN)
        self._close_at = inf
        self._last_seen = now
        # The answer leaves at once: what follows belongs to an open connection.
        self._write(welcome.connack)

    def _count(self, more: int) -> None:
        self.under_way += more
        if self.version == p.V5 and self.under_way > self._settings.receive_maximum:
            raise PeerError(f"{self.under_way} publishes under way", Reason.RECEIVE_MAXIMUM_EXCEEDED)

    def _on_publish(self, packet: p.Publish) -> None:
        """A PUBLISH that the fast path left: QoS 2, one that is refused, or one that is unusual."""
        topic = packet.topic
        if packet.topic_alias or not topic:
            found = self._topic_of(topic.encode(), packet.topic_alias)
            topic = found if found is not None else topic
        if not topic:
            raise PeerError("a PUBLISH without topic or alias", Reason.PROTOCOL_ERROR)
        qos, packet_id = packet.qos, packet.packet_id
        self._hold_back(len(topic) + len(packet.payload) + len(packet.properties))
        if topic[0] == "$":
            self._effects.append(PublishControl(topic, packet.payload, qos, packet_id, packet.retain))
            self._asked += 1
            if self._asked >= self._settings.asked_max:
                self._hold(Hold.ANSWER)
            return
        if not self._allowed(topic):
            self._answer(Answered(qos, packet_id, Reason.NOT_AUTHORIZED))
            return
        repeated = qos == 2 and packet_id in self._inbound
        if qos == 2 and not repeated and self._inbound.in_doubt:
            # One of an earlier connection has failed since, and this may be it: whoever comes back finds that out.
            raise PeerError("nobody knows which publishes are stored", Reason.SERVER_BUSY)
        if qos and not repeated:
            self._count(1)
        if repeated:
            self._effects.append(AfterCommit(StoredBefore(packet_id)))
            return
        if qos == 2:
            self._inbound.take(packet_id)
        flags = qos | (RETAIN if packet.retain else 0)
        self._effects.append(PublishOne(topic, packet.payload, flags, packet.properties or None, qos, packet_id))

    def _hold_back(self, size: int) -> None:
        """A client that sends faster than the log takes waits for what it sent; the fast path has its own way."""
        self._long_way += size + 64
        if self._long_way > self._settings.long_way_bytes:
            self._long_way = 0
            self._hold(Hold.COMMIT)
            self._effects.append(AfterCommit(Release(Hold.COMMIT)))

    def _answer(self, answered: Answered) -> None:
        """To what goes nowhere: MQTT 5 has words for a refusal; in MQTT 3 it is acknowledged all the same."""
        explain = answered.why and self._explain and self._packet_max > 1024
        properties: p.Properties = {"reason_string": answered.why[:300]} if explain else {}
        if answered.qos == 1:
            packet: p.Puback | p.Pubrec = p.Puback(answered.packet_id, answered.reason, properties)
        elif answered.qos == 2:
            packet = p.Pubrec(answered.packet_id, answered.reason, properties)
        else:
            return
        self._effects.append(AfterCommit(Say(codec.encode(packet, self.version))))

    def _on_stored(self, inbox: Inbox, heard: frozenset[str] | set[str] | None) -> None:
        """One write, in the order the publishes came."""
        ids = inbox.packet_ids
        if not ids or self.closed:
            return
        self.under_way -= len(ids)
        if heard is not None and self.version == p.V5 and not heard.issuperset(inbox.topics):
            self._write(pubacks_where(ids, inbox.topics, inbox.flags, heard))
        else:
            self._write(pubacks(ids))

    def _on_stored_one(self, qos: int, packet_id: int, ok: bool, now: float) -> None:
        if not ok:
            if qos == 2:
                self._inbound.failed(packet_id)
            if not self.closed:
                self._close(Reason.SERVER_BUSY, "publishes could not be stored", now)
            return
        if qos == 1:
            self.under_way -= 1
            self._write(b"\x40\x02" + PACKET_IDS[packet_id])
        else:
            self._inbound.stored(packet_id)
            self._write(b"\x50\x02" + PACKET_IDS[packet_id])

    def _on_stored_before(self, packet_id: int, now: float) -> None:
        """Whether the batch it waited for was stored says nothing: the publish was in an earlier one."""
        if self._inbound.is_stored(packet_id):
            self._write(b"\x50\x02" + PACKET_IDS[packet_id])
        else:
            self._close(Reason.SERVER_BUSY, "publishes could not be stored", now)

    def _on_pubrel(self, packet: p.Pubrel) -> None:
        if packet.packet_id in self._inbound:
            if self._inbound.born:
                self._inbound.free(packet.packet_id)
                self._effects.append(FreeId(packet.packet_id))
            else:
                self._on_id_freed(packet.packet_id)
        elif self.version == p.V5:
            self._write(codec.encode(p.Pubcomp(packet.packet_id, Reason.PACKET_ID_NOT_FOUND), self.version))
        else:
            self._write(b"\x70\x02" + PACKET_IDS[packet.packet_id])

    def _on_id_freed(self, packet_id: int) -> None:
        """Another connection of the session may have asked for the same before."""
        self._inbound.forget(packet_id)
        self.under_way = max(0, self.under_way - 1)
        self._write(b"\x70\x02" + PACKET_IDS[packet_id])

    def _on_disconnect(self, packet: p.Disconnect, now: float) -> None:
        expiry = packet.properties.get("session_expiry")
        if expiry and not self._session_expiry:
            raise PeerError("DISCONNECT revives a session that ends with it", Reason.PROTOCOL_ERROR)
        self._end(b"", "good-bye", now, goodbye=packet.reason == 0, expiry=expiry)

    # ------------------------------------------------------------------------------------------- ending

    def _broke_mqtt(self, error: PeerError, now: float) -> None:
        """The client broke MQTT: tell it what was wrong, and end it."""
        if self.closed:
            return
        first, body = self._packet or (0, b"")
        version = self.version if self.state is State.OPEN else None
        self._end(codec.farewell(error, first, body, version, explain=False), str(error), now)

    def _close(self, reason: int, why: str, now: float, server: str = "") -> None:
        if self.closed:
            return
        last = b""
        if self.version == p.V5:
            last = codec.encode_disconnect(p.Disconnect(reason, _elsewhere(server)), self.version)
            if len(last) > self._packet_max:
                last = codec.encode_disconnect(p.Disconnect(reason), self.version)
        self._end(last, why, now)

    def _end(self, last: bytes, why: str, now: float, *, goodbye: bool = False, expiry: int | None = None) -> None:
        if self.closed:
            return
        if last:
            self._write(last)
        self._flush()
        self._leave(why, goodbye=goodbye, expiry=expiry)
        self._move(State.CLOSING)
        self._data, self._at, self.waiting = b"", 0, 0
        self._chunks.clear()
        if goodbye and not self._ended:
            # A client that waits for the end knows that its good-bye is durable.
            self._close_at, self._goodbye_until = inf, now + self._settings.goodbye_seconds
        else:
            self._end_socket(now)

    def _end_socket(self, now: float) -> None:
        self._goodbye_until = inf
        self._effects.append(CloseSocket() if self._ended else EndSending())
        self._close_at = now + self._settings.linger_seconds

    def _leave(self, why: str, *, goodbye: bool = False, expiry: int | None = None) -> None:
        """Said once, whatever ends it first."""
        if not self.closed:
            self._effects.append(Leave(goodbye, expiry, why))

    def _move(self, to: State) -> None:
        if to is self.state is State.CLOSED:
            return
        self.moves.append(_MOVES[self.state, to])
        if to not in LEGAL[self.state]:
            raise BrokenInvariant(f"a connection may not go from {self.state.name} to {to.name}", self.moves)
        self.state = to


def _elsewhere(server: str) -> p.Properties:
    return {"server_reference": server} if server else {}


def _needed(data: bytes, at: int) -> int:
    """How many bytes the incomplete packet at `at` takes at least, to the end of its length if that is all there is."""
    length, shift = 0, 0
    for place in range(at + 1, min(at + 5, len(data))):
        length |= (data[place] & 0x7F) << shift
        if data[place] < 0x80:
            return place + 1 - at + length
        shift += 7
    return len(data) - at + 1
