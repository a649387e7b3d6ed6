"""One SQLite folder, one node: a second one is told in one line who has it, and a killed holder lets go."""

from __future__ import annotations

import subprocess
from pathlib import Path

from e2e.raw import Raw
from node import Node, holdfast_command


def serve(data: Path, *more: str) -> subprocess.CompletedProcess[str]:
    command = [holdfast_command(), "serve", "--data", str(data), "--mqtt", "127.0.0.1:0", "--http", "127.0.0.1:0"]
    return subprocess.run([*command, *more], cwd=data.parent, capture_output=True, text=True, timeout=30)


def test_a_second_node_on_one_folder_is_refused_in_one_line(tmp_path: Path) -> None:
    with Node(tmp_path, node_id="first") as first:
        with Raw(first.mqtt_port, 5) as raw:
            raw.connect("vehicle", clean=False, properties=b"\x11\x00\x00\x0e\x10", will=("gone", b"lost"))
            done = serve(tmp_path / "data", "--node-id", "second")
            assert done.returncode == 1
            (line,) = done.stderr.splitlines()
            assert line.startswith("holdfast: ")
            assert f"is served by node first (process {first.pid}) already" in line
            assert done.stdout == ""
            raw.send(0xC0)
            assert raw.read()[0] == 0xD0, "whoever is connected to the first is none the worse for it"
        assert first.ready()


def test_a_holder_that_was_killed_lets_go_at_once(tmp_path: Path) -> None:
    with Node(tmp_path, node_id="first") as first:
        first.kill()
        first.node_id = "second"
        first.start()
        done = serve(tmp_path / "data")
        assert done.returncode == 1
        assert f"node second (process {first.pid})" in done.stderr
        first.stop()
        first.node_id = "third"
        first.start()
        assert first.ready()


def test_other_commands_may_look_at_a_folder_that_is_served(tmp_path: Path) -> None:
    with Node(tmp_path):
        store = f"sqlite:///{tmp_path}/data/holdfast.db"
        done = subprocess.run([holdfast_command(), "log", "ls", "--store", store], capture_output=True, timeout=30)
        assert done.returncode == 0
