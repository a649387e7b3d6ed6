"""Clients that are at odds with their own session: takeovers, ids used wrongly, silence, half of a goodbye."""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
import time

import pytest

from e2e.raw import packet, text
from hostile.attack import Target, connect_packet, everything, reason, subscribe_packet, varint
from processes import wait_for


def test_two_clients_with_one_id_take_each_others_place_all_the_time(target: Target, name: str, version: int) -> None:
    """Each that was taken over is told so; the last one stays and works."""
    told = []

    def again_and_again(times: int) -> None:
        for _ in range(times):
            with target.raw(version) as raw:
                raw.sock.sendall(connect_packet(name, version) + subscribe_packet([name], version))
                told.append(reason(everything(raw.sock)))

    with target.unharmed():
        rivals = [threading.Thread(target=again_and_again, args=(40,), daemon=True) for _ in range(3)]
        for rival in rivals:
            rival.start()
        give_up = time.monotonic() + 30
        while any(rival.is_alive() for rival in rivals) and time.monotonic() < give_up:
            with target.raw(version) as raw:
                raw.sock.sendall(connect_packet(name, version))
                raw.sock.settimeout(0.3)
                with contextlib.suppress(TimeoutError):
                    everything(raw.sock, 0.3)
        assert not any(rival.is_alive() for rival in rivals)
        # Taken over after it was welcome, or before: then it is refused.
        assert set(told) <= ({0x8E, 0x88} if version == 5 else {None, 3})
        with target.connected(name, version) as last:
            last.subscribe(name, 0)
            last.publish(name, b"mine", qos=0)
            assert last.read()[1].endswith(b"mine")


def test_a_storm_of_connects_with_one_id(target: Target, name: str) -> None:
    """Sixty at once, with a durable session: one is left; the others were taken over, or never had their turn."""
    keep = b"\x11" + struct.pack("!I", 60)
    with target.unharmed(), contextlib.ExitStack() as stack:
        raws = [stack.enter_context(target.raw()) for _ in range(60)]
        for raw in raws:
            raw.sock.sendall(connect_packet(name, props=keep, clean=False) + b"\xc0\x00")
        answers = [raw.read() for raw in raws]
        assert all(first == 0x20 and body[1] in (0, 0x88) for first, body in answers)
        alive = 0
        for raw in [raw for raw, (_, body) in zip(raws, answers, strict=True) if not body[1]]:
            raw.sock.settimeout(5)
            said = [raw.read()]
            if said[0][0] == 0xD0:
                raw.send(0xC0)
                try:
                    said = [raw.read()]
                except EOFError:
                    continue
            if said[0][0] == 0xE0:
                assert said[0][1] == b"\x8e"
            else:
                alive += 1
        assert alive == 1
    with target.connected(name) as raw:
        raw.send(0xE0)


def test_a_second_connect_ends_the_connection(target: Target, name: str, version: int) -> None:
    with target.unharmed(), target.connected(name, version) as raw:
        raw.sock.sendall(connect_packet(name, version))
        assert reason(everything(raw.sock)) == (0x82 if version == 5 else None)


def test_acknowledgements_of_what_was_never_sent(target: Target, name: str, version: int) -> None:
    """Late or repeated ones are harmless."""
    with target.unharmed(), target.connected(name, version) as raw:
        for first in (0x40, 0x50, 0x70):
            for pid in (1, 2, 65_535):
                raw.send(first, struct.pack("!H", pid))
        raw.send(0x62, b"\x00\x09")
        raw.send(0xC0)
        seen = []
        while (answer := raw.read())[0] != 0xD0:
            seen.append(answer[0])
        assert set(seen) <= {0x62, 0x70}


@pytest.mark.parametrize("first", [0x40, 0x50, 0x62, 0x70])
def test_packet_id_zero_does_not_exist(target: Target, name: str, version: int, first: int) -> None:
    with target.unharmed(), target.connected(name, version) as raw:
        raw.send(first, b"\x00\x00")
        assert reason(everything(raw.sock)) == (0x82 if version == 5 else None)


@pytest.mark.parametrize("more", [b"", b"\xc0\x00" * 3], ids=["alone", "with-pings"])
@pytest.mark.parametrize(
    ("qos", "answer"), [(1, 0x50), (1, 0x70), (2, 0x40), (2, 0x70)], ids=["1-rec", "1-comp", "2-ack", "2-comp"]
)
def test_the_wrong_acknowledgement_for_a_delivery(
    target: Target, name: str, version: int, qos: int, answer: int, more: bytes
) -> None:
    with target.unharmed(), target.connected(name, version) as raw:
        raw.subscribe(name, qos)
        raw.publish(name, b"x", qos=qos, pid=7)
        first, body = raw.read()
        while first >> 4 != 3:
            first, body = raw.read()
        at = 2 + len(name)
        raw.sock.sendall(packet(answer, body[at : at + 2]) + more)
        assert reason(everything(raw.sock)) == (0x82 if version == 5 else None)


