"""The clients of a campaign: each acts by a seed of its own and writes down what it sent, heard and did."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from math import inf

from campaign import wire
from campaign.cluster import Cluster, Member
from campaign.history import History
from campaign.wire import NEVER, Link, Will

CONNACK_SECONDS = 12.0
"""Longer than a node lets a CONNECT wait."""
PING_SECONDS = 2.0
SILENCE_SECONDS = 7.0
"""A client that has heard nothing for this long, not even an answer to its pings, gives its connection up."""
GOODBYE_SECONDS = 3.0
WINDOW = 8

TAKEN_OVER = 0x8E
SHORT_SECONDS = 60
"""A session that lasts no longer may end while its client tries to come back."""
MESSAGE_EXPIRY = 1200
"""Of some messages: longer than any campaign needs them, shorter than a clock is set forward or back."""


class Stage:
    """What all clients share: whom they may reach, where they write, and how far the campaign is."""

    def __init__(self, cluster: Cluster, history: History, seed: int):
        self.cluster, self.history, self.seed = cluster, history, seed
        self.publishing = True
        self.ending = False
        """Everything is well again: come back, stay, take what is there."""
        self.acked: dict[str, tuple[str, float]] = {}
        """What was acknowledged: its topic and when it was first sent."""


@dataclass(slots=True)
class Flight:
    msg: str
    topic: str
    qos: int
    expiry: int = 0
    released: bool = False


class Client:
    """One client id. A subclass says what it does all day (`live`) and what it wants of a session."""

    clean_first = False

    def __init__(self, name: str, stage: Stage, expiry: int = 600):
        self.name, self.stage, self.expiry = name, stage, expiry
        self.chance = random.Random(f"{stage.seed} {name}")
        self.history = stage.history
        self.link: Link | None = None
        self.links: set[Link] = set()
        self._count = 0
        self.unsure = False
        """A CONNECT since it was last welcome was not answered."""
        self._asking: Link | None = None
        """The connection whose CONNACK or SUBACK is waited for."""
        self._connack: asyncio.Future[tuple[bool, int]] | None = None
        self._suback: asyncio.Future[int] | None = None
        self.incoming: dict[int, str] = {}
        """QoS 2 deliveries that are not complete."""
        self.out: dict[int, Flight] = {}
        self.began: dict[str, float] = {}
        """When each message was first sent."""
        self.unacknowledged: list[tuple[Link, int, int, str]] = []
        self.holding = False

    def note(self, what: str, **fields: object) -> None:
        self.history.note(self.name, what, **fields)

    # -- connections ---------------------------------------------------------------------------------------

    @property
    def connected(self) -> bool:
        return self.link is not None and self.link.open

    async def connect(self, *, clean: bool = False, will: Will | None = None) -> bool:
        """One attempt, at a node of its choice; the connection before is left as it is."""
        member, port = self.where()
        self._count += 1
        link = Link(self._count, self._heard, self._over)
        self.note(
            "connect",
            conn=link.number,
            node=member.name,
            clean=clean,
            expiry=self.expiry,
            will=will.payload if will else "",
            delay=will.delay if will else 0,
        )
        connack: asyncio.Future[tuple[bool, int]] = asyncio.get_running_loop().create_future()
        self._connack, self._asking = connack, link
        try:
            await link.dial(port, wire.connect(self.name, clean=clean, expiry=self.expiry, will=will))
            self.links.add(link)
            async with asyncio.timeout(CONNACK_SECONDS):
                done, _ = await asyncio.wait(
                    {connack, over := asyncio.ensure_future(link.over.wait())}, return_when=asyncio.FIRST_COMPLETED
                )
                over.cancel()
            present, code = connack.result() if connack in done else (False, -1)
        except (OSError, TimeoutError):
            present, code = False, -1
        if code != 0:
            self.note("connack", conn=link.number, code=code)
            self.drop(link)
            self.unsure = True
            return False
        self.note("connack", conn=link.number, code=0, present=present, node=member.name)
        self.link = link
        if not present:
            self.incoming.clear()
            for flight in self.out.values():
                self.note("forgotten", msg=flight.msg)
            self.out.clear()
        for pid, flight in self.out.items():
            if flight.released:
                link.send(wire.acknowledge(wire.PUBREL, pid))
            else:
                self._send(link, pid, flight, dup=True)
        await self.welcomed(link, present)
        self.unsure = False
        return link.open

    def where(self) -> tuple[Member, int]:
        """The node to connect to, and the port to do it by."""
        member = self.chance.choice(list(self.stage.cluster.members.values()))
        return member, member.port

    async def welcomed(self, link: Link, present: bool) -> None: ...

    async def subscribe(self, link: Link, topic_filter: str, qos: int) -> bool:
        self._suback, self._asking = asyncio.get_running_loop().create_future(), link
        link.send(wire.subscribe(65_535, topic_filter, qos))
        try:
            code = await asyncio.wait_for(self._suback, CONNACK_SECONDS)
        except TimeoutError:
            self.drop(link)
            return False
        if code <= 2:
            self.note("suback", conn=link.number, msg=topic_filter, qos=qos)
        return code <= 2

    def drop(self, link: Link) -> None:
        """Gone without a word."""
        if link.open:
            self.note("drop", conn=link.number)
            link.drop()

    async def goodbye(self, reason: int = 0, expiry: int | None = None) -> None:
        """DISCONNECT, and wait for the end of the connection: then it is known that the node has heard it."""
        link = self.link
        if link is None or not link.open:
            return
        self.flush()
        self.note("bye", conn=link.number, code=reason, expiry=-1 if expiry is None else expiry)
        link.send(wire.disconnect(reason, expiry))
        try:
            await asyncio.wait_for(link.over.wait(), GOODBYE_SECONDS)
        except TimeoutError:
            self.drop(link)

    def _over(self, link: Link) -> None:
        self.links.discard(link)
        self.note("closed", conn=link.number, code=link.reason, ok=not link.dropped)

    async def keep_alive(self) -> None:
        """Pings on every open connection; one that does not answer is given up."""
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(PING_SECONDS)
            for link in list(self.links):
                if loop.time() - link.heard_at > SILENCE_SECONDS:
                    self.drop(link)
                else:
                    link.send(wire.packet(wire.PINGREQ << 4))

    # -- what it hears -------------------------------------------------------------------------------------

    def _heard(self, link: Link, first: int, body: bytes) -> None:
        kind = first >> 4
        if kind == wire.PUBLISH:
            self._delivered(link, wire.delivery(first, body))
        elif kind in (wire.PUBACK, wire.PUBREC, wire.PUBREL, wire.PUBCOMP):
            code = body[2] if len(body) > 2 else 0
            self._answered(link, kind, int.from_bytes(body[:2], "big"), code)
        elif link is not self._asking:
            return
        elif kind == wire.CONNACK and self._connack is not None and not self._connack.done():
            self._connack.set_result((bool(body[0] & 1), body[1]))
        elif kind == wire.SUBACK and self._suback is not None and not self._suback.done():
            self._suback.set_result(body[-1])

    def _delivered(self, link: Link, found: wire.Delivery) -> None:
        repeat = found.qos == 2 and found.pid in self.incoming
        self.note(
            "got",
            conn=link.number,
            msg=found.payload,
            qos=found.qos,
            pid=found.pid,
            dup=found.dup,
            repeat=repeat,
            will=self.incoming[found.pid] if repeat and self.incoming[found.pid] != found.payload else "",
        )
        if found.qos == 2 and not repeat:
            self.incoming[found.pid] = found.payload
        self.took(found)
        if found.qos:
            self.unacknowledged.append((link, found.qos, found.pid, found.payload))
            if not self.holding:
                self.flush()

    def took(self, found: wire.Delivery) -> None: ...

    def flush(self) -> None:
        """Acknowledge everything, in the order it came."""
        given, self.unacknowledged = self.unacknowledged, []
        for link, qos, pid, msg in given:
            if link.open:
                link.send(wire.acknowledge(wire.PUBACK if qos == 1 else wire.PUBREC, pid))
                self.note("done", conn=link.number, msg=msg, qos=qos, pid=pid)

    def _answered(self, link: Link, kind: int, pid: int, code: int) -> None:
        if kind == wire.PUBREL:
            self.incoming.pop(pid, None)
            link.send(wire.acknowledge(wire.PUBCOMP, pid))
            return
        flight = self.out.get(pid)
        if flight is None or link is not self.link:
            return
        if code >= 0x80 and kind != wire.PUBCOMP:
            self.note("refused", conn=link.number, msg=flight.msg, code=code)
            del self.out[pid]
        elif kind == wire.PUBREC and flight.qos == 2 and not flight.released:
            flight.released = True
            self._acked(link, pid, flight)
            link.send(wire.acknowledge(wire.PUBREL, pid))
        elif kind == wire.PUBACK and flight.qos == 1:
            self._acked(link, pid, flight)
            del self.out[pid]
        elif kind == wire.PUBCOMP and flight.released:
            del self.out[pid]

    def _acked(self, link: Link, pid: int, flight: Flight) -> None:
        self.note("acked", conn=link.number, msg=flight.msg, qos=flight.qos, pid=pid)
        self.stage.acked[flight.msg] = flight.topic, self.began[flight.msg]

    # -- publishing ----------------------------------------------------------------------------------------

    def publish(self, topic: str, msg: str, qos: int) -> None:
        """Under the lowest packet id that is free: the sooner an id is used again, the more is asked of a node."""
        assert self.link is not None
        pid = next(n for n in range(1, 1000) if n not in self.out)
        flight = self.out[pid] = Flight(msg, topic, qos, self.chance.choice((0, MESSAGE_EXPIRY)))
        self._send(self.link, pid, flight, dup=False)

    def _send(self, link: Link, pid: int, flight: Flight, *, dup: bool) -> None:
        self.began.setdefault(flight.msg, self.history.now())
        self.note("send", conn=link.number, msg=flight.msg, qos=flight.qos, pid=pid, dup=dup)
        link.send(wire.publish(flight.topic, flight.msg, flight.qos, pid, dup, flight.expiry))

    # -- its day -------------------------------------------------------------------------------------------

    async def run(self) -> None:
        pings = asyncio.create_task(self.keep_alive())
        try:
            await self.live()
        finally:
            pings.cancel()
            for link in list(self.links):
                link.drop()

    async def live(self) -> None:
        raise NotImplementedError

    async def until(self, condition: Callable[[], bool], seconds: float) -> None:
        """Sleep for so long, or less if it comes true."""
        end = self.history.now() + seconds
        while True:
            left = end - self.history.now()
            if left <= 0 or condition():
                return
            await asyncio.sleep(min(0.1, left))

    async def pause(self, low: float, high: float) -> None:
        await self.until(lambda: self.stage.ending, self.chance.uniform(low, high))

    async def insist(self, attempt: Callable[[], Awaitable[bool]]) -> None:
        while True:
            if await attempt():
                return
            await asyncio.sleep(self.chance.uniform(0.2, 0.8))


class Publisher(Client):
    """Publishes with one QoS; its session outlives everything, and so does what it has under way."""

    def __init__(self, name: str, stage: Stage, qos: int, every: float):
        super().__init__(name, stage)
        self.qos, self.every, self.sent = qos, every, 0

    @property
    def settled(self) -> bool:
        return not self.out

    async def live(self) -> None:
        while True:
            await self.insist(self.connect)
            until = self.history.now() + self.chance.uniform(4, 20)
            while self.connected and (self.stage.ending or self.history.now() < until):
                if self.stage.publishing and len(self.out) < WINDOW:
                    self.sent += 1
                    self.publish(f"f/{self.name}", f"{self.name}:{self.sent}", self.qos)
                await asyncio.sleep(self.chance.uniform(0.5, 1.5) * self.every)
            link = self.link
            if self.connected and link is not None:
                how = self.chance.random()
                if how < 0.4:
                    await self.goodbye()
                elif how < 0.7:
                    self.drop(link)  # else: connect elsewhere, and let that end this one


class Prober(Client):
    """Publishes one message after the other to one node, past the proxy: can that node acknowledge?"""

    def __init__(self, name: str, stage: Stage, member: Member):
        super().__init__(name, stage, expiry=0)
        self._member, self._sent = member, 0

    def where(self) -> tuple[Member, int]:
        return self._member, self._member.node.mqtt_port

    async def live(self) -> None:
        while True:
            await self.insist(lambda: self.connect(clean=True))
            while self.connected:
                if not self.out:
                    self._sent += 1
                    self.publish(f"probe/{self._member.name}", f"{self.name}:{self._sent}", 1)
                await asyncio.sleep(0.25)


class Subscriber(Client):
    """A durable subscription, or a seat in a group, that moves between nodes."""

    def __init__(self, name: str, stage: Stage, topic_filter: str, qos: int, expiry: int, leaves_at: float | None):
        super().__init__(name, stage, expiry)
        self.filter, self.qos, self.leaves_at = topic_filter, qos, leaves_at
        self.subscribed_at: float | None = None
        self.first_subscribed = inf
        self.seen: set[str] = set()
        """What it got since it subscribed."""
        self.seen_ever: set[str] = set()

    def took(self, found: wire.Delivery) -> None:
        self.seen.add(found.payload)
        self.seen_ever.add(found.payload)

    @property
    def gone(self) -> bool:
        return self.leaves_at is not None and self.history.now() > self.leaves_at

    async def welcomed(self, link: Link, present: bool) -> None:
        # A CONNECT that was not answered may have found the session expired and begun another, which is there now:
        # MQTT has no way to tell.
        if not present or (self.unsure and self.expiry < SHORT_SECONDS):
            self.subscribed_at = None
            self.seen = set()
        if self.subscribed_at is None and await self.subscribe(link, self.filter, self.qos):
            self.subscribed_at = self.history.now()
            self.first_subscribed = min(self.first_subscribed, self.subscribed_at)

    async def live(self) -> None:
        while not self.gone:
            await self.insist(self.connect)
            for _ in range(self.chance.randrange(1, 4)):
                self.holding = not self.stage.ending and self.chance.random() < 0.15
                limit = self.chance.uniform(1, 2.5) if self.holding else self.chance.uniform(2, 8)
                await self.until(lambda: not self.connected or self.gone or self.stage.ending, limit)
                self.holding = False
                self.flush()
            if self.stage.ending:
                await self.until(lambda: not self.connected, inf)
            await self.move()
        if self.connected:
            await self.goodbye()
        await asyncio.Event().wait()

    async def move(self) -> None:
        """Good-bye, a loss, or a take-over; then a while away, or none."""
        link, how = self.link, self.chance.random()
        if link is None or not link.open:
            return
        if how < 0.4:
            await self.goodbye()
        elif how < 0.65:
            self.drop(link)
        else:
            return
        if self.chance.random() < 0.5:
            await self.pause(0.2, 8.0)


class Forgotten(Subscriber):
    """Its session is short: it stays away for less, and for longer, and must find it there, and gone."""

    async def move(self) -> None:
        if not self.connected:
            return
        short = self.chance.random() < 0.5
        other = self.chance.choice((None, None, self.expiry + 2))
        expiry = self.expiry if other is None else other
        await self.goodbye(expiry=other)
        await self.pause(0.1, expiry - 1.5) if short else await self.pause(expiry + 3.0, expiry + 5.0)


class Mourned(Client):
    """Has a will with every connection, and ends each in some way."""

    def __init__(self, name: str, stage: Stage, leaves_at: float | None):
        super().__init__(name, stage, expiry=60)
        self.leaves_at = leaves_at
        self._wills = 0

    @property
    def gone(self) -> bool:
        return self.leaves_at is not None and self.history.now() > self.leaves_at

    async def attempt(self) -> bool:
        self._wills += 1
        delay = self.chance.choice((0, 0, 2, 4))
        return await self.connect(will=Will(f"w/{self.name}", f"{self.name}:{self._wills}", delay))

    async def live(self) -> None:
        while True:
            await self.insist(self.attempt)
            await self.until(lambda: not self.connected or self.stage.ending, self.chance.uniform(1, 7))
            if self.stage.ending:
                await self.until(lambda: not self.connected, inf)
                continue
            link, how = self.link, self.chance.random()
            if link is None or not link.open:
                await self.pause(0.1, 1.0)
                continue
            if self.gone:
                self.drop(link)
                await asyncio.Event().wait()
            if how < 0.3:
                await self.goodbye()
            elif how < 0.4:
                await self.goodbye(reason=4)
            elif how < 0.8:
                self.drop(link)
            else:
                continue  # a take-over
            await self.pause(*self.chance.choice(((0.05, 1.0), (3.0, 9.0))))


def everyone(stage: Stage, seconds: float) -> list[Client]:
    """Who takes part, for a campaign of this length."""
    chance = random.Random(f"clients {stage.seed}")
    publishers = [Publisher(f"p{n}", stage, qos=1 + n % 2, every=0.25) for n in range(10)]
    found: list[Client] = [*publishers]
    for n in range(16):
        # The last two leave for good: their sessions are long, and stay; those of the short ones end.
        leaves = chance.uniform(0.2, 0.7) * seconds if n >= 12 else None
        expiry = (600, NEVER)[n % 2] if n < 14 else 5
        found.append(Subscriber(f"s{n}", stage, f"f/{publishers[n % 10].name}", 1 + n // 2 % 2, expiry, leaves))
    found += [Subscriber(f"x{n}", stage, "f/#", 1 + n, 600, None) for n in range(2)]
    found += [Forgotten(f"e{n}", stage, f"f/{publishers[n].name}", 1 + n % 2, 4, None) for n in range(6)]
    for group in range(2):
        share = f"$share/g{group}/f/#"
        found += [Subscriber(f"g{group}m{n}", stage, share, 1 + group, 600, None) for n in range(4)]
    found += [Mourned(f"w{n}", stage, chance.uniform(0.3, 0.8) * seconds if n >= 8 else None) for n in range(10)]
    found += [Prober(f"probe-{member.name}", stage, member) for member in stage.cluster.members.values()]
    return found
