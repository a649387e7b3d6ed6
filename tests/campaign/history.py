"""What happened, as the campaign's own process saw it: one event after the other, as JSON lines, never more than fit.

who        what                                          fields
a client   connect, connack, suback                      conn, node, clean, expiry, will, code, msg (filter)
           send, acked, refused, forgotten               conn, msg, qos, pid, dup
           got, done (acknowledged by the client)        conn, msg, qos, pid, dup, repeat
           bye, drop, closed (by whom: `code`, `ok`)     conn
nemesis    fault, healed                                 msg (kind), node
a node     ready (`code`: the answer of /readyz)         node
run        lag (this process itself stood still)         secs
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import msgspec

EVENTS_MAX = 3_000_000
"""A campaign that would write more ends early, and says so."""


class Event(msgspec.Struct, omit_defaults=True):
    """One line."""

    t: float
    """Seconds since the campaign began, by the monotonic clock."""
    who: str
    what: str
    conn: int = 0
    """Which connection of this client, counted from 1."""
    msg: str = ""
    qos: int = 0
    pid: int = 0
    dup: bool = False
    repeat: bool = False
    """Under the packet id of a QoS 2 delivery that is not complete: the client knows it for the same one."""
    node: str = ""
    clean: bool = False
    expiry: int = -1
    will: str = ""
    delay: int = 0
    present: bool = False
    code: int = -1
    ok: bool = False
    secs: float = 0.0


class History:
    """Events in memory and in a file, in the order they happened."""

    def __init__(self, path: Path):
        self.path = path
        self.events: list[Event] = []
        self.began = time.monotonic()
        self.began_wall = time.time()
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("wb")
        self._encode = msgspec.json.Encoder().encode

    @property
    def full(self) -> bool:
        return len(self.events) >= EVENTS_MAX

    def now(self) -> float:
        return time.monotonic() - self.began

    def note(self, who: str, what: str, **fields: object) -> Event:
        event = Event(round(self.now(), 4), who, what, **fields)  # type: ignore[arg-type]
        self.events.append(event)
        self._file.write(self._encode(event) + b"\n")
        return event

    def close(self) -> None:
        self._file.close()


def read(path: Path) -> Iterator[Event]:
    decode = msgspec.json.Decoder(Event).decode
    with path.open("rb") as file:
        for line in file:
            yield decode(line)
