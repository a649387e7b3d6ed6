"""A group's leader: decides who reads what, keeps the group's progress, and answers for both.

    LOADING -> SETTLING -> LEADING -> DELETING         SETTLING is left out where nothing was lent
       |  ^                   |
       v  |                   v
       VOID  (no such group)  RETIRED  (another rules; from every phase)

It leads only while it is *trusted*: until its node's lease, by its own clock and with a margin, ends. From then on
it says and saves nothing, so that its silence ends every loan before another leader can be chosen.

The one surprising rule: what a loan's holder must not lose is saved before the holder is told to forget it
(`Revoked`, `LeftGroup`), and nothing else is waited for; all other progress is saved when it suits.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from enum import Enum, auto
from math import inf

from holdfast.errors import BrokenInvariant
from holdfast.groups.leading.batch_seat import BatchSeat, BatchStatus
from holdfast.groups.leading.lender import Lender
from holdfast.groups.leading.seats import Seat, superseded
from holdfast.groups.protocol.effects import LeaderEffect, Load, Retire, Save, Trimmed, WatchStreams
from holdfast.groups.protocol.events import Deposed, Loaded, LoadFailed, Retreat, SaveFailed, StreamsSeen, Trusted
from holdfast.groups.protocol.messages import (
    Answer,
    Ask,
    Carried,
    DeleteGroup,
    Describe,
    FindLeader,
    Invalidate,
    LeaderConnectResponse,
    LeaderWanted,
    LeaveGroup,
    LeftGroup,
    Ping,
    PingResponse,
    RevokeFinished,
    Seek,
    SetPaused,
    ToLeader,
    UpdateProgress,
    UpdateStreamStates,
    Wanted,
)
from holdfast.groups.protocol.nouns import GroupId, MemberId
from holdfast.groups.protocol.view import GroupView
from holdfast.groups.record import GroupRecord
from holdfast.groups.settings import LeaderSettings
from holdfast.machine import Address, Send, Tick
from holdfast.model import Stream


class Phase(Enum):
    LOADING = auto()
    SETTLING = auto()
    LEADING = auto()
    DELETING = auto()
    VOID = auto()
    RETIRED = auto()


LEGAL: dict[Phase, set[Phase]] = {
    Phase.LOADING: {Phase.SETTLING, Phase.LEADING, Phase.VOID, Phase.RETIRED},
    Phase.SETTLING: {Phase.LEADING, Phase.DELETING, Phase.RETIRED},
    Phase.LEADING: {Phase.DELETING, Phase.RETIRED},
    Phase.DELETING: {Phase.RETIRED},
    Phase.VOID: {Phase.LOADING, Phase.RETIRED},
    Phase.RETIRED: set(),
}

HostEvent = Loaded | LoadFailed | StreamsSeen | SaveFailed | Deposed | Retreat
LeaderEvent = Tick | Trusted | HostEvent | ToLeader


class Leader:
    """The leader of one group under one claim; `epoch` is the claim's."""

    def __init__(
        self, group: GroupId, epoch: int, node: str, settings: LeaderSettings, trusted_until: float, now: float
    ):
        self.group, self.epoch, self.node, self.settings = group, epoch, node, settings
        self.here = Address(node, "leader", str(group))
        self.phase = Phase.LOADING
        self.record: GroupRecord | None = None
        self.lender = Lender(f"group {group}, epoch {epoch}", epoch, settings, self.here)
        self.seats, self.group_streams, self.book = self.lender.seats, self.lender.group_streams, self.lender.book
        self.moves: list[str] = []
        self._trusted_until = trusted_until
        self._waiting: dict[object, Wanted] = {}
        self._dead: set[str] = set()
        self._seek: tuple[Ask, Seek] | None = None
        self._deleting: Ask | None = None
        self._retreat: Retreat | None = None
        self._record_dirty = False
        self._after_save: list[LeaderEffect] = []
        self._last_save: Save | None = None
        self._must_save = False
        self._load_at = now
        self._expire_at = self._save_at = self._place_at = self._settle_at = self._retire_at = inf
        self.deadline = now

    # ------------------------------------------------------------------------------------ the door

    def handle(self, event: LeaderEvent, now: float) -> list[LeaderEffect]:
        if self.phase is Phase.RETIRED:
            return []
        if isinstance(event, Trusted):
            self._trusted_until = max(self._trusted_until, event.until)
        if now >= self._trusted_until:
            effects = self._distrusted(event, now)
        elif self.phase is Phase.DELETING:
            effects = self._while_deleting(event, now)
        else:
            effects = self._dispatch(event, now)
            if self.group_streams.news:
                self.group_streams.news = False
                self._place_soon(now)
            if self.group_streams.dirty and self._save_at == inf:
                self._save_at = now + self.settings.save_seconds
        self._arm(now)
        return effects

    def _dispatch(self, event: LeaderEvent, now: float) -> list[LeaderEffect]:
        match event:
            case Ping():
                return self._on_ping(event, now)
            case UpdateProgress():
                return self._on_update_progress(event, now)
            case Tick():
                return self._on_tick(now)
            case RevokeFinished():
                return self._on_revoke_finished(event, now)
            case UpdateStreamStates():
                return self._on_states(event, now)
            case LeaderWanted() | FindLeader() | LeaveGroup() | Ask():
                return self._on_wanted(event, now)
            case Trusted():
                return []
            case _:
                return self._on_host(event, now)

    def _on_host(self, event: HostEvent, now: float) -> list[LeaderEffect]:
        match event:
            case Loaded():
                return self._on_loaded(event, now)
            case LoadFailed():
                self._load_at = now + self.settings.save_retry_seconds
            case StreamsSeen():
                if self.record:  # before that, nobody has asked
                    skipped = self.group_streams.see(event.streams)
                    return [Trimmed(self.group, skipped)] if skipped else []
            case SaveFailed():
                self._on_save_failed(now)
            case Retreat():
                self._retreat = event
                self._place_soon(now)
            case Deposed():
                self._move(Phase.RETIRED)
                return [Retire(self.group, self.epoch)]
        return []

    def _distrusted(self, event: LeaderEvent, now: float) -> list[LeaderEffect]:
        """Facts are taken in; nothing is said, saved or lent until the lease is known to stand."""
        match event:
            case Loaded() | LoadFailed() | StreamsSeen() | SaveFailed() | Deposed() | Retreat():
                return [e for e in self._on_host(event, now) if isinstance(e, Retire | WatchStreams | Trimmed)]
            case _:
                return []

    def _while_deleting(self, event: LeaderEvent, now: float) -> list[LeaderEffect]:
        match event:
            case Tick() if now >= self._save_at:
                self._save_at = inf
                return self._say_deleted()
            case SaveFailed():
                self._save_at = now + self.settings.save_retry_seconds
            case Deposed():
                return self._on_host(event, now)
        return []

    def _arm(self, now: float) -> None:
        if self.phase is Phase.RETIRED or now >= self._trusted_until:
            self.deadline = inf
            return
        if self.phase is Phase.DELETING:
            self.deadline = self._save_at
            return
        self.deadline = min(
            self._load_at,
            self._expire_at,
            self.lender.resend_at,
            self._save_at,
            self._place_at,
            self._settle_at,
            self._retire_at,
        )

    # --------------------------------------------------------------------------------------- time

    def _on_tick(self, now: float) -> list[LeaderEffect]:
        if now >= self._load_at:
            self._load_at = inf
            return [Load(self.group)]
        if now >= self._settle_at:
            self._settle_at = inf
            self._move(Phase.LEADING)
            self._place_soon(now)
        if now >= self._expire_at:
            self._expire(now)
        effects: list[LeaderEffect] = []
        if now >= self._save_at or (self._must_save and now >= self.lender.resend_at):
            # A save that failed comes before anything is said again that rests on it.
            effects += self._flush(now)
        if now >= self.lender.resend_at:
            effects += self.lender.resend(now)
        if now >= self._place_at:
            effects += self._place(now)
        if now >= self._retire_at:
            effects += self._retire(now)
        return effects

    def _expire(self, now: float) -> None:
        """Let go of members that have been silent, and see who will be next."""
        for seat in [seat for seat in self.seats.values() if seat.until <= now]:
            self._unseat(seat.member, now)
        self._expire_at = min([seat.until for seat in self.seats.values()], default=inf)

    def _place_soon(self, now: float) -> None:
        if self._place_at == inf:
            self._place_at = now + self.settings.place_seconds

    def _place(self, now: float) -> list[LeaderEffect]:
        self._place_at = inf
        if self._retreat and not self.book.entries and self.phase is not Phase.SETTLING:
            return self._go(now)
        if self.record is None or self.group_streams.seen is None or self.phase is not Phase.LEADING:
            return []
        lend = not (self.record.paused or self._seek or self._retreat)
        within = self._retreat.within_seconds if self._retreat else self.settings.revoke_seconds
        within = 0.0 if self._seek else within
        effects = self.lender.place(self.record, now, lend=lend, within_seconds=within)
        if self.group_streams.forget:
            self._save_by(now + self.settings.save_seconds)
        if self.group_streams.from_generation != self.record.from_generation:
            self._write(replace(self.record, from_generation=self.group_streams.from_generation), now)
        if self._seek and not self.book.entries:
            effects += self._finish_seek(now)
        if self.book.entries and not self.record.lent:
            # Before the first grant leaves: a follower must know that somebody may have progress to tell.
            self._write(replace(self.record, lent=True), now)
        return [*self._flush(now), *effects] if self._record_dirty else effects

    def _retire(self, now: float) -> list[LeaderEffect]:
        self._retire_at = inf
        return [] if self.seats or self.book.entries or self._waiting or self._seek else self._go(now)

    def _go(self, now: float) -> list[LeaderEffect]:
        """Nothing is lent: leave the group to whoever comes next. If the save fails we stay, and hear of it."""
        if self.record and self.record.lent:
            self._write(replace(self.record, lent=False), now)
        farewells = [Send(seat.home, Invalidate(seat.member)) for seat in self.seats.values()]
        return [*self._flush(now), *farewells, Retire(self.group, self.epoch)]

    # -------------------------------------------------------------------------------------- store

    def _on_loaded(self, loaded: Loaded, now: float) -> list[LeaderEffect]:
        if self.phase is not Phase.LOADING:
            return []
        effects: list[LeaderEffect] = []
        waiting, self._waiting = list(self._waiting.values()), {}
        self._retire_at = now + self.settings.linger_seconds
        if loaded.record is None:
            # Whoever joins a group has seen its record: these were declared, so they are deleted, for ever.
            self._dead.update(wanted.born for wanted in waiting if not isinstance(wanted, Ask))
            self._move(Phase.VOID)
        else:
            self.record = loaded.record
            self.group_streams.load(loaded.record, loaded.progress)
            self._move(Phase.SETTLING if loaded.record.lent else Phase.LEADING)
            if loaded.record.lent:
                self._settle_at = now + self.settings.settle_seconds
            effects.append(WatchStreams(self.group, loaded.record.log))
        for wanted in waiting:
            if self._deleting is None:  # which one of them may ask for
                effects += self._on_wanted(wanted, now)
        return effects

    def _write(self, record: GroupRecord, now: float) -> None:
        self.record = record
        self._record_dirty = True
        self._save_by(now + self.settings.gather_seconds)

    def _save_by(self, at: float) -> None:
        self._save_at = min(self._save_at, at)

    def _flush(self, now: float) -> list[LeaderEffect]:
        """Save what is dirty; then confirm whatever waited for that."""
        self._save_at = inf
        self._must_save = False
        effects: list[LeaderEffect] = []
        group_streams = self.group_streams
        if group_streams.dirty or group_streams.forget or self._record_dirty:
            save = Save(
                self.group,
                self.epoch,
                self.record if self._record_dirty else None,
                tuple(group_streams.progress[stream].copy() for stream in group_streams.dirty),
                tuple(group_streams.forget),
            )
            group_streams.dirty.clear()
            group_streams.forget.clear()
            self._record_dirty = False
            self._last_save = save
            effects.append(save)
        effects += self.lender.confirm(now)
        effects += self._after_save
        self._after_save = []
        return effects

    def _on_save_failed(self, now: float) -> None:
        """Nothing of the last save is stored, and nothing that followed it was said."""
        save, self._last_save = self._last_save, None
        if save is None or self.phase is Phase.RETIRED:
            return
        for stream in [progress.stream for progress in save.progress]:
            if stream in self.group_streams.progress:
                self.group_streams.dirty[stream] = None
        for stream in save.forget:
            if stream not in self.group_streams.progress:
                self.group_streams.forget[stream] = None
        self._record_dirty = self._record_dirty or save.record is not None
        self._must_save = True
        self._save_by(now + self.settings.save_retry_seconds)
        if not self.seats:
            self._retire_at = now + self.settings.linger_seconds
        if self._retreat:
            self._place_soon(now)

    # ------------------------------------------------------------------------------------ members

    def _on_wanted(self, wanted: Wanted, now: float) -> list[LeaderEffect]:
        match self.phase:
            case Phase.LOADING:
                # Of each member the last thing it said is enough.
                self._waiting[wanted.request if isinstance(wanted, Ask) else wanted.member] = wanted
                return []
            case Phase.VOID:
                return self._on_wanted_in_void(wanted, now)
        match wanted:
            case Ask():
                return self._on_ask(wanted, now)
            case LeaveGroup():
                return self._on_disconnect(wanted, now)
            case _:
                return self._on_join(wanted, now)

    def _on_wanted_in_void(self, wanted: Wanted, now: float) -> list[LeaderEffect]:
        match wanted:
            case Ask():
                error = "" if isinstance(wanted.what, DeleteGroup) else f"there is no group {self.group}"
                return [Send(wanted.reply_to, Answer(wanted.request, error))]
            case LeaveGroup():
                return [Send(wanted.reply_to, LeftGroup(wanted.member))]
        if wanted.born in self._dead:
            return [Send(wanted.reply_to, Invalidate(wanted.member, deleted=True))]
        # Not one of those we know to be deleted: the group may have been declared again.
        self._move(Phase.LOADING)
        self._waiting[wanted.member] = wanted
        self._load_at = now
        return []

    def _on_join(self, wanted: LeaderWanted | FindLeader, now: float) -> list[LeaderEffect]:
        assert self.record is not None
        if self._retreat:
            return []
        if wanted.born != self.record.born:
            return [Send(wanted.reply_to, Invalidate(wanted.member, deleted=True))]
        self._merge_carried(wanted.carried)
        seat = self.seats.get(wanted.member) or self._admit(wanted, now)
        if seat is None or seat.condemned:
            return []
        seat.home = wanted.reply_to
        good_for = self._count_on(seat, now)
        if isinstance(seat, BatchSeat):
            if wanted.sent_at > seat.echo or seat.batch_status is BatchStatus.WAITING:
                seat.echo, seat.good_for_seconds = wanted.sent_at, good_for
            return self.lender.desk.say(seat, now) if seat.batch_status is BatchStatus.LEASING else []
        # It may have sat here before without knowing it; a grant from then may still be on its way.
        oldest = self.book.oldest_number(seat.member)
        response = LeaderConnectResponse(seat.member, self.epoch, self.here, wanted.sent_at, good_for, oldest)
        return [Send(seat.home, response)]

    def _admit(self, wanted: LeaderWanted | FindLeader, now: float) -> Seat | None:
        """A seat for somebody new, unless a later life or incarnation of the same has one."""
        found = superseded(self.seats, wanted.member)
        if found is None:
            return None
        over, leaving = found
        for member in over:
            self._unseat(member, now)
        for member in leaving:
            self.seats[member].leaving = True
        kind = BatchSeat if isinstance(wanted, FindLeader) else Seat
        seat = self.seats[wanted.member] = kind(wanted.member, wanted.reply_to, now)
        self._retire_at = inf
        assert self.record is not None
        if self.record.idle:
            self._write(replace(self.record, idle=False), now)
        self._place_soon(now)
        return seat

    def _unseat(self, member: MemberId, now: float) -> None:
        self.lender.unseat(member, now)
        self._place_soon(now)
        if not self.seats:
            self._retire_at = now + self.settings.linger_seconds
            if self.record and self.record.idle_seconds_max is not None:
                self._write(replace(self.record, idle=True), now)

    def _count_on(self, seat: Seat, now: float) -> float:
        """How long the member may go on from when it asked; its seat is kept at least as long."""
        good_for = min(self.settings.ping_timeout_seconds, self._trusted_until - now)
        seat.until = max(seat.until, now + good_for + self.settings.clock_margin_seconds)
        if seat.until < self._expire_at:
            self._expire_at = seat.until
        return good_for

    def _on_ping(self, ping: Ping, now: float) -> list[LeaderEffect]:
        seat = self.seats.get(ping.member)
        if seat is None or seat.condemned or ping.epoch != self.epoch:
            return self._refuse(ping)
        if ping.leaving and not seat.leaving:
            seat.leaving = True
            self._place_soon(now)
        if ping.reports and self.lender.take(ping.member, ping.reports, now):
            self._save_by(now + self.settings.gather_seconds)
        kept = not ping.carried or self._merge_carried(ping.carried)
        good_for = self._count_on(seat, now)
        oldest = self.book.oldest_number(ping.member)
        return [Send(seat.home, PingResponse(ping.member, self.epoch, ping.sent_at, good_for, oldest, kept))]

    def _refuse(self, message: Ping | UpdateStreamStates) -> list[LeaderEffect]:
        # While loading we know nobody, and must not send away those whom we are about to let in.
        if self.phase is Phase.LOADING:
            return []
        return [Send(message.reply_to, Invalidate(message.member))]

    def _on_update_progress(self, update: UpdateProgress, now: float) -> list[LeaderEffect]:
        # From a stranger it is worth nothing: it will learn from its next ping that it is one.
        known = update.epoch == self.epoch and update.member in self.seats
        if known and self.lender.take(update.member, update.reports, now):
            self._save_by(now + self.settings.gather_seconds)
        return []

    def _on_revoke_finished(self, finished: RevokeFinished, now: float) -> list[LeaderEffect]:
        if finished.epoch == self.epoch and self.lender.finish(finished.piece, finished.member, finished.loan, now):
            self._place_soon(now)
        return []

    def _on_states(self, states: UpdateStreamStates, now: float) -> list[LeaderEffect]:
        seat = self.seats.get(states.member)
        if not isinstance(seat, BatchSeat) or seat.condemned or states.epoch != self.epoch:
            return self._refuse(states)
        was = seat.stable
        good_for = self._count_on(seat, now)
        kept = self._merge_carried(states.carried)
        if states.sent_at > seat.echo:
            seat.echo, seat.good_for_seconds, seat.kept = states.sent_at, good_for, kept
        effects = self.lender.desk.on_states(seat, states, now)
        if self.lender.desk.returned(seat):
            self._save_by(now + self.settings.gather_seconds)
        if seat.stable and not was:
            self._place_soon(now)
        return effects

    def _on_disconnect(self, disconnect: LeaveGroup, now: float) -> list[LeaderEffect]:
        assert self.record is not None
        if disconnect.born in (self.record.born, ""):
            self._merge_carried(disconnect.carried)
            if disconnect.member in self.seats:
                self._unseat(disconnect.member, now)
        self._after_save.append(Send(disconnect.reply_to, LeftGroup(disconnect.member)))
        self._save_by(now + self.settings.gather_seconds)
        return []

    def _merge_carried(self, carried: Iterable[Carried]) -> bool:
        """Take over what members know from before; whether it is all durable already."""
        kept = True
        for piece, course, mark in carried:
            self.group_streams.merge(piece, course, mark)
            kept = kept and piece.stream not in self.group_streams.dirty
        return kept

    # ---------------------------------------------------------------------------------- operators

    def _on_ask(self, ask: Ask, now: float) -> list[LeaderEffect]:
        assert self.record is not None
        what = ask.what
        if isinstance(what, Describe):
            return [Send(ask.reply_to, Answer(ask.request, view=self.view()))]
        if ask.request in self.record.answered:
            return self._answer(ask, now)
        match what:
            case SetPaused(paused):
                self._write(replace(self.record, paused=paused), now)
                self._place_soon(now)
                return self._answer(ask, now)
            case Seek():
                if self._seek is None:
                    self._seek = (ask, what)
                    self._place_soon(now)
                return []
            case DeleteGroup(if_idle):
                if if_idle and self.seats:
                    return [Send(ask.reply_to, Answer(ask.request, f"group {self.group} has members"))]
                return self._delete(ask)

    def _answer(self, ask: Ask, now: float) -> list[LeaderEffect]:
        assert self.record is not None
        if ask.request not in self.record.answered:
            self._write(self.record.having_answered(ask.request), now)
        self._after_save.append(Send(ask.reply_to, Answer(ask.request)))
        self._save_by(now + self.settings.gather_seconds)
        return []

    def _finish_seek(self, now: float) -> list[LeaderEffect]:
        """Everything has come back: begin the new course."""
        assert self._seek is not None and self.record is not None
        (ask, seek), self._seek = self._seek, None
        forgotten = [stream for stream in self.group_streams.progress if stream not in (self.group_streams.seen or {})]
        self._write(self.record.turned(dict(seek.offsets), seek.from_generation), now)
        self.group_streams.start_over(self.record)
        self.group_streams.forget.update(dict.fromkeys(forgotten))
        self._place_soon(now)
        return self._answer(ask, now)

    def _delete(self, ask: Ask) -> list[LeaderEffect]:
        self._move(Phase.DELETING)
        self._deleting = ask
        return self._say_deleted()

    def _say_deleted(self) -> list[LeaderEffect]:
        """All or nothing: if the save fails, nobody has been told anything, and it is tried again."""
        assert self._deleting is not None
        streams: dict[Stream, None] = dict.fromkeys([*self.group_streams.progress, *self.group_streams.forget])
        return [
            Save(self.group, self.epoch, forget=tuple(streams), delete=True),
            *[Send(seat.home, Invalidate(seat.member, deleted=True)) for seat in self.seats.values()],
            Send(self._deleting.reply_to, Answer(self._deleting.request)),
            Retire(self.group, self.epoch),
        ]

    def view(self) -> GroupView:
        """Who holds what, now."""
        assert self.record is not None
        members, pieces = self.lender.views()
        finished = sum(self.group_streams.finished(stream) for stream in self.group_streams.progress)
        record = self.record
        return GroupView(
            self.group,
            self.epoch,
            record.born,
            record.course,
            record.order,
            record.paused,
            members,
            pieces,
            finished,
            record.key,
        )

    def story(self, stream: Stream) -> tuple[str, ...]:
        """How that stream's loans came to be what they are."""
        return self.book.story(stream)

    def _move(self, to: Phase) -> None:
        self.moves.append(f"leader of {self.group}, epoch {self.epoch}: {self.phase.name} -> {to.name}")
        if to not in LEGAL[self.phase]:
            raise BrokenInvariant(f"leader of {self.group} may not go on like this", self.moves[-20:])
        self.phase = to
