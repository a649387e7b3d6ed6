"""Fan-out over HTTP on a real node: what is taken, what is refused, and what an operator can see and do."""

from __future__ import annotations

import base64
import hashlib
import itertools
import json
import socket
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import httpx
import pyarrow as pa
import pytest

from e2e.clients import V5, Client
from e2e.conftest import Connect, durable
from e2e.raw import Raw
from holdfast.auth.http_tokens import make_token
from node import Node
from processes import wait_for

NDJSON, CSV, ARROW = "application/x-ndjson", "text/csv", "application/vnd.apache.arrow.stream"
BACKOFF = 3600
COUNTS = ["acked", "awaiting_result", "cancelled", "expired", "failed", "in_flight", "superseded", "waiting"]

_numbers = itertools.count(1)


@pytest.fixture(scope="module", params=["sqlite", "memory"])
def node(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Node]:
    settings = {"fanout.backoff_secs": BACKOFF, "fanout.backoff_secs_max": BACKOFF, "log.shards": 2}
    store = None if request.param == "sqlite" else "memory:"
    with Node(tmp_path_factory.mktemp("node"), store=store, settings=settings) as running:
        yield running


@pytest.fixture
def task() -> str:
    """A request id that no other test uses."""
    return f"task_t{next(_numbers)}x_1"


class Api:
    """The node's HTTP API."""

    def __init__(self, node: Node, token: str | None = None):
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        self.http = httpx.Client(base_url=f"{node.http}/api/v1", timeout=20, headers=headers)

    def __enter__(self) -> Api:
        return self

    def __exit__(self, *_: object) -> None:
        self.http.close()

    def send(self, task: str, *vins: str, **more: Any) -> dict[str, Any]:
        answer = self.try_send({"request_id": task, "ids": list(vins), **({"data": "x"} | more)})
        assert answer.status_code == 202, answer.text
        return answer.json()  # type: ignore[no-any-return]

    def try_send(self, body: Any) -> httpx.Response:
        return self.http.post("/fanout", json=body)

    def stream(self, kind: str, content: Any, request: dict[str, Any] | None = None) -> httpx.Response:
        query = {} if request is None else {"request": json.dumps(request)}
        return self.http.post("/fanout", params=query, content=content, headers={"Content-Type": kind})

    def show(self, task: str, number: int | None = None) -> dict[str, Any]:
        return self.get(f"/fanout/{task}" + (f"/{number}" if number is not None else ""))

    def counts(self, task: str, number: int | None = None) -> dict[str, int]:
        shown = self.show(task, number)
        assert sorted(shown["counts"]) == COUNTS
        assert sum(shown["counts"].values()) == shown["targets"]
        return {name: count for name, count in shown["counts"].items() if count}

    def get(self, path: str, **query: Any) -> Any:
        answer = self.http.get(path, params=query)
        assert answer.status_code == 200, answer.text
        return answer.json()

    def order(self, task: str, verb: str, body: Any = None, number: int | None = None) -> dict[str, Any]:
        answer = self.try_order(task, verb, body, number)
        assert answer.status_code == 200, answer.text
        return answer.json()  # type: ignore[no-any-return]

    def try_order(self, task: str, verb: str, body: Any = None, number: int | None = None) -> httpx.Response:
        path = f"/fanout/{task}" + (f"/{number}" if number is not None else "")
        return self.http.post(f"{path}/{verb}", json=body)

    def why(self, vin: str) -> dict[str, str]:
        return self.get(f"/why/vin/{vin}")  # type: ignore[no-any-return]


@pytest.fixture
def api(node: Node) -> Iterator[Api]:
    with Api(node) as made:
        yield made


Vehicle = Callable[..., Client]


@pytest.fixture
def vehicle(connect: Connect) -> Vehicle:
    """`vehicle(vin, qos=1, **dial)`: connected, and subscribed to its requests."""

    def come(vin: str, qos: int = 1, **dial: Any) -> Client:
        client: Client = connect(vin, **{"version": V5, **dial})
        client.subscribe(f"agent/{vin}/proxy/request/+", qos)
        return client

    return come


def error(answer: httpx.Response) -> str:
    return str(answer.json()["error"])


# -- sending -----------------------------------------------------------------------------------------------------------


def test_a_vehicle_that_is_there_gets_it_and_one_that_is_not_gets_it_when_it_comes(
    api: Api, vehicle: Vehicle, name: str, task: str
) -> None:
    here = vehicle(f"{name}a")
    said = api.send(task, f"{name}a", f"{name}b", data="hello ü")
    assert (said["number"], said["accepted"], said["began"], said["repeated"]) == (1, 2, True, False)
    got = here.next()
    assert (got.topic, got.text, got.qos) == (f"agent/{name}a/proxy/request/{task}", "hello ü", 1)
    assert got.properties["ResponseTopic"] == f"agent/{name}a/proxy/ack/{task}"
    wait_for(lambda: api.counts(task) == {"acked": 1, "waiting": 1})
    assert vehicle(f"{name}b").next().text == "hello ü"
    wait_for(lambda: api.counts(task) == {"acked": 2})
    shown = api.show(task)
    assert (shown["request_id"], shown["number"], shown["state"]) == (task, 1, "running")
    assert shown["data_sha1"] == hashlib.sha1("hello ü".encode()).hexdigest()


