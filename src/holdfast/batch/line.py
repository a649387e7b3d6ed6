"""The line between a batch member and its node: one MQTT 5 connection, written to and read from by one thread."""

from __future__ import annotations

import contextlib
import select
import socket
import ssl
import time
from collections.abc import Iterator
from typing import Protocol
from urllib.parse import quote

from holdfast.errors import HoldfastError, NodeUnavailable, PeerError, RequestError
from holdfast.mqtt import codec
from holdfast.mqtt import packets as p
from holdfast.mqtt.reasons import Reason, describe

ANSWER_SECONDS = 5.0
"""How long anything that the node answers at once may take."""

KEEP_ALIVE_SECONDS = 30
PORTS = {"mqtt": 1883, "mqtts": 8883}

# Said by a node that may well take us later.
PASSING = {
    Reason.SERVER_UNAVAILABLE,
    Reason.SERVER_BUSY,
    Reason.SERVER_SHUTTING_DOWN,
    Reason.KEEP_ALIVE_TIMEOUT,
    Reason.QUOTA_EXCEEDED,
    Reason.CONNECTION_RATE_EXCEEDED,
    Reason.ADMINISTRATIVE_ACTION,
    Reason.UNSPECIFIED_ERROR,
    Reason.NORMAL_DISCONNECTION,
}


class Line(Protocol):
    """What a `BatchClient` asks of its connection. `wake` may be called from any thread, the rest from one only.

    NodeUnavailable says that the line is down and may be opened again; RequestError, that the node will not have us.
    """

    def open(self) -> None:
        """Connect, and listen."""

    def send(self, payload: bytes) -> None:
        """Say this to the node."""

    def receive(self, seconds: float) -> list[bytes]:
        """What the node has said, after waiting for so long at most."""

    def wake(self) -> None:
        """Have `receive` return at once."""

    def close(self) -> None:
        """Hang up for good, politely if possible."""


