"""Some seconds of clients and bad weather, drawn from the seed; then it clears, and everything must come out right."""

from __future__ import annotations

from holdfast.mqtt.reasons import Reason
from holdfast.sessions.life import LifeSettings
from holdfast.sessions.session import NEVER
from holdfast.sessions.sweep import SweepSettings
from holdfast.sim.checkers import Violation
from holdfast.sim.front.world import World
from holdfast.sim.life.checkers import Truth
from holdfast.sim.life.clients import FILTERS, SimClient
from holdfast.sim.life.faults import LATE_SECONDS, LifeFaults, draw
from holdfast.sim.life.node import Published, SimNode
from holdfast.sim.life.store import JUMP_SECONDS, SimTable

WEATHER_SECONDS = 20.0
SETTLE_SECONDS = 7.0
"""A dead owner's lease, and a little."""
HEAL_SECONDS_MAX = 40.0
END_SECONDS_MAX = 90.0
TOMBSTONE_SECONDS = 25.0
assert TOMBSTONE_SECONDS > LATE_SECONDS + 8


class LifeWorkload:
    """One run."""

    def __init__(self, seed: int, *, faults: LifeFaults | None = None, trace: bool = False):
        self.world = world = World(seed, trace=trace)
        rng = world.rng
        self.faults = draw(rng) if faults is None else faults
        self.settings = LifeSettings(
            flush_secs=rng.choice([0.5, 2.0, 5.0]), freeze_secs=rng.choice([6.0, 12.0]), grace_secs=6.0
        )
        self.sweep = SweepSettings(grace_secs=6.0, unheld_secs=8.0, tombstone_secs=TOMBSTONE_SECONDS)
        self.sweep_seconds = rng.choice([0.5, 1.0, 2.0])
        self.table = SimTable(world, self.faults)
        self.truth = Truth(world, self.table, self.settings.grace_secs)
        self.truth.run = self
        self.nodes: dict[str, SimNode] = {}
        """By name: where clients of that node come to."""
        self.processes: list[SimNode] = []
        """Every one that was ever started."""
        self.published = Published()
        self.clear = self.faults.clear
        self.runs = 0
        self.stirs = True
        self.names = ["A", "B", "C"][: rng.choice([1, 2, 2, 3])]
        self.clients = {name: SimClient(self, name) for name in [f"c{n}" for n in range(rng.randint(1, 4))]}
        self.pace = rng.choice([0.15, 0.4, 1.0, 3.0])
        """Seconds between two things that clients do."""

    def begin(self) -> None:
        world, rng = self.world, self.world.rng
        for name in self.names:
            self.start(name)
        for client in self.clients.values():
            world.after(0.1 + rng.random() * 2, client.connect)
        world.after(0.5, self._publish)
        world.after(0.5, self._act)
        faults = self.faults
        for name, chance in (
            ("crash", faults.crash),
            ("pause", faults.pause),
            ("partition", faults.partition),
            ("outage", faults.outage),
            ("stop", faults.stop),
            ("jump", faults.clock_jump),
            ("breakdown", faults.breakdown),
            ("twin", faults.twin),
        ):
            at = 0.0
            while chance and (at := at + rng.expovariate(chance * 2)) < WEATHER_SECONDS:
                world.after(at, lambda what=name: getattr(self, f"_do_{what}")())  # type: ignore[misc]

    def start(self, name: str, *, beside: bool = False) -> None:
        if name in self.nodes and not beside:
            return
        if self.table.jump:  # a node that starts while the clock is wrong believes it
            self.world.after(0.5, lambda: self.start(name, beside=beside))
            return
        self.runs += 1
        node = SimNode(
            self.world,
            self.table,
            self.truth,
            self.nodes,
            self.published,
            name,
            self.runs,
            self.settings,
            self.sweep,
            self.sweep_seconds,
        )
        self.processes.append(node)
        self.world.tell(node, "starts")

    # -- what clients do -----------------------------------------------------------------------------------

    def _publish(self) -> None:
        world = self.world
        if world.healing:
            return
        self.published.add(world.rng.choice(FILTERS))
        self._pump()
        world.after(world.rng.random() * 2 * self.pace, self._publish)

    def _pump(self) -> None:
        for node in self.processes:
            if node.life.alive and self.world.now >= node.paused_until:
                for client, hosted in list(node.hosted.items()):
                    node.pump(client, hosted)

    def stir(self, client: str) -> None:
        """Its row is being taken again, or nobody knows whether it was: a good moment to disturb."""
        world = self.world
        if self.stirs and not world.healing and world.rng.random() < 0.4:
            what = world.rng.choice(["connect", "goodbye", "lose"])
            world.after(world.rng.random() ** 3, lambda: self._do(self.clients[client], what))

    def _act(self) -> None:
        world, rng = self.world, self.world.rng
        if not world.healing:
            world.after(rng.random() * 2 * self.pace, self._act)
            self._do(rng.choice(list(self.clients.values())), rng.choice(_ACTIONS))

    def _do(self, client: SimClient, what: str) -> None:
        rng = self.world.rng
        if self.world.healing:
            return
        match what:
            case "connect":
                client.wants = True
                client.connect()
            case "lose":
                client.wants = rng.random() < 0.8
                client.abandon(rng.choice([0.02, 0.02, 1.0, 20.0]))
                client.come_later()
            case "goodbye":
                client.wants = rng.random() < 0.7
                client.say_goodbye(rng.choice([None, None, 0, 3, 10, NEVER]))
                client.come_later()
            case "subscribe" | "unsubscribe":
                client.subscribe(rng.choice(FILTERS), what)
            case "never back" if rng.random() < 0.3:
                client.wants = False
                client.never_back = True
                client.abandon(rng.choice([0.02, 3.0]))

    # -- the weather ---------------------------------------------------------------------------------------

    def _someone(self) -> SimNode | None:
        nodes = list(self.nodes.values())
        return self.world.rng.choice(nodes) if nodes and not self.world.healing else None

    def _do_crash(self) -> None:
        node = self._someone()
        if node is not None:
            node.crash()
            self.world.after(self.world.rng.choice([0.2, 3.0, 12.0]), lambda: self.start(node.name))

    def _do_stop(self) -> None:
        node, rng = self._someone(), self.world.rng
        if node is None or not node.accepting:
            return
        if rng.random() < 0.5:
            node.stop(Reason.USE_ANOTHER_SERVER, drains=True)
            self.world.after(rng.random() * 10, lambda: self._stop(node))
        else:
            self._stop(node)

    def _stop(self, node: SimNode) -> None:
        if node.life.alive:
            node.after(0.0, lambda: node.stop(Reason.SERVER_SHUTTING_DOWN, drains=False))
            self.world.after(3.5 + self.world.rng.random() * 5, lambda: self._start_again(node))

    def _start_again(self, node: SimNode) -> None:
        if node.life.alive:
            self.world.after(1.0, lambda: self._start_again(node))
        else:
            self.start(node.name)

    def _do_pause(self) -> None:
        node = self._someone()
        if node is not None:
            seconds = self.world.rng.choice([0.3, 2.0, 6.0, 9.0, 15.0])
            self.world.tell(node, f"stands still for {seconds} s")
            node.paused_until = self.world.now + seconds

    def _do_partition(self) -> None:
        rng = self.world.rng
        one = rng.choice(self.names)
        pair = frozenset((one, rng.choice([name for name in [*self.names, "store", "store"] if name != one])))
        self.world.tell("world", f"cuts {sorted(pair)}")
        self.table.cut.add(pair)
        self.world.after(rng.choice([0.5, 3.0, 5.5, 8.0]), lambda: self.table.cut.discard(pair))

    def _do_outage(self) -> None:
        seconds = self.world.rng.choice([0.5, 3.0, 7.0, 12.0])
        self.world.tell("store", f"is away for {seconds} s")
        self.table.outage_until = self.world.now + seconds

    def _do_breakdown(self) -> None:
        node = self._someone()
        if node is not None and node.hosted and self.world.now >= node.paused_until:
            node.break_down(self.world.rng.choice(list(node.hosted)))

    def _do_twin(self) -> None:
        """Clients come to the new one only; the old one dies some time later."""
        node = self._someone()
        if node is not None and node.accepting:
            self.start(node.name, beside=True)
            self.world.after(self.world.rng.choice([1.0, 6.0, 20.0]), lambda: self._end_twin(node))

    def _end_twin(self, node: SimNode) -> None:
        if node.life.alive and self.nodes.get(node.name) is not node:
            node.crash()

    def _do_jump(self) -> None:
        if not all(node.clock.known for node in self.processes if node.life.alive):
            return
        self.table.jump = self.world.rng.choice([JUMP_SECONDS, JUMP_SECONDS, -JUMP_SECONDS])
        self.world.tell("store", "has the wrong time")
        self.world.after(3.0, self._jump_back)

    def _jump_back(self) -> None:
        self.table.jump = 0.0

    # -- in the end ----------------------------------------------------------------------------------------

    def heal(self) -> None:
        """Nothing fails any more. Whoever comes back gets everything, and everybody's rows are gone in the end."""
        world = self.world
        world.tell("world", "HEALS")
        world.healing = True
        self.table.jump = 0.0
        for node in self.processes:
            self._end_twin(node)
        for name in self.names:
            self._start_again_soon(name)
        for client in self.clients.values():
            client.wants = not client.never_back
            client.come_later()
        awake_at = max([world.now, *(node.paused_until for node in self.processes if node.life.alive)])
        world.run(max(awake_at, world.now + LATE_SECONDS) + SETTLE_SECONDS)
        self.clear = True
        self._wait(HEAL_SECONDS_MAX, self._unfinished, "everything comes")
        if len(self.nodes) > 1 and world.rng.random() < 0.4:  # after a dead owner's lease, everybody is welcome
            world.rng.choice(list(self.nodes.values())).crash()
            world.run(world.now + 0.5)
            self._wait(HEAL_SECONDS_MAX, self._unfinished, "a CONNECT succeeds")
        self._leave_for_good()
        self._wait(END_SECONDS_MAX, self._left, "gone after its expiry")

    def _start_again_soon(self, name: str) -> None:
        node = self.nodes.get(name)
        if node is None:
            self.start(name)
        elif not node.accepting:
            self._stop(node)

    def _wait(self, seconds: float, left: object, promise: str) -> None:
        world = self.world
        until = world.now + seconds
        assert callable(left)
        while found := left():
            if world.now >= until:
                raise Violation(f"{promise}: {found[0]}")
            world.run(world.now + 0.5)
            self._pump()

    def _unfinished(self) -> list[str]:
        found = []
        for client in self.clients.values():
            if client.never_back:
                continue
            if not client.connected:
                found.append(f"{client.name} is not connected: {client.link and client.link.token}")
                continue
            assert client.link is not None
            acked = self.truth.acked(client.name, client.link.born)
            for filter_text, start in client.starts.items():
                wanted = self.published.masks.get(filter_text, 0) >> start << start
                if wanted & ~acked:
                    found.append(f"{client.name} lacks of {filter_text}: {wanted & ~acked:b}")
        return found

    def _leave_for_good(self) -> None:
        for client in self.clients.values():
            client.wants = False
            if client.never_back and self._stays_for_ever(client):
                client.never_back, client.wants = False, True
                client.connect(clean=True, expiry=0)
                self.world.after(12.0, lambda c=client: c.abandon(0.1))  # type: ignore[misc]
                client.wants = False
            elif client.link is not None:
                expiry = 3 if client.link.connect.expiry_secs == NEVER else None
                if expiry is None and self.world.rng.random() < 0.5:
                    client.abandon(0.1)
                else:
                    client.say_goodbye(expiry)

    def _stays_for_ever(self, client: SimClient) -> bool:
        row = self.table.rows.get(client.name)
        return row is not None and not row.dead and row.expiry_secs == NEVER

    def _left(self) -> list[str]:
        """Nothing stays in memory, and no row but tombstones in the store."""
        alive = [node for node in self.processes if node.life.alive]
        found = [f"{node} still has {list(node.hosted)}" for node in alive if node.hosted]
        found += [f"{row.client_id} is left, due {row.due}" for row in self.table.rows.values() if not row.dead]
        return found


_ACTIONS = [
    *["connect"] * 3,
    *["lose"] * 3,
    *["goodbye"] * 2,
    *["subscribe"] * 3,
    "unsubscribe",
    "never back",
]
