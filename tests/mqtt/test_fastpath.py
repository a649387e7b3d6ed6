"""The fast path against the codec: whatever arrives, however it is cut, both read the same."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from packet_strategies import message_wire, packet_ids, topics

from holdfast.errors import PeerError
from holdfast.model import RETAIN, Batch, Stream
from holdfast.mqtt import codec, properties
from holdfast.mqtt import packets as p
from holdfast.mqtt.fastpath import PACKET_IDS, Inbox, pubacks, pubacks_where, remaining_length, scan, topic_bytes
from holdfast.mqtt.reasons import Reason
from holdfast.mqtt.wire import to_varint, topic_name
from holdfast.sessions.rows import Rows
from holdfast.sessions.session import Session
from holdfast.sessions.subscriptions import Subscription

V311, V5 = p.V311, p.V5
NO_LIMIT = 1 << 28
ALIASES_MAX = 4


@dataclass
class Seen:
    """What a connection makes of its bytes."""

    publishes: list[tuple[str, bytes, int, bytes | None]] = field(default_factory=list)
    """Topic, payload, flags, properties, of QoS 0 and 1."""
    ids: list[int] = field(default_factory=list)
    acked: list[int] = field(default_factory=list)
    others: list[p.Packet] = field(default_factory=list)
    reason: int | None = None


class Aliases:
    """A connection's topics, as `scan` asks for them."""

    def __init__(self) -> None:
        self.names: dict[bytes, str] = {}
        self.aliases: dict[int, str] = {}

    def topic_of(self, raw: bytes, alias: int) -> str | None:
        topic = topic_name(raw) if raw else ""
        if alias > ALIASES_MAX:
            raise PeerError("too high", Reason.TOPIC_ALIAS_INVALID)
        if not raw:
            if not alias:
                return None
            if alias not in self.aliases:
                raise PeerError("never set", Reason.PROTOCOL_ERROR)
            return self.aliases[alias]
        if topic.startswith("$"):
            return None  # the long way
        self.names[raw] = topic
        if alias:
            self.aliases[alias] = topic
        return topic


def take(seen: Seen, packet: p.Packet, aliases: Aliases) -> None:
    """The long way: one decoded packet."""
    if isinstance(packet, p.Publish) and packet.qos < 2:
        topic = packet.topic
        if packet.topic_alias:
            topic = aliases.topic_of(topic.encode(), packet.topic_alias) or topic
        flags = packet.qos | (RETAIN if packet.retain else 0)
        seen.publishes.append((topic, packet.payload, flags, packet.properties or None))
        if packet.qos:
            seen.ids.append(packet.packet_id)
    elif isinstance(packet, p.Puback) and packet.reason == 0 and not packet.properties:
        seen.acked.append(packet.packet_id)
    else:
        seen.others.append(packet)


def one_by_one(data: bytes, version: int, size_max: int = NO_LIMIT) -> Seen:
    seen, aliases, at = Seen(), Aliases(), 0
    try:
        while (found := codec.frame(data, at, size_max)) is not None:
            first, start, at = found
            take(seen, codec.decode(first, data[start:at], version), aliases)
    except PeerError as error:
        seen.reason = error.reason_code
    return seen


def by_columns(chunks: list[bytes], version: int, size_max: int = NO_LIMIT) -> tuple[Seen, int]:
    """As a connection does: the fast path as far as it goes, the codec for the next packet, and so on."""
    seen, aliases, buffer, slow = Seen(), Aliases(), b"", 0
    try:
        for chunk in chunks:
            buffer += chunk
            at = 0
            while at < len(buffer):
                inbox = Inbox()
                try:
                    stopped = scan(buffer, at, version, inbox, aliases.topic_of, aliases.names, size_max)
                finally:
                    gather(seen, inbox)
                assert at <= stopped <= len(buffer)
                at = stopped
                if at == len(buffer):
                    break
                found = codec.frame(buffer, at, size_max)
                if found is None:
                    break
                first, start, at = found
                take(seen, codec.decode(first, buffer[start:at], version), aliases)
                slow += 1
            buffer = buffer[at:]
    except PeerError as error:
        seen.reason = error.reason_code
    return seen, slow


