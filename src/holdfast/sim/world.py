"""Virtual time, one seed, one queue: the same machines as in production, and every bad day they may have.

The world owns the only clock, the only random source and the only queue, a heap of `(time, order, who, event)`. A
run is named by its seed; the same seed gives the same effects, in the same order.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from random import Random
from typing import NamedTuple, Protocol

from holdfast.groups.protocol.events import StreamInfo
from holdfast.groups.protocol.messages import Answer, GroupMessage
from holdfast.groups.settings import ElectionSettings, LeaderSettings, MemberSettings
from holdfast.machine import Address
from holdfast.model import Stream
from holdfast.sim.disk import Store
from holdfast.sim.faults import QUIET, Faults


class Who(Protocol):
    """Anything that events can be addressed to."""

    def on(self, event: object) -> None: ...


class AnyNode(Protocol):
    """A simulated node, as far as the world is concerned."""

    name: str
    up: bool

    def route(self, to: Address, message: GroupMessage) -> None: ...

    def streams_changed(self) -> None: ...

    def published(self, stream: Stream) -> None: ...


class Sent(NamedTuple):
    """A message, as far as it decides who gets it."""

    publisher: str
    topic: str


class SimLog:
    """The simulated log: for each stream, who published each message, and to which topic."""

    def __init__(self) -> None:
        self.messages: dict[Stream, list[Sent]] = {}
        self.sealed: set[Stream] = set()
        self.generation = 0
        self.sizes: dict[tuple[Stream, int], int] = {}
        """Of the messages that are large."""
        self.size_doubt = 0
        """So much smaller a packet may be for another client: nobody knows but whoever sends it."""
        self.dropped: set[Stream] = set()
        self.version = 0

    def open_generation(self, shards: int) -> None:
        """Seal what is open, and open the next generation."""
        self.sealed.update(self.messages)
        self.generation += 1
        self.version += 1
        for shard in range(shards):
            self.messages[Stream("messages", shard, self.generation)] = []

    def drop_oldest(self) -> list[Stream]:
        """Retention: the oldest generation goes, if it is sealed."""
        oldest = min((stream.generation for stream in self.messages), default=0)
        gone = [s for s in self.messages if s.generation == oldest and s in self.sealed]
        for stream in gone:
            del self.messages[stream]
            self.sealed.discard(stream)
            self.dropped.add(stream)
        self.version += 1
        return gone

    def open_streams(self) -> list[Stream]:
        return [stream for stream in self.messages if stream not in self.sealed]

    def infos(self) -> tuple[StreamInfo, ...]:
        return tuple(
            StreamInfo(stream, len(messages) if stream in self.sealed else None, len(messages))
            for stream, messages in sorted(self.messages.items())
        )

    def starts(self, where: str) -> dict[Stream, int]:
        return {s: len(m) if where == "latest" else 0 for s, m in self.messages.items()}


class World:
    """Nodes, network, store, log and time."""

    def __init__(self, seed: int, faults: Faults = QUIET, *, trace: bool = False):
        self.seed, self.faults, self.rng = seed, faults, Random(seed)
        self.now = 0.0
        self.queue: list[tuple[float, int, Who, object]] = []
        self.order = 0
        self.nodes: dict[str, AnyNode] = {}
        self.store = Store()
        self.log = SimLog()
        self.healing = False
        self.cut: set[frozenset[str]] = set()
        """Pairs of nodes (or a node and `store`) that do not hear each other."""
        self.outage_until = -1.0
        """Until then nobody reaches the store."""
        self.muted: Callable[[Address, GroupMessage], bool] | None = None
        """A scenario's own way to lose messages."""
        self.answers: dict[str, Answer] = {}
        self.trace: list[str] | None = [] if trace else None
        self.member_settings = MemberSettings()
        self.leader_settings = LeaderSettings()
        self.election_settings = ElectionSettings()

    # ---------------------------------------------------------------------------------------- time

    def at(self, when: float, who: Who, event: object) -> None:
        self.order += 1
        heapq.heappush(self.queue, (when, self.order, who, event))

    def after(self, seconds: float, who: Who, event: object) -> None:
        self.at(self.now + seconds, who, event)

    def run(self, until: float) -> None:
        queue = self.queue
        while queue and queue[0][0] <= until:
            self.now, _, who, event = heapq.heappop(queue)
            who.on(event)
        self.now = max(self.now, until)

    # ------------------------------------------------------------------------------------- network

    def send(self, node: str, to: Address, message: GroupMessage) -> None:
        if self.muted and self.muted(to, message):
            return
        rng, faults = self.rng, self.faults
        if node == to.node and to.kind == "leader" and not faults.drop:
            self.after(0.0001, _Wire(self, node), (to, message))
            return
        if self.healing:
            self.after(rng.random() * 0.01, _Wire(self, node), (to, message))
            return
        if frozenset((node, to.node)) in self.cut:
            return
        roll = rng.random()
        if roll < faults.drop:
            return
        copies = 2 if roll > 1 - faults.duplicate else 1
        for _ in range(copies):
            delay = rng.random() * faults.delay_seconds
            if faults.straggle and rng.random() < faults.straggle:
                delay = rng.random() * 10
            self.after(delay, _Wire(self, node), (to, message))

    def reaches_store(self, node: str) -> bool:
        return self.healing or (self.now >= self.outage_until and frozenset((node, "store")) not in self.cut)

    # ---------------------------------------------------------------------------------------- log

    def publish(self, stream: Stream, publisher: str, topic: str) -> None:
        self.log.messages[stream].append(Sent(publisher, topic))
        for node in self.nodes.values():
            if node.up:
                node.published(stream)

    def streams_changed(self) -> None:
        for node in self.nodes.values():
            if node.up:
                node.streams_changed()

    # -------------------------------------------------------------------------------------- telling

    def tell(self, who: object, what: object) -> None:
        if self.trace is not None:
            self.trace.append(f"{self.now:8.3f} {who}: {what}")


class _Wire:
    """A message on its way."""

    __slots__ = ("source", "world")

    def __init__(self, world: World, source: str):
        self.world, self.source = world, source

    def on(self, event: object) -> None:
        assert isinstance(event, tuple)
        to, message = event
        world = self.world
        if not world.healing and world.cut and frozenset((self.source, to.node)) in world.cut:
            return
        if to.kind == "asker":
            assert isinstance(message, Answer)
            world.answers.setdefault(message.request, message)
            return
        node = world.nodes.get(to.node)
        if node is not None and node.up:
            node.route(to, message)
