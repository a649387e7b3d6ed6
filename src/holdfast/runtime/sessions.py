"""The sessions of this node: who is connected, who is away, and when a session ends."""

from __future__ import annotations

import asyncio
import heapq
import itertools
import logging
import time
from collections.abc import Callable, Coroutine
from typing import Any, Protocol

from holdfast.errors import HoldfastError, PeerError
from holdfast.groups.protocol.nouns import GroupId
from holdfast.groups.shares import parse_share
from holdfast.log import Log
from holdfast.model import Stream
from holdfast.mqtt import packets as p
from holdfast.mqtt.connection import Say
from holdfast.mqtt.reasons import Reason
from holdfast.runtime.connection import Connection
from holdfast.runtime.delivery import DeliveryHost, rows_of
from holdfast.runtime.keeper import Keeper
from holdfast.runtime.notices import Gone, Notices, Resumed
from holdfast.runtime.wills import Wills
from holdfast.sessions.outgoing import RetainedOrigin
from holdfast.sessions.positions import Gap, StreamOrigin
from holdfast.sessions.records import SessionRecord, record_of
from holdfast.sessions.rows import Rows
from holdfast.sessions.session import NEVER, Session
from holdfast.sessions.shared import LoanFeed
from holdfast.sessions.subscriptions import Subscription
from holdfast.sessions.window import RELEASED, Delivery
from holdfast.settings import SessionSettings

logger = logging.getLogger("holdfast.sessions")

Welcomed = Callable[[Session, bool], None]
"""Called when the session is the client's; says so to it."""


class SharedGroups(Protocol):
    """What sessions use of the shared groups."""

    async def join(
        self, connection: Connection, session: Session, group: GroupId, subscription: Subscription
    ) -> None: ...

    def leave(self, connection: Connection, *, may_return: bool = False) -> None: ...

    def returned(self, connection: Connection, session: Session) -> None: ...

    def session_ended(self, session: Session) -> None: ...


