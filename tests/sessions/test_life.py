"""The life of a session, walk by walk: what is written, what is said, and when."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from holdfast.errors import BrokenInvariant
from holdfast.machine import TICK, Address, Send
from holdfast.mqtt.reasons import Reason
from holdfast.sessions.changes import Content
from holdfast.sessions.clock import StoreClock
from holdfast.sessions.life import (
    LEGAL,
    Close,
    Connect,
    Failed,
    Forget,
    Found,
    Freeze,
    Gone,
    LifeSettings,
    Moved,
    ReadRow,
    Refuse,
    Release,
    Released,
    Resume,
    Saved,
    SessionLife,
    SessionNode,
    State,
    Stop,
    Subscribed,
    Welcome,
    WriteRow,
    Written,
    answer_unheld,
)
from holdfast.sessions.session import NEVER
from holdfast.sessions.table import RowWrite, SessionRow, StoredWill, Verdict

WILL = StoredWill(topic="gone", payload=b"c", qos=1, retain=False, properties=b"", delay_secs=0)
LATER = StoredWill(topic="gone", payload=b"c", qos=1, retain=False, properties=b"", delay_secs=20)


class Table:
    """One row store, as the contract has it."""

    def __init__(self) -> None:
        self.rows: dict[str, SessionRow] = {}
        self.epochs = 0
        self.written = 0
        self.published: list[StoredWill] = []

    def write(self, write: RowWrite) -> Verdict:
        row = self.rows.get(write.row.client_id)
        if (None if row is None else (row.epoch, row.seq)) != write.expected:
            return Verdict(False, row)
        new = write.row
        if write.take:
            self.epochs += 1
            fields = {name: getattr(new, name) for name in new.__struct_fields__}
            new = SessionRow(**{**fields, "epoch": self.epochs, "seq": 0})
        self.rows[new.client_id] = new
        self.written += 1
        if write.publish is not None:
            self.published.append(write.publish)
        return Verdict(True, new)


class Node:
    """A node with one client's machine; reads and writes are answered when the test says so."""

    def __init__(self, table: Table, name: str = "A", lease: int = 1):
        self.table, self.name = table, name
        clock = StoreClock()
        clock.heard(1000.0, 0.0, 0.0)
        self.node = SessionNode(name, clock, LifeSettings(), lambda data: data.decode().split())
        self.now = 0.0
        self.node.granted(lease, 0.0)
        self.content = Content()
        self.life = SessionLife("c", self.node, lambda leaving: self.content)
        self.effects: list[Any] = []
        self.ended: set[int] = set()

    def do(self, event: Any) -> list[Any]:
        """What the machine does about it; reads and writes wait for `work`."""
        found = self.life.handle(event, self.now)
        self.effects += found
        return found

    def read(self) -> list[Any]:
        read = self.last(ReadRow)
        row = self.table.rows.get("c")
        return self.do(Found(read.number, row, row is not None and row.lease in self.ended))

    def write(self) -> list[Any]:
        return self.do(Written(self.table.write(self.last(WriteRow).write)))

    def last(self, kind: type) -> Any:
        return next(effect for effect in reversed(self.effects) if isinstance(effect, kind))

    def work(self) -> list[Any]:
        """Answer whatever waits for an answer, until nothing does; everything that was done."""
        found: list[Any] = []
        done = len(self.effects) - self._unanswered()
        while done < len(self.effects):
            effect = self.effects[done]
            done += 1
            if isinstance(effect, ReadRow):
                found += self.read()
            elif isinstance(effect, WriteRow):
                found += self.do(Written(self.table.write(effect.write)))
        return found

    def _unanswered(self) -> int:
        for at, effect in enumerate(reversed(self.effects), 1):
            if isinstance(effect, ReadRow | WriteRow):
                return at
        return 0

    def connect(self, token: str = "t1", *, clean: bool = False, expiry: int = 60, will: Any = None) -> list[Any]:
        return [*self.do(Connect(token, clean, expiry, will)), *self.work()]

    def wait(self, seconds: float) -> list[Any]:
        self.now += seconds
        return self.do(TICK)

    @property
    def row(self) -> SessionRow:
        return self.table.rows["c"]


def of(effects: list[Any], kind: type) -> list[Any]:
    return [effect for effect in effects if isinstance(effect, kind)]