def gather(seen: Seen, inbox: Inbox) -> None:
    count = len(inbox.topics)
    extra = inbox.properties if inbox.properties is not None else [None] * count
    assert len(inbox.payloads) == len(inbox.flags) == len(extra) == count
    assert len(inbox.packet_ids) == sum(flag & 3 for flag in inbox.flags)
    seen.publishes += zip(inbox.topics, inbox.payloads, inbox.flags, extra, strict=True)
    seen.ids += [int.from_bytes(one) for one in inbox.packet_ids]
    seen.acked += inbox.acked


def cut(data: bytes, places: list[int]) -> list[bytes]:
    edges = sorted({0, len(data), *(place % (len(data) + 1) for place in places)})
    return [data[a:b] for a, b in pairwise(edges)]


def publishes(version: int) -> st.SearchStrategy[p.Publish]:
    """Few topics, so that they repeat; aliases that are set, used, unknown and too high."""
    names = st.sampled_from(["t", "a/b", "ü/€", "$SYS/x", "x" * 130]) | topics
    payload = st.binary(max_size=20) | st.integers(100, 140).map(bytes) | st.integers(16_370, 16_390).map(bytes)
    v5 = version == V5
    rest = {
        "payload": payload,
        "retain": st.booleans(),
        "properties": (st.just(b"") | message_wire) if v5 else st.just(b""),
    }
    if v5:
        rest["topic_alias"] = st.sampled_from([0, 0, 0, 1, 2, 2, ALIASES_MAX, ALIASES_MAX + 1])
        rest["subscription_identifiers"] = st.sampled_from([(), (), (), (7,)])
    plain = st.builds(p.Publish, topic=names, **rest)
    assured = st.builds(p.Publish, topic=names, qos=st.integers(1, 2), dup=st.booleans(), packet_id=packet_ids, **rest)
    by_alias = st.builds(p.Publish, topic=st.just(""), topic_alias=st.integers(1, 2), payload=payload, qos=st.just(0))
    return plain | assured | assured | by_alias if v5 else plain | assured


def traffic(version: int) -> st.SearchStrategy[bytes]:
    acks = st.builds(p.Puback, packet_ids)
    others: list[st.SearchStrategy[p.Packet]] = [
        st.just(p.Pingreq()),
        st.builds(p.Pubrec, packet_ids),
        st.builds(p.Pubrel, packet_ids),
        st.builds(p.Pubcomp, packet_ids),
        st.builds(lambda n: p.Subscribe(n, (p.FilterRequest("a/#", 1),)), packet_ids),
        st.builds(lambda n: p.Unsubscribe(n, ("a/#",)), packet_ids),
    ]
    if version == V5:
        others.append(st.builds(p.Puback, packet_ids, st.sampled_from([0x10, 0x97])))
        others.append(st.builds(lambda n: p.Puback(n, 0, {"reason_string": "r"}), packet_ids))
    one = publishes(version) | publishes(version) | acks | st.one_of(others)
    return st.lists(one.map(lambda packet: codec.encode(packet, version)), max_size=8).map(b"".join)


@pytest.mark.parametrize("version", [V311, V5])
@given(data=st.data())
def test_any_traffic_cut_anywhere_gives_what_the_codec_gives(version, data):
    raw = data.draw(traffic(version))
    chunks = cut(raw, data.draw(st.lists(st.integers(0, 1 << 20), max_size=6)))
    seen, _ = by_columns(chunks, version)
    assert seen == one_by_one(raw, version)


@pytest.mark.parametrize("version", [V311, V5])
def test_byte_by_byte(version):
    sent = [
        p.Publish("t", b"0", 1, packet_id=1),
        p.Publish("t", b"x" * 200, 0, retain=True),
        p.Puback(9),
        p.Publish("u", b"", 1, dup=True, packet_id=65_535),
    ]
    raw = b"".join(codec.encode(one, version) for one in sent)
    seen, slow = by_columns([raw[at : at + 1] for at in range(len(raw))], version)
    assert slow == 0, "nothing here is beyond the fast path"
    assert seen == one_by_one(raw, version)
    assert seen.ids == [1, 65_535] and seen.acked == [9] and len(seen.publishes) == 3


