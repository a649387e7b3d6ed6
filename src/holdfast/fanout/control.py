"""Who may be sent to, and when: a campaign's control, as a machine over the campaign's row.

    RUNNING ◀──▶ PAUSED ──▶ CANCELLED ──▶ CLOSED
       └──────────────────────▲    everything has ended ──▶ CLOSED, from wherever it is

It is given what was counted and what operators want; it answers with the row as it should be, which is stored only if
nobody has changed it meanwhile. `sending` is all that dispatch asks: it follows from the state, the time and the waves.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime

import msgspec
from msgspec.structs import replace

from holdfast.errors import Conflict
from holdfast.fanout.nouns import Campaign, Counts, State
from holdfast.fanout.requests import CampaignOptions, DailyWindow, Wave, options_of, parse_daytime, parse_time

EVERYBODY = (1 << 32) - 1
RAMP_FROM = 1.0
"""A ramp begins with so many a second."""
RAMP_STEPS = 20
BUSY_NOTED_SECS = 60.0

LEGAL: dict[State, set[State]] = {
    State.RUNNING: {State.PAUSED, State.CANCELLED, State.CLOSED},
    State.PAUSED: {State.RUNNING, State.CANCELLED, State.CLOSED},
    State.CANCELLED: {State.CLOSED},
    State.CLOSED: set(),
}


class Memory(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What it remembers, in the campaign's row."""

    started_at: float | None = None
    wave: int = 0
    cuts: tuple[int, ...] = ()
    """The last ticket of each wave."""
    sizes: tuple[int, ...] = ()
    """How many vehicles each wave has."""
    wave_at: float = 0.0
    ended_before: int = 0
    acked_before: int = 0
    """Counts when the wave began."""
    reached_at: float | None = None
    """When its threshold was reached."""
    advance: bool = False
    """An operator wants the next wave whatever the counts are."""
    busy_at: float = 0.0
    """When something was last known to be under way, to the minute."""
    opened: int = 0
    """How often it was allowed to send, or to send to more: whoever compares does not miss that it was held between."""
    ends_as: str = ""
    """How what waits ends when it is cancelled; empty: cancelled."""
    options: CampaignOptions | None = None
    """As an operator has changed them; batches are still compared with what the first one has asked for."""


# -- events ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Looked:
    """It is looked at, now and then."""

    counts: Counts


@dataclass(frozen=True, slots=True)
class Cut:
    """How many of its vehicles have tickets up to which: what waves need before the first begins."""

    tickets: Sequence[int]
    """All of them, sorted."""


@dataclass(frozen=True, slots=True)
class Pause:
    reason: str = "paused by an operator"


@dataclass(frozen=True, slots=True)
class Resume:
    pass


@dataclass(frozen=True, slots=True)
class Cancel:
    reason: str = "cancelled by an operator"


@dataclass(frozen=True, slots=True)
class Advance:
    """The next wave, whatever the counts are."""


@dataclass(frozen=True, slots=True)
class Edit:
    """Other options from now on; what is None stays."""

    rate_per_sec: float | None = None
    bytes_per_sec: float | None = None
    in_flight_max: int | None = None
    end_at: str | None = None
    abort_failed_percent: float | None = None
    waves: list[Wave] | None = None
    final: bool = False
    """No batch may join it any more: waves by percentage begin."""


Event = Looked | Cut | Pause | Resume | Cancel | Advance | Edit


# -- effects ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Save:
    """Compare and set; whoever is refused reads the row and begins anew."""

    campaign: Campaign
    before: Campaign


@dataclass(frozen=True, slots=True)
class CutWaves:
    """Its tickets are needed: answer Cut."""


@dataclass(frozen=True, slots=True)
class EndWaiting:
    """Deliveries of it that wait are to be ended, as so many, until none is left."""


Effect = Save | CutWaves | EndWaiting


