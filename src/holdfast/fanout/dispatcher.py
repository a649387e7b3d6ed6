"""The dispatcher: which delivery a vehicle gets next, and what becomes of it. One in flight per vehicle.

    trigger ──▶ LOOKING ──▶ BEGINNING ──▶ FLYING ──▶ SETTLING ──▶ nothing, or LOOKING again
                   │             │           └─lost─▶ RETURNING ──▶ LOOKING
                   └─▶ RESTING ◀─┘  not now: an attempt waits, a campaign is limited, another session is the vehicle

It is told of triggers in sets, asks for what waits in sets, and has what is about to be sent and what was answered
committed in sets: one look-up and one commit are under way at a time. A delivery is in flight in the store before it is
sent; every change names what was seen, so whoever is late is refused. A vehicle with nothing to do has nothing here
but its line in the list of those that are connected.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from math import inf
from typing import NamedTuple

from holdfast.errors import BrokenInvariant
from holdfast.fanout.choice import choose, is_kept
from holdfast.fanout.nouns import Campaign, End, InFlight, Sent, State, Waiting
from holdfast.fanout.table import Adopt, Await, Begin, Change, Finish, Found, Return, Verdict
from holdfast.fanout.vehicles import Vehicle
from holdfast.machine import Tick

LOOK_MAX = 500
COMMIT_MAX = 250
"""In one transaction, some 5 ms: publishers wait for it where a store has one writer."""
FIRST_LIMIT, DEEPER = 4, 8
"""So many that wait are looked at for each vehicle; so many times more if none of them can go."""
LIMIT_MAX = 2_048
RETRY_SECONDS = 0.5
"""After the store has failed."""
LIMITED_SECONDS = 0.25
"""How soon a campaign that is limited is tried again."""
UNKNOWN_RATE = 4_000.0
"""How many a second may go then, at most, if the limit is not a rate."""
AGAIN_SECONDS = 1.0
"""A vehicle that cannot take more for now is looked at again."""
ELSEWHERE_SECONDS = 10.0
"""So is one whose latest session is on another node, which may be over by then, and nobody here hears of that."""
FINAL_REASONS = frozenset({0x87, 0x90, 0x99})
"""Not authorized, topic name invalid, payload format invalid: it would be so the next time, too."""


@dataclass(frozen=True, slots=True)
class DispatchSettings:
    attempts_max: int = 5
    backoff_secs: float = 1.0
    """After the first refused attempt; twice as long after each further one."""
    backoff_secs_max: float = 300.0
    ack_secs: float = 0.0
    """Without an answer for so long, it is another attempt; 0: it waits for as long as the connection lasts."""
    result_secs: float = 3_600.0


# -- events ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Online:
    """The vehicle is connected here: a new connection, or another subscription on the same one."""

    vehicle: Vehicle


@dataclass(frozen=True, slots=True)
class Offline:
    """That connection of the vehicle is over, or it is not subscribed any more."""

    vin: str
    epoch: int
    connected: bool = False
    """It is only not subscribed any more: what is in flight may still be answered."""


@dataclass(frozen=True, slots=True)
class Triggered:
    """Something may wait for these, wherever they are."""

    vins: Collection[str]


@dataclass(frozen=True, slots=True)
class LookedUp:
    """The answer to a LookUp. `sizes`: of payloads, least packet sizes; a payload that is missing is not among them."""

    number: int
    found: Mapping[str, Found]
    campaigns: Mapping[int, Campaign]
    sizes: Mapping[int, int]
    store_now: float


@dataclass(frozen=True, slots=True)
class LookUpFailed:
    number: int


@dataclass(frozen=True, slots=True)
class Committed:
    """The answer to a Commit; None in place of a verdict: the vehicle had no room, so the store was not asked."""

    number: int
    verdicts: Sequence[Verdict | None]
    store_now: float


@dataclass(frozen=True, slots=True)
class CommitFailed:
    """Nothing is known of it: it is repeated as it is."""

    number: int


class Ack(NamedTuple):
    """The vehicle has answered the delivery that stands at this place, in whatever attempt."""

    vin: str
    place: int
    reason: int


@dataclass(frozen=True, slots=True)
class Acked:
    """Answers, each vehicle's in the order they came."""

    acks: Sequence[Ack]
    store_now: float


@dataclass(frozen=True, slots=True)
class Unsendable:
    """It turned out that it cannot be sent to this vehicle."""

    vin: str
    place: int
    reason: str


