"""Bans of clients, users and addresses, on one node: who is refused, who has to go, and who may come back."""

from __future__ import annotations

import json
import re
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import httpx
import pytest

from e2e.clients import V5, V311, Dial, PahoClient, Refused, Will
from e2e.conftest import Clients, Connect, NewStore, durable
from e2e.groups.members import holdfast
from e2e.raw import Raw
from holdfast.auth.http_tokens import make_token
from holdfast.auth.passwords import set_password
from holdfast.cli.http import call, part
from holdfast.errors import RequestError
from node import Node, holdfast_command
from processes import wait_for

BANNED, NOT_AUTHORIZED_3, WRONG_PASSWORD, ADMINISTRATIVE = 0x8A, 5, 0x86, 0x98
DISCONNECTED_SECONDS = 2.0
ELSEWHERE = "127.0.0.2"
"""Also this machine, but no address that another test comes from."""


def in_path(name: str) -> str:
    """The client library would take `..` for a way up."""
    return quote(name, safe="").replace(".", "%2E")


def ban(node: Node, kind: str, name: str, **body: Any) -> dict[str, Any]:
    answer = httpx.put(f"{node.http}/api/v1/bans/{kind}/{in_path(name)}", json=body, timeout=10)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def lift(node: Node, kind: str, name: str) -> int:
    return httpx.delete(f"{node.http}/api/v1/bans/{kind}/{in_path(name)}", timeout=10).status_code


def code(node: Node, client_id: str, version: int, source: str = "127.0.0.1") -> int:
    """What a CONNECT is answered with, as that version has it."""
    with Raw(node.mqtt_port, version, source) as raw:
        return raw.connect(client_id)[1]


def refusal(version: int) -> int:
    return BANNED if version == V5 else NOT_AUTHORIZED_3


def refused_count(node: Node) -> float:
    text = httpx.get(f"{node.http}/metrics", timeout=10).text
    found = re.search(r"^holdfast_connections_banned_total (\S+)$", text, re.MULTILINE)
    assert found is not None
    return float(found[1])


def test_a_banned_client_is_refused_until_the_ban_is_lifted(node: Node, name: str, version: int) -> None:
    assert code(node, name, version) == 0
    before = refused_count(node)
    ban(node, "client", name, reason="noisy")
    assert code(node, name, version) == refusal(version)
    assert code(node, f"{name}-other", version) == 0
    assert refused_count(node) == before + 1
    assert lift(node, "client", name) == 200
    assert code(node, name, version) == 0
    assert lift(node, "client", name) == 404


def test_a_connected_client_has_to_go_and_keeps_its_session(
    node: Node, connect: Connect, name: str, version: int
) -> None:
    watcher = connect(f"{name}-w")
    watcher.subscribe(f"{name}-wills", 1)
    client = connect(name, version, will=Will(f"{name}-wills", b"gone"), **durable(version))
    client.subscribe(f"{name}/x", 1)
    ban(node, "client", name)
    assert client.ended(DISCONNECTED_SECONDS) == (ADMINISTRATIVE if version == V5 else None)
    assert watcher.next().payload == b"gone", "as for every connection that the server ends"
    watcher.publish(f"{name}/x", b"meanwhile")
    with pytest.raises(Refused):
        connect(name, version, **durable(version))
    assert node.get(f"/api/v1/sessions/{name}")["connected"] is False
    lift(node, "client", name)
    back = connect(name, version, **durable(version))
    assert back.session_present
    assert back.next().payload == b"meanwhile"
    assert watcher.gone.empty()


def test_an_address_or_its_network_is_refused(node: Node, name: str, version: int) -> None:
    for banned in (ELSEWHERE, "127.0.0.2/31"):
        assert code(node, name, version, ELSEWHERE) == 0
        with Raw(node.mqtt_port, version, ELSEWHERE) as inside:
            inside.connect(f"{name}-inside")
            ban(node, "address", banned)
            inside.sock.settimeout(DISCONNECTED_SECONDS)
            if version == V5:
                first, body = inside.read()
                assert (first, body[0]) == (0xE0, ADMINISTRATIVE)
            assert inside.sock.recv(1) == b""
        assert code(node, name, version, ELSEWHERE) == refusal(version)
        assert code(node, name, version) == 0, "from another address"
        assert lift(node, "address", banned) == 200


def test_a_ban_ends_by_itself(node: Node, name: str, version: int) -> None:
    made = ban(node, "client", name, secs=1.5)
    began = time.monotonic()
    assert made["until"] > made["made_at"]
    assert code(node, name, version) == refusal(version)
    wait_for(lambda: code(node, name, version) == 0, what="the end of the ban")
    assert time.monotonic() - began > 1.0
    assert name not in {row["name"] for row in node.get("/api/v1/bans")["bans"]}


