"""The promises of sessions, checked at every commit, CONNACK, delivery and acknowledgement.

one connection            no other node serves the client within its lease; epochs that were welcome only grow
who may change a row      away or dead; the owner; an ended lease; `Released` for exactly this epoch; the own lease
never lost, gone after    a session ends by clean start, or when its expiry has passed; a CONNECT after that begins anew
acknowledged never again  what a commit, or a clean hand-over, has kept is not sent again
cursors only forward      and never past what was not acknowledged; subscriptions that were answered stay
a will once               when due; not after a good-bye, not while connected, not if back in time; each has one fate
deleted stays deleted     a session that ended is never written again
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf
from typing import TYPE_CHECKING

from holdfast.mqtt.reasons import Reason
from holdfast.sessions.life import Connect, SessionLife, State
from holdfast.sessions.session import NEVER
from holdfast.sessions.table import RowWrite, SessionRow, StoredWill
from holdfast.sim.checkers import Violation
from holdfast.sim.front.world import World
from holdfast.sim.life.node import SimNode, show_row, starts_of
from holdfast.sim.life.store import EPOCH_OF_TIME, SimTable

if TYPE_CHECKING:
    from holdfast.sim.life.workload import LifeWorkload

SLACK = 0.9
"""How far a node's belief about the store's clock may be from true: the margin of answers, drift, a jump at 1%."""


@dataclass(slots=True)
class Attempt:
    """One CONNECT, and what became of its connection."""

    connect: Connect
    client: str
    arrived_at: float
    """True time, as the store counts it."""
    over_at: float | None = None
    by_node: bool = False
    goodbye: bool = False
    """A machine was told that the client said DISCONNECT."""
    expiry_secs: int | None = None
    over_on: SimNode | None = None
    born: str = ""


def bits_of(data: bytes) -> int:
    return int.from_bytes(data, "little")


class Truth:
    """What has happened, independently of what the machines believe."""

    def __init__(self, world: World, table: SimTable, grace_secs: float):
        self.world, self.table, self.grace_secs = world, table, grace_secs
        self.run: LifeWorkload
        self.attempts: dict[str, Attempt] = {}
        self.published: set[str] = set()
        self.withdrawn: set[str] = set()
        """Wills, by the token of their CONNECT."""
        self.ended: set[str] = set()
        """Sessions, by the token that began them, that were deleted."""
        self.newest: dict[str, int] = {}
        """By client: the newest epoch that was welcome."""
        self._acks: dict[tuple[str, str], int] = {}
        """By client and session: what the client has acknowledged."""
        self._processed: dict[tuple[str, int], int] = {}
        """By client and epoch: which acknowledgements its owner has taken."""
        self._served: dict[tuple[str, int], SimNode] = {}
        self._released: set[tuple[str, int]] = set()
        self._told: dict[tuple[str, str], dict[str, int]] = {}
        """By client and session: subscriptions the client was told of."""
        self.deliveries = self.commits = 0
        self.refusals = 0
        table.truth = self

    @property
    def now(self) -> float:
        return EPOCH_OF_TIME + self.world.now

    def fail(self, promise: str, what: str) -> None:
        raise Violation(f"{promise}: {what}")

    # -- connections ---------------------------------------------------------------------------------------

    def arrived(self, connect: Connect, client: str) -> None:
        self.attempts[connect.token] = Attempt(connect, client, self.now)

    def connection_over(
        self,
        token: str,
        node: SimNode,
        *,
        by_node: bool = False,
        goodbye: bool = False,
        expiry_secs: int | None = None,
    ) -> None:
        attempt = self.attempts[token]
        if attempt.over_at is None:
            attempt.over_at, attempt.by_node, attempt.goodbye = self.now, by_node, goodbye
            attempt.expiry_secs, attempt.over_on = expiry_secs, node

    def broke_down(self, life: SessionLife) -> None:
        if life.row is not None:
            self._processed.pop((life.client_id, life.row.epoch), None)

    def forgotten(self, node: SimNode, client: str) -> None:
        """A machine is dropped: nothing that only it knew may be lost with it."""
        row = self.table.rows.get(client)
        if row is None or row.dead or not row.expiry_secs or self._served.get((client, row.epoch)) is not node:
            return
        processed = self._processed.get((client, row.epoch), 0)
        if processed & ~bits_of(row.cursors):
            self.fail("acknowledged never again", f"{node} forgets {client}, and {processed:b} is not saved")

    def welcomed(self, node: SimNode, life: SessionLife, token: str, present: bool, row: SessionRow) -> None:
        attempt = self.attempts[token]
        if attempt.over_at is not None:
            self.fail("one connection", f"{node} welcomes {token}, whose connection is over")
        if row.epoch <= self.newest.get(life.client_id, 0):
            self.fail("one connection", f"{node} welcomes {token} under epoch {row.epoch}, which is not the newest")
        if attempt.connect.clean_start and (present or row.subscriptions or row.cursors or row.packets):
            self.fail("clean start leaves nothing", f"{token} finds {show_row(row)}")
        if present != (row.born != token):
            self.fail("session present", f"{token} is told {present}, and it began with {row.born}")
        attempt.born = row.born
        self._serves(node, life)

    def resumed(self, node: SimNode, life: SessionLife, token: str) -> None:
        if self.attempts[token].over_at is not None:
            self.fail("one connection", f"{node} resumes {token}, whose connection is over")
        self._serves(node, life)

    def _serves(self, node: SimNode, life: SessionLife) -> None:
        """A node begins to serve this client: nobody else may."""
        client, row = life.client_id, life.row
        assert row is not None
        if (client, row.epoch) in self._released:
            self.fail("one connection", f"{node} serves {client} under epoch {row.epoch}, which was released")
        if row.epoch < self.newest.get(client, 0):
            self.fail("one connection", f"{node} serves {client} under epoch {row.epoch}, and a newer was welcome")
        self._only(node, client)
        self.newest[client] = row.epoch
        self._served[client, row.epoch] = node

    def _only(self, node: SimNode, client: str) -> None:
        for other in self.run.processes:
            hosted = other.hosted.get(client)
            if other is not node and hosted is not None and hosted.life.serves(other.now) and other.life.alive:
                self.fail("one connection", f"{client} is served by {node} and by {other}")

    def said_released(self, node: SimNode, client: str, epoch: int) -> None:
        hosted = node.hosted.get(client)
        row = hosted.life.row if hosted is not None else None
        if hosted is not None and row is not None and row.epoch == epoch and hosted.life.state is State.HERE:
            self.fail("one connection", f"{node} serves {client} under epoch {epoch} and says that it is released")
        self._released.add((client, epoch))

    def refused(self, token: str, reason: int | None, node: SimNode) -> None:
        """In clear weather none is, but for a CONNECT that another one of the same client overtook."""
        self.refusals += 1
        newest = self.run.clients[token.partition(".")[0]].tokens
        overtaken = token != f"{token.partition('.')[0]}.{newest}"
        if self.run.clear and not overtaken and reason != Reason.USE_ANOTHER_SERVER:
            self.fail("a CONNECT succeeds", f"{token} is refused by {node} with {reason}, and nothing is wrong")

    def born_of(self, token: str) -> str:
        return self.attempts[token].born

    # -- what clients see ----------------------------------------------------------------------------------

    def delivered(self, node: SimNode, life: SessionLife, number: int) -> None:
        self.deliveries += 1
        client, row = life.client_id, life.row
        assert row is not None
        if row.epoch != self.newest.get(client):
            self.fail("one connection", f"{node} delivers to {client} under epoch {row.epoch}, which is not the newest")
        self._only(node, client)
        kept = self._processed.get((client, row.epoch), 0) | bits_of(row.cursors)
        stored = self.table.rows.get(client)
        if stored is not None and stored.born == row.born:
            kept |= bits_of(stored.cursors)
        if kept >> number & 1:
            self.fail("acknowledged never again", f"{node} sends {client} number {number}")

    def processed_ack(self, node: SimNode, life: SessionLife, number: int) -> None:
        client, row = life.client_id, life.row
        assert row is not None
        if row.epoch != self.newest.get(client):
            self.fail("one connection", f"{node} hears {client} under epoch {row.epoch}, which is not the newest")
        key = client, row.epoch
        self._processed[key] = self._processed.get(key, 0) | 1 << number

    def client_acks(self, client: str, born: str, number: int) -> None:
        self._acks[client, born] = self._acks.get((client, born), 0) | 1 << number

    def acked(self, client: str, born: str) -> int:
        return self._acks.get((client, born), 0)

    def asks(self, client: str, born: str, filter_text: str) -> None:
        """Until it hears, either may be stored."""
        self._told.get((client, born), {}).pop(filter_text, None)

    def told(self, client: str, born: str, filter_text: str, start: int | None) -> None:
        told = self._told.setdefault((client, born), {})
        if start is None:
            told.pop(filter_text, None)
        else:
            told[filter_text] = start

    def subscription_saved(self, life: SessionLife, filter_text: str, start: int | None) -> None:
        """SUBACK is about to be sent: it must be in the store."""
        row = self.table.rows.get(life.client_id)
        if row is not None and life.row is not None and row.born == life.row.born:
            stored = starts_of(row.subscriptions).get(filter_text)
            if stored != start and life.row.epoch == row.epoch:
                self.fail("SUBACK is durable", f"{life.client_id} {filter_text} from {start}, stored is {stored}")

    # -- commits -------------------------------------------------------------------------------------------

    def committed(self, node: SimNode, old: SessionRow | None, new: SessionRow, write: RowWrite) -> None:
        self.commits += 1
        if self.world.trace is not None:
            self.world.tell("store", f"of {node}: {show_row(old)} becomes {show_row(new)}")
        connects = write.take and new.lease is not None and (old is None or old.connect != new.connect)
        continues = old is not None and old.born == new.born and not new.dead
        if old is None and not connects:
            self.fail("deleted stays deleted", f"{node} inserts {show_row(new)}, and is no CONNECT")
        if new.born in self.ended and not new.dead:
            self.fail("deleted stays deleted", f"{node} writes {show_row(new)}")
        if old is not None:
            self._check_who(node, old, new, write)
            self._check_filters(old, new, write)
            if not continues and not old.dead:
                self._check_end(old, new, connects)
            if connects and continues:
                self._check_in_time(node, old, new)
            if continues:
                self._check_content(node, old, new)
            self._check_wills(node, old, new, write, connects, continues)
        if connects and not continues and (new.subscriptions or new.cursors or new.packets):
            self.fail("clean start leaves nothing", f"{node} begins {show_row(new)} with something in it")
        if not new.dead and new.lease is None and old is not None and old.lease is not None:
            self._check_away(node, old, new, write)
        if new.dead and (new.subscriptions or new.cursors or new.packets or new.will or new.lease is not None):
            self.fail("deleted stays deleted", f"{node} leaves something in {show_row(new)}")
        if new.lease is not None and (new.due is not None or new.left_at is not None or new.will_due is not None):
            self.fail("due only while away", show_row(new))

    def _check_who(self, node: SimNode, old: SessionRow, new: SessionRow, write: RowWrite) -> None:
        if not write.take:
            if new.epoch != old.epoch or new.seq != old.seq + 1 or old.lease not in node.leases:
                self.fail("who may change a row", f"{node} writes {show_row(new)} over {show_row(old)}")
            return
        if old.lease is None or not self.table.lives(old.lease) or old.lease in node.leases:
            return
        if (old.client_id, old.epoch) not in self._released:
            self.fail("who may change a row", f"{node} takes {show_row(old)} though its owner lives and holds it")
        if old.expiry_secs and self._processed.get((old.client_id, old.epoch), 0) & ~bits_of(old.cursors):
            self.fail("acknowledged never again", f"{show_row(old)} was released before everything was saved")

    def _check_filters(self, old: SessionRow, new: SessionRow, write: RowWrite) -> None:
        had, has = set(starts_of(old.subscriptions)), set(starts_of(new.subscriptions))
        if set(write.subscribed) != has - had or set(write.unsubscribed) != had - has:
            self.fail("filters are counted", f"{had} -> {has}, said {write.subscribed} {write.unsubscribed}")

    def _check_end(self, old: SessionRow, new: SessionRow, connects: bool) -> None:
        """A session ends: by a clean start, or because its time has come."""
        self.ended.add(old.born)
        if connects and self.attempts[new.connect].connect.clean_start:
            return
        expiry = old.expiry_secs
        left_at = old.left_at
        if old.lease is not None:  # its connection ends with this write: by its owner, a taker or the sweep
            last = self.attempts[old.connect]
            if last.expiry_secs is not None:  # which may be lost with the node that heard it
                expiry = min(expiry, last.expiry_secs) if words_may_be_lost(last) else last.expiry_secs
            left_at = last.over_at if last.over_at is not None else self._lease_end(old)
        assert left_at is not None
        if expiry == NEVER or self.now < left_at + expiry - SLACK:
            self.fail(
                "never lost before its expiry", f"{show_row(old)} left {left_at}, {expiry} s, is ended {self.now}"
            )

    def _lease_end(self, row: SessionRow) -> float:
        assert row.lease is not None
        ends_at = self.table.leases[row.lease]
        if ends_at > self.world.now:
            self.fail("never lost before its expiry", f"{show_row(row)} is connected")
        return EPOCH_OF_TIME + ends_at

    def _check_in_time(self, node: SimNode, old: SessionRow, new: SessionRow) -> None:
        if old.dead:
            self.fail("deleted stays deleted", f"{show_row(new)}")
        attempt = self.attempts[new.connect]
        if attempt.connect.clean_start:
            self.fail("clean start leaves nothing", f"{new.connect} goes on with {show_row(old)}")
        if old.left_at is None:
            last = self.attempts[old.connect]
            expiry = old.expiry_secs
            if last.over_on is node and last.expiry_secs is not None:
                expiry = last.expiry_secs  # elsewhere, these last words may be lost
            if expiry == 0:
                self.fail("gone after its expiry", f"{new.connect} goes on with {show_row(old)}, which ended")
            return
        if old.expiry_secs != NEVER and attempt.arrived_at > old.left_at + old.expiry_secs + SLACK:
            self.fail("gone after its expiry", f"{new.connect} finds {show_row(old)}, which ended long ago")

    def _check_content(self, node: SimNode, old: SessionRow, new: SessionRow) -> None:
        client = new.client_id
        before, after = bits_of(old.cursors), bits_of(new.cursors)
        if before & ~after:
            self.fail("cursors only forward", f"{node} writes {after:b} over {before:b} of {client}")
        if after & ~self._acks.get((client, new.born), 0):
            self.fail("cursors never past what was not acknowledged", f"{node} writes {after:b} for {client}")
        changed = new.lease is None or old.epoch != new.epoch
        if changed and old.lease is not None and old.lease in node.leases and self._served.get((client, old.epoch)):
            processed = self._processed.get((client, old.epoch), 0)
            if processed & ~after and self._served[client, old.epoch] is node:
                self.fail("acknowledged never again", f"{node} lets go of {client} with {after:b}, had {processed:b}")
        if old.lease is None or old.lease not in node.leases:
            kept = old.subscriptions, old.cursors, old.packets
            if kept != (new.subscriptions, new.cursors, new.packets):
                self.fail("whoever takes a row keeps what is in it", f"{node} takes {show_row(old)}")
        stored = starts_of(new.subscriptions)
        for filter_text, start in self._told.get((client, new.born), {}).items():
            if stored.get(filter_text) != start:
                self.fail("SUBACK is durable", f"{client} lacks {filter_text} from {start}: {stored}")

    def _check_away(self, node: SimNode, old: SessionRow, new: SessionRow, write: RowWrite) -> None:
        """A connection's end is written: when it was, and with the last words of the client."""
        last = self.attempts[old.connect]
        assert new.left_at is not None
        if write.take:  # by the sweep
            if not SLACK > new.left_at - self.now > -20:
                self.fail("expiry counts from when the sweep notices", f"{new.left_at} is not {self.now}")
            return
        if last.over_at is None:
            self.fail("one connection", f"{node} writes {old.connect} away, and it is connected")
            return
        if new.expiry_secs != (old.expiry_secs if last.expiry_secs is None else last.expiry_secs):
            self.fail(
                "the last expiry the client gave", f"{old.connect}: {last.expiry_secs}, written {new.expiry_secs}"
            )
        gone_at = last.over_at + self.grace_secs if last.by_node else last.over_at
        if abs(new.left_at - gone_at) > SLACK:
            self.fail("expiry counts from the end", f"{old.connect} ended {last.over_at}, written {new.left_at}")

    # -- wills ---------------------------------------------------------------------------------------------

    def _check_wills(
        self, node: SimNode, old: SessionRow, new: SessionRow, write: RowWrite, connects: bool, continues: bool
    ) -> None:
        will, publish = old.will, write.publish
        if new.will is not None and new.will.payload.decode() in self.published | self.withdrawn:
            self.fail("every will has one fate", f"{node} stores {new.will.payload!r}, which has had its own")
        if publish is not None and (will is None or publish != will):
            self.fail("a will once", f"{node} publishes {publish.payload!r}, which {show_row(old)} does not have")
        if will is None:
            if new.will is not None and not connects:
                self.fail("a will once", f"{node} brings a will back: {show_row(new)}")
            return
        token = will.payload.decode()
        if publish is not None:
            if new.will == will:
                self.fail("a will once", f"{node} publishes {token} and keeps it")
            sweeps = write.take and not connects
            self._check_published(node, old, will, token, ends=not continues, sweeps=sweeps)
        elif new.will != will:
            self._check_withdrawn(node, old, new, will, token, back=connects and continues)

    def _check_published(
        self, node: SimNode, old: SessionRow, will: StoredWill, token: str, *, ends: bool, sweeps: bool
    ) -> None:
        if token in self.published:
            self.fail("a will once", f"{node} publishes {token} again")
        self.published.add(token)
        last = self.attempts[token]
        if last.goodbye and (last.over_on is node and old.lease in node.leases):
            self.fail("no will after a good-bye", f"{node} publishes {token}")
        for one in self.run.processes:
            hosted = one.hosted.get(old.client_id) if one.life.alive else None
            if hosted is not None and hosted.life.token == token and hosted.life.serves(one.now):
                self.fail("no will while connected", f"{node} publishes {token}, which is connected to {one}")
        if ends:
            return  # that the session may end is checked
        due = inf
        if old.lease is None and old.will_due is not None:
            due = old.will_due
        if old.lease is not None and last.over_at is not None:
            due = last.over_at + max(will.delay_secs, self.grace_secs if last.by_node else 0)
        if old.lease is not None and sweeps and not self.table.lives(old.lease):
            due = min(due, self._lease_end(old) + max(self.grace_secs, will.delay_secs))
        if self.now < due - SLACK:
            self.fail("a will when it is due", f"{node} publishes {token} at {self.now}, due {due}")

    def _check_withdrawn(
        self, node: SimNode, old: SessionRow, new: SessionRow, will: StoredWill, token: str, *, back: bool
    ) -> None:
        self.withdrawn.add(token)
        last = self.attempts[token]
        if last.goodbye:
            return
        if not back:
            self.fail("every will has one fate", f"{node} drops {token}: {show_row(old)} becomes {show_row(new)}")
        arrived_at = self.attempts[new.connect].arrived_at
        if old.lease is None:
            assert old.will_due is not None
            if arrived_at > old.will_due + SLACK:
                self.fail(
                    "every will has one fate", f"{token} was due {old.will_due}, and is withdrawn by {new.connect}"
                )
        elif self._served.get((old.client_id, old.epoch)) is node and will.delay_secs == 0 and not last.by_node:
            self.fail("every will has one fate", f"{token} has no delay, and is withdrawn by {new.connect}")

    # -- in the end ----------------------------------------------------------------------------------------

    def check_away_wills(self) -> None:
        for row in self.table.rows.values():
            if row.will is not None or not row.dead:
                self.fail("gone after its expiry", f"left in the store: {show_row(row)} due {row.due} at {self.now}")


def words_may_be_lost(last: Attempt) -> bool:
    """The node that heard the last words has died since."""
    return last.over_on is not None and not last.over_on.life.alive
