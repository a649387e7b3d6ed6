"""Progress through any history of cuts, against a plain set of messages that were done."""

from __future__ import annotations

import pytest
from group_machines import stream
from hypothesis import given
from hypothesis import strategies as st

from holdfast.errors import RequestError
from holdfast.groups.progress import Done, StreamProgress, slice_of
from holdfast.groups.protocol.nouns import Layer, Mark, Piece

S = stream(0)
PUBLISHERS = [f"p{n}" for n in range(9)]
MESSAGES = [PUBLISHERS[(n * 7) % 9] for n in range(24)]

steps = st.lists(
    st.one_of(
        st.tuples(st.just("cut"), st.sampled_from([1, 2, 4, 8])),
        st.tuples(st.just("read"), st.integers(0, 7), st.integers(0, 24), st.integers(0, 2**24 - 1)),
        st.tuples(st.just("late"), st.integers(0, 100)),
        st.tuples(st.just("reload")),
    ),
    max_size=14,
)


def read(progress: StreamProgress, part: int, past: int, which: int, done: set[int]) -> tuple[Piece, Mark]:
    """A member reads a piece up to `past` and acknowledges the messages in the bit set `which`."""
    piece = Piece(S, part % progress.of, progress.of)
    lent = Done(piece, progress.mark(piece), progress.layers)
    cursor = lent.cursor.copy()
    for offset, publisher in enumerate(MESSAGES[:past]):
        if not lent.wants(offset, publisher):
            cursor.ack(offset)
        elif which >> offset & 1:
            cursor.ack(offset)
            done.add(offset)
    return piece, Mark.of_cursor(cursor)


def wanted(progress: StreamProgress) -> set[int]:
    """What readers of all pieces would be given now."""
    found: list[int] = []
    for piece in progress.pieces():
        lent = Done(piece, progress.mark(piece), progress.layers)
        found += [offset for offset, publisher in enumerate(MESSAGES) if lent.wants(offset, publisher)]
    assert len(found) == len(set(found)), "no message is in two pieces"
    return set(found)


@given(steps)
def test_nothing_is_skipped_and_nothing_done_comes_again(history) -> None:
    progress = StreamProgress.starting(S, "c", 0)
    done: set[int] = set()
    said: list[tuple[Piece, Mark]] = []
    for step in history:
        floor = progress.floor
        match step:
            case ("cut", of):
                progress.cut(of)
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


@given(steps)
def test_layers_go_once_everybody_is_beyond_them(history) -> None:
    progress = StreamProgress.starting(S, "c", 0)
    done: set[int] = set()
    for step in history:
        match step:
            case ("cut", of):
                progress.cut(of)
            case ("read", part, past, which):
                progress.merge(*read(progress, part, past, which, done))
    for part in range(progress.of):
        progress.merge(Piece(S, part, progress.of), Mark(len(MESSAGES) - 1))
    assert progress.layers == ()


def test_the_stored_form_is_a_cursor_for_everybody_else() -> None:
    from holdfast.cursors import Cursor

    progress = StreamProgress.starting(S, "c", 3)
    progress.cut(2)
    progress.merge(Piece(S, 0, 2), Mark(9))
    assert Cursor.from_json(progress.to_json(5.0, epoch=4)).offset == 2, "what all slices have done"


@pytest.mark.parametrize(
    "data", [b"", b"[]", b'{"offset":1,"updated_at":1,"slices":3}', b'{"offset":1,"updated_at":1,"layers":[[1]]}']
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
    assert not lent.wants(3, "p0")
    assert lent.wants(3, other)
