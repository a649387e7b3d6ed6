"""Fan-out over HTTP: requests, payloads, campaigns and vehicles.

POST /api/v1/fanout                     JSON: a whole request
                                        NDJSON: the request on the first line, a VIN on each line after it
                                        CSV or Arrow: VINs; the request beside them in ?request=
PUT  /api/v1/payloads/{sha1}            a payload, to be referred to as data_sha1
GET  /api/v1/fanout[/{request_id}[/{number}]]
POST /api/v1/fanout/{request_id}[/{number}]/pause|resume|cancel|retry|advance|edit
GET  /api/v1/fanout/{request_id}[/{number}]/deliveries
POST /api/v1/fanout/dry-run, /api/v1/fanout/collect
GET  /api/v1/vehicles/{vin}, /api/v1/why/vin/{vin}
POST /api/v1/vehicles/{vin}/retire

As everywhere over HTTP, the caller's role decides what it may do; the ACL is for topics.
"""

from __future__ import annotations

import csv
import hashlib
import secrets
from collections.abc import AsyncIterator, Sequence
from typing import Annotated, Any, Literal

import msgspec
import pyarrow as pa
from fastapi import APIRouter, Path, Query, Request, Response
from fastapi.responses import StreamingResponse
from pydantic import BaseModel, Field
from starlette.requests import ClientDisconnect

from holdfast.auth.identity import Identity
from holdfast.errors import RequestError, Unprocessable
from holdfast.fanout import control as fc
from holdfast.fanout import requests
from holdfast.fanout.nouns import End, State, UnderWay
from holdfast.fanout.table import PART_IDS_MAX, Added
from holdfast.runtime.node import Node

IDS_STREAMED_MAX = 20_000_000
LINE_BYTES_MAX = 1 << 20
PAGE = 10_000
NDJSON, CSV, ARROW = "application/x-ndjson", "text/csv", "application/vnd.apache.arrow.stream"
STREAMED = (NDJSON, CSV)
"""Kinds that are taken in bit by bit, however large they are."""


Number = Annotated[int, Path(ge=1, le=requests.INT_MAX)]
"""Of a campaign: which use of its request id it is."""


class Vins(BaseModel, extra="forbid"):
    """Only these vehicles; without them, all of the campaign's."""

    vins: list[str] | None = Field(default=None, max_length=100_000)


class EditBody(BaseModel, extra="forbid", allow_inf_nan=False):
    """What is given is changed; the rest stays."""

    rate_per_sec: float | None = Field(default=None, gt=0)
    bytes_per_sec: float | None = Field(default=None, gt=0)
    in_flight_max: int | None = Field(default=None, gt=0, le=requests.INT_MAX)
    end_at: str | None = None
    abort_failed_percent: float | None = Field(default=None, gt=0, le=100)
    waves: list[dict[str, Any]] | None = None
    """As many as it has: what each must reach, for how long it pauses, when it times out."""
    final: bool = False
    """No batch may join it from now on."""

    def event(self) -> fc.Edit:
        given = self.model_dump(exclude={"waves"})
        return fc.Edit(**given, waves=None if self.waves is None else requests.parse_waves(self.waves))


