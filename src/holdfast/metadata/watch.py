"""A watch: the newest unread event of each key, in order; a slow reader costs memory per key, not per event.

Whoever feeds it calls `offer` in order of versions, or `resync` with the present state after having missed
something; the watch knows which keys its reader believes in, and so which have gone.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping

from holdfast.metadata.entries import Deleted, Entry, Event, Put

log = logging.getLogger(__name__)


class Watch:
    """Events under one prefix. Read it from one thread or several; iterate, or ask with a timeout."""

    def __init__(
        self,
        prefix: str,
        seen: int,
        known: Iterable[str],
        wake: Callable[[], None] | None = None,
        on_close: Callable[[], None] = lambda: None,
    ):
        self.prefix = prefix
        self.seen = seen
        """Changes up to this version have been offered, or were there when the watch began."""
        self._known = set(known)
        self._pending: dict[str, Event] = {}
        self._ready = threading.Condition()
        self._wake = wake
        self._on_close = on_close
        self.closed = False

    def get(self, timeout: float | None = None) -> Event | None:
        """The next event. None when there was none within `timeout` seconds, or the watch is closed."""
        with self._ready:
            if not self._ready.wait_for(lambda: self._pending or self.closed, timeout) or self.closed:
                return None
            return self._pending.pop(next(iter(self._pending)))

    def __iter__(self) -> Iterator[Event]:
        """Events as they come, until the watch is closed."""
        while (event := self.get()) is not None:
            yield event

    def close(self) -> None:
        """No more events; whoever waits for one is let go."""
        with self._ready:
            if self.closed:
                return
            self.closed = True
            self._pending.clear()
            self._ready.notify_all()
        self._on_close()

    def __enter__(self) -> Watch:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def offer(self, events: Iterable[Event]) -> None:
        """Take what is new to this watch. Events come in order of versions."""
        with self._ready:
            taken = False
            newest = self.seen
            for event in events:
                newest = max(newest, event.version)
                if event.version <= self.seen or not event.key.startswith(self.prefix) or self.closed:
                    continue
                if isinstance(event, Put):
                    self._known.add(event.key)
                else:
                    self._known.discard(event.key)
                self._pending.pop(event.key, None)  # re-inserted at the end: order is that of versions
                self._pending[event.key] = event
                taken = True
            self.seen = newest
            if taken:
                self._ready.notify_all()
        if taken and self._wake is not None:
            try:
                self._wake()
            except Exception:  # the reader's trouble; other watches are fed by the same thread
                log.exception("the wake-up of the watch on %r failed", self.prefix)

    def resync(self, entries: Mapping[str, Entry], version: int) -> None:
        """Events were missed: make them up from what there is as of `version`."""
        found = [Put(k, e.value, version=e.version) for k, e in entries.items() if e.version > self.seen]
        found.sort(key=lambda put: put.version)
        gone = [Deleted(key, version) for key in sorted(self._known - entries.keys())]
        self.offer([*found, *gone])
        self.seen = max(self.seen, version)
