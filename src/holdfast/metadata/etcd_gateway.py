"""etcd's JSON gateway over kept-alive HTTP connections: calls that know what may be repeated, and streams.

The gateway speaks the v3 API as JSON with base64 for bytes, so the standard library is all it takes.
"""

from __future__ import annotations

import http.client
import json
import select
import socket
import threading
import time
from base64 import b64decode, b64encode
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import Any

from holdfast.errors import OutcomeUnknown, RequestError, StoreError, StoreFull, StoreUnavailable
from holdfast.jitter import chance

Json = dict[str, Any]
Endpoint = tuple[str, int]

CALL_SECONDS = 10.0
SILENCE_SECONDS = 30.0
"""A stream that is silent this long is opened anew: the other side may be gone without a word."""

IDLE_MAX = 8

# The gRPC status codes that mean something to us.
INVALID_ARGUMENT, DEADLINE_EXCEEDED, NOT_FOUND, RESOURCE_EXHAUSTED, OUT_OF_RANGE, UNAVAILABLE = 3, 4, 5, 8, 11, 14


class EtcdError(StoreError):
    """etcd refused; `code` is its gRPC status."""

    def __init__(self, message: str, code: int):
        super().__init__(message)
        self.code = code


def encode(data: bytes) -> str:
    return b64encode(data).decode()


def decode(text: str) -> bytes:
    return b64decode(text)


class Gateway:
    """One or several members of one etcd cluster; a member that does not answer gives way to the next."""

    def __init__(self, endpoints: Sequence[Endpoint], retry_seconds: float):
        self._endpoints = list(endpoints)
        self._retry_seconds = retry_seconds
        self._idle: list[http.client.HTTPConnection] = []
        self._lock = threading.Lock()
        self._closed = False

    @property
    def name(self) -> str:
        return "etcd at " + ",".join(f"{host}:{port}" for host, port in self._endpoints)

    def call(self, path: str, body: Json, *, repeatable: bool, give_up: Callable[[], bool] = lambda: False) -> Json:
        """One request and its answer. While etcd is away: again, unless it may have been carried out and
        doing it twice would matter."""
        until = time.monotonic() + self._retry_seconds
        pause = 0.05
        while True:
            try:
                return self.call_once(path, body, repeatable=repeatable)
            except StoreUnavailable:
                if self._closed or give_up() or time.monotonic() + pause > until:
                    raise
            time.sleep(pause * (0.5 + chance.random()))
            pause = min(pause * 2, 2.0)

    def call_once(self, path: str, body: Json, *, repeatable: bool) -> Json:
        connection = self._take()
        try:
            connection.request("POST", path, json.dumps(body), {"Content-Type": "application/json"})
        except OSError as error:  # not all of it was sent, so none of it was done
            connection.close()
            raise self._away(error) from error
        try:
            response = connection.getresponse()
            status, data = response.status, response.read()
        except (OSError, http.client.HTTPException) as error:
            connection.close()
            if repeatable:
                raise self._away(error) from error
            raise OutcomeUnknown(f"lost {self.name} during a change ({_say(error)})") from error
        self._give_back(connection)
        try:
            # A call that is a stream in gRPC answers one line per message; ours have one message.
            answer = json.loads(data.split(b"\n", 1)[0])
        except ValueError as error:
            raise StoreError(f"{self.name} answered {path} with status {status} and no JSON: is it etcd?") from error
        if status != 200 or "error" in answer:
            raise self.refusal(answer, repeatable)
        result: Json = answer.get("result", answer)
        return result

    def stream(self, path: str, message: Json) -> WatchStream:
        """The answers to one message, for as long as etcd has any."""
        connection = self._connect()
        connection.sock.settimeout(SILENCE_SECONDS)
        try:
            connection.request("POST", path, json.dumps(message), {"Content-Type": "application/json"})
        except OSError as error:
            connection.close()
            raise self._away(error) from error
        return WatchStream(self, connection)

    def refusal(self, answer: Json, repeatable: bool) -> Exception:
        error = answer.get("error", "")
        detail = error if isinstance(error, dict) else answer
        message = str(detail.get("message") or error).removeprefix("etcdserver: ")
        code = int(detail.get("code") or detail.get("grpc_code") or 0)
        if code in (UNAVAILABLE, DEADLINE_EXCEEDED):
            if repeatable or message == "no leader":
                return StoreUnavailable(f"{self.name} cannot serve just now: {message}")
            return OutcomeUnknown(f"{self.name} did not finish a change: {message}")
        if code == INVALID_ARGUMENT or "larger than max" in message:
            return RequestError(f"{self.name} refused: {message}")
        if code == RESOURCE_EXHAUSTED and "space" in message:
            return StoreFull(f"no room left in {self.name} ({message}); compact it or raise its quota")
        return EtcdError(f"{self.name} refused: {message}", code)

    def _take(self) -> http.client.HTTPConnection:
        with self._lock:
            while self._idle:
                connection = self._idle.pop()
                if not _hung_up(connection):
                    return connection
                connection.close()
        return self._connect()

    def _give_back(self, connection: http.client.HTTPConnection) -> None:
        with self._lock:
            if not self._closed and connection.sock is not None and len(self._idle) < IDLE_MAX:
                self._idle.append(connection)
                return
        connection.close()

    def _connect(self) -> http.client.HTTPConnection:
        problem: OSError | None = None
        for host, port in list(self._endpoints):
            connection = http.client.HTTPConnection(host, port, timeout=CALL_SECONDS)
            try:
                connection.connect()
            except OSError as error:
                connection.close()
                problem = error
                with self._lock:  # ask the others first next time
                    self._endpoints = [*self._endpoints[1:], self._endpoints[0]]
                continue
            connection.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            return connection
        assert problem is not None
        raise self._away(problem) from problem

    def _away(self, error: Exception) -> StoreUnavailable:
        return StoreUnavailable(f"cannot reach {self.name}: {_say(error)}")

    def close(self) -> None:
        with self._lock:
            self._closed = True
            idle, self._idle = self._idle, []
        for connection in idle:
            connection.close()


class WatchStream:
    """Answers as they come. Any thread may `stop` it; the one that reads closes it."""

    def __init__(self, gateway: Gateway, connection: http.client.HTTPConnection):
        self._gateway, self._connection = gateway, connection
        self._socket = connection.sock
        self._response: http.client.HTTPResponse | None = None

    def __iter__(self) -> Iterator[Json]:
        """Ends when the stream is stopped, falls silent or breaks: ask again from where it came to."""
        try:
            self._response = self._connection.getresponse()
            while line := self._response.readline():
                answer = json.loads(line)
                if "result" not in answer:
                    raise self._gateway.refusal(answer, repeatable=True)
                yield answer["result"]
        except (OSError, http.client.HTTPException, ValueError):
            return

    def stop(self) -> None:
        with suppress(OSError):  # it has ended by itself
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        if self._response is not None:
            self._response.close()
        self._connection.close()


def _hung_up(connection: http.client.HTTPConnection) -> bool:
    """Whether the other side has closed it meanwhile: nothing but the end can be waiting to be read."""
    poll = select.poll()
    poll.register(connection.sock, select.POLLIN)
    return bool(poll.poll(0))


def _say(error: Exception) -> str:
    return getattr(error, "strerror", None) or str(error) or type(error).__name__
