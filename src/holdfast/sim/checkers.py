"""The promises, each checked as the run goes, and what must be true when the weather has cleared.

one reader per loan           nobody delivers a message while another may deliver it too
cursors only forward          what is saved covers what was saved before
nothing skipped               what is saved as acknowledged was acknowledged by a client
acknowledged never again      nobody is given what is durable; in an exact run, nobody is given what was acked
one leader                    a leader speaks only while the store, too, counts it as the leader
order                         a shard's next generation begins when the last is consumed (order "strict")
after healing                 everything consumed, balanced within one, nothing left over
"""

from __future__ import annotations

from collections.abc import Iterable

from holdfast.groups.progress import Done, StreamProgress, slice_of
from holdfast.groups.protocol.effects import GroupSend, Save, StartReading
from holdfast.groups.protocol.messages import (
    Grant,
    LeaderConnectResponse,
    Leased,
    LeaseStreams,
    PingResponse,
    UpdateStreams,
)
from holdfast.groups.protocol.nouns import GroupId, Layer, Loan, Mark, Piece
from holdfast.model import Stream
from holdfast.sim.world import World


class Violation(Exception):
    """A promise was broken; the message says which, where and when."""


class SimReading:
    """A loan that somebody reads right now."""

    __slots__ = ("frozen", "loan", "where")

    def __init__(self, loan: Loan, where: str):
        self.loan, self.where = loan, where
        self.frozen = False
        """Its node stands still, so it can deliver nothing."""


