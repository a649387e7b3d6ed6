"""A group as people see it: who is in it, who holds what, and how far behind it is.

A leader knows marks and owners, not how long the streams have grown; so it gives a `GroupView`, and `lag`
combines that with the heads of the log, wherever the question is asked.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from holdfast.groups.protocol.nouns import GroupId, Key, Mark, MemberId, Piece
from holdfast.model import Micros, Stream


class MemberView(NamedTuple):
    """One member: `kind` is `borrower` or `lease`, `status` what the leader thinks of it."""

    member: MemberId
    node: str
    kind: str
    status: str
    pieces: int


class PieceView(NamedTuple):
    """One piece: who holds it (None: nobody), in which status, how far it has come."""

    piece: Piece
    owner: MemberId | None
    status: str
    mark: Mark


@dataclass(frozen=True, slots=True)
class GroupView:
    """What a leader answers to `Describe`."""

    group: GroupId
    epoch: int
    born: str
    course: str
    order: str
    paused: bool
    members: tuple[MemberView, ...]
    pieces: tuple[PieceView, ...]
    finished: int
    """Streams that are wholly consumed and only wait for retention."""
    key: Key = "publisher"


class StreamHead(NamedTuple):
    """How far a stream goes, as the log knows it."""

    next_offset: int
    sealed: bool = False
    oldest_unacked: Micros | None = None
    """Time of the oldest message this group has not acknowledged, where somebody looked."""
    dropped_at: Micros | None = None
    """When retention will drop the stream, where that is known."""


class Lag(NamedTuple):
    """How far a group is behind in one piece, and who is to be asked about it."""

    piece: Piece
    owner: MemberId | None
    status: str
    messages: int
    """Offsets not acknowledged; of a slice by publisher or topic, those of its neighbours that it has not passed
    count too: only a reader knows whose they are."""
    seconds: float | None
    """Age of the oldest unacknowledged message."""
    seconds_to_retention: float | None
    """How long until unread messages begin to vanish."""


def first_unacked(key: Key, piece: Piece, mark: Mark) -> int:
    """The first offset that the piece has not acknowledged, be it a neighbour's where offsets do not tell."""
    at = mark.offset + 1
    return at + (piece.part - at) % piece.of if key == "message" else at


def own_unacked(key: Key, piece: Piece, mark: Mark, past: int) -> int:
    """How many offsets below `past` the piece has not acknowledged, without its neighbours' where offsets tell."""
    if key != "message" or piece.of == 1:
        return mark.cursor().unacked_count(past)
    part, of = piece.part, piece.of
    return sum((last - part) // of - (first - 1 - part) // of for first, last in mark.cursor().unacked(0, past))


def lag(view: GroupView, heads: Mapping[Stream, StreamHead], now: Micros) -> list[Lag]:
    """Lag per piece, worst first."""
    rows = []
    for piece, owner, status, mark in view.pieces:
        head = heads.get(piece.stream)
        if head is None:
            continue
        behind = own_unacked(view.key, piece, mark, head.next_offset)
        oldest, dropped = head.oldest_unacked, head.dropped_at
        rows.append(
            Lag(
                piece,
                owner,
                status,
                behind,
                (now - oldest) / 1e6 if behind and oldest is not None else (None if behind else 0.0),
                (dropped - now) / 1e6 if behind and dropped is not None else None,
            )
        )
    return sorted(rows, key=lambda row: (-row.messages, row.piece))
