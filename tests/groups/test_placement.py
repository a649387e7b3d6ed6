"""Placement is balanced within one, and moves no more than it must."""

from __future__ import annotations

import pytest
from group_machines import piece, stream
from hypothesis import given
from hypothesis import strategies as st

from holdfast.groups.leading.placement import place, place_together, slices_wanted
from holdfast.groups.protocol.nouns import Key, MemberId, Piece

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


def sliced(streams: int, of: int) -> list[Piece]:
    return [Piece(stream(shard), part, of) for shard in range(streams) for part in range(of)]


@st.composite
def slices(draw: st.DrawFn) -> tuple[list[Piece], dict[Piece, MemberId], list[MemberId]]:
    there = [p for p in sliced(draw(st.integers(0, 6)), draw(st.sampled_from([2, 4, 8]))) if draw(st.integers(0, 9))]
    held = {p: m for p in there if (m := draw(st.sampled_from([None, *MEMBERS])))}
    return there, held, draw(members)


def shares(plan: dict[Piece, MemberId], present: list[MemberId]) -> list[list[int]]:
    """Of each stream, how many of its slices each member has."""
    return [
        [sum(owner == member and p.stream == each for p, owner in plan.items()) for member in present]
        for each in {p.stream for p in plan}
    ]


@given(slices())
def test_slices_are_balanced_and_those_of_each_stream_too(situation) -> None:
    there, held, present = situation
    plan = place(there, held, present)
    assert set(plan) == (set(there) if present else set())
    loads = [list(plan.values()).count(member) for member in present]
    assert not loads or max(loads) - min(loads) <= 1
    assert all(max(some) - min(some) <= 1 for some in shares(plan, present))
    assert plan == place(there[::-1], held, present[::-1])


@pytest.mark.parametrize("streams", [1, 3, 16])
@pytest.mark.parametrize("count", [1, 2, 3, 4, 5, 6])
def test_a_newcomer_gets_slices_and_a_leaver_gives_them_and_nothing_else_moves(streams: int, count: int) -> None:
    there = sliced(streams, 8)
    before = place(there, {}, MEMBERS[:count])
    after = place(there, before, MEMBERS[: count + 1])
    assert {after[p] for p in there if before[p] != after[p]} == {MEMBERS[count]}
    back = place(there, {p: m for p, m in after.items() if m != MEMBERS[0]}, MEMBERS[1 : count + 1])
    moved = [p for p in there if after[p] != MEMBERS[0] and back[p] != after[p]]
    assert len(moved) <= streams * count, "those of other members only to even out a stream"


@given(slices(), st.integers(1, 7))
def test_by_topic_slices_of_one_number_go_to_one_member(situation, moves: int) -> None:
    there, held, present = situation
    plan = place_together(there, held, present)
    assert set(plan) == (set(there) if present else set())
    owners = {p.part: {plan[q] for q in there if q.part == p.part} for p in plan}
    assert all(len(some) == 1 for some in owners.values())
    numbers = [sum(some == {member} for some in owners.values()) for member in present]
    assert not numbers or max(numbers) - min(numbers) <= 1
    assert place_together(there, plan, present) == plan, "what is well stays"


@given(st.integers(1, 40), st.integers(0, 200), st.sampled_from(["topic", "message"]))
def test_by_topic_or_message_everybody_gets_a_slice_of_every_stream(streams: int, present: int, key: Key) -> None:
    of = slices_wanted(key, streams, present, 64)
    assert of & (of - 1) == 0
    assert of >= min(present, 64) and (of == 1 or of // 2 < present)


@given(st.integers(0, 40), st.integers(0, 200))
def test_slices_give_everybody_work_and_are_not_finer_than_that(streams: int, present: int) -> None:
    of = slices_wanted("publisher", streams, present, 64)
    assert of & (of - 1) == 0
    if streams:
        assert streams * of >= min(present, streams * 64)
        assert of == 1 or streams * of // 2 < present


@pytest.mark.parametrize("streams", [1, 3, 8])
def test_whoever_is_late_waits_for_what_it_has(streams: int) -> None:
    """Of two halves of each stream one is free, and cut; the other is with `a`, which does not give it back."""
    there = sliced(streams, 4)
    late = {p: MEMBERS[0] for p in there if p.part % 2 == 0}
    plan = place(there, {}, MEMBERS[:3], late)
    assert all(plan[p] != MEMBERS[0] for p in there if p not in late)
    for each in {p.stream for p in there}:
        assert {plan[p] for p in there if p.stream == each and p not in late} == set(MEMBERS[1:3])


@given(slices(), st.data())
def test_what_is_late_changes_no_balance_and_goes_to_whoever_has_it_still(situation, data: st.DataObject) -> None:
    there, held, present = situation
    late = {p: m for p in there if p not in held and (m := data.draw(st.sampled_from([None, *MEMBERS])))}
    plan = place(there, held, present, late)
    assert set(plan) == (set(there) if present else set())
    loads = [list(plan.values()).count(member) for member in present]
    assert not loads or max(loads) - min(loads) <= 1
    assert all(max(some) - min(some) <= 1 for some in shares(plan, present))
    for each in {p.stream for p in plan}:
        for member in present:
            mine = [p for p, owner in plan.items() if owner == member and p.stream == each and held.get(p) != member]
            others = [p for p in there if p.stream == each and late.get(p) == member and plan[p] != member]
            assert not others or all(late.get(p) == member for p in mine), "others' before its own"


def test_slicing_can_be_switched_off() -> None:
    assert {slices_wanted(key, 1, 100, 1) for key in ("publisher", "topic", "message")} == {1}
