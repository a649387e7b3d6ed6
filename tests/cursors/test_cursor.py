"""The cursor against a plain set of whole numbers."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.cursors import Cursor
from holdfast.errors import RequestError, StaleEpoch

TOP = 60
offsets = st.integers(0, TOP)
ranges = st.tuples(offsets, st.integers(0, 9)).map(lambda pair: (pair[0], pair[0] + pair[1]))
steps = st.one_of(
    st.tuples(st.just("ack"), offsets),
    st.tuples(st.just("range"), ranges),
    st.tuples(st.just("many"), st.lists(offsets).map(sorted)),
)


def play(cursor: Cursor, moves: list) -> set[int]:
    """Do the same to the cursor and to a set, and say what the set holds."""
    model: set[int] = set()
    for kind, what in moves:
        if kind == "ack":
            cursor.ack(what)
            model.add(what)
        elif kind == "range":
            cursor.ack_range(*what)
            model.update(range(what[0], what[1] + 1))
        else:
            cursor.ack_many(what)
            model.update(what)
    return model


def listed(pairs: list[tuple[int, int]]) -> list[int]:
    return [offset for first, last in pairs for offset in range(first, last + 1)]


@given(st.lists(steps))
def test_a_cursor_is_a_set_of_offsets(moves):
    cursor = Cursor()
    model = play(cursor, moves)
    floor = next(offset for offset in range(TOP + 20) if offset not in model)
    assert cursor.floor == floor and cursor.offset == floor - 1
    assert set(range(floor)) | set(listed(cursor.acked)) == model
    assert [cursor.is_acked(offset) for offset in range(TOP + 20)] == [o in model for o in range(TOP + 20)]
    assert cursor.top == max(model, default=-1)


@given(st.lists(steps))
def test_ranges_are_sorted_disjoint_and_never_touch(moves):
    cursor = Cursor()
    play(cursor, moves)
    edge = cursor.offset
    for first, last in cursor.acked:
        assert edge + 1 < first <= last
        edge = last


@given(st.lists(steps), offsets, offsets)
def test_unacked_is_the_complement(moves, first, past):
    cursor = Cursor()
    model = play(cursor, moves)
    assert listed(cursor.unacked(first, past)) == [o for o in range(first, past) if o not in model]
    assert cursor.unacked_count(past) == len([o for o in range(past) if o not in model])


@given(st.lists(steps), st.lists(steps))
def test_merge_is_union_whichever_comes_first(one, two):
    left, right = Cursor(), Cursor()
    model = play(left, one) | play(right, two)
    there, back = left.copy(), right.copy()
    there.merge(right)
    back.merge(left)
    assert there == back
    assert there.covers(left) and there.covers(right)
    assert left.covers(right) == (set(listed([(0, left.offset)])) | set(listed(left.acked)) == model)


@given(st.lists(steps), st.integers(0, 9))
def test_json_there_and_back(moves, epoch):
    cursor = Cursor(epoch=epoch)
    play(cursor, moves)
    assert Cursor.from_json(cursor.to_json(1726937845.9)) == cursor


def test_the_stored_form_is_the_documented_one():
    cursor = Cursor(12345, [(12350, 12360)], epoch=7)
    text = b'{"offset": 12345, "updated_at": 1726937845, "acked": [[12350, 12360]], "epoch": 7}'
    assert cursor.to_json(1726937845) == text


def test_the_plain_form_of_seed_002_is_read():
    assert Cursor.from_json('{"offset": 5, "updated_at": 1}') == Cursor(5)


def test_fields_of_a_later_version_are_passed_over():
    assert Cursor.from_json('{"offset": 5, "updated_at": 1, "by": "x"}') == Cursor(5)


@pytest.mark.parametrize(
    ("value", "named"),
    [
        (b"\xff", "not JSON"),
        ("[" * 100_000, "not JSON"),
        ("12", "not a JSON object"),
        ({"updated_at": 1}, "no 'offset'"),
        ({"offset": 1}, "no 'updated_at'"),
        ({"offset": True, "updated_at": 1}, "offset is True"),
        ({"offset": 1.5, "updated_at": 1}, "offset is 1.5"),
        ({"offset": -2, "updated_at": 1}, "offset is -2"),
        ({"offset": 1, "updated_at": 1, "epoch": "7"}, "epoch is '7'"),
        ({"offset": 1, "updated_at": 1, "acked": 3}, "acked is 3"),
        ({"offset": 1, "updated_at": 1, "acked": [[3]]}, r"acked holds \[3\]"),
        ({"offset": 1, "updated_at": 1, "acked": [[3, True]]}, "acked holds"),
        ({"offset": 1, "updated_at": 1, "acked": [[5, 4]]}, r"\[5, 4\] is not in order"),
        ({"offset": 9, "updated_at": 1, "acked": [[9, 12]]}, "above 9"),
        ({"offset": 1, "updated_at": 1, "acked": [[5, 8], [7, 9]]}, r"\[7, 9\] is not in order above 8"),
    ],
)
def test_a_damaged_cursor_says_what_is_wrong(value, named):
    data = value if isinstance(value, (str, bytes)) else json.dumps(value)
    with pytest.raises(RequestError, match=named):
        Cursor.from_json(data)


def test_advance_is_fenced_and_forward_only():
    cursor = Cursor(10, epoch=3)
    cursor.advance(Cursor(4, [(12, 14)], epoch=3))
    assert cursor == Cursor(10, [(12, 14)], epoch=3)
    cursor.advance(Cursor(11, epoch=5))
    assert cursor == Cursor(14, epoch=5)
    with pytest.raises(StaleEpoch, match="epoch 4 is refused: epoch 5"):
        cursor.advance(Cursor(99, epoch=4))
    assert cursor == Cursor(14, epoch=5)


def test_a_range_that_ends_before_it_begins_is_refused():
    with pytest.raises(RequestError, match=r"5\.\.4"):
        Cursor().ack_range(5, 4)
