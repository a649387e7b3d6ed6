"""Simulated hosts: they drive the machines and perform their effects, as the asyncio host does for real.

The one rule they share with it: ask the clock first. A machine whose deadline has passed gets its Tick before any
other event, so that a node which stood still does not act on what it believed before.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from math import inf
from typing import TYPE_CHECKING

from holdfast.groups.leading.leader import Leader
from holdfast.groups.leading.registry import Registry
from holdfast.groups.member.agent import farewell
from holdfast.groups.protocol.effects import (
    Claim,
    Disbelieved,
    Effect,
    GroupSend,
    Load,
    OpenLease,
    RenewLease,
    Resign,
    Retire,
    Save,
    StartLeader,
    StopLeader,
    Trimmed,
    TrustUntil,
    WatchStreams,
)
from holdfast.groups.protocol.events import (
    Claimed,
    ClaimFailed,
    Deposed,
    LeaderRetired,
    LeaseFailed,
    LeaseLost,
    LeaseOpened,
    LeaseRenewed,
    Loaded,
    LoadFailed,
    Retreat,
    Saved,
    SaveFailed,
    StreamsSeen,
    Taken,
    Trusted,
    Yield,
)
from holdfast.groups.protocol.messages import GroupMessage, ToBorrower
from holdfast.groups.protocol.nouns import GroupId
from holdfast.machine import TICK, Address, Machine, Send
from holdfast.model import Stream
from holdfast.sim.checkers import Truth
from holdfast.sim.faults import SLOW_SAVE_SECONDS
from holdfast.sim.story import describe
from holdfast.sim.world import World

if TYPE_CHECKING:
    from holdfast.sim.clients import SimBatch, SimSession


@dataclass(slots=True)
class SaveDone:
    """How a save ended."""

    save: Save
    landed: bool = False
    fails: bool = False


class Actor:
    """One machine and its inbox."""

    def __init__(self, node: SimNode, name: str, machine: Machine):
        self.node, self.name, self.machine = node, name, machine
        self.world = node.world
        self.alive = True
        self.busy = False
        self.inbox: deque[object] = deque()
        self.armed = inf

    def on(self, event: object) -> None:
        if not self.alive:
            return
        node = self.node
        if self.world.now < node.paused_until:
            self.world.at(node.paused_until, self, event)
            return
        if event is TICK:
            self.armed = inf
        if isinstance(event, SaveDone):
            self._save_done(event)
        elif self.busy:
            if event is not TICK:
                self.inbox.append(event)
            return
        else:
            self._step(event)
        while self.inbox and not self.busy and self.alive:
            self._step(self.inbox.popleft())
        self.arm()

    def _step(self, event: object) -> None:
        self._clock_first()
        if event is TICK or not self.alive:
            return
        if self.busy:
            self.inbox.appendleft(event)
        else:
            self.perform(self.machine.handle(event, self.node.clock()))

    def _clock_first(self) -> None:
        """What the clock says comes first; it may turn out that nobody is left to hear the rest."""
        machine, now = self.machine, self.node.clock()
        if machine.deadline <= now + 1e-9:
            self.perform(machine.handle(TICK, max(now, machine.deadline)))

    def arm(self) -> None:
        if not self.alive or self.busy:
            return
        deadline = self.machine.deadline
        if deadline == inf:
            return
        when = max(self.node.true_time(deadline), self.world.now)
        if when < self.armed:
            self.armed = when
            self.world.at(when, self, TICK)

    def perform(self, effects: list[Effect]) -> None:
        world = self.world
        for index, effect in enumerate(effects):
            if not self.alive:
                return
            if world.trace is not None:
                world.tell(self.name, describe(effect))
            if isinstance(effect, Send):
                self.check(effect)
                world.send(self.node.name, effect.to, effect.message)
            elif isinstance(effect, Save):
                if index + 1 < len(effects):
                    raise AssertionError(f"{effects[index + 1 :]} would be said before the save is durable")
                self._begin_save(effect)
            else:
                self.effect(effect)

    def check(self, send: GroupSend) -> None:
        """For actors whose words are checked."""

    def effect(self, effect: Effect) -> None:
        raise NotImplementedError

    def die(self) -> None:
        self.alive = False

    # --------------------------------------------------------------------------------------- saving

    def _begin_save(self, save: Save) -> None:
        world, faults = self.world, self.world.faults
        self.busy = True
        done = SaveDone(save)
        if not world.healing:
            done.fails = not world.reaches_store(self.node.name) or world.rng.random() < faults.save_fails
        seconds = world.rng.random() * faults.save_seconds
        if faults.save_slow and not world.healing and world.rng.random() < faults.save_slow:
            seconds = world.rng.random() * SLOW_SAVE_SECONDS
        if done.fails:
            world.after(seconds + 0.1, self, done)
            return
        world.after(seconds, _Disk(self), done)

    def _save_done(self, done: SaveDone) -> None:
        self.busy = False
        now = self.node.clock()
        if done.fails:
            self.perform(self.machine.handle(SaveFailed(), now))
        elif not done.landed:
            self.perform(self.machine.handle(Deposed(), now))
        else:
            self.perform(self.machine.handle(Saved(), now))


class _Disk:
    """A write under way: it lands, or it does not, whether or not anybody is left to hear of it."""

    __slots__ = ("actor", "run")

    def __init__(self, actor: Actor):
        self.actor, self.run = actor, actor.node.run

    def on(self, event: object) -> None:
        assert isinstance(event, SaveDone)
        actor, world = self.actor, self.actor.world
        if actor.node.run != self.run and world.rng.random() < 0.5:
            return  # the crash was faster
        event.landed = world.store.save(event.save, world.now)
        lies = world.faults.save_lies
        event.fails = event.landed and not world.healing and lies > 0 and world.rng.random() < lies
        world.after(world.rng.random() * 0.002, actor, event)


class LeaderActor(Actor):
    """Drives a leader."""

    machine: Leader

    def __init__(self, node: SimNode, start: StartLeader):
        leader = Leader(
            start.group,
            start.epoch,
            node.name,
            node.world.leader_settings,
            start.trusted_until,
            node.clock(),
            in_doubt=start.in_doubt,
        )
        super().__init__(node, f"leader@{node.name}", leader)
        self.group, self.epoch = start.group, start.epoch
        self.retreating = False

    def check(self, send: GroupSend) -> None:
        self.node.truth.leader_says(self.group, self.epoch, send)

    def effect(self, effect: Effect) -> None:
        world = self.world
        match effect:
            case Load(group):
                if not world.reaches_store(self.node.name):
                    world.after(0.2, self, LoadFailed())
                    return
                streams = sorted({*world.log.messages, *world.log.dropped})
                record, progress = world.store.load(group, streams)
                world.after(0.001 + world.rng.random() * world.faults.save_seconds, self, Loaded(record, progress))
            case WatchStreams():
                world.after(0.001, self, StreamsSeen(world.log.infos()))
            case Trimmed() | Disbelieved():
                pass  # what is lost is for people to know
            case Retire(clean=clean):
                self.node.leader_gone(self, clean=clean)
            case _:
                raise AssertionError(effect)


class RegistryActor(Actor):
    """Drives a registry."""

    machine: Registry

    def effect(self, effect: Effect) -> None:
        world, node, store = self.world, self.node, self.world.store
        reply = 0.001 + world.rng.random() * world.faults.save_seconds
        if isinstance(effect, OpenLease | RenewLease | Claim) and not world.reaches_store(node.name):
            failed = ClaimFailed(effect.group) if isinstance(effect, Claim) else LeaseFailed()
            world.after(0.3, self, failed)
            return
        seconds = world.election_settings.lease_seconds
        match effect:
            case OpenLease(asked_at, seconds):
                world.after(reply, self, LeaseOpened(store.open_lease(seconds, world.now), asked_at))
            case RenewLease(lease, asked_at):
                ok = store.renew_lease(lease, seconds, world.now)
                world.after(reply, self, LeaseRenewed(lease, asked_at) if ok else LeaseLost(lease))
            case Claim(group, lease):
                world.after(reply, self, self._claim(group, lease))
            case Resign(group, epoch):
                if world.reaches_store(node.name):
                    store.resign(group, epoch)
            case StartLeader():
                node.start_leader(effect)
            case StopLeader(group, epoch):
                node.stop_leader(group, epoch)
            case TrustUntil(until):
                for leader in list(node.leaders.values()):
                    leader.on(Trusted(until))
            case _:
                raise AssertionError(effect)

    def _claim(self, group: GroupId, lease: int) -> Claimed | Taken | LeaseLost:
        store, now = self.world.store, self.world.now
        before = store.standing(group, now)
        claim = store.claim(group, self.node.name, lease, now)
        if claim is None:
            return LeaseLost(lease)
        if before is None:
            return Claimed(group, lease, claim.epoch)
        return Taken(group, claim.node, claim.epoch)


class SimNode:
    """A node: its clock, its registry, the leaders and the members that happen to be there."""

    def __init__(self, world: World, truth: Truth, name: str, rate: float = 1.0, offset: float = 0.0):
        self.world, self.truth, self.name, self.rate, self.offset = world, truth, name, rate, offset
        self.up = True
        self.run = 0
        self.paused_until = -1.0
        self.drained = False
        self.yields_to: tuple[str, ...] = ()
        """Which nodes it was last told to leave groups to."""
        self.leaders: dict[str, LeaderActor] = {}
        self.sessions: dict[str, SimSession] = {}
        self.batches: dict[str, SimBatch] = {}
        self.registry = self._new_registry()
        world.nodes[name] = self

    def _new_registry(self) -> RegistryActor:
        return RegistryActor(self, f"registry@{self.name}", Registry(self.name, self.world.election_settings))

    def clock(self) -> float:
        return self.offset + self.world.now * self.rate

    def true_time(self, local: float) -> float:
        return (local - self.offset) / self.rate

    # ------------------------------------------------------------------------------------- routing

    def route(self, to: Address, message: GroupMessage) -> None:
        match to.kind:
            case "leader":
                (self.leaders.get(to.name) or self.registry).on(message)
            case "registry":
                self.registry.on(message)
            case "agent":
                if session := self.sessions.get(to.name):
                    session.on(message)
                elif isinstance(message, ToBorrower):
                    for send in farewell(message, None, self.name):
                        self.world.send(self.name, send.to, send.message)
            case "batch":
                if batch := self.batches.get(to.name):
                    batch.on(message)

    def start_leader(self, start: StartLeader) -> None:
        self.truth.leads(self.name, self.yields_to, start.group)
        actor = self.leaders[str(start.group)] = LeaderActor(self, start)
        actor.arm()

    def stop_leader(self, group: GroupId, epoch: int) -> None:
        actor = self.leaders.get(str(group))
        if actor is not None and actor.epoch == epoch:
            actor.die()
            del self.leaders[str(group)]

    def leader_gone(self, actor: LeaderActor, *, clean: bool) -> None:
        """It retired, or broke down."""
        actor.die()
        if self.leaders.get(str(actor.group)) is actor:
            del self.leaders[str(actor.group)]
            self.registry.on(LeaderRetired(actor.group, actor.epoch, clean))

    def yield_to(self, others: tuple[str, ...], within_seconds: float) -> None:
        """Leave groups to these nodes, from now on; a drained node is told again and again."""
        self.yields_to = others
        self.registry.on(Yield(others))
        for leader in list(self.leaders.values()) if others else []:
            if not leader.retreating:
                leader.retreating = True
                leader.on(Retreat(within_seconds))

    # -------------------------------------------------------------------------------------- the log

    def streams_changed(self) -> None:
        seen = StreamsSeen(self.world.log.infos())
        for leader in list(self.leaders.values()):
            self.world.after(0.01, leader, seen)  # the same for all: the news must not overtake each other

    def published(self, stream: Stream) -> None:
        for session in self.sessions.values():
            session.pump(stream)
        for batch in self.batches.values():
            batch.pump(stream)

    # --------------------------------------------------------------------------------------- faults

    def crash(self) -> None:
        """Everything in memory is gone; whoever was connected will come back somewhere."""
        self.world.tell(self.name, "CRASH")
        self.up = False
        self.run += 1
        self.registry.die()
        for leader in self.leaders.values():
            leader.die()
        self.leaders.clear()
        for member in [*self.sessions.values(), *self.batches.values()]:
            member.crash()
        self.sessions.clear()
        self.batches.clear()

    def restart(self) -> None:
        self.world.tell(self.name, "RESTART")
        self.up = True
        self.paused_until = -1.0
        self.drained, self.yields_to = False, ()
        self.registry = self._new_registry()

    def pause(self, seconds: float) -> None:
        self.world.tell(self.name, f"PAUSE for {seconds:.1f} s")
        self.paused_until = self.world.now + seconds
        for member in [*self.sessions.values(), *self.batches.values()]:
            member.freeze(True)
        self.world.at(self.paused_until, _Resume(self, self.run), None)

    def resumed(self) -> None:
        for actor in [*self.sessions.values(), *self.batches.values(), *self.leaders.values(), self.registry]:
            actor.on(TICK)
        for member in [*self.sessions.values(), *self.batches.values()]:
            member.freeze(False)


class _Resume:
    """The end of a pause."""

    __slots__ = ("node", "run")

    def __init__(self, node: SimNode, run: int):
        self.node, self.run = node, run

    def on(self, event: object) -> None:
        if self.node.run == self.run and self.node.world.now >= self.node.paused_until:
            self.node.resumed()
