"""Batch members over MQTT: what they publish goes to the group's leader, its answers go straight to their connection.

    client -> node   PUBLISH  $holdfast/lease/<group>/from/<client-id>   FindLeader, UpdateStreamStates, LeaveGroup
    node -> client   PUBLISH  $holdfast/lease/<group>/to/<client-id>     LeaseStreams, UpdateStreams, RenewStreamLease,
                                                                         LeftGroup, Invalidate

`<group>` is `name:filter`, percent-encoded; payloads are `groups.protocol.wire`. Nothing of this enters the log or the
session: a client subscribes to its `to` topic anew on every connection, and a message that cannot be handed over is
dropped, for whoever waits for it asks again. A lost connection ends no lease: its member comes back in time, or
not.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Coroutine
from dataclasses import replace
from typing import Any, NamedTuple
from urllib.parse import quote, unquote

from holdfast.auth.identity import Identity
from holdfast.errors import HoldfastError, PeerError, RequestError
from holdfast.groups.protocol import messages as m
from holdfast.groups.protocol import wire
from holdfast.groups.protocol.nouns import GroupId, Key, Mark, Piece
from holdfast.groups.record import GroupRecord
from holdfast.groups.settings import LeaderSettings
from holdfast.groups.shares import check_group_name
from holdfast.machine import Address
from holdfast.model import Start
from holdfast.mqtt.reasons import Reason
from holdfast.runtime.control_topics import Answer, ControlClient
from holdfast.topics import check_filter

logger = logging.getLogger("holdfast.groups")

PREFIX = "$holdfast/lease/"

OFFSET_MAX = 1 << 62
SLICES_MAX = LeaderSettings().slices_max

MARKS_MAX, RANGES_MAX = 20_000, 100_000
"""What one message may say about progress."""

SEATS_MAX, SEAT_SECONDS = 4, 10.0
"""As so many members may one client appear in one group within this time: it restarts, and perhaps again."""

FromBatchMember = m.FindLeader | m.UpdateStreamStates | m.LeaveGroup
"""What a batch member may say."""


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
            raise RequestError(f"expected {PREFIX}GROUP/to/CLIENT or …/from/CLIENT, got {topic[:120]!r}")
        try:
            group = GroupId.parse(unquote(encoded, errors="strict"))
        except UnicodeDecodeError as error:
            raise RequestError(f"the group in {topic[:120]!r} is not percent-encoded UTF-8: {error.reason}") from error
        return cls(GroupId(check_group_name(group.name), check_filter(group.filter)), direction, client_id)

    def belongs_to(self, client_id: str) -> bool:
        return self.client_id in (client_id, quote(client_id, safe=""))


class BatchPlace(NamedTuple):
    """Where a batch member listens."""

    client: ControlClient
    topic: str
    start: Start | None
    key: Key | None
    """Where the group begins, and what its key is, should this member be the one to declare it."""


class BatchMembers:
    """The batch members of this node's clients: the handler of the control topics under `PREFIX`."""

    def __init__(
        self,
        *,
        node_id: str,
        enabled: bool,
        places_max: int,
        may_subscribe: Callable[[Identity, str], bool],
        send: Callable[[Address, Any], None],
        declare: Callable[[GroupId, Start | None, Key], Coroutine[Any, Any, GroupRecord]],
        spawn: Callable[[Coroutine[Any, Any, Any]], None],
    ):
        self._node_id, self._enabled, self._places_max = node_id, enabled, places_max
        self._may_subscribe, self._send, self._declare_group = may_subscribe, send, declare
        self._spawn = spawn
        self._places: dict[str, BatchPlace] = {}
        """By the name in the member's address."""
        self._of_client: dict[ControlClient, set[str]] = {}
        self._seats: dict[str, dict[tuple[int, int], float]] = {}
        """Incarnation and number of the members a client was lately, and when it last spoke as that."""
        self._leaders: dict[GroupId, Address] = {}
        """Where each group's leader was when it last leased something to one of our clients."""

    # -- listening ---------------------------------------------------------------------------------------

    def subscribe(self, client: ControlClient, topic: str, start: Start | None, key: Key | None) -> int:
        """A SUBSCRIBE to a control topic; what the SUBACK says."""
        if not self._enabled:
            return Reason.SHARED_SUBSCRIPTIONS_NOT_SUPPORTED
        try:
            way = Way.parse(topic)
            self._check_rights(client, way, "to")
        except RequestError:
            return Reason.TOPIC_FILTER_INVALID
        except PeerError as error:
            return error.reason_code
        name = _name(client.client_id, way.group)
        mine = self._of_client.setdefault(client, set())
        if name not in mine and len(mine) >= self._places_max:
            return Reason.QUOTA_EXCEEDED
        before = self._places.get(name)
        if before is not None and before.client is not client:
            self._of_client.get(before.client, set()).discard(name)  # an earlier connection of the same client
        self._places[name] = BatchPlace(client, topic, start, key)
        mine.add(name)
        return Reason.GRANTED_QOS_0

    def is_read(self, topic_filter: str) -> bool:
        return False

    def unsubscribe(self, client: ControlClient, topic: str) -> bool:
        """An UNSUBSCRIBE; whether there was such a subscription."""
        mine = self._of_client.get(client, set())
        gone = [name for name in mine if self._places[name].topic == topic]
        for name in gone:
            del self._places[name]
            mine.discard(name)
        return bool(gone)

    def gone(self, client: ControlClient) -> None:
        """The connection is over."""
        for name in self._of_client.pop(client, ()):
            del self._places[name]
        if not self._places:
            self._leaders.clear()

    def _check_rights(self, client: ControlClient, way: Way, direction: str) -> None:
        if way.direction != direction or not way.belongs_to(client.client_id):
            raise PeerError(
                f"client {client.client_id!r} may only use …/{direction}/ with its own client id",
                Reason.NOT_AUTHORIZED,
            )
        if client.identity is not None and not self._may_subscribe(client.identity, way.group.filter):
            raise PeerError(f"group {way.group} is not for you: its filter is denied", Reason.NOT_AUTHORIZED)

    # -- from the client ---------------------------------------------------------------------------------

    def publish(self, client: ControlClient, topic: str, payload: bytes, retain: bool, answer: Answer) -> None:
        answer(*self._publish(client, topic, payload))

    def _publish(self, client: ControlClient, topic: str, payload: bytes) -> tuple[int, str]:
        """A PUBLISH to a control topic; what the PUBACK says, and why."""
        try:
            way = Way.parse(topic)
        except RequestError as error:
            return Reason.TOPIC_NAME_INVALID, str(error)
        try:
            if not self._enabled:
                raise PeerError("shared groups are switched off (groups.enabled)", Reason.IMPLEMENTATION_SPECIFIC_ERROR)
            self._check_rights(client, way, "from")
            message = self._read(client, way, payload)
            place = self._place(client, way, message)
            self._count_seats(_name(client.client_id, way.group), message.member, time.monotonic())
            self._route(way, place, message)
        except RequestError as error:
            return Reason.PAYLOAD_FORMAT_INVALID, str(error)
        except PeerError as error:
            return error.reason_code, str(error)
        return Reason.SUCCESS, ""

    def _read(self, client: ControlClient, way: Way, payload: bytes) -> FromBatchMember:
        try:
            payload.decode()
        except UnicodeDecodeError as error:
            raise RequestError(f"the payload is not UTF-8: {error.reason} at byte {error.start}") from error
        try:
            message = wire.decode(payload)
        except (UnicodeError, RecursionError) as error:
            raise RequestError(f"the payload cannot be read: {error}") from error
        if not isinstance(message, FromBatchMember):
            raise RequestError(f"{type(message).__name__} is not for a batch member to say")
        if message.member.session != client.client_id:
            raise PeerError(f"you are not {message.member.session!r}", Reason.NOT_AUTHORIZED)
        if not isinstance(message, m.UpdateStreamStates) and message.group != way.group:
            raise RequestError(f"{type(message).__name__} is about group {message.group}, its topic about {way.group}")
        marks = _marks(message)
        ranges = sum(len(mark.acked) for _, mark in marks)
        if len(marks) > MARKS_MAX or ranges > RANGES_MAX:
            raise RequestError(
                f"expected at most {MARKS_MAX} marks and {RANGES_MAX} ranges, got {len(marks)} and {ranges}"
            )
        for piece, mark in marks:
            _check_mark(piece, mark)
        return message

    def _place(self, client: ControlClient, way: Way, message: FromBatchMember) -> BatchPlace:
        place = self._places.get(_name(message.member.session, way.group))
        if place is None or place.client is not client:
            raise PeerError(
                f"subscribe to {PREFIX}{quote(str(way.group), safe='')}/to/… first: nobody would hear the answer",
                Reason.IMPLEMENTATION_SPECIFIC_ERROR,
            )
        return place

    def _count_seats(self, name: str, member: Any, now: float) -> None:
        """A client that appears as ever new members would take the streams from everybody else."""
        if len(self._seats) > 1000:
            self._seats = {n: seats for n, seats in self._seats.items() if max(seats.values()) > now - SEAT_SECONDS}
        seats = self._seats.setdefault(name, {})
        for seat in [seat for seat, at in seats.items() if at <= now - SEAT_SECONDS]:
            del seats[seat]
        mine = (member.incarnation, member.number)
        if mine not in seats and len(seats) >= SEATS_MAX:
            raise PeerError(
                f"you were {SEATS_MAX} different members of this group within {SEAT_SECONDS:.0f} s; wait",
                Reason.QUOTA_EXCEEDED,
            )
        seats[mine] = now

    def _route(self, way: Way, place: BatchPlace, message: FromBatchMember) -> None:
        message = replace(message, reply_to=Address(self._node_id, "batch", _name(message.member.session, way.group)))
        registry = Address(self._node_id, "registry")
        match message:
            case m.FindLeader(born=""):
                self._spawn(self._declare(message, place))
            case m.FindLeader():
                self._send(registry, message)
            case m.UpdateStreamStates():
                # Without a leader of this group here, whoever is there says that it is nobody: then it asks again.
                self._send(self._leaders.get(way.group, Address(self._node_id, "leader", str(way.group))), message)
            case m.LeaveGroup():
                self._send(self._leaders.get(way.group, registry), message)

    async def _declare(self, message: m.FindLeader, place: BatchPlace) -> None:
        """A member that does not know the group's `born` is content with the group as it is, or founds it."""
        try:
            record = await self._declare_group(message.group, place.start, place.key or "publisher")
        except HoldfastError as error:
            logger.warning("group %s could not be declared for %s: %s", message.group, message.member, error)
            return
        self._send(Address(self._node_id, "registry"), replace(message, born=record.born))

    # -- to the client -----------------------------------------------------------------------------------

    def deliver(self, name: str, message: Any) -> None:
        place = self._places.get(name)
        if place is None:
            logger.debug("batch member %s is not connected", name)
            return
        if isinstance(message, m.LeaseStreams):
            self._leaders[GroupId.parse(message.leader.name)] = message.leader
        place.client.send_control(place.topic, wire.encode(message))


