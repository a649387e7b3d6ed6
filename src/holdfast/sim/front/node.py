"""A simulated node: the machines of a message's path, their hosts, and what they are given of each other."""

from __future__ import annotations

from holdfast.delivery.delivery import DeliverySettings
from holdfast.mqtt.connection import ConnectionSettings
from holdfast.mqtt.reasons import Reason
from holdfast.sessions.life import LifeSettings
from holdfast.sessions.sweep import SweepSettings
from holdfast.sim.front.checkers import Truth
from holdfast.sim.front.connection import SimConnection
from holdfast.sim.front.delivery import SimDelivery
from holdfast.sim.front.disk import Disk
from holdfast.sim.front.ingest import SimIngest
from holdfast.sim.front.lending import Groups, SimLending
from holdfast.sim.front.rows import SimRows
from holdfast.sim.front.sessions import SimSessions
from holdfast.sim.front.sockets import ClientEnd, Socket
from holdfast.sim.front.subscribing import SimSubscribing
from holdfast.sim.front.sweep import SimUpkeep
from holdfast.sim.front.world import Life, Work, World


class FrontSettings:
    """Small bounds, so that little traffic reaches them."""

    pending_bytes_max = 4000
    batch_bytes_max = 8000
    socket_bytes_max = 3000
    inflight_max = 20
    stop_seconds = 1.0

    def __init__(self, *, flush_secs: float = 0.5, freeze_secs: float = 5.0, grace_secs: float = 0.5):
        self.life = LifeSettings(
            connect_wait_secs=1.3,
            ask_secs=0.05,
            read_secs=0.3,
            write_secs=0.1,
            flush_secs=flush_secs,
            close_secs=0.3,
            freeze_secs=freeze_secs,
            grace_secs=grace_secs,
            lease_secs=1.0,
            margin_secs=0.15,
        )
        self.sweep = SweepSettings(grace_secs=grace_secs, unheld_secs=1.0, tombstone_secs=4.0)


class SimFront:
    """From its start to its stop or crash."""

    def __init__(self, world: World, disk: Disk, truth: Truth, groups: Groups, settings: FrontSettings):
        self.world, self.disk, self.truth, self.settings = world, disk, truth, settings
        self.life, self.name = Life(), "n"
        self.names: dict[bytes, str] = {}
        self.sockets: dict[SimConnection, None] = {}
        self.inflight_max = settings.inflight_max
        self.accepting = False
        self.connection_settings = ConnectionSettings(
            connect_seconds=2.0,
            packet_bytes_max=1 << 16,
            unread_bytes_max=settings.pending_bytes_max,
            receive_maximum=10,
            topic_alias_maximum=3,
            linger_seconds=0.5,
            packets_per_turn=4,
            long_way_bytes=3000,
            held_bytes=2000,
        )
        self.delivery = SimDelivery(
            self,
            DeliverySettings(
                pending_bytes_max=settings.pending_bytes_max,
                write_bytes=1500,
                retained_rows=4,
                loan_rows=8,
                early_bytes_max=3000,
            ),
        )
        self.ingest = SimIngest(
            world,
            disk,
            self.life,
            settings.batch_bytes_max,
            self.delivery.committed,
            self.delivery.machine.anyone_for,
            self.delivery.doubt,
        )
        self.rows = SimRows(self)
        self.sessions = SimSessions(self, settings.life)
        self.subscribing = SimSubscribing(self)
        self.lending = SimLending(self, groups)
        disk.log.on_change = lambda ours: None if ours else self.hint()
        self.upkeep = SimUpkeep(self, settings.sweep)
        self.spawn(self.delivery.follow())
        self.spawn(self.ingest.run())
        self.spawn(self._begin())
        self.spawn(self.lending.lend_for_ever())
        self.spawn(self.lending.pass_over_for_ever())
        truth.front = self
        truth.started()

    def _begin(self) -> Work:
        yield from self.upkeep.begin()
        self.accepting = True
        self.spawn(self.upkeep.keep_lease())
        self.spawn(self.upkeep.sweep())

    def spawn(self, work: Work) -> None:
        self.world.spawn(work, self.life)

    def hint(self) -> None:
        """Somebody else appended, sealed or dropped: we hear of it a little later."""
        self.world.after(self.world.rng.random() * 0.02, self.delivery.hint, self.life)

    def accept(self, client: ClientEnd, *, seconds: float, piece: int) -> Socket | None:
        if not self.accepting:
            return None
        socket = Socket(
            self.world, client, self.life, high=self.settings.socket_bytes_max, seconds=seconds, piece=piece
        )
        self.sockets[SimConnection(self, socket)] = None
        return socket

    def crash(self) -> None:
        """Everything in memory is gone; clients notice."""
        self.world.tell("node", "CRASHES")
        self.accepting = self.life.alive = False
        self.truth.words_lost()
        self._let_go()

    def stop(self) -> Work:
        """A clean stop."""
        self.world.tell("node", "stops")
        self.accepting = False
        self.sessions.stop()
        for connection in list(self.sockets):
            connection.close(Reason.SERVER_SHUTTING_DOWN)
        yield self.ingest.drained()
        yield from self.sessions.stopped(self.settings.stop_seconds)
        if self.sessions.live:
            self.truth.words_lost()
        yield from self.upkeep.end_lease()
        self.life.alive = False
        self._let_go()

    def _let_go(self) -> None:
        self.truth.process_ended()
        self.truth.lives.process_ended()
        for connection in self.sockets:
            connection.socket.node_died()
        for group in self.lending.groups.groups.values():
            group.lent.clear()
