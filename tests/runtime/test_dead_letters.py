"""Dead letters: each message once, whoever tries how often; batched; and nobody else's trouble."""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from holdfast.errors import StoreUnavailable
from holdfast.groups.protocol.nouns import GroupId
from holdfast.keys import dead_letters_key
from holdfast.log.history import History
from holdfast.model import Batch, Stream
from holdfast.mqtt.properties import decode_publish
from holdfast.runtime import dead_letters as module
from holdfast.runtime.dead_letters import DEAD_LETTERS, DeadLetters, DeadLetterStore, Ledger
from holdfast.runtime.offset_reader import read_offsets, runs
from holdfast.runtime.supervisor import Supervisor
from holdfast.store import open_store

SECONDS = 20.0
G = GroupId("billing", "a/#")
COURSE = "b0.0"


class Faulty:
    """Passes everything on, except that the named call fails, before or after it has been done."""

    def __init__(self, inner: Any):
        self._inner = inner
        self.fail: dict[str, str] = {}
        self.calls: Counter[str] = Counter()

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._inner, name)
        if not callable(found):
            return found

        def call(*given: Any, **named: Any) -> Any:
            self.calls[name] += 1
            how = self.fail.pop(name, "")
            if how == "before":
                raise StoreUnavailable(f"{name} was not done")
            outcome = found(*given, **named)
            if how == "after":
                raise StoreUnavailable(f"{name} was done, and nobody knows")
            return outcome

        return call


class Bench:
    def __init__(self, url: str):
        self.url = url
        opened = open_store(url)
        self.log, self.metadata = opened.log(), opened.metadata()
        self.log.create("messages", 1)
        self.stream = Stream("messages", 0, 1)
        self.faulty_log, self.faulty_metadata = Faulty(self.log), Faulty(self.metadata)
        self.store = self.another()

    def another(self) -> DeadLetterStore:
        return DeadLetterStore(self.faulty_log, self.faulty_metadata, History(self.log))

    def publish(self, count: int) -> None:
        first = self.log.head(self.stream).next_offset
        names = range(first, first + count)
        properties = [b"\x26\0\x01k\0\x01v" if n % 2 else None for n in names]
        self.log.append("messages", Batch([f"a/{n}" for n in names], [b"%d" % n for n in names], "p", 1, properties))

    def stored(self) -> list[tuple[str, dict[str, str]]]:
        """Payload and what the dead letters say of themselves, in order."""
        if DEAD_LETTERS not in self.log.logs():
            return []
        found = []
        for head in self.log.heads(DEAD_LETTERS):
            for chunk in self.log.read(head.stream, 0).chunks:
                for row in chunk.batch.to_pylist():
                    said = dict(decode_publish(row["properties"])["user_properties"])
                    found.append((row["payload"].decode(), said))
        return found

    def payloads(self) -> list[str]:
        return [payload for payload, _ in self.stored()]

    def close(self) -> None:
        self.metadata.close()
        self.log.close()


@pytest.fixture(params=["memory", "sqlite", "postgres"])
def bench(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Bench]:
    url = {
        "memory": lambda: "memory:",
        "sqlite": lambda: f"sqlite:///{tmp_path}/log.db",
        "postgres": lambda: request.getfixturevalue("postgres_url"),
    }[request.param]()
    made = Bench(url)
    yield made
    made.close()


def test_runs_are_cut_where_offsets_are_far_apart():
    assert list(runs([1, 2, 60, 200, 201])) == [[1, 2, 60], [200, 201]]
    assert list(runs([])) == []


def test_offsets_are_read_a_run_at_a_time_and_those_without_room_are_left(bench):
    bench.publish(1000)
    found, gone = read_offsets(bench.faulty_log, History(bench.log), bench.stream, [5, 6, 7, 900], 1 << 20)
    assert sorted(found) == [5, 6, 7, 900] and gone == [] and bench.faulty_log.calls["read"] == 2
    assert found[6].rows.payloads[found[6].row] == b"6"
    found, gone = read_offsets(bench.log, History(bench.log), bench.stream, range(1000), 600)
    assert 0 in found and len(found) < 1000 and gone == []
    unknown = Stream("messages", 0, 7)
    assert read_offsets(bench.log, History(bench.log), unknown, [1, 2], 1 << 20) == ({}, [1, 2])


