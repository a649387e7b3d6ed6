"""Three MQTT clients nobody here wrote, unmodified, behind one small face, so that a promise is tested with each.

Property names are paho's (`ContentType`, `UserProperty`), as is `Properties`' way of repeating user properties: a
list of pairs. None of them reconnects by itself: what happens after a connection ends is the test's to say.
"""

from __future__ import annotations

import asyncio
import contextlib
import queue
import socket
import ssl
import threading
import time
from collections.abc import Coroutine, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiomqtt
import paho.mqtt.client as paho
from paho.mqtt.enums import CallbackAPIVersion
from paho.mqtt.packettypes import PacketTypes
from paho.mqtt.properties import Properties
from paho.mqtt.reasoncodes import ReasonCode
from paho.mqtt.subscribeoptions import SubscribeOptions

SECONDS = 10.0
"""How long anything may take before it counts as not happening."""

V311, V5 = 4, 5


class Refused(Exception):
    """CONNECT was answered with an error; `reason` is the code as that version has it."""

    def __init__(self, reason: int | None, text: str = ""):
        super().__init__(f"refused: {reason} {text}")
        self.reason = reason


@dataclass(frozen=True)
class Message:
    topic: str
    payload: bytes
    qos: int
    retain: bool
    dup: bool = False
    mid: int = 0
    properties: Mapping[str, Any] = field(default_factory=dict)

    @property
    def text(self) -> str:
        return self.payload.decode()


@dataclass(frozen=True)
class Will:
    topic: str
    payload: bytes = b"gone"
    qos: int = 1
    retain: bool = False
    properties: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Dial:
    """How to connect: where, as whom, in which version, with what."""

    port: int
    client_id: str
    version: int
    host: str = "127.0.0.1"
    clean: bool = True
    keep_alive: int = 60
    will: Will | None = None
    properties: Mapping[str, Any] = field(default_factory=dict)
    """Of the CONNECT, MQTT 5 only."""
    websocket: bool = False
    authority: Path | None = None
    """The certificate authority's file; TLS if given."""
    username: str | None = None
    password: str | None = None
    manual_ack: bool = False
    """Acknowledge only when told to (`ack`); paho only."""


class Client:
    """What the tests ask of a client. `connect` comes first; `messages` holds what arrived and was not yet taken."""

    library = ""

    def __init__(self, dial: Dial):
        self.dial = dial
        self.messages: queue.Queue[Message] = queue.Queue()
        self.session_present: bool | None = None
        """As CONNACK said it; None if the library does not tell."""
        self.connack: Mapping[str, Any] = {}
        self.gone: queue.Queue[int | None] = queue.Queue()
        """The reason the server gave for ending the connection, None for none, once it has ended."""

    @property
    def v5(self) -> bool:
        return self.dial.version == V5

    def connect(self) -> Client:
        raise NotImplementedError

    def subscribe(self, topic_filter: str, qos: int = 1, **options: Any) -> int:
        """The reason code granted. Options: `no_local`, `retain_as_published`, `retain_handling`, `properties`."""
        raise NotImplementedError

    def unsubscribe(self, topic_filter: str) -> None:
        raise NotImplementedError

    def publish(
        self,
        topic: str,
        payload: bytes | str = b"",
        qos: int = 1,
        retain: bool = False,
        properties: Mapping[str, Any] | None = None,
    ) -> int:
        """Returns the acknowledgement's reason code (0 at QoS 0), when it is there."""
        raise NotImplementedError

    def disconnect(self, reason: int = 0, properties: Mapping[str, Any] | None = None) -> None:
        """DISCONNECT, and wait until the connection has ended."""
        raise NotImplementedError

    def drop(self) -> None:
        """End the connection without a word, as a vehicle in a tunnel does."""
        raise NotImplementedError

    def close(self) -> None:
        """Whatever state it is in: leave nothing behind."""
        raise NotImplementedError

    def next(self, seconds: float = SECONDS) -> Message:
        try:
            return self.messages.get(timeout=seconds)
        except queue.Empty:
            raise AssertionError(f"{self.dial.client_id}: no message within {seconds} s") from None

    def take(self, count: int, seconds: float = SECONDS) -> list[Message]:
        give_up = time.monotonic() + seconds
        found: list[Message] = []
        while len(found) < count:
            try:
                found.append(self.messages.get(timeout=max(0.0, give_up - time.monotonic())))
            except queue.Empty:
                raise AssertionError(
                    f"{self.dial.client_id}: {len(found)} of {count} messages within {seconds} s: "
                    f"{[message.payload[:30] for message in found][:20]}"
                ) from None
        return found

    def until(self, marker: bytes, seconds: float = SECONDS) -> list[Message]:
        """What comes before the message with this payload: how to say that something does *not* come."""
        give_up = time.monotonic() + seconds
        found: list[Message] = []
        while True:
            message = self.next(max(0.001, give_up - time.monotonic()))
            if message.payload == marker:
                return found
            found.append(message)

    def ended(self, seconds: float = SECONDS) -> int | None:
        """Wait for the server to end the connection; the reason it gave."""
        try:
            return self.gone.get(timeout=seconds)
        except queue.Empty:
            raise AssertionError(f"{self.dial.client_id}: still connected after {seconds} s") from None


