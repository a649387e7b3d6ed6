"""What operators do to groups, over HTTP and on the command line, while members are at work."""

from __future__ import annotations

import itertools
import json
import shlex
import time
from contextlib import closing
from pathlib import Path

import httpx
import pytest

from e2e.clients import V5, V311
from e2e.groups.members import (
    SECONDS,
    Connect,
    Ledger,
    Publisher,
    described,
    exists,
    holdfast,
    located,
    owners,
    path,
    settled,
    streams_of,
)
from holdfast.store import open_metadata
from node import Node
from processes import wait_for

ADMINISTRATIVE_ACTION = 0x98
DOCUMENT = Path(__file__).parents[3] / "docs" / "groups.md"


def delete(node: Node, group: str) -> None:
    httpx.delete(node.http + path(group), timeout=SECONDS).raise_for_status()


def no_lag(node: Node, group: str) -> None:
    wait_for(lambda: described(node, group)["lag"] == 0, SECONDS, f"{group} without lag")


@pytest.mark.parametrize("start", ["beginning", "latest"])
def test_a_declared_group_keeps_everything_for_its_first_member(
    lone: Node, member: Connect, publisher: Publisher, ledger: Ledger, name: str, start: str
) -> None:
    before = publisher.publish(f"{name}/x", 50)
    holdfast(lone, "group", "create", f"g:{name}/#", "--start", start)
    after = publisher.publish(f"{name}/x", 50)
    whole = described(lone, f"g:{name}/#")
    assert whole["members"] == [] and whole["lag"] >= 50
    assert {row["owner"] for row in whole["streams"]} == {None}
    reader = member(lone, f"{name}-reader", f"$share/g/{name}/#")
    wanted = before + after if start == "beginning" else after
    ledger.await_acked(wanted)
    no_lag(lone, f"g:{name}/#")
    assert sorted(reader.payloads()) == sorted(wanted)


def test_the_first_subscriber_says_where_to_start(
    lone: Node, member: Connect, publisher: Publisher, ledger: Ledger, name: str
) -> None:
    before = publisher.publish(f"{name}/x", 50)
    first = member(lone, f"{name}-first", f"$share/g/{name}/#", start="beginning")
    ledger.await_acked(before)
    # The group is there now: whoever joins later cannot move it.
    second = member(lone, f"{name}-second", f"$share/g/{name}/#", start="beginning")
    settled(lone, f"g:{name}/#", [first.client_id, second.client_id])
    after = publisher.publish(f"{name}/x", 50)
    ledger.await_acked(after)
    ledger.check()


def test_seek(lone: Node, member: Connect, publisher: Publisher, name: str) -> None:
    group = f"g:{name}/#"
    members = [member(lone, f"{name}-{n}", f"$share/g/{name}/#") for n in range(2)]
    settled(lone, group, [m.client_id for m in members])

    def wait_got(count: int) -> None:
        wait_for(lambda: sum(len(m.got) for m in members) >= count, SECONDS, f"{count} deliveries")
        no_lag(lone, group)
        assert sum(len(m.got) for m in members) == count

    publisher.publish(f"{name}/x", 100)
    wait_got(100)
    # Back to the beginning, by command: everything again.
    assert "goes on at beginning" in holdfast(lone, "group", "seek", group, "beginning")
    wait_got(200)
    # To a time between, over HTTP: what came since.
    between = time.time()
    moment = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(between)) + f".{int(between % 1 * 1e6):06d}Z"
    publisher.publish(f"{name}/x", 60)
    wait_got(260)
    lone.post(path(group, "/seek"), {"to": moment})
    wait_got(320)
    # Forward, past what nobody was given while the group was paused.
    lone.post(path(group, "/pause"), {"paused": True})
    wait_for(lambda: not owners(described(lone, group)), SECONDS, "all streams are called back")
    publisher.publish(f"{name}/x", 40)
    lone.post(path(group, "/seek"), {"to": "latest"})
    lone.post(path(group, "/pause"), {"paused": False})
    last = publisher.publish(f"{name}/x", 20)
    wait_got(340)
    assert set(last) <= {payload for m in members for payload in m.payloads()}
    # By stream and offset.
    where = located(lone, f"{name}/#")
    stream, offset = where[last[0]]
    again = [payload for payload, place in where.items() if place[0] == stream and place[1] >= offset]
    heads = {row[0]: 1 + max(o for s, o in where.values() if s == row[0]) for row in where.values()}
    lone.post(path(group, "/seek"), {"to": {**heads, stream: offset}})
    wait_got(340 + len(again))
    answer = httpx.post(lone.http + path(group, "/seek"), json={"to": {"no stream": 1}}, timeout=SECONDS)
    assert answer.status_code == 400, answer.text


