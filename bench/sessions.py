"""Durable sessions: how fast they come and come back, what they cost while idle, and how they move between nodes.

python -m bench.sessions [--only connect,herd,idle,narrow,flush,stop,takeover] [--store sqlite|postgres]
                         [--sessions N] [--herd N] [--narrow N] [--others N]

It starts `holdfast serve` on a folder of its own, with fsync before every acknowledgement as always; for take-overs two
nodes that share a PostgreSQL. The clients are in another process (bench/sessions_load.py), whose share of the
processors is printed beside the node's. Figures that depend on a number of sessions print that number.
"""

from __future__ import annotations

import argparse
import contextlib
import resource
import secrets
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil  # type: ignore[import-untyped]

import holdfast
from bench import mqtt_load as load
from bench.measure import heading, result, spread
from bench.mqtt import at, flat_out
from bench.mqtt_load import Load, Role, Wrong
from bench.sessions_load import Arrive, Arrived, Fleet, Got, Leave, Receive, take_part
from holdfast.model import LOG, Batch

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

if TYPE_CHECKING:
    from node import Node

AT_ONCE = 500
"""Clients that wait for an answer at the same time, when they come in good order."""
GENERATIONS, SHARDS = 720, 16
HERD, HERD_SECONDS = 50_000, 15.0
"""What is aimed at; a smaller herd must be served as much faster."""


def note(what: str, text: str) -> None:
    print(f"   {what:<58} {text}")
    sys.stdout.flush()


@contextlib.contextmanager
def one_node(store: str = "sqlite", before: Callable[[Path], None] | None = None) -> Iterator[Node]:
    from node import Node
    from servers import PostgresServer

    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="holdfast-bench-")))
        url = None
        if store == "postgres":
            server = PostgresServer()
            stack.callback(server.close)
            url = server.database()
        if before is not None:
            before(folder)
        node = stack.enter_context(Node(folder, store=url))
        flat_out(load_on(node), 20_000)  # a warm-up
        yield node


def load_on(node: Node, **changes: Any) -> Load:
    return Load(host="127.0.0.1", port=node.mqtt_port, run=f"bench{secrets.token_hex(4)}", **changes)


class Clients:
    """A fleet in a process of its own."""

    def __init__(self, node: Node, count: int, *, everyone: bool = False, seconds_max: float = 120.0):
        self.fleet = Fleet(
            host="127.0.0.1",
            port=node.mqtt_port,
            name=f"bench{secrets.token_hex(4)}",
            count=count,
            everyone=everyone,
            seconds_max=seconds_max,
        )
        self._role = Role(take_part, self.fleet)
        self._role.await_ready()

    def __enter__(self) -> Clients:
        return self

    def __exit__(self, *_: object) -> None:
        self._role.close()

    def arrive(self, *, new: bool, at_once: int = AT_ONCE) -> Arrived:
        answer: Arrived = self._role.ask(Arrive(at_once, subscribe=new, present=not new))
        return answer

    def receive(self, deliveries: int) -> Got:
        answer: Got = self._role.ask(Receive(deliveries))
        return answer

    def leave(self) -> None:
        if (left := self._role.ask(Leave())) != self.fleet.count:
            raise Wrong(f"{left:,} of {self.fleet.count:,} clients were connected when they were to leave")


@dataclass
class Shares:
    """Who used the processors."""

    node: Node

    def __post_init__(self) -> None:
        self._process = psutil.Process(self.node.pid)
        self._before, self._begin = self.cpu_seconds(), time.monotonic()

    def cpu_seconds(self) -> float:
        return float(sum(self._process.cpu_times()[:2]))

    def say(self, generators: float, count: int) -> float:
        """The node's processor seconds."""
        used, seconds = self.cpu_seconds() - self._before, time.monotonic() - self._begin
        each = f"{used / count * 1e6:,.0f} µs of the node each"
        note("", f"processors used: node {used / seconds:.2f}, clients {generators / seconds:.2f}; {each}")
        return used


def bench_connect(options: argparse.Namespace) -> bool:
    """New sessions that subscribe, and the same ones again."""
    count, ok = options.sessions, True
    with one_node(options.store) as node, Clients(node, count) as clients:
        for new in (True, False):
            shares = Shares(node)
            arrived = clients.arrive(new=new)
            shares.say(arrived.cpu_seconds, count)
            what = "CONNECT + SUBSCRIBE, new" if new else "CONNECT, known"
            note(f"{what}: first packet to last answer", spread(arrived.each_seconds, "ms", 1e3))
            if arrived.refused:
                note("refused, and tried again", f"{arrived.refused:,} times")
            rate = count / (arrived.end - arrived.begin)
            ok &= result(f"{what}, {count:,} sessions", rate, "sessions/s", at_least=5_000)
            clients.leave()
    return ok


