"""Group messages as bytes: what travels between nodes, and over `$holdfast/lease/<group>/...`.

JSON, `[kind, kind of request, fields]`, so that a client in any language can take part. Anything that is not
exactly a message is a RequestError that says what was wrong with it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import get_args

import msgspec

from holdfast.errors import RequestError
from holdfast.groups.protocol import messages
from holdfast.groups.protocol.messages import Ask, GroupMessage, Request
from holdfast.groups.protocol.nouns import GroupId
from holdfast.machine import Address

_KINDS: dict[str, type] = {kind.__name__: kind for kind in get_args(messages.GroupMessage)}
_REQUESTS: dict[str, type] = {kind.__name__: kind for kind in get_args(messages.Request)}


@dataclass(frozen=True, slots=True)
class _AskFields:
    """An `Ask` whose request is still to be read."""

    request: str
    reply_to: Address
    group: GroupId
    what: msgspec.Raw
    asked_at: float
    good_for_seconds: float


def encode(message: GroupMessage) -> bytes:
    kind = type(message.what).__name__ if isinstance(message, Ask) else ""
    return msgspec.json.encode((type(message).__name__, kind, message))


def decode(data: bytes) -> GroupMessage:
    """The inverse of `encode`."""
    try:
        name, kind, fields = msgspec.json.decode(data, type=tuple[str, str, msgspec.Raw])
        if name == "Ask":
            ask = msgspec.json.decode(fields, type=_AskFields)
            what: Request = msgspec.json.decode(ask.what, type=_REQUESTS[kind])
            return Ask(ask.request, ask.reply_to, ask.group, what, ask.asked_at, ask.good_for_seconds)
        message: GroupMessage = msgspec.json.decode(fields, type=_KINDS[name])
    except KeyError as error:
        raise RequestError(f"{error} is no message between members and leaders") from error
    except msgspec.MsgspecError as error:
        raise RequestError(f"group message {data[:80]!r} cannot be read: {error}") from error
    return message
