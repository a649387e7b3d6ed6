"""The log: appends, reads, one durable message, the price of the index, and growth.

python -m bench.log [--store URL] [--messages N]
"""

from __future__ import annotations

import argparse
import itertools
import os
import random
import sqlite3
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

import holdfast
from bench.measure import heading, middle, result, spread
from holdfast import Batch, Log, Stream
from holdfast.log import index as topic_index
from holdfast.log import log as log_module
from holdfast.log.retention import maintain

BLOCK = 1000
TOPICS = 10_000
PAYLOAD = 200
UPKEEP_RESTS = 4.0
"""As a node has it."""
STREAM = Stream("bench", 0, 1)


def batches(count: int, seed: int = 1) -> list[Batch]:
    chance = random.Random(seed)
    payloads = [chance.randbytes(PAYLOAD) for _ in range(BLOCK)]
    topics = [f"vehicle/{n}/telemetry" for n in range(TOPICS)]
    return [Batch([topics[chance.randrange(TOPICS)] for _ in range(BLOCK)], payloads, "bench") for _ in range(count)]


def append_all(log: Log, work: list[Batch], name: str = "bench") -> list[float]:
    """Seconds per append."""
    times = []
    for batch in work:
        begin = time.perf_counter()
        log.append(name, batch)
        times.append(time.perf_counter() - begin)
    return times


def read_all(log: Log, stream: Stream = STREAM) -> float:
    """Messages a second, straight from the store."""
    log.cache.clear()
    offset, end = 0, log.head(stream).next_offset
    begin = time.perf_counter()
    while offset < end:
        offset = log.read(stream, offset).next_offset
    return end / (time.perf_counter() - begin)


def bare_sync(folder: Path, rounds: int = 400) -> list[float]:
    """Seconds for a bare write and fdatasync of 4 KiB."""
    block = os.urandom(4096)
    times = []
    with open(folder / "bare.bin", "wb", buffering=0) as file:
        for _ in range(rounds):
            begin = time.perf_counter()
            file.write(block)
            os.fdatasync(file.fileno())
            times.append(time.perf_counter() - begin)
    return times


def bench_append_read(log: Log, blocks: int, append_target: float) -> bool:
    work = batches(blocks)
    times = append_all(log, work)
    ok = result("append, blocks of 1,000", blocks * BLOCK / sum(times), "messages/s", at_least=append_target)
    print(f"   {'':<58} one append: {spread(times, 'µs', 1e6)}")
    rates = [read_all(log) for _ in range(3)]
    return result("read as Arrow", middle(rates), "messages/s", at_least=2_000_000) and ok


def bench_single(log: Log, folder: Path) -> bool:
    """One durable message against a bare sync, taking turns so that both meet the same disk."""
    log.create("single", shards=1)
    one = Batch(["vehicle/1/telemetry"], [os.urandom(PAYLOAD)], "bench")
    append_all(log, [one] * 50, "single")
    bare: list[float] = []
    ours: list[float] = []
    for _ in range(10):
        bare += bare_sync(folder, 60)
        ours += append_all(log, [one] * 60, "single")
    print(f"   {'bare write + fdatasync of 4 KiB':<58} {spread(bare, 'µs', 1e6)}")
    print(f"   {'one durable message':<58} {spread(ours, 'µs', 1e6)}")
    return result("one durable message / bare fdatasync, p50", middle(ours) / middle(bare), "×", at_most=2.0)


