"""Results of vehicles, read from the log: a result that was acknowledged is in the log, and so it is settled.

The keeper reads every stream from where the last reading was settled, with a filter that passes over everything else.
What is read twice after a crash finds nothing to settle the second time.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import msgspec

from holdfast.errors import HoldfastError, PeerError, StoreError
from holdfast.fanout.nouns import InFlight
from holdfast.fanout.results import Result, settle
from holdfast.fanout.table import Finish, Verdict
from holdfast.fanout.vehicles import Template
from holdfast.keys import FANOUT_RESULTS
from holdfast.log import Log
from holdfast.metadata import Metadata
from holdfast.model import LOG, Batch, Stream
from holdfast.mqtt.packets import PUBLISH
from holdfast.mqtt.properties import decode
from holdfast.runtime.fanout import FanoutHost
from holdfast.runtime.fanout_keeper import FanoutKeeper
from holdfast.topics import TopicFilter

logger = logging.getLogger("holdfast.fanout")

LOOK_SECS = 1.0
"""How often somebody else's results are looked for."""
SAVE_SECS = 5.0
AT_ONCE = 200
TRIES = 5


class _Read(NamedTuple):
    results: list[Result]
    positions: dict[Stream, int]


class FanoutResults:
    """One per node; only the keeper's reads."""

    def __init__(self, host: FanoutHost, keeper: FanoutKeeper, log: Log, metadata: Metadata):
        self._host, self._keeper, self._log, self._metadata = host, keeper, log, metadata
        self._template: Template = host.results
        self._filter = TopicFilter(self._template.filter)
        self._loop = asyncio.get_running_loop()
        self._hinted = asyncio.Event()
        self._positions: dict[Stream, int] | None = None
        """Where reading goes on; None: this node was not the keeper."""
        self._epoch: int | None = None
        self._save_at = 0.0
        self.read = self.settled = self.unmatched = 0

    def heard(self, parts: Iterable[Batch]) -> None:
        """Messages were stored here: are there results among them?"""
        if self._hinted.is_set() or self._keeper.epoch is None:
            return
        head = self._template.head
        if any([topic for topic in part.topics if topic.startswith(head)] for part in parts):
            self._hinted.set()

    async def follow(self) -> None:
        """For as long as the node lives."""
        while True:
            try:
                async with asyncio.timeout(LOOK_SECS):
                    await self._hinted.wait()
            except TimeoutError:
                pass
            self._hinted.clear()
            if self._keeper.epoch is None:
                self._positions = None
                continue
            try:
                if self._positions is None or self._epoch != self._keeper.epoch:
                    self._epoch = self._keeper.epoch
                    self._positions = await self._host.ask(self._load)
                await self._catch_up(self._positions)
            except StoreError as error:
                self._positions = None  # from what was settled for sure
                logger.warning("vehicles' results are read again: %s", error)

    async def begin(self) -> None:
        """Before anybody is connected: what was published before there was fan-out is no result."""
        await self._host.ask(self._begin)

    def _begin(self) -> None:
        if self._metadata.get(FANOUT_RESULTS) is None:
            heads = {head.stream: head.next_offset for head in self._log.heads(LOG)}
            self._metadata.compare_and_set(FANOUT_RESULTS, None, _packed(heads))

    def _load(self) -> dict[Stream, int]:
        """On a thread."""
        entry = self._metadata.get(FANOUT_RESULTS)
        found: dict[str, int] = msgspec.json.decode(entry.value) if entry is not None else {}
        return {Stream.parse(name): offset for name, offset in found.items()}

    async def _catch_up(self, positions: dict[Stream, int]) -> None:
        while True:
            read = await self._host.ask(self._read, dict(positions))
            for at in range(0, len(read.results), AT_ONCE):
                await self._settle(read.results[at : at + AT_ONCE])
            moved = read.positions != positions
            positions.clear()
            positions.update(read.positions)
            if moved and (read.results or self._loop.time() >= self._save_at):
                self._save_at = self._loop.time() + SAVE_SECS
                await self._host.ask(self._save, dict(positions))
            if len(read.results) < AT_ONCE:
                return

    def _save(self, positions: dict[Stream, int]) -> None:
        """On a thread."""
        self._metadata.put(FANOUT_RESULTS, _packed(positions))

    def _read(self, positions: dict[Stream, int]) -> _Read:
        """On a thread: what there is, up to a bound; streams that are gone are forgotten."""
        found: list[Result] = []
        after: dict[Stream, int] = {}
        for head in self._log.heads(LOG):
            stream, end = head.stream, head.next_offset
            offset = positions.get(stream, 0)
            while offset < end and len(found) < AT_ONCE:
                reading = self._log.read(stream, offset, topics=self._filter, rows_max=AT_ONCE, on_corrupt="skip")
                for chunk in reading.chunks:
                    columns = chunk.batch.select(["topic", "payload", "properties"]).to_pydict()
                    for topic, payload, properties in zip(*columns.values(), strict=True):
                        if (parsed := self._template.parse(topic)) is not None:
                            found.append(Result(*parsed, payload, _correlation(properties)))
                offset = reading.next_offset
            after[stream] = offset
        return _Read(found, after)

    async def _settle(self, results: Sequence[Result]) -> None:
        """One look at each vehicle, one commit for all."""
        self.read += len(results)
        left = list(results)
        for _ in range(TRIES):
            found: list[tuple[Result, Finish]] = await self._host.ask(self._match, left)
            if not found:
                break
            verdicts = await self._host.change(self._host.table.commit, [finish for _, finish in found])
            done = [one for one, verdict in zip(found, verdicts, strict=True) if verdict is Verdict.DONE]
            self.settled += len(done)
            for _, finish in done:
                if isinstance(finish.seen, InFlight):
                    self._host.resulted(finish)
            # Some have moved since they were looked at: from in flight to waiting, say.
            left = [result for (result, _), verdict in zip(found, verdicts, strict=True) if verdict is not Verdict.DONE]
            if not left:
                break
        self.unmatched = self.read - self.settled

    def _match(self, results: Sequence[Result]) -> list[tuple[Result, Finish]]:
        """On a thread. A vehicle's second result finds what the first one has left."""
        finishes: list[tuple[Result, Finish]] = []
        taken: set[tuple[str, int]] = set()
        for result in results:
            in_flight, waiting, awaiting = self._host.table.vehicle(result.vin)
            if in_flight is not None and (in_flight.vin, in_flight.place) in taken:
                in_flight = None
            awaiting = [one for one in awaiting if (one.vin, one.place) not in taken]
            waiting = [one for one in waiting if (one.vin, one.place) not in taken]
            ids = {one.campaign for one in awaiting} | {one.campaign for one in waiting}
            if in_flight is not None:
                ids.add(in_flight.campaign)
            campaigns = self._host.table.campaigns(ids) if ids else {}
            finish = settle(result, in_flight, awaiting, waiting, campaigns)
            if finish is not None:
                finishes.append((result, finish))
                taken.add((finish.seen.vin, finish.seen.place))
        return finishes


def _packed(positions: Mapping[Stream, int]) -> bytes:
    return msgspec.json.encode({str(stream): offset for stream, offset in positions.items()})


def _correlation(properties: bytes | None) -> bytes | None:
    if not properties:
        return None
    try:
        found = decode(properties, PUBLISH).get("correlation_data")
    except (PeerError, HoldfastError):
        return None
    return found if isinstance(found, bytes) else None
