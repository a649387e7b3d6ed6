"""A batch member: a batch reader's side of a group (seed 000), for Spark and other bulk readers.

                    LeaseStreams(v)             UpdateStreams(v, w)
    CONNECTING ----------------------> REPLAYING -----------------> UPDATING
        ^  ^                             |    ^                        |   |
        |  +---- wrong version, ---------+    +-- RenewStreamLease(w) -+   |
        |        no renewal in time, Invalidate                            |
        +------------------------------------------------------------------+
    any --Leave--> LEAVING --LeftGroup--> GONE

It holds a *set* of pieces under one version. What an update takes away is finished first (`Drained`) and reported
final; the rest is read on without a pause.

`holdfast.batch.BatchClient` drives it on a thread, over MQTT, for a Spark driver or any other program.

The one surprising rule: a word about an *older* version is late, and harmless; a version that cannot be explained
makes the member start over, with a new life, as the seed says.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto
from math import inf

from holdfast.cursors import Cursor
from holdfast.errors import BrokenInvariant
from holdfast.groups.member.memories import Memories
from holdfast.groups.protocol.effects import Abandon, Ended, Joined, MemberEffect, StartReading, StopReading
from holdfast.groups.protocol.events import Acked, Drained, Leave
from holdfast.groups.protocol.messages import (
    FindLeader,
    Invalidate,
    Leased,
    LeaseStreams,
    LeaveGroup,
    LeftGroup,
    RenewStreamLease,
    Report,
    ToBatchMember,
    UpdateStreams,
    UpdateStreamStates,
)
from holdfast.groups.protocol.nouns import GroupId, Loan, Mark, MemberId, Piece
from holdfast.groups.settings import MemberSettings
from holdfast.machine import Address, Send, Tick


class BatchMemberStatus(Enum):
    CONNECTING = auto()
    REPLAYING = auto()
    UPDATING = auto()
    LEAVING = auto()
    GONE = auto()


LEGAL: dict[BatchMemberStatus, set[BatchMemberStatus]] = {
    BatchMemberStatus.CONNECTING: {BatchMemberStatus.REPLAYING, BatchMemberStatus.LEAVING, BatchMemberStatus.GONE},
    BatchMemberStatus.REPLAYING: {
        BatchMemberStatus.UPDATING,
        BatchMemberStatus.CONNECTING,
        BatchMemberStatus.LEAVING,
        BatchMemberStatus.GONE,
    },
    BatchMemberStatus.UPDATING: {
        BatchMemberStatus.REPLAYING,
        BatchMemberStatus.CONNECTING,
        BatchMemberStatus.LEAVING,
        BatchMemberStatus.GONE,
    },
    BatchMemberStatus.LEAVING: {BatchMemberStatus.GONE},
    BatchMemberStatus.GONE: set(),
}

BatchEvent = Tick | Acked | Drained | Leave | ToBatchMember


@dataclass(slots=True)
class Lent:
    """A piece of the set, or one that was taken over from it."""

    loan: Loan
    cursor: Cursor
    drained: bool = False
    changes: int = 1
    confirmed: int = 0

    def report(self) -> Report:
        return Report(self.loan.piece, self.loan.number, Mark.of_cursor(self.cursor), self.drained)


class BatchMember:
    """`member.incarnation` must be higher than that of any earlier member of the same name."""

    def __init__(
        self, member: MemberId, group: GroupId, born: str, home: Address, settings: MemberSettings, now: float
    ):
        self.member, self.group, self.born, self.home, self.settings = member, group, born, home, settings
        self.status = BatchMemberStatus.CONNECTING
        self.version = 0
        self.old_version: int | None = None
        self.streams: dict[Piece, Lent] = {}
        self.taken: dict[Piece, Lent] = {}
        self.memories = Memories()
        self.story: list[str] = []
        self.epoch = 0
        self._registry = Address(home.node, "registry")
        self._leader: Address | None = None
        self._joined = False
        self._trusted_until = inf
        self._answered = -inf
        self._sent: tuple[float, dict[Piece, int]] | None = None
        self._states_at = inf
        self._news_at = inf
        self._told_at = -inf
        self._give_up_at = inf
        self._last_words_until = inf
        self._wait = settings.find_leader_seconds
        self._ask_at = now
        self.deadline = now

    # ------------------------------------------------------------------------------------ the door

    def handle(self, event: BatchEvent, now: float) -> list[MemberEffect]:
        if self.status is BatchMemberStatus.GONE:
            return []
        if isinstance(event, Acked):
            self._note(event, now)
        if now >= self._trusted_until:
            effects = self._start_over(now)
        elif not isinstance(event, Tick | Acked | Drained | Leave) and event.member != self.member:
            effects = []  # said to an earlier life
        else:
            effects = self._dispatch(event, now)
        self._arm()
        return effects

    def _dispatch(self, event: BatchEvent, now: float) -> list[MemberEffect]:
        match event:
            case Tick():
                return self._on_tick(now)
            case Acked():
                return []
            case Drained(loan):
                return self._on_drained(loan, now)
            case RenewStreamLease():
                return self._on_renew(event, now)
            case LeaseStreams():
                return self._on_lease(event, now)
            case UpdateStreams():
                return self._on_update(event, now)
            case Leave():
                return self._on_leave(now)
            case LeftGroup():
                return self._end() if self.status is BatchMemberStatus.LEAVING else []
            case Invalidate(_, deleted):
                return self._on_invalidate(deleted, now)

    # --------------------------------------------------------------------------------------- time

    def _on_tick(self, now: float) -> list[MemberEffect]:
        match self.status:
            case BatchMemberStatus.CONNECTING:
                return self._ask(now) if now >= self._ask_at else []
            case BatchMemberStatus.LEAVING:
                return self._repeat_last_words(now) if now >= self._ask_at else []
        effects: list[MemberEffect] = []
        if now >= self._give_up_at:
            self._give_up_at = inf
            for lent in self.taken.values():
                if not lent.drained:
                    effects.append(Abandon(lent.loan))
                    lent.drained = True
            effects.append(self._states(now))
        elif now >= min(self._states_at, self._news_at):
            effects.append(self._states(now))
        return effects

    def _ask(self, now: float) -> list[MemberEffect]:
        self._ask_at = now + self._wait
        self._wait = min(self._wait * 2, self.settings.find_leader_max_seconds)
        find = FindLeader(self.member, self.home, self.group, self.born, now, self.memories.carried())
        return [Send(self._registry, find)]

    def _arm(self) -> None:
        match self.status:
            case BatchMemberStatus.GONE:
                self.deadline = inf
            case BatchMemberStatus.CONNECTING | BatchMemberStatus.LEAVING:
                self.deadline = self._ask_at
            case _:
                self.deadline = min(self._states_at, self._news_at, self._trusted_until, self._give_up_at)

    # --------------------------------------------------------------------------------- the leader

    def _on_lease(self, lease: LeaseStreams, now: float) -> list[MemberEffect]:
        if self.status is BatchMemberStatus.REPLAYING and lease.epoch == self.epoch and lease.version == self.version:
            return [self._states(now)]  # the leader has not heard yet
        if self.status is not BatchMemberStatus.CONNECTING:
            return self._unexplained(lease.epoch, lease.version, now)
        if now >= lease.echo + lease.good_for_seconds:
            return []
        self._move(BatchMemberStatus.REPLAYING)
        self.epoch, self._leader, self.version = lease.epoch, lease.leader, lease.version
        self._trust(lease.echo, lease.good_for_seconds)
        effects = self.memories.abandon()
        if not self._joined:
            self._joined = True
            effects.append(Joined(self.member, self.group, self.born))
        for leased in lease.streams:
            effects.append(self._begin(leased))
        effects.append(self._states(now))
        return effects

    def _on_update(self, update: UpdateStreams, now: float) -> list[MemberEffect]:
        if self.status is BatchMemberStatus.CONNECTING or self.status is BatchMemberStatus.LEAVING:
            return []
        if update.epoch == self.epoch and update.version == self.version:
            return [self._states(now)]  # the leader is not sure yet that we are updating
        expected = self.status is BatchMemberStatus.REPLAYING and update.epoch == self.epoch
        if not expected or update.old_version != self.version:
            return self._unexplained(update.epoch, update.version, now)
        self._move(BatchMemberStatus.UPDATING)
        self.old_version, self.version = self.version, update.version
        wanted = {leased.piece: leased for leased in update.streams}
        effects: list[MemberEffect] = []
        for piece in [piece for piece in self.streams if piece not in wanted]:
            lent = self.taken[piece] = self.streams.pop(piece)
            effects.append(StopReading(lent.loan))
        for piece, leased in wanted.items():
            if piece not in self.streams:
                effects.append(self._begin(leased))
        self._give_up_at = now + update.within_seconds if self.taken else inf
        effects.append(self._states(now))
        return effects

    def _begin(self, leased: Leased) -> MemberEffect:
        loan = Loan(self.member, leased.piece, self.version, leased.course)
        cursor = self.memories.recalled(loan, leased.mark)
        self.streams[leased.piece] = Lent(loan, cursor)
        return StartReading(loan, Mark.of_cursor(cursor), leased.skip, key=leased.key)

    def _on_renew(self, renew: RenewStreamLease, now: float) -> list[MemberEffect]:
        if self.status is BatchMemberStatus.CONNECTING or self.status is BatchMemberStatus.LEAVING:
            return []
        both = (renew.version, renew.new_version) == (self.old_version, self.version)
        alone = renew.version == self.version and renew.new_version is None
        old_alone = renew.version == self.old_version and renew.new_version is None
        if renew.epoch != self.epoch or not (both or alone or old_alone):
            return self._unexplained(renew.epoch, max(renew.version, renew.new_version or 0), now)
        self._trust(renew.echo, renew.good_for_seconds)
        if self._sent and self._sent[0] == renew.echo:
            self._confirm(self._sent[1])
            if renew.kept:
                self.memories.clear()
        if self.status is not BatchMemberStatus.UPDATING or not alone:
            return []
        if not all(lent.drained for lent in self.taken.values()):
            return self._start_over(now)
        self._move(BatchMemberStatus.REPLAYING)
        self.taken.clear()
        self.old_version = None
        self._give_up_at = inf
        return [self._states(now)]

    def _confirm(self, sent: dict[Piece, int]) -> None:
        for piece, changes in sent.items():
            lent = self.streams.get(piece)
            if lent:
                lent.confirmed = max(lent.confirmed, changes)
        self._sent = None

    def _trust(self, echo: float, good_for_seconds: float) -> None:
        until = echo + good_for_seconds
        if self._trusted_until == inf or until > self._trusted_until:
            self._trusted_until = until
        if echo > self._answered:
            self._answered = echo
            self._states_at = echo + min(self.settings.ping_seconds, good_for_seconds * 0.7)

    def _unexplained(self, epoch: int, version: int, now: float) -> list[MemberEffect]:
        """Late words are harmless; words about a version that cannot be known mean that we are confused."""
        if epoch < self.epoch or (epoch == self.epoch and version <= self.version):
            return []
        return self._start_over(now)

    def _on_invalidate(self, deleted: bool, now: float) -> list[MemberEffect]:
        if not deleted:
            return self._start_over(now)
        return [*self._stop_all(abandon=True), *self._end(deleted=True)]

    def _start_over(self, now: float) -> list[MemberEffect]:
        """Back to CONNECTING, with a new life and with everything that is known to be acknowledged."""
        if self.status is BatchMemberStatus.CONNECTING or self.status is BatchMemberStatus.LEAVING:
            return []
        effects = self._stop_all(abandon=False)
        self._move(BatchMemberStatus.CONNECTING)
        self.member = self.member._replace(life=self.member.life + 1)
        self.version, self.old_version, self.epoch, self._leader = 0, None, 0, None
        self._trusted_until = self._states_at = self._news_at = self._give_up_at = inf
        self._answered, self._sent = -inf, None
        self._wait = self.settings.find_leader_seconds
        return effects + self._ask(now)

    # ------------------------------------------------------------------------------------ reading

    def _note(self, acked: Acked, now: float) -> None:
        piece = acked.loan.piece
        lent = self.streams.get(piece) or self.taken.get(piece)
        if lent is None or lent.loan.course != acked.loan.course:
            self.memories.note(acked.loan, acked.ranges)
            return
        for first, last in acked.ranges:
            lent.cursor.ack_range(first, last)
        lent.changes += 1
        if self._news_at == inf:
            self._news_at = max(now, self._told_at + self.settings.progress_seconds)

    def _on_drained(self, loan: Loan, now: float) -> list[MemberEffect]:
        lent = self.taken.get(loan.piece)
        if lent is None or lent.loan != loan or lent.drained:
            return []
        lent.drained = True
        return [self._states(now)] if all(other.drained for other in self.taken.values()) else []

    def _states(self, now: float) -> MemberEffect:
        assert self._leader is not None
        fresh = [lent for lent in self.streams.values() if lent.confirmed != lent.changes]
        self._sent = (now, {lent.loan.piece: lent.changes for lent in fresh})
        self._states_at = now + self.settings.ping_resend_seconds
        self._news_at, self._told_at = inf, now
        states = UpdateStreamStates(
            self.member,
            self.home,
            self.epoch,
            self.version,
            tuple(lent.report() for lent in fresh),
            now,
            self.old_version,
            tuple(lent.report() for lent in self.taken.values()),
            self.memories.carried(),
        )
        return Send(self._leader, states)

    # ------------------------------------------------------------------------------------ leaving

    def _on_leave(self, now: float) -> list[MemberEffect]:
        if self.status is BatchMemberStatus.LEAVING:
            return []
        effects = self._stop_all(abandon=True) + self.memories.abandon()
        to = self._leader or self._registry
        self._move(BatchMemberStatus.LEAVING)
        self._trusted_until = inf
        self._last_words_until = now + self.settings.last_words_seconds(carrying=bool(self.memories))
        self._ask_at = now + self.settings.disconnect_resend_seconds
        return [*effects, Send(to, self._disconnect())]

    def _repeat_last_words(self, now: float) -> list[MemberEffect]:
        if now >= self._last_words_until:
            return self._end()
        self._ask_at = now + self.settings.disconnect_resend_seconds
        return [Send(self._registry, self._disconnect())]

    def _disconnect(self) -> LeaveGroup:
        return LeaveGroup(self.member, self.home, self.group, self.born, self.memories.carried())

    def _end(self, *, deleted: bool = False) -> list[MemberEffect]:
        self.memories.clear()
        self._move(BatchMemberStatus.GONE)
        return [Ended(self.member, self.group, deleted)]

    def _stop_all(self, *, abandon: bool) -> list[MemberEffect]:
        effects: list[MemberEffect] = []
        for lent in [*self.streams.values(), *self.taken.values()]:
            if lent.loan.piece in self.streams:
                effects.append(StopReading(lent.loan))
            if abandon and not lent.drained:
                effects.append(Abandon(lent.loan))
            self.memories.keep(lent.loan, lent.cursor, in_flight=not abandon and not lent.drained)
        self.streams.clear()
        self.taken.clear()
        return effects

    def _move(self, to: BatchMemberStatus) -> None:
        self.story.append(f"{self.member} v{self.version}: {self.status.name} -> {to.name}")
        del self.story[:-40]
        if to not in LEGAL[self.status]:
            raise BrokenInvariant(f"batch member {self.member} may not go on like this", self.story[-20:])
        self.status = to