class Truth:
    """What really happened, as only the world can know it."""

    def __init__(self, world: World, *, exact: bool = False):
        self.world, self.exact = world, exact
        self.readers: dict[tuple[str, Stream], list[SimReading]] = {}
        self.acked: dict[tuple[str, Stream], set[int]] = {}
        self.owed: dict[tuple[str, Stream], dict[int, str]] = {}
        """Acknowledged under a loan in good standing, and to whom; a crash of that one excuses its loss."""
        self.starts: dict[str, dict[Stream, int]] = {}
        """By course, where each stream began."""
        self.orders: dict[str, str] = {}
        self.deliveries = 0
        self.repeats = 0
        world.store.on_save = self.saved

    def fail(self, promise: str, detail: str) -> None:
        raise Violation(f"{promise}: {detail} (at {self.world.now:.3f} s)")

    # ------------------------------------------------------------------------------------- reading

    def started(self, effect: StartReading, where: str) -> SimReading:
        loan = effect.loan
        reading = SimReading(loan, where)
        standing = self.readers.setdefault((loan.course, loan.piece.stream), [])
        self._alone(reading, standing)
        standing.append(reading)
        self._nothing_skipped(loan.course, loan.piece, effect.mark, effect.skip, f"{where} starts {loan}")
        self._in_order(loan)
        return reading

    def stopped(self, reading: SimReading) -> None:
        standing = self.readers[reading.loan.course, reading.loan.piece.stream]
        if reading in standing:
            standing.remove(reading)

    def resumed(self, reading: SimReading) -> None:
        """Its node stood still; by now it must have looked at its clock."""
        self._alone(reading, self.readers.get((reading.loan.course, reading.loan.piece.stream), []))

    def delivered(self, reading: SimReading, offset: int) -> None:
        loan = reading.loan
        key = (loan.course, loan.piece.stream)
        self._alone(reading, self.readers.get(key, []))
        self.deliveries += 1
        if offset in self.acked.get(key, ()):
            self.repeats += 1
            if self.exact and offset in self.owed.get(key, ()):
                self.fail("acknowledged never again", f"{reading.where} is given {loan.piece} offset {offset}")

    def was_acked(self, loan: Loan, offset: int, where: str = "") -> None:
        """A client acknowledged it; `where` says to whom, unless nothing is owed for it."""
        key = (loan.course, loan.piece.stream)
        self.acked.setdefault(key, set()).add(offset)
        if where:
            self.owed.setdefault(key, {})[offset] = where

    def crashed(self, where: str) -> None:
        """Whatever was known only there is lost, and nobody is to blame."""
        for key, owed in self.owed.items():
            self.owed[key] = {offset: to for offset, to in owed.items() if to != where}

    def _alone(self, reading: SimReading, standing: Iterable[SimReading]) -> None:
        mine = reading.loan.piece
        for other in standing:
            if other is reading or other.frozen:
                continue
            theirs = other.loan.piece
            if theirs.of != mine.of or theirs.part == mine.part:
                self.fail("one reader per loan", f"{reading.where} has {reading.loan}, {other.where} has {other.loan}")

    def _in_order(self, loan: Loan) -> None:
        if self.orders.get(loan.course.rpartition(".")[0], "strict") != "strict":
            return
        stream = loan.piece.stream
        for earlier, messages in self.world.log.messages.items():
            if earlier.shard == stream.shard and earlier.generation < stream.generation:
                start = self.starts.get(loan.course, {}).get(earlier, 0)
                acked = self.acked.get((loan.course, earlier), set())
                if earlier not in self.world.log.sealed or any(o not in acked for o in range(start, len(messages))):
                    self.fail("order", f"{loan} begins before {earlier} is consumed")

    # --------------------------------------------------------------------------------------- saving

    def saved(self, save: Save, now: float) -> None:
        if save.record is not None:
            self.starts[save.record.course] = dict(save.record.starts)
            self.orders[save.record.born] = save.record.order
        for progress in save.progress:
            before = self.world.store.progress.get((save.group, progress.stream))
            if before and before.course == progress.course:
                self._forward(before, progress)
            for piece in progress.pieces():
                self._nothing_skipped(
                    progress.course, piece, progress.mark(piece), progress.layers, f"save by epoch {save.epoch}"
                )

    def _forward(self, before: StreamProgress, after: StreamProgress) -> None:
        if after.floor < before.floor or (
            after.of == before.of
            and not all(new.covers(old) for new, old in zip(after.cursors, before.cursors, strict=True))
        ):
            self.fail("cursors only forward", f"{before} is followed by {after}")
        lost = [o for o, p in self._messages(before.stream) if _done(before, o, p) and not _done(after, o, p)]
        if lost:
            self.fail("cursors only forward", f"{before} is followed by {after}, which lacks {lost}")

    def _messages(self, stream: Stream) -> Iterable[tuple[int, str]]:
        return enumerate(self.world.log.messages.get(stream, ()))

    def _nothing_skipped(self, course: str, piece: Piece, mark: Mark, skip: Iterable[Layer], who: str) -> None:
        acked = self.acked.get((course, piece.stream), set())
        start = self.starts.get(course, {}).get(piece.stream, 0)
        done = Done(piece, mark, skip)
        for offset, publisher in self._messages(piece.stream):
            if offset < start or offset in acked or slice_of(publisher, piece.of) != piece.part:
                continue
            if not done.wants(offset, publisher):
                self.fail("nothing skipped", f"{who}: {piece} offset {offset} was never acknowledged")

    # --------------------------------------------------------------------------------------- leaders

    def leader_says(self, group: GroupId, epoch: int, send: GroupSend) -> None:
        match send.message:
            case Grant(piece=piece, course=course, mark=mark, skip=skip):
                self._knows_what_is_durable(group, Leased(piece, course, mark, skip))
            case LeaseStreams(streams=streams) | UpdateStreams(streams=streams):
                for leased in streams:
                    self._knows_what_is_durable(group, leased)
            case PingResponse() | LeaderConnectResponse():
                pass
            case _:
                return
        standing = self.world.store.standing(group, self.world.now)
        if standing is None or standing.epoch != epoch:
            self.fail("one leader", f"epoch {epoch} of {group} says {send.message}, but {standing} stands")

    def _knows_what_is_durable(self, group: GroupId, leased: Leased) -> None:
        durable = self.world.store.progress.get((group, leased.piece.stream))
        if durable is None or durable.course != leased.course:
            return
        done = Done(leased.piece, leased.mark, leased.skip)
        for offset, publisher in self._messages(leased.piece.stream):
            if done.wants(offset, publisher) and _done(durable, offset, publisher):
                self.fail("acknowledged never again", f"{leased.piece} offset {offset} is durable, and lent again")


def _done(progress: StreamProgress, offset: int, publisher: str) -> bool:
    if progress.cursors[slice_of(publisher, progress.of)].is_acked(offset):
        return True
    for layer in progress.layers:
        mark = dict(layer.marks).get(slice_of(publisher, layer.of))
        if mark is not None and mark.cursor().is_acked(offset):
            return True
    return False
