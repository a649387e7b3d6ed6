"""What a member still knows from an earlier life: acknowledgements that the next leader must hear of.

Kept by piece and course: the facts of one course say nothing about another. Loans whose messages may still be in
flight are kept with them, so that acknowledgements which come late are not lost while there is no leader.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from holdfast.cursors import Cursor, Range
from holdfast.groups.protocol.effects import Abandon, MemberEffect
from holdfast.groups.protocol.messages import Carried
from holdfast.groups.protocol.nouns import Loan, Mark, Piece


@dataclass(slots=True)
class Memory:
    """One piece, under one course."""

    cursor: Cursor
    loans: list[Loan] = field(default_factory=list)


class Memories:
    """Handed from one life of a member to the next."""

    def __init__(self) -> None:
        self._kept: dict[tuple[Piece, str], Memory] = {}

    def __len__(self) -> int:
        return len(self._kept)

    def clear(self) -> None:
        self._kept.clear()

    def keep(self, loan: Loan, cursor: Cursor, *, in_flight: bool) -> None:
        """This loan is over here; with `in_flight`, acknowledgements of it may still come."""
        memory = self._kept.setdefault((loan.piece, loan.course), Memory(cursor))
        if memory.cursor is not cursor:
            memory.cursor.merge(cursor)
        if in_flight:
            memory.loans.append(loan)

    def note(self, loan: Loan, ranges: Iterable[Range]) -> None:
        memory = self._kept.get((loan.piece, loan.course))
        if memory:
            for first, last in ranges:
                memory.cursor.ack_range(first, last)

    def recalled(self, loan: Loan, mark: Mark) -> Cursor:
        """Where to begin a new loan: what the leader says, and what is known here besides."""
        cursor = mark.cursor()
        memory = self._kept.get((loan.piece, loan.course))
        if memory:
            cursor.merge(memory.cursor)
        return cursor

    def abandon(self) -> list[MemberEffect]:
        """Whatever is still in flight of those loans goes back to the group."""
        effects: list[MemberEffect] = []
        for memory in self._kept.values():
            effects += [Abandon(loan) for loan in memory.loans]
            memory.loans.clear()
        return effects

    def carried(self) -> tuple[Carried, ...]:
        return tuple(
            Carried(piece, course, Mark.of_cursor(memory.cursor)) for (piece, course), memory in self._kept.items()
        )