def test_a_payload_can_be_sent_apart_and_be_binary(api: Api, vehicle: Vehicle, name: str, task: str) -> None:
    data = bytes(range(256))
    sha1 = hashlib.sha1(data).hexdigest()
    answer = api.http.put(f"/payloads/{sha1}", content=data)
    assert (answer.status_code, answer.json()) == (201, {"data_sha1": sha1})
    client = vehicle(name)
    api.send(task, name, data=None, data_sha1=sha1)
    assert client.next().payload == data
    other = data[::-1]
    api.send(f"{task}0", name, data=base64.b64encode(other).decode(), encoding="base64")
    assert client.next().payload == other


def test_the_same_id_with_other_data_is_another_campaign(api: Api, name: str, task: str) -> None:
    assert api.send(task, name, data="one")["number"] == 1
    assert api.send(task, name, data="one")["began"] is False
    assert api.send(task, name, data="two")["number"] == 2
    wait_for(lambda: api.counts(task, 1) == {"superseded": 1})
    assert api.counts(task) == api.counts(task, 2) == {"waiting": 1}
    assert api.show(task, 1)["repeated"] == 1
    assert api.send(task, f"{name}b", data="two", campaign={"number": 2})["number"] == 2


def test_a_repeat_under_its_key_is_harmless(api: Api, name: str, task: str) -> None:
    first = api.send(task, name, key=f"k{name}")
    again = api.send(task, name, key=f"k{name}")
    assert again == {**first, "repeated": True}
    other = api.try_send({"request_id": task, "ids": [f"{name}b"], "data": "x", "key": f"k{name}"})
    assert other.status_code == 409 and f"k{name}" in error(other)
    assert api.counts(task) == {"waiting": 1}


def test_the_ids_of_a_stream_belong_to_what_its_key_means(api: Api, name: str, task: str) -> None:
    request = {"request_id": task, "data": "x", "key": f"k{name}"}
    first = api.stream(CSV, f"{name}a\n{name}b\n", request)
    assert first.status_code == 202, first.text
    assert api.stream(CSV, f"{name}a\n{name}b\n", request).json() == {**first.json(), "repeated": True}
    other = api.stream(CSV, f"{name}a\n{name}c\n", request)
    assert other.status_code == 409 and f"k{name}" in error(other)


BAD = [
    ({"ids": ["v1"], "data": "x"}, "request_id"),
    ({"request_id": "T", "data": "x"}, "ids: expected at least one, got none"),
    ({"request_id": "T", "ids": [], "data": "x"}, "ids: expected at least one, got none"),
    ({"request_id": "T", "ids": ["v1", "a/b"], "data": "x"}, "'a/b' contains '/'"),
    ({"request_id": "T", "ids": ["a+"], "data": "x"}, "'a+' contains '+'"),
    ({"request_id": "T", "ids": ["a#"], "data": "x"}, "'a#' contains '#'"),
    ({"request_id": "T", "ids": ["a\0"], "data": "x"}, r"'a\x00' contains"),
    ({"request_id": "T", "ids": [""], "data": "x"}, "an id is empty"),
    ({"request_id": "T", "ids": ["v" * 129], "data": "x"}, "more than 128 bytes"),
    ({"request_id": "T", "ids": ["v1", "v2", "v1"], "data": "x"}, "'v1' is given twice"),
    ({"request_id": "T", "ids": [7], "data": "x"}, "ids[0]"),
    ({"request_id": "T", "ids": ["v1"], "data": "x", "urgent": True}, "urgent"),
    ({"request_id": "T", "ids": ["v1"]}, "data or data_sha1"),
    ({"request_id": "T", "ids": ["v1"], "data": "x", "data_sha1": "00" * 20}, "data or data_sha1"),
    ({"request_id": "T", "ids": ["v1"], "data_sha1": "abc"}, "'abc'"),
    ({"request_id": "T", "ids": ["v1"], "data_sha1": "ab" * 20}, "abab"),
    ({"request_id": "T", "ids": ["v1"], "data": "x" * (512 * 1024 + 1)}, "524289"),
    ({"request_id": "T", "ids": ["v1"], "data": "!", "encoding": "base64"}, "base64"),
    ({"request_id": "T", "ids": ["v1"], "data": "x", "encoding": "latin1"}, "latin1"),
    ({"request_id": "T", "ids": ["v1"], "data": "x", "priority": 10}, "priority"),
    ({"request_id": "T", "ids": ["v1"], "data": "x", "resend": "perhaps"}, "perhaps"),
    ({"request_id": "T", "ids": ["v1"], "data": "x", "expires": -1}, "-1"),
    ({"request_id": "T", "ids": ["v1"], "data": "x", "expires": "2020-01-01T00:00:00Z"}, "2020-01-01"),
    ({"request_id": "T", "ids": ["v1"], "data": "x", "expires": "tomorrow"}, "tomorrow"),
    ({"request_id": "T", "ids": ["v1"], "data": "x", "key": ""}, "key"),
    ({"request_id": "T", "ids": ["v1"], "data": "x", "campaign": {"rate_per_sec": 0}}, "rate_per_sec"),
    ({"request_id": "T", "ids": ["v1"], "data": "x", "campaign": {"waves": [{}]}}, "percent or vehicles"),
    ({"request_id": "T", "ids": ["v1"], "data": "x", "campaign": {"speed": 1}}, "speed"),
    ({"request_id": "T", "ids": ["v1"], "data": "x", "campaign": {"number": 10**30}}, "number"),
    ({"request_id": "T", "ids": ["v1"], "data": "x", "campaign": {"number": 2**63 - 1}}, "number"),
    ({"request_id": "T", "ids": ["v1"], "data": "x", "campaign": {"in_flight_max": 2**63}}, "in_flight_max"),
    ({"request_id": "T", "ids": ["v1"], "data": "x", "campaign": {"waves": [{"vehicles": 2**63}]}}, "vehicles"),
    ({"request_id": "T", "ids": ["v1"], "data": "x", "campaign": {"start_at": "soon"}}, "soon"),
    ({"request_id": "T", "ids": ["v1"], "data": "x", "campaign": {"end_at": "2020-01-01T00:00:00Z"}}, "2020-01-01"),
    ({"request_id": "T", "ids": ["v1"], "data": "x", "campaign": {"windows": [{"begin": "9", "end": "10:00"}]}}, "'9'"),
]


