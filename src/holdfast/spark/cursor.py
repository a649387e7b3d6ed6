"""A streaming query's cursor: the same keys and the same form as any other subscription's, so lag shows it."""

from __future__ import annotations

import time

from holdfast.cursors.cursor import Cursor
from holdfast.cursors.flush import CursorStore
from holdfast.keys import cursors_of_log, named_cursor_key, stream_of_cursor
from holdfast.model import Stream
from holdfast.spark.offsets import Key, Place
from holdfast.store import open_metadata

FLUSH_SECONDS = 5.0


class SavedCursor:
    """The cursor of one named subscription to one log."""

    def __init__(self, url: str, log: str, subscription: str):
        self._metadata = open_metadata(url)
        self._cursors = CursorStore(self._metadata)
        self._log, self._subscription = log, subscription
        self._saved: dict[Stream, Cursor] | None = None
        self._next_flush = 0.0

    def load(self) -> Place | None:
        """Where the subscription left off; None if there never was one."""
        self._saved = self._found()
        at = {(stream.generation, stream.shard): cursor.floor for stream, cursor in self._saved.items()}
        return Place(min(generation for generation, _ in at) - 1, at) if at else None

    def save(self, place: Place, *, at_once: bool) -> None:
        """Everything before `place` is acknowledged. Now and then, unless it is to be `at_once`."""
        now = time.monotonic()
        if self._saved is None:
            self._saved = self._found()
        saved = self._saved
        news = {}
        for key, offset in place.at.items():
            stream = self._stream(key)
            cursor = saved.get(stream, Cursor())
            if offset > cursor.floor:
                news[stream] = cursor.copy()
                news[stream].ack_range(0, offset - 1)
        # Finished streams leave nothing behind, once there is a later place to go on from.
        finished = [stream for stream in saved if stream.generation <= place.done and place.at]
        if not (news or finished) or (now < self._next_flush and not at_once):
            return
        self._next_flush = now + FLUSH_SECONDS
        self._cursors.save({self._key(stream): cursor for stream, cursor in news.items()}, time.time())
        saved.update(news)
        self._cursors.delete(self._key(stream) for stream in finished)
        for stream in finished:
            del saved[stream]

    def _found(self) -> dict[Stream, Cursor]:
        """What is saved under this name, of whichever stream."""
        found = self._cursors.load_all(cursors_of_log(self._log), lambda key: key == self._key(stream_of_cursor(key)))
        return {stream_of_cursor(key): cursor for key, cursor in found.items()}

    def _stream(self, key: Key) -> Stream:
        return Stream(self._log, key[1], key[0])

    def _key(self, stream: Stream) -> str:
        return named_cursor_key(stream, self._subscription)

    def close(self) -> None:
        self._metadata.close()
