"""MQTT end to end over loopback: publishes, deliveries, backlog, latency, cost, fan-out, idle connections.

python -m bench.mqtt [--only publish,deliver,drain,ack,latency,steady,stalled,fanout,idle]
                     [--store sqlite|postgres|memory]
                     [--port PORT [--http URL]]   a broker that is already running, any broker

Without --port it starts `holdfast serve` on a folder of its own, with fsync before every acknowledgement as always.
The load comes from other processes (bench/mqtt_load.py), which also verify every acknowledgement and delivery.
"""

from __future__ import annotations

import argparse
import secrets
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil  # type: ignore[import-untyped]

from bench import mqtt_load as load
from bench.log import bare_sync
from bench.measure import heading, middle, result, spread
from bench.mqtt_load import Load, Role, Wrong

WINDOW = 500


@dataclass(frozen=True)
class Broker:
    """Where the load goes, and the process that takes it (None if it cannot be found)."""

    host: str
    port: int
    http: str | None
    process: psutil.Process | None

    def family(self) -> list[psutil.Process]:
        return [] if self.process is None else [self.process, *self.process.children(recursive=True)]

    def resident_bytes(self) -> int:
        return sum(each.memory_info().rss for each in self.family())

    def cpu_seconds(self) -> float:
        return sum(sum(each.cpu_times()[:2]) for each in self.family())


@dataclass(frozen=True)
class Bench:
    broker: Broker
    options: argparse.Namespace

    def load(self, **changes: Any) -> Load:
        given = {"topics": self.options.topics, "seconds_max": self.options.seconds_max, **changes}
        return Load(host=self.broker.host, port=self.broker.port, run=f"bench{secrets.token_hex(4)}", **given)

    def warm_up(self) -> None:
        flat_out(self.load(), 20_000)

    def note(self, what: str, text: str) -> None:
        print(f"   {what:<58} {text}")

    def shares(self, before: float, seconds: float, generators: float, count: int) -> None:
        """Who used the processors meanwhile; where others work too, what a processor second buys says most."""
        used = self.broker.cpu_seconds() - before
        each = f"{count / used:,.0f} messages per processor second of the broker" if used else "broker unknown"
        self.note("", f"processors used: broker {used / seconds:.2f}, generators {generators / seconds:.2f}; {each}")


def flat_out(what: Load, count: int) -> load.Published:
    role = Role(load.publish, what, count, WINDOW)
    role.await_ready()
    role.go()
    return role.result()


def bench_publish(bench: Bench) -> bool:
    """Acknowledged publishes, nobody subscribed."""
    rates = []
    for _ in range(bench.options.rounds):
        before = bench.broker.cpu_seconds()
        done = flat_out(bench.load(), bench.options.messages)
        rates.append(done.rate)
        bench.shares(before, done.end - done.begin, done.cpu_seconds, done.count)
    bench.note("rounds", spread(rates, "publishes/s"))
    return result("acknowledged publishes", middle(rates), "publishes/s", at_least=150_000)


def bench_deliver(bench: Bench) -> bool:
    """Publishes and their deliveries to one QoS 1 subscriber, at the same time."""
    rates, publishes = [], []
    for _ in range(bench.options.rounds):
        what, count = bench.load(), bench.options.messages
        subscriber = Role(load.receive, what, count, f"{what.run}-sub")
        publishers = Role(load.publish, what, count, WINDOW)
        subscriber.await_ready()
        publishers.await_ready()
        before = bench.broker.cpu_seconds()
        subscriber.go()
        publishers.go()
        published, received = publishers.result(), subscriber.result()
        seconds = received.end - published.begin
        rates.append(count / seconds)
        publishes.append(published.rate)
        bench.shares(before, seconds, published.cpu_seconds + received.cpu_seconds, count)
    bench.note("rounds", spread(rates, "deliveries/s"))
    result("  publishes acknowledged meanwhile", middle(publishes), "publishes/s")
    return result("end to end, first publish to last delivery", middle(rates), "deliveries/s", at_least=100_000)


def bench_drain(bench: Bench) -> bool:
    """A durable subscriber that comes back to a backlog."""
    what, count = bench.load(), bench.options.backlog
    client = f"{what.run}-sub"
    load.leave_session(what, client)
    published = flat_out(what, count)
    bench.note("backlog", f"{count:,} messages, published at {published.rate:,.0f}/s while nobody was there")
    subscriber = Role(load.receive, what, count, client, resume=True)
    subscriber.await_ready()
    before = bench.broker.cpu_seconds()
    subscriber.go()
    received = subscriber.result()
    seconds = received.end - received.begin
    bench.shares(before, seconds, received.cpu_seconds, count)
    load.end_session(what, client)
    return result("backlog drained, CONNECT to last delivery", count / seconds, "deliveries/s", at_least=200_000)