def here(**options: Any) -> Node:
    node = Node(Table())
    node.connect(**options)
    assert node.life.state is State.HERE
    node.table.written = 0
    return node


# -- the table of moves ------------------------------------------------------------------------------------


def test_every_state_has_its_moves() -> None:
    assert set(LEGAL) == set(State)
    reached = {State.NONE}
    while more := {to for state in reached for to in LEGAL[state]} - reached:
        reached |= more
    assert reached == set(State)


@pytest.mark.parametrize("one", State)
@pytest.mark.parametrize("to", State)
def test_a_move_that_is_not_listed_tells_its_story(one: State, to: State) -> None:
    life = Node(Table()).life
    life.state = one
    if to is one or to in LEGAL[one]:
        life._move(to)
        assert life.state is to
    else:
        with pytest.raises(BrokenInvariant, match=f"{one.name} -> {to.name}"):
            life._move(to)


# -- a client comes ----------------------------------------------------------------------------------------


def test_connect_nobody_there() -> None:
    node = Node(Table())
    assert node.do(Connect("t1", False, 60, LATER)) == [ReadRow(1)]
    (written,) = node.read()
    assert written.write.expected is None
    assert written.write.take
    (welcome,) = node.write()
    assert welcome == Welcome("t1", False, node.row, "")
    assert (node.row.owner, node.row.lease, node.row.born, node.row.will) == ("A", 1, "t1", LATER)
    assert node.row.expiry_secs == 60
    assert node.life.serves(node.now)
    assert node.table.written == 1


def test_connect_to_a_session_that_is_away() -> None:
    node = here(token="t1")
    node.content = Content(b"a/#", b"7", b"p")
    node.do(Gone("t1"))
    assert of(node.work(), Forget)
    other = Node(node.table, "B", 2)
    (welcome,) = of(other.connect("t2"), Welcome)
    assert welcome.session_present
    assert (welcome.row.subscriptions, welcome.row.cursors, welcome.row.packets) == (b"a/#", b"7", b"p")
    assert (welcome.row.left_at, welcome.row.due) == (None, None)


def test_takeover_on_the_same_node_is_one_write() -> None:
    node = here(token="t1", will=WILL)
    node.content = Content(b"a", b"7")
    node.do(Moved())
    effects = [*node.do(Connect("t2", False, 60)), *node.work()]
    assert effects[0] == Close("t1", Reason.SESSION_TAKEN_OVER)
    assert not of(effects, ReadRow)
    (welcome,) = of(effects, Welcome)
    assert welcome.session_present
    assert welcome.row.cursors == b"7"
    assert node.table.published == [WILL], "its delay is 0"
    assert node.table.written == 1


def test_takeover_while_a_write_is_out_waits_for_its_verdict() -> None:
    node = here(will=LATER)
    node.content = Content(b"a", b"1")
    assert of(node.do(Subscribed(1)), WriteRow)
    node.content = Content(b"a", b"2")
    effects = node.do(Connect("t2", False, 60))
    assert effects == [Close("t1", Reason.SESSION_TAKEN_OVER)]
    (taking,) = of(node.write(), WriteRow)
    assert taking.write.row.cursors == b"2"
    assert of(node.write(), Welcome)
    assert node.table.published == [], "its client is back in time"


def test_takeover_from_a_live_node_is_two_writes_and_two_messages() -> None:
    a = here(token="t1", will=WILL)
    a.content = Content(b"a", b"7", b"p")
    b = Node(a.table, "B", 2)
    b.do(Connect("t2", False, 60))
    (asks,) = b.read()
    assert asks == Send(Address("A", "session", "c"), Release("c", 1, 1, Address("B", "session", "c")))
    effects = a.do(asks.message)
    assert effects[0] == Close("t1", Reason.SESSION_TAKEN_OVER)
    told = a.write()
    assert of(told, Send) == [Send(Address("B", "session", "c"), Released("c", 1))]
    assert of(told, Forget)
    assert b.do(Released("c", 1)) == [ReadRow(2)]
    (welcome,) = of(b.work(), Welcome)
    assert welcome.session_present
    assert welcome.row.packets == b"p"
    assert a.table.written == 2
    assert a.table.published == [WILL]


