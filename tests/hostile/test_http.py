"""The HTTP API given anything but what it takes: it says what is wrong, and the node goes on."""

from __future__ import annotations

import http.client
import json
import os
import signal
import socket
import struct

import pytest

from hostile.attack import Target


def ask(target: Target, method: str, path: str, body: bytes = b"", **headers: str) -> tuple[int, bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", target.node.http_port, timeout=10)
    try:
        connection.request(method, path, body or None, {"Content-Type": "application/json", **headers})
        answer = connection.getresponse()
        return answer.status, answer.read()
    finally:
        connection.close()


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b"\xff\xfe",
        b'{"topic": 5, "payload": "x"}',
        b'{"topic": "", "payload": "x"}',
        b'{"topic": "a/+", "payload": "x"}',
        b'{"topic": "a\\u0000b", "payload": "x"}',
        b'{"topic": "$SYS/x", "payload": "x"}',
        b'{"topic": "a"}',
        b'{"topic": "a", "payload": "x", "payload_base64": "eA=="}',
        b'{"topic": "a", "payload_base64": "***"}',
        b'{"topic": "a", "payload": "x", "qos": 3}',
        b"[" * 100_000,
        json.dumps({"topic": "x" * 70_000, "payload": "x"}).encode(),
    ],
)
def test_a_publish_that_is_none_is_refused(target: Target, body: bytes) -> None:
    with target.unharmed(grows_mb=24):
        status, said = ask(target, "POST", "/api/v1/publish", body)
        assert status in (400, 422), said


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("GET", "/api/v1/publish"),
        ("DELETE", "/api/v1/messages"),
        ("PUT", "/api/v1/sessions"),
        ("BREW", "/api/v1/sessions"),
        ("POST", "/healthz"),
    ],
)
def test_a_wrong_method_is_not_allowed(target: Target, method: str, path: str) -> None:
    with target.unharmed(grows_mb=16):
        assert ask(target, method, path)[0] == 405


@pytest.mark.parametrize(
    "path",
    [
        "/api/v1/sessions/%00",
        "/api/v1/sessions/..%2f..%2fetc%2fpasswd",
        "/api/v1/sessions/%ff%fe",
        "/api/v1/sessions/" + "x" * 20_000,
        "/api/v1/nothing",
        "//api/v1/sessions",
    ],
)
def test_a_path_to_nothing_is_not_found(target: Target, path: str) -> None:
    with target.unharmed(grows_mb=16):
        assert ask(target, "GET", path)[0] in (400, 404, 414)


@pytest.mark.parametrize(
    "query",
    [
        "filter=",
        "filter=a%23",
        "filter=%00",
        "filter=a/%23/b",
        "limit=0",
        "limit=99999999999",
        "limit=x",
        "start=yesterday",
        "start=offset:-1",
        "start=99999-01-01",
    ],
)
def test_a_question_that_makes_no_sense_is_refused(target: Target, query: str) -> None:
    with target.unharmed(grows_mb=24):
        status, said = ask(target, "GET", f"/api/v1/messages?{query}")
        assert status in (400, 422), said


@pytest.mark.parametrize(
    "raw",
    [
        b"GET / HTTP/9.9\r\n\r\n",
        b"\x10\x0c\x00\x04MQTT\x05\x02\x00\x00\x00\x00\x00",
        b"GET /healthz HTTP/1.1\r\nContent-Length: -5\r\n\r\n",
        b"GET /healthz HTTP/1.1\r\n" + b"X: y\r\n" * 50_000,
        b"POST /api/v1/publish HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
        b"\0" * 100_000,
    ],
)
def test_what_is_no_http_ends_that_connection(target: Target, raw: bytes) -> None:
    with target.unharmed(grows_mb=24):
        with socket.create_connection(("127.0.0.1", target.node.http_port), 10) as sock:
            sock.settimeout(3)
            try:
                sock.sendall(raw)
                said = sock.recv(1000)
            except (ConnectionError, TimeoutError):
                said = b""
            assert said == b"" or said.startswith((b"HTTP/1.1 4", b"HTTP/1.0 4")), said
        assert ask(target, "GET", "/healthz")[0] == 200


def test_a_peer_that_is_gone_before_it_is_let_in_has_no_rights(target: Target, name: str) -> None:
    """It has no address any more, so it could have come from anywhere: not from this machine."""
    body = json.dumps({"topic": name, "payload": "x"}).encode()
    head = f"POST /api/v1/publish HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n"
    request = head.encode() + b"Content-Type: application/json\r\n\r\n" + body
    with target.unharmed():
        os.kill(target.node.pid, signal.SIGSTOP)
        try:
            for _ in range(5):
                with socket.create_connection(("127.0.0.1", target.node.http_port), 10) as sock:
                    sock.sendall(request)
                    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        finally:
            os.kill(target.node.pid, signal.SIGCONT)
        # Everything that was let in before this one has been heard by the time this one is stored.
        mark = json.dumps({"topic": f"{name}/mark", "payload": "x"}).encode()
        assert ask(target, "POST", "/api/v1/publish", mark)[0] == 200
        status, said = ask(target, "GET", f"/api/v1/messages?filter={name}/%23")
        assert status == 200 and [row["topic"] for row in json.loads(said)["messages"]] == [f"{name}/mark"]
