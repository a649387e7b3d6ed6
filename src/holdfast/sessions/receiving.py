"""A QoS 2 publish between its PUBLISH and the commit: under which id the store is to remember it."""

from __future__ import annotations

from typing import NamedTuple

from holdfast.log.contract import ReceivedId
from holdfast.mqtt.inbound import Inbound


class Receiving(NamedTuple):
    """A QoS 2 publish on its way to the log, as its session knows it."""

    client_id: str
    inbound: Inbound
    packet_id: int
    mark: int

    def id(self) -> ReceivedId:
        """Under the epoch that its session is served under by now: while it waited, its client may have come back."""
        return ReceivedId(self.client_id, self.inbound.born, self.packet_id, self.mark, self.inbound.epoch)
