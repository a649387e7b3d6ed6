"""What every store promises as a whole, asked of each: its parts, who may share it, and how it is closed."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from holdfast import Batch
from holdfast.errors import PreconditionFailed, RequestError
from holdfast.log import AppendKey
from holdfast.log.contract import GenerationSealed, NewBlock
from holdfast.log.manifest import LakeFile, Part, Reached
from holdfast.model import Stream
from holdfast.store import Store, open_store, parse_url
from processes import wait_for


@pytest.fixture(params=["memory", "sqlite", "postgres"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "postgres":
        return str(request.getfixturevalue("postgres_url"))
    return "memory:" if request.param == "memory" else f"sqlite:///{tmp_path}/store.db"


@pytest.fixture
def store(url: str) -> Iterator[Store]:
    opened = open_store(url)
    yield opened
    opened.close()


def test_its_parts_are_one_each(store: Store) -> None:
    assert store.log() is store.log()
    assert store.metadata() is store.metadata()
    assert store.sessions() is store.sessions()
    assert store.fanout() is store.fanout()
    store.log().create("one", shards=1)
    store.metadata().put("/a", b"1")
    assert list(store.log().logs()) == ["one"]


def test_closing_any_part_closes_the_store_and_ends_its_threads(url: str) -> None:
    for close in (lambda s: s.log().close(), lambda s: s.metadata().close(), lambda s: s.close()):
        others = set(threading.enumerate())
        store = open_store(url)
        store.log().watch(lambda _: None)
        watch = store.metadata().watch("/")
        bus = store.bus("here")
        if bus is not None:
            threading.Thread(target=bus.listen, args=(lambda _: None,)).start()
            bus.close()
        close(store)
        store.close()
        assert watch.closed
        wait_for(lambda others=others: not set(threading.enumerate()) - others, 5, "the end of its threads")


def test_what_lives_in_one_process_says_so(url: str, store: Store) -> None:
    if parse_url(url).one_process:
        for part in (store.staging, store.manifest):
            with pytest.raises(RequestError, match="use sqlite or postgresql"):
                part()
        assert store.log().manifest is None
    else:
        assert store.staging().landed("one", "nobody") is None
        assert store.manifest().root("one") is None


def test_only_a_store_that_nodes_share_has_a_bus(store: Store) -> None:
    assert (store.bus("here") is not None) == store.shared


@pytest.mark.parametrize("url", ["postgres"], indirect=True)
def test_the_bus_carries_messages_in_order_to_the_node_they_are_for(store: Store) -> None:
    here, there = store.bus("here"), store.bus("there")
    assert here is not None and there is not None
    heard: list[bytes] = []
    listening = threading.Thread(target=here.listen, args=(heard.extend,))
    listening.start()
    there.send([("here", b"1"), ("elsewhere", b"x"), ("here", b"2")])
    there.send([("here", b"3")])
    wait_for(lambda: len(heard) == 3, 10, "three messages")
    assert heard == [b"1", b"2", b"3"]
    here.close()
    listening.join(5)
    assert not listening.is_alive()


def test_a_url_can_be_asked_without_opening_anything(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    file = parse_url("sqlite:///a%20b.db")
    assert file.absolute() == f"sqlite:///{tmp_path}/a%20b.db"
    assert file.missing() == f"{tmp_path}/a b.db"
    open_store("sqlite:///a%20b.db").close()
    assert file.missing() is None and (tmp_path / "a b.db").exists()
    assert parse_url(file.absolute()).missing() is None
    assert parse_url("memory:x").one_process
    assert parse_url("postgresql://h/db").absolute() == "postgresql://h/db"


@pytest.mark.parametrize("url", ["", "file:///x", "sqlite:", "sqlite:///", "mysql://h/db"])
def test_a_url_of_no_known_kind_is_named(url: str) -> None:
    with pytest.raises(RequestError, match="it takes memory:, sqlite:///path"):
        open_store(url)


# -- one transaction -------------------------------------------------------------------------------------


@pytest.fixture(params=["sqlite", "postgres"])
def sql_store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Store]:
    url = f"sqlite:///{tmp_path}/store.db" if request.param == "sqlite" else request.getfixturevalue("postgres_url")
    store = open_store(str(url))
    yield store
    store.close()


def block(number: int) -> NewBlock:
    return NewBlock(0, 1, number, number, number, b"", b"%d" % number)


def test_rows_and_blocks_of_one_transaction_are_durable_together_or_not_at_all(sql_store: Store) -> None:
    log, database = sql_store.log(), sql_store.database  # type: ignore[attr-defined]
    log.create("one", shards=1)

    def both(db, generation: int = 1, expect: int = 0) -> None:
        db.run("insert into lakes values (?, ?)", "one", "here")
        db.append("one", generation, [block(1)], ["t"], {0: expect}, AppendKey("w", 1), 1)

    for error, wrong in ((PreconditionFailed, {"expect": 7}), (GenerationSealed, {"generation": 2})):
        with pytest.raises(error):
            database.change(lambda db, wrong=wrong: both(db, **wrong))
    assert sql_store.manifest().root("one") is None
    assert log.heads("one")[0].next_offset == 0
    database.change(both)
    assert sql_store.manifest().root("one") == "here"
    assert log.heads("one")[0].next_offset == 1
    assert database.change(lambda db: db.append("one", 1, [block(1)], ["t"], {}, AppendKey("w", 1), 1))[1], "a repeat"
    assert not database.change(lambda db: db.append("one", 1, [block(2)], ["t"], {}, None, 1))[1]


def test_the_manifest_moves_only_from_where_it_is(sql_store: Store) -> None:
    sql_store.log().create("one", shards=1)
    manifest, stream = sql_store.manifest(), Stream("one", 0, 1)
    file = LakeFile(1, "2026-01-01", "a.parquet", 10, 100, 5, 9, (Part(0, 0, 10, 10),))
    manifest.commit("one", [file], [Reached(stream, 0, 10)])
    with pytest.raises(PreconditionFailed, match=r"to offset 10 in one\.1\.0, not to 0"):
        manifest.commit("one", [file._replace(path="b.parquet")], [Reached(stream, 0, 10)])
    assert manifest.paths("one") == {"a.parquet"}
    assert manifest.reached("one") == {stream: 10}
    assert manifest.totals("one") == (1, 10, 100)
    assert manifest.parts(stream, 3, 4) == [("a.parquet", Part(0, 0, 10, 10), 9)]
    manifest.set_root("one", "/lake")
    assert not manifest.may_drop("one", 1)
    sql_store.log().append("one", Batch(["t"], [b"x"]))
    sql_store.log().seal("one")
    manifest.set_verified("one", sql_store.log().generations("one")[0], {0: 7}, 10, 1)
    assert manifest.may_drop("one", 1) and manifest.verified("one") == {1}
