"""Connected sessions in their groups: one agent each, the loans it reads, and what is said between the two.

Everything that groups, sessions and delivery have to do with each other is in this file: `join`, `unsubscribe`,
`leave` and `report` are called for a connection; `_start_reading`, `_stop_reading`, `_abandon`, `_redeliver` and
`_park` perform what the agent asks for.

An agent that breaks down is replaced: its loans are dropped, and the session joins its groups again under a higher
incarnation. What the old one had not told yet is delivered again.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from holdfast.delivery.delivery import LoanStarted, LoanStopped, Room
from holdfast.delivery.outlet import Outlet
from holdfast.groups.member.agent import Agent, farewell
from holdfast.groups.protocol import effects as fx
from holdfast.groups.protocol import events as ev
from holdfast.groups.protocol import messages as m
from holdfast.groups.protocol.nouns import GroupId, Loan
from holdfast.groups.settings import MemberSettings
from holdfast.log.clock import message_time
from holdfast.machine import Address, Send
from holdfast.model import Stream
from holdfast.mqtt.connection import Say
from holdfast.runtime.dead_letters import DeadLetters
from holdfast.runtime.driver import Driver
from holdfast.runtime.offset_reader import Found
from holdfast.sessions.session import Session
from holdfast.sessions.shared import LoanFeed
from holdfast.sessions.stored import LentBefore
from holdfast.sessions.subscriptions import Subscription
from holdfast.sessions.window import NOBODY, RELEASED, Delivery
from holdfast.topics import TopicFilter

if TYPE_CHECKING:
    from holdfast.runtime.connection import Connection

logger = logging.getLogger("holdfast.groups")

PASS_OVER_SECONDS = 0.25
"""How often loans are told of messages that did not concern them."""

REDELIVER_AT_ONCE = 500
"""So many unacknowledged messages are fetched and sent again before the next ones are."""

REJOIN_SECONDS, REJOIN_SECONDS_MAX = 0.05, 5.0
"""How soon a session joins its groups again after its agent broke down; the pause doubles."""


class LoanDelivery(Protocol):
    """Who reads the loans of sessions and sends what is in them."""

    @property
    def heads(self) -> dict[Stream, int]:
        """How far each stream has been delivered."""
        ...

    def handle(self, event: LoanStarted | LoanStopped | Room) -> None: ...

    def pass_over(self, outlet: Outlet) -> None:
        """What was committed and did not concern the loans that are fed from commits is done with."""
        ...


ReadOffsets = Callable[[Stream, Sequence[int]], Awaitable[Mapping[int, Found]]]
"""The messages at these offsets; those that are gone, or that there was no room for, are missing."""


class Membership:
    """A connected session in its groups: its agent, and the loans it reads."""

    def __init__(self, connection: Connection, session: Session):
        assert connection.outlet is not None
        self.connection, self.session, self.outlet = connection, session, connection.outlet
        self.agent: Agent
        self.driver: Driver
        self.feeds: dict[Loan, LoanFeed] = {}
        self.parked: dict[Loan, set[int]] = {}
        """Not to be delivered, of loans that are about to be read."""
        self.subscriptions: dict[GroupId, dict[str, Subscription]] = {}
        """By group and by the filter as the client wrote it: `$share/g/f` and `$queue/g/f` are one group."""
        self.breakdowns = 0
        self.closed = False

    def subscription(self, group: GroupId) -> Subscription | None:
        """The one to deliver under: the last that was made."""
        return next(reversed(self.subscriptions.get(group, {}).values()), None)

    def group_of(self, loan: Loan) -> GroupId | None:
        borrower = self.agent.borrowers.get(loan.member.number)
        return borrower.group if borrower is not None else None


class Memberships:
    """The members of groups among the sessions of this node."""

    def __init__(
        self,
        *,
        node_id: str,
        enabled: bool,
        settings: MemberSettings,
        send: Callable[[Address, Any], None],
        delivery: LoanDelivery,
        dead_letters: DeadLetters,
        read_offsets: ReadOffsets,
        spawn: Callable[[Coroutine[Any, Any, Any]], None],
        group_deleted: Callable[[Connection, Session, GroupId], None],
    ):
        self._node_id, self._enabled, self._settings = node_id, enabled, settings
        self._send, self._delivery, self._dead_letters = send, delivery, dead_letters
        self._read_offsets, self._spawn, self._group_deleted = read_offsets, spawn, group_deleted
        self.members: dict[str, Membership] = {}
        """By the agent's address name."""
        self.on_empty: Callable[[], None] = lambda: None
        """Called when the last member is gone."""
        self._by_connection: dict[Connection, Membership] = {}
        self._by_outlet: dict[Outlet, Membership] = {}
        self._waiting: dict[str, Membership] = {}
        """Members that have gone and wait for their clients, with QoS 2 messages that are theirs, by client id."""
        self._passed: dict[Stream, int] = {}
        """How far each stream went when loans were last told of what did not concern them."""
        self._incarnation = 0

    def known_end(self, stream: Stream) -> int | None:
        """Where the stream ended when somebody last looked, also if it has been dropped since."""
        return self._delivery.heads.get(stream, self._passed.get(stream))

    # -- connections -------------------------------------------------------------------------------------

    async def join(self, connection: Connection, session: Session, group: GroupId, subscription: Subscription) -> None:
        """The session is (again) in this group, which exists or existed; or its options there have changed."""
        if not self._enabled or connection.closed or connection.session is not session:
            return  # the connection went while the group was being declared: nobody would ever leave
        member = self._by_connection.get(connection)
        if member is None:
            member = Membership(connection, session)
            self._by_connection[connection] = self._by_outlet[member.outlet] = member
            self._set_up(member)
        mine = member.subscriptions.setdefault(group, {})
        mine.pop(subscription.filter, None)
        mine[subscription.filter] = subscription
        self._apply(member, group)
        member.driver.give(ev.JoinGroup(group, subscription.born))

    def unsubscribe(self, connection: Connection, group: GroupId, filter_text: str) -> None:
        """The session leaves the group with the last of its subscriptions to it."""
        member = self._by_connection.get(connection)
        if member is None:
            return
        mine = member.subscriptions.get(group, {})
        if mine.pop(filter_text, None) is None:
            return
        if mine:
            self._apply(member, group)
        else:
            del member.subscriptions[group]
            member.driver.give(ev.QuitGroup(group))

    def _apply(self, member: Membership, group: GroupId) -> None:
        """What is lent already is delivered under the subscription as it is now."""
        subscription = member.subscription(group)
        if subscription is not None:
            for loan, feed in member.feeds.items():
                if member.group_of(loan) == group:
                    feed.subscription = subscription

    def leave(self, connection: Connection, *, may_return: bool = False) -> None:
        """The connection is over: whatever it knows goes to the leaders, its loans go back.

        MQTT 5 (4.8.2) wants a QoS 2 message that was sent, and not answered, to go to no other session while this one
        lives. If it `may_return`, such messages wait for it as long as a member may take to give a stream back
        (`groups.revoke_secs`); their loans wait with them, everything else goes back at once.
        """
        member = self._by_connection.pop(connection, None)
        if member is None:
            return
        self.report(member.outlet)
        for feed in list(member.feeds.values()):
            feed.stopped = True
            self._delivery.handle(LoanStopped(member.outlet, feed))
            if may_return:
                feed.wait_for_client(self._unanswered(member.session, feed))
        del self._by_outlet[member.outlet]
        member.closed = True
        if any(feed.stays for feed in member.feeds.values()):
            self._waiting[member.session.client_id] = member
            for group in list(member.subscriptions):
                member.driver.give(ev.QuitGroup(group))
        else:
            member.driver.give(ev.Closed())
        self.forget_finished()

    @staticmethod
    def _unanswered(session: Session, feed: LoanFeed) -> list[int]:
        """QoS 2 messages of this loan that the client may have; those of QoS 1 are not its any more."""
        found = []
        for packet_id, delivery in session.in_flight():
            if delivery.origin is feed and delivery.qos == 2:
                found.append(delivery.offset)
            elif delivery.origin is feed:
                session.window.drop(packet_id)
        return found

    def returned(self, connection: Connection, session: Session) -> None:
        """The client is back: what waited for it is sent again, and its answers are news for the agent that waits.

        What waited for too long, or on another node, has gone to somebody else. Its packet id is released all the same:
        a client that has half of it would take another message under that id for the same one.
        """
        member = self._waiting.get(session.client_id)
        for packet_id, delivery in session.in_flight():
            origin = delivery.origin
            if not isinstance(origin, LentBefore) or connection.outlet is None:
                continue
            feed = self._waiting_feed(member, origin.stream, delivery.offset)
            if feed is None:
                session.window.restore(packet_id, Delivery(NOBODY, 0, RELEASED))
            else:
                session.window.restore(packet_id, delivery._replace(origin=feed))
                feed.news_to = connection.outlet.loan_news

    @staticmethod
    def _waiting_feed(member: Membership | None, stream: Stream, offset: int) -> LoanFeed | None:
        for feed in member.feeds.values() if member is not None else ():
            if feed.stays and feed.stream == stream and offset in feed.in_flight:
                return feed
        return None

    def session_ended(self, client_id: str) -> None:
        """Nobody will come back for what waits."""
        if (member := self._waiting.pop(client_id, None)) is not None:
            member.driver.give(ev.Closed())

    def forget_finished(self) -> None:
        """Members that have gone and whose last words have been heard."""
        for name, member in list(self.members.items()):
            if member.closed and (member.agent.empty or not member.driver.alive):
                del self.members[name]
                member.driver.stop()
                if self._waiting.get(member.session.client_id) is member:
                    del self._waiting[member.session.client_id]
        if not self.members:
            self.on_empty()

    def report(self, outlet: Outlet) -> None:
        """Tell the agent what its client has acknowledged."""
        news = list(outlet.loan_news)
        outlet.loan_news.clear()
        here = self._by_outlet.get(outlet)
        for feed in news:
            # What waited for a client that is back was lent to its earlier connection.
            member = here if here is not None and feed.loan in here.feeds else self._holder(feed)
            if member is not None:
                self._tell(member, feed)

    def _holder(self, feed: LoanFeed) -> Membership | None:
        return next((m for m in self.members.values() if m.feeds.get(feed.loan) is feed), None)

    def see_clock(self, outlet: Outlet) -> None:
        """A process that stood still must know the time before it sends what was lent to it."""
        if (member := self._by_outlet.get(outlet)) is not None:
            member.driver.clock()

    def _tell(self, member: Membership, feed: LoanFeed) -> None:
        if feed.sent:
            sent, feed.sent = tuple(feed.sent), []
            member.driver.give(ev.Delivered(feed.loan, sent))
        if feed.too_large:
            too_large, feed.too_large = tuple(feed.too_large), []
            member.driver.give(ev.Unsendable(feed.loan, too_large))
        if feed.refused:
            refused, feed.refused = tuple(feed.refused), []
            member.driver.give(ev.Refused(feed.loan, refused))
        if news := feed.take_news():
            member.driver.give(ev.Acked(feed.loan, news))
        if feed.stopped and not feed.in_flight and feed.loan in member.feeds:
            del member.feeds[feed.loan]
            member.driver.give(ev.Drained(feed.loan))

    async def pass_over(self) -> None:
        """Now and then: what was committed and did not concern a loan is done with, too."""
        while True:
            await asyncio.sleep(PASS_OVER_SECONDS)
            heads, before = self._delivery.heads, self._passed
            moved = {stream for stream, head in heads.items() if before.get(stream) != head}
            if not moved:
                continue  # nothing came: ten thousand idle loans cost nothing
            self._passed = {**before, **heads} if before.keys() - heads.keys() else dict(heads)
            for member in list(self.members.values()):
                self._delivery.pass_over(member.outlet)
                for feed in list(member.feeds.values()):
                    if feed.stream in moved:
                        self._tell(member, feed)

    def forget_streams(self, streams: Sequence[Stream]) -> None:
        """These were dropped, and everybody has been told."""
        for stream in streams:
            self._passed.pop(stream, None)

    # -- agents ------------------------------------------------------------------------------------------

    def _set_up(self, member: Membership) -> None:
        # Higher than any before, on whatever node: sessions without expiry count from the start each time. A clock
        # that is set back for a while must not make a member older than it was: no leader would give it a seat.
        self._incarnation = max(self._incarnation + 1, message_time())
        member.agent = Agent(
            member.session.client_id, self._incarnation, self._node_id, self._settings, member.outlet.packet_max
        )
        member.driver = Driver(
            f"the agent of {member.session.client_id}",
            member.agent,
            lambda effect: self._perform(member, effect),
            lambda: self._broken(member),
        )
        self.members[member.agent.address.name] = member
        member.outlet.agent = member.agent

    def _broken(self, member: Membership) -> None:
        """Whatever the agent held is the groups' again; the session joins anew."""
        self.members.pop(member.agent.address.name, None)
        for loan in list(member.feeds):
            try:
                self._abandon(member, loan)
            except Exception:  # perhaps that is what the agent failed of: the session must join again all the same
                logger.exception("loan %s could not be dropped", loan)
        member.parked.clear()
        if member.closed:
            self.forget_finished()
            return
        pause = min(REJOIN_SECONDS * 2.0**member.breakdowns, REJOIN_SECONDS_MAX)
        member.breakdowns += 1
        asyncio.get_running_loop().call_later(pause, self._rejoin, member)

    def _rejoin(self, member: Membership) -> None:
        if member.closed:
            return
        self._set_up(member)
        for group in list(member.subscriptions):
            subscription = member.subscription(group)
            if subscription is not None:
                member.driver.give(ev.JoinGroup(group, subscription.born))

    def deliver(self, name: str, message: Any) -> None:
        """A leader's word to the agent of this name."""
        member = self.members.get(name)
        if member is not None:
            member.driver.give(message)
        elif isinstance(message, m.LeaderConnectResponse):
            # It asked, and was gone before the group had a leader: the leader must not lend to a ghost.
            for send in farewell(message, GroupId.parse(message.leader.name), self._node_id):
                self._send(send.to, send.message)

    def _perform(self, member: Membership, effect: Any) -> None:
        match effect:
            case Send(to, message):
                self._send(to, message)
            case fx.StartReading(loan):
                self._start_reading(member, effect)
            case fx.ChangeLargestPacket(owner, largest_packet):
                for each in member.feeds.values():
                    if each.loan.member == owner:
                        each.largest_packet = largest_packet
            case fx.StopReading(loan):
                self._stop_reading(member, loan)
            case fx.Abandon(loan):
                self._abandon(member, loan)
            case fx.Redeliver(loan, offsets):
                self._spawn(self._redeliver(member, loan, offsets))
            case fx.Park(loan, offsets, too_large):
                feed = member.feeds.get(loan)
                (feed.parked if feed is not None else member.parked.setdefault(loan, set())).update(offsets)
                self._spawn(self._park(member, loan, offsets, attempts_least=0 if too_large else 1))
            case fx.Joined(_, group, born):
                for subscription in member.subscriptions.get(group, {}).values():
                    member.session.subscriptions.note_born(subscription, born)
            case fx.Ended(_, group, deleted):
                # After a quick unsubscribe and subscribe the next borrower is at work already.
                if all(borrower.group != group for borrower in member.agent.borrowers.values()):
                    member.subscriptions.pop(group, None)
                asyncio.get_running_loop().call_soon(self.forget_finished)
                if deleted:
                    self._group_deleted(member.connection, member.session, group)

    # -- loans -------------------------------------------------------------------------------------------

    def _start_reading(self, member: Membership, start: fx.StartReading) -> None:
        group = member.group_of(start.loan)
        if group is None or member.closed:
            return
        subscription = member.subscription(group)
        if subscription is None:
            return
        feed = LoanFeed(start, TopicFilter(group.filter), subscription)
        feed.parked |= member.parked.pop(start.loan, set())
        member.feeds[start.loan] = feed
        self._delivery.handle(LoanStarted(member.outlet, feed))

    def _stop_reading(self, member: Membership, loan: Loan) -> None:
        feed = member.feeds.get(loan)
        if feed is None:
            member.driver.give(ev.Drained(loan))
            return
        feed.stopped = True
        self._delivery.handle(LoanStopped(member.outlet, feed))
        self._tell(member, feed)

    def _abandon(self, member: Membership, loan: Loan) -> None:
        feed = member.feeds.pop(loan, None)
        if feed is not None:
            feed.stopped = True
            self._delivery.handle(LoanStopped(member.outlet, feed))
            member.session.forget_loan(feed)
            self._delivery.handle(Room(member.outlet))

    async def _redeliver(self, member: Membership, loan: Loan, offsets: tuple[int, ...]) -> None:
        """Once more to the same client, under the packet ids it has not answered."""
        feed = member.feeds.get(loan)
        if feed is None:
            return
        wanted, session, connection = set(offsets), member.session, member.connection
        again = [(i, d) for i, d in session.window if d.origin is feed and d.offset in wanted]
        for at in range(0, len(again), REDELIVER_AT_ONCE):
            some = again[at : at + REDELIVER_AT_ONCE]
            found = await self._read_offsets(feed.stream, [delivery.offset for _, delivery in some])
            packets = [
                session.outgoing.again(
                    packet_id, delivery, *found[delivery.offset], connection.version, message_time() / 1e6, feed
                )
                for packet_id, delivery in some
                if delivery.offset in found and session.window.get(packet_id) is delivery
            ]
            connection.handle(Say(b"".join(each for each in packets if len(each) <= member.outlet.packet_max)))
        member.driver.give(ev.Delivered(loan, tuple(delivery.offset for _, delivery in again)))

    async def _park(self, member: Membership, loan: Loan, offsets: tuple[int, ...], attempts_least: int) -> None:
        """Set aside in the dead letters' log, durably; only then is it acknowledged to the group.

        Those that were never delivered are larger than anybody in the group takes.
        """
        feed, borrower = member.feeds.get(loan), member.agent.borrowers.get(loan.member.number)
        held = borrower.loans.get(loan.piece) if borrower is not None else None
        if feed is None or borrower is None or held is None or held.loan != loan:
            return
        counts = dict(held.attempts.snapshot()) if held.attempts is not None else {}
        # A slice's cursor says nothing about its neighbours' messages.
        floor = held.cursor.offset + 1 if loan.piece.of == 1 else 0
        letters = {offset: max(counts.get(offset, 0), attempts_least) for offset in offsets}
        stored = self._dead_letters.put(borrower.group, loan.course, feed.stream, letters, floor)
        if not await stored or member.feeds.get(loan) is not feed:
            return  # the next one to hold the stream finds them stored
        for offset in offsets:
            feed.settle_offset(offset)
        member.session.window.disown(feed, offsets)
        self._tell(member, feed)
