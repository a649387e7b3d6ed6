"""What a host tells the machines: time, the client's doings, and what became of the effects it performed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from holdfast.cursors import Range
from holdfast.groups.progress import StreamProgress
from holdfast.groups.protocol.messages import Sizes
from holdfast.groups.protocol.nouns import GroupId, Loan
from holdfast.groups.record import GroupRecord
from holdfast.model import Stream

# -------------------------------------------------------------------------------- session -> agent


@dataclass(frozen=True, slots=True)
class JoinGroup:
    """Session -> agent. Join this group, which is declared and bears this `born`."""

    group: GroupId
    born: str


@dataclass(frozen=True, slots=True)
class QuitGroup:
    """Session -> agent. Leave this group, once what is in flight is acknowledged."""

    group: GroupId


@dataclass(frozen=True, slots=True)
class Closed:
    """Session -> agent. The connection is gone (lost, kicked, taken over, clean start): leave every group at once."""


@dataclass(frozen=True, slots=True)
class Acked:
    """Session -> agent. These offsets of the loan are acknowledged, or passed over (no match, not in the slice)."""

    loan: Loan
    ranges: tuple[Range, ...]


@dataclass(frozen=True, slots=True)
class Drained:
    """Session -> agent. After `StopReading`: nothing of this loan is in flight any more."""

    loan: Loan


@dataclass(frozen=True, slots=True)
class Delivered:
    """Session -> agent. These were sent to the client; only where the loan's policy counts attempts."""

    loan: Loan
    offsets: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Refused:
    """Session -> agent. The client takes no packets as large as these; somebody else in the group may."""

    loan: Loan
    messages: Sizes


@dataclass(frozen=True, slots=True)
class Unsendable:
    """Session -> agent. These are larger than anybody in the group takes (`StartReading.largest_packet`)."""

    loan: Loan
    offsets: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Leave:
    """Host -> batch member. Give everything back and end."""


# ---------------------------------------------------------------------------------- host -> leader


class StreamInfo(NamedTuple):
    """A stream of the group's log; `end` is its next offset if it is sealed, else None."""

    stream: Stream
    end: int | None = None
    next_offset: int = 0
    """How far it went when the host looked."""
    in_lake: bool = False
    """The store has dropped it; only the lake still holds it."""


@dataclass(frozen=True, slots=True)
class StreamsSeen:
    """Host -> leader. All the streams that the group's log has now, empty ones too."""

    streams: tuple[StreamInfo, ...]


@dataclass(frozen=True, slots=True)
class Loaded:
    """Host -> leader. What is stored of the group; no record: it was never declared, or is deleted."""

    record: GroupRecord | None
    progress: tuple[StreamProgress, ...] = ()


@dataclass(frozen=True, slots=True)
class LoadFailed:
    """Host -> leader. The store could not be read."""


@dataclass(frozen=True, slots=True)
class Saved:
    """Host -> leader. The save is durable."""


@dataclass(frozen=True, slots=True)
class SaveFailed:
    """Host -> leader. The save was not made, or nobody knows."""


@dataclass(frozen=True, slots=True)
class Deposed:
    """Host -> leader. The store refused a save: another epoch rules."""


@dataclass(frozen=True, slots=True)
class Trusted:
    """Host -> leader. By this node's clock, the claim stands at least until then."""

    until: float


@dataclass(frozen=True, slots=True)
class Retreat:
    """Host -> leader. This node is going down: call everything back within so long, then retire cleanly."""

    within_seconds: float


# -------------------------------------------------------------------------------- host -> registry


@dataclass(frozen=True, slots=True)
class Yield:
    """Host -> registry. This node is about to go: leave groups to these nodes, if there are any."""

    others: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class LeaseOpened:
    """Host -> registry. The answer to `OpenLease`."""

    lease: int
    asked_at: float


@dataclass(frozen=True, slots=True)
class LeaseRenewed:
    """Host -> registry. The answer to `RenewLease`."""

    lease: int
    asked_at: float


@dataclass(frozen=True, slots=True)
class LeaseLost:
    """Host -> registry. That lease has ended, and every claim under it."""

    lease: int


@dataclass(frozen=True, slots=True)
class LeaseFailed:
    """Host -> registry. The store did not answer; the lease may or may not stand."""


@dataclass(frozen=True, slots=True)
class Claimed:
    """Host -> registry. The claim is ours; `epoch` is the version the store gave it."""

    group: GroupId
    lease: int
    epoch: int


@dataclass(frozen=True, slots=True)
class Taken:
    """Host -> registry. Another node has the claim."""

    group: GroupId
    node: str
    epoch: int


@dataclass(frozen=True, slots=True)
class ClaimFailed:
    """Host -> registry. The store did not answer; the claim may or may not have been made."""

    group: GroupId


@dataclass(frozen=True, slots=True)
class LeaderRetired:
    """Host -> registry. That leader asked to retire, or broke down (`clean` is False then)."""

    group: GroupId
    epoch: int
    clean: bool
