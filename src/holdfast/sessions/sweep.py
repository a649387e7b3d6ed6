"""The sweep: what any node does about rows that nobody is connected for.

Rows that are due, rows of nodes that died, rows that name this node's lease though nobody here holds them, and deleted
rows. Every change is a take (a new epoch), so whoever was faster wins, and a refusal needs no answer: whatever is still
to be done is found again. The host looks, asks here what to write, and writes it in chunks of `SWEEP_ROWS`:

    every 0.5 s    table.due(now)                 -> `due_writes`
    every 1 s      table.leases(), then the leases that live -> `EndedLeases.over`; their rows -> `orphan_writes`
    every 60 s     table.of_lease(own), page by page -> `UnheldRows.page`, and `finish` behind the last
    every 60 s     table.bury(`buried_before`)
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import NamedTuple

import msgspec

from holdfast.sessions.changes import Change, Departure, FiltersOf, left, settled, write
from holdfast.sessions.table import RowWrite, SessionRow

SWEEP_ROWS = 500

Held = Collection[str]
"""Client ids that have a machine on this node, in whatever state: it knows more than the row, and goes first."""


class SweepSettings(NamedTuple):
    """How patient the sweep is."""

    grace_secs: float = 15.0
    """How long the clients of a node that died have to come back before they count as gone."""
    unheld_secs: float = 60.0
    """How often a node looks for rows that name its lease and that it does not hold."""
    tombstone_secs: float = 300.0
    """How long a deletion is kept: longer than any transaction can be under way."""


def due_writes(rows: Iterable[SessionRow], held: Held, now: float, filters_of: FiltersOf) -> list[RowWrite]:
    """Sessions that have ended, and wills that are due. A row that is not due after all (clocks differ) is left."""
    found = [row for row in rows if row.lease is None and row.due is not None and row.due <= now]
    return [_take(row, settled(row, now), filters_of) for row in found if row.client_id not in held]


def orphan_writes(
    rows: Iterable[SessionRow], held: Held, now: float, waited_secs: float, filters_of: FiltersOf
) -> list[RowWrite]:
    """Rows of a node that has been dead for `waited_secs`: away from now on. Wills have waited as long."""
    return [_take(row, _left_behind(row, now, waited_secs), filters_of) for row in rows if row.client_id not in held]


def _take(row: SessionRow, change: Change, filters_of: FiltersOf) -> RowWrite:
    return write(row, change, take=True, filters_of=filters_of)


def _left_behind(row: SessionRow, now: float, waited_secs: float) -> Change:
    """Its expiry counts from now: only now does anybody know that the client is gone."""
    change = left(row, Departure(now), now)
    away = change.row
    if away.will_due is None:
        return change
    return settled(msgspec.structs.replace(away, will_due=max(now, away.will_due - waited_secs)), now)


def buried_before(now: float, settings: SweepSettings) -> float:
    """Deleted rows that died before this are removed for good."""
    return now - settings.tombstone_secs


class EndedLeases:
    """The leases that rows name and that have ended, and since when this node knows."""

    def __init__(self, settings: SweepSettings):
        self._settings = settings
        self.since: dict[int, float] = {}
        """By lease, on this node's monotonic clock."""

    def over(self, named: Collection[int], alive: Collection[int], now: float) -> list[int]:
        """Those seen ended for the grace. Ask for `named` first: a lease is alive before a row names it."""
        ended = set(named) - set(alive)
        self.since = {lease: self.since.get(lease, now) for lease in sorted(ended)}
        return [lease for lease, since in self.since.items() if now - since >= self._settings.grace_secs]


class UnheldRows:
    """Rows that name this node's lease and that no machine here holds: the last resort, for what went wrong.

    A row is written away only if it was there, unchanged and not held, in the look before: clients that were asked to
    go elsewhere have had that long.
    """

    def __init__(self, settings: SweepSettings):
        self._settings = settings
        self._before: dict[str, tuple[int, int]] = {}
        self._seen: dict[str, tuple[int, int]] = {}

    def page(self, rows: Iterable[SessionRow], held: Held, now: float, filters_of: FiltersOf) -> list[RowWrite]:
        """What to write of one page."""
        found = []
        for row in rows:
            if row.client_id not in held:
                self._seen[row.client_id] = row.epoch, row.seq
                if self._before.get(row.client_id) == (row.epoch, row.seq):
                    found.append(row)
        return orphan_writes(found, (), now, self._settings.unheld_secs, filters_of)

    def finish(self) -> None:
        """That was the last page of this look."""
        self._before, self._seen = self._seen, {}