class CampaignControl:
    """One campaign, as its row has it."""

    def __init__(self, campaign: Campaign, idle_secs: float):
        self.campaign, self._idle_secs = campaign, idle_secs
        self._memory = memory_of(campaign)
        self._options = self._memory.options or options_of(campaign)

    def handle(self, event: Event, now: float) -> list[Effect]:
        """`now`: the store's clock. Conflict: that cannot be done to a campaign in its state."""
        before, effects = self.campaign, list[Effect]()
        match event:
            case Looked(counts):
                self._look(counts, now, effects)
            case Cut(tickets):
                self._cut(tickets)
            case Pause(reason):
                self._move(State.PAUSED, reason)
            case Resume():
                if self.campaign.state is not State.RUNNING:
                    self._move(State.RUNNING, "")
            case Cancel(reason):
                if self.campaign.state is not State.CANCELLED:
                    self._move(State.CANCELLED, reason)
                effects.append(EndWaiting())
            case Advance():
                self._advance()
            case Edit():
                self._edit(event, now)
        self._follow(now)
        if self.campaign != before:
            self.campaign = replace(self.campaign, version=before.version + 1)
            effects.insert(0, Save(self.campaign, before))
        return effects

    # -- moves -----------------------------------------------------------------------------------------------

    def _move(self, state: State, reason: str) -> None:
        campaign = self.campaign
        if state is not campaign.state and state not in LEGAL[campaign.state]:
            raise Conflict(f"campaign {campaign.request_id}/{campaign.number} is {campaign.state}, and stays it")
        stays_open = campaign.open and state in (State.RUNNING, State.PAUSED)
        self.campaign = replace(campaign, state=state, reason=reason, open=stays_open)

    def _remember(self, **changes: object) -> None:
        self._memory = replace(self._memory, **changes)
        self.campaign = replace(self.campaign, control=msgspec.json.encode(self._memory))

    def _follow(self, now: float) -> None:
        """What follows from the state, the time and the waves."""
        campaign, options = self.campaign, self._options
        if campaign.state is State.RUNNING and self._memory.started_at is None and self._begun(now):
            self._remember(started_at=now)
        memory, campaign = self._memory, self.campaign
        sending = campaign.state is State.RUNNING and self._begun(now) and _in_window(options.windows, now)
        if campaign.waved:
            sending = sending and bool(memory.cuts)
        cut = _cut_of(memory) if campaign.waved else None
        if sending and (not campaign.sending or cut != campaign.cut):
            self._remember(opened=memory.opened + 1)
            campaign = self.campaign
        rate = _rate(options, memory, now)
        self.campaign = replace(
            campaign,
            sending=sending,
            cut=cut,
            rate_per_sec=rate,
            bytes_per_sec=options.bytes_per_sec,
            in_flight_max=options.in_flight_max,
        )

    def _begun(self, now: float) -> bool:
        start_at = self._options.start_at
        return start_at is None or parse_time("start_at", start_at) <= now

    def _is_over(self, counts: Counts, now: float) -> bool:
        """Nothing is to come: no batch, and nobody who wants those that failed to be tried again."""
        if not self.campaign.open and counts.acked == counts.targets:
            return True
        return now - max(self.campaign.batch_at, self._memory.busy_at) >= self._idle_secs

    # -- looking ---------------------------------------------------------------------------------------------

    def _look(self, counts: Counts, now: float, effects: list[Effect]) -> None:
        campaign, options = self.campaign, self._options
        if campaign.state is State.CLOSED:
            return
        if campaign.state is State.CANCELLED:
            if counts.under_way:
                if counts.waiting:
                    effects.append(EndWaiting())
            else:
                self._move(State.CLOSED, campaign.reason)
            return
        ended = counts.targets - counts.under_way
        if counts.under_way and now - self._memory.busy_at >= BUSY_NOTED_SECS:
            self._remember(busy_at=now)
        if options.end_at is not None and parse_time("end_at", options.end_at) <= now:
            self._remember(ends_as="expired")
            self._move(State.CANCELLED, f"its end has come: {options.end_at}")
            effects.append(EndWaiting())
        elif _too_many_failed(options, counts, ended):
            self._move(
                State.CANCELLED, f"{counts.failed} of {ended} failed: more than {options.abort_failed_percent} %"
            )
            effects.append(EndWaiting())
        elif not counts.under_way and self._is_over(counts, now):
            self._move(State.CLOSED, "every delivery has ended")
        elif campaign.waved and campaign.state is State.RUNNING and self._begun(now):
            self._look_at_waves(counts, ended, now, effects)

    def _look_at_waves(self, counts: Counts, ended: int, now: float, effects: list[Effect]) -> None:
        memory, waves = self._memory, self._options.waves
        if not memory.cuts:
            by_share = any(wave.percent is not None for wave in waves)
            if by_share and self.campaign.open:
                self.campaign = replace(self.campaign, reason="waves by percentage begin after the last batch (final)")
            elif counts.waiting:
                effects.append(CutWaves())
            return
        if memory.wave >= len(memory.cuts):
            return  # everybody's turn has come
        wave = waves[memory.wave] if memory.wave < len(waves) else Wave()
        if not memory.wave_at:
            self._remember(wave_at=now)
            memory = self._memory
        here, acked = ended - memory.ended_before, counts.acked - memory.acked_before
        share = 100.0 * acked / here if here else 100.0
        size = memory.sizes[memory.wave]
        enough = here >= min(wave.min_ended or size, size)
        if memory.advance or (enough and share >= wave.acked_percent):
            if memory.reached_at is None and not memory.advance:
                self._remember(reached_at=now)
                memory = self._memory
            if memory.advance or (memory.reached_at is not None and now - memory.reached_at >= wave.pause_secs):
                self._remember(
                    wave=memory.wave + 1,
                    wave_at=now,
                    ended_before=ended,
                    acked_before=counts.acked,
                    reached_at=None,
                    advance=False,
                )
                self.campaign = replace(self.campaign, reason="")
        elif here >= size:
            self._miss(f"wave {memory.wave + 1}: {share:.1f} % acked, expected {wave.acked_percent} %")
        elif wave.timeout_secs is not None and now - memory.wave_at >= wave.timeout_secs:
            self._miss(f"wave {memory.wave + 1}: {here} of {size} have ended after {wave.timeout_secs:.0f} s")

    def _miss(self, reason: str) -> None:
        self._move(State.PAUSED, reason)
        # Whoever resumes it gives the wave its time once more.
        self._remember(wave_at=0.0, reached_at=None)

    def _cut(self, tickets: Sequence[int]) -> None:
        if self._memory.cuts or not tickets:
            return
        cuts: list[int] = []
        sizes: list[int] = []
        total = 0
        for wave in self._options.waves:
            if wave.vehicles is not None:
                total += wave.vehicles
            else:
                total += max(1, round(len(tickets) * (wave.percent or 0.0) / 100))
            total = min(total, len(tickets))
            cuts.append(tickets[total - 1])
        for cut in cuts:
            # Two vehicles with one ticket are in one wave.
            sizes.append(bisect_right(tickets, cut) - sum(sizes))
        self._remember(cuts=tuple(cuts), sizes=tuple(sizes))

    def _advance(self) -> None:
        if not self.campaign.waved:
            raise Conflict(f"campaign {self.campaign.request_id}/{self.campaign.number} has no waves")
        if self.campaign.state is State.PAUSED:
            self._move(State.RUNNING, "")
        if self.campaign.state is not State.RUNNING:
            raise Conflict(f"campaign {self.campaign.request_id}/{self.campaign.number} is {self.campaign.state}")
        self._remember(advance=True)

    def _edit(self, edit: Edit, now: float) -> None:
        if self.campaign.state not in (State.RUNNING, State.PAUSED):
            raise Conflict(f"campaign {self.campaign.request_id}/{self.campaign.number} is {self.campaign.state}")
        changes = {
            name: value for name in edit.__slots__ if name != "final" and (value := getattr(edit, name)) is not None
        }
        if "waves" in changes and len(changes["waves"]) != len(self._options.waves):
            raise Conflict("waves: their thresholds can be edited, not how many there are")
        if edit.end_at is not None:
            parse_time("end_at", edit.end_at)
        if changes:
            self._options = replace(self._options, **changes)
            self._remember(options=self._options)
        if edit.final:
            self.campaign = replace(self.campaign, open=False)


