"""Resuming at cursor + 1: real nodes, an unmodified client, kills and restarts; cursors in the store or in etcd."""

from __future__ import annotations

import contextlib
import json
import queue
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import paho.mqtt.client as paho
import pytest
from paho.mqtt.enums import CallbackAPIVersion
from paho.mqtt.packettypes import PacketTypes
from paho.mqtt.properties import Properties

from holdfast.cursors import Cursor
from holdfast.model import LOG, Stream
from holdfast.sessions.packed import unpack_cursors, unpack_subscriptions
from holdfast.store import open_metadata, open_store
from node import Node
from processes import wait_for

SECONDS = 15.0
PREFIX = "/holdfast/subscriptions/"


class Client:
    """paho, MQTT 5, acknowledging by hand: what it was sent, in order, and `ack` for each."""

    def __init__(self, node: Node, client_id: str, *, clean: bool = False, expiry: int = 3600, window: int = 100):
        self._paho = paho.Client(
            CallbackAPIVersion.VERSION2, client_id, protocol=paho.MQTTv5, manual_ack=True, reconnect_on_failure=False
        )
        self.messages: queue.Queue[paho.MQTTMessage] = queue.Queue()
        self._answers: queue.Queue[Any] = queue.Queue()
        self._gone = threading.Event()
        self._paho.on_message = lambda _, __, message: self.messages.put(message)
        self._paho.on_connect = lambda _, __, flags, reason, ___: self._answers.put((flags.session_present, reason))
        self._paho.on_subscribe = lambda _, __, mid, *___: self._answers.put(mid)
        self._paho.on_unsubscribe = lambda _, __, mid, *___: self._answers.put(mid)
        self._paho.on_disconnect = lambda *_: self._gone.set()
        asked = Properties(PacketTypes.CONNECT)
        asked.SessionExpiryInterval = expiry
        asked.ReceiveMaximum = window
        self._paho.connect(*node.mqtt, clean_start=clean, properties=asked)
        self._paho.loop_start()
        self.present, reason = self._answers.get(timeout=SECONDS)
        assert not reason.is_failure, reason

    def subscribe(self, filter_text: str, start: str | None = None) -> None:
        asked = Properties(PacketTypes.SUBSCRIBE)
        if start is not None:
            asked.UserProperty = ("holdfast-start", start)
        _, mid = self._paho.subscribe(filter_text, options=paho.SubscribeOptions(qos=1), properties=asked)
        assert self._answers.get(timeout=SECONDS) == mid

    def unsubscribe(self, filter_text: str) -> None:
        _, mid = self._paho.unsubscribe(filter_text)
        assert self._answers.get(timeout=SECONDS) == mid

    def publish(self, topic: str, payloads: list[int]) -> None:
        """Returns when all of them are acknowledged, that is, durable."""
        sent = [self._paho.publish(topic, str(n), qos=1) for n in payloads]
        for one in sent:
            one.wait_for_publish(SECONDS)
            assert one.is_published()

    def take(self, count: int) -> list[paho.MQTTMessage]:
        return [self.messages.get(timeout=SECONDS) for _ in range(count)]

    def ack(self, messages: list[paho.MQTTMessage]) -> None:
        for message in messages:
            self._paho.ack(message.mid, message.qos)

    def nothing_more(self, node: Node) -> None:
        """A message published now is the next to come: nothing was on its way before it."""
        mark = f"mark-{time.monotonic_ns()}"
        node.post("/api/v1/publish", {"topic": "t/mark", "payload": mark, "qos": 1})
        (message,) = self.take(1)
        assert message.payload.decode() == mark
        self.ack([message])

    def close(self) -> None:
        """A clean DISCONNECT that leaves the session."""
        self._paho.disconnect()
        assert self._gone.wait(SECONDS)
        self._paho.loop_stop()

    def drop(self) -> None:
        """Gone without a word."""
        self._paho.loop_stop()
        sock = self._paho.socket()
        if sock is not None:
            sock.close()


def numbers(messages: list[paho.MQTTMessage]) -> list[int]:
    return [int(message.payload) for message in messages]


