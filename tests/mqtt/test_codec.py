"""Each packet by its bytes: what it looks like on the wire, and what is refused with which reason."""

from __future__ import annotations

import tracemalloc

import pytest

from holdfast.errors import PeerError, RequestError
from holdfast.mqtt import codec, reasons, wire
from holdfast.mqtt.fastpath import Inbox, scan
from holdfast.mqtt.packets import (
    V5,
    V31,
    V311,
    Auth,
    Connack,
    Connect,
    Disconnect,
    FilterRequest,
    Pingreq,
    Pingresp,
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
from holdfast.mqtt.reasons import Reason

MALFORMED, PROTOCOL = Reason.MALFORMED_PACKET, Reason.PROTOCOL_ERROR


def unhex(text: str) -> bytes:
    """Bytes from hex, with 'quoted' parts as they are."""
    parts = text.split("'")
    return b"".join(part.encode() if at % 2 else bytes.fromhex(part) for at, part in enumerate(parts))


def read(text: str, version: int, decode=codec.decode):
    """Decode a first byte and a body; the length in between is not written down."""
    raw = unhex(text)
    return decode(raw[0], raw[1:], version)


def refused(text: str, version: int, decode=codec.decode) -> int:
    with pytest.raises(PeerError) as caught:
        read(text, version, decode)
    return caught.value.reason_code


# --- what packets look like

WIRE = [
    (Connect("c", V311, True, 10), V311, "10 0D 0004'MQTT' 04 02 000A 0001'c'"),
    (Connect("c", V31, False, 10), V31, "10 0F 0006'MQIsdp' 03 00 000A 0001'c'"),
    (Connect("", V5, True, 0), V5, "10 0D 0004'MQTT' 05 02 0000 00 0000"),
    (
        Connect("c", V311, True, 1, "u", b"\0p", Will("w", b"gone", 2, True)),
        V311,
        "10 1D 0004'MQTT' 04 F6 0001 0001'c' 0001'w' 0004'gone' 0001'u' 0002 00'p'",
    ),
    (
        Connect("c", V5, False, 1, None, b"p", Will("w", b"", 1, delay=5), {"session_expiry": 9}),
        V5,
        "10 21 0004'MQTT' 05 4C 0001 05 11 00000009 0001'c' 05 18 00000005 0001'w' 0000 0001'p'",
    ),
    (Connack(0, True), V311, "20 02 01 00"),
    (Connack(0x86), V311, "20 02 00 04"),
    (Connack(0, False, {"receive_maximum": 20}), V5, "20 06 00 00 03 21 0014"),
    (Publish("t", b"hi"), V311, "30 05 0001't' 'hi'"),
    (Publish("t", b"hi", 1, True, True, 7), V311, "3B 07 0001't' 0007 'hi'"),
    (Publish("t", b"", 2, packet_id=7), V5, "34 06 0001't' 0007 00"),
    (Publish("", b"x", topic_alias=3, properties=b"\1\1"), V5, "30 09 0000 05 0101 23 0003 'x'"),
    (Publish("t", b"", subscription_identifiers=(1, 300)), V5, "30 09 0001't' 05 0B 01 0B AC02"),
    (Puback(1), V311, "40 02 0001"),
    (Puback(1), V5, "40 02 0001"),
    (Puback(1, 0x10), V5, "40 03 0001 10"),
    (Pubrec(1, 0x97, {"reason_string": "r"}), V5, "50 08 0001 97 04 1F 0001'r'"),
    (Pubrel(1), V311, "62 02 0001"),
    (Pubcomp(1, 0x92), V5, "70 03 0001 92"),
    (Subscribe(2, (FilterRequest("a", 1), FilterRequest("+", 2))), V311, "82 0A 0002 0001'a'01 0001'+'02"),
    (Subscribe(2, (FilterRequest("a", 1, True, True, 2),), 5), V5, "82 09 0002 02 0B 05 0001'a' 2D"),
    (Suback(2, (1, 0x80)), V311, "90 04 0002 01 80"),
    (Suback(2, (1, 0x87)), V5, "90 05 0002 00 01 87"),
    (Unsubscribe(3, ("a", "b/#")), V311, "A2 0A 0003 0001'a' 0003'b/#'"),
    (Unsubscribe(3, ("a",)), V5, "A2 06 0003 00 0001'a'"),
    (Unsuback(3), V311, "B0 02 0003"),
    (Unsuback(3, (0x11, 0)), V5, "B0 05 0003 00 11 00"),
    (Pingreq(), V311, "C0 00"),
    (Pingresp(), V5, "D0 00"),
    (Disconnect(), V311, "E0 00"),
    (Disconnect(), V5, "E0 00"),
    (Disconnect(0x8E), V5, "E0 01 8E"),
    (Disconnect(0, {"session_expiry": 1}), V5, "E0 07 00 05 11 00000001"),
    (Auth(), V5, "F0 00"),
    (Auth(0x18, {"authentication_method": "m"}), V5, "F0 06 18 04 15 0001'm'"),
]


@pytest.mark.parametrize(("packet", "version", "text"), WIRE, ids=lambda value: getattr(value, "__name__", None))
def test_a_packet_and_its_bytes(packet, version, text):
    raw = unhex(text)
    assert codec.encode(packet, version).hex(" ") == raw.hex(" ")
    first, start, stop = codec.frame(raw)
    decode = (
        codec.decode_for_client
        if isinstance(packet, Connack | Suback | Unsuback | Pingresp)
        or len(getattr(packet, "subscription_identifiers", ())) > 1
        else codec.decode
    )
    assert decode(first, memoryview(raw)[start:stop], version) == packet
    assert stop == len(raw)


def test_mqtt_3_leaves_out_what_only_mqtt_5_can_say():
    assert codec.encode(Puback(1, 0x97, {"reason_string": "full"}), V311) == unhex("40 02 0001")
    assert codec.encode(Suback(1, (0x9E,)), V311) == unhex("90 03 0001 80")
    assert codec.encode(Unsuback(1, (0x11,)), V311) == unhex("B0 02 0001")
    assert codec.encode(Publish("t", b"p", properties=b"\1\1", topic_alias=4), V311) == unhex("30 04 0001't' 'p'")
    assert codec.encode(Disconnect(0x8E), V311) == unhex("E0 00")
    plain = Subscribe(1, (FilterRequest("a", 1, True, True, 2),), 9)
    assert codec.encode(plain, V311) == unhex("82 06 0001 0001'a' 01")


def test_what_cannot_be_written_is_refused_by_name():
    with pytest.raises(RequestError, match="topic"):
        codec.encode(Publish("t" * 65_536), V311)
    with pytest.raises(RequestError, match="user name"):
        codec.encode(Connect("c", username="\ud800"), V5)
    with pytest.raises(RequestError, match="268435456"):
        wire.to_varint(268_435_456)


# --- CONNECT


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("10 0004'MQTX' 04 02 0001 0001'c'", MALFORMED),
        ("10 0000 04 02 0001 0001'c'", MALFORMED),
        ("10 0004'MQTT' 03 02 0001 0001'c'", Reason.UNSUPPORTED_PROTOCOL_VERSION),
        ("10 0004'MQTT' 09 02 0001 0001'c'", Reason.UNSUPPORTED_PROTOCOL_VERSION),
        ("10 0006'MQIsdp' 04 02 0001 0001'c'", Reason.UNSUPPORTED_PROTOCOL_VERSION),
        ("12 0004'MQTT' 04 02 0001 0001'c'", MALFORMED),
        ("10 0004'MQTT' 04 03 0001 0001'c'", MALFORMED),
        ("10 0004'MQTT' 04 0A 0001 0001'c'", MALFORMED),
        ("10 0004'MQTT' 04 22 0001 0001'c'", MALFORMED),
        ("10 0004'MQTT' 04 1E 0001 0001'c' 0001'w' 0000", MALFORMED),
        ("10 0004'MQTT' 04 06 0001 0001'c' 0000 0000", MALFORMED),
        ("10 0004'MQTT' 04 06 0001 0001'c' 0003'w/#' 0000", MALFORMED),
        ("10 0004'MQTT' 04 42 0001 0001'c' 0001'p'", MALFORMED),
        ("10 0004'MQTT' 04 02 0001 0001'c' 00", MALFORMED),
        ("10 0004'MQTT' 04 82 0001 0001'c'", MALFORMED),
        ("10 0004'MQTT' 04 02 0001 0002 C328", MALFORMED),
        ("10 0004'MQTT' 04 02 0001 0002 'c'0A", MALFORMED),
        ("10 0004'MQTT' 04 00 0001 0000", Reason.CLIENT_ID_NOT_VALID),
        ("10 0006'MQIsdp' 03 02 0001 0000", Reason.CLIENT_ID_NOT_VALID),
        ("10 0004'MQTT' 05 02 0001 03 21 0000 0001'c'", PROTOCOL),
        ("10 0004'MQTT' 05 02 0001 05 27 00000000 0001'c'", PROTOCOL),
        ("10 0004'MQTT' 05 02 0001 02 17 02 0001'c'", PROTOCOL),
        ("10 0004'MQTT' 05 02 0001 04 16 0001'd' 0001'c'", PROTOCOL),
        ("10 0004'MQTT' 05 06 0001 00 0001'c' 05 11 00000001 0001'w' 0000", MALFORMED),
    ],
)
def test_a_connect_that_is_refused(text, reason):
    assert refused(text, V311) == reason


