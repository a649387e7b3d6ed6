"""The promises, each checked as the run goes, and what must be true when the weather has cleared.

one reader per loan           nobody delivers a message while another may deliver it too
one key, one member           nobody is given a message while another, in good standing, has one of the same key
in order                      nobody is given a message before an earlier one of its key was given to somebody
cursors only forward          what is saved covers what was saved before
nothing skipped               what is saved as acknowledged was acknowledged by a client
acknowledged never again      nobody is given what is durable; in an exact run, nobody is given what was acked
one leader                    a leader speaks only while the store, too, counts it as the leader
order                         a shard's next generation begins when the last is consumed (order "strict")
nobody gives up early         what was set aside for its size is too large for everybody who was there for a while
after healing                 everything consumed, balanced within one, nothing left over
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from holdfast.groups.leading.leader import Leader
from holdfast.groups.progress import Done, StreamProgress, overlap, part_of
from holdfast.groups.protocol.effects import GroupSend, Save, StartReading
from holdfast.groups.protocol.messages import (
    Grant,
    LeaderConnectResponse,
    Leased,
    LeaseStreams,
    PingResponse,
    UpdateStreams,
)
from holdfast.groups.protocol.nouns import GroupId, Key, Layer, Loan, Mark, MemberId, Piece
from holdfast.groups.record import GroupRecord
from holdfast.model import Stream
from holdfast.sim.world import Sent, World


class Violation(Exception):
    """A promise was broken; the message says which, where and when."""


class SimReading:
    """A loan that somebody reads right now, or of which something is in flight."""

    __slots__ = ("current", "frozen", "in_flight", "loan", "where")

    def __init__(self, loan: Loan, where: str, current: Callable[[], bool]):
        self.loan, self.where, self.current = loan, where, current
        self.in_flight: set[int] = set()
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
        self._given: dict[tuple[str, Stream], set[int]] = {}
        """Delivered to anybody, at least once."""
        self.starts: dict[str, dict[Stream, int]] = {}
        """By course, where each stream began."""
        self.declared: dict[str, GroupRecord] = {}
        """By `born`, each group as it was declared."""
        self.lent: dict[str, list[SimReading]] = {}
        """By course, loans that are being read, and those of which something is still in flight."""
        self.deliveries = 0
        self.repeats = 0
        self._seated: dict[tuple[int, MemberId], float] = {}
        """Since when each member has been let in, under which epoch."""
        self._told_within = 0.5 if exact else 7.0
        """By then every member has heard of another that takes larger packets, or has stopped for want of answers."""
        world.store.on_save = self.saved

    def fail(self, promise: str, detail: str) -> None:
        raise Violation(f"{promise}: {detail} (at {self.world.now:.3f} s)")

    # ------------------------------------------------------------------------------------- reading

    def started(self, effect: StartReading, where: str, current: Callable[[], bool]) -> SimReading:
        loan = effect.loan
        reading = SimReading(loan, where, current)
        self.lent.setdefault(loan.course, []).append(reading)
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

    def over(self, reading: SimReading) -> None:
        """Nothing of it is in flight any more, or whatever is went back to the group."""
        self.stopped(reading)
        lent = self.lent[reading.loan.course]
        if reading in lent:
            lent.remove(reading)

    def resumed(self, reading: SimReading) -> None:
        """Its node stood still; by now it must have looked at its clock."""
        self._alone(reading, self.readers.get((reading.loan.course, reading.loan.piece.stream), []))

    def delivered(self, reading: SimReading, offset: int) -> None:
        loan = reading.loan
        key = (loan.course, loan.piece.stream)
        self._alone(reading, self.readers.get(key, []))
        self._one_member(reading, offset)
        self._earlier_first(reading, offset)
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

    def parked(self, loan: Loan, offset: int) -> None:
        """Set aside as a dead letter, if it is in that loan's slice; else passed over."""
        messages = self.world.log.messages.get(loan.piece.stream, [])
        done = Done(loan.piece, Mark(), (), self._key(loan.course))
        if offset < len(messages) and done.owns(offset, *messages[offset]):
            self.was_acked(loan, offset)

    def too_large(self, loan: Loan, offsets: Iterable[int], leader: Leader) -> None:
        """Set aside because of its size: it must be too large for everybody whom the leader has let in."""
        for offset in offsets:
            size = self.world.log.sizes.get((loan.piece.stream, offset), 0)
            for seat in leader.seats.values():
                since = self._seated.get((leader.epoch, seat.member), self.world.now)
                if seat.active and seat.packet_max >= size and since < self.world.now - self._told_within:
                    self.fail("nobody gives up early", f"{loan}: {offset} is set aside, and {seat.member} takes it")

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
            if overlap(theirs, mine):
                self.fail("one reader per loan", f"{reading.where} has {reading.loan}, {other.where} has {other.loan}")

    def _key(self, course: str) -> Key:
        return self.declared[course.rpartition(".")[0]].key

    def _one_member(self, reading: SimReading, offset: int) -> None:
        """A member that lost its leader's trust may still have something in flight; nobody can be held to that."""
        course, stream = reading.loan.course, reading.loan.piece.stream
        key, messages = self._key(course), self.world.log.messages
        if key == "message" or stream not in messages:
            return
        parallel = key == "publisher" and self.declared[course.rpartition(".")[0]].order == "parallel"
        word = _word(key, messages[stream][offset])
        for other in self.lent[course]:
            theirs = other.loan.piece.stream
            if not other.in_flight or other.loan.member == reading.loan.member or theirs not in messages:
                continue
            if other.frozen or not other.current() or (parallel and theirs.generation != stream.generation):
                continue
            if any(_word(key, messages[theirs][flying]) == word for flying in other.in_flight):
                self.fail("one key, one member", f"{reading.where} is given {word}, {other.where} has {other.loan}")

    def _earlier_first(self, reading: SimReading, offset: int) -> None:
        course, stream = reading.loan.course, reading.loan.piece.stream
        key, messages = self._key(course), self.world.log.messages.get(stream)
        given = self._given.setdefault((course, stream), set())
        given.add(offset)
        if key == "message" or messages is None:
            return
        acked = self.acked.get((course, stream), set())
        for earlier in range(self.starts.get(course, {}).get(stream, 0), offset):
            if earlier in given or earlier in acked or _word(key, messages[earlier]) != _word(key, messages[offset]):
                continue
            self.fail("in order", f"{reading.where} is given {reading.loan} offset {offset}, nobody {earlier}")

    def _in_order(self, loan: Loan) -> None:
        record = self.declared[loan.course.rpartition(".")[0]]
        if record.order != "strict" or record.key == "message":
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
            after.cursors.keys() == before.cursors.keys()
            and not all(after.cursors[piece].covers(old) for piece, old in before.cursors.items())
        ):
            self.fail("cursors only forward", f"{before} is followed by {after}")
        lost = [o for o, m in self._messages(before.stream) if _done(before, o, m) and not _done(after, o, m)]
        if lost:
            self.fail("cursors only forward", f"{before} is followed by {after}, which lacks {lost}")

    def _messages(self, stream: Stream) -> Iterable[tuple[int, Sent]]:
        return enumerate(self.world.log.messages.get(stream, ()))

    def _nothing_skipped(self, course: str, piece: Piece, mark: Mark, skip: Iterable[Layer], who: str) -> None:
        acked = self.acked.get((course, piece.stream), set())
        start = self.starts.get(course, {}).get(piece.stream, 0)
        done = Done(piece, mark, skip, self._key(course))
        for offset, sent in self._messages(piece.stream):
            if offset < start or offset in acked or not done.owns(offset, *sent):
                continue
            if not done.wants(offset, *sent):
                self.fail("nothing skipped", f"{who}: {piece} offset {offset} was never acknowledged")

    # --------------------------------------------------------------------------------------- leaders

    def leads(self, node: str, others: tuple[str, ...], group: GroupId) -> None:
        if others:
            self.fail("a drained node leads nothing", f"{node} leads {group}, which it was to leave to {others}")

    def leader_says(self, group: GroupId, epoch: int, send: GroupSend) -> None:
        match send.message:
            case Grant(piece=piece, course=course, mark=mark, skip=skip, key=key):
                self._knows_what_is_durable(group, Leased(piece, course, mark, skip, key))
            case LeaseStreams(member=member, streams=streams) | UpdateStreams(member=member, streams=streams):
                self._seated.setdefault((epoch, member), self.world.now)
                for leased in streams:
                    self._knows_what_is_durable(group, leased)
            case LeaderConnectResponse(member=member):
                self._seated.setdefault((epoch, member), self.world.now)
            case PingResponse():
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
        done = Done(leased.piece, leased.mark, leased.skip, leased.key)
        for offset, sent in self._messages(leased.piece.stream):
            if done.wants(offset, *sent) and _done(durable, offset, sent):
                self.fail("acknowledged never again", f"{leased.piece} offset {offset} is durable, and lent again")


def _word(key: Key, sent: Sent) -> str:
    return sent.publisher if key == "publisher" else sent.topic


def _done(progress: StreamProgress, offset: int, sent: Sent) -> bool:
    for piece, cursor in progress.cursors.items():
        if part_of(progress.key, piece.of, offset, *sent) == piece.part and cursor.is_acked(offset):
            return True
    for layer in progress.layers:
        mark = dict(layer.marks).get(part_of(progress.key, layer.of, offset, *sent))
        if mark is not None and mark.cursor().is_acked(offset):
            return True
    return False
