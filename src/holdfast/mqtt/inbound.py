"""QoS 2 publishes of one client that are taken and not yet released: each is stored once, however often it is sent."""

from __future__ import annotations

from collections.abc import Callable, Iterable


class Inbound:
    """Packet ids between PUBLISH and PUBREL, and whether each is stored. Only connections of the session change them.

    A client may come back and send a publish again while the first one is still on its way to the log.
    """

    __slots__ = ("_stored", "born", "on_released")

    def __init__(self, packet_ids: Iterable[int] = (), born: str = ""):
        self._stored = dict.fromkeys(packet_ids, True)
        self.born = born
        """The life of the session that they are stored under; empty: nothing outlives the connection."""
        self.on_released: Callable[[int], None] | None = None
        """Told of each that need not be stored any more."""

    def __len__(self) -> int:
        return len(self._stored)

    def __contains__(self, packet_id: int) -> bool:
        return packet_id in self._stored

    def take(self, packet_id: int) -> None:
        """A PUBLISH that is new has come."""
        self._stored[packet_id] = False

    def stored(self, packet_id: int) -> None:
        if packet_id in self._stored:
            self._stored[packet_id] = True

    def is_stored(self, packet_id: int) -> bool:
        return self._stored.get(packet_id, False)

    def release(self, packet_id: int) -> bool:
        """PUBREL, or the publish could not be stored; whether the id was known."""
        known = self._stored.pop(packet_id, None) is not None
        if known and self.on_released is not None:
            self.on_released(packet_id)
        return known