def test_mqtt_3_1_may_set_bits_it_never_defined():
    assert read("14 0006'MQIsdp' 03 01 000A 0001'c'", V311) == Connect("c", V31, False, 10)


def test_mqtt_5_may_have_a_password_alone_and_an_empty_client_id_without_clean_start():
    assert read("10 0004'MQTT' 05 40 0001 00 0000 0001'p'", V5) == Connect("", V5, False, 1, None, b"p")


def test_a_will_keeps_its_message_properties_on_the_wire_and_its_delay_apart():
    packet = read("10 0004'MQTT' 05 06 0001 00 0001'c' 07 0101 18 00000007 0001'w' 0000", V5)
    assert packet.will == Will("w", b"", delay=7, properties=b"\1\1")


# --- everything else


@pytest.mark.parametrize(
    ("text", "version", "reason"),
    [
        ("36 0001't'", V311, MALFORMED),
        ("38 0001't'", V311, MALFORMED),
        ("32 0001't' 0000", V311, PROTOCOL),
        ("30 0000", V311, MALFORMED),
        ("30 0000 00", V5, PROTOCOL),
        ("30 0001't' 05 11 00000001", V5, MALFORMED),
        ("30 0003'a/+'", V311, MALFORMED),
        ("30 0002'a'00", V311, MALFORMED),
        ("30 0003 EDA080", V311, MALFORMED),
        ("30 0003 EFBFBF", V311, MALFORMED),
        ("30 0004 F09FBFBF", V311, MALFORMED),
        ("30 0005'ab'", V311, MALFORMED),
        ("30 0001't' 03 23 0000", V5, Reason.TOPIC_ALIAS_INVALID),
        ("30 0001't' 05 01", V5, MALFORMED),
        ("30 0001't' 8000", V5, MALFORMED),
        ("30 0101" + "2F" * 257, V311, Reason.TOPIC_NAME_INVALID),
        ("40 0001 00", V311, MALFORMED),
        ("40 0000", V311, PROTOCOL),
        ("42 0001", V311, MALFORMED),
        ("60 0001", V311, MALFORMED),
        ("40 0001 77", V5, PROTOCOL),
        ("62 0001 10", V5, PROTOCOL),
        ("80 0001 0001'a'00", V311, MALFORMED),
        ("82 0000 0001'a'00", V311, PROTOCOL),
        ("82 0001", V311, PROTOCOL),
        ("82 0001 00", V5, PROTOCOL),
        ("82 0001 0000 00", V311, MALFORMED),
        ("82 0001 0001'a' 03", V311, PROTOCOL),
        ("82 0001 00 0001'a' 03", V5, PROTOCOL),
        ("82 0001 0001'a' 04", V311, MALFORMED),
        ("82 0001 00 0001'a' 30", V5, PROTOCOL),
        ("82 0001 00 0001'a' 40", V5, MALFORMED),
        ("82 0001 00 0001'a' C0", V5, MALFORMED),
        ("82 0001 0003'a#b' 00", V311, Reason.TOPIC_FILTER_INVALID),
        ("82 0001 0005'a/#/b' 00", V311, Reason.TOPIC_FILTER_INVALID),
        ("82 0001 00 0008'$share/g' 00", V5, PROTOCOL),
        ("82 0001 00 0009'$share//a' 00", V5, PROTOCOL),
        ("82 0001 00 000A'$share/+/a' 00", V5, PROTOCOL),
        ("82 0001 00 000A'$share/g/a' 04", V5, PROTOCOL),
        ("82 0001 02 0B 00 0001'a' 00", V5, PROTOCOL),
        ("82 0001 04 0B01 0B02 0001'a' 00", V5, PROTOCOL),
        ("8A 0001 0001'a'00", V311, MALFORMED),
        ("8A 0001 00 0001'a'00", V5, MALFORMED),
        ("83 0001 0001'a'00", V31, MALFORMED),
        ("A2 0001", V311, PROTOCOL),
        ("A2 0001 00", V5, PROTOCOL),
        ("A2 0001 0000", V311, MALFORMED),
        ("C0 00", V311, MALFORMED),
        ("C1", V311, MALFORMED),
        ("E0 00", V311, MALFORMED),
        ("E0 00 00 00", V5, MALFORMED),
        ("E0 00 02 01 00", V5, MALFORMED),
        ("6A 0001", V311, MALFORMED),
        ("F0", V311, PROTOCOL),
        ("F0 55", V5, PROTOCOL),
        ("00", V5, PROTOCOL),
        ("20 00 00 00", V5, PROTOCOL),
        ("90 0001 00 00", V5, PROTOCOL),
        ("91 0001 00 00", V5, MALFORMED),
        ("B0 0001 00 00", V5, PROTOCOL),
        ("D0", V5, PROTOCOL),
    ],
)
def test_what_a_broker_refuses(text, version, reason):
    assert refused(text, version) == reason


