"""A lake for tests, written by hand: moves a sealed generation of a log there, and drops it from the store."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from holdfast.log import Log
from holdfast.log.history import FILE_SCHEMA
from holdfast.log.manifest import LakeFile, Part, Reached
from holdfast.model import RETAIN


def move_to_lake(log: Log, name: str, generation: int, root: Path) -> None:
    """As the Spark job does: files, manifest, then the store lets go of the generation."""
    manifest = log.manifest
    assert manifest is not None
    if manifest.root(name) is None:
        manifest.set_root(name, str(root))
    rows, parts, reached = [], [], []
    for head in log.heads(name):
        if head.stream.generation != generation or not head.next_offset:
            continue
        shard = head.stream.shard
        for chunk in log.read(head.stream, 0).chunks:
            for offset, row in zip(chunk.offsets(), chunk.batch.to_pylist(), strict=True):
                flags = row.pop("flags")
                rows.append({**row, "shard": shard, "offset": offset, "qos": flags & 3, "retain": bool(flags & RETAIN)})
        parts.append(Part(shard, 0, head.next_offset, head.next_offset))
        reached.append(Reached(head.stream, 0, head.next_offset))
    path = f"{name}/generation-{generation}.parquet"
    (root / name).mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.Table.from_pylist(rows, FILE_SCHEMA), root / path, write_page_checksum=True)
    times = [int(row["time"].timestamp() * 1e6) for row in rows]
    size = (root / path).stat().st_size
    file = LakeFile(generation, "2026-01-01", path, len(rows), size, min(times), max(times), tuple(parts))
    manifest.commit(name, [file], reached)
    sealed = next(each for each in log.generations(name) if each.number == generation)
    manifest.set_verified(name, sealed, {}, len(rows), log.clock())
    log.drop(name, generation)
