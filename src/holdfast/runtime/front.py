"""The front door: which sockets are let in, who their clients are, and what they are told when they are welcome."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import secrets
import time
from collections.abc import Callable, Coroutine
from functools import partial
from math import inf
from typing import TYPE_CHECKING, Any

from holdfast.auth.authenticator import Authenticator, AuthOptions
from holdfast.auth.bans import Ban, Bans
from holdfast.auth.identity import CertificateSubject, Credentials, Identity, Refusal, is_loopback
from holdfast.delivery.outlet import Outlet
from holdfast.errors import PeerError
from holdfast.mqtt import codec
from holdfast.mqtt import packets as p
from holdfast.mqtt.connection import NO_LIMIT, ConnectionSettings, Hold, HoldOn, Release, RightsChanged, Welcome
from holdfast.mqtt.reasons import Reason
from holdfast.sessions.session import Session

if TYPE_CHECKING:
    from holdfast.runtime.connection import Connection
    from holdfast.runtime.control_topics import Answer, ControlTopics
    from holdfast.runtime.delivery import DeliveryHost
    from holdfast.runtime.ingest import Ingest
    from holdfast.runtime.metrics import Metrics
    from holdfast.runtime.notices import Notices
    from holdfast.runtime.sessions import Sessions
    from holdfast.runtime.subscribing import Subscribing
    from holdfast.settings import AuthSettings, Settings

logger = logging.getLogger("holdfast.front")

WILL_BYTES_MAX = 256 << 10
LOOKED_AT_ONCE = 500
"""So many connections are held against new bans in one turn of the loop."""


class Front:
    """What every connection of a node may use of it."""

    def __init__(
        self,
        settings: Settings,
        auth: Authenticator,
        bans: Bans,
        ingest: Ingest,
        delivery: DeliveryHost,
        control: ControlTopics,
        sessions: Sessions,
        subscribing: Subscribing,
        metrics: Metrics,
        notices: Notices,
        spawn: Callable[[Coroutine[Any, Any, Any]], None],
    ):
        self.settings, self.auth, self._bans = settings, auth, bans
        self.ingest, self.delivery, self._control = ingest, delivery, control
        self._sessions, self.subscribing = sessions, subscribing
        self.metrics, self.notices, self.spawn = metrics, notices, spawn
        self.connection_settings = ConnectionSettings(
            connect_seconds=settings.limits.connect_secs,
            packet_bytes_max=settings.limits.packet_bytes_max,
            unread_bytes_max=settings.limits.pending_bytes_max,
            receive_maximum=settings.mqtt.receive_maximum,
            topic_alias_maximum=settings.mqtt.topic_alias_maximum,
        )
        self.names: dict[bytes, str] = {}
        """Topics by their bytes, shared by all connections that may publish anywhere."""
        self.sockets: set[Connection] = set()
        self.closing = False
        self.another_server: str | None = None
        """Not None: this node takes no clients; they are told to go there, or just to go if it is empty."""
        self._next_turn = 0.0

    # -- sockets -----------------------------------------------------------------------------------------

    def admit(self, connection: Connection) -> bool:
        if len(self.sockets) >= 2 * self.settings.limits.connections_max + 100:
            connection.transport.abort()  # not even room to say so
            return False
        self.sockets.add(connection)
        if rate := self.settings.limits.connections_per_sec:
            # Each connection has its turn; whoever comes too early waits for it, unread.
            loop = asyncio.get_running_loop()
            self._next_turn = max(self._next_turn + 1 / rate, loop.time())
            if (wait := self._next_turn - loop.time()) > 0:
                connection.handle(HoldOn(Hold.RATE))
                loop.call_later(wait, connection.handle, Release(Hold.RATE))
        return True

    def gone(self, connection: Connection) -> None:
        self.sockets.discard(connection)
        self._sessions.socket_gone(connection)

    def leave(self, connection: Connection, goodbye: bool, expiry: int | None) -> None:
        """The connection no longer serves its session."""
        self._control.gone(connection)
        self._sessions.leave(connection, goodbye, expiry)

    def free_id(self, session: Session, packet_id: int, freed: Callable[[], None]) -> None:
        self._sessions.free_id(session, packet_id, freed)

    def publish_control(self, connection: Connection, topic: str, payload: bytes, retain: bool, answer: Answer) -> None:
        """A PUBLISH to a topic that begins with `$`."""
        handler = self._control.handler(topic)
        if handler is None:
            answer(Reason.NOT_AUTHORIZED, "")
        else:
            handler.publish(connection, topic, payload, retain, answer)

    # -- CONNECT -----------------------------------------------------------------------------------------

    async def join(self, connection: Connection, packet: p.Connect) -> None:
        """A CONNECT: who is it, which session is that, and welcome."""
        if self.closing:
            raise PeerError("shutting down", Reason.SERVER_UNAVAILABLE)
        if self.another_server is not None:
            raise PeerError("this node is being drained", Reason.USE_ANOTHER_SERVER)
        if len(self._sessions.connections) >= self.settings.limits.connections_max:
            raise PeerError("too many connections", Reason.SERVER_BUSY)
        self._refuse_banned(connection, None, None)  # before a password is looked at, which is expensive
        if "authentication_method" in packet.properties:
            raise PeerError("enhanced authentication is not supported", Reason.BAD_AUTHENTICATION_METHOD)
        assigned = not packet.client_id
        client_id = packet.client_id or f"auto-{secrets.token_hex(10)}"
        if assigned and packet.version < p.V5 and not packet.clean_start:
            raise PeerError("an empty client id needs a clean session", Reason.CLIENT_ID_NOT_VALID)
        identity = await self._authenticate(connection, packet, client_id)
        self._refuse_banned(connection, client_id, identity.user)
        if packet.will is not None and not self.auth.acl.may_publish(identity, packet.will.topic):
            raise PeerError(f"the will may not go to {packet.will.topic!r}", Reason.NOT_AUTHORIZED)
        if packet.will is not None and len(packet.will.payload) + len(packet.will.properties) > WILL_BYTES_MAX:
            raise PeerError(f"the will is larger than {WILL_BYTES_MAX} bytes", Reason.PACKET_TOO_LARGE)
        if connection.closed or connection.transport.is_closing():
            return  # it went while we asked who it is: as if it had never come
        await self._sessions.join(
            connection,
            packet,
            client_id,
            partial(self._check_rights, identity),
            lambda s, present: self._welcome(connection, packet, s, present, identity, assigned),
        )

    async def _authenticate(self, connection: Connection, packet: p.Connect, client_id: str) -> Identity:
        credentials = Credentials(
            client_id=client_id,
            username=packet.username,
            password=packet.password,
            peer_is_loopback=is_loopback(connection.peer_host),
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

    def _welcome(
        self,
        connection: Connection,
        packet: p.Connect,
        session: Session,
        present: bool,
        identity: Identity,
        assigned: bool,
    ) -> None:
        """What the CONNACK says, and what the connection goes by from here on."""
        settings, properties = self.settings, packet.properties
        keep_alive = min(packet.keep_alive or settings.mqtt.keep_alive_secs_max, settings.mqtt.keep_alive_secs_max)
        cut = keep_alive != packet.keep_alive and settings.mqtt.keep_alive_secs_max < 65_535
        answer: p.Properties = {}
        if packet.version == p.V5:
            answer["receive_maximum"] = settings.mqtt.receive_maximum
            answer["topic_alias_maximum"] = settings.mqtt.topic_alias_maximum
            answer["maximum_packet_size"] = settings.limits.packet_bytes_max
            if not settings.groups.enabled:
                answer["shared_subscription_available"] = False
            if session.expiry_seconds != properties.get("session_expiry", 0):
                answer["session_expiry"] = session.expiry_seconds
            if assigned:
                answer["assigned_client_id"] = session.client_id
            if cut:
                answer["server_keep_alive"] = keep_alive
            if properties.get("request_response_information"):
                answer["response_information"] = settings.mqtt.response_prefix + session.client_id
        packet_max = properties.get("maximum_packet_size", NO_LIMIT)
        window = min(properties.get("receive_maximum", 65_535), settings.mqtt.inflight_max)
        connection.welcome(
            Welcome(
                version=packet.version,
                connack=codec.encode_connack(p.Connack(0, present and packet.version > p.V31, answer), packet.version),
                inbound=session.inbound,
                may_publish=self._publish_checker(identity),
                keep_alive_seconds=float(keep_alive if cut else packet.keep_alive),
                expires_at=_expires_at(identity),
                packet_max=packet_max,
                explain=properties.get("request_problem_information", True),
                session_expiry=session.expiry_seconds,
            ),
            session,
            Outlet(session, packet.version, window, packet_max),
            identity,
        )
        if self._ban_of(connection, session.client_id, identity.user) is not None:
            # Made while its session was being fetched, when nobody could see it among the connections.
            asyncio.get_running_loop().call_soon(connection.close, Reason.ADMINISTRATIVE_ACTION)

    # -- bans --------------------------------------------------------------------------------------------

    def _ban_of(self, connection: Connection, client_id: str | None, user: str | None) -> Ban | None:
        if not self._bans:
            return None
        now = self._sessions.clock.time(time.monotonic())
        return self._bans.find(client_id, user, connection.peer_host, now)

    def _refuse_banned(self, connection: Connection, client_id: str | None, user: str | None) -> None:
        ban = self._ban_of(connection, client_id, user)
        if ban is not None:
            self.metrics.banned.inc()
            logger.info("%s: refused: %s %s is banned: %s", connection.peer, ban.kind, ban.name[:100], ban.reason)
            raise PeerError("banned", Reason.BANNED)

    def disconnect_banned(self, new: list[Ban]) -> None:
        """Whom one of these bans fits is told to go; its session stays as after any loss."""
        for ban in new:
            if ban.kind == "client":
                self._disconnect_if_banned(self._sessions.connections.get(ban.name))
        if any(ban.kind != "client" for ban in new):
            self.spawn(self._look_for_banned())

    async def _look_for_banned(self) -> None:
        # Whoever is welcome only after this has begun is held against the bans then.
        connections = list(self._sessions.connections.values())
        for at in range(0, len(connections), LOOKED_AT_ONCE):
            for connection in connections[at : at + LOOKED_AT_ONCE]:
                self._disconnect_if_banned(connection)
            await asyncio.sleep(0)

    def _disconnect_if_banned(self, connection: Connection | None) -> None:
        if connection is None or connection.session is None or connection.identity is None:
            return
        ban = self._ban_of(connection, connection.session.client_id, connection.identity.user)
        if ban is not None:
            logger.info("%s: disconnected: %s %s is banned", connection.peer, ban.kind, ban.name[:100])
            connection.close(Reason.ADMINISTRATIVE_ACTION)

    # -- rights ------------------------------------------------------------------------------------------

    def _publish_checker(self, identity: Identity) -> Callable[[str], bool] | None:
        return self.auth.acl.publish_checker(identity) if self.settings.auth.acl_file else None

    def refresh_rights(self) -> None:
        """Who no longer may what its session does is disconnected; what it may, it asks for anew."""
        if not self.auth.refresh():
            return
        for connection in list(self._sessions.connections.values()):
            session, identity = connection.session, connection.identity
            if session is None or identity is None:
                continue
            connection.handle(RightsChanged(self._publish_checker(identity), _expires_at(identity)))
            if not self._may_read(identity, session):
                connection.close(Reason.NOT_AUTHORIZED)

    def _check_rights(self, identity: Identity, session: Session) -> None:
        """Whoever comes back to a session is given what it is subscribed to, so he must still be allowed all of it."""
        if not self._may_read(identity, session):
            raise PeerError("the session is subscribed to what you may not read", Reason.NOT_AUTHORIZED)

    def _may_read(self, identity: Identity, session: Session) -> bool:
        """All that the session is subscribed to, by itself and in groups."""
        if not self.settings.auth.acl_file:
            return True
        subscriptions = session.subscriptions
        shared = [subscription.matcher.text for subscription in subscriptions.shared.values()]
        return all(self.auth.acl.may_subscribe(identity, text) for text in (*subscriptions.filters, *shared))


def _expires_at(identity: Identity) -> float:
    """When the credentials end, by the loop's clock."""
    if not identity.expires_at:
        return inf
    return asyncio.get_running_loop().time() + identity.expires_at - time.time()


def auth_options(chosen: AuthSettings) -> AuthOptions:
    """An empty setting is none."""
    given = {name: value if value != "" else None for name, value in dataclasses.asdict(chosen).items()}
    return AuthOptions(**given)  # type: ignore[arg-type]


def certificate_subject(connection: Connection) -> CertificateSubject | None:
    certificate = connection.transport.get_extra_info("peercert")
    return certificate.get("subject") if certificate else None
