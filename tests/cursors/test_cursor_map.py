"""A default per generation and the exceptions, against a plain set of what is done in each stream."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from holdfast.cursors.cursor import Cursor
from holdfast.cursors.cursor_map import DONE, CursorMap, Progress, is_done, past_of, to_cursor, union
from holdfast.model import Stream

GENERATIONS, SHARDS, OFFSETS = range(6), range(3), range(8)
Done = set[tuple[int, int, int]]
ALL: Done = {(g, s, o) for g in GENERATIONS for s in SHARDS for o in OFFSETS}

pasts = st.sampled_from([*OFFSETS, DONE])


@st.composite
def progresses(draw: st.DrawFn) -> Progress:
    cursor = Cursor(draw(st.integers(-1, 6)))
    for first, length in draw(st.lists(st.tuples(st.integers(0, 6), st.integers(0, 2)), max_size=3)):
        cursor.ack_range(first, first + length)
    return draw(st.sampled_from([cursor, past_of(cursor), DONE]))


@st.composite
def changes(draw: st.DrawFn) -> tuple[object, ...]:
    generation = draw(st.sampled_from(GENERATIONS))
    match draw(st.sampled_from(["set", "add", "fill", "finish"])):
        case "set":
            return ("set", Stream("l", draw(st.sampled_from(SHARDS)), generation), draw(progresses()))
        case "add":
            return ("add", Stream("l", draw(st.sampled_from(SHARDS)), generation), draw(progresses()))
        case "fill":
            return ("fill", generation, draw(st.none() | st.integers(0, 6)), draw(pasts))
        case _:
            return ("finish", generation)


@st.composite
def maps(draw: st.DrawFn) -> tuple[CursorMap, Done]:
    found = CursorMap.done_before(draw(st.integers(0, 5)))
    done = seen(found)
    for name, *arguments in draw(st.lists(changes(), max_size=8)):
        getattr(found, str(name))(*arguments)
        match name, *arguments:
            case "set" | "add", Stream() as stream, progress:
                if name == "set":
                    done = {at for at in done if at[:2] != (stream.generation, stream.shard)}
                done |= {(stream.generation, stream.shard, o) for o in OFFSETS if is_done(progress, o)}  # type: ignore[arg-type]
            case "fill", int(first), past, int(offset):
                inside = [g for g in GENERATIONS if first <= g and (past is None or g < past)]  # type: ignore[operator]
                done = {at for at in done if at[0] not in inside}
                done |= {at for at in ALL if at[0] in inside and at[2] < offset}
            case "finish", int(generation):
                done |= {at for at in ALL if at[0] == generation}
    return found, done


def seen(found: CursorMap) -> Done:
    return {(g, s, o) for g, s, o in ALL if found.is_done(Stream("l", s, g), o)}


@given(maps())
def test_it_is_what_was_set_added_and_filled(pair: tuple[CursorMap, Done]) -> None:
    found, done = pair
    assert seen(found) == done
    for _, _, progress in found:
        assert progress != found.default(0) or len(found.spans) > 1  # no exception that says nothing
    begins = [begin for begin, _ in found.spans]
    assert begins[0] == 0 and begins == sorted(set(begins))
    assert all(one[1] != other[1] for one, other in zip(found.spans, found.spans[1:], strict=False))


@given(maps(), maps())
def test_merging_is_union_whatever_the_order(one: tuple[CursorMap, Done], other: tuple[CursorMap, Done]) -> None:
    merged, same = one[0].copy(), other[0].copy()
    merged.merge(other[0])
    same.merge(one[0])
    assert seen(merged) == one[1] | other[1]
    assert merged == same
    assert merged.covers(one[0]) and merged.covers(other[0])
    again = merged.copy()
    again.merge(one[0])
    assert again == merged


@given(maps(), maps())
def test_covers_is_inclusion(one: tuple[CursorMap, Done], other: tuple[CursorMap, Done]) -> None:
    if one[0].covers(other[0]):
        assert one[1] >= other[1]


@given(maps(), changes())
def test_a_copy_is_its_own(pair: tuple[CursorMap, Done], change: tuple[object, ...]) -> None:
    found, done = pair
    twin = found.copy()
    assert twin == found
    getattr(twin, str(change[0]))(*change[1:])
    assert seen(found) == done


@given(progresses(), progresses())
def test_union_of_progress(one: Progress, other: Progress) -> None:
    both = union(one, other)
    assert all(is_done(both, o) == (is_done(one, o) or is_done(other, o)) for o in OFFSETS)
    assert all(to_cursor(both).is_acked(o) == is_done(both, o) for o in OFFSETS)


def test_generations_that_are_done_cost_nothing() -> None:
    found = CursorMap()
    for generation in range(1, 721):
        for shard in range(16):
            found.set(Stream("l", shard, generation), generation * 100 + shard)
        found.finish(generation)
    found.finish(0)
    assert found.spans == [(0, DONE), (721, 0)] and not found.streams


def test_a_stream_behind_in_a_generation_that_is_otherwise_done() -> None:
    found = CursorMap.done_before(5)
    found.set(Stream("l", 1, 3), 17)
    assert found.past(Stream("l", 1, 3)) == 17
    assert found.past(Stream("l", 0, 3)) == DONE
    assert found.past(Stream("l", 0, 5)) == 0
    found.set(Stream("l", 1, 3), DONE)
    assert not found.streams
