"""The simulated node's sessions, as in `runtime.sessions`: the host of their lives.

One machine per client id with something going on decides; here its effects are performed, on the simulated disk.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from math import inf
from typing import TYPE_CHECKING

from holdfast.delivery.outlet import NO_LIMIT, Outlet
from holdfast.errors import PeerError
from holdfast.machine import TICK, Send
from holdfast.model import Stream
from holdfast.mqtt import codec
from holdfast.mqtt import packets as p
from holdfast.mqtt.connection import Say, Welcome
from holdfast.mqtt.inbound import Inbound
from holdfast.mqtt.reasons import Reason
from holdfast.sessions import life
from holdfast.sessions.changes import Content
from holdfast.sessions.clock import StoreClock
from holdfast.sessions.life import LifeSettings, SessionLife, SessionNode, State, answer_unheld
from holdfast.sessions.outgoing import RetainedOrigin
from holdfast.sessions.positions import StreamOrigin
from holdfast.sessions.rows import Rows
from holdfast.sessions.session import NEVER, Session
from holdfast.sessions.stored import RetainedBefore, content_of, filters_of, restore
from holdfast.sessions.table import RowWrite, SessionRow, StoredWill
from holdfast.sessions.window import RELEASED, Delivery
from holdfast.sim.front.disk import StoreDown, rows_at
from holdfast.sim.front.world import Pending, Work

if TYPE_CHECKING:
    from holdfast.sim.front.checkers import Saved
    from holdfast.sim.front.connection import SimConnection
    from holdfast.sim.front.node import SimFront

AGAIN_AT_ONCE = 5
COPY_SECONDS = 1.0


@dataclass(slots=True, eq=False)
class Claim:
    """One connection's CONNECT, from when it arrives until the connection is over."""

    token: str
    client_id: str
    connection: SimConnection
    packet: p.Connect
    answer: Pending


@dataclass(slots=True, eq=False)
class Live:
    """A client id with something going on."""

    machine: SessionLife
    session: Session | None = None
    claim: Claim | None = None
    armed: float = inf
    inbound: Inbound | None = None
    saving: dict[int, Pending] = field(default_factory=dict)
    saved: dict[Content, Saved] = field(default_factory=dict)
    """What the checkers know of each content that its machine was given."""


