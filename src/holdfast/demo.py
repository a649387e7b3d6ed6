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
from contextlib import closing
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from typing import Any

import paho.mqtt.client as paho
from paho.mqtt.enums import CallbackAPIVersion
from rich.console import Console

from holdfast import fanout, ops
from holdfast.cli import output
from holdfast.cli.http import call
from holdfast.store import open_log, open_store

VEHICLES = 5
FLEET = 20
"""Vehicles of the campaign; half of them are offline when it begins."""
TASK = "task_demo_1"
FILTER = "vehicle/+/position"
FLUSH_SECONDS = 0.5


class NodeProcess:
    """A `holdfast serve` of our own, on free loopback ports."""

    def __init__(self, data: Path):
        self._data = data
        self.mqtt_port = _free_port()
        self.http = f"127.0.0.1:{_free_port()}"
        self._log = (data / "node.log").open("ab")
        self.process = self._start()

    def _start(self) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "holdfast", "serve", "--data", str(self._data)]
        command += ["--mqtt", f"127.0.0.1:{self.mqtt_port}", "--http", self.http]
        command += ["--set", f"cursors.subscription_progress_flush_secs={FLUSH_SECONDS}"]
        process = subprocess.Popen(command, stderr=self._log)
        give_up = time.monotonic() + 30
        while time.monotonic() < give_up:
            try:
                with urllib.request.urlopen(f"http://{self.http}/readyz", timeout=1) as answer:
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


class DemoMember:
    """A member of a shared group; notes what came when. It can be cut off without a word."""

    def __init__(self, name: str, filter_text: str, port: int):
        self.name = name
        self.seen: list[tuple[float, str]] = []
        self.asked_at = time.monotonic()
        self._client = client(name, clean=True)
        self._client.on_message = lambda _, __, message: self.seen.append((time.monotonic(), message.payload.decode()))
        self._client.connect("127.0.0.1", port)
        self._client.loop_start()
        self._client.subscribe(filter_text, qos=1)

    def cut(self) -> float:
        """As if its machine had died: the socket closes, nothing is said."""
        opened = self._client.socket()
        self._client.loop_stop()
        if opened is not None:
            opened.close()
        return time.monotonic()

    def stop(self) -> None:
        self._client.disconnect()
        self._client.loop_stop()


def run(kills: int, spark: bool) -> int:
    console = Console(width=110)
    out = Path("build", "demo")
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="holdfast-demo-") as folder:
        data = Path(folder)
        console.print("Starting a node (SQLite, every acknowledgement after fsync) …")
        node = NodeProcess(data)
        lake = LakeProcess(data) if spark else None
        try:
            return _drive(console, node, data, kills, lake, out)
        finally:
            if lake is not None:
                lake.stop()
            node.stop()


def _drive(console: Console, node: NodeProcess, data: Path, kills: int, lake: LakeProcess | None, out: Path) -> int:
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
    _group(console, node)
    without = _campaign(console, node)
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
    console.print(f"given again after a kill:       {again:,}  (QoS 1: what was not known to be acknowledged)")
    console.print(f"acknowledged but never given:   {len(missing)}")
    if lake is not None:
        _query(console, lake, len(acknowledged), out)
    if without:
        console.print(f"\n[red]The campaign has not reached {without} of its vehicles![/red]")
    console.print("\nNothing acknowledged is missing." if not missing else "\n[red]Messages are missing![/red]")
    return 1 if missing or without else 0


def _group(console: Console, node: NodeProcess) -> None:
    """Three workers share the vehicles' messages; one dies, one joins."""
    share = f"$share/dispatch/{FILTER}"
    members = [DemoMember(f"worker-{n}", share, node.mqtt_port) for n in (1, 2, 3)]
    _wait(lambda: all(len(m.seen) > 100 for m in members))
    died = members[0].cut()
    time.sleep(1.0)
    joined = DemoMember("worker-4", share, node.mqtt_port)
    _wait(lambda: len(joined.seen) > 100)
    for member in [*members[1:], joined]:
        member.stop()
    everyone = sorted(entry for m in [*members, joined] for entry in m.seen)
    twice = len(everyone) - len({text for _, text in everyone})
    console.print("\nA shared group of three workers; one dies without a word, one joins:")
    console.print(f"  longest silence of any vehicle after the death:   {_silence(everyone, died) * 1e3:6.0f} ms")
    console.print(
        f"  from SUBSCRIBE to the newcomer's first message:   {(joined.seen[0][0] - joined.asked_at) * 1e3:6.0f} ms"
    )
    console.print(f"  messages shared: {len(everyone):,}; seen by two workers (unacknowledged at the death): {twice}")


