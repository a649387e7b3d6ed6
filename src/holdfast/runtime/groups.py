"""The host of shared groups on a node: registry, leaders and agents, and what they ask for, performed for real.

Sessions know none of this. A connection tells of acknowledgements (`report`), the dispatcher feeds the loans that
the agents were granted, and control messages go over the bus.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

from holdfast.errors import HoldfastError
from holdfast.groups.leading.leader import Leader
from holdfast.groups.leading.registry import Registry
from holdfast.groups.member.agent import Agent, farewell
from holdfast.groups.protocol import effects as fx
from holdfast.groups.protocol import events as ev
from holdfast.groups.protocol import messages as m
from holdfast.groups.protocol.nouns import GroupId, Loan
from holdfast.groups.record import GroupRecord, claim_key, in_batches, load_progress, record_key, stored
from holdfast.groups.settings import ElectionSettings, LeaderSettings, MemberSettings
from holdfast.machine import Address, Send
from holdfast.metadata import Delete, Lease, LeaseEnded, Put, VersionMismatch
from holdfast.model import Batch, Stream
from holdfast.runtime.batch_members import BatchMembers
from holdfast.runtime.bus import LocalBus, PostgresBus
from holdfast.runtime.dispatch import rows_of
from holdfast.runtime.driver import Driver
from holdfast.runtime.ingest import LOG
from holdfast.sessions.session import Session, Subscription
from holdfast.sessions.shared import LoanFeed
from holdfast.store.postgres import PostgresStore
from holdfast.topics import TopicFilter

if TYPE_CHECKING:
    from holdfast.runtime.connection import Connection
    from holdfast.runtime.node import Node

logger = logging.getLogger("holdfast.groups")

DEAD_LETTERS = "dead-letters"
PASS_OVER_SECONDS = 0.25
"""How often loans are told of messages that did not concern them."""

BURY_AGAIN_SECONDS = 0.5


class Membership:
    """A connected session in its groups: its agent, and the loans it reads."""

    def __init__(self, host: GroupHost, connection: Connection, session: Session):
        self.connection, self.session = connection, session
        # Higher than any before, on whatever node: sessions without expiry count from the start each time.
        self.agent = Agent(session.client_id, time.time_ns() // 1000, host.node_id, host.member_settings)
        self.driver = Driver(self.agent, lambda effect: host.agent_effect(self, effect))
        self.feeds: dict[Loan, LoanFeed] = {}
        self.parked: dict[Loan, set[int]] = {}
        """Not to be delivered, of loans that are about to be read."""
        self.subscriptions: dict[GroupId, Subscription] = {}
        self.closed = False


class GroupHost:
    def __init__(self, node: Node):
        self.node, self.node_id = node, node.node_id
        self.log, self.metadata = node.log, node.metadata
        chosen = node.settings.groups
        self.member_settings = MemberSettings(ping_seconds=chosen.ping_secs, unsubscribe_seconds=chosen.revoke_secs)
        self.leader_settings = LeaderSettings(
            ping_timeout_seconds=chosen.ping_timeout_secs, revoke_seconds=chosen.revoke_secs
        )
        self.election_settings = ElectionSettings(
            lease_seconds=chosen.lease_secs,
            renew_seconds=chosen.lease_secs * 0.3,
            margin_seconds=chosen.lease_secs * 0.1,
            cool_seconds=chosen.ping_timeout_secs + 0.5,
        )
        self.leaders: dict[str, Driver] = {}
        self.members: dict[str, Membership] = {}
        """By the agent's address name."""
        self.batch_members = BatchMembers(self)
        self._by_connection: dict[Connection, Membership] = {}
        self._leases: dict[int, Lease] = {}
        self.asks: dict[str, asyncio.Future[m.Answer]] = {}
        self._thread = ThreadPoolExecutor(2, "holdfast-groups")
        self._looker = ThreadPoolExecutor(1, "holdfast-streams")
        self._last_words: asyncio.Event | None = None
        self._passed: dict[Stream, int] = {}
        """How far each stream went when loans were last told of what did not concern them."""
        self._outbox: list[tuple[Address, Any]] = []

    def start(self) -> None:
        store = getattr(self.log.backend, "store", None)
        self.bus: LocalBus | PostgresBus = (
            PostgresBus(store, self.node_id, self.deliver)
            if isinstance(store, PostgresStore)
            else LocalBus(self.deliver)
        )
        self.bus.start()
        self.registry = Driver(Registry(self.node_id, self.election_settings), self._registry_effect)
        self.node.spawn(self._pass_over())

    async def stop(self) -> None:
        """Members have been closed; leaders hand over what they know, then the lease is given back."""
        self._last_words = asyncio.Event()
        for driver in list(self.leaders.values()):
            driver.on(ev.Retreat(1.0))
        self._forget_finished()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._last_words.wait(), 2)
        for driver in [*self.leaders.values(), self.registry, *(member.driver for member in self.members.values())]:
            driver.stop()
        self.bus.close()
        for lease in self._leases.values():
            try:
                await self.off(lease.revoke)
            except HoldfastError as error:
                logger.info("the lease will end by itself: %s", error)
        self._thread.shutdown(cancel_futures=True)
        self._looker.shutdown(cancel_futures=True)

    def off(self, work: Callable[..., Any], *arguments: Any) -> asyncio.Future[Any]:
        """On a thread: the store may take its time."""
        return asyncio.get_running_loop().run_in_executor(self._thread, work, *arguments)

    # -- messages ----------------------------------------------------------------------------------------

    def send(self, to: Address, message: Any) -> None:
        if to.node != self.node_id:
            self.bus.send(to, message)
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
                logger.exception("%s could not be told %s", to, type(message).__name__)

    def deliver(self, to: Address, message: Any) -> None:
        match to.kind:
            case "leader":
                (self.leaders.get(to.name) or self.registry).on(message)
            case "registry":
                self.registry.on(message)
            case "agent":
                member = self.members.get(to.name)
                if member is not None:
                    member.driver.on(message)
                else:
                    for send in farewell(message, None, self.node_id):
                        self.send(send.to, send.message)
            case "batch":
                self.batch_members.deliver(to.name, message)
            case "asker":
                waiting = self.asks.get(message.request)
                if waiting is not None and not waiting.done():
                    waiting.set_result(message)
            case _:
                logger.debug("nobody is at %s", to)

    # -- what the registry and the leaders ask for --------------------------------------------------------

    def _registry_effect(self, effect: Any) -> Awaitable[Any] | None:
        match effect:
            case Send(to, message):
                self.send(to, message)
            case fx.OpenLease(asked_at, seconds):
                self._answer(self.registry, self._open_lease, asked_at, seconds)
            case fx.RenewLease(lease, asked_at):
                self._answer(self.registry, self._renew_lease, lease, asked_at)
            case fx.Claim(group, lease):
                self._answer(self.registry, self._claim, group, lease)
            case fx.Resign(group, epoch):
                self._answer(self.registry, self._resign, group, epoch)
            case fx.StartLeader():
                self._start_leader(effect)
            case fx.StopLeader(group, epoch):
                self._stop_leader(group, epoch)
            case fx.TrustUntil(until):
                for driver in list(self.leaders.values()):
                    driver.on(ev.Trusted(until))
        return None

    def _answer(self, driver: Driver, work: Callable[..., Any], *arguments: Any) -> None:
        """Do it on a thread and give the machine what came of it."""

        def done(future: asyncio.Future[Any]) -> None:
            if not future.cancelled() and future.exception() is None:
                if future.result() is not None:
                    driver.on(future.result())
            elif not future.cancelled():
                logger.error("the group host failed", exc_info=future.exception())

        self.off(work, *arguments).add_done_callback(done)

    def _open_lease(self, asked_at: float, seconds: float) -> Any:
        try:
            lease = self.metadata.lease(seconds)
        except HoldfastError as error:
            logger.warning("no lease: %s", error)
            return ev.LeaseFailed()
        self._leases = {lease.id: lease}
        return ev.LeaseOpened(lease.id, asked_at)

    def _renew_lease(self, number: int, asked_at: float) -> Any:
        try:
            self._leases[number].renew()
        except (LeaseEnded, KeyError):
            return ev.LeaseLost(number)
        except HoldfastError as error:
            logger.warning("the lease was not renewed: %s", error)
            return ev.LeaseFailed()
        return ev.LeaseRenewed(number, asked_at)

    def _claim(self, group: GroupId, number: int) -> Any:
        try:
            lease = self._leases.get(number)
            if lease is None:
                return ev.LeaseLost(number)
            version = self.metadata.compare_and_set(claim_key(group), None, self.node_id.encode(), lease)
            if version is not None:
                return ev.Claimed(group, number, version)
            entry = self.metadata.get(claim_key(group))
        except LeaseEnded:
            return ev.LeaseLost(number)
        except HoldfastError as error:
            logger.warning("group %s could not be claimed: %s", group, error)
            return ev.ClaimFailed(group)
        return ev.ClaimFailed(group) if entry is None else ev.Taken(group, entry.value.decode(), entry.version)

    def _resign(self, group: GroupId, epoch: int) -> None:
        try:
            self.metadata.delete(claim_key(group), epoch)
        except HoldfastError as error:
            logger.info("the claim on %s will end with its lease: %s", group, error)

    def _start_leader(self, start: fx.StartLeader) -> None:
        group, epoch = start.group, start.epoch
        machine = Leader(
            group,
            epoch,
            self.node_id,
            self.leader_settings,
            start.trusted_until,
            time.monotonic(),
            in_doubt=start.in_doubt,
        )

        def broken() -> None:
            self.leaders.pop(str(group), None)
            self.registry.on(ev.LeaderRetired(group, epoch, False))

        driver = Driver(machine, lambda effect: self._leader_effect(driver, effect), broken)
        self.leaders[str(group)] = driver
        driver.clock()
        logger.info("leading group %s under epoch %d", group, epoch)

    def _stop_leader(self, group: GroupId, epoch: int) -> None:
        driver = self.leaders.get(str(group))
        if driver is not None and driver.machine.epoch == epoch:  # type: ignore[attr-defined]
            driver.stop()
            del self.leaders[str(group)]

    def _leader_effect(self, driver: Driver, effect: Any) -> Awaitable[Any] | None:
        match effect:
            case Send(to, message):
                self.send(to, message)
            case fx.Save():
                return self.off(self._save, effect)
            case fx.Load(group):
                self._answer(driver, self._load, group)
            case fx.WatchStreams():
                self._look(driver)
            case fx.Retire(group, epoch, clean):
                driver.stop()
                if self.leaders.get(str(group)) is driver:
                    del self.leaders[str(group)]
                    self.registry.on(ev.LeaderRetired(group, epoch, clean))
                    self._forget_finished()
        return None

    def _save(self, save: fx.Save) -> Any:
        """Fenced by the claim's version."""
        puts, deletes = stored(save, time.time())
        try:
            for batch in in_batches(puts, deletes, self.metadata.batch_max):
                changes = [Delete(key) if value is None else Put(key, value) for key, value in batch]
                self.metadata.transact(changes, {claim_key(save.group): save.epoch})
        except VersionMismatch:
            return ev.Deposed()
        except HoldfastError as error:
            logger.warning("progress of %s was not saved: %s", save.group, error)
            return ev.SaveFailed()
        return ev.Saved()

    def _load(self, group: GroupId) -> Any:
        try:
            entry = self.metadata.get(record_key(group))
            if entry is None:
                return ev.Loaded(None)
            record = GroupRecord.from_json(entry.value)
            found = []
            for head in self.log.heads(record.log):
                progress = load_progress(group, head.stream, self._value)
                if progress is not None:
                    found.append(progress)
        except HoldfastError as error:
            logger.warning("group %s could not be loaded: %s", group, error)
            return ev.LoadFailed()
        return ev.Loaded(record, tuple(found))

    def _value(self, key: str) -> bytes | None:
        entry = self.metadata.get(key)
        return entry.value if entry else None

    def _streams_seen(self) -> ev.StreamsSeen:
        heads = self.log.heads(LOG)
        return ev.StreamsSeen(
            tuple(ev.StreamInfo(h.stream, h.next_offset if h.sealed else None, h.next_offset) for h in heads)
        )

    def streams_changed(self) -> None:
        """A generation was sealed, opened or dropped."""
        for driver in list(self.leaders.values()):
            self._look(driver)

    def _look(self, driver: Driver) -> None:
        """On one thread for all: the news must not overtake each other."""
        looking = asyncio.get_running_loop().run_in_executor(self._looker, self._streams_seen)
        looking.add_done_callback(lambda done: self._looked(driver, done))

    def _looked(self, driver: Driver, done: asyncio.Future[ev.StreamsSeen]) -> None:
        if done.cancelled():
            return
        if done.exception() is None:
            driver.on(done.result())
        else:
            logger.warning("the streams cannot be seen: %s", done.exception())
            asyncio.get_running_loop().call_later(0.5, self._look, driver)

    # -- sessions ----------------------------------------------------------------------------------------

    def member(self, connection: Connection, session: Session) -> Membership:
        found = self._by_connection.get(connection)
        if found is None:
            found = Membership(self, connection, session)
            self._by_connection[connection] = found
            self.members[found.agent.address.name] = found
            connection.membership = found
        return found

    async def join(self, connection: Connection, session: Session, group: GroupId, subscription: Subscription) -> None:
        """The session is (again) in this group, which exists or existed."""
        member = self.member(connection, session)
        member.subscriptions[group] = subscription
        member.driver.on(ev.JoinGroup(group, subscription.born))

    def unsubscribe(self, connection: Connection, group: GroupId) -> None:
        if (member := self._by_connection.get(connection)) is not None:
            member.driver.on(ev.QuitGroup(group))

    def leave(self, connection: Connection) -> None:
        """The connection is over: whatever it knows goes to the leaders, its loans go back."""
        self.batch_members.forget(connection)
        member = self._by_connection.pop(connection, None)
        if member is None:
            return
        self.report(connection, member)
        for feed in list(member.feeds.values()):
            feed.stopped = True
            self.node.dispatcher.remove_feed(feed)
        member.closed = True
        member.driver.on(ev.Closed())
        self._forget_finished()

    def _forget_finished(self) -> None:
        """Members that have gone and whose last words have been heard."""
        for name, member in list(self.members.items()):
            if member.closed and member.agent.empty:
                del self.members[name]
                member.driver.stop()
        if self._last_words is not None and not self.members and not self.leaders:
            self._last_words.set()

    def report(self, connection: Connection, member: Membership | None = None) -> None:
        """Tell the agent what its client has acknowledged."""
        member = member or self._by_connection.get(connection)
        if member is None:
            return
        touched, member.session.touched = member.session.touched, {}
        for feed in touched:
            self._tell(member, feed)

    def _tell(self, member: Membership, feed: LoanFeed) -> None:
        if feed.sent:
            sent, feed.sent = tuple(feed.sent), []
            member.driver.on(ev.Delivered(feed.loan, sent))
        if news := feed.take_news():
            member.driver.on(ev.Acked(feed.loan, news))
        if feed.stopped and not feed.in_flight and feed.loan in member.feeds:
            del member.feeds[feed.loan]
            member.driver.on(ev.Drained(feed.loan))

    async def _pass_over(self) -> None:
        """Now and then: what was committed and did not concern a loan is done with, too."""
        while True:
            await asyncio.sleep(PASS_OVER_SECONDS)
            heads, before = self.node.dispatcher.heads, self._passed
            moved = {stream for stream, head in heads.items() if before.get(stream) != head}
            if not moved:
                continue  # nothing came: ten thousand idle loans cost nothing
            self._passed = dict(heads)
            for member in list(self.members.values()):
                for feed in list(member.feeds.values()):
                    if feed.stream in moved:
                        feed.pass_to(heads[feed.stream])
                        self._tell(member, feed)

    def agent_effect(self, member: Membership, effect: Any) -> Awaitable[Any] | None:
        match effect:
            case Send(to, message):
                self.send(to, message)
            case fx.StartReading(loan):
                self._start_reading(member, effect)
            case fx.StopReading(loan):
                self._stop_reading(member, loan)
            case fx.Abandon(loan):
                self._abandon(member, loan)
            case fx.Redeliver(loan, offsets):
                self.node.spawn(self._redeliver(member, loan, offsets))
            case fx.Park(loan, offsets):
                feed = member.feeds.get(loan)
                (feed.parked if feed is not None else member.parked.setdefault(loan, set())).update(offsets)
                self.node.spawn(self._park(member, loan, offsets))
            case fx.Joined(_, group, born):
                if (subscription := member.subscriptions.get(group)) is not None:
                    subscription.born = born
            case fx.Ended(_, group, deleted):
                # After a quick unsubscribe and subscribe the next borrower is at work already.
                if all(borrower.group != group for borrower in member.agent.borrowers.values()):
                    member.subscriptions.pop(group, None)
                asyncio.get_running_loop().call_soon(self._forget_finished)
                if deleted:
                    self.node.group_deleted(member.connection, member.session, group)
        return None

    def _start_reading(self, member: Membership, start: fx.StartReading) -> None:
        borrower = member.agent.borrowers.get(start.loan.member.number)
        if borrower is None or member.closed:
            return
        subscription = member.subscriptions.get(borrower.group)
        if subscription is None:
            return
        feed = LoanFeed(start, TopicFilter(borrower.group.filter), subscription)
        feed.parked |= member.parked.pop(start.loan, set())
        member.feeds[start.loan] = feed
        self.node.dispatcher.add_feed(feed, member.connection)

    def _stop_reading(self, member: Membership, loan: Loan) -> None:
        feed = member.feeds.get(loan)
        if feed is None:
            member.driver.on(ev.Drained(loan))
            return
        feed.stopped = True
        self.node.dispatcher.remove_feed(feed)
        member.session.drop_ready(feed)
        self._tell(member, feed)

    def _abandon(self, member: Membership, loan: Loan) -> None:
        feed = member.feeds.pop(loan, None)
        if feed is not None:
            feed.stopped = True
            self.node.dispatcher.remove_feed(feed)
            member.session.forget_loan(feed)

    async def _redeliver(self, member: Membership, loan: Loan, offsets: tuple[int, ...]) -> None:
        """Once more to the same client, under the packet ids it has not answered."""
        feed, connection = member.feeds.get(loan), member.connection
        if feed is None:
            return
        wanted, stream = set(offsets), feed.stream
        again = [(i, e[1], e[2]) for i, e in member.session.in_flight.items() if e[0] is feed and e[1] in wanted]
        for packet_id, offset, qos in again:
            rows = await self.off(self.node.read_one, stream, offset)
            if rows is not None and member.session.in_flight.get(packet_id, (None,))[0] is feed:
                connection.resend([(packet_id, rows, 0, qos)])
        member.driver.on(ev.Delivered(loan, tuple(offset for _, offset, _ in again)))

    async def _park(self, member: Membership, loan: Loan, offsets: tuple[int, ...]) -> None:
        """Set aside in the dead letters' log, durably; only then is it acknowledged to the group."""
        feed = member.feeds.get(loan)
        borrower = member.agent.borrowers.get(loan.member.number)
        if feed is None or borrower is None:
            return
        while True:
            try:
                await self.off(self._bury, feed.stream, offsets, borrower.group)
                break
            except HoldfastError as error:
                logger.warning("dead letters of %s were not stored: %s", borrower.group, error)
            await asyncio.sleep(BURY_AGAIN_SECONDS)
            if member.feeds.get(loan) is not feed:
                return  # the next one to hold the stream will do it
        for offset in offsets:
            feed.settle(offset)
        for packet_id, (place, offset, qos) in list(member.session.in_flight.items()):
            if place is feed and offset in offsets:
                member.session.in_flight[packet_id] = (None, 0, qos)
        self._tell(member, feed)

    def _bury(self, stream: Stream, offsets: tuple[int, ...], group: GroupId) -> None:
        self.log.create(DEAD_LETTERS, shards=1)
        for offset in offsets:
            rows = rows_of(self.log.read(stream, offset, rows_max=1).chunks[0])
            batch = Batch(
                list(rows.topics),
                list(rows.payloads),
                rows.publishers,
                rows.flags,
                rows.properties,
                list(rows.times),  # type: ignore[arg-type]
            )
            self.log.append(DEAD_LETTERS, batch)
            logger.warning(
                "group %s: %s offset %d was never acknowledged; see log %s", group, stream, offset, DEAD_LETTERS
            )
