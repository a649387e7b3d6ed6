"""Messages that members refused because of their size, and who should have the pieces they are in.

    refused by one        its piece goes to somebody who may take it, and has not refused it
    refused by everybody  it is set aside as a dead letter by whoever is lent the piece next

Whoever refused a message keeps its share of the work but not that piece, until the message is done and a rest is over:
where one message is too large for it, others are, and each would cost a change of hands. Nothing of this is stored: a
new leader hears it again.

The one surprising rule: sizes are least sizes. A packet may be some bytes larger for one client than for another, so
whoever could take it by its size is asked before it is given up.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import inf

from holdfast.groups.leading.seats import Seat
from holdfast.groups.progress import StreamProgress, overlap
from holdfast.groups.protocol.messages import Sizes
from holdfast.groups.protocol.nouns import Key, MemberId, Piece
from holdfast.model import Stream


@dataclass(slots=True)
class Refusal:
    """One message."""

    piece: Piece
    """Of which it was read; the stream may have been cut anew since."""
    offset: int
    size: int
    members: dict[MemberId, None] = field(default_factory=dict)
    """Who refused it, the first first."""
    rest_until: float = 0.0
    done: bool = False

    def taken_by(self, seat: Seat) -> bool:
        return seat.packet_max >= self.size and seat.member not in self.members

    def concerns(self, piece: Piece, key: Key) -> bool:
        """May the message be in this piece, or in one that goes to the same member?"""
        if key == "topic":
            return overlap(self.piece, piece)
        if self.piece.stream != piece.stream:
            return False
        return self.offset % piece.of == piece.part if key == "message" else overlap(self.piece, piece)


class Refusals:
    """Of one group, under one leader."""

    def __init__(self, rest_seconds: float) -> None:
        self._rest_seconds = rest_seconds
        self._found: dict[tuple[Stream, int], Refusal] = {}
        self.deadline = inf
        """When a rest is over, and pieces are to be placed anew."""

    def __len__(self) -> int:
        return len(self._found)

    def note(self, member: MemberId, piece: Piece, refused: Sizes, now: float) -> None:
        for offset, size in refused:
            found = self._found.setdefault((piece.stream, offset), Refusal(piece, offset, size))
            if member not in found.members:
                found.members[member] = None
                found.rest_until = now + self._rest_seconds
                self.deadline = min(self.deadline, found.rest_until)

    def clear(self) -> None:
        self._found.clear()
        self.deadline = inf

    def sweep(self, progress: Mapping[Stream, StreamProgress], now: float) -> None:
        """See which of them are done; forget those whose rest is over, too."""
        for key, refusal in list(self._found.items()):
            stream = progress.get(refusal.piece.stream)
            refusal.done = stream is None or all(
                stream.cursors[piece].is_acked(refusal.offset)
                for piece in stream.common(refusal.piece)
                if refusal.concerns(piece, stream.key)
            )
            if now < refusal.rest_until:
                continue
            if refusal.done:
                del self._found[key]
            else:
                refusal.rest_until = now + self._rest_seconds
        self.deadline = min([refusal.rest_until for refusal in self._found.values()], default=inf)

    def share(self, piece: Piece, key: Key, seats: Mapping[MemberId, Seat]) -> MemberId | None:
        """Who has given this piece away and keeps its place in the sharing-out."""
        for refusal in self._found.values():
            if refusal.concerns(piece, key):
                for member in refusal.members:
                    if member in seats and seats[member].active:
                        return member
        return None

    def takers(self, piece: Piece, key: Key, seats: Sequence[Seat]) -> Sequence[Seat]:
        """Who may have this piece, of these; nobody stands back for a message that nobody takes."""
        mine = [refusal for refusal in self._found.values() if refusal.concerns(piece, key)]
        if not mine:
            return seats
        wanted = [refusal for refusal in mine if not refusal.done and any(map(refusal.taken_by, seats))]
        wanted.sort(key=lambda refusal: (refusal.piece.stream, refusal.offset))
        able = [seat for seat in seats if all(refusal.taken_by(seat) for refusal in wanted)]
        if not able:
            able = [seat for seat in seats if wanted[0].taken_by(seat)]
        rested = [seat for seat in able if not any(seat.member in refusal.members for refusal in mine)]
        return rested or able

    def set_aside(self, piece: Piece, key: Key, seats: Sequence[Seat]) -> tuple[int, ...]:
        """Messages of this piece that nobody takes."""
        return tuple(
            sorted(
                refusal.offset
                for refusal in self._found.values()
                if not refusal.done
                and refusal.piece.stream == piece.stream
                and refusal.concerns(piece, key)
                and not any(map(refusal.taken_by, seats))
            )
        )
