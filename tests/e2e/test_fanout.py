"""What becomes of deliveries to vehicles, seen from their sockets: sent once, in order, and ended as they answered."""

from __future__ import annotations

import contextlib
import hashlib
import json
import sqlite3
import struct
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from e2e.clients import V5, V311
from e2e.conftest import NewStore
from e2e.fleet import AN_HOUR, SOCKETS, Sent, Vehicle, api, comes, counts, ended, order, send, show, why
from e2e.raw import Raw, text
from node import Node
from processes import wait_for

SQLITE = pytest.mark.parametrize("new_store", ["sqlite"], indirect=True)
"""Of what has nothing to do with how it is stored."""


@pytest.fixture
def node(new_store: NewStore, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Node]:
    settings = {"fanout.backoff_secs": 0.2, "fanout.sweep_secs": 0.5, "fanout.attempts_max": 3}
    with Node(tmp_path_factory.mktemp("fanout"), store=new_store(), settings=settings) as running:
        yield running
    while SOCKETS:
        SOCKETS.pop().close()


# -- one at a time, in order ---------------------------------------------------------------------------------


@pytest.mark.parametrize("version", [V311, V5])
def test_a_vehicle_gets_one_at_a_time_in_the_order_of_lanes(node: Node, version: int) -> None:
    send(node, "task_a_1", "first", "v1")
    send(node, "task_b_1", "second", "v1")
    send(node, "task_c_1", "urgent", "v1", priority=9)
    vehicle = Vehicle(node, "v1", version).subscribe()
    for topic, data in (("task_c_1", b"urgent"), ("task_a_1", b"first"), ("task_b_1", b"second")):
        sent = vehicle.got()
        assert (sent.topic, sent.payload) == (f"agent/v1/proxy/request/{topic}", data)
        assert (sent.qos, sent.dup) == (1, False)
        vehicle.hears_nothing()
        vehicle.ack(sent)
    for request_id in ("task_a_1", "task_b_1", "task_c_1"):
        comes(node, request_id, acked=1)
    assert sorted(ended(node, "v1")) == [(f"task_{name}_1", "acked") for name in "abc"]
    vehicle.ack(sent)  # doubled: no effect
    vehicle.hears_nothing()
    assert counts(node, "task_b_1") == {"acked": 1}


def test_a_request_over_mqtt_is_durable_when_it_is_acknowledged(node: Node) -> None:
    with Raw(node.mqtt_port, V5) as publisher:
        publisher.connect("platform")
        request = {"request_id": "task_a_1", "ids": ["v1", "v2"], "data": "aGVsbG8=", "encoding": "base64"}
        publisher.publish("$fanout/request", json.dumps(request).encode(), pid=7)
        assert publisher.read() == (0x40, b"\x00\x07")
        node.kill()
    node.start()
    vehicle = Vehicle(node, "v1").subscribe()
    sent = vehicle.got()
    assert sent.payload == b"hello"
    vehicle.ack(sent)
    comes(node, "task_a_1", acked=1, waiting=1)


@SQLITE
@pytest.mark.parametrize(
    ("payload", "says"),
    [
        (b"not json", b"is JSON"),
        (b'{"request_id": "task_a_1", "data": "x"}', b"ids"),
        (b'{"request_id": "task_a_1", "ids": ["a/b"], "data": "x"}', b"'a/b'"),
        (b'{"request_id": "task_a_1", "ids": ["a", "a"], "data": "x"}', b"'a' is given twice"),
        (b'{"request_id": "job_1", "ids": ["a"], "data": "x"}', b"job_1"),
        (b'{"request_id": "task_a_1", "ids": ["a"], "data": "x", "color": 1}', b"color"),
        (b'{"request_id": "task_a_1", "ids": ["a"], "data_sha1": "' + b"0" * 40 + b'"}', b"0" * 40),
        (b'{"request_id": "task_a_1", "ids": ["a"], "data": "' + b"x" * (600 << 10) + b'"}', b"614400"),
    ],
)
def test_a_bad_request_is_refused_with_its_reason_and_stores_nothing(node: Node, payload: bytes, says: bytes) -> None:
    with Raw(node.mqtt_port, V5) as publisher:
        publisher.connect("platform")
        publisher.publish("$fanout/request", payload, pid=7)
        first, body = publisher.read()
        assert (first, body[:3]) == (0x40, b"\x00\x07\x99") and says in body
        publisher.send(0xC0)
        assert publisher.read()[0] == 0xD0, "it may go on"
    with Raw(node.mqtt_port, V311) as publisher:
        publisher.connect("platform-3")
        publisher.publish("$fanout/request", payload, pid=7)
        assert publisher.ended() == b"", "MQTT 3 has no words for it"
    with api(node) as client:
        assert client.get("/fanout").json()["campaigns"] == []


