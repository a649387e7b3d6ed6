"""Groups as operators see them: declared, described, sought in, deleted, wherever their leader is."""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import Callable
from typing import Any

from holdfast.errors import Conflict, HoldfastError, RequestError
from holdfast.groups.protocol import messages as m
from holdfast.groups.protocol.nouns import GroupId, Key
from holdfast.groups.protocol.view import GroupView, StreamHead, first_unacked
from holdfast.groups.record import GroupRecord, expired, may_be_deserted
from holdfast.log import Log
from holdfast.machine import Address
from holdfast.model import LOG, Start, Stream
from holdfast.runtime.block_rows import rows_of
from holdfast.runtime.group_store import Gap, GroupOptions, GroupStore

logger = logging.getLogger("holdfast.groups")

ASK_AGAIN_SECONDS = 0.5

OnThread = Callable[..., asyncio.Future[Any]]


class GroupAdmin:
    """Questions to leaders, and the records of groups."""

    def __init__(
        self,
        *,
        node_id: str,
        store: GroupStore,
        on_thread: OnThread,
        on_bulk_thread: OnThread,
        send: Callable[[Address, Any], None],
        ask_seconds: float,
    ):
        self._node_id, self._store, self._send = node_id, store, send
        self._on_thread, self._on_bulk_thread = on_thread, on_bulk_thread
        self._ask_seconds = ask_seconds
        self._asked: dict[str, asyncio.Future[m.Answer]] = {}

    async def declare(self, group: GroupId, start: Start | None = None, key: Key = "publisher") -> GroupRecord:
        """The group as it is, or made with this key and the usual options; it persists from that moment on."""
        record, _ = await self._on_thread(self._store.declare, group, start, GroupOptions(key=key))
        return record  # type: ignore[no-any-return]

    async def create(self, group: GroupId, start: Start | None, options: GroupOptions) -> tuple[GroupRecord, bool]:
        """The group with these options, and whether it is new; a Conflict says what differs if it has others.

        Where a group began is not compared: `latest` means another place each time.
        """
        record, new = await self._on_thread(self._store.declare, group, start, options)
        different = [] if new else GroupOptions.of_record(record).differences(options)
        if different:
            raise Conflict(f"group {str(group)!r} exists, and its {'; its '.join(different)}")
        return record, new

    async def exists(self, group: GroupId) -> bool:
        return await self._on_thread(self._store.record, group) is not None

    async def groups(self) -> list[GroupRecord]:
        """Every declared group."""
        return [GroupRecord.from_json(data) for data in (await self._on_bulk_thread(self._store.records)).values()]

    async def ask(self, group: GroupId, what: m.Request) -> GroupView | None:
        """Put a question to the group's leader, wherever it is; a RequestError says why not."""
        if not await self.exists(group):
            raise RequestError(f"there is no group {str(group)!r}")
        request = uuid.uuid4().hex
        waiting: asyncio.Future[m.Answer] = asyncio.get_running_loop().create_future()
        self._asked[request] = waiting
        ask = m.Ask(request, Address(self._node_id, "asker"), group, what, time.monotonic(), self._ask_seconds)
        try:
            give_up = time.monotonic() + self._ask_seconds
            while time.monotonic() < give_up:
                self._send(Address(self._node_id, "registry"), ask)
                done, _ = await asyncio.wait([waiting], timeout=ASK_AGAIN_SECONDS)
                if done:
                    answer = waiting.result()
                    if answer.error:
                        raise RequestError(f"group {str(group)!r}: {answer.error}")
                    return answer.view
            raise HoldfastError(f"the leader of group {str(group)!r} did not answer within {self._ask_seconds:.0f} s")
        finally:
            del self._asked[request]

    def answered(self, answer: m.Answer) -> None:
        """A leader's answer to one of our questions."""
        waiting = self._asked.get(answer.request)
        if waiting is not None and not waiting.done():
            waiting.set_result(answer)

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
        return await self._on_bulk_thread(_heads_for, self._store, view)  # type: ignore[no-any-return]

    async def skipped(self, group: GroupId) -> list[Gap]:
        """What retention dropped before the group had read it."""
        return await self._on_bulk_thread(self._store.skipped, group)  # type: ignore[no-any-return]

    async def seek(self, group: GroupId, start: Start) -> None:
        offsets, from_generation = await self._on_bulk_thread(self._store.positions, start, group.filter)
        await self.ask(group, m.Seek(tuple(sorted(offsets.items())), from_generation))

    async def expire_idle(self) -> None:
        """Groups that nobody has used for longer than they allow."""
        records = await self._on_bulk_thread(self._store.records)
        led = await self._on_bulk_thread(self._store.led)
        for group, data in records.items():
            if group not in led and may_be_deserted(data):
                # Its leader died, and nobody has come since: perhaps the members died with it. A new one will see.
                await self._look_at(group)
            elif expired(data, self._store.log.steady() / 1e6):
                try:
                    await self.ask(group, m.DeleteGroup(if_idle=True))
                except HoldfastError as error:
                    logger.info("idle group %s stays: %s", group, error)

    async def _look_at(self, group: GroupId) -> None:
        try:
            await self.ask(group, m.Describe())
        except HoldfastError as error:
            logger.info("group %s was not looked at: %s", group, error)


def _heads_for(store: GroupStore, view: GroupView) -> dict[Stream, StreamHead]:
    floors: dict[Stream, int] = {}
    for piece, _, _, mark in view.pieces:
        first = first_unacked(view.key, piece, mark)
        floors[piece.stream] = min(floors.get(piece.stream, first), first)
    found = {}
    for head in store.log.heads(LOG):
        oldest = None
        at = floors.get(head.stream, head.next_offset)
        if at < head.next_offset:
            oldest = _time_of(store.log, head.stream, at)
        found[head.stream] = StreamHead(head.next_offset, head.sealed, oldest)
    for head in store.history.heads(LOG):
        if head.stream not in found:
            found[head.stream] = StreamHead(head.next_offset, True, None)
    return found


def _time_of(log: Log, stream: Stream, at: int) -> int | None:
    chunks = log.read(stream, at, rows_max=1, on_corrupt="skip").chunks
    times = rows_of(chunks[0]).times if chunks else None
    return times[0] if isinstance(times, list) else None
