"""A node is emptied: groups first, then clients at a pace, and it says so when nobody is left."""

from __future__ import annotations

import pytest

from holdfast.errors import BrokenInvariant
from holdfast.machine import TICK
from holdfast.sessions.drain import (
    LEGAL,
    TURN_SECONDS,
    Begin,
    Drain,
    Emptied,
    HandedOver,
    HandOver,
    Look,
    Move,
    RefuseClients,
    State,
)


def begun(pace: float = 500.0) -> Drain:
    drain = Drain()
    assert drain.handle(Begin(pace, 5.0), 100.0) == [RefuseClients(), HandOver()]
    return drain


def moving(pace: float = 500.0) -> Drain:
    drain = begun(pace)
    assert drain.handle(HandedOver(), 100.0) == []
    return drain


def emptied(drain: Drain, clients: int, turn: float = TURN_SECONDS) -> float:
    """How long it takes until all are gone."""
    now, left = 100.0, clients
    while drain.state is State.MOVING:
        now += turn
        for effect in drain.handle(Look(left, left), now):
            if isinstance(effect, Move):
                left -= effect.count
    return now - 100.0


def test_no_client_is_moved_before_the_groups_are() -> None:
    drain = begun()
    assert drain.handle(Look(10, 10), 101.0) == []
    assert drain.deadline == 105.0
    drain.handle(HandedOver(), 102.0)
    assert drain.state is State.MOVING
    assert drain.deadline == 102.0


def test_leaders_that_take_too_long_hold_nobody_up() -> None:
    drain = begun()
    drain.handle(TICK, 104.9)
    assert drain.state is State.HANDING_OVER
    drain.handle(TICK, 105.0)
    assert drain.state is State.MOVING


@pytest.mark.parametrize(("clients", "pace", "seconds"), [(5000, 500.0, 10.0), (20, 2.0, 10.0), (10, 0.5, 20.0)])
def test_clients_go_at_the_pace(clients: int, pace: float, seconds: float) -> None:
    assert emptied(moving(pace), clients) == pytest.approx(seconds, abs=0.25 + 1 / pace)


def test_a_node_that_stood_still_does_not_catch_up_all_at_once() -> None:
    drain = moving(500.0)
    assert drain.handle(Look(9000, 9000), 160.0) == [Move(100)]


def test_those_who_were_sent_away_and_are_not_saved_are_waited_for() -> None:
    drain = moving()
    assert drain.handle(Look(3, 0), 100.1) == []
    assert drain.handle(Look(0, 0), 100.2) == [Emptied()]
    assert drain.handle(Look(0, 0), 100.3) == []


def test_asked_again_it_changes_its_pace() -> None:
    drain = moving(1.0)
    assert drain.handle(Look(10, 10), 100.1) == []
    assert drain.handle(Begin(100.0, 5.0), 100.1) == []
    assert drain.handle(Look(10, 10), 100.2) == [Move(10)]


def test_it_never_goes_back() -> None:
    for one in State:
        for to in State:
            drain = Drain()
            drain.state = one
            if to in LEGAL[one]:
                drain._move(to)
            else:
                with pytest.raises(BrokenInvariant):
                    drain._move(to)
