"""MQTT 5 properties: which packet may carry which, what they may say, and which of a message's are passed on.

Properties of messages stay in wire form from the publisher through the log to the subscriber; everything
else becomes a plain dict. What is cut short is malformed even where it would not be allowed either: a packet
is first read to its end and then judged, so that the peer is told its first fault.
"""

from __future__ import annotations

import base64
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any, NamedTuple, cast

from holdfast.errors import PeerError, RequestError
from holdfast.mqtt.packets import (
    AUTH,
    CONNACK,
    CONNECT,
    DELIVERY,
    DISCONNECT,
    NAMES,
    PUBACK,
    PUBCOMP,
    PUBLISH,
    PUBREC,
    PUBREL,
    SUBACK,
    SUBSCRIBE,
    UNSUBACK,
    WILL,
    Properties,
)
from holdfast.mqtt.reasons import Reason
from holdfast.mqtt.wire import malformed, show, text, to_binary, to_text, to_varint, topic_name, varint

SIZE_MAX_CACHED = 64
"""Properties up to this size are remembered: publishers repeat content types, not correlation data."""

_ONE, _TWO, _FOUR, _VARINT, _TEXT, _BINARY, _PAIR = range(7)
_MESSAGE = (PUBLISH, DELIVERY, WILL)
_EVERY = (*range(CONNECT, AUTH + 1), WILL, DELIVERY)
_REASONED = (CONNACK, PUBACK, PUBREC, PUBREL, PUBCOMP, SUBACK, UNSUBACK, DISCONNECT, AUTH)


class _Kind(NamedTuple):
    name: str
    form: int
    allowed: frozenset[int]
    repeats: frozenset[int] = frozenset()
    low: int = 0
    high: int = 0xFFFFFFFF
    fault: int = Reason.PROTOCOL_ERROR
    """What a number out of range is."""
    flag: bool = False


def _kind(name: str, form: int, *allowed: int, **rest: Any) -> _Kind:
    return _Kind(name, form, frozenset(allowed), **rest)


_FLAG: dict[str, Any] = {"high": 1, "flag": True}
_KINDS: dict[int, _Kind] = {
    0x01: _kind("payload_format", _ONE, *_MESSAGE, high=1),
    0x02: _kind("message_expiry", _FOUR, *_MESSAGE),
    0x03: _kind("content_type", _TEXT, *_MESSAGE),
    0x08: _kind("response_topic", _TEXT, *_MESSAGE),
    0x09: _kind("correlation_data", _BINARY, *_MESSAGE),
    # A client should not send it with a PUBLISH; some pass on what they received, and one is harmless.
    0x0B: _kind(
        *("subscription_identifiers", _VARINT, PUBLISH, DELIVERY, SUBSCRIBE),
        repeats=frozenset((DELIVERY,)),
        low=1,
    ),
    0x11: _kind("session_expiry", _FOUR, CONNECT, CONNACK, DISCONNECT),
    0x12: _kind("assigned_client_id", _TEXT, CONNACK),
    0x13: _kind("server_keep_alive", _TWO, CONNACK),
    0x15: _kind("authentication_method", _TEXT, CONNECT, CONNACK, AUTH),
    0x16: _kind("authentication_data", _BINARY, CONNECT, CONNACK, AUTH),
    0x17: _kind("request_problem_information", _ONE, CONNECT, **_FLAG),
    0x18: _kind("will_delay", _FOUR, WILL),
    0x19: _kind("request_response_information", _ONE, CONNECT, **_FLAG),
    0x1A: _kind("response_information", _TEXT, CONNACK),
    0x1C: _kind("server_reference", _TEXT, CONNACK, DISCONNECT),
    0x1F: _kind("reason_string", _TEXT, *_REASONED),
    0x21: _kind("receive_maximum", _TWO, CONNECT, CONNACK, low=1),
    0x22: _kind("topic_alias_maximum", _TWO, CONNECT, CONNACK),
    0x23: _kind("topic_alias", _TWO, PUBLISH, DELIVERY, low=1, fault=Reason.TOPIC_ALIAS_INVALID),
    0x24: _kind("maximum_qos", _ONE, CONNACK, high=1),
    0x25: _kind("retain_available", _ONE, CONNACK, **_FLAG),
    0x26: _kind("user_properties", _PAIR, *_EVERY, repeats=frozenset(_EVERY)),
    0x27: _kind("maximum_packet_size", _FOUR, CONNECT, CONNACK, low=1),
    0x28: _kind("wildcard_subscription_available", _ONE, CONNACK, **_FLAG),
    0x29: _kind("subscription_identifier_available", _ONE, CONNACK, **_FLAG),
    0x2A: _kind("shared_subscription_available", _ONE, CONNACK, **_FLAG),
}
_IDS = {kind.name: number for number, kind in _KINDS.items()}
_WIDTHS = {_ONE: 1, _TWO: 2, _FOUR: 4}