def test_a_seek_while_messages_are_unacknowledged(
    lone: Node, member: Connect, publisher: Publisher, ledger: Ledger, name: str
) -> None:
    """It does not wait for them, and what is acknowledged after it says nothing about the new course."""
    group = f"g:{name}/#"
    holder = member(lone, f"{name}-holder", f"$share/g/{name}/#", hold=True)
    settled(lone, group, [holder.client_id])
    sent = publisher.publish(f"{name}/x", 64)
    holder.await_got(64)
    begin = time.monotonic()
    lone.post(path(group, "/seek"), {"to": "beginning"})
    assert time.monotonic() - begin < 1.5, "it waited for groups.revoke_secs"
    holder.await_got(128)
    assert sorted(holder.payloads()) == sorted(sent + sent)
    holder.ack()
    no_lag(lone, group)


def test_pause_and_go_on(lone: Node, member: Connect, publisher: Publisher, ledger: Ledger, name: str) -> None:
    group = f"g:{name}/#"
    reader = member(lone, f"{name}-reader", f"$share/g/{name}/#")
    settled(lone, group, [reader.client_id])
    ledger.await_acked(publisher.publish(f"{name}/x", 32))
    assert "is paused" in holdfast(lone, "group", "pause", group)
    wait_for(lambda: not owners(described(lone, group)), SECONDS, "all streams are called back")
    waiting = publisher.publish(f"{name}/x", 32)
    whole = described(lone, group)
    assert whole["paused"] and whole["lag"] >= 32 and len(reader.got) == 32
    assert [m["session"] for m in whole["members"]] == [reader.client_id], "members stay"
    assert "goes on" in holdfast(lone, "group", "pause", group, "--off")
    ledger.await_acked(waiting)
    ledger.check()


@pytest.mark.parametrize("version", [V311, V5])
def test_a_deleted_group_stays_deleted(
    lone: Node, member: Connect, publisher: Publisher, ledger: Ledger, name: str, version: int
) -> None:
    share, group = f"$share/g/{name}/#", f"g:{name}/#"
    here = member(lone, f"{name}-here", share, version=version, durable=True)
    away = member(lone, f"{name}-away", share, version=version, durable=True)
    settled(lone, group, [here.client_id, away.client_id])
    ledger.await_acked(publisher.publish(f"{name}/x", 32))
    away.disconnect()
    settled(lone, group, [here.client_id])
    if version == V5:
        assert "is deleted" in holdfast(lone, "group", "delete", group)
    else:
        delete(lone, group)
    # Members are told: MQTT 5 has a word for it.
    assert here.closed_by_server.wait(SECONDS)
    assert here.reason == (ADMINISTRATIVE_ACTION if version == V5 else None)
    assert not exists(lone, group)
    assert httpx.get(lone.http + path(group), timeout=SECONDS).status_code in (400, 404)
    # The one that was away comes back with the subscription in its session, and brings nothing back to life.
    back = member(lone, away.client_id, None, version=version, durable=True)
    assert back.session_present
    assert back.closed_by_server.wait(SECONDS)
    assert not exists(lone, group)
    # After that its session is without it.
    again = member(lone, away.client_id, None, version=version, durable=True)
    publisher.publish(f"{name}/x", 32)
    again.sync()
    assert not exists(lone, group) and not again.got and not again.closed_by_server.is_set()
    # A new group of the same name is another one: it begins where it is declared.
    again.subscribe(share)
    settled(lone, group, [again.client_id])
    sent = publisher.publish(f"{name}/x", 32)
    again.await_got(32)
    assert sorted(again.payloads()) == sorted(sent)


