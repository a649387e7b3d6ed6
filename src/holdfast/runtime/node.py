"""A node: its parts, what each is given of the others, and the tasks that keep them going."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import time
from collections.abc import Callable, Coroutine
from typing import Any, NamedTuple

from holdfast.auth.authenticator import Authenticator
from holdfast.errors import HoldfastError
from holdfast.fanout.nouns import DELIVERIES, Hint
from holdfast.keys import NODES, PROBE
from holdfast.log import Appended
from holdfast.log.retention import RetentionSettings, maintain
from holdfast.machine import Address
from holdfast.model import LOG, RETAIN, Batch
from holdfast.mqtt.reasons import Reason
from holdfast.runtime.bans import BanHost
from holdfast.runtime.batch_members import PREFIX as BATCH_MEMBERS
from holdfast.runtime.batch_members import BatchMembers
from holdfast.runtime.control_topics import ControlTopics
from holdfast.runtime.cursor_copies import CursorCopies
from holdfast.runtime.delivery import DeliveryHost
from holdfast.runtime.drain import DrainHost
from holdfast.runtime.fanout import FanoutHost
from holdfast.runtime.fanout_admin import FanoutAdmin
from holdfast.runtime.fanout_events import FanoutEvents
from holdfast.runtime.fanout_intake import PREFIX as FANOUT
from holdfast.runtime.fanout_intake import FanoutIntake
from holdfast.runtime.fanout_keeper import FanoutKeeper
from holdfast.runtime.fanout_results import FanoutResults
from holdfast.runtime.front import Front, auth_options
from holdfast.runtime.groups import GroupHost
from holdfast.runtime.ingest import Ingest
from holdfast.runtime.metrics import Metrics
from holdfast.runtime.node_lease import NodeLease, NodeRecord, nodes
from holdfast.runtime.notices import Notices
from holdfast.runtime.session_rows import SessionRows
from holdfast.runtime.sessions import Sessions
from holdfast.runtime.subscribing import Subscribing
from holdfast.runtime.supervisor import Supervisor
from holdfast.runtime.sweep import Sweep
from holdfast.sessions.drain import State as DrainState
from holdfast.sessions.life import LifeSettings
from holdfast.sessions.retained import RetainedMessages
from holdfast.sessions.sweep import SweepSettings
from holdfast.settings import MqttSettings, Settings
from holdfast.store import open_metadata, open_store

logger = logging.getLogger("holdfast.node")

TICK_SECONDS = 0.25
COMMIT_SECONDS_MAX = 3.0
"""A node whose commits take longer should get no clients: theirs would hang like everybody's."""
PROBE_AFTER_SECONDS, PROBE_EVERY_SECONDS = 2.0, 0.5
"""If nobody publishes for so long after a commit has failed, the node tries by itself whether the store takes any."""

HINT_SECONDS = 0.005
PURGE_MAX = 500
STOP_SECONDS = 10.0
"""How long a stop waits for sessions to be saved."""
UPKEEP_RESTS = 4.0
"""Upkeep takes a fifth of the time, unless there is so much to do that it falls behind."""


class FailedCommit(NamedTuple):
    """The last commit of publishes that failed, when, and after how many that did not."""

    reason: str
    commits: int
    at: float