@pytest.mark.parametrize(
    ("text", "version", "reason"),
    [
        ("10 0004'MQTT' 04 02 0001 0001'c'", V311, PROTOCOL),
        ("20 02 00", V311, MALFORMED),
        ("20 00 06", V311, MALFORMED),
        ("20 00 00 00", V311, MALFORMED),
        ("20 01 87 00", V5, PROTOCOL),
        ("20 00 01 00", V5, PROTOCOL),
        ("20 00 00 03 21 0000", V5, PROTOCOL),
        ("82 0001 0001'a'00", V311, PROTOCOL),
        ("90 0001", V311, PROTOCOL),
        ("90 0001 03", V311, PROTOCOL),
        ("90 0001 00", V5, PROTOCOL),
        ("B0 0001 00", V311, MALFORMED),
        ("B0 0001 00 12", V5, PROTOCOL),
        ("C0", V311, PROTOCOL),
        ("E0", V311, PROTOCOL),
    ],
)
def test_what_a_client_refuses(text, version, reason):
    assert refused(text, version, codec.decode_for_client) == reason


def test_any_reason_to_leave_is_accepted_and_an_unknown_one_counts_as_unspecified():
    assert read("E0 04", V5) == Disconnect(Reason.DISCONNECT_WITH_WILL)
    assert read("E0 77", V5) == Disconnect(Reason.UNSPECIFIED_ERROR)


