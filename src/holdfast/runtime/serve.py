"""`holdfast serve`: one process from its settings to a clean stop."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import logging
import signal
import socket
import sys
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

import uvicorn
import uvloop

from holdfast.errors import HoldfastError
from holdfast.runtime.listener import Bound, bound, listen, naming, tls_context
from holdfast.runtime.node import Node
from holdfast.settings import Settings

logger = logging.getLogger("holdfast")

REQUEST_HEAD_BYTES_MAX = 256 << 10
"""A client id has up to 65,535 bytes, and each may take three in an address."""


class JsonLines(logging.Formatter):
    """One JSON object per line: time, level, part, message."""

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created)) + f".{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "part": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info:
            line["error"] = self.formatException(record.exc_info)
        return json.dumps(line)


def set_up_logs(level: str) -> None:
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonLines())
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
    logging.getLogger("uvicorn").setLevel("WARNING")


def run(settings: Settings) -> None:
    """Serve until SIGTERM or SIGINT."""
    set_up_logs(settings.log_level)
    # The writer's thread asks for the interpreter a dozen times per commit; at the default of 5 ms a busy loop
    # would make each commit wait for a dozen of those.
    sys.setswitchinterval(0.0005)
    # A session that comes makes a hundred objects that stay, and one that goes leaves no cycles behind. By default the
    # collector would look at all of them again and again, which was a third of what a CONNECT costs.
    gc.set_threshold(20_000, 5, 200)
    uvloop.run(_serve(settings))


class Web(uvicorn.Server):
    """Stopping is the node's business, not uvicorn's."""

    def __init__(self, config: uvicorn.Config):
        super().__init__(config)
        self.listening = asyncio.Event()

    @contextlib.contextmanager
    def capture_signals(self) -> Any:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.listening.set()


async def _serve(settings: Settings) -> None:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    async with running(settings) as node:
        logger.info("node %s is ready", node.node_id)
        # What is here by now stays. A full collection would look at all of it again: 30 ms in which nobody is served.
        gc.collect()
        gc.freeze()
        await _first(stop, node.ended, node.finished)
        logger.info("stopping")
    logger.info("stopped")
    if node.ended.is_set():
        raise HoldfastError(f"the node has ended: {node.supervisor.problem}")


async def _first(*events: asyncio.Event) -> None:
    waiting = [asyncio.create_task(event.wait()) for event in events]
    await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
    for task in waiting:
        task.cancel()


@contextlib.asynccontextmanager
async def running(settings: Settings) -> Any:
    """A node with its listeners and its HTTP API, for as long as the block lasts.

    1. Take every address, so that whoever cannot have one ends before anything is changed.
    2. Open the store and start the node.
    3. Let clients in. Only when all of this has happened is the node ready.
    """
    context = tls_context(settings.mqtt)
    make_app = _app_maker(settings)
    with bound(settings) as sockets:
        node = Node(settings)
        await node.start()
        servers: list[asyncio.Server] = []
        try:
            servers += await listen(node.front, sockets, context)
            async with _web(node, sockets, make_app):
                try:
                    yield node
                finally:
                    await _stop(node, servers)
        finally:
            await _stop(node, servers)


async def _stop(node: Node, servers: list[asyncio.Server]) -> None:
    for server in servers:
        server.close()
    await node.stop()


def _app_maker(settings: Settings) -> Callable[[Node], Any] | None:
    """Imported before the node starts: that can take longer than the node's first lease lasts."""
    if not settings.http.listen:
        return None
    from holdfast.web.api import make_app

    return make_app


@contextlib.asynccontextmanager
async def _web(node: Node, sockets: Bound, make_app: Callable[[Node], Any] | None) -> AsyncIterator[None]:
    """The HTTP API, if the settings name an address for it. It outlives the node, to say that it is stopping."""
    if make_app is None:
        yield
        return
    web = Web(
        uvicorn.Config(
            make_app(node),
            log_config=None,
            lifespan="off",
            access_log=False,
            http="h11",
            h11_max_incomplete_event_size=REQUEST_HEAD_BYTES_MAX,
        )
    )
    serving = asyncio.create_task(web.serve(sockets["http.listen"]), name="http")
    listening = asyncio.create_task(web.listening.wait())
    await asyncio.wait((serving, listening), return_when=asyncio.FIRST_COMPLETED)
    try:
        if serving.done():
            with naming("http.listen", node.settings.http.listen):
                await serving
        yield
    finally:
        listening.cancel()
        web.should_exit = True
        with contextlib.suppress(asyncio.CancelledError, OSError):
            await serving
