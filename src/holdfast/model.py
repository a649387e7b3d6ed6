"""The nouns everyone shares: stream, message, batch of columns, and where a reader starts."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from time import time_ns
from typing import NamedTuple, NewType, TypeVar

from holdfast.errors import RequestError

T = TypeVar("T")

Offset = NewType("Offset", int)
"""A message's place in its stream, from 0."""

Epoch = NewType("Epoch", int)
"""A fencing number that only grows."""

Micros = int
"""A point in time: microseconds since 1970, UTC."""

LOG = "messages"
"""The log that clients publish to."""

RETAIN = 0b100
"""In a message's flags: the retain bit. The two lowest bits are the QoS."""

_LOG_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")


class Stream(NamedTuple):
    """One ordered, gapless sequence of messages."""

    log: str
    shard: int
    generation: int

    def __str__(self) -> str:
        return f"{self.log}.{self.generation}.{self.shard}"

    @classmethod
    def parse(cls, text: str) -> Stream:
        """The inverse of `str(stream)`."""
        log, generation, shard = ["", "", *text.rsplit(".", 2)][-3:]
        if not (log and generation.isdecimal() and shard.isdecimal()):
            raise RequestError(f"{text!r} is not a stream; write LOG.GENERATION.SHARD, such as messages.1.0")
        return cls(log, int(shard), int(generation))


@dataclass(frozen=True, slots=True)
class Message:
    """One message, for callers that have few of them. The data path uses `Batch`."""

    topic: str
    payload: bytes = b""
    publisher: str = ""
    qos: int = 1
    retain: bool = False
    properties: bytes | None = None
    """MQTT 5 PUBLISH properties as they stand on the wire, without their length."""
    time: Micros | None = None
    """When it was accepted; the log's own clock where None."""


@dataclass(slots=True)
class Batch:
    """Messages as columns. A column that is the same throughout may be given as one value."""

    topics: Sequence[str]
    payloads: Sequence[bytes]
    publishers: Sequence[str] | str = ""
    flags: Sequence[int] | int = 1
    properties: Sequence[bytes | None] | None = None
    times: Sequence[Micros] | Micros | None = None

    def __len__(self) -> int:
        return len(self.topics)

    @classmethod
    def of(cls, messages: Iterable[Message]) -> Batch:
        rows = list(messages)
        now = None if all(m.time is None for m in rows) else now_micros()
        return cls(
            topics=[m.topic for m in rows],
            payloads=[m.payload for m in rows],
            publishers=[m.publisher for m in rows],
            flags=[m.qos | (RETAIN if m.retain else 0) for m in rows],
            properties=[m.properties for m in rows] if any(m.properties for m in rows) else None,
            times=None if now is None else [now if m.time is None else m.time for m in rows],
        )

    def take(self, rows: Sequence[int]) -> Batch:
        """Only these rows, in this order."""

        return Batch(
            topics=_pick(self.topics, rows),
            payloads=_pick(self.payloads, rows),
            publishers=self.publishers if isinstance(self.publishers, str) else _pick(self.publishers, rows),
            flags=self.flags if isinstance(self.flags, int) else _pick(self.flags, rows),
            properties=None if self.properties is None else _pick(self.properties, rows),
            times=self.times if self.times is None or isinstance(self.times, int) else _pick(self.times, rows),
        )


def _pick(column: Sequence[T], rows: Sequence[int]) -> list[T]:
    return [column[i] for i in rows]


@dataclass(frozen=True, slots=True)
class Beginning:
    """Start with the oldest message that is kept."""


@dataclass(frozen=True, slots=True)
class Next:
    """Start with the first message appended from now on (`latest`)."""


@dataclass(frozen=True, slots=True)
class Since:
    """Start with the first message whose time is at or after this one."""

    time: datetime

    @property
    def micros(self) -> Micros:
        if self.time.tzinfo is None:
            raise RequestError(f"{self.time.isoformat()} has no time zone; say which, for example ...T08:00:00Z")
        return round(self.time.timestamp() * 1_000_000)


@dataclass(frozen=True, slots=True)
class At:
    """Start at these offsets; streams that are not named start at the beginning."""

    offsets: Mapping[Stream, int] = field(default_factory=dict)
    every: int | None = None
    """One offset for every stream (`offset:N`)."""


Start = Beginning | Next | Since | At


def parse_start(text: str) -> Start:
    """`beginning`, `latest`, `offset:N`, or a time such as 2026-11-15T08:00:00Z."""
    match text.strip():
        case "beginning" | "earliest":
            return Beginning()
        case "latest" | "next":
            return Next()
        case plain:
            pass
    if plain.startswith("offset:"):
        number = plain.removeprefix("offset:")
        if number.isdecimal() and len(number) <= 18:
            return At(every=int(number))
    else:
        try:
            time = datetime.fromisoformat(plain)
        except ValueError:
            pass
        else:
            return Since(time if time.tzinfo else time.replace(tzinfo=UTC))
    raise RequestError(
        f"{text!r} is not a start position; it takes beginning, latest, offset:N, or a time like 2026-11-15T08:00:00Z"
    )


def check_log_name(log: str) -> str:
    if not _LOG_NAME.fullmatch(log):
        raise RequestError(f"{log!r} is not a log name; use letters, digits, '.', '_' and '-', at most 128")
    return log


def now_micros() -> Micros:
    """The wall clock, as messages carry it."""
    return time_ns() // 1000