def test_one_subscription_identifier_from_a_publisher_is_tolerated_and_two_are_not():
    assert read("30 0001't' 02 0B01 'x'", V5) == Publish("t", b"x", subscription_identifiers=(1,))
    assert refused("30 0001't' 04 0B01 0B02 'x'", V5) == PROTOCOL
    both = read("30 0001't' 04 0B01 0B02 'x'", V5, codec.decode_for_client)
    assert both.subscription_identifiers == (1, 2)


def test_the_message_names_what_was_wrong():
    with pytest.raises(PeerError, match=r"topic 'a/\+' contains a wildcard"):
        read("30 0003'a/+'", V311)
    with pytest.raises(PeerError, match="SUBSCRIBE ends inside its filter: 9 bytes wanted, 1 there"):
        read("82 0001 0009'a'", V311)
    with pytest.raises(PeerError, match="PUBLISH may not have the property reason_string"):
        read("30 0001't' 04 1F 0001'r'", V5)


def test_mqtt_3_1_may_send_a_request_again_as_a_duplicate():
    assert read("8A 0001 0001'a'00", V31) == Subscribe(1, (FilterRequest("a"),))
    assert read("AA 0001 0001'a'", V31) == Unsubscribe(1, ("a",))
    assert read("6A 0001", V31) == Pubrel(1)


