"""A simulated TCP connection: bytes in pieces, buffers that fill up, ends that vanish without a word.

client ──send──▶ on its way ──▶ server.data_received       unless the server has paused reading
client ◀──────── on its way ◀── buffer ◀──write── server   unless the client does not read, and its kernel is full
"""

from __future__ import annotations

from typing import Protocol

from holdfast.sim.front.world import Life, World

KERNEL_BYTES = 2048
"""What a client's kernel takes while the client itself does not read."""


class ServerEnd(Protocol):
    """Who hears of the socket at the node."""

    def data_received(self, data: bytes) -> None: ...

    def eof_received(self) -> bool: ...

    def socket_full(self, full: bool) -> None: ...

    def connection_lost(self) -> None: ...


class ClientEnd(Protocol):
    """Who hears of the socket at the client."""

    def received(self, socket: Socket, data: bytes) -> None: ...

    def ended(self, socket: Socket) -> None: ...


class Socket:
    """Both ends of one connection."""

    def __init__(self, world: World, client: ClientEnd, life: Life, *, high: int, seconds: float, piece: int):
        self.world, self.client, self.life = world, client, life
        self.server: ServerEnd
        self._high, self._slow_seconds, self._small_piece = high, seconds, piece
        self.buffer = bytearray()
        """Written by the node and not taken by the client's kernel: the node's memory."""
        self._kernel = bytearray()
        self._inward = bytearray()
        self.client_reads = True
        self.client_open = True
        self.vanished = False
        self.lost = False
        """The node knows that it is over."""
        self.closing = False
        self.node_reads = True
        """The node takes what comes."""
        self.full = False
        """The node was told that its buffer is."""
        self._client_eof = self._node_eof = False
        self._eof_heard = False
        self._moving_in = self._moving_out = False

    @property
    def _seconds(self) -> float:
        return 0.001 if self.world.healing else self._slow_seconds

    @property
    def piece(self) -> int:
        """What is on its way at a time, at most."""
        return 8000 if self.world.healing else self._small_piece

    # -- the node's end ------------------------------------------------------------------------------------

    def write(self, data: bytes) -> None:
        if self.closing or self._node_eof or self.lost:
            return
        self.buffer += data
        if len(self.buffer) > self._high and not self.full:
            self.full = True
            self.server.socket_full(True)
        self._move_out()

    def write_eof(self) -> None:
        self._node_eof = True
        self._move_out()

    def close(self) -> None:
        """Send what is left, then close."""
        self.closing = True
        self.node_reads = False
        if not self.buffer:
            self.world.after(0.0, self._lose)
        self._move_out()

    def abort(self) -> None:
        self.closing = True
        self.buffer.clear()
        self.world.after(0.0, self._lose)

    def pause_reading(self) -> None:
        self.node_reads = False

    def resume_reading(self) -> None:
        if not self.closing:
            self.node_reads = True
            self._move_in()

    def _lose(self) -> None:
        if self.lost:
            return
        self.lost = True
        if self.life.alive:
            self.server.connection_lost()
        if self.client_open and not self.vanished:
            self.world.after(self._seconds, self._end_client)

    # -- the client's end ----------------------------------------------------------------------------------

    def send(self, data: bytes) -> None:
        if self.client_open:
            self._inward += data
            self._move_in()

    def shut(self) -> None:
        """Nothing more comes from the client; what it sent still does."""
        self.client_open = False
        self._client_eof = True
        self._move_in()

    def reset(self) -> None:
        """The connection breaks, and the node hears of it."""
        self.client_open = False
        self._inward.clear()
        self.buffer.clear()
        self.world.after(self._seconds, self._lose)

    def vanish(self) -> None:
        """The client is gone, and nobody is told."""
        self.client_open = False
        self.vanished = True
        self._inward.clear()

    def read(self, reads: bool) -> None:
        self.client_reads = reads
        if reads:
            self._move_out()

    def node_died(self) -> None:
        """Nobody is left at the other end."""
        self.lost = True
        self.world.after(0.001, self._end_client)

    def _end_client(self) -> None:
        if self.client_open:
            self.client_open = False
            self.client.ended(self)

    # -- on the way ----------------------------------------------------------------------------------------

    def _move_in(self) -> None:
        if not self._moving_in:
            self._moving_in = True
            self.world.after(self.world.rng.random() * self._seconds, self._moved_in)

    def _moved_in(self) -> None:
        self._moving_in = False
        if self.lost or self.vanished or not self.node_reads or not self.life.alive:
            return
        if self._inward:
            size = self.world.rng.randint(1, self.piece)
            data = bytes(self._inward[:size])
            del self._inward[:size]
            self.server.data_received(data)
            self._move_in()
        elif self._client_eof and not self._eof_heard:
            self._eof_heard = True
            if not self.server.eof_received():
                self.close()

    def _move_out(self) -> None:
        if not self._moving_out:
            self._moving_out = True
            self.world.after(self.world.rng.random() * self._seconds, self._moved_out)

    def _moved_out(self) -> None:
        self._moving_out = False
        if self.vanished or self.lost or not self.life.alive:
            return
        room = self.piece if self.client_reads else KERNEL_BYTES - len(self._kernel)
        if room > 0 and self.buffer:
            size = min(room, len(self.buffer))
            self._kernel += self.buffer[:size]
            del self.buffer[:size]
            if self.full and len(self.buffer) <= self._high // 4:
                self.full = False
                self.server.socket_full(False)
        if self.client_reads and self._kernel and self.client_open:
            data = bytes(self._kernel)
            self._kernel.clear()
            self.client.received(self, data)
        if self.buffer:
            if self.client_reads or len(self._kernel) < KERNEL_BYTES:
                self._move_out()
        elif self.closing:
            self._lose()
        elif self._node_eof and self.client_reads:
            self._end_client()
            if not self._client_eof:
                self.shut()
