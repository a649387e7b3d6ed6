"""The leader's side of a batch member: a *set* of pieces under one version, exchanged as a whole.

    WAITING -> LEASING -> REPLAYING -> UPDATING -> CONFIRMING -+
                              ^                                |
                              +--------------------------------+

    LEASING     LeaseStreams(v1) is repeated until states of v1 arrive
    UPDATING    UpdateStreams(v1, v2) is repeated until states of v2 arrive; what was taken over comes back final
    CONFIRMING  that is saved; RenewStreamLease(v2) is repeated until states speak of v2 alone

Each piece of the set has its loan in the book like any borrower's, so placement sees no difference: GRANTING until
states of its version arrive, REVOKING while it is taken over, REVOKED until the exchange is confirmed.

The one surprising rule: states of an *older* version are late, and harmless; only a version that was never given
makes the member start over.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum, auto
from math import inf

from holdfast.errors import BrokenInvariant
from holdfast.groups.leading.loans import LoanBook, LoanEntry, LoanStatus
from holdfast.groups.leading.seats import BATCH, Seat
from holdfast.groups.leading.streams import GroupStreams
from holdfast.groups.leading.unsaved import Unsaved
from holdfast.groups.protocol.effects import GroupSend, LeaderEffect
from holdfast.groups.protocol.messages import (
    Invalidate,
    Leased,
    LeaseStreams,
    RenewStreamLease,
    Report,
    UpdateStreams,
    UpdateStreamStates,
)
from holdfast.groups.protocol.nouns import Piece
from holdfast.groups.settings import LeaderSettings
from holdfast.machine import Address, Send


class BatchStatus(Enum):
    WAITING = auto()
    LEASING = auto()
    REPLAYING = auto()
    UPDATING = auto()
    CONFIRMING = auto()


LEGAL: dict[BatchStatus, set[BatchStatus]] = {
    BatchStatus.WAITING: {BatchStatus.LEASING},
    BatchStatus.LEASING: {BatchStatus.REPLAYING},
    BatchStatus.REPLAYING: {BatchStatus.UPDATING},
    BatchStatus.UPDATING: {BatchStatus.CONFIRMING},
    BatchStatus.CONFIRMING: {BatchStatus.REPLAYING},
}


@dataclass(slots=True)
class BatchSeat(Seat):
    """A batch member's place."""

    batch_status: BatchStatus = BatchStatus.WAITING
    version: int = 0
    old_version: int | None = None
    within_seconds: float = 0.0
    granted: list[Piece] = field(default_factory=list)
    """New with this version."""
    taken: list[Piece] = field(default_factory=list)
    """In the old version, not in this one, not yet confirmed gone."""
    seen_new: bool = False
    """The member has spoken of the new version."""
    resend_at: float = inf
    echo: float = 0.0
    good_for_seconds: float = 0.0
    kept: bool = False
    """What its last states carried is durable."""
    story: list[str] = field(default_factory=list)

    kind = BATCH

    @property
    def status(self) -> str:
        return "condemned" if self.condemned else "leaving" if self.leaving else self.batch_status.name.lower()

    @property
    def stable(self) -> bool:
        """May the set be changed now?"""
        return self.batch_status in (BatchStatus.WAITING, BatchStatus.REPLAYING)

    def move(self, to: BatchStatus) -> None:
        self.story.append(f"{self.member} v{self.version}: {self.batch_status.name} -> {to.name}")
        del self.story[:-20]
        if to not in LEGAL[self.batch_status]:
            raise BrokenInvariant(f"lease of {self.member} may not go on like this", self.story)
        self.batch_status = to


