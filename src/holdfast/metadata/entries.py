"""The nouns of the metadata store: an entry, the changes one asks for, the events one is told."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from holdfast.metadata.contract import Lease


@dataclass(frozen=True, slots=True)
class Entry:
    """What a key holds."""

    value: bytes
    version: int
    """Grows with every change of the key, whoever makes it."""


@dataclass(frozen=True, slots=True)
class Put:
    """As a change: store this value. As an event: this value was stored, and `version` says when."""

    key: str
    value: bytes
    lease: Lease | None = None
    """With a lease the key lives as long as the lease does; without one, until it is deleted."""
    version: int = 0
    """Set in events only."""


@dataclass(frozen=True, slots=True)
class Delete:
    """A change: remove the key if it is there."""

    key: str


@dataclass(frozen=True, slots=True)
class Deleted:
    """An event: the key is gone, by deletion or because its lease ended."""

    key: str
    version: int


Change = Put | Delete
Event = Put | Deleted
