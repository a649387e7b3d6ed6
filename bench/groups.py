"""Shared groups: how fast streams change hands, what that moves, and what a group costs.

python -m bench.groups [--only hands,silent,leader,consume,keys,backlog,idle] [--rounds N] [--joins N]

It starts `holdfast serve` with the default lease (5 s), ping (2 s) and timeout (3 s): one node on SQLite, and for the
deaths of nodes two that share a PostgreSQL. Members are real clients over sockets; every delivery and acknowledgement
is noted, and a message that comes again after it was acknowledged counts against the figure.
"""

from __future__ import annotations

import argparse
import secrets
import select
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING

import httpx
import psutil  # type: ignore[import-untyped]

from bench import mqtt_load as load
from bench.measure import heading, middle, result, spread
from bench.mqtt import at
from bench.mqtt_load import Load, Reader, Role, Wrong, connected, disconnect, rendezvous, subscribe

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

if TYPE_CHECKING:
    from e2e.groups.members import Ledger, Member, Publisher
    from node import Node

WINDOW = 500
TIMEOUT_SECONDS, LEASE_SECONDS = 3.0, 5.0
BEAT_SECONDS = 0.015
"""How often each stream gets a message while streams change hands: a part of what is measured."""

REPORT_SECONDS = 0.5
"""Acknowledgements reach the leader within 150 ms; those of a node that is killed meanwhile may be forgotten."""


def note(what: str, text: str) -> None:
    print(f"   {what:<58} {text}")


class Beat(threading.Thread):
    """A message to every stream, again and again."""

    def __init__(self, node: Node, name: str):
        from e2e.groups.members import Publisher, located

        super().__init__(daemon=True)
        self.name_of = name
        self.publisher: Publisher = Publisher(node.mqtt_port, name, clients=128)
        self.publisher.publish(f"{name}/warm-up", 128)
        chosen: dict[str, int] = {}
        for payload, (stream, _) in located(node, f"{name}/warm-up").items():
            chosen.setdefault(stream, int(payload.split("/")[1]))
        # One publisher of each stream goes on, so that a beat is one commit.
        self.publisher.socks = [self.publisher.socks[n] for n in chosen.values()]
        self.streams = list(chosen)
        self._stop_it = threading.Event()
        self.start()

    def run(self) -> None:
        while not self._stop_it.wait(BEAT_SECONDS):
            self.publisher.publish(f"{self.name_of}/x", len(self.streams))

    def stream(self, payload: str) -> str:
        return self.streams[int(payload.split("/")[1])]

    def end(self, ledger: Ledger) -> None:
        """Every message it sent has been consumed."""
        self._stop_it.set()
        self.join(10)
        ledger.await_acked(self.publisher.sent[128:], 60)
        self.publisher.close()


def owners(node: Node, group: str, members: list[str]) -> dict[str, str]:
    from e2e.groups.members import settled

    return {row["stream"]: row["owner"] for row in settled(node, group, members, 60)["streams"]}


def first_after(members: list[Member], streams: set[str], beat: Beat, moment: float) -> dict[str, float]:
    """Of each stream, how long after the moment any of these members was given a message of it."""
    found: dict[str, float] = {}
    for member in members:
        for each in reversed(member.got):
            if each.at < moment:
                break
            stream = beat.stream(each.payload)
            if stream in streams:
                found[stream] = min(found.get(stream, 1e9), each.at - moment)
    return found


def await_all(members: list[Member], streams: set[str], beat: Beat, moment: float, seconds: float) -> dict[str, float]:
    give_up = time.monotonic() + seconds
    while len(found := first_after(members, streams, beat, moment)) < len(streams):
        if time.monotonic() > give_up:
            raise Wrong(f"{len(streams) - len(found)} of {len(streams)} streams are with nobody after {seconds} s")
        time.sleep(0.005)
    return found


# -- on one node -------------------------------------------------------------------------------------------------


