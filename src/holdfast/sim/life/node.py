"""A simulated node from its start to its end: the machines of sessions, and the least host that they need."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from math import inf
from typing import TYPE_CHECKING

from holdfast.machine import TICK, Address, Send
from holdfast.mqtt.reasons import Reason
from holdfast.sessions.changes import Content
from holdfast.sessions.clock import StoreClock
from holdfast.sessions.life import (
    Close,
    Connect,
    Effect,
    Event,
    Failed,
    Forget,
    Found,
    Freeze,
    Gone,
    LifeSettings,
    Moved,
    ReadRow,
    Refuse,
    Release,
    Released,
    Resume,
    Saved,
    SessionLife,
    SessionNode,
    State,
    Stop,
    Subscribed,
    Welcome,
    WriteRow,
    Written,
    answer_unheld,
)
from holdfast.sessions.sweep import EndedLeases, SweepSettings, UnheldRows, buried_before, due_writes, orphan_writes
from holdfast.sessions.table import RowWrite, SessionRow, Verdict
from holdfast.sim.checkers import Violation
from holdfast.sim.front.world import Life, World
from holdfast.sim.life.store import SimTable

if TYPE_CHECKING:
    from holdfast.sim.life.checkers import Truth
    from holdfast.sim.life.clients import Link

BATCH_SECONDS = 0.004
"""How long reads and writes of all machines are gathered."""
RENEW_SECONDS = 1.5
WINDOW = 3
"""How many messages may be in flight to one client."""


@dataclass(frozen=True, slots=True)
class Published:
    """Every message there is, by its number: which filter it meets."""

    filters: list[str] = field(default_factory=list)
    masks: dict[str, int] = field(default_factory=dict)

    def add(self, filter_text: str) -> None:
        self.masks[filter_text] = self.masks.get(filter_text, 0) | 1 << len(self.filters)
        self.filters.append(filter_text)


class SimSession:
    """What a node has of a session in memory: numbers of messages are bits."""

    __slots__ = ("acked", "flight", "subs")

    def __init__(self, row: SessionRow):
        self.subs = starts_of(row.subscriptions)
        self.acked = int.from_bytes(row.cursors, "little")
        self.flight = int.from_bytes(row.packets, "little")

    def content(self) -> Content:
        subs = " ".join(f"{name}:{start}" for name, start in self.subs.items())
        return Content(subs.encode(), bits(self.acked), bits(self.flight))

    def wanted(self, published: Published) -> int:
        found = 0
        for name, start in self.subs.items():
            found |= published.masks.get(name, 0) >> start << start
        return found & ~self.acked & ~self.flight


def bits(mask: int) -> bytes:
    return mask.to_bytes((mask.bit_length() + 7) // 8, "little")


def starts_of(subscriptions: bytes) -> dict[str, int]:
    pairs = (word.split(":") for word in subscriptions.decode().split())
    return {name: int(start) for name, start in pairs}


def filters_of(subscriptions: bytes) -> list[str]:
    return list(starts_of(subscriptions))


class Hosted:
    """One machine and what its host keeps for it."""

    __slots__ = ("life", "links", "numbers", "session", "timer_at")

    def __init__(self) -> None:
        self.life: SessionLife
        self.session: SimSession | None = None
        self.links: dict[str, Link] = {}
        """Open connections by token."""
        self.numbers: dict[int, Callable[[], None]] = {}
        self.timer_at = inf

    def content(self, leaving: bool) -> Content:
        return self.session.content() if self.session is not None else Content()


OUR_FAULT = {Reason.SERVER_SHUTTING_DOWN, Reason.USE_ANOTHER_SERVER, Reason.SERVER_BUSY}
"""A node that closes a connection with one of these does it for its own sake."""


class SimNode:
    """One run of a node: a process."""

    def __init__(
        self,
        world: World,
        table: SimTable,
        truth: Truth,
        nodes: dict[str, SimNode],
        published: Published,
        name: str,
        run: int,
        settings: LifeSettings,
        sweep: SweepSettings,
        sweep_seconds: float,
    ):
        self.world, self.table, self.truth, self.nodes, self.published = world, table, truth, nodes, published
        self.name, self.run = name, run
        self.life = Life()
        self.paused_until = -1.0
        self.accepting = True
        self.lost_power = False
        rng, skew = world.rng, table.faults.clock_skew
        self._rate = 1 + rng.uniform(-skew, skew)
        self._began, self._offset = world.now, rng.uniform(0, 1000)
        self.settings, self.sweep_settings, self.sweep_seconds = settings, sweep, sweep_seconds
        self.clock = StoreClock(settings.margin_secs)
        self.node = SessionNode(name, self.clock, settings, filters_of)
        self.hosted: dict[str, Hosted] = {}
        self.leases: set[int] = set()
        """Every lease that this process has ever had."""
        self._reads: list[tuple[str, int]] = []
        self._writes: list[tuple[Hosted, RowWrite]] = []
        self._batching = False
        self._numbers = 0
        self._freeze_at = inf
        self._frozen = True
        self._ended = EndedLeases(sweep)
        self._unheld = UnheldRows(sweep)
        self._look_at = 0.0
        nodes[name] = self
        self._keep_lease()
        self.after(rng.random() * sweep_seconds, self._sweep)

    def __str__(self) -> str:
        return f"{self.name}{self.run}"

    # -- time ----------------------------------------------------------------------------------------------

    @property
    def now(self) -> float:
        """This node's monotonic clock: it neither stops nor jumps."""
        return self._offset + (self.world.now - self._began) * self._rate

    def after(self, seconds: float, call: Callable[[], None]) -> None:
        self.world.after(seconds, lambda: self._enter(call), self.life)

    def _enter(self, call: Callable[[], None]) -> None:
        world = self.world
        if world.now < self.paused_until:
            world.after(self.paused_until - world.now + world.rng.random() * 0.01, lambda: self._enter(call), self.life)
        else:
            call()

    # -- machines ------------------------------------------------------------------------------------------

    def host(self, client: str) -> Hosted:
        hosted = self.hosted.get(client)
        if hosted is None:
            hosted = self.hosted[client] = Hosted()
            hosted.life = SessionLife(client, self.node, hosted.content)
        return hosted

    def handle(self, client: str, event: Event) -> None:
        hosted = self.hosted.get(client)
        if hosted is None:
            return
        now = self.now
        if self.world.trace is not None and event is not TICK:
            self.world.tell(self, f"{client} hears {show(event)}")
        effects = hosted.life.handle(event, now)
        for effect in effects:
            if self.world.trace is not None:
                self.world.tell(self, f"{client} [{hosted.life.state.name}] {show(effect)}")
            self._perform(client, hosted, effect)
        if hosted.life.state is State.NONE:
            return
        deadline = hosted.life.deadline
        if event is TICK and deadline <= now:
            raise Violation(
                f"no machine spins: {self} {client} is {hosted.life.state.name}, due at {deadline} of {now}"
            )
        if deadline < hosted.timer_at:
            hosted.timer_at = deadline
            seconds = max(0.0, (deadline - now) / self._rate) + 1e-6
            self.after(seconds, lambda: self._timer(client, hosted))

    def _timer(self, client: str, hosted: Hosted) -> None:
        hosted.timer_at = inf
        if self.hosted.get(client) is hosted:
            self.handle(client, TICK)

    def _tick_all(self) -> None:
        for client in list(self.hosted):
            self.handle(client, TICK)

    def _perform(self, client: str, hosted: Hosted, effect: Effect) -> None:
        match effect:
            case ReadRow(number):
                self._reads.append((client, number))
                self._batch()
            case WriteRow(write):
                self._writes.append((hosted, write))
                if write.take and hosted.life.token is not None:
                    self.truth.run.stir(client)
                self._batch()
            case Send(to, message):
                if isinstance(message, Released):
                    self.truth.said_released(self, client, message.epoch)
                self._send(to, message)
            case Welcome(token, present, row, _):
                self.truth.welcomed(self, hosted.life, token, present, row)
                hosted.session = SimSession(row)
                hosted.links[token].welcomed(present)
                self._redeliver(client, hosted)
                self.pump(client, hosted)
            case Resume(token):
                self.truth.resumed(self, hosted.life, token)
                self._resumed(client, hosted, hosted.links[token])
            case Freeze(token):
                if (link := hosted.links.get(token)) is not None:
                    link.frozen = True
            case Refuse(token, reason) | Close(token, reason):
                self.truth.connection_over(token, self, by_node=reason in OUR_FAULT)
                link = hosted.links.pop(token, None)
                if link is not None:
                    link.closed_by_node(reason, refused=isinstance(effect, Refuse))
            case Saved(number):
                hosted.numbers.pop(number)()
            case Forget():
                del self.hosted[client]
                self.truth.forgotten(self, client)

    def _resumed(self, client: str, hosted: Hosted, link: Link) -> None:
        link.frozen = False
        for _ in range(len(link.inbox)):
            self.after(0.0, lambda: self.read(link))
        self.pump(client, hosted)

    # -- the store -----------------------------------------------------------------------------------------

    def _batch(self) -> None:
        if not self._batching:
            self._batching = True
            self.after(BATCH_SECONDS, self._flush_batch)

    def _flush_batch(self) -> None:
        self._batching = False
        reads, self._reads = self._reads, []
        asked, self._writes = self._writes, []
        writes = [write for _, write in asked]
        if reads:
            self.table.call(self, lambda: self._read(reads), self._found, lambda in_doubt: None)
        if writes:
            self.table.call(
                self,
                lambda: self.table.commit(self, writes),
                lambda verdicts: self._written(asked, verdicts),
                lambda in_doubt: self._failed(asked, in_doubt),
                writes,
            )

    def _read(self, reads: list[tuple[str, int]]) -> list[tuple[str, Found]]:
        found = []
        for client, number in reads:
            row = self.table.rows.get(client)
            over = row is not None and row.lease is not None and not self.table.lives(row.lease)
            found.append((client, Found(number, row, over)))
        return found

    def _found(self, answers: list[tuple[str, Found]]) -> None:
        for client, found in answers:
            self.handle(client, found)

    def _written(self, asked: list[tuple[Hosted, RowWrite]], verdicts: list[Verdict]) -> None:
        for (hosted, write), verdict in zip(asked, verdicts, strict=True):
            self._answer(hosted, write.row.client_id, Written(verdict))

    def _failed(self, asked: list[tuple[Hosted, RowWrite]], in_doubt: bool) -> None:
        for hosted, write in asked:
            self._answer(hosted, write.row.client_id, Failed(in_doubt))
            if in_doubt and write.take:
                self.truth.run.stir(write.row.client_id)

    def _answer(self, hosted: Hosted, client: str, event: Event) -> None:
        """To the machine that asked, not to the next one of that client."""
        if self.hosted.get(client) is hosted:
            self.handle(client, event)

    # -- the lease -----------------------------------------------------------------------------------------

    def _keep_lease(self) -> None:
        """Renewed, or opened again; and the store's time with it."""
        asked_at, table, lease = self.now, self.table, self.node.lease
        seconds = self.settings.lease_secs

        def work() -> tuple[int | None, float]:
            if lease is not None:
                return (lease if table.renew(lease, seconds) else None), table.time
            granted = table.grant(seconds)
            self.leases.add(granted)
            return granted, table.time

        table.call(self, work, lambda found: self._lease_answer(lease, asked_at, *found), lambda in_doubt: None)
        self.after(RENEW_SECONDS, self._keep_lease)

    def _lease_answer(self, lease: int | None, asked_at: float, found: int | None, store_time: float) -> None:
        if not self.life.alive or self.lost_power:
            return
        self.clock.heard(store_time, asked_at, self.now)
        node, was = self.node, self.node.lease
        if found is None:
            if node.lease == lease:
                node.lost()
                self._tick_all()
                self._keep_lease_soon()
            return
        if not self.clock.known:
            return
        if lease is None:
            if node.lease is not None:
                self.table.revoke(found)  # two answers; nobody was told of this one
                return
            node.granted(found, asked_at)
        elif node.lease == lease:
            node.renewed(asked_at)
        lapsed = self._frozen
        self._frozen = self.now >= node.trusted_until
        if node.lease != was or (lapsed and not self._frozen):
            self._tick_all()
        self._watch_trust()

    def _keep_lease_soon(self) -> None:
        asked_at, table = self.now, self.table

        def work() -> tuple[int | None, float]:
            granted = table.grant(self.settings.lease_secs)
            self.leases.add(granted)
            return granted, table.time

        table.call(self, work, lambda found: self._lease_answer(None, asked_at, *found), lambda in_doubt: None)

    def _watch_trust(self) -> None:
        """Every machine is told when the lease is no longer to be trusted."""
        if self._freeze_at == inf and not self._frozen:
            self._freeze_at = self.node.trusted_until
            self.after((self._freeze_at - self.now) / self._rate + 1e-6, self._trust_is_over)

    def _trust_is_over(self) -> None:
        self._freeze_at = inf
        if self.now >= self.node.trusted_until:
            self._frozen = True
            self._tick_all()
        self._watch_trust()

    # -- the sweep -----------------------------------------------------------------------------------------

    def _sweep(self) -> None:
        self.after(self.sweep_seconds, self._sweep)
        if not self.clock.known or self.lost_power:
            return
        table, now, lease = self.table, self.clock.time(self.now), self.node.lease
        looks = self.now >= self._look_at
        if looks:
            self._look_at = self.now + self.sweep_settings.unheld_secs

        def work() -> tuple[list[SessionRow], dict[int, list[SessionRow]], list[SessionRow]]:
            table.bury(buried_before(now, self.sweep_settings))
            orphans = {one: table.of_lease(one) for one in sorted(table.named()) if not table.lives(one)}
            own = table.of_lease(lease) if looks and lease is not None else []
            return table.due(now), orphans, own

        table.call(self, work, lambda found: self._swept(looks, *found), lambda in_doubt: None)

    def _swept(
        self, looks: bool, due: list[SessionRow], orphans: dict[int, list[SessionRow]], own: list[SessionRow]
    ) -> None:
        if self.lost_power:
            return
        time = self.clock.time(self.now)
        writes = due_writes(due, self.hosted, time, filters_of)
        for lease in self._ended.over(orphans, (), self.now):
            writes += orphan_writes(orphans[lease], self.hosted, time, self.sweep_settings.grace_secs, filters_of)
        if looks:
            writes += self._unheld.page(own, self.hosted, time, filters_of)
            self._unheld.finish()
        if writes:
            self.table.call(
                self, lambda: self.table.commit(self, writes), lambda verdicts: None, lambda in_doubt: None, writes
            )

    # -- the bus -------------------------------------------------------------------------------------------

    def _send(self, to: Address, message: Release | Released) -> None:
        world, faults, rng = self.world, self.table.faults, self.world.rng
        copies = 1
        if not world.healing:
            roll = rng.random()
            if roll < faults.drop:
                return
            copies = 2 if roll > 1 - faults.duplicate else 1
        for _ in range(copies):
            seconds = rng.random() * faults.delay_seconds
            if not world.healing and faults.straggle and rng.random() < faults.straggle:
                seconds = rng.random() * 5
            world.after(seconds, lambda: self._arrives(to, message))

    def _arrives(self, to: Address, message: Release | Released) -> None:
        """Whoever has that name hears it."""
        if not self.world.healing and frozenset((self.name, to.node)) in self.table.cut:
            return
        for node in self.truth.run.processes:
            if node.name == to.node and node.life.alive:
                node.after(0.0, lambda one=node: one.receive(message))  # type: ignore[misc]

    def receive(self, message: Release | Released) -> None:
        if message.client_id in self.hosted:
            self.handle(message.client_id, message)
        elif isinstance(message, Release):
            for effect in answer_unheld(message, self.node):
                self.truth.said_released(self, message.client_id, effect.message.epoch)
                self._send(effect.to, effect.message)

    # -- clients -------------------------------------------------------------------------------------------

    def connect(self, link: Link, connect: Connect) -> None:
        if link.lost:
            return
        if not self.accepting or not self.clock.known:
            link.closed_by_node(Reason.USE_ANOTHER_SERVER, refused=True)
            return
        client = link.client.name
        hosted = self.host(client)
        hosted.links[connect.token] = link
        self.truth.arrived(connect, client)
        self.handle(client, connect)

    def gone(self, link: Link, goodbye: bool = False, expiry_secs: int | None = None) -> None:
        """The connection has ended, and this node has noticed."""
        client, token = link.client.name, link.token
        link.lost = True
        hosted = self.hosted.get(client)
        if hosted is None or hosted.links.get(token) is not link:
            return
        if not goodbye:
            del hosted.links[token]
        self.truth.connection_over(token, self, goodbye=goodbye, expiry_secs=expiry_secs)
        self.handle(client, Gone(token, goodbye, expiry_secs))

    def read(self, link: Link) -> None:
        """The next packet of a client that is welcome: nothing is read while it is frozen."""
        client = link.client.name
        hosted = self.hosted.get(client)
        if hosted is None or hosted.links.get(link.token) is not link or not link.inbox:
            return
        if not hosted.life.serves(self.now):
            self.handle(client, TICK)
            if not (link.frozen and link.eager and link.inbox and link.inbox[-1][0] == "goodbye"):
                return
            while len(link.inbox) > 1:  # what came before it was not read, and is lost with it
                link.inbox.popleft()
        if hosted.life.token != link.token:
            return
        session = hosted.session
        assert session is not None
        kind, value = link.inbox.popleft()
        if kind == "ack":
            self._acked(client, hosted, session, int(value))
        elif kind == "goodbye":
            self.gone(link, True, None if value == "" else int(value))
        else:
            self._subscribe(client, hosted, link, session, kind, str(value))

    def _acked(self, client: str, hosted: Hosted, session: SimSession, number: int) -> None:
        if session.flight >> number & 1:
            session.flight &= ~(1 << number)
            session.acked |= 1 << number
            self.truth.processed_ack(self, hosted.life, number)
            self.handle(client, Moved())
            self.pump(client, hosted)

    def _subscribe(
        self, client: str, hosted: Hosted, link: Link, session: SimSession, kind: str, filter_text: str
    ) -> None:
        if kind == "subscribe":
            session.subs.setdefault(filter_text, len(self.published.filters))
        else:
            session.subs.pop(filter_text, None)
        self._numbers += 1
        number, life, start = self._numbers, hosted.life, session.subs.get(filter_text)

        def answer() -> None:
            self.truth.subscription_saved(life, filter_text, start)
            link.answered(kind, filter_text, start)

        hosted.numbers[number] = answer
        self.handle(client, Subscribed(number))
        self.pump(client, hosted)

    def pump(self, client: str, hosted: Hosted) -> None:
        """Send what is wanted while the window has room."""
        session = hosted.session
        if session is None or hosted.life.token is None or not hosted.life.serves(self.now):
            return
        wanted = session.wanted(self.published)
        sent = False
        while wanted and session.flight.bit_count() < WINDOW:
            low = wanted & -wanted
            wanted ^= low
            session.flight |= low
            sent = True
            self._deliver(hosted, low.bit_length() - 1, again=False)
        if sent:
            self.handle(client, Moved())

    def _redeliver(self, client: str, hosted: Hosted) -> None:
        assert hosted.session is not None
        flight = hosted.session.flight
        while flight:
            low = flight & -flight
            flight ^= low
            self._deliver(hosted, low.bit_length() - 1, again=True)

    def _deliver(self, hosted: Hosted, number: int, *, again: bool) -> None:
        token = hosted.life.token
        assert token is not None
        self.truth.delivered(self, hosted.life, number)
        hosted.links[token].deliver(number)

    # -- its end -------------------------------------------------------------------------------------------

    def break_down(self, client: str) -> None:
        """A machine has raised, and was dropped with its connections."""
        hosted = self.hosted[client]
        if hosted.life.state not in (State.HERE, State.FROZEN):
            return
        self.world.tell(self, f"{client} BREAKS DOWN")
        del self.hosted[client]
        self.truth.broke_down(hosted.life)
        for token, link in hosted.links.items():
            self.truth.connection_over(token, self, by_node=True)
            link.node_died()

    def crash(self) -> None:
        self.world.tell(self, "CRASHES")
        self._die()

    def stop(self, reason: int, drains: bool) -> None:
        """Clients are told, what is unsaved is saved, then the lease is revoked."""
        self.world.tell(self, "is drained" if drains else "STOPS")
        self.accepting = False
        for client in list(self.hosted):
            self.handle(client, Stop(reason, lease_stays=drains))
        if not drains:
            self.after(0.05, lambda: self._finish_stop(self.now + 3))

    def _finish_stop(self, until: float) -> None:
        if self.hosted and self.now < until:
            self.after(0.05, lambda: self._finish_stop(until))
            return
        lease = self.node.lease
        if lease is not None and self.table.reaches(self.name):
            self.table.revoke(lease)
        self.world.tell(self, "has stopped")
        self._die()

    def _die(self) -> None:
        self.life.alive, self.lost_power = False, True
        if self.nodes.get(self.name) is self:
            del self.nodes[self.name]
        for hosted in self.hosted.values():
            for token, link in list(hosted.links.items()):
                self.truth.connection_over(token, self, by_node=True)
                link.node_died()


