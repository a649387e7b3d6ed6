"""`holdfast fanout`, `vehicle` and `why` against a real node, and `holdfast.fanout.send` from a program."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import holdfast.fanout
from e2e.clients import V5
from e2e.conftest import Connect
from holdfast.errors import Conflict, NodeUnavailable, RequestError, UnknownCampaign, Unprocessable
from node import Node, holdfast_command
from processes import wait_for

Run = Callable[..., str]


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Node]:
    with Node(tmp_path_factory.mktemp("node"), settings={"log.shards": 2, "fanout.sweep_secs": 0.5}) as running:
        yield running


@pytest.fixture
def task(name: str) -> str:
    return f"task_{name}_1"


def command(node: Node, *words: str) -> list[str]:
    return [holdfast_command(), *words, "--http", f"127.0.0.1:{node.http_port}"]


@pytest.fixture
def run(node: Node, tmp_path: Path) -> Run:
    """The command's output; `fails=True`: what it says on stderr, in one line."""

    def run(*words: str, fails: bool = False, given: str = "") -> str:
        done = subprocess.run(
            command(node, *words), cwd=tmp_path, capture_output=True, text=True, timeout=60, input=given
        )
        assert (done.returncode != 0) is fails, f"{done.stdout}\n{done.stderr}"
        if fails:
            assert done.stderr.startswith("holdfast: ") and done.stderr.count("\n") == 1, done.stderr
        return done.stderr if fails else done.stdout

    return run


@pytest.fixture
def data(tmp_path: Path) -> str:
    (tmp_path / "payload").write_bytes(b"do this")
    return "payload"


def counts(node: Node, task: str) -> dict[str, int]:
    return {name: count for name, count in node.get(f"/api/v1/fanout/{task}")["counts"].items() if count}


def test_a_campaign_from_send_to_its_end(
    node: Node, run: Run, connect: Connect, data: str, tmp_path: Path, name: str, task: str
) -> None:
    vins = [f"{name}-{n}" for n in range(4)]
    (tmp_path / "ids.txt").write_text("\n".join([*vins, vins[0], ""]))
    said = run("fanout", "send", "--ids", "ids.txt", "--data", data, "--request-id", task, "--dry-run")
    assert "4 vehicles; nothing was sent" in said
    assert re.search(r"in the file before: +1\n", said)
    sending = ["fanout", "send", "--ids", "ids.txt", "--data", data, "--request-id", task, "--paused"]
    said = run(*sending, "--rate", "1000", "--expires", "3600", "--priority", "7")
    assert said == f"{task} is sent: 4 ids; it begins campaign {task}/1\n"
    dry = json.loads(run(*sending, "--dry-run", "--json"))
    assert dry == {
        "ids": 4,
        "repeated": 1,
        "connected": 0,
        "offline": 4,
        "overlapping": 0,
    }  # a paused one sends to nobody
    vehicles = [connect(vin, V5) for vin in vins[:2]]
    for vin, vehicle in zip(vins, vehicles, strict=False):
        vehicle.subscribe(f"agent/{vin}/proxy/request/+", 1)
    assert "paused from the beginning" in run("fanout", "show", task)
    said = run("why", "vin", vins[0])
    assert f"{vins[0]}: paused" in said and f"  holdfast fanout resume {task} --number 1" in said
    assert "running" in run("fanout", "resume", task, "--number", "1")
    wait_for(lambda: counts(node, task) == {"acked": 2, "waiting": 2})
    assert vehicles[0].next().text == "do this"
    table = run("fanout", "ls", "--state", "running")
    assert f"{task}/1" in table
    assert json.loads(run("fanout", "ls", "--json"))[0]["request_id"] == task
    assert "offline" in run("why", "vin", vins[2])
    shown = run("vehicle", "show", vins[2])
    assert "not connected; 1 wait" in shown and f"{task}/1" in shown
    assert f"{vins[2]}: 1 deliveries cancelled" in run("vehicle", "retire", vins[2])
    assert "1 ended" in run("fanout", "cancel", task, "--vin", vins[3])
    assert "1 retried" in run("fanout", "retry", task, "--vin", vins[3])
    listed = run("fanout", "deliveries", task, "--state", "cancelled")
    assert vins[2] in listed and "vehicle retired" in listed and vins[0] not in listed
    lines = [json.loads(line) for line in run("fanout", "deliveries", task, "--ndjson").splitlines()]
    assert [line["vin"] for line in lines] == vins[:3]
    assert "--after" in run("fanout", "deliveries", task, "--limit", "1")
    assert "rate_per_sec: 5.0" in run("fanout", "edit", task, "--rate", "5") + run("fanout", "show", task)
    assert "paused by an operator" in run("fanout", "pause", task)
    assert "cancelled" in run("fanout", "cancel", task)
    watched = run("fanout", "watch", task)
    assert watched.endswith(f"{task}/1: closed (cancelled by an operator), 4 targets, takes no more batches\n")
    assert "acked" in run("vehicle", "show", vins[0])
    assert "rows removed" in run("fanout", "gc")
    assert json.loads(run("fanout", "show", task, "--json"))["state"] == "closed"


