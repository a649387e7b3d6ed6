"""`holdfast fanout`: send to vehicles, and watch and control what becomes of it."""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import urlencode

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

from holdfast.cli import output
from holdfast.cli.http import DEFAULT, Node, Token, call, lines, part
from holdfast.cli.ids import STDIN, Ids
from holdfast.errors import RequestError
from holdfast.fanout.requests import check_data, check_request_id, check_vin

app = typer.Typer(no_args_is_help=True, help="Fan-out: one payload to many vehicles, and its campaigns.")

AsJson = Annotated[bool, typer.Option("--json", help="For programs: JSON instead of a table.")]
RequestId = Annotated[str, typer.Argument(help="The request id, such as task_update_1.")]
Number = Annotated[
    int | None, typer.Option("--number", min=1, help="Which use of the request id; without it, the newest.")
]
Vins = Annotated[list[str] | None, typer.Option("--vin", help="Only this vehicle; again for more of them.")]
Rate = Annotated[float | None, typer.Option("--rate", help="Deliveries that begin a second, on all nodes together.")]
BytesPerSec = Annotated[float | None, typer.Option(help="Payload bytes sent a second.")]
InFlight = Annotated[int | None, typer.Option("--in-flight", help="Unanswered deliveries at a time.")]
EndAt = Annotated[str | None, typer.Option(help="When what still waits expires: a time such as 2026-11-30T08:00:00Z.")]
AbortFailed = Annotated[float | None, typer.Option(help="Cancel it when more than so many per cent have failed.")]
Waves = Annotated[
    list[str] | None,
    typer.Option("--wave", help="5% or 100, and what it must reach: 5%,acked=95,min-ended=50,pause=600,timeout=86400."),
]

WAVE_NAMES = {
    "acked": "acked_percent",
    "min-ended": "min_ended",
    "pause": "pause_secs",
    "timeout": "timeout_secs",
}
DRY_RUN_IDS = 20_000
LOOK_SECS = 1.0
ENDED = ("acked", "failed", "expired", "superseded", "cancelled")
UNDER_WAY = ("waiting", "in_flight", "awaiting_result")


@app.command("send")
def send(
    ids: Annotated[str, typer.Option("--ids", help="VINs: a text, CSV, Parquet or Arrow file, or - for stdin.")],
    data: Annotated[str, typer.Option("--data", help="What they get: a file, or - for stdin.")],
    request_id: Annotated[
        str | None, typer.Option(help="task_<type>_<number>; without it, one is made up and printed.")
    ] = None,
    priority: Annotated[int, typer.Option(min=0, max=9, help="Higher ones go first.")] = 4,
    expires: Annotated[
        str | None, typer.Option(help="Seconds from now, or a time such as 2026-11-30T08:00:00Z.")
    ] = None,
    resend: Annotated[
        str, typer.Option(help="What becomes of what waits of this request id: replace, append or ignore.")
    ] = "replace",
    key: Annotated[str | None, typer.Option(help="A repeat under the same key does nothing, for 7 days.")] = None,
    final: Annotated[bool, typer.Option("--final", help="No batch may join the campaign after this one.")] = False,
    number: Number = None,
    rate: Rate = None,
    ramp: Annotated[float | None, typer.Option(help="Seconds in which the rate rises to what --rate says.")] = None,
    bytes_per_sec: BytesPerSec = None,
    in_flight: InFlight = None,
    wave: Waves = None,
    start_at: Annotated[str | None, typer.Option(help="Not before this time.")] = None,
    end_at: EndAt = None,
    window: Annotated[
        list[str] | None, typer.Option(help="Only at this time of the day, UTC: 22:00-05:00, or 22:00-05:00@6,7.")
    ] = None,
    abort_failed: AbortFailed = None,
    result: Annotated[bool, typer.Option("--result", help="Success is a result that says so, not a PUBACK.")] = False,
    paused: Annotated[bool, typer.Option("--paused", help="It waits for `holdfast fanout resume`.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what it would meet; send nothing.")] = False,
    node: Node = DEFAULT,
    token: Token = None,
    json: AsJson = False,
) -> None:
    """Send data to vehicles, once each: those that are offline get it when they come."""
    from holdfast.sending import send as send_all

    if ids == data == STDIN:
        raise RequestError("--ids and --data cannot both be -")
    payload = _read(data)
    check_data(payload)
    name = check_request_id(request_id or f"task_send_{int(time.time()) % 1_000_000_000}")
    asked = {
        "number": number,
        "rate_per_sec": rate,
        "ramp_secs": ramp,
        "bytes_per_sec": bytes_per_sec,
        "in_flight_max": in_flight,
        "waves": [_wave(text) for text in wave or ()],
        "start_at": start_at,
        "end_at": end_at,
        "windows": [_window(text) for text in window or ()],
        "abort_failed_percent": abort_failed,
        "result": result,
        "paused": paused,
    }
    campaign = {option: value for option, value in asked.items() if value not in (None, False, [])}
    with Ids(ids) as source:
        if dry_run:
            _dry_run(source, name, check_data(payload).hex(), node, token, json)
            return
        with _progress(source, f"sending {name}") as counted:
            done = send_all(
                f"http://{node}",
                counted,
                name,
                payload,
                token=token,
                expires=_expires(expires),
                priority=priority,
                resend=resend,
                key=key,
                final=final,
                campaign=campaign,
            )
    if json:
        output.document(done._asdict())
        return
    what = "was sent before, under this key" if done.repeated else "is sent"
    began = "begins" if done.began else "joins"
    output.line(f"{done.request_id} {what}: {done.accepted:,} ids; it {began} campaign {done.request_id}/{done.number}")


