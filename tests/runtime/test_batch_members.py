"""Batch members of this node's clients: what they may say, how much of it, and who is who."""

from __future__ import annotations

from typing import Any
from urllib.parse import quote

import pytest

from holdfast.groups.protocol import messages as m
from holdfast.groups.protocol import wire
from holdfast.groups.protocol.nouns import GroupId, Mark, MemberId, Piece
from holdfast.machine import Address
from holdfast.model import Stream
from holdfast.runtime import batch_members as module
from holdfast.runtime.batch_members import PREFIX, SEATS_MAX, BatchMembers, Way

OK, FORMAT_INVALID, QUOTA, TOPIC_INVALID, FILTER_INVALID, FIRST = 0x00, 0x99, 0x97, 0x90, 0x8F, 0x83
G = GroupId("g", "a/#")
S = Stream("messages", 0, 1)
NOWHERE = Address("", "batch")


class Client:
    def __init__(self, client_id: str):
        self.client_id, self.identity = client_id, None
        self.got: list[tuple[str, Any]] = []

    def send_control(self, topic: str, payload: bytes) -> None:
        self.got.append((topic, wire.decode(payload)))

    def way(self, direction: str, group: GroupId = G) -> str:
        return f"{PREFIX}{quote(str(group), safe='')}/{direction}/{quote(self.client_id, safe='')}"


class Bench:
    def __init__(self, places_max: int = 10, enabled: bool = True):
        self.sent: list[tuple[Address, Any]] = []
        self.work: list[Any] = []
        self.members = BatchMembers(
            node_id="n1",
            enabled=enabled,
            places_max=places_max,
            may_subscribe=lambda identity, text: True,
            send=lambda to, message: self.sent.append((to, message)),
            declare=lambda group, start: pytest.fail("not asked for"),
            spawn=self.work.append,
        )

    def connect(self, client_id: str, group: GroupId = G) -> Client:
        client = Client(client_id)
        assert self.members.subscribe(client, client.way("to", group), None, None) == 0
        return client

    def say(self, client: Client, message: Any, group: GroupId = G) -> tuple[int, str]:
        return self.publish(client, client.way("from", group), wire.encode(message))

    def publish(self, client: Client, topic: str, payload: bytes) -> tuple[int, str]:
        """What the PUBACK says, which is decided at once."""
        answers: list[tuple[int, str]] = []
        self.members.publish(
            client, topic, payload, False, lambda reason, why, *, end=False: answers.append((reason, why))
        )
        (answer,) = answers
        return answer


def wanted(client: Client, incarnation: int = 1, number: int = 1, life: int = 1, carried: Any = ()) -> m.FindLeader:
    member = MemberId(client.client_id, incarnation, number, life)
    return m.FindLeader(member, NOWHERE, G, "born", 0.0, tuple(carried))


def states(client: Client, mark: Mark, stream: Stream = S) -> m.UpdateStreamStates:
    report = m.Report(Piece(stream), 1, mark)
    return m.UpdateStreamStates(MemberId(client.client_id), NOWHERE, 1, 1, (report,), 0.0)


def test_what_is_said_goes_on_with_an_address_for_the_answer():
    bench = Bench()
    client = bench.connect("spark")
    assert bench.say(client, wanted(client)) == (OK, "")
    ((to, message),) = bench.sent
    assert to == Address("n1", "registry")
    bench.members.deliver(message.reply_to.name, m.LeftGroup(message.member))
    assert client.got == [(client.way("to"), m.LeftGroup(message.member))]


def test_no_client_id_makes_a_name_that_is_anothers():
    """Client `a` in group `b/g:x` and client `a/b` in group `g:x` were one and the same."""
    bench = Bench()
    one_group, other_group = GroupId("b/g", "x"), GroupId("g", "x")
    assert module._name("a", one_group) != module._name("a/b", other_group)
    one, other = Client("c"), Client("c/g%3A")
    first, second = GroupId("g", "y"), GroupId("z", "y")
    assert bench.members.subscribe(one, one.way("to", first), None, None) == 0
    assert bench.members.subscribe(other, other.way("to", second), None, None) == 0
    bench.members.deliver(module._name("c", first), m.LeftGroup(MemberId("c")))
    assert len(one.got) == 1 and not other.got


