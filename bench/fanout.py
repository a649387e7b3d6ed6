"""Fan-out: how fast requests are taken, a million vehicles wait, deliveries go out, and what others notice.

python -m bench.fanout [--only million,batches,online,one,heartbeat,depth,collect] [--store sqlite|postgres]
                       [--ids N] [--vehicles N]

It starts `holdfast serve` on a folder of its own, with fsync before every acknowledgement as always. Vehicles and their
platform are in other processes (bench/fanout_load.py). Beside the heavy figures a client publishes 200 messages a
second, and how long its acknowledgements took is printed: what ordinary publishers notice.
"""

from __future__ import annotations

import argparse
import hashlib
import http.client
import json
import os
import random
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil  # type: ignore[import-untyped]

from bench import fanout_load
from bench import mqtt_load as load
from bench.fanout_load import vin
from bench.measure import heading, middle, result, spread
from bench.mqtt import at
from bench.mqtt_load import Role
from bench.sessions import load_on, note, one_node

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

if TYPE_CHECKING:
    from node import Node

PUBLISHER_MS = 10.0


class Api:
    """The node's HTTP API."""

    def __init__(self, node: Node):
        self._connection = http.client.HTTPConnection("127.0.0.1", node.http_port, timeout=300)

    def ask(self, method: str, path: str, body: bytes | None = None, kind: str = "application/json") -> Any:
        self._connection.request(method, f"/api/v1{path}", body, {"content-type": kind})
        answer = self._connection.getresponse()
        said = answer.read()
        if answer.status >= 300:
            raise load.Wrong(f"{method} {path}: {answer.status} {said[:300]!r}")
        return json.loads(said)

    def send(self, ids: list[str], request_id: str, data: bytes, **more: Any) -> Any:
        sha1 = self.payload(data)
        head = json.dumps({"request_id": request_id, "data_sha1": sha1, **more})
        return self.ask("POST", "/fanout", "\n".join([head, *ids]).encode(), "application/x-ndjson")

    def payload(self, data: bytes) -> str:
        sha1 = hashlib.sha1(data).hexdigest()
        self.ask("PUT", f"/payloads/{sha1}", data)
        return sha1

    def counts(self, request_id: str) -> dict[str, int]:
        return dict(self.ask("GET", f"/fanout/{request_id}")["counts"])

    def cancel(self, request_id: str) -> None:
        self.ask("POST", f"/fanout/{request_id}/cancel")
        self.wait(request_id, lambda counts: not counts["waiting"])

    def wait(self, request_id: str, reached: Callable[[dict[str, int]], bool], seconds: float = 300.0) -> float:
        begin = time.monotonic()
        while not reached(self.counts(request_id)):
            if time.monotonic() - begin > seconds:
                raise load.Wrong(f"{request_id} is at {self.counts(request_id)} after {seconds} s")
            time.sleep(0.05)
        return time.monotonic() - begin


@contextmanager
def bystander(node: Node, what: str, seconds: float) -> Iterator[list[bool]]:
    """An ordinary publisher beside what is measured; its p99 is a figure too."""
    role = Role(load.publish_paced, load_on(node, publishers=2), int(200 * seconds), 200)
    role.await_ready()
    role.go()
    met: list[bool] = []
    yield met
    paced: load.Paced = role.result()
    note("an ordinary publisher meanwhile", spread(paced.ack_seconds, "µs", 1e6))
    met.append(result(f"{what}: ordinary publish p99", at(paced.ack_seconds, 0.99) * 1e3, "ms", at_most=PUBLISHER_MS))


def _merged(node: Node, api: Api, request_id: str) -> float:
    """How long until every vehicle's row can be found; asked for the last ones of the batch."""
    begin = time.monotonic()
    while api.ask("GET", f"/fanout/{request_id}")["unmerged"]:
        time.sleep(0.05)
    return time.monotonic() - begin


def bench_million(options: argparse.Namespace) -> bool:
    heading(f"one payload of 16 KiB to {options.ids:,} vehicles that are offline ({options.store})")
    ids = [vin(n) for n in range(options.ids)]
    random.Random(1).shuffle(ids)
    share = options.ids / 1_000_000
    with one_node(options.store) as node:
        api, process = Api(node), psutil.Process(node.pid)
        memory, disk = process.memory_info().rss, _disk(node)
        with bystander(node, "taken and merged", 15 * share) as met:
            begin = time.monotonic()
            api.send(ids, "task_bench_1", os.urandom(16 << 10))
            answered = time.monotonic() - begin
            _merged(node, api, "task_bench_1")
            merged = time.monotonic() - begin
            grown = process.memory_info().rss - memory
        ok = result("until it was durable and answered", answered, "s")
        ok &= result("until every vehicle could be looked up", merged, "s", at_most=15 * share)
        ok &= result("the node's memory grew by", grown / 1e6, "MB", at_most=100)
        if options.store == "sqlite":
            ok &= result("disk", (_disk(node) - disk) / 1e6, "MB", at_most=60 * share)
        assert api.counts("task_bench_1")["waiting"] == options.ids
        begin = time.monotonic()
        api.cancel("task_bench_1")
        result("cancelled, every one of them recorded, in", time.monotonic() - begin, "s")
        return ok and all(met)


def _disk(node: Node) -> int:
    return sum(file.stat().st_size for file in (node.folder / "data").glob("*"))