def test_a_will_with_a_delay_is_withdrawn_by_the_taker() -> None:
    a = here(token="t1", will=LATER)
    b = Node(a.table, "B", 2)
    b.do(Connect("t2", False, 60))
    (asks,) = b.read()
    a.do(asks.message)
    a.write()
    assert a.row.will_due == 1020.0
    b.do(Released("c", 1))
    assert of(b.work(), Welcome)
    assert a.table.published == []
    assert b.row.will is None


def test_a_dead_owner_is_asked_until_its_lease_is_over() -> None:
    a = here(token="t1")
    b = Node(a.table, "B", 2)
    b.do(Connect("t2", False, 60))
    b.read()
    asked = 0
    for _ in range(10):
        assert b.life.state is State.ASKING
        again = b.wait(0.2)
        asked += len(of(again, Send))
        b.read()
    assert asked == 10
    b.node.renewed(b.now)
    b.ended = {1}
    b.wait(0.2)
    (welcome,) = of(b.work(), Welcome)
    assert welcome.session_present
    assert b.table.written == 1


def test_two_takers_at_once() -> None:
    table = Table()
    a, b = Node(table, "A", 1), Node(table, "B", 2)
    a.do(Connect("t1", False, 60))
    b.do(Connect("t2", False, 60))
    a.read()
    b.read()
    assert of(a.write(), Welcome)
    assert of(b.write(), ReadRow), "it lost, and looks again"
    (asks,) = of(b.read(), Send)
    assert asks.message.epoch == a.row.epoch
    a.do(asks.message)
    a.work()
    b.do(Released("c", asks.message.epoch))
    assert of(b.work(), Welcome), "the last CONNECT stays"


def test_back_before_the_last_write_is_durable() -> None:
    node = here(will=LATER)
    node.do(Gone("t1", goodbye=True, expiry_secs=30))
    assert node.do(Connect("t2", False, 60)) == []
    effects = node.work()
    assert not of(effects, ReadRow)
    (welcome,) = of(effects, Welcome)
    assert welcome.session_present
    assert of(effects, Close) == [Close("t1", None)], "its good-bye is durable"


def test_clean_start_leaves_nothing() -> None:
    node = here(will=LATER)
    node.content = Content(b"a b", b"7", b"p")
    node.do(Gone("t1"))
    node.work()
    other = Node(node.table, "B", 2)
    (welcome,) = of(other.connect("t2", clean=True), Welcome)
    assert not welcome.session_present
    assert (welcome.row.born, welcome.row.subscriptions, welcome.row.cursors) == ("t2", b"", b"")
    assert other.table.published == [LATER], "the session it belonged to has ended"
    assert other.last(WriteRow).write.unsubscribed == ["a", "b"]


def test_a_session_that_has_expired_begins_anew() -> None:
    node = here(expiry=5)
    node.do(Gone("t1"))
    node.work()
    other = Node(node.table, "B", 2)
    other.now = 6.0
    other.node.renewed(6.0)
    assert not of(other.connect("t2"), Welcome)[0].session_present


def test_in_time_is_when_the_connect_arrives() -> None:
    node = here(expiry=5, will=LATER)
    node.do(Gone("t1"))
    node.work()
    other = Node(node.table, "B", 2)
    other.now = 4.9
    other.node.lost()
    other.do(Connect("t2", False, 60))
    other.read()
    other.now = 6.0
    other.node.granted(3, 6.0)
    other.do(TICK)
    assert of(other.write(), Welcome)[0].session_present


def test_a_will_that_is_overdue_is_published_by_the_connect() -> None:
    node = here(will=LATER, expiry=NEVER)
    node.do(Gone("t1"))
    node.work()
    other = Node(node.table, "B", 2)
    other.now = 21.0
    other.node.renewed(21.0)
    assert of(other.connect("t2"), Welcome)[0].session_present
    assert other.table.published == [LATER]


def test_a_session_that_ends_with_its_connection_is_not_taken_over() -> None:
    node = here(expiry=0, will=LATER)
    (welcome,) = of(node.connect("t2", expiry=0), Welcome)
    assert not welcome.session_present
    assert node.table.published == [LATER], "it ended, and so its will waits no longer"
    assert node.table.written == 1


