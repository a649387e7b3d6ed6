"""What the simulated node does now and then: its lease, the store's clock, and sessions that nobody is connected for.

As in `runtime.node_lease` and `runtime.sweep`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from holdfast.sessions.sweep import EndedLeases, SweepSettings, UnheldRows, buried_before, due_writes, orphan_writes
from holdfast.sessions.table import RowWrite
from holdfast.sim.front.disk import StoreDown
from holdfast.sim.front.world import Work

if TYPE_CHECKING:
    from holdfast.sim.front.node import SimFront

RENEW_SECONDS = 0.3
AGAIN_SECONDS = 0.1
DUE_SECONDS = 0.1
LOOK_SECONDS = 0.2


class SimUpkeep:
    def __init__(self, front: SimFront, settings: SweepSettings):
        self.front, self.world, self.rows, self.table = front, front.world, front.rows, front.disk.table
        self.sessions, self.node, self._settings = front.sessions, front.sessions.node, settings
        self._ended, self._unheld = EndedLeases(settings), UnheldRows(settings)

    def begin(self) -> Work:
        """What time it is, and a lease: before anything is served."""
        if not self.front.disk.shared:
            self.table.revoke(self.table.alive())  # whoever had one on a store of our own is surely dead
        while not (self.node.clock.known and self.node.lease is not None):
            try:
                yield from self._look()
                if self.node.clock.known:
                    yield from self._open()
            except StoreDown:
                yield AGAIN_SECONDS

    # -- the lease -----------------------------------------------------------------------------------------

    def keep_lease(self) -> Work:
        pause = RENEW_SECONDS
        while True:
            yield pause
            try:
                yield from self._open() if self.node.lease is None else self._renew(self.node.lease)
                pause = RENEW_SECONDS
            except StoreDown:
                pause = AGAIN_SECONDS

    def _open(self) -> Work:
        asked_at = self.world.now
        lease = yield from self.rows.call(lambda: self.table.grant(self.node.settings.lease_secs))
        self.sessions.granted(lease, asked_at)

    def _renew(self, lease: int) -> Work:
        asked_at = self.world.now
        renewed = yield from self.rows.call(lambda: self.table.renew(lease, self.node.settings.lease_secs))
        if renewed:
            self.sessions.renewed(asked_at)
        else:
            self.sessions.lost()
            raise StoreDown("the lease has ended")

    def end_lease(self) -> Work:
        """Give it back: what names it may be taken at once."""
        lease = self.node.lease
        if lease is not None:
            try:
                yield from self.rows.call(lambda: self.table.revoke([lease]))
            except StoreDown:
                self.world.tell("node", "cannot give its lease back")

    # -- the sweep -----------------------------------------------------------------------------------------

    def sweep(self) -> Work:
        look_at = rare_at = 0.0
        while True:
            yield DUE_SECONDS
            try:
                now = self.world.now
                if now >= look_at:
                    look_at = now + LOOK_SECONDS
                    yield from self._look()
                yield from self._sweep_due()
                yield from self._sweep_orphans()
                if now >= rare_at:
                    rare_at = now + self._settings.unheld_secs
                    yield from self._sweep_unheld()
                    before = buried_before(self._time(), self._settings)
                    yield from self.rows.call(lambda before=before: self.table.bury(before))  # type: ignore[misc]
            except StoreDown:
                self.world.tell("node", "cannot look after sessions just now")

    def _time(self) -> float:
        return self.node.clock.time(self.world.now)

    def _look(self) -> Work:
        asked_at = self.world.now
        store_time = yield from self.rows.call(lambda: self.table.time)
        self.node.clock.heard(store_time, asked_at, self.world.now)
        counts = yield from self.rows.call(self.table.filters)
        self.front.delivery.filters_changed(counts, whole=True)

    def _sweep_due(self) -> Work:
        now = self._time()
        rows = yield from self.rows.call(lambda: self.table.due(now))
        yield from self._write(due_writes(rows, self.sessions.held(), now, self.node.filters_of))

    def _sweep_orphans(self) -> Work:
        named = yield from self.rows.call(self.table.named)
        alive = yield from self.rows.call(self.table.alive)
        for lease in self._ended.over(named, alive, self.world.now):
            rows = yield from self.rows.call(lambda lease=lease: self.table.of_lease(lease))  # type: ignore[misc]
            held, waited = self.sessions.held(), self._settings.grace_secs
            yield from self._write(orphan_writes(rows, held, self._time(), waited, self.node.filters_of))

    def _sweep_unheld(self) -> Work:
        lease = self.node.lease
        if lease is not None:
            rows = yield from self.rows.call(lambda: self.table.of_lease(lease))
            yield from self._write(self._unheld.page(rows, self.sessions.held(), self._time(), self.node.filters_of))
        self._unheld.finish()

    def _write(self, writes: list[RowWrite]) -> Work:
        if writes:
            yield from self.rows.call(lambda: self.table.write([(write, None) for write in writes]))
