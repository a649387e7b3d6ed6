"""The control packets as values: one small frozen class each, the same for MQTT 3.1, 3.1.1 and 5."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TypedDict

V31, V311, V5 = 3, 4, 5
"""Protocol levels, as CONNECT carries them."""

CONNECT, CONNACK, PUBLISH, PUBACK, PUBREC, PUBREL, PUBCOMP = range(1, 8)
SUBSCRIBE, SUBACK, UNSUBSCRIBE, UNSUBACK, PINGREQ, PINGRESP, DISCONNECT, AUTH = range(8, 16)
"""Packet types: the upper half of the first byte."""

NAMES = (
    "packet of type 0",
    *("CONNECT", "CONNACK", "PUBLISH", "PUBACK", "PUBREC", "PUBREL", "PUBCOMP", "SUBSCRIBE", "SUBACK"),
    *("UNSUBSCRIBE", "UNSUBACK", "PINGREQ", "PINGRESP", "DISCONNECT", "AUTH"),
    *("will", "delivered PUBLISH"),
)
"""By packet type; the two at the end are places for properties that are not packets of their own."""

WILL, DELIVERY = 16, 17


class Properties(TypedDict, total=False):
    """MQTT 5 properties of a packet; those of messages stay in wire form. A missing key was not sent."""

    payload_format: int
    message_expiry: int
    content_type: str
    response_topic: str
    correlation_data: bytes
    subscription_identifiers: list[int]
    session_expiry: int
    assigned_client_id: str
    server_keep_alive: int
    authentication_method: str
    authentication_data: bytes
    request_problem_information: bool
    will_delay: int
    request_response_information: bool
    response_information: str
    server_reference: str
    reason_string: str
    receive_maximum: int
    topic_alias_maximum: int
    topic_alias: int
    maximum_qos: int
    retain_available: bool
    user_properties: list[tuple[str, str]]
    maximum_packet_size: int
    wildcard_subscription_available: bool
    subscription_identifier_available: bool
    shared_subscription_available: bool


@dataclass(frozen=True, slots=True)
class Will:
    """What the broker publishes for a client that goes without a word."""

    topic: str
    payload: bytes = b""
    qos: int = 0
    retain: bool = False
    delay: int = 0
    """Seconds to wait before it is published (MQTT 5)."""
    properties: bytes = b""
    """As in Publish: the message's properties in wire form."""


@dataclass(frozen=True, slots=True)
class Connect:
    """Client -> broker. The first packet, and the only one of its kind."""

    client_id: str
    version: int = V5
    clean_start: bool = True
    keep_alive: int = 60
    username: str | None = None
    password: bytes | None = None
    will: Will | None = None
    properties: Properties = field(default_factory=Properties)


@dataclass(frozen=True, slots=True)
class Connack:
    """Broker -> client. Welcome, or why not. `reason` is one of MQTT 5, whatever the wire says."""

    reason: int = 0
    session_present: bool = False
    properties: Properties = field(default_factory=Properties)


@dataclass(frozen=True, slots=True)
class Publish:
    """Either way. One message; on the data path the fast path does this without an object per message."""

    topic: str
    payload: bytes = b""
    qos: int = 0
    retain: bool = False
    dup: bool = False
    packet_id: int = 0
    properties: bytes = b""
    """In wire form without their length, and without the two below: what the log stores."""
    topic_alias: int = 0
    """0 where there is none. With an alias, the topic may be empty."""
    subscription_identifiers: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Puback:
    """Receiver -> sender. A QoS 1 message has arrived."""

    packet_id: int
    reason: int = 0
    properties: Properties = field(default_factory=Properties)


@dataclass(frozen=True, slots=True)
class Pubrec:
    """Receiver -> sender. A QoS 2 message has arrived."""

    packet_id: int
    reason: int = 0
    properties: Properties = field(default_factory=Properties)


@dataclass(frozen=True, slots=True)
class Pubrel:
    """Sender -> receiver. The packet id of a QoS 2 message may be forgotten."""

    packet_id: int
    reason: int = 0
    properties: Properties = field(default_factory=Properties)


@dataclass(frozen=True, slots=True)
class Pubcomp:
    """Receiver -> sender. The packet id is forgotten."""

    packet_id: int
    reason: int = 0
    properties: Properties = field(default_factory=Properties)


@dataclass(frozen=True, slots=True)
class FilterRequest:
    """One filter of a SUBSCRIBE, with its options."""

    filter: str
    qos: int = 0
    no_local: bool = False
    retain_as_published: bool = False
    retain_handling: int = 0
    """Retained messages are sent: 0 always, 1 if the subscription is new, 2 never."""


@dataclass(frozen=True, slots=True)
class Subscribe:
    """Client -> broker. At least one filter."""

    packet_id: int
    filters: tuple[FilterRequest, ...]
    subscription_identifier: int = 0
    """0 where there is none."""
    properties: Properties = field(default_factory=Properties)


@dataclass(frozen=True, slots=True)
class Suback:
    """Broker -> client. One reason per filter, in order: the granted QoS or a refusal."""

    packet_id: int
    reasons: tuple[int, ...]
    properties: Properties = field(default_factory=Properties)


@dataclass(frozen=True, slots=True)
class Unsubscribe:
    """Client -> broker. At least one filter."""

    packet_id: int
    filters: tuple[str, ...]
    properties: Properties = field(default_factory=Properties)


@dataclass(frozen=True, slots=True)
class Unsuback:
    """Broker -> client. One reason per filter, in order; none in MQTT 3."""

    packet_id: int
    reasons: tuple[int, ...] = ()
    properties: Properties = field(default_factory=Properties)


@dataclass(frozen=True, slots=True)
class Pingreq:
    """Client -> broker. Still here."""


@dataclass(frozen=True, slots=True)
class Pingresp:
    """Broker -> client. So are we."""


@dataclass(frozen=True, slots=True)
class Disconnect:
    """Either way (MQTT 3: client -> broker only). The last packet."""

    reason: int = 0
    properties: Properties = field(default_factory=Properties)


@dataclass(frozen=True, slots=True)
class Auth:
    """Either way, MQTT 5 only. A step of an enhanced authentication."""

    reason: int = 0
    properties: Properties = field(default_factory=Properties)


Acknowledgement = Puback | Pubrec | Pubrel | Pubcomp
Packet = (
    Connect
    | Connack
    | Publish
    | Acknowledgement
    | Subscribe
    | Suback
    | Unsubscribe
    | Unsuback
    | Pingreq
    | Pingresp
    | Disconnect
    | Auth
)