def test_the_row_of_a_node_that_died_has_its_will_withdrawn() -> None:
    """A node's end is not its clients' loss."""
    a = here(will=WILL)
    b = Node(a.table, "B", 2)
    b.ended = {1}
    assert of(b.connect("t2"), Welcome)
    assert b.table.published == []


def test_a_row_under_the_own_lease_that_nobody_holds_is_taken() -> None:
    a = here()
    again = Node(a.table, "A", 1)
    assert of(again.connect("t2"), Welcome)


def test_no_lease_just_now_is_not_the_lease_of_a_row_that_is_away() -> None:
    node = here()
    node.do(Gone("t1"))
    node.work()
    other = Node(node.table, "B", 2)
    other.node.lost()
    other.do(Connect("t2", False, 60))
    assert other.read() == []
    assert other.life.state is State.LOOKING


def test_a_connect_gives_up() -> None:
    node = Node(Table())
    node.do(Connect("t1", False, 60))
    node.wait(5)
    assert node.life.deadline <= 10
    assert node.wait(5) == [Refuse("t1", Reason.SERVER_UNAVAILABLE), Forget()]
    assert node.life.state is State.NONE


def test_a_second_connect_that_waits_ends_the_first() -> None:
    node = Node(Table())
    node.do(Connect("t1", False, 60))
    assert node.do(Connect("t2", False, 60)) == [Refuse("t1", Reason.SERVER_UNAVAILABLE)]
    assert of(node.work(), Welcome)[0].token == "t2"


def test_a_read_that_takes_longer_than_the_asking_is_waited_for() -> None:
    a = here()
    b = Node(a.table, "B", 2)
    b.do(Connect("t2", False, 60))
    b.read()
    b.wait(0.2)
    number = b.last(ReadRow).number
    assert not of(b.wait(0.2), ReadRow)
    assert b.do(Found(number, a.row, lease_over=True)) == [b.last(WriteRow)]


# -- a client goes -----------------------------------------------------------------------------------------


def test_a_good_bye_drops_the_will_and_is_heard_of_when_it_is_durable() -> None:
    node = here(will=WILL)
    effects = node.do(Gone("t1", goodbye=True, expiry_secs=30))
    assert of(effects, Close) == []
    assert of(node.write(), Close) == [Close("t1", None)]
    assert (node.row.owner, node.row.lease, node.row.will) == (None, None, None)
    assert (node.row.left_at, node.row.due, node.row.expiry_secs) == (1000.0, 1030.0, 30)
    assert node.table.published == []
    assert node.table.written == 1


def test_the_socket_is_closed_after_a_second_at_the_latest() -> None:
    node = here()
    node.do(Gone("t1", goodbye=True))
    assert node.life.deadline == 1.0
    assert node.wait(1.0) == [Close("t1", None)]
    assert not of(node.write(), Close)


def test_a_loss_publishes_the_will_in_the_same_write() -> None:
    node = here(will=WILL)
    node.do(Gone("t1"))
    node.write()
    assert node.table.published == [WILL]
    assert node.row.will is None
    assert node.table.written == 1


def test_a_loss_sets_when_the_will_is_due() -> None:
    node = here(will=LATER)
    node.do(Gone("t1"))
    node.write()
    assert (node.row.will, node.row.will_due, node.row.due) == (LATER, 1020.0, 1020.0)


def test_a_session_without_expiry_is_dead_when_its_client_leaves() -> None:
    node = here(expiry=0, will=LATER)
    node.content = Content(b"a", b"7")
    node.do(Gone("t1"))
    node.write()
    assert node.row.dead
    assert (node.row.subscriptions, node.row.due, node.row.will) == (b"", None, None)
    assert node.table.published == [LATER]


def test_a_good_bye_with_expiry_0_deletes_what_was_kept() -> None:
    node = here(expiry=NEVER)
    node.content = Content(b"a")
    node.do(Subscribed(1))
    node.write()
    node.do(Gone("t1", goodbye=True, expiry_secs=0))
    node.write()
    assert node.row.dead
    assert node.last(WriteRow).write.unsubscribed == ["a"]


def test_a_client_that_does_not_wait_leaves_nothing() -> None:
    node = Node(Table())
    node.do(Connect("t1", False, 60))
    assert node.do(Gone("t1")) == [Forget()]


