"""MQTT 5 properties: by hand, against their own inverse, and against another implementation."""

from __future__ import annotations

import json

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from packet_strategies import connack_properties, connect_properties, message_properties, message_wire
from paho.mqtt.packettypes import PacketTypes
from paho.mqtt.properties import Properties as PahoProperties

from holdfast.errors import PeerError, RequestError
from holdfast.mqtt import packets as p
from holdfast.mqtt import properties
from holdfast.mqtt.reasons import Reason

ALIAS, IDENTIFIER = b"\x23\0\x07", b"\x0b\x05"


def refused(raw: bytes, place: int) -> int:
    with pytest.raises(PeerError) as caught:
        properties.decode(raw, place)
    return caught.value.reason_code


def test_repeatable_properties_keep_their_order():
    raw = bytes.fromhex("26 0001 62 0001 31 26 0001 61 0000 26 0001 62 0001 31")
    found = properties.decode(raw, p.SUBACK)
    assert found == {"user_properties": [("b", "1"), ("a", ""), ("b", "1")]}
    assert properties.encode(found) == raw
    assert properties.decode(b"\x0b\1\x0b\1", p.DELIVERY) == {"subscription_identifiers": [1, 1]}


@pytest.mark.parametrize(
    ("raw", "place", "reason"),
    [
        (b"\x21\0\0", p.CONNECT, Reason.PROTOCOL_ERROR),
        (b"\x27\0\0\0\0", p.CONNECT, Reason.PROTOCOL_ERROR),
        (b"\x19\2", p.CONNECT, Reason.PROTOCOL_ERROR),
        (b"\x24\2", p.CONNACK, Reason.PROTOCOL_ERROR),
        (b"\1\2", p.PUBLISH, Reason.PROTOCOL_ERROR),
        (b"\x23\0\0", p.PUBLISH, Reason.TOPIC_ALIAS_INVALID),
        (b"\x0b\0", p.SUBSCRIBE, Reason.PROTOCOL_ERROR),
        (b"\x11\0\0\0\1" * 2, p.CONNECT, Reason.PROTOCOL_ERROR),
        (b"\x0b\1\x0b\2", p.PUBLISH, Reason.PROTOCOL_ERROR),
        (b"\x02\0\0\0\1" * 2, p.PUBLISH, Reason.PROTOCOL_ERROR),
        (b"\x03\0\1a" * 2, p.PUBLISH, Reason.PROTOCOL_ERROR),
        (b"\x09\0\1a" * 2, p.PUBLISH, Reason.PROTOCOL_ERROR),
        (b"\x08\0\3a/#", p.PUBLISH, Reason.PROTOCOL_ERROR),
        (b"\x08\0\0", p.PUBLISH, Reason.PROTOCOL_ERROR),
        (b"\x03\0\2a\0", p.PUBLISH, Reason.MALFORMED_PACKET),
        (b"\x03\0\3\xed\xa0\x80", p.PUBLISH, Reason.MALFORMED_PACKET),
        (b"\x26\0\1\xff\0\0", p.PUBLISH, Reason.MALFORMED_PACKET),
        (b"\x03\0\5abc", p.PUBLISH, Reason.MALFORMED_PACKET),
        (b"\x03\0", p.PUBLISH, Reason.MALFORMED_PACKET),
        (b"\x0b\x80", p.DELIVERY, Reason.MALFORMED_PACKET),
        (b"\x0b\x81\0", p.DELIVERY, Reason.MALFORMED_PACKET),
        (b"\x7f\0", p.PUBLISH, Reason.MALFORMED_PACKET),
        (b"\x82\0", p.PUBLISH, Reason.MALFORMED_PACKET),
        (b"\x1f\0\1r", p.PUBLISH, Reason.MALFORMED_PACKET),
        (b"\x1f\0\1r", p.SUBSCRIBE, Reason.MALFORMED_PACKET),
        (b"\x18\0\0\0\1", p.PUBLISH, Reason.MALFORMED_PACKET),
        (b"\x01\0", p.PUBACK, Reason.MALFORMED_PACKET),
        (b"\x01\0", p.CONNECT, Reason.MALFORMED_PACKET),
    ],
)
def test_a_property_that_is_refused(raw, place, reason):
    assert refused(raw, place) == reason
    if place == p.PUBLISH:
        for whole in (raw, raw + b"\x26\0\0\0\0", b"\x09\0\1\xff" + raw):
            with pytest.raises(PeerError):
                properties.forwardable(whole)


def test_cut_short_is_worse_than_said_twice():
    assert refused(b"\x03\0\1r\x03\0\1r", p.PUBLISH) == Reason.PROTOCOL_ERROR
    assert refused(b"\x03\0\1r\x03\0\1r\x1f\0", p.PUBLISH) == Reason.MALFORMED_PACKET


def test_free_text_may_hold_a_line_feed_but_names_may_not():
    assert properties.decode(b"\x03\0\1\n", p.PUBLISH) == {"content_type": "\n"}
    assert refused(b"\x08\0\1\n", p.PUBLISH) == Reason.PROTOCOL_ERROR


def test_an_unknown_name_cannot_be_encoded():
    with pytest.raises(RequestError, match="'colour' is not an MQTT property"):
        properties.encode({"colour": "red"})


# --- what a message keeps