def show(what: object) -> str:
    """One event or effect, as people read it."""
    match what:
        case WriteRow(write):
            row = write.row
            kind = "take" if write.take else "write"
            state = "dead" if row.dead else f"lease {row.lease}" if row.lease is not None else "away"
            said = f" publishes {write.publish.payload.decode()}" if write.publish else ""
            return f"{kind} {write.expected} -> {state} {row.connect}{said}"
        case Written(verdict):
            return f"Written {'yes' if verdict.accepted else 'no'}: {show_row(verdict.row)}"
        case Found(number, row, over):
            return f"Found #{number} {show_row(row)}{' lease over' if over else ''}"
        case Welcome(token, present, row, _):
            return f"Welcome {token}{' present' if present else ''} {show_row(row)}"
        case Send(to, message):
            return f"-> {to.node}: {show(message)}"
        case Release(_, epoch, lease):
            return f"Release epoch {epoch} lease {lease}"
        case Released(_, epoch):
            return f"Released epoch {epoch}"
        case _:
            return str(what)


def show_row(row: SessionRow | None) -> str:
    if row is None:
        return "no row"
    state = "dead" if row.dead else f"{row.owner} lease {row.lease}" if row.lease is not None else "away"
    will = f" will {row.will.payload.decode()}" if row.will else ""
    return f"({row.epoch},{row.seq}) {state} {row.connect}/{row.born}{will}"