class Sessions:
    def __init__(
        self,
        settings: SessionSettings,
        sessions_max: int,
        log: Log,
        delivery: DeliveryHost,
        keeper: Keeper,
        wills: Wills,
        groups: SharedGroups,
        groups_enabled: bool,
        notices: Notices,
        spawn: Callable[[Coroutine[Any, Any, Any]], None],
    ):
        self._settings, self._sessions_max, self._log = settings, sessions_max, log
        self._delivery, self._keeper, self._wills = delivery, keeper, wills
        self._groups, self._groups_enabled = groups, groups_enabled
        self._notices, self._spawn = notices, spawn
        self.known: dict[str, Session] = {}
        self.connections: dict[str, Connection] = {}
        """Open connections by client id."""
        self.stored: dict[str, SessionRecord] = {}
        """Sessions of earlier runs that nobody has come back for yet."""
        self.closing = False
        self._locks: dict[str, asyncio.Lock] = {}
        self._expiries: list[tuple[float, int, str]] = []
        self._order = itertools.count()

    def __len__(self) -> int:
        return len(self.known) + len(self.stored)

    async def load(self) -> None:
        """What an earlier run left."""
        for record in await self._keeper.call(self._keeper.load_all):
            self.stored[record.client_id] = record
            if record.connected:
                record.disconnected_at = time.time()
            self._expire_later(record.client_id, record.disconnected_at, record.expiry_seconds)
            for subscription in record.subscriptions:
                self._delivery.machine.away.add(subscription.filter, record.client_id)

    def bounded_expiry(self, seconds: int) -> int:
        limit = self._settings.expiry_secs_max
        return min(seconds, limit) if limit else seconds

    # -- a client comes ----------------------------------------------------------------------------------

    async def join(self, connection: Connection, packet: p.Connect, client_id: str, welcomed: Welcomed) -> None:
        lock = self._locks.setdefault(client_id, asyncio.Lock())
        try:
            async with lock:
                await self._join(connection, packet, client_id, welcomed)
        finally:
            if not lock.locked() and not getattr(lock, "_waiters", None):
                self._locks.pop(client_id, None)

    async def _join(self, connection: Connection, packet: p.Connect, client_id: str, welcomed: Welcomed) -> None:
        session, present = await self._session_for(packet, client_id)
        expiry = session.expiry_seconds
        try:
            again = await self._prepare(connection, packet, session, present)
        except Exception:
            self._not_welcome(connection, session, present, expiry)
            raise
        if again is None:
            self._not_welcome(connection, session, present, expiry)
            return
        self._wills.withdraw(client_id)
        self.connections[client_id] = connection
        welcomed(session, present)
        if not connection.machine.open or connection.outlet is None:
            return
        connection.handle(Say(again(connection.version, connection.outlet.packet_max)))
        self._groups.returned(connection, session)
        self._delivery.attach(connection.outlet, connection)
        self._notices.emit(Resumed(client_id, present))
        if self._groups_enabled:
            for filter_text, subscription in session.subscriptions.shared.items():
                await self._groups.join(connection, session, parse_share(filter_text), subscription)

    async def _prepare(
        self, connection: Connection, packet: p.Connect, session: Session, present: bool
    ) -> Callable[[int, int], bytes] | None:
        """Everything before the welcome; what is to be sent again after it. None: the client has gone meanwhile."""
        client_id, was_durable = session.client_id, session.durable
        session.epoch += 1
        session.expiry_seconds = self.bounded_expiry(effective_expiry(packet))
        if session.durable:
            await self._keeper.save(record_of(session, connected=True, now=time.time()))
        elif was_durable and present:
            await self._keeper.forget(client_id, session.subscriptions.filters, self._delivery.heads)
        will = packet.will
        kept = self._wills.keep(connection, client_id, will, min(will.delay, session.expiry_seconds) if will else 0)
        if kept is not None:
            await kept
        again = await self._under_way(session)
        if connection.closed or connection.transport.is_closing():
            return None
        self._trimmed(session, session.attach(self._delivery.machine.every_head(), time.time()))
        return again

    def _not_welcome(self, connection: Connection, session: Session, present: bool, expiry: int) -> None:
        """It went, or could not be taken, before it was told that it is welcome: nothing it asked for holds.

        A session that began with it ends with it, and one that was there goes on as it was.
        """
        self._wills.not_welcome(connection, session.client_id)
        session.expiry_seconds = expiry
        session.detach(self._delivery.heads, self._delivery.machine.sealed)
        if present:
            self._goes_on_alone(session)
        elif not self.closing:
            self._spawn(self._end(session.client_id, only=session))

    async def _session_for(self, packet: p.Connect, client_id: str) -> tuple[Session, bool]:
        """The session this CONNECT takes over or begins, and whether it was there."""
        old = self.connections.get(client_id)
        if old is not None:
            ended = old.session
            old.close(Reason.SESSION_TAKEN_OVER)
            if ended is not None and not ended.durable:
                await self._discard(client_id, only=ended)  # it ended with its connection: nothing to take over
        record = self.stored.get(client_id)
        overdue = record is not None and record.disconnected_at + record.expiry_seconds <= time.time()
        if packet.clean_start or (overdue and record is not None and record.expiry_seconds != NEVER):
            await self._discard(client_id)  # its time may have come while nobody was here to see it
        session = self.known.get(client_id)
        if session is None and client_id in self.stored:
            record = self.stored[client_id]
            heads = dict(self._delivery.machine.every_head())
            session = await self._keeper.call(self._keeper.restore, record, heads)
            self.stored.pop(client_id, None)
            self.known[client_id] = session
        if session is not None:
            return session, True
        if len(self) >= self._sessions_max:
            raise PeerError("too many sessions", Reason.QUOTA_EXCEEDED)
        session = self.known[client_id] = Session(client_id, 0, epoch=0)
        session.positions.generation = max((s.generation for s in self._delivery.heads), default=0)
        return session, False

    def _trimmed(self, session: Session, gaps: list[Gap]) -> None:
        """Retention was faster than this session: a record is kept, and the policy decides how it goes on."""
        for gap in gaps:
            logger.warning("%s: %s from offset %d on is gone: %s", session.client_id, gap.stream, gap.first, gap.reason)
        if gaps and self._settings.on_trimmed == "error":
            raise PeerError("messages this session had not read were dropped", Reason.IMPLEMENTATION_SPECIFIC_ERROR)
        if gaps and self._settings.on_trimmed == "latest":
            session.positions.behind.clear()

    async def _under_way(self, session: Session) -> Callable[[int, int], bytes]:
        """What was sent and not acknowledged, fetched from the log again: as packets, in the order it was sent."""
        found: list[tuple[int, Delivery, Rows | None, int]] = []
        loop = asyncio.get_running_loop()
        for packet_id, delivery in session.in_flight():
            rows, at = None, 0
            if isinstance(delivery.origin, RetainedOrigin):
                rows, at = delivery.origin.rows, delivery.offset
            elif isinstance(delivery.origin, StreamOrigin | LoanFeed):
                rows = await loop.run_in_executor(None, self.read_one, delivery.origin.stream, delivery.offset)
                if rows is None:
                    session.window.drop(packet_id)
                    continue
            if rows is not None or delivery.qos == RELEASED:
                found.append((packet_id, delivery, rows, at))

        def packets(version: int, packet_max: int) -> bytes:
            now = time.time()
            out = [session.outgoing.again(i, delivery, rows, at, version, now) for i, delivery, rows, at in found]
            return b"".join(packet for packet in out if len(packet) <= packet_max)

        return packets

    def read_one(self, stream: Stream, offset: int) -> Rows | None:
        """On a thread."""
        try:
            reading = self._log.read(stream, offset, rows_max=1)
        except HoldfastError as error:
            logger.warning("a delivery under way cannot be sent again: %s", error)
            return None
        return rows_of(reading.chunks[0]) if reading.chunks else None

    # -- a client goes -----------------------------------------------------------------------------------

    def leave(self, connection: Connection, expiry: int | None) -> None:
        """The connection is over; what happens to its session depends on its expiry."""
        session, outlet = connection.session, connection.outlet
        if session is None:
            return
        if expiry is not None:
            session.expiry_seconds = self.bounded_expiry(expiry)
        self._groups.leave(connection, may_return=session.durable and not self.closing)
        connection.session = connection.outlet = None
        client_id = session.client_id
        if self.connections.get(client_id) is connection:
            del self.connections[client_id]
        if outlet is not None:
            self._delivery.detach(outlet, away=session.durable)
        session.detach(self._delivery.heads, self._delivery.machine.sealed)
        will = connection.will
        self._wills.left(connection, client_id, will, min(will.delay, session.expiry_seconds) if will else 0)
        self._notices.emit(Gone(client_id, not session.durable))
        self._goes_on_alone(session)

    def _goes_on_alone(self, session: Session) -> None:
        """Until it expires, which may be at once."""
        if self.closing:
            return
        if not session.durable:
            self._spawn(self._end(session.client_id, only=session))
            return
        session.positions.dirty.update(session.positions.behind)
        self._expire_later(session.client_id, time.time(), session.expiry_seconds)
        self._spawn(self._save_away(session, session.epoch))

    async def _save_away(self, session: Session, epoch: int) -> None:
        if self.known.get(session.client_id) is not session:
            return  # it has ended meanwhile: what was deleted must stay so
        await self._keeper.flush([session], self._delivery.heads)
        # Whoever is coming back has said so in the store: it is not to read that the client is away.
        if session.epoch == epoch and self.known.get(session.client_id) is session:
            try:
                await self._keeper.save(record_of(session, connected=False, now=time.time()))
            except HoldfastError as error:  # what is stored says that it is connected, as if the node had been killed
                logger.warning("that %s is away could not be stored: %s", session.client_id, error)

    async def _discard(self, client_id: str, only: Session | None = None) -> None:
        """The session ends: subscriptions, cursors and record go with it."""
        session = self.known.get(client_id)
        if only is not None and session is not only:
            return
        record = self.stored.pop(client_id, None)
        if session is not None:
            del self.known[client_id]
            self._groups.session_ended(session)
        filters = [s.filter for s in record.subscriptions] if record else []
        filters += session.subscriptions.filters if session else []
        for filter_text in filters:
            self._delivery.machine.away.remove(filter_text, client_id)
        self._wills.session_ended(client_id)
        await self._keeper.forget(client_id, filters, self._delivery.heads)

    async def _end(self, client_id: str, only: Session | None = None) -> None:
        """As `_discard`, where nobody waits for it: the keeper goes on trying."""
        try:
            await self._discard(client_id, only)
        except HoldfastError as error:
            logger.warning("the session of %s is over, but not deleted yet: %s", client_id, error)

    def group_deleted(self, connection: Connection, session: Session, group: GroupId) -> None:
        """A group of this session is no more: the subscription goes, and the client is told the hard way."""
        shared = session.subscriptions.shared
        for filter_text in [text for text in shared if parse_share(text) == group]:
            del shared[filter_text]
        if session.durable:
            self._keeper.save(record_of(session, connected=connection.session is session, now=time.time()))
        connection.close(Reason.ADMINISTRATIVE_ACTION)

    # -- time --------------------------------------------------------------------------------------------

    def _expire_later(self, client_id: str, since: float, expiry_seconds: int) -> None:
        if expiry_seconds == NEVER:
            return
        heapq.heappush(self._expiries, (since + expiry_seconds, next(self._order), client_id))
        if len(self._expiries) > 1000 + 4 * len(self):
            # Whoever comes and goes leaves an entry each time: only the last one counts.
            self._expiries = list({entry[2]: entry for entry in sorted(self._expiries)}.values())
            heapq.heapify(self._expiries)

    async def expire_due(self) -> None:
        """End the sessions whose time has come."""
        while self._expiries and self._expiries[0][0] <= time.time():
            await self._expire(heapq.heappop(self._expiries)[2])

    async def _expire(self, client_id: str) -> None:
        """Its time may have come; unless it is back, is just coming back, or left again later."""
        if client_id in self.connections or client_id in self._locks:
            return
        record, session = self.stored.get(client_id), self.known.get(client_id)
        overdue = record is not None and record.disconnected_at + record.expiry_seconds <= time.time()
        left_again = any(entry[2] == client_id for entry in self._expiries)
        if overdue or (session is not None and not left_again):
            await self._end(client_id)

    async def flush(self) -> int:
        """Save the cursors that have moved; how many."""
        dirty = [s for s in self.known.values() if s.positions.dirty]
        return await self._keeper.flush(dirty, self._delivery.heads) if dirty else 0

    async def save_all(self) -> None:
        """At a clean stop: cursors, and what is in flight."""
        sessions = [s for s in self.known.values() if s.durable]
        for session in sessions:
            session.positions.dirty.update(self._delivery.heads)
        await self._keeper.flush(sessions, self._delivery.heads)
        now = time.time()
        saves = [self._keeper.save(record_of(s, connected=False, now=now, clean_stop=True)) for s in sessions]
        if saves:
            await asyncio.wait(saves)


def effective_expiry(packet: p.Connect) -> int:
    """How long the session outlives the connection, as the client asked."""
    if packet.version == p.V5:
        return packet.properties.get("session_expiry", 0)
    return 0 if packet.clean_start else NEVER
