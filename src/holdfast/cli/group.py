"""`holdfast group`: shared groups of a running node."""

from __future__ import annotations

from typing import Annotated

import typer

from holdfast.cli import output
from holdfast.cli.http import DEFAULT, Node, Token, call, part

app = typer.Typer(no_args_is_help=True, help="Shared groups: who reads what, and how far behind.")

Group = Annotated[str, typer.Argument(help="NAME:FILTER, such as billing:vehicle/+/trip")]
AsJson = Annotated[bool, typer.Option("--json", help="For programs: JSON instead of a table.")]


@app.command("ls")
def ls(node: Node = DEFAULT, token: Token = None, json: AsJson = False) -> None:
    """Every declared group."""
    rows = call(node, "GET", "groups", token=token)["groups"]
    keys = ("group", "key", "order", "paused", "ack_timeout_seconds", "attempts_max")
    output.table(rows if json else [{key: row[key] for key in keys} for row in rows], json)


@app.command("show")
def show(group: Group, node: Node = DEFAULT, token: Token = None, json: AsJson = False) -> None:
    """Members, and for each stream its owner, status and lag."""
    whole = call(node, "GET", f"groups/{part(group)}", token=token)
    if json:
        output.document(whole)
        return
    lag, seconds = whole["lag"], whole["lag_seconds"]
    print(f"{whole['group']}: lag {lag:,} messages, {seconds:.1f} s; led under epoch {whole['epoch']}")
    print(f"key {whole['key']}, generations {whole['order']}{', paused' if whole['paused'] else ''}")
    output.table(whole["members"], False, title="Members")
    output.table(whole["streams"], False, title="Streams")
    if whole["skipped"]:
        output.table(whole["skipped"], False, title="Skipped: dropped before the group had read it")


@app.command("create")
def create(
    group: Group,
    start: Annotated[str, typer.Option(help="beginning, latest, offset:N, or a time.")] = "latest",
    key: Annotated[
        str, typer.Option(help="publisher, topic or message: what goes to one member, in order.")
    ] = "publisher",
    order: Annotated[str, typer.Option(help="strict or parallel generations.")] = "strict",
    ack_timeout_seconds: Annotated[float | None, typer.Option(help="Redeliver after so long.")] = None,
    attempts_max: Annotated[int | None, typer.Option(help="Set aside as dead letter after so many.")] = None,
    idle_seconds_max: Annotated[float | None, typer.Option(help="Delete it after so long without a member.")] = None,
    node: Node = DEFAULT,
    token: Token = None,
) -> None:
    """Declare a group; it persists from now on, with no member yet."""
    name, _, filter_text = group.partition(":")
    body = {
        "name": name,
        "filter": filter_text,
        "start": start,
        "key": key,
        "order": order,
        "ack_timeout_seconds": ack_timeout_seconds,
        "attempts_max": attempts_max,
        "idle_seconds_max": idle_seconds_max,
    }
    print(f"group {call(node, 'POST', 'groups', body, token)['group']} is declared")


@app.command("seek")
def seek(
    group: Group,
    to: Annotated[str, typer.Argument(help="beginning, latest, offset:N, or a time.")],
    node: Node = DEFAULT,
    token: Token = None,
) -> None:
    """Move a group to another place in the log."""
    call(node, "POST", f"groups/{part(group)}/seek", {"to": to}, token)
    print(f"group {group} goes on at {to}")


@app.command("pause")
def pause(
    group: Group,
    off: Annotated[bool, typer.Option("--off", help="Go on again.")] = False,
    node: Node = DEFAULT,
    token: Token = None,
) -> None:
    """Stop lending streams, or go on with --off."""
    call(node, "POST", f"groups/{part(group)}/pause", {"paused": not off}, token)
    print(f"group {group} {'goes on' if off else 'is paused'}")


@app.command("delete")
def delete(group: Group, node: Node = DEFAULT, token: Token = None) -> None:
    """End a group: its members are disconnected, its progress is gone for good."""
    call(node, "DELETE", f"groups/{part(group)}", token=token)
    print(f"group {group} is deleted")
