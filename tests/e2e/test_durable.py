"""Sessions that outlive connections, restarts and kill -9: what was not acknowledged comes again, the rest does not.

A story is a test in two halves: up to its `yield` it prepares, then all connections end, and then it looks. A node
is stopped and started once for all stories of a store and an ending, which is most of what they would cost.
"""

from __future__ import annotations

import functools
import itertools
import time
from collections.abc import Callable, Generator, Iterator
from typing import Any

import pytest

from e2e.clients import V5, V311, Client, Dial, Message, Will
from e2e.conftest import FLUSH_SECONDS, Clients, NewStore, durable
from e2e.raw import Raw
from node import Node
from processes import wait_for

Story = Generator[None, None, None]
EXPIRY = {V311: b"", V5: b"\x11\x00\x00\x0e\x10"}
"""CONNECT's property that keeps a session for an hour."""


class World:
    """A node, and everyone connected to it."""

    def __init__(self, node: Node, clients: Clients, ending: str):
        self.node, self.clients, self.ending = node, clients, ending
        self.down_until = 0.0
        self._open: list[Client] = []

    def connect(self, client_id: str, version: int = V5, **dial: Any) -> Any:
        given = Dial(port=self.node.mqtt_port, client_id=client_id, version=version, **dial)
        client = self.clients.make("paho", given).connect()
        self._open.append(client)
        return client

    def leave(self, client: Client) -> None:
        client.disconnect()
        self._open.remove(client)

    def end(self) -> None:
        """End all connections, in this world's way; afterwards a node is running."""
        match self.ending:
            case "reconnect":
                for client in self._open:
                    client.drop()
            case "clean restart":
                assert self.node.stop() == 0
            case "kill -9":
                flushed = time.monotonic() + FLUSH_SECONDS + 0.4
                wait_for(lambda: time.monotonic() > flushed, what="a flush")
                self.node.kill()
        self._open.clear()
        if not self.node.running:
            wait_for(lambda: time.monotonic() > self.down_until, what="the time to be down")
            self.node.start()


# -- stories -----------------------------------------------------------------------------------------------------


def produce_n_ack_k_and_resume_at_k_plus_1(world: World, name: str, version: int) -> Story:
    count, acked = 20, 8
    subscriber = world.connect(name, version, manual_ack=True, **durable(version))
    subscriber.subscribe(f"{name}/#", 1)
    publisher = world.connect(f"{name}-pub", version)
    for n in range(count):
        publisher.publish(f"{name}/{n % 3}", str(n))
    before = subscriber.take(count)
    assert [message.text for message in before] == [str(n) for n in range(count)]
    for message in before[:acked]:
        subscriber.ack(message)
    subscriber.subscribe(f"{name}/barrier", 1)  # answered after the acknowledgements before it were read
    yield
    again = world.connect(name, version, **durable(version))
    assert again.session_present is True
    world.connect(f"{name}-pub", version).publish(f"{name}/0", b"end")
    after = again.until(b"end")
    assert [message.text for message in after] == [str(n) for n in range(acked, count)]
    assert all(message.dup for message in after), "redelivered without DUP"
    if world.ending != "kill -9":
        assert [message.mid for message in after] == [message.mid for message in before[acked:]]


def acknowledged_out_of_order_is_remembered_exactly(world: World, name: str, version: int) -> Story:
    subscriber = world.connect(name, version, manual_ack=True, **durable(version))
    subscriber.subscribe(name, 1)
    publisher = world.connect(f"{name}-pub", version)
    for n in range(12):
        publisher.publish(name, str(n))
    odd = [message for message in subscriber.take(12) if int(message.text) % 2]
    for message in reversed(odd):
        subscriber.ack(message)
    subscriber.subscribe(f"{name}/barrier", 1)
    yield
    again = world.connect(name, version, **durable(version))
    world.connect(f"{name}-pub", version).publish(name, b"end")
    assert [message.text for message in again.until(b"end")] == [str(n) for n in range(0, 12, 2)]


