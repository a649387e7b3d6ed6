"""Drives a batch member for a batch reader: the machine on a thread, the reader's calls from any other.

The reader's side is a loop of batches. `assignment` gives a set of pieces under one version; what it gave counts as
being read until `drained`, and a piece that is taken over meanwhile is given back then, with everything `ack`ed.

The one surprising rule: an acknowledgement is a fact, whoever holds the piece by now. What is acknowledged late, after
the piece has moved on or after a restart, is carried to the leader all the same, so that nobody is given it again
who was not given it yet.
"""

from __future__ import annotations

import contextlib
import logging
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from types import TracebackType
from typing import NamedTuple

from holdfast.batch.line import Line, MqttLine
from holdfast.cursors import Cursor, Range
from holdfast.errors import HoldfastError, NodeUnavailable, RequestError
from holdfast.groups.member.batch_member import BatchEvent, BatchMember, BatchMemberStatus, Lent
from holdfast.groups.progress import Done
from holdfast.groups.protocol import wire
from holdfast.groups.protocol.effects import Abandon, Ended, MemberEffect, StartReading, StopReading
from holdfast.groups.protocol.events import Acked, Drained, Leave
from holdfast.groups.protocol.messages import (
    Carried,
    FindLeader,
    LeaseStreams,
    LeaveGroup,
    RenewStreamLease,
    ToBatchMember,
    UpdateStreams,
    UpdateStreamStates,
)
from holdfast.groups.protocol.nouns import GroupId, Key, Layer, Loan, Mark, MemberId, Piece
from holdfast.groups.settings import MemberSettings
from holdfast.groups.shares import check_group_name
from holdfast.jitter import chance
from holdfast.machine import TICK, Address, Send
from holdfast.model import parse_start
from holdfast.topics import check_filter

logger = logging.getLogger("holdfast.batch")

RETRY_SECONDS = 0.1
RETRY_MAX_SECONDS = 1.0


class HeldPiece(NamedTuple):
    """A piece in our hands: where to go on, and what of it others have done."""

    loan: Loan
    mark: Mark
    skip: tuple[Layer, ...]
    key: Key = "publisher"
    """What a slice is of; `done` minds it."""

    @property
    def done(self) -> Done:
        """Says of each message whether it is ours to read."""
        return Done(self.loan.piece, self.mark, self.skip, self.key)


class Assignment(NamedTuple):
    """What we hold under one version; version 0 is none."""

    version: int
    pieces: Mapping[Piece, HeldPiece]