@dataclass(frozen=True, slots=True)
class Resulted:
    """The vehicle has said how it went before it has acknowledged it, which is stored: that was its end."""

    finish: Finish


Event = (
    Online
    | Offline
    | Triggered
    | LookedUp
    | LookUpFailed
    | Committed
    | CommitFailed
    | Acked
    | Unsendable
    | Resulted
    | Tick
)


# -- effects ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class LookUp:
    number: int
    vins: Sequence[str]
    limit: int


@dataclass(frozen=True, slots=True)
class Commit:
    """To be made durable. For each Begin and Adopt the host takes a packet id first: the one named, if it can."""

    number: int
    changes: Sequence[Change]


@dataclass(frozen=True, slots=True)
class Publish:
    """It is in flight in the store: send it, under the packet id that was taken for it."""

    vehicle: Vehicle
    flight: InFlight
    campaign: Campaign
    dup: bool


@dataclass(frozen=True, slots=True)
class Refused:
    """A Begin or Adopt came to nothing: the packet id that was taken for it is free again."""

    vin: str
    place: int


Effect = LookUp | Commit | Publish | Refused


# -- the machine -----------------------------------------------------------------------------------------------


class Step(Enum):
    LOOKING = auto()
    RESTING = auto()
    BEGINNING = auto()
    FLYING = auto()
    SETTLING = auto()
    RETURNING = auto()


LEGAL: dict[Step | None, set[Step | None]] = {
    None: {Step.LOOKING},
    Step.LOOKING: {Step.RESTING, Step.BEGINNING, Step.SETTLING, Step.RETURNING, Step.LOOKING, None},
    Step.RESTING: {Step.LOOKING, Step.SETTLING, None},
    Step.BEGINNING: {Step.FLYING, Step.LOOKING, Step.RESTING, Step.RETURNING},
    Step.FLYING: {Step.SETTLING, Step.RETURNING},
    Step.SETTLING: {Step.LOOKING, None},
    Step.RETURNING: {Step.LOOKING, Step.SETTLING},
}


@dataclass(slots=True, eq=False)
class Slot:
    """A vehicle with something going on."""

    vin: str
    step: Step | None = None
    again: bool = False
    """It was triggered while something else was done: look (again) afterwards."""
    limit: int = FIRST_LIMIT
    until: float = inf
    """RESTING: look again then. FLYING: an answer is overdue then."""
    flight: InFlight | None = None
    campaign: Campaign | None = None
    dup: bool = False
    tried: tuple[int, int, bool] | None = None
    """Place, epoch and whether as a repeat: what was last to be begun. It may have been, without an answer."""
    lost: bool = False
    """BEGINNING: the connection is over."""
    answered: int | None = None
    """RETURNING: the answer that has come after all. BEGINNING: it has come before it was sent again."""
    past: Waiting | None = None
    """LOOKING, RESTING: an attempt of this one was not answered in time, and may be yet."""
    awaits: bool = False
    """Of what is in flight, or past: its end is its result."""
    doubt: bool = False
    """BEGINNING: it was committed before, and nobody knows what came of that."""
    heard: bool = False
    """SETTLING: it is what the vehicle has said."""
    rest: bool = False
    """SETTLING: others wait, so look for them afterwards."""


class _Queued(NamedTuple):
    slot: Slot | None
    """None: nobody waits for the verdict."""
    change: Change


@dataclass(slots=True)
class _Limited:
    """A campaign that has sent as much as it may for now."""

    until: float
    per_second: float
    tries: int = 0
    """So many may try until then."""
    vins: deque[str] = field(default_factory=deque)


