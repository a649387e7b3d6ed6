"""The life of one session on one node: who may serve it, and what the store must know before anybody is told.

    NONE ──▶ LOOKING ──▶ ASKING ──▶ TAKING ──▶ HERE ◀──▶ FROZEN
      ▲         │                    ▲  │        │          │
      └─────────┴────────────────────┼──┴────────▼──────────┘
      ▲                              └────── LEAVING

One machine per client id with something going on; a session that is away has none. Everything about a session is one
row (`table.SessionRow`), changed only by whoever has seen it as it is. There is one write under way at a time; what
comes meanwhile is merged into the next one. A write that nobody knows the fate of is repeated as it is until there is a
verdict, whatever has become of its CONNECT: then at most one copy lands, and the row tells that it was ours.

The one surprising rule: a machine that is in doubt about a take promises nothing to anybody, and one that is past
`trusted_until` serves nobody, whatever the event says: the clock is looked at first.

What a host does
----------------
- One `SessionNode` per node; `granted`, `renewed`, `lost` when the lease says so. `Tick` to *every* machine when
  `trusted_until` has passed, and when the lease is renewed after that or is a new one: a machine's own `deadline` does
  not follow the lease, or every renewal would wake every machine. Nothing is sent to a client unless its machine is
  HERE and `now < trusted_until` (one comparison per commit).
- `Connect` makes the machine if there is none, `Forget` drops it; no two CONNECTs, on whatever node, share a token.
- Effects of all machines are gathered: `ReadRow` into one `table.read` (with `lease_over`: whether the lease that the
  row names has ended), `WriteRow` into one `table.write`. Every `WriteRow` is answered once: `Written`, or `Failed`
  (`in_doubt` unless it is certain that nothing was written). A read that fails needs no answer: it is asked for again.
- `content(leaving)` is asked when a write is made and when the connection ends (`leaving`: nothing is sent or heard
  after it); never after `Close`, `Refuse` or `Gone`.
- A `Release` for a client without a machine goes to `answer_unheld`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum, auto
from math import inf
from zlib import crc32

import msgspec

from holdfast.errors import BrokenInvariant
from holdfast.machine import Address, Send, Tick
from holdfast.mqtt.reasons import IN_CONNACK, Reason
from holdfast.sessions.changes import Change, Content, Departure, FiltersOf, flushed, left, taken, write
from holdfast.sessions.clock import StoreClock
from holdfast.sessions.table import RowWrite, SessionRow, StoredWill, Verdict


class State(Enum):
    NONE = auto()
    """Away, or unknown: the machine may be dropped."""
    LOOKING = auto()
    """A CONNECT waits; the row is being read."""
    ASKING = auto()
    """Another node owns it, and is asked to let go."""
    TAKING = auto()
    """The row under a new epoch is being written, for a CONNECT or to go on under a new lease."""
    HERE = auto()
    """Connected: it delivers, takes acknowledgements, flushes."""
    FROZEN = auto()
    """The lease is over by the node's own clock: the socket stays open, nothing is read or sent."""
    LEAVING = auto()
    """The connection is over; the last write is not durable yet."""

    __hash__ = object.__hash__  # by its name, as enums have it, is a call for each look into a table


LEGAL: dict[State, set[State]] = {
    State.NONE: {State.LOOKING},
    State.LOOKING: {State.ASKING, State.TAKING, State.NONE},
    State.ASKING: {State.TAKING, State.NONE},
    State.TAKING: {State.HERE, State.LOOKING, State.LEAVING, State.FROZEN},
    State.HERE: {State.FROZEN, State.LEAVING},
    State.FROZEN: {State.HERE, State.TAKING, State.LEAVING},
    State.LEAVING: {State.TAKING, State.LOOKING, State.NONE},
}

_MOVES = {(one, to): f"{one.name} -> {to.name}" for one in State for to in State}