def fanout_router(node: Node, reader: Any, publisher: Any, admin: Any) -> APIRouter:
    router = APIRouter(prefix="/api/v1")

    @router.post("/fanout", status_code=202)
    async def send(request: Request, _: Identity = publisher) -> Response:
        """A batch of vehicles and what they are to get. Durable when it is answered."""
        kind = request.headers.get("content-type", "application/json").partition(";")[0].strip().lower()
        if kind in (NDJSON, CSV, ARROW):
            return _json(_added(await _streamed(node, request, kind)), 202)
        body = await request.body()
        return _json(_added(await node.fanout_intake.add(requests.parse(body, node.fanout.now))), 202)

    @router.post("/fanout/dry-run")
    async def dry_run(request: Request, _: Identity = reader) -> Response:
        """What a request would meet, without sending anything."""
        checked = requests.parse(await request.body(), node.fanout.now)
        return _json(await node.fanout_admin.dry_run(checked.batch.ids))

    @router.post("/fanout/collect")
    async def collect(_: Identity = admin) -> Response:
        """Remove what is old, now."""
        return _json(await node.fanout_admin.collect())

    @router.put("/payloads/{sha1}")
    async def put_payload(sha1: str, request: Request, _: Identity = publisher) -> Response:
        stored = await node.fanout_intake.put_payload(await request.body(), sha1)
        return _json({"data_sha1": stored.hex()}, 201)

    @router.get("/fanout")
    async def campaigns(
        _: Identity = reader,
        state: Annotated[list[State] | None, Query()] = None,
        before: Annotated[int, Query(ge=0, lt=1 << 63)] = 0,
        limit: Annotated[int, Query(ge=1, le=1_000)] = 100,
    ) -> Response:
        """The newest first; `before`: the id of the last one of the page before."""
        found = await node.fanout_admin.page(before, limit, state or ())
        return _json({"campaigns": found})

    @router.get("/fanout/{request_id}")
    async def newest(request_id: str, _: Identity = reader) -> Response:
        return _json(await node.fanout_admin.show(request_id))

    @router.get("/fanout/{request_id}/deliveries")
    async def deliveries_of_newest(
        request_id: str,
        _: Identity = reader,
        state: Annotated[list[End | UnderWay] | None, Query()] = None,
        reason: str | None = None,
        after: str = "",
        limit: Annotated[int, Query(ge=1, le=PAGE)] = 1_000,
        format: Literal["json", "ndjson"] = "json",
    ) -> Response:
        return await _deliveries(node, request_id, None, state, reason, after, limit, format)

    @router.get("/fanout/{request_id}/{number:int}")
    async def one(request_id: str, number: Number, _: Identity = reader) -> Response:
        return _json(await node.fanout_admin.show(request_id, number))

    @router.get("/fanout/{request_id}/{number:int}/deliveries")
    async def deliveries(
        request_id: str,
        number: Number,
        _: Identity = reader,
        state: Annotated[list[End | UnderWay] | None, Query()] = None,
        reason: str | None = None,
        after: str = "",
        limit: Annotated[int, Query(ge=1, le=PAGE)] = 1_000,
        format: Literal["json", "ndjson"] = "json",
    ) -> Response:
        return await _deliveries(node, request_id, number, state, reason, after, limit, format)

    def verb(name: str, order: Any) -> None:
        @router.post(f"/fanout/{{request_id}}/{name}", name=name)
        async def of_newest(request_id: str, wanted: Vins | None = None, _: Identity = admin) -> Response:
            return _json(await order(request_id, None, wanted.vins if wanted is not None else None))

        @router.post(f"/fanout/{{request_id}}/{{number:int}}/{name}", name=f"{name} one")
        async def of_one(request_id: str, number: Number, wanted: Vins | None = None, _: Identity = admin) -> Response:
            return _json(await order(request_id, number, wanted.vins if wanted is not None else None))

    def plain(event: fc.Event) -> Any:
        async def order(request_id: str, number: int | None, vins: Sequence[str] | None) -> dict[str, Any]:
            if vins is not None:
                raise RequestError("this is done to a whole campaign, not to some of its vehicles")
            return await node.fanout_admin.order(request_id, number, event)

        return order

    async def cancel(request_id: str, number: int | None, vins: Sequence[str] | None) -> dict[str, Any]:
        if vins is not None:
            return await node.fanout_admin.cancel_vins(request_id, number, vins)
        return await node.fanout_admin.order(request_id, number, fc.Cancel())

    verb("pause", plain(fc.Pause()))
    verb("resume", plain(fc.Resume()))
    verb("advance", plain(fc.Advance()))
    verb("cancel", cancel)
    verb("retry", lambda request_id, number, vins: node.fanout_admin.retry(request_id, number, vins))

    @router.post("/fanout/{request_id}/edit")
    async def edit_newest(request_id: str, wanted: EditBody, _: Identity = admin) -> Response:
        return _json(await node.fanout_admin.order(request_id, None, wanted.event()))

    @router.post("/fanout/{request_id}/{number:int}/edit")
    async def edit(request_id: str, number: Number, wanted: EditBody, _: Identity = admin) -> Response:
        return _json(await node.fanout_admin.order(request_id, number, wanted.event()))

    @router.get("/vehicles/{vin}")
    async def vehicle(vin: str, _: Identity = reader) -> Response:
        return _json(await node.fanout_admin.vehicle(vin))

    @router.post("/vehicles/{vin}/retire")
    async def retire(vin: str, _: Identity = admin) -> Response:
        """Everything that waits for it is cancelled, in every campaign."""
        return _json(await node.fanout_admin.retire(vin))

    @router.get("/why/vin/{vin}")
    async def why_vin(vin: str, _: Identity = reader) -> Response:
        """The one reason why it does not get its next delivery, and the command that would change it."""
        return _json(await node.fanout_admin.why(vin))

    return router


def _added(added: Added) -> dict[str, Any]:
    return {
        "number": added.number,
        "campaign": added.campaign,
        "accepted": added.accepted,
        "began": added.began,
        "repeated": added.repeated,
    }


async def _deliveries(
    node: Node,
    request_id: str,
    number: int | None,
    states: Sequence[End | UnderWay] | None,
    reason: str | None,
    after: str,
    limit: int,
    format: str,
) -> Response:
    ends: Sequence[End | UnderWay] = states or list(End)
    if format == "ndjson":
        await node.fanout_admin.find(request_id, number)  # what is wrong is said before the first line
        return StreamingResponse(_lines(node, request_id, number, ends, reason, after), media_type=NDJSON)
    rows = await node.fanout_admin.deliveries(request_id, number, ends, after, limit)
    found: dict[str, Any] = {"deliveries": [row for row in rows if reason in (None, row["reason"])]}
    if len(rows) == limit:
        found["next"] = rows[-1]["vin"]
    return _json(found)


