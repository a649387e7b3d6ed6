"""The host of delivery: it gives the machine commits and what was read, and performs what the machine decides.

Everything here runs on the loop's thread but the reads, which have threads of their own.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from math import inf

from holdfast.delivery import delivery as dv
from holdfast.delivery.outlet import Outlet
from holdfast.delivery.readers import Fetched, Reader, Request
from holdfast.errors import HoldfastError, UnknownStream
from holdfast.groups.shares import is_shared, parse_share
from holdfast.log import Appended, Log
from holdfast.log.clock import message_time
from holdfast.log.history import History
from holdfast.machine import TICK
from holdfast.model import LOG, Batch, Stream
from holdfast.mqtt.reasons import Reason
from holdfast.mqtt.trie import Trie
from holdfast.runtime.block_rows import rows_of
from holdfast.runtime.connection import Connection
from holdfast.runtime.offset_reader import Found, read_offsets
from holdfast.runtime.shared_reads import SharedReads
from holdfast.sessions.heads import Heads
from holdfast.sessions.positions import Gap
from holdfast.sessions.retained import RetainedMessages
from holdfast.sessions.rows import Rows

logger = logging.getLogger("holdfast.delivery")

READ_ROWS = 8192
TURNS_AT_ONCE = 50
"""So many outlets have their turn in one of the loop's."""
REREAD_BYTES = 8 << 20
"""So much of what is in flight is fetched at a time."""
READERS = 2
WALL_SECONDS = 0.05
"""How often the clock that messages expire by is looked at: it does not run away in so short a time."""


