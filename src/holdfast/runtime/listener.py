"""Sockets: TCP and TLS as they are, WebSocket unwrapped, all to the same connections."""

from __future__ import annotations

import asyncio
import logging
import ssl
from typing import TYPE_CHECKING, Any

from websockets.datastructures import Headers
from websockets.exceptions import InvalidHandshake
from websockets.frames import CloseCode, Opcode
from websockets.http11 import Request, Response
from websockets.protocol import State
from websockets.server import ServerProtocol
from websockets.typing import Subprotocol

from holdfast.errors import RequestError
from holdfast.runtime.connection import Connection
from holdfast.settings import MqttSettings, address

if TYPE_CHECKING:
    from holdfast.runtime.front import Front

logger = logging.getLogger("holdfast.listener")

BACKLOG = 4096


def tls_context(settings: MqttSettings) -> ssl.SSLContext:
    """TLS 1.2 and up, with client certificates where an authority for them is named."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    try:
        context.load_cert_chain(settings.tls_certificate, settings.tls_key or None)
        if settings.tls_client_ca:
            context.load_verify_locations(settings.tls_client_ca)
            context.verify_mode = ssl.CERT_REQUIRED
    except (OSError, ssl.SSLError) as error:
        raise RequestError(
            f"TLS cannot be set up from mqtt.tls_certificate {settings.tls_certificate!r}, mqtt.tls_key "
            f"{settings.tls_key!r}, mqtt.tls_client_ca {settings.tls_client_ca!r}: {error}"
        ) from error
    return context


async def listen(front: Front) -> list[asyncio.Server]:
    """Open every listener the settings name."""
    settings, servers = front.settings.mqtt, []
    context = tls_context(settings) if settings.tls or settings.websocket_tls else None
    wait = front.settings.limits.connect_secs
    loop = asyncio.get_running_loop()
    for name, where, wrapped, tls in (
        ("mqtt.listen", settings.listen, False, None),
        ("mqtt.tls", settings.tls, False, context),
        ("mqtt.websocket", settings.websocket, True, None),
        ("mqtt.websocket_tls", settings.websocket_tls, True, context),
    ):
        if not where:
            continue
        host, port = address(name, where)

        def accept(wrapped: bool = wrapped, tls: Any = tls) -> asyncio.Protocol:
            connection = Connection(front, secure=tls is not None)
            return WebSocket(connection, 2 * front.settings.limits.packet_bytes_max) if wrapped else connection

        more: dict[str, Any] = {}
        if tls:
            more = {"ssl": tls, "ssl_handshake_timeout": wait, "ssl_shutdown_timeout": LINGER_SECONDS}
        try:
            servers.append(await loop.create_server(accept, host, port, backlog=BACKLOG, reuse_address=True, **more))
        except OSError as error:
            raise RequestError(f"cannot listen on {where} ({name}): {error.strerror or error}") from error
        logger.info("listening on %s (%s)", where, name)
    return servers


TURN_SECONDS = 0.01
"""How long one WebSocket's frames may take before the other connections get their turn."""

PIECE_BYTES = 8 << 10

LINGER_SECONDS = 2.0


