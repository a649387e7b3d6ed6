"""Delivery decides which client gets what next: from a commit to whoever is live, from the log to whoever is behind.

    Committed ──▶ live outlets ──put──▶ outgoing ──▶ Write           while the socket takes it and the window has room
                  others fall behind           ▲
    Fetch ──▶ Fetched ──────────put────────────┘                     while there is room for what is read

`heads` says how far each stream has been delivered on this node. An outlet that has read up to a head is live from that
moment on, so nothing falls between. There is one predicate, in `_serve`: something to send and room to send it,
something to read and room to keep it. Whatever may change it is an event, and ends there.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import inf

from holdfast.delivery.outlet import Outlet
from holdfast.delivery.readers import Fetched, LoanReader, OwnReader, Reader, ReaderStatus, Request, move
from holdfast.machine import Tick
from holdfast.model import Stream
from holdfast.mqtt.trie import Trie
from holdfast.sessions.heads import Heads
from holdfast.sessions.retained import RetainedMessages, Selection
from holdfast.sessions.rows import Rows
from holdfast.sessions.shared import LoanFeed


@dataclass(frozen=True, kw_only=True, slots=True)
class DeliverySettings:
    """How much may be under way, for one client and in all."""

    pending_bytes_max: int = 1 << 20
    """What may wait in memory for one client; beyond that it waits in the log."""
    fetches_max: int = 2
    """Reads of the log under way at a time."""
    write_bytes: int = 256 << 10
    """How much one outlet may send in one turn; then it is the others'."""
    serves_max: int = 100
    """How many outlets are sent something in answer to one block; the others have their turn after that."""
    retained_rows: int = 500
    """How many retained messages one outlet may queue in one turn."""
    reads_max: int = 2
    """Reads under way for one outlet."""
    loan_rows: int = 1024
    """Loans are read on only while fewer rows than this wait: they share what room there is."""
    read_again_seconds: float = 0.5
    early_bytes_max: int = 16 << 20
    """What is kept of our own blocks that may not be delivered yet; beyond that they are read from the log."""


# ---------------------------------------------------------------------------------------------- events


@dataclass(frozen=True, slots=True)
class Committed:
    """A block this node has just stored."""

    rows: Rows


@dataclass(frozen=True, slots=True)
class Followed:
    """What others stored: rows of a stream from our head on, read up to `past`."""

    stream: Stream
    at: int
    past: int
    rows: Sequence[Rows]


@dataclass(frozen=True, slots=True)
class StreamsSeen:
    """The streams the store has, those it has sealed, and those that only the lake still has, each with its end."""

    kept: Collection[Stream]
    sealed: Collection[Stream]
    lake: Mapping[Stream, int]


@dataclass(frozen=True, slots=True)
class Attached:
    """A client is connected, and its session knows where it stands."""

    outlet: Outlet


@dataclass(frozen=True, slots=True)
class Detached:
    """The connection is over."""

    outlet: Outlet


@dataclass(frozen=True, slots=True)
class Subscribed:
    """The session has taken this filter."""

    outlet: Outlet
    filter: str


@dataclass(frozen=True, slots=True)
class RetainedOwed:
    """The subscription is acknowledged, and these retained messages go to it."""

    outlet: Outlet
    filter: str
    selection: Selection


@dataclass(frozen=True, slots=True)
class Unsubscribed:
    outlet: Outlet
    filter: str


@dataclass(frozen=True, slots=True)
class LoanStarted:
    outlet: Outlet
    feed: LoanFeed


@dataclass(frozen=True, slots=True)
class LoanStopped:
    """Send nothing more of it."""

    outlet: Outlet
    feed: LoanFeed


@dataclass(frozen=True, slots=True)
class Room:
    """The client acknowledged something, or it is this outlet's turn again."""

    outlet: Outlet


@dataclass(frozen=True, slots=True)
class Blocked:
    """The socket takes no more for now, or takes more again."""

    outlet: Outlet
    blocked: bool


@dataclass(frozen=True, slots=True)
class FetchDone:
    """What a Fetch found."""

    reader: Reader
    found: Fetched