def test_a_connect_that_was_stored_counts_as_a_connection() -> None:
    node = Node(Table())
    node.do(Connect("t1", False, 60, WILL))
    node.read()
    assert node.do(Gone("t1")) == []
    effects = [*node.write(), *node.work()]
    assert not of(effects, Welcome)
    assert of(effects, Forget)
    assert node.table.published == [WILL], "the same write had withdrawn the will before"


# -- flushing ----------------------------------------------------------------------------------------------


def test_a_flush_is_one_row_every_five_seconds() -> None:
    node = here()
    node.content = Content(b"", b"1")
    for _ in range(3):
        assert node.do(Moved()) == []
    first = node.life.deadline
    assert 0.0 < first <= 5.0
    node.node.renewed(4.0)
    (written,) = node.wait(5.0)
    assert (written.write.take, written.write.expected, written.write.row.seq) == (False, (1, 0), 1)
    node.write()
    assert node.row.cursors == b"1"
    assert node.wait(1.0) == []
    assert node.table.written == 1
    assert node.do(Moved()) == []
    assert node.life.deadline == pytest.approx(first + 5.0), "always at the same moment of its own"


def test_clients_that_move_at_once_are_flushed_one_after_the_other() -> None:
    lives = [SessionLife(f"truck-{n}", here().node, lambda leaving: Content()) for n in range(1_000)]
    moments = Counter(int(10 * life._next_flush(100.0)) for life in lives)
    assert min(moments) >= 1_000 and max(moments) <= 1_050
    assert max(moments.values()) < 50, "of 20 in each tenth of a second"


def test_without_a_time_to_wait_a_flush_is_due_at_once() -> None:
    settings = LifeSettings(flush_secs=0.0)
    node = SessionNode("n", here().node.clock, settings, here().node.filters_of)
    assert SessionLife("truck", node, lambda leaving: Content())._next_flush(7.0) == 7.0


def test_what_comes_during_a_write_is_in_the_next() -> None:
    node = here()
    node.content = Content(b"a")
    node.do(Subscribed(1))
    node.content = Content(b"a b")
    assert node.do(Subscribed(2)) == []
    assert node.do(Subscribed(3)) == []
    effects = node.write()
    assert effects[0] == Saved(1)
    (second,) = of(effects, WriteRow)
    assert second.write.subscribed == ["b"]
    assert node.write() == [Saved(2), Saved(3)]
    assert node.table.written == 2


def test_a_session_that_moves_nothing_costs_nothing() -> None:
    node = here()
    for _ in range(10):
        node.node.renewed(node.now)
        assert node.wait(1.0) == []
    assert node.table.written == 0


def test_a_session_without_expiry_is_not_flushed() -> None:
    node = here(expiry=0)
    node.do(Moved())
    node.node.renewed(9.0)
    assert node.wait(9.0) == []


def test_a_fenced_owner_is_told_so_and_saves_nothing() -> None:
    a = here()
    b = Node(a.table, "B", 2)
    b.ended = {1}
    assert of(b.connect("t2"), Welcome)
    a.content = Content(b"", b"9")
    a.do(Moved())
    a.node.renewed(4.0)
    a.wait(5.0)
    assert a.write() == [Close("t1", Reason.SESSION_TAKEN_OVER), Forget()]
    assert b.row.cursors == b""


# -- freezing ----------------------------------------------------------------------------------------------


def test_renewed_late_under_the_same_lease_it_goes_on_without_a_write() -> None:
    node = here()
    assert node.wait(4.5) == [Freeze("t1")]
    assert node.life.state is State.FROZEN
    assert not node.life.serves(node.now)
    node.node.renewed(node.now)
    assert node.do(TICK) == [Resume("t1")]
    assert node.table.written == 0


def test_under_a_new_lease_the_row_is_taken_again_from_memory() -> None:
    node = here()
    node.content = Content(b"", b"5")
    node.do(Moved())
    node.wait(6.0)
    node.node.granted(7, 6.0)
    (written,) = node.do(TICK)
    assert (written.write.take, written.write.row.lease, written.write.row.connect) == (True, 7, "t1")
    assert node.write() == [Resume("t1")]
    assert (node.row.cursors, node.table.written) == (b"5", 1)


def test_a_new_lease_is_noticed_even_if_nobody_saw_the_old_one_end() -> None:
    node = here()
    node.node.granted(7, 0.0)
    effects = node.do(Moved())
    assert effects[0] == Freeze("t1")
    assert of(effects, WriteRow)[0].write.take