def test_a_new_connection_of_the_same_client_takes_its_place_and_the_old_ones_end_changes_nothing():
    bench = Bench()
    old = bench.connect("spark")
    new = bench.connect("spark")
    bench.members.gone(old)
    assert bench.say(old, wanted(old))[0] == FIRST
    assert bench.say(new, wanted(new)) == (OK, "")
    assert not bench.members.unsubscribe(old, old.way("to"))
    assert bench.members.unsubscribe(new, new.way("to")) and not bench.members.unsubscribe(new, new.way("to"))
    bench.members.gone(new)
    assert not bench.members._places and not bench.members._of_client


def test_one_client_listens_to_so_many_groups():
    bench = Bench(places_max=2)
    client = bench.connect("spark")
    assert bench.members.subscribe(client, client.way("to", GroupId("h", "a")), None, None) == 0
    assert bench.members.subscribe(client, client.way("to", GroupId("i", "a")), None, None) == QUOTA
    assert bench.members.subscribe(client, client.way("to"), None, None) == 0, "again is not one more"


def test_one_client_is_not_a_crowd():
    """Two thousand seats for one client left the honest member nothing."""
    bench = Bench()
    client = bench.connect("crowd")
    answers = [bench.say(client, wanted(client, incarnation=n))[0] for n in range(1, 2001)]
    assert answers.count(OK) == SEATS_MAX and answers.count(QUOTA) == 2000 - SEATS_MAX
    assert len(bench.sent) == SEATS_MAX
    again = bench.connect("crowd")
    assert bench.say(again, wanted(again, incarnation=5000))[0] == QUOTA, "a new connection does not help"
    other = bench.connect("honest")
    assert bench.say(other, wanted(other)) == (OK, "")


def test_new_lives_and_later_restarts_are_no_crowd(monkeypatch):
    bench = Bench()
    client = bench.connect("spark")
    now = 0.0
    monkeypatch.setattr(module.time, "monotonic", lambda: now)
    assert all(bench.say(client, wanted(client, life=n))[0] == OK for n in range(1, 100))
    for n in range(2, 40):
        now += module.SEAT_SECONDS / SEATS_MAX + 0.1
        assert bench.say(client, wanted(client, incarnation=n))[0] == OK


def test_too_many_marks_or_ranges_are_refused(monkeypatch):
    monkeypatch.setattr(module, "MARKS_MAX", 3)
    monkeypatch.setattr(module, "RANGES_MAX", 3)
    bench = Bench()
    client = bench.connect("spark")
    carried = [m.Carried(Piece(S), "b.0", Mark(-1)) for _ in range(4)]
    reason, why = bench.say(client, wanted(client, carried=carried))
    assert reason == FORMAT_INVALID and "expected at most 3 marks and 3 ranges, got 4 and 0" in why
    ranges = Mark(-1, tuple((n, n) for n in range(1, 9, 2)))
    assert bench.say(client, wanted(client, carried=[m.Carried(Piece(S), "b.0", ranges)]))[0] == FORMAT_INVALID
    assert bench.sent == []


@pytest.mark.parametrize(
    "payload",
    [
        b'["FindLeader", "", {"member": ["\xff\xfe", 1, 1, 1]}]',
        b"\xff",
        b'["FindLeader", "", {"member": ["\\ud800", 1, 1, 1]}]',
        b"[" * 100_000,
        b"",
    ],
    ids=["in a name", "at once", "half a character", "deep", "empty"],
)
def test_a_payload_that_is_not_text_or_not_a_message_is_refused_with_words(payload):
    bench = Bench()
    client = bench.connect("spark")
    reason, why = bench.publish(client, client.way("from"), payload)
    assert reason == FORMAT_INVALID and why


def test_a_topic_that_is_not_utf8_is_refused_with_words():
    bench = Bench()
    client = bench.connect("spark")
    bad = f"{PREFIX}g%FF:a/from/spark"
    reason, why = bench.publish(client, bad, wire.encode(wanted(client)))
    assert reason == TOPIC_INVALID and "not percent-encoded UTF-8" in why
    assert bench.members.subscribe(client, bad.replace("from", "to"), None, None) == FILTER_INVALID
    with pytest.raises(Exception, match="expected"):
        Way.parse(f"{PREFIX}g%3Aa/sideways/spark")


def test_with_groups_switched_off_everything_is_refused():
    bench = Bench(enabled=False)
    client = Client("spark")
    assert bench.members.subscribe(client, client.way("to"), None, None) == 0x9E
    assert bench.say(client, wanted(client))[0] == 0x83