def test_making_a_ban_again_replaces_it(node: Node, name: str) -> None:
    ban(node, "client", name, reason="a", secs=600)
    made = ban(node, "client", name, reason="b")
    (found,) = [row for row in node.get("/api/v1/bans")["bans"] if row["name"] == name]
    assert found == made == {"kind": "client", "name": name, "reason": "b", "until": None, "made_at": made["made_at"]}
    lift(node, "client", name)


@pytest.mark.parametrize("name", ["a/b", "ü ~%25", "-x", "..", "?q#f"])
def test_any_client_id_can_be_banned(node: Node, name: str) -> None:
    assert ban(node, "client", name)["name"] == name
    assert code(node, name, V5) == BANNED
    assert lift(node, "client", name) == 200
    assert code(node, name, V5) == 0


@pytest.mark.parametrize("name", ["x" * 65_535, "/" * 65_535, "é" * 32_767], ids=["x", "slash", "accent"])
def test_the_longest_client_id_can_be_banned(node: Node, name: str) -> None:
    where, path = node.http.removeprefix("http://"), f"bans/client/{part(name)}"
    assert call(where, "PUT", path, {})["name"] == name
    assert code(node, name, V5) == BANNED
    assert code(node, name[:-1], V5) == 0
    assert call(where, "DELETE", path)
    assert code(node, name, V5) == 0
    with pytest.raises(RequestError, match=r"client id .*… has \d+ bytes; it takes up to 65535"):
        call(where, "PUT", f"bans/client/{part(name + 'xx')}", {})


@pytest.mark.parametrize(
    ("path", "body", "says"),
    [
        ("clients/x", {}, "kind 'clients' is unknown; it is one of client, user, address"),
        ("client/", {}, "the client id '' is empty"),
        ("user/", {}, "the user name '' is empty"),
        ("client/a%00b", {}, r"client id 'a\x00b' contains NUL"),
        ("address/example.com", {}, "address 'example.com' is neither an IP address nor a network such as 10.1.0.0/16"),
        ("address/10.0.0.1/8", {}, "address '10.0.0.1/8' is an address inside of a network; the network is 10.0.0.0/8"),
        ("client/x", {"secs": 0}, "body.secs: Input should be greater than 0"),
        ("client/x", {"secs": True}, "body.secs: Input should be a valid number"),
        ("client/x", {"secs": 1e300}, "body.secs: Input should be less than or equal to 3153600000"),
        ("client/x", {"reason": "x" * 501}, "body.reason: String should have at most 500 characters"),
        ("client/x", {"reason": 5}, "body.reason: Input should be a valid string"),
    ],
)
def test_a_wrong_ban_is_refused_with_words(node: Node, path: str, body: dict[str, object], says: str) -> None:
    answer = httpx.put(f"{node.http}/api/v1/bans/{path}", json=body, timeout=10)
    assert answer.status_code in (400, 422)
    assert answer.json() == {"error": says}
    assert all(row["name"] != "x" for row in node.get("/api/v1/bans")["bans"])


def test_a_reason_that_is_no_unicode_is_refused(node: Node) -> None:
    answer = httpx.put(
        f"{node.http}/api/v1/bans/client/x",
        content=b'{"reason": "\\ud800"}',
        headers={"Content-Type": "application/json"},
        timeout=10,
    )
    assert 400 <= answer.status_code < 500


def test_the_command_line(node: Node, name: str) -> None:
    said = holdfast(node, "ban", "add", "client", name, "--secs", "600", "--reason", "too loud")
    assert said.startswith(f"client {name} is banned until 20")
    assert code(node, name, V5) == BANNED
    (row,) = [row for row in json.loads(holdfast(node, "ban", "ls", "--json")) if row["name"] == name]
    assert (row["kind"], row["reason"]) == ("client", "too loud")
    assert "too loud" in holdfast(node, "ban", "ls")
    assert holdfast(node, "ban", "lift", "client", name) == f"client {name} may connect again\n"
    assert code(node, name, V5) == 0
    made = json.loads(holdfast(node, "ban", "add", "address", "10.9.0.0/255.255.0.0", "--json"))
    assert (made["name"], made["until"]) == ("10.9.0.0/16", None)
    assert json.loads(holdfast(node, "ban", "lift", "address", "10.9.0.0/16", "--json"))


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("add", "clients", "x"), "holdfast: kind 'clients' is unknown; it is one of client, user, address\n"),
        (("add", "client", ""), "holdfast: the client id '' is empty\n"),
        (("add", "address", "here"), "holdfast: address 'here' is neither an IP address nor a network"),
        (("add", "client", "x", "--secs", "-1"), "holdfast: body.secs: Input should be greater than 0\n"),
        (("lift", "client", "nobody"), "holdfast: there is no ban of client 'nobody'\n"),
    ],
)
def test_the_command_line_says_what_is_wrong(node: Node, words: tuple[str, ...], says: str) -> None:
    command = [holdfast_command(), "ban", *words, "--http", node.http.removeprefix("http://")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert done.stderr.startswith(says)


# -- nodes of their own ------------------------------------------------------------------------------------------------


def test_bans_survive_a_kill(new_store: NewStore, tmp_path: Path, name: str) -> None:
    with Node(tmp_path, store=new_store()) as node:
        ban(node, "client", name, reason="for good")
        ban(node, "address", ELSEWHERE, secs=3600)
        node.kill()
        node.start()
        assert code(node, name, V5) == BANNED
        assert code(node, name, V311) == NOT_AUTHORIZED_3
        assert code(node, f"{name}-2", V5, ELSEWHERE) == BANNED
        assert [row["name"] for row in node.get("/api/v1/bans")["bans"]] == [ELSEWHERE, name]
        lift(node, "client", name)
        node.restart()
        assert code(node, name, V5) == 0


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Node, dict[str, str]]]:
    """A node that wants passwords, and HTTP tokens by role."""
    folder = tmp_path_factory.mktemp("guarded")
    for user in ("alice", "bob"):
        set_password(folder / "passwords.txt", user, f"{user}-secret")
    tokens = {role: make_token(folder / "tokens.txt", role, [role]) for role in ("reader", "publisher", "admin")}
    settings = {
        "auth.password_file": folder / "passwords.txt",
        "auth.http_tokens_file": folder / "tokens.txt",
        "auth.allow_anonymous": "never",
    }
    with Node(folder / "node", settings=settings) as node:
        yield node, tokens


