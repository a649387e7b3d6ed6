"""Which blocks a filtered read must look into: the index's answer, as pages of the directory."""

from __future__ import annotations

import threading
from collections import OrderedDict
from dataclasses import dataclass

import numpy as np

from holdfast.log import index
from holdfast.log.contract import Backend, BlockEntry, Head
from holdfast.topics import Wanted, prefixes

_PLANS_MAX = 1024
_NEAR_END = 16
"""A wildcard read this few blocks from the end looks into all of them: cheaper than asking what it means."""

_TOPICS_MAX = 4096
"""A wildcard that means more topics than this would find something in most blocks anyway: just read them."""


@dataclass(slots=True)
class _Plan:
    """What a filter means in a stream, and which blocks that is."""

    hashes: index.Hashes
    """The topics it means, hashed and sorted: complete for blocks below `settled`."""
    settled: int
    first: int
    past: int
    offsets: index.Offsets
    """In [first, past) only the blocks that hold these offsets can have a match; above, ask block by block."""


class Planner:
    def __init__(self, backend: Backend):
        self._backend = backend
        self._plans: OrderedDict[tuple[int, str], _Plan] = OrderedDict()
        self._lock = threading.Lock()

    def page(self, head: Head, offset: int, wanted: Wanted | None, limit: int) -> tuple[list[BlockEntry], int]:
        """The next blocks to look into from `offset` on, and the offset below which that settles it."""
        plan = None
        if wanted is not None and not wanted.everything:
            if not wanted.exact:
                entries = self._backend.entries(head.id, offset, _NEAR_END + 1)
                if len(entries) <= _NEAR_END:
                    return entries, head.next_offset
            plan = self._plan(head, offset, wanted)
        if plan is None:
            entries = self._backend.entries(head.id, offset, limit)
            return entries, entries[-1].past if entries else head.next_offset
        if offset < plan.past:
            return self._from_runs(head, offset, plan, limit)
        return self._from_blocks(head, offset, plan, limit)

    def _from_runs(self, head: Head, offset: int, plan: _Plan, limit: int) -> tuple[list[BlockEntry], int]:
        at = int(np.searchsorted(plan.offsets, offset, "right"))
        # The block that holds `offset` may have begun before it.
        chosen = plan.offsets[max(0, at - 1) : at + limit]
        entries = self._backend.entries_at(head.id, [int(o) for o in chosen])
        entries = [entry for entry in entries if entry.past > offset]
        settled = plan.past if at + limit >= len(plan.offsets) else entries[-1].past
        return entries, settled

    def _from_blocks(self, head: Head, offset: int, plan: _Plan, limit: int) -> tuple[list[BlockEntry], int]:
        tail = [e for e in self._backend.entries(head.id, offset, limit) if e.base < plan.settled]
        stored = self._backend.hashes([entry.body for entry in tail])
        hits = [e for e in tail if e.body not in stored or index.contains_any(stored[e.body], plan.hashes)]
        return hits, tail[-1].past if tail else head.next_offset

    def _plan(self, head: Head, offset: int, wanted: Wanted) -> _Plan | None:
        """Remembered, since a reader comes back for more; None if the filter means too many topics."""
        key = (head.id, wanted.text)
        with self._lock:
            plan = self._plans.get(key)
            if plan is not None and plan.first <= offset < plan.settled:
                self._plans.move_to_end(key)
                return plan
        # The topics of a block are registered with it: what they are now is complete up to the head we hold.
        hashes = self._hashes(head, wanted)
        if hashes is None:
            return None
        buckets = [index.bucket_of(int(h)) for h in hashes]
        by_bucket = {b: hashes[[at for at, other in enumerate(buckets) if other == b]] for b in set(buckets)}
        past = self._backend.indexed_to(head.id)
        found = [
            index.bases_with_any(run.data, by_bucket[run.bucket])
            for run in self._backend.runs(head.id, sorted(by_bucket), offset)
        ]
        offsets = np.unique(np.concatenate(found)) if found else np.empty(0, "<i8")
        plan = _Plan(hashes, head.next_offset, offset, past, offsets[offsets < past])
        with self._lock:
            self._plans[key] = plan
            while len(self._plans) > _PLANS_MAX:
                self._plans.popitem(last=False)
        return plan

    def _hashes(self, head: Head, wanted: Wanted) -> index.Hashes | None:
        means = {index.topic_hash(part.text) for part in wanted.parts if part.exact}
        for prefix in prefixes(part for part in wanted.parts if not part.exact):
            known = self._backend.topics(head.stream.log, head.stream.generation, prefix)
            means.update(index.topic_hash(known[at]) for at in wanted.matching(known))
            if len(means) > _TOPICS_MAX:
                return None
        return np.array(sorted(means), "<u4")
