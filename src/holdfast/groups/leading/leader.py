"""A group's leader: decides who reads what, keeps the group's progress, and answers for both.

    LOADING -> SETTLING <-> LEADING -> DELETING        SETTLING is left out where nothing was lent
       |  ^                   |                        and comes again after the lease was in doubt
       v  |                   v                        or the leader could not hear its members
       VOID  (no such group)  RETIRED  (another rules; from every phase)

It leads only while it is *trusted*: until its node's lease, by its own clock and with a margin, ends. From then on
it says and saves nothing, so that its silence ends every loan before another leader can be chosen.

The one surprising rule: what a loan's holder must not lose is saved before the holder is told to forget it
(`Revoked`, `LeftGroup`), and nothing else is waited for; all other progress is saved when it suits. `Unsaved` owns
what is not saved and what waits for it; a `Save` is always the last effect of a list.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from enum import Enum, auto
from math import inf

from holdfast.errors import BrokenInvariant
from holdfast.groups.leading.batch_seat import BatchSeat, BatchStatus
from holdfast.groups.leading.lender import Lender
from holdfast.groups.leading.seats import BATCH, BORROWER, Seat, superseded, waiting_key
from holdfast.groups.leading.unsaved import Unsaved
from holdfast.groups.leading.vetting import FromBatchMember, Vetting
from holdfast.groups.protocol.effects import Disbelieved, LeaderEffect, Load, Retire, Trimmed, WatchStreams
from holdfast.groups.protocol.events import (
    Deposed,
    Loaded,
    LoadFailed,
    Retreat,
    Saved,
    SaveFailed,
    StreamsSeen,
    Trusted,
)
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
    Phase.LEADING: {Phase.SETTLING, Phase.DELETING, Phase.RETIRED},
    Phase.DELETING: {Phase.RETIRED},
    Phase.VOID: {Phase.LOADING, Phase.RETIRED},
    Phase.RETIRED: set(),
}


@dataclass(frozen=True, slots=True)
class PendingSeek:
    """It begins once everything has come back, unless that takes too long."""

    ask: Ask
    offsets: tuple[tuple[Stream, int], ...]
    from_generation: int
    until: float


HostEvent = Loaded | LoadFailed | StreamsSeen | Saved | SaveFailed | Deposed | Retreat
LeaderEvent = Tick | Trusted | HostEvent | ToLeader


LEFT_MAX = 256


class Leader:
    """The leader of one group under one claim; `epoch` is the claim's."""

    def __init__(
        self,
        group: GroupId,
        epoch: int,
        node: str,
        settings: LeaderSettings,
        trusted_until: float,
        now: float,
        *,
        in_doubt: bool = False,
    ):
        self.group, self.epoch, self.node, self.settings = group, epoch, node, settings
        self.here = Address(node, "leader", str(group))
        self.phase = Phase.LOADING
        self.record: GroupRecord | None = None
        self.unsaved = Unsaved(group, epoch, settings)
        self.lender = Lender(f"group {group}, epoch {epoch}", epoch, settings, self.here, self.unsaved)
        self.seats, self.group_streams, self.book = self.lender.seats, self.lender.group_streams, self.lender.book
        self.moves: list[str] = []
        self._trusted_until = trusted_until
        self._in_doubt = in_doubt
        """The store was away a moment ago, and may be away again: then members cannot find us."""
        self._waiting: dict[object, tuple[Wanted, float]] = {}
        """Heard while loading, each with when."""
        self._dead: set[str] = set()
        self._seek: PendingSeek | None = None
        self._pauses: dict[str, Ask] = {}
        """To be answered once everything has been called back."""
        self._retreat: Retreat | None = None
        self._vetting = Vetting(self.group_streams)
        self._looking = False
        self._left: dict[MemberId, None] = {}
        """The last of those who said good-bye before they were let in."""
        self._retiring = False
        self._place_waits = False
        self._load_at = now
        self._expire_at = self._place_at = self._settle_at = self._retire_at = inf
        self._settle_from = inf
        self._heard_at = now
        """When it last could hear; nothing reaches it while a save is under way, or its node stands still."""
        self.deadline = now

    # ------------------------------------------------------------------------------------ the door

    def handle(self, event: LeaderEvent, now: float) -> list[LeaderEffect]:
        if type(event) is Ping and now < self.deadline and (quiet := self._on_quiet_ping(event, now)):
            return quiet
        if self.phase is Phase.RETIRED:
            return []
        if type(event) is Trusted:
            if now < self._trusted_until <= event.until and not self._in_doubt:
                self._trusted_until = event.until
                return []
            self._on_trusted(event, now)
        deaf_since = self._heard_at if isinstance(event, Saved | SaveFailed) else max(self._heard_at, self.deadline)
        self._heard_at = now
        if now - deaf_since > self.settings.clock_margin_seconds:
            self._listen_again(now)
        if now >= self._trusted_until:
            effects = self._distrusted(event, now)
        else:
            effects = self._while_deleting(event, now) if self.phase is Phase.DELETING else self._dispatch(event, now)
            if self.group_streams.news:
                self.group_streams.news = False
                self._place_soon(now)
            if not self.unsaved.empty and self.unsaved.at == inf:
                self.unsaved.by(now + self.settings.save_seconds)
            if now >= self.unsaved.at:
                effects += self._save(now)
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
                return self._refuse(event) if self.record is None else self._vet(event, now)
            case LeaderWanted() | FindLeader() | LeaveGroup() | Ask():
                return self._on_wanted(event, now, now)
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
                return self._on_streams_seen(event, now)
            case Saved():
                self.unsaved.saved(now)
                return self._on_saved(now)
            case SaveFailed():
                self.unsaved.failed(now)
                if self.phase is Phase.SETTLING:
                    self._in_doubt = True
                    self._settle(now)
            case Retreat():
                self._retreat = event
                self._place_soon(now)
            case Deposed():
                self._move(Phase.RETIRED)
                return [Retire(self.group, self.epoch)]
        return []

    def _on_streams_seen(self, seen: StreamsSeen, now: float) -> list[LeaderEffect]:
        if self.record is None:  # nobody has asked
            return []
        effects = self._see(seen)
        free, look_again = self._vetting.looked()
        if look_again:
            effects.append(WatchStreams(self.group, self.record.log))
        self._looking = look_again
        for message in free:
            effects += self._on_believed(message, now)
        return effects

    def _see(self, seen: StreamsSeen) -> list[LeaderEffect]:
        skipped = self.group_streams.see(seen.streams)
        return [Trimmed(self.group, skipped)] if skipped else []

    def _vet(self, message: FromBatchMember, now: float) -> list[LeaderEffect]:
        """From a client, not from a machine of ours: first see whether it is possible."""
        assert self.record is not None
        if not self._vetting.hold(message):
            return self._on_believed(message, now)
        if self._looking:
            return []
        self._looking = True
        return [WatchStreams(self.group, self.record.log)]

    def _on_believed(self, message: FromBatchMember, now: float) -> list[LeaderEffect]:
        assert self.record is not None
        believed, false = self._vetting.believed(message, self.record)
        effects: list[LeaderEffect] = [Disbelieved(self.group, message.member, tuple(false))] if false else []
        match believed:
            case UpdateStreamStates() as states:
                effects += self._on_states(states, now)
            case FindLeader() as find:
                effects += self._on_join(find, now)
            case LeaveGroup() as disconnect:
                effects += self._on_disconnect(disconnect, now)
        return effects

    def _distrusted(self, event: LeaderEvent, now: float) -> list[LeaderEffect]:
        """Facts are taken in; nothing is said, saved or lent until the lease is known to stand."""
        match event:
            case Saved():
                self.unsaved.saved(now)
                return []
            case StreamsSeen():
                self._looking = False
                return self._see(event) if self.record else []
            case Loaded() | LoadFailed() | SaveFailed() | Deposed() | Retreat():
                return [e for e in self._on_host(event, now) if isinstance(e, Retire | WatchStreams)]
            case _:
                return []

    def _on_trusted(self, trusted: Trusted, now: float) -> None:
        lapsed = now >= self._trusted_until
        self._trusted_until = max(self._trusted_until, trusted.until)
        if not lapsed or now >= self._trusted_until:
            if self._in_doubt and self.phase is Phase.SETTLING:
                self._in_doubt, self._settle_at = False, max(self._settle_from, now + self.settings.settle_seconds)
            return
        self.unsaved.by(now)
        if self.phase in (Phase.LEADING, Phase.SETTLING) and self.record and self.record.lent:
            # No member was promised more than our own lease: all of them have stopped, and come back with what they
            # know, as they would to another leader.
            if self.phase is Phase.LEADING:
                self._move(Phase.SETTLING)
            self._in_doubt = True
            self._settle(now)

    def _listen_again(self, now: float) -> None:
        """It could not hear for a while: what seems like silence of the members is its own.

        Their pings, and what they have acknowledged, may be waiting to be heard. Those who were not answered for too
        long have stopped, and come back with what they know. So nobody is unseated and nothing is lent on before that.
        """
        if self.phase not in (Phase.LEADING, Phase.SETTLING) or not self.seats:
            return
        if now < self._expire_at - 2 * self.settings.clock_margin_seconds:
            return  # everybody trusts it still
        for seat in self.seats.values():
            seat.until = max(seat.until, now + self.settings.settle_seconds)
        self._expire_at = min(seat.until for seat in self.seats.values())
        if self.phase is Phase.LEADING:
            self._move(Phase.SETTLING)
        self._settle(now)

    def _while_deleting(self, event: LeaderEvent, now: float) -> list[LeaderEffect]:
        match event:
            case Saved():
                self.unsaved.saved(now)
                return self.unsaved.ready()
            case SaveFailed() | Deposed():
                return self._on_host(event, now)
        return []

    def _arm(self, now: float) -> None:
        if self.phase is Phase.RETIRED or now >= self._trusted_until:
            self.deadline = inf
            return
        if self.phase is Phase.DELETING:
            self.deadline = self.unsaved.at
            return
        self.deadline = min(
            self._load_at,
            self._expire_at,
            self.lender.resend_at,
            self.unsaved.at,
            self._place_at,
            self._settle_at,
            self._retire_at,
            self.lender.refusals.deadline,
            self._seek.until if self._seek else inf,
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
        if now >= self.lender.resend_at:
            effects += self.lender.resend(now)
        if now >= self.lender.refusals.deadline:
            self.lender.refusals.sweep(self.group_streams.progress, now)
            self._place_soon(now)
        if now >= self._place_at or (self._seek and now >= self._seek.until):
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
        self._place_at, self._place_waits = inf, False
        if self._seek and now >= self._seek.until:
            self._seek = None
        if self._may_go():
            return self._go(now)
        if self.record is None or self.group_streams.seen is None or self.phase is not Phase.LEADING:
            return []
        lend = not (self.record.paused or self._seek or self._retreat)
        if lend and self.seats and not self.unsaved.stands(self.record):
            # Before the first grant leaves: a follower must know that somebody may have progress to tell.
            if not self.record.lent:
                self._write(replace(self.record, lent=True), now)
            self.unsaved.by(now)
            self._place_waits = True
            return []
        within = self._retreat.within_seconds if self._retreat else self.settings.revoke_seconds
        within = 0.0 if self._seek else within
        effects = self.lender.place(self.record, now, lend=lend, within_seconds=within)
        if self.group_streams.from_generation != self.record.from_generation:
            self._write(replace(self.record, from_generation=self.group_streams.from_generation), now)
        if self.lender.unrecorded:
            self._write(self.record.leasing(self.lender.unrecorded, self.group_streams.seen), now)
            self.unsaved.by(now)
            self._place_waits = True
        if not self.book.entries:
            for ask in self._pauses.values():
                self._answer(ask, now)
            self._pauses.clear()
            if self._seek:
                self._finish_seek(self._seek, now)
        return effects

    def _retire(self, now: float) -> list[LeaderEffect]:
        self._retire_at = inf
        self._retiring = True
        if self.record and not self.seats:
            self._note_idle(self.record, now)  # whoever led before may have died together with the last member
        return self._go(now) if self._may_go() else []

    def _may_go(self) -> bool:
        """Is nothing lent, and nobody in need of this leader?"""
        if self.book.entries:
            return False
        if self._retreat:
            return self.phase is not Phase.SETTLING
        return self._retiring and not (self.seats or self._waiting or self._seek)

    def _go(self, now: float) -> list[LeaderEffect]:
        """Leave the group to whoever comes next: everything is saved, then that nothing is lent, then it is left."""
        if not self.unsaved.empty:
            self.unsaved.by(now)
            return []
        if self.record and self.record.lent:
            self._write(replace(self.record, lent=False), now)
            self.unsaved.by(now)
            return []
        farewells = [Send(seat.home, Invalidate(seat.member)) for seat in self.seats.values()]
        return [*farewells, Retire(self.group, self.epoch)]

    # -------------------------------------------------------------------------------------- store

    def _on_loaded(self, loaded: Loaded, now: float) -> list[LeaderEffect]:
        if self.phase is not Phase.LOADING:
            return []
        effects: list[LeaderEffect] = []
        waiting, self._waiting = list(self._waiting.values()), {}
        self._retire_at = now + self.settings.linger_seconds
        if loaded.record is None:
            # Whoever joins a group has seen its record: these were declared, so they are deleted, for ever.
            self._dead.update(wanted.born for wanted, _ in waiting if not isinstance(wanted, Ask))
            self._move(Phase.VOID)
        else:
            self.record = loaded.record
            self.unsaved.loaded(loaded.record)
            self.group_streams.load(loaded.record, loaded.progress)
            self._move(Phase.SETTLING if loaded.record.lent else Phase.LEADING)
            if loaded.record.lent:
                self._settle(now)
            effects.append(WatchStreams(self.group, loaded.record.log))
        for wanted, heard_at in waiting:
            effects += self._on_wanted(wanted, heard_at, now)
        return effects

    def _settle(self, now: float) -> None:
        """Wait for members; after an outage longer, and until the lease was renewed once more."""
        if self._in_doubt:
            self._settle_from, self._settle_at = now + self.settings.settle_after_outage_seconds, inf
        else:
            self._settle_at = now + self.settings.settle_seconds

    def _write(self, record: GroupRecord, now: float) -> None:
        self.record = record
        self.unsaved.write(record)
        self.unsaved.by(now + self.settings.gather_seconds)

    def _save(self, now: float) -> list[LeaderEffect]:
        effects = self.unsaved.save(self.group_streams.progress, now)
        if effects:
            return effects
        if self.phase is Phase.DELETING:
            return self.unsaved.ready()  # it was saved while nobody knew whether the lease stands
        # Some of what is waited for may be saved already.
        return self._on_saved(now) if self.unsaved.empty else self._say_saved(now)

    def _on_saved(self, now: float) -> list[LeaderEffect]:
        """Go on with whatever waited for it."""
        effects = self._say_saved(now)
        if self._may_go():
            return effects + self._go(now)
        return effects + (self._place(now) if self._place_waits else [])

    def _say_saved(self, now: float) -> list[LeaderEffect]:
        return [*self.lender.confirm(now), *self.unsaved.ready()]

    # ------------------------------------------------------------------------------------ members

    def _on_wanted(self, wanted: Wanted, heard_at: float, now: float) -> list[LeaderEffect]:
        match self.phase:
            case Phase.LOADING:
                self._waiting[waiting_key(wanted)] = (wanted, now)
                return []
            case Phase.VOID:
                return self._on_wanted_in_void(wanted, now)
            case Phase.DELETING:
                return []
        match wanted:
            case Ask():
                return self._on_ask(wanted, heard_at, now)
            case FindLeader():
                return self._vet(wanted, now)
            case LeaveGroup():
                batch = wanted.reply_to.kind == BATCH
                return self._vet(wanted, now) if batch else self._on_disconnect(wanted, now)
            case LeaderWanted():
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
        self._retiring = False
        self._waiting[waiting_key(wanted)] = (wanted, now)
        self._load_at = now
        return []

    def _on_join(self, wanted: LeaderWanted | FindLeader, now: float) -> list[LeaderEffect]:
        assert self.record is not None
        if wanted.born != self.record.born:
            return [Send(wanted.reply_to, Invalidate(wanted.member, deleted=True))]
        self._merge_carried(wanted.carried)
        if self._retreat:
            return []  # it asks again, and finds the next leader; what it brought will be known there
        if wanted.member in self._left:
            return []  # its good-bye was faster
        seat = self.seats.get(wanted.member) or self._admit(wanted, now)
        if seat is None or seat.condemned or seat.kind != _kind(wanted):
            return []
        news = self.lender.tell_largest()
        if isinstance(seat, BatchSeat):
            return [*news, *self._on_find(seat, wanted, now)]
        seat.home = wanted.reply_to
        good_for = self._count_on(seat, now)
        # It may have sat here before without knowing it; a grant from then may still be on its way.
        oldest = self.book.oldest_number(seat.member)
        response = LeaderConnectResponse(seat.member, self.epoch, self.here, wanted.sent_at, good_for, oldest)
        return [*news, Send(seat.home, response)]

    def _on_find(self, seat: BatchSeat, find: LeaderWanted | FindLeader, now: float) -> list[LeaderEffect]:
        if seat.batch_status not in (BatchStatus.WAITING, BatchStatus.LEASING):
            # Late; or from somebody who calls itself what an earlier run of it was called. Nobody counts on that one
            # because of this, so its time will be over, and then this one is let in.
            return []
        seat.home = find.reply_to
        good_for = self._count_on(seat, now)
        if find.sent_at > seat.echo or seat.batch_status is BatchStatus.WAITING:
            seat.echo, seat.good_for_seconds = find.sent_at, good_for
        return self.lender.desk.say(seat, now) if seat.batch_status is BatchStatus.LEASING else []

    def _admit(self, wanted: LeaderWanted | FindLeader, now: float) -> Seat | None:
        """A seat for somebody new, unless a later life or incarnation of the same has one."""
        kind = _kind(wanted)
        found = superseded(self.seats, wanted.member, kind)
        if found is None:
            return None
        over, leaving = found
        if kind == BATCH:
            # One seat for one client: those of its past that hold nothing go at once, and one that does is enough.
            over += [member for member in leaving if not self.book.of_member(member)]
            leaving = [member for member in leaving if member not in over]
            if len(leaving) > 1:
                return None
        for member in over:
            self._unseat(member, now)
        for member in leaving:
            self.seats[member].leaving = True
        seat = (
            BatchSeat(wanted.member, wanted.reply_to, now)
            if isinstance(wanted, FindLeader)
            else Seat(wanted.member, wanted.reply_to, now, packet_max=wanted.packet_max)
        )
        self.seats[wanted.member] = seat
        self._retire_at, self._retiring = inf, False
        assert self.record is not None
        if self.record.idle:
            # Nobody waits for this: it goes with what is saved next, which is that something is lent.
            self.record = replace(self.record, idle=False)
            self.unsaved.write(self.record)
        self._place_soon(now)
        return seat

    def _unseat(self, member: MemberId, now: float) -> None:
        self.lender.unseat(member, now)
        self._place_soon(now)
        if not self.seats:
            self._retire_at = now + self.settings.linger_seconds
            if self.record:
                self._note_idle(self.record, now)

    def _note_idle(self, record: GroupRecord, now: float) -> None:
        """Nobody is in the group: its time runs, if it has any."""
        if record.idle_seconds_max is not None and not record.idle:
            self._write(replace(record, idle=True), now)

    def _count_on(self, seat: Seat, now: float) -> float:
        """How long the member may go on from when it asked; its seat is kept at least as long."""
        timeout = self.settings.ping_timeout_seconds
        if seat.kind == BORROWER and seat.home.node == self.node:
            timeout *= 2  # it falls silent only if this very process does: half the pings will do
        good_for = min(timeout, self._trusted_until - now)
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
            self.unsaved.by(now + self.settings.gather_seconds)
        kept = not ping.carried or self._kept(seat, ping.carried)
        good_for = self._count_on(seat, now)
        oldest, largest = self.book.oldest_number(ping.member), self.lender.largest_packet
        return [Send(seat.home, PingResponse(ping.member, self.epoch, ping.sent_at, good_for, oldest, kept, largest))]

    def _on_quiet_ping(self, ping: Ping, now: float) -> list[LeaderEffect] | None:
        """What nearly all of them are: alive, and nothing new. Thousands of idle members cost little more than this."""
        seat = self.seats.get(ping.member)
        if (
            seat is None
            or seat.condemned
            or ping.reports
            or ping.carried
            or ping.epoch != self.epoch
            or ping.leaving != seat.leaving
            or now >= self._trusted_until
            or self.phase is not Phase.LEADING
        ):
            return None
        # The deadline stays: a seat's time only grows, and who is late is looked for when the earliest would be.
        good_for = self._count_on(seat, now)
        oldest, largest = self.book.oldest_number(ping.member), self.lender.largest_packet
        return [Send(seat.home, PingResponse(ping.member, self.epoch, ping.sent_at, good_for, oldest, True, largest))]

    def _refuse(self, message: Ping | UpdateStreamStates) -> list[LeaderEffect]:
        # While loading we know nobody, and must not send away those whom we are about to let in.
        if self.phase is Phase.LOADING:
            return []
        return [Send(message.reply_to, Invalidate(message.member))]

    def _on_update_progress(self, update: UpdateProgress, now: float) -> list[LeaderEffect]:
        # From a stranger it is worth nothing: it will learn from its next ping that it is one.
        known = update.epoch == self.epoch and update.member in self.seats
        if known and self.lender.take(update.member, update.reports, now):
            self.unsaved.by(now + self.settings.gather_seconds)
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
        kept = self._kept(seat, states.carried)
        if states.sent_at > seat.echo:
            seat.echo, seat.good_for_seconds, seat.kept = states.sent_at, good_for, kept
        effects = self.lender.desk.on_states(seat, states, now)
        if self.lender.desk.returned(seat):
            self.unsaved.by(now + self.settings.gather_seconds)
        if seat.stable and not was:
            self._place_soon(now)
        return effects

    def _on_disconnect(self, disconnect: LeaveGroup, now: float) -> list[LeaderEffect]:
        assert self.record is not None
        if disconnect.born in (self.record.born, ""):
            self._merge_carried(disconnect.carried)
            if disconnect.member in self.seats:
                self._unseat(disconnect.member, now)
            else:
                self._left[disconnect.member] = None
                if len(self._left) > LEFT_MAX:
                    del self._left[next(iter(self._left))]
        # The record too: what is worth nothing after a seek is worth everything until the seek is saved.
        about = {None, *(carried.piece.stream for carried in disconnect.carried)}
        self.unsaved.say(about, Send(disconnect.reply_to, LeftGroup(disconnect.member)))
        self.unsaved.by(now + self.settings.gather_seconds)
        return []

    def _merge_carried(self, carried: Iterable[Carried]) -> set[Stream]:
        """Take over what members know from before; the streams of which that was news."""
        return {piece.stream for piece, course, mark in carried if self.group_streams.merge(piece, course, mark)}

    def _kept(self, seat: Seat, carried: Iterable[Carried]) -> bool:
        """Take over what the member carries; whether it is all durable, and need not be carried any longer."""
        news = self._merge_carried(carried)
        for stream in {each.piece.stream for each in carried}:
            if stream in news or stream not in seat.carried:
                seat.carried[stream] = self.unsaved.ticket(stream)
        # The record too: what is worth nothing after a seek is worth everything until the seek is saved.
        if self.unsaved.ticket(None) or not all(self.unsaved.reached(*each) for each in seat.carried.items()):
            return False
        seat.carried.clear()
        return True

    # ---------------------------------------------------------------------------------- operators

    def _on_ask(self, ask: Ask, heard_at: float, now: float) -> list[LeaderEffect]:
        assert self.record is not None
        until, what = ask.until(self.node, heard_at), ask.what
        if now >= until:
            return []  # whoever asked has given up
        if isinstance(what, Describe):
            return [Send(ask.reply_to, Answer(ask.request, view=self.view()))]
        if ask.request in self.record.answered:
            return self._answer(ask, now)
        match what:
            case SetPaused(paused):
                return self._pause(ask, paused, now)
            case Seek(offsets, from_generation):
                if self._seek is None:
                    self._seek = PendingSeek(ask, offsets, from_generation, until)
                    self._place_soon(now)
                return []
            case DeleteGroup(if_idle):
                if if_idle and self.seats:
                    return [Send(ask.reply_to, Answer(ask.request, f"group {self.group} has members"))]
                return self._delete(ask, now)

    def _pause(self, ask: Ask, paused: bool, now: float) -> list[LeaderEffect]:
        """Going on is answered once it is saved; a pause, once everything has come back besides."""
        assert self.record is not None
        if paused != self.record.paused:
            self._write(replace(self.record, paused=paused), now)
        self._place_soon(now)
        if paused:
            self._pauses[ask.request] = ask
            return []
        resumed = [
            Send(other.reply_to, Answer(other.request, f"group {self.group} was resumed meanwhile"))
            for other in self._pauses.values()
        ]
        self._pauses.clear()
        return [*resumed, *self._answer(ask, now)]

    def _answer(self, ask: Ask, now: float) -> list[LeaderEffect]:
        assert self.record is not None
        if ask.request not in self.record.answered:
            self._write(self.record.having_answered(ask.request), now)
        self.unsaved.say((None,), Send(ask.reply_to, Answer(ask.request)))
        self.unsaved.by(now + self.settings.gather_seconds)
        return []

    def _finish_seek(self, seek: PendingSeek, now: float) -> None:
        """Everything has come back: begin the new course."""
        assert self.record is not None
        self._seek = None
        self._write(self.record.turned(dict(seek.offsets), seek.from_generation), now)
        self.group_streams.start_over(self.record)
        self.lender.refusals.clear()
        self._answer(seek.ask, now)
        self.unsaved.by(now)
        self._place_waits = True

    def _delete(self, ask: Ask, now: float) -> list[LeaderEffect]:
        """All or nothing: until it is saved nobody is told anything."""
        self._move(Phase.DELETING)
        self.unsaved.delete()
        for seat in self.seats.values():
            self.unsaved.say((None,), Send(seat.home, Invalidate(seat.member, deleted=True)))
        self.unsaved.say((None,), Send(ask.reply_to, Answer(ask.request)))
        self.unsaved.say((None,), Retire(self.group, self.epoch))
        self.unsaved.by(now)
        return []

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


def _kind(wanted: LeaderWanted | FindLeader) -> str:
    return BATCH if isinstance(wanted, FindLeader) else BORROWER
