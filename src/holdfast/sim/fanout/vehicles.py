"""Vehicles as clients: they come and go, subscribe as they like, and answer late, twice, with errors, or never."""

from __future__ import annotations

from typing import TYPE_CHECKING

from holdfast.fanout.nouns import Campaign, InFlight
from holdfast.sim.fanout.node import REQUEST, Link, SimNode

if TYPE_CHECKING:
    from holdfast.sim.fanout.workload import FanoutWorkload

SMALL_PACKETS = 60
ERRORS = (0x80, 0x83, 0x97, 0x87, 0x90, 0x99)


class SimVehicle:
    """One client of a vehicle; a vehicle may have two."""

    def __init__(self, run: FanoutWorkload, vin: str, client_id: str):
        self.run, self.world, self.vin, self.client_id = run, run.world, vin, client_id
        rng = self.world.rng
        self.link: Link | None = None
        self.connecting = False
        self.wants = True
        self.durable = rng.random() < 0.7
        self.packet_bytes_max = SMALL_PACKETS if rng.random() < 0.15 else 1_000_000
        self.window_max = rng.choice([1, 2, 20])
        self.every = REQUEST.topic(vin, "+")
        self.never = rng.choice([0.0, 0.0, 0.1, 0.5])
        self.wrong = rng.choice([0.0, 0.1, 0.4])
        self.twice = rng.choice([0.0, 0.3])
        self.slow = rng.choice([0.02, 0.3, 3.0])
        self.silent: list[tuple[Link, int, InFlight, Campaign]] = []
        """What it has not answered, and will not before it has to."""
        self.changed_at = 0.0
        """When it last came, or subscribed to something."""

    def __str__(self) -> str:
        return self.client_id

    # -- coming and going ----------------------------------------------------------------------------------

    def come(self, clean: bool = False) -> None:
        node = self.run.any_node()
        if self.connecting:
            return
        if self.link is not None:
            self.lose(self.world.rng.choice([0.02, 1.0, 5.0]))
        if node is None:
            self._come_later()
            return
        self.connecting = True
        durable = self.durable
        self.world.tell(self, f"CONNECT to {node}{' clean' if clean else ''}")
        node.after(
            self.world.rng.random() * 0.05,
            lambda: node.connect(self, clean, durable, self.packet_bytes_max, self.window_max),
        )
        self.world.after(3.0, self._give_up(node))

    def _give_up(self, node: SimNode):  # type: ignore[no-untyped-def]
        token = self._attempt = object()

        def over() -> None:
            if self.connecting and self._attempt is token:
                self.connecting = False
                self._come_later()

        return over

    def refused(self) -> None:
        if self.connecting:
            self.connecting = False
            self._come_later()

    def _come_later(self) -> None:
        self.world.after(0.2 + self.world.rng.random(), self._come_if_away)

    def _come_if_away(self) -> None:
        if self.wants and self.link is None:
            self.come()

    def welcomed(self, link: Link, present: bool) -> None:
        if not self.connecting or self.link is not None:
            self.drop(link, 0.02)
            return
        self.connecting, self.link, self.changed_at = False, link, self.world.now
        if not present or self.world.healing:
            self.subscribe(self.every, 1)

    def lose(self, noticed_after: float) -> None:
        """The connection is gone; its node notices later."""
        if (link := self.link) is not None:
            self.link = None
            self.drop(link, noticed_after)

    def drop(self, link: Link, noticed_after: float) -> None:
        self.world.tell(self, f"loses its connection to {link.node}")
        link.client_up = False
        link.node.after(noticed_after, lambda: link.node.close(link))

    def cut_off(self, link: Link) -> None:
        """Its node has ended the connection."""
        if self.link is link:
            self.link = None
            link.client_up = False
            self.world.tell(self, f"was cut off by {link.node}")
            if self.wants:
                self._come_later()
        link.client_up = False

    def leave(self) -> None:
        self.wants = False
        self.lose(0.02)

    # -- what it says --------------------------------------------------------------------------------------

    def subscribe(self, text: str, qos: int | None) -> None:
        link = self.link
        if link is not None:
            self.world.tell(self, f"subscribes {text} at {qos}")
            self.changed_at = self.world.now + 0.1
            self._say(link, lambda: link.node.subscribe(link, text, qos))

    def heartbeat(self) -> None:
        link = self.link
        if link is not None:
            self._say(link, lambda: link.node.trigger([self.vin]))

    def _say(self, link: Link, call) -> None:  # type: ignore[no-untyped-def]
        """In order, and only while the connection is up when it arrives."""

        def arrive() -> None:
            if link.client_up and link.node_up:
                call()

        link.node.after(link.later("up", self.world.rng.random() * 0.02), arrive)

    # -- what it gets --------------------------------------------------------------------------------------

    def arriving(self, link: Link, packet_id: int, flight: InFlight, campaign: Campaign, dup: bool) -> None:
        seconds = link.later("down", self.world.rng.random() * 0.02)
        self.world.after(seconds, lambda: self._receive(link, packet_id, flight, campaign))

    def _receive(self, link: Link, packet_id: int, flight: InFlight, campaign: Campaign) -> None:
        if self.link is not link or not link.client_up:
            return
        if not self.world.healing and self.world.chance(self.never):
            self.silent.append((link, packet_id, flight, campaign))
            return
        self._answer_later(link, packet_id, flight, campaign)

    def _answer_later(self, link: Link, packet_id: int, flight: InFlight, campaign: Campaign) -> None:
        rng = self.world.rng
        reason = 0
        if not self.world.healing and rng.random() < self.wrong:
            reason = rng.choice(ERRORS)
        seconds = rng.random() * (0.02 if self.world.healing else self.slow)
        self.world.after(seconds, lambda: self._answer(link, packet_id, flight.place, reason))
        if reason == 0 and campaign.awaits_result and (self.world.healing or rng.random() < 0.7):
            good = self.world.healing or rng.random() < 0.8
            self.world.after(seconds + rng.random(), lambda: self._result(link, flight, good))
        if rng.random() < self.twice:
            self.world.after(seconds + rng.random(), lambda: self._answer(link, packet_id, flight.place, reason))

    def _answer(self, link: Link, packet_id: int, place: int, reason: int) -> None:
        if self.link is not link:
            return
        self.world.tell(self, f"answers id {packet_id} (#{place & 0xFFFF}) with 0x{reason:02X}")
        self.run.truth.answered(self, place, reason)
        self._say(link, lambda: link.node.answered(link, packet_id, reason))

    def _result(self, link: Link, flight: InFlight, good: bool) -> None:
        if self.link is not None:
            link = self.link
            self.run.truth.resulted(self.vin, flight.place, good)
            self._say(link, lambda: link.node.result(link, flight.place, good))

    def heal(self) -> None:
        """From now on it is there, is subscribed, and answers; if it is there already, nothing else triggers it."""
        self.wants = True
        for link, packet_id, flight, campaign in self.silent:
            self._answer_later(link, packet_id, flight, campaign)
        self.silent.clear()
        held = self.link
        if held is None or not held.node_up or held.filters.get(self.every) != 1 or self.world.rng.random() < 0.4:
            self.lose(0.02)
            self.connecting = False
            self.come()
