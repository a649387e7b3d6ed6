"""Everything a machine may ask of its host, and the nouns it needs to say so.

A machine returns a list of effects; its host performs them **in order**. Effects of different machines may
overlap. If one cannot be performed (a save that fails), the rest of that list is dropped and the machine is
told: everything a machine sends is sent again until it is answered, so dropping is always safe, and
performing out of order never is.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from holdfast.cursors import Cursor, Range
from holdfast.model import Stream

if TYPE_CHECKING:
    from holdfast.groups.messages import GroupMessage
    from holdfast.groups.progress import StreamProgress
    from holdfast.groups.record import GroupRecord


class Address(NamedTuple):
    """Where a message goes: a node, what kind of machine there, and which one."""

    node: str
    kind: str
    """`registry`, `leader`, `agent`, `lease` (a lease member) or `asker` (whoever sent an `Ask`)."""
    name: str = ""
    """The group of a leader, `session/incarnation` of an agent or lease member, the request of an asker."""

    def __str__(self) -> str:
        return f"{self.kind}:{self.name}@{self.node}" if self.name else f"{self.kind}@{self.node}"


class GroupId(NamedTuple):
    """A group is its name and its filter; people write `name:filter`."""

    name: str
    filter: str

    def __str__(self) -> str:
        return f"{self.name.replace('%', '%25').replace(':', '%3A')}:{self.filter}"

    @classmethod
    def parse(cls, text: str) -> GroupId:
        """The inverse of `str(group)`."""
        name, _, rest = text.partition(":")
        return cls(name.replace("%3A", ":").replace("%25", "%"), rest)


class MemberId(NamedTuple):
    """One member of a group, once: whoever comes back after a mishap comes with a higher `life`.

    `incarnation` grows each time the session is set up anew (reconnect, takeover), `number` counts the
    subscriptions made within it, `life` the times that one subscription had to start over.
    """

    session: str
    incarnation: int = 1
    number: int = 1
    life: int = 1

    def __str__(self) -> str:
        return f"{self.session}/{self.incarnation}.{self.number}.{self.life}"

    def agent(self, node: str) -> Address:
        """Where a borrower is reached: at its agent, of which one session may have an old and a new one."""
        return Address(node, "agent", f"{self.session}/{self.incarnation}")


class Piece(NamedTuple):
    """What is lent: a stream, or one of the `of` key slices of it."""

    stream: Stream
    part: int = 0
    of: int = 1

    def __str__(self) -> str:
        return str(self.stream) if self.of == 1 else f"{self.stream}[{self.part}/{self.of}]"


class Mark(NamedTuple):
    """A cursor at one moment, unchangeable, fit to travel."""

    offset: int = -1
    """Everything up to here is acknowledged or passed over."""
    acked: tuple[Range, ...] = ()
    """And these ranges above it."""

    @classmethod
    def of_cursor(cls, cursor: Cursor) -> Mark:
        return cls(cursor.offset, tuple(cursor.acked))

    def cursor(self) -> Cursor:
        return Cursor(self.offset, self.acked)

    def __str__(self) -> str:
        return str(self.offset) + "".join(f"+{first}..{last}" for first, last in self.acked)


class Layer(NamedTuple):
    """What an earlier slicing of a stream had done: per slice index, its mark then."""

    of: int
    marks: tuple[tuple[int, Mark], ...]


class Policy(NamedTuple):
    """What to do about a message that is not acknowledged; None switches that half off."""

    ack_timeout_seconds: float | None = None
    attempts_max: int | None = None


NO_POLICY = Policy()


class Loan(NamedTuple):
    """A piece in a member's hands, once. The host names it back in `Acked`, `Drained` and `Delivered`."""

    member: MemberId
    piece: Piece
    number: int
    """Grows with every loan that one leader makes; for a lease member, the version that first held the piece."""
    course: str
    """Changes with every seek: acknowledgements of another course say nothing about this one."""

    def __str__(self) -> str:
        return f"{self.piece}#{self.number} of {self.member}"


# ---------------------------------------------------------------------------------------- everywhere


@dataclass(frozen=True, slots=True)
class Send:
    """Hand the message to that machine, on whatever node it is; it may be lost, late or doubled."""

    to: Address
    message: GroupMessage


# --------------------------------------------------------------------------------- asked by a member


