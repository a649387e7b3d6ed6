"""What is stored of a group: one record, one progress per stream, one claim; and where.

The record is created once, by whoever declares the group (compare-and-set on an absent key), and from then on
written by the leader alone, fenced by its claim. A seek changes the record and nothing else: progress that
bears another `course` than the record counts as absent, so one small write moves every stream at once.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from holdfast.errors import RequestError
from holdfast.groups.progress import StreamProgress
from holdfast.groups.protocol.effects import Save
from holdfast.groups.protocol.nouns import NO_POLICY, GroupId, Key, Piece, Policy, check_key
from holdfast.keys import progress_key, progress_part_key, record_key, skipped_key
from holdfast.model import Stream

Order = Literal["strict", "parallel"]

ANSWERED_MAX = 16
LEASED_CLIENTS_MAX = 256

BATCH_BYTES_MAX = 1 << 20
"""What stores that limit the size of a transaction take."""

_DAMAGE = (ValueError, KeyError, TypeError, AttributeError)


@dataclass(frozen=True, kw_only=True)
class GroupRecord:
    """A declared group. `born` is unique among all groups that ever were."""

    group: GroupId
    born: str
    log: str = "messages"
    order: Order = "strict"
    key: Key = "publisher"
    """What belongs together, and goes to one member in order. It never changes: progress is counted by it."""
    turn: int = 0
    """How often the group was moved by a seek."""
    starts: Mapping[Stream, int] = field(default_factory=dict)
    """First offset wanted of the streams that existed when this course began; others start at 0."""
    from_generation: int = 0
    """Earlier generations are none of the group's: consumed, or from before this course began."""
    paused: bool = False
    lent: bool = False
    """A leader has lent streams and not yet said that all came back: its follower waits for their holders."""
    idle: bool = True
    """No member has come yet, or none is left, since the record was last written."""
    policy: Policy = NO_POLICY
    idle_seconds_max: float | None = None
    """The group is deleted after being idle for so long; None: never."""
    leased: Mapping[str, tuple[Piece, ...]] = field(default_factory=dict)
    """Which pieces each client that is a batch member was ever leased, in this course."""
    answered: tuple[str, ...] = ()
    """The last requests that were carried out, so that one heard twice is done once."""

    @property
    def course(self) -> str:
        return f"{self.born}.{self.turn}"

    def turned(self, starts: Mapping[Stream, int], from_generation: int = 0) -> GroupRecord:
        """After a seek."""
        return replace(self, turn=self.turn + 1, starts=dict(starts), from_generation=from_generation, leased={})

    def leasing(self, pieces: Mapping[str, Iterable[Piece]], streams: Collection[Stream]) -> GroupRecord:
        """Before these clients are leased these pieces; what is no stream any more is forgotten."""
        leased = {
            client: tuple(piece for piece in self.leased.get(client, ()) if piece.stream in streams)
            for client in [*self.leased, *pieces]
        }
        for client, some in pieces.items():
            # Those that came last are last, and the first go first.
            leased[client] = tuple(dict.fromkeys([*leased.pop(client), *some]))
        kept = [client for client in leased if leased[client]][-LEASED_CLIENTS_MAX:]
        return replace(self, leased={client: leased[client] for client in kept})

    def having_answered(self, request: str) -> GroupRecord:
        return replace(self, answered=(*self.answered, request)[-ANSWERED_MAX:])

    def to_json(self, now_seconds: float) -> bytes:
        return json.dumps(
            {
                "name": self.group.name,
                "filter": self.group.filter,
                "born": self.born,
                "log": self.log,
                "order": self.order,
                "key": self.key,
                "turn": self.turn,
                "starts": {str(stream): offset for stream, offset in sorted(self.starts.items())},
                "from_generation": self.from_generation,
                "paused": self.paused,
                "lent": self.lent,
                "idle": self.idle,
                "ack_timeout_seconds": self.policy.ack_timeout_seconds,
                "attempts_max": self.policy.attempts_max,
                "idle_seconds_max": self.idle_seconds_max,
                "leased": {
                    client: [[str(piece.stream), piece.part, piece.of] for piece in pieces]
                    for client, pieces in self.leased.items()
                },
                "answered": self.answered,
                "updated_at": now_seconds,
            }
        ).encode()

    @classmethod
    def from_json(cls, data: bytes) -> GroupRecord:
        try:
            value = json.loads(data)
            return cls(
                group=GroupId(value["name"], value["filter"]),
                born=value["born"],
                log=value["log"],
                order=value["order"],
                key=check_key(value["key"]),
                turn=value["turn"],
                starts={Stream.parse(text): offset for text, offset in value["starts"].items()},
                from_generation=value["from_generation"],
                paused=value["paused"],
                lent=value["lent"],
                idle=value["idle"],
                policy=Policy(value["ack_timeout_seconds"], value["attempts_max"]),
                idle_seconds_max=value["idle_seconds_max"],
                leased={
                    client: tuple(Piece(Stream.parse(text), part, of) for text, part, of in pieces)
                    for client, pieces in value["leased"].items()
                },
                answered=tuple(value["answered"]),
            )
        except _DAMAGE as error:
            raise RequestError(f"group record {data[:80]!r} is damaged: {error!r}") from error


