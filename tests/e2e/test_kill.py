"""kill -9 under load, again and again: nothing acknowledged is lost, nothing acknowledged long ago comes again.

Two publishers publish as fast as they are acknowledged and note every number whose acknowledgement they read. A
durable subscriber acknowledges whatever it reads and notes when. The node is killed at some moment and started
again, twenty times. In the end the subscriber must have every noted number; and nothing it acknowledged more than a
flush interval before a kill may have come again after it.
"""

from __future__ import annotations

import random
import socket
import struct
import threading
import time
from pathlib import Path

from e2e.clients import V5, V311
from e2e.raw import Raw, packet, text
from node import Node
from processes import wait_for

FLUSH_SECONDS = 0.15
MARGIN_SECONDS = 0.35
"""For an acknowledgement's way into the node and a flush's into the store, on a machine busy with much else."""

BURST = 25
PUBLISHERS = 2
NUMBER = struct.Struct("!HI")


class Publisher(threading.Thread):
    """Publishes numbers until the connection breaks; `acked` are those whose acknowledgement was read."""

    def __init__(self, port: int, version: int, name: str, who: int, first: int):
        super().__init__(daemon=True)
        self.raw = Raw(port, version)
        self.raw.connect(f"{name}-p{who}")
        self.topic, self.who, self.next = f"{name}/{who}", who, first
        self.acked: list[int] = []
        self.stopping = threading.Event()
        self.error: BaseException | None = None

    def run(self) -> None:
        try:
            while not self.stopping.is_set():
                self._burst()
        except (OSError, EOFError):
            pass  # the node was killed
        except BaseException as error:
            self.error = error
        finally:
            self.raw.sock.close()

    def _burst(self) -> None:
        properties = b"\0" if self.raw.version == V5 else b""
        numbers = range(self.next, self.next + BURST)
        self.next += BURST
        out = b"".join(
            packet(0x32, text(self.topic) + struct.pack("!H", 1 + n % 60_000) + properties + NUMBER.pack(self.who, n))
            for n in numbers
        )
        self.raw.sock.sendall(out)
        for n in numbers:
            first, body = self.raw.read()
            assert first == 0x40 and body[:2] == struct.pack("!H", 1 + n % 60_000), f"{first:#x} {body.hex(' ')}"
            assert len(body) == 2 or body[2] < 0x80, f"refused: {body.hex(' ')}"
            self.acked.append(n)


class Subscriber(threading.Thread):
    """Reads and acknowledges until the connection breaks. `got`: (publisher, number) -> when it was acknowledged."""

    def __init__(self, port: int, version: int, name: str, present: bool):
        super().__init__(daemon=True)
        self.raw = Raw(port, version)
        expiry = b"\x11\x00\x00\x0e\x10" if version == V5 else b""
        answer = self.raw.connect(f"{name}-sub", clean=False, properties=expiry)
        assert answer[:2] == bytes([present, 0]), f"CONNACK {answer.hex(' ')}"
        if not present:
            self.raw.subscribe(f"{name}/#", 1)
        self.got: dict[tuple[int, int], float] = {}
        self.twice: list[tuple[int, int]] = []
        self.unordered: list[tuple[int, int]] = []
        self.error: BaseException | None = None

    def run(self) -> None:
        last = [-1] * PUBLISHERS
        try:
            while True:
                _, pid, payload = self.raw.read_publish()
                self.raw.sock.sendall(b"\x40\x02" + pid.to_bytes(2, "big"))
                key = who, number = NUMBER.unpack(payload)
                if key in self.got:
                    self.twice.append(key)
                elif number < last[who]:
                    self.unordered.append(key)
                last[who] = max(last[who], number)
                self.got[key] = time.monotonic()
        except (OSError, EOFError):
            pass
        except BaseException as error:
            self.error = error
        finally:
            self.raw.sock.close()


