"""One connection as a machine: bytes and the time in, effects and one deadline out; no socket anywhere."""

from __future__ import annotations

from math import inf
from typing import Any

import pytest

from holdfast.errors import BrokenInvariant
from holdfast.machine import TICK
from holdfast.mqtt import codec
from holdfast.mqtt import connection as mc
from holdfast.mqtt import packets as p
from holdfast.mqtt.connection import Connection, ConnectionSettings, Hold, State
from holdfast.mqtt.inbound import Inbound
from holdfast.mqtt.reasons import Reason

CONNACK = b"\x20\x03\x00\x00\x00"
PING, PONG = b"\xc0\x00", b"\xd0\x00"


def new(**settings: Any) -> Connection:
    return Connection(ConnectionSettings(**settings), {}, 0.0)


def connect(version: int = 5, **more: Any) -> bytes:
    return codec.encode_connect(p.Connect("c", version, True, 60, **more))


def publish(topic: str = "t", payload: bytes = b"x", qos: int = 1, packet_id: int = 1, **more: Any) -> bytes:
    return codec.encode_publish(p.Publish(topic, payload, qos, packet_id=packet_id if qos else 0, **more), 5)


def opened(version: int = 5, welcome: dict[str, Any] | None = None, **settings: Any) -> Connection:
    machine = new(**settings)
    machine.handle(mc.Received(connect(version)), 0.0)
    machine.handle(mc.Welcome(version, CONNACK, **{"inbound": Inbound(), **(welcome or {})}), 0.0)
    machine.handle(mc.Release(Hold.JOIN), 0.0)
    return machine


def kinds(effects: list[Any]) -> list[str]:
    return [type(effect).__name__ for effect in effects]


def written(effects: list[Any]) -> bytes:
    return b"".join(effect.data for effect in effects if isinstance(effect, mc.Write))


def test_a_connect_is_asked_for_and_nothing_after_it_is_parsed_before_it_is_welcome():
    machine = new()
    (join,) = machine.handle(mc.Received(connect() + PING), 0.0)
    assert isinstance(join, mc.Join) and join.packet.client_id == "c"
    assert machine.state is State.JOINING and machine.holds == {Hold.JOIN}
    assert written(machine.handle(mc.Welcome(5, CONNACK, Inbound()), 0.1)) == CONNACK
    assert written(machine.handle(mc.Release(Hold.JOIN), 0.1)) == PONG


def test_a_packet_in_many_pieces_is_joined_once_however_small_they_are():
    """Five clients that trickle a large CONNECT cost the others nothing: no piece is looked at before it matters."""
    machine = opened(packet_bytes_max=1 << 20)
    packet = publish(payload=b"y" * 200_000)
    for at in range(0, len(packet) - 1, 100):
        assert machine.handle(mc.Received(packet[at : min(at + 100, len(packet) - 1)]), 0.0) == []
        assert len(machine._data) <= 100 or machine._at, "what came so far is not copied again and again"
    (publishes,) = machine.handle(mc.Received(packet[-1:]), 0.0)
    assert publishes.inbox.payloads == [b"y" * 200_000]


@pytest.mark.parametrize("step", [1, 2, 3, 7, 1000])
def test_however_it_is_cut_it_means_the_same(step: int):
    stream = publish("a", b"1") + PING + publish("b", b"2", packet_id=2) + b"\x40\x02\x00\x09" + publish("c", b"3", 0)
    machine = opened()
    effects = [e for at in range(0, len(stream), step) for e in machine.handle(mc.Received(stream[at : at + step]), 0)]
    boxes = [e.inbox for e in effects if isinstance(e, mc.Publishes)]
    assert [topic for box in boxes for topic in box.topics] == ["a", "b", "c"]
    assert [i for e in effects if isinstance(e, mc.Acked) for i in e.packet_ids] == [9]
    assert written(effects) == PONG


def test_what_follows_a_subscribe_waits_for_its_answer():
    """Or a publish of the same chunk would be committed before the subscription begins."""
    subscribe = codec.encode_subscribe(p.Subscribe(7, (p.FilterRequest("t", 1),)), 5)
    machine = opened()
    effects = machine.handle(mc.Received(subscribe + publish()), 0.0)
    assert kinds(effects) == ["Control"] and machine.holds == {Hold.CONTROL}
    suback = codec.encode_suback(p.Suback(7, (1,)), 5)
    effects = machine.handle(mc.Say(suback, Hold.CONTROL), 0.0)
    assert kinds(effects) == ["Publishes", "Write"] and written(effects) == suback


