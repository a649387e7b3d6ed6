"""Scenes: what happens to one client in a row, since chance alone seldom brings it together."""

from __future__ import annotations

Scene = tuple[str, ...]
"""Names of what a workload can do, a short while after each other."""

WAIT = "wait"
"""Nothing, for longer than a short while."""

NEW_STREAMS_WHILE_AWAY: Scene = ("away", "seal", "traffic", "stop")
A_LIE_BEFORE_A_SUBSCRIBE: Scene = ("lie", "subscribe_in_commit")
AGAIN_IN_COMMIT: Scene = ("slow_commits", "send", "reconnect")
BACK_BEFORE_A_CRASH: Scene = ("traffic", "reconnect", WAIT, "crash")
HALF_DONE_AT_A_CRASH: Scene = ("traffic", "stall", "traffic", "crash", "traffic")
BACK_AND_OTHER_FILTERS: Scene = ("away", "burst", "traffic", "back", "subscribe", "unsubscribe")
EARLIER_THAN_WHAT_WAITS: Scene = ("stall", "burst", "traffic", "subscribe_earlier")
EARLIER_WITH_MUCH_UNDER_WAY: Scene = ("silence", "traffic", WAIT, "subscribe_earlier", "subscribe_again", WAIT, "crash")
OVER_AND_CRASH: Scene = ("traffic", "start_over", "crash")
CRASH_AND_OVER: Scene = ("silence", "traffic", "silence", "crash", "start_over")
MOVED_WHILE_IT_WAITS: Scene = ("stall", "burst", "traffic", "skip_ahead")
GONE_WHILE_IT_WAITS: Scene = ("stall", "burst", "traffic", "unsubscribe")
MORE_THAN_IS_TAKEN: Scene = ("slow_commits", "flood")

SCENES = [
    NEW_STREAMS_WHILE_AWAY,
    A_LIE_BEFORE_A_SUBSCRIBE,
    AGAIN_IN_COMMIT,
    BACK_BEFORE_A_CRASH,
    HALF_DONE_AT_A_CRASH,
    BACK_AND_OTHER_FILTERS,
    EARLIER_THAN_WHAT_WAITS,
    EARLIER_WITH_MUCH_UNDER_WAY,
    OVER_AND_CRASH,
    CRASH_AND_OVER,
    MOVED_WHILE_IT_WAITS,
    GONE_WHILE_IT_WAITS,
    MORE_THAN_IS_TAKEN,
]
