"""A node: sessions and who is connected, wired to the log, the metadata store and the sockets."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import heapq
import itertools
import logging
import secrets
import time
from collections.abc import Callable, Coroutine
from typing import Any

from holdfast.auth import authenticator
from holdfast.auth.authenticator import Authenticator
from holdfast.auth.identity import CertificateSubject, Credentials, Identity, Refusal
from holdfast.cursors.cursor import cursor_key
from holdfast.errors import HoldfastError, PeerError
from holdfast.groups.protocol.nouns import GroupId
from holdfast.groups.shares import parse_share
from holdfast.log import open_log
from holdfast.log.retention import RetentionSettings, maintain
from holdfast.metadata import open_metadata
from holdfast.model import RETAIN, Stream
from holdfast.mqtt import packets as p
from holdfast.mqtt.reasons import Reason
from holdfast.runtime.batch_members import PREFIX, BatchMembers
from holdfast.runtime.connection import Connection, effective_expiry
from holdfast.runtime.control_topics import ControlTopics
from holdfast.runtime.dispatch import Dispatcher, rows_of
from holdfast.runtime.groups import GroupHost
from holdfast.runtime.ingest import LOG, Ingest
from holdfast.runtime.keeper import Keeper, SessionRecord, record_of
from holdfast.runtime.metrics import Metrics
from holdfast.runtime.notices import Notices
from holdfast.runtime.subscriptions import Subscriptions
from holdfast.runtime.supervisor import Supervisor
from holdfast.runtime.wills import Wills
from holdfast.sessions.retained import RetainedMessages
from holdfast.sessions.session import NEVER, Gap, Rows, Session
from holdfast.settings import AuthSettings, Settings
from holdfast.store.postgres import PostgresStore

logger = logging.getLogger("holdfast.node")

WILL_BYTES_MAX = 256 << 10
UPKEEP_RESTS = 4.0
"""Upkeep takes a fifth of the time, unless there is so much to do that it falls behind."""


class Node:
    def __init__(self, settings: Settings):
        self.settings = settings
        self.node_id = settings.node_id or f"node-{secrets.token_hex(4)}"
        self.log = open_log(settings.store_url)
        self.log.create(LOG, settings.log.shards, settings.log.shard_by)
        self.metadata = open_metadata(settings.metadata or self._shared_store())
        self.keeper = Keeper(self.metadata, settings.sessions.on_trimmed)
        shared = isinstance(self._shared_store(), PostgresStore)
        self.wills = Wills(self.keeper, (settings.node_id or None) if shared else "", self._publish_will)
        self.auth = Authenticator(auth_settings(settings.auth))
        self.names: dict[bytes, str] = {}
        """Topics by their bytes, shared by all connections that may publish anywhere."""
        self.sessions: dict[str, Session] = {}
        self.connections: dict[str, Connection] = {}
        """Open connections by client id."""
        self.subscriptions = Subscriptions(self)
        self.sockets: set[Connection] = set()
        self.stored: dict[str, SessionRecord] = {}
        """Sessions of earlier runs that nobody has come back for yet."""
        self.ready = False
        self.failure: str | None = None
        self.ended = asyncio.Event()
        """Something cannot be kept running: whoever serves this node should stop it."""
        self.supervisor = Supervisor(self._give_up)
        self.control_topics = ControlTopics()
        self.notices = Notices()
        self._locks: dict[str, asyncio.Lock] = {}
        self._tasks: set[asyncio.Task[Any]] = set()
        self._expiries: list[tuple[float, int, str]] = []
        self._order = itertools.count()
        self._stopping = False
        self._next_turn = 0.0

    def _shared_store(self) -> Any:
        return getattr(self.log.backend, "store", None) or "memory:"

    # -- start and stop ----------------------------------------------------------------------------------

    async def start(self) -> None:
        loop = asyncio.get_running_loop()
        self.now = loop.time
        self.retained = RetainedMessages(self.log.retained(LOG))
        self.dispatcher = Dispatcher(self.log, self.retained.see, self.settings.limits.pending_bytes_max)
        self.ingest = Ingest(
            self.log, self.settings.limits.batch_bytes_max, self.dispatcher.committed, self._commit_failed
        )
        self.groups = GroupHost(
            node_id=self.node_id,
            settings=self.settings.groups,
            log=self.log,
            metadata=self.metadata,
            delivery=self.dispatcher,
            supervisor=self.supervisor,
            spawn=self.spawn,
            group_deleted=self.group_deleted,
        )
        self.group_admin = self.groups.admin
        batch_members = BatchMembers(
            node_id=self.node_id,
            enabled=self.settings.groups.enabled,
            places_max=self.settings.limits.subscriptions_max,
            may_subscribe=self.auth.acl.may_subscribe,
            send=self.groups.send,
            declare=self.group_admin.declare,
            known_ends=lambda: self.dispatcher.known,
            find_ends=self.groups.find_ends,
            spawn=self.spawn,
        )
        self.groups.register("batch", batch_members.deliver)
        self.control_topics.register(PREFIX, batch_members)
        self.dispatcher.on_streams_changed = self.groups.streams_changed
        self.metrics = Metrics(self)
        self.dispatcher.start()
        self.groups.start()
        self.ingest.start()
        # Our own commits are dispatched by the ingest itself.
        self._watch = self.log.watch(
            lambda log: None if self.ingest.is_writing_here() else _from_thread(loop, self._hinted, log)
        )
        for record in await self.keeper.call(self.keeper.load_all):
            self.stored[record.client_id] = record
            if record.connected:
                record.disconnected_at = time.time()
            self._expire_later(record.client_id, record.disconnected_at, record.expiry_seconds)
            for subscription in record.subscriptions:
                self.dispatcher.away.add(subscription.filter, record.client_id)
        await self.keeper.call(self.wills.load, self.metadata)
        self.wills.send_due()
        self.spawn(self._tick())
        self.spawn(self._flush_cursors())
        self.spawn(self._upkeep())
        self.ready = True

    def _hinted(self, log: str) -> None:
        if log == LOG and not self._stopping:
            self.dispatcher.hint()

    async def stop(self) -> None:
        """A clean stop: clients are told, everything taken is durable, packet ids are remembered."""
        if self._stopping:
            return
        self._stopping, self.ready = True, False
        for connection in list(self.sockets):
            connection.will = None
            connection.close(Reason.SERVER_SHUTTING_DOWN)
        await self.ingest.close()
        await self.groups.stop()
        sessions = [s for s in self.sessions.values() if s.durable]
        for session in sessions:
            session.dirty.update(self.dispatcher.heads)
        await self.keeper.flush(sessions, self.dispatcher.heads)
        now = time.time()
        saves = [self.keeper.save(record_of(s, connected=False, now=now, clean_stop=True)) for s in sessions]
        if saves:
            await asyncio.wait(saves)
        await self.wills.settled()
        await self.supervisor.stop()
        for task in list(self._tasks):
            task.cancel()
        self._watch.close()
        self.dispatcher.close()
        self.keeper.close()
        self.metadata.close()
        self.log.close()

    def spawn(self, work: Coroutine[Any, Any, Any]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            logger.error("a task of the node failed", exc_info=task.exception())

    def _give_up(self, reason: str) -> None:
        self.ended.set()

    def _commit_failed(self, error: Exception) -> None:
        self.failure = str(error)
        self.metrics.failed.inc()

    # -- connections -------------------------------------------------------------------------------------

    def admit(self, connection: Connection) -> bool:
        if len(self.sockets) >= 2 * self.settings.limits.connections_max + 100:
            connection.transport.abort()  # not even room to say so
            return False
        self.sockets.add(connection)
        if rate := self.settings.limits.connections_per_sec:
            # Each connection has its turn; whoever comes too early waits for it, unread.
            self._next_turn = max(self._next_turn + 1 / rate, self.now())
            if (wait := self._next_turn - self.now()) > 0:
                connection.hold()
                asyncio.get_running_loop().call_later(wait, connection.go_on)
        return True

    def gone(self, connection: Connection) -> None:
        self.sockets.discard(connection)
        self.leave(connection)

    def publish_checker(self, identity: Identity) -> Callable[[str], bool] | None:
        return self.auth.acl.publish_checker(identity) if self.settings.auth.acl_file else None

    def bounded_expiry(self, seconds: int) -> int:
        limit = self.settings.sessions.expiry_secs_max
        return min(seconds, limit) if limit else seconds

    async def join(self, connection: Connection, packet: p.Connect) -> None:
        """A CONNECT: who is it, which session is that, and welcome."""
        if self._stopping:
            raise PeerError("shutting down", Reason.SERVER_UNAVAILABLE)
        if len(self.connections) >= self.settings.limits.connections_max:
            raise PeerError("too many connections", Reason.SERVER_BUSY)
        if "authentication_method" in packet.properties:
            raise PeerError("enhanced authentication is not supported", Reason.BAD_AUTHENTICATION_METHOD)
        assigned = not packet.client_id
        client_id = packet.client_id or f"auto-{secrets.token_hex(10)}"
        if assigned and packet.version < p.V5 and not packet.clean_start:
            raise PeerError("an empty client id needs a clean session", Reason.CLIENT_ID_NOT_VALID)
        identity = await self._authenticate(connection, packet, client_id)
        if packet.will is not None and not self.auth.acl.may_publish(identity, packet.will.topic):
            raise PeerError(f"the will may not go to {packet.will.topic!r}", Reason.NOT_AUTHORIZED)
        if packet.will is not None and len(packet.will.payload) + len(packet.will.properties) > WILL_BYTES_MAX:
            raise PeerError(f"the will is larger than {WILL_BYTES_MAX} bytes", Reason.PACKET_TOO_LARGE)
        lock = self._locks.setdefault(client_id, asyncio.Lock())
        try:
            async with lock:
                await self._join(connection, packet, client_id, identity, assigned)
        finally:
            if not lock.locked() and not getattr(lock, "_waiters", None):
                self._locks.pop(client_id, None)

    async def _authenticate(self, connection: Connection, packet: p.Connect, client_id: str) -> Identity:
        credentials = Credentials(
            client_id=client_id,
            username=packet.username,
            password=packet.password,
            peer_is_loopback=is_loopback(connection),
            certificate_subject=certificate_subject(connection),
        )
        outcome = self.auth.check_at_once(credentials, time.time())
        if outcome is None:  # argon2 is slow on purpose: never on the loop's thread
            loop = asyncio.get_running_loop()
            outcome = await loop.run_in_executor(None, self.auth.check, credentials, time.time())
        if isinstance(outcome, Refusal):
            logger.info("%s: %s refused: %s", connection.peer, client_id, outcome.message)
            raise PeerError(outcome.message, outcome.reason_code)
        return outcome

    async def _join(
        self, connection: Connection, packet: p.Connect, client_id: str, identity: Identity, assigned: bool
    ) -> None:
        old = self.connections.get(client_id)
        if old is not None:
            ended = old.session
            old.close(Reason.SESSION_TAKEN_OVER)
            if ended is not None and not ended.durable:
                await self._discard(client_id, only=ended)  # it ended with its connection: nothing to take over
        if packet.clean_start:
            await self._discard(client_id)
        session = self.sessions.get(client_id)
        if session is None and client_id in self.stored:
            record = self.stored[client_id]
            session = await self.keeper.call(self.keeper.restore, record, dict(self.dispatcher.known))
            self.stored.pop(client_id, None)
            self.sessions[client_id] = session
        present = session is not None
        if session is None:
            if len(self.sessions) + len(self.stored) >= self.settings.limits.sessions_max:
                raise PeerError("too many sessions", Reason.QUOTA_EXCEEDED)
            session = self.sessions[client_id] = Session(client_id, 0, epoch=0)
            session.generation = max((s.generation for s in self.dispatcher.heads), default=0)
        was_durable = session.durable
        session.epoch += 1
        session.expiry_seconds = self.bounded_expiry(effective_expiry(packet))
        will = packet.will
        delay = min(will.delay, session.expiry_seconds) if will else 0
        if session.durable:
            await self.keeper.save(record_of(session, connected=True, now=time.time()))
        elif was_durable and present:
            await self._forget_stored(session)
        kept = self.wills.keep(connection, client_id, will, delay)
        try:
            if kept is not None:
                await kept
            again = await self._under_way(session)
            if connection.closed or connection.transport.is_closing():
                session.park(self.dispatcher.heads, self.dispatcher.sealed)
                self.wills.left(connection, client_id, will, delay)
                self._expire_later(client_id, time.time(), session.expiry_seconds)
                return
            gaps = len(session.skipped)
            session.unpark(self.dispatcher.known, time.time())
            self._trimmed(session, session.skipped[gaps:])
        except Exception:
            self.wills.left(connection, client_id, None, 0)  # it is not going to be welcome
            raise
        self.connections[client_id] = connection
        for filter_text in session.subscriptions:
            self.dispatcher.away.remove(filter_text, client_id)
            self.dispatcher.live.add(filter_text, connection)
        connection.welcome(packet, session, present, identity, assigned)
        if connection.state == "open":
            connection.resend(again)
            for filter_text, subscription in session.shared.items():
                await self.groups.join(connection, session, parse_share(filter_text), subscription)
            connection.pump()

    def _trimmed(self, session: Session, gaps: list[Gap]) -> None:
        """Retention was faster than this session: a record is kept, and the policy decides how it goes on."""
        for gap in gaps:
            logger.warning("%s: %s from offset %d on is gone: %s", session.client_id, gap.stream, gap.first, gap.reason)
        if gaps and self.settings.sessions.on_trimmed == "error":
            raise PeerError("messages this session had not read were dropped", Reason.IMPLEMENTATION_SPECIFIC_ERROR)
        if gaps and self.settings.sessions.on_trimmed == "latest":
            session.behind.clear()

    async def _under_way(self, session: Session) -> list[tuple[int, Rows | None, int, int]]:
        """What was sent and not acknowledged, fetched from the log again, in the order it was sent."""
        found = []
        for packet_id, (place, at, qos) in list(session.in_flight.items()):
            rows, row = (place, at) if isinstance(place, Rows) else (None, 0)
            if isinstance(place, Stream):
                rows = await asyncio.get_running_loop().run_in_executor(None, self.read_one, place, at)
                if rows is None:
                    del session.in_flight[packet_id]
                    continue
            found.append((packet_id, rows, row, qos))
        return found

    def read_one(self, stream: Stream, offset: int) -> Rows | None:
        try:
            reading = self.log.read(stream, offset, rows_max=1)
        except HoldfastError as error:
            logger.warning("a delivery under way cannot be sent again: %s", error)
            return None
        return rows_of(reading.chunks[0]) if reading.chunks else None

    def leave(self, connection: Connection) -> None:
        """The connection is over; what happens to its session depends on its expiry."""
        session = connection.session
        if session is None:
            return
        self.groups.leave(connection)
        self.control_topics.gone(connection)
        connection.session = None
        client_id = session.client_id
        if self.connections.get(client_id) is connection:
            del self.connections[client_id]
        for filter_text in session.subscriptions:
            self.dispatcher.live.remove(filter_text, connection)
            if session.durable:
                self.dispatcher.away.add(filter_text, client_id)
        session.park(self.dispatcher.heads, self.dispatcher.sealed)
        will = connection.will
        self.wills.left(connection, client_id, will, min(will.delay, session.expiry_seconds) if will else 0)
        if self._stopping:
            return
        if not session.durable:
            self.spawn(self._discard(client_id, only=session))
            return
        session.dirty.update(session.behind)
        self._expire_later(client_id, time.time(), session.expiry_seconds)
        self.spawn(self._save_parked(session))

    async def _save_parked(self, session: Session) -> None:
        if self.sessions.get(session.client_id) is not session:
            return  # it has ended meanwhile: what was deleted must stay so
        await self.keeper.flush([session], self.dispatcher.heads)
        if session.client_id not in self.connections and self.sessions.get(session.client_id) is session:
            await self.keeper.save(record_of(session, connected=False, now=time.time()))

    async def _discard(self, client_id: str, only: Session | None = None) -> None:
        """The session ends: subscriptions, cursors and record go with it."""
        session = self.sessions.get(client_id)
        if only is not None and session is not only:
            return
        record = self.stored.pop(client_id, None)
        if session is not None:
            del self.sessions[client_id]
        filters = [s.filter for s in record.subscriptions] if record else []
        filters += list(session.subscriptions) if session else []
        for filter_text in filters:
            self.dispatcher.away.remove(filter_text, client_id)
        self.wills.session_ended(client_id)
        if record is not None or (session is not None and (session.durable or session.epoch > 1)):
            await self.keeper.delete_cursors(client_id, filters, self.dispatcher.heads)
            await self.keeper.remove(client_id)

    async def _forget_stored(self, session: Session) -> None:
        """It was durable and is no longer."""
        await self.keeper.delete_cursors(session.client_id, list(session.subscriptions), self.dispatcher.heads)
        await self.keeper.remove(session.client_id)

    # -- wills, expiry, upkeep ---------------------------------------------------------------------------

    def _publish_will(self, client_id: str, will: p.Will, done: Callable[[bool], None]) -> None:
        flags = will.qos | (RETAIN if will.retain else 0)
        self.ingest.publish_one(client_id, will.topic, will.payload, flags, will.properties or None, done)

    def _expire_later(self, client_id: str, since: float, expiry_seconds: int) -> None:
        if expiry_seconds == NEVER:
            return
        heapq.heappush(self._expiries, (since + expiry_seconds, next(self._order), client_id))
        if len(self._expiries) > 1000 + 4 * (len(self.sessions) + len(self.stored)):
            # Whoever comes and goes leaves an entry each time: only the last one counts.
            self._expiries = list({entry[2]: entry for entry in sorted(self._expiries)}.values())
            heapq.heapify(self._expiries)

    async def _tick(self) -> None:
        """Once in a while: silent clients, wills that are due, sessions that have expired."""
        turn = 0
        while True:
            await asyncio.sleep(0.25)
            now, wall = self.now(), time.time()
            turn += 1
            # Thousands of connections are not looked at more often than their clocks, in whole seconds, need it.
            for connection in list(self.connections.values()) if turn % 4 == 0 else ():
                limit = connection.keep_alive_seconds * 1.5
                if limit and now - connection.last_seen > limit:
                    connection.close(Reason.KEEP_ALIVE_TIMEOUT)
                elif connection.identity is not None and (connection.identity.expires_at or wall) < wall:
                    connection.close(Reason.NOT_AUTHORIZED)
            self._refresh_rights()
            self.wills.send_due()
            while self._expiries and self._expiries[0][0] <= time.time():
                await self._expire(heapq.heappop(self._expiries)[2])

    def _refresh_rights(self) -> None:
        """Who no longer may what its session does is disconnected; what it may, it asks for anew."""
        if not self.auth.refresh():
            return
        for connection in list(self.connections.values()):
            session, identity = connection.session, connection.identity
            if session is None or identity is None:
                continue
            connection.forget_rights()
            if not all(self.auth.acl.may_subscribe(identity, text) for text in session.subscriptions):
                connection.close(Reason.NOT_AUTHORIZED)

    async def _expire(self, client_id: str) -> None:
        """Its time may have come; unless it came back, or left again later."""
        if client_id in self.connections:
            return
        record, session = self.stored.get(client_id), self.sessions.get(client_id)
        overdue = record is not None and record.disconnected_at + record.expiry_seconds <= time.time()
        left_again = any(entry[2] == client_id for entry in self._expiries)
        if overdue or (session is not None and not left_again):
            await self._discard(client_id)

    async def _flush_cursors(self) -> None:
        every = self.settings.cursors.subscription_progress_flush_secs
        while True:
            await asyncio.sleep(every)
            dirty = [s for s in self.sessions.values() if s.dirty]
            if dirty:
                self.metrics.flushed.inc(await self.keeper.flush(dirty, self.dispatcher.heads))

    async def _upkeep(self) -> None:
        """Merge, index, roll and drop, on a thread of its own; cursors of dropped streams go too."""
        chosen = self.settings.log
        retention = RetentionSettings(
            generation_seconds_max=chosen.generation_secs or None,
            generation_bytes_max=chosen.generation_bytes or None,
            keep_seconds=chosen.keep_secs or None,
            keep_bytes=chosen.keep_bytes or None,
        )
        while True:
            await asyncio.sleep(chosen.upkeep_secs)
            before = dict(self.dispatcher.heads)
            try:
                await asyncio.get_running_loop().run_in_executor(None, maintain, self.log, retention, UPKEEP_RESTS)
                kept = {head.stream for head in self.log.heads(LOG)}
                await asyncio.get_running_loop().run_in_executor(None, self.dispatcher.look_at_lake)
                dropped = before.keys() - kept - self.dispatcher.lake.keys()
                if dropped:
                    await self.groups.streams_dropped({stream: before[stream] for stream in dropped})
                for stream in dropped:
                    await self.keeper.call(self._forget_stream, stream)
                await self.group_admin.expire_idle()
                self.failure = None
            except HoldfastError as error:
                logger.warning("upkeep: %s", error)

    def _forget_stream(self, stream: Stream) -> None:
        prefix = cursor_key(LOG, stream, "").removesuffix("/cursor")
        self.keeper.cursors.delete(self.metadata.list(prefix))

    def group_deleted(self, connection: Connection, session: Session, group: GroupId) -> None:
        """A group of this session is no more: the subscription goes, and the client is told the hard way."""
        for filter_text in [text for text in session.shared if parse_share(text) == group]:
            del session.shared[filter_text]
        if session.durable:
            self.keeper.save(record_of(session, connected=connection.session is session, now=time.time()))
        connection.close(Reason.ADMINISTRATIVE_ACTION)

    # -- for operators -----------------------------------------------------------------------------------

    def cursors_of(self, session: Session) -> dict[tuple[str, Stream], Any]:
        return dict(session.cursors(self.dispatcher.heads, self.dispatcher.heads))

    async def publish(self, publisher: str, topic: str, payload: bytes, qos: int, retain: bool) -> bool:
        """From HTTP: True once it is durable."""
        done: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        flags = qos | (RETAIN if retain else 0)
        self.ingest.publish_one(publisher, topic, payload, flags, None, done.set_result)
        return await done


def auth_settings(chosen: AuthSettings) -> authenticator.AuthOptions:
    """An empty setting is none."""
    given = {name: value if value != "" else None for name, value in dataclasses.asdict(chosen).items()}
    return authenticator.AuthOptions(**given)  # type: ignore[arg-type]


def _from_thread(loop: asyncio.AbstractEventLoop, call: Callable[[str], None], log: str) -> None:
    with contextlib.suppress(RuntimeError):  # the loop has been closed: nobody is left to tell
        loop.call_soon_threadsafe(call, log)


def is_loopback(connection: Connection) -> bool:
    peer = connection.transport.get_extra_info("peername")
    return not isinstance(peer, tuple) or peer[0] in ("127.0.0.1", "::1") or str(peer[0]).startswith("127.")


def certificate_subject(connection: Connection) -> CertificateSubject | None:
    certificate = connection.transport.get_extra_info("peercert")
    return certificate.get("subject") if certificate else None
