"""The HTTP API of a node, under /api/v1, with health and metrics beside it."""

from __future__ import annotations

import base64
import binascii
import dataclasses
from datetime import UTC, datetime
from typing import Annotated, Any, Literal

import msgspec
from fastapi import Depends, FastAPI, Query, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, PlainTextResponse
from prometheus_client import generate_latest
from pydantic import BaseModel, Field

from holdfast import ops
from holdfast.auth.bans import REASON_CHARS_MAX, SECS_MAX, Ban
from holdfast.auth.identity import Identity, Refusal, is_loopback
from holdfast.errors import (
    Conflict,
    HoldfastError,
    PeerError,
    RequestError,
    StoreError,
    UnknownBan,
    UnknownCampaign,
    UnknownSession,
    UnknownStream,
    Unprocessable,
)
from holdfast.groups.protocol import messages as messages_of_groups
from holdfast.groups.protocol.nouns import GroupId, Key, Policy
from holdfast.groups.shares import check_group_name
from holdfast.model import LOG, At, Start, Stream, now_micros, parse_start
from holdfast.mqtt.properties import decode_publish
from holdfast.mqtt.wire import topic_name
from holdfast.runtime.group_store import GroupOptions
from holdfast.runtime.node import Node
from holdfast.runtime.node_lease import NodeRecord
from holdfast.sessions.session import Session
from holdfast.sessions.stored import filters_of, restore
from holdfast.sessions.table import SessionRow, check_client_ids
from holdfast.topics import check_filter, check_topic
from holdfast.web.fanout import STREAMED, fanout_router

SESSIONS_PAGE = 10_000


class PublishBody(BaseModel):
    """One message to publish."""

    topic: str
    payload: str | None = None
    payload_base64: str | None = None
    qos: int = Field(default=1, ge=0, le=2)
    retain: bool = False


class NewGroup(BaseModel):
    """A group to declare."""

    name: str
    filter: str
    start: str = "latest"
    order: Literal["strict", "parallel"] = "strict"
    key: Key = "publisher"
    ack_timeout_seconds: float | None = Field(default=None, gt=0)
    attempts_max: int | None = Field(default=None, ge=1)
    idle_seconds_max: float | None = Field(default=None, gt=0)


class SeekTo(BaseModel):
    """Where a group is to go on: beginning, latest, a time, offset:N, or offsets by stream."""

    to: str | dict[str, int]

    def start(self) -> Start:
        if isinstance(self.to, str):
            return parse_start(self.to)
        return At({Stream.parse(name): offset for name, offset in self.to.items()})


class PauseBody(BaseModel):
    """Stop lending, or go on."""

    paused: bool = True


class DrainBody(BaseModel):
    """Where clients are told to go, how many a second are sent away, and whether the node then stops."""

    to: str = Field(default="", max_length=1000)
    clients_per_sec: float | None = Field(default=None, gt=0, le=1_000_000)
    stop: bool = False


class BanBody(BaseModel):
    """Why, for operators to read, and for how long; without `secs` it is for good."""

    reason: str = Field(default="", max_length=REASON_CHARS_MAX)
    secs: float | None = Field(default=None, gt=0, le=SECS_MAX, strict=True)


class TooLarge(HoldfastError):
    """More than a request may bring."""


class NotAllowed(HoldfastError):
    """Who asks may not do that."""


