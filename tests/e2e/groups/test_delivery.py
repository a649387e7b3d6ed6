"""Each message of a group goes to one member, whatever the members are."""

from __future__ import annotations

import time
from collections import Counter

import pytest

from e2e.clients import V5, V311, Client, Dial
from e2e.conftest import Clients, durable
from e2e.groups.conftest import REVOKE_SECONDS
from e2e.groups.members import SECONDS, Connect, Ledger, Publisher, described, located, settled, streams_of
from node import Node
from processes import wait_for

KINDS = [(V5, False), (V311, False), (V5, True), (V311, True)]


def joined(clients: Clients, node: Node, name: str, share: str, qos: int) -> list[Client]:
    """Members of every kind: both versions, with a session that stays and without."""
    found = []
    for n, (version, stays) in enumerate(KINDS):
        how = durable(version) if stays else {}
        dial = Dial(port=node.mqtt_port, client_id=f"{name}-{n}", version=version, **how)
        client = clients.make("paho", dial).connect()
        assert client.subscribe(share, qos) == qos
        found.append(client)
    return found


def collected(members: list[Client], count: int, seconds: float = SECONDS) -> list[Counter[str]]:
    """What each member was given, once there are `count` in all, and nobody has more to come."""
    found: list[Counter[str]] = [Counter() for _ in members]
    give_up = time.monotonic() + seconds
    while (total := sum(sum(each.values()) for each in found)) < count:
        assert time.monotonic() < give_up, f"{total} of {count} deliveries in {seconds} s"
        for member, mine in zip(members, found, strict=True):
            while not member.messages.empty():
                mine[member.next().text] += 1
        time.sleep(0.005)
    return found


@pytest.mark.parametrize("prefix", ["$share", "$shared", "$shares", "$queue"])
def test_each_message_goes_to_one_member(
    lone: Node, clients: Clients, publisher: Publisher, name: str, prefix: str
) -> None:
    members = joined(clients, lone, name, f"{prefix}/g/{name}/#", 1)
    settled(lone, f"g:{name}/#", [m.dial.client_id for m in members])
    sent = publisher.publish(f"{name}/x", 320)
    found = collected(members, len(sent))
    assert sum(found, Counter()) == Counter(sent)
    assert all(found), f"somebody got nothing: {[len(each) for each in found]}"


@pytest.mark.parametrize("qos", [0, 2])
def test_any_quality_of_service(lone: Node, clients: Clients, name: str, qos: int) -> None:
    members = joined(clients, lone, name, f"$share/g/{name}/#", qos)
    settled(lone, f"g:{name}/#", [m.dial.client_id for m in members])
    sent, publishers = [], []
    for n in range(8):
        dial = Dial(port=lone.mqtt_port, client_id=f"{name}-pub{n}", version=V5)
        publishers.append(clients.make("paho", dial).connect())
    for number in range(5):
        for n, publisher in enumerate(publishers):
            for published in (0, 1, 2):
                sent.append(f"{n}-{number}-{published}")
                publisher.publish(f"{name}/{published}", sent[-1], published)
    found = collected(members, len(sent))
    assert sum(found, Counter()) == Counter(sent)


def test_two_groups_and_a_plain_subscriber_each_get_everything(
    lone: Node, member: Connect, publisher: Publisher, name: str
) -> None:
    plain = member(lone, f"{name}-plain", f"{name}/#")
    ledgers = [Ledger(), Ledger()]
    for n, ledger in enumerate(ledgers):
        for k in range(2):
            each = member(lone, f"{name}-{n}{k}", None)
            each.ledger = ledger
            each.subscribe(f"$share/g{n}/{name}/#")
    for n in range(2):
        settled(lone, f"g{n}:{name}/#", [f"{name}-{n}0", f"{name}-{n}1"])
    sent = publisher.publish(f"{name}/x", 200)
    plain.await_got(len(sent))
    for ledger in ledgers:
        ledger.await_acked(sent)
        assert {len(to) for to in ledger.given.values()} == {1}


