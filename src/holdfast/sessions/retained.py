"""Retained messages: the last word on each topic, for whoever subscribes later."""

from __future__ import annotations

from collections.abc import Iterable

from holdfast.log.contract import Retained
from holdfast.model import RETAIN, Batch
from holdfast.mqtt.properties import expiry_of
from holdfast.mqtt.trie import TopicTree
from holdfast.sessions.rows import Rows


class RetainedMessages:
    """In memory, by topic; the store holds the same and is changed in the publish's own transaction."""

    def __init__(self, stored: Iterable[Retained]):
        self._topics = TopicTree()
        self._last: dict[str, Retained] = {}
        for message in stored:
            self.keep(message)

    def __len__(self) -> int:
        return len(self._last)

    def keep(self, message: Retained) -> None:
        if message.payload:
            self._last[message.topic] = message
            self._topics.add(message.topic)
        elif self._last.pop(message.topic, None) is not None:
            self._topics.discard(message.topic)

    def see(self, rows: Rows) -> None:
        """Take what a dispatched block says of retained messages, whichever process stored it."""
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
        return Selection(self, filter_text)

    def rows_for(self, filter_text: str, now: float) -> Rows | None:
        """What a new subscriber is sent, as rows without a stream."""
        found = [self._last[topic] for topic in self._topics.matching_topics(filter_text)]
        found = [m for m in found if not _expired(m, now)]
        if not found:
            return None
        batch = Batch(
            topics=[m.topic for m in found],
            payloads=[m.payload for m in found],
            publishers=[m.publisher for m in found],
            flags=[m.flags for m in found],
            properties=[m.properties for m in found],
        )
        return Rows(None, range(len(found)), batch, [m.time for m in found])


class Selection:
    """What a new subscriber is owed, taken bit by bit."""

    def __init__(self, retained: RetainedMessages, filter_text: str):
        self._rows_for, self._filter, self._done = retained.rows_for, filter_text, False

    def take(self, rows_max: int, bytes_max: int, now: float) -> Rows | None:
        if self._done:
            return None
        self._done = True
        return self._rows_for(self._filter, now)


def _expired(message: Retained, now: float) -> bool:
    life = expiry_of(message.properties) if message.properties else None
    return life is not None and now - message.time / 1e6 >= life
