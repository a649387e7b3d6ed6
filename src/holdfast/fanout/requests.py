"""A request for a fan-out, as its sender wrote it: read, checked, and refused with the value that is wrong."""

from __future__ import annotations

import base64
import binascii
import hashlib
import re
from collections.abc import Iterable, Sequence
from datetime import datetime
from itertools import pairwise
from math import inf, isfinite
from typing import Annotated, Literal, NamedTuple

import msgspec

from holdfast.errors import RequestError, Unprocessable
from holdfast.fanout.nouns import Campaign, State
from holdfast.fanout.table import NewBatch

VIN_BYTES_MAX = 128
DATA_BYTES_MAX = 512 << 10
IDS_MAX = 100_000
"""In one JSON request; more are sent as a stream."""
REQUEST_ID_BYTES_MAX = 128
KEY_BYTES_MAX = 200
INT_MAX = (1 << 31) - 1
"""More than any store has vehicles or campaigns; columns hold it."""
EXPIRES_SECS_MAX = 10 * 366 * 86_400.0
_REQUEST_ID = re.compile(r"task_[^/+#\0]+_[0-9]{1,9}")
_NOT_IN_VIN = re.compile(r"[/+#\0]")


class NotJson(RequestError):
    """It cannot be read at all."""


class Wave(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """One wave: a share of the vehicles, or so many, and what must be true before the next one begins."""

    percent: Annotated[float, msgspec.Meta(gt=0, le=100)] | None = None
    vehicles: Annotated[int, msgspec.Meta(gt=0, le=INT_MAX)] | None = None
    acked_percent: Annotated[float, msgspec.Meta(ge=0, le=100)] = 0.0
    """So many of those that have ended must be acked."""
    min_ended: Annotated[int, msgspec.Meta(ge=0, le=INT_MAX)] = 0
    pause_secs: Annotated[float, msgspec.Meta(ge=0)] = 0.0
    timeout_secs: Annotated[float, msgspec.Meta(gt=0)] | None = None


class DailyWindow(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """A time of the day in which deliveries may begin, in UTC; it may go over midnight."""

    begin: str
    end: str
    days: list[Annotated[int, msgspec.Meta(ge=1, le=7)]] = msgspec.field(default_factory=list)
    """1: Monday. Empty: every day."""


class CampaignOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """What the first batch of a campaign may ask of it."""

    number: Annotated[int, msgspec.Meta(ge=1, le=INT_MAX)] | None = None
    """Which campaign of the request id the batch belongs to."""
    start_at: str | None = None
    end_at: str | None = None
    windows: list[DailyWindow] = msgspec.field(default_factory=list)
    rate_per_sec: Annotated[float, msgspec.Meta(gt=0)] | None = None
    ramp_secs: Annotated[float, msgspec.Meta(gt=0)] | None = None
    bytes_per_sec: Annotated[float, msgspec.Meta(gt=0)] | None = None
    in_flight_max: Annotated[int, msgspec.Meta(gt=0, le=INT_MAX)] | None = None
    waves: list[Wave] = msgspec.field(default_factory=list)
    abort_failed_percent: Annotated[float, msgspec.Meta(gt=0, le=100)] | None = None
    abort_min_ended: Annotated[int, msgspec.Meta(ge=1, le=INT_MAX)] = 20
    result: bool = False
    """Success means a result that says so, not an acknowledgement."""
    paused: bool = False
    """It waits for `resume`."""


class Request(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The JSON of a request; `ids` beside it when they come as a stream."""

    request_id: str
    ids: list[str] = msgspec.field(default_factory=list)
    data: str | None = None
    data_sha1: str | None = None
    encoding: Literal["utf8", "base64"] = "utf8"
    expires: float | str | None = None
    priority: Annotated[int, msgspec.Meta(ge=0, le=9)] = 4
    resend: Literal["replace", "append", "ignore"] = "replace"
    key: str | None = None
    final: bool = False
    campaign: CampaignOptions | None = None


class Checked(NamedTuple):
    """A request that makes sense."""

    batch: NewBatch
    data: bytes | None
    """To be stored first; None: it is there already, under the batch's SHA-1."""


_decoder = msgspec.json.Decoder(Request)


def parse(payload: bytes, now: float, *, streamed: bool = False) -> Checked:
    """`now`: the store's clock. `streamed`: its ids come beside it."""
    try:
        request = _decoder.decode(payload)
    except msgspec.ValidationError as error:
        raise Unprocessable(f"fan-out request: {error}") from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise NotJson(f"a fan-out request is JSON; this is not: {error}") from error
    return check(request, now, digest=hashlib.sha256(payload).digest(), streamed=streamed)


def check(request: Request, now: float, *, digest: bytes = b"", streamed: bool = False) -> Checked:
    """Unprocessable: what is wrong with it, and which value that is."""
    check_request_id(request.request_id)
    if streamed and request.ids:
        raise Unprocessable("ids are given twice: in the request and beside it")
    ids = () if streamed else _ids(request.ids)
    data, sha1 = _data(request)
    options = request.campaign or CampaignOptions()
    if request.key is not None and not 0 < len(request.key.encode()) <= KEY_BYTES_MAX:
        raise Unprocessable(f"key: expected up to {KEY_BYTES_MAX} bytes, got {request.key[:100]!r}")
    if request.key is not None and "\0" in request.key:
        raise Unprocessable(f"key {request.key[:100]!r} contains NUL")
    batch = NewBatch(
        request.request_id,
        sha1,
        ids,
        request.priority,
        _expires(request.expires, now),
        request.resend,
        request.final,
        request.key,
        digest,
        options.number,
        _settings(options),
        first_state(options, request.resend, now),
    )
    return Checked(batch, data)


def check_request_id(request_id: str) -> str:
    if _REQUEST_ID.fullmatch(request_id) is None or len(request_id.encode()) > REQUEST_ID_BYTES_MAX:
        raise Unprocessable(f"request_id: expected task_<type>_<number>, got {request_id[:150]!r}")
    return request_id


def check_vin(vin: str) -> str:
    """One vehicle: a level of a topic."""
    if not vin:
        raise Unprocessable("an id is empty")
    if (wrong := _NOT_IN_VIN.search(vin)) is not None:
        raise Unprocessable(f"id {vin[:150]!r} contains {wrong[0]!r}")
    if len(vin) > VIN_BYTES_MAX or (not vin.isascii() and len(vin.encode("utf-8", "replace")) > VIN_BYTES_MAX):
        raise Unprocessable(f"id {vin[:40]!r}… has more than {VIN_BYTES_MAX} bytes")
    try:
        vin.encode()
    except UnicodeEncodeError as error:
        raise Unprocessable(f"id {vin[:150]!r} is not valid Unicode") from error
    return vin


def check_vins(vins: Iterable[str]) -> None:
    """All of them; as fast as it goes for those that are as they should be."""
    for vin in vins:
        if not vin or len(vin) > 64 or not vin.isalnum() or not vin.isascii():
            check_vin(vin)


def _ids(ids: Sequence[str]) -> list[str]:
    if not ids:
        raise Unprocessable("ids: expected at least one, got none")
    if len(ids) > IDS_MAX:
        raise Unprocessable(f"ids: {len(ids)} in one request; it takes {IDS_MAX}, and more as a stream")
    check_vins(ids)
    ordered = sorted(ids)
    for one, other in pairwise(ordered):
        if one == other:
            raise Unprocessable(f"id {one!r} is given twice")
    return ordered


def _data(request: Request) -> tuple[bytes | None, bytes]:
    if (request.data is None) == (request.data_sha1 is None):
        raise Unprocessable("give data or data_sha1, one of them")
    if request.data_sha1 is not None:
        return None, parse_sha1(request.data_sha1)
    assert request.data is not None
    if request.encoding == "base64":
        try:
            data = base64.b64decode(request.data, validate=True)
        except (binascii.Error, ValueError) as error:
            raise Unprocessable(f"data is not base64: {error}") from error
    else:
        data = request.data.encode("utf-8", "surrogatepass")
    return data, check_data(data)


def check_data(data: bytes) -> bytes:
    """Its SHA-1."""
    if len(data) > DATA_BYTES_MAX:
        raise Unprocessable(f"data has {len(data)} bytes; it may have {DATA_BYTES_MAX}")
    return hashlib.sha1(data, usedforsecurity=False).digest()


def parse_sha1(text: str) -> bytes:
    try:
        sha1 = bytes.fromhex(text)
    except ValueError:
        sha1 = b""
    if len(sha1) != 20 or len(text) != 40:
        raise Unprocessable(f"data_sha1: expected 40 hexadecimal digits, got {text[:100]!r}")
    return sha1


def _expires(given: float | str | None, now: float) -> float:
    """Seconds from now, or a time."""
    if given is None:
        return inf
    if isinstance(given, str):
        at = parse_time("expires", given)
    elif isfinite(given) and 0 < given <= EXPIRES_SECS_MAX:
        at = now + given
    else:
        raise Unprocessable(f"expires: expected seconds above 0, up to ten years, got {given}")
    if at <= now:
        raise Unprocessable(f"expires: {given!r} is over already")
    return at


def parse_time(what: str, text: str) -> float:
    try:
        at = datetime.fromisoformat(text)
    except ValueError as error:
        raise Unprocessable(f"{what}: expected a time like 2026-11-15T08:00:00Z, got {text[:100]!r}") from error
    if at.tzinfo is None:
        raise Unprocessable(f"{what}: {text!r} has no time zone; end it with Z for UTC")
    return at.timestamp()


def parse_daytime(text: str) -> int:
    """Seconds since midnight."""
    match = re.fullmatch(r"([01]\d|2[0-3]):([0-5]\d)|24:00", text)
    if match is None:
        raise Unprocessable(f"windows: expected a time of the day like 22:30, got {text[:100]!r}")
    hours, minutes = text.split(":")
    return int(hours) * 3600 + int(minutes) * 60


def _settings(options: CampaignOptions) -> bytes:
    """As it is compared with what other batches ask; nothing if nothing is asked."""
    asked = msgspec.structs.replace(options, number=None)
    return b"" if asked == CampaignOptions() else msgspec.json.encode(asked)


def options_of(campaign: Campaign) -> CampaignOptions:
    return msgspec.json.decode(campaign.settings, type=CampaignOptions) if campaign.settings else CampaignOptions()


def parse_waves(given: Sequence[object]) -> list[Wave]:
    try:
        waves = msgspec.convert(given, list[Wave])
    except msgspec.ValidationError as error:
        raise Unprocessable(f"waves: {error}") from error
    check_waves(waves)
    return waves


def check_waves(waves: Iterable[Wave]) -> None:
    for wave in waves:
        if (wave.percent is None) == (wave.vehicles is None):
            raise Unprocessable("waves: give percent or vehicles for each of them, one of the two")


def first_state(options: CampaignOptions, resend: str, now: float) -> Campaign:
    """What a campaign that begins with these options is like. RequestError if they cannot be kept."""
    start = parse_time("start_at", options.start_at) if options.start_at is not None else now
    if options.end_at is not None and parse_time("end_at", options.end_at) <= max(start, now):
        raise Unprocessable(f"end_at: {options.end_at!r} is over before it begins")
    for window in options.windows:
        if parse_daytime(window.begin) == parse_daytime(window.end):
            raise Unprocessable(f"windows: from {window.begin} to {window.end} is no time at all")
    check_waves(options.waves)
    # Whoever controls campaigns opens the ones that have to wait for something.
    held = bool(options.paused or start > now or options.windows or options.waves)
    return Campaign(
        id=0,
        request_id="",
        number=0,
        sha1=b"",
        state=State.PAUSED if options.paused else State.RUNNING,
        open=True,
        sending=not held,
        waved=bool(options.waves),
        rate_per_sec=options.rate_per_sec if options.ramp_secs is None else min(1.0, options.rate_per_sec or 1.0),
        bytes_per_sec=options.bytes_per_sec,
        in_flight_max=options.in_flight_max,
        awaits_result=options.result,
        replaces=resend == "replace",
        settings=_settings(options),
        reason="paused from the beginning" if options.paused else "",
    )
