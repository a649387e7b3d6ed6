"""Fan-out in a database: what SQLite and PostgreSQL do alike.

Every change is one transaction, and takes its locks in this order, each kind by its key, so that nodes wait for each
other but never in a circle:

    1. sessions (shared), the counters, the run of merging, the keeper (shared)
    2. payloads, campaigns, buckets of campaigns with limits
    3. waiting, in flight, awaiting, ended
    4. counts, then the stream of the log `deliveries`
"""

from __future__ import annotations

import hashlib
import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Sequence
from math import inf
from typing import TypeVar

import msgspec

from holdfast.errors import RequestError
from holdfast.fanout.history import Ended, batch_of
from holdfast.fanout.nouns import (
    DELIVERIES,
    SEQ_BITS,
    SEQ_MAX,
    Awaiting,
    Campaign,
    Counts,
    End,
    InFlight,
    State,
    UnderWay,
    Waiting,
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
from holdfast.log.contract import GenerationSealed, Landed
from holdfast.log.log import Log, Prepared
from holdfast.store.fanout_changes import (
    ENDS,
    PLACE_OF_END,
    WAITING,
    Bucket,
    FlightRow,
    Limits,
    Loaded,
    MergedPart,
    Moves,
    Overlap,
    WaitingRow,
    as_seen,
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
    Plan,
    PreparedBatch,
    check_part,
    check_retry,
    pack_ids,
    plan,
    prepare,
    retried,
    unpack_ids,
)
from holdfast.store.in_sql.database import Database, Db, Row, Rows, Transaction

T = TypeVar("T")
Ends = tuple[Prepared, list[Landed]] | None
"""What has ended, as it has landed in the log."""

VEHICLE_MAX = 1_000
UNMERGED_MAX = 10_000
PAYLOADS_COLLECTED = 64

CAMPAIGN = msgspec.structs.fields(Campaign)
CAMPAIGN_COLUMNS = tuple(field.name for field in CAMPAIGN)
CHANGED = tuple(
    name
    for name in CAMPAIGN_COLUMNS
    if name not in ("id", "request_id", "number", "sha1", "waved", "version", "created_at", "batch_at")
)
"""What a change of a campaign may change; `version` counts."""
_CAMPAIGN = ", ".join(CAMPAIGN_COLUMNS)
LIMITS = ", ".join(Limits._fields)
WAITING_COLUMNS = WaitingRow._fields
FLIGHT_COLUMNS = FlightRow._fields
AWAITING_COLUMNS = Awaiting._fields
FLIGHT = ", ".join(FLIGHT_COLUMNS)
WAITS = "w.vin, w.place, w.campaign, w.ticket, w.attempts, w.not_before, w.sent, b.payload, b.expires"
OF_BATCH = f"join fanout_batches b on b.seq = (w.place & {SEQ_MAX})"
MAY_BE_SENT = "c.sending and (not c.waved or w.ticket <= c.cut)"
AWAITS = ", ".join(AWAITING_COLUMNS)
COUNTED = tuple(field.name for field in msgspec.structs.fields(Counts))
_PART = """
    select p.number, p.seq, b.place, p.campaign, i.data, p.merged_as from fanout_parts p
    join fanout_batches b on b.seq = p.seq join fanout_ids i on i.id = p.ids
"""
_COUNT = f"""
    insert into fanout_counts (campaign, slot, {", ".join(COUNTED)}, repeated)
    values ({", ".join("?" * (len(COUNTED) + 3))}) on conflict (campaign, slot) do update set
    {", ".join(f"{name} = fanout_counts.{name} + excluded.{name}" for name in (*COUNTED, "repeated"))}
"""
_SUMS = ", ".join(f"sum({name})" for name in COUNTED)


NEWER = """
    fanout_in_flight f {join} fanout_campaigns c on c.id = f.campaign {join} fanout_waiting w on w.vin = f.vin
    {join} fanout_campaigns n on n.id = w.campaign
    where n.id > c.id and n.request_id = c.request_id and n.replaces
"""
"""What is in flight, and newer data that waits for the same vehicle."""
_TABLES = {
    UnderWay.WAITING: "fanout_waiting",
    UnderWay.IN_FLIGHT: "fanout_in_flight",
    UnderWay.AWAITING_RESULT: "fanout_awaiting",
}


class Raced(Exception):
    """Somebody else was faster, which the transaction has seen too late: it is undone, and made anew."""


class SqlFanoutTable(ABC):
    """The promises of `fanout/table.py`; subclasses know how their database reads and writes many rows at once."""

    shared = ""
    """Ends a select from campaigns `c` that keeps others from changing them until the commit."""
    kept = ""
    """Ends a select of the keeper: nobody else becomes it until the commit."""
    unless_locked = ""
    """Ends a select that passes over rows which somebody else is about to change."""
    slot = 0
    """Which of a campaign's rows of counts this process adds to."""

    def __init__(self, database: Database, log: Log):
        self._database, self._log = database, log

    def now(self) -> float:
        return self._database.ask(self._now)

    def _now(self, db: Db) -> float:
        return float(db.run(f"select {self._database.dialect.now}")[0][0])

    def _rows(self, sql: str, *args: object) -> Rows:
        return self._database.ask(lambda db: db.run(sql, *args))

    def _changing(self, work: Callable[[Transaction], tuple[T, Ends]], *, repeatable: bool = False) -> T:
        while True:
            try:
                result, ends = self._database.change(work, repeatable=repeatable)
            except GenerationSealed:
                self._log.sealed(DELIVERIES)
                continue
            except Raced:
                continue
            if ends is not None:
                self._log.landed(*ends)
            return result

    # -- payloads --------------------------------------------------------------------------------------------

    def put_payload(self, data: bytes) -> bytes:
        sha1, sha256 = hashlib.sha1(data).digest(), hashlib.sha256(data).digest()
        sql = f"""
            insert into fanout_payloads (sha1, sha256, touched_at, data) values (?, ?, {self._database.dialect.now}, ?)
            on conflict (sha1) do update set touched_at = excluded.touched_at returning sha256, data
        """

        def work(db: Transaction) -> bytes:
            stored, there = db.run(sql, sha1, sha256, data)[0]
            if bytes(stored) == sha256 and bytes(there) != data:  # damaged since: now it is whole again
                db.run("update fanout_payloads set data = ? where sha1 = ?", data, sha1)
            return bytes(stored)

        if self._database.change(work, repeatable=True) != sha256:
            raise RequestError(f"another payload is stored under {sha1.hex()}")
        return sha1

    def payloads(self, numbers: Collection[int]) -> dict[int, StoredPayload]:
        if not numbers:
            return {}
        where, given = self._ints("number", numbers)
        found = self._rows(f"select number, sha1, data from fanout_payloads where {where}", given)
        stored = [StoredPayload(number, bytes(sha1), bytes(data)) for number, sha1, data in found]
        return {one.number: one for one in stored if hashlib.sha1(one.data).digest() == one.sha1}

    def payload_number(self, sha1: bytes) -> int | None:
        rows = self._rows("select number from fanout_payloads where sha1 = ?", sha1)
        return rows[0][0] if rows else None

    # -- intake ----------------------------------------------------------------------------------------------

    def stage(self, upload: str, ids: Sequence[str]) -> None:
        check_part(upload, ids)
        packed = pack_ids(ids)

        def work(db: Transaction) -> None:
            (at,) = db.run("insert into fanout_ids (data) values (?) returning id", packed)[0]
            sql = f"insert into fanout_staged values (?, ?, ?, {self._database.dialect.now})"
            db.run(sql, upload, at, len(ids))

        self._database.change(work)

    def drop_uploads(self, before: float, limit: int) -> int:
        def work(db: Transaction) -> int:
            sql = "select upload, ids from fanout_staged where staged_at < ? order by staged_at limit ?"
            old = db.run(sql + self.unless_locked, before, limit)
            self._delete(db, "fanout_staged", ("upload", "ids"), old)
            self._delete(db, "fanout_ids", ("id",), [(ids,) for _, ids in old])
            return len(old)

        return self._database.change(work, repeatable=True)

    def add(self, batches: Sequence[NewBatch]) -> list[Added | Exception]:
        prepared = [prepare(batch) for batch in batches]
        if not any(isinstance(one, PreparedBatch) for one in prepared):
            return [one for one in prepared if isinstance(one, RequestError)]
        keyed = all(isinstance(one, RequestError) or one.batch.key is not None for one in prepared)
        return self._changing(lambda db: self._add(db, prepared), repeatable=keyed)

    def _add(
        self, db: Transaction, prepared: Sequence[PreparedBatch | RequestError]
    ) -> tuple[list[Added | Exception], Ends]:
        known = self._known(db, [one for one in prepared if isinstance(one, PreparedBatch)])
        made = plan(prepared, known)
        if not made.batches:
            return made.answers, None
        self._take_in(db, made)
        moves = Moves(known.now)
        for campaign, number in made.counts.items():
            moves.count(campaign, None, WAITING, number)
        if made.rows:
            merge(made.rows, made.merged, self._overlap(db, made.rows, made.merged), moves)
        return made.answers, self._make(db, moves)

    def _known(self, db: Transaction, prepared: Sequence[PreparedBatch]) -> Known:
        batches = [one.batch for one in prepared]
        uploads = sorted({(batch.upload,) for batch in batches if batch.upload is not None})
        # Whoever has these commits before the next one gets any: numbers become visible in order.
        sql = f"select seq, part, campaign, merged from fanout_counters{self._database.dialect.locked}"
        counters = db.run(sql)[0]
        known = Known(self._now(db))
        known.seq, known.part, known.campaign, known.merged = counters
        for upload in uploads:
            rows = self._get(db, "ids, count", "fanout_staged", ("upload",), [upload])
            known.staged[upload[0]] = sorted((ids, count) for ids, count in rows)
        keys = sorted({(batch.key,) for batch in batches if batch.key is not None})
        for key, digest, answer in self._get(db, "key, digest, answer", "fanout_keys", ("key",), keys):
            known.keys[key] = (bytes(digest), Added(*msgspec.msgpack.decode(answer)))
        hashes = sorted({(batch.sha1,) for batch in batches})
        for sha1, number in self._get(db, "sha1, number", "fanout_payloads", ("sha1",), hashes, locked=True):
            known.payloads[bytes(sha1)] = number
        names = sorted({(batch.request_id,) for batch in batches})
        for request_id, number in self._get(db, "request_id, number", "fanout_numbers", ("request_id",), names):
            known.numbers[request_id] = number
        numbered = sorted({(batch.request_id, batch.number) for batch in batches if batch.number is not None})
        ids = {id_ for (id_,) in self._get(db, "id", "fanout_campaigns", ("request_id", "number"), numbered)}
        ids.update(id_ for (id_,) in self._get(db, "id", "fanout_campaigns", ("request_id",), names, also="t.open"))
        known.campaigns = self._campaigns(db, ids, self._database.dialect.locked)
        lanes = f"""
            select distinct b.place / {1 << SEQ_BITS}, c.request_id from fanout_parts p
            join fanout_batches b on b.seq = p.seq join fanout_campaigns c on c.id = p.campaign where not p.merged
        """
        known.unmerged = {(int(lane), request_id) for lane, request_id in db.run(lanes)}
        return known

    def _take_in(self, db: Transaction, made: Plan) -> None:
        known, now = made.known, made.known.now
        sql = "update fanout_counters set seq = ?, part = ?, campaign = ?, merged = ?"
        db.run(sql, known.seq, known.part, known.campaign, known.merged)
        if made.begun:
            marks = ", ".join("?" * len(CAMPAIGN_COLUMNS))
            rows = [_campaign_values(campaign) for campaign in made.begun.values()]
            db.run_many(f"insert into fanout_campaigns ({_CAMPAIGN}) values ({marks})", rows)
            db.run_many("insert into fanout_buckets values (?, ?, ?, ?)", [(id_, inf, inf, now) for id_ in made.begun])
            db.run_many(
                "insert into fanout_numbers values (?, ?)"
                " on conflict (request_id) do update set number = excluded.number",
                sorted(made.numbers.items()),
            )
        if made.changed:
            db.run_many(
                "update fanout_campaigns set open = ?, version = ?, batch_at = ? where id = ?",
                [(one.open, one.version, one.batch_at, id_) for id_, one in sorted(made.changed.items())],
            )
        touched = sorted({row.payload for row in made.batches})
        db.run_many("update fanout_payloads set touched_at = ? where number = ?", [(now, one) for one in touched])
        self._insert(db, "fanout_batches", BatchRow._fields, made.batches)
        parts = []
        for part in made.parts:
            at = part.body
            if not isinstance(at, int):
                (at,) = db.run("insert into fanout_ids (data) values (?) returning id", at)[0]
            merged = part.merged or None
            parts.append((part.number, part.seq, part.campaign, at, part.size, bool(merged), merged, part.expires))
        columns = ("number", "seq", "campaign", "ids", "count", "merged", "merged_as", "expires")
        self._insert(db, "fanout_parts", columns, parts)
        for upload in made.uploads:
            db.run("delete from fanout_staged where upload = ?", upload)
        if made.keys:
            db.run_many(
                "insert into fanout_keys values (?, ?, ?, ?)",
                [(key, digest, msgspec.msgpack.encode(tuple(a)), now) for key, (digest, a) in made.keys.items()],
            )

    # -- merging ---------------------------------------------------------------------------------------------

    def unmerged(self, ids_max: int) -> tuple[list[Part], str]:
        return self._database.ask(lambda db: self._unmerged(db, ids_max))

    def _unmerged(self, db: Db, ids_max: int) -> tuple[list[Part], str]:
        parts, after = db.run("select parts, after from fanout_merge")[0]
        numbers = json.loads(parts)
        if not numbers:
            total = 0
            sql = "select number, count from fanout_parts where not merged order by number limit ?"
            for number, count in db.run(sql, UNMERGED_MAX):
                total += count
                if numbers and total > ids_max:
                    break
                numbers.append(number)
        if not numbers:
            return [], ""
        where, given = self._ints("p.number", numbers)
        return [_part_of(row) for row in db.run(f"{_PART} where {where} order by p.number", given)], after

    def unmerged_of(self, campaign: int) -> int:
        sql = "select coalesce(sum(count), 0) from fanout_parts where campaign = ? and not merged"
        return int(self._rows(sql, campaign)[0][0])

    def merge_step(self, step: MergeStep) -> Merged | None:
        # Asked again because the answer was lost, the run is no longer there.
        return self._changing(lambda db: self._merge_step(db, step), repeatable=True)

    def _merge_step(self, db: Transaction, step: MergeStep) -> tuple[Merged | None, Ends]:
        merged = self._take_merged(db, len(step.parts)) if step.done else 0
        packed, after = db.run(f"select parts, after from fanout_merge{self._database.dialect.locked}")[0]
        run = tuple(json.loads(packed)) or step.parts
        if not step.parts or (run, after) != (step.parts, step.after):
            return None, None
        where, given = self._ints("p.number", step.parts)
        sql = f"""
            select p.number, b.place, c.id, c.request_id, b.resend, c.waved, c.state from fanout_parts p
            join fanout_batches b on b.seq = p.seq join fanout_campaigns c on c.id = p.campaign
            where {where} and not p.merged order by c.id{self.shared}
        """
        parts = {row[0]: _merged_part(row) for row in db.run(sql, given)}
        if len(parts) < len(step.parts):
            return None, None
        moves = Moves(self._now(db))
        done = merge(step.rows, parts, self._overlap(db, step.rows, parts), moves)
        if step.done:
            where, given = self._ints("number", step.parts)
            db.run(f"update fanout_parts set merged = true where {where}", given)
            numbered = [(merged + at, number) for at, number in enumerate(sorted(step.parts), start=1)]
            db.run_many("update fanout_parts set merged_as = ? where number = ?", numbered)
            db.run("update fanout_merge set parts = '[]', after = ''")
        else:
            db.run("update fanout_merge set parts = ?, after = ?", json.dumps(step.parts), step.last)
        return done, self._make(db, moves)

    def _take_merged(self, db: Db, parts: int) -> int:
        """The last number given to a part that was merged, before these."""
        sql = "update fanout_counters set merged = merged + ? returning merged"
        return int(db.run(sql, parts)[0][0]) - parts

    def _overlap(self, db: Db, rows: Collection[tuple[str, int]], parts: dict[int, MergedPart]) -> Overlap:
        """Whom a campaign of these rows has as a target already, and who waits in an earlier one."""
        where, given = self._ints("campaign", {part.campaign for part in parts.values()})
        # A campaign without an older part has no other targets: whatever else is merged with it is among the rows.
        older = f"select distinct campaign from fanout_parts where {where} and number < ?"
        known = {campaign for (campaign,) in db.run(older, given, min(parts))}
        # Which is the newest campaign here of each request id that has a say in earlier ones.
        newest: dict[str, int] = {}
        for part in parts.values():
            if part.resend != "append":
                newest[part.request_id] = max(newest.get(part.request_id, 0), part.campaign)
        some_wait = "(select sum(n.waiting) from fanout_counts n where n.campaign = t.id) > 0"
        names = [(name,) for name in sorted(newest)]
        waits = self._get(db, "t.id, t.request_id", "fanout_campaigns", ("request_id",), names, also=some_wait)
        earlier = {id_: name for id_, name in waits if id_ < newest[name]}
        oldest = {name: id_ for id_, name in sorted(earlier.items(), reverse=True)}
        concerned = {
            number
            for number, part in parts.items()
            if part.campaign in known or oldest.get(part.request_id, part.campaign) < part.campaign
        }
        vins = sorted({vin for vin, number in rows if number in concerned}) if concerned else []
        if not vins:
            return Overlap(set(), {}, {})
        targets, waiting = self._there(db, vins, sorted(known), sorted(earlier))
        return Overlap(targets, waiting, earlier)

    @abstractmethod
    def _there(
        self, db: Db, vins: Sequence[str], campaigns: Sequence[int], earlier: Sequence[int]
    ) -> tuple[set[tuple[str, int]], dict[str, list[WaitingRow]]]:
        """Which of these VINs are targets of these campaigns; and what waits for them in earlier ones, locked."""

    # -- what moves ------------------------------------------------------------------------------------------

    def _make(self, db: Transaction, moves: Moves, made: Prepared | None = None) -> Ends:
        if moves.waiting_gone:
            self._delete(db, "fanout_waiting", ("vin", "place"), sorted(moves.waiting_gone))
        if moves.waiting:
            self._insert_waiting(db, sorted(moves.waiting.values()))
        if moves.flights_gone:
            self._delete(db, "fanout_in_flight", ("vin",), [(vin,) for vin in sorted(moves.flights_gone)])
        if moves.flights:
            self._insert_flights(db, [moves.flights[vin] for vin in sorted(moves.flights)])
        if moves.awaiting_gone:
            self._delete(db, "fanout_awaiting", ("vin", "place"), sorted(moves.awaiting_gone))
        if moves.awaiting:
            self._insert(db, "fanout_awaiting", AWAITING_COLUMNS, sorted(moves.awaiting.values()))
        if moves.ended:
            now = moves.now
            ended = [(e.campaign, e.vin, e.place, PLACE_OF_END[e.end] - 3, e.reason, now) for e in moves.ended]
            self._insert_ended(db, sorted(ended))
        if moves.buckets:
            db.run_many(
                "update fanout_buckets set deliveries = ?, bytes = ?, at = ? where campaign = ?",
                [(*bucket, id_) for id_, bucket in sorted(moves.buckets.items())],
            )
        if moves.counts:
            db.run_many(
                _COUNT,
                [(id_, self.slot, *deltas, moves.repeated.get(id_, 0)) for id_, deltas in sorted(moves.counts.items())],
            )
        if not moves.ended:
            return None
        made = made or self._prepared(moves.ended)
        assert made is not None
        landed, _ = db.append(DELIVERIES, made.generation, made.blocks, sorted(made.topics), {}, None, made.now)
        return made, landed

    # -- dispatch --------------------------------------------------------------------------------------------

    @abstractmethod
    def look_up(self, vins: Collection[str], limit: int) -> dict[str, Found]: ...

    def commit(self, changes: Sequence[Change]) -> list[Verdict]:
        check_changes(changes)
        if not changes:
            return []
        # Nearly always everything is as it was seen: the block is made before anybody has to wait for us.
        ended = [ended for change in changes if (ended := as_seen(change)) is not None]
        ready = [self._prepared(ended)]  # for the first try: for another one the generation may be another
        return self._changing(lambda db: self._commit(db, changes, ended, ready.pop() if ready else None))

    def _prepared(self, ended: Sequence[Ended]) -> Prepared | None:
        return self._log.prepare(DELIVERIES, batch_of(ended, self._log.clock())) if ended else None

    def _commit(
        self, db: Transaction, changes: Sequence[Change], ended: Sequence[Ended], made: Prepared | None
    ) -> tuple[list[Verdict], Ends]:
        verdicts, moves = decide(changes, self._load(db, changes))
        return verdicts, self._make(db, moves, made if moves.ended == ended else None)

    def _load(self, db: Transaction, changes: Sequence[Change]) -> Loaded:
        want = wanted(changes)
        loaded = Loaded(self._now(db))
        if want.sessions:
            loaded.epochs = self._epochs(db, sorted(want.sessions))
        if want.campaigns:
            self._load_campaigns(db, want.campaigns, loaded)
        columns = ", ".join(WAITING_COLUMNS)
        keys = sorted(want.waiting)
        for row in self._get(db, columns, "fanout_waiting", ("vin", "place"), keys, locked=True):
            loaded.waiting[row[0], row[1]] = WaitingRow(*row)
        vins = [(vin,) for vin in sorted(want.flights)]
        for row in self._get(db, FLIGHT, "fanout_in_flight", ("vin",), vins, locked=True):
            loaded.flights[row[0]] = _flight_of(row)
        if want.returning:
            loaded.superseded = self._superseded(db, sorted(want.returning))
        keys = sorted(want.awaiting)
        for row in self._get(db, AWAITS, "fanout_awaiting", ("vin", "place"), keys, locked=True):
            loaded.awaiting[row[0], row[1]] = Awaiting(*row)
        return loaded

    def _load_campaigns(self, db: Db, ids: Collection[int], loaded: Loaded) -> None:
        where, given = self._ints("id", ids)
        rows = db.run(f"select id, {LIMITS} from fanout_campaigns where {where}", given)
        loaded.campaigns = {row[0]: Limits(bool(row[1]), bool(row[2]), *row[3:]) for row in rows}
        limited = sorted(id_ for id_, limits in loaded.campaigns.items() if limits.limited)
        if not limited:
            return
        where, given = self._ints("campaign", limited)
        sql = f"select campaign, deliveries, bytes, at from fanout_buckets where {where} order by campaign"
        loaded.buckets = {row[0]: Bucket(*row[1:]) for row in db.run(sql + self._database.dialect.locked, given)}
        sql = f"select campaign, sum(in_flight) from fanout_counts where {where} group by campaign"
        loaded.in_flight = {campaign: int(number) for campaign, number in db.run(sql, given)}
        if any(loaded.campaigns[id_].bytes_per_sec is not None for id_ in limited):
            sql = f"""
                select distinct p.number, length(p.data) from fanout_payloads p
                join fanout_batches b on b.payload = p.number where {where.replace("campaign", "b.campaign")}
            """
            loaded.sizes = dict(db.run(sql, given))

    def parts_since(self, merged: int, limit: int) -> list[Part]:
        sql = f"{_PART} where p.merged_as > ? order by p.merged_as limit ?"
        return [_part_of(row) for row in self._rows(sql, merged, limit)]

    def last_merged(self) -> int:
        return int(self._rows("select merged from fanout_counters")[0][0])

    def orphans(self, alive: Collection[int], after: str, limit: int) -> list[InFlight]:
        where, given = self._ints("lease", alive)
        sql = f"select {FLIGHT} from fanout_in_flight where vin > ? and not ({where}) order by vin limit ?"
        return [in_flight_of(_flight_of(row)) for row in self._rows(sql, after, given, limit)]

    def vehicle(self, vin: str) -> tuple[InFlight | None, list[Waiting], list[Awaiting]]:
        flights = self._rows(f"select {FLIGHT} from fanout_in_flight where vin = ?", vin)
        sql = f"select {WAITS} from fanout_waiting w {OF_BATCH} where w.vin = ? order by w.place limit {VEHICLE_MAX}"
        waiting = [waiting_from(row) for row in self._rows(sql, vin)]
        return in_flight_of(_flight_of(flights[0])) if flights else None, waiting, self.awaiting(vin)

    def awaiting(self, vin: str) -> list[Awaiting]:
        sql = f"select {AWAITS} from fanout_awaiting where vin = ? order by place limit {VEHICLE_MAX}"
        return [Awaiting(*row) for row in self._rows(sql, vin)]

    def overdue(self, now: float, limit: int) -> list[Awaiting]:
        sql = f"select {AWAITS} from fanout_awaiting where until <= ? order by until limit ?"
        return [Awaiting(*row) for row in self._rows(sql, now, limit)]

    # -- campaigns -------------------------------------------------------------------------------------------

    def campaigns(self, ids: Collection[int]) -> dict[int, Campaign]:
        return self._database.ask(lambda db: self._campaigns(db, ids))

    def _campaigns(self, db: Db, ids: Collection[int], locked: str = "") -> dict[int, Campaign]:
        if not ids:
            return {}
        where, given = self._ints("id", ids)
        sql = f"select {_CAMPAIGN} from fanout_campaigns c where {where} order by id{locked}"
        return {row[0]: _campaign_of(row) for row in db.run(sql, given)}

    def find(self, request_id: str, number: int | None = None) -> Campaign | None:
        sql = f"select {_CAMPAIGN} from fanout_campaigns where request_id = ? {{}} order by number desc limit 1"
        if number is None:
            rows = self._rows(sql.format(""), request_id)
        else:
            rows = self._rows(sql.format("and number = ?"), request_id, number)
        return _campaign_of(rows[0]) if rows else None

    def page(self, before: int, limit: int, states: Collection[State] = ()) -> list[Campaign]:
        among = " or ".join("state = ?" for _ in states) or "true"
        sql = f"select {_CAMPAIGN} from fanout_campaigns where id < ? and ({among}) order by id desc limit ?"
        rows = self._rows(sql, before or SEQ_MAX, *map(str, states), limit)
        return [_campaign_of(row) for row in rows]

    def counts(self, ids: Collection[int]) -> dict[int, Counts]:
        if not ids:
            return {}
        where, given = self._ints("campaign", ids)
        sql = f"select campaign, {_SUMS} from fanout_counts where {where} group by campaign"
        return {row[0]: counts_of(map(int, row[1:])) for row in self._rows(sql, given)}

    def repeated(self, campaign: int) -> int:
        sql = "select coalesce(sum(repeated), 0) from fanout_counts where campaign = ?"
        return int(self._rows(sql, campaign)[0][0])

    def change_campaign(self, changed: Campaign, epoch: int | None = None) -> bool:
        sets = ", ".join(f"{name} = ?" for name in CHANGED)
        values = dict(zip(CAMPAIGN_COLUMNS, _campaign_values(changed), strict=True))
        now = self._database.dialect.now
        closed = f", closed_at = coalesce(closed_at, {now})" if changed.state is State.CLOSED else ""
        # What has come since it was looked at would be closed in; the version does not change with every batch.
        as_seen = " and batch_at = ?" if changed.state is State.CLOSED else ""
        when = (changed.batch_at,) if changed.state is State.CLOSED else ()
        where = f"where id = ? and version = ?{as_seen}"
        sql = f"update fanout_campaigns set version = ?, {sets}{closed} {where} returning 1"

        def work(db: Transaction) -> bool:
            if epoch is not None and db.run(f"select epoch from fanout_keeper{self.kept}")[0][0] != epoch:
                return False
            given = [values[name] for name in CHANGED]
            return bool(db.run(sql, changed.version, *given, changed.id, changed.version - 1, *when))

        return self._database.change(work)

    def parts_of(self, campaign: int, after: int, limit: int) -> list[Part]:
        sql = f"{_PART} where p.campaign = ? and p.number > ? order by p.number limit ?"
        return [_part_of(row) for row in self._rows(sql, campaign, after, limit)]

    def expired_parts(self, now: float, limit: int) -> list[Part]:
        sql = (
            f"{_PART} where p.expires <= ? and p.expires is not null and p.merged order by p.expires, p.number limit ?"
        )
        return [_part_of(row) for row in self._rows(sql, now, limit)]

    def part_done(self, number: int) -> None:
        sql = "update fanout_parts set expires = null where number = ?"
        self._database.change(lambda db: db.run(sql, number), repeatable=True)

    def waiting_of(self, part: Part, vins: Collection[str]) -> list[Waiting]:
        keys = [(vin, part.place) for vin in sorted(set(vins))]
        columns = ", ".join(WAITING_COLUMNS)
        rows = self._database.ask(lambda db: self._get(db, columns, "fanout_waiting", ("vin", "place"), keys))
        if not rows:
            return []
        payload, expires = self._rows("select payload, expires from fanout_batches where seq = ?", part.seq)[0]
        return [waiting_of(_waiting_row(row), payload, expires) for row in sorted(rows)]

    def ended(self, campaign: int, ends: Collection[End], after: str, limit: int) -> list[EndedRow]:
        if not ends:
            return []
        # Without acked ones, by an index in which those are not.
        only = "" if End.ACKED in ends else 'and "end" <> 0'
        where, given = self._ints('"end"', [ENDS.index(end) for end in ends])
        sql = f"""
            select vin, place, "end", reason, ended_at from fanout_ended
            where campaign = ? and vin > ? {only} and {where} order by vin limit ?
        """
        return [_ended_of(row) for row in self._rows(sql, campaign, after, given, limit)]

    def under_way(self, campaign: int, where: UnderWay, after: str, limit: int) -> list[str]:
        sql = f"select distinct vin from {_TABLES[where]} where campaign = ? and vin > ? order by vin limit ?"
        return [vin for (vin,) in self._rows(sql, campaign, after, limit)]

    def reasons(self, campaign: int) -> dict[str, int]:
        sql = """
            select reason, count(*) from fanout_ended where campaign = ? and "end" <> 0 and "end" = ? group by reason
        """
        return dict(self._rows(sql, campaign, ENDS.index(End.FAILED)))

    def retry(self, campaign: int, vins: Sequence[str]) -> list[str]:
        return self._changing(lambda db: self._retry(db, campaign, sorted(set(vins))))

    def _retry(self, db: Transaction, campaign: int, vins: Sequence[str]) -> tuple[list[str], Ends]:
        db.run(f"select seq from fanout_counters{self._database.dialect.locked}")
        found = check_retry(self._campaigns(db, [campaign], self.shared).get(campaign), campaign, vins)
        columns = 'vin, place, "end", reason, ended_at'
        keys = [(vin, campaign) for vin in vins]
        rows = [
            _ended_of(row) for row in self._get(db, columns, "fanout_ended", ("vin", "campaign"), keys, locked=True)
        ]
        rows = [row for row in rows if row.end is not End.ACKED]
        if not rows:
            return [], None
        where, given = self._ints("seq", {seq_of(row.place) for row in rows})
        payloads: dict[int, int] = dict(db.run(f"select seq, payload from fanout_batches where {where}", given))
        groups = retried(rows, payloads.__getitem__)
        sql = """
            update fanout_counters set seq = seq + ?, part = part + ?, merged = merged + ? returning seq, part, merged
        """
        seq, part, merged = db.run(sql, len(groups), len(groups), len(groups))[0]
        moves = Moves(self._now(db))
        for at, (payload, priority, group) in enumerate(groups):
            number = seq - at
            place = place_of(priority, number)
            batch = BatchRow(number, place, campaign, payload, inf, "append", moves.now)
            self._insert(db, "fanout_batches", BatchRow._fields, [batch])
            packed = pack_ids([row.vin for row in group])
            (ids,) = db.run("insert into fanout_ids (data) values (?) returning id", packed)[0]
            sql = "insert into fanout_parts values (?, ?, ?, ?, ?, ?, ?, null)"
            db.run(sql, part - at, number, campaign, ids, len(group), True, merged - at)
            for row in group:
                ticket = ticket_of(campaign, row.vin) if found.waved else None
                moves.waiting[row.vin, place] = WaitingRow(row.vin, place, campaign, ticket)
                moves.count(campaign, PLACE_OF_END[row.end], WAITING)
        self._delete(db, "fanout_ended", ("campaign", "vin"), [(campaign, row.vin) for row in rows])
        db.run("update fanout_campaigns set batch_at = ? where id = ?", moves.now, campaign)
        return sorted(row.vin for row in rows), self._make(db, moves)

    # -- one keeper ------------------------------------------------------------------------------------------

    def keep(self, node: str, seconds: float) -> int | None:
        now = self._database.dialect.now_in_turn
        sql = f"""
            update fanout_keeper set node = ?, epoch = epoch + (case when until <= {now} then 1 else 0 end),
            until = {now} + ? where node = ? or until <= {now} returning epoch
        """
        rows = self._database.change(lambda db: db.run(sql, node, float(seconds), node), repeatable=True)
        return rows[0][0] if rows else None

    # -- collection ------------------------------------------------------------------------------------------

    def collect(self, before: float, payloads_before: float, keys_before: float, limit: int) -> int:
        def work(db: Transaction) -> int:
            return self._collect_campaign(db, before, limit) or (
                self._collect_keys(db, keys_before, limit) or self._collect_payloads(db, payloads_before, limit)
            )

        return self._database.change(work, repeatable=True)

    def _collect_campaign(self, db: Transaction, before: float, limit: int) -> int:
        sql = """
            select c.id from fanout_campaigns c where c.closed_at < ? and c.closed_at is not null and coalesce((
                select sum(n.waiting + n.in_flight + n.awaiting_result) from fanout_counts n where n.campaign = c.id
            ), 0) = 0 order by c.closed_at limit 1
        """
        for (campaign,) in db.run(sql, before):
            some = "select vin from fanout_ended where campaign = ? order by vin limit ?"
            sql = f"delete from fanout_ended where campaign = ? and vin in ({some}) returning 1"
            gone = len(db.run(sql, campaign, campaign, limit))
            if gone < limit:
                sql = "select number, ids from fanout_parts where campaign = ? order by number limit ?"
                parts = db.run(sql, campaign, limit - gone)
                self._delete(db, "fanout_parts", ("number",), [(number,) for number, _ in parts])
                self._delete(db, "fanout_ids", ("id",), [(ids,) for _, ids in parts])
                gone += len(parts)
            if gone < limit:
                sql = "select seq from fanout_batches where campaign = ? order by seq limit ?"
                batches = db.run(sql, campaign, limit - gone)
                self._delete(db, "fanout_batches", ("seq",), batches)
                gone += len(batches)
            if gone < limit:
                for table in ("fanout_buckets", "fanout_counts"):
                    db.run(f"delete from {table} where campaign = ?", campaign)
                db.run("delete from fanout_campaigns where id = ?", campaign)
                gone += 1
            return gone
        return 0

    def _collect_keys(self, db: Transaction, before: float, limit: int) -> int:
        old = "select key from fanout_keys where used_at < ? order by used_at limit ?"
        return len(db.run(f"delete from fanout_keys where key in ({old}) returning 1", before, limit))

    def _collect_payloads(self, db: Transaction, before: float, limit: int) -> int:
        unused = "not exists (select 1 from fanout_batches b where b.payload = p.number)"
        sql = f"select p.number from fanout_payloads p where p.touched_at < ? and {unused} order by p.number limit ?"
        found = [number for (number,) in db.run(sql + self.unless_locked, before, min(limit, PAYLOADS_COLLECTED))]
        if not found:
            return 0
        # Asked again now that they are locked: a batch may have come between.
        where, given = self._ints("number", found)
        still = unused.replace("p.number", "fanout_payloads.number")
        return len(db.run(f"delete from fanout_payloads where {where} and {still} returning 1", given))

    # -- what the databases do differently -------------------------------------------------------------------

    @abstractmethod
    def _ints(self, column: str, values: Iterable[int]) -> tuple[str, object]:
        """A condition that finds these numbers by their index, and its parameter."""

    @abstractmethod
    def _get(
        self,
        db: Db,
        columns: str,
        table: str,
        by: Sequence[str],
        keys: Sequence[Row],
        *,
        also: str = "true",
        locked: bool = False,
    ) -> Rows:
        """The rows there are of table `t` with these keys, which are in order; `locked`: until the commit."""

    @abstractmethod
    def _insert(self, db: Db, table: str, columns: Sequence[str], rows: Sequence[Row]) -> None: ...

    @abstractmethod
    def _delete(self, db: Db, table: str, by: Sequence[str], keys: Sequence[Row]) -> None: ...

    @abstractmethod
    def _insert_waiting(self, db: Db, rows: Sequence[WaitingRow]) -> None: ...

    @abstractmethod
    def _insert_flights(self, db: Db, rows: Sequence[FlightRow]) -> None:
        """Raced if something else is in flight to one of the vehicles meanwhile."""

    @abstractmethod
    def _insert_ended(self, db: Db, rows: Sequence[Row]) -> None: ...

    @abstractmethod
    def _superseded(self, db: Db, vins: Sequence[str]) -> set[str]:
        """Those for which newer data waits than what is in flight to them."""

    @abstractmethod
    def _epochs(self, db: Db, client_ids: Sequence[str]) -> dict[str, int]:
        """Of the sessions there are, which nobody takes until the commit."""


def _campaign_values(campaign: Campaign) -> tuple[object, ...]:
    values = list(msgspec.structs.astuple(campaign))
    values[CAMPAIGN_COLUMNS.index("state")] = str(campaign.state)
    return tuple(values)


_TRUTHS = tuple(at for at, field in enumerate(CAMPAIGN) if field.type is bool)
_BYTES = tuple(at for at, field in enumerate(CAMPAIGN) if field.type is bytes)


def _campaign_of(row: Row) -> Campaign:
    values = list(row)
    for at in _TRUTHS:
        values[at] = bool(values[at])
    for at in _BYTES:
        values[at] = bytes(values[at])
    given = dict(zip(CAMPAIGN_COLUMNS, values, strict=True))
    given["state"] = State(given["state"])
    return Campaign(**given)


def _part_of(row: Row) -> Part:
    number, seq, place, campaign, packed, merged = row
    return Part(number, seq, place, campaign, unpack_ids(bytes(packed)), merged or 0)


def _merged_part(row: Row) -> MergedPart:
    _, place, campaign, request_id, resend, waved, state = row
    return MergedPart(place, campaign, request_id, resend, bool(waved), State(state))


def _flight_of(row: Row) -> FlightRow:
    return FlightRow(*row)


def _waiting_row(row: Row) -> WaitingRow:
    return WaitingRow(*row)


def waiting_from(row: Row) -> Waiting:
    """A row of `WAITS`."""
    return waiting_of(WaitingRow(*row[:7]), row[7], row[8])


def _ended_of(row: Row) -> EndedRow:
    vin, place, end, reason, ended_at = row
    return EndedRow(vin, place, ENDS[end], reason, ended_at)
