"""Messages of one block, as columns, on their way to one or more sessions."""

from __future__ import annotations

from collections.abc import Sequence

from holdfast.model import Batch, Stream


class Rows:
    """A block's columns and where it stands; `stream` is None for retained messages, which stand nowhere."""

    __slots__ = ("flags", "offsets", "payloads", "properties", "publishers", "stream", "times", "topics", "weight")

    def __init__(
        self,
        stream: Stream | None,
        offsets: Sequence[int],
        batch: Batch,
        times: Sequence[int] | int,
    ):
        self.stream, self.offsets = stream, offsets
        self.topics, self.payloads = batch.topics, batch.payloads
        self.publishers, self.properties = batch.publishers, batch.properties
        flags = batch.flags
        if not isinstance(flags, int) and flags and flags.count(flags[0]) == len(flags):
            flags = flags[0]  # nearly always, and then nobody need look at each
        self.flags = flags
        self.times = times
        self.weight = sum(map(len, batch.payloads)) // max(1, len(batch.payloads)) + 64
        """Roughly the bytes of one row."""

    def take(self, picks: Sequence[int]) -> Rows:
        """Only these rows: whoever waits with a few of them must not keep the whole block in memory."""
        batch = Batch(self.topics, self.payloads, self.publishers, self.flags, self.properties).take(picks)
        times = self.times if isinstance(self.times, int) else [self.times[at] for at in picks]
        return Rows(self.stream, [self.offsets[at] for at in picks], batch, times)
