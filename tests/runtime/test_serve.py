"""How a node begins: every address is its own before anything else happens, or it does not begin at all."""

from __future__ import annotations

import socket
import subprocess
from pathlib import Path

import pytest

from holdfast import testing
from holdfast.errors import RequestError
from node import LISTENER, Node


@pytest.mark.parametrize("taken", ["mqtt.listen", "mqtt.websocket", "http.listen"])
def test_a_port_that_is_taken_ends_the_process_before_the_store_is_touched(tmp_path: Path, taken: str) -> None:
    node = Node(tmp_path, settings={"mqtt.websocket": LISTENER}, start=False)
    node._take_ports()
    ports = {"mqtt.listen": node.mqtt_port, "http.listen": node.http_port, **node.ports}
    with socket.create_server(("127.0.0.1", ports[taken])):
        ended = subprocess.run(node.command(), cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert ended.returncode == 1
    said = ended.stderr.strip().splitlines()
    assert said == [f"holdfast: cannot listen on 127.0.0.1:{ports[taken]} ({taken}): Address already in use"]
    assert not list((tmp_path / "data").glob("*")), "the store was made"


def test_an_address_that_is_not_ours_is_named(tmp_path: Path) -> None:
    node = Node(tmp_path, settings={"http.listen": "192.0.2.1:8080"}, start=False)
    node._take_ports()
    ended = subprocess.run(node.command(), cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert ended.returncode == 1
    assert "cannot listen on 192.0.2.1:8080 (http.listen): Cannot assign requested address" in ended.stderr
    assert "ready" not in ended.stderr


def test_a_node_inside_the_process_that_cannot_begin_says_so_and_leaves_nothing_behind() -> None:
    refused = pytest.raises(RequestError, match=r"cannot listen on .*\(http.listen\): Address already in use")
    with testing.node() as first, refused, testing.node(http__listen=f"{first.host}:{first.http_port}"):
        pass
    with testing.node(mqtt__listen=f"{first.host}:{first.mqtt_port}") as again:
        assert again
