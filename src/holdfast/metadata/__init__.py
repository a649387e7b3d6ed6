"""Small keys with compare-and-set, leases and watches: cursors, leaders, membership and ownership live here."""

from __future__ import annotations

from holdfast.metadata.contract import Lease, LeaseEnded, Metadata, Preconditions, VersionMismatch, Versions
from holdfast.metadata.entries import Change, Delete, Deleted, Entry, Event, Put
from holdfast.metadata.watch import Watch

__all__ = [
    "Change",
    "Delete",
    "Deleted",
    "Entry",
    "Event",
    "Lease",
    "LeaseEnded",
    "Metadata",
    "Preconditions",
    "Put",
    "VersionMismatch",
    "Versions",
    "Watch",
]
