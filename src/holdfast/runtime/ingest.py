"""Publishes of all connections into one open batch; one commit; then the acknowledgements, one write each.

While one batch is being committed on the writer's thread the next one fills up: the busier the node, the larger
the batches.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol

from holdfast.errors import HoldfastError
from holdfast.log import Appended, Log
from holdfast.log.contract import Retained
from holdfast.model import RETAIN, Batch, now_micros
from holdfast.mqtt.fastpath import Inbox


class Publisher(Protocol):
    """What the ingest uses of a connection."""

    @property
    def version(self) -> int: ...

    def stored(self, inbox: Inbox, heard: set[str] | None) -> None:
        """These publishes are durable; `heard`: the topics somebody is subscribed to."""
        ...

    def store_failed(self) -> None: ...

    def read_on(self) -> None:
        """There is room again for what it publishes."""
        ...


logger = logging.getLogger("holdfast.ingest")

LOG = "messages"


class _Shard:
    """Columns of one shard of the open batch."""

    __slots__ = ("flags", "payloads", "properties", "publishers", "topics")

    def __init__(self) -> None:
        self.topics: list[str] = []
        self.payloads: list[bytes] = []
        self.publishers: list[str] = []
        self.flags: list[int] = []
        self.properties: list[bytes | None] | None = None

    def add(
        self,
        publisher: str,
        topics: Sequence[str],
        payloads: Sequence[bytes],
        flags: Sequence[int],
        properties: Sequence[bytes | None] | None,
    ) -> None:
        before, count = len(self.topics), len(topics)
        self.topics += topics
        self.payloads += payloads
        self.publishers += [publisher] * count
        self.flags += flags
        if properties is not None:
            if self.properties is None:
                self.properties = [None] * before
            self.properties += properties
        elif self.properties is not None:
            self.properties += [None] * count


class OpenBatch:
    """What waits for the next commit, and who is to be told when it has happened."""

    def __init__(self, generation: int) -> None:
        self.shards: dict[int, _Shard] = {}
        self.generation = generation
        """The one its shards are of, at most: a batch begun before a seal is sorted anew."""
        self.bytes = 0
        self.acks: list[tuple[Publisher, Inbox]] = []
        self.after: list[Callable[[bool], None]] = []
        """Called with whether the commit happened, in order, after the plain acknowledgements."""
        self.retained: list[Retained] = []

    @property
    def empty(self) -> bool:
        return not (self.shards or self.after or self.acks)


class Ingest:
    """The one writer of the node."""

    def __init__(
        self,
        log: Log,
        bytes_max: int,
        committed: Callable[[Appended, dict[int, Batch], int], None],
        anyone_for: Callable[[set[str]], set[str]],
        failed: Callable[[Exception], None],
    ):
        self._log = log
        self._bytes_max = bytes_max
        self._committed = committed
        self._anyone_for = anyone_for
        self._failed = failed
        self.generation = log.generations(LOG)[-1]
        self._open = OpenBatch(self.generation.number)
        self._wake = asyncio.Event()
        self._waiting: list[Publisher] = []
        self._thread = ThreadPoolExecutor(1, "holdfast-writer")
        self.by_publisher = log.logs()[LOG] == "publisher"
        self._writer = 0
        self.messages = 0
        self.commits = 0

    # -- filling the open batch --------------------------------------------------------------------------

    def publish(self, connection: Publisher, publisher: str, shard: int, inbox: Inbox) -> bool:
        """Take a connection's publishes. False: enough waits already, do not read from it until told."""
        batch = self._open
        batch.acks.append((connection, inbox))
        self._add(publisher, shard, inbox.topics, inbox.payloads, inbox.flags, inbox.properties)
        if batch.bytes < self._bytes_max:
            return True
        self._waiting.append(connection)
        return False

    def publish_one(
        self,
        publisher: str,
        topic: str,
        payload: bytes,
        flags: int,
        properties: bytes | None,
        done: Callable[[bool], None] | None,
    ) -> None:
        """Take one message from elsewhere (QoS 2, a will, HTTP); `done` says whether it became durable."""
        shard = self.shard_of(publisher)
        self._add(publisher, shard, [topic], [payload], [flags], [properties] if properties else None)
        if done is not None:
            self._open.after.append(done)

    def in_turn(self, done: Callable[[bool], None]) -> None:
        """Call back after everything that is in the open batch now is durable."""
        self._open.after.append(done)
        self._kick()

    def shard_of(self, publisher: str) -> int:
        return self._log.shard_of(LOG, publisher, "")[1] if self.by_publisher else 0

    def _add(
        self,
        publisher: str,
        shard: int,
        topics: list[str],
        payloads: list[bytes],
        flags: list[int],
        properties: Sequence[bytes | None] | None,
    ) -> None:
        batch = self._open
        into = batch.shards.get(shard)
        if into is None:
            into = batch.shards[shard] = _Shard()
        into.add(publisher, topics, payloads, flags, properties)
        batch.bytes += sum(map(len, payloads)) + 64 * len(topics)
        if max(flags, default=0) >= RETAIN:
            now = now_micros()
            for at, flag in enumerate(flags):
                if flag & RETAIN:
                    extra = properties[at] if properties is not None else None
                    batch.retained.append(Retained(topics[at], payloads[at], publisher, flag, extra, now))
        self._kick()

    def _kick(self) -> None:
        self._wake.set()

    # -- committing --------------------------------------------------------------------------------------

    async def run(self) -> None:
        """For ever."""
        loop = asyncio.get_running_loop()
        while True:
            await self._wake.wait()
            self._wake.clear()
            batch, self._open = self._open, OpenBatch(self.generation.number)
            waiting, self._waiting = self._waiting, []
            for connection in waiting:
                connection.read_on()
            if batch.empty:
                continue
            parts = {
                shard: Batch(c.topics, c.payloads, c.publishers, c.flags, c.properties)
                for shard, c in batch.shards.items()
            }
            now = now_micros()
            try:
                appended = None
                if parts:
                    for part in parts.values():
                        part.times = now
                    appended = await loop.run_in_executor(
                        self._thread, self._commit, batch.generation, parts, batch.retained
                    )
            except Exception as error:  # whatever it was: the publishers must hear of it, and the next batch goes on
                logger.error("nothing was stored: %s", error, exc_info=not isinstance(error, HoldfastError))
                self._tell_failed(batch, error)
                continue
            self.commits += 1
            try:
                if appended is not None:
                    self._committed(appended, parts, now)
            except Exception:  # it is stored: whoever published it hears so, and delivery reads it from the log
                logger.exception("what was stored could not be delivered at once")
            self._acknowledge(batch)

    def is_writing_here(self) -> bool:
        """Is this the writer's own thread, in the middle of a commit?"""
        return threading.get_ident() == self._writer

    def _commit(self, generation: int, parts: dict[int, Batch], retained: list[Retained]) -> Appended:
        """On the writer's thread."""
        self._writer = threading.get_ident()
        if self.by_publisher:
            appended = self._log.append_sharded(LOG, generation, parts, retained)
            if appended is not None:
                return appended
            self.generation = self._log.generations(LOG)[-1]
        # Sealed meanwhile, or sharded by topic: let the log sort the rows anew.
        whole = Batch(
            [t for p in parts.values() for t in p.topics],
            [x for p in parts.values() for x in p.payloads],
            [x for p in parts.values() for x in p.publishers],
            [f for p in parts.values() for f in p.flags],  # type: ignore[union-attr]
            [x for p in parts.values() for x in (p.properties or [None] * len(p))],
            next(iter(parts.values())).times,
        )
        parts.clear()
        appended = self._log.append(LOG, whole, retained=retained)
        for placed in appended.placed:
            rows = whole if placed.rows is None else whole.take(placed.rows)
            parts[placed.stream.shard] = rows
        return appended

    def _acknowledge(self, batch: OpenBatch) -> None:
        """One write per connection, in the order its publishes came."""
        asked = [inbox for connection, inbox in batch.acks if connection.version == 5 and inbox.packet_ids]
        heard = self._anyone_for({topic for inbox in asked for topic in inbox.topics}) if asked else None
        for connection, inbox in batch.acks:
            self.messages += len(inbox.topics)
            if inbox.packet_ids:
                connection.stored(inbox, heard)
        self._call_back(batch, True)

    def _call_back(self, batch: OpenBatch, ok: bool) -> None:
        for done in batch.after:
            try:
                done(ok)
            except Exception:  # one that fails must not keep the others waiting
                logger.exception("whoever waited for a commit could not be told")

    def _tell_failed(self, batch: OpenBatch, error: Exception) -> None:
        self._call_back(batch, False)
        for connection, _ in batch.acks:
            connection.store_failed()
        self._failed(error)

    async def drained(self) -> None:
        """Everything taken so far is durable or refused."""
        done: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self.in_turn(done.set_result)
        await done

    def close(self) -> None:
        self._thread.shutdown()
