"""The table of rows and the leases, and the way to them: calls fail, are late, or are never heard of again."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, TypeVar

import msgspec

from holdfast.sessions.table import RowWrite, SessionRow, Verdict
from holdfast.sim.front.world import World
from holdfast.sim.life.faults import LATE_SECONDS, LifeFaults

if TYPE_CHECKING:
    from holdfast.sim.life.checkers import Truth
    from holdfast.sim.life.node import SimNode

T = TypeVar("T")

EPOCH_OF_TIME = 1_000_000.0
TIMEOUT_SECONDS = 0.6
"""After this long a node stops waiting for an answer."""
JUMP_SECONDS = 7200.0


class SimTable:
    """Rows, leases and the store's clock."""

    def __init__(self, world: World, faults: LifeFaults):
        self.world, self.faults = world, faults
        self.rows: dict[str, SessionRow] = {}
        self.leases: dict[int, float] = {}
        """When each ends; an ended lease never comes back."""
        self._epochs = self._leases = 0
        self.truth: Truth
        self.outage_until = -1.0
        self.jump = 0.0
        self.cut: set[frozenset[str]] = set()
        """Pairs of nodes (or a node and `store`) that do not hear each other."""
        self.holding: Callable[[SimNode, Sequence[RowWrite]], str | None] | None = None
        """A scenario decides how a call of a node ends: `fails`, `lost`, `late`, `unanswered`; None: well."""
        self.held_back: list[Callable[[], object]] = []
        """Late calls of a scenario, until it lets them land."""

    # -- what a store does ---------------------------------------------------------------------------------

    @property
    def true_time(self) -> float:
        return EPOCH_OF_TIME + self.world.now

    @property
    def time(self) -> float:
        return self.true_time + self.jump

    def commit(self, node: SimNode, writes: Sequence[RowWrite]) -> list[Verdict]:
        return [self._write(node, write) for write in writes]

    def _write(self, node: SimNode, write: RowWrite) -> Verdict:
        row = self.rows.get(write.row.client_id)
        if (None if row is None else (row.epoch, row.seq)) != write.expected:
            return Verdict(False, row)
        new = write.row
        if write.take:
            self._epochs += 1
            new = msgspec.structs.replace(new, epoch=self._epochs, seq=0)
        self.rows[new.client_id] = new
        self.truth.committed(node, row, new, write)
        return Verdict(True, new)

    def due(self, now: float) -> list[SessionRow]:
        return [row for row in self.rows.values() if row.due is not None and row.due <= now]

    def of_lease(self, lease: int) -> list[SessionRow]:
        return [row for row in self.rows.values() if row.lease == lease]

    def named(self) -> set[int]:
        return {row.lease for row in self.rows.values() if row.lease is not None}

    def bury(self, before: float) -> None:
        for row in [r for r in self.rows.values() if r.dead and r.left_at is not None and r.left_at < before]:
            del self.rows[row.client_id]

    def grant(self, seconds: float) -> int:
        self._leases += 1
        self.leases[self._leases] = self.world.now + seconds
        return self._leases

    def renew(self, lease: int, seconds: float) -> bool:
        if not self.lives(lease):
            return False
        self.leases[lease] = self.world.now + seconds
        return True

    def revoke(self, lease: int) -> None:
        if self.lives(lease):
            self.leases[lease] = self.world.now

    def lives(self, lease: int) -> bool:
        return self.leases[lease] > self.world.now

    # -- the way to it -------------------------------------------------------------------------------------

    def reaches(self, node: str) -> bool:
        if self.world.healing:
            return True
        return self.world.now >= self.outage_until and frozenset((node, "store")) not in self.cut

    def call(
        self,
        node: SimNode,
        work: Callable[[], T],
        answer: Callable[[T], None],
        failed: Callable[[bool], None],
        writes: Sequence[RowWrite] = (),
    ) -> None:
        """Do this in the store. `failed(in_doubt)` is told when nobody knows, or nothing was done."""
        world, faults, rng = self.world, self.faults, self.world.rng
        fate = self.holding(node, writes) if self.holding is not None else self._fate(node)
        seconds = rng.random() * faults.store_seconds
        if faults.store_slow and not world.healing and rng.random() < faults.store_slow:
            seconds = rng.random() * 3
        match fate:
            case None:
                world.after(seconds, lambda: self._do(node, work, answer, failed))
            case "fails":
                node.after(seconds, lambda: failed(False))
            case "lost":
                node.after(seconds, lambda: failed(True))
            case "unanswered":
                world.after(seconds, lambda: self._do(node, work, None, failed))
            case "late" if self.holding is not None:
                self.held_back.append(work)
                node.after(seconds, lambda: failed(True))
            case "late":
                node.after(seconds, lambda: failed(True))
                world.after(rng.random() * LATE_SECONDS, lambda: self._land(node, work))
            case _:
                raise ValueError(fate)

    def _fate(self, node: SimNode) -> str | None:
        world, faults = self.world, self.faults
        if world.healing:
            return None
        if not self.reaches(node.name):
            return "lost" if world.rng.random() < 0.3 else "fails"
        roll = world.rng.random()
        for fate, chance in (
            ("fails", faults.store_fails),
            ("lost", faults.store_lost),
            ("late", faults.store_late),
            ("unanswered", faults.store_unanswered),
        ):
            if roll < chance:
                return fate
            roll -= chance
        return None

    def _do(
        self, node: SimNode, work: Callable[[], T], answer: Callable[[T], None] | None, failed: Callable[[bool], None]
    ) -> None:
        if not self.reaches(node.name):
            node.after(TIMEOUT_SECONDS, lambda: failed(True))
            return
        done = work()
        if answer is None:
            node.after(TIMEOUT_SECONDS, lambda: failed(True))
            return
        node.after(self.world.rng.random() * self.faults.store_seconds, lambda: answer(done))

    def _land(self, node: SimNode, work: Callable[[], object]) -> None:
        """The network had kept it; its node may be dead by now."""
        if self.world.now >= self.outage_until or self.world.healing:
            self.world.tell("store", f"something of {node} lands late")
            work()
