"""Two nodes on one PostgreSQL with members on both: killed, stopped and going in peace, delivery goes on."""

from __future__ import annotations

import os
import signal
import threading
import time

import pytest

from e2e.groups.conftest import LEASE_SECONDS, TIMEOUT_SECONDS
from e2e.groups.members import SECONDS, Connect, Ledger, Member, Publisher, described, settled, streams_of
from node import Node
from processes import wait_for

Pair = tuple[Node, Node]

FLUSH_SECONDS = 1.0 + 0.15 + 0.6
"""Progress is reported, gathered and saved; and a margin for a machine busy with much else."""


def joined(member: Connect, pair: Pair, name: str, leader: int = 0, **how: object) -> tuple[list[Member], list[Member]]:
    """Two members on each node; the one that is asked first leads."""
    group, share = f"g:{name}/#", f"$share/g/{name}/#"
    found: dict[int, list[Member]] = {}
    for n in (leader, 1 - leader):
        found[n] = [member(pair[n], f"{name}-{pair[n].node_id}{k}", share, **how) for k in range(2)]
        if n == leader:
            settled(pair[n], group, ids(found[n]))
    settled(pair[1], group, ids(found[0] + found[1]))
    return found[0], found[1]


def ids(members: list[Member]) -> list[str]:
    return [each.client_id for each in members]


class Flow(threading.Thread):
    """Publishes a little all the time, through one node."""

    def __init__(self, publisher: Publisher, topic: str):
        super().__init__(daemon=True)
        self.publisher, self.topic = publisher, topic
        self.stopping = threading.Event()

    def run(self) -> None:
        while not self.stopping.wait(0.02):
            self.publisher.publish(self.topic, 32)

    def end(self) -> list[str]:
        self.stopping.set()
        self.join(SECONDS)
        return self.publisher.sent


def test_members_on_both_nodes_share_the_messages(running: Pair, member: Connect, ledger: Ledger, name: str) -> None:
    left, right = joined(member, running, name)
    sent: list[str] = []
    for n, node in enumerate(running):
        with Publisher(node.mqtt_port, f"{name}-{n}") as publisher:
            sent += publisher.publish(f"{name}/x", 400)
    ledger.await_acked(sent)
    assert {len(to) for to in ledger.given.values()} == {1}
    assert all(each.got for each in left + right)
    for node in running:  # either can be asked
        wait_for(lambda node=node: described(node, f"g:{name}/#")["lag"] == 0, what="no lag")
        where = {m["session"]: m["node"] for m in described(node, f"g:{name}/#")["members"]}
        assert where == {each.client_id: each.client_id.split("-")[1][:-1] for each in left + right}


@pytest.mark.parametrize("who", ["leader", "other"])
def test_kill_9_of_a_node(running: Pair, member: Connect, ledger: Ledger, name: str, who: str) -> None:
    """The other node's members take everything over, and only the last moment's acknowledgements may be forgotten."""
    dies, stays = running
    left, right = joined(member, running, name, leader=0 if who == "leader" else 1)
    with Publisher(stays.mqtt_port, name) as publisher:
        flow = Flow(publisher, f"{name}/x")
        flow.start()
        wait_for(lambda: all(len(each.got) > 100 for each in left + right), SECONDS, "some flow")
        killed = time.monotonic()
        dies.kill()
        settled(stays, f"g:{name}/#", ids(right))
        seconds = time.monotonic() - killed
        after = publisher.publish(f"{name}/x", 200)
        sent = flow.end()
    ledger.await_acked(sent)
    allowed = (LEASE_SECONDS if who == "leader" else TIMEOUT_SECONDS) + 4
    assert seconds < allowed, f"taken over after {seconds:.1f} s"
    assert {ledger.given[payload][0] for payload in after} <= set(ids(right))
    ledger.check(crashed=ids(left), before=killed - FLUSH_SECONDS)
    dies.start()


