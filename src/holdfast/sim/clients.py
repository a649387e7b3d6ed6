"""Simulated sessions and batch readers: they read what they are lent, deliver it, and acknowledge in their own time.

A session here does what the session handler does for real: it keeps what is in flight for each loan, says
`Drained` when it is asked to stop and nothing is left, and knows nothing about how streams are obtained.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from holdfast.groups.leading.leader import Leader
from holdfast.groups.member.agent import Agent
from holdfast.groups.member.batch_member import BatchMember
from holdfast.groups.progress import Done
from holdfast.groups.protocol.effects import (
    Abandon,
    ChangeLargestPacket,
    Effect,
    Ended,
    Joined,
    Park,
    Redeliver,
    StartReading,
    StopReading,
)
from holdfast.groups.protocol.events import (
    Acked,
    Closed,
    Delivered,
    Drained,
    JoinGroup,
    Leave,
    QuitGroup,
    Refused,
    Unsendable,
)
from holdfast.groups.protocol.nouns import NO_LIMIT, GroupId, Loan, MemberId
from holdfast.machine import Address, Machine
from holdfast.model import Stream
from holdfast.sim.checkers import SimReading
from holdfast.sim.hosts import Actor, SimNode

WINDOW = 3


@dataclass(slots=True)
class SimReader:
    """A loan being read."""

    loan: Loan
    done: Done
    reading: SimReading
    position: int
    in_flight: set[int]
    stopped: bool = False
    counts: bool = False
    largest_packet: int = NO_LIMIT
    set_aside: set[int] = field(default_factory=set)
    """Not to be delivered: on their way to the dead letters, or refused."""


@dataclass(slots=True)
class ClientAck:
    """The client's acknowledgement has reached the node."""

    reader: SimReader
    offset: int


class Member(Actor):
    """What sessions and batch readers have in common: readers."""

    def __init__(self, node: SimNode, name: str, machine: Machine):
        super().__init__(node, name, machine)
        self.readers: dict[Loan, SimReader] = {}
        self.packet_max = NO_LIMIT
        self._set_aside: dict[Loan, set[int]] = {}
        self.ack_seconds = 0.05
        self.stuck_until = -1.0
        """Until then the client acknowledges nothing."""
        self.ended: list[Ended] = []

    def on(self, event: object) -> None:
        if isinstance(event, ClientAck):
            if self.alive:
                self._on_ack(event)
            return
        super().on(event)

    def effect(self, effect: Effect) -> None:
        match effect:
            case StartReading():
                self._start(effect)
            case StopReading(loan):
                self._stop(self.readers[loan])
            case Abandon(loan):
                reader = self.readers.pop(loan, None)
                if reader:
                    self.node.truth.over(reader.reading)
            case Redeliver(loan, offsets):
                if reader := self.readers.get(loan):
                    self._deliver(reader, list(offsets))
            case ChangeLargestPacket(member, largest_packet):
                for loan, reader in self.readers.items():
                    if loan.member == member:
                        reader.largest_packet = largest_packet
            case Park(loan, offsets, too_large):
                if too_large:
                    for leader in self.leaders(loan):
                        self.node.truth.too_large(loan, offsets, leader)
                    reader = self.readers.get(loan)
                    (reader.set_aside if reader else self._set_aside.setdefault(loan, set())).update(offsets)
                self.world.after(0.01, self, Acked(loan, tuple((offset, offset) for offset in offsets)))
                for offset in offsets:
                    self.node.truth.parked(loan, offset)
                if reader := self.readers.get(loan):
                    reader.in_flight.difference_update(offsets)
                    self.world.after(0.02, self, _Pump(reader))
            case Joined():
                pass
            case Ended():
                self.ended.append(effect)
                self.over(effect)

    def over(self, ended: Ended) -> None:
        """A subscription has ended."""

    def current(self, loan: Loan) -> bool:
        """Is the loan's member still the life that speaks for it?"""
        raise NotImplementedError

    def leaders(self, loan: Loan) -> list[Leader]:
        """Who lent it, if it still leads."""
        return []

    # ------------------------------------------------------------------------------------- reading

    def _start(self, effect: StartReading) -> None:
        reading = self.node.truth.started(effect, self.name, lambda: self.alive and self.current(effect.loan))
        done = Done(effect.loan.piece, effect.mark, effect.skip, effect.key)
        counts = effect.policy != (None, None)
        reader = SimReader(effect.loan, done, reading, done.cursor.floor, reading.in_flight, counts=counts)
        reader.largest_packet = effect.largest_packet
        reader.set_aside = self._set_aside.pop(effect.loan, set())
        self.readers[effect.loan] = reader
        self.world.after(0.0, self, _Pump(reader))

    def _stop(self, reader: SimReader) -> None:
        reader.stopped = True
        self.node.truth.stopped(reader.reading)
        self._drained(reader)

    def _drained(self, reader: SimReader) -> None:
        if reader.stopped and not reader.in_flight:
            self.readers.pop(reader.loan, None)
            self.node.truth.over(reader.reading)
            self.world.after(0.0, self, Drained(reader.loan))

    def _step(self, event: object) -> None:
        if not isinstance(event, _Pump):
            super()._step(event)
            return
        # The clock first, here too: what we are about to read may not be ours any more.
        self._clock_first()
        if self.alive and event.reader.loan in self.readers:
            self._pump(event.reader)

    def pump(self, stream: Stream) -> None:
        for reader in list(self.readers.values()):
            if reader.loan.piece.stream == stream and not reader.stopped and len(reader.in_flight) < WINDOW:
                self.world.after(0.0005, self, _Pump(reader))

    def _pump(self, reader: SimReader) -> None:
        messages = self.world.log.messages.get(reader.loan.piece.stream)
        if messages is None or reader.stopped:
            return
        passed: list[tuple[int, int]] = []
        sent: list[int] = []
        refused: list[tuple[int, int]] = []
        unsendable: list[int] = []
        step = reader.done.step
        while reader.position < len(messages) and len(reader.in_flight) + len(sent) < WINDOW:
            offset = reader.position
            reader.position += 1
            if reader.done.wants(offset, *messages[offset]):
                size = self.world.log.sizes.get((reader.loan.piece.stream, offset), 0)
                if offset in reader.set_aside:
                    continue
                if size <= self.packet_max:
                    sent.append(offset)
                    continue
                reader.set_aside.add(offset)
                least = size - self.world.log.size_doubt
                if least > reader.largest_packet:
                    unsendable.append(offset)
                else:
                    refused.append((offset, least))
                    if reader.done.key != "message":
                        break  # what comes after it must not be delivered before it
            elif not reader.done.cursor.is_acked(offset) and offset % step == reader.done.index % step:
                passed.append((max(0, offset - step + 1), offset))
        if passed:
            super()._step(Acked(reader.loan, tuple(passed)))
        if unsendable:
            super()._step(Unsendable(reader.loan, tuple(unsendable)))
        if sent:
            self._deliver(reader, sent)
        if refused:
            super()._step(Refused(reader.loan, tuple(refused)))

    def _deliver(self, reader: SimReader, offsets: list[int]) -> None:
        world = self.world
        for offset in offsets:
            self.node.truth.delivered(reader.reading, offset)
            reader.in_flight.add(offset)
            when = world.now + world.rng.random() * self.ack_seconds
            if not world.healing:
                when = max(when, self.stuck_until)
            world.at(when, self, ClientAck(reader, offset))
        if reader.counts:
            super()._step(Delivered(reader.loan, tuple(offsets)))

    def _on_ack(self, ack: ClientAck) -> None:
        if self.world.now < self.node.paused_until:
            self.world.at(self.node.paused_until, self, ack)
            return
        reader = ack.reader
        if self.readers.get(reader.loan) is not reader or ack.offset not in reader.in_flight:
            return  # it went back to the group
        reader.in_flight.discard(ack.offset)
        self.node.truth.was_acked(reader.loan, ack.offset, self.name if self.current(reader.loan) else "")
        super().on(Acked(reader.loan, ((max(0, ack.offset - reader.done.step + 1), ack.offset),)))
        if reader.stopped:
            self._drained(reader)
        else:
            self.world.after(0.0005, self, _Pump(reader))

    # --------------------------------------------------------------------------------------- faults

    def crash(self) -> None:
        self.die()
        self.node.truth.crashed(self.name)
        for reader in self.readers.values():
            self.node.truth.over(reader.reading)
        self.readers.clear()

    def freeze(self, frozen: bool) -> None:
        for reader in self.readers.values():
            reader.reading.frozen = frozen
            if not frozen and not reader.stopped:
                self.node.truth.resumed(reader.reading)


