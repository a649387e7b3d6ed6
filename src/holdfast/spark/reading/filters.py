"""Which messages a reader wants: topic filters from its options, and what Spark's filters say besides."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql.datasource import (
    EqualTo,
    Filter,
    GreaterThan,
    GreaterThanOrEqual,
    In,
    LessThan,
    LessThanOrEqual,
    StringStartsWith,
)

from holdfast.log import blocks
from holdfast.log.contract import Head
from holdfast.topics import TopicFilter

_NUMBERS = ("time", "shard", "generation", "offset")


@dataclass(frozen=True, slots=True)
class Span:
    """Numbers from `first` to `last`, both included; None: no bound. `among`: only these."""

    first: int | None = None
    last: int | None = None
    among: frozenset[int] | None = None

    def narrowed(self, first: int | None = None, last: int | None = None, among: Iterable[int] | None = None) -> Span:
        least = max((x for x in (self.first, first) if x is not None), default=None)
        most = min((x for x in (self.last, last) if x is not None), default=None)
        some = self.among
        if among is not None:
            some = frozenset(among) if some is None else some & frozenset(among)
        return Span(least, most, some)

    @property
    def everything(self) -> bool:
        return self == Span()

    def holds(self, number: int) -> bool:
        if self.first is not None and number < self.first:
            return False
        if self.last is not None and number > self.last:
            return False
        return self.among is None or number in self.among

    def mask(self, numbers: np.typing.NDArray[np.int64]) -> np.typing.NDArray[np.bool_]:
        found = np.ones(len(numbers), bool)
        if self.first is not None:
            found &= numbers >= self.first
        if self.last is not None:
            found &= numbers <= self.last
        if self.among is not None:
            found &= np.isin(numbers, np.fromiter(self.among, np.int64))
        return found


@dataclass(frozen=True, slots=True)
class MessageFilter:
    """A message is wanted if any of the filters matches its topic, and everything else holds as well."""

    filters: tuple[str, ...] = ()
    topics: frozenset[str] | None = None
    prefixes: tuple[str, ...] = ()
    logs: frozenset[str] | None = None
    numbers: dict[str, Span] = field(default_factory=lambda: dict.fromkeys(_NUMBERS, Span()))

    def push(self, filters: Sequence[Filter]) -> tuple[MessageFilter, list[Filter]]:
        """What is wanted if these hold too, and which of them Spark must still see to."""
        wanted, left = self, []
        for each in filters:
            narrower = wanted._with(each)
            if narrower is None:
                left.append(each)
            else:
                wanted = narrower
        return wanted, left

    def _with(self, each: Filter) -> MessageFilter | None:
        match each:
            case EqualTo(attribute=("topic",), value=str(topic)):
                return self._among_topics([topic])
            case In(attribute=("topic",), value=values) if all(isinstance(v, str) for v in values):
                return self._among_topics(values)
            case StringStartsWith(attribute=("topic",), value=prefix):
                return replace(self, prefixes=(*self.prefixes, prefix))
            case EqualTo(attribute=("log",), value=str(log)):
                return replace(self, logs=frozenset([log]) & (self.logs or frozenset([log])))
            case EqualTo(attribute=(name,), value=value) if (at := _number(name, value)) is not None:
                return self._narrowed(name, among=[at])
            case In(attribute=(name,), value=values) if name in _NUMBERS:
                numbers = [_number(name, value) for value in values]
                if any(number is None for number in numbers):
                    return None
                return self._narrowed(name, among=[number for number in numbers if number is not None])
            case GreaterThan(attribute=(name,), value=value) if (at := _number(name, value)) is not None:
                return self._narrowed(name, first=at + 1)
            case GreaterThanOrEqual(attribute=(name,), value=value) if (at := _number(name, value)) is not None:
                return self._narrowed(name, first=at)
            case LessThan(attribute=(name,), value=value) if (at := _number(name, value)) is not None:
                return self._narrowed(name, last=at - 1)
            case LessThanOrEqual(attribute=(name,), value=value) if (at := _number(name, value)) is not None:
                return self._narrowed(name, last=at)
        return None

    def _among_topics(self, topics: Iterable[str]) -> MessageFilter:
        some = frozenset(topics)
        return replace(self, topics=some if self.topics is None else self.topics & some)

    def _narrowed(self, name: str, **how: Any) -> MessageFilter:
        return replace(self, numbers={**self.numbers, name: self.numbers[name].narrowed(**how)})

    def in_stream(self, head: Head) -> bool:
        """May anything in this stream be wanted?"""
        time = self.numbers["time"]
        return (
            (self.logs is None or head.stream.log in self.logs)
            and self.numbers["shard"].holds(head.stream.shard)
            and self.numbers["generation"].holds(head.stream.generation)
            and not (time.last is not None and head.oldest is not None and head.oldest > time.last)
            and not (time.first is not None and head.newest is not None and head.newest < time.first)
        )

    @property
    def index_filter(self) -> TopicFilter | None:
        """One filter that lets everything wanted through, for the log's topic index; None: no such."""
        if self.topics is not None and len(self.topics) == 1:
            (topic,) = self.topics
            if topic and "+" not in topic and "#" not in topic:
                return TopicFilter(topic)
        if len(self.filters) == 1 and self.filters[0] != "#":
            return TopicFilter(self.filters[0])
        return None

    @property
    def by_topic(self) -> bool:
        return bool(self.filters or self.prefixes or self.topics is not None)


class BlockFilter:
    """`MessageFilter`, ready to be applied to block after block."""

    def __init__(self, wanted: MessageFilter):
        self._wanted = wanted
        self._filters = [TopicFilter(text) for text in wanted.filters]
        self._times = wanted.numbers["time"]
        self._offsets = wanted.numbers["offset"]
        self.everything = not wanted.by_topic and self._times.everything and self._offsets.everything

    def rows(self, offsets: np.typing.NDArray[np.int64], batch: pa.RecordBatch) -> np.typing.NDArray[np.bool_] | None:
        """Which rows of the block are wanted; None: all of them."""
        if self.everything:
            return None
        mask = self._offsets.mask(offsets)
        if not self._times.everything:
            mask &= self._times.mask(batch.column(blocks.TIME).cast(pa.int64()).to_numpy())
        if self._wanted.by_topic:
            column = batch.column(blocks.TOPIC)
            words = np.array([self._likes(word) for word in column.dictionary.to_pylist()], bool)
            mask &= words[column.indices.to_numpy()]
        return None if mask.all() else mask

    def _likes(self, topic: str) -> bool:
        wanted = self._wanted
        return (
            (wanted.topics is None or topic in wanted.topics)
            and all(topic.startswith(prefix) for prefix in wanted.prefixes)
            and (not self._filters or any(each.matches(topic) for each in self._filters))
        )


def filtered(
    block_filter: BlockFilter, offsets: np.typing.NDArray[np.int64], batch: pa.RecordBatch
) -> tuple[np.typing.NDArray[np.int64], pa.RecordBatch]:
    mask = block_filter.rows(offsets, batch)
    if mask is None:
        return offsets, batch
    return offsets[mask], batch.take(pc.indices_nonzero(pa.array(mask)))


def _number(name: str, value: object) -> int | None:
    if name not in _NUMBERS or isinstance(value, bool):
        return None
    if name == "time":
        if not isinstance(value, datetime):
            return None
        aware = value if value.tzinfo else value.replace(tzinfo=UTC)
        delta = aware - datetime(1970, 1, 1, tzinfo=UTC)
        return (delta.days * 86_400 + delta.seconds) * 1_000_000 + delta.microseconds
    return value if isinstance(value, int) else None