def test_a_resume_that_is_refused_says_that_the_client_is_elsewhere() -> None:
    a = here()
    b = Node(a.table, "B", 2)
    b.ended = {1}
    b.connect("t2")
    a.wait(6.0)
    a.node.granted(7, 6.0)
    a.do(TICK)
    assert a.write() == [Close("t1", Reason.SESSION_TAKEN_OVER), Forget()]


def test_frozen_for_too_long_is_closed() -> None:
    node = here()
    node.content = Content(b"", b"5")
    node.wait(4.5)
    assert node.life.deadline == 34.5
    effects = node.wait(30.0)
    assert effects[0] == Close("t1", Reason.SERVER_BUSY)
    node.write()
    assert (node.row.cursors, node.row.lease, node.row.left_at) == (b"5", 1, None), "left to the sweep"


def test_a_disconnect_during_a_resume_keeps_its_new_expiry() -> None:
    node = here(expiry=60, will=WILL)
    node.wait(6.0)
    node.node.granted(7, 6.0)
    node.do(TICK)
    node.do(Gone("t1", goodbye=True, expiry_secs=3))
    node.write()
    node.work()
    assert (node.row.expiry_secs, node.row.will, node.row.lease) == (3, None, None)
    assert node.table.published == []


@pytest.mark.parametrize("how", [Gone("t1"), Stop(Reason.USE_ANOTHER_SERVER, lease_stays=True)])
def test_who_goes_during_a_resume_leaves_the_last_word(how: Any) -> None:
    """Otherwise the next owner cannot know which packet ids its client has seen, and QoS 2 comes twice."""
    node = here(expiry=60)
    node.life._content = lambda leaving: Content(b"", b"7", b"last" if leaving else b"flushed")
    node.wait(6.0)
    node.node.granted(7, 6.0)
    node.do(TICK)
    assert node.life.state is State.TAKING
    node.do(how)
    node.write()
    node.work()
    assert (node.row.lease, node.row.cursors, node.row.packets) == (None, b"7", b"last")


def test_a_take_that_lands_after_the_lease_waits_for_the_next() -> None:
    node = Node(Table())
    node.do(Connect("t1", False, 60))
    node.read()
    node.now = 5.0
    assert node.write() == []
    assert node.life.state is State.FROZEN
    node.node.granted(7, 5.0)
    assert of(node.do(TICK), WriteRow)
    assert of(node.write(), Welcome)
    assert node.table.written == 2


# -- a node stops ------------------------------------------------------------------------------------------


def test_a_clean_stop_saves_only_what_is_unsaved() -> None:
    node = here(will=WILL)
    assert node.do(Stop()) == [Close("t1", Reason.SERVER_SHUTTING_DOWN), Forget()]
    assert node.table.written == 0
    other = here(will=WILL)
    other.content = Content(b"", b"5")
    effects = other.do(Stop(Reason.USE_ANOTHER_SERVER))
    assert effects[0] == Close("t1", Reason.USE_ANOTHER_SERVER)
    assert other.write() == [Forget()]
    assert (other.row.cursors, other.row.lease) == (b"5", 1), "under its lease, which ends"
    assert (other.row.will_due, other.row.left_at) == (None, None), "whoever sees that the lease has ended counts"
    assert other.table.published == []


def test_a_client_that_is_sent_elsewhere_by_a_node_that_stays_is_written_away() -> None:
    node = here(will=WILL)
    effects = node.do(Stop(Reason.USE_ANOTHER_SERVER, lease_stays=True))
    assert effects[0] == Close("t1", Reason.USE_ANOTHER_SERVER)
    assert of(node.work(), Forget)
    assert (node.row.lease, node.row.will_due, node.row.left_at) == (None, 1015.0, 1015.0)
    assert node.table.published == [], "that was not its client's doing"


# -- an operator ends it -----------------------------------------------------------------------------------


