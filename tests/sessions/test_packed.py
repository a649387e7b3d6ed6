"""What is packed comes back as it was, in few bytes; damage is named and never more than an error."""

from __future__ import annotations

import timeit

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from holdfast.cursors.cursor import Cursor
from holdfast.cursors.cursor_map import DONE, CursorMap, Progress, past_of
from holdfast.errors import RequestError
from holdfast.model import Stream
from holdfast.sessions.packed import (
    Flight,
    StoredCursors,
    StoredPackets,
    StoredSubscription,
    StoredSubscriptions,
    pack_cursors,
    pack_packets,
    pack_subscriptions,
    unpack_cursors,
    unpack_packets,
    unpack_subscriptions,
)
from holdfast.sessions.positions import GAPS_MAX, Gap

LOG = "messages"
large = st.integers(0, DONE - 1)


def at(shard: int, generation: int) -> Stream:
    return Stream(LOG, shard, generation)


# ---------------------------------------------------------------------------------------------- cursors


@st.composite
def progresses(draw: st.DrawFn) -> Progress:
    floor = draw(large | st.integers(0, 1000) | st.just(DONE))
    cursor = Cursor(floor - 1)
    end = floor
    for gap, length in draw(st.lists(st.tuples(st.integers(1, 300), st.integers(0, 300)), max_size=4)):
        if end + gap + length < DONE:
            cursor.ack_range(end + gap, end + gap + length)
            end += gap + length + 1
    return cursor if cursor.acked else past_of(cursor)


@st.composite
def maps(draw: st.DrawFn) -> CursorMap:
    begins = sorted(draw(st.sets(st.integers(1, 800), max_size=3)))
    found = CursorMap((begin, draw(large | st.just(0) | st.just(DONE))) for begin in (0, *begins))
    streams = st.tuples(st.integers(0, 40), st.integers(0, 800))
    for (shard, generation), progress in draw(st.dictionaries(streams, progresses(), max_size=20)).items():
        found.set(at(shard, generation), progress)
    return found


gaps = st.builds(
    Gap, st.text(max_size=20), large, st.none() | large, st.text(max_size=20), st.floats(0, 4e9, allow_nan=False)
)
stored_cursors = st.builds(
    StoredCursors,
    maps(),
    st.dictionaries(st.integers(1, 1 << 30), maps().filter(lambda own: not own.nothing), max_size=4),
    st.lists(gaps, max_size=5),
)


@given(stored_cursors)
def test_cursors_come_back_as_they_were(cursors: StoredCursors) -> None:
    assert unpack_cursors(pack_cursors(cursors), "me") == cursors


@given(stored_cursors, st.integers(0, 5), st.integers(0, 40), st.integers(0, 800), st.integers(0, 2000))
def test_what_one_subscription_has_done_is_what_all_have_and_what_it_alone_has(
    cursors: StoredCursors, number: int, shard: int, generation: int, offset: int
) -> None:
    stream = at(shard, generation)
    own = cursors.own.get(number)
    wanted = cursors.session.is_done(stream, offset) or (own is not None and own.is_done(stream, offset))
    assert cursors.cursor(number, stream).is_acked(offset) == wanted


def idle(generations: int, shards: int) -> StoredCursors:
    """Everything read; it stands in the open generation."""
    found = StoredCursors(CursorMap.done_before(generations))
    for shard in range(shards):
        found.session.set(at(shard, generations), 1_000_000 + 2_711 * shard % 5_000)
    return found


def test_an_idle_session_takes_tens_of_bytes_however_many_generations_there_are() -> None:
    assert len(pack_cursors(idle(720, 16))) <= 80
    assert len(pack_cursors(StoredCursors(CursorMap.done_before(720)))) <= 20
    assert len(pack_cursors(idle(1, 16))) <= 80


def test_one_stream_behind_among_720_generations_is_a_few_bytes_more() -> None:
    cursors = idle(720, 16)
    before = len(pack_cursors(cursors))
    cursors.session.set(at(3, 17), 1_234_567)
    assert len(pack_cursors(cursors)) <= before + 12


