"""MQTT clients that really speak MQTT, and misbehave: they stall, acknowledge late or not at all, vanish, come back."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from holdfast.mqtt import codec
from holdfast.mqtt import packets as p
from holdfast.mqtt import properties as props
from holdfast.sim.front.checkers import SHARED_FROM, Consumer
from holdfast.sim.front.sockets import Socket
from holdfast.sim.front.subscribing import START_PROPERTY

if TYPE_CHECKING:
    from holdfast.sim.front.workload import FrontWorkload

CONNECT_SECONDS = 1.5


@dataclass(frozen=True, slots=True)
class Profile:
    """What a client is like, drawn once."""

    name: str
    version: int = p.V5
    durable: bool = True
    receive_maximum: int = 65_535
    packet_max: int = 1 << 30
    keep_alive: int = 0
    ack_seconds: float = 0.005
    acks: bool = True
    """Otherwise not before the weather clears."""
    refuses: float = 0.0
    """Chance that a message is acknowledged with an error."""
    link_seconds: float = 0.002
    piece: int = 4000
    rap: bool = False
    no_local: bool = False
    identifiers: bool = False
    shares: str = ""
    """The shared subscription it is in, if any."""
    own: bool = True


@dataclass(slots=True)
class Out:
    """A publish that has not been answered for good."""

    name: str
    topic: str
    qos: int
    retain: bool
    size: int
    expiry: int
    attempt: int = 0
    released: bool = False

    @property
    def payload(self) -> bytes:
        if not self.size:
            return b""
        return f"{self.name}.{self.attempt}|".encode().ljust(self.size, b".")


@dataclass(slots=True)
class Wish:
    """A subscription the client wants."""

    filter: str
    qos: int
    retain_handling: int = 0
    identifier: int = 0
    start: str = ""
    acked: bool = False


@dataclass(slots=True)
class _Taken:
    payload: bytes
    qos: int


@dataclass(slots=True)
class _Link:
    """One connection of the client."""

    socket: Socket
    buffer: bytearray = field(default_factory=bytearray)
    open: bool = False
    answered: dict[int, bytes] = field(default_factory=dict)
    """What was acknowledged under each packet id: a repeat that crossed with its answer is answered again."""
    taken: dict[int, _Taken] = field(default_factory=dict)
    """Packet ids of deliveries that are not acknowledged."""
    room: int = 50


class Client:
    def __init__(self, run: FrontWorkload, profile: Profile):
        self.run, self.world, self.profile, self.name = run, run.world, profile, profile.name
        self.link: _Link | None = None
        self.wishes: dict[str, Wish] = {}
        self.unanswered: dict[int, Out] = {}
        """Publishes of QoS 1 and 2 by packet id."""
        self.queue: deque[Out] = deque()
        self.asked: dict[int, list[Wish]] = {}
        """SUBSCRIBEs under way."""
        self.half_done: dict[int, bytes] = {}
        """QoS 2 deliveries between PUBREC and PUBREL, and what they are: nothing else may come under their ids."""
        self.held: list[tuple[_Link, int]] = []
        self.clean_next = False
        self.wanted = True
        """It wants to be connected."""
        self._silent_until = 0.0
        self._packet_id = 0
        self._published = 0
        self._identifier = 0
        run.truth.consumers[self.name] = Consumer(
            self.name, bool(profile.shares) and not profile.own, profile.rap, profile.packet_max
        )

    # -- the connection ------------------------------------------------------------------------------------

    def connect(self) -> None:
        if self.link is not None or not self.wanted:
            return
        profile, world = self.profile, self.world
        front = self.run.front
        socket = None if front is None else front.accept(self, seconds=profile.link_seconds, piece=profile.piece)
        if socket is None:
            world.after(0.3, self.connect)
            return
        link = self.link = _Link(socket)
        clean = (self.clean_next or not profile.durable) and not world.healing
        self.clean_next = False
        properties: p.Properties = {}
        if profile.version == p.V5:
            if profile.durable:
                properties["session_expiry"] = 10_000
            properties["receive_maximum"] = profile.receive_maximum
            if profile.packet_max < 1 << 30:
                properties["maximum_packet_size"] = profile.packet_max
        else:
            clean = not profile.durable
        world.tell(self.name, f"connects{' clean' if clean else ''}")
        if clean:
            self.node_forgets()
        self._send(link, p.Connect(self.name, profile.version, clean, profile.keep_alive, properties=properties))
        world.after(CONNECT_SECONDS, lambda: self._give_up(link))

    def _give_up(self, link: _Link) -> None:
        if self.link is link and not link.open:
            self.lose("reset")

    def lose(self, how: str) -> None:
        """disconnect, shut, reset or vanish."""
        link = self.link
        if link is None:
            return
        self.world.tell(self.name, f"loses its connection: {how}")
        self.link = None
        self.asked.clear()
        if how == "disconnect":
            self._send(link, p.Disconnect())
            link.socket.shut()
        elif how == "shut":
            link.socket.shut()
        elif how == "reset":
            link.socket.reset()
        else:
            link.socket.vanish()
        self.come_back()

    def come_back(self) -> None:
        seconds = self.world.rng.choice([0.0, 0.005, 0.1, 1.0])
        self.world.after(seconds, self.connect)

    def ended(self, socket: Socket) -> None:
        if self.link is not None and self.link.socket is socket:
            self.world.tell(self.name, "sees its connection end")
            self.link = None
            self.asked.clear()
            self.come_back()

    def stall(self, seconds: float) -> None:
        link = self.link
        if link is not None:
            self.world.tell(self.name, f"does not read for {seconds:.1f} s")
            link.socket.read(False)
            self.world.after(seconds, lambda: link.socket.read(True))

    def hold_acks(self, seconds: float) -> None:
        """It reads, and acknowledges nothing for a while."""
        self._silent_until = self.world.now + seconds
        if self.profile.acks:
            self.world.after(seconds, self._ack_held)

    def ping(self, link: _Link) -> None:
        if self.link is link and link.open and link.socket.client_open:
            self._send(link, p.Pingreq())
            self.world.after(self.profile.keep_alive * 0.6, lambda: self.ping(link))

    def _send(self, link: _Link, *packets: p.Packet) -> None:
        link.socket.send(b"".join(codec.encode(packet, self.profile.version) for packet in packets))

    def _next_id(self) -> int:
        while True:
            self._packet_id = self._packet_id % 65_535 + 1
            if self._packet_id not in self.unanswered:
                return self._packet_id

    # -- publishing ----------------------------------------------------------------------------------------

    def publish(self, topic: str, qos: int, *, retain: bool = False, size: int = 30, expiry: int = 0) -> None:
        self._published += 1
        name = f"{self.name}-{self._published}"
        self.queue.append(Out(name, topic, qos, retain, max(size, len(name) + 4) if size else 0, expiry))
        self.run.truth.largest_payload = max(self.run.truth.largest_payload, size)
        self.flow()

    def flow(self) -> None:
        link = self.link
        if link is None or not link.open:
            return
        out = []
        while self.queue and (not self.queue[0].qos or len(self.unanswered) < link.room):
            publish = self.queue.popleft()
            packet_id = 0
            if publish.qos:
                packet_id = self._next_id()
                self.unanswered[packet_id] = publish
            out.append(self._packet(publish, packet_id))
        if out:
            self._send(link, *out)

    def _packet(self, out: Out, packet_id: int, dup: bool = False) -> p.Publish:
        extra = b""
        if out.expiry and self.profile.version == p.V5:
            extra = props.encode({"message_expiry": out.expiry})
        return p.Publish(out.topic, out.payload, out.qos, out.retain, dup, packet_id, extra)

    def _publish_again(self, link: _Link, present: bool) -> None:
        """What was not answered; of QoS 2, what the node may have forgotten may come twice."""
        again: list[p.Packet] = []
        for packet_id, out in list(self.unanswered.items()):
            if out.released:
                if present:
                    again.append(p.Pubrel(packet_id))
                else:
                    del self.unanswered[packet_id]
                continue
            out.attempt += 1
            if not present:
                self.run.truth.may_repeat.add(out.name.encode())
            again.append(self._packet(out, packet_id, dup=True))
        if again:
            self._send(link, *again)

    def node_forgets(self) -> None:
        for out in self.unanswered.values():
            self.run.truth.may_repeat.add(out.name.encode())

    # -- subscribing ---------------------------------------------------------------------------------------

    @property
    def own_filters(self) -> list[str]:
        return [text for text in self.wishes if not text.startswith("$")]

    def subscribe(self, filters: list[str], start: str = "") -> None:
        rng, profile = self.world.rng, self.profile
        wishes = []
        self._identifier += 1
        for text in filters:
            shared = text.startswith("$")
            identifier = 0
            if profile.version == p.V5 and (shared or profile.identifiers):
                identifier = self._identifier + (SHARED_FROM if shared else 0)
            wish = Wish(
                text, rng.choice([0, 1, 1, 2]), 2 if profile.rap else rng.choice([0, 0, 1, 2]), identifier, start
            )
            self.wishes[text] = wish
            wishes.append(wish)
        self._ask(wishes)

    def _ask(self, wishes: list[Wish]) -> None:
        link = self.link
        if link is None or not link.open or not wishes:
            return
        packet_id = self._next_id()
        self.asked[packet_id] = wishes
        v5 = self.profile.version == p.V5
        properties: p.Properties = {}
        if wishes[0].start and v5:
            properties["user_properties"] = [(START_PROPERTY, wishes[0].start)]
        requests = tuple(
            p.FilterRequest(
                w.filter,
                w.qos,
                v5 and self.profile.no_local and not w.filter.startswith("$"),
                v5 and self.profile.rap,
                w.retain_handling if v5 else 0,
            )
            for w in wishes
        )
        self.world.tell(self.name, f"subscribes to {[w.filter for w in wishes]} {wishes[0].start}")
        self._send(link, p.Subscribe(packet_id, requests, wishes[0].identifier, properties))

    def unsubscribe(self, filter_text: str) -> None:
        self.wishes.pop(filter_text, None)
        if self.link is not None and self.link.open:
            self.world.tell(self.name, f"unsubscribes from {filter_text}")
            self._send(self.link, p.Unsubscribe(self._next_id(), (filter_text,)))

    # -- what comes ----------------------------------------------------------------------------------------

    def received(self, socket: Socket, data: bytes) -> None:
        link = self.link
        if link is None or link.socket is not socket:
            return
        link.buffer += data
        at = 0
        version = self.profile.version
        while True:
            framed = codec.frame(link.buffer, at)
            if framed is None:
                break
            first, start, stop = framed
            packet = codec.decode_for_client(first, bytes(link.buffer[start:stop]), version)
            at = stop
            if self.link is not link:
                return
            self._on_packet(link, packet)
        del link.buffer[:at]

    def _on_packet(self, link: _Link, packet: p.Packet) -> None:
        match packet:
            case p.Connack():
                self._on_connack(link, packet)
            case p.Publish():
                self._on_publish(link, packet)
            case p.Puback(packet_id, reason):
                out = self.unanswered.get(packet_id)
                if out is not None:
                    del self.unanswered[packet_id]
                    self._stored(out, reason)
                self.flow()
            case p.Pubrec(packet_id, reason):
                out = self.unanswered.get(packet_id)
                if out is not None and not out.released:
                    self._stored(out, reason)
                    out.released = True
                self._send(link, p.Pubrel(packet_id))
            case p.Pubcomp(packet_id):
                self.unanswered.pop(packet_id, None)
                self.flow()
            case p.Pubrel(packet_id):
                self.half_done.pop(packet_id, None)
                link.taken.pop(packet_id, None)
                self._send(link, p.Pubcomp(packet_id))
            case p.Suback(packet_id):
                for wish in self.asked.pop(packet_id, ()):
                    wish.acked, wish.start = True, ""
            case p.Disconnect(reason):
                self.world.tell(self.name, f"is told good-bye: 0x{reason:02X}")
                if reason in (0x81, 0x82, 0x93, 0x95):
                    self.run.truth.fail("MQTT", f"{self.name} is ended with 0x{reason:02X}")

    def _stored(self, out: Out, reason: int) -> None:
        if reason < 0x80 and out.size:
            self.run.truth.acknowledged(out.name.encode())

    def _on_connack(self, link: _Link, packet: p.Connack) -> None:
        if packet.reason:
            self.world.tell(self.name, f"is refused: 0x{packet.reason:02X}")
            self.lose("reset")
            return
        link.open = True
        link.room = packet.properties.get("receive_maximum", 50)
        present = packet.session_present
        self.world.tell(self.name, f"is connected{' again' if present else ''}")
        if not present:
            self.half_done.clear()
            for wish in self.wishes.values():
                wish.acked = False
        if self.profile.keep_alive:
            self.ping(link)
        self._publish_again(link, present)
        self.flow()
        for wish in self.wishes.values():
            if not wish.acked:
                self._ask([wish])

    def _on_publish(self, link: _Link, packet: p.Publish) -> None:
        truth, packet_id = self.run.truth, packet.packet_id
        if not packet.qos:
            return
        known = link.taken.get(packet_id)
        if packet.dup and known is None and link.answered.get(packet_id) == packet.payload:
            self._send(link, p.Puback(packet_id) if packet.qos == 1 else p.Pubrec(packet_id, 0x83))
            return
        if known is not None and known.payload != packet.payload:
            truth.fail("MQTT", f"{self.name} gets packet id {packet_id} for something else")
        if packet.qos == 2 and self.half_done.get(packet_id, packet.payload) != packet.payload:
            truth.fail("MQTT", f"{self.name} gets packet id {packet_id} for something else before it was released")
        link.taken[packet_id] = _Taken(packet.payload, packet.qos)
        if len(link.taken) > self.profile.receive_maximum:
            truth.fail("MQTT", f"{self.name} gets {len(link.taken)} at a time")
        if known is not None:
            return
        if (self.profile.acks and self.world.now >= self._silent_until) or self.world.healing:
            seconds = 0.003 if self.world.healing else self.profile.ack_seconds
            self.world.after(self.world.rng.random() * seconds, lambda: self._ack(link, packet_id))
        else:
            self.held.append((link, packet_id))

    def _ack(self, link: _Link, packet_id: int) -> None:
        taken = link.taken.get(packet_id)
        if self.link is not link or taken is None:
            return
        reason = 0x83 if self.profile.version == p.V5 and self.world.chance(self.profile.refuses) else 0
        if taken.qos == 1:
            link.answered[packet_id] = link.taken.pop(packet_id).payload
            self._send(link, p.Puback(packet_id, reason))
            return
        if packet_id not in self.half_done:
            if reason:
                link.answered[packet_id] = link.taken.pop(packet_id).payload
            else:
                self.half_done[packet_id] = taken.payload
        else:
            reason = 0
        self._send(link, p.Pubrec(packet_id, reason))

    def heal(self) -> None:
        """From here on it reads and acknowledges."""
        self.wanted = True
        if self.link is None:
            self.connect()
        else:
            self.link.socket.read(True)
        self._ack_held()

    def _ack_held(self) -> None:
        held, self.held = self.held, []
        for link, packet_id in held:
            self._ack(link, packet_id)

    def __repr__(self) -> str:
        return f"<client {self.name}>"
