"""Which session is which vehicle: topics made from templates, and filters read by them."""

from __future__ import annotations

from typing import NamedTuple

from holdfast.errors import RequestError
from holdfast.fanout.nouns import Sent

VIN, REQUEST = "{VIN}", "{request_id}"


class Vehicle(NamedTuple):
    """A vehicle that is connected to this node."""

    vin: str
    client_id: str
    born: str
    """The life of its session, the same when it is resumed; empty: it ends with its connection."""
    epoch: int
    """Of its session: a newer one has taken over."""
    packet_bytes_max: int
    requests: frozenset[str] | None
    """Request ids it is subscribed to; None: whatever they are."""

    def takes(self, request_id: str) -> bool:
        return self.requests is None or request_id in self.requests

    def has(self, sent: Sent) -> bool:
        """Was it sent in the session that this vehicle has?"""
        return sent.client_id == self.client_id and sent.born == self.born != ""


class Template:
    """A topic with `{VIN}` as one level, and perhaps `{request_id}` as another."""

    def __init__(self, text: str):
        self.text = text
        self._levels = text.split("/")
        for name in (VIN, REQUEST):
            if self._levels.count(name) > 1 or any(name in level and level != name for level in self._levels):
                raise RequestError(f"the topic {text!r} must have {name} as one whole level, once")
        if VIN not in self._levels:
            raise RequestError(f"the topic {text!r} has no level {VIN}")
        if text[:1] == "$" or "+" in text or "#" in text or "\0" in text:
            raise RequestError(f"the topic {text!r} must be an ordinary one, without wildcards")
        self._vin = self._levels.index(VIN)
        self._request = self._levels.index(REQUEST) if REQUEST in self._levels else -1
        self.head = text[: text.index(VIN)]
        """What every topic of it begins with."""

    @property
    def filter(self) -> str:
        """Matches every topic of it."""
        return "/".join("+" if level in (VIN, REQUEST) else level for level in self._levels)

    def topic(self, vin: str, request_id: str = "") -> str:
        return self.text.replace(VIN, vin).replace(REQUEST, request_id)

    def parse(self, topic: str) -> tuple[str, str] | None:
        """VIN and request id of a topic that it makes; None: it is another."""
        if not topic.startswith(self.head):
            return None
        levels = topic.split("/")
        if len(levels) != len(self._levels):
            return None
        for at, (level, own) in enumerate(zip(levels, self._levels, strict=True)):
            if at not in (self._vin, self._request) and level != own:
                return None
        return levels[self._vin], levels[self._request] if self._request >= 0 else ""

    def covered_by(self, text: str) -> tuple[str | None, str | None] | None:
        """Of a filter that matches topics of it: which VIN and which request id (None: any); None: it matches none."""
        if text[:1] not in ("+", "#") and self.head[:1] != text[:1]:
            return None  # nearly every filter: it costs nothing more
        levels = text.split("/")
        vin: str | None = None
        request: str | None = None
        for at, own in enumerate(self._levels):
            level = levels[at] if at < len(levels) else None
            if level == "#":
                return vin, request
            if level is None:
                return None
            if at == self._vin:
                vin = None if level == "+" else level
            elif at == self._request:
                request = None if level == "+" else level
            elif level not in ("+", own):
                return None
        rest = levels[len(self._levels) :]
        return (vin, request) if not rest or rest == ["#"] else None