Found = tuple[int, Any, int, int]
"""Property id, value, and from where to where it stands in the raw bytes."""


def scan(raw: bytes, place: int) -> list[Found]:
    """Every property in order, checked for a packet of type `place` (or for WILL or DELIVERY)."""
    found: list[Found] = []
    seen = 0
    fault: PeerError | None = None
    at, end = 0, len(raw)
    while at < end:
        start, number = at, raw[at]
        kind = _KINDS.get(number)
        if kind is None:
            raise malformed(f"{NAMES[place]} has unknown property {raw[at : at + 4].hex()}")
        value, at = _value(raw, at + 1, end, kind)
        found.append((number, value, start, at))
        if fault is None and (
            place not in kind.allowed
            or (seen >> number & 1 and place not in kind.repeats)
            or (kind.form <= _VARINT and not kind.low <= value <= kind.high)
            or number == 0x08
        ):
            fault = _fault(kind, value, place, bool(seen >> number & 1))
        seen |= 1 << number
    if fault is not None:
        raise fault
    return found


def _value(raw: bytes, at: int, end: int, kind: _Kind) -> tuple[Any, int]:
    form = kind.form
    if form >= _TEXT:
        value, at = _string(raw, at, end, kind)
        if form == _BINARY:
            return value, at
        if form == _TEXT:
            return text(value, kind.name), at
        other, at = _string(raw, at, end, kind)
        return (text(value, "user property name"), text(other, "user property")), at
    if form == _VARINT:
        return varint(raw, at, end, kind.name)
    stop = at + _WIDTHS[form]
    if stop > end:
        raise malformed(f"properties end inside {kind.name}")
    return int.from_bytes(raw[at:stop], "big"), stop


def _string(raw: bytes, at: int, end: int, kind: _Kind) -> tuple[bytes, int]:
    start = at + 2
    stop = start + int.from_bytes(raw[at:start], "big")
    if start > end or stop > end:
        raise malformed(f"properties end inside {kind.name}")
    return raw[start:stop], stop


def _fault(kind: _Kind, value: Any, place: int, again: bool) -> PeerError | None:
    """What a peer is told about a property that could be read but may not be there, or not like this."""
    if place not in kind.allowed:
        return malformed(f"{NAMES[place]} may not have the property {kind.name}")
    if again and place not in kind.repeats:
        return PeerError(f"{NAMES[place]} has {kind.name} twice", Reason.PROTOCOL_ERROR)
    if kind.form <= _VARINT:
        return PeerError(f"{NAMES[place]} has {kind.name} {value}, which is out of range", kind.fault)
    try:
        topic_name(value.encode(), kind.name)
    except PeerError as error:
        return PeerError(str(error), Reason.PROTOCOL_ERROR)
    return None


def decode(raw: bytes, place: int) -> Properties:
    """Properties without their length, as a dict by name; checked for a packet of type `place`."""
    return _as_dict(scan(raw, place)) if raw else Properties()


def _as_dict(found: list[Found]) -> Properties:
    out: dict[str, Any] = {}
    for number, value, _, _ in found:
        kind = _KINDS[number]
        if number in (0x26, 0x0B):
            out.setdefault(kind.name, []).append(value)
        else:
            out[kind.name] = value == 1 if kind.flag else value
    return cast(Properties, out)


_Writer = Callable[[Any, str], bytes]
_WRITERS: dict[int, _Writer] = {
    _VARINT: lambda value, _: to_varint(value),
    _TEXT: to_text,
    _BINARY: to_binary,
    _PAIR: lambda value, name: to_text(value[0], name) + to_text(value[1], name),
}


def encode(properties: Properties) -> bytes:
    """The wire form without its length. Whether the packet may have them is the caller's business."""
    out = bytearray()
    for name, value in properties.items():
        number = _IDS.get(name)
        if number is None:
            raise RequestError(f"{name!r} is not an MQTT property; known are {', '.join(sorted(_IDS))}")
        form = _KINDS[number].form
        for one in cast(Any, value) if number in (0x26, 0x0B) else (cast(Any, value),):
            out.append(number)
            out += int(one).to_bytes(_WIDTHS[form], "big") if form in _WIDTHS else _WRITERS[form](one, name)
    return bytes(out)


