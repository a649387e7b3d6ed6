"""What happens to campaigns, as messages in the log: whoever runs a fleet can subscribe to it, or read it later.

$fanout/events/{request_id}/{number}    {"request_id", "number", "state", "reason"}
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from holdfast.fanout.history import PUBLISHER
from holdfast.fanout.nouns import Campaign, State

EVENTS = "$fanout/events/"
Publish = Callable[[str, str, bytes, int, bytes | None, Callable[[bool], None] | None], None]


class FanoutEvents:
    """Says a change after it is durable; one that a crash swallows can be seen from the campaign itself."""

    def __init__(self, publish: Publish):
        self._publish = publish

    def changed(self, before: Campaign, now: Campaign) -> None:
        if (before.state, before.reason) != (now.state, now.reason):
            self.say(now.request_id, now.number, now.state, now.reason)

    def say(self, request_id: str, number: int, state: State, reason: str) -> None:
        event = {"request_id": request_id, "number": number, "state": state.value, "reason": reason}
        self._publish(PUBLISHER, f"{EVENTS}{request_id}/{number}", msgspec.json.encode(event), 1, None, None)