@pytest.mark.parametrize(("body", "named"), BAD, ids=lambda value: value if isinstance(value, str) else "")
def test_what_is_wrong_is_named_and_nothing_is_stored(api: Api, task: str, body: dict[str, Any], named: str) -> None:
    if "request_id" in body:
        body = {**body, "request_id": task}
    answer = api.try_send(body)
    assert answer.status_code == 422, answer.text
    assert named in error(answer)
    assert api.http.get(f"/fanout/{task}").status_code == 404


@pytest.mark.parametrize("request_id", ["", "task", "task_x", "task_1", "job_x_1", "task_x_1234567890", "task_a/b_1"])
def test_a_request_id_has_its_form(api: Api, request_id: str) -> None:
    answer = api.try_send({"request_id": request_id, "ids": ["v1"], "data": "x"})
    assert answer.status_code == 422 and repr(request_id) in error(answer)


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"not json",
        b"\xff\xfe",
        b'{"request_id": "task_x_1", "ids": ["\\ud800"], "data": "x"}',
        b'{"request_id": "task_x_1", "ids": ["v1"], "data": "x", "key": "\\ud800"}',
        b'{"request_id": "task_x_1", "ids": ["v1"], "data": "\\ud800"}',
        b'{"request_id": "task_x_1", "ids": ["v1"], "data": "x", "campaign": {"rate_per_sec": NaN}}',
        b'{"request_id": "task_x_1"',
        b"\xef\xbb\xbf{}",
    ],
)
def test_what_is_no_json_is_400(api: Api, body: bytes) -> None:
    answer = api.http.post("/fanout", content=body, headers={"Content-Type": "application/json"})
    assert answer.status_code == 400 and "JSON" in error(answer)


def test_too_much_is_413_and_too_many_ids_belong_into_a_stream(api: Api, task: str) -> None:
    answer = api.try_send({"request_id": task, "ids": ["v"], "data": "x" * (4 << 20)})
    assert answer.status_code == 413 and "larger than" in error(answer)
    answer = api.try_send({"request_id": task, "ids": [f"{n}" for n in range(100_001)], "data": "x"})
    assert answer.status_code == 422 and "100001" in error(answer)
    assert api.http.put(f"/payloads/{'0' * 40}", content=b"x" * (4 << 20)).status_code == 413
    assert api.http.get(f"/fanout/{task}").status_code == 404


def test_a_payload_is_what_its_name_says(api: Api) -> None:
    answer = api.http.put(f"/payloads/{'ab' * 20}", content=b"x")
    assert answer.status_code == 400 and "abab" in error(answer)
    answer = api.http.put("/payloads/xyz", content=b"x")
    assert answer.status_code == 422 and "'xyz'" in error(answer)
    answer = api.http.put(f"/payloads/{'ab' * 20}", content=b"x" * (512 * 1024 + 1))
    assert answer.status_code == 422 and "524289" in error(answer)


def test_other_settings_for_a_campaign_that_runs_are_a_conflict(api: Api, name: str, task: str) -> None:
    api.send(task, f"{name}a", campaign={"rate_per_sec": 5})
    answer = api.try_send({"request_id": task, "ids": [f"{name}b"], "data": "x", "campaign": {"rate_per_sec": 6}})
    assert answer.status_code == 409 and task in error(answer)
    assert api.send(task, f"{name}b")["began"] is False
    assert api.try_send({"request_id": task, "ids": ["v"], "data": "x", "campaign": {"number": 7}}).status_code == 404


# -- ids as a stream ---------------------------------------------------------------------------------------------------


def settled(api: Api, task: str, count: int) -> None:
    """Parts are merged, so repeats are known."""
    wait_for(lambda: api.counts(task) == {"waiting": count}, what=f"{count} wait")


def merged(api: Api, vin: str) -> None:
    """What came as a stream is durable and counted at once, and a vehicle's own a moment later."""
    wait_for(lambda: api.get(f"/vehicles/{vin}")["waiting"], what=f"something waits for {vin}")