def all_acknowledged_and_nothing_comes_again(world: World, name: str, version: int) -> Story:
    subscriber = world.connect(name, version, **durable(version))
    subscriber.subscribe(f"{name}/#", 2)
    publisher = world.connect(f"{name}-pub", version)
    for n in range(30):
        publisher.publish(f"{name}/{n % 4}", str(n), 1 + n % 2)
    subscriber.take(30)
    subscriber.publish(f"{name}-aside", b"barrier", 2)  # a handshake later than all of theirs
    yield
    again = world.connect(name, version, **durable(version))
    assert again.session_present is True
    world.connect(f"{name}-pub", version).publish(f"{name}/0", b"end")
    assert again.until(b"end") == []


def what_was_published_while_away_is_there(world: World, name: str, version: int) -> Story:
    subscriber = world.connect(name, version, **durable(version))
    subscriber.subscribe(name, 2)
    world.leave(subscriber)
    publisher = world.connect(f"{name}-pub", version)
    for n in range(30):
        publisher.publish(name, str(n), 1 + n % 2)
    yield
    got = world.connect(name, version, **durable(version)).take(30)
    found = [(int(message.text), message.qos, message.dup) for message in got]
    assert sorted(found) == [(n, 1 + n % 2, False) for n in range(30)]
    for qos in (1, 2):  # a client may hand out a QoS 2 message only when its handshake is through
        of_this = [number for number, each, _ in found if each == qos]
        assert of_this == sorted(of_this)


def wills_of_lost_connections_come_and_no_others(world: World, name: str, version: int) -> Story:
    """Lost with the client or with the node; not if the client said good-bye, or the node did."""
    watcher = world.connect(f"{name}-watch", version, **durable(version))
    watcher.subscribe(name, 1)
    world.connect(f"{name}-1", version, will=Will(name, b"lost"))
    world.leave(world.connect(f"{name}-2", version, will=Will(name, b"never")))
    yield
    again = world.connect(f"{name}-watch", version, **durable(version))
    world.connect(f"{name}-pub", version).publish(name, b"end")
    expected = {"end"} if world.ending == "clean restart" else {"lost", "end"}
    assert {message.text for message in again.take(len(expected))} == expected


def subscription_options_are_kept(world: World, name: str, version: int) -> Story:
    subscriber = world.connect(name, V5, **durable(V5))
    options: dict[str, Any] = {"no_local": True, "retain_as_published": True}
    subscriber.subscribe(f"{name}/a", 1, properties={"SubscriptionIdentifier": 9}, **options)
    subscriber.subscribe(f"{name}/b", 0)
    yield
    again = world.connect(name, V5, **durable(V5))
    assert again.session_present is True
    again.publish(f"{name}/a", b"mine")
    other = world.connect(f"{name}-other", version)
    other.publish(f"{name}/a", b"theirs", retain=True)
    other.publish(f"{name}/b", b"end")
    (theirs,) = again.until(b"end")
    assert (theirs.payload, theirs.retain, list(theirs.properties["SubscriptionIdentifier"])) == (b"theirs", True, [9])


def an_unsubscribed_filter_stays_unsubscribed(world: World, name: str, version: int) -> Story:
    subscriber = world.connect(name, version, **durable(version))
    subscriber.subscribe(f"{name}/a", 1)
    subscriber.subscribe(f"{name}/b", 1)
    subscriber.publish(f"{name}/a", b"1")
    assert subscriber.next().payload == b"1"
    subscriber.unsubscribe(f"{name}/a")
    yield
    again = world.connect(name, version, **durable(version))
    assert again.session_present is True
    again.publish(f"{name}/a", b"2")
    again.publish(f"{name}/b", b"end")
    assert again.until(b"end") == []