def expired(data: bytes, now_seconds: float) -> bool:
    """Has this stored group been without members for longer than it allows? Then ask `Delete(if_idle=True)`."""
    try:
        value = json.loads(data)
        limit = value["idle_seconds_max"]
        return bool(value["idle"]) and limit is not None and now_seconds - value["updated_at"] >= limit
    except _DAMAGE as error:
        raise RequestError(f"group record {data[:80]!r} is damaged: {error!r}") from error


def may_be_deserted(data: bytes) -> bool:
    """Is this stored group to be deleted when nobody uses it, and does it say that somebody does?"""
    try:
        value = json.loads(data)
        return value["idle_seconds_max"] is not None and not value["idle"]
    except _DAMAGE as error:
        raise RequestError(f"group record {data[:80]!r} is damaged: {error!r}") from error


def stored(save: Save, now_seconds: float) -> tuple[dict[str, bytes], list[str]]:
    """A `Save` as keys to put and keys to delete. The record's key comes first in either.

    To be made under the precondition that `claim_key(save.group)` is at version `save.epoch`. A store that
    limits the size of a transaction may take it in parts (`in_batches`), each under that precondition, in this order.
    """
    puts: dict[str, bytes] = {}
    deletes = [record_key(save.group), skipped_key(save.group)] if save.delete else []
    if save.record is not None:
        puts[record_key(save.group)] = save.record.to_json(now_seconds)
    for progress in save.progress:
        parts = progress.split(save.ranges_max)
        parts[0].parts = max(progress.parts, len(parts))
        for number, part in enumerate(parts):
            puts[progress_part_key(save.group, progress.stream, number)] = part.to_json(now_seconds, save.epoch)
        deletes += [progress_part_key(save.group, progress.stream, n) for n in range(len(parts), progress.parts)]
    parts_of = dict(save.parts)
    for stream in save.forget:
        deletes += [progress_part_key(save.group, stream, number) for number in range(parts_of.get(stream, 1))]
    return puts, deletes


def in_batches(
    puts: Mapping[str, bytes], deletes: Iterable[str], changes_max: int | None, bytes_max: int = BATCH_BYTES_MAX
) -> Iterator[list[tuple[str, bytes | None]]]:
    """Keys with their values (None: to be deleted), so many and so large as one transaction takes."""
    batch: list[tuple[str, bytes | None]] = []
    size = 0
    for key, value in [*puts.items(), *((key, None) for key in deletes)]:
        size += len(value or b"")
        if batch and (len(batch) == changes_max or size > bytes_max):
            yield batch
            batch, size = [], len(value or b"")
        batch.append((key, value))
    if batch:
        yield batch


def load_progress(group: GroupId, stream: Stream, get: Callable[[str], bytes | None]) -> StreamProgress | None:
    """Stored progress of one stream, if there is any; damage is a RequestError that names group and stream."""
    data = get(progress_key(group, stream))
    if data is None:
        return None
    try:
        found = StreamProgress.from_json(stream, data)
        for number in range(1, found.parts):
            part = get(progress_part_key(group, stream, number))
            if part is not None:
                found.add(StreamProgress.from_json(stream, part))
    except RequestError as error:
        raise RequestError(f"group {group}: {error}") from error
    return found