def encode_with_length(properties: Properties) -> bytes:
    if not properties:
        return b"\0"
    raw = encode(properties)
    return to_varint(len(raw)) + raw


# --- the properties of messages, in wire form


def split(raw: bytes, place: int, apart: frozenset[int]) -> tuple[bytes, list[Found]]:
    """What is left without the properties in `apart`, and those."""
    found = scan(raw, place)
    taken = [one for one in found if one[0] in apart]
    if taken:
        raw = b"".join(raw[start:stop] for number, _, start, stop in found if number not in apart)
    return raw, taken


_NOT_FORWARDED = frozenset((0x0B, 0x23))


def forwardable(raw: bytes) -> tuple[bytes, int]:
    """Check what a publisher sent; what to store of it, and the topic alias that was among it (0: none).

    A subscription identifier is dropped as well: it is for the broker to say which subscription matched.
    """
    if not raw:
        return raw, 0
    return _forwardable_cached(raw) if len(raw) <= SIZE_MAX_CACHED else _forwardable(raw)


def _forwardable(raw: bytes) -> tuple[bytes, int]:
    if _plain(raw):
        return raw, 0
    kept, taken = split(raw, PUBLISH, _NOT_FORWARDED)
    return kept, next((value for number, value, _, _ in taken if number == 0x23), 0)


_STRINGS = {0x03: 1, 0x09: 1, 0x26: 2}


def _plain(raw: bytes) -> bool:
    """Whether there is at a glance nothing to object to and nothing to take out; if not, `split` looks closely.

    A shortcut for properties too varied to be remembered, such as trace contexts: half the time.
    """
    at, end, seen, ascii_throughout = 0, len(raw), 0, raw.isascii()
    while at < end:
        number = raw[at]
        strings = _STRINGS.get(number, 0)
        if strings < 2:
            if seen >> number & 1:
                return False
            seen |= 1 << number
        if not strings:
            if number != 0x02:
                return False
            at += 5
            continue
        at += 1
        for _ in range(strings):
            start = at + 2
            if start > end:
                return False
            at = start + (raw[at] << 8 | raw[at + 1])
            if at > end:
                return False
            if number != 0x09 and (raw.find(0, start, at) >= 0 or not (ascii_throughout or raw[start:at].isascii())):
                return False
    return at == end


_forwardable_cached = lru_cache(maxsize=1024)(_forwardable)


def _expiry_at(raw: bytes) -> int:
    """Where the value of the message expiry stands; -1 where there is none. `raw` has been checked before."""
    at, end = 0, len(raw)
    if b"\x02" not in raw:
        return -1
    while at < end:
        kind = _KINDS.get(raw[at])
        if raw[at] == 0x02 and at + 5 <= end:
            return at + 1
        if kind is None:
            raise malformed(f"stored message properties {show(raw)} cannot be read at {at}")
        form, at = kind.form, at + 1
        if form in _WIDTHS:
            at += _WIDTHS[form]
        elif form == _VARINT:
            at = varint(raw, at, end, kind.name)[1]
        else:
            for _ in range(2 if form == _PAIR else 1):
                at += 2 + int.from_bytes(raw[at : at + 2], "big")
    return -1


def expiry_of(raw: bytes) -> int | None:
    """The message expiry in seconds, from properties that have been checked before."""
    at = _expiry_at(raw)
    return None if at < 0 else int.from_bytes(raw[at : at + 4], "big")


def with_expiry(raw: bytes, remaining_seconds: int) -> bytes:
    """The same properties with this message expiry; unchanged where the publisher set none."""
    at = _expiry_at(raw)
    if at < 0:
        return raw
    return raw[:at] + min(max(remaining_seconds, 0), 0xFFFFFFFF).to_bytes(4, "big") + raw[at + 4 :]


def decode_publish(raw: bytes) -> dict[str, Any]:
    """A message's properties for people and JSON: no bytes, user properties as a list of pairs."""
    out: dict[str, Any] = dict(cast(Mapping[str, Any], decode(raw, PUBLISH)))
    if "user_properties" in out:
        out["user_properties"] = [list(pair) for pair in out["user_properties"]]
    correlation = out.pop("correlation_data", None)
    if correlation is not None:
        try:
            out["correlation_data"] = correlation.decode()
        except UnicodeDecodeError:
            out["correlation_data_base64"] = base64.b64encode(correlation).decode()
    return out