@SQLITE
def test_control_topics_keep_nothing_and_cannot_be_read(node: Node) -> None:
    with Raw(node.mqtt_port, V5) as client:
        client.connect("curious")
        assert client.subscribe("$fanout/#")[-1] >= 0x80
        assert client.subscribe("$fanout/request")[-1] >= 0x80
        client.send(0x33, text("$fanout/request") + b"\0\7\0" + b"{}")
        assert client.read()[1][2] == 0x83, "there is nothing to retain"


@SQLITE
def test_fan_out_is_not_a_publish(node: Node) -> None:
    with Raw(node.mqtt_port, V5) as monitor:
        monitor.connect("monitor")
        monitor.subscribe("#")
        monitor.subscribe("agent/#", pid=2)
        send(node, "task_a_1", "secret", "v1")
        vehicle = Vehicle(node, "v1").subscribe()
        vehicle.ack(vehicle.got())
        comes(node, "task_a_1", acked=1)
        monitor.send(0xC0)
        assert monitor.read()[0] == 0xD0
    with api(node) as client:
        assert client.get("/messages").json()["messages"] == []


@SQLITE
def test_a_payload_that_was_sent_apart_is_referred_to(node: Node) -> None:
    data = bytes(range(256)) * 64
    name = hashlib.sha1(data).hexdigest()
    with Raw(node.mqtt_port, V5) as publisher:
        publisher.connect("platform")
        publisher.publish(f"$fanout/data/{name}", data, pid=7)
        assert publisher.read() == (0x40, b"\x00\x07")
        publisher.publish(f"$fanout/data/{'0' * 40}", data, pid=8)
        assert name.encode() in publisher.read()[1], "it says which SHA-1 it has"
    with api(node) as client:
        request = {"request_id": "task_a_1", "ids": ["v1"], "data_sha1": name}
        assert client.post("/fanout", json=request).status_code == 202
    assert Vehicle(node, "v1").subscribe().got().payload == data


# -- which session is the vehicle ------------------------------------------------------------------------------


@SQLITE
def test_only_a_subscription_of_its_own_at_qos_1_makes_a_vehicle(node: Node) -> None:
    send(node, "task_a_1", "x", "v1")
    vehicle = Vehicle(node, "v1").subscribe(qos=0)
    vehicle.hears_nothing()
    assert why(node, "v1") == "not_subscribed"
    vehicle.subscribe("task_b_1")
    vehicle.hears_nothing()
    assert why(node, "v1") == "not_subscribed"
    send(node, "task_b_1", "y", "v1")
    sent = vehicle.got()
    assert sent.payload == b"y", "what it is not subscribed to blocks nobody"
    vehicle.ack(sent)
    with Raw(node.mqtt_port, V5) as gateway:
        gateway.connect("gateway")
        gateway.subscribe("agent/+/proxy/request/+")
        gateway.send(0xC0)
        assert gateway.read()[0] == 0xD0, "a monitor is no vehicle"
    vehicle.subscribe()
    assert vehicle.got().payload == b"x"


@SQLITE
def test_the_latest_of_two_sessions_is_the_vehicle(node: Node) -> None:
    with Raw(node.mqtt_port, V5) as old, Raw(node.mqtt_port, V5) as new:
        for raw, name in ((old, "old"), (new, "new")):
            raw.connect(name)
            raw.subscribe("agent/v1/proxy/request/+")
        send(node, "task_a_1", "x", "v1")
        assert new.read()[0] >> 4 == 3
        old.send(0xC0)
        assert old.read()[0] == 0xD0


# -- connections that end --------------------------------------------------------------------------------------


