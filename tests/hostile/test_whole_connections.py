"""Whole connections as Hypothesis makes them up: packets right, wrong, cut, mutated, and split anywhere.

What must come of them is told by reading the same bytes in order, one packet at a time: the first that is wrong
says how the connection ends. If none is, it goes on, and a ping at the end is answered.
"""

from __future__ import annotations

import itertools
import os
import socket
from dataclasses import dataclass, field

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from e2e.raw import Raw
from holdfast.errors import PeerError
from holdfast.mqtt import codec
from holdfast.mqtt import packets as p
from hostile.attack import Target, connect_packet, everything, packets
from mqtt.packet_strategies import connects, from_client

ALIAS_MAX = 10
_numbers = itertools.count()

WRONG_ACK = 0x82
"""Acknowledging a delivery that may or may not have been made yet, in the wrong way."""


@dataclass
class Story:
    """What a connection must come to."""

    ends: bool = False
    said: bytes = b""
    pings: int = 0
    complete: bool = True
    may_be_wrong_ack: bool = False
    aliases: set[int] = field(default_factory=set)


def foretell(stream: bytes, version: int, size_max: int) -> Story:
    """Read what follows an accepted CONNECT."""
    story, at = Story(), 0
    subscribed = False
    while at < len(stream) and not story.ends:
        try:
            found = codec.frame(stream, at, size_max)
        except PeerError as error:
            return end(story, error, stream[at], b"", version)
        if found is None:
            story.complete = False
            return story
        first, start, at = found
        body = stream[start:at]
        try:
            packet = codec.decode(first, body, version)
            _take(packet, story)
        except PeerError as error:
            return end(story, error, first, body, version)
        subscribed |= isinstance(packet, p.Subscribe)
        story.may_be_wrong_ack |= subscribed and isinstance(packet, p.Puback | p.Pubrec | p.Pubcomp)
    return story


def end(story: Story, error: PeerError, first: int, body: bytes, version: int) -> Story:
    story.ends, story.said = True, codec.farewell(error, first, body, version)
    return story


def _take(packet: p.Packet, story: Story) -> None:
    match packet:
        case p.Connect() | p.Auth():
            raise PeerError("not now", 0x82)
        case p.Pingreq():
            story.pings += 1
        case p.Publish() if packet.topic_alias:
            if packet.topic_alias > ALIAS_MAX:
                raise PeerError("alias", 0x94)
            if not packet.topic and packet.topic_alias not in story.aliases:
                raise PeerError("alias", 0x82)
            story.aliases.add(packet.topic_alias)
        case p.Disconnect():
            # The session of these connections ends with them: a DISCONNECT cannot give it a longer life.
            if packet.properties.get("session_expiry"):
                raise PeerError("expiry", 0x82)
            story.ends = True


@st.composite
def streams(draw: st.DrawFn, version: int) -> bytes:
    """Packets of a client, of which some are not quite right."""
    out = b""
    for _ in range(draw(st.integers(1, 6))):
        one = draw(st.binary(max_size=12) | from_client(version).map(lambda packet: codec.encode(packet, version)))
        match draw(st.sampled_from(["whole", "whole", "whole", "cut", "mutated", "twice"])):
            case "cut":
                one = one[: draw(st.integers(0, len(one)))]
            case "mutated" if one:
                at = draw(st.integers(0, len(one) - 1))
                one = one[:at] + bytes([draw(st.integers(0, 255))]) + one[at + 1 :]
            case "twice":
                one += one
        out += one
    return out


def pieces(stream: bytes, cuts: list[int]) -> list[bytes]:
    bounds = [0, *sorted(cut % (len(stream) + 1) for cut in cuts), len(stream)]
    return [stream[a:b] for a, b in itertools.pairwise(bounds) if a < b]


def tell(raw: Raw, stream: bytes, cuts: list[int]) -> None:
    raw.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    for piece in pieces(stream, cuts):
        raw.sock.sendall(piece)


