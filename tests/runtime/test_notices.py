"""Notices about sessions: by kind, in order, and no listener disturbs another."""

from __future__ import annotations

import logging
from typing import Any

from holdfast.model import Stream
from holdfast.runtime.notices import Acked, Gone, Notices, Resumed, Subscribed

S = Stream("messages", 0, 1)


def test_a_listener_hears_its_kind_only_until_it_is_cancelled():
    notices, heard = Notices(), []
    cancel = notices.subscribe(Acked, heard.append)
    notices.emit(Subscribed("c", "a/#", 1))
    notices.emit(Acked("c", S, 7, 0))
    assert heard == [Acked("c", S, 7, 0)] and notices.wanted(Acked) and not notices.wanted(Gone)
    cancel()
    notices.emit(Acked("c", S, 8, 0x97))
    assert len(heard) == 1 and not notices.wanted(Acked)


def test_a_listener_that_raises_is_logged_and_the_others_hear_it(caplog):
    notices = Notices()
    heard: list[Any] = []

    def fails(notice: Any) -> None:
        raise KeyError("mine")

    notices.subscribe(Resumed, fails)
    notices.subscribe(Resumed, heard.append)
    with caplog.at_level(logging.ERROR):
        notices.emit(Resumed("c", True))
    assert heard == [Resumed("c", True)] and "KeyError" in caplog.text