def test_an_old_member_is_no_member_of_a_new_group_of_the_same_name(
    lone: Node, member: Connect, publisher: Publisher, ledger: Ledger, name: str
) -> None:
    share, group = f"$share/g/{name}/#", f"g:{name}/#"
    old = member(lone, f"{name}-old", share, durable=True)
    settled(lone, group, [old.client_id])
    old.disconnect()
    delete(lone, group)
    new = member(lone, f"{name}-new", share)
    settled(lone, group, [new.client_id])
    back = member(lone, old.client_id, None, durable=True)
    assert back.closed_by_server.wait(SECONDS)
    ledger.await_acked(publisher.publish(f"{name}/x", 32))
    assert not back.got and len(new.got) == 32
    assert [m["session"] for m in described(lone, group)["members"]] == [new.client_id]


def test_lag_and_owner_per_stream(lone: Node, member: Connect, publisher: Publisher, name: str) -> None:
    group = f"g:{name}/#"
    holder = member(lone, f"{name}-holder", f"$share/g/{name}/#", hold=True)
    reader = member(lone, f"{name}-reader", f"$share/g/{name}/#")
    whole = settled(lone, group, [holder.client_id, reader.client_id])
    held = streams_of(whole, holder.client_id)
    publisher.publish(f"{name}/x", 320)
    wait_for(lambda: len(holder.got) + len(reader.got) == 320, SECONDS, "all deliveries")

    def lagging() -> bool:
        return {row["stream"] for row in described(lone, group)["streams"] if row["lag"]} <= held

    wait_for(lagging, SECONDS, "only the holder lags")
    whole = described(lone, group)
    rows = {row["stream"]: row for row in whole["streams"]}
    assert sum(row["lag"] for row in rows.values()) == whole["lag"] == len(holder.got)
    for name_of, row in rows.items():
        assert row["owner"] == (holder if name_of in held else reader).client_id and row["status"] == "granted"
        if row["lag"]:
            assert row["lag_seconds"] > 0 and row["oldest_unacknowledged"].startswith("20")
    assert whole["lag_seconds"] >= max(row["lag_seconds"] for row in rows.values() if row["lag"])
    shown = json.loads(holdfast(lone, "group", "show", group, "--json"))
    assert shown["lag"] == whole["lag"] and {m["session"] for m in shown["members"]} == {
        holder.client_id,
        reader.client_id,
    }
    people = holdfast(lone, "group", "show", group)
    assert f"lag {whole['lag']:,} messages" in people and holder.client_id in people
    assert group in holdfast(lone, "group", "ls")
    holder.ack()
    no_lag(lone, group)


def test_ack_timeout_attempts_and_dead_letters(
    lone: Node, member: Connect, publisher: Publisher, ledger: Ledger, name: str
) -> None:
    group = f"g:{name}/#"
    policy = ["--ack-timeout-seconds", "0.4", "--attempts-max", "3"]
    holdfast(lone, "group", "create", group, *policy)
    holder = member(lone, f"{name}-holder", f"$share/g/{name}/#", hold=True)
    settled(lone, group, [holder.client_id])
    sent = publisher.publish(f"{name}/x", 10)
    poison = sent[3]
    holder.await_got(10)
    holder.ack([payload for payload in sent if payload != poison])
    wait_for(lambda: holder.payloads().count(poison) == 3, SECONDS, "three attempts")
    tries = [each for each in holder.got if each.payload == poison]
    assert [each.dup for each in tries] == [False, True, True] and len({each.pid for each in tries}) == 1
    assert all(later.at - sooner.at > 0.3 for sooner, later in itertools.pairwise(tries))
    no_lag(lone, group)  # it is out of the way now
    assert dead_letters(lone, name) == [poison]
    holder.hold = False
    ledger.await_acked(publisher.publish(f"{name}/x", 32))
    assert holder.payloads().count(poison) == 3 and sum(len(to) for to in ledger.given.values()) == 10 + 2 + 32
    holder.ack()  # long after: harmless
    holder.sync()


