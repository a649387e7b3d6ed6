"""Sending a fan-out from a program: to a node over HTTP, or straight into a store. `holdfast.fanout.send` is this.

Ids are taken as they come and never held as a whole; nothing of a request is visible before all of it is there.
"""

from __future__ import annotations

import hashlib
import http.client
import json
import secrets
import select
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import closing, suppress
from itertools import chain, islice
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import msgspec

from holdfast.errors import (
    Conflict,
    NodeUnavailable,
    RequestError,
    StoreError,
    UnknownCampaign,
    Unprocessable,
)
from holdfast.fanout import requests
from holdfast.fanout.nouns import DELIVERIES
from holdfast.fanout.table import PART_IDS_MAX, FanoutTable
from holdfast.store import StoreOptions, open_store, parse_url

LINES_AT_ONCE = 2_000
HTTP_SECS = 120.0
BLAME = {400: RequestError, 404: UnknownCampaign, 409: Conflict, 422: Unprocessable, 503: NodeUnavailable}


class Accepted(NamedTuple):
    """What became of a request: it is durable."""

    request_id: str
    number: int
    """Which use of the request id it belongs to."""
    campaign: int
    accepted: int
    """Ids that were taken; those that are targets of the campaign already are counted there as repeated."""
    began: bool
    """It has begun the campaign; else it has joined one that runs."""
    repeated: bool
    """It was sent before, under the same key: nothing was done, and this is the first answer."""


def send(
    url: str,
    ids: Iterable[str],
    request_id: str,
    data: bytes | str,
    *,
    token: str | None = None,
    expires: float | str | None = None,
    priority: int = 4,
    resend: str = "replace",
    key: str | None = None,
    final: bool = False,
    campaign: Mapping[str, Any] | None = None,
    progress: Callable[[int], None] | None = None,
) -> Accepted:
    """Send `data` to the vehicles `ids`, once each.

    `url` is a node (http://host:port, with `token` if it wants one) or a store (sqlite:///… or postgresql://…), whose
    nodes notice within seconds. `campaign` has what the first batch may ask of its campaign, as in docs/fanout.md. Give
    a `key`, and it can be sent again after an error without harm. `progress` is told how many ids are on their way.
    """
    payload = data.encode() if isinstance(data, str) else bytes(data)
    sha1 = requests.check_data(payload).hex()
    requests.check_request_id(request_id)
    asked: dict[str, Any] = {"request_id": request_id, "data_sha1": sha1, "priority": priority, "resend": resend}
    asked |= {"final": True} if final else {}
    asked |= {name: value for name, value in (("expires", expires), ("key", key)) if value is not None}
    asked |= {"campaign": dict(campaign)} if campaign else {}
    checked = _checked(ids, progress)
    if urlsplit(url).scheme in ("http", "https"):
        return _to_node(url, token, payload, asked, checked)
    return _to_store(url, payload, asked, checked)


def _checked(ids: Iterable[str], progress: Callable[[int], None] | None) -> Iterator[list[str]]:
    """Some at a time. A wrong one is found here, before anything has come of the request."""
    left, taken = iter(ids), 0
    while some := list(islice(left, LINES_AT_ONCE)):
        requests.check_vins(some)
        yield some
        taken += len(some)
        if progress is not None:
            progress(taken)


# -- over HTTP -------------------------------------------------------------------------------------------------


def _to_node(url: str, token: str | None, payload: bytes, asked: dict[str, Any], ids: Iterator[list[str]]) -> Accepted:
    first = next(ids, None)
    if first is None:
        raise Unprocessable("ids: expected at least one, got none")
    _request(url, token, "PUT", f"payloads/{asked['data_sha1']}", "application/octet-stream", [payload])
    body = chain([msgspec.json.encode(asked) + b"\n"], map(_lines, chain([first], ids)))
    answer = _request(url, token, "POST", "fanout", "application/x-ndjson", body)
    taken = {name: answer[name] for name in ("number", "campaign", "accepted", "began", "repeated")}
    return Accepted(asked["request_id"], **taken)