def changed(raw: bytes, edits: list[tuple[int, int]]) -> bytes:
    found = bytearray(raw)
    for at, value in edits:
        if found:
            found[at % len(found)] = value
    return bytes(found)


edits = st.lists(st.tuples(st.integers(0, 1 << 16), st.integers(0, 255)), min_size=1, max_size=3)


@pytest.mark.parametrize("version", [V311, V5])
@given(data=st.data())
@settings(max_examples=100)
def test_damaged_traffic_ends_where_and_why_the_codec_ends_it(version, data):
    raw = changed(data.draw(traffic(version)), data.draw(edits))
    chunks = cut(raw, data.draw(st.lists(st.integers(0, 1 << 20), max_size=3)))
    seen, _ = by_columns(chunks, version, size_max=20_000)
    assert seen == one_by_one(raw, version, size_max=20_000)


@pytest.mark.parametrize("version", [V311, V5])
@given(raw=st.binary(max_size=60))
@example(raw=b"\x30\x80\x80\x80\x80\x00")
@example(raw=b"\x30\xff\xff\xff\x7f")
@example(raw=b"\x30\x00")
@example(raw=b"\x40\x02\x00\x00")
@example(raw=b"\x32\x05\x00\x01t\x00\x00")
@example(raw=b"\x38\x03\x00\x01t")
@example(raw=b"\x36\x05\x00\x01t\x00\x01")
@example(raw=b"\x30\x84\x00\x00\x01t\x00")
def test_any_bytes_give_what_the_codec_gives(version, raw):
    seen, _ = by_columns([raw], version)
    assert seen == one_by_one(raw, version)


