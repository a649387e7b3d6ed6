"""Which blocks a filtered read must look into: the index's answer, as pages of the directory.

What the index does not cover yet, the last blocks of a stream, is indexed in memory, once for everybody who reads.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from holdfast.log import index
from holdfast.log.contract import Backend, BlockEntry, Head
from holdfast.topics import Wanted, prefixes

_PLANS_MAX = 1024
_NEAR_END = 2
"""A read this few blocks from the end looks into all of them: cheaper than asking what its filter means."""

_TOPICS_MAX = 4096
"""A wildcard that means more topics than this would find something in most blocks anyway: just read them."""

_PAGE_BLOCKS = 256
_TAIL_POSTINGS_MAX = 1 << 18
"""What is kept of one stream: two runs of full blocks. Only where there is no upkeep, more is not indexed yet."""
_POSTINGS_MAX = 1 << 22
"""What is kept of all of them: 32 MB."""


@dataclass(slots=True)
class _Plan:
    """Which blocks a filter means in a stream."""

    first: int
    past: int
    offsets: index.Offsets
    """In [first, past) only the blocks that hold these offsets can have a match."""


class _Tail:
    """A run in memory, over blocks from `first` on that no stored run covers.

    It stays right for good, as runs do: blocks are only added, and when they are merged, somebody holds their offsets.
    """

    def __init__(self, stream: int, first: int, indexed_to: int):
        self.first = self.past = first
        self.indexed_to = indexed_to
        self.postings = 0
        self._stream = stream
        self._parts: list[tuple[index.Hashes, index.Hashes]] = []
        """Sorted hashes, and how far from `first` the block begins in which each of them occurs; the larger first."""
        self._unknown: list[int] = []
        """Blocks that were merged while we looked: anything may be in them."""
        self._lock = threading.Lock()

    @property
    def full(self) -> bool:
        return self.postings >= _TAIL_POSTINGS_MAX

    def reach(self, backend: Backend, past: int) -> None:
        """Take in the blocks before `past`, as far as there is room."""
        with self._lock:
            while self.past < past and not self.full:
                entries = backend.entries(self._stream, self.past, _PAGE_BLOCKS)
                if not entries:  # dropped meanwhile
                    self.past = past
                    return
                stored = backend.hashes([entry.body for entry in entries])
                self._unknown += [entry.base for entry in entries if entry.body not in stored]
                known = [entry for entry in entries if entry.body in stored]
                if known:
                    found = [index.unpack(stored[entry.body]) for entry in known]
                    bases = [max(0, entry.base - self.first) for entry in known]
                    self._add(np.concatenate(found), np.repeat(np.array(bases, "<u4"), [len(part) for part in found]))
                self.past = entries[-1].past

    def _add(self, hashes: index.Hashes, places: index.Hashes) -> None:
        self.postings += len(hashes)
        while self._parts and len(self._parts[-1][0]) < 2 * len(hashes):
            others, others_places = self._parts.pop()
            hashes, places = np.concatenate([others, hashes]), np.concatenate([others_places, places])
        order = np.argsort(hashes, kind="stable")
        self._parts.append((hashes[order], places[order]))

    def bases_with_any(self, wanted: index.Hashes) -> Iterator[index.Offsets]:
        with self._lock:
            parts = list(self._parts)
            yield np.array(self._unknown, "<i8")
        for hashes, places in parts:
            yield index.with_any(hashes, places, wanted).astype("<i8") + self.first


class Planner:
    def __init__(self, backend: Backend):
        self._backend = backend
        self._plans: OrderedDict[tuple[int, str], _Plan] = OrderedDict()
        self._tails: OrderedDict[int, _Tail] = OrderedDict()
        self._lock = threading.Lock()

    def page(self, head: Head, offset: int, wanted: Wanted | None, limit: int) -> tuple[list[BlockEntry], int]:
        """The next blocks to look into from `offset` on, and the offset below which that settles it."""
        if wanted is not None and not wanted.everything:
            plan = self._known(head, offset, wanted)
            if plan is None:
                entries = self._backend.entries(head.id, offset, _NEAR_END + 1)
                if len(entries) <= _NEAR_END:
                    return entries, head.next_offset
                plan = self._plan(head, offset, wanted)
            if plan is not None:
                return self._planned(head, offset, plan, limit)
        entries = self._backend.entries(head.id, offset, limit)
        return entries, entries[-1].past if entries else head.next_offset

    def _planned(self, head: Head, offset: int, plan: _Plan, limit: int) -> tuple[list[BlockEntry], int]:
        at = int(np.searchsorted(plan.offsets, offset, "right"))
        # The block that holds `offset` may have begun before it.
        chosen = plan.offsets[max(0, at - 1) : at + limit]
        if not len(chosen):
            return [], plan.past
        entries = self._backend.entries_at(head.id, [int(o) for o in chosen])
        entries = [entry for entry in entries if entry.past > offset]
        settled = plan.past if at + limit >= len(plan.offsets) else entries[-1].past
        return entries, settled

    def _known(self, head: Head, offset: int, wanted: Wanted) -> _Plan | None:
        """Remembered, since a reader comes back for more."""
        key = (head.id, wanted.text)
        with self._lock:
            plan = self._plans.get(key)
            if plan is None or not plan.first <= offset < plan.past:
                return None
            self._plans.move_to_end(key)
            return plan

    def _plan(self, head: Head, offset: int, wanted: Wanted) -> _Plan | None:
        """None if the filter means too many topics."""
        # The topics of a block are registered with it: what they are now is complete up to the head we hold.
        hashes = self._hashes(head, wanted)
        if hashes is None:
            return None
        past, found = head.next_offset, []
        if len(hashes):
            indexed_to = self._backend.indexed_to(head.id)
            if offset < indexed_to:
                buckets = hashes >> np.uint32(index.SHIFT)
                runs = self._backend.runs(head.id, [int(bucket) for bucket in np.unique(buckets)], offset)
                found = [index.bases_with_any(run.data, hashes[buckets == run.bucket]) for run in runs]
            if indexed_to < past:
                tail = self._tail(head, max(offset, indexed_to), indexed_to)
                past = min(past, tail.past)
                found += tail.bases_with_any(hashes)
        offsets = np.unique(np.concatenate(found)) if found else np.empty(0, "<i8")
        plan = _Plan(offset, past, offsets[offsets < past])
        with self._lock:
            self._plans[head.id, wanted.text] = plan
            while len(self._plans) > _PLANS_MAX:
                self._plans.popitem(last=False)
        return plan

    def _tail(self, head: Head, offset: int, indexed_to: int) -> _Tail:
        """One that covers `offset`."""
        with self._lock:
            tail = self._tails.pop(head.id, None)
            if tail is None or tail.indexed_to != indexed_to or offset < tail.first:
                tail = _Tail(head.id, indexed_to, indexed_to)
            if tail.full and offset >= tail.past:
                tail = _Tail(head.id, offset, indexed_to)
            self._tails[head.id] = tail
            while len(self._tails) > 1 and sum(one.postings for one in self._tails.values()) > _POSTINGS_MAX:
                self._tails.popitem(last=False)
        tail.reach(self._backend, head.next_offset)
        return tail if offset < tail.past else self._tail(head, offset, indexed_to)

    def _hashes(self, head: Head, wanted: Wanted) -> index.Hashes | None:
        """The topics it means, hashed and sorted."""
        means: set[int] = set()
        begins: set[str] = set()
        for part in wanted.parts:
            if part.exact or part.below:
                means.add(index.topic_hash(part.prefix))
            if not part.exact:
                begins.add(part.prefix + "/" if part.below else part.prefix)
        for prefix in prefixes(begins):
            known = self._backend.topics(head.stream.log, head.stream.generation, prefix)
            means.update(index.topic_hash(known[at]) for at in wanted.matching(known))
            if len(means) > _TOPICS_MAX:
                return None
        return np.array(sorted(means), "<u4")
