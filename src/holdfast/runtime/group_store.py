"""What the machines of groups ask of the log and the metadata store, done for real; every call blocks.

Trouble with the store is an answer (`SaveFailed`, `LeaseFailed`, …); any other exception is our own fault and goes up.
"""

from __future__ import annotations

import json
import logging
import time
import uuid
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from holdfast.errors import HoldfastError, RequestError
from holdfast.groups.protocol import effects as fx
from holdfast.groups.protocol import events as ev
from holdfast.groups.protocol.nouns import NO_POLICY, GroupId, Key, Policy
from holdfast.groups.record import GroupRecord, Order, in_batches, load_progress, stored
from holdfast.keys import GROUPS, claim_key, is_record, record_key, skipped_key
from holdfast.log import Log
from holdfast.log.clock import message_time
from holdfast.log.history import History
from holdfast.metadata import Delete, Lease, LeaseEnded, Metadata, Put, VersionMismatch
from holdfast.model import At, Beginning, Next, Since, Start, Stream

logger = logging.getLogger("holdfast.groups")

SKIPPED_MAX = 100
"""How many gaps of a group are remembered; the oldest are forgotten first."""


@dataclass(frozen=True, slots=True)
class GroupOptions:
    """What may be said of a group when it is declared, beside where it begins."""

    order: Order = "strict"
    key: Key = "publisher"
    policy: Policy = NO_POLICY
    idle_seconds_max: float | None = None

    @classmethod
    def of_record(cls, record: GroupRecord) -> GroupOptions:
        return cls(record.order, record.key, record.policy, record.idle_seconds_max)

    def differences(self, wanted: GroupOptions) -> list[str]:
        """What is different there, in words: `order is strict, not parallel`."""
        mine, theirs = self._plain(), wanted._plain()
        return [f"{name} is {mine[name]}, not {theirs[name]}" for name in mine if mine[name] != theirs[name]]

    def _plain(self) -> dict[str, Any]:
        return {
            "order": self.order,
            "key": self.key,
            "ack_timeout_seconds": self.policy.ack_timeout_seconds,
            "attempts_max": self.policy.attempts_max,
            "idle_seconds_max": self.idle_seconds_max,
        }


@dataclass(frozen=True, slots=True)
class Gap:
    """A record of what a group did not get, and why."""

    stream: str
    first: int
    past: int | None
    reason: str
    at: float