@given(topics, st.binary(max_size=300), st.integers(0, 2), packet_ids, st.binary(max_size=8))
def test_an_incomplete_packet_is_left_alone(topic, payload, qos, packet_id, _):
    raw = codec.encode(p.Publish(topic, payload, qos, packet_id=packet_id if qos else 0), V5)
    for end in {1, 2, 3, len(raw) // 2, len(raw) - 1}:
        inbox, aliases = Inbox(), Aliases()
        assert scan(raw[:end], 0, V5, inbox, aliases.topic_of, aliases.names, NO_LIMIT) == 0
        assert not inbox.topics and not inbox.acked


def test_what_is_too_large_is_left_to_the_codec_as_soon_as_its_length_is_known():
    raw = codec.encode(p.Publish("t", b"x" * 1000), V311)
    for end in (3, len(raw)):
        inbox, aliases = Inbox(), Aliases()
        assert scan(raw[:end], 0, V311, inbox, aliases.topic_of, aliases.names, len(raw) - 1) == 0
    inbox = Inbox()
    assert scan(raw, 0, V311, inbox, aliases.topic_of, aliases.names, len(raw)) == len(raw)
    assert inbox.payloads == [b"x" * 1000]


@pytest.mark.parametrize("size", [20_000, 2_097_140, 2_097_160])
def test_large_payloads(size):
    raw = codec.encode(p.Publish("t", bytes(size), 1, packet_id=3), V311) + codec.encode(p.Puback(4), V311)
    seen, _ = by_columns([raw], V311)
    assert [len(payload) for _, payload, _, _ in seen.publishes] == [size]
    assert seen.ids == [3] and seen.acked == [4]


def test_many_properties_go_the_long_way_and_come_to_the_same():
    wire = properties.encode({"user_properties": [("k" * 80, "v" * 80)]})
    raw = codec.encode(p.Publish("t", b"1", 1, packet_id=1, properties=wire), V5)
    raw += codec.encode(p.Publish("t", b"2", 1, packet_id=2), V5)
    seen, slow = by_columns([raw], V5)
    assert slow == 1 and seen == one_by_one(raw, V5)
    assert [extra for *_, extra in seen.publishes] == [wire, None]


# -- answers ---------------------------------------------------------------------------------------------


@given(st.lists(packet_ids, min_size=1, max_size=50))
def test_pubacks_decode_to_themselves(ids):
    raw = pubacks([PACKET_IDS[n] for n in ids])
    assert decoded(raw, V311) == decoded(raw, V5) == [p.Puback(n) for n in ids]


@given(st.lists(st.tuples(st.sampled_from(["a", "b", "c"]), st.sampled_from([0, 1, 4, 5]), packet_ids), min_size=1))
def test_pubacks_tell_who_was_not_heard(sent):
    ids = [PACKET_IDS[n] for _, flag, n in sent if flag & 3]
    raw = pubacks_where(ids, [t for t, _, _ in sent], [f for _, f, _ in sent], {"a", "b"})
    expected = [
        p.Puback(n, 0 if topic != "c" else Reason.NO_MATCHING_SUBSCRIBERS) for topic, flag, n in sent if flag & 3
    ]
    assert decoded(raw, V5) == expected


def decoded(raw: bytes, version: int) -> list[p.Packet]:
    found, at = [], 0
    while at < len(raw):
        first, start, at = codec.frame(raw, at)
        found.append(codec.decode_for_client(first, raw[start:at], version))
    return found


# -- deliveries ------------------------------------------------------------------------------------------

STREAM = Stream("messages", 0, 1)
row = st.fixed_dictionaries(
    {
        "topic": topics | st.sampled_from(["t", "ü/€", "x" * 200]),
        "payload": st.binary(max_size=40) | st.integers(100, 140).map(bytes) | st.integers(16_360, 16_390).map(bytes),
        "qos": st.integers(0, 2),
        "retain": st.booleans(),
        "properties": st.none()
        | message_wire.filter(bool).map(lambda raw: raw if properties.expiry_of(raw) != 0 else None),
    }
)


@given(
    found=st.lists(row, min_size=1, max_size=8),
    version=st.sampled_from([V311, V5]),
    qos=st.integers(0, 2),
    as_published=st.booleans(),
    identifier=st.sampled_from([0, 1, 127, 128, 268_435_455]),
    dup_below=st.integers(0, 4),
    retained=st.booleans(),
)
def test_a_delivery_decodes_to_the_message(found, version, qos, as_published, identifier, dup_below, retained):
    found = [one for one in found if not one["topic"].startswith("$")]
    session = Session("me", 0)
    session.subscribe(Subscription("#", qos, retain_as_published=as_published, identifier=identifier))
    session.positions.dup_below[STREAM] = dup_below
    batch = Batch(
        [one["topic"] for one in found],
        [one["payload"] for one in found],
        "somebody",
        [one["qos"] | (RETAIN if one["retain"] else 0) for one in found],
        [one["properties"] for one in found] if any(one["properties"] for one in found) else None,
    )
    session.outgoing.put(Rows(None if retained else STREAM, range(len(found)), batch, 0), range(len(found)))
    out: list[bytes] = []
    size = session.outgoing.take(out, 65_535, 1 << 30, version, 1 << 30, 0.0)
    raw = b"".join(out)
    assert size >= len(raw) - len(found) * 2 and size <= len(raw) + len(found) * 2, "roughly the bytes it made"
    number = 0
    expected = []
    for offset, one in enumerate(found):
        quality = min(qos, one["qos"])
        number += quality > 0
        expected.append(
            p.Publish(
                one["topic"],
                one["payload"],
                quality,
                retained or (as_published and one["retain"]),
                not retained and quality > 0 and offset < dup_below,
                number if quality else 0,
                (one["properties"] or b"") if version == V5 else b"",
                0,
                (identifier,) if identifier and version == V5 else (),
            )
        )
    assert decoded(raw, version) == expected


def test_lengths_and_topics_as_they_stand_in_a_packet():
    for size in [0, 1, 127, 128, 16_383, 16_384, 2_097_151, 2_097_152]:
        assert remaining_length(size) == to_varint(size)
    assert topic_bytes("ü") == b"\x00\x02\xc3\xbc" == topic_bytes("ü")
