"""The store's clock as a node believes it: it follows the answers it hears, but neither jumps nor goes back.

A store's clock may be set wrong for a while, and an answer may be handled long after it was given. So what a node
believes runs at most 1% faster or slower than its own monotonic clock, and an answer that was under way for longer than
the margin is not believed. Only the first answer is believed as it is.
"""

from __future__ import annotations

FASTEST = 1.01
SLOWEST = 0.99
"""A clock that falls behind writes that clients left before they did, and their sessions would end early elsewhere."""


class StoreClock:
    """One per node; its host asks the store every second or so."""

    __slots__ = ("_at", "_offset", "_time", "margin_secs")

    def __init__(self, margin_secs: float = 0.5):
        self.margin_secs = margin_secs
        self._at = self._time = 0.0
        self._offset: float | None = None
        """What the store's clock is ahead of ours; None: nobody has said anything yet."""

    @property
    def known(self) -> bool:
        """Something was believed: before that no session may be decided about."""
        return self._offset is not None

    def heard(self, store_time: float, asked_at: float, now: float) -> bool:
        """The store's clock, asked for at `asked_at` and handled `now`; whether it is believed."""
        if now - asked_at > self.margin_secs:
            return False
        answered_at = (asked_at + now) / 2
        self._time = store_time + now - answered_at if self._offset is None else self.time(now)
        self._at, self._offset = now, store_time - answered_at
        return True

    def time(self, now: float) -> float:
        """The store's time, when our own monotonic clock says `now`."""
        if self._offset is None:
            return 0.0
        passed = now - self._at
        wanted = now + self._offset
        return max(self._time + SLOWEST * passed, min(wanted, self._time + FASTEST * passed))
