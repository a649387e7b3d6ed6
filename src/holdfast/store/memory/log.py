"""The log in memory: the same promises without the disk, for trials and tests."""

from __future__ import annotations

import bisect
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from holdfast.errors import UnknownStream
from holdfast.log.contract import (
    AppendKey,
    BlockEntry,
    Data,
    Generation,
    Head,
    Landed,
    NewBlock,
    NotTaken,
    ReceivedId,
    Retained,
    Run,
    check_epochs,
    check_expected,
)
from holdfast.model import Micros, Stream


@dataclass(slots=True)
class _MemoryStream:
    id: int
    name: Stream
    next_offset: int = 0
    bytes: int = 0
    oldest: Micros | None = None
    newest: Micros | None = None
    sealed: bool = False
    entries: list[BlockEntry] = field(default_factory=list)
    runs: list[Run] = field(default_factory=list)

    def head(self) -> Head:
        return Head(self.id, self.name, self.next_offset, self.bytes, self.oldest, self.newest, self.sealed)

    def at(self, offset: int) -> int:
        """The place of the entry that holds `offset`, or of the first after it."""
        place = max(0, bisect.bisect_right(self.entries, offset, key=lambda e: e.base) - 1)
        return place + (place < len(self.entries) and self.entries[place].past <= offset)


