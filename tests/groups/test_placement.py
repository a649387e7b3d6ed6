"""Placement is balanced within one, and moves no more than it must."""

from __future__ import annotations

from group_machines import piece
from hypothesis import given
from hypothesis import strategies as st

from holdfast.groups.leading.placement import place, slices_wanted
from holdfast.groups.protocol.nouns import MemberId, Piece

MEMBERS = [MemberId(name) for name in "abcdefg"]
pieces = st.integers(0, 20).map(lambda count: [piece(shard) for shard in range(count)])
members = st.sets(st.sampled_from(MEMBERS[:5]), max_size=5).map(sorted)


@st.composite
def situations(draw: st.DrawFn) -> tuple[list[Piece], dict[Piece, MemberId], list[MemberId]]:
    there = draw(pieces)
    held = {p: m for p in there if (m := draw(st.sampled_from([None, *MEMBERS])))}
    return there, held, draw(members)


@given(situations())
def test_everything_is_placed_and_balanced_within_one(situation) -> None:
    there, held, present = situation
    plan = place(there, held, present)
    if not present:
        assert plan == {}
        return
    assert set(plan) == set(there)
    loads = [list(plan.values()).count(member) for member in present]
    assert sum(loads) == len(there)
    assert max(loads) - min(loads) <= 1


@given(situations())
def test_no_balanced_placement_moves_less(situation) -> None:
    there, held, present = situation
    if not present:
        return
    plan = place(there, held, present)
    moved = sum(1 for p, member in held.items() if member in present and plan[p] != member)
    # A member can keep at most its quota; the larger quotas are best given to those who hold the most.
    share, extra = divmod(len(there), len(present))
    holdings = sorted((list(held.values()).count(member) for member in present), reverse=True)
    kept = sum(min(count, share + (index < extra)) for index, count in enumerate(holdings))
    assert moved == sum(holdings) - kept


@given(situations())
def test_it_is_a_function(situation) -> None:
    there, held, present = situation
    assert place(there, held, present) == place(there[::-1], held, present[::-1])


@given(st.integers(0, 40), st.integers(0, 200))
def test_slices_give_everybody_work_and_are_not_finer_than_that(streams: int, present: int) -> None:
    of = slices_wanted(streams, present, 64)
    assert of & (of - 1) == 0
    if streams:
        assert streams * of >= min(present, streams * 64)
        assert of == 1 or streams * of // 2 < present


def test_slicing_can_be_switched_off() -> None:
    assert slices_wanted(1, 100, 1) == 1
