"""Parts become rows by vehicle: a run over several parts, sorted by VIN, in steps that hold nobody up.

Rows that are inserted in the order of their keys touch few pages; batches as they come would touch a page each.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from holdfast.fanout.table import MergeStep, Part

STEP_ROWS = 1_000
RUN_IDS_MAX = 250_000


def steps(parts: Sequence[Part], after: str, rows: int = STEP_ROWS) -> Iterator[MergeStep]:
    """The steps of a run that has come as far as `after`."""
    numbers = tuple(part.number for part in parts)
    vins = pa.concat_arrays([pa.array(part.ids, pa.string()) for part in parts])
    owners = pa.array(np.repeat([part.number for part in parts], [len(part.ids) for part in parts]))
    table = pa.table({"vin": vins, "part": owners})
    # Arrow sorts without keeping other threads waiting; by bytes, which is the order of code points, as in Python.
    table = table.take(pc.sort_indices(table, [("vin", "ascending"), ("part", "ascending")]))
    if after:
        table = table.filter(pc.greater(table["vin"], after))
    at = 0
    while True:
        end = _end_of_step(table, at + rows)
        some = table.slice(at, end - at)
        found = list(zip(some["vin"].to_pylist(), some["part"].to_pylist(), strict=True))
        last = found[-1][0] if found else after
        done = end >= table.num_rows
        yield MergeStep(numbers, after, last, found, done)
        if done:
            return
        after, at = last, end


def _end_of_step(table: pa.Table, end: int) -> int:
    """All rows of one VIN are in one step, or a step that goes on after it would miss some."""
    vins = table["vin"]
    while 0 < end < table.num_rows and vins[end].as_py() == vins[end - 1].as_py():
        end += 1
    return int(min(end, table.num_rows))
