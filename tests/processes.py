"""Processes for tests to start, watch and kill: forked from one that has everything imported, so they start fast."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection
from typing import Any

_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(
    ["holdfast", "holdfast.store.sqlite.store", "holdfast.store.postgres.store", "processes"]
)


class Child:
    """A process that reports over a pipe. Whatever it reported before it was killed can still be read."""

    def __init__(self, target: Callable[..., None], *arguments: Any):
        self.reports, theirs = _context.Pipe(duplex=False)
        self._process = _context.Process(target=target, args=(theirs, *arguments), daemon=True)
        self._process.start()
        theirs.close()

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    def next_report(self, seconds: float = 30.0) -> Any:
        if not self.reports.poll(seconds):
            raise AssertionError(f"no report within {seconds} s")
        return self.reports.recv()

    def all_reports(self) -> list[Any]:
        """Everything up to the process's end."""
        found = []
        while True:
            try:
                found.append(self.reports.recv())
            except EOFError:
                return found

    def kill(self) -> None:
        with suppress(ProcessLookupError):  # it may have ended by itself a moment ago
            os.kill(self.pid, signal.SIGKILL)
        self._process.join()

    def join(self, seconds: float = 60.0) -> int | None:
        self._process.join(seconds)
        return self._process.exitcode

    def close(self) -> None:
        if self._process.is_alive():
            self.kill()
        self._process.close()
        self.reports.close()


@contextmanager
def child(target: Callable[..., None], *arguments: Any) -> Iterator[Child]:
    process = Child(target, *arguments)
    try:
        yield process
    finally:
        process.close()


def wait_for(condition: Callable[[], Any], seconds: float = 10.0, what: str = "it") -> Any:
    """The first true value of `condition`, or a failure that says what did not happen."""
    give_up = time.monotonic() + seconds
    while True:
        value = condition()
        if value:
            return value
        if time.monotonic() > give_up:
            raise AssertionError(f"{what} did not happen within {seconds} s")
        time.sleep(0.005)


Report = Connection
