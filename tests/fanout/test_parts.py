"""Small decisions of fan-out: what goes next, whose a result is, how parts are merged, and why nothing moves."""

from __future__ import annotations

from itertools import pairwise
from math import inf
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.fanout.choice import choose
from holdfast.fanout.history import Ended, decode, encode, topic_of
from holdfast.fanout.merge import steps
from holdfast.fanout.nouns import Awaiting, Campaign, End, InFlight, Sent, State, Waiting, place_of
from holdfast.fanout.results import Result, correlation_of, settle, what_is_wrong
from holdfast.fanout.table import Part
from holdfast.fanout.vehicles import Vehicle
from holdfast.fanout.why import Known, why

NOW = 1_000.0


def campaign(number: int = 1, request_id: str = "", **more: Any) -> Campaign:
    given = {"state": State.RUNNING, "open": True, "sending": True, **more}
    return Campaign(id=number, request_id=request_id or f"task_c_{number}", number=1, sha1=b"", **given)


def waiting(seq: int, campaign: int = 1, *, priority: int = 4, **more: Any) -> Waiting:
    return Waiting("v", place_of(priority, seq), campaign, payload=campaign, **more)


VEHICLE = Vehicle("v", "client", "born", epoch=3, packet_bytes_max=1_000, requests=None)
CAMPAIGNS = {n: campaign(n) for n in range(1, 6)}
SIZES = dict.fromkeys(range(1, 6), 100)


def chosen(*queue: Waiting, vehicle: Vehicle | None = VEHICLE, limited: tuple[int, ...] = (), **more: Any) -> Any:
    ordered = sorted(queue, key=lambda one: one.place)
    given = {"campaigns": CAMPAIGNS, "sizes": SIZES, **more}
    return choose(ordered, given["campaigns"], given["sizes"], vehicle, limited, NOW)


def test_first_in_first_out_and_higher_lanes_first() -> None:
    low, first, second = waiting(1, 1, priority=0), waiting(2, 2), waiting(3, 3)
    assert chosen(second, first, low).chosen == first
    assert chosen(second, low, waiting(9, 4, priority=9)).chosen.campaign == 4


def test_an_attempt_that_waits_blocks_its_lane_only() -> None:
    refused = waiting(1, 1, attempts=1, not_before=NOW + 5)
    behind, lower = waiting(2, 2), waiting(3, 3, priority=1)
    choice = chosen(refused, behind, lower)
    assert choice.chosen == lower and choice.later == NOW + 5
    assert chosen(refused, behind).chosen is None


def test_what_cannot_go_blocks_nobody() -> None:
    first, second = waiting(1, 1), waiting(2, 2)
    assert chosen(first, second, limited=(1,)).chosen == second
    assert chosen(first, second, limited=(1,)).limited == 1
    only = VEHICLE._replace(requests=frozenset({"task_c_2"}))
    assert chosen(first, second, vehicle=only).chosen == second


def test_what_ended_while_it_waited_is_finished_on_the_way() -> None:
    queue = (waiting(1, 1, expires=NOW), waiting(2, 2), waiting(3, 3), waiting(4, 4))
    choice = chosen(*queue, sizes={2: 5_000, 4: 10})
    assert [(f.seen.campaign, f.end) for f in choice.finished] == [
        (1, End.EXPIRED),
        (2, End.FAILED),
        (3, End.FAILED),
    ]
    assert choice.chosen == queue[3]
    assert [f.reason for f in choice.finished[1:]] == ["packet too large", "payload missing"]


def test_what_the_session_may_have_half_of_goes_before_everything() -> None:
    kept = waiting(5, 1, sent=Sent("client", "born", 7))
    assert chosen(kept, waiting(1, 2, priority=9)).chosen == kept
    other = waiting(5, 1, sent=Sent("client", "another", 7))
    assert chosen(other, waiting(1, 2)).chosen.campaign == 2
    nameless = VEHICLE._replace(born="")
    assert chosen(waiting(5, 1, sent=Sent("client", "", 7)), waiting(1, 2), vehicle=nameless).chosen.campaign == 2


def test_what_came_back_is_superseded_by_newer_data() -> None:
    campaigns = {1: campaign(1, "task_a_1"), 2: campaign(2, "task_a_1"), 3: campaign(3, "task_a_1", replaces=False)}
    back = waiting(1, 1, sent=Sent("client", "born", 7))
    choice = chosen(back, waiting(2, 2), campaigns=campaigns)
    assert [f.end for f in choice.finished] == [End.SUPERSEDED] and choice.chosen.campaign == 2
    assert chosen(back, waiting(2, 3), campaigns=campaigns).chosen == back
    assert chosen(waiting(1, 1), waiting(2, 2), campaigns=campaigns).chosen.campaign == 1, "only what was in flight"


def in_flight(seq: int = 1, number: int = 1) -> InFlight:
    return InFlight("v", place_of(4, seq), number, 1, inf, 0, Sent("client", "born", 1), 3, "n", 1, NOW)


def awaiting(seq: int, number: int) -> Awaiting:
    return Awaiting("v", place_of(4, seq), number, 1, 0, NOW, NOW + 60)