def test_a_session_that_is_kept_gets_it_again_under_the_same_packet_id(node: Node) -> None:
    send(node, "task_a_1", "first", "v1")
    vehicle = Vehicle(node, "v1").subscribe()
    before = vehicle.got()
    vehicle.gone()
    send(node, "task_b_1", "urgent", "v1", priority=9)
    comes(node, "task_a_1", waiting=1)
    again = Vehicle(node, "v1")
    assert again.present
    sent = again.got()
    assert (sent.payload, sent.packet_id, sent.dup) == (b"first", before.packet_id, True)
    again.ack(sent)
    assert again.got().payload == b"urgent"
    comes(node, "task_a_1", acked=1)


def test_after_a_crash_it_comes_again_under_the_same_packet_id(node: Node) -> None:
    send(node, "task_a_1", "first", "v1")
    vehicle = Vehicle(node, "v1").subscribe()
    before = vehicle.got()
    assert counts(node, "task_a_1") == {"in_flight": 1}
    node.kill()
    node.start()
    again = Vehicle(node, "v1")
    sent = again.got()
    assert (sent.payload, sent.packet_id, sent.dup) == (b"first", before.packet_id, True)
    again.ack(sent)
    comes(node, "task_a_1", acked=1)
    again.hears_nothing()


@SQLITE
def test_a_session_that_begins_anew_gets_it_as_if_for_the_first_time(node: Node) -> None:
    send(node, "task_a_1", "first", "v1")
    vehicle = Vehicle(node, "v1").subscribe()
    vehicle.got()
    vehicle.gone()
    anew = Vehicle(node, "v1", clean=True).subscribe()
    sent = anew.got()
    assert (sent.payload, sent.dup) == (b"first", False)
    anew.ack(sent)
    comes(node, "task_a_1", acked=1)


@SQLITE
def test_a_takeover_takes_what_is_in_flight(node: Node) -> None:
    send(node, "task_a_1", "first", "v1")
    vehicle = Vehicle(node, "v1").subscribe()
    before = vehicle.got()
    taker = Vehicle(node, "v1")
    sent = taker.got()
    assert (sent.packet_id, sent.dup) == (before.packet_id, True)
    taker.ack(sent)
    comes(node, "task_a_1", acked=1)


@SQLITE
def test_unsubscribing_leaves_what_is_in_flight_to_be_answered(node: Node) -> None:
    send(node, "task_a_1", "first", "v1")
    send(node, "task_b_1", "second", "v1")
    vehicle = Vehicle(node, "v1").subscribe()
    sent = vehicle.got()
    vehicle.raw.send(0xA2, b"\0\2\0" + text("agent/v1/proxy/request/+"))
    assert vehicle.raw.read()[0] == 0xB0
    vehicle.ack(sent)
    comes(node, "task_a_1", acked=1)
    vehicle.hears_nothing()
    vehicle.subscribe()
    assert vehicle.got().payload == b"second"


# -- answers ---------------------------------------------------------------------------------------------------


@SQLITE
@pytest.mark.parametrize("reason", [0x87, 0x90, 0x99])
def test_some_refusals_are_final(node: Node, reason: int) -> None:
    send(node, "task_a_1", "first", "v1")
    send(node, "task_b_1", "second", "v1")
    vehicle = Vehicle(node, "v1").subscribe()
    vehicle.ack(vehicle.got(), reason)
    assert vehicle.got().payload == b"second", "the next one goes"
    assert counts(node, "task_a_1") == {"failed": 1}
    assert show(node, "task_a_1")["failures"] == {f"refused with 0x{reason:02X}": 1}


@SQLITE
def test_other_refusals_are_tried_again_as_new_packets(node: Node) -> None:
    send(node, "task_a_1", "first", "v1")
    send(node, "task_b_1", "behind", "v1")
    send(node, "task_c_1", "lower", "v1", priority=0)
    vehicle = Vehicle(node, "v1").subscribe()
    sent = vehicle.got()
    vehicle.ack(sent, 0x80)
    lower = vehicle.got()
    assert lower.payload == b"lower", "an attempt that waits blocks its own lane only"
    vehicle.ack(lower)
    for _ in range(2):
        again = vehicle.got()
        assert (again.payload, again.dup) == (b"first", False) and again.packet_id != sent.packet_id
        sent = again
        vehicle.ack(sent, 0x83)
    assert vehicle.got().payload == b"behind"
    assert counts(node, "task_a_1") == {"failed": 1}