def test_attempts_count_for_the_group_not_for_one_member(
    lone: Node, member: Connect, publisher: Publisher, ledger: Ledger, name: str
) -> None:
    """A message that brings down every member it meets meets no more than so many of them."""
    group = f"g:{name}/#"
    lone.post("/api/v1/groups", {"name": "g", "filter": f"{name}/#", "attempts_max": 3})
    publisher.publish(f"{name}/x", 1)
    (poison,) = publisher.sent
    for turn in range(3):
        victim = member(lone, f"{name}-victim{turn}", f"$share/g/{name}/#", hold=True)
        victim.await_payload(poison)

        def counted(turn: int = turn) -> bool:  # what a member saw is reported before it goes down
            return attempts(lone, group) > turn

        wait_for(counted, SECONDS, "the attempt is known")
        victim.crash()
    last = member(lone, f"{name}-last", f"$share/g/{name}/#")
    ledger.await_acked(publisher.publish(f"{name}/x", 32))
    no_lag(lone, group)
    assert poison not in last.payloads()
    assert dead_letters(lone, name) == [poison]


def attempts(node: Node, group: str) -> int:
    """The most of any message, as stored with the group's progress."""
    with closing(open_metadata(f"sqlite:///{node.folder}/data/holdfast.db")) as metadata:
        entries = metadata.list("/holdfast/subscriptions/")
    wanted = f"group:{group}".replace("/", "%2F")
    found = [json.loads(entry.value) for key, entry in entries.items() if wanted in key]
    return max((n for each in found for _, _, some in each.get("attempts", []) for _, n in some), default=0)


def dead_letters(node: Node, name: str) -> list[str]:
    store = f"sqlite:///{node.folder}/data/holdfast.db"
    rows = json.loads(
        holdfast(node, "log", "read", "dead-letters", "--store", store, "--filter", f"{name}/#", "--json")
    )
    return [row["payload"] for row in rows]


def test_an_idle_group_expires(lone: Node, member: Connect, publisher: Publisher, ledger: Ledger, name: str) -> None:
    group = f"g:{name}/#"
    lone.post("/api/v1/groups", {"name": "g", "filter": f"{name}/#", "idle_seconds_max": 1.0})
    reader = member(lone, f"{name}-reader", f"$share/g/{name}/#")
    settled(lone, group, [reader.client_id])
    begin = time.monotonic()
    # While it has a member, it stays, however quiet it is.
    wait_for(lambda: time.monotonic() > begin + 2.0, what="twice its time")
    assert exists(lone, group)
    ledger.await_acked(publisher.publish(f"{name}/x", 16))
    reader.disconnect()
    left = time.monotonic()
    wait_for(lambda: not exists(lone, group), SECONDS, "it expires")
    assert time.monotonic() - left > 0.9


def shown() -> list[list[str]]:
    """The words of each command in docs/groups.md that takes a running node."""
    found, kind = [], None
    for line in DOCUMENT.read_text().splitlines():
        if line.startswith("```"):
            kind = line if kind is None else None
        elif kind == "```" and line.startswith(".venv/bin/holdfast "):
            found.append(shlex.split(line, comments=True)[1:])
    return found


def test_what_the_document_shows(lone: Node, member: Connect, name: str) -> None:
    """Command by command, with a member at work."""
    group = "billing:vehicle/+/trip"
    assert {words[1] for words in shown() if words[0] == "group"} == {"create", "ls", "show", "seek", "pause", "delete"}
    (lone.folder / "holdfast-data").symlink_to(lone.folder / "data")
    with Publisher(lone.mqtt_port, name) as publisher:
        poison = publisher.publish(f"{name}/x", 1)
        lone.post("/api/v1/groups", {"name": name, "filter": f"{name}/#", "start": "beginning", "attempts_max": 1})
        member(lone, f"{name}-victim", f"$share/{name}/{name}/#", hold=True).await_payload(*poison)
        wait_for(lambda: attempts(lone, f"{name}:{name}/#") == 1, SECONDS, "the attempt is known")
    member(lone, f"{name}-victim", f"$share/{name}/{name}/#", clean=True)
    no_lag(lone, f"{name}:{name}/#")
    worker = None
    for words in shown():
        said = holdfast(lone, *words)
        if words[:2] == ["group", "create"]:
            assert exists(lone, group)
            worker = member(lone, "worker-1", "$share/billing/vehicle/+/trip")
        assert words[1] in ("ls", "read") or group in said or words[0] == "session", said
    assert not exists(lone, group)
    assert worker is not None and worker.closed_by_server.wait(SECONDS)
