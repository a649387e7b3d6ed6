"""What the lake holds, as the store knows it: a file counts when it is in here, and not before.

The lake's progress and its files change in one transaction, and only from the exact place where the last
change left it: so every message is in the lake once, whoever was killed, or ran twice, in between.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from holdfast.log.contract import Generation, Head
from holdfast.model import Micros, Stream


class Part(NamedTuple):
    """Which offsets of one stream a file holds: `messages` of them, from `first` to before `past`."""

    shard: int
    first: int
    past: int
    messages: int


class LakeFile(NamedTuple):
    """One file of one generation and one day."""

    generation: int
    date: str
    path: str
    """Below the lake's root."""
    messages: int
    bytes: int
    oldest: Micros
    newest: Micros
    parts: tuple[Part, ...]


class Reached(NamedTuple):
    """How far one commit takes the lake in one stream."""

    stream: Stream
    first: int
    past: int


class Manifest(Protocol):
    """The lake's tables in one store. Every method is one transaction."""

    def root(self, log: str) -> str | None:
        """Where the log's lake is; None if it has none."""

    def set_root(self, log: str, root: str) -> None:
        """Declare the lake. From now on retention drops only what has been verified there."""

    def reached(self, log: str) -> dict[Stream, int]:
        """The offset before which everything is in the lake, by stream."""

    def commit(self, log: str, files: Sequence[LakeFile], reached: Sequence[Reached]) -> None:
        """Add the files and move on, all or none. PreconditionFailed: somebody else has moved meanwhile."""

    def parts(self, stream: Stream, first: int, past: int) -> list[tuple[str, Part, Micros]]:
        """The files that hold any of these offsets: path, part, and the newest time in the file."""

    def heads(self, log: str) -> list[Head]:
        """The lake's streams, in the shape of the store's: number 0, since they are none of its own."""

    def paths(self, log: str) -> set[str]:
        """Every file, below the lake's root."""

    def totals(self, log: str) -> tuple[int, int, int]:
        """Files, messages and bytes."""

    def verified(self, log: str) -> set[int]:
        """The generations that were compared with the store and found the same."""

    def set_verified(
        self, log: str, generation: Generation, checksums: dict[int, int], messages: int, now: Micros
    ) -> None:
        """The generation was compared, and these are its streams' checksums by shard."""

    def may_drop(self, log: str, generation: int) -> bool:
        """May the store forget this generation? Yes if the log has no lake, or the lake verifiably has it."""
