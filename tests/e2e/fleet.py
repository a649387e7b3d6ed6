"""Vehicles of bare bytes, and a platform that sends to them, for tests of fan-out."""

from __future__ import annotations

import socket
import struct
from typing import Any

import httpx

from e2e.clients import V5
from e2e.raw import Raw
from node import Node
from processes import wait_for

AN_HOUR = b"\x11\x00\x00\x0e\x10"
"""The session stays as long when its client goes."""
DUP = 8

SOCKETS: list[socket.socket] = []
"""Of a test's vehicles; whoever made the node closes them."""


class Sent:
    """One PUBLISH that a vehicle got."""

    def __init__(self, first: int, body: bytes, version: int):
        size = int.from_bytes(body[:2], "big")
        self.topic = body[2 : 2 + size].decode()
        self.dup, self.qos = bool(first & DUP), first >> 1 & 3
        at = 2 + size
        self.packet_id = int.from_bytes(body[at : at + 2], "big")
        at += 2
        self.properties = b""
        if version == V5:
            self.properties = body[at + 1 : at + 1 + body[at]]
            at += 1 + body[at]
        self.payload = body[at:]

    @property
    def correlation(self) -> bytes:
        at = self.properties.index(b"\x09\x00\x10") + 3
        return self.properties[at : at + 16]


class Vehicle:
    """A vehicle of bare bytes, which answers only when it is told to."""

    def __init__(self, node: Node, vin: str, version: int = V5, *, clean: bool = False, properties: bytes = AN_HOUR):
        self.vin, self.raw = vin, Raw(node.mqtt_port, version)
        SOCKETS.append(self.raw.sock)
        self.present = bool(self.raw.connect(vin, clean=clean, properties=properties)[0])

    def subscribe(self, request: str = "+", qos: int = 1) -> Vehicle:
        self.raw.subscribe(f"agent/{self.vin}/proxy/request/{request}", qos)
        return self

    def got(self) -> Sent:
        first, body = self.raw.read()
        assert first >> 4 == 3, f"not a PUBLISH: {first:#x}"
        return Sent(first, body, self.raw.version)

    def ack(self, sent: Sent, reason: int = 0) -> None:
        self.raw.send(0x40, struct.pack("!H", sent.packet_id) + (bytes([reason]) if reason else b""))

    def hears_nothing(self) -> None:
        """Nothing comes before the answer to a ping that is sent now."""
        self.raw.send(0xC0)
        first, body = self.raw.read()
        assert first == 0xD0, f"not a PINGRESP: {first:#x} {body!r}"

    def gone(self) -> None:
        self.raw.sock.close()


def api(node: Node) -> httpx.Client:
    return httpx.Client(base_url=f"{node.http}/api/v1", timeout=30)


def send(node: Node, request_id: str, data: str, *vins: str, **more: Any) -> dict[str, Any]:
    with api(node) as client:
        answer = client.post("/fanout", json={"request_id": request_id, "ids": list(vins), "data": data, **more})
    assert answer.status_code == 202, answer.text
    return dict(answer.json())


def show(node: Node, request_id: str, number: int | None = None) -> dict[str, Any]:
    with api(node) as client:
        answer = client.get(f"/fanout/{request_id}" + (f"/{number}" if number is not None else ""))
    assert answer.status_code == 200, answer.text
    found = dict(answer.json())
    assert sum(found["counts"].values()) == found["targets"]
    return found


def counts(node: Node, request_id: str, number: int | None = None) -> dict[str, int]:
    return {state: count for state, count in show(node, request_id, number)["counts"].items() if count}


def order(node: Node, request_id: str, verb: str, **body: Any) -> dict[str, Any]:
    with api(node) as client:
        answer = client.post(f"/fanout/{request_id}/{verb}", json=body or None)
    assert answer.status_code == 200, answer.text
    return dict(answer.json())


def why(node: Node, vin: str) -> str:
    with api(node) as client:
        return str(client.get(f"/why/vin/{vin}").json()["reason"])


def ended(node: Node, vin: str) -> list[tuple[str, str]]:
    with api(node) as client:
        return [(one["request_id"], one["state"]) for one in client.get(f"/vehicles/{vin}").json()["ended"]]


def comes(node: Node, request_id: str, number: int | None = None, **wanted: int) -> None:
    wait_for(lambda: counts(node, request_id, number) == wanted, what=f"{request_id} to have {wanted}")
