"""Which reason codes MQTT knows, which packet may carry which, and what an MQTT 3 client is told instead."""

from __future__ import annotations

from enum import IntEnum

from holdfast.errors import RequestError
from holdfast.mqtt import packets as p


class Reason(IntEnum):
    """MQTT 5 reason codes. Below 0x80 it went well; from 0x80 it did not."""

    SUCCESS = 0x00
    NORMAL_DISCONNECTION = 0x00
    GRANTED_QOS_0 = 0x00
    GRANTED_QOS_1 = 0x01
    GRANTED_QOS_2 = 0x02
    DISCONNECT_WITH_WILL = 0x04
    NO_MATCHING_SUBSCRIBERS = 0x10
    NO_SUBSCRIPTION_EXISTED = 0x11
    CONTINUE_AUTHENTICATION = 0x18
    REAUTHENTICATE = 0x19
    UNSPECIFIED_ERROR = 0x80
    MALFORMED_PACKET = 0x81
    PROTOCOL_ERROR = 0x82
    IMPLEMENTATION_SPECIFIC_ERROR = 0x83
    UNSUPPORTED_PROTOCOL_VERSION = 0x84
    CLIENT_ID_NOT_VALID = 0x85
    BAD_USER_NAME_OR_PASSWORD = 0x86
    NOT_AUTHORIZED = 0x87
    SERVER_UNAVAILABLE = 0x88
    SERVER_BUSY = 0x89
    BANNED = 0x8A
    SERVER_SHUTTING_DOWN = 0x8B
    BAD_AUTHENTICATION_METHOD = 0x8C
    KEEP_ALIVE_TIMEOUT = 0x8D
    SESSION_TAKEN_OVER = 0x8E
    TOPIC_FILTER_INVALID = 0x8F
    TOPIC_NAME_INVALID = 0x90
    PACKET_ID_IN_USE = 0x91
    PACKET_ID_NOT_FOUND = 0x92
    RECEIVE_MAXIMUM_EXCEEDED = 0x93
    TOPIC_ALIAS_INVALID = 0x94
    PACKET_TOO_LARGE = 0x95
    MESSAGE_RATE_TOO_HIGH = 0x96
    QUOTA_EXCEEDED = 0x97
    ADMINISTRATIVE_ACTION = 0x98
    PAYLOAD_FORMAT_INVALID = 0x99
    RETAIN_NOT_SUPPORTED = 0x9A
    QOS_NOT_SUPPORTED = 0x9B
    USE_ANOTHER_SERVER = 0x9C
    SERVER_MOVED = 0x9D
    SHARED_SUBSCRIPTIONS_NOT_SUPPORTED = 0x9E
    CONNECTION_RATE_EXCEEDED = 0x9F
    MAXIMUM_CONNECT_TIME = 0xA0
    SUBSCRIPTION_IDENTIFIERS_NOT_SUPPORTED = 0xA1
    WILDCARD_SUBSCRIPTIONS_NOT_SUPPORTED = 0xA2


def describe(code: int) -> str:
    """For people: `0x87 not authorized`."""
    try:
        return f"0x{code:02X} {Reason(code).name.lower().replace('_', ' ')}"
    except ValueError:
        return f"0x{code:02X} (unknown)"


IN_CONNACK = frozenset(
    {0x00, *range(0x80, 0x8B), 0x8C, 0x90, 0x95, 0x97, 0x99, 0x9A, 0x9B, 0x9C, 0x9D, 0x9F},
)
IN_CONNACK_3 = frozenset({0x00, 0x84, 0x85, 0x86, 0x87, 0x88})
"""Those that an MQTT 3 return code can say exactly."""
IN_PUBACK = frozenset({0x00, 0x10, 0x80, 0x83, 0x87, 0x90, 0x91, 0x97, 0x99})
"""PUBREC takes the same."""
IN_PUBREL = frozenset({0x00, 0x92})
"""PUBCOMP takes the same."""
IN_SUBACK = frozenset({0x00, 0x01, 0x02, 0x80, 0x83, 0x87, 0x8F, 0x91, 0x97, 0x9E, 0xA1, 0xA2})
IN_SUBACK_3 = frozenset({0x00, 0x01, 0x02, 0x80})
IN_UNSUBACK = frozenset({0x00, 0x11, 0x80, 0x83, 0x87, 0x8F, 0x91})
IN_DISCONNECT = frozenset(
    {0x00, 0x04, *range(0x80, 0x84), 0x87, 0x89, 0x8B, 0x8D, 0x8E, 0x8F, 0x90, *range(0x93, 0xA3)},
)
"""Either way. Two that a CONNACK knows are not here: 0x88 server unavailable, in place of which 0x89 server busy is
said, and 0x8A banned."""
IN_DISCONNECT_FROM_BROKER = IN_DISCONNECT - {0x04}
IN_AUTH = frozenset({0x00, 0x18, 0x19})

LEGAL: dict[int, frozenset[int]] = {
    p.CONNACK: IN_CONNACK,
    p.PUBACK: IN_PUBACK,
    p.PUBREC: IN_PUBACK,
    p.PUBREL: IN_PUBREL,
    p.PUBCOMP: IN_PUBREL,
    p.SUBACK: IN_SUBACK,
    p.UNSUBACK: IN_UNSUBACK,
    p.DISCONNECT: IN_DISCONNECT,
    p.AUTH: IN_AUTH,
}
"""Which reasons a packet of each type may carry, by MQTT 5."""


def check(packet_type: int, *codes: int) -> None:
    """Refuse to say what no client could understand; to an MQTT 3 client too, which would not be told the code."""
    legal = LEGAL[packet_type]
    for code in codes:
        if code not in legal:
            raise RequestError(f"{p.NAMES[packet_type]} may not have reason code {describe(code)}")


def for_disconnect(code: int) -> int:
    """The reason with which a broker ends a connection because of an error that has this code."""
    return code if code in IN_DISCONNECT_FROM_BROKER else _INSTEAD.get(code, Reason.UNSPECIFIED_ERROR)


# Only a CONNECT can have the wrong version or client id, and on an open connection it is one too many.
_INSTEAD: dict[int, int] = {
    0x88: Reason.SERVER_BUSY,
    0x84: Reason.PROTOCOL_ERROR,
    0x85: Reason.PROTOCOL_ERROR,
}


# MQTT 3 has five refusals. Each has one code of MQTT 5 that means the same; the others go to the nearest.
_RETURN_CODES = {0x00: 0, 0x84: 1, 0x85: 2, 0x88: 3, 0x86: 4, 0x87: 5}
_REASONS = {code: reason for reason, code in _RETURN_CODES.items()}
_NEAREST = {0x8A: 5, 0x8C: 5}


def return_code(reason: int) -> int:
    """What a CONNACK says to an MQTT 3 client where MQTT 5 would say `reason`."""
    code = _RETURN_CODES.get(reason)
    return _NEAREST.get(reason, 3) if code is None else code


def reason_of_return_code(code: int) -> int | None:
    """The MQTT 5 reason that an MQTT 3 CONNACK return code stands for; None where there is no such code."""
    return _REASONS.get(code)
