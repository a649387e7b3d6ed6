"""The lease client on a line that the test holds the other end of."""

from __future__ import annotations

import queue
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import pytest

from holdfast.batch import BatchClient, MqttLine
from holdfast.batch.line import parse_node
from holdfast.errors import HoldfastError, NodeUnavailable, RequestError
from holdfast.groups.protocol import wire
from holdfast.groups.protocol.messages import (
    Carried,
    FindLeader,
    Invalidate,
    Leased,
    LeaseStreams,
    LeaveGroup,
    LeftGroup,
    RenewStreamLease,
    UpdateStreams,
    UpdateStreamStates,
)
from holdfast.groups.protocol.nouns import Layer, Mark, Piece
from holdfast.groups.settings import MemberSettings
from holdfast.machine import Address
from holdfast.model import Stream

A, B, C = (Piece(Stream("messages", shard, 1)) for shard in range(3))
COURSE = "b.0"
LEADER = Address("n1", "leader", "g:t/#")
QUICK = MemberSettings(
    find_leader_seconds=0.05, find_leader_max_seconds=0.05, ping_seconds=0.05, ping_resend_seconds=0.05,
    progress_seconds=0.01, disconnect_resend_seconds=0.05,
)  # fmt: skip
SECONDS = 5.0

M = TypeVar("M")


class Node:
    """The line, and a node behind it that says what the test says."""

    def __init__(self) -> None:
        self.said: queue.Queue[Any] = queue.Queue()
        self._inbox: queue.Queue[bytes | None] = queue.Queue()
        self.away: HoldfastError | None = None
        self.opened = self.closed = 0

    # -- for the client

    def open(self) -> None:
        self.opened += 1
        if self.away is not None:
            raise self.away

    def send(self, payload: bytes) -> None:
        if self.away is not None:
            raise self.away
        self.said.put(wire.decode(payload))

    def receive(self, seconds: float) -> list[bytes]:
        if self.away is not None:
            raise self.away
        try:
            payload = self._inbox.get(timeout=min(seconds, 0.05))
        except queue.Empty:
            return []
        return [] if payload is None else [payload]

    def wake(self) -> None:
        self._inbox.put(None)

    def close(self) -> None:
        self.closed += 1

    # -- for the test

    def says(self, message: Any) -> None:
        self._inbox.put(wire.encode(message))

    def hears(self, kind: type[M], where: Callable[[M], bool] = lambda _: True) -> M:
        give_up = time.monotonic() + SECONDS
        while True:
            try:
                message = self.said.get(timeout=max(0.01, give_up - time.monotonic()))
            except queue.Empty:
                raise AssertionError(f"no such {kind.__name__}") from None
            if isinstance(message, kind) and where(message):
                return message

    def leases(self, version: int, *leased: Leased, good_for: float = 60.0) -> FindLeader:
        """Wait to be asked, and give it these."""
        asked = self.hears(FindLeader)
        self.says(LeaseStreams(asked.member, 1, LEADER, version, leased, asked.sent_at, good_for))
        return asked

    def renews(self, states: UpdateStreamStates, kept: bool = True) -> None:
        self.says(RenewStreamLease(states.member, 1, states.version, None, states.sent_at, 60.0, kept))


def lent(piece: Piece, mark: Mark | None = None, skip: tuple[Layer, ...] = ()) -> Leased:
    return Leased(piece, COURSE, mark or Mark(), skip)


@pytest.fixture
def node() -> Node:
    return Node()


@pytest.fixture
def client(node: Node) -> Iterator[BatchClient]:
    made = BatchClient(group="g:t/#", client_id="me", line=node, settings=QUICK)
    yield made
    node.away = node.away or NodeUnavailable("the test is over")
    made.close(0.0)
    assert node.closed


def until(true: Callable[[], object]) -> None:
    give_up = time.monotonic() + SECONDS
    while not true():
        assert time.monotonic() < give_up, "it did not happen in time"
        time.sleep(0.005)


