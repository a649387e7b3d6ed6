"""The one writer: many connections, one commit, and no acknowledgement before it."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable
from typing import Any

import holdfast
from holdfast.errors import HoldfastError, StoreError
from holdfast.log.contract import ReceivedId, Retained
from holdfast.model import LOG, RETAIN, Batch, Stream
from holdfast.mqtt.fastpath import PACKET_IDS, Inbox, pubacks, pubacks_where
from holdfast.mqtt.inbound import Inbound
from holdfast.runtime.ingest import Ingest

SECONDS = 10.0


class GatedLog:
    """A log whose appends wait at a gate, and fail while told to."""

    def __init__(self, shards: int = 1):
        self.log = holdfast.open("memory:")
        self.log.create(LOG, shards)
        self.gate = threading.Event()
        self.gate.set()
        self.arrived = threading.Event()
        self.sizes: list[int] = []
        self.error: HoldfastError | None = None

    def append_sharded(self, log: str, generation: int, parts: Any, *rest: Any) -> Any:
        self._wait()
        self.sizes.append(sum(map(len, parts.values())))
        return self.log.append_sharded(log, generation, parts, *rest)

    def append(self, log: str, batch: Any, **rest: Any) -> Any:
        self._wait()
        self.sizes.append(len(batch))
        return self.log.append(log, batch, **rest)

    def _wait(self) -> None:
        self.arrived.set()
        assert self.gate.wait(SECONDS)
        if self.error is not None:
            raise self.error

    def __getattr__(self, name: str) -> Any:
        return getattr(self.log, name)


class Publisher:
    """What the ingest sees of a connection."""

    def __init__(self, name: str, version: int = 4):
        self.name, self.version = name, version
        self.closed = False
        self.unacked = 0
        self.sent: list[bytes] = []
        self.failures = self.went_on = 0

    def stored(self, inbox: Inbox, heard: set[str] | None) -> None:
        if self.closed:
            return
        self.unacked -= len(inbox.packet_ids)
        if self.version == 5 and heard is not None and not heard.issuperset(inbox.topics):
            self.sent.append(pubacks_where(inbox.packet_ids, inbox.topics, inbox.flags, heard))
        else:
            self.sent.append(pubacks(inbox.packet_ids))

    def store_failed(self) -> None:
        self.failures += 1

    def read_on(self) -> None:
        self.went_on += 1


def inbox(first_id: int, *messages: tuple[str, int]) -> Inbox:
    """Topic and flags of each; QoS 1 ones get packet ids in order."""
    made = Inbox()
    for topic, flags in messages:
        made.topics.append(topic)
        made.payloads.append(f"{topic} {len(made.topics)}".encode())
        made.flags.append(flags)
        if flags & 3:
            made.packet_ids.append(PACKET_IDS[first_id])
            first_id += 1
    return made


class Bench:
    def __init__(self, log: GatedLog, heard: set[str] | None = None, bytes_max: int = 1 << 20):
        self.log = log
        self.commits: list[Any] = []
        self.failed: list[HoldfastError] = []

        def committed(appended: Any, parts: Any, now: int) -> None:
            self.commits.append((appended, dict(parts)))

        def anyone_for(topics: set[str]) -> set[str]:
            return heard if heard is not None else topics

        self.ingest = Ingest(log, bytes_max, committed, anyone_for, self.failed.append)

    def publish(self, publisher: Publisher, made: Inbox) -> bool:
        publisher.unacked += len(made.packet_ids)
        return self.ingest.publish(publisher, publisher.name, self.ingest.shard_of(publisher.name), made)


def run(work: Callable[[Bench], Awaitable[None]], **options: Any) -> Bench:
    async def whole() -> Bench:
        log = GatedLog(options.pop("shards", 1))
        bench = Bench(log, **options)
        writer = threading.Thread(target=bench.ingest.write)
        writer.start()
        try:
            await work(bench)
        finally:
            log.gate.set()
            await bench.ingest.drained()
            bench.ingest.close()
            await asyncio.get_running_loop().run_in_executor(None, writer.join, SECONDS)
            log.log.close()
        return bench

    return asyncio.run(asyncio.wait_for(whole(), 2 * SECONDS))


async def until(condition: Callable[[], Any]) -> None:
    async with asyncio.timeout(SECONDS):
        while not condition():  # noqa: ASYNC110 (anything may be waited for)
            await asyncio.sleep(0.001)


def test_nothing_is_acknowledged_before_the_commit_and_everything_in_one_write_after_it():
    async def work(bench: Bench) -> None:
        bench.log.gate.clear()
        one = Publisher("one")
        bench.publish(one, inbox(1, ("t", 1), ("t", 1), ("t", 0)))
        await until(bench.log.arrived.is_set)
        assert one.sent == [] and one.unacked == 2 and not bench.commits
        bench.log.gate.set()
        await until(lambda: one.sent)
        assert one.sent == [pubacks([PACKET_IDS[1], PACKET_IDS[2]])] and one.unacked == 0

    run(work)


def test_what_comes_during_a_commit_goes_in_one_commit_whoever_sent_it():
    async def work(bench: Bench) -> None:
        publishers = [Publisher(f"p{n}") for n in range(20)]
        bench.log.gate.clear()
        bench.publish(publishers[0], inbox(1, ("t", 1)))
        await until(bench.log.arrived.is_set)
        for publisher in publishers:
            bench.publish(publisher, inbox(7, ("t", 1), ("u", 1)))
        bench.log.gate.set()
        await until(lambda: publishers[-1].sent)
        assert bench.log.sizes == [1, 40]
        assert all(p.sent[-1] == pubacks([PACKET_IDS[7], PACKET_IDS[8]]) for p in publishers)
        assert (bench.ingest.commits, bench.ingest.messages) == (2, 41)

    run(work)


def test_rows_land_in_their_publishers_shard_in_order_with_all_their_columns():
    async def work(bench: Bench) -> None:
        bench.log.gate.clear()
        bench.publish(Publisher("first"), inbox(1, ("a", 0)))
        await until(bench.log.arrived.is_set)
        made = inbox(1, ("a", 1), ("b", 0))
        made.properties = [None, b"\x01\x01"]
        bench.publish(Publisher("p"), inbox(5, ("z", 1)))
        bench.publish(Publisher("p"), made)
        bench.log.gate.set()
        await bench.ingest.drained()
        shard = bench.ingest.shard_of("p")
        _, parts = bench.commits[-1]
        part = parts[shard]
        assert list(part.topics) == ["z", "a", "b"] and list(part.publishers) == ["p"] * 3
        assert list(part.flags) == [1, 1, 0] and list(part.properties) == [None, None, b"\x01\x01"]

    run(work, shards=4)


def test_an_mqtt_5_publisher_hears_that_nobody_listens():
    async def work(bench: Bench) -> None:
        five, three = Publisher("five", 5), Publisher("three", 4)
        for publisher in (five, three):
            bench.publish(publisher, inbox(1, ("known", 1), ("other", 0), ("unknown", 1)))
        await until(lambda: five.sent and three.sent)
        assert five.sent == [b"\x40\x02\x00\x01\x40\x03\x00\x02\x10"]
        assert three.sent == [b"\x40\x02\x00\x01\x40\x02\x00\x02"]

    run(work, heard={"known"})


def test_callbacks_come_in_order_after_the_acknowledgements():
    async def work(bench: Bench) -> None:
        told: list[tuple[str, bool]] = []
        one = Publisher("one")
        bench.log.gate.clear()
        bench.publish(one, inbox(1, ("t", 1)))
        bench.ingest.publish_one("one", "t", b"qos 2", 2, None, lambda ok: told.append((f"qos2 {len(one.sent)}", ok)))
        bench.ingest.in_turn(lambda ok: told.append(("turn", ok)))
        await until(bench.log.arrived.is_set)
        assert not told
        bench.log.gate.set()
        await until(lambda: len(told) == 2)
        assert told == [("qos2 1", True), ("turn", True)]
        assert bench.log.sizes == [2]

    run(work)


def test_retained_messages_are_stored_with_the_publish():
    async def work(bench: Bench) -> None:
        bench.publish(Publisher("p"), inbox(1, ("t", 1 | RETAIN), ("u", 1)))
        await bench.ingest.drained()
        (kept,) = bench.log.retained(LOG)
        # By its time it is recognised when it has expired: it is the one that the message has in the log.
        assert [part.times for _, parts in bench.commits for part in parts.values()] == [kept.time]
        assert isinstance(kept, Retained) and (kept.topic, kept.payload, kept.publisher) == ("t", b"t 1", "p")

    run(work)


def test_a_store_that_fails_acknowledges_nothing_tells_everybody_and_takes_the_next():
    async def work(bench: Bench) -> None:
        one, two = Publisher("one"), Publisher("two", 5)
        received = {9}  # as a session remembers a QoS 2 id
        bench.log.error = StoreError("disk full")
        bench.publish(one, inbox(1, ("t", 1)))
        bench.publish(two, inbox(1, ("t", 1)))
        bench.ingest.publish_one("one", "t", b"", 2, None, lambda ok: None if ok else received.discard(9))
        await until(lambda: bench.failed)
        assert one.sent == two.sent == [] and (one.failures, two.failures) == (1, 1)
        assert not received, "the client will send it again, and it must count as new"
        assert [str(error) for error in bench.failed] == ["disk full"] and not bench.commits
        bench.log.error = None
        bench.publish(one, inbox(2, ("t", 1)))
        await until(lambda: one.sent)
        assert one.sent == [pubacks([PACKET_IDS[2]])]
        head = bench.log.head(Stream(LOG, 0, 1))
        assert head.next_offset == 1, "nothing of the failed batch is in the log"

    run(work)


def test_enough_waiting_holds_publishers_back_until_it_is_on_its_way():
    async def work(bench: Bench) -> None:
        one = Publisher("one")
        bench.log.gate.clear()
        assert bench.publish(one, inbox(1, ("t", 1)))
        await until(bench.log.arrived.is_set)
        assert bench.publish(one, inbox(2, ("t", 1)))
        assert not bench.publish(one, inbox(3, ("t", 1)))
        assert one.went_on == 0
        bench.log.gate.set()
        await until(lambda: one.went_on == 1)
        await until(lambda: len(one.sent) == 3)

    run(work, bytes_max=100)


def test_a_connection_that_has_gone_is_not_written_to():
    async def work(bench: Bench) -> None:
        one = Publisher("one")
        bench.log.gate.clear()
        bench.publish(one, inbox(1, ("t", 1)))
        await until(bench.log.arrived.is_set)
        one.closed = True
        bench.log.gate.set()
        await bench.ingest.drained()
        assert one.sent == [] and bench.commits, "stored all the same"

    run(work)


def test_a_generation_that_was_sealed_meanwhile_is_followed():
    async def work(bench: Bench) -> None:
        one = Publisher("one")
        bench.publish(one, inbox(1, ("t", 1)))
        await until(lambda: len(one.sent) == 1)
        bench.log.seal(LOG)
        bench.publish(one, inbox(2, ("t", 1)))
        await until(lambda: len(one.sent) == 2)
        streams = [placed.stream for appended, _ in bench.commits for placed in appended.placed]
        assert [stream.generation for stream in streams] == [1, 2]
        assert bench.ingest.generation.number == 2

    run(work, shards=2)


def test_what_cannot_be_delivered_at_once_is_acknowledged_all_the_same_and_the_next_goes_on():
    """A fault below the commit's callback used to leave every later publish of everybody hanging."""

    async def work(bench: Bench) -> None:
        one, two = Publisher("one"), Publisher("two")
        told: list[bool] = []

        def broken(*_: Any) -> None:
            raise ZeroDivisionError("planted")

        bench.ingest._committed = broken
        bench.publish(one, inbox(1, ("a", 1)))
        bench.ingest.in_turn(broken)
        bench.ingest.in_turn(told.append)
        await until(lambda: told == [True])
        assert one.sent == [pubacks([PACKET_IDS[1]])]
        bench.publish(two, inbox(2, ("b", 1)))
        await until(lambda: two.sent == [pubacks([PACKET_IDS[2]])])

    run(work)


def test_what_another_node_has_stored_is_released_under_the_mark_it_has_there():
    """It landed after this node had read what is stored: under our own mark it would never be released, and whatever
    came next under its packet id would be taken for a repeat of it, acknowledged and not stored."""

    async def work(bench: Bench) -> None:
        there = ReceivedId("c", "born", 1, mark=7)
        bench.log.log.append(LOG, Batch(["t"], [b"first"]), received=[there])
        inbound, told = Inbound(born="born"), asyncio.get_running_loop().create_future()
        inbound.epoch = None  # type: ignore[assignment]
        receiving = bench.ingest.receiving("c", inbound, 1)
        assert inbound.marks[1] != there.mark
        bench.ingest.publish_one("c", "t", b"first", 2, None, told.set_result, receiving)
        assert await told
        assert inbound.marks[1] == there.mark

    run(work)
