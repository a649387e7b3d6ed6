"""Progress through any history of cuts, against a plain set of messages that were done."""

from __future__ import annotations

from typing import get_args

import pytest
from group_machines import stream
from hypothesis import given
from hypothesis import strategies as st

from holdfast.errors import RequestError
from holdfast.groups.progress import Done, StreamProgress, first_of, overlap, own_ranges, part_of, slice_of
from holdfast.groups.protocol.nouns import Key, Layer, Mark, Piece

S = stream(0)
KEYS = get_args(Key)
PUBLISHERS = [f"p{n}" for n in range(9)]
MESSAGES = [(PUBLISHERS[(n * 7) % 9], f"t/{n * 5 % 7}") for n in range(24)]
"""Publisher and topic of each."""

steps = st.lists(
    st.one_of(
        st.tuples(st.just("cut"), st.sampled_from([1, 2, 4, 8]), st.sets(st.integers(0, 7), max_size=2)),
        st.tuples(st.just("read"), st.integers(0, 7), st.integers(0, 24), st.integers(0, 2**24 - 1)),
        st.tuples(st.just("late"), st.integers(0, 100)),
        st.tuples(st.just("reload")),
    ),
    max_size=14,
)


def read(progress: StreamProgress, part: int, past: int, which: int, done: set[int]) -> tuple[Piece, Mark]:
    """A member reads a piece up to `past` and acknowledges the messages in the bit set `which`."""
    piece = progress.pieces()[part % len(progress.pieces())]
    lent = Done(piece, progress.mark(piece), progress.layers, progress.key)
    cursor = lent.cursor.copy()
    for offset, message in enumerate(MESSAGES[:past]):
        if not lent.wants(offset, *message):
            cursor.ack(offset)
        elif which >> offset & 1:
            cursor.ack(offset)
            done.add(offset)
    return piece, Mark.of_cursor(cursor)


def cut(progress: StreamProgress, of: int, lent: set[int]) -> None:
    """Those of these numbers are lent, and stay as they are."""
    before = progress.pieces()
    held = [before[number % len(before)] for number in lent]
    progress.cut(of, held)
    assert set(held) <= set(progress.pieces())
    assert held or {piece.of for piece in progress.pieces()} == {of}
    assert sum(1 / piece.of for piece in progress.pieces()) == 1
    assert all(progress.mark(piece).offset < len(MESSAGES) for piece in progress.pieces())


def wanted(progress: StreamProgress) -> set[int]:
    """What readers of all pieces would be given now."""
    found: list[int] = []
    for piece in progress.pieces():
        lent = Done(piece, progress.mark(piece), progress.layers, progress.key)
        mine = [offset for offset, message in enumerate(MESSAGES) if lent.wants(offset, *message)]
        assert not mine or mine[0] >= progress.reached(piece)
        found += mine
    assert len(found) == len(set(found)), "no message is in two pieces"
    return set(found)


@given(st.sampled_from(KEYS), steps)
def test_nothing_is_skipped_and_nothing_done_comes_again(key: Key, history) -> None:
    progress = StreamProgress.starting(S, "c", 0, key)
    done: set[int] = set()
    said: list[tuple[Piece, Mark]] = []
    for step in history:
        floor = progress.floor
        match step:
            case ("cut", of, lent):
                cut(progress, of, lent)
            case ("read", part, past, which):
                said.append(read(progress, part, past, which, done))
                progress.merge(*said[-1])
            case ("late", which) if said:
                # A report comes again, whatever the stream has been cut into meanwhile.
                progress.merge(*said[which % len(said)])
            case ("reload",):
                first, *others = progress.split(1 + len(said) % 3)
                progress = StreamProgress.from_json(S, first.to_json(0.0, 1))
                for part in others:
                    progress.add(StreamProgress.from_json(S, part.to_json(0.0, 1)))
        assert wanted(progress) == set(range(len(MESSAGES))) - done
        assert progress.floor >= floor


@given(st.sampled_from(KEYS), steps)
def test_layers_go_once_everybody_is_beyond_them(key: Key, history) -> None:
    progress = StreamProgress.starting(S, "c", 0, key)
    done: set[int] = set()
    for step in history:
        match step:
            case ("cut", of, lent):
                cut(progress, of, lent)
            case ("read", part, past, which):
                progress.merge(*read(progress, part, past, which, done))
    for piece in progress.pieces():
        progress.merge(piece, Mark(len(MESSAGES) - 1))
    assert progress.layers == ()


def test_the_stored_form_is_a_cursor_for_everybody_else() -> None:
    from holdfast.cursors import Cursor

    progress = StreamProgress.starting(S, "c", 3)
    progress.cut(2)
    progress.merge(Piece(S, 0, 2), Mark(9))
    assert Cursor.from_json(progress.to_json(5.0, epoch=4)).offset == 2, "what all slices have done"


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"[]",
        b'{"offset":1,"updated_at":1,"slices":3}',
        b'{"offset":1,"updated_at":1,"slices":[[0,2,1,[]]]}',
        b'{"offset":1,"updated_at":1,"layers":[[1]]}',
    ],
)
def test_damage_is_named(data: bytes) -> None:
    with pytest.raises(RequestError):
        StreamProgress.from_json(S, data)


def test_a_publisher_stays_in_its_slice() -> None:
    # Stored progress depends on it: these values may never change.
    assert [slice_of(p, 4) for p in ("car-1", "car-2", "car-3", "車")] == [0, 1, 2, 0]
    assert {slice_of(f"car-{n}", 4) for n in range(50)} == {0, 1, 2, 3}
    assert slice_of("anything", 1) == 0


