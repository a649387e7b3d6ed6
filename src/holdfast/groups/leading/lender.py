"""What a leader lends to whom: carries out a placement, loan by loan, and brings every loan to its end.

    placement says        the book says           what is done
    ------------------    --------------------    ------------------------------------------------
    piece -> member       [absent]                lend it: Grant
    piece -> another      GRANTING, GRANTED       call it back: Revoke
    (not to be lent)      GRANTING, GRANTED       call it back: Revoke
    anything              REVOKING, REVOKED       wait: each piece for itself, never for its neighbours

The one surprising rule: a stream is cut into slices only while nothing of it is lent, so a stream that must be
cut finer is first called back as a whole.
"""

from __future__ import annotations

from collections.abc import Iterable
from math import inf

from holdfast.groups.leading.batch_seat import BatchDesk, BatchSeat
from holdfast.groups.leading.loans import LoanBook, LoanEntry, LoanStatus
from holdfast.groups.leading.placement import place, slices_wanted
from holdfast.groups.leading.seats import Seat
from holdfast.groups.leading.streams import GroupStreams
from holdfast.groups.leading.unsaved import Unsaved
from holdfast.groups.protocol.effects import LeaderEffect
from holdfast.groups.protocol.messages import Grant, Report, Revoke, Revoked
from holdfast.groups.protocol.nouns import MemberId, Piece
from holdfast.groups.protocol.view import MemberView, PieceView
from holdfast.groups.record import GroupRecord
from holdfast.groups.settings import LeaderSettings
from holdfast.machine import Address, Send
from holdfast.model import Stream

_HELD = (LoanStatus.GRANTING, LoanStatus.GRANTED)


