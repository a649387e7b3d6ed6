"""Holdfast: a durable subscription engine for fleets."""

from holdfast.errors import (
    BrokenInvariant,
    CorruptBlock,
    HoldfastError,
    OutcomeUnknown,
    PeerError,
    PreconditionFailed,
    RequestError,
    StaleEpoch,
    StoreError,
    StoreFull,
    StoreUnavailable,
    UnknownStream,
)
from holdfast.log import ABSENT, Key, Log
from holdfast.model import At, Batch, Beginning, Message, Next, Since, Stream
from holdfast.store import open_log as open

__all__ = [
    "ABSENT",
    "At",
    "Batch",
    "Beginning",
    "BrokenInvariant",
    "CorruptBlock",
    "HoldfastError",
    "Key",
    "Log",
    "Message",
    "Next",
    "OutcomeUnknown",
    "PeerError",
    "PreconditionFailed",
    "RequestError",
    "Since",
    "StaleEpoch",
    "StoreError",
    "StoreFull",
    "StoreUnavailable",
    "Stream",
    "UnknownStream",
    "open",
]
