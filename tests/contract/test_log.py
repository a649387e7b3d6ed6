"""The log's promises, each written once and held against every store."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from pathlib import Path

import pytest

import holdfast
from holdfast import ABSENT, AppendKey, At, Batch, Beginning, Log, Message, Next, Since, Stream
from holdfast.log import blocks, index
from holdfast.log.contract import TOPICS_SWEPT, Data, NewBlock, Retained, within_bytes
from holdfast.log.retention import FULL_ROWS, RetentionSettings, expire, maintain
from holdfast.store.memory.log import MemoryLog

Opener = Callable[[], Log]


@pytest.fixture(params=["memory", "sqlite", "postgres"])
def opener(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Opener]:
    """Opens the same store again and again, as several processes would."""
    url = {
        "memory": lambda: f"memory:{request.node.name}",
        "sqlite": lambda: f"sqlite:///{tmp_path}/log.db",
        "postgres": lambda: request.getfixturevalue("postgres_url"),
    }[request.param]()
    opened: list[Log] = []

    def open_() -> Log:
        opened.append(holdfast.open(url))
        return opened[-1]

    yield open_
    for log in opened:
        log.close()


@pytest.fixture
def log(opener: Opener) -> Log:
    log = opener()
    log.create("messages", shards=4)
    log.create("one", shards=1)
    return log


ONE = Stream("one", 0, 1)


def fill(log: Log, count: int, *, topic: str = "t/{}", start: int = 0, name: str = "one", per: int = 10) -> None:
    """`count` messages with payloads that tell their number, in blocks of `per`."""
    for first in range(start, start + count, per):
        rows = range(first, min(first + per, start + count))
        log.append(name, Batch([topic.format(n) for n in rows], [str(n).encode() for n in rows], times=first + 1))


def payloads(chunks: list[holdfast.log.Chunk]) -> list[int]:
    return [int(p) for chunk in chunks for p in chunk.batch.column(blocks.PAYLOAD).to_pylist()]


def read_all(log: Log, stream: Stream = ONE, topics: str | None = None, **limits: int) -> list[int]:
    offset, found = 0, []
    while offset < log.head(stream).next_offset:
        reading = log.read(stream, offset, topics=topics, **limits)
        assert reading.next_offset > offset
        found += payloads(reading.chunks)
        offset = reading.next_offset
    return found


# -- appending -------------------------------------------------------------------------------------------


def test_offsets_are_gapless_from_zero(log: Log) -> None:
    fill(log, 25, per=7)
    reading = log.read(ONE, 0)
    assert [o for chunk in reading.chunks for o in chunk.offsets()] == list(range(25))
    assert payloads(reading.chunks) == list(range(25))
    assert (reading.next_offset, reading.finalised) == (25, False)


def test_every_column_comes_back_as_it_went_in(log: Log) -> None:
    sent = [
        Message("a/b", b"\x00\xff", "p1", qos=2, retain=True, properties=b"\x26\x00", time=5),
        Message("ü/€", b"", "p1", qos=0, time=7),
    ]
    log.append("one", Batch.of(sent))
    (chunk,) = log.read(ONE, 0).chunks
    assert chunk.batch.schema.equals(blocks.SCHEMA)
    assert chunk.batch.column("topic").to_pylist() == ["a/b", "ü/€"]
    assert chunk.batch.column("payload").to_pylist() == [b"\x00\xff", b""]
    assert chunk.batch.column("publisher").to_pylist() == ["p1", "p1"]
    assert chunk.batch.column("flags").to_pylist() == [6, 0]
    assert chunk.batch.column("properties").to_pylist() == [b"\x26\x00", None]
    assert [t.timestamp() for t in chunk.batch.column("time").to_pylist()] == [5e-6, 7e-6]


def test_a_batch_makes_one_block_per_touched_stream_and_tells_where_each_row_went(log: Log) -> None:
    batch = Batch.of(Message("t", str(n).encode(), f"vehicle-{n}") for n in range(40))
    appended = log.append("messages", batch)
    assert len({p.stream for p in appended.placed}) == len(appended.placed) == 4
    offsets = appended.offsets()
    for n, (stream, offset) in enumerate(offsets):
        reading = log.read(stream, offset, rows_max=1)
        assert payloads(reading.chunks) == [n]


def test_one_publishers_messages_keep_their_order_in_one_stream(log: Log) -> None:
    for n in range(10):
        log.append("messages", Batch.of(Message(f"t/{n % 3}", str(n).encode(), f"v{k}") for k in range(5)))
    for k in range(5):
        generation, shard = log.shard_of("messages", f"v{k}", "")
        mine = [
            int(payload)
            for chunk in log.read(Stream("messages", shard, generation), 0).chunks
            for payload, publisher in zip(
                chunk.batch.column("payload").to_pylist(), chunk.batch.column("publisher").to_pylist(), strict=True
            )
            if publisher == f"v{k}"
        ]
        assert mine == list(range(10))


def test_sharding_by_topic_puts_a_topic_in_one_stream(log: Log) -> None:
    log.create("by-topic", shards=4, shard_by="topic")
    log.append("by-topic", Batch.of(Message(f"t/{n % 8}", b"1", f"v{n}") for n in range(64)))
    assert [h.stream.shard for h in log.streams("by-topic", "t/3")] == [log.shard_of("by-topic", "", "t/3")[1]]
    assert sum(c.batch.num_rows for c in log.scan("by-topic", topics="t/3")) == 8


def test_create_if_absent_and_expected_offset(log: Log) -> None:
    log.append("one", Batch(["t"], [b"0"]), expect={0: ABSENT})
    with pytest.raises(holdfast.PreconditionFailed, match=r"to be 0, it is 1"):
        log.append("one", Batch(["t"], [b"x"]), expect={0: ABSENT})
    log.append("one", Batch(["t"], [b"1"]), expect={0: 1})
    with pytest.raises(holdfast.PreconditionFailed, match=r"to be 1, it is 2"):
        log.append("one", Batch(["t"], [b"x"]), expect={0: 1})
    assert read_all(log) == [0, 1]


def test_a_failed_precondition_on_one_stream_leaves_the_others_alone(log: Log) -> None:
    batch = Batch.of(Message("t", b"1", f"vehicle-{n}") for n in range(40))
    with pytest.raises(holdfast.PreconditionFailed):
        log.append("messages", batch, expect={3: 7})
    assert [h.next_offset for h in log.heads("messages")] == [0, 0, 0, 0]


def test_a_repeated_key_changes_nothing_and_returns_the_first_result(opener: Opener, log: Log) -> None:
    batch = Batch.of(Message("t", str(n).encode(), f"vehicle-{n}") for n in range(40))
    first = log.append("messages", batch, key=AppendKey("spark", 1))
    again = opener().append("messages", batch, key=AppendKey("spark", 1))
    assert (first.repeated, again.repeated) == (False, True)
    assert again.offsets() == first.offsets()
    assert sum(h.next_offset for h in log.heads("messages")) == 40
    assert not log.append("messages", batch, key=AppendKey("spark", 2)).repeated
    assert log.append("messages", batch, key=AppendKey("spark", 1)).repeated
    assert not log.append("messages", batch, key=AppendKey("other", 1)).repeated
    assert sum(h.next_offset for h in log.heads("messages")) == 120


def test_a_failed_append_does_not_use_up_its_key(log: Log) -> None:
    with pytest.raises(holdfast.PreconditionFailed):
        log.append("one", Batch(["t"], [b"0"]), expect={0: 9}, key=AppendKey("w", 1))
    assert not log.append("one", Batch(["t"], [b"0"]), key=AppendKey("w", 1)).repeated
    assert read_all(log) == [0]


def test_threads_append_at_once_without_gap_or_loss(log: Log) -> None:
    def write(writer: int) -> list[tuple[Stream, int]]:
        got = []
        for n in range(20):
            batch = Batch.of(Message("t", f"{writer * 1000 + n}".encode(), f"p{k}") for k in range(4))
            got += log.append("messages", batch).offsets()
        return got

    with ThreadPoolExecutor(4) as pool:
        taken = [place for got in pool.map(write, range(4)) for place in got]
    assert len(set(taken)) == 4 * 20 * 4
    for head in log.heads("messages"):
        chunks = log.read(head.stream, 0).chunks
        assert [o for c in chunks for o in c.offsets()] == list(range(head.next_offset))
        assert {(head.stream, o) for c in chunks for o in c.offsets()} <= set(taken)


def test_retained_messages_are_kept_replaced_and_cleared_with_the_append(opener: Opener, log: Log) -> None:
    def last(topic: str, payload: bytes) -> Retained:
        return Retained(topic, payload, "p", 5, b"\x26", 7)

    log.append("one", Batch(["a", "b"], [b"1", b"2"]), retained=[last("a", b"0"), last("b", b"2"), last("a", b"1")])
    assert sorted(log.retained("one")) == [last("a", b"1"), last("b", b"2")]
    with pytest.raises(holdfast.PreconditionFailed):
        log.append("one", Batch(["a"], [b"3"]), retained=[last("a", b"3")], expect={0: 9})
    log.append("one", Batch(["b"], [b""]), retained=[last("b", b"")])
    assert opener().retained("one") == [last("a", b"1")]
    assert log.retained("messages") == []


def test_a_retained_message_is_forgotten_only_if_it_is_still_the_one_that_was_meant(opener: Opener, log: Log) -> None:
    def last(topic: str, time: int) -> Retained:
        return Retained(topic, b"x", "p", 5, None, time)

    log.append("one", Batch(["t"], [b""]), retained=[last("a", 1), last("b", 2), last("c", 3), last("ü/+", 4)])
    log.append("one", Batch(["t"], [b""]), retained=[last("b", 5)])
    log.forget_retained("one", [("b", 2), ("never", 1), ("a", 1), ("ü/+", 4)])
    assert sorted(opener().retained("one")) == [last("b", 5), last("c", 3)]
    log.forget_retained("messages", [("c", 3)])
    log.forget_retained("one", [])
    assert sorted(log.retained("one")) == [last("b", 5), last("c", 3)]


# -- reading ---------------------------------------------------------------------------------------------


def test_row_limit_cuts_blocks_and_goes_on_where_it_stopped(log: Log) -> None:
    fill(log, 25, per=10)
    reading = log.read(ONE, 3, rows_max=9)
    assert (payloads(reading.chunks), reading.next_offset) == (list(range(3, 12)), 12)
    assert read_all(log, rows_max=4) == list(range(25))


@pytest.mark.parametrize("topics", [None, "t/#", "t/5", "+/12"])
def test_a_read_stops_before_until(log: Log, topics: str | None) -> None:
    fill(log, 30, per=10)
    for until in (1, 7, 10, 13, 30, 99):
        reading = log.read(ONE, 0, topics=topics, until=until)
        everything = log.read(ONE, 0, topics=topics)
        assert payloads(reading.chunks) == [n for n in payloads(everything.chunks) if n < until]
        assert reading.next_offset == min(until, 30)


def test_byte_limit_gives_at_least_one_row(log: Log) -> None:
    log.append("one", Batch(["t"] * 4, [b"1" * 1000] * 4))
    reading = log.read(ONE, 0, bytes_max=1)
    assert (reading.num_rows, reading.next_offset) == (1, 1)
    reading = log.read(ONE, 0, bytes_max=2500)
    assert (reading.num_rows, reading.next_offset) == (2, 2)
    log.append("one", Batch(["u"] * 2, [b"2" * 1000] * 2))
    reading = log.read(ONE, 0, bytes_max=1, topics="u")
    assert (reading.num_rows, reading.next_offset) == (1, 5)


@pytest.mark.parametrize(
    ("topics", "expected"),
    [
        ("t/3", [3]),
        ("t/+", list(range(30))),
        ("t/#", list(range(30))),
        ("#", list(range(30))),
        ("+/7", [7]),
        ("u/#", []),
        ("$SYS/#", [30]),
    ],
)
@pytest.mark.parametrize("kept", ["fresh", "maintained"])
def test_filters_find_what_they_mean(log: Log, topics: str, expected: list[int], kept: str) -> None:
    fill(log, 30, per=4)
    log.append("one", Batch(["$SYS/x"], [b"30"]))
    if kept == "maintained":
        log.seal("one")
        maintain(log)
        log.cache.clear()
    assert read_all(log, topics=topics) == expected
    assert read_all(log, topics=topics, rows_max=1) == expected
    assert payloads(list(log.scan("one", topics=topics))) == expected


def test_a_filtered_read_tells_the_offsets_of_its_rows(log: Log) -> None:
    fill(log, 30, per=10, topic="t/{}")
    log.append("one", Batch(["t/3", "x", "t/3"], [b"30", b"31", b"32"]))
    reading = log.read(ONE, 0, topics="t/3")
    assert [o for c in reading.chunks for o in c.offsets()] == [3, 30, 32]
    assert log.read(ONE, 31, topics="t/3").chunks[0].offsets() == [32]


def test_reading_by_time_starts_at_the_first_message_that_late(log: Log) -> None:
    times = [10, 20, 20, 40, 30, 50]  # one of them went back
    for n, time in enumerate(times):
        log.append("one", Batch(["t"], [str(n).encode()], times=time))
    log.append("one", Batch(["t"] * 3, [b"6", b"7", b"8"], times=[60, 70, 80]))
    head = log.head(ONE)
    expected = {5: 0, 10: 0, 11: 1, 20: 1, 21: 3, 40: 3, 41: 5, 60: 6, 61: 7, 80: 8, 81: 9}
    assert {time: log.offset_at(head, time) for time in expected} == expected
    start = Since(datetime.fromtimestamp(41e-6, UTC))
    assert payloads(list(log.scan("one", start))) == [5, 6, 7, 8]


def test_start_positions(log: Log) -> None:
    fill(log, 10)
    assert log.positions("one", Beginning()) == {ONE: 0}
    assert log.positions("one", Next()) == {ONE: 10}
    assert log.positions("one", At({ONE: 4})) == {ONE: 4}
    assert log.positions("one", At(every=99)) == {ONE: 10}
    assert log.positions("one", Since(datetime.now(UTC))) == {ONE: 10}


def test_an_exact_filter_looks_into_few_blocks_however_much_others_wrote(log: Log) -> None:
    others = 40_000
    for first in range(0, others, 500):
        rows = [f"others/{(first + n) % 5000}" for n in range(500)]
        if first % 10_000 == 0:
            rows[7] = "mine"
        log.append("one", Batch(rows, [b"0"] * 500))

    def looked_into(topics: str) -> tuple[int, int]:
        offset, rows, blocks_read = 0, 0, 0
        while offset < others:
            reading = log.read(ONE, offset, topics=topics)
            rows += reading.num_rows
            blocks_read += reading.blocks_read
            offset = reading.next_offset
        return rows, blocks_read

    for upkeep in (False, True):
        if upkeep:
            maintain(log)
            assert log.backend.indexed_to(log.head(ONE).id) > 0 or len(log.backend.entries(1, 0, 100)) < 64
        mine, blocks_read = looked_into("mine")
        assert mine == 4
        assert blocks_read <= 4 * mine + 4
        some, blocks_read = looked_into("others/77/#")
        assert some == 8
        assert blocks_read <= 4 * some + 17
        assert looked_into("nobody") == (0, 0)


def test_index_runs_are_built_and_compacted_and_still_find_everything(log: Log) -> None:
    for first in range(0, 64 * 9 * 4, 4):  # more than nine runs of blocks that count as full by their bytes
        log.append("one", Batch([f"t/{(first + n) % 777}" for n in range(4)], [b"1" * 70_000] * 4))
    maintain(log)
    head = log.head(ONE)
    runs = log.backend.runs(head.id, [0], 0)
    assert {run.level for run in runs} == {1, 2}
    assert [run.first for run in runs[1:]] == [run.past for run in runs[:-1]]
    log.cache.clear()
    for topic in ("t/0", "t/500", "t/776"):
        found = log.read(ONE, 0, topics=topic, bytes_max=1 << 30)
        expected = [n for n in range(64 * 9 * 4) if n % 777 == int(topic[2:])]
        assert [o for c in found.chunks for o in c.offsets()] == expected
        assert found.blocks_read <= len(expected)


# -- generations -----------------------------------------------------------------------------------------


def test_sealing_finalises_streams_and_opens_the_next_with_another_shard_count(opener: Opener, log: Log) -> None:
    fill(log, 5)
    other = opener()
    other.append("one", Batch(["t"], [b"5"]))
    opened = log.seal("one", shards=3)
    assert (opened.number, opened.shards) == (2, 3)
    assert [str(h.stream) for h in log.heads("one")] == ["one.1.0", "one.2.0", "one.2.1", "one.2.2"]
    reading = log.read(ONE, 0)
    assert reading.finalised and reading.next_offset == 6
    # A writer that had not heard of it lands in the new generation.
    (placed,) = other.append("one", Batch(["t"], [b"6"], "p")).placed
    assert placed.stream.generation == 2 and placed.base == 0
    assert log.head(ONE).next_offset == 6


def test_a_limited_read_is_finalised_only_at_the_very_end(log: Log) -> None:
    fill(log, 5)
    log.seal("one")
    assert not log.read(ONE, 0, rows_max=4).finalised
    assert log.read(ONE, 4, rows_max=4).finalised
    assert log.read(ONE, 5).finalised


def test_appends_and_seals_at_once_lose_nothing(log: Log) -> None:
    done = threading.Event()

    def write() -> int:
        count = 0
        while not done.is_set():
            log.append("one", Batch(["t"], [b"1"]))
            count += 1
        return count

    with ThreadPoolExecutor(2) as pool:
        counts = [pool.submit(write) for _ in range(2)]
        for shards in (2, 1, 3, 1):
            log.seal("one", shards)
        done.set()
        total = sum(c.result() for c in counts)
    assert sum(h.next_offset for h in log.heads("one")) == total
    assert sum(c.batch.num_rows for c in log.scan("one")) == total


def test_sealed_generations_without_a_matching_topic_are_left_out(log: Log) -> None:
    fill(log, 3, topic="a/{}")
    log.seal("one")
    fill(log, 3, topic="b/{}")
    assert [h.stream.generation for h in log.streams("one", "b/#")] == [2]
    assert [h.stream.generation for h in log.streams("one", "a/1")] == [1, 2]


# -- upkeep ----------------------------------------------------------------------------------------------


def test_small_blocks_are_merged_and_nothing_else_changes(log: Log) -> None:
    fill(log, 2 * FULL_ROWS + 500, per=100)
    before = log.head(ONE)
    assert len(log.backend.entries(before.id, 0, 1000)) == 25
    done = maintain(log)
    assert done.merged == 20
    assert [e.messages for e in log.backend.entries(before.id, 0, 1000)] == [FULL_ROWS, FULL_ROWS] + [100] * 5
    log.cache.clear()
    assert read_all(log) == list(range(2 * FULL_ROWS + 500))
    assert read_all(log, topics="t/1234") == [1234]
    after = log.head(ONE)
    assert (after.next_offset, after.oldest, after.newest) == (before.next_offset, before.oldest, before.newest)
    assert after.bytes == sum(e.bytes for e in log.backend.entries(after.id, 0, 1000))
    assert log.offset_at(after, 1_201) == 1_200
    assert maintain(log).idle


def test_very_small_blocks_are_merged_in_steps_and_leave_nothing(log: Log) -> None:
    fill(log, 700, per=1)
    single = [e.body for e in log.backend.entries(log.head(ONE).id, 0, 1000)]
    maintain(log)
    entries = log.backend.entries(log.head(ONE).id, 0, 1000)
    assert len(entries) < 20, "merged once would be 700 / 64, with what is left over"
    assert log.backend.bodies(single[:640]) == {}
    log.cache.clear()
    assert read_all(log) == list(range(700))
    assert maintain(log).idle


def test_blocks_that_somebody_else_has_merged_are_not_replaced_again(log: Log) -> None:
    """Two processes may keep the same log in shape."""
    fill(log, 2 * FULL_ROWS, per=100)
    head = log.head(ONE)
    old = log.backend.entries(head.id, 0, 10)
    maintain(log)
    merged = log.backend.entries(head.id, 0, 100)
    data = blocks.encode(blocks.empty())
    assert not log.backend.replace(head.id, old, NewBlock(0, 1000, 1, 1, blocks.checksum(data), b"", data))
    assert log.backend.entries(head.id, 0, 100) == merged
    again = [entry._replace(body=entry.body + 1000) for entry in merged[:2]]
    assert not log.backend.replace(head.id, again, NewBlock(0, 2000, 1, 1, blocks.checksum(data), b"", data))
    log.cache.clear()
    assert read_all(log) == list(range(2 * FULL_ROWS))


def test_upkeep_may_rest_between_its_steps(log: Log) -> None:
    fill(log, 300, per=1)
    assert maintain(log, rests=0.5).merged
    assert read_all(log) == list(range(300))


def test_a_reader_goes_on_while_blocks_are_merged_under_it(log: Log) -> None:
    fill(log, 3000, per=20)
    log.cache.clear()
    found: list[int] = []
    offset = 0
    merger = threading.Thread(target=maintain, args=(log,))
    while offset < 3000:
        reading = log.read(ONE, offset, rows_max=150)
        found += payloads(reading.chunks)
        offset = reading.next_offset
        if offset == 300:
            merger.start()
    merger.join()
    assert found == list(range(3000))


def test_retention_by_age_and_by_size_drops_whole_sealed_generations(log: Log) -> None:
    now = 1_000_000_000
    log.clock = log.steady = lambda: now
    for generation in range(1, 5):
        log.append("one", Batch(["t"] * 10, [b"1" * 100] * 10, times=generation * 100_000_000))
        log.seal("one")
    assert expire(log, "one", RetentionSettings(keep_seconds=750)) == 2
    assert [g.number for g in log.generations("one")] == [3, 4, 5]
    size = log.head(Stream("one", 0, 4)).bytes
    assert expire(log, "one", RetentionSettings(keep_bytes=size + 1)) == 1
    assert [g.number for g in log.generations("one")] == [4, 5]
    with pytest.raises(holdfast.UnknownStream, match=r"one\.1\.0"):
        log.read(ONE, 0)
    maintain(log)
    assert sum(c.batch.num_rows for c in log.scan("one")) == 10
    assert expire(log, "one", RetentionSettings(keep_seconds=0.0)) == 1
    assert [g.number for g in log.generations("one")] == [5]


def test_generations_roll_by_age_and_size(log: Log) -> None:
    assert maintain(log, RetentionSettings(generation_bytes_max=1)).sealed == 0  # empty ones stay
    fill(log, 5)
    assert maintain(log, RetentionSettings(generation_bytes_max=1 << 30)).sealed == 0
    assert maintain(log, RetentionSettings(generation_bytes_max=1)).sealed == 1
    fill(log, 5)
    assert maintain(log, RetentionSettings(generation_seconds_max=0.0)).sealed == 1
    assert [g.number for g in log.generations("one")] == [1, 2, 3]


def test_a_dropped_generation_leaves_no_rows_behind(log: Log) -> None:
    fill(log, 3000, per=100)
    log.seal("one")
    maintain(log)
    stream = log.head(ONE).id
    bodies = [e.body for e in log.backend.entries(stream, 0, 1000)]
    log.drop("one", 1)
    maintain(log)
    assert log.backend.bodies(bodies) == {}
    assert log.backend.topics("one", 1, "") == []
    assert [g.number for g in log.generations("one")] == [2]


def test_a_dropped_generation_is_deleted_in_bounded_steps(log: Log) -> None:
    """Whoever appends meanwhile waits for one of them, not for all."""
    topics = 3 * TOPICS_SWEPT + 10
    fill(log, topics, per=TOPICS_SWEPT)
    log.seal("one")
    maintain(log)
    stream = log.head(ONE).id
    log.drop("one", 1)
    if isinstance(log.backend, MemoryLog):
        assert log.backend.sweep(64) == 0, "in memory a generation is let go of at once"
        return

    def left() -> tuple[int, int]:
        runs = log.backend.runs(stream, range(index.BUCKETS), 0)
        return len(log.backend.topics("one", 1, "")), len(runs)

    steps = [left()]
    while log.backend.sweep(64):
        steps.append(left())
    assert steps[0] == (topics, index.BUCKETS) and steps[-1] == (0, 0)
    for (topics_before, runs_before), (topics_after, runs_after) in itertools.pairwise(steps):
        assert topics_before - topics_after <= TOPICS_SWEPT
        assert topics_before == topics_after or runs_before == runs_after, "one kind at a time"


def test_large_runs_are_deleted_a_few_at_a_time() -> None:
    runs = [(1, bucket, 0, size) for bucket, size in enumerate([60, 30, 10, 1])]
    assert within_bytes(runs, 100) == runs[:3]
    assert within_bytes(runs, 10) == runs[:1], "at least one, or it would never end"
    assert within_bytes([], 10) == []


def test_statistics(log: Log) -> None:
    fill(log, 20, per=5)
    head = log.head(ONE)
    assert (head.next_offset, head.oldest, head.newest) == (20, 1, 16)
    assert head.bytes == sum(e.bytes for e in log.backend.entries(head.id, 0, 100))


# -- bad input -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ask", "names"),
    [
        (lambda log: log.read(ONE, -1), "-1"),
        (lambda log: log.read(ONE, 99), "99"),
        (lambda log: log.read(Stream("one", 9, 1), 0), "one.1.9"),
        (lambda log: log.read(Stream("none", 0, 1), 0), "none.1.0"),
        (lambda log: log.read(ONE, 0, topics="a/#/b"), "a/#/b"),
        (lambda log: log.read(ONE, 0, topics="a/b+"), "a/b+"),
        (lambda log: log.read(ONE, 0, topics=""), "''"),
        (lambda log: log.read(ONE, 0, topics="a\0b"), "NUL"),
        (lambda log: log.read(ONE, 0, rows_max=0), "0 rows"),
        (lambda log: log.append("one", Batch([""], [b""])), "''"),
        (lambda log: log.append("one", Batch(["ok", "x" * 65_536], [b"", b""])), "65535 bytes"),
        (lambda log: log.append("one", Batch(["é" * 32_768], [b""])), "65535 bytes"),
        (lambda log: log.append("one", Batch(["a\0b"], [b""])), r"a\x00b"),
        (lambda log: log.append("one", Batch(["a/+"], [b""])), "a/+"),
        (lambda log: log.append("one", Batch(["a\ud800"], [b""])), "Unicode"),
        (lambda log: log.append("one", Batch(["a"], [b""], "p\ud800")), "\\ud800"),
        (lambda log: log.append("one", Batch(["a"], [7])), "int"),  # type: ignore[list-item]
        (lambda log: log.append("one", Batch(["a"], [])), "1 topics but 0 payloads"),
        (lambda log: log.append("one", Batch([], [])), "empty"),
        (lambda log: log.append("none", Batch(["a"], [b""])), "none"),
        (lambda log: log.append("one", Batch(["a"], [b""]), expect={7: 0}), "7"),
        (lambda log: log.append("one", Batch(["a"], [b""]), expect={0: -2}), "-2"),
        (lambda log: log.create("bad name"), "bad name"),
        (lambda log: log.create("x", shards=0), "0 shards"),
        (lambda log: log.create("x", shard_by="colour"), "colour"),
        (lambda log: log.seal("none"), "none"),
        (lambda log: log.drop("one", 1), "open"),
        (lambda log: log.drop("one", 8), "8"),
        (lambda log: log.positions("one", At({ONE: -3})), "-3"),
        (lambda log: log.positions("one", Since(datetime(2026, 1, 1))), "time zone"),
    ],
)
def test_bad_input_names_the_value_and_stores_nothing(log: Log, ask: Callable[[Log], object], names: str) -> None:
    fill(log, 3)
    with pytest.raises(holdfast.RequestError) as refused:
        ask(log)
    assert names in str(refused.value)
    assert read_all(log) == [0, 1, 2]
    assert log.backend.topics("one", 1, "") and not any(t.startswith("ok") for t in log.backend.topics("one", 1, "ok"))


def test_the_longest_topic_is_fine(log: Log) -> None:
    topic = "t/" + "x" * 65_533
    log.append("one", Batch([topic, topic + ""], [b"0", b"1"]))
    log.append("one", Batch([topic[:-1] + "y"], [b"2"]))
    assert read_all(log, topics=topic) == [0, 1]
    assert read_all(log, topics="t/+") == [0, 1, 2]


# -- watching --------------------------------------------------------------------------------------------


def test_a_process_hears_of_its_own_appends_at_once(log: Log) -> None:
    heard: list[str] = []
    watch = log.watch(heard.append)
    log.append("one", Batch(["t"], [b"0"]))
    assert heard == ["one"]
    log.append("messages", Batch.of(Message("t", b"1", f"v{n}") for n in range(20)))
    assert heard == ["one", "messages"]  # one hint per commit, however many streams it touched
    log.seal("one")
    assert heard[-1] == "one"
    watch.close()
    log.append("one", Batch(["t"], [b"1"]))
    assert len(heard) == 3


def test_a_body_s_number_is_never_given_twice(log: Log, opener: Opener) -> None:
    """Decoded blocks are remembered by it, in every process that has read them."""
    other = opener()
    for generation in range(1, 6):
        fill(log, 10, start=10 * generation)
        found = read_all(other, Stream("one", 0, generation), rows_max=4)
        assert found == list(range(10 * generation, 10 * generation + 10))
        log.seal("one")
        log.drop("one", generation)
        maintain(log)


def test_a_block_that_was_cut_is_not_fetched_again(log: Log) -> None:
    fill(log, 1000, per=1000)
    log.cache.clear()
    fetched: list[int] = []
    bodies = log.backend.bodies

    def counted(ids: Sequence[int]) -> dict[int, Data]:
        fetched.extend(ids)
        return bodies(ids)

    log.backend.bodies = counted  # type: ignore[method-assign]
    offset = 0
    while offset < 1000:
        offset = log.read(ONE, offset, rows_max=64).next_offset
    assert len(fetched) == 1


def test_no_more_blocks_are_fetched_than_rows_were_asked_for(log: Log) -> None:
    fill(log, 1000)
    log.cache.clear()
    assert log.read(ONE, 0, rows_max=25).blocks_read == 3