def retained_messages_are_kept(world: World, name: str, version: int) -> Story:
    publisher = world.connect(f"{name}-pub", version)
    publisher.publish(f"{name}/kept", b"1", retain=True)
    publisher.publish(f"{name}/kept", b"2", retain=True)
    publisher.publish(f"{name}/cleared", b"3", retain=True)
    publisher.publish(f"{name}/cleared", b"", retain=True)
    yield
    client = world.connect(name, version)
    client.subscribe(f"{name}/#", 1)
    client.publish(f"{name}/end", b"end")
    found = [(message.topic, message.payload, message.retain) for message in client.until(b"end")]
    assert found == [(f"{name}/kept", b"2", True)]


def a_session_expires_though_the_node_was_down(world: World, name: str, version: int) -> Story:
    short = world.connect(f"{name}-short", V5, **durable(V5, 1))
    long = world.connect(f"{name}-long", V5, **durable(V5, 3600))
    for client in (short, long):
        client.subscribe(name)
        world.leave(client)
    over = world.down_until = max(world.down_until, time.monotonic() + 1.5)
    yield
    wait_for(lambda: time.monotonic() > over, what="the session's end")
    assert world.connect(f"{name}-short", V5, **durable(V5)).session_present is False
    assert world.connect(f"{name}-long", V5, **durable(V5)).session_present is True


def a_session_without_expiry_is_gone(world: World, name: str, version: int) -> Story:
    world.connect(name, version).subscribe(name)
    yield
    assert world.connect(name, version, **durable(version)).session_present is False


STORIES: dict[str, Callable[[World, str], Story]] = {
    f"{story.__name__}-{'5' if version == V5 else '3.1.1'}": functools.partial(story, version=version)
    for story, version in itertools.product(
        [
            produce_n_ack_k_and_resume_at_k_plus_1,
            acknowledged_out_of_order_is_remembered_exactly,
            all_acknowledged_and_nothing_comes_again,
            what_was_published_while_away_is_there,
            wills_of_lost_connections_come_and_no_others,
            subscription_options_are_kept,
            an_unsubscribed_filter_stays_unsubscribed,
            retained_messages_are_kept,
            a_session_expires_though_the_node_was_down,
            a_session_without_expiry_is_gone,
        ],
        [V311, V5],
    )
}


@pytest.fixture(scope="module")
def mortal(new_store: NewStore, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Node]:
    """A node that tests may stop and kill."""
    settings = {"cursors.subscription_progress_flush_secs": FLUSH_SECONDS, "sessions.grace_secs": 1}
    with Node(tmp_path_factory.mktemp("mortal"), store=new_store(), node_id="mortal", settings=settings) as running:
        yield running


@pytest.fixture(scope="module", params=["reconnect", "clean restart", "kill -9"])
def halfway(request: pytest.FixtureRequest, mortal: Node) -> Iterator[dict[str, Story | Exception]]:
    """Every story after its first half, the ending behind it; or what went wrong in its first half."""
    clients = Clients(request)
    world = World(mortal, clients, request.param)
    told: dict[str, Story | Exception] = {}
    for number, (name, begin) in enumerate(STORIES.items()):
        story = begin(world, f"{request.param.replace(' ', '')}{number}")
        try:
            next(story)
            told[name] = story
        except Exception as error:
            told[name] = error
    world.end()
    yield told
    clients.close()


@pytest.mark.parametrize("name", STORIES)
def test_after_the_end(halfway: dict[str, Story | Exception], name: str) -> None:
    story = halfway[name]
    if isinstance(story, Exception):
        raise story
    assert next(story, "the end") == "the end"


# -- tests with a node of their own to stop ----------------------------------------------------------------------


@pytest.fixture
def world(clients: Clients, mortal: Node) -> World:
    if not mortal.running:
        mortal.start()
    return World(mortal, clients, "reconnect")