def test_an_operator_takes_the_session_and_ends_it() -> None:
    a = here(token="t1", will=WILL)
    a.content = Content(b"a b", b"7")
    a.do(Subscribed(1))
    a.work()
    b = Node(a.table, "B", 2)
    b.do(Connect("end", True, 0, None, False, Reason.ADMINISTRATIVE_ACTION))
    (asks,) = b.read()
    assert a.do(asks.message)[0] == Close("t1", Reason.ADMINISTRATIVE_ACTION)
    a.work()
    b.do(Released("c", asks.message.epoch))
    assert of(b.work(), Welcome)
    assert b.last(WriteRow).write.unsubscribed == ["a", "b"]
    b.do(Gone("end", goodbye=True, expiry_secs=0))
    b.work()
    assert b.row.dead
    assert b.table.published == [WILL], "the session has ended without a good-bye of its client"


def test_an_operator_cannot_end_a_session_that_is_none() -> None:
    node = Node(Table())
    node.do(Connect("end", True, 0, None, False, Reason.ADMINISTRATIVE_ACTION))
    assert of(node.work(), Refuse) == [Refuse("end", Reason.QUOTA_EXCEEDED)]
    assert node.table.written == 0


def test_a_release_without_a_taker_only_disconnects() -> None:
    node = here(expiry=60)
    ask = Release("c", node.row.epoch, 1, Address("B", "session", "c"), Reason.ADMINISTRATIVE_ACTION)
    assert node.do(ask)[0] == Close("t1", Reason.ADMINISTRATIVE_ACTION)
    assert of(node.work(), Send) == [Send(Address("B", "session", "c"), Released("c", node.row.epoch))]
    assert (node.row.lease, node.row.dead, node.row.due) == (None, False, 1060.0)


def test_a_connect_that_is_not_welcome_yet_is_told_only_what_a_connack_can_say() -> None:
    node = Node(Table())
    node.do(Connect("t1", False, 60))
    node.read()
    refused = of(node.do(Connect("end", True, 0, None, False, Reason.ADMINISTRATIVE_ACTION)), Refuse)
    assert refused == [Refuse("t1", Reason.SERVER_UNAVAILABLE)]


def test_a_connect_that_waits_is_refused_when_the_node_stops() -> None:
    node = Node(Table())
    node.do(Connect("t1", False, 60))
    assert node.do(Stop()) == [Refuse("t1", Reason.USE_ANOTHER_SERVER), Forget()]


# -- nobody knows ------------------------------------------------------------------------------------------


def test_a_take_in_doubt_is_repeated_against_the_same_state_and_found_again() -> None:
    node = Node(Table())
    node.do(Connect("t1", False, 60))
    (first,) = node.read()
    node.table.write(first.write)  # it landed
    assert node.do(Failed()) == []
    assert node.life.deadline == 0.5
    (second,) = node.wait(0.5)
    assert second.write == first.write
    assert of(node.write(), Welcome)
    assert node.table.written == 1


def test_a_refusal_in_doubt_that_shows_somebody_else_ends_the_connect() -> None:
    node = Node(Table())
    node.do(Connect("t1", False, 60, WILL))
    (first,) = node.read()
    node.do(Failed())
    node.table.write(first.write)  # it landed, unseen, and is taken over
    other = Node(node.table, "B", 2)
    other.ended = {1}
    other.connect("t2")
    node.wait(0.5)
    assert node.write() == [Refuse("t1", Reason.SERVER_UNAVAILABLE), Forget()]


def test_a_refusal_without_doubt_is_decided_again() -> None:
    node = Node(Table())
    node.do(Connect("t1", False, 60))
    node.read()
    node.do(Failed(in_doubt=False))
    other = Node(node.table, "B", 2)
    other.connect("t2")
    node.wait(0.5)
    assert of(node.write(), ReadRow)
    assert of(node.read(), Send)


def test_a_row_that_the_sweep_wrote_away_is_not_the_own_take() -> None:
    node = Node(Table())
    node.do(Connect("t1", False, 60))
    (first,) = node.read()
    node.do(Failed())
    row = node.table.write(first.write).row
    assert row is not None
    swept = SessionRow(client_id="c", connect="t1", born="t1", expiry_secs=60, left_at=1000.0)
    node.table.write(RowWrite(swept, (row.epoch, row.seq), True))
    node.wait(0.5)
    assert of(node.write(), Refuse)


