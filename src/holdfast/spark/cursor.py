"""A streaming query's cursor: the same keys and the same form as any other subscription's, so lag shows it."""

from __future__ import annotations

import time

from holdfast.cursors.cursor import Cursor, cursor_key
from holdfast.metadata import Delete, Put, VersionMismatch
from holdfast.metadata.contract import Metadata
from holdfast.model import Stream
from holdfast.spark.offsets import Key, Place
from holdfast.store import open_metadata

FLUSH_SECONDS = 5.0
_CHANGES_MAX = 100


class SavedCursor:
    """The cursor of one named subscription to one log."""

    def __init__(self, url: str, log: str, subscription: str):
        self._metadata: Metadata = open_metadata(url)
        self._log, self._subscription = log, subscription
        self._saved: dict[Key, int] | None = None
        self._next_flush = 0.0

    def load(self) -> Place | None:
        """Where the subscription left off; None if there never was one."""
        found = self._found()
        return Place(min(generation for generation, _ in found) - 1, found) if found else None

    def save(self, place: Place, *, at_once: bool) -> None:
        """Everything before `place` is acknowledged. Now and then, unless it is to be `at_once`."""
        now = time.monotonic()
        if self._saved is None:
            self._saved = self._found()
        saved = self._saved
        news = {key: offset for key, offset in place.at.items() if offset > saved.get(key, 0)}
        # Finished streams leave nothing behind, once there is a later place to go on from.
        finished = [key for key in saved if key[0] <= place.done and place.at]
        if not (news or finished) or (now < self._next_flush and not at_once):
            return
        self._next_flush = now + FLUSH_SECONDS
        keys = sorted(news)
        for at in range(0, len(keys), _CHANGES_MAX):
            some = keys[at : at + _CHANGES_MAX]
            while not self._advance({key: news[key] for key in some}):
                pass
        saved.update(news)
        for key in finished:
            self._metadata.transact([Delete(self._key(self._stream(key)))])
            del saved[key]

    def _found(self) -> dict[Key, int]:
        """What is saved under this name, of whichever stream."""
        found: dict[Key, int] = {}
        for name, entry in self._metadata.list(f"/holdfast/subscriptions/{self._log}/").items():
            stream = Stream.parse(name.split("/")[4])
            if name == self._key(stream):
                found[stream.generation, stream.shard] = Cursor.from_json(entry.value).floor
        return found

    def _advance(self, news: dict[Key, int]) -> bool:
        """Forward only: whoever else moved the cursor meanwhile keeps what it gained. False: try again."""
        changes, versions = [], {}
        for key, offset in news.items():
            name = self._key(self._stream(key))
            entry = self._metadata.get(name)
            cursor = Cursor() if entry is None else Cursor.from_json(entry.value)
            cursor.ack_range(0, offset - 1)
            changes.append(Put(name, cursor.to_json(time.time())))
            versions[name] = None if entry is None else entry.version
        try:
            self._metadata.transact(changes, versions)
        except VersionMismatch:
            return False
        return True

    def _stream(self, key: Key) -> Stream:
        return Stream(self._log, key[1], key[0])

    def _key(self, stream: Stream) -> str:
        return cursor_key(self._log, stream, self._subscription)

    def close(self) -> None:
        self._metadata.close()
