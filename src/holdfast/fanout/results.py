"""What vehicles say about deliveries they have: which delivery a result belongs to, and whether it went well."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from holdfast.fanout.nouns import Awaiting, Campaign, End, InFlight, Waiting
from holdfast.fanout.table import Finish

BAD = frozenset({"failed", "failure", "error", "rejected", "refused"})
"""A result whose `status` is one of these says that it went wrong."""
REASON_CHARS_MAX = 30


class Result(NamedTuple):
    """A message on a vehicle's result topic."""

    vin: str
    request_id: str
    payload: bytes
    correlation: bytes | None


def correlation_of(campaign: int, place: int) -> bytes:
    """What a result carries that belongs to this delivery."""
    return campaign.to_bytes(8, "big") + place.to_bytes(8, "big")


def settle(
    result: Result,
    in_flight: InFlight | None,
    awaiting: Sequence[Awaiting],
    waiting: Sequence[Waiting],
    campaigns: Mapping[int, Campaign],
) -> Finish | None:
    """The end it means; None: it belongs to no delivery that has none yet.

    One with correlation data belongs to that delivery; one without to the only delivery of its request id that could
    have one: among several, nobody knows which is meant. One that was sent and waits again, since its connection was
    lost or its node died, may have one too.
    """
    sent = [one for one in waiting if one.sent is not None or one.attempts]
    open_: list[InFlight | Awaiting | Waiting] = [*awaiting, *([in_flight] if in_flight is not None else []), *sent]
    if result.correlation is not None:
        mine = [one for one in open_ if correlation_of(one.campaign, one.place) == result.correlation]
    else:
        mine = [
            one
            for one in open_
            if (campaign := campaigns.get(one.campaign)) is not None and campaign.request_id == result.request_id
        ]
    if len(mine) != 1:
        return None
    wrong = what_is_wrong(result.payload)
    return Finish(mine[0], End.ACKED if wrong is None else End.FAILED, wrong or "", result.payload)


def what_is_wrong(payload: bytes) -> str | None:
    """None: it went well. A result that is no JSON object, or has no word of failure, says that the vehicle is done."""
    try:
        said: Any = msgspec.json.decode(payload)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None
    if not isinstance(said, dict):
        return None
    status, code = said.get("status"), said.get("code")
    if said.get("success") is False or (isinstance(status, str) and status.lower() in BAD):
        return _reason(said, "result: failed")
    if isinstance(code, int) and not isinstance(code, bool) and code != 0:
        return _reason(said, f"result: code {code}")
    return None


def _reason(said: dict[str, Any], otherwise: str) -> str:
    reason = said.get("reason") or said.get("message")
    return f"result: {reason}"[:REASON_CHARS_MAX] if isinstance(reason, str) else otherwise[:REASON_CHARS_MAX]