class SimSessions:
    def __init__(self, front: SimFront, settings: LifeSettings):
        self.front, self.world = front, front.world
        self.node = SessionNode(front.name, StoreClock(settings.margin_secs), settings, filters_of)
        self.live: dict[str, Live] = {}
        self._claims: dict[str, Claim] = {}
        self.connections: dict[str, SimConnection] = {}
        self._events: deque[tuple[str, life.Event]] = deque()
        self._busy = False
        self._numbers = 0
        self._lapse_at = inf
        self._copied: Mapping[Stream, int] = {}
        self._copied_until = 0.0
        self.closing = False

    def held(self) -> set[str]:
        return set(self.live)

    # -- the lease -----------------------------------------------------------------------------------------

    @property
    def frozen(self) -> bool:
        return self.world.now >= self.node.trusted_until

    def granted(self, lease: int, asked_at: float) -> None:
        self.world.tell("node", f"has the lease {lease}")
        self.node.granted(lease, asked_at)
        self._tick_all()

    def renewed(self, asked_at: float) -> None:
        lapsed = self.frozen
        self.node.renewed(asked_at)
        if lapsed:
            self._tick_all()
        else:
            self._watch_lapse()

    def lost(self) -> None:
        self.world.tell("node", f"has lost its lease {self.node.lease}")
        self.node.lost()
        self._tick_all()

    def _tick_all(self) -> None:
        for client_id in list(self.live):
            self._give(client_id, TICK)
        self._watch_lapse()

    def _watch_lapse(self) -> None:
        if (wait := self.node.trusted_until - self.world.now) > 0:
            self._lapse_at = at = self.world.now + wait + 0.001
            self.world.after(at - self.world.now, lambda: self._lapsed(at), self.front.life)

    def _lapsed(self, at: float) -> None:
        if at == self._lapse_at:
            self._tick_all()

    # -- machines ------------------------------------------------------------------------------------------

    def _give(self, client_id: str, event: life.Event) -> None:
        """One event after the other: what an effect leads to is given when all effects are performed."""
        self._events.append((client_id, event))
        if self._busy:
            return
        self._busy = True
        while self._events:
            self._handle(*self._events.popleft())
        self._busy = False

    def _handle(self, client_id: str, event: life.Event) -> None:
        live, now = self.live.get(client_id), self.world.now
        if live is None:
            if not isinstance(event, life.Connect):
                return
            machine = SessionLife(client_id, self.node, lambda leaving: self._content(client_id, leaving))
            live = self.live[client_id] = Live(machine)
        for effect in live.machine.handle(event, now):
            self._perform(client_id, live, effect)
        if isinstance(event, life.Gone) and live.claim is not None and live.claim.token == event.token:
            self._detach(live, live.claim)  # only now: what its machine saves is what it was until now
        if self.live.get(client_id) is not live:
            return
        deadline = live.machine.deadline
        if event is TICK and deadline <= now:
            self.front.truth.fail("no machine spins", f"{client_id} is {live.machine.state.name}, due at {deadline}")
        if deadline < live.armed:
            live.armed = deadline
            self.world.after(max(0.0, deadline - now), lambda: self._tick(client_id, live, deadline), self.front.life)

    def _tick(self, client_id: str, live: Live, armed: float) -> None:
        if live.armed == armed and self.live.get(client_id) is live:
            live.armed = inf
            self._give(client_id, TICK)

    def _perform(self, client_id: str, live: Live, effect: life.Effect) -> None:
        match effect:
            case life.WriteRow(write):
                self.world.tell(client_id, f"[{live.machine.state.name}] {show(write)}")
                self._write(client_id, live, write)
            case life.ReadRow(number):
                self.front.rows.read(client_id, number, lambda found: self._give(client_id, found))
            case life.Welcome():
                self._welcome(live, effect)
            case life.Saved(number):
                if (saving := live.saving.pop(number, None)) is not None:
                    saving.settle()
            case life.Refuse(token, reason):
                if (claim := self._claims.pop(token, None)) is not None:
                    claim.answer.fail(PeerError("the session cannot be had just now", reason))
            case life.Close(token, reason):
                if reason is not None and (claim := self._claims.get(token)) is not None:
                    self._end_claim(claim, reason)
            case life.Freeze(token):
                if (claim := self._claims.get(token)) is not None:
                    self.world.tell(client_id, "is frozen")
                    claim.connection.freeze(True)
            case life.Resume(token):
                if (claim := self._claims.get(token)) is not None:
                    self.world.tell(client_id, "goes on")
                    claim.connection.freeze(False)
            case Send(_, message):
                # To the node of that name, which is this one: earlier processes of it are gone.
                self.world.after(self.world.rng.random() * 0.02, lambda: self.deliver(message), self.front.life)
            case life.Forget():
                if self.live.get(client_id) is live and live.machine.state is State.NONE:
                    del self.live[client_id]

    def _write(self, client_id: str, live: Live, write: RowWrite) -> None:
        row = write.row
        content = Content(row.subscriptions, row.cursors, row.packets)
        if write.take and row.born == row.connect and content == Content():
            live.saved.clear()  # another session: what was saved of the one before is over
        saved = live.saved.get(content)
        inbound = live.inbound if live.session is None else live.session.inbound

        def go() -> None:
            self.front.rows.write((write, saved), lambda answer: self._written(client_id, live, write, answer))

        if inbound is None or (row.lease is not None and not write.take):
            go()
        else:
            inbound.when_settled(go)

    def _written(self, client_id: str, live: Live, write: RowWrite, answer: life.Written | life.Failed) -> None:
        row = answer.verdict.row if isinstance(answer, life.Written) and answer.verdict.accepted else None
        inbound = live.inbound if live.session is None else live.session.inbound
        if row is not None and inbound is not None:
            inbound.epoch = row.epoch
        if row is not None and write.subscribed:
            self.front.delivery.filters_changed(dict.fromkeys(write.subscribed, 1), whole=False)
        if self.world.trace is not None:
            self.world.tell(client_id, f"hears {show(answer)}")
        if self.live.get(client_id) is not live:
            self.front.truth.fail("nothing is forgotten", f"the machine of {client_id} is gone before its write is")
        self._give(client_id, answer)

    def deliver(self, message: life.Release | life.Released) -> None:
        if message.client_id in self.live:
            self._give(message.client_id, message)
        elif isinstance(message, life.Release):
            for send in answer_unheld(message, self.node):
                self.deliver(send.message)

    def _content(self, client_id: str, leaving: bool) -> Content:
        live = self.live[client_id]
        session, row, truth = live.session, live.machine.row, self.front.truth
        if session is None or live.claim is None:
            return Content() if row is None else Content(row.subscriptions, row.cursors, row.packets)
        content = content_of(session, self.front.delivery.heads, live.claim.token if leaving else "")
        truth.check_content(session, content)
        live.saved[content] = truth.saving(client_id, leaving)
        return content

    # -- a client comes ------------------------------------------------------------------------------------

    def join(self, connection: SimConnection, packet: p.Connect) -> Work:
        """Returns once its client may be heard: welcome, and sent again what was in flight."""
        client_id, truth = packet.client_id, self.front.truth
        claim = Claim(f"{client_id}#{truth.number()}", client_id, connection, packet, self.world.pending())
        self._claims[claim.token] = claim
        connection.claim = claim.token
        connect = life.Connect(claim.token, packet.clean_start, effective_expiry(packet), _stored(packet))
        truth.lives.arrived(client_id, connect)
        self._give(client_id, connect)
        yield claim.answer
        session, outlet = connection.session, connection.outlet
        if session is None or outlet is None:
            return
        self.front.lending.returned(connection, session)
        try:
            if session.inbound.in_doubt:
                table = self.front.disk.table
                received = yield from self.front.rows.call(lambda: table.received([client_id]))
                session.inbound.found(received.get(client_id, {}))
            if session.positions.is_beyond(self.front.delivery.heads, session.window):
                yield from self.front.delivery.caught_up()
            yield from self._send_again(connection, session)
        except StoreDown:
            connection.close(Reason.SERVER_BUSY)
        if connection.session is not session or connection.outlet is None:
            return
        decision = session.attach(self.front.delivery.heads, self.world.now)
        if decision.gaps:
            self._give(client_id, life.Moved())
        self.front.delivery.attach(outlet, connection)
        for filter_text, subscription in session.subscriptions.shared.items():
            self.front.lending.join(connection, session, filter_text, subscription)

    def _welcome(self, live: Live, welcome: life.Welcome) -> None:
        claim = self._claims.get(welcome.token)
        if claim is None or claim.connection.closed or claim.connection.socket.closing:
            self._events.append((live.machine.client_id, life.Gone(welcome.token)))
            return
        row, truth = welcome.row, self.front.truth
        session = self._restore(row, welcome.previous)
        self._take_inbound(live, session, welcome)
        live.session, live.claim = session, claim
        self.connections[claim.client_id] = claim.connection
        truth.lives.welcomed(welcome)
        truth.welcomed(session, welcome.session_present, self.front.disk.table.saved.get(claim.client_id))
        self._say_welcome(claim, session, welcome.session_present)
        claim.answer.settle(welcome.session_present)

    def _say_welcome(self, claim: Claim, session: Session, present: bool) -> None:
        packet, properties = claim.packet, claim.packet.properties
        answer: p.Properties = {}
        if packet.version == p.V5:
            answer["receive_maximum"] = self.front.connection_settings.receive_maximum
        packet_max = properties.get("maximum_packet_size", NO_LIMIT)
        window = min(properties.get("receive_maximum", 65_535), self.front.inflight_max)
        claim.connection.welcome(
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

    def _take_inbound(self, live: Live, session: Session, welcome: life.Welcome) -> None:
        client_id, born = session.client_id, welcome.row.born
        stored = self.front.rows.received.pop(client_id, {})
        if not session.durable:
            return
        inbound = live.inbound
        if inbound is None or inbound.born != born:
            inbound = Inbound(stored if welcome.session_present else {}, born)
        inbound.epoch = welcome.row.epoch
        session.inbound = inbound

    def _restore(self, row: SessionRow, previous: str) -> Session:
        session = restore(row, previous, self._sent_before() if previous else {})
        session.positions.on_moved = lambda: self.world.after(
            0.0, lambda: self._give(row.client_id, life.Moved()), self.front.life
        )
        return session

    def _sent_before(self) -> Mapping[Stream, int]:
        if self.world.now >= self._copied_until:
            self._copied = self.front.delivery.heads.every().copy()
            self._copied_until = self.world.now + COPY_SECONDS
        return self._copied

    def _send_again(self, connection: SimConnection, session: Session) -> Work:
        """What was sent and not acknowledged goes out again, in the order it was sent, before anything new."""
        flights, truth = session.in_flight(), self.front.truth
        outgoing, given = session.outgoing, 0
        outgoing.repeats.clear()
        for at in range(0, len(flights), AGAIN_AT_ONCE):
            some = flights[at : at + AGAIN_AT_ONCE]
            found = yield from self._fetch(some)
            outlet = connection.outlet
            if connection.session is not session or outlet is None:
                return
            out = []
            for packet_id, delivery in some:
                packet = outgoing.repeat(
                    packet_id, delivery, found.get(packet_id), connection.version, outlet.packet_max, self.world.now
                )
                kept = session.window.get(packet_id)
                if kept is None:
                    truth.dropped(session.client_id, packet_id)
                    continue
                if kept.qos == RELEASED != delivery.qos:
                    truth.released(session.client_id, packet_id)
                if given < outlet.window_max:
                    out.append(packet)
                    given += 1
                else:
                    outgoing.repeats.append((packet_id, kept.qos, packet))
            truth.wrote(outlet, b"".join(out), again=True)
            connection.handle(Say(b"".join(out)))

    def _fetch(self, flights: list[tuple[int, Delivery]]) -> Work:
        """By packet id: the rows a delivery is in, and where."""
        disk = self.front.disk
        found: dict[int, tuple[Rows, int]] = {}
        for packet_id, delivery in flights:
            origin = delivery.origin
            if isinstance(origin, RetainedOrigin):
                found[packet_id] = (origin.rows, delivery.offset)
            elif isinstance(origin, RetainedBefore):
                if (
                    now := self.front.delivery.machine.retained.one(origin.topic, origin.time, self.world.now)
                ) is not None:
                    found[packet_id] = (now, 0)
            elif isinstance(origin, StreamOrigin) and delivery.qos != RELEASED:
                yield self.world.rng.random() * disk.seconds
                if disk.fails(disk.fetch_fails / 10):
                    raise StoreDown("what was in flight cannot be read")
                if origin.stream in disk.log.streams:
                    found[packet_id] = (rows_at(origin.stream, [delivery.offset], disk.log.streams[origin.stream]), 0)
        return found

    # -- a client goes -------------------------------------------------------------------------------------

    def leave(self, connection: SimConnection, goodbye: bool, expiry: int | None) -> None:
        """The connection is over; its machine decides what that means for the session."""
        claim = self._claims.pop(connection.claim, None)
        if claim is None:
            return
        self.front.truth.lives.over(claim.token, goodbye=goodbye, expiry_secs=expiry)
        self._give(claim.client_id, life.Gone(claim.token, goodbye, expiry))

    def _detach(self, live: Live, claim: Claim) -> None:
        """Nobody is connected to it here any more."""
        session, connection = live.session, claim.connection
        live.session = live.claim = None
        if session is None:
            return
        session.positions.on_moved = _nothing
        live.inbound = session.inbound
        live.saving.clear()
        if self.connections.get(claim.client_id) is connection:
            del self.connections[claim.client_id]
        self.front.lending.leave(connection)
        outlet, connection.session, connection.outlet = connection.outlet, None, None
        if outlet is not None:
            self.front.delivery.detach(outlet)
        self.front.truth.detached(claim.client_id)

    def _end_claim(self, claim: Claim, reason: int) -> None:
        """By our own decision: its machine knows."""
        self._claims.pop(claim.token, None)
        self.front.truth.lives.over(claim.token, by_node=reason != Reason.SESSION_TAKEN_OVER)
        live = self.live.get(claim.client_id)
        if live is not None and live.claim is claim:
            self._detach(live, claim)
        claim.answer.fail(PeerError("the session cannot be had just now", reason))
        claim.connection.close(reason)

    # -- what it is subscribed to --------------------------------------------------------------------------

    def save(self, session: Session) -> Pending:
        """Its subscriptions as they are now are durable; never settled if the connection ends before."""
        live = self.live.get(session.client_id)
        if live is None or live.session is not session:
            raise PeerError("the session is served elsewhere", Reason.SESSION_TAKEN_OVER)
        self._numbers += 1
        saving = live.saving[self._numbers] = self.world.pending()
        self._give(session.client_id, life.Subscribed(self._numbers))
        return saving

    # -- the node stops ------------------------------------------------------------------------------------

    def stop(self) -> None:
        self.closing = True
        for client_id in list(self.live):
            self._give(client_id, life.Stop(Reason.SERVER_SHUTTING_DOWN))

    def stopped(self, seconds: float) -> Work:
        """Every session has been let go, or there is no more time."""
        until = self.world.now + seconds
        while self.live and self.world.now < until:
            yield 0.01


def _nothing() -> None: ...


def _stored(packet: p.Connect) -> StoredWill | None:
    will = packet.will
    if will is None:
        return None
    delay = min(will.delay, effective_expiry(packet))
    return StoredWill(will.topic, will.payload, will.qos, will.retain, will.properties or b"", delay)


def effective_expiry(packet: p.Connect) -> int:
    if packet.version == p.V5:
        return packet.properties.get("session_expiry", 0)
    return 0 if packet.clean_start else NEVER


def show(what: RowWrite | life.Written | life.Failed) -> str:
    """As people read it."""
    if isinstance(what, life.Failed):
        return f"that its write failed{', perhaps' if what.in_doubt else ''}"
    if isinstance(what, life.Written):
        return f"{'yes' if what.verdict.accepted else 'no'}: {show_row(what.verdict.row)}"
    said = " with its will" if what.publish is not None else ""
    return f"{'takes' if what.take else 'writes'} {what.expected} -> {show_row(what.row)}{said}"


def show_row(row: SessionRow | None) -> str:
    if row is None:
        return "no row"
    state = "dead" if row.dead else f"lease {row.lease}" if row.lease is not None else "away"
    return f"({row.epoch},{row.seq}) {state} {row.connect} born {row.born}"
