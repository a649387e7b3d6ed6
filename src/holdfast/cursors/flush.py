"""When cursors are saved and what a save may change: forward only, fenced by epoch, never resurrecting.

Sessions and Spark's queries save through it alike. Dirty cursors go in one transaction. A failed save leaves them
dirty; a cursor whose key somebody else changed is read again, merged if its epoch allows, and tried once more; one
that was deleted stays deleted.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable

from holdfast.cursors.cursor import Cursor
from holdfast.errors import RequestError, StaleEpoch
from holdfast.metadata import Delete, Entry, Metadata, Put, VersionMismatch

logger = logging.getLogger("holdfast.cursors")


class CursorStore:
    """Cursors by key, with the versions this process knows. Synchronous; one caller at a time."""

    def __init__(self, metadata: Metadata):
        self._metadata = metadata
        self._versions: dict[str, int] = {}

    def load(self, key: str) -> Cursor | None:
        """The stored cursor; a RequestError that names the key if it cannot be read."""
        entry = self._metadata.get(key)
        if entry is None:
            self._versions.pop(key, None)
            return None
        return self._read(key, entry)

    def load_all(self, prefix: str, ours: Callable[[str], bool]) -> dict[str, Cursor]:
        """Those of the stored cursors under this prefix whose keys are ours."""
        return {key: self._read(key, entry) for key, entry in self._metadata.list(prefix).items() if ours(key)}

    def _read(self, key: str, entry: Entry) -> Cursor:
        self._versions[key] = entry.version
        try:
            return Cursor.from_json(entry.value)
        except RequestError as error:
            raise RequestError(f"the cursor at {key} cannot be read: {error}") from error

    def create(self, cursors: dict[str, Cursor], now_seconds: float) -> None:
        """Cursors of a new subscription, whatever was there."""
        self._put(list(cursors), [Put(key, c.to_json(now_seconds)) for key, c in cursors.items()], {})

    def save(self, cursors: dict[str, Cursor], now_seconds: float) -> set[str]:
        """Save them all in one transaction (more where the store bounds it); the keys that are settled."""
        settled: set[str] = set()
        keys = list(cursors)
        step = self._metadata.batch_max or len(keys) or 1
        for at in range(0, len(keys), step):
            some = keys[at : at + step]
            settled |= self._save({key: cursors[key] for key in some}, now_seconds)
        return settled

    def _save(self, cursors: dict[str, Cursor], now_seconds: float) -> set[str]:
        settled: set[str] = set()
        left = dict(cursors)
        while left:
            expected: dict[str, int | None] = {key: self._versions.get(key) for key in left}
            try:
                self._put(list(left), [Put(key, c.to_json(now_seconds)) for key, c in left.items()], expected)
            except VersionMismatch as mismatch:
                if not self._reconcile(mismatch.key, left):
                    settled.add(mismatch.key)
                    del left[mismatch.key]
            else:
                settled.update(left)
                break
        return settled

    def _put(self, keys: list[str], puts: list[Put], expected: dict[str, int | None]) -> None:
        for key, version in zip(keys, self._metadata.transact(puts, expected), strict=True):
            assert version is not None
            self._versions[key] = version

    def _reconcile(self, key: str, left: dict[str, Cursor]) -> bool:
        """Somebody else changed the key. True: it can be tried again; False: it is no longer ours to save."""
        known = key in self._versions
        try:
            stored = self.load(key)
        except RequestError:
            stored = None
        if stored is None:
            # Deleted since we last saw it: its subscription is gone. Never seen: simply not there yet.
            return not known and key not in self._versions
        try:
            stored.advance(left[key])
        except StaleEpoch as error:
            logger.info("%s: %s", key, error)
            return False
        left[key] = stored
        return True

    def delete(self, keys: Iterable[str]) -> None:
        """The subscription is gone, and so are its cursors."""
        gone = list(keys)
        for key in gone:
            self._versions.pop(key, None)
        step = self._metadata.batch_max or len(gone) or 1
        for at in range(0, len(gone), step):
            self._metadata.transact([Delete(key) for key in gone[at : at + step]])