def test_a_filter_with_too_many_levels_is_for_the_suback_to_refuse():
    deep = "/" * 200
    assert read("82 0001 00C8" + "2F" * 200 + "00", V311) == Subscribe(1, (FilterRequest(deep),))
    assert read("A2 0001 00C8" + "2F" * 200, V311) == Unsubscribe(1, (deep,))


# --- frames


@pytest.mark.parametrize("length", [0, 1, 127, 128, 16_383, 16_384, 2_097_151, 2_097_152])
def test_lengths_at_the_edges(length):
    raw = wire.to_packet(0x30, bytes(length))
    first, start, stop = codec.frame(raw)
    assert (first, stop - start, stop) == (0x30, length, len(raw))
    assert codec.frame(raw[:-1]) is None


def test_a_length_of_five_bytes_is_malformed_before_it_is_complete():
    with pytest.raises(PeerError) as caught:
        codec.frame(unhex("30 FFFFFFFF"))
    assert caught.value.reason_code == MALFORMED


def test_a_packet_over_the_limit_is_refused_when_its_length_is_known():
    with pytest.raises(PeerError, match="PUBLISH of 268435460 bytes; the limit is 1000") as caught:
        codec.frame(unhex("30 FFFFFF7F"), 0, 1000)
    assert caught.value.reason_code == Reason.PACKET_TOO_LARGE
    assert codec.frame(wire.to_packet(0x30, bytes(997)), 0, 1000) is not None


# --- large payloads

LARGE = 8 << 20


def peak(work) -> int:
    """The most memory that was allocated at one time, in bytes."""
    tracemalloc.start()
    try:
        kept = work()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
        del kept


@pytest.mark.parametrize("version", [V311, V5])
def test_a_large_payload_is_copied_once(version):
    payload = bytes(LARGE)
    whole = codec.encode(Publish("t", payload, 1, packet_id=1), version)
    first, start, stop = codec.frame(whole)
    view = memoryview(whole)[start:stop]
    assert peak(lambda: codec.encode(Publish("t", payload, 1, packet_id=1), version)) < 1.1 * LARGE
    assert peak(lambda: codec.decode(first, view, version)) < 1.1 * LARGE
    assert codec.decode(first, view, version) == Publish("t", payload, 1, packet_id=1)
    inbox = Inbox()
    assert peak(lambda: scan(whole, 0, version, inbox, lambda raw, alias: raw.decode(), {}, LARGE + 100)) < 1.1 * LARGE
    assert inbox.payloads == [payload]


@pytest.mark.parametrize("kind", [bytes, bytearray, memoryview])
def test_what_is_decoded_holds_on_to_nothing(kind):
    body = bytearray(unhex("0001't' 0001 03 23 0004 'x'"))
    packet = codec.decode(0x32, kind(body), V5)
    assert packet == Publish("t", b"x", 1, packet_id=1, topic_alias=4) and type(packet.payload) is bytes
    body += b"more"  # would fail while a view of it is held