class MqttLine:
    """The real one. `node` is `host:port`, or `mqtts://host:port` for TLS."""

    def __init__(
        self,
        node: str,
        group: str,
        client_id: str,
        username: str | None = None,
        password: str | None = None,
        start: str | None = None,
    ):
        self.node = node
        self._host, self._port, secure = parse_node(node)
        self._tls = ssl.create_default_context() if secure else None
        self._client_id, self._username, self._password, self._start = client_id, username, password, start
        base, client = f"$holdfast/lease/{quote(group, safe='')}", quote(client_id, safe="")
        self._from, self._to = f"{base}/from/{client}", f"{base}/to/{client}"
        self._sock: socket.socket | None = None
        self._buffer = b""
        self._packet_id = 0
        self._said_at = self._heard_at = 0.0
        self._woken, self._waker = socket.socketpair()
        self._woken.setblocking(False)
        self._waker.setblocking(False)

    # -- opening and closing ---------------------------------------------------------------------------

    def open(self) -> None:
        self._drop()
        try:
            sock = socket.create_connection((self._host, self._port), ANSWER_SECONDS)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._sock = self._tls.wrap_socket(sock, server_hostname=self._host) if self._tls else sock
        except OSError as error:
            why = error.strerror or error
            raise NodeUnavailable(f"node {self.node} cannot be reached: {why}; is it running there?") from error
        self._buffer = b""
        self._heard_at = time.monotonic()
        try:
            self._introduce()
        except BaseException:
            self._drop()
            raise

    def _introduce(self) -> None:
        password = None if self._password is None else self._password.encode()
        connect = p.Connect(self._client_id, p.V5, True, KEEP_ALIVE_SECONDS, self._username, password)
        self._write(codec.encode_connect(connect))
        connack = self._answer()
        if not isinstance(connack, p.Connack):
            raise NodeUnavailable(f"node {self.node} said {type(connack).__name__} in place of CONNACK")
        if connack.reason:
            raise self._refusal(connack.reason, f"refuses client {self._client_id!r}", connack.properties)
        properties: p.Properties = {}
        if self._start is not None:
            properties["user_properties"] = [("holdfast-start", self._start)]
        self._write(codec.encode_subscribe(p.Subscribe(1, (p.FilterRequest(self._to),), 0, properties), p.V5))
        suback = self._answer()
        if not isinstance(suback, p.Suback):
            raise NodeUnavailable(f"node {self.node} said {type(suback).__name__} in place of SUBACK")
        if suback.reasons[0] >= 0x80:
            raise self._refusal(suback.reasons[0], f"leases nothing to {self._client_id!r}", suback.properties)

    def _answer(self) -> p.Packet:
        give_up = time.monotonic() + ANSWER_SECONDS
        while (left := give_up - time.monotonic()) > 0:
            for packet in self._packets():
                if isinstance(packet, p.Disconnect):
                    raise self._refusal(packet.reason, "hung up", packet.properties)
                return packet
            self._fill(left)
        raise NodeUnavailable(f"node {self.node} did not answer within {ANSWER_SECONDS:.0f} s; is this an MQTT port?")

    def _refusal(self, reason: int, what: str, properties: p.Properties) -> HoldfastError:
        why = properties.get("reason_string", "")
        text = f"node {self.node} {what}: {describe(reason)}{f' ({why})' if why else ''}"
        if reason == Reason.SESSION_TAKEN_OVER:
            return RequestError(f"{text}; another client has connected as {self._client_id!r}: give each its own id")
        return NodeUnavailable(text) if reason in PASSING else RequestError(text)

    def close(self) -> None:
        if self._sock is not None:
            with contextlib.suppress(HoldfastError):
                self._write(codec.encode_disconnect(p.Disconnect(), p.V5))
        self._drop()
        self._woken.close()
        self._waker.close()

    def _drop(self) -> None:
        sock, self._sock = self._sock, None
        if sock is not None:
            sock.close()

    # -- speaking and listening ------------------------------------------------------------------------

    def send(self, payload: bytes) -> None:
        # At QoS 1, so that a refusal is heard of. Nothing is kept for resending: the machines do that.
        self._packet_id = self._packet_id % 65_535 + 1
        self._write(codec.encode_publish(p.Publish(self._from, payload, 1, packet_id=self._packet_id), p.V5))

    def receive(self, seconds: float) -> list[bytes]:
        now = time.monotonic()
        if now - self._heard_at > KEEP_ALIVE_SECONDS * 1.5:
            self._drop()
            raise NodeUnavailable(f"node {self.node} has been silent for {now - self._heard_at:.0f} s")
        if now - self._said_at > KEEP_ALIVE_SECONDS / 2:
            self._write(codec.encode_pingreq())
        self._fill(min(seconds, KEEP_ALIVE_SECONDS / 4))
        found = []
        for packet in self._packets():
            match packet:
                case p.Publish():
                    found.append(packet.payload)
                case p.Puback(_, reason, properties) if reason >= 0x80:
                    raise self._refusal(reason, f"refuses what {self._client_id!r} said", properties)
                case p.Disconnect(reason, properties):
                    self._drop()
                    raise self._refusal(reason, "hung up", properties)
        return found

    def wake(self) -> None:
        with contextlib.suppress(OSError):
            self._waker.send(b"\0")

    def _write(self, data: bytes) -> None:
        if self._sock is None:
            raise NodeUnavailable(f"there is no connection to node {self.node}")
        try:
            self._sock.settimeout(ANSWER_SECONDS)
            self._sock.sendall(data)
        except OSError as error:
            raise self._lost(error) from error
        self._said_at = time.monotonic()

    def _fill(self, seconds: float) -> None:
        """Wait for bytes, or to be woken; take what is there."""
        sock = self._sock
        if sock is None:
            raise NodeUnavailable(f"there is no connection to node {self.node}")
        known = len(self._buffer)
        try:
            ready = select.select([sock, self._woken], [], [], max(0.0, seconds))[0]
            if self._woken in ready:
                self._woken.recv(4096)
            if sock not in ready:
                return
            sock.setblocking(False)
            with contextlib.suppress(BlockingIOError, ssl.SSLWantReadError):
                while True:  # TLS may hold more than `select` can see
                    data = sock.recv(1 << 18)
                    if not data:
                        raise OSError("it has closed the connection")
                    self._buffer += data
                    self._heard_at = time.monotonic()
        except OSError as error:
            if len(self._buffer) == known:  # else its last words first
                raise self._lost(error) from error

    def _packets(self) -> Iterator[p.Packet]:
        try:
            while (found := codec.frame(self._buffer)) is not None:
                first, start, stop = found
                body, self._buffer = self._buffer[start:stop], self._buffer[stop:]
                yield codec.decode_for_client(first, body, p.V5)
        except PeerError as error:
            self._drop()
            raise NodeUnavailable(f"node {self.node} does not speak MQTT 5: {error}") from error

    def _lost(self, error: OSError) -> NodeUnavailable:
        self._drop()
        return NodeUnavailable(f"the connection to node {self.node} is lost: {error.strerror or error}")


def parse_node(node: str) -> tuple[str, int, bool]:
    """`host:port`, `mqtt://host:port` or `mqtts://host:port`: host, port, and whether by TLS."""
    scheme, found, rest = node.partition("://")
    if not found:
        scheme, rest = "mqtt", node
    host, colon, port = rest.rpartition(":")
    if not colon:
        host, port = rest, str(PORTS.get(scheme, 0))
    host = host.removeprefix("[").removesuffix("]")
    if scheme not in PORTS or not host or not port.isdecimal() or not 0 < int(port) < 65_536:
        raise RequestError(f"{node!r} is no node; write host:port, or mqtts://host:port for TLS")
    return host, int(port), scheme == "mqtts"