def test_waves_on_the_command_line(node: Node, run: Run, data: str, task: str, name: str) -> None:
    waves = ["--wave", "1,acked=90,min-ended=1,pause=1.5,timeout=60", "--wave", "50%", "--final"]
    windows = ["--window", "22:00-05:00@6,7", "--window", "00:00-24:00"]
    more = ["--ramp", "60", "--rate", "10", "--in-flight", "5", "--bytes-per-sec", "1000", "--abort-failed", "5"]
    times = ["--start-at", "2030-01-01T00:00:00Z", "--end-at", "2030-02-01T00:00:00Z", "--result", "--key", name]
    sending = ["fanout", "send", "--ids", "-", "--data", data, "--request-id", task]
    said = json.loads(run(*sending, *waves, *windows, *more, *times, "--json", given=f"{name}a\n{name}b\n"))
    assert said["accepted"] == 2 and said["began"]
    assert node.get(f"/api/v1/fanout/{task}")["options"] == {
        "start_at": "2030-01-01T00:00:00Z",
        "end_at": "2030-02-01T00:00:00Z",
        "windows": [{"begin": "22:00", "end": "05:00", "days": [6, 7]}, {"begin": "00:00", "end": "24:00"}],
        "rate_per_sec": 10,
        "ramp_secs": 60,
        "bytes_per_sec": 1000,
        "in_flight_max": 5,
        "waves": [
            {"vehicles": 1, "acked_percent": 90, "min_ended": 1, "pause_secs": 1.5, "timeout_secs": 60},
            {"percent": 50},
        ],
        "abort_failed_percent": 5,
        "result": True,
    }
    again = run(*sending, *waves, *windows, *more, *times, given=f"{name}a\n{name}b\n")
    assert "was sent before, under this key" in again
    run("fanout", "edit", task, "--wave", "1,acked=50", "--wave", "50%")
    assert node.get(f"/api/v1/fanout/{task}")["options"]["waves"][0]["acked_percent"] == 50
    assert "running" in run("fanout", "advance", task)
    assert "wave 1 of 3" in run("fanout", "show", task)


