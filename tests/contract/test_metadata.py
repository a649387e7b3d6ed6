"""Every promise of the metadata store, asked of every backend."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from holdfast.errors import PreconditionFailed, RequestError
from holdfast.metadata import (
    Delete,
    Deleted,
    Entry,
    Event,
    LeaseEnded,
    Metadata,
    Put,
    VersionMismatch,
    Watch,
)
from holdfast.store import open_metadata

PATIENCE_SECONDS = 20.0
"""How long to wait for what must happen; only a failing test takes that long."""

Open = Callable[[], Metadata]


def store_url(kind: str, request: pytest.FixtureRequest, tmp_path: Path) -> str:
    match kind:
        case "memory":
            return f"memory:{tmp_path}"
        case "sqlite":
            return f"sqlite:///{tmp_path}/holdfast.db"
        case _:
            url: str = request.getfixturevalue(f"{kind}_url")
            return url


@pytest.fixture(params=["memory", "sqlite", "postgres", "etcd"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return store_url(request.param, request, tmp_path)


@pytest.fixture(params=["sqlite", "postgres", "etcd"])
def shared_url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """A store that other processes can open too."""
    return store_url(request.param, request, tmp_path)


@pytest.fixture
def store(url: str) -> Iterator[Metadata]:
    with open_metadata(url) as metadata:
        yield metadata


@pytest.fixture
def other(url: str) -> Iterator[Metadata]:
    """A second user of the same store."""
    with open_metadata(url) as metadata:
        yield metadata


@pytest.fixture
def short(url: str) -> float:
    """The shortest lease worth asking for."""
    return 1.0 if url.startswith("etcd") else 0.3


def until(condition: Callable[[], object], seconds: float = PATIENCE_SECONDS) -> None:
    give_up = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < give_up, "it never came to pass"
        time.sleep(0.005)


def take(watch: Watch, count: int) -> list[Event]:
    events: list[Event] = []
    for _ in range(count):
        event = watch.get(PATIENCE_SECONDS)
        assert event is not None, f"no event after {events}"
        events.append(event)
    return events


def take_until(watch: Watch, enough: Callable[[Event], bool]) -> list[Event]:
    events = take(watch, 1)
    while not enough(events[-1]):
        events += take(watch, 1)
    return events


def apply(copy: dict[str, Entry], events: list[Event]) -> dict[str, Entry]:
    """What a reader does who holds a copy: events that are older than what it has say nothing new."""
    for event in events:
        held = copy.get(event.key)
        if held is not None and held.version >= event.version:
            continue
        if isinstance(event, Put):
            copy[event.key] = Entry(event.value, event.version)
        else:
            copy.pop(event.key, None)
    return copy


class Child:
    """Python in a process of its own; `store` is the metadata store, and it says a line when it is ready."""

    def __init__(self, url: str, code: str):
        start = "import sys, time\nfrom holdfast.metadata import *\nfrom holdfast.store import open_metadata\n"
        start += "url = sys.argv[1]\n"
        self._process = subprocess.Popen(
            [sys.executable, "-c", start + code, url], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def say(self, line: str) -> None:
        assert self._process.stdin
        self._process.stdin.write(line + "\n")
        self._process.stdin.flush()

    def hear(self) -> str:
        assert self._process.stdout
        return self._process.stdout.readline().strip()

    def kill(self) -> None:
        self._process.kill()
        self._process.communicate()

    def end(self) -> None:
        self._process.communicate(timeout=60)
        assert self._process.returncode == 0


@pytest.fixture
def child(shared_url: str) -> Iterator[Callable[[str], Child]]:
    children: list[Child] = []

    def start(code: str) -> Child:
        children.append(Child(shared_url, code))
        return children[-1]

    yield start
    for each in children:
        each.kill()


# Keys and versions


def test_what_is_put_is_got(store: Metadata, other: Metadata) -> None:
    assert store.get("/a") is None
    for value in (b"one", b"", bytes(range(256)), "grün".encode()):
        version = store.put("/a", value)
        assert store.get("/a") == Entry(value, version) == other.get("/a")


def test_versions_grow_with_every_change_even_of_the_same_value(store: Metadata, other: Metadata) -> None:
    versions = [one.put("/a", b"same") for one in (store, other, store)]
    assert versions == sorted(set(versions))


def test_a_version_is_never_given_twice(store: Metadata) -> None:
    seen: list[int | None] = []
    for _ in range(3):
        seen.append(store.put("/a", b"1"))
        assert store.delete("/a")
        seen.append(store.compare_and_set("/a", None, b"1"))
        assert store.delete("/a")
    assert None not in seen
    assert seen == sorted({version for version in seen if version})
    assert store.compare_and_set("/a", seen[-1], b"late") is None


def test_compare_and_set_wins_only_at_the_expected_version(store: Metadata, other: Metadata) -> None:
    first = store.compare_and_set("/a", None, b"1")
    assert first is not None
    assert other.compare_and_set("/a", None, b"2") is None
    second = other.compare_and_set("/a", first, b"2")
    assert second is not None and second > first
    assert store.compare_and_set("/a", first, b"3") is None
    assert store.compare_and_set("/b", second, b"3") is None
    assert store.list("") == {"/a": Entry(b"2", second)}


def test_delete_says_whether_it_did(store: Metadata) -> None:
    assert not store.delete("/a")
    assert not store.delete("/a", 1)
    version = store.put("/a", b"1")
    assert not store.delete("/a", version + 1)
    assert store.delete("/a", version)
    assert store.get("/a") is None
    assert not store.delete("/a")


def test_list_is_in_order_of_keys_and_keeps_to_the_prefix(store: Metadata) -> None:
    keys = ["/a", "/a%", "/a/b", "/a/b/c", "/a/ü", "/a_", "/aa", "/b", "Z", "/a/\U0010ffff", "/a/\U0010ffffx", "\ud7ff"]
    versions = {key: store.put(key, key.encode()) for key in keys}
    assert [*store.list("")] == sorted(keys)
    for prefix in ("", "/a", "/a%", "/a_", "/a/", "/a/\U0010ffff", "/b", "\ud7ff", "/nothing", "\U0010ffff"):
        wanted = [(k, Entry(k.encode(), versions[k])) for k in sorted(keys) if k.startswith(prefix)]
        assert [*store.list(prefix).items()] == wanted


def test_many_keys_are_listed(store: Metadata) -> None:
    keys = [f"/many/{n:04}" for n in range(1100)]
    for at in range(0, len(keys), 100):
        store.transact([Put(key, b"v") for key in keys[at : at + 100]])
    assert [*store.list("/many/")] == keys


@pytest.mark.parametrize("key", ["", "a\0b", "k" * 1025, "ü" * 513, "\ud800", 7])
def test_a_wrong_key_is_named(store: Metadata, key: str) -> None:
    calls: list[Callable[[], object]] = [
        lambda: store.get(key),
        lambda: store.put(key, b""),
        lambda: store.compare_and_set(key, None, b""),
        lambda: store.delete(key),
        lambda: store.transact([], {key: None}),
    ]
    for call in calls:
        with pytest.raises(RequestError) as caught:
            call()
        assert repr(key)[:40] in str(caught.value)
    assert store.list("") == {}


def test_wrong_values_prefixes_and_leases_are_named(store: Metadata) -> None:
    with pytest.raises(RequestError, match=r"'/a'.*1048577"):
        store.put("/a", bytes((1 << 20) + 1))
    with pytest.raises(RequestError, match=r"'/a'.*str"):
        store.put("/a", "text")  # type: ignore[arg-type]
    for prefix in ("a\0", "p" * 1025):
        with pytest.raises(RequestError, match="prefix"):
            store.list(prefix)
        with pytest.raises(RequestError, match="prefix"):
            store.watch(prefix)
    for seconds in (0, -1, float("nan"), float("inf")):
        with pytest.raises(RequestError, match=repr(seconds)):
            store.lease(seconds)
    assert store.list("") == {}


def test_the_largest_key_and_value_fit(store: Metadata) -> None:
    key, value = "k" * 1024, bytes(range(256)) * 4096
    store.put(key, value)
    entry = store.get(key)
    assert entry is not None and entry.value == value
    assert [*store.list("")] == [key]


# Transactions


def test_a_transaction_does_all_of_it(store: Metadata) -> None:
    old = store.put("/old", b"1")
    versions = store.transact(
        [Put("/new", b"2"), Delete("/old"), Delete("/never"), Put("/more", b"3")], {"/old": old, "/new": None}
    )
    assert versions[2] is None
    assert store.list("") == {"/more": Entry(b"3", versions[3] or 0), "/new": Entry(b"2", versions[0] or 0)}
    assert all(version > old for version in versions if version is not None)
    assert store.transact([]) == []
    assert store.transact([], {"/new": versions[0], "/old": None}) == []


def test_a_transaction_whose_precondition_fails_does_nothing_and_names_the_key(store: Metadata) -> None:
    version = store.put("/here", b"1")
    for key, expected in {"/here": None, "/there": version}.items():
        with pytest.raises(PreconditionFailed, match=key) as caught:
            store.transact([Put("/new", b""), Delete("/here")], {"/absent": None, key: expected})
        assert isinstance(caught.value, VersionMismatch) and caught.value.key == key
    assert store.list("") == {"/here": Entry(b"1", version)}


def test_a_key_changes_once_in_a_transaction(store: Metadata) -> None:
    with pytest.raises(RequestError, match=r"'/a' is changed twice"):
        store.transact([Put("/a", b""), Delete("/a")])


def test_readers_see_all_of_a_transaction_or_nothing(store: Metadata, other: Metadata) -> None:
    stop = threading.Event()

    def flip() -> None:
        for n in range(10_000):
            store.transact([Put("/pair/1", b"%d" % n), Put("/pair/2", b"%d" % n)])
            store.transact([Delete("/pair/1"), Delete("/pair/2")])
            if stop.is_set():
                return

    with ThreadPoolExecutor() as pool:
        writer = pool.submit(flip)
        try:
            for _ in range(150):
                values = [entry.value for entry in other.list("/pair/").values()]
                assert values == [] or (len(values) == 2 and values[0] == values[1])
        finally:
            stop.set()
        writer.result()


# Concurrency

INCREMENT = """
def increment(store, times):
    for _ in range(times):
        while True:
            entry = store.get("/counter")
            value = b"%d" % (int(entry.value) + 1 if entry else 1)
            if store.compare_and_set("/counter", entry.version if entry else None, value) is not None:
                break
