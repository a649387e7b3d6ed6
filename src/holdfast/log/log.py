"""The log as everyone uses it: append batches, read streams, seal generations, hear of appends.

The same code over every store; what differs between stores is behind the seam in `contract.py`.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import NamedTuple

import pyarrow as pa

from holdfast.errors import CorruptBlock, RequestError, UnknownStream
from holdfast.log import blocks, index, small
from holdfast.log.cache import BlockCache
from holdfast.log.clock import SteadyClock, message_time
from holdfast.log.contract import (
    Appended,
    AppendKey,
    Backend,
    BlockEntry,
    Chunk,
    Data,
    Generation,
    Head,
    Landed,
    NewBlock,
    Placed,
    Reading,
    ReceivedId,
    Retained,
    Skipped,
)
from holdfast.log.manifest import Manifest
from holdfast.log.plan import Planner
from holdfast.log.watch import LogWatch, Watcher
from holdfast.model import (
    At,
    Batch,
    Beginning,
    Micros,
    Next,
    Since,
    Start,
    Stream,
    check_log_name,
)
from holdfast.restarts import Failure
from holdfast.topics import TopicFilter, Wanted, check_topic, prefixes

SHARDS = 16
SHARDS_MAX = 4096
ROWS_MAX = 65_536
BYTES_MAX = 64 << 20
_DIRECTORY_PAGE = 256
_FETCH_BYTES = 8 << 20
_TOPICS_REMEMBERED = 500_000


class Prepared(NamedTuple):
    """A batch as blocks of one generation, which are not stored yet."""

    log: str
    generation: int
    now: Micros
    blocks: list[NewBlock]
    topics: dict[str, int]
    """Those that may be new to the generation, with their hashes."""
    contents: list[Data | pa.RecordBatch]
    rows: list[Sequence[int] | None]


class Log:
    """Every log of one store. Safe to use from several threads."""

    def __init__(
        self,
        backend: Backend,
        watcher: Watcher,
        *,
        manifest: Manifest | None = None,
        on_close: Callable[[], None],
        clock: Callable[[], Micros] = message_time,
    ):
        self.backend = backend
        self.manifest = manifest
        """What the lake holds of these logs; None where the store can have no lake."""
        self.clock = clock
        self.steady: Callable[[], Micros] = SteadyClock(lambda: self.clock())
        """For whatever deletes what has become old."""
        self._on_close = on_close
        self.cache = BlockCache()
        self._watcher = watcher
        self._planner = Planner(backend)
        self._open: dict[str, tuple[str, Generation]] = {}
        self._known: dict[tuple[str, int], dict[str, int]] = {}
        """Topics already registered in a generation, with their hashes: what an append need not do again."""

    # -- logs and generations ------------------------------------------------------------------------

    def create(self, log: str, shards: int = SHARDS, shard_by: str = "publisher") -> None:
        """Create the log unless it exists. Shards of an existing log change with `seal` only."""
        check_log_name(log)
        _check_shards(shards)
        if shard_by not in ("publisher", "topic"):
            raise RequestError(f"shard_by {shard_by!r} is not known; it takes publisher or topic")
        self.backend.create_log(log, shards, shard_by, self.clock())

    def logs(self) -> dict[str, str]:
        """Every log, and what it shards by."""
        return self.backend.logs()

    def generations(self, log: str) -> list[Generation]:
        """The generations that are kept, oldest first; the last is the open one."""
        found = self.backend.generations(log)
        if not found:
            raise UnknownStream(f"there is no log {log!r}")
        return found

    def heads(self, log: str) -> list[Head]:
        """Every kept stream with its statistics, by generation and shard."""
        found = self.backend.heads(log)
        if not found:
            raise UnknownStream(f"there is no log {log!r}")
        return found

    def head(self, stream: Stream) -> Head:
        found = self.backend.head(stream)
        if found is None:
            raise UnknownStream(f"there is no stream {stream} (unknown, or dropped by retention)")
        return found

    def seal(self, log: str, shards: int | None = None) -> Generation:
        """Finalise the open generation and open the next; its readers are told when they reach the end."""
        if shards is not None:
            _check_shards(shards)
        self.generations(log)
        opened = self.backend.seal(log, shards, self.clock())
        self._open.pop(log, None)
        self._known = {at: topics for at, topics in self._known.items() if at[0] != log}
        self._watcher.tell(log, 0)
        return opened

    def drop(self, log: str, generation: int) -> None:
        """Drop a sealed generation, whole. Its room is freed by maintenance, in steps."""
        found = {g.number: g for g in self.generations(log)}
        if generation not in found:
            raise UnknownStream(f"log {log!r} keeps no generation {generation}")
        if found[generation].sealed_at is None:
            raise RequestError(f"generation {generation} of log {log!r} is open; seal it before dropping it")
        self.backend.drop(log, generation)
        self._watcher.tell(log, 0)

    # -- appending -----------------------------------------------------------------------------------

    def append(
        self,
        log: str,
        batch: Batch,
        *,
        expect: Mapping[int, int] | None = None,
        key: AppendKey | None = None,
        retained: Sequence[Retained] = (),
        received: Sequence[ReceivedId] = (),
    ) -> Appended:
        """Append a batch: one block per touched stream, all in one transaction, durable on return.

        `expect` names, by shard, the offset the next message must get (`ABSENT`: the stream must be empty).
        `key` makes a repeat recognisable: it changes nothing and returns what the first time returned.
        `retained` are last words on their topics, kept or cleared in the same transaction; `received` are packet
        ids that are remembered with it.
        """
        _check_columns(batch)
        while True:
            shard_by, generation = self._generation(log)
            split = self._split(batch, shard_by, generation.shards)
            if expect is not None:
                _check_expected(expect, generation.shards)
            appended = self._append(log, generation.number, split, expect or {}, key, retained, received)
            if appended is not None:
                return appended
            self.sealed(log)

    def append_sharded(
        self,
        log: str,
        generation: int,
        parts: Mapping[int, Batch],
        retained: Sequence[Retained] = (),
        received: Sequence[ReceivedId] = (),
    ) -> Appended | None:
        """As `append`, for a host that has sorted its rows by shard already; None: sealed meanwhile."""
        split = [(s, part, None) for s, part in parts.items()]
        return self._append(log, generation, split, {}, None, retained, received)

    def prepare(self, log: str, batch: Batch) -> Prepared:
        """Blocks for the open generation, for a transaction that changes more than the log.

        Whoever makes it says `landed` when it is committed; or `sealed`, if the generation took no more blocks, and
        prepares them anew.
        """
        _check_columns(batch)
        shard_by, generation = self._generation(log)
        return self._prepare(log, generation.number, self._split(batch, shard_by, generation.shards))

    def sealed(self, log: str) -> None:
        """The generation that was open takes no more blocks; the next one may shard differently."""
        self._open.pop(log, None)

    def shard_of(self, log: str, publisher: str, topic: str) -> tuple[int, int]:
        """The open generation, and the shard in it a message would go to."""
        shard_by, generation = self._generation(log)
        return generation.number, _shard(publisher if shard_by == "publisher" else topic, generation.shards)

    def _append(
        self,
        log: str,
        generation: int,
        split: Sequence[tuple[int, Batch, Sequence[int] | None]],
        expect: Mapping[int, int],
        key: AppendKey | None,
        retained: Sequence[Retained],
        received: Sequence[ReceivedId],
    ) -> Appended | None:
        made = self._prepare(log, generation, split)
        outcome = self.backend.append(
            log, generation, made.blocks, sorted(made.topics), expect, key, made.now, retained, received
        )
        if outcome is None:
            return None
        landed, repeated = outcome
        if repeated:
            return Appended(self._as_before(log, generation, landed, split), repeated=True)
        return self.landed(made, landed)

    def _prepare(self, log: str, generation: int, split: Sequence[tuple[int, Batch, Sequence[int] | None]]) -> Prepared:
        now = self.clock()
        known = self._known.setdefault((log, generation), {})
        made = Prepared(log, generation, now, [], {}, [], [])
        for shard, rows, rows_taken in split:
            hashes = index.pack(_hashes(rows.topics, known, made.topics))
            data, batch, oldest, newest = _block(rows, now)
            made.blocks.append(NewBlock(shard, len(rows), oldest, newest, blocks.checksum(data), hashes, data))
            made.contents.append(data if batch is None else batch)
            made.rows.append(rows_taken)
        return made

    def landed(self, made: Prepared, landed: Sequence[Landed]) -> Appended:
        """These blocks are durable: readers here find them in memory, and everyone who watches is told."""
        log, generation = made.log, made.generation
        known = self._known.setdefault((log, generation), {})
        if len(known) + len(made.topics) > _TOPICS_REMEMBERED:
            known.clear()
        known.update(made.topics)
        placed = []
        for place, recent, block, rows in zip(landed, made.contents, made.blocks, made.rows, strict=True):
            self.cache.put(place.body, recent, len(block.data))
            placed.append(Placed(Stream(log, block.shard, generation), place.base, place.messages, rows))
        self._watcher.tell(log, sum(place.messages for place in landed))
        return Appended(placed)

    def _as_before(
        self,
        log: str,
        generation: int,
        landed: Sequence[tuple[int, int, int, int]],
        split: Sequence[tuple[int, Batch, Sequence[int] | None]],
    ) -> list[Placed]:
        rows = {shard: taken for shard, _, taken in split}
        return [Placed(Stream(log, s, generation), base, count, rows.get(s)) for s, base, count, _ in landed]

    def _generation(self, log: str) -> tuple[str, Generation]:
        found = self._open.get(log)
        if found is None:
            generations = self.generations(log)
            found = self._open[log] = (self.backend.logs()[log], generations[-1])
        return found

    def _split(self, batch: Batch, shard_by: str, shards: int) -> list[tuple[int, Batch, Sequence[int] | None]]:
        names = batch.publishers if shard_by == "publisher" else batch.topics
        if isinstance(names, str):
            return [(_shard(names, shards), batch, None)]
        shard_of = {name: _shard(name, shards) for name in set(names)}
        if len(set(shard_of.values())) == 1:
            return [(next(iter(shard_of.values())), batch, None)]
        rows_of: dict[int, list[int]] = {}
        for row, name in enumerate(names):
            rows_of.setdefault(shard_of[name], []).append(row)
        return [(shard, batch.take(rows), rows) for shard, rows in sorted(rows_of.items())]

    def retained(self, log: str) -> list[Retained]:
        """The last words on each topic that has any."""
        return self.backend.retained(log)

    def forget_retained(self, log: str, gone: Sequence[tuple[str, Micros]]) -> None:
        """Forget the last words on these topics, each only if it still is the one of that time."""
        self.backend.forget_retained(log, gone)

    # -- reading -------------------------------------------------------------------------------------

    def read(
        self,
        stream: Stream,
        offset: int,
        *,
        topics: Wanted | str | None = None,
        rows_max: int = ROWS_MAX,
        bytes_max: int = BYTES_MAX,
        until: int | None = None,
        on_corrupt: str = "raise",
    ) -> Reading:
        """Read forwards from `offset`: matching rows as Arrow, up to a row and a byte limit, and before `until`.

        At least one row comes if there is one. A block that does not match its checksum raises CorruptBlock
        when it is the next thing to read, or, with `on_corrupt="skip"`, is recorded in `skipped`.
        """
        wanted = TopicFilter(topics) if isinstance(topics, str) else topics
        if rows_max < 1 or bytes_max < 1:
            raise RequestError(f"a read takes at least one row and one byte, not {rows_max} rows, {bytes_max} bytes")
        head = self.head(stream)
        _check_offset(stream, offset, head.next_offset)
        end = head.next_offset if until is None else min(until, head.next_offset)
        found = _Collector(stream, offset, wanted, rows_max, bytes_max, end)
        while found.next_offset < end and not found.full:
            entries, past = self._planner.page(head, found.next_offset, wanted, _DIRECTORY_PAGE)
            entries = [entry for entry in entries if entry.base < end]
            if not self._collect(found, entries, on_corrupt):
                continue  # merged under our hands: look the directory up again
            if not found.full:
                found.next_offset = max(found.next_offset, min(past, end))
        at_end = head.sealed and found.next_offset >= head.next_offset
        return Reading(found.chunks, found.next_offset, at_end, found.skipped, found.blocks_read)

    def _collect(self, found: _Collector, entries: Sequence[BlockEntry], on_corrupt: str) -> bool:
        """Take what fits from these blocks. False: one of them is no longer there."""
        at = 0
        while at < len(entries) and not found.full:
            take = _some(entries, at, found)
            bodies = self._bodies(found.stream, take, found)
            for entry in take:
                if entry.body not in bodies:
                    return False
                batch = bodies[entry.body]
                if batch is None:
                    if on_corrupt != "skip":
                        if not found.chunks:
                            raise CorruptBlock(found.stream, entry.base, entry.messages)
                        found.full = True
                    else:
                        found.skip(entry, "the block does not match its checksum")
                else:
                    found.take(entry, batch)
                if found.full:
                    if batch is not None and found.next_offset < entry.past:
                        self.cache.put(entry.body, batch, entry.bytes)  # whoever reads on begins with it
                    break
            at += len(take)
        return True

    def _bodies(
        self, stream: Stream, entries: Sequence[BlockEntry], found: _Collector
    ) -> dict[int, pa.RecordBatch | None]:
        """Decoded blocks by body id, None for a corrupt one, missing if merged away."""
        cached = {e.body: self.cache.get(e.body) for e in entries}
        missing = [e for e in entries if cached[e.body] is None]
        found.blocks_read += len(entries)
        result: dict[int, pa.RecordBatch | None] = {b: batch for b, batch in cached.items() if batch is not None}
        if missing:
            stored = self.backend.bodies([e.body for e in missing])
            for entry in missing:
                if entry.body in stored:
                    result[entry.body] = _open_block(stored[entry.body], entry)
        return result

    def streams(self, log: str, topics: Wanted | str | None = None) -> list[Head]:
        """The streams in which matching messages are, or may still come, oldest generation first."""
        wanted = TopicFilter(topics) if isinstance(topics, str) else topics
        heads = self.heads(log)
        if wanted is None:
            return heads
        shard_by = self.backend.logs()[log]
        shards = {g.number: g.shards for g in self.backend.generations(log)}
        alive: dict[int, bool] = {}
        found = []
        for head in heads:
            number = head.stream.generation
            if shard_by == "topic" and wanted.exact and head.stream.shard != _shard(wanted.text, shards[number]):
                continue
            if head.sealed and number not in alive:
                begins = prefixes({part.prefix for part in wanted.parts})
                alive[number] = any(wanted.matching(self.backend.topics(log, number, begin)) for begin in begins)
            if alive.get(number, True):
                found.append(head)
        return found

    def positions(self, log: str, start: Start, topics: Wanted | str | None = None) -> dict[Stream, int]:
        """Where a reader that starts there begins, stream by stream, oldest generation first."""
        return {head.stream: self.position(head, start) for head in self.streams(log, topics)}

    def position(self, head: Head, start: Start) -> int:
        """Where a reader that starts there begins in this stream."""
        match start:
            case Beginning():
                return 0
            case Next():
                return head.next_offset
            case Since():
                return self.offset_at(head, start.micros)
            case At():
                offset = start.offsets.get(head.stream, 0 if start.every is None else start.every)
                if offset < 0:
                    raise RequestError(f"offset {offset} of {head.stream} is negative; offsets begin at 0")
                return min(offset, head.next_offset)

    def offset_at(self, head: Head, time: Micros) -> int:
        """The first offset whose message has this time or a later one; the end if there is none."""
        if head.newest is None or head.newest < time:
            return head.next_offset
        # Blocks carry the newest time up to and including them, so the first that reaches `time` holds it.
        low, high = 0, head.next_offset - 1
        while low < high:
            middle = (low + high) // 2
            entry = self.backend.entries(head.id, middle, 1)[0]
            if entry.newest >= time:
                high = min(high, max(entry.base, low))
            else:
                low = entry.past
        entry = self.backend.entries(head.id, low, 1)[0]
        while True:
            bodies = self.backend.bodies([entry.body])
            if entry.body in bodies:
                break
            entry = self.backend.entries(head.id, low, 1)[0]
        batch = _open_block(bodies[entry.body], entry)
        if batch is None:
            return entry.base  # whoever reads there is told of the corrupt block
        times = batch.column(blocks.TIME).cast(pa.int64()).to_numpy()
        return entry.base + int((times >= time).argmax())

    def scan(
        self,
        log: str,
        start: Start = Beginning(),  # noqa: B008
        topics: Wanted | str | None = None,
    ) -> Iterator[Chunk]:
        """Everything that matches, stream by stream, up to where each stream ended when it was reached."""
        wanted = TopicFilter(topics) if isinstance(topics, str) else topics
        for stream, offset in self.positions(log, start, wanted).items():
            with suppress(UnknownStream):  # dropped by retention while we were reading others
                end = self.head(stream).next_offset
                while offset < end:
                    reading = self.read(stream, offset, topics=wanted)
                    yield from reading.chunks
                    offset = reading.next_offset

    # -- watching ------------------------------------------------------------------------------------

    def watch(self, callback: Callable[[str], None]) -> LogWatch:
        """Have `callback(log)` called after appends, seals and drops, by any process, until closed.

        A hint, never a promise: it may come late, twice, or once for several commits. It is called on the
        thread that made the append, or on the watcher's; it must be quick and must not raise.
        """
        return self._watcher.add(callback)

    @property
    def watch_failure(self) -> Failure | None:
        """Why hints of other processes' appends are missing; None: all is well."""
        return self._watcher.failure

    def close(self) -> None:
        """Close the store, and with it everything got from it."""
        self._on_close()

    def __enter__(self) -> Log:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _Collector:
    """Gathers rows until a limit is reached."""

    def __init__(self, stream: Stream, offset: int, wanted: Wanted | None, rows_max: int, bytes_max: int, end: int):
        self.stream, self.wanted, self._end = stream, wanted, end
        self.next_offset = offset
        self.rows_left, self.bytes_left = rows_max, bytes_max
        self.chunks: list[Chunk] = []
        self.skipped: list[Skipped] = []
        self.blocks_read = 0
        self.full = False

    def take(self, entry: BlockEntry, batch: pa.RecordBatch) -> None:
        first = max(0, self.next_offset - entry.base)
        rows = None
        if self.wanted is not None:
            rows = blocks.matching_rows(batch, self.wanted)
        last = min(batch.num_rows, self._end - entry.base)
        if rows is None:
            take = min(self.rows_left, last - first)
            part = batch.slice(first, take) if first or take < batch.num_rows else batch
            past = entry.base + first + part.num_rows
        else:
            if first:
                rows = rows.filter(pa.compute.greater_equal(rows, first))
            if last < batch.num_rows:
                rows = rows.filter(pa.compute.less(rows, last))
            cut = len(rows) > self.rows_left
            rows = rows.slice(0, self.rows_left) if cut else rows
            past = entry.base + rows[-1].as_py() + 1 if cut else entry.base + last
            part = batch.take(rows)
        part, rows, past = self._fit(entry, part, rows, first, past)
        if part.num_rows:
            self.chunks.append(Chunk(self.stream, entry.base, rows, first, part))
            self.rows_left -= part.num_rows
            self.bytes_left -= _weight(entry, part)
        self.next_offset = past
        self.full = self.full or self.rows_left <= 0 or self.bytes_left <= 0

    def _fit(
        self, entry: BlockEntry, part: pa.RecordBatch, rows: pa.Int64Array | None, first: int, past: int
    ) -> tuple[pa.RecordBatch, pa.Int64Array | None, int]:
        """Cut to the bytes that are left, but never to nothing while nothing has been taken."""
        if part.num_rows == 0 or _weight(entry, part) <= self.bytes_left:
            return part, rows, past
        weight = pa.compute.cumulative_sum(pa.compute.binary_length(part.column(blocks.PAYLOAD)).cast(pa.int64()))
        fits = int(pa.compute.sum(pa.compute.less_equal(weight, self.bytes_left)).as_py() or 0)
        fits = max(fits, 0 if self.chunks else 1)
        self.full = True
        if fits == part.num_rows:
            return part, rows, past
        if rows is None:
            return part.slice(0, fits), None, entry.base + first + fits
        past = entry.base + int(rows[fits].as_py())
        return part.slice(0, fits), rows.slice(0, fits), past

    def skip(self, entry: BlockEntry, reason: str) -> None:
        first = max(self.next_offset, entry.base)
        past = min(entry.past, self._end)
        self.skipped.append(Skipped(self.stream, first, past, reason))
        self.next_offset = past


