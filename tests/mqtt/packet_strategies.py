"""Packets as Hypothesis draws them: every field, within what each protocol version can say."""

from __future__ import annotations

from functools import cache

from hypothesis import strategies as st

from holdfast.mqtt import packets as p
from holdfast.mqtt import properties, reasons

u16 = st.integers(0, 0xFFFF)
u32 = st.integers(0, 0xFFFFFFFF)
packet_ids = st.integers(1, 0xFFFF)
qualities = st.integers(0, 2)
identifiers = st.integers(1, 268_435_455)
blobs = st.binary(max_size=20)
texts = st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=8)
names = st.text(st.characters(codec="utf-8", exclude_categories=("Cc", "Cn", "Cs")), max_size=8)
topics = names.map(lambda text: text.replace("+", "").replace("#", "")).filter(bool)
levels = st.sampled_from(["", "a", "b", "ä", "$", "+", "vehicle"])
filters = st.builds(
    lambda front, tail: "/".join([*front, *tail]),
    st.lists(levels, max_size=4),
    st.sampled_from([["#"], ["x"], ["+"]]),
) | st.sampled_from(["$share/g/a/+", "$share/g/#", "$SYS/#"])
pairs = st.lists(st.tuples(texts, texts), min_size=1, max_size=3)
flags = st.booleans()

message_properties = st.fixed_dictionaries(
    {},
    optional={
        "payload_format": st.integers(0, 1),
        "message_expiry": u32,
        "content_type": texts,
        "response_topic": topics,
        "correlation_data": blobs,
        "user_properties": pairs,
    },
)
message_wire = message_properties.map(properties.encode)


def only(**optional: st.SearchStrategy) -> st.SearchStrategy:
    return st.fixed_dictionaries({}, optional={**optional, "user_properties": pairs})


connect_properties = only(
    session_expiry=u32,
    receive_maximum=st.integers(1, 0xFFFF),
    maximum_packet_size=st.integers(1, 0xFFFFFFFF),
    topic_alias_maximum=u16,
    request_response_information=flags,
    request_problem_information=flags,
    authentication_method=texts,
).flatmap(
    lambda found: (
        st.just(found) | blobs.map(lambda data: {**found, "authentication_data": data})
        if "authentication_method" in found
        else st.just(found)
    )
)
connack_properties = only(
    session_expiry=u32,
    receive_maximum=st.integers(1, 0xFFFF),
    maximum_qos=st.integers(0, 1),
    retain_available=flags,
    maximum_packet_size=st.integers(1, 0xFFFFFFFF),
    assigned_client_id=texts,
    topic_alias_maximum=u16,
    reason_string=texts,
    wildcard_subscription_available=flags,
    subscription_identifier_available=flags,
    shared_subscription_available=flags,
    server_keep_alive=u16,
    response_information=texts,
    server_reference=texts,
    authentication_method=texts,
    authentication_data=blobs,
)
reasoned = only(reason_string=texts)
nothing = st.just({})


def code(allowed: frozenset[int]) -> st.SearchStrategy[int]:
    return st.sampled_from(sorted(allowed))


def wills(version: int) -> st.SearchStrategy:
    v5 = version == p.V5
    return st.builds(
        p.Will,
        topic=topics,
        payload=blobs,
        qos=qualities,
        retain=flags,
        delay=u32 if v5 else st.just(0),
        properties=message_wire if v5 else st.just(b""),
    )


def connects(version: int) -> st.SearchStrategy:
    v5 = version == p.V5
    return st.builds(
        p.Connect,
        client_id=names if v5 else names.filter(bool),
        version=st.just(version),
        clean_start=flags,
        keep_alive=u16,
        username=names if not v5 else st.none() | names,
        password=st.none() | blobs,
        will=st.none() | wills(version),
        properties=connect_properties if v5 else nothing,
    )