class BatchDesk:
    """Speaks with the batch members of one group; the leader owns book and group_streams."""

    def __init__(
        self,
        book: LoanBook,
        group_streams: GroupStreams,
        settings: LeaderSettings,
        epoch: int,
        here: Address,
        unsaved: Unsaved,
    ):
        self._book, self._group_streams, self._unsaved = book, group_streams, unsaved
        self._settings, self._epoch, self._here = settings, epoch, here
        # Versions grow over the whole epoch, so that a member's next life never meets a number of its last.
        self._versions = 0

    # ------------------------------------------------------------------------------ what is lent

    def change(
        self, seat: BatchSeat, grants: list[Piece], revokes: list[LoanEntry], within_seconds: float, now: float
    ) -> list[LeaderEffect]:
        """Give the seat a new version of its set. Only while it is `stable`."""
        first = seat.batch_status is BatchStatus.WAITING
        if not first and not grants and not revokes:
            return []
        self._versions += 1
        seat.old_version = None if first else seat.version
        seat.version = self._versions
        seat.granted, seat.seen_new, seat.within_seconds = grants, False, within_seconds
        for piece in grants:
            self._book.lend(piece, seat.member, now).version = seat.version
        for entry in revokes:
            self._book.move(entry, LoanStatus.REVOKING, now)
            entry.within_seconds = within_seconds
        seat.taken = [entry.piece for entry in revokes]
        seat.move(BatchStatus.LEASING if first else BatchStatus.UPDATING)
        return self.say(seat, now)

    def say(self, seat: BatchSeat, now: float) -> list[LeaderEffect]:
        """Say, or say again, what the member has yet to answer."""
        seat.resend_at = now + self._settings.resend_seconds
        match seat.batch_status:
            case BatchStatus.LEASING:
                leased = LeaseStreams(
                    seat.member,
                    self._epoch,
                    self._here,
                    seat.version,
                    self._set(seat),
                    seat.echo,
                    seat.good_for_seconds,
                )
                return [Send(seat.home, leased)]
            case BatchStatus.UPDATING if not seat.seen_new:
                update = UpdateStreams(
                    seat.member,
                    self._epoch,
                    seat.old_version or 0,
                    seat.version,
                    self._set(seat),
                    seat.within_seconds,
                )
                return [Send(seat.home, update)]
            case BatchStatus.UPDATING:
                return [self._renew(seat, seat.old_version or 0, seat.version)]
            case BatchStatus.CONFIRMING:
                return [self._renew(seat, seat.version, None)]
            case _:
                seat.resend_at = inf
                return []

    def _set(self, seat: BatchSeat) -> tuple[Leased, ...]:
        found = []
        for entry in self._book.of_member(seat.member):
            if entry.status in (LoanStatus.GRANTING, LoanStatus.GRANTED):
                progress = self._group_streams.progress[entry.piece.stream]
                mark = progress.mark(entry.piece)
                found.append(Leased(entry.piece, progress.course, mark, progress.layers, progress.key))
        return tuple(found)

    # -------------------------------------------------------------------------- what comes back

    def on_states(self, seat: BatchSeat, states: UpdateStreamStates, now: float) -> list[LeaderEffect]:
        """Progress of the set, and with it the answer to whatever was said last."""
        both = states.version == seat.version and states.old_version == seat.old_version
        alone = states.version == seat.version and states.old_version is None
        match seat.batch_status:
            case BatchStatus.LEASING if alone:
                seat.move(BatchStatus.REPLAYING)
                self._confirm_grants(seat, now)
            case BatchStatus.UPDATING if both:
                seat.seen_new = True
                self._confirm_grants(seat, now)
                self._merge(seat, states.old_states)
                self._take_back(seat, states.old_states)
            case BatchStatus.CONFIRMING if alone:
                for piece in seat.taken:
                    self._book.move(self._book.entries[piece], LoanStatus.ABSENT, now)
                seat.taken = []
                seat.old_version = None
                seat.move(BatchStatus.REPLAYING)
            case _ if states.version > seat.version:
                return [Send(seat.home, Invalidate(seat.member))]
        self._merge(seat, states.states)
        self._merge(seat, states.old_states)
        return self._answer(seat, states)

    def _answer(self, seat: BatchSeat, states: UpdateStreamStates) -> list[LeaderEffect]:
        if states.version == seat.version and seat.batch_status is BatchStatus.UPDATING:
            return [self._renew(seat, seat.old_version or 0, seat.version)]
        if states.version == seat.version or states.version == seat.old_version:
            # To the old version alone: it has not heard of the new one, and may go on meanwhile.
            return [self._renew(seat, states.version, None)]
        return []

    def _confirm_grants(self, seat: BatchSeat, now: float) -> None:
        for piece in seat.granted:
            entry = self._book.entries.get(piece)
            if entry and entry.owner == seat.member and entry.status is LoanStatus.GRANTING:
                self._book.move(entry, LoanStatus.GRANTED, now)
        seat.granted = []

    def _take_back(self, seat: BatchSeat, reports: tuple[Report, ...]) -> None:
        for report in reports:
            entry = self._entry(seat, report)
            if entry and report.final and entry.status is LoanStatus.REVOKING and not entry.final:
                entry.final = True
                entry.ticket = self._unsaved.ticket(report.piece.stream)

    def _entry(self, seat: BatchSeat, report: Report) -> LoanEntry | None:
        """The loan a report is about. A late one may be about the same piece in an earlier version, or course."""
        entry = self._book.entries.get(report.piece)
        return entry if entry and entry.owner == seat.member and entry.version == report.loan else None

    def _merge(self, seat: BatchSeat, reports: tuple[Report, ...]) -> None:
        for report in reports:
            if self._entry(seat, report):
                self._group_streams.merge(
                    report.piece, self._group_streams.progress[report.piece.stream].course, report.mark
                )

    def returned(self, seat: BatchSeat) -> bool:
        """Has everything that was taken over come back? Then it is to be saved."""
        return (
            seat.batch_status is BatchStatus.UPDATING
            and seat.seen_new
            and all(self._book.entries[piece].final for piece in seat.taken)
        )

    def stored(self, seat: BatchSeat) -> bool:
        """Is everything that was taken over stored? Then the exchange is to be confirmed."""
        return self.returned(seat) and all(
            self._unsaved.reached(piece.stream, self._book.entries[piece].ticket) for piece in seat.taken
        )

    def confirm(self, seat: BatchSeat, now: float) -> list[LeaderEffect]:
        """What came back is stored."""
        for piece in seat.taken:
            self._book.move(self._book.entries[piece], LoanStatus.REVOKED, now)
        seat.move(BatchStatus.CONFIRMING)
        return self.say(seat, now)

    def _renew(self, seat: BatchSeat, version: int, new_version: int | None) -> GroupSend:
        return Send(
            seat.home,
            RenewStreamLease(
                seat.member, self._epoch, version, new_version, seat.echo, seat.good_for_seconds, seat.kept
            ),
        )