def test_one_session_in_two_groups_with_the_same_filter(
    lone: Node, member: Connect, publisher: Publisher, name: str
) -> None:
    both = member(lone, f"{name}-both", f"$share/a/{name}/#")
    both.subscribe(f"$share/b/{name}/#")
    for group in ("a", "b"):
        settled(lone, f"{group}:{name}/#", [f"{name}-both"])
    sent = publisher.publish(f"{name}/x", 64)
    both.await_got(2 * len(sent))
    assert Counter(both.payloads()) == Counter(sent + sent)


def test_a_stream_keeps_its_order(lone: Node, member: Connect, publisher: Publisher, ledger: Ledger, name: str) -> None:
    members = [member(lone, f"{name}-{n}", f"$share/g/{name}/#", key="publisher") for n in range(3)]
    settled(lone, f"g:{name}/#", [m.client_id for m in members])
    sent = publisher.publish(f"{name}/x", 1000)
    ledger.await_acked(sent)
    where = located(lone, f"{name}/#")
    for each in members:
        last: dict[str, int] = {}
        for payload in each.payloads():
            stream, offset = where[payload]
            assert last.get(stream, -1) < offset, f"{payload} came out of order"
            last[stream] = offset


def test_a_member_that_never_acks_holds_up_only_its_own_streams(
    lone: Node, member: Connect, publisher: Publisher, ledger: Ledger, name: str
) -> None:
    group = f"g:{name}/#"
    stuck = member(lone, f"{name}-stuck", f"$share/g/{name}/#", hold=True, key="publisher")
    busy = member(lone, f"{name}-busy", f"$share/g/{name}/#")
    whole = settled(lone, group, [stuck.client_id, busy.client_id])
    its = streams_of(whole, stuck.client_id)
    sent = publisher.publish(f"{name}/x", 320)
    where = located(lone, f"{name}/#")
    others = [payload for payload in sent if where[payload][0] not in its]
    ledger.await_acked(others)
    # Somebody joins: two of the streams the stuck one holds are called back, and come within the deadline.
    third = member(lone, f"{name}-third", f"$share/g/{name}/#")
    called = time.monotonic()
    whole = settled(lone, group, [stuck.client_id, busy.client_id, third.client_id])
    assert time.monotonic() - called < REVOKE_SECONDS + 3, "later than groups.revoke_secs and a little"
    kept = streams_of(whole, stuck.client_id)
    assert kept < its
    ledger.await_acked([payload for payload in sent if where[payload][0] not in kept])
    # What it still holds is nobody else's, and is not sent to it twice either.
    assert {payload for payload in sent if payload not in ledger.acked} <= set(stuck.unacked())
    assert len(stuck.payloads()) == len(set(stuck.payloads()))
    stuck.crash()
    ledger.await_acked(sent)
    ledger.check()


def test_a_quick_unsubscribe_and_subscribe(
    lone: Node, member: Connect, publisher: Publisher, ledger: Ledger, name: str
) -> None:
    """The old borrower drains while the new one begins: nothing is lost, nothing acknowledged comes again."""
    share, group = f"$share/g/{name}/#", f"g:{name}/#"
    quick = member(lone, f"{name}-quick", share)
    other = member(lone, f"{name}-other", share)
    sent: list[str] = []
    for _ in range(8):
        sent += publisher.publish(f"{name}/x", 50)
        quick.hold = not quick.hold  # every other time with deliveries under way
        quick.unsubscribe()
        quick.subscribe(share)
        sent += publisher.publish(f"{name}/x", 50)
        quick.ack()
    quick.hold = False
    quick.ack()
    ledger.await_acked(sent)
    ledger.check()
    settled(lone, group, [quick.client_id, other.client_id])


