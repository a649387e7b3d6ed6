"""The feed's sleep and the watch, by themselves."""

from __future__ import annotations

import pytest

from holdfast.metadata import Deleted, Entry, Put
from holdfast.metadata.feed import Pause
from holdfast.metadata.watch import Watch


def test_a_nudge_that_comes_as_the_sleep_ends_is_not_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    pause = Pause()
    with monkeypatch.context() as patch:

        def time_is_up(_: float | None) -> list[object]:
            pause.nudge()
            return []

        patch.setattr(pause._selector, "select", time_is_up)
        assert not pause.sleep(0.1)
    assert pause.sleep(0)
    assert not pause.sleep(0)
    pause.close()
    pause.nudge()


def test_a_slow_reader_gets_the_newest_event_of_each_key_in_order_of_versions() -> None:
    watch = Watch("/", 0, ())
    watch.offer([Put("/a", b"1", version=1), Put("/b", b"2", version=2), Put("/a", b"3", version=3)])
    watch.offer([Deleted("/b", 4), Put("/c", b"5", version=5)])
    assert [watch.get(0) for _ in range(4)] == [
        Put("/a", b"3", version=3),
        Deleted("/b", 4),
        Put("/c", b"5", version=5),
        None,
    ]


def test_an_event_is_told_once() -> None:
    watch = Watch("/a", 3, ())
    watch.offer([Put("/a", b"", version=3), Put("/b", b"", version=4), Put("/a", b"new", version=5)])
    watch.offer([Put("/a", b"new", version=5)])
    assert watch.get(0) == Put("/a", b"new", version=5)
    assert watch.get(0) is None


def test_resync_tells_what_is_new_and_what_is_gone() -> None:
    watch = Watch("/", 5, ["/gone", "/same", "/changed"])
    watch.resync({"/same": Entry(b"", 2), "/changed": Entry(b"x", 7), "/new": Entry(b"y", 6)}, 9)
    assert [watch.get(0) for _ in range(4)] == [
        Put("/new", b"y", version=6),
        Put("/changed", b"x", version=7),
        Deleted("/gone", 9),
        None,
    ]
    watch.resync({"/same": Entry(b"", 2), "/changed": Entry(b"x", 7)}, 12)
    assert [watch.get(0), watch.get(0)] == [Deleted("/new", 12), None]
