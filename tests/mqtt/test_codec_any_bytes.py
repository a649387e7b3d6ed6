"""Every packet survives the wire, and no bytes do anything but give a packet or say what was wrong."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from packet_strategies import from_broker, from_client

from holdfast.errors import PeerError
from holdfast.mqtt import codec
from holdfast.mqtt.packets import V5, V31, V311

VERSIONS = (V31, V311, V5)
PROTOCOL_ERROR = 0x82


def body_of(wire: bytes) -> tuple[int, bytes]:
    found = codec.frame(wire)
    assert found is not None
    first, start, stop = found
    assert stop == len(wire)
    return first, wire[start:stop]


@pytest.mark.parametrize("version", VERSIONS)
@settings(max_examples=200, deadline=None)
@given(data=st.data())
def test_what_a_client_says_survives_the_wire(version, data):
    packet = data.draw(from_client(version))
    assert codec.decode(*body_of(codec.encode(packet, version)), version) == packet


@pytest.mark.parametrize("version", VERSIONS)
@settings(max_examples=200, deadline=None)
@given(data=st.data())
def test_what_a_broker_says_survives_the_wire(version, data):
    packet = data.draw(from_broker(version))
    assert codec.decode_for_client(*body_of(codec.encode(packet, version)), version) == packet


def check_any(first: int, body: bytes, version: int) -> None:
    for decode in (codec.decode, codec.decode_for_client):
        try:
            packet = decode(first, body, version)
        except PeerError as error:
            assert error.reason_code >= 0x80
            assert str(error)
            for connected in (None, version) if decode is codec.decode else ():
                last = codec.farewell(error, first, body, connected, explain=True)
                if last:
                    spoken = V5 if last[0] == 0xE0 or len(last) > 4 else V311
                    said = codec.decode_for_client(*body_of(last), spoken)
                    of_connect = error.reason_code in (0x84, 0x85)
                    wanted = PROTOCOL_ERROR if of_connect and last[0] == 0xE0 else error.reason_code
                    assert said.reason == wanted
        else:
            wire = codec.encode(packet, version)
            assert decode(*body_of(wire), version) == packet


@settings(max_examples=800, deadline=None)
@given(first=st.integers(0, 255), body=st.binary(max_size=60), version=st.sampled_from(VERSIONS))
def test_any_bytes_give_a_packet_or_a_peer_error(first, body, version):
    check_any(first, body, version)


edits = st.lists(
    st.tuples(st.sampled_from(["flip", "cut", "insert", "end"]), st.integers(0, 400), st.integers(0, 255)),
    min_size=1,
    max_size=3,
)


def damage(wire: bytes, how: list[tuple[str, int, int]]) -> bytes:
    out = bytearray(wire)
    for kind, at, byte in how:
        at %= len(out) + 1
        if kind == "flip":
            out[at : at + 1] = bytes((byte,))
        elif kind == "cut":
            del out[at : at + 1 + byte % 4]
        elif kind == "insert":
            out.insert(at, byte)
        else:
            del out[at:]
    return bytes(out)


@settings(max_examples=800, deadline=None)
@given(data=st.data(), version=st.sampled_from(VERSIONS), how=edits)
def test_a_damaged_packet_gives_a_packet_or_a_peer_error(data, version, how):
    packet = data.draw(from_client(version) | from_broker(version))
    first, body = body_of(codec.encode(packet, version))
    check_any(first, damage(body, how), version)


@settings(max_examples=300, deadline=None)
@given(wire=st.binary(max_size=12), start=st.integers(0, 12), limit=st.integers(2, 20))
def test_any_bytes_give_a_frame_or_a_peer_error_or_nothing_yet(wire, start, limit):
    try:
        found = codec.frame(wire, start, limit)
    except PeerError as error:
        assert error.reason_code in (0x81, 0x95)
        return
    if found is not None:
        first, begin, stop = found
        assert first == wire[start]
        assert start + 2 <= begin <= stop <= len(wire)
        assert stop - start <= limit


@settings(max_examples=100, deadline=None)
@given(payload=st.binary(max_size=300))
def test_a_frame_is_none_until_its_last_byte_is_there(payload):
    wire = codec.to_packet(0x30, payload)
    for cut in range(len(wire)):
        assert codec.frame(wire[:cut]) is None
    first, start, stop = codec.frame(b"??" + wire + b"more", 2)
    assert (first, (b"??" + wire + b"more")[start:stop]) == (0x30, payload)