def test_ndjson_has_the_request_on_its_first_line(api: Api, name: str, task: str) -> None:
    def body() -> Iterator[bytes]:
        yield json.dumps({"request_id": task, "data": "x"}).encode()[:10]
        yield json.dumps({"request_id": task, "data": "x"}).encode()[10:] + b"\n"
        for n in range(0, 12_000, 100):
            lines = "".join(f'"{name}-{i:05}"\n' if i % 2 else f"{name}-{i:05}\r\n" for i in range(n, n + 100))
            yield lines[:50].encode()
            yield lines[50:].encode()
        yield f"\n\n{name}-last".encode()

    answer = api.stream(NDJSON, body())
    assert answer.status_code == 202, answer.text
    assert answer.json()["accepted"] == 12_001
    settled(api, task, 12_001)
    merged(api, f"{name}-last")
    assert api.get(f"/vehicles/{name}-11999")["waiting"][0]["request_id"] == task


def test_csv_has_them_in_the_column_called_vin_or_in_the_first(api: Api, name: str, task: str) -> None:
    request = {"request_id": task, "data": "x"}
    assert api.stream(CSV, f'model,VIN\nx,{name}a\ny,"{name}b, c"\n', request).status_code == 202
    assert api.stream(CSV, f"{name}c,x\n{name}d,y", request).status_code == 202
    settled(api, task, 4)
    merged(api, f"{name}b, c")
    answer = api.stream(CSV, f"model,vin\nx,{name}e\ny\n", request)
    assert answer.status_code == 422 and "an id is empty" in error(answer)
    settled(api, task, 4)


def test_arrow_has_them_in_a_column(api: Api, name: str, task: str) -> None:
    table = pa.table(
        {"n": pa.array(range(100)), "vin": pa.array([f"{name}-{n}" for n in range(100)]).dictionary_encode()}
    )
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table, max_chunksize=30)
    answer = api.stream(ARROW, sink.getvalue().to_pybytes(), {"request_id": task, "data": "x"})
    assert answer.status_code == 202, answer.text
    settled(api, task, 100)
    answer = api.stream(ARROW, b"nonsense", {"request_id": f"{task}1", "data": "x"})
    assert answer.status_code == 400 and "Arrow" in error(answer)


def test_ids_that_come_twice_in_a_stream_count_once(api: Api, name: str, task: str) -> None:
    lines = [f"{name}-{n % 6_000:05}\n" for n in range(12_000)]
    assert api.stream(CSV, "".join(lines), {"request_id": task, "data": "x"}).status_code == 202
    settled(api, task, 6_000)


@pytest.mark.parametrize(
    ("kind", "content", "status", "named"),
    [
        (NDJSON, b"", 422, "ids: expected at least one"),
        (NDJSON, b'{"request_id": "TASK", "data": "x"}\n', 422, "ids: expected at least one"),
        (NDJSON, b'{"request_id": "TASK", "data": "x"}\nv1\na/b\n', 422, "'a/b'"),
        (NDJSON, b'{"request_id": "TASK", "data": "x"}\nv1\n{"vin": "v2"}\n', 400, "v2"),
        (NDJSON, b'{"request_id": "TASK", "data": "x"}\nv1\n["v2"]\n', 400, "v2"),
        (NDJSON, b'{"request_id": "TASK", "data": "x"}\nv1\n"v2\n', 400, "v2"),
        (NDJSON, b'{"request_id": "TASK", "data": "x"}\nv1\n\xff\n', 400, "UTF-8"),
        (NDJSON, b'{"request_id": "TASK", "data": "x", "ids": ["v1"]}\nv2\n', 422, "twice"),
        (NDJSON, b"v1\nv2\n", 400, "JSON"),
        (NDJSON, b'{"request_id": "TASK", "data_sha1": "' + b"cd" * 20 + b'"}\nv1\n', 422, "cdcd"),
        (CSV, b"v1\nv2\n", 400, "?request="),
    ],
)
def test_a_stream_that_is_wrong_leaves_nothing(
    api: Api, task: str, kind: str, content: bytes, status: int, named: str
) -> None:
    answer = api.stream(kind, content.replace(b"TASK", task.encode()))
    assert answer.status_code == status, answer.text
    assert named in error(answer)
    assert api.http.get(f"/fanout/{task}").status_code == 404


def test_a_stream_with_a_wrong_id_after_many_good_ones_leaves_nothing(api: Api, name: str, task: str) -> None:
    lines = [f"{name}-{n:05}" for n in range(20_000)]
    answer = api.stream(CSV, "\n".join([*lines, "a#b"]), {"request_id": task, "data": "x"})
    assert answer.status_code == 422 and "'a#b'" in error(answer)
    assert api.http.get(f"/fanout/{task}").status_code == 404
    assert api.get(f"/vehicles/{name}-00001")["waiting"] == []


def test_a_stream_that_breaks_off_leaves_nothing(node: Node, api: Api, name: str, task: str) -> None:
    head = json.dumps({"request_id": task, "data": "x"}).encode() + b"\n"
    lines = "".join(f"{name}-{n:05}\n" for n in range(20_000)).encode()
    with socket.create_connection(("127.0.0.1", node.http_port), 10) as sock:
        sock.sendall(b"POST /api/v1/fanout HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n")
        sock.sendall(b"Content-Type: application/x-ndjson\r\n\r\n")
        for some in (head, lines):
            sock.sendall(b"%x\r\n%b\r\n" % (len(some), some))
    before = api.get("/fanout", limit=1)["campaigns"]
    assert not before or before[0]["request_id"] != task
    # Whatever comes after it went through the same hands, so it had its chance to become visible.
    api.send(f"{task}0", f"{name}x")
    assert api.http.get(f"/fanout/{task}").status_code == 404
    assert api.get(f"/vehicles/{name}-00001")["waiting"] == []
    assert "Traceback" not in node.logs()


