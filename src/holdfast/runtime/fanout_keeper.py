"""What has to be done about fan-out now and then: by every node for itself, and by one of them for all.

    every node    parts that others have merged, campaigns that have begun to send: their vehicles here are triggered
    the keeper    campaigns' control, what has expired or was cancelled, what dead nodes have left in flight, collection

The keeper is whoever holds the row that says so; what it decides about a campaign is refused if another one is by then.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Collection, Iterable, Sequence
from math import inf

from holdfast.errors import Conflict, StoreError, UnknownCampaign
from holdfast.fanout import control as fc
from holdfast.fanout.nouns import Campaign, Counts, End, Hint, InFlight, State, Waiting, ticket_of
from holdfast.fanout.table import Change, Doom, FanoutTable, Finish, Part, Return, Verdict
from holdfast.runtime.fanout import FanoutHost
from holdfast.runtime.fanout_events import FanoutEvents
from holdfast.settings import FanoutSettings

logger = logging.getLogger("holdfast.fanout")

KEEPER_SECS, KEEP_EVERY_SECS, LOOK_EVERY_SECS = 6.0, 2.0, 1.0
PARTS_AT_ONCE = 20
CHANGES_AT_ONCE = 250
"""In one transaction: publishers wait for the same writer."""
REST_SHARE = 2.0
"""After a step of upkeep, so many times as long as it took."""
MERGE_LOOK_SECS = 0.05
UPLOAD_SECS = 3_600.0
KEY_SECS = 7 * 86_400.0
PAYLOAD_SECS = 3_600.0
"""A payload that was sent apart is kept for so long without a request that refers to it."""
COLLECTED_AT_ONCE = 500
SHARE_SECS = 0.5
"""So long one thing is done before the next one has its turn."""
FORGOTTEN_SECS = 30.0
"""What has been in flight for so long, and nobody knows of, is taken back."""
ACTIVE = (State.RUNNING, State.PAUSED, State.CANCELLED)
PAGE = 500
TRIES = 20


class FanoutKeeper:
    """One per node."""

    def __init__(
        self,
        node_id: str,
        settings: FanoutSettings,
        host: FanoutHost,
        alive_leases: Callable[[], set[int]],
        look_for_unmerged: Callable[[], None],
        tell_others: Callable[[Hint], None],
        events: FanoutEvents,
    ):
        self._events = events
        self._node_id, self._settings, self._host = node_id, settings, host
        self._table: FanoutTable = host.table
        self._alive_leases, self._look_for_unmerged, self._tell_others = alive_leases, look_for_unmerged, tell_others
        self._loop = asyncio.get_running_loop()
        self._merged = 0
        """Parts up to this one were seen."""
        self._sending: dict[int, tuple[bool, int]] = {}
        """Campaigns as they were last seen: whether they send, and how often that has begun, or grown."""
        self._hinted = asyncio.Event()
        self.epoch: int | None = None
        """Of this node as the keeper; None: it is not."""
        self._collect_at = self._own_at = 0.0
        self.collect_secs = settings.collect_secs
        self._ending: dict[int, int] = {}
        """Campaigns whose deliveries are being ended, and up to which part they are."""
        self.collected = 0

    # -- hints -----------------------------------------------------------------------------------------------

    def deliver(self, name: str, hint: Hint) -> None:
        """From another node."""
        self._hinted.set()

    def changed(self, hint: Hint) -> None:
        """Something was changed here: nobody else knows."""
        self._hinted.set()
        self._tell_others(hint)

    async def begin(self) -> None:
        self._merged = await self._host.ask(self._table.last_merged)

    async def follow(self) -> None:
        """For as long as the node lives: what others have done."""
        while True:
            try:
                async with asyncio.timeout(self._settings.sweep_secs):
                    await self._hinted.wait()
            except TimeoutError:
                pass
            self._hinted.clear()
            try:
                await self._look_at_parts()
                await self._look_at_campaigns()
                if self._loop.time() >= self._own_at:
                    self._own_at = self._loop.time() + FORGOTTEN_SECS
                    await self._take_back_own()
            except StoreError as error:  # whatever it was: it is all looked at again
                logger.warning("what others have done for fan-out could not be read: %s", error)

    async def _look_at_parts(self) -> None:
        while True:
            parts = await self._host.ask(self._table.parts_since, self._merged, PARTS_AT_ONCE)
            for part in parts:
                self._host.trigger(part.ids)
                self._merged = max(self._merged, part.merged)
                await asyncio.sleep(0)
            if len(parts) < PARTS_AT_ONCE:
                return

    async def _look_at_campaigns(self) -> None:
        """Whoever waits for a campaign that has begun to send is told."""
        now: dict[int, tuple[bool, int]] = {}
        for campaign in await self._active((State.RUNNING,)):
            state = now[campaign.id] = (campaign.sending, fc.memory_of(campaign).opened)
            if campaign.sending and self._sending.get(campaign.id) != state:
                await self._trigger(campaign)
        self._sending = now

    async def _trigger(self, campaign: Campaign) -> None:
        if not self._host.vehicles():
            return  # whoever comes looks for itself
        async for part in self._parts(campaign.id):
            self._host.trigger(part.ids)
            await asyncio.sleep(0)

    async def _parts(self, campaign: int, after: int = 0) -> AsyncIterator[Part]:
        while True:
            parts: list[Part] = await self._host.ask(self._table.parts_of, campaign, after, PARTS_AT_ONCE)
            for part in parts:
                yield part
                after = part.number
            if len(parts) < PARTS_AT_ONCE:
                return

    async def _active(self, states: Collection[State]) -> list[Campaign]:
        found: list[Campaign] = []
        before = 0
        while True:
            page = await self._host.ask(self._table.page, before, PAGE, states)
            found += page
            if len(page) < PAGE:
                return found
            before = page[-1].id

    # -- what operators want ---------------------------------------------------------------------------------

    async def order(self, campaign_id: int, event: fc.Event) -> Campaign:
        """Durable when this returns. Conflict: that cannot be done to a campaign in its state."""
        for _ in range(TRIES):
            campaign = (await self._host.ask(self._table.campaigns, [campaign_id])).get(campaign_id)
            if campaign is None:
                raise UnknownCampaign(f"there is no campaign {campaign_id}")
            machine = fc.CampaignControl(campaign, self._settings.campaign_idle_secs)
            saved = await self._perform(machine, machine.handle(event, self._host.now), None)
            if saved is not None:
                return saved
        raise StoreError(f"campaign {campaign_id} is changed by somebody else all the time")

    async def _perform(
        self, machine: fc.CampaignControl, effects: Sequence[fc.Effect], epoch: int | None
    ) -> Campaign | None:
        """None: somebody else has changed it meanwhile."""
        for effect in effects:
            match effect:
                case fc.Save(campaign, before):
                    if not await self._host.change(self._table.change_campaign, campaign, epoch):
                        return None
                    self._events.changed(before, campaign)
                    self.changed(Hint(campaigns=(campaign.id,)))
                case fc.CutWaves():
                    tickets = await self._tickets(machine.campaign)
                    cut = machine.handle(fc.Cut(tickets), self._host.now)
                    return await self._perform(machine, cut, epoch)
                case fc.EndWaiting():
                    if epoch is not None:  # in steps, by the keeper
                        await self._end_waiting(machine.campaign)
        return machine.campaign

    async def _tickets(self, campaign: Campaign) -> list[int]:
        tickets: set[tuple[int, str]] = set()
        async for part in self._parts(campaign.id):
            tickets |= await self._host.ask(_tickets_of, campaign.id, part.ids)
        return sorted(ticket for ticket, _ in tickets)

    async def cancel_vins(self, campaign: Campaign, vins: Collection[str], reason: str) -> int:
        """Those of them that wait end as cancelled; how many."""
        ended, wanted = 0, set(vins)
        async for part in self._parts(campaign.id):
            here = wanted.intersection(part.ids)
            if here:
                await self._until_merged(part)
                waiting = await self._host.ask(self._table.waiting_of, part, here)
                ended += await self._finish(waiting, End.CANCELLED, reason)
        for vin in sorted(wanted):
            while True:
                in_flight, waiting, _ = await self._host.ask(self._table.vehicle, vin)
                mine = [one for one in waiting if one.campaign == campaign.id]
                ended += await self._finish(mine, End.CANCELLED, reason)
                if in_flight is None or in_flight.campaign != campaign.id or await self._doom(in_flight):
                    break
        return ended

    async def _doom(self, flight: InFlight) -> bool:
        """What is on its way may still be answered; False: it has moved meanwhile."""
        (verdict,) = await self._host.change(self._table.commit, [Doom(flight)])
        return verdict is Verdict.DONE

    async def _until_merged(self, part: Part) -> None:
        """Until then nobody would find what waits of it."""
        while not part.merged:
            self._look_for_unmerged()
            await asyncio.sleep(MERGE_LOOK_SECS)
            parts = await self._host.ask(self._table.parts_of, part.campaign, part.number - 1, 1)
            if not parts or parts[0].number != part.number:
                return  # its campaign was collected meanwhile
            (part,) = parts

    async def retire(self, vin: str, reason: str) -> int:
        """A vehicle that will never come: everything that waits for it ends; how many."""
        while (await self._host.ask(self._table.unmerged, 1))[0]:
            self._look_for_unmerged()
            await asyncio.sleep(MERGE_LOOK_SECS)
        ended = 0
        while True:
            in_flight, waiting, awaiting = await self._host.ask(self._table.vehicle, vin)
            changes: list[Change] = [Finish(one, End.CANCELLED, reason) for one in waiting]
            changes += [Finish(one, End.CANCELLED, reason) for one in awaiting]
            if not changes and (in_flight is None or await self._doom(in_flight)):
                return ended
            await self._commit(changes)
            ended += len(changes)

    # -- the keeper ------------------------------------------------------------------------------------------

    async def keep(self) -> None:
        """For as long as the node lives: become the keeper, and do what it does."""
        keep_at = 0.0
        while True:
            begun = self._loop.time()
            try:
                if self.epoch is None or begun >= keep_at:
                    self.epoch = await self._host.change(self._table.keep, self._node_id, KEEPER_SECS)
                    keep_at = begun + KEEP_EVERY_SECS
                if self.epoch is not None:
                    await self._look_after(self.epoch)
            except StoreError as error:
                self.epoch = None
                logger.warning("fan-out was not looked after: %s", error)
            await asyncio.sleep(max(0.05, LOOK_EVERY_SECS - (self._loop.time() - begun)))

    async def _look_after(self, epoch: int) -> None:
        active = await self._active(ACTIVE)
        counts = await self._host.ask(self._table.counts, [campaign.id for campaign in active]) if active else {}
        for campaign in active:
            machine = fc.CampaignControl(campaign, self._settings.campaign_idle_secs)
            try:
                looked = machine.handle(fc.Looked(counts.get(campaign.id, Counts())), self._host.now)
                await self._perform(machine, looked, epoch)
            except Conflict as error:
                logger.error("campaign %s/%d: %s", campaign.request_id, campaign.number, error)
        self._look_for_unmerged()
        await self._end_expired()
        await self._end_overdue()
        await self._take_back()
        if self._loop.time() >= self._collect_at and not await self.collect(SHARE_SECS):
            self._collect_at = self._loop.time() + self.collect_secs

    async def _end_waiting(self, campaign: Campaign) -> None:
        """Some of what waits, going on where the last round came to: others' control does not wait for a million."""
        end = End.EXPIRED if fc.memory_of(campaign).ends_as == "expired" else End.CANCELLED
        begun = self._loop.time()
        async for part in self._parts(campaign.id, self._ending.pop(campaign.id, 0)):
            await self._end_part(part, end, campaign.reason[:30])
            if self._loop.time() - begun >= SHARE_SECS:
                self._ending[campaign.id] = part.number
                return

    async def _end_part(self, part: Part, end: End, reason: str) -> None:
        for at in range(0, len(part.ids), 1_000):
            waiting = await self._host.ask(self._table.waiting_of, part, part.ids[at : at + 1_000])
            await self._finish(waiting, end, reason)

    async def _finish(self, waiting: Sequence[Waiting], end: End, reason: str) -> int:
        await self._commit([Finish(one, end, reason) for one in waiting])
        return len(waiting)

    async def _commit(self, changes: Sequence[Change]) -> None:
        for at in range(0, len(changes), CHANGES_AT_ONCE):
            begun = self._loop.time()
            await self._host.change(self._table.commit, changes[at : at + CHANGES_AT_ONCE])
            await asyncio.sleep(REST_SHARE * (self._loop.time() - begun))

    async def _end_expired(self) -> None:
        begun = self._loop.time()
        for part in await self._host.ask(self._table.expired_parts, self._host.now, PARTS_AT_ONCE):
            await self._end_part(part, End.EXPIRED, "waited too long")
            await self._host.change(self._table.part_done, part.number)
            if self._loop.time() - begun >= SHARE_SECS:
                return

    async def _end_overdue(self) -> None:
        begun = self._loop.time()
        while overdue := await self._host.ask(self._table.overdue, self._host.now, CHANGES_AT_ONCE):
            await self._commit([Finish(one, End.FAILED, "no result in time") for one in overdue])
            if self._loop.time() - begun >= SHARE_SECS:
                return

    async def _take_back(self) -> None:
        """What nodes that are gone have left in flight waits again."""
        after = ""
        while True:
            orphans: list[InFlight] = await self._host.ask(self._orphans, after)
            if not orphans:
                return
            await self._commit([Return(one, one.attempts) for one in orphans])
            self._host.trigger([one.vin for one in orphans])
            after = orphans[-1].vin

    async def _take_back_own(self) -> None:
        """What is in flight from here and nobody here knows of: it landed after its commit had been given up."""
        after = ""
        while own := await self._host.ask(self._own, after):
            old = [one for one in own if one.sent_at < self._host.now - FORGOTTEN_SECS and self._host.idle(one.vin)]
            await self._commit([Return(one, one.attempts) for one in old])
            self._host.trigger([one.vin for one in old])
            after = own[-1].vin

    def _own(self, after: str) -> list[InFlight]:
        """On a thread: a page of what this node has in flight."""
        lease = self._host.lease
        others = self._alive_leases() - {lease}
        return [one for one in self._table.orphans(others, after, CHANGES_AT_ONCE) if one.lease == lease]

    def _orphans(self, after: str) -> list[InFlight]:
        """On a thread. A node may have come after we looked who is alive: what it has in flight is its own."""
        found = self._table.orphans(self._alive_leases(), after, CHANGES_AT_ONCE)
        alive = self._alive_leases() if found else set()
        return [one for one in found if one.lease not in alive]

    # -- collection ------------------------------------------------------------------------------------------

    async def collect(self, seconds: float = inf) -> int:
        """In bounded steps, with a rest after each; how much was removed. 0: nothing is left to remove."""
        now, removed, until = self._host.now, 0, self._loop.time() + seconds
        while True:
            begun = self._loop.time()
            dropped = await self._host.change(self._table.drop_uploads, now - UPLOAD_SECS, PARTS_AT_ONCE)
            dropped += await self._host.change(
                self._table.collect,
                now - self._settings.keep_secs,
                now - PAYLOAD_SECS,
                now - KEY_SECS,
                COLLECTED_AT_ONCE,
            )
            removed += dropped
            self.collected += dropped
            if not dropped or begun >= until:
                return removed
            await asyncio.sleep(REST_SHARE * (self._loop.time() - begun))


def _tickets_of(campaign: int, vins: Iterable[str]) -> set[tuple[int, str]]:
    return {(ticket_of(campaign, vin), vin) for vin in vins}
