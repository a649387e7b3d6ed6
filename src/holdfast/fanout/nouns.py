"""The nouns of fan-out: what waits for a vehicle, what is on its way, how it ends, and what a campaign is.

waiting ──Begin──▶ in flight ──PUBACK──▶ acked, or awaiting its result ──▶ acked | failed
   ▲                  │
   └────Return────────┘ lost connection, refused attempt          waiting ──▶ failed | expired | superseded | cancelled
"""

from __future__ import annotations

import zlib
from enum import StrEnum
from math import inf
from typing import NamedTuple

import msgspec

DELIVERIES = "deliveries"
"""The log of ended deliveries, one message each, topic `deliveries/{vin}`."""

LANES = 10
SEQ_BITS = 56
SEQ_MAX = (1 << SEQ_BITS) - 1


def place_of(priority: int, seq: int) -> int:
    """Where a batch's deliveries stand in every vehicle's queue: the lowest goes first, priority before age."""
    return (LANES - 1 - priority) << SEQ_BITS | seq


def lane_of(place: int) -> int:
    return place >> SEQ_BITS


def seq_of(place: int) -> int:
    return place & SEQ_MAX


def ticket_of(campaign: int, vin: str) -> int:
    """A vehicle's number in a campaign with waves: whoever has a low one is in an early wave. 32 bits."""
    return zlib.crc32(b"%d:%b" % (campaign, vin.encode()))


class End(StrEnum):
    """How a delivery ends."""

    ACKED = "acked"
    FAILED = "failed"
    EXPIRED = "expired"
    SUPERSEDED = "superseded"
    CANCELLED = "cancelled"


class UnderWay(StrEnum):
    """Where a delivery is that has no end yet."""

    WAITING = "waiting"
    IN_FLIGHT = "in_flight"
    AWAITING_RESULT = "awaiting_result"


class Sent(NamedTuple):
    """As which packet, in which session, a delivery was last sent: a session that is kept gets it under the same id."""

    client_id: str
    born: str
    packet_id: int


class Waiting(NamedTuple):
    """A delivery that waits for its vehicle."""

    vin: str
    place: int
    campaign: int
    payload: int
    expires: float = inf
    """By the store's clock."""
    attempts: int = 0
    """How often it was refused, or not answered in time. A lost connection is no attempt."""
    not_before: float = 0.0
    """By the store's clock: it blocks its lane until then."""
    sent: Sent | None = None


class InFlight(NamedTuple):
    """A delivery that was sent, or is about to be."""

    vin: str
    place: int
    campaign: int
    payload: int
    expires: float
    attempts: int
    sent: Sent
    epoch: int
    """Of the session it goes to: whoever has a newer one takes it over."""
    node: str
    lease: int
    """Of the node that sends it: when that is over, it goes back to waiting."""
    sent_at: float


class Awaiting(NamedTuple):
    """A delivery that the vehicle has, and whose result is awaited."""

    vin: str
    place: int
    campaign: int
    payload: int
    attempts: int
    acked_at: float
    until: float
    """By the store's clock: without a result it has failed then."""


class State(StrEnum):
    """What a campaign is at."""

    RUNNING = "running"
    PAUSED = "paused"
    CANCELLED = "cancelled"
    """What waits is being ended; then it is closed."""
    CLOSED = "closed"


class Campaign(msgspec.Struct, frozen=True, kw_only=True):
    """One use of a request id. Times are the store's clock, in seconds."""

    id: int
    """From the store, never given twice."""
    request_id: str
    number: int
    """Which use of the request id it is, from 1."""
    sha1: bytes
    """Of the data of its first batch, by which others join it."""
    state: State
    open: bool
    """Batches may join it."""
    sending: bool
    """Deliveries may begin: it is running, its time has come, and nothing holds it."""
    waved: bool = False
    """Its vehicles have tickets."""
    cut: int | None = None
    """With waves: tickets up to this one may be sent to."""
    rate_per_sec: float | None = None
    bytes_per_sec: float | None = None
    in_flight_max: int | None = None
    awaits_result: bool = False
    replaces: bool = True
    """What waits of earlier campaigns with its request id is superseded by it."""
    version: int = 0
    """One more with every change."""
    settings: bytes = b""
    """What its first batch has asked for, which every other must agree with."""
    control: bytes = b""
    """What whoever controls it remembers."""
    reason: str = ""
    """Why it is in its state, for people."""
    created_at: float = 0.0
    batch_at: float = 0.0
    """When its last batch came."""


class Counts(msgspec.Struct, kw_only=True):
    """How many deliveries of a campaign are where. Their sum is the number of targets, at every moment."""

    waiting: int = 0
    in_flight: int = 0
    awaiting_result: int = 0
    acked: int = 0
    failed: int = 0
    expired: int = 0
    superseded: int = 0
    cancelled: int = 0

    @property
    def targets(self) -> int:
        return sum(msgspec.structs.astuple(self))

    @property
    def under_way(self) -> int:
        """Without an end yet."""
        return self.waiting + self.in_flight + self.awaiting_result


class Hint(msgspec.Struct, frozen=True):
    """Node -> other nodes. It may be lost: whoever hears nothing looks by itself, a little later."""

    merged: bool = False
    """Parts were merged."""
    campaigns: tuple[int, ...] = ()
    """Something has changed about these."""
