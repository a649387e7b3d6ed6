"""The pipeline: source, sink, micro-batches, catch-up, lake and session, side by side in one run.

python -m bench.spark [--messages N] [--postgres URL]

With no URL, a PostgreSQL of the tests' own is started if its wheel is installed.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import holdfast
from bench.measure import heading, middle, result, spread
from holdfast import Batch

PAYLOAD = 200
BLOCK = 16_000
SHARDS = 4
VEHICLES = 5_000
ROUNDS = 5


def fill(url: str, count: int) -> None:
    """Log `messages`: blocks of 4,000 messages, as a busy node's merged ones; payloads half noise, half JSON-like."""
    chance = random.Random(1)
    payloads = [b'{"speed": %d, "note": "' % n + chance.randbytes(75).hex().encode() for n in range(5000)]
    payloads = [p.ljust(PAYLOAD, b" ")[:PAYLOAD] for p in payloads]
    with holdfast.open(url) as log:
        log.create("messages", SHARDS)
        for first in range(0, count, BLOCK):
            numbers = range(first, min(count, first + BLOCK))
            who = [f"VIN{n % VEHICLES:08d}" for n in numbers]
            topics = [f"vehicle/{name}/telemetry" for name in who]
            log.append("messages", Batch(topics, [payloads[n % 5000] for n in numbers], who))


def timed(work: Callable[[], object], rounds: int = ROUNDS) -> list[float]:
    """Seconds, after one round that does not count."""
    work()
    times = []
    for _ in range(rounds):
        begin = time.perf_counter()
        work()
        times.append(time.perf_counter() - begin)
    return times


def in_turns(rounds: int, **works: Callable[[], object]) -> dict[str, list[float]]:
    """Each once to warm up, then in turns, so that whatever else the machine does meets all of them alike."""
    times: dict[str, list[float]] = {name: [] for name in works}
    for at in range(rounds + 1):
        for name, work in works.items():
            begin = time.perf_counter()
            work()
            if at:
                times[name].append(time.perf_counter() - begin)
    return times


def session_seconds(folder: Path) -> list[float]:
    """From `import` to a session that has answered a query, in processes of their own; the first makes the archive."""
    program = (
        "import time, json; begun = time.perf_counter()\n"
        "from holdfast.spark import session\n"
        "spark = session('local[2]'); ready = time.perf_counter() - begun\n"
        "spark.range(1).count(); print(json.dumps([ready, time.perf_counter() - begun])); spark.stop()"
    )
    times = []
    for at in range(4):
        done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
        if at:
            times.append(json.loads(done.stdout.splitlines()[-1])[0])
        else:
            time.sleep(20)  # the JVM of the first one is still writing the class archive
    return times


@contextmanager
def postgres(url: str | None) -> Iterator[str | None]:
    if url is not None:
        yield url
        return
    sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))
    try:
        from servers import PostgresServer
    except ImportError:
        yield None
        return
    server = PostgresServer()
    try:
        yield server.database()
    finally:
        server.close()


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--messages", type=int, default=2_000_000)
    parser.add_argument("--postgres")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="holdfast-bench-") as name, postgres(asked.postgres) as server:
        return measure(Path(name), asked.messages, server)


def measure(folder: Path, count: int, server: str | None) -> int:
    heading(f"spark: {count:,} messages of {PAYLOAD} bytes, local[2]")
    met = []
    ready = session_seconds(folder)
    met.append(result("session ready", middle(ready), "s", at_most=6))
    print(f"     {spread(ready, 'ms', 1000)}")

    from holdfast.spark import LakeOptions, lake, session

    spark = session("local[2]")
    store = f"sqlite:///{folder}/store.db"
    fill(store, count)

    def noop(frame: object) -> None:
        frame.write.format("noop").mode("overwrite").save()  # type: ignore[attr-defined]

    def source(columns: str | None = None) -> object:
        reader = spark.read.format("holdfast").option("store", store)
        return (reader.schema(columns) if columns else reader).load()

    parquet = str(folder / "parquet")
    source().write.parquet(parquet)  # type: ignore[attr-defined]
    times = in_turns(
        ROUNDS,
        parquet=lambda: noop(spark.read.parquet(parquet)),
        full=lambda: noop(source()),
        topic=lambda: noop(source("topic STRING")),
    )
    rate = {name: count / middle(seconds) for name, seconds in times.items()}
    result("native Parquet to noop", rate["parquet"], "rows/s")
    result("source to noop, full rows", rate["full"], "rows/s")
    result("source to noop, topic only", rate["topic"], "rows/s")
    for name, seconds in times.items():
        print(f"     {name}: {spread(seconds, 'ms', 1000)}")
    met.append(result("full rows / native Parquet", rate["full"] / rate["parquet"], "×", at_least=0.6))
    met.append(result("topic only / full rows", rate["topic"] / rate["full"], "×", at_least=1.5))

    rows = spark.read.parquet(parquet).select("topic", "payload", "publisher")
    for kind, url in {"SQLite": store, "PostgreSQL": server}.items():
        if url is None:
            print("   no PostgreSQL to measure with")
            continue
        times_written: list[float] = []
        for at in range(4):
            writer = rows.write.format("holdfast").options(store=url, log=f"sink-{at}", shards=str(SHARDS))
            begin = time.perf_counter()
            writer.mode("append").save()
            times_written.append(time.perf_counter() - begin)
        met.append(result(f"sink to {kind}", count / middle(times_written[1:]), "rows/s", at_least=300_000))
        print(f"     {spread(times_written[1:], 'ms', 1000)}")

    met += streams(spark, folder, store, count)

    begin = time.perf_counter()
    lake(LakeOptions(store=store, root=str(folder / "lake"), once=True), spark=spark)
    met.append(result("lake", count / (time.perf_counter() - begin), "messages/s", at_least=500_000))
    spark.stop()
    return 0 if all(met) else 1


def streams(spark: object, folder: Path, store: str, count: int) -> list[bool]:
    """Small micro-batches, and catching up with everything there is."""
    met = []
    small = f"sqlite:///{folder}/small.db"
    with holdfast.open(small) as log:
        log.create("messages", SHARDS)
        reader = spark.readStream.format("holdfast").options(store=small, start="beginning").load()  # type: ignore[attr-defined]
        query = reader.writeStream.format("noop").option("checkpointLocation", str(folder / "small")).start()
        for at in range(120):
            log.append("messages", Batch([f"vehicle/{n}/trip" for n in range(20)], [b"x" * PAYLOAD] * 20, f"p{at}"))
            query.processAllAvailable()
        took = [p["durationMs"]["triggerExecution"] for p in query.recentProgress if p["numInputRows"]][20:]
        query.stop()
    met.append(result("micro-batch of 20 messages, median", middle(took), "ms", at_most=120))
    print(f"     {spread(took, 'ms')}")
    for limit in (200_000, 1_000_000):
        options = {"store": store, "start": "beginning", "maxMessagesPerTrigger": str(limit)}
        reader = spark.readStream.format("holdfast").options(**options).load()  # type: ignore[attr-defined]
        begin = time.perf_counter()
        query = (
            reader.writeStream.format("noop")
            .option("checkpointLocation", str(folder / f"catch-up-{limit}"))
            .trigger(availableNow=True)
            .start()
        )
        query.awaitTermination()
        rate = count / (time.perf_counter() - begin)
        target = 1_000_000 if limit == 1_000_000 else None
        met.append(result(f"catch-up, {limit:,} a trigger", rate, "rows/s", at_least=target))
    return met


if __name__ == "__main__":
    os.environ.setdefault("PYTHONWARNINGS", "ignore")
    sys.exit(main())