def bench_batches(options: argparse.Namespace) -> bool:
    ok = True
    for each, aim in ((200, 100_000), (5_000, 200_000)):
        heading(f"batches of {each:,} vehicles over MQTT ({options.store})")
        with one_node(options.store) as node:
            count = 400_000 // each
            role = Role(fanout_load.requests, load_on(node), count, each, 0, 32)
            role.await_ready()
            role.go()
            did: fanout_load.Requested = role.result()
            note("a batch, to its PUBACK", spread(did.ack_seconds, "ms", 1e3))
            ok &= result("ids a second, durable", did.ids / did.seconds, "/s", at_least=aim)
            result("and until every vehicle could be looked up", _merged(node, Api(node), "task_bench_1"), "s more")
    return ok


def bench_online(options: argparse.Namespace) -> bool:
    heading(f"1 KiB to {options.vehicles:,} vehicles that are online ({options.store})")
    rounds = 5
    with one_node(options.store) as node:
        process = psutil.Process(node.pid)
        role = Role(fanout_load.vehicles, load_on(node), options.vehicles, options.vehicles * rounds)
        role.await_ready()
        api, ids = Api(node), [vin(n) for n in range(options.vehicles)]
        role.go()
        with bystander(node, "while they go out", 10) as met:
            before = process.cpu_times()
            for n in range(rounds):
                api.send(ids, f"task_bench_{n}", os.urandom(1024))
            took: fanout_load.Took = role.result()
            after = process.cpu_times()
            for n in range(rounds):
                api.wait(f"task_bench_{n}", lambda counts: counts["acked"] == options.vehicles)
        cpu = after.user + after.system - before.user - before.system
        note("cores: node, vehicles", f"{cpu / took.seconds:.2f} {took.cpu_seconds / took.seconds:.2f}")
        rate = result("deliveries a second, received and acked", took.deliveries / took.seconds, "/s", at_least=20_000)
        return rate and all(met)


def bench_one(options: argparse.Namespace) -> bool:
    heading(f"one request to one vehicle ({options.store})")
    count, ok = 500, True
    with one_node(options.store) as node:
        api = Api(node)
        sha1 = api.payload(b"x" * 1024)
        for waiting in (0, options.ids // 10):
            if waiting:
                api.send([f"OTHER{n:09d}" for n in range(waiting)], "task_others_1", b"y")
                _merged(node, api, "task_others_1")
            role = Role(fanout_load.vehicles, load_on(node), 1, count)
            role.await_ready()
            role.go()
            time.sleep(0.2)
            begins = []
            for n in range(count):
                begins.append(time.monotonic())
                body = {"request_id": f"task_one_{waiting + n}", "ids": [vin(0)], "data_sha1": sha1}
                api.ask("POST", "/fanout", json.dumps(body).encode())
                time.sleep(0.005)
            took: fanout_load.Took = role.result()
            seconds = [moment - begin for begin, moment in zip(begins, took.moments, strict=True)]
            note(f"HTTP request to PUBLISH, {waiting:,} others wait", spread(seconds, "µs", 1e6))
            ok &= result(f"p99 while {waiting:,} others wait", at(seconds, 0.99) * 1e3, "ms", at_most=20)
            result("p50", middle(seconds) * 1e3, "ms")
    return ok


def bench_heartbeat(options: argparse.Namespace) -> bool:
    heading(f"heartbeats of vehicles for whom nothing waits ({options.store})")
    vehicles, count = 100_000, 200_000
    with one_node(options.store) as node:
        role = Role(fanout_load.vehicles, load_on(node), min(options.vehicles, 5_000), 1)
        role.await_ready()
        times: dict[str, list[float]] = {"plain/{}/online": [], "ecp/{}/online": []}
        for _ in range(3):
            for template, found in times.items():
                beats = Role(fanout_load.heartbeats, load_on(node), vehicles, count, template)
                beats.await_ready()
                beats.go()
                found.append(beats.result())
        role.close()
        plain, beat = middle(times["plain/{}/online"]), middle(times["ecp/{}/online"])
        note("a publish, and a heartbeat", f"{plain / count * 1e6:.2f} µs, {beat / count * 1e6:.2f} µs")
        return result("a heartbeat, against a plain publish", beat / plain, "times", at_most=1.2)


def bench_collect(options: argparse.Namespace) -> bool:
    heading(f"collecting what {options.ids // 4:,} deliveries have left ({options.store})")
    with one_node(options.store) as node:
        api = Api(node)
        api.send([f"OLD{n:09d}" for n in range(options.ids // 4)], "task_old_1", b"y")
        _merged(node, api, "task_old_1")
        api.cancel("task_old_1")
        return result("a round with nothing old", _timed(lambda: api.ask("POST", "/fanout/collect")), "s")


def _timed(work: Callable[[], Any]) -> float:
    begin = time.monotonic()
    work()
    return time.monotonic() - begin


BENCHES = {
    "million": bench_million,
    "batches": bench_batches,
    "online": bench_online,
    "one": bench_one,
    "heartbeat": bench_heartbeat,
    "collect": bench_collect,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--only", default=",".join(BENCHES))
    parser.add_argument("--store", choices=["sqlite", "postgres"], default="sqlite")
    parser.add_argument("--ids", type=int, default=1_000_000)
    parser.add_argument("--vehicles", type=int, default=10_000)
    options = parser.parse_args()
    met = [BENCHES[name](options) for name in options.only.split(",")]
    sys.exit(0 if all(met) else 1)


if __name__ == "__main__":
    main()