def bench_herd(options: argparse.Namespace) -> bool:
    """Everybody comes back at the same moment, to a node that has just started."""
    count = options.herd
    allowed = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    if allowed != resource.RLIM_INFINITY and allowed < count + 500:
        count = allowed - 500
        note("scaled down", f"to {count:,} of {options.herd:,} clients: a process here may open {allowed:,} files")
    load.raise_open_files(count + 400)
    with one_node(options.store) as node, Clients(node, count) as clients:
        clients.arrive(new=True)
        node.kill()
        node.start()
        shares = Shares(node)
        arrived = clients.arrive(new=False, at_once=count)
        shares.say(arrived.cpu_seconds, count)
    seconds = arrived.end - arrived.begin
    note("first SYN to CONNACK", spread(arrived.each_seconds, "ms", 1e3))
    note("refused, and tried again", f"{arrived.refused:,} times")
    limit = HERD_SECONDS * count / HERD
    if count != HERD:
        note("at this pace", f"{HERD:,} would take {seconds * HERD / count:,.1f} s")
    return result(f"a herd of {count:,} served after a restart", seconds, "s", at_most=limit)


def bench_idle(options: argparse.Namespace) -> bool:
    """What a session costs that does nothing, connected and away."""
    ok = True
    for generations in (1, GENERATIONS):
        ok &= _idle(options.sessions, generations)
    return ok


def _idle(count: int, generations: int) -> bool:
    name = f"{generations} generation{'s' if generations > 1 else ''} of {SHARDS} shards"
    with one_node(before=lambda folder: _make_generations(folder, generations)) as node:
        with Clients(node, 1_000) as others:  # what the first ones cost is not what one more costs
            others.arrive(new=True)
            others.leave()
        node.stop()
        disk = _disk(node)
        node.start()
        process = psutil.Process(node.pid)
        with Clients(node, count) as clients:
            time.sleep(3.0)  # not for correctness: what a start leaves to do is not the sessions'
            before = process.memory_info().rss
            clients.arrive(new=True)
            time.sleep(3.0)
            connected = process.memory_info().rss - before
            clients.leave()
            time.sleep(1.0)
            away = process.memory_info().rss - before
            node.stop()
            disk = _disk(node) - disk
    note(f"{name}: memory when all have left", f"{away / 1e6:,.1f} MB more than before")
    ok = result(f"{name}: disk, each of {count:,}", disk / count, "bytes", at_most=1024)
    return result(f"{name}: memory, each connected", connected / count / 1024, "KiB", at_most=8) and ok


def _make_generations(folder: Path, count: int) -> None:
    (folder / "data").mkdir(parents=True)
    store = holdfast.open(f"sqlite:///{folder / 'data' / 'holdfast.db'}")
    try:
        store.create(LOG, SHARDS)
        publishers = [f"p{n}" for n in range(8 * SHARDS)]
        for generation in range(count - 1):
            store.append(LOG, Batch([f"old/{generation}"] * len(publishers), [b"x"] * len(publishers), publishers))
            store.seal(LOG)
    finally:
        store.close()


def _disk(node: Node) -> int:
    return sum(path.stat().st_blocks * 512 for path in node.folder.rglob("*") if path.is_file())


def bench_narrow(options: argparse.Namespace) -> bool:
    """Sessions that want little of what was published while they were away."""
    count = options.narrow
    with one_node(options.store) as node, Clients(node, count) as clients:
        clients.arrive(new=True)
        clients.leave()
        others = flat_out(load_on(node, topics=2_500), options.others)
        note("published by others", f"{options.others:,} to 10,000 topics, at {others.rate:,.0f}/s")
        flat_out(clients.fleet.load, count)
        time.sleep(3.0)  # not for correctness: what the log does after so many messages is not the sessions'
        shares = Shares(node)
        arrived = clients.arrive(new=False)
        got = clients.receive(count)
        used = shares.say(arrived.cpu_seconds + got.cpu_seconds, count)
    note("all back and caught up", f"{got.end - arrived.begin:,.1f} s")
    what = f"back after {options.others:,} of others, {count:,} sessions, each"
    return result(what, used / count * 1e3, "ms of CPU", at_most=10)