# -- seeing ------------------------------------------------------------------------------------------------------------


def test_campaigns_are_listed_newest_first_by_pages(api: Api, name: str, task: str) -> None:
    for n in range(5):
        api.send(f"{task}{n}", name)
    found = api.get("/fanout", limit=3)["campaigns"]
    assert [one["request_id"] for one in found] == [f"{task}4", f"{task}3", f"{task}2"]
    more = api.get("/fanout", limit=2, before=found[-1]["id"])["campaigns"]
    assert [one["request_id"] for one in more] == [f"{task}1", f"{task}0"]
    api.order(f"{task}0", "pause")
    paused = api.get("/fanout", limit=1_000, state="paused")["campaigns"]
    assert f"{task}0" in [one["request_id"] for one in paused]
    assert {one["state"] for one in paused} == {"paused"}


@pytest.mark.parametrize(
    ("path", "status"),
    [
        ("/fanout/task_absent_1", 404),
        ("/fanout/task_absent_1/3", 404),
        ("/fanout/task_absent_1/0", 422),
        ("/fanout/task_absent_1/99999999999999999999999", 422),
        ("/fanout/nonsense", 422),
        ("/fanout/task_absent_1/deliveries", 404),
        ("/fanout/task_absent_1/deliveries?format=ndjson", 404),
        ("/fanout/task_absent_1/deliveries?state=lost", 422),
        ("/fanout/task_absent_1/deliveries?limit=0", 422),
        ("/fanout?state=odd", 422),
        ("/fanout?before=99999999999999999999999", 422),
        ("/fanout?limit=100000", 422),
        ("/vehicles/a+b", 422),
        ("/vehicles/" + "v" * 200, 422),
        ("/why/vin/a%23b", 422),
        ("/why/wheel/x", 404),
    ],
)
def test_what_is_not_there_and_what_is_wrong(api: Api, path: str, status: int) -> None:
    answer = api.http.get(path)
    assert answer.status_code == status, answer.text


def test_ended_deliveries_are_listed_by_pages_and_as_lines(api: Api, name: str, task: str) -> None:
    vins = [f"{name}-{n:04}" for n in range(2_500)]
    api.send(task, *vins)
    settled(api, task, 2_500)
    assert api.get(f"/fanout/{task}/deliveries") == {"deliveries": []}
    assert api.order(task, "cancel", {"vins": vins[:2_300]})["ended"] == 2_300
    assert api.counts(task) == {"waiting": 200, "cancelled": 2_300}
    found: list[str] = []
    after: str | None = ""
    while after is not None:
        page = api.get(f"/fanout/{task}/deliveries", limit=1_000, after=after)
        found += [row["vin"] for row in page["deliveries"]]
        after = page.get("next")
    assert found == vins[:2_300]
    lines = api.http.get(f"/fanout/{task}/1/deliveries", params={"format": "ndjson"})
    assert lines.headers["content-type"].startswith(NDJSON)
    rows = [json.loads(line) for line in lines.text.splitlines()]
    assert [row["vin"] for row in rows] == vins[:2_300]
    assert {(row["state"], row["reason"]) for row in rows} == {("cancelled", "cancelled by an operator")}
    assert api.get(f"/fanout/{task}/deliveries", state="failed") == {"deliveries": []}
    assert api.get(f"/fanout/{task}/deliveries", reason="other")["deliveries"] == []
    assert len(api.get(f"/fanout/{task}/deliveries", reason="cancelled by an operator")["deliveries"]) == 1_000


def test_a_vehicle_shows_what_it_has_had_and_what_waits(api: Api, vehicle: Vehicle, name: str, task: str) -> None:
    client = vehicle(name)
    api.send(task, name, data="one")
    client.next()
    wait_for(lambda: api.counts(task) == {"acked": 1})
    seen = api.get(f"/vehicles/{name}")
    assert (seen["connected"], seen["client_id"], seen["node"], seen["waiting"]) == (True, name, "test", [])
    assert [(row["request_id"], row["number"], row["state"]) for row in seen["ended"]] == [(task, 1, "acked")]
    client.disconnect()
    api.send(f"{task}0", name, expires=3600)
    (waiting,) = api.get(f"/vehicles/{name}")["waiting"]
    assert waiting["request_id"] == f"{task}0" and waiting["expires"] is not None
    assert api.http.post(f"/vehicles/{name}/retire").json() == {"vin": name, "ended": 1}
    assert api.counts(f"{task}0") == {"cancelled": 1}
    assert [row["state"] for row in api.get(f"/vehicles/{name}")["ended"]] == ["cancelled", "acked"]


def test_a_dry_run_sends_nothing(api: Api, vehicle: Vehicle, name: str, task: str) -> None:
    vehicle(f"{name}a")
    api.send(f"{task}0", f"{name}b")
    vins = [f"{name}{letter}" for letter in "abcd"]
    answer = api.http.post("/fanout/dry-run", json={"request_id": task, "ids": vins, "data": "x"})
    assert answer.json() == {"ids": 4, "connected": 1, "offline": 3, "overlapping": 1}
    assert api.http.get(f"/fanout/{task}").status_code == 404
    assert api.http.post("/fanout/dry-run", json={"request_id": task, "ids": ["a/b"], "data": "x"}).status_code == 422