class BatchClient:
    """A member of `group` (`name:filter`), through the node at `node` (`host:port`).

    `start` says where the group begins if it does not exist yet: `latest`, `beginning`, a time or `offset:N`.
    `client_id` must be this client's alone; without one it gets one by chance.
    """

    def __init__(
        self,
        node: str = "127.0.0.1:1883",
        group: str = "",
        client_id: str | None = None,
        username: str | None = None,
        password: str | None = None,
        start: str | None = None,
        *,
        line: Line | None = None,
        settings: MemberSettings | None = None,
        clock: Callable[[], float] = time.monotonic,
    ):
        self.group = parse_group(group)
        self.client_id = client_id or f"lease-{secrets.token_hex(8)}"
        if start is not None:
            parse_start(start)
        self._line: Line = line or MqttLine(node, str(self.group), self.client_id, username, password, start)
        self._clock = clock
        # Higher than that of any earlier client of the same id. Where we are is for the node to say, so "" will do.
        member, home = MemberId(self.client_id, time.time_ns() // 1000), Address("", "batch", self.client_id)
        self._machine = BatchMember(member, self.group, "", home, settings or MemberSettings(), clock())
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._thread: threading.Thread | None = None
        self._events: deque[BatchEvent] = deque()
        self._handling = False
        self._out: list[bytes] = []
        self._starts: dict[Loan, StartReading] = {}
        self._handed: set[Loan] = set()
        """Given to the reader, who has not said `drained` since."""
        self._stopped: set[Loan] = set()
        """Of those, the ones that are to be given back."""
        self._courses: dict[Piece, str] = {}
        self._facts: dict[tuple[Piece, str], Cursor] = {}
        """Acknowledged, of pieces that are not in our hands; until the leader has it on disk."""
        self._fact_count = 0
        self._told: tuple[float, int] | None = None
        self._error: HoldfastError | None = None
        self._closing = False
        self.trouble: str | None = None
        """Why there is no connection to the node just now; None: there is one."""

    def __enter__(self) -> BatchClient:
        self.open()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    # -- for the reader --------------------------------------------------------------------------------

    def open(self) -> None:
        """Connect for the first time: NodeUnavailable or RequestError say why not. Later on it reconnects by itself."""
        if self._thread is None and not self._closing:
            try:
                self._line.open()
            except HoldfastError:
                self._line.close()
                self._closing = True
                raise
            self._thread = threading.Thread(target=self._run, name=f"lease {self.client_id}", daemon=True)
            self._thread.start()

    def join(self, seconds: float = 10.0) -> bool:
        """Wait until there is an assignment, be it an empty one; False if there is none in time."""
        self.open()
        give_up = self._clock() + seconds
        with self._changed:
            while not self._machine.version:
                self._fail()
                left = give_up - self._clock()
                if left <= 0:
                    return False
                self._changed.wait(min(left, 0.5))
        return True

    @property
    def version(self) -> int:
        """The version of the set we hold; 0: none, because there is no leader or no node just now."""
        with self._lock:
            self._catch_up()
            return self._machine.version

    def assignment(self) -> Assignment:
        """What we hold now, each with all that is acknowledged so far; it counts as being read until `drained`."""
        with self._lock:
            # The clock first: what we held may be somebody else's by now.
            self._catch_up()
            self._fail()
            held = {piece: self._held(lent) for piece, lent in self._machine.streams.items()}
            self._handed.update(each.loan for each in held.values())
            return Assignment(self._machine.version, held)

    def _held(self, lent: Lent) -> HeldPiece:
        start = self._starts[lent.loan]
        return HeldPiece(lent.loan, Mark.of_cursor(lent.cursor), start.skip, start.key)

    def ack(self, piece: Piece, ranges: Iterable[Range], course: str = "") -> None:
        """These offsets, first to last, need not be delivered to anybody any more.

        `course` is the loan's; needed only for a piece that an earlier client was given, before a restart.
        """
        news = tuple(ranges)
        with self._lock:
            self._catch_up()
            lent = self._lent(piece)
            course = course or (lent.loan.course if lent else self._courses.get(piece, ""))
            if not course:
                raise RequestError(f"piece {piece} of group {self.group} was never assigned to {self.client_id!r}")
            if lent is not None and lent.loan.course == course:
                self._handle(Acked(lent.loan, news))
                return
            fact = self._facts.setdefault((piece, course), Cursor())
            for first, last in news:
                fact.ack_range(first, last)
            self._fact_count += 1

    def drained(self, still: Iterable[Piece] = ()) -> None:
        """Nothing of what was assigned is being read any more, but for `still`."""
        reading = set(still)
        with self._lock:
            self._catch_up()
            for loan in [loan for loan in self._handed if loan.piece not in reading]:
                self._handed.discard(loan)
                if loan in self._stopped:
                    self._stopped.discard(loan)
                    self._handle(Drained(loan))

    def close(self, seconds: float = 3.0) -> None:
        """Give everything back, with all that is acknowledged, and go; within so long, heard or not."""
        with self._changed:
            if self._closing:
                return
            self._closing = True
            thread = self._thread
            if thread is not None and self._error is None:
                self._handle(Leave())
                give_up = self._clock() + seconds
                while self._machine.status is not BatchMemberStatus.GONE and (left := give_up - self._clock()) > 0:
                    self._changed.wait(min(left, 0.5))
            self._thread = None
            self._changed.notify_all()
        self._line.wake()
        if thread is None:
            self._line.close()
        elif thread is not threading.current_thread():
            thread.join(10)

    def _lent(self, piece: Piece) -> Lent | None:
        found = self._machine.streams.get(piece) or self._machine.taken.get(piece)
        # Once it is reported final, nobody looks at it any more.
        return None if found is None or found.drained else found

    def _fail(self) -> None:
        if self._error is not None:
            raise self._error
        if self._closing:
            raise RequestError(f"the lease client {self.client_id!r} of group {self.group} is closed")

    # -- the machine -----------------------------------------------------------------------------------

    def _catch_up(self) -> None:
        """Let the machine know the time if it wants to; before there is a connection it has nothing to do."""
        while self._thread is not None and self._machine.deadline <= self._clock() and self._error is None:
            self._handle(TICK)

    def _handle(self, event: BatchEvent) -> None:
        """One event, and whatever follows from it here."""
        self._events.append(event)
        if self._handling:
            return
        self._handling = True
        try:
            while self._events:
                for effect in self._machine.handle(self._events.popleft(), self._clock()):
                    self._perform(effect)
        except HoldfastError as error:
            self._error = error
            raise
        finally:
            self._handling = False
            self._events.clear()
        self._changed.notify_all()

    def _perform(self, effect: MemberEffect) -> None:
        match effect:
            case Send(_, message):
                self._say(message)
            case StartReading(loan):
                self._starts[loan] = effect
                self._courses[loan.piece] = loan.course
                fact = self._facts.get((loan.piece, loan.course))
                if fact is not None:
                    whole: list[Range] = [(0, fact.offset)] if fact.offset >= 0 else []
                    self._events.append(Acked(loan, (*whole, *fact.acked)))
            case StopReading(loan):
                self._starts.pop(loan, None)
                if loan in self._handed:
                    self._stopped.add(loan)
                else:
                    self._events.append(Drained(loan))
            case Abandon(loan):
                self._handed.discard(loan)
                self._stopped.discard(loan)
            case Ended(_, _, deleted) if deleted:
                self._error = RequestError(f"group {self.group} was deleted")

    def _say(self, message: object) -> None:
        if not isinstance(message, FindLeader | UpdateStreamStates | LeaveGroup):
            return
        if self._facts:
            facts = [Carried(piece, course, Mark.of_cursor(c)) for (piece, course), c in self._facts.items()]
            message = replace(message, carried=(*message.carried, *facts))
            if isinstance(message, UpdateStreamStates):
                self._told = (message.sent_at, self._fact_count)
        self._out.append(wire.encode(message))
        if threading.current_thread() is not self._thread:
            self._line.wake()

    def _hear(self, payload: bytes) -> None:
        try:
            message = wire.decode(payload)
        except RequestError as error:
            logger.warning("group %s: the node said something else: %s", self.group, error)
            return
        if not isinstance(message, ToBatchMember):
            logger.warning("group %s: %s is not for a batch member", self.group, type(message).__name__)
            return
        with self._lock:
            self._catch_up()
            if isinstance(message, LeaseStreams | UpdateStreams) and message.streams:
                # From now on we mean this very group: if it is deleted, we do not bring it back.
                self._machine.born = message.streams[0].course.rpartition(".")[0]
            if (
                isinstance(message, RenewStreamLease)
                and message.kept
                and self._told == (message.echo, self._fact_count)
            ):
                self._facts.clear()
            self._handle(message)

    # -- the thread ------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            self._serve()
        except HoldfastError as error:
            with self._changed:
                self._error = error
                self._changed.notify_all()
        finally:
            with contextlib.suppress(HoldfastError):
                self._line.close()

    def _serve(self) -> None:
        connected, wait, retry_at = True, RETRY_SECONDS, 0.0
        while True:
            with self._changed:
                self._catch_up()
                if self._thread is not threading.current_thread() or self._machine.status is BatchMemberStatus.GONE:
                    return
                out, self._out = self._out, []
                left = self._machine.deadline - self._clock()
                if not connected and (retry := retry_at - self._clock()) > 0:
                    # What was to be said is dropped: the machine says it again.
                    self._changed.wait(max(0.01, min(left, retry)))
                    continue
            try:
                if not connected:
                    self._line.open()
                    connected, wait, self.trouble = True, RETRY_SECONDS, None
                    logger.info("group %s: %s is connected again", self.group, self.client_id)
                for payload in out:
                    self._line.send(payload)
                for payload in self._line.receive(min(max(left, 0.0), 1.0)):
                    self._hear(payload)
            except NodeUnavailable as error:
                if self.trouble is None:
                    logger.warning("group %s: %s; trying again", self.group, error)
                connected, self.trouble = False, str(error)
                retry_at = self._clock() + wait * (0.5 + chance.random())
                wait = min(wait * 2, RETRY_MAX_SECONDS)


def parse_group(text: str) -> GroupId:
    """`name:filter`, checked."""
    group = GroupId.parse(text)
    if not group.name or not group.filter:
        raise RequestError(f"{text!r} is no group; write NAME:FILTER, such as billing:vehicle/+/trip")
    return GroupId(check_group_name(group.name), check_filter(group.filter))
