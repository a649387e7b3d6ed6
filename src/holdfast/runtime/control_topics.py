"""Control topics: what clients publish and subscribe to under these prefixes goes to a handler, not into the log.

A handler registers its prefix once; connections and subscriptions ask the table and know no handler by name:

    handler = control_topics.handler(topic)       None: an ordinary topic
    handler.publish(client, topic, …, answer)     a PUBLISH: answered at once or later
    handler.subscribe(client, topic, start, key)  a SUBSCRIBE: the reason code for the SUBACK
    handler.is_read(topic)                        whether what is under it is in the log, and read like anything else
    handler.unsubscribe(client, topic)            an UNSUBSCRIBE: whether there was such a subscription
    control_topics.gone(client)                   the connection is over: every handler is told

Nothing of this outlives the connection: a client subscribes to its control topics anew each time it connects.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from holdfast.groups.protocol.nouns import Key
from holdfast.model import Start

if TYPE_CHECKING:
    from holdfast.auth.identity import Identity


class ControlClient(Protocol):
    """What a handler uses of a connection. It is told apart by identity, so one client may have an old and a new."""

    identity: Identity | None

    @property
    def client_id(self) -> str: ...

    def send_control(self, topic: str, payload: bytes) -> None:
        """A PUBLISH past the session, at QoS 0: a client that cannot take it now goes without."""


class Answer(Protocol):
    """How a PUBLISH is answered, once."""

    def __call__(self, reason: int, why: str, *, end: bool = False) -> None:
        """`end`: a client of MQTT 3, which has no words for a refusal, is disconnected."""


class ControlHandler(Protocol):
    """Whoever answers for the topics under one prefix."""

    def publish(self, client: ControlClient, topic: str, payload: bytes, retain: bool, answer: Answer) -> None: ...

    def subscribe(self, client: ControlClient, topic: str, start: Start | None, key: Key | None) -> int: ...

    def unsubscribe(self, client: ControlClient, topic: str) -> bool: ...

    def is_read(self, topic_filter: str) -> bool: ...

    def gone(self, client: ControlClient) -> None: ...


class ControlTopics:
    """The table: prefix -> handler."""

    def __init__(self) -> None:
        self._handlers: dict[str, ControlHandler] = {}

    def register(self, prefix: str, handler: ControlHandler) -> None:
        """From now on topics that begin with `prefix` are the handler's."""
        if not prefix.startswith("$") or not prefix.endswith("/"):
            raise ValueError(f"expected a prefix like $name/, got {prefix!r}")
        for other in self._handlers:
            if prefix.startswith(other) or other.startswith(prefix):
                raise ValueError(f"{prefix!r} and {other!r} overlap")
        self._handlers[prefix] = handler

    def handler(self, topic: str) -> ControlHandler | None:
        if topic[:1] != "$":
            return None
        for prefix, handler in self._handlers.items():
            if topic.startswith(prefix):
                return handler
        return None

    def reader(self, topic_filter: str) -> ControlHandler | None:
        """Who answers a SUBSCRIBE or UNSUBSCRIBE; None: it is an ordinary one."""
        handler = self.handler(topic_filter)
        return None if handler is None or handler.is_read(topic_filter) else handler

    def gone(self, client: ControlClient) -> None:
        for handler in self._handlers.values():
            handler.gone(client)
