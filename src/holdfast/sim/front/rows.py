"""A node's way to the table of sessions, as in `runtime.session_rows`: calls fail, are late, or nobody knows.

A write of unknown outcome may land long after its node was told, and after that node has died.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

from holdfast.log.contract import ReceivedId
from holdfast.sessions.life import Failed, Found, Written
from holdfast.sessions.table import SessionRow
from holdfast.sim.front.disk import InDoubt, StoreDown
from holdfast.sim.front.table import Write
from holdfast.sim.front.world import Pending, Work

if TYPE_CHECKING:
    from holdfast.sim.front.node import SimFront

AGAIN_SECONDS = 0.05
LATE_SECONDS = 3.0
"""A write that nobody knows the fate of lands within this long, or never: less than a deletion is kept."""


class FoundRow(NamedTuple):
    row: SessionRow | None
    lease_over: bool
    received: dict[int, int]


class SimRows:
    """Reads and writes of all sessions: whatever waits goes together."""

    def __init__(self, front: SimFront):
        self.front, self.world, self.disk = front, front.world, front.disk
        self.table = front.disk.table
        self._reads: list[tuple[str, int, Callable[[Found], None]]] = []
        self._writes: list[tuple[Write, Callable[[Written | Failed], None]]] = []
        self._released: list[tuple[ReceivedId, Callable[[], None]]] = []
        self._to_read: Pending = self.world.pending()
        self._to_write: Pending = self.world.pending()
        self._to_release: Pending = self.world.pending()
        self.received: dict[str, dict[int, int]] = {}
        """Of sessions that were read: packet ids of QoS 2 publishes that were not released, until they are taken."""
        front.spawn(self._read_for_ever())
        front.spawn(self._write_for_ever())
        front.spawn(self._release_for_ever())

    # -- one call of the store -----------------------------------------------------------------------------

    def call(self, work: Callable[[], Any], *, late: bool = True) -> Work:
        """Its result. StoreDown: nothing was done; InDoubt: nobody knows, and if it may be `late` it lands later."""
        world, disk = self.world, self.disk
        yield world.rng.random() * disk.seconds
        fate = disk.fate()
        match "lost" if fate == "late" and not late else fate:
            case "fails":
                raise StoreDown("nothing was done")
            case "lost":
                yield world.rng.random() * disk.seconds
                raise InDoubt("it never arrived")
            case "late":
                world.after(world.rng.random() * LATE_SECONDS, lambda: self._land(work))
                yield world.rng.random() * disk.seconds
                raise InDoubt("it is on its way")
            case "unanswered":
                work()
                yield world.rng.random() * disk.seconds
                raise InDoubt("it was done, and the answer was lost")
        done = work()
        yield world.rng.random() * disk.seconds
        return done

    def _land(self, work: Callable[[], Any]) -> None:
        if not self.disk.down:
            self.world.tell("store", "something lands late")
            work()

    # -- reading -------------------------------------------------------------------------------------------

    def read(self, client_id: str, number: int, answer: Callable[[Found], None]) -> None:
        self._reads.append((client_id, number, answer))
        self._to_read.settle()

    def _read_for_ever(self) -> Work:
        while True:
            yield self._to_read
            self._to_read = self.world.pending()
            asked, self._reads = self._reads, []
            ids = sorted({client_id for client_id, _, _ in asked})
            try:
                rows = yield from self.call(lambda some=ids: self._read(some))  # type: ignore[misc]
            except StoreDown:
                continue  # whoever asked asks again
            for client_id, number, answer in asked:
                row, lease_over, received = rows[client_id]
                self.received[client_id] = received
                answer(Found(number, row, lease_over))

    def _read(self, ids: list[str]) -> dict[str, FoundRow]:
        table = self.table
        rows, alive = table.read(ids), table.alive()
        received = table.received([client_id for client_id, row in rows.items() if not row.dead])
        found = {client_id: FoundRow(None, False, {}) for client_id in ids}
        for client_id, row in rows.items():
            over = row.lease is not None and row.lease not in alive
            found[client_id] = FoundRow(row, over, received.get(client_id, {}))
        return found

    # -- writing -------------------------------------------------------------------------------------------

    def write(self, write: Write, answer: Callable[[Written | Failed], None]) -> None:
        self._writes.append((write, answer))
        self._to_write.settle()

    def _write_for_ever(self) -> Work:
        while True:
            yield self._to_write
            self._to_write = self.world.pending()
            asked, self._writes = self._writes, []
            writes = [write for write, _ in asked]
            try:
                verdicts = yield from self.call(lambda some=writes: self.table.write(some))  # type: ignore[misc]
            except StoreDown as error:
                for _, answer in asked:
                    answer(Failed(in_doubt=isinstance(error, InDoubt)))
            else:
                for (_, answer), verdict in zip(asked, verdicts, strict=True):
                    answer(Written(verdict))

    def release(self, received: ReceivedId, released: Callable[[], None]) -> None:
        """Need not be known any more; called back when the store does not know it."""
        self._released.append((received, released))
        self._to_release.settle()

    def _release_for_ever(self) -> Work:
        while True:
            yield self._to_release
            self._to_release = self.world.pending()
            some, self._released = self._released, []
            ids = [received for received, _ in some]
            try:
                yield from self.call(lambda ids=ids: self.table.release(ids))  # type: ignore[misc]
            except StoreDown:
                yield AGAIN_SECONDS
                self._released[:0] = some
                self._to_release.settle()
            else:
                for _, released in some:
                    released()
