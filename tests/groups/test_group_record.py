"""What is stored of a group, where, and what a view of it says."""

from __future__ import annotations

from dataclasses import replace

import pytest
from group_machines import COURSE, GROUP, A, piece, stream

from holdfast.errors import RequestError
from holdfast.groups.progress import StreamProgress
from holdfast.groups.protocol.effects import Save
from holdfast.groups.protocol.nouns import GroupId, Mark, Piece, Policy
from holdfast.groups.protocol.view import GroupView, PieceView, StreamHead, lag
from holdfast.groups.record import GroupRecord, expired, in_batches, load_progress, stored
from holdfast.keys import claim_key, progress_key, record_key
from holdfast.metadata.contract import VALUE_BYTES_MAX

RECORD = GroupRecord(
    group=GROUP,
    born="b",
    order="parallel",
    turn=2,
    starts={stream(0): 5},
    paused=True,
    lent=True,
    policy=Policy(1.5, 3),
    idle_seconds_max=60.0,
    answered=("r1",),
)


def test_a_record_comes_back_as_it_was_stored() -> None:
    assert GroupRecord.from_json(RECORD.to_json(12.0)) == RECORD
    assert RECORD.course == "b.2"


@pytest.mark.parametrize("data", [b"", b"{}", b"[]", b'{"name": "g"}'])
def test_a_damaged_record_is_named(data: bytes) -> None:
    with pytest.raises(RequestError):
        GroupRecord.from_json(data)


def test_groups_do_not_share_keys() -> None:
    groups = [GroupId("a", "b/c"), GroupId("a", "b%2Fc"), GroupId("a:b", "c"), GroupId("a", "b:c")]
    for key in (record_key, claim_key, lambda group: progress_key(group, stream(0))):
        assert len({key(group) for group in groups}) == len(groups)


def test_a_save_as_keys() -> None:
    progress = StreamProgress.starting(stream(0), COURSE, 4)
    puts, deletes = stored(Save(GROUP, 7, RECORD, (progress,), (stream(1),)), 9.0)
    assert list(puts) == [record_key(GROUP), progress_key(GROUP, stream(0))]
    assert deletes == [progress_key(GROUP, stream(1))]
    assert load_progress(GROUP, stream(0), puts.get).floor == 4
    assert load_progress(GROUP, stream(1), puts.get) is None
    assert stored(Save(GROUP, 7, forget=(stream(1),), delete=True), 9.0)[1][0] == record_key(GROUP)


def test_progress_of_any_size_can_be_stored() -> None:
    # Members that acknowledge every other message, in a stream that was cut twice.
    progress = StreamProgress.starting(stream(0), COURSE, 0)
    progress.cut(4)
    far = 10**17
    for part in range(4):
        progress.merge(Piece(stream(0), part, 4), Mark(9, tuple((far + n, far + n) for n in range(0, 40_000, 2))))
    progress.cut(2)
    progress.merge(Piece(stream(0), 1, 2), Mark(9, tuple((far + n, far + n) for n in range(0, 40_000, 2))))
    progress.note_attempts(Piece(stream(0), 0, 2), ((far + n, 2) for n in range(1, 40_000, 2)))
    puts, _ = stored(Save(GROUP, 7, None, (progress,)), 9.0)
    assert len(puts) > 5
    assert max(map(len, puts.values())) <= VALUE_BYTES_MAX
    for batch in in_batches(puts, (), 128):
        assert sum(len(value or b"") for _, value in batch) <= VALUE_BYTES_MAX
    found = load_progress(GROUP, stream(0), puts.get)
    assert found.parts == len(puts)
    assert found.cursors == progress.cursors
    assert sorted(found.layers) == sorted(progress.layers)
    assert found.attempts == progress.attempts
    # Smaller again: what it no longer needs goes; and all of it when the stream is dropped.
    small = StreamProgress.starting(stream(0), COURSE, far)
    small.parts = found.parts
    again, gone = stored(Save(GROUP, 7, None, (small,)), 9.0)
    assert {*again, *gone} == set(puts)
    _, gone = stored(Save(GROUP, 7, forget=(stream(0),), parts=((stream(0), found.parts),)), 9.0)
    assert set(gone) == set(puts)


def test_a_group_expires_when_it_was_idle_for_too_long() -> None:
    idle = GroupRecord(group=GROUP, born="b", idle=True, idle_seconds_max=60.0)
    assert not expired(idle.to_json(100.0), 159.0)
    assert expired(idle.to_json(100.0), 160.0)
    declared = GroupRecord(group=GROUP, born="b", idle_seconds_max=60.0)
    assert expired(declared.to_json(100.0), 160.0), "nobody ever came"
    assert not expired(replace(declared, idle=False).to_json(100.0), 1e6)
    assert not expired(GroupRecord(group=GROUP, born="b", idle=True).to_json(100.0), 1e6)


def test_lag_has_an_owner() -> None:
    rows = (PieceView(piece(0), A, "granted", Mark(3, ((5, 6),))), PieceView(piece(1), None, "free", Mark(9)))
    view = GroupView(GROUP, 1, "b", COURSE, "strict", False, (), rows, 0)
    second = 1_000_000
    heads = {
        stream(0): StreamHead(10, oldest_unacked=40 * second, dropped_at=100 * second),
        stream(1): StreamHead(10),
    }
    worst, caught_up = lag(view, heads, 60 * second)
    assert (worst.piece, worst.owner, worst.messages) == (piece(0), A, 4)
    assert (worst.seconds, worst.seconds_to_retention) == (20.0, 40.0)
    assert (caught_up.messages, caught_up.seconds, caught_up.owner) == (0, 0.0, None)
