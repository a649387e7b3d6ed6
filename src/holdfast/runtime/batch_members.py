"""Batch members over MQTT: what they publish goes to the group's leader, its answers go straight to their connection.

    client -> node   PUBLISH  $holdfast/lease/<group>/from/<client-id>   FindLeader, UpdateStreamStates, LeaveGroup
    node -> client   PUBLISH  $holdfast/lease/<group>/to/<client-id>     LeaseStreams, UpdateStreams, RenewStreamLease,
                                                                         LeftGroup, Invalidate

`<group>` is `name:filter`, percent-encoded; payloads are `groups.wire`. Nothing of this enters the log or the session:
a client subscribes to its `to` topic anew on every connection, and a message that cannot be handed over is dropped,
for whoever waits for it asks again. A lost connection ends no lease: its member comes back in time, or it does not.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import quote, unquote

from holdfast.errors import HoldfastError, PeerError, RequestError
from holdfast.groups.protocol import messages as m
from holdfast.groups.protocol import wire
from holdfast.groups.protocol.nouns import GroupId, Key, Mark, Piece
from holdfast.groups.settings import LeaderSettings
from holdfast.groups.shares import check_group_name
from holdfast.machine import Address
from holdfast.model import Start
from holdfast.mqtt.reasons import Reason
from holdfast.topics import check_filter

if TYPE_CHECKING:
    from holdfast.runtime.connection import Connection
    from holdfast.runtime.groups import GroupHost

logger = logging.getLogger("holdfast.groups")

PREFIX = "$holdfast/lease/"

OFFSET_MAX = 1 << 62
SLICES_MAX = LeaderSettings().slices_max

FromBatchMember = m.FindLeader | m.UpdateStreamStates | m.LeaveGroup
"""What a batch member may say."""


def is_control(topic: str) -> bool:
    return topic.startswith(PREFIX)


class Way(NamedTuple):
    """A control topic, read."""

    group: GroupId
    direction: str
    client_id: str

    @classmethod
    def parse(cls, topic: str) -> Way:
        """A RequestError says what is wrong with it."""
        encoded, _, rest = topic.removeprefix(PREFIX).partition("/")
        direction, _, client_id = rest.partition("/")
        if direction not in ("to", "from") or not client_id:
            raise RequestError(f"{topic[:120]!r} is no control topic; write {PREFIX}GROUP/to/CLIENT or …/from/CLIENT")
        group = GroupId.parse(unquote(encoded))
        return cls(GroupId(check_group_name(group.name), check_filter(group.filter)), direction, client_id)

    def belongs_to(self, client_id: str) -> bool:
        return self.client_id in (client_id, quote(client_id, safe=""))


class BatchPlace(NamedTuple):
    """Where a batch member listens."""

    connection: Connection
    topic: str
    start: Start | None
    key: Key | None
    """Where the group begins, and what its key is, should this member be the one to declare it."""


class BatchMembers:
    """The batch members of this node's clients."""

    def __init__(self, host: GroupHost):
        self._host = host
        self._places: dict[str, BatchPlace] = {}
        self._leaders: dict[GroupId, Address] = {}
        """Where each group's leader was when it last leased something to one of our clients."""

    # -- listening ---------------------------------------------------------------------------------------

    def subscribe(self, connection: Connection, topic: str, start: Start | None, key: Key | None) -> int:
        """A SUBSCRIBE to a control topic; what the SUBACK says."""
        if not self._host.node.settings.groups.enabled:
            return Reason.SHARED_SUBSCRIPTIONS_NOT_SUPPORTED
        try:
            way = Way.parse(topic)
            self._check_rights(connection, way, "to")
        except RequestError:
            return Reason.TOPIC_FILTER_INVALID
        except PeerError as error:
            return error.reason_code
        session = connection.session
        assert session is not None
        limits = self._host.node.settings.limits
        mine = sum(place.connection is connection for place in self._places.values()) if self._places else 0
        name = _name(session.client_id, way.group)
        if name not in self._places and mine >= limits.subscriptions_max:
            return Reason.QUOTA_EXCEEDED
        self._places[name] = BatchPlace(connection, topic, start, key)
        return Reason.GRANTED_QOS_0

    def unsubscribe(self, connection: Connection, topic: str) -> bool:
        """An UNSUBSCRIBE; whether there was such a subscription."""
        gone = [name for name, p in self._places.items() if p.connection is connection and p.topic == topic]
        for name in gone:
            del self._places[name]
        return bool(gone)

    def gone(self, connection: Connection) -> None:
        """The connection is over."""
        if self._places:
            self._places = {name: p for name, p in self._places.items() if p.connection is not connection}
            if not self._places:
                self._leaders.clear()

    def _check_rights(self, connection: Connection, way: Way, direction: str) -> None:
        session, identity = connection.session, connection.identity
        if session is None or way.direction != direction or not way.belongs_to(session.client_id):
            raise PeerError(
                f"client {session.client_id if session else ''!r} may only use …/{direction}/ with its own client id",
                Reason.NOT_AUTHORIZED,
            )
        if identity is not None and not self._host.node.auth.acl.may_subscribe(identity, way.group.filter):
            raise PeerError(f"group {way.group} is not for you: its filter is denied", Reason.NOT_AUTHORIZED)

    # -- from the client ---------------------------------------------------------------------------------

    def publish(self, connection: Connection, topic: str, payload: bytes) -> tuple[int, str]:
        """A PUBLISH to a control topic; what the PUBACK says, and why."""
        try:
            way = Way.parse(topic)
        except RequestError as error:
            return Reason.TOPIC_NAME_INVALID, str(error)
        try:
            if not self._host.node.settings.groups.enabled:
                raise PeerError("shared groups are switched off (groups.enabled)", Reason.IMPLEMENTATION_SPECIFIC_ERROR)
            self._check_rights(connection, way, "from")
            message = self._read(connection, way, payload)
            self._route(connection, way, message)
        except RequestError as error:
            return Reason.PAYLOAD_FORMAT_INVALID, str(error)
        except PeerError as error:
            return error.reason_code, str(error)
        return Reason.SUCCESS, ""

    def _read(self, connection: Connection, way: Way, payload: bytes) -> FromBatchMember:
        message = wire.decode(payload)
        if not isinstance(message, FromBatchMember):
            raise RequestError(f"{type(message).__name__} is not for a batch member to say")
        assert connection.session is not None
        if message.member.session != connection.session.client_id:
            raise PeerError(f"you are not {message.member.session!r}", Reason.NOT_AUTHORIZED)
        if not isinstance(message, m.UpdateStreamStates) and message.group != way.group:
            raise RequestError(f"{type(message).__name__} is about group {message.group}, its topic about {way.group}")
        for piece, mark in _marks(message):
            _check_mark(piece, mark)
        return message

    def _route(self, connection: Connection, way: Way, message: FromBatchMember) -> None:
        host = self._host
        name = _name(message.member.session, way.group)
        place = self._places.get(name)
        if place is None or place.connection is not connection:
            raise PeerError(
                f"subscribe to {PREFIX}{quote(str(way.group), safe='')}/to/… first: nobody would hear the answer",
                Reason.IMPLEMENTATION_SPECIFIC_ERROR,
            )
        message = replace(message, reply_to=Address(host.node_id, "batch", name))
        registry = Address(host.node_id, "registry")
        match message:
            case m.FindLeader(born=""):
                host.node.spawn(self._declare(message, place))
            case m.FindLeader():
                host.send(registry, message)
            case m.UpdateStreamStates():
                # Without a leader of this group here, whoever is there says that it is nobody: then it asks again.
                host.send(self._leaders.get(way.group, Address(host.node_id, "leader", str(way.group))), message)
            case m.LeaveGroup():
                host.send(self._leaders.get(way.group, registry), message)

    async def _declare(self, message: m.FindLeader, place: BatchPlace) -> None:
        """A member that does not know the group's `born` is content with the group as it is, or founds it."""
        try:
            record = await self._host.node.group_admin.declare(message.group, place.start, key=place.key or "publisher")
        except HoldfastError as error:
            logger.warning("group %s could not be declared for %s: %s", message.group, message.member, error)
            return
        self._host.send(Address(self._host.node_id, "registry"), replace(message, born=record.born))

    # -- to the client -----------------------------------------------------------------------------------

    def deliver(self, name: str, message: Any) -> None:
        place = self._places.get(name)
        if place is None:
            logger.debug("batch member %s is not connected", name)
            return
        if isinstance(message, m.LeaseStreams):
            self._leaders[GroupId.parse(message.leader.name)] = message.leader
        place.connection.send_control(place.topic, wire.encode(message))


def _name(client_id: str, group: GroupId) -> str:
    return f"{client_id}/{group}"


def _marks(message: FromBatchMember) -> list[tuple[Piece, Mark]]:
    found = [(carried.piece, carried.mark) for carried in message.carried]
    if isinstance(message, m.UpdateStreamStates):
        found += [(report.piece, report.mark) for report in (*message.states, *message.old_states)]
    return found


def _check_mark(piece: Piece, mark: Mark) -> None:
    """The machines take what they are told about progress for possible; what a client says need not be."""
    if not 0 <= piece.part < piece.of <= SLICES_MAX or piece.of & (piece.of - 1):
        raise RequestError(f"piece {piece} cannot be; a stream is cut into 1, 2, 4, … {SLICES_MAX}, counted from 0")
    at = mark.offset
    if not -1 <= at < OFFSET_MAX:
        raise RequestError(f"offset {at} of {piece} is not a whole number from -1")
    for first, last in mark.acked:
        if not at < first <= last < OFFSET_MAX:
            raise RequestError(f"acknowledged range {first}..{last} of {piece} is not above {at}, or ends too early")
        at = last
