"""A node is emptied for a restart: clients are told where to go, groups go first, and nothing is lost on the way."""

from __future__ import annotations

import subprocess
import threading
import time
from collections import Counter
from collections.abc import Callable

import httpx
import paho.mqtt.client as paho
import pytest
from paho.mqtt.enums import CallbackAPIVersion
from paho.mqtt.packettypes import PacketTypes

from balancer import Balancer
from e2e.clients import V5, V311, to_paho
from e2e.cluster.conftest import LATE_SECONDS, At, Cluster
from e2e.conftest import durable
from e2e.groups.members import Connect, Ledger, Member, Publisher, holdfast, settled
from e2e.raw import Raw, text
from node import Node
from processes import wait_for

USE_ANOTHER_SERVER = 0x9C
STOP_SECONDS = 40.0
EXPIRY = b"\x11\x00\x00\x0e\x10"
REFERENCE = b"\x1c" + text("other.example:1883")


def drain(node: Node, *more: str) -> str:
    return holdfast(node, "node", "drain", *more)


def drained(node: Node) -> str:
    return str(node.get("/api/v1/nodes/drain")["state"])


def packets(data: bytes) -> bytes:
    """The body of the only packet."""
    assert len(data) == 2 + data[1], data.hex(" ")
    return data[2:]


def test_clients_are_told_where_to_go_and_new_ones_are_refused(cluster: Cluster, at: At, name: str) -> None:
    one, two, _ = cluster
    with Raw(one.mqtt_port, 5) as new, Raw(one.mqtt_port, 4) as old:
        assert new.connect(f"{name}-5", clean=False, properties=EXPIRY)[1] == 0
        new.subscribe(f"{name}/#")
        assert old.connect(f"{name}-3", clean=False)[1] == 0
        said = drain(one, "--to", "other.example:1883")
        assert said.splitlines() == [f"one: {said.split()[1]} clients are sent away", "one: empty"]
        assert int(said.split()[1]) >= 2
        expected = bytes([USE_ANOTHER_SERVER, len(REFERENCE)]) + REFERENCE
        assert packets(new.ended()) == expected
        assert old.ended() == b"", "MQTT 3 has no word for it"
    with Raw(one.mqtt_port, 5) as late:
        assert late.connect(f"{name}-5") == bytes([0, USE_ANOTHER_SERVER, len(REFERENCE)]) + REFERENCE
    with Raw(one.mqtt_port, 4) as late:
        assert late.connect(f"{name}-3") == b"\x00\x03"
    answer = httpx.get(f"{one.http}/readyz")
    assert (answer.status_code, answer.text) == (503, "not ready: this node is drained\n")
    assert httpx.get(f"{one.http}/healthz").status_code == 200, "it stays up"
    rows = {row["node"]: row["draining"] for row in two.get("/api/v1/nodes")["nodes"]}
    assert rows == {"one": True, "three": False, "two": False}
    for client_id in (f"{name}-5", f"{name}-3"):
        assert two.get(f"/api/v1/sessions/{client_id}")["connected"] is False, "saved, not left to the sweep"
    began = time.monotonic()
    assert at(two, f"{name}-5", **durable(V5)).session_present
    assert at(two, f"{name}-3", V311, **durable(V311)).session_present
    assert time.monotonic() - began < LATE_SECONDS


def test_clients_go_at_the_pace(cluster: Cluster, name: str) -> None:
    one, _, _ = cluster
    raws = [Raw(one.mqtt_port, 5) for _ in range(60)]
    try:
        for n, raw in enumerate(raws):
            raw.connect(f"{name}-{n}")
        began = time.monotonic()
        gone: dict[int, float] = {}

        def watch(n: int) -> None:
            assert packets(raws[n].ended())[0] == USE_ANOTHER_SERVER
            gone[n] = time.monotonic() - began

        threads = [threading.Thread(target=watch, args=(n,), daemon=True) for n in range(60)]
        for thread in threads:
            thread.start()
        drain(one, "--rate", "20")
        for thread in threads:
            thread.join(20)
        assert len(gone) == 60
        assert 2.5 < max(gone.values()) < 3 + LATE_SECONDS
        assert gone[0] < gone[59], "who came first goes first"
    finally:
        for raw in raws:
            raw.sock.close()