# --- last words


def last_words(text: str, version: int | None, **options) -> bytes:
    raw = unhex(text)
    with pytest.raises(PeerError) as caught:
        codec.decode(raw[0], raw[1:], version or V311)
    return codec.farewell(caught.value, raw[0], raw[1:], version, **options)


def test_mqtt_5_is_told_why_and_mqtt_3_just_closed():
    assert last_words("30 0000 00", V5) == unhex("E0 01 82")
    assert last_words("30 0000", V311) == b""


def test_an_explanation_is_a_reason_string():
    raw = last_words("32 0001't' 0000 00", V5, explain=True)
    assert codec.decode_for_client(raw[0], raw[2:], V5) == Disconnect(
        PROTOCOL, {"reason_string": "PUBLISH has packet id 0"}
    )


def test_a_ping_with_a_body_is_closed_without_a_word():
    assert last_words("C0 00", V5) == b""
    assert last_words("C1", V5) == unhex("E0 01 81")


def test_a_connect_is_answered_where_there_is_something_to_say():
    assert last_words("10 0004'MQTT' 09 02 0001 0001'c'", None) == unhex("20 02 00 01")
    assert last_words("10 0004'MQTT' 04 00 0001 0000", None) == unhex("20 02 00 02")
    assert last_words("10 0004'MQTT' 05 02 0001 03 21 0000 0001'c'", None) == unhex("20 03 00 82 00")
    assert last_words("10 0004'MQTT' 05 03 0001 00 0001'c'", None) == b""
    assert last_words("10 0004'HTTP' 04 02 0001 0001'c'", None) == b""
    assert last_words("D0", None) == b""


def test_last_words_are_legal_whatever_the_error_was():
    for code in (code for code in Reason if code >= 0x80):
        said = codec.farewell(PeerError("wrong", code), 0x30, b"", V5)
        assert said[:2] == b"\xe0\1" and said[2] in reasons.IN_DISCONNECT_FROM_BROKER
    assert codec.farewell(PeerError("no store", Reason.SERVER_UNAVAILABLE), 0x82, b"", V5) == unhex("E0 01 89")


# --- reasons

