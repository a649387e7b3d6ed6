"""What belongs together in a group goes to one member, in order; what does not, to whoever has a hand free."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence

import pytest

from e2e.groups.conftest import REVOKE_SECONDS
from e2e.groups.members import SECONDS, Connect, Ledger, Member, Publisher, described, holdfast, settled
from node import Node
from processes import wait_for


@pytest.fixture(params=["sqlite", "postgres"])
def nodes(request: pytest.FixtureRequest) -> Sequence[Node]:
    """Where members may connect: one node, or two that share a store."""
    if request.param == "sqlite":
        return [request.getfixturevalue("lone")]
    found: Sequence[Node] = request.getfixturevalue("running")
    return found


def four(nodes: Sequence[Node], member: Connect, name: str, key: str | None, count: int = 4) -> list[Member]:
    share = f"$share/g/{name}/#"
    found = [member(nodes[n % len(nodes)], f"{name}-{n}", share, key=key) for n in range(count)]
    whole = settled(nodes[0], f"g:{name}/#", [each.client_id for each in found])
    assert whole["key"] == (key or "message")
    return found


def owners_by(members: list[Member], word: int) -> dict[str, set[str]]:
    """Who was given messages of each publisher (1) or topic (3); payloads are name/publisher/number[/topic]."""
    found: dict[str, set[str]] = {}
    for member in members:
        for payload in member.payloads():
            found.setdefault(payload.split("/")[word], set()).add(member.client_id)
    return found


@pytest.mark.parametrize("key", [None, "message"])
def test_by_message_everybody_works_though_there_is_one_publisher(
    nodes: Sequence[Node], member: Connect, ledger: Ledger, name: str, key: str | None
) -> None:
    """This is what `$share` means unless somebody says otherwise."""
    members = four(nodes, member, name, key)
    with Publisher(nodes[0].mqtt_port, name, clients=1) as publisher:
        sent = publisher.publish(f"{name}/x", 400)
        ledger.await_acked(sent)
    assert {len(to) for to in ledger.given.values()} == {1}
    assert Counter(payload for each in members for payload in each.payloads()) == Counter(sent)
    assert [len(each.got) for each in members] == [100, 100, 100, 100]
    wait_for(lambda: described(nodes[0], f"g:{name}/#")["lag"] == 0, SECONDS, "no lag")


def test_by_message_a_few_messages_are_shared_too(lone: Node, member: Connect, ledger: Ledger, name: str) -> None:
    members = four([lone], member, name, "message")
    with Publisher(lone.mqtt_port, name, clients=1) as publisher:
        for _ in range(4):
            ledger.await_acked(publisher.publish(f"{name}/x", 1))
    assert [len(each.got) for each in members] == [1, 1, 1, 1]


def test_by_publisher_each_publisher_is_one_members_in_order(
    nodes: Sequence[Node], member: Connect, ledger: Ledger, name: str
) -> None:
    members = four(nodes, member, name, "publisher")
    with Publisher(nodes[-1].mqtt_port, name, clients=12) as publisher:
        for _ in range(10):
            publisher.publish(f"{name}/x", 60)
        ledger.await_acked(publisher.sent)
    assert {len(some) for some in owners_by(members, 1).values()} == {1}
    in_order(members, 1)


def in_order(members: list[Member], word: int) -> None:
    """Messages of one key came in the order in which they were published."""
    for member in members:
        last: dict[str, int] = {}
        for payload in member.payloads():
            words = payload.split("/")
            assert last.get(words[word], -1) < int(words[2]), f"{payload} came out of order"
            last[words[word]] = int(words[2])


class TopicPublisher(Publisher):
    """Several clients that publish to the same topics; the payload names the topic."""

    def round(self, topics: int) -> None:
        for topic in range(topics):
            for client in range(len(self.socks)):
                self.publish_as(client, topic)

    def publish_as(self, client: int, topic: int) -> None:
        number = len(self.sent)
        payload = f"{self.name}/{client}/{number}/t{topic}"
        self.sent.append(payload)
        self.send(client, f"{self.name}/t{topic}", number)


def test_by_topic_each_topic_is_one_members_in_order(
    nodes: Sequence[Node], member: Connect, ledger: Ledger, name: str
) -> None:
    """Whoever publishes it, and wherever that lies in the log; and everybody works though there are few publishers."""
    members = four(nodes, member, name, "topic")
    with TopicPublisher(nodes[0].mqtt_port, name, clients=3) as publisher:
        for _ in range(4):
            publisher.round(topics=24)
        ledger.await_acked(publisher.sent)
    owners = owners_by(members, 3)
    assert len(owners) == 24 and {len(some) for some in owners.values()} == {1}
    assert all(each.got for each in members)
    for each in members:  # of one publisher and topic, for what several publish has no order of its own
        last: dict[tuple[str, str], int] = {}
        for payload in each.payloads():
            _, who, number, topic = payload.split("/")
            assert last.get((who, topic), -1) < int(number)
            last[who, topic] = int(number)


@pytest.mark.parametrize("key", ["topic", "message"])
def test_members_come_and_go_under_load(
    nodes: Sequence[Node], member: Connect, ledger: Ledger, name: str, key: str
) -> None:
    """From one to five and back, streams are cut anew each time; nothing is lost, nothing acknowledged comes again."""
    share, group = f"$share/g/{name}/#", f"g:{name}/#"
    members: list[Member] = []
    with TopicPublisher(nodes[0].mqtt_port, name, clients=2) as publisher:
        for turn, count in enumerate((1, 2, 5, 3, 1, 4)):
            while len(members) < count:
                number = f"{turn}{len(members)}"
                members.append(member(nodes[len(members) % len(nodes)], f"{name}-{number}", share, key=key))
                publisher.round(topics=8)
            while len(members) > count:
                gone = members.pop()
                publisher.round(topics=8)
                gone.disconnect() if turn % 2 else gone.crash()
            publisher.round(topics=8)
            settled(nodes[0], group, [each.client_id for each in members])
        ledger.await_acked(publisher.sent)
    ledger.check()
    wait_for(lambda: described(nodes[0], group)["lag"] == 0, SECONDS, "no lag")


def test_whoever_is_alone_gets_everything_in_order(lone: Node, member: Connect, ledger: Ledger, name: str) -> None:
    """Streams that were cut for several are whole again for one."""
    members = four([lone], member, name, "message", 3)
    for gone in members[1:]:
        gone.disconnect()
    whole = settled(lone, f"g:{name}/#", [members[0].client_id])
    wait_for(lambda: len(described(lone, f"g:{name}/#")["streams"]) == 8, SECONDS, "eight streams, as they are")
    assert whole["key"] == "message"
    with Publisher(lone.mqtt_port, name, clients=4) as publisher:
        ledger.await_acked(publisher.publish(f"{name}/x", 400))
    in_order(members[:1], 1)


def test_by_message_one_that_never_acknowledges_holds_up_its_own_slices_only(
    lone: Node, member: Connect, ledger: Ledger, name: str
) -> None:
    """Though it has one of every stream, and streams must be cut anew when the next one comes."""
    share, group = f"$share/g/{name}/#", f"g:{name}/#"
    stuck = member(lone, f"{name}-stuck", share, hold=True)
    busy = member(lone, f"{name}-busy", share)
    settled(lone, group, [stuck.client_id, busy.client_id])
    with Publisher(lone.mqtt_port, name, clients=1) as publisher:
        sent = publisher.publish(f"{name}/x", 40)
        wait_for(lambda: len(busy.got) == 20, SECONDS, "its half")
        third = member(lone, f"{name}-third", share)
        wait_for(
            lambda: (
                {r["owner"] for r in described(lone, group)["streams"] if r["status"] == "granted"}
                >= {busy.client_id, third.client_id}
            ),
            SECONDS,
            "both have slices",
        )
        begin = time.monotonic()
        sent += publisher.publish(f"{name}/x", 40)
        wait_for(lambda: len(busy.got) + len(third.got) >= 40, SECONDS, "the half that is not stuck goes on")
        assert time.monotonic() - begin < REVOKE_SECONDS - 2
        stuck.crash()
        ledger.await_acked(sent)
    ledger.check()


# -- how it is said ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", ["vin", "Message", ""])
def test_a_key_that_is_none_is_refused_and_named(lone: Node, member: Connect, name: str, value: str) -> None:
    asker = member(lone, f"{name}-asker", None)
    suback = asker.ask_to_subscribe(f"$share/g/{name}/#", key=value)
    assert suback[-1] == 0x83
    assert f"key '{value}' is not known".encode() in suback
    assert not any(row["filter"] == f"{name}/#" for row in lone.get("/api/v1/groups")["groups"])


def test_a_group_keeps_the_key_it_was_made_with(lone: Node, member: Connect, name: str) -> None:
    first = member(lone, f"{name}-first", f"$share/g/{name}/#", key="topic")
    member(lone, f"{name}-second", f"$share/g/{name}/#", key="topic")
    member(lone, f"{name}-third", f"$share/g/{name}/#")
    other = member(lone, f"{name}-other", None)
    suback = other.ask_to_subscribe(f"$share/g/{name}/#", key="message")
    assert suback[-1] == 0x83 and b"has the key topic, not message" in suback
    whole = settled(lone, f"g:{name}/#", [first.client_id, f"{name}-second", f"{name}-third"])
    assert whole["key"] == "topic"


def test_a_key_is_declared_by_http_and_by_command(lone: Node, name: str) -> None:
    assert lone.post("/api/v1/groups", {"name": "a", "filter": name, "key": "topic"})["key"] == "topic"
    assert lone.post("/api/v1/groups", {"name": "b", "filter": name})["key"] == "publisher"
    holdfast(lone, "group", "create", f"c:{name}", "--key", "message")
    rows = {row["name"]: row["key"] for row in lone.get("/api/v1/groups")["groups"] if row["filter"] == name}
    assert rows == {"a": "topic", "b": "publisher", "c": "message"}
    assert "message" in holdfast(lone, "group", "ls")
    assert "key message" in holdfast(lone, "group", "show", f"c:{name}")
