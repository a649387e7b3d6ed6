"""Replay from the past: what the store has dropped comes to an MQTT subscriber, and to Spark, from the lake."""

from __future__ import annotations

import queue
import threading
from pathlib import Path
from typing import TYPE_CHECKING

import paho.mqtt.client as paho
from paho.mqtt.packettypes import PacketTypes
from paho.mqtt.properties import Properties

import holdfast
from holdfast import Batch
from holdfast.spark import LakeOptions, lake
from node import Node

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


def subscriber(node: Node, name: str, start: str) -> tuple[paho.Client, queue.Queue[bytes]]:
    got: queue.Queue[bytes] = queue.Queue()
    client = paho.Client(paho.CallbackAPIVersion.VERSION2, name, protocol=paho.MQTTv5)
    client.on_message = lambda _, __, message: got.put(message.payload)
    connected, subscribed = threading.Event(), threading.Event()
    client.on_connect = lambda *_: connected.set()
    client.on_subscribe = lambda *_: subscribed.set()
    expiry = Properties(PacketTypes.CONNECT)
    expiry.SessionExpiryInterval = 600
    client.connect(*node.mqtt, clean_start=False, properties=expiry)
    client.loop_start()
    assert connected.wait(20)
    if start:
        asked = Properties(PacketTypes.SUBSCRIBE)
        asked.UserProperty = ("holdfast-start", start)
        client.subscribe("v/+/t", qos=1, properties=asked)
        assert subscribed.wait(20)
    return client, got


def take(got: queue.Queue[bytes], count: int) -> list[int]:
    return [int(got.get(timeout=20)) for _ in range(count)]


def test_a_dropped_generation_is_replayed_from_the_lake(spark: SparkSession, tmp_path: Path) -> None:
    store = f"sqlite:///{tmp_path}/store.db"
    with holdfast.open(store) as log:
        log.create("messages", shards=1)
        for first in range(0, 600, 100):  # two topics, of which the subscriber wants one
            rows = range(first, first + 100)
            log.append(
                "messages", Batch([f"v/{n % 3}/{'t' if n % 2 else 'x'}" for n in rows], [b"%d" % n for n in rows])
            )
        log.seal("messages")
        log.append("messages", Batch(["v/1/t"] * 10, [b"%d" % n for n in range(600, 610)]))
        lake(LakeOptions(store=store, root=f"{tmp_path}/lake", once=True, drop=True), spark=spark)
        assert [g.number for g in log.generations("messages")] == [2]
        expected = [n for n in range(600) if n % 2] + list(range(600, 610))
        rows = spark.read.format("holdfast").option("store", store).option("topics", "v/+/t").load()
        found = rows.orderBy("generation", "shard", "offset").selectExpr("int(string(payload)) as n").collect()
        assert [row.n for row in found] == expected
        with Node(tmp_path / "node", store=store, settings={"cursors.subscription_progress_flush_secs": 0.1}) as node:
            client, got = subscriber(node, "late", "beginning")
            assert take(got, len(expected)) == expected
            log.append("messages", Batch(["v/2/t"], [b"610"]))
            assert take(got, 1) == [610]
            client.disconnect()
            client.loop_stop()
