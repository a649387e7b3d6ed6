"""The durable truth: ordered, replayable streams of messages in a store."""

from __future__ import annotations

from holdfast.log.contract import ABSENT, Appended, AppendKey, Chunk, Generation, Head, Placed, Reading, Skipped
from holdfast.log.log import Log

__all__ = [
    "ABSENT",
    "AppendKey",
    "Appended",
    "Chunk",
    "Generation",
    "Head",
    "Log",
    "Placed",
    "Reading",
    "Skipped",
]
