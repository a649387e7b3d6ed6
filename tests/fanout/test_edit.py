"""What an operator may change of a campaign, and what requests may ask of one."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest

from holdfast.errors import Conflict, Unprocessable
from holdfast.fanout import control as fc
from holdfast.fanout.nouns import Campaign, Counts, State
from holdfast.fanout.requests import INT_MAX, CampaignOptions, Wave, parse, parse_waves

NOW = 1_000.0


def control(options: CampaignOptions, **given: Any) -> fc.CampaignControl:
    campaign = Campaign(
        id=1,
        request_id="task_x_1",
        number=1,
        sha1=b"",
        state=State.RUNNING,
        open=True,
        sending=False,
        waved=bool(options.waves),
        settings=msgspec.json.encode(options),
        batch_at=NOW,
        **given,
    )
    return fc.CampaignControl(campaign, 3600.0)


def test_waves_by_percentage_begin_when_no_batch_may_join_any_more() -> None:
    machine = control(CampaignOptions(waves=[Wave(percent=50)]))
    counts = fc.Looked(Counts(waiting=4))
    assert fc.CutWaves() not in machine.handle(counts, NOW)
    (saved,) = machine.handle(fc.Edit(final=True), NOW)
    assert isinstance(saved, fc.Save) and not saved.campaign.open
    assert fc.CutWaves() in machine.handle(counts, NOW + 1)


def test_an_edit_that_changes_nothing_writes_nothing() -> None:
    machine = control(CampaignOptions(rate_per_sec=5))
    machine.handle(fc.Looked(Counts(waiting=1)), NOW)
    assert machine.handle(fc.Edit(), NOW) == []
    assert machine.handle(fc.Edit(rate_per_sec=6), NOW) != []


def test_waves_stay_as_many_as_they_were() -> None:
    machine = control(CampaignOptions(waves=[Wave(vehicles=5)]))
    with pytest.raises(Conflict, match="not how many"):
        machine.handle(fc.Edit(waves=[Wave(vehicles=5), Wave(vehicles=6)]), NOW)


@pytest.mark.parametrize(
    "waves", [[{}], [{"percent": 5, "vehicles": 5}], [{"percent": 101}], [{"size": 5}], ["5%"], [5]]
)
def test_waves_that_make_no_sense(waves: list[Any]) -> None:
    with pytest.raises(Unprocessable, match="waves"):
        parse_waves(waves)


@pytest.mark.parametrize(
    "campaign",
    [
        {"number": INT_MAX + 1},
        {"number": 10**40},
        {"in_flight_max": INT_MAX + 1},
        {"abort_min_ended": 2**64},
        {"waves": [{"vehicles": INT_MAX + 1}]},
        {"waves": [{"vehicles": 1, "min_ended": INT_MAX + 1}]},
    ],
)
def test_numbers_that_no_store_can_hold(campaign: dict[str, Any]) -> None:
    request = {"request_id": "task_x_1", "ids": ["v1"], "data": "x", "campaign": campaign}
    with pytest.raises(Unprocessable, match="campaign"):
        parse(json.dumps(request).encode(), NOW)
