"""Threads that stores keep for themselves: started again when they fail, and a node ends when that does not help."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

import holdfast
from holdfast import Batch, restarts
from holdfast.log.watch import LogChanges
from holdfast.metadata.feed import Feed
from holdfast.restarts import FAILURES_MAX, STEADY_SECONDS, KeptThread
from holdfast.runtime.ingest import LOG
from holdfast.runtime.serve import running
from holdfast.settings import load
from holdfast.store import open_log, open_store
from holdfast.store.memory.metadata import MemoryMetadata, MemoryState
from holdfast.store.sqlite.watcher import SqliteWatcher
from processes import wait_for

SECONDS = 10.0


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(restarts, "PAUSE_SECONDS", 0.0005)


def failing(times: int, work: Callable[..., Any]) -> Callable[..., Any]:
    """The first calls fail, as no store says it would."""
    left = [times]

    def call(*args: Any) -> Any:
        if left[0]:
            left[0] -= 1
            raise RuntimeError("nobody expected this")
        return work(*args)

    return call


def test_a_thread_that_fails_is_started_again_and_counts_as_well_after_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    steady = threading.Event()
    thread = KeptThread("listener", failing(2, lambda: steady.set() or thread.stopping.wait(SECONDS)))
    assert thread.failure is None
    thread.start()
    assert steady.wait(SECONDS)
    failure = thread.failure
    assert failure is not None and failure.serious
    assert str(failure) == "listener failed 2 times: RuntimeError: nobody expected this"
    monkeypatch.setattr(restarts, "STEADY_SECONDS", -STEADY_SECONDS)
    assert thread.failure is None
    thread.stop()


def test_a_thread_that_keeps_failing_is_given_up() -> None:
    thread = KeptThread("listener", failing(99, lambda: None))
    thread.start()
    wait_for(lambda: thread.failure is not None and thread.failure.given_up, SECONDS, "it is given up")
    assert thread.failure is not None and thread.failure.count == FAILURES_MAX
    thread.stop()


@pytest.mark.parametrize("store", ["sqlite", "postgres"])
def test_a_log_watcher_that_died_hears_of_what_was_appended_meanwhile(
    store: str, tmp_path: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = f"sqlite:///{tmp_path}/log.db" if store == "sqlite" else request.getfixturevalue("postgres_url")
    with open_log(url, notifications=False) as log, holdfast.open(url) as other:
        log.create("one", shards=1)
        heard: list[str] = []
        log.watch(heard.append)
        works = LogChanges.since_last
        breaks = failing(1, works)

        def since_last(changes: LogChanges) -> Any:
            # Of this log only: another one of this process may look at its own at the same time.
            return (breaks if changes is log._watcher._changes else works)(changes)  # type: ignore[attr-defined]

        monkeypatch.setattr(LogChanges, "since_last", since_last)
        other.append("one", Batch(["t"], [b"while it is deaf"]))
        wait_for(lambda: "one" in heard, SECONDS, "the hint")
        assert log.watch_failure is not None and log.watch_failure.count == 1


def test_a_listener_that_fails_costs_neither_the_others_nor_whoever_appends(tmp_path: Path) -> None:
    with holdfast.open(f"sqlite:///{tmp_path}/log.db") as log:
        log.create("one", shards=1)
        heard: list[str] = []
        log.watch(failing(99, lambda name: None))
        log.watch(heard.append)
        log.append("one", Batch(["t"], [b""]))
        assert heard == ["one"] and log.watch_failure is None


def test_a_metadata_feed_that_died_tells_what_changed_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with closing(open_store(f"sqlite:///{tmp_path}/keys.db")) as store:
        metadata = store.metadata()
        with metadata.watch("/a/") as watch:
            monkeypatch.setattr(Feed, "_deliver", failing(1, Feed._deliver))
            wait_for(lambda: metadata.put("/a/before", b"") and metadata.watch_failure, SECONDS, "it dies")
            metadata.put("/a/after", b"")
            assert any(event.key == "/a/after" for event in iter(lambda: watch.get(SECONDS), None))
            assert metadata.watch_failure is not None and metadata.watch_failure.count == 1


def test_leases_in_memory_end_after_their_sweeper_died(monkeypatch: pytest.MonkeyPatch) -> None:
    metadata = MemoryMetadata(MemoryState(), lambda: None)
    with metadata.watch("/a/") as watch:
        monkeypatch.setattr(MemoryState, "next_expiry", failing(1, MemoryState.next_expiry))
        lease = metadata.lease(0.05)
        metadata.put("/a/key", b"value", lease=lease)
        events = [watch.get(SECONDS), watch.get(SECONDS)]
        assert [type(event).__name__ for event in events] == ["Put", "Deleted"]
    metadata.close()


def test_a_node_whose_log_watcher_is_given_up_says_so_and_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = load(flags=[f"store=sqlite:///{tmp_path}/data.db", "mqtt.listen=127.0.0.1:0", "http.listen="])
    monkeypatch.setattr(SqliteWatcher, "_listen", lambda self, ready: ready.set() or failing(1, print)())

    async def work() -> None:
        async with running(settings) as node:
            await asyncio.wait_for(node.ended.wait(), SECONDS)
            assert f"log-watcher failed {FAILURES_MAX} times: RuntimeError" in node.problem
            assert node.log.heads(LOG)

    asyncio.run(work())