@dataclass(slots=True)
class _Pump:
    reader: SimReader


class SimSession(Member):
    """An MQTT session with its agent."""

    machine: Agent

    def __init__(self, node: SimNode, name: str, incarnation: int, packet_max: int = NO_LIMIT):
        super().__init__(node, name, Agent(name, incarnation, node.name, node.world.member_settings, packet_max))
        self.packet_max = packet_max
        self.closed = False
        node.sessions[self.machine.address.name] = self

    def current(self, loan: Loan) -> bool:
        borrower = self.machine.borrowers.get(loan.member.number)
        return borrower is not None and borrower.member == loan.member

    def leaders(self, loan: Loan) -> list[Leader]:
        borrower = self.machine.borrowers[loan.member.number]
        nodes = [node for node in self.world.nodes.values() if isinstance(node, SimNode)]
        actors = [node.leaders[str(borrower.group)] for node in nodes if str(borrower.group) in node.leaders]
        return [actor.machine for actor in actors if actor.machine.epoch == borrower.epoch]

    def subscribe(self, group: GroupId, born: str) -> None:
        self.on(JoinGroup(group, born))

    def unsubscribe(self, group: GroupId) -> None:
        self.on(QuitGroup(group))

    def close(self) -> None:
        """The connection is gone; the agent stays until its last words are heard."""
        self.closed = True
        self.on(Closed())
        if self.machine.empty:
            self.node.sessions.pop(self.machine.address.name, None)

    def over(self, ended: Ended) -> None:
        if self.closed and self.machine.empty:
            self.node.sessions.pop(self.machine.address.name, None)


class SimBatch(Member):
    """A batch reader."""

    machine: BatchMember

    def __init__(self, node: SimNode, name: str, incarnation: int, group: GroupId, born: str):
        home = Address(node.name, "batch", f"{name}/{incarnation}")
        member = MemberId(name, incarnation)
        machine = BatchMember(member, group, born, home, node.world.member_settings, node.clock())
        super().__init__(node, name, machine)
        node.batches[home.name] = self
        self.arm()

    def current(self, loan: Loan) -> bool:
        return self.machine.member == loan.member

    def leave(self) -> None:
        self.on(Leave())

    def over(self, ended: Ended) -> None:
        self.die()
        self.node.batches.pop(self.machine.home.name, None)