def test_collecting_on_demand(api: Api) -> None:
    answer = api.http.post("/fanout/collect")
    assert answer.status_code == 200 and answer.json()["removed"] >= 0


# -- doing -------------------------------------------------------------------------------------------------------------


def test_pause_and_resume(api: Api, vehicle: Vehicle, name: str, task: str) -> None:
    api.send(task, name)
    assert api.order(task, "pause")["state"] == "paused"
    client = vehicle(name)
    api.send(f"{task}0", name, data="passes it by")
    assert client.next().text == "passes it by"
    assert api.counts(task) == {"waiting": 1}
    wait_for(lambda: api.why(name)["reason"] == "paused", what="the other one is acknowledged")
    assert api.order(task, "resume", number=1)["state"] == "running"
    assert client.next().text == "x"
    wait_for(lambda: api.counts(task) == {"acked": 1})


def test_a_campaign_may_begin_paused(api: Api, vehicle: Vehicle, name: str, task: str) -> None:
    client = vehicle(name)
    api.send(task, name, campaign={"paused": True})
    assert api.show(task)["state"] == "paused"
    api.order(task, "resume")
    assert client.next().text == "x"


def test_cancel_all_and_some(api: Api, name: str, task: str) -> None:
    vins = [f"{name}{n}" for n in range(10)]
    api.send(task, *vins)
    assert api.order(task, "cancel", {"vins": vins[:3]})["counts"]["cancelled"] == 3
    assert api.order(task, "cancel", {"vins": []})["ended"] == 0
    assert api.order(task, "cancel")["state"] == "cancelled"
    wait_for(lambda: api.show(task)["state"] == "closed")
    assert api.counts(task) == {"cancelled": 10}
    for verb in ("pause", "resume", "edit", "retry"):
        answer = api.try_order(task, verb, {} if verb == "edit" else None)
        assert answer.status_code == 409 and task in error(answer), verb


def test_a_misspelt_body_does_not_cancel_everything(api: Api, name: str, task: str) -> None:
    api.send(task, name)
    for body in ({"vin": [name]}, {"vins": name}, {"vins": [name], "all": True}, [name]):
        assert api.try_order(task, "cancel", body).status_code == 422
    answer = api.try_order(task, "cancel", {"vins": ["a/b"]})
    assert answer.status_code == 422 and "'a/b'" in error(answer)
    answer = api.try_order(task, "pause", {"vins": [name]})
    assert answer.status_code == 400
    assert (api.show(task)["state"], api.counts(task)) == ("running", {"waiting": 1})


@pytest.mark.parametrize("verb", ["pause", "resume", "cancel", "retry", "advance", "edit"])
def test_nothing_is_done_to_what_is_not_there(api: Api, verb: str) -> None:
    answer = api.try_order("task_absent_1", verb, {} if verb == "edit" else None)
    assert answer.status_code == 404 and "task_absent_1" in error(answer)
    answer = api.try_order("task_absent_1", verb, {} if verb == "edit" else None, number=4)
    assert answer.status_code == 404 and "task_absent_1/4" in error(answer)


def test_retry_makes_new_deliveries_of_those_that_were_not_acked(
    api: Api, vehicle: Vehicle, name: str, task: str
) -> None:
    first = vehicle(f"{name}a")
    api.send(task, f"{name}a", f"{name}b", f"{name}c")
    first.next()
    wait_for(lambda: api.counts(task) == {"acked": 1, "waiting": 2})
    api.order(task, "cancel", {"vins": [f"{name}b", f"{name}c"]})
    assert api.order(task, "retry", {"vins": [f"{name}a", f"{name}b"]})["retried"] == 1
    assert api.counts(task) == {"acked": 1, "waiting": 1, "cancelled": 1}
    assert api.order(task, "retry")["retried"] == 1
    assert api.counts(task) == {"acked": 1, "waiting": 2}
    assert vehicle(f"{name}c").next().text == "x"


def test_waves_and_advance(api: Api, vehicle: Vehicle, name: str, task: str) -> None:
    vins = [f"{name}{n}" for n in range(6)]
    fleet = {vin: vehicle(vin) for vin in vins}
    waves = [{"vehicles": 2, "acked_percent": 100}, {"vehicles": 2, "pause_secs": 3600}]
    api.send(task, *vins, final=True, campaign={"waves": waves, "paused": True})
    api.order(task, "resume")
    wait_for(lambda: api.counts(task) == {"acked": 4, "waiting": 2}, 20, "two waves")
    shown = api.show(task)
    assert shown["wave"] == {"now": 2, "of": 3, "sizes": [2, 2]}
    left = next(vin for vin in vins if api.get(f"/vehicles/{vin}")["waiting"])
    answer = api.why(left)
    assert (answer["reason"], answer["do"]) == ("later_wave", f"holdfast fanout advance {task} --number 1")
    api.order(task, "advance")
    wait_for(lambda: api.counts(task) == {"acked": 6}, 20, "everybody")
    assert sum(client.messages.qsize() for client in fleet.values()) == 6


def test_advance_without_waves_is_a_conflict(api: Api, name: str, task: str) -> None:
    api.send(task, name)
    answer = api.try_order(task, "advance")
    assert answer.status_code == 409 and "no waves" in error(answer)


