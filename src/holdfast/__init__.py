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
from holdfast.log import ABSENT, AppendKey, Log
from holdfast.model import At, Batch, Beginning, Message, Next, Since, Stream
from holdfast.store import open_log as open

__all__ = [
    "ABSENT",
    "AppendKey",
    "At",
    "Batch",
    "Beginning",
    "BrokenInvariant",
    "CorruptBlock",
    "HoldfastError",
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
