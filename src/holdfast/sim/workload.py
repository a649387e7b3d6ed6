"""What people do to groups on a normal day, drawn from the seed: join, leave, come back, publish, seal, seek, delete.

A run has two parts: `WEATHER_SECONDS` in which anything may happen, and then healing, after which everything must be
consumed and nothing be left over.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from zlib import crc32

from holdfast.groups.protocol.events import Retreat
from holdfast.groups.protocol.messages import Ask, DeleteGroup, Request, Seek, SetPaused
from holdfast.groups.protocol.nouns import NO_LIMIT, GroupId, Key, Policy
from holdfast.groups.record import GroupRecord
from holdfast.groups.settings import LeaderSettings
from holdfast.keys import record_key
from holdfast.machine import Address
from holdfast.sim.checkers import Truth
from holdfast.sim.clients import SimBatch, SimSession
from holdfast.sim.faults import Faults, draw
from holdfast.sim.hosts import SimNode
from holdfast.sim.world import World

WEATHER_SECONDS = 20.0
HEAL_SECONDS_MAX = 60.0
ASK_SECONDS = 10.0


@dataclass(slots=True)
class Person:
    """Somebody with a client or a batch job: where they are connected, and what they want."""

    name: str
    lease: bool = False
    packet_max: int = NO_LIMIT
    incarnation: int = 0
    session: SimSession | None = None
    job: SimBatch | None = None
    wants: dict[GroupId, str] = field(default_factory=dict)
    """Groups subscribed to, each with the `born` it had."""


class Workload:
    """One run."""

    def __init__(self, seed: int, *, faults: Faults | None = None, trace: bool = False):
        self.world = world = World(seed, trace=trace)
        rng = world.rng
        world.faults = draw(rng) if faults is None else faults
        self.truth = Truth(world, exact=world.faults.exact)
        skew = world.faults.clock_skew
        for number in range(rng.randint(1, 3)):
            rate = 1 + rng.uniform(-skew, skew) if skew else 1.0
            SimNode(world, self.truth, f"n{number + 1}", rate, rng.uniform(0, 1000) if skew else 0.0)
        # Small limits, so that what is rare in life happens here.
        world.leader_settings = LeaderSettings(
            slices_max=rng.choice([1, 64, 64]), ranges_max=rng.choice([1, 2, LeaderSettings.ranges_max])
        )
        self.shards = rng.randint(1, 4)
        world.log.open_generation(self.shards)
        self.groups = [GroupId("g", "t/#")] if rng.random() < 0.8 else [GroupId("g", "t/#"), GroupId("h", "t/+")]
        self.order = rng.choice(["strict", "strict", "parallel"])
        self.key: Key = rng.choice(["publisher", "topic", "message"])
        self.publishers = [f"p{n}" for n in range(rng.choice([1, 8, 8]))]
        self.policy = rng.choice([Policy(), Policy(), Policy(), Policy(1.0, 3), Policy(None, 4)])
        self.borns = 0
        self.large = rng.choice([0.0, 0.0, 0.1, 0.4])
        """How many messages are larger than some members take, or all."""
        world.log.size_doubt = rng.choice([0, 0, 600])
        limits = [NO_LIMIT, 1000, 2000] if self.large else [NO_LIMIT]
        self.people = [Person(f"s{n + 1}", packet_max=rng.choice(limits)) for n in range(rng.randint(1, 5))]
        self.people += [Person(f"b{n + 1}", lease=True) for n in range(rng.choice([0, 1, 1, 2]))]
        self.asks: dict[str, Ask] = {}
        self.requests = 0
        self.published = 0
        self.publish_every = rng.choice([0.2, 0.4, 1.0])
        self.within = rng.choice([0.5, 3.0])
        """How long the leaders of a drained node have."""

    # ---------------------------------------------------------------------------------------- set up

    def begin(self) -> None:
        rng, world = self.world.rng, self.world
        for person in self.people:
            world.after(rng.random() * 4, _Do(self), ("arrive", person))
        world.after(0.1, _Do(self), ("publish", None))
        for _ in range(rng.randint(3, 16)):
            what = rng.choice(_ACTIONS)
            world.at(rng.uniform(1.0, WEATHER_SECONDS), _Do(self), (what, None))
        self._schedule_faults()

    def _schedule_faults(self) -> None:
        rng, world, faults = self.world.rng, self.world, self.world.faults
        for what, chance in (
            ("node_crash", faults.node_crash),
            ("leader_crash", faults.leader_crash),
            ("pause", faults.pause),
            ("partition", faults.partition),
            ("outage", faults.outage),
        ):
            second = 1.0
            while chance and second < WEATHER_SECONDS:
                if rng.random() < chance:
                    world.at(second + rng.random(), _Do(self), (what, None))
                second += 1.0

    # --------------------------------------------------------------------------------------- people

    def do(self, what: str, who: Person | None) -> None:
        if self.world.healing and what not in ("arrive", "repeat_ask", "yield"):
            return
        getattr(self, f"do_{what}")(who)

    def do_arrive(self, person: Person | None) -> None:
        assert person is not None
        up = [node for node in self.nodes() if node.up]
        if not up or person.session or person.job:
            return
        rng = self.world.rng
        node = rng.choice([node for node in up if not node.drained] or up)
        person.incarnation += 1
        group = rng.choice(self.groups)
        self.world.tell(person.name, f"arrives at {node.name}")
        if person.lease:
            born = next(iter(person.wants.values()), None) or self.declare(group).born
            group = next(iter(person.wants), group)
            person.job = SimBatch(node, person.name, person.incarnation, group, born)
            person.wants = {group: born}
            person.job.ack_seconds = rng.choice([0.02, 0.3])
            return
        person.session = SimSession(node, person.name, person.incarnation, person.packet_max)
        person.session.ack_seconds = rng.choice([0.02, 0.1, 0.5])
        if not person.wants:
            person.wants = {group: self.declare(group).born}
        for group, born in person.wants.items():
            person.session.subscribe(group, born)

    def declare(self, group: GroupId) -> GroupRecord:
        """What a SUBSCRIBE does first: the group exists from here on, and its start is fixed."""
        self.borns += 1
        rng = self.world.rng
        record = GroupRecord(
            group=group,
            born=f"born{self.borns}",
            order="parallel" if self.order == "parallel" else "strict",
            key=self.key,
            starts=self.world.log.starts(rng.choice(["beginning", "latest"])),
            policy=self.policy,
            idle_seconds_max=rng.choice([None, 30.0]),
        )
        found = self.world.store.declare(record)
        self.truth.starts.setdefault(found.course, dict(found.starts))
        self.truth.declared[found.born] = found
        return found

    def _anyone(self) -> Person | None:
        present = [person for person in self.people if person.session or person.job]
        return self.world.rng.choice(present) if present else None

    def do_close(self, person: Person | None) -> None:
        """Lost connection, kick, takeover: the agent leaves at once; the client comes back, or not."""
        person = person or self._anyone()
        if person is None:
            return
        self.world.tell(person.name, "closes")
        if person.session:
            person.session.close()
        if person.job:
            person.job.leave()
        person.session = person.job = None
        if self.world.rng.random() < 0.7:
            self.world.after(self.world.rng.random() * 2, _Do(self), ("arrive", person))

    def do_takeover(self, _: Person | None) -> None:
        """Come back at once, elsewhere, while the old agent still says its last words."""
        person = self._anyone()
        if person:
            self.do_close(person)
            self.do_arrive(person)

    def do_unsubscribe(self, _: Person | None) -> None:
        person = self._anyone()
        if person and person.session and person.wants:
            group = self.world.rng.choice(list(person.wants))
            self.world.tell(person.name, f"unsubscribes from {group}")
            person.session.unsubscribe(group)
            del person.wants[group]
            if self.world.rng.random() < 0.6:  # quick unsubscribe and subscribe
                self.subscribe(person, group)
            elif self.world.rng.random() < 0.5:
                self.world.after(self.world.rng.random() * 3, _Do(self), ("resubscribe", person))

    def do_resubscribe(self, person: Person | None) -> None:
        if person and person.session and not person.wants:
            self.subscribe(person, self.world.rng.choice(self.groups))

    def subscribe(self, person: Person, group: GroupId) -> None:
        assert person.session is not None
        born = self.declare(group).born
        self.world.tell(person.name, f"subscribes to {group} ({born})")
        person.session.subscribe(group, born)
        person.wants[group] = born

    def do_stuck(self, _: Person | None) -> None:
        """A client that acknowledges nothing for a while."""
        person = self._anyone()
        member = person and (person.session or person.job)
        if member:
            member.stuck_until = self.world.now + self.world.rng.choice([2.0, 30.0])

    # --------------------------------------------------------------------------------------- the log

    def do_publish(self, _: Person | None) -> None:
        rng, world = self.world.rng, self.world
        if self.published < 80:
            # As the log does it: a publisher's messages lie in one shard, a topic's in as many as it has publishers in.
            publisher = rng.choice(self.publishers)
            streams = world.log.open_streams()
            stream = streams[crc32(publisher.encode()) % len(streams)]
            if rng.random() < self.large:
                world.log.sizes[stream, len(world.log.messages[stream])] = rng.choice([1500, 2500])
            world.publish(stream, publisher, f"t/{rng.randint(0, 4)}")
            self.published += 1
            world.after(rng.random() * self.publish_every, _Do(self), ("publish", None))

    def do_seal(self, _: Person | None) -> None:
        if self.world.rng.random() < 0.4:
            self.shards = self.world.rng.randint(1, 4)
        self.world.tell("log", f"next generation, {self.shards} shards")
        self.world.log.open_generation(self.shards)
        self.world.streams_changed()

    def do_expire(self, _: Person | None) -> None:
        gone = self.world.log.drop_oldest()
        self.world.tell("log", f"drops {[str(stream) for stream in gone]}")
        self.world.streams_changed()

    # ------------------------------------------------------------------------------------- operators

    def ask(self, group: GroupId, what: Request) -> None:
        self.requests += 1
        request = f"r{self.requests}"
        nodes = [node for node in self.nodes() if node.up]
        if nodes:
            node = self.world.rng.choice(nodes)
            self.asks[request] = Ask(
                request, Address(node.name, "asker", request), group, what, node.clock(), ASK_SECONDS
            )
            self.world.after(0.0, _Do(self), ("repeat_ask", request))

    def do_repeat_ask(self, request: str) -> None:
        ask = self.asks.get(request)
        if ask and request not in self.world.answers:
            self.world.send(ask.reply_to.node, Address(ask.reply_to.node, "registry"), ask)
            self.world.after(0.7, _Do(self), ("repeat_ask", request))

    def do_seek(self, _: Person | None) -> None:
        group = self.world.rng.choice(self.groups)
        record = self.record(group)
        if record is None:
            return
        starts = {s: self.world.rng.randint(0, len(m)) for s, m in self.world.log.messages.items()}
        self.world.tell("operator", f"seeks {group}")
        self.ask(group, Seek(tuple(starts.items())))

    def do_pause_group(self, _: Person | None) -> None:
        self.ask(self.world.rng.choice(self.groups), SetPaused(True))

    def do_resume_group(self, _: Person | None) -> None:
        self.ask(self.world.rng.choice(self.groups), SetPaused(False))

    def do_delete(self, _: Person | None) -> None:
        if self.world.rng.random() < 0.4:
            self.world.tell("operator", "deletes")
            self.ask(self.world.rng.choice(self.groups), DeleteGroup(if_idle=self.world.rng.random() < 0.3))

    def record(self, group: GroupId) -> GroupRecord | None:
        data = self.world.store.keys.get(record_key(group))
        return None if data is None else GroupRecord.from_json(data)

    # ---------------------------------------------------------------------------------------- faults

    def nodes(self) -> list[SimNode]:
        return [node for node in self.world.nodes.values() if isinstance(node, SimNode)]

    def do_node_crash(self, _: Person | None) -> None:
        up = [node for node in self.nodes() if node.up]
        if up:
            node = self.world.rng.choice(up)
            node.crash()
            self.world.after(self.world.rng.uniform(0.1, 8), _Do(self), ("node_restart", node))
            for person in self.people:
                if (person.session and not person.session.alive) or (person.job and not person.job.alive):
                    person.session = person.job = None
                    self.world.after(self.world.rng.random() * 3, _Do(self), ("arrive", person))

    def do_node_restart(self, node: SimNode) -> None:
        if not node.up:
            node.restart()

    def do_leader_crash(self, _: Person | None) -> None:
        leaders = [leader for node in self.nodes() for leader in node.leaders.values()]
        if leaders:
            leader = self.world.rng.choice(leaders)
            self.world.tell(leader.name, "BREAKS DOWN")
            leader.node.leader_gone(leader, clean=False)
            if self.world.rng.random() < 0.3:
                # The next one is told to stop while members still bring it what they know.
                self.world.after(self.world.rng.uniform(3.6, 4.2), _Do(self), ("retreat", None))

    def do_retreat(self, _: Person | None) -> None:
        """A clean stop of a leader, as before a restart of its node."""
        leaders = [leader for node in self.nodes() for leader in node.leaders.values()]
        if leaders:
            leader = self.world.rng.choice(leaders)
            self.world.tell(leader.name, "is told to retreat")
            leader.on(Retreat(self.world.rng.choice([0.5, 3.0])))

    def do_drain(self, _: Person | None) -> None:
        """A node is to be emptied: groups first, then clients one by one. It stays so until it is started anew."""
        nodes = [node for node in self.nodes() if node.up and not node.drained]
        if len(nodes) > 1:
            node = self.world.rng.choice(nodes)
            self.world.tell(node.name, "is drained")
            node.drained = True
            self.do_yield(node)
            if self.world.rng.random() < 0.5:
                self.world.after(self.world.rng.uniform(1, 6), _Do(self), ("move", node))

    def do_yield(self, node: SimNode) -> None:
        """It looks who else is there, once a second."""
        if node.drained and node.up:
            if self.world.now >= node.paused_until and self.world.reaches_store(node.name):
                others = (other.name for other in self.nodes() if other.up and not other.drained)
                node.yield_to(tuple(name for name in others if name != node.name), self.within)
            self.world.after(1.0, _Do(self), ("yield", node))

    def do_move(self, node: SimNode) -> None:
        """The next of its clients goes elsewhere; if there is none left, its node may be started anew."""
        if not (node.drained and node.up):
            return
        rng = self.world.rng
        left = [p for p in self.people for member in (p.session, p.job) if member is not None and member.node is node]
        if left:
            self.do_close(left[0])
        elif rng.random() < 0.5:
            node.crash()
            self.world.after(rng.uniform(0.1, 3), _Do(self), ("node_restart", node))
            return
        self.world.after(rng.random(), _Do(self), ("move", node))

    def do_pause(self, _: Person | None) -> None:
        up = [node for node in self.nodes() if node.up and node.paused_until < self.world.now]
        if up:
            self.world.rng.choice(up).pause(self.world.rng.uniform(0.5, 9))

    def do_partition(self, _: Person | None) -> None:
        names = [*self.world.nodes, "store"]
        pair = frozenset(self.world.rng.sample(names, 2))
        self.world.tell("network", f"cut {sorted(pair)}")
        self.world.cut.add(pair)
        self.world.after(self.world.rng.uniform(0.5, 8), _Do(self), ("mend", pair))

    def do_outage(self, _: Person | None) -> None:
        seconds = self.world.rng.choice([0.7, 3.0, 4.7, self.world.rng.uniform(6, 12)])
        self.world.tell("store", f"is away for {seconds:.1f} s")
        self.world.outage_until = max(self.world.outage_until, self.world.now + seconds)

    def do_mend(self, pair: frozenset[str]) -> None:
        self.world.cut.discard(pair)


_ACTIONS = [
    "close",
    "close",
    "takeover",
    "unsubscribe",
    "unsubscribe",
    "stuck",
    "seal",
    "seal",
    "expire",
    "seek",
    "pause_group",
    "resume_group",
    "delete",
    "retreat",
    "drain",
]


class _Do:
    """Something that somebody is going to do."""

    __slots__ = ("workload",)

    def __init__(self, workload: Workload):
        self.workload = workload

    def on(self, event: object) -> None:
        assert isinstance(event, tuple)
        what, who = event
        self.workload.do(what, who)