def publishes(version: int, from_broker: bool) -> st.SearchStrategy:
    v5 = version == p.V5
    ids = st.lists(identifiers, max_size=3 if from_broker else 1).map(tuple)
    plain = st.builds(
        p.Publish,
        topic=topics,
        payload=blobs,
        qos=st.just(0),
        retain=flags,
        properties=message_wire if v5 else st.just(b""),
        topic_alias=u16 if v5 else st.just(0),
        subscription_identifiers=ids if v5 else st.just(()),
    )
    assured = st.builds(
        p.Publish,
        topic=topics,
        payload=blobs,
        qos=st.integers(1, 2),
        retain=flags,
        dup=flags,
        packet_id=packet_ids,
        properties=message_wire if v5 else st.just(b""),
    )
    by_alias = st.builds(p.Publish, topic=st.just(""), topic_alias=st.integers(1, 0xFFFF), payload=blobs)
    return plain | assured | by_alias if v5 else plain | assured


def both_ways(version: int) -> st.SearchStrategy:
    v5 = version == p.V5
    kinds = []
    for kind, allowed in (
        (p.Puback, reasons.IN_PUBACK),
        (p.Pubrec, reasons.IN_PUBACK),
        (p.Pubrel, reasons.IN_PUBREL),
        (p.Pubcomp, reasons.IN_PUBREL),
    ):
        kinds.append(st.builds(kind, packet_ids, code(allowed), reasoned) if v5 else st.builds(kind, packet_ids))
    if v5:
        method = only(authentication_method=texts, authentication_data=blobs, reason_string=texts)
        kinds.append(st.builds(p.Auth, code(reasons.IN_AUTH), method))
    return st.one_of(kinds)


def disconnects(version: int) -> st.SearchStrategy:
    if version < p.V5:
        return st.builds(p.Disconnect)
    found = only(session_expiry=u32, reason_string=texts, server_reference=texts)
    return st.builds(p.Disconnect, code(reasons.IN_DISCONNECT), found)


@cache
def from_client(version: int) -> st.SearchStrategy:
    v5 = version == p.V5
    shared = {"no_local": st.just(False)}
    options = {"retain_as_published": flags, "retain_handling": qualities} if v5 else {}
    request = st.builds(p.FilterRequest, filters, qualities, **shared, **options)
    if v5:
        own = filters.filter(lambda text: not text.startswith("$share/"))
        request |= st.builds(p.FilterRequest, own, qualities, no_local=flags, **options)
    some = only() if v5 else nothing
    return st.one_of(
        connects(version),
        publishes(version, from_broker=False),
        both_ways(version),
        st.builds(
            p.Subscribe,
            packet_ids,
            st.lists(request, min_size=1, max_size=4).map(tuple),
            st.just(0) | identifiers if v5 else st.just(0),
            some,
        ),
        st.builds(p.Unsubscribe, packet_ids, st.lists(filters, min_size=1, max_size=4).map(tuple), some),
        st.builds(p.Pingreq),
        disconnects(version),
    )


@cache
def from_broker(version: int) -> st.SearchStrategy:
    v5 = version == p.V5
    codes = code(reasons.IN_SUBACK if v5 else reasons.IN_SUBACK_3)
    refusals = (reasons.IN_CONNACK if v5 else reasons.IN_CONNACK_3) - {0}
    some = reasoned if v5 else nothing
    unsubscribed = st.lists(code(reasons.IN_UNSUBACK), min_size=1, max_size=4).map(tuple)
    kinds = [
        st.builds(p.Connack, st.just(0), flags, connack_properties if v5 else nothing),
        st.builds(p.Connack, code(refusals), st.just(False), connack_properties if v5 else nothing),
        publishes(version, from_broker=True),
        both_ways(version),
        st.builds(p.Suback, packet_ids, st.lists(codes, min_size=1, max_size=4).map(tuple), some),
        st.builds(p.Unsuback, packet_ids, unsubscribed if v5 else st.just(()), some),
        st.builds(p.Pingresp),
    ]
    return st.one_of(*kinds, disconnects(version)) if v5 else st.one_of(kinds)
