"""Fan-out on several nodes: a batch anywhere reaches a vehicle anywhere, once, whoever dies in between."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from e2e.cluster.conftest import LATE_SECONDS, LEASE_SECONDS, QUICK
from e2e.fleet import SOCKETS, Vehicle, comes, counts, ended, order, send, show
from node import Node
from processes import wait_for
from servers import PostgresServer

SWEEP_SECONDS = 1.0


@pytest.fixture
def pair(postgres_server: PostgresServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Node, Node]]:
    postgres_server.start()
    url = postgres_server.database()
    settings = {**QUICK, "fanout.sweep_secs": SWEEP_SECONDS}
    with ExitStack() as stack:
        one, two = (
            stack.enter_context(Node(tmp_path_factory.mktemp(name), store=url, node_id=name, settings=settings))
            for name in ("one", "two")
        )
        yield one, two
    while SOCKETS:
        SOCKETS.pop().close()
    postgres_server.drop(url)


def test_a_batch_on_one_node_reaches_vehicles_on_both(pair: tuple[Node, Node]) -> None:
    one, two = pair
    vehicles = [Vehicle((one, two)[n % 2], f"v{n}").subscribe() for n in range(10)]
    send(one, "task_a_1", "x", *(v.vin for v in vehicles))
    for vehicle in vehicles:
        vehicle.ack(vehicle.got())
    comes(two, "task_a_1", acked=10)
    assert show(one, "task_a_1")["counts"] == show(two, "task_a_1")["counts"]
    # More than are merged at once, and campaigns are controlled from wherever one likes.
    send(two, "task_b_1", "y", *(v.vin for v in vehicles), *(f"w{n}" for n in range(100)), campaign={"paused": True})
    order(one, "task_b_1", "resume")
    for vehicle in vehicles:
        sent = vehicle.got()
        assert sent.payload == b"y"
        vehicle.ack(sent)
    comes(one, "task_b_1", acked=10, waiting=100)


def test_a_session_that_moves_gets_it_under_the_same_packet_id(pair: tuple[Node, Node]) -> None:
    one, two = pair
    send(one, "task_a_1", "x", "v1")
    before = Vehicle(one, "v1").subscribe().got()
    moved = Vehicle(two, "v1")  # a takeover: the first connection is still open
    sent = moved.got()
    assert (sent.payload, sent.packet_id, sent.dup) == (b"x", before.packet_id, True)
    moved.ack(sent)
    comes(one, "task_a_1", acked=1)
    assert ended(two, "v1") == [("task_a_1", "acked")]


def test_what_a_dead_node_had_in_flight_goes_on_elsewhere(pair: tuple[Node, Node]) -> None:
    one, two = pair
    vehicles = {f"v{n}": Vehicle(one, f"v{n}").subscribe() for n in range(5)}
    send(two, "task_a_1", "x", *vehicles)
    sent = {vin: vehicle.got() for vin, vehicle in vehicles.items()}
    one.kill()
    assert counts(two, "task_a_1") == {"in_flight": 5}
    again = Vehicle(two, "v0")
    first = again.got()
    assert (first.packet_id, first.dup) == (sent["v0"].packet_id, True)
    again.ack(first)
    # Those that stay away wait again: what they had belongs to nobody.
    wait_for(lambda: counts(two, "task_a_1") == {"acked": 1, "waiting": 4}, LEASE_SECONDS + 2 * LATE_SECONDS)
    order(two, "task_a_1", "cancel")
    comes(two, "task_a_1", acked=1, cancelled=4)


def test_a_node_that_stood_still_past_its_lease_sends_nothing_more(pair: tuple[Node, Node]) -> None:
    one, two = pair
    old = Vehicle(one, "v1").subscribe()
    os.kill(one.pid, signal.SIGSTOP)
    try:
        send(two, "task_a_1", "x", "v1")
        time.sleep(LEASE_SECONDS + 1.0)
        new = Vehicle(two, "v1")
        sent = new.got()
        assert (sent.payload, sent.dup) == (b"x", False)
    finally:
        os.kill(one.pid, signal.SIGCONT)
    new.ack(sent)
    comes(two, "task_a_1", acked=1)
    assert old.raw.ended()[:1] != b"\x32", "its old connection hears good-bye at most"
    new.hears_nothing()


@pytest.mark.parametrize("rounds", [pytest.param(25), pytest.param(1_000, marks=pytest.mark.soak)])
def test_a_batch_here_and_a_return_there_at_the_same_moment(pair: tuple[Node, Node], rounds: int) -> None:
    """Whoever misses the other's news finds it by itself, in no more than a sweep's time."""
    one, two = pair
    slowest = 0.0
    Vehicle(two, "v1").subscribe().gone()
    for n in range(rounds):
        barrier = threading.Barrier(2)

        def batch(n: int = n, barrier: threading.Barrier = barrier) -> None:
            barrier.wait()
            send(one, f"task_a_{n}", f"data {n}", "v1")

        sender = threading.Thread(target=batch)
        sender.start()
        barrier.wait()
        vehicle = Vehicle(two, "v1")
        begin = time.monotonic()
        sent = vehicle.got()
        slowest = max(slowest, time.monotonic() - begin)
        assert sent.payload == f"data {n}".encode()
        vehicle.ack(sent)
        sender.join()
        comes(two, f"task_a_{n}", acked=1)
        vehicle.gone()
    assert slowest < SWEEP_SECONDS + LATE_SECONDS


def test_an_outage_of_the_store_ends_nothing(tmp_path_factory: pytest.TempPathFactory) -> None:
    server = PostgresServer()
    server.start()
    settings = {**QUICK, "fanout.sweep_secs": SWEEP_SECONDS}
    try:
        url = server.database()
        with Node(tmp_path_factory.mktemp("one"), store=url, node_id="one", settings=settings) as node:
            send(node, "task_a_1", "x", "v1", "v2")
            Vehicle(node, "v1").subscribe().got()
            server.stop()
            time.sleep(3 * LEASE_SECONDS)
            assert node.running
            server.start()
            wait_for(node.ready, 30.0, "the node to be ready again")
            for vehicle in (Vehicle(node, "v1"), Vehicle(node, "v2").subscribe()):
                vehicle.ack(vehicle.got())
            comes(node, "task_a_1", acked=2)
            send(node, "task_b_1", "y", *(f"w{n}" for n in range(100)), expires=2)
            comes(node, "task_b_1", expired=100)
    finally:
        server.close()
        while SOCKETS:
            SOCKETS.pop().close()