def cursors(url: str, client_id: str = "reader") -> dict[str, Cursor]:
    """What is stored, by stream: in the session's row, or copied to a metadata store of its own."""
    if not url.startswith("etcd"):
        with contextlib.closing(open_store(url)) as store:
            row = store.sessions().read([client_id])[client_id]
        stored = unpack_cursors(row.cursors, client_id)
        found = {}
        for entry in unpack_subscriptions(row.subscriptions, client_id).entries:
            for generation, shard, _ in stored.session:
                stream = Stream(LOG, shard, generation)
                found[str(stream)] = stored.cursor(entry.number, stream)
                found[str(stream)].epoch = row.epoch
        return found
    with open_metadata(url) as metadata:
        return {
            key.split("/")[4]: Cursor.from_json(entry.value)
            for key, entry in metadata.list(PREFIX).items()
            if f"/{client_id} " in key
        }


def acknowledged(metadata_url: str, client_id: str = "reader") -> int:
    """How many of the messages in the log its cursors pass; streams without messages say nothing."""
    return sum(
        cursor.offset + 1 + sum(last - first + 1 for first, last in cursor.acked)
        for cursor in cursors(metadata_url, client_id).values()
    )


def epoch(metadata_url: str) -> int:
    return max(cursor.epoch for cursor in cursors(metadata_url).values())


Make = Callable[..., Node]


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Make]:
    nodes: list[Node] = []

    def start(**settings: Any) -> Node:
        metadata = settings.pop("metadata", None)
        chosen = {"cursors.subscription_progress_flush_secs": 0.1, "log.shards": 2, **settings}
        nodes.append(Node(tmp_path / "node", metadata=metadata, settings=chosen))
        return nodes[-1]

    yield start
    for node in nodes:
        node.kill()


@pytest.fixture
def metadata_url(tmp_path: Path) -> str:
    return f"sqlite:///{tmp_path}/node/data/holdfast.db"


def produce_and_ack(node: Node, count: int, acked: int) -> tuple[Client, list[paho.MQTTMessage]]:
    """A durable reader that took `count` messages and acknowledged the first `acked` of them."""
    reader = Client(node, "reader", clean=True)
    reader.subscribe("t/+")
    writer = Client(node, "writer", clean=True, expiry=0)
    writer.publish("t/x", list(range(count)))
    writer.close()
    taken = reader.take(count)
    assert numbers(taken) == list(range(count))
    reader.ack(taken[:acked])
    return reader, taken


@pytest.mark.parametrize("end", ["kill", "stop"])
def test_produce_n_ack_k_restart_resume_at_k_plus_1(make, metadata_url, end):
    """Seed 002's own: produce N, acknowledge K, wait for the flush, restart, and K + 1 is the next."""
    node = make()
    reader, _ = produce_and_ack(node, 20, 12)
    if end == "kill":
        wait_for(lambda: acknowledged(metadata_url) == 12, what="the flush")
        before = epoch(metadata_url)
        node.kill()
    else:
        wait_for(lambda: _in_flight(node) == 8, what="the acks")
        assert node.stop() == 0
        before = epoch(metadata_url)
    reader.drop()
    node.restart()
    reader = Client(node, "reader")
    assert reader.present
    again = reader.take(8)
    assert numbers(again) == list(range(12, 20))
    assert all(message.dup for message in again), "they had been sent before"
    reader.ack(again)
    reader.nothing_more(node)
    wait_for(lambda: acknowledged(metadata_url) == 21, what="the flush")
    assert epoch(metadata_url) > before, "it grows with every connection"
    reader.close()


def test_out_of_order_acks_are_not_delivered_again_after_a_kill(make, metadata_url):
    node = make()
    reader, taken = produce_and_ack(node, 10, 0)
    reader.ack([taken[n] for n in (7, 2, 3)])
    wait_for(lambda: acknowledged(metadata_url) == 3, what="the flush")
    (cursor,) = [c for c in cursors(metadata_url).values() if c.acked]
    assert cursor.offset == -1 and cursor.acked == [(2, 3), (7, 7)]
    node.kill()
    reader.drop()
    node.restart()
    reader = Client(node, "reader")
    again = reader.take(7)
    assert numbers(again) == [0, 1, 4, 5, 6, 8, 9]
    reader.ack(again)
    reader.nothing_more(node)
    reader.close()


