"""What every store promises of sessions, asked of each: one row per client, changed by whoever has seen it as it is."""

from __future__ import annotations

import os
import random
import re
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from msgspec.structs import replace

from holdfast import Batch, Log, Message
from holdfast.errors import RequestError
from holdfast.log.contract import NotTaken, ReceivedId
from holdfast.model import LOG
from holdfast.sessions.table import RowWrite, SessionRow, SessionTable, StoredWill, Verdict
from holdfast.store import Store, open_store
from processes import Report, child

Opener = Callable[[], Store]


@pytest.fixture(params=["memory", "sqlite", "postgres"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return {
        "memory": lambda: f"memory:sessions-{request.node.name}",
        "sqlite": lambda: f"sqlite:///{tmp_path}/store.db",
        "postgres": lambda: str(request.getfixturevalue("postgres_url")),
    }[request.param]()


@pytest.fixture
def opener(url: str) -> Iterator[Opener]:
    """Opens the same store again and again, as several processes would."""
    opened: list[Store] = []

    def open_() -> Store:
        opened.append(open_store(url))
        return opened[-1]

    yield open_
    for store in opened:
        store.close()


@pytest.fixture
def store(opener: Opener) -> Store:
    store = opener()
    store.log().create(LOG, shards=4)
    return store


@pytest.fixture
def table(store: Store) -> SessionTable:
    return store.sessions()


def session(client_id: str = "c", **fields: object) -> SessionRow:
    """A session that is connected to a node."""
    given = {"owner": "n1", "lease": 7, "connect": "k1", "born": "b1", "expiry_secs": 60, **fields}
    return SessionRow(client_id=client_id, **given)  # type: ignore[arg-type]


def insert(row: SessionRow, **more: object) -> RowWrite:
    return RowWrite(row, None, True, **more)  # type: ignore[arg-type]


def take(seen: SessionRow, **fields: object) -> RowWrite:
    return RowWrite(replace(seen, **fields), (seen.epoch, seen.seq), True)


def save(seen: SessionRow, **fields: object) -> RowWrite:
    """A write of its owner."""
    return RowWrite(replace(seen, seq=seen.seq + 1, **fields), (seen.epoch, seen.seq), False)


def kill(seen: SessionRow, left_at: float = 0.0) -> RowWrite:
    dead = SessionRow(client_id=seen.client_id, epoch=seen.epoch, seq=seen.seq + 1, dead=True, left_at=left_at)
    return RowWrite(dead, (seen.epoch, seen.seq), False)


def written(table: SessionTable, write: RowWrite) -> SessionRow:
    (verdict,) = table.write([write])
    assert verdict.accepted and verdict.row is not None
    return verdict.row


def messages(log: Log) -> list[Message]:
    found = []
    for chunk in log.scan(LOG):
        columns = chunk.batch.to_pydict()
        for topic, payload, publisher, flags, properties in zip(
            *(columns[name] for name in ("topic", "payload", "publisher", "flags", "properties")), strict=True
        ):
            found.append(Message(topic, payload, publisher, flags & 3, flags > 3, properties))
    return found


WILL = StoredWill("w/1", b"lost", qos=1, retain=False, properties=b"", delay_secs=0)

FULL = session(
    "ü/€ \U0001f69a",
    connect="k",
    born="b",
    expiry_secs=0xFFFFFFFF,
    left_at=1_700_000_000.125,
    will=StoredWill("w", b"\0\xff", 2, True, b"\x26\0\x01", 7),
    will_due=1_700_000_007.125,
    due=1_700_000_005.5,
    subscriptions=b"\0s",
    cursors=b"\xffc",
    packets=b"p",
)


# -- verdicts --------------------------------------------------------------------------------------------


def test_a_row_comes_back_as_it_was_written(opener: Opener, table: SessionTable) -> None:
    row = written(table, insert(FULL))
    assert row == replace(FULL, epoch=row.epoch, seq=0) and row.epoch > 0
    other = opener().sessions()
    assert other.read([row.client_id, "nobody"]) == {row.client_id: row}
    again = written(other, save(row, owner=None, lease=None, will=None, will_due=None, due=None, left_at=None))
    assert (again.epoch, again.seq, again.will) == (row.epoch, 1, None)
    assert table.read([row.client_id]) == {row.client_id: again}
    assert table.read([]) == {} and table.write([]) == []


def test_a_take_gets_a_new_epoch_whatever_stands_in_its_row(table: SessionTable) -> None:
    first = written(table, insert(session(epoch=99, seq=99)))
    assert first.seq == 0
    flushed = written(table, save(first, cursors=b"1"))
    assert (flushed.epoch, flushed.seq) == (first.epoch, 1)
    taken = written(table, take(flushed, owner="n2", lease=8, connect="k2"))
    assert taken.epoch > first.epoch and taken.seq == 0 and taken.cursors == b"1"
    assert table.read(["c"]) == {"c": taken}


def test_who_has_seen_another_state_is_refused_and_told_what_is_there(table: SessionTable) -> None:
    first = written(table, insert(session()))
    now = written(table, save(first, cursors=b"1"))
    stale = [
        insert(session(connect="late")),
        take(first, connect="late"),
        save(first, cursors=b"late"),
        take(replace(now, epoch=now.epoch + 1), connect="late"),
        RowWrite(replace(now, seq=9), (now.epoch, now.seq + 1), False),
    ]
    for write in stale:
        assert table.write([write]) == [Verdict(False, now)]
    assert table.read(["c"]) == {"c": now}
    assert table.write([take(session("nobody", epoch=1))]) == [Verdict(False, None)]
    assert table.read(["nobody"]) == {}


def test_each_write_has_its_own_verdict_in_order(table: SessionTable) -> None:
    rows = {name: written(table, insert(session(name))) for name in "fbd"}
    verdicts = table.write(
        [
            insert(session("f", connect="late")),
            insert(session("e")),
            take(rows["d"], connect="k2"),
            save(replace(rows["b"], seq=5), cursors=b"x"),
            insert(session("a")),
            take(session("z", epoch=3)),
        ]
    )
    assert [v.accepted for v in verdicts] == [False, True, True, False, True, False]
    assert [v.row and v.row.client_id for v in verdicts] == ["f", "e", "d", "b", "a", None]
    assert verdicts[0].row == rows["f"] and verdicts[3].row == rows["b"]
    epochs = [v.row.epoch for v in verdicts if v.accepted and v.row]
    assert len(set(epochs)) == 3 and min(epochs) > max(row.epoch for row in rows.values())
    assert table.count() == 5


def test_an_owner_s_write_repeated_is_refused_and_shows_its_own_row(table: SessionTable) -> None:
    """So does whoever does not know what became of it."""
    first = written(table, insert(session()))
    write = save(first, cursors=b"1")
    now = written(table, write)
    assert table.write([write]) == [Verdict(False, now)]
    insertion = insert(session("other", connect="token"))
    written(table, insertion)
    (refused,) = table.write([insertion])
    assert not refused.accepted and refused.row is not None and refused.row.connect == "token"


def test_deleted_stays_deleted_until_somebody_takes_the_dead_row_as_it_is(table: SessionTable) -> None:
    first = written(table, insert(session()))
    dead = written(table, kill(first, left_at=100.0))
    assert table.read(["c"]) == {"c": dead} and dead.dead and table.count() == 0
    assert table.write([insert(session())]) == [Verdict(False, dead)]
    assert table.write([take(first)]) == [Verdict(False, dead)]
    assert table.write([save(first)]) == [Verdict(False, dead)]
    back = written(table, RowWrite(session(born="b2", connect="b2"), (dead.epoch, dead.seq), True))
    assert not back.dead and back.epoch > dead.epoch and table.count() == 1
    assert table.bury(1e12, 100) == 0
    assert table.read(["c"]) == {"c": back}


def test_dead_rows_are_buried_when_they_are_old_enough(table: SessionTable) -> None:
    for n in range(10):
        written(table, kill(written(table, insert(session(f"c{n}"))), left_at=float(n)))
    alive = written(table, save(written(table, insert(session("alive", left_at=1.0)))))
    assert table.bury(0.0, 100) == 0
    assert [table.bury(5.0, 3), table.bury(5.0, 3), table.bury(5.0, 3)] == [3, 2, 0]
    left = table.read([*(f"c{n}" for n in range(10)), "alive"])
    assert sorted(left) == ["alive", *(f"c{n}" for n in range(5, 10))]
    assert left["alive"] == alive
    assert written(table, insert(session("c0"))).epoch > alive.epoch


def test_concurrent_takers_exactly_one_wins(opener: Opener, table: SessionTable) -> None:
    tables = [opener().sessions() for _ in range(4)]
    names = [f"c{n}" for n in range(20)]
    for round_ in range(10):
        rows = table.read(names)
        start = threading.Barrier(len(tables))

        def attempt(at: int, rows: dict[str, SessionRow] = rows, start: threading.Barrier = start) -> list[Verdict]:
            mine = [replace(rows.get(n, session(n)), owner=f"n{at}", connect=f"k{at}") for n in names]
            random.shuffle(mine)
            expected = {n: (rows[n].epoch, rows[n].seq) if n in rows else None for n in names}
            start.wait()
            return tables[at].write([RowWrite(row, expected[row.client_id], True) for row in mine])

        with ThreadPoolExecutor(len(tables)) as pool:
            verdicts = [v for found in pool.map(attempt, range(len(tables))) for v in found]
        won = [v.row for v in verdicts if v.accepted and v.row]
        assert sorted(row.client_id for row in won) == sorted(names), f"round {round_}"
        assert {row.client_id: row for row in won} == table.read(names)
        assert {v.row.client_id: v.row for v in verdicts if v.row} == table.read(names), "the others are told"


def test_epochs_never_repeat_also_after_a_restart(opener: Opener, store: Store) -> None:
    seen: list[int] = []
    for _ in range(5):
        again = opener()
        table = again.sessions()
        for n in range(20):
            first = written(table, insert(session(f"c{n}")))
            second = written(table, take(first))
            seen += [first.epoch, second.epoch]
            assert not table.write([take(first)])[0].accepted
            written(table, kill(second))
        assert table.bury(1e12, 1000) == 20
        again.close()
    assert len(set(seen)) == len(seen) == 200


# -- what is asked for -----------------------------------------------------------------------------------


def test_what_is_due_comes_oldest_first(table: SessionTable) -> None:
    table.write([insert(session(f"c{n}", due=float(due))) for n, due in enumerate([30, 10, 20, 40])])
    table.write([insert(session("never"))])
    assert [row.client_id for row in table.due(30.0, 10)] == ["c1", "c2", "c0"]
    assert [row.client_id for row in table.due(100.0, 2)] == ["c1", "c2"]
    first = table.read(["c1"])["c1"]
    written(table, save(first, due=35.0))
    written(table, save(table.read(["c2"])["c2"], due=None))
    assert [row.client_id for row in table.due(100.0, 10)] == ["c0", "c1", "c3"]
    assert table.due(100.0, 10)[1] == table.read(["c1"])["c1"]
    assert table.due(9.0, 10) == []


def test_rows_of_a_lease_are_paged_by_client_id(table: SessionTable) -> None:
    names = ["a", "B", "é", "\U0001f69a", "\ufffd", "a" * 300 + "2", "a" * 300 + "1", "a" * 199, *map(str, range(20))]
    table.write([insert(session(name)) for name in names])
    table.write([insert(session("of another", lease=8)), insert(session("away", lease=None, owner=None))])
    found: list[str] = []
    while page := table.of_lease(7, found[-1] if found else "", 3):
        found += [row.client_id for row in page]
    assert found == sorted(names)
    assert table.leases() == {7, 8}
    row = table.of_lease(8, "", 10)[0]
    assert row == table.read(["of another"])["of another"]
    written(table, save(row, lease=None, owner=None))
    assert table.leases() == {7} and table.of_lease(8, "", 10) == []


def test_the_clock_is_the_wall_clock_and_runs(table: SessionTable) -> None:
    first = table.now()
    assert abs(first - time.time()) < 60
    assert table.now() >= first


def test_large_rows_and_large_batches(opener: Opener, table: SessionTable) -> None:
    large = written(table, insert(session("large", cursors=os.urandom(1 << 20), subscriptions=os.urandom(1 << 20))))
    assert opener().sessions().read(["large"]) == {"large": large}
    flushed = written(table, save(large, cursors=os.urandom(1 << 20)))
    assert table.read(["large"]) == {"large": flushed}
    names = [f"c{n}" for n in range(500)]
    inserted = table.write([insert(session(name), publish=replace(WILL, topic=f"w/{name}")) for name in names])
    assert all(v.accepted for v in inserted)
    writes = [save(v.row, cursors=b"%d" % n) for n, v in enumerate(inserted) if v.row]
    assert [v.row and v.row.cursors for v in table.write(writes)] == [b"%d" % n for n in range(500)]
    assert len(table.read(names)) == 500
    assert all(not v.accepted and v.row for v in table.write(writes))


@pytest.mark.parametrize(
    "client_id",
    ["x" * 65_535, "é" * 32_767, "'; drop table sessions; --", '%s ? {} \\ "', " ", "/", "a\nb", "\x01", "\uffff"],
    ids=lambda name: repr(name[:10]),
)
def test_odd_client_ids_are_names_like_others(opener: Opener, table: SessionTable, client_id: str) -> None:
    row = written(table, insert(session(client_id), subscribed=[client_id]))
    other = written(table, insert(session(client_id[:-1] + "y")))
    table.write([save(other, cursors=b"other")])
    again = opener().sessions()
    assert again.read([client_id]) == {client_id: row}
    assert client_id in {row.client_id for row in again.of_lease(7, "", 10)}
    assert again.filters_since(0).counts == {client_id: 1}
    assert written(again, take(row)).epoch > row.epoch


@pytest.mark.parametrize(
    ("writes", "names"),
    [
        ([insert(session("a\0b"))], r"client id 'a\x00b' contains NUL"),
        ([insert(session("a\ud800"))], "Unicode"),
        ([insert(session("x" * 65_536))], "65536 bytes"),
        ([insert(session("é" * 32_768))], "65536 bytes"),
        ([insert(session(""))], "empty"),
        ([insert(session("a")), insert(session("a"))], "twice"),
        ([RowWrite(session("a"), None, False)], "by a take only"),
        ([RowWrite(session("a", epoch=2, seq=1), (1, 0), False)], "expected a later seq"),
        ([RowWrite(session("a", epoch=1, seq=1), (1, 1), False)], "expected a later seq"),
        ([insert(session("a"), publish=replace(WILL, topic="a/#"))], "a/#"),
        ([insert(session("a"), subscribed=["a\0"])], "filter 'a\\x00' contains NUL"),
    ],
)
def test_what_makes_no_sense_is_named_and_nothing_is_done(
    store: Store, table: SessionTable, writes: list[RowWrite], names: str
) -> None:
    with pytest.raises(RequestError) as refused:
        table.write([insert(session("good")), *writes])
    assert names in str(refused.value)
    assert table.count() == 0 and messages(store.log()) == []
    for ask in (table.read, table.received):
        with pytest.raises(RequestError, match="NUL"):
            ask(["a\0b"])


# -- wills -----------------------------------------------------------------------------------------------


def test_a_will_is_in_the_log_if_and_only_if_its_write_was_accepted(opener: Opener, store: Store) -> None:
    table, log = store.sessions(), store.log()
    rows = [written(table, insert(session(f"c{n}"))) for n in range(3)]
    stale = written(table, save(rows[1]))
    will = StoredWill("w/ü", b"\0gone", 2, False, b"\x26\x00\x01a\x00\x01b", 5)
    verdicts = table.write(
        [
            save(rows[0], owner=None, lease=None)._replace(publish=will),
            save(rows[1], owner=None, lease=None)._replace(publish=will),
            insert(session("new"))._replace(publish=WILL),
            insert(session("c2"))._replace(publish=WILL),
        ]
    )
    assert [v.accepted for v in verdicts] == [True, False, True, False]
    assert verdicts[1].row == stale
    found = messages(opener().log())
    assert sorted(found, key=lambda m: m.publisher) == [
        Message("w/ü", b"\0gone", "c0", 2, False, will.properties),
        Message("w/1", b"lost", "new", 1, False, None),
    ]
    for head in log.heads(LOG):
        for chunk in log.read(head.stream, 0).chunks:
            assert log.shard_of(LOG, chunk.batch.column("publisher")[0].as_py(), "")[1] == head.stream.shard
            sent_at = chunk.batch.column("time")[0].as_py().timestamp()
            assert abs(sent_at - table.now()) < 60


def test_everyone_who_watches_the_log_hears_of_wills(opener: Opener, store: Store) -> None:
    heard, elsewhere = [], threading.Event()
    store.log().watch(heard.append)
    other = opener().log()
    other.watch(lambda log: elsewhere.set())
    row = written(store.sessions(), insert(session()))
    assert heard == []
    written(store.sessions(), save(row)._replace(publish=WILL))
    assert heard == [LOG]
    assert elsewhere.wait(10)
    assert [m.topic for m in messages(other)] == ["w/1"]
    assert store.sessions().write([save(row)._replace(publish=WILL)])[0].accepted is False
    assert heard == [LOG]


def test_a_retained_will_is_kept_or_clears_what_was_kept(store: Store, table: SessionTable) -> None:
    row = written(table, insert(session()))
    kept = replace(WILL, retain=True, qos=1, properties=b"\x01\x01")
    row = written(table, save(row)._replace(publish=kept))
    (last,) = store.log().retained(LOG)
    assert last[:5] == ("w/1", b"lost", "c", 5, b"\x01\x01")
    (chunk,) = store.log().scan(LOG)
    assert chunk.batch.column("flags").to_pylist() == [5]
    assert round(chunk.batch.column("time")[0].as_py().timestamp() * 1_000_000) == last.time
    table.write([insert(session())._replace(publish=replace(kept, payload=b"refused"))])
    assert store.log().retained(LOG) == [last]
    written(table, save(row)._replace(publish=replace(kept, payload=b"")))
    assert store.log().retained(LOG) == []
    assert len(messages(store.log())) == 2


def test_a_will_goes_to_the_next_generation_if_the_open_one_was_sealed(opener: Opener, store: Store) -> None:
    table, other = store.sessions(), opener()
    row = written(table, insert(session(), publish=WILL))
    other.log().seal(LOG, shards=2)
    row = written(table, save(row)._replace(publish=WILL))
    other.log().seal(LOG, shards=1)
    written(table, take(row)._replace(publish=WILL))
    generations = [head.stream.generation for head in store.log().heads(LOG) if head.next_offset]
    assert generations == [1, 2, 3]
    assert len(messages(store.log())) == 3


def test_wills_while_others_seal_and_append_are_each_there_once(opener: Opener, store: Store) -> None:
    done = threading.Event()

    def publish() -> int:
        log, count = opener().log(), 0
        while not done.is_set():
            log.append(LOG, Batch(["t"], [b""], f"p{count % 9}"), retained=[])
            count += 1
        return count

    def die(name: str) -> None:
        table = opener().sessions()
        rows = [v.row for v in table.write([insert(session(f"{name}{n}")) for n in range(5)])]
        for k in range(15):
            will = replace(WILL, topic=f"w/{name}", payload=b"%d" % k, retain=True)
            verdicts = table.write([save(row)._replace(publish=will) for row in rows if row])
            assert all(v.accepted for v in verdicts)
            rows = [v.row for v in verdicts]

    with ThreadPoolExecutor(4) as pool:
        publishing = pool.submit(publish)
        dying = [pool.submit(die, name) for name in "ab"]
        for shards in (2, 1, 3, 4):
            store.log().seal(LOG, shards)
        for each in dying:
            each.result(60)
        done.set()
        published = publishing.result(60)
    found = messages(store.log())
    wills = sorted((m.publisher, int(m.payload)) for m in found if m.topic != "t")
    assert wills == sorted((f"{name}{n}", k) for name in "ab" for n in range(5) for k in range(15))
    assert len(found) == published + len(wills)
    assert {last.payload for last in store.log().retained(LOG)} == {b"14"}


class Broken(Exception):
    pass


@pytest.mark.parametrize("url", ["sqlite", "postgres"], indirect=True)
def test_a_write_that_fails_leaves_neither_rows_nor_wills_nor_filters(
    store: Store, table: SessionTable, monkeypatch: pytest.MonkeyPatch
) -> None:
    row = written(table, insert(session()))
    write = [
        save(row)._replace(publish=replace(WILL, retain=True), subscribed=["a/#"]),
        insert(session("new"), publish=WILL),
    ]
    publish = type(table)._publish  # type: ignore[attr-defined]
    with monkeypatch.context() as broken:

        def publish_and_fail(*given: object) -> None:
            publish(*given)
            raise Broken

        broken.setattr(type(table), "_publish", publish_and_fail)
        with pytest.raises(Broken):
            table.write(write)
    assert table.read(["c", "new"]) == {"c": row}
    assert table.filters_since(0).counts == {}
    assert messages(store.log()) == [] and store.log().retained(LOG) == []
    assert all(v.accepted for v in table.write(write))
    assert len(messages(store.log())) == 2


def die_again_and_again(report: Report, url: str, name: str) -> None:
    store = open_store(url)
    table = store.sessions()
    row = table.write([insert(session(name))])[0].row
    while row is not None:
        report.send(row.seq)
        will = replace(WILL, payload=b"%d" % (row.seq + 1))
        row = table.write([save(row)._replace(publish=will, subscribed=[f"{name}/{row.seq}"])])[0].row


@pytest.mark.parametrize("url", ["sqlite", "postgres"], indirect=True)
def test_kill_9_leaves_rows_wills_and_filters_that_agree(url: str, store: Store) -> None:
    table = store.sessions()
    for n in range(8):
        name = f"c{n}"
        with child(die_again_and_again, url, name) as process:
            told = [process.next_report() for _ in range(random.randrange(2, 12))]
            process.kill()
            told += process.all_reports()
        row = table.read([name])[name]
        assert row.seq >= told[-1]
        wills = sorted(int(m.payload) for m in messages(store.log()) if m.publisher == name)
        assert wills == list(range(1, row.seq + 1))
        filters = {text for text in table.filters_since(0).counts if text.startswith(f"{name}/")}
        assert filters == {f"{name}/{seq}" for seq in range(row.seq)}


# -- filters ---------------------------------------------------------------------------------------------


def test_filters_are_counted_and_told_of_as_they_change(opener: Opener, table: SessionTable) -> None:
    other = opener().sessions()
    begin = other.filters_since(0)
    assert begin.counts == {} and begin.whole
    rows = [v.row for v in table.write([insert(session(f"c{n}"), subscribed={"all", f"own/{n}"}) for n in range(3)])]
    told = other.filters_since(begin.version)
    assert told.counts == {"all": 3, "own/0": 1, "own/1": 1, "own/2": 1}
    assert rows[0] and rows[1]
    table.write([insert(session("c0"), subscribed=["refused"])])
    table.write(
        [
            save(rows[0])._replace(unsubscribed=["all", "own/0"], subscribed=["moved"]),
            save(rows[1])._replace(unsubscribed=["own/1"], subscribed=["own/0"]),
        ]
    )
    later = other.filters_since(told.version)
    assert {**told.counts, **later.counts} == {"all": 2, "own/0": 1, "own/1": 0, "own/2": 1, "moved": 1}
    assert later.counts["own/1"] == 0 and "refused" not in later.counts
    assert other.unused({"all", "own/0", "own/1", "own/2", "moved", "never"}) == {"own/1", "never"}
    assert other.unused([]) == set()
    everything = other.filters_since(0)
    assert {t: n for t, n in everything.counts.items() if n} == {"all": 2, "own/0": 1, "own/2": 1, "moved": 1}


def test_nobody_who_is_counted_out_twice_makes_a_count_negative(table: SessionTable) -> None:
    row = written(table, insert(session(), subscribed=["a"]))
    row = written(table, save(row)._replace(unsubscribed=["a", "never"]))
    row = written(table, save(row)._replace(unsubscribed=["a"]))
    written(table, save(row)._replace(subscribed=["a"]))
    assert table.filters_since(0).counts == {"a": 1}


def test_who_was_away_while_counts_of_0_were_buried_gets_everything(table: SessionTable) -> None:
    row = written(table, insert(session(), subscribed=["a", "b", "c"]))
    told = table.filters_since(0)
    row = written(table, save(row)._replace(unsubscribed=["a"]))
    heard = table.filters_since(told.version)
    assert heard.counts.get("a") == 0
    row = written(table, save(row)._replace(subscribed=["d"], unsubscribed=["b"]))
    latest = table.filters_since(heard.version)
    table.bury(table.now() - 3600, 100)
    assert table.filters_since(0).counts == {"a": 0, "b": 0, "c": 1, "d": 1}
    table.bury(table.now() + 3600, 100)
    everything = table.filters_since(told.version)
    assert everything.counts == {"c": 1, "d": 1} and everything.whole
    assert not table.filters_since(latest.version).whole
    written(table, save(row)._replace(subscribed=["a"]))
    assert table.filters_since(latest.version).counts["a"] == 1


def test_a_version_of_another_store_gets_everything(table: SessionTable) -> None:
    written(table, insert(session(), subscribed=["a"]))
    now = table.filters_since(table.filters_since(0).version + 1_000_000)
    assert now.counts == {"a": 1} and now.whole


def test_who_follows_the_filters_misses_nothing(opener: Opener, store: Store) -> None:
    """However commits overtake each other, and while counts of 0 are buried."""
    stop = threading.Event()

    def change(name: str) -> dict[str, int]:
        table, chance = opener().sessions(), random.Random(name)
        rows = [v.row for v in table.write([insert(session(f"{name}{n}")) for n in range(4)])]
        have: list[set[str]] = [set() for _ in rows]
        for _ in range(60):
            writes = []
            for at, row in enumerate(rows):
                some = {f"f/{chance.randrange(12)}" for _ in range(3)}
                writes.append(
                    save(row)._replace(subscribed=some - have[at], unsubscribed=have[at] & some)  # type: ignore[arg-type]
                )
                have[at] ^= some
            rows = [v.row for v in table.write(writes)]
        return {text: sum(text in h for h in have) for text in set().union(*have)}

    def follow() -> dict[str, int]:
        table = opener().sessions()
        counts: dict[str, int] = {}
        version = 0
        while True:
            last = stop.is_set()
            told = table.filters_since(version)
            if told.whole:
                counts.clear()
            counts.update(told.counts)
            version = told.version
            if last:
                return {text: count for text, count in counts.items() if count}

    with ThreadPoolExecutor(6) as pool:
        followers = [pool.submit(follow) for _ in range(2)]
        changers = [pool.submit(change, name) for name in "abc"]
        while not all(each.done() for each in changers):
            store.sessions().bury(store.sessions().now() + 1, 100)
        expected: dict[str, int] = {}
        for each in changers:
            for text, count in each.result().items():
                expected[text] = expected.get(text, 0) + count
        stop.set()
        for follower in followers:
            assert follower.result(30) == expected


# -- packet ids of QoS 2 ---------------------------------------------------------------------------------


def publish(log: Log, *received: tuple[str, str, int] | ReceivedId) -> None:
    ids = [ReceivedId(*one) for one in received]
    log.append(LOG, Batch(["t"] * len(ids), [b""] * len(ids), "p"), received=ids)


def test_packet_ids_are_stored_with_their_publishes_and_released(opener: Opener, store: Store) -> None:
    table, log = store.sessions(), store.log()
    table.write([insert(session("a")), insert(session("b", born="b2")), insert(session("c"))])
    publish(log, ("a", "b1", 1), ("a", "b1", 65_535), ("b", "b2", 1), ("b", "an earlier one", 9))
    generation, shard = log.shard_of(LOG, "p", "t")
    log.append_sharded(LOG, generation, {shard: Batch(["t"], [b""], "p")}, received=[ReceivedId("a", "b1", 3)])
    other = opener().sessions()
    assert other.received(["a", "b", "c", "nobody"]) == {"a": {1: 0, 3: 0, 65_535: 0}, "b": {1: 0}}
    assert other.received(["c"]) == {} and other.received([]) == {}
    gone = [("b", "b2", 1), ("a", "b1", 3), ("a", "another", 1), ("nobody", "b", 1)]
    other.release([ReceivedId(*one) for one in gone])
    other.release([])
    assert table.received(["a", "b"]) == {"a": {1: 0, 65_535: 0}}
    publish(log, ("a", "b1", 3))
    assert table.received(["a"]) == {"a": {1: 0, 3: 0, 65_535: 0}}


def test_what_is_stored_already_is_not_stored_again(opener: Opener, store: Store) -> None:
    table, log, other = store.sessions(), store.log(), opener().log()
    table.write([insert(session("a"))])
    publish(log, ReceivedId("a", "b1", 1, mark=7))
    with pytest.raises(NotTaken) as refused:
        publish(other, ReceivedId("a", "b1", 2, mark=8), ReceivedId("a", "b1", 1, mark=9))
    assert refused.value.repeated == {ReceivedId("a", "b1", 1, mark=9): 7}, "as what it is stored"
    assert not refused.value.fenced
    assert table.received(["a"]) == {"a": {1: 7}}, "nothing of it was stored"
    assert sum(head.next_offset for head in log.heads(LOG)) == 1


def test_what_lands_after_its_session_was_taken_is_not_stored(opener: Opener, store: Store) -> None:
    """A node that was held up has no idea that its client has sent it again elsewhere, and had it released there."""
    table, log, other = store.sessions(), store.log(), opener().log()
    row = written(table, insert(session("a")))
    publish(log, ReceivedId("a", "b1", 1, epoch=row.epoch))
    taken = written(table, take(row, connect="k2"))
    with pytest.raises(NotTaken) as refused:
        publish(log, ReceivedId("a", "b1", 2, epoch=row.epoch), ReceivedId("nobody", "b1", 2, epoch=1))
    assert {one.client_id for one in refused.value.fenced} == {"a", "nobody"} and not refused.value.repeated
    publish(other, ReceivedId("a", "b1", 2, epoch=taken.epoch))
    assert sum(head.next_offset for head in log.heads(LOG)) == 2


def test_a_release_that_lands_late_does_not_concern_the_next_publish_under_that_packet_id(store: Store) -> None:
    table, log = store.sessions(), store.log()
    table.write([insert(session("a"))])
    publish(log, ReceivedId("a", "b1", 1, mark=7))
    table.release([ReceivedId("a", "b1", 1, mark=7)])
    publish(log, ReceivedId("a", "b1", 1, mark=8))
    table.release([ReceivedId("a", "b1", 1, mark=7)])
    assert table.received(["a"]) == {"a": {1: 8}}


def test_packet_ids_are_not_stored_if_the_append_failed(store: Store) -> None:
    table = store.sessions()
    table.write([insert(session("a"))])
    batch = Batch(["t"], [b""], "p")
    shard = store.log().shard_of(LOG, "p", "t")[1]
    with pytest.raises(RequestError):
        store.log().append(LOG, batch, expect={shard: 9}, received=[ReceivedId("a", "b1", 1)])
    assert table.received(["a"]) == {}
    store.log().append(LOG, batch, expect={shard: 0}, received=[ReceivedId("a", "b1", 1)])
    assert table.received(["a"]) == {"a": {1: 0}}


def test_packet_ids_end_with_the_session_they_were_sent_in(store: Store) -> None:
    table, log = store.sessions(), store.log()
    names = ["comes back", "begins anew", "ends", "ended"]
    rows = {v.row.client_id: v.row for v in table.write([insert(session(name)) for name in names]) if v.row}
    rows["ended"] = written(table, kill(rows["ended"]))
    publish(log, *((name, "b1", 1) for name in names))
    assert table.received(names) == {name: {1: 0} for name in names[:3]}
    rows["comes back"] = written(table, take(rows["comes back"], connect="k2"))
    rows["begins anew"] = written(table, take(rows["begins anew"], connect="b2", born="b2"))
    rows["ends"] = written(table, kill(rows["ends"]))
    assert table.received(names) == {"comes back": {1: 0}}
    publish(log, ("begins anew", "b2", 2))
    assert table.received(["begins anew"]) == {"begins anew": {2: 0}}
    # Not only hidden: a session that happens to bear the old token again does not get them.
    written(table, take(rows["begins anew"], born="b1"))
    written(table, take(rows["ends"], born="b1", dead=False))
    assert table.received(names) == {"comes back": {1: 0}}
    table.bury(1e12, 10)
    written(table, insert(session("ended")))
    assert table.received(["ended"]) == {}


# -- how it is done --------------------------------------------------------------------------------------


@pytest.mark.parametrize("url", ["sqlite", "postgres"], indirect=True)
def test_due_rows_and_rows_of_a_lease_are_found_by_their_indexes(url: str, store: Store) -> None:
    table, database = store.sessions(), store.database  # type: ignore[attr-defined]
    for first in range(0, 3000, 500):
        table.write(
            [
                insert(session(f"c{n:05}", lease=n % 3 or None, due=float(n) if n % 3 == 0 else None))
                for n in range(first, first + 500)
            ]
        )
    if url.startswith("postgresql"):
        with database.read() as db:
            db.execute("analyze sessions")
    plans: dict[str, str] = {}

    class Explained:
        def __init__(self, db) -> None:  # type: ignore[no-untyped-def]
            self._db = db

        def run(self, sql: str, *args: object) -> list:  # type: ignore[type-arg]
            how = "explain query plan" if url.startswith("sqlite") else "explain"
            plans[sql] = "\n".join(str(row) for row in self._db.run(f"{how} {sql}", *args))
            return self._db.run(sql, *args)  # type: ignore[no-any-return]

    ask = database.ask
    table._database = type("Asked", (), {"ask": lambda _, work: ask(lambda db: work(Explained(db)))})()  # type: ignore[attr-defined]
    for asking, index in (
        (lambda: table.due(1e6, 500), "sessions_due"),
        (lambda: table.of_lease(1, "c01000", 100), "sessions_of_lease"),
        (table.leases, "sessions_of_lease"),
        (lambda: table.read(["c00001", "c00002"]), "sessions"),
        (lambda: table.received(["c00001", "c00002"]), "sessions"),
    ):
        plans.clear()
        asking()
        (plan,) = plans.values()
        assert index in plan, plan
        assert not re.search(r"Seq Scan on sessions|SCAN (s|r|sessions)\b(?! USING)", plan), plan


@pytest.mark.parametrize("url", ["sqlite"], indirect=True)
def test_a_flush_in_sqlite_writes_to_no_index(url: str, store: Store) -> None:
    from holdfast.store.sqlite import sessions

    with store.database.read() as db:  # type: ignore[attr-defined]
        roots = dict(db.execute("select rootpage, name from sqlite_master where name like 'sessions%'"))

        def written_to(statement: str) -> set[str]:
            program = db.execute(f"explain {statement}", [None] * 16).fetchall()
            return {roots[row[3]] for row in program if row[1] == "OpenWrite" and row[3] in roots}

        assert {"sessions_due", "sessions_of_lease"} <= written_to(sessions._MOVE)
        assert written_to(sessions._FLUSH) & {"sessions_due", "sessions_of_lease"} == set()
