"""Publishes of all connections into one open batch; one commit; then the acknowledgements, one write each.

While one batch is being committed on the writer's thread the next one fills up: the busier the node, the larger
the batches. Nobody is waited for: a commit begins as soon as the one before it is done and there is something to write.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import queue
import secrets
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple, Protocol

from holdfast.errors import HoldfastError
from holdfast.log import Appended, Log
from holdfast.log.clock import message_time
from holdfast.log.contract import NotTaken, ReceivedId, Retained
from holdfast.model import LOG, RETAIN, Batch
from holdfast.mqtt.fastpath import Inbox
from holdfast.mqtt.inbound import Inbound
from holdfast.sessions.receiving import Receiving


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

    def drop(self, rows: set[int]) -> None:
        """These were not to be stored after all."""
        columns: list[list[Any] | None] = [self.topics, self.payloads, self.publishers, self.flags, self.properties]
        for column in columns:
            if column is not None:
                column[:] = [value for at, value in enumerate(column) if at not in rows]


class Taken(NamedTuple):
    """One of them in a batch: which row it is, and who is told."""

    receiving: Receiving
    shard: int
    row: int
    told: int
    retained: Retained | None


class OpenBatch:
    """What waits for the next commit, and who is to be told when it has happened."""

    def __init__(self, generation: int) -> None:
        self.shards: dict[int, _Shard] = {}
        self.generation = generation
        """The one its shards are of, at most: a batch begun before a seal is sorted anew."""
        self.since: float | None = None
        """When the first of it came, by the monotonic clock."""
        self.bytes = 0
        self.acks: list[tuple[Publisher, Inbox]] = []
        self.after: list[Callable[[bool], None]] = []
        """Called with whether the commit happened, in order, after the plain acknowledgements."""
        self.retained: list[Retained] = []
        self.received: list[Taken] = []
        """Packet ids of QoS 2 publishes: stored with them, so that a repeat is known by whoever serves the client."""
        self.waited_for = False
        """The writer knows that there is something."""
        self.full: list[Publisher] = []
        """Connections that are not read from until this batch is on its way."""


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
        """Changed under the lock: the loop's thread fills it, the writer's takes it."""
        self._lock = threading.Lock()
        self._signals: queue.SimpleQueue[None] = queue.SimpleQueue()
        """To the writer: something waits."""
        self._under_way = 0
        """Batches that were taken from there and are not dealt with on the loop's thread yet."""
        self._loop = asyncio.get_running_loop()
        self._closed = False
        self.by_publisher = log.logs()[LOG] == "publisher"
        self._writer = 0
        self._writing: OpenBatch | None = None
        """What is being committed."""
        self._marks = itertools.count(secrets.randbits(60))
        self.messages = 0
        self.commits = 0

    # -- filling the open batch --------------------------------------------------------------------------

    def publish(self, connection: Publisher, publisher: str, shard: int, inbox: Inbox) -> bool:
        """Take a connection's publishes. False: enough waits already, do not read from it until told."""
        with self._lock:
            batch = self._open
            batch.acks.append((connection, inbox))
            self._add(batch, publisher, shard, inbox.topics, inbox.payloads, inbox.flags, inbox.properties)
            room = batch.bytes < self._bytes_max
            if not room:
                batch.full.append(connection)
            self._signal(batch)
        return room

    def publish_one(
        self,
        publisher: str,
        topic: str,
        payload: bytes,
        flags: int,
        properties: bytes | None,
        done: Callable[[bool], None] | None,
        received: Receiving | None = None,
    ) -> None:
        """Take one message from elsewhere (QoS 2, HTTP); `done` says whether it became durable."""
        shard = self.shard_of(publisher)
        with self._lock:
            batch = self._open
            self._add(batch, publisher, shard, [topic], [payload], [flags], [properties] if properties else None)
            if done is not None:
                batch.after.append(done)
            if received is not None:
                row, told = len(batch.shards[shard].topics) - 1, len(batch.after) - 1
                retained = batch.retained[-1] if flags & RETAIN else None
                batch.received.append(Taken(received, shard, row, told, retained))
            self._signal(batch)

    def receiving(self, client_id: str, inbound: Inbound, packet_id: int) -> Receiving:
        """A QoS 2 publish that is about to be taken."""
        mark = inbound.marks[packet_id] = next(self._marks)
        return Receiving(client_id, inbound, packet_id, mark)

    def in_turn(self, done: Callable[[bool], None]) -> None:
        """Call back after everything that is in the open batch now is durable."""
        with self._lock:
            self._open.after.append(done)
            self._signal(self._open)

    def shard_of(self, publisher: str) -> int:
        return self._log.shard_of(LOG, publisher, "")[1] if self.by_publisher else 0

    def _add(
        self,
        batch: OpenBatch,
        publisher: str,
        shard: int,
        topics: list[str],
        payloads: list[bytes],
        flags: list[int],
        properties: Sequence[bytes | None] | None,
    ) -> None:
        if batch.since is None:
            batch.since = time.monotonic()
        into = batch.shards.get(shard)
        if into is None:
            into = batch.shards[shard] = _Shard()
        into.add(publisher, topics, payloads, flags, properties)
        batch.bytes += sum(map(len, payloads)) + 64 * len(topics)
        if max(flags, default=0) >= RETAIN:
            for at, flag in enumerate(flags):
                if flag & RETAIN:
                    extra = properties[at] if properties is not None else None
                    batch.retained.append(Retained(topics[at], payloads[at], publisher, flag, extra, 0))

    def _signal(self, batch: OpenBatch) -> None:
        if not batch.waited_for:
            batch.waited_for = True
            self._signals.put(None)

    # -- committing --------------------------------------------------------------------------------------

    def write(self) -> None:
        """On a thread of its own, until `close`."""
        self._writer = threading.get_ident()
        while not self._closed:
            self._signals.get()
            with self._lock:
                batch, self._open = self._open, OpenBatch(self.generation.number)
                self._under_way += 1
            self._writing = batch
            self._write(batch)
            self._writing = None

    @property
    def waiting_seconds(self) -> float:
        """How long the publish that has waited longest has waited to become durable; 0: there is none."""
        since = (self._writing or self._open).since
        return 0.0 if since is None else time.monotonic() - since

    def _write(self, batch: OpenBatch) -> None:
        if batch.full:
            self._on_loop(self._read_on, batch.full)
        now = message_time()
        try:
            while True:
                ids = [taken.receiving.id() for taken in batch.received]
                try:
                    appended, parts = self._store(batch, ids, now)
                    break
                except NotTaken as error:
                    logger.info("%s", error)
                    _leave_out(batch, ids, error)
        except Exception as error:  # whatever it was: the publishers must hear of it, and the next batch goes on
            logger.error("nothing was stored: %s", error, exc_info=not isinstance(error, HoldfastError))
            self._on_loop(self._deal_with, self._tell_failed, batch, error)
        else:
            self._on_loop(self._deal_with, self._stored, batch, appended, parts, now)

    def _deal_with(self, call: Callable[..., None], *given: Any) -> None:
        try:
            call(*given)
        finally:
            with self._lock:
                self._under_way -= 1

    def _store(self, batch: OpenBatch, ids: list[ReceivedId], now: int) -> tuple[Appended | None, dict[int, Batch]]:
        parts = {
            shard: Batch(c.topics, c.payloads, c.publishers, c.flags, c.properties)
            for shard, c in batch.shards.items()
            if c.topics
        }
        if not parts:
            return None, parts
        for part in parts.values():
            part.times = now
        # The same time as in the log, by which a message is recognised when it has expired.
        retained = [last._replace(time=now) for last in batch.retained]
        return self._commit(batch.generation, parts, retained, ids), parts

    def _on_loop(self, call: Callable[..., None], *given: Any) -> None:
        with contextlib.suppress(RuntimeError):  # the loop has been closed: nobody is left to tell
            self._loop.call_soon_threadsafe(call, *given)

    def _read_on(self, publishers: list[Publisher]) -> None:
        for publisher in publishers:
            publisher.read_on()

    def _stored(self, batch: OpenBatch, appended: Appended | None, parts: dict[int, Batch], now: int) -> None:
        """On the loop's thread: first to the subscribers, then to the publishers."""
        self.commits += appended is not None
        try:
            if appended is not None:
                self._committed(appended, parts, now)
        except Exception:  # it is stored: whoever published it hears so, and delivery reads it from the log
            logger.exception("what was stored could not be delivered at once")
        self._acknowledge(batch)

    def is_writing_here(self) -> bool:
        """Is this the writer's own thread, in the middle of a commit?"""
        return threading.get_ident() == self._writer

    def _commit(
        self, generation: int, parts: dict[int, Batch], retained: list[Retained], received: list[ReceivedId]
    ) -> Appended:
        """On the writer's thread."""
        if self.by_publisher:
            appended = self._log.append_sharded(LOG, generation, parts, retained, received)
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
        appended = self._log.append(LOG, whole, retained=retained, received=received)
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
        """Everything taken so far is durable or refused, and delivered."""
        with self._lock:
            if not self._open.waited_for and not self._under_way:
                return
        done: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self.in_turn(done.set_result)
        await done

    def close(self) -> None:
        """Nothing is written any more."""
        self._closed = True
        self._signals.put(None)