def test_a_layer_may_know_only_some_parts() -> None:
    lent = Done(Piece(S, 0, 1), Mark(), [Layer(4, ((slice_of("p0", 4), Mark(5)),))])
    other = next(p for p in PUBLISHERS if slice_of(p, 4) != slice_of("p0", 4))
    assert not lent.wants(3, "p0", "t")
    assert lent.wants(3, other, "t")


@pytest.mark.parametrize("key", KEYS)
@given(of=st.sampled_from([1, 2, 4, 8]), finer=st.sampled_from([1, 2, 4]), at=st.integers(0, 23))
def test_a_finer_slice_lies_within_a_coarser_one(key: Key, of: int, finer: int, at: int) -> None:
    part, within = (part_of(key, n, at, *MESSAGES[at]) for n in (of, of * finer))
    assert within % of == part
    assert overlap(Piece(S, part, of), Piece(S, within, of * finer))


def test_cutting_finer_leaves_no_layer() -> None:
    progress = StreamProgress.starting(S, "c", 0, "topic")
    progress.cut(2)
    progress.merge(Piece(S, 0, 2), Mark(9, ((12, 14),)))
    progress.cut(8)
    assert progress.layers == ()
    assert [progress.mark(piece) for piece in progress.pieces()] == [Mark(9, ((12, 14),)), Mark()] * 4


@given(
    of=st.sampled_from([2, 4, 8]),
    part=st.integers(0, 7),
    acked=st.sets(st.integers(0, 60)),
    how=st.sampled_from(["one by one", "with neighbours before", "with everything passed over"]),
)
def test_by_message_neighbours_are_worth_no_range(of: int, part: int, acked: set[int], how: str) -> None:
    """However a member words it, a slice has as many ranges as the messages it has acknowledged have gaps."""
    piece = Piece(S, part % of, of)
    own = range(piece.part, 60, of)
    mine = sorted(acked.intersection(own))
    words = {
        "one by one": [(offset, offset) for offset in mine],
        "with neighbours before": [(max(0, offset - of + 1), offset) for offset in mine],
        "with everything passed over": [(o, o) for o in range(60) if o not in own or o in acked],
    }
    progress = StreamProgress.starting(S, "c", 0, "message")
    progress.cut(of)
    for each in words[how]:
        progress.merge(piece, Mark(-1, (each,)))
    gaps = sum(offset - of not in acked for offset in mine if offset >= of)
    assert len(progress.mark(piece).acked) <= gaps
    left = [offset for offset in own if offset not in acked]
    assert progress.reached(piece) == (left[0] if left else first_of(piece, 60))
    again = Done(piece, progress.mark(piece), (), "message")
    assert [offset for offset in range(60) if again.wants(offset, "", "")] == left


def test_what_a_range_says_about_a_slice_by_message() -> None:
    assert own_ranges(Piece(S, 1, 4), [(2, 4), (5, 5), (9, 15), (0, 0)]) == [(2, 5), (6, 15)]


@given(
    key=st.sampled_from(KEYS),
    of=st.sampled_from([1, 2, 4]),
    part=st.integers(0, 3),
    mark=st.integers(-1, 23),
    base=st.integers(0, 20),
    which=st.none() | st.sets(st.integers(0, 23)),
    one_publisher=st.booleans(),
    layered=st.booleans(),
)
def test_a_block_is_chosen_from_as_its_messages_would_be(
    key: Key, of: int, part: int, mark: int, base: int, which, one_publisher: bool, layered: bool
) -> None:
    layers = [Layer(8, tuple((n, Mark(n * 3)) for n in range(0, 8, 2)))] if layered else []
    lent = Done(Piece(S, part % of, of), Mark(mark), layers, key)
    offsets = range(base, 24)
    publishers = "p3" if one_publisher else [MESSAGES[o][0] for o in offsets]
    topics = [MESSAGES[o][1] for o in offsets]
    picks = range(len(offsets)) if which is None else [at for at in range(len(offsets)) if at in which]
    said = ["p3" if one_publisher else MESSAGES[o][0] for o in offsets]
    assert list(lent.chosen(picks, offsets, publishers, topics)) == [
        at for at in picks if lent.wants(offsets[at], said[at], topics[at])
    ]
    listed = list(offsets)
    assert list(lent.chosen(picks, listed, publishers, topics)) == list(lent.chosen(picks, offsets, publishers, topics))


@pytest.mark.parametrize("key", KEYS)
def test_attempts_are_of_a_slice_and_follow_it_through_cuts(key: Key) -> None:
    progress = StreamProgress.starting(S, "c", 0, key)
    progress.cut(2)
    at = next(o for o, message in enumerate(MESSAGES) if part_of(key, 2, o, *message) == 1)
    piece = Piece(S, 1, 2)
    assert progress.note_attempts(piece, [(at, 2)])
    assert not progress.note_attempts(piece, [(at, 1)]), "known already"
    assert progress.attempts == {piece: {at: 2}}
    progress = StreamProgress.from_json(S, progress.to_json(0.0, 1))
    for of in (4, 8, 2, 1):
        progress.cut(of)
        mine = part_of(key, of, at, *MESSAGES[at])
        assert progress.attempts[Piece(S, mine, of)] == {at: 2}
        parts = {piece.part for piece in progress.attempts}
        assert parts == ({mine} if key == "message" else {part for part in range(of) if part % min(of, 2) == mine % 2})
    progress.merge(Piece(S), Mark(at))
    assert progress.note_attempts(Piece(S), [])
    assert progress.attempts == {}
