"""One thread and one stream for all watches on an etcd, however often the stream breaks.

Each watch knows the last revision it has seen, so a new stream goes on from there. Where etcd has compacted
that revision away, the watches are brought up to date from what there is.

The stream asks once, for the range of keys from the first watched prefix to the last, and each watch takes what is
its own. Asking once per watch would lose some: the gateway may answer the first request of a stream before it has
read the rest, and when it answers it drops what it has not read.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Protocol

from holdfast.errors import HoldfastError, RequestError
from holdfast.jitter import chance
from holdfast.metadata.entries import Deleted, Entry, Event, Put
from holdfast.metadata.etcd_gateway import Gateway, Json, WatchStream, decode
from holdfast.metadata.watch import Watch
from holdfast.restarts import Failure, KeptThread


class Snapshot(Protocol):
    def __call__(self, prefix: str, keys_only: bool = False) -> tuple[int, dict[str, Entry]]: ...


class EtcdWatcher:
    def __init__(
        self,
        gateway: Gateway,
        bounds: Callable[..., Json],
        local: Callable[[Json], str],
        snapshot: Snapshot,
    ):
        self._gateway, self._bounds, self._local, self._snapshot = gateway, bounds, local, snapshot
        self._changed = threading.Condition()
        """Guards the set of watches and the stream; notified when the set changes."""
        self._watches: list[Watch] = []
        self._round = 0  # grows with every change of the set, so an outdated stream is recognised
        self._stream: WatchStream | None = None
        self._thread = KeptThread("metadata", self._run)
        self._closed = False

    def add(self, prefix: str, wake: Callable[[], None] | None) -> Watch:
        if self._closed:
            raise RequestError("this metadata store is closed")
        revision, known = self._snapshot(prefix, keys_only=True)
        watch = Watch(prefix, revision, known, wake, self._restart)
        with self._changed:
            self._watches.append(watch)
            self._thread.start()
        self._restart()
        return watch

    @property
    def failure(self) -> Failure | None:
        return self._thread.failure

    def _restart(self) -> None:
        with self._changed:
            self._round += 1
            self._changed.notify_all()
            if self._stream is not None:
                self._stream.stop()

    def _run(self) -> None:
        failures = 0
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._closed or any(not w.closed for w in self._watches))
                if self._closed:
                    return
                self._watches = [watch for watch in self._watches if not watch.closed]
                watches, this_round = list(self._watches), self._round
            try:
                progressed = self._follow(watches, this_round)
            except HoldfastError:  # away, or in trouble: the watches wait as long as it takes
                progressed = False
            failures = 0 if progressed else failures + 1
            with self._changed:
                if failures and self._round == this_round:
                    self._changed.wait(min(0.05 * 2**failures, 2.0) * (0.5 + chance.random()))

    def _follow(self, watches: list[Watch], this_round: int) -> bool:
        """One stream, from first to last; whether it brought anything."""
        seen = min(watch.seen for watch in watches)
        request = {**self._bounds(*(watch.prefix for watch in watches)), "start_revision": seen + 1}
        stream = self._gateway.stream("/v3/watch", {"create_request": request})
        progressed = False
        try:
            with self._changed:
                if self._round != this_round:
                    return True
                self._stream = stream
            for result in stream:
                progressed = True
                if result.get("canceled"):
                    if "compact_revision" not in result:
                        return False
                    for watch in watches:
                        revision, entries = self._snapshot(watch.prefix)
                        watch.resync(entries, revision)
                    return True
                events = [self._event(event) for event in result.get("events", ())]
                for watch in watches:
                    watch.offer(events)
        finally:
            with self._changed:
                self._stream = None
            stream.close()
        return progressed

    def _event(self, event: Json) -> Event:
        kv = event["kv"]
        version = int(kv["mod_revision"])
        if event.get("type") == "DELETE":
            return Deleted(self._local(kv), version)
        return Put(self._local(kv), decode(kv.get("value", "")), version=version)

    def close(self) -> None:
        with self._changed:
            self._closed = True
            watches, self._watches = self._watches, []
        self._restart()
        self._thread.stop()
        for watch in watches:
            watch.close()
