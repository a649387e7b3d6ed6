"""A session through anything that can happen to it, against a log that is a list.

Commits, reads of the log (which may see more than the node has dispatched), sends, acknowledgements in any
order, connections that come and go, crashes of the node, subscriptions that come and go, generations that end.
Storing and restoring are the product's own code: all that outlives a connection is a row.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any

from deliveries import NO_LIMIT, packets, row_of
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from holdfast.cursors import Cursor
from holdfast.model import Batch, Stream
from holdfast.sessions.heads import Heads
from holdfast.sessions.packed import unpack_cursors
from holdfast.sessions.positions import StreamOrigin
from holdfast.sessions.rows import Rows
from holdfast.sessions.session import Session
from holdfast.sessions.stored import restore
from holdfast.sessions.subscriptions import Subscription
from holdfast.sessions.table import SessionRow
from holdfast.sessions.window import RELEASED, Pubrec
from holdfast.topics import match

SHARDS = 2
TOPICS = ["a/x", "a/y", "b/x"]
FILTERS = ["a/#", "a/x", "+/x", "#"]
Place = tuple[Stream, int]


class SessionMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.log: dict[Stream, list[tuple[str, int]]] = {}
        """Topic and QoS of every message."""
        self.heads: dict[Stream, int] = {}
        """How far the node has dispatched."""
        self.generation = 0
        self.session: Session | None = None
        self.row: SessionRow | None = None
        self.connected = False
        self.starts: dict[str, dict[Stream, int]] = {}
        """By filter: where the subscription began; at 0 in streams that came later."""
        self.acked: set[Place] = set()
        """Acknowledged, as far as the session can know: since a crash, only what was saved before."""
        self.ever_acked: set[Place] = set()
        self.flushed: set[Place] = set()
        self.last_sent: dict[Stream, int] = {}
        """In this connection."""
        self.stored: dict[tuple[str, Stream], Cursor] = {}

    def teardown(self) -> None:
        self.settle()

    @initialize(filter_text=st.sampled_from(FILTERS), qos=st.integers(0, 2))
    def begin(self, filter_text: str, qos: int) -> None:
        self.open_generation()
        self.heads = dict.fromkeys(self.log, 0)
        self.connect(meanwhile=False, fails=False)
        self.subscribe(filter_text, qos)

    # -- the log ------------------------------------------------------------------------------------------

    @precondition(lambda self: self.generation < 3 and len(self.log[Stream("messages", 0, self.generation)]) > 2)
    @rule()
    def seal(self) -> None:
        self.open_generation()

    def open_generation(self) -> None:
        self.generation += 1
        self.log |= {Stream("messages", shard, self.generation): [] for shard in range(SHARDS)}

    @rule(
        shard=st.integers(0, SHARDS - 1),
        messages=st.lists(st.tuples(st.sampled_from(TOPICS), st.sampled_from([0, 1, 1, 2])), min_size=1, max_size=5),
        dispatched=st.booleans(),
        room=st.booleans(),
    )
    def append(self, shard: int, messages: list[tuple[str, int]], dispatched: bool, room: bool) -> None:
        """By this node, which dispatches at once, or by another process."""
        stream = Stream("messages", shard, self.generation)
        self.log[stream] += messages
        if dispatched:
            self.dispatch(stream, room)

    @precondition(lambda self: self.unnoticed)
    @rule(data=st.data(), room=st.booleans())
    def follow(self, data: st.DataObject, room: bool) -> None:
        self.dispatch(data.draw(st.sampled_from(self.unnoticed)), room)

    @property
    def unnoticed(self) -> list[Stream]:
        return [stream for stream in sorted(self.log) if len(self.log[stream]) > self.heads.get(stream, 0)]

    def dispatch(self, stream: Stream, room: bool = True) -> None:
        for older in [s for s in self.log if s.generation < stream.generation]:
            self.heads.setdefault(older, 0)  # a node hears of generations in their order
        first, past = self.heads.setdefault(stream, 0), len(self.log[stream])
        self.heads[stream] = past
        session = self.session
        if first < past and self.connected and session is not None and session.subscriptions.wanted is not None:
            block = self.rows(stream, range(first, past))
            picks = [at for at, topic in enumerate(block.topics) if session.subscriptions.wanted.matches(topic)]
            if picks:
                session.offer(block, picks, NO_LIMIT if room else 1)

    def rows(self, stream: Stream, offsets: Any) -> Rows:
        found = [self.log[stream][offset] for offset in offsets]
        texts = [f"{stream} {offset}".encode() for offset in offsets]
        return Rows(stream, list(offsets), Batch([t for t, _ in found], texts, "p", [q for _, q in found]), 0)

    @property
    def to_read(self) -> bool:
        session = self.session
        assert session is not None
        return session.positions.to_read(self.view.newest) and session.subscriptions.wanted is not None

    @property
    def view(self) -> Heads:
        return Heads(self.heads, self.sealed)

    @property
    def sealed(self) -> set[Stream]:
        """Finalised, and dispatched to the end."""
        return {s for s in self.heads if s.generation < self.generation and self.heads[s] == len(self.log[s])}

    # -- the connection -----------------------------------------------------------------------------------

    @precondition(lambda self: not self.connected)
    @rule(meanwhile=st.booleans(), fails=st.booleans())
    def connect(self, meanwhile: bool, fails: bool) -> None:
        session = Session("me", 100) if self.row is None else restore(self.row, "last", dict(self.heads))
        if meanwhile:  # others publish while what was in flight is fetched
            for stream in self.log:
                self.dispatch(stream)
        if fails:  # gone before it was attached
            self.row = row_of(session, self.view)
            return
        session.attach(self.view, 0.0)
        self.session, self.connected, self.last_sent = session, True, {}
        self.save()

    @precondition(lambda self: self.connected)
    @rule()
    def disconnect(self) -> None:
        """What is saved then is the last word: exactly this comes back."""
        assert self.session is not None
        flying = [(i, d.offset, d.qos) for i, d in self.session.window]
        self.save("last")
        self.session, self.connected = None, False
        assert self.row is not None
        back = restore(self.row, "last", {})
        assert [(i, d.offset, d.qos) for i, d in back.window] == flying

    @precondition(lambda self: self.connected and len(self.session.window) > 2)
    @rule()
    def crash(self) -> None:
        """The node is killed, and started again."""
        self.session, self.connected = None, False
        self.acked = set(self.flushed)
        self.heads = {stream: len(messages) for stream, messages in self.log.items()}

    @precondition(lambda self: self.connected)
    @rule(
        shard=st.integers(0, SHARDS - 1),
        messages=st.lists(st.tuples(st.sampled_from(TOPICS), st.sampled_from([1, 1, 2])), min_size=1, max_size=4),
        crashed=st.booleans(),
        saved=st.booleans(),
    )
    def away(self, shard: int, messages: list[tuple[str, int]], crashed: bool, saved: bool) -> None:
        """The usual: gone for a while, much happened, some of it not even noticed yet."""
        if saved:
            self.save()
        if crashed:
            self.crash()
        else:
            self.disconnect()
        self.append(shard, messages, dispatched=True, room=True)
        self.connect(meanwhile=False, fails=False)
        self.append(shard, messages, dispatched=False, room=True)

    # -- subscriptions ------------------------------------------------------------------------------------

    @precondition(lambda self: self.connected)
    @rule(filter_text=st.sampled_from(FILTERS), qos=st.integers(0, 2))
    def subscribe(self, filter_text: str, qos: int) -> None:
        assert self.session is not None
        subscription, begin = Subscription(filter_text, qos), None
        if filter_text not in self.starts:
            begin = self.view.end()
            self.starts[filter_text] = dict(self.heads)
        self.session.subscribe(subscription, begin, self.view)
        self.save()

    @precondition(lambda self: self.connected and len(self.starts) > 1)
    @rule(data=st.data())
    def unsubscribe(self, data: st.DataObject) -> None:
        assert self.session is not None
        filter_text = data.draw(st.sampled_from(sorted(self.starts)))
        self.session.unsubscribe(filter_text)
        del self.starts[filter_text]
        self.stored = {at: cursor for at, cursor in self.stored.items() if at[0] != filter_text}
        self.save()

    # -- the data path ------------------------------------------------------------------------------------

    @precondition(
        lambda self: (
            self.connected and self.session.positions.to_read(self.view.newest) and self.session.subscriptions.wanted
        )
    )
    @rule(limit=st.integers(1, 4))
    def read(self, limit: int) -> None:
        session = self.session
        assert session is not None and session.subscriptions.wanted is not None
        stream = session.positions.next_to_read(self.view, session.window)
        if stream is None:
            return
        at, messages = session.positions.behind[stream], self.log[stream]
        found = [o for o in range(at, len(messages)) if session.subscriptions.wanted.matches(messages[o][0])]
        past = found[limit - 1] + 1 if len(found) >= limit else len(messages)
        block = self.rows(stream, found[:limit])
        session.take_read(stream, past, [block], self.heads.get(stream))

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
        assert self.wanted(topic, place), f"{place} is before any subscription that matches it"
        assert place not in self.acked, f"{place} was acknowledged"

    def wanted(self, topic: str, place: Place) -> bool:
        return any(match(text, topic) and at.get(place[0], 0) <= place[1] for text, at in self.starts.items())

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
        origin, offset, qos = session.window.get(packet_id)
        if qos == RELEASED:
            assert session.window.pubcomp(packet_id)
            return
        if qos == 2:
            assert session.window.pubrec(packet_id) is Pubrec.RELEASE
        else:
            assert session.window.puback([packet_id]) is None
        self.took((origin.stream, offset))

    def took(self, place: Place) -> None:
        self.acked.add(place)
        self.ever_acked.add(place)

    @precondition(lambda self: self.connected and self.session.positions.dirty)
    @rule()
    def flush(self) -> None:
        self.save()

    def save(self, leaving: str = "") -> None:
        assert self.session is not None
        self.row = row_of(self.session, self.view, leaving)
        assert not self.session.positions.dirty
        self.flushed = set(self.acked)
        for filter_text in self.starts:
            for stream in self.heads:
                self.check_stored(filter_text, stream)

    def check_stored(self, filter_text: str, stream: Stream) -> None:
        assert self.session is not None and self.row is not None
        (number,) = [s.number for s in self.session.subscriptions if s.filter == filter_text]
        cursor = unpack_cursors(self.row.cursors, "me").cursor(number, stream)
        before = self.stored.get((filter_text, stream))
        assert before is None or cursor.covers(before), f"{filter_text} {stream}: {before} became {cursor}"
        self.stored[filter_text, stream] = cursor
        for offset, (topic, _) in enumerate(self.log[stream]):
            if offset >= self.starts[filter_text].get(stream, 0) and match(filter_text, topic):
                passed = cursor.is_acked(offset) and (stream, offset) not in self.ever_acked
                assert not passed, f"{filter_text} {cursor} passes {stream} {offset}"

    @invariant()
    def counts_agree(self) -> None:
        session = self.session
        if session is not None:
            assert session.outgoing.rows == sum(len(w.picks) - w.at for w in session.outgoing._queue)
            assert (session.outgoing.bytes == 0) == (session.outgoing.rows == 0)
            taken = [(d.origin, d.offset) for _, d in session.window if isinstance(d.origin, StreamOrigin)]
            assert len(set(taken)) == len(taken), "one message under two packet ids"

    def settle(self) -> None:
        """Given a client that reads and acknowledges, everything comes, whatever happened before."""
        if not self.connected:
            self.connect(meanwhile=False, fails=False)
        session = self.session
        assert session is not None
        for stream in self.log:
            self.dispatch(stream)
        while session.outgoing.rows or len(session.window) or self.to_read:
            if self.to_read:
                self.read(limit=3)
            self.send(room=6)
            for packet_id in [i for i, _ in session.window]:
                self.answer(packet_id)
        missing = defaultdict(list)
        for stream, messages in self.log.items():
            for offset, (topic, _) in enumerate(messages):
                if self.wanted(topic, (stream, offset)) and (stream, offset) not in self.ever_acked:
                    missing[stream].append(offset)
        assert not missing, f"never delivered: {dict(missing)}"


SessionMachine.TestCase.settings = settings(
    max_examples=60, stateful_step_count=40, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
TestSession = SessionMachine.TestCase
