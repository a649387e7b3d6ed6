"""Where a streaming query is: planned alike however often, across generations, within limits."""

from __future__ import annotations

import pytest

from holdfast.errors import RequestError, UnknownStream
from holdfast.log.contract import Head
from holdfast.model import Stream
from holdfast.spark.reading.offsets import Place, advanced, after_missing, beginning, capped, key_of, tidied


def head(generation: int, shard: int, end: int, sealed: bool = False) -> Head:
    return Head(1, Stream("messages", shard, generation), end, 0, None, None, sealed)


def test_a_place_survives_the_checkpoint() -> None:
    place = Place(3, {(4, 0): 120, (4, 11): 98})
    assert Place.from_json(place.to_json()) == place
    with pytest.raises(RequestError, match="another source"):
        Place.from_json({"logOffset": 3})


def test_everything_is_taken_where_nothing_limits() -> None:
    heads = [head(1, 0, 10, True), head(1, 1, 0, True), head(2, 0, 5)]
    assert advanced(beginning(heads, {}), heads) == Place(0, {(1, 0): 10, (2, 0): 5})


def test_a_limit_takes_the_oldest_generation_first_and_its_streams_alike() -> None:
    heads = [head(1, 0, 100, True), head(1, 1, 300, True), head(2, 0, 50)]
    place = advanced(beginning(heads, {}), heads, 40)
    assert place.at == {(1, 0): 10, (1, 1): 30}
    taken = 40
    while (further := advanced(place, heads, 40)) != place:
        taken += sum(further.at.values()) - sum(place.at.values())
        assert (2, 0) not in further.at or further.at[1, 0] + further.at[1, 1] == 400
        place = further
    assert taken == 450


@pytest.mark.parametrize("most", [1, 3, 7])
def test_a_limit_is_used_up(most: int) -> None:
    heads = [head(1, shard, 5) for shard in range(4)]
    assert sum(advanced(beginning(heads, {}), heads, most).at.values()) == most


def test_finished_generations_leave_no_state() -> None:
    heads = [head(1, 0, 10, True), head(1, 1, 0, True), head(2, 0, 5, True), head(3, 0, 0)]
    assert tidied(Place(0, {(1, 0): 10, (2, 0): 4}), heads) == Place(1, {(2, 0): 4})
    assert tidied(Place(0, {(1, 0): 10, (2, 0): 5}), heads) == Place(2, {})
    assert tidied(Place(0, {(1, 0): 9, (2, 0): 5}), heads) == Place(0, {(1, 0): 9, (2, 0): 5})


def test_what_is_gone_is_named() -> None:
    heads = [head(4, 0, 10)]
    with pytest.raises(UnknownStream, match=r"generations 2 to 3 .* trimmed=earliest"):
        after_missing(Place(1, {(2, 0): 5}), heads, "messages", "error")
    assert after_missing(Place(1, {(2, 0): 5, (4, 0): 3}), heads, "messages", "earliest") == Place(3, {(4, 0): 3})
    assert after_missing(Place(3, {}), heads, "messages", "error") == Place(3, {})


def test_a_target_hides_what_came_later() -> None:
    heads = [head(1, 0, 10, True), head(2, 0, 5)]
    seen = capped(heads, {(1, 0): 7})
    assert [(key_of(h), h.next_offset, h.sealed) for h in seen] == [((1, 0), 7, False)]
