"""The leader's book of loans: which piece is with whom, in which status, and how it came to that.

    [absent] -> GRANTING -> GRANTED -> REVOKING -> REVOKED -> [absent]
                    |          |           |
                    +----------+-----------+--- the member is gone ---> [absent]

A loan leaves [absent] with a new number, so whatever is still said about an earlier one is recognisably old.
The one surprising rule: a piece that is not in the book is free; there is no entry for it, nor any other state.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum, auto
from math import inf

from holdfast.errors import BrokenInvariant
from holdfast.groups.protocol.nouns import NO_POLICY, MemberId, Piece, Policy
from holdfast.model import Stream


class LoanStatus(Enum):
    ABSENT = auto()
    GRANTING = auto()
    GRANTED = auto()
    REVOKING = auto()
    REVOKED = auto()


LEGAL: dict[LoanStatus, set[LoanStatus]] = {
    LoanStatus.ABSENT: {LoanStatus.GRANTING},
    LoanStatus.GRANTING: {LoanStatus.GRANTED, LoanStatus.REVOKING, LoanStatus.ABSENT},
    LoanStatus.GRANTED: {LoanStatus.REVOKING, LoanStatus.ABSENT},
    LoanStatus.REVOKING: {LoanStatus.REVOKED, LoanStatus.ABSENT},
    LoanStatus.REVOKED: {LoanStatus.ABSENT},
}

STORY_MAX = 24


@dataclass(slots=True)
class LoanEntry:
    """One loan."""

    piece: Piece
    owner: MemberId
    number: int
    status: LoanStatus = LoanStatus.ABSENT
    version: int = 0
    """Of a batch member's set: the version that brought the piece in."""
    final: bool = False
    """The last progress has arrived; once it is saved, the loan is REVOKED."""
    ticket: int = 0
    """Whether it is saved: see `Unsaved.reached`."""
    refused: bool = False
    """Its owner met a message that is too large for it, and reads no further: it is to be called back."""
    policy: Policy = NO_POLICY
    within_seconds: float = 0.0
    revoked_since: float = inf
    resend_at: float = inf


class LoanBook:
    """Entries by piece. Every change of status goes through `move`."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.entries: dict[Piece, LoanEntry] = {}
        self.unsettled: dict[Piece, LoanEntry] = {}
        """Those in a status that somebody has yet to answer for."""
        self.by_member: dict[MemberId, dict[Piece, LoanEntry]] = {}
        self.next_number = 1
        self._stories: dict[Stream, deque[str]] = {}

    def __iter__(self) -> Iterator[LoanEntry]:
        return iter(list(self.entries.values()))

    def of_member(self, member: MemberId) -> list[LoanEntry]:
        return list(self.by_member.get(member, {}).values())

    def oldest_number(self, member: MemberId) -> int:
        """Every loan of this member that has a smaller number is over."""
        # In the order they were made: numbers grow, and the first is the oldest.
        return next((entry.number for entry in self.by_member.get(member, {}).values()), self.next_number)

    def find(self, piece: Piece, member: MemberId, number: int) -> LoanEntry | None:
        """That very loan, if it is still in the book."""
        entry = self.entries.get(piece)
        return entry if entry and entry.owner == member and entry.number == number else None

    def lend(self, piece: Piece, member: MemberId, now: float) -> LoanEntry:
        if piece in self.entries:
            raise BrokenInvariant(f"{self.name}: {piece} is lent already", self.story(piece.stream))
        entry = LoanEntry(piece, member, self.next_number)
        self.next_number += 1
        self.entries[piece] = entry
        self.by_member.setdefault(member, {})[piece] = entry
        self.move(entry, LoanStatus.GRANTING, now)
        return entry

    def move(self, entry: LoanEntry, to: LoanStatus, now: float) -> None:
        story = self._stories.setdefault(entry.piece.stream, deque(maxlen=STORY_MAX))
        story.append(f"{now:.3f} {entry.piece}#{entry.number} {entry.owner}: {entry.status.name} -> {to.name}")
        if to not in LEGAL[entry.status]:
            raise BrokenInvariant(
                f"{self.name}: {entry.piece} may not go from {entry.status.name} to {to.name}", tuple(story)
            )
        entry.status = to
        if to is LoanStatus.GRANTED or to is LoanStatus.ABSENT:
            self.unsettled.pop(entry.piece, None)
            entry.resend_at = inf
        else:
            self.unsettled[entry.piece] = entry
        if to is LoanStatus.REVOKING:
            entry.revoked_since = now
        if to is LoanStatus.ABSENT:
            del self.entries[entry.piece]
            hers = self.by_member[entry.owner]
            del hers[entry.piece]
            if not hers:
                del self.by_member[entry.owner]

    def story(self, stream: Stream) -> tuple[str, ...]:
        """The last moves of a stream's loans."""
        return tuple(self._stories.get(stream, ()))

    def forget(self, stream: Stream) -> None:
        """The stream is no more."""
        self._stories.pop(stream, None)