def test_waves_by_percentage_wait_for_the_last_batch(api: Api, vehicle: Vehicle, name: str, task: str) -> None:
    client = vehicle(name)
    api.send(task, name, campaign={"waves": [{"percent": 50}]})
    wait_for(lambda: "final" in api.why(name)["says"], what="the keeper has looked")
    answer = api.why(name)
    assert (answer["reason"], answer["do"]) == ("waves_wait", f"holdfast fanout edit {task} --number 1 --final")
    assert api.order(task, "edit", {"final": True})["open"] is False
    assert client.next().text == "x"
    answer = api.try_send({"request_id": task, "ids": [f"{name}b"], "data": "x", "campaign": {"number": 1}})
    assert answer.status_code == 409


def test_edit(api: Api, vehicle: Vehicle, name: str, task: str) -> None:
    api.send(task, name, campaign={"waves": [{"vehicles": 1, "acked_percent": 50}], "paused": True})
    edited = api.order(task, "edit", {"rate_per_sec": 7, "in_flight_max": 3, "abort_failed_percent": 5})
    assert edited["options"]["rate_per_sec"] == 7
    assert edited["options"]["in_flight_max"] == 3
    edited = api.order(task, "edit", {"waves": [{"vehicles": 1, "acked_percent": 90}]}, number=1)
    assert edited["options"]["waves"] == [{"vehicles": 1, "acked_percent": 90.0}]
    assert edited["options"]["rate_per_sec"] == 7
    bad: list[tuple[Any, int]] = [
        ({"rate_per_sec": 0}, 422),
        ({"rate": 5}, 422),
        ({"end_at": "soon"}, 422),
        ({"end_at": "2030-01-01T00:00:00"}, 422),
        ({"in_flight_max": 1.5}, 422),
        ({"waves": [{"vehicles": 1}, {"vehicles": 2}]}, 409),
        ({"waves": [{"vehicles": 1, "percent": 2}]}, 422),
        ({"waves": [{"vehicle": 1}]}, 422),
        (None, 422),
    ]
    for body, status in bad:
        assert api.try_order(task, "edit", body).status_code == status, body
    endless = api.http.post(
        f"/fanout/{task}/edit", content='{"rate_per_sec": Infinity}', headers={"Content-Type": "application/json"}
    )
    assert endless.status_code == 422
    assert api.show(task)["options"]["rate_per_sec"] == 7
    api.order(task, "edit", {"end_at": "2020-01-01T00:00:00Z"})
    wait_for(lambda: api.counts(task) == {"expired": 1}, what="its end has come")


# -- results -----------------------------------------------------------------------------------------------------------


def test_success_may_mean_a_result(api: Api, vehicle: Vehicle, name: str, task: str) -> None:
    good, bad = vehicle(f"{name}a"), vehicle(f"{name}b")
    api.send(task, f"{name}a", f"{name}b", campaign={"result": True})
    sent = good.next()
    bad.next()
    wait_for(lambda: api.counts(task) == {"awaiting_result": 2})
    assert api.why(f"{name}a")["reason"] == "awaiting_result"
    correlation = {"CorrelationData": sent.properties["CorrelationData"]}
    good.publish(sent.properties["ResponseTopic"], b'{"status": "ok"}', properties=correlation)
    bad.publish(f"agent/{name}b/proxy/ack/{task}", b'{"status": "failed", "reason": "no space"}')
    wait_for(lambda: api.counts(task) == {"acked": 1, "failed": 1})
    assert api.show(task)["failures"] == {"result: no space": 1}
    assert api.get(f"/fanout/{task}/deliveries", state="failed")["deliveries"][0]["vin"] == f"{name}b"


# -- why ---------------------------------------------------------------------------------------------------------------


def test_why_nothing_and_offline(api: Api, name: str, task: str) -> None:
    assert api.why(name)["reason"] == "nothing"
    api.send(task, name)
    answer = api.why(name)
    assert (answer["vin"], answer["reason"]) == (name, "offline")
    assert "1 delivery waits" in answer["says"]


def test_why_paused_names_the_command(api: Api, vehicle: Vehicle, name: str, task: str) -> None:
    vehicle(name)
    api.send(task, name, campaign={"paused": True})
    answer = api.why(name)
    assert (answer["reason"], answer["do"]) == ("paused", f"holdfast fanout resume {task} --number 1")


def test_why_not_begun_and_outside_its_window(api: Api, vehicle: Vehicle, name: str, task: str) -> None:
    vehicle(name)
    api.send(task, name, campaign={"start_at": "2099-01-01T00:00:00Z"})
    assert api.why(name)["reason"] == "not_begun"
    api.order(task, "cancel", {"vins": [name]})
    far = datetime.now(UTC) + timedelta(hours=12)
    window = {"begin": f"{far:%H}:00", "end": f"{far + timedelta(hours=1):%H}:00"}
    api.send(f"{task}0", name, campaign={"windows": [window]})
    assert api.why(name)["reason"] == "outside_window"


@pytest.mark.parametrize("client_id", ["its VIN", "another"])
def test_why_not_subscribed(api: Api, connect: Connect, name: str, task: str, client_id: str) -> None:
    api.send(task, name)
    client_id = name if client_id == "its VIN" else f"{name}[bold] x"
    client = connect(client_id)
    client.subscribe(f"agent/{name}/proxy/request/+", 0)
    answer = api.why(name)
    assert answer["reason"] == "not_subscribed"
    assert client_id in answer["says"]
    assert answer["do"].startswith("holdfast session show ")
    assert api.get(f"/vehicles/{name}")["client_id"] == client_id
    client.subscribe(f"agent/{name}/proxy/request/+", 1)
    assert client.next().text == "x"