def bench_ack(bench: Bench) -> bool:
    """How long an acknowledgement takes while little is going on."""
    per_second = 2_000
    role = Role(load.publish_paced, bench.load(), int(per_second * bench.options.seconds), per_second)
    role.await_ready()
    role.go()
    paced: load.Paced = role.result()
    with tempfile.TemporaryDirectory(prefix="holdfast-bench-") as folder:
        bench.note("for comparison, a bare write + fdatasync of 4 KiB", spread(bare_sync(Path(folder)), "µs", 1e6))
    bench.note("publish to acknowledgement", spread(paced.ack_seconds, "µs", 1e6))
    bench.note("the generator was late by", spread(paced.late_seconds, "µs", 1e6))
    ok = result("publish to acknowledgement at 2,000/s, p50", at(paced.ack_seconds, 0.5) * 1e3, "ms", at_most=1)
    return (
        result("publish to acknowledgement at 2,000/s, p99", at(paced.ack_seconds, 0.99) * 1e3, "ms", at_most=5) and ok
    )


def bench_latency(bench: Bench) -> bool:
    """How long a message takes from its publisher to a subscriber."""
    per_second = 10_000
    what, count = bench.load(), int(per_second * bench.options.seconds)
    subscriber = Role(load.receive, what, count, f"{what.run}-sub", timed=True)
    publishers = Role(load.publish_paced, what, count, per_second)
    subscriber.await_ready()
    publishers.await_ready()
    before = bench.broker.cpu_seconds()
    subscriber.go()
    publishers.go()
    paced, received = publishers.result(), subscriber.result()
    bench.note("publish to delivery", spread(received.latency_seconds, "µs", 1e6))
    bench.note("the generator was late by", spread(paced.late_seconds, "µs", 1e6))
    bench.shares(before, paced.seconds, paced.cpu_seconds + received.cpu_seconds, count)
    return result("publish to delivery at 10,000/s, p99", at(received.latency_seconds, 0.99) * 1e3, "ms", at_most=20)


def bench_steady(bench: Bench) -> bool:
    """What a node costs at 2,000 publishes/s from 4 publishers to 4 durable subscribers, each of which gets all."""
    per_second = 2_000
    what, count = bench.load(), int(per_second * bench.options.seconds)
    clients = [f"{what.run}-sub{n}" for n in range(4)]
    for client in clients:
        load.leave_session(what, client)
    subscribers = [Role(load.receive, what, count, client, resume=True) for client in clients]
    publishers = Role(load.publish_paced, what, count, per_second)
    for role in (*subscribers, publishers):
        role.await_ready()
    for role in subscribers:
        role.go()
    time.sleep(0.5)  # not for correctness: their coming back is not what is measured
    before = bench.broker.cpu_seconds()
    publishers.go()
    paced: load.Paced = publishers.result()
    used = bench.broker.cpu_seconds() - before
    for role in subscribers:
        role.result()
    for client in clients:
        load.end_session(what, client)
    bench.note("publish to acknowledgement", spread(paced.ack_seconds, "µs", 1e6))
    bench.note("the generator was late by", spread(paced.late_seconds, "µs", 1e6))
    ok = result("2,000/s to 4 durable subscribers, of a core", 100 * used / paced.seconds, "%", at_most=50)
    return result("  acknowledgement meanwhile, p50", at(paced.ack_seconds, 0.5) * 1e3, "ms", at_most=1.2) and ok


def bench_stalled(bench: Bench) -> bool:
    """What subscribers that do not read cost in memory, whatever is published to them."""
    if bench.broker.process is None:
        raise Wrong("cannot find the broker's process to measure its memory")
    readers, pending_bytes_max = 10, 1 << 20
    grown = {}
    for stalled in (0, readers):
        what = bench.load(payload_bytes=1000)
        socks = [load.connected(what, f"{what.run}-stalled{n}") for n in range(stalled)]
        for sock in socks:
            load.subscribe(sock, what.filter, 1)
        before = bench.broker.resident_bytes()
        flat_out(what, 50_000)
        flat_out(what, 50_000)
        grown[stalled] = bench.broker.resident_bytes() - before
        for sock in socks:
            sock.close()
    bench.note("100 MB published, nobody listening: memory", f"{grown[0] / 1e6:,.1f} MB more")
    each = (grown[readers] - grown[0]) / readers
    bench.note(f"the same to {readers} that do not read: memory", f"{grown[readers] / 1e6:,.1f} MB more")
    return result("one stalled reader", each / 1e6, "MB", at_most=pending_bytes_max / 1e6)


def bench_fanout(bench: Bench) -> bool:
    """One publisher's messages to a thousand subscribers each."""
    ok = True
    subscribers, count = bench.options.subscribers, bench.options.fanned
    for qos in (1, 0):
        what = bench.load(publishers=1, topics=1)
        receivers = Role(load.fan_out, what, subscribers, qos, count, 50)
        publishers = Role(load.publish, what, count, WINDOW)
        receivers.await_ready()
        publishers.await_ready()
        before = bench.broker.cpu_seconds()
        receivers.go()
        publishers.go()
        published, fanned = publishers.result(), receivers.result()
        seconds = fanned.end - published.begin
        bench.note(f"QoS {qos}, one message alone to all {subscribers:,}", spread(fanned.one_seconds, "µs", 1e6))
        bench.shares(before, seconds, published.cpu_seconds + fanned.cpu_seconds, fanned.deliveries)
        target = {"at_least": 200_000.0} if qos else {}
        ok &= result(f"fan-out to {subscribers:,}, QoS {qos}", fanned.deliveries / seconds, "deliveries/s", **target)
    return ok


