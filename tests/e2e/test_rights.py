"""Rights that change while a client has a session: it reads no further, by itself or in a group, and loses nothing."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from e2e.clients import V5
from e2e.groups.members import Ledger, Member, Publisher
from e2e.raw import Raw
from node import Node
from processes import wait_for

NOT_AUTHORIZED = 0x87
AN_HOUR = b"\x11\x00\x00\x0e\x10"
"""The session stays as long when its client goes."""
OPEN, CLOSED = "anyone\nallow all #\n", "anyone\ndeny subscribe jobs/#\nallow all #\n"


@pytest.fixture
def rules(tmp_path: Path) -> Path:
    path = tmp_path / "acl"
    path.write_text(OPEN)
    return path


@pytest.fixture
def node(tmp_path: Path, rules: Path) -> Iterator[Node]:
    with Node(tmp_path / "node", settings={"log.shards": 2, "auth.acl_file": rules}) as running:
        yield running


def rewrite(rules: Path, content: str) -> None:
    """As a whole, or the node might read half of it."""
    new = rules.with_suffix(".new")
    new.write_text(content)
    os.replace(new, rules)


def answer(node: Node) -> int:
    """What the CONNECT of somebody who comes back for the session is answered with."""
    with Raw(node.mqtt_port, V5) as raw:
        return raw.connect("reader", clean=False, properties=AN_HOUR)[1]


@pytest.mark.parametrize("wanted", ["jobs/#", "$share/g/jobs/#", "$queue/g/jobs/#"])
def test_who_may_no_longer_read_is_sent_away_and_let_in_to_its_session_when_it_may_again(
    node: Node, rules: Path, wanted: str
) -> None:
    ledger = Ledger()

    def come(share: str | None = None) -> Member:
        return Member(node.mqtt_port, "reader", share, ledger, durable=True, clean=False)

    with Publisher(node.mqtt_port, "p", 2) as publisher:
        with come(wanted) as reader:
            ledger.await_acked(publisher.publish("jobs/1", 10))
            rewrite(rules, CLOSED)
            assert reader.closed_by_server.wait(20)
            assert reader.reason == NOT_AUTHORIZED
        sent = publisher.publish("jobs/1", 10)
        assert answer(node) == NOT_AUTHORIZED
        assert not ledger.given.keys() & set(sent)
        rewrite(rules, OPEN)
        wait_for(lambda: answer(node) == 0, 20, "the session is to be had again")
        with come() as reader:
            assert reader.session_present
            ledger.await_acked(sent)
    ledger.check()