class Lender:
    """The loans of one group under one epoch."""

    def __init__(self, name: str, epoch: int, settings: LeaderSettings, here: Address, unsaved: Unsaved):
        self.epoch, self.settings, self._unsaved = epoch, settings, unsaved
        self.group_streams = GroupStreams(unsaved)
        self.book = LoanBook(name)
        self.seats: dict[MemberId, Seat] = {}
        self.desk = BatchDesk(self.book, self.group_streams, settings, epoch, here, unsaved)
        self.resend_at = inf
        self.unrecorded: dict[str, list[Piece]] = {}
        """Pieces that clients are to be leased, and of which the stored record does not say so yet."""

    # ------------------------------------------------------------------------------------ placing

    def place(self, record: GroupRecord, now: float, *, lend: bool, within_seconds: float) -> list[LeaderEffect]:
        """Bring the loans nearer to what placement says; with `lend` False, call everything back."""
        for stream in self.group_streams.sweep({piece.stream for piece in self.book.entries}):
            self.book.forget(stream)
        members = [seat.member for seat in self.seats.values() if seat.active] if lend else []
        pieces = self._pieces(record, len(members))
        held = {entry.piece: entry.owner for entry in self.book.entries.values() if entry.status in _HELD}
        plan = place(pieces, held, members)
        grants: dict[MemberId, list[Piece]] = {}
        for piece, member in plan.items():
            if piece not in self.book.entries:
                grants.setdefault(member, []).append(piece)
        revokes: dict[MemberId, list[LoanEntry]] = {}
        for piece, owner in held.items():
            # A leaving member returns everything by itself; calling it back would only get in the way.
            if plan.get(piece) != owner and not self.seats[owner].leaving:
                revokes.setdefault(owner, []).append(self.book.entries[piece])
        effects: list[LeaderEffect] = []
        self.unrecorded = {}
        for seat in self.seats.values():
            wanted, unwanted = grants.get(seat.member, []), revokes.get(seat.member, [])
            if isinstance(seat, BatchSeat):
                effects += self._change_set(seat, wanted, unwanted, within_seconds, now)
            else:
                effects += self._change(seat, wanted, unwanted, within_seconds, record, now)
        return effects

    def _change(
        self,
        seat: Seat,
        wanted: list[Piece],
        unwanted: list[LoanEntry],
        within_seconds: float,
        record: GroupRecord,
        now: float,
    ) -> list[LeaderEffect]:
        effects: list[LeaderEffect] = []
        for entry in unwanted:
            self.book.move(entry, LoanStatus.REVOKING, now)
            entry.within_seconds = self._patience(entry.piece.stream, within_seconds)
            effects += self.say(entry, now)
        for piece in wanted:
            entry = self.book.lend(piece, seat.member, now)
            entry.policy = record.policy
            effects += self.say(entry, now)
        return effects

    def _change_set(
        self, seat: BatchSeat, wanted: list[Piece], unwanted: list[LoanEntry], within_seconds: float, now: float
    ) -> list[LeaderEffect]:
        if not seat.stable:
            return []  # placed anew once the exchange under way is over
        client = seat.member.session
        leased = self._unsaved.stored.leased.get(client, ()) if self._unsaved.stored else ()
        if missing := [piece for piece in wanted if piece not in leased]:
            self.unrecorded[client] = missing
            return []  # placed anew once the record says so
        effects = self.desk.change(seat, wanted, unwanted, within_seconds, now)
        self.resend_at = min(self.resend_at, seat.resend_at)
        return effects

    def _patience(self, stream: Stream, within_seconds: float) -> float:
        # Nobody can be given what is in flight of a stream that no longer exists.
        return within_seconds if stream in (self.group_streams.seen or {}) else 0.0

    def _pieces(self, record: GroupRecord, members: int) -> list[Piece]:
        """Everything that may be lent now, cut so that everybody gets something."""
        group_streams = self.group_streams
        streams = group_streams.open_streams(record.order)
        lent = {piece.stream for piece in self.book.entries}
        of = slices_wanted(len(streams), members, self.settings.slices_max)
        for stream in streams:
            progress = group_streams.progress[stream]
            if stream not in lent and progress.of != of and members:
                group_streams.cut(stream, of)
        missing = members - sum(group_streams.progress[stream].of for stream in streams)
        pieces: list[Piece] = []
        for stream in streams:
            progress = group_streams.progress[stream]
            if missing > 0 and progress.of < of:
                missing -= of - progress.of  # called back as a whole, and cut when it has come
                continue
            pieces += [piece for piece in progress.pieces() if not group_streams.piece_finished(piece)]
        return pieces

    # ------------------------------------------------------------------------------------- saying

    def say(self, entry: LoanEntry, now: float) -> list[LeaderEffect]:
        """Say, or say again, what a borrower has yet to answer."""
        seat = self.seats[entry.owner]
        if isinstance(seat, BatchSeat):
            return []
        entry.resend_at = now + self.settings.resend_seconds
        self.resend_at = min(self.resend_at, entry.resend_at)
        match entry.status:
            case LoanStatus.GRANTING:
                return [Send(seat.home, self._grant(entry))]
            case LoanStatus.REVOKING if not entry.final:
                within = max(0.0, entry.revoked_since + entry.within_seconds - now)
                return [Send(seat.home, Revoke(entry.owner, self.epoch, entry.piece, entry.number, within))]
            case LoanStatus.REVOKED:
                return [Send(seat.home, Revoked(entry.owner, self.epoch, entry.piece, entry.number))]
            case _:
                return []

    def _grant(self, entry: LoanEntry) -> Grant:
        progress = self.group_streams.progress[entry.piece.stream]
        attempts = () if entry.policy.attempts_max is None else tuple(sorted(progress.attempts.items()))
        return Grant(
            entry.owner,
            self.epoch,
            entry.piece,
            entry.number,
            progress.course,
            progress.mark(entry.piece),
            progress.layers,
            entry.policy,
            attempts,
        )

    def resend(self, now: float) -> list[LeaderEffect]:
        """Say again whatever has not been answered in time."""
        effects: list[LeaderEffect] = []
        for entry in list(self.book.unsettled.values()):
            if now >= entry.resend_at:
                effects += self.say(entry, now)
        batches = [seat for seat in self.seats.values() if isinstance(seat, BatchSeat)]
        for seat in batches:
            if now >= seat.resend_at:
                effects += self.desk.say(seat, now)
        self._condemn_stuck(now)
        self.resend_at = min(
            min([entry.resend_at for entry in self.book.unsettled.values()], default=inf),
            min([seat.resend_at for seat in batches], default=inf),
        )
        return effects

    def _condemn_stuck(self, now: float) -> None:
        # Whoever answers pings but not a revoke, long after its own deadline, is out of its mind.
        patience = 2 * self.settings.ping_timeout_seconds
        for entry in self.book.unsettled.values():
            if entry.status is LoanStatus.REVOKING and not entry.final:
                seat = self.seats[entry.owner]
                if not seat.condemned and now >= entry.revoked_since + entry.within_seconds + patience:
                    seat.condemned = True

    # -------------------------------------------------------------------------------- coming back

    def take(self, member: MemberId, reports: Iterable[Report], now: float) -> bool:
        """Progress of a borrower's loans; whether something came back that is to be saved soon."""
        urgent = False
        for report in reports:
            entry = self.book.find(report.piece, member, report.loan)
            if entry is None:
                continue
            if entry.status is LoanStatus.GRANTING:
                self.book.move(entry, LoanStatus.GRANTED, now)
            progress = self.group_streams.progress[report.piece.stream]
            self.group_streams.merge(report.piece, progress.course, report.mark)
            if report.attempts or progress.attempts:
                self.group_streams.note_attempts(report.piece.stream, report.attempts)
            if report.final and entry.status is LoanStatus.REVOKING and not entry.final:
                entry.final = urgent = True
                entry.ticket = self._unsaved.ticket(report.piece.stream)
        return urgent

    def confirm(self, now: float) -> list[LeaderEffect]:
        """Tell those whose last progress is stored by now."""
        effects: list[LeaderEffect] = []
        for entry in list(self.book.unsettled.values()):
            final = entry.final and entry.status is LoanStatus.REVOKING and not self.is_batch(entry.owner)
            if final and self._unsaved.reached(entry.piece.stream, entry.ticket):
                self.book.move(entry, LoanStatus.REVOKED, now)
                effects += self.say(entry, now)
        for seat in self.seats.values():
            if isinstance(seat, BatchSeat) and self.desk.stored(seat):
                effects += self.desk.confirm(seat, now)
                self.resend_at = min(self.resend_at, seat.resend_at)
        return effects

    def finish(self, piece: Piece, member: MemberId, number: int, now: float) -> bool:
        """The borrower has forgotten that loan; whether it was one we waited for."""
        entry = self.book.find(piece, member, number)
        if entry is None or entry.status is not LoanStatus.REVOKED:
            return False
        self.book.move(entry, LoanStatus.ABSENT, now)
        return True

    def unseat(self, member: MemberId, now: float) -> None:
        """The member is gone: whatever it held is free."""
        for entry in self.book.of_member(member):
            self.book.move(entry, LoanStatus.ABSENT, now)
        self.seats.pop(member, None)

    # ------------------------------------------------------------------------------------ looking

    def is_batch(self, member: MemberId) -> bool:
        return isinstance(self.seats.get(member), BatchSeat)

    def views(self) -> tuple[tuple[MemberView, ...], tuple[PieceView, ...]]:
        members = tuple(
            MemberView(seat.member, seat.home.node, seat.kind, seat.status, len(self.book.of_member(seat.member)))
            for seat in sorted(self.seats.values(), key=lambda seat: seat.member)
        )
        pieces = []
        for stream, progress in sorted(self.group_streams.progress.items()):
            if self.group_streams.finished(stream):
                continue
            for piece in progress.pieces():
                entry = self.book.entries.get(piece)
                owner, status = (entry.owner, entry.status.name.lower()) if entry else (None, "free")
                pieces.append(PieceView(piece, owner, status, progress.mark(piece)))
        return members, tuple(pieces)
