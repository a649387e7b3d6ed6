"""What happens to sessions, said within the node: whoever wants to know subscribes, and sessions know nobody.

    cancel = notices.subscribe(Acked, self._on_acked)
    notices.emit(Acked("truck-7", origin, 12, reason=0))

Listeners are called at once, in the order in which they subscribed, on the loop's thread. A listener that raises is
logged; the others hear of it all the same, and whoever emitted the notice is not disturbed.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from holdfast.sessions.window import Origin

logger = logging.getLogger("holdfast.node")


@dataclass(frozen=True, slots=True)
class Subscribed:
    """The session has this subscription, new or with other options; its SUBACK follows."""

    client_id: str
    filter: str
    qos: int


@dataclass(frozen=True, slots=True)
class Unsubscribed:
    """The session does not have this subscription any more."""

    client_id: str
    filter: str


@dataclass(frozen=True, slots=True)
class Resumed:
    """The client is connected; `present`: to a session that was there before."""

    client_id: str
    present: bool


@dataclass(frozen=True, slots=True)
class Acked:
    """The client has answered a delivery; 0x80 and above: it refuses the message. Its origin has been told as well."""

    client_id: str
    origin: Origin
    offset: int
    reason: int


@dataclass(frozen=True, slots=True)
class Gone:
    """The connection is over; `ended`: its session with it."""

    client_id: str
    ended: bool


Notice = Subscribed | Unsubscribed | Resumed | Acked | Gone

N = TypeVar("N", Subscribed, Unsubscribed, Resumed, Acked, Gone)


class Notices:
    """The channel of one node."""

    def __init__(self) -> None:
        self._listeners: dict[type[Any], list[Callable[[Any], None]]] = {}

    def subscribe(self, kind: type[N], listener: Callable[[N], None]) -> Callable[[], None]:
        """Call `listener` with each notice of this kind; what is returned ends that."""
        self._listeners.setdefault(kind, []).append(listener)

        def cancel() -> None:
            left = [each for each in self._listeners.get(kind, ()) if each is not listener]
            self._listeners[kind] = left

        return cancel

    def wanted(self, kind: type[Any]) -> bool:
        """Does anybody listen? Notices per message are worth making only then."""
        return bool(self._listeners.get(kind))

    def emit(self, notice: Notice) -> None:
        for listener in tuple(self._listeners.get(type(notice), ())):
            try:
                listener(notice)
            except Exception:
                logger.exception("a listener could not take %s", notice)