def put(guarded: tuple[Node, dict[str, str]], path: str, role: str = "admin") -> int:
    node, tokens = guarded
    headers = {"Authorization": f"Bearer {tokens[role]}"}
    return httpx.put(f"{node.http}/api/v1/bans/{path}", json={}, headers=headers, timeout=10).status_code


def delete(guarded: tuple[Node, dict[str, str]], path: str, role: str = "admin") -> int:
    node, tokens = guarded
    headers = {"Authorization": f"Bearer {tokens[role]}"}
    return httpx.delete(f"{node.http}/api/v1/bans/{path}", headers=headers, timeout=10).status_code


def test_a_banned_user_is_refused_whatever_client_it_uses(
    guarded: tuple[Node, dict[str, str]], clients: Clients, name: str, version: int
) -> None:
    node, _ = guarded

    def dial(user: str, client_id: str, password: str = "") -> PahoClient:
        password = password or f"{user}-secret"
        given = Dial(port=node.mqtt_port, client_id=client_id, version=version, username=user, password=password)
        client = clients.make("paho", given)
        assert isinstance(client, PahoClient)
        return client.connect()

    alice, bob = dial("alice", f"{name}-1"), dial("bob", f"{name}-2")
    assert put(guarded, "user/alice") == 200
    try:
        assert alice.ended(DISCONNECTED_SECONDS) == (ADMINISTRATIVE if version == V5 else None)
        with pytest.raises(Refused) as refused:
            dial("alice", f"{name}-3")
        if version == V5:
            assert refused.value.reason == BANNED
        with pytest.raises(Refused) as refused:
            dial("alice", f"{name}-3", "wrong")
        if version == V5:
            assert refused.value.reason == WRONG_PASSWORD, "nobody learns of a ban who is not that user"
        dial("bob", "alice").disconnect()
        assert bob.publish(name, b"still here") in (0, 0x10)
    finally:
        assert delete(guarded, "user/alice") == 200
    dial("alice", f"{name}-3")


def test_a_banned_address_is_refused_before_its_password_is_looked_at(
    guarded: tuple[Node, dict[str, str]], version: int
) -> None:
    node, _ = guarded
    assert code(node, "x", version, ELSEWHERE) in (0x87, NOT_AUTHORIZED_3)
    assert put(guarded, f"address/{ELSEWHERE}") == 200
    assert code(node, "x", version, ELSEWHERE) == refusal(version)
    assert delete(guarded, f"address/{ELSEWHERE}") == 200
    assert code(node, "x", version, ELSEWHERE) in (0x87, NOT_AUTHORIZED_3)


def test_readers_list_and_administrators_change(guarded: tuple[Node, dict[str, str]]) -> None:
    node, tokens = guarded
    for role in ("reader", "publisher"):
        assert put(guarded, "client/x", role) == 403
        assert delete(guarded, "client/x", role) == 403
    assert put(guarded, "client/x") == 200
    for role, status in (("reader", 200), ("publisher", 403), ("admin", 200)):
        headers = {"Authorization": f"Bearer {tokens[role]}"}
        assert httpx.get(f"{node.http}/api/v1/bans", headers=headers, timeout=10).status_code == status
    assert delete(guarded, "client/x") == 200


def test_no_ban_keeps_an_operator_from_lifting_it(guarded: tuple[Node, dict[str, str]]) -> None:
    bans = ["user/admin", "client/admin", "address/127.0.0.0/8"]
    assert [put(guarded, path) for path in bans] == [200, 200, 200]
    assert [delete(guarded, path) for path in bans] == [200, 200, 200]