def test_it_ends_when_it_is_empty_if_told_so(cluster: Cluster, at: At, name: str) -> None:
    one, two, _ = cluster

    def nodes() -> list[str]:
        return [row["node"] for row in two.get("/api/v1/nodes")["nodes"]]

    # A process of that name that was killed before keeps its lease until that runs out.
    wait_for(lambda: nodes() == ["one", "three", "two"], what="each node once")
    client = at(one, name, **durable(V5))
    drain(one, "--stop")
    assert client.ended() == USE_ANOTHER_SERVER
    process = one._process
    assert process is not None
    assert process.wait(STOP_SECONDS) == 0
    assert '"message": "stopped"' in one.logs()
    assert nodes() == ["three", "two"], "its lease was given back"


def test_who_may_drain(cluster: Cluster) -> None:
    one, _, _ = cluster
    assert httpx.post(f"{one.http}/api/v1/nodes/drain", json={"clients_per_sec": 0}).status_code == 422
    assert drained(one) == "serving"
    with pytest.raises(AssertionError, match="no node answers"):
        holdfast(one, "node", "ls", "--http", "127.0.0.1:1")


# -- groups ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def member(ledger: Ledger) -> object:
    made: list[Member] = []

    def connect(node: Node, client_id: str, share: str | None, **how: object) -> Member:
        made.append(Member(node.mqtt_port, client_id, share, ledger, **how))  # type: ignore[arg-type]
        return made[-1]

    yield connect
    for each in made:
        each.close()


@pytest.fixture
def ledger() -> Ledger:
    return Ledger()


def leads(node: Node, group: str) -> bool:
    return f"leading group {group} under" in node.logs()


def test_groups_are_handed_over_before_clients_go(cluster: Cluster, member: Connect, ledger: Ledger, name: str) -> None:
    """Even a group whose members are all on the node that goes: it is led elsewhere, and delivery goes on."""
    one, two, three = cluster
    group = f"g:{name}/#"
    members = [member(one, f"{name}-{n}", f"$share/g/{name}/#", durable=True) for n in range(3)]
    settled(one, group, [each.client_id for each in members])
    assert leads(one, group)
    with Publisher(two.mqtt_port, name) as publisher:
        ledger.await_acked(publisher.publish(f"{name}/x", 100))
        draining = threading.Thread(target=drain, args=(one, "--rate", "0.25"), daemon=True)
        draining.start()
        wait_for(lambda: leads(two, group) or leads(three, group), 20, "another node leads it")
        wait_for(lambda: drained(one) == "moving", 20, "groups are handed over")
        assert sum(not each.closed_by_server.is_set() for each in members) >= 2, "and most clients are still here"
        ledger.await_acked(publisher.publish(f"{name}/x", 100))
        first = wait_for(lambda: next((m for m in members if m.closed_by_server.is_set()), None), 20, "one went")
        back = member(two, first.client_id, None, durable=True)
        assert back.session_present
        ledger.await_acked(publisher.publish(f"{name}/x", 100))
        holdfast(one, "node", "drain", "--rate", "100")  # asked again: at once, then
        draining.join(20)
        for each in members:
            assert each.reason == USE_ANOTHER_SERVER
        ledger.await_acked(publisher.publish(f"{name}/x", 100))
    ledger.check()


# -- a rolling restart -------------------------------------------------------------------------------------------------