@dataclass(frozen=True, slots=True)
class StartReading:
    """Deliver this piece from `mark` on: what is in its slice and not done by `mark` or by a layer of `skip`."""

    loan: Loan
    mark: Mark
    skip: tuple[Layer, ...] = ()
    policy: Policy = NO_POLICY


@dataclass(frozen=True, slots=True)
class StopReading:
    """Send nothing more of this loan; say `Drained` once nothing of it is in flight (at once, if nothing is)."""

    loan: Loan


@dataclass(frozen=True, slots=True)
class Abandon:
    """Forget what is in flight of this loan: it went back to the group, and no `Drained` is awaited any more."""

    loan: Loan


@dataclass(frozen=True, slots=True)
class Redeliver:
    """Send these again to the same client: they were not acknowledged in time. Report them `Delivered` again."""

    loan: Loan
    offsets: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Park:
    """Set these aside as dead letters, durably, then report them `Acked`; do not deliver them any more."""

    loan: Loan
    offsets: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Joined:
    """The subscription has a leader; keep `born` with it, so that a deleted group is recognised as such."""

    member: MemberId
    group: GroupId
    born: str


@dataclass(frozen=True, slots=True)
class Ended:
    """This subscription is over and leaves no state: unsubscribed, disconnected, or its group was deleted."""

    member: MemberId
    group: GroupId
    deleted: bool = False


# -------------------------------------------------------------------------------- asked by a leader


@dataclass(frozen=True, slots=True)
class Load:
    """Read the group's record and the progress of its streams, and answer with `Loaded`."""

    group: GroupId


@dataclass(frozen=True, slots=True)
class WatchStreams:
    """Say `StreamsSeen` now and whenever streams of that log appear, are sealed or are dropped."""

    group: GroupId
    log: str


@dataclass(frozen=True, slots=True)
class Save:
    """Durable before any later effect in the list, and refused (`Deposed`) unless the claim is still at `epoch`."""

    group: GroupId
    epoch: int
    record: GroupRecord | None = None
    """Written if given."""
    progress: tuple[StreamProgress, ...] = ()
    """Snapshots; written as they are."""
    forget: tuple[Stream, ...] = ()
    """Streams whose progress is deleted."""
    delete: bool = False
    """Delete the record, and the progress of the streams in `forget`, for good."""


@dataclass(frozen=True, slots=True)
class Retire:
    """This leader is done: drop it and tell the registry `LeaderRetired`."""

    group: GroupId
    epoch: int
    clean: bool = True
    """Nothing is lent, so the next leader may follow at once."""


# ------------------------------------------------------------------------------ asked by a registry


@dataclass(frozen=True, slots=True)
class OpenLease:
    """Open this node's lease in the metadata store and answer `LeaseOpened`, or `LeaseFailed`."""

    asked_at: float
    lease_seconds: float


@dataclass(frozen=True, slots=True)
class RenewLease:
    """Renew it and answer `LeaseRenewed`, `LeaseLost` if it has ended, or `LeaseFailed` if the store is away."""

    lease: int
    asked_at: float


@dataclass(frozen=True, slots=True)
class Claim:
    """Create the group's claim under the lease unless there is one: `Claimed`, `Taken` or `ClaimFailed`."""

    group: GroupId
    lease: int


@dataclass(frozen=True, slots=True)
class Resign:
    """Delete the group's claim if it is still at this epoch; nothing is answered."""

    group: GroupId
    epoch: int


@dataclass(frozen=True, slots=True)
class StartLeader:
    """Set up a `Leader` of this group and drive it until it asks to `Retire` or `StopLeader` comes."""

    group: GroupId
    epoch: int
    trusted_until: float


@dataclass(frozen=True, slots=True)
class StopLeader:
    """The claim is lost: drop this leader at once, performing nothing more of what it asked for."""

    group: GroupId
    epoch: int


@dataclass(frozen=True, slots=True)
class TrustUntil:
    """Give every leader on this node `Trusted(until)`."""

    until: float


MemberEffect = Send | StartReading | StopReading | Abandon | Redeliver | Park | Joined | Ended
LeaderEffect = Send | Load | WatchStreams | Save | Retire
RegistryEffect = Send | OpenLease | RenewLease | Claim | Resign | StartLeader | StopLeader | TrustUntil
Effect = MemberEffect | LeaderEffect | RegistryEffect
