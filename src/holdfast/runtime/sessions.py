"""The sessions of this node: the host of their lives.

One machine (`sessions.life`) per client id with something going on decides; here its effects are performed: rows are
read and written together with everybody else's, connections are welcomed, frozen and closed, other nodes are asked. A
session that is away has nothing here.

    CONNECT ──▶ join ──▶ Connect ──▶ the machine ──▶ Welcome ──▶ CONNACK, what was in flight, then delivery
    end     ──▶ leave ─▶ Gone ────▶ the machine ──▶ its last write
"""

from __future__ import annotations

import asyncio
import contextlib
import heapq
import itertools
import logging
import secrets
import time
from collections import deque
from collections.abc import Callable, Collection, Coroutine, Mapping
from dataclasses import dataclass, field
from functools import partial
from math import inf
from typing import Any, Protocol, cast

from holdfast.errors import HoldfastError, PeerError, RequestError, StoreError, UnknownSession
from holdfast.groups.protocol.nouns import GroupId
from holdfast.groups.shares import parse_share
from holdfast.log.clock import message_time
from holdfast.log.contract import ReceivedId
from holdfast.machine import TICK, Address, Send
from holdfast.model import Stream
from holdfast.mqtt import connection as mc
from holdfast.mqtt import packets as p
from holdfast.mqtt.inbound import Inbound
from holdfast.mqtt.reasons import Reason
from holdfast.runtime.connection import Connection
from holdfast.runtime.delivery import DeliveryHost
from holdfast.runtime.notices import Gone, Notices, Resumed
from holdfast.runtime.session_rows import SessionRows
from holdfast.sessions import life
from holdfast.sessions.changes import Content
from holdfast.sessions.clock import StoreClock
from holdfast.sessions.heads import Heads
from holdfast.sessions.life import LifeSettings, SessionLife, SessionNode, State, answer_unheld
from holdfast.sessions.outgoing import RetainedOrigin
from holdfast.sessions.positions import StreamOrigin
from holdfast.sessions.rows import Rows
from holdfast.sessions.session import NEVER, Session
from holdfast.sessions.shared import LoanFeed
from holdfast.sessions.stored import RetainedBefore, content_of, filters_of, restore
from holdfast.sessions.subscriptions import Subscription
from holdfast.sessions.table import RowWrite, SessionRow, StoredWill
from holdfast.sessions.trimmed import Policy
from holdfast.sessions.window import RELEASED, Delivery
from holdfast.settings import SessionSettings

logger = logging.getLogger("holdfast.sessions")

Welcomed = Callable[[Session, bool], None]
"""Called when the session is the client's; says so to it."""

WAITING_MAX = 10_000
"""More CONNECTs than this do not wait for the store."""
MOVED = life.Moved()
TICKS_AT_ONCE = 20
"""So many machines are told the time in one turn of the loop."""
AGAIN_AT_ONCE = 500
"""So many messages in flight are fetched and sent again at a time."""
KICK_SECONDS = 10.0
"""How long an operator waits for a client to be disconnected: longer than a lease."""
KICK_AGAIN_SECONDS = 0.2
"""How soon its node is asked again."""


class SharedGroups(Protocol):
    """What sessions use of the shared groups."""

    async def join(
        self, connection: Connection, session: Session, group: GroupId, subscription: Subscription
    ) -> None: ...

    def leave(self, connection: Connection, *, may_return: bool = False) -> None: ...

    def returned(self, connection: Connection, session: Session) -> None: ...

    def session_ended(self, client_id: str) -> None: ...

    def send(self, to: Any, message: Any) -> None: ...


@dataclass(slots=True)
class Claim:
    """One connection's CONNECT, from when it arrives until the connection is over."""

    token: str
    client_id: str
    connection: Connection
    vet: Callable[[Session], None]
    """A PeerError: its client may not have that session."""
    welcomed: Welcomed
    answer: asyncio.Future[bool]
    """Resolved when it is welcome (whether a session was present), a PeerError if it is refused."""


@dataclass(slots=True)
class Ending:
    """An operator wants a session to be gone, and takes it, as a client would."""

    token: str
    answer: asyncio.Future[None]


