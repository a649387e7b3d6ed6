"""Small blocks are written by hand: what Arrow makes of the same rows is the measure."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import holdfast
from holdfast import Batch, Log, RequestError, Stream
from holdfast.log import blocks, small

WORDS = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
MICROS = st.integers(-(2**63), 2**63 - 1)


@st.composite
def batches(draw: Callable[..., Any]) -> Batch:
    count = draw(st.integers(1, 70))

    def column(value: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
        return st.lists(value, min_size=count, max_size=count)

    return Batch(
        topics=draw(column(WORDS)),
        payloads=draw(column(st.binary(max_size=20))),
        publishers=draw(WORDS | column(st.sampled_from(["", "v1", "v2"]))),
        flags=draw(st.integers(0, 255) | column(st.integers(0, 255))),
        properties=draw(st.none() | column(st.none() | st.binary(max_size=9)) | column(st.binary(max_size=9))),
        times=draw(st.none() | MICROS | column(MICROS)),
    )


@given(batches())
def test_the_bytes_are_those_that_arrow_writes(rows: Batch) -> None:
    data, oldest, newest = small.encode(rows, 1_763_000_000_000_000)
    batch, *times = blocks.record_batch(rows, 1_763_000_000_000_000)
    assert data == bytes(blocks.encode(batch))
    assert [oldest, newest] == times
    found = blocks.decode(data)
    found.validate(full=True)
    assert found.equals(batch)


OTHER_KINDS: dict[str, tuple[str, Callable[[int], Any]]] = {
    "memoryview": ("payloads", lambda n: [memoryview(b"payload")] * n),
    "bytearray": ("payloads", lambda n: [bytearray(b"payload")] * n),
    "text": ("payloads", lambda n: ["payload"] * n),
    "numpy flags": ("flags", lambda n: np.full(n, 2)),
    "numpy times": ("times", lambda n: np.arange(n)),
    "short numpy times": ("times", lambda n: np.full(n, 7, np.int32)),
    "properties": ("properties", lambda n: [memoryview(b"p")] * n),
}


@pytest.fixture(params=["memory:", "sqlite", "postgres"])
def log(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Log]:
    url = request.param
    if url == "sqlite":
        url = f"sqlite:///{tmp_path}/store.db"
    elif url == "postgres":
        url = request.getfixturevalue("postgres_url")
    with holdfast.open(url) as opened:
        opened.create("messages", shards=1)
        yield opened


@pytest.mark.parametrize("count", [1, small.FEW, small.FEW + 1])
@pytest.mark.parametrize("kind", OTHER_KINDS)
def test_a_column_of_another_kind_is_stored_whatever_its_length(log: Log, kind: str, count: int) -> None:
    column, make = OTHER_KINDS[kind]
    rows = Batch(**{"topics": ["a"] * count, "payloads": [b"payload"] * count, "publishers": "v", column: make(count)})
    expected, oldest, newest = blocks.record_batch(rows, 0)
    names = ["topic", "payload", "flags", "properties"] + (["time"] if rows.times is not None else [])
    stream = Stream("messages", 0, 1)
    for _ in range(2):
        log.append("messages", rows)
    assert [chunk.batch.select(names) for chunk in log.read(stream, 0).chunks] == 2 * [expected.select(names)]
    head = log.head(stream)
    assert type(head.oldest) is int and type(head.newest) is int
    if rows.times is not None:
        assert (head.oldest, head.newest) == (oldest, newest)


@pytest.mark.parametrize("count", [1, small.FEW, small.FEW + 1])
@pytest.mark.parametrize(
    ("column", "value"),
    [
        ("flags", 256),
        ("flags", -1),
        ("payloads", 7),
        ("payloads", np.zeros(3, np.uint8)),
        ("times", 2**63),
        ("publishers", "\ud800"),
        ("properties", 0),
        ("properties", []),
    ],
    ids=str,
)
def test_a_value_that_cannot_be_stored_is_refused_whatever_the_size(column: str, value: object, count: int) -> None:
    good: dict[str, Any] = {"topics": ["a"] * count, "payloads": [b"p"] * count}
    with holdfast.open("memory:") as log:
        log.create("messages", shards=1)
        with pytest.raises(RequestError):
            log.append("messages", Batch(**{**good, column: [value] * count}))
        assert log.head(Stream("messages", 0, 1)).next_offset == 0


@pytest.mark.parametrize("column", ["payloads", "publishers", "flags", "properties", "times"])
@pytest.mark.parametrize("length", [0, 1, 4])
def test_columns_of_unequal_length_are_refused(column: str, length: int) -> None:
    """By whoever writes blocks, since a host that sorts its rows by shard does not have them checked before."""
    values = {"payloads": b"p", "publishers": "v", "flags": 1, "properties": b"q", "times": 7}
    rows = Batch(**{"topics": ["a"] * 3, "payloads": [b"p"] * 3, column: [values[column]] * length})
    with holdfast.open("memory:") as log:
        log.create("messages", shards=1)
        with pytest.raises(RequestError):
            log.append_sharded("messages", 1, {0: rows})
        assert log.head(Stream("messages", 0, 1)).next_offset == 0