def test_a_reconnect_resumes_from_memory_before_any_flush(make):
    node = make(**{"cursors.subscription_progress_flush_secs": 3600})
    reader, taken = produce_and_ack(node, 10, 4)
    reader.close()
    reader = Client(node, "reader")
    again = reader.take(6)
    assert numbers(again) == [4, 5, 6, 7, 8, 9]
    assert [message.mid for message in again] == [message.mid for message in taken[4:]], "under their old ids"
    reader.ack(again)
    reader.nothing_more(node)
    reader.close()


def test_a_disconnect_flushes_without_waiting_for_the_interval(make, metadata_url):
    node = make(**{"cursors.subscription_progress_flush_secs": 3600})
    reader, _ = produce_and_ack(node, 6, 5)
    reader.close()
    wait_for(lambda: acknowledged(metadata_url) == 5, what="the flush on disconnect")


def test_a_clean_stop_flushes(make, metadata_url):
    node = make(**{"cursors.subscription_progress_flush_secs": 3600})
    reader, _ = produce_and_ack(node, 6, 6)
    wait_for(lambda: _in_flight(node) == 0, what="the acks")
    assert node.stop() == 0
    reader.drop()
    assert acknowledged(metadata_url) == 6


def _in_flight(node: Node) -> int:
    found = node.get("/api/v1/sessions/reader")
    return int(found["in_flight"]) if isinstance(found["in_flight"], int) else len(found["in_flight"])


def test_an_unsubscribe_removes_the_cursors_and_nothing_brings_them_back(make, metadata_url):
    node = make()
    reader, taken = produce_and_ack(node, 6, 3)
    wait_for(lambda: acknowledged(metadata_url) == 3, what="the flush")
    reader.unsubscribe("t/+")
    assert cursors(metadata_url) == {}
    reader.ack(taken[3:])
    reader.close()
    node.stop()
    assert cursors(metadata_url) == {}


def test_a_new_subscription_starts_at_latest_unless_it_asks_otherwise(make):
    node = make()
    writer = Client(node, "writer", clean=True, expiry=0)
    writer.publish("t/x", [0, 1, 2])
    expected = {None: [], "latest": [], "offset:1": [1, 2], "beginning": [0, 1, 2]}
    readers = {start: Client(node, f"reader {start}", clean=True) for start in expected}
    for start, reader in readers.items():
        reader.subscribe("t/+", start)
    writer.publish("t/x", [3])
    for start, reader in readers.items():
        taken = reader.take(len(expected[start]) + 1)
        assert numbers(taken) == [*expected[start], 3]
        reader.ack(taken)
        reader.close()
    writer.publish("t/x", [4, 5])
    for start in expected:
        reader = Client(node, f"reader {start}")
        assert numbers(reader.take(2)) == [4, 5], "a known one goes on where it was"
        reader.close()
    writer.close()


def test_cursors_in_etcd(make, etcd_url):
    """The same, with the log on this machine and the metadata elsewhere; keys and values as the design says."""
    node = make(metadata=etcd_url)
    reader, _ = produce_and_ack(node, 10, 6)
    wait_for(lambda: acknowledged(etcd_url) == 6, what="the flush")
    with open_metadata(etcd_url) as metadata:
        stored = {key: json.loads(entry.value) for key, entry in metadata.list(PREFIX).items()}
    for key, value in stored.items():
        assert key.startswith("/holdfast/subscriptions/messages/messages.1.")
        assert key.endswith("/reader t%2F+/cursor")
        assert value.keys() == {"offset", "updated_at", "acked", "epoch"}
        assert abs(value["updated_at"] - time.time()) < 600 and value["epoch"] >= 1
    node.kill()
    reader.drop()
    node.restart()
    reader = Client(node, "reader")
    again = reader.take(4)
    assert numbers(again) == [6, 7, 8, 9]
    reader.ack(again)
    reader.nothing_more(node)
    reader.close()
