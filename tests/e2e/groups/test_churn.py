"""Members join, leave, crash and unsubscribe under twenty thousand messages: none lost, none acknowledged twice."""

from __future__ import annotations

import random
import threading
import time

import pytest

from e2e.clients import V5, V311
from e2e.groups.members import Connect, Ledger, Member, Publisher, described, settled
from node import Node
from processes import wait_for

MESSAGES, BURST = 20_000, 250
SEATS = 4


class Seat:
    """A place in the group that is taken by one member after another, in whatever way occurs to chance."""

    def __init__(self, member: Connect, node: Node, name: str, number: int, chance: random.Random):
        self._member, self._node, self._chance = member, node, chance
        self._name, self._share = f"{name}-{number}", f"$share/g/{name}/#"
        self.version, self.durable = (V311 if number % 2 else V5), number >= 2
        self.now = self._join()

    def _join(self, share: bool = True) -> Member:
        how = {"version": self.version, "durable": self.durable, "qos": self._chance.choice((1, 1, 2))}
        return self._member(self._node, self._name, self._share if share else None, **how)

    def shake(self) -> str:
        what = self._chance.choice(("crash", "leave", "unsubscribe", "quick", "takeover", "hold"))
        now = self.now
        match what:
            case "crash":
                now.crash()
                self.now = self._join()
            case "leave":
                now.disconnect()
                self.now = self._join()
            case "unsubscribe":
                now.unsubscribe()
                time.sleep(self._chance.uniform(0, 0.1))  # how long is chance's to say
                now.subscribe(self._share)
            case "quick":
                now.unsubscribe()
                now.subscribe(self._share)
            case "takeover":  # the old connection's last acknowledgements may never be read
                old, self.now = now, self._join()
                old.closed_by_server.wait(10)
                old.crash()
            case "hold":
                now.hold = True
                time.sleep(self._chance.uniform(0, 0.1))
                now.hold = False
                now.ack()
        return what


@pytest.mark.parametrize("store", ["sqlite", "postgres"])
def test_twenty_thousand_messages_through_a_restless_group(
    request: pytest.FixtureRequest, member: Connect, ledger: Ledger, name: str, store: str
) -> None:
    node = request.getfixturevalue("lone") if store == "sqlite" else request.getfixturevalue("running")[0]
    chance = random.Random(4)
    group = f"g:{name}/#"
    seats = [Seat(member, node, name, n, chance) for n in range(SEATS)]
    settled(node, group, [f"{name}-{n}" for n in range(SEATS)])
    done: list[str] = []
    with Publisher(node.mqtt_port, name) as publisher:

        def publish() -> None:
            for turn in range(MESSAGES // BURST):
                publisher.publish(f"{name}/x", BURST, qos=2 if turn % 4 == 0 else 1)

        publishing = threading.Thread(target=publish, daemon=True)
        publishing.start()
        while publishing.is_alive() or len(done) < 40:
            done.append(chance.choice(seats).shake())
        publishing.join(60)
        sent = publisher.sent
        assert len(sent) == MESSAGES
        ledger.await_acked(sent, 60)
    ledger.check()
    assert set(ledger.given) == set(sent)
    settled(node, group, [f"{name}-{n}" for n in range(SEATS)])
    wait_for(lambda: described(node, group)["lag"] == 0, what="no lag")
    assert set(done) == {"crash", "leave", "unsubscribe", "quick", "takeover", "hold"}, done
