"""`holdfast vehicle` and `holdfast why`: one vehicle, what waits for it, and why it does not get it."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from holdfast.cli import output
from holdfast.cli.http import DEFAULT, Node, Token, call, part
from holdfast.fanout.requests import check_vin

app = typer.Typer(no_args_is_help=True, help="Vehicles: what waits for one, and what it has had.")
why_app = typer.Typer(
    no_args_is_help=True, help="Why something does not move: the one reason, and what to do about it."
)

AsJson = Annotated[bool, typer.Option("--json", help="For programs: JSON instead of a table.")]
Vin = Annotated[str, typer.Argument(help="Its VIN: the id it is sent to by.")]


@app.command("show")
def show(vin: Vin, node: Node = DEFAULT, token: Token = None, json: AsJson = False) -> None:
    """Whether it is connected, what is on its way, what waits, and how its last deliveries ended."""
    whole = call(node, "GET", f"vehicles/{part(check_vin(vin))}", token=token)
    if json:
        output.document(whole)
        return
    where = "not connected"
    if whole["connected"]:
        where = f"connected to {whole['node']}" + (f" as {whole['client_id']}" if whole["client_id"] else "")
    output.line(f"{vin}: {where}; {len(whole['waiting'])} wait")
    under_way = [{"is": "in flight", **_row(whole["in_flight"])}] if whole["in_flight"] is not None else []
    under_way += [{"is": "awaiting result", **_row(one)} for one in whole["awaiting_result"]]
    under_way += [{"is": "waiting", **_row(one)} for one in whole["waiting"]]
    if under_way:
        output.table(under_way, False)
    if whole["ended"]:
        rows = [
            {
                "campaign": _name(one),
                "ended": one["state"],
                "reason": one["reason"],
                "attempts": one["attempts"],
                "ended at": one["ended_at"],
                "result": one["result"],
            }
            for one in whole["ended"]
        ]
        output.table(rows, False, title="Ended, the newest first")


def _row(one: dict[str, Any]) -> dict[str, Any]:
    return {"campaign": _name(one), "attempts": one.get("attempts"), "until": one.get("expires") or one.get("until")}


def _name(one: dict[str, Any]) -> str:
    return f"{one['request_id']}/{one['number']}" if one.get("request_id") else f"campaign {one['campaign']}"


@app.command("retire")
def retire(vin: Vin, node: Node = DEFAULT, token: Token = None, json: AsJson = False) -> None:
    """It will never come: everything that waits for it ends as cancelled, in every campaign."""
    done = call(node, "POST", f"vehicles/{part(check_vin(vin))}/retire", token=token)
    if json:
        output.document(done)
    else:
        output.line(f"{vin}: {done['ended']} deliveries cancelled")


@why_app.command("vin")
def why_vin(vin: Vin, node: Node = DEFAULT, token: Token = None, json: AsJson = False) -> None:
    """Why this vehicle does not get its next delivery."""
    answer = call(node, "GET", f"why/vin/{part(check_vin(vin))}", token=token)
    if json:
        output.document(answer)
        return
    output.line(f"{vin}: {answer['reason'].replace('_', ' ')}: {answer['says']}")
    if answer["do"]:
        output.line(f"  {answer['do']}")


@why_app.callback()
def _why() -> None:
    """One kind of thing for now; others follow, so the kind is always named."""