@pytest.mark.parametrize("kind", ["csv", "tsv", "parquet", "arrow", "arrows", "txt"])
def test_ids_come_from_any_file(
    node: Node, run: Run, data: str, tmp_path: Path, name: str, task: str, kind: str
) -> None:
    vins = [f"{name} {n:05}" for n in range(12_000)]
    path = tmp_path / f"ids.{kind}"
    table = pa.table({"model": pa.array(["x"] * len(vins)), "vin": pa.array(vins)})
    match kind:
        case "csv":
            path.write_text("Model,VIN\n" + "".join(f'x,"{vin}"\n' for vin in vins))
        case "tsv":
            path.write_text("".join(f"{vin}\tx\n" for vin in vins))
        case "parquet":
            pq.write_table(table, path)
        case "arrow":
            with pa.ipc.new_file(path, table.schema) as writer:
                writer.write_table(table, max_chunksize=1_000)
        case "arrows":
            with pa.ipc.new_stream(path, table.schema) as writer:
                writer.write_table(table, max_chunksize=1_000)
        case _:
            path.write_bytes(b"\xef\xbb\xbf" + "\r\n".join(vins).encode())
    said = json.loads(run("fanout", "send", "--ids", path.name, "--data", data, "--request-id", task, "--json"))
    assert said["accepted"] == 12_000
    for vin in (vins[0], vins[-1]):
        wait_for(lambda vin=vin: node.get(f"/api/v1/vehicles/{vin}")["waiting"], what=vin)
    run("fanout", "cancel", task)


WRONG: list[tuple[list[str], str]] = [
    (["fanout", "show", "nonsense"], "'nonsense'"),
    (["fanout", "show", "task_absent_1"], "there is no campaign task_absent_1"),
    (["fanout", "pause", "task_absent_1", "--number", "3"], "task_absent_1/3"),
    (["fanout", "edit", "task_absent_1"], "nothing to change"),
    (["fanout", "edit", "task_absent_1", "--rate", "0"], "rate_per_sec"),
    (["fanout", "ls", "--state", "odd"], "state"),
    (["vehicle", "show", "a/b"], "'a/b'"),
    (["why", "vin", "a#"], "'a#'"),
    (["fanout", "cancel", "task_absent_1", "--vin", "a+"], "'a+'"),
    (["fanout", "send", "--ids", "absent", "--data", "payload"], "absent"),
    (["fanout", "send", "--ids", "-", "--data", "absent"], "absent"),
    (["fanout", "send", "--ids", "-", "--data", "-"], "cannot both be -"),
    (["fanout", "send", "--ids", "-", "--data", "payload"], "ids: expected at least one"),
    (["fanout", "send", "--ids", "bad.txt", "--data", "payload"], r"'x\x1b[31m/'"),
    (["fanout", "send", "--ids", "bad.txt", "--data", "payload", "--dry-run"], "contains '/'"),
    (["fanout", "send", "--ids", "bad.csv", "--data", "payload"], "line 3 has no vin"),
    (["fanout", "send", "--ids", "payload.parquet", "--data", "payload"], "payload.parquet"),
    (["fanout", "send", "--ids", "good.txt", "--data", "large"], "524289"),
    (["fanout", "send", "--ids", "good.txt", "--data", "payload", "--request-id", "job_1"], "'job_1'"),
    (["fanout", "send", "--ids", "good.txt", "--data", "payload", "--wave", "few"], "'few'"),
    (["fanout", "send", "--ids", "good.txt", "--data", "payload", "--wave", "5%,speed=1"], "'5%,speed=1'"),
    (["fanout", "send", "--ids", "good.txt", "--data", "payload", "--window", "night"], "'night'"),
    (["fanout", "send", "--ids", "good.txt", "--data", "payload", "--window", "25:00-26:00"], "'25:00'"),
    (["fanout", "send", "--ids", "good.txt", "--data", "payload", "--expires", "soon"], "'soon'"),
    (["fanout", "send", "--ids", "good.txt", "--data", "payload", "--resend", "maybe"], "'maybe'"),
    (["fanout", "send", "--ids", "good.txt", "--data", "payload", "--rate", "-1"], "rate_per_sec"),
]


@pytest.mark.parametrize(
    ("words", "named"), WRONG, ids=lambda value: " ".join(value) if isinstance(value, list) else ""
)
def test_what_is_wrong_is_one_line_that_names_it(
    run: Run, data: str, tmp_path: Path, words: list[str], named: str
) -> None:
    (tmp_path / "good.txt").write_text("v1\n")
    (tmp_path / "bad.txt").write_text("v1\nx\x1b[31m/\n")
    (tmp_path / "bad.csv").write_text("vin,model\nv1,x\n,y\n")
    (tmp_path / "large").write_bytes(b"x" * (512 * 1024 + 1))
    (tmp_path / "payload.parquet").write_bytes(b"no parquet")
    assert named in run(*words, fails=True)