def bench_idle(bench: Bench) -> bool:
    """What a connection costs that does nothing."""
    if bench.broker.process is None:
        raise Wrong("cannot find the broker's process to measure its memory")
    count = bench.options.connections
    before = bench.broker.resident_bytes()
    begin = time.monotonic()
    holder = Role(load.hold_idle, bench.load(), count)
    holder.await_ready()
    bench.note("connected", f"{count:,} in {time.monotonic() - begin:.1f} s")
    time.sleep(1.0)  # not for correctness: what it does after accepting belongs to the cost
    connected = bench.broker.resident_bytes() - before
    holder.go()
    holder.await_ready()
    time.sleep(1.0)
    subscribed = bench.broker.resident_bytes() - before
    holder.go()
    if holder.result() != count:
        raise Wrong("some idle connections did not answer")
    result("each with a subscription of its own", subscribed / count / 1024, "KiB")
    return result("idle connections, each", connected / count / 1024, "KiB", at_most=25)


FIGURES: dict[str, Callable[[Bench], bool]] = {
    "idle": bench_idle,  # first: on a fresh node, so that no memory freed by others hides the cost
    "publish": bench_publish,
    "deliver": bench_deliver,
    "drain": bench_drain,
    "ack": bench_ack,
    "latency": bench_latency,
    "steady": bench_steady,
    "stalled": bench_stalled,
    "fanout": bench_fanout,
}


def at(values: Any, share: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def listener(port: int) -> psutil.Process | None:
    """The process that listens on a port, as far as this user may know."""
    for process in psutil.process_iter():
        try:
            if any(each.laddr.port == port for each in process.net_connections("tcp") if each.status == "LISTEN"):
                return process
        except psutil.Error:
            continue
    return None


def start_node(stack: ExitStack, store: str) -> Broker:
    sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))
    from node import Node
    from servers import PostgresServer

    folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="holdfast-bench-")))
    url = "memory:" if store == "memory" else None
    if store == "postgres":
        server = PostgresServer()
        stack.callback(server.close)
        url = server.database()
    node = stack.enter_context(Node(folder, store=url))
    return Broker(*node.mqtt, node.http, psutil.Process(node.pid))


def running_broker(port: int, http: str | None) -> Broker:
    if http is not None:
        with urllib.request.urlopen(f"{http.rstrip('/')}/readyz", timeout=10):
            pass
    return Broker("127.0.0.1", port, http, listener(port))


def parse() -> argparse.Namespace:
    arguments = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    arguments.add_argument("--only", default=",".join(FIGURES), help=f"of {', '.join(FIGURES)}")
    arguments.add_argument("--store", choices=["sqlite", "postgres", "memory"], default="sqlite")
    arguments.add_argument("--port", type=int, help="a broker already running on this loopback port")
    arguments.add_argument("--http", help="its HTTP address, to see first that it is ready")
    arguments.add_argument("--messages", type=int, default=500_000, help="for publish and deliver, each round")
    arguments.add_argument("--rounds", type=int, default=3)
    arguments.add_argument("--topics", type=int, default=10, help="distinct topics of each of the 4 publishers")
    arguments.add_argument("--backlog", type=int, default=1_000_000)
    arguments.add_argument("--connections", type=int, default=10_000)
    arguments.add_argument("--subscribers", type=int, default=1_000)
    arguments.add_argument("--fanned", type=int, default=1_000, help="messages to fan out to every subscriber")
    arguments.add_argument("--seconds", type=float, default=10.0, help="for ack and latency")
    arguments.add_argument("--seconds-max", type=float, default=60.0, help="no single run may take longer")
    chosen = arguments.parse_args()
    unknown = set(chosen.only.split(",")) - set(FIGURES)
    if unknown:
        arguments.error(f"--only {','.join(sorted(unknown))}: the figures are {', '.join(FIGURES)}")
    return chosen


def main() -> None:
    chosen = parse()
    ok = True
    with ExitStack() as stack:
        where = f"port {chosen.port}" if chosen.port else f"holdfast serve on {chosen.store}"
        heading(
            f"mqtt on {where}: 4 publishers, 200-byte payloads, QoS 1, window {WINDOW}, {chosen.topics} topics each"
        )
        load.raise_open_files(chosen.connections + 1000)  # the node inherits it
        broker = running_broker(chosen.port, chosen.http) if chosen.port else start_node(stack, chosen.store)
        bench = Bench(broker, chosen)
        wanted = [name for name in FIGURES if name in chosen.only.split(",")]
        for name in wanted:
            if name == "publish" or (name != "idle" and name == wanted[0]):
                bench.warm_up()
            try:
                ok &= FIGURES[name](bench)
            except Wrong as error:
                print(f"   {name:<58} WRONG: {error}")
                ok = False
    sys.exit(0 if ok else 1)


if __name__ == "__main__":
    main()