def test_one_qos_2_id_again_and_again(target: Target, name: str, version: int) -> None:
    """The same id before its release is the same message, however often it comes and whatever it says."""
    with target.unharmed(), target.connected(name, version) as raw, target.connected(f"{name}-watch") as watch:
        watch.subscribe(name, 0)
        for n in range(200):
            raw.publish(name, b"%d" % n, qos=2, pid=7, dup=n > 0)
        for _ in range(200):
            assert raw.read()[0] == 0x50
        for _ in range(3):
            raw.send(0x62, b"\x00\x07")
            assert raw.read()[0] == 0x70
        raw.publish(name, b"next", qos=2, pid=7)
        assert raw.read()[0] == 0x50
        found = [watch.read()[1][len(name) + 3 :] for _ in range(2)]
        assert found == [b"0", b"next"]


def test_releases_of_every_id_there_is(target: Target, name: str, version: int) -> None:
    with target.unharmed(), target.connected(name, version) as raw:
        raw.sock.sendall(b"".join(b"\x62\x02" + struct.pack("!H", pid) for pid in range(1, 5000)))
        for pid in range(1, 5000):
            first, body = raw.read()
            # MQTT 5 can say that the packet id is not known; MQTT 3 completes it all the same.
            assert first == 0x70 and body == struct.pack("!H", pid) + (b"\x92" if version == 5 else b"")


def test_mqtt_3_1_sends_its_requests_again_as_duplicates(target: Target, name: str) -> None:
    with target.unharmed(), target.raw(3) as raw:
        raw.send(0x10, text("MQIsdp") + b"\x03\x02\x00\x3c" + text(name))
        assert raw.read() == (0x20, b"\0\0")
        for first in (0x82, 0x8A):
            raw.send(first, b"\0\1" + text(name) + b"\1")
            assert raw.read() == (0x90, b"\0\1\1")
        raw.publish(name, b"x", qos=2, pid=7)
        assert {raw.read()[0] & 0xF0, raw.read()[0] & 0xF0} == {0x50, 0x30}
        for first in (0x62, 0x6A):
            raw.send(first, b"\0\7")
            assert raw.read() == (0x70, b"\0\7")
        for first in (0xA2, 0xAA):
            raw.send(first, b"\0\2" + text(name))
            assert raw.read() == (0xB0, b"\0\2")


def test_a_client_that_is_silent_beyond_its_keep_alive(target: Target, name: str, version: int) -> None:
    """Half a packet is not a sign of life that counts for ever; it is told why it was ended."""
    with target.unharmed(), target.connected(name, version, keep_alive=1) as raw:
        raw.sock.sendall(b"\x32\x7f\x00")
        began = time.monotonic()
        assert reason(everything(raw.sock)) == (0x8D if version == 5 else None)
        assert 1.0 < time.monotonic() - began < 5


def test_a_deaf_client_that_has_closed_its_sending_side_does_not_stay(target: Target, name: str) -> None:
    """It has no keep-alive, reads nothing and says nothing more: it is gone all the same."""
    body = text("MQTT") + b"\x05\x06\0\0\0" + text(name) + b"\0" + text(f"{name}/will") + text("gone")
    with (
        target.connected(f"{name}-watch") as watch,
        target.raw(deaf=True) as raw,
        target.connected(f"{name}-pub") as other,
    ):
        watch.subscribe(f"{name}/will", 0)
        raw.send(0x10, body)
        assert raw.read()[0] == 0x20
        raw.subscribe(name, 0)
        for n in range(200):
            other.publish(name, b"x" * 50_000, pid=n + 1)
        for _ in range(200):
            assert other.read()[0] == 0x40
        with target.unharmed():
            raw.sock.shutdown(socket.SHUT_WR)
            watch.sock.settimeout(10)
            assert watch.read()[1].endswith(b"gone")


def test_many_sessions_with_wills_that_nobody_returns_to(target: Target, name: str) -> None:
    """Clients that come, leave a durable session behind, and never return."""
    body = text("MQTT") + b"\x05\x04\0\x3c\x05\x11\0\0\0\x01"
    with target.unharmed():
        for n in range(150):
            with target.raw() as raw:
                raw.send(0x10, body + text(f"{name}-{n}") + b"\0" + text(f"{name}/will") + text("gone"))
                raw.sock.sendall(subscribe_packet([f"{name}/{n}"]))
                assert raw.read()[0] == 0x20 and raw.read()[0] == 0x90

        def left() -> int:
            sessions = target.node.get("/api/v1/sessions")["sessions"]
            return sum(one["client_id"].startswith(f"{name}-") for one in sessions)

        wait_for(lambda: left() == 0, 15, "every session expired")


@pytest.mark.parametrize("start", ["offset:-1", "offset:x", "9999999-01-01", "", "\u0660", "x" * 60_000])
def test_a_start_that_makes_no_sense_is_refused(target: Target, name: str, start: str) -> None:
    props = b"\x26" + text("holdfast-start") + text(start)
    with target.unharmed(), target.connected(name) as raw:
        raw.send(0x82, b"\x00\x01" + varint(len(props)) + props + text(name) + b"\x01")
        first, body = raw.read()
        assert (first == 0xE0 and body[0] in (0x82, 0x83, 0x99)) or (first == 0x90 and body[-1] >= 0x80)