class Dispatcher:
    """Of one share of a node's vehicles."""

    def __init__(self, node: str, settings: DispatchSettings):
        self._node, self._settings = node, settings
        self.lease = 0
        """Of this node: what it has in flight is others' to take back when it is over."""
        self.vehicles: dict[str, Vehicle] = {}
        """The latest session of each."""
        self._earlier: dict[str, dict[str, Vehicle]] = {}
        """Sessions of vehicles that have a later one here, too, by client id: when that is over, they are it again."""
        self._slots: dict[str, Slot] = {}
        self._to_look: dict[str, Slot] = {}
        self._to_commit: deque[_Queued] = deque()
        self._looking: tuple[int, dict[str, Slot], int] | None = None
        self._committing: tuple[int, list[_Queued]] | None = None
        self._limited: dict[int, _Limited] = {}
        self._blocked_until = 0.0
        """Nothing is asked of a store that has just failed."""
        self._due: list[tuple[float, str]] = []
        self._numbers = 0
        self._effects: list[Effect] = []
        self.unmatched = 0
        """Answers that settled nothing."""

    # -- for whoever asks ------------------------------------------------------------------------------------

    @property
    def deadline(self) -> float:
        first = self._due[0][0] if self._due else inf
        for limited in self._limited.values():
            first = min(first, limited.until)
        if (self._to_look and self._looking is None) or (self._to_commit and self._committing is None):
            first = min(first, self._blocked_until)
        return first

    @property
    def idle(self) -> bool:
        """Nothing is to be committed, or being committed."""
        return not self._to_commit and self._committing is None

    def connected(self) -> list[Vehicle]:
        """Every session that is a vehicle's, for whoever takes the place of this dispatcher."""
        return [*self.vehicles.values(), *(one for some in self._earlier.values() for one in some.values())]

    def step_of(self, vin: str) -> Step | None:
        slot = self._slots.get(vin)
        return slot.step if slot is not None else None

    # -- the one door ----------------------------------------------------------------------------------------

    def handle(self, event: Event, now: float) -> list[Effect]:
        match event:
            case Online(vehicle):
                self._online(vehicle, now)
            case Offline(vin, epoch, connected):
                self._offline(vin, epoch, connected)
            case Triggered(vins):
                self._triggered(vins, now)
            case LookedUp():
                self._looked_up(event, now)
            case LookUpFailed(number):
                self._look_up_failed(number, now)
            case Committed():
                self._committed(event, now)
            case CommitFailed(number):
                self._commit_failed(number, now)
            case Acked(acks, store_now):
                for vin, place, reason in acks:
                    self._acked(vin, place, reason, store_now)
            case Unsendable(vin, place, reason):
                self._unsendable(vin, place, reason, now)
            case Resulted(finish):
                self._resulted(finish)
            case Tick():
                self._tick(now)
        self._ask(now)
        effects, self._effects = self._effects, []
        return effects

    def _ask(self, now: float) -> None:
        if now < self._blocked_until:
            return
        if self._to_look and self._looking is None:
            # Those that have to be looked at more closely go together: they are few.
            limit = next(iter(self._to_look.values())).limit
            asked: dict[str, Slot] = {}
            for vin, slot in self._to_look.items():
                if slot.limit == limit:
                    asked[vin] = slot
                    if len(asked) * limit >= LOOK_MAX * FIRST_LIMIT:
                        break
            for vin in asked:
                del self._to_look[vin]
            self._numbers += 1
            self._looking = self._numbers, asked, limit
            self._effects.append(LookUp(self._numbers, list(asked), limit))
        if self._to_commit and self._committing is None:
            queued = [self._to_commit.popleft() for _ in range(min(COMMIT_MAX, len(self._to_commit)))]
            self._numbers += 1
            self._committing = self._numbers, queued
            self._effects.append(Commit(self._numbers, [one.change for one in queued]))

    # -- vehicles --------------------------------------------------------------------------------------------

    def _online(self, vehicle: Vehicle, now: float) -> None:
        vin, before = vehicle.vin, self.vehicles.get(vehicle.vin)
        if before is not None and before.epoch > vehicle.epoch:
            if before.client_id != vehicle.client_id:  # otherwise it is said late
                self._earlier.setdefault(vin, {})[vehicle.client_id] = vehicle
            return
        if before is not None and before.client_id != vehicle.client_id:
            self._earlier.setdefault(vin, {})[before.client_id] = before
        if vin in self._earlier:
            self._forget_earlier(vin, vehicle.client_id)
        if before is not None and before.epoch != vehicle.epoch:
            self._let_go(vin, before.epoch, connected=False)
        self.vehicles[vin] = vehicle
        self._wake(vin)

    def _offline(self, vin: str, epoch: int, connected: bool) -> None:
        vehicle = self.vehicles.get(vin)
        here = vehicle is not None and vehicle.epoch == epoch
        if here:
            del self.vehicles[vin]
        self._let_go(vin, epoch, connected=connected)
        earlier = self._earlier.get(vin)
        if earlier is None:
            return
        if here:
            latest = max(earlier.values(), key=lambda one: one.epoch)
            self._forget_earlier(vin, latest.client_id)
            self.vehicles[vin] = latest
            self._wake(vin)
        else:
            for client_id in [one.client_id for one in earlier.values() if one.epoch == epoch]:
                self._forget_earlier(vin, client_id)

    def _forget_earlier(self, vin: str, client_id: str) -> None:
        earlier = self._earlier[vin]
        earlier.pop(client_id, None)
        if not earlier:
            del self._earlier[vin]

    def _let_go(self, vin: str, epoch: int, *, connected: bool) -> None:
        """What goes on for that session of the vehicle ends, or comes back."""
        slot = self._slots.get(vin)
        if slot is None:
            return
        match slot.step:
            case Step.LOOKING | Step.RESTING:
                if vin not in self.vehicles:
                    self._end(slot)
            case Step.BEGINNING:
                if slot.flight is not None and slot.flight.epoch == epoch:
                    slot.lost = slot.lost or not connected
            case Step.FLYING:
                if slot.flight is not None and slot.flight.epoch == epoch and not connected:
                    self._return(slot, slot.flight.attempts)

    def _triggered(self, vins: Collection[str], now: float) -> None:
        # Nearly always a few of many, or many of which a few are here.
        vehicles = self.vehicles
        here: Iterable[str] = (
            [vin for vin in vins if vin in vehicles] if len(vins) < 4 * len(vehicles) else vehicles.keys() & set(vins)
        )
        for vin in here:
            self._wake(vin)

    def _wake(self, vin: str) -> None:
        slot = self._slots.get(vin)
        if slot is None:
            slot = self._slots[vin] = Slot(vin)
            self._look(slot)
        elif slot.step is Step.RESTING:
            self._look(slot)
        elif slot.step is not Step.LOOKING or vin not in self._to_look:
            slot.again = True

    # -- moves -----------------------------------------------------------------------------------------------

    def _move(self, slot: Slot, step: Step | None) -> None:
        if step not in LEGAL[slot.step]:
            raise BrokenInvariant(f"fan-out to {slot.vin}: {slot.step} to {step}")
        slot.step = step

    def _look(self, slot: Slot, limit: int = FIRST_LIMIT) -> None:
        self._move(slot, Step.LOOKING)
        slot.again, slot.limit, slot.until = False, limit, inf
        self._to_look[slot.vin] = slot

    def _rest(self, slot: Slot, until: float) -> None:
        self._move(slot, Step.RESTING)
        if slot.again:
            self._look(slot)
            return
        self._wait(slot, until)

    def _wait(self, slot: Slot, until: float) -> None:
        slot.until = until
        if until < inf:
            heapq.heappush(self._due, (until, slot.vin))

    def _end(self, slot: Slot) -> None:
        """Nothing goes on with this vehicle any more, as far as is known."""
        self._move(slot, None)
        self._to_look.pop(slot.vin, None)
        if self._slots.get(slot.vin) is slot:
            del self._slots[slot.vin]

    def _over(self, slot: Slot, rest: bool) -> None:
        """Something has come to its end: what is next?"""
        slot.flight = slot.campaign = slot.answered = slot.past = None
        slot.lost = slot.dup = slot.heard = False
        if slot.vin in self.vehicles and (rest or slot.again):
            self._look(slot)
        else:
            self._end(slot)

    def _queue(self, slot: Slot | None, change: Change) -> None:
        self._to_commit.append(_Queued(slot, change))

    # -- what waits ------------------------------------------------------------------------------------------

    def _looked_up(self, event: LookedUp, now: float) -> None:
        if self._looking is None or self._looking[0] != event.number:
            return
        _, asked, limit = self._looking
        self._looking = None
        for vin, slot in asked.items():
            if self._slots.get(vin) is not slot or slot.step is not Step.LOOKING or vin in self._to_look:
                continue  # it went meanwhile, and is perhaps back
            self._choose(slot, event.found.get(vin), event, limit, now)

    def _look_up_failed(self, number: int, now: float) -> None:
        if self._looking is None or self._looking[0] != number:
            return
        _, asked, _ = self._looking
        self._looking = None
        self._blocked_until = now + RETRY_SECONDS
        for vin, slot in asked.items():
            if self._slots.get(vin) is slot and slot.step is Step.LOOKING:
                self._to_look[vin] = slot

    def _choose(self, slot: Slot, found: Found | None, event: LookedUp, limit: int, now: float) -> None:
        vehicle = self.vehicles.get(slot.vin)
        if found is not None and found.in_flight is not None:
            self._found_in_flight(slot, found.in_flight, vehicle, event, now)
            return
        waiting, more = (found.waiting, found.more) if found is not None else ([], False)
        limited = {number for number, one in self._limited.items() if one.tries <= 0}
        choice = choose(waiting, event.campaigns, event.sizes, vehicle, limited, event.store_now)
        for finish in choice.finished:
            self._queue(None, finish)
        if choice.limited is not None:
            self._limited[choice.limited].vins.append(slot.vin)
        if vehicle is None:
            self._end(slot)
        elif choice.chosen is not None:
            slot.rest = len(waiting) - len(choice.finished) > 1 or more
            self._begin(slot, choice.chosen, vehicle, event, now)
        elif more and limit < LIMIT_MAX:
            again = slot.again
            self._look(slot, limit * DEEPER)
            slot.again = again
        elif choice.later < inf:
            self._rest(slot, now + choice.later - event.store_now)
        else:
            self._over(slot, rest=False)

    def _begin(self, slot: Slot, chosen: Waiting, vehicle: Vehicle, event: LookedUp, now: float) -> None:
        if (limited := self._limited.get(chosen.campaign)) is not None:
            limited.tries -= 1
        kept = is_kept(chosen, vehicle)
        packet_id = chosen.sent.packet_id if kept and chosen.sent is not None else 0
        flight = self._flight(chosen, vehicle, packet_id, event.store_now)
        slot.flight, slot.campaign, slot.dup, slot.lost = flight, event.campaigns[chosen.campaign], kept, False
        slot.tried, slot.past = (flight.place, flight.epoch, kept), None
        self._move(slot, Step.BEGINNING)
        self._queue(slot, Begin(chosen, flight))

    def _flight(self, of: Waiting | InFlight, vehicle: Vehicle, packet_id: int, store_now: float) -> InFlight:
        return InFlight(
            of.vin,
            of.place,
            of.campaign,
            of.payload,
            of.expires,
            of.attempts,
            Sent(vehicle.client_id, vehicle.born, packet_id),
            vehicle.epoch,
            self._node,
            self.lease,
            store_now,
        )

    def _found_in_flight(
        self, slot: Slot, seen: InFlight, vehicle: Vehicle | None, event: LookedUp, now: float
    ) -> None:
        """The store says that something is in flight, and we have not sent it: somebody did before us, or nobody."""
        campaign = event.campaigns.get(seen.campaign)
        if vehicle is None:
            self._end(slot)
        elif seen.epoch > vehicle.epoch:
            self._rest(slot, now + ELSEWHERE_SECONDS)  # a later session is the vehicle
        elif campaign is not None and campaign.state is State.CANCELLED:
            slot.flight, slot.rest = seen, True
            self._move(slot, Step.SETTLING)
            self._queue(slot, Finish(seen, End.CANCELLED, "cancelled while it was on its way"))
        elif (
            campaign is None
            or not campaign.sending
            or seen.expires <= event.store_now
            or seen.payload not in event.sizes
        ):
            slot.flight, slot.campaign = seen, campaign
            self._return(slot, seen.attempts)  # and then it is looked at like any other
        elif vehicle.has(seen.sent) or seen.epoch == vehicle.epoch:
            packet_id, slot.dup = seen.sent.packet_id, True
            if seen.epoch == vehicle.epoch:
                # Either we have begun it ourselves and had no answer, so it is not sent; or a dispatcher before us has,
                # who may have sent it on this very connection: then it is another packet.
                ours = slot.tried is not None and slot.tried[:2] == (seen.place, seen.epoch)
                packet_id, slot.dup = (packet_id, slot.tried[2]) if ours and slot.tried is not None else (0, False)
            slot.flight = self._flight(seen, vehicle, packet_id, event.store_now)
            slot.campaign, slot.lost, slot.rest = campaign, False, True
            slot.tried = (seen.place, vehicle.epoch, slot.dup)
            self._move(slot, Step.BEGINNING)
            self._queue(slot, Adopt(seen, slot.flight))
        else:
            slot.flight, slot.campaign = seen, campaign
            self._return(slot, seen.attempts)

    # -- what was committed ----------------------------------------------------------------------------------

    def _committed(self, event: Committed, now: float) -> None:
        if self._committing is None or self._committing[0] != event.number:
            return
        _, queued = self._committing
        self._committing = None
        for (slot, change), verdict in zip(queued, event.verdicts, strict=True):
            if slot is None or self._slots.get(slot.vin) is not slot:
                continue
            match change:
                case Begin() | Adopt():
                    self._begun(slot, verdict, event.store_now, now)
                case Return():
                    self._returned(slot, change, event.store_now, now)
                case Finish() | Await():
                    self._settled(slot, change, verdict)

    def _commit_failed(self, number: int, now: float) -> None:
        """It may have happened all the same; then the same again is refused, which does no harm."""
        if self._committing is None or self._committing[0] != number:
            return
        _, queued = self._committing
        self._committing = None
        self._blocked_until = now + RETRY_SECONDS
        self._to_commit.extendleft(reversed(queued))
        for slot, _ in queued:
            if slot is not None:
                slot.doubt = slot.step is Step.BEGINNING

    def _settled(self, slot: Slot, change: Finish | Await, verdict: Verdict | None) -> None:
        if verdict is Verdict.GONE and slot.heard and isinstance(change.seen, InFlight):
            # Somebody may have taken it back, as from a node that is gone; the vehicle has it all the same.
            self._queue(slot, change._replace(seen=_past(change.seen, change.seen.attempts)))
        else:
            self._over(slot, slot.rest)

    def _begun(self, slot: Slot, verdict: Verdict | None, store_now: float, now: float) -> None:
        flight, campaign, doubt = slot.flight, slot.campaign, slot.doubt
        assert flight is not None and campaign is not None
        slot.doubt = False
        vehicle = self.vehicles.get(slot.vin)
        if verdict is Verdict.DONE:
            if slot.lost or vehicle is None or vehicle.epoch != flight.epoch:
                self._effects.append(Refused(slot.vin, flight.place))
                self._return(slot, flight.attempts)
                return
            self._move(slot, Step.FLYING)
            if slot.answered is not None:
                answered, slot.answered = slot.answered, None
                self._effects.append(Refused(slot.vin, flight.place))
                self._acked(slot.vin, flight.place, answered, store_now)
                return
            if self._settings.ack_secs:
                self._wait(slot, now + self._settings.ack_secs)
            self._effects.append(Publish(vehicle, flight, campaign, slot.dup))
            return
        self._effects.append(Refused(slot.vin, flight.place))
        slot.answered = None
        if doubt and (verdict is None or verdict is Verdict.STALE):
            # The store was not asked again, and may have it in flight: nobody else would ever take it back.
            self._return(slot, flight.attempts)
            return
        slot.flight = slot.campaign = None
        if vehicle is None:
            self._move(slot, Step.RESTING)
            self._end(slot)
        elif verdict is Verdict.LIMITED:
            per_second = campaign.rate_per_sec or UNKNOWN_RATE
            limited = self._limited.setdefault(flight.campaign, _Limited(now + LIMITED_SECONDS, per_second))
            limited.tries = 0
            self._look(slot)  # what else waits blocks on nobody; if nothing does, it waits among the limited
        elif verdict is None or verdict is Verdict.STALE:
            # No room; or another node has taken the session, and we shall hear of it.
            self._rest(slot, now + AGAIN_SECONDS)
        else:
            self._look(slot)

    def _return(self, slot: Slot, attempts: int, not_before: float = 0.0, *, refused: bool = False) -> None:
        seen = slot.flight
        assert seen is not None
        self._move(slot, Step.RETURNING)
        slot.answered = None
        slot.awaits = slot.campaign is not None and slot.campaign.awaits_result
        self._queue(slot, Return(seen, attempts, not_before, refused))

    def _returned(self, slot: Slot, change: Return, store_now: float, now: float) -> None:
        seen, answered = change.seen, slot.answered
        slot.flight = slot.campaign = slot.answered = None
        slot.past = _past(seen, change.attempts)
        if answered is not None:
            self._settle_past(slot, slot.past, answered, store_now)
        else:
            # Even if the vehicle has gone: it may have come to its end while it was away.
            self._look(slot)

    def _settle_past(self, slot: Slot, past: Waiting, reason: int, store_now: float) -> None:
        """Its answer has come after all: it waits, and has its end now."""
        slot.rest, slot.past = True, None
        self._to_look.pop(slot.vin, None)
        self._move(slot, Step.SETTLING)
        self._queue(slot, self._answer(past, reason, slot.awaits, store_now))

    def _answer(self, seen: Waiting | InFlight, reason: int, awaits: bool, store_now: float) -> Finish | Await:
        if reason >= 0x80:
            return Finish(seen, End.FAILED, f"refused with 0x{reason:02X}")
        return Await(seen, store_now + self._settings.result_secs) if awaits else Finish(seen, End.ACKED)

    # -- what the vehicle says -------------------------------------------------------------------------------

    def _acked(self, vin: str, place: int, reason: int, store_now: float) -> None:
        slot = self._slots.get(vin)
        if slot is None:
            self.unmatched += 1
            return
        if slot.step in (Step.LOOKING, Step.RESTING) and slot.past is not None and slot.past.place == place:
            if reason < 0x80 or reason in FINAL_REASONS:
                self._settle_past(slot, slot.past, reason, store_now)
            return
        if slot.flight is None or slot.flight.place != place:
            self.unmatched += 1  # late, doubled, or of another
            return
        if slot.step is Step.RETURNING:
            if reason < 0x80 or reason in FINAL_REASONS:
                slot.answered = reason
            return
        if slot.step is Step.BEGINNING and slot.dup:
            slot.answered = reason  # it has had the packet from before, and need not get it again
            return
        if slot.step is not Step.FLYING:
            return
        flight, settings = slot.flight, self._settings
        if reason < 0x80 or reason in FINAL_REASONS or flight.attempts + 1 >= settings.attempts_max:
            awaits = slot.campaign is not None and slot.campaign.awaits_result
            slot.heard = True
            self._move(slot, Step.SETTLING)
            self._queue(slot, self._answer(flight, reason, awaits, store_now))
        else:
            self._try_later(slot, store_now)

    def _try_later(self, slot: Slot, store_now: float) -> None:
        """Another attempt, as a new packet."""
        assert slot.flight is not None
        attempts, settings = slot.flight.attempts + 1, self._settings
        wait = min(settings.backoff_secs * 2 ** min(attempts - 1, 30), settings.backoff_secs_max)
        self._return(slot, attempts, store_now + wait, refused=True)

    def _unsendable(self, vin: str, place: int, reason: str, now: float) -> None:
        slot = self._slots.get(vin)
        if slot is None or slot.flight is None or slot.flight.place != place or slot.step is not Step.FLYING:
            return
        self._move(slot, Step.SETTLING)
        self._queue(slot, Finish(slot.flight, End.FAILED, reason))

    def _resulted(self, finish: Finish) -> None:
        slot = self._slots.get(finish.seen.vin)
        flight = slot.flight if slot is not None and slot.step is Step.FLYING else None
        if slot is not None and flight is not None and flight.place == finish.seen.place:
            self._move(slot, Step.SETTLING)
            self._queue(slot, finish._replace(seen=flight))  # which finds that it has ended

    # -- time ------------------------------------------------------------------------------------------------

    def _tick(self, now: float) -> None:
        while self._due and self._due[0][0] <= now:
            _, vin = heapq.heappop(self._due)
            slot = self._slots.get(vin)
            if slot is None or slot.until > now:
                continue
            if slot.step is Step.RESTING:
                self._look(slot)
            elif slot.step is Step.FLYING and slot.flight is not None:
                self._overdue(slot, now)
        for number, limited in [(n, one) for n, one in self._limited.items() if one.until <= now]:
            # As many as may go by then, and one more to see whether that is still so.
            if not limited.vins:
                del self._limited[number]
                continue
            limited.tries = 1 + int(limited.per_second * LIMITED_SECONDS)
            limited.until = now + LIMITED_SECONDS
            for _ in range(min(limited.tries, len(limited.vins))):
                self._wake(limited.vins.popleft())

    def _overdue(self, slot: Slot, now: float) -> None:
        flight = slot.flight
        assert flight is not None
        if flight.attempts + 1 >= self._settings.attempts_max:
            self._move(slot, Step.SETTLING)
            self._queue(slot, Finish(flight, End.FAILED, "no answer"))
        else:
            self._try_later(slot, flight.sent_at + self._settings.ack_secs)


def _past(seen: InFlight, attempts: int) -> Waiting:
    """As it waits after it was in flight."""
    return Waiting(seen.vin, seen.place, seen.campaign, seen.payload, seen.expires, attempts)