def test_acknowledged_out_of_order_is_kept_exactly() -> None:
    cursors = StoredCursors(CursorMap.done_before(3))
    cursor = Cursor(9, [(12, 14), (20, 20)])
    cursors.session.set(at(0, 3), cursor)
    assert unpack_cursors(pack_cursors(cursors), "me").cursor(1, at(0, 3)) == cursor


def test_a_subscription_that_starts_anew_owes_nothing_to_what_it_had_before() -> None:
    """It has a new number: whatever is still said of the old one does not concern it."""
    cursors = StoredCursors(CursorMap(), {1: CursorMap.done_before(5), 2: CursorMap.done_before(5)})
    found = unpack_cursors(pack_cursors(cursors), "me")
    assert found.get(2, at(0, 1)) == DONE
    assert found.get(3, at(0, 1)) == 0


def test_going_back_for_one_subscription_keeps_what_the_other_has_not_acknowledged() -> None:
    other = CursorMap()
    other.set(at(0, 1), Cursor(6, [(8, 49)]))  # 7 is in flight
    cursors = StoredCursors(CursorMap(), {1: other})
    cursors.session.set(at(0, 1), 20)  # the second one has read again so far, and 7 is still in flight
    cursors.session.set(at(0, 1), Cursor(6, [(8, 19)]))
    found = unpack_cursors(pack_cursors(cursors), "me")
    assert not found.cursor(1, at(0, 1)).is_acked(7) and found.cursor(1, at(0, 1)).is_acked(49)
    assert not found.cursor(2, at(0, 1)).is_acked(7) and not found.cursor(2, at(0, 1)).is_acked(20)


def test_five_thousand_filters_that_began_together_say_it_once() -> None:
    began = CursorMap.done_before(700)
    cursors = StoredCursors(CursorMap.done_before(5), dict.fromkeys(range(1, 5001), began))
    data = pack_cursors(cursors)
    assert len(data) < 5100
    found = unpack_cursors(data, "me")
    assert found == cursors and len({id(own) for own in found.own.values()}) == 1


def test_the_newest_records_of_what_was_skipped_are_kept() -> None:
    cursors = StoredCursors()
    many = [Gap(f"{LOG}.{n}.0", n, None, "dropped by retention", 1.5) for n in range(GAPS_MAX + 20)]
    assert cursors.note(many) == many
    assert cursors.note(many[-3:]) == []
    assert unpack_cursors(pack_cursors(cursors), "me").gaps == many[20:]


# ---------------------------------------------------------------------------------------------- packets

streams = st.builds(at, st.integers(0, 40), st.integers(0, 800))
flights = st.one_of(
    st.builds(Flight, st.integers(1, 65_535), st.integers(1, 2), streams, large, st.integers(0, 9), st.just("")),
    st.builds(
        Flight, st.integers(1, 65_535), st.integers(1, 2), st.none(), st.just(0), st.just(0), st.text(max_size=9)
    ),
    st.builds(Flight, st.integers(1, 65_535), st.just(3), st.none(), st.just(0), st.just(0), st.just("")),
)
stored_packets = st.builds(
    StoredPackets, st.lists(flights, unique_by=lambda f: f.packet_id, max_size=30), st.integers(0, 65_535)
)


@given(stored_packets)
def test_packets_come_back_as_they_were_and_in_their_order(packets: StoredPackets) -> None:
    assert unpack_packets(pack_packets(packets), "me", LOG) == packets


def test_nothing_in_flight_is_nothing() -> None:
    assert pack_packets(StoredPackets()) == b""
    assert unpack_packets(b"", "me", LOG) == StoredPackets()


def test_a_hundred_of_one_stream_take_two_bytes_each() -> None:
    packets = StoredPackets([Flight(i + 1, 1, at(3, 700), 5_000_000 + i) for i in range(100)], 100)
    assert len(pack_packets(packets)) <= 240


def test_a_packet_id_twice_is_damage() -> None:
    with pytest.raises(RequestError, match=r"'me'.*given twice"):
        unpack_packets(pack_packets(StoredPackets([Flight(1, 3), Flight(1, 3)])), "me", LOG)


# ---------------------------------------------------------------------------------------- subscriptions