class Ledger:
    """What the clients know of all rounds so far."""

    def __init__(self) -> None:
        self.acked: set[tuple[int, int]] = set()
        """Numbers whose publisher was told that they are safe."""
        self.seen: dict[tuple[int, int], float] = {}
        """When the subscriber last acknowledged each."""
        self.killed = 0.0
        self.stored = 0
        """How many acknowledgements were old enough at a kill that they must not be forgotten."""

    def judge(self, turn: int, subscriber: Subscriber) -> None:
        """A round's deliveries, by what was true when the node was last killed."""
        again = {key: self.killed - self.seen[key] for key in subscriber.got if key in self.seen}
        forgotten = {key: age for key, age in again.items() if age > FLUSH_SECONDS + MARGIN_SECONDS}
        assert not forgotten, (
            f"round {turn}: {len(forgotten)} came again that were acknowledged up to {max(forgotten.values()):.2f} s "
            f"before the kill: {sorted(forgotten)[:5]}"
        )
        assert not subscriber.twice, f"round {turn}: twice in one connection: {subscriber.twice[:5]}"
        assert not subscriber.unordered, f"round {turn}: out of order: {subscriber.unordered[:5]}"

    def note(self, subscriber: Subscriber, publishers: list[Publisher], killed: float) -> None:
        self.seen |= subscriber.got
        self.acked |= {(each.who, number) for each in publishers for number in each.acked}
        self.killed = killed
        self.stored += sum(killed - when > FLUSH_SECONDS + MARGIN_SECONDS for when in subscriber.got.values())


def ended(turn: int, *threads: Publisher | Subscriber) -> None:
    for thread in threads:
        thread.join(20)
        assert not thread.is_alive() and thread.error is None, f"round {turn}: {thread}: {thread.error}"


def kill_rounds(node: Node, version: int, name: str, rounds: int, chance: random.Random) -> None:
    ledger = Ledger()
    first = [0] * PUBLISHERS
    for turn in range(rounds):
        subscriber = Subscriber(node.mqtt_port, version, name, present=turn > 0)
        publishers = [Publisher(node.mqtt_port, version, name, n, first[n]) for n in range(PUBLISHERS)]
        for thread in (subscriber, *publishers):
            thread.start()
        moment = time.monotonic() + FLUSH_SECONDS + MARGIN_SECONDS + chance.uniform(0.02, 0.25)
        wait_for(lambda moment=moment: time.monotonic() > moment, what="the moment")
        killed = time.monotonic()
        node.kill()
        ended(turn, subscriber, *publishers)
        ledger.judge(turn, subscriber)
        ledger.note(subscriber, publishers, killed)
        first = [publisher.next for publisher in publishers]
        node.start()
    last = Subscriber(node.mqtt_port, version, name, present=True)
    missing = ledger.acked - ledger.seen.keys()
    last.start()
    wait_for(lambda: missing <= last.got.keys(), 30, f"the rest of {len(ledger.acked):,} acknowledged publishes")
    last.raw.sock.shutdown(socket.SHUT_RDWR)
    ended(rounds, last)
    ledger.judge(rounds, last)
    assert len(ledger.acked) > rounds * 100, f"only {len(ledger.acked)} publishes: no load to speak of"
    assert ledger.stored > rounds * 100, f"only {ledger.stored} acknowledgements old enough to matter"


def test_kill_9_twenty_times_under_load(tmp_path: Path, name: str) -> None:
    settings = {"cursors.subscription_progress_flush_secs": FLUSH_SECONDS}
    with Node(tmp_path / "node", settings=settings) as node:
        kill_rounds(node, V5, name, 20, random.Random(20))


def test_kill_9_under_load_on_postgres(tmp_path: Path, postgres_url: str, name: str) -> None:
    settings = {"cursors.subscription_progress_flush_secs": FLUSH_SECONDS}
    with Node(tmp_path / "node", store=postgres_url, settings=settings) as node:
        kill_rounds(node, V311, name, 5, random.Random(5))
