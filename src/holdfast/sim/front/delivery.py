"""Delivery's simulated host, as in `runtime.delivery`: reads take a while and may fail, others' blocks are followed."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from math import inf
from typing import TYPE_CHECKING

from holdfast.delivery import delivery as dv
from holdfast.delivery.outlet import Outlet
from holdfast.delivery.readers import Fetched
from holdfast.groups.shares import is_shared, parse_share
from holdfast.log.contract import Retained
from holdfast.machine import TICK
from holdfast.model import Stream
from holdfast.mqtt.trie import Trie
from holdfast.sessions.heads import Heads
from holdfast.sessions.retained import RetainedMessages
from holdfast.sessions.rows import Rows
from holdfast.sim.front.checkers import Truth
from holdfast.sim.front.disk import Block, StoreDown, columns
from holdfast.sim.front.world import Pending, Work

if TYPE_CHECKING:
    from holdfast.sim.front.connection import SimConnection
    from holdfast.sim.front.node import SimFront

FOLLOW_ROWS = 64


class _Watched(RetainedMessages):
    """Retained messages see every block that is delivered, and the checkers with them."""

    def __init__(self, truth: Truth, stored: Iterable[Retained]):
        super().__init__(stored)
        self._truth = truth

    def see(self, rows: Rows) -> None:
        self._truth.delivered(rows)
        super().see(rows)


class SimDelivery:
    def __init__(self, front: SimFront, settings: dv.DeliverySettings):
        self.front, self.world, self.disk = front, front.world, front.disk
        self._settings = settings
        log = self.disk.log
        self.machine = dv.Delivery(_Watched(front.truth, log.retained.values()), settings)
        self.connections: dict[Outlet, SimConnection] = {}
        self.on_loan_news: Callable[[Outlet], None] = lambda outlet: None
        self.ask_clock: Callable[[Outlet], None] = lambda outlet: None
        self.on_streams_changed: Callable[[], None] = lambda: None
        self.fetching: dict[Outlet, int] = {}
        """Bytes that were asked for and have not come."""
        self._armed = inf
        self._look_again: Pending = self.world.pending()
        self._rounds = 0
        self._sure_at = 0
        self._round_over: Pending = self.world.pending()
        self.following = False
        for stream, rows in log.streams.items():
            self.machine.heads[stream] = len(rows)
            if stream in log.sealed:
                self.machine.heads.seal([stream])

    @property
    def heads(self) -> Heads:
        return self.machine.heads

    def handle(self, event: dv.DeliveryEvent) -> None:
        effects = self.machine.handle(event, self.world.now)
        written: dict[Outlet, int] = {}
        for effect in effects:  # the machine has decided all of it: and what is not written is lost on its way
            if isinstance(effect, dv.Write) and effect.outlet in self.connections:
                before = written.get(effect.outlet, 0)
                self.front.truth.check_turn(effect.outlet, before, self._settings.write_bytes)
                if self.connections[effect.outlet].socket.full:
                    self.front.truth.fail("bounded memory", f"{effect.outlet} is written to while its socket is full")
                written[effect.outlet] = before + len(effect.data)
                self.front.truth.wrote(effect.outlet, effect.data)
        for effect in effects:
            self._perform(effect)
        deadline = self.machine.deadline
        if deadline != self._armed:
            self._armed = deadline
            if deadline != inf:
                self.world.after(max(0.0, deadline - self.world.now), lambda: self._tick(deadline), self.front.life)

    def _tick(self, armed: float) -> None:
        if armed == self._armed:
            self._armed = inf
            self.handle(TICK)

    def attach(self, outlet: Outlet, connection: SimConnection) -> None:
        self.connections[outlet] = connection
        self.handle(dv.Attached(outlet))

    def detach(self, outlet: Outlet) -> None:
        if self.connections.pop(outlet, None) is not None:
            self.handle(dv.Detached(outlet))

    def filters_changed(self, counts: Mapping[str, int], whole: bool) -> None:
        if whole:
            self.machine.anywhere = Trie()
        for text, count in counts.items():
            topics = parse_share(text).filter if is_shared(text) else text
            if count:
                self.machine.anywhere.add(topics, text)
            else:
                self.machine.anywhere.remove(topics, text)

    def committed(self, placed: list[Block]) -> None:
        for block in placed:
            offsets = range(block.base, block.base + len(block.rows))
            self.handle(dv.Committed(Rows(block.stream, offsets, columns(block.rows), block.rows[0].micros)))

    def _perform(self, effect: dv.DeliveryEffect) -> None:
        match effect:
            case dv.Write(outlet, data):
                if (connection := self._open(outlet)) is not None:
                    connection.write(data)
            case dv.Fetch():
                self.front.spawn(self._fetch(effect))
            case dv.NextTurn(outlet):
                self.world.after(0.0, lambda: self._turn(outlet), self.front.life)
            case dv.LoanNews(outlet):
                self.on_loan_news(outlet)
            case dv.AskClock(outlet):
                self.ask_clock(outlet)
                self.world.after(0.0, lambda: self._turn(outlet), self.front.life)
            case dv.Follow():
                self._look_again.settle()
            case dv.Broken(outlet, error):
                raise error

    def _open(self, outlet: Outlet) -> SimConnection | None:
        connection = self.connections.get(outlet)
        return connection if connection is not None and connection.machine.open else None

    def _turn(self, outlet: Outlet) -> None:
        if outlet in self.connections:
            self.handle(dv.Room(outlet))

    # -- reading -------------------------------------------------------------------------------------------

    def _fetch(self, fetch: dv.Fetch) -> Work:
        disk, outlet, asked = self.disk, fetch.reader.outlet, fetch.request
        self.fetching[outlet] = self.fetching.get(outlet, 0) + fetch.bytes_max
        yield self.world.rng.random() * disk.seconds
        failed = disk.fails(disk.fetch_fails)
        found = Fetched(0, ())
        if not failed:
            # What was read for a neighbour, who began before.
            before = self.world.rng.randint(0, min(3, asked.at)) if asked.shared else 0
            found = disk.log.read(asked.stream, asked.at - before, asked.until, asked.wanted, fetch.bytes_max)
            if before and found.past <= asked.at:
                found = disk.log.read(asked.stream, asked.at, asked.until, asked.wanted, fetch.bytes_max)
        yield self.world.rng.random() * disk.seconds
        self.fetching[outlet] -= fetch.bytes_max
        self.handle(dv.FetchFailed(fetch.reader) if failed else dv.FetchDone(fetch.reader, found))

    # -- what other processes commit -----------------------------------------------------------------------

    def hint(self) -> None:
        self._look_again.settle()

    def doubt(self) -> None:
        """A commit of our own failed: it may be in the log all the same."""
        self._sure_at = self._rounds + 2
        self._look_again.settle()

    @property
    def in_doubt(self) -> bool:
        return self._rounds < self._sure_at

    def caught_up(self) -> Work:
        wanted = self._rounds + 2  # the round under way may have looked before now
        while self._rounds < wanted:
            self._look_again.settle()
            yield self._round_over

    def follow(self) -> Work:
        while True:
            self.following = False
            yield self._look_again
            self._look_again = self.world.pending()
            self.following = True
            try:
                yield from self._follow_once()
            except StoreDown:
                yield 0.5
                self._look_again.settle()
            else:
                self._rounds += 1
                over, self._round_over = self._round_over, self.world.pending()
                over.settle()
                if self.in_doubt:
                    self._look_again.settle()

    def _follow_once(self) -> Work:
        log = self.disk.log
        yield self.world.rng.random() * self.disk.seconds
        if self.disk.fails(self.disk.fetch_fails):
            raise StoreDown("no heads")
        seen = {stream: len(rows) for stream, rows in log.streams.items()}
        sealed_then = set(log.sealed)
        yield self.world.rng.random() * self.disk.seconds
        changed = seen.keys() != self.heads.keys()
        if changed:
            self.handle(dv.StreamsSeen(list(seen), (), {}))
        for stream, end in sorted(seen.items(), key=lambda found: found[0].generation):
            yield from self._catch_up_with(stream, end)
            if stream in sealed_then and stream not in self.machine.heads.sealed:
                changed = True
                self.handle(dv.StreamsSeen(list(seen), [stream], {}))
        if changed:
            self.on_streams_changed()

    def _catch_up_with(self, stream: Stream, end: int) -> Work:
        self.handle(dv.Followed(stream, -1, 0, ()))
        while self.heads.get(stream, end) < end:
            at = self.heads[stream]
            stop = self.machine.next_early(stream, end)
            yield self.world.rng.random() * self.disk.seconds
            if self.disk.fails(self.disk.fetch_fails):
                raise StoreDown("not read")
            found = self.disk.log.read(stream, at, min(stop, at + FOLLOW_ROWS), None, 1 << 30)
            yield self.world.rng.random() * self.disk.seconds
            if found.past < 0:
                return
            rows = found.rows
            self.handle(dv.Followed(stream, at, rows[-1].offsets[-1] + 1 if rows else stop, rows))