def _campaign(console: Console, node: NodeProcess) -> int:
    """One payload to a fleet of which half is offline; how many have not had it exactly once."""
    fleet = [f"LSVA{number:04}" for number in range(1, FLEET + 1)]
    here, away = fleet[: FLEET // 2], fleet[FLEET // 2 :]
    clients = {vin: Subscriber(vin, f"agent/{vin}/proxy/request/+", node.mqtt_port) for vin in here}
    sent = fanout.send(f"http://{node.http}", fleet, TASK, "update yourself", final=True)
    console.print(
        f"\nA campaign, {sent.request_id}/{sent.number}, to {sent.accepted} vehicles, of which {len(here)} are online:"
    )
    _wait(lambda: _counts(node)["acked"] == len(here))
    _show_counts(console, node)
    why = [sys.executable, "-m", "holdfast", "why", "vin", away[0], "--http", node.http]
    console.print(f"  $ holdfast why vin {away[0]}")
    console.print(f"  {subprocess.run(why, capture_output=True, text=True, check=False).stdout.strip()}", markup=False)
    begun = time.monotonic()
    clients |= {vin: Subscriber(vin, f"agent/{vin}/proxy/request/+", node.mqtt_port) for vin in away}
    _wait(lambda: _counts(node)["acked"] == FLEET)
    console.print(
        f"the others come, and have it {(time.monotonic() - begun) * 1e3:.0f} ms after the first of them has connected:"
    )
    _show_counts(console, node)
    for one in clients.values():
        one.stop()
    return sum(one.seen.total() != 1 for one in clients.values())


def _counts(node: NodeProcess) -> dict[str, int]:
    counts: dict[str, int] = call(node.http, "GET", f"fanout/{TASK}")["counts"]
    return counts


def _show_counts(console: Console, node: NodeProcess) -> None:
    counts = {name.replace("_", " "): count for name, count in _counts(node).items() if count}
    console.print("  " + ", ".join(f"{count} {name}" for name, count in counts.items()))


def _silence(everyone: list[tuple[float, str]], since: float) -> float:
    """The longest time in the second after `since` in which nothing of one vehicle came, the worst of all vehicles."""
    by_vehicle: dict[str, list[float]] = {}
    for when, text in everyone:
        by_vehicle.setdefault(text.split()[0], []).append(when)
    worst = 0.0
    for times in by_vehicle.values():
        near = [t for t in times if since - 0.2 < t < since + 1.0]
        worst = max([worst, *(b - a for a, b in pairwise(near))])
    return worst


class LakeProcess:
    """`holdfast pipeline lake`, running beside the node."""

    def __init__(self, data: Path):
        self.root = data / "lake"
        self.store = f"sqlite:///{data}/holdfast.db"
        command = [sys.executable, "-m", "holdfast", "pipeline", "lake", str(self.root), "--store", self.store]
        self._log = (data / "lake.log").open("wb")
        self._process = subprocess.Popen([*command, "--every-seconds", "1"], stdout=self._log, stderr=self._log)

    def stop(self) -> None:
        if self._process.poll() is None:
            self._process.terminate()
            self._process.wait(60)
        self._log.close()


def _query(console: Console, lake: LakeProcess, least: int, out: Path) -> None:
    """What Spark SQL makes of the lake, as a table and as a plot."""
    import holdfast.spark

    console.print("\nMeanwhile `holdfast pipeline lake` has been copying the log to Parquet:")
    with closing(open_store(lake.store)) as store:
        manifest = store.manifest()
        _wait(lambda: manifest.totals("messages")[1] >= least)
        files, held = manifest.paths("messages"), manifest.totals("messages")[1]
    console.print(f"  {held:,} messages in {len(files)} files")
    spark = holdfast.spark.session()
    try:
        spark.read.parquet(str(lake.root)).createOrReplaceTempView("lake")
        rows = spark.sql(
            "select publisher, count(*) as messages, min(time) as first, max(time) as last,"
            " round(1e3 * count(*) / greatest(1, unix_millis(max(time)) - unix_millis(min(time))), 1) as per_second"
            " from lake where topic like 'vehicle/%' group by publisher order by publisher"
        ).collect()
        output.table([row.asDict() for row in rows], as_json=False, title="\nSpark SQL over the lake")
        seconds = spark.sql(
            "select unix_seconds(time) as second, count(*) as messages from lake group by 1 order by 1"
        ).collect()
    finally:
        spark.stop()
    _plot([(row.second, row.messages) for row in seconds], out / "messages.png")
    console.print(f"  messages a second, kills and all: {out / 'messages.png'}")


def _plot(points: list[tuple[int, int]], file: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    begin = points[0][0]
    figure, axes = pyplot.subplots(figsize=(8, 3))
    axes.bar([second - begin for second, _ in points], [count for _, count in points], width=0.9)
    axes.set(xlabel="seconds", ylabel="messages", title="Messages accepted per second")
    figure.tight_layout()
    figure.savefig(file)
    pyplot.close(figure)


def spark_is_there() -> bool:
    return all(find_spec(name) is not None for name in ("pyspark", "matplotlib"))


def _wait(condition: Any, seconds: float = 60.0) -> None:
    give_up = time.monotonic() + seconds
    while not condition() and time.monotonic() < give_up:
        time.sleep(0.02)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
