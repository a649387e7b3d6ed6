"""What a session has lost to retention, and how each policy goes on."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.cursors.cursor import Cursor
from holdfast.cursors.cursor_map import DONE, CursorMap
from holdfast.errors import RequestError
from holdfast.model import Stream
from holdfast.sessions.heads import KeptGenerations
from holdfast.sessions.packed import StoredCursors, pack_cursors, unpack_cursors
from holdfast.sessions.positions import GAPS_MAX
from holdfast.sessions.trimmed import Policy, Trimmed, trimmed, unreadable

LOG = "messages"
POLICIES: list[Policy] = ["error", "earliest", "latest"]
GO_ON: list[Policy] = ["earliest", "latest"]


def at(shard: int, generation: int) -> Stream:
    return Stream(LOG, shard, generation)


def kept(*generations: int) -> KeptGenerations:
    return KeptGenerations.of(at(shard, generation) for generation in generations for shard in range(2))


def decide(
    cursors: StoredCursors, generations: KeptGenerations, policy: Policy, numbers: tuple[int, ...] = (1,)
) -> Trimmed:
    return trimmed(cursors, numbers, generations, policy, LOG, 7.0)


def shown(decision: Trimmed) -> list[tuple[str, int]]:
    return [(gap.stream, gap.first) for gap in decision.gaps]


def away_in(generation: int, *pasts: int) -> StoredCursors:
    cursors = StoredCursors(CursorMap.done_before(generation))
    for shard, past in enumerate(pasts):
        cursors.session.set(at(shard, generation), past)
    return cursors


@pytest.mark.parametrize("policy", POLICIES)
def test_nothing_is_lost_while_everything_unread_is_kept(policy: Policy) -> None:
    cursors = away_in(3, 10, 20)
    assert decide(cursors, kept(3, 4, 5), policy) == (cursors, [], False)
    assert decide(cursors, kept(1, 2, 3), policy) == (cursors, [], False)


@pytest.mark.parametrize("policy", POLICIES)
def test_a_generation_that_was_read_to_its_end_is_no_loss(policy: Policy) -> None:
    cursors = StoredCursors(CursorMap.done_before(4))
    assert decide(cursors, kept(4, 5), policy) == (cursors, [], False)


@pytest.mark.parametrize("policy", POLICIES)
def test_a_generation_that_this_node_has_not_heard_of_is_no_loss(policy: Policy) -> None:
    """Another node stored the row: it had seen more."""
    cursors = away_in(9, 10)
    assert decide(cursors, kept(7, 8), policy) == (cursors, [], False)


@pytest.mark.parametrize("policy", GO_ON)
def test_what_is_gone_is_recorded_and_what_is_there_is_delivered(policy: Policy) -> None:
    decision = decide(away_in(3, 10, 20), kept(5, 6), policy)
    assert not decision.refuse
    assert shown(decision) == [("messages.3.0", 10), ("messages.3.1", 20), ("messages.3.*", 0), ("messages.4.*", 0)]
    for stream in (at(0, 5), at(1, 5), at(0, 6), at(1, 6), at(0, 7)):
        assert decision.cursors.get(1, stream) == 0
    assert decision.cursors.session == CursorMap.done_before(5)


def test_latest_throws_nothing_away_that_is_still_there() -> None:
    cursors = away_in(3, 10, 20)
    cursors.session.set(at(0, 5), 7)
    decision = decide(cursors, kept(5, 6), "latest")
    assert [decision.cursors.get(1, stream) for stream in (at(0, 5), at(1, 5), at(0, 6))] == [7, 0, 0]


def test_error_refuses_every_time_and_moves_nothing() -> None:
    cursors = away_in(3, 10, 20)
    first = decide(cursors, kept(5, 6), "error")
    assert first.refuse and len(first.gaps) == 4
    assert first.cursors.session == cursors.session
    restored = unpack_cursors(pack_cursors(first.cursors), "me")
    second = decide(restored, kept(5, 6), "error")
    assert second.refuse and not second.gaps and len(second.cursors.gaps) == 4


def test_error_is_over_when_the_loss_is_accepted() -> None:
    refused = decide(away_in(3, 10, 20), kept(5, 6), "error")
    accepted = decide(refused.cursors, kept(5, 6), "earliest")
    assert not accepted.refuse and not accepted.gaps and len(accepted.cursors.gaps) == 4
    assert not decide(accepted.cursors, kept(5, 6), "error").refuse


@pytest.mark.parametrize("policy", GO_ON)
def test_a_loss_is_recorded_once(policy: Policy) -> None:
    decision = decide(away_in(3, 10, 20), kept(5, 6), policy)
    assert decide(decision.cursors, kept(5, 6), policy).gaps == []


def test_generations_that_came_and_went_meanwhile_are_one_record() -> None:
    decision = decide(StoredCursors(CursorMap.done_before(3)), kept(700, 701), "earliest")
    assert shown(decision) == [("messages.3-699.*", 0)]


def test_a_hole_in_what_is_kept_is_a_loss() -> None:
    """The lake has old ones, the store has new ones, and nobody has what is between."""
    decision = decide(StoredCursors(CursorMap()), kept(0, 1, 4, 5), "earliest")
    assert shown(decision) == [("messages.2-3.*", 0)]
    assert [decision.cursors.get(1, at(0, g)) for g in range(6)] == [0, 0, DONE, DONE, 0, 0]


def test_shards_that_are_not_named_are_told_apart_from_those_that_are() -> None:
    cursors = StoredCursors(CursorMap.done_before(3))
    cursors.session.set(at(1, 3), 20)
    assert shown(decide(cursors, kept(4), "earliest")) == [("messages.3.1", 20), ("messages.3.*", 0)]


def test_a_stream_behind_in_a_generation_that_is_otherwise_done() -> None:
    cursors = StoredCursors(CursorMap.done_before(6))
    cursors.session.set(at(1, 2), Cursor(4, [(8, 9)]))
    assert shown(decide(cursors, kept(5, 6), "earliest")) == [("messages.2.1", 5)]


def test_only_what_some_subscription_still_wanted_is_lost() -> None:
    cursors = StoredCursors(CursorMap(), {1: CursorMap.done_before(5), 2: CursorMap.done_before(4)})
    assert shown(decide(cursors, kept(5, 6), "error", (1,))) == []
    assert not decide(cursors, kept(5, 6), "error", (1,)).refuse
    assert shown(decide(cursors, kept(5, 6), "error", (1, 2))) == [("messages.4.*", 0)]
    assert shown(decide(cursors, kept(5, 6), "error", (1, 3))) == [("messages.0-4.*", 0)]


@pytest.mark.parametrize("policy", POLICIES)
def test_who_has_no_subscription_has_nothing_to_lose(policy: Policy) -> None:
    assert not decide(StoredCursors(), kept(5, 6), policy, ()).refuse


def test_what_is_gone_leaves_nothing_in_the_cursors() -> None:
    cursors = StoredCursors(CursorMap.done_before(400), {1: CursorMap.done_before(300)})
    for generation in range(1, 300):
        cursors.session.set(at(0, generation), generation)
    decision = decide(cursors, kept(400, 401), "earliest")
    assert decision.cursors.session == CursorMap.done_before(400) and not decision.cursors.own
    assert len(decision.cursors.gaps) <= GAPS_MAX


BAD = RequestError("the cursors of session 'me' cannot be read: the checksum does not match")
ENDS = {at(0, 5): 50, at(1, 5): 51, at(0, 6): 60, at(1, 6): 61}


def test_cursors_that_cannot_be_read() -> None:
    decisions = {policy: unreadable(BAD, ENDS, kept(5, 6), policy, LOG, 7.0) for policy in POLICIES}
    assert decisions["error"].refuse
    earliest = decisions["earliest"]
    assert not earliest.refuse and not earliest.gaps and earliest.cursors.session == CursorMap.done_before(5)
    latest = decisions["latest"]
    assert [latest.cursors.get(1, stream) for stream in ENDS] == [DONE, DONE, 60, 61]
    assert latest.cursors.get(1, at(0, 7)) == 0
    assert [(gap.stream, gap.reason) for gap in latest.gaps] == [("messages.5-6.*", str(BAD))]


@given(
    st.integers(0, 6),
    st.dictionaries(st.tuples(st.integers(0, 1), st.integers(0, 6)), st.integers(0, 4) | st.just(DONE), max_size=6),
    st.sets(st.integers(0, 6), min_size=1),
    st.sampled_from(GO_ON),
)
def test_nothing_that_is_there_and_not_done_is_passed_over_and_every_loss_is_told(
    done_before: int, streams: dict[tuple[int, int], int], generations: set[int], policy: Policy
) -> None:
    cursors = StoredCursors(CursorMap.done_before(done_before))
    for (shard, generation), past in streams.items():
        cursors.session.set(at(shard, generation), past)
    decision = decide(cursors, kept(*generations), policy)
    newest = max(generations)
    lost = False
    for generation in range(8):
        for shard in range(2):
            before, after = cursors.get(1, at(shard, generation)), decision.cursors.get(1, at(shard, generation))
            if generation in generations or generation > newest:
                assert after == before
            else:
                assert after == DONE
                lost = lost or before != DONE
    # A generation that is gone may have had shards that nobody named: that is told, and is no certain loss.
    certain = [gap for gap in decision.gaps if "other shards" not in gap.reason]
    assert decision.gaps if lost else not certain
    assert decide(cursors, kept(*generations), "error").refuse == bool(decision.gaps)