@SQLITE
def test_what_is_larger_than_the_vehicle_takes_has_failed(node: Node) -> None:
    send(node, "task_a_1", "x" * 5_000, "v1")
    send(node, "task_b_1", "small", "v1")
    vehicle = Vehicle(node, "v1", properties=AN_HOUR + b"\x27\x00\x00\x08\x00").subscribe()
    assert vehicle.got().payload == b"small"
    assert show(node, "task_a_1")["failures"] == {"packet too large": 1}


# -- campaigns -------------------------------------------------------------------------------------------------


def test_the_same_data_joins_the_campaign_and_other_data_begins_a_new_one(node: Node) -> None:
    first = send(node, "task_a_1", "one", "v1", "v2")
    again = send(node, "task_a_1", "one", "v2", "v3")
    assert (again["number"], again["campaign"]) == (first["number"], first["campaign"]) and not again["began"]
    comes(node, "task_a_1", waiting=3)
    assert show(node, "task_a_1")["repeated"] == 1
    other = send(node, "task_a_1", "two", "v1")
    assert other["number"] == 2
    comes(node, "task_a_1", 1, waiting=2, superseded=1)
    vehicle = Vehicle(node, "v1").subscribe()
    sent = vehicle.got()
    assert sent.payload == b"two"
    vehicle.ack(sent)
    comes(node, "task_a_1", 2, acked=1)
    assert counts(node, "task_a_1", 1) == {"waiting": 2, "superseded": 1}, "an ack of the new settles nothing old"


def test_what_is_in_flight_is_superseded_only_when_it_comes_back(node: Node) -> None:
    send(node, "task_a_1", "old", "v1")
    vehicle = Vehicle(node, "v1").subscribe()
    vehicle.got()
    send(node, "task_a_1", "new", "v1")
    assert counts(node, "task_a_1", 1) == {"in_flight": 1}
    vehicle.gone()
    comes(node, "task_a_1", 1, superseded=1)
    assert Vehicle(node, "v1").got().payload == b"new"


@SQLITE
def test_a_paused_campaign_sends_nothing_until_it_is_resumed(node: Node) -> None:
    vehicle = Vehicle(node, "v1").subscribe()
    send(node, "task_a_1", "later", "v1", campaign={"paused": True})
    send(node, "task_b_1", "now", "v1")
    vehicle.ack(vehicle.got())
    comes(node, "task_b_1", acked=1)
    assert why(node, "v1") == "paused"
    assert order(node, "task_a_1", "resume")["state"] == "running"
    sent = vehicle.got()
    assert sent.payload == b"later"
    order(node, "task_a_1", "pause")
    vehicle.ack(sent)
    comes(node, "task_a_1", acked=1)


def test_a_cancelled_campaign_ends_what_waits_and_what_would_wait_again(node: Node) -> None:
    vehicle = Vehicle(node, "v1").subscribe()
    send(node, "task_a_1", "x", "v1", "v2", "v3")
    vehicle.got()
    assert order(node, "task_a_1", "cancel")["state"] == "cancelled"
    comes(node, "task_a_1", in_flight=1, cancelled=2)
    vehicle.gone()
    comes(node, "task_a_1", cancelled=3)
    wait_for(lambda: show(node, "task_a_1")["state"] == "closed", what="it to be closed")
    Vehicle(node, "v1").hears_nothing()
    assert ended(node, "v1") == [("task_a_1", "cancelled")]


@SQLITE
def test_an_ack_after_the_cancel_is_an_ack(node: Node) -> None:
    vehicle = Vehicle(node, "v1").subscribe()
    send(node, "task_a_1", "x", "v1")
    sent = vehicle.got()
    order(node, "task_a_1", "cancel")
    vehicle.ack(sent)
    comes(node, "task_a_1", acked=1)


