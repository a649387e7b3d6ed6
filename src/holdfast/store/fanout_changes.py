"""What changes of deliveries come to: decided here once, for every store.

A store loads what the changes are about, asks for the moves, and makes them in one transaction.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

import msgspec

from holdfast.errors import RequestError
from holdfast.fanout.history import Ended
from holdfast.fanout.nouns import Awaiting, Counts, End, InFlight, Sent, State, Waiting, ticket_of
from holdfast.fanout.table import DOOMED, Adopt, Await, Begin, Change, Doom, Finish, Merged, Return, Verdict

WAITING, IN_FLIGHT, AWAITING = range(3)
"""Places in a row of counts; those of the ends follow."""
ENDS = tuple(End)
PLACE_OF_END = {end: AWAITING + 1 + at for at, end in enumerate(ENDS)}
COUNTS = AWAITING + 1 + len(ENDS)

Key = tuple[str, int]
"""VIN and place."""


class WaitingRow(NamedTuple):
    """A delivery that waits, as it is stored: what all of a batch have in common is in the batch."""

    vin: str
    place: int
    campaign: int
    ticket: int | None
    attempts: int = 0
    not_before: float = 0.0
    sent: str | None = None


class FlightRow(NamedTuple):
    """A delivery in flight, as it is stored."""

    vin: str
    place: int
    campaign: int
    payload: int
    expires: float
    attempts: int
    sent: str
    epoch: int
    node: str
    lease: int
    sent_at: float


class Limits(NamedTuple):
    """What a campaign allows."""

    sending: bool
    waved: bool
    cut: int | None
    rate_per_sec: float | None
    bytes_per_sec: float | None
    in_flight_max: int | None

    @property
    def limited(self) -> bool:
        return self[3:] != (None, None, None)


class Bucket(NamedTuple):
    """What a campaign may still send, as of a time."""

    deliveries: float
    bytes: float
    at: float


class Loaded:
    """What a store has of the deliveries that are to be changed. Deciding takes it further."""

    def __init__(self, now: float) -> None:
        self.now = now
        self.waiting: dict[Key, WaitingRow] = {}
        self.flights: dict[str, FlightRow] = {}
        self.awaiting: dict[Key, Awaiting] = {}
        self.epochs: dict[str, int] = {}
        """Of sessions, by client id."""
        self.campaigns: dict[int, Limits] = {}
        """Of what is to begin."""
        self.in_flight: dict[int, int] = {}
        self.buckets: dict[int, Bucket] = {}
        """Of campaigns with limits; a bucket that was never used is not there."""
        self.superseded: set[str] = set()
        """VINs for which newer data waits than what is to be returned."""
        self.sizes: dict[int, int] = {}
        """Of payloads of campaigns with a limit of bytes."""


class Moves:
    """What a store has to do: remove, then insert, then count, then append the ends."""

    def __init__(self, now: float) -> None:
        self.now = now
        self.waiting_gone: list[Key] = []
        self.flights_gone: list[str] = []
        self.awaiting_gone: list[Key] = []
        self.waiting: dict[Key, WaitingRow] = {}
        self.flights: dict[str, FlightRow] = {}
        self.awaiting: dict[Key, Awaiting] = {}
        self.ended: list[Ended] = []
        self.counts: dict[int, list[int]] = {}
        self.repeated: dict[int, int] = {}
        self.buckets: dict[int, Bucket] = {}

    def count(self, campaign: int, out_of: int | None, into: int | None, number: int = 1) -> None:
        row = self.counts.get(campaign)
        if row is None:
            row = self.counts[campaign] = [0] * COUNTS
        if out_of is not None:
            row[out_of] -= number
        if into is not None:
            row[into] += number

    def repeat(self, campaign: int, number: int = 1) -> None:
        """So many of those that were counted as waiting are targets already."""
        self.count(campaign, WAITING, None, number)
        self.repeated[campaign] = self.repeated.get(campaign, 0) + number

    def end(self, ended: Ended, out_of: int) -> None:
        self.ended.append(ended)
        self.count(ended.campaign, out_of, PLACE_OF_END[ended.end])

    def take_waiting(self, key: Key) -> None:
        if self.waiting.pop(key, None) is None:
            self.waiting_gone.append(key)

    def take_flight(self, vin: str) -> None:
        if self.flights.pop(vin, None) is None:
            self.flights_gone.append(vin)

    def take_awaiting(self, key: Key) -> None:
        if self.awaiting.pop(key, None) is None:
            self.awaiting_gone.append(key)


def check_changes(changes: Iterable[Change]) -> None:
    for change in changes:
        if isinstance(change, Begin | Adopt) and change.flight[:3] != change.seen[:3]:
            raise RequestError(f"expected a flight of {change.seen[:3]}, got one of {change.flight[:3]}")


def as_seen(change: Change) -> Ended | None:
    """What a Finish comes to if the delivery is as it was seen; None: it is another kind of change."""
    if not isinstance(change, Finish):
        return None
    seen = change.seen
    sent_at = seen.sent_at if isinstance(seen, InFlight) else seen.acked_at if isinstance(seen, Awaiting) else 0.0
    return _ended(change, seen.campaign, seen.attempts, sent_at)


def _ended(change: Finish, campaign: int, attempts: int, sent_at: float) -> Ended:
    reason = change.reason.replace("\0", "") if change.reason else ""
    at = float(int(sent_at))
    return Ended(change.seen.vin, campaign, change.seen.place, change.end, reason, attempts, at, change.result)


def decide(changes: Sequence[Change], loaded: Loaded) -> tuple[list[Verdict], Moves]:
    """In order: what the one has done, the next one finds."""
    decision = _Decision(loaded)
    return [decision.handle[type(change)](change) for change in changes], decision.moves


class _Decision:
    def __init__(self, loaded: Loaded):
        self._of, self.moves = loaded, Moves(loaded.now)
        self.handle: dict[type, Callable[..., Verdict]] = {
            Begin: self._begin,
            Adopt: self._adopt,
            Doom: self._doom,
            Return: self._return,
            Await: self._await,
            Finish: self._finish,
        }

    def _begin(self, change: Begin) -> Verdict:
        of, flight = self._of, change.flight
        key = (flight.vin, flight.place)
        row = of.waiting.get(key)
        if row is None or (row.campaign, row.attempts) != (flight.campaign, change.seen.attempts):
            return Verdict.GONE
        if flight.vin in of.flights:
            return Verdict.BUSY
        if of.epochs.get(flight.sent.client_id) != flight.epoch:
            return Verdict.STALE
        campaign = of.campaigns[row.campaign]
        if not campaign.sending or (campaign.waved and not _within(row.ticket, campaign.cut)):
            return Verdict.HELD
        if campaign.limited and not self._within_limits(row.campaign, campaign, flight.payload):
            return Verdict.LIMITED
        del of.waiting[key]
        self.moves.take_waiting(key)
        self._fly(flight_row(flight))
        self.moves.count(row.campaign, WAITING, IN_FLIGHT)
        return Verdict.DONE

    def _within_limits(self, id_: int, campaign: Limits, payload: int) -> bool:
        """A bucket holds one second's worth, and one delivery at least; one that is large is paid for afterwards."""
        of, now = self._of, self._of.now
        in_flight = of.in_flight.get(id_, 0)
        if campaign.in_flight_max is not None and in_flight >= campaign.in_flight_max:
            return False
        bucket = of.buckets.get(id_) or Bucket(float("inf"), float("inf"), now)
        passed = max(now - bucket.at, 0.0)
        deliveries, bytes_ = bucket.deliveries, bucket.bytes
        if (rate := campaign.rate_per_sec) is not None:
            deliveries = min(deliveries + passed * rate, max(rate, 1.0))
            if rate <= 0 or deliveries < 1.0:
                return False
            deliveries -= 1.0
        if (rate := campaign.bytes_per_sec) is not None:
            bytes_ = min(bytes_ + passed * rate, max(rate, 1.0))
            if rate <= 0 or bytes_ <= 0.0:
                return False
            bytes_ -= of.sizes.get(payload, 0)
        of.in_flight[id_] = in_flight + 1
        of.buckets[id_] = self.moves.buckets[id_] = Bucket(deliveries, bytes_, now)
        return True

    def _adopt(self, change: Adopt) -> Verdict:
        if self._in_flight(change.seen) is None:
            return Verdict.GONE
        if self._of.epochs.get(change.flight.sent.client_id) != change.flight.epoch:
            return Verdict.STALE
        self._land(change.seen.vin)
        self._fly(flight_row(change.flight))
        return Verdict.DONE

    def _doom(self, change: Doom) -> Verdict:
        row = self._in_flight(change.seen)
        if row is None:
            return Verdict.GONE
        self._land(row.vin)
        self._fly(row._replace(expires=DOOMED))
        return Verdict.DONE

    def _return(self, change: Return) -> Verdict:
        row = self._in_flight(change.seen)
        if row is None:
            return Verdict.GONE
        self._land(row.vin)
        end: tuple[End, str] | None = None
        if row.expires <= self._of.now:
            end = (End.CANCELLED, "cancelled") if row.expires == DOOMED else (End.EXPIRED, "expired on its way")
        elif row.vin in self._of.superseded:
            end = (End.SUPERSEDED, "newer data waits")
        if end is not None:
            ended = Ended(row.vin, row.campaign, row.place, *end, change.attempts, float(int(row.sent_at)))
            self.moves.end(ended, IN_FLIGHT)
            self._landed(row.campaign)
            return Verdict.DONE
        key = (row.vin, row.place)
        # Without waves a ticket means nothing.
        ticket = ticket_of(row.campaign, row.vin)
        sent = None if change.refused else row.sent
        back = WaitingRow(*key, row.campaign, ticket, change.attempts, change.not_before, sent)
        self._of.waiting[key] = self.moves.waiting[key] = back
        self.moves.count(row.campaign, IN_FLIGHT, WAITING)
        self._landed(row.campaign)
        return Verdict.DONE

    def _await(self, change: Await) -> Verdict:
        seen = change.seen
        key = (seen.vin, seen.place)
        if isinstance(seen, InFlight):
            row: FlightRow | WaitingRow | None = self._in_flight(seen)
            if row is None:
                return Verdict.GONE
            self._land(row.vin)
            self._landed(row.campaign)
        else:
            row = self._of.waiting.pop(key, None)
            if row is None:
                return Verdict.GONE
            self.moves.take_waiting(key)
        awaiting = Awaiting(*key, row.campaign, seen.payload, row.attempts, self._of.now, change.until)
        self._of.awaiting[key] = self.moves.awaiting[key] = awaiting
        self.moves.count(row.campaign, IN_FLIGHT if isinstance(seen, InFlight) else WAITING, AWAITING)
        return Verdict.DONE

    def _finish(self, change: Finish) -> Verdict:
        seen = change.seen
        key = (seen.vin, seen.place)
        if isinstance(seen, InFlight):
            flight = self._in_flight(seen)
            if flight is None:
                return Verdict.GONE
            self._land(seen.vin)
            self._landed(flight.campaign)
            campaign, attempts, sent_at, out_of = flight.campaign, flight.attempts, flight.sent_at, IN_FLIGHT
        elif isinstance(seen, Waiting):
            row = self._of.waiting.pop(key, None)
            if row is None:
                return Verdict.GONE
            self.moves.take_waiting(key)
            campaign, attempts, sent_at, out_of = row.campaign, row.attempts, 0.0, WAITING
        else:
            awaiting = self._of.awaiting.pop(key, None)
            if awaiting is None:
                return Verdict.GONE
            self.moves.take_awaiting(key)
            campaign, attempts, sent_at, out_of = awaiting.campaign, awaiting.attempts, awaiting.acked_at, AWAITING
        self.moves.end(_ended(change, campaign, attempts, sent_at), out_of)
        return Verdict.DONE

    def _in_flight(self, seen: InFlight) -> FlightRow | None:
        row = self._of.flights.get(seen.vin)
        if row is None or (row.place, row.epoch, row.attempts) != (seen.place, seen.epoch, seen.attempts):
            return None
        return row

    def _fly(self, row: FlightRow) -> None:
        self._of.flights[row.vin] = self.moves.flights[row.vin] = row

    def _land(self, vin: str) -> None:
        del self._of.flights[vin]
        self.moves.take_flight(vin)

    def _landed(self, campaign: int) -> None:
        if campaign in self._of.in_flight:
            self._of.in_flight[campaign] -= 1


