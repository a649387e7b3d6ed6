"""What a node does now and then about all sessions of the store, its own and nobody's.

every 0.5 s     rows that are due: sessions end, wills are published
every 1 s       rows of nodes that are gone; the store's clock; who is subscribed to what, anywhere
every 60 s      rows that name this node and that it does not hold; deletions that are old enough
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Collection
from concurrent.futures import ThreadPoolExecutor

from holdfast.errors import HoldfastError
from holdfast.sessions.clock import StoreClock
from holdfast.sessions.life import SessionNode
from holdfast.sessions.sweep import (
    SWEEP_ROWS,
    EndedLeases,
    SweepSettings,
    UnheldRows,
    buried_before,
    due_writes,
    orphan_writes,
)
from holdfast.sessions.table import RowWrite, SessionTable

logger = logging.getLogger("holdfast.sessions")

DUE_SECONDS = 0.5
LOOK_SECONDS = 1.0


class Sweep:
    """One per node; whoever is faster does it, and the others find it done."""

    def __init__(
        self,
        table: SessionTable,
        node: SessionNode,
        settings: SweepSettings,
        alive: Callable[[], set[int]],
        held: Callable[[], Collection[str]],
        count: Callable[[int], None],
        filters: Callable[[dict[str, int], bool], None],
    ):
        self._table, self._node, self._settings = table, node, settings
        self._alive, self._held, self._count, self._filters = alive, held, count, filters
        self._ended, self._unheld = EndedLeases(settings), UnheldRows(settings)
        self._version = 0
        self._look_at = self._rare_at = 0.0
        self._pool = ThreadPoolExecutor(1, "holdfast-sweep")
        self.swept = 0
        """Rows, for the metrics."""

    @property
    def _clock(self) -> StoreClock:
        return self._node.clock

    async def begin(self) -> None:
        """Before anything is decided: what time it is, and who is subscribed."""
        while not self._clock.known:
            await self._look()

    async def run(self) -> None:
        """For ever. A store that is away is asked again."""
        while True:
            await asyncio.sleep(DUE_SECONDS)
            try:
                now = time.monotonic()
                if now >= self._look_at:
                    self._look_at = now + LOOK_SECONDS
                    await self._look()
                await self._sweep_due()
                await self._sweep_orphans()
                if now >= self._rare_at:
                    self._rare_at = now + self._settings.unheld_secs
                    await self._sweep_unheld()
                    await self._call(self._table.bury, buried_before(self._time(), self._settings), SWEEP_ROWS)
            except HoldfastError as error:
                logger.warning("sessions cannot be looked after just now: %s", error)

    async def _call(self, work: Callable[..., object], *given: object) -> object:
        return await asyncio.get_running_loop().run_in_executor(self._pool, work, *given)

    def _time(self) -> float:
        return self._clock.time(time.monotonic())

    async def _look(self) -> None:
        asked_at = time.monotonic()
        store_time = await self._call(self._table.now)
        assert isinstance(store_time, float)
        self._clock.heard(store_time, asked_at, time.monotonic())
        found = await asyncio.get_running_loop().run_in_executor(self._pool, self._table.filters_since, self._version)
        self._version = found.version
        if found.counts or found.whole:
            self._filters(found.counts, found.whole)
        self._count(await asyncio.get_running_loop().run_in_executor(self._pool, self._table.count))

    async def _sweep_due(self) -> None:
        loop = asyncio.get_running_loop()
        while self._clock.known:
            now = self._time()
            rows = await loop.run_in_executor(self._pool, self._table.due, now, SWEEP_ROWS)
            writes = due_writes(rows, self._held(), now, self._node.filters_of)
            await self._write(writes)
            if len(writes) < SWEEP_ROWS:
                return

    async def _sweep_orphans(self) -> None:
        loop = asyncio.get_running_loop()
        named = await loop.run_in_executor(self._pool, self._table.leases)
        alive = await loop.run_in_executor(self._pool, self._alive)
        for lease in self._ended.over(named, alive, time.monotonic()):
            after = ""
            while rows := await loop.run_in_executor(self._pool, self._table.of_lease, lease, after, SWEEP_ROWS):
                waited = self._settings.grace_secs
                await self._write(orphan_writes(rows, self._held(), self._time(), waited, self._node.filters_of))
                after = rows[-1].client_id

    async def _sweep_unheld(self) -> None:
        lease, loop, after = self._node.lease, asyncio.get_running_loop(), ""
        while lease is not None:
            rows = await loop.run_in_executor(self._pool, self._table.of_lease, lease, after, SWEEP_ROWS)
            if not rows:
                break
            writes = self._unheld.page(rows, self._held(), self._time(), self._node.filters_of)
            await self._write(writes)
            after = rows[-1].client_id
        self._unheld.finish()

    async def _write(self, writes: list[RowWrite]) -> None:
        self.swept += len(writes)
        if writes:
            await self._call(self._table.write, writes)

    def close(self) -> None:
        self._pool.shutdown(cancel_futures=True)