class MemoryLog:
    """The seam of `contract.py` in dictionaries, under one lock."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        """Guards everything here, and what else changes together with a log."""
        self._logs: dict[str, str] = {}
        self._generations: dict[str, dict[int, Generation]] = {}
        self._streams: dict[Stream, _MemoryStream] = {}
        self._by_id: dict[int, _MemoryStream] = {}
        self._bodies: dict[int, tuple[bytes, Data]] = {}
        self._topics: dict[tuple[str, int], set[str]] = {}
        self._writers: dict[str, tuple[int, list[Landed], Micros]] = {}
        self._retained: dict[tuple[str, str], Retained] = {}
        self.received: dict[str, dict[tuple[str, int], int]] = {}
        """By client id: marks by `born` of the session and packet id."""
        self.epoch_of: Callable[[str], int | None] = lambda client_id: None
        """The epoch of a session's row."""
        self._last_body = 0

    def create_log(self, log: str, shards: int, shard_by: str, now: Micros) -> None:
        with self.lock:
            if log not in self._logs:
                self._logs[log] = shard_by
                self._generations[log] = {}
                self._open(log, Generation(1, shards, now, None))

    def _open(self, log: str, generation: Generation) -> None:
        self._generations[log][generation.number] = generation
        self._topics[log, generation.number] = set()
        for shard in range(generation.shards):
            name = Stream(log, shard, generation.number)
            stream = _MemoryStream(max(self._by_id, default=0) + 1, name)
            self._streams[name] = self._by_id[stream.id] = stream

    def logs(self) -> dict[str, str]:
        with self.lock:
            return dict(sorted(self._logs.items()))

    def generations(self, log: str) -> list[Generation]:
        with self.lock:
            return list(self._generations.get(log, {}).values())

    def heads(self, log: str) -> list[Head]:
        with self.lock:
            found = [s.head() for s in self._streams.values() if s.name.log == log]
            return sorted(found, key=lambda head: (head.stream.generation, head.stream.shard))

    def head(self, stream: Stream) -> Head | None:
        with self.lock:
            found = self._streams.get(stream)
            return found.head() if found else None

    def append(
        self,
        log: str,
        generation: int,
        blocks: Sequence[NewBlock],
        topics: Sequence[str],
        expect: Mapping[int, int],
        key: AppendKey | None,
        now: Micros,
        retained: Sequence[Retained] = (),
        received: Sequence[ReceivedId] = (),
    ) -> tuple[list[Landed], bool] | None:
        with self.lock:
            if key is not None:
                sequence, placed, _ = self._writers.get(key.writer, (-1, [], 0))
                if sequence >= key.sequence:
                    return (placed if sequence == key.sequence else []), True
            check_epochs(received, {one.client_id: self.epoch_of(one.client_id) for one in received})
            stored = {one: self.received.get(one.client_id, {}).get(one[1:3]) for one in received}
            repeated = {one: mark for one, mark in stored.items() if mark is not None}
            streams = [self._streams.get(Stream(log, block.shard, generation)) for block in blocks]
            for block, stream in zip(blocks, streams, strict=True):
                if stream is None or stream.sealed:
                    return None
                check_expected(expect, block.shard, stream.next_offset, log)
            if repeated:
                raise NotTaken((), repeated)
            landed = []
            for block, stream in zip(blocks, streams, strict=True):
                assert stream is not None
                base = stream.next_offset
                stream.newest = max(stream.newest or 0, block.newest)
                stream.oldest = block.oldest if stream.oldest is None else min(stream.oldest, block.oldest)
                entry = self._store(base, stream.newest, block)
                stream.entries.append(entry)
                stream.next_offset += block.messages
                stream.bytes += entry.bytes
                landed.append(Landed(block.shard, base, block.messages, entry.body))
            self._topics[log, generation].update(topics)
            for last in retained:
                self._retained.pop((log, last.topic), None)
                if last.payload:
                    self._retained[log, last.topic] = last
            for one in received:
                self.received.setdefault(one.client_id, {})[one.born, one.packet_id] = one.mark
            if key is not None:
                self._writers[key.writer] = (key.sequence, landed, now)
            return landed, False

    def _store(self, base: int, newest: Micros, block: NewBlock) -> BlockEntry:
        self._last_body += 1
        self._bodies[self._last_body] = (block.hashes, block.data)
        return BlockEntry(base, block.messages, len(block.data), newest, block.checksum, self._last_body)

    def retained(self, log: str) -> list[Retained]:
        with self.lock:
            return [last for (name, _), last in self._retained.items() if name == log]

    def forget_retained(self, log: str, gone: Sequence[tuple[str, Micros]]) -> None:
        with self.lock:
            for topic, time in gone:
                last = self._retained.get((log, topic))
                if last is not None and last.time == time:
                    del self._retained[log, topic]

    def entries(self, stream: int, offset: int, limit: int) -> list[BlockEntry]:
        with self.lock:
            found = self._by_id[stream]
            at = found.at(offset)
            return found.entries[at : at + limit]

    def entries_at(self, stream: int, offsets: Sequence[int]) -> list[BlockEntry]:
        with self.lock:
            found = self._by_id[stream]
            places = sorted({found.at(offset) for offset in offsets})
            return [found.entries[place] for place in places if place < len(found.entries)]

    def bodies(self, ids: Sequence[int]) -> dict[int, Data]:
        with self.lock:
            return {body: self._bodies[body][1] for body in ids if body in self._bodies}

    def hashes(self, ids: Sequence[int]) -> dict[int, bytes]:
        with self.lock:
            return {body: self._bodies[body][0] for body in ids if body in self._bodies}

    def topics(self, log: str, generation: int, prefix: str) -> list[str]:
        with self.lock:
            return [topic for topic in self._topics.get((log, generation), ()) if topic.startswith(prefix)]

    def seal(self, log: str, shards: int | None, now: Micros) -> Generation:
        with self.lock:
            open_ = next((g for g in self._generations[log].values() if g.sealed_at is None), None)
            if open_ is None:
                raise UnknownStream(f"log {log!r} has no open generation")
            self._generations[log][open_.number] = open_._replace(sealed_at=now)
            for shard in range(open_.shards):
                self._streams[Stream(log, shard, open_.number)].sealed = True
            opened = Generation(open_.number + 1, shards or open_.shards, now, None)
            self._open(log, opened)
            return opened

    def drop(self, log: str, generation: int) -> None:
        with self.lock:
            gone = self._generations[log].pop(generation)
            self._topics.pop((log, generation))
            for shard in range(gone.shards):
                stream = self._streams.pop(Stream(log, shard, generation))
                for entry in stream.entries:
                    del self._bodies[entry.body]
                stream.entries.clear()

    def sweep(self, blocks_max: int) -> int:
        return 0

    def replace(self, stream: int, old: Sequence[BlockEntry], block: NewBlock) -> bool:
        with self.lock:
            found = self._by_id[stream]
            at = found.at(old[0].base)
            if found.entries[at : at + len(old)] != list(old):
                return False
            entry = self._store(old[0].base, old[-1].newest, block)
            found.entries[at : at + len(old)] = [entry]
            found.bytes += entry.bytes - sum(e.bytes for e in old)
            for e in old:
                del self._bodies[e.body]
            return True

    def indexed_to(self, stream: int) -> int:
        with self.lock:
            return max((run.past for run in self._by_id[stream].runs), default=0)

    def runs(self, stream: int, buckets: Sequence[int], offset: int) -> list[Run]:
        with self.lock:
            return [run for run in self._by_id[stream].runs if run.bucket in buckets and run.past > offset]

    def put_runs(self, stream: int, old: Iterable[tuple[int, int]], new: Sequence[Run]) -> None:
        with self.lock:
            gone = set(old)
            found = self._by_id[stream]
            found.runs = sorted(
                [run for run in found.runs if (run.first, run.level) not in gone] + list(new),
                key=lambda run: run.first,
            )

    def forget_writers(self, before: Micros) -> int:
        with self.lock:
            silent = [writer for writer, (_, _, at) in self._writers.items() if at < before]
            for writer in silent:
                del self._writers[writer]
            return len(silent)

    def totals(self) -> dict[str, tuple[int, int]]:
        with self.lock:
            totals: dict[str, tuple[int, int]] = {}
            for stream in self._streams.values():
                messages, shape = totals.get(stream.name.log, (0, 0))
                totals[stream.name.log] = (
                    messages + stream.next_offset,
                    shape + stream.name.generation * 1000 + 1,
                )
            return totals
