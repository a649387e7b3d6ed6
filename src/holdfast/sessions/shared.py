"""A loan being read for a session: the session's side of a shared group, opaque to the rest of it.

A loan covers one stream (or a key slice of it). Everything below `next_offset` has been queued for the client or
passed over; what is acknowledged or passed over is news, gathered here until the agent is told.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from holdfast.cursors.cursor import Range
from holdfast.groups.progress import Done
from holdfast.groups.protocol.effects import StartReading
from holdfast.groups.protocol.nouns import NO_POLICY, Loan
from holdfast.model import Stream
from holdfast.sessions.rows import Rows
from holdfast.sessions.subscriptions import Subscription
from holdfast.sessions.window import Delivery
from holdfast.topics import TopicFilter

LESS_BYTES = 4
"""So much smaller a packet may be for another client, besides subscription identifiers: QoS 0, shorter lengths."""


class LoanFeed:
    """One loan of one session."""

    __slots__ = (
        "_news",
        "counts",
        "done",
        "halted",
        "in_flight",
        "largest_packet",
        "loan",
        "news_to",
        "next_offset",
        "parked",
        "refused",
        "sent",
        "stays",
        "stopped",
        "stream",
        "subscription",
        "too_large",
        "wanted",
    )

    def __init__(self, start: StartReading, wanted: TopicFilter, subscription: Subscription):
        self.loan: Loan = start.loan
        self.stream: Stream = start.loan.piece.stream
        self.done = Done(start.loan.piece, start.mark, start.skip, start.key)
        self.wanted, self.subscription = wanted, subscription
        self.next_offset = start.mark.offset + 1
        self.stopped = False
        self.counts = start.policy != NO_POLICY
        """The group counts deliveries."""
        self.in_flight: set[int] = set()
        self.parked: set[int] = set()
        """Never to be delivered under this loan, and news only once they are among the dead letters."""
        self.sent: list[int] = []
        """Offsets sent since the agent was last told, where that is counted."""
        self.stays = False
        """Its QoS 2 deliveries wait for the client to come back."""
        self.too_large: list[int] = []
        """Offsets that nobody in the group can be sent, since somebody last looked."""
        self.refused: list[tuple[int, int]] = []
        """Those that only this client cannot be sent, each with the bytes of the smallest packet it fits into."""
        self.largest_packet = start.largest_packet
        """Nobody in the group takes larger ones."""
        self.halted = False
        """One was refused, and what comes after it must not be sent before it: the loan goes back."""
        self.news_to: dict[LoanFeed, None] = {}
        """Where this loan is noted when it has news."""
        self._news: list[Range] = []

    @property
    def filter(self) -> str:
        return self.wanted.text

    def choose(self, rows: Rows, picks: Sequence[int], past: int) -> Sequence[int]:
        """Which of the matching rows are this loan's to deliver; everything else below `past` is passed over."""
        if past <= self.next_offset:
            return ()  # read for a neighbour, who began before
        offsets = rows.offsets
        if picks and offsets[picks[0]] < self.next_offset:
            picks = self._not_before(picks, offsets)
        mine = self.done.chosen(picks, offsets, rows.publishers, rows.topics)
        if self.parked:
            mine = [at for at in mine if offsets[at] not in self.parked]
        if isinstance(mine, range) and isinstance(offsets, range):
            self._pass_over(offsets[mine.start : mine.stop : mine.step], past)
        else:
            self._pass_over([offsets[at] for at in mine], past)
        return mine

    def _not_before(self, picks: Sequence[int], offsets: Sequence[int]) -> Sequence[int]:
        """Without those that lie before what is read next."""
        if isinstance(picks, range) and picks.step == 1 and isinstance(offsets, range):
            return picks[self.next_offset - offsets[picks[0]] :]
        return [at for at in picks if offsets[at] >= self.next_offset]

    def _pass_over(self, chosen: Sequence[int], past: int) -> None:
        """Of the offsets that may be ours, those below `past` that were not chosen are done with."""
        step = self.done.step
        at = self.next_offset + (self.done.index - self.next_offset) % step
        if self.parked:
            chosen = sorted({*chosen, *(offset for offset in self.parked if at <= offset < past)})
        if isinstance(chosen, range) and chosen and chosen.step == step and chosen[0] == at:
            at = chosen[-1] + step  # nothing in between was passed over: as many as there are, one look
            chosen = ()
        for offset in chosen:
            if offset > at:
                self._news.append((max(0, at - step + 1), offset - step))
            at = offset + step
        if at < past:
            self._news.append((max(0, at - step + 1), past - 1))
        self.next_offset = past

    def catch_up(self, past: int) -> None:
        """The log has been read to here: what was not chosen on the way did not match."""
        if past > self.next_offset:
            self._pass_over((), past)
        self.news_to[self] = None  # what did not match on the way is news, even if nothing is sent of it

    def pass_to(self, head: int) -> None:
        """A loan that is fed from commits: whatever was committed below `head` and not offered did not match."""
        if not self.stopped and head > self.next_offset:
            self._pass_over((), head)

    def sending(self, offset: int) -> None:
        self.in_flight.add(offset)
        if self.counts:
            self.sent.append(offset)
            self.news_to[self] = None

    def wait_for_client(self, offsets: Iterable[int]) -> None:
        """The client has gone: these wait for it, whatever else was in flight goes back to the group."""
        self.in_flight = set(offsets)
        self.stays = bool(self.in_flight)

    def settle(self, deliveries: Sequence[Delivery], reason: int) -> None:
        for delivery in deliveries:
            self.settle_offset(delivery.offset)

    def passed(self, offset: int) -> None:
        self.settle_offset(offset)

    def unsendable(self, offset: int, packet_bytes: int) -> None:
        """Larger than the client takes: it is for somebody else in the group, or for nobody."""
        self.parked.add(offset)
        least = packet_bytes - len(self.subscription.identifier_bytes) - LESS_BYTES
        if least > self.largest_packet:
            self.too_large.append(offset)
        else:
            self.refused.append((offset, least))
            self.halted = self.done.key != "message"
        self.news_to[self] = None

    def given_up(self, offset: int, packet_bytes: int) -> None:
        """The client is back and is not sent it again: nobody waits for its answer, and the loan may go back."""
        self.in_flight.discard(offset)
        self.news_to[self] = None
        if packet_bytes:
            self.unsendable(offset, packet_bytes)

    def settle_offset(self, offset: int) -> None:
        """Acknowledged, or never to be sent."""
        self.in_flight.discard(offset)
        self._news.append((max(0, offset - self.done.step + 1), offset))
        self.news_to[self] = None

    def lost(self) -> None:
        """The stream is gone: the leader will hear of it and take the loan back."""

    def take_news(self) -> tuple[Range, ...]:
        """What has been acknowledged or passed over since the last time, as ranges in order."""
        if not self._news:
            return ()
        news, self._news = sorted(self._news), []
        found = [news[0]]
        for first, last in news[1:]:
            if first <= found[-1][1] + 1:
                found[-1] = (found[-1][0], max(found[-1][1], last))
            else:
                found.append((first, last))
        return tuple(found)
