"""A well-behaved client beside every attack: it publishes to itself, all the time, and notes how long each trip took.

It is a process of its own, so that it waits for the node and not for the attacking test's threads.
"""

from __future__ import annotations

import threading
import time
from typing import Any

from e2e.raw import Raw
from processes import Child, Report, wait_for

TOPIC = "bystander"


def _be_good(report: Report, port: int, version: int, every_seconds: float) -> None:
    with Raw(port, version) as raw:
        raw.sock.settimeout(60)
        raw.connect("bystander", keep_alive=600)
        raw.subscribe(TOPIC, 1)
        count = 0
        while True:
            count += 1
            sent = time.monotonic()
            payload = b"%d" % count
            raw.publish(TOPIC, payload, pid=count % 65_535 + 1)
            acked = came = False
            while not (acked and came):
                first, body = raw.read()
                if first == 0x40:
                    acked = True
                else:
                    came = first >> 4 == 3 and body.endswith(payload)
                    at = 2 + len(TOPIC)
                    raw.send(0x40, body[at : at + 2])
            report.send((sent, time.monotonic() - sent))
            time.sleep(every_seconds)


class Bystander:
    def __init__(self, port: int, version: int = 5, every_seconds: float = 0.02):
        self._child = Child(_be_good, port, version, every_seconds)
        self._trips: list[tuple[float, float]] = []
        """When each was begun, and how long it took."""
        self._reader = threading.Thread(target=self._collect, daemon=True)
        self._reader.start()
        self.trip_since(time.monotonic())

    def _collect(self) -> None:
        while True:
            try:
                self._trips.append(self._child.reports.recv())
            except (EOFError, OSError):
                return

    def trip_since(self, moment: float, seconds: float = 30.0) -> None:
        """Wait until it has published and received something that it began to publish after `moment`."""
        wait_for(
            lambda: (self._trips and self._trips[-1][0] > moment) or not self._reader.is_alive(),
            seconds,
            "a round trip of a well-behaved client",
        )
        assert self._reader.is_alive(), "the well-behaved client's connection has ended"

    def worst_since(self, moment: float) -> float:
        return max((took for began, took in list(self._trips) if began + took > moment), default=0.0)

    def close(self) -> None:
        self._child.kill()
        self._reader.join()
        self._child.close()

    def __enter__(self) -> Bystander:
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()