def bench_hands(options: argparse.Namespace) -> bool:
    """Members join and leave in order, three others stay."""
    from e2e.groups.members import Ledger, Member
    from node import Node

    joins: list[float] = []
    leaves: list[float] = []
    extra = [0]
    with ExitStack() as stack:
        node = stack.enter_context(Node(Path(stack.enter_context(folder()))))
        name = f"b{secrets.token_hex(3)}"
        group, share, ledger = f"g:{name}/x", f"$share/g/{name}/x", Ledger()
        stay = [stack.enter_context(Member(node.mqtt_port, f"{name}-{n}", share, ledger)) for n in range(3)]
        beat = Beat(node, name)
        ids = [each.client_id for each in stay]
        before = owners(node, group, ids)
        for turn in range(options.joins):
            newcomer = stack.enter_context(Member(node.mqtt_port, f"{name}-new{turn}", None, ledger))
            begin = time.monotonic()
            newcomer.subscribe(share)
            newcomer.await_got(1)
            joins.append(newcomer.got[0].at - begin)
            after = owners(node, group, [*ids, newcomer.client_id])
            # At least what the newcomer now has must have moved; anything else did not have to.
            extra.append(sum(before[stream] != after[stream] for stream in after) - len(after) // (len(ids) + 1))
            its = {stream for stream, owner in after.items() if owner == newcomer.client_id}
            begin = time.monotonic()
            newcomer.disconnect()
            leaves += await_all(stay, its, beat, begin, 10).values()
            before = owners(node, group, ids)
            extra.append(sum(before[stream] != after[stream] for stream in after) - len(its))
        beat.end(ledger)
    note("SUBSCRIBE to the first message", spread(joins, "ms", 1e3))
    note("DISCONNECT to the others' first of each stream", spread(leaves, "ms", 1e3))
    ok = result("join to first message, p99", at(joins, 0.99) * 1e3, "ms", at_most=150)
    ok &= result("graceful leave to the others' deliveries, p99", at(leaves, 0.99) * 1e3, "ms", at_most=150)
    ok &= result("streams moved beyond the least possible, at worst", max(extra), "streams", at_most=1)
    return result("acknowledged messages redelivered", len(ledger.again), "messages", at_most=0) and ok


# -- nodes that die ----------------------------------------------------------------------------------------------


def bench_silent(options: argparse.Namespace) -> bool:
    """A node with members is killed; the leader is elsewhere."""
    return _deaths(options, leader_dies=False)


def bench_leader(options: argparse.Namespace) -> bool:
    """The leader's node is killed; the members are elsewhere."""
    return _deaths(options, leader_dies=True)


def _deaths(options: argparse.Namespace, leader_dies: bool) -> bool:
    from e2e.groups.members import Ledger, Member
    from node import Node
    from servers import PostgresServer

    seconds: list[float] = []
    again = 0
    with ExitStack() as stack:
        server = PostgresServer()
        stack.callback(server.close)
        where, url = Path(stack.enter_context(folder())), server.database()
        stays, dies = (stack.enter_context(Node(where / name, store=url, node_id=name)) for name in ("stays", "dies"))
        for turn in range(options.rounds):
            name = f"b{turn}{secrets.token_hex(3)}"
            group, share, ledger = f"g:{name}/x", f"$share/g/{name}/x", Ledger()
            leads, other = (dies, stays) if leader_dies else (stays, dies)
            first = Member(leads.mqtt_port, f"{name}-first", share, ledger)
            owners(leads, group, [first.client_id])
            more = [Member(other.mqtt_port, f"{name}-{n}", share, ledger) for n in range(2)]
            beat = Beat(stays, name)
            ids = [each.client_id for each in (first, *more)]
            before = owners(stays, group, ids)
            if leader_dies:
                first.disconnect()
                before = owners(stays, group, ids[1:])
            left = more if leader_dies else [first]
            gone = {s for s, owner in before.items() if leader_dies or owner != first.client_id}
            begin = time.monotonic()
            dies.kill()
            if leader_dies:
                # Until the old leader's word ends, members read on: what counts is what comes after they lost it.
                paused = _await_takeover(stays, group, ids[1:], begin)
                seconds.append(paused)
                await_all(left, gone, beat, begin + paused, 10)
            else:
                seconds.append(max(await_all(left, gone, beat, begin, 20).values()))
            beat.end(ledger)
            again += sum(when < begin - REPORT_SECONDS or leader_dies for _, _, when, _ in ledger.again)
            for each in (first, *more):
                each.close()
            dies.start()
    what = "leader killed to all streams granted by the next" if leader_dies else "silent death to others' deliveries"
    limit = LEASE_SECONDS + 1 if leader_dies else TIMEOUT_SECONDS + 0.5
    note("rounds", spread(seconds, "ms", 1e3))
    ok = result(f"{what}, the longest", max(seconds), "s", at_most=limit)
    return result("acknowledged messages redelivered", again, "messages", at_most=0) and ok


def _await_takeover(node: Node, group: str, members: list[str], begin: float) -> float:
    from e2e.groups.members import described

    epoch = described(node, group)["epoch"]  # answered by the next leader, as soon as there is one
    owners(node, group, members)
    assert epoch
    return time.monotonic() - begin


# -- what it costs -----------------------------------------------------------------------------------------------


def share_out(pipe: Connection, what: Load, count: int, members: int) -> tuple[float, float, list[int]]:
    """Members of one group, acknowledging all, until there are `count` deliveries between them."""
    socks = []
    for n in range(members):
        sock = connected(what, f"{what.run}-m{n}")
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 20)
        subscribe(sock, b"$share/g/" + what.filter, 1)
        socks.append(sock)
    rendezvous(pipe)
    readers, left = [Reader(what, 1, gaps=True) for _ in socks], [b""] * members
    index, poll = {sock.fileno(): n for n, sock in enumerate(socks)}, select.epoll()
    for sock in socks:
        poll.register(sock.fileno(), select.EPOLLIN)
    size, give_up = readers[0].layout.size, time.monotonic() + what.seconds_max
    while (total := sum(reader.count for reader in readers)) < count:
        for number, _ in poll.poll(1.0):
            n = index[number]
            chunk = socks[n].recv(1 << 20)
            if not chunk:
                raise Wrong(f"the broker closed member {n}'s connection")
            data = left[n] + chunk if left[n] else chunk
            packets = len(data) // size
            if packets:
                socks[n].sendall(readers[n].take(data, packets))
            left[n] = data[packets * size :]
        if time.monotonic() > give_up:
            raise Wrong(f"{total:,} of {count:,} deliveries in {what.seconds_max} s")
    end, cpu = time.monotonic(), time.process_time()
    if total != count:
        raise Wrong(f"{total:,} deliveries of {count:,}")
    for sock in socks:
        disconnect(sock)
    return end, cpu, [reader.count for reader in readers]


