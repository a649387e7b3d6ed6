"""Metadata in etcd when things go wrong: restarts, broken streams, compaction, nobody there."""

from __future__ import annotations

import json
import socket
import threading
import urllib.request
from concurrent.futures import ThreadPoolExecutor

import pytest

from holdfast.errors import OutcomeUnknown, RequestError, StoreError, StoreUnavailable
from holdfast.metadata import Deleted, LeaseEnded, Put
from holdfast.metadata.etcd import EtcdMetadata
from holdfast.store import open_metadata
from servers import EtcdServer


def compact(server: EtcdServer, revision: int) -> None:
    request = urllib.request.Request(
        f"http://127.0.0.1:{server.port}/v3/kv/compaction",
        json.dumps({"revision": revision, "physical": True}).encode(),
    )
    with urllib.request.urlopen(request, timeout=10) as answer:
        answer.read()


def test_stores_with_different_prefixes_do_not_see_each_other(etcd_url: str) -> None:
    with open_metadata(f"{etcd_url}-a") as one, open_metadata(f"{etcd_url}-ab") as two, one.watch("") as watch:
        two.put("/k", b"2")
        version = one.put("/k", b"1")
        assert watch.get(20) == Put("/k", b"1", version=version)
        assert [*one.list("")] == [*two.list("")] == ["/k"]


def test_without_a_prefix_everything_is_seen(etcd_server: EtcdServer, etcd_url: str) -> None:
    prefix = "/" + etcd_url.rpartition("/")[2]
    with open_metadata(etcd_url) as inner, open_metadata(etcd_server.url) as outer, outer.watch("") as watch:
        version = inner.put("/k", b"1")
        assert watch.get(20) == Put(f"{prefix}//k", b"1", version=version)
        assert f"{prefix}//k" in outer.list("")


def test_calls_and_watches_survive_a_restart(etcd_url: str, etcd_server: EtcdServer) -> None:
    with open_metadata(etcd_url) as store, open_metadata(etcd_url) as other, other.watch("/") as watch:
        lease = store.lease(60)
        before = store.put("/kept", b"1", lease)
        assert watch.get(20) == Put("/kept", b"1", version=before)
        etcd_server.stop("kill")
        with ThreadPoolExecutor() as pool:
            reading = pool.submit(store.get, "/kept")
            writing = pool.submit(store.put, "/new", b"2")
            renewing = pool.submit(lease.renew)
            etcd_server.start()
            assert reading.result(30) is not None
            renewing.result(30)
            try:
                writing.result(30)
            except OutcomeUnknown:
                store.put("/new", b"2")
        event = watch.get(20)
        assert isinstance(event, Put) and event.key == "/new"
        assert store.delete("/kept")
        gone = watch.get(20)
        while isinstance(gone, Put):  # the put may have happened twice
            gone = watch.get(20)
        assert isinstance(gone, Deleted) and gone.key == "/kept"


def test_a_watch_goes_on_where_its_stream_broke(etcd_url: str) -> None:
    with open_metadata(etcd_url) as store, store.watch("/") as watch, store.watch("/1") as narrow:
        for n in range(10):
            stream = store._watcher._stream  # type: ignore[attr-defined]
            version = store.put(f"/{n}", b"")
            if stream is not None:
                stream.stop()
            assert watch.get(20) == Put(f"/{n}", b"", version=version)
        event = narrow.get(20)
        assert event is not None and event.key == "/1"
        assert watch.get(0) is None and narrow.get(0) is None


def test_a_watch_that_was_away_during_a_compaction_catches_up(etcd_url: str, etcd_server: EtcdServer) -> None:
    with open_metadata(etcd_url) as store, open_metadata(etcd_url) as reader:
        for n in range(3):
            store.put(f"/{n}", b"old")
        with reader.watch("/") as watch, reader.watch("/1") as narrow:
            watcher = reader._watcher  # type: ignore[attr-defined]
            with watcher._changed:  # its thread can open no new stream meanwhile
                watcher._round += 1
                if watcher._stream is not None:
                    watcher._stream.stop()
                store.delete("/0")
                version = store.put("/1", b"new")
                compact(etcd_server, version)
            events = [watch.get(20), watch.get(20)]
            assert events[0] == Put("/1", b"new", version=version) or events[1] == Put("/1", b"new", version=version)
            assert any(isinstance(event, Deleted) and event.key == "/0" for event in events)
            assert watch.get(0.05) is None
            assert narrow.get(20) == Put("/1", b"new", version=version)
            last = store.put("/2", b"after")
            assert watch.get(20) == Put("/2", b"after", version=last)


