"""Nodes for the groups' tests: one on SQLite, and two that share a PostgreSQL."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from e2e.groups.members import Connect, Ledger, Member, Publisher
from node import Node
from servers import PostgresServer

LEASE_SECONDS, TIMEOUT_SECONDS, REVOKE_SECONDS = 3.0, 2.0, 5.0
"""Shorter than the defaults, but longer than a machine with two workers' tests stands still now and then: who is late
by that much has its messages given to others, and rightly so."""

QUICK: dict[str, Any] = {
    "groups.lease_secs": LEASE_SECONDS,
    "groups.ping_secs": 0.3,
    "groups.ping_timeout_secs": TIMEOUT_SECONDS,
    "groups.revoke_secs": REVOKE_SECONDS,
    "log.shards": 8,
    "log.upkeep_secs": 0.5,
    "cursors.subscription_progress_flush_secs": 0.2,
}


@pytest.fixture(scope="session")
def lone(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Node]:
    """A node by itself on SQLite, with eight streams; nobody seals its log."""
    with Node(tmp_path_factory.mktemp("lone"), settings=QUICK) as running:
        yield running


@pytest.fixture(scope="session")
def few(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Node]:
    """A node with two streams, whose log may be sealed."""
    with Node(tmp_path_factory.mktemp("few"), settings={**QUICK, "log.shards": 2}) as running:
        yield running


@pytest.fixture(scope="session")
def pair(postgres_server: PostgresServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Node, Node]]:
    """Two nodes on one PostgreSQL; a test that stops one starts it again."""
    postgres_server.start()
    url = postgres_server.database()
    with ExitStack() as stack:
        nodes = [
            stack.enter_context(Node(tmp_path_factory.mktemp(name), store=url, node_id=name, settings=QUICK))
            for name in ("left", "right")
        ]
        yield nodes[0], nodes[1]
    postgres_server.drop(url)


@pytest.fixture
def running(pair: tuple[Node, Node]) -> tuple[Node, Node]:
    """Both of the pair, up."""
    for node in pair:
        if not node.running:
            node.start()
    return pair


@pytest.fixture
def ledger() -> Ledger:
    return Ledger()


@pytest.fixture
def member(ledger: Ledger) -> Iterator[Connect]:
    """`member(node, client_id, share, **how)`: a member noted in the test's ledger, gone after the test."""
    made: list[Member] = []

    def connect(node: Node, client_id: str, share: str | None, **how: Any) -> Member:
        made.append(Member(node.mqtt_port, client_id, share, ledger, **how))
        return made[-1]

    yield connect
    for each in made:
        each.close()


@pytest.fixture
def publisher(request: pytest.FixtureRequest, name: str) -> Iterator[Publisher]:
    """On the lone node; a test with a node of its own makes its own."""
    with Publisher(request.getfixturevalue("lone").mqtt_port, name) as made:
        yield made