"""


def test_threads_lose_no_increment(store: Metadata, other: Metadata) -> None:
    scope: dict[str, Callable[[Metadata, int], None]] = {}
    exec(INCREMENT, {}, scope)
    with ThreadPoolExecutor(6) as pool:
        for done in [pool.submit(scope["increment"], one, 15) for one in (store, other) * 3]:
            done.result()
    counter = store.get("/counter")
    assert counter is not None and counter.value == b"90"


def test_processes_that_start_at_once_on_an_empty_store_lose_no_increment(
    shared_url: str, child: Callable[[str], Child]
) -> None:
    code = INCREMENT + "print(); input()\nwith open_metadata(url) as store: increment(store, 30)"
    children = [child(code) for _ in range(3)]
    for each in children:
        each.hear()
    for each in children:
        each.say("go")
    for each in children:
        each.end()
    with open_metadata(shared_url) as store:
        counter = store.get("/counter")
        assert counter is not None and counter.value == b"90"


# Leases


def test_keys_live_as_long_as_their_lease(store: Metadata, other: Metadata, short: float) -> None:
    store.put("/before", b"", store.lease(30))
    began = time.monotonic()
    lease = store.lease(short)
    assert lease.ttl_seconds >= short
    assert began + lease.ttl_seconds <= lease.expires_at <= time.monotonic() + lease.ttl_seconds
    store.put("/a", b"1", lease)
    store.put("/b", b"2", lease)
    while time.monotonic() < lease.expires_at - 0.05:
        seen = store.list("/")
        if time.monotonic() < lease.expires_at:
            assert [*seen] == ["/a", "/b", "/before"]
        time.sleep(0.02)
    until(lambda: time.monotonic() >= lease.expires_at)
    until(lambda: other.get("/a") is None, seconds=2.5)
    until(lambda: [*store.list("")] == ["/before"], seconds=2.5)
    with pytest.raises(LeaseEnded):
        lease.renew()


@pytest.mark.parametrize("url", ["memory", "sqlite", "postgres"], indirect=True)  # etcd takes up to a second
def test_an_expired_key_is_gone_at_once(store: Metadata, other: Metadata) -> None:
    lease = store.lease(0.15)
    version = store.put("/a", b"1", lease)
    granted = time.monotonic()
    time.sleep(lease.ttl_seconds + granted - time.monotonic() + 0.002)
    assert store.get("/a") is None
    assert other.list("") == {}
    assert not other.delete("/a")
    assert other.compare_and_set("/a", version, b"2") is None
    assert other.compare_and_set("/a", None, b"2") is not None
    with pytest.raises(LeaseEnded):
        lease.renew()
    assert other.list("/").keys() == {"/a"}


def test_a_renewed_lease_lives_on(store: Metadata, other: Metadata, short: float) -> None:
    lease = store.lease(short)
    version = store.put("/a", b"1", lease)
    for _ in range(4):
        time.sleep(short * 0.4)
        lease.renew()
        assert 0 < lease.remaining_seconds <= lease.ttl_seconds
        assert other.get("/a") == Entry(b"1", version)


def test_a_revoked_lease_takes_its_keys_along_at_once(store: Metadata, other: Metadata) -> None:
    lease = store.lease(30)
    store.put("/a", b"1", lease)
    store.transact([Put("/b", b"2", lease), Put("/c", b"3")])
    lease.revoke()
    assert [*other.list("")] == ["/c"]
    assert lease.remaining_seconds <= 0
    lease.revoke()
    with pytest.raises(LeaseEnded):
        lease.renew()
    with pytest.raises(LeaseEnded):
        store.put("/d", b"", lease)
    with pytest.raises(LeaseEnded):
        store.transact([Put("/d", b""), Delete("/c"), Put("/e", b"", lease)])
    assert [*other.list("")] == ["/c"]


def test_a_key_belongs_to_the_lease_it_was_last_put_under(store: Metadata) -> None:
    first, second = store.lease(30), store.lease(30)
    store.put("/kept", b"1", first)
    store.put("/kept", b"2")
    store.put("/moved", b"1", first)
    store.put("/moved", b"2", second)
    store.put("/deleted", b"1", first)
    store.delete("/deleted")
    store.put("/deleted", b"2")
    first.revoke()
    assert [*store.list("")] == ["/deleted", "/kept", "/moved"]
    second.revoke()
    assert [*store.list("")] == ["/deleted", "/kept"]


def test_a_killed_process_loses_the_keys_of_its_lease(shared_url: str, child: Callable[[str], Child]) -> None:
    holder = child("""
