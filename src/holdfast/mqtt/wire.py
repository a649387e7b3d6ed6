"""How MQTT writes numbers, strings and binary data, and which of them are malformed.

One surprising rule: names (topics, filters, client ids, user names) may not hold control characters or
Unicode non-characters, which MQTT allows a receiver to refuse; other strings only may not hold NUL.
"""

from __future__ import annotations

import re

from holdfast.errors import PeerError, RequestError
from holdfast.mqtt.reasons import Reason
from holdfast.topics import LEVELS_MAX, check_filter, too_deep

VARINT_MAX = 268_435_455
TEXT_BYTES_MAX = 65_535

_NON_CHARACTERS = "".join(chr(plane << 16 | 0xFFFE) + chr(plane << 16 | 0xFFFF) for plane in range(17))
_NOT_IN_NAMES = re.compile(f"[\x00-\x1f\x7f-\x9f\ufdd0-\ufdef{_NON_CHARACTERS}]")


def malformed(message: str) -> PeerError:
    return PeerError(message, Reason.MALFORMED_PACKET)


def show(value: str | bytes) -> str:
    """For error messages: the value, cut short where it is long."""
    return repr(value) if len(value) <= 60 else f"{value[:40]!r}… ({len(value)} long)"


def text(raw: bytes, what: str) -> str:
    """Any string: valid UTF-8 without surrogates and without NUL."""
    try:
        found = raw.decode()
    except UnicodeDecodeError as error:
        raise malformed(f"{what} {show(raw)} is not valid UTF-8: {error.reason}") from None
    if "\0" in found:
        raise malformed(f"{what} {show(found)} contains NUL")
    return found


def name(raw: bytes, what: str) -> str:
    """A string that identifies something, and so may not hold what nobody can see."""
    found = text(raw, what)
    if odd := _NOT_IN_NAMES.search(found):
        raise malformed(f"{what} {show(found)} contains U+{ord(odd[0]):04X}, a control or non-character")
    return found


def topic_name(raw: bytes, what: str = "topic") -> str:
    """The topic of a PUBLISH or a will. The fast path asks this once per distinct topic."""
    topic = name(raw, what)
    if not topic:
        raise malformed(f"{what} '' is empty")
    if "+" in topic or "#" in topic:
        raise malformed(f"{what} {show(topic)} contains a wildcard; '+' and '#' belong in filters only")
    if too_deep(topic):
        raise PeerError(f"{what} {show(topic)} has more than {LEVELS_MAX} levels", Reason.TOPIC_NAME_INVALID)
    return topic


def topic_filter(raw: bytes) -> str:
    """A filter of a SUBSCRIBE or UNSUBSCRIBE, `$share/GROUP/FILTER` included.

    One with too many levels is passed on: it is correctly formed, so the SUBACK refuses it alone.
    """
    found = name(raw, "filter")
    if not found:
        raise malformed("filter '' is empty")
    if found.startswith("$share/"):
        group, _, rest = found[7:].partition("/")
        if not group or not rest or "+" in group or "#" in group:
            raise PeerError(
                f"filter {show(found)} is not $share/GROUP/FILTER with a group and a filter",
                Reason.PROTOCOL_ERROR,
            )
    if too_deep(found):
        return found
    try:
        return check_filter(found)
    except RequestError as error:
        raise PeerError(str(error), Reason.TOPIC_FILTER_INVALID) from None


class Reader:
    """Takes values off the front of a packet's body; a value that is not all there is malformed."""

    __slots__ = ("at", "body", "end", "packet")

    def __init__(self, body: bytes | bytearray | memoryview, packet: str):
        self.body: bytes | memoryview = bytes(body) if isinstance(body, bytearray) else body
        self.packet = packet
        self.at, self.end = 0, len(body)

    def take(self, count: int, what: str) -> bytes:
        start = self.at
        self.at = start + count
        if self.at > self.end:
            raise malformed(f"{self.packet} ends inside its {what}: {count} bytes wanted, {self.end - start} there")
        return bytes(self.body[start : self.at])

    def byte(self, what: str) -> int:
        return self.take(1, what)[0]

    def two(self, what: str) -> int:
        return int.from_bytes(self.take(2, what), "big")

    def varint(self, what: str) -> int:
        value, self.at = varint(self.body, self.at, self.end, what)
        return value

    def binary(self, what: str) -> bytes:
        return self.take(self.two(what), what)

    def rest(self) -> bytes:
        found = bytes(self.body[self.at :])
        self.at = self.end
        return found

    def packet_id(self) -> int:
        found = self.two("packet id")
        if not found:
            raise PeerError(f"{self.packet} has packet id 0", Reason.PROTOCOL_ERROR)
        return found

    def finish(self) -> None:
        if self.at != self.end:
            raise malformed(f"{self.packet} has {self.end - self.at} bytes too many: {show(self.rest())}")


def varint(body: bytes | memoryview, at: int, end: int, what: str) -> tuple[int, int]:
    """A variable byte integer and where it ends. Written with more bytes than needed, it is malformed."""
    value = shift = 0
    for here in range(at, min(at + 4, end)):
        byte = body[here]
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            if not byte and shift:
                raise malformed(f"{what} {body[at : here + 1].hex()} is written with more bytes than it needs")
            return value, here + 1
        shift += 7
    raise malformed(f"{what} {body[at : at + 4].hex()} does not end within its four bytes")


# --- writing


def to_varint(value: int) -> bytes:
    if value < 0x80:
        return bytes((value,))
    if value > VARINT_MAX:
        raise RequestError(f"{value} is more than MQTT can write as a length; it takes at most {VARINT_MAX}")
    out = bytearray()
    while value >= 0x80:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def to_binary(value: bytes, what: str) -> bytes:
    if len(value) > TEXT_BYTES_MAX:
        raise RequestError(f"{what} {show(value)} is longer than {TEXT_BYTES_MAX} bytes")
    return len(value).to_bytes(2, "big") + value


def to_text(value: str, what: str) -> bytes:
    try:
        return to_binary(value.encode(), what)
    except UnicodeEncodeError as error:
        raise RequestError(f"{what} {show(value)} is not valid Unicode: {error.reason}") from None


def to_packet(first_byte: int, *body: bytes) -> bytes:
    return b"".join((bytes((first_byte,)), to_varint(sum(map(len, body))), *body))
