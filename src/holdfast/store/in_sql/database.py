"""A database as the SQL that is written once sees it: two dialects, one way to ask and one way to change."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol, TypeVar

from holdfast.errors import StoreError
from holdfast.log.contract import AppendKey, Landed, NewBlock, ReceivedId, Retained
from holdfast.model import Micros

T = TypeVar("T")
Row = tuple[Any, ...]
Rows = list[Row]


class Db(Protocol):
    """A connection of either kind; parameters are written as `?`."""

    def run(self, sql: str, *args: object) -> Rows:
        """The statement's rows; none if it has no result."""

    def run_many(self, sql: str, rows: Iterable[Row]) -> None: ...


class Transaction(Db, Protocol):
    """One commit: rows of any table and blocks of the log, durable together or not at all."""

    def append(
        self,
        log: str,
        generation: int,
        blocks: Sequence[NewBlock],
        topics: Sequence[str],
        expect: Mapping[int, int],
        key: AppendKey | None,
        now: Micros,
        retained: Sequence[Retained] = (),
        received: Sequence[ReceivedId] = (),
    ) -> tuple[list[Landed], bool]:
        """As `Backend.append`, within this transaction.

        GenerationSealed, PreconditionFailed and NotTaken are raised: whoever lets them pass has the whole transaction
        undone.
        """


class Dialect(Protocol):
    """Where the two databases' SQL differs."""

    now: str
    """The clock that decides about leases, in seconds since 1970."""
    now_in_turn: str
    """The same clock, read after the counter was locked, however long that took."""
    locked: str
    """Ends a select that keeps others from selecting the same way until the commit."""
    each_of: str
    """A subquery with one row per element of a JSON array."""
    and_notify: str
    """Ends the update of the counter: tell those who listen, once this is committed."""


class Database(Protocol):
    """What SqliteDatabase and PostgresDatabase do alike. Safe to use from several threads."""

    dialect: Dialect

    def ask(self, work: Callable[[Db], T]) -> T:
        """Read. Repeated while the store is away, for as long as the store tries at all."""

    def change(
        self,
        work: Callable[[Transaction], T],
        *,
        repeatable: bool = False,
        before_retry: Callable[[StoreError], None] | None = None,
    ) -> T:
        """One transaction: durable on return, undone if `work` raises. Repeated while the store is away.

        After an unknown outcome it is repeated only if `repeatable`. `before_retry` may raise to give up sooner.
        """
