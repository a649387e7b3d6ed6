"""One client id, one session, whichever node: taken over from nodes that live, died or stood still."""

from __future__ import annotations

import json
import os
import queue
import signal
import struct
import threading
import time
from functools import partial

import httpx
import pytest

from e2e.clients import V5, V311, PahoClient, Refused, Will
from e2e.cluster.conftest import GRACE_SECONDS, LATE_SECONDS, LEASE_SECONDS, At, Cluster
from e2e.conftest import durable
from e2e.groups.members import holdfast
from e2e.raw import Raw
from node import Node
from processes import wait_for

TAKEN_OVER, ADMINISTRATIVE = 0x8E, 0x98
EXPIRY = b"\x11\x00\x00\x0e\x10"


def session_at(node: Node, client_id: str) -> dict[str, object]:
    return node.get(f"/api/v1/sessions/{client_id}")


def texts(client: PahoClient, count: int, seconds: float = 10.0) -> list[str]:
    return [message.text for message in client.take(count, seconds)]


def acknowledge(client: PahoClient, count: int, name: str) -> list[str]:
    """Takes and acknowledges so many; the node has read the acknowledgements when this returns."""
    found = client.take(count)
    for message in found:
        client.ack(message)
    client.publish(f"{name}-sync", b"")
    return [message.text for message in found]


# -- who is there ------------------------------------------------------------------------------------------------------


def test_every_node_knows_every_node(cluster: Cluster) -> None:
    for asked in cluster:
        found = {row["node"]: row for row in asked.get("/api/v1/nodes")["nodes"]}
        assert list(found) == ["one", "three", "two"]
        for node in cluster:
            row = found[node.node_id]
            assert row["mqtt"] == [f"mqtt://127.0.0.1:{node.mqtt_port}"]
            assert row["http"] == f"127.0.0.1:{node.http_port}"
            assert row["draining"] is False
            assert row["answers"] is (node is asked)
    shown = json.loads(holdfast(cluster[0], "node", "ls", "--json"))
    assert [row["node"] for row in shown] == ["one", "three", "two"]
    assert f"mqtt://127.0.0.1:{cluster[1].mqtt_port}" in holdfast(cluster[0], "node", "ls")


def test_a_node_that_died_is_forgotten_with_its_lease(cluster: Cluster) -> None:
    one, two, _ = cluster
    one.kill()
    wait_for(
        lambda: [row["node"] for row in two.get("/api/v1/nodes")["nodes"]] == ["three", "two"],
        LEASE_SECONDS + LATE_SECONDS,
        "its lease ends",
    )


# -- taken over --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("version", [V311, V5])
def test_takeover_from_a_live_node(cluster: Cluster, at: At, name: str, version: int) -> None:
    one, two, three = cluster
    old = at(one, name, version, manual_ack=True, **durable(version))
    old.subscribe(f"{name}/#", 1)
    publisher = at(three, f"{name}-p")
    for n in range(10):
        publisher.publish(f"{name}/x", str(n))
    assert acknowledge(old, 4, name) == ["0", "1", "2", "3"]
    old.take(6)
    began = time.monotonic()
    new = at(two, name, version, **durable(version))
    assert time.monotonic() - began < LATE_SECONDS
    assert old.ended() == (TAKEN_OVER if version == V5 else None)
    assert new.session_present
    again = new.take(6)
    assert [message.text for message in again] == ["4", "5", "6", "7", "8", "9"]
    assert all(message.dup for message in again)
    publisher.publish(f"{name}/x", b"end")
    assert new.until(b"end") == [], "what was acknowledged does not come again"
    assert session_at(one, name)["node"] == "two"


def test_takeover_from_a_killed_node(cluster: Cluster, at: At, name: str) -> None:
    one, two, _ = cluster
    old = at(one, name, manual_ack=True, **durable(V5))
    old.subscribe(f"{name}/#", 1)
    publisher = at(two, f"{name}-p")
    for n in range(10):
        publisher.publish(f"{name}/x", str(n))
    acknowledge(old, 4, name)
    wait_for(lambda: session_at(two, name)["in_flight"] == 6, what="the flush")
    killed = time.monotonic()
    one.kill()
    new = at(two, name, **durable(V5))
    assert time.monotonic() - killed < LEASE_SECONDS + LATE_SECONDS
    assert new.session_present
    publisher.publish(f"{name}/x", b"end")
    again = new.until(b"end")
    assert [message.text for message in again] == ["4", "5", "6", "7", "8", "9"]
    assert all(message.dup for message in again)


