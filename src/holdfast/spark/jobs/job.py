"""What all jobs share: what they tell while they run, and how they wait and end."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from pyspark.sql import SparkSession

from holdfast.log import Log
from holdfast.spark.lifecycle.launching import session


@dataclass(frozen=True, slots=True)
class Progress:
    """What a job has done since it began, and what is waiting."""

    job: str
    state: str
    """starting, working, waiting, verifying, failed or stopped."""
    messages: int = 0
    batches: int = 0
    lag: int = 0
    """Messages that were there to be taken at the last look, and have not been."""
    seconds: float = 0.0
    """How long the last batch took."""
    restarts: int = 0
    error: str = ""
    details: dict[str, int] = field(default_factory=dict)


Tell = Callable[[Progress], None]


def quiet(_: Progress) -> None:
    """Tell nobody."""


class Wake:
    """Waits for the log to change, for the time to come, or for the job to be stopped, whichever is first."""

    def __init__(self, log: Log, names: set[str], stop: threading.Event | None):
        self.stop = stop or threading.Event()
        self._changed = threading.Event()
        self._watch = log.watch(lambda name: self._changed.set() if name in names else None)

    @property
    def stopped(self) -> bool:
        return self.stop.is_set()

    def pause(self, seconds: float) -> None:
        """At least so long, unless stopped."""
        self.stop.wait(seconds)

    def wait(self, at_least: float, at_most: float) -> None:
        """For a change of the log, but not less than the one nor more than the other."""
        begun = time.monotonic()
        self.stop.wait(at_least)
        while not self.stop.is_set() and not self._changed.is_set() and time.monotonic() - begun < at_most:
            self._changed.wait(0.1)
        self._changed.clear()

    def close(self) -> None:
        self._watch.close()


def spark_of(given: SparkSession | None, master: str | None) -> SparkSession:
    """The session to work with, known to this thread: a writer looks its format up in the thread's session."""
    spark = given or session(master)
    jvm = spark._jvm
    if jvm is not None:
        SparkSession._get_j_spark_session_class(jvm).setActiveSession(spark._jsparkSession)
    return spark
