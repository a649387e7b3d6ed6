"""Who sits in a group, until when a leader must count on each, and who takes whose place.

A seat is kept as long as its member may believe that it is a member, and a margin beyond. The one surprising
rule: somebody who comes back with a new life frees the seat of the old one at once, for one agent never runs two
lives; somebody who comes back in a new incarnation does not, for the old node may be alive and merely cut off.
Then the old seat only stops counting in placement.
"""

from __future__ import annotations

from dataclasses import dataclass

from holdfast.groups.protocol.nouns import MemberId
from holdfast.machine import Address


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

    kind = "borrower"

    @property
    def active(self) -> bool:
        return not (self.leaving or self.condemned)

    @property
    def status(self) -> str:
        return "condemned" if self.condemned else "leaving" if self.leaving else "connected"


def superseded(seats: dict[MemberId, Seat], member: MemberId) -> tuple[list[MemberId], list[MemberId]] | None:
    """Whose seats end, and who is leaving, now that `member` has come; None if it is itself a thing of the past."""
    over: list[MemberId] = []
    leaving: list[MemberId] = []
    for other in seats:
        if other.session != member.session or other == member:
            continue
        if other.incarnation == member.incarnation:
            if other.number == member.number:
                if other.life > member.life:
                    return None
                over.append(other)
        elif other.incarnation > member.incarnation:
            return None
        else:
            leaving.append(other)
    return over, leaving
