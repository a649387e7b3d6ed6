"""Sessions in PostgreSQL when things go wrong, and what their writes cost the server."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import psycopg
import pytest
from msgspec.structs import replace

from holdfast.errors import OutcomeUnknown, StoreError, StoreUnavailable
from holdfast.model import LOG
from holdfast.sessions.table import RowWrite, SessionRow, SessionTable, StoredWill, Verdict
from holdfast.store import StoreOptions, open_store
from holdfast.store.postgres.arrays import columns, hashes
from holdfast.store.postgres.sessions import _UPDATE, PostgresSessionTable, _values
from holdfast.store.postgres.store import PostgresStore
from servers import PostgresServer

WILL = StoredWill("w/1", b"lost", qos=1, retain=False, properties=b"", delay_secs=0)


@pytest.fixture
def store(postgres_url: str) -> Iterator[PostgresStore]:
    store = open_store(postgres_url)
    assert isinstance(store, PostgresStore)
    store.log().create(LOG, shards=4)
    yield store
    store.close()


def insert(client_id: str, **fields: object) -> RowWrite:
    row = SessionRow(client_id=client_id, owner="n1", lease=7, connect="k", born="b", **fields)  # type: ignore[arg-type]
    return RowWrite(row, None, True)


def save(seen: SessionRow | None, **fields: object) -> RowWrite:
    assert seen is not None
    return RowWrite(replace(seen, seq=seen.seq + 1, **fields), (seen.epoch, seen.seq), False)


def rows_of(verdicts: list[Verdict]) -> list[SessionRow]:
    assert all(verdict.accepted for verdict in verdicts)
    return [verdict.row for verdict in verdicts if verdict.row]


def test_a_flush_touches_no_index(store: PostgresStore) -> None:
    table = store.sessions()
    assert isinstance(table, PostgresSessionTable)
    rows = rows_of(table.write([insert(f"c{n}", cursors=b"c" * 80) for n in range(100)]))

    def updates(writes: list[RowWrite]) -> tuple[int, int]:
        """Those that took the cheap way, and all."""

        def work(db) -> tuple[int, int]:  # type: ignore[no-untyped-def]
            of = "pg_stat_get_xact_tuples{}updated('sessions'::regclass)"
            sql = f"select {of.format('_hot_')}, {of.format('_')}"
            hot, every = db.run(sql)[0]
            assert all(verdict.accepted for verdict in table._write(db, writes)[0])
            hot_now, every_now = db.run(sql)[0]
            return hot_now - hot, every_now - every

        return store.database.change(work)

    assert updates([save(row, cursors=b"d" * 80) for row in rows[::5]]) == (20, 20)
    assert updates([save(row, lease=None, owner=None, due=5.0) for row in rows[1::5]]) == (0, 20)


def test_rows_are_written_by_their_index_however_few_there_are(store: PostgresStore) -> None:
    """The planner thinks little of computing the hash of every row; it costs a microsecond or more each."""
    table = store.sessions()
    for first in range(0, 4000, 500):
        table.write([insert(f"c{n}") for n in range(first, first + 500)])
    rows = [_values(save(row)) for row in table.read([f"c{n}" for n in range(100)]).values()]
    with store.database.read() as db:
        db.execute("analyze sessions")
        given = [*columns(rows), hashes(row[0] for row in rows)]
        plan = str(db.execute(f"explain {_UPDATE}".replace("?", "%s").encode(), given).fetchall())
    assert "sessions_once" in plan and "Seq Scan" not in plan, plan


def test_a_commit_that_becomes_visible_late_is_not_missed(store: PostgresStore, postgres_url: str) -> None:
    """The transaction with the lower number commits after one with a higher number was seen."""
    slow = open_store(postgres_url)
    here, go_on = threading.Event(), threading.Event()
    late = slow.sessions()

    def wait(*_: object) -> tuple[None, list[object]]:
        here.set()
        assert go_on.wait(30)
        return None, []

    late._publish = wait  # type: ignore[attr-defined]
    table = store.sessions()
    with ThreadPoolExecutor() as pool:
        writing = pool.submit(late.write, [insert("late")._replace(subscribed=["late"])])
        assert here.wait(30)
        table.write([insert("early")._replace(subscribed=["early"])])
        told = table.filters_since(0)
        assert told.counts == {"early": 1}
        again = table.filters_since(told.version)
        go_on.set()
        assert writing.result(30)[0].accepted
    assert table.filters_since(again.version).counts["late"] == 1
    slow.close()


def test_a_database_restored_elsewhere_tells_each_filter_once(store: PostgresStore) -> None:
    """Its numbers of transactions are those of the server that it was on."""
    table = store.sessions()
    rows = rows_of(table.write([insert("a")._replace(subscribed=["a", "b"])]))
    with store.database.write() as db:
        db.execute("update session_filters set version = version + 1000000000")
        db.execute("update session_filters_trimmed set version = 1000000000")
    told = table.filters_since(0)
    assert told.counts == {"a": 1, "b": 1}
    assert table.filters_since(told.version).counts == {}
    rows = rows_of(table.write([save(rows[0])._replace(unsubscribed=["a"], subscribed=["c"])]))
    changed = table.filters_since(told.version)
    assert changed.counts == {"a": 0, "c": 1} and not changed.whole
    table.bury(table.now() + 60, 10)
    assert table.filters_since(told.version).whole
    assert table.filters_since(table.filters_since(0).version).counts == {}


def test_a_write_gives_up_a_statement_that_takes_too_long(store: PostgresStore, postgres_url: str) -> None:
    (row,) = rows_of(store.sessions().write([insert("c")]))
    with store._limited.read() as db:
        assert db.execute("show statement_timeout").fetchone() == ("30s",)
        assert db.execute("show idle_in_transaction_session_timeout").fetchone() == ("30s",)
        assert db.execute("show transaction_timeout").fetchone() == ("1min",)
    with store.database.read() as db:
        assert db.execute("show statement_timeout").fetchone() == ("0",)
    hasty = open_store(postgres_url, StoreOptions(retry_seconds=0.1))
    assert isinstance(hasty, PostgresStore)
    limited = hasty.database.limited(1)
    table = PostgresSessionTable(limited, hasty.log())
    with psycopg.connect(postgres_url) as blocking:
        blocking.execute("select 1 from holdfast.sessions for update")
        with pytest.raises(StoreUnavailable, match="statement timeout"):
            table.write([save(row), insert("other")])
    assert store.sessions().read(["c", "other"]) == {"c": row}
    assert all(verdict.accepted for verdict in table.write([save(row), insert("other")]))
    limited.close()
    hasty.close()


def test_a_transaction_whose_process_stands_still_is_undone(store: PostgresStore, postgres_url: str) -> None:
    hasty = open_store(postgres_url, StoreOptions(retry_seconds=0.1))
    assert isinstance(hasty, PostgresStore)
    limited = hasty.database.limited(1)
    stopped = PostgresSessionTable(limited, hasty.log())
    here, gone = threading.Event(), threading.Event()

    def stand_still(*_: object) -> tuple[None, list[object]]:
        here.set()
        assert gone.wait(30)
        return None, []

    stopped._publish = stand_still  # type: ignore[assignment, method-assign]
    with ThreadPoolExecutor() as pool:
        writing = pool.submit(stopped.write, [insert("c")])
        assert here.wait(30)
        table = store.sessions()
        try:
            # Waits for the other insert, until the server has undone it.
            assert table.write([insert("c", expiry_secs=9)])[0].accepted
        finally:
            gone.set()
        with pytest.raises(StoreError):
            writing.result(30)
    assert table.read(["c"])["c"].expiry_secs == 9
    limited.close()
    hasty.close()


def keep_writing(table: SessionTable, row: SessionRow, stop: threading.Event) -> SessionRow:
    """An owner that repeats a write of unknown outcome, until a verdict settles it."""
    name = row.client_id
    while not stop.is_set():
        write = save(row)._replace(
            publish=replace(WILL, payload=b"%d" % (row.seq + 1)), subscribed=[f"{name}/{row.seq}"]
        )
        while True:
            try:
                (verdict,) = table.write([write])
                break
            except OutcomeUnknown:
                continue
        assert verdict.row == write.row, "accepted, or refused because it had been"
        row = write.row
    return row


def test_restarts_under_load_leave_rows_wills_and_filters_that_agree(
    store: PostgresStore, postgres_server: PostgresServer
) -> None:
    table, stop = store.sessions(), threading.Event()
    with ThreadPoolExecutor(3) as pool:
        rows = rows_of(table.write([insert(name) for name in "abc"]))
        writing = {row.client_id: pool.submit(keep_writing, table, row, stop) for row in rows}
        try:
            for _ in range(4):
                before = {name: row.seq for name, row in table.read(list(writing)).items()}
                give_up = time.monotonic() + 20
                while {n: row.seq for n, row in table.read(list(writing)).items()} == before:
                    assert time.monotonic() < give_up
                postgres_server.stop("immediate")
                postgres_server.start()
        finally:
            stop.set()
        last = {name: future.result(60) for name, future in writing.items()}
    assert table.read(list(last)) == last
    counts = table.filters_since(0).counts
    for name, row in last.items():
        wills = [
            int(payload)
            for chunk in store.log().scan(LOG)
            for payload, publisher in zip(
                chunk.batch.column("payload").to_pylist(), chunk.batch.column("publisher").to_pylist(), strict=True
            )
            if publisher == name
        ]
        assert wills == list(range(1, row.seq + 1))
        assert {text for text in counts if text.startswith(name)} == {f"{name}/{seq}" for seq in range(row.seq)}
