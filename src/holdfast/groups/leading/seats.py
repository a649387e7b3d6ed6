"""Who sits in a group, until when a leader must count on each, and who takes whose place.

A seat is kept as long as its member may believe that it is a member, and a margin beyond. The one surprising
rule: somebody who comes back with a new life frees the seat of the old one at once, for one agent never runs two
lives; somebody who comes back in a new incarnation does not, for the old node may be alive and merely cut off.
Then the old seat only stops counting in placement.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from holdfast.groups.protocol.messages import Ask, FindLeader, Wanted
from holdfast.groups.protocol.nouns import NO_LIMIT, MemberId
from holdfast.machine import Address
from holdfast.model import Stream

BORROWER, BATCH = "borrower", "batch"


@dataclass(slots=True)
class Seat:
    """A borrower's place; a batch member's is a `BatchSeat`."""

    member: MemberId
    home: Address
    until: float
    """Nothing lent to this member may be lent on before then."""
    leaving: bool = False
    """It keeps what it has until it returns it, and gets nothing new."""
    condemned: bool = False
    """It breaks the protocol: its pings are refused until its time is up."""
    packet_max: int = NO_LIMIT
    """The largest packet that it takes; a batch member reads from the log, and takes any."""
    carried: dict[Stream, int] = field(default_factory=dict)
    """What it still carries from before, as tickets: whether that is saved, see `Unsaved.reached`."""

    kind = BORROWER

    @property
    def active(self) -> bool:
        return not (self.leaving or self.condemned)

    @property
    def status(self) -> str:
        return "condemned" if self.condemned else "leaving" if self.leaving else "connected"


def superseded(
    seats: dict[MemberId, Seat], member: MemberId, kind: str
) -> tuple[list[MemberId], list[MemberId]] | None:
    """Whose seats end, and who is leaving, now that `member` has come; None if it is itself a thing of the past.

    A session may have several subscriptions to one group, numbered, an old one finishing while a new one begins. A
    batch member numbers nothing: with another number it is another incarnation.
    """
    over: list[MemberId] = []
    leaving: list[MemberId] = []
    for other, seat in seats.items():
        if other.session != member.session or other == member or seat.kind != kind:
            continue
        theirs, mine = other.incarnation, member.incarnation
        if theirs == mine and other.number != member.number:
            if kind == BORROWER:
                continue
            theirs, mine = other.number, member.number
        if theirs > mine or (theirs == mine and other.life > member.life):
            return None
        (over if theirs == mine else leaving).append(other)
    return over, leaving


def waiting_key(wanted: Wanted) -> object:
    """Of each member the last thing it said is enough; of a batch reader's client, the last of whatever it calls
    itself, but not its last words."""
    match wanted:
        case Ask(request):
            return request
        case FindLeader(member):
            return "batch", member.session
        case _:
            return wanted.member
