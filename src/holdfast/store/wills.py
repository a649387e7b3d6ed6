"""Wills as messages: what a write of session rows adds to the log."""

from __future__ import annotations

from collections.abc import Iterable

from holdfast.log.contract import Retained
from holdfast.model import RETAIN, Batch, Micros
from holdfast.sessions.table import RowWrite


def wills_batch(accepted: Iterable[RowWrite], now: Micros) -> tuple[Batch, list[Retained]]:
    """The messages of these writes, which have some, and what they retain."""
    wills = [(write.row.client_id, write.publish) for write in accepted if write.publish is not None]
    flags = [will.qos | (RETAIN if will.retain else 0) for _, will in wills]
    batch = Batch(
        topics=[will.topic for _, will in wills],
        payloads=[will.payload for _, will in wills],
        publishers=[client_id for client_id, _ in wills],
        flags=flags,
        properties=[will.properties or None for _, will in wills],
        times=now,
    )
    # The same time as in the log, by which a message is recognised when it has expired.
    retained = [
        Retained(will.topic, will.payload, client_id, flag, will.properties or None, now)
        for (client_id, will), flag in zip(wills, flags, strict=True)
        if will.retain
    ]
    return batch, retained