def test_every_one_of_many_watches_hears(etcd_url: str) -> None:
    """A stream that asked once per watch lost those that the gateway had not read when it first answered."""
    with open_metadata(etcd_url) as store:
        watches = [store.watch(f"/{n}/") for n in range(40)]
        for n in range(40):
            store.put(f"/{n}/key", b"%d" % n)
        for n, watch in enumerate(watches):
            event = watch.get(20)
            assert isinstance(event, Put) and (event.key, event.value) == (f"/{n}/key", b"%d" % n)


def test_nobody_there_is_said_at_once() -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with pytest.raises(StoreUnavailable, match=f"cannot reach etcd at 127.0.0.1:{port}: Connection refused"):
        open_metadata(f"etcd://127.0.0.1:{port}")


def test_a_member_that_is_down_gives_way_to_the_next(etcd_url: str) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with open_metadata(etcd_url.replace("etcd://", f"etcd://127.0.0.1:{port},")) as store:
        assert store.get("/a") is None
        store.put("/a", b"")


def test_something_that_is_not_etcd_is_said_so() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            connection, _ = server.accept()
            with connection:
                connection.recv(65536)
                connection.sendall(b"HTTP/1.1 404 Not Found\r\nContent-Length: 5\r\n\r\nnope\n")

        thread = threading.Thread(target=serve)
        thread.start()
        with pytest.raises(StoreError, match="is it etcd"):
            open_metadata(f"etcd://127.0.0.1:{server.getsockname()[1]}")
        thread.join()


def test_a_change_whose_answer_is_lost_has_an_unknown_outcome(etcd_url: str) -> None:
    """A server that takes the request and then hangs up: nobody can tell whether it was done."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            for _ in range(2):
                connection, _ = server.accept()
                with connection:
                    if b"status" in connection.recv(65536):
                        connection.sendall(b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: 2\r\n\r\n{}")

        thread = threading.Thread(target=serve)
        thread.start()
        with EtcdMetadata.open(f"etcd://127.0.0.1:{server.getsockname()[1]}") as store:
            with pytest.raises(OutcomeUnknown):
                store.put("/a", b"")
            thread.join()


def test_etcd_that_stays_away_ends_leases(etcd_url: str, etcd_server: EtcdServer) -> None:
    with EtcdMetadata.open(etcd_url, retry_seconds=0.3) as store:
        long, short = store.lease(60), store.lease(1)
        etcd_server.stop("kill")
        try:
            with pytest.raises(StoreUnavailable, match=r"cannot reach etcd at 127\.0\.0\.1"):
                store.get("/a")
            with pytest.raises(StoreUnavailable):
                long.renew()
            with pytest.raises(LeaseEnded, match="away"):
                while True:
                    try:
                        short.renew()
                    except StoreUnavailable:
                        assert short.remaining_seconds > -1
        finally:
            etcd_server.start()
        EtcdMetadata.open(etcd_url).close()
        long.renew()


def test_a_batch_that_is_too_large_is_refused(etcd_url: str) -> None:
    with open_metadata(etcd_url) as store:
        assert store.batch_max == 128
        assert len(store.transact([Put(f"/{n}", b"") for n in range(128)])) == 128
        with pytest.raises(RequestError, match="129"):
            store.transact([Put(f"/{n}", b"") for n in range(129)])
        for size, words in ((1 << 20, "larger than max"), (900_000, "too large")):  # two limits, one answer
            with pytest.raises(RequestError, match=words):
                store.transact([Put(f"/large/{n}", bytes(size)) for n in range(2)])
        assert store.list("/large/") == {}
