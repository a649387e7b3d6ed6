"""The node's one writer, as in `runtime.ingest`: publishes gather while a commit is under way, then go together."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from holdfast.log.contract import NotTaken, ReceivedId
from holdfast.mqtt.fastpath import Inbox
from holdfast.sessions.receiving import Receiving
from holdfast.sim.front.disk import Block, Disk, Row, StoreDown
from holdfast.sim.front.world import Life, Pending, Work, World

if TYPE_CHECKING:
    from holdfast.sim.front.connection import SimConnection


class OpenBatch:
    """What waits for the next commit, and who is to be told."""

    def __init__(self) -> None:
        self.rows: list[Row] = []
        self.bytes = 0
        self.received: list[tuple[Receiving, int]] = []
        """And whom of `after` each concerns."""
        self.acks: list[tuple[SimConnection, Inbox]] = []
        self.after: list[Callable[[bool], None]] = []


class SimIngest:
    def __init__(
        self,
        world: World,
        disk: Disk,
        life: Life,
        bytes_max: int,
        committed: Callable[[list[Block]], None],
        anyone_for: Callable[[set[str]], set[str]],
        failed: Callable[[], None],
    ):
        self.world, self.disk, self.life = world, disk, life
        self._bytes_max, self._committed, self._anyone_for, self._failed = bytes_max, committed, anyone_for, failed
        self._open = OpenBatch()
        self._waiting: list[SimConnection] = []
        self._wake: Pending = world.pending()
        self.busy = False

    @property
    def idle(self) -> bool:
        batch = self._open
        return not (self.busy or batch.rows or batch.after or batch.acks)

    def publish(self, connection: SimConnection, inbox: Inbox, rows: list[Row]) -> bool:
        batch = self._open
        batch.acks.append((connection, inbox))
        self._add(rows)
        if batch.bytes < self._bytes_max:
            return True
        self._waiting.append(connection)
        return False

    def publish_one(self, row: Row, done: Callable[[bool], None] | None, received: Receiving | None = None) -> None:
        self._add([row])
        if done is not None:
            self._open.after.append(done)
        if received is not None:
            self._open.received.append((received, len(self._open.after) - 1))

    def in_turn(self, done: Callable[[bool], None]) -> None:
        self._open.after.append(done)
        self._wake.settle()

    def drained(self) -> Pending:
        found = self.world.pending()
        self.in_turn(found.settle)
        return found

    def _add(self, rows: list[Row]) -> None:
        self._open.rows += rows
        self._open.bytes += sum(len(row.payload) + 64 for row in rows)
        self._wake.settle()

    def run(self) -> Work:
        while True:
            yield self._wake
            self._wake = self.world.pending()
            batch, self._open = self._open, OpenBatch()
            waiting, self._waiting = self._waiting, []
            self.busy = True
            for connection in waiting:
                connection.read_on()
            try:
                placed = yield from self._commit(batch)
            except StoreDown:
                self._tell_failed(batch)
            else:
                self._committed(placed)
                self._acknowledge(batch)
            self.busy = False

    def _commit(self, batch: OpenBatch) -> Work:
        world, disk = self.world, self.disk
        if not batch.rows:
            return []
        yield world.rng.random() * disk.commit_seconds
        if disk.fails(disk.commit_fails):
            yield world.rng.random() * disk.commit_seconds
            raise StoreDown("nothing was stored")
        ids = [receiving.id() for receiving, _ in batch.received]
        if (error := disk.table.not_taken(ids)) is not None:
            self._leave_out(batch, ids, error)
            return (yield from self._commit(batch))
        placed = disk.log.append(batch.rows, world.now, ours=True)
        disk.table.receive(ids)
        # Others may append, and we may read it, before the writer's thread has told the loop.
        yield world.rng.random() * disk.commit_seconds
        if disk.lies():
            raise StoreDown("it was stored, and the answer was lost")
        return placed

    def _leave_out(self, batch: OpenBatch, ids: list[ReceivedId], error: NotTaken) -> None:
        unwanted = error.fenced | error.repeated.keys()
        for one, (receiving, told) in zip(ids, batch.received, strict=True):
            if one in error.fenced:
                batch.after[told] = partial(_refuse, batch.after[told])
            elif one in error.repeated:
                receiving.inbound.marks[receiving.packet_id] = error.repeated[one]
        marks = {one.mark for one in unwanted}
        batch.rows = [row for row in batch.rows if row.number not in marks]
        batch.received = [taken for one, taken in zip(ids, batch.received, strict=True) if one not in unwanted]

    def _acknowledge(self, batch: OpenBatch) -> None:
        asked = [inbox for connection, inbox in batch.acks if connection.version == 5 and inbox.packet_ids]
        heard = self._anyone_for({topic for inbox in asked for topic in inbox.topics}) if asked else None
        for connection, inbox in batch.acks:
            if inbox.packet_ids:
                connection.stored(inbox, heard)
        for done in batch.after:
            done(True)

    def _tell_failed(self, batch: OpenBatch) -> None:
        for done in batch.after:
            done(False)
        for connection, _ in batch.acks:
            connection.store_failed()
        self._failed()


def _refuse(done: Callable[[bool], None], stored: bool) -> None:
    done(False)