def test_nobody_answers(tmp_path: Path) -> None:
    (tmp_path / "x").write_text("v1")
    for words in (["ls"], ["send", "--ids", "x", "--data", "x"]):
        done = subprocess.run(
            [holdfast_command(), "fanout", *words, "--http", "127.0.0.1:1"],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert done.returncode == 1 and "no node answers at" in done.stderr and done.stderr.count("\n") == 1


def test_what_clients_chose_is_shown_as_it_is(
    node: Node, run: Run, connect: Connect, data: str, tmp_path: Path, name: str
) -> None:
    vin, task = f"{name}[red]x[]\x1b[31m", f"task_[bold]{name}_1"
    (tmp_path / "ids.arrow").write_bytes(b"")
    with pa.ipc.new_file(tmp_path / "ids.arrow", pa.schema([("vin", pa.string())])) as writer:
        writer.write_table(pa.table({"vin": [vin]}))
    run("fanout", "send", "--ids", "ids.arrow", "--data", data, "--request-id", task)
    shown = rf"{name}[red]x[]\x1b[31m"
    assert shown in run("why", "vin", vin)
    assert task in run("fanout", "ls")
    run("fanout", "cancel", task, "--vin", vin)
    assert shown in run("fanout", "deliveries", task)
    assert task in run("vehicle", "show", vin)


def test_watching_ends_with_the_deliveries_or_with_ctrl_c(
    node: Node, run: Run, connect: Connect, data: str, tmp_path: Path, name: str, task: str
) -> None:
    (tmp_path / "ids").write_text(f"{name}\n")
    run("fanout", "send", "--ids", "ids", "--data", data, "--request-id", task)
    watching = subprocess.Popen(command(node, "fanout", "watch", task), stdout=subprocess.PIPE, text=True)
    assert watching.stdout is not None
    assert watching.stdout.readline() == f"{task}/1 running: 1 waiting\n"
    connect(name, V5).subscribe(f"agent/{name}/proxy/request/+", 1)
    assert "acked" in run("fanout", "watch", task, "--until-done")
    line = watching.stdout.readline()
    while "acked" not in line:
        line = watching.stdout.readline()
    watching.send_signal(signal.SIGINT)
    assert watching.communicate(timeout=20)[0] == f"{task}/1 goes on\n"
    assert watching.returncode == 0


# -- from a program ----------------------------------------------------------------------------------------------------


def test_a_program_sends_to_a_node(node: Node, connect: Connect, name: str, task: str) -> None:
    vehicle = connect(f"{name}-7", V5)
    vehicle.subscribe(f"agent/{name}-7/proxy/request/+", 1)
    seen: list[int] = []
    vins = (f"{name}-{n}" for n in range(25_000))
    done = holdfast.fanout.send(node.http, vins, task, b"\x00\xff", key=name, final=True, progress=seen.append)
    assert done == (task, 1, done.campaign, 25_000, True, False)
    assert seen[-1] == 25_000 and len(seen) > 5
    assert vehicle.next(20).payload == b"\x00\xff"
    again = holdfast.fanout.send(
        node.http, (f"{name}-{n}" for n in range(25_000)), task, b"\x00\xff", key=name, final=True
    )
    assert again == done._replace(repeated=True)
    holdfast.fanout.send(node.http, [name], f"{task}1", "text", campaign={"paused": True}, expires=60, priority=0)
    assert node.get(f"/api/v1/fanout/{task}1")["state"] == "paused"


def test_a_program_is_told_what_is_wrong(node: Node, name: str, task: str) -> None:
    send: Any = holdfast.fanout.send
    send(node.http, [name], task, "x", campaign={"rate_per_sec": 5})
    wrong: list[tuple[type[Exception], Callable[[], Any]]] = [
        (Unprocessable, lambda: send(node.http, [], task, "x")),
        (Unprocessable, lambda: send(node.http, ["a/b"], task, "x")),
        (Unprocessable, lambda: send(node.http, [name], "job", "x")),
        (Unprocessable, lambda: send(node.http, [name], task, "x", priority=11)),
        (Unprocessable, lambda: send(node.http, [name], task, "x", campaign={"speed": 1})),
        (Unprocessable, lambda: send(node.http, [name], task, b"x" * (1 << 20))),
        (Conflict, lambda: send(node.http, [name], task, "x", campaign={"rate_per_sec": 6})),
        (UnknownCampaign, lambda: send(node.http, [name], task, "x", campaign={"number": 9})),
        (NodeUnavailable, lambda: send("http://127.0.0.1:1", [name], task, "x")),
        (RequestError, lambda: send("mqtt://127.0.0.1", [name], task, "x")),
        (RequestError, lambda: send("memory:", [name], task, "x")),
    ]
    for error, call in wrong:
        with pytest.raises(error):
            call()


def test_a_program_hears_early_that_its_request_is_refused(node: Node, name: str, task: str) -> None:
    """The node answers when it has read the first line; ids that go on for ever are not waited for."""

    def endless() -> Iterator[str]:
        n = 0
        give_up = time.monotonic() + 20
        while time.monotonic() < give_up:
            n += 1
            yield f"{name}{n}"
        raise AssertionError("nobody has stopped it")

    with pytest.raises(Unprocessable, match="maybe"):
        holdfast.fanout.send(node.http, endless(), task, "x", resend="maybe")


def test_ids_that_fail_on_the_way_leave_nothing(node: Node, name: str, task: str) -> None:
    def broken() -> Iterator[str]:
        for n in range(20_000):
            yield f"{name}{n}"
        raise LookupError("the source is gone")

    for url in (node.http, f"sqlite:///{node.folder}/data/holdfast.db"):
        with pytest.raises(LookupError):
            holdfast.fanout.send(url, broken(), task, "x")
    assert all(one["request_id"] != task for one in node.get("/api/v1/fanout")["campaigns"])


def test_a_program_sends_to_the_store_of_a_node_that_runs(node: Node, connect: Connect, name: str, task: str) -> None:
    url = f"sqlite:///{node.folder}/data/holdfast.db"
    vehicles = {vin: connect(vin, V5) for vin in (f"{name}-0", f"{name}-11999")}
    for vin, vehicle in vehicles.items():
        vehicle.subscribe(f"agent/{vin}/proxy/request/+", 1)
    few = holdfast.fanout.send(url, [f"{name}-0"], task, "few")
    assert (few.number, few.accepted, few.began) == (1, 1, True)
    assert vehicles[f"{name}-0"].next(20).text == "few"
    many = holdfast.fanout.send(url, (f"{name}-{n}" for n in range(12_000)), f"{task}1", "many", key=name)
    assert many.accepted == 12_000
    assert {vehicle.next(20).text for vehicle in vehicles.values()} == {"many"}
    again = holdfast.fanout.send(url, (f"{name}-{n}" for n in range(12_000)), f"{task}1", "many", key=name)
    assert again == many._replace(repeated=True)
    with pytest.raises(Conflict):
        holdfast.fanout.send(url, [name], f"{task}1", "many", key=name)


def test_a_program_sends_before_there_was_a_node(tmp_path: Path, name: str, task: str) -> None:
    url = f"sqlite:///{tmp_path}/node/data/holdfast.db"
    (tmp_path / "node" / "data").mkdir(parents=True)
    holdfast.fanout.send(url, [f"{name}a", f"{name}b"], task, "one")
    assert holdfast.fanout.send(url, [f"{name}a"], task, "two").number == 2
    with Node(tmp_path / "node") as node:
        assert node.get(f"/api/v1/fanout/{task}/1")["counts"]["superseded"] == 1
        assert counts(node, task) == {"waiting": 1}
