"""The campaign's checks notice what they are there for, and pass over what may happen."""

from __future__ import annotations

import pytest

from campaign import checks
from campaign.checks import Logged, Seen
from campaign.history import Event
from campaign.nemesis import KINDS, plan

E = Event


def connected(who: str, at: float = 0.2, conn: int = 1, node: str = "a", *, present: bool = False, **how: object):
    how = {"expiry": 600, **how}
    return [
        E(at, who, "connect", conn=conn, node=node, **how),  # type: ignore[arg-type]
        E(at + 0.1, who, "connack", conn=conn, node=node, code=0, present=present),
    ]


def published(msg: str, at: float, qos: int = 1) -> list[Event]:
    who = msg.split(":")[0]
    return [E(at, who, "send", conn=1, msg=msg, qos=qos, pid=1), E(at + 0.1, who, "acked", conn=1, msg=msg, qos=qos)]


def got(who: str, msg: str, at: float, conn: int = 1, *, acked: bool = True, qos: int = 1, **how: object):
    found = [E(at, who, "got", conn=conn, msg=msg, qos=qos, pid=1, **how)]  # type: ignore[arg-type]
    return [*found, E(at, who, "done", conn=conn, msg=msg, qos=qos, pid=1)] if acked else found


def subscribed(who: str, at: float = 1.2, topic_filter: str = "f/p1") -> list[Event]:
    return [E(at, who, "suback", conn=1, msg=topic_filter, qos=1)]


def goodbye(who: str, at: float, conn: int = 1, *, after: float = 0.1, ok: bool = True) -> list[Event]:
    return [E(at, who, "bye", conn=conn, code=0), E(at + after, who, "closed", conn=conn, ok=ok)]


def dropped(who: str, at: float, conn: int = 1) -> list[Event]:
    return [E(at, who, "drop", conn=conn), E(at, who, "closed", conn=conn)]


def in_log(*payloads: str, topic: str = "f/p1", t: float = 5.0) -> list[Logged]:
    return [Logged("messages.1.0", at, topic, payload, t) for at, payload in enumerate(payloads)]


def fault(kind: str, begin: float, end: float, node: str = "a") -> list[Event]:
    return [E(begin, "nemesis", "fault", msg=kind, node=node), E(end, "nemesis", "healed", msg=kind, node=node)]


def found(check: checks.Check, *events: list[Event], log: list[Logged] = (), sessions=(), end: float = 100.0):  # type: ignore[assignment]
    flat = sorted((event for some in events for event in some), key=lambda event: event.t)
    flat.append(E(end, "run", "end"))
    return checks.faults(Seen(flat, list(log), dict.fromkeys(sessions, False)), [check])


BASE = [*connected("p1"), *connected("s1"), *subscribed("s1")]


def test_what_was_acknowledged_is_stored():
    sent = published("p1:1", 2.0)
    assert not found(checks.stored, BASE, sent, log=in_log("p1:1"))
    assert "is not in the log" in found(checks.stored, BASE, sent)[0]


def test_qos_2_is_stored_once_and_qos_1_as_often_as_it_was_sent():
    assert "2 times" in found(checks.stored, BASE, published("p1:1", 2.0, qos=2), log=in_log("p1:1", "p1:1"))[0]
    again = [E(3.0, "p1", "send", conn=1, msg="p1:1", qos=1, pid=1, dup=True)]
    assert not found(checks.stored, BASE, published("p1:1", 2.0), again, log=in_log("p1:1", "p1:1"))
    assert found(checks.stored, BASE, published("p1:1", 2.0), log=in_log("p1:1", "p1:1"))


def test_a_publishers_order_is_kept_in_the_log():
    sent = [*published("p1:1", 2.0), *published("p1:2", 3.0)]
    assert "first stored after" in found(checks.stored, BASE, sent, log=in_log("p1:2", "p1:1"))[0]
    assert not found(checks.stored, BASE, sent, log=in_log("p1:1", "p1:2"))


def test_a_messages_time_is_when_it_was_stored():
    sent = published("p1:1", 2.0)
    assert not found(checks.timed, BASE, sent, log=in_log("p1:1", t=2.05))
    assert "its time is 3602.00" in found(checks.timed, BASE, sent, log=in_log("p1:1", t=3602.0))[0]


