"""Which of the deliveries that wait for a vehicle goes next, as a function of what is known."""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from math import inf
from typing import NamedTuple

from holdfast.fanout.nouns import Campaign, End, Waiting, lane_of
from holdfast.fanout.table import Finish
from holdfast.fanout.vehicles import Vehicle


class Choice(NamedTuple):
    chosen: Waiting | None
    finished: list[Finish]
    """Those that have come to their end while they waited."""
    later: float
    """By the store's clock: when one that was refused may be tried again; inf: there is none."""
    limited: int | None
    """The campaign that would have sent one, and may not just now."""


def choose(
    waiting: Sequence[Waiting],
    campaigns: Mapping[int, Campaign],
    sizes: Mapping[int, int],
    vehicle: Vehicle | None,
    limited: Container[int],
    store_now: float,
) -> Choice:
    """First in, first out within a lane, among those that may go; higher lanes first.

    One that was refused and waits for its next attempt blocks its lane. One whose campaign is limited, or that the
    vehicle is not subscribed to, blocks nobody. What the vehicle's session may have half of goes before all others.
    """
    finished: list[Finish] = []
    blocked: set[int] = set()
    later, held = inf, None
    for delivery in _in_order(waiting, vehicle):
        campaign, lane = campaigns.get(delivery.campaign), lane_of(delivery.place)
        if campaign is None:
            continue
        if delivery.expires <= store_now:
            finished.append(Finish(delivery, End.EXPIRED, "waited too long"))
        elif _is_superseded(delivery, campaign, waiting, campaigns):
            finished.append(Finish(delivery, End.SUPERSEDED, "newer data waits"))
        elif vehicle is None or lane in blocked or not vehicle.takes(campaign.request_id):
            continue
        elif delivery.not_before > store_now:
            blocked.add(lane)
            later = min(later, delivery.not_before)
        elif (size := sizes.get(delivery.payload)) is None:
            finished.append(Finish(delivery, End.FAILED, "payload missing"))
        elif size > vehicle.packet_bytes_max:
            finished.append(Finish(delivery, End.FAILED, "packet too large"))
        elif delivery.campaign in limited:
            held = delivery.campaign if held is None else held
        else:
            return Choice(delivery, finished, later, held)
    return Choice(None, finished, later, held)


def _in_order(waiting: Sequence[Waiting], vehicle: Vehicle | None) -> Sequence[Waiting]:
    if vehicle is None or len(waiting) < 2:
        return waiting
    kept = [one for one in waiting if is_kept(one, vehicle)]
    return waiting if not kept else [*kept, *(one for one in waiting if not is_kept(one, vehicle))]


def is_kept(delivery: Waiting, vehicle: Vehicle) -> bool:
    """It was sent in this very session, and not answered."""
    sent = delivery.sent
    return sent is not None and vehicle.has(sent)


def _is_superseded(
    delivery: Waiting, campaign: Campaign, waiting: Sequence[Waiting], campaigns: Mapping[int, Campaign]
) -> bool:
    """It was in flight when a newer one with its request id came, which was to replace it, and is back."""
    if delivery.sent is None or len(waiting) < 2:
        return False
    for other in waiting:
        # By campaign: one of an earlier campaign that is tried again has a later place, and is no newer for that.
        if other.campaign > delivery.campaign:
            newer = campaigns.get(other.campaign)
            if newer is not None and newer.request_id == campaign.request_id and newer.replaces:
                return True
    return False
