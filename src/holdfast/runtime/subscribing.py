"""SUBSCRIBE and UNSUBSCRIBE: what is taken, from where on it begins, and when it may be acknowledged.

A subscription begins after everything that was published before it, on whatever connection: what is still on its way to
the log when the SUBSCRIBE comes is committed and delivered first, so neither old messages nor old retained ones follow.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Protocol

from holdfast.auth.authenticator import Authenticator
from holdfast.cursors.cursor_map import CursorMap
from holdfast.delivery.delivery import RetainedOwed, Subscribed, Unsubscribed
from holdfast.errors import RequestError
from holdfast.groups.protocol.nouns import GroupId, Key, check_key
from holdfast.groups.record import GroupRecord
from holdfast.groups.shares import is_shared, parse_share
from holdfast.log import Log
from holdfast.model import LOG, At, Beginning, Next, Since, Start, Stream, parse_start
from holdfast.mqtt import codec
from holdfast.mqtt import packets as p
from holdfast.mqtt.reasons import Reason
from holdfast.runtime import notices
from holdfast.runtime.connection import Connection
from holdfast.runtime.control_topics import ControlTopics
from holdfast.runtime.delivery import DeliveryHost
from holdfast.runtime.ingest import Ingest
from holdfast.sessions.session import Session
from holdfast.sessions.subscriptions import Subscription
from holdfast.topics import too_deep

logger = logging.getLogger("holdfast.node")

START_PROPERTY = "holdfast-start"
KEY_PROPERTY = "holdfast-key"
SHARE_KEY: Key = "message"
"""The key of a group that a SUBSCRIBE makes without naming one: what `$share` means everywhere else."""

FILTERS_LENGTH_MAX = 900_000
"""Characters in all filters of a session that is stored: they are one value in its row."""

Answer = tuple[bytes, Callable[[], None]]
"""A SUBACK or UNSUBACK, and what follows it."""


class Groups(Protocol):
    """What subscribing uses of the shared groups."""

    async def declare(self, group: GroupId, start: Start | None = None, key: Key = "publisher") -> GroupRecord: ...

    async def join(
        self, connection: Connection, session: Session, group: GroupId, subscription: Subscription
    ) -> None: ...

    def unsubscribe(self, connection: Connection, group: GroupId, filter_text: str) -> None: ...


class Subscribing:
    """What the sessions of one node are subscribed to changes here only."""

    def __init__(
        self,
        log: Log,
        auth: Authenticator,
        ingest: Ingest,
        delivery: DeliveryHost,
        save: Callable[[Session], Awaitable[None]],
        note: Callable[[Session], None],
        control: ControlTopics,
        groups: Groups,
        said: notices.Notices,
        *,
        groups_enabled: bool,
        subscriptions_max: int,
        shared_store: bool,
    ):
        self._log, self._auth, self._ingest, self._delivery = log, auth, ingest, delivery
        self._save, self._note, self._control, self._groups, self._said = save, note, control, groups, said
        self._groups_enabled, self._subscriptions_max = groups_enabled, subscriptions_max
        self._shared_store = shared_store
        """Other nodes publish to the same log, so what they have stored counts as published before, too."""

    async def subscribe(self, connection: Connection, packet: p.Subscribe) -> Answer:
        """Take the filters one by one; the SUBACK, once what it promises is durable."""
        session = connection.session
        if session is None:
            return b"", _nothing
        reasons: list[int] = []
        why: dict[str, None] = {}
        try:
            start, key = self._start_of(packet), self._key_of(packet)
        except RequestError as error:
            logger.info("%s: %s", session.client_id, error)
            refused = tuple(Reason.IMPLEMENTATION_SPECIFIC_ERROR for _ in packet.filters)
            return _suback(connection, packet, refused, [str(error)]), _nothing
        await self._published_before()
        last = {request.filter: at for at, request in enumerate(packet.filters)}
        changed, retained = False, []
        for at, request in enumerate(packet.filters):
            if at % 50 == 49:
                await asyncio.sleep(0)  # a long packet must not keep the others waiting
            if connection.session is not session:
                return b"", _nothing  # it went meanwhile, and may be back: what it did not hear of it asks for again
            if (handler := self._control.reader(request.filter)) is not None:
                reasons.append(handler.subscribe(connection, request.filter, start, key))
                continue
            reason = self._check_subscription(connection, session, request)
            if reason < 0x80 and last[request.filter] == at:  # of one filter given twice, the last counts
                changed = True
                if is_shared(request.filter):
                    try:
                        await self._add_share(connection, session, packet, request, start, key)
                    except RequestError as error:
                        logger.info("%s: %s", session.client_id, error)
                        why[str(error)] = None
                        reason = Reason.IMPLEMENTATION_SPECIFIC_ERROR
                elif await self._add_subscription(connection, session, packet, request, start):
                    retained.append(request.filter)
            reasons.append(reason)
        if connection.session is not session:
            return b"", _nothing
        if changed:
            await self._keep(session)
            if connection.session is not session:
                return b"", _nothing
        for request, reason in zip(packet.filters, reasons, strict=True):
            if reason < 0x80:
                self._said.emit(notices.Subscribed(session.client_id, request.filter, request.qos))
        return _suback(connection, packet, reasons, why), lambda: self._send_retained(connection, retained)

    async def _keep(self, session: Session) -> None:
        """A session that ends with its connection is promised nothing; but publishers elsewhere are to know of it."""
        if session.durable:
            await self._save(session)
        elif self._shared_store:
            self._note(session)

    async def _published_before(self) -> None:
        await self._ingest.drained()
        if self._shared_store or self._delivery.in_doubt or self._delivery.machine.waits_for_others:
            await self._delivery.caught_up()

    def _send_retained(self, connection: Connection, filters: list[str]) -> None:
        for text in filters:
            if connection.outlet is not None:
                selection = self._delivery.machine.retained.select(text)
                self._delivery.handle(RetainedOwed(connection.outlet, text, selection))

    def _start_of(self, packet: p.Subscribe) -> Start | None:
        for name, value in packet.properties.get("user_properties", []):
            if name == START_PROPERTY:
                return parse_start(value)
        return None

    def _key_of(self, packet: p.Subscribe) -> Key | None:
        for name, value in packet.properties.get("user_properties", []):
            if name == KEY_PROPERTY:
                return check_key(value)
        return None

    def _check_subscription(self, connection: Connection, session: Session, request: p.FilterRequest) -> int:
        topics = request.filter
        if is_shared(topics):
            if not self._groups_enabled:
                return Reason.SHARED_SUBSCRIPTIONS_NOT_SUPPORTED
            try:
                topics = parse_share(topics).filter
            except RequestError:
                return Reason.TOPIC_FILTER_INVALID
        if too_deep(topics):
            return Reason.TOPIC_FILTER_INVALID
        subscriptions = session.subscriptions
        known = request.filter in subscriptions or request.filter in subscriptions.shared
        if not known and len(subscriptions) + len(subscriptions.shared) >= self._subscriptions_max:
            return Reason.QUOTA_EXCEEDED
        if not known and session.durable and subscriptions.length + len(request.filter) > FILTERS_LENGTH_MAX:
            return Reason.QUOTA_EXCEEDED
        if connection.identity is not None and not self._auth.acl.may_subscribe(connection.identity, topics):
            return Reason.NOT_AUTHORIZED
        return request.qos

    async def _add_share(
        self,
        connection: Connection,
        session: Session,
        packet: p.Subscribe,
        request: p.FilterRequest,
        start: Start | None,
        key: Key | None,
    ) -> None:
        """Into a group: made by its first subscriber, and it persists from that moment on."""
        group = parse_share(request.filter)
        record = await self._groups.declare(group, start, key=key or SHARE_KEY)
        if key is not None and key != record.key:
            raise RequestError(f"group {group} has the key {record.key}, not {key}; a key is for good")
        subscription = Subscription(
            request.filter,
            request.qos,
            retain_as_published=request.retain_as_published,
            identifier=packet.subscription_identifier,
            born=record.born,
        )
        if connection.session is session:
            session.subscriptions.share(subscription)
            await self._groups.join(connection, session, group, subscription)

    async def _add_subscription(
        self,
        connection: Connection,
        session: Session,
        packet: p.Subscribe,
        request: p.FilterRequest,
        start: Start | None,
    ) -> bool:
        """Whether retained messages are owed to it."""
        subscription = Subscription(
            request.filter,
            request.qos,
            request.no_local,
            request.retain_as_published,
            request.retain_handling,
            packet.subscription_identifier,
        )
        known = request.filter in session.subscriptions
        begin: CursorMap | None = None
        if not known or start is not None:
            asked = start or Next()
            if isinstance(asked, Next):
                begin = self._delivery.heads.end()
            elif isinstance(asked, Beginning):
                await self._delivery.look_at_lake()
                begin = self._delivery.heads.beginning()
            else:
                starts = await self._find(asked, subscription)
                ends = self._delivery.heads.every()
                begin = self._delivery.heads.starting_at({s: starts.get(s, end) for s, end in ends.items()})
            if connection.session is not session:
                return False
        new = session.subscribe(subscription, begin, self._delivery.heads)
        if connection.session is session and connection.outlet is not None:
            self._delivery.handle(Subscribed(connection.outlet, request.filter))
        return request.retain_handling == 0 or (request.retain_handling == 1 and new)

    async def _find(self, start: Start, subscription: Subscription) -> dict[Stream, int]:
        """Where a start lies in the store's streams and in those that only the lake still holds."""
        loop = asyncio.get_running_loop()
        await self._delivery.look_at_lake()
        asked = await loop.run_in_executor(None, self._log.positions, LOG, start, subscription.matcher)
        in_lake = await loop.run_in_executor(None, self._in_lake, start, dict(self._delivery.heads.lake))
        return {**in_lake, **asked}

    def _in_lake(self, start: Start, lake: dict[Stream, int]) -> dict[Stream, int]:
        """Where a start lies in the streams that only the lake still holds (on a thread)."""
        history = self._delivery.history
        found = {}
        for stream, end in lake.items():
            match start:
                case Since():
                    at = history.offset_at(history.head(stream), start.micros)
                case At():
                    at = min(start.offsets.get(stream, end if start.every is None else start.every), end)
                case _:
                    at = end
            found[stream] = at
        return found

    async def unsubscribe(self, connection: Connection, packet: p.Unsubscribe) -> Answer:
        session = connection.session
        if session is None:
            return b"", _nothing
        reasons, gone = [], []
        for filter_text in packet.filters:
            if (handler := self._control.reader(filter_text)) is not None:
                reasons.append(0x00 if handler.unsubscribe(connection, filter_text) else 0x11)
                continue
            if is_shared(filter_text):
                found = session.subscriptions.unshare(filter_text)
                if found is not None:
                    self._groups.unsubscribe(connection, parse_share(filter_text), filter_text)
            else:
                found = session.unsubscribe(filter_text)
                if found is not None and connection.outlet is not None:
                    self._delivery.handle(Unsubscribed(connection.outlet, filter_text))
            if found is not None:
                gone.append(filter_text)
            reasons.append(0x00 if found is not None else 0x11)
        for filter_text in gone:
            self._said.emit(notices.Unsubscribed(session.client_id, filter_text))
        if gone:
            await self._keep(session)
        return codec.encode_unsuback(p.Unsuback(packet.packet_id, tuple(reasons)), connection.version), _nothing


def _suback(connection: Connection, packet: p.Subscribe, reasons: Sequence[int], why: Iterable[str]) -> bytes:
    if connection.version < p.V5:
        reasons = [reason if reason < 0x80 else 0x80 for reason in reasons]
    said = "; ".join(why)[:300]
    properties: p.Properties = {"reason_string": said} if said else {}
    return codec.encode_suback(p.Suback(packet.packet_id, tuple(reasons), properties), connection.version)


def _nothing() -> None: ...
