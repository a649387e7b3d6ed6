"""One node: what its hosts of fan-out do, in virtual time. The machines are the real ones.

It follows runtime/fanout.py (vehicles, dispatchers, packets), runtime/fanout_intake.py (adding, merging) and
runtime/fanout_keeper.py (following others, keeping); what they decide by themselves is done here the same way.
"""

from __future__ import annotations

import zlib
from collections import deque
from collections.abc import Callable, Collection, Generator, Sequence
from dataclasses import dataclass, field
from math import inf
from typing import TYPE_CHECKING, Any, NamedTuple

from holdfast.errors import Conflict, RequestError, StoreError
from holdfast.fanout import control as fc
from holdfast.fanout import dispatcher as fd
from holdfast.fanout.merge import steps
from holdfast.fanout.nouns import Campaign, Counts, End, InFlight, Sent, State, ticket_of
from holdfast.fanout.requests import Checked
from holdfast.fanout.table import Adopt, Begin, Change, Finish, Part, Return, Verdict
from holdfast.fanout.vehicles import Template, Vehicle
from holdfast.machine import TICK
from holdfast.sessions.window import Delivery, Window
from holdfast.sim.fanout.store import EPOCH_OF_TIME, Stored, Way
from holdfast.sim.front.world import Life, Pending

if TYPE_CHECKING:
    from holdfast.sim.fanout.vehicles import SimVehicle
    from holdfast.sim.fanout.workload import FanoutWorkload

Work = Generator["float | Pending", Any, Any]

LEASE_SECONDS = 6.0
KEEPER_SECONDS = 6.0
RESTART_SECONDS = 0.5
HELD_SECONDS = 0.25
REQUEST = Template("agent/{VIN}/proxy/request/{request_id}")
AT_ONCE = 3
"""Pages are small, so that there are several."""
MERGED_AT_ONCE = 2
ACTIVE = (State.RUNNING, State.PAUSED, State.CANCELLED)
TRIES = 20


@dataclass(eq=False)
class Link:
    """One connection: what the client sends arrives in order, and so does what it is sent."""

    vehicle: SimVehicle
    node: SimNode
    client_id: str
    born: str
    epoch: int
    filters: dict[str, int]
    packet_bytes_max: int
    window_max: int
    window: Window = field(default_factory=Window)
    client_up: bool = True
    node_up: bool = True
    """As each side believes."""
    unanswered: set[int] = field(default_factory=set)
    """Places of what was sent on it, and what its client has not answered."""
    left_out: bool = False
    """It was not subscribed at QoS 1, for a while."""
    frozen: bool = False
    """Its session is to be taken again first, as its node's lease was over."""
    thawed: bool = False
    arrives: dict[str, float] = field(default_factory=dict)

    def later(self, way: str, seconds: float) -> float:
        """When something sent now arrives: not before what was sent earlier."""
        at = max(self.node.world.now + seconds, self.arrives.get(way, 0.0) + 1e-6)
        self.arrives[way] = at
        return at - self.node.world.now


class FlightOrigin:
    def __init__(self, vin: str, place: int, acked: Callable[[str, int, int], None]):
        self.vin, self.place, self._acked = vin, place, acked

    def settle(self, deliveries: Sequence[Delivery], reason: int) -> None:
        self._acked(self.vin, self.place, reason)

    def passed(self, offset: int) -> None: ...


class Taken(NamedTuple):
    place: int
    window: Window
    packet_id: int


class Shard:
    """A dispatcher, and what is under way for it."""

    def __init__(self, machine: fd.Dispatcher):
        self.machine = machine
        self.armed = inf
        self.events: deque[fd.Event] = deque()
        self.busy = False
        self.taken: dict[str, Taken] = {}


@dataclass
class Client:
    epoch: int
    vins: dict[str, dict[str, str | None]] = field(default_factory=dict)


