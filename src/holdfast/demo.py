"""The demonstration behind `make demo`: a writer is killed in mid-write, and nothing it was promised is missing."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from rich.console import Console

from holdfast import ops
from holdfast.cli import output
from holdfast.log import Log, open_log
from holdfast.model import Batch, Stream

ROWS = 50


def write(url: str, writer: str) -> None:
    """Append for ever, and print the place of every append once it is durable."""
    with open_log(url) as log:
        number = 0
        while True:
            batch = Batch(
                topics=[f"vehicle/{n}/position" for n in range(ROWS)],
                payloads=[f"{writer} {number} {n}".encode() for n in range(ROWS)],
                publishers=[f"vehicle-{n}" for n in range(ROWS)],
            )
            for placed in log.append("messages", batch).placed:
                rows = placed.rows or range(placed.count)
                print(writer, number, placed.stream, placed.base, *rows, flush=True)
            number += 1


def run(rounds: int) -> int:
    console = Console()
    with tempfile.TemporaryDirectory(prefix="holdfast-demo-") as folder:
        url = f"sqlite:///{folder}/holdfast.db"
        with open_log(url) as log:
            log.create("messages", shards=4)
        console.print(
            f"A writer appends blocks of {ROWS} messages to SQLite and is killed (SIGKILL), {rounds} times:\n"
        )
        told: list[list[str]] = []
        for number in range(1, rounds + 1):
            new = _killed_writer(url, f"writer-{number}", Path(folder))
            told += new
            durable = sum(len(line) - 4 for line in new)
            console.print(f"  writer-{number}: killed after {durable:,} messages were reported durable")
        with open_log(url) as log:
            missing = _audit(log, told)
            stored = sum(head.next_offset for head in log.heads("messages"))
            output.table(ops.streams(log, "messages"), as_json=False, title="\nThe log after reopening")
    reported = sum(len(line) - 4 for line in told)
    console.print(f"\nreported durable: {reported:,}   stored: {stored:,}   missing: {missing}")
    console.print("Nothing acknowledged is missing." if not missing else "[red]Messages are missing![/red]")
    return 1 if missing else 0


def _killed_writer(url: str, name: str, folder: Path) -> list[list[str]]:
    """What a writer reported before it was killed at a random moment."""
    report = folder / f"{name}.txt"
    with report.open("w") as out:
        process = subprocess.Popen([sys.executable, "-m", "holdfast.demo", url, name], stdout=out)
        try:
            give_up = time.monotonic() + 30
            while not report.stat().st_size and process.poll() is None and time.monotonic() < give_up:
                time.sleep(0.01)
            time.sleep(random.uniform(0.05, 0.3))  # any moment will do: that is the point
        finally:
            os.kill(process.pid, signal.SIGKILL)
            process.wait()
    text = report.read_text()
    whole = text[: text.rfind("\n") + 1]  # the last line may have been cut by the kill
    return [line.split() for line in whole.splitlines()]


def _audit(log: Log, told: list[list[str]]) -> int:
    """How many of the messages reported durable are not exactly where they were reported."""
    stored: dict[str, list[bytes]] = {}
    for head in log.heads("messages"):
        chunks = log.read(head.stream, 0, rows_max=1 << 30, bytes_max=1 << 40).chunks
        stored[str(head.stream)] = [p for chunk in chunks for p in chunk.batch.column("payload").to_pylist()]
    missing = 0
    for writer, number, stream, base, *rows in told:
        expected = [f"{writer} {number} {row}".encode() for row in rows]
        found = stored[str(Stream.parse(stream))][int(base) : int(base) + len(rows)]
        missing += sum(a != b for a, b in zip(expected, found, strict=False)) + len(expected) - len(found)
    return missing


if __name__ == "__main__":
    write(*sys.argv[1:])