@dataclass(frozen=True)
class Flow:
    """Publishes and their deliveries, all of them."""

    per_second: float
    cpu: float
    """Microseconds of the node's time for each message."""
    counts: list[int]
    """Deliveries to each member."""


def flow(node: Node, messages: int, publishers: int, key: str | None) -> Flow:
    """To one plain subscriber, or to four members of a group with this key."""
    what = Load(host="127.0.0.1", port=node.mqtt_port, run=f"bench{secrets.token_hex(4)}", publishers=publishers)
    if key is None:
        receivers = Role(load.receive, what, messages, f"{what.run}-sub")
    else:
        node.post("/api/v1/groups", {"name": "g", "filter": f"{what.run}/#", "key": key})
        receivers = Role(share_out, what, messages, 4)
    sending = Role(load.publish, what, messages, WINDOW // 4 if publishers > 1 else WINDOW)
    receivers.await_ready()
    sending.await_ready()
    if key is not None:
        owners(node, f"g:{what.run}/#", [f"{what.run}-m{n}" for n in range(4)])
    process = psutil.Process(node.pid)
    used = sum(process.cpu_times()[:2])
    receivers.go()
    sending.go()
    published, received = sending.result(), receivers.result()
    end, counts = (received.end, [messages]) if key is None else (received[0], received[2])
    cpu = (sum(process.cpu_times()[:2]) - used) / messages * 1e6
    return Flow(messages / (end - published.begin), cpu, counts)


def bench_consume(options: argparse.Namespace) -> bool:
    """Publishes and their deliveries: to one plain subscriber, and to four members together."""
    return _compared(options, 16, ["publisher"], at_least=80)


def bench_keys(options: argparse.Namespace) -> bool:
    """The same with one publisher, by whatever key: by message everybody works, at no more than 1.2 times the cost."""
    return _compared(options, 1, ["publisher", "topic", "message"], at_least=100 / 1.2)


def _compared(options: argparse.Namespace, publishers: int, keys: list[str], at_least: float) -> bool:
    from node import Node

    found: dict[str | None, list[Flow]] = {key: [] for key in (None, *keys)}
    with ExitStack() as stack:
        node = stack.enter_context(Node(Path(stack.enter_context(folder()))))
        flow(node, options.messages, publishers, None)  # a warm-up
        for _ in range(options.rounds):
            for key, rounds in found.items():
                rounds.append(flow(node, options.messages, publishers, key))
    ok = True
    for key, rounds in found.items():
        name = "one plain subscriber" if key is None else f"four members by {key}"
        note(name, spread([each.per_second for each in rounds], "deliveries/s"))
        note(f"{name}: the node's time", f"{middle([each.cpu for each in rounds]):.1f} µs a message")
        if key is not None:
            note(f"{name}: to each, last round", ", ".join(f"{count:,}" for count in rounds[-1].counts))
            share = middle([g.per_second / p.per_second for g, p in zip(rounds, found[None], strict=True)])
            ok &= result(f"{name} against the plain one, middle", share * 100, "%", at_least=at_least)
    if "message" in keys:
        pairs = list(zip(found["message"], found["publisher"], strict=True))
        ok &= result(
            "by message against by publisher, time", middle([a.cpu / b.cpu for a, b in pairs]), "x", at_most=1.2
        )
    return ok


def catch_up(node: Node, what: Load, messages: int, key: str) -> Flow:
    """What is in the log already, to four members of a group with this key."""
    from e2e.groups.members import path

    group = f"g:{what.run}/#"
    node.post("/api/v1/groups", {"name": "g", "filter": f"{what.run}/#", "key": key, "start": "beginning"})
    node.post(path(group, "/pause"), {"paused": True})
    receivers = Role(share_out, what, messages, 4)
    receivers.await_ready()
    receivers.go()
    process = psutil.Process(node.pid)
    used, begin = sum(process.cpu_times()[:2]), time.monotonic()
    node.post(path(group, "/pause"), {"paused": False})
    end, _, counts = receivers.result()
    cpu = (sum(process.cpu_times()[:2]) - used) / messages * 1e6
    httpx.delete(f"{node.http}{path(group)}", timeout=60).raise_for_status()
    return Flow(messages / (end - begin), cpu, counts)


def bench_backlog(options: argparse.Namespace) -> bool:
    """By message every member reads every block, and it is decoded once for all of them."""
    from node import Node

    keys = ("publisher", "topic", "message")
    found: dict[str, list[Flow]] = {key: [] for key in keys}
    with ExitStack() as stack:
        node = stack.enter_context(Node(Path(stack.enter_context(folder()))))
        what = Load(host="127.0.0.1", port=node.mqtt_port, run=f"bench{secrets.token_hex(4)}", publishers=1)
        sending = Role(load.publish, what, options.messages, WINDOW)
        sending.await_ready()
        sending.go()
        sending.result()
        catch_up(node, what, options.messages, "publisher")  # a warm-up, while upkeep merges what was published
        for _ in range(options.rounds):
            for key, rounds in found.items():
                rounds.append(catch_up(node, what, options.messages, key))
    for key, rounds in found.items():
        note(f"four members by {key}", spread([each.per_second for each in rounds], "deliveries/s"))
        note(f"four members by {key}: the node's time", f"{middle([each.cpu for each in rounds]):.1f} µs a message")
    pairs = list(zip(found["message"], found["publisher"], strict=True))
    return result("by message against by publisher, time", middle([a.cpu / b.cpu for a, b in pairs]), "x", at_most=1.2)


def hold_members(pipe: Connection, what: Load, groups: int, members: int) -> None:
    load.raise_open_files(groups * members + 100)
    socks = []
    for group in range(groups):
        for n in range(members):
            sock = connected(what, f"{what.run}-{group}-{n}")
            subscribe(sock, f"$share/g{group}/{what.run}/{group}/#".encode(), 1)
            socks.append(sock)
    rendezvous(pipe)
    for sock in socks:
        disconnect(sock)


def bench_idle(options: argparse.Namespace) -> bool:
    """Many groups in which nothing happens."""
    from e2e.groups.members import settled
    from node import Node

    groups, members = options.groups, 4
    load.raise_open_files(groups * members + 1000)
    with ExitStack() as stack:
        node = stack.enter_context(Node(Path(stack.enter_context(folder()))))
        process = psutil.Process(node.pid)
        what = Load(host="127.0.0.1", port=node.mqtt_port, run=f"bench{secrets.token_hex(4)}", seconds_max=60)
        before = process.memory_info().rss
        begin = time.monotonic()
        holder = Role(hold_members, what, groups, members)
        holder.await_ready()
        for group in {0, groups // 2, groups - 1}:
            settled(node, f"g{group}:{what.run}/{group}/#", [f"{what.run}-{group}-{n}" for n in range(members)], 60)
        note("joined", f"{groups} groups, {groups * members:,} members in {time.monotonic() - begin:.1f} s")
        time.sleep(5.0)  # not for correctness: what joining left to do is not idleness
        used, begin = sum(process.cpu_times()[:2]), time.monotonic()
        time.sleep(options.seconds)
        share = (sum(process.cpu_times()[:2]) - used) / (time.monotonic() - begin)
        result("memory, each member", (process.memory_info().rss - before) / groups / members / 1024, "KiB")
        holder.go()
        holder.result()
    return result(f"{groups} groups of {members} idle", share * 100, "% of a core", at_most=5)


@dataclass(frozen=True)
class Figure:
    run: Callable[[argparse.Namespace], bool]
    title: str


FIGURES = {
    "hands": Figure(bench_hands, "streams change hands: three members stay, one joins and leaves"),
    "silent": Figure(bench_silent, "a node with members is killed; two nodes on one PostgreSQL"),
    "leader": Figure(bench_leader, "the leader's node is killed; two nodes on one PostgreSQL"),
    "consume": Figure(bench_consume, "16 publishers, 200 bytes, QoS 1, to one subscriber and to a group of four"),
    "keys": Figure(bench_keys, "one publisher, 200 bytes, QoS 1, to one subscriber and to a group of four"),
    "backlog": Figure(bench_backlog, "what one publisher has left behind, 200 bytes, QoS 1, to a group of four"),
    "idle": Figure(bench_idle, "groups with nothing to do"),
}


def folder() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="holdfast-bench-")


def parse() -> argparse.Namespace:
    arguments = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    arguments.add_argument("--only", default=",".join(FIGURES), help=f"of {', '.join(FIGURES)}")
    arguments.add_argument("--joins", type=int, default=60, help="members that join and leave")
    arguments.add_argument("--rounds", type=int, default=3, help="for silent, leader, consume, keys and backlog")
    arguments.add_argument("--messages", type=int, default=300_000, help="for consume, keys and backlog, each round")
    arguments.add_argument("--groups", type=int, default=500, help="for idle, of four members each")
    arguments.add_argument("--seconds", type=float, default=10.0, help="for idle")
    chosen = arguments.parse_args()
    unknown = set(chosen.only.split(",")) - set(FIGURES)
    if unknown:
        arguments.error(f"--only {','.join(sorted(unknown))}: the figures are {', '.join(FIGURES)}")
    return chosen


def main() -> None:
    chosen = parse()
    ok = True
    for name in [name for name in FIGURES if name in chosen.only.split(",")]:
        heading(f"groups: {FIGURES[name].title}")
        try:
            ok &= FIGURES[name].run(chosen)
        except (Wrong, AssertionError) as error:
            print(f"   {name:<58} WRONG: {error}")
            ok = False
    sys.exit(0 if ok else 1)


if __name__ == "__main__":
    main()
