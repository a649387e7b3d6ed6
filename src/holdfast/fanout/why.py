"""Why a vehicle does not get its next delivery: the one reason, and the command that would change it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from shlex import quote

from holdfast.fanout.control import memory_of
from holdfast.fanout.nouns import Awaiting, Campaign, InFlight, State, Waiting, lane_of, ticket_of
from holdfast.fanout.requests import options_of
from holdfast.fanout.vehicles import Vehicle


@dataclass(frozen=True, slots=True)
class Answer:
    """One reason, in a word for programs and in a sentence for people."""

    reason: str
    says: str
    do: str = ""
    """A command, or nothing: there is nothing to do but wait."""


@dataclass(frozen=True, slots=True)
class Known:
    """Everything there is to know about one vehicle."""

    vin: str
    in_flight: InFlight | None
    waiting: Sequence[Waiting]
    awaiting: Sequence[Awaiting]
    campaigns: Mapping[int, Campaign]
    vehicle: Vehicle | None
    """If it is connected to the node that answers, and subscribed."""
    connected_as: str | None
    """The client id of a session that is connected here and known to be its, subscribed or not."""
    elsewhere: str | None
    """The node it is connected to, if that is another one."""
    now: float


def why(known: Known) -> Answer:
    if known.in_flight is not None:
        flight = known.in_flight
        name = _name(known, flight.campaign)
        since = _ago(known.now - flight.sent_at)
        if known.vehicle is None and known.elsewhere is None:
            return Answer("returning", f"{name} was on its way when the connection was lost; it is about to wait again")
        return Answer("unanswered", f"{name} was sent {since} ago and is not acknowledged yet")
    if not known.waiting:
        if known.awaiting:
            first = known.awaiting[0]
            name = _name(known, first.campaign)
            return Answer("awaiting_result", f"it has {name}, whose result is awaited until {_time(first.until)}")
        return Answer("nothing", f"nothing waits for {known.vin}")
    reasons = _of_all(known)
    if known.vehicle is not None and all(reason is not None for reason in reasons):
        return next(reason for reason in reasons if reason is not None)
    if known.elsewhere is not None:
        return Answer("elsewhere", f"it is connected to node {known.elsewhere}; ask there", "holdfast node ls")
    if known.vehicle is None and known.connected_as is not None:
        return Answer(
            "not_subscribed",
            f"{known.connected_as} is connected, and not subscribed to its requests with QoS 1",
            f"holdfast session show {quote(known.connected_as)}",
        )
    if known.vehicle is None:
        return Answer(
            "offline",
            f"{known.vin} is not connected; {_many(len(known.waiting), 'delivery waits', 'deliveries wait')} for it",
        )
    return Answer("moving", "its next delivery is being sent")


def _of_all(known: Known) -> list[Answer | None]:
    """For each that waits. One that was refused and waits for its next attempt blocks those behind it in its lane."""
    found: list[Answer | None] = []
    blocked: dict[int, Answer] = {}
    for delivery in known.waiting:
        answer = _of_one(known, delivery)
        lane = lane_of(delivery.place)
        if answer is not None and answer.reason == "backing_off":
            blocked.setdefault(lane, answer)
        found.append(answer or blocked.get(lane))
    return found


def _of_one(known: Known, delivery: Waiting) -> Answer | None:
    """Why this one does not go; None: it could."""
    campaign = known.campaigns.get(delivery.campaign)
    if campaign is None:
        return Answer("unknown", f"its campaign {delivery.campaign} is not there any more")
    name = f"{campaign.request_id}/{campaign.number}"
    order = f"{quote(campaign.request_id)} --number {campaign.number}"
    if campaign.state is State.CANCELLED:
        return Answer("cancelled", f"campaign {name} was cancelled, and what waits of it is being ended")
    if campaign.state is State.PAUSED:
        why_so = f" ({campaign.reason})" if campaign.reason else ""
        return Answer("paused", f"campaign {name} is paused{why_so}", f"holdfast fanout resume {order}")
    if not campaign.sending:
        return _not_sending(campaign, name, order, known.now)
    if campaign.waved and (campaign.cut is None or ticket_of(campaign.id, known.vin) > campaign.cut):
        wave = memory_of(campaign).wave + 1
        return Answer(
            "later_wave",
            f"campaign {name} is in wave {wave}, and its turn is later",
            f"holdfast fanout advance {order}",
        )
    if delivery.not_before > known.now:
        return Answer(
            "backing_off",
            f"{name} was refused {_many(delivery.attempts, 'time', 'times')}; next try {_time(delivery.not_before)}",
        )
    if known.vehicle is not None and not known.vehicle.takes(campaign.request_id):
        asked = ", ".join(sorted(known.vehicle.requests or ()))
        return Answer("not_subscribed", f"it is subscribed to {asked} only, not to {campaign.request_id}")
    if campaign.rate_per_sec is not None or campaign.in_flight_max is not None or campaign.bytes_per_sec is not None:
        return Answer("limited", f"campaign {name} sends as much as it may", f"holdfast fanout edit {order} --rate N")
    return None


def _not_sending(campaign: Campaign, name: str, order: str, now: float) -> Answer:
    options = memory_of(campaign).options or options_of(campaign)
    if options.start_at is not None and memory_of(campaign).started_at is None:
        return Answer("not_begun", f"campaign {name} begins at {options.start_at}")
    if options.windows:
        windows = ", ".join(f"{w.begin}–{w.end}" for w in options.windows)
        return Answer("outside_window", f"campaign {name} sends only between {windows} UTC")
    if campaign.waved:
        why_so = campaign.reason or "its waves are being made"
        return Answer(
            "waves_wait", f"campaign {name}: {why_so}", f"holdfast fanout edit {order} --final" if campaign.open else ""
        )
    return Answer("not_sending", f"campaign {name} is not sending: {campaign.reason or 'it is about to'}")


def _name(known: Known, campaign_id: int) -> str:
    campaign = known.campaigns.get(campaign_id)
    return f"{campaign.request_id}/{campaign.number}" if campaign is not None else f"campaign {campaign_id}"


def _many(count: int, one: str, more: str) -> str:
    return f"{count} {one if count == 1 else more}"


def _time(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="seconds")


def _ago(seconds: float) -> str:
    return f"{seconds:.1f} s" if seconds < 120 else f"{seconds / 60:.0f} min"
