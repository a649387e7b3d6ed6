"""What a node's host of groups promises, against a real node: names, options, ghosts, dead letters, retention."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import httpx
import pytest

import holdfast
from e2e.groups.conftest import QUICK
from e2e.groups.members import SECONDS, Connect, Ledger, Member, Publisher, described, exists, path, settled
from e2e.raw import packet, text
from holdfast.mqtt.properties import decode_publish
from node import Node
from processes import wait_for
from small_lake import move_to_lake

ACK_TIMEOUT_SECONDS = 0.2


def store_of(node: Node) -> str:
    return f"sqlite:///{node.folder}/data/holdfast.db"


# -- who is in a group -------------------------------------------------------------------------------------------------


def test_who_subscribes_and_is_gone_at_once_holds_nothing(lone: Node, member: Connect, name: str) -> None:
    for n in range(5):
        group = f"g{n}:{name}/#"
        with socket.create_connection(("127.0.0.1", lone.mqtt_port), SECONDS) as ghost:
            connect = packet(0x10, text("MQTT") + b"\x05\x02\0\x3c\0" + text(f"{name}-ghost{n}"))
            subscribe = packet(0x82, b"\0\1\0" + text(f"$share/g{n}/{name}/#") + b"\1")
            ghost.sendall(connect + subscribe + packet(0xE0, b""))
            with contextlib.suppress(OSError):
                while ghost.recv(4096):
                    pass
        begun = time.monotonic()
        member(lone, f"{name}-{n}", f"$share/g{n}/{name}/#")
        settled(lone, group, [f"{name}-{n}"])
        took = time.monotonic() - begun
        assert took < 1.5, f"the streams were held for {took:.1f} s by one who had gone"


def test_two_ways_to_write_a_group_are_two_subscriptions(
    lone: Node, member: Connect, publisher: Publisher, ledger: Ledger, name: str
) -> None:
    one = member(lone, f"{name}-one", f"$share/g/{name}/#")
    one.subscribe(f"$queue/g/{name}/#")
    settled(lone, f"g:{name}/#", [one.client_id])
    one.unsubscribe()
    ledger.await_acked(publisher.publish(f"{name}/x", 32))
    one.share = f"$share/g/{name}/#"
    one.unsubscribe()
    wait_for(lambda: not described(lone, f"g:{name}/#")["members"], SECONDS, "it left with the last one")


def test_another_quality_of_service_reaches_what_is_lent(
    lone: Node, member: Connect, publisher: Publisher, name: str
) -> None:
    one = member(lone, f"{name}-one", f"$share/g/{name}/#", qos=0)
    settled(lone, f"g:{name}/#", [one.client_id])
    publisher.publish(f"{name}/x", 16)
    one.await_got(16)
    one.qos = 1
    one.subscribe(f"$share/g/{name}/#")
    publisher.publish(f"{name}/x", 16)
    one.await_got(32)
    assert [each.qos for each in one.got] == [0] * 16 + [1] * 16


@pytest.mark.parametrize("size", [980, 1100, 20_000])
def test_a_long_filter_is_served(
    lone: Node, member: Connect, publisher: Publisher, ledger: Ledger, name: str, size: int
) -> None:
    topic = f"{name}/" + "x" * (size - len(name) - 3)
    one = member(lone, f"{name}-one", f"$share/g/{topic}/#")
    settled(lone, f"g:{topic}/#", [one.client_id])
    ledger.await_acked(publisher.publish(f"{topic}/y", 16))
    one.disconnect()
    ledger.await_acked(set())
    two = member(lone, f"{name}-two", f"$share/g/{topic}/#")
    more = publisher.publish(f"{topic}/y", 16)
    ledger.await_acked(more)
    ledger.check()
    assert not two.closed_by_server.is_set()


def test_with_groups_switched_off_a_session_that_resumes_joins_nothing(tmp_path: Path, name: str) -> None:
    with Node(tmp_path, settings=QUICK) as node:
        with Member(node.mqtt_port, "m", f"$share/g/{name}/#", durable=True) as member:
            settled(node, f"g:{name}/#", ["m"])
            member.disconnect()
        node.stop()
        node.settings["groups.enabled"] = "false"
        node.start()
        with Member(node.mqtt_port, "m", None, durable=True) as member, Publisher(node.mqtt_port, name, 8) as publisher:
            assert member.session_present
            publisher.publish(f"{name}/x", 64)
            member.sync()
            view = described(node, f"g:{name}/#")
            assert view["members"] == [] and member.got == []


# -- declaring ---------------------------------------------------------------------------------------------------------


def test_declaring_a_group_again_is_fine_with_the_same_options_and_a_conflict_with_others(
    lone: Node, name: str
) -> None:
    body = {"name": "g", "filter": f"{name}/#", "order": "parallel", "attempts_max": 3}
    url = f"{lone.http}/api/v1/groups"
    assert httpx.post(url, json=body).status_code == 201
    again = httpx.post(url, json={**body, "start": "beginning"})
    assert again.status_code == 200 and again.json()["attempts_max"] == 3
    other = httpx.post(url, json={**body, "attempts_max": 5, "order": "strict"})
    assert other.status_code == 409
    assert "order is parallel, not strict" in other.json()["error"]
    assert "attempts_max is 3, not 5" in other.json()["error"]


def test_a_group_that_nobody_ever_joined_expires(lone: Node, name: str) -> None:
    lone.post("/api/v1/groups", {"name": "g", "filter": f"{name}/#", "idle_seconds_max": 1.0})
    assert exists(lone, f"g:{name}/#")
    wait_for(lambda: not exists(lone, f"g:{name}/#"), SECONDS, "it expires")


# -- dead letters ------------------------------------------------------------------------------------------------------


def dead_letters(node: Node, name: str) -> list[tuple[str, dict[str, str]]]:
    with holdfast.open(store_of(node)) as log:
        if "dead-letters" not in log.logs():
            return []
        found = []
        for head in log.heads("dead-letters"):
            at = 0
            while at < head.next_offset:
                reading = log.read(head.stream, at, topics=f"{name}/#")
                at = reading.next_offset
                for chunk in reading.chunks:
                    for row in chunk.batch.to_pylist():
                        said = dict(decode_publish(row["properties"])["user_properties"])
                        found.append((row["payload"].decode(), said))
        return found


def test_ten_thousand_dead_letters_are_stored_once_each_and_do_not_disturb_a_healthy_group(
    lone: Node, member: Connect, name: str
) -> None:
    """Two members never acknowledge anything; beside them another group is served as if nothing were."""
    count = 10_000
    options = {"ack_timeout_seconds": ACK_TIMEOUT_SECONDS, "attempts_max": 1}
    lone.post("/api/v1/groups", {"name": "sick", "filter": f"{name}/sick/#", **options})
    sick = [member(lone, f"{name}-sick{n}", f"$share/sick/{name}/sick/#", hold=True) for n in range(2)]
    healthy = member(lone, f"{name}-healthy", f"$share/well/{name}/well/#")
    settled(lone, f"sick:{name}/sick/#", [each.client_id for each in sick])
    settled(lone, f"well:{name}/well/#", [healthy.client_id])
    waits: list[float] = []
    done = threading.Event()

    def probe() -> None:
        with Publisher(lone.mqtt_port, f"{name}-probe", 4) as publisher:
            while not done.is_set():
                begun = time.monotonic()
                (payload,) = publisher.publish(f"{name}/well/x", 1)
                waits.append(healthy.await_payload(payload, 60) - begun)
                time.sleep(0.02)

    probing = threading.Thread(target=probe, daemon=True)
    probing.start()
    with Publisher(lone.mqtt_port, f"{name}-sick", 8) as publisher:
        for _ in range(count // 500):
            publisher.publish(f"{name}/sick/x", 500)
        sent = publisher.sent
    wait_for(lambda: len(dead_letters(lone, f"{name}/sick")) >= count, 120, "all of them are dead letters")
    done.set()
    probing.join(SECONDS)
    wait_for(lambda: described(lone, f"sick:{name}/sick/#")["lag"] == 0, SECONDS, "the group is done with them")
    found = dead_letters(lone, f"{name}/sick")
    assert Counter(payload for payload, _ in found) == Counter(sent), "each once"
    group = f"sick:{name}/sick/#"
    assert {(said["holdfast-group"], said["holdfast-attempts"]) for _, said in found} == {(group, "1")}
    assert len({(said["holdfast-stream"], said["holdfast-offset"]) for _, said in found}) == count
    assert max(waits) < 2.0, f"worst of {len(waits)}: {sorted(waits)[-5:]}"
    view = described(lone, f"well:{name}/well/#")
    assert [each["status"] for each in view["members"]] == ["connected"]


def test_dead_letters_survive_a_hand_over_without_being_stored_twice(lone: Node, member: Connect, name: str) -> None:
    """Members that never acknowledge come and go while their messages are set aside."""
    options = {"ack_timeout_seconds": ACK_TIMEOUT_SECONDS, "attempts_max": 2}
    lone.post("/api/v1/groups", {"name": "g", "filter": f"{name}/#", **options})
    first = member(lone, f"{name}-0", f"$share/g/{name}/#", hold=True)
    settled(lone, f"g:{name}/#", [first.client_id])
    with Publisher(lone.mqtt_port, name, 8) as publisher:
        sent = publisher.publish(f"{name}/x", 400)
        give_up, turn = time.monotonic() + 60, 0
        while len(dead_letters(lone, name)) < len(sent):
            assert time.monotonic() < give_up, f"{len(dead_letters(lone, name))} of {len(sent)}"
            turn += 1
            member(lone, f"{name}-{turn % 3}", f"$share/g/{name}/#", hold=True)  # takes the place of an earlier one
            time.sleep(0.3)  # how far they come is chance's to say
    wait_for(lambda: described(lone, f"g:{name}/#")["lag"] == 0, SECONDS, "the group is done with them")
    assert Counter(payload for payload, _ in dead_letters(lone, name)) == Counter(sent)


def test_a_message_that_is_too_large_for_every_member_is_a_dead_letter_and_the_rest_is_served(
    lone: Node, member: Connect, ledger: Ledger, name: str
) -> None:
    small = member(lone, f"{name}-small", f"$share/g/{name}/#", packet_maximum=300)
    settled(lone, f"g:{name}/#", [small.client_id])
    large = f"{name}-" + "x" * 500
    with Publisher(lone.mqtt_port, name, 2) as publisher:
        before = publisher.publish(f"{name}/x", 4)
        answer = httpx.post(
            f"{lone.http}/api/v1/publish", json={"topic": f"{name}/x", "payload": large, "qos": 1}, timeout=20
        )
        assert answer.status_code == 200
        after = publisher.publish(f"{name}/x", 4)
        ledger.await_acked([*before, *after])
    ((payload, said),) = wait_for(lambda: dead_letters(lone, name), SECONDS, "it is set aside")
    assert payload == large
    assert (said["holdfast-reason"], said["holdfast-attempts"]) == ("larger than any member takes", "0")
    wait_for(lambda: described(lone, f"g:{name}/#")["lag"] == 0, SECONDS, "and done with")
    assert large not in small.payloads()


@pytest.mark.parametrize("key", ["publisher", "topic", "message"])
def test_a_message_that_is_too_large_for_one_member_goes_to_another_in_order(
    lone: Node, member: Connect, ledger: Ledger, name: str, key: str
) -> None:
    group = f"g:{name}/#"
    small = [member(lone, f"{name}-small-{n}", f"$share/g/{name}/#", packet_maximum=300, key=key) for n in range(3)]
    roomy = member(lone, f"{name}-roomy", f"$share/g/{name}/#", key=key)
    settled(lone, group, [roomy.client_id, *(each.client_id for each in small)])
    topics, large = [f"{name}/{n}" for n in range(8)], "x" * 500
    sent: dict[str, list[str]] = {topic: [] for topic in topics}
    with httpx.Client(timeout=20) as http:
        for turn in range(5):
            for topic in topics:
                text = f"{topic}-{turn}-" + (large if turn % 2 else "")
                body = {"topic": topic, "payload": text, "qos": 1}
                assert http.post(f"{lone.http}/api/v1/publish", json=body).status_code == 200
                sent[topic].append(text)
    everything = [text for texts in sent.values() for text in texts]
    ledger.await_acked(everything)
    wait_for(lambda: described(lone, group)["lag"] == 0, SECONDS, "the group is done")
    assert dead_letters(lone, name) == []
    assert not [text for each in small for text in each.payloads() if large in text]
    assert {text for text in everything if large in text} <= set(roomy.payloads())
    if key != "message":
        assert {topic: [given for given in ledger.given if given in texts] for topic, texts in sent.items()} == sent


# -- retention and the lake --------------------------------------------------------------------------------------------


def seal(node: Node, generations: int = 1) -> None:
    with holdfast.open(store_of(node)) as log:
        for _ in range(generations):
            log.seal("messages")


def test_what_retention_drops_unread_is_told(tmp_path: Path, name: str) -> None:
    with Node(tmp_path, settings={**QUICK, "log.shards": 2, "log.keep_bytes": 0}) as node:
        node.post("/api/v1/groups", {"name": "g", "filter": f"{name}/#"})
        with Publisher(node.mqtt_port, name, 8) as publisher:
            publisher.publish(f"{name}/x", 40)
            seal(node)
            with Member(node.mqtt_port, "m", f"$share/g/{name}/#", hold=True) as member:
                member.await_got(40)
                whole = described(node, f"g:{name}/#")
                assert whole["skipped"] == []
                with holdfast.open(store_of(node)) as log:
                    log.drop("messages", 1)
                skipped = wait_for(lambda: described(node, f"g:{name}/#")["skipped"], SECONDS, "a record of it")
                assert sorted((gap["stream"], gap["first"]) for gap in skipped) == [
                    ("messages.1.0", 0),
                    ("messages.1.1", 0),
                ]
                assert sum(gap["past"] for gap in skipped) == 40
                assert "dropped by retention" in node.logs()
                member.ledger.given.clear()
                sent = publisher.publish(f"{name}/x", 16)
                wait_for(lambda: set(sent) <= set(member.payloads()), SECONDS, "it goes on with what is there")


def test_groups_read_from_the_lake_what_the_store_has_dropped(tmp_path: Path, name: str) -> None:
    with Node(tmp_path, settings={**QUICK, "log.shards": 2}) as node:
        ledger = Ledger()
        node.post("/api/v1/groups", {"name": "early", "filter": f"{name}/#"})
        with Publisher(node.mqtt_port, name, 8) as publisher:
            old = publisher.publish(f"{name}/x", 400)
            seal(node)
            with holdfast.open(store_of(node)) as log:
                move_to_lake(log, "messages", 1, tmp_path / "lake")
            new = publisher.publish(f"{name}/x", 16)
            with Member(node.mqtt_port, "one", f"$share/early/{name}/#", ledger) as one:
                ledger.await_acked([*old, *new])
                assert Counter(one.payloads()) == Counter([*old, *new])
                for number in range(8):  # each publisher's in order, the lake's first
                    mine = [p for p in one.payloads() if p.split("/")[1] == str(number)]
                    assert mine == sorted(mine, key=lambda p: int(p.rsplit("/", 1)[1]))
                wait_for(lambda: described(node, f"early:{name}/#")["lag"] == 0, SECONDS, "no lag")
                assert described(node, f"early:{name}/#")["skipped"] == []
            with Member(node.mqtt_port, "two", f"$share/late/{name}/#") as two:
                settled(node, f"late:{name}/#", ["two"])
                more = publisher.publish(f"{name}/x", 16)
                wait_for(lambda: len(two.got) >= 16, SECONDS, "what came after it joined")
                assert Counter(two.payloads()) == Counter(more), "and nothing of the lake"
                answer = httpx.post(node.http + path(f"late:{name}/#", "/seek"), json={"to": "beginning"}, timeout=20)
                assert answer.status_code == 200, answer.text
                wait_for(lambda: len(two.got) >= 16 + 432, SECONDS, "everything, from the lake on")
                assert Counter(two.payloads()[16:]) == Counter([*old, *new, *more])


def test_a_group_in_the_middle_of_a_generation_goes_on_in_the_lake(tmp_path: Path, name: str) -> None:
    with Node(tmp_path, settings={**QUICK, "log.shards": 1}) as node:
        ledger = Ledger()
        with Publisher(node.mqtt_port, name, 2) as publisher:
            with Member(node.mqtt_port, "one", f"$share/g/{name}/#", ledger, hold=True, receive_maximum=50) as one:
                settled(node, f"g:{name}/#", ["one"])
                sent = publisher.publish(f"{name}/x", 200)
                one.await_got(50)
                one.ack(one.payloads()[:30])
                one.sync()
                seal(node)
                with holdfast.open(store_of(node)) as log:
                    move_to_lake(log, "messages", 1, tmp_path / "lake")
                one.hold = False
                one.ack()
                ledger.await_acked(sent)
            ledger.check()
            assert Counter(one.payloads()) == Counter(sent)


def test_a_member_that_resumes_after_a_drop_finds_the_record_of_an_idle_group(tmp_path: Path, name: str) -> None:
    settings: dict[str, Any] = {**QUICK, "log.shards": 1, "log.keep_bytes": 1, "log.upkeep_secs": 0.3}
    with Node(tmp_path, settings=settings) as node:
        node.post("/api/v1/groups", {"name": "g", "filter": f"{name}/#"})
        with Publisher(node.mqtt_port, name, 2) as publisher:
            publisher.publish(f"{name}/x", 100)
        seal(node, 2)

        def dropped() -> bool:
            with holdfast.open(store_of(node)) as log:
                return all(generation.number > 1 for generation in log.generations("messages"))

        wait_for(dropped, SECONDS, "retention has dropped it")
        skipped = wait_for(lambda: described(node, f"g:{name}/#")["skipped"], SECONDS, "a record of it")
        assert [(gap["stream"], gap["first"], gap["past"]) for gap in skipped] == [("messages.1.0", 0, 100)]
