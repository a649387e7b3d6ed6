"""The table of sessions on the simulated disk: rows, leases, packet ids. A will goes to the log with a row's change."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

import msgspec

from holdfast.log.contract import NotTaken, ReceivedId
from holdfast.sessions.stored import filters_of
from holdfast.sessions.table import RowWrite, SessionRow, Verdict, check_writes
from holdfast.sim.front.world import World

if TYPE_CHECKING:
    from holdfast.sim.front.checkers import Saved, Truth
    from holdfast.sim.front.disk import SimLog

EPOCH_OF_TIME = 1_000_000.0

Write = tuple[RowWrite, "Saved | None"]
"""A change, and what the checkers know of the content it brings; None: the content stays."""


class SimTable:
    """It outlives nodes; whatever is done here is done at once."""

    def __init__(self, world: World, log: SimLog):
        self.world, self._log = world, log
        self.truth: Truth
        self.rows: dict[str, SessionRow] = {}
        self.saved: dict[str, Saved] = {}
        """By client: what its row stands for."""
        self.leases: dict[int, float] = {}
        """When each ends; an ended lease never comes back."""
        self._received: dict[str, dict[tuple[str, int], int]] = {}
        self._epochs = self._leases = 0

    @property
    def time(self) -> float:
        return EPOCH_OF_TIME + self.world.now

    # -- rows ----------------------------------------------------------------------------------------------

    def write(self, writes: Sequence[Write]) -> list[Verdict]:
        check_writes([write for write, _ in writes])
        return [self._write(write, saved) for write, saved in writes]

    def _write(self, write: RowWrite, saved: Saved | None) -> Verdict:
        client_id = write.row.client_id
        old, new = self.rows.get(client_id), write.row
        if (None if old is None else (old.epoch, old.seq)) != write.expected:
            return Verdict(False, old)
        if write.take:
            self._epochs += 1
            new = msgspec.structs.replace(new, epoch=self._epochs, seq=0)
        self.rows[client_id] = new
        if saved is not None:
            self.saved[client_id] = saved
        elif not (new.subscriptions or new.cursors or new.packets):
            self.saved.pop(client_id, None)
        if write.take or new.dead:
            had = self._received.get(client_id, {})
            kept = {one: mark for one, mark in had.items() if one[0] == new.born and not new.dead}
            self._received[client_id] = kept
        self.truth.lives.committed(old, new, write)
        if write.take and new.lease is None and old is not None and old.lease is not None:
            self.truth.words_lost(client_id)  # the sweep was faster than its node
        if write.publish is not None:
            row = self.truth.will(client_id, write.publish)
            self._log.append([row], self.world.now, ours=False)
        return Verdict(True, new)

    def read(self, client_ids: Collection[str]) -> dict[str, SessionRow]:
        return {client_id: self.rows[client_id] for client_id in client_ids if client_id in self.rows}

    def due(self, now: float) -> list[SessionRow]:
        return [row for row in self.rows.values() if row.due is not None and row.due <= now]

    def of_lease(self, lease: int) -> list[SessionRow]:
        return [row for row in self.rows.values() if row.lease == lease]

    def named(self) -> set[int]:
        return {row.lease for row in self.rows.values() if row.lease is not None}

    def bury(self, before: float) -> None:
        for row in [r for r in self.rows.values() if r.dead and r.left_at is not None and r.left_at < before]:
            del self.rows[row.client_id]

    def filters(self) -> Counter[str]:
        """How many sessions subscribe to each."""
        return Counter(
            text for row in self.rows.values() if row.subscriptions for text in filters_of(row.subscriptions)
        )

    # -- packet ids of QoS 2 publishes ---------------------------------------------------------------------

    def receive(self, received: Sequence[ReceivedId]) -> None:
        """In the transaction that appends the publishes."""
        for one in received:
            self._received.setdefault(one.client_id, {})[one.born, one.packet_id] = one.mark

    def not_taken(self, received: Sequence[ReceivedId]) -> NotTaken | None:
        """Why these cannot be stored."""
        fenced = [one for one in received if self.rows[one.client_id].epoch != one.epoch]
        stored = {one: self._received.get(one.client_id, {}).get(one[1:3]) for one in received}
        repeated = {one: mark for one, mark in stored.items() if mark is not None}
        return NotTaken(fenced, {} if fenced else repeated) if fenced or repeated else None

    def received(self, client_ids: Collection[str]) -> dict[str, dict[int, int]]:
        found = {}
        for client_id in client_ids:
            born = self.rows[client_id].born
            had = self._received.get(client_id, {})
            if packet_ids := {number: mark for (life, number), mark in had.items() if life == born}:
                found[client_id] = packet_ids
        return found

    def release(self, received: Sequence[ReceivedId]) -> None:
        for one in received:
            had = self._received.get(one.client_id, {})
            if had.get((one.born, one.packet_id)) == one.mark:
                del had[one.born, one.packet_id]

    # -- leases --------------------------------------------------------------------------------------------

    def grant(self, seconds: float) -> int:
        self._leases += 1
        self.leases[self._leases] = self.world.now + seconds
        return self._leases

    def renew(self, lease: int, seconds: float) -> bool:
        if lease not in self.alive():
            return False
        self.leases[lease] = self.world.now + seconds
        return True

    def revoke(self, leases: Collection[int]) -> None:
        for lease in leases:
            self.leases[lease] = min(self.leases[lease], self.world.now)

    def alive(self) -> set[int]:
        return {lease for lease, until in self.leases.items() if until > self.world.now}