def test_parsing_goes_on_when_the_last_reason_to_hold_is_gone():
    machine = opened()
    machine.handle(mc.HoldOn(Hold.COMMIT), 0.0)
    machine.handle(mc.HoldOn(Hold.RATE), 0.0)
    assert machine.handle(mc.Received(PING), 0.0) == []
    assert written(machine.handle(mc.Release(Hold.COMMIT), 0.0)) == b""
    assert written(machine.handle(mc.Release(Hold.RATE), 0.0)) == PONG
    assert machine.handle(mc.Release(Hold.RATE), 0.0) == [], "released twice is released once"


def test_while_it_is_held_more_than_a_little_waits_in_the_clients_own_buffers():
    machine = opened()
    machine.handle(mc.HoldOn(Hold.CONTROL), 0.0)
    assert machine.handle(mc.Received(b"\xc0\x00" * 100), 0.0) == []
    assert kinds(machine.handle(mc.Received(b"\xc0\x00" * 40_000), 0.0)) == ["PauseReading"]
    effects = machine.handle(mc.Release(Hold.CONTROL), 0.0)
    assert "ResumeReading" not in kinds(effects), "as much waits for its turn"
    while machine.waiting > ConnectionSettings().held_bytes:
        assert "ResumeReading" not in kinds(effects)
        effects = machine.handle(mc.Release(Hold.TURN), 0.0)
    assert kinds(effects)[0] == "ResumeReading"


def test_whether_to_read_is_said_once_and_before_what_may_change_it():
    """The host may answer Publishes with HoldOn at once: a ResumeReading behind them would undo its PauseReading."""
    subscribe = codec.encode(p.Subscribe(7, (p.FilterRequest("a", 1),)), 5)
    machine = opened(held_bytes=100)
    large = publish(payload=b"." * 200)
    effects = machine.handle(mc.Received(large + subscribe), 0.0)
    assert kinds(effects) == ["Publishes", "Control"], "held, but nothing waits"
    assert kinds(machine.handle(mc.HoldOn(Hold.COMMIT), 0.0)) == ["PauseReading"]
    machine.handle(mc.Received(large), 0.0)
    assert machine.handle(mc.Release(Hold.COMMIT), 0.0) == []
    assert kinds(machine.handle(mc.Release(Hold.CONTROL), 0.0)) == ["ResumeReading", "Publishes"]


def test_a_full_batch_stops_reading_at_once_and_its_commit_resumes_it():
    machine = opened()
    assert kinds(machine.handle(mc.HoldOn(Hold.COMMIT), 0.0)) == ["PauseReading"]
    assert kinds(machine.handle(mc.Release(Hold.COMMIT), 0.0)) == ["ResumeReading"]


def test_a_client_that_does_not_read_its_answers_is_asked_nothing_more():
    machine = opened(unread_bytes_max=100)
    machine.handle(mc.SocketFull(True), 0.0)
    effects = machine.handle(mc.Received(PING * 60), 0.0)
    assert "PauseReading" in kinds(effects) and Hold.UNREAD in machine.holds
    assert machine.handle(mc.Received(PING), 0.0) == []
    effects = machine.handle(mc.SocketFull(False), 0.0)
    assert kinds(effects)[0] == "ResumeReading" and written(effects) == PONG


def test_after_its_share_of_a_turn_the_others_come_first():
    machine = opened()
    effects = machine.handle(mc.Received(PING * 600), 0.0)
    assert written(effects) == PONG * 256 and Hold.TURN in machine.holds
    (turn,) = [e for e in effects if isinstance(e, mc.InNextTurn)]
    assert written(machine.handle(turn.event, 0.0)) == PONG * 256


def test_keep_alive_is_one_and_a_half_times_and_every_byte_counts():
    machine = opened(welcome={"keep_alive_seconds": 10.0})
    assert machine.deadline == 15.0
    machine.handle(mc.Received(b"\xc0"), 9.0)
    assert machine.deadline == 24.0
    assert machine.handle(TICK, 20.0) == [], "too early is not an end"
    effects = machine.handle(TICK, 24.0)
    assert written(effects) == codec.encode_disconnect(p.Disconnect(Reason.KEEP_ALIVE_TIMEOUT), 5)
    assert kinds(effects) == ["Write", "Leave", "EndSending"] and machine.state is State.CLOSING


