"""Batch members on two nodes that share a PostgreSQL: whichever of them leads the group, and whichever dies."""

from __future__ import annotations

import time
from collections.abc import Callable
from urllib.parse import quote

import holdfast
from e2e.groups.conftest import LEASE_SECONDS, QUICK, TIMEOUT_SECONDS
from holdfast.batch import BatchClient
from holdfast.groups.progress import StreamProgress
from holdfast.groups.protocol.nouns import GroupId, Mark, Piece
from holdfast.keys import progress_key
from holdfast.model import Batch
from holdfast.store import open_metadata
from node import Node

SHARDS = QUICK["log.shards"]


def until(true: Callable[[], object], seconds: float = 15.0) -> None:
    give_up = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < give_up, "it did not happen in time"
        time.sleep(0.02)


def pieces(client: BatchClient) -> dict[Piece, Mark]:
    """What it holds, with nothing of it being read."""
    found = {piece: held.mark for piece, held in client.assignment().pieces.items()}
    client.drained()
    return found


def saved(node: Node, group: str, piece: Piece) -> int:
    """How far the store knows the group to have come in this piece."""
    assert node.store is not None
    with open_metadata(node.store) as metadata:
        entry = metadata.get(progress_key(GroupId.parse(group), piece.stream))
    return -1 if entry is None else StreamProgress.from_json(piece.stream, entry.value).mark(piece).offset


def test_members_on_both_nodes_and_one_node_dies(running: tuple[Node, Node], name: str) -> None:
    group = f"g{name}:{name}/#"
    here, there = (BatchClient(f"127.0.0.1:{node.mqtt_port}", group, f"{name}{node.node_id}") for node in running)
    try:
        assert here.join()  # so its node leads
        assert there.join()
        until(lambda: len(pieces(here)) == len(pieces(there)) == SHARDS // 2)
        assert not set(pieces(here)) & set(pieces(there))
        far = min(pieces(there))
        near = min(pieces(here))
        at, base = pieces(there)[far].offset, pieces(here)[near].offset
        assert running[0].store is not None
        with holdfast.open(running[0].store) as log:  # so much for each of the streams
            count = 1200 * SHARDS
            log.append("messages", Batch([f"{name}/x"] * count, [b""] * count, [f"p{n}" for n in range(count)]))
        there.ack(far, [(at + 1, at + 5)])
        here.ack(near, [(base + 1, base + 20)])
        view = f"/api/v1/groups/{quote(group, safe='')}"
        until(lambda: {m["node"] for m in running[1].get(view)["members"]} == {node.node_id for node in running})
        # A node that is killed saves nothing more: what must survive it has to be stored before.
        until(lambda: saved(running[0], group, near) >= base + 20)
        running[0].kill()
        until(lambda: len(pieces(there)) == SHARDS, LEASE_SECONDS + TIMEOUT_SECONDS + 15)
        assert pieces(there)[far] == Mark(at + 5)
        assert pieces(there)[near].offset >= base + 20
        assert pieces(here) == {}
        assert here.trouble is not None
        running[0].start()
        until(lambda: len(pieces(here)) == SHARDS // 2, 20)
    finally:
        here.close()
        there.close()