def test_a_result_belongs_to_the_delivery_it_names() -> None:
    campaigns = {1: campaign(1, "task_a_1"), 2: campaign(2, "task_a_1")}
    two = [awaiting(1, 1), awaiting(2, 2)]
    named = Result("v", "task_a_1", b"ok", correlation_of(2, place_of(4, 2)))
    found = settle(named, None, two, [], campaigns)
    assert found is not None and found.seen == two[1] and found.end is End.ACKED
    assert settle(named._replace(correlation=None), None, two, [], campaigns) is None, "nobody knows which"
    alone = settle(named._replace(correlation=None), None, two[:1], [], campaigns)
    assert alone is not None and alone.seen == two[0]
    assert settle(named._replace(correlation=b"x"), None, two, [], campaigns) is None
    assert settle(named._replace(request_id="task_b_1", correlation=None), None, two[:1], [], campaigns) is None
    back = waiting(3, 2, sent=Sent("client", "born", 7))
    lost = settle(named._replace(correlation=correlation_of(2, back.place)), None, [], [waiting(1, 1), back], campaigns)
    assert lost is not None and lost.seen == back, "it was sent, and its connection was lost"
    assert settle(named._replace(correlation=None), None, [], [waiting(1, 1)], campaigns) is None, "it never was"
    early = settle(named._replace(correlation=None), in_flight(), [], [], campaigns)
    assert early is not None and isinstance(early.seen, InFlight)


@pytest.mark.parametrize(
    ("payload", "wrong"),
    [
        (b"", None),
        (b"done", None),
        (b"\xff", None),
        (b"[1]", None),
        (b'{"status": "ok"}', None),
        (b'{"code": 0}', None),
        (b'{"code": 7}', "result: code 7"),
        (b'{"status": "FAILED"}', "result: failed"),
        (b'{"success": false, "reason": "no room"}', "result: no room"),
        (b'{"success": true, "code": true}', None),
    ],
)
def test_results_that_say_it_went_wrong(payload: bytes, wrong: str | None) -> None:
    assert what_is_wrong(payload) == wrong


def test_an_ended_delivery_is_small() -> None:
    ended = Ended(
        "WVWZZZ1K000000001", 12_345, place_of(4, 9_999_999), End.FAILED, "refused with 0x83", 5, 1.8e9, b"x" * 99
    )
    payload = encode(ended)
    assert len(payload) <= 64
    assert decode(topic_of(ended.vin), payload) == ended._replace(result=b"x" * 24)


@given(
    st.lists(st.sets(st.text("abcé€", min_size=1, max_size=3), min_size=1, max_size=8), min_size=1, max_size=4),
    st.integers(1, 5),
)
def test_a_run_has_every_row_once_in_order_and_vehicles_whole(batches: list[set[str]], rows: int) -> None:
    parts = [Part(n + 1, n + 1, place_of(4, n), 1, sorted(vins)) for n, vins in enumerate(batches)]
    run = list(steps(parts, "", rows))
    every = [row for step in run for row in step.rows]
    assert every == sorted((vin, part.number) for part in parts for vin in part.ids)
    assert [step.done for step in run] == [False] * (len(run) - 1) + [True]
    assert [step.after for step in run[1:]] == [step.last for step in run[:-1]]
    for one, other in pairwise(run):
        assert one.rows[-1][0] < other.rows[0][0]
    for at, step in enumerate(run[:-1]):  # taken up by somebody else
        rest = [row for later in run[at + 1 :] for row in later.rows]
        assert [row for later in steps(parts, step.last, rows) for row in later.rows] == rest


def known(**changes: Any) -> Known:
    given = {"in_flight": None, "waiting": [waiting(1)], "awaiting": [], "campaigns": CAMPAIGNS, "vehicle": VEHICLE}
    given |= {"connected_as": "v", "elsewhere": None, **changes}
    return Known(vin="v", now=NOW, **given)


PAUSED, LIMITED = campaign(state=State.PAUSED, sending=False), campaign(rate_per_sec=1.0)


@pytest.mark.parametrize(
    ("changes", "reason", "do"),
    [
        ({"waiting": []}, "nothing", ""),
        ({"in_flight": in_flight()}, "unanswered", ""),
        ({"in_flight": in_flight(), "vehicle": None}, "returning", ""),
        ({"waiting": [], "awaiting": [awaiting(1, 1)]}, "awaiting_result", ""),
        ({"vehicle": None, "connected_as": None}, "offline", ""),
        ({"vehicle": None}, "not_subscribed", "holdfast session show v"),
        ({"vehicle": None, "elsewhere": "n2"}, "elsewhere", "holdfast node ls"),
        ({"vehicle": VEHICLE._replace(requests=frozenset({"task_x_1"}))}, "not_subscribed", ""),
        (
            {"campaigns": {1: campaign(state=State.PAUSED, sending=False)}},
            "paused",
            "holdfast fanout resume task_c_1 --number 1",
        ),
        ({"campaigns": {1: campaign(state=State.CANCELLED, sending=False)}}, "cancelled", ""),
        ({"campaigns": {1: campaign(waved=True, cut=0)}}, "later_wave", "holdfast fanout advance task_c_1 --number 1"),
        (
            {"campaigns": {1: campaign(rate_per_sec=1.0)}},
            "limited",
            "holdfast fanout edit task_c_1 --number 1 --rate N",
        ),
        ({"waiting": [waiting(1, attempts=2, not_before=NOW + 9)]}, "backing_off", ""),
        ({}, "moving", ""),
    ],
)
def test_there_is_one_reason(changes: dict[str, Any], reason: str, do: str) -> None:
    answer = why(known(**changes))
    assert (answer.reason, answer.do) == (reason, do) and answer.says