def make_app(node: Node) -> FastAPI:
    app = FastAPI(title="Holdfast", version="0.1.0", docs_url="/api/docs", openapi_url="/api/openapi.json")

    # Base64 and JSON make a payload larger; more than that no request needs.
    app.add_middleware(BodyLimit, bytes_max=3 * node.settings.limits.packet_bytes_max + 65_536)

    @app.exception_handler(RequestValidationError)
    async def invalid(_: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, RequestValidationError)
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        return JSONResponse({"error": f"{where}: {first['msg']}"}, 422)

    @app.exception_handler(HoldfastError)
    async def explain(_: Request, error: Exception) -> JSONResponse:
        status = 500
        match error:
            case NotAllowed():
                status = 403
            case TooLarge():
                status = 413
            case UnknownStream() | UnknownSession() | UnknownBan() | UnknownCampaign():
                status = 404
            case Conflict():
                status = 409
            case Unprocessable():
                status = 422
            case RequestError():
                status = 400
            case StoreError():
                status = 503
        return JSONResponse({"error": str(error)}, status)

    def role(wanted: str) -> Any:
        def check(request: Request) -> Identity:
            local = request.client is not None and is_loopback(request.client.host)
            found = node.auth.check_http(request.headers.get("authorization"), peer_is_loopback=local)
            if isinstance(found, Refusal):
                raise NotAllowed(found.message)
            if wanted not in found.roles and "admin" not in found.roles:
                raise NotAllowed(f"this takes the role {wanted}")
            return found

        return Depends(check)

    reader, publisher, admin = role("reader"), role("publisher"), role("admin")

    @app.get("/healthz")
    async def healthz() -> PlainTextResponse:
        return PlainTextResponse("ok\n")

    @app.get("/readyz")
    async def readyz() -> PlainTextResponse:
        if node.problem is None:
            return PlainTextResponse("ready\n")
        return PlainTextResponse(f"not ready: {node.problem}\n", 503)

    @app.get("/metrics")
    async def metrics(_: Identity = reader) -> Response:
        return Response(generate_latest(node.metrics.registry), media_type="text/plain; version=0.0.4")

    @app.post("/api/v1/publish")
    async def publish(message: PublishBody, who: Identity = publisher) -> JSONResponse:
        topic = _topic(message.topic)
        if topic.startswith("$"):
            raise RequestError(f"topic {topic!r} begins with '$'; those are the node's own")
        if (message.payload is None) == (message.payload_base64 is None):
            raise RequestError("give payload or payload_base64, one of them")
        if message.payload_base64 is not None:
            try:
                payload = base64.b64decode(message.payload_base64, validate=True)
            except binascii.Error as error:
                raise RequestError(f"payload_base64 is not base64: {error}") from error
        else:
            payload = _utf8(message.payload or "")
        if len(payload) > node.settings.limits.packet_bytes_max:
            raise RequestError(
                f"a payload of {len(payload)} bytes; limits.packet_bytes_max is {node.settings.limits.packet_bytes_max}"
            )
        if not await node.publish(who.user or "http", topic, payload, message.qos, message.retain):
            return JSONResponse({"error": f"not stored: {node.problem}"}, 503)
        return JSONResponse({"durable": True})

    @app.get("/api/v1/messages")
    def messages(
        _: Identity = reader,
        filter: Annotated[str, Query(description="Topic filter")] = "#",
        start: Annotated[str, Query(description="beginning, latest, offset:N or a time")] = "beginning",
        limit: Annotated[int, Query(ge=1, le=10_000)] = 100,
    ) -> Response:
        found = ops.messages(node.log, LOG, filter, parse_start(start), limit)
        return _json({"messages": [_message(row) for row in found]})

    @app.get("/api/v1/groups")
    async def groups(_: Identity = reader) -> Response:
        return _json({"groups": [ops.group_row(record) for record in await node.group_admin.groups()]})

    @app.post("/api/v1/groups")
    async def create_group(wanted: NewGroup, _: Identity = admin) -> Response:
        group = GroupId(check_group_name(wanted.name), check_filter(wanted.filter))
        policy = Policy(wanted.ack_timeout_seconds, wanted.attempts_max)
        options = GroupOptions(wanted.order, wanted.key, policy, wanted.idle_seconds_max)
        record, new = await node.group_admin.create(group, parse_start(wanted.start), options)
        return _json(ops.group_row(record), 201 if new else 200)

    @app.get("/api/v1/groups/{group:path}")
    async def group_whole(group: str, _: Identity = reader) -> Response:
        view = await node.group_admin.describe(GroupId.parse(group))
        heads = await node.group_admin.heads_for(view)
        skipped = [dataclasses.asdict(gap) for gap in await node.group_admin.skipped(view.group)]
        return _json({**ops.group_whole(view, heads, now_micros()), "skipped": skipped})

    @app.delete("/api/v1/groups/{group:path}")
    async def delete_group(group: str, _: Identity = admin) -> Response:
        await node.group_admin.ask(GroupId.parse(group), messages_of_groups.DeleteGroup())
        return _json({"deleted": group})

    @app.post("/api/v1/groups/{group:path}/seek")
    async def seek_group(group: str, wanted: SeekTo, _: Identity = admin) -> Response:
        await node.group_admin.seek(GroupId.parse(group), wanted.start())
        return _json({"group": group, "to": wanted.to})

    @app.post("/api/v1/groups/{group:path}/pause")
    async def pause_group(group: str, wanted: PauseBody, _: Identity = admin) -> Response:
        await node.group_admin.ask(GroupId.parse(group), messages_of_groups.SetPaused(wanted.paused))
        return _json({"group": group, "paused": wanted.paused})

    @app.get("/api/v1/sessions")
    async def sessions(
        after: str = "", limit: int = Query(default=SESSIONS_PAGE, ge=1, le=SESSIONS_PAGE), _: Identity = reader
    ) -> Response:
        rows = await node.rows.ask(node.rows.table.page, after, limit)
        found: dict[str, Any] = {"sessions": [_session(row) for row in rows]}
        if len(rows) == limit:
            found["next"] = rows[-1].client_id
        return _json(found)

    @app.get("/api/v1/sessions/{client_id:path}")
    async def session(client_id: str, _: Identity = reader) -> Response:
        rows = await node.rows.ask(node.rows.table.read, [client_id])
        row = rows.get(client_id)
        if row is None or row.dead:
            raise UnknownSession(f"there is no session {client_id!r}")
        # Of a client that is connected here more is known than what is stored.
        return _json(_session_whole(node, row, node.sessions.session(client_id) or restore(row, "", {})))

    @app.post("/api/v1/sessions/{client_id:path}/disconnect")
    async def disconnect(client_id: str, _: Identity = admin) -> Response:
        """On whichever node it is connected."""
        return _json({"client_id": client_id, "disconnected": await node.sessions.disconnect(_client_id(client_id))})

    @app.delete("/api/v1/sessions/{client_id:path}")
    async def end_session(client_id: str, _: Identity = admin) -> Response:
        """Disconnects its client, on whichever node that is, and forgets everything about it."""
        await node.sessions.end(_client_id(client_id))
        return _json({"ended": client_id})

    @app.get("/api/v1/bans")
    async def bans(_: Identity = reader) -> Response:
        """Those in force."""
        return _json({"bans": [_ban(ban) for ban in await node.bans.all()]})

    @app.put("/api/v1/bans/{kind}/{name:path}")
    async def add_ban(kind: str, name: str, wanted: BanBody, _: Identity = admin) -> Response:
        """On every node: a client id, a user or an address (or network) may not connect; who is connected, goes."""
        return _json(_ban(await node.bans.add(kind, name, wanted.reason, wanted.secs)))

    @app.delete("/api/v1/bans/{kind}/{name:path}")
    async def lift_ban(kind: str, name: str, _: Identity = admin) -> Response:
        await node.bans.lift(kind, name)
        return _json({"lifted": {"kind": kind, "name": name}})

    @app.get("/api/v1/nodes")
    async def nodes(_: Identity = reader) -> Response:
        return _json({"nodes": [_node(node, record) for record in await node.members()]})

    @app.post("/api/v1/nodes/drain")
    async def begin_drain(wanted: DrainBody, _: Identity = admin) -> Response:
        node.begin_drain(_utf8(wanted.to).decode(), wanted.clients_per_sec, wanted.stop)
        return _json(_drain(node), 202)

    @app.get("/api/v1/nodes/drain")
    async def drain(_: Identity = reader) -> Response:
        return _json(_drain(node))

    app.include_router(fanout_router(node, reader, publisher, admin))
    return app


