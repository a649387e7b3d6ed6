"""Text scenarios of sessions: what is done, then what the machines and the store do about it.

    # a comment
    node A                        starts it (`crash A`, `stop A`, `pause A 9`)
    connect c A expiry=60 will=0 clean     a client comes; a connection that it has is left half open
    lose c                        its connection is cut, and the node notices at once; `goodbye c expiry=5`
    write A late                  the next write of that node ends so: fails, lost, late, unanswered
    land                          what was late lands now
    run 2.5                       let so many seconds pass
    ----
    what was said and done since, one line each

Reads, and messages that only repeat others, are left out. `HOLDFAST_REWRITE=1` writes what happened into the file.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from holdfast.mqtt.reasons import Reason
from holdfast.sessions.table import RowWrite
from holdfast.sim.checkers import Violation
from holdfast.sim.life.clients import SimClient
from holdfast.sim.life.faults import LifeFaults
from holdfast.sim.life.node import SimNode
from holdfast.sim.life.workload import LifeWorkload


class LifeScenario:
    """One scenario file being run."""

    def __init__(self) -> None:
        self.work = LifeWorkload(1, faults=LifeFaults(store_seconds=0.0, delay_seconds=0.0), trace=True)
        self.work.clients.clear()
        self.work.clear = self.work.stirs = False
        self.work.sweep_seconds = 0.5
        self.work.table.holding = self._fate
        self._fates: dict[str, list[str]] = {}
        self._seen = 0
        self._said: set[str] = set()

    def run(self, text: str) -> str:
        """The same text, with what really happened below each rule."""
        out: list[str] = []
        for block in text.rstrip("\n").split("\n\n"):
            lines = block.split("\n")
            commands = lines[: lines.index("----")] if "----" in lines else lines
            broken = self._obey(commands)
            out += commands
            if "----" in lines:
                out += ["----", *self._happened(), *broken]
            out.append("")
        return "\n".join(out).rstrip("\n") + "\n"

    def _obey(self, commands: list[str]) -> list[str]:
        try:
            for line in commands:
                if line and not line.startswith("#"):
                    name, *words = line.split()
                    handler: Callable[[list[str]], None] = getattr(self, f"on_{name}")
                    handler(words)
        except Violation as error:
            return [f"BROKEN: {error}"]
        return []

    def _happened(self) -> list[str]:
        trace = self.work.world.trace
        assert trace is not None
        new, self._seen = trace[self._seen :], len(trace)
        out = []
        for line in new:
            said = line[9:]
            if any(word in said for word in ("ReadRow", " hears ", "CONNECT", "loses", "starts")):
                continue
            if "-> " in said and "Release " in said and said in self._said:
                continue
            self._said.add(said)
            out.append(said)
        return out

    def _fate(self, node: SimNode, writes: Sequence[RowWrite]) -> str | None:
        fates = self._fates.get(node.name)
        return fates.pop(0) if writes and fates else None

    def _client(self, name: str) -> SimClient:
        clients = self.work.clients
        if name not in clients:
            clients[name] = SimClient(self.work, name)
            clients[name].wants = False
        return clients[name]

    # ------------------------------------------------------------------------------------ commands

    def on_node(self, words: list[str]) -> None:
        self.work.start(words[0])
        self.on_run(["0.1"])

    def on_crash(self, words: list[str]) -> None:
        self.work.nodes[words[0]].crash()

    def on_stop(self, words: list[str]) -> None:
        self.work.nodes[words[0]].stop(Reason.SERVER_SHUTTING_DOWN, drains=False)

    def on_pause(self, words: list[str]) -> None:
        self.work.nodes[words[0]].paused_until = self.work.world.now + float(words[1])

    def on_connect(self, words: list[str]) -> None:
        client, node, *rest = words
        options = dict(word.partition("=")[::2] for word in rest)
        delay = int(options["will"]) if "will" in options else None
        one = self._client(client)
        if one.link is not None:
            one.link.up = False
        one.connect_to(self.work.nodes[node], "clean" in options, int(options.get("expiry", 60)), delay)

    def on_lose(self, words: list[str]) -> None:
        self._client(words[0]).abandon(0.0)

    def on_goodbye(self, words: list[str]) -> None:
        expiry = words[1].partition("=")[2] if len(words) > 1 else ""
        self._client(words[0]).say_goodbye(int(expiry) if expiry else None)

    def on_write(self, words: list[str]) -> None:
        self._fates.setdefault(words[0], []).extend(words[1:])

    def on_land(self, words: list[str]) -> None:
        late, self.work.table.held_back = self.work.table.held_back, []
        for work in late:
            work()

    def on_run(self, words: list[str]) -> None:
        self.work.world.run(self.work.world.now + float(words[0]))
