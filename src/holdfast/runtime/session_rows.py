"""Reads and writes of all sessions' rows: whatever waits goes together, as one query or one transaction.

While one is under way the next one fills up. Reads and writes have a thread each, which they share with nobody.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import NamedTuple, TypeVar

from holdfast.errors import HoldfastError, OutcomeUnknown
from holdfast.log.contract import ReceivedId
from holdfast.sessions.life import Failed, Found, Written
from holdfast.sessions.table import RowWrite, SessionRow, SessionTable, Verdict

logger = logging.getLogger("holdfast.sessions")

READ_ROWS = 500
WRITE_ROWS = 100
"""In one transaction, some 10 ms: publishers wait for it where a store has one writer."""
ANSWERS_AT_ONCE = 25
"""So many who wait for a row are told in one turn of the loop."""
AGAIN_SECONDS = 0.2
"""How soon what could not be released is tried again."""
T = TypeVar("T")


class FoundRow(NamedTuple):
    """A row, what of it stands elsewhere, and whether the lease it names has ended."""

    row: SessionRow | None
    lease_over: bool
    received: dict[int, int]


class SessionRows:
    """One per node; called on the loop's thread."""

    def __init__(self, table: SessionTable, alive: Callable[[], set[int]], unused: Callable[[set[str]], None]):
        self.table, self._alive, self._unused = table, alive, unused
        self._reads: list[tuple[str, int, Callable[[Found], None]]] = []
        self._writes: list[tuple[RowWrite, Callable[[Written | Failed], None]]] = []
        self._reading = self._writing = False
        self._reader = ThreadPoolExecutor(1, "holdfast-session-reads")
        self._writer = ThreadPoolExecutor(1, "holdfast-session-writes")
        self._closed = False
        self.written = 0
        """Rows, for the metrics."""
        self.received: dict[str, dict[int, int]] = {}
        """Of sessions that were read: packet ids of QoS 2 publishes that were not released, until they are taken."""
        self._answers: deque[Callable[[], None]] = deque()
        self._answering = False
        self._released: list[tuple[ReceivedId, Callable[[], None]]] = []
        self._releasing = False

    # -- reading -----------------------------------------------------------------------------------------

    def read(self, client_id: str, number: int, answer: Callable[[Found], None]) -> None:
        """One `Found`, unless the store fails: then whoever asked asks again."""
        self._reads.append((client_id, number, answer))
        if not self._reading:
            self._reading = True
            asyncio.get_running_loop().call_soon(self._read)

    def _read(self) -> None:
        some, self._reads = self._reads[:READ_ROWS], self._reads[READ_ROWS:]
        if not some or self._closed:
            self._reading = False
            return
        ids = sorted({client_id for client_id, _, _ in some})
        reading = asyncio.get_running_loop().run_in_executor(self._reader, self._read_rows, ids)
        reading.add_done_callback(lambda done: self._was_read(some, done))

    def _read_rows(self, ids: list[str]) -> dict[str, FoundRow]:
        """On the reader's thread. Rows first: a lease is alive before a row names it."""
        rows = self.table.read(ids)
        named = {row.lease for row in rows.values() if row.lease is not None}
        alive = self._alive() if named else set()
        known = [client_id for client_id, row in rows.items() if not row.dead]
        received = self.table.received(known) if known else {}
        found = {client_id: FoundRow(None, False, {}) for client_id in ids}
        for client_id, row in rows.items():
            over = row.lease is not None and row.lease not in alive
            found[client_id] = FoundRow(row, over, received.get(client_id, {}))
        return found

    def _was_read(
        self,
        asked: list[tuple[str, int, Callable[[Found], None]]],
        done: asyncio.Future[dict[str, FoundRow]],
    ) -> None:
        if done.cancelled():
            return
        self._read()
        error = done.exception()
        if error is None:
            rows = done.result()
            self._answer([partial(self._found, each, rows[each[0]]) for each in asked])
        else:
            logger.warning("%d sessions could not be read: %s", len(asked), error, exc_info=_unless_ours(error))

    def _found(self, asked: tuple[str, int, Callable[[Found], None]], found: FoundRow) -> None:
        client_id, number, answer = asked
        if found.received:
            self.received[client_id] = found.received
        else:
            self.received.pop(client_id, None)
        answer(Found(number, found.row, found.lease_over))

    async def look(self, client_id: str) -> FoundRow:
        """One row, for somebody who is not its machine."""
        return (await self.ask(self._read_rows, [client_id]))[client_id]

    async def ask(self, call: Callable[..., T], *given: object) -> T:
        """Something else, on the reader's thread."""
        return await asyncio.get_running_loop().run_in_executor(self._reader, call, *given)

    # -- writing -----------------------------------------------------------------------------------------

    def write(self, write: RowWrite, answer: Callable[[Written | Failed], None]) -> None:
        """One answer, whatever happens."""
        self._writes.append((write, answer))
        if not self._writing:
            self._writing = True
            asyncio.get_running_loop().call_soon(self._write)

    def _write(self) -> None:
        some, self._writes = self._writes[:WRITE_ROWS], self._writes[WRITE_ROWS:]
        if not some or self._closed:
            self._writing = False
            return
        writes = [write for write, _ in some]
        writing = asyncio.get_running_loop().run_in_executor(self._writer, self._write_rows, writes)
        writing.add_done_callback(lambda done: self._was_written(some, done))

    def _write_rows(self, writes: list[RowWrite]) -> tuple[list[Verdict], set[str]]:
        """On the writer's thread: what became of them, and which filters nobody subscribes to any more."""
        verdicts = self.table.write(writes)
        gone = {text for write in writes for text in write.unsubscribed}
        try:
            return verdicts, self.table.unused(gone) if gone else gone
        except HoldfastError:  # the rows are written, and the next sweep tells of filters
            return verdicts, set()

    def _was_written(
        self,
        asked: list[tuple[RowWrite, Callable[[Written | Failed], None]]],
        done: asyncio.Future[tuple[list[Verdict], set[str]]],
    ) -> None:
        if done.cancelled():
            return
        self._write()
        error = done.exception()
        if error is None:
            self.written += len(asked)
            verdicts, unused = done.result()
            if unused:
                self._unused(unused)
            self._answer([partial(answer, Written(each)) for (_, answer), each in zip(asked, verdicts, strict=True)])
        else:
            logger.warning("%d sessions could not be written: %s", len(asked), error, exc_info=_unless_ours(error))
            certain = isinstance(error, HoldfastError) and not isinstance(error, OutcomeUnknown)
            self._answer([partial(answer, Failed(in_doubt=not certain)) for _, answer in asked])

    def _answer(self, answers: list[Callable[[], None]]) -> None:
        """A few in each turn of the loop: what a client is told on account of its row takes longer than the row."""
        self._answers.extend(answers)
        if not self._answering:
            self._answering = True
            self._answer_some()

    def _answer_some(self) -> None:
        for _ in range(min(ANSWERS_AT_ONCE, len(self._answers))):
            try:
                self._answers.popleft()()
            except Exception:  # one that fails must not keep the others waiting
                logger.exception("whoever asked for a session's row could not be told")
        if self._answers:
            asyncio.get_running_loop().call_soon(self._answer_some)
        else:
            self._answering = False

    def release(self, received: ReceivedId, released: Callable[[], None]) -> None:
        """Need not be known any more; called back when no store knows it."""
        self._released.append((received, released))
        if not self._releasing:
            self._releasing = True
            asyncio.get_running_loop().call_soon(self._release)

    def _release(self) -> None:
        some, self._released = self._released[:WRITE_ROWS], self._released[WRITE_ROWS:]
        if not some or self._closed:
            self._releasing = False
            return
        ids = [received for received, _ in some]
        releasing = asyncio.get_running_loop().run_in_executor(self._writer, self.table.release, ids)
        releasing.add_done_callback(lambda done: self._was_released(some, done))

    def _was_released(self, some: list[tuple[ReceivedId, Callable[[], None]]], done: asyncio.Future[None]) -> None:
        if done.cancelled():
            return
        if done.exception() is not None:
            logger.warning("%d packet ids could not be released: %s", len(some), done.exception())
            # Before later ones: an id that was freed twice is free only once nobody is about to free it again.
            self._released[:0] = some
            asyncio.get_running_loop().call_later(AGAIN_SECONDS, self._release)
            return
        for _, released in some:
            released()
        self._release()

    def close(self) -> None:
        self._closed = True
        self._reader.shutdown(cancel_futures=True)
        self._writer.shutdown(cancel_futures=True)


def _unless_ours(error: BaseException) -> BaseException | None:
    """A fault that we did not expect is shown with where it came from."""
    return None if isinstance(error, HoldfastError) else error
