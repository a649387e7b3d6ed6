"""A node with durable members that is stopped, killed, or has no groups at all."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from e2e.clients import V5, V311
from e2e.groups.conftest import QUICK
from e2e.groups.members import SECONDS, Connect, Ledger, Publisher, described, exists, settled
from e2e.raw import Raw
from node import Node
from processes import wait_for

FLUSH_SECONDS = 1.0 + 0.15 + 0.6


@pytest.fixture(scope="module")
def mortal(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Node]:
    with Node(tmp_path_factory.mktemp("mortal"), settings=QUICK) as running:
        yield running


@pytest.mark.parametrize("how", ["SIGTERM", "SIGKILL"])
def test_durable_members_go_on_after_a_restart(
    mortal: Node, member: Connect, ledger: Ledger, name: str, how: str
) -> None:
    """What was acknowledged does not come again, what was not comes once more, what nobody had comes."""
    share, group = f"$share/g/{name}/#", f"g:{name}/#"
    ids = [f"{name}-v5", f"{name}-v311"]
    members = [member(mortal, ids[0], share, durable=True), member(mortal, ids[1], share, version=V311, durable=True)]
    settled(mortal, group, ids)
    with Publisher(mortal.mqtt_port, name) as publisher:
        sent = publisher.publish(f"{name}/x", 600)
        ledger.await_acked(sent)
        for each in members:
            each.hold = True
        held = publisher.publish(f"{name}/x", 100)
        wait_for(lambda: sum(len(each.unacked()) for each in members) == 100, SECONDS, "all under way")
        some = {payload for each in members for payload in each.unacked()[::2]}
        for each in members:
            each.ack(list(some))
            each.sync()
    if how == "SIGKILL":
        acked = time.monotonic()
        wait_for(lambda: time.monotonic() > acked + FLUSH_SECONDS, what="a flush interval")
        mortal.kill()
    else:
        assert mortal.stop() == 0
    for each in members:
        each.crash()
    mortal.start()
    back = [member(mortal, ids[0], None, durable=True), member(mortal, ids[1], None, version=V311, durable=True)]
    assert all(each.session_present for each in back)
    settled(mortal, group, ids)
    ledger.await_acked(held)
    ledger.check()
    assert {payload for each in back for payload in each.payloads()} == set(held) - some
    with Publisher(mortal.mqtt_port, f"{name}b") as publisher:
        ledger.await_acked(publisher.publish(f"{name}/x", 200))
    ledger.check()
    assert {len(to) for payload, to in ledger.given.items() if payload not in held} == {1}


def test_what_comes_while_all_members_are_away_waits(mortal: Node, member: Connect, ledger: Ledger, name: str) -> None:
    """In-memory members leave nothing behind but the group, and the group is what keeps the messages."""
    share, group = f"$share/g/{name}/#", f"g:{name}/#"
    first = member(mortal, f"{name}-first", share)
    settled(mortal, group, [first.client_id])
    first.disconnect()
    with Publisher(mortal.mqtt_port, name) as publisher:
        sent = publisher.publish(f"{name}/x", 300)
    mortal.kill()
    mortal.start()
    assert exists(mortal, group)
    second = member(mortal, f"{name}-second", share)
    ledger.await_acked(sent)
    assert sorted(second.payloads()) == sorted(sent)
    wait_for(lambda: described(mortal, group)["lag"] == 0, SECONDS, "no lag")


def test_killed_again_and_again_under_load(mortal: Node, member: Connect, ledger: Ledger, name: str) -> None:
    """Only what was acknowledged within a flush interval of a kill may come again; nothing is lost."""
    share = f"$share/g/{name}/#"
    sent: list[str] = []
    members = [member(mortal, f"{name}-{n}", share, durable=n % 2 == 0) for n in range(3)]
    kills: list[float] = []
    for turn in range(3):
        with Publisher(mortal.mqtt_port, f"{name}k{turn}") as publisher:
            for _ in range(8):
                sent += publisher.publish(f"{name}/x", 100)
            half = len(sent) // 2
            wait_for(lambda half=half: len(ledger.acked) > half, SECONDS, "half of it consumed")
        kills.append(time.monotonic())
        mortal.kill()
        for each in members:
            each.crash()
        mortal.start()
        members = [member(mortal, f"{name}-{n}", share, durable=n % 2 == 0) for n in range(3)]
    ledger.await_acked(sent)
    for payload, _, at, _ in ledger.again:
        assert any(at < kill < at + FLUSH_SECONDS for kill in kills), f"{payload} came again"


@pytest.mark.parametrize("version", [V311, V5])
def test_groups_may_be_switched_off(tmp_path: Path, name: str, version: int) -> None:
    settings = {"groups.enabled": "false", "log.shards": 2}
    with Node(tmp_path / "off", settings=settings) as node, Raw(node.mqtt_port, version) as raw:
        connack = raw.connect(name)
        assert version == V311 or b"\x2a\x00" in connack, "shared_subscription_available = 0"
        suback = raw.subscribe(f"$share/g/{name}/#")
        assert suback[-1] == (0x9E if version == V5 else 0x80)
        assert raw.subscribe(f"{name}/#")[-1] == 1


def test_a_group_whose_last_member_died_with_its_leaders_node_expires(mortal: Node, member: Connect, name: str) -> None:
    group = f"g:{name}/#"
    mortal.post("/api/v1/groups", {"name": "g", "filter": f"{name}/#", "idle_seconds_max": 2.0})
    reader = member(mortal, f"{name}-reader", f"$share/g/{name}/#")
    settled(mortal, group, [reader.client_id])
    mortal.kill()
    reader.crash()
    mortal.start()
    assert exists(mortal, group)
    wait_for(lambda: not exists(mortal, group), 60, "it expires")