@dataclass(frozen=True, slots=True)
class FetchFailed:
    """The store could not be read just now."""

    reader: Reader


DeliveryEvent = (
    Committed
    | Followed
    | StreamsSeen
    | Attached
    | Detached
    | Subscribed
    | RetainedOwed
    | Unsubscribed
    | LoanStarted
    | LoanStopped
    | Room
    | Blocked
    | FetchDone
    | FetchFailed
    | Tick
)

# --------------------------------------------------------------------------------------------- effects


@dataclass(frozen=True, slots=True)
class Write:
    """To this outlet's socket."""

    outlet: Outlet
    data: bytes


@dataclass(frozen=True, slots=True)
class NextTurn:
    """Say `Room` in the next turn of the loop: there is more, and others come first."""

    outlet: Outlet


@dataclass(frozen=True, slots=True)
class Fetch:
    """Read from the log on a thread, and answer FetchDone or FetchFailed."""

    reader: Reader
    request: Request
    bytes_max: int


@dataclass(frozen=True, slots=True)
class Follow:
    """Blocks of others lie before one of ours: read them, and answer Followed."""


@dataclass(frozen=True, slots=True)
class LoanNews:
    """Something of this outlet's loans was acknowledged or passed over: tell its agent."""

    outlet: Outlet


@dataclass(frozen=True, slots=True)
class AskClock:
    """Let this outlet's agent see the clock, then say `Room`: what was lent may not be its client's any more."""

    outlet: Outlet


@dataclass(frozen=True, slots=True)
class Broken:
    """Our own fault, and this outlet's alone: end its connection; its session reads on from the log when it is back."""

    outlet: Outlet
    error: Exception


DeliveryEffect = Write | NextTurn | Fetch | Follow | LoanNews | AskClock | Broken