def to_paho(kind: int, properties: Mapping[str, Any] | None) -> Properties | None:
    if not properties:
        return None
    found = Properties(kind)
    for key, value in properties.items():
        setattr(found, key, value)
    return found


def from_paho(properties: Properties | None) -> dict[str, Any]:
    if properties is None:
        return {}
    known = (name.replace(" ", "") for name in properties.names)
    return {name: getattr(properties, name) for name in known if hasattr(properties, name)}


def sub_options(qos: int, options: Mapping[str, Any]) -> SubscribeOptions:
    return SubscribeOptions(
        qos=qos,
        noLocal=options.get("no_local", False),
        retainAsPublished=options.get("retain_as_published", False),
        retainHandling=options.get("retain_handling", 0),
    )


class PahoClient(Client):
    library = "paho"

    def __init__(self, dial: Dial):
        super().__init__(dial)
        self.client = client = paho.Client(
            CallbackAPIVersion.VERSION2,
            dial.client_id,
            clean_session=None if self.v5 else dial.clean,
            protocol=paho.MQTTv5 if self.v5 else paho.MQTTv311,
            transport="websockets" if dial.websocket else "tcp",
            reconnect_on_failure=False,
            manual_ack=dial.manual_ack,
        )
        self._answers: dict[tuple[str, int], queue.Queue[Any]] = {}
        self._lock = threading.Lock()
        self._connected: queue.Queue[tuple[int, str]] = queue.Queue()
        client.on_connect = self._on_connect
        client.on_disconnect = self._on_disconnect
        client.on_message = lambda c, u, message: self.messages.put(
            Message(
                message.topic,
                message.payload,
                message.qos,
                message.retain,
                message.dup,
                message.mid,
                from_paho(message.properties),
            )
        )
        client.on_subscribe = lambda c, u, mid, reasons, p: self._answer("sub", mid).put(reasons)
        client.on_unsubscribe = lambda c, u, mid, reasons, p: self._answer("unsub", mid).put(reasons)
        client.on_publish = lambda c, u, mid, reason, p: self._answer("pub", mid).put(reason)
        if dial.authority is not None:
            client.tls_set(ca_certs=str(dial.authority))
        if dial.username is not None:
            client.username_pw_set(dial.username, dial.password)
        if dial.will is not None:
            will = dial.will
            properties = to_paho(PacketTypes.WILLMESSAGE, will.properties) if self.v5 else None
            client.will_set(will.topic, will.payload, will.qos, will.retain, properties)

    def _answer(self, kind: str, mid: int) -> queue.Queue[Any]:
        with self._lock:
            return self._answers.setdefault((kind, mid), queue.Queue())

    def _await(self, kind: str, mid: int | None) -> Any:
        assert mid is not None, f"{kind} could not be sent"
        try:
            return self._answer(kind, mid).get(timeout=SECONDS)
        except queue.Empty:
            raise AssertionError(f"{self.dial.client_id}: {kind} {mid} not acknowledged in {SECONDS} s") from None
        finally:
            self._answers.pop((kind, mid), None)

    def _on_connect(self, client: Any, user: Any, flags: Any, reason: Any, properties: Any) -> None:
        self.session_present = flags.session_present
        self.connack = from_paho(properties)
        self._connected.put((reason.value, str(reason)))

    def _on_disconnect(self, client: Any, user: Any, flags: Any, reason: Any, properties: Any) -> None:
        told = flags.is_disconnect_packet_from_server
        self._connected.put((-1, "closed"))
        self.gone.put(reason.value if told else None)

    def connect(self) -> PahoClient:
        dial = self.dial
        start: dict[str, Any] = {}
        if self.v5:
            start = {"clean_start": dial.clean, "properties": to_paho(PacketTypes.CONNECT, dial.properties)}
        self.client.connect(dial.host, dial.port, dial.keep_alive, **start)
        self.client.loop_start()
        try:
            reason, text = self._connected.get(timeout=SECONDS)
        except queue.Empty:
            raise AssertionError(f"{dial.client_id}: no CONNACK in {SECONDS} s") from None
        if reason != 0:
            raise Refused(None if reason < 0 else reason, text)
        return self

    def subscribe(self, topic_filter: str, qos: int = 1, **options: Any) -> int:
        if self.v5:
            properties = to_paho(PacketTypes.SUBSCRIBE, options.pop("properties", None))
            _, mid = self.client.subscribe(topic_filter, options=sub_options(qos, options), properties=properties)
        else:
            _, mid = self.client.subscribe(topic_filter, qos)
        return self._await("sub", mid)[0].value

    def unsubscribe(self, topic_filter: str) -> None:
        self._await("unsub", self.client.unsubscribe(topic_filter)[1])

    def send(self, topic: str, payload: bytes | str = b"", qos: int = 1, **options: Any) -> int:
        """Publish without waiting; the packet id, for `acked`."""
        properties = to_paho(PacketTypes.PUBLISH, options.pop("properties", None))
        return self.client.publish(topic, payload, qos, properties=properties, **options).mid

    def acked(self, mid: int) -> int:
        return self._await("pub", mid).value

    def publish(
        self,
        topic: str,
        payload: bytes | str = b"",
        qos: int = 1,
        retain: bool = False,
        properties: Mapping[str, Any] | None = None,
    ) -> int:
        return self.acked(self.send(topic, payload, qos, retain=retain, properties=properties))

    def ack(self, message: Message) -> None:
        self.client.ack(message.mid, message.qos)

    def disconnect(self, reason: int = 0, properties: Mapping[str, Any] | None = None) -> None:
        if self.v5:
            code = ReasonCode(PacketTypes.DISCONNECT, identifier=reason)
            self.client.disconnect(code, to_paho(PacketTypes.DISCONNECT, properties))
        else:
            self.client.disconnect()
        self.ended()
        self.client.loop_stop()

    def drop(self) -> None:
        sock = self.client.socket()
        assert sock is not None, "not connected"
        sock.shutdown(socket.SHUT_RDWR)
        self.ended()
        self.client.loop_stop()

    def close(self) -> None:
        self.client.on_disconnect = None
        self.client.disconnect()
        self.client.loop_stop()
        sock = self.client.socket()
        if sock is not None:
            sock.close()


