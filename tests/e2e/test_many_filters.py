"""One session with thousands of filters."""

from __future__ import annotations

import struct
from pathlib import Path

from e2e.raw import Raw, text
from node import Node

FILTERS = 5_000
AT_ONCE = 500
NEVER = b"\x11\xff\xff\xff\xff"


def test_a_session_may_have_as_many_filters_as_the_setting_says(tmp_path: Path) -> None:
    with Node(tmp_path, settings={"limits.subscriptions_max": FILTERS}) as node, Raw(node.mqtt_port, 5) as client:
        client.connect("many", properties=NEVER)
        granted = 0
        for first in range(0, FILTERS, AT_ONCE):
            filters = b"".join(text(f"vehicles/{n}/+/state") + b"\1" for n in range(first, first + AT_ONCE))
            client.send(0x82, struct.pack("!H", first + 1) + b"\0" + filters)
            kind, body = client.read()
            assert kind == 0x90
            granted += body[-AT_ONCE:].count(1)
        assert granted == FILTERS
        client.send(0x82, b"\1\1\0" + text("one/more") + b"\1")
        assert client.read()[1][-1] == 0x97, "the setting bounds them, and nothing else does before"