def test_who_is_in_doubt_about_a_take_promises_nothing() -> None:
    a = Node(Table())
    a.do(Connect("t1", False, 60))
    (first,) = a.read()
    a.table.write(first.write)
    a.do(Failed())
    asks = Release("c", a.row.epoch, 1, Address("B", "session", "c"))
    assert a.do(asks) == []
    a.wait(0.5)
    assert of(a.write(), Welcome)
    assert of(a.do(asks), Close)


def test_who_is_in_doubt_about_a_resume_promises_nothing() -> None:
    node = here()
    node.wait(6.0)
    node.node.granted(7, 6.0)
    (again,) = node.do(TICK)
    node.table.write(again.write)
    node.do(Failed())
    assert node.do(Release("c", node.row.epoch, 7, Address("B", "session", "c"))) == []
    node.wait(0.5)
    assert node.write() == [Resume("t1")]


def test_a_flush_in_doubt_goes_on_from_its_own_epoch() -> None:
    node = here()
    node.content = Content(b"a")
    (first,) = node.do(Subscribed(1))
    node.table.write(first.write)
    node.do(Failed())
    node.do(Gone("t1"))
    (second,) = node.wait(0.5)
    assert second.write == first.write
    assert not of(node.write(), Saved), "nobody is there to be told"
    assert of(node.work(), Forget)
    assert (node.row.lease, node.row.seq) == (None, 2)


def test_a_take_from_memory_that_failed_keeps_the_memory() -> None:
    node = here()
    node.content = Content(b"", b"9")
    node.do(Connect("t2", False, 60))
    node.do(Failed(in_doubt=False))
    node.do(Gone("t2"))
    assert of(node.work(), Forget)
    assert node.row.cursors == b"9"
    assert node.row.connect == "t1"


def test_a_connect_whose_take_is_in_doubt_is_left_as_lost() -> None:
    """The row that is adopted is the new CONNECT's: not the departure of the one before."""
    node = here(will=LATER, expiry=60)
    node.do(Gone("t1", goodbye=True, expiry_secs=5))
    node.write()
    node.now = 2.0
    node.node.renewed(2.0)
    node.life = SessionLife("c", node.node, lambda leaving: node.content)
    node.do(Connect("t2", False, 70, WILL))
    (take,) = node.read()
    node.table.write(take.write)
    node.do(Failed())
    node.now = 3.0
    node.do(Gone("t2"))
    node.wait(0.5)
    effects = [*node.write(), *node.work()]
    assert of(effects, Forget)
    assert (node.row.expiry_secs, node.row.left_at) == (70, 1003.0)
    assert node.table.published == [WILL]


def test_a_write_that_surely_failed_is_merged_into_the_next() -> None:
    node = here()
    node.content = Content(b"a")
    node.do(Subscribed(1))
    node.do(Failed(in_doubt=False))
    assert node.life.deadline == 0.5
    node.content = Content(b"a", b"3")
    node.do(Gone("t1"))
    assert node.life.deadline == 0.5
    assert of(node.wait(0.5), WriteRow)
    node.write()
    assert (node.row.subscriptions, node.row.cursors, node.row.lease) == (b"a", b"3", None)
    assert node.table.written == 1


def test_a_node_that_does_not_hold_it_says_so_at_once() -> None:
    node = Node(Table())
    asks = Release("c", 6, 1, Address("B", "session", "c"))
    assert answer_unheld(asks, node.node) == [Send(Address("B", "session", "c"), Released("c", 6))]
    assert answer_unheld(Release("c", 6, 9, Address("B", "session", "c")), node.node) == []
    node.node.lost()
    assert answer_unheld(asks, node.node) == []


def test_a_release_for_another_lease_or_epoch_changes_nothing() -> None:
    node = here()
    reply_to = Address("B", "session", "c")
    assert node.do(Release("c", 1, 9, reply_to)) == []
    assert node.do(Release("c", 0, 1, reply_to)) == [Send(reply_to, Released("c", 0))]
    assert node.life.state is State.HERE


def test_nothing_is_due_for_ever() -> None:
    """A deadline that has passed is acted on: a driver would spin otherwise."""
    node = here()
    node.content = Content(b"", b"1")
    node.do(Moved())
    node.node.renewed(4.0)
    node.wait(5.0)
    assert node.life.deadline > node.now
    node.do(Moved())
    node.node.renewed(9.0)
    node.wait(6.0)
    assert node.life.deadline > node.now
