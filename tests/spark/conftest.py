"""One Spark session for the whole run, and a store of every kind that Spark can reach."""

from __future__ import annotations

import importlib.util
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from holdfast import Batch, Log
from holdfast.store import Store, open_store

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

HERE = Path(__file__).parent
MISSING = importlib.util.find_spec("pyspark") is None
REASON = "PySpark is not installed: pip install --requirement requirements-spark.txt"


class _Skipped(pytest.Module):
    def collect(self) -> Iterator[pytest.Item]:
        pytest.skip(REASON, allow_module_level=True)


def pytest_pycollect_makemodule(module_path: Path, parent: pytest.Collector) -> pytest.Module | None:
    """Without PySpark a module is not even imported."""
    return _Skipped.from_parent(parent, path=module_path) if MISSING else None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Long runs only where they are asked for (`-m soak`)."""
    if not config.getoption("-m"):
        long = [item for item in items if HERE in item.path.parents and item.get_closest_marker("soak")]
        config.hook.pytest_deselected(items=long)
        items[:] = [item for item in items if item not in long]


@pytest.fixture(scope="session")
def spark() -> Iterator[SparkSession]:
    from holdfast.spark import session

    made = session("local[2]")
    yield made
    made.stop()


@pytest.fixture(params=["sqlite", "postgres"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """The URL of a new, empty store."""
    if request.param == "postgres":
        return str(request.getfixturevalue("postgres_url"))
    return f"sqlite:///{tmp_path}/store.db"


@pytest.fixture
def sqlite(tmp_path: Path) -> str:
    """The URL of a new, empty SQLite store, where the kind of store makes no difference."""
    return f"sqlite:///{tmp_path}/store.db"


class Fleet:
    """A log with messages that tell which they are: message n has payload `n`, from publisher `n % publishers`."""

    def __init__(self, url: str, shards: int = 4, publishers: int = 20):
        self.url, self.publishers = url, publishers
        self.store: Store = open_store(url)
        self.log: Log = self.store.log()
        self.log.create("messages", shards)
        self.count = 0

    def publish(self, count: int, time: int | None = None) -> None:
        numbers = range(self.count, self.count + count)
        who = [f"v{n % self.publishers}" for n in numbers]
        self.log.append(
            "messages",
            Batch(
                topics=[f"vehicle/{name}/{'trip' if n % 3 else 'alarm'}" for n, name in zip(numbers, who, strict=True)],
                payloads=[str(n).encode() for n in numbers],
                publishers=who,
                flags=[n % 3 | (0b100 if n % 10 == 0 else 0) for n in numbers],
                properties=[b"\x01\x01" if n % 2 else None for n in numbers],
                times=time,
            ),
        )
        self.count += count

    def numbers(self, log: str = "messages") -> list[int]:
        """The payloads in a log, as numbers, in no particular order."""
        return [int(p.as_py()) for chunk in self.log.scan(log) for p in chunk.batch.column("payload")]

    def total(self, log: str) -> int:
        return sum(head.next_offset for head in self.log.backend.heads(log))

    def check(self, log: str, expected: int | None = None) -> None:
        """Every message exactly once, each publisher's in order."""
        wanted = list(range(self.count if expected is None else expected))
        assert sorted(self.numbers(log)) == wanted
        last: dict[str, int] = {}
        for chunk in self.log.scan(log):
            who, payloads = chunk.batch.column("publisher").to_pylist(), chunk.batch.column("payload").to_pylist()
            for name, payload in zip(who, payloads, strict=True):
                assert int(payload) > last.get(name, -1), f"{name}: {payload} after {last[name]}"
                last[name] = int(payload)

    def close(self) -> None:
        self.store.close()


@pytest.fixture
def fleet(store: str) -> Iterator[Fleet]:
    made = Fleet(store)
    yield made
    made.close()


@pytest.fixture
def small_fleet(sqlite: str) -> Iterator[Fleet]:
    """The same on SQLite only."""
    made = Fleet(sqlite)
    yield made
    made.close()


Reader = Callable[..., "DataFrame"]


@pytest.fixture
def read(spark: SparkSession) -> Reader:
    """`read(store, topics=…)`: a batch DataFrame with these options."""

    def load(store: str, columns: str | None = None, **options: Any) -> DataFrame:
        reader = spark.read.format("holdfast").option("store", store).options(**options)
        return (reader.schema(columns) if columns else reader).load()

    return load


def until(true: Callable[[], object], seconds: float = 60.0) -> None:
    """Wait for it, but not for ever."""
    give_up = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < give_up, "it did not happen in time"
        time.sleep(0.02)


@pytest.fixture
def soon() -> Callable[..., None]:
    return until


def payloads(frame: DataFrame) -> Sequence[int]:
    """The numbers in a DataFrame's payloads, sorted."""
    return sorted(int(bytes(row.payload)) for row in frame.select("payload").collect())


@pytest.fixture
def numbers() -> Callable[[DataFrame], Sequence[int]]:
    return payloads


def error_line(call: Callable[[], object]) -> str:
    """What a failing call says, in the one line a user is shown."""
    from holdfast.spark import plain

    with pytest.raises(Exception) as caught:
        call()
    line = plain(caught.value)
    assert "\n" not in line
    assert "Traceback" not in str(caught.value), "a page of traceback"
    return line


@pytest.fixture
def says() -> Callable[[Callable[[], object]], str]:
    return error_line
