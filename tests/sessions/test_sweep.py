"""The sweep decides about rows that nobody is connected for; the clock says what time it is."""

from __future__ import annotations

from holdfast.sessions.clock import StoreClock
from holdfast.sessions.session import NEVER
from holdfast.sessions.sweep import EndedLeases, SweepSettings, UnheldRows, buried_before, due_writes, orphan_writes
from holdfast.sessions.table import SessionRow, StoredWill


def filters_of(data: bytes) -> list[str]:
    return data.decode().split()


def will(delay_secs: int) -> StoredWill:
    return StoredWill(topic="gone", payload=b"c", qos=1, retain=False, properties=b"", delay_secs=delay_secs)


def away(**fields: object) -> SessionRow:
    given: dict[str, object] = {"client_id": "c", "epoch": 6, "seq": 2, "connect": "t", "born": "t", **fields}
    return SessionRow(**given)  # type: ignore[arg-type]


def test_a_session_that_has_ended_is_deleted_and_its_will_goes_with_it() -> None:
    row = away(expiry_secs=10, left_at=100.0, due=110.0, will=will(60), will_due=160.0, subscriptions=b"a b")
    (found,) = due_writes([row], (), 110.0, filters_of)
    assert (found.expected, found.take, found.publish) == ((6, 2), True, will(60))
    assert found.row.dead
    assert (found.row.left_at, found.row.subscriptions, found.row.due) == (110.0, b"", None)
    assert found.unsubscribed == ["a", "b"]


def test_a_will_that_is_due_is_published_and_the_session_stays() -> None:
    row = away(expiry_secs=100, left_at=100.0, due=110.0, will=will(10), will_due=110.0, subscriptions=b"a")
    (found,) = due_writes([row], (), 110.0, filters_of)
    assert found.publish == will(10)
    assert (found.row.will, found.row.will_due, found.row.due, found.row.dead) == (None, None, 200.0, False)
    assert found.row.subscriptions == b"a"


def test_a_row_that_is_not_due_by_this_clock_is_left() -> None:
    row = away(expiry_secs=10, left_at=100.0, due=110.0)
    assert due_writes([row], (), 109.0, filters_of) == []
    assert due_writes([away(owner="A", lease=1, due=1.0)], (), 109.0, filters_of) == []


def test_orphans_are_away_from_now_on() -> None:
    row = away(owner="A", lease=1, expiry_secs=60, will=will(10))
    (found,) = orphan_writes([row], (), 200.0, 15.0, filters_of)
    assert (found.row.owner, found.row.lease, found.row.left_at, found.row.due) == (None, None, 200.0, 260.0)
    assert found.publish == will(10), "its delay has passed in the grace"


def test_a_longer_delay_counts_from_the_end_of_the_lease() -> None:
    row = away(owner="A", lease=1, expiry_secs=NEVER, will=will(20))
    (found,) = orphan_writes([row], (), 200.0, 15.0, filters_of)
    assert (found.publish, found.row.will_due, found.row.due) == (None, 205.0, 205.0)


def test_an_orphan_that_ends_with_its_connection_is_dead() -> None:
    row = away(owner="A", lease=1, expiry_secs=0, will=will(20))
    (found,) = orphan_writes([row], (), 200.0, 15.0, filters_of)
    assert found.row.dead
    assert found.publish == will(20)


def test_what_a_machine_here_works_on_is_left_to_it() -> None:
    """It may know more than the row: acknowledgements that are not saved yet, or a CONNECT that came in time."""
    row = away(expiry_secs=10, left_at=100.0, due=110.0)
    assert due_writes([row], {"c"}, 110.0, filters_of) == []
    assert orphan_writes([away(owner="A", lease=1)], {"c"}, 200.0, 15.0, filters_of) == []


def test_a_lease_is_over_after_the_grace() -> None:
    leases = EndedLeases(SweepSettings())
    assert leases.over({1, 2}, {2}, 100.0) == []
    assert leases.over({1, 2}, {2}, 114.9) == []
    assert leases.over({1, 2}, {2}, 115.0) == [1]
    assert leases.over({2}, {2}, 116.0) == []
    assert leases.since == {}, "no row names it any more"


def test_a_row_that_nobody_holds_is_written_away_if_it_was_so_before() -> None:
    looks = UnheldRows(SweepSettings())
    row = away(owner="A", lease=1, expiry_secs=60)
    assert looks.page([row], set(), 100.0, filters_of) == []
    looks.finish()
    moved = away(owner="A", lease=1, expiry_secs=60, epoch=7)
    assert looks.page([moved], set(), 160.0, filters_of) == []
    looks.finish()
    assert looks.page([moved], {"c"}, 220.0, filters_of) == [], "somebody is working on it"
    looks.finish()
    assert looks.page([moved], set(), 280.0, filters_of) == []
    looks.finish()
    (found,) = looks.page([moved], set(), 340.0, filters_of)
    assert (found.expected, found.row.lease) == ((7, 2), None)


def test_a_deletion_is_kept_for_a_while() -> None:
    assert buried_before(1000.0, SweepSettings()) == 700.0


# -- the store's clock -------------------------------------------------------------------------------------


def test_the_first_answer_is_believed() -> None:
    clock = StoreClock()
    assert not clock.known
    assert clock.heard(5000.0, 9.875, 10.125)
    assert clock.known
    assert clock.time(11.0) == 5001.0


def test_a_clock_two_hours_ahead_for_three_seconds_expires_nothing() -> None:
    clock = StoreClock()
    clock.heard(5000.0, 0.0, 0.0)
    for tick in range(1, 4):
        clock.heard(5000.0 + tick + 7200, tick, tick)
        assert clock.time(tick) <= 5000 + tick * 1.01
    clock.heard(5004.0, 4.0, 4.0)
    assert abs(clock.time(4.0) - 5004) < 0.05
    assert clock.time(8.0) == 5008.0


def test_an_answer_that_was_under_way_too_long_is_not_believed() -> None:
    clock = StoreClock(0.5)
    clock.heard(5000.0, 0.0, 0.0)
    assert not clock.heard(5001.0, 1.0, 61.0), "it was handled after a pause, and would set the clock back"
    assert clock.time(61.0) == 5061.0


def test_the_clock_never_goes_back() -> None:
    clock = StoreClock()
    clock.heard(5000.0, 0.0, 0.0)
    clock.heard(4000.0, 1.0, 1.0)
    assert clock.time(1.0) == 5001.0
    assert clock.time(3.0) == 5001 + 2 * 0.99
    clock.heard(5004.0, 4.0, 4.0)
    assert clock.time(4.0) == 5001 + 3 * 0.99
    assert clock.time(5.0) == 5001 + 3 * 0.99 + 1.01