def test_a_subscriber_gets_what_came_after_it_subscribed():
    sent = [*published("p1:1", 0.5), *published("p1:2", 2.0)]
    assert not found(checks.delivered, BASE, sent, got("s1", "p1:2", 3.0))
    assert "never got 1: ['p1:2']" in found(checks.delivered, BASE, sent)[0]


def test_what_was_acknowledged_before_a_good_bye_does_not_come_again():
    once = [*got("s1", "p1:1", 3.0), *goodbye("s1", 4.0), *connected("s1", 5.0, 2, present=True)]
    assert not found(checks.not_again, BASE, once)
    assert "acknowledged and saved" in found(checks.not_again, BASE, once, got("s1", "p1:1", 6.0, 2, dup=True))[0]


def test_a_good_bye_that_nobody_confirmed_promises_nothing_in_a_storm():
    late = [*got("s1", "p1:1", 3.0), *goodbye("s1", 4.0, after=1.1), *connected("s1", 9.0, 2, present=True)]
    storm = fault("store cut", 2.5, 8.0)
    assert not found(checks.not_again, BASE, late, storm, got("s1", "p1:1", 10.0, 2, dup=True))
    assert found(checks.not_again, BASE, late, got("s1", "p1:1", 10.0, 2, dup=True)), "in calm weather it does"


def test_an_end_that_was_not_the_nodes_decision_confirms_nothing():
    one, will = connected("w1", will="w1:1"), in_log("w1:1", topic="w/w1", t=26.0)
    assert found(checks.wills, one, goodbye("w1", 20.0), log=will)
    for kind in ("kill", "clients half-open"):
        assert not found(checks.wills, one, goodbye("w1", 20.0), fault(kind, 15.0, 20.1), log=will)


def test_nothing_comes_twice_on_one_connection():
    assert "twice" in found(checks.not_again, BASE, got("s1", "p1:1", 3.0), got("s1", "p1:1", 3.1))[0]
    assert not found(checks.not_again, BASE, got("s1", "p1:1", 3.0, qos=2), got("s1", "p1:1", 3.1, qos=2, repeat=True))


def test_a_subscriber_sees_a_publishers_order():
    assert found(checks.in_order, BASE, got("s1", "p1:2", 3.0), got("s1", "p1:1", 3.1))
    again = [*got("s1", "p1:1", 3.0), *got("s1", "p1:2", 3.1), *got("s1", "p1:1", 4.0, dup=True)]
    assert not found(checks.in_order, BASE, again)


def test_a_subscription_that_began_between_two_copies_has_the_second_one_late():
    got_late = [*got("s1", "p1:2", 3.0), *got("s1", "p1:1", 3.1)]
    before, after = in_log("p1:1", t=1.0), in_log("p1:1", "p1:2", "p1:1", t=2.0)
    assert not found(checks.in_order, BASE, got_late, log=before + after)
    assert found(checks.in_order, BASE, got_late, log=after)


def test_a_connection_that_was_replaced_is_silent():
    two = connected("s1", 5.0, 2, "b", present=True)
    assert not found(checks.once_connected, BASE, two, got("s1", "p1:1", 5.5))
    assert "replaced" in found(checks.once_connected, BASE, two, got("s1", "p1:1", 7.5))[0]
    storm = fault("pause", 4.0, 12.0)
    assert not found(checks.once_connected, BASE, two, storm, got("s1", "p1:1", 9.5))
    assert found(checks.once_connected, BASE, two, storm, got("s1", "p1:1", 13.0))


W = connected("w1", will="w1:1")


@pytest.mark.parametrize(
    ("how", "count", "right"),
    [
        (goodbye("w1", 20.0), 0, True),
        (goodbye("w1", 20.0), 1, False),
        (dropped("w1", 20.0), 1, True),
        (dropped("w1", 20.0), 0, False),
        (dropped("w1", 20.0), 2, False),
        ([], 0, True),
        ([], 1, False),
    ],
)
def test_wills(how: list[Event], count: int, right: bool):
    log = in_log(*["w1:1"] * count, topic="w/w1", t=20.1)
    assert bool(found(checks.wills, W, how, log=log)) is not right


