"""A node with every listener and small limits, for all attacks that leave it running."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from e2e.conftest import authority as authority
from hostile.attack import Target, many_files
from node import LISTENER, Node

CONNECT_SECONDS = 1.0
SUBSCRIPTIONS_MAX = 200

_numbers = itertools.count(1)


def settings(authority: Path) -> dict[str, Any]:
    return {
        "limits.connect_secs": CONNECT_SECONDS,
        "limits.subscriptions_max": SUBSCRIPTIONS_MAX,
        "limits.pending_bytes_max": 256 << 10,
        "cursors.subscription_progress_flush_secs": 0.5,
        "log_level": "warning",
        "mqtt.websocket": LISTENER,
        "mqtt.tls": LISTENER,
        "mqtt.tls_certificate": authority / "cert.pem",
        "mqtt.tls_key": authority / "key.pem",
    }


@pytest.fixture(scope="session")
def target(authority: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Target]:
    many_files(19_000)
    with Node(tmp_path_factory.mktemp("hostile"), settings=settings(authority)) as node:
        under_attack = Target(node)
        yield under_attack
        under_attack.close()


@pytest.fixture
def name() -> str:
    """A word no other test uses, for topics and client ids."""
    return f"h{next(_numbers)}x{os.getpid()}"


@pytest.fixture(params=[pytest.param(4, id="3.1.1"), pytest.param(5, id="5")])
def version(request: pytest.FixtureRequest) -> int:
    return request.param
