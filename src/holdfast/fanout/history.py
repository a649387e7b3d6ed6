"""An ended delivery as a message of the log `deliveries`: small, there is one per vehicle and campaign."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from holdfast.fanout.nouns import DELIVERIES, End
from holdfast.model import Batch, Micros

PUBLISHER = "$fanout"
RESULT_BYTES_MAX = 24
"""More of a vehicle's result than this is not kept."""

_ENDS = tuple(End)


class Ended(NamedTuple):
    """How one delivery ended."""

    vin: str
    campaign: int
    place: int
    end: End
    reason: str
    attempts: int
    sent_at: float = 0.0
    """When it was last sent, by the store's clock; 0: never."""
    result: bytes = b""


def topic_of(vin: str) -> str:
    return f"{DELIVERIES}/{vin}"


def encode(ended: Ended) -> bytes:
    """[campaign, place, end, reason, attempts, when it was sent in seconds, result]."""
    return msgspec.msgpack.encode(
        (
            ended.campaign,
            ended.place,
            _ENDS.index(ended.end),
            ended.reason,
            ended.attempts,
            int(ended.sent_at),
            ended.result[:RESULT_BYTES_MAX],
        )
    )


def decode(topic: str, payload: bytes) -> Ended:
    campaign, place, end, reason, attempts, sent_at, result = msgspec.msgpack.decode(payload)
    vin = topic.removeprefix(f"{DELIVERIES}/")
    return Ended(vin, campaign, place, _ENDS[end], reason, attempts, float(sent_at), result)


def batch_of(ends: Sequence[Ended], now: Micros) -> Batch:
    """The messages of these ends, for one append."""
    return Batch(
        topics=[topic_of(ended.vin) for ended in ends],
        payloads=[encode(ended) for ended in ends],
        publishers=[PUBLISHER] * len(ends),
        flags=[1] * len(ends),
        properties=None,
        times=now,
    )