@dataclass(slots=True)
class Live:
    """A client id with something going on."""

    machine: SessionLife
    session: Session | None = None
    """While its client is connected."""
    claim: Claim | None = None
    """The connection that is welcome."""
    armed: float = inf
    """The earliest time it is in the queue of deadlines for."""
    inbound: Inbound | None = None
    """Of the connection before, if that was here: its QoS 2 publishes may still be on their way to the log."""
    saving: dict[int, asyncio.Future[None]] = field(default_factory=dict)
    """Changes of subscriptions that are to be durable."""


class Sessions:
    """One per node."""

    def __init__(
        self,
        node_id: str,
        settings: SessionSettings,
        life_settings: LifeSettings,
        sessions_max: int,
        rows: SessionRows,
        delivery: DeliveryHost,
        groups: SharedGroups,
        groups_enabled: bool,
        notices: Notices,
        spawn: Callable[[Coroutine[Any, Any, Any]], None],
    ):
        self._settings, self._sessions_max = settings, sessions_max
        self._policy = cast("Policy", settings.on_trimmed)
        self._rows, self._delivery = rows, delivery
        self._groups, self._groups_enabled = groups, groups_enabled
        self._notices, self._spawn = notices, spawn
        self.clock = StoreClock(life_settings.margin_secs)
        self.node = SessionNode(node_id, self.clock, life_settings, filters_of)
        self._live: dict[str, Live] = {}
        self._claims: dict[str, Claim] = {}
        self._goodbyes: dict[str, Connection] = {}
        """Connections that wait for their good-bye to be stored, by token."""
        self._endings: dict[str, Ending] = {}
        self._kicked: dict[str, asyncio.Event] = {}
        """Client ids that were asked to be let go, for an operator; set when somebody has answered."""
        self.connections: dict[str, Connection] = {}
        """Open connections that are welcome, by client id."""
        self._events: deque[tuple[str, life.Event]] = deque()
        self._busy = False
        self._deadlines: list[tuple[float, str]] = []
        self._timer: asyncio.TimerHandle | None = None
        self._armed = inf
        """When the timer goes off: no later than the first deadline."""
        self._lapse: asyncio.TimerHandle | None = None
        self._numbers = 0
        self._run, self._tokens = secrets.token_hex(6), itertools.count(1)
        self._copied: Mapping[Stream, int] = {}
        self._copied_until = 0.0
        self.stored = 0
        """Sessions in the store, as of the last look."""
        self.on_written: Callable[[RowWrite, SessionRow], None] | None = None
        """Told of each row that is stored."""
        self.closing = False
        self._empty = asyncio.Event()

    def __len__(self) -> int:
        return max(self.stored, len(self.connections))

    @property
    def frozen(self) -> bool:
        """This node's lease is over by its own clock: nobody is served."""
        return time.monotonic() >= self.node.trusted_until

    def held(self) -> Collection[str]:
        """Client ids that have a machine, in whatever state; as they are whenever it is asked."""
        return self._live.keys()

    def session(self, client_id: str) -> Session | None:
        """Of a client that is connected here."""
        live = self._live.get(client_id)
        return live.session if live is not None else None

    def bounded_expiry(self, seconds: int) -> int:
        limit = self._settings.expiry_secs_max
        return min(seconds, limit) if limit else seconds

    # -- the lease -----------------------------------------------------------------------------------------

    def granted(self, lease: int, asked_at: float) -> None:
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
        self.node.lost()
        self._tick_all()

    def _tick_all(self) -> None:
        """The lease has changed, and with it what every machine may do."""
        for client_id in list(self._live):
            self._give(client_id, TICK)
        self._watch_lapse()

    def look_at_clock(self) -> None:
        """Freeze everybody if the lease is over: a process that stood still hears of other things before its timers."""
        if self._lapse is not None and self.frozen:
            self._lapse.cancel()
            self._lapse = None
            self._tick_all()

    def _watch_lapse(self) -> None:
        if self._lapse is not None:
            self._lapse.cancel()
            self._lapse = None
        loop = asyncio.get_running_loop()
        if (wait := self.node.trusted_until - time.monotonic()) > 0:
            self._lapse = loop.call_later(wait + 0.001, self._tick_all)

    # -- machines ------------------------------------------------------------------------------------------

    def _give(self, client_id: str, event: life.Event) -> None:
        """One event after the other: what an effect leads to is given when all effects are performed."""
        self._events.append((client_id, event))
        if self._busy:
            return
        self._busy = True
        try:
            while self._events:
                self._handle(*self._events.popleft())
        finally:
            self._busy = False
        self._arm()

    def _handle(self, client_id: str, event: life.Event) -> None:
        live = self._live.get(client_id)
        if live is None:
            if not isinstance(event, life.Connect):
                return
            machine = SessionLife(client_id, self.node, partial(self._content, client_id))
            live = self._live[client_id] = Live(machine)
        try:
            for effect in live.machine.handle(event, time.monotonic()):
                self._perform(client_id, live, effect)
            if isinstance(event, life.Gone) and live.claim is not None and live.claim.token == event.token:
                self._detach(live, live.claim)  # only now: what its machine saves is what it was until now
        except Exception:  # it is not trusted again; its row stays as it was last written, and the sweep finds it
            logger.exception("the session of %s: our own fault; %s", client_id, live.machine.moves)
            self._drop(client_id, live)
            return
        deadline = live.machine.deadline
        if deadline < live.armed:
            live.armed = deadline
            heapq.heappush(self._deadlines, (deadline, client_id))

    def _drop(self, client_id: str, live: Live) -> None:
        self._live.pop(client_id, None)
        for claim in [c for c in self._claims.values() if c.client_id == client_id]:
            self._end_claim(claim, Reason.UNSPECIFIED_ERROR)
        for saving in live.saving.values():
            saving.cancel()

    def _arm(self) -> None:
        while self._deadlines:
            at, client_id = self._deadlines[0]
            live = self._live.get(client_id)
            if live is not None and live.armed == at:
                break
            heapq.heappop(self._deadlines)
        first = self._deadlines[0][0] if self._deadlines else inf
        if first >= self._armed:
            return  # it goes off too early, if at all, and then looks again
        if self._timer is not None:
            self._timer.cancel()
        self._timer, self._armed = asyncio.get_running_loop().call_at(first, self._tick_due), first

    def _tick_due(self) -> None:
        """A few at a time: thousands may be due at once, each with a row to pack, and others wait for the loop."""
        self._timer, self._armed = None, inf
        now, ticked = time.monotonic(), 0
        while self._deadlines and self._deadlines[0][0] <= now and ticked < TICKS_AT_ONCE:
            at, client_id = heapq.heappop(self._deadlines)
            live = self._live.get(client_id)
            if live is None or live.armed != at:
                continue
            deadline = live.machine.deadline
            if deadline <= now:
                live.armed = inf
                ticked += 1
                self._give(client_id, TICK)
            else:  # what it was armed for has been done
                live.armed = deadline
                if deadline < inf:
                    heapq.heappush(self._deadlines, (deadline, client_id))
        self._arm()

    def _perform(self, client_id: str, live: Live, effect: life.Effect) -> None:
        match effect:
            case life.WriteRow(write):
                self._write(live, write)
            case life.ReadRow(number):
                self._rows.read(client_id, number, lambda found: self._answer(live, found))
            case life.Welcome():
                self._welcome(live, effect)
            case life.Saved(number):
                if (saving := live.saving.pop(number, None)) is not None and not saving.done():
                    saving.set_result(None)
            case life.Refuse(token, reason) if (ending := self._endings.pop(token, None)) is not None:
                gone = reason == Reason.QUOTA_EXCEEDED
                ending.answer.set_exception(_unknown(client_id) if gone else _unanswered(client_id))
            case life.Refuse(token, reason):
                if (claim := self._claims.pop(token, None)) is not None and not claim.answer.done():
                    claim.answer.set_exception(PeerError("the session cannot be had just now", reason))
            case life.Close(token, reason):
                if reason is None:
                    if (said_goodbye := self._goodbyes.pop(token, None)) is not None:
                        said_goodbye.handle(mc.GoodbyeStored())
                elif (claim := self._claims.get(token)) is not None:
                    self._end_claim(claim, reason)
            case life.Freeze(token):
                if (claim := self._claims.get(token)) is not None:
                    claim.connection.freeze(True)
            case life.Resume(token):
                if (claim := self._claims.get(token)) is not None:
                    claim.connection.freeze(False)
                    self._taken_again(live)
            case Send(to, message):
                self._groups.send(to, message)
            case life.Forget():
                if self._live.get(client_id) is live and live.machine.state is State.NONE:
                    del self._live[client_id]
                    if not self._live:
                        self._empty.set()

    def _answer(self, live: Live, answer: life.Event) -> None:
        """To the machine that asked: one that broke down may have a successor."""
        client_id = live.machine.client_id
        if self._live.get(client_id) is live:
            self._give(client_id, answer)

    def _write(self, live: Live, write: RowWrite) -> None:
        """Change who has it only when all that it published is stored: whoever is next reads which of that is."""
        inbound = live.inbound if live.session is None else live.session.inbound
        if inbound is None or (write.row.lease is not None and not write.take):
            self._rows.write(write, lambda answer: self._written(live, write, answer))
        else:
            inbound.when_settled(lambda: self._rows.write(write, lambda answer: self._written(live, write, answer)))

    def _written(self, live: Live, write: RowWrite, answer: life.Written | life.Failed) -> None:
        row = answer.verdict.row if isinstance(answer, life.Written) and answer.verdict.accepted else None
        if row is not None:
            self.stored += (write.expected is None) - row.dead
        inbound = live.inbound if live.session is None else live.session.inbound
        if row is not None and inbound is not None:
            inbound.epoch = row.epoch
        if row is not None and self.on_written is not None:
            self.on_written(write, row)
        if row is not None and write.subscribed:
            # The sweep brings the counts of all nodes; whoever publishes here now is to know at once.
            self._delivery.filters_changed(dict.fromkeys(write.subscribed, 1), whole=False)
        self._answer(live, answer)

    def deliver(self, client_id: str, message: Any) -> None:
        """From another node."""
        if client_id in self._live:
            self._give(client_id, message)
        elif isinstance(message, life.Release):
            for send in answer_unheld(message, self.node):
                self._groups.send(send.to, send.message)
        if isinstance(message, life.Released) and (kicked := self._kicked.get(client_id)) is not None:
            kicked.set()

    def _content(self, client_id: str, leaving: bool) -> Content:
        live = self._live[client_id]
        session, row = live.session, live.machine.row
        if session is None or live.claim is None:
            return Content() if row is None else Content(row.subscriptions, row.cursors, row.packets)
        return content_of(session, self._delivery.heads, live.claim.token if leaving else "")

    # -- a client comes ------------------------------------------------------------------------------------

    def _token(self) -> str:
        """One that nobody had before, on whatever node."""
        return f"{self._run}-{next(self._tokens):x}"

    async def join(
        self,
        connection: Connection,
        packet: p.Connect,
        client_id: str,
        vet: Callable[[Session], None],
        welcomed: Welcomed,
    ) -> None:
        """Returns once its client may be heard: welcome, and sent again what was in flight."""
        if len(self._claims) - len(self.connections) >= WAITING_MAX:
            raise PeerError("too many clients wait for the store", Reason.SERVER_BUSY)
        answer: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        claim = Claim(self._token(), client_id, connection, vet, welcomed, answer)
        self._claims[claim.token] = claim
        connection.claim = claim.token
        expiry = self.bounded_expiry(effective_expiry(packet))
        # Those who wait may all be new: whoever is known is let in however many there are.
        room = self.stored + len(self._claims) - len(self.connections) <= self._sessions_max
        will = _stored(packet.will, expiry)
        self._give(client_id, life.Connect(claim.token, packet.clean_start, expiry, will, room))
        present = await answer
        session = connection.session
        if session is None or connection.outlet is None:
            return
        self._groups.returned(connection, session)
        try:
            if session.inbound.in_doubt:
                received = await self._rows.ask(self._rows.table.received, [client_id])
                session.inbound.found(received.get(client_id, {}))
            if session.positions.is_beyond(self._delivery.heads, session.window):
                await self._delivery.caught_up()
            await self._send_again(connection, session)
        except HoldfastError as error:
            logger.error("%s: what was in flight cannot be read: %s", client_id, error)
            connection.close(Reason.SERVER_BUSY)
        if connection.session is not session or connection.outlet is None:
            return
        decision = session.attach(self._delivery.heads, time.time(), self._policy)
        if decision.refuse:
            connection.close(Reason.IMPLEMENTATION_SPECIFIC_ERROR)
            return
        if decision.gaps:
            self._give(client_id, life.Moved())
        self._delivery.attach(connection.outlet, connection)
        self._notices.emit(Resumed(client_id, present))
        if self._groups_enabled:
            for filter_text, subscription in session.subscriptions.shared.items():
                await self._groups.join(connection, session, parse_share(filter_text), subscription)

    def _welcome(self, live: Live, welcome: life.Welcome) -> None:
        if (ending := self._endings.pop(welcome.token, None)) is not None:
            self._groups.session_ended(live.machine.client_id)
            self._events.append((live.machine.client_id, life.Gone(welcome.token, goodbye=True, expiry_secs=0)))
            ending.answer.set_result(None)
            return
        claim = self._claims.get(welcome.token)
        if claim is None or claim.connection.closed or claim.connection.transport.is_closing():
            self._events.append((live.machine.client_id, life.Gone(welcome.token)))
            return
        try:
            session = self._restore(welcome.row, welcome.previous)
            claim.vet(session)
        except PeerError as error:
            # It is away as before: refused is not lost.
            self._events.append((claim.client_id, life.Gone(claim.token, goodbye=True)))
            claim.answer.set_exception(error)
            return
        self._take_inbound(live, session, welcome)
        if not welcome.session_present:
            self._groups.session_ended(claim.client_id)
        live.session, live.claim = session, claim
        self.connections[claim.client_id] = claim.connection
        # Nor is the CONNECT kept for as long as it is connected.
        welcomed, claim.welcomed, claim.vet = claim.welcomed, _welcomed, _vetted
        welcomed(session, welcome.session_present)
        if not claim.answer.done():
            claim.answer.set_result(welcome.session_present)

    def _taken_again(self, live: Live) -> None:
        """The node's lease was over, so the row may have been taken anew: whoever names its epoch has to know."""
        session, row = live.session, live.machine.row
        if session is not None and row is not None and session.epoch != row.epoch:
            session.epoch = row.epoch
            self._notices.emit(Resumed(session.client_id, True))

    def _take_inbound(self, live: Live, session: Session, welcome: life.Welcome) -> None:
        client_id, born = session.client_id, welcome.row.born
        stored = self._rows.received.pop(client_id, {})
        if not session.durable:
            return
        inbound = live.inbound
        if inbound is None or inbound.born != born:
            inbound = Inbound(stored if welcome.session_present else {}, born)
        inbound.epoch = welcome.row.epoch
        session.inbound = inbound

    def _restore(self, row: SessionRow, previous: str) -> Session:
        """PeerError: it cannot be had as things are."""
        heads = self._delivery.heads
        try:
            session = restore(row, previous, self._sent_before(heads) if previous else {})
        except RequestError as error:
            logger.error("%s", error)
            raise PeerError(str(error), Reason.IMPLEMENTATION_SPECIFIC_ERROR) from error
        decision = session.loss(heads, time.time(), self._policy)
        for gap in decision.gaps:
            logger.warning("%s: %s from offset %d on is gone: %s", row.client_id, gap.stream, gap.first, gap.reason)
        if decision.refuse:
            raise PeerError("messages this session had not read were dropped", Reason.IMPLEMENTATION_SPECIFIC_ERROR)
        session.positions.on_moved = partial(self._moved, row.client_id)  # and not the row, which gets old
        return session

    def _moved(self, client_id: str) -> None:
        """In the next turn: now it is in the middle of sending, or of taking acknowledgements."""
        asyncio.get_running_loop().call_soon(self._give, client_id, MOVED)

    def _sent_before(self, heads: Heads) -> Mapping[Stream, int]:
        """How far streams had come. One copy for all that come within a second: an earlier owner is gone longer."""
        now = time.monotonic()
        if now >= self._copied_until:
            self._copied, self._copied_until = heads.every().copy(), now + 1.0
        return self._copied

    async def _send_again(self, connection: Connection, session: Session) -> None:
        """What was sent and not acknowledged goes out again, in the order it was sent, before anything new."""
        flights, outgoing, given = session.in_flight(), session.outgoing, 0
        outgoing.repeats.clear()
        for at in range(0, len(flights), AGAIN_AT_ONCE):
            some = flights[at : at + AGAIN_AT_ONCE]
            found = await self._fetch(some)
            self.look_at_clock()
            if self.frozen:
                raise StoreError("this node's lease is over")
            outlet = connection.outlet
            if connection.session is not session or outlet is None:
                return
            out, now = [], message_time() / 1e6
            for packet_id, delivery in some:
                feed = delivery.origin if isinstance(delivery.origin, LoanFeed) else None
                packet = outgoing.repeat(
                    packet_id, delivery, found.get(packet_id), connection.version, outlet.packet_max, now, feed
                )
                if not packet:
                    continue
                if given < outlet.window_max:
                    out.append(packet)
                    given += 1
                elif (kept := session.window.get(packet_id)) is not None:
                    outgoing.repeats.append((packet_id, kept.qos, packet))
            connection.handle(mc.Say(b"".join(out)))

    async def _fetch(self, flights: list[tuple[int, Delivery]]) -> dict[int, tuple[Rows, int]]:
        """By packet id: the rows a delivery is in, and where. A read per stream, not per message."""
        found: dict[int, tuple[Rows, int]] = {}
        wanted: dict[Stream, dict[int, int]] = {}
        now = message_time() / 1e6
        for packet_id, delivery in flights:
            origin = delivery.origin
            if isinstance(origin, RetainedOrigin):
                found[packet_id] = (origin.rows, delivery.offset)
            elif isinstance(origin, RetainedBefore):
                if (one := self._delivery.machine.retained.one(origin.topic, origin.time, now)) is not None:
                    found[packet_id] = (one, 0)
            elif isinstance(origin, StreamOrigin | LoanFeed) and delivery.qos != RELEASED:
                wanted.setdefault(origin.stream, {})[delivery.offset] = packet_id
        for stream, ids in wanted.items():
            for offset, message in (await self._delivery.read_offsets(stream, list(ids))).items():
                found[ids[offset]] = message
        return found

    def free_id(self, session: Session, packet_id: int, freed: Callable[[], None]) -> None:
        """Forget that a QoS 2 publish under this id is stored; then say so."""
        inbound = session.inbound
        self._rows.release(ReceivedId(session.client_id, inbound.born, packet_id, inbound.marks[packet_id]), freed)

    # -- a client goes -------------------------------------------------------------------------------------

    def leave(self, connection: Connection, goodbye: bool, expiry: int | None) -> None:
        """The connection is over; its machine decides what that means for the session."""
        claim = self._claims.pop(connection.claim, None)
        if claim is None:
            return
        if goodbye:
            self._goodbyes[claim.token] = connection
        if expiry is not None:
            expiry = self.bounded_expiry(expiry)
        self._give(claim.client_id, life.Gone(claim.token, goodbye, expiry))
        if not claim.answer.done():
            claim.answer.cancel()

    def socket_gone(self, connection: Connection) -> None:
        """It waits for nothing any more."""
        self._goodbyes.pop(connection.claim, None)

    def _detach(self, live: Live, claim: Claim) -> None:
        """Nobody is connected to it here any more."""
        session, connection = live.session, claim.connection
        live.session = live.claim = None
        if session is None:
            return
        session.positions.let_go()
        live.inbound = session.inbound
        for saving in live.saving.values():
            saving.cancel()
        live.saving.clear()
        if self.connections.get(claim.client_id) is connection:
            del self.connections[claim.client_id]
        self._groups.leave(connection, may_return=session.durable and not self.closing)
        outlet, connection.session, connection.outlet = connection.outlet, None, None
        if outlet is not None:
            self._delivery.detach(outlet)
        if not session.durable:
            self._groups.session_ended(claim.client_id)
        self._notices.emit(Gone(claim.client_id, not session.durable))

    def _end_claim(self, claim: Claim, reason: int) -> None:
        """By our own decision: its machine knows."""
        self._claims.pop(claim.token, None)
        live = self._live.get(claim.client_id)
        if live is not None and live.claim is claim:
            self._detach(live, claim)
        if not claim.answer.done():
            claim.answer.set_exception(PeerError("the session cannot be had just now", reason))
        claim.connection.close(reason)

    # -- what it is subscribed to --------------------------------------------------------------------------

    async def save(self, session: Session) -> None:
        """Its subscriptions as they are now are durable. A session that ends with its connection needs no promise."""
        live = self._live.get(session.client_id)
        if live is None or live.session is not session:
            raise PeerError("the session is served elsewhere", Reason.SESSION_TAKEN_OVER)
        self._numbers += 1
        saving = live.saving[self._numbers] = asyncio.get_running_loop().create_future()
        self._give(session.client_id, life.Subscribed(self._numbers))
        await saving

    def note(self, session: Session) -> None:
        """Its subscriptions are to be known elsewhere, some time soon."""
        live = self._live.get(session.client_id)
        if live is not None and live.session is session:
            self._numbers += 1
            self._give(session.client_id, life.Subscribed(self._numbers))

    def group_deleted(self, connection: Connection, session: Session, group: GroupId) -> None:
        """A group of this session is no more: the subscription goes, and the client is told the hard way."""
        for filter_text in [text for text in session.subscriptions.shared if parse_share(text) == group]:
            session.subscriptions.unshare(filter_text)
        connection.close(Reason.ADMINISTRATIVE_ACTION)

    # -- an operator ends it -------------------------------------------------------------------------------

    async def end(self, client_id: str) -> None:
        """The session is gone, whichever node serves it; its client, if connected, is told.

        It is taken for a CONNECT that nobody sent, with a clean start, and then dropped: there is no other way for a
        session to end, so nothing is left behind that a client's own end would not leave.
        """
        ending = Ending(self._token(), asyncio.get_running_loop().create_future())
        self._endings[ending.token] = ending
        connect = life.Connect(ending.token, True, 0, None, may_begin=False, reason=Reason.ADMINISTRATIVE_ACTION)
        self._give(client_id, connect)
        until = time.monotonic() + 2 * KICK_SECONDS  # its machine gives up before that
        try:
            await asyncio.wait_for(ending.answer, 2 * KICK_SECONDS)
        except TimeoutError:
            raise _unanswered(client_id) from None
        finally:
            self._endings.pop(ending.token, None)
        while time.monotonic() < until:
            row, _, _ = await self._rows.look(client_id)
            if row is None or row.dead or row.connect != ending.token:
                return
            await asyncio.sleep(KICK_AGAIN_SECONDS)
        raise _unanswered(client_id)

    async def disconnect(self, client_id: str) -> bool:
        """Its client is connected nowhere any more; whether it was. The session stays as if the connection were lost.

        Its node is asked to let go, as if somebody wanted to take it, until it says that it has, or the row does.
        """
        first: SessionRow | None = None
        until = time.monotonic() + KICK_SECONDS
        try:
            while time.monotonic() < until:
                row, lease_over, _ = await self._rows.look(client_id)
                if first is None and (row is None or row.dead):
                    raise _unknown(client_id)
                if row is None or row.owner is None or row.lease is None or (first and row.epoch != first.epoch):
                    return first is not None
                answered = self._kicked.setdefault(client_id, asyncio.Event())
                if lease_over or answered.is_set():
                    return False  # the row is to be written away yet, by whoever finds it
                first = row
                me = Address(self.node.name, "session", client_id)
                release = life.Release(client_id, row.epoch, row.lease, me, Reason.ADMINISTRATIVE_ACTION)
                self._groups.send(Address(row.owner, "session", client_id), release)
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(answered.wait(), KICK_AGAIN_SECONDS)
        finally:
            self._kicked.pop(client_id, None)
        raise _unanswered(client_id)

    # -- the node stops ------------------------------------------------------------------------------------

    def move(self, count: int) -> None:
        """Send so many clients away, those that came first before the others; their sessions are saved."""
        for client_id in list(itertools.islice(self.connections, count)):
            self._give(client_id, life.Stop(Reason.USE_ANOTHER_SERVER, lease_stays=True))

    def stop(self, reason: int = Reason.SERVER_SHUTTING_DOWN) -> None:
        """Clients are told; what is not saved is saved."""
        self.closing = True
        self._empty.clear()
        for client_id in list(self._live):
            self._give(client_id, life.Stop(reason))

    async def stopped(self, seconds: float) -> bool:
        """Every session has been let go, or there is no more time."""
        if self._live:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._empty.wait(), seconds)
        return not self._live

    def close(self) -> None:
        for timer in (self._timer, self._lapse):
            if timer is not None:
                timer.cancel()


def _welcomed(session: Session, present: bool) -> None: ...


def _vetted(session: Session) -> None: ...


def _unknown(client_id: str) -> UnknownSession:
    return UnknownSession(f"there is no session {client_id!r}")


def _unanswered(client_id: str) -> StoreError:
    return StoreError(f"the session {client_id!r} cannot be had just now: its node or the store does not answer")


def _stored(will: p.Will | None, expiry_secs: int) -> StoredWill | None:
    """A will to one of our own topics is none."""
    if will is None or will.topic.startswith("$"):
        return None
    delay = min(will.delay, expiry_secs)
    return StoredWill(will.topic, will.payload, will.qos, will.retain, will.properties or b"", delay)


def effective_expiry(packet: p.Connect) -> int:
    """How long the session outlives the connection, as the client asked."""
    if packet.version == p.V5:
        return packet.properties.get("session_expiry", 0)
    return 0 if packet.clean_start else NEVER
