"""What a batch member says about progress, before it is believed: it is a client, and may say anything.

    beyond the end of a stream         the log is looked at again, and what is beyond it then is cut off
    carried, but never leased to it    cut out: the record says which pieces each client was ever leased

A loan that somebody else holds is found out by its number, as with any member. Borrowers are the node's own
machines; what they say is not vetted.

The one surprising rule: what a leader knows about a stream's end is old, always. So a message that goes beyond it
waits for a look at the log, and only what goes beyond several looks is not believed.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import TypeVar

from holdfast.groups.leading.streams import GroupStreams
from holdfast.groups.protocol.messages import Carried, FindLeader, LeaveGroup, Report, UpdateStreamStates
from holdfast.groups.protocol.nouns import Mark, Piece
from holdfast.groups.record import GroupRecord

FromBatchMember = FindLeader | UpdateStreamStates | LeaveGroup
Told = TypeVar("Told", Carried, Report)

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
        heads = self._streams.heads
        return all(
            mark.top < heads.get(piece.stream, 0) or piece.stream not in heads for piece, mark in _marks(message)
        )

    def believed(self, message: FromBatchMember, record: GroupRecord) -> FromBatchMember:
        """What is left of it."""
        leased = record.leased.get(message.member.session, ())
        carried = self._cut(each for each in message.carried if each.piece in leased)
        if isinstance(message, UpdateStreamStates):
            states, old_states = self._cut(message.states), self._cut(message.old_states)
            return replace(message, carried=carried, states=states, old_states=old_states)
        return replace(message, carried=carried)

    def _cut(self, told: Iterable[Told]) -> tuple[Told, ...]:
        heads = self._streams.heads
        return tuple(each._replace(mark=each.mark.below(heads.get(each.piece.stream, 0))) for each in told)


def _marks(message: FromBatchMember) -> list[tuple[Piece, Mark]]:
    found = [(each.piece, each.mark) for each in message.carried]
    if isinstance(message, UpdateStreamStates):
        found += [(each.piece, each.mark) for each in (*message.states, *message.old_states)]
    return found
