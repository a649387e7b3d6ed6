"""The durable truth: ordered, replayable streams of messages in a store."""

from __future__ import annotations

from holdfast.log.contract import ABSENT, Appended, Chunk, Generation, Head, Key, Placed, Reading, Skipped
from holdfast.log.log import Log

__all__ = [
    "ABSENT",
    "Appended",
    "Chunk",
    "Generation",
    "Head",
    "Key",
    "Log",
    "Placed",
    "Reading",
    "Skipped",
]
