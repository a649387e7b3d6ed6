"""Reads single messages by their offsets, a run of neighbours at a time, from the store or else from the lake."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from holdfast.errors import UnknownStream
from holdfast.log import Log
from holdfast.log.contract import Reading
from holdfast.log.history import History
from holdfast.model import Stream
from holdfast.runtime.block_rows import rows_of
from holdfast.sessions.rows import Rows

GAP_MAX = 64
"""Offsets this near to each other are fetched in one read, and what lies between is left."""

RUN_MAX = 4096


class Found(NamedTuple):
    """Where a message is: its row among rows."""

    rows: Rows
    row: int


def runs(offsets: Sequence[int]) -> Iterator[list[int]]:
    """Offsets in ascending order, cut wherever one is far from the one before."""
    run: list[int] = []
    for offset in offsets:
        if run and (offset - run[-1] > GAP_MAX or len(run) >= RUN_MAX):
            yield run
            run = []
        run.append(offset)
    if run:
        yield run


def read_offsets(
    log: Log, history: History, stream: Stream, offsets: Sequence[int], bytes_max: int
) -> tuple[dict[int, Found], list[int]]:
    """The messages at these offsets, up to so many bytes (one at least); and those of them that are gone for good.

    Offsets that appear in neither were not reached: there was no room for them.
    """
    found: dict[int, Found] = {}
    gone: list[int] = []
    room = bytes_max
    for run in runs(sorted(offsets)):
        left = run
        while left:
            if room <= 0:
                return found, gone
            reading = _read(log, history, stream, left[0], left[-1] + 1, room)
            past = left[-1] + 1 if reading is None else max(reading.next_offset, left[0] + 1)
            wanted = {offset for offset in left if offset < past}
            for chunk in reading.chunks if reading is not None else ():
                rows = rows_of(chunk)
                room -= rows.weight * len(rows.topics)
                found.update((o, Found(rows, at)) for at, o in enumerate(rows.offsets) if o in wanted)
            gone += sorted(wanted - found.keys())
            left = [offset for offset in left if offset >= past]
    return found, gone


def _read(log: Log, history: History, stream: Stream, first: int, past: int, bytes_max: int) -> Reading | None:
    """None: the stream is neither in the store nor in the lake."""
    try:
        return log.read(stream, first, rows_max=past - first, bytes_max=bytes_max, until=past, on_corrupt="skip")
    except UnknownStream:
        pass
    try:
        return history.read(stream, first, rows_max=past - first, bytes_max=bytes_max)
    except UnknownStream:
        return None
