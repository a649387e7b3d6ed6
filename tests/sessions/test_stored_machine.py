"""A session that is stored as one row, through anything that can happen to it, against a log that is a list.

What every filter has had is known here message by message: nothing is delivered that nobody wants any more, cursors
pass nothing, and in the end every filter has had everything from its start on, but for what is recorded as dropped.
Filters that are told to begin anew, crashes in between, generations that end and are dropped.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any

from deliveries import NO_LIMIT, packets
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from holdfast.model import Batch, Stream
from holdfast.sessions.changes import Content
from holdfast.sessions.heads import Heads
from holdfast.sessions.packed import unpack_cursors
from holdfast.sessions.rows import Rows
from holdfast.sessions.session import Session
from holdfast.sessions.stored import content_of, restore
from holdfast.sessions.subscriptions import Subscription
from holdfast.sessions.table import SessionRow
from holdfast.sessions.window import RELEASED, Pubrec
from holdfast.topics import match

LOG = "messages"
SHARDS = 2
TOPICS = ["a/x", "a/y", "b/x"]
FILTERS = ["a/#", "a/x", "+/x", "#"]
Place = tuple[Stream, int]


class StoredSessionMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.log: dict[Stream, list[tuple[str, int]]] = {}
        """Topic and QoS of every message that is kept."""
        self.heads = Heads()
        self.generation = 0
        self.session: Session | None = None
        self.row: Content | None = None
        self.connected = False
        self.starts: dict[str, dict[Stream, int]] = {}
        self.had: dict[str, set[Place]] = {}
        """By filter: acknowledged since it began, whoever knows of it."""
        self.known: dict[str, set[Place]] = {}
        """As far as the node can know: since a crash, only what was stored before."""
        self.stored: dict[str, set[Place]] = {}
        self.last_sent: dict[Stream, int] = {}
        """Since the connection began, or went back."""

    def teardown(self) -> None:
        self.settle()

    @initialize(filter_text=st.sampled_from(FILTERS), qos=st.integers(0, 2))
    def begin(self, filter_text: str, qos: int) -> None:
        self.open_generation()
        for stream in self.log:
            self.heads[stream] = 0
        self.connect()
        self.subscribe(filter_text, qos, False)

    # -- the log ------------------------------------------------------------------------------------------

    @precondition(lambda self: self.generation < 5 and self.log[Stream(LOG, 0, self.generation)])
    @rule()
    def seal(self) -> None:
        self.open_generation()

    def open_generation(self) -> None:
        self.generation += 1
        self.log |= {Stream(LOG, shard, self.generation): [] for shard in range(SHARDS)}
        for stream in self.log:
            self.dispatch(stream)

    @precondition(lambda self: self.sealed)
    @rule()
    def drop(self) -> None:
        """Retention takes the oldest generation."""
        oldest = min(stream.generation for stream in self.log)
        if oldest == self.generation or not any(s.generation == oldest for s in self.sealed):
            return
        for stream in [s for s in self.log if s.generation == oldest]:
            del self.log[stream]
            if stream in self.heads:
                del self.heads[stream]

    @rule(
        shard=st.integers(0, SHARDS - 1),
        messages=st.lists(st.tuples(st.sampled_from(TOPICS), st.sampled_from([0, 1, 1, 2])), min_size=1, max_size=5),
        dispatched=st.booleans(),
        room=st.booleans(),
    )
    def append(self, shard: int, messages: list[tuple[str, int]], dispatched: bool, room: bool) -> None:
        stream = Stream(LOG, shard, self.generation)
        self.log[stream] += messages
        if dispatched:
            self.dispatch(stream, room)

    def dispatch(self, stream: Stream, room: bool = True) -> None:
        for older in sorted((s for s in self.log if s.generation < stream.generation), key=lambda s: s.generation):
            if self.heads.get(older, 0) < len(self.log[older]):
                self.dispatch(older)  # a node delivers generations in their order
        first, past = self.heads.setdefault(stream), len(self.log[stream])
        self.heads[stream] = past
        session = self.session
        if first < past and self.connected and session is not None and session.subscriptions.wanted is not None:
            block = self.rows(stream, range(first, past))
            picks = [at for at, topic in enumerate(block.topics) if session.subscriptions.wanted.matches(topic)]
            if picks:
                session.offer(block, picks, NO_LIMIT if room else 1)
        self.heads.seal(self.sealed)

    def rows(self, stream: Stream, offsets: Any) -> Rows:
        found = [self.log[stream][offset] for offset in offsets]
        texts = [f"{stream} {offset}".encode() for offset in offsets]
        return Rows(stream, list(offsets), Batch([t for t, _ in found], texts, "p", [q for _, q in found]), 0)

    @property
    def sealed(self) -> set[Stream]:
        return {s for s in self.heads if s.generation < self.generation and self.heads[s] == len(self.log[s])}

    # -- the connection -----------------------------------------------------------------------------------

    @precondition(lambda self: not self.connected)
    @rule()
    def connect(self) -> None:
        session = self.session
        if session is None:
            session = Session("me", 100) if self.row is None else self.restored(self.row)
        self.session = session
        lost = self.lost()
        decision = session.attach(self.heads, 0.0)
        assert not decision.refuse
        if lost:
            assert session.positions.gaps, f"nobody tells that {lost} are gone"
        for packet_id, delivery in session.in_flight():
            stream = getattr(delivery.origin, "stream", None)
            if stream is not None and stream not in self.log:
                session.window.drop(packet_id)
        self.connected, self.last_sent = True, {}

    def lost(self) -> set[Stream]:
        """Streams that are gone with something in them that a filter has not had, as far as the node knows."""
        cursors = self.session.stored_cursors() if self.session else None
        if cursors is None or self.session is None or self.session.attached:
            return set()
        return {
            stream
            for stream in self.gone
            for text in self.starts
            if self.session.subscriptions[text].number
            and cursors.cursor(self.session.subscriptions[text].number, stream).floor < 1
            and self.starts[text].get(stream, 0) == 0
        }

    @property
    def gone(self) -> list[Stream]:
        oldest = min(stream.generation for stream in self.log)
        return [Stream(LOG, shard, g) for g in range(1, oldest) for shard in range(SHARDS)]

    def restored(self, row: Content) -> Session:
        stored = SessionRow(client_id="me", expiry_secs=100, epoch=1, **row._asdict())
        return restore(stored, "before", {})

    @precondition(lambda self: self.connected)
    @rule()
    def disconnect(self) -> None:
        """The row is written away; another node, or this one, takes it."""
        assert self.session is not None
        self.connected = False
        self.store("before")
        self.session = None

    @precondition(lambda self: self.session is not None and len(self.session.window))
    @rule()
    def crash(self) -> None:
        self.session, self.connected = None, False
        self.known = {text: set(places) for text, places in self.stored.items()}
        for stream, messages in self.log.items():
            self.heads[stream] = len(messages)
        self.heads.seal(self.sealed)

    @precondition(lambda self: self.connected)
    @rule(
        shard=st.integers(0, SHARDS - 1),
        messages=st.lists(st.tuples(st.sampled_from(TOPICS), st.sampled_from([1, 1, 2])), min_size=1, max_size=4),
        crashed=st.booleans(),
        flushed=st.booleans(),
    )
    def away(self, shard: int, messages: list[tuple[str, int]], crashed: bool, flushed: bool) -> None:
        if flushed:
            self.flush()
        if crashed:
            self.crash()
        else:
            self.disconnect()
        self.append(shard, messages, dispatched=True, room=True)
        self.connect()
        self.append(shard, messages, dispatched=False, room=True)

    def store(self, leaving: str = "") -> None:
        assert self.session is not None
        self.row = content_of(self.session, self.heads, leaving)
        self.was_stored()

    def was_stored(self) -> None:
        self.stored = {text: set(places) for text, places in self.known.items()}
        assert self.session is not None and self.row is not None
        cursors = unpack_cursors(self.row.cursors, "me")
        for text, starts in self.starts.items():
            number = self.session.subscriptions[text].number
            for stream, messages in self.log.items():
                cursor = cursors.cursor(number, stream)
                for offset, (topic, _) in enumerate(messages):
                    if offset >= starts.get(stream, 0) and match(text, topic) and cursor.is_acked(offset):
                        assert (stream, offset) in self.had[text], f"{text} {cursor} passes {stream} {offset}"

    @precondition(lambda self: self.connected)
    @rule()
    def flush(self) -> None:
        assert self.session is not None and self.row is not None
        self.store()

    # -- subscriptions ------------------------------------------------------------------------------------

    @precondition(lambda self: self.connected)
    @rule(filter_text=st.sampled_from(FILTERS), qos=st.integers(0, 2), anew=st.booleans())
    def subscribe(self, filter_text: str, qos: int, anew: bool) -> None:
        assert self.session is not None
        begin = None
        if filter_text not in self.starts or anew:
            begin = self.heads.end()
            self.begins(filter_text, dict(self.heads))
        self.session.subscribe(Subscription(filter_text, qos), begin, self.heads)
        self.store()

    @precondition(lambda self: self.connected)
    @rule(filter_text=st.sampled_from(FILTERS), qos=st.integers(0, 2), at=st.integers(0, 4))
    def replay(self, filter_text: str, qos: int, at: int) -> None:
        """Told to begin in the past, whether it is new or not."""
        assert self.session is not None
        starts = {stream: min(at, head) for stream, head in self.heads.items()}
        self.begins(filter_text, starts)
        begin = self.heads.starting_at(starts) if at else self.heads.beginning()
        self.session.subscribe(Subscription(filter_text, qos), begin, self.heads)
        self.last_sent = {}
        self.store()

    def begins(self, filter_text: str, starts: dict[Stream, int]) -> None:
        gone = dict.fromkeys(self.gone, 1 << 40)
        self.starts[filter_text] = {**gone, **starts}
        self.had[filter_text], self.known[filter_text] = set(), set()

    @precondition(lambda self: self.connected and len(self.starts) > 1)
    @rule(data=st.data())
    def unsubscribe(self, data: st.DataObject) -> None:
        assert self.session is not None
        filter_text = data.draw(st.sampled_from(sorted(self.starts)))
        self.session.unsubscribe(filter_text)
        for part in (self.starts, self.had, self.known):
            del part[filter_text]
        self.store()

    # -- the data path ------------------------------------------------------------------------------------

    @property
    def to_read(self) -> bool:
        session = self.session
        assert session is not None
        return session.positions.to_read(self.heads.newest) and session.subscriptions.wanted is not None

    @precondition(lambda self: self.connected and self.to_read)
    @rule(limit=st.integers(1, 4))
    def read(self, limit: int) -> None:
        session = self.session
        assert session is not None and session.subscriptions.wanted is not None
        stream = session.positions.next_to_read(self.heads, session.window)
        if stream is None:
            return
        if stream not in self.log:
            session.positions.lost(stream)
            return
        at, messages = session.positions.behind[stream], self.log[stream]
        found = [o for o in range(at, len(messages)) if session.subscriptions.wanted.matches(messages[o][0])]
        past = found[limit - 1] + 1 if len(found) >= limit else len(messages)
        block = self.rows(stream, found[:limit])
        session.take_read(stream, past, [block], self.heads.known(stream))

    @precondition(lambda self: self.connected and self.session.outgoing.rows)
    @rule(room=st.integers(1, 6))
    def send(self, room: int) -> None:
        assert self.session is not None
        out: list[bytes] = []
        self.session.outgoing.take(out, room, NO_LIMIT, 5, NO_LIMIT, 0.0)
        for packet in packets(b"".join(out)):
            name, offset = packet.payload.decode().split(" ")
            place = (Stream.parse(name), int(offset))
            self.check_delivery(place, packet.topic)
            if packet.qos == 0:
                self.took(place)

    def check_delivery(self, place: Place, topic: str) -> None:
        stream, offset = place
        assert offset > self.last_sent.get(stream, -1), f"{place} out of order"
        self.last_sent[stream] = offset
        wanting = [
            text
            for text, starts in self.starts.items()
            if match(text, topic) and starts.get(stream, 0) <= offset and place not in self.known[text]
        ]
        assert wanting, f"nobody wants {place}"

    @precondition(lambda self: self.connected and len(self.session.window))
    @rule(data=st.data())
    def acknowledge(self, data: st.DataObject) -> None:
        assert self.session is not None
        under_way = [packet_id for packet_id, _ in self.session.window]
        for packet_id in data.draw(st.lists(st.sampled_from(under_way), unique=True, min_size=1)):
            self.answer(packet_id)

    def answer(self, packet_id: int) -> None:
        session = self.session
        assert session is not None
        delivery = session.window.get(packet_id)
        assert delivery is not None
        if delivery.qos == RELEASED:
            assert session.window.pubcomp(packet_id)
            return
        if delivery.qos == 2:
            assert session.window.pubrec(packet_id) is Pubrec.RELEASE
        else:
            assert session.window.puback([packet_id]) is None
        self.took((delivery.origin.stream, delivery.offset))  # type: ignore[attr-defined]

    def took(self, place: Place) -> None:
        for text in self.starts:
            self.had[text].add(place)
            self.known[text].add(place)

    @invariant()
    def what_is_done_costs_nothing(self) -> None:
        session = self.session
        if session is not None and self.connected:
            assert len(session.positions._origins) <= SHARDS * (self.generation + 1)

    def settle(self) -> None:
        """Given a client that reads and acknowledges, everything comes, whatever happened before."""
        if not self.connected:
            self.connect()
        session = self.session
        assert session is not None
        for stream in list(self.log):
            self.dispatch(stream)
        while session.outgoing.rows or len(session.window) or self.to_read:
            if self.to_read:
                self.read(limit=3)
            self.send(room=6)
            for packet_id in [i for i, _ in session.window]:
                self.answer(packet_id)
        missing = defaultdict(list)
        for text, starts in self.starts.items():
            for stream, messages in self.log.items():
                for offset, (topic, _) in enumerate(messages):
                    due = match(text, topic) and offset >= starts.get(stream, 0)
                    if due and (stream, offset) not in self.had[text]:
                        missing[text].append((str(stream), offset))
        assert not missing, f"never delivered: {dict(missing)}"
        self.store("after")
        assert self.row is not None
        cursors = unpack_cursors(self.row.cursors, "me")
        assert {generation for generation, _, _ in cursors.session} <= {self.generation}
        assert not cursors.own, f"everything is done for everyone, and yet: {cursors.own}"


StoredSessionMachine.TestCase.settings = settings(
    max_examples=100, stateful_step_count=40, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
TestStoredSession = StoredSessionMachine.TestCase
