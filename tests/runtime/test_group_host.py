"""The groups' host: whichever machine fails, in whatever way, the group is read again soon afterwards."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

import holdfast
from holdfast.delivery.delivery import LoanStarted, LoanStopped, Room
from holdfast.delivery.outlet import Outlet
from holdfast.groups.protocol import effects as fx
from holdfast.groups.protocol import messages as m
from holdfast.groups.protocol.nouns import GroupId
from holdfast.log import Log
from holdfast.machine import Address
from holdfast.model import LOG, Batch, Stream
from holdfast.runtime.groups import GroupHost
from holdfast.runtime.memberships import Membership
from holdfast.runtime.supervisor import Supervisor
from holdfast.sessions.session import Session
from holdfast.sessions.shared import LoanFeed
from holdfast.sessions.subscriptions import Subscription
from holdfast.settings import GroupSettings
from holdfast.store import open_metadata

SECONDS = 20.0
SHARDS = 2
G = GroupId("g", "a/#")
QUICK = GroupSettings(lease_secs=0.6, ping_secs=0.1, ping_timeout_secs=0.4, revoke_secs=0.5)


class Delivery:
    """Takes loans and reads nothing of them."""

    def __init__(self, log: Log):
        self._log = log
        self.feeds: dict[LoanFeed, Outlet] = {}

    @property
    def heads(self) -> dict[Stream, int]:
        return {head.stream: head.next_offset for head in self._log.heads(LOG)}

    def handle(self, event: LoanStarted | LoanStopped | Room) -> None:
        match event:
            case LoanStarted(outlet, feed):
                self.feeds[feed] = outlet
                feed.news_to = outlet.loan_news
            case LoanStopped(_, feed):
                self.feeds.pop(feed, None)

    def pass_over(self, outlet: Outlet) -> None: ...


class Connection:
    """What memberships see of a connection."""

    def __init__(self, client_id: str):
        self.session: Session | None = Session(client_id, 100)
        self.outlet = Outlet(self.session, 5)
        self.closed = False


class Bench:
    def __init__(self, settings: GroupSettings = QUICK):
        self.log = holdfast.open("memory:")
        self.log.create(LOG, SHARDS)
        self.metadata = open_metadata("memory:")
        self.delivery = Delivery(self.log)
        self.supervisor = Supervisor(lambda reason: None)
        self.tasks: set[asyncio.Task[Any]] = set()
        self.host = GroupHost(
            node_id="n1",
            settings=settings,
            log=self.log,
            metadata=self.metadata,
            bus=None,
            delivery=self.delivery,
            supervisor=self.supervisor,
            spawn=self.spawn,
            group_deleted=lambda *_: None,
        )

    def spawn(self, work: Coroutine[Any, Any, Any]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)

    async def join(self, client_id: str, text: str = "$share/g/a/#", qos: int = 1, group: GroupId = G) -> Connection:
        connection = Connection(client_id)
        await self.subscribe(connection, text, qos, group)
        return connection

    async def subscribe(self, connection: Connection, text: str, qos: int = 1, group: GroupId = G) -> None:
        record = await self.host.admin.declare(group)
        subscription = Subscription(text, qos, born=record.born)
        await self.host.join(connection, connection.session, group, subscription)  # type: ignore[arg-type]

    def leave(self, connection: Connection) -> None:
        connection.closed = True
        self.host.leave(connection)  # type: ignore[arg-type]
        connection.session = None

    def membership(self, connection: Connection) -> Membership:
        return self.host.members._by_outlet[connection.outlet]

    def held(self, connection: Connection) -> list[LoanFeed]:
        return [feed for feed, who in self.delivery.feeds.items() if who is connection.outlet]

    async def until_all_lent(self, connection: Connection) -> list[LoanFeed]:
        await until(lambda: len(self.held(connection)) == SHARDS)
        return self.held(connection)


async def until(condition: Callable[[], Any]) -> None:
    while not condition():  # noqa: ASYNC110 (anything may be waited for)
        await asyncio.sleep(0.002)


def run(work: Callable[[Bench], Coroutine[Any, Any, None]], settings: GroupSettings = QUICK) -> None:
    async def whole() -> None:
        bench = Bench(settings)
        bench.host.start()
        try:
            await asyncio.wait_for(work(bench), SECONDS)
        finally:
            await bench.host.stop()
            await bench.supervisor.stop()
            bench.metadata.close()
            bench.log.close()

    asyncio.run(whole())


def fails(*_: Any, **__: Any) -> Any:
    raise KeyError("planted")


# -- machines that fail ------------------------------------------------------------------------------------------------


def test_a_leader_that_fails_is_replaced(monkeypatch):
    async def work(bench: Bench) -> None:
        one = await bench.join("one")
        await bench.until_all_lent(one)
        (leader,) = bench.host._leaders.values()
        monkeypatch.setattr(leader.machine, "handle", fails)
        await until(lambda: not leader.alive)
        await until(lambda: [d for d in bench.host._leaders.values() if d is not leader])
        await bench.until_all_lent(one)

    run(work)


def test_a_leader_whose_save_fails_in_an_unknown_way_is_replaced(monkeypatch):
    async def work(bench: Bench) -> None:
        one = await bench.join("one")
        feeds = await bench.until_all_lent(one)
        (leader,) = bench.host._leaders.values()
        monkeypatch.setattr(bench.host.store, "save", fails)
        bench.log.append(LOG, Batch(["a/1"], [b"x"], "p"))
        feeds[0].settle_offset(0)
        bench.host.report(one.outlet)
        await until(lambda: not leader.alive)
        monkeypatch.undo()
        await until(lambda: [d for d in bench.host._leaders.values() if d is not leader])
        await bench.until_all_lent(one)

    run(work)


@pytest.mark.parametrize("call", ["open_lease", "renew_lease", "claim"])
def test_a_registry_whose_question_fails_in_an_unknown_way_is_replaced(monkeypatch, call):
    async def work(bench: Bench) -> None:
        first = bench.host._registry
        monkeypatch.setattr(bench.host.store, call, fails)
        one = await bench.join("one")
        await until(lambda: not first.alive)
        monkeypatch.undo()
        assert bench.host._registry is not first
        await bench.until_all_lent(one)

    run(work)


def test_a_registry_that_fails_takes_its_leaders_with_it_and_its_lease_is_not_renewed(monkeypatch):
    async def work(bench: Bench) -> None:
        one = await bench.join("one")
        await bench.until_all_lent(one)
        registry, (leader,) = bench.host._registry, bench.host._leaders.values()
        (lease,) = bench.host.store._leases.values()
        monkeypatch.setattr(registry.machine, "handle", fails)
        await until(lambda: not registry.alive)
        assert not leader.alive and lease.id not in bench.host.store._leases
        await until(lambda: bench.host._leaders)
        await bench.until_all_lent(one)

    run(work)


def test_an_agent_that_fails_is_replaced_and_its_session_joins_again(monkeypatch):
    async def work(bench: Bench) -> None:
        one = await bench.join("one")
        feeds = await bench.until_all_lent(one)
        before = bench.membership(one).agent
        monkeypatch.setattr(before, "handle", fails)
        await until(lambda: not [feed for feed in bench.held(one) if feed in feeds])
        again = await bench.until_all_lent(one)
        assert bench.membership(one).agent.incarnation > before.incarnation
        assert not set(again) & set(feeds) and all(feed.stopped for feed in feeds)

    run(work)


def test_an_agent_whose_effect_cannot_be_performed_is_replaced(monkeypatch):
    async def work(bench: Bench) -> None:
        monkeypatch.setattr(bench.delivery, "handle", fails)
        one = await bench.join("one")
        await until(lambda: bench.membership(one).breakdowns)
        monkeypatch.undo()
        await bench.until_all_lent(one)

    run(work)


def test_an_agent_that_fails_as_its_connection_ends_is_forgotten(monkeypatch):
    async def work(bench: Bench) -> None:
        one = await bench.join("one")
        await bench.until_all_lent(one)
        monkeypatch.setattr(bench.membership(one).agent, "handle", fails)
        bench.leave(one)
        assert not bench.host.members.members and not bench.delivery.feeds

    run(work)


# -- who is in a group -------------------------------------------------------------------------------------------------


def test_a_connection_that_ends_while_its_group_is_declared_joins_nothing():
    async def work(bench: Bench) -> None:
        gone = Connection("gone")
        gone.closed = True
        await bench.subscribe(gone, "$share/g/a/#")
        assert not bench.host.members.members

    run(work)


def test_a_member_that_left_before_the_group_had_a_leader_holds_nothing(monkeypatch):
    """Its question waits for the claim; the leader's answer finds nobody and says so to the leader."""

    async def work(bench: Bench) -> None:
        real = bench.host.store.claim
        claimed, go = asyncio.Event(), asyncio.Event()
        loop = asyncio.get_running_loop()

        def slow(*given: Any) -> Any:
            loop.call_soon_threadsafe(claimed.set)
            asyncio.run_coroutine_threadsafe(go.wait(), loop).result(SECONDS)
            return real(*given)

        monkeypatch.setattr(bench.host.store, "claim", slow)
        ghost = await bench.join("ghost")
        await claimed.wait()
        bench.leave(ghost)
        go.set()
        one = await bench.join("one")
        begun = loop.time()
        await bench.until_all_lent(one)
        assert loop.time() - begun < 3.0, "a silent member would be waited for far longer"

    run(work, GroupSettings(lease_secs=20.0, ping_secs=5.0, ping_timeout_secs=10.0))


