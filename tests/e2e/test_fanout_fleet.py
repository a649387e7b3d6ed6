"""A fleet of all kinds of vehicles, campaigns that overlap, a node that is killed: judged by the vehicles' own book.

Every campaign has a text of its own as its payload, so a vehicle's book says which campaign it has got and answered.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import random
import struct
import time
from collections.abc import AsyncIterator, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest

from e2e.clients import V5, V311
from e2e.conftest import NewStore
from e2e.fleet import AN_HOUR, Sent
from e2e.raw import packet, text
from node import Node

KINDS = ["prompt", "slow", "lossy", "anew", "doubles", "refuses", "silent", "qos0", "late", "taken"]
REFUSALS = [0x80, 0x83, 0x87, 0x99]
UNDER_WAY = ("waiting", "in_flight", "awaiting_result")
CRASH_SECONDS = 2.0
"""An answer that was read so shortly before a kill may not have been stored."""
DRAIN_SECONDS = 60.0


@dataclass
class Answer:
    reason: int
    read_at: float | None = None
    """When the node had surely read it: it has answered a ping that came after."""


@dataclass
class Car:
    """One vehicle, and its book."""

    fleet: Fleet
    vin: str
    kind: str
    version: int
    got: list[tuple[float, str, int, bool]] = field(default_factory=list)
    """When, what, under which packet id, with DUP."""
    answers: dict[str, list[Answer]] = field(default_factory=dict)

    async def live(self) -> None:
        if self.kind == "late":
            await self.fleet.until_draining(random.uniform(1.0, 4.0))
        while not self.fleet.over:
            with contextlib.suppress(OSError, asyncio.IncompleteReadError, EOFError):
                await self._connection()
            await asyncio.sleep(random.uniform(0.01, 0.2))

    async def _connection(self) -> None:
        fleet = self.fleet
        reader, writer = await asyncio.open_connection("127.0.0.1", random.choice(fleet.nodes).mqtt_port)
        try:
            v5, clean = self.version == V5, self.kind == "anew"
            properties = bytes([len(AN_HOUR)]) + AN_HOUR if v5 else b""
            flags = bytes([self.version, 2 if clean else 0]) + struct.pack("!H", 60)
            writer.write(packet(0x10, text("MQTT") + flags + properties + text(self.vin)))
            first, _ = await _read(reader)
            assert first == 0x20, f"{self.vin}: expected CONNACK, got {first:#x}"
            qos = 0 if self.kind == "qos0" and not fleet.draining else 1
            topic = text(f"agent/{self.vin}/proxy/request/+") + bytes([qos])
            writer.write(packet(0x82, b"\0\1" + (b"\0" if v5 else b"") + topic))
            leaves = time.monotonic() + self._stays()
            await _Talk(self, reader, writer).until(leaves)
        finally:
            writer.close()

    def _stays(self) -> float:
        """For how many seconds a connection lasts."""
        if self.fleet.draining:
            return 3600.0
        match self.kind:
            case "lossy" | "anew":
                return random.uniform(0.05, 1.5)
            case "taken" | "qos0" | "silent":
                return random.uniform(0.5, 3.0)
            case _:
                return 3600.0

    def answer(self, what: str) -> int | None:
        """The reason of its PUBACK; None: it says nothing."""
        if self.fleet.draining:
            return 0
        if self.kind == "silent":
            return None
        if self.kind == "refuses" and random.random() < 0.5 and self.version == V5:
            return random.choice(REFUSALS)
        return 0


class _Talk:
    """One connection of a vehicle."""

    def __init__(self, car: Car, reader: asyncio.StreamReader, writer: asyncio.StreamWriter):
        self._car, self._reader, self._writer = car, reader, writer
        self._open: tuple[str, int] | None = None
        self._pinged: list[list[Answer]] = []

    async def until(self, leaves: float) -> None:
        draining = self._car.fleet.draining
        while not self._car.fleet.over and time.monotonic() < leaves:
            if self._car.fleet.draining and not draining and self._car.kind in ("silent", "qos0"):
                return  # it comes back as a decent vehicle
            try:
                async with asyncio.timeout(0.3):
                    first, body = await _read(self._reader)
            except TimeoutError:
                continue
            if first >> 4 == 3:
                await self._publish(Sent(first, body, self._car.version))
            elif first == 0xD0:
                for answer in self._pinged.pop(0):
                    answer.read_at = time.monotonic()

    async def _publish(self, sent: Sent) -> None:
        car, what = self._car, sent.payload.decode()
        if self._open is not None and self._open != (what, sent.packet_id):
            car.fleet.fault(f"{car.vin} ({car.kind}) got {what} before it has answered {self._open[0]}")
        if sent.qos != 1:
            car.fleet.fault(f"{car.vin} got {what} at QoS {sent.qos}")
        now = time.monotonic()
        for answer in car.answers.get(what, ()):
            read_at = answer.read_at
            if answer.reason < 0x80 and read_at is not None and not car.fleet.killed_soon_after(read_at):
                car.fleet.fault(f"{car.vin} ({car.kind}) got {what} again {now - read_at:.2f} s after its answer")
        car.got.append((now, what, sent.packet_id, sent.dup))
        self._open = (what, sent.packet_id)
        if car.kind in ("slow", "taken", "lossy") and not car.fleet.draining:
            await asyncio.sleep(random.uniform(0.0, 0.3))
        reason = car.answer(what)
        if reason is None:
            return
        answer = Answer(reason)
        car.answers.setdefault(what, []).append(answer)
        self._open = None
        body = struct.pack("!H", sent.packet_id) + (bytes([reason]) if reason else b"")
        times = 2 if car.kind == "doubles" else 1
        self._pinged.append([answer])
        self._writer.write(packet(0x40, body) * times + packet(0xC0, b""))


@dataclass
class Made:
    """A campaign, as the platform knows it."""

    request_id: str
    number: int
    what: str
    priority: int
    vins: set[str]
    plain: bool
    """Nobody holds it up or takes it back: it keeps its place."""
    ignores: bool = False
    retries: int = 0


class Fleet:
    def __init__(self, nodes: Sequence[Node], cars: int, seed: int):
        random.seed(seed)
        self.nodes = nodes
        self.cars = [
            Car(self, f"VIN{number:05}", KINDS[number % len(KINDS)], V5 if number % 3 else V311)
            for number in range(cars)
        ]
        self.made: list[Made] = []
        self.faults: list[str] = []
        self.kills: list[float] = []
        self.polls = 0
        self.over = False
        self._drains = asyncio.Event()
        self._keys = itertools.count(1)

    def fault(self, says: str) -> None:
        self.faults.append(says)

    def killed_soon_after(self, at: float) -> bool:
        return any(at - 0.1 <= kill <= at + CRASH_SECONDS for kill in self.kills)

    async def until_draining(self, seconds: float) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._drains.wait()

    @property
    def draining(self) -> bool:
        """Everybody is a decent vehicle by now."""
        return self._drains.is_set()

    # -- what the platform does ------------------------------------------------------------------------------

    async def ask(self, method: str, path: str, **more: Any) -> httpx.Response:
        """Until some node answers; a request with a key may be repeated."""
        give_up = time.monotonic() + 60
        while True:
            node = random.choice(self.nodes)
            try:
                async with httpx.AsyncClient(base_url=f"{node.http}/api/v1", timeout=20) as client:
                    answer = await client.request(method, path, **more)
                if answer.status_code < 500:
                    return answer
                error: object = answer.text
            except httpx.HTTPError as failed:
                error = repr(failed)
            assert time.monotonic() < give_up, f"{method} {path}: {error}"
            await asyncio.sleep(0.1)

    async def send(self, request_id: str, what: str, vins: Collection[str], **more: Any) -> dict[str, Any]:
        request = {"request_id": request_id, "ids": sorted(vins), "data": what, "key": f"k{next(self._keys)}", **more}
        answer = await self.ask("POST", "/fanout", json=request)
        assert answer.status_code == 202, answer.text
        return dict(answer.json())

    async def campaigns(self, count: int, seconds: float) -> None:
        every = [car.vin for car in self.cars]
        for number in range(count):
            vins = set(random.sample(every, random.randint(1, len(every))))
            plain = number % 3 == 0
            # Few request ids for what is not plain: they come again, with other data, while the old one is in flight.
            request_id = f"task_plain_{number}" if plain else f"task_again_{number % 4}"
            more: dict[str, Any] = {"priority": random.choice([4, 4, 4, 9, 0])}
            if not plain:
                more["resend"] = random.choice(["replace", "replace", "append", "ignore"])
                if random.random() < 0.3:
                    more["expires"] = random.choice([1, 2, 5])
            what = f"campaign {number}"
            sent = await self.send(request_id, what, vins, **more)
            ignores = more.get("resend") == "ignore"
            made = Made(request_id, sent["number"], what, more["priority"], vins, plain, ignores)
            self.made.append(made)
            if plain and random.random() < 0.5:  # the same data again: others join, repeats do nothing
                joined = set(random.sample(every, random.randint(1, len(every))))
                again = await self.send(request_id, what, joined, priority=more["priority"])
                if again["number"] != made.number:
                    self.fault(f"{request_id}: the same data began campaign {again['number']}")
                made.vins |= joined
                made.plain = False  # who joined later has another place
            elif not plain:
                await self._trouble(made)
            await asyncio.sleep(seconds / count * random.uniform(0.5, 1.5))

    async def _trouble(self, made: Made) -> None:
        path = f"/fanout/{made.request_id}/{made.number}"
        match random.choice(["pause", "cancel", "cancel some", "retry", "nothing"]):
            case "pause":
                await self.ask("POST", f"{path}/pause")
                await asyncio.sleep(random.uniform(0.0, 0.5))
                await self.ask("POST", f"{path}/resume")
            case "cancel":
                await asyncio.sleep(random.uniform(0.0, 0.3))
                await self.ask("POST", f"{path}/cancel")
            case "cancel some":
                some = random.sample(sorted(made.vins), max(1, len(made.vins) // 3))
                await self.ask("POST", f"{path}/cancel", json={"vins": some})
            case "retry":
                await asyncio.sleep(0.3)
                made.retries += 1
                await self.ask("POST", f"{path}/retry")

    # -- what somebody who looks all the time sees -------------------------------------------------------------

    async def watch(self) -> None:
        while not self.over:
            for made in list(self.made):
                answer = await self.ask("GET", f"/fanout/{made.request_id}/{made.number}")
                self.check_counts(made, answer.json())
            await asyncio.sleep(0.02)

    def check_counts(self, made: Made, found: dict[str, Any]) -> None:
        self.polls += 1
        counts, name = found["counts"], f"{made.request_id}/{made.number}"
        if min(counts.values()) < 0:
            self.fault(f"{name}: {counts}")
        if sum(counts.values()) != found["targets"]:
            self.fault(f"{name}: {counts} are not {found['targets']}")
        if not made.ignores and not found["unmerged"] and found["targets"] < len(made.vins):
            self.fault(f"{name}: expected {len(made.vins)} targets, got {found['targets']}")

    async def collect(self) -> None:
        while not self.over:
            await self.ask("POST", "/fanout/collect")
            await asyncio.sleep(0.05)

    async def kill(self, times: int, seconds: float) -> None:
        for _ in range(times):
            await asyncio.sleep(seconds / times * random.uniform(0.5, 1.0))
            node = random.choice(self.nodes)
            self.kills.append(time.monotonic())
            node.kill()
            await asyncio.to_thread(node.start)
            self.kills.append(time.monotonic())

    # -- what must be so in the end ----------------------------------------------------------------------------

    async def drain(self) -> None:
        """Everybody becomes a decent vehicle; then everything has to end."""
        self._drains.set()
        give_up = time.monotonic() + DRAIN_SECONDS
        left: list[str] = []
        while time.monotonic() < give_up:
            left = []
            for made in self.made:
                found = (await self.ask("GET", f"/fanout/{made.request_id}/{made.number}")).json()
                self.check_counts(made, found)
                if any(found["counts"][state] for state in UNDER_WAY):
                    left.append(f"{made.request_id}/{made.number} {found['state']}: {found['counts']}")
            if not left:
                return
            await asyncio.sleep(0.5)
        self.fault(f"still under way after {DRAIN_SECONDS:.0f} s: {left[:5]}")

    async def judge(self) -> None:
        ends: dict[tuple[str, int], dict[str, str]] = {}
        for made in self.made:
            ends[made.request_id, made.number] = await self._judge_campaign(made)
        for car in self.cars:
            self._judge_order(car)
            vehicle = (await self.ask("GET", f"/vehicles/{car.vin}")).json()
            seen: dict[tuple[str, int], list[str]] = {}
            for one in vehicle["ended"]:
                seen.setdefault((one["request_id"], one["number"]), []).append(one["state"])
            if len(vehicle["ended"]) >= 100:
                continue  # there is more than is shown
            for made in self.made:
                key = made.request_id, made.number
                logged, end = seen.get(key, []), ends[key].get(car.vin)
                if end is None and not logged:
                    continue
                if not 1 <= len(logged) <= 1 + made.retries or logged[0] != end:
                    self.fault(f"{car.vin}: {key} has ended as {end}, and in the log as {logged}")

    async def _judge_campaign(self, made: Made) -> dict[str, str]:
        name = f"{made.request_id}/{made.number}"
        ends: dict[str, str] = {}
        async for row in self._deliveries(made):
            if row["vin"] in ends:
                self.fault(f"{name}: {row['vin']} has ended as {ends[row['vin']]} and {row['state']}")
            ends[row["vin"]] = row["state"]
        found = (await self.ask("GET", f"/fanout/{made.request_id}/{made.number}")).json()
        counted = {state: number for state, number in found["counts"].items() if number}
        listed = {state: list(ends.values()).count(state) for state in set(ends.values())}
        if counted != listed:
            self.fault(f"{name}: counted {counted}, listed {listed}")
        if set(ends) - made.vins or (not made.ignores and made.vins - set(ends)):
            self.fault(f"{name}: asked for {len(made.vins)}, ended {len(ends)}")
        for car in self.cars:
            answers = car.answers.get(made.what, [])
            end = ends.get(car.vin)
            if end == "acked" and not any(answer.reason < 0x80 for answer in answers):
                self.fault(f"{name}: {car.vin} ({car.kind}) is acked, and answered {answers}")
            if end == "failed" and not any(answer.reason >= 0x80 for answer in answers):
                self.fault(f"{name}: {car.vin} ({car.kind}) has failed, and answered {answers}")
            read = [a.read_at for a in answers if a.reason < 0x80 and a.read_at is not None]
            if end != "acked" and any(not self.killed_soon_after(at) for at in read):
                self.fault(f"{name}: {car.vin} ({car.kind}) has answered {answers}, and is {end}")
        return ends

    async def _deliveries(self, made: Made) -> AsyncIterator[dict[str, Any]]:
        after = ""
        while True:
            path = f"/fanout/{made.request_id}/{made.number}/deliveries"
            rows = (await self.ask("GET", path, params={"after": after, "limit": 500})).json()["deliveries"]
            for row in rows:
                yield row
            if len(rows) < 500:
                return
            after = rows[-1]["vin"]

    def _judge_order(self, car: Car) -> None:
        """Of a lane, what keeps its place comes in the order in which it was sent."""
        if car.kind == "refuses":
            return
        for priority in (0, 4, 9):
            order = {made.what: at for at, made in enumerate(self.made) if made.plain and made.priority == priority}
            first = list(dict.fromkeys(what for _, what, _, _ in car.got if what in order))
            if first != sorted(first, key=order.__getitem__):
                self.fault(f"{car.vin} ({car.kind}): lane {priority} came as {first}")


async def _read(reader: asyncio.StreamReader) -> tuple[int, bytes]:
    first = (await reader.readexactly(1))[0]
    length = shift = 0
    while True:
        byte = (await reader.readexactly(1))[0]
        length |= (byte & 127) << shift
        shift += 7
        if byte < 128:
            return first, await reader.readexactly(length)


async def run(nodes: Sequence[Node], *, cars: int, campaigns: int, kills: int, seconds: float, seed: int = 1) -> Fleet:
    fleet = Fleet(nodes, cars, seed)
    lives = [asyncio.create_task(car.live()) for car in fleet.cars]
    looks = [asyncio.create_task(fleet.watch()), asyncio.create_task(fleet.collect())]
    await asyncio.gather(fleet.campaigns(campaigns, seconds), fleet.kill(kills, seconds))
    await fleet.drain()
    await fleet.judge()
    fleet.over = True
    for ended in await asyncio.gather(*lives, *looks, return_exceptions=True):
        if isinstance(ended, BaseException):
            fleet.fault(repr(ended))
    return fleet


SETTINGS = {"fanout.backoff_secs": 0.1, "fanout.sweep_secs": 0.5, "fanout.attempts_max": 3}


@pytest.fixture
def node(new_store: NewStore, tmp_path: Path) -> Iterator[Node]:
    with Node(tmp_path, store=new_store(), settings=SETTINGS) as running:
        yield running


@pytest.mark.parametrize("new_store", ["sqlite", pytest.param("postgres", marks=pytest.mark.soak)], indirect=True)
@pytest.mark.parametrize(
    ("cars", "campaigns", "kills", "seconds"),
    [pytest.param(100, 10, 3, 8.0), pytest.param(1_000, 50, 20, 180.0, marks=pytest.mark.soak)],
)
def test_a_fleets_own_book_agrees(node: Node, cars: int, campaigns: int, kills: int, seconds: float) -> None:
    fleet = asyncio.run(run([node], cars=cars, campaigns=campaigns, kills=kills, seconds=seconds))
    assert not fleet.faults, "\n".join(fleet.faults[:20])
    assert sum(len(car.got) for car in fleet.cars) > cars
