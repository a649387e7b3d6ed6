"""Metadata in PostgreSQL when things go wrong: restarts, lost notifications, forgotten deletions."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import psycopg
import pytest

from holdfast.errors import OutcomeUnknown, StoreUnavailable
from holdfast.metadata import Deleted, Entry, Event, LeaseEnded, Put, Watch
from holdfast.store import StoreOptions, open_metadata, open_store
from holdfast.store.postgres.database import PostgresDatabase
from holdfast.store.postgres.metadata import PostgresMetadata
from servers import PostgresServer


def until_event(watch: Watch, enough: Callable[[Event], bool], seconds: float = 20) -> list[Event]:
    give_up = time.monotonic() + seconds
    events: list[Event] = []
    while not (events and enough(events[-1])):
        event = watch.get(give_up - time.monotonic())
        assert event is not None, f"only {events}"
        events.append(event)
    return events


def test_without_notifications_changes_and_expiries_are_still_seen(postgres_url: str) -> None:
    database = PostgresDatabase(postgres_url)
    with (
        open_metadata(postgres_url) as writer,
        PostgresMetadata(database, database.close, notifications=False, poll_seconds=0.1) as deaf,
        deaf.watch("/") as watch,
    ):
        for n in range(5):
            version = writer.put("/a", b"%d" % n)
            assert until_event(watch, lambda _: True, 2.0) == [Put("/a", b"%d" % n, version=version)]
        writer.put("/b", b"", writer.lease(0.3))
        put, gone = until_event(watch, lambda event: isinstance(event, Deleted))
        assert put.key == gone.key == "/b"


def test_notifications_are_what_makes_it_quick(postgres_url: str) -> None:
    database = PostgresDatabase(postgres_url)
    with (
        open_metadata(postgres_url) as writer,
        PostgresMetadata(database, database.close, poll_seconds=3600) as metadata,
        metadata.watch("/") as watch,
    ):
        for n in range(20):
            version = writer.put("/a", b"%d" % n)
            assert until_event(watch, lambda _: True)[-1].version == version


def test_one_notification_per_transaction(postgres_url: str) -> None:
    with (
        open_metadata(postgres_url) as writer,
        psycopg.connect(postgres_url, autocommit=True) as listener,
    ):
        listener.execute("listen holdfast_metadata")
        writer.transact([Put(f"/{n}", b"") for n in range(10)])
        writer.get("/1")
        writer.lease(30).renew()
        assert writer.compare_and_set("/1", None, b"") is None
        writer.delete("/9")
        assert len(list(listener.notifies(timeout=10, stop_after=2))) == 2
        assert list(listener.notifies(timeout=0.05)) == []


def test_versions_become_visible_in_their_order(postgres_url: str) -> None:
    """A reader who has seen version n finds nothing new below it later, however writers interleave."""
    with open_metadata(postgres_url) as one, open_metadata(postgres_url) as two:
        stop = threading.Event()

        def write(store: PostgresMetadata, name: str) -> None:
            n = 0
            while not stop.is_set():
                store.put(f"/{name}/{(n := n + 1) % 50}", b"x" * (n % 7) * 1000)

        with ThreadPoolExecutor() as pool, psycopg.connect(postgres_url, autocommit=True) as db:
            writers = [pool.submit(write, s, f"{i}") for i, s in enumerate((one, two) * 2)]  # type: ignore[arg-type]
            try:
                previous: set[tuple[str, int]] = set()
                for _ in range(300):
                    rows = set(db.execute("select key, version from holdfast.metadata").fetchall())
                    highest = max((version for _, version in previous), default=0)
                    assert {row for row in rows if row[1] <= highest} <= previous
                    previous = rows
            finally:
                stop.set()
            for writer in writers:
                writer.result()


@pytest.mark.parametrize("how", ["immediate", "kill"])
def test_calls_and_watches_survive_a_restart(postgres_url: str, postgres_server: PostgresServer, how: str) -> None:
    with open_metadata(postgres_url) as store, open_metadata(postgres_url) as other:
        lease = store.lease(60)
        store.put("/kept", b"1", lease)
        with other.watch("/") as watch, ThreadPoolExecutor() as pool:
            postgres_server.stop(how)
            reading = pool.submit(store.get, "/kept")
            writing = pool.submit(other.put, "/new", b"2")
            renewing = pool.submit(lease.renew)
            time.sleep(0.1)  # let them meet the closed door
            postgres_server.start()
            assert reading.result(20) is not None
            version = writing.result(20)
            renewing.result(20)
            assert until_event(watch, lambda _: True) == [Put("/new", b"2", version=version)]
            assert store.delete("/kept")
            assert until_event(watch, lambda _: True)[0].key == "/kept"


def test_restarts_under_load_lose_nothing_that_was_confirmed(
    postgres_url: str, postgres_server: PostgresServer
) -> None:
    confirmed: dict[str, int] = {}
    written = 0
    with open_metadata(postgres_url) as store, store.watch("/n/") as watch, ThreadPoolExecutor() as pool:
        stop = threading.Event()

        def write() -> None:
            nonlocal written
            while not stop.is_set():
                key = f"/n/{written % 20}"
                try:
                    confirmed[key] = store.put(key, b"%d" % written)
                except OutcomeUnknown:
                    confirmed.pop(key, None)
                written += 1

        writer = pool.submit(write)
        try:
            for _ in range(4):
                before = written
                give_up = time.monotonic() + 20
                while written < before + 20 and time.monotonic() < give_up:
                    time.sleep(0.005)
                postgres_server.stop("immediate")
                postgres_server.start()
        finally:
            stop.set()
        writer.result(30)
        end = store.put("/n/end", b"")
        last = {event.key: event.version for event in until_event(watch, lambda event: event.version == end)}
        found = store.list("/n/")
        for key, version in confirmed.items():
            assert found[key].version == version
        assert {key: entry.version for key, entry in found.items()} == last


def test_a_server_that_stays_away_is_named_and_ends_leases(postgres_url: str, postgres_server: PostgresServer) -> None:
    store = open_store(postgres_url, StoreOptions(retry_seconds=0.3))
    with store.metadata() as metadata:
        long, short = metadata.lease(60), metadata.lease(0.1)
        postgres_server.stop()
        try:
            with pytest.raises(StoreUnavailable, match="PostgreSQL database 'test_"):
                metadata.get("/a")
            with pytest.raises(StoreUnavailable):
                metadata.put("/a", b"")
            with pytest.raises(StoreUnavailable):
                long.renew()
            with pytest.raises(LeaseEnded, match="away"):
                short.renew()
        finally:
            postgres_server.start()
        long.renew()
        assert metadata.list("") == {}


def test_a_watcher_that_was_away_while_deletions_were_forgotten_catches_up(
    postgres_url: str, postgres_server: PostgresServer
) -> None:
    database = PostgresDatabase(postgres_url)
    with (
        PostgresMetadata(database, database.close, deletions_kept=10) as writer,
        open_metadata(postgres_url) as reader,
    ):
        for n in range(5):
            writer.put(f"/old/{n}", b"")
        with reader.watch("/old/") as watch:
            watch_feed = reader.feed  # type: ignore[attr-defined]
            with watch_feed._lock:  # the reader is held up; the writer goes on
                for n in range(4):
                    writer.delete(f"/old/{n}")
                for n in range(30):
                    writer.put("/other", b"%d" % n)
                version = writer.put("/old/9", b"new")
                with psycopg.connect(postgres_url) as db:
                    row = db.execute("select count(*) from holdfast.metadata where value is null").fetchone()
                    assert row == (0,)
            events = {event.key: event for event in (watch.get(20) for _ in range(5)) if event}
            assert events.pop("/old/9") == Put("/old/9", b"new", version=version)
            assert sorted(events) == [f"/old/{n}" for n in range(4)]
            assert all(isinstance(event, Deleted) for event in events.values())
            assert reader.list("/old/").keys() == {"/old/4", "/old/9"}
            assert watch.get(0.05) is None


def test_a_lost_race_for_a_key_does_not_cost_a_connection(postgres_url: str) -> None:
    with open_metadata(postgres_url) as store, psycopg.connect(postgres_url, autocommit=True) as db:
        version = store.put("/a", b"")
        backends = (
            "select array_agg(pid order by pid) from pg_stat_activity"
            " where application_name = 'holdfast' and datname = current_database()"
        )
        before = db.execute(backends).fetchone()
        for _ in range(5):
            assert store.compare_and_set("/a", None, b"") is None
        assert db.execute(backends).fetchone() == before
        assert store.get("/a") == Entry(b"", version)
