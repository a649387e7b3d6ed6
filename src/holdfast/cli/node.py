"""`holdfast node`: the nodes of a cluster, and emptying one of them."""

from __future__ import annotations

import time
from typing import Annotated

import typer

from holdfast.cli import output
from holdfast.cli.http import DEFAULT, Node, Token, call
from holdfast.errors import HoldfastError, RequestError

app = typer.Typer(no_args_is_help=True, help="The nodes of a cluster.")
AsJson = Annotated[bool, typer.Option("--json", help="For programs: JSON instead of a table.")]

LOOK_SECONDS = 0.2


@app.command("ls")
def ls(node: Node = DEFAULT, token: Token = None, json: AsJson = False) -> None:
    """Every node that is there, where its clients reach it, and which one answers."""
    found = call(node, "GET", "nodes", token=token)["nodes"]
    output.table(found if json else [{**each, "mqtt": ", ".join(each["mqtt"])} for each in found], json)


@app.command("drain")
def drain(
    to: Annotated[str, typer.Option("--to", help="The server that MQTT 5 clients are told to use instead.")] = "",
    rate: Annotated[float | None, typer.Option(min=0.01, help="Clients sent away a second.")] = None,
    stop: Annotated[bool, typer.Option("--stop", help="End the node when it is empty.")] = False,
    wait: Annotated[bool, typer.Option(help="Return only when it is empty.")] = True,
    node: Node = DEFAULT,
    token: Token = None,
) -> None:
    """Empty the node: it takes no clients, hands its groups over, then sends its clients away at a pace."""
    body = {"to": to, "clients_per_sec": rate, "stop": stop}
    state = call(node, "POST", "nodes/drain", body, token)
    print(f"{state['node']}: {state['clients']} clients are sent away")
    while wait and state["state"] != "empty":
        time.sleep(LOOK_SECONDS)
        try:
            state = call(node, "GET", "nodes/drain", token=token)
        except RequestError:
            raise
        except HoldfastError:
            if not stop:
                raise
            break  # it was empty, and has ended since we last looked
    if wait:
        print(f"{state['node']}: empty")