class GroupStore:
    """Groups of one log. Safe to use from several threads."""

    def __init__(self, log: Log, metadata: Metadata, history: History, name: str, node_id: str):
        self.log, self.metadata, self.history = log, metadata, history
        self._name, self._node_id = name, node_id
        self._leases: dict[int, Lease] = {}

    # -- the node's lease and its claims -----------------------------------------------------------------

    def open_lease(self, asked_at: float, seconds: float) -> ev.LeaseOpened | ev.LeaseFailed:
        try:
            lease = self.metadata.lease(seconds)
        except HoldfastError as error:
            logger.warning("no lease: %s", error)
            return ev.LeaseFailed()
        self._leases = {lease.id: lease}
        return ev.LeaseOpened(lease.id, asked_at)

    def renew_lease(self, number: int, asked_at: float) -> ev.LeaseRenewed | ev.LeaseLost | ev.LeaseFailed:
        try:
            self._leases[number].renew()
        except (LeaseEnded, KeyError):
            return ev.LeaseLost(number)
        except HoldfastError as error:
            logger.warning("the lease was not renewed: %s", error)
            return ev.LeaseFailed()
        return ev.LeaseRenewed(number, asked_at)

    def forget_leases(self) -> None:
        """Renew none of them any more: they end by themselves, once everything lent under them has surely ended."""
        self._leases = {}

    def revoke_leases(self) -> None:
        """Nothing is lent any more: whoever comes next need not wait for the leases to end."""
        for lease in self._leases.values():
            try:
                lease.revoke()
            except HoldfastError as error:
                logger.info("the lease will end by itself: %s", error)

    def claim(self, group: GroupId, number: int) -> ev.Claimed | ev.Taken | ev.ClaimFailed | ev.LeaseLost:
        try:
            lease = self._leases.get(number)
            if lease is None:
                return ev.LeaseLost(number)
            version = self.metadata.compare_and_set(claim_key(group), None, self._node_id.encode(), lease)
            if version is not None:
                return ev.Claimed(group, number, version)
            entry = self.metadata.get(claim_key(group))
        except LeaseEnded:
            return ev.LeaseLost(number)
        except HoldfastError as error:
            logger.warning("group %s could not be claimed: %s", group, error)
            return ev.ClaimFailed(group)
        return ev.ClaimFailed(group) if entry is None else ev.Taken(group, entry.value.decode(), entry.version)

    def resign(self, group: GroupId, epoch: int) -> None:
        try:
            self.metadata.delete(claim_key(group), epoch)
        except HoldfastError as error:
            logger.info("the claim on %s will end with its lease: %s", group, error)

    # -- what a leader asks for --------------------------------------------------------------------------

    def save(self, save: fx.Save) -> ev.Saved | ev.SaveFailed | ev.Deposed:
        """Fenced by the claim's version."""
        puts, deletes = stored(save, message_time() / 1e6)
        try:
            for batch in in_batches(puts, deletes, self.metadata.batch_max):
                changes = [Delete(key) if value is None else Put(key, value) for key, value in batch]
                self.metadata.transact(changes, {claim_key(save.group): save.epoch})
        except VersionMismatch:
            return ev.Deposed()
        except HoldfastError as error:
            logger.warning("progress of %s was not saved: %s", save.group, error)
            return ev.SaveFailed()
        return ev.Saved()

    def load(self, group: GroupId) -> ev.Loaded | ev.LoadFailed:
        try:
            entry = self.metadata.get(record_key(group))
            if entry is None:
                return ev.Loaded(None)
            record = GroupRecord.from_json(entry.value)
            found = []
            for info in self._streams():
                if info.stream.generation >= record.from_generation:
                    progress = load_progress(group, info.stream, self._value)
                    if progress is not None:
                        found.append(progress)
        except HoldfastError as error:
            logger.warning("group %s could not be loaded: %s", group, error)
            return ev.LoadFailed()
        return ev.Loaded(record, tuple(found))

    def _value(self, key: str) -> bytes | None:
        entry = self.metadata.get(key)
        return None if entry is None else entry.value

    def streams(self) -> ev.StreamsSeen | None:
        """All the streams there are, those that only the lake still holds included; None: the store is away."""
        try:
            return ev.StreamsSeen(self._streams())
        except HoldfastError as error:
            logger.warning("the streams cannot be seen: %s", error)
            return None

    def _streams(self) -> tuple[ev.StreamInfo, ...]:
        # The store first: what it drops in between is in the lake already.
        heads = self.log.heads(self._name)
        kept = {head.stream for head in heads}
        infos = [ev.StreamInfo(h.stream, h.next_offset if h.sealed else None, h.next_offset) for h in heads]
        infos += [
            ev.StreamInfo(h.stream, h.next_offset, h.next_offset, in_lake=True)
            for h in self.history.heads(self._name)
            if h.stream not in kept
        ]
        return tuple(infos)

    # -- records -----------------------------------------------------------------------------------------

    def record(self, group: GroupId) -> GroupRecord | None:
        entry = self.metadata.get(record_key(group))
        return None if entry is None else GroupRecord.from_json(entry.value)

    def records(self) -> dict[GroupId, bytes]:
        """Every declared group with its record as it is stored; a damaged one is passed over."""
        found = {}
        for key, entry in self.metadata.list(GROUPS).items():
            if is_record(key):
                try:
                    found[GroupRecord.from_json(entry.value).group] = entry.value
                except RequestError as error:
                    logger.error("%s: %s", key, error)
        return found

    def declare(
        self, group: GroupId, start: Start | None, options: GroupOptions | None = None
    ) -> tuple[GroupRecord, bool]:
        """The group, and whether it was made just now; it persists from that moment on."""
        wanted = options or GroupOptions()
        while True:
            found = self.record(group)
            if found is not None:
                return found, False
            starts, from_generation = self.positions(start or Next(), group.filter)
            record = GroupRecord(
                group=group,
                born=uuid.uuid4().hex,
                log=self._name,
                order=wanted.order,
                key=wanted.key,
                starts=starts,
                from_generation=from_generation,
                policy=wanted.policy,
                idle=wanted.idle_seconds_max is not None,  # nobody has joined it yet: its time runs
                idle_seconds_max=wanted.idle_seconds_max,
            )
            if self.metadata.compare_and_set(record_key(group), None, record.to_json(message_time() / 1e6)) is not None:
                return record, True

    def positions(self, start: Start, filter_text: str) -> tuple[dict[Stream, int], int]:
        """Where a group that starts there begins: offsets by stream, and the first generation that is its own."""
        starts = dict(self.log.positions(self._name, start, filter_text))
        heads = self.log.heads(self._name)
        kept = {head.stream for head in heads}
        first = min((head.stream.generation for head in heads), default=0)
        if isinstance(start, Beginning):
            return {}, 0
        for head in self.history.heads(self._name):
            if head.stream in kept:
                continue
            match start:
                case Since():
                    at = self.history.offset_at(head, start.micros)
                case At():
                    every = head.next_offset if start.every is None else start.every
                    at = min(start.offsets.get(head.stream, every), head.next_offset)
                case Next():
                    at = head.next_offset
            starts[head.stream] = at
            if at < head.next_offset:
                first = min(first, head.stream.generation)
        if isinstance(start, At):
            starts |= start.offsets
        return {stream: at for stream, at in starts.items() if stream.generation >= first}, first

    # -- what was dropped before a group had read it -----------------------------------------------------

    def skipped(self, group: GroupId) -> list[Gap]:
        entry = self.metadata.get(skipped_key(group))
        return [] if entry is None else _gaps(entry.value)

    def note_skipped(self, group: GroupId, skipped: Iterable[fx.Skipped]) -> list[Gap]:
        """Keep a record; what of it is new."""
        while True:
            entry = self.metadata.get(skipped_key(group))
            known = [] if entry is None else _gaps(entry.value)
            noted = {gap.stream for gap in known}
            fresh = [
                Gap(str(s.stream), s.first, s.past, "dropped by retention", time.time())
                for s in skipped
                if str(s.stream) not in noted
            ]
            if not fresh:
                return []
            value = json.dumps([[g.stream, g.first, g.past, g.reason, g.at] for g in [*known, *fresh][-SKIPPED_MAX:]])
            version = None if entry is None else entry.version
            if self.metadata.compare_and_set(skipped_key(group), version, value.encode()) is not None:
                return fresh

    def led(self) -> set[GroupId]:
        """The groups that have a leader, on whatever node."""
        keys = self.metadata.list(GROUPS)
        return {group for group in self.records() if claim_key(group) in keys}

    def unread(self, ends: Mapping[Stream, int], led_before: set[GroupId]) -> dict[GroupId, list[fx.Skipped]]:
        """What groups had not read of these dropped streams; one that was led all the while sees for itself.

        A leader that began only after the streams were dropped knows nothing of them.
        """
        found: dict[GroupId, list[fx.Skipped]] = {}
        led = led_before & self.led()
        for group, data in self.records().items():
            record = GroupRecord.from_json(data)
            if group in led:
                continue
            for stream, end in ends.items():
                if stream.log != record.log or stream.generation < record.from_generation:
                    continue
                floor = self._floor(record, stream)
                if floor < end:
                    found.setdefault(group, []).append(fx.Skipped(stream, floor, end))
        return found

    def _floor(self, record: GroupRecord, stream: Stream) -> int:
        progress = load_progress(record.group, stream, self._value)
        if progress is not None and progress.course == record.course:
            return progress.floor
        return record.starts.get(stream, 0)


def _gaps(data: bytes) -> list[Gap]:
    try:
        return [Gap(*row) for row in json.loads(data)]
    except (ValueError, TypeError) as error:
        raise RequestError(f"record of skipped messages {data[:80]!r} is damaged: {error!r}") from error
