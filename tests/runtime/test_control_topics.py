"""Control topics go to whoever registered their prefix."""

from __future__ import annotations

from typing import Any

import pytest

from holdfast.runtime.control_topics import ControlTopics


class Handler:
    def __init__(self) -> None:
        self.left: list[Any] = []

    def publish(self, client: Any, topic: str, payload: bytes) -> tuple[int, str]:
        return 0, ""

    def subscribe(self, client: Any, topic: str, start: Any) -> int:
        return 0

    def unsubscribe(self, client: Any, topic: str) -> bool:
        return True

    def gone(self, client: Any) -> None:
        self.left.append(client)


def test_the_prefix_decides():
    table, lease, fanout = ControlTopics(), Handler(), Handler()
    table.register("$holdfast/lease/", lease)
    table.register("$fanout/", fanout)
    assert table.handler("$holdfast/lease/g/to/c") is lease
    assert table.handler("$fanout/send/1") is fanout
    for ordinary in ("a/b", "", "$SYS/x", "$share/g/a", "$holdfast/leases", "$fanout"):
        assert table.handler(ordinary) is None


def test_every_handler_hears_that_a_client_has_gone():
    table, one, two = ControlTopics(), Handler(), Handler()
    table.register("$a/", one)
    table.register("$b/", two)
    client: Any = object()
    table.gone(client)
    assert one.left == two.left == [client]


@pytest.mark.parametrize("prefix", ["$a/", "$a/b/", "$", "a/", "$a"])
def test_a_prefix_that_overlaps_or_is_not_one_is_refused(prefix):
    table = ControlTopics()
    table.register("$a/", Handler())
    with pytest.raises(ValueError, match=r"overlap|expected a prefix"):
        table.register(prefix, Handler())