async def _lines(
    node: Node, request_id: str, number: int | None, ends: Sequence[End | UnderWay], reason: str | None, after: str
) -> AsyncIterator[bytes]:
    while True:
        rows = await node.fanout_admin.deliveries(request_id, number, ends, after, 1_000)
        yield b"".join(msgspec.json.encode(row) + b"\n" for row in rows if reason in (None, row["reason"]))
        if len(rows) < 1_000:
            return
        after = rows[-1]["vin"]


# -- ids as a stream -------------------------------------------------------------------------------------------


async def _streamed(node: Node, request: Request, kind: str) -> Added:
    """All or nothing: parts are staged where nobody sees them, and become visible with the request."""
    node.fanout_intake.check_enabled()
    text = request.query_params.get("request")
    checked = requests.parse(text.encode(), node.fanout.now, streamed=True) if text is not None else None
    upload, taken, digest = secrets.token_hex(12), 0, hashlib.sha256()
    waiting: list[str] = []
    async for some in _ids_of(request, kind):
        if checked is None:
            if kind != NDJSON:
                raise RequestError("give the request beside the ids, in ?request=")
            checked = requests.parse(some.pop(0).encode(), node.fanout.now, streamed=True)
        vins = [_vin_of_line(line) for line in some] if kind == NDJSON else some
        requests.check_vins(vins)
        digest.update("".join(f"{vin}\0" for vin in vins).encode())
        waiting += vins
        taken += len(vins)
        if taken > IDS_STREAMED_MAX:
            raise RequestError(f"more than {IDS_STREAMED_MAX} ids in one request")
        while len(waiting) >= PART_IDS_MAX:
            part, waiting = waiting[:PART_IDS_MAX], waiting[PART_IDS_MAX:]
            await node.fanout.change(node.fanout.table.stage, upload, sorted(set(part)))
    if checked is None or not taken:
        raise Unprocessable("ids: expected at least one, got none")
    if waiting:
        await node.fanout.change(node.fanout.table.stage, upload, sorted(set(waiting)))
    # The same key means the same request: the ids are a part of it wherever they stand.
    whole = hashlib.sha256(checked.batch.digest + digest.digest()).digest()
    batch = checked.batch._replace(upload=upload, digest=whole)
    return await node.fanout_intake.add(checked._replace(batch=batch))


def _vin_of_line(line: str) -> str:
    """A JSON string, or the VIN as it is."""
    if line[0] not in '"{[':
        return line
    try:
        return msgspec.json.decode(line, type=str)
    except (msgspec.DecodeError, UnicodeEncodeError) as error:
        raise RequestError(f"id {line[:100]!r} is not a JSON string: {error}") from error


async def _ids_of(request: Request, kind: str) -> AsyncIterator[list[str]]:
    """Never an empty list."""
    if kind == ARROW:
        async for some in _arrow(request):
            if some:
                yield some
        return
    column = _CsvColumn() if kind == CSV else None
    rest = b""
    async for chunk in _chunks(request):
        data = rest + chunk
        end = data.rfind(b"\n") + 1
        rest = data[end:]
        if len(rest) > LINE_BYTES_MAX:
            raise RequestError(f"a line has more than {LINE_BYTES_MAX} bytes")
        if lines := _lines_of(data[:end]):
            yield lines if column is None else column.of(lines)
    if lines := _lines_of(rest):
        yield lines if column is None else column.of(lines)


async def _chunks(request: Request) -> AsyncIterator[bytes]:
    try:
        async for chunk in request.stream():
            yield chunk
    except ClientDisconnect as error:
        raise RequestError("the ids broke off") from error


def _lines_of(data: bytes) -> list[str]:
    try:
        text = data.decode()
    except UnicodeDecodeError as error:
        raise RequestError(f"ids are not UTF-8: {error.reason} at byte {error.start}") from error
    return [line for raw in text.split("\n") if (line := raw.strip())]


class _CsvColumn:
    """The column with the VINs: the one called `vin`, if the first line has names; else the first one."""

    def __init__(self) -> None:
        self._at: int | None = None

    def of(self, lines: Sequence[str]) -> list[str]:
        try:
            rows = list(csv.reader(lines, strict=True))
        except csv.Error as error:
            raise RequestError(f"the ids are not CSV: {error}") from error
        if self._at is None:
            names = [name.strip().lower() for name in rows[0]]
            self._at = names.index("vin") if "vin" in names else 0
            rows = rows[1:] if "vin" in names else rows
        return [row[self._at].strip() if len(row) > self._at else "" for row in rows]


async def _arrow(request: Request) -> AsyncIterator[list[str]]:
    """Record batches with a column `vin`, or their first one."""
    # An Arrow stream can be read only as a whole: 20 million VINs are some 400 MB, so it is bounded like a request.
    body = await request.body()
    try:
        reader = pa.ipc.open_stream(body)
        for batch in reader:
            name = "vin" if "vin" in batch.schema.names else batch.schema.names[0]
            yield batch.column(name).cast(pa.string()).to_pylist()
    except (pa.ArrowException, OSError, ValueError, IndexError) as error:
        raise RequestError(f"the ids are not an Arrow stream: {error}") from error


def _json(value: Any, status: int = 200) -> Response:
    return Response(msgspec.json.encode(value), status, media_type="application/json")