def test_two_ways_to_write_one_group_are_one_membership_that_ends_with_the_last():
    async def work(bench: Bench) -> None:
        one = await bench.join("one", "$share/g/a/#")
        feeds = await bench.until_all_lent(one)
        await bench.subscribe(one, "$queue/g/a/#", qos=2)
        assert [feed.subscription.qos for feed in feeds] == [2, 2], "the last one counts"
        bench.host.unsubscribe(one, G, "$queue/g/a/#")  # type: ignore[arg-type]
        assert bench.held(one) == feeds and [feed.subscription.qos for feed in feeds] == [1, 1]
        bench.host.unsubscribe(one, G, "$queue/g/a/#")  # type: ignore[arg-type]
        assert bench.held(one) == feeds, "it was gone already"
        bench.host.unsubscribe(one, G, "$share/g/a/#")  # type: ignore[arg-type]
        await until(lambda: not bench.held(one))

    run(work)


def test_after_leaving_and_coming_back_the_first_way_to_write_it_does_not_count_any_more():
    async def work(bench: Bench) -> None:
        one = await bench.join("one", "$share/g/a/#")
        await bench.until_all_lent(one)
        bench.host.unsubscribe(one, G, "$share/g/a/#")  # type: ignore[arg-type]
        await bench.subscribe(one, "$queue/g/a/#")
        await bench.until_all_lent(one)
        bench.host.unsubscribe(one, G, "$queue/g/a/#")  # type: ignore[arg-type]
        await until(lambda: not bench.held(one))

    run(work)