def test_what_has_expired_is_not_sent(node: Node) -> None:
    send(node, "task_a_1", "x", "v1", "v2", expires=1)
    send(node, "task_b_1", "y", "v1", expires=3600)
    comes(node, "task_a_1", expired=2)
    sent = Vehicle(node, "v1").subscribe().got()
    assert sent.payload == b"y"
    at = sent.properties.index(b"\x02\x00\x00")
    assert 3500 < int.from_bytes(sent.properties[at + 1 : at + 5], "big") <= 3600


def test_waves_open_one_after_the_other(node: Node) -> None:
    vins = [f"v{n}" for n in range(8)]
    vehicles = {vin: Vehicle(node, vin).subscribe() for vin in vins}
    waves = [{"percent": 25, "acked_percent": 100}, {"vehicles": 2, "acked_percent": 100}]
    send(node, "task_a_1", "x", *vins, final=True, campaign={"waves": waves})
    comes(node, "task_a_1", waiting=6, in_flight=2)
    flying = _answer_all(node, vehicles, 2)
    comes(node, "task_a_1", waiting=4, in_flight=2, acked=2)
    flying |= _answer_all(node, {vin: v for vin, v in vehicles.items() if vin not in flying}, 2, 0x99)
    wait_for(lambda: show(node, "task_a_1")["state"] == "paused", what="the threshold to be missed")
    assert counts(node, "task_a_1") == {"waiting": 4, "acked": 2, "failed": 2}
    assert "wave 2" in show(node, "task_a_1")["reason"]
    order(node, "task_a_1", "advance")
    _answer_all(node, {vin: v for vin, v in vehicles.items() if vin not in flying}, 4)
    comes(node, "task_a_1", acked=6, failed=2)
    again = order(node, "task_a_1", "retry")
    assert again["retried"] == 2
    _answer_all(node, {vin: v for vin, v in vehicles.items() if vin in flying}, 2)
    comes(node, "task_a_1", acked=8)


def _answer_all(node: Node, vehicles: dict[str, Vehicle], count: int, reason: int = 0) -> set[str]:
    """So many of these have something, and answer it; which ones."""
    found: set[str] = set()

    def look() -> bool:
        for vin, vehicle in vehicles.items():
            if vin not in found:
                vehicle.raw.send(0xC0)
                first, body = vehicle.raw.read()
                if first != 0xD0:
                    found.add(vin)
                    vehicle.ack(Sent(first, body, V5), reason)
                    assert vehicle.raw.read()[0] == 0xD0
        return len(found) >= count

    wait_for(look, what=f"{count} to get something")
    return found


@SQLITE
def test_a_rate_limit_holds(node: Node) -> None:
    vehicles = {f"v{n}": Vehicle(node, f"v{n}").subscribe() for n in range(6)}
    send(node, "task_a_1", "x", *vehicles, campaign={"in_flight_max": 2})
    comes(node, "task_a_1", waiting=4, in_flight=2)
    _answer_all(node, vehicles, 6)
    comes(node, "task_a_1", acked=6)


# -- results ---------------------------------------------------------------------------------------------------


def test_a_campaign_may_ask_for_results(node: Node) -> None:
    vehicles = {f"v{n}": Vehicle(node, f"v{n}").subscribe() for n in range(3)}
    send(node, "task_a_1", "x", *vehicles, campaign={"result": True})
    sent = {vin: vehicle.got() for vin, vehicle in vehicles.items()}
    for vin, vehicle in vehicles.items():
        vehicle.ack(sent[vin])
    comes(node, "task_a_1", awaiting_result=3)
    said = {"v0": b'{"status": "done"}', "v1": b'{"success": false, "reason": "no room"}', "v2": b"whatever"}
    for vin, payload in said.items():
        properties = b"\x09\x00\x10" + (sent[vin].correlation if vin != "v2" else b"0" * 16)
        topic = text(f"agent/{vin}/proxy/ack/task_a_1")
        vehicles[vin].raw.send(0x32, topic + b"\0\5" + bytes([len(properties)]) + properties + payload)
        assert vehicles[vin].raw.read()[0] == 0x40
    comes(node, "task_a_1", acked=1, failed=1, awaiting_result=1)
    assert show(node, "task_a_1")["failures"] == {"result: no room": 1}
    vehicles["v2"].raw.publish("agent/v2/proxy/ack/task_a_1", b"fine", pid=6)
    comes(node, "task_a_1", acked=2, failed=1)


