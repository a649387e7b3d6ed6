"""Saving cursors: forward only, fenced, together, again after a failure, and never from the grave."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from holdfast.runtime.keeper import Keeper

from holdfast.cursors import Cursor
from holdfast.cursors.cursor_map import CursorMap
from holdfast.cursors.flush import CursorStore
from holdfast.errors import RequestError, StoreError
from holdfast.keys import named_cursor_key, session_cursor_key
from holdfast.metadata import Metadata
from holdfast.metadata.etcd import EtcdMetadata
from holdfast.model import Batch, Stream
from holdfast.mqtt.inbound import Inbound
from holdfast.sessions.packed import StoredCursors, pack_cursors
from holdfast.sessions.records import SessionRecord, SubscriptionRecord, record_of
from holdfast.sessions.rows import Rows
from holdfast.sessions.session import Session
from holdfast.sessions.subscriptions import Subscription
from holdfast.store import StoreOptions, open_metadata, open_store
from servers import EtcdServer, PostgresServer

S = Stream("messages", 3, 2)
KEY = session_cursor_key(S, "car-1", "vehicle/#")


@pytest.fixture(params=["memory", "sqlite", "postgres", "etcd"])
def metadata(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Metadata]:
    url = {
        "memory": lambda: "memory:",
        "sqlite": lambda: f"sqlite:///{tmp_path}/metadata.db",
        "postgres": lambda: request.getfixturevalue("postgres_url"),
        "etcd": lambda: request.getfixturevalue("etcd_url"),
    }[request.param]()
    with open_metadata(url) as opened:
        yield opened


@pytest.fixture
def store() -> Iterator[CursorStore]:
    with open_metadata("memory:") as opened:
        yield CursorStore(opened)


def stored(metadata: Metadata, key: str = KEY) -> Cursor | None:
    entry = metadata.get(key)
    return None if entry is None else Cursor.from_json(entry.value)


class Counted:
    """A metadata store that counts its transactions, and refuses them while told to."""

    def __init__(self, metadata: Metadata, batch_max: int | None = None):
        self._metadata = metadata
        self.batch_max = batch_max if batch_max is not None else metadata.batch_max
        self.sizes: list[int] = []
        self.error: Exception | None = None

    def transact(self, changes: Any, preconditions: Any = None) -> Any:
        if self.error is not None:
            raise self.error
        found = self._metadata.transact(changes, preconditions)
        self.sizes.append(len(changes))
        return found

    def __getattr__(self, name: str) -> Any:
        return getattr(self._metadata, name)


# -- form ------------------------------------------------------------------------------------------------


def test_the_key_and_the_value_are_as_the_design_says(metadata):
    assert KEY == "/holdfast/subscriptions/messages/messages.2.3/car-1 vehicle%2F#/cursor"
    CursorStore(metadata).save({KEY: Cursor(12_345, [(12_350, 12_360)], epoch=7)}, 1_726_937_845.9)
    entry = metadata.get(KEY)
    assert entry is not None
    assert json.loads(entry.value) == {
        "offset": 12_345,
        "updated_at": 1_726_937_845,
        "acked": [[12_350, 12_360]],
        "epoch": 7,
    }


def test_the_plain_form_of_the_seed_is_understood(metadata):
    metadata.put(KEY, b'{"offset": 12345, "updated_at": 1726937845}')
    cursors = CursorStore(metadata)
    assert cursors.load(KEY) == Cursor(12_345)
    cursors.save({KEY: Cursor(12_350, epoch=1)}, 0.0)
    assert stored(metadata) == Cursor(12_350, epoch=1)


# -- forward only, fenced --------------------------------------------------------------------------------


def test_what_another_process_saved_meanwhile_is_kept(metadata):
    mine, theirs = CursorStore(metadata), CursorStore(metadata)
    mine.save({KEY: Cursor(5, epoch=1)}, 0.0)
    theirs.load(KEY)
    theirs.save({KEY: Cursor(9, [(12, 14)], epoch=1)}, 0.0)
    assert mine.save({KEY: Cursor(7, [(16, 16)], epoch=1)}, 0.0) == {KEY}
    assert stored(metadata) == Cursor(9, [(12, 14), (16, 16)], epoch=1)


def test_a_holder_of_an_older_epoch_changes_nothing(metadata):
    old, new = CursorStore(metadata), CursorStore(metadata)
    old.save({KEY: Cursor(5, epoch=1)}, 0.0)
    new.load(KEY)
    new.save({KEY: Cursor(6, epoch=2)}, 0.0)
    version = metadata.get(KEY).version
    assert old.save({KEY: Cursor(99, epoch=1)}, 0.0) == {KEY}, "settled: there is nothing left for it to save"
    assert stored(metadata) == Cursor(6, epoch=2) and metadata.get(KEY).version == version
    assert new.save({KEY: Cursor(7, epoch=2)}, 0.0) == {KEY}
    assert stored(metadata) == Cursor(7, epoch=2)


def test_one_stale_cursor_does_not_hold_up_the_others(metadata):
    old, new = CursorStore(metadata), CursorStore(metadata)
    keys = [named_cursor_key(S, f"s{n}") for n in range(5)]
    old.save({key: Cursor(1, epoch=1) for key in keys}, 0.0)
    new.load(keys[2])
    new.save({keys[2]: Cursor(2, epoch=2)}, 0.0)
    assert old.save({key: Cursor(5, epoch=1) for key in keys}, 0.0) == set(keys)
    assert [stored(metadata, key).offset for key in keys] == [5, 5, 2, 5, 5]


def test_a_process_that_knows_no_version_yet_finds_what_is_there(metadata):
    CursorStore(metadata).save({KEY: Cursor(9, epoch=1)}, 0.0)
    assert CursorStore(metadata).save({KEY: Cursor(4, epoch=2)}, 0.0) == {KEY}
    assert stored(metadata) == Cursor(9, epoch=2), "it takes over, and nothing moves back"


# -- together --------------------------------------------------------------------------------------------


def test_all_cursors_go_in_one_transaction(metadata):
    counted = Counted(metadata)
    cursors = {named_cursor_key(S, f"s{n}"): Cursor(n, epoch=1) for n in range(300)}
    assert CursorStore(counted).save(cursors, 0.0) == set(cursors)
    if metadata.batch_max is None:
        assert counted.sizes == [300]
    else:
        assert sum(counted.sizes) == 300 and max(counted.sizes) <= metadata.batch_max
        assert len(counted.sizes) == -(-300 // metadata.batch_max)
    assert all(stored(metadata, key) == cursor for key, cursor in cursors.items())
    CursorStore(counted).delete(cursors)
    assert metadata.list("/holdfast/subscriptions/") == {}


def test_what_was_saved_before_a_failure_half_way_is_saved_and_the_rest_is_tried_again():
    with open_metadata("memory:") as inner:
        counted = Counted(inner, batch_max=2)
        cursors = {named_cursor_key(S, f"s{n}"): Cursor(n, epoch=1) for n in range(4)}
        store, real = CursorStore(counted), counted.transact

        def fails_after_one(changes: Any, preconditions: Any = None) -> Any:
            if counted.sizes:
                raise StoreError("gone")
            return real(changes, preconditions)

        counted.transact = fails_after_one
        with pytest.raises(StoreError):
            store.save(cursors, 0.0)
        assert len(inner.list("/holdfast/")) == 2
        counted.transact = real
        assert store.save(cursors, 0.0) == set(cursors)
        assert all(stored(inner, key) == cursor for key, cursor in cursors.items())


# -- deleted ---------------------------------------------------------------------------------------------


def test_a_subscription_another_process_deleted_stays_deleted(metadata):
    mine, theirs = CursorStore(metadata), CursorStore(metadata)
    other = named_cursor_key(S, "other")
    mine.save({KEY: Cursor(5, epoch=1), other: Cursor(1, epoch=1)}, 0.0)
    theirs.delete([KEY])
    assert mine.save({KEY: Cursor(6, epoch=1), other: Cursor(2, epoch=1)}, 0.0) == {KEY, other}
    assert stored(metadata) is None and stored(metadata, other).offset == 2


def test_deleting_what_is_not_there_is_harmless(metadata):
    CursorStore(metadata).delete([KEY])
    CursorStore(metadata).delete([])


def test_a_deleted_subscription_made_anew_starts_anew(store):
    store.save({KEY: Cursor(50, epoch=9)}, 0.0)
    store.delete([KEY])
    store.create({KEY: Cursor(7, epoch=1)}, 0.0)
    assert store.load(KEY) == Cursor(7, epoch=1)
    assert store.save({KEY: Cursor(8, epoch=1)}, 0.0) == {KEY}
    assert store.load(KEY) == Cursor(8, epoch=1)


def test_forgotten_keys_are_looked_up_again(store):
    store.save({KEY: Cursor(5, epoch=2)}, 0.0)
    store.forget([KEY])
    store.save({KEY: Cursor(3, epoch=2)}, 0.0)
    assert store.load(KEY) == Cursor(5, epoch=2)


# -- unreadable ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [b"", b"{", b"[]", b'{"offset": -2, "updated_at": 0}', b'{"updated_at": 1}', b"\xff"])
def test_an_unreadable_cursor_is_an_error_that_names_its_key(metadata, value):
    metadata.put(KEY, value)
    with pytest.raises(RequestError) as caught:
        CursorStore(metadata).load(KEY)
    assert f"the cursor at {KEY} cannot be read" in str(caught.value)


def test_an_unreadable_cursor_that_appears_under_our_hands_is_not_written_over(store):
    store.save({KEY: Cursor(5, epoch=1)}, 0.0)
    store._metadata.put(KEY, b"damaged")
    assert store.save({KEY: Cursor(6, epoch=1)}, 0.0) == {KEY}
    assert store._metadata.get(KEY).value == b"damaged"


def unreadable(policy: str) -> Session:
    with open_metadata("memory:") as metadata:
        keeper = Keeper(metadata, policy)
        metadata.put(session_cursor_key(S, "me", "#"), b"damaged")
        record = began({S: 4})
        try:
            return keeper.restore(record, {S: 9})
        finally:
            keeper.close()


def test_the_policy_says_where_a_subscription_with_an_unreadable_cursor_goes_on():
    assert unreadable("earliest").position(S, {}) == 4
    with pytest.raises(RequestError, match="cannot be read"):
        unreadable("error")
    latest = unreadable("latest")
    assert latest.position(S, {}) == 9
    (skipped,) = latest.positions.gaps
    assert (skipped.stream, skipped.first, skipped.past) == (str(S), 4, 9)
    assert "cannot be read" in skipped.reason


# -- the keeper: which cursors, and when again -----------------------------------------------------------


def with_acks(name: str = "me", count: int = 3) -> Session:
    """A session that got ten messages and acknowledged some."""
    session = Session(name, 100)
    session.subscribe(Subscription("#", 1))
    batch = Batch(["t"] * 10, [b""] * 10)
    session.outgoing.put(Rows(S, range(10), batch, 0), range(10))
    session.outgoing.take([], 100, 1 << 20, 5, 1 << 20, 0.0)
    session.window.puback(range(1, count + 1))
    return session


def key_of(session: Session) -> str:
    return session_cursor_key(S, session.client_id, "#")


def run(metadata: Metadata, work: Callable[[Keeper], Any]) -> Any:
    keeper = Keeper(metadata, "earliest")
    try:
        return asyncio.run(work(keeper))
    finally:
        keeper.close()


def test_persist_on_ack(metadata):
    """Seed 002: after an ack, the flush makes the cursor durable."""
    session = with_acks(count=3)
    assert session.positions.dirty == {S}
    assert run(metadata, lambda keeper: keeper.flush([session], {S: 10})) == 1
    assert stored(metadata, key_of(session)) == Cursor(2, epoch=1)
    assert not session.positions.dirty
    session.window.puback([5])
    run(metadata, lambda keeper: keeper.flush([session], {S: 10}))
    assert stored(metadata, key_of(session)) == Cursor(2, [(4, 4)], epoch=1)


def test_a_node_flushes_all_its_sessions_in_one_transaction():
    with open_metadata("memory:") as inner:
        counted = Counted(inner)
        sessions = [with_acks(f"s{n}") for n in range(50)]
        assert run(counted, lambda keeper: keeper.flush(sessions, {S: 10})) == 50
        assert counted.sizes == [50]
        assert run(counted, lambda keeper: keeper.flush(sessions, {S: 10})) == 0, "nothing is dirty any more"
        assert counted.sizes == [50]


def test_sessions_that_end_with_their_connection_store_nothing():
    with open_metadata("memory:") as metadata:
        session = with_acks()
        session.expiry_seconds = 0
        assert run(metadata, lambda keeper: keeper.flush([session], {S: 10})) == 0
        assert metadata.list("/") == {} and not session.positions.dirty


def test_a_failed_flush_stays_dirty_and_what_came_meanwhile_goes_with_the_next():
    with open_metadata("memory:") as inner:
        counted = Counted(inner)
        session = with_acks(count=2)

        async def work(keeper: Keeper) -> None:
            counted.error = StoreError("no store")
            assert await keeper.flush([session], {S: 10}) == 0
            assert session.positions.dirty == {S}
            session.window.puback([3])
            counted.error = None
            assert await keeper.flush([session], {S: 10}) == 1

        run(counted, work)
        assert stored(inner, key_of(session)) == Cursor(2, epoch=1) and not session.positions.dirty


def test_cursors_survive_a_database_that_was_down(postgres_server: PostgresServer, postgres_url: str):
    session = with_acks(count=2)
    with open_store(postgres_url, StoreOptions(retry_seconds=0.3)).metadata() as metadata:

        async def work(keeper: Keeper) -> None:
            await keeper.flush([session], {S: 10})
            session.window.puback([3, 4])
            postgres_server.stop()
            try:
                assert await keeper.flush([session], {S: 10}) == 0
                assert session.positions.dirty == {S}
            finally:
                postgres_server.start()
            assert await keeper.flush([session], {S: 10}) == 1

        run(metadata, work)
        assert stored(metadata, key_of(session)) == Cursor(3, epoch=1) and not session.positions.dirty


def test_cursors_survive_an_etcd_that_was_down(etcd_server: EtcdServer, etcd_url: str):
    session = with_acks(count=2)
    with EtcdMetadata.open(etcd_url, retry_seconds=0.3) as metadata:

        async def work(keeper: Keeper) -> None:
            await keeper.flush([session], {S: 10})
            session.window.puback([3, 4])
            etcd_server.stop()
            try:
                assert await keeper.flush([session], {S: 10}) == 0
                assert session.positions.dirty == {S}
            finally:
                etcd_server.start()
            assert await keeper.flush([session], {S: 10}) == 1

        run(metadata, work)
        assert stored(metadata, key_of(session)) == Cursor(3, epoch=1) and not session.positions.dirty


def test_an_unsubscribed_filters_cursors_go_and_stay_gone(metadata):
    session = with_acks()

    async def work(keeper: Keeper) -> None:
        await keeper.flush([session], {S: 10})
        session.unsubscribe("#")
        await keeper.delete_cursors("me", ["#"], {S: 10})
        session.window.puback([4])  # late, and still under way
        await keeper.flush([session], {S: 10})

    run(metadata, work)
    assert metadata.list("/holdfast/subscriptions/") == {}


def test_many_session_records_go_together():
    with open_metadata("memory:") as inner:
        counted = Counted(inner)

        async def work(keeper: Keeper) -> None:
            records = [record_of(with_acks(f"s{n}"), connected=True, now=0.0) for n in range(20)]
            await asyncio.gather(*[keeper.save(record) for record in records])
            assert len(keeper.load_all()) == 20

        run(counted, work)
        assert counted.sizes == [20]


# -- resume ----------------------------------------------------------------------------------------------


def done_up_to(pasts: dict[Stream, int]) -> CursorMap:
    found = CursorMap.done_before(S.generation)
    for stream, past in pasts.items():
        found.set(stream, past)
    return found


def began(pasts: dict[Stream, int], epoch: int = 1, connected: bool = True) -> SessionRecord:
    """A session with one filter that began there."""
    cursors = pack_cursors(StoredCursors(done_up_to(pasts)))
    filters = [SubscriptionRecord("#", 1, number=1)]
    return SessionRecord("me", 100, epoch, connected, subscriptions=filters, cursors=cursors)


def test_resume_from_progress(metadata):
    """Seed 002: with a cursor in the store, reading starts at the one after it; ranges above are passed over."""
    key = session_cursor_key(S, "me", "#")
    CursorStore(metadata).save({key: Cursor(12, [(15, 16)], epoch=3)}, 0.0)
    record = began({S: 2}, epoch=3)

    async def work(keeper: Keeper) -> Session:
        return await keeper.call(keeper.restore, record, {S: 20})

    session = run(metadata, work)
    session.attach({S: 20}, 0.0)
    assert session.positions.behind == {S: 13} and session.epoch == 3
    block = Rows(S, range(13, 20), Batch(["t"] * 7, [b"%d" % n for n in range(13, 20)]), 0)
    assert [block.offsets[i] for i in session.positions.pick(block, session.window)] == [13, 14, 17, 18, 19]


def test_without_progress_a_subscription_resumes_where_it_began():
    with open_metadata("memory:") as metadata:
        record = began({S: 2})

        async def work(keeper: Keeper) -> Session:
            return keeper.restore(record, {S: 20, S._replace(generation=3): 4})

        session = run(metadata, work)
        assert session.position(S, {}) == 2
        assert session.position(S._replace(generation=3), {}) == 0, "a younger stream is all its own"


def test_messages_that_come_while_a_session_is_fetched_are_not_missed():
    with open_metadata("memory:") as metadata:
        key = session_cursor_key(S, "me", "#")
        CursorStore(metadata).save({key: Cursor(19, epoch=1)}, 0.0)
        record = began({S: 2}, connected=False)

        async def work(keeper: Keeper) -> Session:
            return keeper.restore(record, {S: 20})

        session = run(metadata, work)
        session.attach({S: 23}, 0.0)  # three more were dispatched before the client was welcome
        assert session.positions.behind == {S: 20}


def test_a_subscription_older_than_a_generation_is_not_cut_short_by_a_younger_one():
    younger = S._replace(generation=3)
    with open_metadata("memory:") as metadata:
        cursors = pack_cursors(StoredCursors(done_up_to({}), {2: done_up_to({S: 5, younger: 7})}))
        filters = [SubscriptionRecord("a", 1, number=1), SubscriptionRecord("b", 1, number=2)]
        record = SessionRecord("me", 100, 1, True, subscriptions=filters, cursors=cursors)

        async def work(keeper: Keeper) -> Session:
            return keeper.restore(record, {S: 5, younger: 9})

        session = run(metadata, work)
        assert session.position(younger, {}) == 0
        block = Rows(younger, range(9), Batch(["a", "b", "a", "b", "a", "b", "a", "b", "a"], [b""] * 9), 0)
        assert list(session.positions.pick(block, session.window)) == [0, 2, 4, 6, 7, 8]


def test_under_way_at_a_clean_disconnect_keeps_its_packet_ids():
    with open_metadata("memory:") as metadata:
        session = with_acks(count=8)
        session.inbound = Inbound({7, 3})
        session.detach({S: 10}, ())
        record = record_of(session, connected=False, now=5.0)
        assert record.in_flight == {"9": (str(S), 8, 1), "10": (str(S), 9, 1)} and record.disconnected_at == 5.0

        async def work(keeper: Keeper) -> Session:
            await keeper.flush([session], {S: 10})
            await keeper.save(record)
            (found,) = keeper.load_all()
            return keeper.restore(found, {S: 10})

        back = run(metadata, work)
        under_way = [(i, d.origin.stream, d.offset, d.qos) for i, d in back.window]
        assert under_way == [(9, S, 8, 1), (10, S, 9, 1)] and back.inbound.ids() == [3, 7]
        back.attach({S: 10}, 0.0)
        again = Rows(S, range(8, 10), Batch(["t"] * 2, [b""] * 2), 0)
        assert list(back.positions.pick(again, back.window)) == [], "they come again under their ids only"
