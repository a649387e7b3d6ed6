"""What a metadata store promises: small keys with versions, compare-and-set, leases and watches.

Every backend keeps these promises (`tests/contract/test_metadata.py` asks each of them). Calls block and may
come from any thread. All versions of one store come from one counter: they are totally ordered, and a number
that was given once is never given again, not even after the key was deleted.
"""

from __future__ import annotations

import math
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence

from holdfast.errors import PreconditionFailed, RequestError
from holdfast.metadata.entries import Change, Delete, Entry, Put
from holdfast.metadata.watch import Watch
from holdfast.restarts import Failure

KEY_BYTES_MAX = 1024
VALUE_BYTES_MAX = 1 << 20


class LeaseEnded(RequestError):
    """The lease has expired or was revoked: its keys are gone, or going. Whoever relied on it must stop."""


class VersionMismatch(PreconditionFailed):
    """A key was not at the version that was expected; nothing was changed."""

    def __init__(self, key: str, expected: int | None, found: int | None):
        super().__init__(f"key {key!r} was expected {_at(expected)}, but is {_at(found)}")
        self.key, self.expected, self.found = key, expected, found


def _at(version: int | None) -> str:
    return "absent" if version is None else f"at version {version}"


Preconditions = Mapping[str, int | None]
"""For each key the version it must be at; None: it must be absent."""

Versions = list[int | None]


class Lease:
    """A promise of liveness: unless it is renewed in time, the keys put under it vanish.

    They also vanish when the process that holds it is killed. The store's clock decides; `expires_at` is the
    holder's own, careful view of it, so a holder that stops there stops in time, give or take the difference
    in speed of two clocks.
    """

    def __init__(self, store: Metadata, number: int, ttl_seconds: float, asked_at: float):
        self._store = store
        self.id = number
        self.ttl_seconds = ttl_seconds
        self.expires_at = asked_at + ttl_seconds
        """By `time.monotonic()` of this process; never later than the store sees it."""

    @property
    def remaining_seconds(self) -> float:
        return self.expires_at - time.monotonic()

    def renew(self) -> None:
        """Another `ttl_seconds` from now. LeaseEnded if it has expired or was revoked: it never comes back.

        While the store cannot be reached this keeps trying until the lease must have ended, and says so then.
        """
        asked_at = time.monotonic()
        self._store._renew(self)
        self.expires_at = asked_at + self.ttl_seconds

    def revoke(self) -> None:
        """End it now: its keys are gone when this returns. Harmless if it has ended already."""
        self._store._revoke(self)
        self.expires_at = min(self.expires_at, time.monotonic())

    def __repr__(self) -> str:
        return f"<lease {self.id:x}, {self.remaining_seconds:.1f} of {self.ttl_seconds:g} s left>"


