"""From a commit to the sessions that want it, and from the log to the sessions that are behind.

`heads` says how far each stream has been dispatched. Everything here runs on the loop's thread, so a session that
has read up to `heads` is live from that moment on, and nothing falls between.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

from holdfast.errors import HoldfastError, UnknownStream
from holdfast.log import Appended, Chunk, Log
from holdfast.log import blocks as columns
from holdfast.log.history import History
from holdfast.model import Batch, Stream
from holdfast.mqtt.trie import Trie
from holdfast.runtime.ingest import LOG
from holdfast.sessions.session import Gap, Rows, Session
from holdfast.topics import Wanted

if TYPE_CHECKING:
    from holdfast.runtime.connection import Connection
    from holdfast.sessions.shared import LoanFeed

logger = logging.getLogger("holdfast.dispatch")

READ_ROWS = 8192
READERS = 2


class Dispatcher:
    def __init__(self, log: Log, on_rows: Callable[[Rows], None], pending_bytes_max: int):
        self._log = log
        self._pending_bytes_max = pending_bytes_max
        """What may wait in memory for one session; beyond that it waits in the log."""
        self._on_rows = on_rows
        self.live: Trie[Connection] = Trie()
        """Connected sessions by filter: what a commit is matched against."""
        self.away: Trie[str] = Trie()
        """Filters of durable sessions that are not connected: only to tell publishers that somebody listens."""
        self.shared: Trie[str] = Trie()
        """Filters of the loans that are being read here."""
        self._feeds: dict[Stream, dict[str, list[tuple[LoanFeed, Connection]]]] = {}
        self._filters: Counter[str] = Counter()
        self.on_streams_changed: Callable[[], None] = lambda: None
        self.heads: dict[Stream, int] = {}
        self.sealed: set[Stream] = set()
        self.lake: dict[Stream, int] = {}
        """Streams that only the lake still holds, and where they end."""
        self.history = History(log)
        self._early: dict[Stream, dict[int, Rows]] = {}
        """Our own blocks that came before other processes' blocks in front of them were read."""
        self._pool = ThreadPoolExecutor(READERS, "holdfast-reader")
        self._hungry: deque[Connection] = deque()
        self._reading = 0
        self._look_again = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self.delivered = 0

    def start(self) -> None:
        self.refresh()
        self._task = asyncio.create_task(self._follow(), name="follow")

    @property
    def known(self) -> dict[Stream, int]:
        """How far every stream can be read, the lake's included."""
        return {**self.lake, **self.heads} if self.lake else self.heads

    def look_at_lake(self) -> None:
        """Which streams the store has dropped and the lake still has (takes a look into the store)."""
        self.lake = {h.stream: h.next_offset for h in self.history.heads(LOG) if h.stream not in self.heads}

    def refresh(self) -> None:
        """Take the streams as they are now as dispatched. Only before anyone is connected."""
        for head in self._log.heads(LOG):
            self.heads[head.stream] = head.next_offset
            if head.sealed:
                self.sealed.add(head.stream)
        self.look_at_lake()

    # -- from our own commits ----------------------------------------------------------------------------

    def committed(self, appended: Appended, parts: dict[int, Batch], now: int) -> set[str]:
        """Blocks this node has just stored. Which of their topics anybody is subscribed to."""
        heard: set[str] = set()
        for placed in appended.placed:
            stream, batch = placed.stream, parts[placed.stream.shard]
            rows = Rows(stream, range(placed.base, placed.base + placed.count), batch, now)
            head = self.heads.get(stream)
            if head is None:
                head = -1  # a new generation: first what is left of the old one, which others may have added to
            if placed.base == head:
                heard |= self._dispatch(rows)
                self._dispatch_early(stream)
            else:
                heard.update(topic for topic in set(batch.topics) if self.live.match(topic))
            if placed.base > head:
                self._early.setdefault(stream, {})[placed.base] = rows
                self._look_again.set()
        for others in (self.away, self.shared):
            if len(others):
                for batch in parts.values():
                    heard.update(topic for topic in set(batch.topics) if topic not in heard and others.match(topic))
        return heard

    def _dispatch_early(self, stream: Stream) -> None:
        early = self._early.get(stream)
        for base in [base for base in early or () if base < self.heads[stream]]:
            del self._early[stream][base]  # overtaken: it was read from the log
        while early:
            rows = early.pop(self.heads[stream], None)
            if rows is None:
                return
            self._dispatch(rows)
        self._early.pop(stream, None)

    def _dispatch(self, rows: Rows) -> set[str]:
        """Offer a block to every live session that wants any of it; the topics that were wanted."""
        topics = rows.topics
        stream = rows.stream
        assert stream is not None
        self._on_rows(rows)
        distinct = set(topics)
        past = rows.offsets[-1] + 1
        if self._feeds and (feeds := self._feeds.get(stream)):
            self._offer_loans(rows, distinct, feeds, past)
        match = self.live.match
        hits = {topic: found for topic in distinct if (found := match(topic))}
        self.heads[stream] = past
        if not hits:
            return set()
        first = next(iter(hits.values()))
        if len(first) == 1 and len(hits) == len(distinct) and all(found == first for found in hits.values()):
            self._offer(first[0], rows, range(len(topics)))
            return set(hits)
        picks: dict[Connection, list[int]] = {}
        for at, topic in enumerate(topics):
            for connection in hits.get(topic, ()):
                mine = picks.get(connection)
                if mine is None:
                    picks[connection] = [at]
                elif mine[-1] != at:  # two filters of one session may match the same message
                    mine.append(at)
        for connection, mine in picks.items():
            self._offer(connection, rows, mine)
        return set(hits)

    def _offer(self, connection: Connection, rows: Rows, picks: Sequence[int]) -> None:
        session = connection.session
        if session is None:
            return
        if session.offer(rows, picks, self._pending_bytes_max):
            connection.pump()
        elif not connection.reading:
            self.feed(connection)

    # -- loans of shared groups ---------------------------------------------------------------------------

    def add_feed(self, feed: LoanFeed, connection: Connection) -> None:
        """A loan begins: read from the log until it has caught up, then from commits."""
        if not self._filters[feed.filter]:
            self.shared.add(feed.filter, feed.filter)
        self._filters[feed.filter] += 1
        self._feeds.setdefault(feed.stream, {}).setdefault(feed.filter, []).append((feed, connection))
        self._settle(feed)
        if not feed.live:
            self.feed_loan(feed, connection)

    def remove_feed(self, feed: LoanFeed) -> None:
        by_filter = self._feeds.get(feed.stream, {})
        kept = [pair for pair in by_filter.get(feed.filter, ()) if pair[0] is not feed]
        if len(kept) == len(by_filter.get(feed.filter, ())):
            return
        if kept:
            by_filter[feed.filter] = kept
        else:
            del by_filter[feed.filter]
            if not by_filter:
                del self._feeds[feed.stream]
        self._filters[feed.filter] -= 1
        if not self._filters[feed.filter]:
            del self._filters[feed.filter]
            self.shared.remove(feed.filter, feed.filter)

    def _settle(self, feed: LoanFeed) -> None:
        feed.live = feed.next_offset >= self.known.get(feed.stream, 0)

    def _offer_loans(
        self, rows: Rows, distinct: set[str], feeds: dict[str, list[tuple[LoanFeed, Connection]]], past: int
    ) -> None:
        meant: dict[str, set[str]] = {}
        for topic in distinct:
            for filter_text in self.shared.match(topic):
                if filter_text in feeds:
                    meant.setdefault(filter_text, set()).add(topic)
        for filter_text, topics in meant.items():
            whole = len(topics) == len(distinct)
            picks = range(len(rows.topics)) if whole else [i for i, t in enumerate(rows.topics) if t in topics]
            for feed, connection in list(feeds[filter_text]):
                if feed.live and not feed.stopped:
                    self._offer_loan(feed, connection, rows, picks, past)

    def _offer_loan(self, feed: LoanFeed, connection: Connection, rows: Rows, picks: Sequence[int], past: int) -> None:
        session = connection.session
        if session is None:
            return
        if session.ready_rows and session.ready_bytes > self._pending_bytes_max:
            feed.live = False  # what comes now is read from the log when there is room
            connection.slow_loans[feed] = None
            return
        session.put_ready(rows, feed.choose(rows, picks, past), feed)
        connection.pump()

    def feed_loan(self, feed: LoanFeed, connection: Connection) -> None:
        """Read on for a loan that is behind."""
        if feed.reading or feed.stopped or feed.live or connection.closed:
            return
        feed.reading = True
        loop = asyncio.get_running_loop()
        reading = loop.run_in_executor(self._pool, self._read_loan, feed, self.heads.get(feed.stream))
        reading.add_done_callback(lambda done: self._loan_fed(feed, connection, done))

    def _read_loan(self, feed: LoanFeed, until: int | None) -> tuple[int, int, list[Rows]]:
        """On a reader's thread."""
        at = feed.next_offset
        try:
            reading = self._log.read(
                feed.stream,
                at,
                topics=feed.wanted,
                rows_max=READ_ROWS,
                bytes_max=self._pending_bytes_max,
                until=until,
                on_corrupt="skip",
            )
        except UnknownStream:
            try:
                reading = self.history.read(
                    feed.stream, at, topics=feed.wanted, rows_max=READ_ROWS, bytes_max=self._pending_bytes_max
                )
            except UnknownStream:
                return at, -1, []  # dropped: the leader will hear of it and take the loan back
        for skip in reading.skipped:
            logger.error("group loan %s: offsets %d..%d: %s", feed.loan, skip.first, skip.past - 1, skip.reason)
        return at, reading.next_offset, [rows_of(chunk) for chunk in reading.chunks]

    def _loan_fed(
        self, feed: LoanFeed, connection: Connection, done: asyncio.Future[tuple[int, int, list[Rows]]]
    ) -> None:
        feed.reading = False
        session = connection.session
        if done.cancelled() or feed.stopped or session is None:
            return
        try:
            at, past, found = done.result()
        except HoldfastError as error:
            logger.warning("cannot read for %s: %s", feed.loan, error)
            asyncio.get_running_loop().call_later(0.5, self.feed_loan, feed, connection)
            return
        if past < 0 or at != feed.next_offset:
            return
        for rows in found:
            session.put_ready(rows, feed.choose(rows, range(len(rows.topics)), rows.offsets[-1] + 1), feed)
        feed.catch_up(past)
        self._settle(feed)
        session.touched[feed] = None  # what did not match on the way is news, even if nothing is sent of it
        connection.pump()
        if not feed.live:
            connection.slow_loans[feed] = None

    # -- from other processes' commits -------------------------------------------------------------------

    def hint(self) -> None:
        """Somebody else appended (called on the loop's thread)."""
        self._look_again.set()

    async def _follow(self) -> None:
        """Read and dispatch what other processes append, in order."""
        loop = asyncio.get_running_loop()
        while True:
            await self._look_again.wait()
            self._look_again.clear()
            try:
                heads = await loop.run_in_executor(self._pool, self._log.heads, LOG)
                kept = {head.stream for head in heads}
                changed = kept != self.heads.keys()
                for stream in [s for s in self.heads if s not in kept]:
                    del self.heads[stream]  # dropped by retention
                    self.sealed.discard(stream)
                for head in heads:
                    self.heads.setdefault(head.stream, 0)
                    await self._catch_up_with(head.stream, head.next_offset)
                    if head.sealed:  # only now: a stream is done with once it has been dispatched to its end
                        self.sealed.add(head.stream)
                if changed:
                    await loop.run_in_executor(self._pool, self.look_at_lake)
                    self.on_streams_changed()
            except HoldfastError as error:
                logger.warning("cannot follow the log: %s", error)
                await asyncio.sleep(0.5)
                self._look_again.set()

    async def _catch_up_with(self, stream: Stream, end: int) -> None:
        loop = asyncio.get_running_loop()
        self._dispatch_early(stream)
        while self.heads.get(stream, end) < end:
            at = self.heads[stream]
            stop = min([base for base in self._early.get(stream, ()) if base > at], default=end)
            reading = await loop.run_in_executor(self._pool, self._read_all, stream, at, min(stop - at, READ_ROWS))
            if self.heads.get(stream) != at:
                continue  # a commit of our own came in between and settled it
            for rows in reading:
                self._dispatch(rows)
            if not reading:
                self.heads[stream] = stop
            self._dispatch_early(stream)

    def _read_all(self, stream: Stream, at: int, rows_max: int) -> list[Rows]:
        """On a reader's thread."""
        reading = self._log.read(stream, at, rows_max=rows_max, on_corrupt="skip")
        return [rows_of(chunk) for chunk in reading.chunks]

    # -- sessions that are behind ------------------------------------------------------------------------

    def feed(self, connection: Connection) -> None:
        """Read on for this session, when a reader is free."""
        session = connection.session
        if connection.reading or session is None or not session.behind or session.wanted is None:
            return
        connection.reading = True
        self._hungry.append(connection)
        self._feed_next()

    def _feed_next(self) -> None:
        while self._hungry and self._reading < READERS:
            connection = self._hungry.popleft()
            session = connection.session
            stream = session.next_to_read() if session is not None and not connection.closed else None
            if session is None or stream is None:
                connection.reading = False
                continue
            self._reading += 1
            loop = asyncio.get_running_loop()
            # No further than has been dispatched: what is committed beyond that will be offered.
            until = self.known.get(stream)
            at, wanted = session.behind[stream], session.wanted
            reading = loop.run_in_executor(self._pool, self._read, stream, at, until, wanted)
            reading.add_done_callback(
                lambda done, c=connection, s=session, t=stream, w=wanted: self._fed(c, s, t, w, done)  # type: ignore[misc]
            )

    def _read(
        self, stream: Stream, at: int, until: int | None, wanted: Wanted | None
    ) -> tuple[int, int, list[Rows], list[Gap]]:
        """On a reader's thread: from, to (-1: the stream is gone), rows, what could not be read."""
        try:
            reading = self._log.read(
                stream,
                at,
                topics=wanted,
                rows_max=READ_ROWS,
                bytes_max=self._pending_bytes_max,
                until=until,
                on_corrupt="skip",
            )
        except UnknownStream as error:
            try:
                reading = self.history.read(
                    stream, at, topics=wanted, rows_max=READ_ROWS, bytes_max=self._pending_bytes_max
                )
            except UnknownStream:
                return at, -1, [], [Gap(str(stream), at, None, str(error), time.time())]
        lost = [Gap(str(s), first, past, reason, time.time()) for s, first, past, reason in reading.skipped]
        return at, reading.next_offset, [rows_of(chunk) for chunk in reading.chunks], lost

    def _fed(
        self,
        connection: Connection,
        session: Session,
        stream: Stream,
        wanted: Wanted | None,
        done: asyncio.Future[tuple[int, int, list[Rows], list[Gap]]],
    ) -> None:
        self._reading -= 1
        connection.reading = False
        try:
            at, past, found, lost = done.result()
        except HoldfastError as error:
            logger.warning("cannot read %s for %s: %s", stream, session.client_id, error)
            asyncio.get_running_loop().call_later(0.5, self.feed, connection)
        else:
            same = connection.session is session and not connection.closed and session.behind.get(stream) == at
            # Read for other filters than the session has now, it says nothing about those: read it again.
            if same and session.wanted is wanted:
                for skip in lost:
                    logger.warning(
                        "%s: skipped %s from %d: %s", session.client_id, skip.stream, skip.first, skip.reason
                    )
                session.skipped += lost
                for rows in found:
                    session.put_ready(rows, session.pick(rows))
                if past < 0:
                    del session.behind[stream]
                else:
                    session.behind[stream] = past
                    session.caught_up(stream, self.known)
                    session.dirty.add(stream)
            connection.pump()
        self._feed_next()

    def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
        self._pool.shutdown(cancel_futures=True)


def rows_of(chunk: Chunk) -> Rows:
    """A chunk's columns as Python values: what the sending loop works on."""
    batch = chunk.batch
    words = batch.column(columns.TOPIC)
    names = words.dictionary.to_pylist()
    people = batch.column(columns.PUBLISHER)
    publishers = people.dictionary.to_pylist()
    properties = batch.column(columns.PROPERTIES)
    first = chunk.base + chunk.first
    return Rows(
        chunk.stream,
        range(first, first + batch.num_rows) if chunk.rows is None else chunk.offsets(),
        Batch(
            topics=[names[code] for code in words.indices.to_pylist()],
            payloads=batch.column(columns.PAYLOAD).to_pylist(),
            publishers=publishers[0] if len(publishers) == 1 else [publishers[c] for c in people.indices.to_pylist()],
            flags=batch.column(columns.FLAGS).to_pylist(),
            properties=None if properties.null_count == len(properties) else properties.to_pylist(),
        ),
        batch.column(columns.TIME).cast("int64").to_pylist(),
    )
