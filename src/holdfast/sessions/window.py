"""The window: which deliveries are under way to one client, under which packet ids, and who hears how they end.

    sent ──PUBACK──────────────────────────────▶ settled        QoS 1
    sent ──PUBREC──▶ settled, RELEASED ──PUBCOMP──▶ id is free  QoS 2
    sent ──PUBREC with an error──▶ settled                      QoS 2

The window knows nothing of streams, groups or campaigns: each delivery names its `Origin`, which is told once, with the
client's reason code, when the client is done with it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from enum import Enum, auto
from typing import NamedTuple, Protocol

RELEASED = 3
"""In place of a QoS: the PUBREL of a QoS 2 delivery is out, only its PUBCOMP is missing."""

PACKET_ID_MAX = 65_535


class Origin(Protocol):
    """Where a delivery comes from, and who keeps its progress."""

    def settle(self, delivery: Delivery, reason: int) -> None:
        """The client is done with it: it has it (reason below 0x80), or it refuses it."""
        ...

    def passed(self, offset: int) -> None:
        """It went out at QoS 0, or is not for this client: no answer will come."""
        ...


class Delivery(NamedTuple):
    """One message on its way to one client."""

    origin: Origin
    offset: int
    qos: int
    """1, 2 or RELEASED."""


class Nobody:
    """The origin of deliveries that are nobody's any more; their packet ids stay taken until the client answers."""

    def settle(self, delivery: Delivery, reason: int) -> None: ...

    def passed(self, offset: int) -> None: ...


NOBODY = Nobody()


class Pubrec(Enum):
    """What a PUBREC turned out to be."""

    RELEASE = auto()
    """The client has it: say PUBREL."""
    AGAIN = auto()
    """It was released before: say PUBREL again."""
    UNKNOWN = auto()
    WRONG = auto()
    """That delivery is not of QoS 2."""


class Window:
    """Deliveries in flight by packet id, in the order they were sent."""

    __slots__ = ("_in_flight", "last_id")

    def __init__(self) -> None:
        self._in_flight: dict[int, Delivery] = {}
        self.last_id = 0

    def __len__(self) -> int:
        return len(self._in_flight)

    def __contains__(self, packet_id: int) -> bool:
        return packet_id in self._in_flight

    def __iter__(self) -> Iterator[tuple[int, Delivery]]:
        return iter(self._in_flight.items())

    def get(self, packet_id: int) -> Delivery | None:
        return self._in_flight.get(packet_id)

    def offsets_of(self, origin: Origin) -> list[int]:
        """What is under way from there and not yet in the client's hands."""
        return [d.offset for d in self._in_flight.values() if d.origin is origin and d.qos != RELEASED]

    def add(self, delivery: Delivery) -> int:
        """The packet id under which it goes out. The caller has seen that there is room."""
        in_flight, last = self._in_flight, self.last_id
        last = last % PACKET_ID_MAX + 1
        while last in in_flight:
            last = last % PACKET_ID_MAX + 1
        in_flight[last] = delivery
        self.last_id = last
        return last

    def restore(self, packet_id: int, delivery: Delivery) -> None:
        """As it was when the session was stored."""
        self._in_flight[packet_id] = delivery

    def begin_elsewhere(self, number: int) -> None:
        """Nobody knows any more which ids the client still holds, so begin far from those of other numbers.

        A client that has half of a QoS 2 delivery takes another message under its id for the same one.
        """
        self.last_id = number * 40_503 % PACKET_ID_MAX

    # -- what the client says ----------------------------------------------------------------------------

    def puback(self, packet_ids: Iterable[int], reason: int = 0) -> int | None:
        """PUBACKs. The first id that was not under way as QoS 1, if its sender is confused; None: all is well."""
        in_flight = self._in_flight
        for packet_id in packet_ids:
            delivery = in_flight.get(packet_id)
            if delivery is None:
                continue  # late, or sent twice: harmless
            if delivery[2] != 1:
                return packet_id
            del in_flight[packet_id]
            delivery[0].settle(delivery, reason)
        return None

    def pubrec(self, packet_id: int, reason: int = 0) -> Pubrec:
        delivery = self._in_flight.get(packet_id)
        if delivery is None:
            return Pubrec.UNKNOWN
        if delivery.qos == RELEASED:
            return Pubrec.AGAIN
        if delivery.qos != 2:
            return Pubrec.WRONG
        if reason >= 0x80:
            del self._in_flight[packet_id]
        else:
            self._in_flight[packet_id] = Delivery(NOBODY, 0, RELEASED)
        delivery.origin.settle(delivery, reason)
        return Pubrec.RELEASE

    def pubcomp(self, packet_id: int) -> bool:
        """False: it came out of turn."""
        delivery = self._in_flight.get(packet_id)
        if delivery is None:
            return True
        if delivery.qos != RELEASED:
            return False
        del self._in_flight[packet_id]
        return True

    # -- what the session decides --------------------------------------------------------------------------

    def disown(self, origin: Origin, offsets: Iterable[int] | None = None) -> None:
        """These, or all, deliveries from there are nobody's any more; their ids stay taken until the client answers."""
        wanted = None if offsets is None else set(offsets)
        for packet_id, delivery in self._in_flight.items():
            if delivery.origin is origin and (wanted is None or delivery.offset in wanted):
                self._in_flight[packet_id] = Delivery(NOBODY, 0, delivery.qos)

    def drop(self, packet_id: int) -> None:
        """It cannot be sent again: what it was is gone from the log."""
        self._in_flight.pop(packet_id, None)