class BodyLimit:
    """Refuses what is larger than any request needs to be, before it is read."""

    def __init__(self, app: Any, bytes_max: int):
        self._app, self._bytes_max = app, bytes_max

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http" or _is_streamed(scope):
            await self._app(scope, receive, send)
            return
        taken = 0

        async def counted() -> Any:
            nonlocal taken
            message = await receive()
            taken += len(message.get("body", b""))
            if taken > self._bytes_max:
                raise TooLarge(f"the body is larger than {self._bytes_max} bytes")
            return message

        size = dict(scope["headers"]).get(b"content-length", b"0")
        if size.isdigit() and int(size[:18]) > self._bytes_max:
            await JSONResponse({"error": f"the body is larger than {self._bytes_max} bytes"}, 413)(scope, receive, send)
            return
        await self._app(scope, counted, send)


def _is_streamed(scope: Any) -> bool:
    """Ids of a fan-out, which are stored as they come and never held."""
    kind = dict(scope["headers"]).get(b"content-type", b"").partition(b";")[0].strip().lower()
    return scope["path"] == "/api/v1/fanout" and kind.decode("latin-1") in STREAMED


def _topic(text: str) -> str:
    """As strict as MQTT is with it."""
    check_topic(text)
    try:
        return topic_name(text.encode())
    except PeerError as error:
        raise RequestError(str(error)) from error