def bench_flush(options: argparse.Namespace) -> bool:
    """Publishes while the cursors of live subscribers are saved."""
    count, per_second, ok = options.sessions, 2_000, True
    with one_node(options.store) as node, Clients(node, count, everyone=True) as clients:
        alone = _paced(load_on(node), int(per_second * options.seconds / 2), per_second)
        note("for comparison, publishes to nobody at the same pace", spread(alone.ack_seconds, "µs", 1e6))
        clients.arrive(new=True)
        time.sleep(6.0)  # not for correctness: what their coming has left to be flushed is not measured
        # A message to each in turn: whoever is flushed, others are being delivered to.
        published = int(per_second * options.seconds)
        shares = Shares(node)
        paced = _paced(clients.fleet.load, published, per_second)
        got = clients.receive(published)
        shares.say(paced.cpu_seconds + got.cpu_seconds, published)
        note("publish to acknowledgement, each to one of them", spread(paced.ack_seconds, "µs", 1e6))
        what = f"2,000/s to {count:,} live subscribers in turn"
        ok &= result(f"{what}, publish p99", at(paced.ack_seconds, 0.99) * 1e3, "ms", at_most=20)
        # One message to all: five seconds later all of them have something to be saved.
        time.sleep(6.0)
        sock = load.connected(clients.fleet.load, f"{clients.fleet.name}-all")
        _publish_to_all(sock, clients.fleet)
        clients.receive(published + count)
        load.disconnect(sock)
        paced = _paced(load_on(node), 10_000, 1_000)
        note("publish to acknowledgement, all are to be flushed", spread(paced.ack_seconds, "µs", 1e6))
        note("the generator was late by", spread(paced.late_seconds, "µs", 1e6))
        what = f"1,000/s while {count:,} are flushed after one message to all"
        ok &= result(f"{what}, p99", at(paced.ack_seconds, 0.99) * 1e3, "ms", at_most=20)
        result("  the longest", max(paced.ack_seconds) * 1e3, "ms")
    return ok


def _paced(what: Load, count: int, per_second: float) -> load.Paced:
    role = Role(load.publish_paced, what, count, per_second)
    role.await_ready()
    role.go()
    paced: load.Paced = role.result()
    return paced


def _publish_to_all(sock: Any, fleet: Fleet) -> None:
    topic = fleet.topic_for_all
    body = len(topic).to_bytes(2, "big") + topic + b"\0\1" + b"to all"
    sock.sendall(b"\x32" + load.remaining(len(body)) + body)
    load.expect(sock, load.PUBACK + b"\0\1", "PUBACK")


def bench_stop(options: argparse.Namespace) -> bool:
    """SIGTERM to the end of the process, with nothing to be saved and with something of everybody."""
    count, ok = options.sessions, True
    with one_node(options.store) as node, Clients(node, count, everyone=True) as clients:
        clients.arrive(new=True)
        for moved in (False, True):
            time.sleep(6.0)  # not for correctness: what was to be flushed has been
            if moved:
                sock = load.connected(clients.fleet.load, f"{clients.fleet.name}-all")
                _publish_to_all(sock, clients.fleet)
                clients.receive(count)
                load.disconnect(sock)
            used, ended = Shares(node).cpu_seconds(), _cpu_of_ended()
            begin = time.monotonic()
            node.stop()
            seconds = time.monotonic() - begin
            note("", f"of which the node worked {_cpu_of_ended() - ended - used:.2f} s")
            what = "something to be saved of each" if moved else "idle"
            ok &= result(f"clean stop, {count:,} connected, {what}", seconds, "s", at_most=2)
            node.start()
            clients.arrive(new=False)
    return ok


