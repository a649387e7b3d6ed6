"""QoS 2 publishes of one client that are taken and not yet released: each is stored once, however often it is sent."""

from __future__ import annotations

from collections.abc import Iterable


class Inbound:
    """Packet ids between PUBLISH and PUBREL. Only the connection of the session changes them."""

    __slots__ = ("_ids",)

    def __init__(self, packet_ids: Iterable[int] = ()):
        self._ids = set(packet_ids)

    def __len__(self) -> int:
        return len(self._ids)

    def __contains__(self, packet_id: int) -> bool:
        return packet_id in self._ids

    def ids(self) -> list[int]:
        return sorted(self._ids)

    def take(self, packet_id: int) -> bool:
        """A PUBLISH has come; whether it is new."""
        if packet_id in self._ids:
            return False
        self._ids.add(packet_id)
        return True

    def release(self, packet_id: int) -> bool:
        """PUBREL, or the publish could not be stored; whether the id was known."""
        if packet_id not in self._ids:
            return False
        self._ids.remove(packet_id)
        return True