@dataclass(frozen=True, kw_only=True, slots=True)
class LifeSettings:
    connect_wait_secs: float = 10.0
    """How long a CONNECT waits for its session: longer than a lease."""
    ask_secs: float = 0.2
    """How often another owner is asked to let go."""
    read_secs: float = 1.0
    """A read that has not been answered is asked for again after this long."""
    write_secs: float = 0.5
    """A write that failed is tried again after this long."""
    flush_secs: float = 5.0
    """How long what a client has acknowledged may be unsaved."""
    close_secs: float = 1.0
    """How long the socket of a client that has said good-bye stays open until that is durable."""
    freeze_secs: float = 30.0
    """How long a connection waits for its node to have a lease again."""
    grace_secs: float = 15.0
    """How long the clients of a node that ended have to come back before they count as gone."""
    lease_secs: float = 5.0
    margin_secs: float = 0.5
    """A node stops trusting its lease this long before it ends."""


class SessionNode:
    """What all machines of a node share, and only read: its name, its lease, the store's clock."""

    def __init__(self, name: str, clock: StoreClock, settings: LifeSettings, filters_of: FiltersOf):
        self.name, self.clock, self.settings, self.filters_of = name, clock, settings, filters_of
        self.lease: int | None = None
        self.trusted_until = -inf
        """By this node's monotonic clock."""

    def granted(self, lease: int, asked_at: float) -> None:
        self.lease, self.trusted_until = lease, -inf
        self.renewed(asked_at)

    def renewed(self, asked_at: float) -> None:
        """Counted from when it was *asked* for: nobody knows when the store heard it."""
        until = asked_at + self.settings.lease_secs - self.settings.margin_secs
        self.trusted_until = max(self.trusted_until, until)

    def lost(self) -> None:
        """The store says that it has ended: it never comes back."""
        self.lease, self.trusted_until = None, -inf


# ---------------------------------------------------------------------------------------------- events


@dataclass(frozen=True, slots=True)
class Connect:
    """A client wants its session, or a new one."""

    token: str
    """Random: the store tells by it which CONNECT a row was taken for."""
    clean_start: bool
    expiry_secs: int
    will: StoredWill | None = None
    may_begin: bool = True
    """There is room for one more session, if this client has none."""
    reason: int = Reason.SESSION_TAKEN_OVER
    """What the connection before is told. An operator who ends a session takes it first, as a client would."""


@dataclass(frozen=True, slots=True)
class Gone:
    """A connection is over: the client said DISCONNECT, or was lost, or did not wait for its CONNACK."""

    token: str
    goodbye: bool = False
    expiry_secs: int | None = None


@dataclass(frozen=True, slots=True)
class Moved:
    """There is something new to flush: cursors, or what is in flight."""


@dataclass(frozen=True, slots=True)
class Subscribed:
    """`content()` has other subscriptions; `Saved(number)` is wanted when that is durable."""

    number: int


@dataclass(frozen=True, slots=True)
class Found:
    """The answer to a `ReadRow`."""

    number: int
    row: SessionRow | None
    lease_over: bool = False
    """The lease that the row names has ended."""


@dataclass(frozen=True, slots=True)
class Written:
    """The verdict on the write under way."""

    verdict: Verdict


@dataclass(frozen=True, slots=True)
class Failed:
    """The transaction of the write under way failed, or nobody knows."""

    in_doubt: bool = True
    """It may still land, even seconds later."""


@dataclass(frozen=True, slots=True)
class Stop:
    """The node stops, or sends this client elsewhere."""

    reason: int = Reason.SERVER_SHUTTING_DOWN
    lease_stays: bool = False
    """Only this client goes: the sweep would not find its row for long, so it is written whatever is in it."""


@dataclass(frozen=True, slots=True)
class Release:
    """Taker -> owner. Close, save, let go. Repeated until the row has changed or the owner's lease is over."""

    client_id: str
    epoch: int
    lease: int
    reply_to: Address
    reason: int = Reason.SESSION_TAKEN_OVER
    """What the client is told. An operator's node may ask too, and take nothing."""


@dataclass(frozen=True, slots=True)
class Released:
    """Owner -> taker. I do not act under this epoch and never will."""

    client_id: str
    epoch: int


Event = Connect | Gone | Moved | Subscribed | Found | Written | Failed | Stop | Release | Released | Tick


# --------------------------------------------------------------------------------------------- effects


@dataclass(frozen=True, slots=True)
class ReadRow:
    """Read the row, and whether the lease it names has ended: a `Found` with this number."""

    number: int


