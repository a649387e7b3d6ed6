"""A TCP load balancer for tests: new connections go in turn to the nodes whose /readyz says 200, as HAProxy's would."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Sequence

from node import LOOPBACK, Node, free_ports

CHECK_SECONDS = 0.1


class Balancer:
    """Runs on a thread of its own until it is closed. Connections that are open stay where they are."""

    def __init__(self, nodes: Sequence[Node]):
        self.port = free_ports(1)[0]
        self._nodes = nodes
        self._ready: list[Node] = []
        self._turn = 0
        self._loop = asyncio.new_event_loop()
        self._started = threading.Event()
        self._thread = threading.Thread(target=self._run, name="balancer", daemon=True)
        self._thread.start()
        assert self._started.wait(10), "the balancer did not start"

    def __enter__(self) -> Balancer:
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._main.cancel)
        self._thread.join(10)
        self._loop.close()

    def _run(self) -> None:
        self._main = self._loop.create_task(self._serve())
        with contextlib.suppress(asyncio.CancelledError):
            self._loop.run_until_complete(self._main)
        self._loop.run_until_complete(self._end())

    async def _serve(self) -> None:
        await self._check()
        async with await asyncio.start_server(self._connected, LOOPBACK, self.port):
            self._started.set()
            while True:
                await asyncio.sleep(CHECK_SECONDS)
                await self._check()

    async def _end(self) -> None:
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _check(self) -> None:
        answers = await asyncio.gather(*(asyncio.to_thread(node.ready) for node in self._nodes))
        self._ready = [node for node, ready in zip(self._nodes, answers, strict=True) if ready]

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            if not self._ready:
                return
            self._turn += 1
            there = self._ready[self._turn % len(self._ready)]
            from_node, to_node = await asyncio.open_connection(LOOPBACK, there.mqtt_port)
            await asyncio.gather(_copy(reader, to_node), _copy(from_node, writer))
        except (OSError, asyncio.CancelledError):
            pass  # the task ends here, whoever wanted that
        finally:
            writer.close()


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Until one side is done; then the other hears of it."""
    try:
        while data := await reader.read(65_536):
            writer.write(data)
            await writer.drain()
    except OSError:
        pass
    finally:
        writer.close()
