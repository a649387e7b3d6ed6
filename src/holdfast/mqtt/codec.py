"""Control packets to bytes and back, for MQTT 3.1, 3.1.1 and 5, strictly: what is not right is refused.

`decode` reads what a client sends, `decode_for_client` what a broker sends; a packet that only the other side
may send is a protocol error. Any bytes give a packet or a PeerError with the reason code the peer is told.

What bytes alone cannot tell is left to the connection: whether a packet may come now (CONNECT first and once,
an acknowledgement of the right kind for its packet id), and whether a topic alias, a session expiry or an
authentication method is acceptable on this connection.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from holdfast.errors import PeerError
from holdfast.mqtt import packets as p
from holdfast.mqtt import properties as props
from holdfast.mqtt import reasons
from holdfast.mqtt.packets import (
    Acknowledgement,
    Auth,
    Connack,
    Connect,
    Disconnect,
    FilterRequest,
    Packet,
    Pingreq,
    Pingresp,
    Properties,
    Puback,
    Pubcomp,
    Publish,
    Pubrec,
    Pubrel,
    Suback,
    Subscribe,
    Unsuback,
    Unsubscribe,
    Will,
)
from holdfast.mqtt.reasons import Reason, describe
from holdfast.mqtt.wire import (
    VARINT_MAX,
    Reader,
    malformed,
    name,
    show,
    to_binary,
    to_packet,
    to_text,
    to_varint,
    topic_filter,
    topic_name,
)

A = TypeVar("A", Puback, Pubrec, Pubrel, Pubcomp)

_WILL_DELAY = frozenset((0x18,))
_APART_FROM_MESSAGE = frozenset((0x0B, 0x23))


def frame(
    buffer: bytes | bytearray | memoryview, start: int = 0, size_max: int = VARINT_MAX + 5
) -> tuple[int, int, int] | None:
    """The packet at `start`: its first byte, and from where to where its body goes; None until it is all there.

    A packet longer than `size_max` is refused as soon as its length is known, not when it has arrived.
    """
    end = len(buffer)
    length = shift = 0
    at = start + 1
    while at < end:
        byte = buffer[at]
        length |= (byte & 0x7F) << shift
        at += 1
        if byte < 0x80:
            stop = at + length
            if stop - start > size_max:
                raise PeerError(
                    f"{p.NAMES[buffer[start] >> 4]} of {stop - start} bytes; the limit is {size_max}",
                    Reason.PACKET_TOO_LARGE,
                )
            return (buffer[start], at, stop) if stop <= end else None
        shift += 7
        if shift == 28:
            raise malformed(f"remaining length {bytes(buffer[start + 1 : at]).hex()} is longer than four bytes")
    return None


def decode(first_byte: int, body: bytes | bytearray | memoryview, version: int) -> Packet:
    """What a client sent to a broker. `version` is the connection's; CONNECT brings its own.

    Of a view only what the packet keeps is copied, once: a large payload is best given as one.
    """
    return _decode(_FROM_CLIENT, first_byte, body, version)


def decode_for_client(first_byte: int, body: bytes | bytearray | memoryview, version: int) -> Packet:
    """What a broker sent to a client."""
    return _decode(_FROM_BROKER, first_byte, body, version)


def _decode(known: dict[int, _Decoder], first_byte: int, body: bytes | bytearray | memoryview, version: int) -> Packet:
    kind, flags = first_byte >> 4, first_byte & 0x0F
    decoder = known.get(kind)
    if decoder is None or (kind == p.AUTH and (version < p.V5 or flags)):
        # Sent by the wrong side, a packet is wrong whatever its flags; only these two are judged by them first.
        wrong_flags = flags and kind in (p.SUBACK, p.UNSUBACK)
        code = Reason.MALFORMED_PACKET if wrong_flags else Reason.PROTOCOL_ERROR
        raise PeerError(f"{p.NAMES[kind]} (first byte 0x{first_byte:02X}) may not be sent here", code)
    if kind in _WITH_FLAG_2 and version == p.V31:
        flags &= ~8  # MQTT 3.1 sends these three again, marked as duplicates, where no answer came
    if kind not in (p.PUBLISH, p.CONNECT) and flags != (2 if kind in _WITH_FLAG_2 else 0):
        raise malformed(f"{p.NAMES[kind]} has fixed header flags 0x{flags:X}")
    return decoder(Reader(body, p.NAMES[kind]), flags, version)


_WITH_FLAG_2 = frozenset((p.PUBREL, p.SUBSCRIBE, p.UNSUBSCRIBE))


def _properties(r: Reader, place: int) -> Properties:
    return props.decode(r.take(r.varint("property length"), "properties"), place)


def _reason(r: Reader, allowed: frozenset[int]) -> int:
    reason = r.byte("reason code")
    if reason not in allowed:
        raise PeerError(f"{r.packet} may not have reason code {describe(reason)}", Reason.PROTOCOL_ERROR)
    return reason


def _connect(r: Reader, flags: int, _: int) -> Connect:
    protocol, version = r.binary("protocol name"), r.byte("protocol level")
    if protocol not in (b"MQTT", b"MQIsdp"):
        raise malformed(f"CONNECT names the protocol {show(protocol)}; it is MQTT")
    if version not in ((p.V311, p.V5) if protocol == b"MQTT" else (p.V31,)):
        raise PeerError(
            f"CONNECT asks for {protocol.decode()} level {version}; MQIsdp 3, MQTT 4 and MQTT 5 are spoken here",
            Reason.UNSUPPORTED_PROTOCOL_VERSION,
        )
    bits = r.byte("connect flags")
    # MQTT 3.1 left both sets of bits unused and said nothing about them, so its clients may have set them.
    if version != p.V31 and (flags or bits & 1):
        raise malformed(f"CONNECT has reserved flags set: fixed header 0x{flags:X}, connect flags 0x{bits:02X}")
    has_name, has_password, has_will = bits & 0x80, bits & 0x40, bits & 0x04
    if (not has_will and bits & 0x38) or bits & 0x18 == 0x18:
        raise malformed(f"CONNECT has connect flags 0x{bits:02X}: will QoS 3, or will options without a will")
    if has_password and not has_name and version < p.V5:
        raise malformed("CONNECT has a password without a user name, which only MQTT 5 allows")
    clean = bits & 0x02 != 0
    keep_alive = r.two("keep alive")
    properties = _properties(r, p.CONNECT) if version == p.V5 else Properties()
    client_id = name(r.binary("client id"), "client id")
    will = _will(r, bits, version) if has_will else None
    username = name(r.binary("user name"), "user name") if has_name else None
    password = r.binary("password") if has_password else None
    r.finish()
    if "authentication_data" in properties and "authentication_method" not in properties:
        raise PeerError("CONNECT has authentication data without a method", Reason.PROTOCOL_ERROR)
    if not client_id and (version == p.V31 or (version == p.V311 and not clean)):
        raise PeerError("CONNECT has client id '' where one is needed", Reason.CLIENT_ID_NOT_VALID)
    return Connect(client_id, version, clean, keep_alive, username, password, will, properties)


def _will(r: Reader, bits: int, version: int) -> Will:
    raw, delay = b"", 0
    if version == p.V5:
        sent = r.take(r.varint("will property length"), "will properties")
        raw, apart = props.split(sent, p.WILL, _WILL_DELAY)
        delay = apart[0][1] if apart else 0
    topic = topic_name(r.binary("will topic"), "will topic")
    return Will(topic, r.binary("will payload"), bits >> 3 & 3, bits & 0x20 != 0, delay, raw)


def _connack(r: Reader, _: int, version: int) -> Connack:
    bits = r.byte("acknowledge flags")
    if bits > 1:
        raise malformed(f"CONNACK has acknowledge flags 0x{bits:02X}")
    if version == p.V5:
        reason = _reason(r, reasons.IN_CONNACK)
        properties = _properties(r, p.CONNACK)
    else:
        code, properties = r.byte("return code"), Properties()
        known = reasons.reason_of_return_code(code)
        if known is None:
            raise malformed(f"CONNACK has return code {code}")
        reason = known
    r.finish()
    if bits and reason:
        raise PeerError(f"CONNACK refuses with {describe(reason)} but has a session", Reason.PROTOCOL_ERROR)
    return Connack(reason, bits == 1, properties)


def _publish(r: Reader, flags: int, version: int, place: int = p.PUBLISH) -> Publish:
    qos, dup = flags >> 1 & 3, flags & 8 != 0
    if qos == 3 or (dup and not qos):
        raise malformed(f"PUBLISH has QoS {qos} and DUP {int(dup)}")
    raw_topic = r.binary("topic")
    packet_id = r.packet_id() if qos else 0
    raw, alias, identifiers = b"", 0, ()
    if version == p.V5:
        sent = r.take(r.varint("property length"), "properties")
        if sent:
            raw, apart = props.split(sent, place, _APART_FROM_MESSAGE)
            alias = next((value for number, value, _, _ in apart if number == 0x23), 0)
            identifiers = tuple(value for number, value, _, _ in apart if number == 0x0B)
        if not raw_topic and not alias:
            raise PeerError("PUBLISH has neither a topic nor a topic alias", Reason.PROTOCOL_ERROR)
    topic = topic_name(raw_topic) if raw_topic or not alias else ""
    return Publish(topic, r.rest(), qos, flags & 1 == 1, dup, packet_id, raw, alias, identifiers)


def _delivery(r: Reader, flags: int, version: int) -> Publish:
    return _publish(r, flags, version, p.DELIVERY)


def _acknowledgement(cls: type[A], place: int, allowed: frozenset[int]) -> _Decoder:
    def decoder(r: Reader, _: int, version: int) -> A:
        packet_id = r.packet_id()
        if version < p.V5 or r.at == r.end:
            r.finish()
            return cls(packet_id)
        reason = r.byte("reason code")
        properties = Properties() if r.at == r.end else _properties(r, place)
        r.finish()
        if reason not in allowed:
            raise PeerError(f"{r.packet} may not have reason code {describe(reason)}", Reason.PROTOCOL_ERROR)
        return cls(packet_id, reason, properties)

    return decoder


def _subscribe(r: Reader, _: int, version: int) -> Subscribe:
    packet_id = r.packet_id()
    properties = _properties(r, p.SUBSCRIBE) if version == p.V5 else Properties()
    identifiers = properties.pop("subscription_identifiers", [0])
    filters = []
    while r.at < r.end:
        raw = r.binary("filter")
        options = r.byte("subscription options")
        if options > (0x3F if version == p.V5 else 3):
            raise malformed(f"SUBSCRIBE has reserved options set: 0x{options:02X} for filter {show(raw)}")
        if options & 0x03 == 0x03 or options & 0x30 == 0x30:
            raise PeerError(
                f"SUBSCRIBE has QoS 3 or retain handling 3: 0x{options:02X} for filter {show(raw)}",
                Reason.PROTOCOL_ERROR,
            )
        text = topic_filter(raw)
        if options & 4 and text.startswith("$share/"):
            raise PeerError(f"SUBSCRIBE asks for no-local with {show(text)}, which is shared", Reason.PROTOCOL_ERROR)
        filters.append(FilterRequest(text, options & 3, options & 4 != 0, options & 8 != 0, options >> 4))
    if not filters:
        raise PeerError("SUBSCRIBE has no filter", Reason.PROTOCOL_ERROR)
    return Subscribe(packet_id, tuple(filters), identifiers[0], properties)


def _unsubscribe(r: Reader, _: int, version: int) -> Unsubscribe:
    packet_id = r.packet_id()
    properties = _properties(r, p.UNSUBSCRIBE) if version == p.V5 else Properties()
    filters = []
    while r.at < r.end:
        filters.append(topic_filter(r.binary("filter")))
    if not filters:
        raise PeerError("UNSUBSCRIBE has no filter", Reason.PROTOCOL_ERROR)
    return Unsubscribe(packet_id, tuple(filters), properties)


def _suback(r: Reader, _: int, version: int) -> Suback:
    packet_id = r.packet_id()
    properties = _properties(r, p.SUBACK) if version == p.V5 else Properties()
    codes = tuple(r.rest())
    allowed = reasons.IN_SUBACK if version == p.V5 else reasons.IN_SUBACK_3
    if not codes or not allowed.issuperset(codes):
        raise PeerError(f"SUBACK has reason codes {show(bytes(codes))}", Reason.PROTOCOL_ERROR)
    return Suback(packet_id, codes, properties)


def _unsuback(r: Reader, _: int, version: int) -> Unsuback:
    packet_id = r.packet_id()
    if version < p.V5:
        r.finish()
        return Unsuback(packet_id)
    properties = _properties(r, p.UNSUBACK)
    codes = tuple(r.rest())
    if not codes or not reasons.IN_UNSUBACK.issuperset(codes):
        raise PeerError(f"UNSUBACK has reason codes {show(bytes(codes))}", Reason.PROTOCOL_ERROR)
    return Unsuback(packet_id, codes, properties)


def _pingreq(r: Reader, _: int, version: int) -> Pingreq:
    r.finish()
    return Pingreq()


def _pingresp(r: Reader, _: int, version: int) -> Pingresp:
    r.finish()
    return Pingresp()


def _disconnect(r: Reader, _: int, version: int) -> Disconnect:
    if version < p.V5 or r.at == r.end:
        r.finish()
        return Disconnect()
    reason = r.byte("reason code")
    if reason not in reasons.IN_DISCONNECT:
        reason = Reason.UNSPECIFIED_ERROR  # whoever is leaving is not argued with
    properties = Properties() if r.at == r.end else _properties(r, p.DISCONNECT)
    r.finish()
    return Disconnect(reason, properties)


def _disconnect_from_broker(r: Reader, flags: int, version: int) -> Disconnect:
    if version < p.V5:
        raise PeerError("DISCONNECT from a broker, which only MQTT 5 knows", Reason.PROTOCOL_ERROR)
    return _disconnect(r, flags, version)


def _auth(r: Reader, _: int, version: int) -> Auth:
    if r.at == r.end:
        return Auth()
    reason = _reason(r, reasons.IN_AUTH)
    properties = Properties() if r.at == r.end else _properties(r, p.AUTH)
    r.finish()
    return Auth(reason, properties)


_Decoder = Callable[[Reader, int, int], Packet]
_BOTH_WAYS: dict[int, _Decoder] = {
    p.PUBACK: _acknowledgement(Puback, p.PUBACK, reasons.IN_PUBACK),
    p.PUBREC: _acknowledgement(Pubrec, p.PUBREC, reasons.IN_PUBACK),
    p.PUBREL: _acknowledgement(Pubrel, p.PUBREL, reasons.IN_PUBREL),
    p.PUBCOMP: _acknowledgement(Pubcomp, p.PUBCOMP, reasons.IN_PUBREL),
    p.AUTH: _auth,
}
_FROM_CLIENT: dict[int, _Decoder] = _BOTH_WAYS | {
    p.CONNECT: _connect,
    p.PUBLISH: _publish,
    p.SUBSCRIBE: _subscribe,
    p.UNSUBSCRIBE: _unsubscribe,
    p.PINGREQ: _pingreq,
    p.DISCONNECT: _disconnect,
}
_FROM_BROKER: dict[int, _Decoder] = _BOTH_WAYS | {
    p.CONNACK: _connack,
    p.PUBLISH: _delivery,
    p.SUBACK: _suback,
    p.UNSUBACK: _unsuback,
    p.PINGRESP: _pingresp,
    p.DISCONNECT: _disconnect_from_broker,
}


# --- writing


def encode(packet: Packet, version: int) -> bytes:
    """Any packet, for a connection of this version. In MQTT 3 whatever only MQTT 5 can say is left out."""
    return _ENCODERS[type(packet)](packet, version)


def encode_connect(packet: Connect, version: int | None = None) -> bytes:
    """CONNECT carries its own version; the argument is there to be called like the others."""
    v5, will = packet.version == p.V5, packet.will
    bits = packet.clean_start << 1 | (packet.username is not None) << 7 | (packet.password is not None) << 6
    if will:
        bits |= 0x04 | will.qos << 3 | will.retain << 5
    body = bytearray(b"\0\6MQIsdp" if packet.version == p.V31 else b"\0\4MQTT")
    body += bytes((packet.version, bits)) + packet.keep_alive.to_bytes(2, "big")
    if v5:
        body += props.encode_with_length(packet.properties)
    body += to_text(packet.client_id, "client id")
    if will:
        if v5:
            raw = (b"\x18" + will.delay.to_bytes(4, "big") if will.delay else b"") + will.properties
            body += to_varint(len(raw)) + raw
        body += to_text(will.topic, "will topic") + to_binary(will.payload, "will payload")
    if packet.username is not None:
        body += to_text(packet.username, "user name")
    if packet.password is not None:
        body += to_binary(packet.password, "password")
    return to_packet(0x10, bytes(body))


def encode_connack(packet: Connack, version: int) -> bytes:
    reasons.check(p.CONNACK, packet.reason)
    if version < p.V5:
        return bytes((0x20, 2, packet.session_present, reasons.return_code(packet.reason)))
    return to_packet(0x20, bytes((packet.session_present, packet.reason)) + props.encode_with_length(packet.properties))


def encode_publish(packet: Publish, version: int) -> bytes:
    parts = [to_text(packet.topic, "topic")]
    if packet.qos:
        parts.append(packet.packet_id.to_bytes(2, "big"))
    if version == p.V5:
        raw = packet.properties
        if packet.topic_alias:
            raw += b"\x23" + packet.topic_alias.to_bytes(2, "big")
        for identifier in packet.subscription_identifiers:
            raw += b"\x0b" + to_varint(identifier)
        parts += (to_varint(len(raw)), raw)
    parts.append(packet.payload)
    return to_packet(0x30 | packet.dup << 3 | packet.qos << 1 | packet.retain, *parts)


def encode_acknowledgement(packet: Acknowledgement, version: int) -> bytes:
    """PUBACK, PUBREC, PUBREL or PUBCOMP, as short as it can be."""
    first, body = _ACKNOWLEDGEMENTS[type(packet)], packet.packet_id.to_bytes(2, "big")
    reasons.check(first >> 4, packet.reason)
    if version == p.V5:
        if packet.properties:
            body += bytes((packet.reason,)) + props.encode_with_length(packet.properties)
        elif packet.reason:
            body += bytes((packet.reason,))
    return to_packet(first, body)


def encode_subscribe(packet: Subscribe, version: int) -> bytes:
    body = bytearray(packet.packet_id.to_bytes(2, "big"))
    if version == p.V5:
        raw = props.encode(packet.properties)
        if packet.subscription_identifier:
            raw += b"\x0b" + to_varint(packet.subscription_identifier)
        body += to_varint(len(raw)) + raw
    for one in packet.filters:
        options = one.qos
        if version == p.V5:
            options |= one.no_local << 2 | one.retain_as_published << 3 | one.retain_handling << 4
        body += to_text(one.filter, "filter")
        body.append(options)
    return to_packet(0x82, bytes(body))


def encode_suback(packet: Suback, version: int) -> bytes:
    reasons.check(p.SUBACK, *packet.reasons)
    body = packet.packet_id.to_bytes(2, "big")
    if version < p.V5:
        return to_packet(0x90, body + bytes(code if code < 0x80 else 0x80 for code in packet.reasons))
    return to_packet(0x90, body + props.encode_with_length(packet.properties) + bytes(packet.reasons))


def encode_unsubscribe(packet: Unsubscribe, version: int) -> bytes:
    body = bytearray(packet.packet_id.to_bytes(2, "big"))
    if version == p.V5:
        body += props.encode_with_length(packet.properties)
    for text in packet.filters:
        body += to_text(text, "filter")
    return to_packet(0xA2, bytes(body))


def encode_unsuback(packet: Unsuback, version: int) -> bytes:
    reasons.check(p.UNSUBACK, *packet.reasons)
    body = packet.packet_id.to_bytes(2, "big")
    if version == p.V5:
        body += props.encode_with_length(packet.properties) + bytes(packet.reasons)
    return to_packet(0xB0, body)


def encode_pingreq(packet: Pingreq | None = None, version: int | None = None) -> bytes:
    return b"\xc0\0"


def encode_pingresp(packet: Pingresp | None = None, version: int | None = None) -> bytes:
    return b"\xd0\0"


def encode_disconnect(packet: Disconnect, version: int) -> bytes:
    reasons.check(p.DISCONNECT, packet.reason)
    return b"\xe0\0" if version < p.V5 else _reasoned(0xE0, packet)


def encode_auth(packet: Auth, version: int | None = None) -> bytes:
    reasons.check(p.AUTH, packet.reason)
    return _reasoned(0xF0, packet)


def _reasoned(first_byte: int, packet: Disconnect | Auth) -> bytes:
    if packet.properties:
        return to_packet(first_byte, bytes((packet.reason,)) + props.encode_with_length(packet.properties))
    return bytes((first_byte, 1, packet.reason)) if packet.reason else bytes((first_byte, 0))


_ACKNOWLEDGEMENTS = {Puback: 0x40, Pubrec: 0x50, Pubrel: 0x62, Pubcomp: 0x70}
_ENCODERS: dict[type, Callable[[Any, int], bytes]] = {
    Connect: encode_connect,
    Connack: encode_connack,
    Publish: encode_publish,
    Subscribe: encode_subscribe,
    Suback: encode_suback,
    Unsubscribe: encode_unsubscribe,
    Unsuback: encode_unsuback,
    Pingreq: encode_pingreq,
    Pingresp: encode_pingresp,
    Disconnect: encode_disconnect,
    Auth: encode_auth,
    **dict.fromkeys(_ACKNOWLEDGEMENTS, encode_acknowledgement),
}


def farewell(
    error: PeerError,
    first_byte: int,
    body: bytes | bytearray | memoryview,
    version: int | None,
    explain: bool = False,
) -> bytes:
    """What to send before closing on a peer whose packet (`first_byte`, `body`) was refused; often nothing.

    `version` is None while no CONNECT was accepted. `explain` adds the message as reason string (MQTT 5).
    A malformed CONNECT is not answered: whoever sent it may not speak MQTT at all.
    """
    code = error.reason_code
    properties: Properties = {"reason_string": str(error)[:1000]} if explain else {}
    if version is not None:
        # A ping with a body is a framing mistake, after which nothing further is said.
        silent = version < p.V5 or (first_byte >> 4 in (p.PINGREQ, p.PINGRESP) and len(body) > 0)
        return b"" if silent else encode_disconnect(Disconnect(reasons.for_disconnect(code), properties), version)
    v5 = bytes(body[:7]) == b"\0\4MQTT\5"
    if first_byte >> 4 != p.CONNECT or code == Reason.MALFORMED_PACKET:
        return b""
    if code not in (reasons.IN_CONNACK if v5 else reasons.IN_CONNACK_3):
        return b""
    return encode_connack(Connack(code, properties=properties), p.V5 if v5 else p.V311)
