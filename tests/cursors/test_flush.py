"""Saving cursors: forward only, fenced, together, again after a failure, and never from the grave."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from holdfast.cursors import Cursor
from holdfast.cursors.flush import CursorStore
from holdfast.errors import RequestError, StoreError
from holdfast.keys import named_cursor_key, session_cursor_key
from holdfast.metadata import Metadata
from holdfast.model import Stream
from holdfast.store import open_metadata

S = Stream("messages", 3, 2)
KEY = session_cursor_key(S, "car-1", "vehicle/#")


@pytest.fixture(params=["memory", "sqlite", "postgres", "etcd"])
def metadata(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Metadata]:
    url = {
        "memory": lambda: "memory:",
        "sqlite": lambda: f"sqlite:///{tmp_path}/metadata.db",
        "postgres": lambda: request.getfixturevalue("postgres_url"),
        "etcd": lambda: request.getfixturevalue("etcd_url"),
    }[request.param]()
    with open_metadata(url) as opened:
        yield opened


@pytest.fixture
def store() -> Iterator[CursorStore]:
    with open_metadata("memory:") as opened:
        yield CursorStore(opened)


def stored(metadata: Metadata, key: str = KEY) -> Cursor | None:
    entry = metadata.get(key)
    return None if entry is None else Cursor.from_json(entry.value)


class Counted:
    """A metadata store that counts its transactions, and refuses them while told to."""

    def __init__(self, metadata: Metadata, batch_max: int | None = None):
        self._metadata = metadata
        self.batch_max = batch_max if batch_max is not None else metadata.batch_max
        self.sizes: list[int] = []
        self.error: Exception | None = None

    def transact(self, changes: Any, preconditions: Any = None) -> Any:
        if self.error is not None:
            raise self.error
        found = self._metadata.transact(changes, preconditions)
        self.sizes.append(len(changes))
        return found

    def __getattr__(self, name: str) -> Any:
        return getattr(self._metadata, name)


# -- form ------------------------------------------------------------------------------------------------


def test_the_key_and_the_value_are_as_the_design_says(metadata):
    assert KEY == "/holdfast/subscriptions/messages/messages.2.3/car-1 vehicle%2F#/cursor"
    CursorStore(metadata).save({KEY: Cursor(12_345, [(12_350, 12_360)], epoch=7)}, 1_726_937_845.9)
    entry = metadata.get(KEY)
    assert entry is not None
    assert json.loads(entry.value) == {
        "offset": 12_345,
        "updated_at": 1_726_937_845,
        "acked": [[12_350, 12_360]],
        "epoch": 7,
    }


def test_the_plain_form_of_the_seed_is_understood(metadata):
    metadata.put(KEY, b'{"offset": 12345, "updated_at": 1726937845}')
    cursors = CursorStore(metadata)
    assert cursors.load(KEY) == Cursor(12_345)
    cursors.save({KEY: Cursor(12_350, epoch=1)}, 0.0)
    assert stored(metadata) == Cursor(12_350, epoch=1)


# -- forward only, fenced --------------------------------------------------------------------------------


def test_what_another_process_saved_meanwhile_is_kept(metadata):
    mine, theirs = CursorStore(metadata), CursorStore(metadata)
    mine.save({KEY: Cursor(5, epoch=1)}, 0.0)
    theirs.load(KEY)
    theirs.save({KEY: Cursor(9, [(12, 14)], epoch=1)}, 0.0)
    assert mine.save({KEY: Cursor(7, [(16, 16)], epoch=1)}, 0.0) == {KEY}
    assert stored(metadata) == Cursor(9, [(12, 14), (16, 16)], epoch=1)


def test_a_holder_of_an_older_epoch_changes_nothing(metadata):
    old, new = CursorStore(metadata), CursorStore(metadata)
    old.save({KEY: Cursor(5, epoch=1)}, 0.0)
    new.load(KEY)
    new.save({KEY: Cursor(6, epoch=2)}, 0.0)
    version = metadata.get(KEY).version
    assert old.save({KEY: Cursor(99, epoch=1)}, 0.0) == {KEY}, "settled: there is nothing left for it to save"
    assert stored(metadata) == Cursor(6, epoch=2) and metadata.get(KEY).version == version
    assert new.save({KEY: Cursor(7, epoch=2)}, 0.0) == {KEY}
    assert stored(metadata) == Cursor(7, epoch=2)


def test_one_stale_cursor_does_not_hold_up_the_others(metadata):
    old, new = CursorStore(metadata), CursorStore(metadata)
    keys = [named_cursor_key(S, f"s{n}") for n in range(5)]
    old.save({key: Cursor(1, epoch=1) for key in keys}, 0.0)
    new.load(keys[2])
    new.save({keys[2]: Cursor(2, epoch=2)}, 0.0)
    assert old.save({key: Cursor(5, epoch=1) for key in keys}, 0.0) == set(keys)
    assert [stored(metadata, key).offset for key in keys] == [5, 5, 2, 5, 5]


def test_a_process_that_knows_no_version_yet_finds_what_is_there(metadata):
    CursorStore(metadata).save({KEY: Cursor(9, epoch=1)}, 0.0)
    assert CursorStore(metadata).save({KEY: Cursor(4, epoch=2)}, 0.0) == {KEY}
    assert stored(metadata) == Cursor(9, epoch=2), "it takes over, and nothing moves back"


# -- together --------------------------------------------------------------------------------------------


def test_all_cursors_go_in_one_transaction(metadata):
    counted = Counted(metadata)
    cursors = {named_cursor_key(S, f"s{n}"): Cursor(n, epoch=1) for n in range(300)}
    assert CursorStore(counted).save(cursors, 0.0) == set(cursors)
    if metadata.batch_max is None:
        assert counted.sizes == [300]
    else:
        assert sum(counted.sizes) == 300 and max(counted.sizes) <= metadata.batch_max
        assert len(counted.sizes) == -(-300 // metadata.batch_max)
    assert all(stored(metadata, key) == cursor for key, cursor in cursors.items())
    CursorStore(counted).delete(cursors)
    assert metadata.list("/holdfast/subscriptions/") == {}


def test_what_was_saved_before_a_failure_half_way_is_saved_and_the_rest_is_tried_again():
    with open_metadata("memory:") as inner:
        counted = Counted(inner, batch_max=2)
        cursors = {named_cursor_key(S, f"s{n}"): Cursor(n, epoch=1) for n in range(4)}
        store, real = CursorStore(counted), counted.transact

        def fails_after_one(changes: Any, preconditions: Any = None) -> Any:
            if counted.sizes:
                raise StoreError("gone")
            return real(changes, preconditions)

        counted.transact = fails_after_one
        with pytest.raises(StoreError):
            store.save(cursors, 0.0)
        assert len(inner.list("/holdfast/")) == 2
        counted.transact = real
        assert store.save(cursors, 0.0) == set(cursors)
        assert all(stored(inner, key) == cursor for key, cursor in cursors.items())


# -- deleted ---------------------------------------------------------------------------------------------


def test_a_subscription_another_process_deleted_stays_deleted(metadata):
    mine, theirs = CursorStore(metadata), CursorStore(metadata)
    other = named_cursor_key(S, "other")
    mine.save({KEY: Cursor(5, epoch=1), other: Cursor(1, epoch=1)}, 0.0)
    theirs.delete([KEY])
    assert mine.save({KEY: Cursor(6, epoch=1), other: Cursor(2, epoch=1)}, 0.0) == {KEY, other}
    assert stored(metadata) is None and stored(metadata, other).offset == 2


def test_deleting_what_is_not_there_is_harmless(metadata):
    CursorStore(metadata).delete([KEY])
    CursorStore(metadata).delete([])


def test_a_deleted_subscription_made_anew_starts_anew(store):
    store.save({KEY: Cursor(50, epoch=9)}, 0.0)
    store.delete([KEY])
    store.create({KEY: Cursor(7, epoch=1)}, 0.0)
    assert store.load(KEY) == Cursor(7, epoch=1)
    assert store.save({KEY: Cursor(8, epoch=1)}, 0.0) == {KEY}
    assert store.load(KEY) == Cursor(8, epoch=1)


# -- unreadable ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [b"", b"{", b"[]", b'{"offset": -2, "updated_at": 0}', b'{"updated_at": 1}', b"\xff"])
def test_an_unreadable_cursor_is_an_error_that_names_its_key(metadata, value):
    metadata.put(KEY, value)
    with pytest.raises(RequestError) as caught:
        CursorStore(metadata).load(KEY)
    assert f"the cursor at {KEY} cannot be read" in str(caught.value)


def test_an_unreadable_cursor_that_appears_under_our_hands_is_not_written_over(store):
    store.save({KEY: Cursor(5, epoch=1)}, 0.0)
    store._metadata.put(KEY, b"damaged")
    assert store.save({KEY: Cursor(6, epoch=1)}, 0.0) == {KEY}
    assert store._metadata.get(KEY).value == b"damaged"
