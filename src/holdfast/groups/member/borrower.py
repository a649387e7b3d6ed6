"""A borrower: one subscription's side of a shared group. It decides when to read, to stop and to tell.

    [new] -> CONNECTING ---> CONNECTED ---> UNSUBSCRIBING ---> GONE
                 |               |                              ^
                 +---------------+-- lost trust, confused ------+   (the agent sets up its next life)

    a loan:  [absent] -> GRANTED -> REVOKING -> [absent]

A borrower reads only while it is sure that the leader still counts on it: until `good_for_seconds` after it
*sent* the last ping that was answered. After that it stops by itself, and its next life brings along what was
acknowledged.

The one surprising rule: an acknowledgement is a fact, not a claim. It is worth reporting whoever lent the
stream, and after the loan has ended; only a seek (another course) makes it worthless.

What is too large for the client, and not for everybody in the group, ends the loan: it stops by itself, reports the
message as refused, and is called back, so that somebody else goes on from there, in order.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum, auto
from math import inf

from holdfast.cursors import Cursor
from holdfast.errors import BrokenInvariant
from holdfast.groups.member.attempts import Attempts
from holdfast.groups.member.memories import Memories
from holdfast.groups.protocol.effects import (
    Abandon,
    ChangeLargestPacket,
    Ended,
    Joined,
    MemberEffect,
    Park,
    StartReading,
    StopReading,
)
from holdfast.groups.protocol.events import Acked, Closed, Delivered, Drained, QuitGroup, Refused, Unsendable
from holdfast.groups.protocol.messages import (
    Grant,
    Invalidate,
    LargestPacket,
    LeaderConnectResponse,
    LeaderWanted,
    LeaveGroup,
    LeftGroup,
    Ping,
    PingResponse,
    Report,
    Revoke,
    Revoked,
    RevokeFinished,
    ToBorrower,
    UpdateProgress,
)
from holdfast.groups.protocol.nouns import NO_LIMIT, GroupId, Loan, Mark, MemberId, Piece
from holdfast.groups.settings import MemberSettings
from holdfast.machine import Address, Send, Tick


class BorrowerStatus(Enum):
    CONNECTING = auto()
    CONNECTED = auto()
    UNSUBSCRIBING = auto()
    GONE = auto()


LEGAL: dict[BorrowerStatus, set[BorrowerStatus]] = {
    BorrowerStatus.CONNECTING: {BorrowerStatus.CONNECTED, BorrowerStatus.UNSUBSCRIBING, BorrowerStatus.GONE},
    BorrowerStatus.CONNECTED: {BorrowerStatus.UNSUBSCRIBING, BorrowerStatus.GONE},
    BorrowerStatus.UNSUBSCRIBING: {BorrowerStatus.GONE},
    BorrowerStatus.GONE: set(),
}


class HeldStatus(Enum):
    GRANTED = auto()
    REVOKING = auto()
    ABSENT = auto()


LEGAL_LOAN: dict[HeldStatus, set[HeldStatus]] = {
    HeldStatus.GRANTED: {HeldStatus.REVOKING, HeldStatus.ABSENT},
    HeldStatus.REVOKING: {HeldStatus.ABSENT},
    HeldStatus.ABSENT: set(),
}

BorrowerEvent = Tick | Acked | Drained | Delivered | Refused | Unsendable | QuitGroup | Closed | ToBorrower

REFUSED_MAX = 100
"""So many refused messages are reported of one loan; whoever is lent the piece next meets the others."""


@dataclass(slots=True)
class Held:
    """A loan in this borrower's hands."""

    loan: Loan
    cursor: Cursor
    status: HeldStatus = HeldStatus.GRANTED
    drained: bool = False
    give_up_at: float = inf
    changes: int = 1
    """Counts news; compared with what has been reported and with what has been confirmed."""
    reported: int = 0
    confirmed: int = 0
    attempts: Attempts | None = None
    refused: dict[int, int] = field(default_factory=dict)
    """Offsets with the bytes they need, which is more than the client takes."""

    def report(self) -> Report:
        self.reported = self.changes
        counts = self.attempts.snapshot() if self.attempts else ()
        refused = tuple(sorted(self.refused.items())[:REFUSED_MAX])
        return Report(self.loan.piece, self.loan.number, Mark.of_cursor(self.cursor), self.drained, counts, refused)


