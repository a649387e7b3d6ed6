"""Fan-out in this process's memory, under the lock of the log that takes what has ended."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Collection, Iterable, Sequence
from math import inf

import msgspec

from holdfast.errors import RequestError
from holdfast.fanout.history import batch_of
from holdfast.fanout.nouns import (
    DELIVERIES,
    Awaiting,
    Campaign,
    Counts,
    End,
    InFlight,
    State,
    UnderWay,
    Waiting,
    lane_of,
    place_of,
    seq_of,
    ticket_of,
)
from holdfast.fanout.table import (
    Added,
    Change,
    EndedRow,
    Found,
    Merged,
    MergeStep,
    NewBatch,
    Part,
    StoredPayload,
    Verdict,
)
from holdfast.log.contract import Landed
from holdfast.log.log import Log, Prepared
from holdfast.store.fanout_changes import (
    COUNTS,
    PLACE_OF_END,
    WAITING,
    Bucket,
    FlightRow,
    Key,
    Limits,
    Loaded,
    MergedPart,
    Moves,
    Overlap,
    WaitingRow,
    check_changes,
    counts_of,
    decide,
    in_flight_of,
    merge,
    waiting_of,
    wanted,
)
from holdfast.store.fanout_intake import (
    BatchRow,
    Known,
    PartRow,
    Plan,
    check_part,
    check_retry,
    pack_ids,
    plan,
    prepare,
    retried,
    unpack_ids,
)
from holdfast.store.memory.log import MemoryLog
from holdfast.store.memory.sessions import SessionState

VEHICLE_MAX = 1_000


class _Payload(msgspec.Struct):
    number: int
    sha256: bytes
    data: bytes
    touched_at: float


class FanoutState:
    """The rows themselves; several `MemoryFanoutTable` share one, as processes share a database."""

    def __init__(self) -> None:
        self.payloads: dict[bytes, _Payload] = {}
        self.campaigns: dict[int, Campaign] = {}
        self.closed_at: dict[int, float] = {}
        self.numbers: dict[str, int] = {}
        self.batches: dict[int, BatchRow] = {}
        self.ids: dict[int, bytes] = {}
        self.staged: dict[str, list[tuple[int, int, float]]] = {}
        self.parts: dict[int, PartRow] = {}
        self.run: tuple[tuple[int, ...], str] = ((), "")
        self.waiting: dict[str, dict[int, WaitingRow]] = {}
        self.flights: dict[str, FlightRow] = {}
        self.awaiting: dict[Key, Awaiting] = {}
        self.ended: dict[int, dict[str, EndedRow]] = {}
        self.counts: dict[int, list[int]] = {}
        self.repeated: dict[int, int] = {}
        self.buckets: dict[int, Bucket] = {}
        self.keys: dict[str, tuple[bytes, Added, float]] = {}
        self.last_payload = self.last_ids = self.last_seq = self.last_part = self.last_campaign = self.last_merged = 0
        self.keeper = ("", 0, 0.0)


class MemoryFanoutTable:
    def __init__(self, state: FanoutState, sessions: SessionState, backend: MemoryLog, log: Log):
        self._state, self._sessions, self._backend, self._log = state, sessions, backend, log

    def now(self) -> float:
        return time.time()

    # -- payloads --------------------------------------------------------------------------------------------

    def put_payload(self, data: bytes) -> bytes:
        state, sha1, sha256 = self._state, hashlib.sha1(data).digest(), hashlib.sha256(data).digest()
        with self._backend.lock:
            found = state.payloads.get(sha1)
            if found is None:
                state.last_payload += 1
                state.payloads[sha1] = _Payload(state.last_payload, sha256, data, self.now())
            elif found.sha256 != sha256:
                raise RequestError(f"another payload is stored under {sha1.hex()}")
            else:
                found.touched_at, found.data = self.now(), data
        return sha1

    def payloads(self, numbers: Collection[int]) -> dict[int, StoredPayload]:
        with self._backend.lock:
            return {
                found.number: StoredPayload(found.number, sha1, found.data)
                for sha1, found in self._state.payloads.items()
                if found.number in numbers and hashlib.sha1(found.data).digest() == sha1
            }

    def payload_number(self, sha1: bytes) -> int | None:
        with self._backend.lock:
            found = self._state.payloads.get(sha1)
            return None if found is None else found.number

    # -- intake ----------------------------------------------------------------------------------------------

    def stage(self, upload: str, ids: Sequence[str]) -> None:
        check_part(upload, ids)
        with self._backend.lock:
            at = self._keep_ids(pack_ids(ids))
            self._state.staged.setdefault(upload, []).append((at, len(ids), self.now()))

    def drop_uploads(self, before: float, limit: int) -> int:
        state = self._state
        with self._backend.lock:
            old = [(upload, row) for upload, rows in state.staged.items() for row in rows if row[2] < before][:limit]
            for upload, row in old:
                state.staged[upload].remove(row)
                del state.ids[row[0]]
                if not state.staged[upload]:
                    del state.staged[upload]
            return len(old)

    def add(self, batches: Sequence[NewBatch]) -> list[Added | Exception]:
        prepared = [prepare(batch) for batch in batches]
        with self._backend.lock:
            state = self._state
            known = Known(self.now())
            known.payloads = {sha1: found.number for sha1, found in state.payloads.items()}
            known.campaigns = dict(state.campaigns)
            known.numbers = dict(state.numbers)
            known.keys = {key: found[:2] for key, found in state.keys.items()}
            known.staged = {upload: [row[:2] for row in rows] for upload, rows in state.staged.items()}
            known.unmerged = {
                (lane_of(state.batches[part.seq].place), state.campaigns[part.campaign].request_id)
                for part in state.parts.values()
                if not part.merged
            }
            known.seq, known.part, known.campaign = state.last_seq, state.last_part, state.last_campaign
            known.merged = state.last_merged
            made = plan(prepared, known)
            moves = Moves(known.now)
            for campaign, number in made.counts.items():
                moves.count(campaign, None, WAITING, number)
            merge(made.rows, made.merged, self._overlap({vin for vin, _ in made.rows}), moves)
            ends = self._append(moves)
            self._take_in(made)
            self._apply(moves)
        self._landed(ends)
        return made.answers

    def _take_in(self, made: Plan) -> None:
        state, known = self._state, made.known
        state.last_seq, state.last_part, state.last_campaign = known.seq, known.part, known.campaign
        state.last_merged = known.merged
        state.campaigns.update(made.begun)
        state.campaigns.update(made.changed)
        state.numbers.update(made.numbers)
        numbers = {row.payload for row in made.batches}
        for payload in state.payloads.values():
            if payload.number in numbers:
                payload.touched_at = known.now
        state.batches.update((row.seq, row) for row in made.batches)
        for part in made.parts:
            body = part.body if isinstance(part.body, int) else self._keep_ids(part.body)
            state.parts[part.number] = part._replace(body=body)
        for upload in made.uploads:
            del state.staged[upload]
        state.keys.update((key, (*found, known.now)) for key, found in made.keys.items())

    def _keep_ids(self, packed: bytes) -> int:
        self._state.last_ids += 1
        self._state.ids[self._state.last_ids] = packed
        return self._state.last_ids

    # -- merging ---------------------------------------------------------------------------------------------

    def unmerged(self, ids_max: int) -> tuple[list[Part], str]:
        with self._backend.lock:
            numbers, after = self._state.run
            if numbers:
                return [self._part(self._state.parts[number]) for number in numbers], after
            found: list[Part] = []
            total = 0
            for part in self._state.parts.values():
                if not part.merged:
                    total += part.size
                    if found and total > ids_max:
                        break
                    found.append(self._part(part))
            return found, ""

    def unmerged_of(self, campaign: int) -> int:
        with self._backend.lock:
            parts = self._state.parts.values()
            return sum(part.size for part in parts if part.campaign == campaign and not part.merged)

    def merge_step(self, step: MergeStep) -> Merged | None:
        with self._backend.lock:
            state = self._state
            parts = [state.parts[number] for number in step.parts if number in state.parts]
            run = state.run if state.run[0] else (step.parts, "")
            if (
                not parts
                or run != (step.parts, step.after)
                or len(parts) < len(step.parts)
                or any(part.merged for part in parts)
            ):
                return None
            moves = Moves(self.now())
            merged = {part.number: self._merged_part(part) for part in parts}
            done = merge(step.rows, merged, self._overlap({vin for vin, _ in step.rows}), moves)
            ends = self._append(moves)
            self._apply(moves)
            state.run = ((), "") if step.done else (step.parts, step.last)
            for part in sorted(parts) if step.done else ():
                state.last_merged += 1
                state.parts[part.number] = part._replace(merged=state.last_merged)
        self._landed(ends)
        return done

    def _merged_part(self, part: PartRow) -> MergedPart:
        batch, campaign = self._state.batches[part.seq], self._state.campaigns[part.campaign]
        return MergedPart(batch.place, campaign.id, campaign.request_id, batch.resend, campaign.waved, campaign.state)

    def _overlap(self, vins: Iterable[str]) -> Overlap:
        state = self._state
        targets: set[tuple[str, int]] = set()
        waiting: dict[str, list[WaitingRow]] = {}
        wanted_vins = set(vins)
        for vin in wanted_vins:
            rows = list(state.waiting.get(vin, {}).values())
            waiting[vin] = rows
            targets.update((vin, row.campaign) for row in rows)
            if vin in state.flights:
                targets.add((vin, state.flights[vin].campaign))
            targets.update((vin, campaign) for campaign, ended in state.ended.items() if vin in ended)
        targets.update((vin, row.campaign) for (vin, _), row in state.awaiting.items() if vin in wanted_vins)
        return Overlap(targets, waiting, {id_: campaign.request_id for id_, campaign in state.campaigns.items()})

    # -- what moves ------------------------------------------------------------------------------------------

    def _append(self, moves: Moves) -> tuple[Prepared, list[Landed]] | None:
        """Before anything is changed: what cannot be appended changes nothing."""
        if not moves.ended:
            return None
        batch = batch_of(moves.ended, self._log.clock())
        while True:
            made = self._log.prepare(DELIVERIES, batch)
            outcome = self._backend.append(
                DELIVERIES, made.generation, made.blocks, sorted(made.topics), {}, None, made.now
            )
            if outcome is not None:
                return made, outcome[0]
            self._log.sealed(DELIVERIES)

    def _landed(self, ends: tuple[Prepared, list[Landed]] | None) -> None:
        if ends is not None:
            self._log.landed(*ends)

    def _apply(self, moves: Moves) -> None:
        state = self._state
        for vin, place in moves.waiting_gone:
            del state.waiting[vin][place]
            if not state.waiting[vin]:
                del state.waiting[vin]
        for vin in moves.flights_gone:
            del state.flights[vin]
        for key in moves.awaiting_gone:
            del state.awaiting[key]
        for row in moves.waiting.values():
            state.waiting.setdefault(row.vin, {})[row.place] = row
        state.flights.update(moves.flights)
        state.awaiting.update(moves.awaiting)
        for end in moves.ended:
            row_ = EndedRow(end.vin, end.place, end.end, end.reason, moves.now)
            state.ended.setdefault(end.campaign, {})[end.vin] = row_
        for campaign, deltas in moves.counts.items():
            before = state.counts.get(campaign, [0] * COUNTS)
            state.counts[campaign] = [old + delta for old, delta in zip(before, deltas, strict=True)]
        for campaign, number in moves.repeated.items():
            state.repeated[campaign] = state.repeated.get(campaign, 0) + number
        state.buckets.update(moves.buckets)

    # -- dispatch --------------------------------------------------------------------------------------------

    def look_up(self, vins: Collection[str], limit: int) -> dict[str, Found]:
        found: dict[str, Found] = {}
        with self._backend.lock:
            for vin in vins:
                flight = self._state.flights.get(vin)
                rows = self._state.waiting.get(vin, {})
                eligible = [rows[place] for place in sorted(rows) if self._may_be_sent(rows[place])]
                if flight is not None or eligible:
                    found[vin] = Found(
                        None if flight is None else in_flight_of(flight),
                        [self._waiting(row) for row in eligible[:limit]],
                        len(eligible) > limit,
                    )
        return found

    def _may_be_sent(self, row: WaitingRow) -> bool:
        campaign = self._state.campaigns[row.campaign]
        within = not campaign.waved or (campaign.cut is not None and (row.ticket or 0) <= campaign.cut)
        return campaign.sending and within

    def _waiting(self, row: WaitingRow) -> Waiting:
        batch = self._state.batches[seq_of(row.place)]
        return waiting_of(row, batch.payload, batch.expires)

    def commit(self, changes: Sequence[Change]) -> list[Verdict]:
        check_changes(changes)
        with self._backend.lock:
            verdicts, moves = decide(changes, self._load(changes))
            ends = self._append(moves)
            self._apply(moves)
        self._landed(ends)
        return verdicts

    def _load(self, changes: Sequence[Change]) -> Loaded:
        state, loaded, want = self._state, Loaded(self.now()), wanted(changes)
        for vin, place in want.waiting:
            row = state.waiting.get(vin, {}).get(place)
            if row is not None:
                loaded.waiting[vin, place] = row
        loaded.flights = {vin: state.flights[vin] for vin in want.flights if vin in state.flights}
        loaded.awaiting = {key: state.awaiting[key] for key in want.awaiting if key in state.awaiting}
        loaded.superseded = {vin for vin in want.returning if vin in state.flights and self._newer_waits(vin)}
        sessions = self._sessions.rows
        loaded.epochs = {n: sessions[n].epoch for n in want.sessions if n in sessions and not sessions[n].dead}
        for id_ in want.campaigns & state.campaigns.keys():
            c = state.campaigns[id_]
            limits = Limits(c.sending, c.waved, c.cut, c.rate_per_sec, c.bytes_per_sec, c.in_flight_max)
            loaded.campaigns[id_] = limits
            if limits.limited:
                loaded.in_flight[id_] = state.counts[id_][1]
                if id_ in state.buckets:
                    loaded.buckets[id_] = state.buckets[id_]
        if any(limits.bytes_per_sec is not None for limits in loaded.campaigns.values()):
            loaded.sizes = {found.number: len(found.data) for found in state.payloads.values()}
        return loaded

    def _newer_waits(self, vin: str) -> bool:
        campaigns = self._state.campaigns
        own = campaigns[self._state.flights[vin].campaign]
        rows = self._state.waiting.get(vin, {}).values()
        newer = [campaigns[row.campaign] for row in rows if row.campaign > own.id]
        return any(one.request_id == own.request_id and one.replaces for one in newer)

    def parts_since(self, merged: int, limit: int) -> list[Part]:
        with self._backend.lock:
            found = sorted((p for p in self._state.parts.values() if p.merged > merged), key=lambda p: p.merged)
            return [self._part(part) for part in found[:limit]]

    def last_merged(self) -> int:
        with self._backend.lock:
            return self._state.last_merged

    def orphans(self, alive: Collection[int], after: str, limit: int) -> list[InFlight]:
        with self._backend.lock:
            flights = self._state.flights
            lost = sorted(vin for vin, row in flights.items() if vin > after and row.lease not in alive)
            return [in_flight_of(flights[vin]) for vin in lost[:limit]]

    def vehicle(self, vin: str) -> tuple[InFlight | None, list[Waiting], list[Awaiting]]:
        with self._backend.lock:
            flight, rows = self._state.flights.get(vin), self._state.waiting.get(vin, {})
            return (
                None if flight is None else in_flight_of(flight),
                [self._waiting(rows[place]) for place in sorted(rows)[:VEHICLE_MAX]],
                self.awaiting(vin)[:VEHICLE_MAX],
            )

    def awaiting(self, vin: str) -> list[Awaiting]:
        with self._backend.lock:
            return sorted(row for row in self._state.awaiting.values() if row.vin == vin)

    def overdue(self, now: float, limit: int) -> list[Awaiting]:
        with self._backend.lock:
            late = [row for row in self._state.awaiting.values() if row.until <= now]
            return sorted(late, key=lambda row: row.until)[:limit]

    # -- campaigns -------------------------------------------------------------------------------------------

    def campaigns(self, ids: Collection[int]) -> dict[int, Campaign]:
        with self._backend.lock:
            return {id_: self._state.campaigns[id_] for id_ in ids if id_ in self._state.campaigns}

    def find(self, request_id: str, number: int | None = None) -> Campaign | None:
        with self._backend.lock:
            found = [c for c in self._state.campaigns.values() if c.request_id == request_id]
            return max((c for c in found if number in (None, c.number)), key=lambda c: c.number, default=None)

    def page(self, before: int, limit: int, states: Collection[State] = ()) -> list[Campaign]:
        with self._backend.lock:
            found = [
                c
                for id_, c in self._state.campaigns.items()
                if (not before or id_ < before) and (not states or c.state in states)
            ]
            return sorted(found, key=lambda c: -c.id)[:limit]

    def counts(self, ids: Collection[int]) -> dict[int, Counts]:
        with self._backend.lock:
            return {id_: counts_of(self._state.counts[id_]) for id_ in ids if id_ in self._state.counts}

    def repeated(self, campaign: int) -> int:
        with self._backend.lock:
            return self._state.repeated.get(campaign, 0)

    def change_campaign(self, changed: Campaign, epoch: int | None = None) -> bool:
        with self._backend.lock:
            state, seen = self._state, self._state.campaigns.get(changed.id)
            if seen is None or seen.version != changed.version - 1 or epoch not in (None, state.keeper[1]):
                return False
            if changed.state is State.CLOSED:
                if seen.batch_at != changed.batch_at:
                    return False
                state.closed_at.setdefault(changed.id, self.now())
            state.campaigns[changed.id] = msgspec.structs.replace(
                changed,
                request_id=seen.request_id,
                number=seen.number,
                sha1=seen.sha1,
                waved=seen.waved,
                created_at=seen.created_at,
                batch_at=seen.batch_at,
            )
            return True

    def parts_of(self, campaign: int, after: int, limit: int) -> list[Part]:
        with self._backend.lock:
            parts = self._state.parts
            found = [parts[number] for number in sorted(parts) if number > after]
            return [self._part(part) for part in found if part.campaign == campaign][:limit]

    def expired_parts(self, now: float, limit: int) -> list[Part]:
        with self._backend.lock:
            parts = self._state.parts.values()
            due = [(p.expires, p.number) for p in parts if p.merged and p.expires is not None and p.expires <= now]
            return [self._part(self._state.parts[number]) for _, number in sorted(due)[:limit]]

    def part_done(self, number: int) -> None:
        with self._backend.lock:
            if number in self._state.parts:
                self._state.parts[number] = self._state.parts[number]._replace(expires=None)

    def waiting_of(self, part: Part, vins: Collection[str]) -> list[Waiting]:
        with self._backend.lock:
            found = [self._state.waiting.get(vin, {}).get(part.place) for vin in sorted(set(vins))]
            return [self._waiting(row) for row in found if row is not None]

    def ended(self, campaign: int, ends: Collection[End], after: str, limit: int) -> list[EndedRow]:
        with self._backend.lock:
            found = self._state.ended.get(campaign, {})
            return [found[vin] for vin in sorted(found) if vin > after and found[vin].end in ends][:limit]

    def under_way(self, campaign: int, where: UnderWay, after: str, limit: int) -> list[str]:
        with self._backend.lock:
            state = self._state
            match where:
                case UnderWay.WAITING:
                    of = [(vin, row.campaign) for vin, rows in state.waiting.items() for row in rows.values()]
                case UnderWay.IN_FLIGHT:
                    of = [(row.vin, row.campaign) for row in state.flights.values()]
                case UnderWay.AWAITING_RESULT:
                    of = [(row.vin, row.campaign) for row in state.awaiting.values()]
            return sorted({vin for vin, id_ in of if id_ == campaign and vin > after})[:limit]

    def reasons(self, campaign: int) -> dict[str, int]:
        with self._backend.lock:
            reasons: dict[str, int] = {}
            for row in self._state.ended.get(campaign, {}).values():
                if row.end is End.FAILED:
                    reasons[row.reason] = reasons.get(row.reason, 0) + 1
            return reasons

    def retry(self, campaign: int, vins: Sequence[str]) -> list[str]:
        with self._backend.lock:
            state, now = self._state, self.now()
            found = check_retry(state.campaigns.get(campaign), campaign, vins)
            ended = state.ended.get(campaign, {})
            rows = [ended[vin] for vin in set(vins) if vin in ended and ended[vin].end is not End.ACKED]
            moves = Moves(now)
            for payload, priority, group in retried(rows, lambda seq: state.batches[seq].payload):
                state.last_seq += 1
                state.last_part += 1
                place = place_of(priority, state.last_seq)
                state.batches[state.last_seq] = BatchRow(state.last_seq, place, campaign, payload, inf, "append", now)
                body = self._keep_ids(pack_ids([row.vin for row in group]))
                state.last_merged += 1
                state.parts[state.last_part] = PartRow(
                    state.last_part, state.last_seq, campaign, body, len(group), state.last_merged, None
                )
                for row in group:
                    del ended[row.vin]
                    ticket = ticket_of(campaign, row.vin) if found.waved else None
                    moves.waiting[row.vin, place] = WaitingRow(row.vin, place, campaign, ticket)
                    moves.count(campaign, PLACE_OF_END[row.end], WAITING)
            self._apply(moves)
            if rows:
                state.campaigns[campaign] = msgspec.structs.replace(found, batch_at=now)
            return sorted(row.vin for row in rows)

    def _part(self, part: PartRow) -> Part:
        assert isinstance(part.body, int)
        batch = self._state.batches[part.seq]
        return Part(
            part.number, part.seq, batch.place, part.campaign, unpack_ids(self._state.ids[part.body]), part.merged
        )

    # -- one keeper ------------------------------------------------------------------------------------------

    def keep(self, node: str, seconds: float) -> int | None:
        with self._backend.lock:
            now = self.now()
            keeper, epoch, until = self._state.keeper
            if until > now and keeper != node:
                return None
            epoch += until <= now
            self._state.keeper = (node, epoch, now + seconds)
            return epoch

    # -- collection ------------------------------------------------------------------------------------------

    def collect(self, before: float, payloads_before: float, keys_before: float, limit: int) -> int:
        with self._backend.lock:
            return self._collect_campaign(before, limit) or self._collect_rest(payloads_before, keys_before, limit)

    def _collect_campaign(self, before: float, limit: int) -> int:
        state = self._state
        old = sorted((at, id_) for id_, at in state.closed_at.items() if at < before)
        campaign = next((id_ for _, id_ in old if not any(state.counts.get(id_, [0])[:3])), None)
        if campaign is None:
            return 0
        ended = state.ended.get(campaign, {})
        gone = list(ended)[:limit]
        for vin in gone:
            del ended[vin]
        if len(gone) == limit:
            return limit
        parts = [part for part in state.parts.values() if part.campaign == campaign][: limit - len(gone)]
        for part in parts:
            assert isinstance(part.body, int)
            del state.parts[part.number], state.ids[part.body]
        if len(gone) + len(parts) == limit:
            return limit
        batches = [row for row in state.batches.values() if row.campaign == campaign]
        for row in batches:
            del state.batches[row.seq]
        for table in (state.campaigns, state.closed_at, state.ended, state.counts, state.repeated, state.buckets):
            table.pop(campaign, None)
        return len(gone) + len(parts) + len(batches) + 1

    def _collect_rest(self, payloads_before: float, keys_before: float, limit: int) -> int:
        state = self._state
        keys = [key for key, found in state.keys.items() if found[2] < keys_before][:limit]
        for key in keys:
            del state.keys[key]
        used = {row.payload for row in state.batches.values()}
        unused = [
            sha1
            for sha1, found in state.payloads.items()
            if found.touched_at < payloads_before and found.number not in used
        ]
        for sha1 in unused[: limit - len(keys)]:
            del state.payloads[sha1]
        return len(keys) + len(unused[: limit - len(keys)])
