"""A Spark session that is tuned for Holdfast, quiet, and has every format registered."""

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
from holdfast.spark.java import INSTALLED_PYSPARK, cache_folder, class_archive, find_java

try:
    import pyspark
    from pyspark.sql import SparkSession
except ImportError as error:
    raise RequestError("the pipeline needs PySpark, which is not installed: pip install 'holdfast[spark]'") from error

from holdfast.spark.formats import formats
from holdfast.spark.stopping import stop_quietly
from holdfast.spark.warmup import WarmupSource, warm_up

_CHECKPOINTS = "org.apache.spark.sql.execution.streaming.checkpointing.FileSystemBasedCheckpointFileManager"

# What goes wrong in Spark reaches us as an exception; its log would only say it again, at length.
_LOGGING = """
rootLogger.level = off
rootLogger.appenderRef.stderr.ref = stderr
appender.stderr.type = Console
appender.stderr.name = stderr
appender.stderr.target = SYSTEM_ERR
appender.stderr.layout.type = PatternLayout
appender.stderr.layout.pattern = %d{HH:mm:ss} spark %p %c{1}: %m%n%ex{short}
logger.gateway.name = org.apache.spark.api.python.PythonGatewayServer
logger.gateway.level = off
"""

# Arrow checks every value it hands out for its place and for null; Spark has done both by then.
_ARROW = ["-Darrow.enable_unsafe_memory_access=true", "-Darrow.enable_null_check_for_get=false"]

# Blocks come and go by the megabyte: memory that is kept need not be asked for, and cleared, each time.
_MALLOC = {"MALLOC_MMAP_THRESHOLD_": 32 << 20, "MALLOC_TRIM_THRESHOLD_": 256 << 20, "MALLOC_TOP_PAD_": 16 << 20}

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
    master = _with_retries(master or given.get("spark.master") or "local[*]")
    java_options = [given.pop("spark.driver.extraJavaOptions", ""), "-XX:+UseParallelGC", *_ARROW]
    with _environment(master) as ours:
        java_options += ours
        settings = {**_tuned(master), **given, "spark.driver.extraJavaOptions": " ".join(java_options).strip()}
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


def _with_retries(master: str) -> str:
    """A local master gives up at a task's first failure unless it is told how many to allow."""
    if master == "local":
        return "local[1,4]"
    if master.startswith("local[") and "," not in master:
        return f"{master[:-1]},4]"
    return master


@contextmanager
def _environment(master: str) -> Iterator[list[str]]:
    """What the JVM is to find in its environment while it starts; gives the options it needs besides."""
    wanted = {"PYSPARK_PYTHON": os.environ.get("PYSPARK_PYTHON", sys.executable), "PYTHONHASHSEED": "0"}
    wanted |= {name: os.environ.get(name, str(value)) for name, value in _MALLOC.items()}
    options: list[str] = []
    if master.startswith("local"):
        wanted["SPARK_LOCAL_IP"] = "127.0.0.1"
    if "SPARK_CONF_DIR" not in os.environ:
        # An empty folder: it goes on the class path, and a class archive tolerates no other there.
        folder = cache_folder() / "conf"
        folder.mkdir(exist_ok=True)
        wanted["SPARK_CONF_DIR"] = str(folder)
        options.append(_quiet())
    if "SPARK_HOME" not in os.environ:  # with somebody's own Spark goes somebody's own Java
        java = find_java()
        wanted["JAVA_HOME"] = str(java.launcher)
        options += class_archive(java, Path(pyspark.__file__).parent)
        if _workers_are_ours(master):
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


def _workers_are_ours(master: str) -> bool:
    """Do Spark's Python workers run on this machine, in this very environment?"""
    return master.startswith("local") and os.environ.get("PYSPARK_PYTHON", sys.executable) == sys.executable


def _quiet() -> str:
    """The JVM option that has Spark say nothing but what a user must know."""
    path = cache_folder() / "log4j2.properties"
    if not path.exists() or path.read_text() != _LOGGING:
        path.write_text(_LOGGING)
    return f"-Dlog4j2.configurationFile=file:{path}"


def _tuned(master: str) -> dict[str, str]:
    settings = {
        "spark.ui.enabled": "false",
        "spark.ui.showConsoleProgress": "false",
        "spark.sql.session.timeZone": "UTC",
        "spark.sql.python.filterPushdown.enabled": "true",
        "spark.sql.streaming.checkpointFileManagerClass": _CHECKPOINTS,
        "spark.sql.streaming.stopTimeout": "30000",
        "spark.sql.execution.arrow.maxRecordsPerBatch": "20000",
        "spark.sql.adaptive.enabled": "true",
        "spark.executor.extraJavaOptions": " ".join(_ARROW),
    }
    settings |= {f"spark.executorEnv.{name}": str(value) for name, value in _MALLOC.items()}
    if master.startswith("local"):
        settings |= {
            "spark.python.unix.domain.socket.enabled": "true",
            "spark.driver.host": "127.0.0.1",
            "spark.driver.bindAddress": "127.0.0.1",
            "spark.driver.memory": "2g",
            # Rather than 200: a micro-batch would spend seconds on empty partitions.
            "spark.sql.shuffle.partitions": str(_cores(master)),
        }
    if _workers_are_ours(master):
        settings["spark.python.daemon.module"] = "holdfast.spark.daemon"
    return settings


def _cores(master: str) -> int:
    inside = master.removeprefix("local").strip("[]").split(",")[0]
    return len(os.sched_getaffinity(0)) if inside == "*" else int(inside or 1)


def _package() -> Path:
    """Holdfast itself as a zip file, for executors that do not have it installed."""
    source = Path(__file__).resolve().parent.parent.parent
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
