"""Text scenarios: what is done, then what the machines do about it, so that a reviewer reads the protocol.

    # a comment
    node n1                       a node; the first mention of one is enough
    streams 2                     the log's next generation, with so many shards (what was open is sealed)
    group order=parallel key=topic start=latest slices=1 ack_timeout=1 attempts=3
    join a @n1                    a session subscribes (with `lease`: a batch reader joins; with `packets=1000`: its
                                  client takes no larger ones)
    unsubscribe a                 and `subscribe a`, `close a`, `leave b`
    publish 0 x x y/t             to shard 0 of the open generation, by these publishers (and to these topics)
    publish 0 bytes=1500 x        the same, large messages
    hold a                        its client acknowledges nothing more, until `ack a`
    drop retention                the oldest generation is dropped
    lose Grant 1                  the next so many messages of that kind are lost
    forge b renew 7               a batch reader hears something that its leader never said (or `update 7 8`)
    cut n1 n2 / mend              nodes (or `store`) that do not hear each other
    crash n1 / restart n1 / crash leader / pause n1 4
    retreat 2                     the leader is told to stop cleanly, within so many seconds
    seek beginning / pause group / resume group / delete
    run 2.5                       let so many seconds pass
    show                          who holds what
    ----
    what was said and done since, one line each

Pings and renewals that changed nothing are left out. `HOLDFAST_REWRITE=1` writes what happened into the file.
"""

from __future__ import annotations

from collections.abc import Callable

from holdfast.groups.protocol.events import Retreat
from holdfast.groups.protocol.messages import (
    Ask,
    DeleteGroup,
    GroupMessage,
    RenewStreamLease,
    Request,
    Seek,
    SetPaused,
    UpdateStreams,
)
from holdfast.groups.protocol.nouns import NO_LIMIT, GroupId, Policy, check_key
from holdfast.groups.record import GroupRecord
from holdfast.groups.settings import LeaderSettings
from holdfast.machine import Address
from holdfast.model import Stream
from holdfast.sim.checkers import Truth
from holdfast.sim.clients import ClientAck, Member, SimBatch, SimSession
from holdfast.sim.faults import Faults
from holdfast.sim.hosts import SimNode
from holdfast.sim.world import World

GROUP = GroupId("g", "t/#")


