"""docs/cluster.md, followed by somebody in a hurry: its files are used as they stand, its commands run in their order.

Only addresses, paths and the database differ: the files' names are replaced by the test's own. HAProxy is not run here;
the balancer of the other tests does as its configuration says.
"""

from __future__ import annotations

import configparser
import dataclasses
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from balancer import Balancer
from e2e.clients import V5, Dial, PahoClient, Refused
from e2e.cluster.conftest import At, Cluster
from e2e.conftest import Clients, durable
from node import Node, holdfast_command
from processes import wait_for
from servers import PostgresServer
from test_docs import commands, fenced

DOCUMENT = Path(__file__).parents[3] / "docs" / "cluster.md"
STORE = "postgresql://holdfast@db.example/holdfast"


def unit() -> configparser.SectionProxy:
    parser = configparser.ConfigParser(interpolation=None)
    parser.optionxform = str  # type: ignore[assignment, method-assign]
    (text,) = fenced(DOCUMENT, "ini")
    parser.read_string(text)
    return parser["Service"]


class Installed(Node):
    """A node as the unit starts it, with the settings file of the document."""

    def __init__(self, folder: Path, name: str, store: str):
        self._name = name
        super().__init__(folder, store=store, node_id=name)

    def command(self) -> list[str]:
        (text,) = fenced(DOCUMENT, "toml")
        text = text.replace('"one"', f'"{self._name}"').replace(STORE, str(self.store))
        text = text.replace(":1883", f":{self.mqtt_port}").replace(":8083", f":{self.http_port}")
        (self.folder / f"{self._name}.toml").write_text(text)
        return self.words("ExecStart")

    def words(self, entry: str) -> list[str]:
        line = unit()[entry].removeprefix("-").replace("%i", self._name)
        line = line.replace("/opt/holdfast/.venv/bin/holdfast", holdfast_command())
        return shlex.split(line.replace("/etc/holdfast", str(self.folder)))


def run(command: str, folder: Path, **replaced: str) -> str:
    for old, new in replaced.items():
        command = command.replace({"http": "127.0.0.1:8083", "store": STORE}[old], new)
    command = command.replace(".venv/bin/", f"{Path(sys.executable).parent}/")
    done = subprocess.run(command, shell=True, cwd=folder, capture_output=True, text=True, timeout=180)
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def shown(*words: str) -> str:
    """The command of the document with these words."""
    (found,) = [command for command in commands(DOCUMENT) if all(word in command for word in words)]
    return found


def test_every_command_of_the_document_is_run_here() -> None:
    tried = [("node ls",), ("node drain",), ("session disconnect",), ("session delete",), ("vacuum into",)]
    tried += [("ban add client",), ("ban add address",), ("ban ls",), ("ban lift",)]
    tried += [("pg_dump",), ("pg_restore",)]
    assert sorted(shown(*words) for words in tried) == sorted(commands(DOCUMENT))


@pytest.fixture
def pair(postgres_url: str, tmp_path: Path) -> object:
    with Installed(tmp_path / "a", "one", postgres_url) as one, Installed(tmp_path / "b", "two", postgres_url) as two:
        yield one, two


def test_two_nodes_as_the_units_start_them(pair: tuple[Installed, Installed], at: At, tmp_path: Path) -> None:
    one, two = pair
    table = run(shown("node ls"), tmp_path, http=f"127.0.0.1:{one.http_port}")
    assert f"127.0.0.1:{one.mqtt_port}" in table and f"127.0.0.1:{two.mqtt_port}" in table
    with Balancer(pair) as balancer:
        vehicle = at(one, "vehicle-17", **durable(V5))
        vehicle.subscribe("commands/17", 1)
        said = run(shown("node drain"), tmp_path, http=f"127.0.0.1:{one.http_port}")
        assert said.endswith("one: empty\n")
        assert vehicle.ended() == 0x9C
        wait_for(lambda: not one.running, 40, "it ends")
        one.start()  # as systemd would
        vehicle.dial = Dial(port=balancer.port, client_id="vehicle-17", version=V5, **durable(V5))
        back = PahoClient(vehicle.dial).connect()
        assert back.session_present
        assert "disconnected" in run(shown("session disconnect"), tmp_path, http=f"127.0.0.1:{one.http_port}")
        assert back.ended() == 0x98
        back.close()
        for words in ("ban add client", "ban add address"):
            assert "is banned" in run(shown(words), tmp_path, http=f"127.0.0.1:{one.http_port}")
        table = run(shown("ban ls"), tmp_path, http=f"127.0.0.1:{one.http_port}")
        assert "vehicle-17" in table and "10.1.0.0/16" in table and "sends nonsense" in table
        with pytest.raises(Refused) as refused:
            PahoClient(dataclasses.replace(vehicle.dial, port=one.mqtt_port)).connect()
        assert refused.value.reason == 0x8A
        assert "may connect" in run(shown("ban lift"), tmp_path, http=f"127.0.0.1:{one.http_port}")
        assert "deleted" in run(shown("session delete"), tmp_path, http=f"127.0.0.1:{one.http_port}")
    drain = two.words("ExecStop")
    env = {**os.environ, "HOLDFAST_HTTP": f"127.0.0.1:{two.http_port}"}
    assert subprocess.run(drain, env=env, timeout=60, capture_output=True, check=False).returncode == 0
    assert two.running and not two.ready()
    assert two.stop() == 0