def test_why_subscribed_to_another_request_only(api: Api, connect: Connect, name: str, task: str) -> None:
    api.send(task, name)
    client = connect(name)
    client.subscribe(f"agent/{name}/proxy/request/task_other_1", 1)
    answer = api.why(name)
    assert answer["reason"] == "not_subscribed" and "task_other_1" in answer["says"]


def test_why_unanswered(api: Api, vehicle: Vehicle, name: str, task: str) -> None:
    client = vehicle(name, manual_ack=True, **durable(V5))
    api.send(task, name)
    message = client.next()
    assert api.why(name)["reason"] == "unanswered"
    assert api.get(f"/vehicles/{name}")["in_flight"]["request_id"] == task
    client.ack(message)  # type: ignore[attr-defined]
    wait_for(lambda: api.why(name)["reason"] == "nothing")


def test_why_backing_off_also_for_what_is_behind_it(node: Node, api: Api, name: str, task: str) -> None:
    with Raw(node.mqtt_port, V5) as raw:
        raw.connect(name)
        raw.subscribe(f"agent/{name}/proxy/request/+")
        api.send(task, name)
        _, pid, payload = raw.read_publish()
        assert payload == b"x"
        raw.send(0x40, pid.to_bytes(2, "big") + b"\x80")
        wait_for(lambda: api.why(name)["reason"] == "backing_off")
        api.send(f"{task}0", name)
        answer = api.why(name)
        assert answer["reason"] == "backing_off" and f"{task}/1 was refused 1 time" in answer["says"]
        api.send(f"{task}1", name, data="urgent", priority=9)
        assert raw.read_publish()[2] == b"urgent"


@pytest.mark.parametrize("code", [0x87, 0x90, 0x99])
def test_some_refusals_are_final(node: Node, api: Api, name: str, task: str, code: int) -> None:
    with Raw(node.mqtt_port, V5) as raw:
        raw.connect(name)
        raw.subscribe(f"agent/{name}/proxy/request/+")
        api.send(task, name)
        raw.send(0x40, raw.read_publish()[1].to_bytes(2, "big") + bytes([code]))
        wait_for(lambda: api.counts(task) == {"failed": 1})
        (reason,) = api.show(task)["failures"]
        assert api.get(f"/fanout/{task}/deliveries", reason=reason)["deliveries"][0]["vin"] == name


# -- who may -----------------------------------------------------------------------------------------------------------


def test_roles(tmp_path: Path, name: str, task: str) -> None:
    tokens = tmp_path / "tokens"
    made = {role: make_token(tokens, role, [role]) for role in ("reader", "publisher", "admin")}
    with (
        Node(tmp_path / "node", settings={"auth.http_tokens_file": tokens}) as node,
        Api(node) as nobody,
        Api(node, made["reader"]) as reader,
        Api(node, made["publisher"]) as publisher,
        Api(node, made["admin"]) as admin,
    ):
        request = {"request_id": task, "ids": [name], "data": "x"}
        sha1 = hashlib.sha1(b"y").hexdigest()
        for who in (nobody, reader):
            assert who.try_send(request).status_code == 403
            assert who.http.put(f"/payloads/{sha1}", content=b"y").status_code == 403
        answer = reader.stream(CSV, f"{name}\n", {"request_id": task, "data": "x"})
        assert answer.status_code == 403 and "publisher" in error(answer)
        assert publisher.http.put(f"/payloads/{sha1}", content=b"y").status_code == 201
        assert publisher.try_send(request).status_code == 202
        assert publisher.http.get(f"/fanout/{task}").status_code == 403
        assert nobody.http.get(f"/fanout/{task}").status_code == 403
        assert reader.http.post("/fanout/dry-run", json=request).status_code == 200
        for path in (
            "/fanout",
            f"/fanout/{task}",
            f"/fanout/{task}/deliveries",
            f"/vehicles/{name}",
            f"/why/vin/{name}",
        ):
            assert reader.http.get(path).status_code == 200
            assert nobody.http.get(path).status_code == 403
        for verb in ("pause", "resume", "retry", "edit", "cancel"):
            for who in (nobody, reader, publisher):
                assert who.try_order(task, verb, {} if verb == "edit" else None).status_code == 403, verb
            assert admin.try_order(task, verb, {} if verb == "edit" else None).status_code == 200, verb
        for path in (f"/vehicles/{name}/retire", "/fanout/collect"):
            assert reader.http.post(path).status_code == publisher.http.post(path).status_code == 403
            assert admin.http.post(path).status_code == 200


def test_a_node_with_fanout_switched_off_takes_nothing(tmp_path: Path, name: str, task: str) -> None:
    with Node(tmp_path / "node", settings={"fanout.enabled": False}) as node, Api(node) as api:
        sha1 = hashlib.sha1(b"y").hexdigest()
        for answer in (
            api.try_send({"request_id": task, "ids": [name], "data": "x"}),
            api.stream(CSV, f"{name}\n", {"request_id": task, "data": "x"}),
            api.http.put(f"/payloads/{sha1}", content=b"y"),
        ):
            assert answer.status_code == 400 and "fanout.enabled" in error(answer)
        assert api.get("/fanout") == {"campaigns": []}
