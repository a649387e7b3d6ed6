"""More members than streams, and generations that end while messages flow."""

from __future__ import annotations

import itertools
import threading

import pytest

from e2e.groups.members import SECONDS, Connect, Ledger, Publisher, described, holdfast, located, path, settled
from node import Node
from processes import wait_for


def seal(node: Node, shards: int | None = None) -> None:
    store = f"sqlite:///{node.folder}/data/holdfast.db"
    said = holdfast(node, "log", "seal", "messages", "--store", store, *(["--shards", str(shards)] if shards else []))
    assert "is open" in said


def open_streams(node: Node) -> int:
    heads = described_log(node)
    newest = max(int(name.split(".")[1]) for name in heads)
    return sum(int(name.split(".")[1]) == newest for name in heads)


def described_log(node: Node) -> list[str]:
    rows = node.get("/api/v1/messages", filter="#", start="beginning", limit=10_000)["messages"]
    return sorted({row["stream"] for row in rows})


@pytest.mark.parametrize("key", ["publisher", "message"])
def test_more_members_than_streams_all_get_work(
    few: Node, member: Connect, ledger: Ledger, name: str, key: str
) -> None:
    """Streams are lent in slices of the key; when members go, what slices had done is not done again."""
    share, group = f"$share/g/{name}/#", f"g:{name}/#"
    members = [member(few, f"{name}-{n}", share, key=key) for n in range(4)]
    whole = settled(few, group, [m.client_id for m in members])
    assert len(whole["streams"]) >= 4, whole["streams"]
    with Publisher(few.mqtt_port, name) as publisher:
        sent = publisher.publish(f"{name}/x", 800)
        ledger.await_acked(sent)
        assert all(each.got for each in members), [len(each.got) for each in members]
        for each in members:  # a slice is of publishers: each of them is with one member, and in order
            numbers: dict[str, list[int]] = {}
            for payload in each.payloads():
                numbers.setdefault(payload.split("/")[1], []).append(int(payload.split("/")[2]))
            assert all(found == sorted(found) for found in numbers.values())
        # From slices to whole streams and back, with messages under way.
        for turn in range(3):
            flow = [publisher.publish(f"{name}/x", 100)]
            for each in members[2:]:
                each.crash() if turn % 2 else each.disconnect()
            flow.append(publisher.publish(f"{name}/x", 100))
            settled(few, group, [m.client_id for m in members[:2]])
            flow.append(publisher.publish(f"{name}/x", 100))
            members[2:] = [member(few, f"{name}-{n}", share) for n in (2, 3)]
            flow.append(publisher.publish(f"{name}/x", 100))
            settled(few, group, [m.client_id for m in members])
        ledger.await_acked(publisher.sent)
    ledger.check()


@pytest.mark.parametrize("order", ["strict", "parallel"])
def test_generations_sealed_in_mid_flow(few: Node, member: Connect, ledger: Ledger, name: str, order: str) -> None:
    share, group = f"$share/g/{name}/#", f"g:{name}/#"
    few.post("/api/v1/groups", {"name": "g", "filter": f"{name}/#", "order": order})
    slow = member(few, f"{name}-slow", share, hold=True, receive_maximum=10)
    quick = member(few, f"{name}-quick", share)
    settled(few, group, [slow.client_id, quick.client_id])
    stop = threading.Event()

    def ack_slowly() -> None:
        while not stop.wait(0.02):
            slow.ack()

    with Publisher(few.mqtt_port, name) as publisher:

        def publish() -> None:
            while not stop.wait(0.01):
                publisher.publish(f"{name}/x", 16)

        threads = [threading.Thread(target=work, daemon=True) for work in (ack_slowly, publish)]
        for thread in threads:
            thread.start()
        for shards in (None, 3, 2):
            count = len(publisher.sent)
            wait_for(lambda count=count: len(publisher.sent) > count + 200, SECONDS, "some flow")
            seal(few, shards)
        count = len(publisher.sent)
        wait_for(lambda: len(publisher.sent) > count + 200, SECONDS, "some flow")
        stop.set()
        for thread in threads:
            thread.join(SECONDS)
        slow.hold = False
        slow.ack()
        ledger.await_acked(publisher.sent)
        sent = publisher.sent
    ledger.check()
    assert {len(to) for to in ledger.given.values()} == {1}
    wait_for(lambda: described(few, group)["lag"] == 0, what="no lag")
    assert described(few, group)["finished_streams"] >= 6
    if order == "strict":
        in_order(few, name, sent, [slow, quick])


def in_order(node: Node, name: str, sent: list[str], members: list) -> None:
    """Of each publisher: whatever is of a later generation was delivered after everything of the earlier ones."""
    where = located(node, f"{name}/#")
    came = {each.payload: each.at for member in members for each in member.got}
    latest: dict[tuple[str, int], float] = {}
    earliest: dict[tuple[str, int], float] = {}
    for payload in sent:
        key = payload.split("/")[1], int(where[payload][0].split(".")[1])
        latest[key] = max(latest.get(key, 0.0), came[payload])
        earliest[key] = min(earliest.get(key, float("inf")), came[payload])
    generations = sorted({generation for _, generation in latest})
    assert len(generations) >= 4, generations
    for who in {who for who, _ in latest}:
        mine = [g for g in generations if (who, g) in latest]
        for before, after in itertools.pairwise(mine):
            assert latest[who, before] <= earliest[who, after], f"publisher {who}: generation {after} before {before}"


def test_a_sealed_log_without_a_word_from_the_members(few: Node, member: Connect, ledger: Ledger, name: str) -> None:
    """Nobody is connected while generations end; whoever comes then reads them all, the oldest first."""
    few.post("/api/v1/groups", {"name": "g", "filter": f"{name}/#", "start": "latest"})
    with Publisher(few.mqtt_port, name, clients=4) as publisher:
        for _ in range(3):
            publisher.publish(f"{name}/x", 40)
            seal(few)
        publisher.publish(f"{name}/x", 40)
        sent = publisher.sent
    reader = member(few, f"{name}-reader", f"$share/g/{name}/#")
    ledger.await_acked(sent)
    for who in range(4):
        mine = [payload for payload in reader.payloads() if payload.split("/")[1] == str(who)]
        assert mine == [payload for payload in sent if payload.split("/")[1] == str(who)]
    few.post(path(f"g:{name}/#", "/pause"), {"paused": True})
