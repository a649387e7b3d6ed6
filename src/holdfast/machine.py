"""What every machine and every host share: events in, effects out, a deadline, and where messages go.

A machine is a plain object. It decides; it has no clock, task, socket or database. Its host gives it events and the
time, and performs the effects it returns, in order:

    effects = machine.handle(event, now)

`now` is the host's monotonic clock. `deadline` says when the machine next wants a `Tick`; nothing is ever cancelled.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

M = TypeVar("M", covariant=True)


class Machine(Protocol):
    """Anything a driver can drive."""

    deadline: float
    """When it next wants a `Tick`; `inf`: never."""

    def handle(self, event: Any, now: float) -> list[Any]:
        """The one door: whatever happens to the machine, the passing of time included, happens here."""
        ...


@dataclass(frozen=True, slots=True)
class Tick:
    """Host -> any machine. Your `deadline` has come."""


TICK = Tick()


class Address(NamedTuple):
    """Where a message goes: a node, what kind of machine there, and which one."""

    node: str
    kind: str
    """`registry`, `leader`, `agent`, `batch` (a batch member), `asker` (of an `Ask`), `session` or `fanout`."""
    name: str = ""
    """The group of a leader, `session/incarnation` of an agent or batch member, an asker's request, a client id."""

    def __str__(self) -> str:
        return f"{self.kind}:{self.name}@{self.node}" if self.name else f"{self.kind}@{self.node}"


@dataclass(frozen=True, slots=True)
class Send(Generic[M]):
    """Hand the message to that machine, on whatever node it is; it may be lost, late or doubled."""

    to: Address
    message: M
