"""The promises of sessions as clients see them, checked at every change of a row and at every CONNACK.

session present     exactly if there was a session that had not ended, and the client did not ask for a new one
"""

from __future__ import annotations

from dataclasses import dataclass

from holdfast.sessions.life import Connect, Welcome
from holdfast.sessions.table import RowWrite, SessionRow
from holdfast.sim.checkers import Violation
from holdfast.sim.front.world import World


@dataclass(slots=True)
class Attempt:
    """One CONNECT, and what became of its connection."""

    connect: Connect
    client: str
    over: bool = False


class Lives:
    def __init__(self, world: World):
        self.world = world
        self.attempts: dict[str, Attempt] = {}

    def fail(self, promise: str, what: str) -> None:
        raise Violation(f"{promise}: {what}")

    def arrived(self, client: str, connect: Connect) -> None:
        self.attempts[connect.token] = Attempt(connect, client)

    def over(self, token: str, *, by_node: bool = False, goodbye: bool = False, expiry_secs: int | None = None) -> None:
        self.attempts[token].over = True

    def process_ended(self) -> None:
        for attempt in self.attempts.values():
            attempt.over = True

    def welcomed(self, welcome: Welcome) -> None:
        attempt = self.attempts[welcome.token]
        if attempt.connect.clean_start and welcome.session_present:
            self.fail("session present", f"{welcome.token} asked for a new one")

    def committed(self, old: SessionRow | None, new: SessionRow, write: RowWrite) -> None: ...