class Node:
    def __init__(self, settings: Settings):
        self.settings = settings
        self.node_id = settings.node_id or f"node-{secrets.token_hex(4)}"
        self.store = open_store(settings.store_url)
        self.store.hold(self.node_id)
        self.log = self.store.log()
        self.log.create(LOG, settings.log.shards, settings.log.shard_by)
        self.log.create(DELIVERIES, 1, "topic")
        self.metadata = open_metadata(settings.metadata) if settings.metadata else self.store.metadata()
        self.auth = Authenticator(auth_options(settings.auth))
        self.ready = False
        self.failure: str | None = None
        """Why the node ends."""
        self._failed_commit: FailedCommit | None = None
        self.ended = asyncio.Event()
        """Set when the node cannot go on: whoever runs it should stop it."""
        self.finished = asyncio.Event()
        """Set when it is empty and was asked to end then."""
        self._tasks: set[asyncio.Task[Any]] = set()
        self._stopping = False
        self._copies: CursorCopies | None = None
        self._hints: list[Hint] = []

    # -- start and stop ----------------------------------------------------------------------------------

    async def start(self) -> None:
        loop, settings = asyncio.get_running_loop(), self.settings
        self.supervisor = Supervisor(self._give_up)
        self.notices, self.control = Notices(), ControlTopics()
        retained = RetainedMessages(self.log.retained(LOG))
        self.delivery = DeliveryHost(self.log, retained, settings.limits.pending_bytes_max)
        self.ingest = Ingest(
            self.log,
            settings.limits.batch_bytes_max,
            self._committed,
            self.delivery.machine.anyone_for,
            self._commit_failed,
        )
        self.groups = GroupHost(
            node_id=self.node_id,
            settings=settings.groups,
            log=self.log,
            metadata=self.metadata,
            bus=self.store.bus(self.node_id),
            delivery=self.delivery,
            supervisor=self.supervisor,
            spawn=self.spawn,
            group_deleted=lambda *gone: self.sessions.group_deleted(*gone),
        )
        self.rows = SessionRows(self.store.sessions(), self._alive_leases, self._filters_unused)
        self.group_admin = self.groups.admin
        batch_members = BatchMembers(
            node_id=self.node_id,
            enabled=settings.groups.enabled,
            places_max=settings.limits.subscriptions_max,
            may_subscribe=self.auth.acl.may_subscribe,
            send=self.groups.send,
            declare=self.groups.declare,
            spawn=self.spawn,
        )
        self.groups.register("batch", batch_members.deliver)
        self.control.register(BATCH_MEMBERS, batch_members)
        self.metrics = Metrics(self)
        self.sessions = Sessions(
            self.node_id,
            settings.sessions,
            LifeSettings(
                flush_secs=settings.cursors.subscription_progress_flush_secs,
                lease_secs=settings.sessions.lease_secs,
                grace_secs=settings.sessions.grace_secs,
            ),
            settings.limits.sessions_max,
            self.rows,
            self.delivery,
            self.groups,
            settings.groups.enabled,
            self.notices,
            self.spawn,
        )
        self.groups.register("session", self.sessions.deliver)
        self.fanout = FanoutHost(self.node_id, settings.fanout, self.store.fanout(), self.sessions, self.notices)
        events = FanoutEvents(self.ingest.publish_one)
        self.fanout_intake = FanoutIntake(
            self.fanout, self.auth.acl.may_publish, self._tell_nodes, events, settings.fanout.enabled
        )
        self.fanout_keeper = FanoutKeeper(
            self.node_id,
            settings.fanout,
            self.fanout,
            self._alive_leases,
            self.fanout_intake.look_for_unmerged,
            self._tell_nodes,
            events,
        )
        self.fanout_results = FanoutResults(self.fanout, self.fanout_keeper, self.log, self.metadata)
        self.fanout_admin = FanoutAdmin(self.fanout, self.fanout_keeper, self.log, self.rows.table)
        self.groups.register("fanout", self.fanout_keeper.deliver)
        self.control.register(FANOUT, self.fanout_intake)
        if settings.metadata:
            self._copies = CursorCopies(self.metadata, lambda: self.delivery.heads)
            self.sessions.on_written = self._copies.written
        self.sweep = Sweep(
            self.rows.table,
            self.sessions.node,
            SweepSettings(grace_secs=settings.sessions.grace_secs),
            self._alive_leases,
            self.sessions.held,
            self._sessions_counted,
            self.delivery.filters_changed,
        )
        subscribing = Subscribing(
            self.log,
            self.auth,
            self.ingest,
            self.delivery,
            self.sessions.save,
            self.sessions.note,
            self.control,
            self.groups,
            self.notices,
            groups_enabled=settings.groups.enabled,
            subscriptions_max=settings.limits.subscriptions_max,
            shared_store=self.store.shared,
        )
        self.bans = BanHost(
            self.metadata,
            lambda: self.sessions.clock.time(time.monotonic()),
            lambda new: self.front.disconnect_banned(new),
        )
        self.front = Front(
            settings,
            self.auth,
            self.bans.table,
            self.ingest,
            self.delivery,
            self.control,
            self.sessions,
            subscribing,
            self.metrics,
            self.notices,
            self.spawn,
        )
        self.drain = DrainHost(
            self.sessions,
            self.groups,
            settings.groups.revoke_secs,
            self._send_clients_to,
            self._others,
            self.supervisor,
        )
        self.delivery.on_streams_changed = self.groups.streams_changed
        self.delivery.on_loan_news = self.groups.report
        self.delivery.ask_clock = self.groups.see_clock
        self.delivery.look_at_clock = self.sessions.look_at_clock
        self.groups.start()
        # Our own commits are delivered by the ingest itself.
        self._watch = self.log.watch(
            lambda log: None if self.ingest.is_writing_here() else _from_thread(loop, self._hinted, log)
        )
        self.supervisor.look_after(lambda: self.log.watch_failure)
        self.supervisor.look_after(lambda: self.metadata.watch_failure)
        self.supervisor.run("follow", self.delivery.follow)
        self.supervisor.run_thread("writer", self.ingest.write)
        await self.sweep.begin()
        await self.bans.begin()
        if not self.store.shared:
            await loop.run_in_executor(None, self._forget_nodes)
        self.lease = NodeLease(
            self.metadata,
            NodeRecord(self.node_id, 0, time.time(), mqtt_addresses(settings.mqtt), settings.http.listen),
            settings.sessions.lease_secs,
            self._probe,
            self.sessions,
        )
        await self.lease.begin()
        self.supervisor.run_thread("lease", self.lease.keep)
        self.supervisor.run("sweep", self.sweep.run)
        if settings.fanout.enabled:
            await self.fanout_keeper.begin()
            await self.fanout_results.begin()
            self.supervisor.run("fan-out's merge", self.fanout_intake.merge)
            self.supervisor.run("fan-out's follower", self.fanout_keeper.follow)
            self.supervisor.run("fan-out's keeper", self.fanout_keeper.keep)
            self.supervisor.run("fan-out's results", self.fanout_results.follow)
        self.supervisor.run("bans", self.bans.run)
        self.supervisor.run("tick", self._tick)
        self.supervisor.run("probe", self._look_at_store)
        self.supervisor.run("upkeep", self._upkeep)
        self.ready = True

    def _give_up(self, reason: str) -> None:
        self.failure, self.ready = reason, False
        self.ended.set()

    def _hinted(self, log: str) -> None:
        if log == LOG and not self._stopping:
            self.delivery.hint()

    @property
    def problem(self) -> str | None:
        """Why this node should get no clients; None: it is well."""
        if not self.ready:
            return self.failure or "starting or stopping"
        if self.drain.state is not DrainState.SERVING:
            return "this node is drained"
        if (waiting := self.ingest.waiting_seconds) > COMMIT_SECONDS_MAX:
            return f"the store has not taken what was published for {waiting:.0f} s"
        if self.sessions.frozen:
            return "this node's lease is over: the store does not take its renewal"
        if (failed := self._failed_commit) is not None and failed.commits == self.ingest.commits:
            return failed.reason
        return self.supervisor.problem

    async def stop(self) -> None:
        """A clean stop: clients are told, everything taken is durable, packet ids are remembered."""
        if self._stopping:
            return
        self._stopping, self.ready = True, False
        self.front.closing = True
        self.sessions.stop()
        for connection in list(self.front.sockets):
            connection.close(Reason.SERVER_SHUTTING_DOWN)
        await self.ingest.drained()
        await self.supervisor.end("upkeep", "drain")  # which ask the groups
        await self.groups.stop()
        if not await self.sessions.stopped(STOP_SECONDS):
            logger.error("some sessions could not be saved: what they did last comes again")
        await self.fanout.settled(STOP_SECONDS)
        await asyncio.get_running_loop().run_in_executor(None, self.lease.end)
        await self.supervisor.stop()
        for task in list(self._tasks):
            task.cancel()
        self._watch.close()
        self.ingest.close()
        self.delivery.close()
        self.sessions.close()
        if self._copies is not None:
            self._copies.close()
        self.fanout.close()
        self.sweep.close()
        self.bans.close()
        self.rows.close()
        self.metadata.close()
        self.store.close()

    def spawn(self, work: Coroutine[Any, Any, Any]) -> None:
        """For work that ends by itself; what goes on for ever is the supervisor's."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            logger.error("a task of the node failed", exc_info=task.exception())

    def _committed(self, appended: Appended, parts: dict[int, Batch], now: int) -> None:
        self.delivery.committed(appended, parts, now)
        if self.fanout.vehicles():  # whoever else publishes need not pay for it
            self.fanout.heard(parts.values())
            self.fanout_results.heard(parts.values())

    def _commit_failed(self, error: Exception) -> None:
        self._failed_commit = FailedCommit(str(error), self.ingest.commits, time.monotonic())
        self.metrics.failed.inc()
        self.delivery.doubt()

    # -- the node among others -------------------------------------------------------------------------------

    def _forget_nodes(self) -> None:
        """On a thread. On a store that is this node's alone, whoever had a lease before is surely dead."""
        for key in self.metadata.list(NODES):
            self.metadata.delete(key)

    def _probe(self) -> None:
        """A lease that is elsewhere is renewed only if the store takes writes."""
        if self.settings.metadata:
            self._write_something()

    def _write_something(self) -> None:
        self.store.metadata().put(PROBE, b"")

    def _filters_unused(self, filters: set[str]) -> None:
        self.delivery.filters_changed(dict.fromkeys(filters, 0), whole=False)

    def _alive_leases(self) -> set[int]:
        """On a thread."""
        return {node.lease for node in nodes(self.metadata)}

    def _others(self) -> list[str]:
        """On a thread. Nodes that groups can be left to."""
        return sorted(node.name for node in nodes(self.metadata) if node.name != self.node_id and not node.draining)

    def _tell_nodes(self, hint: Hint) -> None:
        """Whoever else may have vehicles that this concerns; what is said within a moment is said once."""
        if not self.store.shared:
            return
        if not self._hints:
            asyncio.get_running_loop().call_later(HINT_SECONDS, lambda: self.spawn(self._tell_others()))
        self._hints.append(hint)

    async def _tell_others(self) -> None:
        hints, self._hints = self._hints, []
        said = Hint(any(hint.merged for hint in hints), tuple({one for hint in hints for one in hint.campaigns}))
        for node in await asyncio.get_running_loop().run_in_executor(None, nodes, self.metadata):
            if node.name != self.node_id:
                self.groups.send(Address(node.name, "fanout"), said)

    def _send_clients_to(self, server: str) -> None:
        self.front.another_server = server
        self.lease.describe(draining=True)

    def begin_drain(self, server: str, clients_per_sec: float | None, then_stop: bool) -> None:
        """Send all clients away, and stop then or wait for whoever stops it."""
        self.drain.begin(server, clients_per_sec or self.settings.sessions.drain_per_sec)
        if then_stop:
            self.spawn(self._stop_when_empty())

    async def _stop_when_empty(self) -> None:
        await self.drain.emptied.wait()
        self.finished.set()

    async def members(self) -> list[NodeRecord]:
        """Every node that is there."""
        found = await asyncio.get_running_loop().run_in_executor(None, nodes, self.metadata)
        return sorted(found, key=lambda node: (node.name, node.started_at))

    def _sessions_counted(self, count: int) -> None:
        self.sessions.stored = count

    # -- time ----------------------------------------------------------------------------------------------

    async def _tick(self) -> None:
        """Once in a while: rights that changed, retained messages that have expired."""
        while True:
            await asyncio.sleep(TICK_SECONDS)
            self.supervisor.check()
            self.front.refresh_rights()
            await self._purge_retained()

    async def _look_at_store(self) -> None:
        """After a commit that failed nobody may publish for long, as nobody is sent to a node that is not well."""
        while True:
            await asyncio.sleep(PROBE_EVERY_SECONDS)
            failed = self._failed_commit
            if failed is None or time.monotonic() < failed.at + PROBE_AFTER_SECONDS:
                continue
            try:
                await asyncio.get_running_loop().run_in_executor(None, self._write_something)
            except HoldfastError as error:
                logger.info("the store takes no writes yet: %s", error)
                continue
            if self._failed_commit is failed:
                self._failed_commit = None

    async def _purge_retained(self) -> None:
        """Retained messages that have expired, a few at a time; the store forgets those that nobody set anew."""
        gone = self.delivery.machine.retained.purge(self.log.steady() / 1e6, PURGE_MAX)
        if gone:
            await asyncio.get_running_loop().run_in_executor(None, self.log.forget_retained, LOG, gone)

    async def _upkeep(self) -> None:
        """Merge, index, roll and drop, on a thread of its own; cursors of dropped streams go too."""
        chosen, loop = self.settings.log, asyncio.get_running_loop()
        retention = RetentionSettings(
            generation_seconds_max=chosen.generation_secs or None,
            generation_bytes_max=chosen.generation_bytes or None,
            keep_seconds=chosen.keep_secs or None,
            keep_bytes=chosen.keep_bytes or None,
        )
        keep = self.settings.fanout.keep_secs
        ended = RetentionSettings(generation_seconds_max=max(keep / 7, 1.0), keep_seconds=keep) if keep else retention
        special = {DELIVERIES: ended}
        while True:
            await asyncio.sleep(chosen.upkeep_secs)
            before = dict(self.delivery.heads)
            try:
                led = await self.groups.led()
                await loop.run_in_executor(None, maintain, self.log, retention, UPKEEP_RESTS, special)
                heads = await loop.run_in_executor(None, self.log.heads, LOG)
                await self.delivery.look_at_lake()
                dropped = before.keys() - {head.stream for head in heads} - self.delivery.heads.lake.keys()
                if dropped:
                    await self.groups.streams_dropped({stream: before[stream] for stream in dropped}, led)
                await self.group_admin.expire_idle()
            except HoldfastError as error:
                logger.warning("upkeep: %s", error)

    # -- publishing from within ------------------------------------------------------------------------------

    async def publish(self, publisher: str, topic: str, payload: bytes, qos: int, retain: bool) -> bool:
        """From HTTP: True once it is durable."""
        done: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        flags = qos | (RETAIN if retain else 0)
        self.ingest.publish_one(publisher, topic, payload, flags, None, done.set_result)
        return await done


def mqtt_addresses(settings: MqttSettings) -> list[str]:
    """Where clients reach this node: where it is said to be, or where it listens."""
    if settings.advertise:
        return [settings.advertise]
    listeners = {
        "mqtt": settings.listen,
        "mqtts": settings.tls,
        "ws": settings.websocket,
        "wss": settings.websocket_tls,
    }
    return [f"{scheme}://{where}" for scheme, where in listeners.items() if where]


def _from_thread(loop: asyncio.AbstractEventLoop, call: Callable[[str], None], log: str) -> None:
    with contextlib.suppress(RuntimeError):  # the loop has been closed: nobody is left to tell
        loop.call_soon_threadsafe(call, log)
