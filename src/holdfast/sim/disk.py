"""The simulated store: keys with versions, leases, claims; and what a crash does to a write under way.

A write is *begun*, and lands a moment later. If its node crashes in between, it may be lost or land all the same,
as with any database: only the node will never know. A write may also land and be reported as failed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from holdfast.groups.progress import StreamProgress
from holdfast.groups.protocol.effects import Save
from holdfast.groups.protocol.nouns import GroupId
from holdfast.groups.record import GroupRecord, load_progress, stored
from holdfast.keys import record_key
from holdfast.model import Stream


@dataclass(slots=True)
class StandingClaim:
    """A claim as the store has it."""

    node: str
    epoch: int
    lease: int


@dataclass(slots=True)
class Store:
    """Everything durable in the simulated world, except the log itself."""

    keys: dict[str, bytes] = field(default_factory=dict)
    leases: dict[int, float] = field(default_factory=dict)
    """When each ends, by the store's own clock."""
    claims: dict[GroupId, StandingClaim] = field(default_factory=dict)
    progress: dict[tuple[GroupId, Stream], StreamProgress] = field(default_factory=dict)
    """What `keys` says, read back; for checkers."""
    on_save: Callable[[Save, float], None] | None = None
    _versions: int = 0

    def version(self) -> int:
        self._versions += 1
        return self._versions

    # -------------------------------------------------------------------------------------- leases

    def open_lease(self, seconds: float, now: float) -> int:
        lease = self.version()
        self.leases[lease] = now + seconds
        return lease

    def renew_lease(self, lease: int, seconds: float, now: float) -> bool:
        if self.leases.get(lease, -1.0) <= now:
            return False
        self.leases[lease] = now + seconds
        return True

    def claim(self, group: GroupId, node: str, lease: int, now: float) -> StandingClaim | None:
        """The claim that stands; None if the lease has ended."""
        standing = self.standing(group, now)
        if standing is not None:
            return standing
        if self.leases.get(lease, -1.0) <= now:
            return None
        made = self.claims[group] = StandingClaim(node, self.version(), lease)
        return made

    def standing(self, group: GroupId, now: float) -> StandingClaim | None:
        found = self.claims.get(group)
        return found if found is not None and self.leases.get(found.lease, -1.0) > now else None

    def resign(self, group: GroupId, epoch: int) -> None:
        found = self.claims.get(group)
        if found is not None and found.epoch == epoch:
            del self.claims[group]

    # -------------------------------------------------------------------------------------- groups

    def declare(self, record: GroupRecord) -> GroupRecord:
        """Create the group unless it exists; what exists then."""
        key = record_key(record.group)
        if key not in self.keys:
            self.version()
            self.keys[key] = record.to_json(0.0)
        return GroupRecord.from_json(self.keys[key])

    def load(self, group: GroupId, streams: list[Stream]) -> tuple[GroupRecord | None, tuple[StreamProgress, ...]]:
        data = self.keys.get(record_key(group))
        found = [load_progress(group, stream, self.keys.get) for stream in streams]
        progress = tuple(each for each in found if each is not None)
        return (None if data is None else GroupRecord.from_json(data)), progress

    def save(self, save: Save, now: float) -> bool:
        """All of it, or, if the claim is not at that epoch any more, nothing."""
        standing = self.standing(save.group, now)
        if standing is None or standing.epoch != save.epoch:
            return False
        if self.on_save:
            self.on_save(save, now)
        self.version()
        puts, deletes = stored(save, now)
        self.keys.update(puts)
        for key in deletes:
            self.keys.pop(key, None)
        for progress in save.progress:
            found = load_progress(save.group, progress.stream, self.keys.get)
            assert found is not None
            self.progress[save.group, progress.stream] = found
        for stream in save.forget:
            self.progress.pop((save.group, stream), None)
        return True