subscriptions = st.builds(
    StoredSubscription,
    filter=st.text(min_size=1, max_size=30),
    qos=st.integers(0, 2),
    no_local=st.booleans(),
    retain_as_published=st.booleans(),
    retain_handling=st.integers(0, 2),
    identifier=st.integers(0, 268_435_455),
    number=st.integers(0, 1000),
    born=st.text(max_size=10),
)


@given(st.lists(subscriptions, max_size=10))
def test_subscriptions_come_back_as_they_were(entries: list[StoredSubscription]) -> None:
    stored = StoredSubscriptions(entries, 1001)
    assert unpack_subscriptions(pack_subscriptions(stored), "me") == stored


# ----------------------------------------------------------------------------------------------- damage

VALUES = {
    "cursors": (pack_cursors(idle(720, 16)), lambda data: unpack_cursors(data, "van 7")),
    "packets": (
        pack_packets(StoredPackets([Flight(5, 1, at(0, 3), 7), Flight(6, 3)], 6)),
        lambda data: unpack_packets(data, "van 7", LOG),
    ),
    "subscriptions": (
        pack_subscriptions(StoredSubscriptions([StoredSubscription("a/#", 1, number=1)], 2)),
        lambda data: unpack_subscriptions(data, "van 7"),
    ),
}


@pytest.mark.parametrize("what", VALUES)
def test_every_flipped_bit_and_every_cut_is_an_error_that_names_the_client(what: str) -> None:
    data, unpack = VALUES[what]
    damaged = [data[:cut] for cut in range(1, len(data))]
    damaged += [bytes((*data[:i], data[i] ^ 1 << bit, *data[i + 1 :])) for i in range(len(data)) for bit in range(8)]
    for each in damaged:
        with pytest.raises(RequestError, match=rf"the {what}.* of session 'van 7' cannot be read"):
            unpack(each)


@pytest.mark.parametrize("what", VALUES)
@given(data=st.binary(min_size=1, max_size=60))
@example(data=b"\x02")
def test_any_bytes_are_an_error(what: str, data: bytes) -> None:
    with pytest.raises(RequestError, match="van 7"):
        VALUES[what][1](data)


numbers = st.lists(st.none() | st.integers(-(2**63), 2**64 - 1) | st.integers(-3, 20), max_size=20)


@given(numbers)
@example([1, 0, 0, 1, 0, 1 << 62])
def test_any_numbers_under_a_right_checksum_are_cursors_or_an_error(ints: list[int | None]) -> None:
    from holdfast.sessions.packed import _framed

    try:
        found = unpack_cursors(_framed(b"c", (ints, [], [])), "me")
    except RequestError as error:
        assert "'me'" in str(error)
    else:
        assert unpack_cursors(pack_cursors(found), "me") == found


@given(st.lists(st.integers(-(2**63), 2**63) | st.integers(-3, 20), max_size=20))
def test_any_numbers_under_a_right_checksum_are_packets_or_an_error(ints: list[int]) -> None:
    from holdfast.sessions.packed import _framed

    try:
        found = unpack_packets(_framed(b"p", (7, ints)), "me", LOG)
    except RequestError as error:
        assert "'me'" in str(error)
    else:
        assert unpack_packets(pack_packets(found), "me", LOG) == found


def test_one_value_is_not_taken_for_another() -> None:
    with pytest.raises(RequestError, match="checksum"):
        unpack_packets(VALUES["cursors"][0], "me", LOG)


# ------------------------------------------------------------------------------------------------ speed


def test_packing_and_unpacking_a_typical_session_is_a_matter_of_microseconds() -> None:
    """Bounds are several times what it takes, for machines that are busy; `timeit` takes the best."""
    cursors = idle(720, 16)
    for shard in (2, 9):
        floor = cursors.session.past(at(shard, 720))
        cursors.session.set(at(shard, 720), Cursor(floor - 1, [(floor + 3, floor + 5), (floor + 8, floor + 8)]))
    data = pack_cursors(cursors)
    assert min(timeit.repeat(lambda: pack_cursors(cursors), number=200, repeat=9)) / 200 < 60e-6
    assert min(timeit.repeat(lambda: unpack_cursors(data, "me"), number=200, repeat=9)) / 200 < 200e-6
