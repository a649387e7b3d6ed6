"""Retained messages: the last word on each topic, for whoever subscribes later."""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable, Iterator

from holdfast.log.contract import Retained
from holdfast.model import RETAIN, Batch, Micros
from holdfast.mqtt.properties import expiry_of
from holdfast.mqtt.trie import TopicTree
from holdfast.sessions.rows import Rows

STEPS_MAX = 1_024
"""How many levels of topics one `take` looks at, and four more for each row that it may return."""


class RetainedMessages:
    """In memory, by topic; the store holds the same and is changed in the publish's own transaction."""

    def __init__(self, stored: Iterable[Retained]):
        self._topics = TopicTree()
        self._last: dict[str, Retained] = {}
        self._expiries = Expiries()
        for message in stored:
            self.keep(message)

    def __len__(self) -> int:
        return len(self._last)

    def keep(self, message: Retained) -> None:
        topic = message.topic
        if message.payload:
            self._last[topic] = message
            self._topics.add(topic)
            self._expiries.set(topic, _expires_at(message))
        elif topic in self._last:
            self._drop(topic)

    def _drop(self, topic: str) -> Retained:
        self._topics.discard(topic)
        self._expiries.set(topic, math.inf)
        return self._last.pop(topic)

    def see(self, rows: Rows) -> None:
        """Take what a delivered block says of retained messages, whichever process stored it."""
        flags = rows.flags
        if (flags if isinstance(flags, int) else max(flags)) < RETAIN:
            return
        for at, topic in enumerate(rows.topics):
            flag = flags if isinstance(flags, int) else flags[at]
            if flag & RETAIN:
                publisher = rows.publishers if isinstance(rows.publishers, str) else rows.publishers[at]
                extra = rows.properties[at] if rows.properties is not None else None
                time = rows.times if isinstance(rows.times, int) else rows.times[at]
                self.keep(Retained(topic, rows.payloads[at], publisher, flag, extra, time))

    def select(self, filter_text: str) -> Selection:
        """What a new subscriber is sent: the topics that are here now, each as it is when its turn comes."""
        return Selection(self._last, self._topics.walk(filter_text))

    def one(self, topic: str, time: Micros, now: float) -> Rows | None:
        """What is retained of this topic, if it is of that time; None: it is gone, or another one."""
        message = self._last.get(topic)
        return None if message is None or message.time != time or now >= _expires_at(message) else _rows([message])

    def purge(self, now: float, most: int) -> list[tuple[str, Micros]]:
        """Let go of expired messages, no more than `most`: which, and of what time, for the store to forget.

        Each is let go of within `Expiries.STEP_SECONDS` of its expiry; until then nobody is sent it.
        """
        gone: list[tuple[str, Micros]] = []
        while len(gone) < most and (topic := self._expiries.take_due(now)) is not None:
            gone.append((topic, self._drop(topic).time))
        return gone


class Selection:
    """A walk through the retained messages that a filter matches, as far as there is room for at a time.

    What is replaced while it waits is sent as it is then; what is cleared, or set anew after it was cleared, is not
    sent: whoever subscribed before that has the publish itself. Nothing is sent twice.
    """

    def __init__(self, last: dict[str, Retained], steps: Iterator[str | None]):
        self._last = last
        self._steps = steps

    def take(self, rows_max: int, bytes_max: int, now: float) -> Rows | None:
        """The next rows, without a stream; None when there are no more.

        It costs in proportion to `rows_max`. So there may be no rows in it although there are more to come: then
        nothing that matches was among the topics that were looked at.
        """
        found: list[Retained] = []
        size, steps, finished = 0, STEPS_MAX + 4 * rows_max, True
        for topic in self._steps:
            if topic is not None:
                message = self._last[topic]
                if now < _expires_at(message):
                    found.append(message)
                    size += len(message.payload)
            steps -= 1
            if len(found) >= rows_max or size >= bytes_max or not steps:
                finished = False
                break
        if finished and not found:
            return None
        return _rows(found)


def _rows(messages: list[Retained]) -> Rows:
    batch = Batch(
        topics=[m.topic for m in messages],
        payloads=[m.payload for m in messages],
        publishers=[m.publisher for m in messages],
        flags=[m.flags for m in messages],
        properties=[m.properties for m in messages],
    )
    return Rows(None, range(len(messages)), batch, [m.time for m in messages])


class Expiries:
    """Which topics expire when, to the next full STEP_SECONDS."""

    STEP_SECONDS = 8

    def __init__(self) -> None:
        self._step_of: dict[str, int] = {}
        self._topics: dict[int, dict[str, None]] = {}
        """By step: never an empty one."""
        self._steps: list[int] = []
        """A heap of the steps, and of some that are empty by now."""

    def set(self, topic: str, at: float) -> None:
        """This topic's message expires then, or never; whatever was said of it before is forgotten."""
        old = self._step_of.pop(topic, None)
        if old is not None:
            del self._topics[old][topic]
            if not self._topics[old]:
                del self._topics[old]
        if at == math.inf:
            return
        step = self._step_of[topic] = math.ceil(at / self.STEP_SECONDS)
        if step not in self._topics:
            self._topics[step] = {}
            heapq.heappush(self._steps, step)
            if len(self._steps) > 2 * len(self._topics) + 64:
                self._steps = sorted(self._topics)
        self._topics[step][topic] = None

    def take_due(self, now: float) -> str | None:
        """A topic whose time has come, which is then forgotten here; None: there is none just now."""
        while self._steps and self._steps[0] * self.STEP_SECONDS <= now:
            step = self._steps[0]
            topics = self._topics.get(step)
            if topics is None:
                heapq.heappop(self._steps)
                continue
            topic, _ = topics.popitem()
            del self._step_of[topic]
            if not topics:
                del self._topics[step]
            return topic
        return None


def _expires_at(message: Retained) -> float:
    life = expiry_of(message.properties) if message.properties else None
    return math.inf if life is None else message.time / 1e6 + life
