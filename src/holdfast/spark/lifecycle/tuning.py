"""How a session and its processes are set: quiet, quick, and made for blocks of Arrow."""

from __future__ import annotations

import os
import sys

from holdfast.spark.lifecycle.java import cache_folder

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
ARROW = ["-Darrow.enable_unsafe_memory_access=true", "-Darrow.enable_null_check_for_get=false"]

# Blocks come and go by the megabyte: memory that is kept need not be asked for, and cleared, each time.
MALLOC = {"MALLOC_MMAP_THRESHOLD_": 32 << 20, "MALLOC_TRIM_THRESHOLD_": 256 << 20, "MALLOC_TOP_PAD_": 16 << 20}


def with_retries(master: str) -> str:
    """A local master gives up at a task's first failure unless it is told how many to allow."""
    if master == "local":
        return "local[1,4]"
    if master.startswith("local[") and "," not in master:
        return f"{master[:-1]},4]"
    return master


def workers_are_ours(master: str) -> bool:
    """Do Spark's Python workers run on this machine, in this very environment?"""
    return master.startswith("local") and os.environ.get("PYSPARK_PYTHON", sys.executable) == sys.executable


def quiet_logging() -> str:
    """The JVM option that has Spark say nothing but what a user must know."""
    path = cache_folder() / "log4j2.properties"
    if not path.exists() or path.read_text() != _LOGGING:
        path.write_text(_LOGGING)
    return f"-Dlog4j2.configurationFile=file:{path}"


def tuned(master: str) -> dict[str, str]:
    settings = {
        "spark.ui.enabled": "false",
        "spark.ui.showConsoleProgress": "false",
        "spark.sql.session.timeZone": "UTC",
        "spark.sql.python.filterPushdown.enabled": "true",
        "spark.sql.streaming.checkpointFileManagerClass": _CHECKPOINTS,
        "spark.sql.streaming.stopTimeout": "30000",
        "spark.sql.execution.arrow.maxRecordsPerBatch": "20000",
        "spark.sql.adaptive.enabled": "true",
        "spark.executor.extraJavaOptions": " ".join(ARROW),
    }
    settings |= {f"spark.executorEnv.{name}": str(value) for name, value in MALLOC.items()}
    if master.startswith("local"):
        settings |= {
            "spark.python.unix.domain.socket.enabled": "true",
            "spark.driver.host": "127.0.0.1",
            "spark.driver.bindAddress": "127.0.0.1",
            "spark.driver.memory": "2g",
            # Rather than 200: a micro-batch would spend seconds on empty partitions.
            "spark.sql.shuffle.partitions": str(_cores(master)),
        }
    if workers_are_ours(master):
        settings["spark.python.daemon.module"] = "holdfast.spark.lifecycle.daemon"
    return settings


def _cores(master: str) -> int:
    inside = master.removeprefix("local").strip("[]").split(",")[0]
    return len(os.sched_getaffinity(0)) if inside == "*" else int(inside or 1)
