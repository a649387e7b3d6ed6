"""Retention was faster than a session: what it has lost, how it goes on, and whether it may.

    error       refused, and its cursors stay where they are: so the next CONNECT finds the same loss, in this process
                or another, until the policy is another one, the client starts clean, or an operator accepts the loss
                (which is this decision once more, with `earliest`)
    earliest    what is gone is passed over, everything that is still there is delivered
    latest      the same: what is still there was never the part that was lost. It differs where a session's cursors
                cannot be read: then nobody knows what it had, and it goes on with what comes next

Whatever the policy, a record of what is gone goes into the row with the cursors. A generation that is gone takes the
number of its shards and their ends with it, so a record says from where on something may be missing.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Literal, NamedTuple

from holdfast.cursors.cursor_map import DONE, CursorMap, Progress, past_of, union
from holdfast.errors import RequestError
from holdfast.model import Stream
from holdfast.sessions.heads import KeptGenerations
from holdfast.sessions.packed import StoredCursors
from holdfast.sessions.positions import Gap

Policy = Literal["error", "earliest", "latest"]
DROPPED = "dropped by retention"


class Trimmed(NamedTuple):
    """What is decided about one session."""

    cursors: StoredCursors
    """To go on with, and to store if `gaps` are new."""
    gaps: list[Gap]
    """Records that were not there before."""
    refuse: bool
    """The CONNECT is refused."""


def trimmed(
    cursors: StoredCursors, numbers: Collection[int], kept: KeptGenerations, policy: Policy, log: str, now: float
) -> Trimmed:
    """What a session, with subscriptions of these numbers, has lost. `cursors` stays as it is."""
    if not numbers or not _looks_at_lost(cursors, kept):
        return Trimmed(cursors, [], False)
    found = cursors.copy()
    gaps = _gaps(cursors, numbers, kept, log, now)
    new = found.note(gaps)
    if gaps and policy == "error":
        return Trimmed(found, new, True)
    for each in {id(one): one for one in (found.session, *found.own.values())}.values():
        each.fill(0, kept.first, DONE)
        for generation in kept.missing:
            each.finish(generation)
    covered = {id(own) for own in found.own.values() if found.session.covers(own)}
    found.own = {number: own for number, own in found.own.items() if id(own) not in covered}
    return Trimmed(found, new, False)


def unreadable(
    error: RequestError, ends: Mapping[Stream, int], kept: KeptGenerations, policy: Policy, log: str, now: float
) -> Trimmed:
    """The cursors cannot be read: nobody knows what the session had. `ends`: of the newest generation's streams.

    With `error` there is nothing to be stored: the row stays as it is.
    """
    found = StoredCursors()
    if policy == "error":
        return Trimmed(found, [], True)
    found.session.fill(0, kept.first, DONE)
    for generation in kept.missing:
        found.session.finish(generation)
    if policy == "latest":
        found.session = CursorMap.done_before(kept.newest)
        for stream, end in ends.items():
            if stream.generation == kept.newest:
                found.session.set(stream, end)
        name = _name(log, kept.first, kept.newest)
        return Trimmed(found, found.note([Gap(name, 0, None, str(error), now)]), False)
    return Trimmed(found, [], False)


def _looks_at_lost(cursors: StoredCursors, kept: KeptGenerations) -> bool:
    """Quickly, since it is asked at every CONNECT and nearly always untrue."""
    for generation in cursors.session.streams:
        if kept.has_lost(generation):
            return True
    spans = cursors.session.spans
    for at, (begin, past) in enumerate(spans):
        end = spans[at + 1][0] if at + 1 < len(spans) else kept.newest
        if past != DONE and (begin < min(end, kept.first) or any(begin <= gone < end for gone in kept.missing)):
            return True
    return any(kept.has_lost(generation) for own in cursors.own.values() for generation in own.streams)


def _gaps(cursors: StoredCursors, numbers: Collection[int], kept: KeptGenerations, log: str, now: float) -> list[Gap]:
    """The oldest first. Generations of which nothing at all was read are one record, as long as they are neighbours."""
    found: list[Gap] = []
    begun: tuple[int, int] | None = None
    for generation in _unread_generations(cursors.session, kept):
        rest, shards = _lost_in(cursors, numbers, generation)
        if begun is not None and (generation != begun[1] + 1 or rest != 0 or shards):
            found.append(Gap(_name(log, *begun), 0, None, DROPPED, now))
            begun = None
        if rest == 0 and not shards:
            begun = (generation if begun is None else begun[0], generation)
            continue
        for shard, past in sorted(shards.items()):
            if past != DONE:
                found.append(Gap(str(Stream(log, shard, generation)), past, None, DROPPED, now))
        if rest != DONE:
            reason = f"{DROPPED}, if it had other shards than those named" if shards else DROPPED
            found.append(Gap(_name(log, generation, generation), rest, None, reason, now))
    if begun is not None:
        found.append(Gap(_name(log, *begun), 0, None, DROPPED, now))
    return found


def _unread_generations(session: CursorMap, kept: KeptGenerations) -> list[int]:
    """Those that are gone and not done for every subscription, for all that `session` says."""
    found = {generation for generation in session.streams if kept.has_lost(generation)}
    spans = session.spans
    for at, (begin, past) in enumerate(spans):
        end = spans[at + 1][0] if at + 1 < len(spans) else kept.newest
        if past != DONE:
            found.update(range(begin, min(end, kept.first)))
            found.update(gone for gone in kept.missing if begin <= gone < end)
    return sorted(found)


def _lost_in(cursors: StoredCursors, numbers: Collection[int], generation: int) -> tuple[int, dict[int, int]]:
    """Where the subscription that has come least far stands: in streams that are not named, and in those that are."""
    maps = [cursors.own.get(number) for number in numbers]
    shards = set(cursors.session.streams.get(generation, ()))
    for own in maps:
        shards.update(own.streams.get(generation, ()) if own is not None else ())
    default = cursors.session.default(generation)
    rest = min(default if own is None else max(default, own.default(generation)) for own in maps)
    found: dict[int, int] = {}
    for shard in shards:
        stream = Stream("", shard, generation)
        shared: Progress = cursors.session.get(stream)
        found[shard] = min(past_of(shared if own is None else union(shared, own.get(stream))) for own in maps)
    return rest, found


def _name(log: str, first: int, last: int) -> str:
    """All streams of one generation, or of neighbouring ones."""
    return f"{log}.{first}.*" if first == last else f"{log}.{first}-{last}.*"
