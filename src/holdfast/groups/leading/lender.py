"""What a leader lends to whom: carries out a placement, loan by loan, and brings every loan to its end.

    placement says        the book says           what is done
    ------------------    --------------------    ------------------------------------------------
    piece -> member       [absent]                lend it: Grant
    piece -> another      GRANTING, GRANTED       call it back: Revoke
    (not to be lent)      GRANTING, GRANTED       call it back: Revoke
    anything              GRANTED, but refused    call it back: Revoke (a message is too large for its owner)
    anything              REVOKING, REVOKED       wait: each piece for itself, never for its neighbours

Who leaves gets nothing new, and what it still has is called back, piece by piece, as it is from anybody.

The one surprising rule: a piece is cut into slices only while it is not lent, so one that must be cut finer is first
called back, and so are all those that are to become one; unless one of these is with somebody who leaves, and may take
its time: then the others go on as they are. What is to be cut is placed as the slices that it will be.

With the key `topic` a slice is lent to nobody while anybody else still has the slice of that number in another stream:
the same topic may be in both.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from math import inf

from holdfast.groups.leading.batch_seat import BatchDesk, BatchSeat
from holdfast.groups.leading.loans import LoanBook, LoanEntry, LoanStatus
from holdfast.groups.leading.placement import place, place_together, slices_wanted
from holdfast.groups.leading.refusals import Refusals
from holdfast.groups.leading.seats import Seat
from holdfast.groups.leading.streams import GroupStreams
from holdfast.groups.leading.unsaved import Unsaved
from holdfast.groups.progress import overlap
from holdfast.groups.protocol.effects import LeaderEffect
from holdfast.groups.protocol.messages import Grant, LargestPacket, Report, Revoke, Revoked
from holdfast.groups.protocol.nouns import NO_LIMIT, Key, MemberId, Piece
from holdfast.groups.protocol.view import MemberView, PieceView
from holdfast.groups.record import GroupRecord
from holdfast.groups.settings import LeaderSettings
from holdfast.machine import Address, Send
from holdfast.model import Stream

_HELD = (LoanStatus.GRANTING, LoanStatus.GRANTED)

COARSER_AT = 4
"""Streams are cut coarser once there are so many times the slices that are needed."""


class Lender:
    """The loans of one group under one epoch."""

    def __init__(self, name: str, epoch: int, settings: LeaderSettings, here: Address, unsaved: Unsaved):
        self.epoch, self.settings, self._unsaved = epoch, settings, unsaved
        self.group_streams = GroupStreams(unsaved)
        self.book = LoanBook(name)
        self.seats: dict[MemberId, Seat] = {}
        self.refusals = Refusals(settings.refusal_rest_seconds)
        self.largest_packet = NO_LIMIT
        """That anybody takes who may be lent anything."""
        self.desk = BatchDesk(self.book, self.group_streams, settings, epoch, here, unsaved)
        self.resend_at = inf
        self.unrecorded: dict[str, list[Piece]] = {}
        """Pieces that clients are to be leased, and of which the stored record does not say so yet."""

    # ------------------------------------------------------------------------------------ placing

    def place(self, record: GroupRecord, now: float, *, lend: bool, within_seconds: float) -> list[LeaderEffect]:
        """Bring the loans nearer to what placement says; with `lend` False, call everything back."""
        for stream in self.group_streams.sweep({piece.stream for piece in self.book.entries}):
            self.book.forget(stream)
        self._measure()
        self.refusals.sweep(self.group_streams.progress, now)
        members = [seat.member for seat in self.seats.values() if seat.active] if lend else []
        pieces, future = self._pieces(record, len(members))
        held = {entry.piece: entry.owner for entry in self.book.entries.values() if entry.status in _HELD}
        late = {entry.piece: entry.owner for entry in self.book.unsettled.values() if entry.status not in _HELD}
        plan = self._plan(record.key, [*pieces, *future], held, members, {**late, **future})
        owners = self._owners() if record.key == "topic" else {}
        grants: dict[MemberId, list[Piece]] = {}
        for piece in pieces:
            member = plan.get(piece)
            if member is not None and piece not in self.book.entries and not _elsewhere(owners, piece, member):
                grants.setdefault(member, []).append(piece)
        revokes: dict[MemberId, list[LoanEntry]] = {}
        for piece, owner in held.items():
            entry, seat = self.book.entries[piece], self.seats[owner]
            # A batch member that leaves returns its set as a whole, by itself.
            if (plan.get(piece) != owner or entry.refused) and not (seat.leaving and isinstance(seat, BatchSeat)):
                revokes.setdefault(owner, []).append(entry)
        effects: list[LeaderEffect] = []
        self.unrecorded = {}
        for seat in self.seats.values():
            wanted, unwanted = grants.get(seat.member, []), revokes.get(seat.member, [])
            if isinstance(seat, BatchSeat):
                effects += self._change_set(seat, wanted, unwanted, within_seconds, now)
            else:
                effects += self._change(seat, wanted, unwanted, within_seconds, record, now)
        return effects

    def _plan(
        self,
        key: Key,
        pieces: list[Piece],
        held: Mapping[Piece, MemberId],
        members: list[MemberId],
        late: Mapping[Piece, MemberId],
    ) -> dict[Piece, MemberId]:
        """Who should have what: balanced, but for pieces with a message that is too large for whoever would have it."""
        by_key = place_together if key == "topic" else place
        if not self.refusals:
            return by_key(pieces, held, members, late)
        shares = {piece: self.refusals.share(piece, key, self.seats) or owner for piece, owner in held.items()}
        plan = by_key(pieces, shares, members, late)
        seats = [self.seats[member] for member in members]
        loads = Counter(plan.values())
        chosen: dict[tuple[Stream | None, int, int], MemberId] = {}
        for piece, member in plan.items():
            takers = [seat.member for seat in self.refusals.takers(piece, key, seats)]
            if member in takers:
                continue
            # By topic, slices of one number stay together.
            lot = (None if key == "topic" else piece.stream, piece.part, piece.of)
            if lot not in chosen:
                owner = held.get(piece, member)
                chosen[lot] = owner if owner in takers else min(takers, key=lambda taker: (loads[taker], taker))
                loads[chosen[lot]] += 1
            plan[piece] = chosen[lot]
        return plan

    def _measure(self) -> bool:
        """Whether larger packets can be taken than before."""
        before = self.largest_packet
        self.largest_packet = max((s.packet_max for s in self.seats.values() if s.active), default=NO_LIMIT)
        return self.largest_packet > before

    def tell_largest(self) -> list[LeaderEffect]:
        """Somebody has come: the others hear of it if it takes larger packets than they know of."""
        if not self._measure():
            return []
        return [
            Send(seat.home, LargestPacket(seat.member, self.epoch, self.largest_packet))
            for seat in self.seats.values()
            if not isinstance(seat, BatchSeat) and self.book.of_member(seat.member)
        ]

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

    def _pieces(self, record: GroupRecord, members: int) -> tuple[list[Piece], dict[Piece, MemberId]]:
        """Everything that may be lent now, cut so that everybody gets something.

        And what will be there once it has come back and is cut, each with whoever is to give it back.
        """
        progress, lent = self.group_streams.progress, self.book.entries
        streams = self.group_streams.open_streams(record.order, record.key)
        of = self._slices(record, streams, members)
        for stream in streams if members else ():
            self.group_streams.cut(stream, of, lent)
        there = [piece for stream in streams for piece in progress[stream].pieces()]
        missing = members - len(there)
        waited_for = self._waited_for(record.key, of)
        pieces: list[Piece] = []
        future: dict[Piece, MemberId] = {}
        for piece in there:
            to_be_cut = record.key != "publisher" and piece.of != of and _lot(record.key, piece, of) not in waited_for
            if not to_be_cut and missing > 0 and piece.of < of and piece in lent:
                missing -= of // piece.of - 1
                to_be_cut = True
            if self.group_streams.piece_finished(piece):
                continue
            if not to_be_cut:
                pieces.append(piece)
            elif piece in lent:
                future.update(dict.fromkeys(_cut(piece, of), lent[piece].owner))
        return pieces, future

    def _waited_for(self, key: Key, of: int) -> set[tuple[Stream | None, int]]:
        """What cannot be cut coarser yet, for somebody who leaves still has some of it."""
        return {
            _lot(key, entry.piece, of)
            for entry in self.book.entries.values()
            if entry.piece.of > of and self.seats[entry.owner].leaving
        }

    def _slices(self, record: GroupRecord, streams: list[Stream], members: int) -> int:
        of = slices_wanted(record.key, len(streams), members, self.settings.slices_max)
        finest = max((piece.of for piece in self.book.entries if piece.stream in streams), default=of)
        # A little too fine costs less than calling everything back, and again when the next one comes; but whoever is
        # alone is given streams as they are.
        keep = record.key != "publisher" and 1 < of < finest < COARSER_AT * of
        return finest if keep else of

    def _owners(self) -> dict[tuple[int, int], set[MemberId]]:
        """Who has slices of which number, in whatever stream and status."""
        found: dict[tuple[int, int], set[MemberId]] = {}
        for entry in self.book:
            found.setdefault((entry.piece.part, entry.piece.of), set()).add(entry.owner)
        return found

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
        counts = progress.attempts.get(entry.piece, {})
        attempts = () if entry.policy.attempts_max is None else tuple(sorted(counts.items()))
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
            progress.key,
            self.largest_packet,
            self.refusals.set_aside(entry.piece, progress.key, [s for s in self.seats.values() if s.active]),
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
            self.group_streams.note_attempts(report.piece, report.attempts)
            if report.refused:
                self.refusals.note(member, report.piece, report.refused, now)
                entry.refused = self.group_streams.news = True
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


def _cut(piece: Piece, of: int) -> list[Piece]:
    """What becomes of a piece that is cut into so many, or of several of which it is one."""
    if piece.of > of:
        return [Piece(piece.stream, piece.part % of, of)]
    return [Piece(piece.stream, part, of) for part in range(piece.part, of, piece.of)]


def _lot(key: Key, piece: Piece, of: int) -> tuple[Stream | None, int]:
    """The slice that this one would be in if there were `of` of them; by topic, of whatever stream."""
    return None if key == "topic" else piece.stream, piece.part % of


def _elsewhere(owners: Mapping[tuple[int, int], set[MemberId]], piece: Piece, member: MemberId) -> bool:
    """Has anybody but this member a slice with which this one may have messages of one topic?"""
    return any(
        overlap(piece, Piece(piece.stream, part, of)) and holders != {member} for (part, of), holders in owners.items()
    )
