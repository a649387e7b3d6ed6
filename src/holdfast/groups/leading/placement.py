"""Who should hold which piece: a pure function of what there is and who holds it now.

The loads of any two members differ by at most one, and so do their shares of any one stream's slices: whichever stream
is busy, everybody works. The one surprising rule: a piece on its way back to the leader belongs to nobody here, yet it
counts, so that nobody's streams are called back twice for the same newcomer. Whoever is to give it back waits for it:
what can be lent at once goes to the others, or one that never acknowledges would be given more, and hold that up, too.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence

from holdfast.groups.protocol.nouns import Key, MemberId, Piece
from holdfast.model import Stream

NOTHING_LATE: Mapping[Piece, MemberId] = {}


def place(
    pieces: Iterable[Piece],
    held: Mapping[Piece, MemberId],
    members: Sequence[MemberId],
    late: Mapping[Piece, MemberId] = NOTHING_LATE,
) -> dict[Piece, MemberId]:
    """The member each piece should be with; nothing at all if there is no member.

    `held` says who has a piece now, where somebody has it and is to keep it if possible; `late`, who is still to give
    back which, be it among `pieces` or not.
    """
    if not members:
        return {}
    there = sorted(pieces)
    owing = Counter(late.values())
    first = sorted(members, key=lambda member: (owing[member], member))
    return (_spread if any(piece.of > 1 for piece in there) else _whole)(there, held, first, late)


def _whole(
    there: list[Piece], held: Mapping[Piece, MemberId], members: list[MemberId], late: Mapping[Piece, MemberId]
) -> dict[Piece, MemberId]:
    """Streams that are not cut, of which there may be many: no balanced placement moves fewer."""
    hands: dict[MemberId, list[Piece]] = {member: [] for member in members}
    free: list[Piece] = []
    for piece in there:
        hands.get(held.get(piece, _NOBODY), free).append(piece)
    share, extra = divmod(len(there), len(hands))
    plan: dict[Piece, MemberId] = {}
    room: dict[MemberId, int] = {}
    # The larger shares go to those who hold the most: each of them is then asked for one piece less.
    for member, holding in sorted(hands.items(), key=lambda item: -len(item[1])):
        quota = share + 1 if extra > 0 else share
        extra -= 1
        plan.update((piece, member) for piece in holding[:quota])
        free += holding[quota:]
        room[member] = max(0, quota - len(holding))
    # Newcomers first.
    plan.update(_give_out(free, dict(reversed(room.items())), late))
    return plan


def _give_out(
    free: Iterable[Piece], room: dict[MemberId, int], late: Mapping[Piece, MemberId]
) -> dict[Piece, MemberId]:
    """As many to each as it has room for: what is late to whoever has it still, the rest in turn.

    In turn, so that neighbouring shards spread; what is there first, so that everybody gets some of that.
    """
    plan: dict[Piece, MemberId] = {}
    there: list[Piece] = []
    coming: list[Piece] = []
    for piece in free:
        owner = late.get(piece)
        if owner is None:
            there.append(piece)
        elif room.get(owner, 0):
            plan[piece] = owner
            room[owner] -= 1
        else:
            coming.append(piece)
    takers = deque((member, places) for member, places in room.items() if places)
    for piece in there + coming:
        member, places = takers.popleft()
        plan[piece] = member
        if places > 1:
            takers.append((member, places - 1))
    return plan


def _spread(
    there: list[Piece], held: Mapping[Piece, MemberId], members: list[MemberId], late: Mapping[Piece, MemberId]
) -> dict[Piece, MemberId]:
    """Slices: those of one stream with as many members as can be."""
    streams: dict[Stream, list[Piece]] = {}
    for piece in there:
        streams.setdefault(piece.stream, []).append(piece)
    turns = _Turns(streams, held, members)
    plan: dict[Piece, MemberId] = {}
    for stream, some in streams.items():
        room = {member: turns.even[stream] + (member in turns.more[stream]) for member in turns.members}
        free = []
        for piece in some:
            owner = held.get(piece)
            if owner is not None and room.get(owner, 0):
                plan[piece] = owner
                room[owner] -= 1
            else:
                free.append(piece)
        plan.update(_give_out(free, room, late))
    return plan


class _Turns:
    """Every member gets `even[stream]` pieces of a stream, and those in `more[stream]` one more.

    So who gets one more of as many streams as anybody else, give or take one, is balanced. First those who hold such a
    piece already keep it; then the rest is given out.
    """

    def __init__(
        self, streams: Mapping[Stream, list[Piece]], held: Mapping[Piece, MemberId], members: Sequence[MemberId]
    ):
        self.members = members
        self.even = {stream: len(some) // len(members) for stream, some in streams.items()}
        self.more: dict[Stream, set[MemberId]] = {stream: set() for stream in streams}
        wanted = {stream: len(some) % len(members) for stream, some in streams.items()}
        counts = {stream: Counter(held[piece] for piece in some if piece in held) for stream, some in streams.items()}
        self._holders = {s: {m for m in members if counts[s][m] > self.even[s]} for s in streams}
        self._load = dict.fromkeys(members, 0)
        for stream, holders in self._holders.items():
            for member in sorted(holders, key=lambda m: (self._load[m], m))[: wanted[stream]]:
                self._give(stream, member)
        self._quota(sum(wanted.values()))
        everybody = set(members)
        for among in (self._holders, dict.fromkeys(streams, everybody)):
            for stream, count in wanted.items():
                while len(self.more[stream]) < count and self._give_one(stream, among):
                    pass

    def _quota(self, total: int) -> None:
        """The larger shares go to those who hold the most: each of them is then asked for one piece less."""
        share, extra = divmod(total, len(self.members))
        ranked = sorted(self.members, key=lambda member: -self._load[member])
        self._most = {member: share + (at < extra) for at, member in enumerate(ranked)}
        for stream in reversed(self.more):
            for member in sorted(self.more[stream]):
                if self._load[member] > self._most[member]:
                    self._take(stream, member)

    def _give_one(self, stream: Stream, among: Mapping[Stream, set[MemberId]]) -> bool:
        """To whoever lacks most; if nobody who lacks any can take this one, by a chain of exchanges."""
        came: dict[MemberId, tuple[Stream, MemberId | None]] = {}
        queue: list[MemberId] = []

        def reach(stream: Stream, giver: MemberId | None) -> None:
            for member in self.members:
                if member in among[stream] and member not in self.more[stream] and member not in came:
                    came[member] = (stream, giver)
                    queue.append(member)

        reach(stream, None)
        # Of equals the last, who is as a rule the newest.
        at: MemberId | None = max(reversed(queue), key=self._room, default=None)
        if at is None or not self._room(at):
            for giver in queue:
                for other, members in self.more.items():
                    if giver in members:
                        reach(other, giver)
            at = next((member for member in queue if self._room(member)), None)
        found = at is not None
        while at is not None:
            gets, gives = came[at]
            if gives is not None:
                self._take(gets, gives)
            self._give(gets, at)
            at = gives
        return found

    def _room(self, member: MemberId) -> int:
        return self._most[member] - self._load[member]

    def _give(self, stream: Stream, member: MemberId) -> None:
        self.more[stream].add(member)
        self._load[member] += 1

    def _take(self, stream: Stream, member: MemberId) -> None:
        self.more[stream].discard(member)
        self._load[member] -= 1


def place_together(
    pieces: Iterable[Piece],
    held: Mapping[Piece, MemberId],
    members: Sequence[MemberId],
    late: Mapping[Piece, MemberId] = NOTHING_LATE,
) -> dict[Piece, MemberId]:
    """The same for the key `topic`: slices of one number, whatever their stream, go to one member.

    A topic's messages lie in as many streams as it has publishers in; they are one slice of each. Balanced are the
    numbers, not the pieces.
    """
    lots: dict[Piece, list[Piece]] = {}
    for piece in sorted(pieces):
        lots.setdefault(Piece(Stream("", piece.part, piece.of)), []).append(piece)
    owners: dict[Piece, MemberId] = {}
    for lot, some in lots.items():
        if found := Counter(held[piece] for piece in some if piece in held):
            owners[lot] = max(sorted(found), key=lambda member: found[member])
    owed = {Piece(Stream("", piece.part, piece.of)): owner for piece, owner in late.items()}
    plan = place(lots, owners, members, owed)
    return {piece: plan[lot] for lot, some in lots.items() if lot in plan for piece in some}


def slices_wanted(key: Key, streams: int, members: int, slices_max: int) -> int:
    """Into how many slices each stream should be cut so that everybody gets work: a power of two, or 1.

    By publisher, no more than there must be for that: a stream is one reader's as long as there are enough of them. By
    topic or message everybody gets a slice of every stream, for one may be all that is busy.
    """
    of = 1
    while 0 < (streams if key == "publisher" else 1) * of < members and of * 2 <= slices_max:
        of *= 2
    return of


_NOBODY = MemberId("", 0, 0, 0)