def test_what_haproxy_is_told_fits_the_nodes() -> None:
    (text,) = fenced(DOCUMENT, "haproxy")
    assert "option httpchk GET /readyz" in text
    assert re.findall(r"^ +server (\w+) ", text, re.MULTILINE) == ["one", "two"]
    assert "check port 8083" in text


# -- backup and restore ------------------------------------------------------------------------------------------------


def fill(connect: Callable[..., PahoClient], name: str) -> PahoClient:
    """A vehicle that has read half of what there is for it, and stays connected."""
    vehicle = connect(name, manual_ack=True, **durable(V5))
    vehicle.subscribe(f"{name}/#", 1)
    publisher = connect(f"{name}-p")
    for n in range(10):
        publisher.publish(f"{name}/x", str(n), retain=n == 9)
    for message in vehicle.take(10)[:5]:
        vehicle.ack(message)
    vehicle.publish("sync", b"")
    return vehicle


def check(connect: Callable[..., PahoClient], name: str) -> None:
    vehicle = connect(name, **durable(V5))
    assert vehicle.session_present
    assert [message.text for message in vehicle.take(5)] == ["5", "6", "7", "8", "9"]
    vehicle.publish(f"{name}/x", b"end")
    assert vehicle.until(b"end") == []
    other = connect(f"{name}-other")
    other.subscribe(f"{name}/#", 1)
    assert other.next().retain


def in_flight(node: Node, name: str) -> bool:
    return bool(node.get(f"/api/v1/sessions/{name}")["in_flight"] == 5)


def test_sqlite(tmp_path: Path, at: At, name: str) -> None:
    flush = {"cursors.subscription_progress_flush_secs": 0.2}
    with Node(tmp_path / "a", settings=flush) as node:
        vehicle = fill(lambda *given, **how: at(node, *given, **how), name)
        wait_for(lambda: in_flight(node, name), what="the flush")
        stored = tmp_path / "a" / "holdfast-data"
        stored.symlink_to(tmp_path / "a" / "data")
        wait_for(lambda: flushed(stored / "holdfast.db", name), what="the flush is stored")
        run(shown("vacuum into"), tmp_path / "a")
        vehicle.publish(f"{name}/x", b"after the backup")
        node.kill()
    (tmp_path / "b" / "data").mkdir(parents=True)
    shutil.move(tmp_path / "a" / "backup.db", tmp_path / "b" / "data" / "holdfast.db")
    with Node(tmp_path / "b", settings=flush) as node:
        check(lambda *given, **how: at(node, *given, **how), name)


def flushed(path: Path, name: str) -> bool:
    """The row has moved since SUBSCRIBE wrote it."""
    from holdfast.sessions.stored import restore
    from holdfast.store import open_store

    store = open_store(f"sqlite:///{path}")
    try:
        row = store.sessions().read([name])[name]
        return len(restore(row, "", {}).window) == 5
    finally:
        store.close()


def test_postgres(
    cluster: Cluster, postgres_server: PostgresServer, tmp_path: Path, clients: Clients, at: At, name: str
) -> None:
    one, two, _ = cluster
    path = f"{postgres_server._bin}{os.pathsep}{os.environ['PATH']}"
    vehicle = fill(lambda *given, **how: at(one, *given, **how), name)
    wait_for(lambda: in_flight(two, name), what="the flush")
    run(f"PATH={shlex.quote(path)} {quoted(shown('pg_dump'))}", tmp_path, store=str(one.store))
    vehicle.publish(f"{name}/x", b"after the backup")
    empty = postgres_server.database()
    command = quoted(shown("pg_restore")).replace("postgresql://holdfast@db.example/restored", empty)
    run(f"PATH={shlex.quote(path)} {command}", tmp_path)
    with Node(tmp_path / "restored", store=empty, node_id="restored", settings=one.settings) as node:
        check(lambda *given, **how: at(node, *given, **how), name)
    postgres_server.drop(empty)


def quoted(command: str) -> str:
    """A URL of the tests has characters that a shell would take for its own."""
    return re.sub(r"--dbname=(\S+)", r"--dbname='\1'", command)
