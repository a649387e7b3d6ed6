"""What goes wrong and when: a plan that a seed decides, then carried out."""

from __future__ import annotations

import asyncio
import random
from dataclasses import dataclass

from campaign.cluster import LEASE_SECONDS, NODES, Cluster, Member
from campaign.history import History
from node import NodeFailed

KINDS = (
    "kill",
    "kill",
    "pause",
    "stop",
    "postgres",
    "clients cut",
    "clients delayed",
    "clients half-open",
    "store cut",
    "store delayed",
    "store held",
    "store half-open",
    "disk full",
    "wal full",
    "clock",
)
ETCD_KINDS = ("etcd", "etcd")

CLUSTER_WIDE = ("postgres", "etcd", "disk full", "wal full")

HOUR = 3600.0


@dataclass(frozen=True)
class Fault:
    at: float
    kind: str
    node: str
    seconds: float
    delay: float = 0.0
    ahead: float = 0.0
    """By how much a clock is set forward, or back."""

    @property
    def until(self) -> float:
        return self.at + self.seconds

    def __str__(self) -> str:
        return f"{self.at:6.1f} s  {self.kind} {self.node}  for {self.seconds:.1f} s" + (
            f", {self.ahead:+.0f} s" if self.ahead else ""
        )


def seconds_of(kind: str, chance: random.Random) -> float:
    match kind:
        case "pause":
            return LEASE_SECONDS + chance.uniform(1.0, 4.0)
        case "store held" | "store half-open" | "store cut" | "etcd":
            return chance.choice((chance.uniform(0.5, 3.0), LEASE_SECONDS + chance.uniform(1.0, 5.0)))
        case "postgres":
            return chance.choice((0.0, chance.uniform(0.5, 4.0), LEASE_SECONDS + chance.uniform(0.5, 3.0)))
        case "kill" | "stop":
            return chance.choice((0.0, chance.uniform(0.5, 3.0), LEASE_SECONDS + chance.uniform(1.0, 4.0)))
        case "disk full" | "wal full" | "clock":
            return chance.choice((chance.uniform(0.5, 3.0), LEASE_SECONDS + chance.uniform(1.0, 5.0)))
        case _:
            return chance.uniform(1.0, 8.0)


def ahead_of(chance: random.Random) -> float:
    """Seconds, minutes or an hour; forward or back."""
    return round(chance.choice((-1, 1)) * chance.choice((chance.uniform(2.0, 60.0), chance.uniform(60.0, HOUR), HOUR)))


def plan(seed: int, begin: float, end: float, *, etcd: bool) -> list[Fault]:
    """Kinds are dealt like cards, so that each comes; now and then two at once, now and then a long calm."""
    chance = random.Random(f"nemesis {seed}")
    deck: list[str] = []
    found: list[Fault] = []
    at = begin
    while at < end:
        if not deck:
            deck = [*KINDS, *(ETCD_KINDS if etcd else ())]
            chance.shuffle(deck)
        kind = deck.pop()
        node = "" if kind in CLUSTER_WIDE else chance.choice(NODES)
        seconds, delay = round(seconds_of(kind, chance), 2), round(chance.uniform(0.02, 0.4), 3)
        fault = Fault(round(at, 2), kind, node, seconds, delay, ahead_of(chance) if kind == "clock" else 0.0)
        busy = any(f.node == node and f.until > at for f in found)
        if not busy:
            found.append(fault)
        pause = chance.choices((chance.uniform(-3.0, 0.0), chance.uniform(1.0, 5.0), 18.0), (2, 6, 1))[0]
        at = max(at + 1.0, at + fault.seconds + pause)
    return found


class Nemesis:
    """Carries a plan out; each fault is noted when it begins and when everything is as before."""

    def __init__(self, cluster: Cluster, history: History, faults: list[Fault]):
        self._cluster, self._history, self._faults = cluster, history, faults

    async def run(self) -> None:
        async with asyncio.TaskGroup() as all_of_them:
            for fault in self._faults:
                await asyncio.sleep(max(0.0, fault.at - self._history.now()))
                all_of_them.create_task(self._carry_out(fault))

    async def _carry_out(self, fault: Fault) -> None:
        self._history.note("nemesis", "fault", msg=fault.kind, node=fault.node, secs=fault.seconds)
        try:
            await self._do(fault, self._cluster.members.get(fault.node))
        finally:
            self._history.note("nemesis", "healed", msg=fault.kind, node=fault.node)

    async def _do(self, fault: Fault, member: Member | None) -> None:
        cluster = self._cluster
        if fault.kind in ("disk full", "wal full"):
            await cluster.fill_disk(wal=fault.kind == "wal full")
            await asyncio.sleep(fault.seconds)
            await cluster.free_disk()
            return
        if member is None:
            server = cluster.postgres if fault.kind == "postgres" else cluster.etcd
            assert server is not None
            await cluster.do(server.stop, "immediate" if fault.kind == "postgres" else "kill")
            await asyncio.sleep(fault.seconds)
            await cluster.do(server.start)
            return
        if not member.up:
            return  # what was done to it before has taken longer than planned
        match fault.kind:
            case "kill":
                await cluster.kill(member)
                await asyncio.sleep(fault.seconds)
                await cluster.start_again(member)
            case "stop":
                try:
                    await cluster.do(member.node.stop)
                except NodeFailed as error:
                    self._history.note("nemesis", "stuck", msg=str(error)[:500], node=member.name)
                await asyncio.sleep(fault.seconds)
                await cluster.start_again(member)
            case "pause":
                cluster.pause(member)
                await asyncio.sleep(fault.seconds)
                cluster.resume(member)
            case "clock":
                if await cluster.ready(member) == 0:
                    return  # a process that starts while its clock is wrong believes it
                member.clock.set(fault.ahead)
                await asyncio.sleep(fault.seconds)
                member.clock.set(0.0)
            case _:
                await self._disturb(fault, member)

    async def _disturb(self, fault: Fault, member: Member) -> None:
        where, how = fault.kind.split(" ")
        proxy = member.clients if where == "clients" else member.store
        match how:
            case "cut":
                proxy.cut()
            case "delayed":
                proxy.delay_seconds = fault.delay
            case _:
                proxy.hold()
        await asyncio.sleep(fault.seconds)
        if how == "half-open":
            proxy.lose()
        else:
            proxy.release()
