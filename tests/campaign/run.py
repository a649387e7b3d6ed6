"""One campaign from its seed to its verdict."""

from __future__ import annotations

import asyncio
import shutil
import tempfile
import time
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

import holdfast
from campaign import checks
from campaign.clients import Client, Publisher, Stage, Subscriber, everyone
from campaign.cluster import Cluster
from campaign.history import History
from campaign.nemesis import Fault, Nemesis, plan
from holdfast import ops
from holdfast.model import LOG, Beginning

WARM_SECONDS = 6.0
SETTLE_SECONDS = 45.0
"""How long it may take until everything is well after everything was healed."""
LAG_SECONDS = 0.5
READY_EVERY = 0.4


@dataclass(frozen=True)
class Outcome:
    seed: int
    faults: list[str]
    folder: Path
    summary: str


def has_etcd(seed: int) -> bool:
    """Every other seed keeps its metadata in etcd."""
    return seed % 2 == 1


async def campaign(seed: int, seconds: float, folder: Path, *, etcd: bool, only: list[Fault] | None = None) -> Outcome:
    """`seconds` is from the first client to the last; what is found is in the outcome, and in the folder."""
    work = Path(tempfile.mkdtemp(prefix="holdfast-campaign-"))
    cluster = Cluster(work, etcd=etcd)
    try:
        await cluster.start()
        history = await cluster.do(History, folder / "history.jsonl")
        stage = Stage(cluster, history, seed)
        tail = checks.GONE_SECONDS + 12.0
        storm = max(10.0, seconds - tail)
        planned = plan(seed, WARM_SECONDS, storm - 8.0, etcd=etcd) if only is None else only
        for fault in planned:
            history.note("nemesis", "planned", msg=str(fault))
        clients = everyone(stage, storm)
        watchers = [asyncio.create_task(_watch_ready(cluster, history)), asyncio.create_task(_watch_lag(history))]
        living = [asyncio.create_task(client.run()) for client in clients]
        try:
            await _storm(cluster, history, planned, storm, living)
            await _calm(cluster, stage, clients, living)
            events = history.events[:]  # what comes from now on may be in the log, or not
            log = await cluster.do(_log_of, cluster.url, history)
            seen = checks.Seen(events, log, await cluster.do(_sessions, cluster))
        finally:
            for task in (*living, *watchers):
                task.cancel()
            await asyncio.gather(*living, *watchers, return_exceptions=True)
            history.close()
            cluster.keep_logs(folder)
        found = await cluster.do(checks.faults, seen)
        return Outcome(seed, found, folder, _summary(seen, planned))
    finally:
        await cluster.close()
        shutil.rmtree(work, ignore_errors=True)


async def _storm(
    cluster: Cluster, history: History, planned: list[Fault], until: float, living: list[asyncio.Task[None]]
) -> None:
    nemesis = asyncio.create_task(Nemesis(cluster, history, planned).run())
    while history.now() < until and not history.full:
        for task in living:
            if task.done():
                task.result()  # a fault of the campaign's own
        await asyncio.sleep(0.2)
    await nemesis


async def _calm(cluster: Cluster, stage: Stage, clients: list[Client], living: list[asyncio.Task[None]]) -> None:
    """Everything is healed; everybody comes back, and gets what is theirs."""
    await cluster.heal()
    history = stage.history
    history.note("run", "healed all")
    stage.ending = True
    await asyncio.sleep(3.0)
    stage.publishing = False
    began = history.now()
    while unsettled := _unsettled(stage, clients):
        for task in living:
            if task.done():
                task.result()
        if history.now() > began + SETTLE_SECONDS:
            for line in unsettled[: checks.SHOWN_MAX]:
                history.note("run", "unsettled", msg=line)
            break
        await asyncio.sleep(0.2)
    # Wills and expiries of those that went last, and whatever comes that should not come any more.
    await asyncio.sleep(max(3.0, began + checks.GONE_SECONDS + 6.0 - history.now()))


def _unsettled(stage: Stage, clients: list[Client]) -> list[str]:
    """What is still missing."""
    found = []
    for client in clients:
        if isinstance(client, Publisher) and not client.settled:
            found.append(f"{client.name} waits for {[flight.msg for flight in client.out.values()][:5]}")
        if isinstance(client, Subscriber) and not client.gone and not client.name.startswith("g"):
            if not client.connected or client.subscribed_at is None:
                found.append(f"{client.name} is not connected")
                continue
            since = client.subscribed_at
            missing = [
                msg
                for msg, (topic, sent) in stage.acked.items()
                if sent > since and checks.matches(client.filter, topic) and msg not in client.seen
            ]
            if missing:
                found.append(f"{client.name} misses {len(missing)}: {missing[:5]}")
    groups: dict[str, set[str]] = {}
    for client in clients:
        if isinstance(client, Subscriber) and client.name.startswith("g"):
            groups.setdefault(client.filter, set()).update(client.seen_ever)
    for share, had in groups.items():
        began = min(c.first_subscribed for c in clients if isinstance(c, Subscriber) and c.filter == share)
        missing = [
            m
            for m, (topic, sent) in stage.acked.items()
            if sent > began and checks.matches(share, topic) and m not in had
        ]
        if missing:
            found.append(f"{share} misses {len(missing)}: {missing[:5]}")
    return found


async def _watch_ready(cluster: Cluster, history: History) -> None:
    async def watch(name: str) -> None:
        member = cluster.members[name]
        while True:
            code = await cluster.ready(member)
            history.note(name, "ready", node=name, code=code)
            await asyncio.sleep(READY_EVERY)

    async with asyncio.TaskGroup() as all_of_them:
        for name in cluster.members:
            all_of_them.create_task(watch(name))


async def _watch_lag(history: History) -> None:
    while True:
        before = time.monotonic()
        await asyncio.sleep(0.1)
        late = time.monotonic() - before - 0.1
        if late > LAG_SECONDS:
            history.note("run", "lag", secs=round(late, 2))


def _log_of(url: str, history: History) -> list[checks.Logged]:
    with holdfast.open(url) as log:
        rows = ops.messages(log, LOG, "#", Beginning(), 10_000_000)
    return [
        checks.Logged(
            row.stream,
            row.offset,
            row.topic,
            row.payload.decode(),
            datetime.fromisoformat(row.time).timestamp() - history.began_wall,
        )
        for row in rows
    ]


def _sessions(cluster: Cluster) -> dict[str, bool]:
    member = next(iter(cluster.members.values()))
    found = member.node.get("/api/v1/sessions")["sessions"]
    return {row["client_id"]: row["connected"] for row in found}


def _summary(seen: checks.Seen, planned: list[Fault]) -> str:
    kinds = sorted({fault.kind for fault in planned})
    return (
        f"{len(seen.events)} events in {seen.end:.0f} s; {len(planned)} faults ({', '.join(kinds)}); "
        f"{len(seen.sent)} published, {len(seen.acked)} acknowledged, {len(seen.log)} in the log, "
        f"{sum(map(len, seen.got.values()))} delivered, {sum(map(len, seen.connections.values()))} connections"
    )