class Traveller:
    """A client that comes back by itself, through the balancer, with everything it had under way."""

    def __init__(self, port: int, client_id: str, heard: Callable[[str], None] | None = None):
        self.client = client = paho.Client(CallbackAPIVersion.VERSION2, client_id, protocol=paho.MQTTv5)
        client.reconnect_delay_set(0.05, 0.2)
        client.max_inflight_messages_set(50)
        self.connects = 0
        self.moved = 0
        self.sent: dict[int, str] = {}
        self.acked: set[int] = set()
        """Numbers in `sent`; an acknowledgement may be faster than the note of its number."""
        self.lost_sessions = 0
        self._subscribed = threading.Event()
        client.on_connect = self._on_connect
        client.on_disconnect = self._on_disconnect
        client.on_publish = lambda c, u, mid, reason, p: self.acked.add(mid)
        client.on_subscribe = lambda *_: self._subscribed.set()
        if heard is not None:
            client.on_message = lambda c, u, message: heard(message.payload.decode())
        properties = to_paho(PacketTypes.CONNECT, {"SessionExpiryInterval": 3600})
        client.connect("127.0.0.1", port, 30, clean_start=False, properties=properties)
        client.loop_start()
        wait_for(lambda: self.connects, 10, f"{client_id} is connected")

    def _on_connect(self, client: object, user: object, flags: paho.ConnectFlags, reason: object, _: object) -> None:
        if reason == 0:
            self.lost_sessions += self.connects > 0 and not flags.session_present
            self.connects += 1

    def _on_disconnect(self, c: object, u: object, flags: object, reason: paho.ReasonCode, _: object) -> None:
        self.moved += reason.value == USE_ANOTHER_SERVER

    def subscribe(self, topic: str, qos: int) -> None:
        self.client.subscribe(topic, qos)
        assert self._subscribed.wait(10)

    def publish(self, topic: str, payload: str, qos: int) -> None:
        self.sent[self.client.publish(topic, payload, qos).mid] = payload

    def close(self) -> None:
        self.client.on_publish = None
        self.client.disconnect()
        self.client.loop_stop()


def test_a_rolling_restart_under_load_loses_nothing(cluster: Cluster, name: str) -> None:
    heard: dict[int, Counter[str]] = {1: Counter(), 2: Counter()}
    with Balancer(cluster) as balancer:
        subscribers = [
            Traveller(balancer.port, f"{name}-s{qos}", lambda t, q=qos: heard[q].update([t])) for qos in (1, 2)
        ]
        for qos, subscriber in enumerate(subscribers, 1):
            subscriber.subscribe(f"{name}/{qos}/#", qos)
        publishers = [Traveller(balancer.port, f"{name}-p{n}") for n in range(6)]
        everybody = [*subscribers, *publishers]
        stopping = threading.Event()

        def publish() -> None:
            number = 0
            while not stopping.wait(0.01):
                for n, publisher in enumerate(publishers):
                    qos = 1 + n % 2
                    if len(publisher.sent) - len(publisher.acked) < 500:
                        publisher.publish(f"{name}/{qos}/{n}", f"{n}-{number}", qos)
                number += 1

        load = threading.Thread(target=publish, daemon=True)
        load.start()
        try:
            for node in cluster:
                wait_for(lambda: all(each.client.is_connected() for each in everybody), 20, "everybody is connected")
                drain(node, "--rate", "20", "--stop")
                process = node._process
                assert process is not None
                assert process.wait(STOP_SECONDS) == 0
                node.start()
            before = len(publishers[0].acked)
            wait_for(lambda: len(publishers[0].acked) > before + 50, 20, "publishing goes on")
        finally:
            stopping.set()
            load.join(10)
        wanted = {qos: {t for p in publishers[qos - 1 :: 2] for t in p.sent.values()} for qos in (1, 2)}
        wait_for(lambda: all(len(p.acked) == len(p.sent) for p in publishers), 30, "everything acknowledged")
        for qos in (1, 2):
            wait_for(lambda q=qos: heard[q].keys() >= wanted[q], 30, f"everything of QoS {qos} received")
        for each in everybody:
            each.close()
    assert sum(each.moved for each in everybody) >= 3, "they were moved, not lost"
    assert not any(each.lost_sessions for each in everybody)
    assert sum(len(each) for each in wanted.values()) > 500
    assert heard[2].keys() == wanted[2]
    twice = {text for text, count in heard[2].items() if count > 1}
    rows = cluster[0].get("/api/v1/messages", filter=f"{name}/2/#", limit=10_000)["messages"] if twice else []
    stored = Counter(row["payload"] for row in rows if row["payload"] in twice)
    assert not twice, f"QoS 2 came twice: {sorted(twice)[:10]}; so often in the log: {stored.most_common(10)}"


def test_a_drain_is_shown_by_help() -> None:
    from node import holdfast_command

    shown = subprocess.run([holdfast_command(), "node", "drain", "--help"], capture_output=True, text=True, timeout=60)
    assert shown.returncode == 0
    for word in ("--to", "--rate", "--stop", "--no-wait"):
        assert word in shown.stdout
