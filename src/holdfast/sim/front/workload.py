"""A few seconds of traffic and bad weather, drawn from the seed; then everybody reads and acknowledges again."""

from __future__ import annotations

from holdfast.errors import HoldfastError
from holdfast.groups.protocol.nouns import GroupId
from holdfast.mqtt import packets as p
from holdfast.sim.checkers import Violation
from holdfast.sim.front.checkers import Truth
from holdfast.sim.front.clients import Client, Profile
from holdfast.sim.front.disk import Disk
from holdfast.sim.front.lending import Groups, policy_of
from holdfast.sim.front.node import FrontSettings, SimFront
from holdfast.sim.front.scenes import SCENES, WAIT
from holdfast.sim.front.world import World

WEATHER_SECONDS = 8.0
HEAL_SECONDS_MAX = 25.0
"""Within this time, of which nothing should take more than a few seconds, everything must have come."""

TOPICS = ["a/x", "a/x", "a/y", "b/x", "b/rare", "busy/1", "busy/2"]
FILTERS = ["a/#", "a/x", "+/x", "#", "b/rare", "busy/#", "a/+", "busy/1"]
SHARES = ["$share/g/#", "$share/g/b/rare", "$share/h/a/#", "$queue/g/b/rare"]
FOREIGN = ["f1", "f2", "f3"]


