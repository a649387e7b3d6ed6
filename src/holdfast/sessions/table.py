"""What a store keeps of sessions: one row each, changed only by whoever has seen it as it is.

A write says which state of the row it has seen; it is refused if the row has moved on. Every write of a call has a
verdict of its own, and a refusal never fails the others. A will that belongs to a change is appended to the log in
the same transaction, and only if the row was changed. `tests/contract/test_sessions.py` asks every store for this.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import NamedTuple, Protocol

import msgspec

from holdfast.errors import RequestError
from holdfast.log.contract import ReceivedId
from holdfast.topics import check_topic

TEXT_BYTES_MAX = 65_535


class StoredWill(msgspec.Struct, frozen=True):
    """What is published for a client that was lost."""

    topic: str
    payload: bytes
    qos: int
    retain: bool
    properties: bytes
    delay_secs: int


class SessionRow(msgspec.Struct, frozen=True, kw_only=True):
    """Everything about a session. Times are the store's clock, in seconds."""

    client_id: str
    epoch: int = 0
    """From one counter of the store, never given twice: new with every take."""
    seq: int = 0
    """0 with a new epoch, and one more with every write of the owner."""
    owner: str | None = None
    lease: int | None = None
    """The node that serves it, and the id of that node's lease; both None: the client is away."""
    connect: str = ""
    born: str = ""
    """Tokens of the CONNECT it was last taken for, and of the one that began it."""
    expiry_secs: int = 0
    left_at: float | None = None
    will: StoredWill | None = None
    will_due: float | None = None
    due: float | None = None
    """When somebody has to look at it: its end, or its will. None: not before a client comes."""
    subscriptions: bytes = b""
    cursors: bytes = b""
    packets: bytes = b""
    dead: bool = False
    """A deletion: without content, kept for a while so that a write in doubt cannot bring it back."""


class RowWrite(NamedTuple):
    """One change of one row."""

    row: SessionRow
    """As it is to be. A take gets its epoch from the store, whatever stands here."""
    expected: tuple[int, int] | None
    """Epoch and seq it must be at; None: there must be no row."""
    take: bool
    """Under a new epoch with seq 0; otherwise under `row.epoch` and `row.seq` as they stand."""
    publish: StoredWill | None = None
    """Appended to the log for this client, if the write is accepted."""
    subscribed: Collection[str] = ()
    unsubscribed: Collection[str] = ()
    """Filters this change adds and removes, for `filters_since`."""


class Verdict(NamedTuple):
    """What became of one write."""

    accepted: bool
    row: SessionRow | None
    """Accepted: as it was written. Refused: as it is now; None: there is none."""


class FilterCounts(NamedTuple):
    """How many sessions subscribe to each filter, as far as it changed."""

    counts: dict[str, int]
    version: int
    """To go on from."""
    whole: bool = False
    """These are all there are: whatever else was told before is over."""


class SessionTable(Protocol):
    """Safe to use from several threads; every call blocks. StoreError: failed, or nobody knows."""

    def now(self) -> float:
        """The store's clock, in seconds."""

    def read(self, client_ids: Collection[str]) -> dict[str, SessionRow]:
        """The rows there are, dead ones included."""

    def write(self, writes: Sequence[RowWrite]) -> list[Verdict]:
        """All in one transaction, each with its own verdict, in order. A client id occurs once.

        `read` shows it on return. A dead row is a row: `expected` None is refused, who takes it names its epoch and
        seq. RequestError: the call makes no sense, and nothing of it was done. OutcomeUnknown: all of it or nothing
        was done, perhaps only later.
        """

    def due(self, now: float, limit: int) -> list[SessionRow]:
        """Rows whose `due` has come, the oldest first. Nodes that ask at the same time may get the same rows."""

    def of_lease(self, lease: int, after: str, limit: int) -> list[SessionRow]:
        """Rows that name this lease, by client id, behind `after`."""

    def page(self, after: str, limit: int) -> list[SessionRow]:
        """All sessions, dead ones not counted, by client id, behind `after`."""

    def leases(self) -> set[int]:
        """Every lease that a row names."""

    def bury(self, before: float, limit: int) -> int:
        """Remove dead rows with `left_at` before this for good; how many. Counts of 0 since then go too."""

    def filters_since(self, version: int) -> FilterCounts:
        """What changed since; from 0 on: everything. A count of 0: nobody any more. May repeat what was told.

        Whoever goes on from the version of the last answer misses nothing, however late a commit becomes visible. If
        it was away for so long that counts of 0 are gone, it gets everything anew, and is told that it is `whole`.
        """

    def unused(self, filters: Collection[str]) -> set[str]:
        """Those of them that no session subscribes to."""

    def count(self) -> int:
        """How many sessions there are, dead ones not counted."""

    def received(self, client_ids: Collection[str]) -> dict[str, dict[int, int]]:
        """Packet ids of QoS 2 publishes that are in the log and were not released, of those that have any; their marks.

        `Log.append` stores them with the publishes. They belong to one life of a session: as soon as the row is
        taken with another `born`, or dead, they are gone.
        """

    def release(self, received: Sequence[ReceivedId]) -> None:
        """These packet ids are free again (PUBREL). Those that are not there do no harm, nor do those that are there
        for another publish, with another mark."""


def check_writes(writes: Sequence[RowWrite]) -> None:
    """RequestError if any store could not do this, or would do it wrongly."""
    check_client_ids([write.row.client_id for write in writes])
    if len({write.row.client_id for write in writes}) < len(writes):
        raise RequestError("a client id occurs twice among the rows of one write")
    for row, expected, take, publish, subscribed, unsubscribed in writes:
        if not take:
            if expected is None:
                raise RequestError(f"client {row.client_id!r}: a row is inserted by a take only")
            if row.epoch != expected[0] or row.seq <= expected[1]:
                raise RequestError(
                    f"client {row.client_id!r}: expected a later seq of epoch and seq {expected},"
                    f" got {(row.epoch, row.seq)}"
                )
        if publish is not None:
            check_topic(publish.topic)
        for text in (*subscribed, *unsubscribed):
            _check_text("filter", text)


def check_client_ids(client_ids: Collection[str]) -> None:
    for client_id in client_ids:
        _check_text("client id", client_id)
        if not client_id:
            raise RequestError("a client id is empty")


def _check_text(what: str, text: str) -> None:
    if "\0" in text:
        raise RequestError(f"{what} {text[:100]!r} contains NUL")
    try:
        size = len(text) if text.isascii() else len(text.encode())
    except UnicodeEncodeError as error:
        raise RequestError(f"{what} {text[:100]!r} is not valid Unicode") from error
    if size > TEXT_BYTES_MAX:
        raise RequestError(f"{what} {text[:100]!r}… has {size} bytes; it takes up to {TEXT_BYTES_MAX}")
