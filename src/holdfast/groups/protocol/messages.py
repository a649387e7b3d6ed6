"""Everything leaders and members say to each other, both directions, in one place.

    borrower       LeaderWanted, Ping, UpdateProgress, RevokeFinished, LeaveGroup          -> leader
    leader         LeaderConnectResponse, PingResponse, Grant, Revoke, Revoked,
                   LargestPacket, LeftGroup, Invalidate                                 -> borrower
    batch member   FindLeader, UpdateStreamStates, LeaveGroup                              -> leader
    leader         LeaseStreams, UpdateStreams, RenewStreamLease, LeftGroup, Invalidate -> batch member
    operator       Ask -> leader, Answer -> operator

Every message names the member with its life, and the leader by its epoch, so old words are recognisably old.
One surprising rule: a leader never says *until when* it may be trusted, but *for how long since you asked*
(`echo`, `good_for_seconds`): no two clocks are ever compared.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from holdfast.groups.protocol.nouns import NO_LIMIT, NO_POLICY, GroupId, Key, Layer, Mark, MemberId, Piece, Policy
from holdfast.groups.protocol.view import GroupView
from holdfast.machine import Address
from holdfast.model import Stream

Attempts = tuple[tuple[int, int], ...]
"""Offsets that were delivered and not acknowledged, each with how often."""

Sizes = tuple[tuple[int, int], ...]
"""Offsets of messages, each with the bytes of the smallest packet that it fits into."""


class Carried(NamedTuple):
    """What a member knows to be acknowledged, whoever lent it the piece: a fact, good under its course."""

    piece: Piece
    course: str
    mark: Mark


class Report(NamedTuple):
    """How far a member has come in one loan; `final` says that nothing of it is in flight any more."""

    piece: Piece
    loan: int
    mark: Mark
    final: bool = False
    attempts: Attempts = ()
    refused: Sizes = ()
    """Larger than the client takes. Somebody else may take them: nothing more is read under this loan."""


class Leased(NamedTuple):
    """A piece as a batch member receives it: where to go on, what earlier slicings have done, what slices are by."""

    piece: Piece
    course: str
    mark: Mark
    skip: tuple[Layer, ...] = ()
    key: Key = "publisher"


# --------------------------------------------------------------------------------- borrower -> leader


@dataclass(frozen=True, slots=True)
class LeaderWanted:
    """Borrower -> registry -> leader. Let me in; here is what I still know from before."""

    member: MemberId
    reply_to: Address
    group: GroupId
    born: str
    sent_at: float
    carried: tuple[Carried, ...] = ()
    packet_max: int = NO_LIMIT
    """The largest packet that the client takes."""


@dataclass(frozen=True, slots=True)
class Ping:
    """Borrower -> leader. I am alive; `reports` and `carried` repeat what no answer has confirmed yet."""

    member: MemberId
    reply_to: Address
    epoch: int
    sent_at: float
    leaving: bool = False
    reports: tuple[Report, ...] = ()
    carried: tuple[Carried, ...] = ()


@dataclass(frozen=True, slots=True)
class UpdateProgress:
    """Borrower -> leader. How far these loans have come; the first one confirms a grant, a final one a revoke."""

    member: MemberId
    epoch: int
    reports: tuple[Report, ...]


@dataclass(frozen=True, slots=True)
class RevokeFinished:
    """Borrower -> leader. Nothing is left here of that loan."""

    member: MemberId
    epoch: int
    piece: Piece
    loan: int


@dataclass(frozen=True, slots=True)
class LeaveGroup:
    """Member -> leader (through the registry if it knows none). I am gone; this is all I know."""

    member: MemberId
    reply_to: Address
    group: GroupId
    born: str
    carried: tuple[Carried, ...] = ()


# --------------------------------------------------------------------------------- leader -> borrower


@dataclass(frozen=True, slots=True)
class LeaderConnectResponse:
    """Leader -> borrower. You are in; I am here, under this epoch; loans below `oldest_loan` are not yours."""

    member: MemberId
    epoch: int
    leader: Address
    echo: float
    good_for_seconds: float
    oldest_loan: int = 0


@dataclass(frozen=True, slots=True)
class PingResponse:
    """Leader -> borrower. Go on for so long since you asked; loans numbered below `oldest_loan` are over."""

    member: MemberId
    epoch: int
    echo: float
    good_for_seconds: float
    oldest_loan: int = 0
    kept: bool = True
    """What the ping carried is durable, and need not be carried any longer."""
    largest_packet: int = NO_LIMIT
    """See `LargestPacket`."""


@dataclass(frozen=True, slots=True)
class Grant:
    """Leader -> borrower. Read this piece from `mark` on, under this loan."""

    member: MemberId
    epoch: int
    piece: Piece
    loan: int
    course: str
    mark: Mark
    skip: tuple[Layer, ...] = ()
    policy: Policy = NO_POLICY
    attempts: Attempts = ()
    """Of this piece; after the stream was cut anew, perhaps of its neighbours too, whose the reader passes over."""
    key: Key = "publisher"
    largest_packet: int = NO_LIMIT
    """See `LargestPacket`."""
    set_aside: tuple[int, ...] = ()
    """These every member has refused: they are dead letters. Some may be its neighbours', as with `attempts`."""


