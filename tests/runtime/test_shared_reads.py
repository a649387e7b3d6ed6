"""What is read for one slice of a stream serves its neighbours."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

from holdfast.delivery.readers import Fetched, Request
from holdfast.model import Batch, Stream
from holdfast.runtime.shared_reads import SharedReads
from holdfast.sessions.rows import Rows
from holdfast.topics import TopicFilter

S, OTHER = Stream("messages", 0, 1), Stream("messages", 1, 1)


class Store:
    """Ten rows at a time, each read counted."""

    def __init__(self) -> None:
        self.reads: list[int] = []

    def __call__(self, request: Request) -> Fetched:
        self.reads.append(request.at)
        offsets = range(request.at, request.at + 10)
        return Fetched(request.at + 10, [Rows(request.stream, offsets, Batch(["t"] * 10, [b"x" * 36] * 10), 0)])


def asked(at: int, stream: Stream = S, wanted: str = "#") -> Request:
    return Request(stream, at, None, TopicFilter(wanted), shared=True)


def test_whoever_begins_within_a_read_takes_it_whole() -> None:
    shared, store = SharedReads(), Store()
    first = shared.read(asked(0), store)
    assert shared.read(asked(0), store) is first and shared.find(asked(7)) is first
    assert shared.find(asked(10)) is None
    assert shared.read(asked(10), store).past == 20
    assert store.reads == [0, 10]


def test_other_streams_and_filters_are_read_for_themselves() -> None:
    shared, store = SharedReads(), Store()
    shared.read(asked(0), store)
    assert shared.find(asked(0, OTHER)) is None and shared.find(asked(0, wanted="a/#")) is None


def test_only_the_last_reads_are_kept() -> None:
    shared, store = SharedReads(bytes_max=2500), Store()  # ten rows weigh 1000
    for at in (0, 10, 20):
        shared.read(asked(at), store)
    assert [shared.find(asked(at)) is not None for at in (0, 10, 20)] == [False, True, True]


def test_of_those_who_ask_at_one_time_one_reads() -> None:
    shared, store, begun, go_on = SharedReads(), Store(), threading.Event(), threading.Event()

    def slow(request: Request) -> Fetched:
        begun.set()
        assert go_on.wait(10)
        return store(request)

    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(shared.read, asked(0), slow)
        assert begun.wait(10)
        second = pool.submit(shared.read, asked(3), store)
        go_on.set()
        assert first.result(10) is second.result(10)
    assert store.reads == [0]