def _lines(vins: Iterable[str]) -> bytes:
    """As JSON strings where a line would not be the same otherwise."""
    return b"".join(
        (vin.encode() if vin.isalnum() and vin.isascii() else msgspec.json.encode(vin)) + b"\n" for vin in vins
    )


def _request(url: str, token: str | None, method: str, path: str, kind: str, body: Iterable[bytes]) -> Any:
    """The decoded answer. A node that refuses what it has seen so far says so before it has seen the rest."""
    parts = urlsplit(url)
    make = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
    connection = make(parts.hostname or "127.0.0.1", parts.port, timeout=HTTP_SECS)
    with closing(connection):
        try:
            connection.putrequest(method, f"{parts.path.rstrip('/')}/api/v1/{path}")
            connection.putheader("Content-Type", kind)
            connection.putheader("Transfer-Encoding", "chunked")
            if token:
                connection.putheader("Authorization", f"Bearer {token}")
            connection.endheaders()
            with suppress(BrokenPipeError, ConnectionResetError):  # it has answered, and reads no more
                _send_chunks(connection, body)
            answer = connection.getresponse()
            text = answer.read().decode(errors="replace")
        except (OSError, http.client.HTTPException) as error:
            raise NodeUnavailable(f"no node answers at {url}: {error or type(error).__name__}") from error
    try:
        found = json.loads(text)
    except ValueError:
        found = {"error": text[:500]}
    if answer.status >= 300:
        said = found.get("error", text[:500]) if isinstance(found, dict) else text[:500]
        raise BLAME.get(answer.status, RequestError)(said or f"{answer.status} {answer.reason}")
    return found


def _send_chunks(connection: http.client.HTTPConnection, body: Iterable[bytes]) -> None:
    for some in body:
        if select.select([connection.sock], [], [], 0)[0]:
            return  # it has answered already
        if some:
            connection.send(b"%x\r\n%b\r\n" % (len(some), some))
    connection.send(b"0\r\n\r\n")


# -- into a store ----------------------------------------------------------------------------------------------


def _to_store(url: str, payload: bytes, asked: dict[str, Any], ids: Iterator[list[str]]) -> Accepted:
    if parse_url(url).one_process:
        raise RequestError(f"store {url!r} lives in one process; send to the node's HTTP address instead")
    request = msgspec.json.encode(asked)
    with closing(open_store(url, StoreOptions(notifications=False))) as store:
        # What is superseded becomes a message of it; no node may have been here yet.
        store.log().create(DELIVERIES, 1, "topic")
        table = store.fanout()
        checked = requests.parse(request, table.now(), streamed=True)
        upload, digest = secrets.token_hex(12), hashlib.sha256()
        parts = _parts(ids, digest.update)
        first, second = next(parts, None), next(parts, None)
        if first is None:
            raise Unprocessable("ids: expected at least one, got none")
        table.put_payload(payload)
        batch = checked.batch
        if second is None:
            batch = batch._replace(ids=first)
        else:
            for part in chain([first, second], parts):
                table.stage(upload, part)
            batch = batch._replace(upload=upload)
        whole = hashlib.sha256(batch.digest + digest.digest()).digest()
        return _add(table, batch._replace(digest=whole), asked["request_id"])


def _parts(ids: Iterator[list[str]], seen: Callable[[bytes], None]) -> Iterator[list[str]]:
    """Sorted, without repeats."""
    waiting: list[str] = []
    for some in ids:
        seen("".join(f"{vin}\0" for vin in some).encode())
        waiting += some
        if len(waiting) >= PART_IDS_MAX:
            yield sorted(set(waiting[:PART_IDS_MAX]))
            waiting = waiting[PART_IDS_MAX:]
    if waiting:
        yield sorted(set(waiting))


def _add(table: FanoutTable, batch: Any, request_id: str) -> Accepted:
    (added,) = table.add([batch])
    if isinstance(added, RequestError | StoreError):
        raise added
    if isinstance(added, Exception):
        raise StoreError(f"the request was not stored: {added}") from added
    return Accepted(request_id, added.number, added.campaign, added.accepted, added.began, added.repeated)