class SimNode:
    """One run of a node."""

    def __init__(self, run: FanoutWorkload, name: str):
        self.run, self.world, self.table, self.truth, self.name = run, run.world, run.table, run.truth, name
        self.life = Life()
        self.paused_until = -1.0
        self.way = Way(self.world, self.table, run.faults)
        self.links: dict[str, Link] = {}
        self.lease = 0
        self.trusted_until = -inf
        self._shards = [Shard(fd.Dispatcher(name, run.settings)) for _ in range(run.shards)]
        self._of_client: dict[str, Client] = {}
        self._payloads: dict[int, bytes] = {}
        self._held: list[tuple[fd.Publish, Taken]] = []
        self._merged = 0
        self._sending: dict[int, object] = {}
        self._hinted = self._unmerged = self.world.pending()
        self._unmerged = self.world.pending()
        self._collect_at = 0.0
        for work in (self._renew, self._follow, self._merge, self._keep):
            self._supervise(work)

    def __str__(self) -> str:
        return self.name

    # -- time and work -------------------------------------------------------------------------------------

    @property
    def now(self) -> float:
        """The store's clock."""
        return EPOCH_OF_TIME + self.world.now

    @property
    def frozen(self) -> bool:
        return self.world.now >= self.trusted_until

    def after(self, seconds: float, call: Callable[[], None]) -> None:
        self.world.after(seconds, lambda: self._awake(call), self.life)

    def _awake(self, call: Callable[[], None]) -> None:
        if self.world.now < self.paused_until:
            self.after(self.paused_until - self.world.now, call)
        elif self.life.alive:
            call()

    def spawn(self, work: Work, on_error: Callable[[Exception], None] | None = None) -> None:
        self._step(work, None, None, on_error)

    def _step(
        self, work: Work, value: Any, error: Exception | None, on_error: Callable[[Exception], None] | None
    ) -> None:
        try:
            wanted = work.send(value) if error is None else work.throw(error)
        except StopIteration:
            return
        except (StoreError, RequestError) as failed:
            if on_error is not None:
                on_error(failed)
            return
        if isinstance(wanted, Pending):
            found = wanted
            found.then(lambda: self._awake(lambda: self._step(work, found.value, found.error, on_error)))
        else:
            self.after(wanted, lambda: self._step(work, None, None, on_error))

    def _supervise(self, work: Callable[[], Work]) -> None:
        self.spawn(work(), lambda _: self.after(RESTART_SECONDS, lambda: self._supervise(work)))

    def crash(self) -> None:
        self.life.alive = False
        for link in list(self.links.values()):
            link.node_up = False
            link.vehicle.cut_off(link)

    # -- the lease -----------------------------------------------------------------------------------------

    def _renew(self) -> Work:
        while True:
            asked_at = self.world.now
            if self.lease and (yield self.way.read(self.table.renew, self.lease, LEASE_SECONDS)):
                self._trusted(asked_at)
            else:
                self.lease = yield self.way.read(self.table.grant, LEASE_SECONDS)
                self._trusted(asked_at)
                for link in list(self.links.values()):
                    link.frozen = True
                    self.spawn(self._take_again(link), lambda _, link=link: self.close(link))  # type: ignore[misc]
            yield 1.0

    def _trusted(self, asked_at: float) -> None:
        self.trusted_until = asked_at + LEASE_SECONDS - 0.5

    def _take_again(self, link: Link) -> Work:
        """The lease was over: whoever is still connected is served on, if nobody has taken its session meanwhile."""
        epoch = yield self.way.read(self._still_ours, link.client_id, link.epoch)
        if epoch is None or self.links.get(link.client_id) is not link:
            self.close(link)
            return
        link.epoch = epoch
        link.thawed, link.frozen = True, False
        link.unanswered.clear()  # the keeper may have taken it back
        self._resumed(link)

    def _still_ours(self, client_id: str, epoch: int) -> int | None:
        row = self.table.people.rows.get(client_id)
        return (
            self.table.take(client_id, False, row.born != "").epoch if row is not None and row.epoch == epoch else None
        )

    # -- connections ---------------------------------------------------------------------------------------

    def connect(self, vehicle: SimVehicle, clean: bool, durable: bool, packet_bytes_max: int, window_max: int) -> None:
        self.spawn(self._connect(vehicle, clean, durable, packet_bytes_max, window_max), lambda _: vehicle.refused())

    def _connect(self, vehicle: SimVehicle, clean: bool, durable: bool, packet_bytes_max: int, window_max: int) -> Work:
        client_id, trusted_until = vehicle.client_id, self.trusted_until
        if self.world.now >= trusted_until:
            vehicle.refused()
            return
        if (before := self.links.get(client_id)) is not None:
            self.close(before)
        stored: Stored = yield self.way.read(self._take, client_id, clean, durable)
        for node in self.run.nodes.values():
            if node is not self and (other := node.links.get(client_id)) is not None:
                node.after(self.world.rng.choice([0.0, 0.1, 1.0]), lambda node=node, other=other: node.close(other))  # type: ignore[misc]
        if (before := self.links.get(client_id)) is not None:
            if before.epoch > stored.epoch:
                vehicle.refused()
                return
            self.close(before)
        if self.frozen:
            vehicle.refused()
            return
        link = Link(vehicle, self, client_id, stored.born, stored.epoch, stored.filters, packet_bytes_max, window_max)
        if stored.present and stored.last_id:
            link.window.last_id = stored.last_id
        else:
            link.window.begin_elsewhere(stored.epoch)
        self.links[client_id] = link
        self.world.tell(
            self, f"welcomes {client_id}, epoch {stored.epoch}{', session present' if stored.present else ''}"
        )
        vehicle.welcomed(link, stored.present)
        self._resumed(link)

    def _take(self, client_id: str, clean: bool, durable: bool) -> Stored:
        """How sessions are taken is not looked at here: what a node that is gone has asked for does not land."""
        if not self.life.alive:
            raise StoreError("nobody is there any more")
        return self.table.take(client_id, clean, durable)

    def close(self, link: Link) -> None:
        """The connection is over, whoever has ended it."""
        if not link.node_up:
            return
        link.node_up = False
        self.table.last_ids[link.client_id] = link.epoch, link.window.last_id
        if self.links.get(link.client_id) is link:
            del self.links[link.client_id]
            self._gone(link)
        link.vehicle.cut_off(link)
        if not link.born:
            self.spawn(self._leave(link))

    def _leave(self, link: Link) -> Work:
        yield self.way.read(self.table.leave, link.client_id, link.epoch)

    def subscribe(self, link: Link, filter_text: str, qos: int | None) -> None:
        """None: it unsubscribes."""
        if not link.node_up:
            return
        link.left_out = link.left_out or not qos
        if qos is None:
            link.filters.pop(filter_text, None)
        else:
            link.filters[filter_text] = qos
        if self._note_filter(link, filter_text, qos or 0):
            self._say_online(link)

    def answered(self, link: Link, packet_id: int, reason: int) -> None:
        if not link.node_up or self.links.get(link.client_id) is not link:
            return
        if self.frozen or link.frozen:  # nothing is read
            self.after(HELD_SECONDS, lambda: self.answered(link, packet_id, reason))
        else:
            link.window.puback((packet_id,), reason)

    def result(self, link: Link, place: int, good: bool) -> None:
        self.spawn(self._result(link.vehicle.vin, place, good))

    def _result(self, vin: str, place: int, good: bool) -> Work:
        flight, _, awaiting = yield self.way.read(self.table.vehicle, vin)
        mine = next((one for one in [*awaiting, flight] if one is not None and one.place == place), None)
        if mine is None:
            return
        finish = Finish(mine, End.ACKED) if good else Finish(mine, End.FAILED, "result: failed")
        if (yield self.way.write(self.table.commit, [finish]))[0] is Verdict.DONE and mine is flight:
            self._give(vin, fd.Resulted(finish))

    # -- vehicles, as in runtime/fanout.py -----------------------------------------------------------------

    def _resumed(self, link: Link) -> None:
        for text, qos in link.filters.items():
            self._note_filter(link, text, qos)
        self._say_online(link)

    def _gone(self, link: Link) -> None:
        client = self._of_client.pop(link.client_id, None)
        if client is not None:
            for vin in client.vins:
                self._give(vin, fd.Offline(vin, client.epoch))

    def _note_filter(self, link: Link, text: str, qos: int) -> bool:
        covered = REQUEST.covered_by(text)
        vin, request = covered if covered is not None else (None, None)
        if not vin:
            return False
        client = self._of_client.get(link.client_id)
        if client is None or client.epoch != link.epoch:
            client = self._of_client[link.client_id] = Client(link.epoch)
        filters = client.vins.setdefault(vin, {})
        if qos:
            filters[text] = request
        else:
            filters.pop(text, None)
        return True

    def _say_online(self, link: Link) -> None:
        client = self._of_client.get(link.client_id)
        for vin, filters in client.vins.items() if client is not None else ():
            if not filters:
                self._give(vin, fd.Offline(vin, link.epoch, connected=True))
                continue
            requests = None if None in filters.values() else frozenset(r for r in filters.values() if r is not None)
            vehicle = Vehicle(vin, link.client_id, link.born, link.epoch, link.packet_bytes_max, requests)
            self._give(vin, fd.Online(vehicle))

    def trigger(self, vins: Collection[str]) -> None:
        for vin in vins:
            self._give(vin, fd.Triggered([vin]))

    # -- dispatchers ---------------------------------------------------------------------------------------

    def _shard(self, vin: str) -> Shard:
        return self._shards[zlib.crc32(vin.encode()) % len(self._shards)]

    def _give(self, vin: str, event: fd.Event) -> None:
        self._give_to(self._shard(vin), event)

    def _give_to(self, shard: Shard, event: fd.Event) -> None:
        shard.events.append(event)
        if shard.busy:
            return
        shard.busy = True
        try:
            while shard.events:
                event = shard.events.popleft()
                shard.machine.lease = self.lease
                for effect in shard.machine.handle(event, self.world.now):
                    self._perform(shard, effect)
        finally:
            shard.busy = False
        self._arm(shard)

    def break_down(self) -> None:
        """A dispatcher has raised something: another one takes its place."""
        shard = self.world.rng.choice(self._shards)
        self.world.tell(self, "a dispatcher is replaced")
        before = shard.machine
        shard.machine = fd.Dispatcher(self.name, self.run.settings)
        shard.events.clear()
        for taken in shard.taken.values():
            taken.window.drop(taken.packet_id)
        shard.taken.clear()
        for link in self.links.values():
            link.unanswered.clear()  # nobody knows any more what is under way on this very connection
        for vehicle in before.connected():
            self._give_to(shard, fd.Online(vehicle))

    def _arm(self, shard: Shard) -> None:
        deadline = shard.machine.deadline
        if deadline < shard.armed:
            shard.armed = deadline
            self.after(max(deadline - self.world.now, 0.0), lambda: self._tick(shard, deadline))

    def _tick(self, shard: Shard, deadline: float) -> None:
        if shard.armed != deadline:
            return
        shard.armed = inf
        if shard.machine.deadline <= self.world.now:
            self._give_to(shard, TICK)
        else:
            self._arm(shard)

    def _perform(self, shard: Shard, effect: fd.Effect) -> None:
        match effect:
            case fd.LookUp(number, vins, limit):
                self.spawn(self._look_up(shard, shard.machine, number, vins, limit))
            case fd.Commit(number, changes):
                self.spawn(self._commit(shard, shard.machine, number, changes))
            case fd.Publish():
                taken = shard.taken.pop(effect.vehicle.vin, None)
                assert taken is not None and taken.place == effect.flight.place, "no packet id was taken"
                self._send(effect, taken)
            case fd.Refused(vin, place):
                held = shard.taken.get(vin)
                if held is not None and held.place == place:
                    del shard.taken[vin]
                    held.window.drop(held.packet_id)

    def _told(self, shard: Shard, machine: fd.Dispatcher, event: fd.Event) -> None:
        """An answer for a dispatcher; one that was replaced has no use for it."""
        if shard.machine is not machine:
            return
        self._give_to(shard, event)
        if not self.world.healing and self.world.chance(self.run.faults.doubled):
            self.after(self.world.rng.random(), lambda: self._told_again(shard, machine, event))

    def _told_again(self, shard: Shard, machine: fd.Dispatcher, event: fd.Event) -> None:
        if shard.machine is machine:
            self._give_to(shard, event)

    def _look_up(self, shard: Shard, machine: fd.Dispatcher, number: int, vins: Sequence[str], limit: int) -> Work:
        try:
            found, campaigns, payloads = yield self.way.read(self._read, vins, limit)
        except StoreError:
            self._told(shard, machine, fd.LookUpFailed(number))
            return
        self._payloads.update(payloads)
        sizes = {payload: len(data) + 2 for payload, data in payloads.items()}
        self._told(shard, machine, fd.LookedUp(number, found, campaigns, sizes, self.now))

    def _read(self, vins: Sequence[str], limit: int) -> tuple[Any, dict[int, Campaign], dict[int, bytes]]:
        found = self.table.look_up(vins, limit)
        campaigns: set[int] = set()
        payloads: set[int] = set()
        for one in found.values():
            campaigns.update(delivery.campaign for delivery in one.waiting)
            payloads.update(delivery.payload for delivery in one.waiting)
            if one.in_flight is not None:
                campaigns.add(one.in_flight.campaign)
                payloads.add(one.in_flight.payload)
        data = {number: self._payloads[number] for number in payloads if number in self._payloads}
        if missing := payloads - data.keys():
            data.update({number: one.data for number, one in self.table.payloads(missing).items()})
        return found, self.table.campaigns(campaigns), data

    def _commit(self, shard: Shard, machine: fd.Dispatcher, number: int, changes: Sequence[Change]) -> Work:
        asked: list[Change] = []
        verdicts: list[Verdict | None] = []
        for change in changes:
            if isinstance(change, Begin | Adopt):
                flight = self._take_id(shard, change.flight)
                if not isinstance(flight, InFlight):
                    verdicts.append(flight)
                    continue
                change = change._replace(flight=flight)
            asked.append(change)
            verdicts.append(Verdict.DONE)
        answers = iter(())
        if asked:
            try:
                answers = iter((yield self.way.write(self.table.commit, asked)))
            except StoreError:
                self._told(shard, machine, fd.CommitFailed(number))
                return
        else:
            yield 0.0
        told = [next(answers) if verdict is Verdict.DONE else verdict for verdict in verdicts]
        self._told(shard, machine, fd.Committed(number, told, self.now))

    def _take_id(self, shard: Shard, flight: InFlight) -> InFlight | Verdict | None:
        link = self.links.get(flight.sent.client_id)
        if link is None or link.epoch != flight.epoch:
            return Verdict.STALE
        window, before = link.window, shard.taken.get(flight.vin)
        if before is not None:
            if before.window is window and before.place == flight.place:
                return flight._replace(sent=flight.sent._replace(packet_id=before.packet_id))
            before.window.drop(before.packet_id)
            del shard.taken[flight.vin]
        if len(window) >= link.window_max:
            return None
        delivery = Delivery(FlightOrigin(flight.vin, flight.place, self._acked), flight.place, 1)
        packet_id = flight.sent.packet_id
        if packet_id and packet_id not in window:
            window.restore(packet_id, delivery)
        else:
            packet_id = window.add(delivery)
        shard.taken[flight.vin] = Taken(flight.place, window, packet_id)
        return flight._replace(sent=Sent(flight.sent.client_id, flight.sent.born, packet_id))

    def _send(self, effect: fd.Publish, taken: Taken) -> None:
        vehicle, flight = effect.vehicle, effect.flight
        link = self.links.get(vehicle.client_id)
        if link is None or link.window is not taken.window:
            return
        if link.epoch != flight.epoch:  # while it was held: its dispatcher has taken it back
            taken.window.drop(taken.packet_id)
            return
        if self.frozen or link.frozen:
            if not self._held:
                self.after(HELD_SECONDS, self._send_held)
            self._held.append((effect, taken))
            return
        data = self._payloads.get(flight.payload)
        if data is None or len(data) + 10 > link.packet_bytes_max:
            taken.window.drop(taken.packet_id)
            reason = "payload missing" if data is None else "packet too large"
            self._give(vehicle.vin, fd.Unsendable(vehicle.vin, flight.place, reason))
            return
        dup = effect.dup and taken.packet_id == flight.sent.packet_id
        told = f"{flight.vin} #{flight.place & 0xFFFF} id {taken.packet_id}{' DUP' if dup else ''}"
        self.world.tell(self, f"sends {told} to {link.client_id}")
        self.truth.sent(self, link, effect, taken.packet_id, dup)
        link.vehicle.arriving(link, taken.packet_id, flight, effect.campaign, dup)

    def _send_held(self) -> None:
        held, self._held = self._held, []
        for effect, taken in held:
            self._send(effect, taken)

    def _acked(self, vin: str, place: int, reason: int) -> None:
        """In a later turn, as the host gathers those of one."""
        self.after(0.0, lambda: self._give(vin, fd.Acked([fd.Ack(vin, place, reason)], self.now)))

    # -- intake --------------------------------------------------------------------------------------------

    def request(self, checked: Checked, upload: Sequence[Sequence[str]] = ()) -> None:
        self.spawn(self._request(checked, upload), lambda _: None)

    def _request(self, checked: Checked, upload: Sequence[Sequence[str]]) -> Work:
        for ids in upload:
            yield self.way.write(self.table.stage, checked.batch.upload, ids)
        answer = (yield self.way.write(self._store, checked))[0]
        if isinstance(answer, Exception):
            self.world.tell(self, f"refuses a batch: {answer}")
            return
        self.world.tell(self, f"stored a batch of campaign {answer.campaign}: {answer}")
        if answer.repeated:
            return
        if answer.merged:
            self.trigger(checked.batch.ids)
            self._tell_others()
        else:
            self.look_for_unmerged()

    def _store(self, checked: Checked) -> list[Any]:
        if checked.data is not None:
            self.table.put_payload(checked.data)
        return self.table.add([checked.batch])

    def look_for_unmerged(self) -> None:
        self._unmerged.settle()

    def _merge(self) -> Work:
        while True:
            yield self._unmerged
            self._unmerged = self.world.pending()
            while (yield from self._merge_run()):
                pass

    def _merge_run(self) -> Work:
        parts, after = yield self.way.read(self.table.unmerged, 5)
        if not parts:
            return False
        for step in steps(parts, after, MERGED_AT_ONCE):
            merged = yield self.way.write(self.table.merge_step, step)
            if merged is None:
                return True
            self.trigger(merged.vins)
            yield 0.01
        self._tell_others()
        return True

    # -- following others ----------------------------------------------------------------------------------

    def _tell_others(self) -> None:
        for node in self.run.nodes.values():
            if node is not self and not self.world.chance(0.0 if self.world.healing else self.run.faults.hint_lost):
                node.after(self.world.rng.random() * 0.1, node.hinted)

    def hinted(self) -> None:
        self._hinted.settle()

    def _follow(self) -> Work:
        self._merged = yield self.way.read(self.table.last_merged)
        while True:
            hinted = self._hinted = self.world.pending()
            self.after(self.run.sweep_seconds, hinted.settle)
            yield hinted
            yield from self._look_at_parts()
            yield from self._look_at_campaigns()

    def _look_at_parts(self) -> Work:
        while True:
            parts = yield self.way.read(self.table.parts_since, self._merged, AT_ONCE)
            for part in parts:
                self.trigger(part.ids)
                self._merged = max(self._merged, part.merged)
                yield 0.0
            if len(parts) < AT_ONCE:
                return

    def _look_at_campaigns(self) -> Work:
        now: dict[int, object] = {}
        for campaign in (yield from self._active((State.RUNNING,))):
            state = now[campaign.id] = (campaign.sending, fc.memory_of(campaign).opened)
            if campaign.sending and self._sending.get(campaign.id) != state:
                for part in (yield from self._parts(campaign.id)):
                    self.trigger(part.ids)
        self._sending = now

    def _parts(self, campaign: int) -> Work:
        found: list[Part] = []
        while True:
            parts = yield self.way.read(self.table.parts_of, campaign, found[-1].number if found else 0, AT_ONCE)
            found += parts
            if len(parts) < AT_ONCE:
                return found

    def _active(self, states: Collection[State]) -> Work:
        found: list[Campaign] = []
        while True:
            page = yield self.way.read(self.table.page, found[-1].id if found else 0, AT_ONCE, states)
            found += page
            if len(page) < AT_ONCE:
                return found

    # -- what operators want -------------------------------------------------------------------------------

    def order(self, campaign: int, event: fc.Event) -> None:
        self.spawn(self._order(campaign, event), lambda error: self.world.tell(self, f"cannot: {error}"))

    def _order(self, campaign_id: int, event: fc.Event) -> Work:
        for _ in range(TRIES):
            campaign = (yield self.way.read(self.table.campaigns, [campaign_id])).get(campaign_id)
            if campaign is None:
                return
            machine = fc.CampaignControl(campaign, self.run.idle_seconds)
            saved = yield from self._control(machine, machine.handle(event, self.now), None)
            if saved is not None:
                self.world.tell(self, f"campaign {campaign_id}: {event}")
                self.truth.ordered(campaign_id, event)
                return

    def _control(self, machine: fc.CampaignControl, effects: Sequence[fc.Effect], epoch: int | None) -> Work:
        for effect in effects:
            match effect:
                case fc.Save(campaign):
                    if not (yield self.way.write(self.table.change_campaign, campaign, epoch)):
                        return None
                    self._hinted.settle()
                    self._tell_others()
                case fc.CutWaves():
                    tickets: set[tuple[int, str]] = set()
                    for part in (yield from self._parts(machine.campaign.id)):
                        tickets |= {(ticket_of(machine.campaign.id, vin), vin) for vin in part.ids}
                    cut = machine.handle(fc.Cut(sorted(ticket for ticket, _ in tickets)), self.now)
                    return (yield from self._control(machine, cut, epoch))
                case fc.EndWaiting():
                    if epoch is not None:
                        yield from self._end_waiting(machine.campaign)
        return machine.campaign

    def cancel_vins(self, campaign: int, vins: Collection[str]) -> None:
        self.spawn(self._cancel_vins(campaign, set(vins)))

    def _cancel_vins(self, campaign: int, vins: set[str]) -> Work:
        for part in (yield from self._parts(campaign)):
            if here := vins.intersection(part.ids):
                waiting = yield self.way.read(self.table.waiting_of, part, here)
                self.truth.cancelled |= {(one.vin, one.place) for one in waiting}
                yield from self._finish(waiting, End.CANCELLED, "cancelled by an operator")

    def retire(self, vin: str) -> None:
        self.spawn(self._retire(vin))

    def _retire(self, vin: str) -> Work:
        _, waiting, awaiting = yield self.way.read(self.table.vehicle, vin)
        self.truth.cancelled |= {(one.vin, one.place) for one in [*waiting, *awaiting]}
        yield from self._finish([*waiting, *awaiting], End.CANCELLED, "vehicle retired")

    def retry(self, campaign: int, vins: Sequence[str]) -> None:
        self.spawn(self._retry(campaign, vins))

    def _retry(self, campaign: int, vins: Sequence[str]) -> Work:
        self.trigger((yield self.way.write(self.table.retry, campaign, vins)))
        self._hinted.settle()
        self._tell_others()

    # -- the keeper ----------------------------------------------------------------------------------------

    def _keep(self) -> Work:
        while True:
            epoch = yield self.way.write(self.table.keep, self.name, KEEPER_SECONDS)
            if epoch is not None:
                yield from self._look_after(epoch)
            yield 1.0

    def _look_after(self, epoch: int) -> Work:
        active = yield from self._active(ACTIVE)
        counts = yield self.way.read(self.table.counts, [campaign.id for campaign in active])
        for campaign in active:
            machine = fc.CampaignControl(campaign, self.run.idle_seconds)
            try:
                looked = machine.handle(fc.Looked(counts.get(campaign.id, Counts())), self.now)
                yield from self._control(machine, looked, epoch)
            except Conflict as error:
                self.world.tell(self, f"a conflict: {error}")
        self.look_for_unmerged()
        yield from self._end_expired()
        yield from self._end_overdue()
        yield from self._take_back()
        if self.world.now >= self._collect_at:
            self._collect_at = self.world.now + self.run.collect_seconds
            yield from self._collect()

    def _end_waiting(self, campaign: Campaign) -> Work:
        end = End.EXPIRED if fc.memory_of(campaign).ends_as == "expired" else End.CANCELLED
        for part in (yield from self._parts(campaign.id)):
            yield from self._end_part(part, end, campaign.reason[:30])
            if (yield self.way.write(self.table.keep, self.name, KEEPER_SECONDS)) is None:
                return

    def _end_part(self, part: Part, end: End, reason: str) -> Work:
        for at in range(0, len(part.ids), AT_ONCE):
            waiting = yield self.way.read(self.table.waiting_of, part, part.ids[at : at + AT_ONCE])
            yield from self._finish(waiting, end, reason)

    def _finish(self, seen: Sequence[Any], end: End, reason: str) -> Work:
        if seen:
            yield self.way.write(self.table.commit, [Finish(one, end, reason) for one in seen])

    def _end_expired(self) -> Work:
        for part in (yield self.way.read(self.table.expired_parts, self.now, AT_ONCE)):
            yield from self._end_part(part, End.EXPIRED, "waited too long")
            yield self.way.write(self.table.part_done, part.number)

    def _end_overdue(self) -> Work:
        while overdue := (yield self.way.read(self.table.overdue, self.now, AT_ONCE)):
            yield from self._finish(overdue, End.FAILED, "no result in time")

    def _take_back(self) -> Work:
        after = ""
        while orphans := (yield self.way.read(self._orphans, after)):
            yield self.way.write(self.table.commit, [Return(one, one.attempts) for one in orphans])
            self.trigger([one.vin for one in orphans])
            after = orphans[-1].vin

    def _orphans(self, after: str) -> list[InFlight]:
        return self.table.orphans(self.table.alive(), after, AT_ONCE)

    def _collect(self) -> Work:
        now = self.now
        while True:
            dropped = yield self.way.write(self.table.drop_uploads, now - self.run.upload_seconds, AT_ONCE)
            dropped += yield self.way.write(
                self.table.collect,
                now - self.run.keep_seconds,
                now - self.run.payload_seconds,
                now - self.run.key_seconds,
                AT_ONCE,
            )
            if not dropped:
                return
            yield 0.02