def test_a_dead_letter_says_where_it_is_from_and_keeps_its_own_properties(bench):
    bench.publish(4)
    assert bench.store.store(G, COURSE, bench.stream, {1: 3, 2: 0})
    said = {"holdfast-group": "billing:a/#", "holdfast-stream": str(bench.stream)}
    in_vain, too_large = "not acknowledged", "larger than any member takes"
    assert bench.stored() == [
        ("1", {**said, "holdfast-offset": "1", "holdfast-attempts": "3", "holdfast-reason": in_vain, "k": "v"}),
        ("2", {**said, "holdfast-offset": "2", "holdfast-attempts": "0", "holdfast-reason": too_large}),
    ]


def test_a_batch_is_one_read_to_choose_it_one_to_store_it_and_one_append(bench):
    bench.publish(300)
    bench.store.store(G, COURSE, bench.stream, dict.fromkeys(range(300), 1))
    assert bench.faulty_log.calls["append"] == 1 and bench.faulty_log.calls["read"] == 2
    assert bench.payloads() == [str(n) for n in range(300)]


def test_many_are_stored_in_batches(bench, monkeypatch):
    monkeypatch.setattr(module, "BATCH_MESSAGES", 10)
    bench.publish(35)
    bench.store.store(G, COURSE, bench.stream, dict.fromkeys(range(35), 1))
    assert bench.payloads() == [str(n) for n in range(35)] and bench.faulty_log.calls["append"] == 4


@pytest.mark.parametrize("call", ["append", "compare_and_set", "get", "read"])
@pytest.mark.parametrize("how", ["before", "after"])
@pytest.mark.parametrize("after", [0, 1])
def test_a_retry_after_any_failure_stores_nothing_twice(bench, call, how, after):
    """Also by another node, which knows only what the store says."""
    bench.publish(8)
    faulty = bench.faulty_log if call in ("append", "read") else bench.faulty_metadata
    letters, tries = {1: 2, 3: 2, 5: 2}, 0
    for _ in range(after + 1):
        faulty.fail[call] = how
        try:
            bench.another().store(G, COURSE, bench.stream, letters)
        except StoreUnavailable:
            tries += 1
    faulty.fail.clear()
    bench.another().store(G, COURSE, bench.stream, letters)
    assert bench.payloads() == ["1", "3", "5"], f"after {tries} failures"


def test_who_comes_after_a_crash_finishes_what_was_begun_and_adds_its_own(bench):
    bench.publish(8)
    bench.faulty_log.fail["append"] = "before"
    with pytest.raises(StoreUnavailable):
        bench.store.store(G, COURSE, bench.stream, {1: 2, 3: 2})
    bench.another().store(G, COURSE, bench.stream, {3: 2, 4: 2})
    assert bench.payloads() == ["1", "3", "4"]


def test_several_at_once_store_each_message_once(bench):
    bench.publish(60)
    stores = [DeadLetterStore(bench.log, bench.metadata, History(bench.log)) for _ in range(4)]
    failed: list[BaseException] = []

    def store(which: DeadLetterStore, first: int) -> None:
        try:
            for at in range(first, 60, 5):
                which.store(G, COURSE, bench.stream, dict.fromkeys(range(max(0, at - 10), at), 1))
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=store, args=(each, 10 + n)) for n, each in enumerate(stores)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(SECONDS)
    assert not failed
    assert sorted(map(int, bench.payloads())) == list(range(max(map(int, bench.payloads())) + 1))


def test_two_groups_each_have_their_own(bench):
    bench.publish(3)
    bench.store.store(G, COURSE, bench.stream, {1: 1})
    bench.store.store(GroupId("other", "a/#"), "b1.0", bench.stream, {1: 1})
    assert [said["holdfast-group"] for _, said in bench.stored()] == ["billing:a/#", "other:a/#"]


