"""What requests come to: which campaign each belongs to, and what is stored for it; decided once, for every store."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from itertools import islice
from math import inf
from typing import NamedTuple

import msgspec
import pyarrow as pa

from holdfast.errors import Conflict, RequestError, UnknownCampaign, UnknownPayload
from holdfast.fanout.nouns import Campaign, State, lane_of, place_of, seq_of
from holdfast.fanout.table import PART_IDS_MAX, Added, EndedRow, NewBatch
from holdfast.store.fanout_changes import MergedPart

VIN_BYTES_MAX = 128
NAME_BYTES_MAX = 1024
DIRECT_IDS_MAX = 64
"""A batch of so many VINs has its rows at once, unless others wait to be merged."""
RESEND = ("replace", "append", "ignore")


class BatchRow(NamedTuple):
    """What all deliveries of a batch have in common."""

    seq: int
    place: int
    campaign: int
    payload: int
    expires: float
    resend: str
    added_at: float


class PartRow(NamedTuple):
    """A part that becomes visible."""

    number: int
    seq: int
    campaign: int
    body: int | bytes
    """Where its VINs are stored already, or they themselves, packed."""
    size: int
    merged: int
    """As which of all that were merged; 0: it is not."""
    expires: float | None
    """When somebody has to look for what of it still waits; None: never, or that is done."""


class PreparedBatch(NamedTuple):
    """A batch that was found sound, and its parts."""

    batch: NewBatch
    parts: list[tuple[bytes, int]]
    """Packed VINs, and how many."""


class Known:
    """What a store has that concerns the batches. Planning takes it further."""

    def __init__(self, now: float) -> None:
        self.now = now
        self.payloads: dict[bytes, int] = {}
        self.campaigns: dict[int, Campaign] = {}
        """Of their request ids: those that are open, and those that are named by number."""
        self.numbers: dict[str, int] = {}
        """The last one given, by request id."""
        self.keys: dict[str, tuple[bytes, Added]] = {}
        self.staged: dict[str, list[tuple[int, int]]] = {}
        """By upload: where its parts are, and how many VINs each has."""
        self.unmerged: set[tuple[int, str]] = set()
        """Lanes and request ids of parts that are not merged yet."""
        self.seq = self.part = self.campaign = self.merged = 0
        """The last ones given before these batches."""


class Plan:
    """What a store has to write."""

    def __init__(self, known: Known):
        self.known = known
        self.answers: list[Added | Exception] = []
        self.begun: dict[int, Campaign] = {}
        self.changed: dict[int, Campaign] = {}
        """Campaigns that were there: `open`, `version` and `batch_at` may be new."""
        self.batches: list[BatchRow] = []
        self.parts: list[PartRow] = []
        self.keys: dict[str, tuple[bytes, Added]] = {}
        self.numbers: dict[str, int] = {}
        self.uploads: list[str] = []
        self.counts: dict[int, int] = {}
        """How many more wait, by campaign."""
        self.rows: list[tuple[str, int]] = []
        """VINs and part numbers that are to be merged at once,"""
        self.merged: dict[int, MergedPart] = {}
        """and their parts."""

    def campaign(self, id_: int) -> Campaign:
        return self.known.campaigns[id_]


def plan(prepared: Sequence[PreparedBatch | RequestError], known: Known) -> Plan:
    """In order: what the one has begun, the next one finds."""
    made = Plan(known)
    for one in prepared:
        if isinstance(one, RequestError):
            made.answers.append(one)
            continue
        try:
            made.answers.append(_add(one, made))
        except RequestError as refusal:
            made.answers.append(refusal)
    return made


def _add(prepared: PreparedBatch, made: Plan) -> Added:
    batch, known = prepared.batch, made.known
    if batch.key is not None and batch.key in known.keys:
        digest, answer = known.keys[batch.key]
        if digest != batch.digest:
            raise Conflict(f"key {batch.key!r} was used for another request")
        return answer._replace(repeated=True)
    payload = known.payloads.get(batch.sha1)
    if payload is None:
        raise UnknownPayload(f"no payload is stored under {batch.sha1.hex()}")
    bodies: Sequence[tuple[int | bytes, int]] = prepared.parts
    if batch.upload is not None:
        bodies = known.staged.get(batch.upload, ())
        if not bodies:
            raise RequestError(f"nothing was uploaded as {batch.upload!r}")
    campaign, began = _campaign_of(batch, made)
    if batch.upload is not None:  # not before it is certain: what is refused stays staged, to be collected
        del known.staged[batch.upload]
        made.uploads.append(batch.upload)
    known.seq += 1
    row = BatchRow(
        known.seq,
        place_of(batch.priority, known.seq),
        campaign.id,
        payload,
        batch.expires,
        batch.resend,
        known.now,
    )
    made.batches.append(row)
    count = sum(size for _, size in bodies)
    # What is behind others in its lane, or is about the same request, waits for its turn to be merged.
    lane = lane_of(row.place)
    behind = any(lane == other or batch.request_id == name for other, name in known.unmerged)
    direct = batch.upload is None and count <= DIRECT_IDS_MAX and not behind
    expires = None if batch.expires == inf else batch.expires
    for body, size in bodies:
        known.part += 1
        known.merged += direct
        merged = known.merged if direct else 0
        made.parts.append(PartRow(known.part, row.seq, campaign.id, body, size, merged, expires))
    if direct:
        made.rows.extend((vin, known.part) for vin in batch.ids)
        made.merged[known.part] = MergedPart(
            row.place, campaign.id, campaign.request_id, batch.resend, campaign.waved, campaign.state
        )
    else:
        known.unmerged.add((lane, batch.request_id))
    made.counts[campaign.id] = made.counts.get(campaign.id, 0) + count
    answer = Added(campaign.id, campaign.number, row.seq, count, began, direct)
    if batch.key is not None:
        known.keys[batch.key] = made.keys[batch.key] = (batch.digest, answer)
    return answer


def _campaign_of(batch: NewBatch, made: Plan) -> tuple[Campaign, bool]:
    known = made.known
    of_it = [c for c in known.campaigns.values() if c.request_id == batch.request_id]
    found: Campaign | None
    if batch.number is not None:
        found = next((c for c in of_it if c.number == batch.number), None)
        if found is None:
            raise UnknownCampaign(f"there is no campaign {batch.number} of {batch.request_id}")
        if not found.open:
            raise Conflict(f"campaign {found.number} of {batch.request_id} takes no more batches: it is {found.state}")
    else:
        joined = [c for c in of_it if c.open and c.sha1 == batch.sha1]
        found = max(joined, key=lambda c: c.number, default=None)
    if found is None:
        return _begin(batch, made, of_it), True
    if batch.settings and batch.settings != found.settings:
        raise Conflict(f"campaign {found.number} of {batch.request_id} has other settings than this batch asks for")
    found = msgspec.structs.replace(
        found,
        batch_at=known.now,
        open=not batch.final,
        version=found.version + batch.final,
    )
    _keep(found, made)
    return found, False


def _begin(batch: NewBatch, made: Plan, earlier: Sequence[Campaign]) -> Campaign:
    known = made.known
    if batch.resend != "append":
        for one in earlier:
            if one.open:
                _keep(msgspec.structs.replace(one, open=False, version=one.version + 1), made)
    known.campaign += 1
    number = known.numbers.get(batch.request_id, 0) + 1
    known.numbers[batch.request_id] = made.numbers[batch.request_id] = number
    like = batch.begin or Campaign(
        id=0,
        request_id="",
        number=0,
        sha1=b"",
        state=State.RUNNING,
        open=True,
        sending=True,
        replaces=batch.resend == "replace",
        settings=batch.settings,
    )
    begun = msgspec.structs.replace(
        like,
        id=known.campaign,
        request_id=batch.request_id,
        number=number,
        sha1=batch.sha1,
        open=like.open and not batch.final,
        created_at=known.now,
        batch_at=known.now,
    )
    made.begun[begun.id] = known.campaigns[begun.id] = begun
    return begun


def _keep(campaign: Campaign, made: Plan) -> None:
    made.known.campaigns[campaign.id] = campaign
    (made.begun if campaign.id in made.begun else made.changed)[campaign.id] = campaign


# -- what is asked for has to make sense -----------------------------------------------------------------


def prepare(batch: NewBatch) -> PreparedBatch | RequestError:
    try:
        check_name("request id", batch.request_id)
        if batch.key is not None:
            check_name("key", batch.key)
        if batch.upload is None:
            check_ids(batch.ids)
        elif batch.ids:
            raise RequestError("a batch has ids or an upload, not both")
        if not 0 <= batch.priority <= 9:
            raise RequestError(f"expected a priority from 0 to 9, got {batch.priority}")
        if batch.resend not in RESEND:
            raise RequestError(f"expected resend to be one of {', '.join(RESEND)}, got {batch.resend!r}")
    except RequestError as refusal:
        return refusal
    ids = batch.ids
    chunks = [ids[at : at + PART_IDS_MAX] for at in range(0, len(ids), PART_IDS_MAX)]
    return PreparedBatch(batch, [(pack_ids(chunk), len(chunk)) for chunk in chunks])


def check_name(what: str, text: str) -> None:
    size = len(_encoded(what, text))
    if not size or "\0" in text or size > NAME_BYTES_MAX:
        raise RequestError(f"{what} {text[:40]!r} has {size} bytes; expected 1 to {NAME_BYTES_MAX}, and no NUL")


def check_ids(ids: Sequence[str]) -> None:
    """Sorted, without repeats, and each fit to be a level of a topic."""
    if not ids:
        raise RequestError("there are no ids")
    if not all(map(operator.lt, ids, islice(ids, 1, None))):
        raise RequestError("the ids are not sorted, or some are there twice")
    joined = _encoded("ids", "\0".join(ids))
    odd = joined.count(b"\0") != len(ids) - 1 or any(mark in joined for mark in (b"/", b"+", b"#"))
    if odd or not ids[0] or (max(map(len, ids)) * 4 > VIN_BYTES_MAX and max(map(_size, ids)) > VIN_BYTES_MAX):
        vin = next(v for v in ids if not v or _size(v) > VIN_BYTES_MAX or any(mark in v for mark in "\0/+#"))
        raise RequestError(f"id {vin[:VIN_BYTES_MAX]!r} is not 1 to {VIN_BYTES_MAX} bytes without / + # and NUL")


def check_part(upload: str, ids: Sequence[str]) -> None:
    check_name("upload", upload)
    check_ids(ids)
    if len(ids) > PART_IDS_MAX:
        raise RequestError(f"a part has at most {PART_IDS_MAX} ids, got {len(ids)}")


def check_retry(campaign: Campaign | None, id_: int, vins: Sequence[str]) -> Campaign:
    if campaign is None:
        raise UnknownCampaign(f"there is no campaign with the id {id_}")
    if campaign.state in (State.CANCELLED, State.CLOSED):
        raise Conflict(f"campaign {campaign.number} of {campaign.request_id} is {campaign.state}: nothing is retried")
    if len(vins) > PART_IDS_MAX:
        raise RequestError(f"expected at most {PART_IDS_MAX} VINs, got {len(vins)}")
    return campaign


def retried(rows: Sequence[EndedRow], payload_of: Callable[[int], int]) -> list[tuple[int, int, list[EndedRow]]]:
    """By payload and priority: what becomes one batch each."""
    groups: dict[tuple[int, int], list[EndedRow]] = {}
    for row in rows:
        groups.setdefault((payload_of(seq_of(row.place)), 9 - (row.place >> 56)), []).append(row)
    return [(*key, sorted(found)) for key, found in sorted(groups.items())]


def _encoded(what: str, text: str) -> bytes:
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        raise RequestError(f"{what} with {text[error.start]!r} cannot be written as Unicode") from None


def _size(text: str) -> int:
    return len(text.encode())


# -- VINs of a part --------------------------------------------------------------------------------------

_SIZE_BYTES = 4


def pack_ids(ids: Sequence[str]) -> bytes:
    """Compressed; whoever unpacks has to know how long it was."""
    data = "\0".join(ids).encode()
    packed: bytes = _codec().compress(data, asbytes=True)
    return len(data).to_bytes(_SIZE_BYTES) + packed


def unpack_ids(packed: bytes) -> list[str]:
    size = int.from_bytes(packed[:_SIZE_BYTES])
    data = _codec().decompress(packed[_SIZE_BYTES:], size, asbytes=True)
    return str(data, "utf-8").split("\0")


def _codec() -> pa.Codec:
    """One for each call: several threads pack and unpack. A million VINs take a quarter of a second."""
    return pa.Codec("zstd", compression_level=9)