class WebSocket(asyncio.Protocol):
    """A WebSocket around a connection. To the connection it is the transport; to the socket, the protocol."""

    def __init__(self, inner: Connection, size_max: int):
        self._inner = inner
        self._wire = ServerProtocol(subprotocols=[Subprotocol("mqtt"), Subprotocol("mqttv3.1")], max_size=size_max)
        self._socket: Any = None
        self._open = False
        self._parts: list[bytes] = []
        self._waiting = bytearray()
        """What came and was not unwrapped yet."""
        self._paused = False
        """The connection wants nothing further for now."""
        self._eof = False
        """The client has closed its sending side."""
        self._lost = False
        self._lingers = False
        self._size_max = size_max
        self._unread = False
        """The client does not read its pongs: no more frames are unwrapped until it does."""

    # what the socket calls

    def connection_made(self, transport: Any) -> None:
        self._socket = transport
        self._inner.connection_made(self)

    def data_received(self, data: bytes) -> None:
        first = not self._waiting
        self._waiting += data
        if first:
            self._unwrap()

    def _unwrap(self) -> None:
        """Frames can be tiny, and each costs something: after a while it is the others' turn."""
        loop = asyncio.get_running_loop()
        until = loop.time() + TURN_SECONDS
        if self._lost:
            return
        while self._waiting and not self._paused and not self._unread:
            piece = bytes(self._waiting[:PIECE_BYTES])
            del self._waiting[:PIECE_BYTES]
            self._wire.receive_data(piece)
            self._events()
            if self._waiting and loop.time() > until:
                self._socket.pause_reading()
                loop.call_soon(self._unwrap)
                return
        if self._paused or self._unread:
            return
        if not self._eof:
            self._socket.resume_reading()
        elif not self._hear_out():
            self._socket.close()

    def _events(self) -> None:
        for event in self._wire.events_received():
            if isinstance(event, Request):
                self._handshake(event)
            elif isinstance(event, Response):
                continue
            elif event.opcode in (Opcode.BINARY, Opcode.CONT):
                self._parts.append(bytes(event.data))
                if event.fin:
                    whole, self._parts = b"".join(self._parts), []
                    self._inner.data_received(whole)
            elif event.opcode is Opcode.TEXT:
                self._wire.fail(CloseCode.UNSUPPORTED_DATA, "MQTT is sent in binary frames")
                break
        self._flush()
        if self._open and self._wire.state is not State.OPEN:
            self._linger()

    def _handshake(self, request: Request) -> None:
        response: Response
        try:
            response = self._wire.accept(request)
        except InvalidHandshake as error:
            response = self._wire.reject(400, f"{error}\n")
        if isinstance(response.headers, Headers) and response.status_code == 101:
            self._open = True
        self._wire.send_response(response)

    def _flush(self) -> None:
        for data in self._wire.data_to_send():
            if data:
                self._socket.write(data)
                if self._socket.get_write_buffer_size() > self._size_max and not self._unread:
                    self._unread = True
                    self._socket.pause_reading()
            elif self._socket.can_write_eof():  # the library's word for: close the sending side
                self._socket.write_eof()

    def _linger(self) -> None:
        """It is over; the client has a moment to read why and to go, and is then made to."""
        if not self._lingers:
            self._lingers = True
            asyncio.get_running_loop().call_later(LINGER_SECONDS, self._socket.abort)

    def eof_received(self) -> bool:
        self._eof = True
        if self._waiting and not self._inner.secure:
            return True
        return self._hear_out()

    def _hear_out(self) -> bool:
        """The client sends no more, and all it sent was unwrapped: does the connection still have to do with it?"""
        if self._wire.state is not State.CLOSED:
            self._wire.receive_eof()
            self._flush()
        return self._inner.eof_received()

    def pause_writing(self) -> None:
        self._inner.pause_writing()

    def resume_writing(self) -> None:
        self._inner.resume_writing()
        if self._unread:
            self._unread = False
            asyncio.get_running_loop().call_soon(self._unwrap)

    def connection_lost(self, error: Exception | None) -> None:
        self._lost = True
        self._waiting.clear()
        self._inner.connection_lost(error)

    # what the connection calls

    def write(self, data: bytes) -> None:
        if self._open and self._wire.state is State.OPEN:
            self._wire.send_binary(data)
            self._flush()

    def can_write_eof(self) -> bool:
        return False

    def close(self) -> None:
        if self._open and self._wire.state is State.OPEN:
            self._wire.send_close(CloseCode.NORMAL_CLOSURE)
            self._flush()
            self._linger()
        elif self._eof or not self._lingers:
            self._socket.close()

    def abort(self) -> None:
        self._socket.abort()

    def is_closing(self) -> bool:
        return bool(self._socket.is_closing())

    def pause_reading(self) -> None:
        self._paused = True
        self._socket.pause_reading()

    def resume_reading(self) -> None:
        if self._paused:
            self._paused = False
            asyncio.get_running_loop().call_soon(self._unwrap)

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        self._socket.set_write_buffer_limits(high=high, low=low)

    def get_write_buffer_size(self) -> int:
        return int(self._socket.get_write_buffer_size())

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return self._socket.get_extra_info(name, default)
