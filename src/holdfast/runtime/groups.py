"""The host of shared groups on a node: registry, leaders and members, and what they ask for, performed for real.

    registry, leaders   driven here; what they ask of the stores is done by `group_store`, on threads
    agents              driven by `memberships`, which knows sessions and delivery
    batch members       `batch_members`: machines of clients, reached over control topics
    operators           `group_admin`

Three kinds of work never wait for each other, for each has threads of its own: the node's lease; claims, loads and
saves; and whatever is bulky (dead letters, describing, reading again).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

from holdfast.delivery.outlet import Outlet
from holdfast.errors import HoldfastError, StoreUnavailable
from holdfast.groups.leading.leader import Leader
from holdfast.groups.leading.registry import Registry
from holdfast.groups.protocol import effects as fx
from holdfast.groups.protocol import events as ev
from holdfast.groups.protocol import messages as m
from holdfast.groups.protocol.nouns import GroupId, Key
from holdfast.groups.record import GroupRecord
from holdfast.groups.settings import ElectionSettings, LeaderSettings, MemberSettings
from holdfast.log import Log
from holdfast.log.history import History
from holdfast.machine import Address, Send
from holdfast.metadata import Metadata
from holdfast.model import LOG, Next, Start, Stream
from holdfast.runtime.bus import NodeBus
from holdfast.runtime.dead_letters import DeadLetters, DeadLetterStore
from holdfast.runtime.driver import Driver
from holdfast.runtime.group_admin import GroupAdmin
from holdfast.runtime.group_store import GroupStore
from holdfast.runtime.memberships import LoanDelivery, Memberships
from holdfast.runtime.offset_reader import Found, read_offsets
from holdfast.runtime.supervisor import Supervisor
from holdfast.sessions.session import Session
from holdfast.sessions.subscriptions import Subscription
from holdfast.settings import GroupSettings
from holdfast.store import Bus

if TYPE_CHECKING:
    from holdfast.runtime.connection import Connection

logger = logging.getLogger("holdfast.groups")

LOOK_AGAIN_SECONDS = 0.5
RETREAT_SECONDS = 1.0
ANSWER_SECONDS = 5.0
"""How long a leader may take to answer an operator, beside what it waits for: it may have to be elected first."""
REREAD_BYTES = 16 << 20


class GroupThreads:
    """Which work waits for which: nothing waits for another kind."""

    def __init__(self) -> None:
        self._lease = ThreadPoolExecutor(1, "holdfast-lease")
        self._store = ThreadPoolExecutor(2, "holdfast-groups")
        self._streams = ThreadPoolExecutor(1, "holdfast-streams")
        self._bulk = ThreadPoolExecutor(2, "holdfast-bulk")
        self._closed = False

    def lease(self, work: Callable[..., Any], *given: Any) -> asyncio.Future[Any]:
        """Opening and renewing the node's lease."""
        return self._run(self._lease, work, *given)

    def store(self, work: Callable[..., Any], *given: Any) -> asyncio.Future[Any]:
        """Claims, loads, saves, and the records of groups."""
        return self._run(self._store, work, *given)

    def streams(self, work: Callable[..., Any], *given: Any) -> asyncio.Future[Any]:
        """Which streams there are. One thread for all: the news must not overtake each other."""
        return self._run(self._streams, work, *given)

    def bulk(self, work: Callable[..., Any], *given: Any) -> asyncio.Future[Any]:
        """Whatever may take long and is in nobody's way."""
        return self._run(self._bulk, work, *given)

    def _run(self, pool: ThreadPoolExecutor, work: Callable[..., Any], *given: Any) -> asyncio.Future[Any]:
        if self._closed:
            raise StoreUnavailable("this node is stopping")
        return asyncio.get_running_loop().run_in_executor(pool, work, *given)

    def close(self) -> None:
        self._closed = True
        for pool in (self._lease, self._store, self._streams, self._bulk):
            pool.shutdown(cancel_futures=True)


