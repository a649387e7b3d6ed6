"""Hearing of what other processes append, with the store's own means and without."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest

import holdfast
from holdfast import Batch, Log
from holdfast.store import open_log
from holdfast.store.sqlite.watcher import POLL_SECONDS
from processes import Report, child, wait_for


def append_when_told(report: Report, url: str, times: int) -> None:
    with holdfast.open(url) as log:
        report.send("ready")
        for n in range(times):
            log.append("one", Batch(["t"], [b"%d" % n]))
            report.send(time.time())


@pytest.fixture
def urls(request: pytest.FixtureRequest, tmp_path: Path) -> dict[str, str]:
    return {"sqlite": f"sqlite:///{tmp_path}/log.db"}


@pytest.mark.parametrize("store", ["sqlite", "postgres", "postgres by polling"])
def test_another_processes_appends_are_heard_of(store: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    url = f"sqlite:///{tmp_path}/log.db" if store == "sqlite" else request.getfixturevalue("postgres_url")
    with open_log(url, notifications="polling" not in store) as log:
        log.create("one", shards=1)
        log.create("two", shards=1)
        heard: list[str] = []
        log.watch(heard.append)
        with child(append_when_told, url, 3) as other:
            wait_for(lambda: log.backend.totals()["one"][0] == 3, 30, "three appends")
            wait_for(lambda: heard, 5, "a hint")
            assert other.join() == 0
        # The state at the time of a hint is at least as new as what it hints at: the last append is never missed.
        wait_for(lambda: len(heard) <= 3, 1)
        assert set(heard) == {"one"}


def test_sqlite_is_looked_at_often_enough_to_hear_within_100_ms() -> None:
    assert POLL_SECONDS <= 0.05


def test_a_process_is_not_told_twice_of_its_own_appends(tmp_path: Path) -> None:
    with holdfast.open(f"sqlite:///{tmp_path}/log.db") as log:
        log.create("one", shards=1)
        heard: list[str] = []
        log.watch(heard.append)
        for _ in range(3):
            log.append("one", Batch(["t"], [b""]))
        # Another process's commit makes the watcher look: it must find only what is not our own.
        with child(append_when_told, f"sqlite:///{tmp_path}/log.db", 1):
            wait_for(lambda: len(heard) == 4, 10, "the other's hint")
        assert heard == ["one"] * 4


def test_closing_ends_the_watcher(tmp_path: Path, postgres_url: str) -> None:
    for url in (f"sqlite:///{tmp_path}/log.db", postgres_url):
        others = set(threading.enumerate())
        log: Log = holdfast.open(url)
        log.watch(lambda _: None)
        assert [t.name for t in threading.enumerate() if t not in others] == ["holdfast-log-watcher"]
        log.close()
        assert not set(threading.enumerate()) - others
