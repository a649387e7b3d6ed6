"""What is stored of a group, where, and what a view of it says."""

from __future__ import annotations

import pytest
from group_machines import COURSE, GROUP, A, piece, stream

from holdfast.errors import RequestError
from holdfast.groups.progress import StreamProgress
from holdfast.groups.protocol.effects import Save
from holdfast.groups.protocol.nouns import GroupId, Mark, Policy
from holdfast.groups.protocol.view import GroupView, PieceView, StreamHead, lag
from holdfast.groups.record import GroupRecord, expired, loaded, stored
from holdfast.keys import claim_key, progress_key, record_key

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
    assert loaded(GROUP, stream(0), puts[progress_key(GROUP, stream(0))]).floor == 4
    assert stored(Save(GROUP, 7, forget=(stream(1),), delete=True), 9.0)[1][0] == record_key(GROUP)


def test_a_group_expires_when_it_was_idle_for_too_long() -> None:
    idle = GroupRecord(group=GROUP, born="b", idle=True, idle_seconds_max=60.0)
    assert not expired(idle.to_json(100.0), 159.0)
    assert expired(idle.to_json(100.0), 160.0)
    assert not expired(GroupRecord(group=GROUP, born="b", idle_seconds_max=60.0).to_json(100.0), 1e6)
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
