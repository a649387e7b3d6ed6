"""What every test may ask for: real servers, one of each per run, started when first wanted.

With HOLDFAST_NO_SKIPS=1 a run in which anything was skipped fails, and says what: a promise that was not
tested is not kept.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, settings

from servers import CannotRun, EtcdServer, PostgresServer

NO_SKIPS = os.environ.get("HOLDFAST_NO_SKIPS", "") not in ("", "0")

# Twenty JVMs live for seconds each here: the thorough compiler's work (a fifth of all they do) would never pay.
os.environ.setdefault("SPARK_SUBMIT_OPTS", "-XX:TieredStopAtLevel=1")

# How long an example takes says something about the machine, not about what is tried.
settings.register_profile("suite", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("suite")

_skipped: list[str] = []
_prefixes = itertools.count(1)


@pytest.fixture(scope="session")
def postgres_server() -> Iterator[PostgresServer]:
    """The run's PostgreSQL. A test that stops it starts it again."""
    try:
        server = PostgresServer()
    except CannotRun as error:
        pytest.skip(str(error))
    yield server
    server.close()


@pytest.fixture
def postgres_url(postgres_server: PostgresServer) -> Iterator[str]:
    """A new, empty PostgreSQL database."""
    postgres_server.start()
    url = postgres_server.database()
    yield url
    postgres_server.start()
    postgres_server.drop(url)


@pytest.fixture(scope="session")
def etcd_server() -> Iterator[EtcdServer]:
    """The run's etcd. A test that stops it starts it again."""
    try:
        server = EtcdServer()
    except CannotRun as error:
        pytest.skip(str(error))
    yield server
    server.close()


@pytest.fixture
def etcd_url(etcd_server: EtcdServer) -> str:
    """The run's etcd, with a key prefix that no other test uses."""
    etcd_server.start()
    return f"{etcd_server.url}/test-{next(_prefixes)}"


LONG = (
    "spark/test_spark_cluster",
    "campaign/",
    "spark/",
    "test_demo",
    "test_docs",
    "e2e/test_kill",
    "e2e/test_fanout.py",
    "contract/",
)
"""These come first, the longest before all others: two workers then end at about the same time."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    def place(item: pytest.Item) -> int:
        return next((at for at, name in enumerate(LONG) if name in item.nodeid), len(LONG))

    items.sort(key=place)


def _note_skip(report: pytest.TestReport | pytest.CollectReport) -> None:
    if report.skipped and not hasattr(report, "wasxfail"):
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
        _skipped.append(f"{report.nodeid}: {reason.removeprefix('Skipped: ')}")


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    _note_skip(report)


def pytest_collectreport(report: pytest.CollectReport) -> None:
    _note_skip(report)


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    if NO_SKIPS and _skipped and session.exitstatus in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if NO_SKIPS and _skipped:
        terminalreporter.section("skipped, and HOLDFAST_NO_SKIPS=1 allows no skips", red=True)
        for line in _skipped:
            terminalreporter.line(line, red=True)
