"""Shared groups as far as delivery sees them: pieces of streams lent to sessions, called back, abandoned.

`Groups` stands for the leaders, which are simulated elsewhere, and outlives nodes; `SimLending` does at the node what
`runtime.memberships` does: loans become feeds, and what feeds have done becomes the group's progress.
"""

from __future__ import annotations

from collections.abc import Callable
from math import inf
from typing import TYPE_CHECKING, Any

from holdfast.cursors.cursor import Cursor, Range
from holdfast.delivery.delivery import LoanStarted, LoanStopped, Room
from holdfast.delivery.outlet import Outlet
from holdfast.groups.protocol.effects import StartReading
from holdfast.groups.protocol.nouns import NO_POLICY, GroupId, Loan, Mark, MemberId, Piece, Policy
from holdfast.groups.shares import parse_share
from holdfast.model import Stream
from holdfast.mqtt.connection import Say
from holdfast.sessions.session import Session
from holdfast.sessions.shared import LoanFeed
from holdfast.sessions.stored import LentBefore
from holdfast.sessions.subscriptions import Subscription
from holdfast.sessions.window import NOBODY, RELEASED, Delivery
from holdfast.sim.front.disk import SimLog, rows_at
from holdfast.sim.front.world import Work
from holdfast.topics import TopicFilter

if TYPE_CHECKING:
    from holdfast.sim.front.connection import SimConnection
    from holdfast.sim.front.node import SimFront

PASS_OVER_SECONDS = 0.25
LEASE_SECONDS = 1.0


class Group:
    """A group's progress, and what of it is lent."""

    def __init__(self, group: GroupId, slices: int, policy: Policy, starts: dict[Stream, int]):
        self.id, self.slices, self.policy = group, slices, policy
        self.starts = starts
        """Streams that came later are read from their beginning."""
        self.wanted = TopicFilter(group.filter)
        self.cursors: dict[Piece, Cursor] = {}
        self.lent: set[Piece] = set()

    def pieces(self, log: SimLog) -> list[Piece]:
        return [Piece(stream, part, self.slices) for stream in log.streams for part in range(self.slices)]

    def cursor(self, piece: Piece) -> Cursor:
        found = self.cursors.get(piece)
        if found is None:
            found = self.cursors[piece] = Cursor(self.starts.get(piece.stream, 0) - 1)
        return found


class Groups:
    """All groups there are."""

    def __init__(self, log: SimLog, draw: Callable[[], tuple[int, Policy]]):
        self._log, self._draw = log, draw
        self.groups: dict[GroupId, Group] = {}
        self.loans = 0

    def declare(self, group: GroupId) -> Group:
        found = self.groups.get(group)
        if found is None:
            starts = {stream: len(rows) for stream, rows in self._log.streams.items()}
            found = self.groups[group] = Group(group, *self._draw(), starts)
        return found


class Trust:
    """In the place of a member's agent: until when it may believe that what was lent to it is its own."""

    def __init__(self) -> None:
        self.deadline = inf

    def handle(self, event: Any, now: float) -> list[Any]:
        return []


class Membership:
    def __init__(self, connection: SimConnection, session: Session, outlet: Outlet):
        self.connection, self.session, self.outlet = connection, session, outlet
        self.feeds: dict[Loan, LoanFeed] = {}
        self.subscriptions: dict[GroupId, dict[str, Subscription]] = {}
        self.trust = Trust()
        outlet.agent = self.trust

    def subscription(self, group: GroupId) -> Subscription | None:
        return next(reversed(self.subscriptions.get(group, {}).values()), None)