class GroupHost:
    """Everything about groups that one node does."""

    def __init__(
        self,
        *,
        node_id: str,
        settings: GroupSettings,
        log: Log,
        metadata: Metadata,
        bus: Bus | None,
        delivery: LoanDelivery,
        supervisor: Supervisor,
        spawn: Callable[[Coroutine[Any, Any, Any]], None],
        group_deleted: Callable[[Connection, Session, GroupId], None],
    ):
        self.node_id = node_id
        self._settings, self._supervisor, self._spawn = settings, supervisor, spawn
        self._leader_settings = LeaderSettings(
            ping_timeout_seconds=settings.ping_timeout_secs, revoke_seconds=settings.revoke_secs
        )
        self._election_settings = ElectionSettings(
            lease_seconds=settings.lease_secs,
            renew_seconds=settings.lease_secs * 0.3,
            margin_seconds=settings.lease_secs * 0.1,
            cool_seconds=settings.ping_timeout_secs + 0.5,
        )
        self.threads = GroupThreads()
        history = History(log)
        self._log, self._history = log, history
        self.store = GroupStore(log, metadata, history, LOG, node_id)
        self._dead_letters = DeadLetters(DeadLetterStore(log, metadata, history))
        self.admin = GroupAdmin(
            node_id=node_id,
            store=self.store,
            on_thread=self.threads.store,
            on_bulk_thread=self.threads.bulk,
            send=self.send,
            # A pause is answered once everything is back: given back in time, or taken back from the silent.
            ask_seconds=settings.revoke_secs + settings.ping_timeout_secs + ANSWER_SECONDS,
        )
        self.members = Memberships(
            node_id=node_id,
            enabled=settings.enabled,
            settings=MemberSettings(ping_seconds=settings.ping_secs, unsubscribe_seconds=settings.revoke_secs),
            send=self.send,
            delivery=delivery,
            dead_letters=self._dead_letters,
            read_offsets=self._read_offsets,
            spawn=spawn,
            group_deleted=group_deleted,
        )
        self.members.on_empty = self._check_last_words
        self._leaders: dict[str, Driver] = {}
        self._registry: Driver
        self._others: dict[str, Callable[[str, Any], None]] = {}
        self._bus = NodeBus(bus, self.deliver)
        self._last_words: asyncio.Event | None = None
        self._outbox: list[tuple[Address, Any]] = []
        self._retreating: set[Driver] = set()

    def start(self) -> None:
        self._bus.start(self._supervisor)
        self._set_up_registry()
        self._dead_letters.start(self._supervisor)
        self._supervisor.run("pass over", self.members.pass_over)

    async def stop(self) -> None:
        """Members have been closed; leaders hand over what they know, then the lease is given back."""
        self._last_words = asyncio.Event()
        for driver in list(self._leaders.values()):
            driver.give(ev.Retreat(RETREAT_SECONDS))
        self.members.forget_finished()
        self._check_last_words()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._last_words.wait(), 2)
        members = [member.driver for member in self.members.members.values()]
        for driver in [*self._leaders.values(), self._registry, *members]:
            driver.stop()
        self._bus.close()
        await self.threads.lease(self.store.revoke_leases)
        self._dead_letters.close()
        self.threads.close()

    def yield_to(self, others: Sequence[str]) -> bool:
        """Leave groups to these nodes, from now on; whether none is led here any more. To be called again and again.

        Without others this node leads on: a group is better led by one who is about to go than by nobody.
        """
        self._registry.give(ev.Yield(tuple(others)))
        self._retreating.intersection_update(self._leaders.values())
        for driver in [driver for driver in self._leaders.values() if driver not in self._retreating]:
            if others:
                self._retreating.add(driver)
                driver.give(ev.Retreat(self._settings.revoke_secs))
        return not others or not self._leaders

    def _check_last_words(self) -> None:
        if self._last_words is not None and not self.members.members and not self._leaders:
            self._last_words.set()

    async def declare(self, group: GroupId, start: Start | None = None, key: Key = "publisher") -> GroupRecord:
        return await self.admin.declare(group, start, key)

    # -- for connections ---------------------------------------------------------------------------------

    async def join(self, connection: Connection, session: Session, group: GroupId, subscription: Subscription) -> None:
        await self.members.join(connection, session, group, subscription)

    def unsubscribe(self, connection: Connection, group: GroupId, filter_text: str) -> None:
        self.members.unsubscribe(connection, group, filter_text)

    def leave(self, connection: Connection, *, may_return: bool = False) -> None:
        self.members.leave(connection, may_return=may_return)

    def returned(self, connection: Connection, session: Session) -> None:
        self.members.returned(connection, session)

    def session_ended(self, client_id: str) -> None:
        self.members.session_ended(client_id)

    def report(self, outlet: Outlet) -> None:
        self.members.report(outlet)

    def see_clock(self, outlet: Outlet) -> None:
        self.members.see_clock(outlet)

    async def _read_offsets(self, stream: Stream, offsets: Sequence[int]) -> Mapping[int, Found]:
        try:
            found, _ = await self.threads.bulk(read_offsets, self._log, self._history, stream, offsets, REREAD_BYTES)
        except HoldfastError as error:
            logger.warning("deliveries under way cannot be sent again: %s", error)
            return {}
        return found  # type: ignore[no-any-return]

    # -- messages ----------------------------------------------------------------------------------------

    def register(self, kind: str, deliver: Callable[[str, Any], None]) -> None:
        """Messages to addresses of this kind go there, by name."""
        self._others[kind] = deliver

    def send(self, to: Address, message: Any) -> None:
        if to.node != self.node_id:
            self._bus.send(to, message)
            return
        if not self._outbox:
            asyncio.get_running_loop().call_soon(self._hand_over)
        self._outbox.append((to, message))

    def _hand_over(self) -> None:
        """What was said here to machines here in one turn of the loop; what they answer is for the next."""
        outbox, self._outbox = self._outbox, []
        for to, message in outbox:
            try:
                self.deliver(to, message)
            except Exception:  # our own fault; the others' messages are none the worse for it
                logger.exception("%s could not be given %s", to, type(message).__name__)

    def deliver(self, to: Address, message: Any) -> None:
        match to.kind:
            case "leader":
                (self._leaders.get(to.name) or self._registry).give(message)
            case "registry":
                self._registry.give(message)
            case "agent":
                self.members.deliver(to.name, message)
            case "asker":
                self.admin.answered(message)
            case kind if kind in self._others:
                self._others[kind](to.name, message)
            case _:
                logger.debug("nobody is at %s", to)

    # -- the registry ------------------------------------------------------------------------------------

    def _set_up_registry(self) -> None:
        machine = Registry(self.node_id, self._election_settings)
        self._registry = Driver("the registry", machine, self._perform_for_registry, self._registry_broken)

    def _registry_broken(self) -> None:
        """Its leaders end with it, and the lease is left to end by itself: by then all that was lent is over."""
        for driver in self._leaders.values():
            driver.stop()
        self._leaders.clear()
        self.store.forget_leases()
        self._set_up_registry()

    def _perform_for_registry(self, effect: Any) -> None:
        registry, threads, store = self._registry, self.threads, self.store
        match effect:
            case Send(to, message):
                self.send(to, message)
            case fx.OpenLease(asked_at, seconds):
                registry.give_result(threads.lease(store.open_lease, asked_at, seconds))
            case fx.RenewLease(lease, asked_at):
                registry.give_result(threads.lease(store.renew_lease, lease, asked_at))
            case fx.Claim(group, lease):
                registry.give_result(threads.store(store.claim, group, lease))
            case fx.Resign(group, epoch):
                registry.give_result(threads.store(store.resign, group, epoch))
            case fx.StartLeader():
                self._start_leader(effect)
            case fx.StopLeader(group, epoch):
                self._stop_leader(group, epoch)
            case fx.TrustUntil(until):
                for driver in list(self._leaders.values()):
                    driver.give(ev.Trusted(until))

    # -- leaders -----------------------------------------------------------------------------------------

    def _start_leader(self, start: fx.StartLeader) -> None:
        group, epoch = start.group, start.epoch
        machine = Leader(
            group,
            epoch,
            self.node_id,
            self._leader_settings,
            start.trusted_until,
            time.monotonic(),
            in_doubt=start.in_doubt,
        )
        driver = Driver(
            f"the leader of group {group}, epoch {epoch},",
            machine,
            lambda effect: self._perform_for_leader(driver, effect),
            lambda: self._leader_ended(driver, group, epoch, clean=False),
        )
        self._leaders[str(group)] = driver
        driver.clock()
        logger.info("leading group %s under epoch %d", group, epoch)

    def _stop_leader(self, group: GroupId, epoch: int) -> None:
        driver = self._leaders.get(str(group))
        if driver is not None and driver.machine.epoch == epoch:  # type: ignore[attr-defined]
            driver.stop()
            del self._leaders[str(group)]
            self._check_last_words()

    def _leader_ended(self, driver: Driver, group: GroupId, epoch: int, clean: bool) -> None:
        driver.stop()
        if self._leaders.get(str(group)) is driver:
            del self._leaders[str(group)]
            self._registry.give(ev.LeaderRetired(group, epoch, clean))
            self._check_last_words()

    def _perform_for_leader(self, driver: Driver, effect: Any) -> Awaitable[Any] | None:
        match effect:
            case Send(to, message):
                self.send(to, message)
            case fx.Save():
                return self.threads.store(self.store.save, effect)
            case fx.Load(group):
                driver.give_result(self.threads.store(self.store.load, group))
            case fx.WatchStreams():
                self._look([driver])
            case fx.Trimmed(group, skipped):
                self._spawn(self._trimmed(group, skipped))
            case fx.Disbelieved(group, member, pieces):
                names = ", ".join(map(str, pieces[:5]))
                logger.warning("group %s: %s reports progress beyond the end of %s: refused", group, member, names)
            case fx.Retire(group, epoch, clean):
                self._leader_ended(driver, group, epoch, clean)
        return None

    # -- streams -----------------------------------------------------------------------------------------

    def streams_changed(self) -> None:
        """A generation was sealed, opened or dropped."""
        self._look(list(self._leaders.values()))

    def _look(self, drivers: Sequence[Driver]) -> None:
        """One look for all of these."""
        drivers = [driver for driver in drivers if driver.alive]
        if not drivers:
            return
        looking = self.threads.streams(self.store.streams)
        looking.add_done_callback(lambda done: self._look_again_if_in_vain(drivers, done))
        for driver in drivers:
            driver.give_result(looking)

    def _look_again_if_in_vain(self, drivers: Sequence[Driver], done: asyncio.Future[ev.StreamsSeen | None]) -> None:
        if not done.cancelled() and done.exception() is None and done.result() is None:
            asyncio.get_running_loop().call_later(LOOK_AGAIN_SECONDS, self._look, drivers)

    async def led(self) -> set[GroupId]:
        """The groups that have a leader now: to be asked before anything is dropped."""
        return await self.threads.bulk(self.store.led)  # type: ignore[no-any-return]

    async def streams_dropped(self, ends: Mapping[Stream, int], led_before: set[GroupId]) -> None:
        """Retention dropped these, which ended there, and no lake has them: what groups without a leader lost of it."""
        for group, skipped in (await self.threads.bulk(self.store.unread, ends, led_before)).items():
            await self._trimmed(group, tuple(skipped))

    async def _trimmed(self, group: GroupId, skipped: Sequence[fx.Skipped]) -> None:
        """Retention was faster than this group: a record is kept, and the policy decides how it goes on."""
        lost = []
        for stream, first, past in skipped:
            end = self.members.known_end(stream) if past is None else past
            if end is None or first < end:
                lost.append(fx.Skipped(stream, first, end))
        try:
            gaps = await self.threads.bulk(self.store.note_skipped, group, lost)
            for gap in gaps:
                logger.warning("group %s: %s from offset %d on is gone: %s", group, gap.stream, gap.first, gap.reason)
            if gaps and self._settings.on_trimmed == "error":
                logger.error("group %s is paused: messages it had not read were dropped", group)
                await self.admin.ask(group, m.SetPaused(True))
            elif gaps and self._settings.on_trimmed == "latest":
                await self.admin.seek(group, Next())
        except HoldfastError as error:
            logger.error("group %s lost %s, and that could not be dealt with: %s", group, lost, error)
