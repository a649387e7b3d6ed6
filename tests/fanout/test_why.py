"""`why vin` names one reason, the right one, and a command that exists."""

from __future__ import annotations

import re
import shlex
from dataclasses import replace
from typing import Any

import msgspec
import pytest
from typer.main import get_command

from holdfast.cli import app
from holdfast.fanout.control import Memory
from holdfast.fanout.nouns import Awaiting, Campaign, InFlight, Sent, State, Waiting, place_of
from holdfast.fanout.requests import CampaignOptions, DailyWindow, Wave
from holdfast.fanout.vehicles import Vehicle
from holdfast.fanout.why import Known, why

NOW = 1_000.0
HERE = Vehicle("v1", "client 1", "b", 1, 1 << 20, None)


def campaign(id_: int = 1, **given: Any) -> Campaign:
    chosen: dict[str, Any] = {"state": State.RUNNING, "open": True, "sending": True, **given}
    return Campaign(id=id_, request_id=f"task_x_{id_}", number=1, sha1=b"", **chosen)


def waiting(id_: int = 1, seq: int = 1, priority: int = 4, **given: Any) -> Waiting:
    return Waiting("v1", place_of(priority, seq), id_, 1, **given)


def known(*deliveries: Waiting, campaigns: tuple[Campaign, ...] = (), **given: Any) -> Known:
    found = {one.id: one for one in campaigns or (campaign(),)}
    return replace(Known("v1", None, deliveries, (), found, HERE, None, None, NOW), **given)


SENT = Sent("client 1", "b", 5)
FLIGHT = InFlight("v1", place_of(4, 1), 1, 1, NOW + 9, 0, SENT, 1, "n1", 1, NOW - 5)
OPTIONS = CampaignOptions(start_at="2099-01-01T00:00:00Z")
WINDOWS = CampaignOptions(windows=[DailyWindow("22:00", "23:00")])
WAVES = CampaignOptions(waves=[Wave(percent=5)])

CASES: list[tuple[str, Known]] = [
    ("nothing", known()),
    ("awaiting_result", known(awaiting=(Awaiting("v1", 1, 1, 1, 0, NOW, NOW + 9),))),
    ("unanswered", known(in_flight=FLIGHT)),
    ("returning", known(in_flight=FLIGHT, vehicle=None)),
    ("unanswered", known(in_flight=FLIGHT, vehicle=None, elsewhere="n2")),
    ("moving", known(waiting())),
    ("offline", known(waiting(), vehicle=None)),
    ("elsewhere", known(waiting(), vehicle=None, elsewhere="n2")),
    ("not_subscribed", known(waiting(), vehicle=None, connected_as="client 1")),
    ("not_subscribed", known(waiting(), vehicle=HERE._replace(requests=frozenset({"task_other_1"})))),
    ("paused", known(waiting(), campaigns=(campaign(state=State.PAUSED, sending=False, reason="wave 1"),))),
    ("cancelled", known(waiting(), campaigns=(campaign(state=State.CANCELLED, sending=False),))),
    ("backing_off", known(waiting(not_before=NOW + 5, attempts=1))),
    ("limited", known(waiting(), campaigns=(campaign(rate_per_sec=1.0),))),
    ("not_begun", known(waiting(), campaigns=(campaign(sending=False, settings=msgspec.json.encode(OPTIONS)),))),
    ("outside_window", known(waiting(), campaigns=(campaign(sending=False, settings=msgspec.json.encode(WINDOWS)),))),
    (
        "waves_wait",
        known(waiting(), campaigns=(campaign(sending=False, waved=True, settings=msgspec.json.encode(WAVES)),)),
    ),
    (
        "later_wave",
        known(
            waiting(),
            campaigns=(campaign(waved=True, cut=-1, control=msgspec.json.encode(Memory(cuts=(0,), sizes=(1,)))),),
        ),
    ),
    ("unknown", known(waiting(7))),
]


@pytest.mark.parametrize(("reason", "given"), CASES, ids=[reason for reason, _ in CASES])
def test_the_reason(reason: str, given: Known) -> None:
    assert why(given).reason == reason


def test_what_waits_behind_one_that_backs_off_does_not_move() -> None:
    campaigns = (campaign(1), campaign(2), campaign(3))
    refused, behind = waiting(1, 1, not_before=NOW + 5, attempts=2), waiting(2, 2)
    answer = why(known(refused, behind, campaigns=campaigns))
    assert answer.reason == "backing_off"
    assert answer.says.startswith("task_x_1/1 was refused 2 times")
    assert why(known(refused, waiting(3, 3, priority=3), campaigns=campaigns)).reason == "moving"


def test_one_that_could_go_is_what_counts() -> None:
    campaigns = (campaign(1, state=State.PAUSED, sending=False), campaign(2))
    assert why(known(waiting(1, 1), waiting(2, 2), campaigns=campaigns)).reason == "moving"


@pytest.mark.parametrize(("reason", "given"), CASES, ids=[reason for reason, _ in CASES])
def test_the_command_exists_with_its_options(reason: str, given: Known) -> None:
    words = shlex.split(why(given).do)
    if not words:
        return
    assert words.pop(0) == "holdfast"
    command: Any = get_command(app)
    while getattr(command, "commands", None):
        command = command.commands[words.pop(0)]
    known_options = {option for parameter in command.params for option in parameter.opts}
    assert {word for word in words if re.match("--", word)} <= known_options


def test_names_that_a_shell_would_take_apart_are_quoted() -> None:
    named = known(waiting(), vehicle=None, connected_as="a client; rm -rf")
    assert why(named).do == "holdfast session show 'a client; rm -rf'"
