"""QoS 2 publishes of one client that are taken and not yet released: each is stored once, however often it is sent."""

from __future__ import annotations

from collections.abc import Callable, Mapping


class Inbound:
    """Packet ids between PUBLISH and PUBCOMP, and whether each is stored. Only connections of the session change them.

    A client may come back and send a publish again while the first one is still on its way to the log. So whoever
    lets go of the session waits until every one of them is stored or has failed, and whatever was released is removed:
    whoever is next reads what is stored, and nothing of ours changes it any more.
    """

    __slots__ = ("_freeing", "_stored", "_waiting", "born", "epoch", "in_doubt", "marks")

    def __init__(self, marks: Mapping[int, int] | None = None, born: str = ""):
        self.marks = dict(marks or {})
        """By packet id: which publish it is, as the store knows it."""
        self._stored = dict.fromkeys(self.marks, True)
        self._freeing: dict[int, None] = {}
        """Released by the client, and still known to the store."""
        self._waiting: list[Callable[[], None]] = []
        self.born = born
        """The life of the session that they are stored under; empty: nothing outlives the connection."""
        self.epoch = 0
        """The one its session is served under here: what lands after somebody else has taken it is not stored."""
        self.in_doubt = False
        """One has failed, and may be stored all the same: the store is to be asked before more are taken."""

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

    def found(self, marks: Mapping[int, int]) -> None:
        """The store says that these are stored."""
        self.marks.update(marks)
        self._stored.update(dict.fromkeys(marks, True))
        self.in_doubt = False

    @property
    def under_way(self) -> bool:
        """Of some nobody knows yet whether they are stored, or still stored."""
        return bool(self._freeing) or not all(self._stored.values())

    def when_settled(self, call: Callable[[], None]) -> None:
        """Call this once nothing is under way any more; at once, if that is so already."""
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

    def free(self, packet_id: int) -> None:
        """PUBREL: it is to be removed from the store."""
        self._freeing[packet_id] = None

    def forget(self, packet_id: int) -> None:
        """It was released, and no store knows it any more."""
        self._stored.pop(packet_id, None)
        self._freeing.pop(packet_id, None)
        self._settled()