def _weight(entry: BlockEntry, part: pa.RecordBatch) -> int:
    return entry.bytes * int(part.num_rows) // entry.messages


def _some(entries: Sequence[BlockEntry], at: int, found: _Collector) -> Sequence[BlockEntry]:
    """As many blocks as are worth fetching in one go."""
    room = min(found.bytes_left, _FETCH_BYTES)
    rows = found.rows_left if found.wanted is None else ROWS_MAX
    end = at
    while end < len(entries) and (end == at or (entries[end].bytes <= room and rows > 0)):
        room -= entries[end].bytes
        rows -= entries[end].messages
        end += 1
    return entries[at:end]


def _block(rows: Batch, now: Micros) -> tuple[Data, pa.RecordBatch | None, Micros, Micros]:
    """The block of these rows, also as Arrow if it was made by Arrow; their oldest and newest time."""
    if len(rows) <= small.FEW:
        # What it cannot write, Arrow perhaps can; if not, Arrow says what is wrong.
        with suppress(AttributeError, TypeError, ValueError, OverflowError, struct.error):
            data, oldest, newest = small.encode(rows, now)
            return data, None, oldest, newest
    try:
        batch, oldest, newest = blocks.record_batch(rows, now)
    except (pa.ArrowException, TypeError, ValueError, OverflowError) as error:
        raise RequestError(f"the batch has a value that cannot be stored: {error}") from error
    return blocks.encode(batch), batch, oldest, newest