def test_a_topic_alias_is_taken_out_and_a_subscription_identifier_dropped():
    assert properties.forwardable(b"\1\1" + ALIAS + b"\x03\0\1x" + IDENTIFIER) == (b"\1\1\x03\0\1x", 7)
    assert properties.forwardable(ALIAS) == (b"", 7)
    assert properties.forwardable(b"") == (b"", 0)


@settings(max_examples=300, deadline=None)
@given(raw=message_wire)
def test_forwardable_keeps_everything_else_as_it_was(raw):
    assert properties.forwardable(raw) == (raw, 0)
    assert properties.forwardable(ALIAS + raw) == (raw, 7)
    assert properties.forwardable(raw + IDENTIFIER + ALIAS) == (raw, 7)


@settings(max_examples=800, deadline=None)
@given(raw=st.binary(max_size=40) | st.tuples(message_wire, st.binary(max_size=6)).map(b"".join))
def test_forwardable_refuses_exactly_what_decode_refuses(raw):
    try:
        kept, alias = properties.forwardable(raw)
    except PeerError as error:
        assert refused(raw, p.PUBLISH) == error.reason_code
        return
    found = properties.decode(raw, p.PUBLISH)
    assert found.pop("topic_alias", 0) == alias
    found.pop("subscription_identifiers", None)
    assert properties.decode(kept, p.PUBLISH) == found


@settings(max_examples=300, deadline=None)
@given(found=message_properties, seconds=st.integers(0, 0xFFFFFFFF))
def test_only_the_expiry_is_rewritten(found, seconds):
    raw = properties.encode(found)
    assert properties.expiry_of(raw) == found.get("message_expiry")
    changed = properties.with_expiry(raw, seconds)
    if "message_expiry" in found:
        assert properties.decode(changed, p.PUBLISH) == {**found, "message_expiry": seconds}
    else:
        assert changed == raw


def test_an_expiry_that_is_past_is_zero_and_a_long_one_is_kept_in_four_bytes():
    raw = properties.encode({"message_expiry": 5})
    assert properties.expiry_of(properties.with_expiry(raw, -3)) == 0
    assert properties.expiry_of(properties.with_expiry(raw, 1 << 40)) == 0xFFFFFFFF


def test_stored_properties_that_cannot_be_read_say_so():
    with pytest.raises(PeerError, match="cannot be read at 0"):
        properties.expiry_of(b"\x7f\x02\0\0\0\1")


@settings(max_examples=200, deadline=None)
@given(raw=message_wire)
def test_any_message_properties_become_json(raw):
    json.dumps(properties.decode_publish(raw))


def test_message_properties_for_people():
    raw = properties.encode(
        {
            "content_type": "text/plain",
            "correlation_data": b"42",
            "user_properties": [("a", "1"), ("a", "2")],
            "message_expiry": 60,
        }
    )
    assert properties.decode_publish(raw) == {
        "content_type": "text/plain",
        "correlation_data": "42",
        "user_properties": [["a", "1"], ["a", "2"]],
        "message_expiry": 60,
    }
    binary = properties.encode({"correlation_data": b"\xff\0"})
    assert properties.decode_publish(binary) == {"correlation_data_base64": "/wA="}


# --- against paho

PAHO_NAMES = {
    "payload_format": "PayloadFormatIndicator",
    "message_expiry": "MessageExpiryInterval",
    "content_type": "ContentType",
    "response_topic": "ResponseTopic",
    "correlation_data": "CorrelationData",
    "session_expiry": "SessionExpiryInterval",
    "assigned_client_id": "AssignedClientIdentifier",
    "server_keep_alive": "ServerKeepAlive",
    "authentication_method": "AuthenticationMethod",
    "authentication_data": "AuthenticationData",
    "request_problem_information": "RequestProblemInformation",
    "request_response_information": "RequestResponseInformation",
    "response_information": "ResponseInformation",
    "server_reference": "ServerReference",
    "reason_string": "ReasonString",
    "receive_maximum": "ReceiveMaximum",
    "topic_alias_maximum": "TopicAliasMaximum",
    "maximum_qos": "MaximumQoS",
    "retain_available": "RetainAvailable",
    "user_properties": "UserProperty",
    "maximum_packet_size": "MaximumPacketSize",
    "wildcard_subscription_available": "WildcardSubscriptionAvailable",
    "subscription_identifier_available": "SubscriptionIdentifierAvailable",
    "shared_subscription_available": "SharedSubscriptionAvailable",
}


@settings(max_examples=300, deadline=None)
@given(
    place_and_found=st.one_of(
        st.tuples(st.just((p.PUBLISH, PacketTypes.PUBLISH)), message_properties),
        st.tuples(st.just((p.CONNECT, PacketTypes.CONNECT)), connect_properties),
        st.tuples(st.just((p.CONNACK, PacketTypes.CONNACK)), connack_properties),
    )
)
def test_paho_writes_what_we_read_and_reads_what_we_write(place_and_found):
    (place, paho_place), found = place_and_found
    assume(found.get("maximum_packet_size", 1) <= 268_435_455)  # paho sets no more than a packet can have
    theirs = PahoProperties(paho_place)
    for name, value in found.items():
        setattr(theirs, PAHO_NAMES[name], value)
    packed = theirs.pack()
    start = next(at for at, byte in enumerate(packed) if byte < 0x80) + 1
    assert properties.decode(packed[start:], place) == found

    read_back = PahoProperties(paho_place)
    read_back.unpack(properties.encode_with_length(found))
    for name, value in found.items():
        assert getattr(read_back, PAHO_NAMES[name]) == value
