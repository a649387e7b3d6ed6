"""Simulated clients: they come, take over, subscribe, acknowledge, say good-bye, are lost, or never come back."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING

from holdfast.sessions.life import Connect
from holdfast.sessions.session import NEVER
from holdfast.sessions.table import StoredWill

if TYPE_CHECKING:
    from holdfast.sim.life.node import SimNode
    from holdfast.sim.life.workload import LifeWorkload

LINK_SECONDS = 0.01
CONNECT_SECONDS = 11.0
"""How long a client waits for its CONNACK."""
EXPIRIES = [0, 2, 6, 15, 15, NEVER]
DELAYS = [0, 0, 1, 4, 12]
FILTERS = ["a", "b", "c"]


class Link:
    """One connection between a client and a node; packets of each side arrive in order."""

    __slots__ = ("born", "client", "connect", "eager", "frozen", "inbox", "lost", "node", "up", "welcome")

    def __init__(self, client: SimClient, node: SimNode, connect: Connect):
        self.client, self.node, self.connect = client, node, connect
        self.up = True
        """Packets still arrive, both ways."""
        self.welcome = self.frozen = False
        self.lost = False
        """The node has noticed that it is over, maybe before it read the CONNECT."""
        self.eager = client.rng.random() < 0.8
        """A DISCONNECT that came just before the connection froze was read already."""
        self.inbox: deque[tuple[str, str | int]] = deque()
        self.born = ""

    @property
    def token(self) -> str:
        return self.connect.token

    def send(self, kind: str, value: str | int) -> None:
        if self.up:
            self.inbox.append((kind, value))
            self.node.after(LINK_SECONDS, lambda: self.node.read(self))

    # -- what the node does --------------------------------------------------------------------------------

    def _to_client(self, call: Callable[[], None]) -> None:
        if self.up:
            self.client.world.after(LINK_SECONDS, lambda: call() if self.up else None)

    def welcomed(self, present: bool) -> None:
        self.welcome = True
        self._to_client(lambda: self.client.welcomed(self, present))

    def deliver(self, number: int) -> None:
        self._to_client(lambda: self.client.received(self, number))

    def answered(self, kind: str, filter_text: str, start: int | None) -> None:
        self._to_client(lambda: self.client.answered(self, kind, filter_text, start))

    def closed_by_node(self, reason: int | None, *, refused: bool) -> None:
        self._to_client(lambda: self.client.closed(self, reason, refused=refused))

    def node_died(self) -> None:
        self._to_client(lambda: self.client.closed(self, None, refused=False))


class SimClient:
    """One client id."""

    def __init__(self, run: LifeWorkload, name: str):
        self.run, self.world, self.rng, self.name = run, run.world, run.world.rng, name
        self.link: Link | None = None
        """The connection it has, or tries to have."""
        self.wants = True
        """It comes back when it is disconnected."""
        self.tokens = 0
        self.starts: dict[str, int] = {}
        """Filters it has been told to be subscribed to, and from which message on."""
        self.unsure: set[str] = set()
        """It asked for a change, and has not heard."""
        self.ack_seconds = self.rng.choice([0.01, 0.3, 1.5])
        self.refused = 0
        self.born = ""
        self.never_back = False

    @property
    def connected(self) -> bool:
        return self.link is not None and self.link.up and self.link.welcome and self.link.born != ""

    # -- coming --------------------------------------------------------------------------------------------

    def connect(self, *, clean: bool | None = None, expiry: int | None = None) -> None:
        if self.never_back:
            return
        if self.link is not None:
            self.abandon(self.rng.choice([0.05, 0.5, 4.0, 30.0]))
        names = [name for name, one in self.run.nodes.items() if one.accepting] or list(self.run.nodes)
        if not names:
            self.come_later()
            return
        rng = self.rng
        delay = rng.choice(DELAYS) if rng.random() < 0.7 else None
        chosen = rng.choice(EXPIRIES) if expiry is None else expiry
        begins = rng.random() < 0.12 if clean is None else clean
        self.connect_to(self.run.nodes[rng.choice(names)], begins, chosen, delay)

    def connect_to(self, at: SimNode, clean: bool, expiry: int, delay: int | None) -> None:
        self.tokens += 1
        token = f"{self.name}.{self.tokens}"
        will = None if delay is None else StoredWill("will", token.encode(), 1, False, b"", delay)
        connect = Connect(token, clean, expiry, will)
        self.link = link = Link(self, at, connect)
        self.world.tell(self.name, f"CONNECT {token} to {at} clean={clean} expiry={expiry} will={delay}")
        at.after(LINK_SECONDS, lambda: at.connect(link, connect))
        self.world.after(CONNECT_SECONDS, lambda: self._give_up(link))

    def _give_up(self, link: Link) -> None:
        """Nobody has answered: the node may have died before it read the CONNECT."""
        if link is self.link and not link.born:
            self.abandon(0.05)
            if self.wants:
                self.come_later()

    def come_later(self) -> None:
        seconds = self.rng.choice([0.05, 0.5, 2.0, 5.0])
        if self.world.healing:
            seconds = 0.3
        self.world.after(seconds, self._come)

    def _come(self) -> None:
        if self.wants and self.link is None:
            self.connect(clean=False if self.world.healing else None)

    def welcomed(self, link: Link, present: bool) -> None:
        if link is not self.link:
            return
        link.born = self.run.truth.born_of(link.token)
        for filter_text in self.unsure:
            self.run.truth.told(self.name, link.born, filter_text, None)
        if link.born != self.born:  # it may have begun with a CONNECT whose answer was never heard
            self.starts.clear()
            self.born = link.born
            if self.run.stirs and not self.world.healing and self.rng.random() < 0.7:
                self.world.after(self.rng.random() * 0.2, lambda: self.subscribe(self.rng.choice(FILTERS)))
        for filter_text in self.unsure:
            self.starts.pop(filter_text, None)  # whether that was done is not known
        self.unsure.clear()

    # -- going ---------------------------------------------------------------------------------------------

    def abandon(self, notice_seconds: float) -> None:
        """The network takes the connection; the node notices some time later."""
        link, self.link = self.link, None
        if link is None:
            return
        link.up = False
        if self.world.healing:
            notice_seconds = min(notice_seconds, 0.2)
        self.world.tell(self.name, f"loses {link.token}, noticed after {notice_seconds}")
        link.node.after(notice_seconds, lambda: link.node.gone(link))

    def say_goodbye(self, expiry: int | None) -> None:
        link = self.link
        if link is None or not link.welcome:
            return
        if link.connect.expiry_secs == 0:
            expiry = None
        self.world.tell(self.name, f"DISCONNECT {link.token} expiry={expiry}")
        link.send("goodbye", "" if expiry is None else expiry)
        self.link = None

    def closed(self, link: Link, reason: int | None, *, refused: bool) -> None:
        link.up = False
        if link is not self.link:
            return
        self.link = None
        if refused:
            self.refused += 1
            self.run.truth.refused(link.token, reason, link.node)
        if self.wants:
            self.come_later()

    # -- being there ---------------------------------------------------------------------------------------

    def subscribe(self, filter_text: str, kind: str = "subscribe") -> None:
        if self.connected and self.link is not None and filter_text not in self.unsure:
            self.unsure.add(filter_text)
            self.run.truth.asks(self.name, self.link.born, filter_text)
            self.link.send(kind, filter_text)

    def answered(self, link: Link, kind: str, filter_text: str, start: int | None) -> None:
        if link is not self.link:
            return
        self.unsure.discard(filter_text)
        if kind == "subscribe" and start is not None:
            self.starts[filter_text] = start
        else:
            self.starts.pop(filter_text, None)
        self.run.truth.told(self.name, link.born, filter_text, start if kind == "subscribe" else None)

    def received(self, link: Link, number: int) -> None:
        if link is not self.link or not link.born:
            return
        self.world.after(self.rng.random() * self.ack_seconds, lambda: self._ack(link, number))

    def _ack(self, link: Link, number: int) -> None:
        if link is self.link and link.up:
            self.run.truth.client_acks(self.name, link.born, number)
            link.send("ack", number)
