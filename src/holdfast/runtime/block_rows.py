"""Blocks as they are read from the log, as what the sending loop works on: columns of Python values."""

from __future__ import annotations

from holdfast.log import Chunk
from holdfast.log import blocks as columns
from holdfast.model import Batch
from holdfast.sessions.rows import Rows


def rows_of(chunk: Chunk) -> Rows:
    """A chunk's columns as Python values: what the sending loop works on."""
    batch = chunk.batch
    words = batch.column(columns.TOPIC)
    names = words.dictionary.to_pylist()
    people = batch.column(columns.PUBLISHER)
    publishers = people.dictionary.to_pylist()
    properties = batch.column(columns.PROPERTIES)
    first = chunk.base + chunk.first
    return Rows(
        chunk.stream,
        range(first, first + batch.num_rows) if chunk.rows is None else chunk.offsets(),
        Batch(
            topics=[names[code] for code in words.indices.to_pylist()],
            payloads=batch.column(columns.PAYLOAD).to_pylist(),
            publishers=publishers[0] if len(publishers) == 1 else [publishers[c] for c in people.indices.to_pylist()],
            flags=batch.column(columns.FLAGS).to_pylist(),
            properties=None if properties.null_count == len(properties) else properties.to_pylist(),
        ),
        batch.column(columns.TIME).cast("int64").to_pylist(),
    )