class Scenario:
    """One scenario file being run."""

    def __init__(self) -> None:
        self.world = World(1, Faults(delay_seconds=0.0), trace=True)
        self.world.muted = self._loses
        self.truth = Truth(self.world)
        self.members: dict[str, Member] = {}
        self.incarnations: dict[str, int] = {}
        self.options = GroupRecord(group=GROUP, born="")
        self.start = "beginning"
        self.borns = 0
        self.requests = 0
        self.losing: dict[str, int] = {}
        self.seen = 0

    def run(self, text: str) -> str:
        """The same text, with what really happened below each rule."""
        out: list[str] = []
        for block in text.rstrip("\n").split("\n\n"):
            lines = block.split("\n")
            commands = lines[: lines.index("----")] if "----" in lines else lines
            for line in commands:
                if line and not line.startswith("#"):
                    self._command(line.split())
            out += commands
            if "----" in lines:
                out += ["----", *self._happened()]
            out.append("")
        return "\n".join(out).rstrip("\n") + "\n"

    def _happened(self) -> list[str]:
        assert self.world.trace is not None
        new, self.seen = self.world.trace[self.seen :], len(self.world.trace)
        return [line for line in (_plain(entry) for entry in new) if line]

    def _command(self, words: list[str]) -> None:
        name, rest = words[0], words[1:]
        handler: Callable[[list[str]], None] = getattr(self, f"on_{name}")
        handler(rest)

    # ------------------------------------------------------------------------------------ the setting

    def node(self, name: str) -> SimNode:
        found = self.world.nodes.get(name) or SimNode(self.world, self.truth, name)
        assert isinstance(found, SimNode)
        return found

    def on_node(self, words: list[str]) -> None:
        self.node(words[0])

    def on_streams(self, words: list[str]) -> None:
        self.world.log.open_generation(int(words[0]))
        self.world.streams_changed()

    def on_group(self, words: list[str]) -> None:
        options = dict(word.split("=") for word in words)
        self.start = options.get("start", "beginning")
        timeout, attempts = options.get("ack_timeout"), options.get("attempts")
        self.options = GroupRecord(
            group=GROUP,
            born="",
            order="parallel" if options.get("order") == "parallel" else "strict",
            key=check_key(options.get("key", "publisher")),
            policy=Policy(float(timeout) if timeout else None, int(attempts) if attempts else None),
        )
        if "slices" in options:
            self.world.leader_settings = LeaderSettings(slices_max=int(options["slices"]))

    def _declare(self) -> str:
        self.borns += 1
        record = GroupRecord(
            group=GROUP,
            born=f"born{self.borns}",
            order=self.options.order,
            key=self.options.key,
            policy=self.options.policy,
            starts=self.world.log.starts(self.start),
        )
        found = self.world.store.declare(record)
        self.truth.starts.setdefault(found.course, dict(found.starts))
        self.truth.declared[found.born] = found
        return found.born

    # ---------------------------------------------------------------------------------------- people

    def on_join(self, words: list[str]) -> None:
        name = words[0]
        node = self.node(next((word[1:] for word in words if word.startswith("@")), "n1"))
        number = self.incarnations[name] = self.incarnations.get(name, 0) + 1
        if "lease" in words:
            self.members[name] = SimBatch(node, name, number, GROUP, self._declare())
            return
        packet_max = next((int(word.partition("=")[2]) for word in words if word.startswith("packets=")), NO_LIMIT)
        session = self.members[name] = SimSession(node, name, number, packet_max)
        session.ack_seconds = 0.01
        old = next((word.partition("=")[2] for word in words if word.startswith("born=")), None)
        session.subscribe(GROUP, old or self._declare())

    def on_subscribe(self, words: list[str]) -> None:
        member = self.members[words[0]]
        assert isinstance(member, SimSession)
        member.subscribe(GROUP, self._declare())

    def on_unsubscribe(self, words: list[str]) -> None:
        member = self.members[words[0]]
        assert isinstance(member, SimSession)
        member.unsubscribe(GROUP)

    def on_close(self, words: list[str]) -> None:
        member = self.members[words[0]]
        assert isinstance(member, SimSession)
        member.close()

    def on_leave(self, words: list[str]) -> None:
        member = self.members[words[0]]
        assert isinstance(member, SimBatch)
        member.leave()

    def on_hold(self, words: list[str]) -> None:
        self.members[words[0]].stuck_until = 1e9

    def on_ack(self, words: list[str]) -> None:
        member = self.members[words[0]]
        member.stuck_until = -1.0
        for reader in member.readers.values():
            for offset in sorted(reader.in_flight):
                self.world.after(0.001, member, ClientAck(reader, offset))

    # --------------------------------------------------------------------------------------- the log

    def on_publish(self, words: list[str]) -> None:
        stream = Stream("messages", int(words[0]), self.world.log.generation)
        size = next((int(word.partition("=")[2]) for word in words if word.startswith("bytes=")), 0)
        for word in [word for word in words[1:] if not word.startswith("bytes=")]:
            self.world.log.sizes[stream, len(self.world.log.messages[stream])] = size
            publisher, _, topic = word.partition("/")
            self.world.publish(stream, publisher, topic or "t")

    def on_drop(self, words: list[str]) -> None:
        self.world.log.drop_oldest()
        self.world.streams_changed()

    # ---------------------------------------------------------------------------------------- faults

    def on_lose(self, words: list[str]) -> None:
        self.losing[words[0]] = int(words[1])

    def _loses(self, to: Address, message: GroupMessage) -> bool:
        name = type(message).__name__
        left = self.losing.get(name, 0)
        if left:
            self.losing[name] = left - 1
            self.world.tell("network", f"loses {name}")
        return left > 0

    def on_forge(self, words: list[str]) -> None:
        """Say something to a batch reader that its leader never said."""
        lease = self.members[words[0]]
        assert isinstance(lease, SimBatch)
        machine, numbers = lease.machine, [int(word) for word in words[2:]]
        if words[1] == "renew":
            lease.on(RenewStreamLease(machine.member, machine.epoch, numbers[0], None, self.world.now, 3.0))
        else:
            lease.on(UpdateStreams(machine.member, machine.epoch, numbers[0], numbers[1], (), 10.0))

    def on_cut(self, words: list[str]) -> None:
        self.world.cut.add(frozenset(words))

    def on_mend(self, words: list[str]) -> None:
        self.world.cut.clear()

    def on_crash(self, words: list[str]) -> None:
        if words == ["leader"]:
            for node in list(self.world.nodes.values()):
                assert isinstance(node, SimNode)
                for leader in list(node.leaders.values()):
                    self.world.tell(leader.name, "BREAKS DOWN")
                    node.leader_gone(leader, clean=False)
            return
        self.node(words[0]).crash()

    def on_retreat(self, words: list[str]) -> None:
        for node in list(self.world.nodes.values()):
            assert isinstance(node, SimNode)
            for leader in list(node.leaders.values()):
                leader.on(Retreat(float(words[0])))

    def on_restart(self, words: list[str]) -> None:
        self.node(words[0]).restart()

    # ------------------------------------------------------------------------------------- operators

    def _ask(self, what: Request) -> None:
        self.requests += 1
        request = f"r{self.requests}"
        node = next(iter(self.world.nodes))
        ask = Ask(request, Address(node, "asker", request), GROUP, what, self.node(node).clock(), 10.0)
        self.world.send(node, Address(node, "registry"), ask)

    def on_seek(self, words: list[str]) -> None:
        self._ask(Seek(tuple(self.world.log.starts(words[0]).items())))

    def on_pause(self, words: list[str]) -> None:
        if words == ["group"]:
            self._ask(SetPaused(True))
        else:
            self.node(words[0]).pause(float(words[1]))

    def on_resume(self, words: list[str]) -> None:
        self._ask(SetPaused(False))

    def on_delete(self, words: list[str]) -> None:
        self._ask(DeleteGroup())

    def on_run(self, words: list[str]) -> None:
        self.world.run(self.world.now + float(words[0]))

    def on_show(self, words: list[str]) -> None:
        for node in self.world.nodes.values():
            assert isinstance(node, SimNode)
            for leader in node.leaders.values():
                if leader.machine.record is None:
                    continue
                for piece, owner, status, mark in leader.machine.view().pieces:
                    self.world.tell("show", f"{piece} {status} {owner or '-'} @{mark}")


_HOUSEKEEPING = ("TrustUntil", "RenewLease", "OpenLease", "Claim ", "Load", "WatchStreams")


def _plain(entry: str) -> str:
    """A trace line without its time, or nothing if it only keeps things alive."""
    line = entry[9:]
    what = line.partition(": ")[2]
    if what.startswith(_HOUSEKEEPING):
        return ""
    if what.startswith("-> "):
        message = what.partition(": ")[2]
        word = message.split(" ")[0]
        if word in ("Ping", "PingResponse") and "reports" not in message and "carried" not in message:
            return ""
        if word == "PingResponse":
            return ""
    return line
