"""SUBSCRIBE and UNSUBSCRIBE: what is taken, from where on it begins, and when it may be acknowledged."""

from __future__ import annotations

import asyncio
import logging
import time
from typing import TYPE_CHECKING

from holdfast.errors import RequestError
from holdfast.groups.protocol.nouns import Key, check_key
from holdfast.groups.shares import is_shared, parse_share
from holdfast.model import At, Beginning, Next, Since, Start, Stream, parse_start
from holdfast.mqtt import codec
from holdfast.mqtt import packets as p
from holdfast.mqtt.reasons import Reason
from holdfast.runtime.batch_members import is_control
from holdfast.runtime.connection import Connection
from holdfast.runtime.ingest import LOG
from holdfast.runtime.keeper import record_of
from holdfast.sessions.session import Session, Subscription

if TYPE_CHECKING:
    from holdfast.runtime.node import Node

logger = logging.getLogger("holdfast.node")

START_PROPERTY = "holdfast-start"
KEY_PROPERTY = "holdfast-key"
SHARE_KEY: Key = "message"
"""The key of a group that a SUBSCRIBE makes without naming one: what `$share` means everywhere else."""

RECORD_BYTES_MAX = 900_000


class Subscriptions:
    """What the sessions of one node are subscribed to changes here only."""

    def __init__(self, node: Node):
        self._node = node

    async def subscribe(self, connection: Connection, packet: p.Subscribe) -> bytes:
        """Take the filters one by one; the SUBACK, once what it promises is durable."""
        session = connection.session
        if session is None:
            return b""
        reasons: list[int] = []
        why: dict[str, None] = {}
        changed = False
        try:
            start, key = self._start_of(packet), self._key_of(packet)
        except RequestError as error:
            return self._refuse(connection, packet, str(error))
        last = {request.filter: at for at, request in enumerate(packet.filters)}
        for at, request in enumerate(packet.filters):
            if at % 50 == 49:
                await asyncio.sleep(0)  # a long packet must not keep the others waiting
            if is_control(request.filter):
                reasons.append(self._node.groups.batch_members.listen(connection, request.filter, start, key))
                continue
            reason = self._check_subscription(connection, session, request)
            if reason < 0x80 and last[request.filter] == at:  # of one filter given twice, the last counts
                try:
                    if is_shared(request.filter):
                        await self._add_share(connection, session, packet, request, start, key)
                    else:
                        await self._add_subscription(connection, session, packet, request, start)
                    changed = True
                except RequestError as error:
                    logger.info("%s: %s", session.client_id, error)
                    why[str(error)] = None
                    reason = Reason.IMPLEMENTATION_SPECIFIC_ERROR
            reasons.append(reason)
        if changed and session.durable:
            await self._node.keeper.save(record_of(session, connected=True, now=time.time()))
        if connection.version < p.V5:
            reasons = [r if r < 0x80 else 0x80 for r in reasons]
        properties: p.Properties = {"reason_string": "; ".join(why)[:300]} if why else {}
        return codec.encode_suback(p.Suback(packet.packet_id, tuple(reasons), properties), connection.version)

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

    def _refuse(self, connection: Connection, packet: p.Subscribe, why: str) -> bytes:
        """All its filters, and say why."""
        assert connection.session is not None
        logger.info("%s: %s", connection.session.client_id, why)
        refused = tuple(Reason.IMPLEMENTATION_SPECIFIC_ERROR for _ in packet.filters)
        return codec.encode_suback(
            p.Suback(packet.packet_id, refused, {"reason_string": why[:300]}), connection.version
        )

    def _check_subscription(self, connection: Connection, session: Session, request: p.FilterRequest) -> int:
        topics = request.filter
        if is_shared(topics):
            if not self._node.settings.groups.enabled:
                return Reason.SHARED_SUBSCRIPTIONS_NOT_SUPPORTED
            try:
                topics = parse_share(topics).filter
            except RequestError:
                return Reason.TOPIC_FILTER_INVALID
        known = request.filter in session.subscriptions or request.filter in session.shared
        if (
            not known
            and len(session.subscriptions) + len(session.shared) >= self._node.settings.limits.subscriptions_max
        ):
            return Reason.QUOTA_EXCEEDED
        if not known and session.durable and not self._record_fits(session, request.filter):
            return Reason.QUOTA_EXCEEDED
        if connection.identity is not None and not self._node.auth.acl.may_subscribe(connection.identity, topics):
            return Reason.NOT_AUTHORIZED
        return request.qos

    def _record_fits(self, session: Session, filter_text: str) -> bool:
        """A session's record is one value in the metadata store, which bounds values."""
        names = sum(len(text) for text in (*session.subscriptions, *session.shared, filter_text))
        return 4 * names + 40 * len(self._node.dispatcher.heads) * (len(session.subscriptions) + 1) < RECORD_BYTES_MAX

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
        record = await self._node.group_admin.declare(group, start, key=key or SHARE_KEY)
        if key is not None and key != record.key:
            raise RequestError(f"group {group} has the key {record.key}, not {key}; a key is for good")
        subscription = Subscription(
            request.filter,
            request.qos,
            retain_as_published=request.retain_as_published,
            identifier=packet.subscription_identifier,
            born=record.born,
        )
        session.shared[request.filter] = subscription
        await self._node.groups.join(connection, session, group, subscription)

    async def _add_subscription(
        self,
        connection: Connection,
        session: Session,
        packet: p.Subscribe,
        request: p.FilterRequest,
        start: Start | None,
    ) -> None:
        heads = self._node.dispatcher.heads
        subscription = Subscription(
            request.filter,
            request.qos,
            request.no_local,
            request.retain_as_published,
            request.retain_handling,
            packet.subscription_identifier,
        )
        known = request.filter in session.subscriptions
        if not known or start is not None:
            asked = start or Next()
            if isinstance(asked, Next):
                subscription.since = dict(heads)
                if not session.subscriptions:
                    session.behind.clear()
            else:
                await self._start_earlier(session, subscription, asked)
        new = session.subscribe(subscription)
        if connection.session is session:
            self._node.dispatcher.live.add(request.filter, connection)
        if request.retain_handling == 0 or (request.retain_handling == 1 and new):
            rows = self._node.retained.rows_for(request.filter, time.time())
            if rows is not None:
                session.put_ready(rows, range(len(rows.topics)))

    async def _start_earlier(self, session: Session, subscription: Subscription, start: Start) -> None:
        """Begin in the past: the session goes back, and its other subscriptions let what they had pass."""
        loop = asyncio.get_running_loop()
        asked = await loop.run_in_executor(None, self._node.log.positions, LOG, start, subscription.matcher)
        in_lake = await loop.run_in_executor(None, self._in_lake, start)
        # From here to the end of the caller nothing waits: nobody reads on for the session in between.
        heads = self._node.dispatcher.heads
        for stream, head in heads.items():
            at = asked.get(stream, head if not isinstance(start, Beginning) else 0)
            before = session.position(stream, heads)
            subscription.since[stream] = at
            if at < before:
                session.go_back(stream, at, heads, subscription.filter)
        for stream, (at, end) in in_lake.items():
            subscription.since[stream] = at
            if at < end:
                for other in session.subscriptions.values():
                    if other.filter != subscription.filter:
                        other.since.setdefault(stream, end)
                session.behind[stream] = at

    def _in_lake(self, start: Start) -> dict[Stream, tuple[int, int]]:
        """Where a start lies in the streams that only the lake still holds, and where those end."""
        history = self._node.dispatcher.history
        self._node.dispatcher.look_at_lake()
        found = {}
        for stream, end in self._node.dispatcher.lake.items():
            match start:
                case Beginning():
                    at = 0
                case Since():
                    at = history.offset_at(history.head(stream), start.micros)
                case At():
                    at = min(start.offsets.get(stream, end if start.every is None else start.every), end)
                case _:
                    at = end
            found[stream] = (at, end)
        return found

    async def unsubscribe(self, connection: Connection, packet: p.Unsubscribe) -> bytes:
        session = connection.session
        if session is None:
            return b""
        reasons, gone = [], []
        for filter_text in packet.filters:
            if is_control(filter_text):
                reasons.append(0x00 if self._node.groups.batch_members.unlisten(connection, filter_text) else 0x11)
                continue
            if is_shared(filter_text):
                found = session.shared.pop(filter_text, None)
                if found is not None:
                    self._node.groups.unsubscribe(connection, parse_share(filter_text))
            else:
                found = session.unsubscribe(filter_text)
                if found is not None:
                    self._node.dispatcher.live.remove(filter_text, connection)
            if found is not None:
                gone.append(filter_text)
            reasons.append(0x00 if found is not None else 0x11)
        if gone and session.durable:
            await self._node.keeper.delete_cursors(session.client_id, gone, self._node.dispatcher.heads)
            await self._node.keeper.save(record_of(session, connected=True, now=time.time()))
        return codec.encode_unsuback(p.Unsuback(packet.packet_id, tuple(reasons)), connection.version)