def _within(ticket: int | None, cut: int | None) -> bool:
    return ticket is not None and cut is not None and ticket <= cut


# -- merging ---------------------------------------------------------------------------------------------


class MergedPart(NamedTuple):
    """What its rows become."""

    place: int
    campaign: int
    request_id: str
    resend: str
    waved: bool
    state: State


class Overlap(NamedTuple):
    """What there is already for the VINs of a step."""

    targets: set[tuple[str, int]]
    """VIN and campaign."""
    waiting: dict[str, list[WaitingRow]]
    """Of earlier campaigns with a request id of the step's, by VIN."""
    request_ids: dict[int, str]
    """Of those campaigns."""


def merge(rows: Iterable[tuple[str, int]], parts: Mapping[int, MergedPart], there: Overlap, moves: Moves) -> Merged:
    """Make these rows (VIN and part number) wait, as far as they are to. All were counted as waiting before."""
    merging = _Merging(parts, there, moves)
    targets, waiting, made = there.targets, there.waiting, moves.waiting
    vins: list[str] = []
    before = None
    in_order = sorted(rows)
    # Most vehicles are in one part only, and have nothing yet that matters to it.
    for (vin, number), (next_vin, _) in zip(in_order, [*in_order[1:], ("", 0)], strict=False):
        place, campaign, _, _, waved, state = parts[number]
        if vin in (before, next_vin) or vin in waiting or state in _OVER or (targets and (vin, campaign) in targets):
            if merging.add(vin, number) and vin != before:
                vins.append(vin)
                before = vin
        else:
            made[vin, place] = WaitingRow(vin, place, campaign, ticket_of(campaign, vin) if waved else None)
            vins.append(vin)
    return Merged(vins, merging.repeated)


