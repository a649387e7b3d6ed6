"""How a node is emptied: groups go first, then clients, so many a second.

    SERVING ──▶ HANDING_OVER ──▶ MOVING ──▶ EMPTY

Groups go first because whoever leads one calls everything back that it has lent: done after the clients, members on
other nodes would wait for a leader that nobody is left to be asked for. Clients go at a pace because all of them come
back at once somewhere else.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto
from math import inf

from holdfast.errors import BrokenInvariant
from holdfast.machine import Tick


class State(Enum):
    SERVING = auto()
    HANDING_OVER = auto()
    """New clients are refused; leaders of groups retire."""
    MOVING = auto()
    """Clients are sent away."""
    EMPTY = auto()
    """Nobody is connected, and every session is saved."""


LEGAL: dict[State, set[State]] = {
    State.SERVING: {State.HANDING_OVER},
    State.HANDING_OVER: {State.MOVING},
    State.MOVING: {State.EMPTY},
    State.EMPTY: set(),
}

TURN_SECONDS = 0.1
"""Clients are sent away in small lots."""


@dataclass(frozen=True, slots=True)
class Begin:
    """An operator wants this node to be empty."""

    clients_per_sec: float
    hand_over_secs: float
    """How long leaders may take."""


@dataclass(frozen=True, slots=True)
class HandedOver:
    """No group is led here any more."""


@dataclass(frozen=True, slots=True)
class Look:
    """How many clients are still here (connected, or not saved yet), and how many of them were not sent away yet."""

    here: int
    unmoved: int


Event = Begin | HandedOver | Look | Tick


@dataclass(frozen=True, slots=True)
class RefuseClients:
    """CONNECT is answered with *use another server* from now on; /readyz and the node's record say why."""


@dataclass(frozen=True, slots=True)
class HandOver:
    """Leaders retire, and none begins: `HandedOver` when that is done."""


@dataclass(frozen=True, slots=True)
class Move:
    """Send so many clients away."""

    count: int


@dataclass(frozen=True, slots=True)
class Emptied:
    """Whoever waits for that may go on."""


Effect = RefuseClients | HandOver | Move | Emptied


class Drain:
    """One per node."""

    def __init__(self) -> None:
        self.state = State.SERVING
        self.deadline = inf
        self._pace = 0.0
        self._allowance = 0.0
        self._looked_at = 0.0

    def handle(self, event: Event, now: float) -> list[Effect]:
        match event:
            case Begin() if self.state is State.SERVING:
                self._move(State.HANDING_OVER)
                self._pace, self.deadline = event.clients_per_sec, now + event.hand_over_secs
                return [RefuseClients(), HandOver()]
            case Begin():
                self._pace = event.clients_per_sec  # asked again: perhaps it goes too slowly, or too fast
            case HandedOver() if self.state is State.HANDING_OVER:
                self._begin_moving(now)
            case Tick() if self.state is State.HANDING_OVER and now >= self.deadline:
                self._begin_moving(now)
            case Look(here, unmoved) if self.state is State.MOVING:
                return self._on_look(here, unmoved, now)
        return []

    def _begin_moving(self, now: float) -> None:
        self._move(State.MOVING)
        self._looked_at, self.deadline = now, now

    def _on_look(self, here: int, unmoved: int, now: float) -> list[Effect]:
        if not here:
            self._move(State.EMPTY)
            self.deadline = inf
            return [Emptied()]
        # After a pause of the whole node no more go than in one turn: those who were late are not hurried.
        turn = min(now - self._looked_at, 2 * TURN_SECONDS)
        self._looked_at, self.deadline = now, now + TURN_SECONDS
        self._allowance = min(self._allowance + turn * self._pace, 1.0 + 2 * TURN_SECONDS * self._pace)
        count = min(int(self._allowance), unmoved)
        self._allowance -= count
        return [Move(count)] if count else []

    def _move(self, to: State) -> None:
        if to not in LEGAL[self.state]:
            raise BrokenInvariant(f"a drain may not go from {self.state.name} to {to.name}", [])
        self.state = to