class Metadata(ABC):
    """A metadata store.

    Keys are non-empty strings without NUL, at most 1024 bytes as UTF-8, ordered by their bytes. Values are at
    most 1 MiB. Anything else is a RequestError that names the value, before the store is asked.

    A call that cannot reach the store tries again for a while, then raises StoreUnavailable: nothing was
    changed. A change whose connection broke while it was being made raises OutcomeUnknown: it may have
    happened, and is not repeated, as someone else's change might have come in between.
    """

    batch_max: int | None = None
    """How many changes, and how many preconditions, one `transact` takes; None: any number."""

    @abstractmethod
    def get(self, key: str) -> Entry | None:
        """The key as of now. A key whose lease has expired is absent from that moment on.

        (etcd alone takes up to a second to notice that a lease has expired.)
        """

    @abstractmethod
    def list(self, prefix: str) -> dict[str, Entry]:
        """Every key that starts with `prefix` ("" for all), in order of the keys, as of one moment."""

    def put(self, key: str, value: bytes, lease: Lease | None = None) -> int:
        """Store it, whatever was there; the new version. Without a lease an earlier one lets go of the key.

        Durable when this returns. LeaseEnded if the lease has ended.
        """
        version = self.transact([Put(key, value, lease)])[0]
        assert version is not None
        return version

    def compare_and_set(
        self, key: str, expected_version: int | None, value: bytes, lease: Lease | None = None
    ) -> int | None:
        """Store it if the key is at that version (None: absent); the new version, or None if it was not.

        Of any number of callers who expect the same version, one wins.
        """
        try:
            return self.transact([Put(key, value, lease)], {key: expected_version})[0]
        except VersionMismatch:
            return None

    def delete(self, key: str, expected_version: int | None = None) -> bool:
        """Remove it, if it is at that version (None: at any); whether it was there and now is not."""
        try:
            found = self.transact([Delete(key)], {} if expected_version is None else {key: expected_version})
        except VersionMismatch:
            return False
        return found[0] is not None

    def transact(self, changes: Sequence[Change], preconditions: Preconditions | None = None) -> Versions:
        """All of the changes, or none: VersionMismatch (a PreconditionFailed) names a key that differs.

        The version of each change, in their order; None for a Delete of a key that was not there. Each key may
        be changed once. Other callers see all of it or nothing of it.
        """
        wanted = dict(preconditions or {})
        for key in wanted:
            check_key(key)
        keys = set()
        for change in changes:
            check_key(change.key)
            if isinstance(change, Put):
                check_value(change.key, change.value)
            if change.key in keys:
                raise RequestError(f"key {change.key!r} is changed twice in one transaction")
            keys.add(change.key)
        if self.batch_max is not None and max(len(changes), len(wanted)) > self.batch_max:
            raise RequestError(
                f"{len(changes)} changes with {len(wanted)} preconditions; this store takes {self.batch_max}"
            )
        if not changes and not wanted:
            return []
        outcome = self._commit(changes, wanted)
        if isinstance(outcome, VersionMismatch):
            raise outcome
        return outcome

    @abstractmethod
    def watch(self, prefix: str, wake: Callable[[], None] | None = None) -> Watch:
        """Every change to keys that start with `prefix`, from the moment this returns.

        In order of versions. States in between may be left out when they come fast, when the connection was
        lost or when the store has forgotten them; the last state of each key always arrives, deletions
        included, so a key that nobody saw may be reported Deleted. Another process's changes arrive within
        100 ms, the end of a lease about 100 ms after it (etcd: a second).

        To hold a copy: watch first, then list, then apply events whose version is greater than the copy's.
        `wake` is called, on the watcher's thread, when there is something to get: hand it on, do not block.
        """

    @property
    @abstractmethod
    def watch_failure(self) -> Failure | None:
        """Why watches may not be told of changes; None: all is well."""

    @abstractmethod
    def lease(self, ttl_seconds: float) -> Lease:
        """A new lease. It may live longer than asked where the store counts whole seconds (etcd)."""

    @abstractmethod
    def close(self) -> None:
        """Close every watch, and the connections. Leases live on until they expire: closing is no revocation."""

    def __enter__(self) -> Metadata:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # What a backend provides; arguments are checked.

    @abstractmethod
    def _commit(self, changes: Sequence[Change], preconditions: Preconditions) -> Versions | VersionMismatch:
        """`transact`, returning a mismatch instead of raising it: nothing is wrong with the connection."""

    @abstractmethod
    def _renew(self, lease: Lease) -> None: ...

    @abstractmethod
    def _revoke(self, lease: Lease) -> None: ...


def check_key(key: str) -> str:
    _check_text("key", key)
    if not key:
        raise RequestError("key '' is empty")
    return key


def check_prefix(prefix: str) -> str:
    return _check_text("prefix", prefix)


def _check_text(what: str, text: str) -> str:
    if not isinstance(text, str):
        raise RequestError(f"{what} {text!r} is no str")
    if "\0" in text:
        raise RequestError(f"{what} {text!r} contains NUL")
    try:
        size = len(text.encode())
    except UnicodeEncodeError as error:
        raise RequestError(f"{what} {text!r} cannot be written as UTF-8") from error
    if size > KEY_BYTES_MAX:
        raise RequestError(f"{what} {text[:40]!r}... has {size} bytes; at most {KEY_BYTES_MAX}")
    return text


def check_value(key: str, value: bytes) -> None:
    if not isinstance(value, bytes):
        raise RequestError(f"the value for key {key!r} is of type {type(value).__name__}, not bytes")
    if len(value) > VALUE_BYTES_MAX:
        raise RequestError(f"the value for key {key!r} has {len(value)} bytes; at most {VALUE_BYTES_MAX}")


def check_ttl(ttl_seconds: float) -> float:
    if not (math.isfinite(ttl_seconds) and ttl_seconds > 0):
        raise RequestError(f"a lease of {ttl_seconds!r} seconds cannot be; it takes a number above 0")
    return ttl_seconds


def prefix_end(prefix: str) -> str:
    """The smallest string greater than everything that starts with `prefix`, in order of code points."""
    for length in range(len(prefix), 0, -1):
        following = ord(prefix[length - 1]) + 1
        if following == 0xD800:  # surrogates are no characters of their own
            following = 0xE000
        if following <= 0x10FFFF:
            return prefix[: length - 1] + chr(following)
    return "\U0010ffff" * (KEY_BYTES_MAX // 4 + 1)  # beyond the longest key there can be
