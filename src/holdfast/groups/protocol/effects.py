"""Everything a machine of a group may ask of its host.

A machine returns a list of effects; its host performs them **in order**. Effects of different machines may
overlap. A `Save` is always the last of its list: what rests on it is said once the host has answered `Saved`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from holdfast.groups.protocol.messages import GroupMessage
from holdfast.groups.protocol.nouns import (
    NO_LIMIT,
    NO_POLICY,
    GroupId,
    Key,
    Layer,
    Loan,
    Mark,
    MemberId,
    Piece,
    Policy,
)
from holdfast.machine import Send
from holdfast.model import Stream

RANGES_MAX = 16_000
"""With the longest offsets there are, three quarters of what a metadata store takes as one value."""

if TYPE_CHECKING:
    from holdfast.groups.progress import StreamProgress
    from holdfast.groups.record import GroupRecord

# --------------------------------------------------------------------------------- asked by a member


@dataclass(frozen=True, slots=True)
class StartReading:
    """Deliver this piece from `mark` on: what is in its slice and not done by `mark` or by a layer of `skip`."""

    loan: Loan
    mark: Mark
    skip: tuple[Layer, ...] = ()
    policy: Policy = NO_POLICY
    key: Key = "publisher"
    """What the group's slices are by."""
    largest_packet: int = NO_LIMIT
    """Nobody in the group takes larger packets: what is larger is `Unsendable`; what is not, and yet too large for this
    client, is `Refused`, and where order matters nothing after it is sent."""


@dataclass(frozen=True, slots=True)
class ChangeLargestPacket:
    """What `StartReading` said about the largest packet has changed, for all loans of this member."""

    member: MemberId
    largest_packet: int


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
    """Set these aside as dead letters, durably, then report them `Acked`; do not deliver them any more.

    Those that are a neighbour slice's (`progress.Done.owns`) are reported and not set aside: their own reader does it.
    """

    loan: Loan
    offsets: tuple[int, ...]
    too_large: bool = False
    """Nobody in the group takes packets of that size; else they were delivered in vain."""


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


class Skipped(NamedTuple):
    """What a group will never read of one stream; `past` is None if nobody knows where the stream ended."""

    stream: Stream
    first: int
    past: int | None


@dataclass(frozen=True, slots=True)
class Trimmed:
    """Retention dropped streams that the group had not read to their ends: keep a record, and follow the policy."""

    group: GroupId
    skipped: tuple[Skipped, ...]


@dataclass(frozen=True, slots=True)
class Disbelieved:
    """A batch member reports progress beyond the end of these: nothing came of it. Somebody should know."""

    group: GroupId
    member: MemberId
    pieces: tuple[Piece, ...]


@dataclass(frozen=True, slots=True)
class Save:
    """Answer `Saved` once it is durable, before any other event; `SaveFailed` if it is not, or nobody knows.

    It is refused (`Deposed`) unless the claim is still at `epoch`. It is the last effect of its list.
    """

    group: GroupId
    epoch: int
    record: GroupRecord | None = None
    """Written if given."""
    progress: tuple[StreamProgress, ...] = ()
    """Snapshots; written as they are."""
    forget: tuple[Stream, ...] = ()
    """Streams whose progress is deleted."""
    parts: tuple[tuple[Stream, int], ...] = ()
    """Over how many values the progress of these is stored, where it may be more than one."""
    ranges_max: int = RANGES_MAX
    """How many ranges of one progress go into one value."""
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
    in_doubt: bool = False
    """The store may have been away a moment ago: then members take longer than usual to find the leader."""


@dataclass(frozen=True, slots=True)
class StopLeader:
    """The claim is lost: drop this leader at once, performing nothing more of what it asked for."""

    group: GroupId
    epoch: int


@dataclass(frozen=True, slots=True)
class TrustUntil:
    """Give every leader on this node `Trusted(until)`."""

    until: float


GroupSend = Send[GroupMessage]
MemberEffect = (
    GroupSend | StartReading | ChangeLargestPacket | StopReading | Abandon | Redeliver | Park | Joined | Ended
)
LeaderEffect = GroupSend | Load | WatchStreams | Trimmed | Disbelieved | Save | Retire
RegistryEffect = GroupSend | OpenLease | RenewLease | Claim | Resign | StartLeader | StopLeader | TrustUntil
Effect = MemberEffect | LeaderEffect | RegistryEffect
