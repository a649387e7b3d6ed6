"""QoS 2 publishes of one client that are taken and not yet released: each is stored once, however often it is sent."""

from __future__ import annotations

from collections.abc import Callable, Iterable


class Inbound:
    """Packet ids between PUBLISH and PUBCOMP, and whether each is stored. Only connections of the session change them.

    A client may come back and send a publish again while the first one is still on its way to the log. So whoever
    lets go of the session waits until every one of them is stored or has failed: whoever is next reads what is stored.
    A client that has its PUBCOMP gives the id to another message: so the store must have forgotten it before.
    """

    __slots__ = ("_stored", "_waiting", "born", "forget", "in_doubt")

    def __init__(self, packet_ids: Iterable[int] = (), born: str = ""):
        self._stored = dict.fromkeys(packet_ids, True)
        self._waiting: list[Callable[[], None]] = []
        self.born = born
        """The life of the session that they are stored under; empty: nothing outlives the connection."""
        self.in_doubt = False
        """One has failed, and may be stored all the same: the store is to be asked before more are taken."""
        self.forget: Callable[[int, Callable[[], None]], None] = lambda packet_id, forgotten: forgotten()
        """Let the store forget this id, then say so."""

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
        self._settled()

    def failed(self, packet_id: int) -> None:
        """It could not be stored, for all that is known."""
        self._stored.pop(packet_id, None)
        self.in_doubt = True
        self._settled()

    def found(self, packet_ids: Iterable[int]) -> None:
        """The store says that these are stored."""
        self._stored.update(dict.fromkeys(packet_ids, True))
        self.in_doubt = False

    @property
    def under_way(self) -> bool:
        """Of some nobody knows yet whether they are stored."""
        return not all(self._stored.values())

    def when_settled(self, call: Callable[[], None]) -> None:
        """Call this once all of them are stored or have failed; at once, if that is so already."""
        if self.under_way:
            self._waiting.append(call)
        else:
            call()

    def _settled(self) -> None:
        if self._waiting and not self.under_way:
            waiting, self._waiting = self._waiting, []
            for call in waiting:
                call()

    def is_stored(self, packet_id: int) -> bool:
        return self._stored.get(packet_id, False)

    def release(self, packet_id: int) -> None:
        """The store has forgotten it."""
        self._stored.pop(packet_id, None)
        self._settled()
