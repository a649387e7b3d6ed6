"""PostgreSQL is stopped hard under running writers: they come back, and nothing is lost or doubled."""

from __future__ import annotations

import pytest

import holdfast
from faults.writer import audit, write
from holdfast import AppendKey, Batch, StoreError
from holdfast.store import open_log
from processes import Report, child
from servers import PostgresServer


def test_a_writer_outlives_immediate_restarts(postgres_server: PostgresServer, postgres_url: str) -> None:
    with holdfast.open(postgres_url) as log:
        log.create("messages", shards=3)
    with child(write, postgres_url, "w", 50, False, None) as writer:
        told = {}
        for _ in range(4):
            for _ in range(15):
                n, places, error = writer.next_report()
                assert error is None
                told[n] = places
            postgres_server.stop("immediate")
            postgres_server.start()
        for _ in range(15):
            n, places, error = writer.next_report()
            told[n] = places
        writer.kill()
        told.update({n: places for n, places, _ in writer.all_reports()})
    with holdfast.open(postgres_url) as log:
        audit(log, {"w": told})
    assert sorted(told) == list(range(len(told))), "an append was neither reported nor refused"


def insist(report: Report, url: str, appends: int) -> None:
    """Append with keys; say what is not durable; then try the same again until it is."""
    with open_log(url, retry_seconds=0.3) as log:
        for n in range(appends):
            batch = Batch(["t"] * 20, [b"w:%d:%d" % (n, k) for k in range(20)])
            while True:
                try:
                    appended = log.append("messages", batch, key=AppendKey("w", n + 1))
                except StoreError as error:
                    report.send((n, None, f"{type(error).__name__}: {error}"))
                    continue
                report.send((n, [(tuple(p.stream), p.base, list(range(20))) for p in appended.placed], None))
                break


def test_what_is_not_durable_is_reported_and_the_key_makes_trying_again_safe(
    postgres_server: PostgresServer, postgres_url: str
) -> None:
    with holdfast.open(postgres_url) as log:
        log.create("messages", shards=1)
    told: dict[int, list] = {}
    refused: list[str] = []
    with child(insist, postgres_url, 120) as writer:
        for stop_at in (20, 50, 80):
            while len(told) < stop_at:
                n, places, error = writer.next_report()
                if error is None:
                    told[n] = places
                else:
                    refused.append(error)
            postgres_server.stop("immediate")
            while True:  # with the server away, it must say so before long
                n, places, error = writer.next_report()
                if error is not None:
                    refused.append(error)
                    break
                told[n] = places
            postgres_server.start()
        for n, places, error in writer.all_reports():
            if error is None:
                told[n] = places
            else:
                refused.append(error)
    assert all(r.startswith(("StoreUnavailable: ", "OutcomeUnknown: ")) for r in refused), refused
    assert len(refused) >= 3
    with holdfast.open(postgres_url) as log:
        assert sum(audit(log, {"w": told}).values()) == 120 * 20


def test_an_unreachable_server_is_one_clear_line() -> None:
    with pytest.raises(holdfast.StoreUnavailable, match=r"cannot connect to PostgreSQL database 'x' at 127\.0\.0\.1: "):
        holdfast.open("postgresql://nobody@127.0.0.1:1/x")