def test_a_delayed_will_is_withdrawn_by_whoever_is_back_in_time():
    one = connected("w1", will="w1:1", delay=4)
    back = connected("w1", 22.0, 2, present=True, will="w1:2")
    late = connected("w1", 29.0, 2, present=True, will="w1:2")
    will = in_log("w1:1", topic="w/w1", t=24.2)
    assert not found(checks.wills, one, dropped("w1", 20.0), back)
    assert found(checks.wills, one, dropped("w1", 20.0), back, log=will)
    assert not found(checks.wills, one, dropped("w1", 20.0), late, log=will)
    assert found(checks.wills, one, dropped("w1", 20.0), late)
    early = in_log("w1:1", topic="w/w1", t=21.0)
    assert "too early" in found(checks.wills, one, dropped("w1", 20.0), late, log=early)[0]


def test_a_session_lasts_until_its_expiry_and_no_longer():
    one = connected("s1", expiry=4)
    soon, late = connected("s1", 22.0, 2, expiry=4), connected("s1", 30.0, 2, expiry=4)
    heard = got("s1", "p1:1", 19.9)
    assert "no session" in found(checks.lasting, one, heard, goodbye("s1", 20.0), soon)[0]
    soon[1].present = True
    assert not found(checks.lasting, one, heard, goodbye("s1", 20.0), soon)
    assert not found(checks.lasting, one, heard, goodbye("s1", 20.0), late)
    late[1].present = True
    assert "a session" in found(checks.lasting, one, heard, goodbye("s1", 20.0), late)[0]


def test_a_session_whose_client_never_returns_is_gone_in_the_end():
    short, long = connected("s1", expiry=4), connected("s1")
    assert not found(checks.lasting, short, goodbye("s1", 20.0))
    assert "still there" in found(checks.lasting, short, goodbye("s1", 20.0), sessions=["s1"])[0]
    assert "not there" in found(checks.lasting, long, goodbye("s1", 20.0))[0]
    assert not found(checks.lasting, long, goodbye("s1", 20.0), sessions=["s1"])


def test_a_group_gives_each_message_to_one_member():
    members = [*connected("p1"), *connected("g0m0"), *connected("g0m1")]
    members += [*subscribed("g0m0", topic_filter="$share/g0/f/#"), *subscribed("g0m1", topic_filter="$share/g0/f/#")]
    sent, log = published("p1:1", 2.0), in_log("p1:1")
    assert not found(checks.groups, members, sent, got("g0m0", "p1:1", 2.2), log=log)
    assert "no member ever got" in found(checks.groups, members, sent, log=log)[0]
    twice = [*got("g0m0", "p1:1", 2.2, acked=False), *got("g0m1", "p1:1", 2.5)]
    assert "went to g0m0" in found(checks.groups, members, sent, twice, log=log)[0]
    saved = [*got("g0m0", "p1:1", 2.2), *dropped("g0m0", 8.0), *got("g0m1", "p1:1", 8.5)]
    assert "acknowledged and saved" in found(checks.groups, members, sent, saved, log=log)[0]
    lost = [*got("g0m0", "p1:1", 2.2, acked=False), *dropped("g0m0", 3.0), *got("g0m1", "p1:1", 3.5)]
    assert not found(checks.groups, members, sent, lost, log=log)


def test_a_node_that_cannot_acknowledge_says_so():
    blocked = [E(2.0, "probe-a", "send", conn=1, msg="probe-a:1", qos=1, pid=1)]

    def said(t: float, code: int) -> list[Event]:
        return [E(t, "a", "ready", node="a", code=code)]

    probe = connected("probe-a", 1.0)
    assert not found(checks.told_ready, probe, blocked, said(6.0, 200), said(9.0, 503))
    assert not found(checks.told_ready, probe, blocked, said(9.0, 200)), "it may just have recovered"
    assert "acknowledged nothing" in found(checks.told_ready, probe, blocked, said(9.0, 200), said(11.0, 200))[0]


def test_a_plan_is_its_seeds_and_deals_every_kind():
    assert plan(1, 0, 600, etcd=True) == plan(1, 0, 600, etcd=True) != plan(2, 0, 600, etcd=True)
    assert {fault.kind for fault in plan(3, 0, 600, etcd=True)} == {*KINDS, "etcd"}