def _utf8(text: str) -> bytes:
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        raise RequestError(f"payload is not valid Unicode: {error.reason}; use payload_base64") from error


def _client_id(text: str) -> str:
    check_client_ids([text])
    return text


def _node(node: Node, record: NodeRecord) -> dict[str, Any]:
    return {
        "node": record.name,
        "mqtt": record.mqtt,
        "http": record.http,
        "started_at": datetime.fromtimestamp(record.started_at, UTC).isoformat(timespec="seconds"),
        "draining": record.draining,
        "answers": record.lease == node.sessions.node.lease,
    }


def _ban(ban: Ban) -> dict[str, Any]:
    return {
        "kind": ban.kind,
        "name": ban.name,
        "reason": ban.reason,
        "until": None if ban.until is None else _time(ban.until),
        "made_at": _time(ban.made_at),
    }


def _time(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="milliseconds")


def _drain(node: Node) -> dict[str, Any]:
    state = node.drain.state.name.lower().replace("_", " ")
    return {"node": node.node_id, "state": state, "clients": node.drain.clients}


def _session(row: SessionRow) -> dict[str, Any]:
    return {
        "client_id": row.client_id,
        "connected": row.owner is not None,
        "node": row.owner,
        "expiry_seconds": row.expiry_secs,
        "subscriptions": len(filters_of(row.subscriptions)),
    }


def _session_whole(node: Node, row: SessionRow, session: Session) -> dict[str, Any]:
    heads = node.delivery.heads
    cursors = session.cursors(heads, heads)
    subscriptions = []
    for subscription in session.subscriptions:
        mine = {stream: cursor for (name, stream), cursor in cursors.items() if name == subscription.filter}
        subscriptions.append(
            {
                "filter": subscription.filter,
                "qos": subscription.qos,
                "cursors": {
                    # A stream that is done for good is done to its end, and to no further.
                    str(stream): {"offset": min(c.offset, heads[stream] - 1), "acked": c.acked, "epoch": c.epoch}
                    for stream, c in mine.items()
                },
                "lag": sum(c.unacked_count(heads[stream]) for stream, c in mine.items()),
            }
        )
    return {
        **_session(row),
        "subscriptions": subscriptions,
        "in_flight": len(session.window),
        "skipped": [dataclasses.asdict(skip) for skip in session.positions.gaps],
    }


def _message(row: ops.MessageRow) -> dict[str, Any]:
    found: dict[str, Any] = {
        "stream": row.stream,
        "offset": row.offset,
        "time": row.time,
        "topic": row.topic,
        "publisher": row.publisher,
        "qos": row.qos,
        "retain": row.retain,
    }
    try:
        found["payload"] = row.payload.decode()
    except UnicodeDecodeError:
        found["payload_base64"] = base64.b64encode(row.payload).decode()
    if row.properties:
        found["properties"] = decode_publish(row.properties)
    return found


def _json(value: Any, status: int = 200) -> Response:
    return Response(msgspec.json.encode(value), status, media_type="application/json")