@SQLITE
def test_a_result_before_the_acknowledgement_is_one(node: Node) -> None:
    vehicle = Vehicle(node, "v1").subscribe()
    send(node, "task_a_1", "x", "v1")
    send(node, "task_b_1", "y", "v1")
    sent = vehicle.got()
    vehicle.raw.publish("agent/v1/proxy/ack/task_a_1", b"ok", pid=6)
    assert vehicle.raw.read()[0] == 0x40
    assert vehicle.got().payload == b"y"
    comes(node, "task_a_1", acked=1)
    vehicle.ack(sent)  # late: no effect
    vehicle.hears_nothing()


@SQLITE
def test_a_heartbeat_is_a_trigger_and_harmless(node: Node) -> None:
    vehicle = Vehicle(node, "v1").subscribe()
    for pid in range(1, 20):
        vehicle.raw.publish("ecp/v1/online", b"", pid=pid)
        assert vehicle.raw.read()[0] == 0x40
    send(node, "task_a_1", "x", "v1")
    sent = vehicle.got()
    vehicle.raw.publish("ecp/v1/online", b"", qos=0)
    vehicle.hears_nothing()
    vehicle.ack(sent)
    comes(node, "task_a_1", acked=1)


def test_a_restart_keeps_everything_in_its_place(node: Node) -> None:
    """What was acked stays so, what waits waits, and nobody gets anything twice."""
    vins = [f"v{n}" for n in range(20)]
    send(node, "task_a_1", "x", *vins)
    with contextlib.ExitStack() as stack:
        for vin in vins[:10]:
            vehicle = Vehicle(node, vin).subscribe()
            stack.callback(vehicle.gone)
            vehicle.ack(vehicle.got())
        comes(node, "task_a_1", acked=10, waiting=10)
        node.stop()
    node.start()
    comes(node, "task_a_1", acked=10, waiting=10)
    for vin in vins:
        vehicle = Vehicle(node, vin).subscribe()
        if vin in vins[:10]:
            vehicle.hears_nothing()
        else:
            vehicle.ack(vehicle.got())
    comes(node, "task_a_1", acked=20)


@SQLITE
def test_what_happens_to_campaigns_can_be_read(node: Node) -> None:
    with Raw(node.mqtt_port, V5) as operator:
        operator.connect("operator")
        assert operator.subscribe("$fanout/events/#")[-1] == 1
        send(node, "task_a_1", "x", "v1")
        said = []
        for verb in ("pause", "resume", "cancel"):
            order(node, "task_a_1", verb)
        while not said or said[-1]["state"] != "closed":
            _, pid, payload = operator.read_publish()
            operator.send(0x40, struct.pack("!H", pid))
            said.append(json.loads(payload))
        assert [one["state"] for one in said] == ["running", "paused", "running", "cancelled", "closed"]
        assert said[1] == {"request_id": "task_a_1", "number": 1, "state": "paused", "reason": "paused by an operator"}
    metrics = httpx.get(f"{node.http}/metrics").text
    assert "holdfast_fanout_vehicles 0.0" in metrics


def test_who_still_waits_is_listed(node: Node) -> None:
    vehicle = Vehicle(node, "v2").subscribe()
    send(node, "task_a_1", "x", "v1", "v2", "v3")
    vehicle.got()
    with api(node) as client:

        def listed(**query: Any) -> list[str]:
            answer = client.get("/fanout/task_a_1/deliveries", params=query)
            assert answer.status_code == 200, answer.text
            return [one["vin"] for one in answer.json()["deliveries"]]

        assert listed(state="waiting") == ["v1", "v3"] and listed(state="in_flight") == ["v2"]
        assert listed(state="waiting", after="v1", limit=1) == ["v3"] and listed() == []
        assert client.get("/fanout/task_a_1/deliveries", params={"state": ["waiting", "acked"]}).status_code == 422


# -- found by attacking it -------------------------------------------------------------------------------------


