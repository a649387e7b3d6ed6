"""docs/fanout.md, followed by somebody in a hurry: its commands and requests in their order, on one node."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import httpx

from e2e.clients import V5, Dial, PahoClient
from holdfast.fanout.requests import CampaignOptions, Request
from holdfast.settings import FanoutSettings
from node import Node
from processes import wait_for
from test_docs import commands, fenced

DOCUMENT = Path(__file__).parents[2] / "docs" / "fanout.md"

SAYS = {
    "--dry-run": r"4 vehicles; nothing was sent\n +connected to this node: +2\n",
    "task_logs_1 --expires": r"4 ids; it begins campaign task_logs_1/1",
    "fanout show": r"task_logs_1/1: running, 4 targets",
    "fanout ls": r"task_logs_1/1",
    "why vin LSVA0003": r"offline",
    "vehicle show LSVA0003": r"not connected; 1 wait",
    "vehicle retire": r"1 deliveries cancelled",
    "task_firmware_7 --final": r"begins campaign task_firmware_7/1",
    "fanout pause": r"paused",
    "fanout edit": r"paused",
    "fanout resume": r"running",
    "cancel task_logs_1 --vin": r"1 ended",
    "--state cancelled": r"LSVA0003.*\n.*LSVA0004",
    "fanout retry": r"1 retried",
    "fanout watch": r"3 acked, 1 cancelled",
    "cancel task_firmware_7": r"cancelled",
    "fanout gc": r"rows removed",
}
"""What commands that have these words in them say."""


def vehicle(node: Node, vin: str) -> PahoClient:
    client = PahoClient(Dial(port=node.mqtt_port, client_id=vin, version=V5)).connect()
    client.subscribe(f"agent/{vin}/proxy/request/+", 1)
    return client


def test_commands_and_requests(tmp_path: Path) -> None:
    with Node(tmp_path / "node") as node:
        fleet = [vehicle(node, "LSVA0001"), vehicle(node, "LSVA0002")]
        try:
            for command in commands(DOCUMENT):
                if "fanout watch" in command:
                    fleet.append(vehicle(node, "LSVA0003"))  # or it would go on for long
                if "fanout show" in command:
                    wait_for(lambda: node.get("/api/v1/fanout/task_logs_1")["counts"]["acked"] == 2)
                run(node, command, tmp_path)
            assert (tmp_path / "ended.ndjson").read_text().count("\n") == 4
            for request in fenced(DOCUMENT, "http"):
                ask(node, request)
        finally:
            for client in fleet:
                client.close()


def run(node: Node, command: str, folder: Path) -> None:
    line = command.replace(".venv/bin/", f"{Path(sys.executable).parent}/")
    env = {**os.environ, "HOLDFAST_HTTP": f"127.0.0.1:{node.http_port}"}
    done = subprocess.run(line, shell=True, cwd=folder, capture_output=True, text=True, timeout=60, env=env)
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    said = [pattern for words, pattern in SAYS.items() if words in re.sub(r" +", " ", command)]
    for pattern in said[:1]:
        assert re.search(pattern, done.stdout), f"{command}\n{done.stdout}"


def ask(node: Node, request: str) -> None:
    head, _, body = request.partition("\n\n")
    first, *more = head.strip().splitlines()
    method, path = first.split()
    headers = dict(line.split(": ") for line in more)
    answer = httpx.request(method, node.http + path, content=body.strip().encode(), headers=headers, timeout=20)
    assert answer.status_code in (200, 201, 202), f"{request}\n{answer.text}"


def test_every_saying_belongs_to_a_command() -> None:
    text = re.sub(r" +", " ", "\n".join(commands(DOCUMENT)))
    assert [words for words in SAYS if words not in text] == []


def test_every_field_and_the_settings_it_names_are_there() -> None:
    text = DOCUMENT.read_text()
    for name in (*Request.__struct_fields__, *CampaignOptions.__struct_fields__):
        assert f"`{name}`" in text or f"`{name}:" in text or name in ("encoding", "number"), name
    for name in re.findall(r"`fanout\.(\w+)", text):
        assert hasattr(FanoutSettings(), name), name


def test_every_answer_of_why_is_explained() -> None:
    source = (DOCUMENT.parents[1] / "src" / "holdfast" / "fanout" / "why.py").read_text()
    given = set(re.findall(r'Answer\(\s*"(\w+)"', source)) - {"unknown", "cancelled", "not_sending"}
    table = DOCUMENT.read_text()
    assert [reason for reason in sorted(given) if f"`{reason}`" not in table] == []
