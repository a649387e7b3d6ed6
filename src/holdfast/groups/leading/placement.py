"""Who should hold which piece: a pure function of what there is and who holds it now.

The loads of any two members differ by at most one, and of all placements for which that is true it is one that
moves the fewest pieces. The one surprising rule: a piece on its way back to the leader belongs to nobody here,
yet it counts, so that nobody's streams are called back twice for the same newcomer.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from holdfast.groups.protocol.nouns import MemberId, Piece


def place(
    pieces: Iterable[Piece], held: Mapping[Piece, MemberId], members: Sequence[MemberId]
) -> dict[Piece, MemberId]:
    """The member each piece should be with; nothing at all if there is no member.

    `held` says who has a piece now, where somebody has it and is to keep it if possible.
    """
    if not members:
        return {}
    hands: dict[MemberId, list[Piece]] = {member: [] for member in sorted(members)}
    free: list[Piece] = []
    count = 0
    for piece in sorted(pieces):
        count += 1
        hands.get(held.get(piece, _NOBODY), free).append(piece)
    share, extra = divmod(count, len(hands))
    plan: dict[Piece, MemberId] = {}
    room: list[tuple[MemberId, int]] = []
    # The larger shares go to those who hold the most: each of them is then asked for one piece less.
    for member, holding in sorted(hands.items(), key=lambda item: -len(item[1])):
        quota = share + 1 if extra > 0 else share
        extra -= 1
        plan.update((piece, member) for piece in holding[:quota])
        free += holding[quota:]
        room.append((member, quota - len(holding)))
    # Newcomers first, and in turn, so that neighbouring shards spread.
    room = [(member, places) for member, places in reversed(room) if places > 0]
    for piece in free:
        member, places = room.pop(0)
        plan[piece] = member
        if places > 1:
            room.append((member, places - 1))
    return plan


def slices_wanted(streams: int, members: int, slices_max: int) -> int:
    """Into how many slices each stream should be cut so that everybody gets work: a power of two, or 1."""
    of = 1
    while 0 < streams * of < members and of * 2 <= slices_max:
        of *= 2
    return of


_NOBODY = MemberId("", 0, 0, 0)