def test_of_two_who_take_at_once_one_stays(cluster: Cluster, at: At, name: str) -> None:
    one, two, three = cluster
    for turn in range(5):
        client_id = f"{name}-{turn}"
        old = at(one, client_id, **durable(V5))
        old.subscribe(f"{client_id}/#", 1)
        found: queue.Queue[PahoClient | Exception] = queue.Queue()

        def take(node: Node, client_id: str = client_id, found: queue.Queue[PahoClient | Exception] = found) -> None:
            try:
                found.put(at(node, client_id, **durable(V5)))
            except (Refused, AssertionError) as error:
                found.put(error)

        threads = [threading.Thread(target=take, args=(node,)) for node in (two, three)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(20)
        assert old.ended() == TAKEN_OVER
        takers = [found.get(timeout=1) for _ in threads]
        welcome = [taker for taker in takers if isinstance(taker, PahoClient)]
        assert welcome, takers
        wait_for(lambda w=welcome: sum(not taker.gone.empty() for taker in w) == len(w) - 1, what="one is left")
        at(one, f"{client_id}-p").publish(f"{client_id}/x", b"for one")
        stays = next(taker for taker in welcome if taker.gone.empty())
        assert stays.next().payload == b"for one"
        assert stays.session_present
        assert all(taker.messages.empty() for taker in welcome)


def test_a_node_that_stood_still_does_not_deliver(cluster: Cluster, at: At, name: str) -> None:
    """SIGSTOP for longer than the lease. It has plenty to send in its memory, and the acknowledgements that make room
    for it wait in its socket when it wakes: all of that is somebody else's by then."""
    one, two, _ = cluster
    with Raw(one.mqtt_port, 5) as old:
        assert old.connect(name, clean=False, properties=EXPIRY + b"\x21\x00\x0a")[1] == 0
        old.subscribe(f"{name}/#", 1)
        publisher = at(two, f"{name}-p")
        for n in range(60):
            publisher.publish(f"{name}/x", str(n))
        window = [old.read_publish() for _ in range(10)]
        os.kill(one.pid, signal.SIGSTOP)
        try:
            stopped = time.monotonic()
            for _, pid, _ in window:
                old.send(0x40, struct.pack("!H", pid))
            new = at(two, name, **durable(V5))
            assert time.monotonic() - stopped < LEASE_SECONDS + LATE_SECONDS
            assert new.session_present
            assert texts(new, 60) == [str(n) for n in range(60)]
        finally:
            os.kill(one.pid, signal.SIGCONT)
        first, body = old.read()
        assert (first, body[0]) == (0xE0, TAKEN_OVER)
        assert old.ended() == b""
        publisher.publish(f"{name}/x", b"end")
        assert new.until(b"end") == []
        assert new.gone.empty()
        wait_for(one.ready, LATE_SECONDS, "it serves again")


def test_a_node_that_stood_still_keeps_those_nobody_took(cluster: Cluster, at: At, name: str) -> None:
    one, two, _ = cluster
    client = at(one, name, **durable(V5))
    client.subscribe(f"{name}/#", 1)
    os.kill(one.pid, signal.SIGSTOP)
    try:
        publisher = at(two, f"{name}-p")
        publisher.publish(f"{name}/x", b"meanwhile")
        stopped = time.monotonic()
        wait_for(lambda: time.monotonic() > stopped + LEASE_SECONDS + 0.5, what="longer than the lease")
    finally:
        os.kill(one.pid, signal.SIGCONT)
    assert client.next().payload == b"meanwhile"
    publisher.publish(f"{name}/x", b"after")
    assert client.next().payload == b"after"
    assert client.gone.empty()


# -- what all nodes share ----------------------------------------------------------------------------------------------


def test_a_publisher_is_told_of_subscribers_on_other_nodes(cluster: Cluster, at: At, name: str) -> None:
    one, two, _ = cluster
    publisher = at(two, f"{name}-p")
    assert publisher.publish(f"{name}/x", b"nobody") == 0x10
    subscriber = at(one, name)
    subscriber.subscribe(f"{name}/+", 1)
    wait_for(lambda: publisher.publish(f"{name}/x", b"somebody") == 0, LATE_SECONDS, "the other node knows")
    subscriber.unsubscribe(f"{name}/+")
    wait_for(lambda: publisher.publish(f"{name}/x", b"nobody") == 0x10, LATE_SECONDS, "the other node knows")
    subscriber.subscribe(f"$share/g/{name}/#", 1)
    wait_for(lambda: publisher.publish(f"{name}/x", b"a group") == 0, LATE_SECONDS, "the other node knows")
    subscriber.disconnect()
    wait_for(lambda: publisher.publish(f"{name}/x", b"nobody") == 0x10, LATE_SECONDS, "the other node knows")


def test_a_durable_subscriber_that_is_away_is_a_subscriber(cluster: Cluster, at: At, name: str) -> None:
    one, two, _ = cluster
    away = at(one, name, **durable(V5))
    away.subscribe(f"{name}/x", 1)
    away.disconnect()
    publisher = at(two, f"{name}-p")
    wait_for(lambda: publisher.publish(f"{name}/x", b"for later") == 0, LATE_SECONDS, "the other node knows")


def test_retained_messages_are_on_all_nodes(cluster: Cluster, at: At, name: str) -> None:
    one, two, three = cluster
    publisher = at(one, f"{name}-p")
    publisher.publish(f"{name}/a", b"first", retain=True)
    publisher.publish(f"{name}/b", b"gone again", retain=True)
    publisher.publish(f"{name}/a", b"second", retain=True)
    publisher.publish(f"{name}/b", b"", retain=True)
    for node in (two, three):
        reader = at(node, f"{name}-{node.node_id}")
        reader.subscribe(f"{name}/#", 1)
        message = reader.next()
        assert (message.topic, message.payload, message.retain) == (f"{name}/a", b"second", True)
        reader.publish(f"{name}/end", b"end")
        assert reader.until(b"end") == []


# -- wills and expiry --------------------------------------------------------------------------------------------------


def test_the_will_of_a_killed_nodes_client_is_published_by_another(cluster: Cluster, at: At, name: str) -> None:
    one, two, three = cluster
    watcher = at(two, f"{name}-w")
    watcher.subscribe(f"{name}/#", 1)
    at(one, f"{name}-lost", will=Will(f"{name}/lost", b"lost"), **durable(V5))
    at(one, f"{name}-back", will=Will(f"{name}/back", b"back"), **durable(V5))
    killed = time.monotonic()
    one.kill()
    at(three, f"{name}-back", **durable(V5))
    assert watcher.next(LEASE_SECONDS + GRACE_SECONDS + LATE_SECONDS).payload == b"lost"
    assert time.monotonic() - killed > GRACE_SECONDS
    watcher.publish(f"{name}/end", b"end")
    assert watcher.until(b"end") == [], "whoever is back in time has no will published; nobody's comes twice"


def test_a_delayed_will_waits_for_its_client_on_any_node(cluster: Cluster, at: At, name: str) -> None:
    one, two, three = cluster
    watcher = at(two, f"{name}-w")
    watcher.subscribe(f"{name}/#", 1)
    for who in ("lost", "back"):
        will = Will(f"{name}/{who}", who.encode(), properties={"WillDelayInterval": 2})
        at(one, f"{name}-{who}", will=will, **durable(V5)).drop()
    began = time.monotonic()
    at(three, f"{name}-back", **durable(V5))
    wait_for(lambda: session_at(two, f"{name}-lost")["connected"] is False, what="the node noticed")
    one.kill()
    assert watcher.next(2 + LATE_SECONDS).payload == b"lost"
    assert time.monotonic() - began > 1.5
    watcher.publish(f"{name}/end", b"end")
    assert watcher.until(b"end") == []


def test_a_session_expires_wherever_its_client_was(cluster: Cluster, at: At, name: str) -> None:
    one, two, _ = cluster
    short = at(one, name, **durable(V5, 1))
    short.subscribe(f"{name}/#", 1)
    kept = at(one, f"{name}-kept", **durable(V5, 600))
    kept.subscribe(f"{name}/#", 1)
    one.kill()

    def gone() -> bool:
        return httpx.get(f"{two.http}/api/v1/sessions/{name}").status_code == 404

    wait_for(gone, LEASE_SECONDS + GRACE_SECONDS + 1 + LATE_SECONDS, "its expiry, counted from when it was noticed")
    assert not at(two, name, **durable(V5)).session_present
    assert at(two, f"{name}-kept", **durable(V5)).session_present


def test_wills_need_no_configured_node_id(
    trio: Cluster, at: At, name: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    named = trio[1]
    if not named.running:
        named.start()
    settings, store = named.settings, named.store
    folder = tmp_path_factory.mktemp("nameless")
    with Node(folder, store=store, node_id="", settings=settings) as nameless:
        watcher = at(named, f"{name}-w")
        watcher.subscribe(f"{name}/#", 1)
        at(nameless, name, will=Will(f"{name}/lost", b"lost"))
        (row,) = [
            row for row in named.get("/api/v1/nodes")["nodes"] if f"127.0.0.1:{nameless.http_port}" == row["http"]
        ]
        assert row["node"].startswith("node-")
        nameless.kill()
        assert watcher.next(LEASE_SECONDS + GRACE_SECONDS + LATE_SECONDS).payload == b"lost"


# -- operators ---------------------------------------------------------------------------------------------------------


def test_a_client_is_disconnected_whichever_node_is_asked(cluster: Cluster, at: At, name: str) -> None:
    one, two, _ = cluster
    for asked in (two, one):
        client = at(one, name, manual_ack=True, **durable(V5))
        client.subscribe(f"{name}/#", 1)
        answer = asked.post(f"/api/v1/sessions/{name}/disconnect", None)
        assert answer == {"client_id": name, "disconnected": True}
        assert client.ended() == ADMINISTRATIVE
        assert session_at(asked, name)["connected"] is False
        assert "was not connected" in holdfast(asked, "session", "disconnect", name)
    assert at(two, name, **durable(V5)).session_present
    assert "disconnected" in holdfast(one, "session", "disconnect", name)


def test_a_session_is_deleted_whichever_node_is_asked(cluster: Cluster, at: At, name: str) -> None:
    one, two, three = cluster
    watcher = at(three, f"{name}-w")
    watcher.subscribe(f"{name}-wills", 1)
    for asked in (two, one):
        client = at(one, name, will=Will(f"{name}-wills", b"ended"), **durable(V5))
        assert not client.session_present
        client.subscribe(f"{name}/#", 1)
        assert httpx.delete(f"{asked.http}/api/v1/sessions/{name}", timeout=20).json() == {"ended": name}
        assert client.ended() == ADMINISTRATIVE
        assert watcher.next().payload == b"ended"
        for node in cluster:
            assert httpx.get(f"{node.http}/api/v1/sessions/{name}").status_code == 404
    away = at(one, name, **durable(V5))
    away.disconnect()
    assert "deleted" in holdfast(two, "session", "delete", name)
    answer = httpx.delete(f"{two.http}/api/v1/sessions/{name}")
    assert (answer.status_code, answer.json()) == (404, {"error": f"there is no session {name!r}"})
    assert httpx.post(f"{two.http}/api/v1/sessions/{name}/disconnect").status_code == 404


def test_a_dead_nodes_client_is_deleted_after_its_lease(cluster: Cluster, at: At, name: str) -> None:
    one, two, _ = cluster
    at(one, name, **durable(V5)).subscribe(f"{name}/#", 1)
    one.kill()
    answer = httpx.delete(f"{two.http}/api/v1/sessions/{name}", timeout=30)
    assert answer.status_code == 200, answer.text
    assert not at(two, name, **durable(V5)).session_present


def test_a_ban_is_one_of_all_nodes(cluster: Cluster, at: At, name: str) -> None:
    one, two, three = cluster
    watcher = at(three, f"{name}-w")
    watcher.subscribe(f"{name}-wills", 1)
    for version in (V311, V5):
        client = at(one, name, version, will=Will(f"{name}-wills", b"gone"), **durable(version))
        began = time.monotonic()
        path = f"/api/v1/bans/client/{name}"
        assert httpx.put(two.http + path, json={"reason": "noisy"}, timeout=20).status_code == 200
        assert client.ended(2.0 + LATE_SECONDS) == (ADMINISTRATIVE if version == V5 else None)
        assert time.monotonic() - began < 2.0 + LATE_SECONDS
        assert watcher.next().payload == b"gone"
        for node in (one, two, three):
            wait_for(partial(banned, node, name), 2.0 + LATE_SECONDS, "the ban")
            assert [row["reason"] for row in node.get("/api/v1/bans")["bans"] if row["name"] == name] == ["noisy"]
        assert httpx.delete(three.http + path, timeout=20).status_code == 200
        assert not banned(three, name), "where it was lifted, at once"
        for node in (one, two):
            wait_for(partial(let_in, node, name), 2.0 + LATE_SECONDS, "its end")
        assert httpx.delete(one.http + path, timeout=20).status_code == 404


def banned(node: Node, client_id: str) -> bool:
    with Raw(node.mqtt_port, V5) as raw:
        return raw.connect(client_id)[1] == 0x8A


def let_in(node: Node, client_id: str) -> bool:
    return not banned(node, client_id)


def test_a_banned_address_is_disconnected_from_every_node(cluster: Cluster, name: str) -> None:
    one, two, three = cluster
    path = "/api/v1/bans/address/127.0.0.2"
    with (
        Raw(one.mqtt_port, V5, "127.0.0.2") as first,
        Raw(three.mqtt_port, V5, "127.0.0.2") as other,
        Raw(one.mqtt_port, V5) as elsewhere,
    ):
        for number, raw in enumerate((first, other, elsewhere)):
            assert raw.connect(f"{name}-{number}")[1] == 0
            raw.sock.settimeout(2.0 + LATE_SECONDS)
        assert httpx.put(two.http + path, json={}, timeout=20).status_code == 200
        for raw in (first, other):
            kind, body = raw.read()
            assert (kind, body[0]) == (0xE0, ADMINISTRATIVE)
        elsewhere.send(0xC0)
        assert elsewhere.read()[0] == 0xD0, "from another address"
    assert httpx.delete(one.http + path, timeout=20).status_code == 200