def test_other_options_reach_loans_that_are_being_read():
    async def work(bench: Bench) -> None:
        one = await bench.join("one", qos=0)
        feeds = await bench.until_all_lent(one)
        await bench.subscribe(one, "$share/g/a/#", qos=2)
        assert [feed.subscription.qos for feed in feeds] == [2, 2] and bench.held(one) == feeds

    run(work)


def test_with_groups_switched_off_nobody_joins():
    async def work(bench: Bench) -> None:
        one = await bench.join("one")
        assert not bench.host.members.members
        bench.leave(one)

    run(work, GroupSettings(enabled=False))


def test_two_sessions_share_and_one_that_goes_leaves_its_part_to_the_other():
    async def work(bench: Bench) -> None:
        one, two = await bench.join("one"), await bench.join("two")
        await until(lambda: len(bench.held(one)) == len(bench.held(two)) == 1)
        bench.leave(two)
        await bench.until_all_lent(one)

    run(work)


# -- what retention drops ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", ["earliest", "error", "latest"])
def test_what_was_dropped_unread_is_recorded_and_the_policy_followed(policy):
    async def work(bench: Bench) -> None:
        one = await bench.join("one")
        await bench.until_all_lent(one)
        bench.log.append(LOG, Batch([f"a/{n}" for n in range(20)], [b"x"] * 20, [f"p{n}" for n in range(20)]))
        ends = bench.delivery.heads
        bench.log.seal(LOG)
        bench.host.streams_changed()
        (leader,) = bench.host._leaders.values()
        await until(lambda: leader.machine.group_streams.seen[Stream(LOG, 0, 1)] is not None)  # it knows the end
        before = (await bench.host.admin.describe(G)).course
        bench.log.drop(LOG, 1)
        bench.host.streams_changed()

        async def recorded() -> list[Any]:
            while len(gaps := await bench.host.admin.skipped(G)) < SHARDS:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            return gaps

        gaps = {(gap.stream, gap.first, gap.past) for gap in await recorded()}
        assert gaps == {(str(stream), 0, end) for stream, end in ends.items()}

        async def as_the_policy_says() -> bool:
            view = await bench.host.admin.describe(G)
            return view.paused == (policy == "error") and (view.course != before) == (policy == "latest")

        while not await as_the_policy_says():  # noqa: ASYNC110
            await asyncio.sleep(0.02)

    run(work, GroupSettings(lease_secs=5.0, ping_secs=0.1, ping_timeout_secs=1.0, revoke_secs=0.2, on_trimmed=policy))


