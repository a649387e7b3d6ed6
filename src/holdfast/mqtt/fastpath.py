"""The data path's bytes: a socket chunk to columns of publishes and acks, and rows of a block to bytes to send.

One loop, no object per packet. What the loop does not know well (QoS 2, anything that is not a plain PUBLISH
or PUBACK) it leaves where it is, for the codec.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from holdfast.mqtt.properties import forwardable
from holdfast.mqtt.wire import to_varint

V5 = 5

VARINTS = [to_varint(n) for n in range(1 << 14)]
"""Remaining lengths of one and two bytes, ready made: nearly every packet's."""

PACKET_IDS = [n.to_bytes(2) for n in range(1 << 16)]

_PUBACK = b"\x40\x02"


class Inbox:
    """What one run of packets brought, as columns."""

    __slots__ = ("acked", "flags", "packet_ids", "payloads", "properties", "topics")

    def __init__(self) -> None:
        self.topics: list[str] = []
        self.payloads: list[bytes] = []
        self.flags: list[int] = []
        self.packet_ids: list[bytes] = []
        """Two bytes each, of the QoS 1 publishes, in order."""
        self.properties: list[bytes | None] | None = None
        """None while no publish had any."""
        self.acked: list[int] = []
        """Packet ids of PUBACKs, in order."""


def scan(
    data: bytes,
    at: int,
    version: int,
    inbox: Inbox,
    topic_of: Callable[[bytes, int], str | None],
    names: dict[bytes, str],
    size_max: int,
) -> int:
    """Take plain publishes and acks from `data` into `inbox`; where it stopped, and why is the caller's to see.

    `names` knows topics by their bytes; one it does not know is put to `topic_of(bytes, alias)`, which returns
    None where the packet must take the long way. An incomplete packet is left alone.
    """
    end = len(data)
    topics, payloads, flags, ids = inbox.topics, inbox.payloads, inbox.flags, inbox.packet_ids
    acked, properties, known = inbox.acked, inbox.properties, names.get
    v5 = version == V5
    while at + 1 < end:
        first = data[at]
        length = data[at + 1]
        body = at + 2
        if first == 0x40 and length == 2:
            if body + 2 > end:
                return at
            packet_id = data[body] << 8 | data[body + 1]
            if not packet_id:
                return at
            acked.append(packet_id)
            at = body + 2
            continue
        if first & 0xF4 != 0x30:  # not a PUBLISH of QoS 0 or 1
            return at
        if length > 127:
            if body >= end:
                return at
            length += (data[body] << 7) - 128
            body += 1
            if length > 16_383:  # three bytes or more
                if body >= end:
                    return at
                length += (data[body] << 14) - 16_384
                body += 1
                if length > 2_097_151:  # four bytes
                    if body >= end:
                        return at
                    length += (data[body] << 21) - 2_097_152
                    body += 1
                    if length > 268_435_455:
                        return at  # five bytes: the codec says what is wrong
        stop = body + length
        if stop - at > size_max:
            return at
        if stop > end:
            return at
        if length < 3:
            return at
        topic_end = body + 2 + (data[body] << 8 | data[body + 1])
        qos1 = first & 2
        payload_at = topic_end + 2 if qos1 else topic_end
        if payload_at > stop:
            return at
        if qos1:
            id_bytes = data[topic_end:payload_at]
            if id_bytes == b"\0\0":
                return at
        elif first & 8:
            return at  # DUP without QoS: the codec says what is wrong
        raw = data[body + 2 : topic_end]
        extra = None
        topic = known(raw)
        if v5:
            if payload_at >= stop:
                return at
            size = data[payload_at]
            payload_at += 1
            if size:
                if size > 127 or payload_at + size > stop:
                    return at
                extra, alias = forwardable(data[payload_at : payload_at + size])
                payload_at += size
                if alias or not raw:
                    topic = topic_of(raw, alias)
        if topic is None:
            topic = topic_of(raw, 0)
            if topic is None:
                return at
        topics.append(topic)
        payloads.append(data[payload_at:stop])
        flags.append((first & 6) >> 1 | (first & 1) << 2)
        if qos1:
            ids.append(id_bytes)
        if extra:
            if properties is None:
                properties = inbox.properties = [None] * (len(topics) - 1)
            properties.append(extra)
        elif properties is not None:
            properties.append(None)
        at = stop
    return at


def pubacks(packet_ids: Sequence[bytes]) -> bytes:
    """One PUBACK (success) for each, as one piece."""
    return _PUBACK + _PUBACK.join(packet_ids)


def pubacks_where(packet_ids: Sequence[bytes], topics: Sequence[str], flags: Sequence[int], heard: object) -> bytes:
    """As `pubacks`, in MQTT 5, telling the publisher of messages that nobody is subscribed to."""
    known = heard.__contains__  # type: ignore[operator]
    of_qos1 = (
        [topic for topic, flag in zip(topics, flags, strict=True) if flag & 3] if 0 in flags or 4 in flags else topics
    )
    return b"".join(
        [
            _PUBACK + packet_id if known(topic) else b"\x40\x03" + packet_id + b"\x10"
            for packet_id, topic in zip(packet_ids, of_qos1, strict=True)
        ]
    )


_names_out: dict[str, bytes] = {}


def topic_bytes(topic: str) -> bytes:
    """The topic with its length, as it stands in a PUBLISH; remembered, within a bound."""
    found = _names_out.get(topic)
    if found is None:
        raw = topic.encode()
        found = len(raw).to_bytes(2) + raw
        if len(raw) < 256:  # long ones are rare, and would make the table large
            if len(_names_out) > 200_000:
                _names_out.clear()
            _names_out[topic] = found
    return found


def remaining_length(size: int) -> bytes:
    return VARINTS[size] if size < 16_384 else to_varint(size)