def _read(path: str) -> bytes:
    try:
        return sys.stdin.buffer.read() if path == STDIN else Path(path).read_bytes()
    except OSError as error:
        raise RequestError(f"cannot read data from {path}: {error.strerror}") from error


def _expires(text: str | None) -> float | str | None:
    with suppress(ValueError):
        return None if text is None else float(text)
    return text


def _wave(text: str) -> dict[str, Any]:
    """5%,acked=95,… or 100,…"""
    size, *more = text.split(",")
    found: dict[str, Any] = {}
    try:
        if size.endswith("%"):
            found["percent"] = float(size[:-1])
        else:
            found["vehicles"] = int(size)
        for each in more:
            name, _, value = each.partition("=")
            found[WAVE_NAMES[name]] = int(value) if name == "min-ended" else float(value)
    except (KeyError, ValueError) as error:
        takes = "5% or 100, then acked=, min-ended=, pause=, timeout="
        raise RequestError(f"--wave got {text!r}; it takes {takes}, with commas between them") from error
    return found


def _window(text: str) -> dict[str, Any]:
    match = re.fullmatch(r"(\d\d:\d\d)-(\d\d:\d\d)(?:@([1-7](?:,[1-7])*))?", text)
    if match is None:
        raise RequestError(f"--window got {text!r}; it takes 22:00-05:00, or 22:00-05:00@6,7 (1: Monday)")
    days = [int(day) for day in match[3].split(",")] if match[3] else []
    return {"begin": match[1], "end": match[2]} | ({"days": days} if days else {})


@contextmanager
def _progress(source: Ids, title: str) -> Iterator[Iterable[str]]:
    """The ids, counted on a bar for whoever looks on."""
    console = Console(stderr=True)
    with Progress(
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        TaskProgressColumn(),
        TextColumn("{task.fields[ids]:,} ids"),
        TimeRemainingColumn(),
        console=console,
        transient=True,
        disable=not console.is_terminal,
    ) as bar:
        task = bar.add_task(output.clean(title), total=None, ids=0)

        def counted() -> Iterator[str]:
            count = 0
            for count, vin in enumerate(source, 1):
                yield vin
                if count % 1_000 == 0:
                    bar.update(task, total=source.total, completed=source.done, ids=count)
            bar.update(task, total=source.total, completed=source.done, ids=count)

        yield counted()


def _dry_run(source: Ids, name: str, sha1: str, node: str, token: str | None, json: bool) -> None:
    found = {"ids": 0, "repeated": 0, "connected": 0, "offline": 0, "overlapping": 0}
    seen: set[str] = set()
    some: list[str] = []

    def ask() -> None:
        if some:
            body = {"request_id": name, "ids": some, "data_sha1": sha1}
            for field, count in call(node, "POST", "fanout/dry-run", body, token).items():
                found[field] += count
            some.clear()

    with _progress(source, "looking") as counted:
        for vin in counted:
            if vin in seen:
                found["repeated"] += 1
                continue
            seen.add(check_vin(vin))
            some.append(vin)
            if len(some) >= DRY_RUN_IDS:
                ask()
        ask()
    if not found["ids"]:
        raise RequestError("ids: expected at least one, got none")
    if json:
        output.document(found)
        return
    output.line(f"{name}: {found['ids']:,} vehicles; nothing was sent")
    output.line(f"  connected to this node:           {found['connected']:,}")
    output.line(f"  not connected to it:              {found['offline']:,}")
    output.line(f"  something goes to them already:   {found['overlapping']:,}")
    output.line(f"  ids that were in the file before: {found['repeated']:,}")


# -- seeing ------------------------------------------------------------------------------------------------------------