class _Loop:
    """One asyncio loop in a thread, for every aiomqtt client of the run."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        threading.Thread(target=self.loop.run_forever, daemon=True).start()

    def run(self, work: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(asyncio.wait_for(work, SECONDS), self.loop).result(SECONDS + 5)


class AioClient(Client):
    library = "aiomqtt"
    _shared: _Loop | None = None

    def __init__(self, dial: Dial):
        super().__init__(dial)
        AioClient._shared = AioClient._shared or _Loop()
        self._loop = AioClient._shared
        self._reader: asyncio.Task[None] | None = None

    def connect(self) -> AioClient:
        self._loop.run(self._connect())
        return self

    async def _connect(self) -> None:
        dial = self.dial
        start: dict[str, Any] = {"clean_session": dial.clean}
        if self.v5:
            start = {"clean_start": dial.clean, "properties": to_paho(PacketTypes.CONNECT, dial.properties)}
        will = None
        if dial.will is not None:
            properties = to_paho(PacketTypes.WILLMESSAGE, dial.will.properties) if self.v5 else None
            will = aiomqtt.Will(dial.will.topic, dial.will.payload, dial.will.qos, dial.will.retain, properties)
        self.client = aiomqtt.Client(
            dial.host,
            dial.port,
            identifier=dial.client_id,
            protocol=aiomqtt.ProtocolVersion.V5 if self.v5 else aiomqtt.ProtocolVersion.V311,
            keepalive=dial.keep_alive,
            will=will,
            transport="websockets" if dial.websocket else "tcp",
            tls_context=ssl.create_default_context(cafile=str(dial.authority)) if dial.authority else None,
            username=dial.username,
            password=dial.password,
            **start,
        )
        try:
            await self.client.__aenter__()
        except aiomqtt.MqttConnectError as error:
            raise Refused(getattr(error.rc, "value", error.rc), str(error)) from None
        except aiomqtt.MqttError as error:
            raise Refused(None, str(error)) from None
        self._reader = asyncio.create_task(self._read())

    async def _read(self) -> None:
        try:
            async for message in self.client.messages:
                self.messages.put(
                    Message(
                        str(message.topic),
                        message.payload,
                        message.qos,
                        message.retain,
                        mid=message.mid,
                        properties=from_paho(message.properties),
                    )
                )
        except aiomqtt.MqttError:
            self.gone.put(None)

    def subscribe(self, topic_filter: str, qos: int = 1, **options: Any) -> int:
        if self.v5:
            given: dict[str, Any] = {
                "properties": to_paho(PacketTypes.SUBSCRIBE, options.pop("properties", None)),
                "options": sub_options(qos, options),
            }
        else:
            given = {"qos": qos}
        reasons = self._loop.run(self.client.subscribe(topic_filter, **given))
        return getattr(reasons[0], "value", reasons[0])

    def unsubscribe(self, topic_filter: str) -> None:
        self._loop.run(self.client.unsubscribe(topic_filter))

    def publish(
        self,
        topic: str,
        payload: bytes | str = b"",
        qos: int = 1,
        retain: bool = False,
        properties: Mapping[str, Any] | None = None,
    ) -> int:
        given = to_paho(PacketTypes.PUBLISH, properties)
        self._loop.run(self.client.publish(topic, payload, qos, retain, properties=given))
        return 0

    def disconnect(self, reason: int = 0, properties: Mapping[str, Any] | None = None) -> None:
        assert reason == 0 and not properties, "aiomqtt always says DISCONNECT 0"
        self._loop.run(self._leave())

    async def _leave(self) -> None:
        if self._reader is not None:
            self._reader.cancel()
            self._reader = None
            with contextlib.suppress(aiomqtt.MqttError):
                await self.client.__aexit__(None, None, None)

    def drop(self) -> None:
        sock = self.client._client.socket()
        assert sock is not None, "not connected"
        sock.shutdown(socket.SHUT_RDWR)
        self.ended()

    def close(self) -> None:
        with contextlib.suppress(TimeoutError):
            self._loop.run(self._leave())
