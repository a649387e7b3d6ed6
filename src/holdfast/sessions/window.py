"""The window: which deliveries are under way to one client, under which packet ids, and who hears how they end.

    sent ──PUBACK──────────────────────────────▶ settled        QoS 1
    sent ──PUBREC──▶ settled, RELEASED ──PUBCOMP──▶ id is free  QoS 2
    sent ──PUBREC with an error──▶ settled                      QoS 2

The window knows nothing of streams, groups or campaigns: each delivery names its `Origin`, which is told once, with the
client's reason code, when the client is done with it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from enum import Enum, auto
from functools import partial
from itertools import islice, repeat
from typing import NamedTuple, Protocol

RELEASED = 3
"""In place of a QoS: the PUBREL of a QoS 2 delivery is out, only its PUBCOMP is missing."""

PACKET_ID_MAX = 65_535


class Origin(Protocol):
    """Where a delivery comes from, and who keeps its progress."""

    def settle(self, deliveries: Sequence[Delivery], reason: int) -> None:
        """The client is done with them: it has them (reason below 0x80), or it refuses them."""
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


_delivery = partial(tuple.__new__, Delivery)
"""From a tuple, without a call into Python: there are hundreds of thousands a second."""


class Nobody:
    """The origin of deliveries that are nobody's any more; their packet ids stay taken until the client answers."""

    def settle(self, deliveries: Sequence[Delivery], reason: int) -> None: ...

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

    def free_ids(self, count: int) -> Sequence[int]:
        """The packet ids that the next so many deliveries may have, for `add_run`. There are as many."""
        in_flight, begin = self._in_flight, self.last_id + 1
        if begin + count - 1 <= PACKET_ID_MAX and in_flight.keys().isdisjoint(found := range(begin, begin + count)):
            return found
        every = (n % PACKET_ID_MAX + 1 for n in range(self.last_id, self.last_id + PACKET_ID_MAX))
        return list(islice((n for n in every if n not in in_flight), count))

    def add_run(self, packet_ids: Sequence[int], origin: Origin, offsets: Iterable[int], qos: int) -> None:
        """Deliveries that go out under these ids, as `free_ids` has named them."""
        if packet_ids:
            deliveries = map(_delivery, zip(repeat(origin), offsets, repeat(qos)))
            self._in_flight.update(zip(packet_ids, deliveries, strict=False))
            self.last_id = packet_ids[-1]

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
        in_flight, wrong = self._in_flight, None
        origin: Origin = NOBODY
        run: list[Delivery] = []
        for packet_id in packet_ids:
            delivery = in_flight.get(packet_id)
            if delivery is None:
                continue  # late, or sent twice: harmless
            if delivery[2] != 1:
                wrong = packet_id
                break
            del in_flight[packet_id]
            if delivery[0] is not origin:
                if run:
                    origin.settle(run, reason)
                origin, run = delivery[0], []
            run.append(delivery)
        if run:
            origin.settle(run, reason)
        return wrong

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
        delivery.origin.settle((delivery,), reason)
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
