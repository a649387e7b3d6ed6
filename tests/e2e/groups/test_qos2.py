"""A QoS 2 message of a group that was sent and not answered: it waits for its session, for a while, as MQTT 5 says."""

from __future__ import annotations

import struct
import time
from collections.abc import Iterator

import httpx
import pytest

from e2e.groups.conftest import QUICK
from e2e.groups.members import described
from e2e.raw import Raw, text
from node import Node
from processes import wait_for

EXPIRY = b"\x11" + struct.pack("!I", 300)
ONCE = b"once" + bytes(range(97, 123)) * 20
SMALL = b"\x27" + struct.pack("!I", 400)
"""A maximum packet size that leaves room for everything but this."""
REVOKE_SECONDS = float(QUICK["groups.revoke_secs"])


class Worker(Raw):
    """A member whose every answer is the test's."""

    def __init__(self, node: Node, client_id: str):
        super().__init__(node.mqtt_port, 5)
        self.client_id = client_id
        self.sock.settimeout(10)

    def join(self, share: str, qos: int = 2, *, clean: bool) -> bool:
        """Whether the session was there before."""
        present = bool(self.connect(self.client_id, clean=clean, properties=EXPIRY)[0])
        if not present:
            self.send(0x82, b"\0\1\0" + text(share) + bytes([qos]))
            assert self.read()[0] == 0x90
        return present

    def message(self, seconds: float = 10.0) -> tuple[int, bytes, bytes] | None:
        """First byte, packet id and payload of the next delivery; None: nothing came."""
        self.sock.settimeout(seconds)
        try:
            first, body = self.read()
        except TimeoutError:
            return None
        size = struct.unpack("!H", body[:2])[0]
        return first, body[2 + size : 4 + size], body[5 + size :]

    def finish(self, packet_id: bytes) -> None:
        """PUBREC, PUBREL, PUBCOMP."""
        self.send(0x50, packet_id)
        assert self.read() == (0x62, packet_id)
        self.send(0x70, packet_id)


def members_of(node: Node, group: str) -> set[str]:
    return {each["session"] for each in described(node, group)["members"] if each["status"] == "connected"}


@pytest.fixture
def dropped(lone: Node, name: str) -> Iterator[tuple[Worker, bytes, str]]:
    """One member has been sent a QoS 2 message, and its connection is lost; the other is in the group by now."""
    share = f"$share/g/{name}/#"
    with Worker(lone, f"{name}-other") as other:
        with Worker(lone, f"{name}-one") as one:
            one.join(share, clean=True)
            wait_for(lambda: members_of(lone, f"g:{name}/#") == {one.client_id}, 10, "it sits in its group")
            httpx.post(f"{lone.http}/api/v1/publish", json={"topic": f"{name}/x", "payload": ONCE.decode(), "qos": 2})
            sent = one.message()
            assert sent is not None and sent[0] == 0x34 and sent[2] == ONCE
            other.join(share, clean=True)
        yield other, sent[1], share


def test_it_waits_for_its_session_and_comes_again_under_its_id(
    lone: Node, name: str, dropped: tuple[Worker, bytes, str]
) -> None:
    other, packet_id, share = dropped
    assert other.message(seconds=1.0) is None, "its session lives: nobody else may have it"
    with Worker(lone, f"{name}-one") as one:
        assert one.join(share, clean=False), "the session is there"
        again = one.message()
        assert again is not None and again[:2] == (0x3C, packet_id), "a duplicate, under the same id"
        one.finish(packet_id)
        assert other.message(seconds=REVOKE_SECONDS + 1) is None, "and it was for nobody else"


def test_if_it_does_not_come_back_in_time_it_is_handed_on(dropped: tuple[Worker, bytes, str]) -> None:
    other, _, _ = dropped
    begun = time.monotonic()
    found = other.message(seconds=REVOKE_SECONDS + 10)
    assert found is not None and found[2] == ONCE
    assert time.monotonic() - begun > 0.5 * REVOKE_SECONDS
    other.finish(found[1])


def test_a_session_that_ends_holds_nothing(lone: Node, name: str, dropped: tuple[Worker, bytes, str]) -> None:
    other, _, _ = dropped
    with Worker(lone, f"{name}-one") as one:
        one.connect(one.client_id, clean=True)
        begun = time.monotonic()
        found = other.message(seconds=REVOKE_SECONDS + 5)
        assert found is not None and found[2] == ONCE
        assert time.monotonic() - begun < REVOKE_SECONDS, "nobody will come back for it"


def test_what_its_returning_client_takes_no_more_is_handed_on_at_once(
    lone: Node, name: str, dropped: tuple[Worker, bytes, str]
) -> None:
    other, packet_id, _ = dropped
    with Worker(lone, f"{name}-one") as one:
        begun = time.monotonic()
        assert one.connect(one.client_id, clean=False, properties=EXPIRY + SMALL)[0], "the session is there"
        assert one.read() == (0x62, packet_id), "it is told to forget what it may have of it"
        found = other.message(seconds=REVOKE_SECONDS + 5)
        assert found is not None and found[2] == ONCE
        assert time.monotonic() - begun < 0.8 * REVOKE_SECONDS, "nobody waits for an answer to what was not sent"
        other.finish(found[1])