def bench_growth(small: Log, large: Log, blocks: int) -> bool:
    """Append and read cost in a store with ten times the data, taking turns so that both meet the same machine."""
    stream = Stream("growth", 0, 1)
    work = batches(blocks)
    for log, times in ((small, 1), (large, 12)):  # at the end of the measurement 1.2 and 12.2
        log.create("growth", shards=1)
        for _ in range(times):
            append_all(log, work, "growth")

    def read_last(log: Log) -> float:
        log.cache.clear()
        end = log.head(stream).next_offset
        begin = time.perf_counter()
        log.read(stream, end - blocks * BLOCK, rows_max=blocks * BLOCK)
        return time.perf_counter() - begin

    appends: dict[Log, list[float]] = {small: [], large: []}
    reads: dict[Log, list[float]] = {small: [], large: []}
    for _ in range(10):
        for log in (small, large):
            appends[log] += append_all(log, work[: blocks // 50], "growth")
        for log in (large, small):
            reads[log] += [read_last(log) for _ in range(3)]
    grown = {what: middle(times[large]) / middle(times[small]) for what, times in (("a", appends), ("r", reads))}
    ok = result("append at 10× the data / at 1×, p50", grown["a"], "×", at_most=1.2)
    return result("read of the last blocks at 10× / at 1×, p50", grown["r"], "×", at_most=1.2) and ok


def bench_index(log: Log, blocks: int) -> bool:
    """The same appends with and without the index, taking turns; and what it buys."""
    work = batches(blocks)
    real_hashes, real_pack = log_module._hashes, topic_index.pack

    def without(run: Callable[[], list[float]]) -> list[float]:
        log_module._hashes = lambda *_: []  # type: ignore[assignment]
        topic_index.pack = lambda _: b""  # type: ignore[assignment]
        try:
            return run()
        finally:
            log_module._hashes, topic_index.pack = real_hashes, real_pack

    log.create("index", shards=1)
    log.create("bare", shards=1)
    append_all(log, work, "index")
    with_index: list[float] = []
    bare: list[float] = []
    for _ in range(4):
        with_index += append_all(log, work, "index")
        bare += without(lambda: append_all(log, work, "bare"))
    cost = 100 * (1 - sum(bare) / sum(with_index))
    ok = result("throughput the index costs", cost, "%", at_most=25)
    log.append("index", Batch(["mine/only"], [b"1"], "bench"))
    append_all(log, work, "index")
    begin = time.perf_counter()
    done = maintain(log)
    print(f"   {'upkeep':<58} {time.perf_counter() - begin:.2f} s: {done.indexed} blocks indexed")
    log.cache.clear()
    begin = time.perf_counter()
    offset, rows, looked = 0, 0, 0
    stream = Stream("index", 0, 1)
    while offset < log.head(stream).next_offset:
        reading = log.read(stream, offset, topics="mine/only")
        rows, looked, offset = rows + reading.num_rows, looked + reading.blocks_read, reading.next_offset
    print(
        f"   {'one message among':<58} {offset:,}: {rows} found in {looked} blocks read,"
        f" {(time.perf_counter() - begin) * 1e3:.1f} ms"
    )
    return ok


def bench_drop(log: Log, topics: int) -> bool:
    """How long appends wait while a generation with many topics is deleted."""
    log.create("drop", shards=16)
    for first in range(0, topics, 10 * BLOCK):
        names = [f"vehicle/{n}/telemetry" for n in range(first, first + 10 * BLOCK)]
        log.append("drop", Batch(names, [b"1"] * len(names), [f"vehicle-{n % 100}" for n in range(len(names))]))
    log.seal("drop")
    maintain(log)
    log.drop("drop", 1)
    log.create("live", shards=1)
    one = [Batch(["vehicle/1/telemetry"], [os.urandom(PAYLOAD)], "bench")]
    append_all(log, one * 50, "live")
    calm = append_all(log, one * 1000, "live")
    upkeep = threading.Thread(target=maintain, args=(log,), kwargs={"rests": UPKEEP_RESTS})
    begin = time.perf_counter()
    upkeep.start()
    times: list[float] = []
    while upkeep.is_alive():
        times += append_all(log, one, "live")
    print(f"   {'deleted within':<58} {time.perf_counter() - begin:.1f} s")
    print(f"   {'one durable message before':<58} {spread(calm, 'ms', 1e3)}")
    print(f"   {'one durable message meanwhile':<58} {spread(times, 'ms', 1e3)}")
    what = f"longest append while {topics:,} topics are deleted"
    return result(what, max(times) * 1e3, "ms", at_most=50)


def bench_foreign_reader(log: Log, path: Path, blocks: int) -> bool:
    """How long appends wait when a reader of another process lets go of the WAL, and what is left of it."""
    log.create("read", shards=1)
    wal = path.with_name(path.name + "-wal")
    work = batches(blocks)
    append_all(log, work[:50], "read")
    foreign = sqlite3.connect(path, isolation_level=None)
    foreign.execute("begin")
    foreign.execute("select count(*) from streams").fetchone()
    held = append_all(log, work, "read")
    largest = wal.stat().st_size
    foreign.close()
    free: list[float] = []
    begin = time.perf_counter()
    while time.perf_counter() - begin < 20 and wal.stat().st_size > 64 << 20:
        free += append_all(log, work[:1], "read")
    print(f"   {'append of 1,000 while it reads':<58} {spread(held, 'ms', 1e3)}")
    print(f"   {'append of 1,000 after it has gone':<58} {spread(free, 'ms', 1e3)}")
    ok = result("longest append after it has gone", max(free) * 1e3, "ms", at_most=200)
    print(f"   {'WAL at its largest':<58} {largest / 2**20:,.0f} MB")
    return result("until it is small again", time.perf_counter() - begin, "s", at_most=20) and ok


def run(new_store: Callable[[], str], folder: Path, messages: int, append_target: float) -> bool:
    url = new_store()
    heading(f"log on {url.split('?')[0].split(str(folder))[0]}…: {PAYLOAD}-byte messages, {TOPICS:,} topics")
    with holdfast.open(url) as log:
        log.create("bench", shards=1)
        blocks = max(50, messages // BLOCK)
        ok = bench_append_read(log, blocks, append_target)
        if url.startswith("sqlite"):
            ok &= bench_single(log, folder)
        ok &= bench_index(log, max(50, blocks // 10))
    with holdfast.open(new_store()) as log:
        ok &= bench_drop(log, messages)
    if url.startswith("sqlite"):
        url = new_store()
        with holdfast.open(url) as log:
            ok &= bench_foreign_reader(log, Path(url.removeprefix("sqlite:///")), blocks)
    with holdfast.open(new_store()) as small, holdfast.open(new_store()) as large:
        return bench_growth(small, large, max(50, blocks // 5)) and ok


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments.add_argument("--store", choices=["sqlite", "postgres", "both"], default="both")
    arguments.add_argument("--messages", type=int, default=1_000_000)
    chosen = arguments.parse_args()
    ok = True
    with tempfile.TemporaryDirectory(prefix="holdfast-bench-") as name:
        folder = Path(name)
        if chosen.store in ("sqlite", "both"):
            names = (f"sqlite:///{folder}/bench-{n}.db" for n in itertools.count())
            ok &= run(lambda: next(names), folder, chosen.messages, 400_000)
        if chosen.store in ("postgres", "both"):
            sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))
            from servers import PostgresServer

            server = PostgresServer()
            try:
                ok &= run(server.database, folder, chosen.messages, 200_000)
            finally:
                server.close()
    sys.exit(0 if ok else 1)


if __name__ == "__main__":
    main()