def test_what_a_group_without_members_loses_is_recorded_too():
    async def work(bench: Bench) -> None:
        await bench.host.admin.declare(G)
        await bench.host.admin.declare(GroupId("late", "a/#"))
        bench.log.append(LOG, Batch(["a/1", "a/2"], [b"x", b"y"], "p"))
        done = GroupId("done", "a/#")
        await bench.host.admin.declare(done)  # begins after them: nothing of them is its own
        ends, led = bench.delivery.heads, await bench.host.led()
        bench.log.seal(LOG)
        bench.log.drop(LOG, 1)
        await bench.host.admin.describe(G)  # begins to lead only now, and knows nothing of what was there
        for _ in range(2):  # two nodes may notice
            await bench.host.streams_dropped(ends, led)
        for group in (G, GroupId("late", "a/#")):
            (gap,) = await bench.host.admin.skipped(group)
            assert (gap.first, gap.past, gap.reason) == (0, 2, "dropped by retention")
        assert await bench.host.admin.skipped(done) == []

    run(work)


def test_a_deleted_group_leaves_no_record_of_what_it_lost():
    async def work(bench: Bench) -> None:
        await bench.host.admin.declare(G)
        bench.host.store.note_skipped(G, [fx.Skipped(Stream(LOG, 0, 1), 0, 5)])
        await bench.host.admin.ask(G, m.DeleteGroup())
        assert await bench.host.admin.skipped(G) == []

    run(work)


# -- names, addresses --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [200, 201, 980, 1100, 30_000])
def test_a_group_with_a_long_filter_is_served(size):
    async def work(bench: Bench) -> None:
        long = GroupId("g", "/".join(["a" * 499] * (size // 500 + 1))[: size - 2] + "/#")
        one = await bench.join("one", f"$share/g/{long.filter}", group=long)
        await bench.until_all_lent(one)
        assert [record.group for record in await bench.host.admin.groups()] == [long]
        assert (await bench.host.admin.describe(long)).group == long

    run(work)


def test_a_message_to_nobody_is_dropped_and_one_to_a_registered_kind_arrives():
    async def work(bench: Bench) -> None:
        heard: list[Any] = []
        bench.host.register("fan", lambda name, message: heard.append((name, message)))
        bench.host.send(Address("n1", "fan", "x"), "hello")
        bench.host.send(Address("n1", "nobody", "x"), "hello")
        bench.host.send(Address("elsewhere", "fan", "x"), "hello")
        await until(lambda: heard)
        assert heard == [("x", "hello")]

    run(work)