@dataclass(frozen=True, slots=True)
class LargestPacket:
    """Leader -> borrower. Nobody in the group takes larger packets than this; whoever can take more has just come.

    Said at once when it grows, and with every `PingResponse`.
    """

    member: MemberId
    epoch: int
    largest_packet: int


@dataclass(frozen=True, slots=True)
class Revoke:
    """Leader -> borrower. Stop reading, finish what is in flight within so many seconds, report it final."""

    member: MemberId
    epoch: int
    piece: Piece
    loan: int
    within_seconds: float


@dataclass(frozen=True, slots=True)
class Revoked:
    """Leader -> borrower. Your final progress is durable; forget the loan and say so."""

    member: MemberId
    epoch: int
    piece: Piece
    loan: int


@dataclass(frozen=True, slots=True)
class LeftGroup:
    """Leader -> member. Your last words are durable."""

    member: MemberId


@dataclass(frozen=True, slots=True)
class Invalidate:
    """Leader or registry -> member. You are nobody here: start over with a new life, unless the group is deleted."""

    member: MemberId
    deleted: bool = False


# ----------------------------------------------------------------------------------- batch members


@dataclass(frozen=True, slots=True)
class FindLeader:
    """Batch member -> registry -> leader. Lease me streams; here is what I still know from before."""

    member: MemberId
    reply_to: Address
    group: GroupId
    born: str
    sent_at: float
    carried: tuple[Carried, ...] = ()


@dataclass(frozen=True, slots=True)
class LeaseStreams:
    """Leader -> batch member. This is your set, under this version."""

    member: MemberId
    epoch: int
    leader: Address
    version: int
    streams: tuple[Leased, ...]
    echo: float
    good_for_seconds: float


@dataclass(frozen=True, slots=True)
class UpdateStreams:
    """Leader -> batch member. Exchange the old version for the new; finish what is taken over within so long."""

    member: MemberId
    epoch: int
    old_version: int
    version: int
    streams: tuple[Leased, ...]
    within_seconds: float


@dataclass(frozen=True, slots=True)
class RenewStreamLease:
    """Leader -> batch member. Go on with `version`; with `new_version`, the exchange is known but not over."""

    member: MemberId
    epoch: int
    version: int
    new_version: int | None
    echo: float
    good_for_seconds: float
    kept: bool = True
    """What the states carried is durable, and need not be carried any longer."""


@dataclass(frozen=True, slots=True)
class UpdateStreamStates:
    """Batch member -> leader. How far the set has come, and what was taken over with the old version, if any."""

    member: MemberId
    reply_to: Address
    epoch: int
    version: int
    states: tuple[Report, ...]
    sent_at: float
    old_version: int | None = None
    old_states: tuple[Report, ...] = ()
    carried: tuple[Carried, ...] = ()


# ------------------------------------------------------------------------------------- operators


class Seek(NamedTuple):
    """Start over at these offsets; streams that are not named start at the beginning."""

    offsets: tuple[tuple[Stream, int], ...]
    from_generation: int = 0
    """Streams of earlier generations are left out."""


class SetPaused(NamedTuple):
    """Stop lending (what is lent is called back), or go on."""

    paused: bool


class DeleteGroup(NamedTuple):
    """End the group and everything known about it; with `if_idle`, only if it has no member."""

    if_idle: bool = False


class Describe(NamedTuple):
    """Say who holds what."""


Request = Seek | SetPaused | DeleteGroup | Describe


@dataclass(frozen=True, slots=True)
class Ask:
    """Operator -> registry -> leader. Do this once, however often you hear it, and not after its time.

    The operator's own node goes by `asked_at`, which is of its clock; others count from when they hear of it.
    """

    request: str
    reply_to: Address
    group: GroupId
    what: Request
    asked_at: float
    good_for_seconds: float

    def until(self, node: str, heard_at: float) -> float:
        """When it is too late to begin, by the clock of the node that heard it."""
        return (self.asked_at if node == self.reply_to.node else heard_at) + self.good_for_seconds


@dataclass(frozen=True, slots=True)
class Answer:
    """Leader -> operator. Done and durable, or why not."""

    request: str
    error: str = ""
    view: GroupView | None = None


Wanted = LeaderWanted | FindLeader | LeaveGroup | Ask
"""What a registry takes on behalf of a leader that may have to be found first."""

ToLeader = Wanted | Ping | UpdateProgress | RevokeFinished | UpdateStreamStates
ToBorrower = LeaderConnectResponse | PingResponse | LargestPacket | Grant | Revoke | Revoked | LeftGroup | Invalidate
ToBatchMember = LeaseStreams | UpdateStreams | RenewStreamLease | LeftGroup | Invalidate
GroupMessage = ToLeader | ToBorrower | ToBatchMember | Answer
