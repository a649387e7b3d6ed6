"""Starting a Spark session: one per process, with every format registered, and Holdfast itself for executors."""

from __future__ import annotations

import atexit
import os
import sys
import threading
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from holdfast.errors import RequestError
from holdfast.spark.errors import first_line
from holdfast.spark.lifecycle.java import INSTALLED_PYSPARK, cache_folder, class_archive, find_java

try:
    import pyspark
    from pyspark.sql import SparkSession
except ImportError as error:
    raise RequestError("the pipeline needs PySpark, which is not installed: pip install 'holdfast[spark]'") from error

from holdfast.spark.formats import formats
from holdfast.spark.lifecycle.stopping import stop_quietly
from holdfast.spark.lifecycle.tuning import ARROW, MALLOC, quiet_logging, tuned, with_retries, workers_are_ours
from holdfast.spark.lifecycle.warmup import WarmupSource, warm_up

_starting = threading.Lock()


def session(master: str | None = None, **conf: Any) -> SparkSession:
    """The process's Spark session, made if there is none yet.

    `master` is `local[*]` unless said otherwise; a configuration key may be given by its name with
    underscores for dots (`spark_executor_memory="2g"`), or as a mapping: `session(**{"spark.ui.enabled": True})`.
    """
    given = {_key(name): _text(value) for name, value in conf.items()}
    with _starting:
        found = SparkSession.getActiveSession()
        if found is not None:
            return _join(found, master, given)
        spark = _start(master, given)
        _register(spark)
        stop_quietly(spark, warm_up(spark))
    return spark


def _key(name: str) -> str:
    key = name if "." in name else name.replace("_", ".")
    if not key.startswith("spark."):
        raise RequestError(f"{name!r} is no Spark setting; their names begin with spark., as in spark_ui_enabled=True")
    return key


def _text(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _join(spark: SparkSession, master: str | None, given: dict[str, str]) -> SparkSession:
    """A process has one session: ask for the same or stop it first."""
    running = str(spark.sparkContext.master)
    if master is not None and _local(master) != _local(running):
        raise RequestError(f"this process has a Spark session on {running}; stop it before asking for {master}")
    for key, value in given.items():
        spark.conf.set(key, value)
    _register(spark)  # it may be somebody else's
    return spark


def _local(master: str) -> str:
    """A local master without its retry count, which we add."""
    return master.split(",")[0].rstrip("]")


def _start(master: str | None, given: dict[str, str]) -> SparkSession:
    master = with_retries(master or given.get("spark.master") or "local[*]")
    java_options = [given.pop("spark.driver.extraJavaOptions", ""), "-XX:+UseParallelGC", *ARROW]
    with _environment(master) as ours:
        java_options += ours
        settings = {**tuned(master), **given, "spark.driver.extraJavaOptions": " ".join(java_options).strip()}
        builder = SparkSession.builder.master(master).appName(given.get("spark.app.name", "holdfast"))
        for key, value in settings.items():
            builder = builder.config(key, value)
        try:
            spark = builder.getOrCreate()
        except Exception as error:
            raise RequestError(f"Spark did not start on {master}: {first_line(error)}") from error
    if not master.startswith("local"):
        spark.sparkContext.addPyFile(str(_package()))
    return spark


@contextmanager
def _environment(master: str) -> Iterator[list[str]]:
    """What the JVM is to find in its environment while it starts; gives the options it needs besides."""
    wanted = {"PYSPARK_PYTHON": os.environ.get("PYSPARK_PYTHON", sys.executable), "PYTHONHASHSEED": "0"}
    wanted |= {name: os.environ.get(name, str(value)) for name, value in MALLOC.items()}
    options: list[str] = []
    if master.startswith("local"):
        wanted["SPARK_LOCAL_IP"] = "127.0.0.1"
    if "SPARK_CONF_DIR" not in os.environ:
        # An empty folder: it goes on the class path, and a class archive tolerates no other there.
        folder = cache_folder() / "conf"
        folder.mkdir(exist_ok=True)
        wanted["SPARK_CONF_DIR"] = str(folder)
        options.append(quiet_logging())
    if "SPARK_HOME" not in os.environ:  # with somebody's own Spark goes somebody's own Java
        java = find_java()
        wanted["JAVA_HOME"] = str(java.launcher)
        options += class_archive(java, Path(pyspark.__file__).parent)
        if workers_are_ours(master):
            options.append(INSTALLED_PYSPARK)
    before = {name: os.environ.get(name) for name in wanted}
    os.environ.update(wanted)
    try:
        yield options
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def _package() -> Path:
    """Holdfast itself as a zip file, for executors that do not have it installed."""
    source = Path(__file__).resolve().parents[3]
    target = cache_folder() / f"holdfast-{os.getpid()}.zip"
    atexit.register(target.unlink, missing_ok=True)
    with zipfile.ZipFile(target, "w", zipfile.ZIP_DEFLATED) as archive:
        for package in ("holdfast", "pyspark_holdfast"):
            for path in sorted((source / package).rglob("*")):
                if path.is_file() and path.suffix in (".py", ".sql"):
                    archive.write(path, path.relative_to(source))
    return target


def _register(spark: SparkSession) -> None:
    spark.dataSource.register(WarmupSource)
    for source in formats(spark.sparkContext.defaultParallelism):
        spark.dataSource.register(source)