# Table 2-6 of MQTT 5, by name, written down a second time: for each packet, what it may say.
MAY_SAY = {
    Connack: (
        "SUCCESS UNSPECIFIED_ERROR MALFORMED_PACKET PROTOCOL_ERROR IMPLEMENTATION_SPECIFIC_ERROR "
        "UNSUPPORTED_PROTOCOL_VERSION CLIENT_ID_NOT_VALID BAD_USER_NAME_OR_PASSWORD NOT_AUTHORIZED SERVER_UNAVAILABLE "
        "SERVER_BUSY BANNED BAD_AUTHENTICATION_METHOD TOPIC_NAME_INVALID PACKET_TOO_LARGE QUOTA_EXCEEDED "
        "PAYLOAD_FORMAT_INVALID RETAIN_NOT_SUPPORTED QOS_NOT_SUPPORTED USE_ANOTHER_SERVER SERVER_MOVED "
        "CONNECTION_RATE_EXCEEDED"
    ),
    Puback: (
        "SUCCESS NO_MATCHING_SUBSCRIBERS UNSPECIFIED_ERROR IMPLEMENTATION_SPECIFIC_ERROR NOT_AUTHORIZED "
        "TOPIC_NAME_INVALID PACKET_ID_IN_USE QUOTA_EXCEEDED PAYLOAD_FORMAT_INVALID"
    ),
    Pubrec: (
        "SUCCESS NO_MATCHING_SUBSCRIBERS UNSPECIFIED_ERROR IMPLEMENTATION_SPECIFIC_ERROR NOT_AUTHORIZED "
        "TOPIC_NAME_INVALID PACKET_ID_IN_USE QUOTA_EXCEEDED PAYLOAD_FORMAT_INVALID"
    ),
    Pubrel: "SUCCESS PACKET_ID_NOT_FOUND",
    Pubcomp: "SUCCESS PACKET_ID_NOT_FOUND",
    Suback: (
        "GRANTED_QOS_0 GRANTED_QOS_1 GRANTED_QOS_2 UNSPECIFIED_ERROR IMPLEMENTATION_SPECIFIC_ERROR NOT_AUTHORIZED "
        "TOPIC_FILTER_INVALID PACKET_ID_IN_USE QUOTA_EXCEEDED SHARED_SUBSCRIPTIONS_NOT_SUPPORTED "
        "SUBSCRIPTION_IDENTIFIERS_NOT_SUPPORTED WILDCARD_SUBSCRIPTIONS_NOT_SUPPORTED"
    ),
    Unsuback: (
        "SUCCESS NO_SUBSCRIPTION_EXISTED UNSPECIFIED_ERROR IMPLEMENTATION_SPECIFIC_ERROR NOT_AUTHORIZED "
        "TOPIC_FILTER_INVALID PACKET_ID_IN_USE"
    ),
    Disconnect: (
        "NORMAL_DISCONNECTION DISCONNECT_WITH_WILL UNSPECIFIED_ERROR MALFORMED_PACKET PROTOCOL_ERROR "
        "IMPLEMENTATION_SPECIFIC_ERROR NOT_AUTHORIZED SERVER_BUSY SERVER_SHUTTING_DOWN KEEP_ALIVE_TIMEOUT "
        "SESSION_TAKEN_OVER TOPIC_FILTER_INVALID TOPIC_NAME_INVALID RECEIVE_MAXIMUM_EXCEEDED TOPIC_ALIAS_INVALID "
        "PACKET_TOO_LARGE MESSAGE_RATE_TOO_HIGH QUOTA_EXCEEDED ADMINISTRATIVE_ACTION PAYLOAD_FORMAT_INVALID "
        "RETAIN_NOT_SUPPORTED QOS_NOT_SUPPORTED USE_ANOTHER_SERVER SERVER_MOVED SHARED_SUBSCRIPTIONS_NOT_SUPPORTED "
        "CONNECTION_RATE_EXCEEDED MAXIMUM_CONNECT_TIME SUBSCRIPTION_IDENTIFIERS_NOT_SUPPORTED "
        "WILDCARD_SUBSCRIPTIONS_NOT_SUPPORTED"
    ),
    Auth: "SUCCESS CONTINUE_AUTHENTICATION REAUTHENTICATE",
}


def carrying(
    kind: type, code: int
) -> Connack | Puback | Pubrec | Pubrel | Pubcomp | Suback | Unsuback | Disconnect | Auth:
    if kind in (Suback, Unsuback):
        return kind(1, (0, code))
    return kind(1, code) if kind in (Puback, Pubrec, Pubrel, Pubcomp) else kind(code)


@pytest.mark.parametrize("version", [V311, V5])
@pytest.mark.parametrize("kind", MAY_SAY, ids=lambda kind: kind.__name__)
def test_a_packet_says_only_what_it_may_say(kind, version):
    may = {Reason[name] for name in MAY_SAY[kind].split()}
    for code in range(256):
        if code in may:
            assert codec.encode(carrying(kind, code), version)
        else:
            with pytest.raises(RequestError, match=f"{kind.__name__.upper()} may not have reason code 0x{code:02X}"):
                codec.encode(carrying(kind, code), version)


def test_every_refusal_has_an_mqtt_3_return_code():
    assert [reasons.return_code(code) for code in (0x00, 0x84, 0x85, 0x88, 0x86, 0x87)] == [0, 1, 2, 3, 4, 5]
    assert reasons.return_code(Reason.BANNED) == 5
    assert reasons.return_code(Reason.QUOTA_EXCEEDED) == 3
    assert [reasons.reason_of_return_code(code) for code in range(7)] == [0, 0x84, 0x85, 0x88, 0x86, 0x87, None]


def test_a_reason_describes_itself():
    assert reasons.describe(0x87) == "0x87 not authorized"
    assert reasons.describe(0x77) == "0x77 (unknown)"