def joined(node: Node, client: BatchClient, *leased: Leased) -> None:
    client.open()
    node.leases(1, *leased)
    assert client.join(SECONDS)


def test_it_asks_as_somebody_who_knows_nothing_of_the_group(node: Node, client: BatchClient) -> None:
    client.open()
    assert client.assignment() == (0, {})
    asked = node.hears(FindLeader)
    assert (asked.member.session, asked.born, str(asked.group)) == ("me", "", "g:t/#")
    assert asked.member.incarnation > 1_000_000


def test_an_assignment_is_of_one_version(node: Node, client: BatchClient) -> None:
    layer = Layer(2, ((0, Mark(3)),))
    joined(node, client, lent(A, Mark(4, ((7, 8),))), lent(B, skip=(layer,)))
    version, pieces = client.assignment()
    assert (version, client.version, sorted(pieces)) == (1, 1, [A, B])
    assert pieces[A].mark == Mark(4, ((7, 8),))
    assert [offset for offset in range(10) if pieces[A].done.wants(offset, "x", "t")] == [5, 6, 9]
    assert pieces[B].skip == (layer,)
    client.ack(A, [(5, 5)])
    assert client.assignment().pieces[A].mark == Mark(5, ((7, 8),))


def test_acknowledgements_are_reported(node: Node, client: BatchClient) -> None:
    joined(node, client, lent(A))
    client.ack(A, [(0, 9), (12, 13)])
    states = node.hears(UpdateStreamStates, lambda s: any(r.mark != Mark() for r in s.states))
    assert [(r.piece, r.mark) for r in states.states] == [(A, Mark(9, ((12, 13),)))]


def test_what_is_being_read_is_given_back_at_the_end_of_the_batch(node: Node, client: BatchClient) -> None:
    joined(node, client, lent(A), lent(B), lent(C))
    client.assignment()
    client.drained(still=[A])
    member = node.hears(UpdateStreamStates).member
    node.says(UpdateStreams(member, 1, 1, 2, (lent(C),), 60.0))
    states = node.hears(UpdateStreamStates, lambda s: any(r.final for r in s.old_states))
    assert {r.piece: r.final for r in states.old_states} == {A: False, B: True}
    assert client.assignment() == (2, client.assignment().pieces)
    assert sorted(client.assignment().pieces) == [C]
    client.ack(A, [(0, 99)])
    client.drained()
    final = node.hears(UpdateStreamStates, lambda s: all(r.final for r in s.old_states))
    assert {r.piece: r.mark for r in final.old_states} == {A: Mark(99), B: Mark()}


def test_it_finishes_nothing_beyond_the_leaders_patience(node: Node, client: BatchClient) -> None:
    joined(node, client, lent(A))
    client.assignment()
    member = node.hears(UpdateStreamStates).member
    node.says(UpdateStreams(member, 1, 1, 2, (), 0.1))
    node.hears(UpdateStreamStates, lambda s: bool(s.old_states) and not s.old_states[0].final)
    final = node.hears(UpdateStreamStates, lambda s: bool(s.old_states) and s.old_states[0].final)
    assert final.old_states[0].mark == Mark()
    # The batch was written all the same: a fact, for whoever has the piece now.
    client.ack(A, [(0, 4)])
    client.drained()
    carried = node.hears(UpdateStreamStates, lambda s: bool(s.carried))
    assert carried.carried == (Carried(A, COURSE, Mark(4)),)