def test_without_a_connect_it_is_cut_off_and_after_its_last_word_too():
    machine = new(connect_seconds=3.0)
    assert machine.deadline == 3.0
    assert kinds(machine.handle(TICK, 3.0)) == ["Abort"]
    machine = opened(linger_seconds=2.0)
    machine.handle(mc.Close(Reason.ADMINISTRATIVE_ACTION), 10.0)
    assert machine.deadline == 12.0 and kinds(machine.handle(TICK, 12.0)) == ["Abort"]
    assert machine.deadline == inf


def test_credentials_that_end_end_the_connection():
    machine = opened(welcome={"expires_at": 30.0, "keep_alive_seconds": 60.0})
    assert machine.deadline == 30.0
    assert written(machine.handle(TICK, 30.0))[2] == Reason.NOT_AUTHORIZED


def test_it_leaves_once_whatever_ends_it_first():
    machine = opened()
    assert kinds(machine.handle(mc.Close(Reason.SESSION_TAKEN_OVER), 0.0)) == ["Write", "Leave", "EndSending"]
    assert machine.handle(mc.Close(Reason.SERVER_BUSY), 0.0) == []
    assert machine.handle(mc.Received(publish()), 0.0) == []
    assert machine.handle(mc.Lost(), 0.0) == [] and machine.state is State.CLOSED
    other = opened()
    (leave,) = other.handle(mc.Lost(), 0.0)
    assert leave == mc.Leave(False, None, "the connection was lost")


def test_a_good_bye_voids_the_will_and_may_change_the_expiry():
    machine = opened(welcome={"session_expiry": 100})
    packet = codec.encode_disconnect(p.Disconnect(0, {"session_expiry": 5}), 5)
    (leave,) = machine.handle(mc.Received(packet), 0.0)
    assert (leave.goodbye, leave.expiry) == (True, 5)
    machine = opened(welcome={"session_expiry": 0})
    effects = machine.handle(mc.Received(packet), 0.0)
    assert written(effects)[2] == Reason.PROTOCOL_ERROR, "a session that ends with it cannot be revived"


def test_the_end_is_kept_from_a_client_that_says_good_bye_until_that_is_stored():
    goodbye = mc.Received(codec.encode_disconnect(p.Disconnect(), 5))
    machine = opened()
    machine.handle(goodbye, 0.0)
    assert machine.handle(mc.GoodbyeStored(), 0.2) == [mc.EndSending()]
    assert machine.handle(mc.GoodbyeStored(), 0.3) == []
    machine = opened()
    machine.handle(goodbye, 0.0)
    assert machine.deadline == 1.0
    assert machine.handle(TICK, 1.0) == [mc.EndSending()], "it does not wait for ever"
    machine = opened()
    machine.handle(goodbye, 0.0)
    assert machine.handle(mc.Ended(), 0.1) == [mc.CloseSocket()], "who does not wait is let go"


def test_what_was_sent_before_the_end_of_the_stream_still_counts():
    machine = opened()
    machine.handle(mc.HoldOn(Hold.CONTROL), 0.0)
    machine.handle(mc.Received(codec.encode_disconnect(p.Disconnect(), 5)), 0.0)
    assert machine.handle(mc.Ended(), 1.0) == [] and machine.keeps_open
    effects = machine.handle(mc.Release(Hold.CONTROL), 2.0)
    assert [e.goodbye for e in effects if isinstance(e, mc.Leave)] == [True]
    assert kinds(effects)[-1] == "CloseSocket"


def test_acknowledgements_of_one_commit_are_one_write_and_say_who_listens():
    machine = opened()
    (publishes,) = machine.handle(mc.Received(publish("a") + publish("b", packet_id=2)), 0.0)
    assert machine.under_way == 2
    assert written(machine.handle(mc.Stored(publishes.inbox, {"a"}), 0.0)) == b"\x40\x02\x00\x01\x40\x03\x00\x02\x10"
    assert machine.under_way == 0


