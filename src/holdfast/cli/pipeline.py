"""`holdfast pipeline`: the Spark jobs, each a verb, with a progress bar."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.progress import Progress as Bar
from rich.progress import SpinnerColumn, TextColumn, TimeElapsedColumn

from holdfast.errors import RequestError

app = typer.Typer(no_args_is_help=True, help="The data pipeline on Spark: log to lake, aggregated streams.")

Store = Annotated[str, typer.Option("--store", help="sqlite:///path or postgresql://…", envvar="HOLDFAST_STORE")]
Master = Annotated[str | None, typer.Option(help="Spark master; local[*] where none is given.")]
Once = Annotated[bool, typer.Option("--once", help="Take what is there now, and end.")]
DEFAULT_STORE = "sqlite:///holdfast-data/holdfast.db"


def _spark() -> Any:
    try:
        import holdfast.spark
    except ImportError as error:
        raise RequestError(
            f"the pipeline needs Spark ({error.name} is missing): pip install 'holdfast[spark]'"
        ) from error
    return holdfast.spark


def _watched(what: str, work: Callable[..., Any]) -> None:
    """Run it with a line that tells how far it has come, until it ends or SIGTERM or Ctrl-C asks it to."""
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with Bar(*columns, transient=False) as bar:
        task = bar.add_task(f"{what}: starting Spark")

        def tell(progress: Any) -> None:
            text = f"{what}: {progress.messages:,} messages in {progress.batches:,} batches, {progress.lag:,} behind"
            if progress.error:
                text += f"; {progress.error}"
            bar.update(task, description=text)

        work(tell, stop)


@app.command("lake")
def lake(
    root: Annotated[str, typer.Argument(help="Folder or URI of the lake.")],
    store: Store = DEFAULT_STORE,
    log: Annotated[list[str] | None, typer.Option(help="Which log; several times for several.")] = None,
    drop: Annotated[bool, typer.Option("--drop", help="Drop verified generations from the store at once.")] = False,
    every_seconds: Annotated[
        float, typer.Option(min=0.1, help="Gather messages this long before writing files.")
    ] = 30.0,
    once: Once = False,
    master: Master = None,
) -> None:
    """Copy the log to Parquet, continuously and exactly once; verify sealed generations there."""
    spark = _spark()
    options = spark.LakeOptions(
        store=store,
        root=root,
        logs=tuple(log or ["messages"]),
        drop=drop,
        every_seconds=every_seconds,
        once=once,
        master=master,
    )
    _watched("lake", lambda tell, stop: spark.lake(options, tell=tell, stop=stop))


@app.command("aggregate")
def aggregate(
    target: Annotated[str, typer.Argument(help="The log to make.")],
    key: Annotated[str, typer.Option(help="publisher, topic:LEVEL, json:FIELD or python:MODULE:FUNCTION.")],
    store: Store = DEFAULT_STORE,
    topics: Annotated[str | None, typer.Option(help="Topic filter.")] = None,
    where: Annotated[str | None, typer.Option(help="SQL condition.")] = None,
    partitions: Annotated[int, typer.Option(min=1, help="Fixed for the log.")] = 16,
    start: Annotated[str, typer.Option(help="beginning, latest, a time.")] = "beginning",
    rebuild: Annotated[bool, typer.Option("--rebuild", help="Make it anew, in a generation of its own.")] = False,
    once: Once = False,
    master: Master = None,
) -> None:
    """Make a log from another by a filter and a partition key, order kept per key."""
    spark = _spark()
    options = spark.AggregateOptions(
        store=store,
        target=target,
        key=key,
        topics=topics,
        where=where,
        partitions=partitions,
        start=start,
        once=once,
        master=master,
    )
    work = spark.rebuild if rebuild else spark.aggregate
    _watched("aggregate", lambda tell, stop: work(options, tell=tell, stop=stop))


@app.command("run")
def run(
    file: Annotated[Path, typer.Argument(help="TOML with [[lake]] and [[aggregate]] tables.", exists=True)],
    master: Master = None,
) -> None:
    """Keep several continuous jobs going under one session; one that fails is started again."""
    import tomllib

    spark = _spark()
    tree = tomllib.loads(file.read_text())
    jobs: list[Any] = []
    for name, kind in (("lake", spark.LakeOptions), ("aggregate", spark.AggregateOptions)):
        for table in tree.pop(name, []):
            table = {key: tuple(value) if isinstance(value, list) else value for key, value in table.items()}
            try:
                jobs.append(kind(**table))
            except TypeError as error:
                raise RequestError(f"{file}: [[{name}]]: {error}") from error
    if tree or not jobs:
        raise RequestError(f"{file} holds {sorted(tree) or 'no jobs'}; it takes [[lake]] and [[aggregate]] tables")
    _watched(
        "run", lambda tell, stop: spark.run(spark.RunOptions(jobs=tuple(jobs), master=master), tell=tell, stop=stop)
    )