def test_facts_are_carried_until_they_are_kept(node: Node, client: BatchClient) -> None:
    client.ack(A, [(3, 5)], COURSE)
    fact = (Carried(A, COURSE, Mark(-1, ((3, 5),))),)
    client.open()
    assert node.leases(1, lent(B)).carried == fact
    states = node.hears(UpdateStreamStates)
    assert states.carried == fact
    node.renews(states, kept=False)
    states = node.hears(UpdateStreamStates, lambda s: s.sent_at > states.sent_at)
    assert states.carried == fact
    client.ack(A, [(6, 6)], COURSE)  # news, which that answer does not confirm
    node.renews(states)
    states = node.hears(UpdateStreamStates, lambda s: s.carried != fact)
    assert states.carried == (Carried(A, COURSE, Mark(-1, ((3, 6),))),)
    node.renews(states)
    node.hears(UpdateStreamStates, lambda s: not s.carried)


def test_a_piece_comes_with_what_was_acknowledged_before(node: Node, client: BatchClient) -> None:
    client.ack(A, [(0, 5)], COURSE)
    client.ack(B, [(0, 5)], "another.0")
    joined(node, client, lent(A), lent(B))
    pieces = client.assignment().pieces
    assert (pieces[A].mark, pieces[B].mark) == (Mark(5), Mark())


def test_a_batch_that_outlives_its_lease_still_counts(node: Node, client: BatchClient) -> None:
    joined(node, client, lent(A))
    client.assignment()
    member = node.hears(UpdateStreamStates).member
    node.says(Invalidate(member))
    node.hears(FindLeader, lambda f: f.member.life == 2)
    assert client.assignment() == (0, {})
    client.ack(A, [(0, 7)])
    client.drained()
    asked = node.hears(FindLeader, lambda f: any(c.mark == Mark(7) for c in f.carried))
    node.says(LeaseStreams(asked.member, 1, LEADER, 2, (lent(A),), asked.sent_at, 60.0))
    assert client.join(SECONDS)
    assert client.assignment().pieces[A].mark == Mark(7)


def test_it_holds_nothing_once_the_lease_is_over(node: Node, client: BatchClient) -> None:
    client.open()
    node.leases(1, lent(A), good_for=0.3)
    assert client.join(SECONDS)
    time.sleep(0.35)
    assert client.assignment() == (0, {})


def test_it_comes_back_by_itself(node: Node, client: BatchClient) -> None:
    joined(node, client, lent(A))
    node.away = NodeUnavailable("the cable is out")
    until(lambda: client.trouble)
    assert client.trouble == "the cable is out"
    assert client.version == 1  # the lease is good for as long as was said
    until(lambda: node.opened > 2)
    node.away = None
    until(lambda: client.trouble is None)
    client.ack(A, [(0, 1)])
    node.hears(UpdateStreamStates, lambda s: any(r.mark == Mark(1) for r in s.states))


def test_it_asks_for_the_very_group_it_was_in(node: Node, client: BatchClient) -> None:
    joined(node, client, lent(A))
    node.says(Invalidate(node.hears(UpdateStreamStates).member))
    assert node.hears(FindLeader, lambda f: f.member.life == 2).born == "b"


def test_a_deleted_group(node: Node, client: BatchClient) -> None:
    joined(node, client, lent(A))
    node.says(Invalidate(node.hears(UpdateStreamStates).member, deleted=True))
    until(lambda: node.closed)
    with pytest.raises(RequestError, match="group g:t/# was deleted"):
        client.assignment()


def test_a_refusal_ends_it(node: Node, client: BatchClient) -> None:
    joined(node, client, lent(A))
    node.away = RequestError("the node refuses what 'me' said: 0x87 not authorized")
    until(lambda: node.closed)
    with pytest.raises(RequestError, match="not authorized"):
        client.assignment()


def test_a_node_that_is_not_there_from_the_first(node: Node, client: BatchClient) -> None:
    node.away = NodeUnavailable("node n1:1883 cannot be reached")
    with pytest.raises(NodeUnavailable, match="cannot be reached"):
        client.join()


