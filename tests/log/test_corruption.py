"""A flipped byte is found on read, named, and costs that block only."""

from __future__ import annotations

from pathlib import Path

import pytest

import holdfast
from holdfast import Batch, Log, Stream
from holdfast.log.retention import maintain
from holdfast.store.postgres.database import PostgresDatabase
from holdfast.store.sqlite.database import SqliteDatabase

ONE = Stream("one", 0, 1)


@pytest.fixture(params=["sqlite", "postgres"])
def damaged(request: pytest.FixtureRequest, tmp_path: Path) -> Log:
    """Thirty messages in three blocks; a byte in the middle of the second block's body is wrong."""
    url = f"sqlite:///{tmp_path}/log.db" if request.param == "sqlite" else request.getfixturevalue("postgres_url")
    log = holdfast.open(url)
    request.addfinalizer(log.close)
    log.create("one", shards=1)
    for first in (0, 10, 20):
        log.append(
            "one", Batch([f"t/{n}" for n in range(first, first + 10)], [b"%d" % n for n in range(first, first + 10)])
        )
    body = log.backend.entries(log.head(ONE).id, 10, 1)[0].body
    data = bytearray(log.backend.bodies([body])[body])
    data[len(data) // 2] ^= 0x10
    store = log.backend.database  # type: ignore[attr-defined]
    with store.write() as db:
        if isinstance(store, SqliteDatabase):
            db.execute("update bodies set data = ? where id = ?", (bytes(data), body))
        else:
            assert isinstance(store, PostgresDatabase)
            db.execute("update bodies set data = %s where id = %s", (bytes(data), body))
    log.cache.clear()
    return log


def offsets(reading: holdfast.log.Reading) -> list[int]:
    return [o for chunk in reading.chunks for o in chunk.offsets()]


def test_what_lies_before_the_damage_is_read_and_then_it_is_named(damaged: Log) -> None:
    reading = damaged.read(ONE, 0)
    assert (offsets(reading), reading.next_offset) == (list(range(10)), 10)
    with pytest.raises(holdfast.CorruptBlock, match=r"one\.1\.0 at offsets 10\.\.19 .* go on at offset 20") as found:
        damaged.read(ONE, 10)
    assert (found.value.stream, found.value.base, found.value.count) == (ONE, 10, 10)
    assert offsets(damaged.read(ONE, 20)) == list(range(20, 30))


def test_it_can_be_skipped_with_a_record_of_what_was(damaged: Log) -> None:
    reading = damaged.read(ONE, 5, on_corrupt="skip")
    assert offsets(reading) == [*range(5, 10), *range(20, 30)]
    assert reading.skipped == [(ONE, 10, 20, "the block does not match its checksum")]


def test_writing_goes_on_and_upkeep_leaves_the_damage_where_it_is(damaged: Log) -> None:
    damaged.append("one", Batch(["t/30"], [b"30"]))
    damaged.seal("one")
    maintain(damaged)
    reading = damaged.read(ONE, 0, on_corrupt="skip")
    assert offsets(reading) == [*range(10), *range(20, 31)]
    assert [tuple(s[1:3]) for s in reading.skipped] == [(10, 20)]