@dataclass(frozen=True, slots=True)
class WriteRow:
    """One change of the row, in whatever transaction comes next: one `Written` or `Failed`."""

    write: RowWrite


@dataclass(frozen=True, slots=True)
class Welcome:
    """The session is this connection's: CONNACK. Its parts are made from the row."""

    token: str
    session_present: bool
    row: SessionRow
    previous: str
    """The token of the connection before. Empty: there was none."""


@dataclass(frozen=True, slots=True)
class Refuse:
    """CONNACK with this reason, and the end of that connection."""

    token: str
    reason: int


@dataclass(frozen=True, slots=True)
class Close:
    """The end of a connection that was welcome; without a reason nothing is said."""

    token: str
    reason: int | None


@dataclass(frozen=True, slots=True)
class Freeze:
    """Read nothing from this connection and send it nothing, but leave it open."""

    token: str


@dataclass(frozen=True, slots=True)
class Resume:
    """Go on with it."""

    token: str


@dataclass(frozen=True, slots=True)
class Saved:
    """That change of subscriptions is durable."""

    number: int


@dataclass(frozen=True, slots=True)
class Forget:
    """The machine may be dropped."""


Effect = ReadRow | WriteRow | Send[Release | Released] | Welcome | Refuse | Close | Freeze | Resume | Saved | Forget


# --------------------------------------------------------------------------------------------- machine


@dataclass(slots=True)
class _Connection:
    """One CONNECT, from when it arrives until its connection is over."""

    connect: Connect
    arrived_at: float
    """By the store's clock."""
    give_up_at: float
    welcome: bool = False
    previous: str = ""
    """The connection that the row was taken for before."""

    @property
    def token(self) -> str:
        return self.connect.token


@dataclass(slots=True)
class _Pending:
    """The write under way."""

    write: RowWrite
    connection: _Connection | None = None
    """A take is for this one."""
    resumes: bool = False
    """It was taken before, under another lease."""
    numbers: list[int] = field(default_factory=list)
    """Changes of subscriptions that it makes durable."""
    flies: bool = True
    """The host has not answered yet."""
    in_doubt: bool = False
    """An earlier copy of it may still land."""
    again_at: float = inf
    departure: Departure | None = None
    """A take's connection has ended meanwhile."""
    memory: Content | None = None
    """What that connection left behind, if it was welcome before."""


def answer_unheld(release: Release, node: SessionNode) -> list[Send[Released]]:
    """A node that has no machine for that client, and so no write under way, says so at once."""
    if node.lease is None or release.lease != node.lease:
        return []
    return [Send(release.reply_to, Released(release.client_id, release.epoch))]


