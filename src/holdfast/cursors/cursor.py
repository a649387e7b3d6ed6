"""How far a subscription has come in one stream: exactly, not approximately.

        acknowledged          not yet    acknowledged      not yet
    ├──────────────────────┤░░░░░░░░░░├──────────────┤░░░░░░░░░░░░░░░
    0                 offset  floor    acked[0]            ...

Everything up to and including `offset` is acknowledged; `acked` holds the acknowledged ranges above it,
sorted, disjoint and never touching, as inclusive `(first, last)` pairs. A cursor only moves forward: there is
no way to take an acknowledgement back.

One surprising rule: two cursors of one stream are merged by *union*, so it never matters in which order, or
how often, the same progress arrives.
"""

from __future__ import annotations

import json
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence

from holdfast.errors import RequestError, StaleEpoch

Range = tuple[int, int]
"""Offsets from the first to the last, both included."""


class Cursor:
    """Floor, ranges above it, and the epoch of whoever moved it last."""

    __slots__ = ("_firsts", "_lasts", "epoch", "offset")

    def __init__(self, offset: int = -1, acked: Iterable[Sequence[int]] = (), epoch: int = 0):
        self.offset = offset
        """Everything up to here is acknowledged; -1 means nothing yet."""
        self.epoch = epoch
        # Two parallel lists rather than pairs, so that bisect can search each of them as it stands.
        self._firsts: list[int] = []
        self._lasts: list[int] = []
        for first, last in acked:
            self.ack_range(first, last)

    @property
    def floor(self) -> int:
        """The first offset that is not acknowledged: where reading resumes."""
        return self.offset + 1

    @property
    def acked(self) -> list[Range]:
        """The acknowledged ranges above `offset`."""
        return list(zip(self._firsts, self._lasts, strict=True))

    @property
    def top(self) -> int:
        """The highest offset acknowledged so far; -1 means none."""
        return self._lasts[-1] if self._lasts else self.offset

    def ack(self, offset: int) -> None:
        """This one offset is acknowledged."""
        if offset == self.offset + 1 and not self._firsts:
            self.offset = offset
        else:
            self.ack_range(offset, offset)

    def ack_range(self, first: int, last: int) -> None:
        """Every offset from `first` to `last`, both included, is acknowledged."""
        if last < first:
            raise RequestError(f"range {first}..{last} ends before it begins")
        if last <= self.offset:
            return
        firsts, lasts = self._firsts, self._lasts
        # Every stored range that overlaps or touches [first, last] melts into it.
        low = bisect_left(lasts, first - 1)
        high = bisect_right(firsts, last + 1)
        if low < high:
            first, last = min(first, firsts[low]), max(last, lasts[high - 1])
        if first <= self.offset + 1:
            self.offset = last
            del firsts[:high], lasts[:high]
        else:
            firsts[low:high], lasts[low:high] = [first], [last]

    def ack_many(self, offsets: Iterable[int]) -> None:
        """Offsets in ascending order; a run of neighbours costs one range, however long it is."""
        if isinstance(offsets, range) and offsets.step == 1:
            if offsets:
                self.ack_range(offsets[0], offsets[-1])
            return
        first, expected = 0, -1
        for offset in offsets:
            if offset == expected:
                expected += 1
                continue
            if expected > first:
                self.ack_range(first, expected - 1)
            first, expected = offset, offset + 1
        if expected > first:
            self.ack_range(first, expected - 1)

    def is_acked(self, offset: int) -> bool:
        if offset <= self.offset:
            return True
        at = bisect_left(self._lasts, offset)
        return at < len(self._lasts) and self._firsts[at] <= offset

    def unacked(self, first: int, past: int) -> list[Range]:
        """What is not acknowledged in `first <= offset < past`, as ranges."""
        gaps: list[Range] = []
        at = max(first, self.offset + 1)
        for index in range(bisect_left(self._lasts, at), len(self._lasts)):
            start = self._firsts[index]
            if start >= past:
                break
            if start > at:
                gaps.append((at, start - 1))
            at = self._lasts[index] + 1
        if at < past:
            gaps.append((at, past - 1))
        return gaps

    def unacked_count(self, past: int) -> int:
        """How many offsets below `past` are not acknowledged: the lag, in messages."""
        return sum(last - first + 1 for first, last in self.unacked(0, past))

    def merge(self, other: Cursor) -> None:
        """Acknowledge whatever either has acknowledged. Says nothing about epochs."""
        if other.offset >= 0:
            self.ack_range(0, other.offset)
        for first, last in zip(other._firsts, other._lasts, strict=True):
            self.ack_range(first, last)

    def advance(self, new: Cursor) -> None:
        """Take over the progress of `new` and its epoch; a holder from an older epoch is refused."""
        if new.epoch < self.epoch:
            raise StaleEpoch(f"progress under epoch {new.epoch} is refused: epoch {self.epoch} owns this cursor")
        self.merge(new)
        self.epoch = new.epoch

    def covers(self, other: Cursor) -> bool:
        """Is everything `other` acknowledges acknowledged here too?"""
        if other.offset >= 0 and self.unacked(0, other.offset + 1):
            return False
        return not any(self.unacked(first, last + 1) for first, last in other.acked)

    def copy(self) -> Cursor:
        twin = Cursor(self.offset, epoch=self.epoch)
        twin._firsts, twin._lasts = self._firsts[:], self._lasts[:]
        return twin

    def to_json(self, now_seconds: float) -> bytes:
        """The stored form. `updated_at` is for people; nothing decides by it."""
        value = {
            "offset": self.offset,
            "updated_at": int(now_seconds),
            "acked": self.acked,
            "epoch": self.epoch,
        }
        return json.dumps(value).encode()

    @classmethod
    def from_json(cls, data: bytes | str) -> Cursor:
        """The inverse of `to_json`; also takes the plain `{"offset": .., "updated_at": ..}` of seed 002.

        Fields that are not known here are passed over, so that a later version may add some.
        """
        try:
            value = json.loads(data)
        except (ValueError, RecursionError) as error:
            raise RequestError(f"cursor {_show(data)} is not JSON: {error}") from error
        if not isinstance(value, dict):
            raise RequestError(f"cursor {_show(data)} is not a JSON object")
        offset = _whole(value, "offset", least=-1)
        _whole(value, "updated_at", least=0)
        epoch = _whole(value, "epoch", least=0, default=0)
        cursor = cls(offset, epoch=epoch)
        before = offset
        for first, last in _ranges(value.get("acked", [])):
            if not before < first <= last:
                raise RequestError(f"cursor: acked range [{first}, {last}] is not in order above {before}")
            cursor.ack_range(first, last)
            before = last
        return cursor

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Cursor):
            return NotImplemented
        return (self.offset, self.epoch, self._firsts, self._lasts) == (
            other.offset,
            other.epoch,
            other._firsts,
            other._lasts,
        )

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        above = "".join(f" +{first}..{last}" for first, last in self.acked)
        return f"<{self.offset}{above} e{self.epoch}>"


def _whole(value: dict[str, object], name: str, *, least: int, default: int | None = None) -> int:
    got = value.get(name, default)
    if got is None:
        raise RequestError(f"cursor has no {name!r}")
    if not isinstance(got, int) or isinstance(got, bool) or got < least:
        raise RequestError(f"cursor: {name} is {got!r}; it takes a whole number from {least}")
    return got


def _ranges(value: object) -> list[Range]:
    if not isinstance(value, list):
        raise RequestError(f"cursor: acked is {value!r}; it takes a list of [first, last] pairs")
    pairs: list[Range] = []
    for pair in value:
        match pair:
            case [int(first), int(last)] if not isinstance(first, bool) and not isinstance(last, bool):
                pairs.append((first, last))
            case _:
                raise RequestError(f"cursor: acked holds {pair!r}; it takes pairs of whole numbers")
    return pairs


def _show(data: bytes | str) -> str:
    return repr(data if len(data) <= 80 else data[:80])
