"""The command line: parse, call `ops`, show."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from holdfast.cli import ban, fanout, group, node, output, password, pipeline, session, vehicle
from holdfast.errors import HoldfastError

app = typer.Typer(
    name="holdfast",
    help="A durable subscription engine for fleets.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
log_app = typer.Typer(no_args_is_help=True, help="Look at and look after the log.")
app.add_typer(ban.app, name="ban")
app.add_typer(fanout.app, name="fanout")
app.add_typer(group.app, name="group")
app.add_typer(node.app, name="node")
app.add_typer(pipeline.app, name="pipeline")
app.add_typer(session.app, name="session")
app.add_typer(vehicle.app, name="vehicle")
app.add_typer(vehicle.why_app, name="why")
app.add_typer(log_app, name="log")
app.add_typer(password.app, name="password")

DEFAULT_STORE = "sqlite:///holdfast-data/holdfast.db"

Store = Annotated[
    str, typer.Option("--store", help="memory:, sqlite:///path or postgresql://…", envvar="HOLDFAST_STORE")
]
LogName = Annotated[str, typer.Argument(help="The log's name.")]
AsJson = Annotated[bool, typer.Option("--json", help="For programs: JSON instead of a table.")]


@app.command()
def demo(
    kills: Annotated[int, typer.Option(min=0, help="How often the node is killed under load.")] = 2,
    spark: Annotated[bool, typer.Option(help="Also run the pipeline.")] = True,
) -> None:
    """Vehicles, a subscriber, a group, a campaign and the pipeline around a node that is killed; then an audit."""
    from holdfast.demo import run, spark_is_there

    if spark and not spark_is_there():
        print("Spark is not installed, so the pipeline is left out: pip install 'holdfast[spark]'")
    sys.exit(run(kills, spark and spark_is_there()))


@app.command()
def serve(
    config: Annotated[Path | None, typer.Option(help="Settings file (holdfast.toml).", exists=True)] = None,
    data: Annotated[str | None, typer.Option(help="Folder for what is stored on this machine.")] = None,
    store: Annotated[str | None, typer.Option(help="Where the log is kept: sqlite:///… or postgresql://…")] = None,
    metadata: Annotated[str | None, typer.Option(help="Where cursors are kept, if not in the store: etcd://…")] = None,
    mqtt: Annotated[str | None, typer.Option(help="HOST:PORT for MQTT.")] = None,
    http: Annotated[str | None, typer.Option(help="HOST:PORT for the HTTP API.")] = None,
    node_id: Annotated[str | None, typer.Option(help="This node's name.")] = None,
    set_: Annotated[list[str] | None, typer.Option("--set", help="section.key=value, for any setting.")] = None,
) -> None:
    """Run a node: MQTT and HTTP over the log, until SIGTERM."""
    from holdfast.runtime.serve import run
    from holdfast.settings import from_environment

    named = {
        "data": data,
        "store": store,
        "metadata": metadata,
        "mqtt.listen": mqtt,
        "http.listen": http,
        "node_id": node_id,
    }
    flags = [f"{name}={value}" for name, value in named.items() if value is not None]
    if config is None and Path("holdfast.toml").exists():
        config = Path("holdfast.toml")
    run(from_environment(config, [*flags, *(set_ or [])]))


@app.command()
def sim(
    seeds: Annotated[str, typer.Option(help="FIRST:PAST, which seeds to run.")] = "0:200",
    seed: Annotated[int | None, typer.Option(help="Replay this one and print its story.")] = None,
    world: Annotated[str | None, typer.Option(help="Only one world: groups, or front (a message's path).")] = None,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="With --seed: print every effect.")] = False,
) -> None:
    """Run the machines in virtual time through loss, crashes and partitions, one seed after the other."""
    from holdfast.sim.__main__ import main as run_sim

    arguments = ["--seeds", seeds] if seed is None else ["--seed", str(seed), *(["-v"] if verbose else [])]
    sys.exit(run_sim(arguments + ([] if world is None else ["--world", world])))


@log_app.command("ls")
def log_ls(store: Store = DEFAULT_STORE, json: AsJson = False) -> None:
    """Every log of the store, with what it shards by."""
    from holdfast.store import open_log

    with open_log(store) as log:
        rows = [
            {
                "log": name,
                "shard by": by,
                "generations": len(log.generations(name)),
                "messages": sum(h.next_offset for h in log.heads(name)),
            }
            for name, by in log.logs().items()
        ]
    output.table(rows, json)


@log_app.command("show")
def log_show(name: LogName = "messages", store: Store = DEFAULT_STORE, json: AsJson = False) -> None:
    """The streams of a log: messages, bytes, oldest and newest."""
    from holdfast import ops
    from holdfast.store import open_log

    with open_log(store) as log:
        output.table(ops.streams(log, name), json)


@log_app.command("read")
def log_read(
    name: LogName = "messages",
    store: Store = DEFAULT_STORE,
    filter_: Annotated[str, typer.Option("--filter", help="Topic filter.")] = "#",
    start: Annotated[str, typer.Option(help="beginning, latest, offset:N, or a time.")] = "beginning",
    limit: Annotated[int, typer.Option(min=1, help="At most so many messages.")] = 20,
    json: AsJson = False,
) -> None:
    """Read messages, oldest first."""
    from holdfast import ops
    from holdfast.model import parse_start
    from holdfast.store import open_log

    with open_log(store) as log:
        output.table(ops.messages(log, name, filter_, parse_start(start), limit), json)


@log_app.command("seal")
def log_seal(
    name: LogName = "messages",
    store: Store = DEFAULT_STORE,
    shards: Annotated[int | None, typer.Option(min=1, help="Shards of the next generation.")] = None,
) -> None:
    """End the open generation and begin the next."""
    from holdfast.store import open_log

    with open_log(store) as log:
        opened = log.seal(name, shards)
    print(f"log {name}: generation {opened.number} is open, with {opened.shards} shards")


@log_app.command("maintain")
def log_maintain(store: Store = DEFAULT_STORE) -> None:
    """Merge small blocks, index full ones, free what was dropped: one round (a node does this by itself)."""
    from holdfast.log.retention import maintain
    from holdfast.store import open_log

    with open_log(store) as log:
        done = maintain(log)
    print(f"merged {done.merged} blocks, indexed {done.indexed}, swept {done.swept}")


def main() -> None:
    """Run the command line; an error of ours is one line, not a traceback."""
    try:
        app()
    except HoldfastError as error:
        output.fail(error)
