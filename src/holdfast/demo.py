"""The demonstration behind `make demo`: a node is killed under load, and what its clients saw is audited.

Everything judged here was seen by the clients: which publishes were acknowledged to the vehicles, and which
messages the subscriber was given.
"""

from __future__ import annotations

import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections import Counter, deque
from pathlib import Path
from typing import Any

import paho.mqtt.client as paho
from paho.mqtt.enums import CallbackAPIVersion
from rich.console import Console

from holdfast import ops
from holdfast.cli import output
from holdfast.log import open_log

VEHICLES = 5
FILTER = "vehicle/+/position"
FLUSH_SECONDS = 0.5


class NodeProcess:
    """A `holdfast serve` of our own, on free loopback ports."""

    def __init__(self, data: Path):
        self._data = data
        self.mqtt_port, self._http_port = _free_port(), _free_port()
        self._log = (data / "node.log").open("ab")
        self.process = self._start()

    def _start(self) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "holdfast", "serve", "--data", str(self._data)]
        command += ["--mqtt", f"127.0.0.1:{self.mqtt_port}", "--http", f"127.0.0.1:{self._http_port}"]
        command += ["--set", f"cursors.subscription_progress_flush_secs={FLUSH_SECONDS}"]
        process = subprocess.Popen(command, stderr=self._log)
        give_up = time.monotonic() + 30
        while time.monotonic() < give_up:
            try:
                with urllib.request.urlopen(f"http://127.0.0.1:{self._http_port}/readyz", timeout=1) as answer:
                    if answer.status == 200:
                        return process
            except (urllib.error.URLError, OSError):
                time.sleep(0.05)
        process.kill()
        raise SystemExit(f"the node did not come up; see {self._data}/node.log")

    def kill(self) -> None:
        os.kill(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def restart(self) -> None:
        self.process = self._start()

    def stop(self) -> None:
        self.process.terminate()
        self.process.wait(30)
        self._log.close()


class Vehicle:
    """Publishes its position, QoS 1, and remembers what was acknowledged. It reconnects by itself."""

    def __init__(self, number: int, port: int):
        self.name = f"vehicle-{number}"
        self.acknowledged: set[str] = set()
        self._topic = f"vehicle/{number}/position"
        self._answers: deque[int] = deque()
        self._client = client(self.name, clean=False)
        # Only noted here: the client calls this with locks held that `publish` needs as well.
        self._client.on_publish = lambda _, __, mid, *___: self._answers.append(mid)
        self._client.connect("127.0.0.1", port)
        self._client.loop_start()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._drive, daemon=True)
        self._thread.start()

    def _drive(self) -> None:
        """Publish until told to stop, then wait (a while) for the acknowledgements that are still missing."""
        under_way: dict[int, str] = {}
        sent, give_up = 0, 0.0
        while not self._stop.wait(0.002) or (under_way and time.monotonic() < give_up):
            while self._answers:
                mid = self._answers.popleft()
                if mid in under_way:
                    self.acknowledged.add(under_way.pop(mid))
            if self._stop.is_set():
                give_up = give_up or time.monotonic() + 30
            elif len(under_way) < 100:
                text = f"{self.name} {sent}"
                under_way[self._client.publish(self._topic, text, qos=1).mid] = text
                sent += 1

    def stop(self) -> None:
        self._stop.set()
        self._thread.join(60)
        self._client.disconnect()
        self._client.loop_stop()


class Subscriber:
    """A durable subscriber that remembers everything it was given."""

    def __init__(self, name: str, filter_text: str, port: int):
        self.seen: Counter[str] = Counter()
        self._client = client(name, clean=False)
        self._client.on_message = lambda _, __, message: self.seen.update([message.payload.decode()])
        ready = threading.Event()
        self._client.on_subscribe = lambda *_: ready.set()
        self._client.connect("127.0.0.1", port)
        self._client.loop_start()
        self._client.subscribe(filter_text, qos=1)
        if not ready.wait(10):
            raise SystemExit("the subscriber's subscription was not answered")

    def stop(self) -> None:
        self._client.disconnect()
        self._client.loop_stop()


def client(name: str, clean: bool) -> paho.Client:
    """A client nobody here wrote, told to come back quickly."""
    made = paho.Client(CallbackAPIVersion.VERSION2, name, clean_session=clean, protocol=paho.MQTTv311)
    made.reconnect_delay_set(min_delay=1, max_delay=1)
    return made


def run(kills: int) -> int:
    console = Console(width=110)
    with tempfile.TemporaryDirectory(prefix="holdfast-demo-") as folder:
        data = Path(folder)
        console.print("Starting a node (SQLite, every acknowledgement after fsync) …")
        node = NodeProcess(data)
        try:
            return _drive(console, node, data, kills)
        finally:
            node.stop()


def _drive(console: Console, node: NodeProcess, data: Path, kills: int) -> int:
    subscriber = Subscriber("back-office", FILTER, node.mqtt_port)
    vehicles = [Vehicle(number, node.mqtt_port) for number in range(1, VEHICLES + 1)]
    console.print(f"{VEHICLES} vehicles publish to it (QoS 1), one durable subscriber listens to {FILTER}.\n")
    for number in range(1, kills + 1):
        _wait(lambda n=number: all(len(v.acknowledged) > 150 * n for v in vehicles))
        time.sleep(random.uniform(1.0, 2.0))  # any moment will do: that is the point
        node.kill()
        console.print(f"  kill -9 number {number}; {sum(len(v.acknowledged) for v in vehicles):,} acknowledged so far")
        node.restart()
    _wait(lambda: all(len(v.acknowledged) > 150 * (kills + 1) for v in vehicles))
    for vehicle in vehicles:
        vehicle.stop()
    acknowledged = set().union(*(v.acknowledged for v in vehicles))
    _wait(lambda: acknowledged <= subscriber.seen.keys())
    subscriber.stop()
    missing = acknowledged - subscriber.seen.keys()
    again = sum(times - 1 for times in subscriber.seen.values())
    with open_log(f"sqlite:///{data}/holdfast.db") as log:
        rows = [row for row in ops.streams(log, "messages") if row.messages]
        output.table(rows, as_json=False, title="\nThe log")
    console.print(f"\nacknowledged to vehicles:       {len(acknowledged):,}")
    console.print(f"given to the subscriber:        {len(subscriber.seen):,}")
    console.print(f"given again after a kill:       {again:,}  (QoS 1: unacknowledged ones come again)")
    console.print(f"acknowledged but never given:   {len(missing)}")
    console.print("\nNothing acknowledged is missing." if not missing else "\n[red]Messages are missing![/red]")
    return 1 if missing else 0


def _wait(condition: Any, seconds: float = 60.0) -> None:
    give_up = time.monotonic() + seconds
    while not condition() and time.monotonic() < give_up:
        time.sleep(0.02)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
