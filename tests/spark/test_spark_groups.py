"""A streaming query as a member of a shared group: with MQTT clients, with other queries, and through restarts."""

from __future__ import annotations

import json
import os
import random
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args
from urllib.parse import quote

import numpy as np
import pytest
from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadMaxRows

from e2e.clients import V5, Dial, PahoClient
from holdfast import Batch, Stream, testing
from holdfast.batch import HeldPiece
from holdfast.errors import RequestError
from holdfast.groups.progress import Done
from holdfast.groups.protocol.nouns import Key, Layer, Loan, Mark, MemberId, Piece
from holdfast.log import blocks
from holdfast.model import now_micros
from holdfast.spark.groups.portions import Portion, planned, undone
from holdfast.spark.groups.reader import GroupStreamReader
from holdfast.spark.options import ReadOptions
from holdfast.spark.reading.schema import SCHEMA
from holdfast.spark.reading.schema import RowPiece as Rows
from node import Node

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from conftest import Fleet

Soon = Callable[..., None]
Says = Callable[[Callable[[], object]], str]

GROUP = "g:vehicle/#"
ALL = ReadAllAvailable()


# ------------------------------------------------------------------------------------------ planning


def held(piece: Piece, mark: Mark, skip: tuple[Layer, ...] = (), key: Key = "publisher") -> HeldPiece:
    return HeldPiece(Loan(MemberId("me"), piece, 1, "b.0"), mark, skip, key)