def test_after_a_seek_it_is_stored_again_and_the_earlier_course_has_nothing_to_say(bench):
    bench.publish(3)
    assert bench.store.store(G, "b0.0", bench.stream, {1: 1})
    assert bench.store.store(G, "b0.1", bench.stream, {1: 1})
    assert bench.payloads() == ["1", "1"]
    assert not bench.store.store(G, "b0.0", bench.stream, {2: 1})
    assert bench.store.store(G, "b9.0", bench.stream, {2: 1}), "a group of the same name, made anew"
    assert bench.payloads() == ["1", "1", "2"]


def test_messages_that_are_gone_are_passed_over(bench):
    bench.publish(3)
    missing = Stream("messages", 0, 9)
    assert bench.store.store(G, COURSE, missing, {0: 1, 1: 1})
    assert bench.stored() == []


def test_what_is_remembered_is_bounded(bench):
    bench.publish(40)
    bench.store.store(G, COURSE, bench.stream, dict.fromkeys(range(0, 40, 2), 1), floor=0)
    bench.store.store(G, COURSE, bench.stream, {39: 1}, floor=39)
    entry = bench.metadata.get(dead_letters_key(G, bench.stream))
    ledger = Ledger.from_json(entry.value)
    assert ledger.done.offset == 39 and ledger.done.acked == [] and not ledger.pending


# -- the queue in front of it ------------------------------------------------------------------------------------------


class Slow:
    """A store that notes what it is asked for; it can be made to fail, or to wait."""

    def __init__(self) -> None:
        self.stored: list[tuple[str, list[int]]] = []
        self.failing: dict[str, Exception] = {}
        self.go = threading.Event()
        self.go.set()

    def store(self, group: GroupId, course: str, stream: Stream, letters: dict[int, int], floor: int) -> bool:
        assert self.go.wait(SECONDS)
        if group.name in self.failing:
            raise self.failing.pop(group.name)
        self.stored.append((group.name, sorted(letters)))
        return True


def queue(work: Callable[[DeadLetters, Slow], Any]) -> None:
    async def whole() -> None:
        slow = Slow()
        letters = DeadLetters(slow)  # type: ignore[arg-type]
        supervisor = Supervisor(lambda reason: None)
        letters.start(supervisor)
        try:
            await asyncio.wait_for(work(letters, slow), SECONDS)
        finally:
            slow.go.set()
            await supervisor.stop()
            letters.close()

    asyncio.run(whole())


S = Stream("messages", 0, 1)


def test_requests_about_one_stream_go_together():
    async def work(letters: DeadLetters, slow: Slow) -> None:
        slow.go.clear()
        first = letters.put(G, COURSE, S, {1: 1})
        await asyncio.sleep(0.01)
        more = [letters.put(G, COURSE, S, {n: 1}) for n in range(2, 6)]
        slow.go.set()
        assert await asyncio.gather(first, *more) == [True] * 5
        assert slow.stored == [("billing", [1]), ("billing", [2, 3, 4, 5])]

    queue(work)


def test_one_group_that_fails_does_not_hold_up_another(monkeypatch):
    monkeypatch.setattr(module, "RETRY_SECONDS", 0.01)

    async def work(letters: DeadLetters, slow: Slow) -> None:
        slow.failing["billing"] = ValueError("our own fault")
        slow.failing["other"] = StoreUnavailable("away")
        waiting = [letters.put(GroupId(name, "a/#"), COURSE, S, {1: 1}) for name in ("billing", "other", "third")]
        assert await asyncio.gather(*waiting) == [True] * 3
        assert slow.stored[0] == ("third", [1]) and sorted(slow.stored)[:2] == [("billing", [1]), ("other", [1])]

    queue(work)


def test_what_nobody_waits_for_any_more_is_not_stored():
    async def work(letters: DeadLetters, slow: Slow) -> None:
        slow.go.clear()
        first = letters.put(G, COURSE, S, {1: 1})
        await asyncio.sleep(0.01)
        cancelled = letters.put(GroupId("gone", "a/#"), COURSE, S, {1: 1})
        cancelled.cancel()
        last = letters.put(GroupId("last", "a/#"), COURSE, S, {1: 1})
        slow.go.set()
        await asyncio.gather(first, last)
        assert [name for name, _ in slow.stored] == ["billing", "last"]

    queue(work)