def _open_block(data: bytes | memoryview, entry: BlockEntry) -> pa.RecordBatch | None:
    if blocks.checksum(data) != entry.checksum:
        return None
    batch = blocks.decode(data)
    return batch if batch.num_rows == entry.messages else None


def _shard(name: str, shards: int) -> int:
    # A name that is not valid Unicode is refused later on, where it can be named.
    return zlib.crc32(name.encode(errors="surrogatepass")) % shards


def _hashes(topics: Sequence[str], known: dict[str, int], fresh: dict[str, int]) -> list[int]:
    """The hashes of the distinct topics; those not seen before are validated and noted in `fresh`."""
    distinct = set(topics)
    try:
        return [known[topic] for topic in distinct]
    except KeyError:
        pass
    for topic in distinct:
        if topic not in known and topic not in fresh:
            fresh[topic] = index.topic_hash(check_topic(topic))
    return [known[topic] if topic in known else fresh[topic] for topic in distinct]


def _check_columns(batch: Batch) -> None:
    count = len(batch.topics)
    if count == 0:
        raise RequestError("the batch is empty; append at least one message")
    columns = {
        "payloads": batch.payloads,
        "publishers": None if isinstance(batch.publishers, str) else batch.publishers,
        "flags": None if isinstance(batch.flags, int) else batch.flags,
        "properties": batch.properties,
        "times": None if batch.times is None or isinstance(batch.times, int) else batch.times,
    }
    for name, column in columns.items():
        if column is not None and len(column) != count:
            raise RequestError(f"the batch has {count} topics but {len(column)} {name}")


def _check_expected(expect: Mapping[int, int], shards: int) -> None:
    for shard, offset in expect.items():
        if not 0 <= shard < shards:
            raise RequestError(f"shard {shard} is not one of this log's {shards}")
        if offset < 0:
            raise RequestError(f"expected offset {offset} of shard {shard} is negative; offsets begin at 0")


def _check_offset(stream: Stream, offset: int, end: int) -> None:
    if offset < 0:
        raise RequestError(f"offset {offset} of {stream} is negative; offsets begin at 0")
    if offset > end:
        raise RequestError(f"offset {offset} of {stream} is past its end, which is {end}")


def _check_shards(shards: int) -> None:
    if not 1 <= shards <= SHARDS_MAX:
        raise RequestError(f"{shards} shards are not possible; a log has 1 to {SHARDS_MAX}")
