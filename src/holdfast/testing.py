"""A node for users' own tests: in this process, on free loopback ports, in memory unless told otherwise."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import socket
import threading
from collections.abc import Iterator
from typing import Any

from holdfast.runtime.serve import running
from holdfast.settings import Settings, load


@dataclasses.dataclass(frozen=True, slots=True)
class RunningNode:
    """Where the node listens."""

    host: str
    mqtt_port: int
    http_port: int

    @property
    def http(self) -> str:
        return f"http://{self.host}:{self.http_port}"


@contextlib.contextmanager
def node(store: str = "memory:", **settings: Any) -> Iterator[RunningNode]:
    """A running node; settings by their names with `__` for the dot: `node(log__shards=4)`."""
    host = "127.0.0.1"
    mqtt_port, http_port = _free_port(), _free_port()
    flags = [f"{name.replace('__', '.')}={value}" for name, value in settings.items()]
    chosen = load(
        flags=[f"store={store}", f"mqtt.listen={host}:{mqtt_port}", f"http.listen={host}:{http_port}", *flags]
    )
    ready, failed = threading.Event(), []
    stop: list[Any] = []

    def run() -> None:
        try:
            asyncio.run(_run(chosen, ready, stop))
        except Exception as error:
            failed.append(error)
            ready.set()

    thread = threading.Thread(target=run, name="holdfast-node", daemon=True)
    thread.start()
    ready.wait(30)
    if failed:
        raise failed[0]
    try:
        yield RunningNode(host, mqtt_port, http_port)
    finally:
        stop[0]()
        thread.join(30)


async def _run(settings: Settings, ready: threading.Event, stop: list[Any]) -> None:
    loop, stopped = asyncio.get_running_loop(), asyncio.Event()
    stop.append(lambda: loop.call_soon_threadsafe(stopped.set))
    async with running(settings):
        ready.set()
        await stopped.wait()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
