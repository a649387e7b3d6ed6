"""Three nodes on one PostgreSQL, with leases short enough to wait for their end."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from e2e.clients import V5, Dial, PahoClient
from e2e.conftest import Clients
from node import Node
from servers import PostgresServer

LEASE_SECONDS, GRACE_SECONDS, FLUSH_SECONDS = 3.0, 2.0, 0.2
LATE_SECONDS = 4.0
"""How much later than promised anything may be on a machine that is busy with other tests."""

QUICK: dict[str, Any] = {
    "sessions.lease_secs": LEASE_SECONDS,
    "sessions.grace_secs": GRACE_SECONDS,
    "cursors.subscription_progress_flush_secs": FLUSH_SECONDS,
    "groups.lease_secs": LEASE_SECONDS,
    "groups.ping_secs": 0.3,
    "groups.ping_timeout_secs": 2.0,
    "groups.revoke_secs": 3.0,
    "log.shards": 4,
}

Cluster = tuple[Node, Node, Node]
At = Callable[..., PahoClient]


@pytest.fixture(scope="session")
def trio(postgres_server: PostgresServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """The nodes one, two and three; a test that ends one leaves it to the next test to start it again."""
    postgres_server.start()
    url = postgres_server.database()
    with ExitStack() as stack:
        one, two, three = (
            stack.enter_context(Node(tmp_path_factory.mktemp(name), store=url, node_id=name, settings=QUICK))
            for name in ("one", "two", "three")
        )
        yield one, two, three
    postgres_server.drop(url)


@pytest.fixture
def cluster(trio: Cluster) -> Cluster:
    """All three, up and taking clients."""
    for node in trio:
        if not node.running or not node.ready():
            node.kill()
            node.start()
    return trio


@pytest.fixture
def at(clients: Clients) -> At:
    """`at(node, client_id, version=5, **dial)`: a client connected to that node."""

    def connect(node: Node, client_id: str, version: int = V5, **dial: Any) -> PahoClient:
        client = clients.make("paho", Dial(port=node.mqtt_port, client_id=client_id, version=version, **dial))
        assert isinstance(client, PahoClient)
        return client.connect()

    return connect