class DeliveryHost:
    """One per node."""

    def __init__(self, log: Log, retained: RetainedMessages, pending_bytes_max: int):
        self._log = log
        self.history = History(log)
        settings = dv.DeliverySettings(pending_bytes_max=pending_bytes_max, fetches_max=READERS)
        self.machine = dv.Delivery(retained, settings)
        self.on_streams_changed: Callable[[], None] = lambda: None
        self.on_loan_news: Callable[[Outlet], None] = lambda outlet: None
        self.ask_clock: Callable[[Outlet], None] = lambda outlet: None
        self.look_at_clock: Callable[[], None] = lambda: None
        """Called before anything is decided: whoever may not be served any more is blocked by it."""
        self._connections: dict[Outlet, Connection] = {}
        self._pool = ThreadPoolExecutor(READERS, "holdfast-reader")
        self._shared_reads = SharedReads()
        self._shared_bytes_max = pending_bytes_max // 2
        self._loop = asyncio.get_running_loop()
        self._turns: deque[Outlet] = deque()
        """Who has more to be sent, or has not been sent anything of a block that many want."""
        self._turning = False
        self._look_again = asyncio.Event()
        self._rounds = 0
        """How often the log's heads have been looked at and caught up with."""
        self._sure_at = 0
        """The round after which it is known whether a commit that failed is in the log all the same."""
        self._round_over = asyncio.Event()
        self._timer: asyncio.TimerHandle | None = None
        self._armed = inf
        self._wall_until = 0.0
        for head in log.heads(LOG):
            self.machine.heads[head.stream] = head.next_offset
            if head.sealed:
                self.machine.heads.seal([head.stream])
        self.machine.heads.set_lake(self._lake())

    @property
    def heads(self) -> Heads:
        return self.machine.heads

    # -- events ------------------------------------------------------------------------------------------

    def handle(self, event: dv.DeliveryEvent) -> None:
        self.look_at_clock()
        now = self._loop.time()
        if now >= self._wall_until:
            self._wall_until = now + WALL_SECONDS
            self.machine.wall_ahead = message_time() / 1e6 - now
        for effect in self.machine.handle(event, now):
            self._perform(effect)
        if self.machine.deadline != self._armed:
            self._arm()

    def attach(self, outlet: Outlet, connection: Connection) -> None:
        self._connections[outlet] = connection
        self.handle(dv.Attached(outlet))

    def detach(self, outlet: Outlet) -> None:
        if self._connections.pop(outlet, None) is not None:  # one that was never welcome was never attached
            self.handle(dv.Detached(outlet))

    def pass_over(self, outlet: Outlet) -> None:
        self.machine.pass_over(outlet)

    def committed(self, appended: Appended, parts: dict[int, Batch], now: int) -> None:
        """Blocks this node has just stored."""
        try:
            for placed in appended.placed:
                offsets = range(placed.base, placed.base + placed.count)
                self.handle(dv.Committed(Rows(placed.stream, offsets, parts[placed.stream.shard], now)))
        except Exception:
            self._look_again.set()  # it is in the log: what was not delivered is read from there
            raise

    def _perform(self, effect: dv.DeliveryEffect) -> None:
        match effect:
            case dv.Write(outlet, data):
                if (connection := self._connections.get(outlet)) is not None and connection.machine.open:
                    connection.write(data)
            case dv.Fetch(reader, request, bytes_max):
                self._fetch(reader, request, bytes_max)
            case dv.NextTurn(outlet):
                self._ask_turn(outlet)
            case dv.LoanNews(outlet):
                self.on_loan_news(outlet)
            case dv.AskClock(outlet):
                self.ask_clock(outlet)
                self._ask_turn(outlet)
            case dv.Follow():
                self._look_again.set()
            case dv.Broken(outlet, error):
                logger.error("%s: our own fault; the connection is ended", outlet, exc_info=error)
                if (connection := self._connections.get(outlet)) is not None:
                    connection.close(Reason.UNSPECIFIED_ERROR)

    def _ask_turn(self, outlet: Outlet) -> None:
        self._turns.append(outlet)
        if not self._turning:
            self._turning = True
            self._loop.call_soon(self._take_turns)

    def _take_turns(self) -> None:
        """A few of those who wait: everybody may be among them, and others wait for the loop."""
        try:
            for _ in range(min(TURNS_AT_ONCE, len(self._turns))):
                outlet = self._turns.popleft()
                if outlet in self._connections:
                    self.handle(dv.Room(outlet))
        finally:
            self._turning = bool(self._turns)
            if self._turning:
                self._loop.call_soon(self._take_turns)

    def _arm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._armed = self.machine.deadline
        if self._armed != inf:
            self._timer = self._loop.call_at(self._armed, self._tick)

    def _tick(self) -> None:
        self._timer, self._armed = None, inf
        self.handle(TICK)

    # -- reading -----------------------------------------------------------------------------------------

    def _fetch(self, reader: Reader, request: Request, bytes_max: int) -> None:
        if request.shared and (found := self._shared_reads.find(request)) is not None:
            self._loop.call_soon(self.handle, dv.FetchDone(reader, found))
            return
        reading = self._loop.run_in_executor(self._pool, self._read_for, request, bytes_max)
        reading.add_done_callback(lambda done: self._fetched(reader, done))

    def _read_for(self, request: Request, bytes_max: int) -> Fetched:
        """On a reader's thread."""
        if not request.shared:
            return self._read(request, bytes_max)
        # As much for everybody, whatever room the one has who happens to read: a slice keeps half of it at most.
        return self._shared_reads.read(request, lambda asked: self._read(asked, self._shared_bytes_max))

    def _read(self, request: Request, bytes_max: int) -> Fetched:
        """On a reader's thread."""
        stream, at = request.stream, request.at
        try:
            reading = self._log.read(
                stream,
                at,
                topics=request.wanted,
                rows_max=READ_ROWS,
                bytes_max=bytes_max,
                until=request.until,
                on_corrupt="skip",
            )
        except UnknownStream as error:
            try:
                reading = self.history.read(stream, at, topics=request.wanted, rows_max=READ_ROWS, bytes_max=bytes_max)
            except UnknownStream:
                return Fetched(-1, (), (Gap(str(stream), at, None, str(error), time.time()),))
        gaps = tuple(Gap(str(s), first, past, reason, time.time()) for s, first, past, reason in reading.skipped)
        return Fetched(reading.next_offset, [rows_of(chunk) for chunk in reading.chunks], gaps)

    def _fetched(self, reader: Reader, done: asyncio.Future[Fetched]) -> None:
        if done.cancelled():
            return
        error = done.exception()
        if error is None:
            for gap in done.result().gaps:
                logger.warning("%r: skipped %s from %d: %s", reader, gap.stream, gap.first, gap.reason)
            self.handle(dv.FetchDone(reader, done.result()))
            return
        logger.warning("%r cannot read: %s", reader, error, exc_info=not isinstance(error, HoldfastError) and error)
        self.handle(dv.FetchFailed(reader))

    async def read_offsets(self, stream: Stream, offsets: Sequence[int]) -> dict[int, Found]:
        """The messages at these offsets; those that are gone for good are missing."""
        found: dict[int, Found] = {}
        left = set(offsets)
        while left:
            some, gone = await self._loop.run_in_executor(
                self._pool, read_offsets, self._log, self.history, stream, sorted(left), REREAD_BYTES
            )
            found.update(some)
            left -= {*some, *gone}
        return found

    def filters_changed(self, counts: Mapping[str, int], whole: bool) -> None:
        """How many sessions, of whatever node, subscribe to these filters; `whole`: to no others."""
        if whole:
            self.machine.anywhere = Trie()
        anywhere = self.machine.anywhere
        for text, count in counts.items():
            topics = parse_share(text).filter if is_shared(text) else text
            if count:
                anywhere.add(topics, text)
            else:
                anywhere.remove(topics, text)

    # -- what other processes commit -----------------------------------------------------------------------

    def hint(self) -> None:
        """Somebody else appended (called on the loop's thread)."""
        self._look_again.set()

    def doubt(self) -> None:
        """A commit of our own failed: it may be in the log all the same, and nobody else will tell us."""
        self._sure_at = self._rounds + 2  # the round under way may have looked before now
        self._look_again.set()

    @property
    def in_doubt(self) -> bool:
        return self._rounds < self._sure_at

    async def caught_up(self) -> None:
        """Everything that is in the log now has been delivered here, whichever process stored it."""
        wanted = self._rounds + 2  # the round under way may have looked before now
        while self._rounds < wanted:
            self._look_again.set()
            self._round_over.clear()
            await self._round_over.wait()

    async def follow(self) -> None:
        """Read and deliver what other processes append, in order; for ever."""
        while True:
            await self._look_again.wait()
            self._look_again.clear()
            try:
                await self._follow_once()
            except HoldfastError as error:
                logger.warning("cannot follow the log: %s", error)
                await asyncio.sleep(0.5)
                self._look_again.set()
            else:
                self._rounds += 1
                self._round_over.set()
                if self.in_doubt:
                    self._look_again.set()

    async def _follow_once(self) -> None:
        loop = self._loop
        heads = await loop.run_in_executor(self._pool, self._log.heads, LOG)
        changed = {head.stream for head in heads} != self.heads.keys()
        if changed:
            lake = await loop.run_in_executor(self._pool, self._lake)
            self.handle(dv.StreamsSeen([head.stream for head in heads], (), lake))
        for head in heads:
            await self._catch_up_with(head.stream, head.next_offset)
            # Only now: a stream is done with once it has been delivered to its end; the next generation waits for that.
            if head.sealed and head.stream not in self.heads.sealed:
                changed = True
                self.handle(dv.StreamsSeen([h.stream for h in heads], [head.stream], self.heads.lake))
        if changed:
            self.on_streams_changed()

    async def _catch_up_with(self, stream: Stream, end: int) -> None:
        self.handle(dv.Followed(stream, -1, 0, ()))  # blocks of our own may have waited only for the stream to be seen
        while self.heads.get(stream, end) < end:
            at = self.heads[stream]
            stop = self.machine.next_early(stream, end)
            rows = await self._loop.run_in_executor(self._pool, self._read_all, stream, at, min(stop - at, READ_ROWS))
            self.handle(dv.Followed(stream, at, rows[-1].offsets[-1] + 1 if rows else stop, rows))

    def _read_all(self, stream: Stream, at: int, rows_max: int) -> list[Rows]:
        """On a reader's thread."""
        reading = self._log.read(stream, at, rows_max=rows_max, on_corrupt="skip")
        return [rows_of(chunk) for chunk in reading.chunks]

    def _lake(self) -> dict[Stream, int]:
        return {head.stream: head.next_offset for head in self.history.heads(LOG)}

    async def look_at_lake(self) -> None:
        """Which streams the store has dropped and the lake still has."""
        lake = await self._loop.run_in_executor(self._pool, self._lake)
        self.handle(dv.StreamsSeen(list(self.heads), (), lake))

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._pool.shutdown(cancel_futures=True)
