"""The store of fan-out in memory, by the world's clock, and the way to it: calls fail, are late, or are never answered.

What decides about deliveries is the store's own code; only the clock, and the log that takes what has ended, are ours.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from math import inf
from typing import TYPE_CHECKING, Any, NamedTuple

from holdfast.errors import HoldfastError, StoreError
from holdfast.fanout.nouns import Campaign
from holdfast.fanout.table import Added, Change, Merged, MergeStep, NewBatch, Verdict
from holdfast.log.contract import Landed
from holdfast.log.log import Log, Prepared
from holdfast.log.watch import Watcher
from holdfast.sessions.table import SessionRow
from holdfast.sim.fanout.faults import LATE_SECONDS, SLOW_SECONDS, FanoutFaults
from holdfast.sim.front.world import Pending, World
from holdfast.store.fanout_changes import Moves
from holdfast.store.fanout_intake import unpack_ids
from holdfast.store.memory.fanout import FanoutState, MemoryFanoutTable
from holdfast.store.memory.log import MemoryLog
from holdfast.store.memory.sessions import SessionState

if TYPE_CHECKING:
    from holdfast.sim.fanout.checkers import Truth

EPOCH_OF_TIME = 1_000_000.0
TIMEOUT_SECONDS = 0.6
"""After this long nobody waits for an answer any more."""


class Stored(NamedTuple):
    """A session, as its row has it."""

    epoch: int
    born: str
    filters: dict[str, int]
    """QoS by filter."""
    last_id: int
    present: bool


class SimTable(MemoryFanoutTable):
    """Deliveries, sessions and leases of all nodes."""

    truth: Truth

    def __init__(self, world: World):
        log = MemoryLog()
        self.rows, self.people = FanoutState(), SessionState()
        super().__init__(self.rows, self.people, log, Log(log, Watcher(), on_close=lambda: None))
        self.world = world
        self.leases: dict[int, float] = {}
        """When each ends; an ended lease never comes back."""
        self.outage_until = -inf
        """Until then nobody reaches it."""
        self.filters: dict[str, dict[str, int]] = {}
        self.last_ids: dict[str, tuple[int, int]] = {}
        """By client: the last packet id, and the epoch in which it was."""

    def now(self) -> float:
        return EPOCH_OF_TIME + self.world.now

    # -- what the checkers see -----------------------------------------------------------------------------

    def _append(self, moves: Moves) -> tuple[Prepared, list[Landed]] | None:
        return None

    def _apply(self, moves: Moves) -> None:
        self.truth.moves(moves)
        super()._apply(moves)

    def add(self, batches: Sequence[NewBatch]) -> list[Added | Exception]:
        staged = {name: [vin for row in rows for vin in self._ids(row[0])] for name, rows in self.rows.staged.items()}
        answers = super().add(batches)
        self.truth.added(batches, answers, staged)
        return answers

    def _ids(self, at: int) -> list[str]:
        return unpack_ids(self.rows.ids[at])

    def commit(self, changes: Sequence[Change]) -> list[Verdict]:
        verdicts = super().commit(changes)
        self.truth.look_at_counts()
        return verdicts

    def merge_step(self, step: MergeStep) -> Merged | None:
        done = super().merge_step(step)
        self.truth.look_at_counts()
        return done

    def change_campaign(self, changed: Campaign, epoch: int | None = None) -> bool:
        before = self.rows.campaigns.get(changed.id)
        done = super().change_campaign(changed, epoch)
        if done and before is not None:
            self.truth.campaign_changed(before, self.rows.campaigns[changed.id])
        return done

    def retry(self, campaign: int, vins: Sequence[str]) -> list[str]:
        done = super().retry(campaign, vins)
        self.truth.retried(campaign, done)
        return done

    def collect(self, before: float, payloads_before: float, keys_before: float, limit: int) -> int:
        payloads = {found.number: found for found in self.rows.payloads.values()}
        done = super().collect(before, payloads_before, keys_before, limit)
        left = {found.number for found in self.rows.payloads.values()}
        self.truth.collected([found for number, found in payloads.items() if number not in left], payloads_before)
        return done

    # -- sessions and leases -------------------------------------------------------------------------------

    def take(self, client_id: str, clean: bool, durable: bool) -> Stored:
        people = self.people
        people.epoch += 1
        row = people.rows.get(client_id)
        present = row is not None and not row.dead and row.born != "" and not clean
        born = row.born if present and row is not None else f"{client_id}.{people.epoch}" if durable else ""
        left = self.last_ids.get(client_id)
        last_id = left[1] if left is not None and row is not None and left[0] == row.epoch else 0
        people.rows[client_id] = SessionRow(client_id=client_id, epoch=people.epoch, born=born)
        if not present:
            self.filters[client_id] = {}
        self.truth.taken(client_id, people.epoch)
        return Stored(people.epoch, born, self.filters[client_id], last_id, present)

    def leave(self, client_id: str, epoch: int) -> None:
        """A session that ends with its connection."""
        row = self.people.rows.get(client_id)
        if row is not None and row.epoch == epoch:
            del self.people.rows[client_id]

    def grant(self, seconds: float) -> int:
        number = len(self.leases) + 1
        self.leases[number] = self.world.now + seconds
        return number

    def renew(self, lease: int, seconds: float) -> bool:
        if self.leases[lease] <= self.world.now:
            return False
        self.leases[lease] = self.world.now + seconds
        return True

    def alive(self) -> set[int]:
        return {lease for lease, until in self.leases.items() if until > self.world.now}


class Way:
    """From one node to the store: reads side by side, writes one after the other."""

    def __init__(self, world: World, table: SimTable, faults: FanoutFaults):
        self.world, self.table, self.faults = world, table, faults
        self._written_at = -inf

    def read(self, work: Callable[..., Any], *given: Any) -> Pending:
        return self._call(lambda: work(*given), writes=False)

    def write(self, work: Callable[..., Any], *given: Any) -> Pending:
        return self._call(lambda: work(*given), writes=True)

    def _call(self, work: Callable[[], Any], *, writes: bool) -> Pending:
        world, faults, pending = self.world, self.faults, self.world.pending()
        seconds = world.rng.random() * faults.store_seconds
        if not world.healing and world.chance(faults.store_slow):
            seconds = world.rng.random() * SLOW_SECONDS
        at = world.now + seconds
        if writes:
            at = self._written_at = max(at, self._written_at)
        fate = self._fate(writes)
        if fate == "late":
            world.after(world.rng.random() * LATE_SECONDS, lambda: self._land(work))
        if fate in ("fails", "late"):
            world.after(at - world.now, lambda: pending.fail(StoreError("the store does not answer")))
        else:
            world.after(at - world.now, lambda: self._do(work, pending, fate == "unanswered"))
        return pending

    def _fate(self, writes: bool) -> str | None:
        world, faults = self.world, self.faults
        if world.healing:
            return None
        if world.now < self.table.outage_until:
            return "fails"
        roll = world.rng.random()
        if roll < faults.store_fails:
            return "fails"
        roll -= faults.store_fails
        if writes and roll < faults.store_unanswered:
            return "unanswered"
        roll -= faults.store_unanswered
        return "late" if writes and 0 <= roll < faults.store_late else None

    def _do(self, work: Callable[[], Any], pending: Pending, unanswered: bool) -> None:
        world = self.world
        error: HoldfastError | None = None
        value = None
        try:
            value = work()
        except HoldfastError as refusal:
            error = refusal
        if unanswered:
            world.after(TIMEOUT_SECONDS, lambda: pending.fail(StoreError("nobody knows")))
            return
        seconds = world.rng.random() * self.faults.store_seconds
        if not world.healing and world.chance(self.faults.store_slow):
            seconds = world.rng.random() * SLOW_SECONDS
        world.after(seconds, lambda: pending.settle(value) if error is None else pending.fail(error))

    def _land(self, work: Callable[[], Any]) -> None:
        self.world.tell("store", "something lands late")
        with contextlib.suppress(HoldfastError):
            work()
