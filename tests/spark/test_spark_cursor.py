"""A streaming query's cursor is saved as everybody's is: forward only, beside others, and not after it was deleted."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from holdfast.cursors import Cursor
from holdfast.keys import named_cursor_key, progress_key, session_cursor_key
from holdfast.metadata import Metadata
from holdfast.model import Stream
from holdfast.spark.cursor import SavedCursor
from holdfast.spark.offsets import Place
from holdfast.store import open_metadata

A, B = Stream("messages", 0, 1), Stream("messages", 1, 1)


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f"sqlite:///{tmp_path}/store.db"


@pytest.fixture
def metadata(url: str) -> Iterator[Metadata]:
    with open_metadata(url) as opened:
        yield opened


def stored(metadata: Metadata, stream: Stream) -> Cursor | None:
    entry = metadata.get(named_cursor_key(stream, "billing"))
    return None if entry is None else Cursor.from_json(entry.value)


def test_it_goes_on_where_it_left_off(url: str, metadata: Metadata) -> None:
    with closing(SavedCursor(url, "messages", "billing")) as cursor:
        assert cursor.load() is None
        cursor.save(Place(0, {(1, 0): 5, (1, 1): 0}), at_once=True)
    assert (stored(metadata, A), stored(metadata, B)) == (Cursor(4), None)
    with closing(SavedCursor(url, "messages", "billing")) as again:
        assert again.load() == Place(0, {(1, 0): 5})


def test_what_others_have_gained_is_kept_and_nothing_goes_back(url: str, metadata: Metadata) -> None:
    with (
        closing(SavedCursor(url, "messages", "billing")) as one,
        closing(SavedCursor(url, "messages", "billing")) as other,
    ):
        one.save(Place(0, {(1, 0): 5}), at_once=True)
        other.load()
        other.save(Place(0, {(1, 0): 9, (1, 1): 3}), at_once=True)
        one.save(Place(0, {(1, 0): 7, (1, 1): 2}), at_once=True)
    assert (stored(metadata, A), stored(metadata, B)) == (Cursor(8), Cursor(2))


def test_ranges_above_stay_and_other_subscriptions_are_not_looked_at(url: str, metadata: Metadata) -> None:
    metadata.put(named_cursor_key(A, "billing"), Cursor(1, [(8, 9)]).to_json(0.0))
    for key in (session_cursor_key(A, "billing", "x"), progress_key(("billing", "x"), A), named_cursor_key(A, "b")):
        metadata.put(key, b"damaged")
    with closing(SavedCursor(url, "messages", "billing")) as cursor:
        assert cursor.load() == Place(0, {(1, 0): 2})
        cursor.save(Place(0, {(1, 0): 5}), at_once=True)
    assert stored(metadata, A) == Cursor(4, [(8, 9)])


def test_what_was_deleted_with_its_stream_does_not_come_back(url: str, metadata: Metadata) -> None:
    with closing(SavedCursor(url, "messages", "billing")) as cursor:
        cursor.save(Place(0, {(1, 0): 5, (1, 1): 5}), at_once=True)
        metadata.delete(named_cursor_key(A, "billing"))
        cursor.save(Place(0, {(1, 0): 6, (1, 1): 6}), at_once=True)
    assert (stored(metadata, A), stored(metadata, B)) == (None, Cursor(5))


def test_finished_generations_leave_nothing_behind(url: str, metadata: Metadata) -> None:
    with closing(SavedCursor(url, "messages", "billing")) as cursor:
        cursor.save(Place(0, {(1, 0): 5}), at_once=True)
        cursor.save(Place(1, {(2, 0): 1}), at_once=True)
        assert stored(metadata, A) is None
        assert cursor.load() == Place(1, {(2, 0): 1})
