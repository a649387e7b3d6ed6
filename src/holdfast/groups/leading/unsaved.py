"""What of a group is not stored yet, and what waits to be said until it is: the one place of "save, then say".

    note, forget, write, delete  -->  save() --Save-->  host  --Saved-->       saved(),  ready() is said
                                                              --SaveFailed-->  failed(), and save() again

Leader, lender and batch desk hand over what changed, and either `say` what waits for it or keep a `ticket` and ask
`reached`. One save is under way at a time. A save that failed, or whose outcome nobody knows, has stored nothing as
far as anybody here is concerned: all of it is saved again, and nothing that waited for it is said.

A save that fails is tried again in halves, and what fails by itself waits by itself, longer each time: one stream
that cannot be saved holds up no other.

The one surprising rule: the record goes first. Progress bears the record's course, and where the store still has the
record of another course, progress under the new one would count as absent and the old be overwritten.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from math import inf

from holdfast.groups.progress import StreamProgress
from holdfast.groups.protocol.effects import LeaderEffect, Save
from holdfast.groups.protocol.nouns import GroupId
from holdfast.groups.record import GroupRecord
from holdfast.groups.settings import LeaderSettings
from holdfast.model import Stream

StoredPart = Stream | None
"""What is stored by itself: the progress of a stream, or (None) the record."""

Tickets = dict[StoredPart, int]


@dataclass(slots=True)
class SaveUnderWay:
    """What the host is saving now."""

    tickets: Tickets
    record: GroupRecord | None


@dataclass(slots=True)
class Refused:
    """Something that could not be saved even by itself."""

    times: int
    again_at: float


class Unsaved:
    """One group's, under one epoch."""

    def __init__(self, group: GroupId, epoch: int, settings: LeaderSettings):
        self._group, self._epoch, self._settings = group, epoch, settings
        self._ranges_max = settings.ranges_max
        self.at = inf
        """When to `save` next."""
        self.stored: GroupRecord | None = None
        """The record as it is known to be stored; None while nobody knows."""
        self._record: GroupRecord | None = None
        self._forget: dict[Stream, int] = {}
        """Each with the number of values it is stored over."""
        self._deleting = False
        # Every change has a number: `_changed` has the last one of what is not stored, `_landed` the last stored.
        self._changes = 0
        self._changed: Tickets = {}
        self._landed: Tickets = {}
        self._waiting: list[tuple[Tickets, LeaderEffect]] = []
        self._saving: SaveUnderWay | None = None
        self._refused: dict[StoredPart, Refused] = {}
        self._keys_max = inf
        self._not_before = -inf

    # --------------------------------------------------------------------------------- handed over

    def loaded(self, record: GroupRecord) -> None:
        self.stored = record

    def note(self, stream: Stream) -> None:
        """The progress of this stream has changed."""
        self._forget.pop(stream, None)
        self._change(stream)

    def forget(self, progress: StreamProgress) -> None:
        """What is stored of this stream is to be deleted."""
        self._forget[progress.stream] = progress.parts
        self._change(progress.stream)

    def keep(self, stream: Stream) -> int:
        """Not to be deleted after all: it begins anew, and will be written over. How many values that is."""
        if stream in self._forget:
            del self._changed[stream], self._landed[stream]
        return self._forget.pop(stream, 1)

    def write(self, record: GroupRecord) -> None:
        self._record = record
        self._change(None)

    def delete(self) -> None:
        """The record is to be deleted, and with it whatever `save` is given.

        What was not stored by then never will be, unless the group is really deleted: whatever waits, waits for that.
        """
        self._deleting = True
        self._changed.clear()
        self._landed.clear()
        self._refused.clear()
        self._change(None)
        self._waiting = [({None: self._changed[None]}, effect) for _, effect in self._waiting]

    def start_over(self) -> None:
        """What was done under the last course is worth nothing once the record of the new one is stored.

        Until then it is worth everything: whatever waits for it waits for the record instead.
        """
        over = [key for key in self._changed if key is not None and key not in self._forget]
        for tickets, _ in self._waiting:
            if not tickets.keys().isdisjoint(over):
                tickets[None] = self._changed[None]
        for stream in over:
            del self._changed[stream], self._landed[stream]

    def say(self, about: Iterable[StoredPart], effect: LeaderEffect) -> None:
        """To be said once everything that is known about these is stored."""
        self._waiting.append(({key: self._changed[key] for key in about if key in self._changed}, effect))

    def _change(self, key: StoredPart) -> None:
        if key not in self._changed:
            self._landed[key] = self._changes  # whatever was known of it before is stored
        self._changes += 1
        self._changed[key] = self._changes

    # -------------------------------------------------------------------------------------- asking

    @property
    def empty(self) -> bool:
        """Everything is stored."""
        return not self._changed and self._saving is None

    @property
    def streams(self) -> list[Stream]:
        """Those that are not stored as they are."""
        return [key for key in self._changed if key is not None]

    def ticket(self, key: StoredPart) -> int:
        """A number for what is known now, to be asked about with `reached`."""
        return self._changed.get(key, 0)

    def reached(self, key: StoredPart, ticket: int) -> bool:
        """Is everything stored that was known when this ticket was given?"""
        return key not in self._changed or self._landed[key] >= ticket

    def stands(self, record: GroupRecord) -> bool:
        """Does the store say of the group what a leader must have said before it lends?"""
        return self.stored is not None and self.stored.lent and self.stored.course == record.course

    # -------------------------------------------------------------------------------------- saving

    def by(self, at: float) -> None:
        """Save at that moment, or earlier; after a failure, not at once."""
        self.at = min(self.at, max(at, self._not_before))

    def save(self, progress: Mapping[Stream, StreamProgress], now: float) -> list[LeaderEffect]:
        """The next save, unless there is nothing to save or a save is under way."""
        self.at = inf
        if self._saving is not None:
            return []
        keys = self._at_a_time(self._next_keys(now), progress)
        if not keys:
            later = [self._refused[key].again_at for key in self._changed if key in self._refused]
            self.at = min([at for at in later if at > now], default=inf)
            return []
        record = self._record if None in keys else None
        self._saving = SaveUnderWay({key: self._changed[key] for key in keys}, record)
        if self._deleting:
            known = self._forget | {stream: each.parts for stream, each in progress.items()}
            return [self._forgetting(Save(self._group, self._epoch, delete=True), known)]
        streams = [key for key in keys if key is not None]
        save = Save(
            self._group, self._epoch, record, tuple(self._copies(progress, streams)), ranges_max=self._ranges_max
        )
        return [self._forgetting(save, {key: self._forget[key] for key in streams if key in self._forget})]

    def _copies(self, progress: Mapping[Stream, StreamProgress], streams: Iterable[Stream]) -> Iterator[StreamProgress]:
        for stream in streams:
            if stream not in self._forget:
                own = progress[stream]
                copy = own.copy()
                # From now on there may be so many values, whether or not this save is made.
                own.parts = max(own.parts, own.parts_wanted(self._ranges_max))
                yield copy

    @staticmethod
    def _forgetting(save: Save, streams: Mapping[Stream, int]) -> Save:
        parts = tuple((stream, parts) for stream, parts in streams.items() if parts > 1)
        return replace(save, forget=tuple(streams), parts=parts)

    def _next_keys(self, now: float) -> list[StoredPart]:
        due = {key: now >= self._refused[key].again_at if key in self._refused else True for key in self._changed}
        if None in due and not (self.stored and self._record and self.stored.course == self._record.course):
            return [None] if due[None] else []
        ready = sorted((key for key in due if due[key]), key=lambda key: key is not None)
        together: list[StoredPart] = [key for key in ready if key not in self._refused]
        if together:
            return together[: int(min(self._keys_max, len(together)))]
        return ready[:1]

    def _at_a_time(self, keys: list[StoredPart], progress: Mapping[Stream, StreamProgress]) -> list[StoredPart]:
        """No more than fits into one or two values, but one in any case."""
        ranges = 0
        for number, key in enumerate(keys):
            ranges += progress[key].ranges if key is not None and key in progress else 0
            if number and ranges > self._ranges_max:
                return keys[:number]
        return keys

    def saved(self, now: float) -> None:
        """The save under way is durable."""
        done, self._saving = self._saving, None
        if done is None:
            return
        for key, ticket in done.tickets.items():
            self._refused.pop(key, None)
            if self._changed.get(key) == ticket:
                del self._changed[key], self._landed[key]
                if key is not None:
                    self._forget.pop(key, None)
            elif key in self._changed:
                self._landed[key] = max(self._landed[key], ticket)
        if None in done.tickets:
            self.stored = done.record
        self._keys_max *= 2
        self._not_before = now
        for refused in self._refused.values():
            # The store is there after all: those that did not fail often may have failed for that alone.
            if refused.times < 3:
                refused.again_at = now
        if self._changed:
            self.by(now)

    def failed(self, now: float) -> None:
        """Nothing of the save under way is stored, or nobody knows."""
        failed, self._saving = self._saving, None
        if failed is None:
            return
        retry = self._settings.save_retry_seconds
        if None in failed.tickets:
            self.stored = None
        if len(failed.tickets) == 1:
            (key,) = failed.tickets
            times = self._refused[key].times + 1 if key in self._refused else 1
            self._refused[key] = Refused(
                times, now + min(retry * 2 ** (times - 1), self._settings.save_retry_max_seconds)
            )
        self._keys_max = max(1, len(failed.tickets) // 2)
        for key in failed.tickets:
            # To the end of the queue: the other half is tried first.
            if key in self._changed:
                self._changed[key] = self._changed.pop(key)
        self._not_before = now + retry
        self.at = self._not_before

    def ready(self) -> list[LeaderEffect]:
        """What waited, and need wait no longer."""
        said: list[LeaderEffect] = []
        still: list[tuple[Tickets, LeaderEffect]] = []
        for tickets, effect in self._waiting:
            if all(self.reached(key, ticket) for key, ticket in tickets.items()):
                said.append(effect)
            else:
                still.append((tickets, effect))
        self._waiting = still
        return said