@app.command("ls")
def ls(
    state: Annotated[
        list[str] | None, typer.Option(help="running, paused, cancelled or closed; again for more of them.")
    ] = None,
    limit: Annotated[int, typer.Option(min=1, max=1_000, help="At most so many.")] = 50,
    node: Node = DEFAULT,
    token: Token = None,
    json: AsJson = False,
) -> None:
    """Campaigns, the newest first."""
    query = urlencode([("limit", limit), *(("state", one) for one in state or ())])
    found = call(node, "GET", f"fanout?{query}", token=token)["campaigns"]
    if json:
        output.table(found, True)
        return
    output.table([_campaign_row(one) for one in found], False)


def _campaign_row(one: Mapping[str, Any]) -> dict[str, Any]:
    counts = one["counts"]
    return {
        "campaign": f"{one['request_id']}/{one['number']}",
        "state": one["state"],
        "targets": one["targets"],
        "waiting": counts["waiting"],
        "in flight": counts["in_flight"] + counts["awaiting_result"],
        "acked": counts["acked"],
        "failed": counts["failed"],
        "other ends": counts["expired"] + counts["superseded"] + counts["cancelled"],
        "last batch": one["batch_at"],
        "reason": one["reason"],
    }


@app.command("show")
def show(
    request_id: RequestId, number: Number = None, node: Node = DEFAULT, token: Token = None, json: AsJson = False
) -> None:
    """One campaign: where its deliveries are, why some failed, and what it was asked for."""
    _shown(call(node, "GET", _path(request_id, number), token=token), json)


def _shown(whole: Mapping[str, Any], json: bool) -> None:
    if json:
        output.document(whole)
        return
    output.line(_headline(whole))
    output.table([whole["counts"]], False)
    if whole["failures"]:
        rows = [{"failed because": reason, "vehicles": count} for reason, count in whole["failures"].items()]
        output.table(rows, False)
    if "wave" in whole:
        wave = whole["wave"]
        sizes = ", ".join(f"{size:,}" for size in wave["sizes"]) or "not cut yet"
        output.line(f"wave {wave['now']} of {wave['of']}; vehicles in each: {sizes}")
    if whole["repeated"]:
        output.line(f"{whole['repeated']:,} ids were asked for again, and have their delivery already")
    for name, value in whole["options"].items():
        output.line(f"{name}: {value}")


def _headline(whole: Mapping[str, Any]) -> str:
    reason = f" ({whole['reason']})" if whole["reason"] else ""
    joins = "takes more batches" if whole["open"] else "takes no more batches"
    return f"{whole['request_id']}/{whole['number']}: {whole['state']}{reason}, {whole['targets']:,} targets, {joins}"


@app.command("watch")
def watch(
    request_id: RequestId,
    number: Number = None,
    until_done: Annotated[
        bool, typer.Option("--until-done", help="End when every delivery has ended, closed or not.")
    ] = False,
    node: Node = DEFAULT,
    token: Token = None,
) -> None:
    """Follow a campaign until it is closed. Ctrl-C ends the watching only."""
    path = _path(request_id, number)
    whole = call(node, "GET", path, token=token)
    path = _path(request_id, whole["number"])  # this one, whatever comes after it
    console = Console()
    try:
        with Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[counts]}", markup=False),
            console=console,
            disable=not console.is_terminal,
        ) as bar:
            task = bar.add_task("", total=None, counts="")
            before = ""
            while True:
                counts = whole["counts"]
                said = ", ".join(f"{count:,} {name.replace('_', ' ')}" for name, count in counts.items() if count)
                title = output.clean(f"{whole['request_id']}/{whole['number']} {whole['state']}")
                ended = sum(counts[name] for name in ENDED)
                bar.update(task, description=title, total=whole["targets"], completed=ended, counts=said)
                if not console.is_terminal and said != before:
                    print(f"{title}: {said}", flush=True)
                before = said
                if whole["state"] == "closed" or (until_done and not any(counts[name] for name in UNDER_WAY)):
                    break
                time.sleep(LOOK_SECS)
                whole = call(node, "GET", path, token=token)
    except KeyboardInterrupt:
        output.line(f"{whole['request_id']}/{whole['number']} goes on")
        return
    output.line(_headline(whole))


