"""What a session's row becomes: when its client comes, moves on, goes, or is never seen again.

Functions of a row and a time, for whoever changes it: its owner, a taker, the sweep. Times are the store's clock. A
will stands in the row from CONNECT on and is published out of it, by the change that removes it: so it is published
once.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from math import inf
from typing import NamedTuple

import msgspec

from holdfast.sessions.session import NEVER
from holdfast.sessions.table import RowWrite, SessionRow, StoredWill

FiltersOf = Callable[[bytes], Collection[str]]
"""The filters in `SessionRow.subscriptions`."""


class Content(NamedTuple):
    """What moves while a client is connected, as it is stored."""

    subscriptions: bytes = b""
    cursors: bytes = b""
    packets: bytes = b""


class Departure(NamedTuple):
    """How a connection ended."""

    at: float
    goodbye: bool = False
    """The client said DISCONNECT: its will is void."""
    expiry_secs: int | None = None
    """What DISCONNECT said of the session's expiry."""
    grace_secs: float = 0.0
    """The node ended it. The client had no fair chance to come back: it counts as gone only after this."""
    lease_stays: bool = False
    """The node ended it, and goes on: nobody else will find the row soon."""


class Change(NamedTuple):
    """A row as it is to be, and the will that is published with it."""

    row: SessionRow
    publish: StoredWill | None = None


def end_of(row: SessionRow) -> float:
    """When the session ends if nobody comes back."""
    if row.left_at is None or row.expiry_secs == NEVER:
        return inf
    return row.left_at + row.expiry_secs


def flushed(row: SessionRow, content: Content) -> SessionRow:
    """Its client is connected, and has moved on."""
    return msgspec.structs.replace(
        row,
        seq=row.seq + 1,
        subscriptions=content.subscriptions,
        cursors=content.cursors,
        packets=content.packets,
    )


def left(row: SessionRow, how: Departure, now: float) -> Change:
    """Its connection is over. Whatever is due at once, its end or its will, is done in the same change."""
    will = None if how.goodbye else row.will
    gone_at = how.at + how.grace_secs
    away = msgspec.structs.replace(
        row,
        seq=row.seq + 1,
        owner=None,
        lease=None,
        expiry_secs=row.expiry_secs if how.expiry_secs is None else how.expiry_secs,
        left_at=gone_at,
        will=will,
        will_due=None if will is None else max(gone_at, how.at + will.delay_secs),
    )
    return settled(away, now)


def settled(row: SessionRow, now: float) -> Change:
    """A row whose client is away, after what has come due: its end (and its will with it), or its will."""
    if row.dead:
        return Change(row)
    if end_of(row) <= now:
        return Change(dead(row, now), row.will)
    publish = None
    if row.will_due is not None and row.will_due <= now:
        publish, row = row.will, msgspec.structs.replace(row, will=None, will_due=None)
    due = min(end_of(row), inf if row.will_due is None else row.will_due)
    return Change(msgspec.structs.replace(row, due=None if due == inf else due), publish)


def dead(row: SessionRow, now: float) -> SessionRow:
    """Deleted: without content, until nothing that is still under way can bring it back."""
    return SessionRow(
        client_id=row.client_id,
        epoch=row.epoch,
        seq=row.seq,
        connect=row.connect,
        born=row.born,
        left_at=now,
        dead=True,
    )


def taken(
    row: SessionRow | None,
    client_id: str,
    token: str,
    clean_start: bool,
    expiry_secs: int,
    will: StoredWill | None,
    owner: str,
    lease: int,
    arrived_at: float,
) -> Change:
    """A CONNECT takes the row. In time is when it arrived.

    A row that names an owner was left by a node that no longer serves it: its client is back, and that was the node's
    fault, so its will is withdrawn; unless the session ends here, with everything that waited for its end.
    """
    publish = None
    if row is not None and row.lease is None:
        row, publish = settled(row, arrived_at)
    ended = row is None or row.dead or clean_start or (row.lease is not None and row.expiry_secs == 0)
    if row is not None and ended and publish is None:
        publish = row.will
    kept = SessionRow(client_id=client_id, born=token) if row is None or ended else row
    return Change(
        msgspec.structs.replace(
            kept,
            owner=owner,
            lease=lease,
            connect=token,
            expiry_secs=expiry_secs,
            left_at=None,
            will=will,
            will_due=None,
            due=None,
        ),
        publish,
    )


def write(old: SessionRow | None, change: Change, *, take: bool, filters_of: FiltersOf) -> RowWrite:
    """The change as a store takes it, with the filters it adds and removes."""
    row = change.row
    before = old.subscriptions if old is not None else b""
    added: Collection[str] = ()
    removed: Collection[str] = ()
    if row.subscriptions != before:
        had = frozenset(filters_of(before)) if before else frozenset()
        has = frozenset(filters_of(row.subscriptions)) if row.subscriptions else frozenset()
        added, removed = sorted(has - had), sorted(had - has)
    expected = None if old is None else (old.epoch, old.seq)
    return RowWrite(row, expected, take, change.publish, added, removed)