class Delivery:
    """All outlets of one node."""

    def __init__(self, retained: RetainedMessages, settings: DeliverySettings):
        self.retained = retained
        self._settings = settings
        self.wall_ahead = 0.0
        """The clock that messages expire by, minus the machine's. The host keeps it true."""
        self.heads = Heads()
        self.live: Trie[Outlet] = Trie()
        """Attached sessions by filter: what a commit is matched against."""
        self.anywhere: Trie[str] = Trie()
        """Filters of all sessions, away or on whatever node: only to tell publishers that somebody listens."""
        self.shared: Trie[str] = Trie()
        """Filters of the loans that are being read here."""
        self._loans: dict[Stream, dict[str, list[LoanReader]]] = {}
        self._loan_filters: Counter[str] = Counter()
        self._early: dict[Stream, dict[int, Rows]] = {}
        """Our own blocks that came before other processes' blocks in front of them were read."""
        self._early_bytes = 0
        self._left_out: dict[Stream, int] = {}
        """Where those of them end that there was no room for: they are read from the log."""
        self._hungry: deque[Reader] = deque()
        """Readers that have room and wait for a free thread."""
        self._fetching = 0
        self._turn = 0
        """Counts events: what was written in answer to this one, no socket has complained of yet."""
        self._again: deque[tuple[float, Reader]] = deque()
        """Readers whose read failed, and when to try again."""
        self.deadline = inf

    # ---------------------------------------------------------------------------------------- the door

    def handle(self, event: DeliveryEvent, now: float) -> list[DeliveryEffect]:
        effects: list[DeliveryEffect] = []
        self._turn += 1
        match event:
            case Committed(rows):
                self._on_committed(rows, now, effects)
            case Room(outlet):
                outlet.turn_asked = False
                self._serve(outlet, now, effects)
            case Blocked(outlet, blocked):
                outlet.blocked = blocked
                if not blocked:
                    self._serve(outlet, now, effects)
            case FetchDone(reader, found):
                self._on_fetched(reader, found, now, effects)
            case FetchFailed(reader):
                self._on_fetch_failed(reader, now)
            case Followed():
                self._on_followed(event, now, effects)
            case StreamsSeen():
                self._on_streams(event, now, effects)
            case Tick():
                self._on_tick(now, effects)
            case _:
                self._on_outlet(event, now, effects)
        if self._hungry:
            self._fetch(effects)
        return effects

    def _on_outlet(
        self,
        event: Attached | Detached | Subscribed | RetainedOwed | Unsubscribed | LoanStarted | LoanStopped,
        now: float,
        effects: list[DeliveryEffect],
    ) -> None:
        outlet = event.outlet
        match event:
            case Attached():
                self._on_attached(outlet)
            case Detached():
                self._on_detached(outlet)
                return
            case Subscribed(filter=text):
                self.live.add(text, outlet)
                self._consider(outlet.own)
            case RetainedOwed(filter=text, selection=selection):
                outlet.retained.pop(text, None)  # of a filter that is subscribed to again: from the beginning
                outlet.retained[text] = selection
            case Unsubscribed(filter=text):
                self.live.remove(text, outlet)
                outlet.retained.pop(text, None)
                self._consider(outlet.own)
            case LoanStarted(feed=feed):
                self._start_loan(outlet, feed)
            case LoanStopped(feed=feed):
                self._stop_loan(outlet, feed)
        self._serve(outlet, now, effects)

    # ------------------------------------------------------------------------------------ who is where

    def known(self, stream: Stream) -> int | None:
        """How far this stream can be read, in the store or in the lake."""
        return self.heads.known(stream)

    @property
    def newest(self) -> int:
        """The newest generation that can be read."""
        return self.heads.newest

    def anyone_for(self, topics: Iterable[str]) -> set[str]:
        """Which of these topics somebody is subscribed to, connected, elsewhere or away."""
        tries = [trie for trie in (self.live, self.anywhere, self.shared) if len(trie)]
        return {topic for topic in set(topics) if any(trie.match(topic) for trie in tries)}

    def _on_attached(self, outlet: Outlet) -> None:
        outlet.attached = True
        outlet.own = OwnReader(outlet, self)
        session = outlet.session
        for text in session.subscriptions.filters:
            self.live.add(text, outlet)
        self._consider(outlet.own)

    def _on_detached(self, outlet: Outlet) -> None:
        outlet.attached = False
        session = outlet.session
        for text in session.subscriptions.filters:
            self.live.remove(text, outlet)
        for feed in list(outlet.loans):
            self._stop_loan(outlet, feed)
        self._end(outlet.own)
        del outlet.own  # they refer to each other: nobody should have to search for what is left of a connection
        outlet.retained.clear()

    def _on_streams(self, seen: StreamsSeen, now: float, effects: list[DeliveryEffect]) -> None:
        kept = dict.fromkeys(seen.kept)
        for stream in [s for s in self.heads if s not in kept]:
            del self.heads[stream]  # dropped by retention
            self._left_out.pop(stream, None)
            for rows in self._early.pop(stream, {}).values():
                self._early_bytes -= _size(rows)
        for stream in kept:
            self.heads.setdefault(stream, 0)
        # A stream is done with once it has been delivered to its end: whoever says `sealed` has seen to that.
        self.heads.seal(seen.sealed)
        self.heads.set_lake({stream: end for stream, end in seen.lake.items() if stream not in self.heads})
        for stream in [stream for stream in self._early if self._may_go_on(stream)]:
            self._deliver_early(stream, now, effects)

    def _may_go_on(self, stream: Stream) -> bool:
        """A publisher's messages keep their order across generations: the older ones are delivered to their ends."""
        return stream in self.heads and stream.generation <= self.heads.oldest_open

    # --------------------------------------------------------------------------------------- committing

    def _on_committed(self, rows: Rows, now: float, effects: list[DeliveryEffect]) -> None:
        stream, base = rows.stream, rows.offsets[0]
        assert stream is not None
        head = self.heads.get(stream, -1)
        if base == head and self._may_go_on(stream):
            self._deliver(rows, now, effects)
            self._deliver_early(stream, now, effects)
        elif base >= head:
            # Others' blocks lie before it, or what is left of an older generation, which they may have added to.
            if not self._early or self._early_bytes + _size(rows) <= self._settings.early_bytes_max:
                self._early.setdefault(stream, {})[base] = rows
                self._early_bytes += _size(rows)
            else:
                self._left_out[stream] = rows.offsets[-1] + 1
            effects.append(Follow())

    @property
    def waits_for_others(self) -> bool:
        """Blocks of our own are stored and not delivered yet: others' blocks, or news of their stream, come first."""
        return bool(self._early) or bool(self._left_out)

    def next_early(self, stream: Stream, past: int) -> int:
        """How far a stream must be read from the log before blocks of our own go on."""
        at = self.heads.get(stream, 0)
        return min([base for base in self._early.get(stream, ()) if base > at], default=past)

    def _on_followed(self, event: Followed, now: float, effects: list[DeliveryEffect]) -> None:
        stream = event.stream
        if self.heads.get(stream) == event.at:  # otherwise a commit of our own settled it meanwhile
            for rows in event.rows:
                self._deliver(rows, now, effects)
            self.heads[stream] = max(self.heads[stream], event.past)
        if stream in self.heads:
            self._deliver_early(stream, now, effects)
            if self.heads[stream] >= self._left_out.get(stream, 0):
                self._left_out.pop(stream, None)

    def _deliver_early(self, stream: Stream, now: float, effects: list[DeliveryEffect]) -> None:
        early = self._early.get(stream)
        if early is None:
            return
        for base in [base for base in early if base < self.heads[stream]]:
            self._early_bytes -= _size(early.pop(base))  # overtaken: it was read from the log
        while early:
            rows = early.pop(self.heads[stream], None)
            if rows is None:
                return
            self._early_bytes -= _size(rows)
            self._deliver(rows, now, effects)
        self._early.pop(stream, None)

    def _deliver(self, rows: Rows, now: float, effects: list[DeliveryEffect]) -> None:
        """Offer a block to every live outlet that wants any of it."""
        topics, stream = rows.topics, rows.stream
        assert stream is not None
        distinct = dict.fromkeys(topics)  # in order, so that the same commits give the same effects
        past = rows.offsets[-1] + 1
        self.heads[stream] = past
        self.retained.see(rows)
        if self._loans and (loans := self._loans.get(stream)):
            self._offer_loans(rows, distinct, loans, past, now, effects)
        match = self.live.match
        hits = {topic: found for topic in distinct if (found := match(topic))}
        if not hits:
            return
        first = next(iter(hits.values()))
        if len(first) == 1 and len(hits) == len(distinct) and all(found == first for found in hits.values()):
            self._offer(first[0], rows, range(len(topics)), now, effects)
            return
        picks: dict[Outlet, list[int]] = {}
        for at, topic in enumerate(topics):
            for outlet in hits.get(topic, ()):
                mine = picks.get(outlet)
                if mine is None:
                    picks[outlet] = [at]
                elif mine[-1] != at:  # two filters of one session may match the same message
                    mine.append(at)
        for count, (outlet, mine) in enumerate(picks.items()):
            self._offer(outlet, rows, mine, now, effects, later=count >= self._settings.serves_max)

    def _offer(
        self,
        outlet: Outlet,
        rows: Rows,
        picks: Sequence[int],
        now: float,
        effects: list[DeliveryEffect],
        *,
        later: bool = False,
    ) -> None:
        try:
            # Retained messages come first: what is committed meanwhile waits in the log.
            if not outlet.session.offer(rows, picks, self._settings.pending_bytes_max, hold=bool(outlet.retained)):
                self._consider(outlet.own)
            if later:
                self._ask_turn(outlet, effects)
            else:
                self._serve(outlet, now, effects)
        except Exception as error:  # the others must get theirs all the same
            effects.append(Broken(outlet, error))

    # --------------------------------------------------------------------------------------------- loans

    def _start_loan(self, outlet: Outlet, feed: LoanFeed) -> None:
        reader = LoanReader(outlet, feed, self)
        outlet.loans[feed] = reader
        feed.news_to = outlet.loan_news
        if not self._loan_filters[feed.filter]:
            self.shared.add(feed.filter, feed.filter)
        self._loan_filters[feed.filter] += 1
        self._loans.setdefault(feed.stream, {}).setdefault(feed.filter, []).append(reader)
        self._consider(reader)

    def _stop_loan(self, outlet: Outlet, feed: LoanFeed) -> None:
        reader = outlet.loans.pop(feed, None)
        if reader is None:
            return
        self._end(reader)
        outlet.session.outgoing.drop(feed)
        by_filter = self._loans[feed.stream]
        by_filter[feed.filter] = [other for other in by_filter[feed.filter] if other is not reader]
        if not by_filter[feed.filter]:
            del by_filter[feed.filter]
            if not by_filter:
                del self._loans[feed.stream]
        self._loan_filters[feed.filter] -= 1
        if not self._loan_filters[feed.filter]:
            del self._loan_filters[feed.filter]
            self.shared.remove(feed.filter, feed.filter)

    def _offer_loans(
        self,
        rows: Rows,
        distinct: Collection[str],
        loans: dict[str, list[LoanReader]],
        past: int,
        now: float,
        effects: list[DeliveryEffect],
    ) -> None:
        meant: dict[str, set[str]] = {}
        for topic in distinct:
            for text in self.shared.match(topic):
                if text in loans:
                    meant.setdefault(text, set()).add(topic)
        for text, topics in meant.items():
            whole = len(topics) == len(distinct)
            picks = range(len(rows.topics)) if whole else [i for i, t in enumerate(rows.topics) if t in topics]
            for reader in list(loans[text]):
                if reader.status is ReaderStatus.LIVE:
                    self._offer_loan(reader, rows, picks, past, now, effects)

    def _offer_loan(
        self,
        reader: LoanReader,
        rows: Rows,
        picks: Sequence[int],
        past: int,
        now: float,
        effects: list[DeliveryEffect],
    ) -> None:
        outlet, outgoing = reader.outlet, reader.outlet.session.outgoing
        try:
            if outgoing.rows and outgoing.bytes > self._settings.pending_bytes_max:
                reader.feed.pass_to(rows.offsets[0])  # what lies before did not concern it
                self._consider(reader)
            else:
                outgoing.put(rows, reader.feed.choose(rows, picks, past), reader.feed)
            self._serve(outlet, now, effects)
        except Exception as error:  # the others must get theirs all the same
            effects.append(Broken(outlet, error))

    def pass_over(self, outlet: Outlet) -> None:
        """Live loans: whatever was committed and not offered did not concern them."""
        for feed, reader in outlet.loans.items():
            if reader.status is ReaderStatus.LIVE:
                feed.pass_to(self.heads.get(feed.stream, 0))

    # ------------------------------------------------------------------------------------- the predicate

    def _consider(self, reader: Reader) -> None:
        """Is it behind? Then it waits for room, wherever it was."""
        if reader.status in (ReaderStatus.READING, ReaderStatus.OVER):
            return
        outlet = reader.outlet
        if reader.behind():
            move(reader, ReaderStatus.WAITING)
            outlet.waiting[reader] = None
        else:
            move(reader, ReaderStatus.LIVE)
            outlet.waiting.pop(reader, None)

    def _serve(self, outlet: Outlet, now: float, effects: list[DeliveryEffect]) -> None:
        """Send what waits, if the socket takes it; read what is behind, if there is room for it."""
        if not outlet.attached:
            return  # its session may have another outlet by now
        outgoing, more = outlet.session.outgoing, False
        if outlet.retained and not outlet.blocked and outgoing.rows < self._settings.retained_rows:
            self._take_retained(outlet, now)
        if (outgoing.rows or outgoing.repeats) and not outlet.blocked:
            if outlet.agent is not None and outlet.agent.deadline <= now:
                effects.append(AskClock(outlet))
                return
            more = self._send(outlet, now, effects)
        if outlet.retained and not outlet.blocked and outgoing.rows < self._settings.retained_rows:
            more = True
        if more:
            self._ask_turn(outlet, effects)
        if outlet.loan_news:
            effects.append(LoanNews(outlet))
        if outlet.waiting and outlet.reads < self._settings.reads_max:
            self._make_hungry(outlet)

    def _ask_turn(self, outlet: Outlet, effects: list[DeliveryEffect]) -> None:
        if not outlet.turn_asked:
            outlet.turn_asked = True
            effects.append(NextTurn(outlet))

    def _send(self, outlet: Outlet, now: float, effects: list[DeliveryEffect]) -> bool:
        """What the socket may be given in this turn, however many blocks come in it; whether that was used up."""
        settings = self._settings
        if outlet.turn != self._turn:
            outlet.turn, outlet.turn_bytes = self._turn, 0
        room = settings.write_bytes - outlet.turn_bytes
        if room > 0:
            out: list[bytes] = []
            outlet.turn_bytes += outlet.session.outgoing.take(
                out, outlet.window_max, room, outlet.version, outlet.packet_max, now + self.wall_ahead
            )
            if out:
                effects.append(Write(outlet, b"".join(out)))
        return outlet.turn_bytes >= settings.write_bytes

    def _take_retained(self, outlet: Outlet, now: float) -> None:
        text, selection = next(iter(outlet.retained.items()))
        rows = selection.take(self._settings.retained_rows, self._settings.pending_bytes_max, now + self.wall_ahead)
        if rows is None:
            del outlet.retained[text]
        else:
            outlet.session.outgoing.put(rows, range(len(rows.topics)))

    def _make_hungry(self, outlet: Outlet, but: Reader | None = None) -> None:
        outgoing = outlet.session.outgoing
        for reader in [reader for reader in outlet.waiting if reader is not but]:
            if outlet.reads >= self._settings.reads_max or 2 * outgoing.bytes > self._settings.pending_bytes_max:
                return
            if outlet.retained if reader is outlet.own else outgoing.rows >= self._settings.loan_rows:
                continue
            del outlet.waiting[reader]
            move(reader, ReaderStatus.READING)
            outlet.reads += 1
            self._hungry.append(reader)

    def _fetch(self, effects: list[DeliveryEffect]) -> None:
        while self._hungry and self._fetching < self._settings.fetches_max:
            reader = self._hungry.popleft()
            reader.request = reader.ask() if reader.status is ReaderStatus.READING else None
            if reader.request is None:
                # It is over, or has to wait for its client: its place is for the next.
                self._stop_reading(reader)
                if reader.outlet.attached:
                    self._make_hungry(reader.outlet, but=reader)
                continue
            self._fetching += 1
            room = self._settings.pending_bytes_max - reader.outlet.session.outgoing.bytes
            effects.append(
                Fetch(reader, reader.request, max(room // reader.outlet.reads, self._settings.pending_bytes_max // 4))
            )

    def _on_fetched(self, reader: Reader, found: Fetched, now: float, effects: list[DeliveryEffect]) -> None:
        self._fetching -= 1
        if reader.status is ReaderStatus.READING:
            reader.take(found)
        self._stop_reading(reader)
        self._serve(reader.outlet, now, effects)

    def _stop_reading(self, reader: Reader) -> None:
        """Also if it is over: others of its outlet may wait for its place."""
        reader.outlet.reads -= 1
        reader.request = None
        if reader.status is ReaderStatus.READING:
            move(reader, ReaderStatus.WAITING)
            self._consider(reader)

    def _on_fetch_failed(self, reader: Reader, now: float) -> None:
        """It keeps its place among the reads until it is tried again: a store that is away is not asked in a circle."""
        self._fetching -= 1
        self._again.append((now + self._settings.read_again_seconds, reader))
        self.deadline = self._again[0][0]

    def _on_tick(self, now: float, effects: list[DeliveryEffect]) -> None:
        while self._again and self._again[0][0] <= now:
            reader = self._again.popleft()[1]
            self._stop_reading(reader)
            self._serve(reader.outlet, now, effects)
        self.deadline = self._again[0][0] if self._again else inf

    def _end(self, reader: Reader) -> None:
        reader.outlet.waiting.pop(reader, None)
        move(reader, ReaderStatus.OVER)


def _size(rows: Rows) -> int:
    return len(rows.topics) * rows.weight