def _leave_out(batch: OpenBatch, ids: list[ReceivedId], error: NotTaken) -> None:
    """Go on without these: they are stored already, or their sessions are somebody else's by now."""
    dropped: dict[int, set[int]] = {}
    kept: list[Taken] = []
    for one, taken in zip(ids, batch.received, strict=True):
        if one in error.fenced:
            batch.after[taken.told] = partial(_refuse, batch.after[taken.told])
        elif one in error.repeated:
            known = partial(_known, taken.receiving, error.repeated[one])
            batch.after[taken.told] = partial(known, batch.after[taken.told])
        else:
            kept.append(taken)
            continue
        dropped.setdefault(taken.shard, set()).add(taken.row)
        if taken.retained is not None:
            batch.retained = [last for last in batch.retained if last is not taken.retained]
    for shard, rows in dropped.items():
        batch.shards[shard].drop(rows)
    batch.received = [
        taken._replace(row=taken.row - sum(row < taken.row for row in dropped.get(taken.shard, ()))) for taken in kept
    ]


def _known(receiving: Receiving, mark: int, done: Callable[[bool], None], stored: bool) -> None:
    """It was stored before, and not by us: it is released under the mark that it has there."""
    receiving.inbound.marks[receiving.packet_id] = mark
    done(stored)


def _refuse(done: Callable[[bool], None], stored: bool) -> None:
    """Whatever became of the others."""
    done(False)