def some_mark(chance: random.Random, past: int) -> Mark:
    cursor = Mark(chance.randrange(-1, past // 2)).cursor()
    for _ in range(chance.randrange(4)):
        first = chance.randrange(past)
        cursor.ack_range(first, first + chance.randrange(6))
    return Mark.of_cursor(cursor)


@pytest.mark.parametrize("key", get_args(Key))
@pytest.mark.parametrize("seed", range(40))
def test_a_block_is_filtered_as_done_says(seed: int, key: Key) -> None:
    chance = random.Random(seed)
    count, of = 60, chance.choice([1, 2, 4])
    publishers = [f"v{chance.randrange(9)}" for _ in range(count)]
    topics = [f"t/{chance.randrange(9)}" for _ in range(count)]
    batch = Batch(topics, [b""] * count, publishers)
    columns, _, _ = blocks.record_batch(batch, now_micros())
    piece = Piece(Stream("messages", 0, 1), chance.randrange(of), of)
    mark = some_mark(chance, count)
    layers = tuple(
        Layer(n, tuple((part, some_mark(chance, count)) for part in range(n) if chance.random() < 0.7))
        for n in chance.sample([2, 4, 8], chance.randrange(3))
    )
    portions = planned({piece: held(piece, mark, layers, key)}, {piece.stream: count}, chance.choice([None, 7, 25]))
    done = Done(piece, mark, layers, key)
    for portion in portions:
        again = Portion.from_json("messages", json.loads(json.dumps(portion.to_json())))
        assert again == portion
        at = slice(portion.first, portion.past)
        rows = Rows(np.arange(count, dtype=np.int64)[at], columns.slice(portion.first, portion.rows))
        found = undone(again, rows)
        wanted = [n for n in range(portion.first, portion.past) if done.wants(n, publishers[n], topics[n])]
        assert found.offsets.tolist() == wanted
        assert found.batch.num_rows == len(wanted)


def test_a_batch_takes_its_share_of_each_piece_and_the_oldest_generation_first() -> None:
    old, new = Stream("messages", 0, 1), [Stream("messages", shard, 2) for shard in (0, 1)]
    pieces = {p: held(p, Mark(9)) for p in map(Piece, [old, *new])}
    ends = {old: 20, new[0]: 110, new[1]: 210}
    assert [(p.stream, p.first, p.past) for p in planned(pieces, ends, 40)] == [
        (old, 10, 20),
        (new[0], 10, 20),
        (new[1], 10, 30),
    ]
    assert sum(p.rows for p in planned(pieces, ends, None)) == 310
    assert planned(pieces, {}, None) == []


# ------------------------------------------------------------------------- readers without a session


@pytest.fixture
def fleet_at(small_fleet: Fleet) -> Callable[..., Fleet]:
    """Makes a fleet on any store. Its class cannot be imported: there are several modules by the name of conftest."""
    return type(small_fleet)


@pytest.fixture
def sigterm() -> Iterator[None]:
    """A reader takes SIGTERM for itself, as it may in a process of its own."""
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)


class Query:
    """The calls Spark makes, made one by one."""

    def __init__(self, fleet: Fleet, node: testing.RunningNode, group: str = GROUP):
        options = {"store": fleet.url, "group": group, "node": f"127.0.0.1:{node.mqtt_port}", "start": "beginning"}
        chosen = ReadOptions.of(options, streaming=True)
        assert chosen.group is not None
        self.reader = GroupStreamReader(chosen, chosen.group, SCHEMA, 2)
        self.at: dict[str, Any] = {}

    def begin(self) -> Query:
        self.at = self.reader.initialOffset()
        return self

    def plan(self, start: dict[str, Any] | None = None, limit: Any = ALL) -> dict[str, Any]:
        """Spark's checkpoint is JSON, and so is everything that passes through it."""
        return json.loads(json.dumps(self.reader.latestOffset(start or self.at, limit)))

    def rows(self, end: dict[str, Any]) -> list[int]:
        found = []
        for partition in self.reader.partitions(self.at, end):
            for batch in self.reader.read(partition):
                found += [int(payload.as_py()) for payload in batch.column("payload")]
        return found

    def batch(self, limit: Any = ALL) -> list[int]:
        end = self.plan(limit=limit)
        found = self.rows(end) if end != self.at else []
        self.at = end
        return found

    def pieces(self) -> set[Piece]:
        """What it holds; asking for the assignment would count as reading it."""
        client = self.reader._client
        assert client is not None
        return set(client._machine.streams)


class Place:
    def __init__(self, fleet: Fleet, node: testing.RunningNode):
        self.fleet, self.node = fleet, node
        self.queries: list[Query] = []

    def query(self) -> Query:
        self.queries.append(Query(self.fleet, self.node))
        return self.queries[-1]


@pytest.fixture
def place(small_fleet: Fleet, sigterm: None) -> Iterator[Place]:
    """A node on the store, in this process."""
    with testing.node(small_fleet.url, groups__ping_secs=0.3, groups__ping_timeout_secs=1.0) as node:
        made = Place(small_fleet, node)
        yield made
        for query in made.queries:
            query.reader.stop()


def test_batch_after_batch(place: Place) -> None:
    fleet, query = place.fleet, place.query().begin()
    fleet.publish(500)
    assert sorted(query.batch()) == list(range(500))
    assert query.batch() == []
    fleet.publish(300)
    few = query.batch(ReadMaxRows(100))
    assert len(few) == 100
    assert sorted(few + query.batch()) == list(range(500, 800))


def test_a_repeated_batch_is_the_same_batch(place: Place, soon: Soon) -> None:
    fleet, first = place.fleet, place.query().begin()
    fleet.publish(400)
    first.batch(ReadMaxRows(150))
    end = first.plan(limit=ReadMaxRows(100))
    rows = first.rows(end)
    first.reader.stop()  # killed, in the middle of a batch
    # Meanwhile others go on, and more is written.
    fleet.publish(100)
    other = place.query().begin()
    soon(lambda: len(other.pieces()) == 4, 10)
    others = other.batch()
    assert sorted(others) == sorted(set(range(500)) - set(first_rows(first)))
    again = place.query()
    again.at = first.at
    assert again.rows(end) == rows
    # It is committed now, which the group must hear of, whoever holds the streams.
    again.plan(end)


def first_rows(query: Query) -> list[int]:
    """What the batch that ended at `query.at` has read."""
    return query.rows(query.at)


def test_what_was_committed_before_a_restart_is_not_read_again(place: Place, soon: Soon) -> None:
    fleet, first = place.fleet, place.query().begin()
    fleet.publish(200)
    end = first.plan()
    rows = first.rows(end)
    assert len(rows) == 200
    first.reader.stop()  # Spark had committed it, and did not come to say so
    again = place.query()
    assert again.plan(end) == end
    other = place.query().begin()
    soon(lambda: len(other.pieces()) == 2, 10)
    assert other.batch() == []


def test_streams_move_between_queries_at_the_end_of_a_batch(place: Place, soon: Soon) -> None:
    fleet, one = place.fleet, place.query().begin()
    fleet.publish(400)
    end = one.plan()
    rows = one.rows(end)
    two = place.query().begin()
    assert two.batch() == []
    time.sleep(0.5)
    assert two.pieces() == set()  # what is in the batch stays in the batch
    one.at = one.plan(end)
    soon(lambda: len(two.pieces()) == 2, 10)
    one.at = one.plan()
    fleet.publish(400)
    more = [one.batch(), two.batch()]
    assert all(more)
    assert sorted(rows + more[0] + more[1]) == list(range(800))
    two.reader.stop()
    soon(lambda: len(one.pieces()) == 4, 10)


def test_more_queries_than_streams(fleet_at: Callable[..., Fleet], tmp_path: Path, sigterm: None, soon: Soon) -> None:
    fleet = fleet_at(f"sqlite:///{tmp_path}/one.db", shards=1)
    with testing.node(fleet.url, groups__ping_secs=0.3, groups__ping_timeout_secs=1.0) as node:
        one, two, three = (Query(fleet, node) for _ in range(3))
        fleet.publish(100)
        found = one.begin().batch()
        for query in (two, three):
            query.begin().batch()
        one.batch()

        def shared() -> bool:
            held = [query.pieces() for query in (one, two, three)]
            return all(held) and sum(map(len, held)) == 4

        soon(shared, 15)
        fleet.publish(300)
        batches = [query.batch() for query in (one, two, three)]
        assert all(batches)
        three.plan()
        three.reader.stop()
        soon(lambda: len(one.pieces()) == len(two.pieces()) == 2, 15)
        fleet.publish(100)
        batches += [one.batch(), two.batch()]
        assert sorted(sum(batches, found)) == list(range(500))
        for query in (one, two):
            query.reader.stop()
    fleet.close()


def test_a_signal_does_not_cut_its_last_words_short(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    query = place.query().begin()
    client = query.reader._client
    assert client is not None
    close, said, exits = client.close, [], []

    def interrupted() -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        close()
        said.append("good-bye")

    monkeypatch.setattr(client, "close", interrupted)
    monkeypatch.setattr(os, "_exit", exits.append)
    query.reader.stop()
    assert (said, exits) == (["good-bye"], [0])
    place.queries.clear()


def test_a_checkpoint_of_something_else(place: Place) -> None:
    query = place.query().begin()
    for other in ({"group": "h:t/#", "batch": 1, "read": []}, {"done": 0, "at": {}, "batch": 1}):
        with pytest.raises(RequestError, match="this checkpoint is not of group 'g:vehicle/#'"):
            query.plan(other)


# ----------------------------------------------------------------------------------- with a session


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Node]:
    settings = {"log.shards": 6, "groups.ping_secs": 1, "groups.ping_timeout_secs": 6}
    with Node(tmp_path_factory.mktemp("node"), settings=settings) as running:
        yield running


@pytest.fixture
def shared(node: Node, fleet_at: Callable[..., Fleet]) -> Iterator[Fleet]:
    """Messages in the node's own store."""
    made = fleet_at(f"sqlite:///{node.folder}/data/holdfast.db")
    made.count = made.total("messages")
    yield made
    made.close()


def stream(spark: SparkSession, node: Node, store: str, **options: Any) -> Any:
    reader = spark.readStream.format("holdfast").option("store", store)
    return reader.option("node", f"127.0.0.1:{node.mqtt_port}").options(**options).load()


def members(node: Node, group: str) -> dict[str, int]:
    view = node.get(f"/api/v1/groups/{quote(group, safe='')}")
    return {each["session"]: each["streams"] for each in view["members"]}


@pytest.mark.parametrize(
    ("key", "of_three", "of_two"),
    [("publisher", [2, 2, 2], [3, 3]), ("topic", [6, 6, 12], [12, 12]), ("message", [8, 8, 8], [12, 12])],
)
def test_two_mqtt_clients_and_a_query_share_a_group(
    spark: SparkSession,
    node: Node,
    shared: Fleet,
    tmp_path: Path,
    soon: Soon,
    key: Key,
    of_three: list[int],
    of_two: list[int],
) -> None:
    """Six streams, whole or each in four slices."""
    group = f"mixed-{key}:vehicle/#"
    node.post("/api/v1/groups", {"name": f"mixed-{key}", "filter": "vehicle/#", "key": key})
    clients = [PahoClient(Dial(client_id=f"{key}{n}", version=V5, port=node.mqtt_port)).connect() for n in (1, 2)]
    for client in clients:
        client.subscribe(f"$share/mixed-{key}/vehicle/#")
    read: list[int] = []

    def keep(frame: Any, _: int) -> None:
        read.extend(int(bytes(row.payload)) for row in frame.select("payload").collect())

    writer = stream(spark, node, shared.url, group=group).writeStream.foreachBatch(keep)
    query = writer.option("checkpointLocation", str(tmp_path / "checkpoint")).start()
    try:
        soon(lambda: sorted(members(node, group).values()) == of_three, 60)
        first = shared.count
        got: list[list[int]] = [[], []]

        def everything() -> bool:
            for mine, client in zip(got, clients, strict=True):
                while not client.messages.empty():
                    mine.append(int(client.messages.get().payload))
            return len(got[0]) + len(got[1]) + len(read) >= shared.count - first

        for _ in range(5):
            shared.publish(120)
            time.sleep(0.1)
        soon(everything, 90)
        assert read and all(got), "somebody got nothing"
        assert sorted(got[0] + got[1] + read) == list(range(first, shared.count))
        soon(lambda: node.get(f"/api/v1/groups/{quote(group, safe='')}")["lag"] == 0, 10)
        query.stop()
        # At once, not after a timeout: it said good-bye.
        soon(lambda: sorted(members(node, group).values()) == of_two, 4)
        shared.publish(120)
        soon(everything, 60)
        assert sorted(got[0] + got[1] + read) == list(range(first, shared.count))
    finally:
        query.stop()
        for client in clients:
            client.close()


def test_available_now_acknowledges_its_last_batch(
    spark: SparkSession, node: Node, shared: Fleet, tmp_path: Path, soon: Soon
) -> None:
    group = "once:vehicle/#"
    first = shared.count
    node.post("/api/v1/groups", {"name": "once", "filter": "vehicle/#", "start": "latest"})
    found: list[int] = []

    def keep(frame: Any, _: int) -> None:
        found.extend(int(bytes(row.payload)) for row in frame.select("payload").collect())

    for count in (300, 0, 200):
        if count:
            shared.publish(count)
        frame = stream(spark, node, shared.url, group=group, maxMessagesPerTrigger=150)
        writer = frame.writeStream.foreachBatch(keep).option("checkpointLocation", str(tmp_path / "checkpoint"))
        writer.trigger(availableNow=True).start().awaitTermination(60)
        assert sorted(found) == list(range(first, shared.count))
        soon(lambda: members(node, group) == {}, 4)
        assert node.get(f"/api/v1/groups/{quote(group, safe='')}")["lag"] == 0


def test_a_node_that_is_not_there(spark: SparkSession, small_fleet: Fleet, tmp_path: Path, says: Says) -> None:
    frame = (
        spark.readStream.format("holdfast")
        .option("store", small_fleet.url)
        .options(group="g:t/#", node="127.0.0.1:1")
        .load()
    )
    query = frame.writeStream.format("noop").option("checkpointLocation", str(tmp_path / "checkpoint")).start()
    line = says(lambda: query.awaitTermination(60))
    assert line == "node 127.0.0.1:1 cannot be reached: Connection refused; is it running there?"


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"group": "g"}, "'g' is no group; write NAME:FILTER"),
        ({"group": "g:t", "topics": "x"}, "option 'topics' does not go with group"),
        ({"group": "g:t", "subscription": "s"}, "option 'subscription' does not go with group"),
        ({"group": "g:t", "log": "other"}, "groups share the log 'messages'"),
        ({"group": "g:t", "node": "nowhere:x"}, "'nowhere:x' is no node; write host:port"),
        ({"group": "g:t", "start": '{"messages.1.0": 3}'}, "is not a start position"),
        ({"node": "127.0.0.1:1883"}, "option 'node' goes with group, which is missing"),
    ],
)
def test_options_that_do_not_go_together(small_fleet: Fleet, options: dict[str, str], error: str) -> None:
    with pytest.raises(RequestError, match=error):
        ReadOptions.of({"store": small_fleet.url, **options}, streaming=True)


def test_a_group_is_for_streams(small_fleet: Fleet) -> None:
    with pytest.raises(RequestError, match="option 'group' is for streams only"):
        ReadOptions.of({"store": small_fleet.url, "group": "g:t"}, streaming=False)