@pytest.mark.parametrize("who", ["leader", "other"])
def test_a_node_that_was_stopped_does_not_read_on(
    running: Pair, member: Connect, ledger: Ledger, name: str, who: str
) -> None:
    """SIGSTOP for longer than the lease, SIGCONT: what the others were given meanwhile, its clients never see.

    The stopped node has plenty to send in its memory, and its clients' acknowledgements, which make room for it,
    wait in its sockets when it wakes.
    """
    stops, goes_on = running
    group = f"g:{name}/#"
    left, right = joined(member, running, name, leader=0 if who == "leader" else 1, receive_maximum=20)
    with Publisher(goes_on.mqtt_port, name) as publisher:
        for each in left:
            each.hold = True
        sent = publisher.publish(f"{name}/x", 1600)
        for each in left:
            each.await_got(20)
        os.kill(stops.pid, signal.SIGSTOP)
        try:
            stopped = time.monotonic()
            before = {each.client_id: len(each.got) for each in left}
            settled(goes_on, group, ids(right))
            sent += publisher.publish(f"{name}/x", 200)
            wait_for(lambda: described(goes_on, group)["lag"] == 0, SECONDS, "the others had everything")
            wait_for(lambda: time.monotonic() > stopped + LEASE_SECONDS + 0.5, what="longer than the lease")
            assert set(sent) <= {payload for each in right for payload in each.payloads()} | set(ledger.acked)
            for each in left:
                each.hold = False
                each.ack()
        finally:
            os.kill(stops.pid, signal.SIGCONT)
        settled(goes_on, group, ids(left + right))
        more = publisher.publish(f"{name}/x", 800)
        ledger.await_acked(more)
    old = set(sent)
    for each in left:
        late = [payload for payload in each.payloads()[before[each.client_id] :] if payload in old]
        assert not late, f"{each.client_id} was sent {len(late)} that others had been given: {late[:5]}"
    assert all(len(ledger.given[payload]) == 1 for payload in more)
    assert any(ledger.given[payload][0] in ids(left) for payload in more), "it takes part again"


def test_a_node_that_is_told_to_stop_hands_over(running: Pair, member: Connect, ledger: Ledger, name: str) -> None:
    """SIGTERM: not one acknowledged message comes again, and nobody waits for a lease to end."""
    goes, stays = running
    left, right = joined(member, running, name)
    with Publisher(stays.mqtt_port, name) as publisher:
        flow = Flow(publisher, f"{name}/x")
        flow.start()
        wait_for(lambda: all(len(each.got) > 100 for each in left + right), SECONDS, "some flow")
        assert goes.stop() == 0
        begin = time.monotonic()
        settled(stays, f"g:{name}/#", ids(right))
        seconds = time.monotonic() - begin
        sent = flow.end()
    ledger.await_acked(sent)
    for each in left:
        each.crash()  # acknowledgements of the very last moment may not have been read
    bad = [each for each in ledger.again if each[0] in ledger.acked]
    assert not bad, bad[:5]
    assert seconds < LEASE_SECONDS + 1, f"{seconds:.1f} s"
    goes.start()


def test_streams_go_to_the_member_that_is_left_and_come_back(
    running: Pair, member: Connect, ledger: Ledger, name: str
) -> None:
    """As few move as can: those of the one who goes, and back again."""
    group = f"g:{name}/#"
    left, right = joined(member, running, name)
    before = described(running[1], group)
    left[0].disconnect()
    whole = settled(running[1], group, ids([left[1], *right]))
    for each in (left[1], *right):
        assert streams_of(before, each.client_id) <= streams_of(whole, each.client_id), "only the free ones move"
    member(running[0], left[0].client_id, f"$share/g/{name}/#")
    after = settled(running[1], group, ids(left + right))
    moved = [
        row["stream"]
        for row in after["streams"]
        if row["owner"] not in (left[0].client_id, {r["stream"]: r["owner"] for r in whole["streams"]}[row["stream"]])
    ]
    assert not moved
