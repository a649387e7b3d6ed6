"""`holdfast ban`: who may not connect, on any node."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from holdfast.auth.bans import check_kind, check_name
from holdfast.cli import output
from holdfast.cli.http import DEFAULT, Node, Token, call, part

app = typer.Typer(no_args_is_help=True, help="Bans: clients, users and addresses that may not connect.")
AsJson = Annotated[bool, typer.Option("--json", help="For programs: JSON instead of a table.")]
Kind = Annotated[str, typer.Argument(help="client, user or address.")]
Name = Annotated[str, typer.Argument(help="A client id, a user name, an IP address or a network such as 10.1.0.0/16.")]


@app.command("ls")
def ls(node: Node = DEFAULT, token: Token = None, json: AsJson = False) -> None:
    """Every ban in force."""
    output.table(call(node, "GET", "bans", token=token)["bans"], json)


@app.command("add")
def add(
    kind: Kind,
    name: Name,
    secs: Annotated[float | None, typer.Option(help="It ends after so long; without this, it is for good.")] = None,
    reason: Annotated[str, typer.Option(help="For whoever lists the bans; clients are not told.")] = "",
    node: Node = DEFAULT,
    token: Token = None,
    json: AsJson = False,
) -> None:
    """Let nobody of that name connect, and disconnect who is connected, on every node. Sessions stay."""
    body: dict[str, Any] = {"reason": reason} | ({} if secs is None else {"secs": secs})
    made = call(node, "PUT", _path(kind, name), body, token)
    if json:
        output.document(made)
    else:
        end = "" if made["until"] is None else f" until {made['until']}"
        print(f"{made['kind']} {made['name']} is banned{end}")


@app.command("lift")
def lift(kind: Kind, name: Name, node: Node = DEFAULT, token: Token = None, json: AsJson = False) -> None:
    """Let them connect again."""
    done = call(node, "DELETE", _path(kind, name), token=token)
    if json:
        output.document(done)
    else:
        print(f"{kind} {name} may connect again")


def _path(kind: str, name: str) -> str:
    """Checked here too: a name that is empty, or no kind at all, would be another address."""
    known = check_kind(kind)
    return f"bans/{part(known)}/{part(check_name(known, name))}"
