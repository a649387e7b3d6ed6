"""What operators ask of fan-out, and want of it: plain data in and out, for the API and the command line."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Sequence
from datetime import UTC, datetime
from math import inf
from typing import Any

import msgspec

from holdfast.errors import UnknownCampaign, Unprocessable
from holdfast.fanout import control as fc
from holdfast.fanout import history
from holdfast.fanout.nouns import DELIVERIES, Campaign, Counts, End, Hint, InFlight, State, UnderWay, Waiting, seq_of
from holdfast.fanout.requests import check_request_id, check_vin, options_of
from holdfast.fanout.table import PART_IDS_MAX, EndedRow
from holdfast.fanout.why import Known, why
from holdfast.log import Log
from holdfast.model import Beginning
from holdfast.runtime.fanout import FanoutHost
from holdfast.runtime.fanout_keeper import FanoutKeeper
from holdfast.sessions.table import SessionTable
from holdfast.topics import TopicFilter

HISTORY_MAX = 100
DRY_RUN_AT_ONCE = 500


class FanoutAdmin:
    """One per node."""

    def __init__(self, host: FanoutHost, keeper: FanoutKeeper, log: Log, sessions: SessionTable):
        self._host, self._keeper, self._log, self._sessions = host, keeper, log, sessions
        self._table = host.table

    # -- campaigns -------------------------------------------------------------------------------------------

    async def find(self, request_id: str, number: int | None = None) -> Campaign:
        check_request_id(request_id)
        campaign = await self._host.ask(self._table.find, request_id, number)
        if campaign is None:
            raise UnknownCampaign(
                f"there is no campaign {request_id}"
                if number is None
                else f"there is no campaign {request_id}/{number}"
            )
        return campaign

    async def show(self, request_id: str, number: int | None = None) -> dict[str, Any]:
        campaign = await self.find(request_id, number)
        return await self._host.ask(self._show, campaign)

    def _show(self, campaign: Campaign) -> dict[str, Any]:
        counts = self._table.counts([campaign.id]).get(campaign.id, Counts())
        found = campaign_row(campaign, counts)
        found["repeated"] = self._table.repeated(campaign.id)
        found["unmerged"] = self._table.unmerged_of(campaign.id)
        found["failures"] = self._table.reasons(campaign.id)
        memory = fc.memory_of(campaign)
        options = memory.options or options_of(campaign)
        if options.waves:
            found["wave"] = {"now": memory.wave + 1, "of": len(options.waves) + 1, "sizes": list(memory.sizes)}
        found["options"] = msgspec.to_builtins(options)
        return found

    async def page(self, before: int, limit: int, states: Collection[State]) -> list[dict[str, Any]]:
        def read() -> list[dict[str, Any]]:
            campaigns = self._table.page(before, limit, states)
            counts = self._table.counts([campaign.id for campaign in campaigns]) if campaigns else {}
            return [campaign_row(campaign, counts.get(campaign.id, Counts())) for campaign in campaigns]

        return await self._host.ask(read)

    async def order(self, request_id: str, number: int | None, event: fc.Event) -> dict[str, Any]:
        campaign = await self.find(request_id, number)
        changed = await self._keeper.order(campaign.id, event)
        return await self._host.ask(self._show, changed)

    async def cancel_vins(self, request_id: str, number: int | None, vins: Sequence[str]) -> dict[str, Any]:
        campaign = await self.find(request_id, number)
        ended = await self._keeper.cancel_vins(campaign, [check_vin(vin) for vin in vins], "cancelled by an operator")
        return {**await self._host.ask(self._show, campaign), "ended": ended}

    async def retry(self, request_id: str, number: int | None, vins: Sequence[str] | None) -> dict[str, Any]:
        """Those that have ended without being acked wait again: all of them, or these."""
        campaign = await self.find(request_id, number)
        again = 0
        if vins is not None:
            for at in range(0, len(vins), PART_IDS_MAX):
                again += await self._retry(campaign, [check_vin(vin) for vin in vins[at : at + PART_IDS_MAX]])
        else:
            after = ""
            while True:
                rows = await self._host.ask(self._table.ended, campaign.id, _NOT_ACKED, after, PART_IDS_MAX)
                again += await self._retry(campaign, [row.vin for row in rows])
                if len(rows) < PART_IDS_MAX:
                    break
                after = rows[-1].vin
        return {**await self._host.ask(self._show, campaign), "retried": again}

    async def _retry(self, campaign: Campaign, vins: Sequence[str]) -> int:
        if not vins:
            return 0
        waiting = await self._host.change(self._table.retry, campaign.id, vins)
        self._host.trigger(waiting)
        self._keeper.changed(Hint(merged=True))
        return len(waiting)

    async def deliveries(
        self, request_id: str, number: int | None, states: Collection[End | UnderWay], after: str, limit: int
    ) -> list[dict[str, Any]]:
        """By VIN: those that have ended, or those that are at one place on their way."""
        campaign = await self.find(request_id, number)
        places = [state for state in states if isinstance(state, UnderWay)]
        if places:
            if len(states) > 1:
                raise Unprocessable(f"state: {places[0].value} is asked for by itself, got {len(states)} states")
            vins = await self._host.ask(self._table.under_way, campaign.id, places[0], after, limit)
            return [{"vin": vin, "state": places[0].value, "reason": "", "ended_at": None} for vin in vins]
        ends = [state for state in states if isinstance(state, End)]
        rows = await self._host.ask(self._table.ended, campaign.id, ends, after, limit)
        return [_ended_row(row) for row in rows]

    async def collect(self) -> dict[str, Any]:
        return {"removed": await self._keeper.collect()}

    # -- before it is sent -----------------------------------------------------------------------------------

    async def dry_run(self, vins: Iterable[str]) -> dict[str, Any]:
        """Of these vehicles: how many are connected here, and how many have something waiting already."""
        found = {"ids": 0, "connected": 0, "offline": 0, "overlapping": 0}
        some: list[str] = []
        for vin in vins:
            some.append(check_vin(vin))
            if len(some) == DRY_RUN_AT_ONCE:
                await self._dry_run(some, found)
                some = []
        await self._dry_run(some, found)
        return found

    async def _dry_run(self, vins: list[str], found: dict[str, int]) -> None:
        connected = sum(1 for vin in vins if self._host.vehicle(vin) is not None)
        busy = await self._host.ask(self._table.look_up, vins, 1) if vins else {}
        found["ids"] += len(vins)
        found["connected"] += connected
        found["offline"] += len(vins) - connected
        found["overlapping"] += len(busy)

    # -- vehicles --------------------------------------------------------------------------------------------

    async def vehicle(self, vin: str) -> dict[str, Any]:
        known = await self._known(check_vin(vin))
        ended = await self._host.ask(self._history, vin)
        here = known.vehicle.client_id if known.vehicle is not None else known.connected_as
        return {
            "vin": vin,
            "connected": here is not None or known.elsewhere is not None,
            "client_id": here,
            "node": self._host.node_id if here is not None else known.elsewhere,
            "in_flight": _delivery(known, known.in_flight) if known.in_flight is not None else None,
            "waiting": [_delivery(known, one) for one in known.waiting],
            "awaiting_result": [
                {**_of(known, one.campaign), "until": _time(one.until), "acked_at": _time(one.acked_at)}
                for one in known.awaiting
            ],
            "ended": ended,
        }

    async def why(self, vin: str) -> dict[str, Any]:
        answer = why(await self._known(check_vin(vin)))
        return {"vin": vin, "reason": answer.reason, "says": answer.says, "do": answer.do}

    async def retire(self, vin: str) -> dict[str, Any]:
        return {"vin": vin, "ended": await self._keeper.retire(check_vin(vin), "vehicle retired")}

    async def _known(self, vin: str) -> Known:
        in_flight, waiting, awaiting = await self._host.ask(self._table.vehicle, vin)
        of = {one.campaign for one in waiting} | {one.campaign for one in awaiting}
        if in_flight is not None:
            of.add(in_flight.campaign)
        campaigns = await self._host.ask(self._table.campaigns, of) if of else {}
        vehicle = self._host.vehicle(vin)
        rows = await self._host.ask(self._sessions.read, [vin])
        row = rows.get(vin)
        owner = row.owner if row is not None and not row.dead else None
        if in_flight is not None and in_flight.node != self._host.node_id and vehicle is None:
            owner = in_flight.node
        here = owner in (None, self._host.node_id)
        return Known(
            vin,
            in_flight,
            waiting,
            awaiting,
            campaigns,
            vehicle,
            self._host.connected_as(vin) or (vin if owner == self._host.node_id else None),
            None if here or vehicle is not None else owner,
            self._host.now,
        )

    def _history(self, vin: str) -> list[dict[str, Any]]:
        """Its last deliveries that have ended, the newest first."""
        wanted = TopicFilter(history.topic_of(vin))
        rows: deque[tuple[datetime, history.Ended]] = deque(maxlen=HISTORY_MAX)
        for stream, offset in sorted(self._log.positions(DELIVERIES, Beginning(), wanted).items()):
            end = self._log.head(stream).next_offset
            while offset < end:
                reading = self._log.read(stream, offset, topics=wanted)
                for chunk in reading.chunks:
                    columns = chunk.batch.select(["time", "topic", "payload"]).to_pydict()
                    for at, topic, payload in zip(*columns.values(), strict=True):
                        rows.append((at, history.decode(topic, payload)))
                offset = reading.next_offset
        found = []
        campaigns: dict[int, Campaign] = {}
        for at, ended in rows:
            if ended.campaign not in campaigns:
                campaigns.update(self._table.campaigns([ended.campaign]))
            campaign = campaigns.get(ended.campaign)
            found.append(
                {
                    "request_id": campaign.request_id if campaign is not None else None,
                    "number": campaign.number if campaign is not None else None,
                    "campaign": ended.campaign,
                    "state": ended.end.value,
                    "reason": ended.reason,
                    "attempts": ended.attempts,
                    "sent_at": _time(ended.sent_at) if ended.sent_at else None,
                    "ended_at": at.isoformat(timespec="milliseconds"),
                    "result": ended.result.decode(errors="replace") if ended.result else None,
                }
            )
        return found[::-1]


_NOT_ACKED = (End.FAILED, End.EXPIRED, End.SUPERSEDED, End.CANCELLED)


def campaign_row(campaign: Campaign, counts: Counts) -> dict[str, Any]:
    return {
        "request_id": campaign.request_id,
        "number": campaign.number,
        "id": campaign.id,
        "state": campaign.state.value,
        "reason": campaign.reason,
        "open": campaign.open,
        "sending": campaign.sending,
        "data_sha1": campaign.sha1.hex(),
        "targets": counts.targets,
        "counts": msgspec.to_builtins(counts),
        "created_at": _time(campaign.created_at),
        "batch_at": _time(campaign.batch_at),
    }


def _ended_row(row: EndedRow) -> dict[str, Any]:
    return {"vin": row.vin, "state": row.end.value, "reason": row.reason, "ended_at": _time(row.ended_at)}


def _of(known: Known, campaign_id: int) -> dict[str, Any]:
    campaign = known.campaigns.get(campaign_id)
    if campaign is None:
        return {"campaign": campaign_id}
    return {"request_id": campaign.request_id, "number": campaign.number, "campaign": campaign_id}


def _delivery(known: Known, one: Waiting | InFlight) -> dict[str, Any]:
    return {
        **_of(known, one.campaign),
        "seq": seq_of(one.place),
        "attempts": one.attempts,
        "expires": None if one.expires == inf else _time(one.expires),
    }


def _time(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="milliseconds")
