"""A filtered read finds everything that matches, and looks into few blocks of others."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import pytest

import holdfast
from holdfast import Batch, Log, Stream
from holdfast.log import blocks, plan
from holdfast.log.retention import maintain
from holdfast.topics import AnyOf, TopicFilter, any_of

ONE = Stream("one", 0, 1)


@pytest.fixture(params=["memory", "sqlite"])
def log(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Log]:
    url = "memory:" if request.param == "memory" else f"sqlite:///{tmp_path}/log.db"
    with holdfast.open(url) as log:
        log.create("one", shards=1)
        yield log


def others(log: Log, count: int, rows: int = 100) -> None:
    for block in range(count):
        log.append("one", Batch([f"v/{block}/{row}" for row in range(rows)], [b"1"] * rows))


def found(log: Log, wanted: str | AnyOf | TopicFilter, offset: int = 0) -> tuple[list[int], int]:
    """Offsets, and how many blocks were looked into."""
    offsets, looked = [], 0
    while offset < log.head(ONE).next_offset:
        reading = log.read(ONE, offset, topics=wanted)
        offsets += [at for chunk in reading.chunks for at in chunk.offsets()]
        looked += reading.blocks_read
        offset = reading.next_offset
    return offsets, looked


@pytest.mark.parametrize("topics", ["cmd/7", "cmd/7/#", "cmd/+/7", "v/1234/#", "v/3"])
def test_nothing_is_looked_into_where_nothing_can_match(log: Log, topics: str) -> None:
    others(log, 10)
    assert found(log, topics) == ([], 0)


@pytest.mark.parametrize("topics", ["v/5/#", "v/5/+", "+/5/7"])
def test_what_is_not_indexed_yet_is_found_in_the_block_that_has_it(log: Log, topics: str) -> None:
    others(log, 12)
    offsets, looked = found(log, topics)
    assert offsets == ([507] if topics == "+/5/7" else list(range(500, 600)))
    assert looked == 1
    others(log, 3)  # who comes later finds them again, and the new ones
    log.append("one", Batch(["v/5", "v/5/7"], [b"1", b"1"]))
    more, looked = found(log, topics)
    assert [at for at in more if at < 1500] == offsets
    assert [at - 1500 for at in more if at >= 1500] == ([0, 1] if topics == "v/5/#" else [1])
    assert looked == 2


def test_a_topic_and_what_is_below_it(log: Log) -> None:
    topics = ["a", "a/b", "a/b/c", "a/bc", "ab", "/", "$a/b"]
    for topic in topics:
        others(log, 1)
        log.append("one", Batch([topic], [b"1"]))
    everything = [(at + 1) * 101 - 1 for at in range(len(topics))]
    for text in ("a/#", "a/b/#", "a/+", "a/+/", "+/", "+/b/#", "/#", "+/#", "$a/#", "a"):
        wanted = TopicFilter(text)
        expected = [at for at, topic in zip(everything, topics, strict=True) if wanted.matches(topic)]
        assert [at for at in found(log, text)[0] if at in everything] == expected, text


@pytest.mark.parametrize("seed", range(15))
def test_every_filter_finds_what_a_plain_look_at_everything_finds(
    log: Log, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With little room for what is not indexed yet, while blocks are added, merged and indexed."""
    chance = random.Random(seed)
    monkeypatch.setattr(plan, "_TAIL_POSTINGS_MAX", chance.choice([3, 40, 1000]))
    monkeypatch.setattr(plan, "_POSTINGS_MAX", chance.choice([1, 10_000]))
    names = [f"{a}/{b}/{c}" for a in "vw" for b in range(12) for c in "xy"] + ["v", "v/1", "v/11", "$s/1"]
    written: list[str] = []
    for _ in range(6):
        for _ in range(chance.randrange(1, 25)):
            some = [chance.choice(names) for _ in range(chance.choice([1, 3, 30, 1000]))]
            log.append("one", Batch(some, [b"1"] * len(some)))
            written += some
        if chance.random() < 0.5:
            maintain(log)
        for _ in range(8):
            texts = ["v/1/#", "v/11/x", "v/+/y", "w/3/+", "#", "v", "+", "v/1", "$s/#", "none/#", "v/1/x"]
            wanted = any_of(chance.sample(texts, chance.choice([1, 1, 2, 7])))
            at = chance.randrange(len(written))
            expected = [n for n in range(at, len(written)) if wanted.matches(written[n])]
            assert found(log, wanted, at)[0] == expected, wanted.text


@pytest.mark.parametrize("texts", [["a/+"], ["a/b"], ["#"], ["+/c", "$x/#"], ["a/#", "b"], list("abcdefg")])
def test_rows_match_by_their_topics_whatever_way_is_taken(texts: list[str]) -> None:
    topics = ["a", "a/b", "a/c", "ab", "$x/y", "b", "b/c", "a/b"]
    batch = blocks.record_batch(Batch(topics, [b""] * len(topics)), 1)[0]
    wanted = any_of(texts)
    rows = blocks.matching_rows(batch, wanted)
    expected = [at for at, topic in enumerate(topics) if wanted.matches(topic)]
    assert (list(range(len(topics))) if rows is None else rows.to_pylist()) == expected
    assert wanted.matching(topics) == expected
