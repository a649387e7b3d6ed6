"""What a group has to lend: streams of the store and of the lake, and what is lost when both have dropped one."""

from __future__ import annotations

from group_machines import leader

from holdfast.groups.leading.streams import GroupStreams
from holdfast.groups.leading.unsaved import Unsaved
from holdfast.groups.protocol.effects import Skipped, Trimmed
from holdfast.groups.protocol.events import StreamInfo, StreamsSeen
from holdfast.groups.protocol.nouns import GroupId, Mark, Piece
from holdfast.groups.record import GroupRecord
from holdfast.groups.settings import LeaderSettings
from holdfast.keys import claim_key, progress_key, record_key, skipped_key
from holdfast.metadata.contract import KEY_BYTES_MAX
from holdfast.model import Stream

G = GroupId("g", "a/#")


def s(generation: int, shard: int = 0) -> Stream:
    return Stream("messages", shard, generation)


def streams(*infos: StreamInfo, **given: object) -> GroupStreams:
    made = GroupStreams(Unsaved(G, 1, LeaderSettings()))
    made.load(GroupRecord(group=G, born="b", **given), ())  # type: ignore[arg-type]
    made.see(infos)
    return made


def test_a_stream_that_only_the_lake_has_is_lent_like_any_other():
    made = streams(StreamInfo(s(1), 5, 5, True), StreamInfo(s(2)))
    assert made.open_streams("strict", "publisher") == [s(1)]
    made.merge(Piece(s(1)), "b.0", Mark(4))
    assert made.open_streams("strict", "publisher") == [s(2)]


def test_a_stream_that_moves_to_the_lake_keeps_its_progress_and_nothing_is_lost():
    made = streams(StreamInfo(s(1), 5), StreamInfo(s(2)))
    made.merge(Piece(s(1)), "b.0", Mark(2))
    assert made.see([StreamInfo(s(1), 5, 5, True), StreamInfo(s(2))]) == ()
    made.sweep(set())
    assert made.progress[s(1)].floor == 3 and s(1) in (made.seen or {})


def test_what_was_not_read_of_a_dropped_stream_is_named_once():
    made = streams(StreamInfo(s(1), 5), StreamInfo(s(1, 1), 7), StreamInfo(s(2)))
    made.merge(Piece(s(1)), "b.0", Mark(4))
    made.merge(Piece(s(1, 1)), "b.0", Mark(2))
    assert made.see([StreamInfo(s(2))]) == (Skipped(s(1, 1), 3, 7),)
    made.sweep(set())
    assert made.see([StreamInfo(s(2))]) == ()


def test_a_finished_generation_in_the_lake_is_left_behind_and_its_progress_forgotten():
    made = streams(StreamInfo(s(1), 5, 5, True), StreamInfo(s(2), 3, 3, True), StreamInfo(s(3)))
    made.merge(Piece(s(1)), "b.0", Mark(4))
    made.sweep(set())
    assert made.from_generation == 2 and s(1) in made._unsaved._forget and s(1) not in made.progress
    made.merge(Piece(s(2)), "b.0", Mark(2))
    made.sweep({s(2)})
    assert made.from_generation == 2, "while it is lent, more may be said about it"
    made.sweep(set())
    assert made.from_generation == 3
    assert made.see([StreamInfo(s(1), 5, 5, True), StreamInfo(s(2), 3, 3, True), StreamInfo(s(3))]) == ()
    assert set(made.seen or {}) == {s(3)}


def test_a_finished_generation_in_the_store_is_kept():
    made = streams(StreamInfo(s(1), 5), StreamInfo(s(2)))
    made.merge(Piece(s(1)), "b.0", Mark(4))
    made.sweep(set())
    assert made.from_generation == 0 and s(1) in made.progress


def test_a_group_that_began_later_has_nothing_to_do_with_the_lake():
    made = streams(StreamInfo(s(1), 5, 5, True), StreamInfo(s(2)), from_generation=2)
    assert set(made.seen or {}) == {s(2)}


def test_a_seek_back_finds_what_was_left_behind():
    made = streams(StreamInfo(s(1), 5, 5, True), StreamInfo(s(2)), from_generation=2)
    made.start_over(GroupRecord(group=G, born="b", from_generation=2).turned({}))
    assert set(made.seen or {}) == {s(1), s(2)} and made.progress[s(1)].floor == 0


def test_a_leader_names_what_was_lost_even_while_it_is_not_trusted():
    machine = leader(1, infos=[StreamInfo(s(1), 5), StreamInfo(s(2))])
    seen = StreamsSeen((StreamInfo(s(2)),))
    (effect,) = [e for e in machine.handle(seen, machine._trusted_until + 1) if isinstance(e, Trimmed)]
    assert effect.skipped == (Skipped(s(1), 0, 5),)


def test_keys_are_short_whatever_the_name_and_no_two_names_share_one():
    names = [
        G,
        GroupId("g" * 256, "/".join(["ü" * 30] * 2000)),
        GroupId("g" * 256, "/".join(["ü" * 30] * 2000) + "x"),
        GroupId("g", "a" * 193),
        GroupId("g", "a" * 300),
    ]
    stolen = record_key(names[1]).split("/")[3].replace("%2F", "/").replace("%25", "%")
    names.append(GroupId.parse(stolen))
    for key in (record_key, claim_key, skipped_key, lambda group: progress_key(group, Stream("m" * 128, 4095, 10**9))):
        keys = [key(name) for name in names]
        assert len(set(keys)) == len(names), keys
        assert all(len(each.encode()) <= KEY_BYTES_MAX for each in keys), max(len(k.encode()) for k in keys)