class SimLending:
    def __init__(self, front: SimFront, groups: Groups):
        self.front, self.world, self.groups = front, front.world, groups
        self.members: dict[Outlet, Membership] = {}
        self._group_of: dict[Loan, Group] = {}
        front.delivery.on_loan_news = self.report
        front.delivery.ask_clock = self.see_clock

    # -- members -------------------------------------------------------------------------------------------

    def join(self, connection: SimConnection, session: Session, text: str, subscription: Subscription) -> None:
        outlet = connection.outlet
        if connection.closed or outlet is None:
            return
        member = self.members.get(outlet)
        if member is None:
            member = self.members[outlet] = Membership(connection, session, outlet)
        group = parse_share(text)
        self.groups.declare(group)
        mine = member.subscriptions.setdefault(group, {})
        mine.pop(text, None)
        mine[text] = subscription
        for loan, feed in member.feeds.items():
            if self._group_of[loan].id == group:
                feed.subscription = subscription

    def unsubscribe(self, connection: SimConnection, text: str) -> None:
        outlet, group = connection.outlet, parse_share(text)
        member = self.members.get(outlet) if outlet is not None else None
        if member is None or member.subscriptions.get(group, {}).pop(text, None) is None:
            return
        if not member.subscriptions[group]:
            del member.subscriptions[group]
            for loan in [loan for loan in member.feeds if self._group_of[loan].id == group]:
                self.stop(member, loan)

    def leave(self, connection: SimConnection) -> None:
        outlet = connection.outlet
        member = self.members.pop(outlet, None) if outlet is not None else None
        if member is None:
            return
        self._report(member)
        for loan, feed in list(member.feeds.items()):
            feed.stopped = True
            self.front.delivery.handle(LoanStopped(member.outlet, feed))
            self._free(loan)
        member.feeds.clear()

    def returned(self, connection: SimConnection, session: Session) -> None:
        """What was lent to it has gone to somebody else: its packet ids are released all the same."""
        for packet_id, delivery in session.in_flight():
            if isinstance(delivery.origin, LentBefore):
                session.window.restore(packet_id, Delivery(NOBODY, 0, RELEASED))
                self.front.truth.released(session.client_id, packet_id)

    def report(self, outlet: Outlet) -> None:
        member = self.members.get(outlet)
        if member is None:
            outlet.loan_news.clear()
        else:
            self._report(member)

    def _report(self, member: Membership) -> None:
        news = list(member.outlet.loan_news)
        member.outlet.loan_news.clear()
        for feed in news:
            self._tell(member, feed)

    def see_clock(self, outlet: Outlet) -> None:
        """Its time is over: unless the store can be asked, nothing that was lent is its own any more."""
        member = self.members.get(outlet)
        if member is None:
            return
        if self.front.disk.down:
            self.world.tell(member.session.client_id, "may not trust its loans any more")
            member.trust.deadline = inf
            for loan in list(member.feeds):
                self.abandon(member, loan)
        else:
            member.trust.deadline = self.world.now + LEASE_SECONDS

    # -- loans ---------------------------------------------------------------------------------------------

    def lend(self) -> None:
        """Whatever nobody has goes to somebody who wants it."""
        if self.front.disk.down:
            return
        for group in self.groups.groups.values():
            takers = [m for m in self.members.values() if m.subscription(group.id) is not None]
            if not takers:
                continue
            for piece in group.pieces(self.front.disk.log):
                if piece not in group.lent and piece.stream in self.front.delivery.heads:
                    self._start(self.world.rng.choice(takers), group, piece)

    def _start(self, member: Membership, group: Group, piece: Piece) -> None:
        subscription = member.subscription(group.id)
        assert subscription is not None
        self.groups.loans += 1
        loan = Loan(MemberId(member.session.client_id), piece, self.groups.loans, "course")
        group.lent.add(piece)
        self._group_of[loan] = group
        if member.trust.deadline == inf:
            member.trust.deadline = self.world.now + LEASE_SECONDS
        # Nobody looks for another member here: what is too large for one is for nobody.
        start = StartReading(loan, Mark.of_cursor(group.cursor(piece)), (), group.policy, largest_packet=0)
        feed = member.feeds[loan] = LoanFeed(start, group.wanted, subscription)
        self.world.tell(member.session.client_id, f"is lent {loan} from {start.mark}")
        self.front.truth.lent(member.outlet, feed, group)
        self.front.delivery.handle(LoanStarted(member.outlet, feed))

    def stop(self, member: Membership, loan: Loan) -> None:
        """Send nothing more of it; it is free when nothing of it is in flight."""
        feed = member.feeds.get(loan)
        if feed is None or feed.stopped:
            return
        self.world.tell(member.session.client_id, f"is to give back {loan}")
        feed.stopped = True
        self.front.delivery.handle(LoanStopped(member.outlet, feed))
        self._tell(member, feed)

    def abandon(self, member: Membership, loan: Loan) -> None:
        """What is in flight of it went back to the group."""
        feed = member.feeds.pop(loan, None)
        if feed is None:
            return
        self.world.tell(member.session.client_id, f"loses {loan}")
        feed.stopped = True
        self.front.delivery.handle(LoanStopped(member.outlet, feed))
        member.session.forget_loan(feed)
        self.front.truth.disowned(member.session.client_id, feed)
        self._free(loan)
        self.front.delivery.handle(Room(member.outlet))

    def _free(self, loan: Loan) -> None:
        self._group_of.pop(loan).lent.discard(loan.piece)

    def _tell(self, member: Membership, feed: LoanFeed) -> None:
        if feed.loan not in member.feeds:
            return
        feed.sent.clear()
        if feed.too_large:
            too_large, feed.too_large = feed.too_large, []
            self.front.spawn(self._park(member, feed, too_large))
        if news := feed.take_news():
            self._progress(feed, news)
        if feed.stopped and not feed.in_flight:
            del member.feeds[feed.loan]
            self._free(feed.loan)

    def _progress(self, feed: LoanFeed, news: tuple[Range, ...]) -> None:
        group = self._group_of[feed.loan]
        self.front.truth.group_progress(group, feed.loan.piece, news)
        cursor = group.cursor(feed.loan.piece)
        for first, last in news:
            cursor.ack_range(first, last)

    def _park(self, member: Membership, feed: LoanFeed, offsets: list[int]) -> Work:
        """Among the dead letters, durably; only then is it acknowledged to the group."""
        yield self.world.rng.random() * self.front.disk.seconds
        while self.front.disk.down:
            yield 0.2
        if member.feeds.get(feed.loan) is not feed:
            return  # the next one to hold the stream finds them
        self.front.truth.parked(self._group_of[feed.loan], feed, offsets)
        for offset in offsets:
            feed.settle_offset(offset)
        member.session.window.disown(feed, offsets)
        self._tell(member, feed)

    def redeliver(self, member: Membership, loan: Loan) -> Work:
        """Not acknowledged in time: once more to the same client, under the same packet ids."""
        feed, session = member.feeds.get(loan), member.session
        if feed is None:
            return
        again = [(i, d) for i, d in session.window if d.origin is feed]
        yield self.world.rng.random() * self.front.disk.seconds
        rows = self.front.disk.log.streams.get(feed.stream)
        if rows is None:
            return
        now = self.world.now
        packets = [
            session.outgoing.again(
                i, d, rows_at(feed.stream, [d.offset], rows), 0, member.connection.version, now, feed
            )
            for i, d in again
            if session.window.get(i) is d
        ]
        data = b"".join(each for each in packets if len(each) <= member.outlet.packet_max)
        if data and member.outlet in self.members and member.connection.machine.open:
            self.front.truth.wrote(member.outlet, data, again=True)
            member.connection.handle(Say(data))

    # -- time ----------------------------------------------------------------------------------------------

    def lend_for_ever(self) -> Work:
        while True:
            yield self.world.between(0.02, 0.2)
            self.lend()

    def pass_over_for_ever(self) -> Work:
        while True:
            yield PASS_OVER_SECONDS
            for member in list(self.members.values()):
                for feed in [f for f in member.feeds.values() if f.stream not in self.front.disk.log.streams]:
                    self.abandon(member, feed.loan)  # the leader hears that the stream is gone
                self._pass_over(member)

    def _pass_over(self, member: Membership) -> None:
        self.front.delivery.machine.pass_over(member.outlet)
        for feed in list(member.feeds.values()):
            self._tell(member, feed)


def policy_of(counts: bool) -> Policy:
    return Policy(None, 4) if counts else NO_POLICY
