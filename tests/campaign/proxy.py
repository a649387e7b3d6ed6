"""A TCP proxy whose connections can be cut, delayed, held up and lost without a word."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
from collections.abc import Awaitable, Callable

Dial = Callable[[], Awaitable[tuple[asyncio.StreamReader, asyncio.StreamWriter]]]


class Proxy:
    """Listens on a loopback port of its own; every connection there becomes one to the target.

    A fault is for all connections, those that are there and those that come: `cut` ends and refuses them, `delay`
    makes every chunk late, `hold` keeps what was sent from arriving (then `release` passes it on, late, and `lose`
    drops it with its connections: to both ends it had looked open all the while).
    """

    def __init__(self, dial: Dial):
        self._dial = dial
        self._server: asyncio.Server | None = None
        self.port = 0
        self.delay_seconds = 0.0
        self._refuses = False
        self._passes = asyncio.Event()
        self._passes.set()
        self._writers: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]

    def cut(self) -> None:
        self._refuses = True
        self._reset()

    def hold(self) -> None:
        self._passes.clear()

    def release(self) -> None:
        """As it should be; what was held up goes on."""
        self._refuses, self.delay_seconds = False, 0.0
        self._passes.set()

    def lose(self) -> None:
        self._reset()
        self.release()

    def _reset(self) -> None:
        for writer in list(self._writers):
            sock = writer.get_extra_info("socket")
            if sock is not None and sock.family != socket.AF_UNIX:
                with contextlib.suppress(OSError):
                    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            writer.transport.abort()
        for task in list(self._tasks):
            task.cancel()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        self._writers.add(writer)
        theirs: asyncio.StreamWriter | None = None
        try:
            if self._refuses:
                return
            await self._passes.wait()
            there, theirs = await self._dial()
            self._writers.add(theirs)
            async with asyncio.TaskGroup() as both:
                both.create_task(self._pump(reader, theirs))
                both.create_task(self._pump(there, writer))
        except (OSError, ExceptionGroup, asyncio.CancelledError):
            pass
        finally:
            self._tasks.discard(task)
            for each in (writer, theirs):
                if each is not None:
                    self._writers.discard(each)
                    each.transport.abort() if each.transport.is_closing() else each.close()

    async def _pump(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        while data := await source.read(65536):
            if self.delay_seconds:
                await asyncio.sleep(self.delay_seconds)
            await self._passes.wait()
            sink.write(data)
            await sink.drain()
        with contextlib.suppress(OSError):  # the other direction may have more to say
            sink.write_eof()

    async def close(self) -> None:
        if self._server is not None:
            self._server.close()
        self._reset()
        self._passes.set()
        await asyncio.gather(*self._tasks, return_exceptions=True)
