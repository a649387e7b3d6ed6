"""A simulated node: the machines of a message's path, their hosts, and what they are given of each other."""

from __future__ import annotations

from holdfast.delivery.delivery import DeliverySettings
from holdfast.mqtt.connection import ConnectionSettings
from holdfast.mqtt.reasons import Reason
from holdfast.sim.front.checkers import Truth
from holdfast.sim.front.connection import SimConnection
from holdfast.sim.front.delivery import SimDelivery
from holdfast.sim.front.disk import Disk, StoreDown
from holdfast.sim.front.ingest import SimIngest
from holdfast.sim.front.keeper import SimKeeper
from holdfast.sim.front.lending import Groups, SimLending
from holdfast.sim.front.sessions import SimSessions
from holdfast.sim.front.sockets import ClientEnd, Socket
from holdfast.sim.front.subscribing import SimSubscribing
from holdfast.sim.front.world import Life, Work, World


class FrontSettings:
    """Small bounds, so that little traffic reaches them."""

    pending_bytes_max = 4000
    batch_bytes_max = 8000
    socket_bytes_max = 3000
    flush_seconds = 0.5
    inflight_max = 20


class SimFront:
    """From its start to its stop or crash."""

    def __init__(self, world: World, disk: Disk, truth: Truth, groups: Groups, settings: FrontSettings):
        self.world, self.disk, self.truth, self.settings = world, disk, truth, settings
        self.life = Life()
        self.names: dict[bytes, str] = {}
        self.sockets: dict[SimConnection, None] = {}
        self.inflight_max = settings.inflight_max
        self.accepting = True
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
        self.keeper = SimKeeper(self)
        self.sessions = SimSessions(self)
        self.subscribing = SimSubscribing(self)
        self.lending = SimLending(self, groups)
        disk.log.on_change = lambda ours: None if ours else self.hint()
        self.sessions.load()
        self.spawn(self.delivery.follow())
        self.spawn(self.ingest.run())
        self.spawn(self.keeper.run())
        self.spawn(self.sessions.flush_for_ever(settings.flush_seconds))
        self.spawn(self.lending.lend_for_ever())
        self.spawn(self.lending.pass_over_for_ever())
        truth.front = self
        truth.started()

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
        self.truth.crashed()
        self._let_go()

    def stop(self) -> Work:
        """A clean stop."""
        self.world.tell("node", "stops")
        self.accepting = False
        self.sessions.closing = True
        for connection in list(self.sockets):
            connection.close(Reason.SERVER_SHUTTING_DOWN)
        yield self.ingest.drained()
        try:
            yield from self.sessions.save_all()
            flushed = not any(s.positions.dirty for s in self.sessions.known.values() if s.durable)
        except StoreDown:
            flushed = False
        if flushed:
            self.truth.stopped()
        else:
            self.truth.crashed()
        self.life.alive = False
        self._let_go()

    def _let_go(self) -> None:
        for connection in self.sockets:
            connection.socket.node_died()
        for group in self.lending.groups.groups.values():
            group.lent.clear()
