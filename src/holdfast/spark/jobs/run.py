"""Keeping the continuous jobs going under one session: one that fails is started again, later each time."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from pyspark.sql import SparkSession

from holdfast.errors import RequestError
from holdfast.jitter import chance
from holdfast.spark.errors import plain
from holdfast.spark.jobs.aggregate import AggregateOptions, aggregate
from holdfast.spark.jobs.job import Progress, Tell, quiet, spark_of
from holdfast.spark.jobs.lake import LakeOptions, lake

Job = LakeOptions | AggregateOptions
Work = Callable[[SparkSession, Tell, threading.Event], Progress]


@dataclass(frozen=True, kw_only=True, slots=True)
class RunOptions:
    """Which jobs to keep going, and how patiently."""

    jobs: Sequence[Job]
    master: str | None = None
    backoff_seconds: float = 1.0
    """How long a job that failed waits before it is started again; doubled each time, up to the next."""
    backoff_seconds_max: float = 60.0
    steady_seconds: float = 120.0
    """A job that ran for so long starts with the short wait again."""


class Runner:
    """The jobs, each on a thread of its own. Register it with prometheus_client for its metrics."""

    def __init__(self, options: RunOptions, *, spark: SparkSession | None = None, tell: Tell = quiet):
        work: dict[str, Work] = {}
        for job in options.jobs:
            name = _name(job)
            if name in work:
                raise RequestError(f"job {name!r} is there twice")
            work[name] = _work(job)
        if not work:
            raise RequestError("there is no job to run; name a lake or an aggregate")
        self.options, self._tell = options, tell
        self._spark = spark_of(spark, options.master)
        self._work = work
        self._stop = threading.Event()
        self._lock = threading.Lock()
        self._progress = {name: Progress(name, "starting") for name in work}
        self._threads: list[threading.Thread] = []

    def start(self) -> Runner:
        for name, work in self._work.items():
            thread = threading.Thread(target=self._keep, args=(name, work), name=f"holdfast-{name}", daemon=True)
            self._threads.append(thread)
            thread.start()
        return self

    def stop(self, seconds: float = 60.0) -> None:
        """Ask every job to end after its batch, and wait for it."""
        self._stop.set()
        until = time.monotonic() + seconds
        for thread in self._threads:
            thread.join(max(0.0, until - time.monotonic()))

    def wait(self) -> None:
        """Until somebody stops it."""
        while not self._stop.wait(1.0):
            pass

    def progress(self) -> dict[str, Progress]:
        with self._lock:
            return dict(self._progress)

    def _keep(self, name: str, work: Work) -> None:
        failures, restarts, before = 0, 0, 0
        while not self._stop.is_set():
            begun = time.monotonic()

            def told(now: Progress, so_far: int = before, restarts: int = restarts) -> None:
                self._set(name, replace(now, job=name, messages=so_far + now.messages, restarts=restarts))

            try:
                work(self._spark, told, self._stop)
                failures = 0
                if not self._stop.is_set():
                    self._stop.wait(
                        self.options.backoff_seconds
                    )  # a job that ends by itself has nothing to do just now
            except Exception as error:
                if time.monotonic() - begun > self.options.steady_seconds:
                    failures = 0
                failures += 1
                restarts += 1
                self._set(name, replace(self._progress[name], state="failed", error=plain(error), restarts=restarts))
                self._stop.wait(self._pause(failures))
            before = self._progress[name].messages
        self._set(name, replace(self._progress[name], state="stopped"))

    def _pause(self, failures: int) -> float:
        longest = min(self.options.backoff_seconds * 2.0 ** (failures - 1), self.options.backoff_seconds_max)
        return longest * (0.5 + chance.random() / 2)

    def _set(self, name: str, progress: Progress) -> None:
        with self._lock:
            self._progress[name] = progress
        self._tell(progress)

    def collect(self) -> Iterator[Metric]:
        """For Prometheus."""
        now = self.progress()
        yield _counter("messages", "Messages a pipeline job has taken.", ((n, p.messages) for n, p in now.items()))
        yield _counter(
            "restarts", "How often a pipeline job had to be started again.", ((n, p.restarts) for n, p in now.items())
        )
        yield _gauge("lag_messages", "Messages waiting for a pipeline job.", ((n, p.lag) for n, p in now.items()))
        yield _gauge(
            "batch_seconds", "How long a pipeline job's last batch took.", ((n, p.seconds) for n, p in now.items())
        )
        yield _gauge("up", "1 unless the job has failed and waits.", ((n, p.state != "failed") for n, p in now.items()))


def run(
    options: RunOptions,
    *,
    spark: SparkSession | None = None,
    tell: Tell = quiet,
    stop: threading.Event | None = None,
) -> dict[str, Progress]:
    """Keep the jobs going until stopped."""
    runner = Runner(options, spark=spark, tell=tell).start()
    try:
        (stop or threading.Event()).wait()
    finally:
        runner.stop()
    return runner.progress()


def _name(job: Job) -> str:
    return f"lake {' '.join(job.logs)}" if isinstance(job, LakeOptions) else f"aggregate {job.target}"


def _work(job: Job) -> Work:
    if isinstance(job, LakeOptions):
        return lambda spark, tell, stop: lake(job, spark=spark, tell=tell, stop=stop)
    return lambda spark, tell, stop: aggregate(job, spark=spark, tell=tell, stop=stop)


def _counter(name: str, text: str, values: Iterable[tuple[str, float]]) -> Metric:
    found = CounterMetricFamily(f"holdfast_pipeline_{name}", text, labels=["job"])
    for job, value in values:
        found.add_metric([job], value)
    return found


def _gauge(name: str, text: str, values: Iterable[tuple[str, float]]) -> Metric:
    found = GaugeMetricFamily(f"holdfast_pipeline_{name}", text, labels=["job"])
    for job, value in values:
        found.add_metric([job], value)
    return found