def memory_of(campaign: Campaign) -> Memory:
    return msgspec.json.decode(campaign.control, type=Memory) if campaign.control else Memory()


def _cut_of(memory: Memory) -> int | None:
    if not memory.cuts:
        return None
    return memory.cuts[memory.wave] if memory.wave < len(memory.cuts) else EVERYBODY


def _rate(options: CampaignOptions, memory: Memory, now: float) -> float | None:
    """A ramp goes up in steps: every step is a change of the row."""
    rate = options.rate_per_sec
    if rate is None or options.ramp_secs is None or memory.started_at is None:
        return rate if rate is None or options.ramp_secs is None else min(RAMP_FROM, rate)
    share = int(RAMP_STEPS * (now - memory.started_at) / options.ramp_secs) / RAMP_STEPS
    return min(rate, max(RAMP_FROM, rate * share))


def _too_many_failed(options: CampaignOptions, counts: Counts, ended: int) -> bool:
    limit = options.abort_failed_percent
    return limit is not None and ended >= options.abort_min_ended and 100.0 * counts.failed / ended > limit


def _in_window(windows: Sequence[DailyWindow], now: float) -> bool:
    return not windows or any(_is_in(window, now) for window in windows)


def _is_in(window: DailyWindow, now: float) -> bool:
    at = datetime.fromtimestamp(now, UTC)
    seconds, day = at.hour * 3600 + at.minute * 60 + at.second, at.isoweekday()
    begin, end = parse_daytime(window.begin), parse_daytime(window.end)
    if begin < end:
        return begin <= seconds < end and (not window.days or day in window.days)
    if seconds >= begin:
        return not window.days or day in window.days
    yesterday = (day - 2) % 7 + 1  # over midnight it is still the day it began on
    return seconds < end and (not window.days or yesterday in window.days)
