"""Empties a node for a restart: what its machine (`sessions.drain`) decides is done here."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from holdfast.errors import HoldfastError
from holdfast.machine import TICK
from holdfast.sessions import drain
from holdfast.sessions.drain import TURN_SECONDS, Drain, State

if TYPE_CHECKING:
    from holdfast.runtime.groups import GroupHost
    from holdfast.runtime.sessions import Sessions
    from holdfast.runtime.supervisor import Supervisor

logger = logging.getLogger("holdfast.node")

LOOK_SECONDS = 1.0
"""How often a node that is drained looks who else is there."""
MORE_SECONDS = 2.0
"""Leaders have as long as members have to give streams back, and this much more."""


class DrainHost:
    """One per node; nothing happens before `begin`."""

    def __init__(
        self,
        sessions: Sessions,
        groups: GroupHost,
        hand_over_secs: float,
        refuse: Callable[[str], None],
        others: Callable[[], list[str]],
        supervisor: Supervisor,
    ):
        self._sessions, self._groups, self._hand_over_secs = sessions, groups, hand_over_secs + MORE_SECONDS
        self._refuse, self._others, self._supervisor = refuse, others, supervisor
        self._machine = Drain()
        self._server = ""
        self._look_at = 0.0
        self.emptied = asyncio.Event()

    @property
    def state(self) -> State:
        return self._machine.state

    @property
    def clients(self) -> int:
        """Those that are connected, and those whose session is not saved yet."""
        return len(self._sessions.held())

    def begin(self, server: str, clients_per_sec: float) -> None:
        """Asked again, another pace and another server hold from now on."""
        self._server = server
        if self.state is not State.SERVING:
            self._refuse(server)
        self._handle(drain.Begin(clients_per_sec, self._hand_over_secs))

    def _handle(self, event: drain.Event) -> None:
        for effect in self._machine.handle(event, time.monotonic()):
            match effect:
                case drain.RefuseClients():
                    logger.info("this node is drained: clients are sent to %s", self._server or "another server")
                    self._refuse(self._server)
                case drain.HandOver():
                    self._supervisor.run("drain", self._run)
                case drain.Move(count):
                    self._sessions.move(count)
                case drain.Emptied():
                    logger.info("this node is empty")
                    self.emptied.set()

    async def _run(self) -> None:
        """Until the node ends: even one that is empty is asked for groups."""
        while True:
            now = time.monotonic()
            if now >= self._look_at:
                self._look_at = now + LOOK_SECONDS
                await self._look_at_groups()
            self._handle(TICK)
            if self.state is State.MOVING:
                self._handle(drain.Look(self.clients, len(self._sessions.connections)))
            await asyncio.sleep(LOOK_SECONDS if self.state is State.EMPTY else TURN_SECONDS)

    async def _look_at_groups(self) -> None:
        try:
            others = await asyncio.get_running_loop().run_in_executor(None, self._others)
        except HoldfastError as error:
            logger.warning("nobody knows which other nodes there are: %s", error)
            return
        if self._groups.yield_to(others):
            self._handle(drain.HandedOver())