def test_after_unsubscribing_nothing_more_comes(
    lone: Node, member: Connect, publisher: Publisher, ledger: Ledger, name: str
) -> None:
    share = f"$share/g/{name}/#"
    leaver, stayer = member(lone, f"{name}-leaver", share), member(lone, f"{name}-stayer", share)
    settled(lone, f"g:{name}/#", [leaver.client_id, stayer.client_id])
    ledger.await_acked(publisher.publish(f"{name}/x", 100))
    leaver.unsubscribe()
    before = len(leaver.got)
    begin = time.monotonic()
    sent = publisher.publish(f"{name}/x", 100)
    ledger.await_acked(sent)
    assert time.monotonic() - begin < 3, "an orderly leaver is not waited for"
    assert len(leaver.got) == before
    ledger.check()


@pytest.mark.parametrize("how", ["takeover", "clean start", "kick", "disconnect", "crash"])
def test_the_leader_hears_at_once_of_a_member_that_goes(
    lone: Node, member: Connect, publisher: Publisher, ledger: Ledger, name: str, how: str
) -> None:
    """Long before the ping timeout: the streams are with the other member."""
    share, group = f"$share/g/{name}/#", f"g:{name}/#"
    goes = member(lone, f"{name}-goes", share, durable=True)
    stays = member(lone, f"{name}-stays", share)
    settled(lone, group, [goes.client_id, stays.client_id])
    ledger.await_acked(publisher.publish(f"{name}/x", 64))
    begin = time.monotonic()
    match how:
        case "takeover":  # the newcomer has the same session, and its subscription with it
            taker = member(lone, goes.client_id, None, durable=True)
            assert taker.session_present
        case "clean start":
            member(lone, goes.client_id, None, clean=True)
        case "kick":
            goes._send(0x10, b"")  # a second CONNECT: the server ends it
        case "disconnect":
            goes.disconnect()
        case "crash":
            goes.crash()
    sent = publisher.publish(f"{name}/x", 64)
    ledger.await_acked(sent)
    seconds = time.monotonic() - begin
    assert seconds < 0.9, f"{seconds:.2f} s: that was the ping timeout's doing"
    ledger.check()
    here = [goes.client_id, stays.client_id] if how == "takeover" else [stays.client_id]
    settled(lone, group, here)


def test_a_member_that_comes_back_is_not_counted_twice(
    lone: Node, member: Connect, publisher: Publisher, ledger: Ledger, name: str
) -> None:
    share, group = f"$share/g/{name}/#", f"g:{name}/#"
    stays = member(lone, f"{name}-stays", share, key="publisher")
    comes = member(lone, f"{name}-comes", share, durable=True)
    sent: list[str] = []
    for turn in range(5):
        sent += publisher.publish(f"{name}/x", 40)
        comes.crash() if turn % 2 else comes.disconnect()
        comes = member(lone, comes.client_id, None, durable=True)
        assert comes.session_present
        active = [m["session"] for m in described(lone, group)["members"] if m["status"] == "connected"]
        assert len(active) == len(set(active)), active
    whole = settled(lone, group, [stays.client_id, comes.client_id])
    assert len(whole["members"]) == 2
    assert len(streams_of(whole, comes.client_id)) == 4
    ledger.await_acked(sent)
    ledger.check()


def test_unacknowledged_messages_come_back_once(
    lone: Node, member: Connect, publisher: Publisher, ledger: Ledger, name: str
) -> None:
    """The group redelivers; the session that comes back does not replay them as well."""
    share, group = f"$share/g/{name}/#", f"g:{name}/#"
    first = member(lone, f"{name}-first", share, durable=True, hold=True)
    settled(lone, group, [first.client_id])
    sent = publisher.publish(f"{name}/x", 100)
    first.await_got(len(sent))
    first.ack(sent[::2])
    first.sync()
    first.disconnect()
    again = member(lone, first.client_id, None, durable=True)
    assert again.session_present
    ledger.await_acked(sent)
    wait_for(lambda: described(lone, group)["lag"] == 0, what="no lag")
    assert sorted(again.payloads()) == sorted(sent[1::2])
    ledger.check()