def say(vehicle: Vehicle, sent: Sent, payload: bytes) -> None:
    """A result, acknowledged by the node."""
    properties = b"\x09\x00\x10" + sent.correlation
    topic = text(sent.topic.replace("request", "ack"))
    vehicle.raw.send(0x32, topic + b"\0\5" + bytes([len(properties)]) + properties + payload)
    assert vehicle.raw.read()[0] == 0x40


@pytest.mark.parametrize("end", ["kill", "lose"])
def test_a_result_that_was_acknowledged_is_settled_whatever_happens_then(node: Node, end: str) -> None:
    send(node, "task_a_1", "x", "v1")
    vehicle = Vehicle(node, "v1").subscribe()
    say(vehicle, vehicle.got(), b"ok")
    if end == "kill":
        node.kill()
        node.start()
    else:
        vehicle.gone()
    wait_for(lambda: counts(node, "task_a_1") == {"acked": 1}, 20.0, "the result to be settled")
    Vehicle(node, "v1").hears_nothing()


@SQLITE
def test_an_acknowledgement_of_what_it_had_before_counts_however_early_it_comes(node: Node) -> None:
    for n in range(10):
        send(node, f"task_a_{n}", f"{n}", "v1")
        vehicle = Vehicle(node, "v1") if n else Vehicle(node, "v1").subscribe()
        sent = vehicle.got()
        vehicle.gone()
        comes(node, f"task_a_{n}", waiting=1)
        again = Vehicle(node, "v1")
        again.ack(sent)  # before it comes again, while that is being recorded, or just after
        again.raw.sock.settimeout(0.3)
        with contextlib.suppress(TimeoutError):
            again.ack(again.got())
        comes(node, f"task_a_{n}", acked=1)
        again.gone()


def test_what_expired_on_its_way_has_its_end_when_the_connection_is_lost(node: Node) -> None:
    send(node, "task_a_1", "x", "v1", expires=1)
    vehicle = Vehicle(node, "v1").subscribe()
    vehicle.got()
    order(node, "task_a_1", "pause")
    with api(node) as client:
        wait_for(lambda: client.get("/fanout/task_a_1").json()["counts"]["in_flight"] == 1, what="it to fly")
    time.sleep(2.5)  # past its expiry, and past a look of the keeper's
    vehicle.gone()
    comes(node, "task_a_1", expired=1)


@pytest.mark.parametrize("how", ["cancel", "retire"])
def test_who_is_taken_out_is_not_sent_to_again(node: Node, how: str) -> None:
    send(node, "task_a_1", "x", "v1", "v2")
    vehicle = Vehicle(node, "v1").subscribe()
    vehicle.got()
    if how == "cancel":
        order(node, "task_a_1", "cancel", vins=["v1"])
    else:
        with api(node) as client:
            assert client.post("/vehicles/v1/retire").status_code == 200
    assert counts(node, "task_a_1") == {"in_flight": 1, "waiting": 1}
    vehicle.gone()
    comes(node, "task_a_1", cancelled=1, waiting=1)
    Vehicle(node, "v1").hears_nothing()


@pytest.mark.parametrize("case", ["many between", "refused", "newer is paused"])
def test_what_comes_back_is_superseded_whatever_else_waits(node: Node, case: str) -> None:
    send(node, "task_a_1", "old", "v1")
    vehicle = Vehicle(node, "v1").subscribe()
    sent = vehicle.got()
    if case == "many between":
        for n in range(6):
            send(node, f"task_b_{n}", "other", "v1")
    send(node, "task_a_1", "new", "v1", **({"campaign": {"paused": True}} if case == "newer is paused" else {}))
    if case == "refused":
        vehicle.ack(sent, 0x80)
    else:
        vehicle.gone()
    comes(node, "task_a_1", 1, superseded=1)


def test_a_payload_that_was_damaged_is_whole_again_when_it_is_sent_again(tmp_path: Path) -> None:
    with Node(tmp_path / "node") as node:
        send(node, "task_a_1", "precious", "v1")
        with contextlib.closing(sqlite3.connect(node.folder / "data" / "holdfast.db")) as db, db:
            db.execute("update fanout_payloads set data = x'00'")
        send(node, "task_b_1", "precious", "v1")
        vehicle = Vehicle(node, "v1").subscribe()
        assert vehicle.got().payload == b"precious"
        vehicle.gone()