def _cpu_of_ended() -> float:
    """Processor seconds of all nodes that have ended."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def bench_takeover(options: argparse.Namespace) -> bool:
    """One client id on one node, then on the other; and messages from one node to the other."""
    from node import Node
    from servers import PostgresServer

    with ExitStack() as stack:
        server = PostgresServer()
        stack.callback(server.close)
        where, url = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="holdfast-bench-"))), server.database()
        nodes = [stack.enter_context(Node(where / name, store=url, node_id=name)) for name in ("one", "other")]
        loads = [load_on(node) for node in nodes]
        for each in loads:
            flat_out(each, 20_000)
        seconds = []
        clients = [f"{loads[0].run}-{n}" for n in range(20)]
        here = {client: load.connected(loads[0], client, clean=False, present=False) for client in clients}
        for sock in here.values():
            load.subscribe(sock, loads[0].filter, 1)
        for turn in range(options.takeovers):
            client = clients[turn % len(clients)]
            to = loads[(turn // len(clients) + 1) % 2]
            begin = time.monotonic()
            sock = load.connected(to, client, clean=False, present=True)
            seconds.append(time.monotonic() - begin)
            here[client].close()
            here[client] = sock
        for sock in here.values():
            load.disconnect(sock)
        note("CONNECT to CONNACK, connected on the other node", spread(seconds, "ms", 1e3))
        ok = result("takeover across nodes, p99", at(seconds, 0.99) * 1e3, "ms", at_most=200)
        return _across(loads[0], loads[1], options.seconds) and ok


def _across(here: Load, there: Load, seconds: float) -> bool:
    """Published on one node, delivered by the other."""
    per_second = 500
    count = int(per_second * seconds)
    what = Load(**{**vars(here), "run": f"bench{secrets.token_hex(4)}"})
    subscriber = Role(load.receive, Load(**{**vars(what), "port": there.port}), count, f"{what.run}-sub", timed=True)
    publishers = Role(load.publish_paced, what, count, per_second)
    for role in (subscriber, publishers):
        role.await_ready()
    for role in (subscriber, publishers):
        role.go()
    paced: load.Paced = publishers.result()
    received: load.Received = subscriber.result()
    note("publish on one node to its acknowledgement", spread(paced.ack_seconds, "µs", 1e6))
    note("publish on one node to delivery on the other", spread(received.latency_seconds, "µs", 1e6))
    after = [(moment - paced.acked_at[sent]) / 1e9 for sent, moment in received.received_at.items()]
    note("acknowledgement on one node to delivery on the other", spread(after, "µs", 1e6))
    what_for = f"commit on one node to delivery on the other, {per_second}/s, p99"
    return result(what_for, at(after, 0.99) * 1e3, "ms", at_most=50)


@dataclass(frozen=True)
class Figure:
    run: Callable[[argparse.Namespace], bool]
    title: str


FIGURES = {
    "connect": Figure(bench_connect, f"durable sessions come, {AT_ONCE} at a time, and come back"),
    "herd": Figure(bench_herd, "everybody comes back at once after the node was killed and started"),
    "idle": Figure(bench_idle, "sessions with one subscription of their own and nothing to do"),
    "narrow": Figure(bench_narrow, "sessions with narrow filters come back after much that is not theirs"),
    "flush": Figure(bench_flush, "live durable subscribers whose cursors are saved every 5 s"),
    "stop": Figure(bench_stop, "a clean stop with everybody connected"),
    "takeover": Figure(bench_takeover, "two nodes on one PostgreSQL"),
}


def parse() -> argparse.Namespace:
    arguments = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    arguments.add_argument("--only", default=",".join(FIGURES), help=f"of {', '.join(FIGURES)}")
    arguments.add_argument("--store", choices=["sqlite", "postgres"], default="sqlite")
    arguments.add_argument("--sessions", type=int, default=10_000, help="for connect, idle, flush and stop")
    arguments.add_argument("--herd", type=int, default=HERD)
    arguments.add_argument("--narrow", type=int, default=1_000, help="sessions for narrow; 10,000 are what is aimed at")
    arguments.add_argument("--others", type=int, default=1_000_000, help="messages of others, for narrow")
    arguments.add_argument("--takeovers", type=int, default=400)
    arguments.add_argument("--seconds", type=float, default=20.0, help="for flush and takeover")
    chosen = arguments.parse_args()
    unknown = set(chosen.only.split(",")) - set(FIGURES)
    if unknown:
        arguments.error(f"--only {','.join(sorted(unknown))}: the figures are {', '.join(FIGURES)}")
    return chosen


def main() -> None:
    chosen = parse()
    ok = True
    load.raise_open_files(chosen.sessions + 1_000)  # the node inherits it
    for name in [name for name in FIGURES if name in chosen.only.split(",")]:
        heading(f"sessions: {FIGURES[name].title}")
        try:
            ok &= FIGURES[name].run(chosen)
        except (Wrong, AssertionError) as error:
            print(f"   {name:<58} WRONG: {error}")
            ok = False
    sys.exit(0 if ok else 1)


if __name__ == "__main__":
    main()