LIVE = settings(
    max_examples=100, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


@LIVE
@given(data=st.data())
def _one_connection(target: Target, version: int, data: st.DataObject) -> None:
    stream = data.draw(streams(version), "stream") + b"\xc0\x00"
    cuts = data.draw(st.lists(st.integers(0, 200), max_size=4), "cuts")
    story = foretell(stream, version, 1 << 20)
    with target.raw(version) as raw:
        hello = connect_packet(f"w{next(_numbers)}x{os.getpid()}", version)
        if data.draw(st.booleans(), "pipelined"):
            tell(raw, hello + stream, cuts)
        else:
            raw.sock.sendall(hello)
            assert raw.sock.recv(1, socket.MSG_PEEK)
            tell(raw, stream, cuts)
        assert raw.read()[1][1] == 0
        if story.ends or not story.complete:
            if not story.ends:
                raw.sock.shutdown(socket.SHUT_WR)
            said = packets(everything(raw.sock))
            told = [codec.encode_disconnect(p.Disconnect(b[0] if b else 0), 5) for f, b in said if f == 0xE0]
            expected = [story.said] if story.said else []
            assert told == expected or (story.may_be_wrong_ack and told in ([], [bytes((0xE0, 1, WRONG_ACK))]))
            return
        pongs = 0
        while pongs < story.pings:
            first, body = raw.read()
            pongs += first == 0xD0
            if first == 0xE0:
                assert story.may_be_wrong_ack and body[0] == WRONG_ACK, f"ended with {body.hex()}, should go on"
                return


def test_a_connection_of_any_packets(target: Target, version: int) -> None:
    with target.unharmed(grows_mb=96):
        _one_connection(target, version)


@LIVE
@given(data=st.data())
def _one_beginning(target: Target, version: int, data: st.DataObject) -> None:
    whole = codec.encode(data.draw(connects(version)), version)
    at = data.draw(st.integers(0, len(whole) - 1))
    if data.draw(st.booleans(), "mutated"):
        whole = whole[:at] + bytes([data.draw(st.integers(0, 255))]) + whole[at + 1 :]
    stream = whole + data.draw(st.binary(max_size=40), "garbage")
    expected, accepted = b"", False
    found = None
    try:
        found = codec.frame(stream, 0, 1 << 20)
        if found is not None:
            first, start, stop = found
            if first >> 4 != p.CONNECT:
                raise PeerError("not first", 0x82)
            codec.decode(first, stream[start:stop], version)
            accepted = True
    except PeerError as error:
        first, body = (found[0], stream[found[1] : found[2]]) if found else (stream[0], b"")
        expected = codec.farewell(error, first, body, None)
    with target.raw(version) as raw:
        tell(raw, stream, data.draw(st.lists(st.integers(0, 200), max_size=3), "cuts"))
        raw.sock.shutdown(socket.SHUT_WR)
        said = everything(raw.sock)
        if accepted:
            assert all(first >> 4 in (2, 3, 4, 5, 6, 7, 9, 11, 13, 14) for first, _ in packets(said))
        elif found is not None:
            assert said == expected


def test_a_beginning_of_any_kind(target: Target, version: int) -> None:
    with target.unharmed(grows_mb=96):
        _one_beginning(target, version)


@pytest.mark.parametrize("garbage", [b"\xf0\x00", b"\x00\x00", b"\xff" * 10, b"\x36\x00"])
def test_the_reason_is_read_whatever_is_still_in_the_pipe(target: Target, garbage: bytes) -> None:
    """Eight megabytes sent after the breach, of which the node reads what it needs to let its last word through."""
    with target.unharmed(), target.connected(f"w{next(_numbers)}") as raw:
        raw.sock.sendall(garbage)
        raw.sock.settimeout(5)
        try:
            for _ in range(128):
                raw.sock.sendall(b"x" * (64 << 10))
        except ConnectionError as error:
            raise AssertionError(f"our bytes were refused before we read why: {error}") from None
        said = packets(everything(raw.sock))
        assert said and said[-1][0] == 0xE0 and said[-1][1][0] in (0x81, 0x82)


def test_a_packet_without_a_type_after_a_good_one(target: Target) -> None:
    """Its first byte is zero, which is a first byte all the same."""
    with target.unharmed(), target.connected("typeless", 5) as raw:
        raw.sock.sendall(b"\xc0\x00\x00\x00")
        assert everything(raw.sock) == b"\xd0\x00\xe0\x01\x82"
