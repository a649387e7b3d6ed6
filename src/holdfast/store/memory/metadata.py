"""Metadata in this process's memory: every promise but the disk's."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from holdfast.metadata.contract import (
    Lease,
    LeaseEnded,
    Metadata,
    Preconditions,
    VersionMismatch,
    Versions,
    check_key,
    check_prefix,
    check_ttl,
)
from holdfast.metadata.entries import Change, Deleted, Entry, Event, Put
from holdfast.metadata.watch import Watch
from holdfast.restarts import Failure, KeptThread


@dataclass(slots=True)
class _Held:
    """A lease as the store sees it."""

    expires_at: float
    keys: set[str] = field(default_factory=set)


class MemoryState:
    """The keys themselves; several `MemoryMetadata` share one, as processes share a database."""

    def __init__(self) -> None:
        self.changed = threading.Condition(threading.RLock())
        """Guards everything here; notified when the next expiry may have moved."""
        self.entries: dict[str, Entry] = {}
        self.leases: dict[int, _Held] = {}
        self.lease_of: dict[str, int] = {}
        self.last_lease = 0
        self.version = 0
        self.watches: list[Watch] = []

    def next_version(self) -> int:
        self.version += 1
        return self.version

    def sweep(self) -> None:
        """End what has expired. Called before anything is looked at, so it is never seen."""
        now = time.monotonic()
        self.end_leases([number for number, held in self.leases.items() if held.expires_at <= now])

    def end_leases(self, numbers: Iterable[int]) -> None:
        events: list[Event] = []
        for number in numbers:
            for key in sorted(self.leases.pop(number).keys):
                del self.entries[key], self.lease_of[key]
                events.append(Deleted(key, self.next_version()))
        self.tell(events)

    def let_go(self, key: str) -> None:
        number = self.lease_of.pop(key, None)
        if number is not None:
            self.leases[number].keys.discard(key)

    def tell(self, events: Sequence[Event]) -> None:
        if events:
            self.watches = [watch for watch in self.watches if not watch.closed]
            for watch in self.watches:
                watch.offer(events)

    def next_expiry(self) -> float | None:
        return min((held.expires_at for held in self.leases.values()), default=None)


class MemoryMetadata(Metadata):
    def __init__(self, state: MemoryState, on_close: Callable[[], None]):
        self._state, self._on_close = state, on_close
        self._watches: list[Watch] = []
        self._sweeper = KeptThread("metadata", self._sweep)
        self._closed = False

    def get(self, key: str) -> Entry | None:
        check_key(key)
        with self._state.changed:
            self._state.sweep()
            return self._state.entries.get(key)

    def list(self, prefix: str) -> dict[str, Entry]:
        check_prefix(prefix)
        with self._state.changed:
            self._state.sweep()
            found = [item for item in self._state.entries.items() if item[0].startswith(prefix)]
        return dict(sorted(found))

    def _commit(self, changes: Sequence[Change], preconditions: Preconditions) -> Versions | VersionMismatch:
        state = self._state
        with state.changed:
            state.sweep()
            for key, expected in preconditions.items():
                entry = state.entries.get(key)
                found = entry.version if entry else None
                if found != expected:
                    return VersionMismatch(key, expected, found)
            for change in changes:
                if isinstance(change, Put) and change.lease and change.lease.id not in state.leases:
                    raise LeaseEnded(f"{change.lease} has ended; key {change.key!r} was not stored")
            versions: Versions = []
            events: list[Event] = []
            for change in changes:
                if not isinstance(change, Put) and change.key not in state.entries:
                    versions.append(None)
                    continue
                version = state.next_version()
                versions.append(version)
                state.let_go(change.key)
                if isinstance(change, Put):
                    state.entries[change.key] = Entry(change.value, version)
                    if change.lease:
                        state.lease_of[change.key] = change.lease.id
                        state.leases[change.lease.id].keys.add(change.key)
                    events.append(Put(change.key, change.value, version=version))
                else:
                    del state.entries[change.key]
                    events.append(Deleted(change.key, version))
            state.tell(events)
            return versions

    def watch(self, prefix: str, wake: Callable[[], None] | None = None) -> Watch:
        check_prefix(prefix)
        with self._state.changed:
            self._state.sweep()
            watch = Watch(prefix, self._state.version, (), wake)
            self._watches = [w for w in self._watches if not w.closed] + [watch]
            self._state.watches.append(watch)
            self._sweeper.start()
        return watch

    def _sweep(self) -> None:
        """Tell watchers that a lease expired even if nobody calls."""
        state = self._state
        with state.changed:
            while not self._closed:
                state.sweep()
                due = state.next_expiry()
                state.changed.wait(None if due is None else due - time.monotonic())

    @property
    def watch_failure(self) -> Failure | None:
        return self._sweeper.failure

    def lease(self, ttl_seconds: float) -> Lease:
        check_ttl(ttl_seconds)
        with self._state.changed:
            asked_at = time.monotonic()
            self._state.last_lease += 1
            self._state.leases[self._state.last_lease] = _Held(asked_at + ttl_seconds)
            self._state.changed.notify_all()
            return Lease(self, self._state.last_lease, ttl_seconds, asked_at)

    def _renew(self, lease: Lease) -> None:
        with self._state.changed:
            self._state.sweep()
            held = self._state.leases.get(lease.id)
            if held is None:
                raise LeaseEnded(f"{lease} has ended")
            held.expires_at = time.monotonic() + lease.ttl_seconds

    def _revoke(self, lease: Lease) -> None:
        with self._state.changed:
            if lease.id in self._state.leases:
                self._state.end_leases([lease.id])

    def close(self) -> None:
        with self._state.changed:
            self._closed = True
            self._state.changed.notify_all()
            watches, self._watches = self._watches, []
        for watch in watches:
            watch.close()
        self._sweeper.stop()
        self._on_close()
