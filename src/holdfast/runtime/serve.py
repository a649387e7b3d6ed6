"""`holdfast serve`: one process from its settings to a clean stop."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import logging
import signal
import sys
import time
from typing import Any

import uvicorn
import uvloop

from holdfast.errors import HoldfastError
from holdfast.runtime.listener import listen
from holdfast.runtime.node import Node
from holdfast.settings import Settings, address

logger = logging.getLogger("holdfast")


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
    uvloop.run(_serve(settings))


class Web(uvicorn.Server):
    """Stopping is the node's business, not uvicorn's."""

    @contextlib.contextmanager
    def capture_signals(self) -> Any:
        yield


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
        await stop.wait()
        logger.info("stopping")
    logger.info("stopped")


@contextlib.asynccontextmanager
async def running(settings: Settings) -> Any:
    """A node with its listeners and its HTTP API, for as long as the block lasts."""
    node = Node(settings)
    await node.start()
    servers = await listen(node.front)
    web = serving = None
    if settings.http.listen:
        from holdfast.web.api import make_app

        host, port = address("http.listen", settings.http.listen)
        config = uvicorn.Config(make_app(node), host=host, port=port, log_config=None, lifespan="off", access_log=False)
        web = Web(config)
        serving = asyncio.create_task(_serve_web(web, settings.http.listen))
    try:
        yield node
    finally:
        for server in servers:
            server.close()
        await node.stop()
        if web is not None and serving is not None:
            web.should_exit = True
            with contextlib.suppress(asyncio.CancelledError):
                await serving


async def _serve_web(web: uvicorn.Server, where: str) -> None:
    try:
        await web.serve()
    except SystemExit:
        raise HoldfastError(f"cannot serve HTTP on {where}; is it taken?") from None
