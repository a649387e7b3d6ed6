"""From commits to sessions: in order, once, and only to those it concerns."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any

import pytest

import holdfast
from holdfast.delivery.delivery import Blocked
from holdfast.delivery.outlet import Outlet
from holdfast.log import Log
from holdfast.model import LOG, Batch, Message, Stream
from holdfast.mqtt import codec
from holdfast.runtime.delivery import DeliveryHost
from holdfast.sessions.session import Session
from holdfast.sessions.subscriptions import Subscription

SECONDS = 10.0
S = Stream(LOG, 0, 1)


class Subscriber:
    """What the host sees of a connection: a session, and a socket that takes everything, or nothing for now."""

    def __init__(self, bench: Bench, name: str, *filters: str, qos: int = 0):
        self.bench = bench
        self.session = Session(name, 100)
        self.machine = SimpleNamespace(open=True)
        self.written = 0
        self.got: list[str] = []
        self.outlet = Outlet(self.session, 5)
        for text in filters:
            self.session.subscribe(Subscription(text, qos), bench.delivery.heads.end(), bench.delivery.heads)
        bench.delivery.attach(self.outlet, self)

    def write(self, raw: bytes) -> None:
        self.written += 1
        at = 0
        while at < len(raw):
            first, start, at = codec.frame(raw, at)
            self.got.append(codec.decode_for_client(first, raw[start:at], 5).payload.decode())

    def block(self, blocked: bool) -> None:
        self.bench.delivery.handle(Blocked(self.outlet, blocked))

    def go_back_to(self, offset: int) -> None:
        """As after a resume: the stream is read from there."""
        self.bench.delivery.detach(self.outlet)
        self.session.positions.behind[S] = offset
        self.outlet = Outlet(self.session, 5)
        self.bench.delivery.attach(self.outlet, self)


class Bench:
    def __init__(self, log: Log, other: Log, pending_bytes_max: int = 1 << 20):
        self.log, self.other = log, other
        self.seen: list[tuple[Stream, int]] = []
        self.delivery = DeliveryHost(log, self, pending_bytes_max)
        self.task = asyncio.get_running_loop().create_task(self.delivery.follow())

    def see(self, rows: Any) -> None:
        """In the place of retained messages, which see every block that is delivered."""
        self.seen += [(rows.stream, offset) for offset in rows.offsets]

    def commit(self, topics: list[str], texts: list[str], publisher: str = "p") -> set[str]:
        """As the ingest does: append, then deliver."""
        batch = Batch(topics, [text.encode() for text in texts], publisher)
        self.committed(self.log.append(LOG, batch), batch)
        return self.delivery.machine.anyone_for(topics)

    def committed(self, appended: Any, batch: Batch) -> None:
        parts = {p.stream.shard: batch if p.rows is None else batch.take(p.rows) for p in appended.placed}
        self.delivery.committed(appended, parts, 0)

    def elsewhere(self, topics: list[str], texts: list[str]) -> None:
        """Another process appends."""
        self.other.append(LOG, Batch(topics, [text.encode() for text in texts], "elsewhere"))

    def subscriber(self, name: str, *filters: str, **options: Any) -> Subscriber:
        return Subscriber(self, name, *filters, **options)


def run(tmp_path: Any, work: Callable[[Bench], Awaitable[None]], shards: int = 1, **options: Any) -> None:
    async def whole() -> None:
        url = f"sqlite:///{tmp_path}/log.db"
        with holdfast.open(url) as log, holdfast.open(url) as other:
            log.create(LOG, shards)
            bench = Bench(log, other, **options)
            try:
                await work(bench)
            finally:
                bench.task.cancel()
                bench.delivery.close()

    asyncio.run(asyncio.wait_for(whole(), 2 * SECONDS))


async def until(condition: Callable[[], Any]) -> None:
    async with asyncio.timeout(SECONDS):
        while not condition():  # noqa: ASYNC110 (anything may be waited for)
            await asyncio.sleep(0.001)


def test_a_commit_reaches_those_who_asked_for_it_and_says_what_was_heard(tmp_path):
    async def work(bench: Bench) -> None:
        one, two = bench.subscriber("one", "a/#"), bench.subscriber("two", "b", "+")
        assert bench.commit(["a/x", "b", "c/d"], ["0", "1", "2"]) == {"a/x", "b"}
        assert one.got == ["0"] and two.got == ["1"], "once, although two of its filters match"

    run(tmp_path, work)


def test_those_who_are_away_or_elsewhere_count_as_listeners(tmp_path):
    async def work(bench: Bench) -> None:
        bench.delivery.filters_changed({"a/#": 1, "$share/g/c": 2}, whole=True)
        assert bench.commit(["a/x", "b", "c"], ["0", "1", "2"]) == {"a/x", "c"}
        bench.delivery.filters_changed({"a/#": 0}, whole=False)
        assert bench.commit(["a/x", "b", "c"], ["3", "4", "5"]) == {"c"}

    run(tmp_path, work)


def test_other_processes_messages_arrive_in_order_between_our_own_and_nothing_twice(tmp_path):
    async def work(bench: Bench) -> None:
        one = bench.subscriber("one", "#")
        bench.commit(["t"], ["0"])
        bench.elsewhere(["t"] * 3, ["1", "2", "3"])
        bench.commit(["t"], ["4"])  # ours, behind three that we have not read yet
        assert one.got == ["0"], "what is in front comes first"
        bench.elsewhere(["t"], ["5"])
        bench.commit(["t"], ["6"])
        bench.delivery.hint()
        await until(lambda: len(one.got) == 7)
        assert one.got == [str(n) for n in range(7)]
        assert bench.seen == [(S, n) for n in range(7)]
        bench.delivery.hint()
        bench.commit(["t"], ["7"])
        await until(lambda: len(one.got) >= 8)
        assert one.got == [str(n) for n in range(8)] and bench.delivery.heads == {S: 8}

    run(tmp_path, work)


@pytest.mark.parametrize("seed", range(3))
def test_two_writers_at_once_and_a_reader_that_misses_nothing(tmp_path, seed):
    async def work(bench: Bench) -> None:
        one = bench.subscriber("one", "#")
        loop = asyncio.get_running_loop()

        def theirs() -> None:
            for n in range(60):
                bench.elsewhere(["t"], [f"b{n}"])
                loop.call_soon_threadsafe(bench.delivery.hint)

        other = loop.run_in_executor(None, theirs)
        for n in range(60):
            batch = Batch(["t"], [f"a{n}".encode()], "p")
            appended = await loop.run_in_executor(None, bench.log.append, LOG, batch)
            if n % (seed + 2):
                await asyncio.sleep(0)
            bench.committed(appended, batch)
        await other
        bench.delivery.hint()
        await until(lambda: len(one.got) >= 120)
        assert bench.seen == [(S, n) for n in range(120)]
        for letter in "ab":
            mine = [text for text in one.got if text[0] == letter]
            assert mine == [f"{letter}{n}" for n in range(60)]

    run(tmp_path, work)


def test_a_sealed_generation_is_followed_by_the_next(tmp_path):
    async def work(bench: Bench) -> None:
        one = bench.subscriber("one", "#")
        bench.commit(["t"], ["0"])
        bench.log.seal(LOG, 2)
        bench.commit(["t"], ["1"])
        bench.other.seal(LOG, 1)
        bench.elsewhere(["t"], ["2"])
        bench.delivery.hint()
        await until(lambda: len(one.got) == 3)
        assert one.got == ["0", "1", "2"]
        assert {s.generation for s in bench.delivery.heads.sealed} == {1, 2}
        assert {s.generation for s in bench.delivery.heads} == {1, 2, 3}

    run(tmp_path, work)


def test_dropped_generations_are_forgotten(tmp_path):
    async def work(bench: Bench) -> None:
        bench.commit(["t"], ["0"])
        bench.log.seal(LOG)
        bench.log.drop(LOG, 1)
        bench.delivery.hint()
        await until(lambda: S not in bench.delivery.heads)
        assert S not in bench.delivery.heads.sealed

    run(tmp_path, work)


def test_a_session_that_does_not_read_waits_in_the_log_and_then_catches_up(tmp_path):
    async def work(bench: Bench) -> None:
        slow, quick = bench.subscriber("slow", "#"), bench.subscriber("quick", "#")
        slow.block(True)
        for n in range(50):
            bench.commit(["t"] * 2, [f"{n}a", f"{n}b"])
        assert len(quick.got) == 100 and not slow.got
        assert slow.session.positions.behind, "no more than a little waits in memory"
        assert slow.session.outgoing.rows < 20
        slow.block(False)
        await until(lambda: len(slow.got) >= 100)
        assert slow.got == quick.got
        await until(lambda: not slow.session.positions.behind)
        bench.commit(["t"], ["live again"])
        assert slow.got[-1] == "live again" and len(slow.got) == 101

    run(tmp_path, work, pending_bytes_max=500)


def test_commits_during_a_catch_up_come_once_and_in_order(tmp_path):
    async def work(bench: Bench) -> None:
        one = bench.subscriber("one", "t")
        for n in range(30):
            bench.commit(["t", "other"], [str(n), "x"])
        one.got.clear()
        one.go_back_to(0)
        for n in range(30, 60):
            bench.commit(["t"], [str(n)])
            await asyncio.sleep(0)
        await until(lambda: len(one.got) >= 60)
        assert one.got == [str(n) for n in range(60)]

    run(tmp_path, work)


def test_a_stream_that_was_dropped_under_a_reader_is_recorded(tmp_path):
    async def work(bench: Bench) -> None:
        one = bench.subscriber("one", "#")
        bench.commit(["t"], ["0"])
        bench.log.seal(LOG)
        bench.log.drop(LOG, 1)
        one.go_back_to(0)
        await until(lambda: one.session.positions.gaps)
        assert not one.session.positions.behind and one.session.positions.gaps[0].stream == str(S)

    run(tmp_path, work)


def test_ten_thousand_subscribers_and_a_block_touches_only_those_it_concerns(tmp_path, monkeypatch):
    async def work(bench: Bench) -> None:
        crowd = [bench.subscriber(f"v{n}", f"vehicle/{n}/command") for n in range(10_000)]
        looked_at: list[str] = []
        plain = Session.offer

        def counted(session: Session, *arguments: Any, **options: Any) -> bool:
            looked_at.append(session.client_id)
            return plain(session, *arguments, **options)

        monkeypatch.setattr(Session, "offer", counted)
        wanted = [17, 4242, 9999, 17]
        bench.commit([f"vehicle/{n}/command" for n in wanted] + ["vehicle/17/other"], ["0", "1", "2", "3", "4"])
        assert sorted(looked_at) == ["v17", "v4242", "v9999"], "one offer each, and nobody else was asked"
        assert [one.got for one in crowd if one.written] == [["0", "3"], ["1"], ["2"]]
        assert sum(one.written for one in crowd) == 3

    run(tmp_path, work)


def test_messages_of_one_publisher_keep_their_order_whatever_their_topics(tmp_path):
    async def work(bench: Bench) -> None:
        one = bench.subscriber("one", "#")
        for n in range(20):
            messages = [Message(f"t/{n % 3}", f"v{k} {n}".encode(), f"v{k}") for k in range(5)]
            batch = Batch.of(messages)
            bench.committed(bench.log.append(LOG, batch), batch)
        for k in range(5):
            assert [text for text in one.got if text.startswith(f"v{k} ")] == [f"v{k} {n}" for n in range(20)]

    run(tmp_path, work, shards=4)
