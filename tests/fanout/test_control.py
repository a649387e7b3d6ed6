"""A campaign's control as a machine: states, times, waves and what follows from them."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

from holdfast.errors import Conflict
from holdfast.fanout import control as fc
from holdfast.fanout.nouns import Campaign, Counts, State
from holdfast.fanout.requests import CampaignOptions, first_state

NOW = 1_800_000_000.0  # 2027-01-15, a Friday, at 8 o'clock UTC
IDLE = 100.0


def campaign(**options: Any) -> Campaign:
    asked = msgspec.convert(options, CampaignOptions)
    begun = first_state(asked, "replace", NOW)
    return replace(begun, id=1, request_id="task_a_1", number=1, created_at=NOW, batch_at=NOW)


class Control:
    """Gives a machine its row anew for every event, as a keeper does."""

    def __init__(self, row: Campaign):
        self.row, self.effects = row, list[fc.Effect]()

    def __call__(self, event: fc.Event, now: float = NOW) -> Campaign:
        machine = fc.CampaignControl(self.row, IDLE)
        self.effects = machine.handle(event, now)
        for effect in self.effects:
            if isinstance(effect, fc.Save):
                assert effect.campaign.version == self.row.version + 1 and effect.before == self.row
                self.row = effect.campaign
        return self.row

    def look(self, now: float = NOW, **counts: int) -> Campaign:
        return self(fc.Looked(Counts(**counts)), now)


def test_it_pauses_resumes_and_is_cancelled() -> None:
    control = Control(campaign())
    assert control(fc.Pause()).state is State.PAUSED and not control.row.sending
    assert control(fc.Resume()).state is State.RUNNING and control.row.sending
    assert control(fc.Cancel()).state is State.CANCELLED and not control.row.sending and not control.row.open
    assert fc.EndWaiting() in control.effects
    with pytest.raises(Conflict, match="cancelled"):
        control(fc.Resume())
    with pytest.raises(Conflict):
        control(fc.Pause())
    control.look(waiting=3)
    assert control.effects == [fc.EndWaiting()], "until none waits"
    assert control.look(in_flight=1, cancelled=3).state is State.CANCELLED
    assert control.look(cancelled=4).state is State.CLOSED
    with pytest.raises(Conflict, match="closed"):
        control(fc.Cancel())


def test_looking_changes_nothing_that_need_not_change() -> None:
    control = Control(campaign())
    control.look(waiting=5)
    control.look(NOW + 1, waiting=5)
    assert control.effects == []


def test_it_is_closed_when_nothing_is_to_come() -> None:
    control = Control(campaign())
    control.look(NOW, waiting=1)
    assert control.look(NOW + IDLE - 1, acked=1).state is State.RUNNING
    assert control.look(NOW + IDLE + 1, acked=1).state is State.CLOSED
    final = Control(replace(campaign(), open=False))
    assert final.look(NOW + 1, acked=1).state is State.CLOSED
    failed = Control(replace(campaign(), open=False))
    assert failed.look(NOW + 1, acked=1, failed=1).state is State.RUNNING, "somebody may want it tried again"
    assert failed.look(NOW + IDLE + 1, acked=1, failed=1).state is State.CLOSED


def test_it_begins_and_ends_when_it_was_told_to() -> None:
    control = Control(campaign(start_at="2027-01-15T09:00:00Z", end_at="2027-01-15T10:00:00Z"))
    assert not control.look(NOW, waiting=2).sending
    assert control.look(NOW + 3600, waiting=2).sending
    ended = control.look(NOW + 7200, waiting=2)
    assert ended.state is State.CANCELLED and fc.memory_of(ended).ends_as == "expired"


@pytest.mark.parametrize(
    ("window", "hours", "sends"),
    [
        ({"begin": "07:00", "end": "09:00"}, 0, True),
        ({"begin": "07:00", "end": "08:00"}, 0, False),
        ({"begin": "22:00", "end": "09:00"}, 0, True),
        ({"begin": "22:00", "end": "07:00"}, 0, False),
        ({"begin": "07:00", "end": "09:00", "days": [5]}, 0, True),
        ({"begin": "07:00", "end": "09:00", "days": [6]}, 0, False),
        ({"begin": "22:00", "end": "09:00", "days": [4]}, 0, True),
        ({"begin": "22:00", "end": "09:00", "days": [5]}, 0, False),
        ({"begin": "22:00", "end": "09:00", "days": [5]}, 15, True),
    ],
)
def test_windows(window: dict[str, Any], hours: int, sends: bool) -> None:
    assert Control(campaign(windows=[window])).look(NOW + 3600 * hours, waiting=1).sending is sends


def test_a_ramp_goes_up_to_the_rate() -> None:
    control = Control(campaign(rate_per_sec=1000, ramp_secs=100))
    rates = [control.look(NOW + after, waiting=9).rate_per_sec for after in (0, 50, 100, 500)]
    assert rates == [1.0, 500.0, 1000.0, 1000.0]


def test_too_many_failures_end_it() -> None:
    control = Control(campaign(abort_failed_percent=10, abort_min_ended=10))
    assert control.look(waiting=5, acked=3, failed=6).state is State.RUNNING
    assert control.look(waiting=5, acked=9, failed=1).state is State.RUNNING
    aborted = control.look(waiting=5, acked=8, failed=2)
    assert aborted.state is State.CANCELLED and "2 of 10 failed" in aborted.reason


def test_waves_by_share_wait_for_the_last_batch() -> None:
    control = Control(campaign(waves=[{"percent": 50}]))
    control.look(waiting=4)
    assert not control.row.sending and "final" in control.row.reason
    control.row = replace(control.row, open=False)
    control.look(waiting=4)
    assert fc.CutWaves() in control.effects
    control(fc.Cut([10, 20, 30, 40]))
    assert control.row.sending and control.row.cut == 20


def test_waves_go_on_when_enough_has_ended_well() -> None:
    waves = [
        {"vehicles": 2, "acked_percent": 50, "min_ended": 1, "pause_secs": 10},
        {"vehicles": 1, "timeout_secs": 30},
    ]
    control = Control(replace(campaign(waves=waves), open=False))
    control(fc.Cut([10, 20, 30, 40]))
    assert control.row.cut == 20
    control.look(NOW, waiting=2, in_flight=2)
    assert control.look(NOW + 1, waiting=2, in_flight=1, acked=1).cut == 20, "the pause comes first"
    assert control.look(NOW + 11, waiting=2, in_flight=1, acked=1).cut == 30
    missed = control.look(NOW + 50, waiting=1, in_flight=2, acked=1)
    assert missed.state is State.PAUSED and "wave 2" in missed.reason
    assert control(fc.Advance(), NOW + 51).state is State.RUNNING
    assert control.look(NOW + 52, waiting=1, in_flight=2, acked=1).cut == fc.EVERYBODY


def test_a_wave_that_went_badly_pauses_it() -> None:
    control = Control(replace(campaign(waves=[{"percent": 50, "acked_percent": 90}]), open=False))
    control(fc.Cut([10, 20, 30, 40]))
    control.look(waiting=2, in_flight=2)
    missed = control.look(waiting=2, acked=1, failed=1)
    assert missed.state is State.PAUSED and "50.0 % acked, expected 90" in missed.reason


def test_two_vehicles_with_one_ticket_are_in_one_wave() -> None:
    control = Control(replace(campaign(waves=[{"vehicles": 1}, {"vehicles": 1}]), open=False))
    control(fc.Cut([10, 10, 30]))
    assert fc.memory_of(control.row).sizes == (2, 0)


def test_what_is_edited_is_not_what_batches_are_compared_with() -> None:
    control = Control(campaign(rate_per_sec=5))
    before = control.row.settings
    edited = control(fc.Edit(rate_per_sec=50, in_flight_max=7))
    assert (edited.rate_per_sec, edited.in_flight_max, edited.settings) == (50, 7, before)
    assert control.look(NOW + 1, waiting=1).rate_per_sec == 50
    with pytest.raises(Conflict, match="no waves"):
        control(fc.Advance())
