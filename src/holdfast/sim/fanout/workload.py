"""Some seconds of requests, orders, vehicles and bad weather, drawn from the seed; then it clears, and all must end."""

from __future__ import annotations

from datetime import UTC, datetime

from holdfast.errors import RequestError
from holdfast.fanout import control as fc
from holdfast.fanout.dispatcher import DispatchSettings
from holdfast.fanout.nouns import Campaign, State
from holdfast.fanout.requests import CampaignOptions, Request, Wave, check
from holdfast.sim.fanout.checkers import Truth
from holdfast.sim.fanout.faults import FanoutFaults, draw
from holdfast.sim.fanout.node import SimNode
from holdfast.sim.fanout.store import SimTable
from holdfast.sim.fanout.vehicles import SimVehicle
from holdfast.sim.front.world import World

WEATHER_SECONDS = 20.0
HEAL_SECONDS_MAX = 90.0
PAUSED_SECONDS_MAX = 13.0
LEFTOVER_SECONDS = 60.0
DATA = ("a", "b" * 40, "c" * 100)
REQUEST_IDS = ("task_a_1", "task_a_2", "task_b_1")
NODES = ("A", "B", "C")


class FanoutWorkload:
    """One run."""

    def __init__(self, seed: int, *, faults: FanoutFaults | None = None, trace: bool = False):
        self.world = world = World(seed, trace=trace)
        rng = world.rng
        drawn = draw(rng)
        self.faults = drawn if faults is None else faults
        self.settings = DispatchSettings(
            attempts_max=rng.choice([2, 3]),
            backoff_secs=rng.choice([0.3, 1.5]),
            backoff_secs_max=3.0,
            ack_secs=rng.choice([0.0, 0.0, 0.0, 2.0]),
            result_secs=4.0,
        )
        self.shards = rng.choice([1, 2])
        self.sweep_seconds = rng.choice([1.0, 5.0])
        self.idle_seconds = rng.choice([6.0, 15.0])
        self.keep_seconds = rng.choice([3.0, 8.0])
        self.payload_seconds, self.upload_seconds, self.key_seconds = 6.0, 6.0, 15.0
        self.collect_seconds = rng.choice([1.0, 3.0])
        self.table = SimTable(world)
        self.truth = self.table.truth = Truth(self, self.table)
        self.nodes: dict[str, SimNode] = {}
        self.names = NODES[: rng.choice([1, 2, 2, 3])]
        self.vins = [f"V{n}" for n in range(rng.randint(1, 5))]
        self.vehicles = [SimVehicle(self, vin, vin) for vin in self.vins]
        if rng.random() < 0.3:
            self.vehicles.append(SimVehicle(self, self.vins[0], f"{self.vins[0]}'"))
        self.shares: dict[str, int] = {}
        for vehicle in self.vehicles:
            self.shares[vehicle.vin] = self.shares.get(vehicle.vin, 0) + 1
        self._vin_of = {vehicle.client_id: vehicle.vin for vehicle in self.vehicles}
        self.pace = rng.choice([0.1, 0.3, 1.0])
        """Seconds between two things that happen."""
        self.request_pace = rng.choice([0.5, 2.0, 5.0])
        self.orders = rng.choice([0.0, 1.0, 4.0])
        """Seconds between two orders; 0: there are none."""
        self.uploads = 0
        self.retries = False

    def vin_of(self, client_id: str) -> str:
        return self._vin_of[client_id]

    def any_node(self) -> SimNode | None:
        return self.world.rng.choice(list(self.nodes.values())) if self.nodes else None

    def begin(self) -> None:
        world, rng = self.world, self.world.rng
        for name in self.names:
            self.start(name)
        for vehicle in self.vehicles:
            world.after(0.1 + rng.random() * 4, vehicle.come)
        world.after(0.2, self._request)
        world.after(0.5, self._act)
        if self.orders:
            world.after(1.0, self._order)
        faults = self.faults
        for name, chance in (
            ("crash", faults.crash),
            ("pause", faults.pause),
            ("breakdown", faults.breakdown),
            ("outage", faults.outage),
            ("damage", faults.damage),
        ):
            at = 0.0
            while chance and (at := at + rng.expovariate(chance * 2)) < WEATHER_SECONDS:
                world.after(at, getattr(self, f"_do_{name}"))

    def start(self, name: str) -> None:
        if name not in self.nodes:
            self.world.tell(name, "starts")
            self.nodes[name] = SimNode(self, name)

    # -- requests ------------------------------------------------------------------------------------------

    def _request(self) -> None:
        world, rng = self.world, self.world.rng
        if world.healing:
            return
        world.after(rng.random() * 2 * self.request_pace, self._request)
        node = self.any_node()
        if node is None:
            return
        ids = rng.sample(self.vins, rng.randint(1, len(self.vins)))
        request_id, data = rng.choice(REQUEST_IDS[: rng.choice([1, 3])]), rng.choice(DATA)
        streamed = rng.random() < 0.4
        number = rng.randint(1, 3) if rng.random() < 0.05 else None
        request = Request(
            request_id=request_id,
            ids=[] if streamed else ids,
            data=data,
            expires=rng.choice([None, None, None, 2.0, 6.0]),
            priority=rng.choice([4, 4, 4, 9, 0]),
            resend=rng.choice(["replace", "replace", "append", "ignore"]),
            key=f"key{rng.randint(1, 3)}" if rng.random() < 0.1 else None,
            final=rng.random() < 0.3,
            campaign=self._options(number),
        )
        try:
            checked = check(request, node.now, digest=repr((request, ids)).encode(), streamed=streamed)
        except RequestError:
            return
        upload: list[list[str]] = []
        if streamed:
            self.uploads += 1
            checked = checked._replace(batch=checked.batch._replace(upload=f"u{self.uploads}"))
            ids = sorted(ids)
            half = rng.randint(0, len(ids))
            upload = [some for some in (ids[:half], ids[half:]) if some]
        world.tell(node, f"gets a batch {request_id} {data[:1]} for {ids}: {request.resend} {request.campaign}")
        node.request(checked, upload)

    def _options(self, number: int | None) -> CampaignOptions | None:
        rng = self.world.rng
        if rng.random() < 0.6:
            return CampaignOptions(number=number) if number is not None else None
        kind = rng.randrange(8)
        time = datetime.fromtimestamp(self.table.now() + rng.choice([1.5, 4.0]), UTC).isoformat()
        match kind:
            case 0:
                acked = rng.choice([0.0, 50.0, 100.0])
                waves = [Wave(vehicles=rng.randint(1, 2), acked_percent=acked, pause_secs=rng.choice([0.0, 1.0]))]
                waves += [Wave(vehicles=1, timeout_secs=3.0)] if rng.random() < 0.4 else []
                return CampaignOptions(number=number, waves=waves)
            case 1:
                acked = rng.choice([0.0, 50.0])
                return CampaignOptions(number=number, waves=[Wave(percent=50.0, acked_percent=acked, min_ended=1)])
            case 2:
                return CampaignOptions(number=number, rate_per_sec=rng.choice([0.5, 1.0, 3.0]))
            case 3:
                return CampaignOptions(number=number, in_flight_max=1, bytes_per_sec=rng.choice([None, 20.0]))
            case 4:
                return CampaignOptions(number=number, result=True)
            case 5:
                return CampaignOptions(number=number, start_at=time)
            case 6:
                return CampaignOptions(number=number, end_at=time)
            case _:
                return CampaignOptions(number=number, paused=True, abort_failed_percent=40.0, abort_min_ended=1)

    # -- operators -----------------------------------------------------------------------------------------

    def _campaigns(self) -> list[Campaign]:
        return [c for c in self.table.rows.campaigns.values() if c.state is not State.CLOSED]

    def _order(self) -> None:
        world, rng = self.world, self.world.rng
        if world.healing:
            return
        world.after(rng.random() * 2 * self.orders, self._order)
        node, campaigns = self.any_node(), self._campaigns()
        if node is None or not campaigns:
            return
        campaign = rng.choice(campaigns[-4:])
        what = rng.randrange(12)
        match what:
            case 0 | 1 | 2:
                node.order(campaign.id, fc.Pause())
                if rng.random() < 0.5:  # at once: nobody may have looked in between
                    world.after(rng.random(), lambda: node.order(campaign.id, fc.Resume()))
            case 3 | 4 | 5:
                node.order(campaign.id, fc.Resume())
            case 6:
                node.order(campaign.id, fc.Cancel())
            case 7:
                node.order(campaign.id, fc.Advance())
            case 8:
                node.order(campaign.id, fc.Edit(rate_per_sec=rng.choice([1.0, 5.0])))
            case 9:
                node.cancel_vins(campaign.id, [rng.choice(self.vins)])
            case 10:
                node.retire(rng.choice(self.vins))
            case _:
                self.retries = True
                node.retry(campaign.id, self.vins)

    # -- vehicles ------------------------------------------------------------------------------------------

    def _act(self) -> None:
        world, rng = self.world, self.world.rng
        if world.healing:
            return
        world.after(rng.random() * 2 * self.pace, self._act)
        vehicle = rng.choice(self.vehicles)
        match rng.choice(
            ["come", "come", "clean", "lose", "lose", "leave", "filter", "heartbeat", "nothing", "nothing"]
        ):
            case "come":
                vehicle.wants = True
                vehicle.come()
            case "clean":
                vehicle.wants = True
                vehicle.come(clean=True)
            case "lose":
                vehicle.lose(rng.choice([0.0, 0.02, 1.0, 8.0]))
                world.after(rng.random() ** 3 * 3, vehicle.come)
            case "leave":
                vehicle.leave()
            case "filter":
                self._filter(vehicle)
            case "heartbeat":
                vehicle.heartbeat()

    def _filter(self, vehicle: SimVehicle) -> None:
        rng = self.world.rng
        exact = vehicle.every[:-1] + rng.choice(REQUEST_IDS)
        vehicle.subscribe(exact, rng.choice([1, 1, None]))
        vehicle.subscribe(vehicle.every, rng.choice([0, None, 1]))
        if rng.random() < 0.7:
            self.world.after(rng.random() * 3, lambda: vehicle.subscribe(vehicle.every, 1))

    # -- bad weather ---------------------------------------------------------------------------------------

    def _do_crash(self) -> None:
        node = self.any_node()
        if node is not None:
            self.world.tell(node, "CRASHES")
            del self.nodes[node.name]
            node.crash()
            self.world.after(self.world.rng.choice([0.5, 3.0, 8.0]), lambda: self.start(node.name))

    def _do_pause(self) -> None:
        node = self.any_node()
        if node is not None:
            seconds = self.world.rng.choice([1.0, 4.0, 9.0, PAUSED_SECONDS_MAX])
            self.world.tell(node, f"stands still for {seconds} s")
            node.paused_until = self.world.now + seconds

    def _do_breakdown(self) -> None:
        node = self.any_node()
        if node is not None and self.world.now >= node.paused_until:
            node.break_down()

    def _do_outage(self) -> None:
        self.world.tell("store", "OUT")
        self.table.outage_until = self.world.now + self.world.rng.choice([1.0, 4.0, 8.0])

    def _do_damage(self) -> None:
        payloads = list(self.table.rows.payloads.values())
        if payloads:
            payload = self.world.rng.choice(payloads)
            self.truth.damaged.add(payload.number)
            payload.data = b"damaged"

    # -- healing -------------------------------------------------------------------------------------------

    def heal(self) -> None:
        """Everybody is there and answers: everything ends, and is collected in time."""
        world = self.world
        world.tell("world", "HEALS")
        world.healing = True
        for name in self.names:
            self.start(name)
        world.run(world.now + 0.5)
        for vehicle in self.vehicles:
            if vehicle.client_id != vehicle.vin and world.rng.random() < 0.5:
                vehicle.leave()  # the vehicle's other client is it again
            else:
                vehicle.heal()
        paused = max(node.paused_until for node in self.nodes.values())
        world.run(max(paused, world.now) + 7.0)  # what was under way when it cleared up
        until = world.now + HEAL_SECONDS_MAX
        while world.now < until and not self._settled():
            world.run(world.now + 1.0)
            self._clear_the_way()
        self.truth.look_at_end()
        until = world.now + LEFTOVER_SECONDS
        while world.now < until and (self.table.rows.payloads or self.table.rows.campaigns):
            world.run(world.now + 1.0)
        world.run(world.now + self.key_seconds)
        self.truth.look_at_leftovers()

    def _settled(self) -> bool:
        rows = self.table.rows
        unmerged = any(not part.merged for part in rows.parts.values())
        return not (rows.waiting or rows.flights or rows.awaiting or unmerged)

    def _clear_the_way(self) -> None:
        """An operator lets everything go that waits for one."""
        for vehicle in self.vehicles:
            if vehicle.link is not None and vehicle.link.filters.get(vehicle.every) != 1:
                vehicle.subscribe(vehicle.every, 1)  # what it had said before has come late
        node = self.any_node()
        assert node is not None
        for campaign in self._campaigns():
            waves_wait = campaign.waved and campaign.open and campaign.reason.startswith("waves by percentage")
            if campaign.state is State.PAUSED:
                node.order(campaign.id, fc.Resume())
            if campaign.waved and campaign.state in (State.RUNNING, State.PAUSED) and not waves_wait:
                node.order(campaign.id, fc.Advance())
            if waves_wait:
                node.order(campaign.id, fc.Cancel())
