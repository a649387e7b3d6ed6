"""How far a streaming query has come, stream by stream, as Spark keeps it in its checkpoint.

    {"done": 3, "at": {"4.0": 120, "4.1": 98}}

Everything in generations up to `done` has been read; `at` says where to go on in the later ones, by
`generation.shard`; a stream that is not named is at its beginning. Nothing is decided here but by what is
given, so a batch that is planned again is planned alike.

One surprising rule: Spark asks for the first offset anew when it repeats the first batch, and `latest` has
moved by then. So what was the beginning is written into the end of the first batch (`began`), and that counts.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from holdfast.errors import RequestError, UnknownStream
from holdfast.log.contract import Head

Key = tuple[int, int]
"""Generation and shard."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where a query is."""

    done: int
    at: Mapping[Key, int] = field(default_factory=dict)

    def of(self, key: Key) -> int:
        return self.at.get(key, 0)

    def to_json(self) -> dict[str, Any]:
        return {"done": self.done, "at": {f"{g}.{s}": offset for (g, s), offset in sorted(self.at.items())}}

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Place:
        try:
            at = {}
            for name, offset in value["at"].items():
                generation, shard = name.split(".")
                at[int(generation), int(shard)] = int(offset)
            return cls(int(value["done"]), at)
        except (KeyError, ValueError, AttributeError) as error:
            raise RequestError(
                f"{json.dumps(value)} is no place in a log; is this another source's checkpoint?"
            ) from error


def key_of(head: Head) -> Key:
    return head.stream.generation, head.stream.shard


def beginning(heads: Sequence[Head], at: Mapping[Key, int]) -> Place:
    """Everything these streams hold from the given offsets on; not named: from their beginning."""
    first = min((head.stream.generation for head in heads), default=1)
    return Place(first - 1, {key: offset for key, offset in at.items() if offset > 0})


def tidied(place: Place, heads: Iterable[Head]) -> Place:
    """The same place, without the generations that are finished and have been read to their end."""
    by_generation: dict[int, list[Head]] = {}
    for head in heads:
        by_generation.setdefault(head.stream.generation, []).append(head)
    done = place.done
    for generation, streams in sorted(by_generation.items()):
        if generation <= done:
            continue
        if generation != done + 1 or not all(h.sealed and place.of(key_of(h)) >= h.next_offset for h in streams):
            break
        done = generation
    return Place(done, {key: offset for key, offset in place.at.items() if key[0] > done})


def missing(place: Place, heads: Sequence[Head]) -> range:
    """The generations the query has not finished and that are no longer to be had."""
    first = min((head.stream.generation for head in heads), default=place.done + 1)
    return range(place.done + 1, max(first, place.done + 1))


def after_missing(place: Place, heads: Sequence[Head], log: str, policy: str) -> Place:
    """What to do about generations that are gone: say so, or go on with the earliest that is left."""
    gone = missing(place, heads)
    if not gone:
        return place
    if policy == "error":
        which = f"generation {gone[0]}" if len(gone) == 1 else f"generations {gone[0]} to {gone[-1]}"
        raise UnknownStream(
            f"{which} of log {log!r} had not been read to the end and are gone from the store and the lake; "
            "to go on with what is left, use option trimmed=earliest"
        )
    return Place(gone[-1], {key: offset for key, offset in place.at.items() if key[0] > gone[-1]})


def advanced(place: Place, heads: Sequence[Head], most: int | None = None) -> Place:
    """As far as the streams go, or `most` messages further: the oldest generation first, its streams alike."""
    at = dict(place.at)
    left = most
    by_generation: dict[int, list[Head]] = {}
    for head in heads:
        if head.stream.generation > place.done:
            by_generation.setdefault(head.stream.generation, []).append(head)
    for _, streams in sorted(by_generation.items()):
        waiting = {key_of(h): h.next_offset - place.of(key_of(h)) for h in streams}
        total = sum(n for n in waiting.values() if n > 0)
        take = total if left is None else min(left, total)
        for key, count in shares(waiting, take, total).items():
            at[key] = place.of(key) + count
        if left is not None:
            left -= take
            if left == 0:
                break
    return Place(place.done, at)


def shares(waiting: Mapping[Key, int], take: int, total: int) -> dict[Key, int]:
    """Each stream's share of what is taken, in proportion; rounding is made up for from the first on."""
    shares = {key: take * count // total for key, count in waiting.items() if count > 0}
    short = take - sum(shares.values())
    for key in shares:
        if short == 0:
            break
        if shares[key] < waiting[key]:
            shares[key] += 1
            short -= 1
    return {key: count for key, count in shares.items() if count}


def capped(heads: Sequence[Head], target: Mapping[Key, int] | None) -> list[Head]:
    """The heads as they were when the target was set; streams that came later do not count yet."""
    if target is None:
        return list(heads)
    kept = [head for head in heads if key_of(head) in target]
    # Cut short, a stream is not at its end, so it must not count as finished either.
    return [
        head
        if head.next_offset <= target[key_of(head)]
        else head._replace(next_offset=target[key_of(head)], sealed=False)
        for head in kept
    ]