def _name(client_id: str, group: GroupId) -> str:
    """Escaped, so that no client can choose an id that makes its name another's."""
    return f"{quote(client_id, safe='')}/{group}"


def _marks(message: FromBatchMember) -> list[tuple[Piece, Mark]]:
    found = [(carried.piece, carried.mark) for carried in message.carried]
    if isinstance(message, m.UpdateStreamStates):
        found += [(report.piece, report.mark) for report in _reports(message)]
    return found


def _reports(states: m.UpdateStreamStates) -> tuple[m.Report, ...]:
    return (*states.states, *states.old_states)


def _check_mark(piece: Piece, mark: Mark) -> None:
    """The machines take what they are told about progress for possible; what a client says need not be."""
    if not 0 <= piece.part < piece.of <= SLICES_MAX or piece.of & (piece.of - 1):
        raise RequestError(f"expected a slice of 1, 2, 4, … {SLICES_MAX}, counted from 0, got {piece}")
    at = mark.offset
    if not -1 <= at < OFFSET_MAX:
        raise RequestError(f"expected an offset from -1 on, got {at} of {piece}")
    for first, last in mark.acked:
        if not at < first <= last < OFFSET_MAX:
            raise RequestError(f"acknowledged range {first}..{last} of {piece} is not above {at}, or ends too early")
        at = last
