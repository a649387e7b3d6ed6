"""A writer that tells, over a pipe, exactly what it was told is durable; and the audit of what it told."""

from __future__ import annotations

import itertools

import holdfast
from holdfast import AppendKey, Batch, Log, StoreError
from holdfast.log import blocks
from processes import Report


def write(report: Report, url: str, name: str, rows: int = 50, keyed: bool = False, limit: int | None = None) -> None:
    """Append numbered messages for ever (or `limit` times); report each append once it is durable."""
    with holdfast.open(url) as log:
        for n in itertools.count() if limit is None else range(limit):
            batch = Batch(
                [f"t/{k % 7}" for k in range(rows)], [b"%s:%d:%d" % (name.encode(), n, k) for k in range(rows)]
            )
            batch.publishers = [f"p{k % 5}" for k in range(rows)]
            try:
                appended = log.append("messages", batch, key=AppendKey(name, n + 1) if keyed else None)
            except StoreError as error:
                report.send((n, type(error).__name__, str(error)))
                continue
            report.send((n, [(tuple(p.stream), p.base, list(p.rows or range(p.count))) for p in appended.placed], None))


def audit(
    log: Log, told: dict[str, dict[int, list[tuple[tuple[str, int, int], int, list[int]]]]]
) -> dict[tuple[str, int, int], int]:
    """Everything reported durable is there, at its offset, once; streams have no gap; no block is torn.

    Returns how many messages each stream holds.
    """
    found: dict[tuple[str, int, int], list[bytes]] = {}
    for head in log.heads("messages"):
        payloads: list[bytes] = []
        offset = 0
        while offset < head.next_offset:
            reading = log.read(head.stream, offset)  # raises on a block that does not match its checksum
            for chunk in reading.chunks:
                assert chunk.offsets() == list(range(len(payloads), len(payloads) + chunk.batch.num_rows))
                payloads += chunk.batch.column(blocks.PAYLOAD).to_pylist()
            offset = reading.next_offset
        assert len(payloads) == head.next_offset
        found[tuple(head.stream)] = payloads
    for name, appends in told.items():
        for n, places in appends.items():
            for stream, base, rows in places:
                expected = [b"%s:%d:%d" % (name.encode(), n, k) for k in rows]
                assert found[stream][base : base + len(rows)] == expected, (name, n, stream, base)
    everything = [p for payloads in found.values() for p in payloads]
    assert len(everything) == len(set(everything)), "something is there twice"
    return {stream: len(payloads) for stream, payloads in found.items()}