def test_a_stopping_node_says_so_and_waits_for_nobody(world: World, name: str) -> None:
    told = world.connect(name)
    with Raw(world.node.mqtt_port, V311) as silent:  # subscribes, publishes and never reads again
        silent.connect(f"{name}-silent")
        silent.subscribe(f"{name}/#")
        for _ in range(50):
            silent.publish(f"{name}/x", b"x" * 60_000, qos=0)
        assert world.node.stop() == 0
    assert told.ended() == 0x8B  # server shutting down


@pytest.mark.parametrize("moment", ["before PUBREC", "after PUBREC"])
def test_a_qos_2_publish_is_taken_once_across_reconnects(world: World, name: str, version: int, moment: str) -> None:
    watcher = world.connect(f"{name}-watch", version)
    watcher.subscribe(name, 2)
    port, expiry = world.node.mqtt_port, EXPIRY[version]
    with Raw(port, version) as raw:
        raw.connect(name, clean=False, properties=expiry)
        raw.publish(name, b"once", qos=2, pid=5)
        if moment == "after PUBREC":
            assert raw.read()[0] == 0x50
    with Raw(port, version) as raw:
        assert raw.connect(name, clean=False, properties=expiry)[0] == 1
        raw.publish(name, b"once", qos=2, pid=5, dup=True)
        assert raw.read()[0] == 0x50
        raw.send(0x62, b"\x00\x05")
        first, body = raw.read()
        assert (first, body[:2]) == (0x70, b"\x00\x05")
        raw.publish(name, b"end", qos=2, pid=5)
        assert raw.read()[0] == 0x50
        raw.send(0x62, b"\x00\x05")
        assert raw.read()[0] == 0x70
    assert [message.payload for message in watcher.until(b"end")] == [b"once"]


def test_a_qos_2_delivery_is_made_once_across_reconnects(world: World, name: str, version: int) -> None:
    port, expiry = world.node.mqtt_port, EXPIRY[version]
    publisher = world.connect(f"{name}-pub", version)
    with Raw(port, version) as raw:
        raw.connect(name, clean=False, properties=expiry)
        raw.subscribe(name, 2)
        publisher.publish(name, b"once", 2)
        first, pid, payload = raw.read_publish()
        assert (first, payload) == (0x34, b"once")
    with Raw(port, version) as raw:  # gone before PUBREC: the message again, as a duplicate
        assert raw.connect(name, clean=False, properties=expiry)[0] == 1
        assert raw.read_publish() == (0x3C, pid, b"once")
        raw.send(0x50, pid.to_bytes(2, "big"))
        assert raw.read()[0] == 0x62
    with Raw(port, version) as raw:  # gone before PUBCOMP: only the PUBREL again
        assert raw.connect(name, clean=False, properties=expiry)[0] == 1
        first, body = raw.read()
        assert (first, body[:2]) == (0x62, pid.to_bytes(2, "big"))
        raw.send(0x70, pid.to_bytes(2, "big"))
        publisher.publish(name, b"end", 2)
        assert raw.read_publish()[2] == b"end"


def test_switching_between_catching_up_and_live_loses_and_repeats_nothing(
    world: World, name: str, version: int
) -> None:
    """A subscriber comes and goes while a publisher goes on: it meets the live end at some point each time."""
    publisher = world.connect(f"{name}-pub", version)
    subscriber = world.connect(name, version, **durable(version))
    subscriber.subscribe(f"{name}/#", 1)
    got: list[Message] = []
    sent = 0
    for _ in range(5):
        world.leave(subscriber)
        for _ in range(100):
            publisher.publish(f"{name}/{sent % 5}", str(sent))
            sent += 1
        mids = []
        for n in range(200):
            if n == 50:
                subscriber = world.connect(name, version, **durable(version))
                assert subscriber.session_present is True
            mids.append(publisher.send(f"{name}/{sent % 5}", str(sent)))
            sent += 1
        for mid in mids:
            publisher.acked(mid)
        got += subscriber.take(sent - len(got))
    assert [int(message.text) for message in got] == list(range(sent))