_OVER = (State.CANCELLED, State.CLOSED)


class _Merging:
    """Rows of vehicles that have something already."""

    def __init__(self, parts: Mapping[int, MergedPart], there: Overlap, moves: Moves):
        self._parts, self._there, self._moves = parts, there, moves
        self._request_ids = there.request_ids | {part.campaign: part.request_id for part in parts.values()}
        self.repeated = 0

    def add(self, vin: str, number: int) -> bool:
        """Does it wait?"""
        (targets, waiting, _), moves = self._there, self._moves
        place, campaign, request_id, resend, waved, state = self._parts[number]
        queue = waiting.setdefault(vin, [])
        earlier = [r for r in queue if r.campaign < campaign and self._request_ids.get(r.campaign) == request_id]
        if (vin, campaign) in targets or (earlier and resend == "ignore"):
            moves.repeat(campaign)
            self.repeated += 1
            return False
        targets.add((vin, campaign))
        if state in _OVER:
            moves.end(Ended(vin, campaign, place, End.CANCELLED, state, 0), WAITING)
            return False
        if resend == "replace":
            for old in earlier:
                queue.remove(old)
                moves.take_waiting(old[:2])
                moves.end(Ended(vin, old.campaign, old.place, End.SUPERSEDED, "replaced", old.attempts), WAITING)
        row = WaitingRow(vin, place, campaign, ticket_of(campaign, vin) if waved else None)
        moves.waiting[vin, place] = row
        queue.append(row)
        return True


