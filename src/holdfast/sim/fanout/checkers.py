"""What fan-out promises, looked at whenever something moves; each of these can fail.

The store is looked at after every transaction, the wire with every packet, and everything again at the end.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import inf
from typing import TYPE_CHECKING, Any, NamedTuple

from holdfast.fanout import control as fc
from holdfast.fanout import dispatcher as fd
from holdfast.fanout.history import Ended
from holdfast.fanout.nouns import Campaign, End, InFlight, State, lane_of, seq_of, ticket_of
from holdfast.fanout.requests import options_of
from holdfast.fanout.table import Added, NewBatch
from holdfast.sim.checkers import Violation
from holdfast.sim.fanout.faults import SLOW_SECONDS
from holdfast.sim.fanout.store import EPOCH_OF_TIME, SimTable
from holdfast.store.fanout_changes import PLACE_OF_END, FlightRow, Moves, WaitingRow, sent_of
from holdfast.store.fanout_intake import unpack_ids

if TYPE_CHECKING:
    from holdfast.sim.fanout.node import Link, SimNode
    from holdfast.sim.fanout.vehicles import SimVehicle
    from holdfast.sim.fanout.workload import FanoutWorkload

Delivery = tuple[str, int]
"""VIN and place."""
SLOW_MARGIN, MARGIN = 2 * SLOW_SECONDS + 0.2, 1.0
"""A look-up may be so old when what it led to is committed, beside what its own time says."""
HALT_SECONDS = 1.0


class LastSend(NamedTuple):
    """How a delivery last went out."""

    client_id: str
    born: str
    link: Any
    packet_id: int
    attempts: int


class Truth:
    def __init__(self, run: FanoutWorkload, table: SimTable):
        self.run, self.world, self.table = run, run.world, table
        self.deliveries = 0
        self.asked: dict[tuple[int, str], bool] = {}
        """Campaign and VIN: must it become a target?"""
        self.expires: dict[int, float] = {}
        """By seq."""
        self.replacing: dict[tuple[str, str], int] = {}
        """Request id and VIN: the newest campaign that asked for it."""
        self.log: dict[Delivery, Ended] = {}
        self.final: dict[tuple[int, str], Ended] = {}
        self.cancelled: set[Delivery] = set()
        """By an operator, one by one."""
        self.damaged: set[int] = set()
        self.answers: dict[Delivery, set[int]] = {}
        self.results: set[tuple[str, int, bool]] = set()
        self.newest: dict[str, int] = {}
        """Epoch of the latest session of each vehicle."""
        self.ids: dict[Delivery, list[tuple[str, str, int]]] = {}
        """Sessions and packet ids under which it was recorded in flight."""
        self.sends: dict[Delivery, LastSend] = {}
        self.done: set[Delivery] = set()
        """Answered by its vehicle since it was last sent."""
        self.opened: dict[int, float] = {}
        """When a campaign was last allowed to send (more)."""
        self.since: dict[Delivery, float] = {}
        """Since when it waits."""
        self.halted: dict[int, float] = {}
        """When an operator was told that it sends no more."""
        self.begun: dict[int, list[tuple[float, int]]] = {}
        """By campaign: when something began, and its size."""
        self.refused_at: dict[Delivery, float] = {}
        """When the vehicle has said no to its last attempt."""
        self.edited: set[int] = set()
        self._superseded: list[tuple[Ended, str, str]] = []
        """In the transaction that is under way: what replaces them is known after it."""

    def fail(self, what: str) -> None:
        raise Violation(f"at {self.world.now:.3f}: {what}")

    # -- requests ------------------------------------------------------------------------------------------

    def added(
        self, batches: Sequence[NewBatch], answers: Sequence[Added | Exception], staged: Mapping[str, list[str]]
    ) -> None:
        for batch, answer in zip(batches, answers, strict=True):
            if isinstance(answer, Exception) or answer.repeated:
                continue
            campaign = self.table.rows.campaigns[answer.campaign]
            self.opened.setdefault(campaign.id, self.world.now)
            if answer.seq in self.expires:
                self.fail(f"seq {answer.seq} was given twice")
            self.expires[answer.seq] = batch.expires
            ids = batch.ids if batch.upload is None else staged[batch.upload]
            if answer.accepted != len(ids):
                self.fail(f"{len(ids)} VINs were given, {answer.accepted} accepted")
            for vin in ids:
                must = batch.resend != "ignore"
                self.asked[campaign.id, vin] = self.asked.get((campaign.id, vin), False) or must
                if batch.resend == "replace" or campaign.replaces:
                    key = (batch.request_id, vin)
                    self.replacing[key] = max(self.replacing.get(key, 0), campaign.id)
        self.look_at_counts()

    def retried(self, campaign: int, vins: Sequence[str]) -> None:
        for vin in vins:
            if (ended := self.final.pop((campaign, vin), None)) is None or ended.end is End.ACKED:
                self.fail(f"{vin} was to be tried again in campaign {campaign}, and it was not over, or was acked")
        self.look_at_counts()

    def ordered(self, campaign: int, event: fc.Event) -> None:
        """An operator was told that it is done."""
        match event:
            case fc.Pause() | fc.Cancel():
                now = self.table.rows.campaigns.get(campaign)
                if now is not None and not now.sending:
                    self.halted[campaign] = self.world.now

    def campaign_changed(self, before: Campaign, after: Campaign) -> None:
        now = self.world.now
        if after.sending and (not before.sending or before.cut != after.cut):
            self.opened[after.id] = now
        if (before.rate_per_sec, before.bytes_per_sec) != (after.rate_per_sec, after.bytes_per_sec):
            self.edited.add(after.id)
        if after.sending:
            self.halted.pop(after.id, None)
        if after.state is State.CLOSED and any(self.table.rows.counts[after.id][:3]):
            self.fail(f"campaign {after.id} was closed with deliveries under way")
        over = before.state in (State.CLOSED, State.CANCELLED)
        if over and after.state is not before.state and after.state is not State.CLOSED:
            self.fail(f"campaign {after.id} was {before.state}, and is {after.state}")
        if after.sending and after.state is not State.RUNNING:
            self.fail(f"campaign {after.id} is {after.state} and sends")
        self._look_at_wave(before, after)

    def _look_at_wave(self, before: Campaign, after: Campaign) -> None:
        old, new = fc.memory_of(before), fc.memory_of(after)
        if not after.waved or new.wave == old.wave:
            return
        if new.wave != old.wave + 1 or not old.cuts:
            self.fail(f"campaign {after.id} went from wave {old.wave} to {new.wave}")
        if old.advance:
            return
        wave = options_of(after).waves[old.wave] if new.options is None else new.options.waves[old.wave]
        vins = [vin for (id_, vin) in self.asked if id_ == after.id and ticket_of(after.id, vin) <= old.cuts[old.wave]]
        # Whoever has ended before its wave came counts as well: nobody counts by wave.
        ended = [one for (id_, _), one in self.final.items() if id_ == after.id]
        acked = sum(one.end is End.ACKED for one in ended)
        missed = 100 * acked < wave.acked_percent * min(len(ended), len(vins))
        if old.wave == 0 and not self.run.retries and missed:
            self.fail(f"campaign {after.id}: {acked} of {len(ended)} acked, and the next wave began")
        size = min(len(vins), old.sizes[old.wave])  # later batches may have brought more
        if old.wave == 0 and not self.run.retries and len(ended) < min(wave.min_ended or size, size):
            self.fail(f"campaign {after.id}: {len(ended)} of {size} have ended, and the next wave began")

    # -- what moves ----------------------------------------------------------------------------------------

    def moves(self, moves: Moves) -> None:
        """Before they are made."""
        rows, now = self.table.rows, self.world.now
        for ended in moves.ended:
            self._ended(ended)
        for vin, flight in moves.flights.items():
            before = rows.flights.get(vin)
            if before is not None and vin not in moves.flights_gone:
                self.fail(f"{vin}: two in flight")
            sent = sent_of(flight.sent)
            self.ids.setdefault((vin, flight.place), []).append(sent)
            session = self.table.people.rows.get(sent.client_id)
            if session is None or session.epoch != flight.epoch:
                self.fail(f"{vin} #{flight.place & 0xFFFF} goes to a session that has another epoch")
            if before is None or before.place != flight.place:
                row = rows.waiting.get(vin, {}).get(flight.place)
                if row is None:
                    self.fail(f"{vin}: something began that did not wait")
                else:
                    self._began(flight, row, moves)
        for key in moves.waiting:
            self.since[key] = now

    def look_at_counts(self) -> None:
        """After every transaction."""
        rows = self.table.rows
        for ended, request_id, told in self._superseded:
            if self.replacing.get((request_id, ended.vin), 0) <= ended.campaign:
                self.fail(f"{told} is superseded by nothing")
        self._superseded.clear()
        expected = {id_: [0] * (3 + len(PLACE_OF_END)) for id_ in rows.counts}
        for flight in rows.flights.values():
            expected[flight.campaign][1] += 1
        for vin, waiting in rows.waiting.items():
            for row in waiting.values():
                expected[row.campaign][0] += 1
                if vin in rows.flights and rows.flights[vin].place == row.place:
                    self.fail(f"{vin} #{row.place & 0xFFFF} waits and is in flight")
        for one in rows.awaiting.values():
            expected[one.campaign][2] += 1
        run, after = rows.run
        for part in rows.parts.values():
            if not part.merged:
                ids = unpack_ids(rows.ids[part.body])  # type: ignore[index]
                expected[part.campaign][0] += sum(1 for vin in ids if part.number not in run or vin > after)
        for (id_, _), ended in self.final.items():
            if id_ in expected:
                expected[id_][PLACE_OF_END[ended.end]] += 1
        for id_, counts in expected.items():
            if rows.counts[id_] != counts:
                self.fail(f"campaign {id_}: counted {rows.counts[id_]}, there are {counts}")

    def _ended(self, ended: Ended) -> None:
        key, target = (ended.vin, ended.place), (ended.campaign, ended.vin)
        told = f"{ended.vin} #{ended.place & 0xFFFF} of campaign {ended.campaign}"
        self.world.tell("store", f"{told} ends: {ended.end} {ended.reason}")
        self.deliveries += 1
        if key in self.log:
            self.fail(f"{told} has ended as {self.log[key].end} and ends again as {ended.end}")
        if target in self.final:
            self.fail(f"{told}: the vehicle's target has ended as {self.final[target].end} already")
        if target not in self.asked:
            self.fail(f"{told} was never asked for")
        self.log[key] = self.final[target] = ended
        campaign = self.table.rows.campaigns[ended.campaign]
        reasons = self.answers.get(key, set())
        match ended.end:
            case End.ACKED:
                said = (*key, True) in self.results
                if not said and (campaign.awaits_result or not any(reason < 0x80 for reason in reasons)):
                    self.fail(f"{told} is acked, and no vehicle said so")
            case End.EXPIRED:
                due = self.expires.get(seq_of(ended.place), inf) <= self.table.now()
                if not due and fc.memory_of(campaign).ends_as != "expired":
                    self.fail(f"{told} is expired before its time")
            case End.CANCELLED:
                if campaign.state not in (State.CANCELLED, State.CLOSED) and key not in self.cancelled:
                    self.fail(f"{told} is cancelled, and nobody wanted that")
            case End.SUPERSEDED:
                self._superseded.append((ended, campaign.request_id, told))
            case End.FAILED:
                self._failed(ended, told, campaign, reasons)

    def _failed(self, ended: Ended, told: str, campaign: Campaign, reasons: set[int]) -> None:
        attempts_max = self.run.settings.attempts_max
        match ended.reason:
            case "payload missing":
                fair = self.table.rows.batches[seq_of(ended.place)].payload in self.damaged
            case "packet too large":
                fair = any(v.vin == ended.vin and v.packet_bytes_max < 1000 for v in self.run.vehicles)
            case "no answer":
                fair = self.run.settings.ack_secs > 0 and ended.attempts + 1 >= attempts_max
            case "no result in time":
                fair = campaign.awaits_result
            case "result: failed":
                fair = (ended.vin, ended.place, False) in self.results
            case _:
                final = [reason for reason in reasons if reason in fd.FINAL_REASONS]
                fair = bool(final) or (any(r >= 0x80 for r in reasons) and ended.attempts + 1 >= attempts_max)
        if not fair:
            self.fail(f"{told} has failed without a cause: {ended.reason}, answers {sorted(reasons)}")

    # -- what begins ---------------------------------------------------------------------------------------

    def _began(self, flight: FlightRow, row: WaitingRow, moves: Moves) -> None:
        rows, now = self.table.rows, self.world.now
        campaign = rows.campaigns[flight.campaign]
        told = f"{flight.vin} #{flight.place & 0xFFFF} of campaign {campaign.id}"
        self.world.tell("store", f"{told} begins in epoch {flight.epoch} from {flight.node}")
        if (flight.vin, flight.place) in self.log:
            self.fail(f"{told} begins after its end")
        if not campaign.sending:
            self.fail(f"{told} begins, and its campaign is not sending")
        ticket = ticket_of(campaign.id, flight.vin)
        if campaign.waved and (campaign.cut is None or ticket > campaign.cut):
            self.fail(f"{told} begins, and its wave has not come")
        if (attempts := row.attempts) != flight.attempts:
            self.fail(f"{told} begins with {flight.attempts} attempts, it had {attempts}")
        if row.not_before > self.table.now():
            self.fail(f"{told} begins before its back-off is over")
        last, refused_at = self.sends.get((flight.vin, flight.place)), self.refused_at.get((flight.vin, flight.place))
        anew = refused_at is not None and last is not None and flight.attempts > last.attempts
        anew = anew and not self.run.settings.ack_secs  # it may have been counted as overdue before it was refused
        if anew and refused_at is not None and now - refused_at < self.run.settings.backoff_secs:
            self.fail(f"{told} begins {now - refused_at:.3f} s after it was refused")
        self._look_at_limits(campaign, flight, moves, told)
        self._look_at_order(flight, row, told)

    def _look_at_limits(self, campaign: Campaign, flight: FlightRow, moves: Moves, told: str) -> None:
        rows, now = self.table.rows, self.world.now
        size = next((len(p.data) for p in rows.payloads.values() if p.number == flight.payload), 0)
        begun = self.begun.setdefault(campaign.id, [])
        begun.append((now, size))
        left = [one for vin, one in rows.flights.items() if vin not in moves.flights_gone]
        in_flight = sum(1 for one in [*left, *moves.flights.values()] if one.campaign == campaign.id)
        if campaign.in_flight_max is not None and in_flight > campaign.in_flight_max:
            self.fail(f"{told}: {in_flight} are in flight, allowed are {campaign.in_flight_max}")
        if campaign.id in self.edited or options_of(campaign).ramp_secs is not None:
            return
        for at, (first, _) in enumerate(begun):
            number, seconds = len(begun) - at, now - first
            rate, bytes_rate = campaign.rate_per_sec, campaign.bytes_per_sec
            if rate is not None and number > rate * seconds + max(rate, 1.0) + 1e-6:
                self.fail(f"{told}: {number} began within {seconds:.3f} s, at {rate} a second")
            if bytes_rate is not None:
                sent = sum(size for _, size in begun[at:-1])
                if sent > bytes_rate * seconds + max(bytes_rate, 1.0) + size:
                    self.fail(f"{told}: {sent} bytes began within {seconds:.3f} s, at {bytes_rate} a second")

    def _look_at_order(self, flight: FlightRow, row: WaitingRow, told: str) -> None:
        """Nothing that could have gone waits before it."""
        rows, now = self.table.rows, self.table.now()
        margin = SLOW_MARGIN if self.run.faults.store_slow or self.run.faults.store_late else MARGIN
        looked = min(flight.sent_at, now) - margin - EPOCH_OF_TIME
        sent = sent_of(flight.sent)
        if row.sent is not None and sent_of(row.sent)[:2] == sent[:2]:
            return  # its session may have it: it goes first
        vehicle = next(v for v in self.run.vehicles if v.client_id == sent.client_id)
        link = vehicle.link
        for place, other in rows.waiting.get(flight.vin, {}).items():
            campaign = rows.campaigns[other.campaign]
            batch = rows.batches[seq_of(place)]
            limited = (campaign.rate_per_sec, campaign.bytes_per_sec, campaign.in_flight_max) != (None, None, None)
            if place >= flight.place or limited or not campaign.sending or batch.payload in self.damaged:
                continue
            if campaign.waved and (campaign.cut is None or (other.ticket or 0) > campaign.cut):
                continue
            if self.since.get((flight.vin, place), 0.0) > looked or self.opened.get(campaign.id, 0.0) > looked:
                continue
            if batch.expires <= now or other.sent is not None or vehicle.packet_bytes_max < 1000:
                continue
            if link is None or link.filters.get(vehicle.every) != 1 or self.run.shares.get(flight.vin, 0) > 1:
                continue
            if vehicle.changed_at > looked:
                continue
            if other.not_before > flight.sent_at - margin and lane_of(place) != lane_of(flight.place):
                continue
            before = [
                row for at, row in rows.waiting[flight.vin].items() if at < place and lane_of(at) == lane_of(place)
            ]
            if any(row.not_before > flight.sent_at - margin or row.sent is not None for row in before):
                continue  # its lane was blocked, or what the session may have was to go first
            self.fail(f"{told} begins, and #{place & 0xFFFF} waits before it")

    # -- the wire ------------------------------------------------------------------------------------------

    def taken(self, client_id: str, epoch: int) -> None:
        vin = self.run.vin_of(client_id)
        self.newest[vin] = epoch

    def sent(self, node: SimNode, link: Link, effect: fd.Publish, packet_id: int, dup: bool) -> None:
        flight, vin = effect.flight, effect.vehicle.vin
        key = (vin, flight.place)
        told = f"{vin} #{flight.place & 0xFFFF} of campaign {flight.campaign} to {link.client_id} as {packet_id}"
        last = self.sends.get(key)
        live = link.client_up and link.node_up and link.vehicle.link is link
        if live and link.epoch == self.newest.get(vin):
            self._look_at_wire(link, flight, told)
        if live and link.epoch == self.newest.get(vin):
            row = self.table.rows.flights.get(vin)
            resulted = (*key, True) in self.results or (*key, False) in self.results
            if row is None or (row.place, row.epoch) != (flight.place, flight.epoch):
                if not resulted:  # whose result has ended it while the answer of the store was on its way
                    self.fail(f"{told} is sent, and is not in flight")
            elif sent_of(row.sent).packet_id != packet_id:
                self.fail(f"{told} is sent, and recorded under {sent_of(row.sent).packet_id}")
        if effect.vehicle.epoch != link.epoch:
            self.fail(f"{told} was meant for epoch {effect.vehicle.epoch}, the session has {link.epoch}")
        session = (link.client_id, link.born, packet_id)
        if dup and (not link.born or self.ids.get(key, []).count(session) < 2):
            self.fail(f"{told} is a DUP, and was never sent in that session under that id")
        once = self.run.shares[vin] == 1 and not link.thawed
        if dup and once and last is not None and last.link is link and last.packet_id == packet_id:
            self.fail(f"{told} is sent twice as the same packet on a live connection")
        # As it was recorded last, if that was in this session; a dispatcher that is replaced forgets what it has begun.
        before = self.ids[key][-2:][0]
        again = live and last is not None and last.link is not link and link.born != "" and before[:2] == last[:2]
        if again and last is not None and last[:2] == session[:2] and not self.run.faults.breakdown:
            # One that was begun without an answer, and then not wanted for a while, is sent as a new packet.
            fresh = key in self.done or last.attempts != flight.attempts or link.left_out
            if not fresh and (not dup or packet_id != before[2]):
                self.fail(f"{told}{' DUP' if dup else ''}: its session has it as {before[2]}, not answered")
        halted = self.halted.get(flight.campaign)
        if halted is not None and self.run.faults.clear and self.world.now - halted > HALT_SECONDS:
            self.fail(f"{told} is sent {self.world.now - halted:.3f} s after its campaign was halted")
        self.sends[key] = LastSend(link.client_id, link.born, link, packet_id, flight.attempts)
        self.done.discard(key)
        self.refused_at.pop(key, None)
        link.unanswered.add(flight.place)

    def _look_at_wire(self, link: Link, flight: InFlight, told: str) -> None:
        if self.run.settings.ack_secs:
            return
        # What was acked by another session of the vehicle, or by its result, is over.
        ended = {place for place in link.unanswered if self._was_acked((flight.vin, place))}
        others = link.unanswered - {flight.place} - ended
        if others:
            self.fail(f"{told} is sent, and #{min(others) & 0xFFFF} is not answered")

    def _was_acked(self, key: Delivery) -> bool:
        return key in self.log and self.log[key].end is End.ACKED

    def answered(self, vehicle: SimVehicle, place: int, reason: int) -> None:
        self.answers.setdefault((vehicle.vin, place), set()).add(reason)
        if reason >= 0x80:
            self.refused_at.setdefault((vehicle.vin, place), self.world.now)
        self._is_done(vehicle.vin, place)

    def resulted(self, vin: str, place: int, good: bool) -> None:
        """The vehicle says how it went: that is an answer, too."""
        self.results.add((vin, place, good))
        self._is_done(vin, place)

    def _is_done(self, vin: str, place: int) -> None:
        self.done.add((vin, place))
        for other in self.run.vehicles:  # of two sessions of a vehicle, the answer of either settles it
            if other.vin == vin and other.link is not None:
                other.link.unanswered.discard(place)

    # -- payloads ------------------------------------------------------------------------------------------

    def collected(self, gone: Sequence[Any], before: float) -> None:
        rows = self.table.rows
        used = {row.payload for row in rows.batches.values()}
        used |= {row.payload for row in rows.flights.values()} | {row.payload for row in rows.awaiting.values()}
        for payload in gone:
            if payload.number in used:
                self.fail(f"payload {payload.number} was removed, and is still referred to")
            if payload.touched_at > self.table.now() - self.run.payload_seconds:
                self.fail(
                    f"payload {payload.number} was removed {self.table.now() - payload.touched_at:.1f} s after it came"
                )
        for vin, waiting in rows.waiting.items():
            for row in waiting.values():
                if seq_of(row.place) not in rows.batches or row.campaign not in rows.campaigns:
                    self.fail(f"{vin} #{row.place & 0xFFFF} waits, and its batch or campaign was removed")
        self.look_at_counts()

    # -- the end -------------------------------------------------------------------------------------------

    def look_at_end(self) -> None:
        """Everything has ended, and was counted."""
        rows = self.table.rows
        self.look_at_counts()
        for (id_, vin), must in self.asked.items():
            if must and (id_, vin) not in self.final:
                campaign = rows.campaigns.get(id_)
                state = "gone" if campaign is None else f"{campaign.state}, sending {campaign.sending}"
                left = [row.place & 0xFFFF for row in rows.waiting.get(vin, {}).values() if row.campaign == id_]
                flight = rows.flights.get(vin)
                self.fail(f"{vin} in campaign {id_} ({state}) has no end: waits {left}, in flight {flight}")

    def look_at_leftovers(self) -> None:
        """Long after everything was closed."""
        rows = self.table.rows
        for what, left in (
            ("campaigns", rows.campaigns),
            ("payloads", rows.payloads),
            ("batches", rows.batches),
            ("parts", rows.parts),
            ("lists of VINs", rows.ids),
            ("uploads", rows.staged),
            ("keys", rows.keys),
            ("waiting", rows.waiting),
            ("in flight", rows.flights),
            ("ended", rows.ended),
        ):
            if left:
                self.fail(f"{what} are left over: {list(left)[:5]}")
