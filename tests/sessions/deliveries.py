"""What a session sends, as packets; and rows to feed it with."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from holdfast.cursors.cursor_map import CursorMap
from holdfast.model import Batch, Stream
from holdfast.mqtt import codec
from holdfast.mqtt.packets import V5, Publish
from holdfast.sessions.heads import Heads
from holdfast.sessions.rows import Rows
from holdfast.sessions.session import Session
from holdfast.sessions.stored import content_of, restore
from holdfast.sessions.subscriptions import Subscription
from holdfast.sessions.table import SessionRow

S = Stream("messages", 0, 1)
NEXT_S = Stream("messages", 0, 2)
NO_LIMIT = 1 << 30


def begun(at: dict[Stream, int]) -> CursorMap:
    """What a subscription does not want that began there."""
    found = CursorMap()
    for stream, past in at.items():
        found.set(stream, past)
    return found


def rows(
    first: int, topics: Sequence[str], *, stream: Stream | None = S, times: Sequence[int] | int = 0, **columns: Any
) -> Rows:
    """A block from offset `first` on; unless told otherwise each payload tells its offset."""
    offsets = range(first, first + len(topics))
    columns.setdefault("payloads", [str(offset).encode() for offset in offsets])
    return Rows(stream, offsets, Batch(list(topics), **columns), times)


def subscribed(*filters: str | Subscription, expiry_seconds: int = 100) -> Session:
    session = Session("me", expiry_seconds)
    for one in filters:
        session.subscribe(one if isinstance(one, Subscription) else Subscription(one, 1))
    return session


def row_of(session: Session, heads: Mapping[Stream, int], leaving: str = "last") -> SessionRow:
    """What is stored of it; unless told otherwise it is the last word of its connection."""
    content = content_of(session, Heads.of(heads), leaving)
    return SessionRow(
        client_id=session.client_id,
        epoch=session.epoch,
        connect="last",
        born="first",
        expiry_secs=session.expiry_seconds,
        subscriptions=content.subscriptions,
        cursors=content.cursors,
        packets=content.packets,
    )


def away(session: Session, heads: Mapping[Stream, int]) -> Session:
    """Its client goes: all that is left is a row, and this is made of it when the client is about to come back."""
    return restore(row_of(session, heads), "last", {})


def offer(session: Session, block: Rows, bytes_max: int = NO_LIMIT) -> bool:
    """As the dispatcher does: the rows that match any subscription, once each."""
    assert session.subscriptions.wanted is not None
    picks = [at for at, topic in enumerate(block.topics) if session.subscriptions.wanted.matches(topic)]
    return session.offer(block, picks, bytes_max) if picks else True


def sent(
    session: Session,
    room: int = 65_535,
    *,
    bytes_max: int = NO_LIMIT,
    version: int = V5,
    packet_max: int = NO_LIMIT,
    now: float = 0.0,
) -> list[Publish]:
    out: list[bytes] = []
    session.outgoing.take(out, room, bytes_max, version, packet_max, now)
    return packets(b"".join(out), version)


def packets(data: bytes, version: int = V5) -> list[Any]:
    found, at = [], 0
    while at < len(data):
        framed = codec.frame(data, at)
        assert framed is not None, "a packet is cut short"
        first, start, at = framed
        found.append(codec.decode_for_client(first, data[start:at], version))
    return found


def payloads(publishes: Sequence[Publish]) -> list[int]:
    return [int(one.payload) for one in publishes]