with open_metadata(url) as store:
    lease = store.lease(1)
    store.put("/leader", b"me", lease)
    while True:
        print("held", flush=True)
        time.sleep(0.2)
        lease.renew()
""")
    with open_metadata(shared_url) as store, store.watch("/leader") as watch:
        for _ in range(6):  # longer than the lease: it is being renewed
            assert holder.hear() == "held"
        assert store.get("/leader") is not None
        holder.kill()
        killed = time.monotonic()
        take_until(watch, lambda event: isinstance(event, Deleted))
        assert time.monotonic() - killed < 3.5
        assert store.get("/leader") is None


# Watches


def test_a_watch_tells_what_happens_from_then_on_under_its_prefix(store: Metadata, other: Metadata) -> None:
    store.put("/w/before", b"0")
    with store.watch("/w/") as watch, other.watch("/w/x") as narrow:
        versions = [store.put("/w/a", b"1"), other.put("/v", b"-"), other.put("/w/x", b"2")]
        assert take(watch, 2) == [Put("/w/a", b"1", version=versions[0]), Put("/w/x", b"2", version=versions[2])]
        assert take(narrow, 1) == [Put("/w/x", b"2", version=versions[2])]
        assert store.delete("/w/before")
        (gone,) = take(watch, 1)
        assert isinstance(gone, Deleted) and gone.key == "/w/before" and gone.version > versions[2]
        last = store.put("/w/before", b"3")
        assert take(watch, 1) == [Put("/w/before", b"3", version=last)]
        assert watch.get(0) is None and narrow.get(0) is None


def test_a_transaction_is_told_in_order(store: Metadata) -> None:
    store.put("/t/3", b"")
    with store.watch("/t/") as watch:
        store.transact([Put("/t/2", b"b"), Put("/t/1", b"a"), Delete("/t/3"), Delete("/t/4")])
        events = take(watch, 3)
        assert {event.key: type(event) for event in events} == {"/t/2": Put, "/t/1": Put, "/t/3": Deleted}
        assert [event.version for event in events] == sorted(event.version for event in events)


def test_a_watch_tells_of_expired_and_revoked_leases(store: Metadata, other: Metadata, short: float) -> None:
    with other.watch("/") as watch:
        expiring, revoked = store.lease(short), store.lease(30)
        store.put("/expiring", b"", expiring)
        store.put("/revoked", b"", revoked)
        take(watch, 2)
        revoked.revoke()
        (event,) = take(watch, 1)
        assert isinstance(event, Deleted) and event.key == "/revoked"
        (event,) = take(watch, 1)
        late = time.monotonic() - expiring.expires_at
        assert isinstance(event, Deleted) and event.key == "/expiring"
        assert -0.05 < late < (2.5 if short >= 1 else 1.0)  # 0.2 s where the machine has nothing else to do


def test_a_flood_ends_with_the_last_state(store: Metadata, other: Metadata) -> None:
    with other.watch("/f/") as watch:
        for n in range(200):
            store.put(f"/f/{n % 7}", b"%d" % n)
        store.delete("/f/0")
        end = store.put("/f/end", b"")
        events = take_until(watch, lambda event: event.version == end)
        assert apply({}, events) == store.list("/f/")
        assert [event.version for event in events] == sorted({event.version for event in events})


def test_watch_then_list_gives_a_true_copy_while_others_write(store: Metadata, other: Metadata) -> None:
    stop = threading.Event()

    def write() -> None:
        for n in range(100_000):
            key = f"/c/{n * 7 % 5}"
            _ = store.delete(key) if n % 3 == 0 else store.put(key, b"%d" % n)
            if stop.is_set():
                return

    copies: list[tuple[Watch, dict[str, Entry]]] = []
    with ThreadPoolExecutor() as pool:
        writer = pool.submit(write)
        try:
            for _ in range(5):
                watch = other.watch("/c/")
                copies.append((watch, other.list("/c/")))
                seen = watch.seen
                until(lambda: writer.done() or watch.seen > seen + 5)  # noqa: B023 - called before the loop goes on
                assert not writer.done(), writer.exception()
        finally:
            stop.set()
        writer.result()
    end = store.put("/c/end", b"")
    for watch, copy in copies:
        apply(copy, take_until(watch, lambda event: event.version == end))
        assert copy == store.list("/c/")
        watch.close()


def test_a_watch_hears_other_processes(shared_url: str, child: Callable[[str], Child]) -> None:
    speaker = child("""
