"""A real node for tests: `holdfast serve` as a process of its own, on free loopback ports, to be killed at will."""

from __future__ import annotations

import contextlib
import http.client
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import httpx

from servers import LAUNCH

START_SECONDS = 30.0
STOP_SECONDS = 20.0
LOOPBACK = "127.0.0.1"

LISTENER = object()
"""A setting's value: a loopback address with a port of its own."""


class NodeFailed(AssertionError):
    """The node did not do as told; the message ends with what it last logged."""


class Node:
    """One `holdfast serve`, its data and its ports. Data and ports outlive the process: `kill()`, then `restart()`.

    `settings` are given as `--set section.key=value`. A value that is LISTENER becomes an address with a free
    port, which `ports` then tells by key: `settings={"mqtt.websocket": LISTENER}`.
    """

    def __init__(
        self,
        folder: Path,
        *,
        store: str | None = None,
        metadata: str | None = None,
        node_id: str = "test",
        settings: Mapping[str, Any] | None = None,
        environment: Mapping[str, str] | None = None,
        start: bool = True,
    ):
        self.folder = folder
        self.store, self.metadata, self.node_id = store, metadata, node_id
        self.settings = dict(settings or {})
        self.environment = dict(environment or {})
        """Beside what this process has."""
        self.mqtt_port = self.http_port = 0
        self.ports: dict[str, int] = {}
        self._process: subprocess.Popen[bytes] | None = None
        folder.mkdir(parents=True, exist_ok=True)
        if start:
            self.start()

    @property
    def mqtt(self) -> tuple[str, int]:
        return LOOPBACK, self.mqtt_port

    @property
    def http(self) -> str:
        """Where its HTTP API is: `http://127.0.0.1:PORT`."""
        return f"http://{LOOPBACK}:{self.http_port}"

    @property
    def pid(self) -> int:
        assert self._process is not None, "not running"
        return self._process.pid

    @property
    def running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def __enter__(self) -> Node:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    def start(self) -> None:
        """Returns when `GET /readyz` says 200. Ports once taken are kept."""
        assert not self.running, "it runs already"
        attempts = 3 if self.mqtt_port == 0 else 1
        for attempt in range(attempts):
            if self.mqtt_port == 0:
                self._take_ports()
            self._process = self._launch()
            try:
                self._await_ready()
                return
            except NodeFailed:
                if attempt + 1 == attempts or "address already in use" not in self.logs().lower():
                    raise
                self.mqtt_port = 0  # somebody else was quicker to take one

    def _take_ports(self) -> None:
        listeners = [key for key, value in self.settings.items() if value is LISTENER]
        self.mqtt_port, self.http_port, *more = free_ports(2 + len(listeners))
        self.ports = dict(zip(listeners, more, strict=True))

    def command(self) -> list[str]:
        command = [holdfast_command(), "serve", "--data", str(self.folder / "data"), "--node-id", self.node_id]
        command += ["--mqtt", f"{LOOPBACK}:{self.mqtt_port}", "--http", f"{LOOPBACK}:{self.http_port}"]
        if self.store is not None:
            command += ["--store", self.store]
        if self.metadata is not None:
            command += ["--metadata", self.metadata]
        for key, value in self.settings.items():
            command += ["--set", f"{key}={f'{LOOPBACK}:{self.ports[key]}' if value is LISTENER else value}"]
        return command

    def _launch(self) -> subprocess.Popen[bytes]:
        with (self.folder / "node.log").open("ab") as log:
            owner = [str(os.getuid()), str(os.getgid()), str(int(signal.SIGKILL))]
            return subprocess.Popen(
                [sys.executable, "-I", "-S", "-c", LAUNCH, *owner, *self.command()],
                cwd=self.folder,
                env={**os.environ, **self.environment},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def _await_ready(self) -> None:
        process = self._process
        assert process is not None
        give_up = time.monotonic() + START_SECONDS
        while not self.ready():
            if process.poll() is not None or time.monotonic() > give_up:
                self.kill()
                raise NodeFailed(f"the node did not become ready (exit {process.returncode}):\n{self.log_tail()}")
            time.sleep(0.02)

    def ready(self) -> bool:
        connection = http.client.HTTPConnection(LOOPBACK, self.http_port, timeout=5)
        try:
            connection.request("GET", "/readyz")
            return connection.getresponse().status == 200
        except (OSError, http.client.HTTPException):
            return False
        finally:
            connection.close()

    def kill(self) -> None:
        """SIGKILL: nothing is tidied up. Returns when it is gone."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.wait()

    def stop(self) -> int:
        """SIGTERM, as an operator would: returns its exit code when it has stopped by itself."""
        process = self._process
        assert process is not None, "not running"
        process.terminate()
        try:
            code = process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self.kill()
            raise NodeFailed(f"still running {STOP_SECONDS} s after SIGTERM:\n{self.log_tail()}") from None
        self._process = None
        return code

    def restart(self) -> None:
        """Start again on the same data and ports; a node that still runs is stopped first."""
        if self.running:
            self.stop()
        self.start()

    def logs(self) -> str:
        """Everything it has written since it was first started."""
        path = self.folder / "node.log"
        return path.read_text(errors="replace") if path.exists() else ""

    def log_tail(self, lines: int = 40) -> str:
        return "\n".join(self.logs().splitlines()[-lines:])

    def get(self, path: str, **query: Any) -> Any:
        """The JSON answer of its HTTP API."""
        answer = httpx.get(self.http + path, params=query, timeout=10)
        answer.raise_for_status()
        return answer.json()

    def post(self, path: str, body: Any) -> Any:
        answer = httpx.post(self.http + path, json=body, timeout=10)
        answer.raise_for_status()
        return answer.json() if answer.content else None


def holdfast_command() -> str:
    """The installed command of the environment these tests run in."""
    beside = Path(sys.executable).with_name("holdfast")
    found = str(beside) if beside.exists() else shutil.which("holdfast")
    assert found, "no `holdfast` command: make setup"
    return found


def free_ports(count: int) -> list[int]:
    """Ports nobody listens on, from below those the system gives to outgoing connections.

    A client that keeps trying to reach a node that is down would else, now and then, take the node's own port
    as its source and find itself connected to itself.
    """
    found: list[int] = []
    while len(found) < count:
        port = random.randrange(15_000, 32_000)
        with socket.socket() as attempt, contextlib.suppress(OSError):
            attempt.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            attempt.bind((LOOPBACK, port))
            if port not in found:
                found.append(port)
    return found
