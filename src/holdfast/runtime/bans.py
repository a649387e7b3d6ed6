"""Bans as every node of a cluster keeps them: stored in the metadata store, with a copy here that is never far behind.

Whoever changes a ban changes one more key in the same transaction. Each node looks at that key every second, and reads
all bans if it has moved. While the store is away the last copy stays in force.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import msgspec

from holdfast.auth.bans import Ban, Bans, Kind, check_kind, check_name, make_ban
from holdfast.errors import HoldfastError, UnknownBan
from holdfast.keys import BANS, BANS_CHANGED, ban_key
from holdfast.metadata import Delete, Entry, Metadata, Put, VersionMismatch

logger = logging.getLogger("holdfast.bans")

LOOK_SECONDS = 1.0

T = TypeVar("T")


class BanHost:
    """One per node. `clock` is the store's, as this node believes it; `made` is told of bans that are new here."""

    def __init__(self, metadata: Metadata, clock: Callable[[], float], made: Callable[[list[Ban]], None]):
        self._metadata, self._clock, self._made = metadata, clock, made
        self.table = Bans()
        self._seen: int | None = None
        """The version of BANS_CHANGED that the table is not older than; None: there were never any bans."""
        self._loop = asyncio.get_running_loop()
        # A thread of its own: the others may all be busy with the passwords of those who are to be banned. And one
        # thread only, so a copy is never replaced by an older one.
        self._pool = ThreadPoolExecutor(1, "holdfast-bans")

    async def begin(self) -> None:
        """Before anybody is let in. HoldfastError if the bans cannot be read."""
        await self._call(self._look)

    async def run(self) -> None:
        """For ever. A store that is away is asked again."""
        while True:
            await asyncio.sleep(LOOK_SECONDS)
            try:
                await self._call(self._look_after)
            except HoldfastError as error:
                logger.warning("bans cannot be read just now, those known stay in force: %s", error)

    async def all(self) -> list[Ban]:
        """Those in force, as the store has them."""
        now = self._clock()
        found = [ban for ban in await self._call(self._read) if not ban.ended(now)]
        return sorted(found, key=lambda ban: (ban.kind, ban.name))

    async def add(self, kind: str, name: str, reason: str, secs: float | None) -> Ban:
        """Durable, and in force on this node; on the others a look later. One that is there is replaced."""
        ban = make_ban(kind, name, reason, secs, self._clock())
        await self._call(lambda: self._store(ban))
        return ban

    async def lift(self, kind: str, name: str) -> None:
        """It bans nobody any more. UnknownBan if there is none."""
        known = check_kind(kind)
        wanted = check_name(known, name)
        if not await self._call(lambda: self._remove(known, wanted)):
            raise UnknownBan(f"there is no ban of {kind} {wanted[:100]!r}")

    def close(self) -> None:
        self._pool.shutdown(wait=False)

    # -- on the thread -------------------------------------------------------------------------------------

    async def _call(self, work: Callable[[], T]) -> T:
        return await self._loop.run_in_executor(self._pool, work)

    def _look_after(self) -> None:
        self._look()
        self._forget()

    def _look(self) -> None:
        changed = self._metadata.get(BANS_CHANGED)
        version = None if changed is None else changed.version
        if version == self._seen:
            return
        # What changes after this look has another version: at worst the same is read twice.
        new = self.table.replace(self._read())
        self._seen = version
        if new:
            with contextlib.suppress(RuntimeError):  # the loop has been closed: nobody is connected any more
                self._loop.call_soon_threadsafe(self._made, new)

    def _read(self) -> list[Ban]:
        found = []
        for key, entry in self._metadata.list(BANS).items():
            ban = _decoded(key, entry)
            if ban is not None:
                found.append(ban)
        return found

    def _store(self, ban: Ban) -> None:
        self._metadata.transact([Put(ban_key(ban.kind, ban.name), msgspec.json.encode(ban)), Put(BANS_CHANGED, b"")])
        self._look_at_change()

    def _remove(self, kind: Kind, name: str) -> bool:
        """Whether there was one, and in force."""
        key = ban_key(kind, name)
        entry = self._metadata.get(key)
        if entry is None:
            return False
        found = self._metadata.transact([Delete(key), Put(BANS_CHANGED, b"")])
        self._look_at_change()
        ban = _decoded(key, entry)
        return found[0] is not None and not (ban is not None and ban.ended(self._clock()))

    def _look_at_change(self) -> None:
        try:
            self._look()
        except HoldfastError as error:  # it is done all the same: this node, like the others, sees it a little later
            logger.warning("bans cannot be read after a change: %s", error)

    def _forget(self) -> None:
        """Remove those that have ended, unless somebody has made them anew or removed them already."""
        now = self._clock()
        for old in self.table.due(now):
            key = ban_key(old.kind, old.name)
            entry = self._metadata.get(key)
            ban = None if entry is None else _decoded(key, entry)
            if entry is not None and ban is not None and ban.ended(now):
                with contextlib.suppress(VersionMismatch):
                    self._metadata.transact([Delete(key), Put(BANS_CHANGED, b"")], {key: entry.version})


def _decoded(key: str, entry: Entry) -> Ban | None:
    try:
        ban = msgspec.json.decode(entry.value, type=Ban)
        check_name(ban.kind, ban.name)
    except (msgspec.MsgspecError, HoldfastError) as error:
        logger.error("the ban at %s cannot be read, and bans nobody: %s", key, error)
        return None
    return ban