with open_metadata(url) as store:
    print("ready", flush=True)
    for line in sys.stdin:
        store.put("/said", line.strip().encode())
        print(time.time(), flush=True)
""")
    assert speaker.hear() == "ready"
    with open_metadata(shared_url) as store, store.watch("/said") as watch:
        delays = []
        for n in range(6):
            speaker.say(str(n))
            (event,) = take(watch, 1)
            heard = time.time()
            assert isinstance(event, Put) and event.value == str(n).encode()
            delays.append(heard - float(speaker.hear()))
        assert min(delays) < 0.1  # the promise; a busy machine may miss it now and then


def test_a_closed_watch_lets_its_reader_go(store: Metadata) -> None:
    watch = store.watch("/")
    with ThreadPoolExecutor() as pool:
        reader = pool.submit(list, watch)
        version = store.put("/a", b"")
        until(lambda: watch.seen >= version)
        watch.close()
        assert reader.result(PATIENCE_SECONDS) in ([], [Put("/a", b"", version=version)])
    assert watch.get() is None
    store.put("/a", b"")
    assert watch.get(0) is None
    with store.watch("/") as again:
        last = store.put("/a", b"2")
        assert take(again, 1) == [Put("/a", b"2", version=last)]


def test_closing_the_store_closes_its_watches_and_ends_its_thread(url: str) -> None:
    before = threading.active_count()
    store = open_metadata(url)
    watches = [store.watch(f"/{n}") for n in range(5)]
    assert threading.active_count() <= before + 1
    store.close()
    assert all(watch.closed and watch.get() is None for watch in watches)
    assert threading.active_count() == before
    store.close()


def test_wake_is_called_when_there_is_something_to_get(store: Metadata, other: Metadata) -> None:
    woken = threading.Event()

    def fail() -> None:
        raise RuntimeError("the reader's own trouble")

    with other.watch("/", fail), other.watch("/", woken.set) as watch:
        version = store.put("/a", b"")
        assert woken.wait(PATIENCE_SECONDS)
        assert watch.get(0) == Put("/a", b"", version=version)