@app.command("deliveries")
def deliveries(
    request_id: RequestId,
    number: Number = None,
    state: Annotated[
        list[str] | None,
        typer.Option(
            help=f"{', '.join(ENDED)} (again for more of them); or one of waiting, in_flight, awaiting_result."
        ),
    ] = None,
    reason: Annotated[str | None, typer.Option(help="Only those that ended for this reason.")] = None,
    after: Annotated[str, typer.Option(help="Behind this VIN: the last one of the page before.")] = "",
    limit: Annotated[int, typer.Option(min=1, max=10_000, help="At most so many.")] = 100,
    ndjson: Annotated[bool, typer.Option("--ndjson", help="All of them, a line of JSON each.")] = False,
    node: Node = DEFAULT,
    token: Token = None,
    json: AsJson = False,
) -> None:
    """Deliveries that have ended, by VIN; or those that are at one place on their way."""
    query: list[tuple[str, Any]] = [("after", after), *(("state", one) for one in state or ())]
    query += [("reason", reason)] if reason is not None else []
    query += [("format", "ndjson")] if ndjson else [("limit", limit)]
    path = f"{_path(request_id, number)}/deliveries?{urlencode(query)}"
    if ndjson:
        for line in lines(node, path, token):
            sys.stdout.buffer.write(line)
        sys.stdout.flush()
        return
    found = call(node, "GET", path, token=token)
    output.table(found["deliveries"], json)
    if "next" in found and not json:
        output.line(f"there are more: --after {found['next']}")


# -- doing -------------------------------------------------------------------------------------------------------------


@app.command("pause")
def pause(
    request_id: RequestId, number: Number = None, node: Node = DEFAULT, token: Token = None, json: AsJson = False
) -> None:
    """Nothing more is sent of it; what is in flight may still be answered."""
    _told(_order(request_id, number, "pause", None, node, token), json)


@app.command("resume")
def resume(
    request_id: RequestId, number: Number = None, node: Node = DEFAULT, token: Token = None, json: AsJson = False
) -> None:
    """Go on with a campaign that is paused."""
    _told(_order(request_id, number, "resume", None, node, token), json)


@app.command("cancel")
def cancel(
    request_id: RequestId,
    number: Number = None,
    vin: Vins = None,
    node: Node = DEFAULT,
    token: Token = None,
    json: AsJson = False,
) -> None:
    """End what waits of it, for all vehicles or for some."""
    _told(_order(request_id, number, "cancel", _vins(vin), node, token), json, "ended")


@app.command("retry")
def retry(
    request_id: RequestId,
    number: Number = None,
    vin: Vins = None,
    node: Node = DEFAULT,
    token: Token = None,
    json: AsJson = False,
) -> None:
    """New deliveries for those that ended without being acked: all vehicles, or some."""
    _told(_order(request_id, number, "retry", _vins(vin), node, token), json, "retried")


@app.command("advance")
def advance(
    request_id: RequestId, number: Number = None, node: Node = DEFAULT, token: Token = None, json: AsJson = False
) -> None:
    """The next wave, whatever the counts are."""
    _told(_order(request_id, number, "advance", None, node, token), json)


@app.command("edit")
def edit(
    request_id: RequestId,
    number: Number = None,
    rate: Rate = None,
    bytes_per_sec: BytesPerSec = None,
    in_flight: InFlight = None,
    end_at: EndAt = None,
    abort_failed: AbortFailed = None,
    wave: Waves = None,
    final: Annotated[bool, typer.Option("--final", help="No batch may join it from now on.")] = False,
    node: Node = DEFAULT,
    token: Token = None,
    json: AsJson = False,
) -> None:
    """Change what is given; the rest stays. Of waves, what they must reach: there are as many as there were."""
    asked = {
        "rate_per_sec": rate,
        "bytes_per_sec": bytes_per_sec,
        "in_flight_max": in_flight,
        "end_at": end_at,
        "abort_failed_percent": abort_failed,
        "waves": [_wave(text) for text in wave] if wave else None,
        "final": final or None,
    }
    body = {name: value for name, value in asked.items() if value is not None}
    if not body:
        raise RequestError("there is nothing to change; `holdfast fanout edit --help` says what can be")
    _told(_order(request_id, number, "edit", body, node, token), json)


@app.command("gc")
def gc(node: Node = DEFAULT, token: Token = None, json: AsJson = False) -> None:
    """Remove what is old now, instead of when it is next looked for."""
    done = call(node, "POST", "fanout/collect", token=token)
    if json:
        output.document(done)
    else:
        output.line(f"{done['removed']:,} rows removed")


def _path(request_id: str, number: int | None) -> str:
    path = f"fanout/{part(check_request_id(request_id))}"
    return path if number is None else f"{path}/{number}"


def _vins(vins: list[str] | None) -> dict[str, Any] | None:
    return {"vins": [check_vin(vin) for vin in vins]} if vins else None


def _order(request_id: str, number: int | None, verb: str, body: Any, node: str, token: str | None) -> dict[str, Any]:
    done: dict[str, Any] = call(node, "POST", f"{_path(request_id, number)}/{verb}", body, token)
    return done


def _told(whole: Mapping[str, Any], json: bool, counted: str = "") -> None:
    if json:
        output.document(whole)
        return
    output.line(_headline(whole) + (f"; {whole[counted]:,} {counted}" if counted in whole else ""))