_NAMES = tuple(field.name for field in msgspec.structs.fields(Counts))


def counts_of(row: Iterable[int]) -> Counts:
    return Counts(**dict(zip(_NAMES, row, strict=True)))


# -- as it is stored, and as it is seen ------------------------------------------------------------------


def pack_sent(sent: Sent) -> str:
    return msgspec.json.encode(sent).decode()


def sent_of(packed: str) -> Sent:
    return Sent(*msgspec.json.decode(packed))


def flight_row(flight: InFlight) -> FlightRow:
    return FlightRow(*flight[:6], pack_sent(flight.sent), *flight[7:])


def in_flight_of(row: FlightRow) -> InFlight:
    return InFlight(*row[:6], sent_of(row.sent), *row[7:])


def waiting_of(row: WaitingRow, payload: int, expires: float) -> Waiting:
    vin, place, campaign, _, attempts, not_before, sent = row
    return Waiting(
        vin, place, campaign, payload, expires, attempts, not_before, None if sent is None else sent_of(sent)
    )


class Wanted(NamedTuple):
    """What has to be loaded."""

    waiting: set[Key]
    flights: set[str]
    awaiting: set[Key]
    sessions: set[str]
    campaigns: set[int]
    returning: set[str]


def wanted(changes: Iterable[Change]) -> Wanted:
    found = Wanted(set(), set(), set(), set(), set(), set())
    waiting, flights, awaiting, sessions, campaigns, returning = found
    for change in changes:
        seen = change.seen
        if isinstance(seen, Waiting):
            waiting.add(seen[:2])
        elif isinstance(seen, InFlight):
            flights.add(seen.vin)
        else:
            awaiting.add(seen[:2])
        if isinstance(change, Begin | Adopt):
            flights.add(seen.vin)
            sessions.add(change.flight.sent.client_id)
        if isinstance(change, Begin):
            campaigns.add(seen.campaign)
        elif isinstance(change, Return):
            returning.add(seen.vin)
    return found