class Borrower:
    """One life of one subscription. `status` GONE and `recreate` True: set up `successor()`."""

    def __init__(
        self,
        member: MemberId,
        group: GroupId,
        born: str,
        node: str,
        settings: MemberSettings,
        now: float,
        memories: Memories | None = None,
        joined: bool = False,
        packet_max: int = NO_LIMIT,
    ):
        self.packet_max, self.largest_packet = packet_max, NO_LIMIT
        """The largest packet that this client takes, and the largest that anybody in the group does."""
        self.member, self.group, self.born, self.node, self.settings = member, group, born, node, settings
        self.status = BorrowerStatus.CONNECTING
        self.recreate = False
        self.loans: dict[Piece, Held] = {}
        self.memories = memories if memories is not None else Memories()
        self.story: list[str] = []
        self.epoch = 0
        self._home = member.agent(node)
        self._registry = Address(node, "registry")
        self._leader: Address | None = None
        self._joined = joined
        self._trusted_until = inf
        self._answered = -inf
        self._ping_at = inf
        self._pinged: tuple[float, dict[Piece, int]] | None = None
        self._report_at = inf
        self._reported_at = -inf
        self._draining = 0
        self._timed = False
        self._last_words_until: float | None = None
        self._unsubscribe_by = inf
        # Loans that are over: a copy of their grant, late on its way, must not start them again.
        self._ended: dict[Piece, int] = {}
        self._oldest_loan = 0
        self._wait = settings.find_leader_seconds
        self._ask_at = now
        self.deadline = now

    # ------------------------------------------------------------------------------------ the door

    def handle(self, event: BorrowerEvent, now: float) -> list[MemberEffect]:
        if self.status is BorrowerStatus.GONE:
            return []
        if isinstance(event, Acked):
            self._note(event, now)
        effects = self._lose_trust(now) if now >= self._trusted_until else self._dispatch(event, now)
        self._arm()
        return effects

    def _dispatch(self, event: BorrowerEvent, now: float) -> list[MemberEffect]:
        match event:
            case Tick():
                return self._on_tick(now)
            case PingResponse():
                return self._on_ping_response(event)
            case LargestPacket():
                return self._take_largest(event.largest_packet) if event.epoch == self.epoch else []
            case Acked():
                return []
            case Grant():
                return self._on_grant(event, now)
            case Revoke():
                return self._on_revoke(event, now)
            case Revoked():
                return self._on_revoked(event, now)
            case Drained():
                return self._on_drained(event.loan, now)
            case Delivered():
                return self._on_delivered(event, now)
            case Refused():
                return self._on_refused(event)
            case Unsendable():
                return self._on_unsendable(event)
            case LeaderConnectResponse():
                return self._on_connect(event, now)
            case QuitGroup():
                return self._on_unsubscribe(now)
            case Closed():
                return self._on_closed(now)
            case LeftGroup():
                return self._on_disconnected()
            case Invalidate():
                return self._on_invalidate(event, now)

    def successor(self, now: float) -> Borrower:
        """The next life of the same subscription: a new id, the same memories."""
        member = self.member._replace(life=self.member.life + 1)
        return Borrower(
            *(member, self.group, self.born, self.node, self.settings, now, self.memories),
            joined=self._joined,
            packet_max=self.packet_max,
        )

    # --------------------------------------------------------------------------------------- time

    def _on_tick(self, now: float) -> list[MemberEffect]:
        if self.status is BorrowerStatus.CONNECTING:
            return self._ask(now) if now >= self._ask_at else []
        effects: list[MemberEffect] = []
        if self._last_words_until is not None:
            return self._repeat_last_words(now)
        if now >= self._unsubscribe_by:
            return self._last_words(now)
        if self._draining:
            effects += self._give_up_late(now)
            if self._has_left():
                return effects + self._last_words(now)
        if self._timed:
            for held in self.loans.values():
                if held.attempts:
                    effects += held.attempts.overdue(held.loan, now)
        if now >= self._ping_at:
            effects.append(self._ping(now))
        elif now >= self._report_at:
            effects += self._report_news(now)
        return effects

    def _ask(self, now: float) -> list[MemberEffect]:
        self._ask_at = now + self._wait
        self._wait = min(self._wait * 2, self.settings.find_leader_max_seconds)
        carried = self.memories.carried()
        wanted = LeaderWanted(self.member, self._home, self.group, self.born, now, carried, self.packet_max)
        return [Send(self._registry, wanted)]

    def _ping(self, now: float) -> MemberEffect:
        """Carries what no answer has confirmed, so that news which got lost arrive all the same."""
        fresh = [held for held in self.loans.values() if held.confirmed != held.changes]
        self._pinged = (now, {held.loan.piece: held.changes for held in fresh})
        self._ping_at = now + self.settings.ping_resend_seconds
        reports: tuple[Report, ...] = ()
        if fresh:
            self._report_at, self._reported_at = inf, now
            reports = tuple([held.report() for held in fresh])
        leaving = self.status is BorrowerStatus.UNSUBSCRIBING
        carried = self.memories.carried() if self.memories else ()
        return self._send(Ping(self.member, self._home, self.epoch, now, leaving, reports, carried))

    def _report_news(self, now: float) -> list[MemberEffect]:
        self._report_at, self._reported_at = inf, now
        reports = tuple(held.report() for held in self.loans.values() if held.reported != held.changes)
        return [self._send(UpdateProgress(self.member, self.epoch, reports))] if reports else []

    def _give_up_late(self, now: float) -> list[MemberEffect]:
        effects: list[MemberEffect] = []
        for held in self.loans.values():
            if held.status is HeldStatus.REVOKING and not held.drained and now >= held.give_up_at:
                effects.append(Abandon(held.loan))
                effects += self._drained(held)
        return effects

    def _arm(self) -> None:
        if self.status is BorrowerStatus.GONE:
            self.deadline = inf
            return
        if self.status is BorrowerStatus.CONNECTING:
            self.deadline = self._ask_at
            return
        at = min(self._ping_at, self._report_at, self._trusted_until, self._unsubscribe_by)
        if self._draining:
            for held in self.loans.values():
                if held.give_up_at < at and not held.drained:
                    at = held.give_up_at
        if self._timed:
            for held in self.loans.values():
                if held.attempts and held.attempts.deadline < at:
                    at = held.attempts.deadline
        self.deadline = at

    # --------------------------------------------------------------------------------- connecting

    def _on_connect(self, response: LeaderConnectResponse, now: float) -> list[MemberEffect]:
        # A doubled or late answer finds us connected, or comes when it is worth nothing any more.
        if self.status is not BorrowerStatus.CONNECTING or now >= response.echo + response.good_for_seconds:
            return []
        self._move(BorrowerStatus.CONNECTED)
        self.epoch, self._leader, self._oldest_loan = response.epoch, response.leader, response.oldest_loan
        self._trust(response.echo, response.good_for_seconds)
        effects = self.memories.abandon()
        if self.memories:
            # The leader may have answered an earlier asking than the last: say again what is known by now.
            effects.append(self._ping(now))
        if not self._joined:
            self._joined = True
            effects.append(Joined(self.member, self.group, self.born))
        return effects

    def _on_ping_response(self, response: PingResponse) -> list[MemberEffect]:
        if response.epoch != self.epoch or self._last_words_until is not None:
            return []
        if response.oldest_loan > self._oldest_loan:
            self._oldest_loan = response.oldest_loan
            self._ended = {piece: loan for piece, loan in self._ended.items() if loan >= response.oldest_loan}
        self._trust(response.echo, response.good_for_seconds)
        if self._pinged and self._pinged[0] == response.echo:
            for piece, changes in self._pinged[1].items():
                held = self.loans.get(piece)
                if held:
                    held.confirmed = max(held.confirmed, changes)
            self._pinged = None
            if response.kept:
                self.memories.clear()
        return self._take_largest(response.largest_packet)

    def _take_largest(self, largest_packet: int) -> list[MemberEffect]:
        if largest_packet == self.largest_packet:
            return []
        self.largest_packet = largest_packet
        return [ChangeLargestPacket(self.member, largest_packet)] if self.loans else []

    def _trust(self, echo: float, good_for_seconds: float) -> None:
        until = echo + good_for_seconds
        if self._trusted_until is inf or until > self._trusted_until:
            self._trusted_until = until
        if echo > self._answered:
            self._answered = echo
            # A leader on this node cannot miss that we are gone, nor be lost on the way: within its time is enough.
            near = self._leader is not None and self._leader.node == self.node
            self._ping_at = echo + (
                good_for_seconds * 0.7 if near else min(self.settings.ping_seconds, good_for_seconds * 0.7)
            )

    def _on_invalidate(self, invalidate: Invalidate, now: float) -> list[MemberEffect]:
        if self._last_words_until is not None and not invalidate.deleted:
            return []
        if invalidate.deleted:
            return [*self._stop_all(abandon=True), *self._end(deleted=True)]
        return self._lose_trust(now)

    def _lose_trust(self, now: float) -> list[MemberEffect]:
        """The leader no longer counts on us, or may not: stop, and let the next life bring what is known."""
        if self.status is BorrowerStatus.UNSUBSCRIBING:
            return self._last_words(now)
        if self.status is BorrowerStatus.CONNECTING:
            return []
        effects = self._stop_all(abandon=False)
        self._move(BorrowerStatus.GONE)
        self.recreate = True
        return effects

    # -------------------------------------------------------------------------------------- loans

    def _on_grant(self, grant: Grant, now: float) -> list[MemberEffect]:
        if grant.epoch != self.epoch or self.status is not BorrowerStatus.CONNECTED:
            return []
        held = self.loans.get(grant.piece)
        if held:
            if held.loan.number < grant.loan:
                return self._lose_trust(now)
            return [self._tell(held)] if held.loan.number == grant.loan else []
        if grant.loan <= self._ended.get(grant.piece, -1) or grant.loan < self._oldest_loan:
            return []
        loan = Loan(self.member, grant.piece, grant.loan, grant.course)
        held = self.loans[grant.piece] = Held(loan, self.memories.recalled(loan, grant.mark))
        mark = Mark.of_cursor(held.cursor)
        effects: list[MemberEffect] = [
            *self._take_largest(grant.largest_packet),
            StartReading(loan, mark, grant.skip, grant.policy, grant.key, grant.largest_packet),
            self._tell(held),
        ]
        if grant.set_aside:
            effects.insert(0, Park(loan, grant.set_aside, too_large=True))
        if grant.policy != (None, None):
            held.attempts = Attempts(grant.policy, grant.attempts)
            self._timed = True
            if exhausted := held.attempts.exhausted():
                effects.insert(0, Park(loan, exhausted))
        return effects

    def _on_revoke(self, revoke: Revoke, now: float) -> list[MemberEffect]:
        if revoke.epoch != self.epoch or not self._answers_revokes():
            return []
        held = self.loans.get(revoke.piece)
        if held is None:
            # It overtook its grant, or is a copy: that loan is over before it began.
            self._ended[revoke.piece] = max(revoke.loan, self._ended.get(revoke.piece, -1))
            over = Report(revoke.piece, revoke.loan, Mark(), final=True)
            return [self._send(UpdateProgress(self.member, self.epoch, (over,)))]
        if held.loan.number != revoke.loan:
            return self._lose_trust(now) if held.loan.number < revoke.loan else []
        held.give_up_at = min(held.give_up_at, now + revoke.within_seconds)
        if held.status is HeldStatus.REVOKING:
            return [self._tell(held)] if held.drained else []
        return self._stop(held)

    def _answers_revokes(self) -> bool:
        """Who leaves gives back piece by piece, too; but once it says its last words, those are all that counts."""
        if self.status is BorrowerStatus.UNSUBSCRIBING:
            return self._last_words_until is None
        return self.status is BorrowerStatus.CONNECTED

    def _stop(self, held: Held) -> list[MemberEffect]:
        self._move_loan(held, HeldStatus.REVOKING)
        if held.attempts:
            held.attempts.stop()
        self._draining += 1
        return [StopReading(held.loan)]

    def _on_refused(self, refused: Refused) -> list[MemberEffect]:
        """Too large for this client: the loan goes back, and the leader finds somebody else for it."""
        held = self.loans.get(refused.loan.piece)
        if held is None or held.loan != refused.loan or self.status is not BorrowerStatus.CONNECTED:
            return []  # whoever has it next meets them
        held.refused.update(refused.messages)
        held.changes += 1
        effects = self._stop(held) if held.status is HeldStatus.GRANTED else []
        return [*effects, self._tell(held)]

    def _on_unsendable(self, unsendable: Unsendable) -> list[MemberEffect]:
        held = self.loans.get(unsendable.loan.piece)
        if held is None or held.loan != unsendable.loan or held.status is not HeldStatus.GRANTED:
            return []  # likewise
        return [Park(held.loan, unsendable.offsets, too_large=True)]

    def _on_revoked(self, revoked: Revoked, now: float) -> list[MemberEffect]:
        if revoked.epoch != self.epoch or not self._answers_revokes():
            return []
        held = self.loans.get(revoked.piece)
        if held and held.loan.number == revoked.loan:
            if not held.drained:
                return self._lose_trust(now)
            self._move_loan(held, HeldStatus.ABSENT)
            self._draining -= 1
            del self.loans[revoked.piece]
        if held is None or held.loan.number >= revoked.loan:
            self._ended[revoked.piece] = max(revoked.loan, self._ended.get(revoked.piece, -1))
            return [self._send(RevokeFinished(self.member, self.epoch, revoked.piece, revoked.loan))]
        return self._lose_trust(now)

    def _on_drained(self, loan: Loan, now: float) -> list[MemberEffect]:
        held = self.loans.get(loan.piece)
        if held is None or held.loan != loan or held.status is not HeldStatus.REVOKING or held.drained:
            return []
        effects = self._drained(held)
        return self._last_words(now) if self._has_left() else effects

    def _has_left(self) -> bool:
        """It unsubscribes, and waits for nothing more that is in flight."""
        return self.status is BorrowerStatus.UNSUBSCRIBING and all(held.drained for held in self.loans.values())

    def _drained(self, held: Held) -> list[MemberEffect]:
        held.drained = True
        held.changes += 1
        return [self._tell(held)]

    def _on_delivered(self, delivered: Delivered, now: float) -> list[MemberEffect]:
        held = self.loans.get(delivered.loan.piece)
        if held and held.loan == delivered.loan and held.attempts and held.status is HeldStatus.GRANTED:
            held.attempts.delivered(delivered.offsets, now)
            held.changes += 1
            self._report_at = min(self._report_at, max(now, self._reported_at + self.settings.progress_seconds))
        return []

    def _note(self, acked: Acked, now: float) -> None:
        """An acknowledgement, of a loan in hand or of one from an earlier life."""
        held = self.loans.get(acked.loan.piece)
        if held and held.loan.course == acked.loan.course:
            for first, last in acked.ranges:
                held.cursor.ack_range(first, last)
            if held.attempts:
                held.attempts.acked(held.cursor)
            held.changes += 1
            if self._report_at == inf:
                self._report_at = max(now, self._reported_at + self.settings.progress_seconds)
            return
        self.memories.note(acked.loan, acked.ranges)

    # ------------------------------------------------------------------------------------ leaving

    def _on_unsubscribe(self, now: float) -> list[MemberEffect]:
        if self.status is BorrowerStatus.UNSUBSCRIBING:
            return []
        if self.status is BorrowerStatus.CONNECTING:
            return self._on_closed(now)
        self._move(BorrowerStatus.UNSUBSCRIBING)
        effects = self._stop_all(abandon=False, forget=False)
        self._unsubscribe_by = now + self.settings.unsubscribe_seconds
        if self._has_left():  # what it had may have been called back, and be drained, already
            return effects + self._last_words(now)
        self._ping_at = now
        return effects

    def _on_closed(self, now: float) -> list[MemberEffect]:
        if self._last_words_until is not None:
            return []
        if self.status is BorrowerStatus.CONNECTING and not self.memories:
            # Nothing to tell; this only spares a leader that has let us in already the wait for our pings.
            return [Send(self._registry, self._disconnect()), *self._end()]
        if self.status is not BorrowerStatus.UNSUBSCRIBING:
            self._move(BorrowerStatus.UNSUBSCRIBING)
        return self._last_words(now)

    def _last_words(self, now: float) -> list[MemberEffect]:
        """Everything known, once more and for good; repeated until somebody has written it down."""
        effects = self._stop_all(abandon=True)
        effects += self.memories.abandon()
        self._trusted_until = self._report_at = self._unsubscribe_by = inf
        self._last_words_until = now + self.settings.last_words_seconds(carrying=bool(self.memories))
        self._ping_at = now + self.settings.disconnect_resend_seconds
        effects.append(Send(self._leader or self._registry, self._disconnect()))
        return effects

    def _repeat_last_words(self, now: float) -> list[MemberEffect]:
        assert self._last_words_until is not None
        if now >= self._last_words_until:
            return self._end()
        self._ping_at = now + self.settings.disconnect_resend_seconds
        return [Send(self._registry, self._disconnect())]

    def _on_disconnected(self) -> list[MemberEffect]:
        return self._end() if self._last_words_until is not None else []

    def _end(self, *, deleted: bool = False) -> list[MemberEffect]:
        self.memories.clear()
        self._move(BorrowerStatus.GONE)
        return [Ended(self.member, self.group, deleted)]

    def _stop_all(self, *, abandon: bool, forget: bool = True) -> list[MemberEffect]:
        """Stop reading everything; `forget` turns the loans into memories, `abandon` gives up what is in flight."""
        effects: list[MemberEffect] = []
        for held in self.loans.values():
            if held.status is HeldStatus.GRANTED:
                self._move_loan(held, HeldStatus.REVOKING)
                self._draining += 1
                effects.append(StopReading(held.loan))
            if abandon and not held.drained:
                effects.append(Abandon(held.loan))
            if forget:
                self._move_loan(held, HeldStatus.ABSENT)
                self.memories.keep(held.loan, held.cursor, in_flight=not abandon and not held.drained)
        if forget:
            self.loans.clear()
            self._draining = 0
        return effects

    # ------------------------------------------------------------------------------------- saying

    def _disconnect(self) -> LeaveGroup:
        return LeaveGroup(self.member, self._home, self.group, self.born, self.memories.carried())

    def _tell(self, held: Held) -> MemberEffect:
        return self._send(UpdateProgress(self.member, self.epoch, (held.report(),)))

    def _send(self, message: Ping | UpdateProgress | RevokeFinished) -> MemberEffect:
        assert self._leader is not None
        return Send(self._leader, message)

    def _move(self, to: BorrowerStatus) -> None:
        self.story.append(f"{self.member}: {self.status.name} -> {to.name}")
        if to not in LEGAL[self.status]:
            raise BrokenInvariant(f"borrower {self.member} may not go on like this", self.story[-20:])
        self.status = to

    def _move_loan(self, held: Held, to: HeldStatus) -> None:
        self.story.append(f"{held.loan}: {held.status.name} -> {to.name}")
        del self.story[:-40]
        if to not in LEGAL_LOAN[held.status]:
            raise BrokenInvariant(f"loan {held.loan} may not go on like this", self.story[-20:])
        held.status = to
