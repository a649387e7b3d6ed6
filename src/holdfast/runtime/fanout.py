"""The host of fan-out on one node: its vehicles, its dispatchers, and the packets that go out.

    notices of sessions ──▶ Online, Offline ─┐
    batches, heartbeats ──▶ Triggered ───────┼─▶ dispatchers ──▶ LookUp, Commit (threads) ──▶ Publish ──▶ the socket
    PUBACKs, through the window ──▶ Acked ───┘

A packet id is taken in the session's window before a delivery is recorded as in flight, so the record has it; only what
stands in the window can be acknowledged.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
import zlib
from collections import OrderedDict, deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from math import inf
from typing import Any, NamedTuple, TypeVar

from holdfast.errors import HoldfastError
from holdfast.fanout import dispatcher as fd
from holdfast.fanout.nouns import Campaign, InFlight, Sent
from holdfast.fanout.results import correlation_of
from holdfast.fanout.table import Adopt, Begin, Change, FanoutTable, Finish, Found, Verdict
from holdfast.fanout.vehicles import Template, Vehicle
from holdfast.machine import TICK
from holdfast.model import Batch
from holdfast.mqtt import connection as mc
from holdfast.mqtt.fastpath import PACKET_IDS, remaining_length, topic_bytes
from holdfast.mqtt.packets import V5
from holdfast.runtime import notices as n
from holdfast.runtime.connection import Connection
from holdfast.runtime.sessions import Sessions
from holdfast.sessions.session import Session
from holdfast.sessions.window import Delivery, Window
from holdfast.settings import FanoutSettings

logger = logging.getLogger("holdfast.fanout")

PAYLOAD_BYTES_KEPT = 64 << 20
HEARTBEAT_SECS = 1.0
"""A vehicle's heartbeats are worth a look so often."""
LOOKED_MAX = 200_000
HELD_SECS = 0.25
PUBLISHED_AT_ONCE = 50
T = TypeVar("T")


class FlightOrigin:
    """The origin of one delivery in a session's window."""

    __slots__ = ("_acked", "place", "vin")

    def __init__(self, vin: str, place: int, acked: Callable[[str, int, int], None]):
        self.vin, self.place, self._acked = vin, place, acked

    def settle(self, deliveries: Sequence[Delivery], reason: int) -> None:
        self._acked(self.vin, self.place, reason)

    def passed(self, offset: int) -> None: ...


class _Taken(NamedTuple):
    """A packet id that is taken for a delivery which is not sent yet."""

    place: int
    window: Window
    packet_id: int


@dataclass(slots=True)
class _Client:
    """A connection that is one vehicle's, or several."""

    epoch: int
    vins: dict[str, dict[str, str | None]] = field(default_factory=dict)
    """The filters that say so, with the request ids they mean; without any, what is in flight may still be answered."""


class Payloads:
    """Those that were sent lately, in memory."""

    def __init__(self, table: FanoutTable, bytes_max: int = PAYLOAD_BYTES_KEPT):
        self._table, self._bytes_max = table, bytes_max
        self._kept: OrderedDict[int, bytes] = OrderedDict()
        self._bytes = 0

    def load(self, numbers: Collection[int]) -> dict[int, bytes]:
        """On a thread. Those that are there, whole."""
        found = {number: data for number in numbers if (data := self._kept.get(number)) is not None}
        if missing := [number for number in numbers if number not in found]:
            found.update({number: one.data for number, one in self._table.payloads(missing).items()})
        return found

    def keep(self, found: Mapping[int, bytes]) -> None:
        for number, data in found.items():
            if number in self._kept:
                self._kept.move_to_end(number)
            else:
                self._kept[number] = data
                self._bytes += len(data)
        while self._bytes > self._bytes_max and len(self._kept) > 1:
            self._bytes -= len(self._kept.popitem(last=False)[1])

    def get(self, number: int) -> bytes | None:
        return self._kept.get(number)


class _Shard:
    """A dispatcher, and what is under way for it."""

    def __init__(self, machine: fd.Dispatcher):
        self.machine = machine
        self.timer: asyncio.TimerHandle | None = None
        self.armed = inf
        self.events: deque[fd.Event] = deque()
        self.busy = False
        self.publishes: deque[tuple[fd.Publish, _Taken]] = deque()
        self.publishing = False
        """What is to be sent, a few in each turn of the loop."""
        self.taken: dict[str, _Taken] = {}
        """Packet ids of deliveries that are being recorded, by VIN."""


