"""Small blocks written without Arrow: the bytes Arrow would write, for a sixth of its price.

A block of one row costs Arrow as much as one of a hundred: two dozen objects are made, and its code and tables come
from memory anew after each wait for the disk. But all blocks have one schema, so their messages differ in a few
numbers only. Arrow writes one as a sample, and the numbers are filled in.

    schema | words of the topics | words of the publishers | rows | end
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from functools import cache
from itertools import accumulate

from holdfast.log import blocks
from holdfast.model import Batch, Micros

FEW = 256
"""Arrow catches up somewhere between twice and four times as many rows."""

Bytes = bytes | bytearray

_I64 = struct.Struct("<q")
_MESSAGE_LENGTH = struct.Struct("<4xi")
_END = b"\xff\xff\xff\xff\0\0\0\0"
_DICTIONARY = 2
_PADDING = [bytes(-size % 8) for size in range(8)]


class _Message:
    """A message as Arrow writes it: a table of numbers, of which some are filled in, and the buffers they tell of."""

    def __init__(self, head: bytes):
        self._head = head
        table = _Table(head, 8 + _u32(head, 8))
        self._body_at = table.at(3)
        self.body_bytes = _i64(head, self._body_at)
        content = table.follow(2)
        if head[table.at(1)] == _DICTIONARY:
            content = content.follow(1)
        self._rows_at = content.at(0)
        nodes_at, buffers_at = content.vector(1), content.vector(2)
        self._nodes = struct.Struct(f"<{2 * _u32(head, nodes_at - 4)}q"), nodes_at
        self._buffers = struct.Struct(f"<{2 * _u32(head, buffers_at - 4)}q"), buffers_at

    def write(self, rows: int, nodes: Sequence[int], buffers: Sequence[bytes]) -> list[Bytes]:
        """`nodes`: rows and nulls of each column in turn."""
        head, at = bytearray(self._head), 0
        places: list[int] = []
        parts: list[Bytes] = [head]
        for buffer in buffers:
            size = len(buffer)
            places += (at, size)
            if size:
                parts += (buffer, _PADDING[size & 7])
                at += size + (-size & 7)
        _I64.pack_into(head, self._body_at, at)
        _I64.pack_into(head, self._rows_at, rows)
        self._nodes[0].pack_into(head, self._nodes[1], *nodes)
        self._buffers[0].pack_into(head, self._buffers[1], *places)
        return parts


class _Table:
    """A table of a flat buffer: where its fields stand."""

    def __init__(self, data: bytes, start: int):
        self._data, self._start = data, start
        self._places = start - struct.unpack_from("<i", data, start)[0]

    def at(self, field: int) -> int:
        return self._start + int(struct.unpack_from("<H", self._data, self._places + 4 + 2 * field)[0])

    def follow(self, field: int) -> _Table:
        at = self.at(field)
        return _Table(self._data, at + _u32(self._data, at))

    def vector(self, field: int) -> int:
        at = self.at(field)
        return at + _u32(self._data, at) + 4


def _u32(data: bytes, at: int) -> int:
    return int(struct.unpack_from("<I", data, at)[0])


def _i64(data: bytes, at: int) -> int:
    return int(_I64.unpack_from(data, at)[0])


@cache
def _sample() -> tuple[bytes, _Message, _Message, _Message]:
    sample = bytes(blocks.encode(blocks.record_batch(Batch(["t"], [b"p"], "p", properties=[b"q"]), 1)[0]))
    at = 8 + _MESSAGE_LENGTH.unpack_from(sample)[0]
    schema = sample[:at]
    messages: list[_Message] = []
    while len(messages) < 3:
        past = at + 8 + _MESSAGE_LENGTH.unpack_from(sample, at)[0]
        messages.append(_Message(sample[at:past]))
        at = past + messages[-1].body_bytes
    topics, publishers, rows = messages
    return schema, topics, publishers, rows


def encode(rows: Batch, now: Micros) -> tuple[bytes, Micros, Micros]:
    """As `blocks.record_batch` and `blocks.encode`: the block, and its oldest and newest time.

    Raises some kind of error unless every value is of the very type its column is made of: Arrow knows what else
    can be stored, and how.
    """
    count = len(rows)
    if isinstance(rows.times, int) or rows.times is None:
        oldest = newest = now if rows.times is None else rows.times
        times = _I64.pack(oldest) * count
    else:
        _check(rows.times, count, {int})
        oldest, newest = min(rows.times), max(rows.times)
        times = struct.pack(f"<{count}q", *rows.times)
    if isinstance(rows.flags, int):
        flags = bytes([rows.flags]) * count
    else:
        _check(rows.flags, count, {int})
        flags = bytes(rows.flags)
    topic_words, topics = _words(rows.topics, count)
    if isinstance(rows.publishers, str):
        publisher_words, publishers = [rows.publishers.encode()], bytes(4 * count)
    else:
        publisher_words, publishers = _words(rows.publishers, count)
    _check(rows.payloads, count, {bytes})
    if rows.properties is None:
        nulls = count
        properties = bytes(-(-count // 8)), bytes(4 * (count + 1)), b""
    else:
        _check(rows.properties, count, {bytes, type(None)})
        nulls, valid = _nulls(rows.properties)
        properties = valid, *_joined([value or b"" for value in rows.properties])
    none = b""
    schema, topics_message, publishers_message, rows_message = _sample()
    parts: list[Bytes] = [schema]
    for message, words in ((topics_message, topic_words), (publishers_message, publisher_words)):
        parts += message.write(len(words), (len(words), 0), (none, *_joined(words)))
    parts += rows_message.write(
        count,
        (count, 0, count, 0, count, 0, count, 0, count, 0, count, nulls),
        (none, times, none, topics, none, *_joined(rows.payloads), none, publishers, none, flags, *properties),
    )
    parts.append(_END)
    return b"".join(parts), oldest, newest


def _check(column: Sequence[object], count: int, kinds: set[type]) -> None:
    if type(column) not in (list, tuple) or len(column) != count or not set(map(type, column)) <= kinds:
        raise TypeError("not for this module")


def _words(values: Sequence[str], count: int) -> tuple[list[bytes], bytes]:
    """Each word once, and which of them each row has."""
    _check(values, count, {str})
    places: dict[str, int] = {}
    codes = [places.setdefault(word, len(places)) for word in values]
    return [word.encode() for word in places], struct.pack(f"<{len(codes)}i", *codes)


def _joined(values: Sequence[bytes]) -> tuple[bytes, bytes]:
    """Where each value ends, after a zero; and the values."""
    return struct.pack(f"<{len(values) + 1}i", *accumulate(map(len, values), initial=0)), b"".join(values)


def _nulls(values: Sequence[bytes | None]) -> tuple[int, bytes]:
    """How many there are, and a bit for each value, set if it is none of them; no bits if there are no nulls."""
    nulls = sum(value is None for value in values)
    if not nulls:
        return 0, b""
    bits = bytearray(-(-len(values) // 8))
    for place, value in enumerate(values):
        if value is not None:
            bits[place >> 3] |= 1 << (place & 7)
    return nulls, bytes(bits)