def test_closing_gives_everything_back(node: Node, client: BatchClient) -> None:
    joined(node, client, lent(A), lent(B))
    client.assignment()
    client.ack(A, [(0, 3)])
    client.ack(C, [(1, 1)], COURSE)
    closing = threading.Thread(target=client.close)
    closing.start()
    last = node.hears(LeaveGroup)
    assert {c.piece: c.mark for c in last.carried} == {A: Mark(3), B: Mark(), C: Mark(-1, ((1, 1),))}
    assert closing.is_alive()
    node.says(LeftGroup(last.member))
    closing.join(SECONDS)
    assert not closing.is_alive()
    with pytest.raises(RequestError, match="closed"):
        client.assignment()


def test_closing_waits_for_nobody_for_ever(node: Node, client: BatchClient) -> None:
    joined(node, client, lent(A))
    node.away = NodeUnavailable("gone")
    began = time.monotonic()
    client.close(0.2)
    assert time.monotonic() - began < 2


def test_what_the_node_must_not_say_is_let_pass(node: Node, client: BatchClient) -> None:
    joined(node, client, lent(A))
    node._inbox.put(b"nonsense")
    member = node.hears(UpdateStreamStates).member
    node.says(FindLeader(member, LEADER, client.group, "", 0.0))
    node.says(RenewStreamLease(member, 1, 1, None, 0.0, 60.0))
    time.sleep(0.1)
    assert client.version == 1


def test_a_piece_nobody_gave_us(client: BatchClient) -> None:
    with pytest.raises(RequestError, match="of group g:t/# was never assigned to 'me'"):
        client.ack(A, [(0, 1)])


@pytest.mark.parametrize("group", ["", "g", ":t", "g:", "a/b:t", "g:a/#/b"])
def test_groups_that_are_none(group: str) -> None:
    with pytest.raises(RequestError):
        BatchClient(group=group, line=Node())


def test_a_start_that_is_none() -> None:
    with pytest.raises(RequestError, match="'yesterday' is not a start position"):
        BatchClient(group="g:t", start="yesterday", line=Node())


# ------------------------------------------------------------------------------------- the real line


@pytest.mark.parametrize(
    ("text", "parsed"),
    [
        ("localhost:1999", ("localhost", 1999, False)),
        ("mqtt://10.0.0.1", ("10.0.0.1", 1883, False)),
        ("mqtts://broker.example", ("broker.example", 8883, True)),
        ("[::1]:1883", ("::1", 1883, False)),
    ],
)
def test_where_a_node_is(text: str, parsed: tuple[str, int, bool]) -> None:
    assert parse_node(text) == parsed


@pytest.mark.parametrize("text", ["", ":1883", "host:", "host:0", "host:99999", "http://host:1883"])
def test_what_is_no_node(text: str) -> None:
    with pytest.raises(RequestError, match="is no node; write host:port"):
        parse_node(text)


@pytest.mark.parametrize(
    ("answer", "error"),
    [
        (b"HTTP/1.1 400 Bad Request\r\n" + b"x" * 99, "does not speak MQTT 5"),
        (b"", "is lost: it has closed the connection"),
        (b"\x20\x03\x00\x87\x00", "refuses client 'me': 0x87 not authorized"),
        (b"\x20\x03\x00\x88\x00", "refuses client 'me': 0x88 server unavailable"),
        (b"\x20\x03\x00\x00\x00\x90\x04\x00\x01\x00\x87", "leases nothing to 'me': 0x87 not authorized"),
        (b"\x20\x03\x00\x00\x00\xe0\x01\x8e", "another client has connected as 'me'"),
    ],
)
def test_servers_that_will_not_have_us(answer: bytes, error: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            connection, _ = server.accept()
            with connection:
                connection.recv(4096)
                connection.sendall(answer)

        serving = threading.Thread(target=serve)
        serving.start()
        line = MqttLine(f"127.0.0.1:{server.getsockname()[1]}", "g:t/#", "me")
        try:
            with pytest.raises((NodeUnavailable, RequestError), match=error):
                line.open()
        finally:
            line.close()
            serving.join(SECONDS)
