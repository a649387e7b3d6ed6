"""`holdfast session`: MQTT sessions of a running node."""

from __future__ import annotations

from typing import Annotated

import typer

from holdfast.cli import output
from holdfast.cli.http import DEFAULT, Node, Token, call, part

app = typer.Typer(no_args_is_help=True, help="MQTT sessions: subscriptions, cursors and lag.")
AsJson = Annotated[bool, typer.Option("--json", help="For programs: JSON instead of a table.")]


@app.command("ls")
def ls(node: Node = DEFAULT, token: Token = None, json: AsJson = False) -> None:
    """Every session, connected or not."""
    output.table(call(node, "GET", "sessions", token=token)["sessions"], json)


@app.command("show")
def show(
    client_id: Annotated[str, typer.Argument(help="The client id.")],
    node: Node = DEFAULT,
    token: Token = None,
    json: AsJson = False,
) -> None:
    """One session: its subscriptions, how far each has come, and what was skipped."""
    whole = call(node, "GET", f"sessions/{part(client_id)}", token=token)
    if json:
        output.document(whole)
        return
    state = "connected" if whole["connected"] else "away"
    print(f"{client_id}: {state}, {whole['in_flight']} deliveries in flight, {len(whole['skipped'])} gaps recorded")
    rows = [
        {"filter": s["filter"], "qos": s["qos"], "streams": len(s["cursors"]), "lag": s["lag"]}
        for s in whole["subscriptions"]
    ]
    output.table(rows, False)


@app.command("disconnect")
def disconnect(
    client_id: Annotated[str, typer.Argument(help="The client id.")], node: Node = DEFAULT, token: Token = None
) -> None:
    """End its connection, on whichever node that is. The session stays, and its client may come back."""
    done = call(node, "POST", f"sessions/{part(client_id)}/disconnect", token=token)["disconnected"]
    print(f"{client_id}: {'disconnected' if done else 'was not connected'}")


@app.command("delete")
def delete(
    client_id: Annotated[str, typer.Argument(help="The client id.")], node: Node = DEFAULT, token: Token = None
) -> None:
    """End the session and its connection, on whichever node that is: subscriptions and cursors are gone."""
    call(node, "DELETE", f"sessions/{part(client_id)}", token=token)
    print(f"{client_id}: deleted")
