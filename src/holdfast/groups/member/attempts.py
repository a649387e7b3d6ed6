"""How often each unacknowledged message of one loan was delivered, and when that has been too often.

    delivered --T without ack--> Redeliver --...--> delivered N times in vain --> Park

The counts travel with progress, so a message that kills every member it meets is parked after N attempts of
the group, not of one member. Both halves are off unless the group's policy switches them on.
"""

from __future__ import annotations

from collections.abc import Iterable
from math import inf

from holdfast.cursors import Cursor
from holdfast.groups.protocol.effects import MemberEffect, Park, Redeliver
from holdfast.groups.protocol.nouns import Loan, Policy


class Attempts:
    """Deliveries of one loan that are not acknowledged yet."""

    __slots__ = ("_counts", "_parked", "_policy", "_sent")

    def __init__(self, policy: Policy, before: Iterable[tuple[int, int]]):
        self._policy = policy
        self._counts = dict(before)
        self._parked: set[int] = set()
        # In order of sending, so that the first is the first to be late.
        self._sent: dict[int, float] = {}

    @property
    def deadline(self) -> float:
        timeout = self._policy.ack_timeout_seconds
        if timeout is None or not self._sent:
            return inf
        return next(iter(self._sent.values())) + timeout

    def exhausted(self) -> tuple[int, ...]:
        """Those that were delivered in vain often enough already; each is named once."""
        most = self._policy.attempts_max
        if most is None:
            return ()
        found = tuple(sorted(o for o, times in self._counts.items() if times >= most and o not in self._parked))
        self._parked.update(found)
        return found

    def delivered(self, offsets: Iterable[int], now: float) -> None:
        for offset in offsets:
            self._counts[offset] = self._counts.get(offset, 0) + 1
            self._sent.pop(offset, None)
            self._sent[offset] = now

    def acked(self, cursor: Cursor) -> None:
        for offset in [offset for offset in self._counts if cursor.is_acked(offset)]:
            del self._counts[offset]
            self._sent.pop(offset, None)
            self._parked.discard(offset)

    def stop(self) -> None:
        """Nothing is timed any more: the loan is on its way back."""
        self._sent.clear()

    def overdue(self, loan: Loan, now: float) -> list[MemberEffect]:
        """What to do about those that were not acknowledged in time."""
        if now < self.deadline:
            return []
        timeout, most = self._policy.ack_timeout_seconds or 0.0, self._policy.attempts_max
        again: list[int] = []
        for offset, when in list(self._sent.items()):
            if now < when + timeout:
                break
            del self._sent[offset]
            if most is None or self._counts[offset] < most:
                again.append(offset)
        park = self._late(most)
        effects: list[MemberEffect] = []
        if park:
            effects.append(Park(loan, park))
        if again:
            effects.append(Redeliver(loan, tuple(sorted(again))))
        return effects

    def _late(self, most: int | None) -> tuple[int, ...]:
        # One that is still within its time has been delivered often enough, but may yet be acknowledged.
        if most is None:
            return ()
        counts, sent, parked = self._counts, self._sent, self._parked
        found = tuple(sorted(o for o, n in counts.items() if n >= most and o not in sent and o not in parked))
        parked.update(found)
        return found

    def snapshot(self) -> tuple[tuple[int, int], ...]:
        return tuple(sorted(self._counts.items()))