class FrontWorkload:
    """One run."""

    def __init__(self, seed: int, *, trace: bool = False, scene: tuple[str, ...] = ()):
        self._scene = scene
        """Happens again and again, in place of everything else that is drawn."""
        self.world = world = World(seed, trace=trace)
        rng = world.rng
        self.disk = disk = Disk(world, rng.choice([1, 1, 2, 3]), shared=rng.random() < 0.5)
        self.truth = Truth(world, disk)
        self._draw_faults()
        slices = rng.choice([1, 1, 2])
        counts = rng.random() < 0.3
        self.groups = Groups(disk.log, lambda: (slices, policy_of(counts)))
        self.settings = FrontSettings(
            flush_secs=rng.choice([0.1, 0.5, 2.0]),
            freeze_secs=rng.choice([0.5, 5.0]),
            grace_secs=rng.choice([0.3, 1.5]),
        )
        self.settings.inflight_max = rng.choice([3, 20])
        self.front: SimFront | None = SimFront(world, disk, self.truth, self.groups, self.settings)
        self.clients = [Client(self, self._draw_profile(n)) for n in range(rng.randint(2, 5))]
        self.publish_seconds = rng.choice([0.03, 0.06, 0.2])
        self.sizes = rng.choice([[30], [30, 30, 200, 1000], [30, 300, 2500]])
        self.retains = rng.choice([0.0, 0.1, 0.4])
        self.expires = rng.choice([0.0, 0.0, 0.1])
        self.foreign_numbers = 0

    def _draw_faults(self) -> None:
        rng, disk = self.world.rng, self.disk
        disk.slow_seconds = rng.choice([0.001, 0.01, 0.1])
        disk.slow_commit_seconds = rng.choice([0.001, 0.01, 0.1])
        disk.commit_fails = rng.choice([0.0, 0.0, 0.02, 0.1])
        disk.commit_lies = rng.choice([0.0, 0.0, 0.0, 0.03])
        disk.fetch_fails = rng.choice([0.0, 0.0, 0.1, 0.3])
        disk.row_fails, disk.row_lost = rng.choice([(0.0, 0.0), (0.0, 0.0), (0.05, 0.02)])
        disk.row_late, disk.row_unanswered = rng.choice([(0.0, 0.0), (0.0, 0.0), (0.03, 0.05)])

    def _draw_profile(self, number: int) -> Profile:
        rng = self.world.rng
        version = rng.choice([p.V5, p.V5, p.V311])
        shares = rng.choice(SHARES) if rng.random() < 0.45 else ""
        own = not shares or (version == p.V5 and rng.random() < 0.4)
        v5 = version == p.V5
        return Profile(
            name=f"c{number + 1}",
            version=version,
            durable=rng.random() < 0.75,
            receive_maximum=rng.choice([1, 2, 10, 65_535]) if v5 else 65_535,
            packet_max=rng.choice([1 << 30, 1 << 30, 400]) if v5 else 1 << 30,
            keep_alive=rng.choice([0, 1, 2]),
            ack_seconds=rng.choice([0.002, 0.02, 0.5]),
            acks=rng.random() < 0.8,
            refuses=rng.choice([0.0, 0.0, 0.1]),
            link_seconds=rng.choice([0.0005, 0.005, 0.03]),
            piece=rng.choice([40, 600, 4000]),
            rap=v5 and rng.random() < 0.2,
            no_local=v5 and rng.random() < 0.2,
            low_ids=rng.random() < 0.5,
            identifiers=v5 and rng.random() < 0.4,
            shares=shares,
            own=own,
        )

    # -- set up --------------------------------------------------------------------------------------------

    def begin(self) -> None:
        world, rng = self.world, self.world.rng
        for client in self.clients:
            world.after(rng.random() * 2, client.connect)
            wishes = [client.profile.shares] if client.profile.shares else []
            if client.profile.own:
                wishes += rng.sample(FILTERS, rng.choice([1, 1, 2, 3]))
            for text in wishes:
                world.after(rng.random() * 3, lambda c=client, t=text: c.subscribe([t]))  # type: ignore[misc]
        world.after(0.1, self._publish)
        for _ in range(rng.randint(6, 30)):
            what = "scene" if self._scene else rng.choice(_ACTIONS)
            world.after(rng.uniform(0.3, WEATHER_SECONDS), lambda w=what: self._do(w, self._someone))  # type: ignore[misc]
        world.after(0.05, self._watch_memory)

    def _watch_memory(self) -> None:
        if self.front is not None:
            self.truth.check_memory()
        self.world.after(0.05, self._watch_memory)

    def _do(self, what: str, client: Client) -> None:
        """To this client, or by it, if it concerns one at all."""
        if not self.world.healing:
            getattr(self, f"_do_{what}")(client)

    def _do_scene(self, client: Client) -> None:
        """Mostly to one who can do all of it: who is remembered, and may say where a subscription begins."""
        world, seconds = self.world, 0.0
        able = [c for c in self.clients if c.profile.own and c.profile.durable and c.profile.version == p.V5]
        if able and world.rng.random() < 0.8:
            client = world.rng.choice(able)
        for what in self._scene or world.rng.choice(SCENES):
            if what == WAIT:
                seconds += world.rng.uniform(0.3, 1.0)
            else:
                world.after(seconds, lambda w=what: self._do(w, client))  # type: ignore[misc]
                seconds += world.rng.random() * world.rng.choice([0.02, 0.1, 0.5])

    @property
    def _someone(self) -> Client:
        return self.world.rng.choice(self.clients)

    # -- publishing ----------------------------------------------------------------------------------------

    def _publish(self) -> None:
        rng, world = self.world.rng, self.world
        if world.healing:
            return
        client = self._someone
        retain = rng.random() < self.retains
        size = 0 if retain and rng.random() < 0.3 else rng.choice(self.sizes)
        expiry = rng.choice([1, 2]) if rng.random() < self.expires else 0
        client.publish(rng.choice(TOPICS), rng.choice([0, 1, 1, 2]), retain=retain, size=size, expiry=expiry)
        world.after(rng.random() * self.publish_seconds, self._publish)

    def _do_traffic(self, client: Client) -> None:
        """A few messages that must be acknowledged."""
        rng, sender = self.world.rng, self._someone
        for _ in range(rng.choice([3, 12])):
            sender.publish(rng.choice(TOPICS), rng.choice([1, 2]), size=rng.choice(self.sizes))

    def _do_send(self, client: Client) -> None:
        for _ in range(self.world.rng.choice([1, 3])):
            client.publish(self.world.rng.choice(TOPICS), 2)

    def _do_burst(self, client: Client) -> None:
        """Much at once, little of it rare."""
        rng, sender = self.world.rng, self._someone
        size = rng.choice([30, 30, 200])
        for _ in range(rng.choice([20, 60, 150])):
            sender.publish("b/rare" if rng.random() < 0.03 else "busy/1", rng.choice([0, 0, 1]), size=size)

    def _do_flood(self, client: Client) -> None:
        """It says more than the node takes while it is kept waiting."""
        self._do_subscribe_again(client)
        for _ in range(120):
            client.publish("busy/2", 0, size=200)

    def _do_large(self, client: Client) -> None:
        client.publish(self.world.rng.choice(TOPICS), self.world.rng.choice([1, 2]), size=12_000)

    def _do_foreign(self, client: Client) -> None:
        """Another process appends."""
        if not self.disk.shared:
            return self._do_burst(client)
        rng, rows = self.world.rng, []
        for _ in range(rng.choice([1, 5, 40, 150])):
            self.foreign_numbers += 1
            payload = f"other-{self.foreign_numbers}.0|".encode().ljust(rng.choice([30, 100]), b".")
            topic = rng.choice(["busy/1"] * 30 + TOPICS)
            rows.append(self.truth.taken(rng.choice(FOREIGN), topic, payload, rng.choice([0, 1, 2]), None))
        self.disk.log.append(rows, self.world.now, ours=False)
        return None

    # -- clients -------------------------------------------------------------------------------------------

    def _do_lose(self, client: Client) -> None:
        client.lose(self.world.rng.choice(["disconnect", "shut", "reset", "vanish"]))

    def _do_reconnect(self, client: Client) -> None:
        """It is back before anybody has noticed."""
        client.lose(self.world.rng.choice(["shut", "vanish"]))
        client.connect()

    def _do_clean(self, client: Client) -> None:
        if client.profile.version == p.V5:
            client.clean_next = True
            client.lose(self.world.rng.choice(["disconnect", "vanish"]))

    def _do_away(self, client: Client) -> None:
        client.wanted = False
        client.lose(self.world.rng.choice(["disconnect", "reset"]))
        self.world.after(self.world.rng.uniform(0.5, 4.0), lambda: self._do_back(client))

    def _do_back(self, client: Client) -> None:
        client.wanted = True
        client.connect()

    def _do_stall(self, client: Client) -> None:
        client.stall(self.world.rng.choice([0.3, 1.0, 4.0]))

    def _do_silence(self, client: Client) -> None:
        client.hold_acks(self.world.rng.choice([0.5, 2.0]))

    def _do_subscribe(self, client: Client) -> None:
        rng = self.world.rng
        if not client.profile.own:
            client.subscribe([client.profile.shares])
            return
        client.subscribe(rng.sample(FILTERS, rng.choice([1, 1, 2])), rng.choice(["", self._draw_start(client)]))

    def _do_subscribe_earlier(self, client: Client) -> None:
        """From an offset on, which what the client has had or waits for may be on either side of."""
        if client.profile.own:
            client.subscribe([self.world.rng.choice(FILTERS)], self._draw_start(client))

    def _do_start_over(self, client: Client) -> None:
        """One that it has, from an offset on."""
        if own := client.own_filters:
            client.subscribe([self.world.rng.choice(own)], self._draw_start(client))

    def _do_skip_ahead(self, client: Client) -> None:
        """One that it has, from where no stream is yet."""
        if (own := client.own_filters) and client.profile.version == p.V5:
            ahead = max(len(stream) for stream in self.disk.log.streams.values())
            client.subscribe([self.world.rng.choice(own)], f"offset:{ahead}")

    def _do_subscribe_again(self, client: Client) -> None:
        if client.wishes:
            client.subscribe([self.world.rng.choice(list(client.wishes))])

    def _draw_start(self, client: Client) -> str:
        rng = self.world.rng
        if client.profile.version != p.V5:
            return ""
        end = len(rng.choice(list(self.disk.log.streams.values())))
        return rng.choice(["beginning", "offset:3", "offset:20", f"offset:{max(0, end - rng.randint(0, 40))}"])

    def _do_subscribe_in_commit(self, client: Client) -> None:
        """Publishes, and at once a SUBSCRIBE that they must not reach."""
        rng = self.world.rng
        if client.profile.own:
            other = self._someone
            for _ in range(rng.choice([1, 3])):
                other.publish("a/x", rng.choice([0, 1, 2]), retain=rng.random() < 0.5, size=rng.choice([0, 30]))
            self.world.after(rng.random() * 0.02, lambda: client.subscribe(["a/x"]))

    def _do_unsubscribe(self, client: Client) -> None:
        if client.wishes:
            client.unsubscribe(self.world.rng.choice(list(client.wishes)))

    # -- the store, the log, the node ----------------------------------------------------------------------

    def _do_outage(self, _: Client) -> None:
        seconds = self.world.rng.choice([0.3, 1.5, 3.0])
        self.world.tell("store", f"is away for {seconds} s")
        self.disk.down_until = self.world.now + seconds

    def _do_slow_commits(self, _: Client) -> None:
        self.disk.commits_slow_until = self.world.now + 0.5

    def _do_lie(self, _: Client) -> None:
        """What is committed next is stored, and the answer is lost."""
        self.disk.lies_next = True

    def _do_seal(self, _: Client) -> None:
        if self.front is not None:
            self.disk.log.open_generation(self.world.rng.choice([1, 2, 3]))
            self.world.tell("log", f"opens generation {self.disk.log.generation}")
            self.front.hint()

    def _do_drop(self, _: Client) -> None:
        front = self.front
        if front is None:
            return
        gone = self.disk.log.drop_oldest()
        self.world.tell("log", f"drops {[str(stream) for stream in gone]}")
        front.hint()

    def _do_crash(self, _: Client) -> None:
        if self.front is None:
            return
        self.front.crash()
        self._restart()

    def _do_stop(self, _: Client) -> None:
        front = self.front
        if front is not None and front.accepting:
            front.spawn(front.stop())
            self._wait_for_stop(front)

    def _wait_for_stop(self, front: SimFront) -> None:
        if self.front is not front:
            return
        if front.life.alive:
            self.world.after(0.02, lambda: self._wait_for_stop(front))
        else:
            self._restart()

    def _restart(self) -> None:
        self.front = None
        self.world.after(self.world.rng.choice([0.05, 0.5]), self._start)

    def _start(self) -> None:
        self.world.tell("node", "starts")
        self.front = SimFront(self.world, self.disk, self.truth, self.groups, self.settings)

    # -- loans ---------------------------------------------------------------------------------------------

    def _do_loan(self, _: Client) -> None:
        front, rng = self.front, self.world.rng
        if front is None:
            return
        members = [m for m in front.lending.members.values() if m.feeds]
        if not members:
            return
        member = rng.choice(members)
        loan = rng.choice(list(member.feeds))
        match rng.choice(["stop", "stop", "abandon", "redeliver"]):
            case "stop":
                front.lending.stop(member, loan)
            case "abandon":
                front.lending.abandon(member, loan)
            case _:
                front.spawn(front.lending.redeliver(member, loan))

    # -- in the end ----------------------------------------------------------------------------------------

    def heal(self) -> None:
        world = self.world
        world.tell("world", "HEALS")
        world.healing = True
        for client in self.clients:
            client.heal()
        for client in self.clients:
            if client.profile.shares and client.profile.shares not in client.wishes:
                client.subscribe([client.profile.shares])
        until = world.now + HEAL_SECONDS_MAX
        while self.unfinished() and world.now < until:
            world.run(world.now + 0.25)
        if left := self.unfinished():
            raise Violation(f"everything is delivered: {left[0]}")
        self.truth.check_retained()

    def unfinished(self) -> list[str]:
        front = self.front
        if front is None or not front.accepting:
            return ["no node"]
        found = [f"{c} is not connected" for c in self.clients if c.link is None or not c.link.open]
        found += [f"{c} waits for {[*c.unanswered]}" for c in self.clients if c.unanswered or c.queue]
        if not front.ingest.idle or front.delivery.following:
            found.append("the ingest, or who follows the log, is busy")
        return found or [*self.truth.missing(), *self._lacking_groups(front), *self._waiting(front)]

    def _lacking_groups(self, front: SimFront) -> list[str]:
        found = []
        served = {group for member in front.lending.members.values() for group in member.subscriptions}
        for group in self.groups.groups.values():
            if group.id not in served:
                continue
            for piece in group.pieces(self.disk.log):
                end = len(self.disk.log.streams[piece.stream])
                if group.cursor(piece).unacked(0, end):
                    found.append(f"{name_of(group.id)} lacks {piece}: {group.cursor(piece)} of {end}")
        return found

    def _waiting(self, front: SimFront) -> list[str]:
        machine = front.delivery.machine
        found = []
        if machine._fetching or machine._hungry or machine._again or machine.waits_for_others:
            found.append(f"reads are left over: {machine._fetching} {machine._hungry} {machine._again}")
        for outlet, connection in front.delivery.connections.items():
            if outlet.reads or outlet.waiting or outlet.retained or outlet.session.outgoing.rows:
                what = f"{outlet.reads} reads, {outlet.waiting}, {outlet.session.outgoing.rows} rows"
                found.append(f"{outlet} is left with {what}")
            readers = [outlet.own, *outlet.loans.values()]
            found += [f"{reader!r} is {reader.status.name}" for reader in readers if reader.status.name != "LIVE"]
            if len(outlet.session.window):
                found.append(f"{outlet} has {len(outlet.session.window)} in flight")
            if connection.machine.holds:
                found.append(f"{outlet} is held: {connection.machine.holds}")
        return found


def name_of(group: GroupId) -> str:
    return f"group {group}"


_ACTIONS = [
    *["scene"] * 8,
    *["burst"] * 3,
    "large",
    *["foreign"] * 4,
    *["lose"] * 4,
    "clean",
    *["away"] * 2,
    *["stall"] * 3,
    *["subscribe"] * 4,
    *["subscribe_in_commit"] * 3,
    *["unsubscribe"] * 2,
    "outage",
    *["seal"] * 2,
    "drop",
    *["crash"] * 2,
    "stop",
    *["loan"] * 4,
]

FAULTS = (HoldfastError, AssertionError, LookupError, TypeError, ValueError, AttributeError)
"""What a machine may not raise, whatever happens."""
