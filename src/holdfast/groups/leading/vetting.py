"""What a batch member says about progress, before it is believed: it is a client, and may say anything.

    progress beyond a stream's end     the log is looked at again; if it is beyond it then too, nothing of the message
                                       counts: its lease ends, and the member starts over
    carried beyond a stream's end      left out: who joins with it has to be able to start over
    carried, but never leased to it    left out: the record says which pieces each client was ever leased

A loan that somebody else holds is found out by its number, as with any member. Borrowers are the node's own
machines; what they say is not vetted.

The one surprising rule: what a leader knows about a stream's end is old, always. So a message that goes beyond it
waits for a look at the log, and only what goes beyond several looks is not believed.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from holdfast.groups.leading.streams import GroupStreams
from holdfast.groups.protocol.messages import FindLeader, LeaveGroup, UpdateStreamStates
from holdfast.groups.protocol.nouns import Mark, Piece
from holdfast.groups.record import GroupRecord

FromBatchMember = FindLeader | UpdateStreamStates | LeaveGroup

LOOKS_MAX = 3
"""A look that was under way when the message came may be older than it, and so may the one after that."""
CLIENTS_MAX = 1024
"""Of so many clients a leader holds the last message back; of others it believes what it knows to be possible."""


@dataclass(slots=True)
class HeldBack:
    """A message that goes beyond what is known of the log."""

    message: FromBatchMember
    looks: int = 0


class Vetting:
    """For one leader."""

    def __init__(self, group_streams: GroupStreams):
        self._streams = group_streams
        self._held: dict[tuple[str, str], HeldBack] = {}

    def hold(self, message: FromBatchMember) -> bool:
        """Does it say more than is known to be possible? Then it is kept until the log has been looked at."""
        key = (type(message).__name__, message.member.session)
        if isinstance(message, LeaveGroup):
            # Whoever leaves has nothing more to say: what it said before would seat it again.
            for held in [held for held in self._held if held[1] == key[1]]:
                del self._held[held]
        if self._possible(message) or (key not in self._held and len(self._held) >= CLIENTS_MAX):
            return False
        self._held[key] = HeldBack(message)
        return True

    def looked(self) -> tuple[list[FromBatchMember], bool]:
        """The log was looked at: what need wait no longer, and whether to look again for the others."""
        free: list[FromBatchMember] = []
        for key, held in list(self._held.items()):
            held.looks += 1
            if held.looks >= LOOKS_MAX or self._possible(held.message):
                del self._held[key]
                free.append(held.message)
        return free, bool(self._held)

    def _possible(self, message: FromBatchMember) -> bool:
        if self._streams.seen is None:
            return not _marks(message)
        return all(self._exists(piece, mark) for piece, mark in _marks(message))

    def believed(self, message: FromBatchMember, record: GroupRecord) -> tuple[FromBatchMember | None, list[Piece]]:
        """What is left of it, and the pieces of which it says what cannot be."""
        leased = record.leased.get(message.member.session, ())
        false = [piece for piece, mark in _marks(message) if not self._exists(piece, mark)]
        heads = self._streams.heads
        carried = tuple(c for c in message.carried if c.piece in leased and c.piece not in false)
        if isinstance(message, UpdateStreamStates):
            if not {report.piece for report in (*message.states, *message.old_states)}.isdisjoint(false):
                return None, false
            return replace(message, carried=carried), false
        return replace(message, carried=tuple(c for c in carried if c.piece.stream in heads)), false

    def _exists(self, piece: Piece, mark: Mark) -> bool:
        """Of streams that are gone anything may be said: nobody takes it in."""
        heads = self._streams.heads
        return mark.top < heads.get(piece.stream, 0) or piece.stream not in heads


def _marks(message: FromBatchMember) -> list[tuple[Piece, Mark]]:
    found = [(each.piece, each.mark) for each in message.carried]
    if isinstance(message, UpdateStreamStates):
        found += [(each.piece, each.mark) for each in (*message.states, *message.old_states)]
    return found