class FanoutHost:
    """One per node."""

    def __init__(
        self,
        node_id: str,
        settings: FanoutSettings,
        table: FanoutTable,
        sessions: Sessions,
        notices: n.Notices,
    ):
        self._settings, self.table, self._sessions = settings, table, sessions
        self.template = Template(settings.request_topic)
        self.results = Template(settings.result_topic)
        self._heartbeats = [Template(text.strip()) for text in settings.heartbeat_topics.split(",") if text.strip()]
        self._loop = asyncio.get_running_loop()
        chosen = fd.DispatchSettings(
            settings.attempts_max,
            settings.backoff_secs,
            settings.backoff_secs_max,
            settings.ack_secs,
            settings.result_secs,
        )
        self.node_id, self._chosen = node_id, chosen
        self._shards = [_Shard(fd.Dispatcher(node_id, chosen)) for _ in range(max(1, settings.dispatchers))]
        self._reader = ThreadPoolExecutor(len(self._shards), "holdfast-fanout-read")
        self._writer = ThreadPoolExecutor(1, "holdfast-fanout-write")
        """Everything that changes the table, in turn: the store would let one after the other, too."""
        self.payloads = Payloads(table)
        self._of_client: dict[str, _Client] = {}
        """Clients that are vehicles, or were on this connection."""
        self._looked: dict[str, float] = {}
        """Until when a heartbeat on this topic is not worth a look."""
        self._acks: list[fd.Ack] = []
        """Answers of this turn of the loop."""
        self._held: list[tuple[fd.Publish, _Taken]] = []
        """What could not be sent because this node may serve nobody just now."""
        self.sent = self.answered = 0
        """For the metrics."""
        self._closed = False
        self._settled: asyncio.Event | None = None
        """Somebody waits until everything is stored."""
        notices.subscribe(n.Resumed, self._on_resumed)
        notices.subscribe(n.Subscribed, self._on_subscribed)
        notices.subscribe(n.Unsubscribed, self._on_unsubscribed)
        notices.subscribe(n.Gone, self._on_gone)

    # -- vehicles --------------------------------------------------------------------------------------------

    def vehicle(self, vin: str) -> Vehicle | None:
        """If it is connected here."""
        return self._shard(vin).machine.vehicles.get(vin)

    def connected_as(self, vin: str) -> str | None:
        """The client that is this vehicle's, subscribed with QoS 1 or not. For people: it looks at every client."""
        return next((client_id for client_id, client in self._of_client.items() if vin in client.vins), None)

    def vehicles(self) -> int:
        return sum(len(shard.machine.vehicles) for shard in self._shards)

    def _on_resumed(self, notice: n.Resumed) -> None:
        session = self._sessions.session(notice.client_id)
        if session is None:
            return
        for subscription in session.subscriptions:
            self._note_filter(session, subscription.filter, subscription.qos)
        self._say_online(session)

    def _on_subscribed(self, notice: n.Subscribed) -> None:
        session = self._sessions.session(notice.client_id)
        if session is not None and self._note_filter(session, notice.filter, notice.qos):
            self._say_online(session)

    def _on_unsubscribed(self, notice: n.Unsubscribed) -> None:
        session = self._sessions.session(notice.client_id)
        if session is not None and self._note_filter(session, notice.filter, 0):
            self._say_online(session)

    def _on_gone(self, notice: n.Gone) -> None:
        client = self._of_client.pop(notice.client_id, None)
        if client is not None:
            for vin in client.vins:
                self._give(vin, fd.Offline(vin, client.epoch))

    def _note_filter(self, session: Session, text: str, qos: int) -> bool:
        """Whether it says anything about a vehicle. A filter of QoS 0 does not: what goes there is never answered."""
        covered = self.template.covered_by(text)
        if covered is None:
            return False
        vin, request = covered
        match self._settings.vehicle:
            case "client_id":
                vin = session.client_id if vin in (None, session.client_id) else None
            case "username":
                connection = self._sessions.connections.get(session.client_id)
                user = connection.identity.user if connection is not None and connection.identity is not None else None
                vin = user if vin in (None, user) else None
        if not vin:
            return False
        client = self._of_client.get(session.client_id)
        if client is None or client.epoch != session.epoch:
            client = self._of_client[session.client_id] = _Client(session.epoch)
        filters = client.vins.setdefault(vin, {})
        if qos:
            filters[text] = request
        else:
            filters.pop(text, None)
        return True

    def _say_online(self, session: Session) -> None:
        connection = self._sessions.connections.get(session.client_id)
        if connection is None or connection.session is not session or connection.outlet is None:
            return
        client = self._of_client.get(session.client_id)
        for vin, filters in client.vins.items() if client is not None else ():
            if not filters:
                self._give(vin, fd.Offline(vin, session.epoch, connected=True))
                continue
            requests = None if None in filters.values() else frozenset(r for r in filters.values() if r is not None)
            packet_max = connection.outlet.packet_max
            vehicle = Vehicle(vin, session.client_id, session.inbound.born, session.epoch, packet_max, requests)
            self._give(vin, fd.Online(vehicle))

    # -- triggers --------------------------------------------------------------------------------------------

    def trigger(self, vins: Collection[str]) -> None:
        """Something may wait for these, of whom nearly always a few are here, or none."""
        given = set(vins)
        for shard in self._shards:
            if here := shard.machine.vehicles.keys() & given:
                self._give_to(shard, fd.Triggered(here))

    def heard(self, parts: Iterable[Batch]) -> None:
        """Messages of any client were stored: are there heartbeats among them?"""
        for template in self._heartbeats:
            head = template.head
            for part in parts:
                found = [topic for topic in part.topics if topic.startswith(head)]
                if found:
                    self._heard(template, found)

    def _heard(self, template: Template, topics: Sequence[str]) -> None:
        """Nearly always of vehicles that were looked at a moment ago: that must cost nearly nothing."""
        now, looked = self._loop.time(), self._looked
        fresh = [topic for topic in topics if looked.get(topic, 0.0) <= now]
        if not fresh:
            return
        if len(looked) > LOOKED_MAX:
            looked.clear()
        looked.update(dict.fromkeys(fresh, now + HEARTBEAT_SECS))
        parsed = [template.parse(topic) for topic in fresh]
        self.trigger([found[0] for found in parsed if found is not None])

    # -- dispatchers -----------------------------------------------------------------------------------------

    def _shard(self, vin: str) -> _Shard:
        return self._shards[_number(vin) % len(self._shards)]

    def _give(self, vin: str, event: fd.Event) -> None:
        self._give_to(self._shard(vin), event)

    def _give_to(self, shard: _Shard, event: fd.Event) -> None:
        """One event after the other: what an effect leads to is given when all effects are performed."""
        shard.events.append(event)
        if shard.busy:
            return
        shard.busy = True
        try:
            while shard.events:
                self._handle(shard, shard.events.popleft())
        finally:
            shard.busy = False
        self._arm(shard)

    def _handle(self, shard: _Shard, event: fd.Event) -> None:
        shard.machine.lease = self.lease
        try:
            effects = shard.machine.handle(event, self._loop.time())
        except Exception:  # it is not trusted again; what it had in flight is found by whoever takes its place
            logger.exception("a dispatcher: our own fault, with %s", type(event).__name__)
            self._replace(shard)
            return
        for effect in effects:
            if isinstance(effect, fd.Publish):
                # With the packet id that was taken for it: until it is sent, another one may be taken for its vehicle.
                shard.publishes.append((effect, shard.taken.pop(effect.vehicle.vin)))
                continue
            try:
                self._perform(shard, effect)
            except Exception:
                logger.exception("fan-out could not perform %s", type(effect).__name__)
        if shard.publishes and not shard.publishing:
            shard.publishing = True
            self._publish_some(shard)

    def _publish_some(self, shard: _Shard) -> None:
        """A few in each turn of the loop: others want theirs, too."""
        for _ in range(min(PUBLISHED_AT_ONCE, len(shard.publishes))):
            effect, taken = shard.publishes.popleft()
            try:
                self._send(effect, taken)
            except Exception:
                logger.exception("fan-out could not send to %s", effect.vehicle.vin)
        shard.publishing = bool(shard.publishes)
        if shard.publishing:
            self._loop.call_soon(self._publish_some, shard)

    def _replace(self, shard: _Shard) -> None:
        before, waiting = shard.machine, list(shard.events)
        shard.machine = fd.Dispatcher(self.node_id, self._chosen)
        shard.events.clear()
        shard.publishes.clear()
        for taken in shard.taken.values():
            taken.window.drop(taken.packet_id)
        shard.taken.clear()
        shard.events.extend(fd.Online(vehicle) for vehicle in before.connected())
        # Who is here is still so; answers were for the one before.
        shard.events.extend(event for event in waiting if isinstance(event, fd.Online | fd.Offline | fd.Triggered))

    def _arm(self, shard: _Shard) -> None:
        if self._settled is not None and all(other.machine.idle for other in self._shards):
            self._settled.set()
        deadline = shard.machine.deadline
        if deadline >= shard.armed or self._closed:
            return
        if shard.timer is not None:
            shard.timer.cancel()
        shard.armed = deadline
        shard.timer = self._loop.call_at(deadline, self._tick, shard)

    def _tick(self, shard: _Shard) -> None:
        shard.timer, shard.armed = None, inf
        if shard.machine.deadline <= self._loop.time():
            self._give_to(shard, TICK)
        else:
            self._arm(shard)

    def _perform(self, shard: _Shard, effect: fd.Effect) -> None:
        match effect:
            case fd.LookUp(number, vins, limit):
                asked = self._run(self._reader, self._look_up, vins, limit)
                machine = shard.machine
                asked.add_done_callback(lambda done: self._looked_up(shard, machine, number, done))
            case fd.Commit(number, changes):
                self._commit(shard, number, changes)
            case fd.Refused(vin, place):
                taken = shard.taken.get(vin)
                if taken is not None and taken.place == place:
                    del shard.taken[vin]
                    taken.window.drop(taken.packet_id)

    def _run(self, pool: ThreadPoolExecutor, call: Callable[..., T], *given: Any) -> asyncio.Future[T]:
        return self._loop.run_in_executor(pool, call, *given)

    @property
    def lease(self) -> int:
        """Of this node; 0: it has none."""
        return self._sessions.node.lease or 0

    @property
    def now(self) -> float:
        """The store's clock, as this node believes it."""
        return self._sessions.clock.time(time.monotonic())

    # -- looking up ------------------------------------------------------------------------------------------

    def _look_up(
        self, vins: Sequence[str], limit: int
    ) -> tuple[dict[str, Found], dict[int, Campaign], dict[int, bytes]]:
        """On a thread."""
        found = self.table.look_up(vins, limit)
        campaigns: set[int] = set()
        payloads: set[int] = set()
        for one in found.values():
            campaigns.update(delivery.campaign for delivery in one.waiting)
            payloads.update(delivery.payload for delivery in one.waiting)
            if one.in_flight is not None:
                campaigns.add(one.in_flight.campaign)
                payloads.add(one.in_flight.payload)
        return found, self.table.campaigns(campaigns) if campaigns else {}, self.payloads.load(payloads)

    def _looked_up(self, shard: _Shard, machine: fd.Dispatcher, number: int, done: asyncio.Future[Any]) -> None:
        if done.cancelled() or self._closed or shard.machine is not machine:
            return
        if (error := done.exception()) is not None:
            logger.warning("what waits could not be looked up: %s", error, exc_info=_unless_ours(error))
            self._give_to(shard, fd.LookUpFailed(number))
            return
        found, campaigns, payloads = done.result()
        self.payloads.keep(payloads)
        sizes = {payload: len(data) + 2 for payload, data in payloads.items()}
        self._give_to(shard, fd.LookedUp(number, found, campaigns, sizes, self.now))

    # -- committing ------------------------------------------------------------------------------------------

    def _commit(self, shard: _Shard, number: int, changes: Sequence[Change]) -> None:
        """Packet ids first; who has no room for one is not asked the store about."""
        asked: list[Change] = []
        verdicts: list[Verdict | None] = []
        for change in changes:
            if isinstance(change, Begin | Adopt):
                flight = self._take_id(shard, change.flight)
                if isinstance(flight, InFlight):
                    asked.append(change._replace(flight=flight))
                    verdicts.append(Verdict.DONE)
                else:
                    verdicts.append(flight)
            else:
                asked.append(change)
                verdicts.append(Verdict.DONE)
        if not asked:
            self._loop.call_soon(self._give_to, shard, fd.Committed(number, verdicts, self.now))
            return
        committing, machine = self._run(self._writer, self.table.commit, asked), shard.machine
        committing.add_done_callback(lambda done: self._committed(shard, machine, number, verdicts, done))

    def _take_id(self, shard: _Shard, flight: InFlight) -> InFlight | Verdict | None:
        connection = self._sessions.connections.get(flight.sent.client_id)
        session = connection.session if connection is not None else None
        if connection is None or session is None or connection.outlet is None or session.epoch != flight.epoch:
            return Verdict.STALE
        window, before = session.window, shard.taken.get(flight.vin)
        if before is not None:
            if before.window is window and before.place == flight.place:
                return flight._replace(sent=flight.sent._replace(packet_id=before.packet_id))
            before.window.drop(before.packet_id)
            del shard.taken[flight.vin]
        if len(window) >= connection.outlet.window_max:
            return None
        delivery = Delivery(FlightOrigin(flight.vin, flight.place, self._acked), flight.place, 1)
        packet_id = flight.sent.packet_id
        if packet_id and packet_id not in window:
            window.restore(packet_id, delivery)
        else:
            packet_id = window.add(delivery)
        shard.taken[flight.vin] = _Taken(flight.place, window, packet_id)
        return flight._replace(sent=Sent(flight.sent.client_id, flight.sent.born, packet_id))

    def _committed(
        self,
        shard: _Shard,
        machine: fd.Dispatcher,
        number: int,
        verdicts: list[Verdict | None],
        done: asyncio.Future[list[Verdict]],
    ) -> None:
        if done.cancelled() or self._closed or shard.machine is not machine:
            return
        if (error := done.exception()) is not None:
            logger.warning("deliveries could not be recorded: %s", error, exc_info=_unless_ours(error))
            self._give_to(shard, fd.CommitFailed(number))
            return
        answers = iter(done.result())
        told = [next(answers) if verdict is Verdict.DONE else verdict for verdict in verdicts]
        self._give_to(shard, fd.Committed(number, told, self.now))

    # -- sending ---------------------------------------------------------------------------------------------

    def _send(self, effect: fd.Publish, taken: _Taken) -> None:
        vehicle, flight = effect.vehicle, effect.flight
        connection = self._sessions.connections.get(vehicle.client_id)
        session = connection.session if connection is not None else None
        if connection is None or session is None or session.window is not taken.window or connection.outlet is None:
            return  # it is gone, and its dispatcher hears of it
        if session.epoch != flight.epoch:  # taken anew while this was held: its dispatcher has taken it back
            taken.window.drop(taken.packet_id)
            return
        if self._sessions.frozen or connection.frozen:
            if not self._held:
                self._loop.call_later(HELD_SECS, self._send_held)
            self._held.append((effect, taken))
            return
        data = self.payloads.get(flight.payload)
        if data is None:
            self._fetch(effect, taken)
            return
        packet = self._packet(connection, session, effect, taken.packet_id, data)
        if len(packet) > connection.outlet.packet_max:
            self._unsendable(taken, vehicle.vin, flight.place, "packet too large")
            return
        if taken.packet_id not in taken.window:  # it was acknowledged before it was sent: that says nothing
            origin = FlightOrigin(vehicle.vin, flight.place, self._acked)
            taken.window.restore(taken.packet_id, Delivery(origin, flight.place, 1))
        self.sent += 1
        connection.handle(mc.Say(packet))

    def _fetch(self, effect: fd.Publish, taken: _Taken) -> None:
        """Since it was looked up so many others were that it is not in memory any more."""

        def fetched(done: asyncio.Future[dict[int, bytes]]) -> None:
            if done.cancelled() or self._closed:
                return
            flight = effect.flight
            if done.exception() is None and flight.payload in done.result():
                self.payloads.keep(done.result())
                self._send(effect, taken)
            else:
                self._unsendable(taken, flight.vin, flight.place, "payload missing")

        self._run(self._reader, self.payloads.load, [effect.flight.payload]).add_done_callback(fetched)

    def _unsendable(self, taken: _Taken, vin: str, place: int, reason: str) -> None:
        taken.window.drop(taken.packet_id)
        self._give(vin, fd.Unsendable(vin, place, reason))

    def _send_held(self) -> None:
        held, self._held = self._held, []
        for effect, taken in held:
            self._send(effect, taken)

    def _packet(
        self, connection: Connection, session: Session, effect: fd.Publish, packet_id: int, data: bytes
    ) -> bytes:
        vin, flight, request_id = effect.vehicle.vin, effect.flight, effect.campaign.request_id
        topic = self.template.topic(vin, request_id)
        name, tail = topic_bytes(topic), b""
        if connection.version == V5:
            tail = self._properties(session, topic, vin, request_id, flight)
            tail = remaining_length(len(tail)) + tail
        # Under another id than its session has it as, it is another packet.
        first = b"\x3a" if effect.dup and packet_id == flight.sent.packet_id else b"\x32"
        length = len(name) + 2 + len(tail) + len(data)
        return b"".join((first, remaining_length(length), name, PACKET_IDS[packet_id], tail, data))

    def _properties(self, session: Session, topic: str, vin: str, request_id: str, flight: InFlight) -> bytes:
        answer = topic_bytes(self.results.topic(vin, request_id))
        properties = b"".join((b"\x08", answer, b"\x09\x00\x10", correlation_of(flight.campaign, flight.place)))
        if flight.expires < inf:
            seconds = min(max(1, int(flight.expires - self.now)), 0xFFFF_FFFF)
            properties += b"\x02" + seconds.to_bytes(4, "big")
        route = session.subscriptions.route(topic)
        return properties + (route.identifiers if route is not None else b"")

    def _acked(self, vin: str, place: int, reason: int) -> None:
        self.answered += 1
        if not self._acks:
            self._loop.call_soon(self._give_acks)
        self._acks.append(fd.Ack(vin, place, reason))

    def _give_acks(self) -> None:
        """All that came in one turn, as one event for each dispatcher."""
        acks, self._acks = self._acks, []
        shares: list[list[fd.Ack]] = [[] for _ in self._shards]
        for ack in acks:
            shares[_number(ack.vin) % len(shares)].append(ack)
        for shard, share in zip(self._shards, shares, strict=True):
            if share:
                self._give_to(shard, fd.Acked(share, self.now))

    def resulted(self, finish: Finish) -> None:
        """A vehicle has said how it went, before it has acknowledged it; that is stored."""
        self._give(finish.seen.vin, fd.Resulted(finish))

    # -- for others ------------------------------------------------------------------------------------------

    def idle(self, vin: str) -> bool:
        """Nothing is known to go on with this vehicle here."""
        return self._shard(vin).machine.step_of(vin) is None

    async def ask(self, call: Callable[..., T], *given: Any) -> T:
        """Something that reads the table."""
        return await self._run(self._reader, call, *given)

    async def change(self, call: Callable[..., T], *given: Any) -> T:
        """Something that changes it, in turn with everything else."""
        return await self._run(self._writer, call, *given)

    async def settled(self, seconds: float) -> None:
        """What was answered, and what came back from connections that have ended, is stored."""
        self._settled = asyncio.Event()
        if not all(shard.machine.idle for shard in self._shards):
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._settled.wait(), seconds)

    @property
    def unmatched(self) -> int:
        """Answers that no delivery waited for: late, doubled, or of one that has ended."""
        return sum(shard.machine.unmatched for shard in self._shards)

    def close(self) -> None:
        self._closed = True
        for shard in self._shards:
            if shard.timer is not None:
                shard.timer.cancel()
        for pool in (self._reader, self._writer):
            pool.shutdown(wait=False, cancel_futures=True)


def _number(vin: str) -> int:
    return zlib.crc32(vin.encode())


def _unless_ours(error: BaseException) -> BaseException | None:
    return None if isinstance(error, HoldfastError) else error