class SessionLife:
    """One client id on one node; `state` NONE: it may be dropped."""

    __slots__ = (
        "_again_at",
        "_ask_at",
        "_asked",
        "_askers",
        "_close_at",
        "_closing",
        "_connection",
        "_content",
        "_departure",
        "_flush_at",
        "_found",
        "_frozen_until",
        "_memory",
        "_moved",
        "_numbers",
        "_out",
        "_pending",
        "_read_at",
        "_reads",
        "_released",
        "_waiting",
        "client_id",
        "moves",
        "node",
        "row",
        "state",
    )

    def __init__(self, client_id: str, node: SessionNode, content: Callable[[bool], Content]):
        self.client_id, self.node, self._content = client_id, node, content
        self.state = State.NONE
        self.row: SessionRow | None = None
        """As this node has last written it: its own, or just let go. None: nothing is known for sure."""
        self.moves: list[str] = []
        self._out: list[Effect] = []
        self._waiting: _Connection | None = None
        """The newest CONNECT, while it is not being worked for."""
        self._connection: _Connection | None = None
        """The one that the row is being taken for, or was taken for."""
        self._departure: Departure | None = None
        """The connection of `row` is over, and the row does not say so yet."""
        self._memory: Content | None = None
        """What the row is to have then, if it is not in it already."""
        self._pending: _Pending | None = None
        self._moved = False
        self._numbers: list[int] = []
        self._flush_at = self._again_at = self._frozen_until = inf
        self._read_at = self._ask_at = inf
        self._reads = 0
        self._found: Found | None = None
        self._asked: SessionRow | None = None
        self._released: int | None = None
        self._askers: dict[Address, int] = {}
        self._closing: str | None = None
        self._close_at = inf

    # -- what a host may ask -----------------------------------------------------------------------------

    @property
    def token(self) -> str | None:
        """The connection that is welcome, frozen or not."""
        connection = self._connection
        return connection.token if connection is not None and connection.welcome else None

    def serves(self, now: float) -> bool:
        """Something may be sent to its client, and what it says may be heard."""
        return self.state is State.HERE and self._is_trusted(now)

    @property
    def deadline(self) -> float:
        found = min(self._close_at, self._read_at, self._ask_at, self._frozen_until)
        if self._waiting is not None:
            found = min(found, self._waiting.give_up_at)
        if self._connection is not None and not self._connection.welcome:
            found = min(found, self._connection.give_up_at)
        if self._pending is not None:
            return min(found, self._pending.again_at)
        return min(found, self._again_at if self._again_at < inf else self._flush_at)

    # -- the one door ------------------------------------------------------------------------------------

    def handle(self, event: Event, now: float) -> list[Effect]:
        self._look_at_clock(now)
        match event:
            case Moved():
                self._on_moved(now)
            case Written(verdict):
                self._on_written(verdict, now)
            case Connect():
                self._on_connect(event, now)
            case Gone():
                self._on_gone(event, now)
            case Found():
                self._on_found(event, now)
            case Subscribed(number):
                if self.token is not None:
                    self._numbers.append(number)
            case Failed(in_doubt):
                self._on_failed(in_doubt, now)
            case Release():
                self._on_release(event, now)
            case Released(_, epoch):
                self._on_released(epoch, now)
            case Stop():
                self._on_stop(event, now)
        self._give_up(now)
        self._go_on(now)
        out, self._out = self._out, []
        return out

    def _look_at_clock(self, now: float) -> None:
        """Whatever the event says: past `trusted_until` nobody is served."""
        if self.state is State.HERE and not self._is_trusted(now):
            self._move(State.FROZEN)
            self._frozen_until, self._flush_at = now + self.node.settings.freeze_secs, inf
            assert self._connection is not None
            self._out.append(Freeze(self._connection.token))

    def _give_up(self, now: float) -> None:
        """What has been waited for long enough; after the event, which may have been the last thing to wait for."""
        if self._waiting is not None and now >= self._waiting.give_up_at:
            self._refuse_waiting(Reason.SERVER_UNAVAILABLE, now)
        connection = self._connection
        if connection is not None and not connection.welcome and now >= connection.give_up_at:
            self._end_connection(Departure(self._time(now)), Reason.SERVER_UNAVAILABLE, now)
        if now >= self._frozen_until:
            self._end_connection(self._our_fault(now), Reason.SERVER_BUSY, now)
        if now >= self._close_at:
            self._close_socket()

    # -- a client comes ----------------------------------------------------------------------------------

    def _on_connect(self, connect: Connect, now: float) -> None:
        """The last CONNECT stays: whoever waited, or is connected, makes room."""
        arrived_at = self._time(now)
        if self._waiting is not None:
            self._out.append(Refuse(self._waiting.token, Reason.SERVER_UNAVAILABLE))
        self._waiting = _Connection(connect, arrived_at, now + self.node.settings.connect_wait_secs)
        if self._connection is not None:
            self._end_connection(Departure(arrived_at), connect.reason, now)
        if self.state is State.NONE:
            self._look(now)

    def _look(self, now: float) -> None:
        self._move(State.LOOKING)
        self._found = self._asked = self._released = None
        self._read(now)

    def _read(self, now: float) -> None:
        self._reads += 1
        self._read_at = now + self.node.settings.read_secs
        self._out.append(ReadRow(self._reads))

    def _on_found(self, found: Found, now: float) -> None:
        """An answer to an older question may be older than what we were told since: it is passed over."""
        if self.state in (State.LOOKING, State.ASKING) and found.number == self._reads:
            self._found, self._read_at = found, inf

    def _on_released(self, epoch: int, now: float) -> None:
        asked = self._asked
        if self.state is State.ASKING and asked is not None and asked.epoch == epoch != self._released:
            self._released = epoch
            self._read(now)  # whatever is being read may be older than what the owner has saved

    def _decide(self, found: Found, now: float) -> None:
        """The row is known; may it be taken?"""
        row = found.row
        assert self._waiting is not None
        if (row is None or row.dead) and not self._waiting.connect.may_begin:
            self._refuse_waiting(Reason.QUOTA_EXCEEDED, now)
        elif (
            row is None
            or row.lease is None
            or row.lease == self.node.lease  # nobody here holds it, or it would not have been read
            or found.lease_over
            or row.epoch == self._released
        ):
            connection = self._begin_taking()
            self._take(row, Change(row) if row is not None else None, connection, connection.arrived_at, now)
        else:
            self._ask(row, now)

    def _ask(self, row: SessionRow, now: float) -> None:
        if self.state is State.LOOKING:
            self._move(State.ASKING)
        if self._asked is None or self._asked.epoch != row.epoch:
            self._asked, self._ask_at = row, now
        if now < self._ask_at:
            return
        self._ask_at = now + self.node.settings.ask_secs
        if row.owner is not None and row.lease is not None:
            reply_to = Address(self.node.name, "session", self.client_id)
            assert self._waiting is not None
            release = Release(self.client_id, row.epoch, row.lease, reply_to, self._waiting.connect.reason)
            self._out.append(Send(Address(row.owner, "session", self.client_id), release))

    def _begin_taking(self) -> _Connection:
        connection, self._waiting = self._waiting, None
        assert connection is not None
        self._connection = connection
        self._read_at = self._ask_at = inf
        self._found = self._asked = self._released = None
        self._move(State.TAKING)
        return connection

    def _take(
        self, old: SessionRow | None, basis: Change | None, connection: _Connection, arrived_at: float, now: float
    ) -> None:
        """Take the row `old` for a CONNECT; `basis`: what it would be after the end of the connection before."""
        connect, node = connection.connect, self.node
        assert node.lease is not None
        change = taken(
            basis.row if basis is not None else None,
            self.client_id,
            connect.token,
            connect.clean_start,
            connect.expiry_secs,
            connect.will,
            node.name,
            node.lease,
            arrived_at,
        )
        if basis is not None and basis.publish is not None:
            change = change._replace(publish=basis.publish)
        connection.previous = old.connect if old is not None and change.row.born != connect.token else ""
        self._write(_Pending(write(old, change, take=True, filters_of=node.filters_of), connection))

    def _take_from_memory(self, now: float) -> None:
        """Its client is back, and nobody else has had the row: nothing is read, and the last write is this one."""
        row, departure = self.row, self._departure
        assert row is not None
        connection = self._begin_taking()
        arrived_at = connection.arrived_at
        basis = Change(row)
        if departure is not None:
            arrived_at = max(arrived_at, departure.at)
            basis = left(self._remembered(row), departure, arrived_at)
        self._take(row, basis, connection, arrived_at, now)

    def _resume(self, now: float) -> None:
        """Under a new lease: the same session, the same connection, a new epoch."""
        row, node = self.row, self.node
        assert row is not None
        assert self._connection is not None
        assert node.lease is not None
        self._move(State.TAKING)
        self._frozen_until = inf
        # One that was never welcome has nothing in memory but its row.
        content = self._content(False) if self._connection.welcome else _content_of(row)
        kept = msgspec.structs.replace(flushed(row, content), owner=node.name, lease=node.lease)
        self._moved = False
        change = write(row, Change(kept), take=True, filters_of=node.filters_of)
        self._write(_Pending(change, self._connection, resumes=True, numbers=self._take_numbers()))

    # -- a client goes -----------------------------------------------------------------------------------

    def _on_gone(self, gone: Gone, now: float) -> None:
        if self._waiting is not None and self._waiting.token == gone.token:
            self._waiting = None
            self._nobody_waits()
        elif self._connection is not None and self._connection.token == gone.token:
            if gone.goodbye:
                self._closing, self._close_at = gone.token, now + self.node.settings.close_secs
            self._end_connection(Departure(self._time(now), gone.goodbye, gone.expiry_secs), None, now)

    def _on_stop(self, stop: Stop, now: float) -> None:
        if self._waiting is not None:
            self._refuse_waiting(Reason.USE_ANOTHER_SERVER, now)
        connection = self._connection
        if connection is not None:
            departure = self._our_fault(now)._replace(lease_stays=stop.lease_stays)
            self._end_connection(departure, stop.reason if connection.welcome else Reason.USE_ANOTHER_SERVER, now)

    def _on_release(self, release: Release, now: float) -> None:
        """Answered when the row is durable; not while a write is under way, or in doubt: we are asked again."""
        if self.node.lease is None or release.lease != self.node.lease:
            return
        if self._pending is not None and self._pending.write.take:
            return
        if self.row is not None and self.row.epoch == release.epoch and self._holds:
            self._askers[release.reply_to] = release.epoch
            if self._connection is not None:
                self._end_connection(Departure(self._time(now)), release.reason, now)
        elif self._pending is None:
            self._out.append(Send(release.reply_to, Released(self.client_id, release.epoch)))

    def _refuse_waiting(self, reason: int, now: float) -> None:
        assert self._waiting is not None
        self._out.append(Refuse(self._waiting.token, reason))
        self._waiting = None
        self._nobody_waits()

    def _nobody_waits(self) -> None:
        if self.state in (State.LOOKING, State.ASKING):
            self._read_at = self._ask_at = inf
            self._found = self._asked = self._released = None
            self._end()

    def _end_connection(self, departure: Departure, reason: int | None, now: float) -> None:
        """Whatever it was doing is over; what is to be saved of it is kept until it is."""
        connection, pending = self._connection, self._pending
        assert connection is not None
        self._connection, self._frozen_until, self._flush_at = None, inf, inf
        if reason is not None:
            if connection.welcome:
                self._out.append(Close(connection.token, reason))
            else:
                said = reason if reason in IN_CONNACK else Reason.SERVER_UNAVAILABLE
                self._out.append(Refuse(connection.token, said))
        self._move(State.LEAVING)
        self._numbers.clear()
        if pending is not None and pending.connection is connection:
            if pending.flies or pending.in_doubt:
                pending.departure = departure
                # The same as is being written, but as the connection's last word: packet ids go on where they were.
                pending.memory = self._content(True) if connection.welcome else None
                return
            self._pending = None  # it is certain that it was not written
            if not pending.resumes:
                return  # the departure before, if it was taken from memory, is still to be saved
        self._departure = departure
        self._memory = self._content(True) if connection.welcome else None

    @property
    def _holds(self) -> bool:
        """`row` is this node's, and nothing says that it was let go."""
        return self._connection is not None or self._departure is not None

    def _our_fault(self, now: float) -> Departure:
        return Departure(self._time(now), grace_secs=self.node.settings.grace_secs)

    # -- the row -----------------------------------------------------------------------------------------

    def _on_moved(self, now: float) -> None:
        """A session that ends with its connection is not flushed: nobody would go on from there."""
        if self.token is None or self._moved or self.row is None or not self.row.expiry_secs:
            return
        self._moved = True
        if self.state is State.HERE:
            self._flush_at = self._next_flush(now)

    def _next_flush(self, now: float) -> float:
        """Each client has its own moment in every `flush_secs`: all may have moved at once, by one message to all."""
        every = self.node.settings.flush_secs
        if not every:
            return now
        return now + every - (now + crc32(self.client_id.encode("utf-8", "replace")) % 1009 / 1009 * every) % every

    def _write(self, pending: _Pending) -> None:
        self._pending = pending
        self._out.append(WriteRow(pending.write))

    def _write_again(self, now: float) -> None:
        """The same change against the same state of the row; under the lease of today, if there is one."""
        pending = self._pending
        assert pending is not None
        row = pending.write.row
        if pending.write.take and self.node.lease is not None and row.lease != self.node.lease:
            pending.write = pending.write._replace(row=msgspec.structs.replace(row, lease=self.node.lease))
        pending.flies, pending.again_at = True, inf
        self._out.append(WriteRow(pending.write))

    def _on_written(self, verdict: Verdict, now: float) -> None:
        pending, self._pending = self._pending, None
        assert pending is not None
        if not verdict.accepted and not self._is_ours(pending.write, verdict.row):
            self._on_refused(pending, verdict.row, now)
            return
        self.row = verdict.row
        if self._connection is not None:
            self._out += [Saved(number) for number in pending.numbers]
        if pending.write.take:
            self._on_taken(pending, now)
        elif self._departure is not None and pending.write.row.lease is None:
            self._departure = self._memory = None
            self._close_socket()

    def _is_ours(self, wanted: RowWrite, row: SessionRow | None) -> bool:
        """A refusal shows the row as an earlier copy of this write has left it."""
        if row is None or wanted.expected is None:
            return row is not None and wanted.take and _same_take(wanted.row, row)
        if wanted.take:
            return row.epoch != wanted.expected[0] and _same_take(wanted.row, row)
        return (row.epoch, row.seq) == (wanted.row.epoch, wanted.row.seq)

    def _on_taken(self, pending: _Pending, now: float) -> None:
        """The row is ours, and its connection may have ended while it was written: then it was lost."""
        self._departure, self._memory = pending.departure, pending.memory
        if not pending.resumes:
            self._moved = False
            self._close_socket()
        if pending.departure is not None:
            return
        if self._is_trusted(now):
            self._serve(now)
        else:
            self._move(State.FROZEN)
            self._frozen_until = now + self.node.settings.freeze_secs

    def _on_refused(self, pending: _Pending, row: SessionRow | None, now: float) -> None:
        """Somebody else has changed the row: whatever we knew of it is void."""
        connection = self._connection
        self.row = self._departure = self._memory = None
        self._moved = False
        self._close_socket()
        if connection is None:
            return
        if pending.connection is connection and not pending.resumes and not pending.in_doubt:
            # Nothing of it was ever stored: it is decided again.
            self._waiting, self._connection = connection, None
            self._look(now)
            return
        # A take in doubt may have landed, been taken over and had its will published: it is not tried again.
        elsewhere = row is not None and row.lease is not None
        busy = Reason.SERVER_BUSY if connection.welcome else Reason.SERVER_UNAVAILABLE
        self._end_connection(Departure(0.0), Reason.SESSION_TAKEN_OVER if elsewhere else busy, now)
        self._departure = self._memory = None

    def _on_failed(self, in_doubt: bool, now: float) -> None:
        pending = self._pending
        assert pending is not None
        again_at = now + self.node.settings.write_secs
        pending.in_doubt = pending.in_doubt or in_doubt
        if pending.in_doubt or (pending.write.take and pending.departure is None):
            pending.flies, pending.again_at = False, again_at
            return
        # It is certain that nothing was written: the next write is made from what is to be said by then.
        self._pending, self._again_at = None, again_at
        if pending.resumes:
            self._departure, self._memory = pending.departure, pending.memory or _content_of(pending.write.row)
        elif self._connection is not None:
            self._numbers = [*pending.numbers, *self._numbers]
            self._moved = True
            if self.state is State.HERE:
                self._flush_at = again_at

    # -- what comes next ---------------------------------------------------------------------------------

    def _go_on(self, now: float) -> None:
        """The one place that begins something: after every event, from what is known by then."""
        pending = self._pending
        if pending is not None:
            if now >= pending.again_at:
                self._write_again(now)
            return
        if now >= self._again_at:
            self._again_at = inf
        match self.state:
            case State.LOOKING | State.ASKING:
                self._go_on_looking(now)
            case State.FROZEN:
                self._go_on_frozen(now)
            case State.LEAVING:
                self._go_on_leaving(now)
        if self.state is State.HERE and self._pending is None and self._again_at == inf:
            self._flush(now)

    def _go_on_looking(self, now: float) -> None:
        found = self._found
        if found is not None and self._trusts(now):
            self._found = None
            self._decide(found, now)
            if self.state is not State.ASKING:
                return
        if now >= self._read_at:
            self._read(now)
        if self.state is State.ASKING and now >= self._ask_at:
            assert self._asked is not None
            self._ask(self._asked, now)
            if self._read_at == inf:
                self._read(now)

    def _go_on_frozen(self, now: float) -> None:
        if not self._trusts(now):
            return
        if self._is_trusted(now):
            self._serve(now)
        else:
            self._resume(now)

    def _serve(self, now: float) -> None:
        connection, row = self._connection, self.row
        assert connection is not None
        assert row is not None
        self._move(State.HERE)
        self._frozen_until = inf
        if self._moved:
            self._flush_at = now
        if connection.welcome:
            self._out.append(Resume(connection.token))
        else:
            connection.welcome = True
            self._out.append(Welcome(connection.token, row.connect != row.born, row, connection.previous))

    def _go_on_leaving(self, now: float) -> None:
        row, departure = self.row, self._departure
        # The node's own fault: the row stays under its lease, which ends, and the sweep finds it. How long its client
        # has to come back then counts from when there is a node to come back to.
        left_to_sweep = departure is not None and departure.grace_secs > 0 and not departure.lease_stays
        if left_to_sweep and not self._is_unsaved:
            self.row = row = self._departure = departure = self._memory = None
        if self._waiting is not None and row is not None and self._trusts(now):
            self._take_from_memory(now)
        elif departure is not None:
            if self._again_at == inf:
                assert row is not None
                if left_to_sweep and self._memory is not None:
                    change = Change(flushed(row, self._memory))
                else:
                    change = left(self._remembered(row), departure, self._time(now))
                self._write(_Pending(write(row, change, take=False, filters_of=self.node.filters_of)))
        else:
            self._let_go(now)

    def _let_go(self, now: float) -> None:
        """Nothing is left to be saved."""
        self.row, self._moved, self._again_at = None, False, inf
        self._close_socket()
        for reply_to, epoch in self._askers.items():
            self._out.append(Send(reply_to, Released(self.client_id, epoch)))
        self._askers.clear()
        if self._waiting is not None:
            self._look(now)
        else:
            self._end()

    def _flush(self, now: float) -> None:
        if not self._numbers and now < self._flush_at:
            return
        row = self.row
        assert row is not None
        self._moved, self._flush_at = False, inf
        change = Change(flushed(row, self._content(False)))
        change_write = write(row, change, take=False, filters_of=self.node.filters_of)
        self._write(_Pending(change_write, numbers=self._take_numbers()))

    def _end(self) -> None:
        self._move(State.NONE)
        self._out.append(Forget())

    # -- helpers -----------------------------------------------------------------------------------------

    def _remembered(self, row: SessionRow) -> SessionRow:
        """The row with what it does not have yet."""
        if self._memory is None:
            return row
        return msgspec.structs.replace(
            row,
            subscriptions=self._memory.subscriptions,
            cursors=self._memory.cursors,
            packets=self._memory.packets,
        )

    @property
    def _is_unsaved(self) -> bool:
        row, memory = self.row, self._memory
        if row is None or memory is None or not row.expiry_secs:
            return False
        return memory != _content_of(row)

    def _take_numbers(self) -> list[int]:
        numbers, self._numbers = self._numbers, []
        return numbers

    def _close_socket(self) -> None:
        """A client that waits for the end of its connection knows that its good-bye is durable."""
        if self._closing is not None:
            self._out.append(Close(self._closing, None))
        self._closing, self._close_at = None, inf

    def _trusts(self, now: float) -> bool:
        return self.node.lease is not None and now < self.node.trusted_until

    def _is_trusted(self, now: float) -> bool:
        """The row names the lease that this node has, and it has not ended."""
        return self._trusts(now) and self.row is not None and self.row.lease == self.node.lease

    def _time(self, now: float) -> float:
        return self.node.clock.time(now)

    def _move(self, to: State) -> None:
        if to is self.state:
            return
        self.moves.append(_MOVES[self.state, to])
        del self.moves[:-20]
        if to not in LEGAL[self.state]:
            raise BrokenInvariant(f"the session of {self.client_id} may not go on like this", self.moves)
        self.state = to


def _same_take(wanted: SessionRow, row: SessionRow) -> bool:
    """Nobody else writes this token together with this owner: the sweep leaves no owner, a taker has its own token."""
    return row.connect == wanted.connect and row.owner == wanted.owner


def _content_of(row: SessionRow) -> Content:
    return Content(row.subscriptions, row.cursors, row.packets)
