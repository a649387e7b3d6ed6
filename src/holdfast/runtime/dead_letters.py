"""Dead letters: messages that no member acknowledged are copied to a log of their own, each once.

Requests of all loans wait here; those about one stream of one group are stored together, as one batch, on a thread
that nothing else uses. A batch is stored in three steps, and whoever comes later can finish what was begun:

    1. the intent: "batch N is these offsets" is written to the metadata store, by compare-and-set
    2. the messages are appended to the log `dead-letters` under the key (course and stream, N)
    3. the offsets are noted as stored, and the intent is taken away

A node that fails after 1 leaves the intent. The next one that stores anything of that stream, here or on another
node, repeats step 2 first: under the same key the log takes it once. So a retry, a second member and a hand-over
store nothing twice. A seek begins anew: what is not acknowledged then is stored once more.

Each says in user properties where it is from, how often it was delivered, and why it is here: it was delivered in vain,
or (0 attempts) no member of the group takes packets of that size.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace

from holdfast.cursors import Cursor
from holdfast.errors import HoldfastError, RequestError
from holdfast.groups.protocol.nouns import GroupId
from holdfast.keys import dead_letters_key
from holdfast.log import Log
from holdfast.log.contract import AppendKey
from holdfast.log.history import History
from holdfast.metadata import Metadata
from holdfast.model import Batch, Stream
from holdfast.mqtt.properties import encode
from holdfast.runtime.offset_reader import Found, read_offsets
from holdfast.runtime.supervisor import Supervisor

logger = logging.getLogger("holdfast.groups")

DEAD_LETTERS = "dead-letters"
"""The log they go to."""

BATCH_MESSAGES, BATCH_BYTES = 1000, 4 << 20
RANGES_MAX = 20_000
"""How many ranges of stored offsets are remembered of one stream; the lowest are forgotten first."""

RETRY_SECONDS, RETRY_SECONDS_MAX = 0.5, 10.0

GROUP_PROPERTY, STREAM_PROPERTY = "holdfast-group", "holdfast-stream"
OFFSET_PROPERTY, ATTEMPTS_PROPERTY = "holdfast-offset", "holdfast-attempts"
REASON_PROPERTY = "holdfast-reason"

NAME_CHARACTERS_MAX = 16_000
"""A user property takes 65,535 bytes."""


@dataclass(frozen=True, slots=True)
class Ledger:
    """What is known of one stream's dead letters of one group."""

    course: str
    sequence: int = 0
    done: Cursor = field(default_factory=Cursor)
    """These are stored, or were found to need no storing."""
    pending: tuple[tuple[int, int], ...] = ()
    """Batch `sequence`, offsets with their attempts: it may or may not have been appended."""

    def settled(self) -> Ledger:
        """The pending batch has been appended."""
        done = self.done.copy()
        for offset, _ in self.pending:
            done.ack(offset)
        return replace(self, done=done, pending=())

    def to_json(self) -> bytes:
        return json.dumps(
            {
                "course": self.course,
                "sequence": self.sequence,
                "offset": self.done.offset,
                "acked": self.done.acked[-RANGES_MAX:],
                "pending": self.pending,
                "updated_at": int(time.time()),
            }
        ).encode()

    @classmethod
    def from_json(cls, data: bytes) -> Ledger:
        try:
            value = json.loads(data)
            pending = tuple((int(offset), int(attempts)) for offset, attempts in value["pending"])
            return cls(value["course"], value["sequence"], Cursor(value["offset"], value["acked"]), pending)
        except (ValueError, KeyError, TypeError) as error:
            raise RequestError(f"dead letters' record {data[:80]!r} is damaged: {error!r}") from error


class DeadLetterStore:
    """Stores dead letters, once each. It blocks; safe to use from several nodes at once."""

    def __init__(self, log: Log, metadata: Metadata, history: History):
        self._log, self._metadata, self._history = log, metadata, history
        self._created = False

    def store(self, group: GroupId, course: str, stream: Stream, letters: Mapping[int, int], floor: int = 0) -> bool:
        """Store these, offset -> attempts; those below `floor` are known to be done with. False: another course."""
        key = dead_letters_key(group, stream)  # beside the stream's cursors: it goes when they go
        while True:
            entry = self._metadata.get(key)
            before = Ledger.from_json(entry.value) if entry is not None else Ledger(course)
            if before.course != course:
                if _later(before.course, course):
                    return False
                before = Ledger(course)
            ledger = before
            if ledger.pending:
                self._append(group, ledger, stream)
                ledger = ledger.settled()
            ledger = self._next_batch(ledger, stream, letters, floor)
            if ledger is before:
                return True
            # If somebody else was quicker this changes nothing, and the next look says what is left to do.
            self._metadata.compare_and_set(key, entry.version if entry is not None else None, ledger.to_json())

    def _next_batch(self, ledger: Ledger, stream: Stream, letters: Mapping[int, int], floor: int) -> Ledger:
        """The same ledger if nothing is left to store; else one that says what is stored next."""
        left = [offset for offset in sorted(letters) if not ledger.done.is_acked(offset)]
        if not left:
            return ledger
        found, gone = read_offsets(self._log, self._history, stream, left[:BATCH_MESSAGES], BATCH_BYTES)
        done = ledger.done.copy()
        if floor > 0:
            done.ack_range(0, floor - 1)
        for offset in gone:
            logger.warning("%s offset %d cannot be read any more: no dead letter is left of it", stream, offset)
            done.ack(offset)
        pending = tuple((offset, letters[offset]) for offset in sorted(found))
        return replace(ledger, sequence=ledger.sequence + 1, done=done, pending=pending)

    def _append(self, group: GroupId, ledger: Ledger, stream: Stream) -> None:
        if not self._created:
            self._log.create(DEAD_LETTERS, shards=1)
            self._created = True
        attempts = dict(ledger.pending)
        # The intent was bounded when it was made; here all of it is wanted.
        found, gone = read_offsets(self._log, self._history, stream, list(attempts), 1 << 62)
        if gone:
            logger.warning("%s: %d messages cannot be read any more: no dead letter is left of them", stream, len(gone))
        if found:
            key = AppendKey(f"dead-letters/{ledger.course}/{stream}", ledger.sequence)
            self._log.append(DEAD_LETTERS, _batch(group, stream, found, attempts), key=key)
            logger.warning(
                "group %s: %d messages of %s (offsets %d..%d) were not acknowledged or too large; see log %s",
                *(group, len(found), stream, min(found), max(found), DEAD_LETTERS),
            )


