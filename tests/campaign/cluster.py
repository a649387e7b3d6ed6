"""Three nodes on one PostgreSQL, with proxies between everybody, and what can be done to them."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psycopg

import holdfast
from campaign.proxy import Proxy
from holdfast.model import LOG, Batch
from node import LOOPBACK, Node, NodeFailed
from servers import EtcdServer, PostgresServer
from settable_clock import SettableClock

NODES = ("a", "b", "c")
LEASE_SECONDS = 5.0
GRACE_SECONDS = 5.0
FLUSH_SECONDS = 1.0

WAL_SEGMENT_MB = 1

SETTINGS = {
    "sessions.lease_secs": LEASE_SECONDS,
    "sessions.grace_secs": GRACE_SECONDS,
    "cursors.subscription_progress_flush_secs": FLUSH_SECONDS,
    "log.shards": 4,
}


class Member:
    """One node, the proxy its clients come through and the one it reaches PostgreSQL by."""

    def __init__(self, name: str):
        self.name = name
        self.node: Node
        self.clients: Proxy
        self.store: Proxy
        self.paused = False
        self.clock: SettableClock

    @property
    def port(self) -> int:
        return self.clients.port

    @property
    def up(self) -> bool:
        return self.node.running


class Cluster:
    """Started whole, ended whole. Whatever blocks is done by threads that live as long as the cluster does."""

    def __init__(self, folder: Path, *, etcd: bool):
        self.folder, self._with_etcd = folder, etcd
        self.members = {name: Member(name) for name in NODES}
        self.etcd: EtcdServer | None = None
        # A child process ends with the *thread* that started it: these stay until `close`.
        self._hands = ThreadPoolExecutor(8, "campaign-hands")

    async def do(self, call: Callable[..., Any], *given: Any) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self._hands, call, *given)

    async def start(self) -> None:
        # Small segments of the WAL: so files can be limited to what leaves only the WAL room.
        # No vacuum: what was deleted would be written over, which takes no room.
        self.postgres: PostgresServer = await self.do(PostgresServer, {"autovacuum": "off"}, WAL_SEGMENT_MB)
        if self._with_etcd:
            self.etcd = await self.do(EtcdServer)
        self.url = await self.do(self.postgres.database)
        name = psycopg.conninfo.conninfo_to_dict(self.url)["dbname"]
        socket_path = f"{self.postgres.folder}/.s.PGSQL.5432"
        for member in self.members.values():
            member.store = Proxy(lambda: asyncio.open_unix_connection(socket_path))
            await member.store.start()
            url = f"postgresql://postgres@{LOOPBACK}:{member.store.port}/{name}?sslmode=disable&gssencmode=disable"
            metadata = f"{self.etcd.url}/campaign" if self.etcd is not None else None
            member.clock = SettableClock(self.folder / f"{member.name}.clock")
            member.node = Node(
                self.folder / member.name,
                store=url,
                metadata=metadata,
                node_id=member.name,
                settings=SETTINGS,
                environment=member.clock.environment,
                start=False,
            )
        first, *others = self.members.values()
        await self.do(first.node.start)  # alone: it makes the tables
        await self.do(self._ballast)
        await asyncio.gather(*(self.do(member.node.start) for member in others))
        for member in self.members.values():
            member.clients = Proxy(lambda node=member.node: asyncio.open_connection(*node.mqtt))
            await member.clients.start()

    def _ballast(self) -> None:
        """Bodies that fill what a full disk leaves of their tables: from then on an append needs more room."""
        with holdfast.open(self.url) as log, psycopg.connect(self.url, autocommit=True) as db:
            log.append(LOG, Batch(["ballast"], [bytes(2 * WAL_SEGMENT_MB << 20)]))  # in a table apart, being large
            while True:
                for _ in range(100):
                    log.append(LOG, Batch(["ballast"], [b"x"]))
                size = db.execute("select pg_relation_size('holdfast.bodies')").fetchone()
                if size is not None and size[0] > WAL_SEGMENT_MB << 20:
                    return

    # -- what the nemesis does -----------------------------------------------------------------------------

    async def fill_disk(self, *, wal: bool) -> None:
        """No append finds room; nor does the WAL, if so chosen: then PostgreSQL ends, and cannot recover."""
        await self.do(self.postgres.limit_files, 0 if wal else WAL_SEGMENT_MB << 20)

    async def free_disk(self) -> None:
        """There is room again; if PostgreSQL has ended, somebody starts it."""
        await self.do(self.postgres.limit_files, None)
        await self.do(self.postgres.start)

    async def kill(self, member: Member) -> None:
        await self.do(member.node.kill)

    async def start_again(self, member: Member) -> None:
        """Insist: the store may be away just then."""
        member.paused = False
        for _ in range(5):
            if member.up:
                return
            with contextlib.suppress(NodeFailed):
                await self.do(member.node.start)
                return
        await self.do(member.node.start)

    def pause(self, member: Member) -> None:
        if member.up:
            member.paused = True
            os.kill(member.node.pid, signal.SIGSTOP)

    def resume(self, member: Member) -> None:
        if member.paused and member.up:
            os.kill(member.node.pid, signal.SIGCONT)
        member.paused = False

    async def heal(self) -> None:
        """Everything is as it should be, whatever was done."""
        await self.free_disk()
        if self.etcd is not None:
            await self.do(self.etcd.start)
        for member in self.members.values():
            member.clients.release()
            member.store.release()
            member.clock.set(0.0)
            self.resume(member)
        await asyncio.gather(*(self.start_again(m) for m in self.members.values() if not m.up))

    async def ready(self, member: Member) -> int:
        """What /readyz answers; 0: nothing."""
        try:
            async with asyncio.timeout(2):
                reader, writer = await asyncio.open_connection(LOOPBACK, member.node.http_port)
                try:
                    writer.write(b"GET /readyz HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
                    line = await reader.readline()
                finally:
                    writer.close()
                return int(line.split()[1]) if line else 0
        except (OSError, TimeoutError, IndexError, ValueError):
            return 0

    # -- the end -------------------------------------------------------------------------------------------

    async def stop_nodes(self) -> None:
        await asyncio.gather(*(self.do(member.node.kill) for member in self.members.values()))

    def keep_logs(self, to: Path) -> None:
        """What the servers wrote, beside the history."""
        to.mkdir(parents=True, exist_ok=True)
        for member in self.members.values():
            log = member.node.folder / "node.log"
            if log.exists():
                shutil.copy(log, to / f"node-{member.name}.log")
        for server in (getattr(self, "postgres", None), self.etcd):
            if server is not None and (server.folder / "log").exists():
                shutil.copy(server.folder / "log", to / f"{server.kind}.log")

    async def close(self) -> None:
        for member in self.members.values():
            if hasattr(member, "node"):
                self.resume(member)
                await self.do(member.node.kill)
            for proxy in (getattr(member, "clients", None), getattr(member, "store", None)):
                if proxy is not None:
                    await proxy.close()
        for server in (getattr(self, "postgres", None), self.etcd):
            if server is not None:
                await self.do(server.close)
        self._hands.shutdown()