def test_more_publishes_than_the_receive_maximum_end_it():
    machine = opened(receive_maximum=2)
    effects = machine.handle(mc.Received(b"".join(publish(packet_id=n) for n in (1, 2, 3))), 0.0)
    assert written(effects)[2] == Reason.RECEIVE_MAXIMUM_EXCEEDED


def test_qos_2_is_taken_once_however_often_it_is_sent():
    inbound = Inbound()
    machine = opened(welcome={"inbound": inbound})
    (one,) = machine.handle(mc.Received(publish(qos=2, packet_id=5)), 0.0)
    assert isinstance(one, mc.PublishOne) and 5 in inbound
    (again,) = machine.handle(mc.Received(publish(qos=2, packet_id=5, dup=True)), 0.0)
    assert again == mc.AfterCommit(mc.StoredBefore(5)), "not stored again; answered when the first one is durable"
    assert written(machine.handle(mc.StoredOne(2, 5, True), 0.0)) == b"\x50\x02\x00\x05"
    assert written(machine.handle(mc.Received(b"\x62\x02\x00\x05"), 0.0)) == b"\x70\x02\x00\x05"
    assert written(machine.handle(mc.Received(b"\x62\x02\x00\x05"), 0.0)) == b"\x70\x03\x00\x05\x92"


def test_a_packet_id_is_free_once_no_store_knows_it():
    """A client that was told sooner could use it for something new, and a crash would make that look like the old."""
    inbound = Inbound({5: 0}, born="b")
    machine = opened(welcome={"inbound": inbound})
    assert machine.handle(mc.Received(b"\x62\x02\x00\x05"), 0.0) == [mc.FreeId(5)]
    assert 5 in inbound
    assert written(machine.handle(mc.IdFreed(5), 0.0)) == b"\x70\x02\x00\x05"
    assert 5 not in inbound


def test_qos_2_that_could_not_be_stored_may_come_again():
    inbound = Inbound()
    machine = opened(welcome={"inbound": inbound})
    machine.handle(mc.Received(publish(qos=2, packet_id=5)), 0.0)
    effects = machine.handle(mc.StoredOne(2, 5, False), 0.0)
    assert 5 not in inbound and written(effects) == codec.encode_disconnect(p.Disconnect(Reason.SERVER_BUSY), 5)


def test_no_qos_2_is_taken_while_nobody_knows_which_are_stored():
    """One of an earlier connection fails when its client is back already, and is about to send it again."""
    inbound = Inbound()
    inbound.take(5)
    machine = opened(welcome={"inbound": inbound})
    inbound.failed(5)
    assert written(machine.handle(mc.Received(publish(qos=2, packet_id=5, dup=True)), 0.0))[2] == Reason.SERVER_BUSY
    assert 5 not in inbound


def test_rights_that_change_reach_known_topics_and_aliases():
    machine = opened()
    alias = codec.encode_publish(p.Publish("a", b"", 1, packet_id=1, topic_alias=1), 5)
    machine.handle(mc.Received(alias), 0.0)
    machine.handle(mc.RightsChanged(lambda topic: topic != "a", inf), 0.0)
    (refused,) = machine.handle(mc.Received(publish("a", packet_id=2)), 0.0)
    assert refused == mc.AfterCommit(mc.Say(codec.encode(p.Puback(2, Reason.NOT_AUTHORIZED), 5)))
    by_alias = codec.encode_publish(p.Publish("", b"", 1, packet_id=3, topic_alias=1), 5)
    assert written(machine.handle(mc.Received(by_alias), 0.0))[2] == Reason.PROTOCOL_ERROR, "it was never set, as it is"


def test_topics_that_begin_with_a_dollar_go_to_their_handler():
    machine = opened()
    (control,) = machine.handle(mc.Received(publish("$holdfast/x", b"p", 1, 4)), 0.0)
    assert control == mc.PublishControl("$holdfast/x", b"p", 1, 4)
    (answer,) = machine.handle(mc.Answered(1, 4, Reason.TOPIC_NAME_INVALID, "no such thing"), 0.0)
    (packet,) = [codec.decode_for_client(0x40, answer.event.data[2:], 5)]
    assert packet.reason == Reason.TOPIC_NAME_INVALID and packet.properties["reason_string"] == "no such thing"


def test_an_illegal_move_tells_its_story():
    machine = opened()
    machine.handle(mc.Lost(), 0.0)
    with pytest.raises(BrokenInvariant):
        machine._move(State.OPEN)