def _batch(group: GroupId, stream: Stream, found: Mapping[int, Found], attempts: Mapping[int, int]) -> Batch:
    topics, payloads, publishers, flags, properties, times = [], [], [], [], [], []
    for offset in sorted(found):
        rows, at = found[offset]
        topics.append(rows.topics[at])
        payloads.append(rows.payloads[at])
        publishers.append(rows.publishers if isinstance(rows.publishers, str) else rows.publishers[at])
        flags.append(rows.flags if isinstance(rows.flags, int) else rows.flags[at])
        times.append(rows.times if isinstance(rows.times, int) else rows.times[at])
        said = [
            (GROUP_PROPERTY, str(group)[:NAME_CHARACTERS_MAX]),
            (STREAM_PROPERTY, str(stream)),
            (OFFSET_PROPERTY, str(offset)),
            (ATTEMPTS_PROPERTY, str(attempts.get(offset, 0))),
            (REASON_PROPERTY, "not acknowledged" if attempts.get(offset) else "larger than any member takes"),
        ]
        own = (rows.properties[at] if rows.properties is not None else None) or b""
        properties.append(own + encode({"user_properties": said}))
    return Batch(topics, payloads, publishers, flags, properties, times)


def _later(one: str, other: str) -> bool:
    """Is `one` a later course of the same group than `other`?"""
    born, _, turn = one.rpartition(".")
    other_born, _, other_turn = other.rpartition(".")
    return born == other_born and turn.isdecimal() and other_turn.isdecimal() and int(turn) > int(other_turn)


@dataclass(slots=True)
class _Waiting:
    """The requests about one stream of one group that are not stored yet."""

    requests: list[tuple[dict[int, int], asyncio.Future[bool]]] = field(default_factory=list)
    floor: int = 0
    failures: int = 0
    not_before: float = 0.0


Place = tuple[GroupId, str, Stream]


class DeadLetters:
    """The requests of one node, one batch after the other."""

    def __init__(self, store: DeadLetterStore):
        self._store = store
        self._waiting: dict[Place, _Waiting] = {}
        self._wake = asyncio.Event()
        self._thread = ThreadPoolExecutor(1, "holdfast-dead-letters")

    def start(self, supervisor: Supervisor) -> None:
        supervisor.run("dead letters", self._run)

    def close(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)

    def put(
        self, group: GroupId, course: str, stream: Stream, letters: Mapping[int, int], floor: int = 0
    ) -> asyncio.Future[bool]:
        """Done when they are durable: True, or False if the group has gone on to another course. May be cancelled."""
        done: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        waiting = self._waiting.setdefault((group, course, stream), _Waiting())
        waiting.requests.append((dict(letters), done))
        waiting.floor = max(waiting.floor, floor)
        self._wake.set()
        return done

    async def _run(self) -> None:
        while True:
            place, pause = self._next(time.monotonic())
            if place is None:
                self._wake.clear()
                try:
                    async with asyncio.timeout(pause):
                        await self._wake.wait()
                except TimeoutError:
                    pass
                continue
            await self._store_place(place)

    def _next(self, now: float) -> tuple[Place | None, float | None]:
        """What to store next, or how long there is nothing to do."""
        for place, waiting in list(self._waiting.items()):
            if all(done.done() for _, done in waiting.requests):
                del self._waiting[place]  # nobody waits for it any more
            elif waiting.not_before <= now:
                return place, None
        return None, min((w.not_before - now for w in self._waiting.values()), default=None)

    async def _store_place(self, place: Place) -> None:
        waiting = self._waiting.pop(place)
        letters: dict[int, int] = {}
        for offsets, done in waiting.requests:
            if not done.done():
                letters.update(offsets)
        loop = asyncio.get_running_loop()
        try:
            stored = await loop.run_in_executor(self._thread, self._store.store, *place, letters, waiting.floor)
        except Exception as error:  # one stream's trouble must not hold up the others
            if isinstance(error, HoldfastError):
                logger.warning("dead letters of %s were not stored: %s", place[0], error)
            else:
                logger.exception("dead letters of %s were not stored", place[0])
            self._again(place, waiting)
            return
        for _, done in waiting.requests:
            if not done.done():
                done.set_result(stored)

    def _again(self, place: Place, waiting: _Waiting) -> None:
        newer = self._waiting.pop(place, None)
        if newer is not None:
            waiting.requests += newer.requests
            waiting.floor = max(waiting.floor, newer.floor)
        waiting.failures += 1
        waiting.not_before = time.monotonic() + min(RETRY_SECONDS * 2.0 ** (waiting.failures - 1), RETRY_SECONDS_MAX)
        self._waiting[place] = waiting
