"""`kill -9` of writers at random moments: nothing reported durable is missing, nothing is torn, no gap."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

import holdfast
from faults.writer import audit, write
from holdfast.log.retention import maintain
from processes import Report, child, wait_for


@pytest.mark.parametrize(("store", "rounds"), [("sqlite", 50), ("postgres", 20)])
def test_kill_9_loses_nothing_that_was_reported_durable(
    store: str, rounds: int, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    url = f"sqlite:///{tmp_path}/log.db" if store == "sqlite" else request.getfixturevalue("postgres_url")
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    chance = random.Random(seed)
    with holdfast.open(url) as log:
        log.create("messages", shards=3)
    told: dict[str, dict] = {}
    for number in range(rounds):
        name = f"w{number}"
        with child(write, url, name, chance.choice([1, 20, 400])) as writer:
            first = writer.next_report()
            # Anywhere inside the next few appends: the pipe is read on, so the writer never waits for us.
            reports = [first]
            wanted = chance.randrange(1, 12)
            while len(reports) < wanted:
                reports.append(writer.next_report())
            wait_for(lambda: chance.random() < 0.3, what="the moment to kill")
            writer.kill()
            reports += writer.all_reports()
        told[name] = {n: places for n, places, error in reports if error is None}
        assert len(told[name]) == len(reports)
        if number % 10 == 9 or number == rounds - 1:
            with holdfast.open(url) as log:
                audit(log, told)
                if number % 20 == 9:
                    maintain(log)
                    log.cache.clear()
                    audit(log, told)
    assert sum(len(appends) for appends in told.values()) >= rounds


def keep_up(report: Report, url: str) -> None:
    with holdfast.open(url) as log:
        report.send("started")
        while True:
            maintain(log)


@pytest.mark.parametrize("store", ["sqlite", "postgres"])
def test_kill_9_of_upkeep_in_mid_merge_loses_nothing(
    store: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    url = f"sqlite:///{tmp_path}/log.db" if store == "sqlite" else request.getfixturevalue("postgres_url")
    with holdfast.open(url) as log:
        log.create("messages", shards=2)
    with child(write, url, "w", 300, False, 150) as writer:
        told = {}
        for round_ in range(5):
            with child(keep_up, url) as upkeep:
                upkeep.next_report()
                for _ in range(10 + round_):
                    n, places, _ = writer.next_report()
                    told[n] = places
                upkeep.kill()
        told.update({n: places for n, places, _ in writer.all_reports()})
    with holdfast.open(url) as log:
        assert sum(audit(log, {"w": told}).values()) == 150 * 300
        maintain(log)
        log.cache.clear()
        assert sum(audit(log, {"w": told}).values()) == 150 * 300


@pytest.mark.parametrize("store", ["sqlite", "postgres"])
def test_several_processes_write_at_once_without_gap(
    store: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    url = f"sqlite:///{tmp_path}/log.db" if store == "sqlite" else request.getfixturevalue("postgres_url")
    with holdfast.open(url) as log:
        log.create("messages", shards=3)
        with child(write, url, "a", 20, False, 60) as a, child(write, url, "b", 20, False, 60) as b:
            # While they write: whatever is visible of a stream has no gap, so n+1 never shows before n.
            while log.backend.totals()["messages"][0] < 2 * 60 * 20:
                for head in log.heads("messages"):
                    rows = sum(c.batch.num_rows for c in log.read(head.stream, 0).chunks)
                    assert rows >= head.next_offset
            told = {
                name: {n: places for n, places, _ in process.all_reports()} for name, process in (("a", a), ("b", b))
            }
        log.cache.clear()
        assert sum(audit(log, told).values()) == 2 * 60 * 20
    with holdfast.open(url) as log:
        audit(log, told)


def open_and_create(report: Report, url: str) -> None:
    with holdfast.open(url) as log:
        log.create("messages", shards=2)
        report.send(len(log.heads("messages")))


@pytest.mark.parametrize("store", ["sqlite", "postgres"])
def test_processes_that_start_at_once_on_an_empty_store_all_succeed(
    store: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    url = f"sqlite:///{tmp_path}/new/log.db" if store == "sqlite" else request.getfixturevalue("postgres_url")
    with child(open_and_create, url) as a, child(open_and_create, url) as b, child(open_and_create, url) as c:
        assert [process.next_report() for process in (a, b, c)] == [2, 2, 2]
