"""Groups as operators see them: declared, described, sought in, deleted, wherever their leader is."""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from typing import TYPE_CHECKING

from holdfast.errors import HoldfastError, RequestError
from holdfast.groups.protocol import messages as m
from holdfast.groups.protocol.nouns import GroupId, Policy
from holdfast.groups.protocol.view import GroupView, StreamHead
from holdfast.groups.record import GroupRecord, expired, record_key
from holdfast.machine import Address
from holdfast.model import At, Beginning, Next, Start, Stream
from holdfast.runtime.dispatch import rows_of
from holdfast.runtime.ingest import LOG

if TYPE_CHECKING:
    from holdfast.runtime.groups import GroupHost

logger = logging.getLogger("holdfast.groups")

ASK_SECONDS = 10.0


class GroupAdmin:
    def __init__(self, host: GroupHost):
        self._host = host

    async def declare(
        self,
        group: GroupId,
        start: Start | None = None,
        order: str = "strict",
        ack_timeout_seconds: float | None = None,
        attempts_max: int | None = None,
        idle_seconds_max: float | None = None,
    ) -> GroupRecord:
        """The group, made if it does not exist; it persists from that moment, with no member yet."""
        return await self._host.off(  # type: ignore[no-any-return]
            self._declare, group, start, order, Policy(ack_timeout_seconds, attempts_max), idle_seconds_max
        )

    def _declare(
        self, group: GroupId, start: Start | None, order: str, policy: Policy, idle_seconds_max: float | None
    ) -> GroupRecord:
        while True:
            entry = self._host.metadata.get(record_key(group))
            if entry is not None:
                return GroupRecord.from_json(entry.value)
            record = GroupRecord(
                group=group,
                born=uuid.uuid4().hex,
                log=LOG,
                order=order,  # type: ignore[arg-type]
                starts=self._host.log.positions(LOG, start or Next(), group.filter),
                policy=policy,
                idle_seconds_max=idle_seconds_max,
            )
            if self._host.metadata.compare_and_set(record_key(group), None, record.to_json(time.time())) is not None:
                return record

    async def exists(self, group: GroupId) -> bool:
        return await self._host.off(self._host.metadata.get, record_key(group)) is not None

    async def groups(self) -> list[GroupRecord]:
        """Every declared group."""
        entries = await self._host.off(self._host.metadata.list, "/holdfast/groups/")
        return [GroupRecord.from_json(e.value) for key, e in entries.items() if key.endswith("/record")]

    async def ask(self, group: GroupId, what: m.Request) -> GroupView | None:
        """Put a question to the group's leader, wherever it is; a RequestError says why not."""
        if not await self.exists(group):
            raise RequestError(f"there is no group {str(group)!r}")
        request = uuid.uuid4().hex
        waiting: asyncio.Future[m.Answer] = asyncio.get_running_loop().create_future()
        self._host.asks[request] = waiting
        ask = m.Ask(request, Address(self._host.node_id, "asker"), group, what, time.monotonic(), ASK_SECONDS)
        try:
            give_up = time.monotonic() + ASK_SECONDS
            while time.monotonic() < give_up:
                self._host.send(Address(self._host.node_id, "registry"), ask)
                done, _ = await asyncio.wait([waiting], timeout=0.5)
                if done:
                    answer = waiting.result()
                    if answer.error:
                        raise RequestError(f"group {str(group)!r}: {answer.error}")
                    return answer.view
            raise HoldfastError(f"the leader of group {str(group)!r} did not answer within {ASK_SECONDS:.0f} s")
        finally:
            del self._host.asks[request]

    async def describe(self, group: GroupId) -> GroupView:
        """Who holds what. A leader that has just begun is given a moment to see its streams."""
        give_up = time.monotonic() + 2
        while True:
            view = await self.ask(group, m.Describe())
            assert view is not None
            if view.pieces or view.finished or time.monotonic() > give_up:
                return view
            await asyncio.sleep(0.05)

    async def heads_for(self, view: GroupView) -> dict[Stream, StreamHead]:
        """How far the streams go, and how old what the group has not acknowledged is."""
        return await self._host.off(self._heads_for, view)  # type: ignore[no-any-return]

    def _heads_for(self, view: GroupView) -> dict[Stream, StreamHead]:
        floors: dict[Stream, int] = {}
        for piece, _, _, mark in view.pieces:
            floors[piece.stream] = min(floors.get(piece.stream, mark.offset), mark.offset)
        found = {}
        for head in self._host.log.heads(LOG):
            oldest = None
            at = floors.get(head.stream, head.next_offset) + 1
            if at < head.next_offset:
                chunks = self._host.log.read(head.stream, at, rows_max=1, on_corrupt="skip").chunks
                times = rows_of(chunks[0]).times if chunks else None
                oldest = times[0] if isinstance(times, list) else None
            found[head.stream] = StreamHead(head.next_offset, head.sealed, oldest)
        return found

    async def seek(self, group: GroupId, start: Start) -> None:
        offsets = await self._host.off(self._host.log.positions, LOG, start, group.filter)
        if isinstance(start, Beginning):
            offsets = {}
        elif isinstance(start, At):
            offsets = {**offsets, **dict(start.offsets)}
        await self.ask(group, m.Seek(tuple(sorted(offsets.items()))))

    async def expire_idle(self) -> None:
        """Groups that nobody has used for longer than they allow."""
        entries = await self._host.off(self._host.metadata.list, "/holdfast/groups/")
        for key, entry in entries.items():
            if key.endswith("/record") and expired(entry.value, time.time()):
                group = GroupRecord.from_json(entry.value).group
                try:
                    await self.ask(group, m.DeleteGroup(if_idle=True))
                except HoldfastError as error:
                    logger.info("idle group %s stays: %s", group, error)
